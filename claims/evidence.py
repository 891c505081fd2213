"""What stands behind a record, and every reason not to believe it. Nothing here trusts what the record says of itself.

A record folder holds claim.json, runs/*.jsonl with their registry.jsonl, source/ as it was hashed, and what
`scripts/record.py make` derived from these: record.json and README.md.
"""

import hashlib
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from runtime.claim import Claim, ClaimError, read_claim
from runtime.log import REGISTERED, config_hash, source_files, source_hash
from runtime.registry import RegistryError, read_registry
from claims.runlog import LogError, Run, Step, Validation, read_run
from claims.stats import Result, look_level, one_sample


class Track(NamedTuple):
    """The rules of a track. They stand here as well as in the trainer: a judge does not take them from the judged."""

    target: float  # nats per token
    val_tokens: int
    val_sha256: str  # how the hash of the validation tokens begins; empty: not known here
    overlap: float  # most that validation documents may share with training: what the corpus itself holds
    train_sha256: str  # the same of the training tokens; empty: depends on how many shards are used
    fixed: dict[str, Any]  # settings that every claim on the track has
    in_time: bool  # the record is the shortest time; else the fewest steps, which are the same on every machine


TINY = {"vocab_size": 1024, "batch_tokens": 2048}  # where steps count, what one step may see
STEPS = {"vocab_size": 50257, "batch_tokens": 524_288, "sequence": 1024, "layers": "steps", "dim": 768}
TRACKS = {
    "tiny": Track(3.39, 262_144, "61a7bae6fab302b9", 0.02, "77e6e4d2acaa19c3", TINY, in_time=False),
    "short": Track(3.28, 10_485_760, "", 0.01, "", {}, in_time=True),
    "medium": Track(2.92, 10_485_760, "", 0.01, "", {}, in_time=True),
    "steps": Track(3.28, 10_485_760, "", 0.01, "", STEPS, in_time=False),
}
ALPHA = 0.01
FILES = {"claim.json", "record.json", "README.md", "NOTES.md", "runs", "source"}  # of a record; NOTES.md is free text
PHASES = {"setup": False, "compile": False, "warmup": False, "train": True, "validate": False, "checkpoint": True,
          "lost": True}  # fmt: skip
MOST_UNACCOUNTED = 0.01  # of the training time may lie between the phases of a run, in no entry of its ledger,
SLACK_MS = 50  # and as much at each validation: a line of the log that is forced to the disk
LONG_VALIDATION = 4.0  # times the median of its run; longer, something else was done in it
LEAST_FIRST_LOSS = 0.99  # of log(vocabulary), at step 0: a model that has learned already comes below
HEADER = {"data": dict, "checks": dict, "config": dict, "world_size": int}  # of a log, beside what every reader needs
FORBIDDEN = re.compile(
    r"coordinate_descent_tuning|max[-_]autotune|torchinductor_\w|inductor\.config\.\w+\s*=[^=]|inductor import config"
    r"|torch\.compile\((?:[^()]|\([^()]*\))*?\b(options|mode)\s*=", re.IGNORECASE
)
ALIKE = ("torch", "dtype", "compiled", "gpu", "gpu_count")  # of all runs of a record
LIFE = re.compile("start( (end )?resume)*( end)?")  # of a run, as its lines in the registry tell it
HARMLESS = ("cache", "deterministic")  # compiler settings that make nothing that is timed faster
ANEW = "make all runs of the claim again, under a new claim with other seeds"
AS_CLAIMED = "make the run again with what was claimed, or claim what was run"


class Failure(NamedTuple):
    what: str
    where: Path
    mend: str


