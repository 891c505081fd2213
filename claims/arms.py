"""Arms: which runs are judged together, which of them count, and the verdict on them.

Is the mean loss of an arm below the target, at p < 0.01? Which runs count never depends on
their losses.
"""

import itertools
import math
import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from claims import stats
from claims.logs import read_all
from claims.runs import Run, Validation
from runtime.claim import LEAST_RUNS
from runtime.errors import LogError
from runtime.settings import SETTINGS_OF_A_RUN, as_text

PUBLIC_TARGETS = {"track_1_short": 3.28, "track_2_medium": 2.92, "track_3_optimization": 3.28}
STEPS_TRACKS = {"steps", "track_3_optimization"}  # judged by their own rule, too
ALPHA = 0.01

NAMED_FIRST = ("recipe", "steps", "optimizer")


# ---- Which runs make an arm


def arm_key(run: Run) -> tuple[Hashable, ...]:
    """What the runs of one arm have in common; None where a log does not say."""
    data = run.header.get("data")
    tokens = str(data["val_sha256"]) if isinstance(data, dict) and "val_sha256" in data else None
    return run.source, run.config_sha256, run.total_steps, run.gpu_count, tokens


def group_runs(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs by arm. An unfinished run goes to every arm to which it may belong: none is hidden."""
    arms: dict[tuple[Hashable, ...], list[Run]] = {}
    finished = {arm_key(run) for run in runs if run.complete}
    for run in sorted(runs, key=lambda run: not run.complete):  # an arm begins with a finished run
        key, homes = arm_key(run), []
        if not run.complete:
            homes = [arm for arm in finished
                     if all(mine in (None, its) for mine, its in zip(key, arm, strict=True))]
        for home in homes or [key]:
            arms.setdefault(home, []).append(run)
    return list(arms.values())


def named_arms(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """The arms, each with its folder and the settings that distinguish it, as `logs (steps=30)`.

    A setting is in the names only if it distinguishes arms that those before it do not. The
    settings by which people know a run come first.
    """
    arms = group_runs(runs)
    facts = [facts_of(arm[0]) for arm in arms]
    names: list[tuple[str, ...]] = [()] * len(arms)
    for setting in dict.fromkeys([*NAMED_FIRST, *itertools.chain(*facts)]):
        if setting in SETTINGS_OF_A_RUN or any(setting not in each for each in facts):
            continue
        pairs = zip(names, facts, strict=True)
        longer = [(*name, f"{setting}={each[setting]}") for name, each in pairs]
        if len(set(longer)) > len(set(names)):
            names = longer
    settings = [f" ({', '.join(name)})" if name else "" for name in names]
    return [(common_folder(arm) + each, arm) for arm, each in zip(arms, settings, strict=True)]


def facts_of(run: Run) -> dict[str, str]:
    """What a run can be named by: its settings as flags take them, and where it ran."""
    config = run.header.get("config")
    settings = config.items() if isinstance(config, dict) else ()
    facts = {"steps": str(run.total_steps)} | {name: as_text(value) for name, value in settings}
    return facts | {"gpus": str(run.gpu_count), "source": f"{run.source or 'unknown':.12}",
                    "config": f"{run.config_sha256 or 'unknown':.12}",
                    "data": f"{arm_key(run)[-1] or 'unknown':.12}"}  # fmt: skip


def name_of(run: Run) -> str:
    return f"{run.path} (run {run.index + 1})" if run.index else str(run.path)


def marks(run: Run) -> Iterator[tuple[Hashable, ...]]:
    """Fingerprints, each after its name: runs that share any but the seed are copies."""
    trained = [step.train_loss for step in run.steps if step.train_loss is not None]
    if run.header:
        yield "run id", run.run_id
    if len(trained) > 1:  # of an untrained model all first losses may agree
        yield "training losses", *trained
    if run.train_time_ms:  # with times: four digits of loss may agree by chance
        yield "validation losses and times", *run.validations
    if run.seed is not None:
        yield f"seed {run.seed}", run.seed


def leave_out_repeats(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs that count as independent, and a sentence on each of the others.

    Of copies, and of runs with the same seed, only the one with the smallest run id counts. Ids
    sort by start time or are random, so the choice cannot depend on the losses.
    """
    kept: list[Run] = []
    owners: dict[tuple[Hashable, ...], Run] = {}
    repeats = []
    for run in sorted(runs, key=lambda run: (run.run_id.partition("#")[0], run.index, run.path)):
        shared = [mark for mark in marks(run) if mark in owners]
        if shared:
            what, first = shared[0][0], name_of(owners[shared[0]])
            repeats.append(f"{name_of(run)} (loss {run.final_loss}) repeats the {what} of {first}")
        else:
            kept.append(run)
        for mark in marks(run):
            owners.setdefault(mark, run)
    return kept, repeats


def missing_seeds(runs: Sequence[Run]) -> list[int]:
    """Gaps in seeds that are mostly consecutive: runs that may have been made and left out."""
    seeds = {run.seed for run in runs if run.seed is not None}
    if not seeds or max(seeds) - min(seeds) >= 2 * len(seeds):
        return []
    return sorted(set(range(min(seeds), max(seeds))) - seeds)


def track_of(run: Run) -> str | None:
    """The track that the header names, or the public folder of the log."""
    parts = Path(os.path.abspath(run.path)).parts
    return run.track or next((part for part in parts if part in PUBLIC_TARGETS), None)


def common_folder(runs: Sequence[Run]) -> str:
    folders = {str(run.path.parent) for run in runs}
    if len(folders) == 1:
        return folders.pop()
    return os.path.commonpath([run.path.parent.resolve() for run in runs])


def common_target(runs: Sequence[Run]) -> float:
    """The target of the headers, or of the public track. LogError unless it is one number."""
    found = {run.target or PUBLIC_TARGETS.get(track_of(run) or "") for run in runs}
    targets = [target for target in found if target is not None]  # torn logs have none
    if len(targets) == 1 and math.isfinite(targets[0]):
        return targets[0]
    problem = "name different targets" if len(targets) > 1 else "name no target"
    raise LogError(f"the runs in {common_folder(runs)} {problem}: give one with --target")


# ---- The verdict on an arm


@dataclass
class ArmVerdict:
    """Runs that are judged together and what follows from their losses."""

    first: Run  # that all others are like in source, configuration, steps and GPUs
    name: str  # the common folder of its logs, and the settings that distinguish it there
    path: str  # the folder
    at_step: int | None  # whose validations are judged; None: the last ones
    runs: list[Run]  # that count
    points: list[Validation]  # one a run
    target: float  # nats per token; nan: the arm is only compared
    warnings: list[str] = field(default_factory=list)  # why p may say less than it seems to
    incomplete: list[dict[str, Any]] = field(default_factory=list)  # path, reason, last_loss
    notes: list[str] = field(default_factory=list)  # what other tests say

    def __post_init__(self) -> None:
        self.losses = [point.loss for point in self.points]
        self.result = stats.one_sample(self.losses, self.target)
        n = self.result.n
        self.passes = self.result.p < ALPHA and n >= LEAST_RUNS
        self.decided = n >= LEAST_RUNS
        if n > 1 and not self.result.sd > 0:
            self.warnings.append("losses without a finite spread: there is no test")
        if (at := stats.outlier(self.losses)) is not None:
            what = f"the loss {self.losses[at]:.6f} of {name_of(self.runs[at])}"
            self.warnings.append(f"{what} lies far from the others; it counts")

    @property
    def seconds(self) -> list[float]:
        """NaN for a run whose log has no times."""
        return [(point.train_time_ms or math.nan) / 1000 for point in self.points]

    @property
    def documented(self) -> dict[str, Any]:
        """The fields that --json prints."""
        first, times = self.first, [point.train_time_ms for point in self.points]
        return {
            "path": self.path, "source": first.source, "total_steps": first.total_steps,
            "gpu_count": first.gpu_count, "n": self.result.n, "losses": self.losses,
            "times_ms": times, **self.result._asdict(), "passes": self.passes,
            "incomplete": self.incomplete, "warnings": self.warnings,
        }  # fmt: skip


def judge_all(runs: Sequence[Run], target: float | None, steps: Sequence[int]) -> list[ArmVerdict]:
    """Every arm of these runs, at each of the steps or, without any, at the end.

    Each notes Holm's p over all that was tried; an arm without a test counts as one that failed.
    """
    sources = {run.source for run in runs if run.complete or run.stop}
    tried: Sequence[int | None] = sorted(set(steps)) or [None]
    arms = []
    for name, group in named_arms(runs):
        for step in tried:
            arm = judge_arm(name, group, target, step)
            if len(sources) > 1:
                arm.warnings.append(f"{len(sources)} sources in these logs: they are not pooled")
            arms.append(arm)
    if len(arms) > 1:
        for number, p in stats.holm({i: arm.result.p for i, arm in enumerate(arms)}).items():
            verdict = f"p {p:.3g}, {'pass' if p < ALPHA and arms[number].passes else 'fail'}"
            arms[number].notes.append(f"Holm over the {len(arms)} arms and steps tried: {verdict}")
    return arms


def judge_arm(
    name: str, runs: Sequence[Run], target: float | None = math.nan, at_step: int | None = None
) -> ArmVerdict:
    """The verdict on one arm, at its end or at one step.

    target: None takes that of the logs, and is a LogError where they have none. NaN is for an arm
    that is only compared. `passes` and `decided`: whether it passes, and whether its runs allow a
    verdict.
    """
    stop = common_stop(runs)
    at_step = stop if at_step is None else at_step
    counted, repeats = leave_out_repeats([run for run in runs if counts_at(run, at_step)])
    counted.sort(key=lambda run: -1 if run.seed is None else run.seed)
    left_out = [(run, run.left_out) for run in runs if not counts_at(run, at_step)]
    judged, points = [], []
    for run in counted:
        at = [point for point in run.validations if at_step in (None, point.step)]
        if at:
            judged.append(run)
            points.append(at[-1])
        else:
            left_out.append((run, f"no validation at step {at_step}"))
    if target is None:
        target = common_target(runs) if points else math.nan
    arm = ArmVerdict(runs[0], name, common_folder(runs), at_step, judged, points, target)
    arm.warnings += origin_warnings(runs) + [f"left out: {repeat}" for repeat in repeats]
    arm.incomplete += [{"path": name_of(run), "reason": reason, "last_loss": run.final_loss}
                       for run, reason in left_out]  # fmt: skip
    if any(run.end.get("status") == "nonfinite" for run in runs):
        arm.passes, arm.decided = False, True  # which runs count must not depend on their losses
        arm.warnings.append("a run diverged, so the mean of the others says too little")
    stops = sorted({run.stop for run in runs if run.stop is not None})
    if stop is not None and at_step == stop:
        arm.warnings.append(f"all runs stop at step {stop} of {runs[0].total_steps}: judged there")
    elif stops and not points:
        steps = ", ".join(map(str, stops))
        arm.warnings.append(f"runs stop at step {steps}: choose the step to judge with --at-step")
    if others := sorted({name for run in judged for name in run.other_losses}):
        arm.warnings.append(f"the losses are val_loss, not {' or '.join(others)}")
    if track_of(runs[0]) in STEPS_TRACKS and points:
        value, passes = stats.steps_rule(arm.losses, target)
        rule = f"(target - mean) * sqrt(n) = {value:.5f}, {'pass' if passes else 'fail'}"
        arm.notes.append(f"steps rule: {rule}")
    return arm


def common_stop(runs: Sequence[Run]) -> int | None:
    """The step before the declared total at which all these runs stop, if it is one.

    Track 3 allows such a stop. If runs stop at different steps, each may have stopped where its
    loss was low, so none is chosen here.
    """
    stops = {run.stop for run in runs}
    return stops.pop() if len(stops) == 1 else None


def counts_at(run: Run, step: int | None) -> bool:
    """Whether a run counts at a step, or at its end: one that stopped counts up to there."""
    return run.counts or (step is not None and run.stop is not None and step <= run.stop)


def origin_warnings(runs: Sequence[Run]) -> list[str]:
    """Signs that runs were selected."""
    warnings = []
    if any((run.complete or run.stop) and run.source is None for run in runs):
        warnings.append("the logs do not hold their source: nothing shows that it is the same")
    claims = sorted({str(run.header.get("claim")) for run in runs if run.header})
    if len(claims) > 1:
        warnings.append(f"the runs belong to different claims: {', '.join(claims)}")
    missing = ", ".join(map(str, missing_seeds(runs)))
    if missing:
        warnings.append(f"no run has seed {missing}: was it made and left out?")
    return warnings


def read_arm(path: str) -> ArmVerdict:
    """The arm in a folder or file. LogError unless it is exactly one."""
    runs, errors = read_all([path])
    arms = named_arms([run for run in runs if run.counts] or [run for run in runs if run.stop])
    arm = judge_arm(path, runs) if len(arms) == 1 else None
    if arm is None or not arm.runs:
        rule = f"{path} holds no run that counts"
        if len(arms) > 1:
            rule = (f"{path} holds {len(arms)} arms where one is needed: copy the logs of one to a "
                    "folder, or make each in its own --log-dir")  # fmt: skip
        left_out = [f"{name_of(run)}: {run.left_out}" for run in runs if not run.counts]
        found = [*(name for name, _ in arms), *left_out, *map(str, errors)]
        raise LogError("\n  ".join([rule, *found]))
    arm.warnings += [f"left out: {error}" for error in errors]
    return arm
