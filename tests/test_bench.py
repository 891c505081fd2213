"""The benchmark: every row is timed alike, figures agree, every optimizer really steps."""

import json
import tempfile

import pytest
import small_run

import train_gpt
from runtime import machine as machines
from runtime.settings import parse
from scripts import bench


def figures(capsys, *words):
    """What --json prints, after checks that hold of all tables."""
    assert bench.main([*words[:1], "--json", *words[1:]]) == 0
    tables = json.loads(capsys.readouterr().out)
    rows = tables.get("step") or [*tables.values()][-1]
    for row in rows.values():
        assert 0 < row["low"] <= row["median"] <= row["high"]
    reference = next(row for row in rows.values() if row["ratio"] == 1)
    for row in rows.values():
        assert row["low"] / reference["high"] <= row["ratio"] <= row["high"] / reference["low"]
    return rows, tables


def test_a_step_is_timed_in_each_window_and_its_parts_add_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "STEPS", 2)
    monkeypatch.setattr(machines, "peak_flops", lambda machine, dtype: 1e15)
    flags = small_run.arguments(small_run.write_data(tmp_path), tmp_path)
    with small_run.restored_settings():
        rows, tables = figures(capsys, "step", "--rounds", "3", "--", *flags)
    config = parse(train_gpt.Config, flags, train_gpt.preset, "")
    table = train_gpt.LAYERS[config.layers]
    weights = config.dim**2 * sum(12 if layer.attention else 8 for layer in table)
    flops = 6 * (weights + config.dim * config.padded_vocab)
    stages = enumerate(train_gpt.STAGES["record42"][:3])  # the run is too short for the last one
    assert [*rows] == [f"stage {index}, window {stage.long}" for index, stage in stages]
    for row in rows.values():
        batch = small_run.ROWS * small_run.SEQUENCE
        assert row["tokens/s"] == pytest.approx(1000 * batch / row["median"])
        assert row["of peak"] == pytest.approx(row["tokens/s"] * flops / 1e15)
    parts = tables["part"]
    assert {"products", "attention", "lookups", "element-wise, sums"} < parts.keys()
    assert parts["products"]["GFLOP"] > 0.9 * flops * batch / 1e9  # model and head, and Muon's
    assert all(part["GFLOP"] == 0 for name, part in parts.items() if name != "products")
    calls = sum(part["calls"] for part in parts.values())
    assert calls > 100
    for name, part in parts.items():
        assert part["of step"] == pytest.approx(part["ms"] / row["median"])
        if name != "between operations":
            assert 0 < part["GB"] < 1
            assert 0 <= part["of matrix rate"] < 2


def test_a_page_says_what_a_step_does_with_random_tokens_if_there_are_no_data(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(bench, "STEPS", 2)
    monkeypatch.setattr(bench, "RANDOM_STEPS", 12)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flags = small_run.arguments(tmp_path / "nothing", tmp_path, steps=10**6)
    with small_run.restored_settings():
        assert bench.main(["step", "--rounds", "2", "--", *flags]) == 0
    page, _, table = capsys.readouterr().out.partition("\n\n")
    facts = dict(line.split(": ", 1) for line in page.splitlines())
    assert "random_tokens_" in facts["data"]
    assert (facts["waits"], facts["graphs compiled"], facts["causality"]) == ("0", "0", "True")
    tokens = small_run.ROWS * small_run.SEQUENCE
    assert facts["batches"] == str([f"1 x {tokens} tokens"] * 3)
    assert facts["attention"].startswith("portable, ")
    assert "peak, MiB" in facts
    assert facts["other programs"].startswith(("none", "took", "unknown"))
    assert "\nstage 2, window" in table
    assert not list(tmp_path.glob("speedrun_*")), "the tokens are gone"


def test_optimizers_are_timed_beside_those_of_torch(monkeypatch, capsys):
    monkeypatch.setitem(bench.SETS, "tiny", [(16, 16), (32, 16), (16, 32)])
    rows, _ = figures(capsys, "optim", "--sets", "tiny", "--rounds", "3")
    assert {"torch.optim.Muon", "NorMuon, both guards"} < rows.keys()
