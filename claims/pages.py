"""The pages that follow from records: record.json and README.md of each, the leaderboard of all.

Text from claims and logs is escaped: it cannot pass for a part of the page.
"""

import json
import re
import shlex
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import quote

from claims.evidence import TRACKS, Evidence, Failure, described
from claims.runs import Run
from claims.sources import difference, read_source, source_path
from runtime.claim import Claim, read_claim
from runtime.errors import ClaimError
from runtime.jsonl import plain

SCHEMA = 1
LONGEST_DIFF = 1000  # lines; of a longer one the page only says how long it is
HEAD = """# Records

A record is a claim that was written before its runs, the logs of all these runs, and their source.
`python scripts/record.py verify FOLDER` recomputes every number of a record from its logs.
`python scripts/record.py leaderboard` writes this page and its pictures."""


def facts(evidence: Evidence) -> dict[str, Any]:
    """What record.json says, every number from the logs."""
    claim, result, runs = evidence.claim, evidence.result, []
    for run in evidence.complete:
        last = run.segments[-1]  # which names the hash of the one before, if there is one
        runs.append({"file": last.path.name, "sha256": last.sha256, "seed": run.seed,
                     "val_loss": run.final_loss, "train_time_ms": run.train_time_ms})
    # Ten digits: the last ones differ between processors and versions of the libraries.
    numbers = {name: float(f"{value:.10g}") for name, value in result._asdict().items()}
    return {
        "schema": SCHEMA, "name": claim.name, "track": claim.track, "date": claim.created[:10],
        "claim": claim.id, "target": claim.target, "level": evidence.level,
        "shown": evidence.shown, "steps": claim.config["steps"], **numbers, "n": result.n,
        "train_time_ms": times(evidence.complete), "source_sha256": claim.source_sha256,
        "config_sha256": claim.config_sha256, "runs": runs,
    }


def times(runs: Sequence[Run]) -> dict[str, float]:
    """Mean, median and range of the training times, in milliseconds."""
    ms = [run.train_time_ms or 0.0 for run in runs] or [0.0]
    return {"mean": statistics.fmean(ms), "median": statistics.median(ms),
            "min": min(ms), "max": max(ms)}


# ---- Markdown


def printable(text: str) -> str:
    """The text with an escape for each character that is neither printable nor a tab."""
    shown = (char if char.isprintable() or char == "\t" else ascii(char)[1:-1] for char in text)
    return "".join(shown)


def literal(text: str) -> str:
    """Markdown that shows the text letter by letter, whatever it holds."""
    return re.sub(r"([\\`*_\[\]<>&|])", r"\\\1", printable(text))


def code(value: object) -> str:
    """The same as code, for a cell of a table."""
    return "`" + printable(str(value)).replace("`", "'").replace("|", "\\|") + "`"


def fenced(text: str, language: str = "") -> str:
    """A block of code that no line of the text can close."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


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
            seen.setdefault(code(name), {})[code(value)] = None
    rows = [(name, "; ".join(values)) for name, values in seen.items()]
    return table("| machine and checks | |", rows)


def phase_table(runs: Sequence[Run]) -> str:
    """Phases in the order in which they first come."""
    sums: dict[tuple[str, str], float] = {}
    for run in runs:
        for phase in run.phases:
            key = code(phase.name), "yes" if phase.timed else "no"
            sums[key] = sums.get(key, 0.0) + phase.ms
    rows = [(*key, f"{ms / len(runs):,.0f}") for key, ms in sums.items()]
    return table("| phase | on the clock | ms, mean over runs |", rows)


# ---- The page of a record


def readme(evidence: Evidence) -> str:
    """The page of one record. Only the claim's own words in it were typed by someone."""
    if not evidence.complete:
        return f"# {evidence.claim.name}\n\nNo finished run.\n"
    return "\n\n".join([*result_part(evidence), *run_part(evidence), *source_part(evidence)]) + "\n"


def result_part(evidence: Evidence) -> Iterator[str]:
    claim, result = evidence.claim, evidence.result
    verdict = "**Shown**" if evidence.shown else "**Not shown**"
    yield f"# {claim.name}, track {literal(claim.track)}: {claim.config['steps']:,} steps"
    yield textwrap.fill(literal(claim.about), 100, initial_indent="> ", subsequent_indent="> ")
    yield (f"{verdict}: the mean validation loss is below {claim.target:g}\n"
           f"({result.n} runs, p = {result.p:.3g}, level {evidence.level:.3g}).")
    row = (result.n, f"{result.mean:.6f}", f"{result.sd:.6f}", f"{result.t:.4f}",
           f"{result.p:.3g}", f"{result.upper99:.5f}")
    yield table("| n | mean | sd | t | p | 99 % upper bound |", [row])
    seconds = {name: ms / 1000 for name, ms in times(evidence.complete).items()}
    yield ("Training time: median {median:.2f} s, mean {mean:.2f} s, {min:.2f} to {max:.2f} s."
           .format_map(seconds))
    rows = []
    for run in evidence.complete:
        link = f"[{code(run.run_id)}](runs/{quote(run.path.name)})"
        time = f"{(run.train_time_ms or 0.0) / 1000:.3f}"
        rows.append((run.seed, f"{run.final_loss:.6f}", time, link))
    yield table("| seed | validation loss | seconds | log |", rows)


