"""A record as it is read: its claim, its runs, their registry and its source.

A record is a folder `records/<track>/<date>_<name>` with claim.json, runs/*.jsonl, and the page
README.md that `scripts/record.py make` writes from these. Its source is in `records/sources`.
`claims.checks` judges whether to believe a record.
"""

import difflib
import json
import math
import os
import re
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from claims.arms import ALPHA, leave_out_repeats
from claims.logs import first_segment, read_runs
from claims.runs import NEW_SINCE, NEW_TOKENS, Run
from claims.stats import Result, less_above, moments, one_sample
from runtime.claim import Claim, check_rules, read_claim
from runtime.errors import LogError, Refused
from runtime.jsonl import plain, read_regular
from runtime.registry import MOST_REGISTRY_BYTES, REGISTRY, read_registry
from runtime.settings import flag
from runtime.source import digest

# ---- Sources

MOST_BYTES = 2**24  # sixty times the first sources; keeps a wrong file from filling the memory
# No part of a name begins with a dot: someone may write the files to a folder.
NAMED = re.compile(rb"file ((?:\w[\w.-]{0,80}/){0,9}\w[\w.-]{0,80}), ([0-9]{1,9}) bytes\n")
Source = dict[str, bytes]  # contents of its files, by name relative to the repository


def pack(source: Source) -> bytes:
    """The source as one text, which `unpack` reads."""
    parts = [f"source {digest(source)}\n".encode()]
    for name, content in sorted(source.items()):
        parts += [f"file {name}, {len(content)} bytes\n".encode(), content, b"\n"]
    return b"".join(parts)


def unpack(text: bytes) -> Source:
    """The source in a text. Refused for a text that `pack` does not write."""
    source: Source = {}
    named = NAMED.match(text, text.find(b"\n") + 1)
    while named:
        end = named.end() + int(named[2])
        source[named[1].decode()] = text[named.end() : end]
        named = NAMED.match(text, end + 1)  # after the newline behind the file
    if pack(source) != text:  # another hash or order, a file twice, bytes between files
        raise Refused("the stored source is not as record.py claim wrote it")
    return source


def source_path(records: Path, sha256: str) -> Path:
    return records / "sources" / f"{sha256[:12]}.txt"


def read_source(records: Path, sha256: str) -> Source:
    """The source with this hash. Refused where the file is missing, damaged or another."""
    path = source_path(records, sha256)
    try:
        source = unpack(read_regular(path, MOST_BYTES))
    except OSError as error:
        raise Refused(f"cannot read the source {path}: {error.strerror}") from None
    if digest(source) != sha256:
        raise Refused(f"{path} is not the source {sha256} but {digest(source)}")
    return source


def write_source(records: Path, source: Source) -> Path:
    """Store the source, unless it is there already."""
    path = source_path(records, digest(source))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pack(source))
    read_source(records, digest(source))  # a file that was there may be damaged
    return path


def difference(before: Source, after: Source) -> list[str]:
    """The lines of a unified diff from one source to another; none where they are equal."""
    lines: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        old = before.get(name, b"").decode(errors="replace").split("\n")
        new = after.get(name, b"").decode(errors="replace").split("\n")
        lines += difflib.unified_diff(old, new, name, name, lineterm="")
    return lines


# ---- Records


class Track(NamedTuple):
    """The rules of a track, repeated here: a judge does not take the rules from the judged."""

    target: float  # nats per token
    val_tokens: int
    val_sha256: str  # how the hash of the validation tokens begins; "": no run has logged it yet
    overlap: float  # the largest share of validation documents that training may hold
    train_sha256: str  # like val_sha256; "" where the hash depends on the number of shards
    fixed: dict[str, Any]  # settings of every claim on the track
    in_time: bool  # the shortest time wins; otherwise the fewest tokens
    baseline: str = ""  # the record whose loss on new tokens others must keep; "": none
    copied: int = 0  # validation tokens that end a pair seen earlier in their document; 0: unknown
    layer_params: int = 0  # the most parameters that the layers may have; 0: any number
    ranked: bool = True  # False: claims can be verified, but there is no board and no record


# Tracks that rank by tokens bound a step at batch_tokens. Stages may use fewer, but on `steps`.
# So is what makes a model larger or gives the last validation more context. `small` and `tiny`
# leave windows of training steps, lookup tables, gates and scalars free. Names cannot fix the size
# of the layers, as a source may change what a name means: LAYER_PARAMS is 1.1 times the default's.
VAL, TRAIN = "be27130d408f4ce8", "731d5f2bab729778"  # how the hashes of the prose begin
LAYER_PARAMS = 1_678_578
SMALL = {"vocab_size": 2048, "bos": 2047, "document_mask": True, "batch_tokens": 6144,
         "val_seq_len": 4096, "val_window": 640, "dim": 128, "head_dim": 32, "mlp_ratio": 4,
         "val_sha256": VAL}
