"""Find and read run logs: those of this trainer and those of the public NanoGPT speedruns.

Nothing that is read is executed. `jsonlog.py` and `textlog.py` know the formats.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from claims.jsonlog import read_jsonl
from claims.runs import Run
from claims.textlog import read_text
from runtime.errors import LogError
from runtime.jsonl import read_regular

SUFFIXES = (".jsonl", ".txt", ".log", ".stdout", ".out")
SEGMENT = re.compile(r"(.+)\.([2-9]|[1-9][0-9]{1,5})\.jsonl")  # <run_id>.2.jsonl
# Of a run, all segments together: a hundred thousand steps, read in a few seconds.
MAX_BYTES, MAX_LINES, MAX_SEGMENTS = 32 * 2**20, 250_000, 200


def first_segment(path: Path) -> Path:
    """The first segment of the run that this file belongs to; the file itself if there is none."""
    match = SEGMENT.fullmatch(path.name)
    first = path.with_name(f"{match[1]}.jsonl") if match else path
    return first if first.exists() else path


def read_runs(path: str | Path, links: bool = True) -> list[Run]:
    """The runs in one file; for a segment, the run that it belongs to.

    An unfinished run says why in `unfinished`. Raises LogError for a file that is no
    run log; the message names the file, the line and the rule. links: whether to follow links.
    """
    first = first_segment(Path(path))
    segments = read_segments(first, links)
    data = segments[0][1]
    if not data:
        raise LogError(f"{first} is empty: its run ended before its first line. Take it out.")
    if first.suffix != ".jsonl" and not data.startswith(b'{"'):
        return read_text(first, data)
    return [read_jsonl(segments)]


def read_segments(first: Path, links: bool) -> list[tuple[Path, bytes]]:
    """The files of a run with their contents. LogError if they are too large together."""
    segments: list[tuple[Path, bytes]] = []
    path, size, lines = first, 0, 0
    while path == first or path.exists():
        try:
            data = read_regular(path, MAX_BYTES - size, links)
        except OSError as error:
            raise LogError(f"cannot read {path}: {error.strerror}") from error
        segments.append((path, data))
        size += len(data)
        lines += data.count(b"\n")
        if lines > MAX_LINES:
            raise LogError(f"{path}: its run has {lines:,} lines, and {MAX_LINES:,} are the most")
        if len(segments) > MAX_SEGMENTS:
            raise LogError(f"{path}: {MAX_SEGMENTS} segments of a run are the most")
        path = first.with_name(f"{first.stem}.{len(segments) + 1}.jsonl")
    return segments


def read_run(path: str | Path) -> Run:
    """The run in a file that holds exactly one, else LogError; see `read_runs`."""
    runs = read_runs(path)
    if len(runs) != 1:
        raise LogError(f"{path} holds {len(runs)} runs where one is needed")
    return runs[0]


def finished_runs(folder: Path) -> list[Run]:
    """The runs in a folder that finished or diverged, the oldest first."""
    logs = sorted(folder.glob("*_*.jsonl"))  # run ids sort by start time
    runs = [run for log in logs for run in read_runs(log)]
    return [run for run in runs if run.complete or run.status == "nonfinite"]


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """The first files of the runs that the paths name, each once.

    A folder is read without its subfolders: files with a log's suffix that are no registry. Of a
    record its runs/ is read. Raises LogError where there is nothing.
    """
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        logs = [path]
        if path.is_dir():
            if (path / "claim.json").exists() and (path / "runs").is_dir():
                path /= "runs"
            logs = sorted(log for log in path.iterdir() if log.suffix in SUFFIXES)
            logs = [log for log in logs if not log.name.startswith("registry")]
            if not logs:
                kinds = ", *".join(SUFFIXES)
                raise LogError(f"no run logs (*{kinds}) in {path}; name subfolders, if it has some")
        for log in map(first_segment, logs):
            found.setdefault(os.path.realpath(log), log)
    return list(found.values())


def read_all(paths: Sequence[str | Path]) -> tuple[list[Run], list[LogError]]:
    """All runs of files and folders, and an error for each file in a folder that is no run log.

    Raises LogError if a file that was named itself is no run log.
    """
    named = set(map(Path, paths))
    runs: list[Run] = []
    errors = []
    for path in find_runs(paths):
        try:
            runs += read_runs(path)
        except LogError as error:
            if path in named:
                raise
            errors.append(error)
    return runs, errors
