"""Do these runs reach the target, at p < 0.01? Are they better than others? From run logs alone.

    python scripts/significance.py logs                               every arm in a folder
    python scripts/significance.py logs machine_2/logs --json         two folders, for programs
    python scripts/significance.py logs --at-step 3225,3250           the loss at these steps
    python scripts/significance.py NEW --against OLD                  two arms: losses and time

An arm is one source, one configuration, one declared number of steps and one GPU count. Arms in one
folder are named by what differs. Each folder of run logs below a named one is judged by itself. An
arm of fewer than four runs has no verdict. Logs of the track `steps` are also judged by its rule:
(target - mean) * sqrt(n) reaches 0.004.

--against prints differences with 95 % intervals, of pairs where both arms have the same seeds;
times are compared only on like machines. To make such runs in turn, use judge.py.

Exit code: 0 every arm with a verdict passes, and each folder has one, or two arms are compared;
1 an arm fails, or a folder allows no verdict; 2 bad input, a log that cannot be read among it.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import command, make_parser, show, start

from claims import arms
from claims.compare import as_facts, compare, in_sentences
from claims.logs import find_folders, read_all
from claims.record import TRACKS
from claims.runs import NEW_SINCE, NEW_TOKENS, shared_measure
from runtime.claim import LEAST_RUNS
from runtime.errors import LogError
from runtime.settings import reader


def to_text(arm: arms.ArmVerdict) -> str:
    run, step = arm.first, f", at step {arm.at_step}" if arm.at_step is not None else ""
    steps = "not declared" if run.total_steps is None else run.total_steps
    gpus = "unknown" if run.gpu_count is None else run.gpu_count
    facts = f"source {run.source or 'unknown':.12}, steps {steps}, GPUs {gpus}"
    n, mean, sd, t, p, upper99 = arm.result
    figures = f"n {n}" + (f"   mean {mean:.6f}" if n else "")
    if n > 1:  # one run has no spread
        figures += f"   sd {sd:.6f}"
    if not math.isnan(p):
        figures += f"   t {t:.4f}   p {p:.3g}   99 % upper bound {upper99:.5f}"
    lines = [f"{arm.name}: {facts}{step}", figures]
    if arm.decided:
        word, shown = ("PASS", "shown") if arm.passes else ("FAIL", "not shown")
        lines.append(f"{word}: a mean loss below {arm.target:g} at p < {arms.ALPHA:g} is {shown}")
    else:
        found = "1 run counts" if n == 1 else f"{n} runs count" if n else "no run counts"
        lines.append(f"NO VERDICT: {found}, and a test needs {LEAST_RUNS}")
    if arm.at_step is None and (run.track in TRACKS and TRACKS[run.track].baseline):
        lines += new_tokens(arm)
    lines += [f"warning: {warning}" for warning in arm.warnings]
    for lost in arm.incomplete:
        lines.append(f"left out: {lost['path']}: {lost['reason']} (loss {lost['last_loss']})")
    lines += arm.notes
    for run, point in zip(arm.runs, arm.points, strict=True):
        ms = point.train_time_ms
        time = "time unknown" if ms is None else f"{ms / 1000:10.3f} s"
        lines.append(f"  {point.loss:.6f}  {time}  {Path(arms.name_of(run)).name}")
    return "\n  ".join(lines)


def new_tokens(arm: arms.ArmVerdict) -> Iterator[str]:
    """The loss at the end on new tokens, for which the track has a condition of its own."""
    if measure := shared_measure(arm.runs):
        mean = fmean(run.probe(measure) for run in arm.runs)
        older = "" if measure == NEW_TOKENS[0] else f", as measured before {NEW_SINCE}"
        yield f"loss on new tokens {mean:.6f}{older}; record.py verify decides on it"


def split_families(paths: list[str]) -> tuple[list[list[Path]], list[str]]:
    """The paths by what is judged together, and a sentence on each folder that is not judged.

    Named logs and named folders of logs are one family. Each folder of run logs below a named one
    is a family of its own.
    """
    named: list[Path] = []
    below: list[list[Path]] = []
    skipped: list[str] = []
    for path in map(Path, paths):
        found, others = find_folders(path) if path.is_dir() else ([path], [])
        if path in found:
            named.append(path)
        below += [[folder] for folder in found or [path] if folder != path or not found]
        skipped += others if found else []
    return [named, *below] if named else below, skipped


@command
def main(argv: list[str]) -> int:
    parser, add = make_parser(__doc__)
    steps = reader(lambda text: [int(step) for step in text.split(",")], "whole numbers: 5,10")
    add("paths", nargs="+", metavar="PATH", help="run logs, or folders of run logs")
    add("--target", type=float, help="loss to beat, nats per token (default: the track's)")
    add("--at-step", type=steps, default=[], help="judge the losses at these steps")
    add("--against", metavar="OLD", help="compare PATH, B, with this arm, A")
    add("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    if not math.isfinite(given.target or 0):
        parser.error(f"--target {given.target}: it must be a finite number")
    if given.against and (len(given.paths) > 1 or given.target or given.at_step):
        parser.error("--against takes one NEW, without --target and --at-step")
    if given.against:
        a, b = arms.read_arm(given.against), arms.read_arm(given.paths[0])
        show(in_sentences(a, b), as_facts(compare(a.runs, b.runs)), given.json)
        return 0
    families, skipped = split_families(given.paths)
    verdicts: list[arms.ArmVerdict] = []
    unread: list[LogError] = []
    passes = True
    for family in families:
        try:
            runs, errors = read_all(family)
            unread += errors
            found = arms.judge_all(runs, given.target, given.at_step)
        except LogError as error:
            unread.append(error)
            continue
        verdicts += found
        decided = [arm for arm in found if arm.decided]
        passes = passes and bool(decided) and all(arm.passes for arm in decided)
    if not verdicts:
        raise LogError("\n".join(["no verdict is possible", *map(str, unread)]))
    said = [f"not read: {error}" for error in unread] + [f"not judged: {each}" for each in skipped]
    facts = {"arms": [arm.documented for arm in verdicts], "warnings": said}
    show("\n\n".join([*map(to_text, verdicts), *said]), facts, given.json)
    if unread:  # what a damaged log held could change the verdict
        return 2
    return 0 if passes else 1


if __name__ == "__main__":
    start(main)
