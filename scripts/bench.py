"""What does a training step cost, and what does an optimizer step cost?

    python scripts/bench.py step                       `tiny` or, on a GPU, `short`: each stage
    torchrun --nproc_per_node=8 scripts/bench.py step -- --track short
    python scripts/bench.py optim --sets gpt2s         our optimizers beside torch.optim's

Flags of train_gpt.py follow --. Every round times each row of a table, starting with another row
each time. Figures are milliseconds; the ratio to the last stage, or to torch.optim.Muon, is the
median over the rounds. "of peak" counts 6 FLOPs for each weight of the matrices and the head; the
peak is the datasheet's, of GPUs. `step` first prints what runs: hardware, backends, batches,
seconds of compilation, waits for the device, graphs compiled after the warm-up, and peak memory.
Without data it times random tokens, as --dry-run does.

To time another optimizer, add a line to `optimizer_steps`.
"""

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import make_parser, show

import torch
from torch import Tensor

import optim
import train_gpt
from data.shards import ShardError
from runtime import machine as machines
from runtime.clock import Clock
from runtime.ending import leave, listen, supervise
from runtime.settings import parse
from runtime.warmup import take_steps
from train_gpt import Config, Trainer

WARM_UP = 2  # rounds that do not count
STEPS = 12  # timed at once; a multiple of adam_accum_steps, so that no gradient waits for Adam
BLOCK = [(256, 256)] * 4 + [(1024, 256), (256, 1024)]
SETS = {"gpt2s": [(3 * rows, 3 * cols) for rows, cols in BLOCK] * 12, "tiny": BLOCK * 6}
OPTIONS: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.1}  # all share weights: move them little
Steps = dict[str, Callable[[], object]]
Rows = dict[str, dict[str, float]]  # figures by row and column


def timed(
    steps: Steps, count: int, reference: str, prepare: Callable[[], object], rounds: int,
    machine: Any,
) -> Rows:  # fmt: skip
    """Milliseconds of a step in each row, which takes `count`; not those of `prepare()` before."""
    names, clock = list(steps), Clock(machine.synchronize)
    ms: dict[str, list[float]] = {name: [] for name in names}
    for done in range(WARM_UP + rounds):
        first = done % len(names)
        for name in names[first:] + names[:first]:
            prepare()
            with clock.phase(name, timed=False):
                steps[name]()
            ms[name].append(clock.phases[-1].ms / count)
    rows = {}
    for name in names:
        each, others = ms[name][WARM_UP:], ms[reference][WARM_UP:]
        ratio = median(a / b for a, b in zip(each, others, strict=True))
        rows[name] = {"median": median(each), "low": min(each), "high": max(each), "ratio": ratio}
    return rows


def as_text(title: str, rows: dict[str, Any]) -> str:
    """A table, or a line for each fact."""
    if title == "facts":
        return "\n".join(f"{name}: {value}" for name, value in rows.items())
    lines = [f"{title:28}" + "".join(f"{column:>12}" for column in next(iter(rows.values())))]
    for name, row in rows.items():
        lines.append(f"{name:28}" + "".join(f"{value:12,.3f}" for value in row.values()))
    return "\n".join(lines)


# ---- A step of the trainer


