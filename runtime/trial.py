"""The runs of a process: new ones, or broken-off ones where they go on; and one run from its first line to its last."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file

from runtime.checkpoint import CheckpointError, Snapshot, Writer, checkpoints, newest, read
from runtime.clock import Ledger
from runtime.environment import Machine, out_of_memory, peak_mib
from runtime.flags import as_text, flag
from runtime.log import RunLog, RunLogError, new_run_id, register_end, tail_of
from runtime.progress import NonFinite
from runtime.registry import REGISTRY, read_registry
from runtime.requests import SAVE, Requests
from runtime.settings import SETTINGS_OF_A_RUN, Interval
from runtime.signals import Interrupted
from runtime.state import Whole
from runtime.watch import RankLost, Watch, first_line

BLOCKING = ("source_sha256", "train_sha256", "val_sha256")  # what must not differ, beside the configuration
RECORDED = ("torch", "cuda", "gpu", "driver", "cpu", "threads", "dtype", "attention", "compiled", "compile_flags")


class Resume(NamedTuple):
    """Where a broken-off run goes on."""

    step: int
    log_offset: int  # bytes of the log that stand
    clock_ms: float  # training time at that step
    lost_ms: float  # training time of steps that are done again
    checkpoint: Path | None = None  # None: the run begins again, as it has no checkpoint


class Trial(NamedTuple):
    seed: int
    number: int  # of the trial, from 0 on
    run_id: str
    resume: Resume | None = None

    def snapshot(self, main: bool) -> Snapshot | None:
        """What the run goes on from; None where it begins, and on all ranks but the first."""
        return read(self.resume.checkpoint) if main and self.resume and self.resume.checkpoint else None


class Fault(RuntimeError):
    """An error whose message says all: a traceback would add nothing."""


class RankFault(Fault, RankLost):
    """One that every rank says, as the first may be the one that is lost."""


@contextlib.contextmanager
def explained(watch: Watch, data_error: type[Exception]) -> Iterator[None]:
    """Errors that are no fault of the code become a Fault: of log, checkpoint, data, memory, and of other ranks."""
    try:
        yield
    except (RunLogError, CheckpointError, data_error) as error:
        raise Fault(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            raise Fault(f"out of memory: {first_line(error)}. Give a smaller --micro-batch, or --micro-batch auto: "
                        f"batch and trajectory stay as they are.") from error
        if lost := watch.blame():
            raise RankFault(lost) from error
        raise


# ---- Which runs


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
    runs, plan = _registered(settings, header), []
    for trial in new:
        run_id, source, ended = runs.get(trial.seed, ("", None, True))
        log = Path(settings.log_dir) / f"{run_id}.jsonl"
        status = _status(log)
        if status == "done" and source == header["source_sha256"]:
            say(f"seed {trial.seed} is done: {log}")
            if not ended:  # it was killed between its last two lines
                register_end(log)
        elif status in ("none", "done"):
            plan.append(trial)
        else:
            plan.append(_continued(settings, run_id, Path(settings.checkpoint_dir) / run_id, header, say))
    return plan


def _registered(settings: Any, header: dict[str, Any]) -> dict[int, tuple[str, str, bool]]:
    """(run id, source hash, whether its end is registered) of each seed's last run with these settings and claim."""
    path = Path(settings.log_dir) / REGISTRY
    runs: dict[int, tuple[str, str, bool]] = {}
    for entry in read_registry(path) if path.exists() else ():
        alike = all(entry.get(name) == header[name] for name in ("track", "config_sha256", "claim"))
        if entry["event"] == "start" and alike:
            runs[entry["seed"]] = (entry["run_id"], entry["source_sha256"], False)
        for seed, (run_id, source, _) in runs.items():
            if entry["run_id"] == run_id and entry["event"] != "start":
                runs[seed] = (run_id, source, entry["event"] == "end")
    return runs


def _status(log: Path) -> str | None:
    """How the run ended, by its log: one that was killed could not register it. "none" if it has no first line."""
    try:
        return tail_of(log).status
    except RunLogError:
        return "none"


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
        tail = tail_of(Path(settings.log_dir) / f"{run_id}.jsonl")
    except RunLogError as error:
        raise CheckpointError(f"{path} has no log to go on with: {error}.") from None
    if tail.status == "done":
        raise CheckpointError(f"run {run_id} is done, there is nothing to resume. Start a new run without --resume.")
    blocking = differences(tail.header, header)[0]
    if blocking and not settings.resume_anyway:
        raise CheckpointError(f"run {run_id} was made with other settings or another source: {'; '.join(blocking)}. "
                              f"Go back to those, start a new run, or go on all the same with --resume-anyway on.")
    found = (path, read(path)) if one else newest(path, say)
    seed, number = tail.header["seed"], tail.header["trial"]
    if found is None:
        return Trial(seed, number, run_id, Resume(0, tail.header_bytes, 0.0, tail.train_time_ms))
    state = found[1].state
    if state["run_id"] != run_id:
        raise CheckpointError(f"{found[0]} is of run {state['run_id']!r:.80}, not of {run_id}; a folder was renamed or "
                              f"mixed up. Put it back.")
    lost = max(tail.train_time_ms - state["clock_ms"], 0.0)  # copying it is on the clock, and maybe in no line yet
    return Trial(seed, number, run_id, Resume(state["step"], state["log_offset"], state["clock_ms"], lost, found[0]))


