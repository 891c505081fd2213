"""A trainer of eight numbers, for the loop of train_gpt.py: all that runs ask of one, no model."""

import json
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch

import train_gpt
from runtime.log import config_hash, require_folders, source_hash
from runtime.machine import Machine
from runtime.run import Run
from runtime.settings import RunSettings, setting

STEPS = 10
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Config(RunSettings):
    track: str = setting("tiny", "track")
    target: float = setting(1.0, "target")
    steps: int = setting(STEPS, "steps")
    minutes: float = setting(0.0, "instead of steps")
    lr: float = setting(0.1, "learning rate")
    recipe: str = setting("descent", "recipe")
    device: str = setting("cpu", "device")
    vocab_size: int = setting(50257, "tokens")
    seq_len: int = setting(1, "tokens of a row")


class Skip(NamedTuple):
    guard: str
    value: float
    tensor: str | None


class Guard:
    """Skips steps whose loss is infinite; a NaN passes."""

    def explain(self, verdict: torch.Tensor) -> Skip | None:
        return Skip("nonfinite", math.inf, "weights") if verdict[0].item() else None

    def gradient_norms(self, verdict: torch.Tensor) -> list[float]:
        return verdict[1:].tolist()


Hook = Callable[["StubTrainer", int], object]


@dataclass
class StubTrainer:
    """Descends towards 1 with noise from torch's generator. `at[step]` is called in that step."""

    config: Config
    source: Path
    at: dict[int | str, Hook] = field(default_factory=dict)
    save_every: int = 1  # steps after which no gradients are pending

    def __post_init__(self) -> None:
        self.off_track: list[str] = []
        self.validations = [*range(0, self.config.steps, 5), self.config.steps]
        self.machine = Machine(torch.device("cpu"))
        self.guard, self.optimizers = Guard(), {"sgd": None}
        place = {"shard": "shard_0", "token_offset": 16}
        self.data = SimpleNamespace(train=SimpleNamespace(where=lambda step: place))
        self.reset(0)

    def reset(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.weights, self.momentum = torch.full((8,), float(seed)), torch.zeros(8)
        self.position = 0
        self.spoil = 0.0  # added to the next loss

    def header(self, seed: int, trial: int) -> dict:
        config = asdict(self.config)
        return {
            "track": self.config.track, "target": self.config.target, "seed": seed, "trial": trial,
            "claim": None, "config": config, "config_sha256": config_hash(config),
            "source_sha256": source_hash(self.source), "world_size": 1, "micro_batch": 4,
            "grad_accum": 1, "checks": {},
            "data": {"train_sha256": "t", "val_sha256": "v", "val_tokens": 4},
            "train_tokens": 4 * self.config.steps,
            "env": {"gpu_count": 0, "torch": torch.__version__},
        }  # fmt: skip

    def state_dict(self) -> dict:
        return {
            "model": {"weights": self.weights.clone()},
            "optim": {"weights.momentum": self.momentum.clone()},
            "data": {"position": self.position},
        }

    def load_state_dict(self, state: dict) -> None:
        self.weights.copy_(state["model"]["weights"])
        self.momentum.copy_(state["optim"]["weights.momentum"])
        self.position = state["data"]["position"]

    def mfu(self, tokens_per_s: float) -> float:
        return 0.5

    def gradients(self, step: int, flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert step == self.position, "the data go on where the steps do"
        self.position += 1
        noise = torch.randn(8)
        self.gradient = self.weights - 1 + 0.1 * noise
        loss = (self.weights - 1).square().mean() + self.spoil
        self.spoil = 0.0
        return loss, flags

    def update(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        if loss != math.inf:
            self.momentum.mul_(0.9).add_(self.gradient)
            self.weights -= self.config.lr * self.momentum
        return torch.stack([(loss == math.inf).double(), self.gradient.norm().double()])

    def validate(self, step: int) -> float:
        self.act(f"validate {step}", step)
        return (self.weights - 1).square().mean().item()

    def act(self, key: int | str, step: int) -> None:
        if key in self.at:
            self.at.pop(key)(self, step)

    def copied_and_new(self) -> dict:
        return {"copy_loss": 1.5, "new_loss": 3.5}

    def schedule(self, config: Config, step: int) -> SimpleNamespace:
        """What holds at a step. The loop asks before anything else that it does in the step."""
        self.act(step + 1, step)
        return SimpleNamespace(
            unties=False, validates=step % 5 == 0, quick_validates=False, batch_tokens=4, lr=1.0,
            windows={"long": 8}, stage_index=0, adam_steps=(step + 1) % self.save_every == 0,
        )  # fmt: skip

    def train(self, trainer: "StubTrainer", run: Run) -> float:
        self.run = run
        return train(trainer, run)


train = train_gpt.train


def make_runs(trainer: StubTrainer) -> int:
    """All runs that are left to make, by train_gpt.make_runs; returns the exit code."""

    def set_up(config: Config, machine: Machine) -> StubTrainer:
        require_folders(config)
        return trainer

    with mock.patch.multiple(
        train_gpt, missing_data=lambda settings: "", set_up=set_up, warm_up=lambda *_: None,
        at=trainer.schedule, tokens_before=lambda config, step: 4 * step, train=trainer.train,
        check_trained_model=lambda trainer: {}, SOURCE=trainer.source, summary=lambda trainer: "",
    ):  # fmt: skip
        return train_gpt.make_runs(trainer.config)


def trainer_in(
    folder: Path, at: dict[int | str, Hook] | None = None, **changed: object
) -> StubTrainer:
    """A trainer whose source, logs and checkpoints are in this folder."""
    source = folder / "source"
    source.mkdir(parents=True, exist_ok=True)
    (source / "train_gpt.py").write_text("# eight numbers\n")
    settings = {"log_dir": str(folder), "checkpoint_dir": str(folder / "checkpoints")}
    every = {"save_every": changed.pop("save_every", 1)}
    return StubTrainer(Config(**settings | changed), source, dict(at or {}), **every)


def run(folder: Path, at: dict[int | str, Hook] | None = None, **changed: object) -> int:
    """Make the runs in a folder; returns the exit code, with all signal handlers as before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        return make_runs(trainer_in(folder, at, **changed))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signalled(*numbers: int) -> Hook:
    """A hook: this process gets the signals, and the hook returns when they have been heard."""

    def act(trainer: StubTrainer, step: int) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
        time.sleep(0.05)

    return act


def wait_for_writer(trainer: StubTrainer, step: int) -> None:
    """A hook: wait until the last checkpoint is on the disk."""
    if trainer.run._writing is not None:
        trainer.run._writing.result()


def kill(folder: Path, moment: int | str, **changed: object) -> None:
    """A run that SIGKILL ends at this step, in a process of its own, once what it saved is there.
    """

    def die(trainer: StubTrainer, step: int) -> None:
        wait_for_writer(trainer, step)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: run(folder, {moment: die}, **changed)) == -signal.SIGKILL


def in_child(function: Callable[[], int]) -> int:
    """The exit code of a forked process that calls it; minus the signal that ended it."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- Reading what a run left


def logs_of(folder: Path) -> list[Path]:
    """The segments of all runs, each run's in order."""
    found = [path for path in folder.glob("*.jsonl") if path.name != "registry.jsonl"]
    found = [path for path in found if path.stat().st_size]  # else killed before the first line
    return sorted(found, key=lambda path: (path.name.split(".")[0], len(path.name), path.name))


def read_events(*paths: Path, kind: str | None = None) -> list[dict]:
    events = []
    for path in paths:
        lines = [line for line in path.read_bytes().split(b"\n") if line.endswith(b"}")]
        events += [json.loads(line) for line in lines]
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
