"""Every reason not to believe a record.

The checks are for an optimist, whose source and habits want the number, and compare claim, logs,
registry and source with one another and with the rules of the track. docs/rules.md says what
they find and what they cannot find. The tables at the end list them.
"""

import math
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from claims import record
from claims.arms import ALPHA, leave_out_repeats
from claims.record import Evidence, departures
from claims.runs import Phase, Run
from runtime.claim import SHA256, forbidden_flags
from runtime.log import REGISTERED, config_hash

# What may run off the clock, and how long each time, in ms. On two busy cores compilation took five
# minutes; the probe may score two texts, each like a validation.
STARTUP = {"setup": 3_600_000, "compile": 3_600_000, "warmup": 3_600_000}
AT_END = {"check": 60_000, "probe": 60_000, "keep": 3_600_000, "sample": 60_000}
TIMED = {"train", "checkpoint", "lost"}  # lost: steps that a resume repeats
MOST_UNACCOUNTED = 0.01  # fraction of the training time that may be in no phase
SLACK_MS = 50  # for each validation, whose log line waits for the disk
# The trainer's checks of the trained model. Of honest models the first is within 6e-7 of 1, in
# bf16 too; outputs that pad the vocabulary lower it, which harms only the run itself.
TRAINED = {"normalized": 1.0001, "causality_trained": 1e-3, "additive": 1e-3, "memory": 1e-3}
ASKS_FOR_MEMORY = "runtime/questions.py"  # a source without this file makes no check of it
MOST_OFF_MEAN = 1e-3  # nats; of a compiled validation in bf16 and the eager probe: 7e-5
LEAST_FIRST_LOSS = 0.99  # of log(vocabulary): a model that starts lower has learned already
MOST_DELAY = timedelta(days=1)  # between writing a claim and committing it
MOST_SKIPPED = 0.25  # fraction of the steps; the most of 210 runs of the records is 0.06
ALIKE = ("torch", "dtype", "compiled", "cpu", "gpu", "gpu_count", "attention", "head", "ranks",
         "params", "train_sha256", "val_sha256")  # fmt: skip
FORBIDDEN = re.compile(  # compiler settings
    r"coordinate_descent_tuning|max[-_]autotune|torchinductor_(?!cache_dir|compile_threads)\w"
    r"|inductor\.config\.\w+\s*=[^=]|inductor import config"
    r"|torch\.compile\((?:[^()]|\([^()]*\))*?\b(options|mode)\s*=",
    re.IGNORECASE,
)


class Failure(NamedTuple):
    """A reason not to believe a record."""

    what: str
    where: Path
    fix: str


def find_failures(evidence: Evidence) -> list[Failure]:
    """Every reason not to believe the record."""
    failures = []
    for check, fix in OF_A_RECORD:
        failures += [Failure(what, evidence.folder, fix) for what in check(evidence)]
    for check_run, fix in OF_A_RUN:
        for run in evidence.runs:
            failures += [Failure(what, run.path, fix) for what in check_run(run, evidence)]
    return failures


# ---- The record


def check_claim(evidence: Evidence) -> Iterator[str]:
    """The claim follows the rules of its track."""
    claim, track = evidence.claim, evidence.track
    name, at = f"{claim.created[:10]}_{claim.name}", evidence.folder.resolve()
    if (at.parent.name, at.name) != (claim.track, name):
        yield f"its folder is {at.parent.name}/{at.name}, not {claim.track}/{name}"
    if (claim.target, claim.alpha) != (track.target, ALPHA):
        yield f"target {claim.target} at alpha {claim.alpha}, not {track.target} at {ALPHA}"
    if not track.val_sha256:
        yield f"{claim.track} has no val_sha256: add it in claims/record.py and train_gpt.py first"
    for name, fixed in departures(claim.config, {"track": claim.track, **track.fixed}).items():
        yield f"{name} is {claim.config.get(name)!r}, fixed at {fixed!r} on this track"
    if config_hash(claim.config) != claim.config_sha256:
        yield "config_sha256 is not the hash of config"


def check_history(evidence: Evidence) -> Iterator[str]:
    """Where git knows: the claim was committed within a day, and before its runs."""
    committed, created = evidence.committed, evidence.claim.created
    if committed is None:
        return
    if created < (datetime.fromisoformat(committed) - MOST_DELAY).isoformat():
        yield f"the claim says that it was written at {created}, but was committed at {committed}"
    first = min((line["time"] for line in evidence.starts), default=committed)
    if first < committed:
        yield f"a run started {first}, before the claim was committed, {committed}"


