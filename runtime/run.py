"""One run: its log, clock and checkpoints, and its orderly end, whatever ends it."""

import contextlib
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from runtime import checkpoint
from runtime.checkpoint import Snapshot, Writer
from runtime.clock import Clock
from runtime.ending import Stop
from runtime.errors import Interrupted, LogError, NonFinite
from runtime.jsonl import Json
from runtime.log import RunLog
from runtime.machine import Machine, peak_mib
from runtime.plan import RunPlan, differences, header
from runtime.source import store_sources
from runtime.terminal import Dashboard, Progress
from runtime.trainer import Trainer

# Steps by which losses are read late, so that nothing waits for a GPU. The same on all ranks, so
# that they act alike.
LAG = {"cuda": 2, "cpu": 0, "mps": 0}
MOST_SKIPS = 20  # in a row; after that the run has stopped learning


class LateStep(NamedTuple):
    """A step whose numbers are still on the device."""

    event: Json  # what the log will get, as far as it is known
    loss: Tensor  # (), the mean over ranks
    flags: Tensor  # of `Stop`, summed over ranks
    verdict: Tensor  # of the guard
    arrived: torch.cuda.Event | None  # when they are on the host


class Run(contextlib.AbstractContextManager):
    """A new or resumed run of a trainer.

    Leaving it logs how it ended and sets `code`, the exit code. NonFinite and Interrupted end here.
    """

    def __init__(
        self, trainer: Trainer, plan: RunPlan, clock: Clock, stop: Stop, *, source: Path
    ) -> None:
        self.trainer, self.plan, self.clock, self.stop = trainer, plan, clock, stop
        self.steps_done = self._saved_at = plan.step
        self.code = 1
        self._config, self._machine, self._source = trainer.config, trainer.machine, source
        self._end: Json = {"status": "error", "val_loss": None, "reached": None}
        self._log = RunLog(self._config.log_dir, plan.run_id, plan.history)  # rank 0 begins it
        self._phases_logged = 0
        self._late: list[LateStep] = []
        self._skips = 0  # in a row; starts at zero after a resume
        folder = Path(self._config.checkpoint_dir, plan.run_id)
        self.writer = Writer(folder, self._log, self._machine.say, plan.checkpoint)

    # ---- The beginning

    def __enter__(self) -> "Run":
        with contextlib.ExitStack() as undo:  # what has begun, if the rest fails
            undo.callback(self._log.close)
            self._load()
            self._header = header(self.trainer, self.plan.seed, self.plan.trial)
            self._progress = Progress(self.trainer, self._header)
            self._machine.on_main(self._begin)
            undo.pop_all()
        self._log_phases()
        log_to = self._config.log_to if self._machine.is_main else "none"
        settings = self._header["config"]
        say, after = self._machine.say, self.plan.step
        self._dashboard = Dashboard(log_to, self._log.path, settings, say, after)
        return self

    def _load(self) -> None:
        """Set the clock, and load rank 0's checkpoint on all ranks."""
        plan, clock_ms = self.plan, 0.0
        path, sha256 = plan.checkpoint, plan.checkpoint_sha256
        if path is not None:
            model, saved, state = self._machine.on_main(lambda: checkpoint.load(path, sha256))
            for name, generator in generators(self._machine).items():
                if name in saved:  # else saved on fewer ranks: this one keeps its own
                    generator.set_state(saved[name])
            optim = {name: saved[name] for name in saved if not name.startswith("random.")}
            self.trainer.load_state_dict({"model": model, "optim": optim, "data": state["data"]})
            clock_ms = state["clock_ms"]
        self.clock.begin_run()
        if plan.history is not None:
            self.clock.resume_run(clock_ms, lost_ms=plan.history.train_time_ms - clock_ms)

    def _begin(self) -> None:
        """Open the log and write its first lines, on rank 0."""
        plan = self.plan
        stored = store_sources(self._config.log_dir, self._source)
        if stored != self._header["source_sha256"]:
            raise LogError(f"the source in {self._source} was edited since the run started. Start "
                           f"it again.")  # fmt: skip
        if plan.history is None:
            self._log.begin(self._header)
            return
        _, others = differences(plan.history.header, self._header)
        self._log.begin(self._header, {
            "from_step": plan.step, "checkpoint": plan.checkpoint and plan.checkpoint.name,
            "differences": others, "checkpoint_sha256": plan.checkpoint_sha256,
        })  # fmt: skip
        self._machine.say("; ".join([f"run {plan.run_id} resumes after step {plan.step}", *others]))

    def _log_phases(self) -> None:
        for phase in self.clock.phases[self._phases_logged :]:
            self._log.write("phase", **phase._asdict())
        self._phases_logged = len(self.clock.phases)

    # ---- Training

    def start_training(self) -> None:
        self.clock.start("train", timed=True)
        self._stepped_at = self.clock.train_time_ms  # train time

    def settle(self) -> None:
        """Stop the clock and write the steps that are not written yet."""
        if self.clock.running:
            self.clock.stop()
        self._write_late(wait=True)
        self._log_phases()

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """An untimed phase. A running clock stops for it and starts again."""
        training = self.clock.running
        self.settle()
        with self.clock.phase(name, timed=False), self._progress.pause(name):
            yield
        self._log_phases()
        gc.collect()  # here, off the clock; it is disabled during steps
        if training:
            self.start_training()

    def stepped(self, loss: Tensor, flags: Tensor, verdict: Tensor, **schedule: float) -> None:
        """Log a step. Its line is written once its loss has arrived, so nothing waits.

        loss: the mean over ranks. flags: of `Stop`, summed over ranks. verdict: the guard's.
        schedule: lr_mul, window and stage of this step, and tokens of all steps so far.
        """
        self.steps_done += 1
        now = self.clock.train_time_ms
        step_ms = now - self._stepped_at
        event = {"step": self.steps_done, "train_time_ms": now, "step_ms": step_ms, **schedule}
        self._stepped_at = now
        arrived = None
        if loss.is_cuda:
            # To pinned memory, so without a wait: read them once the event has passed.
            loss, flags, verdict = (x.to("cpu", non_blocking=True) for x in (loss, flags, verdict))
            arrived = torch.cuda.Event()
            arrived.record()
        self._late.append(LateStep(event, loss, flags, verdict, arrived))
        self._write_late()

    def _write_late(self, wait: bool = False) -> None:
        """Write the steps whose values may be read now, or with `wait` all."""
        lag = 0 if wait else LAG[self._machine.device.type]
        while len(self._late) > lag:
            late = self._late.pop(0)
            if late.arrived is not None:
                late.arrived.synchronize()
            self.stop.hear(late.flags.tolist())
            self._write_step(late.event, late.loss.item(), late.verdict)

    def _write_step(self, event: Json, loss: float, verdict: Tensor) -> None:
        step, guard = event["step"], self.trainer.guard
        skip = guard.explain(verdict)
        # Gradients are of losses summed over a sequence.
        norms = [norm / self._config.seq_len for norm in guard.gradient_norms(verdict)]
        event["grad_norm"] = math.hypot(*norms)
        event["grad_norms"] = dict(zip(self.trainer.optimizers, norms, strict=True))
        event |= {"skipped": skip is not None, "train_loss": loss}
        self._log.write("step", **event)
        if (held := guard.held(verdict)) is not None:
            self._log.write("held", step=step, **held._asdict())
            what = f"kept their weights, {held.tensor} first: their updates were not finite"
            self._machine.say(f"warning: at step {step} {held.matrices} matrices {what}")
        self._dashboard.show(event)
        self._progress.step(event)
        if skip is None and math.isfinite(loss):
            self._skips = 0
            return
        place = self.trainer.data.train.places[step]
        where = f"(shard {place['shard']}, tokens from {place['token_offset']})"
        if skip is None:
            raise NonFinite(f"training loss is {loss} at step {step} {where}")
        self._log.write("skip", step=step, **skip._asdict(), **place)
        what = f"{skip.guard}: {skip.tensor or 'loss or norm'} {skip.value:.4g} {where}"
        self._machine.say(f"warning: step {step} skipped, {what}")
        self._skips += 1
        if self._skips >= MOST_SKIPS:
            many = f"{self._skips} steps were skipped in a row, the last of them {step}, {what}"
            raise NonFinite(many)

    def validated(self, step: int, val_loss: float) -> None:
        """Log and print a validation loss, inside a pause. NonFinite if it is not finite."""
        steps, ms = self._config.steps, self.clock.train_time_ms
        event = {"step": step, "val_loss": val_loss, "train_time_ms": ms}
        self._log.write("val", **event, total_steps=steps)
        self._dashboard.show(event)
        self._machine.say(f"step {step}/{steps} | validation loss {val_loss:.4f} | "
                          f"{ms / 1000:.1f} s")  # fmt: skip
        self._progress.validated()
        if not math.isfinite(val_loss):
            raise NonFinite(f"validation loss is {val_loss} at step {step}")

    # ---- Checkpoints

    def must_save(self) -> bool:
        """Whether to save after this step; equal on all ranks."""
        every = self._config.checkpoint_every
        due = every > 0 and self.steps_done // every > self._saved_at // every
        return due or self.stop.number is not None

    def save(self) -> None:
        """Copy the run to rank 0's host, on the clock. A thread writes the checkpoint.

        Then raises Interrupted, if a signal ends the run.
        """
        self.settle()
        with self.clock.phase("checkpoint", timed=True):
            taken = self.trainer.state_dict()
            own = {name: each.get_state() for name, each in generators(self._machine).items()}
            for states in self._machine.gather(own):
                taken["optim"] |= states
        self._log_phases()
        self._saved_at = self.steps_done
        if self._machine.is_main:
            step, clock_ms = self.steps_done, self.clock.train_time_ms
            state = {"step": step, "clock_ms": clock_ms, "data": taken["data"]}
            self.writer.submit(Snapshot(taken["model"], taken["optim"], state))
        if self.stop.number is not None:
            raise Interrupted(self.stop.number)
        self.start_training()

    # ---- The end

    def keep(self, val_loss: float, tokenizer: Path | str | None) -> None:
        """Write the trained model, off the clock. A full disk is a warning."""
        known = {"run_id": self.plan.run_id, "steps": self.steps_done, "val_loss": val_loss}
        known |= {name: self._header[name] for name in ("seed", "source_sha256", "config")}
        known["tokens"] = self._header["train_tokens"]
        with self.pause("keep"):
            if self._machine.is_main:
                self.writer.keep(self.trainer.model_state(), known, tokenizer)

    def finish(self, val_loss: float, found: Json) -> None:
        """End a run that is done. found: further fields of the end event, `probes` among them."""
        target, seconds = self._config.target, self.clock.train_time_ms / 1000
        seed = f"seed {self.plan.seed}: " if self._config.trials > 1 else ""
        word = "reached" if val_loss <= target else "missed"
        probes = found["probes"]
        said = [f"loss on copied tokens {probes['loss_on_copied']:.2f}",
                f"on new tokens {probes['loss_on_new']:.2f}"]  # fmt: skip
        if "loss_held_out" in probes:
            said.append(f"on the held-out slice {probes['loss_held_out']:.4f}")
        self._machine.say(", ".join(said))
        self._machine.say(f"{seed}target {target} {word}: val_loss {val_loss:.4f} at step "
                          f"{self.steps_done} in {seconds:.1f} s (log {self._log.path})")
        self._end = {"status": "done", "val_loss": val_loss, "reached": val_loss <= target, **found}
        self.code = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:  # fmt: skip
        """Log the end. Returns whether the error is explained: then it goes no further."""
        if self.clock.running:
            self.clock.stop(wait=False)
        self._log_phases()
        self.writer.close()
        if error is not None:
            self._explain(error)
        end = {"steps": self.steps_done, "train_time_ms": self.clock.train_time_ms}
        self._log.finish(self._end | end | {"peak_mib": peak_mib(self._machine)})
        self._dashboard.close()
        if self._end["status"] == "done" and self._machine.is_main:
            self.writer.clear(self._config.keep_model)
        return isinstance(error, NonFinite | Interrupted)

    def _explain(self, error: BaseException) -> None:
        """Say what ended the run and how to resume it."""
        how = f"stopped after step {self.steps_done}"
        if isinstance(error, NonFinite):
            self._end["status"], self.code = "nonfinite", error.code
            how = f"error: {error}. Lower the learning rates, or use --dtype float32; stopped"
        elif isinstance(error, Interrupted):
            self._end["status"], self.code = "interrupted", error.code
            how = f"interrupted after step {self.steps_done}"
        saved = "nothing was saved"
        if self.writer.last is not None:
            saved = f"saved in {self.writer.last}, the same command with --resume auto resumes it"
        self._machine.say(f"{how}, {saved} (log {self._log.path})")


def generators(machine: Machine) -> dict[str, torch.Generator]:
    """This rank's torch generators, whose states a checkpoint holds under these names."""
    found = {f"random.{machine.rank}.cpu": torch.default_generator}
    if machine.device.type == "cuda":
        found[f"random.{machine.rank}.cuda"] = torch.cuda.default_generators[machine.device.index]
    return found
