"""What a trainer says of its run: the header of the log, and lines before the first step.

`trainer` is that of train_gpt.py.
"""

from dataclasses import asdict
from typing import Any

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
        "data": trainer.found | {"val_tokens": config.val_tokens},
        "env": trainer.env, "checks": trainer.checks, "world_size": trainer.machine.world_size,
        "micro_batch": train.micro_rows * config.sequence,
        "grad_accum": train.rows // train.micro_rows,
    }  # fmt: skip


def where(trainer: Any, step: int) -> dict[str, Any]:
    """Shard and token offset from which this step, counted from 1, was read."""
    return trainer.data.train.where(step)


def summary(trainer: Any) -> str:
    """Lines for people: what is trained, on what, and with `verbose` what was chosen and why."""
    config, machine, plan = trainer.config, trainer.machine, trainer.data.plan
    first = header(trainer, config.seed, 0)
    batches = " then ".join(dict.fromkeys(f"{tokens:,}" for _, tokens, _ in trainer.changes))
    lines = [
        f"track {config.track}, recipe {config.recipe}: {trainer.env['params']:,} parameters",
        f"{config.steps:,} steps of {batches} tokens = {machine.world_size} rank(s) x "
        f"{first['grad_accum']} micro-step(s) x {first['micro_batch']:,}",
        f"{config.data_dir}: training on {plan.tokens_needed:,} of {plan.tokens_available:,} "
        f"tokens, validating on {config.val_tokens:,}",
    ]
    if config.verbose or machine.device.type == "cuda":  # a CPU has nothing to choose from
        lines += [f"{name} {trainer.env[name]} ({why})" for name, why in trainer.chosen.items()]
    if config.verbose:
        lines += [f"{machine.device.type}, {trainer.env['dtype']}", trainer.guard.describe()]
    if trainer.off_track:
        lines.append(f"off the track, no claim can be made: {'; '.join(trainer.off_track)}")
    return "\n".join(lines)


def mfu(trainer: Any, tokens_per_s: float) -> float | None:
    """Model FLOPs utilization: share of the peak rate of all ranks, where that is known."""
    peak = peak_flops(trainer.machine, trainer.model.dtype)
    return tokens_per_s * trainer.model.flops_per_token() / peak if peak else None
