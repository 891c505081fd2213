"""A record as it is read: its claim, its runs, their registry and its source.

A record is a folder `records/<track>/<date>_<name>` with claim.json, runs/*.jsonl, and the pages
that `scripts/record.py make` writes from these: record.json and README.md. Its source lies in
`records/sources`. `claims.checks` judges whether to believe a record.
"""

import json
import math
import re
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from claims.arms import ALPHA
from claims.provenance import commit_time
from claims.runlog import first_segment, read_run
from claims.runs import Run, current_names
from claims.sources import Source, read_source
from claims.stats import Result, look_level, one_sample
from runtime.claim import Claim, read_claim
from runtime.errors import ClaimError, LogError
from runtime.jsonl import plain
from runtime.registry import read_registry


class Track(NamedTuple):
    """The rules of a track, repeated here: a judge does not take the rules from the judged."""

    target: float  # nats per token
    val_tokens: int
    val_sha256: str  # how the hash of the validation tokens begins; "" where it is not known here
    overlap: float  # the largest share of validation documents that training may hold
    train_sha256: str  # like val_sha256; "" where the hash depends on the number of shards
    fixed: dict[str, Any]  # settings that no claim on the track may change
    in_time: bool  # the shortest time wins; otherwise the fewest tokens


# Tracks that rank by tokens bound a step at batch_tokens. Stages may use fewer, but on `steps`.
# So is what makes a model larger or gives the last validation more context. `small` and `tiny`
# leave windows of training steps, lookup tables, gates and scalars free.
TINY = {"vocab_size": 1024, "bos": 1023, "document_mask": True, "batch_tokens": 2048,
        "val_seq_len": 4096, "val_window": 320, "layers": "tiny", "dim": 256, "head_dim": 128,
        "mlp_ratio": 4}
SMALL = {"vocab_size": 2048, "bos": 2047, "document_mask": True, "batch_tokens": 6144,
         "val_seq_len": 4096, "val_window": 640, "layers": "small", "dim": 128, "head_dim": 32,
         "mlp_ratio": 4}
STEPS = {"vocab_size": 50257, "bos": 50256, "document_mask": False, "batch_tokens": 524_288,
         "seq_len": 1024, "val_seq_len": 1024, "val_window": 2560, "window_block": 0,
         "layers": "steps", "dim": 768, "head_dim": 128, "mlp_ratio": 4, "biases": True,
         "value_embeds": False, "smear": False, "skips": False, "backout": False,
         "x0_mixing": False, "attention_gates": False, "key_offset": False, "bigram_rows": 0,
         "xsa": False, "stages": "constant", "softcap": "rsqrt", "attention_scale": 0.12}
# The sources of the records of 2026-11-21 hold the mlp_ratio as a number, and their settings give
# the last window in blocks. Only these two may lack what later became a setting.
FIRST_SOURCES = {"706e244f84b2d81dd40d8cea885e720426aa76d9b7f041e776612e828e590cde",
                 "a8b6f28ab30cae0afadf6a9165c283aada5695b11cf8719da84020a457c73fd7"}
FIRST_TINY = TINY | {"window_block": 16, "final_window": 20}
del FIRST_TINY["mlp_ratio"], FIRST_TINY["val_window"]
TRACKS = {
    "small": Track(3.2, 262_144, "be27130d408f4ce8", 0.02, "731d5f2bab729778", SMALL, False),
    "tiny": Track(3.39, 262_144, "61a7bae6fab302b9", 0.02, "77e6e4d2acaa19c3", TINY, False),
    "short": Track(3.28, 10_485_760, "", 0.01, "", {}, True),
    "medium": Track(2.92, 10_485_760, "", 0.01, "", {}, True),
    "steps": Track(3.28, 10_485_760, "", 0.01, "", STEPS, False),
}


FIRST_LOGS = "2026-11-23"  # claims before this day may be of schema 1, with logs of schema 1 and 2