@dataclass(frozen=True)
class Evidence:
    """A record folder as it was read; `unread` names the files that could not be."""

    folder: Path
    claim: Claim
    runs: list[Run]
    registry: list[dict[str, Any]]
    unread: list[Failure]

    @cached_property
    def claim_id(self) -> str:
        return self.claim.id

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """The registry's lines of runs that were started under the claim."""
        return [line for line in self.registry if line["event"] == "start" and line.get("claim") == self.claim_id]

    @cached_property
    def complete(self) -> list[Run]:
        """The finished runs of the claim, one a seed, by seed."""
        ours = [run for run in self.runs if run.complete and run.header.get("claim") == self.claim_id]
        return sorted({run.seed: run for run in reversed(ours)}.values(), key=lambda run: run.seed or 0)

    @cached_property
    def level(self) -> float:
        """What p must lie below: alpha, or less where the claim planned several looks."""
        return look_level(self.claim.looks, ALPHA)

    @property
    def losses(self) -> list[float]:
        return [run.validations[-1].loss for run in self.complete]

    @cached_property
    def result(self) -> Result:
        return one_sample(self.losses, self.claim.target)

    @property
    def shown(self) -> bool:
        return self.result.n in self.claim.looks and self.result.p < self.level


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_evidence(folder: Path) -> Evidence:
    """Read a record folder. Raises ClaimError without a claim; whatever else cannot be read is a failure later."""
    claim, runs, registry, unread = read_claim(folder / "claim.json"), [], [], []
    steps, batch_tokens = claim.config.get("steps"), claim.config.get("batch_tokens", 1)
    if not (is_count(steps) and is_count(batch_tokens)):
        raise ClaimError(f"{folder / 'claim.json'}: config must say how many steps of how many tokens, not "
                         f"{steps!r:.40} of {batch_tokens!r:.40}; write it with record.py claim")
    logs = sorted((folder / "runs").glob("*.jsonl")) if (folder / "runs").is_dir() else []
    for path in logs:
        try:
            if path.is_symlink() or not path.is_file():
                raise LogError("it is a link or no regular file")
            if path.name.startswith("registry"):
                registry += [entry | {"file": path.name} for entry in read_registry(path)]
            else:
                runs.append(read_log(path))
        except (LogError, RegistryError, OSError) as error:
            unread.append(Failure(f"unreadable: {error}", path, "restore the file as the run wrote it"))
    return Evidence(folder, claim, runs, registry, unread)


def read_log(path: Path) -> Run:
    """A run in whose header all is there that a record looks up. Raises LogError."""
    run = read_run(path)
    for name, kind in HEADER.items():
        if not isinstance(run.header.get(name), kind):
            raise LogError(f"{path}: {name} in the header must be a {kind.__name__}, not {run.header.get(name)!r:.80}")
    for part, name in (("config", "vocab_size"), ("data", "val_tokens")):
        if not is_count(count := run.header[part].get(name)):
            raise LogError(f"{path}: {name} in the header must be a number of tokens, not {count!r:.80}")
    _ = run.steps  # read now, as long as an error is one of this file
    return run


def is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**53


def find_failures(evidence: Evidence) -> list[Failure]:
    """Everything that speaks against the record, derived from claim, logs, registry and source."""
    return evidence.unread + [failure for check in CHECKS for failure in check(evidence)]


def check_files(evidence: Evidence) -> Iterator[Failure]:
    """The folder holds what a record holds, as plain files."""
    expected = {evidence.folder / name for name in FILES}
    expected |= {run.path for run in evidence.runs} | {failure.where for failure in evidence.unread}
    expected |= {path for source in source_files(evidence.folder / "source") for path in (source, *source.parents)}
    for path in sorted(evidence.folder.rglob("*")):
        if path.is_symlink() or (path not in expected and not (path.match("runs/registry*.jsonl") or path.is_dir())):
            yield Failure("unexpected file", path, "take it out: a record holds what can be checked")


# ---- The claim and its runs


def check_claim(evidence: Evidence) -> Iterator[Failure]:
    """The claim follows the rules of its track and was there before its runs."""
    claim, where = evidence.claim, evidence.folder / "claim.json"
    track = TRACKS.get(claim.track)
    if track is None:
        yield Failure(f"track {claim.track!r} has no rules", where, f"claim for one of {', '.join(TRACKS)}")
    elif (claim.target, claim.alpha) != (track.target, ALPHA):
        yield Failure(f"target {claim.target} at alpha {claim.alpha}, not {track.target} at {ALPHA}", where,
                      "claim for the target of the track")
    for name, value in ({"track": claim.track} | track.fixed if track else {}).items():
        if claim.config.get(name) != value:
            yield Failure(f"{name} is {claim.config.get(name)!r}, fixed at {value!r} on this track", where,
                          "claim with the track's own value")
    if config_hash(claim.config) != claim.config_sha256:
        yield Failure("config_sha256 is not the hash of config", where, "write the claim with record.py claim")
    for entry in evidence.starts:
        if entry["time"] < claim.created:
            yield Failure(f"run {entry['run_id']} started {entry['time']}, before the claim of {claim.created}", where,
                          "make new runs, with other seeds, under a claim written before them")


