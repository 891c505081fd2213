"""The verdict on an arm: does its mean loss lie below the target, at p < 0.01?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from claims import arms as grouping
from claims import stats
from claims.runs import LogError, Run, Validation

ALPHA = 0.01
MARGINAL = 0.007  # above it the right skew of real losses can undo a pass
FEW_RUNS = 4  # fewer losses can lie close together by chance
ROUNDING_UNITS = 3  # an sd of fewer units of the last printed digit is mostly rounding
LEVEL = 0.05  # at which an arm is shown to be no worse than another
STEPS_TRACKS = {"steps", "track_3_optimization"}  # judged by their own rule, too
DOCUMENTED = (
    "path", "source", "total_steps", "gpu_count", "n", "losses", "times_ms", "mean", "sd", "t", "p",
    "upper99", "passes", "incomplete", "warnings",
)  # fmt: skip


@dataclass(kw_only=True)
class Arm:
    """Runs that are judged together and what follows from their losses."""

    path: str | None = None
    source: str | None = None
    config_sha256: str | None = None
    total_steps: int | None = None
    gpu_count: int | None = None
    track: str | None = None
    claim: str | None = None  # id of the claim in the headers
    at_step: int | None = None  # whose validations are judged; None: the last ones
    names: list[str] = field(default_factory=list)  # of the runs
    points: list[Validation]  # one a run
    target: float  # nats per token
    n: int
    mean: float
    sd: float
    t: float
    p: float
    upper99: float
    incomplete: list[dict[str, Any]] = field(default_factory=list)  # path, reason, last_loss
    warnings: list[str]
    notes: list[str] = field(default_factory=list)  # what other tests say
    accepted: bool  # the exit code: passes, under the rule that was asked for

    @property
    def losses(self) -> list[float]:
        return [point.loss for point in self.points]

    @property
    def times_ms(self) -> list[float | None]:
        return [point.train_time_ms for point in self.points]

    @property
    def passes(self) -> bool:
        return self.p < ALPHA

    @property
    def documented(self) -> dict[str, Any]:
        """The fields that --json prints."""
        return {name: getattr(self, name) for name in DOCUMENTED}


def judge(points: list[Validation], target: float, warnings: list[str], **facts: Any) -> Arm:
    """The verdict on these losses, one a run; `facts` are other fields of `Arm`."""
    result = stats.one_sample([point.loss for point in points], target)
    arm = Arm(
        points=points, target=target, warnings=sample_warnings(result, points) + warnings,
        accepted=result.p < ALPHA, **result._asdict(), **facts,
    )  # fmt: skip
    if arm.track in STEPS_TRACKS and points:
        exact = [Decimal(repr(loss)) for loss in arm.losses]  # repr: the shortest decimal
        value, passes = stats.steps_rule(exact, Decimal(repr(target)))
        arm.notes.append(f"steps rule: (target - mean) * sqrt(n) = {value:.5f}, {said(passes)}")
    runs = stats.runs_to_pass(result, target)
    if runs and not arm.passes:
        arm.notes.append(f"n = {runs} would pass at this mean and sd; adding runs is peeking")
    return arm


def said(passes: bool) -> str:
    return "pass" if passes else "fail"


def sample_warnings(result: stats.Result, points: list[Validation]) -> list[str]:
    """What makes p say less than it seems to."""
    warnings = []
    if 0 < result.n < FEW_RUNS:
        warnings.append(f"n = {result.n}: too few runs to know their spread, make {FEW_RUNS}")
    if result.n > 1 and not result.sd > 0:
        warnings.append("losses without a finite spread: there is no test")
    if result.sd > 0:
        unit = 10.0 ** min(int(point.exact.as_tuple().exponent) for point in points)
        if result.sd < ROUNDING_UNITS * unit:
            warnings.append(f"sd {result.sd:.2g} is limited by the rounding of losses to {unit:g}")
    return warnings


def judge_all(runs: Sequence[Run], target: float | None, steps: Sequence[int]) -> list[Arm]:
    """Every arm of these runs, at each of the steps or, without any, at the end."""
    sources = grouping.several_sources(runs)
    arms = []
    for key, group in grouping.group_runs(runs).items():
        for step in sorted(set(steps)) or [None]:
            arms.append(judge_runs(key, group, target, step, sources))
    return arms


def usable(run: Run, at_step: int | None) -> bool:
    return run.counts or (at_step is not None and run.stopped_early)


def judge_runs(
    key: grouping.ArmKey, runs: Sequence[Run], target: float | None, at_step: int | None,
    sources: dict[Path, int],
) -> Arm:  # fmt: skip
    """The verdict on one arm. `sources`: the folders that hold several, see `several_sources`."""
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
    claims = {str(run.header.get("claim")) for run in runs if run.header}
    warnings = origin_warnings(runs, sources, claims) + repeats
    early = sum(not run.complete for run in counted)
    if early:
        rule = f"step {at_step} must have been fixed beforehand"
        warnings.append(f"{early} runs end before the steps that they declare: {rule}")
    return judge(
        list(points.values()),
        target,
        warnings,
        **key._asdict(),
        path=grouping.common_folder(runs),
        track=grouping.track_of(runs[0]),
        claim=min(claims - {"None"}, default=None),
        at_step=at_step,
        names=list(points),
        incomplete=[
            {"path": grouping.name_of(run), "reason": reason, "last_loss": run.final_loss}
            for run, reason in left_out
        ],
        notes=[f"{grouping.name_of(run)}: {run.resumed}" for run in counted if run.resumed],
    )


def origin_warnings(runs: Sequence[Run], sources: dict[Path, int], claims: set[str]) -> list[str]:
    warnings = []
    for folder in sorted({run.path.parent for run in runs} & sources.keys()):
        rule = "not pooled: each is an arm of its own"
        warnings.append(f"{sources[folder]} SOURCES in {folder}, {rule}")
    if any(run.complete and run.source is None for run in runs):
        warnings.append("the logs do not hold their source: nothing shows that it is the same")
    if len(claims) > 1:
        warnings.append(f"the runs stand under different claims: {', '.join(sorted(claims))}")
    missing = ", ".join(map(str, grouping.missing_seeds(runs)))
    if missing:
        warnings.append(f"no run has seed {missing}: was it made and left out?")
    return warnings


# ---- Rules that are asked for


def apply_looks(arm: Arm, looked: Sequence[int]) -> None:
    """Judge the arm at the level that keeps ALPHA over all these looks and the present one."""
    if arm.n < 2:
        return
    looks = sorted({*looked, arm.n})
    true_level, level = stats.true_level(looks, ALPHA), stats.look_level(looks, ALPHA)
    arm.accepted = arm.p < level
    arm.notes.append(
        f"looks at n in {looks}: p < {ALPHA} at each is truly {true_level:.3g}; "
        f"p < {level:.3g} keeps {ALPHA}: {said(arm.accepted)}"
    )


def apply_holm(arms: Sequence[Arm]) -> None:
    """Note Holm's p over all that was tried; an arm without a test counts as one that failed."""
    if len(arms) < 2:
        return
    adjusted = stats.holm({i: 1.0 if math.isnan(arm.p) else arm.p for i, arm in enumerate(arms)})
    for i, arm in enumerate(arms):
        p = f"p {adjusted[i]:.3g}, {said(adjusted[i] < ALPHA)}"
        arm.notes.append(f"Holm over the {len(arms)} arms and steps tried: {p}")


