"""The benchmark of a step: its figures agree with each other, its parts with the trainer, its FLOPs with a count."""

import io
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import small_run
import torch
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from runtime import environment
from runtime.flags import parse
from scripts import against, bench_step

MICRO_STEPS, MICRO_BATCH = 2, small_run.ROWS * small_run.SEQUENCE // 2
BATCH = MICRO_STEPS * MICRO_BATCH
PUBLIC = """
import sys
time = 0
for step in range(1, {steps} + 1):
    time += 500 if step <= 10 else 9 if step % 2 else 7  # slow first steps, then every second one
    print(f"step:{{step}}/{steps} train_time:{{time}}ms step_avg:8.00ms")
print("some warning", file=sys.stderr)
sys.exit({code})
"""
SCRIPT = """
import runpy
from runtime import environment
environment.measured_gemm_flops = lambda device, dtype, side=1: 1e9 * side  # takes a second
runpy.run_path("scripts/bench_step.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> Iterator[list[str]]:
    """Of a small run; square products are not timed: their rate is their side."""
    folder = tmp_path_factory.mktemp("run")
    with small_run.restored_settings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "measured_gemm_flops", lambda device, dtype, side=1: 1e9 * side)
        yield small_run.arguments(small_run.write_data(folder), folder, micro_batch=MICRO_BATCH)


def prepared(words: list[str]) -> train_gpt.Session:
    return train_gpt.prepare(parse(train_gpt.Config, words, train_gpt.preset, ""), environment.start("cpu"))


@pytest.fixture(scope="module")
def printed(flags) -> tuple[dict, str]:
    """What `--json` prints to standard output and to standard error."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(bench_step, "PAIRS", 2)
        assert bench_step.main(["--rounds", "1", "--steps", "3", "--overhead", "--json", "--", *flags]) == 0
    return json.loads(out.getvalue()), err.getvalue()


@pytest.fixture(scope="module")
def result(printed) -> dict:
    return printed[0]


# ---- Figures


def test_the_flops_of_a_step_are_those_that_torch_counts(flags):
    session = prepared([*flags, "--smear", "off", "--attention-gates", "off", "--head", "plain"])
    with session.data.train, FlopCounterMode(display=False) as counter:
        train_gpt.forward_backward(session, session.windows(3))
    # Linear maps reach the counter as mm, the products of attention as batched ones; gates are off, being mm too.
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == BATCH * session.model.flops_per_token()
    maps = bench_step.linear_maps(session.model)
    assert 6 * sum(inputs * outputs * layers for _, inputs, outputs, layers in maps) == session.model.flops_per_token()


def test_every_window_of_the_schedule_is_measured_and_weighs_as_many_steps_as_it_has(result):
    stages = result["stages"]
    assert [(stage["mode"], stage["window"]) for stage in stages] == [("eager", 16 * w) for w in (3, 7, 11, 13)]
    assert sum(stage["steps"] for stage in stages) == small_run.STEPS
    mean = sum(stage["steps"] * stage["step_ms"] for stage in stages) / small_run.STEPS
    assert result["schedule"]["eager"]["step_ms"] == pytest.approx(mean)


def test_the_parts_of_a_step_add_up_and_shares_are_shares(result):
    for stage in result["stages"]:
        parts = stage["parts_ms"]
        assert set(parts) == {"data", "forward", "backward", "reduce", "matrix", "adam", "guard", "logging"}
        assert stage["parts_sum_ms"] == pytest.approx(sum(parts.values()))
        assert all(ms > 0 for ms in parts.values())
        assert stage["parts_share"] == pytest.approx({part: ms / sum(parts.values()) for part, ms in parts.items()})


def test_rates_and_mfu_follow_from_times(result):
    assert result["batch_tokens"] == BATCH
    assert set(result["peaks"]) == {"best square", "own shapes"}  # no datasheet has a CPU
    assert result["peaks"]["best square"] == max(bench_step.SQUARES["cpu"])
    for speed in [*result["stages"], result["schedule"]["eager"]]:
        assert speed["tokens_per_s"] == pytest.approx(BATCH / speed["step_ms"] * 1000)
        assert speed["gflops"] == pytest.approx(speed["tokens_per_s"] * result["flops_per_token"] / 1e9)
        assert speed["mfu"] == pytest.approx({name: speed["gflops"] / rate for name, rate in result["peaks"].items()})
        assert 0 < speed["mfu"]["own shapes"] < 1


