"""Which runs are judged together, and against which target. Nothing here looks at whether a loss is good."""

import math
import os
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from claims.runlog import LogError, Run

PUBLIC_TARGETS = {"track_1_short": 3.28, "track_2_medium": 2.92, "track_3_optimization": 3.28}  # by folder
STEPS_TRACKS = {"steps", "track_3_optimization"}  # judged by the number of steps, under a rule of their own
TELLING_LOSSES = 3  # validations after step 0 that two independent runs do not share by chance


class ArmKey(NamedTuple):
    """What the runs of one arm have in common; None where a log does not say."""

    source: str | None
    config_sha256: str | None
    total_steps: int | None
    gpu_count: int | None


def arm_key(run: Run) -> ArmKey:
    return ArmKey(run.source, run.config_sha256, run.total_steps, run.gpu_count)


def group_runs(runs: Sequence[Run]) -> dict[ArmKey, list[Run]]:
    """Runs by arm. An unfinished run is put with every arm that it may have belonged to, so that none is hidden.

    A log without its source that copies one with it belongs where that one does.
    """
    arms: dict[ArmKey, list[Run]] = {}
    owners = {mark: arm_key(run) for run in runs if run.source for mark in marks(run) if mark[0] != "seed"}
    keys = [next((owners[mark] for mark in marks(run) if not run.source and mark in owners), arm_key(run))
            for run in runs]  # fmt: skip
    for key, run in zip(keys, runs, strict=True):
        if run.complete:
            arms.setdefault(key, []).append(run)
    complete = list(arms)
    for key, run in zip(keys, runs, strict=True):
        if not run.complete:
            homes = [arm for arm in complete if all(a in (None, b) for a, b in zip(key, arm, strict=True))]
            for home in homes or [key]:
                arms.setdefault(home, []).append(run)
    return arms


def name_of(run: Run) -> str:
    return f"{run.path} (run {run.index + 1})" if run.index else str(run.path)


def marks(run: Run) -> Iterator[tuple[Hashable, ...]]:
    """What two runs cannot both have and be independent; copies share one that is no seed."""
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

    Of several that are copies or share a seed the first by run id counts: ids sort by start time, or are random, so
    that the choice cannot depend on the losses. Logs without seeds repeat each other only as copies.
    """
    kept: list[Run] = []
    owners: dict[tuple[Hashable, ...], Run] = {}
    warnings = []
    for run in sorted(runs, key=lambda run: (run.run_id.partition("#")[0], run.index, str(run.path))):
        shared = next((mark for mark in marks(run) if mark in owners), None)
        if shared is None:
            kept.append(run)
        elif shared[0] != "seed":
            warnings.append(f"left out: {name_of(run)} is a duplicate of {name_of(owners[shared])}")
        else:
            warnings.append(f"left out: {name_of(run)} (loss {run.final_loss}) repeats seed {run.seed} of "
                            f"{name_of(owners[shared])}; runs of one seed are not independent")
        for mark in marks(run):
            owners.setdefault(mark, run)
    return kept, warnings


def missing_seeds(runs: Sequence[Run]) -> list[int]:
    """Gaps in a numbering that is otherwise mostly there: runs that may have been made and left out."""
    seeds = {run.seed for run in runs if run.seed is not None}
    if not seeds or max(seeds) - min(seeds) >= 2 * len(seeds):
        return []
    return sorted(set(range(min(seeds), max(seeds))) - seeds)


def several_sources(runs: Sequence[Run]) -> dict[Path, int]:
    """The folders whose complete runs come from more than one source, and from how many."""
    pairs = {(run.path.parent, run.source) for run in runs if run.complete}
    return {folder: count for folder, count in Counter(folder for folder, _ in pairs).items() if count > 1}


def track_of(run: Run) -> str | None:
    """The track that the header names, or the public folder that the log lies in."""
    folders = (part for part in reversed(Path(os.path.abspath(run.path)).parts) if part in PUBLIC_TARGETS)
    return run.track or next(folders, None)


def common_folder(runs: Sequence[Run]) -> str:
    folders = {str(run.path.parent) for run in runs}
    return folders.pop() if len(folders) == 1 else os.path.commonpath([run.path.parent.resolve() for run in runs])


def common_target(runs: Sequence[Run]) -> float:
    """The target that the headers name, or that of the public track; LogError where it is not one and the same."""
    told = [run for run in runs if run.header or track_of(run) in PUBLIC_TARGETS]
    targets = {PUBLIC_TARGETS.get(str(track_of(run))) if run.target is None else run.target for run in told}
    target = targets.pop() if len(targets) == 1 else None
    if target is None or not math.isfinite(target):
        problem = "name different targets" if targets else "name no target"
        raise LogError(f"the runs in {common_folder(runs)} {problem}: give one with --target")
    return target
