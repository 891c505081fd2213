"""The benchmark's figures agree with each other, and its FLOPs with a count of what is really multiplied."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_run
import torch
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from runtime import environment
from runtime.flags import parse
from scripts import bench_train

MICRO_STEPS, MICRO_BATCH = 2, small_run.ROWS * small_run.SEQUENCE // 2
BATCH = MICRO_STEPS * MICRO_BATCH


@pytest.fixture
def flags(tmp_path: Path) -> Iterator[list[str]]:
    data = small_run.write_data(tmp_path)
    with small_run.restored_settings():
        yield small_run.arguments(data, tmp_path, micro_batch=MICRO_BATCH)


def prepared(words: list[str]) -> train_gpt.Session:
    return train_gpt.prepare(parse(train_gpt.Config, words, train_gpt.preset, ""), environment.start("cpu"))


@pytest.fixture
def result(flags, monkeypatch, capsys) -> dict:
    """What `--json` prints, for small squares."""
    monkeypatch.setattr(bench_train, "SQUARES", (64, 96))
    assert bench_train.main(["--rounds", "2", "--json", "--", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_flops_of_a_step_are_those_that_torch_counts(flags):
    session = prepared([*flags, "--smear", "off", "--attention-gates", "off"])
    with session.data.train, FlopCounterMode(display=False) as counter:
        train_gpt.forward_backward(session, session.windows(3))
    # Linear maps reach the counter as mm, the products of attention as batched ones; gates are off, being mm too.
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == BATCH * session.model.flops_per_token()
    maps = bench_train.products(session.model, MICRO_BATCH)
    assert 6 * sum(p.inputs * p.outputs * p.layers for p in maps) == session.model.flops_per_token()


def test_the_parts_of_a_step_add_up_and_shares_are_shares(result):
    assert set(result["modes"]) == {"eager"}
    mode = result["modes"]["eager"]
    assert set(mode["parts_ms"]) == {"data", "forward", "backward", "matrix", "adam"}
    assert sum(mode["parts_share"].values()) == pytest.approx(1)
    for part, ms in mode["parts_ms"].items():
        assert 0 < mode["parts_share"][part] < 1
        assert mode["parts_share"][part] == pytest.approx(ms / sum(mode["parts_ms"].values()))


def test_rates_follow_from_times(result):
    mode = result["modes"]["eager"]
    assert result["batch_tokens"] == BATCH
    assert mode["tokens_per_s"] == pytest.approx(BATCH / mode["step_ms"] * 1000)
    assert mode["gflops"] == pytest.approx(mode["tokens_per_s"] * result["flops_per_token"] / 1e9)
    assert set(result["peaks"]) == {"64 square", "96 square", "own shapes"}
    for name, peak in result["peaks"].items():
        assert mode["share_of"][name] == pytest.approx(mode["gflops"] / peak)
    assert 0 < mode["share_of"]["own shapes"] < 1
    head = result["products"][-1]
    padded = 128  # rows of the head
    assert (head["inputs"], head["outputs"], head["count"]) == (32, padded, MICRO_STEPS)
    for kind, ms in head["ms"].items():
        assert head["gflops"][kind] == pytest.approx(2 * MICRO_BATCH * 32 * padded / ms / 1e6)


def test_the_rate_at_the_own_shapes_is_that_of_the_listed_products(result):
    total_ms = sum(sum(shape["ms"].values()) * shape["count"] for shape in result["products"])
    work = sum(6 * result["rows"] * p["inputs"] * p["outputs"] * p["count"] for p in result["products"])
    assert result["products_ms"] == pytest.approx(total_ms)
    assert result["peaks"]["own shapes"] == pytest.approx(work / total_ms / 1e6)


def test_the_steps_that_are_timed_leave_the_weights_as_the_trainer_does(flags):
    """The part-by-part step is the trainer's step: same data, same losses, same update."""
    session = prepared([*flags, "--adam-every", "1", "--windows", "3"])
    windows = session.windows(3)
    with session.data.train:
        next(session.data.train)
        for step in (0, 0):
            train_gpt.optimizer_steps(session, step, train_gpt.forward_backward(session, windows))
        expected = [p.detach().clone() for p in session.model.parameters()]
        bench_train.time_steps("eager", session, session.model, bench_train.Stopwatch(session.machine))
    assert all(torch.equal(p, e) for p, e in zip(session.model.parameters(), expected, strict=True))


def test_a_person_gets_every_figure_as_text(result, flags):
    text = bench_train.as_text(result)
    for word in ("tokens/s", "eager", "forward", "adam", "64 square", "own shapes", "MLP down", "float32"):
        assert word in text


@pytest.mark.parametrize("words", [["--", "--dimm", "128"], ["--", "--data-dir", "nowhere"]])
def test_bad_flags_of_the_trainer_are_refused_in_a_sentence(words, capsys):
    assert bench_train.main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_no_rounds_are_refused():
    with pytest.raises(SystemExit):
        bench_train.main(["--rounds", "0"])
