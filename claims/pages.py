"""The pages of records: record.json and README.md of each, the leaderboard of all with pictures.

Text from claims and logs is escaped: it cannot pass for a part of the page.
"""

import json
import math
import re
import shlex
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

from claims import record as records
from claims.checks import Failure
from claims.record import TRACKS, Evidence, difference, read_source, records_of, source_path
from runtime.errors import Refused
from runtime.jsonl import plain

SCHEMA = 2  # of record.json
LONGEST_DIFF = 1000  # lines; of a longer one the page only says how long it is
HEAD = """# Records

Each folder has a claim that was written before its runs, their logs and source. *#1* and so on:
shown, and better than all before it; *no record*: shown, but not better than an earlier one.
`python scripts/record.py verify FOLDER` recomputes its numbers, `leaderboard` writes this page.

The command on a record's page is that of its own source.

[The lab log](LOG.md) reports what was tried and what was learned, [benchmarks](benchmarks) what
was timed."""
STYLE: Any = {
    "svg.hashsalt": "records",  # else the names of clip paths are random
    "svg.fonttype": "none",
    "text.parse_math": False,  # a claim's name is no formula
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.fontsize": 8,
    # Okabe and Ito's colours, which the colour-blind can tell apart.
    "axes.prop_cycle": "cycler(color=['0072B2', 'D55E00', '009E73', 'CC79A7', 'E69F00', '56B4E9'])",
}
# Black and white are swapped; colours keep their hue.
DARK = "@media (prefers-color-scheme: dark) {svg {filter: invert(0.93) hue-rotate(180deg)}}"
PROBES = {"copy_loss": "copied tokens", "new_loss": "new tokens"}


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
        "claim": claim.id, "target": claim.target, "level": claim.alpha,
        "shown": evidence.shown, "steps": claim.config["steps"], **numbers, "n": result.n,
        "median_train_time_ms": evidence.median_ms, "source_sha256": claim.source_sha256,
        "config_sha256": claim.config_sha256, "runs": runs,
    }


def printable(text: str) -> str:
    """The text with an escape for each character that is neither printable nor a tab."""
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text)


def literal(text: str) -> str:
    """Markdown that shows the text letter by letter, whatever it holds."""
    return re.sub(r"([\\`*_\[\]<>&|#~])", r"\\\1", printable(text))


def fenced(text: str, language: str = "") -> str:
    """A block of code that no line of the text can close."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def table(head: str, rows: Iterable[Sequence[object]]) -> str:
    """A table under headings such as `| seed | loss |`."""
    lines = [head, "|-" * (head.count("|") - 1) + "|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines)


def readme(evidence: Evidence) -> str:
    """The page of one record. Only the claim's name and description in it were typed by hand."""
    if not evidence.complete:
        return f"# {evidence.claim.name}\n\nNo finished run.\n"
    return "\n\n".join([*result_part(evidence), *run_part(evidence), *source_part(evidence)]) + "\n"


def result_part(evidence: Evidence) -> Iterator[str]:
    claim, result = evidence.claim, evidence.result
    verdict = "**Shown**" if evidence.shown else "**Not shown**"
    yield f"# {claim.name}, track {claim.track}: {claim.config['steps']:,} steps"
    about = textwrap.indent(textwrap.fill(literal(claim.about), 98, break_long_words=False), "> ")
    yield re.sub(r"^> (\d+(?=[.)]( |$))|(?=[-+=]))", r"> \1\\", about, flags=re.M)  # no heading
    yield (f"{verdict}: the mean validation loss is below {claim.target:g}\n"
           f"({result.n} runs, p = {result.p:.3g}, level {claim.alpha:g}).")
    row = (result.n, f"{result.mean:.6f}", f"{result.sd:.6f}", f"{result.t:.4f}",
           f"{result.p:.3g}", f"{result.upper99:.5f}", f"{evidence.median_ms / 1000:.2f}")
    yield table("| n | mean | sd | t | p | 99 % upper bound | median s |", [row])
    rows = []
    for run in evidence.complete:
        link = f"[{literal(run.run_id)}](runs/{quote(run.path.name)})"
        seconds = f"{(run.train_time_ms or 0.0) / 1000:.3f}"
        rows.append((run.seed, f"{run.final_loss:.6f}", seconds, link))
    yield table("| seed | validation loss | training s | log |", rows)


