"""The benchmark: every row is timed alike, figures agree, steps are those of the trainer."""

import json

import pytest
import small_run
import torch

import train_gpt
from runtime import machine as machines
from runtime.settings import parse
from scripts import bench

PEER = """
import torch
def build(given):
    if isinstance(given, list):
        return {"theirs": torch.optim.SGD(given, lr=1e-9).step}
    return lambda: torch.ones(given.batch_tokens).sum()
"""


@pytest.fixture
def peer(tmp_path):
    path = tmp_path / "peer.py"
    path.write_text(PEER)
    return str(path)


@pytest.fixture
def flags(tmp_path):
    with small_run.restored_settings():
        yield small_run.arguments(small_run.write_data(tmp_path), tmp_path)


def assert_medians_lie_in_their_range(rows):
    for row in rows.values():
        assert 0 < row["low"] <= row["median"] <= row["high"]


# ---- Steps of the trainer


def test_figures_of_a_step_agree_with_each_other(flags, peer, monkeypatch, capsys):
    monkeypatch.setattr(bench, "STEPS", 2)
    words = ["step", "--rounds", "3", "--against", peer, "--profile", "--json", "--", *flags]
    assert bench.main(words) == 0
    out, err = capsys.readouterr()
    tables = json.loads(out)
    assert "aten::mm" in err
    windows = [f"window {stage.window}" for stage in train_gpt.STAGES["tiny"]]
    assert [*tables["step"]] == [*windows, f"{windows[-1]}, no guards", peer, "schedule"]
    assert_medians_lie_in_their_range(tables["step"])
    for row in tables["step"].values():
        batch = small_run.ROWS * small_run.SEQUENCE
        assert row["tokens/s"] == pytest.approx(1000 * batch / row["median"])
    assert tables["step"]["schedule"]["ratio"] == 1
    fastest = min(tables["step"][name]["low"] for name in windows)
    slowest = max(tables["step"][name]["high"] for name in windows)
    schedule = tables["step"]["schedule"]
    assert 0.999 * fastest <= schedule["low"] <= schedule["high"] <= 1.001 * slowest


def trained(flags, take):
    """The weights after STEPS steps."""
    # Two micro-batches a step.
    words = [*flags, "--micro-batch", str(2 * small_run.SEQUENCE)]
    config = parse(train_gpt.Config, words, train_gpt.preset, "")
    trainer = train_gpt.set_up(config, machines.start("cpu"))
    with trainer.data.train:
        bench.prepare(trainer)
        take(trainer)
    return [weight.detach().clone() for weight in trainer.model.parameters()]


def test_steps_are_the_trainers_own_bit_for_bit(flags, monkeypatch):
    monkeypatch.setattr(bench, "STEPS", 4)

    def by_trainer(trainer):
        for step in range(4):
            message = trainer.gradients(0, torch.zeros(3))
            trainer.update(step, message[0])

    own = trained(flags, by_trainer)
    timed = trained(flags, lambda trainer: bench.take_steps(trainer, trainer.guard, 0))
    assert all(map(torch.equal, own, timed))


# ---- Steps of optimizers


def test_figures_of_optimizers_agree_with_each_other(peer, monkeypatch, capsys):
    monkeypatch.setitem(bench.SETS, "tiny", [(16, 16), (32, 16), (16, 32)])
    assert bench.main(["optim", "--sets", "tiny", "--rounds", "3", "--against", peer]) == 0
    text = capsys.readouterr().out
    assert bench.main(["optim", "--sets", "tiny", "--rounds", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tiny"]
    assert all(name in text for name in [*rows, "theirs"])
    assert_medians_lie_in_their_range(rows)
    assert rows["torch.optim.Muon"]["ratio"] == 1
    for row in rows.values():
        reference = rows["torch.optim.Muon"]
        assert row["low"] / reference["high"] <= row["ratio"] <= row["high"] / reference["low"]


def test_every_optimizer_moves_every_weight():
    weights = [torch.randn(shape, requires_grad=True) for shape in [(16, 16), (16, 32), (32, 16)]]
    gradients = [torch.randn_like(weight) for weight in weights]
    for name, step in bench.optimizer_steps(weights).items():
        before = [weight.detach().clone() for weight in weights]
        bench.fill_gradients(weights, gradients)
        step()
        for weight, old in zip(weights, before, strict=True):
            assert not torch.equal(weight, old), name


def test_every_round_takes_each_row_once_and_starts_with_another(monkeypatch):
    monkeypatch.setattr(bench, "WARM_UP", 2)
    seen = []
    steps = {name: lambda name=name: seen.append(name) for name in "abc"}
    ms = bench.timed(steps, lambda: seen.append("-"), 2, machines.start("cpu"))
    assert "".join(seen) == "-a-b-c" + "-b-c-a" + "-c-a-b" + "-a-b-c"
    assert {name: len(times) for name, times in ms.items()} == {"a": 2, "b": 2, "c": 2}
