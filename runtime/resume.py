"""Which runs a process makes: new runs, and interrupted ones from their checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.checkpoint import check, checkpoints, checksum
from runtime.errors import LogError, Refused
from runtime.log import History, new_run_id, read_history, require_writable, segment_path
from runtime.registry import REGISTRY, read_registry
from runtime.settings import SETTINGS_OF_A_RUN, as_text, flag

# If one of these or a setting of the experiment differs, it is another run.
HASHES = ("source_sha256", "train_sha256", "val_sha256")
# Settings that change only rounding. A resume after an out-of-memory error may change them.
ROUNDING = ("micro_batch", "val_batch", "activation_checkpointing")
RECORDED = (
    "torch", "cuda", "gpu", "driver", "cpu", "threads", "dtype", "attention", "head", "compiled",
    "compile_flags", "world_size", *ROUNDING,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One run to make. With a history it resumes, from its checkpoint or from the start."""

    seed: int
    trial: int
    run_id: str
    history: History | None = None
    checkpoint: Path | None = None
    checkpoint_sha256: str | None = None
    step: int = 0
    clock_ms: float = 0.0


def require_folders(config: Any) -> None:
    """LogError for a folder of the run that cannot be written."""
    require_writable(config.log_dir, "--log-dir")
    require_writable(config.checkpoint_dir, "--checkpoint-dir")


def plan_runs(trainer: Any) -> list[Plan]:
    """The runs to make under --resume, the same on all ranks. Refused if --resume cannot work."""
    return trainer.machine.on_main(lambda: _plan(trainer))


def _plan(trainer: Any) -> list[Plan]:
    config = trainer.config
    new = []
    for trial in range(config.trials):
        seed = config.seed + trial
        new.append(Plan(seed, trial, new_run_id(config.track, seed, trial)))
    if not config.resume:
        return new
    finder = Finder(config, trainer.header(config.seed, 0), trainer.machine.say)
    if config.resume != "auto":
        return [finder.named(Path(config.resume))]
    found = [finder.unfinished(plan) for plan in new]
    return [plan for plan in found if plan is not None]


