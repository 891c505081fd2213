"""Checkpoints, and how a run resumes from them.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import log as logs
from runtime.errors import LogError, Refused
from runtime.jsonl import json_line, open_regular, read_regular
from runtime.settings import SETTINGS_OF_A_RUN, as_text, flag
from runtime.trainer import Config, Trainer

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
    state: dict[str, Any]


def save(folder: Path, snapshot: Snapshot, announce: Callable[..., bool] | None = None) -> Path:
    """Write a checkpoint into the run's folder, then remove all but the two newest.

    announce: is given `sha256`, of the checksums, before the checkpoint gets its name, and says
    whether it may. OSError or SafetensorError if the disk refuses. Older checkpoints then stay.
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
    folder: Path, model: dict[str, Tensor], facts: dict[str, Any], tokenizer: Path | str | None
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


def load_final(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
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
            raise OSError("its log takes no line")
        remove(path)  # one of this name, whose steps a resume dropped
        partial.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    """Force a file, or where the system can do that the names in a folder, to the disk."""
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


def check(path: Path) -> tuple[dict[str, Any], str]:
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path, MOST_JSON_BYTES, links=False))
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__}")
    except OSError as error:
        raise Refused(f"checkpoint {path.parent} cannot be read: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is no JSON object of a checkpoint ({error}).") from None
    return value


def _sha256(path: Path) -> str:
    with open_regular(path, links=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- Resume: which runs a process makes

# Settings that change only rounding. A resume after an out-of-memory error may change them.
ROUNDING = ("micro_batch", "val_batch", "activation_checkpointing")
RECORDED = (
    "torch", "cuda", "gpu", "driver", "cpu", "threads", "dtype", "attention", "head", "compiled",
    "compile_flags", "world_size", *ROUNDING,
)  # fmt: skip


@dataclass(frozen=True)
class RunPlan:
    """One run to make. With a history it resumes, from its checkpoint or from the start."""

    seed: int
    trial: int
    run_id: str
    history: logs.History | None = None
    checkpoint: Path | None = None
    checkpoint_sha256: str | None = None
    step: int = 0


def plan_runs(trainer: Trainer) -> list[RunPlan]:
    """New runs, or under --resume auto what is left of them. Refused if it cannot. On rank 0."""
    config, plans = trainer.config, []
    for trial in range(config.trials):
        seed = config.seed + trial
        new = RunPlan(seed, trial, logs.new_run_id(config.track, seed, trial))
        plan = _find_unfinished(new, trainer) if config.resume == "auto" else new
        if plan is not None:
            plans.append(plan)
    return plans


def _started(config: Config, **fields: Any) -> Iterator[tuple[logs.History, dict[str, Any]]]:
    """Runs whose start has these fields, the newest first: history, last line in the registry."""
    path = Path(config.log_dir, logs.REGISTRY)
    entries = logs.read_registry(path) if path.exists() else []
    last = {entry["run_id"]: entry for entry in entries}
    for start in reversed(entries):
        if ({"event": "start"} | fields).items() <= start.items():
            history = logs.read_history(config.log_dir, start["run_id"])
            if history is not None:  # else killed before its first line
                yield history, last[start["run_id"]]


def _find_unfinished(new: RunPlan, trainer: Trainer) -> RunPlan | None:
    """The interrupted run of this seed, `new` if there is none, None if the seed is done."""
    config, say = trainer.config, trainer.machine.say
    now = logs.header(trainer, new.seed, new.trial)
    wanted = {"seed": new.seed, "track": now["track"], "claim": now["claim"]}
    for history, last in _started(config, **wanted):
        run_id = history.header["run_id"]
        other, _ = differences(history.header, now)
        if not other and history.status == "done":
            say(f"seed {new.seed} is done: run {run_id}")
            return None
        if not other:
            log = logs.segment_path(config.log_dir, run_id, history.segments)
            if last["event"] == "end" and last.get("log_sha256") != history.sha256:
                raise LogError(f"{log} was changed after its process ended: the registry has "
                               f"another hash of it. Restore the file.")  # fmt: skip
            plan = RunPlan(new.seed, history.header["trial"], run_id, history)
            return _find_checkpoint(plan, history, trainer)
        if history.status != "done":
            say(f"run {run_id} is unfinished, but it differs: {'; '.join(other)}")
    say(f"seed {new.seed}: nothing to resume in {config.log_dir}, a new run starts")
    return new


def _find_checkpoint(plan: RunPlan, history: logs.History, trainer: Trainer) -> RunPlan:
    """Resume from the newest whole checkpoint, or from the start if none was saved."""
    root, problem = trainer.config.checkpoint_dir, ""
    folder, saved_in = Path(root, plan.run_id), history.header["config"]["checkpoint_dir"]
    if history.saved and not folder.exists():
        problem = f"the run was saved in {saved_in}."
    for path in checkpoints(folder)[::-1]:
        try:
            state, sha256 = check(path)
            if sha256 not in history.saved:
                raise Refused(f"{path}: the log of {plan.run_id} names no such checkpoint, with "
                              f"SHA-256 {sha256:.12} of its checksums. Put the saved one back.")
            return replace(plan, checkpoint=path, checkpoint_sha256=sha256, step=state["step"])
        except Refused as error:  # damaged; the one before may be whole
            problem = str(error)
            trainer.machine.say(f"warning: {problem}")
    if problem:
        raise Refused(f"no usable checkpoint in {folder}: {problem} Give the right "
                      f"--checkpoint-dir, or start a new run without --resume.")  # fmt: skip
    return plan


def differences(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What differs in two headers: (what makes it another experiment, the rest)."""
    was, here = _facts(then), _facts(now)
    changed = {name: f"{name} {was.get(name)} -> {here.get(name)}"
               for name in was | here if was.get(name) != here.get(name)}  # fmt: skip
    rest = [changed.pop(name) for name in RECORDED if name in changed]
    return list(changed.values()), rest


def _facts(header: dict[str, Any]) -> dict[str, str]:
    """What decides whether a run is the same: settings by their flags, hashes, the machine."""
    settings = header["config"]
    everything = settings | header["env"] | header["data"] | header
    named = [name for name in settings if name not in SETTINGS_OF_A_RUN + ROUNDING]
    facts = {flag(name): as_text(settings[name]) for name in named}
    for name in ("source_sha256", "train_sha256", "val_sha256"):
        facts[name] = f"{everything.get(name)!s:.12}"
    return facts | {name: str(everything.get(name)) for name in RECORDED}
