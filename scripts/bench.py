"""What does a training step cost, and what does an optimizer step cost?

    python scripts/bench.py step                       the tiny track, each stage of its schedule
    torchrun --nproc_per_node=8 scripts/bench.py step --profile -- --track short
    python scripts/bench.py optim --sets gpt2s         our optimizers beside torch.optim's

Flags of train_gpt.py follow --. Every round takes each row of a table, starting with another row
each time. Figures are medians over the rounds in milliseconds; ratios are taken round by round.
--against FILE.py adds others' code: for `step` it defines build(config), which returns a function
that takes one training step of config.batch_tokens tokens; for `optim` build(parameters), which
returns step functions by name. MFU counts 6 FLOPs for each weight of the matrices and the head.
"""

import argparse
import contextlib
import copy
import json
import os
import runpy
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

import optim
import train_gpt
from data.shards import ShardError
from runtime import machine as machines
from runtime.clock import Clock
from runtime.resume import plan_runs
from runtime.run import Run
from runtime.settings import parse
from runtime.stop import Stop
from train_gpt import Trainer

WARM_UP = 2  # rounds that do not count
STEPS = 12  # timed at once: a multiple of adam_every, so that no gradient waits for Adam
BLOCK = [(256, 256)] * 4 + [(1024, 256), (256, 1024)]
SETS = {"gpt2s": [(3 * rows, 3 * cols) for rows, cols in BLOCK] * 12, "tiny": BLOCK * 6}
OPTIONS: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.1}  # small: all share the weights
FIELDS: dict[str, Any] = {"lr_mul": 1.0, "window": 1, "stage": 0, "tokens": 1}  # of a log line
Steps = dict[str, Callable[..., Any]]
Times = dict[str, list[float]]  # milliseconds, by row and round
Rows = dict[str, dict[str, float]]


def timed(steps: Steps, prepare: Callable, rounds: int, machine: Any, times: int = 1) -> Times:
    """Milliseconds of a step. A row of a round takes `times` steps, after `prepare`, untimed."""
    names, ms, clock = list(steps), defaultdict(list), Clock(machine.synchronize)
    for done in range(WARM_UP + rounds):
        first = done % len(names)
        for name in names[first:] + names[:first]:
            prepare()
            with clock.phase(name, timed=False):
                for _ in range(times):
                    steps[name]()
            ms[name].append(clock.phases[-1].ms / times)
    return {name: ms[name][WARM_UP:] for name in names}


def figures(ms: Times, reference: str) -> Rows:
    rows = {}
    for name, each in ms.items():
        ratio = median(mine / other for mine, other in zip(each, ms[reference], strict=True))
        rows[name] = {"median": median(each), "low": min(each), "high": max(each), "ratio": ratio}
    return rows


def as_text(title: str, rows: Rows) -> str:
    lines = [f"{title:28}" + "".join(f"{column:>12}" for column in next(iter(rows.values())))]
    for name, row in rows.items():
        lines.append(f"{name:28}" + "".join(f"{value:12,.3f}" for value in row.values()))
    return "\n".join(lines)


# ---- A step of the trainer


def prepare(trainer: Trainer) -> None:
    """Go back to the first batches, with the next one prefetched, as in a run."""
    trainer.guard.reset()
    trainer.data.train.reset()
    next(trainer.data.train)


def step(trainer: Trainer, run: Run, first: int, guard: optim.Guard) -> None:
    """One step of the trainer, with the windows of step `first`."""
    trainer.guard = guard
    message = trainer.gradients(first, run.stop.flags())
    verdict = trainer.update(run.steps_done % STEPS, message[0])
    run.stepped(message, verdict, **FIELDS)


def parts(trainer: Trainer, run: Run, first: int, steps: int) -> dict[str, float]:
    """Milliseconds of the parts of a step, each from idle device to idle device, and their sum.

    The sum exceeds the step by what overlaps in it.
    """
    clock, machine = Clock(trainer.machine.synchronize), trainer.machine
    part = partial(clock.phase, timed=False)
    prepare(trainer)
    trainer.enter(first)
    for _ in range(steps):
        total = torch.zeros(1, device=machine.device)
        with part("data"):
            batches = next(trainer.data.train)
        for batch in batches:
            with part("forward"):
                loss = trainer.batch_loss(batch, trainer.data.longest)
            with part("backward"):
                loss.backward()
            total += loss.detach()
        with part("reduce"):
            message = machine.all_reduce(torch.cat([total, run.stop.flags()]))
        message[0] /= trainer.config.batch_tokens
        with part("update"):
            verdict = trainer.update(run.steps_done % STEPS, message[0])
        with part("logging"):
            run.stepped(message, verdict, **FIELDS)
    means = dict.fromkeys((phase.name for phase in clock.phases), 0.0)
    for phase in clock.phases:
        means[phase.name] += phase.ms / steps
    return means | {"sum": sum(means.values())}


