"""Runs that break off and resume: the same run to the bit, its time, and refusals that say why."""

import errno
import os
import signal
from copy import deepcopy
from functools import cache
from itertools import count
from pkgutil import resolve_name
from unittest import mock

import pytest
import small_run
import torch
from small_run import brief, kill, logs_of, losses_of, read_events, signalled

import train_gpt
from claims.logs import read_runs
from runtime.checkpoint import FINAL, MODEL, STATE, Snapshot, checkpoints, load, load_final, save
from runtime.registry import REGISTRY, read_registry
from runtime.warmup import same_bits

pytestmark = pytest.mark.usefixtures("two_layers", "kept_state")

EVERY = {"checkpoint_every": 2, "keep_model": "on"}
KILL, TERM = signal.SIGKILL, signal.SIGTERM
RICH = {"recipe": "record89", "adam_accum_steps": 2}  # windows grow after steps 4 and 7


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two shards; a run passes from one to the other after step 7."""
    return small_run.write_data(tmp_path_factory.mktemp("data"), train_documents=56)


@pytest.fixture(scope="module", autouse=True)
def _noise():
    """Training draws random numbers, as dropout would."""
    losses = train_gpt.Trainer.losses

    def noisy(trainer, batch):
        train_loss, next_token_loss = losses(trainer, batch)
        return train_loss * (0.5 + torch.rand(())), next_token_loss

    with mock.patch.object(train_gpt.Trainer, "losses", noisy):
        yield


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The folder of the runs that nothing interrupts, with these settings, made once."""

    @cache
    def whole(**changed):
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("whole")
        outcome = brief(data, folder, keep_model="on", **changed)
        assert outcome.code == 0, outcome.err
        return folder

    return whole


def break_off(number, moment, data, folder, **changed):
    """Runs that a signal ends at this moment, SIGKILL once what was saved is on the disk."""

    def doomed():
        return brief(data, folder, {moment: signalled(number)}, **EVERY | changed)

    if number == KILL:
        kill(doomed)
    else:
        assert doomed().code == 128 + number


def resume(data, folder, **changed):
    """Resume the runs to their end; returns what they print."""
    outcome = brief(data, folder, **EVERY | {"resume": "auto"} | changed)
    assert outcome.code == 0, outcome.err
    return outcome.out


def runs_in(folder):
    """The segments of each run, the runs by their seeds."""
    by_seed = {}
    for path in logs_of(folder):
        if path.stat().st_size == 0:  # killed before its first line
            continue
        by_seed.setdefault(read_events(path)[0]["seed"], []).append(path)
    return [by_seed[seed] for seed in sorted(by_seed)]


def run_folder(folder, number=0):
    return folder / "checkpoints" / runs_in(folder)[number][0].stem


def assert_same(folder, reference):
    """All losses and final models, and all that the last run could resume from, to the bit."""
    ours, theirs = runs_in(folder), runs_in(reference)
    assert len(ours) == len(theirs)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert losses_of(*mine) == losses_of(*other)
        assert len(losses_of(*mine)[0]) == small_run.BRIEF_STEPS
        finals = [run_folder(each, number) / FINAL for each in (folder, reference)]
        assert same_bits(*(load_final(final)[0] for final in finals))
    kept = [torch.load(each / "checkpoints" / "last_state.pt") for each in (folder, reference)]
    assert same_bits(*kept)


def resumed(folder):
    return read_events(*logs_of(folder), kind="resume")


# ---- The same run


