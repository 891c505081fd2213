"""The benchmark: every row is timed alike, figures agree, every optimizer really steps."""

import json
import time
from functools import partial

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


def test_a_step_is_timed_in_each_window(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "STEPS", 2)
    monkeypatch.setattr(machines, "peak_flops", lambda machine, dtype: 1e15)
    flags = small_run.arguments(small_run.write_data(tmp_path), tmp_path)
    with small_run.restored_settings():
        rows, _ = figures(capsys, "step", "--rounds", "3", "--", *flags)
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


def test_a_page_says_what_a_step_does_with_random_tokens_if_there_are_no_data(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(bench, "STEPS", 2)
    flags = small_run.arguments(tmp_path / "nothing", tmp_path)
    with small_run.restored_settings():
        assert bench.main(["step", "--rounds", "2", "--", *flags]) == 0
    page, _, table = capsys.readouterr().out.partition("\n\n")
    facts = dict(line.split(": ", 1) for line in page.splitlines())
    assert (facts["waits"], facts["graphs compiled"], facts["causality"]) == ("0", "0", "True")
    tokens = small_run.ROWS * small_run.SEQUENCE
    assert facts["batches"] == str([f"1 x {tokens} tokens"] * 3)
    assert facts["attention"].startswith("portable, ")
    assert "peak, MiB" in facts
    assert "\nstage 2, window" in table


def test_optimizers_are_timed_beside_those_of_torch(monkeypatch, capsys):
    monkeypatch.setitem(bench.SETS, "tiny", [(16, 16), (32, 16), (16, 32)])
    rows, _ = figures(capsys, "optim", "--sets", "tiny", "--rounds", "3")
    assert {"torch.optim.Muon", "NorMuon, both guards"} < rows.keys()


def test_every_round_takes_each_row_once_and_starts_with_another_and_the_first_two_do_not_count(
    monkeypatch,
):
    monkeypatch.setattr(bench, "WARM_UP", 2)
    seen, naps = [], iter([0.1] * 6)  # seconds, in the first two rounds

    def step(name):
        seen.append(name)
        time.sleep(next(naps, 0.01))

    steps = {name: partial(step, name) for name in "abc"}
    rows = bench.timed(steps, 10, "b", lambda: seen.append("-"), 2, machines.start("cpu"))
    assert "".join(seen) == "-a-b-c" + "-b-c-a" + "-c-a-b" + "-a-b-c"
    assert [*rows] == ["a", "b", "c"]
    for row in rows.values():
        assert 1 <= row["low"] <= row["median"] < 5, "ten steps take 10 ms"
        assert row["high"] < 9, "those of the first two rounds take 100 ms"