def check_runs(evidence: Evidence) -> Iterator[Failure]:
    """Each run that was started under the claim is there, once and finished; no others are."""
    claim, folder = evidence.claim, evidence.folder / "runs"
    present = {run.run_id for run in evidence.runs}
    for entry in evidence.starts:
        if entry["run_id"] not in present:
            yield Failure(f"missing: run {entry['run_id']} was started under the claim", folder,
                          f"add its log, whatever its loss; if that is lost, {ANEW}")
    for run in evidence.runs:
        if run.unfinished:
            yield Failure(f"unfinished: {run.unfinished}", run.path, ANEW)
        if run.header.get("claim") != evidence.claim_id:
            yield Failure("extra: the run was not started under this claim", run.path,
                          f"take it out; a run cannot be claimed afterwards: {ANEW}")
        elif run.seed not in claim.seeds:
            yield Failure(f"extra: seed {run.seed} was not claimed", run.path, ANEW)
    missing = sorted(set(claim.seeds) - {run.seed for run in evidence.runs})
    if len(evidence.complete) not in claim.looks:
        yield Failure(f"missing: seeds {missing} have no run, and {len(evidence.complete)} runs are no planned look",
                      folder, f"make them, up to {' or '.join(map(str, claim.looks))} runs")


def check_copies(evidence: Evidence) -> Iterator[Failure]:
    """No run counts twice: neither by its id, nor by its seed, nor by what it went through."""
    kinds: dict[str, Callable[[Run], Any]] = {
        "run id": lambda run: run.run_id,
        "seed": lambda run: run.seed,
        "losses": lambda run: tuple(run.losses) + tuple(step.train_loss for step in run.steps),
    }
    for kind, key in kinds.items():
        first: dict[Any, Run] = {}
        for run in evidence.runs:
            if (other := first.setdefault(key(run), run)) is not run:
                yield Failure(f"duplicate: the same {kind} as {other.path.name}", run.path,
                              "take the copy out; if runs are missing then, make them all again under a new claim")


def check_registry(evidence: Evidence) -> Iterator[Failure]:
    """Each log is the one that its run's lines in the registry vouch for."""
    mend = "restore log and registry as the run wrote them"
    for run in evidence.runs:
        where, log = run.path, run.path.read_bytes()
        lines = [entry for entry in evidence.registry if entry["run_id"] == run.run_id]
        order = " ".join(entry["event"] for entry in lines)
        if lines and not LIFE.fullmatch(order):
            yield Failure(f"its lines in the registry are {order}, which no run writes", where, mend)
        start = next((entry for entry in lines if entry["event"] == "start"), {})
        resumes = [entry for entry in lines if entry["event"] == "resume"]
        end = lines[-1:] if order.endswith("end") else []
        if not start or start["sha256"] != run.header.get("registry_sha256"):
            yield Failure("its start is not in the registry", where, "add the registry.jsonl of the run's log folder")
        elif any(start.get(name) != run.header.get(name) for name in REGISTERED):
            yield Failure("its header differs from its line in the registry", where, mend)
        if run.complete and not end:
            yield Failure("its end is not in the registry", where, "add the registry.jsonl as it was after the run")
        if not all(vouches(entry, log) for entry in resumes + end):
            yield Failure("edited: the log is not the one whose hash the run registered", where, mend)
        elif last_by_length(resumes) != [resume.registry_sha256 for resume in run.resumes]:
            yield Failure(f"{len(resumes)} resumes in the registry, {len(run.resumes)} others in the log", where, mend)


def vouches(entry: dict[str, Any], log: bytes) -> bool:
    """Whether a line of the registry has the hash of a log, or of as many of its first bytes as the line says."""
    size = entry.get("log_bytes", len(log))
    known = type(size) is int and 0 <= size <= len(log)
    return known and hashlib.sha256(log[:size]).hexdigest() == entry.get("log_sha256")


def last_by_length(resumes: list[dict[str, Any]]) -> list[str]:
    """A process that was killed before it wrote more than its line to the registry left the log as it found it."""
    return list({entry.get("log_bytes"): entry["sha256"] for entry in resumes}.values())


def check_resumes(evidence: Evidence) -> Iterator[Failure]:
    """A run that was resumed is the run that it was: what it did twice came out the same, so nothing was chosen."""
    for run in evidence.runs:
        final = losses_by_step(run.steps, run.validations)
        for resume in run.resumes:
            if resume.differences:
                yield Failure(f"resumed at step {resume.from_step} with differences: {resume.differences!r:.300}",
                              run.path, ANEW)
            before = losses_by_step(resume.redone, resume.revalidated)
            if other := [which for which, loss in before.items() if final.get(which, loss) != loss]:
                yield Failure(f"{other[0]} had loss {before[other[0]]} before the resume at {resume.from_step} and "
                              f"{final[other[0]]} after it", run.path, ANEW)


