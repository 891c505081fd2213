"""The pages that are derived from records: record.json and README.md of one, the leaderboards of all."""

import json
import shlex
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from runtime.jsonl import plain
from claims.evidence import TRACKS, Evidence, Failure, file_sha256
from claims.runlog import Run
from claims.stats import e_value

SCHEMA = 1


def facts(evidence: Evidence) -> dict[str, Any]:
    """What record.json says: every number recomputed from the logs."""
    claim, result, runs = evidence.claim, evidence.result, evidence.complete
    return {
        "schema": SCHEMA, "name": claim.name, "track": claim.track, "date": claim.created[:10], "claim": claim.id,
        "target": claim.target, "level": evidence.level, "shown": evidence.shown, "steps": claim.config["steps"],
        **{name: stable(value) for name, value in result._asdict().items()}, "n": result.n,
        "e_value": stable(e_value(evidence.losses, claim.target)), "train_time_ms": times(runs),
        "source_sha256": claim.source_sha256, "config_sha256": claim.config_sha256,
        "runs": [
            {"file": run.path.name, "sha256": file_sha256(run.path), "seed": run.seed, "val_loss": run.final_loss,
             "train_time_ms": run.train_time_ms} for run in runs
        ],
    }  # fmt: skip


def stable(value: float) -> float:
    """To ten digits: the last ones differ between processors and versions of the libraries."""
    return float(f"{value:.10g}")


def times(runs: list[Run]) -> dict[str, float]:
    found = [run.train_time_ms or 0.0 for run in runs]
    if not found:
        return {}
    return {"mean": statistics.fmean(found), "median": statistics.median(found), "min": min(found), "max": max(found)}


