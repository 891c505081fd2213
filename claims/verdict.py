"""The verdict on an arm: does its mean loss lie below the target, at p < 0.01?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from claims import stats
from claims.arms import (
    ArmKey,
    common_folder,
    common_target,
    group_runs,
    leave_out_repeats,
    missing_seeds,
    name_of,
    track_of,
)  # fmt: skip
from claims.runs import LogError, Run, Validation

ALPHA = 0.01
FEW_RUNS = 4  # fewer losses can lie close together by chance
LEVEL = 0.05  # at which an arm is shown to be no worse than another
STEPS_TRACKS = {"steps", "track_3_optimization"}  # judged by their own rule, too


@dataclass
class Arm:
    """Runs that are judged together and what follows from their losses."""

    key: ArmKey
    path: str | None  # common folder of the logs; None for losses typed by hand
    at_step: int | None  # whose validations are judged; None: the last ones
    names: list[str]  # of the runs
    points: list[Validation]  # one a run
    target: float  # nats per token
    warnings: list[str]
    incomplete: list[dict[str, Any]] = field(default_factory=list)  # path, reason, last_loss
    notes: list[str] = field(default_factory=list)  # what other tests say
    no_worse: bool = False  # than a baseline, by the margin that was asked for

    def __post_init__(self) -> None:
        self.losses = [point.loss for point in self.points]
        self.result = stats.one_sample(self.losses, self.target)
        self.passes = self.result.p < ALPHA
        self.warnings += weaknesses(self.losses, self.result)

    @property
    def documented(self) -> dict[str, Any]:
        """The fields that --json prints."""
        key, times = self.key, [point.train_time_ms for point in self.points]
        return {
            "path": self.path, "source": key.source, "total_steps": key.total_steps,
            "gpu_count": key.gpu_count, "n": self.result.n, "losses": self.losses,
            "times_ms": times, **self.result._asdict(), "passes": self.passes,
            "incomplete": self.incomplete, "warnings": self.warnings,
        }  # fmt: skip


def said(passes: bool) -> str:
    return "pass" if passes else "fail"


def judge_all(runs: Sequence[Run], target: float | None, steps: Sequence[int]) -> list[Arm]:
    """Every arm of these runs, at each of the steps or, without any, at the end."""
    sources = {run.source for run in runs if run.complete}
    tried: Sequence[int | None] = sorted(set(steps)) or [None]
    arms = []
    for key, group in group_runs(runs).items():
        for step in tried:
            arm = judge(key, group, target, step)
            if len(sources) > 1:
                arm.warnings.append(f"{len(sources)} sources in these logs: they are not pooled")
            arms.append(arm)
    return arms


def usable(run: Run, at_step: int | None) -> bool:
    return run.counts or (at_step is not None and run.stopped_early)


def judge(key: ArmKey, runs: Sequence[Run], target: float | None, at_step: int | None) -> Arm:
    """The verdict on one arm, at its end or at one step. Raises LogError without a target."""
    counted, repeats = leave_out_repeats([run for run in runs if usable(run, at_step)])
    left_out = [(run, run.left_out) for run in runs if not usable(run, at_step)]
    names, points = [], []
    for run in counted:
        at = [point for point in run.validations if at_step in (None, point.step)]
        if at:
            names.append(name_of(run))
            points.append(at[-1])
        else:
            left_out.append((run, f"no validation at step {at_step}"))
    if target is None:
        target = common_target(runs) if points else math.nan
    arm = Arm(
        key, common_folder(runs), at_step, names, points, target,
        origin_warnings(runs, counted, at_step) + repeats,
    )  # fmt: skip
    for run, reason in left_out:
        lost = {"path": name_of(run), "reason": reason, "last_loss": run.final_loss}
        arm.incomplete.append(lost)
    arm.notes += [f"{name_of(run)}: {run.resumed}" for run in counted if run.resumed]
    if track_of(runs[0]) in STEPS_TRACKS and points:
        value, passes = stats.steps_rule(arm.losses, target)
        arm.notes.append(f"steps rule: (target - mean) * sqrt(n) = {value:.5f}, {said(passes)}")
    return arm


def judge_typed(losses: Sequence[float], target: float) -> Arm:
    """The verdict on losses that were typed by hand."""
    points = [Validation(0, loss, None) for loss in losses]
    warning = "unverified: these numbers were typed by hand, no log stands behind them"
    nothing = ArmKey(None, None, None, None)
    return Arm(nothing, None, None, ["typed"] * len(points), points, target, [warning])


def origin_warnings(runs: Sequence[Run], counted: Sequence[Run], at_step: int | None) -> list[str]:
    """What speaks against a fair choice of the runs."""
    warnings = []
    if any(run.complete and run.source is None for run in runs):
        warnings.append("the logs do not hold their source: nothing shows that it is the same")
    claims = sorted({str(run.header.get("claim")) for run in runs if run.header})
    if len(claims) > 1:
        warnings.append(f"the runs stand under different claims: {', '.join(claims)}")
    missing = ", ".join(map(str, missing_seeds(runs)))
    if missing:
        warnings.append(f"no run has seed {missing}: was it made and left out?")
    early = sum(not run.complete for run in counted)
    if early:
        rule = f"step {at_step} must have been fixed beforehand"
        warnings.append(f"{early} runs end before the steps that they declare: {rule}")
    return warnings


def weaknesses(losses: Sequence[float], result: stats.Result) -> list[str]:
    """What makes p say less than it seems to."""
    found = []
    if 0 < result.n < FEW_RUNS:
        found.append(f"n = {result.n}: too few runs to know their spread, make {FEW_RUNS}")
    if result.n > 1 and not result.sd > 0:
        found.append("losses without a finite spread: there is no test")
    return found


# ---- Comparisons


def apply_holm(arms: Sequence[Arm]) -> None:
    """Note Holm's p over all that was tried; an arm without a test counts as one that failed."""
    ps = {i: 1.0 if math.isnan(arm.result.p) else arm.result.p for i, arm in enumerate(arms)}
    for i, p in stats.holm(ps).items():
        if len(arms) > 1:
            verdict = f"p {p:.3g}, {said(p < ALPHA)}"
            arms[i].notes.append(f"Holm over the {len(arms)} arms and steps tried: {verdict}")