def test_the_rate_at_the_own_shapes_is_that_of_the_listed_products(result):
    total_ms = sum(product["ms"] * product["count"] for product in result["products"])
    work = sum(6 * result["rows"] * p["inputs"] * p["outputs"] * p["count"] for p in result["products"])
    assert work == BATCH * result["flops_per_token"]
    assert result["products_ms"] == pytest.approx(total_ms)
    assert result["peaks"]["own shapes"] == pytest.approx(work / total_ms / 1e6)
    head = result["products"][-1]
    assert (head["inputs"], head["outputs"], head["count"]) == (32, 128, MICRO_STEPS)  # rows are padded to 128
    assert head["gflops"] == pytest.approx(6 * MICRO_BATCH * 32 * 128 / head["ms"] / 1e6)


def test_overheads_are_medians_of_differences_as_shares_of_the_time():
    ms = {("guarded",): [5.0, 7.0, 6.0], ("bare",): [3.0, 3.0, 3.0], ("eager", 7, "logging"): [1.0, 1.0, 1.0],
          ("saving",): [90.0, 60.0, 130.0], ("not saving",): [30.0, 30.0, 30.0]}  # fmt: skip
    found = bench_step.overheads(ms, "eager", 7, step_ms=100.0)
    assert found["guards"] == pytest.approx({"ms": 3, "share": 0.03, "error": 1.2533 * 1.4826 / 3**0.5})
    assert found["logging"] == pytest.approx({"ms": 1, "share": 0.01, "error": 0})
    assert found["checkpoints"] == pytest.approx({"ms": 60, "share": 0.001, "error": 1.2533 * 1.4826 * 30 / 3**0.5})


def test_a_person_gets_every_figure_as_text_beside_the_json(printed):
    result, said = printed
    for word in ("tokens_per_s", "eager", "forward", "adam", "best square", "own shapes", "MLP down", "float32",
                 "MiB", "guards", "checkpoints", "over the schedule"):  # fmt: skip
        assert word in said
    for stage in result["stages"]:
        assert f"{stage['step_ms']:.2f}" in said


# ---- Parts


def test_time_goes_to_the_innermost_part_and_by_its_share(monkeypatch):
    ticks = iter(np.cumsum([0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]))
    monkeypatch.setattr(bench_step.time, "perf_counter", lambda: next(ticks))
    watch = bench_step.Stopwatch(environment.start("cpu"))
    with watch.part("outer"):
        with watch.part("inner", 1, share=0.5):
            pass
        with watch.part("outer"):
            pass
    watch.end_round(keep=True)
    # In turn: 1 s of outer, 2 of inner, 4 of outer, 8 of the outer within it, 16 of outer.
    assert watch.ms == {("outer",): [1000 * (1 + 4 + 8 + 16)], ("inner", 1): [500 * 2]}


def test_a_step_in_parts_is_the_trainers_step_bit_for_bit_and_leaves_nothing_wrapped(flags):
    """Same data, same losses, same update."""
    session = prepared([*flags, "--windows", "3"])
    weights, before = list(session.model.parameters()), train_gpt.batch_loss
    watch = bench_step.Stopwatch(session.machine)
    with session.data.train:
        for step in range(2):
            train_gpt.optimizer_steps(session, step, train_gpt.forward_backward(session, session.windows(3)))
        expected = [weight.detach().clone() for weight in weights]
        session.reset(session.config.seed)
        with bench_step.apart(session, watch.part):
            for step in range(2):
                train_gpt.optimizer_steps(session, step, train_gpt.forward_backward(session, session.windows(3)))
        watch.end_round(keep=True)
    assert all(torch.equal(weight, wanted) for weight, wanted in zip(weights, expected, strict=True))
    assert {name for (name,) in watch.ms} == {"data", "forward", "reduce", "matrix", "adam"}
    assert train_gpt.batch_loss is before
    assert not {"propose", "commit"} & {name for optimizer in session.optimizers.values() for name in vars(optimizer)}


def test_what_waits_for_a_message_is_waited_for_in_its_part():
    seen: list[str] = []

    def send() -> object:
        seen.append("sent")
        return lambda: seen.append("arrived") or "news"

    @contextmanager
    def part() -> Iterator[None]:
        seen.append("begun")
        yield
        seen.append("over")

    wait = bench_step.charged(send, part)()
    assert seen == ["begun", "sent", "arrived", "over"]
    assert wait() == wait() == "news"
    assert seen == ["begun", "sent", "arrived", "over"]


