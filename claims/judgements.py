"""The judgements of a folder: what each compares, what its runs show, and how many there were.

`judgements.jsonl` is a registry: a line when a judgement starts, one when it ends, each with the
hash of the line before. An unfinished judgement counts too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from claims.logs import finished_runs
from claims.record import Source, difference
from claims.runs import Run
from claims.sequential import ALPHA
from runtime.claim import read_claim
from runtime.errors import Refused
from runtime.jsonl import json_hash
from runtime.log import read_sources
from runtime.registry import REGISTRY, read_registry, register

JUDGEMENTS = "judgements.jsonl"
UNITS = {"loss": "nats per token", "steps": "steps", "time": "seconds"}
# What both arms must share, else their figures do not mean the same.
SHARED = {"loss": ("steps",), "steps": ("val_every",), "time": ()}
ALWAYS_SHARED = ("track", "target", "vocab_size", "val_tokens", "val_seq_len", "val_window")


class Arm(NamedTuple):
    name: str  # A or B
    source: Path  # folder of its train_gpt.py
    flags: list[str]
    config: dict[str, Any]  # what these flags mean there
    config_sha256: str
    source_sha256: str

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the arm in the log of judgements."""
        return {"flags": self.flags, "config_sha256": self.config_sha256,
                "source_sha256": self.source_sha256}  # fmt: skip


def require_comparable(arms: Sequence[Arm], of: str) -> None:
    """Refuse arms whose figures do not mean the same."""
    a, b = arms
    for name in (*ALWAYS_SHARED, *SHARED[of]):
        mine, other = a.config.get(name), b.config.get(name)
        if mine != other and None not in (mine, other):  # an older source may lack a setting
            raise Refused(f"{name} is {mine} in A and {other} in B: judge {of} with the same.")
    if of == "steps" and not a.config.get("val_every"):
        raise Refused("val_every is 0: steps to the target need validations. Give --val-every 5.")


# ---- Figures


def figures(folder: Path, arm: Arm, of: str) -> dict[int, float]:
    """By seed, the figure of each finished run of this arm; infinite where it has none."""
    found = {}
    for run in finished_runs(folder / arm.name):
        if run.seed is None or (run.config_sha256, run.source) != arm[-2:]:
            continue
        found[run.seed] = figure(run, of) if run.counts else float("inf")
    return found


def figure(run: Run, of: str) -> float:
    last = run.validations[-1]
    if of == "loss":
        return last.loss
    if of == "time":
        return (last.train_time_ms or float("inf")) / 1000
    return steps_to(run, run.target or 0.0)


def steps_to(run: Run, target: float) -> float:
    """Where the line from one validation to the next reaches the target first; else infinite."""
    before = run.validations[0]
    for point in run.validations:
        if point.loss <= target:
            share = (before.loss - target) / (before.loss - point.loss) if point != before else 1.0
            return before.step + share * (point.step - before.step)
        before = point
    return float("inf")


def paired_differences(folder: Path, arms: Sequence[Arm], of: str, seeds: range) -> list[float]:
    """B - A of the pairs so far, in the order of the seeds."""
    a, b = (figures(folder, arm, of) for arm in arms)
    differences = []
    for seed in seeds:
        if seed not in a or seed not in b:
            break
        differences.append(b[seed] - a[seed])
    return differences


# ---- The log of judgements


def read_judgements(folder: Path) -> list[dict[str, Any]]:
    """The start lines in order, each with the fields of its end line, if it has one."""
    path = folder / JUDGEMENTS
    lines = read_registry(path) if path.exists() else []
    found = {line["run_id"]: line for line in lines if line["event"] == "start"}
    for line in lines:
        if line["event"] == "end":
            found[line["run_id"]] = line | found[line["run_id"]]
    return list(found.values())


def find_judgement(
    folder: Path, plan: dict[str, Any], arms: Sequence[Arm], seed: int | None, records: Path
) -> dict[str, Any]:
    """The start line of the judgement with this plan, these arms and this seed; if need be, a new
    one. Without a seed a new one takes untried seeds.
    """
    facts = plan | {arm.name: arm.facts for arm in arms}
    known = read_judgements(folder)
    for entry in reversed(known):
        if facts.items() <= entry.items() and seed in (None, entry["seed"]):
            return entry
    number = f"{len(known) + 1:03}"
    (folder / number).mkdir(parents=True)  # FileExistsError: another judgement has just begun
    if seed is None:
        seed = next_seed(Path("logs"), folder, records)
    changed = write_diff(folder / number / "source.diff", *(arm.source for arm in arms))
    register(folder / JUDGEMENTS, "start", run_id=number, seed=seed, diff=changed, **facts)
    return read_judgements(folder)[-1]


def find_judged(folder: Path, number: int) -> dict[str, Any]:
    """The judgement with this number; of 0 the last. Refused if there is none."""
    known = read_judgements(folder)
    if not 0 <= number <= len(known) or not known:
        rule = f"{folder} has {len(known)} judgements, counted from 1"
        raise Refused(f"judgement {number}: {rule}. Name one, or its folder with --judgements.")
    return known[number - 1]


def require_source(judged: dict[str, Any], present: str) -> None:
    """Refuse to claim another source than the one that was judged."""
    if judged["B"]["source_sha256"] != present:
        raise Refused(f"judgement {judged['run_id']} was on source "
                      f"{judged['B']['source_sha256']:.12} as B, and this one is {present:.12}. "
                      "Go back to it, or judge again.")  # fmt: skip


def write_diff(path: Path, a: Path, b: Path) -> dict[str, Any]:
    """Keep the difference of two sources; returns its changed lines and its hash."""
    lines = difference(Source(read_sources(a), None), Source(read_sources(b), None))
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    changed = [line for line in lines if line[0] in "+-" and line[:4] not in ("+++ ", "--- ")]
    return {"lines": len(changed), "sha256": json_hash(lines)}


def family_level(judgements: int) -> float:
    """A bound on the chance of any false finding in this many judgements (Bonferroni)."""
    return min(1.0, judgements * ALPHA)


def next_seed(*folders: Path) -> int:
    """The first seed above all that a registry, a judgement or a claim in the folders names."""
    seeds = [-1]
    for folder in folders:
        for path in [*folder.rglob(f"{Path(REGISTRY).stem}*.jsonl"), *folder.rglob(JUDGEMENTS)]:
            named = [line for line in read_registry(path) if "seed" in line]
            seeds += [line["seed"] + line.get("pairs", 1) - 1 for line in named]
        for path in folder.rglob("claim.json"):
            seeds += read_claim(path).seeds
    return max(seeds) + 1
