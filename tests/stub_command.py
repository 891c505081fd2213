"""`python train_gpt.py FLAGS` as commands start it: the same flags and logs, without a process."""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO
from unittest.mock import Mock

import pytest
from test_significance import write_run

from claims.record import TRACKS
from runtime.log import config_hash
from runtime.registry import REGISTRY, register
from runtime.source import source_hash
from scripts import side_by_side

# What train_gpt.py holds here: the loss of its runs, whether a gain is on copied tokens only, and
# whether runs log another source, as after an edit.
FACTS = {"loss": 3.4, "only_copies": False, "edited": False}
TINY = TRACKS["tiny"]
CONFIG = TINY.fixed | {
    "track": "tiny", "recipe": "record89", "target": TINY.target, "val_tokens": TINY.val_tokens,
}  # fmt: skip
FLAGS = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
for name, default in {"gain": 0.0, "steps": 10, "seed": 0, "trials": 1, "idle": 0}.items():
    FLAGS.add_argument(f"--{name}", type=type(default), default=default)
FLAGS.add_argument("--diverge", type=int, help="the seed of a run that diverges")
for name in ("log-dir", "claim", "track", "recipe"):
    FLAGS.add_argument(f"--{name}")
for name in ("checkpoint-dir", "keep-model", "sample-tokens"):
    FLAGS.add_argument(f"--{name}", help="has no effect here")
for name in ("print-config", "quick", "die"):
    FLAGS.add_argument(f"--{name}", action="store_true")


def loss_of(seed: int, gain: float = 0.0, loss: float = FACTS["loss"]) -> float:
    jitter = random.Random(f"{seed} {gain}").gauss(0, 0.01)
    return loss + random.Random(seed).gauss(0, 0.05) + jitter - gain


def write_source(root: Path, **changed: object) -> None:
    (root / "train_gpt.py").write_text(json.dumps(FACTS | changed, indent=1))


def train(words: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of the command."""
    source = Path(words[1])
    facts = json.loads(source.read_text())
    given, unknown = FLAGS.parse_known_args(words[2:])
    config = CONFIG | {"steps": given.steps, "gain": given.gain, "idle": given.idle}
    if given.quick:
        config["val_tokens"] = 1024
    if unknown:
        return 2, f"error: {unknown[0]}: no such flag"
    if given.print_config:
        return 0, json.dumps(config)
    if given.die:
        return 1, "out of coffee\n"
    folder = Path(given.log_dir)
    for trial in range(given.trials):
        seed, run_id = given.seed + trial, f"2026_{time.time_ns()}"
        diverged = seed == given.diverge
        loss = loss_of(seed, given.gain, facts["loss"])
        apart = loss - facts["loss"]  # its noise and the gain
        on_new = apart + given.gain if facts["only_copies"] else apart
        log = write_run(
            folder, run_id, {} if diverged else {given.steps: loss}, seed=seed, track="tiny",
            total=given.steps, step_ms=1000 * (1 + apart) / given.steps,
            source="another" if facts["edited"] else source_hash(source.parent),
            config=config_hash(config), settings=config, probes={"new_loss": 4 + on_new / 2},
            status="nonfinite" if diverged else "done", gpus=0, threads=1, cpu="Abacus",
        )  # fmt: skip
        register(folder / REGISTRY, "start", run_id=run_id, seed=seed)
        sha256 = hashlib.sha256(log.read_bytes()).hexdigest()
        register(folder / REGISTRY, "end", run_id=run_id, log_sha256=sha256)
        with (folder / "calls").open("a") as calls:
            calls.write(f"{run_id} {folder.name} {seed} {trial}\n")
        if diverged:
            return 3, ""
    return 0, ""


def child_process(words: Sequence[str], stdout: TextIO, **options: object) -> nullcontext:
    """A training that is done when it is looked at."""
    code, output = train(words)
    stdout.write(output)
    return nullcontext(Mock(poll=lambda: code, returncode=code))


def make_project(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with this trainer, where commands run on a machine of two cores without a GPU."""
    really_run = subprocess.run

    def run(words: list[str], **options: object) -> subprocess.CompletedProcess:
        if words[0] != sys.executable:
            return really_run(words, **options)
        code, output = train(words)
        return subprocess.CompletedProcess(words, code, output, output)

    root.mkdir()
    write_source(root)
    monkeypatch.chdir(root)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(side_by_side, "child_process", child_process)
    monkeypatch.setattr(side_by_side, "which", lambda name: None)
    monkeypatch.setattr(side_by_side, "cpu_name", lambda: "Abacus")
    monkeypatch.setattr(side_by_side, "cores", lambda: 2)
    monkeypatch.setattr(side_by_side, "POLL_S", 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return root
