"""Which runs a process makes: new runs, and interrupted ones from their checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.checkpoint import check, checkpoints
from runtime.errors import Refused
from runtime.log import History, new_run_id, read_history, require_writable
from runtime.registry import REGISTRY, read_registry
from runtime.settings import SETTINGS_OF_A_RUN, as_text, flag

# If one of these or a setting of the experiment differs, it is another run.
BLOCKING = ("source_sha256", "train_sha256", "val_sha256")
# Settings that change only rounding. After an out-of-memory error they have to change.
ROUNDING = ("micro_batch", "val_batch", "recompute")
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
    step: int = 0
    clock_ms: float = 0.0


def plan_runs(trainer: Any) -> list[Plan]:
    """The runs to make under --resume, the same on all ranks. Refused if --resume cannot work."""
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
    finder = Finder(config, trainer.header(config.seed, 0), trainer.machine.say)
    if config.resume == "auto":
        found = [finder.broken_off(plan) for plan in new]
        return [plan for plan in found if plan is not None]
    first = finder.named(Path(config.resume))
    if (first.seed, first.trial) not in [(plan.seed, plan.trial) for plan in new]:
        raise Refused(f"--resume {config.resume} is of seed {first.seed}, trial {first.trial}. "
                      f"Give --seed {first.seed - first.trial}, --trials above {first.trial}.")
    return [first, *new[first.trial + 1 :]]


@dataclass(frozen=True)
class Finder:
    """Finds interrupted runs. header: the one a new run would write."""

    config: Any
    header: dict[str, Any]
    say: Callable[[str], None]

    def broken_off(self, new: Plan) -> Plan | None:
        """The interrupted run of this seed, `new` if there is none, None if the seed is done."""
        for entry in self._starts(new.seed):
            run_id = entry["run_id"]
            history = read_history(self.config.log_dir, run_id)
            if history is None:  # killed before its first line
                continue
            done = history.status == "done"
            other = differences(history.header, self.header)[0]
            if entry.get("config_sha256") != self.header["config_sha256"] and other:
                if not done:
                    self.say(f"run {run_id} broke off, but with other settings: {'; '.join(other)}")
                continue
            if not done:
                return self._resume(run_id, history, Path(self.config.checkpoint_dir, run_id))
            if entry.get("source_sha256") != self.header["source_sha256"]:
                break  # done with another source; older runs do not count either
            self.say(f"seed {new.seed} is done: run {run_id}")
            return None
        self.say(f"seed {new.seed}: nothing to resume in {self.config.log_dir}, a new run starts")
        return new

    def _starts(self, seed: int) -> list[dict[str, Any]]:
        """Registry lines of starts with this seed, track and claim, the latest first."""
        path = Path(self.config.log_dir, REGISTRY)
        if not path.exists():
            if any(path.parent.glob("*.jsonl")):
                raise Refused(f"{path} is missing, so nobody knows what is done. Restore it, or "
                              f"name the run: --resume {self.config.checkpoint_dir}/RUN.")
            return []
        wanted = {"event": "start", "seed": seed, "track": self.header["track"]}
        wanted["claim"] = self.header.get("claim")
        return [entry for entry in read_registry(path)[::-1] if wanted.items() <= entry.items()]

    def named(self, path: Path) -> Plan:
        """The plan for a run's folder of checkpoints, or for one checkpoint."""
        folder = path.resolve()
        if not checkpoints(folder):  # then it must be one itself
            folder = folder.parent
        history = read_history(self.config.log_dir, folder.name)
        if history is None:
            raise Refused(f"--resume {path}: no log of run {folder.name} in {self.config.log_dir}. "
                          f"Give the folder of a run or of one checkpoint, and its --log-dir.")
        return self._resume(folder.name, history, path)

    def _resume(self, run_id: str, history: History, path: Path) -> Plan:
        """Resume from `path` or its newest whole checkpoint; from the start if none was saved."""
        if history.status == "done":
            raise Refused(f"run {run_id} is done. Start a new run without --resume.")
        anyway = self.config.resume_anyway
        blocking, _ = differences(history.header, self.header)
        if blocking and not anyway:
            raise Refused(f"run {run_id} had other settings or another source: "
                          f"{'; '.join(blocking)}. Go back to those, start a new run, or give "
                          f"--resume-anyway on.")  # fmt: skip
        plan = Plan(history.header["seed"], history.header["trial"], run_id, history)
        if path.name.startswith("step_"):
            return self._from(plan, history, path, check(path))
        saved_in = history.header["config"].get("checkpoint_dir")
        problem = f"the run was saved in {saved_in}" if saved_in != str(path.parent) else ""
        for checkpoint in checkpoints(path)[::-1]:
            try:
                state = check(checkpoint)
            except Refused as error:  # damaged; the one before may be whole
                problem = str(error)
                self.say(f"warning: {problem}")
            else:
                return self._from(plan, history, checkpoint, state)
        if problem and not anyway:
            raise Refused(f"no usable checkpoint in {path}: {problem} Give the right one, or start "
                          f"the run again with --resume-anyway on.")  # fmt: skip
        return plan

    def _from(self, plan: Plan, history: History, path: Path, state: dict[str, Any]) -> Plan:
        """The plan with this whole checkpoint. Refused if run, steps or log do not fit it."""
        if state["run_id"] != plan.run_id:
            raise Refused(f"{path} is of run {state['run_id']!r:.80}, not of {plan.run_id}. A "
                          f"folder was renamed.")  # fmt: skip
        if not 0 <= state["step"] <= self.config.steps:
            raise Refused(f"{path} is of step {state['step']}, but --steps is {self.config.steps}. "
                          f"Give more steps.")  # fmt: skip
        size = sum(history.sizes[state["segment"] - 1 : state["segment"]])
        if size < state["log_bytes"]:
            raise Refused(f"{path}: segment {state['segment']} of the log had {state['log_bytes']} "
                          f"bytes when it was saved, and has {size}. Restore the log, or resume "
                          f"from an earlier checkpoint.")  # fmt: skip
        return replace(plan, checkpoint=path, step=state["step"], clock_ms=state["clock_ms"])


def differences(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What differs in two headers: (what changes the experiment, the rest)."""
    blocking: list[str] = []
    others: list[str] = []
    was, here = _facts(then), _facts(now)
    for name in {**was, **here}:
        if was.get(name) != here.get(name):
            found = others if name in RECORDED else blocking
            found.append(f"{name} {was.get(name)} -> {here.get(name)}")
    return blocking, others


def _facts(header: dict[str, Any]) -> dict[str, str]:
    """What decides whether a run is the same: settings by their flags, hashes, the machine."""
    everything = header["config"] | header["env"] | header["data"] | header
    facts = {}
    for name, value in header["config"].items():
        if name not in (*SETTINGS_OF_A_RUN, *ROUNDING):
            facts[flag(name)] = as_text(tuple(value) if isinstance(value, list) else value)
    for name in BLOCKING:
        facts[name] = f"{everything.get(name)!s:.12}"
    for name in RECORDED:
        facts[name] = str(everything.get(name))
    return facts
