"""The benchmark: every row is timed alike, figures agree, every optimizer really steps."""

import json
import tempfile

import pytest
import small_run

import train_gpt
from runtime import machine as machines
from runtime.settings import parse
from scripts import bench


def check(rows, reference):
    """What holds of every table."""
    for row in rows.values():
        assert 0 < row["low"] <= row["median"] <= row["high"]
        low, high = (row[name] / rows[reference][other] for name, other in
                     (("low", "high"), ("high", "low")))  # fmt: skip
        assert low <= row["ratio"] <= high
    assert rows[reference]["ratio"] == 1


def test_a_step_is_timed_in_each_window_and_its_parts_add_up_with_random_tokens_if_need_be(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(bench, "STEPS", 2)
    monkeypatch.setattr(bench, "RANDOM_STEPS", 12)
    monkeypatch.setattr(machines, "peak_flops", lambda machine, dtype: 1e15)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flags = small_run.arguments(tmp_path / "nothing", tmp_path, steps=10**6)
    with small_run.restored_settings():
        assert bench.main(["step", "--rounds", "3", "--json", "--", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not list(tmp_path.glob("speedrun_*")), "the tokens are gone"
    batch = small_run.ROWS * small_run.SEQUENCE

    facts = found["facts"]
    assert "random_tokens_" in facts["data"]
    assert (facts["waits"], facts["graphs compiled"], facts["causality"]) == (0, 0, True)
    assert facts["batches"] == [f"1 x {batch} tokens"] * 3
    assert facts["attention"].startswith("portable, ")
    assert facts["peak, MiB"] > 10
    assert facts["other programs"].startswith(("none", "took", "unknown"))

    config = parse(train_gpt.Config, flags, train_gpt.preset, "")
    table = train_gpt.LAYERS[config.layers]
    weights = config.dim**2 * sum(12 if layer.attention else 8 for layer in table)
    flops = 6 * (weights + config.dim * config.padded_vocab)
    rows = found["step"]
    stages = enumerate(train_gpt.STAGES["record42"][:3])  # the run is too short for the last one
    assert [*rows] == [f"stage {index}, window {stage.long}" for index, stage in stages]
    check(rows, [*rows][-1])
    for row in rows.values():
        assert row["tokens/s"] == pytest.approx(1000 * batch / row["median"])
        assert row["of peak"] == pytest.approx(row["tokens/s"] * flops / 1e15)

    parts = found["part"]
    assert {"products", "attention", "lookups", "element-wise, sums"} < parts.keys()
    assert parts["products"]["GFLOP"] > 0.9 * flops * batch / 1e9  # model and head, and Muon's
    assert all(part["GFLOP"] == 0 for name, part in parts.items() if name != "products")
    assert sum(part["calls"] for part in parts.values()) > 100
    for name, part in parts.items():
        assert part["of step"] == pytest.approx(part["ms"] / [*rows.values()][-1]["median"])
        if name != "between operations":
            assert 0 < part["GB"] < 1
            assert 0 <= part["of matrix rate"] < 2


def test_optimizers_are_timed_beside_those_of_torch(monkeypatch, capsys):
    monkeypatch.setitem(bench.SETS, "tiny", [(16, 16), (32, 16), (16, 32)])
    assert bench.main(["optim", "--sets", "tiny", "--rounds", "3"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    columns = title.split()[1:]
    rows = {line[:28].strip(): map(float, line[28:].split()) for line in lines}
    rows = {name: dict(zip(columns, row, strict=True)) for name, row in rows.items()}
    assert {"torch.optim.Muon", "NorMuon, both guards"} < rows.keys()
    check(rows, "torch.optim.Muon")
