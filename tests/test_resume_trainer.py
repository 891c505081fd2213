"""Real runs that signals and faults break off: what is left resumes to the bit, or says why not."""

import os
import signal
import time
from copy import deepcopy
from functools import cache

import pytest
import torch
from small_run import SEQUENCE, STEPS, run, write_data
from stub_trainer import in_child, logs_of, losses_of, read_events

import train_gpt
from runtime.checkpoint import checkpoints
from runtime.run import Run
from runtime.warmup import same_bits

pytestmark = pytest.mark.usefixtures("two_layers", "kept_state")

EVERY = {"checkpoint_every": 2, "keep_model": "on"}
KILL, TERM = signal.SIGKILL, signal.SIGTERM


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two shards; the run passes from one to the other after step 7."""
    return write_data(tmp_path_factory.mktemp("data"), train_documents=190)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The folder of the run that nothing interrupts, with these settings, made once."""

    @cache
    def whole(**changed):
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("whole")
        outcome = run(data, folder, keep_model="on", **changed)
        assert outcome.code == 0, outcome.err
        return folder

    return whole


def break_off(number, moment, data, folder, **changed):
    """A run that the signal ends when this step is done, SIGKILL once what it saved is on disk."""
    stepped = Run.stepped

    def acting(self, *arguments, **named):
        stepped(self, *arguments, **named)
        if self.steps_done == moment:
            if number == KILL and self._writing is not None:
                self._writing.result()
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # until it is heard

    def doomed():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "stepped", acting)
            return run(data, folder, **EVERY | changed).code

    if number == KILL:
        assert in_child(doomed) == -KILL
    else:
        assert doomed() == 128 + number


def resume(data, folder, code=0, **changed):
    outcome = run(data, folder, **EVERY | {"resume": "auto"} | changed)
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    return outcome


def saved(folder):
    (run_folder,) = (folder / "checkpoints").iterdir()
    return checkpoints(run_folder)


def assert_same(folder, reference):
    """Losses, and weights, optimizer states, guard, generators and position at the end."""
    ours, theirs = losses_of(*logs_of(folder)), losses_of(*logs_of(reference))
    assert ours == theirs
    assert len(ours[0]) == STEPS
    kept = [torch.load(each / "checkpoints" / "last_state.pt") for each in (folder, reference)]
    assert same_bits(*kept)


# ---- The same run


@pytest.mark.parametrize(("number", "moment", "changed"), [
    (KILL, 1, {}),  # before the first checkpoint
    (TERM, 3, {"checkpoint_every": 0}),  # where the window grows, and gradients are pending
    (signal.SIGINT, 7, {}),  # where the shard ends
    (KILL, 8, {"recipe": "adamw", "checkpoint_every": 3}),
    (TERM, 7, {"dtype": "bfloat16", "biases": "on"}),
    (KILL, 7, {"micro_batch": SEQUENCE, "adam_accum_steps": 3}),
    (TERM, 5, {"optimizer": "torch_muon", "checkpoint_every": 0}),
    (KILL, 7, {"optimizer": "torch_adamw", "matrix_lr": 0.002}),
    (TERM, 5, {"stages": "growing"}),  # before the batch grows
    (KILL, 9, {"stages": "growing", "bigram_rows": 2, "xsa": "on"}),
], ids=str)  # fmt: skip
def test_a_run_that_broke_off_goes_on_bit_for_bit(number, moment, changed, data, whole, tmp_path):
    settings = {name: value for name, value in changed.items() if name != "checkpoint_every"}
    break_off(number, moment, data, tmp_path, **changed)
    torch.manual_seed(0 if moment == 1 else 99)  # what is saved, is restored
    resume(data, tmp_path, **changed)
    assert_same(tmp_path, whole(**settings))
    (event,) = read_events(*logs_of(tmp_path), kind="resume")
    every = changed.get("adam_accum_steps", 1 if "recipe" in changed else 2)
    assert event["from_step"] % every == 0
    if number != KILL:  # no step is done twice
        assert event["from_step"] >= moment


