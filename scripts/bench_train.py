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

    def median(self, *name: Hashable) -> float:
        return float(np.median(self.ms[name]))


# ---- What is timed


class Product(NamedTuple):
    """A linear map, (rows, inputs) -> (rows, outputs), and how many layers of the model have one."""

    name: str
    rows: int
    inputs: int
    outputs: int
    layers: int

    def gflops(self, ms: float) -> float:
        """The rate of a product that takes so long: the map, or one of its gradients, which cost as much."""
        return 2e-6 * self.rows * self.inputs * self.outputs / ms


def products(model: train_gpt.GPT, rows: int) -> list[Product]:
    """The linear maps that `flops_per_token` counts."""
    dim, layers = model.config.dim, len(model.blocks)
    attentions = sum(block.attention is not None for block in model.blocks)
    return [
        Product("Q, K, V", rows, dim, 3 * dim, attentions),
        Product("O", rows, dim, dim, attentions),
        Product("MLP up", rows, dim, 4 * dim, layers),
        Product("MLP down", rows, 4 * dim, dim, layers),
        Product("head", rows, dim, model.lm_head.size(0), 1),
    ]


def squares() -> list[Product]:
    return [Product(f"{side} square", side, side, side, 0) for side in SQUARES]


def time_product(product: Product, dtype: torch.dtype, watch: Stopwatch) -> None:
    """The three products of a linear map once, each after an untimed one."""
    name, rows, inputs, outputs, _ = product
    shapes = ((rows, inputs), (outputs, inputs), (rows, outputs))
    x, w, dy = (torch.randn(shape, device=watch.machine.device).to(dtype) for shape in shapes)
    for kind, a, b in zip(KINDS, (x, dy, dy.T), (w.T, w, x), strict=True):
        torch.mm(a, b)
        watch.time((name, kind), partial(torch.mm, a, b))


