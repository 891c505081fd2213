"""How many runs does a claim need? Exact power of the one-sided t-test, before the runs are made.

    python scripts/plan.py --sd 0.0013 --margin 0.001        runs for a power of 0.8 and 0.9
    python scripts/plan.py logs                              sd and margin of these runs
    python scripts/plan.py --looks 5,10,15                   the level at which to test early
    python scripts/plan.py --pairs A B --margin 0.01         pairs of runs that show a difference

The margin is how far the true mean lies below the target, the sd that of single runs. Of logs (one
arm: files, a folder or a record) both are taken, with the target of their track. With --pairs the
spreads are those of two arms with logs on the same seeds. Exit code: 0 done, 2 bad input.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import command, make_parser, show, start, whole_numbers

from claims import stats
from claims.arms import ALPHA, common_target
from claims.comparison import read_side


def spread_below(path: str, target: float | None) -> tuple[float, float]:
    """The sd of these runs, and how far their mean lies below the target. ValueError if neither."""
    side = read_side(path)
    mean, sd = stats.moments(side.losses)
    if len(side.runs) < 2:
        raise ValueError(f"{path} has 1 run: a spread needs 2, or give --sd and --margin")
    if target is None:
        target = common_target(side.runs)
    if not mean < target:
        rule = "no number of runs would show that it lies below"
        raise ValueError(f"the mean loss of {path} is {mean:.4f}, the target {target:g}: {rule}")
    return sd, target - mean


def plan_pairs(paths: Sequence[str], margin: float) -> tuple[dict[str, Any], str]:
    """The plan as JSON data and as text. ValueError for fewer than 3 common seeds, or no spread."""
    a, b = (read_side(path).by_seed for path in paths)
    seeds = sorted(set(a) & set(b))
    if len(seeds) < 3:
        raise ValueError(f"{' and '.join(paths)} share {len(seeds)} seeds; a plan needs 3 or more")
    new, old = [b[seed] for seed in seeds], [a[seed] for seed in seeds]
    sd = stats.moments([x - y for x, y in zip(new, old, strict=True)])[1]
    if sd == 0:
        raise ValueError(f"{' and '.join(paths)} have losses that are equal, or equally far apart, "
                         f"on all {len(seeds)} seeds: there is nothing to plan")
    apart = sd * stats.saving(new, old) ** 0.5
    pairs = stats.runs_needed(sd, margin, 0.8, ALPHA)
    alone = stats.runs_needed(apart, margin, 0.8, ALPHA)
    plan = {"seeds": seeds, "sd": sd, "pairs_needed": pairs, "unpaired_needed": alone}
    text = (f"{len(seeds)} differences have an sd of {sd:.4f}; margin {margin:g}, power 0.8:\n"
            f"  {pairs} pairs, or about {alone} runs an arm if each has seeds of its own")
    return plan, text


@command
def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    way = parser.add_mutually_exclusive_group().add_argument
    way("--sd", type=float, default=0.0013, help="of single runs, nats (%(default)s)")
    add("--margin", type=float, default=0.001, help="below the target, nats (%(default)s)")
    way("--pairs", nargs=2, metavar=("A", "B"), help="logs of two arms on the same seeds")
    add("logs", nargs="?", metavar="LOGS", help="take sd and margin from the runs of one arm")
    add("--target", type=float, help="of LOGS, nats per token (default: their track's)")
    way("--looks", type=whole_numbers, help="numbers of runs after which you test, such as 5,10")
    add("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    sd, margin, looks = given.sd, given.margin, given.looks
    if given.logs and (looks or given.pairs):
        parser.error("LOGS go without --looks and --pairs")
    if given.target is not None and not given.logs:
        parser.error("--target needs LOGS, whose mean it is compared with; else give --margin")
    if given.logs:
        sd, margin = spread_below(given.logs, given.target)
    if looks:
        level = stats.look_level(tuple(looks), ALPHA)
        plan = {"looks": looks, "look_level": level}
        text = f"test at p < {level:.3g} at each of the looks {looks}"
    elif given.pairs:
        plan, text = plan_pairs(given.pairs, margin)
    else:
        needed = {power: stats.runs_needed(sd, margin, power, ALPHA) for power in (0.8, 0.9)}
        plan = {"sd": sd, "margin": margin, "runs_needed": needed}
        text = f"sd {sd:.4g}, margin {margin:.4g}, p < {ALPHA:g}:"
        for power, runs in needed.items():
            text += f"\n  {runs} runs for a power of {power:g}"
        if not argv:
            text += "\nsd and margin are defaults: give --sd and --margin, or LOGS that tell them"
    show(text, plan, given.json)
    return 0


if __name__ == "__main__":
    start(main)
