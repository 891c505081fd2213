"""What a run shows: lines, the live block, start-up and the end."""

import io
import re
import subprocess
import sys
import time
from statistics import mean, stdev
from types import SimpleNamespace

import pytest
from small_run import ROOT
from stub_trainer import logs_of, run, trainer_in

from runtime import terminal
from runtime.clock import Phase
from runtime.plan import header
from runtime.terminal import Progress, closing


def an_event(step, loss=2.0, skipped=False, train_time_ms=1000.0):
    return {
        "step": step, "tokens": 4 * step, "train_time_ms": train_time_ms, "lr_mul": 0.5,
        "window": 896, "stage": 0, "train_loss": loss, "skipped": skipped, "grad_norm": 12.0,
    }  # fmt: skip


def make(folder, **changed):
    trainer = trainer_in(folder, **changed)
    return Progress(trainer, header(trainer, 0, 0) | {"train_tokens": 400})


def pretend_terminal(monkeypatch, encoding="utf-8"):
    """Give the test a stdout that says it is a terminal which can show a block."""
    pytest.importorskip("rich", reason="the live block needs rich")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    monkeypatch.setattr(stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return stdout.buffer


# ---- Numbers


def test_a_line_comes_every_5_seconds_at_most_and_for_the_last_step(tmp_path, monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = make(tmp_path)
    for step in range(1, 11):
        lines.step(an_event(step))
        now[0] += 1.0
    said = re.findall(r"^step (\d+)/10 ", capsys.readouterr().out, re.MULTILINE)
    assert said == ["1", "6", "10"]


def test_the_time_left_counts_the_validations_that_are_left(tmp_path):
    lines = make(tmp_path)  # it validates before steps 0 and 5, and after step 10
    lines.header["data"]["val_tokens"] = 120
    lines.step(an_event(5, train_time_ms=5000.0))
    # 380 tokens at 4 a second, and two validations at three times the speed of training.
    assert lines.seconds_left() == pytest.approx(95 + 2 * 10)
    lines.validated(5, 2.0)
    assert lines.seconds_left() == pytest.approx(95 + 10)


# ---- The live block


def test_what_a_run_says_goes_above_the_block_and_the_target_line_is_whole(tmp_path, monkeypatch):
    written = pretend_terminal(monkeypatch)
    assert run(tmp_path) == 0
    out = written.getvalue().decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)
    assert "step 10 of 10 " + "━" * terminal.WIDTH + " done" in plain
    assert "step 5/10 | validation loss " in plain
    assert "| train loss" not in plain, "no lines beside the block"
    after = out.rpartition("\x1b[?25h")[2]  # where the cursor is shown again
    assert re.search(r"(?m)^target 1\.0 reached: val_loss .* \(log .*\.jsonl\)\n", after)
    assert plain.count("target 1.0 reached") == 1


@pytest.mark.parametrize(("term", "encoding", "packages", "drawn"), [
    ("xterm", "utf-8", True, True), ("dumb", "utf-8", True, False),
    ("xterm", "ascii", True, False), ("xterm", "utf-8", False, False),
])  # fmt: skip
def test_a_terminal_that_cannot_show_the_block_gets_lines(
    term, encoding, packages, drawn, tmp_path, monkeypatch
):
    pretend_terminal(monkeypatch, encoding)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(terminal, "find_spec", lambda name: packages)
    opened = make(tmp_path)
    opened.close()
    assert (opened._block is not None) == drawn


def test_the_block_fits_into_80_columns_and_shows_what_goes_on(tmp_path, monkeypatch):
    pretend_terminal(monkeypatch)
    monkeypatch.setattr(terminal, "peak_flops", lambda machine, dtype: 48.0)
    block = make(tmp_path)
    block.validated(0, 6.9315)
    for step, loss in enumerate([8.0, 7.0, 6.0, 5.0, 4.0, float("inf")], 1):
        block.step(an_event(step, loss, skipped=step == 6))
    lines = block.draw().plain.splitlines()
    with block.pause("validate"):
        assert "off the clock: validate, 0 s" in block.draw().plain
    block.close()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("step 6 of 10 ━━━")
    assert lines[1] == "train loss 6.0000 | validation 6.9315 | target 1.0"
    assert lines[2] == "grad 12 | lr x0.500 | window 896 | 24 tok/s | MFU 50.0% | 1.0 s | 1 skipped"


def test_a_terminal_that_closes_does_not_end_the_run(tmp_path, monkeypatch):
    pretend_terminal(monkeypatch)
    monkeypatch.setattr(terminal, "FRAMES_PER_SECOND", 0.001)  # the thread stays out of it
    block = make(tmp_path)

    def closed(text):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(block._block.console.file, "write", closed)
    block.step(an_event(1))
    block.close()


# ---- The end


@pytest.mark.parametrize("changed", [{"trials": 2}, {"keep_model": True}])
def test_the_closing_lines_add_up_the_phases_and_their_commands_start_when_pasted(
    changed, tmp_path, monkeypatch
):
    """In the folder of the source, by a shell that finds no python."""
    monkeypatch.chdir(ROOT)
    trainer = trainer_in(tmp_path, checkpoint_dir="checkpoints", **changed)
    phases = [
        Phase("setup", False, 1000), Phase("train", True, 2000), Phase("validate", False, 500),
        Phase("train", True, 3000), Phase("validate", False, 600),
    ]  # fmt: skip
    clock = SimpleNamespace(phases=phases, train_time_ms=5000.0)
    time, *lines = closing(trainer, clock, {}).splitlines()
    assert time == "  time  5.0 s on the clock; 7.1 s in all, with setup 1.0, validate 1.1"
    assert "time  of the last run: 5.0 s" in closing(trainer, clock, {0: 3.0, 1: 3.2})
    assert [line[:8] for line in lines] == ["  draw  ", "  next  "]
    for line in lines:
        words = re.search(r"^  \w+  (.*\.py)", line)[1]
        done = subprocess.run(
            f"{words} --help", shell=True, capture_output=True, text=True, env={"PATH": "/nowhere"},
            executable="/bin/sh",
        )  # fmt: skip
        assert done.stdout.startswith("usage: "), done.stderr


def test_the_summary_comes_once_after_the_last_of_several_runs(tmp_path, capsys):
    assert run(tmp_path, trials=3) == 0
    lines = capsys.readouterr().out.splitlines()
    targets = [index for index, line in enumerate(lines) if ": target " in line]
    assert [lines[index][:7] for index in targets] == ["seed 0:", "seed 1:", "seed 2:"]
    losses = [float(re.search("val_loss ([0-9.]+)", lines[index])[1]) for index in targets]
    spread = f"mean loss {mean(losses):.4f}, sd {stdev(losses):.4f}"
    assert lines[targets[-1] + 1] == f"  runs  3, seeds 0 to 2: {spread}"
    assert lines[targets[-1] + 2].startswith("  time ")
    assert len(lines) == targets[-1] + 5


def test_a_display_that_fails_leaves_no_log_behind(tmp_path, monkeypatch):
    def broken(*given):
        raise RuntimeError("no such display")

    monkeypatch.setattr("runtime.run.Progress", broken)
    with pytest.raises(RuntimeError, match="no such display"):
        run(tmp_path)
    assert logs_of(tmp_path) == []
