"""What a run shows: lines while it trains, and at its end."""

import re
import subprocess
import time
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
    # 380 tokens at 4 a second, and validations at three times the speed of training.
    assert lines.seconds_left(an_event(5, train_time_ms=5000.0)) == pytest.approx(95 + 2 * 10)
    assert lines.seconds_left(an_event(6, train_time_ms=6000.0)) == pytest.approx(94 + 10)


def test_a_line_has_the_numbers_of_the_step_and_the_smoothed_loss(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "peak_flops", lambda machine, dtype: 48.0)
    lines = make(tmp_path)
    lines.header["data"]["val_tokens"] = 120
    for step, loss in enumerate([8.0, 7.0, 6.0, 5.0, 4.0, float("inf")], 1):
        lines.step(an_event(step, loss, skipped=step == 6))
    lines.step(an_event(10, float("inf"), skipped=True))
    assert capsys.readouterr().out.splitlines()[-1] == (
        "step 10/10 100% | train loss 6.0000 | grad 12 | lr x0.500 | window 896 | 40 tok/s | "
        "MFU 83.3% | 1.0 s | 2 skipped | 0:00:10 left"
    )


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


def test_a_display_that_fails_leaves_no_log_behind(tmp_path, monkeypatch):
    def broken(*given):
        raise RuntimeError("no such display")

    monkeypatch.setattr("runtime.run.Progress", broken)
    with pytest.raises(RuntimeError, match="no such display"):
        run(tmp_path)
    assert logs_of(tmp_path) == []
