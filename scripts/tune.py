"""Tune settings by successive halving: many settings for few steps, the best of them for more.

    python scripts/tune.py records/tuning/adamw.json    the same command resumes
    python scripts/tune.py PLAN --report --figure last.svg    table, and the last rung as a picture

The plan is JSON: `fixed` has the settings of every run, named as by `train_gpt.py --print-config`;
`start` today's values of those to be tuned; `space` the values to try; `count` how many candidates
to draw, of which the start is the first; `rungs` a list of {"steps", "seeds", "keep"}: each trains
the best of the one before. "inf" diverged. Exit code: 0 done, 1 a run failed, 2 bad input.
"""

import json
import math
import random
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import command, make_parser, start, svg, train

from claims.logs import finished_runs
from claims.pages import table
from claims.plots import plot_effects
from claims.runs import Run
from claims.stats import holm, paired
from runtime.settings import as_text, flag

ROOT = Path(__file__).resolve().parent.parent
Settings = dict[str, Any]
LEVEL = 0.05  # Holm's p of a setting that differs from the best


def read_plan(path: Path) -> Settings:
    """The plan. ValueError if it lacks a part or its parts contradict each other."""
    try:
        plan = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if missing := {"fixed", "start", "space", "count", "rungs"} - set(plan):
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: see --help for its parts")
    if set(plan["start"]) != set(plan["space"]):
        raise ValueError(f"{path}: start and space must name the same settings")
    if plan["count"] > math.prod(map(len, plan["space"].values())):
        raise ValueError(f"{path}: count {plan['count']} is more than the space has settings")
    for name, values in plan["space"].items():
        if any(values.count(value) > 1 for value in values):
            raise ValueError(f"{path}: {name} {values}: space must list each value once")
    for rung in plan["rungs"]:
        if missing := {"steps", "seeds", "keep"} - set(rung):
            raise ValueError(f"{path}: rung {rung} lacks {', '.join(sorted(missing))}")
    return plan


def draw_candidates(plan: Settings) -> list[Settings]:
    """The start, then distinct settings from the space; the same on every machine."""
    generator = random.Random(0)
    candidates = [plan["start"]]
    while len(candidates) < plan["count"]:
        drawn = {name: generator.choice(values) for name, values in plan["space"].items()}
        if drawn not in candidates:
            candidates.append(drawn)
    return candidates


def find_loss(runs: list[Run], settings: Settings) -> float | None:
    """The last validation loss of the newest run with these settings; inf if it diverged."""
    for run in reversed(runs):
        if settings.items() <= run.header["config"].items():
            return run.final_loss if run.complete else math.inf
    return None


def climb(plan: Settings, runs: list[Run]) -> tuple[dict[int, list[list[float]]], list[Settings]]:
    """Losses of each candidate on each rung, the best first; and the runs that a rung lacks."""
    candidates = draw_candidates(plan)
    reached: dict[int, list[list[float]]] = {number: [] for number in range(len(candidates))}
    climbing = list(reached)
    lacking: list[Settings] = []
    for rung in plan["rungs"]:
        for number in climbing:
            shared = plan["fixed"] | candidates[number] | {"steps": rung["steps"]}
            wanted = [shared | {"seed": seed} for seed in rung["seeds"]]
            losses = [find_loss(runs, run) for run in wanted]
            lacking += [run for run, loss in zip(wanted, losses, strict=True) if loss is None]
            reached[number].append([loss for loss in losses if loss is not None])
        climbing.sort(key=lambda number: fmean(reached[number][-1] or [math.inf]))
        reached = {number: reached[number] for number in climbing} | reached
        climbing = [] if lacking else climbing[: rung["keep"]]
    return reached, lacking


