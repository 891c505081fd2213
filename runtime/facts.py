"""What the trainer reports of a run: the log's header, and lines before and after the steps.

`trainer` is that of train_gpt.py.
"""

import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.clock import Clock
from runtime.log import config_hash
from runtime.machine import peak_flops


def header(trainer: Any, seed: int, trial: int) -> dict[str, Any]:
    """The fields of the log's header for one run."""
    config, train = trainer.config, trainer.data.train
    settings = asdict(config)
    return {
        "track": config.track, "target": config.target, "seed": seed, "trial": trial,
        "claim": trainer.claim, "source_sha256": trainer.source_sha256,
        "config_sha256": config_hash(settings),
        "config": settings, "train_tokens": trainer.train_tokens,
        "data": trainer.hashes | {"val_tokens": config.val_tokens},
        "env": trainer.env, "checks": trainer.checks, "world_size": trainer.machine.world_size,
        "micro_batch": train.micro_rows * config.seq_len,
        "grad_accum": train.rows // train.micro_rows,
    }  # fmt: skip


def where(trainer: Any, step: int) -> dict[str, Any]:
    """Shard and token offset from which this step, counted from 1, was read."""
    return trainer.data.train.where(step)


def summary(trainer: Any) -> str:
    """Lines for people: model, data and target; with `verbose` also every choice and its reason."""
    config, machine, plan = trainer.config, trainer.machine, trainer.data.plan
    batches = " then ".join(dict.fromkeys(f"{tokens:,}" for _, tokens, _ in trainer.changes))
    devices = trainer.env["gpu"] or trainer.env["cpu"]
    if machine.world_size > 1:
        devices = f"{machine.world_size} ranks, each on {devices}"
    lines = [
        f"track {config.track}, recipe {config.recipe}: a GPT of {trainer.env['params']:,} "
        f"parameters in {trainer.env['dtype']}, on {devices}",
        f"training: {config.steps:,} steps of {batches} tokens, from {config.data_dir}",
        f"target: a validation loss of {config.target} on {config.val_tokens:,} other tokens; "
        f"uniform guessing: {math.log(config.vocab_size):.2f}",
    ]
    if config.verbose:
        first = header(trainer, config.seed, 0)
        lines += [f"{name} {trainer.env[name]} ({why})" for name, why in trainer.chosen.items()]
        lines += [
            f"{plan.tokens_needed:,} of {plan.tokens_available:,} tokens; a step is "
            f"{machine.world_size} rank(s) x {first['grad_accum']} micro-step(s) x "
            f"{first['micro_batch']:,} tokens",
            trainer.guard.describe(),
        ]
    if trainer.off_track:
        lines.append(f"off the track, no claim can be made: {'; '.join(trainer.off_track)}")
    return "\n".join(lines)


def closing(trainer: Any, clock: Clock, source: Path) -> str:
    """Lines for people after the last run, whose clock this is. `source`: where scripts/ is."""
    config = trainer.config
    timed_s = clock.train_time_ms / 1000
    untimed_s: dict[str, float] = {}
    for phase in clock.phases:
        if not phase.timed:
            untimed_s[phase.name] = untimed_s.get(phase.name, 0.0) + phase.ms / 1000
    others = ", ".join(f"{name} {seconds:.1f}" for name, seconds in untimed_s.items())
    following = "--trials 10 trains ten seeds"
    if config.trials > 1:
        following = f"{script(source, 'significance.py')} {config.log_dir} judges the runs"
    elif config.keep_model and config.checkpoint_dir == "checkpoints":  # where sample.py looks
        following = f"{script(source, 'sample.py')} lets the model write"
    return (
        f"  time  {timed_s:.1f} s on the clock; {timed_s + sum(untimed_s.values()):.1f} s in all, "
        f"with {others}\n"
        f"  draw  {script(source, 'view.py')} {config.log_dir}\n"
        f"  next  {following}"
    )


def script(source: Path, name: str) -> str:
    """The words that start a script with this Python, also where no environment is active."""
    here = Path.cwd()
    words = []
    for path in (Path(sys.executable), source / "scripts" / name):
        words.append(str(path.relative_to(here) if path.is_relative_to(here) else path))
    return shlex.join(words)


def mfu(trainer: Any, tokens_per_s: float) -> float | None:
    """Model FLOPs utilization: share of the peak rate of all ranks, where that is known."""
    peak = peak_flops(trainer.machine, trainer.model.dtype)
    return tokens_per_s * trainer.model.flops_per_token() / peak if peak else None
