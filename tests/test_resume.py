"""Runs that are broken off and go on: bit for bit what they would have been, one log, and no time for nothing."""

import errno
import json
import math
import os
import re
import shutil
import signal
import threading
import time
from copy import deepcopy
from functools import cache
from hashlib import sha256
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from small_run import BOS, ROWS, SEQUENCE, STEPS, Outcome, find_logs, read_events, run, write_data
from test_train import diverge_at, spoil_gradients

import runtime.environment
import train_gpt
from data.loader import open_data
from optim import SpikeRule
from runtime import log as runtime_log
from runtime import requests, trial
from runtime.checkpoint import checkpoints, newest, read, write
from runtime.registry import REGISTRY, lock, register
from runtime.state import same_bits
from claims.runlog import read_run

LAST = "the last validation"
PATIENCE = 60  # seconds that a process on a busy machine may take
EVERY = {"checkpoint_every": 2, "keep_model": "on"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two shards, the run passing from one to the other after step 7."""
    return write_data(tmp_path_factory.mktemp("data"), train_documents=190)


@pytest.fixture(scope="module", autouse=True)
def _fast():
    """Two layers with all that layers can have, and no measurement of this machine's peak rate."""
    layer = train_gpt.Layer
    with pytest.MonkeyPatch.context() as patch:
        layers = [layer(value_embed=0), layer(window="long", value_embed=1, skip_from=0, backout=True)]
        patch.setitem(train_gpt.LAYERS, "tiny", layers)
        patch.setattr(runtime.environment, "measured_gemm_flops", lambda device, dtype: 1e9)
        yield


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The run that nothing interrupts, with these settings, made once."""

    @cache
    def whole(**changed):
        torch.manual_seed(0)
        outcome = run(data, tmp_path_factory.mktemp("whole"), keep_model="on", **changed)
        assert outcome.code == 0, outcome.err
        return outcome

    return whole


# ---------------------------------------------------------------------------------------------------------------------
# Breaking off


def when(moment, action, patch, seed=0):
    """Do it once when this step of the trial is done, or when its last validation begins."""
    state = {"seed": None}
    run_trial, evaluate, step_done = train_gpt.run_trial, train_gpt.evaluate, train_gpt.Progress.step_done

    def act(reached):
        if reached == moment and state["seed"] == seed:
            state["seed"] = None
            action(state["session"])

    def noting_the_trial(session, trial, *rest):
        state.update(session=session, seed=trial.seed)
        return run_trial(session, trial, *rest)

    def at_a_step(self, line, *rest):
        act(line["step"])
        return step_done(self, line, *rest)

    def at_the_end(session, run, step, windows):
        act(LAST if step == session.config.steps else None)
        return evaluate(session, run, step, windows)

    patch.setattr(train_gpt, "run_trial", noting_the_trial)
    patch.setattr(train_gpt.Progress, "step_done", at_a_step)
    patch.setattr(train_gpt, "evaluate", at_the_end)


def signalled(number):
    """An action: send this process the signal, and go on when it has been heard."""

    def action(session):
        os.kill(os.getpid(), number)
        while not session.requests.send(torch.zeros(()))[1:].any():
            time.sleep(0.001)

    return action


def stop(number, moment, data, logs, seed=0, **changed):
    """A run that SIGINT or SIGTERM breaks off, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        when(moment, signalled(number), patch, seed)
        return run(data, logs, **EVERY | changed)


def child(function):
    """The exit status of a forked process that calls it: minus the number of the signal, if one ended it."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(moment, data, logs, seed=0, **changed):
    """A run that SIGKILL breaks off, in a process of its own, when what it has saved is on the disk."""
    before, submit = set(find_logs(logs)), trial.Writer.submit

    def submit_and_wait(self, snapshot):
        submit(self, snapshot)
        self._thread.submit(lambda: None).result()

    def doomed():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trial.Writer, "submit", submit_and_wait)
            when(moment, lambda session: os.kill(os.getpid(), signal.SIGKILL), patch, seed)
            return run(data, logs, **EVERY | changed).code

    assert child(doomed) == -signal.SIGKILL
    return Outcome(-signal.SIGKILL, "", "", [log for log in find_logs(logs) if log not in before])


def break_off(number, moment, data, logs, **changed):
    if number == signal.SIGKILL:
        return kill(moment, data, logs, **changed)
    outcome = stop(number, moment, data, logs, **changed)
    assert outcome.code == 128 + number, outcome.err
    return outcome


def resume(data, logs, **changed):
    """Go on; the logs are all that there are then."""
    outcome = run(data, logs, **EVERY | {"resume": "auto"} | changed)
    return Outcome(outcome.code, outcome.out, outcome.err, find_logs(logs))


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def told(log):
    """Losses of the steps and validations that stand, and what was skipped."""
    found = read_run(log)
    assert found.complete, found.unfinished
    return [(s.step, s.train_loss, s.skipped, s.window) for s in found.steps], found.losses


def last_state(log):
    """Weights, optimizer states, guard, generators and loader at the end of a run."""
    _, snapshot = newest(log.parent / "checkpoints" / log.stem, pytest.fail)
    assert snapshot.state["step"] == STEPS
    return snapshot.model, snapshot.optim, snapshot.state["data"]


def assert_same(log, reference):
    assert told(log) == told(reference)
    for ours, theirs in zip(last_state(log), last_state(reference), strict=True):
        assert same_bits(ours, theirs)


# ---------------------------------------------------------------------------------------------------------------------
# The same run, bit for bit


@pytest.mark.parametrize(
    ("number", "moment", "changed"),
    [
        (signal.SIGKILL, 1, {}),  # before the first checkpoint
        (signal.SIGKILL, 6, {}),
        (signal.SIGKILL, 11, {"checkpoint_every": 4}),  # after the last one
        (signal.SIGKILL, LAST, {}),
        (signal.SIGTERM, 1, {"checkpoint_every": 0}),
        (signal.SIGTERM, 4, {"checkpoint_every": 0}),  # where the window grows
        (signal.SIGINT, 7, {}),  # where the shard ends
        (signal.SIGTERM, 10, {"checkpoint_every": 0}),  # where the extension begins
        (signal.SIGTERM, 5, {"recipe": "muon", "checkpoint_every": 0}),
        (signal.SIGKILL, 8, {"recipe": "muon"}),
        (signal.SIGTERM, 5, {"recipe": "adamw", "checkpoint_every": 0}),
        (signal.SIGKILL, 8, {"recipe": "adamw", "checkpoint_every": 3}),
        (signal.SIGTERM, 7, {"dtype": "bfloat16"}),
        (signal.SIGKILL, 7, {"micro_batch": SEQUENCE}),
        (signal.SIGTERM, 5, {"adam_every": 3, "checkpoint_every": 0}),
        (signal.SIGTERM, 5, {"biases": "on", "head_dtype": "bfloat16", "dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_a_run_that_was_broken_off_goes_on_as_if_nothing_had_been(number, moment, changed, data, whole, tmp_path):
    settings = {name: value for name, value in changed.items() if name != "checkpoint_every"}
    stopped = break_off(number, moment, data, tmp_path, **changed)
    outcome = resume(data, tmp_path, **changed)
    assert outcome.code == 0, outcome.err
    assert outcome.logs == stopped.logs
    assert_same(outcome.logs[0], whole(**settings).logs[0])
    (event,) = outcome.events("resume")
    every = settings.get("adam_every", 1 if changed.get("recipe", "record42") != "record42" else 2)
    assert event["from_step"] % every == 0
    if number != signal.SIGKILL:  # nothing is done twice
        assert event["from_step"] - moment in range(1, every + 1)
        assert read_run(outcome.logs[0]).resumes[0].redone == []


def test_a_compiled_run_goes_on_bit_for_bit(data, tmp_path, monkeypatch):
    monkeypatch.setitem(train_gpt.LAYERS, "tiny", [train_gpt.Layer(window="long")])
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    changed = {"recipe": "adamw", "sequence": 256, "compile": "on"}
    reference = run(data, tmp_path / "whole", keep_model="on", **changed)
    stop(signal.SIGTERM, 5, data, tmp_path, **changed)
    outcome = resume(data, tmp_path, **changed)
    assert outcome.events("header")[0]["env"]["compiled"] is True
    assert outcome.code == 0, outcome.err
    assert_same(outcome.logs[0], reference.logs[0])


def test_checkpoints_change_nothing_in_a_run(data, whole, tmp_path):
    assert_same(run(data, tmp_path, **EVERY).logs[0], whole().logs[0])


def test_training_on_does_not_change_a_snapshot_that_waits_to_be_written(data, tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(trial.Writer, "submit", lambda self, snapshot: taken.append((snapshot, deepcopy(snapshot))))
    run(data, tmp_path, checkpoint_every=2)
    assert len(taken) == STEPS // 2
    for snapshot, copied in taken:
        assert all(same_bits(a, b) for a, b in zip(snapshot, copied, strict=True))
    (first, _), (second, _), *_ = taken  # that differ, else there would be nothing to see
    assert not any(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_the_random_generator_goes_on(data, tmp_path):
    torch.manual_seed(7)
    wanted = torch.get_rng_state()
    stop(signal.SIGTERM, 3, data, tmp_path)
    torch.manual_seed(8)
    log = resume(data, tmp_path).logs[0]
    assert torch.equal(last_state(log)[1]["random.0.cpu"], wanted)
    assert torch.equal(torch.get_rng_state(), wanted)


def spike_at(step, monkeypatch):
    """A loss a million times too high at this step, which alone is a spike to a guard of small windows."""
    forward_backward = train_gpt.forward_backward
    monkeypatch.setattr(train_gpt, "SpikeRule", lambda sigma: SpikeRule(window=8, start=4, sigma=1000))

    def spiking(session, windows):
        message = forward_backward(session, windows)
        message[0] *= 1e6 if session.steps_done + 1 == step else 1
        return message

    monkeypatch.setattr(train_gpt, "forward_backward", spiking)


def test_a_spike_right_after_the_resume_is_skipped_as_without(data, tmp_path, monkeypatch):
    spike_at(9, monkeypatch)
    reference = run(data, tmp_path / "whole", keep_model="on")
    (skip,) = reference.events("skip")
    assert (skip["step"], skip["guard"]) == (9, "spike")
    stop(signal.SIGTERM, 7, data, tmp_path)
    outcome = resume(data, tmp_path)
    assert outcome.events("resume")[0]["from_step"] == 8
    assert [event["step"] for event in outcome.events("skip")] == [9]
    assert_same(outcome.logs[0], reference.logs[0])


# ---------------------------------------------------------------------------------------------------------------------
# One log, one clock


@pytest.fixture(scope="module")
def much_interrupted(data, tmp_path_factory):
    """Broken off five times: by both signals, by SIGKILL before and after a checkpoint, and in its last validation."""
    logs = tmp_path_factory.mktemp("much")
    torch.manual_seed(0)
    changed = {"checkpoint_every": 4}
    kill(1, data, logs, **changed)
    for number, moment in ((signal.SIGTERM, 2), (signal.SIGKILL, 7), (signal.SIGINT, 9), (signal.SIGKILL, LAST)):
        broken = break_off(number, moment, data, logs, resume="auto", **changed)
        assert broken.logs == []  # no new one
    outcome = resume(data, logs, **changed)
    assert outcome.code == 0, outcome.err
    return outcome


def test_a_run_that_was_broken_off_many_times_is_the_run(much_interrupted, whole):
    assert_same(much_interrupted.logs[0], whole().logs[0])
    assert [event["from_step"] for event in much_interrupted.events("resume")] == [0, 4, 4, 10, 12]


def test_times_never_fall(much_interrupted):
    events = read_events(much_interrupted.logs[0])
    assert all(a["t_ms"] <= b["t_ms"] for a, b in pairwise(events))
    clock = [event["train_time_ms"] for event in events if event["event"] in ("step", "val", "end")]
    assert clock == sorted(clock)


def test_timed_phases_that_stand_sum_up_to_the_last_train_time(much_interrupted):
    found = read_run(much_interrupted.logs[0])
    charged = sum(phase.ms for phase in found.phases if phase.timed)
    assert charged == pytest.approx(found.train_time_ms, rel=1e-9)
    assert charged == pytest.approx(much_interrupted.events("end")[-1]["train_time_ms"], rel=1e-9)


def test_lost_work_is_charged(much_interrupted):
    """After each resume the clock stands where it was shown last, however far back the checkpoint is."""
    step, shown, standing, saved, lost = 0, 0.0, 0.0, {0: 0.0}, []
    for event in read_events(much_interrupted.logs[0]):
        if event["event"] == "resume":
            standing = saved[event["from_step"]]
            lost.append(max(shown - standing, 0.0))
        if event.get("timed"):
            standing += event["ms"]
            assert event["name"] != "lost" or event["ms"] == pytest.approx(lost[-1], abs=1e-6)
            saved |= {step: standing} if event["name"] == "checkpoint" else {}
        step, shown = event.get("step", step), max(shown, event.get("train_time_ms", 0.0))
    assert [ms > 1 for ms in lost] == [False, False, True, False, False]  # only step 5 and 6 were done in vain


def test_what_was_done_twice_was_done_alike(much_interrupted):
    found = read_run(much_interrupted.logs[0])
    losses = {step.step: step.train_loss for step in found.steps}
    redone = [step for each in found.resumes for step in each.redone]
    assert redone
    assert all(losses[step.step] == step.train_loss for step in redone)


def test_the_registry_knows_of_each_resume(much_interrupted):
    lines = read_events(much_interrupted.logs[0].with_name("registry.jsonl"))
    words = [line["event"] + line.get("status", "") for line in lines]
    assert words == ["start", "resume", "endinterrupted", "resume", "resume", "endinterrupted", "resume", "resume",
                     "enddone"]  # fmt: skip
    assert len({line["run_id"] for line in lines}) == 1


def test_the_phases_of_getting_ready_come_again_untimed(much_interrupted):
    names = [event["name"] for event in much_interrupted.events("phase")]
    assert names.count("setup") == names.count("compile") == names.count("warmup") == 6
    ready = [event for event in much_interrupted.events("phase") if event["name"] in ("setup", "compile", "warmup")]
    assert not any(event["timed"] for event in ready)


def test_a_saved_run_keeps_no_checkpoints_when_it_is_done_unless_told(data, tmp_path):
    stop(signal.SIGTERM, 3, data, tmp_path, keep_model="off")
    folder = tmp_path / "checkpoints"
    assert len(checkpoints(next(folder.iterdir()))) == 2
    resume(data, tmp_path, keep_model="off")
    assert list(folder.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------------
# Trials


@pytest.fixture(scope="module")
def three_trials(data, tmp_path_factory):
    torch.manual_seed(0)
    return run(data, tmp_path_factory.mktemp("three"), keep_model="on", trials=3)


def test_auto_skips_the_trials_that_are_done_and_goes_on_with_the_broken_one(data, three_trials, tmp_path):
    kill(7, data, tmp_path, seed=1, trials=3)
    first, second = find_logs(tmp_path)
    done = first.read_bytes()
    outcome = resume(data, tmp_path, trials=3)
    assert outcome.code == 0, outcome.err
    assert "seed 0 is done" in outcome.out
    assert first.read_bytes() == done
    assert outcome.logs[:2] == [first, second]
    for log, reference in zip(outcome.logs, three_trials.logs, strict=True):
        assert_same(log, reference)
    assert [len(outcome.events("resume", log)) for log in range(3)] == [0, 1, 0]


def test_a_signal_in_the_last_validation_lets_the_trial_finish_and_saves_the_next(data, three_trials, tmp_path):
    stopped = stop(signal.SIGTERM, LAST, data, tmp_path, trials=3)
    assert stopped.code == 143
    assert [stopped.events("end", log)[0]["status"] for log in (0, 1)] == ["done", "interrupted"]
    outcome = resume(data, tmp_path, trials=3)
    for log, reference in zip(outcome.logs, three_trials.logs, strict=True):
        assert_same(log, reference)


def test_a_single_run_that_is_signalled_in_its_last_validation_is_done(data, whole, tmp_path):
    stopped = stop(signal.SIGTERM, LAST, data, tmp_path)
    assert stopped.code == 0
    assert_same(stopped.logs[0], whole().logs[0])


def test_a_process_killed_between_two_trials_leaves_nothing_to_go_on_with(data, three_trials, tmp_path):
    def doomed():
        with pytest.MonkeyPatch.context() as patch:
            real = train_gpt.run_trial

            def killed_before_the_second(session, trial, *rest):
                if trial.number == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(session, trial, *rest)

            patch.setattr(train_gpt, "run_trial", killed_before_the_second)
            return run(data, tmp_path, trials=2, **EVERY).code

    assert child(doomed) == -signal.SIGKILL
    outcome = resume(data, tmp_path, trials=2)
    assert [len(outcome.events("resume", log)) for log in (0, 1)] == [0, 0]
    for log, reference in zip(outcome.logs, three_trials.logs, strict=False):
        assert_same(log, reference)


def test_auto_without_anything_to_go_on_with_is_a_new_run(data, whole, tmp_path):
    outcome = resume(data, tmp_path)
    assert outcome.events("resume") == []
    assert_same(outcome.logs[0], whole().logs[0])


def test_auto_after_all_is_done_does_nothing(data, tmp_path):
    run(data, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    outcome = resume(data, tmp_path)
    assert outcome.code == 0
    assert "seed 0 is done" in outcome.out
    assert {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")} == before


# ---------------------------------------------------------------------------------------------------------------------
# Folders that are named


def saved(logs):
    (log,) = find_logs(logs)
    return checkpoints(logs / "checkpoints" / log.stem)


@pytest.mark.parametrize("which", ["run folder", "newest", "older"])
def test_a_named_folder_or_checkpoint_is_gone_on_from(which, data, whole, tmp_path):
    stop(signal.SIGTERM, 7, data, tmp_path)
    older, last = saved(tmp_path)
    path, step = {"run folder": (last.parent, 8), "newest": (last, 8), "older": (older, 6)}[which]
    outcome = resume(data, tmp_path, resume=path)
    assert outcome.code == 0, outcome.err
    assert_same(outcome.logs[0], whole().logs[0])
    (event,) = outcome.events("resume")
    assert (event["from_step"], event["checkpoint"]) == (step, f"step_{step:06d}")
    assert [each.step for each in read_run(outcome.logs[0]).resumes[0].redone] == list(range(step + 1, 9))


def test_a_named_folder_goes_on_with_its_trial_and_starts_those_after_it(data, three_trials, tmp_path):
    kill(7, data, tmp_path, seed=1, trials=2)
    folder = tmp_path / "checkpoints" / find_logs(tmp_path)[1].stem
    outcome = resume(data, tmp_path, resume=folder, trials=3)
    for log, reference in zip(outcome.logs, three_trials.logs, strict=True):
        assert_same(log, reference)


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_it_taken(data, whole, tmp_path):
    stop(signal.SIGTERM, 7, data, tmp_path)
    (saved(tmp_path)[-1] / "optim.safetensors").write_bytes(b"?")
    outcome = resume(data, tmp_path)
    assert outcome.out.count("warning: ") == 1
    assert "step_000008" in outcome.out
    assert outcome.events("resume")[0]["from_step"] == 6
    assert_same(outcome.logs[0], whole().logs[0])


def test_a_resumed_run_that_ends_at_once_names_the_checkpoint_that_there_is(broken, data, monkeypatch):
    monkeypatch.setattr(train_gpt, "validate", lambda *rest: math.nan)
    outcome = resume(data, broken.parents[1])
    assert outcome.code == 3
    assert f"saved in {broken / 'step_000004'}, go on with --resume auto" in outcome.out


def test_without_a_whole_checkpoint_the_run_begins_again_in_its_log(data, whole, tmp_path):
    stopped = stop(signal.SIGTERM, 3, data, tmp_path)
    for path in saved(tmp_path):
        (path / "state.json").unlink()
    refused = resume(data, tmp_path)
    assert refused.code == 2
    assert "no whole checkpoint" in refused.err
    outcome = resume(data, tmp_path, resume_anyway="on")
    assert outcome.logs == stopped.logs
    assert (outcome.events("resume")[0]["from_step"], outcome.events("resume")[0]["checkpoint"]) == (0, None)
    assert_same(outcome.logs[0], whole().logs[0])


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.fixture(scope="module")
def broken_off(data, tmp_path_factory):
    logs = tmp_path_factory.mktemp("broken")
    stop(signal.SIGTERM, 3, data, logs)
    return logs


@pytest.fixture
def broken(broken_off, tmp_path):
    """The folder of the checkpoints of a run that was broken off after step 4, copied for each test."""
    shutil.copytree(broken_off, tmp_path / "logs")
    return saved(tmp_path / "logs")[-1].parent


def refused(broken, data, **changed):
    """What is said of a resume that is refused, with exit code 2, and that leaves log and checkpoints as they were."""
    logs = broken.parents[1]
    files = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    outcome = resume(data, logs, **{"resume": broken} | changed)
    assert outcome.code == 2, outcome.err
    assert "Traceback" not in outcome.err
    assert {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()} == files
    return outcome.err


def test_other_settings_are_refused_by_name(broken, data):
    error = refused(broken, data, matrix_lr=0.01, windows="3,9", biases="on")
    assert "--biases off -> on; --windows 3,7,11 -> 3,9; --matrix-lr 0.03 -> 0.01. " in error
    assert "--resume-anyway on" in error


def test_another_source_is_refused(broken, data, monkeypatch):
    monkeypatch.setattr(train_gpt, "source_hash", lambda root: "f" * 64)
    for how in (broken, "auto"):
        assert "source_sha256" in (error := refused(broken, data, resume=how))
        assert "-> ffffffffffff" in error


def test_other_data_are_refused(broken, data, tmp_path):
    other = write_data(tmp_path / "other", train_documents=192)
    error = refused(broken, other)
    assert "train_sha256" in error
    assert "val_sha256" not in error


def test_a_run_that_is_done_is_refused(data, tmp_path):
    run(data, tmp_path, keep_model="on")
    error = refused(saved(tmp_path)[-1].parent, data)
    assert "is done" in error


def test_another_seed_is_refused_with_the_right_one(broken, data):
    error = refused(broken, data, seed=5)
    assert "seed 0" in error
    assert "--seed 0" in error


def test_a_checkpoint_without_its_log_is_refused(broken, data):
    log = broken.parents[1] / f"{broken.name}.jsonl"
    log.unlink()
    assert f"{log}" in refused(broken, data)


def test_a_log_that_a_living_process_writes_is_refused(broken, data):
    with open(broken.parents[1] / f"{broken.name}.jsonl", "rb") as log:
        assert lock(log.fileno(), wait=False)
        outcome = resume(data, broken.parents[1], resume=broken)
    assert outcome.code == 1
    assert "another process is writing it" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("path", ["absent", "", "empty"])
def test_a_folder_that_holds_no_run_is_refused(path, broken, data, tmp_path):
    (tmp_path / "empty").mkdir()
    given = {"absent": tmp_path / "absent", "": tmp_path, "empty": tmp_path / "empty"}[path]
    assert str(given) in refused(broken, data, resume=given)


def test_a_folder_of_another_run_is_refused(broken, data):
    other = broken.with_name("20200101-000000_tiny_s0_t0_000000")
    broken.rename(other)
    log = other.parents[1] / f"{broken.name}.jsonl"
    log.rename(log.with_name(f"{other.name}.jsonl"))
    assert f"is of run '{broken.name}', not of {other.name}" in refused(other, data)


@pytest.mark.parametrize("name", ["model.safetensors", "optim.safetensors", "state.json", "checksums.json"])
def test_a_named_checkpoint_that_is_damaged_is_refused(name, broken, data):
    last = checkpoints(broken)[-1]
    (last / name).write_bytes(b"{}")
    assert name in refused(broken, data, resume=last)


def test_differences_that_are_accepted_stand_in_the_log(broken, data):
    logs = broken.parents[1]
    outcome = resume(data, logs, resume=broken, resume_anyway="on", matrix_lr=0.01)
    assert outcome.code == 0, outcome.err
    (event,) = outcome.events("resume")
    assert event["differences"] == ["--matrix-lr 0.03 -> 0.01"]
    assert "--matrix-lr 0.03 -> 0.01" in outcome.out
    assert read_run(outcome.logs[0]).resumes[0].differences == ["--matrix-lr 0.03 -> 0.01"]


def test_a_checkpoint_of_another_model_is_refused_even_anyway(broken, data):
    outcome = resume(data, broken.parents[1], resume=broken, resume_anyway="on", dim=48)
    assert outcome.code in (1, 2)
    assert "blocks.0.attention.gate ((2, 12), torch.float32) -> ((3, 12), torch.float32)" in outcome.err
    assert "Traceback" not in outcome.err


def test_data_in_another_order_are_refused_even_anyway(broken, data, tmp_path):
    other = write_data(tmp_path / "other", train_documents=192)
    outcome = resume(other, broken.parents[1], resume=broken, resume_anyway="on")
    assert outcome.code in (1, 2)
    assert "the saved data position does not fit this run" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("forged", [{}, {"position": {}, "order": {}}, {"position": None, "order": None}])
def test_a_forged_position_is_refused(forged, broken, data):
    last = checkpoints(broken)[-1]
    snapshot = read(last)
    write(broken, snapshot._replace(state=snapshot.state | {"data": forged}))
    outcome = resume(data, broken.parents[1])
    assert outcome.code in (1, 2)
    assert "the checkpoint does not fit this run" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("clock", ["NaN", "1e999", "-1.0"])
def test_a_clock_that_stands_nowhere_is_refused(clock, broken, data):
    last = checkpoints(broken)[-1]
    state, sums = last / "state.json", last / "checksums.json"
    state.write_text(re.sub(r'"clock_ms": [\d.]+', f'"clock_ms": {clock}', state.read_text()))
    sums.write_text(json.dumps(json.loads(sums.read_text()) | {"state.json": sha256(state.read_bytes()).hexdigest()}))
    assert "clock_ms must be 0 or more" in refused(broken, data, resume=last)


def test_a_start_that_names_no_settings_is_no_other_run(broken, data):
    register(broken.parents[1] / REGISTRY, "start", run_id=broken.name, seed=0, track="tiny", claim=None)
    outcome = resume(data, broken.parents[1])
    assert (outcome.code, len(outcome.events("resume"))) == (0, 1), outcome.err


def test_settings_of_a_run_are_no_difference(broken, data, whole, tmp_path):
    copied = write_data(tmp_path / "copy", train_documents=190)
    outcome = resume(copied, broken.parents[1], resume=broken, rank_timeout=5, checkpoint_every="20m")
    assert outcome.events("resume")[0]["differences"] == []
    assert_same(outcome.logs[0], whole().logs[0])


# ---------------------------------------------------------------------------------------------------------------------
# Signals


def test_a_signal_that_comes_again_at_once_is_the_same_one(data, tmp_path):
    def twice(session):
        signalled(signal.SIGINT)(session)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        when(3, twice, patch)
        outcome = run(data, tmp_path, **EVERY)
    assert outcome.code in (130, 143)
    assert outcome.events("end")[0]["status"] == "interrupted"
    assert checkpoints(tmp_path / "checkpoints" / outcome.logs[0].stem)[-1].name == "step_000004"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_process_that_hangs_at_once(number, data, tmp_path):
    """The main thread waits in a lock, as it would in a collective that never returns."""

    def hang(session):
        def insist():
            for _ in range(2):
                os.kill(os.getpid(), number)
                time.sleep(0.3)

        threading.Thread(target=insist, daemon=True).start()
        threading.Semaphore(0).acquire(timeout=PATIENCE)

    def doomed():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(requests, "ECHO_SECONDS", 0.1)
            when(3, hang, patch)
            run(data, tmp_path, **EVERY)
        return 99

    begun = time.monotonic()
    assert child(doomed) == 128 + number
    assert time.monotonic() - begun < PATIENCE / 2


# ---------------------------------------------------------------------------------------------------------------------
# When to save


def saved_steps(data, logs, **changed):
    """The steps at which a run is saved."""
    with pytest.MonkeyPatch.context() as patch:
        steps, submit = [], trial.Writer.submit

        def noting(self, snapshot):
            steps.append(snapshot.state["step"])
            submit(self, snapshot)

        patch.setattr(trial.Writer, "submit", noting)
        assert run(data, logs, **changed).code == 0
    return steps


@pytest.mark.parametrize(
    ("every", "adam_every", "steps"),
    [("0", 2, []), ("4", 2, [4, 8, 12]), ("5", 2, [6, 10]), ("1", 2, [2, 4, 6, 8, 10, 12]), ("1", 1, [*range(1, 13)]),
     ("7", 3, [9]), ("500", 2, [])],
)  # fmt: skip
def test_a_run_is_saved_every_so_many_steps_where_all_optimizers_have_stepped(every, adam_every, steps, data, tmp_path):
    assert saved_steps(data, tmp_path, checkpoint_every=every, adam_every=adam_every) == steps


@pytest.mark.parametrize(("every", "steps"), [("1m", [4, 8, 12]), ("0.5m", [4, 8, 12]), ("3m", [8]), ("0m", [])])
def test_a_run_is_saved_every_so_many_minutes(every, steps, data, tmp_path, monkeypatch):
    """A step takes half a minute here. When the time has come is asked between two steps, and heard with the next."""
    clock, step_done = SimpleNamespace(now=0.0), train_gpt.Progress.step_done

    def half_a_minute(self, *arguments):
        clock.now += 30
        return step_done(self, *arguments)

    monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(train_gpt.Progress, "step_done", half_a_minute)
    assert saved_steps(data, tmp_path, checkpoint_every=every) == steps


@pytest.mark.parametrize("every", ["x", "5h", "nanm", "infm", "-3", "1e3", "m", "", "4.5"])
def test_an_interval_that_is_none_is_refused(every, data, tmp_path):
    outcome = run(data, tmp_path, checkpoint_every=every)
    assert outcome.code == 2
    assert "--checkpoint-every" in outcome.err
    assert every in outcome.err
    assert outcome.logs == []


# ---------------------------------------------------------------------------------------------------------------------
# Bad steps


SPOILED = "blocks.1.mlp.up"


def spoil(steps, patch):
    """A NaN in the gradient of one tensor at these steps."""
    forward_backward = train_gpt.forward_backward

    def spoiled(session, windows):
        message = forward_backward(session, windows)
        if session.steps_done + 1 in steps:
            dict(session.model.named_parameters())[SPOILED].grad[0, 0] = math.nan
        return message

    patch.setattr(train_gpt, "forward_backward", spoiled)


@pytest.fixture(scope="module")
def read_apart(data):
    """The batches of each step, and where they were read, from a loader that no run has touched."""
    opened = open_data(
        sorted(data.glob("*train*")), sorted(data.glob("*val*")), rank=0, world_size=1, steps=STEPS,
        micro_batch=2 * SEQUENCE, val_tokens=1024, val_sequence=256, val_batch=512, batch_tokens=ROWS * SEQUENCE,
        sequence=SEQUENCE, max_document=64, bos=BOS, align=True,
    )  # fmt: skip
    with opened.train as loader:
        batches = [next(loader) for _ in range(STEPS)][-5:]
        return {STEPS - 4 + k: (batch, loader.where(STEPS - 4 + k)) for k, batch in enumerate(batches)}


def test_a_bad_step_is_told_with_its_shard_and_tokens_and_its_inputs_are_kept(data, read_apart, tmp_path, monkeypatch):
    spoil([8, 11], monkeypatch)
    kept = tmp_path / "new" / "captured"
    outcome = run(data, tmp_path, micro_batch=2 * SEQUENCE, capture_nonfinite=kept)
    assert outcome.code == 0, outcome.err
    skips = {event["step"]: event for event in outcome.events("skip")}
    assert set(skips) == {8, 11}
    assert {path.name for path in kept.iterdir()} == {
        f"{outcome.logs[0].stem}.step_{step:06d}.rank_0.safetensors" for step in skips
    }
    for step, skip in skips.items():
        batches, place = read_apart[step]
        assert (skip["shard"], skip["token_offset"], skip["tensor"]) == (place.shard, place.start, SPOILED)
        assert f"(shard {place.shard}, tokens from {place.start})" in outcome.out
        with safe_open(kept / f"{outcome.logs[0].stem}.step_{step:06d}.rank_0.safetensors", "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            assert file.metadata()["shard"] == place.shard
            assert file.metadata()["tensor"] == SPOILED
        wanted = {f"{name}.{k}": part for k, batch in enumerate(batches) for name, part in batch._asdict().items()}
        assert same_bits(found, wanted)


def test_a_step_right_after_a_resume_is_told_with_its_tokens_too(data, read_apart, tmp_path, monkeypatch):
    stop(signal.SIGTERM, 7, data, tmp_path)
    spoil([9], monkeypatch)
    (skip,) = resume(data, tmp_path).events("skip")
    assert (skip["shard"], skip["token_offset"]) == (read_apart[9][1].shard, read_apart[9][1].start)


def test_inputs_that_cannot_be_kept_do_not_end_the_run(data, tmp_path, monkeypatch):
    spoil([8], monkeypatch)
    (tmp_path / "file").write_text("")
    outcome = run(data, tmp_path, capture_nonfinite=tmp_path / "file")
    assert outcome.code == 0
    assert "could not be kept" in outcome.out


def test_nothing_is_kept_of_good_steps_and_of_spikes(data, tmp_path, monkeypatch):
    spike_at(9, monkeypatch)
    outcome = run(data, tmp_path, capture_nonfinite=tmp_path / "captured")
    assert len(outcome.events("skip")) == 1
    assert not (tmp_path / "captured").exists()


def test_bad_steps_in_a_row_save_the_run_and_end_it_and_it_can_go_on(data, tmp_path, monkeypatch):
    bad = (6, 7, 8)
    with pytest.MonkeyPatch.context() as patch:
        spoil(bad, patch)
        reference = run(data, tmp_path / "whole", keep_model="on")
        patch.setattr("runtime.progress.MOST_SKIPS", 3)
        ended = run(data, tmp_path, checkpoint_every=0, keep_model="on")
    assert ended.code == 3
    place = ended.events("skip")[-1]
    for part in ("3 steps were skipped in a row, the last of them 8", SPOILED, place["shard"], "--resume auto"):
        assert part in ended.out
    assert str(place["token_offset"]) in ended.out
    assert ended.events("end")[0]["status"] == "nonfinite"
    outcome = resume(data, tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.events("resume")[0]["from_step"] == 8
    assert_same(outcome.logs[0], reference.logs[0])


# ---------------------------------------------------------------------------------------------------------------------
# What stands between two processes, and between two trials


def test_every_trial_is_saved_as_often_by_minutes(data, tmp_path):
    outcome = run(data, tmp_path, trials=2, checkpoint_every="0.0000001m", keep_model="on")
    saves = [sum(phase["name"] == "checkpoint" for phase in outcome.events("phase", log)) for log in (0, 1)]
    assert saves[0] == saves[1] >= STEPS // 4


def test_a_run_with_which_another_process_went_on_meanwhile_is_left_alone(data, whole, tmp_path, monkeypatch):
    stop(signal.SIGTERM, 3, data, tmp_path)
    warm_up, beaten = train_gpt.warm_up, []

    def beaten_in_the_warm_up(session):
        if not beaten:
            beaten.append(True)
            assert resume(data, tmp_path).code == 0
        return warm_up(session)

    monkeypatch.setattr(train_gpt, "warm_up", beaten_in_the_warm_up)
    outcome = resume(data, tmp_path)
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    assert_same(outcome.logs[0], whole().logs[0])
    assert [line["event"] for line in read_events(tmp_path / "registry.jsonl")] == ["start", "end", "resume", "end"]


def test_a_resume_that_cannot_begin_leaves_log_and_registry_as_they_were(data, whole, tmp_path):
    stopped = stop(signal.SIGTERM, 3, data, tmp_path)
    before = [path.read_bytes() for path in (stopped.logs[0], tmp_path / "registry.jsonl")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial.RunLog, "store_sources", lambda *_: "of another source")
        refused = resume(data, tmp_path)
    assert refused.code == 1
    assert "the source was edited" in refused.err
    assert before == [path.read_bytes() for path in (stopped.logs[0], tmp_path / "registry.jsonl")]
    assert_same(resume(data, tmp_path).logs[0], whole().logs[0])


def test_lines_that_waited_for_a_full_disk_when_the_process_died_are_restored(data, whole, tmp_path):
    """From step 2 on the system refuses every line; what was saved after step 6 has those before it."""

    def without_space(session):
        def refuse(descriptor, line):
            raise OSError(errno.ENOSPC, "No space left on device")

        runtime_log.append = refuse

    def doomed():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime_log, "append", runtime_log.append)
            submit = trial.Writer.submit

            def submit_and_wait(self, snapshot):
                submit(self, snapshot)
                self._thread.submit(lambda: None).result()

            patch.setattr(trial.Writer, "submit", submit_and_wait)
            when(2, without_space, patch)
            step_done = train_gpt.Progress.step_done

            def killed_after_seven(self, line, *rest):
                if line["step"] == 8:
                    os.kill(os.getpid(), signal.SIGKILL)
                return step_done(self, line, *rest)

            patch.setattr(train_gpt.Progress, "step_done", killed_after_seven)
            return run(data, tmp_path, **EVERY).code

    assert child(doomed) == -signal.SIGKILL
    assert_same(resume(data, tmp_path).logs[0], whole().logs[0])


def test_without_a_registry_nobody_guesses_what_is_done(data, tmp_path):
    stop(signal.SIGTERM, 3, data, tmp_path)
    (tmp_path / "registry.jsonl").unlink()
    outcome = resume(data, tmp_path)
    assert (outcome.code, len(outcome.logs)) == (2, 1)
    assert "registry.jsonl is missing" in outcome.err


@pytest.mark.parametrize("name", ["seed", "trial", "config", "env", "data"])
def test_a_header_that_lacks_something_is_refused_in_a_sentence(name, data, tmp_path):
    (log,) = stop(signal.SIGTERM, 3, data, tmp_path).logs
    first, *rest = log.read_text().splitlines()
    header = {key: value for key, value in json.loads(first).items() if key != name}
    log.write_text("\n".join([json.dumps(header), *rest, ""]))
    outcome = resume(data, tmp_path)
    assert outcome.code == 2
    assert f"{name} in its header must be" in outcome.err


def test_fewer_steps_than_are_done_are_refused(data, tmp_path):
    stop(signal.SIGTERM, 7, data, tmp_path)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    outcome = resume(data, tmp_path, resume=folder, steps=4, resume_anyway="on")
    assert outcome.code == 2
    assert "--steps is 4" in outcome.err


def test_skips_in_a_row_are_counted_over_an_interruption(data, tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.progress.MOST_SKIPS", 6)
    spoil_gradients(range(2, 99), monkeypatch)
    assert stop(signal.SIGTERM, 5, data, tmp_path).code == 143
    outcome = resume(data, tmp_path)
    assert outcome.code == 3
    assert "6 steps were skipped in a row, the last of them 8" in outcome.out


def test_weights_that_are_no_numbers_are_not_saved(data, tmp_path, monkeypatch):
    diverge_at(3, monkeypatch)  # the fourth step ruins the weights, which only the loss of the fifth tells
    outcome = run(data, tmp_path, guard="off", checkpoint_every=2)
    assert outcome.code == 3
    assert "is not finite" in outcome.out
    assert [path.name for path in saved(tmp_path)] == ["step_000002"]


def test_a_run_that_another_source_finished_hides_those_that_were_broken_off_before_it(data, tmp_path):
    stop(signal.SIGTERM, 3, data, tmp_path)
    assert run(data, tmp_path, **EVERY).code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "source_hash", lambda root: "of another source")
        patch.setattr(trial.RunLog, "store_sources", lambda *_: "of another source")
        outcome = resume(data, tmp_path)
    assert outcome.code == 0, outcome.err
    assert sorted(read_run(log).complete for log in outcome.logs) == [False, True, True]