def test_of_two_ranks_the_first_tells_what_travels_between_them(flags):
    own = ["--", *flags, "--micro-batch", "256", "--deterministic", "off"]
    command = [sys.executable, "-c", SCRIPT, "--rounds", "1", "--steps", "2", "--windows", "last", "--json", *own]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=small_run.ROOT,
                         env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"})
        for rank in "01"
    ]  # fmt: skip
    try:
        (first, said), (second, _) = (rank.communicate(timeout=300) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert second == ""
    found = json.loads(first)
    assert found["world_size"] == 2
    assert [stage["window"] for stage in found["stages"]] == [16 * 13]
    assert 0 < found["stages"][0]["parts_share"]["reduce"] < 1


# ---- Another trainer


def test_trainers_are_compared_by_their_own_step_times_in_turn(flags, tmp_path, monkeypatch, capsys):
    (tmp_path / "public.py").write_text(PUBLIC.format(steps=40, code=0))
    command = shlex.join([sys.executable, str(tmp_path / "public.py")])
    seen, order = [], []
    run_trainer = against.run_trainer

    def run(command: list[str], logs: Path | None) -> float:
        order.append("other" if logs is None else "own")
        if logs is None:
            return run_trainer(command, logs)
        seen.append((command, logs))
        return 16.0

    monkeypatch.setattr(against, "run_trainer", run)
    words = ["--against", command, "--against-tokens", "100", "--rounds", "2", "--json", "--", *flags]
    assert bench_step.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert order == ["other", "own", "own", "other"]  # theirs first, as it may be mistyped
    assert result["ms"] == {"own": [16.0, 16.0], "other": [8.0, 8.0]}
    assert result["batch_tokens"] == {"own": BATCH, "other": 100}
    assert result["ratio"]["median"] == pytest.approx(BATCH / 16 / (100 / 8))
    assert all(str(small_run.ROOT / "train_gpt.py") in own and own[-4] == "--log-dir" for own, _ in seen)


def test_our_own_log_tells_the_time_of_a_step(flags, tmp_path):
    logs = tmp_path / "logs"
    outcome = small_run.run_words([*flags, "--steps", "16", "--val-every", "0", "--log-dir", str(logs)], logs)
    ms = against.run_trainer([sys.executable, "-c", "print('says nothing of steps')"], logs)
    times = [event["train_time_ms"] for event in outcome.events("step")][9:]
    pairs = [(later - earlier) / 2 for earlier, later in zip(times, times[2:], strict=False)]
    assert ms == pytest.approx(float(np.median(pairs)))


@pytest.mark.parametrize(
    ("trainer", "problem", "last"),
    [
        (PUBLIC.format(steps=40, code=3), "exit status 3", "some warning"),
        (PUBLIC.format(steps=12, code=0), "13 steps or more", "step:12/12"),
        ("print('hello')", "what it printed is no run log", "hello"),
        ("", "what it printed is no run log", "(nothing)"),
    ],
)
def test_a_trainer_that_tells_no_times_is_refused_with_its_last_lines(trainer, problem, last, tmp_path):
    path = tmp_path / "public.py"
    path.write_text(trainer)
    with pytest.raises(ValueError, match=problem) as refusal:
        against.run_trainer([sys.executable, str(path)], None)
    reason, *lines = str(refusal.value).splitlines()
    assert last in "\n".join(lines)
    assert reason.endswith(". It said last:")
    assert ".." not in reason
    assert "out.txt" not in reason


# ---- Bad input


@pytest.mark.parametrize("words", [["--", "--dimm", "128"], ["--", "--data-dir", "nowhere"],
                                   ["--against", "no-such-program", "--rounds", "1", "--", "--dimm", "1"],
                                   ["--against", "no-such-program", "--rounds", "1"]])  # fmt: skip
def test_bad_flags_and_commands_are_refused_in_a_sentence(words, capsys):
    assert bench_step.main(words) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_command_that_no_shell_would_take_is_refused_with_its_flag(capsys):
    assert bench_step.main(["--against", "echo 'open"]) == 2
    expected = "error: --against echo 'open: No closing quotation. Quote it as for a shell.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--steps", "0"], ["--windows", "0"], ["--windows", "some"],
                                   ["--windows", "12345678901234567890"], ["--against-tokens", "-1"],
                                   ["--against", ""], ["--against", " "]])  # fmt: skip
def test_impossible_settings_are_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_step.main(words)
    assert words[0] in capsys.readouterr().err


def test_a_comparison_is_not_started_by_each_rank_of_a_launcher(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        bench_step.main(["--against", "torchrun theirs.py"])
    assert "without torchrun; NPROC=8" in capsys.readouterr().err


def test_a_program_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="no-such-program"):
        against.run_trainer(["no-such-program"], None)
