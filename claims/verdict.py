"""The verdict on an arm: does its mean loss lie below the target, at p < 0.01?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from claims import arms as grouping
from claims import stats
from claims.arms import ArmKey
from claims.runs import LogError, Run, Validation

ALPHA = 0.01
MARGINAL = 0.007  # above it the right skew of real losses can undo a pass
FEW_RUNS = 4  # fewer losses can lie close together by chance
ROUNDING_UNITS = 3  # an sd of fewer units of the last printed digit is mostly rounding
LEVEL = 0.05  # at which an arm is shown to be no worse than another
STEPS_TRACKS = {"steps", "track_3_optimization"}  # judged by their own rule, too


@dataclass
class Arm:
    """Runs that are judged together and what follows from their losses."""

    key: ArmKey
    path: str | None  # common folder of the logs
    track: str | None
    at_step: int | None  # whose validations are judged; None: the last ones
    names: list[str]  # of the runs
    points: list[Validation]  # one a run
    target: float  # nats per token
    warnings: list[str]
    incomplete: list[dict[str, Any]] = field(default_factory=list)  # path, reason, last_loss
    notes: list[str] = field(default_factory=list)  # what other tests say

    def __post_init__(self) -> None:
        self.losses = [point.loss for point in self.points]
        self.result = stats.one_sample(self.losses, self.target)
        self.passes = self.result.p < ALPHA
        self.accepted = self.passes  # the exit code: under the rule that was asked for

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
    sources = grouping.several_sources(runs)
    tried: Sequence[int | None] = sorted(set(steps)) or [None]
    arms = []
    for key, group in grouping.group_runs(runs).items():
        for step in tried:
            arms.append(judge(key, group, target, step))
            for folder in sorted({run.path.parent for run in group} & sources.keys()):
                rule = "not pooled: each is an arm of its own"
                arms[-1].warnings.append(f"{sources[folder]} SOURCES in {folder}, {rule}")
    return arms


def usable(run: Run, at_step: int | None) -> bool:
    return run.counts or (at_step is not None and run.stopped_early)


def judge(key: ArmKey, runs: Sequence[Run], target: float | None, at_step: int | None) -> Arm:
    """The verdict on one arm, at its end or at one step. Raises LogError without a target."""
    counted, repeats = grouping.leave_out_repeats([run for run in runs if usable(run, at_step)])
    left_out = [(run, run.left_out) for run in runs if not usable(run, at_step)]
    points: dict[str, Validation] = {}
    for run in counted:
        at = [point for point in run.validations if at_step in (None, point.step)]
        if at:
            points[grouping.name_of(run)] = at[-1]
        else:
            left_out.append((run, f"no validation at step {at_step}"))
    if target is None:
        target = grouping.common_target(runs) if points else math.nan
    arm = Arm(
        key, grouping.common_folder(runs), grouping.track_of(runs[0]), at_step, list(points),
        list(points.values()), target, origin_warnings(runs, counted, at_step) + repeats,
    )  # fmt: skip
    for run, reason in left_out:
        name = grouping.name_of(run)
        arm.incomplete.append({"path": name, "reason": reason, "last_loss": run.final_loss})
    arm.notes += [f"{grouping.name_of(run)}: {run.resumed}" for run in counted if run.resumed]
    judge_sample(arm)
    return arm


def judge_typed(losses: Sequence[float], target: float) -> Arm:
    """The verdict on losses that were typed by hand."""
    points = [Validation(0, loss, None, repr(loss)) for loss in losses]
    warning = "unverified: these numbers were typed by hand, no log stands behind them"
    nothing = ArmKey(None, None, None, None)
    arm = Arm(nothing, None, None, None, ["typed"] * len(points), points, target, [warning])
    judge_sample(arm)
    return arm


def origin_warnings(runs: Sequence[Run], counted: Sequence[Run], at_step: int | None) -> list[str]:
    """What speaks against a fair choice of the runs."""
    warnings = []
    if any(run.complete and run.source is None for run in runs):
        warnings.append("the logs do not hold their source: nothing shows that it is the same")
    claims = sorted({str(run.header.get("claim")) for run in runs if run.header})
    if len(claims) > 1:
        warnings.append(f"the runs stand under different claims: {', '.join(claims)}")
    missing = ", ".join(map(str, grouping.missing_seeds(runs)))
    if missing:
        warnings.append(f"no run has seed {missing}: was it made and left out?")
    early = sum(not run.complete for run in counted)
    if early:
        rule = f"step {at_step} must have been fixed beforehand"
        warnings.append(f"{early} runs end before the steps that they declare: {rule}")
    return warnings


def judge_sample(arm: Arm) -> None:
    """Add what makes p say less than it seems to, and what the losses say beside it."""
    result, target = arm.result, arm.target
    if 0 < result.n < FEW_RUNS:
        arm.warnings.append(f"n = {result.n}: too few runs to know their spread, make {FEW_RUNS}")
    if result.n > 1 and not result.sd > 0:
        arm.warnings.append("losses without a finite spread: there is no test")
    if result.sd > 0:
        unit = 10.0 ** min(int(point.exact.as_tuple().exponent) for point in arm.points)
        if result.sd < ROUNDING_UNITS * unit:
            arm.warnings.append(f"sd {result.sd:.2g} is limited by the rounding to {unit:g}")
    if arm.track in STEPS_TRACKS and arm.points:
        exact = [Decimal(repr(loss)) for loss in arm.losses]  # repr: the shortest decimal
        value, passes = stats.steps_rule(exact, Decimal(repr(target)))
        arm.notes.append(f"steps rule: (target - mean) * sqrt(n) = {value:.5f}, {said(passes)}")
    runs = stats.runs_to_pass(result, target)
    if runs and not arm.passes:
        arm.notes.append(f"n = {runs} would pass at this mean and sd; adding runs is peeking")


# ---- Rules that are asked for


def apply_holm(arms: Sequence[Arm]) -> None:
    """Note Holm's p over all that was tried; an arm without a test counts as one that failed."""
    ps = {i: 1.0 if math.isnan(arm.result.p) else arm.result.p for i, arm in enumerate(arms)}
    for i, p in stats.holm(ps).items():
        if len(arms) > 1:
            verdict = f"p {p:.3g}, {said(p < ALPHA)}"
            arms[i].notes.append(f"Holm over the {len(arms)} arms and steps tried: {verdict}")