TINY = SMALL | {"batch_tokens": 2048, "val_seq_len": 1024}
FINEWEB = {"vocab_size": 50257, "bos": 50256}
STEPS = {"vocab_size": 50257, "bos": 50256, "document_mask": False, "batch_tokens": 524_288,
         "seq_len": 1024, "val_seq_len": 1024, "val_window": 2560, "window_block": 0,
         "layers": "steps", "dim": 768, "head_dim": 128, "mlp_ratio": 4, "biases": True,
         "smear": False, "x0_mixing": False, "attention_gates": False, "key_offset": False,
         "bigram_rows": 0, "counted_ngrams": 0, "xsa": False, "stages": "constant",
         "softcap": "rsqrt", "attention_scale": 0.12}
# `copied` follows from the validation tokens and the length of their rows: `new_targets` in
# claims/questions.py counts the others.
TRACKS = {
    "small": Track(3.36, 262_144, VAL, 0.02, TRAIN, SMALL, False, baseline="2026-11-27_AdamWTuned",
                   copied=48_090, layer_params=LAYER_PARAMS),
    "tiny": Track(4.8, 16_384, VAL, 0.02, TRAIN, TINY, False, copied=2_907,
                  layer_params=LAYER_PARAMS, ranked=False),
    "short": Track(3.28, 10_485_760, "", 0.01, "", FINEWEB, True),
    "steps": Track(3.28, 10_485_760, "", 0.01, "", STEPS, False),
}  # fmt: skip
# The loss on new tokens must be shown to be less than so much above the baseline's: a model that
# only copies better than it has learned nothing. Not new tokens alone: one that gives no
# probability to any candidate of a copy gains 0.07 nats on them without training, and is ruined.
MOST_ABOVE = 0.01  # nats per token
LEAST_SD = 1 / 3  # of the last claim of the recipe; of ten runs each, 1 in 600 is below by chance


def departures(settings: dict[str, Any], rules: dict[str, Any]) -> dict[str, Any]:
    """What the rules fix, for each setting that is not so."""
    return {name: fixed for name, fixed in rules.items() if settings.get(name) != fixed}


