"""One run: its log, its clock, its checkpoints, and how it ends, whatever ends it."""

import contextlib
import gc
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime import checkpoint
from runtime.checkpoint import Snapshot
from runtime.clock import Clock
from runtime.errors import Interrupted, LogError, NonFinite, Refused
from runtime.log import RunLog, source_hash
from runtime.machine import Machine, peak_mib
from runtime.resume import Plan, differences
from runtime.settings import Interval
from runtime.stop import SAVE, Stop

LAG = 2  # steps by which a GPU's loss is read late. The same on all ranks, so they act alike
MOST_SKIPS = 20  # in a row; then nothing is learned any more
SECONDS_BETWEEN_LINES = 1.0
RANDOM = "random."  # begins the names of the generators' states in a checkpoint


class Trainer(Protocol):
    """What a run needs of what it trains."""

    config: Any  # RunSettings, target and steps
    machine: Machine
    guard: Any  # explain(verdict), report()

    def header(self, seed: int, trial: int) -> dict[str, Any]: ...
    def state_dict(self) -> dict[str, Any]:
        """{"model", "optim": tensors on the host by name, "data": dict}. Full on rank 0 alone."""
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def where(self, step: int) -> dict[str, Any]:
        """Shard and token offset of a step's batch."""
    def mfu(self, tokens_per_s: float) -> float: ...


