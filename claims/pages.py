"""The pages of records: the README.md of each, the leaderboard of all with a picture.

Text from claims and logs is escaped: it cannot pass for a part of the page.
"""

import math
import re
import shlex
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

from claims import record as records
from claims.arms import ALPHA
from claims.checks import Failure
from claims.record import (
    MOST_ABOVE,
    TRACKS,
    Evidence,
    difference,
    read_source,
    records_of,
    source_path,
)
from claims.runs import NEW_TOKENS
from runtime.errors import Refused

LONGEST_DIFF = 1000  # lines; of a longer one the page only says how long it is
HEAD = """# Records

Each folder has a claim that was written before its runs, their logs and source.
`python scripts/record.py verify FOLDER` recomputes its numbers, `make` writes this page.

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
# Losses by kind of token: their names in logs, the best measure first.
COPIED, NEW, HELD_OUT = ("loss_on_copied", "copy_loss"), NEW_TOKENS, ("loss_held_out",)
MARK = "†"  # of a loss on new tokens that is measured as in logs before 2026-11-29
MARKED = f"""{MARK} as in logs before 2026-11-29: of the first 16,384 validation tokens; a pair
more than 176 tokens back counts as new."""


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
    yield f"# {claim.name}, track {claim.track}: {claim.config['steps']:,} steps"
    about = textwrap.indent(textwrap.fill(literal(claim.about), 98, break_long_words=False), "> ")
    yield re.sub(r"^> (\d+(?=[.)]( |$))|(?=[-+=]))", r"> \1\\", about, flags=re.M)  # no heading
    yield "\n".join(f"- {'**Shown**' if shown else '**Not shown**'}: {literal(condition)}."
                    for condition, shown in conditions(evidence))  # fmt: skip
    if evidence.new_tokens and evidence.new_tokens.measure != NEW[0]:
        yield MARKED
    if evidence.narrow:
        yield literal(f"{evidence.narrow}.")
    row = (result.n, f"{result.mean:.6f}", f"{result.sd:.6f}", f"{result.t:.4f}",
           f"{result.p:.3g}", f"{result.upper99:.5f}", f"{evidence.median_ms / 1000:.2f}")
    yield table("| n | mean | sd | t | p | 99 % upper bound | median s |", [row])
    rows = []
    for run in evidence.complete:
        link = f"[{literal(run.run_id)}](runs/{quote(run.path.name)})"
        seconds = f"{(run.train_time_ms or 0.0) / 1000:.3f}"
        rows.append((run.seed, f"{run.final_loss:.6f}", seconds, link))
    yield table("| seed | validation loss | training s | log |", rows)


def conditions(evidence: Evidence) -> Iterator[tuple[str, bool]]:
    """The conditions of the track's rule, in words, and whether the runs show them."""
    claim, result, new = evidence.claim, evidence.result, evidence.new_tokens
    found = f"{result.n} runs that count, too few for a test"
    if result.n > 1:
        found = (f"{result.mean:.6f} in {result.n} runs, p = {result.p:.3g}, "
                 f"level {claim.alpha:g}")  # fmt: skip
    yield f"mean loss on all validation tokens below {claim.target:g}: {found}", evidence.below
    if new is not None:
        mark = "" if new.measure == NEW[0] else MARK
        yield (f"loss on new tokens{mark} at most {MOST_ABOVE:g} above the baseline's, "
               f"{evidence.track.baseline}: {new.mean:.4f} against {new.baseline:.4f}, "
               f"p = {new.p:.3g}, level {claim.alpha:g}"), new.shown  # fmt: skip


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
    yield tried_part(evidence)
    folder = shlex.quote(f"records/{claim.track}/{evidence.folder.name}")
    train = shlex.join(["python", "train_gpt.py", *claim.flags])
    yield fenced(f"{train} --seed {claim.seeds[0]} --trials {claim.n}\n"
                 f"python scripts/record.py verify {folder}")
    if (evidence.folder / "NOTES.md").is_file():
        yield "More about this record: [NOTES.md](NOTES.md)."


def tried_part(evidence: Evidence) -> str:
    """How much was tried before: of many claims one may pass by chance."""
    tried = evidence.tried_before
    steps = ", ".join(f"{each:,}" for each in tried.steps)
    claims = f"{len(tried.steps)} step counts ({steps})" if tried.steps else "nothing"
    runs = "no other run"
    if tried.runs:
        runs = f"{tried.runs} other runs of {tried.settings} configurations"
    return (f"Claimed before it on this track: {claims}.\n"
            f"Its log folder had {runs} on this track before its first.")  # fmt: skip


def source_part(evidence: Evidence) -> Iterator[str]:
    """The source and its diff from the claim before, whether that was shown or not."""
    claim = evidence.claim
    stored = source_path(Path("../.."), claim.source_sha256).as_posix()
    yield "## Source"
    yield (f"- source `{claim.source_sha256}`: [all files]({stored})\n"
           f"- configuration `{claim.config_sha256}`: [claim.json](claim.json)")
    if not (earlier := records.claims_before(evidence)):
        yield "This is the first claim on its track."
        return
    before = earlier[-1]
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


def write_page(evidence: Evidence) -> None:
    """Write the record's README.md."""
    (evidence.folder / "README.md").write_bytes(readme(evidence).encode(errors="backslashreplace"))


def differences(evidence: Evidence) -> Iterator[Failure]:
    """A failure where the page is not, byte for byte, what the logs say."""
    path, content = evidence.folder / "README.md", readme(evidence)
    written = content.encode(errors="backslashreplace")
    same_size = path.is_file() and path.stat().st_size == len(written)  # else it may be huge
    if not same_size or path.read_bytes() != written:
        fix = f"write it with scripts/record.py make {evidence.folder}"
        yield Failure("README.md is not what the logs say", path, fix)


