"""What a run shows: lines while it trains, and at its end."""

import re
import subprocess
import time
from dataclasses import replace

import pytest
from small_run import ROOT, brief

from runtime import terminal
from runtime.clock import Clock, Phase
from runtime.terminal import Progress, closing

pytestmark = pytest.mark.usefixtures("two_layers")


def an_event(step, loss=2.0, skipped=False, train_time_ms=1000.0):
    return {
        "step": step, "tokens": 4 * step, "train_time_ms": train_time_ms, "lr_mul": 0.5,
        "window": 896, "stage": 0, "train_loss": loss, "skipped": skipped, "grad_norm": 12.0,
    }  # fmt: skip


@pytest.fixture
def trainer(data, tmp_path):
    """The trainer of a run of ten steps, which validates before steps 0 and 5, and at its end."""
    found = []
    brief(data, tmp_path, {1: lambda run: found.append(run.trainer)})
    return found[0]


@pytest.fixture
def progress(trainer):
    return Progress(trainer, {"train_tokens": 400, "data": {"val_tokens": 120}})


# ---- Numbers


def test_a_line_comes_every_5_seconds_at_most_and_for_the_last_step(progress, monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for step in range(1, 11):
        progress.step(an_event(step))
        now[0] += 1.0
    said = re.findall(r"^step (\d+)/10 ", capsys.readouterr().out, re.MULTILINE)
    assert said == ["1", "6", "10"]


def test_the_time_left_counts_the_validations_that_are_left(progress):
    # 380 tokens at 4 a second, and validations at three times the speed of training.
    left = progress.seconds_left(an_event(5, train_time_ms=5000.0))
    assert left == pytest.approx(95 + 2 * 10)
    left = progress.seconds_left(an_event(6, train_time_ms=6000.0))
    assert left == pytest.approx(94 + 10)


def test_a_line_has_the_numbers_of_the_step_and_the_smoothed_loss(progress, monkeypatch, capsys):
    flops = progress.trainer.model.flops_per_token()
    monkeypatch.setattr(terminal, "peak_flops", lambda machine, dtype: 48.0 * flops)
    for step, loss in enumerate([8.0, 7.0, 6.0, 5.0, 4.0, float("inf")], 1):
        progress.step(an_event(step, loss, skipped=step == 6))
    progress.step(an_event(10, float("inf"), skipped=True))
    line = capsys.readouterr().out.splitlines()[-1]
    for number in ("10/10 100%", "train loss 6.0000", "grad 12", "x0.500", "window 896", "40 tok/s",
                   "MFU 83.3%", "1.0 s", "2 skipped", "0:00:10 left"):  # fmt: skip
        assert f" {number} |" in f" {line} |", line


# ---- The end


@pytest.mark.parametrize("changed", [{"trials": 2}, {"keep_model": True}])
def test_the_closing_lines_add_up_the_phases_and_their_commands_start_when_pasted(
    changed, trainer, monkeypatch
):
    """In the folder of the source, by a shell that finds no python."""
    monkeypatch.chdir(ROOT)
    trainer.config = replace(trainer.config, checkpoint_dir="checkpoints", **changed)
    clock = Clock()
    clock.resume_run(5000.0, lost_ms=0.0)
    clock.phases = [
        Phase("setup", False, 1000), Phase("train", True, 2000), Phase("validate", False, 500),
        Phase("train", True, 3000), Phase("validate", False, 600),
    ]  # fmt: skip
    time, *lines = closing(trainer, clock, {}).splitlines()
    assert time == "  time  5.0 s on the clock; 7.1 s in all, with setup 1.0, validate 1.1"
    several = closing(trainer, clock, {0: 3.0, 1: 3.2})
    assert "seeds 0 to 1: mean loss 3.1000, sd 0.1414" in several
    assert "time  of the last run: 5.0 s" in several
    assert [line[:8] for line in lines] == ["  draw  ", "  next  "]
    for line in lines:
        words = re.search(r"^  \w+  (.*\.py)", line)[1]
        done = subprocess.run(
            f"{words} --help", shell=True, capture_output=True, text=True, env={"PATH": "/nowhere"},
            executable="/bin/sh",
        )  # fmt: skip
        assert done.stdout.startswith("usage: "), done.stderr


def test_a_display_that_fails_leaves_no_log_behind(data, tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.run.Progress", lambda *given: 1 / 0)
    outcome = brief(data, tmp_path)
    assert (outcome.code, outcome.logs) == (1, [])
