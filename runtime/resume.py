"""Which runs a process makes: new ones, and those that broke off, from where they stopped."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint import STATE, check, checkpoints
from runtime.errors import LogError, Refused
from runtime.settings import as_text, flag
from runtime.log import History, new_run_id, read_history, require_writable
from runtime.registry import REGISTRY, read_registry
from runtime.settings import SETTINGS_OF_A_RUN

# A run may not be resumed where these or a setting of the experiment differ.
BLOCKING = ("source_sha256", "train_sha256", "val_sha256")
# Settings that change nothing but rounding. After an out-of-memory error they have to change.
ROUNDING = ("micro_batch", "val_batch", "recompute")
RECORDED = (
    "torch", "cuda", "gpu", "driver", "cpu", "threads", "dtype", "attention", "head", "compiled",
    "compile_flags",
)  # fmt: skip
HEADER = {"seed": int, "trial": int, "config": dict, "env": dict, "data": dict}


@dataclass(frozen=True)
class Plan:
    """One run to make. With a history it is resumed: from its checkpoint, or from the start."""

    seed: int
    trial: int
    run_id: str
    history: History | None = None
    checkpoint: Path | None = None
    step: int = 0
    clock_ms: float = 0.0


def plan_runs(trainer: Any) -> list[Plan]:
    """The runs that are left to make, as --resume wants it, the same on all ranks. Refused."""
    return trainer.machine.on_main(lambda: _plan(trainer))


def _plan(trainer: Any) -> list[Plan]:
    config = trainer.config
    require_writable(config.log_dir, "--log-dir")
    require_writable(config.checkpoint_dir, "--checkpoint-dir")
    new = []
    for trial in range(config.trials):
        seed = config.seed + trial
        new.append(Plan(seed, trial, new_run_id(config.track, seed, trial)))
    if not config.resume:
        return new
    planner = Planner(config, trainer.header(config.seed, 0), trainer.machine.say)
    if config.resume == "auto":
        plans = [planner.auto(plan) for plan in new]
        return [plan for plan in plans if plan is not None]
    first = planner.named(Path(config.resume))
    if (first.seed, first.trial) not in [(plan.seed, plan.trial) for plan in new]:
        raise Refused(f"--resume {config.resume} is of seed {first.seed}, trial {first.trial}. Give "
                      f"--seed {first.seed - first.trial} and --trials above {first.trial}.")
    return [first, *new[first.trial + 1 :]]


@dataclass(frozen=True)
class Planner:
    """Finds what is there of a run; `header` is that of a new run."""

    config: Any
    header: dict[str, Any]
    say: Callable[[str], None]

    def auto(self, new: Plan) -> Plan | None:
        """The run of this seed that broke off, or `new`, or None where the seed is done."""
        for entry in self._starts(new.seed):
            run_id = entry["run_id"]
            try:
                history = self._history(run_id)
            except LogError as error:
                raise Refused(f"cannot tell whether seed {new.seed} is done: {error}") from None
            if history is None:  # killed before its first line
                continue
            other = []
            if entry.get("config_sha256") != self.header["config_sha256"]:
                other = differences(history.header, self.header)[0]
            if other:
                if history.status != "done":
                    self.say(f"run {run_id} broke off, but with other settings: "
                             f"{'; '.join(other)}. It stays as it is.")  # fmt: skip
                continue
            if history.status != "done":
                return self._resumed(run_id, history, Path(self.config.checkpoint_dir, run_id))
            if entry.get("source_sha256") != self.header["source_sha256"]:
                break  # done by another source: neither it nor what came before is this run
            self.say(f"seed {new.seed} is done: run {run_id}")
            return None
        self.say(f"seed {new.seed}: no run to resume in {self.config.log_dir}, so a new one starts")
        return new

    def _starts(self, seed: int) -> list[dict[str, Any]]:
        """Registry lines of the starts of this seed on this track and claim, the latest first."""
        path = Path(self.config.log_dir, REGISTRY)
        if not path.exists():
            if any(path.parent.glob("*.jsonl")):
                raise Refused(f"{path} is missing, so nobody knows which runs are done. Restore it, "
                              f"or name the run: --resume {self.config.checkpoint_dir}/RUN.")
            return []
        alike = {"event": "start", "seed": seed}
        alike |= {name: self.header[name] for name in ("track", "claim")}
        found = [entry for entry in read_registry(path) if alike.items() <= entry.items()]
        return found[::-1]

    def _history(self, run_id: str) -> History | None:
        history = read_history(self.config.log_dir, run_id)
        for name, kind in HEADER.items() if history else ():
            value = history.header.get(name)
            if type(value) is not kind:
                raise LogError(f"run {run_id}: {name} in the log's header must be a {kind.__name__}, "
                               f"not {value!r:.40}. Restore the log as the run wrote it.")
        return history

    def named(self, path: Path) -> Plan:
        """The run of a folder of checkpoints, or of one checkpoint."""
        if not path.is_dir():
            raise Refused(f"--resume {path}: no such folder. Give that of a run or a checkpoint.")
        folder = path.resolve()
        if not checkpoints(path):
            folder = folder.parent
        history = self._history(folder.name)
        if history is None:
            raise Refused(f"--resume {path}: run {folder.name} has no log in {self.config.log_dir}. "
                          f"Give the --log-dir of the run.")  # fmt: skip
        return self._resumed(folder.name, history, path)

    def _resumed(self, run_id: str, history: History, path: Path) -> Plan:
        """From the checkpoint `path`, from the newest whole one in it, or from the start."""
        if history.status == "done":
            raise Refused(f"run {run_id} is done: nothing to resume. Start a new one without "
                          f"--resume.")  # fmt: skip
        blocking, _ = differences(history.header, self.header)
        if blocking and not self.config.resume_anyway:
            raise Refused(f"run {run_id} had other settings or another source: "
                          f"{'; '.join(blocking)}. Go back to those, start a new run, or resume all "
                          f"the same with --resume-anyway on.")  # fmt: skip
        found = self._newest(path)
        if found is None:
            self._check_unsaved(history, path)
            return Plan(history.header["seed"], history.header["trial"], run_id, history)
        checkpoint, state = found
        self._check_saved(run_id, history, checkpoint, state)
        return Plan(
            history.header["seed"], history.header["trial"], run_id, history, checkpoint,
            state["step"], state["clock_ms"],
        )  # fmt: skip

    def _newest(self, path: Path) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint of a folder with its state; a single one must be whole."""
        found = checkpoints(path)
        if not found and (path / STATE).exists():
            return path, check(path)
        for checkpoint in reversed(found):
            try:
                return checkpoint, check(checkpoint)
            except Refused as error:
                self.say(f"warning: {error}")
        return None

    def _check_unsaved(self, history: History, path: Path) -> None:
        """A run may start again from nothing only if nothing of it was saved."""
        here = self.config.checkpoint_dir
        before = history.header["config"].get("checkpoint_dir", here)
        if self.config.resume_anyway or (before == here and not checkpoints(path)):
            return
        raise Refused(f"{path} has no whole checkpoint, but the run was saved in {before}. Give its "
                      f"--checkpoint-dir, or start it again with --resume-anyway on.")  # fmt: skip

    def _check_saved(
        self, run_id: str, history: History, checkpoint: Path, state: dict[str, Any]
    ) -> None:
        if state["run_id"] != run_id:
            raise Refused(f"{checkpoint} is of run {state['run_id']!r:.80}, not of {run_id}: a folder "
                          f"was renamed. Rename it back.")  # fmt: skip
        if not 0 <= state["step"] <= self.config.steps:
            raise Refused(f"{checkpoint} is of step {state['step']}, but --steps is "
                          f"{self.config.steps}. Give more steps.")  # fmt: skip
        sizes = history.sizes[state["segment"] - 1 : state["segment"]]
        if not sizes or sizes[0] < state["log_bytes"]:
            raise Refused(f"{checkpoint}: the log of run {run_id} had {state['log_bytes']} bytes in "
                          f"segment {state['segment']} then, now {sizes[0] if sizes else 0}. Restore "
                          f"the log, or resume from an earlier checkpoint.")  # fmt: skip


def differences(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What two headers differ in: what changes the experiment, and the rest."""
    blocking = []
    for name in {**then["config"], **now["config"]}:
        was, here = _text(then["config"].get(name)), _text(now["config"].get(name))
        if was != here and name not in (*SETTINGS_OF_A_RUN, *ROUNDING):
            blocking.append(f"{flag(name)} {was} -> {here}")
    for name in BLOCKING:
        was, here = (str((header["data"] | header).get(name)) for header in (then, now))
        if was != here:
            blocking.append(f"{name} {was:.12} -> {here:.12}")
    others = []
    for name in (*RECORDED, *ROUNDING, "world_size"):
        was, here = (_recorded(header, name) for header in (then, now))
        if was != here:
            others.append(f"{name} {was} -> {here}")
    return blocking, others


def _recorded(header: dict[str, Any], name: str) -> Any:
    return (header["config"] | header["env"] | header).get(name)


def _text(value: Any) -> str:
    return as_text(tuple(value) if isinstance(value, list) else value)
