"""Checkpoints: all that a run needs to go on, as numbers and text alone, so that reading one executes nothing.

    <folder of the run>/step_000123/model.safetensors    parameters by name, whole
                                    optim.safetensors    state of optimizers, guard and random generators, whole
                                    state.json           what the run is and where it stands
                                    checksums.json       SHA-256 of the three
A checkpoint appears under its name when it is on the disk, or not at all; it belongs to no number of ranks.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.jsonl import json_line

SCHEMA = 1
MODEL, OPTIM, STATE, SUMS = "model.safetensors", "optim.safetensors", "state.json", "checksums.json"
FIELDS = {  # of a state, to go on with
    "run_id": str, "step": int, "log_offset": int, "log_waiting": str, "clock_ms": float, "data": dict,
}  # fmt: skip
KEPT = 2  # newest checkpoints of a run: if a power cut spoils one, there is the other
MOST_JSON_BYTES = 2**26


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: names the file, the rule and the fix."""


class Snapshot(NamedTuple):
    """A run between two steps; tensors on the host, `state` in the types of JSON with the step."""

    model: dict[str, Tensor]
    optim: dict[str, Tensor]
    state: dict[str, Any]


# ---- Writing


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint of the run whose folder this is, then remove all but the newest. OSError, SafetensorError."""
    path = folder / f"step_{snapshot.state['step']:06d}"
    partial = folder / f".{path.name}"
    for left in folder.glob(".step_*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(snapshot.model, partial / MODEL)
        save_file(snapshot.optim, partial / OPTIM)
        (partial / STATE).write_bytes(json_line({"schema": SCHEMA, **snapshot.state}))
        sums = {name: _sha256(partial / name) for name in (MODEL, OPTIM, STATE)}
        (partial / SUMS).write_bytes(json_line(sums))
        for name in (*sums, SUMS, "."):
            _sync(partial / name)
        _remove(path)  # by a run that was resumed from before it
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _sync(folder)
    found = checkpoints(folder)
    kept = found[: found.index(path) + 1][-KEPT:]  # those of later steps belong to what was given up by resuming
    for other in found:
        if other not in kept:
            _remove(other)
    return path


def _remove(path: Path) -> None:
    """Take its name away first: if the process is killed here, no half of a checkpoint is found under it."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path.rename(path.with_name(f".{path.name}.removed")))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk; Windows opens no folder, and its names are safe."""
    if sys.platform == "win32" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Writer:
    """Writes snapshots of one run in the background. One that waits is given up for a newer one, so nobody waits.

    A checkpoint that cannot be written is told by `warn`, and the run goes on; `last` is the newest that was.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None], last: Path | None = None):
        self.folder, self.last = folder, last
        self._warn = warn
        self._waiting: deque[Snapshot] = deque(maxlen=1)  # a newer one pushes it out
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._thread.submit(int)  # starts it while there is memory for it

    def submit(self, snapshot: Snapshot) -> None:
        self._waiting.append(snapshot)
        self._thread.submit(self._write)

    def _write(self) -> None:
        if not self._waiting:  # the newer one has been written in its place
            return
        snapshot = self._waiting.pop()
        try:
            if spoiled := [name for name, weight in snapshot.model.items() if not weight.isfinite().all()]:
                raise ValueError(f"{spoiled[0]} is not finite, and no older checkpoint is given up for that")
            self.last = write(self.folder, snapshot)
        except Exception as error:  # of any kind: here nobody else would hear of it
            kept = f"the last one is {self.last}" if self.last else "there is none yet"
            self._warn(
                f"warning: the checkpoint of step {snapshot.state['step']} could not be written to {self.folder}: "
                f"{getattr(error, 'strerror', None) or error}; {kept}. Free some space, or give --checkpoint-dir."
            )

    def close(self) -> None:
        """Wait until everything is written."""
        self._thread.shutdown()

    def clear(self, keep_last: bool) -> None:
        """Remove the checkpoints of a run that is done: there is nothing to go on with."""
        if not keep_last:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif self.last is not None:
            for path in checkpoints(self.folder):
                if path.name != self.last.name:
                    _remove(path)


# ---- Reading


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    found = [path for path in folder.glob("step_*") if path.is_dir() and path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def read(path: Path) -> Snapshot:
    """The snapshot in a checkpoint. Raises CheckpointError for whatever is not as it was written."""
    try:
        _check_sums(path)
        state = _read_state(path / STATE)
        return Snapshot(load_file(path / MODEL), load_file(path / OPTIM), state)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Resume from another checkpoint.") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} holds no tensors: {error}. Resume from another checkpoint.") from None


def _check_sums(path: Path) -> None:
    sums = _read_json(path / SUMS)
    if sums.keys() != {MODEL, OPTIM, STATE}:
        raise CheckpointError(f"{path / SUMS} names {sorted(sums)}, not {MODEL}, {OPTIM} and {STATE}; use another one")
    for name, expected in sums.items():
        if (found := _sha256(_plain_file(path / name))) != expected:
            raise CheckpointError(
                f"{path / name} has SHA-256 {found[:12]}, not {expected!r:.14} as it was written: it is damaged. "
                f"Resume from another checkpoint."
            )


def _read_state(path: Path) -> dict[str, Any]:
    state = _read_json(path)
    if state.get("schema") != SCHEMA:
        raise CheckpointError(f"{path}: schema {state.get('schema')!r:.40}, this version reads {SCHEMA}")
    for name, kind in FIELDS.items():
        if type(state.get(name)) is not kind:
            raise CheckpointError(f"{path}: {name} must be a {kind.__name__}, not {state.get(name)!r:.40}")
    if not 0 <= state["clock_ms"] < math.inf:
        raise CheckpointError(f"{path}: clock_ms must be 0 or more, not {state['clock_ms']}. Use another checkpoint.")
    return state


def newest(folder: Path, warn: Callable[[str], None]) -> tuple[Path, Snapshot] | None:
    """The newest checkpoint of a run that is whole; of each that is not, `warn` is told."""
    for path in reversed(checkpoints(folder)):
        try:
            return path, read(path)
        except CheckpointError as error:
            warn(f"warning: {error}")
    return None


def _plain_file(path: Path) -> Path:
    if path.is_symlink() or not path.is_file():  # a link could lead anywhere, a pipe would wait for ever
        raise CheckpointError(f"{path} is missing or no regular file: this is no whole checkpoint. Use another one.")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    size = _plain_file(path).stat().st_size
    try:
        if size > MOST_JSON_BYTES:
            raise ValueError(f"{size:,} bytes")
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__}")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON object of a checkpoint ({error}). Use another one.") from None
    return value

