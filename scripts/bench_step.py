"""How fast does this machine train, where does the time of a step go, and how fast is another trainer beside it?

    python scripts/bench_step.py                                 the tiny track, at each window of its schedule
    python scripts/bench_step.py --eager --overhead              also not compiled; also guards and checkpoints alone
    torchrun --nproc_per_node=8 scripts/bench_step.py -- --track short        with flags of train_gpt.py
    python scripts/bench_step.py --against 'torchrun theirs.py' -- --track short --steps 60    whole runs, in turn

Every round measures everything once, figures are medians. A step is the trainer's own, logging included. Its parts are
timed once more, each from idle device to idle device: their sum exceeds the step by what overlaps. `reduce` is all that
travels between ranks, `guard` what the optimizers do not do themselves. MFU: a token costs 6 FLOPs for each weight of
the hidden matrices and the head; attention scores, norms, embeddings and optimizers are work without FLOPs. Peaks: the
best square product of this run, in its dtype, times ranks; the model's own products alone; and the datasheet's.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

import train_gpt
from data.loader import TrainLoader
from data.shards import ShardError
from optim import Guard
from runtime import environment
from runtime.flags import parse
from runtime.progress import Progress
from runtime.resume import Trial
from runtime.trial import Fault, Run, explained
from runtime.watch import Watch
from scripts.against import against, against_text

SQUARES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}  # sides of the products whose best rate is the measured peak
PARTS = ("data", "forward", "backward", "reduce", "matrix", "adam", "guard", "logging")
PHASES, SENDS = ("launch", "propose", "finish", "commit"), ("reduce", "share")  # of optimizers and of their layouts
LINE = {"step": 1, "tokens": 1, "train_time_ms": 1.0, "step_ms": 1.0, "lr_mul": 1.0, "window": 1, "stage": 0}
SAVED_EVERY_S = 60.0  # seconds between checkpoints, for their share of the time
PAIRS = 10  # pairs of optimizer steps with and without guards in a round


class Stopwatch:
    """Milliseconds by name, one number a round. What a part within a part takes is the inner one's alone."""

    def __init__(self, machine: environment.Machine):
        self.machine = machine
        self.ms: dict[tuple, list[float]] = defaultdict(list)
        self._round: dict[tuple, float] = defaultdict(float)
        self._open: list[tuple[tuple, float]] = []
        self._since = 0.0

    @contextlib.contextmanager
    def part(self, *name: Any, share: float = 1.0) -> Iterator[None]:
        """Adds this share of the block's time, from idle device to idle device, to the round's number."""
        self._charge()
        self._open.append((name, share))
        yield
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        self.machine.synchronize()
        now = time.perf_counter()
        for name, share in self._open[-1:]:
            self._round[name] += 1000 * share * (now - self._since)
        self._since = now

    def end_round(self, keep: bool) -> None:
        for name in self._round if keep else ():
            self.ms[name].append(self._round[name])
        self._round.clear()

    def median(self, *name: Any) -> float:
        return float(np.median(self.ms.get(name, [0.0])))  # zero: what never happens, as sending to nobody


def linear_maps(model: train_gpt.GPT) -> list[tuple[str, int, int, int]]:
    """Name, inputs, outputs and number of those that `flops_per_token` counts."""
    dim, layers = model.config.dim, len(model.blocks)
    attentions = sum(block.attention is not None for block in model.blocks)
    return [("Q, K, V", dim, 3 * dim, attentions), ("O", dim, dim, attentions), ("MLP up", dim, 4 * dim, layers),
            ("MLP down", 4 * dim, dim, layers), ("head", dim, model.lm_head.size(0), 1)]  # fmt: skip