def run_part(evidence: Evidence) -> Iterator[str]:
    claim, looks = evidence.claim, " and ".join(map(str, evidence.claim.looks))
    for run in evidence.runs:
        if run.resumed:
            verdict = f"is not counted: {run.left_out}" if run.left_out else "counts"
            yield f"Seed {run.seed} was {literal(run.resumed)}; it {literal(verdict)}."
    yield (f"The claim was written at {claim.created}, before the runs: {claim.n} runs,\n"
           f"seeds {claim.seeds[0]} to {claim.seeds[-1]}, tested after {looks}.")
    yield machine_table(evidence.complete)
    yield phase_table(evidence.complete)
    flags = "".join(f" {shlex.quote(flag)}" for flag in claim.flags)
    folder = shlex.quote(f"records/{claim.track}/{evidence.folder.name}")
    yield fenced(f"python train_gpt.py{flags} --seed {claim.seeds[0]} --trials {claim.n}\n"
                 f"python scripts/record.py verify {folder}")
    if (evidence.folder / "NOTES.md").is_file():
        yield "More about this record: [NOTES.md](NOTES.md)."


def source_part(evidence: Evidence) -> Iterator[str]:
    """The source and what is new in it since the claim before, shown or not."""
    claim, commit = evidence.claim, "unknown"
    if evidence.source and evidence.source.commit:
        commit = evidence.source.commit
    yield "## Source"
    stored = source_path(Path("../.."), claim.source_sha256).as_posix()
    yield (f"- source `{claim.source_sha256}`: [all files]({stored})\n"
           f"- commit `{commit}`\n"
           f"- configuration `{claim.config_sha256}`: [claim.json](claim.json)")
    before = claim_before(evidence)
    if before is None:
        yield "This is the first claim on its track."
        return
    if before.source_sha256 == claim.source_sha256:
        yield f"The source is that of the claim before it, {before.name}."
        return
    try:
        old = read_source(evidence.records, before.source_sha256)
    except ClaimError:
        yield f"The source of the claim before it, {before.name}, is missing: there is no diff."
        return
    lines = difference(old, evidence.source) if evidence.source else []
    yield f"The diff from the claim before it, {before.name}, has {len(lines):,} lines."
    if len(lines) > LONGEST_DIFF:
        return
    yield "<details><summary>Show the diff</summary>"
    yield fenced("\n".join(map(printable, lines)), "diff")
    yield "</details>"


def claim_before(evidence: Evidence) -> Claim | None:
    """The claim on the same track that was written last before this one."""
    paths = sorted(evidence.folder.resolve().parent.glob("*/claim.json"))
    earlier = [claim for claim in map(read_claim, paths) if claim.created < evidence.claim.created]
    return max(earlier, key=lambda claim: (claim.created, claim.name), default=None)


def derived(evidence: Evidence) -> dict[str, bytes]:
    """The files of a record that follow from the others, by name."""
    record = json.dumps(plain(facts(evidence)), indent=1) + "\n"
    texts = {"record.json": record, "README.md": readme(evidence)}
    return {name: text.encode(errors="backslashreplace") for name, text in texts.items()}


def differences(evidence: Evidence) -> Iterator[Failure]:
    """A derived file that is not, byte for byte, what the logs say."""
    for name, content in derived(evidence).items():
        path = evidence.folder / name
        found = path.read_bytes() if path.is_file() else b""
        if found != content:
            pairs = zip_longest(found.split(b"\n"), content.split(b"\n"))
            line = [a == b for a, b in pairs].index(False) + 1
            what = f"line {line} is not what the logs say" if found else "missing"
            yield Failure(what, path, f"scripts/record.py make {evidence.folder}")


# ---- The leaderboard


def leaderboard(records: Path, evidences: Sequence[Evidence]) -> str:
    """The page of all tracks: claims in the order of their dates, then other measurements."""
    parts = [HEAD]
    for track in TRACKS:
        claims = [evidence for evidence in evidences if evidence.claim.track == track]
        if claims:
            parts += board(records, track, claims)
    ours = {records, *(evidence.folder for evidence in evidences)}
    lines = []
    for path in sorted(records.rglob("README.md")):
        if path.parent not in ours:
            title = path.read_text().partition("\n")[0].lstrip("# ")
            lines.append(f"- [{title}]({path.relative_to(records).as_posix()})")
    return "\n\n".join([*parts, "## Measurements", "\n".join(lines)]) + "\n"


def board(records: Path, track: str, claims: Sequence[Evidence]) -> Iterator[str]:
    best, rows = records_among(claims), []
    for evidence in claims:
        claim, found = evidence.claim, evidence.result
        place = "no record" if evidence.shown else "not shown"
        if evidence in best:
            place = f"#{best.index(evidence) + 1}"
        name = f"[{claim.name}]({quote(evidence.folder.relative_to(records).as_posix())})"
        median = times(evidence.complete)["median"] / 1000
        rows.append((place, claim.created[:10], name, f"{claim.config['steps']:,}", found.n,
                     f"{found.mean:.4f}", f"{found.sd:.4f}", f"{found.p:.2g}", f"{median:.1f}"))
    wins = "the shortest time" if TRACKS[track].in_time else "the fewest steps"
    yield f"## {track}: to {TRACKS[track].target:g} nats per token in {wins}"
    yield table("| record | date | claim | steps | n | mean loss | sd | p | median s |", rows)
    yield (f"There are {len(claims)} claims on this track. Each p is that of its own claim alone.\n"
           "Compare seconds only between runs on the same machine.")
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
    in_time = TRACKS[evidence.claim.track].in_time
    return times(evidence.complete)["median"] if in_time else evidence.claim.config["steps"]