def apply_baseline(arm: Arm, runs: Sequence[Run], margin: float | None) -> None:
    """Compare with the one arm of these runs. With a margin, to be no worse is accepted, too."""
    steps = [] if arm.at_step is None else [arm.at_step]
    arms = [old for old in judge_all(runs, arm.target, steps) if old.n]
    if len(arms) != 1:
        raise LogError(f"the baseline holds {len(arms)} arms with runs that count: name one arm")
    old = arms[0]
    shared = {*arm.names} & {*old.names}
    if shared:
        raise LogError(f"{min(shared)} is in the baseline too: compare with other runs")
    found = stats.welch(arm.losses, old.losses)
    arm.notes.append(
        f"loss minus the baseline's {found.mean:+.6f}, 95 % interval {found.low:+.6f} to "
        f"{found.high:+.6f}, one-sided p {found.p_less:.3g} "
        f"(baseline {old.path}: n {old.n}, mean {old.mean:.6f}, sd {old.sd:.6f})"
    )
    arm.notes += [f"baseline: {warning}" for warning in old.warnings]
    if margin is not None:
        no_worse, equal = stats.equivalence(arm.losses, old.losses, margin)
        arm.accepted = arm.accepted or no_worse < LEVEL
        arm.notes.append(
            f"no worse by {margin:g}: p {no_worse:.3g}, {said(no_worse < LEVEL)} at {LEVEL}; "
            f"equal within it: p {equal:.3g} (TOST)"
        )