def run_part(evidence: Evidence) -> Iterator[str]:
    claim, run = evidence.claim, evidence.complete[0]
    for resumed in evidence.runs:
        if resumed.resumed:
            verdict = f"is not counted: {resumed.left_out}" if resumed.left_out else "counts"
            yield f"Seed {resumed.seed} was {literal(resumed.resumed)}; it {literal(verdict)}."
    device = run.env.get("gpu") or run.env.get("cpu")
    yield (f"The runs used {run.header.get('world_size')} x {literal(str(device))} and "
           f"torch {literal(str(run.env.get('torch')))}; their headers say more.")
    if parameters(evidence):
        yield f"The model has {parameters(evidence)} parameters."
    schemas = " and ".join(sorted({str(run.header["schema"]) for run in evidence.runs}))
    yield f"The claim has schema {claim.schema}, its logs have schema {schemas}."
    yield (f"The claim was written at {claim.created}, before the runs: {claim.n} runs,\n"
           f"seeds {claim.seeds[0]} to {claim.seeds[-1]}, tested after {claim.n}.")
    folder = shlex.quote(f"records/{claim.track}/{evidence.folder.name}")
    train = shlex.join(["python", "train_gpt.py", *claim.flags])
    yield fenced(f"{train} --seed {claim.seeds[0]} --trials {claim.n}\n"
                 f"python scripts/record.py verify {folder}")
    if (evidence.folder / "NOTES.md").is_file():
        yield "More about this record: [NOTES.md](NOTES.md)."


def source_part(evidence: Evidence) -> Iterator[str]:
    """The source and its diff from the claim before, whether that was shown or not."""
    claim = evidence.claim
    stored = source_path(Path("../.."), claim.source_sha256).as_posix()
    yield "## Source"
    yield (f"- source `{claim.source_sha256}`: [all files]({stored})\n"
           f"- configuration `{claim.config_sha256}`: [claim.json](claim.json)")
    if not (before := records.claim_before(evidence)):
        yield "This is the first claim on its track."
        return
    old = read_source(records_of(evidence.folder), before.source_sha256)
    lines = difference(old, evidence.source)
    changed = {name for name, _ in old.items() ^ evidence.source.items()}
    files = [source_path(Path("records"), one.source_sha256).as_posix() for one in (before, claim)]
    yield (f"The diff from the claim before it, {before.name}, has {len(lines):,} lines in "
           f"{len(changed)} files:")
    yield fenced(shlex.join(["git", "diff", "--no-index", *files]))
    if 0 < len(lines) <= LONGEST_DIFF:
        yield "<details><summary>Show the diff</summary>"
        yield fenced("\n".join(map(printable, lines)), "diff")
        yield "</details>"


def derived(evidence: Evidence) -> dict[str, bytes]:
    """The files of a record that follow from the others, by name."""
    record = json.dumps(plain(facts(evidence)), indent=1) + "\n"
    texts = {"record.json": record, "README.md": readme(evidence)}
    return {name: text.encode(errors="backslashreplace") for name, text in texts.items()}


def differences(evidence: Evidence) -> Iterator[Failure]:
    """The pages that are not, byte for byte, what the logs say."""
    for name, content in derived(evidence).items():
        path = evidence.folder / name
        same_size = path.is_file() and path.stat().st_size == len(content)  # else it may be huge
        if not same_size or path.read_bytes() != content:
            fix = f"write it with scripts/record.py make {evidence.folder}"
            yield Failure(f"{name} is not what the logs say", path, fix)


def leaderboard(evidences: Sequence[Evidence]) -> str:
    """The page of all tracks: claims in the order of their dates."""
    parts = [HEAD]
    for track in TRACKS:
        claims = [evidence for evidence in evidences if evidence.claim.track == track]
        if claims:
            parts += board(track, claims)
    return "\n\n".join(parts) + "\n"


