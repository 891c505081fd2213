"""Tune settings by successive halving: many settings for few steps, the best of them for more.

    python scripts/tune.py records/tuning/adamw.json             the same command resumes
    python scripts/tune.py records/tuning/adamw.json --report    only print the table of the logs

The plan is JSON: `fixed` holds settings of every run, named as by `train_gpt.py --print-config`;
`start` those to be tuned, as they are today; `space` the values each may take, from which `count`
candidates are drawn, the start being the first; `rungs` a list of {"steps", "seeds", "keep"}: each
trains what the one before kept, on the same seeds, and keeps the lowest mean validation losses.

The logs go to OUT/PLAN; the table is made from them alone, in Markdown. A run that diverged counts
as infinite loss. Exit code: 0 done, 1 a run failed, 2 bad input.
"""

import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from claims.runlog import read_runs
from claims.runs import Run
from scripts.command import command, make_parser, run_child, start

ROOT = Path(__file__).resolve().parent.parent
Settings = dict[str, Any]


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


def read_results(folder: Path) -> list[Run]:
    """The runs that finished or diverged, the oldest first."""
    runs: list[Run] = []
    for log in sorted(folder.glob("*_*.jsonl")):  # run ids sort by start time
        runs += [run for run in read_runs(log) if run.complete or run.status == "nonfinite"]
    return runs


def find_loss(runs: list[Run], settings: Settings) -> float | None:
    """The last validation loss of the newest run with these settings; inf if it diverged."""
    for run in reversed(runs):
        config = run.header["config"]
        if all(config.get(name) == value for name, value in settings.items()):
            return run.final_loss if run.complete else math.inf
    return None


def climb(plan: Settings, runs: list[Run]) -> tuple[list[dict[int, float]], list[Settings]]:
    """Mean loss by candidate, the lowest first, for each rung; and the runs that the last lacks."""
    candidates = draw_candidates(plan)
    numbers = list(range(len(candidates)))
    rungs: list[dict[int, float]] = []
    lacking: list[Settings] = []
    for rung in plan["rungs"]:
        means = {}
        for number in numbers:
            shared = plan["fixed"] | candidates[number] | {"steps": rung["steps"]}
            wanted = [shared | {"seed": seed} for seed in rung["seeds"]]
            losses = [find_loss(runs, run) for run in wanted]
            lacking += [run for run, loss in zip(wanted, losses, strict=True) if loss is None]
            means[number] = fmean([loss for loss in losses if loss is not None] or [math.inf])
        numbers = sorted(means, key=means.__getitem__)
        rungs.append({number: means[number] for number in numbers})
        if lacking:
            break
        numbers = numbers[: rung["keep"]]
    return rungs, lacking


def report(plan: Settings, runs: list[Run]) -> str:
    """Every candidate with its mean loss at each rung that it reached; the best come first."""
    rungs, lacking = climb(plan, runs)
    candidates = draw_candidates(plan)
    lines = [f"- source {source}" for source in sorted({str(run.source) for run in runs})]
    lines += [f"- the last rung lacks {len(lacking)} runs" if lacking else "- complete", ""]
    later = [f"{rung['steps']} steps, {len(rung['seeds'])} seeds" for rung in plan["rungs"]]
    titles = ["#", *plan["space"], *later]
    lines += [f"| {' | '.join(titles)} |", "|-" * len(titles) + "|"]
    order: dict[int, None] = {}  # who came furthest stands first
    for rung in reversed(rungs):
        order |= dict.fromkeys(rung)
    for number in order:
        cells = [str(number), *map(str, candidates[number].values())]
        cells += [f"{rung[number]:.4f}" if number in rung else "" for rung in rungs]
        cells += [""] * (len(titles) - len(cells))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def flags_of(settings: Settings) -> list[str]:
    """The command line of the trainer for these settings."""
    flags = []
    for name, value in settings.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        flags += [f"--{name.replace('_', '-')}", text]
    return flags


def run_all(plan: Settings, folder: Path) -> int:
    """Make the missing runs, rung by rung. Returns 1 if a run failed, else 0."""
    folder.mkdir(parents=True, exist_ok=True)
    while lacking := climb(plan, read_results(folder))[1]:
        for run in lacking:
            words = [sys.executable, str(ROOT / "train_gpt.py"), *flags_of(run)]
            code = run_child([*words, "--val-every", "0", "--log-dir", str(folder.resolve())])
            print(f"exit code {code}: {' '.join(flags_of(run))}", flush=True)
            if code not in (0, 3):  # 3: the run diverged, which is a result
                return 1
    return 0


@command
def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("plan", type=Path, help="JSON file")
    parser.add_argument("--out", type=Path, default=Path("logs/tuning"), help="(%(default)s)")
    parser.add_argument("--report", action="store_true", help="print the table and stop")
    given = parser.parse_args(argv)
    plan, folder = read_plan(given.plan), given.out / given.plan.stem
    code = 0 if given.report else run_all(plan, folder)
    print(report(plan, read_results(folder)))
    return code


if __name__ == "__main__":
    start(main)