def leaderboard(evidences: Sequence[Evidence]) -> str:
    """The page of all tracks that have a board: claims in the order of their dates."""
    parts = [HEAD]
    for track in TRACKS:
        claims = [evidence for evidence in evidences if evidence.claim.track == track]
        if claims and TRACKS[track].ranked:
            parts += board(track, claims)
    return "\n\n".join(parts) + "\n"


def board(track: str, claims: Sequence[Evidence]) -> Iterator[str]:
    """The part of one track: the baseline, then what its rule accepts, the best score last.

    Times compete only on the same hardware. Of equal scores the oldest is the record.
    """
    in_time = TRACKS[track].in_time
    ranked = [one for one in claims if one.shown]
    ranked.sort(key=lambda one: one.claim.created, reverse=True)
    ranked.sort(key=lambda one: (not one.is_baseline, in_time and one.hardware, -one.score))
    best = {in_time and one.hardware: one for one in ranked}  # the last of each
    places = {one.claim.id: "**record**" for one in best.values()}
    places |= {one.claim.id: "baseline" for one in ranked if one.is_baseline}
    wins = "the shortest time" if in_time else "the fewest tokens"
    yield f"## {track}: to {TRACKS[track].target:g} nats per token in {wins}"
    yield table(BOARD, [board_row(one, places.get(one.claim.id, "")) for one in ranked])
    if others := [one for one in claims if not one.shown]:
        yield "Claims that do not fulfil the rule, and the condition that they miss:"
        missed = ["new tokens" if one.below else "target" for one in others]
        yield table(BOARD, [board_row(*each) for each in zip(others, missed, strict=True)])
    if TRACKS[track].baseline:
        yield (f"The rule has two conditions, each shown at p < {ALPHA:g}: the mean loss on all "
               f"validation tokens is\nbelow {TRACKS[track].target:g}, and the loss on new tokens "
               f"is less than {MOST_ABOVE:g} above the baseline's.")  # fmt: skip
    yield LEGEND
    if any(mean_probe(one, *NEW[:1]) != mean_probe(one, *NEW) for one in claims):
        yield MARKED
    if in_time:
        yield "A claim competes only with claims on the same hardware."
    yield (f"Claims on this track: {len(claims)}. Each p is that of its own claim.\n"
           "Compare seconds only between runs on the same machine.")
    if best_of_each_recipe(claims):
        yield f"![Tokens of each recipe's best claim, and its losses]({track}/tokens.svg)"


LEGEND = """*new*: loss on validation tokens that do not end a pair seen earlier in their document.
*copied*: loss on the others. *held out*: loss on a slice of the text by which nothing is ever
chosen. An empty cell: the logs do not have it."""
BOARD = ("| record | date | claim | hardware | steps | million tokens | parameters | n | mean loss "
         "| sd | p | new | above baseline | p | copied | held out | median s |")  # fmt: skip


def board_row(evidence: Evidence, place: str) -> list[object]:
    claim, found, new = evidence.claim, evidence.result, evidence.new_tokens
    measured = mean_probe(evidence, NEW[0])
    mark = MARK if math.isnan(measured) or (new and new.measure != NEW[0]) else ""
    on_new = mean_probe(evidence, new.measure) if new else mean_probe(evidence, *NEW)
    return [
        place, claim.created[:10], f"[{claim.name}]({claim.track}/{quote(evidence.folder.name)})",
        literal(evidence.hardware), f"{claim.config['steps']:,}", f"{evidence.tokens / 1e6:,.3f}",
        parameters(evidence), found.n, f"{found.mean:.4f}", f"{found.sd:.4f}", f"{found.p:.2g}",
        "" if math.isnan(on_new) else f"{on_new:.3f}{mark}",
        *([f"{new.mean - new.baseline:+.3f}", f"{new.p:.2g}"] if new else ["", ""]),
        cell(mean_probe(evidence, *COPIED), ".2f"), cell(mean_probe(evidence, *HELD_OUT), ".4f"),
        f"{evidence.median_ms / 1000:.1f}",
    ]  # fmt: skip


def cell(loss: float, form: str) -> str:
    return "" if math.isnan(loss) else f"{loss:{form}}"


def mean_probe(evidence: Evidence, *names: str) -> float:
    """Mean over the runs of a loss among the probes of their end lines; NaN where one lacks it."""
    return statistics.fmean([run.probe(*names) for run in evidence.complete] or [math.nan])


def parameters(evidence: Evidence) -> str:
    """The number of parameters of the first run, where its log has it."""
    count = evidence.complete[0].env.get("params") if evidence.complete else None
    return f"{count:,}" if type(count) is int else ""


def best_of_each_recipe(claims: Sequence[Evidence]) -> list[Evidence]:
    """The claim of each recipe that was shown with the best score, the best first."""
    best: dict[str, Evidence] = {}
    for evidence in sorted(claims, key=lambda one: one.score):
        if evidence.shown:
            best.setdefault(evidence.claim.config.get("recipe", ""), evidence)
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
        for label, names_in_logs in {"copied tokens": COPIED, "new tokens": NEW}.items():
            losses = [mean_probe(one, *names_in_logs) for one in claims]  # NaN is not drawn
            dots.plot(losses, names, "o", label=label)
        dots.set_xlabel("loss at the end, nats per token")
        dots.legend()
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue().replace("</style>", f"{DARK}</style>", 1)
    path.write_text(svg, encoding="utf-8", newline="\n")