def test_minutes_are_the_steps_that_fill_them_and_a_resumed_run_keeps_those(
    data, whole, tmp_path, monkeypatch
):
    minutes = {"minutes": 0.04, "steps": 6, "compile": "off"}  # 12 steps of 200 ms
    monkeypatch.setattr("runtime.warmup.time_stages", lambda *_: [(3, 100.0), (3, 300.0)])
    torch.manual_seed(0)
    break_off(TERM, 7, data, tmp_path, **minutes)
    monkeypatch.setattr("runtime.warmup.time_stages", lambda *_: [(6, 1000.0)])
    assert "steps of 1,000.0 ms" not in resume(data, tmp_path, **minutes).out
    assert_same(tmp_path, whole())
    too_few = run(data, tmp_path / "other", **minutes | {"minutes": 0.001})
    assert too_few.code == 2
    assert "--minutes 0.001: a step takes 0.017 minutes" in too_few.err


@pytest.mark.slow
def test_a_compiled_run_goes_on_bit_for_bit(data, tmp_path, monkeypatch):
    monkeypatch.setitem(train_gpt.LAYERS, "tiny", [train_gpt.Layer(window="long")])
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    changed = {"recipe": "adamw", "seq_len": 256, "compile": "on"}
    torch.manual_seed(0)
    assert run(data, tmp_path / "whole", keep_model="on", **changed).code == 0
    torch.manual_seed(0)
    break_off(TERM, 5, data, tmp_path / "broken", **changed)
    resume(data, tmp_path / "broken", **changed)
    headers = read_events(*logs_of(tmp_path / "broken"), kind="header")
    assert headers[0]["env"]["compiled"] is True
    assert_same(tmp_path / "broken", tmp_path / "whole")


def test_training_on_does_not_change_a_snapshot_that_waits(data, tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr("runtime.checkpoint.save", lambda folder, snapshot, announce: taken.append(
        (snapshot, deepcopy(snapshot))))  # fmt: skip
    run(data, tmp_path, checkpoint_every=2, keep_model="off")
    assert len(taken) > 1
    for snapshot, copied in taken:
        assert same_bits(snapshot._asdict(), copied._asdict())
    assert not same_bits(taken[0][0].optim, taken[1][0].optim), "else there would be nothing to see"


# ---- Kills


@pytest.mark.parametrize("moment", [
    "runtime.log.append", "runtime.log.register", "runtime.checkpoint.remove",
])  # fmt: skip
def test_a_kill_in_the_middle_of_writing_is_survived(moment, data, whole, tmp_path):
    """At the third call, in the second run or the second checkpoint."""
    calls = []

    def die_at_the_third(*arguments, **named):
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), KILL)
        return real(*arguments, **named)

    def doomed():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moment, die_at_the_third)
            return run(data, tmp_path, trials=2, **EVERY).code

    module, _, name = moment.rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)
    assert in_child(doomed) == -KILL
    resume(data, tmp_path, trials=2)
    first = [log for log in logs_of(tmp_path) if read_events(log)[0]["seed"] == 0]
    assert losses_of(*first) == losses_of(*logs_of(whole()))


# ---- What a crash leaves


@pytest.fixture
def broken(data, tmp_path):
    """The folder of a run that SIGTERM broke off after step 8."""
    torch.manual_seed(0)
    break_off(TERM, 7, data, tmp_path / "logs")
    return tmp_path / "logs"


def test_a_log_that_a_crash_tore_is_resumed(data, whole, broken):
    """The process died in its last line, before the registry heard of its end."""
    (log,) = logs_of(broken)
    for path, left in ((log, b'{"event": "en'), (broken / "registry.jsonl", b"")):
        content = path.read_bytes()
        path.write_bytes(content[: content.rindex(b'{"event": "end"')] + left)
    resume(data, broken)
    assert_same(broken, whole())


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_resumed(data, whole, broken):
    *_, before, newest = saved(broken)  # a slow disk may have left out the one between
    weights = newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert f"warning: {weights} has SHA-256" in resume(data, broken).out
    assert read_events(*logs_of(broken), kind="resume")[0]["checkpoint"] == before.name
    assert_same(broken, whole())