def check_started(evidence: Evidence) -> Iterator[str]:
    """Every run that the registry knows of the claim is here, and started after the claim."""
    claim = evidence.claim
    present = {run.run_id for run in evidence.runs}
    for line in evidence.starts:
        if line["run_id"] not in present:
            yield f"missing: run {line['run_id']} was started under the claim"
        if line["time"] < claim.created:
            yield f"run {line['run_id']} started {line['time']}, before the claim, {claim.created}"
    if len(evidence.complete) != claim.n:
        seeds = sorted(set(claim.seeds) - {run.seed for run in evidence.runs})
        yield (f"missing: seeds {seeds} have no run, and {len(evidence.complete)} of {claim.n} "
               "runs count")


def check_seeds(evidence: Evidence) -> Iterator[str]:
    """No seed was tried before its claimed run, also not with settings that change nothing."""
    starts = [line for line in evidence.registry if line["event"] == "start"]
    ours = {line.get("seed"): line["time"] for line in starts
            if line.get("claim") == evidence.claim.id}  # fmt: skip
    for line in starts:
        tried = line["time"] <= ours.get(line.get("seed"), "")  # times sort as text
        if tried and line.get("claim") != evidence.claim.id:
            yield f"seed {line['seed']} was run by {line['run_id']} outside the claim"
    for other, seeds in record.claims_of_its_seeds(evidence):
        yield f"seeds {seeds} were claimed before, by {other.name}"


def check_alike(evidence: Evidence) -> Iterator[str]:
    """All runs were made on one kind of machine and on the same data."""
    facts = [{"ranks": run.header.get("world_size"), **run.env, **run.header["data"]}
             for run in evidence.runs]  # fmt: skip
    for name in ALIKE:
        values = {str(each.get(name)) for each in facts}
        if len(values) > 1:
            yield f"{name} differs between runs: {', '.join(sorted(values))}"
    trained = {str(run.end.get("train_tokens_sha256")) for run in evidence.complete}
    if len(trained) > 1:  # the seed chooses the weights and not the tokens
        yield f"runs trained on different tokens: {', '.join(sorted(trained))}"


def check_copies(evidence: Evidence) -> Iterator[str]:
    """No run counts twice, by its id, its seed, its losses or its times."""
    yield from leave_out_repeats(evidence.runs)[1]


def check_source(evidence: Evidence) -> Iterator[str]:
    """The source sets nothing of the compiler."""
    yield from forbidden_settings(evidence.source)


def forbidden_settings(files: dict[str, bytes]) -> Iterator[str]:
    """The compiler settings in the files of a source, which no track allows."""
    for name, content in files.items():
        setting = FORBIDDEN.search(content.decode(errors="replace"))
        if setting and name.endswith(".py"):
            yield f"forbidden compiler setting {setting[0]!r} in {name}"


def check_baseline(evidence: Evidence) -> Iterator[str]:
    """The baseline with which its loss on new tokens is compared is itself to be believed."""
    baseline = record.read_baseline(evidence.claim.track, evidence.track.baseline)
    if baseline is None or baseline.claim.id == evidence.claim.id:
        return
    for failure in find_failures(baseline)[:1]:
        yield f"its baseline {baseline.folder.name} decides nothing, as it fails: {failure.what}"


# ---- Each of its runs


def check_counted(run: Run, evidence: Evidence) -> Iterator[str]:
    """The run went to its end, and did no step twice."""
    if run.left_out:
        yield f"not counted: {run.left_out}"


def check_claimed(run: Run, evidence: Evidence) -> Iterator[str]:
    """The run belongs to the claim, and has the claimed source and settings."""
    claim = evidence.claim
    if run.header.get("claim") != claim.id:
        yield "extra: the run was not started under this claim"
    elif run.seed not in claim.seeds:
        yield f"extra: seed {run.seed} was not claimed"
    for name in ("source_sha256", "config_sha256", "track", "target"):
        found, claimed = run.header.get(name), getattr(claim, name)
        if found != claimed:
            yield f"{name} {found!s:.12}, not the claimed {claimed!s:.12}"
    if config_hash(run.header["config"]) != run.header.get("config_sha256"):
        yield "config_sha256 is not the hash of config"
    if run.complete and run.total_steps != claim.config["steps"]:
        yield f"{run.total_steps} steps, not the claimed {claim.config['steps']}"
    for resume in run.resumes:
        if resume.differences:
            yield f"resumed at step {resume.from_step} with {resume.differences!r:.300} changed"


def check_registry(run: Run, evidence: Evidence) -> Iterator[str]:
    """The registry knows the run's start and its resumes, and the log is as the run left it."""
    lines = evidence.registered.get(run.run_id, [])
    start = next((line for line in lines if line["event"] == "start"), {})
    if start.get("sha256", "") != run.header.get("registry_sha256"):
        yield "its start is not in the registry"
    elif any(start.get(name) != run.header.get(name) for name in REGISTERED):
        yield "its header differs from its line in the registry"
    ends = [line for line in lines if line["event"] == "end"]
    if ends and ends[-1].get("log_sha256") != run.segments[-1].sha256:
        yield "edited: the log is not the one whose hash the run registered"
    elif run.complete and not ends:
        yield "its end is not in the registry"
    resumes = [line["sha256"] for line in lines if line["event"] == "resume"]
    if resumes != [resume.registry_sha256 for resume in run.resumes]:
        yield f"{len(resumes)} resumes in the registry, {len(run.resumes)} others in the log"