def losses_by_step(steps: list[Step], validations: list[Validation]) -> dict[str, str]:
    """Losses as text: one that is nan equals itself."""
    losses = {f"step {step.step}": str(step.train_loss) for step in steps}
    return losses | {f"validation {validation.step}": validation.printed for validation in validations}


def check_seeds(evidence: Evidence) -> Iterator[Failure]:
    """No seed was tried before it was claimed: with one seed a run repeats itself."""
    claim = evidence.claim
    starts = [entry for entry in evidence.registry if entry["event"] == "start" and entry.get("seed") in claim.seeds]
    claimed = {entry["seed"]: entry["time"] for entry in starts if entry.get("claim") == evidence.claim_id}
    for entry in starts:  # with whatever settings: some change nothing that matters
        other = entry.get("claim") != evidence.claim_id and entry.get("track") == claim.track
        if other and entry["time"] <= claimed.get(entry["seed"], entry["time"]):
            yield Failure(f"seed {entry['seed']} was run by {entry['run_id']} outside the claim",
                          evidence.folder / "runs" / entry["file"], "claim seeds that nobody has tried")


# ---- What was run


def check_source(evidence: Evidence) -> Iterator[Failure]:
    """One source and one configuration, the claimed ones, without forbidden settings of the compiler."""
    claim, folder = evidence.claim, evidence.folder / "source"
    if source_hash(folder) != claim.source_sha256:
        what = f"source/ is not the claimed {claim.source_sha256[:12]}"
        yield Failure(what, folder, "copy logs/sources/<sha256> there as it is")
    for run in evidence.runs:
        for name in ("source_sha256", "config_sha256", "track", "target"):
            if run.header.get(name) != getattr(claim, name):
                yield Failure(f"{name} {run.header.get(name)!s:.12}, not the claimed {getattr(claim, name)!s:.12}",
                              run.path, AS_CLAIMED)
        if config_hash(run.header["config"]) != run.header.get("config_sha256"):
            yield Failure("config_sha256 is not the hash of config", run.path, "restore the log as it was")
        if run.complete and run.total_steps != claim.config["steps"]:
            yield Failure(f"{run.total_steps} steps, not the claimed {claim.config['steps']}", run.path, AS_CLAIMED)
        found = run.env.get("compile_flags")
        found = found if isinstance(found, list) else ["unknown"]
        flags = [line for line in map(str, found) if not any(word in line.partition("=")[0] for word in HARMLESS)]
        if claim.track != "medium" and flags:
            yield Failure(f"compiler settings {', '.join(flags)}", run.path, "the track allows the defaults alone")
    kinds = {name: {str(run.env.get(name)) for run in evidence.runs} for name in ALIKE}
    kinds["world_size"] = {str(run.header["world_size"]) for run in evidence.runs}
    for name, values in kinds.items():
        if len(values) > 1:
            yield Failure(f"{name} differs between runs: {', '.join(sorted(values))}", evidence.folder / "runs",
                          "make all runs alike, under a new claim")
    for path in sorted(path for path in folder.rglob("*.py") if path.is_file()):
        if claim.track != "medium" and (setting := FORBIDDEN.search(path.read_text(errors="replace"))):
            yield Failure(f"forbidden compiler setting {setting[0]!r}", path, "leave it out and run again")


def check_data(evidence: Evidence) -> Iterator[Failure]:
    """The validation tokens are the track's and none of them were trained on."""
    if (track := TRACKS.get(evidence.claim.track)) is None:
        return  # as check_claim says
    for run in evidence.runs:
        data, overlap = run.header["data"], run.header["checks"].get("overlap")
        if data["val_tokens"] != track.val_tokens:
            yield Failure(f"validated on {data['val_tokens']} tokens, not {track.val_tokens}", run.path,
                          "run with the track's --val-tokens")
        for name, kind in (("val_sha256", "validation"), ("train_sha256", "training")):
            if not str(data.get(name)).startswith(known := getattr(track, name)):
                yield Failure(f"{kind} tokens {data.get(name)!s:.16}, not {known}", run.path, "run on the track's data")
        if type(overlap) not in (int, float) or not 0 <= overlap <= track.overlap:
            yield Failure(f"validation documents in training: {overlap}, at most {track.overlap}", run.path,
                          "run with training shards that hold no validation documents")
    for name in ("train_sha256", "val_sha256"):
        if len(hashes := {str(run.header["data"].get(name)) for run in evidence.runs}) > 1:
            yield Failure(f"{len(hashes)} different {name} in one record", evidence.folder / "runs",
                          "make all runs on the same data")


