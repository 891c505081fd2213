"""Which of two arms is faster, by how much, and why: from run logs, or from runs made here in turn.

    python scripts/compare.py OLD NEW                        logs: files or folders, A and B
    python scripts/compare.py logs@3f2a logs@9c01            arms of one folder, by their hashes
    python scripts/compare.py --run "CMD_A" "CMD_B" --rounds 6            A B, B A, ... made here

A hash begins that of a source or a configuration. --run puts a log folder in the place of {log_dir}
in a command, or appends --log-dir and the folder. The same command twice shows the noise. Compare
times only between runs on the same machine. Differences are B - A.

Exit code: 0 B is faster (its whole interval lies below 0), 1 that is not shown, 2 bad input or A
and B differ in machine or software, 130 or 143 interrupted.
"""

import argparse
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, stdev
from time import monotonic

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from claims.comparison import Comparison, Side, compare_sides, read_side
from claims.runlog import LogError, read_all
from claims.stats import Difference
from claims.steptimes import Explanation
from runtime.errors import Interrupted
from scripts.command import listen, make_parser, print_json, set_up_output

TAIL_LINES = 15  # of the output of a failing command


def run_in_turn(commands: Sequence[str], rounds: int, out: Path) -> list[Side]:
    """Run each command once a round, A B then B A."""
    sides = {"A": Side(commands[0]), "B": Side(commands[1])}
    for number in range(rounds):
        for name in "AB" if number % 2 == 0 else "BA":
            run_once(sides[name], out / name / str(number))
            where = f"round {number + 1} of {rounds}, {name}"
            print(f"{where}: {sides[name].seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    logged = len(sides["A"].logs) + len(sides["B"].logs)
    if logged not in (0, 2 * rounds):
        raise LogError(f"{logged} of {2 * rounds} runs left a log: all must, or none")
    return list(sides.values())


def run_once(side: Side, folder: Path) -> None:
    """Add the training time in the log that the command leaves in the folder, or its wall time."""
    folder.mkdir(parents=True)
    command = side.path if "{log_dir}" in side.path else side.path + " --log-dir {log_dir}"
    command = command.replace("{log_dir}", shlex.quote(str(folder.resolve())))
    console = folder.with_suffix(".console")
    begun = monotonic()
    with console.open("wb") as out:
        child = subprocess.Popen(command, shell=True, stdout=out, stderr=out, process_group=0)
        try:
            code = child.wait()
        except Interrupted:
            os.killpg(child.pid, signal.SIGTERM)  # the command, not only its shell
            child.wait()
            raise
    seconds = monotonic() - begun
    if code:
        tail = console.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        raise LogError("\n  ".join([f"exit code {code}: {command}", *tail, f"see {console}"]))
    if not any(folder.iterdir()):
        side.seconds.append(seconds)
        return
    runs, _ = read_all([folder])
    if len(runs) != 1:
        raise LogError(f"{folder} has {len(runs)} runs where one is needed")
    side.add(runs[0])


# ---- Output


def interval(found: Difference, form: str = "+.3f") -> str:
    return "no interval" if math.isnan(found.low) else f"{found.low:{form}} to {found.high:{form}}"


def explain(why: Explanation) -> list[str]:
    """What the difference is made of, and the stages of the schedule side by side."""
    lines = [
        f"  {why.steps:+.3f} s from more or fewer steps",
        f"  {why.step_time.mean:+.3f} s from the time of a step ({interval(why.step_time)})",
        f"  {why.stutters.mean:+.3f} s from stutters ({interval(why.stutters)})",
    ]
    for stage, sides in why.stages.items():
        said = [f"{one.steps} x {one.ms:.2f} ms (window {one.window})" for one in sides]
        lines.append(f"  stage {stage}: A {said[0]}, B {said[1]}")
    for name, steps in zip("AB", why.stutters_at, strict=True):
        lines.append(f"  stutters of {name} at steps {steps[:8] or 'none'}")
    return lines


def to_text(sides: Sequence[Side], found: Comparison, level: float) -> str:
    lines = []
    for name, side in zip("AB", sides, strict=True):
        times = side.seconds
        measure = "training time" if side.logs else "wall time of the command"
        spread = stdev(times) if len(times) > 1 else math.nan
        lines.append(f"{name} = {side.path} ({measure})")
        lines.append(f"  n {len(times)}   mean {fmean(times):.3f} s   sd {spread:.3f}   "
                     f"median {median(times):.3f}   min {min(times):.3f}")  # fmt: skip
        lines += [f"  left out: {reason}" for reason in side.left_out]
    word = "not shown to be faster or slower than A"
    if found.seconds.low > 0 or found.seconds.high < 0:
        word = "slower than A" if found.seconds.mean > 0 else "faster than A"
    ends = f"({100 * level:g} % interval {interval(found.seconds)} s)"
    lines.append(f"B is {word}: {found.seconds.mean:+.3f} s {ends}")
    if found.explanation:
        lines += explain(found.explanation)
    if found.loss:
        lines.append(f"loss: {found.loss.mean:+.5f} ({interval(found.loss, '+.5f')})")
    known = ", ".join(f"{key} {value:.40}" for key, value in found.consistent.items())
    lines.append(f"machine: alike in {known or 'nothing that the logs tell'}")
    lines += [f"DIFFERS in {what}" for what in found.differs]
    lines.append("this interval holds for one machine: time both arms on a second one too")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("paths", nargs="*", metavar="A B", help="logs or folders of the old arm and the new one")
    add("--run", nargs=2, metavar=("CMD_A", "CMD_B"), help="commands to run in turn")
    add("--rounds", type=int, default=5, help="runs of each command (%(default)s)")
    add("--out", type=Path, help="new folder for what --run makes (logs/compare_TIME)")
    add("--level", type=float, default=0.95, help="of the intervals (%(default)s)")
    add("--allow-mismatch", action="store_true", help="compare across machines, and say so")
    add("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    if len(given.paths) != (0 if given.run else 2):
        parser.error("name two arms, A and B, or --run two commands")
    try:
        sides, found = compare(given)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signalled:
        return signalled.code
    if given.json:
        print_json({"a": sides[0].seconds, "b": sides[1].seconds, **vars(found)})
    else:
        print(to_text(sides, found, given.level))
    return 0 if found.seconds.high < 0 else 1


def compare(given: argparse.Namespace) -> tuple[list[Side], Comparison]:
    if given.run:
        out = given.out or Path(f"logs/compare_{datetime.now(UTC):%Y%m%d-%H%M%S}")
        sides = run_in_turn(given.run, given.rounds, out)
    else:
        sides = [read_side(path) for path in given.paths]
    found = compare_sides(sides[0], sides[1], given.level, in_turn=bool(given.run))
    if found.differs and not given.allow_mismatch:
        rule = "A and B differ in machine or software: time both on one, or --allow-mismatch"
        raise LogError("\n  ".join([rule, *found.differs]))
    return sides, found


if __name__ == "__main__":
    listen()
    set_up_output()
    sys.exit(main())
