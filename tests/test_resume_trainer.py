"""Real runs that break off and go on at one rank: the same run to the bit."""

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
from optim import SpikeRule
from runtime.checkpoint import checkpoints, load
from runtime.checks import same_bits
from runtime.run import Run

pytestmark = pytest.mark.usefixtures("two_layers")

EVERY = {"checkpoint_every": 2, "keep_model": "on"}


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
            if number == signal.SIGKILL and self._writing is not None:
                self._writing.result()
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # until it is heard

    def doomed():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "stepped", acting)
            return run(data, folder, **EVERY | changed).code

    if number == signal.SIGKILL:
        assert in_child(doomed) == -signal.SIGKILL
    else:
        assert doomed() == 128 + number


def resume(data, folder, **changed):
    outcome = run(data, folder, **EVERY | {"resume": "auto"} | changed)
    assert outcome.code == 0, outcome.err


def last_state(folder):
    """Weights, optimizer states, guard, generators and position at the end of a run."""
    (path,) = [each for run in (folder / "checkpoints").iterdir() for each in checkpoints(run)]
    snapshot = load(path)
    assert snapshot.state["step"] == STEPS
    return snapshot.model, snapshot.optim, snapshot.state["data"]


def assert_same(folder, reference):
    ours, theirs = losses_of(*logs_of(folder)), losses_of(*logs_of(reference))
    assert ours == theirs
    assert len(ours[0]) == STEPS
    for mine, other in zip(last_state(folder), last_state(reference), strict=True):
        assert same_bits(mine, other)


KILL, TERM = signal.SIGKILL, signal.SIGTERM


@pytest.mark.parametrize(("number", "moment", "changed"), [
    (KILL, 1, {}),  # before the first checkpoint
    (KILL, 11, {"checkpoint_every": 4}),
    (TERM, 3, {"checkpoint_every": 0}),  # where the window grows, and gradients are pending
    (signal.SIGINT, 7, {}),  # where the shard ends
    (TERM, 5, {"recipe": "muon", "checkpoint_every": 0}),
    (KILL, 8, {"recipe": "adamw", "checkpoint_every": 3}),
    (TERM, 7, {"dtype": "bfloat16", "biases": "on"}),
    (KILL, 7, {"micro_batch": SEQUENCE, "adam_every": 3}),
    (TERM, 5, {"optimizer": "torch_muon", "checkpoint_every": 0}),
    (KILL, 7, {"optimizer": "torch_adamw", "matrix_lr": 0.002}),
], ids=str)  # fmt: skip
def test_a_run_that_broke_off_goes_on_bit_for_bit(number, moment, changed, data, whole, tmp_path):
    settings = {name: value for name, value in changed.items() if name != "checkpoint_every"}
    break_off(number, moment, data, tmp_path, **changed)
    torch.manual_seed(0 if moment == 1 else 99)  # what is saved, is restored
    resume(data, tmp_path, **changed)
    assert_same(tmp_path, whole(**settings))
    (event,) = read_events(*logs_of(tmp_path), kind="resume")
    every = changed.get("adam_every", 1 if "recipe" in changed else 2)
    assert event["from_step"] % every == 0
    if number != KILL:  # no step is done twice
        assert event["from_step"] >= moment


@pytest.mark.slow
def test_a_compiled_run_goes_on_bit_for_bit(data, tmp_path, monkeypatch):
    monkeypatch.setitem(train_gpt.LAYERS, "tiny", [train_gpt.Layer(window="long")])
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    changed = {"recipe": "adamw", "sequence": 256, "compile": "on"}
    torch.manual_seed(0)
    assert run(data, tmp_path / "whole", keep_model="on", **changed).code == 0
    torch.manual_seed(0)
    break_off(TERM, 5, data, tmp_path, **changed)
    resume(data, tmp_path, **changed)
    assert read_events(*logs_of(tmp_path), kind="header")[0]["env"]["compiled"] is True
    assert_same(tmp_path, tmp_path / "whole")


def test_checkpoints_change_nothing_in_a_run(data, whole, tmp_path):
    torch.manual_seed(0)
    assert run(data, tmp_path, **EVERY).code == 0
    assert_same(tmp_path, whole())


def test_training_on_does_not_change_a_snapshot_that_waits(data, tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(Run, "_write_checkpoint", lambda self, snapshot: taken.append(
        (snapshot, deepcopy(snapshot))))  # fmt: skip
    run(data, tmp_path, checkpoint_every=2)
    assert len(taken) == STEPS // 2
    for snapshot, copied in taken:
        assert same_bits(snapshot._asdict(), copied._asdict())
    assert not same_bits(taken[0][0].optim, taken[1][0].optim), "else there would be nothing to see"


def test_a_spike_right_after_the_resume_is_skipped_as_without(data, tmp_path, monkeypatch):
    """A loss a million times too high is a spike only to a guard that knows those before it."""
    gradients = train_gpt.Trainer.gradients

    def spiking(self, step, flags):
        message = gradients(self, step, flags)
        if step + 1 == 9:
            message[0] *= 1e6
        return message

    monkeypatch.setattr(train_gpt.Trainer, "gradients", spiking)
    rule = SpikeRule(window=8, start=4, sigma=1000)
    monkeypatch.setattr(train_gpt, "SpikeRule", lambda **_: rule, raising=False)
    monkeypatch.setattr(train_gpt.optim, "SpikeRule", lambda **_: rule)
    assert run(data, tmp_path / "whole", keep_model="on").code == 0
    torch.manual_seed(0)
    break_off(TERM, 7, data, tmp_path)
    resume(data, tmp_path)
    skips = read_events(*logs_of(tmp_path), kind="skip")
    assert [(skip["step"], skip["guard"]) for skip in skips] == [(9, "spike")]
    assert losses_of(*logs_of(tmp_path)) == losses_of(*logs_of(tmp_path / "whole"))


def test_a_bad_step_is_told_with_shard_tokens_and_tensor(data, tmp_path, monkeypatch):
    gradients = train_gpt.Trainer.gradients

    def spoiled(self, step, flags):
        message = gradients(self, step, flags)
        if step + 1 == 8:
            self.model.blocks[1].mlp.up.grad[0, 0] = float("nan")
        return message

    monkeypatch.setattr(train_gpt.Trainer, "gradients", spoiled)
    outcome = run(data, tmp_path)
    assert outcome.code == 0, outcome.err
    (skip,) = outcome.events("skip")
    assert (skip["step"], skip["tensor"]) == (8, "blocks.1.mlp.up")
    assert f"(shard {skip['shard']}, tokens from {skip['token_offset']})" in outcome.out


@pytest.mark.parametrize(("changed", "sentence"), [
    ({"dim": 48}, "does not fit this run: another model: blocks.0.attention.gate ((2, 12)"),
    ({"data_dir": None}, "the saved data position does not fit this run"),
])  # fmt: skip
def test_another_model_or_order_of_data_is_refused_even_anyway(changed, sentence, data, tmp_path):
    break_off(TERM, 3, data, tmp_path / "logs")
    if "data_dir" in changed:
        data, changed = write_data(tmp_path / "other", train_documents=192), {}
    (folder,) = (tmp_path / "logs" / "checkpoints").iterdir()
    outcome = run(data, tmp_path / "logs", resume=folder, resume_anyway="on", **changed)
    assert outcome.code == 2
    assert sentence in outcome.err
    assert "Traceback" not in outcome.err
    assert len(logs_of(tmp_path / "logs")) == 1
