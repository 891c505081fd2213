"""`--log-to`: a dashboard shows the numbers of a run's log. They are sent while the clock stands.

An adapter takes the folder of the logs, the run's id and its configuration. `log(step, numbers)`
must be quick. `close()` waits until everything is sent.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROJECT = "speedrun"
SHOWN = {"step": ("train_loss", "lr_mul", "window", "tokens", "step_ms"), "val": ("val_loss",)}


class TensorBoard:
    """Event files in `tensorboard/RUN_ID` beside the logs: `tensorboard --logdir logs`."""

    def __init__(self, folder: Path, run_id: str, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard" / run_id))
        self._writer.add_text("config", json.dumps(config))

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """The local database of trackio: `trackio show`."""

    def __init__(self, folder: Path, run_id: str, config: dict[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            PROJECT, name=run_id, config=config, resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


class Wandb:
    """A run of Weights & Biases, with `WANDB_MODE=offline` in `wandb/` beside the logs."""

    def __init__(self, folder: Path, run_id: str, config: dict[str, Any]) -> None:
        import wandb

        # No threads but the sender's. What a dead network left on the disk `wandb sync` sends.
        settings = wandb.Settings(console="off", x_disable_stats=True, finish_timeout=60)
        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=PROJECT, id=run_id, config=config, resume="allow", dir=folder, settings=settings
        )
        self._run.define_metric("*", step_metric="step")  # a resumed run may go back

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers | {"step": step})

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # waits for the files; one of several ranks ends without atexit


ADAPTERS: dict[str, Callable[..., Any]] = {
    "tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb,
}  # fmt: skip


class Dashboard:
    """Follows one segment of a log. A dashboard that fails is left alone; the run goes on."""

    def __init__(self, name: str, log: Path, header: dict[str, Any], say: Callable) -> None:
        self._name, self._log, self._header, self._say = name, log, header, say
        self._adapter: Any = None
        self._offset = 0

    def follow(self, last: bool = False) -> None:
        """Send what the log got since the last call. Not on the clock."""
        if self._name not in ADAPTERS:
            return
        try:
            if self._adapter is None:
                run_id = self._log.name.split(".")[0]
                config = self._header["config"]
                self._adapter = ADAPTERS[self._name](self._log.parent, run_id, config)
            for event in self._new_events():
                numbers = {name: float(event[name]) for name in SHOWN[event["event"]]}
                self._adapter.log(event["step"], numbers)
            if last:
                self._adapter.close()
        except Exception as error:  # of any kind: services and networks have many
            self._say(f"warning: --log-to {self._name} stops here: {error}. The log has it all.")
            self._name = "none"

    def _new_events(self) -> Iterator[dict[str, Any]]:
        with self._log.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                self._offset += len(line)
                event = json.loads(line)
                if event["event"] in SHOWN:
                    yield event
