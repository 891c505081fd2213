"""The verdicts beside the runs: judgements and records, each with its diff; groups compared."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from claims.arms import ArmVerdict, Comparison
from claims.judge import JUDGEMENTS, UNITS, read_judgements
from claims.stats import Difference, in_words, moments
from runtime.jsonl import check_regular, read_regular

MOST_BYTES = 2**22  # of a diff or a record's page
FAULTS = (OSError, ArithmeticError, KeyError, RecursionError, TypeError, ValueError)


def find(path: Path, record: Path | None) -> list[dict[str, str]]:
    """What the page says of a record, or of the judgements in a folder of logs.

    An error of FAULTS for files that are none.
    """
    if record:
        return [describe_record(record)]
    folders = [folder for folder in (path, path / "judge") if (folder / JUDGEMENTS).exists()]
    for folder in folders:
        check_regular(folder / JUDGEMENTS)
    return [describe_judgement(folder, entry)
            for folder in folders for entry in read_judgements(folder)]  # fmt: skip


def describe_judgement(folder: Path, entry: dict[str, Any]) -> dict[str, str]:
    unit = UNITS.get(entry["metric"], entry["metric"])  # older judgements have steps
    word, text = "unfinished", f"at most {entry['pairs']} pairs"
    if "outcome" in entry:
        word = str(entry["outcome"])
        mean, low, high = (float(entry[name]) for name in ("mean", "low", "high"))
        share = float(entry.get("confidence", 0.99))  # the first judgements wrote none
        found = in_words(Difference(mean, low=low, high=high), "+.4g")
        text = f"B - A {found} {unit}, {share:.0%} interval, {entry['done']} pairs"
    arms = [f"{name}: {' '.join(entry[name]['flags']) or 'no flags'}" for name in ("A", "B")]
    margin = f"smallest difference that matters: {entry['margin']:g} {unit}"
    return {"name": f"judgement {entry['run_id']}", "word": word, "text": text,
            "head": "\n".join([*arms, margin, "", ""]),
            "path": str(folder / entry["run_id"] / "source.diff")}  # fmt: skip


def describe_record(folder: Path) -> dict[str, str]:
    """A record without record.json only claims."""
    word, text = "unfinished", "claimed, without a verdict yet"
    with contextlib.suppress(FileNotFoundError):
        page = json.loads(read_regular(folder / "record.json", MOST_BYTES, links=False))
        word = "shown" if page["shown"] else "not shown"
        mean, p = float(page["mean"]), float(page["p"])  # of too few runs "nan"
        text = (f"mean {mean:.4f} below {page['target']:g}, p {p:.2g}, "
                f"{page['n']} runs of {page['steps']} steps")  # fmt: skip
    return {"name": folder.name, "word": word, "text": text, "head": "",
            "path": str(folder / "README.md")}  # fmt: skip


def read_diff(verdict: dict[str, str]) -> str:
    """What was compared with the diff of the sources; of a record its page, which has it."""
    try:
        text = read_regular(Path(verdict["path"]), MOST_BYTES, links=False).decode(errors="replace")
    except OSError as problem:
        return f"cannot read {verdict['path']}: {problem.strerror}"
    return verdict["head"] + (text.strip() or "The sources do not differ.")


# ---- Two groups


def in_sentences(a: ArmVerdict, b: ArmVerdict, found: Comparison) -> str:
    """What the page says of two groups, and `significance.py --against` of two arms."""
    lines = []
    for name, arm in (("A", a), ("B", b)):
        loss, seconds = moments(arm.losses)[0], moments(arm.seconds)[0]
        time = f", {seconds:.3f} s" if seconds >= 0 else ""  # NaN: the logs have no times
        lines += [f"{name} = {arm.name}: n {len(arm.runs)}, loss {loss:.5f}{time}"]
        lines += [f"  {warning}" for warning in arm.warnings]
        lines += [f"  left out: {lost['path']}: {lost['reason']}" for lost in arm.incomplete]
    how = f"on {found.pairs} pairs of one seed" if found.pairs else "of independent runs"
    word = direction(found.loss, "lower", "higher")
    lines.append(f"B - A {how}, with 95 % intervals:")
    lines.append(f"  loss {in_words(found.loss, '+.5f')}, {word}")
    if found.differs:
        lines.append("  times are not compared, as the machines differ:")
        lines += [f"    {what}" for what in found.differs]
    elif not math.isnan(found.seconds.mean):
        word = direction(found.seconds, "faster", "slower")
        lines.append(f"  time {in_words(found.seconds, '+.3f')} s, {word}, on this machine")
    if found.equal_loss is not None:
        p = "no test" if math.isnan(found.equal_loss) else f"p = {found.equal_loss:.3g}"
        lines.append(f"  losses differ by less than the margin: {p}")
    return "\n".join(lines)


def direction(found: Difference, below: str, above: str) -> str:
    if found.high < 0:
        return below
    return above if found.low > 0 else f"not shown to be {below} or {above}"
