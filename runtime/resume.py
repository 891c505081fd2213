"""Which runs a process makes: new ones, and those that were broken off, from where they go on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from runtime.checkpoint import CheckpointError, Snapshot, checkpoints, newest, read
from runtime.flags import as_text, flag
from runtime.log import NotBegun, RunLogError, Tail, new_run_id, register_end, tail_of
from runtime.registry import REGISTRY, read_registry
from runtime.settings import SETTINGS_OF_A_RUN

BLOCKING = ("source_sha256", "train_sha256", "val_sha256")  # what must not differ, beside the configuration
HEADER = {"seed": int, "trial": int, "config": dict, "env": dict, "data": dict}  # of a log, needed to go on
ROUNDING = ("micro_batch", "val_batch", "recompute")  # make no other difference; after out of memory they must change
RECORDED = ("torch", "cuda", "gpu", "driver", "cpu", "threads", "dtype", "attention", "head", "compiled",
            "compile_flags")


class Resume(NamedTuple):
    """Where a broken-off run goes on."""

    step: int
    log_offset: int  # bytes of the log that stand
    clock_ms: float  # training time at that step
    lost_ms: float  # training time of steps that are done again
    log_bytes: int  # in the log when this was found out
    waiting: str = ""  # the last lines that stand, if the log could not be written when the checkpoint was
    checkpoint: Path | None = None  # None: the run begins again, as it has no checkpoint


class Trial(NamedTuple):
    seed: int
    number: int  # of the trial, from 0 on
    run_id: str
    resume: Resume | None = None

    def snapshot(self, main: bool) -> Snapshot | None:
        """What the run goes on from; None where it begins, and on all ranks but the first."""
        return read(self.resume.checkpoint) if main and self.resume and self.resume.checkpoint else None


def plan_trials(settings: Any, header: dict[str, Any], say: Callable[[str], None]) -> list[Trial]:
    """The runs that are left to make, as --resume wants it; `header` is that of a new run.

    ValueError (CheckpointError, RegistryError) where one cannot go on, or would go on with another experiment.
    """
    wanted = [(settings.seed + index, index) for index in range(settings.trials)]
    new = [Trial(seed, index, new_run_id(settings.track, seed, index)) for seed, index in wanted]
    if not settings.resume:
        return new
    if settings.resume != "auto":
        first = _find(settings, Path(settings.resume), header, say)
        if (first.seed, first.number) not in wanted:
            raise CheckpointError(f"--resume {settings.resume}: it is of seed {first.seed}, trial {first.number}; give "
                                  f"--seed {first.seed - first.number} and --trials above {first.number}.")
        return [first, *new[first.number + 1 :]]
    return list(filter(None, (_auto(trial, settings, header, say) for trial in new)))


def _auto(trial: Trial, settings: Any, header: dict[str, Any], say: Callable[[str], None]) -> Trial | None:
    """This trial, the one of its seed that was broken off, or None where it is done."""
    for entry in _registered(trial.seed, settings, header):
        run_id, log = entry["run_id"], Path(settings.log_dir) / f"{entry['run_id']}.jsonl"
        try:
            tail = read_tail(log)
        except NotBegun:
            continue
        except RunLogError as error:
            raise CheckpointError(f"cannot tell whether seed {trial.seed} is done: {error}") from None
        other = differences(tail.header, header)[0] if entry.get("config_sha256") != header["config_sha256"] else []
        if other:
            if tail.status != "done":
                say(f"run {run_id} was broken off, but has other settings: {'; '.join(other)}; it stays as it is")
            continue
        if tail.status != "done":
            return _continued(settings, run_id, Path(settings.checkpoint_dir) / run_id, header, say)
        if entry.get("source_sha256") != header["source_sha256"]:
            break  # what another source has finished is neither done nor to go on with, nor is what was before it
        say(f"seed {trial.seed} is done: {log}")
        if not (entry["ended"] or settings.dry_run):  # it was killed between its last two lines
            register_end(log)
        return None
    say(f"seed {trial.seed}: nothing to go on with in {settings.log_dir}, so it begins")
    return trial


def _registered(seed: int, settings: Any, header: dict[str, Any]) -> list[dict[str, Any]]:
    """Registry lines of the starts of this seed on this track and claim, the latest first, each with `ended`."""
    path = Path(settings.log_dir) / REGISTRY
    if not path.exists() and any(map(_has_begun, Path(settings.log_dir).glob("*.jsonl"))):
        raise CheckpointError(f"{path} is missing, so that nobody knows what is done. Restore it, or name the run: "
                              f"--resume {settings.checkpoint_dir}/RUN.")
    entries = read_registry(path) if path.exists() else []
    last = {entry["run_id"]: entry["event"] for entry in entries}
    alike = {"event": "start", "seed": seed, "track": header["track"], "claim": header["claim"]}
    found = [entry for entry in entries if all(entry.get(name) == value for name, value in alike.items())]
    return [entry | {"ended": last[entry["run_id"]] == "end"} for entry in reversed(found)]


def _has_begun(log: Path) -> bool:
    """Whether it is a log that has at least its first line."""
    try:
        tail_of(log)
    except RunLogError:
        return False
    return True


def read_tail(log: Path) -> Tail:
    """How far a run's log goes. RunLogError for one whose header lacks what is needed to go on."""
    tail = tail_of(log)
    for name, kind in HEADER.items():
        if type(tail.header.get(name)) is not kind:
            raise RunLogError(f"{log}: {name} in its header must be a {kind.__name__}; restore it as the run wrote it")
    return tail


