"""Runs of the real trainer, small enough for a test, and faults injected into their steps.

There is one trainer, train_gpt.py's own, and two sizes of a run of it. Both need the fixture
`two_layers`, and return what a user would see: exit code, output and logs.

    run(data, logs, **flags)     12 steps of 512 tokens, 0.5 s: it learns. For what training does
    brief(data, logs, **flags)   10 steps of 16 tokens, 0.2 s. For logs, checkpoints, signals, ends

Both also accept hooks, by the step after which (or the validation before which) each is called:

    brief(data, logs, {4: signalled(signal.SIGTERM), "validate 10": wait_for_writer})

A hook gets the run, and through it the trainer. `kill` makes the run in a process of its own.
"""

import contextlib
import gc
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import optim.muon
import train_gpt
from data.shards import write_shard
from runtime.run import Run

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, BOS = 64, 63
ROWS, SEQUENCE = 4, 128
STEPS = 12
# How far another order of its sums may move a loss of 12 steps. float32: a sum over 512 targets
# moves by sqrt(512) 2^-24 of itself, rounded up to 2^-19; measured with float32 products, 2e-7.
# bf16: a rounding moves a weight by 2^-9 of itself, and a loss of first order in it by as much; two
# runs differ by two.
ROUNDING = {"float32": 2**-19, "bfloat16": 2**-8}
TIED = train_gpt.Stage(0.5, short=1, long=2, tied=True, mtp_weights=((0.5, 0.25),))
ONE_TARGET = train_gpt.Stage(0.5, short=1, long=2, tied=True)
UNTIED = train_gpt.Stage(0.5, short=1, long=2)
GROWING = [
    train_gpt.Stage(0.7, short=10, long=20, document=96, batch=0.5),
    train_gpt.Stage(0.3, short=10, long=20, document=192),
]
# Two layers with all that layers can have, and two of the plain GPT.
RICH = [
    train_gpt.Layer(value_embed=0),
    train_gpt.Layer(window="long", value_embed=1, skip_from=0, backout=True),
]
PLAIN = [train_gpt.Layer(), train_gpt.Layer(window="long")]
SIZES = {
    "vocab-size": VOCABULARY, "bos": BOS, "dim": 32, "head-dim": 16, "seq-len": SEQUENCE,
    "max-document": 64,
    "batch-tokens": ROWS * SEQUENCE, "micro-batch": ROWS * SEQUENCE, "val-tokens": 1024,
    "val-seq-len": 256,
    "val-batch": 512, "val-every": 5, "steps": STEPS, "stages": "record42", "window-block": 16,
    "momentum-warmup": 5, "momentum-cooldown": 3, "compile": "off",
    "dtype": "float32", "device": "cpu", "target": 1.0,
    "val-sha256": "", "sample-tokens": 0,
}  # fmt: skip
BRIEF_STEPS = 10
BRIEF = {
    "recipe": "muon", "steps": BRIEF_STEPS, "dim": 16, "head_dim": 8, "seq_len": 8,
    "max_document": 8, "batch_tokens": 16, "micro_batch": 16, "val_tokens": 32, "val_seq_len": 16,
    "val_batch": 32, "window_block": 4, "adam_accum_steps": 1, "keep_model": "off",
}  # fmt: skip
Hook = Callable[[Run], object]
Hooks = Mapping[int | str, Hook]  # by the step that is done, or "validate 10"


@contextlib.contextmanager
def quick_collection() -> Iterator[None]:
    """A run collects all garbage first, which takes long in a process that imported all this."""
    collect = gc.collect
    with mock.patch.object(gc, "collect", lambda generation=0: collect(generation)):
        yield


@contextlib.contextmanager
def two_layers() -> Iterator[None]:
    """Two layers for the recipes of `tiny`; stages whose batch grows, or whose head is tied.

    Muon's products are in float32, also where bf16 is native: these runs are not about rounding.
    """
    layers = mock.patch.dict(train_gpt.LAYERS, small89=RICH, plain8=PLAIN)
    depth = mock.patch.dict(train_gpt.FIXED_DEPTH, tiny=2)
    tables = {"growing": GROWING, "tied": [TIED, UNTIED], "one_target": [ONE_TARGET, UNTIED]}
    stages = mock.patch.dict(train_gpt.STAGES, tables)
    float32 = mock.patch.object(optim.muon, "native_dtype", return_value=torch.float32)
    with layers, depth, stages, float32:
        yield


@contextlib.contextmanager
def kept_state() -> Iterator[None]:
    """Before its last validation a run keeps all that it could resume from in last_state.pt."""
    evaluate = train_gpt.evaluate

    def keeping(trainer: train_gpt.Trainer, run: Run, step: int) -> float:
        if step == trainer.config.steps:
            state = trainer.state_dict()
            randoms = trainer.machine.gather(torch.get_rng_state())
            state["random"] = {str(rank): found for rank, found in enumerate(randoms)}
            if trainer.machine.is_main:
                folder = Path(trainer.config.checkpoint_dir)
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(state, folder / "last_state.pt")
        return evaluate(trainer, run, step)

    with mock.patch.object(train_gpt, "evaluate", keeping):
        yield


