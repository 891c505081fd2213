"""How fast does this machine train, what share of its matrix-product rate is that, and where does the rest go?

    python scripts/bench_train.py                            the tiny track as it runs by default
    python scripts/bench_train.py --rounds 30 --eager        compiled and eager, in turn
    python scripts/bench_train.py --json -- --track short    for programs, with flags of train_gpt.py

Convention: a token costs 6 FLOPs for each weight of the hidden matrices and the head (forward 2, backward 4);
attention scores, norms, embeddings and the optimizers are work without FLOPs. The rates of matrix products that this is
compared to are measured in the same process, the same dtype and the same rounds. All times are medians.
"""

import argparse
import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

import train_gpt
from runtime import environment
from runtime.flags import parse

SQUARES = (1024, 2048)  # sides of the square products
KINDS = ("forward", "input", "weight")  # the output of a linear map and its two gradients

T = TypeVar("T")
Timer = Callable[[], None]


class Product(NamedTuple):
    """A linear map of the model, (inputs) -> (outputs), and how many layers have one."""

    name: str
    inputs: int
    outputs: int
    layers: int


class Stopwatch:
    """Milliseconds by name, each from device idle to device idle."""

    def __init__(self, machine: environment.Machine):
        self.machine = machine
        self.ms: dict[Hashable, list[float]] = defaultdict(list)

    def time(self, name: Hashable, function: Callable[[], T]) -> T:
        self.machine.synchronize()
        begun = time.perf_counter()
        result = function()
        self.machine.synchronize()
        self.ms[name].append((time.perf_counter() - begun) * 1000)
        return result

    def median(self, name: Hashable) -> float:
        return float(np.median(self.ms[name]))


# ---------------------------------------------------------------------------------------------------------------------
# What is timed


def products(model: train_gpt.GPT) -> list[Product]:
    """The linear maps that `flops_per_token` counts."""
    dim, layers = model.config.dim, len(model.blocks)
    attentions = sum(block.attention is not None for block in model.blocks)
    return [
        Product("Q, K, V", dim, 3 * dim, attentions),
        Product("O", dim, dim, attentions),
        Product("MLP up", dim, 4 * dim, layers),
        Product("MLP down", 4 * dim, dim, layers),
        Product("head", dim, model.lm_head.size(0), 1),
    ]


def product_timer(name: Hashable, rows: int, inputs: int, outputs: int, dtype: torch.dtype, watch: Stopwatch) -> Timer:
    """Times the three products of a linear map once, each after an untimed one."""
    shapes = ((rows, inputs), (outputs, inputs), (rows, outputs))
    x, w, dy = (torch.randn(shape, device=watch.machine.device).to(dtype) for shape in shapes)
    operands = dict(zip(KINDS, ((x, w.T), (dy, w), (dy.T, x)), strict=True))

    def run() -> None:
        for kind, (a, b) in operands.items():
            torch.mm(a, b)
            watch.time((name, kind), partial(torch.mm, a, b))

    return run


