"""What does a training step cost, and what does an optimizer step cost?

    python scripts/bench.py step                       `tiny` or, on a GPU, `short`: each stage
    torchrun --nproc_per_node=8 scripts/bench.py step -- --track short
    python scripts/bench.py optim --sets gpt2s         our optimizers beside torch.optim's

Flags of train_gpt.py follow --. Every round times each row of a table, starting with another row
each time. Figures are milliseconds; the ratio to the last stage, or to torch.optim.Muon, is the
median over the rounds. "of peak" counts 6 FLOPs for each weight of the matrices and the head; the
peak is the datasheet's, of GPUs. `step` first says what runs: hardware, backends, batches, seconds
of compilation, waits for the device, graphs compiled after the warm-up, peak memory, and how many
cores other programs took meanwhile. If there are no data, it takes random tokens. For eager code on
a CPU it adds where a step of the last stage spends its time, by part:

    ms, GB, GFLOP   in its operations; bytes are those of inputs and outputs, once each
    of step         its fraction of the step's time
    of matrix rate  its FLOP/s, as a fraction of those of a product of 1024 x 1024 matrices here
    of bandwidth    its bytes a second, as a fraction of those of a large copy here

A part near 1 in either can only be made quicker by less work. Little of both is overhead.

To time another optimizer, add a line to `optimizer_steps`.
"""

import argparse
import contextlib
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import make_parser, show

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import optim
import train_gpt
from data.shards import ShardError, write_shard
from runtime import machine as machines
from runtime.clock import Clock
from runtime.ending import leave, listen, supervise
from runtime.settings import parse
from runtime.warmup import take_steps
from train_gpt import Config, Trainer

WARM_UP = 2  # rounds that do not count
STEPS = 12  # timed at once; a multiple of adam_accum_steps, so that no gradient waits for Adam
RANDOM_STEPS = 60  # of the run that random tokens are enough for
DOCUMENT = 750  # tokens of a random one; at most half a row
BLOCK = [(256, 256)] * 4 + [(1024, 256), (256, 1024)]
SETS = {"gpt2s": [(3 * rows, 3 * cols) for rows, cols in BLOCK] * 12, "tiny": BLOCK * 6}
OPTIONS: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.1}  # all share weights: move them little
PARTS = {  # of a step on a CPU, by the names of torch's operations
    "products": ("mm", "addmm", "bmm", "baddbmm", "scaled_mm"),
    "attention": ("windowed_attention", "windowed_attention_backward"),
    "lookups": ("embedding", "embedding_dense_backward", "index", "index_add_"),
    "losses": ("log_softmax", "log_softmax_backward_data", "nll_loss_forward",
               "nll_loss_backward", "linear_cross_entropy"),
    "copies, fills": ("copy", "clone", "to_copy", "cat", "stack", "fill", "zero", "zeros_like",
                      "new_zeros", "foreach_copy", "full", "zeros"),
}  # fmt: skip
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
    config = parse(Config, flags, train_gpt.preset, "")
    machine = machines.start(config.device, config.rank_timeout)
    with tempfile.TemporaryDirectory(prefix="random_tokens_", ignore_cleanup_errors=True) as folder:
        if machine.on_main(lambda: not any(Path(config.data_dir).glob("*val_*.bin"))):
            config = replace(config, steps=RANDOM_STEPS, val_tokens=2 * config.val_seq_len)
            folder = machine.on_main(partial(write_random, config, folder))
            config = replace(config, data_dir=folder, val_sha256="")
        trainer, clock = train_gpt.set_up(config, machine), Clock(machine.synchronize)
        train_gpt.warm_up(trainer, clock)
        facts = {"data": config.data_dir, "ranks": machine.world_size} | trainer.env
        facts |= {kind: f"{trainer.env[kind]}, {why}" for kind, why in trainer.chosen.items()}
        shares = [trainer.data.train.shares(first) for first, *_ in trainer.changes]
        facts["batches"] = [f"{count} x {rows * config.seq_len:,} tokens" for count, rows in shares]
        facts |= {f"{phase.name}, s": phase.ms / 1000 for phase in clock.phases}
        facts |= trainer.checks | count_slips(trainer) | {"peak, MiB": machines.peak_mib(machine)}
        before = Usage.now(machine)
        table = step_table(trainer, given)
        facts |= {"other programs": Usage.now(machine).others_since(before)}
        found = {"facts": facts, "step": table}
        if machine.device.type == "cpu" and trainer.loss is trainer.model:
            last = train_gpt.stretches(config)[-1]
            found["part"] = part_table(trainer, last.first, [*table.values()][-1]["median"])
        return found