@contextlib.contextmanager
def restored_settings() -> Iterator[None]:
    """What a run sets for the whole process, put back."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        for number, handler in handlers.items():
            signal.signal(number, handler)


# ---- Data


def documents(seed: int, count: int) -> np.ndarray:
    """Documents that each count on by a stride of their own, one token in twenty being noise."""
    generator = np.random.default_rng(seed)
    parts = []
    for _ in range(count):
        length, first, stride = generator.integers([20, 0, 1], [100, BOS, 4])
        document = (first + stride * np.arange(length)) % BOS
        noisy = generator.random(length) < 0.05
        document[noisy] = generator.integers(0, BOS, noisy.sum())
        parts += [[BOS], document]
    return np.concatenate(parts)


def write_data(folder: Path, train_documents: int = 600) -> Path:
    """Two training shards and a validation shard."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "s_train_0.bin", documents(1, train_documents // 2))
    write_shard(folder / "s_train_1.bin", documents(2, train_documents - train_documents // 2))
    write_shard(folder / "s_val_0.bin", documents(3, 30))
    return folder


# ---- A run


def arguments(data: Path, logs: Path, **changed: object) -> list[str]:
    """The command line of a small run; `changed` holds flags, with _ for -."""
    folders = {"data-dir": data, "log-dir": logs, "checkpoint-dir": Path(logs) / "checkpoints"}
    recipe = changed.get("recipe")
    optimizer = changed.get("optimizer", "adamw" if recipe == "adamw" else "normuon")
    idle = {name.replace("_", "-") for name in train_gpt.idle(str(optimizer))}
    sizes = {name: value for name, value in SIZES.items() if name not in idle}
    flags = sizes | folders | {k.replace("_", "-"): v for k, v in changed.items()}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@dataclass
class Outcome:
    """What a run left behind."""

    code: int
    out: str
    err: str
    logs: list[Path]  # segments that it began

    def events(self, kind: str, log: int = 0) -> list[dict]:
        return read_events(self.logs[log], kind=kind)

    def losses(self, log: int = 0) -> list[float]:
        """Training losses of all steps, then the validation losses."""
        trained = [event["train_loss"] for event in self.events("step", log)]
        return trained + [event["val_loss"] for event in self.events("val", log)]


def run(data: Path, logs: Path, at: Hooks | None = None, **changed: object) -> Outcome:
    """`train_gpt.main` in this process; what it raises counts as code 1."""
    with acting(at or {}):
        return run_words(arguments(data, logs, **changed), logs)


def brief(data: Path, logs: Path, at: Hooks | None = None, **changed: object) -> Outcome:
    """A run that is too short to learn."""
    return run(data, logs, at, **BRIEF | changed)


def run_words(words: list[str], logs: Path) -> Outcome:
    before = set(logs_of(logs))
    out, err = io.StringIO(), io.StringIO()
    sizes_are_free = mock.patch.dict(train_gpt.FIXED, tiny=())
    with restored_settings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with sizes_are_free:
                code = train_gpt.main(words)
        except Exception as error:
            code = 1
            print(f"Traceback: {type(error).__name__}: {error}", file=err)
    new = [log for log in logs_of(logs) if log not in before]
    return Outcome(code, out.getvalue(), err.getvalue(), new)


# ---- Faults


@contextlib.contextmanager
def acting(at: Hooks) -> Iterator[None]:
    """Runs in this process call these hooks."""
    stepped, evaluate = Run.stepped, train_gpt.evaluate

    def act(moment: int | str, run: Run) -> None:
        if moment in at:
            at[moment](run)

    def after_step(run: Run, *given: object, **named: object) -> None:
        stepped(run, *given, **named)
        act(run.steps_done, run)

    def before_validation(trainer: train_gpt.Trainer, run: Run, step: int) -> float:
        act(f"validate {step}", run)
        return evaluate(trainer, run, step)

    with (
        mock.patch.object(Run, "stepped", after_step),
        mock.patch.object(train_gpt, "evaluate", before_validation),
    ):
        yield


def signalled(*numbers: int) -> Hook:
    """A hook: this process gets the signals; SIGKILL only when checkpoints are on the disk."""

    def send(run: Run) -> None:
        if signal.SIGKILL in numbers:
            run.writer.wait()
        for number in numbers:
            os.kill(os.getpid(), number)
        time.sleep(0.05)  # until they have been heard

    return send


def wait_for_writer(run: Run) -> None:
    """A hook: wait until the last checkpoint is on the disk."""
    run.writer.wait()


def spoil(gradient: float = 1.0, loss: float = 1.0) -> Hook:
    """A hook: the gradients and the logged loss of the next step are multiplied."""

    def act(run: Run) -> None:
        trainer, losses = run.trainer, run.trainer.losses

        def spoiled(batch: object) -> tuple[torch.Tensor, torch.Tensor]:
            trainer.losses = losses
            train_loss, next_token_loss = losses(batch)
            return train_loss * gradient, next_token_loss * loss

        trainer.losses = spoiled

    return act


def kill(make: Callable[[], Outcome]) -> None:
    """Make a run that SIGKILL ends, in a process of its own."""
    if torch.cuda.is_available():
        pytest.skip("it needs a forked process, which has no CUDA")
    child = get_context("fork").Process(target=lambda: sys.exit(make().code))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


# ---- What a run left


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
