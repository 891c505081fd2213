"""What can be known before a run: the dry run of the trainer, and the micro-batch that fits the memory."""

import re

import pytest
import torch
from small_run import ROWS, SEQUENCE, STEPS, arguments, run, run_words, start_ranks, write_data

import train_gpt
from runtime import rehearsal
from claims.runlog import read_run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def rehearsed(data, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    return run_words([*arguments(data, logs), "--dry-run"], logs), logs


# ---------------------------------------------------------------------------------------------------------------------
# --dry-run


def test_a_dry_run_says_go_and_leaves_nothing_behind(rehearsed):
    outcome, logs = rehearsed
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1].startswith("go, ")
    assert list(logs.iterdir()) == []


def test_its_plan_counts_the_bytes_of_weights_gradients_and_state(rehearsed):
    parts = "weights|gradients|optimizer state|training pass|validation pass"
    planned = dict(re.findall(rf"^({parts}) +([\d.]+) MiB$", rehearsed[0].out, re.M))
    parameters = int(re.search(r"record42: ([\d,]+) parameters", rehearsed[0].out)[1].replace(",", ""))
    weights = pytest.approx(4 * parameters / 2**20, abs=0.05)  # float32
    assert (float(planned["weights"]), float(planned["gradients"])) == (weights, weights)
    assert weights.expected <= float(planned["optimizer state"]) + 0.1 <= 2 * weights.expected + 0.2
    # Of the loss backward needs what the softcap and the logarithm give, of each token and each of 128 logits.
    assert float(planned["training pass"]) >= 2 * 4 * ROWS * SEQUENCE * 128 / 2**20


def test_its_estimate_has_all_steps_of_all_windows_and_all_validations(rehearsed):
    stages = re.findall(r"window (\d+): (\d+) steps of", rehearsed[0].out)
    assert stages == [("48", "4"), ("112", "3"), ("176", "3"), ("208", "2")]
    assert sum(int(steps) for _, steps in stages) == STEPS
    assert "validation: 4 of" in rehearsed[0].out
    assert "on the clock: train, checkpoint\noff the clock: setup, compile, warmup, validate" in rehearsed[0].out


def test_a_plan_that_does_not_fit_the_memory_is_a_no_go_before_the_model_is_made(data, tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "available_memory", lambda device: 2**20)
    monkeypatch.setattr(train_gpt.GPT, "initialize", lambda model, seed: pytest.fail("the model was made"))
    outcome = run(data, tmp_path, dry_run="on")
    assert outcome.code == 2
    assert "memory of one process, if not compiled:\nweights " in outcome.out
    least = r"fix: a smaller track: the least that this one takes is \d MiB, --recompute on --micro-batch 128"
    assert re.search(least, outcome.out)
    assert outcome.out.splitlines()[-1].startswith("no-go: 1 to mend")


def test_missing_data_and_too_few_data_are_a_no_go(data, tmp_path):
    cases = [({"data_dir": tmp_path / "none"}, "no file matches"), ({"steps": 10**6}, "the data end after")]
    for changed, said in cases:
        outcome = run(data, tmp_path, dry_run="on", **changed)
        assert outcome.code == 2
        assert said in outcome.err


def test_several_processes_rehearse_together(data, tmp_path):
    processes = start_ranks(2, arguments(data, tmp_path, dry_run="on"))
    spoken = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], spoken
    assert "go, " in spoken[0][0]
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------------
# --micro-batch auto


def room_for(rows, monkeypatch):
    """A device with memory for so many rows."""
    batch_loss = train_gpt.batch_loss

    def limited(session, batch, *rest):
        if torch.is_grad_enabled() and len(batch.inputs) > rows:
            raise torch.OutOfMemoryError("no memory")
        return batch_loss(session, batch, *rest)

    monkeypatch.setattr(train_gpt, "batch_loss", limited)


@pytest.mark.parametrize("rows", [4, 2, 1])
def test_the_micro_batch_is_halved_until_it_fits_and_the_losses_are_those_of_that_size(
    rows, data, tmp_path, monkeypatch
):
    given = run(data, tmp_path, micro_batch=rows * SEQUENCE)
    room_for(rows, monkeypatch)
    found = run(data, tmp_path, micro_batch="auto")
    assert found.code == 0, found.err
    (header,) = found.events("header")
    assert (header["micro_batch"], header["grad_accum"]) == (rows * SEQUENCE, ROWS // rows)
    assert found.losses() == given.losses()
    assert found.out.count("out of memory: micro-batch") == {4: 0, 2: 1, 1: 2}[rows]


def test_where_no_row_fits_the_error_says_so(data, tmp_path, monkeypatch):
    room_for(0, monkeypatch)
    outcome = run(data, tmp_path, micro_batch="auto")
    assert (outcome.code, outcome.logs) == (1, [])
    assert "the memory does not suffice for a single row" in outcome.err


def test_a_dry_run_without_the_memory_is_a_no_go(data, tmp_path, monkeypatch):
    room_for(2, monkeypatch)
    outcome = run(data, tmp_path, dry_run="on")
    assert (outcome.code, outcome.logs) == (2, [])
    assert "out of memory" in outcome.err


def test_out_of_memory_in_a_run_names_the_flag(data, tmp_path, monkeypatch):
    room_for(2, monkeypatch)
    outcome = run(data, tmp_path)
    assert outcome.code == 1
    assert "out of memory" in outcome.err
    assert "--micro-batch auto" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("way", [str, lambda folder: "auto"], ids=["path", "auto"])
def test_a_run_that_needs_less_memory_can_go_on_where_one_that_needed_more_stopped(way, data, tmp_path, monkeypatch):
    """Out of memory in mid-run: what was saved goes on, and the log says what differs."""
    step, broken = train_gpt.optimizer_steps, []

    def fill_the_memory(session, number, message):
        if session.steps_done == 7 and not broken:
            broken.append(True)
            raise torch.OutOfMemoryError("no memory")
        return step(session, number, message)

    monkeypatch.setattr(train_gpt, "optimizer_steps", fill_the_memory)
    assert run(data, tmp_path, checkpoint_every=2).code == 1
    (folder,) = (tmp_path / "checkpoints").iterdir()
    outcome = run(data, tmp_path, resume=way(folder), micro_batch=SEQUENCE, val_batch=256, recompute="on")
    assert outcome.code == 0, outcome.err
    resumed = read_run(tmp_path / f"{folder.name}.jsonl")
    assert resumed.unfinished is None
    told = [f"micro_batch {ROWS * SEQUENCE} -> {SEQUENCE}", "val_batch 512 -> 256", "recompute False -> True"]
    assert resumed.resumes[0].differences == told
