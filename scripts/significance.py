"""Do these runs reach the target? A one-sided t-test at p < 0.01, from the run logs alone.

    python scripts/significance.py logs                               every arm in a folder
    python scripts/significance.py logs:steps=32                      one of them
    python scripts/significance.py logs machine_2/logs --json         two folders, for programs
    python scripts/significance.py logs --at-step 3225,3250           the loss at these steps
    python scripts/significance.py old new --track steps              fewest steps, by its rules
    python scripts/significance.py --losses 3.277,3.279 --target 3.28     typed: unverified

An arm is one source, one configuration, one declared number of steps and one GPU count. Arms in one
folder are named by what differs, and the name after a colon selects one. A folder is read without
its subfolders, but of a record its runs/. --track steps judges as track 3 of the
public contest does: at the first step at which all runs together pass, or at --at-step, with a
pairwise verdict on each arm and those before it. --skeptical writes the page of a result that
challenges another one. Exit code: 0 every arm passes, 1 an arm fails, 2 bad input.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import command, decimals, make_parser, show, start, whole_numbers

from claims.arms import ALPHA, Arm, apply_holm, judge_all, judge_typed, read_selected
from claims.fewest import judge_fewest, passes, skeptical
from claims.runs import Run
from runtime.claim import LEAST_RUNS
from runtime.errors import LogError


def read(paths: Sequence[str]) -> tuple[list[Run], list[str]]:
    """All runs, and why other files of the folders were not read."""
    runs, errors = read_selected(paths)
    if not runs:
        raise LogError("\n".join(["no run log can be read", *map(str, errors)]))
    return runs, [f"not read: {error}" for error in errors]


def judge(given: argparse.Namespace) -> tuple[list[Arm], list[str]]:
    """The arms, and what could not be read. Raises LogError."""
    if given.losses:
        return [judge_typed(given.losses, given.target)], []
    runs, unread = read(given.paths)
    if given.track:
        return judge_fewest(runs, given.target, given.at_step[0] if given.at_step else None), unread
    arms = judge_all(runs, given.target, given.at_step)
    apply_holm(arms)
    return arms, unread


# ---- Output


def title(arm: Arm) -> str:
    if arm.path is None:
        return "typed losses, UNVERIFIED"
    key = arm.key
    facts = f"source {key.source or 'unknown':.12}, steps {key.total_steps}, GPUs {key.gpu_count}"
    return f"{arm.selector}: {facts}" + (f", at step {arm.at_step}" if arm.at_step else "")


def to_text(arm: Arm) -> str:
    n, mean, sd, t, p, upper99 = arm.result
    figures = f"n {n}" + (f"   mean {mean:.6f}" if n else "")
    if n > 1:  # one run has no spread
        figures += f"   sd {sd:.6f}"
    if not math.isnan(p):
        figures += f"   t {t:.4f}   p {p:.3g}   99 % upper bound {upper99:.5f}"
    word = "PASS" if arm.passes else "FAIL"
    shown = "shown" if arm.passes else "not shown"
    lines = [title(arm), figures]
    below = f" below {arm.target:g}" if n else ""  # without a run nobody names the target
    lines.append(f"{word}: a mean loss{below} at p < {ALPHA:g} is {shown}")
    lines += [f"warning: {warning}" for warning in arm.warnings]
    for run in arm.incomplete:
        lines.append(f"left out: {run['path']}: {run['reason']} (loss {run['last_loss']})")
    lines += arm.notes
    for name, point in zip(arm.run_names, arm.points, strict=True):
        ms = point.train_time_ms
        time = "time unknown" if ms is None else f"{ms / 1000:10.3f} s"
        lines.append(f"  {point.loss:.6f}  {time}  {Path(name).name}")
    return "\n  ".join(lines)


@command
def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH",
        help="run logs, or folders of run logs; PATH:setting=value,... takes some of their runs")
    add("--target", type=float, help="loss to beat, nats per token (default: the track's)")
    add("--losses", type=decimals, help="losses typed by hand; needs --target")
    add("--at-step", type=whole_numbers, default=[], help="judge the losses at these steps")
    add("--few", action="store_true", help=f"let fewer than {LEAST_RUNS} runs pass")
    add("--track", choices=["steps"], help="judge by the rules of this track")
    add("--skeptical", type=Path, metavar="MD", help="with --track steps and --at-step N")
    add("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    if bool(given.paths) == bool(given.losses):
        parser.error("name run logs, or type losses with --losses: one of the two")
    if given.losses and given.target is None:
        parser.error("--losses needs --target: typed losses name none")
    if given.target is not None and not math.isfinite(given.target):
        parser.error(f"--target {given.target}: it must be a finite number")
    if given.losses and min(given.losses) <= 0:
        parser.error(f"--losses {min(given.losses)}: a loss is above 0")
    if given.losses and given.at_step:
        parser.error("--at-step needs run logs: typed losses have no steps")
    if given.track and (given.losses or given.few or len(given.at_step) > 1):
        parser.error("--track steps needs run logs, at most one --at-step, and no --few")
    if given.skeptical and not (given.track and given.at_step):
        parser.error("--skeptical needs --track steps and the step that is challenged, --at-step")
    arms, unread = judge(given)
    for arm in arms if given.few else []:
        arm.passes = arm.result.p < ALPHA
    if given.skeptical:
        if len(arms) != 1 or not arms[0].losses:
            raise LogError(f"--skeptical takes one arm with losses at its step, not {len(arms)}")
        given.skeptical.write_text(skeptical(arms[0]), encoding="utf-8")
    facts = {"arms": [arm.documented for arm in arms], "warnings": unread}
    show("\n\n".join([*map(to_text, arms), *unread]), facts, given.json)
    return 0 if all(passes(arm) if given.track else arm.passes for arm in arms) else 1


if __name__ == "__main__":
    start(main)