def bench_step(given: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """What runs here, waits and compilations that no step may have, and a table of the stages."""
    config = parse(Config, ["--dry-run", *flags], train_gpt.preset, "")
    machine = machines.start(config.device, config.rank_timeout)
    trainer, clock = train_gpt.set_up(config, machine), Clock(machine.synchronize)
    train_gpt.warm_up(trainer, clock)
    facts = {"data": config.data_dir, "ranks": machine.world_size} | trainer.env
    facts |= {kind: f"{trainer.env[kind]}, {why}" for kind, why in trainer.chosen.items()}
    shares = [trainer.data.train.shares(first) for first, *_ in trainer.changes]
    facts["batches"] = [f"{count} x {rows * config.seq_len:,} tokens" for count, rows in shares]
    facts |= {f"{phase.name}, s": phase.ms / 1000 for phase in clock.phases}
    facts |= trainer.checks | count_slips(trainer) | {"peak, MiB": machines.peak_mib(machine)}
    return {"facts": facts, "step": step_table(trainer, given)}


def count_slips(trainer: Trainer) -> dict[str, Any]:
    """What no step of a warm trainer may do: wait for the device, or compile a graph."""
    counts, cuda = torch._dynamo.utils.counters["stats"], trainer.machine.device.type == "cuda"
    graphs = counts["unique_graphs"]
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        for first, *_ in trainer.changes:
            take_steps(trainer, first, STEPS)
        if cuda:
            torch.cuda.set_sync_debug_mode("default")
    said = [str(each.message).splitlines()[0] for each in waits]
    told = [message for message in said if "called a synchronizing" in message]  # torch's own words
    graphs = counts["unique_graphs"] - graphs
    return {"waits": len(told), "what waited": sorted({*told})[:5], "graphs compiled": graphs}


def step_table(trainer: Trainer, given: argparse.Namespace) -> Rows:
    config = trainer.config
    steps: Steps = {}
    tokens: dict[str, int] = {}
    for index, (first, _, stage) in enumerate(train_gpt.stretches(config)):
        name = f"stage {index}, window {stage.long}"
        tokens[name] = train_gpt.schedule(config, first).batch_tokens
        steps[name] = partial(take_steps, trainer, first, STEPS)
    rows = timed(steps, STEPS, name, trainer.guard.reset, given.rounds, trainer.machine)
    peak = machines.peak_flops(trainer.machine, trainer.model.dtype)
    for row, figure in rows.items():
        figure["tokens/s"] = 1000 * tokens[row] / figure["median"]
        if peak:
            figure["of peak"] = figure["tokens/s"] * trainer.model.flops_per_token() / peak
    return rows


# ---- A step of optimizers


def bench_optim(given: argparse.Namespace) -> dict[str, Rows]:
    machine, tables = machines.start(), {}
    print(machines.describe(machine, torch.bfloat16))
    for name in given.sets:
        gradients = [0.02 * torch.randn(shape, device=machine.device) for shape in SETS[name]]
        weights = [gradient.clone().requires_grad_() for gradient in gradients]
        steps = optimizer_steps(weights)
        fill = partial(fill_gradients, weights, gradients)
        tables[name] = timed(steps, 1, "torch.optim.Muon", fill, given.rounds, machine)
    return tables


def optimizer_steps(weights: list[Tensor]) -> Steps:
    steps: Steps = {
        "torch.optim.Muon": torch.optim.Muon(weights, **OPTIONS).step,
        "torch.optim.AdamW, fused": torch.optim.AdamW(weights, fused=True, **OPTIONS).step,
    }
    loss = torch.tensor(3.0, device=weights[0].device)
    products: dict[str, Any] = {"dtype": torch.bfloat16}  # as torch.optim.Muon does
    for kind, options in ((optim.Muon, products), (optim.NorMuon, products), (optim.AdamW, {})):
        name, build = kind.__name__, partial(kind, weights, **OPTIONS, **options)
        guard = optim.Guard([build()], spike=optim.SpikeRule())
        steps[f"{name}, no guard"] = build().step
        steps[f"{name}, nonfinite guard"] = optim.Guard([build()]).step
        steps[f"{name}, both guards"] = partial(guard.step, loss)
    return steps


def fill_gradients(weights: list[Tensor], gradients: list[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()  # some optimizers overwrite it or drop it


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    parser, add = make_parser(__doc__)
    add("what", choices=("step", "optim"))
    add("--rounds", type=int, default=10, help="timed rounds (%(default)s)")
    add("--sets", nargs="+", choices=SETS, default=list(SETS), help="optim: which weights")
    add("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args(words[:cut])
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: it must be at least 1")
    with contextlib.redirect_stdout(sys.stderr):  # the trainer prints; stdout is for the figures
        found = bench_optim(given) if given.what == "optim" else bench_step(given, words[cut + 1 :])
    if os.environ.get("RANK", "0") == "0":
        show("\n\n".join(as_text(*table) for table in found.items()), found, given.json)
    return 0


if __name__ == "__main__":
    listen()
    sys.exit(leave(supervise(main, refused=(ShardError, OSError))))