@pytest.mark.parametrize(("number", "moment", "changed"), [
    (KILL, 1, RICH),  # before the first checkpoint
    (TERM, 3, RICH | {"checkpoint_every": 0}),  # where the window grows, and gradients are pending
    (signal.SIGINT, 7, RICH),  # where the shard ends
    (KILL, 8, {"recipe": "adamw", "checkpoint_every": 3}),
    (TERM, 7, RICH | {"dtype": "bfloat16", "biases": "on"}),
    (KILL, 7, RICH | {"micro_batch": 8, "adam_accum_steps": 3}),
    (TERM, 5, {"optimizer": "torch_muon", "checkpoint_every": 0}),
    (KILL, 7, {"recipe": "adamw", "optimizer": "torch_adamw", "matrix_lr": 0.002}),
    (KILL, 9, RICH | {"stages": "growing", "bigram_rows": 2, "xsa": "on"}),
    pytest.param(TERM, 5, {"recipe": "adamw", "compile": "on"}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_a_run_that_broke_off_resumes_to_the_bit(
    number, moment, changed, data, whole, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    settings = {name: value for name, value in changed.items() if name != "checkpoint_every"}
    break_off(number, moment, data, tmp_path, **changed)
    torch.manual_seed(0 if moment == 1 else 99)  # what is saved, is restored
    resume(data, tmp_path, **changed)
    assert_same(tmp_path, whole(**settings))
    (event,) = resumed(tmp_path)
    assert event["from_step"] % changed.get("adam_accum_steps", 1) == 0
    if number != KILL:  # no step is done twice
        assert event["from_step"] >= moment


def test_training_on_does_not_change_a_snapshot_that_waits(data, tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr("runtime.checkpoint.save", lambda folder, snapshot, announce: taken.append(
        (snapshot, deepcopy(snapshot))))  # fmt: skip
    brief(data, tmp_path, checkpoint_every=2, **RICH)
    assert len(taken) > 1
    for snapshot, copied in taken:
        assert same_bits(snapshot._asdict(), copied._asdict())
    assert not same_bits(taken[0][0].optim, taken[1][0].optim), "else there would be nothing to see"


@pytest.fixture(scope="module")
def much_interrupted(data, tmp_path_factory):
    """Broken off five times: killed before and after checkpoints, stopped, in its validations."""
    folder, changed = tmp_path_factory.mktemp("much"), {"checkpoint_every": 3}
    break_off(KILL, 1, data, folder, **changed)
    for number, moment in ((TERM, 1), (KILL, 5), (TERM, 6), (KILL, "validate 10")):
        break_off(number, moment, data, folder, resume="auto", **changed)
    resume(data, folder, **changed)
    return folder


def test_a_run_that_broke_off_many_times_is_the_run(much_interrupted, whole):
    assert_same(much_interrupted, whole())
    assert [event["from_step"] for event in resumed(much_interrupted)] == [0, 2, 3, 7, 9]
    headers = [read_events(path)[0] for path in logs_of(much_interrupted)]
    assert [header.get("segment") for header in headers] == [None, 2, 3, 4, 5, 6]
    entries = read_registry(much_interrupted / REGISTRY)
    words = [entry["event"] + entry.get("status", "") for entry in entries]
    assert words == ["start", "resume", "endinterrupted", "resume", "resume", "endinterrupted",
                     "resume", "resume", "enddone"]  # fmt: skip
    assert len({entry["run_id"] for entry in entries}) == 1


def test_times_never_fall_and_lost_steps_stay_on_the_clock(much_interrupted):
    events = read_events(*logs_of(much_interrupted))
    for name in ("t_ms", "train_time_ms"):
        times = [event[name] for event in events if name in event]
        assert times == sorted(times), name
    lost = [event["ms"] for event in events if event.get("name") == "lost"]
    assert [ms > 0.05 for ms in lost] == [True, False, True, False, True]
    (run,) = read_runs(logs_of(much_interrupted)[0])  # without the steps that were done again
    charged = sum(phase.ms for phase in run.phases if phase.timed)
    assert charged == pytest.approx(run.train_time_ms, abs=1.0)


@pytest.mark.parametrize("moment", [
    "runtime.log.append", "runtime.log.register", "runtime.checkpoint.remove",
])  # fmt: skip
def test_a_kill_in_the_middle_of_writing_is_survived(moment, data, whole, tmp_path):
    """At the third call, in the second run or the second checkpoint."""
    calls, real = count(1), resolve_name(moment)

    def die_at_the_third(*arguments, **named):
        if next(calls) == 3:
            os.kill(os.getpid(), KILL)
        return real(*arguments, **named)

    with mock.patch(moment, die_at_the_third):
        kill(lambda: brief(data, tmp_path, **EVERY, trials=2))
    resume(data, tmp_path, trials=2)
    assert_same(tmp_path, whole(trials=2))


# ---- Which runs are resumed


def test_auto_skips_what_is_done_and_resumes_what_broke_off(data, whole, tmp_path):
    def die_in_the_second(run):
        if run.plan.seed == 1:
            signalled(KILL)(run)

    kill(lambda: brief(data, tmp_path, {6: die_in_the_second}, **EVERY, trials=3))
    done = runs_in(tmp_path)[0][0].read_bytes()
    assert "seed 0 is done" in resume(data, tmp_path, trials=3)
    assert runs_in(tmp_path)[0][0].read_bytes() == done
    assert [len(paths) for paths in runs_in(tmp_path)] == [1, 2, 1]
    assert_same(tmp_path, whole(trials=3))
    before = {path: path.read_bytes() for path in logs_of(tmp_path)}
    resume(data, tmp_path, trials=3)
    assert {path: path.read_bytes() for path in logs_of(tmp_path)} == before


@pytest.mark.parametrize(("what", "said"), [
    ("setting", "--adam-lr 0.014 -> 0.2"), ("source", "source_sha256 "), ("done", ""),
])  # fmt: skip
def test_auto_leaves_a_run_that_is_another_one_and_says_how_it_differs(
    what, said, data, tmp_path, monkeypatch
):
    if what == "done":
        assert brief(data, tmp_path, **EVERY).code == 0
    else:
        break_off(TERM, 2, data, tmp_path)
    if what == "source":
        (tmp_path / "train_gpt.py").write_text("# another source")
        monkeypatch.setattr(train_gpt, "SOURCE", tmp_path)
    out = resume(data, tmp_path, **{} if what == "source" else {"adam_lr": 0.2})
    assert (f"is unfinished, but it differs: {said}" in out) == (what != "done")
    assert len(logs_of(tmp_path)) == 2
    assert resumed(tmp_path) == []


# ---- Refusals


@pytest.fixture
def broken(data, tmp_path):
    """The folder of the checkpoints of a run that broke off after step 3."""
    break_off(TERM, 2, data, tmp_path / "logs")
    return run_folder(tmp_path / "logs")


def refusal(data, broken, **changed):
    """What is said of a resume that is refused and leaves all files as they were."""
    logs = broken.parents[1]
    before = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    outcome = brief(data, logs, **EVERY | {"resume": "auto"} | changed)
    assert outcome.code == 2
    after = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    assert {path for path in before if before[path] != after.get(path)} == set()
    return outcome.err


def test_a_checkpoint_with_other_weights_and_their_checksums_is_refused(data, tmp_path):
    break_off(TERM, 4, data, tmp_path, checkpoint_every=0)
    (path,) = checkpoints(run_folder(tmp_path))
    model, optim, state = load(path)
    save(path.parent, Snapshot({name: weight + 1 for name, weight in model.items()}, optim, state))
    assert "has no such checkpoint" in refusal(data, path.parent, checkpoint_every=0)


def test_a_run_without_a_whole_checkpoint_or_its_folder_is_refused(data, broken, tmp_path):
    other = str(tmp_path / "other")
    assert f"saved in {broken.parent}" in refusal(data, broken, checkpoint_dir=other)
    for path in checkpoints(broken):
        (path / STATE).unlink()
    assert "no usable checkpoint" in refusal(data, broken)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_resumed(data, broken, whole):
    before, newest = checkpoints(broken)
    content = bytearray((newest / MODEL).read_bytes())
    content[-1] ^= 1
    (newest / MODEL).write_bytes(content)
    assert f"warning: {newest / MODEL} has SHA-256" in resume(data, broken.parents[1])
    assert resumed(broken.parents[1])[0]["checkpoint"] == before.name
    assert_same(broken.parents[1], whole())


def test_a_log_that_was_changed_after_its_process_ended_is_refused(data, broken):
    (log,) = logs_of(broken.parents[1])
    content = log.read_bytes()
    log.write_bytes(content.replace(b'"train_loss": 4.', b'"train_loss": 3.', 1))
    assert log.read_bytes() != content
    assert f"{log} was changed after its process ended" in refusal(data, broken)


def test_a_run_whose_log_disk_was_full_to_its_end_resumes_where_the_log_ends(
    data, whole, tmp_path, monkeypatch
):
    def fill(run):
        def full(descriptor, lines, sync=False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        small_run.wait_for_writer(run)
        monkeypatch.setattr("runtime.log.append", full)

    outcome = brief(data, tmp_path, {5: fill}, **EVERY)
    assert (outcome.code, "its last lines are lost" in outcome.err) == (2, True)
    monkeypatch.undo()
    resume(data, tmp_path)
    (event,) = resumed(tmp_path)
    assert event["from_step"] == 4, "the last checkpoint that the log names"
    assert_same(tmp_path, whole())
