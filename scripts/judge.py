"""Does B beat A? Trains both on the same seeds and stops as soon as the answer is known.

    python scripts/judge.py --b "--smear on"        a flag, at equal steps; of one word: --b=--smear
    python scripts/judge.py --a-source ../before                    the source here against another
    python scripts/judge.py --metric time --margin 0.1 --b "--muon-head-pairs on" -- --steps 30

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

from scripts.command import ROOT, ask_trainer, command, make_parser, show, start, training_command

from claims import judge, stats
from claims.judge import ALPHA, UNITS, Arm, RacePlan, Verdict
from claims.logs import finished_runs
from runtime.errors import LogError
from runtime.log import config_hash
from runtime.registry import register
from runtime.source import source_hash
from scripts.side_by_side import ONE_BY_ONE, Job, Sharing, on_gpu, run_side_by_side, share

CODES = {"better": 0, "worse": 1, "no difference": 3, "undecided": 4}
MARGIN = 0.01  # nats per token
FORM = "+.5g"  # of differences
SKEWED = 1.0  # so are 4 % of races of twenty normal differences, and 85 % of lognormal ones
READING_S = 30.0  # between two readings of the logs: reading slows the runs
Figures = dict[str, dict[int, float]]  # by arm and seed


def make_arm(name: str, source: Path, flags: list[str]) -> Arm:
    """Ask the source what the flags mean. ValueError for flags that it refuses."""
    config = ask_trainer(source, flags)
    return Arm(name, source, flags, config, config_hash(config), source_hash(source))


def announce(
    out: Path, entry: dict[str, Any], arms: Sequence[Arm], plan: RacePlan, sharing: Sharing
) -> None:
    """Say on stderr what is judged, before the first run."""
    pairs = f"{plan.looks[0]} to {plan.looks[-1]} pairs from seed {entry['seed']}"
    lines = [f"judgement {int(entry['run_id'])}: is B better than A? {entry['metric']}, margin "
             f"{plan.margin:g}, {pairs}"]  # fmt: skip
    lines += [f"{arm.name}: {shlex.join(arm.flags)} (source {arm.source_sha256:.12})"
              for arm in arms]  # fmt: skip
    a, b = (arm.config for arm in arms)
    lines += [f"{name}: {a.get(name)} in A, {b.get(name)} in B"
              for name in sorted(a | b) if a.get(name) != b.get(name)]  # fmt: skip
    diff = out / entry["run_id"] / "source.diff"
    lines.append(f"the sources differ in {entry['diff']['lines']} lines: {diff}")
    if sharing.at_once > 1:
        lines.append(f"{sharing.at_once} runs at once, {sharing.threads} thread(s) each")
    lines.append(estimate(out, a, plan, sharing))
    page = Path("records", a["track"], "prediction", "README.md")
    if (ROOT / page).is_file():
        first = (ROOT / page).read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"{first.lstrip('# ')} ({page})")
    print("\n  ".join(lines), file=sys.stderr, flush=True)


def estimate(out: Path, config: dict[str, Any], plan: RacePlan, sharing: Sharing) -> str:
    """How long it may take, by a run of the newest judgement or one of a record."""
    here = config["track"], config.get("recipe"), on_gpu(config)
    low, high = 2 * plan.looks[0], 2 * plan.looks[-1]  # runs
    judged, records = out.glob("*/[AB]"), (ROOT / "records" / here[0]).glob("*/runs")
    for folder in [*sorted(judged, reverse=True), *sorted(records, reverse=True)]:
        for run in finished_runs(folder):
            gpu, recipe = run.env.get("gpu"), run.header["config"].get("recipe")
            alike = (run.track, recipe, bool(gpu)) == here
            threads = gpu or sharing.threads in (None, run.env.get("threads"))
            if run.complete and alike and threads:
                minutes = run.end["t_ms"] / 60_000 * config["steps"] / run.validations[-1].step
                low, high = (minutes * runs / sharing.at_once for runs in (low, high))
                return (f"{config['steps']} steps take about {minutes:.1f} minutes by {run.path} "
                        f"on {gpu or run.env.get('cpu')}: all in all {low:.0f} to {high:.0f}")
    return f"no run of {here[0]} by {here[1]} on a machine as here: the first run will tell"


def race(
    folder: Path, arms: Sequence[Arm], plan: RacePlan, metric: str, first: int, sharing: Sharing
) -> Verdict:
    """Make the runs that are missing until the verdict is final. It is decided pair by pair.

    Times are taken one by one, so that a drift of the machine falls on both arms alike.
    """
    seeds = range(first, first + plan.looks[-1])
    stops = range(1, len(seeds) + 1) if metric == "time" else plan.looks
    processes = max(1, sharing.at_once // len(arms))  # of each arm
    done: Figures = read_figures(folder, arms, metric)
    for turn, stop in enumerate(stops):
        order = arms if turn % 2 == 0 else arms[::-1]
        missing = sum(any(seed not in done[arm.name] for arm in arms) for seed in seeds[:stop])
        if missing:  # and the next seeds, on cores that would be idle
            ahead = -missing % processes
            done = make_runs(folder, order, metric, seeds[: stop + ahead], sharing)
        verdict = judge.decide([done["B"][seed] - done["A"][seed] for seed in seeds[:stop]], plan)
        print(f"{verdict.pairs} pairs: B - A {stats.in_words(verdict, FORM)}", file=sys.stderr)
        if verdict.final:
            break
    return verdict


def make_runs(
    folder: Path, arms: Sequence[Arm], metric: str, seeds: range, sharing: Sharing
) -> Figures:
    """Train the seeds without a run; return all figures. LogError if a run or its source fails."""
    done = read_figures(folder, arms, metric)
    read_at = time.monotonic()

    def read() -> None:
        nonlocal done, read_at
        before, done = done, read_figures(folder, arms, metric)
        read_at = time.monotonic()
        for arm, figures in done.items():
            for seed in sorted(figures.keys() - before[arm].keys()):
                known = math.isfinite(figures[seed])
                figure = f"{figures[seed]:.4f} {UNITS[metric]}" if known else "none"
                print(f"  {arm}, seed {seed}: {figure}", file=sys.stderr, flush=True)

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


def read_figures(folder: Path, arms: Sequence[Arm], metric: str) -> Figures:
    return {arm.name: judge.figures(folder, arm, metric) for arm in arms}


def missing_jobs(
    folder: Path, arms: Sequence[Arm], done: Figures, seeds: range, processes: int
) -> Iterator[Job]:
    """Yield what trains the missing seeds; a process trains several, as it compiles only once."""
    for arm in arms:
        missing = [seed for seed in seeds if seed not in done[arm.name]]
        for stretch in stretches(missing, math.ceil(len(missing) / processes)):
            first, last = stretch[0], stretch[-1]
            print(f"{arm.name}, seeds {first} to {last}", file=sys.stderr, flush=True)
            flags = [*arm.flags, "--seed", str(first), "--trials", str(len(stretch))]
            words = training_command(arm.source, flags, folder / arm.name)
            yield Job(words, folder / f"{arm.name}_{first}.txt", (arm, first))


def stretches(numbers: Sequence[int], most: int) -> list[list[int]]:
    """Cut increasing numbers into stretches of consecutive ones, each of at most so many."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1 and len(found[-1]) < most:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def to_text(given: argparse.Namespace, facts: dict[str, Any], verdict: Verdict) -> str:
    """What a reader needs. facts: the fields of --json."""
    words = {
        "better": "B is better than A", "worse": "B is worse than A",
        "no difference": f"B and A differ by no more than {given.margin:g}",
        "undecided": f"undecided after {verdict.pairs} pairs",
    }  # fmt: skip
    number, count = int(facts["run_id"]), len(judge.read_judgements(given.out))
    lines = [
        f"judgement {number}: {words[verdict.outcome]}",
        f"  B - A {stats.in_words(verdict, FORM)} {UNITS[given.metric]}: mean and "
        f"{verdict.confidence:.0%} interval; standard deviation {verdict.sd:.4g}",
        f"  {verdict.pairs} pairs of at most {given.pairs}, seeds from {facts['seed']}",
    ]
    if abs(verdict.skew) > SKEWED:
        lines.append(f"  warning: the differences are skewed, {verdict.skew:+.1f}: errors may be "
                     "two to four times as frequent as told (docs/judge.md)")
    if not math.isnan(facts["new_tokens"]["mean"]):
        new = stats.Difference(**facts["new_tokens"])
        lines.append(f"  on new tokens (95% interval): {stats.in_words(new, FORM)}")
    bound = f"at most {count} x {ALPHA:g} = {min(1, count * ALPHA):g}"
    lines.append(f"  {count} judgements so far; the chance of a false better or worse is {bound}")
    if verdict.outcome == "better":
        claim = f"record.py claim NAME --about TEXT --from-judgement {number}"
        lines.append(f"  prove it on fresh seeds: python scripts/{claim}")
    return "\n".join(lines)


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
    add("--look-every", type=int, default=1, help="pairs between two looks, from the 4th on")
    add("--seed", type=int, help="of the first pair (the first untried one)")
    add("--out", type=Path, default=Path("logs/judge"), help="folder of judgements (%(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    add("shared", nargs="*", metavar="FLAG", help="after --: flags of train_gpt.py for both arms")
    given = parser.parse_args(argv)
    if given.margin is None and given.metric != "loss":
        parser.error(f"--metric {given.metric} needs --margin, in {UNITS[given.metric]}")
    if given.seed is not None and given.seed < 0:  # before the judgement counts
        raise ValueError(f"--seed {given.seed}: it must be at least 0")
    given.margin = MARGIN if given.margin is None else given.margin
    plan = RacePlan(given.pairs, given.margin, given.look_every)
    arms = [make_arm("A", given.a_source, given.a + given.shared),
            make_arm("B", given.b_source, given.b + given.shared)]  # fmt: skip
    judge.require_comparable(arms, given.metric)
    sharing = ONE_BY_ONE if given.metric == "time" else share(arm.config for arm in arms)
    planned = {name: getattr(given, name) for name in ("metric", "margin", "pairs", "look_every")}
    planned["threads"] = sharing.threads
    entry = judge.find_judgement(given.out, planned, arms, given.seed, ROOT / "records")
    announce(given.out, entry, arms, plan, sharing)
    folder = given.out / entry["run_id"]
    with judge.alone(folder):
        verdict = race(folder, arms, plan, given.metric, entry["seed"], sharing)
    seeds = range(entry["seed"], entry["seed"] + verdict.pairs)  # a run may have come too late
    new = judge.compare_new_tokens(folder, arms, seeds)
    if "outcome" not in entry:
        register(given.out / judge.JUDGEMENTS, "end", run_id=entry["run_id"], **verdict._asdict())
    facts = entry | verdict._asdict() | {"new_tokens": new._asdict()}
    show(to_text(given, facts, verdict), facts, given.json)
    return CODES[verdict.outcome]


if __name__ == "__main__":
    start(main)
