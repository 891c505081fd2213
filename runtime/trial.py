"""One run from its first line to its last, whatever ends it."""

import contextlib
import gc
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from runtime.checkpoint import CheckpointError, Snapshot, Writer
from runtime.clock import Ledger
from runtime.environment import CompileError, FailedElsewhere, Machine, out_of_memory, peak_mib, refuse
from runtime.log import RunLog, RunLogError, tail_of
from runtime.progress import NonFinite
from runtime.requests import SAVE, Requests
from runtime.resume import Resume, Trial, differences
from runtime.settings import Interval
from runtime.signals import Interrupted
from runtime.state import Whole
from runtime.watch import RankLost, Watch, first_line


class Fault(RuntimeError):
    """An error whose message says all: a traceback would add nothing."""


class RankFault(Fault, RankLost):
    """One that every rank says, as the first may be the one that is lost."""


@contextlib.contextmanager
def explained(watch: Watch, data_error: type[Exception]) -> Iterator[None]:
    """Errors that are no fault of the code become a Fault: of log, checkpoint, data, memory, and of other ranks."""
    try:
        yield
    except (RunLogError, CheckpointError, CompileError, data_error) as error:
        raise Fault(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, FailedElsewhere):
            refuse(error, 1)  # the other rank may have no voice; why this one ends is said below
        if out_of_memory(error):
            raise Fault(f"out of memory: {first_line(error)}. Give --recompute on, a smaller --val-batch, or "
                        f"--micro-batch auto or half of what the first lines name: batch and trajectory stay."
                        ) from error
        if lost := watch.blame():
            raise RankFault(lost) from error
        raise


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
        self._header, self._source, self._begun = header, source, False
        requests.saved(self.steps)
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
        if self.trial.resume is None:
            self.log.begin(self._header)
        else:
            self._continue(self.trial.resume)
        self._begun = True
        self.watch.on_loss = self._write_end
        for phase in phases:
            self._log_phase(*phase)

    def _continue(self, resume: Resume) -> None:
        if self.machine.is_main:
            if len(self.log.found) != resume.log_bytes:
                raise RunLogError(f"{self.log.path} has changed since it was read: another process went on with it; "
                                  f"start again")
            blocking, others = differences(tail_of(self.log.path).header, self._header)
            told = blocking + others
            self.log.restore(resume.log_offset, resume.waiting)
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

    def validated(self, step: int, val_loss: float) -> float:
        """Log a validation loss, say it and return it; raises NonFinite for one that is not finite."""
        gc.collect()  # off the clock
        steps, train_time = self.settings.steps, self.ledger.train_time_ms
        self.log.write("val", step=step, total_steps=steps, val_loss=val_loss, train_time_ms=train_time)
        self.machine.say(f"step {step}/{steps} | validation loss {val_loss:.4f} | {train_time / 1000:.1f} s")
        if not math.isfinite(val_loss):
            raise NonFinite(f"validation loss is {val_loss} at step {step}")
        return val_loss

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
        state = {
            "run_id": self.trial.run_id, "seed": self.trial.seed, "trial": self.trial.number, "step": self.steps,
            "clock_ms": self.ledger.train_time_ms, "phases": [list(phase) for phase in self.ledger.phases],
            "header": self._header, "log_offset": self.log.offset, "log_waiting": self.log.waiting,
        }  # fmt: skip
        self._writer.submit(snapshot._replace(state=state | snapshot.state))

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
        if not self._begun:  # and so there is nothing to end
            self.log.close()
            return
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
            where = f"broken off in step {self.steps + 1}" if self._begun else "not begun"
            self.machine.say(f"{where}, {saved} (log {self.log.path})")
        return isinstance(error, NonFinite | Interrupted)