def why_no_claim(config: dict[str, Any]) -> str | None:
    """Why runs with these settings can belong to no claim, with the fix; None if they can."""
    track = TRACKS[config["track"]]
    if not track.val_sha256:  # verify would fail after the runs
        return (f"{config['track']} has no val_sha256: add it in claims/record.py and train_gpt.py "
                f"first. A run with --val-sha256 0 prints it")  # fmt: skip
    if config.get("quick"):
        return "--quick: a claim validates on all tokens of its track. Leave --quick out"
    fixed = {"target": track.target, "val_tokens": track.val_tokens, **track.fixed}
    for name, value in departures(config, fixed).items():
        return (f"{flag(name)} {config.get(name)}: that of the track is {value}. Leave "
                f"{flag(name)} out")  # fmt: skip
    return None


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
        ours = [run for run in self.runs if run.counts and run.header.get("claim") == self.claim.id]
        return sorted(leave_out_repeats(ours)[0], key=lambda run: run.seed or 0)

    @cached_property
    def committed(self) -> str | None:
        """When git first saw the claim; None where git does not know."""
        return commit_time(self.folder / "claim.json")

    @cached_property
    def tried_before(self) -> "Tried":
        """What was tried before the claim's first run, as far as its registry and claims know."""
        first = min((line["time"] for line in self.starts), default=self.claim.created)
        others = [line for line in self.registry if line["event"] == "start"
                  and line.get("track") == self.claim.track and line["time"] < first
                  and line.get("claim") != self.claim.id]  # fmt: skip
        steps = {claim.config.get("steps") for claim in claims_before(self)}
        settings = {line.get("config_sha256") for line in others}
        return Tried(sorted(each for each in steps if isinstance(each, int)), len(others),
                     len(settings))  # fmt: skip

    @cached_property
    def result(self) -> Result:
        return one_sample([run.validations[-1].loss for run in self.complete], self.claim.target)

    @property
    def median_ms(self) -> float:
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
    def hardware(self) -> str:
        """`8 x NVIDIA H100 80GB HBM3`, `1 x AMD EPYC, threads: 2`; "mixed" if the runs differ."""
        found = set()
        for run in self.runs:
            ranks, processor = run.header.get("world_size"), run.env.get("gpu")
            if processor is None:
                processor = f"{run.env.get('cpu')}, threads: {run.env.get('threads')}"
            found.add(f"{ranks} x {processor}")
        return found.pop() if len(found) == 1 else "mixed"

    @property
    def is_older(self) -> bool:
        """Whether it was made before the present measure of new tokens: no run has logged that."""
        probes = [run.end.get("probes") for run in self.runs]
        logged = any(isinstance(each, dict) and NEW_TOKENS[0] in each for each in probes)
        return self.claim.created < NEW_SINCE and not logged

    @property
    def is_baseline(self) -> bool:
        """Whether it is the claim with which the others of its track are compared."""
        baseline = read_baseline(self.claim.track, self.track.baseline)
        return baseline is not None and baseline.claim.id == self.claim.id

    @cached_property
    def new_tokens(self) -> "NewTokens | None":
        """The second condition; None where there is none: other tracks, and the baseline itself."""
        baseline = read_baseline(self.claim.track, self.track.baseline)
        if baseline is None or baseline.claim.id == self.claim.id:
            return None
        measure = NEW_TOKENS[1 if self.is_older or baseline.is_older else 0]
        ours, others = ([run.probe(measure) for run in one.complete] for one in (self, baseline))
        p = less_above(MOST_ABOVE, ours, others)
        return NewTokens(measure, moments(ours)[0], moments(others)[0], p)

    @property
    def below(self) -> bool:
        """The first condition: the mean loss on all validation tokens is below the target."""
        return self.result.n == self.claim.n and self.result.p < ALPHA

    @property
    def shown(self) -> bool:
        return self.below and (self.new_tokens is None or self.new_tokens.shown)


    @cached_property
    def narrow(self) -> str | None:
        """A sentence if the seed may do next to nothing: a spread far below its recipe's before."""
        recipe = self.claim.config.get("recipe")
        for before in reversed(claims_before(self)):
            folder = self.folder.resolve().parent / f"{before.created[:10]}_{before.name}"
            if before.config.get("recipe") == recipe and (folder / "runs").is_dir():
                ratio = self.result.sd / (read_evidence(folder).result.sd or math.nan)
                if ratio < LEAST_SD:
                    return (f"warning: the standard deviation is {ratio:.2g} of that of "
                            f"{before.name}: find in the diff what the seed still changes")
                return None
        return None


class Tried(NamedTuple):
    """What came before a claim on its track."""

    steps: list[int]  # numbers of steps of older claims
    runs: int  # other runs in its log folder
    settings: int  # how many configurations these had


class NewTokens(NamedTuple):
    """The loss on new tokens beside that of the baseline; the older measure if one is older."""

    measure: str
    mean: float  # nats per token
    baseline: float
    p: float  # of "less than MOST_ABOVE above the baseline"

    @property
    def shown(self) -> bool:
        return self.p < ALPHA


@cache
def read_baseline(track: str, name: str) -> Evidence | None:
    """The track's baseline among the records of this checkout; None if the track has none."""
    return read_evidence(ROOT / "records" / track / name) if name else None


def claim_text(claim: Claim) -> str:
    """What claim.json holds."""
    return json.dumps(plain(vars(claim)), indent=2) + "\n"


def read_evidence(folder: Path) -> Evidence:
    """The record in a folder. Refused, LogError or OSError names a file that cannot be read."""
    require_regular(folder)
    claim = read_claim(folder / "claim.json")
    if claim.track not in TRACKS:
        raise Refused(f"{folder}: track {claim.track!r} has no rules; use {', '.join(TRACKS)}")
    for name in ("steps", "batch_tokens", "seq_len", "vocab_size"):
        value = claim.config.get(name)
        if type(value) is not int or not 0 < value < 2**53:
            raise Refused(f"{folder / 'claim.json'}: {name} in config must be a positive whole "
                          f"number, not {value!r:.40}. Write the claim with record.py claim.")
    runs: list[Run] = []
    registry: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / "runs").glob("*.jsonl")):
        if path.name.startswith("registry"):
            registry |= {line["sha256"]: line for line in read_registry(path)}  # may share a past
        elif first_segment(path) == path:
            run = read_runs(path)[0]
            for name in ("data", "checks", "config"):
                if not isinstance(run.header.get(name), dict):
                    raise LogError(f"{path}: the header must have {name}, an object")
            runs.append(run)
    source = read_source(records_of(folder), claim.source_sha256)
    return Evidence(folder, claim, TRACKS[claim.track], runs, [*registry.values()], source)


