"""The runs of the named folders, as JSON data. A log is read again only when its files change."""

import contextlib
import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from os import SEEK_END
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from claims.arms import PUBLIC_TARGETS, track_of
from claims.comparison import find_stutters, step_times
from claims.logs import find_runs, read_runs
from claims.runs import Run, Step, Validation, current_names
from runtime.errors import LogError, Refused
from runtime.jsonl import open_regular, plain
from runtime.settings import SETTINGS_OF_A_RUN

POINTS = 400  # of a curve: a screen shows no more
MARKS = 200  # skipped or slow steps of a run
READING = 0.5  # seconds that a reply may read logs; the next reply continues
Curves = dict[str, list[float | None]]


class Folder(NamedTuple):
    name: str  # as the page shows it
    path: Path  # a folder of logs, or one log
    record: bool  # its runs belong to a record, so they are a reference


def find_folders(paths: Sequence[str | Path]) -> list[Folder]:
    """The folders of logs. Of records, those of their runs. Refused if a path does not exist."""
    folders = []
    for path in map(Path, paths):
        if not path.exists():
            raise Refused(f"{path} does not exist: name a folder of run logs, such as logs")
        inside = sorted(path.iterdir()) if path.is_dir() else []
        records = [record for record in [path, *inside] if (record / "runs").is_dir()]
        folders += [Folder(record.resolve().name, record / "runs", True) for record in records]
        if not records:
            folders.append(Folder("/".join(path.parts[-2:]), path, False))
    return folders


def logs_of(folder: Folder) -> list[Path]:
    with contextlib.suppress(LogError, OSError):  # none yet, or the folder was removed
        return find_runs([folder.path])
    return []


def segments_of(first: Path) -> list[Path]:
    """The files of a run."""
    segments, path = [first], first.with_name(f"{first.stem}.2.jsonl")
    while path.exists():
        segments.append(path)
        path = first.with_name(f"{first.stem}.{len(segments) + 1}.jsonl")
    return segments


def column(values: Iterable[float | None]) -> np.ndarray:
    return np.array(list(values), dtype=float)  # None becomes NaN


def numbers(values: np.ndarray) -> list[float | None]:
    """For JSON: seven digits, None for NaN and infinity; empty if nothing is known."""
    if not np.isfinite(values).any():
        return []
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]


def means(values: np.ndarray, size: int) -> np.ndarray:
    """The mean of the finite values in each group of `size`, of which the last may be smaller."""
    rows = np.pad(values, (0, -len(values) % size), constant_values=math.nan).reshape(-1, size)
    known = np.isfinite(rows)
    with np.errstate(invalid="ignore"):  # 0 / 0 where nothing is known
        return np.where(known, rows, 0).sum(axis=1) / known.sum(axis=1)


def positions(points: Sequence[Step | Validation], tokens: dict[int, int | None]) -> Curves:
    """Where these points are on each axis. tokens: by step."""
    return {
        "step": numbers(column(point.step for point in points)),
        "tokens": numbers(column(tokens.get(point.step) for point in points)),
        "seconds": numbers(column(point.train_time_ms for point in points) / 1000),
    }


def losses(points: Sequence[Validation], tokens: dict[int, int | None]) -> Curves:
    return positions(points, tokens) | {"loss": numbers(column(point.loss for point in points))}


def curves(run: Run, tokens: dict[int, int | None]) -> Curves:
    """The steps in at most POINTS groups: mean training loss, and the rest at each group's end."""
    size = max(1, math.ceil(len(run.steps) / POINTS))
    last = run.steps[size - 1 :: size] + (run.steps[-1:] if len(run.steps) % size else [])
    ms = column(step.train_time_ms for step in last)
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.diff(column(step.tokens for step in last), prepend=0) / np.diff(ms, prepend=0)
    return positions(last, tokens) | {
        "loss": numbers(means(column(step.train_loss for step in run.steps), size)),
        "lr": numbers(column(step.lr_mul for step in last)),
        "window": numbers(column(step.window for step in last)),
        "speed": numbers(1000 * np.where(speed > 0, speed, math.nan)),
    }


def short_hash(*parts: object) -> str:
    return hashlib.sha256(ascii(parts).encode()).hexdigest()[:16]


def group_of(run: Run, folder: Folder) -> str:
    """Equal for runs of one source and configuration. Records, and unknown sources, stay apart."""
    place = folder.name if folder.record or not run.source else ""
    return short_hash(place, run.source, run.config_sha256)


