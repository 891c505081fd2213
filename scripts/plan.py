"""How many runs does a claim need? Exact power of the one-sided t-test, before the runs are made.

    python scripts/plan.py                                       usual spreads and margins
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
from scripts.command import make_parser, numbers, print_json, set_up_output


def make_plan(given: argparse.Namespace) -> dict[str, Any]:
    """What --json prints. Raises ValueError for a setting that makes no sense."""
    cases = []
    for sd in given.sd:
        for margin in given.margin:
            needed = [stats.runs_needed(sd, margin, power, given.alpha) for power in given.power]
            powers = [stats.power(n, sd, margin, given.alpha) for n in given.runs]
            cases.append({"sd": sd, "margin": margin, "runs": needed, "power_of_runs": powers})
    return {
        "alpha": given.alpha, "power": given.power, "runs": given.runs, "runs_needed": cases,
        "looks": given.looks, "look_level": stats.look_level(given.looks, given.alpha),
        "unplanned_level": stats.true_level(given.looks, given.alpha),
    }  # fmt: skip


def to_text(plan: dict[str, Any]) -> str:
    alpha, looks = plan["alpha"], plan["looks"]
    lines = [f"runs for p < {alpha:g} with power {plan['power']}; power of {plan['runs']} runs"]
    for case in plan["runs_needed"]:
        powers = "  ".join(f"{power:.2f}" for power in case["power_of_runs"])
        runs = "/".join(map(str, case["runs"]))
        lines.append(f"  sd {case['sd']:<8g} margin {case['margin']:<8g} {runs:>9}   {powers}")
    lines.append(f"looks at {looks} runs: test at p < {plan['look_level']:.3g} each time")
    chance = f"{plan['unplanned_level']:.3g}"
    lines.append(f"  at p < {alpha:g} each time no effect passes with chance {chance}")
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