def apply_looks(arm: Arm, looked: Sequence[int]) -> None:
    """Judge the arm at the level that keeps ALPHA over all these looks and the present one."""
    if arm.result.n < 2:
        return
    looks = sorted({*looked, arm.result.n})
    true_level, level = stats.true_level(looks, ALPHA), stats.look_level(looks, ALPHA)
    arm.accepted = arm.result.p < level
    arm.notes.append(
        f"looks at n in {looks}: p < {ALPHA} at each is truly {true_level:.3g}; "
        f"p < {level:.3g} keeps {ALPHA}: {said(arm.accepted)}"
    )


def apply_baseline(arm: Arm, runs: Sequence[Run], margin: float | None) -> None:
    """Compare with the one arm of these runs. With a margin, to be no worse is accepted, too."""
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
        f"{found.high:+.6f}, one-sided p {found.p_less:.3g} (baseline {old.path}: n {found.n_b}, "
        f"mean {old.result.mean:.6f}, sd {old.result.sd:.6f})"
    )
    arm.notes += [f"baseline: {warning}" for warning in old.warnings]
    if margin is not None:
        no_worse, equal = stats.equivalence(arm.losses, old.losses, margin)
        arm.accepted = arm.accepted or no_worse < LEVEL
        arm.notes.append(
            f"no worse by {margin:g}: p {no_worse:.3g}, {said(no_worse < LEVEL)} at {LEVEL}; "
            f"equal within it: p {equal:.3g} (TOST)"
        )