def summary(run: Run, folder: Folder, modified: float) -> dict[str, Any]:
    """What the page shows of a run."""
    config: Any = run.header.get("config")
    config = current_names(config) if isinstance(config, dict) else {}
    points: list[Step | Validation] = [*run.steps, *run.validations]
    tokens = {step.step: step.tokens for step in run.steps} | {0: 0}
    skipped = [step for step in run.steps if step.skipped]
    slow = [run.steps[step - 1] for step in find_stutters(step_times(run))]
    facts = {
        "id": short_hash(run.path.resolve(), run.index), "group": group_of(run, folder),
        "name": run.run_id, "folder": folder.name, "record": folder.record, "track": run.track,
        "seed": run.seed, "target": run.target or PUBLIC_TARGETS.get(track_of(run) or ""),
        "source": run.source, "loss": run.final_loss,
        "config": {key: config[key] for key in config if key not in SETTINGS_OF_A_RUN},
        "total": run.total_steps or config.get("steps"),
        "done": max([point.step for point in points], default=0),
        "seconds": max([point.train_time_ms or 0 for point in points], default=0) / 1000 or None,
        "status": run.status or ("done" if run.complete else None), "modified": modified,
        "why": "; ".join(reason for reason in (run.left_out, run.resumed) if reason),
    }  # fmt: skip
    return plain(facts) | {
        "curve": curves(run, tokens), "val": losses(run.validations, tokens),
        "quick": losses(run.quick_validations, tokens),
        "skips": positions(skipped[:MARKS], tokens), "stutters": positions(slow[:MARKS], tokens),
    }  # fmt: skip


class Log(NamedTuple):  # as it was read last
    state: list[tuple[int, int]]  # change time in ns and size of each segment
    version: int
    runs: list[dict[str, Any]]
    segments: list[Path]
    error: str | None


class Store:
    """The runs of the folders. Every change raises `version`."""

    def __init__(self, folders: Sequence[Folder]) -> None:
        self.folders = folders
        self.logs: dict[Path, Log] = {}
        self.version = 0
        self.lock = Lock()

    def reply(self, since: int = 0, seconds: float = READING) -> dict[str, Any]:
        """All ids, and the runs that changed after a version. `more`: it has not read all yet."""
        with self.lock:
            more, logs = self.refresh(time.monotonic() + seconds), self.logs.values()
            return {
                "version": self.version, "more": more, "now": time.time(),
                "folders": [folder.name for folder in self.folders],
                "ids": [run["id"] for log in logs for run in log.runs],
                "runs": [run for log in logs if log.version > since for run in log.runs],
                "unread": [log.error for log in logs if log.error],
            }  # fmt: skip

    def refresh(self, until: float) -> bool:
        """Read what changed, and forget what is gone. Returns whether time ran out."""
        here: dict[Path, Log] = {}
        more = False
        for folder in self.folders:
            for path in logs_of(folder):
                more = more or time.monotonic() > until
                log = self.logs.get(path) if more else self.read(path, folder)
                here |= {path: log} if log else {}
        self.version += here.keys() != self.logs.keys()
        self.logs = here
        return more

    def read(self, path: Path, folder: Folder) -> Log:
        """The log as it is now; the one read before if its files did not change."""
        known, state, segments, runs, error = self.logs.get(path), [], [], [], None
        try:
            segments = segments_of(path)
            state = [(stat.st_mtime_ns, stat.st_size) for stat in map(Path.lstat, segments)]
            if known and known.state == state:
                return known
            modified = state[-1][0] / 1e9
            runs = [summary(run, folder, modified) for run in read_runs(path, links=False)]
        except (LogError, OSError, RecursionError) as problem:
            error = str(problem)
        self.version += 1
        return Log(state, self.version, runs, segments, error)

    def excerpt(self, run_id: str, most_bytes: int) -> dict[str, str] | None:
        """The first line of a run's log, and the last bytes of its last segment.

        None if the run is not known, or its log is no longer a file.
        """
        for log in list(self.logs.values()):
            if run_id in [run["id"] for run in log.runs]:
                with contextlib.suppress(OSError):
                    return read_ends(log.segments, most_bytes)
        return None


def read_ends(segments: Sequence[Path], most_bytes: int) -> dict[str, str]:
    with open_regular(segments[0], links=False) as file:
        first = file.readline(most_bytes).decode(errors="replace")
    with open_regular(segments[-1], links=False) as file:
        file.seek(max(0, file.seek(0, SEEK_END) - most_bytes))
        last = file.read(most_bytes).decode(errors="replace")
    return {"first": first, "last": last}
