"""Train many arms on equal seeds, two runs side by side, and compare each arm with the first.

    python scripts/sweep.py PLAN.json              the same command resumes
    python scripts/sweep.py PLAN.json --report     only the table of the runs so far

An arm is flags of train_gpt.py, a patch of its source, or both. PLAN is JSON:

    {"flags": "--track tiny --recipe muon",
     "seeds": [0, 1, 2, 3],
     "arms": {"baseline": "", "smear": "--smear on",
              "my idea": {"flags": "--steps 40", "patch": "idea.diff", "seeds": [0, 1]}},
     "grid": {"matrix_lr": [0.01, 0.02], "adam_lr": [0.005, 0.01]}}

`flags` go to every run; `seeds` may be an object, {"7": "--flags of this seed"}; a grid makes of
each arm one for each combination of values. Runs are made in the order of the file, all seeds of an
arm before the next arm. A finished run of the same source, flags, patch and seed is not repeated.
The runs train a copy of the source, so you may edit it meanwhile; --source resumes an older copy.
Logs are in OUT/PLAN/SOURCE/ARM. Exit code: 0 done, 1 a run failed, 2 bad input, 130 or 143
interrupted.
"""

import contextlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import ROOT, ask_trainer, command, make_parser, show, start, training_command

from claims.logs import finished_runs
from claims.pages import table
from claims.record import write_files
from claims.rerun import child_process
from claims.stats import holm, in_words, paired_by_seed
from runtime.errors import Refused
from runtime.jsonl import json_hash
from runtime.log import read_sources, source_hash
from runtime.settings import flag

FIELDS = {"flags", "seeds", "arms", "grid"}
HEAD = "| arm | seeds | diverged | loss | difference (95 % interval) | Holm p | new tokens |"
READING = """\
Loss: mean of the last validation losses, nats per token. Difference: loss of the arm minus that of
the first arm on the same seeds, with its interval (paired t); Holm p is adjusted for all arms of
the table. New tokens: mean loss on tokens that the context does not repeat."""
Losses = tuple[float, float]  # last validation loss, loss on new tokens; inf: the run diverged


class SweepRun(NamedTuple):
    arm: str
    seed: int
    flags: list[str]
    patch: str  # a unified diff of the source; "" for none

    def folder(self, out: Path) -> Path:
        """Of its logs. Runs share it if they differ in nothing but the seed."""
        name = re.sub(r"[^-+.=,0-9A-Za-z]+", "_", self.arm)
        return out / f"{name}_{json_hash([self.flags, self.patch]):.8}"

    def source(self, out: Path) -> Path:
        return self.folder(out) / "source" if self.patch else out / "source"


# ---- The plan


def read_plan(path: Path) -> list[SweepRun]:
    """All runs of a plan, in its order. ValueError for a plan that is not as --help says."""
    try:
        return expand(json.loads(path.read_text(encoding="utf-8")), path.parent)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error!r}: --help shows what a plan may have") from None


def expand(plan: dict[str, Any], folder: Path) -> list[SweepRun]:
    planned = []
    for name, arm in plan.get("arms", {"": ""}).items():
        arm = {"flags": arm} if isinstance(arm, str) else arm
        if unknown := (plan.keys() - FIELDS) | (arm.keys() - FIELDS - {"patch"}):
            raise ValueError(f"unknown: {', '.join(unknown)}")
        patch = (folder / arm["patch"]).read_text() if "patch" in arm else ""
        seeds = arm.get("seeds", plan.get("seeds")) or ()
        seeds = seeds if isinstance(seeds, dict) else dict.fromkeys(seeds, "")
        grid = plan.get("grid", {}) | arm.get("grid", {})
        for values in itertools.product(*grid.values()):
            point = list(zip(grid, map(str, values), strict=True))
            title = " ".join([name, *map("=".join, point)]).strip()
            own = [word for key, value in point for word in (flag(key), value)]
            for seed, more in seeds.items():
                words = f"{plan.get('flags', '')} {arm.get('flags', '')} {more}"
                planned.append(SweepRun(title, int(seed), [*shlex.split(words), *own], patch))
    if not planned:
        raise ValueError("it has no seeds, or no arms")
    return planned


# ---- Runs


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