def check_checks(evidence: Evidence) -> Iterator[Failure]:
    """The trainer's own checks are there and were passed, and the model knew nothing at the first step."""
    for run in evidence.runs:
        for name in ("causality", "warmup_restored"):
            if (found := run.header["checks"].get(name)) is not True:
                yield Failure(f"check {name} is {found}, not true", run.path, "run with the check in place")
        ignorant = math.log(run.header["config"].get("vocab_size", 1))
        told = [loss for step, loss in run.losses if step == 0] + [step.train_loss for step in run.steps[:1]]
        known = [loss for loss in told if loss is not None]
        if run.complete and not (known and known[0] >= LEAST_FIRST_LOSS * ignorant):
            what = f"first loss {known[0] if known else 'unknown'}, of a model that knows nothing {ignorant:.2f}"
            yield Failure(what, run.path, "find what leaked out of the warm-up")


# ---- The clock


def check_ledger(evidence: Evidence) -> Iterator[Failure]:
    """Every step is on the clock, and nothing that the clock leaves out took longer than it should."""
    for run in evidence.runs:
        for what in ledger_failures(run, evidence.claim.config.get("batch_tokens", 1)):
            yield Failure(what, run.path, "do this work in a timed phase, or not at all, and run again")


def ledger_failures(run: Run, batch_tokens: int) -> Iterator[str]:
    """What is wrong with the phases of a run; of one that was finished, with all that its clock says."""
    for phase in run.phases:
        if PHASES.get(phase.name) is not phase.timed:
            yield f"untimed work: phase {phase.name!r} of {phase.ms:.0f} ms, timed: {phase.timed}"
    if run.unfinished:
        return
    total, timed = run.train_time_ms or 0.0, sum(phase.ms for phase in run.phases if phase.timed)
    if not abs(timed - total) <= 0.001 * total + 1:
        yield f"{timed:.0f} ms in timed phases, {total:.0f} ms in the last validation"
    yield from clock_failures(run)
    in_order = all(step.step == place for place, step in enumerate(run.steps, 1))
    if len(run.steps) != run.total_steps or not in_order:
        yield f"{len(run.steps)} of {run.total_steps} steps are in the log, in order"
    slack = MOST_UNACCOUNTED * total + SLACK_MS * len(run.validations)
    if not (lost := unaccounted_ms(run)) <= slack:
        yield f"untimed work: {lost:.0f} ms between the phases of training and validation"
    validations = [phase.ms for phase in run.phases if phase.name == "validate"]
    if len(validations) != len(run.validations):
        yield f"untimed work: {len(validations)} phases of validation for {len(run.validations)} losses"
    if not validations:
        return
    longest, median = max(validations), statistics.median(validations)
    if not longest <= total / ((run.total_steps or 1) * batch_tokens) * run.header["data"]["val_tokens"]:
        yield f"untimed work: a validation of {longest:.0f} ms, which takes more a token than a training step"
    if not longest <= LONG_VALIDATION * median:
        yield f"untimed work: a validation of {longest:.0f} ms, their median is {median:.0f}"


def clock_failures(run: Run) -> Iterator[str]:
    """Where the clock of a run that was resumed does not hold the work that was lost."""
    worked, charged = 0.0, accumulate(phase.ms if phase.timed else 0.0 for phase in run.phases)
    clocks = [clock for clock, phase in zip(charged, run.phases, strict=True) if phase.name == "lost"]
    if len(clocks) != sum(resume.stands for resume in run.resumes):
        yield f"untimed work: {len(clocks)} phases of lost work for {len(run.resumes)} resumes"
        return
    for resume in run.resumes:
        lost: list[Step | Validation] = [*resume.redone, *resume.revalidated]
        worked = max(worked, *(line.train_time_ms or 0.0 for line in lost), 0.0)
        if resume.stands and not (clock := clocks.pop(0)) + 1 >= worked:
            yield f"untimed work: the clock went from {worked:.0f} to {clock:.0f} ms at the resume"


def unaccounted_ms(run: Run) -> float:
    """Milliseconds that no phase holds, from the first training phase on, and from the next one after a resume."""
    if any(after.t_ms < before.t_ms for before, after in pairwise(run.phases)):
        return math.inf  # a clock that runs backwards accounts for nothing
    total, before = 0.0, None
    for phase in run.phases:
        if phase.name == "lost":
            before = None
        elif phase.name not in ("setup", "compile", "warmup"):
            total += 0.0 if before is None else max(phase.t_ms - phase.ms - before, 0.0)
            before = phase.t_ms
    return total


CHECKS = (
    check_files, check_claim, check_runs, check_copies, check_registry, check_resumes, check_seeds, check_source,
    check_data, check_checks, check_ledger,
)  # fmt: skip
