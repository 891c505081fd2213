"""A record as it was read: its claim, its runs, their registry, its source.

A record is a folder `records/<track>/<date>_<name>` with claim.json, runs/*.jsonl and what
`scripts/record.py make` derives from them: record.json and README.md. `records/sources` holds its
source. Whether the record can be believed is a question for `claims.checks`.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from claims.runlog import LogError, Run, first_segment, read_run
from claims.sources import Source, read_source, source_path
from claims.stats import Result, look_level, one_sample
from runtime.claim import Claim, read_claim
from runtime.errors import ClaimError, Refused
from runtime.registry import read_registry


class Track(NamedTuple):
    """The rules of a track, restated here: a judge does not take the rules from the judged."""

    target: float  # nats per token
    val_tokens: int
    val_sha256: str  # first digits of the hash of the validation tokens; empty: unknown here
    overlap: float  # most validation documents in training, as a share; the corpus holds a few
    train_sha256: str  # the same of the training tokens; empty: depends on the number of shards
    fixed: dict[str, Any]  # settings that no claim on the track may change
    in_time: bool  # the shortest time wins; else the fewest steps, equal on every machine


# Where steps count, the batch is fixed: a larger one would show the model more in each step.
TINY = {"vocab_size": 1024, "batch_tokens": 2048}
STEPS = {"vocab_size": 50257, "batch_tokens": 524_288, "sequence": 1024,
         "layers": "steps", "dim": 768}
TRACKS = {
    "tiny": Track(3.39, 262_144, "61a7bae6fab302b9", 0.02, "77e6e4d2acaa19c3", TINY, False),
    "short": Track(3.28, 10_485_760, "", 0.01, "", {}, True),
    "medium": Track(2.92, 10_485_760, "", 0.01, "", {}, True),
    "steps": Track(3.28, 10_485_760, "", 0.01, "", STEPS, False),
}
ALPHA = 0.01
NEEDED = {"data": dict, "checks": dict, "config": dict, "world_size": int}  # in a header, by checks


class Failure(NamedTuple):
    """A reason not to believe a record."""

    what: str
    where: Path
    mend: str


@dataclass(frozen=True)
class Evidence:
    """A record. `unread` names the files that could not be read."""

    folder: Path
    records: Path  # the folder of all records and of `sources`
    claim: Claim
    runs: list[Run]
    registry: list[dict[str, Any]]
    source: Source | None
    unread: list[Failure]

    @property
    def tokens(self) -> int:
        """Training tokens of one run."""
        return self.claim.config["steps"] * self.claim.config["batch_tokens"]

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """The registry's start lines of the claim."""
        lines = [line for line in self.registry if line["event"] == "start"]
        return [line for line in lines if line.get("claim") == self.claim.id]

    @cached_property
    def complete(self) -> list[Run]:
        """The runs of the claim that count, by seed, one for each seed."""
        by_seed: dict[int | None, Run] = {}
        for run in self.runs:
            if run.counts and run.header.get("claim") == self.claim.id:
                by_seed.setdefault(run.seed, run)
        return sorted(by_seed.values(), key=lambda run: run.seed or 0)

    @cached_property
    def level(self) -> float:
        """What p must lie below: alpha, or less where the claim planned several looks."""
        return look_level(self.claim.looks, ALPHA)

    @cached_property
    def result(self) -> Result:
        return one_sample([run.validations[-1].loss for run in self.complete], self.claim.target)

    @property
    def shown(self) -> bool:
        return self.result.n in self.claim.looks and self.result.p < self.level


def read_evidence(folder: Path) -> Evidence:
    """Read a record. Raises ClaimError without a claim; `unread` has whatever else fails."""
    claim = read_claim(folder / "claim.json")
    for name in ("steps", "batch_tokens"):
        if not is_count(claim.config.get(name)):
            raise ClaimError(
                f"{folder / 'claim.json'}: config must say how many steps of how many tokens, and "
                f"{name} is {claim.config.get(name)!r:.40}. Write the claim with record.py claim.")
    records = folder.resolve().parents[1]
    runs: list[Run] = []
    registry: list[dict[str, Any]] = []
    unread: list[Failure] = []
    mend = "restore the file as it was written"
    for path in sorted((folder / "runs").glob("*.jsonl")):
        try:
            if path.is_symlink() or not path.is_file():
                raise LogError("it is a link or no regular file")
            if path.name.startswith("registry"):
                registry += [line | {"file": path.name} for line in read_registry(path)]
            elif first_segment(path) == path:
                runs.append(read_log(path))
        except (Refused, OSError) as error:
            unread.append(Failure(f"unreadable: {error}", path, mend))
    try:
        source = read_source(records, claim.source_sha256)
    except ClaimError as error:
        source = None
        unread.append(Failure(str(error), source_path(records, claim.source_sha256), mend))
    return Evidence(folder, records, claim, runs, registry, source, unread)


def read_log(path: Path) -> Run:
    """A run whose header has all that the checks look up. Raises LogError."""
    run = read_run(path)
    wrong = [name for name, kind in NEEDED.items() if not isinstance(run.header.get(name), kind)]
    if not wrong and not is_count(run.header["config"].get("vocab_size")):
        wrong.append("vocab_size")
    if not wrong and not is_count(run.header["data"].get("val_tokens")):
        wrong.append("val_tokens")
    if wrong:
        raise LogError(f"{path}: {wrong[0]} in the header is missing or not what it must be")
    return run


def described(run: Run) -> dict[str, Any]:
    """What the header says of machine, data and checks."""
    header = run.header
    return {"ranks": header["world_size"], **run.env, **header["data"], **header["checks"]}


def is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**53