def step_tables(trainer: Trainer, run: Run, given: argparse.Namespace) -> dict[str, Rows]:
    config, guard, machine = trainer.config, trainer.guard, trainer.machine
    bare = copy.copy(guard)
    bare.nonfinite, bare.spike = False, None
    steps, lengths, in_parts = Steps(), {}, {}
    for index, stage in enumerate(train_gpt.STAGES[config.stages]):
        name, first = f"window {stage.window}", train_gpt.first_step(config, index)
        lengths[name] = train_gpt.first_step(config, index + 1) - first
        steps[name] = partial(step, trainer, run, first, guard)
        in_parts[name] = parts(trainer, run, first, given.rounds * STEPS)
    steps[f"{name}, no guards"] = partial(step, trainer, run, first, bare)
    if given.against:
        steps[given.against] = runpy.run_path(given.against)["build"](config)
    if given.profile:  # the last stage
        with torch.profiler.profile() as found:
            parts(trainer, run, first, STEPS)
        print(found.key_averages().table(sort_by="self_cpu_time_total"), file=sys.stderr)
    ready = partial(prepare, trainer)
    ms = timed(steps, ready, given.rounds, machine, STEPS)
    shares = torch.tensor(list(lengths.values()), dtype=torch.float64) / config.steps
    by_round = torch.tensor([ms[name] for name in lengths], dtype=torch.float64).T
    ms["schedule"] = (by_round @ shares).tolist()
    rows = figures(ms, "schedule")
    for row in rows.values():
        row["tokens/s"] = 1000 * config.batch_tokens / row["median"]
        row["MFU"] = trainer.mfu(row["tokens/s"])
    save = timed({"on the clock": run.save}, ready, given.rounds, machine)
    return {"step": rows, "parts": in_parts, "checkpoint": figures(save, "on the clock")}


def bench_step(given: argparse.Namespace, flags: list[str]) -> dict[str, Rows]:
    """The tables; empty if the losses became NaN, which the run has said."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*flags, "--log-dir", folder, "--checkpoint-dir", folder]
        config = parse(train_gpt.Config, words, train_gpt.preset, "")
        machine = machines.start(config.device, config.rank_timeout)
        clock, stop = Clock(machine.synchronize), Stop(machine.device)
        trainer = train_gpt.set_up(config, machine)
        plan = plan_runs(trainer)[0]
        with trainer.data.train:
            train_gpt.warm_up(trainer, clock)
            with Run(trainer, plan, clock, stop, source=train_gpt.SOURCE) as run:
                run.start_training()
                with contextlib.redirect_stdout(None):  # lines of steps that are part of no run
                    return step_tables(trainer, run, given)
    return {}


# ---- A step of optimizers


def optimizer_steps(weights: list[Tensor]) -> Steps:
    steps: Steps = {
        "torch.optim.Muon": torch.optim.Muon(weights, **OPTIONS).step,
        "torch.optim.AdamW, fused": torch.optim.AdamW(weights, fused=True, **OPTIONS).step,
    }
    loss = torch.tensor(3.0, device=weights[0].device)
    products: dict[str, Any] = {"dtype": torch.bfloat16}  # as torch.optim.Muon does
    for kind, options in ((optim.Muon, products), (optim.NorMuon, products), (optim.Adam, {})):
        name, build = kind.__name__, partial(kind, weights, **OPTIONS, **options)
        guard = optim.Guard([build(nonfinite_guard=False)], spike=optim.SpikeRule())
        steps[f"{name}, no guard"] = build(nonfinite_guard=False).step
        steps[f"{name}, nonfinite guard"] = build().step
        steps[f"{name}, both guards"] = partial(guard.step, loss)
    return steps


def fill_gradients(weights: list[Tensor], gradients: list[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()  # some optimizers overwrite it or drop it


def bench_optim(given: argparse.Namespace) -> dict[str, Rows]:
    machine, tables = machines.start(), {}
    print(machines.describe(machine, torch.bfloat16))
    for name in given.sets:
        gradients = [0.02 * torch.randn(shape, device=machine.device) for shape in SETS[name]]
        weights = [gradient.clone().requires_grad_() for gradient in gradients]
        steps = optimizer_steps(weights)
        if given.against:
            steps |= runpy.run_path(given.against)["build"](weights)
        ms = timed(steps, partial(fill_gradients, weights, gradients), given.rounds, machine)
        tables[name] = figures(ms, "torch.optim.Muon")
    return tables


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("step", "optim"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--against", metavar="FILE.py", help="code to time beside ours")
    parser.add_argument("--profile", action="store_true", help="step: a table of torch.profiler")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="optim")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args(words[:cut])
    with contextlib.redirect_stdout(sys.stderr):  # the trainer speaks too: stdout is for figures
        if given.what == "step":
            tables = bench_step(given, words[cut + 1 :])
        else:
            tables = bench_optim(given)
    texts = [as_text(title, rows) for title, rows in tables.items()]
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(tables, indent=2) if given.json else "\n\n".join(texts))
    return 0 if tables else 1


if __name__ == "__main__":
    sys.exit(machines.leave(machines.supervise(main, refused=(ShardError,))))