def board(track: str, claims: Sequence[Evidence]) -> Iterator[str]:
    """The part of one track. A record was shown, and beats all that were shown before it.

    Times compete only on the same hardware.
    """
    rows, records = [], defaultdict[str, list[float]](list)  # their scores, by hardware
    for evidence in claims:
        claim, found = evidence.claim, evidence.result
        scores = records[evidence.hardware if evidence.track.in_time else ""]
        place = "no record" if evidence.shown else "not shown"
        if evidence.shown and evidence.score < min(scores, default=math.inf):
            scores.append(evidence.score)
            place = f"#{len(scores)}"
        name = f"[{claim.name}]({track}/{quote(evidence.folder.name)})"
        probes = [mean_probe(evidence, probe) for probe in PROBES]
        losses = ["" if math.isnan(loss) else f"{loss:.2f}" for loss in probes]
        rows.append((place, claim.created[:10], name, literal(evidence.hardware),
                     f"{claim.config['steps']:,}", f"{evidence.tokens / 1e6:,.3f}",
                     parameters(evidence), found.n,
                     f"{found.mean:.4f}", *losses, f"{found.sd:.4f}", f"{found.p:.2g}",
                     f"{evidence.median_ms / 1000:.1f}"))
    wins = "the shortest time" if TRACKS[track].in_time else "the fewest tokens"
    yield f"## {track}: to {TRACKS[track].target:g} nats per token in {wins}"
    yield table("| record | date | claim | hardware | steps | million tokens "
                "| parameters | n | mean loss | copied | new | sd | p | median s |", rows)
    yield ("*copied*: loss on validation tokens that end a pair seen earlier in the document;\n"
           "*new*: loss on all others. An empty cell: the logs do not have it.")
    if TRACKS[track].in_time:
        yield "Places count for each hardware: a claim competes only with claims on the same one."
    yield (f"Claims on this track: {len(claims)}. Each p is that of its own claim alone.\n"
           "Compare seconds only between runs on the same machine.")
    if best_of_each_recipe(claims):
        yield f"![Tokens of each recipe's best claim, and its losses]({track}/tokens.svg)"


def mean_probe(evidence: Evidence, probe: str) -> float:
    """Mean over the runs of a loss among the probes of their end lines; NaN where one lacks it."""
    return statistics.fmean([run.probe(probe) for run in evidence.complete] or [math.nan])


def parameters(evidence: Evidence) -> str:
    """The number of parameters of the first run, where its log has it."""
    count = evidence.complete[0].env.get("params") if evidence.complete else None
    return f"{count:,}" if type(count) is int else ""


def best_of_each_recipe(claims: Sequence[Evidence]) -> list[Evidence]:
    """The claim of each recipe that was shown with the best score, the best first."""
    best: dict[str, Evidence] = {}
    for evidence in sorted(claims, key=lambda one: one.score):
        if evidence.shown:
            best.setdefault(evidence.settings.get("recipe", ""), evidence)
    return list(best.values())


def plot_tokens(claims: Sequence[Evidence], path: Path) -> None:
    """Write the tokens of each claim, the most at the top, beside its loss by kind of token.

    An SVG, light and dark. The same claims give the same bytes, whatever the user's settings.
    Refused without matplotlib.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise Refused("pictures need matplotlib: pip install -r requirements-dev.txt") from None
    claims = sorted(claims, key=lambda one: one.tokens)
    names = [one.claim.name for one in claims]
    with style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(8, 1.2 + 0.4 * len(claims)), layout="constrained")
        bars, dots = figure.subplots(1, 2, sharey=True)
        drawn = bars.barh(names, [one.tokens / 1e6 for one in claims], height=0.6)
        bars.bar_label(drawn, fmt="%.3g", padding=3)
        bars.margins(x=0.12)  # room for the longest label
        bars.set_xlabel(f"million tokens, to end below {claims[0].claim.target:g}")
        for probe, label in PROBES.items():
            losses = [mean_probe(one, probe) for one in claims]  # NaN is not drawn
            dots.plot(losses, names, "o", label=label)
        dots.set_xlabel("loss at the end, nats per token")
        dots.legend()
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue().replace("</style>", f"{DARK}</style>", 1)
    path.write_text(svg, encoding="utf-8", newline="\n")
