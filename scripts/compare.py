"""Which of two arms is faster, by how much, and why: from run logs, or from runs made here in turn.

    python scripts/compare.py OLD NEW                        logs: files or folders, A and B
    python scripts/compare.py --run "CMD_A" "CMD_B" --rounds 6            A B, B A, ... made here

--run appends --log-dir and a folder to each command. The same command twice shows the noise.
Compare times only between runs on the same machine. Differences are B - A, intervals 95 %.

Exit code: 0 B is faster (its whole interval lies below 0), 1 that is not shown, 2 bad input or A
and B differ in machine or software, 130 or 143 interrupted.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from claims.comparison import Comparison, Side, compare_sides, read_side
from claims.runlog import read_all
from claims.stats import Difference
from runtime.errors import Interrupted, LogError
from scripts.command import listen, make_parser, print_json, run_child, set_up_output

TAIL_LINES = 15  # of the output of a failing command


def run_in_turn(commands: Sequence[str], rounds: int, out: Path) -> tuple[Side, Side]:
    """Run each command once a round, A B then B A."""
    a, b = Side(commands[0]), Side(commands[1])
    for number in range(rounds):
        for side in (a, b) if number % 2 == 0 else (b, a):
            name = "A" if side is a else "B"
            run_once(side, out / name / str(number))
            seconds = f"{side.seconds[-1]:.1f} s"
            print(f"round {number + 1} of {rounds}, {name}: {seconds}", file=sys.stderr, flush=True)
    return a, b


def run_once(side: Side, folder: Path) -> None:
    """Run the command of the side and add the run whose log it leaves. Raises LogError."""
    folder.mkdir(parents=True)
    command = f"{side.path} --log-dir {shlex.quote(str(folder.resolve()))}"
    console = folder.with_suffix(".console")
    code = run_child(command, console)
    if code:
        tail = console.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        raise LogError("\n  ".join([f"exit code {code}: {command}", *tail, f"see {console}"]))
    runs, _ = read_all([folder])
    if len(runs) != 1:
        raise LogError(f"{folder} has {len(runs)} runs where one is needed")
    side.add(runs[0])


# ---- Output


def interval(found: Difference, form: str = "+.3f") -> str:
    return "no interval" if math.isnan(found.low) else f"{found.low:{form}} to {found.high:{form}}"


def side_lines(name: str, side: Side, stutters_at: list[int]) -> list[str]:
    times = side.seconds
    spread = stdev(times) if len(times) > 1 else math.nan
    lines = [f"{name} = {side.path}", f"  n {len(times)}   mean {fmean(times):.3f} s   "
             f"sd {spread:.3f}   stutters at steps {stutters_at[:8] or 'none'}"]  # fmt: skip
    return lines + [f"  left out: {reason}" for reason in side.left_out]


def to_text(a: Side, b: Side, found: Comparison) -> str:
    word = "not shown to be faster or slower than A"
    if found.seconds.low > 0:
        word = "slower than A"
    if found.seconds.high < 0:
        word = "faster than A"
    lines = side_lines("A", a, found.stutters_at[0]) + side_lines("B", b, found.stutters_at[1])
    lines += [
        f"B is {word}: {found.seconds.mean:+.3f} s (95 % interval {interval(found.seconds)} s)",
        f"  {found.steps:+.3f} s from more or fewer steps",
        f"  {found.step_time.mean:+.3f} s from the time of a step ({interval(found.step_time)})",
        f"  {found.stutters.mean:+.3f} s from stutters ({interval(found.stutters)})",
        f"loss: {found.loss.mean:+.5f} ({interval(found.loss, '+.5f')})",
        *[f"DIFFERS in {what}" for what in found.differs],
        "this interval holds for one machine: time both arms on a second one too",
    ]
    return "\n".join(lines)


def compare(given: argparse.Namespace) -> tuple[Side, Side, Comparison]:
    if given.run:
        out = given.out or Path(f"logs/compare_{datetime.now(UTC):%Y%m%d-%H%M%S}")
        a, b = run_in_turn(given.run, given.rounds, out)
    else:
        a, b = read_side(given.paths[0]), read_side(given.paths[1])
    found = compare_sides(a, b, in_turn=bool(given.run))
    if found.differs and not given.allow_mismatch:
        rule = "A and B differ in machine or software: time both on one, or --allow-mismatch"
        raise LogError("\n  ".join([rule, *found.differs]))
    return a, b, found


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("paths", nargs="*", metavar="A B", help="logs or folders of the old arm and the new one")
    add("--run", nargs=2, metavar=("CMD_A", "CMD_B"), help="commands to run in turn")
    add("--rounds", type=int, default=5, help="runs of each command (%(default)s)")
    add("--out", type=Path, help="new folder for what --run makes (logs/compare_TIME)")
    add("--allow-mismatch", action="store_true", help="compare across machines, and say so")
    add("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    if len(given.paths) != (0 if given.run else 2):
        parser.error("name two arms, A and B, or --run two commands")
    try:
        a, b, found = compare(given)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signalled:
        return signalled.code
    if given.json:
        print_json({"a": a.seconds, "b": b.seconds, **found._asdict()})
    else:
        print(to_text(a, b, found))
    return 0 if found.seconds.high < 0 else 1


if __name__ == "__main__":
    listen()
    set_up_output()
    sys.exit(main())
