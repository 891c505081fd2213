"""The verdicts beside the runs: judgements and records, each with its diff; groups compared."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from claims.arms import compare_arms, judge_arm
from claims.judge import JUDGEMENTS, UNITS, Verdict, read_judgements
from claims.runs import Run
from claims.stats import in_words
from runtime.errors import LogError
from runtime.jsonl import check_regular, read_regular

MOST_BYTES = 2**22  # of a diff or a record's page
FAULTS = (LogError, OSError, ArithmeticError, KeyError, RecursionError, TypeError, ValueError)


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
    unit = UNITS[entry["metric"]]
    word, text = "unfinished", f"at most {entry['pairs']} pairs"
    if "outcome" in entry:
        known = [name for name in Verdict._fields[3:] if name in entry]  # older ones have no skew
        numbers = {name: float(entry[name]) for name in known}
        verdict = Verdict(str(entry["outcome"]), True, entry["done"], **numbers)
        word = verdict.outcome
        text = (f"B - A {in_words(verdict, '+.4g')} {unit}, {verdict.confidence:.0%} interval, "
                f"{verdict.pairs} pairs")  # fmt: skip
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
        text = (f"mean {page['mean']:.4f} below {page['target']:g}, p {page['p']:.2g}, "
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


def compare(a: Sequence[Run], b: Sequence[Run]) -> str:
    """B - A in sentences, as `significance.py --against` finds it. LogError for a shared log."""
    arms = judge_arm("A", a), judge_arm("B", b)
    if not all(arm.runs for arm in arms):
        return "One of the two has no finished run: nothing to compare yet."
    found = compare_arms(*arms)
    word = "no difference shown"
    if found.loss.high < 0 or found.loss.low > 0:
        word = "B is better" if found.loss.high < 0 else "A is better"
    how = "pairs of one seed" if found.pairs else "independent samples"
    counts = " and ".join(str(len(arm.runs)) for arm in arms)
    left_out = [f"left out: {reason}" for arm in arms for reason in arm.left_out]
    result = f"loss of B - A {in_words(found.loss, '+.4f')}: {word}"
    return "\n".join([f"{result} (95 % interval; {counts} runs as {how})", *left_out])
