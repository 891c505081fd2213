"""Does B beat A? Trains both on the same seeds and stops as soon as the answer is known.

    python scripts/judge.py --b "--smear on"        a flag, at equal steps; of one word: --b=--smear
    python scripts/judge.py --a-source ../before                    the source here against another
    python scripts/judge.py --quick --b "--smear on" -- --track small      a quick look, no claim
    python scripts/judge.py --metric time --margin 0.1 --b "--compile off" -- --steps 30

Flags after -- go to both arms. The same command resumes. Runs and judgements.jsonl, which counts
every judgement that was started, are in --out; record.py claim --from-judgement makes a claim of B.
Exit code: 0 B is better, 1 worse, 3 no difference larger than --margin, 4 undecided, 2 bad input or
a run failed, 130 or 143 interrupted.
"""

import argparse
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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

from claims import judge
from claims.compare import Comparison, compare, describe, direction
from claims.judge import ALPHA, UNITS, Arm, RacePlan, Verdict
from claims.record import why_no_claim
from claims.runs import Run
from claims.stats import in_words
from runtime.errors import LogError, Refused
from runtime.log import config_hash
from runtime.registry import register
from runtime.source import source_hash
from scripts.side_by_side import (
    ONE_BY_ONE,
    Job,
    Sharing,
    estimate,
    known_run,
    run_side_by_side,
    share,
)

CODES = {"better": 0, "worse": 1, "no difference": 3, "undecided": 4}
MARGIN = 0.01  # nats per token
FORM = "+.5g"  # of differences
READING_S = 30.0  # between two readings of the logs: reading slows the runs
Runs = dict[str, dict[int, Run]]  # by arm and seed


def make_arm(name: str, source: Path, flags: list[str]) -> Arm:
    """Ask the source what the flags mean. ValueError for flags that it refuses."""
    if not (source / "train_gpt.py").is_file():
        raise Refused(f"--{name.lower()}-source {source}: it holds no train_gpt.py. Give the "
                      "folder of a checkout, such as one of git worktree.")  # fmt: skip
    config = ask_trainer(source, flags)
    return Arm(name, source, flags, config, config_hash(config), source_hash(source))


def announce(
    out: Path, entry: dict[str, Any], arms: Sequence[Arm], plan: RacePlan, sharing: Sharing
) -> None:
    """Say on stderr what is judged, before the first run."""
    a, b = (arm.config for arm in arms)
    pairs = f"{plan.analyses[0]} to {plan.analyses[-1]} pairs from seed {entry['seed']}"
    lines = [f"judgement {int(entry['run_id'])}: is B better than A? {entry['metric']}, margin "
             f"{plan.margin:g}, {pairs}"]  # fmt: skip
    lines += [f"{name}: {a.get(name)} in A, {b.get(name)} in B" for name in differing(arms)]
    if changed := entry["diff"]["lines"]:
        diff = out / entry["run_id"] / "source.diff"
        lines.append(f"the sources differ in {changed} lines: {diff}")
    if reason := why_no_claim(b):
        lines.append(f"no claim can follow: {reason}")
    lines.append(f"{sharing.at_once} runs at once" if sharing.at_once > 1 else "one run at a time")
    known = known_run(a, sharing.threads, [out, ROOT / "records" / a["track"]])
    if known:
        lines[-1] += f", {times(known, a, plan, sharing)}"
    else:
        lines[-1] += ", minutes not known here: the first run will tell"
    say("\n  ".join(lines))


def differing(arms: Sequence[Arm]) -> list[str]:
    """The settings in which A and B differ."""
    a, b = (arm.config for arm in arms)
    return [name for name in sorted(a | b) if a.get(name) != b.get(name)]


def times(run: Run, config: dict[str, Any], plan: RacePlan, sharing: Sharing) -> str:
    """How long the race may take, by a run on this machine."""
    low, high = (2 * pairs for pairs in (plan.analyses[0], plan.analyses[-1]))
    return estimate(run, config["steps"], low, high, sharing)


