"""How many runs does a claim need? Exact power of the one-sided t-test, before the runs are made.

    python scripts/plan.py                                       tables for the usual spreads and margins
    python scripts/plan.py --sd 0.0013 --margin 0.001            one case; --power and --alpha set its chances
    python scripts/plan.py --looks 5,10,15                       at which level to test if one looks early
    python scripts/plan.py logs                                  what arms that failed would have needed
    python scripts/plan.py --losses 3.279,3.278 --target 3.28    the same for losses typed by hand: unverified

The margin is how far the true mean lies below the target, the sd that of single runs. Exit code: 0 done, 2 bad input.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from claims import stats
from claims.arms import common_folder, common_target, group_runs, leave_out_repeats
from scripts.command import insist, null_for_nan, numbers, set_up_output
from claims.runlog import LogError, read_all

USUAL = {  # what is planned where nothing else is said, for spreads as public records have them
    "sd": [0.001, 0.0013, 0.0016, 0.002], "margin": [0.0005, 0.001, 0.0015, 0.002, 0.0025],
    "runs": [5, 8, 10, 13, 20, 40], "looks": [5, 10], "target": 3.28,
}  # fmt: skip
EQUIVALENCE = 0.05  # level of the test that two arms are alike

Facts = dict[str, Any]  # what --json prints


# ---- Figures


def make_plan(given: argparse.Namespace) -> Facts:
    """Figures for each sd with each margin and each number of runs, and for the looks."""
    target, alpha, powers = given.target, given.alpha, given.power

    def by_case(runs: Callable[..., int], level: float) -> list[Facts]:
        cases = [{"sd": sd, "margin": margin} for sd in given.sd for margin in given.margin]
        return [case | {"runs": [runs(**case, chance=power, alpha=level) for power in powers]} for case in cases]

    return {
        "target": target, "alpha": alpha, "power": powers, "runs_needed": by_case(stats.runs_needed, alpha),
        "equivalence": by_case(stats.equivalence_runs, EQUIVALENCE),
        "shown": [{"runs": n, "sd": sd, "margin": stats.detectable_margin(n, sd, powers[0], alpha),
                   "passing_mean": stats.passing_mean(n, sd, target, alpha)} for n in given.runs for sd in given.sd],
        "looks": given.looks, "look_level": stats.look_level(given.looks, alpha),
        "unplanned_level": stats.true_level(given.looks, alpha),
    }  # fmt: skip


def review(name: str, losses: Sequence[float], target: float, given: argparse.Namespace) -> Facts:
    """What an arm would have needed, and what it costs to add runs to it; NaN for what it does not determine."""
    alpha, power, result = given.alpha, given.power[0], stats.one_sample(losses, target)
    enough = stats.runs_to_pass(result, target, alpha)
    looks = [result.n, enough] if enough and not result.p < alpha else None
    return {
        "name": name, **result._asdict(), "target": target, "alpha": alpha, "passes": result.p < alpha,
        "runs_to_pass": enough, "level_of_adding": stats.true_level(looks, alpha) if looks else None, "power": power,
        "fresh_runs": stats.runs_needed(result.sd, target - result.mean, power, alpha) if looks else None,
    }  # fmt: skip


def review_all(given: argparse.Namespace) -> Facts:
    """The typed losses, or every arm of the logs and what was left out and why."""
    if given.losses:
        return {"arms": [review("typed losses, UNVERIFIED", given.losses, given.target, given)], "notes": []}
    runs, errors = read_all(given.paths)
    arms, notes = [], [f"not read: {error}" for error in errors]
    for arm in group_runs(runs).values():
        counted, repeats = leave_out_repeats([run for run in arm if run.complete])
        notes += repeats + [f"left out: {run.path}: {run.unfinished}" for run in arm if run.unfinished]
        name = f"{common_folder(arm)}: source {str(arm[0].source)[:12]}, {arm[0].total_steps} steps"
        target = common_target(arm) if given.target is None else given.target
        arms.append(review(name, [run.validations[-1].loss for run in counted], target, given))
    if not arms:
        raise LogError("\n".join(["no run log can be read", *notes]))
    return {"arms": arms, "notes": notes}


# ---- Output


def table(entries: Sequence[Facts], row: str, column: str, cell: Callable[[Facts], str]) -> str:
    """Two fields of the entries against each other, in columns as wide as they need to be."""
    lines = {entry[row]: [f"{row} {entry[row]:g}"] for entry in entries}
    for entry in entries:
        lines[entry[row]].append(cell(entry))
    head = ["", *dict.fromkeys(f"{column} {entry[column]:g}" for entry in entries)]
    widths = [max(map(len, values)) for values in zip(head, *lines.values(), strict=True)]
    return "\n".join("   ".join(map(str.rjust, values, widths)) for values in [head, *lines.values()])


def plan_text(plan: Facts) -> str:
    def runs(entry: Facts) -> str:
        return "/".join(map(str, entry["runs"]))

    def shown(entry: Facts) -> str:
        return f"{entry['margin']:.5f} {entry['passing_mean']:.5f}"

    alpha, power, looks = plan["alpha"], "/".join(map("{:g}".format, plan["power"])), ", ".join(map(str, plan["looks"]))
    return f"""\
