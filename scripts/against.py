"""Whole trainers in turn: ours and another one, each a process, compared by the step times that their logs tell."""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from claims.runlog import LogError, find_runs, read_runs

TRAINER = str(Path(__file__).resolve().parents[1] / "train_gpt.py")
LEFT_OUT = 10  # first steps of a run
LAST_LINES = 8  # that are shown of one that failed


def run_trainer(command: list[str], logs: Path | None) -> float:
    """The median time of a trainer's steps, in milliseconds, from the run log in `logs` or from what it says.

    Without the first LEFT_OUT steps, in pairs, as an optimizer may move on every second. ValueError, with its last
    lines, for one that fails or does not tell enough times.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = said = [Path(folder, name) for name in ("out.txt", "err.txt")]
        times, reason = [], f"it must tell the times of {LEFT_OUT + 3} steps or more"
        try:
            with out.open("w") as output, err.open("w") as errors:
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, check=True)
            steps = read_runs(find_runs([logs or out])[-1])[-1].steps[LEFT_OUT - 1 :]
            times = [step.train_time_ms for step in steps if step.train_time_ms is not None]
        except (OSError, subprocess.CalledProcessError, LogError) as error:
            reason = str(error).replace(str(logs or out), "its logs" if logs else "what it printed").rstrip(".")
        if len(times) < 4:
            last = [line for file in said for line in file.read_text(errors="replace").splitlines()][-LAST_LINES:]
            raise ValueError("\n  ".join([f"{shlex.join(command)}: {reason}. It said last:", *(last or ["(nothing)"])]))
    return float(np.median(np.subtract(times[2:], times[:-2]))) / 2


def against(theirs: str, their_tokens: int, flags: list[str], our_tokens: int, rounds: int) -> dict[str, Any]:
    """A command and our trainer with its flags, at so many tokens a step; the ratio is of tokens a second, by round."""
    try:
        other = shlex.split(theirs)
    except ValueError as error:
        raise ValueError(f"--against {theirs}: {error}. Quote it as for a shell.") from None
    ranks = os.environ.get("NPROC") or max(torch.cuda.device_count(), 1)
    own = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", TRAINER, *flags]
    tokens = {"own": our_tokens, "other": their_tokens}
    ms: dict[str, list[float]] = {"own": [], "other": []}
    for number in range(rounds):
        for name in sorted(ms, reverse=number % 2 == 1):  # theirs first: it may be mistyped
            with tempfile.TemporaryDirectory() as logs:
                ours = [*own, "--log-dir", logs, "--checkpoint-dir", logs]
                ms[name].append(run_trainer(ours, Path(logs)) if name == "own" else run_trainer(other, None))
    rates = {name: 1000 * tokens[name] / np.array(ms[name]) for name in ms}
    ratio = rates["own"] / rates["other"]
    return {
        "own": shlex.join(flags), "other": theirs, "batch_tokens": tokens, "ms": ms,
        "tokens_per_s": {name: float(np.median(rate)) for name, rate in rates.items()},
        "ratio": {"median": float(np.median(ratio)), "low": float(min(ratio)), "high": float(max(ratio))},
    }  # fmt: skip


def against_text(result: dict[str, Any]) -> str:
    sides = [
        f"{name:6}{np.median(ms):10.2f} ms a step ({', '.join(f'{each:.2f}' for each in ms)}) of "
        f"{result['batch_tokens'][name]:,} tokens, {result['tokens_per_s'][name]:,.0f} tokens/s: {result[name]}"
        for name, ms in result["ms"].items()
    ]
    return "\n".join([*sides, "own / other: {median:.3f} ({low:.3f}-{high:.3f}) in tokens/s".format(**result["ratio"])])
