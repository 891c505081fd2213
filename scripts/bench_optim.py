"""What does a whole optimizer step cost, beside those of torch, those of others and the matrix products in it?

    python scripts/bench_optim.py                                      sets gpt2s and tiny
    python scripts/bench_optim.py --sets short --rounds 30 --json steps.json
    python scripts/bench_optim.py --peer 'theirs=folder/muon.py:Muon:{"momentum": 0.9}'

Convention: every round takes one step with each optimizer, all on the same float32 weights and gradients, products in
bf16. Ratios are taken round by round. The limit is the time of the products of five plain iterations and nothing
else, X X^T, A A and P X, at the rates measured in the same rounds. Orthogonalization alone is timed with each backend
that runs here; its gain is the plain backend's time by its own. Figures are medians, followed by their range.
"""

import argparse
import contextlib
import importlib.util
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from optim import Adam, Guard, Muon, NorMuon, SpikeRule, kernels
from optim.orthogonalize import BACKENDS, METHODS, batch_limit, native_dtype, orthogonalize
from runtime import environment


def gpt(layers: int, dim: int) -> list[tuple[int, int]]:
    return ([(dim, dim)] * 4 + [(4 * dim, dim), (dim, 4 * dim)]) * layers


SETS = {  # of short, the quarters that the packed attention matrices are split into: others know no split
    "gpt2s": gpt(12, 768), "tiny": gpt(6, 256), "short": [(768, 768)] * 40 + [(768, 3072)] * 22,
    "toy": gpt(2, 32),  # for trying the script
}  # fmt: skip
REFERENCE = "torch.optim.Muon"
ITERATIONS, WARM_UP = 5, 2  # of the limit; rounds
OPTIONS: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.1}  # so small that the weights, which all share, stay sane
PEER = re.compile(r"(?P<name>[^=]+)=(?P<file>.+?\.py):(?P<cls>\w+)(?::(?P<options>\{.*\}))?")

Peer = Callable[[list[Tensor]], torch.optim.Optimizer]
Tasks = Mapping[Any, Callable[[], Any]]


# ---- What is timed


class Problem:
    """The weights, gradients and loss that all optimizers share."""

    def __init__(self, shapes: list[tuple[int, int]], device: torch.device):
        self.shapes, self.device = shapes, device
        weights = [0.02 * torch.randn(shape, device=device) for shape in shapes]
        self.params: list[Tensor] = [weight.requires_grad_() for weight in weights]
        self.clean = [1e-3 * torch.randn_like(weight) for weight in weights]
        self.grads = [torch.empty_like(grad) for grad in self.clean]
        self.loss = torch.tensor(3.0, device=device)

    def restore(self) -> None:
        """Fresh gradients: some optimizers overwrite or drop them."""
        torch._foreach_copy_(self.grads, self.clean)
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad


def steps_of(problem: Problem, method: str | None, backend: str, peers: list[tuple[str, Peer]]) -> dict[str, Callable]:
    """What the table lists; each row has an optimizer, and so state, of its own."""
    params = problem.params
    steps: dict[str, Callable] = {REFERENCE: torch.optim.Muon(params, **OPTIONS).step}

    def add(name: str, build: Callable) -> None:
        steps[name] = build(params, nonfinite_guard=False).step
        steps[f"{name}, non-finite guard"] = build(params).step

    for kind, usual in ((Muon, "newton_schulz"), (NorMuon, "polar_express")):
        build: Callable = partial(kind, method=method or usual, backend=backend, dtype=torch.bfloat16, **OPTIONS)
        add(kind.__name__, build)
        guard = Guard([build(params, nonfinite_guard=False)], spike=SpikeRule())
        steps[f"{kind.__name__}, both guards"] = partial(guard.step, problem.loss)
    for each in backends_on(problem.device):
        steps[f"NorMuon, {each} backend"] = build(params, nonfinite_guard=False, backend=each).step
    steps["torch.optim.AdamW, fused"] = torch.optim.AdamW(params, betas=(0.9, 0.95), fused=True, **OPTIONS).step
    add("Adam", partial(Adam, betas=(0.9, 0.95), **OPTIONS))
    problem.restore()
    for name, build in peers:
        if name in steps:
            raise ValueError(f"--peer {name}=...: the table has a row of that name; choose another")
        steps[name] = build(params).step
    return steps