class Bench:
    """A session with a log and checkpoints of its own; `windows` are long ones in blocks, `steps` are timed at once."""

    def __init__(self, session: train_gpt.Session, run: Run, windows: list[int], steps: int, eager: bool):
        self.session, self.run, self.windows, self.every = session, run, windows, session.config.adam_every
        self.steps = -(-steps // self.every) * self.every  # after them no gradient waits for Adam
        self.modes = {"compiled": session.loss} if session.loss is not session.model else {}
        self.modes |= {"eager": session.model} if eager or not self.modes else {}
        self.rows, self.maps = session.header()["micro_batch"], linear_maps(session.model)
        self.watch, self.peak, self.peak_mib = Stopwatch(session.machine), 0.0, 0.0
        rest = (session.guard.explain, partial(run.locate, session.data.train), session.requests, session.config.steps)
        self.progress = Progress(run.log, lambda text: None, *rest, 1.0)  # says nothing: its rates would be none
        session.reset(session.config.seed)

    def measure(self, rounds: int, overhead: bool) -> None:
        for number in range(rounds + 1):
            for mode, long in product(self.modes, self.windows):
                self.time_steps(mode, long)
                if number == 0 and mode == next(iter(self.modes)):
                    self.peak_mib = environment.peak_mib(self.session.machine)
            if overhead:
                self.time_guards(number)
                self.time_checkpoints(number)
            self.time_products()
            self.watch.end_round(keep=number > 0)  # the first one warms everything

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """The first batches again, the next one prefetched, as in a run; the guard has seen nothing."""
        self.session.guard.reset()
        self.session.data.train.reset()
        next(self.session.data.train)
        yield
        self.progress.write(wait=True)

    def take(self, count: int, long: int, part: Callable[[str], Any] = contextlib.nullcontext) -> None:
        """Steps as the trainer takes them."""
        for step in range(count):
            with part("backward"):
                message = train_gpt.forward_backward(self.session, self.session.windows(long))
            with part("guard"):
                verdict = train_gpt.optimizer_steps(self.session, step, message)
            with part("logging"):
                self.progress.step_done(LINE, message, verdict)

    def time_steps(self, mode: str, long: int) -> None:
        self.session.loss = self.modes[mode]
        with self.steady(), self.watch.part(mode, long, "step", share=1 / self.steps):
            self.take(self.steps, long)
        part = partial(self.watch.part, mode, long, share=1 / self.every)
        with self.steady(), apart(self.session, part):
            self.take(self.every, long, part)

    def time_guards(self, number: int) -> None:
        """Optimizer steps with and without guards, on the same gradients; who is first changes."""
        session, guards = self.session, {"guarded": self.session.guard}
        guards["bare"] = Guard(session.optimizers.values(), nonfinite=False)
        message = train_gpt.forward_backward(session, session.windows(self.windows[-1]))
        gradients = [(parameter, parameter.grad) for parameter in session.model.parameters()]
        for step in range(PAIRS):
            for name in sorted(guards, reverse=(number + step) % 2 == 0):
                session.guard = guards[name]
                for parameter, gradient in gradients:
                    parameter.grad = gradient
                with self.watch.part(name, share=1 / PAIRS):
                    train_gpt.optimizer_steps(session, step, message)
        session.guard = guards["guarded"]
        session.model.zero_grad()

    def time_checkpoints(self, number: int) -> None:
        """Steps that bear what writing a checkpoint takes in the background, and steps that do not."""
        for saves in (False, True) if number % 2 else (True, False):
            with self.steady(), self.watch.part("saving" if saves else "not saving"):
                if saves:
                    self.run.save(self.session.whole())
                self.take(self.steps, self.windows[-1])

    def time_products(self) -> None:
        """The best rate of square products; each linear map with its two gradients, after an untimed time."""
        machine, dtype = self.session.machine, self.session.model.dtype
        sides = SQUARES[machine.device.type]
        self.peak = max(self.peak, *(environment.measured_gemm_flops(machine.device, dtype, side) for side in sides))
        for name, inputs, outputs, _ in self.maps:
            shapes = ((self.rows, inputs), (outputs, inputs), (self.rows, outputs))
            x, w, dy = (torch.randn(shape, device=machine.device).to(dtype) for shape in shapes)
            for part in (contextlib.nullcontext, self.watch.part):
                with part(name):
                    _ = x @ w.T, dy @ w, dy.T @ x


@contextlib.contextmanager
def apart(session: train_gpt.Session, part: Callable[[str], Any]) -> Iterator[None]:
    """While it is entered, what the trainer calls in a step counts as parts of their own."""
    calls: list[tuple[Any, str, str]] = [
        (TrainLoader, "__next__", "data"), (train_gpt, "batch_loss", "forward"),
        (environment.Machine, "all_reduce", "reduce"),
    ]  # fmt: skip
    for name, optimizer in session.optimizers.items():
        calls += [(optimizer, phase, name) for phase in PHASES if hasattr(optimizer, phase)]
        calls += [(layout, send, "reduce") for layout in optimizer.layouts for send in SENDS if hasattr(layout, send)]
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in calls:
            stack.enter_context(patch.object(owner, attribute, charged(getattr(owner, attribute), partial(part, name))))
        yield


def charged(function: Callable, part: Callable[[], Any]) -> Callable:
    """The function as a part. If it returns what waits for its result, that is waited for at once."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with part():
            result = function(*args, **kwargs)
            found = result() if callable(result) else None
        return (lambda: found) if callable(result) else result

    return call


# ---- Figures


def figures(bench: Bench, overhead: bool) -> dict[str, Any]:
    """From times to rates (GFLOP/s) and shares."""
    session, watch, windows = bench.session, bench.watch, bench.windows
    config, facts, flops = session.config, session.header(), session.model.flops_per_token()
    step_gflop = 1e-9 * flops * config.batch_tokens
    products = [
        {"name": name, "inputs": inputs, "outputs": outputs, "count": layers * facts["grad_accum"],
         "ms": watch.median(name), "gflops": 6e-6 * bench.rows * inputs * outputs / watch.median(name)}
        for name, inputs, outputs, layers in bench.maps
    ]  # fmt: skip
    products_ms = sum(each["count"] * each["ms"] for each in products)
    peaks = {"best square": facts["world_size"] * bench.peak / 1e9, "own shapes": 1000 * step_gflop / products_ms}
    peaks |= {session.peak[1]: session.peak[0] / 1e9} if "datasheet" in session.peak[1] else {}

    def speed(step_ms: float) -> dict[str, Any]:
        rate = 1000 * step_gflop / step_ms
        return {"step_ms": step_ms, "tokens_per_s": 1000 * config.batch_tokens / step_ms, "gflops": rate,
                "mfu": {name: rate / peak for name, peak in peaks.items()}}  # fmt: skip

    counts, stages = Counter(train_gpt.window(config, step) for step in range(config.steps)), []
    for mode, long in product(bench.modes, windows):
        parts = {part: watch.median(mode, long, part) for part in PARTS}
        total = sum(parts.values())
        stages.append({
            "mode": mode, "window": long * config.window_block, "steps": counts[long], "parts_ms": parts,
            "parts_sum_ms": total, "parts_share": {part: ms / total for part, ms in parts.items()},
            **speed(watch.median(mode, long, "step")),
        })  # fmt: skip
    weights = [counts[long] or 1 for long in windows]  # 1: a window that is not of the schedule, alone
    means = {m: np.average([watch.median(m, long, "step") for long in windows], weights=weights) for m in bench.modes}
    return {
        "track": config.track, "recipe": config.recipe, "batch_tokens": config.batch_tokens, "env": facts["env"],
        "world_size": facts["world_size"], "flops_per_token": flops, "peak_mib": bench.peak_mib, "peaks": peaks,
        "stages": stages, "schedule": {mode: speed(float(ms)) for mode, ms in means.items()}, "rows": bench.rows,
        "products": products, "products_ms": products_ms,
        "overhead": overheads(watch.ms, mode, long, stages[-1]["step_ms"]) if overhead else {},
    }  # fmt: skip


def overheads(ms: dict[tuple, list[float]], mode: str, long: int, step_ms: float) -> dict[str, Any]:
    """Milliseconds, their standard error and share of the time: guards and logging of a step, a checkpoint a minute."""

    def cost(found: np.ndarray, every_ms: float) -> dict[str, float]:
        middle = float(np.median(found))
        spread = 1.4826 * np.median(np.abs(found - middle))  # of all but the outliers
        return {"ms": middle, "error": float(1.2533 * spread / len(found) ** 0.5), "share": middle / every_ms}

    checkpoints = np.subtract(ms["saving",], ms["not saving",])
    return {"guards": cost(np.subtract(ms["guarded",], ms["bare",]), step_ms),
            "logging": cost(np.array(ms[mode, long, "logging"]), step_ms),
            "checkpoints": cost(checkpoints, 1000 * SAVED_EVERY_S)}  # fmt: skip


def as_text(result: dict[str, Any]) -> str:
    env, stages = result["env"], result["stages"]
    rows = {"": [stage["mode"] for stage in stages]}
    for key, form in (("window", ",d"), ("tokens_per_s", ",.0f"), ("step_ms", ".2f"), ("parts_sum_ms", ".2f")):
        rows[key] = [format(stage[key], form) for stage in stages]
    for part in PARTS:
        rows[f"  {part}"] = [f"{stage['parts_ms'][part]:.2f} {stage['parts_share'][part]:6.1%}" for stage in stages]
    for name, peak in result["peaks"].items():
        rows[f"MFU of {peak:,.0f} GFLOP/s, {name}"] = [f"{stage['mfu'][name]:.3f}" for stage in stages]
    return "\n".join([
        f"track {result['track']}, recipe {result['recipe']}: {result['batch_tokens']:,} tokens a step on "
        f"{result['world_size']} rank(s), {result['flops_per_token']:,} FLOPs a token",
        f"{env['gpu'] or env['cpu']}, threads {env['threads']}, {env['dtype']}, torch {env['torch']}, attention "
        f"{env['attention']}, peak memory {result['peak_mib']:,.0f} MiB",
        *(f"{name:44}" + "".join(f"{cell:>16}" for cell in cells) for name, cells in rows.items()),
        *(f"over the schedule, {mode}: {mean['step_ms']:.2f} ms a step, {mean['tokens_per_s']:,.0f} tokens/s"
          for mode, mean in result["schedule"].items()),
        f"matrix products alone, of {result['rows']:,} tokens, with gradients: {result['products_ms']:.2f} ms a step",
        *("  {count:3} x {name:9} {inputs:5} to {outputs:6}{gflops:20,.1f} GFLOP/s".format(**each)
          for each in result["products"]),
        *(f"{name:12}{cost['ms']:10.2f} ms (standard error {cost['error']:.2f}), {cost['share']:.2%} of the time"
          for name, cost in result["overhead"].items()),
    ])  # fmt: skip


# ---- Command line


@contextlib.contextmanager
def opened(flags: list[str]) -> Iterator[tuple[train_gpt.Session, Run]]:
    """A session with compiled graphs, and a run whose log and checkpoints lie in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*flags, "--log-dir", folder, "--checkpoint-dir", folder]
        config = parse(train_gpt.Config, words, train_gpt.preset, "")
        machine = environment.start(config.device, config.rank_timeout)
        with Watch(machine, config.rank_timeout) as watch, explained(watch, ShardError):
            session, trial = train_gpt.prepare(config, machine), Trial(config.seed, 0, "bench")
            with session.data.train:
                train_gpt.compile_model(session)
                header = session.header(trial)
                with Run(trial, config, machine, session.requests, watch, header, train_gpt.SOURCE) as run:
                    run.begin(session.ledger.phases)
                    yield session, run