def differences(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What two headers differ in: what changes the experiment, and the rest."""
    settings = [name for name in {**then["config"], **now["config"]} if name not in SETTINGS_OF_A_RUN]
    changed = {name: (_text(then["config"].get(name)), _text(now["config"].get(name))) for name in settings}
    blocking = [f"{flag(name)} {was} -> {here}" for name, (was, here) in changed.items() if was != here]
    pairs = {name: (side(then, name), side(now, name)) for name in BLOCKING}
    blocking += [f"{name} {was!s:.12} -> {here!s:.12}" for name, (was, here) in pairs.items() if was != here]
    others = {name: (then["env"].get(name), now["env"].get(name)) for name in RECORDED}
    others |= {name: (then.get(name), now.get(name)) for name in ("world_size", "micro_batch")}
    return blocking, [f"{name} {was} -> {here}" for name, (was, here) in others.items() if was != here]


def side(header: dict[str, Any], name: str) -> Any:
    return header.get(name, header["data"].get(name))


def _text(value: Any) -> str:
    return as_text(tuple(value) if isinstance(value, list) else value)


# ---- One run


class Run(contextlib.AbstractContextManager):
    """Log, clock and checkpoints of a run. Leaving it writes how the run ended, whatever ended it, and sets `code`.

    `header` is that of a new run; `source` is kept with the log.
    """

    def __init__(
        self, trial: Trial, settings: Any, machine: Machine, requests: Requests, watch: Watch, header: dict[str, Any],
        source: Path,
    ):  # fmt: skip
        self.trial, self.settings, self.machine, self.requests, self.watch = trial, settings, machine, requests, watch
        self.steps, self.code = trial.resume.step if trial.resume else 0, 1
        self._header, self._source = header, source
        self._end: dict[str, Any] = {"status": "error", "val_loss": None, "reached": None}
        opened = RunLog.reopen if trial.resume else RunLog
        self.log = opened(settings.log_dir, trial.run_id, enabled=machine.is_main)
        self.ledger = Ledger(machine.synchronize, self._log_phase)
        folder, last = Path(settings.checkpoint_dir) / trial.run_id, trial.resume.checkpoint if trial.resume else None
        self._writer = Writer(folder, machine.say, last) if machine.is_main else None
        self._every = Interval.parse(settings.checkpoint_every)
        self._saved_at, self._saved_time = self.steps, time.monotonic()

    def _log_phase(self, name: str, timed: bool, ms: float) -> None:
        self.log.write("phase", name=name, timed=timed, ms=ms)

    def begin(self, phases: Iterable[tuple[str, bool, float]]) -> None:
        """The first lines, of a new run or of one that goes on; `phases` are those of getting ready."""
        if self.log.store_sources(self._source) != self._header["source_sha256"]:
            raise RunLogError("the source was edited while the run got ready: start it again")
        self.watch.on_loss = self._write_end
        if self.trial.resume is None:
            self.log.begin(self._header)
        else:
            self._continue(self.trial.resume)
        for phase in phases:
            self._log_phase(*phase)

    def _continue(self, resume: Resume) -> None:
        if self.machine.is_main:
            told = list(chain(*differences(tail_of(self.log.path).header, self._header)))
            name = resume.checkpoint.name if resume.checkpoint else None
            self.log.resume(from_step=resume.step, checkpoint=name, differences=told, log_offset=resume.log_offset)
            found = f"; differences: {'; '.join(told)}" if told else ""
            self.machine.say(f"run {self.trial.run_id} goes on after step {resume.step}{found}")
        self.ledger.resume(resume.clock_ms, resume.lost_ms)

    def stepped(self, step: int) -> None:
        self.steps = self.watch.step = step

    def resume_clock(self) -> float:
        """Train from here on, on the clock; returns where it stands, in milliseconds."""
        self.ledger.start("train", timed=True)
        return self.ledger.train_time_ms

    def validated(self, step: int, val_loss: float) -> None:
        """Log a validation loss and say it; raises NonFinite for one that is not finite."""
        steps, train_time = self.settings.steps, self.ledger.train_time_ms
        self.log.write("val", step=step, total_steps=steps, val_loss=val_loss, train_time_ms=train_time)
        self.machine.say(f"step {step}/{steps} | validation loss {val_loss:.4f} | {train_time / 1000:.1f} s")
        if not math.isfinite(val_loss):
            raise NonFinite(f"validation loss is {val_loss} at step {step}")

    def due(self) -> bool:
        """Whether to save now, after `steps` steps; the same on all ranks."""
        minutes = (time.monotonic() - self._saved_time) / 60
        if self.machine.is_main and 0 < self._every.minutes <= minutes:
            self.requests.ask(SAVE)
        passed = self._every.steps and self.steps // self._every.steps > self._saved_at // self._every.steps
        return bool(self.requests.stop or self.requests.save or passed)

    def save(self, whole: Whole, failure: NonFinite | None = None) -> None:
        """Copy the run to the host, on the clock and on all ranks; writing it holds nobody up. Raises what ends it."""
        with self.ledger.phase("checkpoint", timed=True):
            snapshot = whole.take()
        self._submit(snapshot)
        self.requests.saved(self.steps)
        if failure is not None:
            raise failure
        if self.requests.stop is not None:
            raise Interrupted(self.requests.stop)

    def locate(self, loader: Any, step: int, skip: Any) -> dict[str, Any]:
        """Fields for the log that say which tokens a bad step had; keeps them where --capture-nonfinite wants it."""
        place = loader.where(step)
        if self.settings.capture_nonfinite and skip is not None and not math.isfinite(skip.value):
            self._capture(loader.batches(step), {**place._asdict(), "step": step, **skip._asdict()})
        return {"shard": place.shard, "token_offset": place.start}

    def _capture(self, batches: list[Any], facts: dict[str, Any]) -> None:
        """One file for each rank, as each has its own part of the batch."""
        folder, name = Path(self.settings.capture_nonfinite), f"step_{facts['step']:06d}.rank_{self.machine.rank}"
        tensors = {f"{kind}.{k}": part for k, batch in enumerate(batches) for kind, part in batch._asdict().items()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            told = {key: str(value) for key, value in facts.items()}
            save_file(tensors, folder / f"{self.trial.run_id}.{name}.safetensors", metadata=told)
        except (OSError, SafetensorError) as error:
            self.machine.say(f"warning: the tokens of step {facts['step']} could not be kept in {folder}: {error}")

    def _submit(self, snapshot: Snapshot) -> None:
        self._saved_at, self._saved_time = self.steps, time.monotonic()
        if self._writer is None:
            return
        place = {"run_id": self.trial.run_id, "seed": self.trial.seed, "trial": self.trial.number, "step": self.steps}
        clock = {"clock_ms": self.ledger.train_time_ms, "phases": [list(phase) for phase in self.ledger.phases]}
        rest = {"header": self._header, "log_offset": self.log.offset} | snapshot.state
        self._writer.submit(snapshot._replace(state=place | clock | rest))

    def finish(self, val_loss: float, whole: Whole) -> None:
        """The run is done: say whether it reached its target, and keep its last state if that is wanted."""
        reached, target = val_loss <= self.settings.target, self.settings.target
        self._end = {"status": "done", "val_loss": val_loss, "reached": reached}
        if self.settings.keep_model:
            self._submit(whole.take())
        self.machine.say(
            f"target {target} {'reached' if reached else 'missed'}: val_loss {val_loss:.4f} at step "
            f"{self.steps} in {self.ledger.train_time_ms / 1000:.1f} s (log {self.log.path})"
        )
        self.code = 0

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        self.ledger.abandon()
        if self._writer is not None:
            self._writer.close()
        expected = self._explain(error)
        self._write_end()
        if self._end["status"] == "done" and self._writer is not None:
            self._writer.clear(keep_last=self.settings.keep_model)
        return expected

    def _write_end(self) -> None:
        """Also called by the watch, when another rank is lost and the main thread may wait for it for ever."""
        end = self._end | {"steps": self.steps, "train_time_ms": self.ledger.train_time_ms}
        self.log.finish({**end, "peak_mib": peak_mib(self.machine)})

    def _explain(self, error: BaseException | None) -> bool:
        """Whether this end was to be expected; says it."""
        last = self._writer.last if self._writer else None
        saved = f"saved in {last}, go on with --resume auto" if last else "nothing was saved"
        if isinstance(error, NonFinite):
            self._end["status"], self.code = "nonfinite", 3
            self.machine.say(f"error: {error}; stopped, {saved} (log {self.log.path}). Lower the learning rates, or "
                             f"use --dtype float32.")
        elif isinstance(error, Interrupted):
            self._end["status"], self.code = "interrupted", error.code
            self.machine.say(f"interrupted after step {self.steps}, {saved} (log {self.log.path})")
        elif error is not None:
            self.machine.say(f"broken off in step {self.steps + 1}, {saved} (log {self.log.path})")
        return isinstance(error, NonFinite | Interrupted)