class Run(contextlib.AbstractContextManager):
    """A new run, or one that goes on from a checkpoint. Leaving it writes the end and sets `code`.
    """

    def __init__(
        self, trainer: Trainer, plan: Plan, clock: Clock, stop: Stop, *, source: Path
    ) -> None:
        self.trainer, self.plan, self.clock, self.stop = trainer, plan, clock, stop
        self.steps_done = plan.step
        self.code = 1
        self._config, self._machine, self._source = trainer.config, trainer.machine, source
        self._header: dict[str, Any] = {}
        self._end: dict[str, Any] = {"status": "error", "val_loss": None, "reached": None}
        self._log = RunLog(self._config.log_dir, plan.run_id, plan.history, False)
        self._phases_logged = 0
        self._stepped_at = 0.0  # train time
        # Steps whose values are on their way from the device: event, values, CUDA event.
        self._late: list[tuple[dict[str, Any], Tensor, Any]] = []
        self._said_at = -math.inf
        self._skips = 0  # in a row; a resume starts again at zero
        self._failure: NonFinite | None = None
        self._every = Interval.parse(self._config.checkpoint_every)
        self._saved_at, self._saved_time = plan.step, time.monotonic()
        self._save_wanted = False
        self._folder = Path(self._config.checkpoint_dir, plan.run_id)
        self._last_saved = plan.checkpoint
        self._saved = Snapshot({}, {}, {})  # as read, until all ranks have it
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._executor.submit(int)  # starts the thread while there is memory for it
        self._writing: Future | None = None

    # ---- The beginning

    def __enter__(self) -> "Run":
        try:
            self._machine.on_main(self._open)  # first: from here on the run is this process's
            self._load()
            self._header = self.trainer.header(self.plan.seed, self.plan.trial)
            self._machine.on_main(self._begin)
        except BaseException:
            self._log.close()
            raise
        self._log_phases()
        return self

    def _open(self) -> None:
        self._log = RunLog(self._config.log_dir, self.plan.run_id, self.plan.history)

    def _load(self) -> None:
        """Give rank 0's checkpoint to all ranks. Refused where it does not fit."""
        plan = self.plan
        if plan.history is None:
            self.clock.begin_run()
            return
        lost_ms = max(plan.history.train_time_ms - plan.clock_ms, 0.0)
        self.clock.resume_run(plan.clock_ms, lost_ms)
        if plan.checkpoint is None:
            return
        data = self._machine.on_main(self._read)
        model = self._machine.broadcast(self._saved.model)
        optim = self._machine.broadcast(self._saved.optim)
        self._saved = Snapshot({}, {}, {})
        try:
            self.trainer.load_state_dict({"model": model, "optim": optim, "data": data})
            set_random_state(optim, self._machine)
        except Exception as error:  # of any kind: a stranger may have written the checkpoint
            raise Refused(f"checkpoint {plan.checkpoint} does not fit this run: {error}. Resume "
                          f"with the settings it was saved with.") from error  # fmt: skip

    def _read(self) -> dict[str, Any]:
        """Read the checkpoint, on rank 0; returns the position of the data."""
        assert self.plan.checkpoint is not None
        self._saved = checkpoint.load(self.plan.checkpoint)
        return self._saved.state["data"]

    def _begin(self) -> None:
        """Write the first lines, on rank 0."""
        plan = self.plan
        if source_hash(self._source) != self._header["source_sha256"]:
            raise LogError(f"the source in {self._source} was edited since the run started. Start "
                           f"it again.")  # fmt: skip
        self._log.store_sources(self._source)
        if plan.history is None:
            self._log.begin(self._header)
            return
        blocking, others = differences(plan.history.header, self._header)
        name = plan.checkpoint.name if plan.checkpoint else None
        resumed = {"from_step": plan.step, "checkpoint": name, "differences": blocking + others}
        self._log.begin(self._header, resumed)
        said = "; ".join(["", *blocking, *others])
        self._machine.say(f"run {plan.run_id} resumes after step {plan.step}{said}")

    def _log_phases(self) -> None:
        for phase in self.clock.phases[self._phases_logged :]:
            self._log.write("phase", **phase._asdict())
        self._phases_logged = len(self.clock.phases)

    # ---- Training

    def start_training(self) -> None:
        """Start the clock."""
        self.clock.start("train", timed=True)
        self._stepped_at = self.clock.train_time_ms

    def settle(self) -> None:
        """Stop the clock and write the steps that are still late. NonFinite."""
        self.clock.stop()
        self._write_late(wait=True)
        self._log_phases()
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """An untimed phase: stops the clock and, if it was running, starts it again."""
        training = self.clock.running
        if training:
            self.clock.stop()
        self._write_late(wait=True)
        self._log_phases()
        with self.clock.phase(name, timed=False):
            yield
        self._log_phases()
        gc.collect()  # which steps do not wait for
        if training:
            self.start_training()

    def stepped(
        self, message: Tensor, verdict: Tensor, *, lr_mul: float, window: int, stage: int,
        tokens: int,
    ) -> None:  # fmt: skip
        """Log a step, without waiting for the device: its line is written when its loss is here.

        message (1 + flags,): mean loss and the flags of `Stop`, summed over ranks. verdict: the
        guard's. tokens: of all steps so far.
        """
        self.steps_done += 1
        now = self.clock.train_time_ms
        event = {
            "step": self.steps_done, "tokens": tokens, "train_time_ms": now,
            "step_ms": now - self._stepped_at, "lr_mul": lr_mul, "window": window, "stage": stage,
        }  # fmt: skip
        self._stepped_at = now
        values = torch.cat([message.double(), verdict.double()])
        arrived = None
        if values.is_cuda:
            pinned = torch.empty_like(values, device="cpu", pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._late.append((event, values, arrived))
        self._write_late()

    def _write_late(self, wait: bool = False) -> None:
        """Write the steps whose values are here; with `wait` all of them."""
        while self._late and (wait or self._late[0][2] is None or len(self._late) > LAG):
            event, values, arrived = self._late.pop(0)
            if arrived is not None:
                arrived.synchronize()
            loss, *flags = values[: SAVE + 2].tolist()
            wants_to_save = self.stop.hear(flags)
            # A message that was sent before the last save may still carry the request for it.
            if wants_to_save and event["step"] > self._saved_at:
                self._save_wanted = True
            self._write_step(event, loss, self.trainer.guard.explain(values[SAVE + 2 :]))

    def _write_step(self, event: dict[str, Any], loss: float, skip: Any) -> None:
        step, where = event["step"], ""
        self._log.write("step", **event, skipped=skip is not None, train_loss=loss)
        if skip is not None or not math.isfinite(loss):
            place = self.trainer.where(step)
            where = f" (shard {place['shard']}, tokens from {place['token_offset']})"
        if skip is not None:
            self._log.write("skip", step=step, **skip._asdict(), **place)
            what = f"{skip.guard}: {skip.tensor or 'loss or norm'} {skip.value:.4g}{where}"
            self._machine.say(f"warning: step {step} skipped, {what}")
            self._skips += 1
            if self._skips >= MOST_SKIPS:
                self._failure = NonFinite(
                    f"{self._skips} steps were skipped in a row, the last of them {step}, {what}"
                )
        elif not math.isfinite(loss):
            raise NonFinite(f"training loss is {loss} at step {step}{where}")
        else:
            self._skips = 0
        now = time.monotonic()
        if now - self._said_at > SECONDS_BETWEEN_LINES or step == self._config.steps:
            self._said_at = now
            self._machine.say(self._text(event, loss))

    def _text(self, event: dict[str, Any], loss: float) -> str:
        step, steps = event["step"], self._config.steps
        seconds = event["train_time_ms"] / 1000
        rate = event["tokens"] / seconds
        return (
            f"step {step}/{steps} {step / steps:4.0%} | train loss {loss:.4f} | "
            f"lr x{event['lr_mul']:.3f} | window {event['window']} | {rate:,.0f} tok/s | "
            f"MFU {self.trainer.mfu(rate):.2f} | {seconds:.1f} s | "
            f"ETA {seconds / step * (steps - step):.0f} s"
        )

    def validated(self, step: int, val_loss: float) -> None:
        """Log and say a validation loss. NonFinite if it is not finite."""
        steps, train_time = self._config.steps, self.clock.train_time_ms
        self._log.write(
            "val", step=step, total_steps=steps, val_loss=val_loss, train_time_ms=train_time
        )
        self._machine.say(
            f"step {step}/{steps} | validation loss {val_loss:.4f} | {train_time / 1000:.1f} s"
        )
        if not math.isfinite(val_loss):
            raise NonFinite(f"validation loss is {val_loss} at step {step}")

    # ---- Checkpoints

    def must_save(self) -> bool:
        """Whether to save after this step: the same on all ranks."""
        minutes = (time.monotonic() - self._saved_time) / 60
        if self._machine.is_main and 0 < self._every.minutes <= minutes:
            self.stop.ask_to_save()  # all ranks hear it with a later step
        if self._every.steps:
            before, now = self._saved_at // self._every.steps, self.steps_done // self._every.steps
            if now > before:
                return True
        ends = self.stop.number is not None or self._failure is not None
        return ends or self._save_wanted

    def save(self) -> None:
        """Copy the run to the host, on the clock; a thread writes the checkpoint.

        Then raises what ends the run, if anything does: Interrupted or NonFinite.
        """
        self.clock.stop()
        self._write_late(wait=True)
        with self.clock.phase("checkpoint", timed=True):
            state = self._take()
        self._log_phases()
        self._submit(state)
        if self._failure is not None:
            raise self._failure
        if self.stop.number is not None:
            raise Interrupted(self.stop.number)
        self.start_training()

    def _take(self) -> dict[str, Any]:
        """The trainer's state and each rank's random generators, on the host of rank 0."""
        state = self.trainer.state_dict()
        by_rank = self._machine.gather(random_state(self._machine.device))
        for rank, generators in enumerate(by_rank or ()):
            for kind, part in generators.items():
                state["optim"][f"{RANDOM}{rank}.{kind}"] = part
        return state

    def _submit(self, taken: dict[str, Any]) -> None:
        """Write the checkpoint in the background; one that still waits gives way to it."""
        self._saved_at, self._saved_time = self.steps_done, time.monotonic()
        self._save_wanted = False
        self.stop.ask_to_save(False)
        if not self._machine.is_main:
            return
        state = {
            "run_id": self.plan.run_id, "seed": self.plan.seed, "trial": self.plan.trial,
            "step": self.steps_done, "clock_ms": self.clock.train_time_ms,
            "segment": self._log.segment, "log_bytes": self._log.size, "header": self._header,
            "data": taken["data"],
        }  # fmt: skip
        if self._writing is not None:
            self._writing.cancel()
        snapshot = Snapshot(taken["model"], taken["optim"], state)
        self._writing = self._executor.submit(self._write_checkpoint, snapshot)

    def _write_checkpoint(self, snapshot: Snapshot) -> None:
        try:
            for name, weight in snapshot.model.items():
                if not weight.isfinite().all():
                    raise ValueError(f"{name} is not finite, and older checkpoints are worth more")
            self._last_saved = checkpoint.save(self._folder, snapshot)
        except Exception as error:  # of any kind: nobody else hears of it in this thread
            kept = f"the last one is {self._last_saved}" if self._last_saved else "there is none"
            self._machine.say(
                f"warning: the checkpoint of step {snapshot.state['step']} could not be written to "
                f"{self._folder}: {getattr(error, 'strerror', None) or error}; {kept}. "
                f"Free some space, or give another --checkpoint-dir."
            )

    # ---- The end

    def finish(self, val_loss: float) -> None:
        """The run is done: say whether it reached its target, and keep its model if asked to."""
        target = self._config.target
        reached = val_loss <= target
        self._end = {"status": "done", "val_loss": val_loss, "reached": reached}
        if self._config.keep_model:
            self._submit(self._take())
        self._machine.say(
            f"target {target} {'reached' if reached else 'missed'}: val_loss {val_loss:.4f} at "
            f"step {self.steps_done} in {self.clock.train_time_ms / 1000:.1f} s "
            f"(log {self._log.path})"
        )
        self.code = 0

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if self.clock.running:
            self.clock.stop(wait=False)
        self._log_phases()
        self._executor.shutdown()  # waits until the last checkpoint is written
        expected = self._explain(error)
        train_time = self.clock.train_time_ms
        end = self._end | {"steps": self.steps_done, "train_time_ms": train_time}
        self._log.finish(end | {"peak_mib": peak_mib(self._machine)})
        if self._end["status"] == "done" and self._machine.is_main:
            self._clear()
        return expected

    def _explain(self, error: BaseException | None) -> bool:
        """Say what ended the run. Returns whether it is an end that needs no traceback."""
        if error is None:
            return False
        saved = "nothing was saved"
        if self._last_saved is not None:
            saved = f"saved in {self._last_saved}, go on with --resume auto"
        log = f"(log {self._log.path})"
        if isinstance(error, NonFinite):
            self._end["status"], self.code = "nonfinite", error.code
            self._machine.say(f"error: {error}; stopped, {saved} {log}. Lower the learning rates, "
                              f"or use --dtype float32.")  # fmt: skip
            return True
        if isinstance(error, Interrupted):
            self._end["status"], self.code = "interrupted", error.code
            self._machine.say(f"interrupted after step {self.steps_done}, {saved} {log}")
            return True
        self._machine.say(f"broke off in step {self.steps_done + 1}, {saved} {log}")
        return False

    def _clear(self) -> None:
        """Remove the checkpoints of a run that is done, but for the model that is to be kept."""
        for path in checkpoint.checkpoints(self._folder):
            if not self._config.keep_model or path != self._last_saved:
                checkpoint.remove(path)
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # fails where something is kept


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators in this process."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(saved: dict[str, Tensor], machine: Machine) -> None:
    """Restore this rank's generators. A rank that the checkpoint does not know keeps its own."""
    cpu, cuda = (saved.get(f"{RANDOM}{machine.rank}.{kind}") for kind in ("cpu", "cuda"))
    if cpu is not None:
        torch.set_rng_state(cpu)
    if cuda is not None and machine.device.type == "cuda":
        torch.cuda.set_rng_state(cuda, machine.device)