def report(plan: Settings, runs: list[Run]) -> str:
    """Every candidate with its mean loss at each rung that it reached; the best come first."""
    losses, lacking = climb(plan, runs)
    candidates = draw_candidates(plan)
    lines = [f"- source {source}" for source in sorted({str(run.source) for run in runs})]
    lines += [f"- the last rung lacks {len(lacking)} runs" if lacking else "- complete", ""]
    titles = ["#", *plan["space"]]
    titles += [f"{rung['steps']} steps, {len(rung['seeds'])} seeds" for rung in plan["rungs"]]
    rows = []
    for number, rungs in losses.items():
        cells = [number, *[candidates[number][name] for name in plan["space"]]]
        for made, rung in zip(rungs, plan["rungs"], strict=False):
            planned = len(rung["seeds"])
            share = f" ({len(made)} of {planned})" if len(made) < planned else ""
            cells.append(f"{fmean(made):.4f}{share}" if made else "")
        rows.append(cells + [""] * (len(titles) - len(cells)))
    return "\n".join([*lines, table(f"| {' | '.join(titles)} |", rows)])


def draw_last_rung(plan: Settings, runs: list[Run], path: Path) -> None:
    """Write the forest plot of the last rung: each setting against the best, on the same seeds."""
    losses, lacking = climb(plan, runs)
    if lacking:
        raise ValueError(f"the picture of the last rung lacks {len(lacking)} runs: make them first")
    height = len(plan["rungs"])
    last = {number: rungs[-1] for number, rungs in losses.items() if len(rungs) == height}
    candidates, (best, *others) = draw_candidates(plan), last
    if not others:
        raise ValueError("the last rung trains one setting: a picture needs two to compare")
    effects = {}
    for number in others:
        name = f"{number}: {describe(candidates[number], candidates[best])}"
        effects[textwrap.fill(name, 48)] = paired(last[number], last[best])
    adjusted = holm({name: effect.p_two_sided for name, effect in effects.items()})
    clear = [name for name, p in adjusted.items() if p < LEVEL]
    plot_effects(effects, clear, f"loss minus that of setting {best}", path)


def describe(settings: Settings, others: Settings) -> str:
    """The values that differ from those of the others."""
    changed = [name for name, value in settings.items() if value != others[name]]
    # A line may break only after a comma: the space before the value is a hard one.
    return ", ".join(f"{name}\N{NO-BREAK SPACE}{as_text(settings[name])}" for name in changed)


def flags_of(settings: Settings) -> list[str]:
    """The command line of the trainer for these settings."""
    return [word for name, value in settings.items() for word in (flag(name), as_text(value))]


def run_all(plan: Settings, folder: Path) -> int:
    """Make the missing runs, rung by rung. Returns 1 if a run failed, else 0."""
    while lacking := climb(plan, finished_runs(folder))[1]:
        for run in lacking:
            code = train(ROOT, [*flags_of(run), "--val-every", "0"], folder)
            print(f"exit code {code}: {' '.join(flags_of(run))}", flush=True)
            if code not in (0, 3):  # 3: the run diverged, which is a result
                return 1
            results = finished_runs(folder)
            if find_loss(results, run) is None:  # it would be made again and again
                logged = results[-1].header["config"] if results else {}
                names = [f"{name} {run[name]!r}" for name in run if logged.get(name) != run[name]]
                raise ValueError(f"{', '.join(names)}: not so in the log; see --print-config")
    return 0


@command
def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("plan", type=Path, help="JSON file; its logs go to OUT/NAME")
    parser.add_argument("--out", type=Path, default=Path("logs/tuning"), help="(%(default)s)")
    parser.add_argument("--report", action="store_true", help="print the table and stop")
    parser.add_argument("--figure", type=svg, metavar="SVG", help="then draw the last rung")
    given = parser.parse_args(argv)
    plan, folder = read_plan(given.plan), given.out / given.plan.stem
    code = 0 if given.report else run_all(plan, folder)
    results = finished_runs(folder)
    print(report(plan, results))
    if given.figure and code == 0:
        draw_last_rung(plan, results, given.figure)
    return code


if __name__ == "__main__":
    start(main)
