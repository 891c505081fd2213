"""Does B beat A? Pairs of runs on one seed, tested as they arrive; and the log of judgements.

A difference is B's figure minus A's on the same seed; the lower figure is the better one. Each
interim analysis makes two tests, each at the same small level at every analysis (Pocock, 1977;
`stats.interim_level`): B is better or worse if the wide interval excludes 0; there is no difference
larger than the margin if the narrow one is within +-margin (two one-sided tests). The interval of
the deciding test may be read after any stop (Jennison and Turnbull, 1989).
`judgements.jsonl` is a registry like that of runs. An unfinished judgement counts too.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock
from scipy.stats import t as student

from claims import stats
from claims.logs import finished_runs
from claims.record import difference
from claims.runs import Run
from runtime.claim import read_claim
from runtime.errors import Refused
from runtime.jsonl import json_hash
from runtime.registry import REGISTRY, read_registry, register
from runtime.source import read_sources

FIRST_ANALYSIS = 4  # pairs before the first analysis: fewer may agree by chance
ALPHA = 0.01  # of better and worse together
EQUAL = 0.05  # of "no difference larger than the margin"
MOST_PAIRS = 100
JUDGEMENTS = "judgements.jsonl"
UNITS = {"loss": "nats per token", "time": "seconds"}
# What both arms must share, else their figures do not mean the same.
SHARED = {"loss": ("steps",), "time": ()}
ALWAYS_SHARED = ("track", "target", "vocab_size", "val_tokens", "val_seq_len", "val_window",
                 "val_sha256", "data_dir")  # fmt: skip


# ---- The race


class RacePlan:
    """When to analyse, and what for. ValueError for a plan that makes no sense.

    pairs: at most; margin: the smallest difference that matters; every: pairs between two analyses.
    """

    def __init__(self, pairs: int, margin: float, every: int = 1):
        if not FIRST_ANALYSIS <= pairs <= MOST_PAIRS:
            rule = f"there must be {FIRST_ANALYSIS} to {MOST_PAIRS} pairs, also with --quick"
            raise ValueError(f"--pairs {pairs}: {rule}, as fewer may agree by chance")
        if every < 1:
            raise ValueError(f"--analyse-every {every}: it must be 1 or more pairs")
        if not 0 < margin < math.inf:
            raise ValueError(f"margin is {margin}: it must be between 0 and inf")
        self.margin = margin
        self.analyses = (*range(FIRST_ANALYSIS, pairs, every), pairs)

    def widths(self, n: int) -> tuple[float, float]:
        """Half of the wide and the narrow interval after n pairs, in standard errors."""
        wide, narrow = (stats.interim_level(self.analyses, level) for level in (ALPHA / 2, EQUAL))
        return float(student.isf(wide, n - 1)), float(student.isf(narrow, n - 1))


class Verdict(NamedTuple):
    outcome: str  # better, worse, no difference, undecided
    final: bool  # whether no further pair is needed
    pairs: int
    mean: float  # B - A
    low: float = math.nan  # of the interval
    high: float = math.nan
    sd: float = math.nan  # of the differences
    confidence: float = 1 - ALPHA  # of the interval


def decide(differences: Sequence[float], plan: RacePlan) -> Verdict:
    """The verdict on the pairs so far. A difference that is not finite ends the race undecided."""
    n = len(differences)
    mean, sd = stats.moments(differences)
    if not all(map(math.isfinite, differences)):
        return Verdict("undecided", True, n, math.nan)
    if n not in plan.analyses:
        return Verdict("undecided", False, n, mean)
    error = sd / math.sqrt(n)
    if sd == 0 and mean != 0:  # equal differences say nothing about their spread
        error = math.inf
    wide, narrow = (width * error for width in plan.widths(n))
    outcome, half, confidence = "undecided", wide, 1 - ALPHA
    if mean + wide < 0:
        outcome = "better"
    elif mean - wide > 0:
        outcome = "worse"
    elif abs(mean) + narrow < plan.margin:
        outcome, half, confidence = "no difference", narrow, 1 - 2 * EQUAL
    final = outcome != "undecided" or n == plan.analyses[-1]
    return Verdict(outcome, final, n, mean, mean - half, mean + half, sd, confidence)


# ---- The arms and their figures


class Arm(NamedTuple):
    name: str  # A or B
    source: Path  # folder of its train_gpt.py
    flags: list[str]
    config: dict[str, Any]  # what these flags mean there
    config_sha256: str
    source_sha256: str


def require_comparable(arms: Sequence[Arm], metric: str) -> None:
    """Refuse arms whose figures do not mean the same, and arms that are one."""
    a, b = arms
    if (a.config_sha256, a.source_sha256) == (b.config_sha256, b.source_sha256):
        raise Refused("A and B have the same source and settings. Give --b FLAGS, or --a-source of "
                      "the source to beat.")  # fmt: skip
    for name in (*ALWAYS_SHARED, *SHARED[metric]):
        mine, other = a.config.get(name), b.config.get(name)
        if mine != other and None not in (mine, other):  # older sources lack some
            raise Refused(f"{name} is {mine} in A and {other} in B: judge {metric} with the same.")


def runs_of(folder: Path, arm: Arm) -> dict[int, Run]:
    """By seed, the first run of this arm that finished or diverged."""
    found: dict[int, Run] = {}
    for run in finished_runs(folder / arm.name):
        same = run.config_sha256 == arm.config_sha256 and run.source == arm.source_sha256
        if same and run.seed is not None:
            found.setdefault(run.seed, run)
    return found


def figure(run: Run, metric: str) -> float:
    """What must be lower. Of a run that diverged the loss of a guess; it has no time."""
    if not run.counts:
        return math.log(run.header["config"]["vocab_size"]) if metric == "loss" else math.inf
    if metric == "time":
        return (run.train_time_ms or math.inf) / 1000
    return run.validations[-1].loss


# ---- The log of judgements


def read_judgements(folder: Path) -> list[dict[str, Any]]:
    """The start lines in order, each with the fields of its end line, if any; done: its pairs."""
    path = folder / JUDGEMENTS
    lines = read_registry(path) if path.exists() else []
    found = {line["run_id"]: line for line in lines if line["event"] == "start"}
    for line in lines:
        if line["event"] == "end" and line["run_id"] in found:
            found[line["run_id"]] = line | found[line["run_id"]] | {"done": line.get("pairs")}
    return list(found.values())


def find_judgement(
    folder: Path, plan: dict[str, Any], arms: Sequence[Arm], seed: int | None, records: Path
) -> dict[str, Any]:
    """The start line of the judgement with this plan, these arms and this seed; if need be, a new
    one. Without a seed a new one takes untried seeds.
    """
    facts = dict(plan)
    for arm in arms:  # what identifies it
        facts[arm.name] = {"flags": arm.flags, "config_sha256": arm.config_sha256,
                           "source_sha256": arm.source_sha256}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "start.lock", timeout=60):  # another may begin at the same time
        known = read_judgements(folder)
        for entry in reversed(known):
            if facts.items() <= entry.items() and seed in (None, entry["seed"]):
                return entry
        number = f"{len(known) + 1:03}"
        if seed is None:
            (seed,) = fresh_seeds(None, 1, Path("logs"), folder, records)
        if any((folder / number / arm.name).exists() for arm in arms):
            raise Refused(f"{folder / number} has runs that {JUDGEMENTS} does not know: restore it")
        (folder / number).mkdir(exist_ok=True)  # it is there if the last try failed
        changed = write_diff(folder / number / "source.diff", *(arm.source for arm in arms))
        register(folder / JUDGEMENTS, "start", run_id=number, seed=seed, diff=changed, **facts)
        return read_judgements(folder)[-1]


def alone(folder: Path) -> FileLock:
    """Held by the process that makes the runs of a judgement. A second one gets an OSError."""
    return FileLock(folder / "race.lock", timeout=0)


def find_judged(folder: Path, number: int, source_sha256: str) -> dict[str, Any]:
    """The judgement with this number; of 0 the last. Refused if B was not this source."""
    known = read_judgements(folder)
    if not 0 <= number <= len(known) or not known:
        rule = f"{folder} has {len(known)} judgements, counted from 1"
        raise Refused(f"judgement {number}: {rule}. Name one, or its folder with --judgements.")
    judged = known[number - 1]
    if judged["B"]["source_sha256"] != source_sha256:
        raise Refused(f"judgement {judged['run_id']} was on source "
                      f"{judged['B']['source_sha256']:.12} as B, and this one is "
                      f"{source_sha256:.12}. Go back to it, or judge again.")  # fmt: skip
    return judged


def write_diff(path: Path, a: Path, b: Path) -> dict[str, Any]:
    """Keep the difference of two sources; returns its changed lines and its hash."""
    lines = difference(read_sources(a), read_sources(b))
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    changed = [line for line in lines if line[0] in "+-" and line[:4] not in ("+++ ", "--- ")]
    return {"lines": len(changed), "sha256": json_hash(lines)}


def fresh_seeds(first: int | None, count: int, *folders: Path) -> list[int]:
    """So many seeds in a row, from `first` on; from None, above all that were tried.

    Refused for one that a registry, a judgement or a claim in the folders names.
    """
    tried: set[int] = set()
    for folder in folders:
        for path in [*folder.rglob(f"{Path(REGISTRY).stem}*.jsonl"), *folder.rglob(JUDGEMENTS)]:
            for line in read_registry(path):
                seed, pairs = line.get("seed"), line.get("pairs", 1)  # a judgement takes several
                if isinstance(seed, int):
                    many = min(pairs, MOST_PAIRS) if isinstance(pairs, int) else 1
                    tried.update(range(seed, seed + many))
        for path in folder.rglob("claim.json"):
            tried.update(read_claim(path).seeds)
    untried = max(tried, default=-1) + 1
    first = untried if first is None else first
    seeds = list(range(first, first + count))
    if again := tried.intersection(seeds):
        raise Refused(f"--seed {first}: seed {min(again)} was tried. Omit it, or take {untried}.")
    return seeds