def table(head: str, rows: Iterable[Sequence[object]]) -> str:
    """In Markdown, under a line of headings such as | seed | loss |."""
    return "\n".join([head, "|-" * (head.count("|") - 1) + "|", *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def readme(evidence: Evidence) -> str:
    """The page of one record; nothing in it is typed by hand but the claim's own words."""
    claim, found, runs = evidence.claim, facts(evidence), evidence.complete
    if not runs:
        return f"# {claim.name}\n\nNo finished run.\n"
    verdict = "is shown" if found["shown"] else "is **not shown**"
    seconds = {name: f"{ms / 1000:.2f}" for name, ms in found["train_time_ms"].items()}
    flags = "".join(f" {shlex.quote(flag)}" for flag in claim.flags)
    return "\n\n".join([
        f"# {claim.name}, track {claim.track}: {found['steps']:,} steps",
        claim.about,
        f"That the mean validation loss lies below {claim.target:g} {verdict} by {found['n']} runs "
        f"(p = {found['p']:.3g}, level {found['level']:.3g}).",
        table("| n | mean | sd | t | p | 99 % upper bound | E-value |", [[
            found["n"], f"{found['mean']:.6f}", f"{found['sd']:.6f}", f"{found['t']:.4f}", f"{found['p']:.3g}",
            f"{found['upper99']:.5f}", f"{found['e_value']:.3g}",
        ]]),
        "Time on the clock: median {median} s, mean {mean} s, {min} to {max} s.".format_map(seconds),
        table("| seed | validation loss | seconds | log |", (
            (run.seed, f"{run.final_loss:.6f}", f"{(run.train_time_ms or 0) / 1000:.3f}",
             f"[{run.run_id}](runs/{run.path.name})") for run in runs)),
        *(f"Seed {run.seed} was {run.resumed}." for run in runs if run.resumed),
        f"Claimed {claim.created}, before the runs: {claim.n} runs, seeds {claim.seeds[0]} to {claim.seeds[-1]}, test "
        f"after {' and '.join(map(str, claim.looks))}.",
        table("| machine and checks | |", common(runs).items()),
        table("| phase | on the clock | ms, mean over runs |", ledger(runs)),
        f"```\npython train_gpt.py{flags} --seed {claim.seeds[0]} --trials {claim.n}\n"
        f"python scripts/record.py verify {shlex.quote(f'records/{claim.track}/{evidence.folder.name}')}\n```",
        *(["More of it: [NOTES.md](NOTES.md)."] if (evidence.folder / "NOTES.md").is_file() else []),
        f"Source `{claim.source_sha256}` in [source](source), configuration `{claim.config_sha256}` in "
        "[claim.json](claim.json).",
    ]) + "\n"


def common(runs: list[Run]) -> dict[str, str]:
    """What the headers say of machine and checks; where runs differ, all that was found."""
    seen: dict[str, dict[str, None]] = {}
    for run in runs:
        shown = {"ranks": run.header["world_size"], **run.env, **run.header["data"], **run.header["checks"]}
        for name, value in shown.items():
            seen.setdefault(name, {})[str(value)] = None
    return {name: "; ".join(values) for name, values in seen.items()}


def ledger(runs: list[Run]) -> Iterator[tuple[str, str, str]]:
    """Phases, whether timed, with their mean milliseconds a run, in the order in which they come first."""
    sums: dict[tuple[str, bool], float] = {}
    for run in runs:
        for phase in run.phases:
            sums[phase.name, phase.timed] = sums.get((phase.name, phase.timed), 0.0) + phase.ms
    for (name, timed), total in sums.items():
        yield name, "yes" if timed else "no", f"{total / len(runs):,.0f}"


def derived(evidence: Evidence) -> dict[str, bytes]:
    """The files of a record that follow from the others, by name."""
    texts = {"record.json": json.dumps(plain(facts(evidence)), indent=1) + "\n", "README.md": readme(evidence)}
    return {name: text.encode(errors="backslashreplace") for name, text in texts.items()}


def differences(evidence: Evidence) -> Iterator[Failure]:
    """A derived file that is not what the logs say."""
    for name, content in derived(evidence).items():
        path, expected = evidence.folder / name, content.decode().splitlines()
        found = path.read_text(errors="replace").splitlines() if path.is_file() else []
        if found != expected:
            line = next(i for i, (a, b) in enumerate(zip_longest(found, expected), 1) if a != b)
            what = f"line {line} is not what the logs say" if found else "missing"
            yield Failure(what, path, f"scripts/record.py make {evidence.folder}")


# ---- The leaderboards

HEAD = """# Records

Each record is a claim that was written before its runs, the logs of all these runs, and the source that made them.
`python scripts/record.py verify FOLDER` recomputes every number here from the logs; this page and its pictures are made
by `python scripts/record.py leaderboard`."""


def leaderboard(records: Path, evidences: Sequence[Evidence]) -> str:
    """The page of all tracks: claims in the order in which they were made, then what else was measured."""
    by_track = {track: [one for one in evidences if one.claim.track == track] for track in TRACKS}
    boards = [board(records, track, claims) for track, claims in by_track.items() if claims]
    ours = {records, *(evidence.folder for evidence in evidences)}
    pages = [path for path in sorted(records.rglob("README.md")) if path.parent not in ours]
    titles = [path.read_text().partition("\n")[0].lstrip("# ") for path in pages]
    lines = [f"- [{title}]({path.relative_to(records)})" for path, title in zip(pages, titles, strict=True)]
    return "\n\n".join([HEAD, *boards, "\n".join(["## Measurements", "", *lines])]) + "\n"


def records_of(evidences: Sequence[Evidence]) -> list[Evidence]:
    """The claims that were shown and beat all shown before them, in time or, where only steps count, in steps."""
    best: list[Evidence] = []
    for evidence in evidences:
        if evidence.shown and (not best or score(evidence) < score(best[-1])):
            best.append(evidence)
    return best


def score(evidence: Evidence) -> float:
    in_time = TRACKS[evidence.claim.track].in_time
    return times(evidence.complete)["median"] if in_time else evidence.claim.config["steps"]


def history(evidences: Sequence[Evidence]) -> list[tuple[str, str, int, float]]:
    """Date, name, steps and median seconds of the records, in order."""
    return [
        (evidence.claim.created[:10], evidence.claim.name, evidence.claim.config["steps"],
         times(evidence.complete)["median"] / 1000) for evidence in records_of(evidences)
    ]  # fmt: skip


def board(records: Path, track: str, claims: list[Evidence]) -> str:
    best, rows = records_of(claims), []
    for evidence in claims:
        claim, found, clock = evidence.claim, evidence.result, times(evidence.complete)
        place = f"#{best.index(evidence) + 1}" if evidence in best else "no record" if evidence.shown else "not shown"
        rows.append((
            place, claim.created[:10], f"[{claim.name}]({evidence.folder.relative_to(records)})",
            f"{claim.config['steps']:,}", found.n, f"{found.mean:.4f}", f"{found.sd:.4f}", f"{found.p:.2g}",
            f"{clock.get('median', 0) / 1000:.1f}",
        ))  # fmt: skip
    unit = "seconds" if TRACKS[track].in_time else "steps"
    return "\n\n".join([
        f"## {track}: {TRACKS[track].target:g} nats per token, counted in {unit}",
        table("| record | date | claim | steps | n | mean loss | sd | p | median s |", rows),
        f"{len(claims)} claims were made on this track, and each p is that of its own claim alone. Seconds are those "
        "of the machine that each was made on.",
        f"![time line]({track}/timeline.svg) ![loss curves]({track}/losses.svg)",
    ])
