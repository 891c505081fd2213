"""Checkpoints. They hold only tensors and text, so that reading one executes nothing.

    <checkpoint_dir>/<run_id>/step_000123/model.safetensors    parameters by name
                                          optim.safetensors    optimizers, guard, random generators
                                          state.json           run, settings, step
                                          checksums.json       SHA-256 of the three

A checkpoint gets its name only when all of it is on the disk. It fits any number of ranks. With
--keep-model a finished run leaves only its model:

    <checkpoint_dir>/<run_id>/final/model.safetensors     parameters by name
                                    config.json           settings, and where the model comes from
                                    vocabulary.tiktoken   if the tokenizer is a corpus' own
                                    checksums.json        SHA-256 of each
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.errors import Refused
from runtime.jsonl import check_regular, json_line, read_regular

SCHEMA = 2
MODEL, OPTIM, STATE = "model.safetensors", "optim.safetensors", "state.json"
SUMS = "checksums.json"
FINAL, CONFIG = "final", "config.json"
FIELDS = {
    "run_id": str, "step": int, "clock_ms": float, "segment": int, "log_bytes": int, "data": dict,
}  # fmt: skip
KEPT = 2  # a power cut may damage the newest
MOST_JSON_BYTES = 2**26


class Snapshot(NamedTuple):
    """A run between two steps. Tensors are on the host; `state` is JSON data."""

    model: dict[str, Tensor]
    optim: dict[str, Tensor]
    state: dict[str, Any]


def save(
    folder: Path, snapshot: Snapshot, announce: Callable[[str], None] | None = None
) -> Path:
    """Write a checkpoint into the run's folder, then remove all but the two newest.

    announce: is given the `checksum` before the checkpoint gets its name. OSError or
    SafetensorError if the disk refuses. Older checkpoints then stay.
    """
    for left in folder.glob(".step_*"):  # left by a process that was killed
        shutil.rmtree(left, ignore_errors=True)

    def write(partial: Path) -> None:
        save_file(snapshot.model, partial / MODEL)
        save_file(snapshot.optim, partial / OPTIM)
        (partial / STATE).write_bytes(json_line({"schema": SCHEMA, **snapshot.state}))

    path = folder / f"step_{snapshot.state['step']:06d}"
    _publish(path, write, announce)
    found = checkpoints(folder)
    upto = found[: found.index(path) + 1]  # a resume dropped the steps of those after it
    for other in found:
        if other not in upto[-KEPT:]:
            remove(other)
    return path


def save_final(
    folder: Path, model: dict[str, Tensor], facts: dict[str, Any], tokenizer: Path | str | None
) -> Path:
    """Write `final` into the run's folder: a model, and `facts` of it as config.json.

    tokenizer: its vocabulary, which is copied, its name for tiktoken, or None if it is not known.
    OSError or SafetensorError if the disk refuses.
    """

    def write(partial: Path) -> None:
        save_file(model, partial / MODEL)
        name = tokenizer
        if isinstance(tokenizer, Path):
            name = "vocabulary.tiktoken"
            shutil.copyfile(tokenizer, partial / name)
        text = json.dumps(facts | {"tokenizer": name}, indent=2)
        (partial / CONFIG).write_text(text + "\n", encoding="utf-8")

    _publish(folder / FINAL, write)
    return folder / FINAL


def load_final(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verify what save_final wrote. Return the model and its facts. Refused if it is damaged."""
    verify(path, (MODEL, CONFIG))
    return _read_tensors(path / MODEL), _read_json(path / CONFIG)


def _publish(
    path: Path, write: Callable[[Path], None], announce: Callable[[str], None] | None = None
) -> None:
    """Let `write` fill a folder and add checksums: the whole folder appears, or nothing."""
    partial = path.with_name(f".{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write(partial)
        sums = {file.name: _sha256(file) for file in sorted(partial.iterdir())}
        (partial / SUMS).write_bytes(json_line(sums))
        for name in (*sums, SUMS, "."):
            _sync(partial / name)
        if announce is not None:
            announce(checksum(partial))
        remove(path)  # one of this name, whose steps a resume dropped
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _sync(path.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint. Rename it first: a kill must not leave half of it under its name."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path.rename(path.with_name(f".{path.name}.removed")))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    found = [path for path in folder.glob("step_*") if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def verify(path: Path, names: Iterable[str]) -> None:
    """Refused if one of these files is not there, or not the one that was saved."""
    try:
        sums = _read_json(path / SUMS)
        for name in names:
            found = _sha256(path / name)
            if found != sums.get(name):
                raise Refused(f"{path / name} has SHA-256 {found:.12}, not the one in {SUMS}: "
                              f"{sums.get(name)!r:.14}.")  # fmt: skip
    except OSError as error:
        raise Refused(f"checkpoint {path} cannot be read: {error}.") from None


def check(path: Path) -> dict[str, Any]:
    """Verify a checkpoint and return its state. Refused if anything has changed since."""
    verify(path, (MODEL, OPTIM, STATE))
    state = _read_json(path / STATE)
    if state.get("schema") != SCHEMA:
        raise Refused(f"{path / STATE}: schema {state.get('schema')!r:.40}, but this version reads "
                      f"{SCHEMA}. Resume with the source that wrote it.")  # fmt: skip
    for name, kind in FIELDS.items():
        value = state.get(name)
        if type(value) is not kind:
            wanted = kind.__name__
            raise Refused(f"{path / STATE}: {name} must be a {wanted}, not {value!r:.40}.")
    return state


def checksum(path: Path) -> str:
    """The SHA-256 of a checkpoint's checksums, and so of all that it holds."""
    return _sha256(path / SUMS)


def load(path: Path, sha256: str | None = None) -> Snapshot:
    """Verify and read a checkpoint. Refused if it is damaged, or not the one with this checksum."""
    state = check(path)
    if sha256 not in (None, checksum(path)):
        raise Refused(f"{path} was replaced while the trainer started. Start it again.")
    return Snapshot(_read_tensors(path / MODEL), _read_tensors(path / OPTIM), state)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Refused(f"{path} holds no tensors: {error}.") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        check_regular(path)
        value = json.loads(read_regular(path, MOST_JSON_BYTES))
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__}")
    except OSError as error:
        raise Refused(f"checkpoint {path.parent} cannot be read: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is no JSON object of a checkpoint ({error}).") from None
    return value


def _sha256(path: Path) -> str:
    check_regular(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    if sys.platform == "win32" and path.is_dir():  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
