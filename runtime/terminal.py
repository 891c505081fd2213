"""What a run shows: lines before, while and after it trains, and on request a dashboard.

With `--log-to` a dashboard gets the numbers of steps and validations while the run goes on.
"""

import contextlib
import math
import shlex
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, stdev
from threading import Thread

from runtime.clock import Clock
from runtime.jsonl import Json
from runtime.machine import peak_flops, saying_every_few_seconds
from runtime.trainer import Trainer

SECONDS_BETWEEN_LINES = 5.0
SMOOTHED_OVER = 10  # steps; single batches differ by several nats


class Progress:
    """Prints a line about a run on rank 0: every five seconds at most, and after the last step."""

    def __init__(self, trainer: Trainer, header: Json) -> None:
        self.trainer, self.header, self.steps = trainer, header, trainer.config.steps
        self.loss = math.nan  # smoothed training loss, without those of skipped steps
        self.taken = self.skips = 0  # steps so far
        self._said_at = -math.inf

    def step(self, event: Json) -> None:
        """Take note of a step. This runs on the clock."""
        loss, skipped = event["train_loss"], event["skipped"]
        self.skips += skipped
        if math.isfinite(loss) and not skipped:
            self.taken += 1
            before = self.loss if self.taken > 1 else loss
            self.loss = before + (loss - before) / min(self.taken, SMOOTHED_OVER)
        due = time.monotonic() - self._said_at >= SECONDS_BETWEEN_LINES
        if due or event["step"] == self.steps:
            self._said_at = time.monotonic()
            self.trainer.machine.say(" | ".join(self.numbers(event)))

    def validated(self) -> None:
        """Take note of a validation. It was printed, so the next line of a step waits."""
        self._said_at = time.monotonic()

    def pause(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Print now and then which untimed phase is running."""
        return saying_every_few_seconds(f"off the clock: {name}", self.trainer.machine.say)

    def numbers(self, event: Json) -> list[str]:
        """A step in words."""
        step, rate = event["step"], tokens_per_s(event)
        found = [
            f"step {step}/{self.steps} {step / self.steps:4.0%}", f"train loss {self.loss:.4f}",
            f"grad {event['grad_norm']:.3g}", f"lr x{event['lr_mul']:.3f}",
            f"window {event['window']}", f"{rate:,.0f} tok/s",
        ]  # fmt: skip
        peak = peak_flops(self.trainer.machine, self.trainer.model.dtype)
        if peak is not None:  # model FLOPs utilization
            found.append(f"MFU {rate * self.trainer.model.flops_per_token() / peak:.1%}")
        found.append(f"{event['train_time_ms'] / 1000:,.1f} s")
        if self.skips:
            found.append(f"{self.skips} skipped")
        return [*found, f"{timedelta(seconds=round(self.seconds_left(event)))} left"]

    def seconds_left(self, event: Json) -> float:
        """Seconds of the steps and validations after this step.

        A validation is a forward pass only: a third of the work of training on as many tokens.
        """
        validations = sum(step >= event["step"] for step in self.trainer.validations)
        tokens = self.header["train_tokens"] - event["tokens"]
        tokens += validations * self.header["data"]["val_tokens"] / 3
        return tokens / tokens_per_s(event)


def tokens_per_s(event: Json) -> float:
    """Mean since the first step, on the clock."""
    return 1000 * event["tokens"] / event["train_time_ms"]


# ---- Before the first run and after the last


def summary(trainer: Trainer) -> str:
    """Lines for people: model, data and target; with `verbose` also every choice and its reason."""
    config, machine = trainer.config, trainer.machine
    batches = " then ".join(dict.fromkeys(f"{tokens:,}" for _, tokens, _ in trainer.changes))
    devices = trainer.env["gpu"] or trainer.env["cpu"]
    if machine.world_size > 1:
        devices = f"{machine.world_size} ranks, each on {devices}"
    lines = [
        f"track {config.track}, recipe {config.recipe}: a GPT of {trainer.env['params']:,} "
        f"parameters in {trainer.env['dtype']}, on {devices}",
        f"training: {config.steps:,} steps of {batches} tokens, from {config.data_dir}",
        f"target: a validation loss of {config.target} on {config.val_tokens:,} other tokens; "
        f"uniform guessing: {math.log(config.vocab_size):.2f}",
        "time: measured below, without training" if config.dry_run else
        "time: the first steps tell how many minutes are left; --dry-run measures them beforehand",
    ]  # fmt: skip
    if config.keep_model and not config.dry_run:
        kept = sum(each.nbytes for each in trainer.model.parameters()) * config.trials
        lines.append(f"disk: {kept / 1e6:,.0f} MB in {config.checkpoint_dir} for the trained "
                     f"model{'s' * (config.trials > 1)}; none with --keep-model off")
    if config.verbose:
        lines += [f"{name} {trainer.env[name]} ({why})" for name, why in trainer.chosen.items()]
        lines.append(trainer.guard.describe())
    if trainer.off_track:
        lines.append(f"off the track, no claim can be made: {'; '.join(trainer.off_track)}")
    return "\n".join(lines)


def closing(trainer: Trainer, clock: Clock, losses: dict[int, float]) -> str:
    """Lines for people after the last run, whose clock this is. losses: of all runs, by seed."""
    config, lines = trainer.config, []
    if len(losses) > 1:
        mean, sd = fmean(losses.values()), stdev(losses.values())
        seeds = f"seeds {min(losses)} to {max(losses)}"
        lines.append(f"  runs  {len(losses)}, {seeds}: mean loss {mean:.4f}, sd {sd:.4f}")
    untimed_s: dict[str, float] = {}
    for phase in clock.phases:
        if not phase.timed:
            untimed_s[phase.name] = untimed_s.get(phase.name, 0.0) + phase.ms / 1000
    timed_s = clock.train_time_ms / 1000
    others = ", ".join(f"{name} {seconds:.1f}" for name, seconds in untimed_s.items())
    all_s, of = timed_s + sum(untimed_s.values()), "of the last run: " if len(losses) > 1 else ""
    lines.append(f"  time  {of}{timed_s:.1f} s on the clock; {all_s:.1f} s in all, with {others}")
    logs = shlex.quote(config.log_dir)
    lines.append(f"  draw  {script('view.py')} {logs}")
    if config.trials > 1:
        lines.append(f"  next  {script('significance.py')} {logs} judges the runs")
    elif config.keep_model and config.checkpoint_dir == "checkpoints":  # where sample.py looks
        lines.append(f"  next  {script('sample.py')} samples from the model")
    return "\n".join(lines)


def script(name: str) -> str:
    return in_shell(sys.executable, Path(__file__).resolve().parents[1] / "scripts" / name)


def in_shell(*words: object) -> str:
    """A command with short paths. That of this Python works where no environment is active."""
    return shlex.join(str(word).removeprefix(f"{Path.cwd()}/") for word in words)


# ---- Dashboards

PROJECT = "speedrun"
SHOWN = ("train_loss", "val_loss", "grad_norm", "lr_mul", "window", "tokens", "step_ms")
# One function takes a step and its numbers, the other waits until everything is sent.
Opened = tuple[Callable[[int, dict[str, float]], object], Callable[[], object]]


def open_dashboard(name: str, folder: Path, run_id: str, config: Json, after_step: int) -> Opened:
    """A run in one of DASHBOARDS: see `trackio show`, and WANDB_MODE=offline for wandb.

    after_step: where the run resumes. What TensorBoard has of later steps is done again.
    """
    if name == "tensorboard":  # event files beside the logs: `tensorboard --logdir logs`
        from torch.utils.tensorboard import SummaryWriter

        again = {"purge_step": after_step + 1} if after_step else {}
        writer = SummaryWriter(str(folder / "tensorboard" / run_id), **again)

        def log(step: int, numbers: dict[str, float]) -> None:
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)

        return log, writer.close
    tracker = import_module(name)  # trackio has the functions of wandb
    start = partial(tracker.init, project=PROJECT, config=config, resume="allow")
    if name == "trackio":
        run = start(name=run_id, embed=False, auto_log_gpu=False, auto_log_cpu=False)
        return lambda step, numbers: run.log(numbers, step=step), tracker.finish
    # `wandb sync` sends what a dead network left on the disk.
    quiet = {"console": "off", "x_disable_stats": True, "finish_timeout": 60}
    run = start(id=run_id, dir=folder, settings=quiet)
    run.define_metric("*", step_metric="step")  # a resumed run may go back
    return lambda step, numbers: run.log(numbers | {"step": step}), tracker.finish


class Dashboard:
    """Sends events from a thread, so that no step waits. If that fails, the run continues."""

    def __init__(
        self, name: str, log: Path, config: Json, say: Callable[[str], None], after_step: int = 0
    ) -> None:
        self._events: SimpleQueue[Json | None] = SimpleQueue()
        about = (name, log, config, say, after_step)
        self._thread = Thread(target=self._send, args=about, daemon=True)
        self._thread.start()

    def show(self, event: Json) -> None:
        if self._thread.is_alive():
            self._events.put(event)

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()

    def _send(
        self, name: str, log: Path, config: Json, say: Callable[[str], None], after_step: int
    ) -> None:
        if name == "none":
            return
        try:
            run_id = log.name.split(".")[0]
            send, close = open_dashboard(name, log.parent, run_id, config, after_step)
            if name == "tensorboard":  # the others print how to see the run
                folder = log.parent / "tensorboard"
                shown = in_shell(sys.executable, "-m", "tensorboard.main", "--logdir", folder)
                say(f"TensorBoard's files are in {folder}; to see them: {shown}")
            for event in iter(self._events.get, None):
                numbers = {shown: float(event[shown]) for shown in SHOWN if shown in event}
                send(event["step"], numbers)
            close()
        except Exception as error:  # of any kind: services and networks have many
            say(f"warning: --log-to {name} stops here: {error}. The log has all numbers.")
