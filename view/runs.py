"""The runs of the named folders, as JSON data. A log is read again only when its files change."""

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from claims.arms import PUBLIC_TARGETS, common_folder, judge_arm, track_of
from claims.compare import in_sentences
from claims.logs import find_folders as find_log_folders
from claims.logs import find_runs, read_runs
from claims.runs import NEW_TOKENS, Run, Step, Validation, shared_measure
from runtime.errors import LogError, Refused
from runtime.jsonl import json_hash, plain
from runtime.settings import SETTINGS_OF_A_RUN

POINTS = 200  # of a curve: a screen shows no more
MARKS = 200  # skipped steps of a run
READING = 1.0  # seconds that a reply may read logs; the next reply continues
Curves = dict[str, list[float | None]]


class Folder(NamedTuple):
    name: str  # as the page shows it
    path: Path  # a folder of logs, or one log
    record: bool = False  # the runs of a record are a reference


def find_folders(paths: Sequence[str | Path]) -> list[Folder]:
    """The folders of logs. Of records, those of their runs. Refused if a path does not exist."""
    folders = []
    for path in map(Path, paths):
        if not path.exists():
            raise Refused(f"{path} does not exist: name a folder of run logs; ./run.sh makes logs")
        inside = sorted(path.iterdir()) if path.is_dir() else []
        records = [record for record in [path, *inside] if (record / "runs").is_dir()]
        folders += [Folder(record.resolve().name, record / "runs", True) for record in records]
        if not records:
            folders.append(Folder("/".join(path.parts[-2:]) or path.resolve().name, path))
    return list({folder.path.resolve(): folder for folder in folders}.values())


def column(values: Iterable[float | None]) -> np.ndarray:
    return np.array(list(values), dtype=float)  # None becomes NaN


def thin(steps: Sequence[Step]) -> list[Step]:
    """About POINTS steps: of each group one with its mean training loss, and all skipped ones."""
    size, kept = math.ceil(len(steps) / POINTS) or 1, []
    for start in range(0, len(steps), size):
        group = steps[start : start + size]
        mean = float(column(step.train_loss for step in group).mean())
        last = next((step for step in reversed(group) if is_whole(step)), group[-1])
        kept += [last._replace(train_loss=mean) if step is last else step
                 for step in group if step is last or step.skipped]  # fmt: skip
    return kept


def is_whole(step: Step) -> bool:
    """Whether every optimizer took this step.

    Adam may take every second one. The others are quicker, and their norm leaves out most
    parameters: next to whole steps they would draw a zigzag that looks like instability.
    """
    return all((step.grad_norms or {}).values())


def is_written(log: Path) -> bool:
    """Whether a process holds the lock of a run (runtime/log.py), as it does until its end."""
    try:
        import fcntl

        with log.with_name(f".{log.stem}.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # on Windows, or a log of others
        return False
    return False


def numbers(values: np.ndarray) -> list[float | None]:
    """For JSON: seven digits, None for NaN and infinity; empty if nothing is known."""
    if not np.isfinite(values).any():
        return []
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]


def positions(points: Sequence[Step | Validation], tokens: np.ndarray) -> Curves:
    """Where these points are on each axis. tokens: steps and the tokens after them, (2, n)."""
    steps = column(point.step for point in points)
    return {
        "step": numbers(steps),
        "tokens": numbers(np.interp(steps, tokens[0], tokens[1], right=math.nan)),
        "seconds": numbers(column(point.train_time_ms for point in points) / 1000),
    }


def losses(points: Sequence[Validation], tokens: np.ndarray) -> Curves:
    return positions(points, tokens) | {"loss": numbers(column(point.loss for point in points))}


def curves(run: Run, tokens: np.ndarray) -> Curves:
    whole = np.array([is_whole(step) for step in run.steps], dtype=bool)
    norm = np.where(whole, column(step.grad_norm for step in run.steps), math.nan)
    speed = np.full(len(whole), math.nan)  # since the whole step before
    with np.errstate(divide="ignore", invalid="ignore"):
        speed[whole] = np.diff(column(step.tokens for step in run.steps)[whole], prepend=0)
        ms = column(step.train_time_ms for step in run.steps)[whole]
        speed[whole] /= np.diff(ms, prepend=0)
    return positions(run.steps, tokens) | {
        "loss": numbers(column(step.train_loss for step in run.steps)),
        "norm": numbers(norm),
        "lr": numbers(column(step.lr_mul for step in run.steps)),
        "window": numbers(column(step.window for step in run.steps)),
        "speed": numbers(1000 * np.where(speed > 0, speed, math.nan)),
    }


