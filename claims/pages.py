"""The pages that follow from records: record.json and README.md of each, the leaderboards of all.

Text from claims and logs is escaped: it cannot pass for a part of the page.
"""

import hashlib
import json
import re
import shlex
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from claims.evidence import TRACKS, Evidence, Failure, described
from claims.runlog import Run
from claims.sources import difference, place, read_source
from runtime.claim import Claim, ClaimError, read_claim
from runtime.jsonl import plain

SCHEMA = 1
LONGEST_DIFF = 1000  # lines; a longer one is only counted
HEAD = """# Records

A record is a claim that was written before its runs, the logs of all these runs, and their source.
`python scripts/record.py verify FOLDER` recomputes every number of a record from its logs.
`python scripts/record.py leaderboard` writes this page and its pictures."""


def facts(evidence: Evidence) -> dict[str, Any]:
    """What record.json says, every number from the logs."""
    claim, result = evidence.claim, evidence.result
    runs = [
        {
            "file": run.path.name,
            "sha256": hashlib.sha256(run.path.read_bytes()).hexdigest(),
            "seed": run.seed,
            "val_loss": run.final_loss,
            "train_time_ms": run.train_time_ms,
        }
        for run in evidence.complete
    ]
    return {
        "schema": SCHEMA,
        "name": claim.name,
        "track": claim.track,
        "date": claim.created[:10],
        "claim": claim.id,
        "target": claim.target,
        "level": evidence.level,
        "shown": evidence.shown,
        "steps": claim.config["steps"],
        "n": result.n,
        # Ten digits: the last ones differ between processors and versions of the libraries.
        **{name: float(f"{getattr(result, name):.10g}") for name in ("mean", "sd", "t", "p")},
        "upper99": float(f"{result.upper99:.10g}"),
        "train_time_ms": times(evidence.complete),
        "source_sha256": claim.source_sha256,
        "config_sha256": claim.config_sha256,
        "runs": runs,
    }


def times(runs: Sequence[Run]) -> dict[str, float]:
    """Mean, median and range of the training times, in milliseconds."""
    ms = [run.train_time_ms or 0.0 for run in runs]
    if not ms:
        return {}
    mean, median = statistics.fmean(ms), statistics.median(ms)
    return {"mean": mean, "median": median, "min": min(ms), "max": max(ms)}


# ---- Markdown


def literal(text: object) -> str:
    """The text as Markdown that shows it letter by letter, whatever it holds."""
    return re.sub(r"([\\`*_\[\]<>|~&#!])", r"\\\1", printable(str(text)))


def printable(text: str) -> str:
    """The text with an escape for each character that is neither printable nor a tab."""
    shown = (char if char.isprintable() or char == "\t" else ascii(char)[1:-1] for char in text)
    return "".join(shown)


def wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent,
                         break_long_words=False, break_on_hyphens=False)


def table(head: str, rows: Iterable[Sequence[object]]) -> str:
    """A table under headings such as `| seed | loss |`."""
    lines = [head, "|-" * (head.count("|") - 1) + "|"]
    for row in rows:
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def machine_table(runs: Sequence[Run]) -> str:
    """What the headers say of machine, data and checks; where runs differ, all values."""
    seen: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in described(run).items():
            seen.setdefault(name, {})[literal(value)] = None
    rows = [(literal(name), "; ".join(values)) for name, values in seen.items()]
    return table("| machine and checks | |", rows)


def phase_table(runs: Sequence[Run]) -> str:
    """Phases in the order in which they first come, with their mean over the runs."""
    sums: dict[tuple[str, bool], float] = {}
    for run in runs:
        for phase in run.phases:
            key = (phase.name, phase.timed)
            sums[key] = sums.get(key, 0.0) + phase.ms
    rows = [(literal(name), "yes" if timed else "no", f"{total / len(runs):,.0f}")
            for (name, timed), total in sums.items()]
    return table("| phase | on the clock | ms, mean over runs |", rows)


# ---- The page of a record


