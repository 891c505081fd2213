"""Which runs are judged together, which of them count, and against which target.

Nothing here looks at whether a loss is good.
"""

import math
import os
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from claims.runs import LogError, Run

PUBLIC_TARGETS = {"track_1_short": 3.28, "track_2_medium": 2.92, "track_3_optimization": 3.28}


class ArmKey(NamedTuple):
    """What the runs of one arm have in common; None where a log does not say."""

    source: str | None
    config_sha256: str | None
    total_steps: int | None
    gpu_count: int | None


def arm_key(run: Run) -> ArmKey:
    return ArmKey(run.source, run.config_sha256, run.total_steps, run.gpu_count)


def group_runs(runs: Sequence[Run]) -> dict[ArmKey, list[Run]]:
    """Runs by arm. An unfinished run goes to every arm to which it may belong: none is hidden."""
    arms: dict[ArmKey, list[Run]] = {}
    for run in runs:
        if run.complete:
            arms.setdefault(arm_key(run), []).append(run)
    finished = list(arms)
    for run in runs:
        if not run.complete:
            homes = [arm for arm in finished if may_belong(arm_key(run), arm)]
            for home in homes or [arm_key(run)]:
                arms.setdefault(home, []).append(run)
    return arms


def may_belong(key: ArmKey, arm: ArmKey) -> bool:
    return all(mine in (None, its) for mine, its in zip(key, arm, strict=True))


def name_of(run: Run) -> str:
    return f"{run.path} (run {run.index + 1})" if run.index else str(run.path)


def marks(run: Run) -> Iterator[tuple[Hashable, ...]]:
    """What independent runs cannot share. Runs that share one that is no seed are copies."""
    if run.header:
        yield "id", run.run_id
    if run.train_time_ms:
        yield "log", *run.validations  # with their times
    if run.seed is not None:
        yield "seed", run.seed


def leave_out_repeats(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs that count as independent, and a warning for each of the others.

    Of copies and of runs with one seed the first by run id counts. Ids sort by start time or are
    random, so the choice cannot depend on the losses.
    """
    kept: list[Run] = []
    owners: dict[tuple[Hashable, ...], Run] = {}
    warnings = []
    for run in sorted(runs, key=lambda run: (run.run_id.partition("#")[0], run.index, run.path)):
        shared = [mark for mark in marks(run) if mark in owners]
        if shared:
            kind, first = shared[0][0], name_of(owners[shared[0]])
            rule = f"is a duplicate of {first}"
            if kind == "seed":
                rule = f"(loss {run.final_loss}) repeats seed {run.seed} of {first}"
            warnings.append(f"left out: {name_of(run)} {rule}")
        else:
            kept.append(run)
        for mark in marks(run):
            owners.setdefault(mark, run)
    return kept, warnings


def missing_seeds(runs: Sequence[Run]) -> list[int]:
    """Gaps in seeds that are mostly consecutive: runs that may have been made and left out."""
    seeds = {run.seed for run in runs if run.seed is not None}
    if not seeds or max(seeds) - min(seeds) >= 2 * len(seeds):
        return []
    return sorted(set(range(min(seeds), max(seeds))) - seeds)


def track_of(run: Run) -> str | None:
    """The track that the header names, or the public folder in which the log lies."""
    if run.track:
        return run.track
    for part in Path(os.path.abspath(run.path)).parts:
        if part in PUBLIC_TARGETS:
            return part
    return None


def common_folder(runs: Sequence[Run]) -> str:
    folders = {str(run.path.parent) for run in runs}
    if len(folders) == 1:
        return folders.pop()
    return os.path.commonpath([run.path.parent.resolve() for run in runs])


def common_target(runs: Sequence[Run]) -> float:
    """The target of the headers, or of the public track. LogError unless it is one number."""
    targets = {run.target or PUBLIC_TARGETS.get(track_of(run) or "") for run in runs}
    targets.discard(None)  # of torn logs
    if len(targets) == 1:
        (target,) = targets
        if target and math.isfinite(target):
            return target
    problem = "name different targets" if len(targets) > 1 else "name no target"
    raise LogError(f"the runs in {common_folder(runs)} {problem}: give one with --target")