class Product(NamedTuple):
    """One of the products of a plain iteration, on so many matrices of n rows and m >= n columns."""

    name: str
    n: int
    m: int
    matrices: int

    def gflop(self) -> float:
        """In all iterations."""
        return 2e-9 * self.n**2 * (self.n if self.name == "A A" else self.m) * self.matrices * ITERATIONS

    def runner(self, device: torch.device) -> Callable[[], None]:
        """All of them at their best: one after the other, in batches that stay in the cache."""
        batch = min(self.matrices, batch_limit(self.n * self.m, torch.bfloat16, device))
        X, A = (torch.randn(batch, self.n, k, device=device).bfloat16() for k in (self.m, self.n))
        left, right = {"X X^T": (X, X.mT), "A A": (A, A), "P X": (A, X)}[self.name]
        out = left.new_empty(batch, self.n, right.shape[-1])
        whole, rest = divmod(self.matrices, batch)

        def run() -> None:
            for size in ([batch] * whole + [rest] * (rest > 0)) * ITERATIONS:
                torch.bmm(left[:size], right[:size], out=out[:size])

        return run


def wide(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(n, m, matrices) of all shapes, none of them tall."""
    return [(*shape, count) for shape, count in Counter((min(shape), max(shape)) for shape in shapes).items()]


def products(shapes: Sequence[tuple[int, int]]) -> list[Product]:
    return [Product(name, *sizes) for sizes in wide(shapes) for name in ("X X^T", "A A", "P X")]


def orthogonalizations(shapes: Sequence[tuple[int, int]], device: torch.device) -> dict[Any, Callable]:
    """By (n, m, matrices, backend): all matrices of a shape at once, with nothing around them."""
    return {
        (n, m, count, backend): partial(
            orthogonalize, torch.randn(count, n, m, device=device), "polar_express", torch.bfloat16, backend)
        for n, m, count in wide(shapes) for backend in backends_on(device)
    }  # fmt: skip


def backends_on(device: torch.device) -> list[str]:
    return [name for name in BACKENDS if name != "triton" or kernels.obstacle(device) is None]


def timed(tasks: Tasks, prepare: Callable, rounds: int, machine: environment.Machine) -> dict[Any, list[float]]:
    """Milliseconds of each task in each round. The next round begins with the next task: no place is a privilege."""
    names, ms = list(tasks), defaultdict(list)
    for done in range(WARM_UP + rounds):
        first = done % len(names)
        for name in names[first:] + names[:first]:
            prepare()
            machine.synchronize()
            begun = time.perf_counter()
            tasks[name]()
            machine.synchronize()
            ms[name].append((time.perf_counter() - begun) * 1000)
    return {name: times[WARM_UP:] for name, times in ms.items()}


@contextlib.contextmanager
def refused(text: str) -> Iterator[None]:
    """Whatever the code of others raises is bad input."""
    try:
        yield
    except Exception as error:
        fix = "give NAME=FILE.py:Class, or NAME=FILE.py:Class:{JSON}; it is built as Class(params, lr=..., **JSON)"
        raise ValueError(f"--peer {text}: {type(error).__name__}: {error}; {fix}") from error


def load_peer(text: str) -> tuple[str, Peer]:
    """The name and what builds the optimizer; ValueError where that cannot be, or its first step."""
    with refused(text):
        if not (match := PEER.fullmatch(text)):
            raise ValueError("not of the form that is needed")
        options, path = OPTIONS | json.loads(match["options"] or "{}"), Path(match["file"])
        spec: Any = importlib.util.spec_from_file_location(f"peer_{match['name']}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look it up
        sys.path.append(str(path.parent))  # for what lies beside the file
        spec.loader.exec_module(module)
        kind = getattr(module, match["cls"])

    def build(params: list[Tensor]) -> torch.optim.Optimizer:
        with refused(text):
            optimizer = kind(params, **options)
            optimizer.step()
        return optimizer

    return match["name"], build


# ---- Figures


def spread(values: Any) -> dict[str, float]:
    return {"median": float(np.median(values)), "low": float(min(values)), "high": float(max(values))}


def bench(problem: Problem, steps: dict[str, Callable], rounds: int, machine: environment.Machine) -> dict[str, Any]:
    """All figures of one set."""
    maps, alone = products(problem.shapes), orthogonalizations(problem.shapes, machine.device)
    tasks = steps | {p: p.runner(machine.device) for p in maps} | alone
    ms = timed(tasks, problem.restore, rounds, machine)
    limit = np.sum([ms[p] for p in maps], axis=0)
    return {
        "parameters": sum(param.numel() for param in problem.params), "matrices": len(problem.params),
        "limit": {"gflop": sum(p.gflop() for p in maps), "ms": spread(limit), "rounds_ms": limit.tolist()},
        "products": [p._asdict() | {"gflops": 1000 * p.gflop() / float(np.median(ms[p]))} for p in maps],
        "orthogonalization": [
            {"n": n, "m": m, "matrices": count, "backend": backend, "ms": spread(ms[n, m, count, backend]),
             "gain": spread(np.divide(ms[n, m, count, "plain"], ms[n, m, count, backend]))}
            for n, m, count, backend in alone
        ],
        "rows": {
            name: {"ms": spread(ms[name]), "ratio": spread(np.divide(ms[name], ms[REFERENCE])),
                   "over_limit": spread(np.divide(ms[name], limit)), "rounds_ms": ms[name]} for name in steps
        },
    }  # fmt: skip


def cell(figure: dict[str, float], digits: int) -> str:
    return f"{figure['median']:12,.{digits}f} ({figure['low']:,.{digits}f}-{figure['high']:,.{digits}f})".ljust(36)


def as_text(result: dict[str, Any]) -> str:
    env = result["env"]
    dtype = "bf16" if result["native_bf16"] else "bf16 emulated (this machine has none: figures hold for it alone)"
    lines = [f"{env['gpu'] or env['cpu']}, threads {env['threads']}, {dtype}, torch {env['torch']}"]
    for name, found in result["sets"].items():
        lines += [
            f"\n{name}: {found['parameters']:,} parameters in {found['matrices']} matrices, {result['rounds']} rounds",
            f"{'':26}{'ms':>12}{'/ ' + REFERENCE:>42}{'/ limit':>30}",
            f"limit, {found['limit']['gflop']:,.3f} GFLOP".ljust(26) + cell(found["limit"]["ms"], 2).rstrip(),
        ]
        for row, figures in found["rows"].items():
            cells = cell(figures["ms"], 2) + cell(figures["ratio"], 3) + cell(figures["over_limit"], 2)
            lines.append(f"{row:26}{cells.rstrip()}")
        for p in found["products"]:
            name = f"{p['matrices']:3} x {p['name']:6}{p['n']} x {p['m']}"
            lines.append(f"{name:26}{p['gflops']:12,.1f} GFLOP/s")
        lines.append(f"{'orthogonalization alone':26}{'ms':>12}{'gain':>36}")
        for o in found["orthogonalization"]:
            name = f"{o['matrices']:3} x {o['n']} x {o['m']}, {o['backend']}"
            lines.append(f"{name:26}{cell(o['ms'], 2)}{cell(o['gain'], 3).rstrip()}")
    return "\n".join(lines)


# ---- Command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["gpt2s", "tiny"], help="weights to step")
    parser.add_argument("--rounds", type=int, default=10, help="times that everything is measured, in turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--backend", default="auto", choices=("auto", *BACKENDS), help="of our products")
    parser.add_argument("--method", choices=METHODS, help="of Muon and NorMuon, if both shall have the same")
    parser.add_argument("--peer", action="append", default=[], help="NAME=FILE.py:Class[:JSON], built from JSON and lr")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures to this file")
    arguments = parser.parse_args(argv)
    if min(arguments.rounds, arguments.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    torch.set_num_threads(arguments.threads)
    try:
        machine = environment.start(arguments.device)
        peers = [load_peer(text) for text in arguments.peer]
        env, native = environment.describe(machine, torch.bfloat16), native_dtype(machine.device) == torch.bfloat16
        result: dict[str, Any] = {"env": env, "native_bf16": native, "rounds": arguments.rounds, "sets": {}}
        for name in arguments.sets:
            problem = Problem(SETS[name], machine.device)
            steps = steps_of(problem, arguments.method, arguments.backend, peers)
            result["sets"][name] = bench(problem, steps, arguments.rounds, machine)
        print(as_text(result))
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
