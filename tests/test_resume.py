"""Runs that break off and go on, with a trainer of eight numbers: the same run, and its time."""

import errno
import os
import signal
from functools import cache
from itertools import count
from pkgutil import resolve_name
from unittest import mock

import pytest
import stub_trainer
from stub_trainer import STEPS, in_child, kill, logs_of, losses_of, read_events, run, signalled

from runtime.checkpoint import FINAL, MODEL, STATE, Snapshot, checkpoints, load, load_final, save
from runtime.errors import LogError, Refused
from runtime.registry import REGISTRY, read_registry
from runtime.warmup import same_bits

EVERY = {"checkpoint_every": 2, "keep_model": True}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of the runs that nothing interrupts, made once."""

    @cache
    def whole(**changed):
        folder = tmp_path_factory.mktemp("whole")
        assert run(folder, keep_model=True, **changed) == 0
        return folder

    return whole


def stop(folder, moment, **changed):
    """A run that SIGTERM breaks off."""
    assert run(folder, {moment: signalled(signal.SIGTERM)}, **EVERY | changed) == 143


def resume(folder, **changed):
    """Go on to the end."""
    assert run(folder, **EVERY | {"resume": "auto"} | changed) == 0


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


def saved(folder):
    return checkpoints(run_folder(folder))


def assert_same(folder, reference):
    """Losses of all steps of all runs, and the models that they end with, to the bit."""
    ours, theirs = runs_in(folder), runs_in(reference)
    assert len(ours) == len(theirs)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert losses_of(*mine) == losses_of(*other)
        assert len(losses_of(*mine)[0]) == STEPS
        finals = [run_folder(each, number) / FINAL for each in (folder, reference)]
        assert same_bits(*(load_final(final)[0] for final in finals))


def resumed(folder):
    return read_events(*logs_of(folder), kind="resume")


# ---- The same run


@pytest.fixture(scope="module")
def much_interrupted(tmp_path_factory):
    """Broken off five times: killed before and after checkpoints, stopped, in its validations."""
    folder = tmp_path_factory.mktemp("much")
    changed = {"checkpoint_every": 3, "keep_model": True}
    kill(folder, 2, **changed)
    for how, moment in ((stop, 2), (kill, 6), (stop, 7), (kill, "validate 10")):
        how(folder, moment, resume="auto", **changed)
    resume(folder, **changed)
    return folder


def test_a_run_that_broke_off_many_times_is_the_run(much_interrupted, whole):
    assert_same(much_interrupted, whole())
    assert [event["from_step"] for event in resumed(much_interrupted)] == [0, 2, 3, 7, 9]
    headers = [read_events(path)[0] for path in logs_of(much_interrupted)]
    assert [header.get("segment") for header in headers] == [None, 2, 3, 4, 5, 6]


def test_the_registry_knows_of_each_resume_and_each_end(much_interrupted):
    entries = read_registry(much_interrupted / REGISTRY)
    words = [entry["event"] + entry.get("status", "") for entry in entries]
    assert words == ["start", "resume", "endinterrupted", "resume", "resume", "endinterrupted",
                     "resume", "resume", "enddone"]  # fmt: skip
    assert len({entry["run_id"] for entry in entries}) == 1


def test_times_never_fall_through_all_segments(much_interrupted):
    events = read_events(*logs_of(much_interrupted))
    for name in ("t_ms", "train_time_ms"):
        times = [event[name] for event in events if name in event]
        assert times == sorted(times), name


def test_lost_steps_stay_on_the_clock_and_timed_phases_sum_up(much_interrupted):
    """What stands of a segment is what comes before the first step that a later one redoes."""
    standing, shown, lost = [], 0.0, []
    for path in logs_of(much_interrupted):
        header, *events = read_events(path)
        after = header.get("after_step", 0)
        for place, event in enumerate(standing):
            if event["event"] in ("step", "val") and event["step"] > after:
                standing = standing[:place]
                break
        if path.suffixes[0] != ".jsonl":
            charged = sum(event["ms"] for event in standing if event.get("timed"))
            lost.append(next(event["ms"] for event in events if event.get("name") == "lost"))
            assert charged + lost[-1] == pytest.approx(shown, abs=1.0)
        standing += events
        shown = max([shown, *(event.get("train_time_ms", 0.0) for event in events)])
    assert [ms > 0.05 for ms in lost] == [True, False, True, False, True]
    charged = sum(event["ms"] for event in standing if event.get("timed"))
    assert charged == pytest.approx(standing[-1]["train_time_ms"], abs=5.0)


@pytest.mark.parametrize("moment", [
    "runtime.log.append", "runtime.log.register", "runtime.checkpoint.remove",
])  # fmt: skip
def test_a_kill_in_the_middle_of_writing_is_survived(moment, whole, tmp_path):
    """At the third call, in the second run or the second checkpoint."""
    calls, real = count(1), resolve_name(moment)

    def die_at_the_third(*arguments, **named):
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    with mock.patch(moment, die_at_the_third):
        assert in_child(lambda: run(tmp_path, **EVERY, trials=2)) == -signal.SIGKILL
    resume(tmp_path, trials=2)
    assert_same(tmp_path, whole(trials=2))


# ---- Trials


def test_auto_skips_what_is_done_and_goes_on_with_what_broke_off(whole, tmp_path, capsys):
    three = {"trials": 3}

    def die(trainer, step):
        if trainer.run.plan.seed == 1:
            stub_trainer.send(trainer.run, signal.SIGKILL)
        trainer.at[7] = die

    assert in_child(lambda: run(tmp_path, {7: die}, **EVERY | three)) == -signal.SIGKILL
    done = runs_in(tmp_path)[0][0].read_bytes()
    resume(tmp_path, **three)
    assert "seed 0 is done" in capsys.readouterr().out
    assert runs_in(tmp_path)[0][0].read_bytes() == done
    assert [len(paths) for paths in runs_in(tmp_path)] == [1, 2, 1]
    assert_same(tmp_path, whole(**three))
    before = {path: path.read_bytes() for path in logs_of(tmp_path)}
    resume(tmp_path, **three)
    assert {path: path.read_bytes() for path in logs_of(tmp_path)} == before


@pytest.mark.parametrize(("changed", "said"), [
    ({"adam_lr": 0.2}, "--adam-lr 0.1 -> 0.2"), ({"text": "# another source"}, "source_sha256 "),
])  # fmt: skip
@pytest.mark.parametrize("done", [False, True])
def test_auto_leaves_a_run_that_is_another_one_and_says_how_it_differs(
    done, changed, said, tmp_path, capsys
):
    if done:
        assert run(tmp_path, **EVERY) == 0
    else:
        stop(tmp_path, 3)
    resume(tmp_path, **changed)
    out = capsys.readouterr().out
    assert (f"is unfinished, but it differs: {said}" in out) == (not done)
    assert len(logs_of(tmp_path)) == 2
    assert resumed(tmp_path) == []


# ---- Refusals


@pytest.fixture
def broken(tmp_path):
    """The folder of the checkpoints of a run that broke off after step 3."""
    stop(tmp_path / "logs", 3)
    return run_folder(tmp_path / "logs")


def test_a_checkpoint_with_other_weights_and_their_checksums_is_refused(tmp_path):
    stop(tmp_path, 5, checkpoint_every=0)
    (path,) = saved(tmp_path)
    model, optim, state = load(path)
    save(path.parent, Snapshot({name: weight + 1 for name, weight in model.items()}, optim, state))
    with pytest.raises(Refused, match="has no such checkpoint"):
        resume(tmp_path, checkpoint_every=0)


def refused(broken, **changed):
    """What is said of a resume that is refused and leaves all files as they were."""
    logs = broken.parents[1]
    before = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    with pytest.raises(Refused) as raised:
        run(logs, **EVERY | {"resume": "auto"} | changed)
    after = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    assert {path for path in before if before[path] != after.get(path)} == set()
    return str(raised.value)


def test_a_run_without_a_whole_checkpoint_or_its_folder_is_refused(broken, tmp_path):
    other = str(tmp_path / "other")
    assert f"saved in {broken.parent}" in refused(broken, checkpoint_dir=other)
    for path in checkpoints(broken):
        (path / STATE).unlink()
    assert "no usable checkpoint" in refused(broken)


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_resumed(broken, whole, capsys):
    before, newest = checkpoints(broken)
    content = bytearray((newest / MODEL).read_bytes())
    content[-1] ^= 1
    (newest / MODEL).write_bytes(content)
    resume(broken.parents[1])
    assert f"warning: {newest / MODEL} has SHA-256" in capsys.readouterr().out
    assert resumed(broken.parents[1])[0]["checkpoint"] == before.name
    assert_same(broken.parents[1], whole())


def test_a_log_that_was_changed_after_its_process_ended_is_refused(broken):
    (log,) = logs_of(broken.parents[1])
    content = log.read_bytes()
    assert content.count(b'"train_loss": 1.') == 1
    log.write_bytes(content.replace(b'"train_loss": 1.', b'"train_loss": 0.'))
    assert f"{log} was changed after its process ended" in refused(broken)


def test_a_run_whose_log_disk_was_full_to_its_end_resumes_where_the_log_ends(
    whole, tmp_path, monkeypatch
):
    def fill(trainer, step):
        def full(descriptor, lines, sync=False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        stub_trainer.wait_for_writer(trainer, step)
        monkeypatch.setattr("runtime.log.append", full)

    with pytest.raises(LogError, match="its last lines are lost"):
        run(tmp_path, {6: fill}, **EVERY)
    monkeypatch.undo()
    resume(tmp_path)
    (event,) = resumed(tmp_path)
    assert event["from_step"] == 4, "the last checkpoint that the log names"
    assert_same(tmp_path, whole())
