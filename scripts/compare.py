"""Which of two arms is faster, by how much, and why: from run logs, or from runs made here in turn.

    python scripts/compare.py OLD NEW                          logs: files or folders, A and B
    python scripts/compare.py logs@3f2a logs@9c01              arms of one folder, by their hashes
    python scripts/compare.py --times 142.9,143.0 --times 139.6,139.7      typed seconds: unverified
    python scripts/compare.py --run "CMD_A" "CMD_B" --rounds 6             A B, B A, ... made here

A hash begins that of a source or a configuration. --run puts a log folder in the place of {log_dir}
in a command, or appends --log-dir and the folder; {round} counts from 0. The same command twice
shows the noise. Compare times only between runs on the same machine. Differences are B - A.

Exit code: 0 B is faster (its whole interval lies below 0), 1 that is not shown, 2 bad input or A
and B differ in machine or software, 130 or 143 interrupted.
"""

import argparse
import math
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from claims.comparison import Comparison, Side, Timed, as_json, compare_sides, read_side, time_run
from claims.runlog import LogError, read_all
from claims.stats import Difference
from scripts.command import make_parser, numbers, print_json, set_up_output

TAIL_LINES = 15  # of the output of a failing command


def run_in_turn(commands: Sequence[str], rounds: int, out: Path) -> list[Side]:
    """Run each command once a round, A B then B A: a drift of the machine falls on both alike."""
    sides = [Side("A", commands[0], []), Side("B", commands[1], [])]
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            run = run_once(side, number, out)
            side.runs.append(run)
            where = f"round {number + 1} of {rounds}, {side.name}"
            print(f"{where}: {run.seconds:.1f} s", file=sys.stderr, flush=True)
    logged = [len(side.logs) for side in sides]
    if sum(logged) not in (0, 2 * rounds):
        raise LogError(f"{logged} of {rounds} runs left a log: all must, or none")
    for side in sides:
        side.measure = "training time" if side.logs else "wall time of the command, without a log"
    return sides


def run_once(side: Side, number: int, out: Path) -> Timed:
    """The time in the log that the command leaves in its folder, or else its wall time."""
    folder = (out / side.name / str(number)).resolve()
    folder.mkdir(parents=True)
    command = side.path if "{log_dir}" in side.path else f"{side.path} --log-dir {{log_dir}}"
    command = command.replace("{log_dir}", shlex.quote(str(folder)))
    command = command.replace("{round}", str(number))
    console = folder.with_suffix(".console")
    started, begun = datetime.now(UTC).isoformat(), monotonic()
    with console.open("wb") as output:
        code = subprocess.run(command, shell=True, stdout=output, stderr=output).returncode
    wall = monotonic() - begun
    if code:
        tail = console.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        problem = f"round {number + 1}: {side.name} ended with exit code {code}: {command}"
        raise LogError("\n  ".join([problem, *tail, f"its output: {console}"]))
    if not any(folder.iterdir()):
        return Timed(wall, started)
    runs, errors = read_all([folder])
    if len(runs) != 1 or errors:
        raise LogError(f"{folder} has {len(runs)} run logs where one is needed")
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


def explanation_lines(found: Comparison) -> list[str]:
    why = found.explanation
    if why is None or found.accounts is None:
        return []
    a, b = found.accounts
    lines = [
        f"  {why.steps:+.3f} s from {b[0].steps - a[0].steps:+d} steps",
        f"  {why.step_time.mean:+.3f} s from the time of a step ({interval(why.step_time)})",
        f"  {why.stutters.mean:+.3f} s from stutters ({interval(why.stutters)})",
    ]
    for stage in sorted(a[0].stages.keys() & b[0].stages.keys()):
        sides = []
        for accounts in (a, b):
            first = accounts[0].stages[stage]
            ms = statistics.fmean(one.stages[stage].ms for one in accounts)
            sides.append(f"{first.steps} steps of {ms:.2f} ms, window {first.window}")
        lines.append(f"  stage {stage}: A {sides[0]}; B {sides[1]}")
    for name, accounts in zip("AB", found.accounts, strict=True):
        steps = sorted({step for one in accounts for step in one.stutters})
        if steps:
            lines.append(f"  stutters of {name}: at steps {', '.join(map(str, steps[:8]))}")
    return lines


def to_text(found: Comparison) -> str:
    lines = []
    for side in (found.a, found.b):
        times = side.seconds
        spread = f"   sd {statistics.stdev(times):.3f}" if len(times) > 1 else ""
        lines.append(f"{side.name} = {side.path} ({side.measure})")
        lines.append(
            f"  n {len(times)}   mean {statistics.fmean(times):.3f} s   "
            f"median {statistics.median(times):.3f}   min {min(times):.3f}{spread}"
        )
        lines += [f"  left out: {reason}" for reason in side.left_out]
    lines.append(headline(found.seconds, found.level))
    lines += explanation_lines(found)
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
    seconds = numbers(float, 1e-12, 1e12)
    add("--times", type=seconds, action="append", default=[], help="typed: once for A, once for B")
    add("--run", nargs=2, metavar=("CMD_A", "CMD_B"), help="commands to run in turn")
    add("--rounds", type=int, default=5, help="runs of each command (%(default)s)")
    add("--out", type=Path, help="new folder for what --run makes (default: logs/compare_TIME)")
    add("--level", type=float, default=0.95, help="of the intervals (%(default)s)")
    add("--allow-mismatch", action="store_true", help="compare across machines, and say so")
    add("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    if bool(given.paths) + bool(given.times) + bool(given.run) != 1:
        parser.error("name two arms, or type --times, or --run two commands: one of the three")
    if len(given.paths) not in (0, 2) or len(given.times) not in (0, 2):
        parser.error("name two arms, A and B; give --times twice, for A and then for B")
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}: it must be at least 1")
    return given


def find_sides(given: argparse.Namespace) -> list[Side]:
    if given.times:
        unverified = "UNVERIFIED: no log stands behind these numbers"
        sides = zip("AB", given.times, strict=True)
        return [Side(name, "typed", list(map(Timed, times)), [], unverified) for name, times in sides]
    if given.run:
        out = given.out or Path(f"logs/compare_{datetime.now(UTC):%Y%m%d-%H%M%S}")
        return run_in_turn(given.run, given.rounds, out)
    return [read_side("A", given.paths[0]), read_side("B", given.paths[1])]


def main(argv: Sequence[str] | None = None) -> int:
    given = parse_arguments(argv)
    try:
        found = compare_sides(*find_sides(given), given.level)
        if found.differs and not (given.allow_mismatch or given.run):
            rule = "A and B differ in machine or software: time both on one, or --allow-mismatch"
            raise LogError("\n  ".join([rule, *found.differs]))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if given.json:
        print_json(as_json(found))
    else:
        print(to_text(found))
    return 0 if found.seconds.high < 0 else 1


if __name__ == "__main__":
    set_up_output()
    sys.exit(main())