@dataclass(frozen=True)
class Finder:
    """Finds interrupted runs. header: the one a new run would write."""

    config: Any
    header: dict[str, Any]
    say: Callable[[str], None]

    def unfinished(self, new: Plan) -> Plan | None:
        """The interrupted run of this seed, `new` if there is none, None if the seed is done."""
        for run_id in self._started(new.seed):
            history = read_history(self.config.log_dir, run_id)
            if history is None:  # killed before its first line
                continue
            other, _ = differences(history.header, self.header)
            if history.status == "done" and not other:
                self.say(f"seed {new.seed} is done: run {run_id}")
                return None
            if not other:
                return self._resume(run_id, history, Path(self.config.checkpoint_dir, run_id))
            if history.status != "done":
                self.say(f"run {run_id} is unfinished, but it differs: {'; '.join(other)}")
        self.say(f"seed {new.seed}: nothing to resume in {self.config.log_dir}, a new run starts")
        return new

    def _started(self, seed: int) -> list[str]:
        """The runs with this seed, track and claim that the registry knows, the latest first."""
        path = Path(self.config.log_dir, REGISTRY)
        if not path.exists():
            return []
        wanted = {"event": "start", "seed": seed, "track": self.header["track"]}
        wanted["claim"] = self.header.get("claim")
        starts = [entry for entry in read_registry(path) if wanted.items() <= entry.items()]
        return [entry["run_id"] for entry in reversed(starts)]

    def _require_unchanged(self, run_id: str, history: History) -> None:
        """LogError if the header lacks a field, or the registry has another hash of the log."""
        log = segment_path(self.config.log_dir, run_id, len(history.sizes))
        logged = history.header
        lacking = self.header.keys() - logged.keys() | self.header["env"].keys() - logged["env"]
        if lacking:
            raise LogError(f"{log}, line 1 is not as the run wrote it: it has no "
                           f"{', '.join(sorted(lacking))}. Restore the file.")  # fmt: skip
        path = Path(self.config.log_dir, REGISTRY)
        entries = read_registry(path) if path.exists() else []
        last = [entry for entry in entries if entry["run_id"] == run_id][-1:]
        for entry in last:
            if entry["event"] == "end" and entry.get("log_sha256") != history.sha256:
                raise LogError(f"{log} was changed after its process ended: {path} has another "
                               f"hash of it. Restore the file.")  # fmt: skip

    def named(self, path: Path) -> Plan:
        """The interrupted run whose checkpoints are in this folder."""
        run_id = path.resolve().name
        history = read_history(self.config.log_dir, run_id)
        if history is None:
            raise Refused(f"--resume {path}: no log of run {run_id!r} in {self.config.log_dir}. "
                          f"Give a run's folder of checkpoints, and its --log-dir.")
        if history.status == "done":
            raise Refused(f"run {run_id} is done. Start a new run without --resume.")
        other, _ = differences(history.header, self.header)
        if other:
            raise Refused(f"run {run_id} had other settings or another source: {'; '.join(other)}. "
                          f"Go back to those, or start a new run without --resume.")  # fmt: skip
        return self._resume(run_id, history, path)

    def _resume(self, run_id: str, history: History, folder: Path) -> Plan:
        """Resume from the newest whole checkpoint, or from the start if none was saved."""
        self._require_unchanged(run_id, history)
        plan = Plan(history.header["seed"], history.header["trial"], run_id, history)
        problem, saved_in = "", history.header["config"]["checkpoint_dir"]
        if Path(saved_in) != folder.parent:
            problem = f"the run was saved in {saved_in}."
        for path in checkpoints(folder)[::-1]:
            try:
                state, sha256 = check(path), checksum(path)
                _check_place(path, state, sha256, plan)
            except Refused as error:  # damaged; the one before may be whole
                problem = str(error)
                self.say(f"warning: {problem}")
                continue
            return replace(
                plan, checkpoint=path, checkpoint_sha256=sha256, step=state["step"],
                clock_ms=state["clock_ms"],
            )  # fmt: skip
        if problem:
            raise Refused(f"no usable checkpoint in {folder}: {problem} Give the right folder, or "
                          f"start a new run without --resume.")  # fmt: skip
        return plan


def _check_place(path: Path, state: dict[str, Any], sha256: str, plan: Plan) -> None:
    """Refused if a checkpoint is of another run, later than the log, or not the one it names."""
    assert plan.history is not None
    if state["run_id"] != plan.run_id:
        raise Refused(f"{path} is of run {state['run_id']!r:.80}, not of {plan.run_id}. A folder "
                      f"was renamed.")  # fmt: skip
    segment = state["segment"]
    size = sum(plan.history.sizes[segment - 1 : segment])  # 0 if there is no such segment
    if size < state["log_bytes"]:
        raise Refused(f"{path}: segment {segment} of the log had {state['log_bytes']} bytes when "
                      f"it was saved, and has {size}. Restore the log.")  # fmt: skip
    if sha256 not in plan.history.saved:
        raise Refused(f"{path}: its checksums have SHA-256 {sha256:.12}, and the log names no such "
                      f"checkpoint. It was changed after it was saved.")  # fmt: skip


def differences(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What differs in two headers: (what makes it another experiment, the rest)."""
    experiment: list[str] = []
    others: list[str] = []
    was, here = _facts(then), _facts(now)
    for name in {**was, **here}:
        if was.get(name) != here.get(name):
            found = others if name in RECORDED else experiment
            found.append(f"{name} {was.get(name)} -> {here.get(name)}")
    return experiment, others


def _facts(header: dict[str, Any]) -> dict[str, str]:
    """What decides whether a run is the same: settings by their flags, hashes, the machine."""
    facts = {}
    for name, value in header["config"].items():
        if name not in SETTINGS_OF_A_RUN + ROUNDING:
            facts[flag(name)] = as_text(value)
    everything = header["config"] | header["env"] | header["data"] | header
    for name in HASHES:
        facts[name] = f"{everything.get(name)!s:.12}"
    for name in RECORDED:
        facts[name] = str(everything.get(name))
    return facts