def step_timer(mode: str, session: train_gpt.Session, loss: Callable, watch: Stopwatch) -> Timer:
    """Times training until Adam has stepped once: as the trainer does it, then part by part."""
    config = session.config
    windows = session.windows(config.windows[len(config.windows) // 2])
    longest = min(config.max_document, config.sequence) if config.align else config.sequence

    def optimize(name: str) -> None:
        session.optimizers[name].step()
        session.optimizers[name].zero_grad(set_to_none=True)

    def whole() -> None:
        for step in range(config.adam_every):
            train_gpt.forward_backward(session, windows)
            train_gpt.optimizer_steps(session, step)

    def run() -> None:
        session.loss = loss
        session.reset(config.seed)
        next(session.data.train)  # so that the next one is prefetched, as in a run
        watch.time((mode, "whole"), whole)
        for _ in range(config.adam_every):
            for batch in watch.time((mode, "data"), partial(next, session.data.train)):
                forward = partial(train_gpt.batch_loss, session, batch, windows, longest)
                watch.time((mode, "backward"), watch.time((mode, "forward"), forward).backward)
            watch.time((mode, "matrix"), partial(optimize, "matrix"))
        watch.time((mode, "adam"), partial(optimize, "adam"))

    return run


def measure(session: train_gpt.Session, rounds: int, eager: bool) -> dict[str, Any]:
    """All figures; every round times everything once, so that what else the machine does touches all alike."""
    watch, rows = Stopwatch(session.machine), session.facts["micro_batch"]
    dtype, maps = session.model.dtype, products(session.model)
    compiled = session.loss is not session.model
    losses = {"compiled": session.loss} if compiled else {}
    losses |= {"eager": session.model} if eager or not compiled else {}
    timers = [step_timer(mode, session, loss, watch) for mode, loss in losses.items()]
    timers += [product_timer(p.name, rows, p.inputs, p.outputs, dtype, watch) for p in maps]
    timers += [product_timer(side, side, side, side, dtype, watch) for side in SQUARES]
    for run in timers:
        run()
    watch.ms.clear()  # the first round warmed everything
    for _ in range(rounds):
        for run in timers:
            run()
    return figures(session, watch, list(losses), maps)


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def figures(session: train_gpt.Session, watch: Stopwatch, modes: list[str], maps: list[Product]) -> dict[str, Any]:
    """From times to rates (GFLOP/s) and shares."""
    config, facts = session.config, session.facts
    rows, accum = facts["micro_batch"], facts["grad_accum"]
    flops = session.model.flops_per_token() * config.batch_tokens
    shapes = [
        {
            "name": p.name, "inputs": p.inputs, "outputs": p.outputs, "count": p.layers * accum,
            "ms": {kind: watch.median((p.name, kind)) for kind in KINDS},
            "gflops": {k: 2e-6 * rows * p.inputs * p.outputs / watch.median((p.name, k)) for k in KINDS},
        }
        for p in maps
    ]  # fmt: skip
    products_ms = sum(shape["count"] * sum(shape["ms"].values()) for shape in shapes)
    peaks = {f"{side} square": 2e-6 * side**3 / watch.median((side, "forward")) for side in SQUARES}
    peaks["own shapes"] = 1e-6 * flops / products_ms
    return {
        "track": config.track, "recipe": config.recipe, "batch_tokens": config.batch_tokens, "env": facts["env"],
        "flops_per_token": session.model.flops_per_token(), "peaks": peaks,
        "rows": rows, "products": shapes, "products_ms": products_ms,
        "modes": {mode: mode_figures(session, watch, mode, flops, peaks) for mode in modes},
    }  # fmt: skip


def mode_figures(
    session: train_gpt.Session, watch: Stopwatch, mode: str, flops: int, peaks: dict[str, float]
) -> dict[str, Any]:
    config, accum = session.config, session.facts["grad_accum"]
    step_ms = watch.median((mode, "whole")) / config.adam_every
    calls = {"data": 1, "forward": accum, "backward": accum, "matrix": 1, "adam": 1 / config.adam_every}  # a step
    parts = {part: often * watch.median((mode, part)) for part, often in calls.items()}
    rate = 1e-6 * flops / step_ms
    return {
        "step_ms": step_ms,
        "tokens_per_s": 1000 * config.batch_tokens / step_ms,
        "gflops": rate,
        "share_of": {name: rate / peak for name, peak in peaks.items()},
        "parts_ms": parts,
        "parts_share": {part: ms / sum(parts.values()) for part, ms in parts.items()},
    }


def column(mode: dict[str, Any], peaks: dict[str, float]) -> dict[str, str]:
    """What people read of one mode, by the name of the row."""
    rows = {"tokens/s": f"{mode['tokens_per_s']:,.0f}", "GFLOP/s": f"{mode['gflops']:,.1f}"}
    rows |= {f"  of {peaks[name]:,.0f}, {name}": f"{share:.3f}" for name, share in mode["share_of"].items()}
    rows["step, ms"] = f"{mode['step_ms']:.1f}"
    return rows | {f"  {part}": f"{ms:.2f} {mode['parts_share'][part]:7.1%}" for part, ms in mode["parts_ms"].items()}


def as_text(result: dict[str, Any]) -> str:
    env = result["env"]
    lines = [
        f"track {result['track']}, recipe {result['recipe']}: {result['batch_tokens']:,} tokens a step, "
        f"{result['flops_per_token']:,} FLOPs a token",
        f"{env['gpu'] or env['cpu']}, threads {env['threads']}, {env['dtype']}, torch {env['torch']}",
        "",
        f"{'':28}" + "".join(f"{name:>18}" for name in result["modes"]),
    ]
    columns = [column(mode, result["peaks"]) for mode in result["modes"].values()]
    lines += [f"{name:28}" + "".join(f"{rows[name]:>18}" for rows in columns) for name in columns[0]]
    lines += ["", f"matrix products alone, ms      {result['products_ms']:.1f}; GFLOP/s of each:"]
    lines.append(f"{result['rows']:,} tokens".ljust(28) + "".join(f"{kind:>12}" for kind in KINDS))
    for shape in result["products"]:
        name = f"{shape['count']} x {shape['name']}, {shape['inputs']} to {shape['outputs']}"
        lines.append(f"{name:28}" + "".join(f"{shape['gflops'][kind]:12,.1f}" for kind in KINDS))
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=10, help="times that everything is measured, in turn")
    parser.add_argument("--eager", action="store_true", help="measure the model without compilation too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(words[:cut])
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the figures
            config = parse(train_gpt.Config, words[cut + 1 :], train_gpt.preset, "")
            session = train_gpt.prepare(config, environment.start(config.device))
            train_gpt.compile_model(session)
            result = measure(session, arguments.rounds, arguments.eager)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    session.data.train.close()
    print(json.dumps(result, indent=2) if arguments.json else as_text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