def readme(evidence: Evidence) -> str:
    """The page of one record. Only the claim's own words in it were typed by someone."""
    claim, result, runs = evidence.claim, evidence.result, evidence.complete
    if not runs:
        return f"# {claim.name}\n\nNo finished run.\n"
    seconds = {name: ms / 1000 for name, ms in times(runs).items()}
    result_row = (result.n, f"{result.mean:.6f}", f"{result.sd:.6f}", f"{result.t:.4f}",
                  f"{result.p:.3g}", f"{result.upper99:.5f}")
    looks = " and ".join(map(str, claim.looks))
    folder = shlex.quote(f"records/{claim.track}/{evidence.folder.name}")
    flags = "".join(f" {shlex.quote(flag)}" for flag in claim.flags)
    parts = [
        f"# {claim.name}, track {literal(claim.track)}: {claim.config['steps']:,} steps",
        wrap(literal(claim.about), "> "),
        f"{'**Shown**' if evidence.shown else '**Not shown**'}: the mean validation loss is below "
        f"{claim.target:g}\n({result.n} runs, p = {result.p:.3g}, level {evidence.level:.3g}).",
        table("| n | mean | sd | t | p | 99 % upper bound |", [result_row]),
        "Training time: median {median:.2f} s, mean {mean:.2f} s, {min:.2f} to {max:.2f} s."
        .format_map(seconds),
        table("| seed | validation loss | seconds | log |", map(run_row, runs)),
        *resumed_runs(evidence),
        f"The claim was written at {claim.created}, before the runs: {claim.n} runs,\n"
        f"seeds {claim.seeds[0]} to {claim.seeds[-1]}, tested after {looks}.",
        machine_table(runs),
        phase_table(runs),
        f"```\npython train_gpt.py{flags} --seed {claim.seeds[0]} --trials {claim.n}\n"
        f"python scripts/record.py verify {folder}\n```",
        *source_part(evidence),
    ]
    return "\n\n".join(parts) + "\n"


def run_row(run: Run) -> tuple[object, ...]:
    seconds = (run.train_time_ms or 0.0) / 1000
    link = f"[{literal(run.run_id)}](runs/{quote(run.path.name)})"
    return run.seed, f"{run.final_loss:.6f}", f"{seconds:.3f}", link


def resumed_runs(evidence: Evidence) -> Iterator[str]:
    """A line for each run that was resumed, those that do not count included."""
    for run in evidence.runs:
        if run.resumed:
            verdict = "it counts" if run.counts else f"it does not count: {run.left_out}"
            yield wrap(f"Seed {run.seed} was {literal(run.resumed)}; {literal(verdict)}.")


def source_part(evidence: Evidence) -> Iterator[str]:
    """Notes, hashes, and what is new in the source since the record before."""
    claim, source = evidence.claim, evidence.source
    yield "## Source"
    if (evidence.folder / "NOTES.md").is_file():
        yield "More about the record is in [NOTES.md](NOTES.md)."
    lines = [f"- source `{claim.source_sha256}`: [all files]({source_link(claim)})",
             f"- configuration `{claim.config_sha256}`: [claim.json](claim.json)"]
    if source and source.commit:
        lines.append(f"- commit `{source.commit}`")
    yield "\n".join(lines)
    before = claim_before(evidence)
    if before is None:
        yield "This is the first claim of its track."
    elif before.source_sha256 == claim.source_sha256:
        yield f"The source is that of the claim before it, {before.name}."
    else:
        yield from source_diff(evidence, before)


def source_diff(evidence: Evidence, before: Claim) -> Iterator[str]:
    """The diff from the source of the claim before. A long one is only counted."""
    try:
        old = read_source(evidence.records, before.source_sha256)
    except ClaimError:
        old = None
    if old is None or evidence.source is None:
        yield f"There is no diff: the source of {before.name} or of this claim is missing."
        return
    lines = list(map(printable, difference(old, evidence.source)))
    added = sum(line.startswith("+") and not line.startswith("+++ ") for line in lines)
    removed = sum(line.startswith("-") and not line.startswith("--- ") for line in lines)
    yield (f"Since the claim before it, {before.name} ([its source]({source_link(before)})):\n"
           f"{added:,} lines added, {removed:,} lines removed.")
    if len(lines) > LONGEST_DIFF:
        return
    text = "\n".join(lines)
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)  # no line of the source can close it
    yield f"<details><summary>The diff, {len(lines):,} lines</summary>"
    yield f"{fence}diff\n{text}\n{fence}"
    yield "</details>"