def apply_baseline(arm: Arm, runs: Sequence[Run], margin: float | None) -> None:
    """Note the difference from the one arm of these runs and, with a margin, whether it is worse.

    Raises LogError unless the runs are one arm, and others than those of `arm`.
    """
    steps = [] if arm.at_step is None else [arm.at_step]
    arms = [old for old in judge_all(runs, arm.target, steps) if old.points]
    if len(arms) != 1:
        raise LogError(f"the baseline holds {len(arms)} arms with runs that count: name one arm")
    old = arms[0]
    shared = {*arm.names} & {*old.names}
    if shared:
        raise LogError(f"{min(shared)} is in the baseline too: compare with other runs")
    found = stats.welch(arm.losses, old.losses)
    arm.notes.append(
        f"loss minus the baseline's {found.mean:+.6f}, 95 % interval {found.low:+.6f} to "
        f"{found.high:+.6f}, one-sided p {found.p_less:.3g} (baseline {old.path}: "
        f"n {old.result.n}, mean {old.result.mean:.6f}, sd {old.result.sd:.6f})"
    )
    arm.notes += [f"baseline: {warning}" for warning in old.warnings]
    if margin is not None:
        no_worse, equal = stats.equivalence(arm.losses, old.losses, margin)
        arm.no_worse = no_worse < LEVEL
        arm.notes.append(
            f"no worse by {margin:g}: p {no_worse:.3g}, {said(arm.no_worse)} at {LEVEL}; "
            f"equal within it: p {equal:.3g} (TOST)"
        )
