"""What a run shows while it trains: a line every few seconds, or on a terminal one live block.

The step loop only stores numbers here. rich draws the block in a thread of its own. `--log-to`: a
dashboard also gets the numbers of steps and validations during the run.
"""

import contextlib
import json
import math
import shlex
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, stdev
from threading import Thread
from typing import Any

from runtime.clock import Clock
from runtime.machine import saying_every_few_seconds

SECONDS_BETWEEN_LINES = 5.0
FRAMES_PER_SECOND = 2
SMOOTHED_OVER = 10  # steps; single batches differ by several nats
WIDTH = 28  # characters of the bar and of the sparkline, so that lines fit into 80
BLOCKS = "▁▂▃▄▅▆▇█"


class Lines:
    """Progress as lines of rank 0: one every five seconds at most, and one for the last step."""

    def __init__(self, trainer: Any, header: dict[str, Any]) -> None:
        self.trainer, self.header, self.steps = trainer, header, trainer.config.steps
        self.event: dict[str, Any] = {}  # of the last step
        self.losses: list[float] = []  # smoothed training losses, without those of skipped steps
        self.quick_losses: list[float] = []  # of quick validations; where they are, they are shown
        self.skips = 0
        self.validated_at, self.val_loss = -1, math.nan  # the last validation
        self.validation_s: float | None = None
        self._said_at = -math.inf

    def step(self, event: dict[str, Any]) -> None:
        """Take note of a step. This runs on the clock."""
        self.event, loss, skipped = event, event["train_loss"], event["skipped"]
        self.skips += skipped
        if math.isfinite(loss) and not skipped:
            before = self.losses[-1] if self.losses else loss
            self.losses.append(before + (loss - before) / min(len(self.losses) + 1, SMOOTHED_OVER))
        self.show()

    def validated(self, step: int, val_loss: float, quick: bool = False) -> None:
        """Take note of a validation. A quick one, which was printed, stands for the next line."""
        if quick:
            self.quick_losses.append(val_loss)
            self._said_at = time.monotonic()
        else:
            self.validated_at, self.val_loss = step, val_loss

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Show the untimed phase that is running."""
        began = time.monotonic()
        with self.waiting(name):
            yield
        if name == "validate":
            self.validation_s = time.monotonic() - began

    def waiting(self, name: str) -> contextlib.AbstractContextManager[None]:
        return saying_every_few_seconds(f"off the clock: {name}", self.trainer.machine.say)

    def show(self) -> None:
        now = time.monotonic()
        if now - self._said_at < SECONDS_BETWEEN_LINES and self.event["step"] < self.steps:
            return
        self._said_at = now
        step = self.event["step"]
        seconds = self.event["train_time_ms"] / 1000
        line = [f"step {step}/{self.steps} {step / self.steps:4.0%}"]
        line += [f"{self.shown} {self.loss:.4f}", *self.rates()]
        left = "ETA" if step < self.steps else "last validation, about"
        line += [f"{seconds:.1f} s", f"{left} {self.seconds_left():.0f} s"]
        self.trainer.machine.say(" | ".join(line))

    def close(self) -> None:
        """Stop drawing."""

    # ---- What is shown

    @property
    def curve(self) -> list[float]:
        """Losses to draw: of quick validations, else of training."""
        return self.quick_losses or self.losses

    @property
    def shown(self) -> str:
        return "quick val loss" if self.quick_losses else "train loss"

    @property
    def loss(self) -> float:
        return self.curve[-1] if self.curve else math.nan

    def rates(self) -> list[str]:
        used = self.trainer.mfu(tokens_per_s(self.event))
        mfu = [] if used is None else [f"MFU {used:.2f}"]
        return [
            f"grad {self.event['grad_norm']:.3g}", f"lr x{self.event['lr_mul']:.3f}",
            f"window {self.event['window']}",
            f"{tokens_per_s(self.event):,.0f} tok/s", *mfu,
        ]  # fmt: skip

    def seconds_left(self) -> float:
        """Seconds of the steps and validations that are left."""
        validations = self.trainer.validations
        first = max(self.event["step"], self.validated_at + 1)
        left = len(validations) - bisect_left(validations, first)
        each = self.validation_s
        if each is None:  # none yet: a forward pass alone is a third of the work
            each = self.header["data"]["val_tokens"] / (3 * tokens_per_s(self.event))
        tokens = self.header["train_tokens"] - self.event["tokens"]
        return tokens / tokens_per_s(self.event) + left * each


class Live(Lines):
    """Progress as three lines at the bottom of the terminal. What others print goes above them."""

    def __init__(self, trainer: Any, header: dict[str, Any], console: Any) -> None:
        from rich.live import Live as Block

        super().__init__(trainer, header)
        self.phase, self.phase_began = "", 0.0
        self._block = Block(
            console=console, get_renderable=self.draw, refresh_per_second=FRAMES_PER_SECOND,
            redirect_stderr=sys.stderr.isatty(),
        )  # fmt: skip
        with contextlib.suppress(OSError):
            self._block.start()

    def show(self) -> None:
        """Nothing: the thread draws."""

    @contextlib.contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        self.phase, self.phase_began = name, time.monotonic()
        yield
        self.phase = ""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a closed terminal must not end the run
            self._block.stop()

    def draw(self) -> Any:
        from rich.text import Text

        event, config = self.event, self.trainer.config
        text = Text(no_wrap=True, overflow="ellipsis")
        if not event:
            return text.append("the first step")
        filled = WIDTH * event["step"] // self.steps
        if config.trials > 1:
            text.append(f"run {self.header['trial'] + 1} of {config.trials}, ")
        text.append(f"step {event['step']:,} of {self.steps:,} ")
        text.append("━" * filled, "green").append("─" * (WIDTH - filled), "dim")
        text.append(f" {self.time_left()}\n")
        text.append(f"{self.shown} {self.loss:.3f} ", "bold").append(sparkline(self.curve), "cyan")
        validation = f"{self.val_loss:.4f}" if self.validated_at >= 0 else "not yet"
        text.append(f" | validation {validation} | target {config.target}\n")
        last = [*self.rates(), f"{event['train_time_ms'] / 1000:,.1f} s"]
        if self.skips:
            last.append(f"{self.skips} skipped")
        return text.append(" | ".join(last))

    def time_left(self) -> str:
        if self.phase:
            return f"off the clock: {self.phase}, {time.monotonic() - self.phase_began:.0f} s"
        if self.validated_at == self.steps:
            return "done"
        return f"{timedelta(seconds=round(self.seconds_left()))} left"


def tokens_per_s(event: dict[str, Any]) -> float:
    """Mean since the first step, on the clock."""
    return 1000 * event["tokens"] / event["train_time_ms"]


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Draw values as a row of at most `width` characters, from the least to the greatest."""
    count = min(len(values), width)
    if count == 0:
        return ""
    shown = [values[(index + 1) * len(values) // count - 1] for index in range(count)]
    least, spread = min(shown), max(shown) - min(shown) or 1.0
    heights = [round((value - least) / spread * (len(BLOCKS) - 1)) for value in shown]
    return "".join(BLOCKS[height] for height in heights)


def open_progress(trainer: Any, header: dict[str, Any]) -> Lines:
    """The live block where --progress, the terminal and the packages allow it, else lines."""
    wanted = trainer.config.progress != "lines" and trainer.machine.is_main
    if wanted and sys.stdout.isatty() and find_spec("rich"):
        from rich.console import Console

        console = Console(force_terminal=True)  # it heeds NO_COLOR
        if not (console.is_dumb_terminal or console.options.ascii_only):
            return Live(trainer, header, console)
    return Lines(trainer, header)


# ---- Before the first run and after the last


def summary(trainer: Any) -> str:
    """Lines for people: model, data and target; with `verbose` also every choice and its reason."""
    config, machine = trainer.config, trainer.machine
    train, plan = trainer.data.train, trainer.data.train.plan
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
    ]
    if config.verbose:
        micro_steps, micro_rows = train.shares(config.steps)
        lines += [f"{name} {trainer.env[name]} ({why})" for name, why in trainer.chosen.items()]
        lines += [
            f"{plan.tokens_needed:,} of {plan.tokens_available:,} tokens; a step is "
            f"{machine.world_size} rank(s) x {micro_steps} micro-step(s) x "
            f"{micro_rows * config.seq_len:,} tokens at the end",
            trainer.guard.describe(),
        ]
    if trainer.off_track:
        lines.append(f"off the track, no claim can be made: {'; '.join(trainer.off_track)}")
    return "\n".join(lines)


def closing(trainer: Any, clock: Clock, source: Path, losses: dict[int, float]) -> str:
    """Lines for people after the last run, whose clock this is. losses: of all runs, by seed.

    source: where scripts/ is.
    """
    config = trainer.config
    runs = ""
    if len(losses) > 1:
        mean, sd = fmean(losses.values()), stdev(losses.values())
        seeds = f"seeds {min(losses)} to {max(losses)}"
        runs = f"  runs  {len(losses)}, {seeds}: mean loss {mean:.4f}, sd {sd:.4f}\n"
    timed_s = clock.train_time_ms / 1000
    untimed_s: dict[str, float] = {}
    for phase in clock.phases:
        if not phase.timed:
            untimed_s[phase.name] = untimed_s.get(phase.name, 0.0) + phase.ms / 1000
    others = ", ".join(f"{name} {seconds:.1f}" for name, seconds in untimed_s.items())
    following = "--trials 10 trains ten seeds"
    if config.trials > 1:
        following = f"{script(source, 'significance.py')} {config.log_dir} judges the runs"
    elif config.keep_model and config.checkpoint_dir == "checkpoints":  # where sample.py looks
        following = f"{script(source, 'sample.py')} lets the model write"
    return runs + (
        f"  time  {timed_s:.1f} s on the clock; {timed_s + sum(untimed_s.values()):.1f} s in all, "
        f"with {others}\n"
        f"  draw  {script(source, 'view.py')} {config.log_dir}\n"
        f"  next  {following}"
    )


def script(source: Path, name: str) -> str:
    """The words that start a script with this Python, also where no environment is active."""
    here = Path.cwd()
    words = []
    for path in (Path(sys.executable), source / "scripts" / name):
        words.append(str(path.relative_to(here) if path.is_relative_to(here) else path))
    return shlex.join(words)


# ---- Dashboards

PROJECT = "speedrun"
SHOWN = {  # events and their numbers
    "step": (
        "train_loss", "grad_norm", "lr_mul", "window", "tokens", "step_ms", "mfu", "peak_mib",
    ),
    "val": ("val_loss",),
}  # fmt: skip
# One function takes a step and its numbers, the other waits until everything is sent.
Opened = tuple[Callable[[int, dict[str, float]], object], Callable[[], object]]


def open_dashboard(name: str, folder: Path, run_id: str, config: dict[str, Any]) -> Opened:
    """A run in one of DASHBOARDS: see `trackio show`, and WANDB_MODE=offline for wandb."""
    if name == "tensorboard":  # event files beside the logs: `tensorboard --logdir logs`
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard" / run_id))
        writer.add_text("config", json.dumps(config))

        def log(step: int, numbers: dict[str, float]) -> None:
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)

        return log, writer.close
    facts: dict[str, Any] = {"project": PROJECT, "config": config, "resume": "allow"}
    if name == "trackio":
        import trackio

        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        run = trackio.init(name=run_id, **quiet, **facts)
        return lambda step, numbers: run.log(numbers, step=step), run.finish
    import wandb

    # No threads but the sender's. `wandb sync` sends what a dead network left on the disk.
    settings = wandb.Settings(console="off", x_disable_stats=True, finish_timeout=60)
    run = wandb.init(id=run_id, dir=folder, settings=settings, **facts)
    run.define_metric("*", step_metric="step")  # a resumed run may go back

    def close() -> None:
        run.finish()
        wandb.teardown()  # waits for the files: one of several ranks ends without atexit

    return lambda step, numbers: run.log(numbers | {"step": step}), close


class Dashboard:
    """Sends events from a thread, so that no step waits. If that fails, the run continues."""

    def __init__(
        self, name: str, log: Path, config: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self._events: SimpleQueue[tuple[int, dict[str, float]] | None] = SimpleQueue()
        self._thread = Thread(target=self._send, args=(name, log, config, say), daemon=True)
        self._thread.start()

    def show(self, event: str, fields: dict[str, Any]) -> None:
        known = {name: float(fields[name]) for name in SHOWN[event] if fields[name] is not None}
        self._events.put((fields["step"], known))

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()

    def _send(self, name: str, log: Path, config: dict, say: Callable[[str], None]) -> None:
        if name == "none":
            return
        try:
            send, close = open_dashboard(name, log.parent, log.name.split(".")[0], config)
            while (event := self._events.get()) is not None:
                send(*event)
            close()
        except Exception as error:  # of any kind: services and networks have many
            say(f"warning: --log-to {name} stops here: {error}. The log has all numbers.")
