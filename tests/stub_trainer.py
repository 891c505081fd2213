"""A trainer of eight numbers, for the loop of train_gpt.py: all that runs ask of one, no model."""

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from small_model import configure

import train_gpt
from data.loader import Position
from optim import Held, Skip
from runtime import run as runs
from runtime.machine import Machine
from runtime.source import source_hash

STEPS = 10
SETTINGS = {
    "steps": STEPS, "val_every": 5, "target": 1.0, "seq_len": 2, "batch_tokens": 4,
    "micro_batch": 4, "vocab_size": 50257, "bos": 50256, "device": "cpu", "sample_tokens": 0,
    "adam_lr": 0.1, "adam_accum_steps": 1,
}  # fmt: skip
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guard:
    """Skips steps whose loss is infinite; a NaN passes."""

    def __init__(self, trainer: "StubTrainer") -> None:
        self.trainer = trainer

    def step(self, loss: torch.Tensor, only: object) -> torch.Tensor:
        return self.trainer.update(loss)

    def explain(self, verdict: torch.Tensor) -> Skip | None:
        return Skip("nonfinite", math.inf, "weights") if verdict[0].item() else None

    def gradient_norms(self, verdict: torch.Tensor) -> list[float]:
        return verdict[1:2].tolist()

    def held(self, verdict: torch.Tensor) -> Held | None:
        return Held(3, "weights") if verdict[2].item() else None


class Batches(SimpleNamespace):
    """A loader of steps with one micro-batch, of nothing."""

    def __next__(self) -> list:
        return [None]


Hook = Callable[["StubTrainer", int], object]