def summary(run: Run, folder: Folder, modified: float) -> dict[str, Any]:
    """What the page shows of a run."""
    config: Any = run.header.get("config")
    config = config if isinstance(config, dict) else {}
    points: list[Step | Validation] = [*run.steps, *run.validations]
    tokens = np.array([(0, 0), *((step.step, step.tokens) for step in run.steps)], dtype=float).T
    skipped = [step for step in run.steps if step.skipped]
    # Records, runs of unknown sources and the arms of a judgement stay apart.
    apart = folder.name if folder.record or not run.source else ""
    arm = "/".join(run.path.parts[-3:-1]) if run.path.parent.name in ("A", "B") else ""
    facts = {
        "id": json_hash([str(run.path.resolve()), run.index]),
        "group": json_hash([apart, arm, run.source, run.config_sha256]),
        "name": run.run_id, "arm": arm, "folder": folder.name, "record": folder.record,
        "track": run.track or "other logs", "seed": run.seed,
        "target": run.target or PUBLIC_TARGETS.get(track_of(run) or ""),
        "source": run.source, "loss": run.final_loss,
        "new_tokens": run.probe(*NEW_TOKENS), "new_measure": shared_measure([run]),
        "held_out": run.probe("loss_held_out"),
        "config": {key: config[key] for key in config if key not in SETTINGS_OF_A_RUN},
        "total": run.total_steps or config.get("steps"),
        "done": max([point.step for point in points], default=0),
        "seconds": max([point.train_time_ms or 0 for point in points], default=0) / 1000 or None,
        "status": run.end.get("status", "done" if run.complete else None), "modified": modified,
        "more": {"log": str(run.path), "end": run.end, "machine": run.env},
        "why": "; ".join(reason for reason in (run.left_out, run.resumed) if reason),
    }  # fmt: skip
    return plain(facts) | {
        "curve": curves(run, tokens), "val": losses(run.validations, tokens),
        "skips": positions(skipped[:MARKS], tokens),
    }  # fmt: skip


class Log(NamedTuple):  # as it was read last
    state: list[tuple[int, int]]  # change time in ns and size of each segment
    version: int
    runs: list[dict[str, Any]]  # as the page shows those found
    found: list[Run]
    error: str | None


class Store:
    """The runs of the folders. Every change raises `version`."""

    def __init__(self, folders: Sequence[Folder]) -> None:
        self.folders = folders
        self.logs: dict[Path, Log] = {}
        self.version = time.time_ns() // 10**6  # above what a page has from an earlier server
        self.lock = Lock()

    def reply(self, since: int = 0, seconds: float = READING) -> dict[str, Any]:
        """All ids, and the runs that changed after a version. `more`: it has not read all yet."""
        with self.lock:
            more, logs = self.refresh(time.monotonic() + seconds), self.logs.values()
            return {
                "version": self.version, "more": more, "now": time.time(),
                "live": [run["id"] for path, log in self.logs.items() for run in log.runs
                         if run["status"] is None and is_written(path)],
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
            found: list[Path] = []
            with contextlib.suppress(LogError, OSError):  # none yet, or the folder was removed
                inside = find_log_folders(folder.path)[0]  # of a judgement: its arms
                found = find_runs(inside or [folder.path])
            for path in found:
                more = more or time.monotonic() > until
                log = self.logs.get(path) if more else self.read(path, folder)
                here |= {path: log} if log else {}
        self.version += here.keys() != self.logs.keys()
        self.logs = here
        return more

    def read(self, path: Path, folder: Folder) -> Log:
        """The log as it is now; the one read before if its files did not change."""
        known, error = self.logs.get(path), None
        state: list[tuple[int, int]] = []
        segments = [path]
        try:
            while (later := path.with_name(f"{path.stem}.{len(segments) + 1}.jsonl")).exists():
                segments.append(later)
            stats = [segment.lstat() for segment in segments]
            state = [(stat.st_mtime_ns, stat.st_size) for stat in stats]
            if known and known.state == state:
                return known
            modified = state[-1][0] / 1e9
            found = [replace(run, steps=thin(run.steps)) for run in read_runs(path)]
            runs = [summary(run, folder, modified) for run in found]
        except (LogError, OSError, RecursionError) as problem:
            error, runs, found = str(problem), [], []
        self.version += 1
        return Log(state, self.version, runs, found, error)

    def compare(self, a: str, b: str) -> str | None:
        """Two groups compared, in sentences; None if one is not known."""
        groups: dict[str, list[Run]] = {a: [], b: []}
        for log in list(self.logs.values()):
            for shown, run in zip(log.runs, log.found, strict=True):
                groups.get(shown["group"], []).append(run)
        if not all(groups.values()):
            return None
        one, other = (judge_arm(common_folder(groups[name]), groups[name]) for name in (a, b))
        if not one.runs or not other.runs:
            return "One of the two has no finished run: nothing to compare yet."
        return in_sentences(one, other)
