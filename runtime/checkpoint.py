"""Checkpoints, and the model that a finished run leaves.

A checkpoint, <checkpoint_dir>/<run_id>/step_000123, holds only tensors and text, so reading one
executes nothing. It gets its name only when all of it is on the disk, and fits any number of ranks:

    model.safetensors, optim.safetensors    parameters; optimizers, guard, random generators
    state.json, checksums.json              run, settings, step; SHA-256 of the three

A finished run leaves its model in <run_id>/final: model.safetensors, config.json (settings and
origin), vocabulary.tiktoken (if its tokenizer is a corpus' own), checksums.json.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.errors import Refused
from runtime.jsonl import Json, json_line, open_regular, read_regular
from runtime.log import RunLog

MODEL, OPTIM, STATE = "model.safetensors", "optim.safetensors", "state.json"
SUMS = "checksums.json"
FINAL, CONFIG, VOCABULARY = "final", "config.json", "vocabulary.tiktoken"
KEPT = 2  # if the disk damages the newest, its checksums tell
MOST_JSON_BYTES = 2**26
Files = dict[str, dict[str, Tensor] | bytes]  # contents by name


class Snapshot(NamedTuple):
    """A run between two steps. Tensors are on the host; `state` is JSON data."""

    model: dict[str, Tensor]
    optim: dict[str, Tensor]
    state: Json


def save(folder: Path, snapshot: Snapshot, announce: Callable[..., bool] | None = None) -> Path:
    """Write a checkpoint into the run's folder, then remove all but the two newest.

    announce: called with `sha256`, of the checksums, before the checkpoint gets its name. If it
    returns False, there will be no checkpoint. OSError or SafetensorError if the disk refuses;
    older checkpoints then stay.
    """
    for left in folder.glob(".step_*"):  # left by a process that was killed
        shutil.rmtree(left, ignore_errors=True)

    state = json_line(snapshot.state)
    path = folder / f"step_{snapshot.state['step']:06d}"
    _publish(path, {MODEL: snapshot.model, OPTIM: snapshot.optim, STATE: state}, announce)
    found = checkpoints(folder)
    upto = found[: found.index(path) + 1]  # a resume dropped the steps of those after it
    for other in found:
        if other not in upto[-KEPT:]:
            remove(other)
    return path


def save_final(
    folder: Path, model: dict[str, Tensor], facts: Json, tokenizer: Path | str | None
) -> Path:
    """Write `final` into the run's folder: a model, and `facts` of it as config.json.

    tokenizer: its vocabulary, which is copied, its name for tiktoken, or None if it is not known.
    OSError or SafetensorError if the disk refuses.
    """
    files: Files = {MODEL: model}
    if isinstance(tokenizer, Path):
        files[VOCABULARY] = tokenizer.read_bytes()
        tokenizer = VOCABULARY
    text = json.dumps(facts | {"tokenizer": tokenizer}, indent=2)
    _publish(folder / FINAL, files | {CONFIG: f"{text}\n".encode()})
    return folder / FINAL


def load_final(path: Path) -> tuple[dict[str, Tensor], Json]:
    """Verify what save_final wrote. Return the model and its facts. Refused if it is damaged."""
    verify(path, (MODEL, CONFIG))
    return _read_tensors(path / MODEL), _read_json(path / CONFIG)


def _publish(path: Path, files: Files, announce: Callable[..., bool] | None = None) -> None:
    """Write a folder of these files and their checksums: all of it appears, or nothing."""
    partial = path.with_name(f".{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name, content in files.items():
            if isinstance(content, bytes):
                (partial / name).write_bytes(content)
            else:
                save_file(content, partial / name)
        sums = {name: _sha256(partial / name) for name in sorted(files)}
        (partial / SUMS).write_bytes(json_line(sums))
        for file in (*partial.iterdir(), partial):  # before they get a name that lasts
            _sync(file)
        if announce is not None and not announce(sha256=_sha256(partial / SUMS)):
            raise OSError("its log could not be written")
        remove(path)  # one of this name, whose steps a resume dropped
        partial.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    """Force a file to the disk, or a folder's list of names where the system can do that."""
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:  # Windows opens no folder, and some network disks sync none
        if path.is_file() or error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP):
            raise


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


def check(path: Path) -> tuple[Json, str]:
    """Verify a checkpoint: its state, and the SHA-256 of its checksums. Refused if it changed."""
    verify(path, (MODEL, OPTIM, STATE))
    return _read_json(path / STATE), _sha256(path / SUMS)


def load(path: Path, sha256: str | None = None) -> Snapshot:
    """Verify and read a checkpoint. Refused if it is damaged, or not the one with this checksum."""
    state, found = check(path)
    if sha256 not in (None, found):
        raise Refused(f"{path} was replaced while the trainer started. Start it again.")
    return Snapshot(_read_tensors(path / MODEL), _read_tensors(path / OPTIM), state)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Refused(f"{path} holds no tensors: {error}.") from None


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(read_regular(path, MOST_JSON_BYTES))
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__}")
    except OSError as error:
        raise Refused(f"checkpoint {path.parent} cannot be read: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is not a JSON object ({error}).") from None
    return value


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- In a run


class Writer:
    """Writes a run's checkpoints in a thread. A full disk is a warning, and the run continues."""

    def __init__(
        self, folder: Path, log: RunLog, say: Callable[[str], None], last: Path | None
    ) -> None:
        self.last = last  # the newest checkpoint on the disk
        self._folder, self._log, self._say = folder, log, say
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future | None = None

    def submit(self, snapshot: Snapshot) -> None:
        """Write it in the background. It replaces one that has not started yet."""
        if self._writing is not None:
            self._writing.cancel()
        self._writing = self._thread.submit(self._write, snapshot)

    def _write(self, snapshot: Snapshot) -> None:
        step = snapshot.state["step"]
        with self._warning(f"the checkpoint of step {step}"):
            # One that the log does not name could not be resumed; the one before it can be.
            announce = partial(self._log.write, "checkpoint", step=step)
            self.last = save(self._folder, snapshot, announce)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        if self._writing is not None:
            self._writing.result()

    def keep(
        self, model: dict[str, Tensor], facts: Json, tokenizer: Path | str | None
    ) -> None:
        """Write the trained model at once: see `save_final`."""
        with self._warning("the trained model"):
            save_final(self._folder, model, facts, tokenizer)

    @contextlib.contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Print an error of any kind: in a thread it would be silent."""
        try:
            yield
        except Exception as error:
            reason = getattr(error, "strerror", None) or error
            self._say(
                f"warning: {what} could not be written to {self._folder}: {reason}. Free some "
                f"space for it and the log, or give another --checkpoint-dir. The last checkpoint "
                f"is {self.last or 'none'}."
            )

    def close(self) -> None:
        """Wait for the last checkpoint; take no more."""
        self._thread.shutdown()

    def clear(self, keep_model: bool) -> None:
        """Remove a finished run's checkpoints; to keep its model, only once that is saved."""
        if not keep_model:
            shutil.rmtree(self._folder, ignore_errors=True)
        elif (self._folder / FINAL).exists():  # else it could not be written
            for path in self._folder.glob("*step_*"):  # a killed process may leave .step_000100
                remove(path)