def time_steps(mode: str, session: train_gpt.Session, loss: Callable, watch: Stopwatch) -> None:
    """Training until Adam has stepped once: as the trainer does it, then part by part."""
    config, train = session.config, session.data.train
    windows = session.windows(config.windows[len(config.windows) // 2])

    def whole() -> None:
        for step in range(config.adam_every):
            train_gpt.optimizer_steps(session, step, train_gpt.forward_backward(session, windows))

    def optimize(name: str) -> None:
        session.optimizers[name].step()
        session.optimizers[name].zero_grad(set_to_none=True)

    session.loss = loss
    session.reset(config.seed)
    next(train)  # so that the next one is prefetched, as in a run
    watch.time((mode, "whole"), whole)
    for _ in range(config.adam_every):
        for batch in watch.time((mode, "data"), partial(next, train)):
            forward = partial(train_gpt.batch_loss, session, batch, windows, session.data.longest)
            watch.time((mode, "backward"), watch.time((mode, "forward"), forward).backward)
        watch.time((mode, "matrix"), partial(optimize, "matrix"))
    watch.time((mode, "adam"), partial(optimize, "adam"))


def measure(session: train_gpt.Session, rounds: int, eager: bool) -> dict[str, Any]:
    """All figures; every round times everything once, so that what else the machine does touches all alike."""
    watch, maps = Stopwatch(session.machine), products(session.model, session.header()["micro_batch"])
    modes = {"compiled": session.loss} if session.loss is not session.model else {}
    if eager or not modes:
        modes["eager"] = session.model
    for done in range(rounds + 1):
        if done == 1:
            watch.ms.clear()  # the first round warmed everything
        for mode, loss in modes.items():
            time_steps(mode, session, loss, watch)
        for product in [*maps, *squares()]:
            time_product(product, session.model.dtype, watch)
    return figures(session, watch, list(modes), maps)


# ---- Figures


def figures(session: train_gpt.Session, watch: Stopwatch, modes: list[str], maps: list[Product]) -> dict[str, Any]:
    """From times to rates (GFLOP/s) and shares."""
    config, facts, flops = session.config, session.header(), session.model.flops_per_token()
    shapes = []
    for p in maps:
        ms = {kind: watch.median(p.name, kind) for kind in KINDS}
        rates = {kind: p.gflops(ms[kind]) for kind in KINDS}
        shapes.append(p._asdict() | {"count": p.layers * facts["grad_accum"], "ms": ms, "gflops": rates})
    products_ms = sum(shape["count"] * sum(shape["ms"].values()) for shape in shapes)
    peaks = {p.name: p.gflops(watch.median(p.name, "forward")) for p in squares()}
    peaks["own shapes"] = 1e-6 * flops * config.batch_tokens / products_ms
    result = {
        "track": config.track, "recipe": config.recipe, "batch_tokens": config.batch_tokens, "env": facts["env"],
        "flops_per_token": flops, "peaks": peaks, "rows": facts["micro_batch"], "products": shapes,
        "products_ms": products_ms, "modes": {},
    }  # fmt: skip
    for mode in modes:
        step_ms = watch.median(mode, "whole") / config.adam_every
        micro, adam = facts["grad_accum"], 1 / config.adam_every
        calls = {"data": 1, "forward": micro, "backward": micro, "matrix": 1, "adam": adam}  # in a step
        parts = {part: often * watch.median(mode, part) for part, often in calls.items()}
        rate = 1e-6 * flops * config.batch_tokens / step_ms
        result["modes"][mode] = {
            "step_ms": step_ms,
            "tokens_per_s": 1000 * config.batch_tokens / step_ms,
            "gflops": rate,
            "share_of": {name: rate / peak for name, peak in peaks.items()},
            "parts_ms": parts,
            "parts_share": {part: ms / sum(parts.values()) for part, ms in parts.items()},
        }
    return result


def column(mode: dict[str, Any], peaks: dict[str, float]) -> dict[str, str]:
    """What people read of one mode, by the name of the row."""
    rows = {"tokens/s": f"{mode['tokens_per_s']:,.0f}", "GFLOP/s": f"{mode['gflops']:,.1f}"}
    rows |= {f"  of {peaks[name]:,.0f}, {name}": f"{share:.3f}" for name, share in mode["share_of"].items()}
    rows["step, ms"] = f"{mode['step_ms']:.1f}"
    return rows | {f"  {part}": f"{ms:.2f} {mode['parts_share'][part]:7.1%}" for part, ms in mode["parts_ms"].items()}


def as_text(result: dict[str, Any]) -> str:
    env = result["env"]
    columns = [column(mode, result["peaks"]) for mode in result["modes"].values()]
    lines = [
        f"track {result['track']}, recipe {result['recipe']}: {result['batch_tokens']:,} tokens a step, "
        f"{result['flops_per_token']:,} FLOPs a token",
        f"{env['gpu'] or env['cpu']}, threads {env['threads']}, {env['dtype']}, torch {env['torch']}",
        "",
        f"{'':28}" + "".join(f"{name:>18}" for name in result["modes"]),
        *(f"{name:28}" + "".join(f"{rows[name]:>18}" for rows in columns) for name in columns[0]),
        "",
        f"matrix products alone, ms      {result['products_ms']:.1f}; GFLOP/s of each:",
        f"{result['rows']:,} tokens".ljust(28) + "".join(f"{kind:>12}" for kind in KINDS),
    ]
    for shape in result["products"]:
        name = f"{shape['count']} x {shape['name']}, {shape['inputs']} to {shape['outputs']}"
        lines.append(f"{name:28}" + "".join(f"{shape['gflops'][kind]:12,.1f}" for kind in KINDS))
    return "\n".join(lines)


# ---- Command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=10, help="times that everything is measured, in turn")
    parser.add_argument("--eager", action="store_true", help="measure the model without compilation too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="after --: flags of train_gpt.py")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the figures
            config = parse(train_gpt.Config, arguments.flags, train_gpt.preset, "")
            session = train_gpt.prepare(config, environment.start(config.device))
            with session.data.train:
                train_gpt.compile_model(session)
                result = measure(session, arguments.rounds, arguments.eager)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2) if arguments.json else as_text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
