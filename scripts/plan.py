"""How many runs does a claim need? Exact power of the one-sided t-test, before the runs are made.

    python scripts/plan.py --sd 0.0013 --margin 0.001        runs for a power of 0.8 and 0.9
    python scripts/plan.py --looks 5,10,15                   the level at which to test early

The margin is how far the true mean lies below the target, the sd that of single runs. Exit code: 0
done, 2 bad input.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from claims import stats
from claims.arms import ALPHA
from scripts.command import command, make_parser, print_json, start, whole_numbers


@command
def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--sd", type=float, default=0.0013, help="of single runs, nats (%(default)s)")
    add("--margin", type=float, default=0.001, help="below the target, nats (%(default)s)")
    add("--looks", type=whole_numbers, help="numbers of runs after which you test, such as 5,10")
    add("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    sd, margin, looks = given.sd, given.margin, given.looks
    if looks:
        level = stats.look_level(tuple(looks), ALPHA)
        plan = {"looks": looks, "look_level": level}
        text = f"test at p < {level:.3g} at each of the looks {looks}"
    else:
        needed = {power: stats.runs_needed(sd, margin, power, ALPHA) for power in (0.8, 0.9)}
        plan = {"sd": sd, "margin": margin, "runs_needed": needed}
        text = f"sd {sd:g}, margin {margin:g}, p < {ALPHA:g}:"
        for power, runs in needed.items():
            text += f"\n  {runs} runs for a power of {power:g}"
    if given.json:
        print_json(plan)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    start(main)