@dataclass
class StubTrainer:
    """Descends towards 1 with noise from torch's generator. `at[step]` is called in that step."""

    config: train_gpt.Config
    source: Path
    at: dict[int | str, Hook] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.claim, self.checks, self.off_track = None, {}, []
        self.source_sha256 = source_hash(self.source)
        self.validations = [*range(0, self.config.steps, 5), self.config.steps]
        self.machine = Machine(torch.device("cpu"))
        self.model = SimpleNamespace(dtype=torch.float32, flops_per_token=lambda: 1)
        sgd = SimpleNamespace(zero_grad=lambda set_to_none: self.weights.grad.zero_())
        self.guard, self.optimizers = Guard(self), {"sgd": sgd}
        place = {"shard": "shard_0", "token_offset": 16}
        train = Batches(places=defaultdict(lambda: place), shares=lambda step: (1, 4),
                        end=Position(step=4, shard=0, offset=32))
        self.data, self.hashes = SimpleNamespace(train=train), {"train_sha256": "t"}
        self.train_tokens = 4 * self.config.steps
        self.env = {"gpu_count": 0, "torch": torch.__version__}
        self.reset(0)

    def reset(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.weights = torch.full((8,), float(seed), requires_grad=True)
        self.momentum = torch.zeros(8)
        self.position = 0
        self.spoil = 0.0  # added to the next loss
        self.hold = False  # the next step leaves matrices as they were

    def model_state(self) -> dict:
        return {"weights": self.weights.detach().clone()}

    def state_dict(self) -> dict:
        return {
            "model": self.model_state(),
            "optim": {"weights.momentum": self.momentum.clone()},
            "data": {"position": self.position},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        self.weights.copy_(state["model"]["weights"])
        self.momentum.copy_(state["optim"]["weights.momentum"])
        self.position = state["data"]["position"]

    def set_step(self, step: int) -> None:
        assert step == self.position, "the data go on where the steps do"
        self.position += 1

    def losses(self, batch: object) -> tuple[torch.Tensor, torch.Tensor]:
        apart, noise = self.weights - 1, torch.randn(8)
        loss = apart.detach().square().mean() + self.spoil
        self.spoil = 0.0
        train_loss = (apart.square() / 2 + 0.1 * noise * self.weights).sum()
        return train_loss, loss * schedule(self.config, self.position - 1).batch_tokens

    def stepping(self, step: int) -> list:
        return list(self.optimizers.values())

    @torch.no_grad()
    def update(self, loss: torch.Tensor) -> torch.Tensor:
        gradient = self.gradient = self.weights.grad.clone()
        if loss != math.inf:
            self.momentum.mul_(0.9).add_(gradient)
            self.weights -= self.config.adam_lr * self.momentum
        hold, self.hold = self.hold, False
        return torch.stack([loss == math.inf, gradient.norm(), torch.tensor(hold)]).double()

    @torch.no_grad()
    def validate(self, step: int, batches: object = None) -> float:
        self.act(f"validate {step}", step)
        return (self.weights - 1).square().mean().item()

    def act(self, key: int | str, step: int) -> None:
        if key in self.at:
            self.at.pop(key)(self, step)

    def score(self) -> dict:
        return {"loss_on_copied": 1.5, "loss_on_new": 3.5, "loss_held_out": 3.25}

    def schedule(self, config: train_gpt.Config, step: int) -> train_gpt.StepPlan:
        """What holds at a step. The loop asks before anything else that it does in the step."""
        self.act(step + 1, step)
        return schedule(config, step)

    def train(self, trainer: "StubTrainer", run: runs.Run) -> float:
        self.run = run
        return train(trainer, run)


train, schedule = train_gpt.train, train_gpt.schedule


def make_runs(trainer: StubTrainer) -> int:
    """All runs that are left to make, by train_gpt.make_runs; returns the exit code."""
    with mock.patch.multiple(
        train_gpt, set_up=lambda config, machine: trainer, warm_up=lambda *_: None,
        schedule=trainer.schedule, tokens_before=lambda config, step: 4 * step, train=trainer.train,
        check_trained_model=lambda trainer, val_loss: {}, SOURCE=trainer.source,
        summary=lambda trainer: "",
    ):  # fmt: skip
        return train_gpt.make_runs(trainer.config)


def trainer_in(
    folder: Path, at: dict[int | str, Hook] | None = None, text: str = "# eight numbers\n",
    **changed: object,
) -> StubTrainer:
    """A trainer whose source of this text, logs and checkpoints are in this folder."""
    source = folder / "source"
    source.mkdir(parents=True, exist_ok=True)
    (source / "train_gpt.py").write_text(text)
    folders = {"log_dir": str(folder), "checkpoint_dir": str(folder / "checkpoints")}
    config = configure("tiny", "adamw", **SETTINGS | folders | changed)
    return StubTrainer(config, source, dict(at or {}))


def run(folder: Path, at: dict[int | str, Hook] | None = None, **changed: object) -> int:
    """Make the runs in a folder; returns the exit code, with all signal handlers as before."""
    with restored_settings():
        return make_runs(trainer_in(folder, at, **changed))


@contextlib.contextmanager
def restored_settings() -> Iterator[None]:
    """What a run sets for the whole process, put back."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def send(run: runs.Run, *numbers: int) -> None:
    """This process gets the signals. They have been heard on return; SIGKILL waits for the disk."""
    if signal.SIGKILL in numbers:
        run.writer.wait()
    for number in numbers:
        os.kill(os.getpid(), number)
    time.sleep(0.05)


@contextlib.contextmanager
def signal_after(step: int | None, number: int) -> Iterator[None]:
    """A run of any trainer in this process gets the signal when it has done this step."""
    stepped = runs.Run.stepped

    def acting(run: runs.Run, *given: object, **named: object) -> None:
        stepped(run, *given, **named)
        if run.steps_done == step:
            send(run, number)

    with mock.patch.object(runs.Run, "stepped", acting):
        yield


def signalled(*numbers: int) -> Hook:
    """A hook: this process gets the signals."""
    return lambda trainer, step: send(trainer.run, *numbers)


def wait_for_writer(trainer: StubTrainer, step: int) -> None:
    """A hook: wait until the last checkpoint is on the disk."""
    trainer.run.writer.wait()


def kill(folder: Path, moment: int | str, **changed: object) -> None:
    """A run that SIGKILL ends at this step, in a process of its own."""
    at = {moment: signalled(signal.SIGKILL)}
    assert in_child(lambda: run(folder, at, **changed)) == -signal.SIGKILL


def in_child(function: Callable[[], int]) -> int:
    """The exit code of a forked process that calls it; minus the signal that ended it."""
    child = get_context("fork").Process(target=lambda: sys.exit(function()))
    child.start()
    child.join()
    return child.exitcode


# ---- Reading what a run left


def logs_of(folder: Path) -> list[Path]:
    """The segments of all runs, each run's in order."""
    found = [path for path in folder.glob("*.jsonl") if path.name != "registry.jsonl"]
    return sorted(found, key=lambda path: (path.name.split(".")[0], len(path.name), path.name))


def read_events(*paths: Path, kind: str | None = None) -> list[dict]:
    events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [event for event in events if kind in (None, event["event"])]


def losses_of(*segments: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Training and validation losses by step: a later segment supersedes steps after its start."""
    trained: dict[int, float] = {}
    validated: dict[int, float] = {}
    for path in segments:
        after = read_events(path)[0].get("after_step", 0)
        trained = {step: loss for step, loss in trained.items() if step <= after}
        validated = {step: loss for step, loss in validated.items() if step < after}
        for event in read_events(path, kind="step"):
            assert event["step"] == len(trained) + 1, "steps in order"
            trained[event["step"]] = event["train_loss"]
        validated |= {each["step"]: each["val_loss"] for each in read_events(path, kind="val")}
    return trained, validated
