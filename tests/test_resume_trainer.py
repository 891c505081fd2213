"""Real runs that signals and faults break off: what is left resumes to the bit, or says why not."""

import signal
from copy import deepcopy
from functools import cache

import pytest
import torch
from small_run import SEQUENCE, STEPS, run, write_data
from stub_trainer import in_child, logs_of, losses_of, read_events, signal_after

from runtime.warmup import same_bits

pytestmark = pytest.mark.usefixtures("two_layers", "kept_state")

EVERY = {"checkpoint_every": 2, "keep_model": "on"}
KILL, TERM = signal.SIGKILL, signal.SIGTERM
SLOW = pytest.mark.slow


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

    def doomed():
        with signal_after(moment, number):
            return run(data, folder, **EVERY | changed).code

    if number == KILL:
        if torch.cuda.is_available():
            pytest.skip("it needs a forked process, which has no CUDA")
        assert in_child(doomed) == -KILL
    else:
        assert doomed() == 128 + number


def resume(data, folder, code=0, **changed):
    outcome = run(data, folder, **EVERY | {"resume": "auto"} | changed)
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    return outcome


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
    (TERM, 5, {"recipe": "muon", "optimizer": "torch_muon", "checkpoint_every": 0}),
    (KILL, 7, {"recipe": "adamw", "optimizer": "torch_adamw", "matrix_lr": 0.002}),
    (KILL, 9, {"stages": "growing", "bigram_rows": 2, "xsa": "on"}),
    pytest.param(TERM, 5, {"recipe": "adamw", "seq_len": 256, "compile": "on"}, marks=SLOW),
], ids=str)  # fmt: skip
def test_a_run_that_broke_off_goes_on_bit_for_bit(
    number, moment, changed, data, whole, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
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


def test_training_on_does_not_change_a_snapshot_that_waits(data, tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr("runtime.checkpoint.save", lambda folder, snapshot, announce: taken.append(
        (snapshot, deepcopy(snapshot))))  # fmt: skip
    run(data, tmp_path, checkpoint_every=2, keep_model="off")
    assert len(taken) > 1
    for snapshot, copied in taken:
        assert same_bits(snapshot._asdict(), copied._asdict())
    assert not same_bits(taken[0][0].optim, taken[1][0].optim), "else there would be nothing to see"
