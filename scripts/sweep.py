"""Train many arms on equal seeds, runs side by side, and compare each arm with the first.

    python scripts/sweep.py PLAN.json              the same command resumes
    python scripts/sweep.py PLAN.json --report     only the table of the runs so far

An arm is flags of train_gpt.py, a patch of its source, or both. PLAN is JSON:

    {"flags": "--track tiny --recipe muon",
     "seeds": [0, 1, 2, 3],
     "arms": {"baseline": "", "smear": "--smear on",
              "my idea": {"flags": "--steps 40", "patch": "idea.diff", "seeds": [0, 1]}},
     "grid": {"matrix_lr": [0.01, 0.02], "adam_lr": [0.005, 0.01]}}

Flags of the plan go to every run; what else an arm lacks it has from it ("patch": "" for none).
`seeds` may be an object, {"7": "--flags of this seed"}; a grid makes of each arm one for each
combination of values. Runs are made in the order of the file. A finished run of the same plan,
source, arm and seed is not repeated. The runs train a copy of the source, so you may edit it
meanwhile; --source resumes an older copy. Logs are in OUT/PLAN/SOURCE/ARM.
Exit code: 0 done, 1 a run failed, 2 bad input, 130 or 143 interrupted.
"""

import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import ROOT, ask_trainer, command, make_parser, show, start, training_command

from claims.logs import finished_runs
from claims.pages import table
from claims.runs import NEW_TOKENS
from claims.stats import holm, in_words, paired_by_seed
from runtime.errors import Refused
from runtime.jsonl import json_hash, without_repeats
from runtime.settings import as_text, flag
from runtime.source import read_sources, source_hash, write_files
from scripts.side_by_side import Job, Sharing, cores, run_side_by_side, share

FIELDS = {"flags", "seeds", "grid", "patch"}  # of a plan and of an arm
HEAD = "| arm | seeds | diverged | loss | difference (95 % interval) | Holm p | new tokens |"
READING = """Loss: mean of the last ones, nats per token. Difference: to the first arm on the same
seeds (paired t; Holm over all arms). New tokens: mean loss on those that the context lacks."""
Losses = tuple[float, float]  # last validation loss, loss on new tokens; inf: the run diverged


class SweepRun(NamedTuple):
    arm: str
    seed: int
    flags: list[str]
    patch: str  # a unified diff of the source; "" for none
    folder: Path  # of its logs; runs share it if they differ in nothing but the seed
    source: Path  # the copy that it trains


def read_plan(path: Path, out: Path) -> list[SweepRun]:
    """All runs of a plan, in its order. ValueError for a plan that is not as --help says."""
    runs: list[SweepRun] = []
    try:
        plan = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_repeats)
        for name, arm in plan.pop("arms", {"": ""}).items():
            arm = {"flags": arm} if isinstance(arm, str) else arm
            if unknown := (plan.keys() | arm.keys()) - FIELDS:
                raise ValueError(f"unknown: {', '.join(unknown)}")
            arm = plan | arm | {"flags": f"{plan.get('flags', '')} {arm.get('flags', '')}"}
            if arm.get("patch"):
                arm["patch"] = (path.parent / arm["patch"]).read_text()
            runs += runs_of(name, arm, out)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error!r}: --help shows what a plan may have") from None
    if not runs:
        raise ValueError(f"{path}: it has no seeds, or no arms")
    return runs


def runs_of(name: str, arm: dict[str, Any], out: Path) -> Iterator[SweepRun]:
    """The runs of an arm at each point of its grid."""
    seeds, grid, patch = arm.get("seeds", ()), arm.get("grid", {}), arm.get("patch") or ""
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, map(as_text, values), strict=True))
        title = " ".join([name, *map("=".join, point.items())]).strip()
        own = [word for key, value in point.items() for word in (flag(key), value)]
        for seed in seeds:
            words = f"{arm['flags']} {seeds[seed] if isinstance(seeds, dict) else ''}"
            flags = [*shlex.split(words), *own]
            safe = re.sub(r"[^-+.=,0-9A-Za-z]+", "_", title)
            folder = out / f"{safe}_{json_hash([flags, patch]):.8}"
            source = (folder if patch else out) / "source"
            yield SweepRun(title, int(seed), flags, patch, folder, source)


def copy_source(root: Path, patch: str, folder: Path) -> None:
    """Write the source under `root`, patched, into the folder, once. Refused for a bad patch."""
    if folder.exists():
        return
    draft = folder.with_name("draft")
    shutil.rmtree(draft, ignore_errors=True)
    write_files(read_sources(root), draft)
    if patch:
        outside = {"GIT_CEILING_DIRECTORIES": str(draft.resolve().parent)}  # of any repository
        done = subprocess.run(["git", "apply", "-"], cwd=draft, env=os.environ | outside,
                              input=patch, text=True, capture_output=True)  # fmt: skip
        if done.returncode:
            raise Refused(f"the patch of {folder.parent.name} does not fit: {done.stderr.strip()}")
    draft.rename(folder)


