"""How many runs does a claim need? Exact power of the one-sided t-test, before the runs are made.

    python scripts/plan.py                                       tables for usual spreads and margins
    python scripts/plan.py --sd 0.0013 --margin 0.001 --runs 10  one case
    python scripts/plan.py --looks 5,10,15                       the level at which to test early

The margin is how far the true mean lies below the target, the sd that of single runs. Exit code: 0
done, 2 bad input.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from claims import stats
from scripts.command import make_parser, number, numbers, print_json, set_up_output

EQUIVALENCE = 0.05  # level of the test that two arms are alike


def make_plan(given: argparse.Namespace) -> dict[str, Any]:
    """What --json prints. Raises ValueError for a setting that makes no sense."""
    alpha, powers = given.alpha, given.power
    needed, alike, shown = [], [], []
    for sd in given.sd:
        for margin in given.margin:
            case = {"sd": sd, "margin": margin}
            runs = [stats.runs_needed(sd, margin, power, alpha) for power in powers]
            needed.append(case | {"runs": runs})
            runs = [stats.equivalence_runs(sd, margin, power, EQUIVALENCE) for power in powers]
            alike.append(case | {"runs": runs})
        for n in given.runs:
            margin = stats.detectable_margin(n, sd, powers[0], alpha)
            mean = stats.passing_mean(n, sd, given.target, alpha)
            shown.append({"runs": n, "sd": sd, "margin": margin, "passing_mean": mean})
    return {
        "target": given.target, "alpha": alpha, "power": powers, "runs_needed": needed,
        "equivalence": alike, "shown": shown, "looks": given.looks,
        "look_level": stats.look_level(given.looks, alpha),
        "unplanned_level": stats.true_level(given.looks, alpha),
    }  # fmt: skip


def to_text(plan: dict[str, Any]) -> str:
    power = "/".join(f"{chance:g}" for chance in plan["power"])
    lines = [f"runs for p < {plan['alpha']:g} with power {power}; in brackets: runs in each of two",
             f"arms to show at p < {EQUIVALENCE:g} that they differ by less than the margin"]  # fmt: skip
    for case, alike in zip(plan["runs_needed"], plan["equivalence"], strict=True):
        runs = "/".join(map(str, case["runs"]))
        both = "/".join(map(str, alike["runs"]))
        lines.append(f"  sd {case['sd']:<8g} margin {case['margin']:<8g} {runs:>9}  ({both})")
    lines.append(f"margin shown with power {plan['power'][0]:g}, and the mean that must be beaten")
    for row in plan["shown"]:
        figures = f"{row['margin']:.5f}  {row['passing_mean']:.5f}"
        lines.append(f"  runs {row['runs']:<6} sd {row['sd']:<8g} {figures}")
    looks = ", ".join(map(str, plan["looks"]))
    lines.append(
        f"looks at {looks} runs: test at p < {plan['look_level']:.3g} each time to keep "
        f"{plan['alpha']:g}; at p < {plan['alpha']:g} each time a change without an effect passes "
        f"with a chance of {plan['unplanned_level']:.3g}"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    positive, counts = numbers(float, 1e-9, 1e9), numbers(int, 2, stats.MOST_RUNS)
    spreads, margins = [0.001, 0.0013, 0.0016, 0.002], [0.0005, 0.001, 0.0015, 0.002, 0.0025]
    add("--sd", type=positive, default=spreads, help="sd of single runs, nats (%(default)s)")
    add("--margin", type=positive, default=margins, help="margins, nats (%(default)s)")
    add("--runs", type=counts, default=[5, 10, 20], help="numbers of runs (%(default)s)")
    add("--looks", type=counts, default=[5, 10], help="all looks at which one tests (%(default)s)")
    add("--target", type=number, default=3.28, help="loss to beat (%(default)s)")
    add("--alpha", type=float, default=0.01, help="level of the test (%(default)s)")
    add("--power", type=numbers(float, 0, 1), default=[0.8, 0.9], help="(%(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    try:
        plan = make_plan(given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        print_json(plan)
    else:
        print(to_text(plan))
    return 0


if __name__ == "__main__":
    set_up_output()
    sys.exit(main())