def measured(given: argparse.Namespace) -> dict[str, Any]:
    with contextlib.redirect_stdout(sys.stderr), opened(given.flags) as (session, run):  # stdout is for the figures
        schedule = dict.fromkeys(train_gpt.window(session.config, step) for step in range(session.config.steps))
        windows = {"all": [*schedule], "last": [*schedule][-1:]}.get(given.windows) or [int(given.windows)]
        bench = Bench(session, run, windows, given.steps, given.eager)
        bench.measure(given.rounds, given.overhead)
        return figures(bench, given.overhead)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=10, help="times that everything is measured, in turn")
    parser.add_argument("--steps", type=int, default=10, help="steps timed at once, to outlast a checkpoint's writing")
    parser.add_argument("--windows", default="all", help="long windows: all, last, or a number of blocks (%(default)s)")
    parser.add_argument("--eager", action="store_true", help="measure the model without compilation too")
    parser.add_argument("--overhead", action="store_true", help="measure guards and checkpoints too")
    parser.add_argument("--against", metavar="COMMAND", help="run this trainer and train_gpt.py as processes, in turn")
    parser.add_argument("--against-tokens", type=int, metavar="N", help="tokens a step of that trainer, if not ours")
    parser.add_argument("--json", action="store_true", help="print one JSON object; the text goes to standard error")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="after --: flags of train_gpt.py")
    given = parser.parse_args(argv)
    if min(given.rounds, given.steps, given.against_tokens or 1) < 1:
        parser.error("--rounds, --steps and --against-tokens must be at least 1")
    if given.windows not in ("all", "last") and not (given.windows.isdecimal() and 0 < int(given.windows) < 10**6):
        parser.error(f"--windows {given.windows}: must be all, last, or a number of blocks such as 7")
    if given.against is not None and not given.against.strip():
        parser.error("--against: it must be a command")
    if given.against and "RANK" in os.environ:
        parser.error("--against starts processes of its own: call it without torchrun; NPROC=8 for eight of ours")
    try:
        if given.against:
            tokens = parse(train_gpt.Config, given.flags, train_gpt.preset, "").batch_tokens
            result = against(given.against, given.against_tokens or tokens, given.flags, tokens, given.rounds)
        else:
            result = measured(given)
    except (ValueError, Fault) as error:
        return environment.leave(environment.refuse(error, 2))
    if os.environ.get("RANK", "0") == "0":
        print((against_text if given.against else as_text)(result), file=sys.stderr if given.json else sys.stdout)
        if given.json:
            print(json.dumps(result, indent=2))
    return environment.leave(0)


if __name__ == "__main__":
    sys.exit(main())