def read_losses(folder: Path) -> dict[int, Losses]:
    """By seed, the losses of the oldest run in the folder that finished or diverged."""
    found: dict[int, Losses] = {}
    for run in finished_runs(folder):
        loss = run.validations[-1].loss if run.complete else math.inf
        found.setdefault(run.seed or 0, (loss, run.probe("new_loss")))
    return found


def make_missing(planned: Sequence[SweepRun], out: Path, jobs: int) -> int:
    """Make the runs without a result, `jobs` at a time. Returns how many failed."""
    missing = [run for run in planned if run.seed not in read_losses(run.folder(out))]
    for run in {run.folder(out): run for run in missing}.values():
        copy_source(out / "source", run.patch, run.source(out))
        ask_trainer(run.source(out), run.flags)  # refuses a wrong flag before the first run
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    running: dict[subprocess.Popen, SweepRun] = {}
    failed = 0
    with contextlib.ExitStack() as children:
        for run in missing:
            if len(running) == jobs:
                failed += not wait_for_one(running, out)
            folder, flags = run.folder(out), [*run.flags, "--seed", str(run.seed)]
            folder.mkdir(parents=True, exist_ok=True)
            words = training_command(run.source(out), flags, folder)
            with (folder / f"seed_{run.seed}.console").open("w") as console:
                child = child_process(words, stdout=console, stderr=console, env=environment)
                running[children.enter_context(child)] = run
        while running:
            failed += not wait_for_one(running, out)
    return failed


def wait_for_one(running: dict[subprocess.Popen, SweepRun], out: Path) -> bool:
    """Wait until one of them ends, and take it out. Whether it left a result."""
    while not (ended := [child for child in running if child.poll() is not None]):
        time.sleep(0.05)
    run = running.pop(ended[0])
    losses = read_losses(run.folder(out)).get(run.seed)
    outcome = f"loss {losses[0]:.4f}" if losses else f"failed, see {run.folder(out)}"
    print(f"{run.arm}, seed {run.seed}: {outcome}", file=sys.stderr, flush=True)
    return losses is not None


# ---- The table


def report(arms: dict[str, dict[int, Losses]]) -> str:
    """The table of the arms, the lowest loss first. The first arm is the one to compare with."""
    last = {arm: converged(found, 0) for arm, found in arms.items()}
    base = next(iter(last.values()))
    effects = {arm: paired_by_seed(losses, base) for arm, losses in last.items()}
    adjusted = holm({arm: effect.p_two_sided for arm, effect in effects.items()})
    means = {arm: fmean(losses.values() or [math.inf]) for arm, losses in last.items()}
    rows = []
    for arm in sorted(arms, key=lambda arm: means[arm]):
        new = fmean(converged(arms[arm], 1).values() or [math.inf])
        difference = in_words(effects[arm], "+.4f") if arms[arm] else ""
        p = f"{adjusted[arm]:.2g}" if arm in adjusted else ""
        rows.append([arm, len(arms[arm]), len(arms[arm]) - len(last[arm]), f"{means[arm]:.4f}",
                     difference, p, f"{new:.3f}"])  # fmt: skip
    return table(HEAD, rows)


def converged(found: dict[int, Losses], column: int) -> dict[int, float]:
    """Losses by seed, without runs that diverged."""
    return {seed: each[column] for seed, each in found.items() if each[0] < math.inf}


@command
def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("plan", type=Path, help="JSON file")
    add("--source", type=Path, default=ROOT, metavar="DIR", help="of train_gpt.py (here)")
    add("--jobs", type=int, default=2, help="runs at a time, which share the cores (%(default)s)")
    add("--out", type=Path, default=Path("logs/sweep"), help="folder of all sweeps (%(default)s)")
    add("--report", action="store_true", help="print the table of the runs so far and stop")
    add("--json", action="store_true", help="print [loss, loss on new tokens] by arm and seed")
    given = parser.parse_args(argv)
    planned = read_plan(given.plan)
    out = given.out / given.plan.stem / source_hash(given.source)[:12]
    failed = 0
    if not given.report:
        copy_source(given.source, "", out / "source")
        failed = make_missing(planned, out, given.jobs)
    arms: dict[str, dict[int, Losses]] = {run.arm: {} for run in planned}
    for run in planned:
        if losses := read_losses(run.folder(out)).get(run.seed):
            arms[run.arm][run.seed] = losses
    show("\n\n".join([f"source {out.name}", report(arms), READING]), arms, given.json)
    return 1 if failed else 0


if __name__ == "__main__":
    start(main)