def read_losses(planned: Sequence[SweepRun]) -> dict[str, dict[int, Losses]]:
    """By arm and seed, those of the oldest run that finished or diverged."""
    losses: dict[str, dict[int, Losses]] = {run.arm: {} for run in planned}
    finished = {folder: finished_runs(folder) for folder in {run.folder for run in planned}}
    for run in planned:
        for found in finished[run.folder]:
            if found.seed == run.seed:
                loss = found.validations[-1].loss if found.complete else math.inf
                losses[run.arm].setdefault(run.seed, (loss, found.probe(*NEW_TOKENS)))
    return losses


def make_missing(planned: Sequence[SweepRun], out: Path, at_once: int | None) -> int:
    """Make the runs without a result; None: as many at once as pay. Returns how many failed."""
    done = read_losses(planned)
    waiting = [run for run in planned if run.seed not in done[run.arm]]
    if not waiting:
        return 0
    arms = {run.folder: run for run in waiting}
    for run in arms.values():
        copy_source(out / "source", run.patch, run.source)
    with ThreadPoolExecutor(2) as pool:  # a wrong flag is refused before the first run
        configs = list(pool.map(lambda run: ask_trainer(run.source, run.flags), arms.values()))
    jobs = []
    for run in waiting:
        run.folder.mkdir(parents=True, exist_ok=True)
        words = training_command(run.source, [*run.flags, "--seed", str(run.seed)], run.folder)
        jobs.append(Job(words, run.folder / f"seed_{run.seed}.console", run))
    failed = 0

    def ended(job: Job, code: int) -> None:
        nonlocal failed
        run = job.about
        losses = read_losses([run])[run.arm].get(run.seed)
        failed += not losses
        outcome = f"loss {losses[0]:.4f}" if losses else f"failed, see {run.folder}"
        print(f"{run.arm}, seed {run.seed}: {outcome}", file=sys.stderr, flush=True)

    sharing = Sharing(at_once, max(1, cores() // at_once)) if at_once else share(configs)
    run_side_by_side(jobs, sharing, ended)
    return failed


def report(arms: dict[str, dict[int, Losses]]) -> str:
    """The table of the arms, the lowest loss first. The first arm is the one to compare with."""
    last = {arm: {seed: each[0] for seed, each in found.items()} for arm, found in arms.items()}
    base = next(iter(last.values()))
    effects = {arm: paired_by_seed(losses, base) for arm, losses in last.items()}
    adjusted = holm({arm: effects[arm].p_two_sided for arm in [*effects][1:] if arms[arm]})
    rows: list[list[Any]] = []
    for arm, found in arms.items():
        kept = [each for each in found.values() if each[0] < math.inf]
        mean, new = map(fmean, zip(*kept or [(math.inf, math.inf)], strict=True))
        difference = in_words(effects[arm], "+.4f") if math.isfinite(effects[arm].mean) else ""
        p = f"{adjusted[arm]:.2g}" if arm in adjusted and effects[arm].p_two_sided >= 0 else ""
        diverged = len(found) - len(kept)
        rows.append([arm, len(found), diverged, f"{mean:.4f}", difference, p, f"{new:.3f}"])
    rows.sort(key=lambda row: float(row[3]))
    return table(HEAD, rows)


@command
def main(argv: list[str]) -> int:
    parser, add = make_parser(__doc__)
    add("plan", type=Path, help="JSON file")
    add("--source", type=Path, default=ROOT, metavar="DIR", help="of train_gpt.py (here)")
    add("--jobs", type=int, help="runs at once, which share the cores (as many as pay)")
    add("--out", type=Path, default=Path("logs/sweep"), help="folder of all sweeps (%(default)s)")
    add("--report", action="store_true", help="print the table of the runs so far and stop")
    add("--json", action="store_true", help="print [loss, loss on new tokens] by arm and seed")
    given = parser.parse_args(argv)
    if given.jobs is not None and given.jobs < 1:
        raise ValueError(f"--jobs {given.jobs}: it must be at least 1")
    out = given.out / given.plan.stem / source_hash(given.source)[:12]
    planned, failed = read_plan(given.plan, out), 0
    if not given.report:
        copy_source(given.source, "", out / "source")
        failed = make_missing(planned, out, given.jobs)
    arms = read_losses(planned)
    show("\n\n".join([f"source {out.name}", report(arms), READING]), arms, given.json)
    return 1 if failed else 0


if __name__ == "__main__":
    start(main)
