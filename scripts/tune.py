"""Tune settings by successive halving: many settings for few steps, the best of them for more.

    python scripts/tune.py records/tuning/adamw.json             the same command resumes
    python scripts/tune.py records/tuning/adamw.json --report    only print the table of the logs

The plan is a JSON object:

    fixed   settings of every run, by the names of `train_gpt.py --print-config`
    start   the settings to be tuned, as they are today; they are the first candidate
    space   the values that each of them may take; the other candidates are drawn from these
    count   number of candidates, the first included
    rungs   list of {"steps", "seeds", "keep"}: each rung trains the candidates that the rung before
            kept, all on the same seeds, and keeps those with the lowest mean validation loss

The logs go to OUT/PLAN; the table is made from them alone, in Markdown. A run that diverged counts
as infinite loss. Exit code: 0 done, 1 a run failed, 2 bad input, 130 or 143 interrupted.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from claims.runlog import Run, read_runs
from runtime.errors import Interrupted
from scripts.command import listen, make_parser, run_child, set_up_output

ROOT = Path(__file__).resolve().parent.parent
Settings = dict[str, Any]


def read_plan(path: Path) -> dict[str, Any]:
    """The plan. ValueError if a part is missing or if space and start name different settings."""
    plan = json.loads(path.read_text())
    missing = {"fixed", "start", "space", "count", "rungs"} - set(plan)
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: see --help for its parts")
    if set(plan["start"]) != set(plan["space"]):
        raise ValueError(f"{path}: start and space must name the same settings")
    if plan["count"] > math.prod(len(values) for values in plan["space"].values()):
        raise ValueError(f"{path}: count is {plan['count']}, more than the space has settings")
    return plan


def draw_candidates(plan: dict[str, Any]) -> list[Settings]:
    """The start, then distinct settings from the space; the same on every machine."""
    generator = random.Random(0)
    candidates = [plan["start"]]
    while len(candidates) < plan["count"]:
        drawn = {name: generator.choice(values) for name, values in plan["space"].items()}
        if drawn not in candidates:
            candidates.append(drawn)
    return candidates


def flags_of(settings: Settings) -> list[str]:
    flags = []
    for name, value in settings.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        flags += [f"--{name.replace('_', '-')}", text]
    return flags


# ---- What the logs say


class Results:
    """Last validation losses in a folder of logs, by the settings of the runs."""

    def __init__(self, folder: Path):
        self.sources: set[str] = set()
        self.runs: list[Run] = []
        for log in sorted(folder.glob("*_*.jsonl")):  # run ids sort by start time
            for run in read_runs(log):
                if run.complete or run.status == "nonfinite":
                    self.runs.append(run)
                    self.sources.add(str(run.source))

    def loss(self, settings: Settings) -> float | None:
        """Of the last run with these settings, seed and steps included; inf if it diverged."""
        found = None
        for run in self.runs:
            config = run.header["config"]
            if all(config.get(name) == value for name, value in settings.items()):
                found = run.final_loss if run.complete else math.inf
        return found


def climb(plan: dict[str, Any], results: Results) -> tuple[list[list[list[Any]]], list[Settings]]:
    """The table and the runs that it still lacks.

    The table has, for each rung, [candidate's number, its losses] by mean loss, the best first. A
    rung whose runs are not all done is the last.
    """
    candidates = draw_candidates(plan)
    numbers = list(range(len(candidates)))
    table, lacking = [], []
    for rung in plan["rungs"]:
        rows = []
        for number in numbers:
            losses = []
            for seed in rung["seeds"]:
                run = plan["fixed"] | candidates[number] | {"steps": rung["steps"], "seed": seed}
                loss = results.loss(run)
                if loss is None:
                    lacking.append(run)
                else:
                    losses.append(loss)
            rows.append([number, losses])
        rows.sort(key=lambda row: statistics.fmean(row[1]) if row[1] else math.inf)
        table.append(rows)
        if lacking:
            break
        numbers = [number for number, _ in rows[: rung["keep"]]]
    return table, lacking


def report(plan: dict[str, Any], results: Results) -> str:
    """Every candidate with its mean loss at each rung that it reached, the best first."""
    table, lacking = climb(plan, results)
    candidates, names = draw_candidates(plan), list(plan["space"])
    rungs = [f"{rung['steps']} steps, {len(rung['seeds'])} seed(s)" for rung in plan["rungs"]]
    lines = [f"- source {source}" for source in sorted(results.sources)]
    lines += [f"- {len(lacking)} runs of the next rung are missing"] if lacking else []
    titles = ["#", *names, *rungs]
    lines += ["", f"| {' | '.join(titles)} |", "|-" * len(titles) + "|"]
    order: list[int] = []
    for rows in reversed(table):  # who came furthest stands first
        order += [number for number, _ in rows if number not in order]
    for number in order:
        cells = [str(candidates[number][name]) for name in names]
        for rows in table:
            losses = dict(rows).get(number)
            cells.append(f"{statistics.fmean(losses):.4f}" if losses else "")
        cells += [""] * (len(rungs) - len(table))
        lines.append(f"| {number} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "0 is the setting that was tuned."])


# ---- Runs


def run_all(plan: dict[str, Any], folder: Path) -> int:
    """Make the missing runs, rung by rung. Returns 1 if a run failed, else 0."""
    folder.mkdir(parents=True, exist_ok=True)
    while lacking := climb(plan, Results(folder))[1]:
        print(f"{len(lacking)} runs of this rung to do", flush=True)
        for run in lacking:
            command = [sys.executable, str(ROOT / "train_gpt.py"), *flags_of(run)]
            command += ["--val-every", "0", "--log-dir", str(folder.resolve())]
            code = run_child(command, folder / "last_run.console")
            print(f"exit code {code}: {' '.join(flags_of(run))}", flush=True)
            if code not in (0, 3):  # 3: the run diverged, which is a result
                print((folder / "last_run.console").read_text()[-2000:], file=sys.stderr)
                return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("plan", type=Path, help="JSON file")
    parser.add_argument("--out", type=Path, default=Path("logs/tuning"), help="(%(default)s)")
    parser.add_argument("--report", action="store_true", help="print the table and stop")
    given: argparse.Namespace = parser.parse_args(argv)
    try:
        plan, folder = read_plan(given.plan), given.out / given.plan.stem
        code = 0 if given.report else run_all(plan, folder)
        print(report(plan, Results(folder)))
        return code
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signalled:
        print("interrupted; the same command resumes", file=sys.stderr)
        return signalled.code


if __name__ == "__main__":
    listen()
    set_up_output()
    sys.exit(main())