@dataclass(frozen=True)
class Evidence:
    """A record, all of it readable."""

    folder: Path
    claim: Claim
    track: Track
    runs: list[Run]
    registry: list[dict[str, Any]]
    source: Source

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The claimed configuration, by today's names of settings."""
        return current_names(self.claim.config)

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """The registry's start lines of the claim."""
        lines = [line for line in self.registry if line["event"] == "start"]
        return [line for line in lines if line.get("claim") == self.claim.id]

    @cached_property
    def registered(self) -> dict[str, list[dict[str, Any]]]:
        """The registry's lines of each run."""
        lines: dict[str, list[dict[str, Any]]] = {}
        for line in self.registry:
            lines.setdefault(line["run_id"], []).append(line)
        return lines

    @cached_property
    def complete(self) -> list[Run]:
        """The runs of the claim that count, one for each seed, sorted by seed."""
        by_seed: dict[int, Run] = {}
        for run in self.runs:
            if run.counts and run.header.get("claim") == self.claim.id:
                by_seed.setdefault(run.seed or 0, run)
        return [by_seed[seed] for seed in sorted(by_seed)]

    @cached_property
    def committed(self) -> str | None:
        """When git first saw the claim; None where git cannot tell."""
        return commit_time(self.folder / "claim.json")

    @cached_property
    def level(self) -> float:
        """p must be below it: alpha, or less where the claim planned several looks."""
        return look_level(tuple(self.claim.looks), ALPHA)

    @cached_property
    def result(self) -> Result:
        return one_sample([run.validations[-1].loss for run in self.complete], self.claim.target)

    @property
    def median_ms(self) -> float:
        """Median training time in milliseconds."""
        return statistics.median([run.train_time_ms or 0.0 for run in self.complete] or [0.0])

    @property
    def tokens(self) -> int:
        """Training tokens of the longest run."""
        return max((run.steps[-1].tokens or 0 for run in self.complete if run.steps), default=0)

    @property
    def score(self) -> float:
        """What a new record must lower: milliseconds, or tokens on tracks where time is free."""
        return self.median_ms if self.track.in_time else self.tokens

    @cached_property
    def tier(self) -> str:
        """The hardware of all runs, such as `8 x 80 GB`; "mixed" if it differs."""
        tiers = {tier_of(run) for run in self.runs}
        return tiers.pop() if len(tiers) == 1 else "mixed"

    @property
    def contest(self) -> str:
        """A record beats the claims of its contest: times on one tier, tokens on any."""
        return self.tier if self.track.in_time else ""

    @property
    def shown(self) -> bool:
        return self.result.n in self.claim.looks and self.result.p < self.level


def is_memory(size: Any) -> bool:
    return type(size) in (int, float) and 0 < size < 2**20


def tier_of(run: Run) -> str:
    """Ranks and the memory of each one's GPU, or `CPU`; "mixed" if the ranks' memory differs.

    The first logs lack the memory. There the GPU's name may say it, else the name stands for it.
    """
    gpu = run.env.get("gpu")
    if gpu is None:
        return "CPU"
    sizes = run.env.get("gpu_memory_gib")
    named = re.search(r"(\d{1,4}) ?GB", str(gpu))
    if not sizes and named:
        sizes = [int(named[1])]
    # Cards are sold with multiples of 4 GB, of which torch sees up to 3.6 less.
    cards = {f"{4 * math.ceil(size / 4)} GB" for size in sizes or []} or {str(gpu)}
    if len(cards) > 1:
        return "mixed"
    return f"{run.header.get('world_size')} x {cards.pop()}"


def claim_text(claim: Claim) -> str:
    """What claim.json holds."""
    return json.dumps(plain(vars(claim)), indent=2) + "\n"


def read_evidence(folder: Path) -> Evidence:
    """The record in a folder. ClaimError or LogError names the first file that cannot be read."""
    for path in folder.rglob("*"):
        if path.name.lower() == ".git":
            raise ClaimError(f"{path}: a record has no git repository of its own. Remove it.")
    claim = read_claim(folder / "claim.json")
    if claim.track not in TRACKS:
        raise ClaimError(f"{folder}: track {claim.track!r} has no rules; use {', '.join(TRACKS)}")
    for name in ("steps", "batch_tokens", "seq_len", "vocab_size"):
        value = current_names(claim.config).get(name)
        if type(value) is not int or not 0 < value < 2**53:
            raise ClaimError(f"{folder / 'claim.json'}: {name} in config must be a positive whole "
                             f"number, not {value!r:.40}. Write the claim with record.py claim.")
    runs: list[Run] = []
    registry: list[dict[str, Any]] = []
    for path in sorted((folder / "runs").glob("*.jsonl")):
        if path.name.startswith("registry"):
            registry += read_registry(path)
        elif first_segment(path) == path:
            run = read_run(path)
            for name in ("data", "checks", "config"):
                if not isinstance(run.header.get(name), dict):
                    raise LogError(f"{path}: the header must have {name}, an object")
            sizes = run.env.get("gpu_memory_gib", [])
            if not isinstance(sizes, list) or not all(map(is_memory, sizes)):
                raise LogError(f"{path}: gpu_memory_gib must be a list of GiB, one for each rank, "
                               f"not {sizes!r:.40}. Restore the log.")
            runs.append(run)
    source = read_source(records_of(folder), claim.source_sha256)
    return Evidence(folder, claim, TRACKS[claim.track], runs, registry, source)


def records_of(folder: Path) -> Path:
    """The folder of all records and of their sources."""
    return folder.resolve().parents[1]