def write_random(config: Config, folder: str) -> str:
    """Write random tokens, enough for the run. Returns the folder."""
    random = np.random.default_rng(0)
    needed = 4 * train_gpt.tokens_before(config, config.steps)
    for split, count in (("train", needed), ("val", 3 * config.val_seq_len)):
        tokens = random.integers(0, config.bos, count, dtype=np.uint16)
        tokens[:: min(DOCUMENT, config.seq_len // 2)] = config.bos
        write_shard(Path(folder, f"random_{split}_000000.bin"), tokens)
    return folder


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


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far: those of all ranks here, and those of all programs of the machine."""

    wall: float
    own: float
    everyone: float  # nan where the system does not tell

    @classmethod
    def now(cls, machine: Any) -> "Usage":
        own, everyone = time.process_time(), float("nan")
        with contextlib.suppress(OSError):  # Linux alone has it
            user, nice, system, _idle, _iowait, *rest = map(int, (
                Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
            ))  # fmt: skip
            everyone = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
        return cls(time.perf_counter(), sum(machine.gather(own)), everyone)

    def others_since(self, before: "Usage") -> str:
        """How many cores other programs took."""
        others = (self.everyone - before.everyone) - (self.own - before.own)
        cores = others / (self.wall - before.wall)
        if not cores >= 0.05 * (os.cpu_count() or 1):  # nan too
            return "unknown here" if math.isnan(cores) else "none"
        return f"took {cores:.1f} of {os.cpu_count()} cores: times are too high"


def part_of(operation: Any, tensors: list[Tensor]) -> str:
    name = operation._opname.strip("_")
    if any(tensor.layout != torch.strided for tensor in tensors):
        return "lookups"
    return next((part for part, names in PARTS.items() if name in names), "element-wise, sums")


class PartCounter(TorchDispatchMode):
    """Time, bytes and FLOPs of all operations of eager code on a CPU, by part of a step.

    Bytes are those of inputs and outputs, once each: no code can move less for an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, dict[str, float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        ms = 1000 * (time.perf_counter() - began)
        leaves = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if func.is_view or not leaves:
            return out
        names = ("ms", "GB", "GFLOP", "calls")
        part = self.parts.setdefault(part_of(func, leaves), dict.fromkeys(names, 0.0))
        part["ms"] += ms
        part["GB"] += sum(moved(x) for x in leaves) / 1e9
        if count := flop_registry.get(func._overloadpacket):
            part["GFLOP"] += count(*args, **(kwargs or {}), out_val=out) / 1e9
        part["calls"] += 1
        return out


def moved(x: Tensor) -> int:
    """Bytes of a tensor; an expanded one is read from memory once."""
    if x.layout != torch.strided:
        return moved(x._values()) + moved(x._indices())
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def part_table(trainer: Trainer, first: int, step_ms: float) -> Rows:
    """Where the milliseconds of a step in the stage of step `first` go, and how near to the limits.

    Counting slows what is between the operations, so "between" is the rest of the time without it.
    """
    count = trainer.config.adam_accum_steps
    with PartCounter() as counter:
        take_steps(trainer, first, count)
    rate, bandwidth = fastest_product(trainer.model.dtype), fastest_copy()
    rows = {}
    for name, part in sorted(counter.parts.items(), key=lambda item: -item[1]["ms"]):
        figure = {column: value / count for column, value in part.items()}
        seconds = figure["ms"] / 1000
        figure["of step"] = figure["ms"] / step_ms
        figure["of matrix rate"] = figure["GFLOP"] / seconds / rate
        figure["of bandwidth"] = figure["GB"] / seconds / bandwidth
        rows[name] = figure
    between = max(step_ms - sum(figure["ms"] for figure in rows.values()), 0.0)
    columns = dict.fromkeys(next(iter(rows.values())), 0.0)
    rows["between operations"] = columns | {"ms": between, "of step": between / step_ms}
    return rows


def fastest(work: Callable[[], object], repeats: int = 10) -> float:
    """Seconds of the quickest of some calls."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def fastest_product(dtype: torch.dtype, side: int = 1024) -> float:
    """GFLOP/s of a square product."""
    a = torch.randn(side, side).to(dtype)
    return 2 * side**3 / 1e9 / fastest(lambda: a @ a)


def fastest_copy(elements: int = 1 << 25) -> float:
    """GB/s read and written by a copy that no cache holds."""
    source, target = torch.zeros(elements), torch.zeros(elements)
    return 2 * 4 * elements / 1e9 / fastest(lambda: target.copy_(source))


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
