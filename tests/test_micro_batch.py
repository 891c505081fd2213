"""--micro-batch 0: as many tokens as the memory of a GPU holds, and the same losses."""

import signal
from types import SimpleNamespace

import pytest
import torch
from small_model import SEQUENCE, small
from small_run import logs_of, read_events, run, signalled, write_data
from test_model import batch, build, gradients

from data.loader import divisors
from runtime import warmup
from runtime.machine import Machine
from runtime.warmup import fit_micro_batch

GPU = Machine(torch.device("cuda"), 0, 1)


class Loader:
    """Steps of so many sequences on this rank, one number for each stage."""

    def __init__(self, *steps):
        self.steps, self.most_rows = steps, 1

    def shares(self, step):
        rows = divisors(self.steps[step], self.most_rows)[-1]
        return self.steps[step] // rows, rows


def fit(monkeypatch, free, steps, needed, micro_batch=0, machine=GPU, others=()):
    """Sequences of a micro-batch, and what was run on the way. needed(rows): bytes."""
    train, ran, said = Loader(*steps), [], []
    monkeypatch.setattr(warmup, "free_bytes", lambda device: free)
    monkeypatch.setattr(warmup, "peak_bytes", lambda device, run: run() or needed(train.most_rows))
    monkeypatch.setattr(
        warmup, "train_on_largest_micro_batch", lambda trainer: ran.append(train.most_rows)
    )
    monkeypatch.setattr(Machine, "gather", lambda self, rows: [rows, *others])
    monkeypatch.setattr(Machine, "say", lambda self, text: said.append(text))
    fit_micro_batch(SimpleNamespace(
        config=SimpleNamespace(micro_batch=micro_batch, seq_len=100), machine=machine,
        data=SimpleNamespace(train=train), changes=[(step, 0, 0) for step in range(len(steps))],
    ))  # fmt: skip
    return train.most_rows, ran, said


@pytest.mark.parametrize(("free", "rows"), [(1, 1), (34, 1), (40, 2), (70, 4), (200, 8)])
def test_the_largest_micro_batch_whose_activations_fit_is_taken_and_announced(
    free, rows, monkeypatch
):
    found, ran, said = fit(monkeypatch, free, [8], lambda rows: 6 + 10 * rows)
    assert found == rows
    assert all(6 + 10 * tried <= free for tried in ran if tried > 1), "nothing larger was run"
    assert f"{100 * rows:,} tokens fit" in said[0]
    assert len(said) == 1


def test_a_micro_batch_divides_the_largest_step_and_all_ranks_have_the_same(monkeypatch):
    found, ran, _ = fit(monkeypatch, 70, [8, 24], lambda rows: 10 * rows)
    assert (found, ran) == (6, [1, 1, 2, 3, 4, 6])
    assert fit(monkeypatch, 70, [24], lambda rows: 10 * rows, others=[4, 8])[0] == 4


@pytest.mark.parametrize("changed", [
    {"micro_batch": 100}, {"steps": [1, 1]}, {"free": None, "machine": Machine(torch.device("cpu"))}
])  # fmt: skip
def test_a_number_given_or_a_single_sequence_or_a_cpu_is_left_as_it_is(changed, monkeypatch):
    given = {"free": 1000, "steps": [8], "needed": lambda rows: rows} | changed
    assert fit(monkeypatch, **given) == (1, [], [])


@pytest.mark.parametrize("recipe", ["record42", "record89"])
def test_gradients_in_one_micro_batch_or_in_many_are_equal_up_to_the_order_of_sums(recipe):
    model = build(
        small("short", recipe, keep_float32="all", prefixes=False), torch.float64
    ).double()
    whole = batch(rows=4)
    loss, expected = gradients(model, whole)
    model.zero_grad()
    losses = []
    for row in range(4):
        inside = (whole.cu_seqlens >= row * SEQUENCE) & (whole.cu_seqlens <= (row + 1) * SEQUENCE)
        part = whole._replace(
            inputs=whole.inputs[row : row + 1], targets=whole.targets[row : row + 1],
            cu_seqlens=(whole.cu_seqlens[inside] - row * SEQUENCE).int(),
        )  # fmt: skip
        found = model(part.inputs, part.targets, part.cu_seqlens, SEQUENCE, None)
        found.backward()
        losses.append(found.detach())
    bound = 4 * SEQUENCE * torch.finfo(torch.float64).eps  # of a sum over all tokens
    torch.testing.assert_close(sum(losses), loss, rtol=bound, atol=0)
    assert all(each.any() for each in expected.values())
    for name, param in model.named_parameters():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(param.grad, expected[name], rtol=0, atol=bound * scale)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def test_a_run_resumes_where_another_micro_batch_fits(data, tmp_path, monkeypatch):
    settings = {"micro_batch": 0, "checkpoint_every": 0}
    stopped = {6: signalled(signal.SIGTERM)}
    assert run(data, tmp_path, stopped, **settings).code == 128 + signal.SIGTERM
    monkeypatch.setattr(warmup, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(warmup, "peak_bytes", lambda device, run: run() or 1)
    outcome = run(data, tmp_path, resume="auto", **settings)
    assert outcome.code == 0, outcome.err
    first, second = read_events(*logs_of(tmp_path), kind="header")
    assert first["config_sha256"] == second["config_sha256"]
    assert (first["micro_batch"], second["micro_batch"]) == (128, 512)
    (event,) = read_events(*logs_of(tmp_path), kind="resume")
    assert event["from_step"] >= 6
    assert any("micro_batch" in each for each in event["differences"])


def test_the_log_has_what_was_chosen_and_the_configuration_stays_equal(data, tmp_path):
    chosen, given = (run(data, tmp_path, micro_batch=n) for n in (0, 128))
    (first,), (second,) = chosen.events("header"), given.events("header")
    assert first["micro_batch"] == second["micro_batch"] == 128
    assert chosen.losses() == given.losses()
