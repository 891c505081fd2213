"""`--log-to`: a dashboard gets the numbers of steps and validations during the run.

Each function below opens a run in a dashboard. It returns two functions: one takes a step and its
numbers, the other waits until everything is sent.
"""

import json
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

PROJECT = "speedrun"
SHOWN = {  # events and their numbers
    "step": ("train_loss", "lr_mul", "window", "tokens", "step_ms"), "val": ("val_loss",),
}  # fmt: skip
Opened = tuple[Callable[[int, dict[str, float]], object], Callable[[], object]]


def open_tensorboard(folder: Path, run_id: str, config: dict[str, Any]) -> Opened:
    """Event files in `tensorboard/RUN_ID` beside the logs: `tensorboard --logdir logs`."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard" / run_id))
    writer.add_text("config", json.dumps(config))

    def log(step: int, numbers: dict[str, float]) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)

    return log, writer.close


def open_tracker(name: str, folder: Path, run_id: str, config: dict[str, Any]) -> Opened:
    """A run of trackio (`trackio show`) or of wandb, with WANDB_MODE=offline beside the logs."""
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


def open_dashboard(name: str, *run: Any) -> Opened:
    return open_tensorboard(*run) if name == "tensorboard" else open_tracker(name, *run)


class Dashboard:
    """Sends events from a thread, so that no step waits. If that fails, the run continues."""

    def __init__(
        self, name: str, log: Path, config: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self._events: SimpleQueue[tuple[int, dict[str, float]] | None] = SimpleQueue()
        self._thread = Thread(target=self._send, args=(name, log, config, say), daemon=True)
        self._thread.start()

    def show(self, event: str, fields: dict[str, Any]) -> None:
        self._events.put((fields["step"], {name: float(fields[name]) for name in SHOWN[event]}))

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
