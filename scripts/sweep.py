"""Train many arms on equal seeds, runs side by side, and compare each arm with the first.

    python scripts/sweep.py PLAN.json              the same command resumes
    python scripts/sweep.py PLAN.json --report     only the table of the runs so far

An arm is flags of train_gpt.py, a patch of its source, or both. PLAN is JSON:

    {"flags": "--track tiny --recipe muon",
     "seeds": [0, 1, 2, 3],
     "arms": {"baseline": "", "smear": "--smear on",
              "my idea": {"flags": "--steps 40", "patch": "idea.diff", "seeds": [0, 1]},
              "rates": {"grid": {"matrix_lr": [0.01, 0.02], "adam_lr": [0.005, 0.01]}}}}

Flags of the plan go to every run; seeds and patch that an arm lacks it has from the plan ("patch":
"" for none). `seeds` may be an object, {"7": "--flags of this seed"}. A grid makes of its arm one
for each combination of values. Runs are made in the order of the file. A finished run of the same
plan, source, arm and seed is not repeated. The runs train a copy of the source, so you may edit it
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

from scripts.command import (
    ROOT,
    ask_trainer,
    command,
    make_parser,
    resumable,
    say,
    show,
    start,
    training_command,
)

from claims.compare import compare, direction
from claims.logs import finished_runs
from claims.pages import table
from claims.record import why_no_claim
from claims.runs import NEW_TOKENS, Run
from claims.stats import holm, in_words
from runtime.errors import Refused
from runtime.jsonl import json_hash
from runtime.settings import as_text, flag
from runtime.source import read_sources, source_hash, write_files
from scripts.side_by_side import (
    Job,
    Sharing,
    cores,
    estimate,
    known_run,
    run_side_by_side,
    share,
)

FIELDS = {"flags", "seeds", "grid", "patch"}  # of a plan and of an arm
HEAD = ("| arm | seeds | diverged | loss | difference (95 % interval) | Holm p | new tokens "
        "| difference (95 % interval) |")  # fmt: skip
READING = """Loss: mean of the last ones, nats per token; new tokens: of those that end no pair seen
before in their document. Difference: to the first arm on the same seeds (paired t; Holm over all
arms)."""
Runs = dict[str, dict[int, Run]]  # by arm and seed


class SweepRun(NamedTuple):
    arm: str
    seed: int
    flags: list[str]
    patch: str  # a unified diff of the source; "" for none
    folder: Path  # of its logs; runs share it if they differ in nothing but the seed
    source: Path  # the copy that it trains


def read_plan(path: Path, out: Path, more: Sequence[str] = ()) -> list[SweepRun]:
    """All runs of a plan, in its order; more: flags of every run. ValueError for a plan that is not
    as --help says.
    """
    runs: list[SweepRun] = []
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        for name, arm in plan.pop("arms", {"": ""}).items():
            arm = {"flags": arm} if isinstance(arm, str) else arm
            if unknown := (plan.keys() | arm.keys()) - FIELDS:
                raise ValueError(f"unknown: {', '.join(unknown)}")
            if "grid" in plan and name:
                raise ValueError("a grid beside arms would multiply them all: give it to an arm")
            words = [plan.get("flags", ""), arm.get("flags", ""), *more]
            arm = plan | arm | {"flags": " ".join(words)}
            if arm.get("patch"):
                arm["patch"] = (path.parent / arm["patch"]).read_text()
            runs += runs_of(name, arm, out)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path}: {what}. --help shows what a plan may have.") from None
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


def read_runs(planned: Sequence[SweepRun]) -> Runs:
    """By arm and seed, the oldest run that finished or diverged."""
    runs: Runs = {run.arm: {} for run in planned}
    finished = {folder: finished_runs(folder) for folder in {run.folder for run in planned}}
    for run in planned:
        for found in finished[run.folder]:
            if found.seed == run.seed:
                runs[run.arm].setdefault(run.seed, found)
    return runs


def make_missing(planned: Sequence[SweepRun], out: Path, at_once: int | None) -> int:
    """Make the runs without a result; None: as many at once as pay. Returns how many failed."""
    done = read_runs(planned)
    waiting = [run for run in planned if run.seed not in done[run.arm]]
    if not waiting:
        return 0
    arms = {run.folder: run for run in waiting}
    for run in arms.values():
        copy_source(out / "source", run.patch, run.source)
    say(f"{len(waiting)} of {len(planned)} runs to make; asking the trainer for their settings")
    with ThreadPoolExecutor(2) as pool:  # a wrong flag is refused before the first run
        configs = list(pool.map(lambda run: ask_trainer(run.source, run.flags), arms.values()))
    jobs = []
    for run in waiting:
        run.folder.mkdir(parents=True, exist_ok=True)
        words = training_command(run.source, [*run.flags, "--seed", str(run.seed)], run.folder)
        jobs.append(Job(words, run.folder / f"seed_{run.seed}.console", run))
    sharing = Sharing(at_once, max(1, cores() // at_once)) if at_once else share(configs)
    announce(configs[0], len(waiting), sharing, out)
    failed = ended_runs = 0

    def ended(job: Job, code: int) -> None:
        nonlocal failed, ended_runs
        run = job.about
        found = read_runs([run])[run.arm].get(run.seed)
        failed += found is None
        ended_runs += 1
        outcome = f"failed, see {run.folder}"
        if found is not None:
            outcome = f"loss {found.validations[-1].loss:.4f}" if found.complete else "diverged"
        say(f"{ended_runs} of {len(waiting)}: {run.arm}, seed {run.seed}: {outcome}")
        rest = len(waiting) - ended_runs
        if rest and found is not None and ended_runs == failed + 1:  # the first that was timed
            say(f"  the rest: {estimate(found, found.total_steps or 1, rest, rest, sharing)}")

    run_side_by_side(jobs, sharing, ended)
    return failed


def announce(config: dict[str, Any], runs: int, sharing: Sharing, out: Path) -> None:
    """Say how many runs come, how long they take, and whether a claim may follow."""
    known, minutes = None, "minutes not known here: the first run will tell"
    if "track" in config:
        folders = [out.parent.parent, Path("logs/judge"), ROOT / "records" / config["track"]]
        known = known_run(config, sharing.threads, [each for each in folders if each.is_dir()])
        if reason := why_no_claim(config):
            say(f"no claim can follow: {reason}")
    if known is not None:
        minutes = estimate(known, config["steps"], runs, runs, sharing)
    say(f"{runs} runs, {sharing.at_once} at once; {minutes}")


def report(arms: Runs) -> str:
    """The table of the arms, the lowest loss first, and what is odd about them. The first arm is
    the one to compare with.
    """
    sound = {arm: {seed: run for seed, run in runs.items() if run.complete}
             for arm, runs in arms.items()}  # fmt: skip
    first, base = next(iter(sound.items()))
    found, notes = {}, []
    for arm, runs in sound.items():
        shared = sorted(runs.keys() & base.keys())
        if arm == first or not shared:
            continue
        one = found[arm] = compare([base[seed] for seed in shared], [runs[seed] for seed in shared])
        if one.loss.mean == 0 and all(runs[s].final_loss == base[s].final_loss for s in shared):
            notes.append(f"{arm}: equal to {first} to the last bit: what differs does not act")
        if direction(one.loss) == "lower" and one.measure and direction(one.new_tokens) != "lower":
            notes.append(f"{arm}: the gain may be copying only: on new tokens none is shown")
        if one.outlier:
            notes.append(f"{arm}: {one.outlier}")
    p_values = {arm: one.loss.p_two_sided for arm, one in found.items()}
    adjusted = holm(p_values | {arm: math.nan for arm in arms if arm not in found and arms[arm]
                                and arm != first})  # fmt: skip
    rows: list[list[Any]] = []
    for arm, runs in sound.items():
        losses = [run.validations[-1].loss for run in runs.values()]
        new = [run.probe(*NEW_TOKENS) for run in runs.values()]
        other = found.get(arm)
        rows.append([
            arm, len(arms[arm]), len(arms[arm]) - len(runs),
            f"{fmean(losses or [math.inf]):.4f}", in_words(other.loss, "+.4f") if other else "",
            f"{adjusted[arm]:.2g}" if other and other.loss.p_two_sided >= 0 else "",
            f"{fmean(new or [math.inf]):.3f}",
            in_words(other.new_tokens, "+.4f") if other and other.measure else "",
        ])  # fmt: skip
    rows.sort(key=lambda row: float(row[3]))
    return "\n".join([table(HEAD, rows), *notes])


@command
def main(argv: list[str]) -> int:
    parser, add = make_parser(__doc__)
    add("plan", type=Path, help="JSON file")
    add("--source", type=Path, default=ROOT, metavar="DIR", help="of train_gpt.py (here)")
    add("--jobs", type=int, help="runs at once, which share the cores (as many as pay)")
    add("--out", type=Path, default=Path("logs/sweep"), help="folder of all sweeps (%(default)s)")
    add("--quick", action="store_true", help="validate on few tokens; no claim can follow")
    add("--report", action="store_true", help="print the table of the runs so far and stop")
    add("--json", action="store_true", help="print [loss, loss on new tokens] by arm and seed")
    given = parser.parse_args(argv)
    if given.jobs is not None and given.jobs < 1:
        raise ValueError(f"--jobs {given.jobs}: it must be at least 1")
    out = given.out / given.plan.stem / source_hash(given.source)[:12]
    planned, failed = read_plan(given.plan, out, ["--quick"] * given.quick), 0
    if not given.report:
        copy_source(given.source, "", out / "source")
        with resumable():
            failed = make_missing(planned, out, given.jobs)
    arms = read_runs(planned)
    losses = {arm: {seed: [run.validations[-1].loss if run.complete else math.inf,
                           run.probe(*NEW_TOKENS)] for seed, run in runs.items()}
              for arm, runs in arms.items()}  # fmt: skip
    show("\n\n".join([f"source {out.name}", report(arms), READING]), losses, given.json)
    return 1 if failed else 0


if __name__ == "__main__":
    start(main)