def source_link(claim: Claim) -> str:
    return place(Path("../.."), claim.source_sha256).as_posix()


def claim_before(evidence: Evidence) -> Claim | None:
    """The claim on the same track that was written last before this one, shown or not."""
    track = evidence.folder.resolve().parent
    claims = [read_claim(path) for path in sorted(track.glob("*/claim.json"))]
    earlier = [claim for claim in claims if claim.created < evidence.claim.created]
    return max(earlier, key=lambda claim: (claim.created, claim.name), default=None)


def derived(evidence: Evidence) -> dict[str, bytes]:
    """The files of a record that follow from the others, by name."""
    texts = {
        "record.json": json.dumps(plain(facts(evidence)), indent=1) + "\n",
        "README.md": readme(evidence),
    }
    return {name: text.encode(errors="backslashreplace") for name, text in texts.items()}


def differences(evidence: Evidence) -> Iterator[Failure]:
    """A derived file that is not, byte for byte, what the logs say."""
    for name, content in derived(evidence).items():
        path = evidence.folder / name
        mend = f"scripts/record.py make {evidence.folder}"
        if not path.is_file():
            yield Failure("missing", path, mend)
        elif path.read_bytes() != content:
            line = first_difference(path.read_bytes(), content)
            yield Failure(f"line {line} is not what the logs say", path, mend)


def first_difference(found: bytes, expected: bytes) -> int:
    """The number of the first line that differs."""
    number = 0
    for number, pair in enumerate(zip(found.split(b"\n"), expected.split(b"\n"), strict=False), 1):
        if pair[0] != pair[1]:
            return number
    return number + 1


# ---- The leaderboards


def leaderboard(records: Path, evidences: Sequence[Evidence]) -> str:
    """The page of all tracks: claims in the order of their dates, then other measurements."""
    parts = [HEAD]
    for track in TRACKS:
        claims = [evidence for evidence in evidences if evidence.claim.track == track]
        if claims:
            parts += board(records, track, claims)
    ours = {records, *(evidence.folder for evidence in evidences)}
    pages = [path for path in sorted(records.rglob("README.md")) if path.parent not in ours]
    parts.append("## Measurements")
    lines = []
    for path in pages:
        title = path.read_text().partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}]({path.relative_to(records).as_posix()})")
    return "\n\n".join([*parts, "\n".join(lines)]) + "\n"


def board(records: Path, track: str, claims: Sequence[Evidence]) -> Iterator[str]:
    best, in_time = records_among(claims), TRACKS[track].in_time
    rows = []
    for evidence in claims:
        claim, found = evidence.claim, evidence.result
        place = "no record" if evidence.shown else "not shown"
        if evidence in best:
            place = f"#{best.index(evidence) + 1}"
        name = f"[{claim.name}]({quote(evidence.folder.relative_to(records).as_posix())})"
        median = times(evidence.complete).get("median", 0.0) / 1000
        rows.append((place, claim.created[:10], name, f"{claim.config['steps']:,}", found.n,
                     f"{found.mean:.4f}", f"{found.sd:.4f}", f"{found.p:.2g}", f"{median:.1f}"))
    wins = "the shortest time" if in_time else "the fewest steps"
    yield f"## {track}: to {TRACKS[track].target:g} nats per token in {wins}"
    yield table("| record | date | claim | steps | n | mean loss | sd | p | median s |", rows)
    yield (f"There are {len(claims)} claims on this track. Each p is that of its own claim alone.\n"
           "Compare seconds only between runs on the same machine.")
    yield f"![Steps and seconds of the records]({track}/timeline.svg)"
    yield f"![Loss curves of the claims]({track}/losses.svg)"


def records_among(claims: Sequence[Evidence]) -> list[Evidence]:
    """The claims that were shown and beat every claim shown before them."""
    best: list[Evidence] = []
    for evidence in claims:
        if evidence.shown and (not best or score(evidence) < score(best[-1])):
            best.append(evidence)
    return best


def score(evidence: Evidence) -> float:
    """Median milliseconds, or steps where only steps count."""
    if TRACKS[evidence.claim.track].in_time:
        return times(evidence.complete)["median"]
    return evidence.claim.config["steps"]