def race(
    folder: Path, arms: Sequence[Arm], plan: RacePlan, metric: str, first: int, sharing: Sharing
) -> Verdict:
    """Make the runs that are missing until the verdict is final. It is decided pair by pair.

    Times are taken one by one, so that a drift of the machine falls on both arms alike.
    """
    seeds = range(first, first + plan.analyses[-1])
    stops = range(1, len(seeds) + 1) if metric == "time" else plan.analyses
    processes = max(1, sharing.at_once // len(arms))  # of each arm
    done = read_runs(folder, arms)
    for turn, stop in enumerate(stops):
        order = arms if turn % 2 == 0 else arms[::-1]
        missing = sum(any(seed not in done[arm.name] for arm in arms) for seed in seeds[:stop])
        if missing:  # and the next seeds, on cores that would be idle
            ahead = -missing % processes
            done = make_runs(folder, order, plan, metric, seeds[: stop + ahead], sharing)
        a, b = ([judge.figure(done[name][seed], metric) for seed in seeds[:stop]] for name in "AB")
        verdict = judge.decide([new - old for new, old in zip(b, a, strict=True)], plan)
        say(f"{verdict.pairs} pairs: B - A {in_words(verdict, FORM)}")
        if verdict.final:
            break
    return verdict


def make_runs(
    folder: Path, arms: Sequence[Arm], plan: RacePlan, metric: str, seeds: range, sharing: Sharing
) -> Runs:
    """Train the seeds without a run; return all runs. LogError if a run or its source fails."""
    done = read_runs(folder, arms)
    read_at = time.monotonic()

    def read() -> None:
        nonlocal done, read_at
        before, done = done, read_runs(folder, arms)
        read_at = time.monotonic()
        for arm, runs in done.items():
            for seed in sorted(runs.keys() - before[arm].keys()):
                found = judge.figure(runs[seed], metric)
                known = f"{found:.4f} {UNITS[metric]}" if runs[seed].counts else "diverged"
                say(f"  {arm}, seed {seed}: {known}")
        finished = [(each, run) for each in arms for run in done[each.name].values()]
        if finished and not any(before.values()):
            of, run = finished[0]
            say(f"  as measured now: {times(run, of.config, plan, sharing)}")

    def meanwhile() -> None:
        if time.monotonic() - read_at > READING_S:
            read()

    def ended(job: Job, code: int) -> None:
        arm, first = job.about
        if code not in (0, 3):  # 3: a run diverged, which is a result
            last = job.console.read_text(errors="replace").splitlines()[-1:]
            raise LogError(f"exit code {code} of {arm.name}: {' '.join(last)} ({job.console}). Fix "
                           "it, then repeat the command")  # fmt: skip
        read()
        if first not in done[arm.name]:
            raise LogError(f"{arm.name} left no run of source {arm.source_sha256:.12}: "
                           f"{arm.source} was changed while it was judged")  # fmt: skip

    processes = max(1, sharing.at_once // len(arms))  # of each arm
    # A run that diverges ends its process, so there may be more to make.
    while jobs := [*missing_jobs(folder, arms, done, seeds, processes)]:
        run_side_by_side(jobs, sharing, ended, meanwhile)
    return done


def read_runs(folder: Path, arms: Sequence[Arm]) -> Runs:
    return {arm.name: judge.runs_of(folder, arm) for arm in arms}


def missing_jobs(
    folder: Path, arms: Sequence[Arm], done: Runs, seeds: range, processes: int
) -> Iterator[Job]:
    """Yield what trains the missing seeds; a process trains several, as it compiles only once."""
    for arm in arms:
        missing = [seed for seed in seeds if seed not in done[arm.name]]
        for stretch in stretches(missing, math.ceil(len(missing) / processes)):
            first, last = stretch[0], stretch[-1]
            console = folder / f"{arm.name}_{first}.progress"
            say(f"{arm.name}, seeds {first} to {last}: progress in {console}")
            flags = [*arm.flags, "--seed", str(first), "--trials", str(len(stretch))]
            words = training_command(arm.source, flags, folder / arm.name)
            yield Job(words, console, (arm, first))


def stretches(numbers: Sequence[int], most: int) -> list[list[int]]:
    """Cut increasing numbers into stretches of consecutive ones, each of at most so many."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1 and len(found[-1]) < most:
            found[-1].append(number)
        else:
            found.append([number])
    return found


# ---- The verdict


def to_text(
    given: argparse.Namespace, entry: dict[str, Any], arms: Sequence[Arm], verdict: Verdict,
    found: Comparison | None, diverged: Sequence[str],
) -> str:  # fmt: skip
    """The answer first, then its evidence, then what to do. found: without runs that diverged."""
    words = {
        "better": "B is better than A", "worse": "B is worse than A",
        "no difference": f"B and A differ by no more than {given.margin:g}",
        "undecided": f"undecided after {verdict.pairs} pairs",
    }  # fmt: skip
    number, count = int(entry["run_id"]), len(judge.read_judgements(given.out))
    lines = [
        f"judgement {number}: {words[verdict.outcome]}",
        f"  B - A {in_words(verdict, FORM)} {UNITS[given.metric]}: mean and "
        f"{verdict.confidence:.0%} interval, {verdict.pairs} pairs of at most {given.pairs}",
    ]
    if verdict.mean == 0 == verdict.sd and given.metric == "loss":
        what = ", ".join(differing(arms)) or "the change of the source"
        lines.append(f"  every pair is equal to the last bit: {what} does not act here")
    lines += [f"  {each}" for each in diverged]
    if found is not None:
        lines += [f"  {line}" for line in describe(found)]
    bound = f"at most {count} x {ALPHA:g} = {min(1, count * ALPHA):g}"
    lines.append(f"  {count} judgement{'s' if count > 1 else ''} so far; the chance of a false "
                 f"better or worse is {bound}")  # fmt: skip
    if verdict.outcome == "better":
        lines.append(f"  {advice(given, number, arms[1], found)}")
    return "\n".join(lines)


def advice(given: argparse.Namespace, number: int, arm: Arm, found: Comparison | None) -> str:
    """What to do with a B that is better."""
    copies = found is not None and found.measure and direction(found.new_tokens) != "lower"
    if given.metric == "loss" and copies:
        return ("the gain may be copying only: on new tokens B is not shown to be better, and a "
                "claim must hold there, too")  # fmt: skip
    if reason := why_no_claim(arm.config):
        return f"no claim can follow: {reason}"
    claim = f"record.py claim NAME --about TEXT --from-judgement {number}"
    return f"prove it on fresh seeds: python scripts/{claim}"


@command
def main(argv: list[str]) -> int:
    parser, add = make_parser(__doc__)
    add("--a", type=shlex.split, default=[], metavar="FLAGS", help="of A, in quotes (none)")
    add("--b", type=shlex.split, default=[], metavar="FLAGS", help="the same for B")
    add("--a-source", type=Path, default=ROOT, metavar="DIR", help="of A's train_gpt.py (here)")
    add("--b-source", type=Path, default=ROOT, metavar="DIR", help="the same for B")
    add("--metric", choices=UNITS, default="loss", help="what must be lower (%(default)s)")
    add("--margin", type=float, help=f"smallest difference that matters (loss: {MARGIN})")
    add("--pairs", type=int, default=20, help="at most (%(default)s)")
    add("--analyse-every", type=int, default=1, help="pairs between two analyses, from the 4th on")
    add("--seed", type=int, help="of the first pair (the first untried one)")
    add("--quick", action="store_true", help="validate on few tokens; no claim can follow")
    add("--out", type=Path, default=Path("logs/judge"), help="folder of judgements (%(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    add("shared", nargs="*", metavar="FLAG", help="after --: flags of train_gpt.py for both arms")
    parser.on_unknown = "Flags of the trainer stand after --, such as -- --track small"
    given = parser.parse_args(argv)
    if given.metric != "loss" and given.margin is None:
        parser.error(f"--metric {given.metric} needs --margin, in {UNITS[given.metric]}")
    if given.seed is not None and given.seed < 0:  # before the judgement counts
        raise ValueError(f"--seed {given.seed}: it must be at least 0")
    given.margin = MARGIN if given.margin is None else given.margin
    plan = RacePlan(given.pairs, given.margin, given.analyse_every)
    shared = given.shared + ["--quick"] * given.quick
    arms = [make_arm("A", given.a_source, given.a + shared),
            make_arm("B", given.b_source, given.b + shared)]  # fmt: skip
    judge.require_comparable(arms, given.metric)
    sharing = ONE_BY_ONE if given.metric == "time" else share(arm.config for arm in arms)
    planned = {"metric": given.metric, "margin": given.margin, "pairs": given.pairs,
               "analyse_every": given.analyse_every, "threads": sharing.threads}  # fmt: skip
    entry = judge.find_judgement(given.out, planned, arms, given.seed, ROOT / "records")
    announce(given.out, entry, arms, plan, sharing)
    folder = given.out / entry["run_id"]
    with judge.alone(folder), resumable():
        verdict = race(folder, arms, plan, given.metric, entry["seed"], sharing)
    if "outcome" not in entry:
        register(given.out / judge.JUDGEMENTS, "end", run_id=entry["run_id"], **verdict._asdict())

    seeds = range(entry["seed"], entry["seed"] + verdict.pairs)  # a run may have come too late
    done = read_runs(folder, arms)
    sound = [seed for seed in seeds if all(done[arm][seed].counts for arm in "AB")]
    diverged = [f"{arm} diverged on seed {seed}: it counts as a guess"
                for arm in "AB" for seed in seeds if not done[arm][seed].counts]  # fmt: skip
    found = compare(*([done[arm][seed] for seed in sound] for arm in "AB")) if sound else None
    new = found.new_tokens._asdict() if found else None
    facts = entry | verdict._asdict() | {"new_tokens": new}
    show(to_text(given, entry, arms, verdict, found, diverged), facts, given.json)
    return CODES[verdict.outcome]


if __name__ == "__main__":
    start(main)