def check_track(run: Run, evidence: Evidence) -> Iterator[str]:
    """The track allows the compiler's settings, and the tokens are its own."""
    for segment in run.segments:
        flags = segment.header.get("env", {}).get("compile_flags")
        for flag in forbidden_flags(map(str, flags if isinstance(flags, list) else ["unknown"])):
            yield f"compiler settings {flag}"
    for name in ("val_sha256", "train_sha256"):
        found, due = str(run.header["data"].get(name)), getattr(evidence.track, name)
        if not (found.startswith(due) if due else re.fullmatch(SHA256, found)):
            yield f"{name} {found:.16}, not {due or 'a SHA-256'}"


def check_numbers(run: Run, evidence: Evidence) -> Iterator[str]:
    """What the trainer counted and measured is within its bounds."""
    header, end, tokens = run.header, run.end, evidence.track.val_tokens
    config, skipped = evidence.claim.config, sum(bool(step.skipped) for step in run.steps)
    trained = run.steps[-1].tokens if run.steps else None
    due, most = header.get("train_tokens"), len(run.steps) * config["batch_tokens"]
    bounds = [
        ("validation tokens", header["data"].get("val_tokens"), tokens, tokens),
        ("validation documents in training", header["checks"].get("overlap"), 0,
         evidence.track.overlap),
        ("ranks", header.get("world_size"), 1, config["batch_tokens"] // config["seq_len"]),
        ("steps that were skipped", skipped, 0, MOST_SKIPPED * len(run.steps)),
    ]  # fmt: skip
    layers, most_layers = run.env.get("layer_params"), evidence.track.layer_params
    if most_layers and layers is not None:  # logs before 2026-11-29 lack it
        bounds.append(("parameters of the layers", layers, 1, most_layers))
    if run.complete:
        bounds.append(("scored targets", end.get("targets_scored"), tokens, tokens))
        bounds.append(("tokens trained on", trained, 1, most))
        if trained != due:
            yield f"trained on {trained} tokens, not the {due} of the header"
        checks = end.get("checks")
        for name, most_found in TRAINED.items():
            found = checks.get(name) if isinstance(checks, dict) else None
            if name != "memory" or ASKS_FOR_MEMORY in evidence.source:
                bounds.append((f"check {name} of the trained model", found, 0, most_found))
    for what, found, low, high in bounds:
        if not lies_within(found, low, high):
            allowed = low if low == high else f"{low} to {high}"
            yield f"{what}: {found!s:.20}, not {allowed}"


def lies_within(value: Any, low: float, high: float) -> bool:
    """Whether it is a number, not true or nan, and between these."""
    return type(value) in (int, float) and low <= value <= high


def check_new_tokens(run: Run, evidence: Evidence) -> Iterator[str]:
    """The losses by kind of token are losses, and their mean is that of the last validation."""
    copied, tokens = evidence.track.copied, evidence.track.val_tokens
    if not copied or evidence.is_older or not run.complete:
        return
    names = ["loss_on_copied", "loss_on_new", "loss_held_out"]
    if evidence.new_tokens and evidence.new_tokens.measure not in names:
        names.append(evidence.new_tokens.measure)  # decides while the baseline is older
    for name in names:
        if not 0 < run.probe(name) < math.inf:
            yield f"{name} is {run.probe(name)}, not a finite loss above 0"
    on_copied, on_new = run.probe("loss_on_copied"), run.probe("loss_on_new")
    mean, logged = on_new + copied / tokens * (on_copied - on_new), run.validations[-1].loss
    if abs(mean - logged) > MOST_OFF_MEAN:
        yield (f"the losses on {copied:,} copied and {tokens - copied:,} new tokens have the mean "
               f"{mean:.6f}, but the last validation has {logged:.6f}")


def check_origin(run: Run, evidence: Evidence) -> Iterator[str]:
    """All code was the claimed source."""
    for segment in run.segments:
        foreign = segment.header.get("env", {}).get("modules_from_elsewhere")
        if foreign != []:
            yield f"modules from elsewhere: {foreign!r:.300}"


def check_model(run: Run, evidence: Evidence) -> Iterator[str]:
    """The trainer's checks before the first step passed, and the model knew nothing there."""
    for name in ("causality", "warmup_restored"):
        found = run.header["checks"].get(name)
        if found is not True:
            yield f"check {name} is {found}, not true"
    ignorant = math.log(evidence.claim.config["vocab_size"])
    first = run.steps[0].train_loss if run.steps else None
    if run.validations and run.validations[0].step == 0:
        first = run.validations[0].loss
    if run.complete and (first is None or not first >= LEAST_FIRST_LOSS * ignorant):
        yield f"first loss {first}, but a model that knows nothing has {ignorant:.2f}"


# ---- The ledger of time: what is off the clock, and whether all else is on it. nan fails.


def check_phases(run: Run, evidence: Evidence) -> Iterator[str]:
    """Work off the clock is start-up, validation, or the short end of a run."""
    longest = longest_validation(run, evidence)
    allowed = STARTUP | AT_END | {"validate": longest}
    allowed["probe"] = max(allowed["probe"], 2 * longest)
    later: set[str] = set()
    for phase in reversed(run.phases):
        if phase.timed != (phase.name in TIMED) or not (phase.timed or phase.name in allowed):
            yield f"untimed work: phase {phase.name!r} of {phase.ms:.0f} ms, timed: {phase.timed}"
        elif not phase.timed and not phase.ms <= allowed[phase.name]:
            most = allowed[phase.name] / 1000
            yield f"untimed work: a {phase.name} of {phase.ms:.0f} ms; {most:.1f} s are the most"
        if phase.name in AT_END and not later <= AT_END.keys() - {phase.name}:
            yield f"untimed work: a {phase.name} of {phase.ms:.0f} ms; one may end a run"
        later.add(phase.name)


def longest_validation(run: Run, evidence: Evidence) -> float:
    """Milliseconds: a token must be no dearer to score than to train on.

    Where nothing can be won, a validation may take a minute: eight steps of `tiny` next to other
    programs took 10 s, one validation 3 s and the next 22.
    """
    most = (run.train_time_ms or 0.0) / (evidence.tokens or 1) * evidence.track.val_tokens
    return most if evidence.track.ranked else max(most, AT_END["probe"])


def check_clock(run: Run, evidence: Evidence) -> Iterator[str]:
    """All that is neither start-up, validation nor the end is on the clock."""
    if not run.complete:
        return
    total = run.train_time_ms or 0.0
    timed = sum(phase.ms for phase in run.phases if phase.timed)
    if not abs(timed - total) <= 0.001 * total + 1:
        yield f"{timed:.0f} ms in timed phases, {total:.0f} ms in the last validation"
    unaccounted = unaccounted_ms(run.phases, len(run.resumes))
    if not unaccounted <= MOST_UNACCOUNTED * total + SLACK_MS * len(run.validations):
        yield f"untimed work: {unaccounted:.0f} ms between the phases of training and validation"
    validations = sum(phase.name == "validate" for phase in run.phases)
    if validations != len(run.validations):
        yield f"untimed work: {validations} validations for {len(run.validations)} losses"


def unaccounted_ms(phases: list[Phase], resumes: int) -> float:
    """Milliseconds in no phase, from the first phase of training of each process to its last."""
    total, before = 0.0, None
    for phase in phases:
        if phase.name == "setup" and before is not None and resumes:
            resumes -= 1  # here another process begins
            before = None
        if before is not None and phase.t_ms < before:
            return math.inf  # a clock that runs backwards accounts for nothing
        if phase.name not in STARTUP:  # a start-up phase in mid-run counts as time in no phase
            if before is not None:
                total += max(phase.t_ms - phase.ms - before, 0.0)
            before = phase.t_ms
    return total


ANEW = "make all runs of the claim again, under a new claim with other seeds"
OF_A_RECORD = (
    (check_claim, "write the claim with record.py claim, by the rules of the track"),
    (check_history, "commit a claim at once and before its runs; else " + ANEW),
    (check_started, f"add the logs of all runs, whatever their losses; else {ANEW}"),
    (check_seeds, "claim untried seeds"),
    (check_alike, f"make all runs alike: {ANEW}"),
    (check_copies, f"remove the copy; if runs are missing then, {ANEW}"),
    (check_source, "leave it out and run again"),
    (check_baseline, "restore the folder of the baseline as it was committed"),
)
OF_A_RUN = (
    (check_counted, f"if it was interrupted, repeat its command with --resume auto; else {ANEW}"),
    (check_claimed, ANEW),
    (check_registry, "restore the log and the registry as the run wrote them"),
    (check_track, "run on the track's data, with the compiler's defaults alone"),
    (check_model, "find what leaked out of the warm-up, and run with the checks in place"),
    (check_numbers, f"find what the source computes wrongly, and {ANEW}"),
    (check_new_tokens, f"score all tokens of the track's own data at the end, and {ANEW}"),
    (check_origin, f"start the trainer on its own files, without PYTHONPATH: {ANEW}"),
    (check_phases, "time this work, or leave it out; on a busy machine, run again when it is idle"),
    (check_clock, "do this work in a timed phase, or not at all, and run again"),
)
