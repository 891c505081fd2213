"""The comparison of two arms: against scipy, and logs whose difference is known beforehand."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_ind

from claims.comparison import account
from claims.logs import read_run
from scripts import compare

SCRIPT = Path(compare.__file__)


def write_log(
    path: Path, ms: Sequence[float], *, begin: str = "000000", source: str = "ab",
    wait: float = 0.0, timed: bool = True, status: str = "done", **env: object,
) -> Path:  # fmt: skip
    """A log of ours of steps that take so many milliseconds, validated half-way and at the end.

    `wait` is what the clock gains before each validation; `timed=False` leaves the steps out.
    """
    total, now = len(ms), 0.0
    known = {"gpu": "H100", "gpu_count": 8, "torch": "2.13"} | env
    events: list[dict] = [{
        "event": "header", "schema": 2, "run_id": f"20261101-{begin}_{path.parent.name}{path.stem}",
        "track": "tiny", "target": 3.3, "seed": int(begin), "trial": 0, "source_sha256": source,
        "config_sha256": "cd", "env": known,
    }]  # fmt: skip
    for step, own in enumerate(ms, 1):
        now += own
        if timed:
            events.append({"event": "step", "step": step, "train_time_ms": now, "stage": 0,
                           "window": 128, "skipped": False})  # fmt: skip
        if step in (total // 2, total):
            now += wait
            events.append({"event": "val", "step": step, "total_steps": total, "val_loss": 3.2,
                           "train_time_ms": now})  # fmt: skip
    events.append({"event": "end", "status": status, "steps": total, "val_loss": 3.2})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event | {"t_ms": 0.0}) + "\n" for event in events))
    return path


def write_arm(folder: Path, runs: Sequence[Sequence[float]], first: int = 0, **facts) -> str:
    """Logs that start one minute after the other, the first of them at minute `first`."""
    for i, ms in enumerate(runs):
        write_log(folder / f"{i}.jsonl", ms, begin=f"00{first + i:02}00", **facts)
    return str(folder)


def noisy(seed: int, runs: int, steps: int, ms: float, spread: float = 0.3) -> list[list[float]]:
    return (ms + spread * np.random.default_rng(seed).standard_normal((runs, steps))).tolist()


def report(capsys, *words: object) -> dict:
    """What --json prints."""
    compare.main([*map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


# ---- The difference and its parts


def test_the_difference_is_that_of_welch_and_decides_the_exit_code(tmp_path, capsys):
    a = write_arm(tmp_path / "a", noisy(0, 4, 60, 30))
    b = write_arm(tmp_path / "b", noisy(1, 5, 60, 29), first=10, source="b")
    found = report(capsys, a, b)
    test = ttest_ind(found["b"], found["a"], equal_var=False)
    interval = test.confidence_interval(0.95)
    seconds = found["seconds"]
    assert (seconds["low"], seconds["high"]) == pytest.approx((interval.low, interval.high))
    assert seconds["p_two_sided"] == pytest.approx(test.pvalue)
    assert (compare.main([a, b]), compare.main([b, a])) == (0, 1)


def test_fewer_steps_a_faster_step_and_fewer_stutters_are_told_apart(tmp_path, capsys):
    """A: 100 steps of 30 ms with a hiccup of 500 ms more; B: 90 steps of 28 ms without."""
    slow = noisy(0, 4, 100, 30)
    for ms in slow:
        ms[40] += 500
    a = write_arm(tmp_path / "a", slow)
    b = write_arm(tmp_path / "b", noisy(1, 4, 90, 28), first=10, source="b")
    why = report(capsys, a, b)
    parts = why["steps"] + why["step_time"]["mean"] + why["stutters"]["mean"]
    assert parts == pytest.approx(why["seconds"]["mean"])
    assert why["steps"] == pytest.approx(-0.29, abs=0.005)
    assert why["step_time"]["mean"] == pytest.approx(-0.19, abs=0.01)
    assert why["stutters"]["mean"] == pytest.approx(-0.50, abs=0.005)
    assert why["stutters_at"] == [[41], []]


def test_slower_even_steps_later_stages_and_waits_before_validations_are_no_stutters(tmp_path):
    ms = np.concatenate([np.tile([20.0, 60.0], 60), np.tile([50.0, 150.0], 60)])
    plain = account(read_run(write_log(tmp_path / "a.jsonl", ms.tolist(), wait=100.0)))
    assert not plain.stutters
    assert plain.step_ms == pytest.approx((sum(ms) + 200.0) / 240)
    ms[[60, 61, 200]] += 900
    found = account(read_run(write_log(tmp_path / "b.jsonl", ms.tolist())))
    assert found.stutters == pytest.approx({61: 0.9, 62: 0.9, 201: 0.9}, abs=0.01)


def test_logs_that_do_not_time_every_step_still_tell_steps_from_speed(tmp_path, capsys):
    a = write_arm(tmp_path / "a", [[30] * 100, [31] * 100], timed=False)
    b = write_arm(tmp_path / "b", [[28] * 90, [29] * 90], first=10, source="b", timed=False)
    why = report(capsys, a, b)
    assert (why["steps"], why["step_time"]["mean"]) == pytest.approx((-0.295, -0.190))


# ---- Machines and arms


def test_other_software_is_refused_unless_allowed_and_named(tmp_path, capsys):
    a = write_arm(tmp_path / "a", noisy(0, 3, 50, 30))
    b = write_arm(tmp_path / "b", noisy(1, 3, 50, 29), first=10, torch="2.9")
    assert compare.main([a, b]) == 2
    assert "torch: {'2.13': 3} in A, {'2.9': 3} in B" in capsys.readouterr().err
    assert compare.main([a, b, "--allow-mismatch"]) == 0
    assert "DIFFERS in torch" in capsys.readouterr().out


def test_unfinished_runs_are_left_out_and_a_shared_log_is_refused(tmp_path, capsys):
    a = write_arm(tmp_path / "a", noisy(0, 3, 50, 30))
    write_log(tmp_path / "a" / "cut.jsonl", [1.0] * 50, begin="005000", status="interrupted")
    b = write_arm(tmp_path / "b", noisy(1, 3, 50, 29), first=10)
    assert compare.main([a, b]) == 0
    assert "cut.jsonl: ended with status interrupted" in capsys.readouterr().out
    assert compare.main([a, a]) == 2
    assert "is in both arms" in capsys.readouterr().err


def test_two_arms_of_one_folder_are_listed_and_can_be_selected(tmp_path, capsys):
    write_arm(tmp_path, noisy(0, 3, 50, 30), source="a" * 64)
    for ms, name in zip(noisy(1, 3, 40, 29), "xyz", strict=True):
        write_log(tmp_path / f"{name}.jsonl", ms, begin=f"0100{ord(name)}", source="b" * 64)
    assert compare.main([str(tmp_path), str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}:steps=50 has 3 runs\n  {tmp_path}:steps=40 has 3 runs" in error
    assert "a" * 13 not in error
    assert compare.main([f"{tmp_path}:steps=50", f"{tmp_path}:steps=40"]) == 0


# ---- Runs made here


def test_commands_run_in_turn_and_their_logs_give_the_times(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = []
    for name, ms in (("a", 30.0), ("b", 20.0)):
        log = write_log(tmp_path / f"{name}.jsonl", [ms] * 50)
        commands.append(f"copy() {{ cp {log} $2; }}; copy")  # $1 is --log-dir
    assert compare.main(["--run", *commands, "--rounds", "2", "--json"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["a"], found["b"]) == ([1.5, 1.5], [1.0, 1.0])
    turns = [line.split(", ")[1][0] for line in captured.err.splitlines()]
    assert turns == ["A", "B", "B", "A"]


def test_a_command_that_fails_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert compare.main(["--run", "exit 7; true", "true"]) == 2
    assert "exit code 7: exit 7; true --log-dir " in capsys.readouterr().err


def test_a_signal_ends_the_command_that_runs_too(tmp_path):
    pid = tmp_path / "pid"
    slow = f"echo $$ > {pid}; sleep 60; :"
    process = subprocess.Popen([sys.executable, SCRIPT, "--run", slow, slow], cwd=tmp_path)
    for _ in range(600):
        if pid.exists() and pid.read_text().strip():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize("words", [["logs"], ["logs", "logs", "--run", "a", "b"]])
def test_one_of_two_arms_and_two_commands_is_needed(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare.main(words)
    assert "name two arms, A and B, or --run two commands" in capsys.readouterr().err


def test_single_runs_have_a_difference_and_no_interval(tmp_path, capsys):
    a, b = write_arm(tmp_path / "a", [[30] * 50]), write_arm(tmp_path / "b", [[20] * 50], first=5)
    assert compare.main([a, b]) == 1
    assert "-0.500 (no interval) s" in capsys.readouterr().out
    assert report(capsys, a, b)["seconds"]["low"] is None
