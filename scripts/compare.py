"""Which of two arms is faster, by how much, and why: from run logs, or from runs made here in turn.

    python scripts/compare.py OLD NEW                        logs: files or folders, A and B
    python scripts/compare.py logs:steps=30 logs:steps=32    two arms in one folder
    python scripts/compare.py --run "CMD_A" "CMD_B" --rounds 6            A B, B A, ... made here

--run appends --log-dir and a folder to each command. The same command twice shows the noise.
Compare times only between runs on the same machine. Differences are B - A, intervals 95 %. --margin
also tests whether the losses are equal within it (two one-sided t-tests).

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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import command, make_parser, run_child, show, start

from claims.comparison import Comparison, Side, compare_sides, read_side
from claims.logs import read_all
from claims.stats import in_words, moments
from runtime.errors import LogError


def run_in_turn(commands: Sequence[str], rounds: int) -> tuple[Side, Side]:
    """Run each command once a round, A B then B A."""
    out = Path(f"logs/compare_{datetime.now(UTC):%Y%m%d-%H%M%S}")
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
    words = f"{side.path} --log-dir {shlex.quote(str(folder.resolve()))}"
    if code := run_child(words):
        raise LogError(f"exit code {code}: {words}")
    runs, _ = read_all([folder])
    if len(runs) != 1:
        raise LogError(f"{folder} has {len(runs)} runs where one is needed")
    side.add(runs[0])


def compare(given: argparse.Namespace) -> tuple[Side, Side, Comparison]:
    if given.run:
        a, b = run_in_turn(given.run, given.rounds)
    else:
        a, b = read_side(given.paths[0]), read_side(given.paths[1])
    found = compare_sides(a, b, in_turn=bool(given.run), margin=given.margin)
    if found.differs and not given.allow_mismatch:
        rule = "A and B differ in machine or software: time both on one, or --allow-mismatch"
        raise LogError("\n  ".join([rule, *found.differs]))
    return a, b, found


def to_text(a: Side, b: Side, found: Comparison) -> str:
    lines = []
    for name, side, stutters in zip("AB", (a, b), found.stutters_at, strict=True):
        mean, sd = moments(side.seconds)
        spread = "" if math.isnan(sd) else f"   sd {sd:.3f}"  # one run has none
        lines += [
            f"{name} = {side.path}",
            f"  n {len(side.runs)}   mean {mean:.3f} s{spread}"
            f"   stutters at steps {stutters[:8] or 'none'}",
            *[f"  left out: {reason}" for reason in side.left_out],
        ]
    word = "not shown to be faster or slower than A"
    if found.seconds.low > 0:
        word = "slower than A"
    if found.seconds.high < 0:
        word = "faster than A"
    lines += [
        f"B is {word}: {in_words(found.seconds, '+.3f')} s",
        f"  {found.steps:+.3f} s from more or fewer steps",
        f"  {in_words(found.step_time, '+.3f')} s from the time of a step",
        f"  {in_words(found.stutters, '+.3f')} s from stutters",
        f"loss: {in_words(found.loss, '+.5f')}{on_pairs(found)}",
        *[f"DIFFERS in {what}" for what in found.differs],
        "this interval holds for one machine: time both arms on a second one too",
    ]
    if found.equal_loss is not None:
        lines.append(f"losses differ by less than --margin: p = {found.equal_loss:.3g}")
    return "\n".join(lines)


def on_pairs(found: Comparison) -> str:
    said = f", on {found.pairs} pairs of one seed each" if found.pairs else ""
    if found.pairs_save > 0:  # not nan
        said += f"; without pairs it takes {found.pairs_save:.1f} times as many runs"
    return said


@command
def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("paths", nargs="*", metavar="A B", help="logs or folders of the old arm and the new one")
    add("--run", nargs=2, metavar=("CMD_A", "CMD_B"), help="commands to run in turn")
    add("--rounds", type=int, default=5, help="runs of each command (%(default)s)")
    add("--margin", type=float, help="test whether the mean losses differ by less, nats per token")
    add("--allow-mismatch", action="store_true", help="compare across machines, and say so")
    add("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    if len(given.paths) != (0 if given.run else 2):
        parser.error("name two arms, A and B, or --run two commands")
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: it must be at least 1")
    a, b, found = compare(given)
    facts = {"a": a.seconds, "b": b.seconds, **found._asdict()}
    for name in ("seconds", "step_time", "stutters", "loss"):
        facts[name] = facts[name]._asdict()
    show(to_text(a, b, found), facts, given.json)
    return 0 if found.seconds.high < 0 else 1


if __name__ == "__main__":
    start(main)
