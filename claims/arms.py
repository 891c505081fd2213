"""Which runs are judged together, which of them count, and against which target.

Nothing here looks at whether a loss is good.
"""

import math
import os
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from claims.runs import LogError, Run

PUBLIC_TARGETS = {"track_1_short": 3.28, "track_2_medium": 2.92, "track_3_optimization": 3.28}
TELLING_LOSSES = 3  # validations after step 0 that independent runs do not share by chance


class ArmKey(NamedTuple):
    """What the runs of one arm have in common; None where a log does not say."""

    source: str | None
    config_sha256: str | None
    total_steps: int | None
    gpu_count: int | None


def arm_key(run: Run) -> ArmKey:
    return ArmKey(run.source, run.config_sha256, run.total_steps, run.gpu_count)


def group_runs(runs: Sequence[Run]) -> dict[ArmKey, list[Run]]:
    """Runs by arm.

    An unfinished run goes to every arm that it may have belonged to, so that none is hidden. A log
    without its source that copies one with it (a capture of the console) goes where that one is.
    """
    owners = {}
    for run in runs:
        if run.source:
            owners.update({mark: arm_key(run) for mark in marks(run) if mark[0] != "seed"})
    keys = {}
    for run in runs:
        copied = [owners[mark] for mark in marks(run) if mark in owners and not run.source]
        keys[id(run)] = copied[0] if copied else arm_key(run)
    arms: dict[ArmKey, list[Run]] = {}
    for run in runs:
        if run.complete:
            arms.setdefault(keys[id(run)], []).append(run)
    finished = list(arms)
    for run in runs:
        if not run.complete:
            homes = [arm for arm in finished if may_belong(keys[id(run)], arm)]
            for home in homes or [keys[id(run)]]:
                arms.setdefault(home, []).append(run)
    return arms


def may_belong(key: ArmKey, arm: ArmKey) -> bool:
    return all(mine in (None, its) for mine, its in zip(key, arm, strict=True))


def name_of(run: Run) -> str:
    return f"{run.path} (run {run.index + 1})" if run.index else str(run.path)


def marks(run: Run) -> Iterator[tuple[Hashable, ...]]:
    """What two independent runs cannot share. Two runs that share one that is no seed are copies."""
    if run.header:
        yield "id", run.run_id
    losses = tuple((point.step, point.printed) for point in run.validations)
    times = tuple(point.train_time_ms for point in run.validations)
    if any(times):
        yield "log", losses, times
    if sum(step > 0 for step, _ in losses) >= TELLING_LOSSES:
        yield "losses", losses
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
        if not shared:
            kept.append(run)
        elif shared[0][0] == "seed":
            first, loss = name_of(owners[shared[0]]), run.final_loss
            warnings.append(
                f"left out: {name_of(run)} (loss {loss}) repeats seed {run.seed} of {first}; "
                "runs of one seed are not independent"
            )
        else:
            copied = name_of(owners[shared[0]])
            warnings.append(f"left out: {name_of(run)} is a duplicate of {copied}")
        for mark in marks(run):
            owners.setdefault(mark, run)
    return kept, warnings


def missing_seeds(runs: Sequence[Run]) -> list[int]:
    """Gaps in seeds that are mostly consecutive: runs that may have been made and left out."""
    seeds = {run.seed for run in runs if run.seed is not None}
    if not seeds or max(seeds) - min(seeds) >= 2 * len(seeds):
        return []
    return sorted(set(range(min(seeds), max(seeds))) - seeds)


def several_sources(runs: Sequence[Run]) -> dict[Path, int]:
    """The folders whose finished runs come from several sources, and from how many."""
    pairs = {(run.path.parent, run.source) for run in runs if run.complete}
    counts = Counter(folder for folder, _ in pairs)
    return {folder: count for folder, count in counts.items() if count > 1}


def track_of(run: Run) -> str | None:
    """The track that the header names, or the public folder in which the log lies."""
    if run.track:
        return run.track
    folders = [part for part in Path(os.path.abspath(run.path)).parts if part in PUBLIC_TARGETS]
    return folders[-1] if folders else None


def common_folder(runs: Sequence[Run]) -> str:
    folders = {str(run.path.parent) for run in runs}
    if len(folders) == 1:
        return folders.pop()
    return os.path.commonpath([run.path.parent.resolve() for run in runs])


def common_target(runs: Sequence[Run]) -> float:
    """The target of the headers, or of the public track. LogError unless it is one number."""
    targets = set()
    for run in runs:
        if run.target is not None or run.header or track_of(run) in PUBLIC_TARGETS:
            public = PUBLIC_TARGETS.get(str(track_of(run)))
            targets.add(public if run.target is None else run.target)
    if len(targets) == 1:
        target = targets.pop()
        if target is not None and math.isfinite(target):
            return target
        targets.clear()
    problem = "name different targets" if targets else "name no target"
    raise LogError(f"the runs in {common_folder(runs)} {problem}: give one with --target")