Runs for p < {alpha:g} with power {power}, by the sd of the losses and the margin of the true mean below the target
{table(plan["runs_needed"], "sd", "margin", runs)}

Margin that is shown with power {plan["power"][0]:g}, and mean below which a target of {plan["target"]:g} is passed
{table(plan["shown"], "runs", "sd", shown)}

Runs in each of two arms without a difference, to show at p < {EQUIVALENCE:g} that it is smaller than the margin
{table(plan["equivalence"], "sd", "margin", runs)}

Looks at {looks} runs: test at p < {plan["look_level"]:.3g} each time to keep {alpha:g} over all.
Testing at p < {alpha:g} each time, a change without an effect passes with a chance of {plan["unplanned_level"]:.3g}."""


def review_text(arm: Facts) -> str:
    n, enough = arm["n"], arm["runs_to_pass"]
    if math.isnan(arm["p"]):
        return f"{arm['name']}\n  n {n}   FAIL: there is no test without a spread of finite losses"
    verdict = "PASS: no more runs are needed" if arm["passes"] else "FAIL: no number of runs would pass at this mean"
    if arm["fresh_runs"]:
        verdict = f"""FAIL: at this mean and sd {enough} runs would pass
  warning: do not add runs until they pass. Tested at {n} runs and again at {enough}, a change without an effect passes
  with a chance of {arm["level_of_adding"]:.3g}. Make {arm["fresh_runs"]} fresh runs under a new claim: if this mean and
  sd are the true ones, they pass with power {arm["power"]:g}."""
    return (f"{arm['name']}\n  n {n}   mean {arm['mean']:.6f}   sd {arm['sd']:.6f}   target {arm['target']:g}   "
            f"p {arm['p']:.3g}, to be < {arm['alpha']:g}\n  {verdict}")


# ---- Command line


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    positive, counts = numbers(float, 1e-9, 1e9), numbers(int, 2, stats.MOST_RUNS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="run logs, or folders of run logs, to review")
    parser.add_argument("--losses", type=numbers(float, -1e9, 1e9), help="losses typed by hand, to review")
    parser.add_argument("--sd", type=positive, help="spreads of single runs, nats per token")
    parser.add_argument("--margin", type=positive, help="true margins below the target, nats per token")
    parser.add_argument("--runs", type=counts, help="numbers of runs to tell the margin of")
    parser.add_argument("--looks", type=counts, help="all numbers of runs at which one tests")
    parser.add_argument("--target", type=float, help="loss to beat (default: that of the logs, or 3.28)")
    parser.add_argument("--alpha", type=float, default=0.01, help="level of the test (default: 0.01)")
    parser.add_argument("--power", type=numbers(float, 0, 1), default=[0.8, 0.9], help="(default: 0.8,0.9)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    reviews = bool(given.paths) + (given.losses is not None)
    plans = given.sd or given.margin or given.runs or given.looks
    insist(parser, {
        "name run logs, or type losses with --losses: one of the two": reviews < 2,
        "--losses needs --target: typed losses name none": not given.losses or given.target is not None,
        "--target must be a finite number, like 3.28": math.isfinite(given.target or 0),
        "--sd, --margin, --runs and --looks plan runs to come; runs that are there bring their own":
            not (reviews and plans),
    })  # fmt: skip
    for name, usual in ({} if reviews else USUAL).items():
        setattr(given, name, usual if getattr(given, name) is None else getattr(given, name))
    return given


def main(argv: Sequence[str] | None = None) -> int:
    given = parse_arguments(argv)
    reviewing = given.paths or given.losses
    try:
        facts = review_all(given) if reviewing else make_plan(given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(null_for_nan(facts), indent=2, allow_nan=False))
    else:
        print("\n\n".join([*map(review_text, facts["arms"]), *facts["notes"]]) if reviewing else plan_text(facts))
    return 0


if __name__ == "__main__":
    set_up_output()
    sys.exit(main())