def _find(settings: Any, path: Path, header: dict[str, Any], say: Callable[[str], None]) -> Trial:
    """The trial of a run's folder of checkpoints, or of one checkpoint."""
    if not path.is_dir():
        raise CheckpointError(f"--resume {path}: no such folder; give that of a run or of one of its checkpoints.")
    one = not checkpoints(path)
    run_id = path.resolve().parent.name if one else path.resolve().name
    return _continued(settings, run_id, path, header, say, one)


def _continued(
    settings: Any, run_id: str, path: Path, header: dict[str, Any], say: Callable[[str], None], one: bool = False
) -> Trial:
    """The trial of a broken-off run, from a checkpoint, from the newest of a folder, or from the start."""
    try:
        tail = read_tail(Path(settings.log_dir) / f"{run_id}.jsonl")
    except RunLogError as error:
        raise CheckpointError(f"{path} has no log to go on with: {error}.") from None
    if tail.status == "done":
        raise CheckpointError(f"run {run_id} is done, there is nothing to resume. Start a new run without --resume.")
    blocking = differences(tail.header, header)[0]
    if blocking and not settings.resume_anyway:
        raise CheckpointError(f"run {run_id} was made with other settings or another source: {'; '.join(blocking)}. "
                              f"Go back to those, start a new run, or go on all the same with --resume-anyway on.")
    found = (path, read(path)) if one else newest(path, say)
    seed, number, size = tail.header["seed"], tail.header["trial"], tail.log_bytes
    if found is None:
        before = tail.header["config"].get("checkpoint_dir", settings.checkpoint_dir)
        if (checkpoints(path) or before != settings.checkpoint_dir) and not settings.resume_anyway:
            raise CheckpointError(f"run {run_id} was saved in {before}, but {path} has no whole checkpoint. Give its "
                                  f"--checkpoint-dir, or begin it again with --resume-anyway on.")
        return Trial(seed, number, run_id, Resume(0, tail.header_bytes, 0.0, tail.train_time_ms, size))
    state = found[1].state
    if not 0 <= state["step"] <= settings.steps:
        raise CheckpointError(f"{found[0]} is of step {state['step']}, but --steps is {settings.steps}: give more.")
    if state["run_id"] != run_id:
        raise CheckpointError(f"{found[0]} is of run {state['run_id']!r:.80}, not of {run_id}; a folder was renamed or "
                              f"mixed up. Put it back.")
    lost = max(tail.train_time_ms - state["clock_ms"], 0.0)  # copying it is on the clock, and maybe in no line yet
    place = (state["step"], state["log_offset"], state["clock_ms"], lost, size, state["log_waiting"], found[0])
    return Trial(seed, number, run_id, Resume(*place))


def differences(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What two headers differ in: what changes the experiment, and the rest."""
    free = {*SETTINGS_OF_A_RUN, *ROUNDING}
    settings = [name for name in {**then["config"], **now["config"]} if name not in free]
    changed = {name: (_text(then["config"].get(name)), _text(now["config"].get(name))) for name in settings}
    blocking = [f"{flag(name)} {was} -> {here}" for name, (was, here) in changed.items() if was != here]
    pairs = {name: ((then["data"] | then).get(name), (now["data"] | now).get(name)) for name in BLOCKING}
    blocking += [f"{name} {was!s:.12} -> {here!s:.12}" for name, (was, here) in pairs.items() if was != here]
    others = {name: (then["env"].get(name), now["env"].get(name)) for name in RECORDED}
    others |= {name: (then.get(name), now.get(name)) for name in ("world_size", "micro_batch")}
    others |= {name: (then["config"].get(name), now["config"].get(name)) for name in ("val_batch", "recompute")}
    return blocking, [f"{name} {was} -> {here}" for name, (was, here) in others.items() if was != here]


def _text(value: Any) -> str:
    return as_text(tuple(value) if isinstance(value, list) else value)
