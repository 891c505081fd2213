"""Track 3 of the public contest, `steps` here: who reaches the target in the fewest steps?

Its rules apply beside the t-test. All runs of a result are read at one common step, so that no run
is stopped where it happens to be low.
"""

from collections.abc import Sequence

from claims.arms import PUBLIC_TARGETS, Arm, group_runs, judge, leave_out_repeats, names_of, said
from claims.runs import Run
from claims.stats import STEP_WORTH, STEPS_BOUND, pairwise_rule, steps_rule

TARGET = PUBLIC_TARGETS["track_3_optimization"]
RULE = f"at least {float(STEPS_BOUND):g}"


def common_steps(runs: Sequence[Run]) -> list[int]:
    """The steps at which every run that counts has a validation."""
    counted, _ = leave_out_repeats([run for run in runs if run.counts])
    each = [{point.step for point in run.validations} for run in counted]
    return sorted(set.intersection(*each)) if each else []


def judge_fewest(runs: Sequence[Run], target: float | None, step: int | None) -> list[Arm]:
    """Each arm at this step or, without one, at its first common step that passes the rule.

    An arm of which no step passes is judged at its last common step. Notes compare each arm with
    those named before it. Raises LogError.
    """
    target = TARGET if target is None else target
    arms: list[Arm] = []
    groups = group_runs(runs)
    names = names_of(groups)
    for key, group in groups.items():
        steps: list[int | None] = [*common_steps(group)] if step is None else [step]
        tried = [judge(key, names[key], group, target, each) for each in steps or [None]]
        passing = [arm for arm in tried if passes(arm)]
        arm = [*passing, tried[-1]][0]
        arm.notes = [describe(arm, len(tried)), *[compare(arm, old) for old in arms]]
        arms.append(arm)
    return arms


def passes(arm: Arm) -> bool:
    return steps_rule(arm.losses, arm.target)[1]


def describe(arm: Arm, tried: int) -> str:
    value, passed = steps_rule(arm.losses, arm.target)
    which = f"the first of {tried} common steps that passes" if passed and tried > 1 else "judged"
    if not passed and tried > 1:
        which = f"the last of {tried} common steps, none of which passes"
    return f"steps rule at step {arm.at_step}, {which}: {value:.5f}, {said(passed)} ({RULE})"


def compare(new: Arm, old: Arm) -> str:
    """Whether the logs show that an arm is better than an older one."""
    saved = (old.at_step or 0) - (new.at_step or 0)
    value, shown = pairwise_rule(new.losses, old.losses, saved)
    worth = f"{saved} steps fewer at {float(STEP_WORTH):g} each"
    better = f"better than {old.selector}, {worth}"
    return f"pairwise rule: {better}: {value:.5f}, {said(shown)} ({RULE})"


def skeptical(arm: Arm) -> str:
    """A page in the form of the public results: is the mean at this step above the target?

    The rule is the steps rule seen from the other side.
    """
    value, shown = steps_rule([-loss for loss in arm.losses], -arm.target)
    lines = [f"# Skeptical result: {arm.target:g} at step {arm.at_step}", "",
             f"Shown if `(mean_loss - {arm.target:g}) * sqrt({len(arm.losses)}) >= "
             f"{float(STEPS_BOUND):g}`, over all runs.", "",
             f"| run | loss@{arm.at_step} |", "| ---: | ---: |"]  # fmt: skip
    lines += [f"| {number} | {loss:.5f} |" for number, loss in enumerate(arm.losses, 1)]
    lines += ["", f"Mean loss: {arm.result.mean:.5f}.",
              f"Range: {min(arm.losses):.5f}-{max(arm.losses):.5f}.",
              f"Significance statistic: {value:.6f}.",
              f"Shown: the mean does not attain {arm.target:g}: {shown}.", "",
              f"Source {arm.key.source}, {arm.key.total_steps} steps, left out: "
              f"{len(arm.incomplete)} runs.", ""]  # fmt: skip
    return "\n".join(lines)
