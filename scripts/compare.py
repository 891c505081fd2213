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

from claims.comparison import Comparison, Side, Timed, compare_sides, read_side, time_run
from claims.runlog import LogError, read_all
from claims.stats import Difference
from claims.steptimes import Explanation
from runtime.errors import Interrupted
from scripts.command import listen, make_parser, print_json, set_up_output

TAIL_LINES = 15  # of the output of a failing command


def run_in_turn(commands: Sequence[str], rounds: int, out: Path) -> list[Side]:
    """Run each command once a round, A B then B A: a drift of the machine falls on both alike."""
    sides = [Side("A", commands[0], []), Side("B", commands[1], [])]
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            run = run_once(side.path, out / side.name / str(number))
            side.runs.append(run)
            where = f"round {number + 1} of {rounds}, {side.name}"
            print(f"{where}: {run.seconds:.1f} s", file=sys.stderr, flush=True)
    logged = len(sides[0].logs) + len(sides[1].logs)
    if logged not in (0, 2 * rounds):
        raise LogError(f"{logged} of {2 * rounds} runs left a log: all must, or none")
    return sides


def run_once(command: str, folder: Path) -> Timed:
    """The training time in the log that the command leaves in the folder, or else its wall time."""
    folder.mkdir(parents=True)
    if "{log_dir}" not in command:
        command += " --log-dir {log_dir}"
    command = command.replace("{log_dir}", shlex.quote(str(folder.resolve())))
    console = folder.with_suffix(".console")
    started, begun = datetime.now(UTC).isoformat(), monotonic()
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
        return Timed(seconds, started)
    runs, _ = read_all([folder])
    if len(runs) != 1:
        raise LogError(f"{folder} has {len(runs)} runs where one is needed")
    return time_run(runs[0], started)


# ---- Output


def interval(found: Difference, form: str = "+.3f") -> str:
    return "no interval" if math.isnan(found.low) else f"{found.low:{form}} to {found.high:{form}}"


def headline(found: Difference, level: float) -> str:
    """Such as: B is 1.044 s faster than A (95 % interval -1.170 to -0.910 s)."""
    ends = f"({100 * level:g} % interval {interval(found)} s)"
    if not (found.low > 0 or found.high < 0):
        return f"B is not shown to be faster or slower than A: {found.mean:+.3f} s {ends}"
    return f"B is {abs(found.mean):.3f} s {'faster' if found.mean < 0 else 'slower'} than A {ends}"


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


def to_text(a: Side, b: Side, found: Comparison, level: float) -> str:
    lines = []
    for side in (a, b):
        times = side.seconds
        measure = "training time" if side.logs else "wall time of the command"
        spread = stdev(times) if len(times) > 1 else math.nan
        lines.append(f"{side.name} = {side.path} ({measure})")
        lines.append(f"  n {len(times)}   mean {fmean(times):.3f} s   sd {spread:.3f}   "
                     f"median {median(times):.3f}   min {min(times):.3f}")  # fmt: skip
        lines += [f"  left out: {reason}" for reason in side.left_out]
    lines.append(headline(found.seconds, level))
    if found.explanation:
        lines += explain(found.explanation)
    if found.loss:
        lines.append(f"loss: {found.loss.mean:+.5f} ({interval(found.loss, '+.5f')})")
    known = ", ".join(f"{key} {value:.40}" for key, value in found.consistent.items())
    lines.append(f"machine: alike in {known or 'nothing that the logs tell'}")
    lines += [f"DIFFERS in {what}" for what in found.differs]
    if not found.paired:
        lines.append("not made in turn: a drift of the machine looks like a difference")
    lines.append("this interval holds for one machine: time both arms on a second one too")
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
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
    return given


def main(argv: Sequence[str] | None = None) -> int:
    given = parse_arguments(argv)
    try:
        if given.run:
            out = given.out or Path(f"logs/compare_{datetime.now(UTC):%Y%m%d-%H%M%S}")
            a, b = run_in_turn(given.run, given.rounds, out)
        else:
            a, b = read_side("A", given.paths[0]), read_side("B", given.paths[1])
        found = compare_sides(a, b, given.level)
        if found.differs and not given.allow_mismatch:
            rule = "A and B differ in machine or software: time both on one, or --allow-mismatch"
            raise LogError("\n  ".join([rule, *found.differs]))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signalled:
        return signalled.code
    if given.json:
        print_json({"a": a.seconds, "b": b.seconds, **vars(found)})
    else:
        print(to_text(a, b, found, given.level))
    return 0 if found.seconds.high < 0 else 1


if __name__ == "__main__":
    listen()
    set_up_output()
    sys.exit(main())