def require_regular(folder: Path) -> None:
    """Refused for a link, which a write would follow, or a pipe, for which a read would wait."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise Refused(f"{path} is a link or no regular file: a record has none. Take it out.")


def records_of(folder: Path) -> Path:
    """The folder of all records and of their sources."""
    return folder.resolve().parents[1]


def claims_before(evidence: Evidence) -> list[Claim]:
    """The claims on its track that were written before it, by their own dates, oldest first."""
    claims = map(read_claim, evidence.folder.resolve().parent.glob("*/claim.json"))
    earlier = [claim for claim in claims if claim.created < evidence.claim.created]
    return sorted(earlier, key=lambda claim: (claim.created, claim.name))


def claims_of_its_seeds(evidence: Evidence) -> Iterator[tuple[Claim, list[int]]]:
    """Claims on its track that share seeds and are no younger: by git, else by their own dates."""
    claim, first = evidence.claim, evidence.committed or evidence.claim.created
    for path in sorted(evidence.folder.resolve().parent.glob("*/claim.json")):
        other = read_claim(path)
        seeds = sorted({*other.seeds} & {*claim.seeds})
        if seeds and other.id != claim.id and (commit_time(path) or other.created) <= first:
            yield other, seeds


# ---- The history

ROOT = Path(__file__).resolve().parents[1]
# git may run commands and fetch objects that a repository's own files name.
NO_FETCH = {"GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1"}


def commit_time(path: Path) -> str | None:
    """ISO time, UTC, of the first commit of this checkout that holds a file with this content.

    None where git does not know: for a file outside this checkout, before a commit, or where the
    history begins with the file, as in a shallow clone.
    """
    if not path.resolve().is_relative_to(ROOT):
        return None  # a repository that came with the record could make git run its commands
    blob = git(ROOT, "hash-object", "--no-filters", str(path.resolve()))
    # Another content at the same path, committed earlier, says nothing of this one.
    log = ["log", "--no-show-signature", "--format=%ct %P", f"--find-object={blob}"]
    commits = git(ROOT, *log, "--", ":(top,glob)**/claim.json").splitlines()
    first, _, parents = commits[-1].partition(" ") if commits else ("", "", "")
    return datetime.fromtimestamp(int(first), UTC).isoformat() if parents else None


def git(root: Path, *words: str) -> str:
    """The output of a git command in a checkout of ours; nothing if it fails."""
    command, env = ["git", "-C", str(root), *words], os.environ | NO_FETCH
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    except OSError:  # no git
        return ""
    return done.stdout.strip()


# ---- Making a record


def write_claim(records: Path, claim: Claim, source: Source) -> Path:
    """Write the claim, and its source unless it is stored already. Returns the record's folder."""
    check_rules(claim, claim.name)  # before anything is written
    folder = records / claim.track / f"{claim.created[:10]}_{claim.name}"
    folder.mkdir(parents=True)  # FileExistsError: a claim is written once
    (folder / "claim.json").write_text(claim_text(claim))
    write_source(records, source)
    return folder


def has_runs(logs: Path, folder: Path) -> bool:
    """Whether runs of the claim in `folder` were started in this log folder."""
    claim = read_claim(folder / "claim.json")
    lines = read_registry(logs / REGISTRY) if (logs / REGISTRY).is_file() else []
    return any(line.get("claim") == claim.id for line in lines)


def copy_runs(folder: Path, folders: list[Path]) -> None:
    """Copy the logs of all runs of the claim in `folder`, and each log folder's registry.

    Every run that was started is copied, however it ended. Refused for a record that holds a link.
    """
    require_regular(folder)
    claim = read_claim(folder / "claim.json")
    for number, logs in enumerate(folders, 1):
        if not (logs / REGISTRY).is_file():
            raise Refused(f"{logs} has no {REGISTRY}: give the --log-dir of the claim's runs.")
        for line in read_registry(logs / REGISTRY):
            if line["event"] == "start" and line.get("claim") == claim.id:
                for segment in logs.glob(f"{line['run_id']}.*jsonl"):  # ID.jsonl, ID.2.jsonl
                    copy(segment, folder / "runs" / segment.name)
        name = REGISTRY if number == 1 else f"registry_{number}.jsonl"
        copy(logs / REGISTRY, folder / "runs" / name)


def copy(original: Path, path: Path) -> None:
    """Copy a file. An older copy is replaced only by a file that begins with it."""
    content = read_regular(original, MOST_REGISTRY_BYTES)
    if path.exists() and not content.startswith(path.read_bytes()):
        raise Refused(f"{original} does not begin with {path}, and only a file that has grown is "
                      "copied again. Name the log folders in the same order, or remove the copy.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
