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
import json
import runpy
import sys
import tempfile
import time
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

WARM_UP = 2  # rounds that do not count
STEPS = 12  # timed at once: a multiple of adam_every, so that no gradient waits for Adam
BLOCK = [(256, 256)] * 4 + [(1024, 256), (256, 1024)]
SETS = {"gpt2s": [(3 * rows, 3 * cols) for rows, cols in BLOCK] * 12, "tiny": BLOCK * 6}
OPTIONS: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.1}  # small: all share the weights
FIELDS: dict[str, Any] = {"lr_mul": 1.0, "window": 1, "stage": 0, "tokens": 1}  # of a log line
Steps = dict[str, Callable[..., Any]]
Rows = dict[str, dict[str, float]]


def timed(
    steps: Steps, prepare: Callable, rounds: int, machine: Any, times: int = 1
) -> dict[str, list[float]]:
    """Milliseconds of a step by row and round. A row takes `times` steps; `prepare` is untimed."""
    names, ms = list(steps), defaultdict(list)
    for done in range(WARM_UP + rounds):
        first = done % len(names)
        for name in names[first:] + names[:first]:
            prepare()
            machine.synchronize()
            begun = time.perf_counter()
            for _ in range(times):
                steps[name]()
            machine.synchronize()
            ms[name].append(1000 * (time.perf_counter() - begun) / times)
    return {name: ms[name][WARM_UP:] for name in names}


def figures(ms: dict[str, list[float]], reference: str) -> Rows:
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


class Bench:
    """A warm trainer, in a run whose log and checkpoints are thrown away."""

    def __init__(self, trainer: train_gpt.Trainer, run: Run):
        self.trainer, self.run, self.machine = trainer, run, trainer.machine

    def prepare(self) -> None:
        """Go back to the first batches, with the next one prefetched, as in a run."""
        self.trainer.guard.reset()
        self.trainer.data.train.reset()
        next(self.trainer.data.train)

    def step(self, first: int, guard: optim.Guard) -> None:
        """One step of the trainer, with the windows of step `first`."""
        self.trainer.guard = guard
        message = self.trainer.gradients(first, self.run.stop.flags())
        verdict = self.trainer.update(self.run.steps_done % STEPS, message[0])
        self.run.stepped(message, verdict, **FIELDS)

    def parts(self, first: int, steps: int) -> dict[str, float]:
        """Milliseconds of each part of a step, which begins and ends with an idle device.

        Their sum exceeds the step by what overlaps in it.
        """
        trainer, spent = self.trainer, defaultdict[str, float](float)
        part = partial(self.part, spent)
        self.prepare()
        trainer.enter(first)
        for _ in range(steps):
            total = torch.zeros(1, device=self.machine.device)
            for batch in part("data", next, trainer.data.train):
                loss = part("forward", trainer.batch_loss, batch, trainer.data.longest)
                part("backward", loss.backward)
                total += loss.detach()
            message = torch.cat([total, self.run.stop.flags()])
            message = part("reduce", self.machine.all_reduce, message)
            message[0] /= trainer.config.batch_tokens
            step = self.run.steps_done % STEPS
            verdict = part("update", trainer.update, step, message[0])
            part("logging", partial(self.run.stepped, **FIELDS), message, verdict)
        means = {name: ms / steps for name, ms in spent.items()}
        return means | {"sum": sum(means.values())}

    def part(self, spent: dict[str, float], name: str, function: Callable, *args: Any) -> Any:
        self.machine.synchronize()
        begun = time.perf_counter()
        result = function(*args)
        self.machine.synchronize()
        spent[name] += 1000 * (time.perf_counter() - begun)
        return result

    def tables(self, given: argparse.Namespace) -> dict[str, Rows]:
        trainer, config = self.trainer, self.trainer.config
        steps, lengths, parts = Steps(), {}, {}
        for index, stage in enumerate(train_gpt.STAGES[config.stages]):
            name, first = f"window {stage.window}", train_gpt.first_step(config, index)
            lengths[name] = train_gpt.first_step(config, index + 1) - first
            steps[name] = partial(self.step, first, trainer.guard)
            parts[name] = self.parts(first, given.rounds * STEPS)
        bare = optim.Guard(trainer.optimizers.values(), nonfinite=False)
        steps[f"{name}, no guards"] = partial(self.step, first, bare)
        if given.against:
            steps[given.against] = runpy.run_path(given.against)["build"](config)
        ms = timed(steps, self.prepare, given.rounds, self.machine, STEPS)
        ms["schedule"] = [0.0] * given.rounds
        for name, length in lengths.items():
            share = length / config.steps
            ms["schedule"] = [a + share * b for a, b in zip(ms["schedule"], ms[name], strict=True)]
        rows = figures(ms, "schedule")
        for row in rows.values():
            row["tokens/s"] = 1000 * config.batch_tokens / row["median"]
            row["MFU"] = trainer.mfu(row["tokens/s"])
        save = timed({"on the clock": self.run.save}, self.prepare, given.rounds, self.machine)
        return {"step": rows, "parts": parts, "checkpoint": figures(save, "on the clock")}

    def profile(self) -> str:
        """What torch.profiler finds in steps of the last stage."""
        self.prepare()
        with torch.profiler.profile() as profiler:
            for _ in range(STEPS):
                self.step(self.trainer.config.steps - 1, self.trainer.guard)
        return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30)


def bench_step(given: argparse.Namespace, flags: list[str]) -> dict[str, Rows]:
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
                bench = Bench(trainer, run)
                with contextlib.redirect_stdout(None):  # its lines count steps that are none
                    tables = bench.tables(given)
                    profile = bench.profile() if given.profile else ""
    print(profile)
    return tables


def optimizer_steps(weights: list[Tensor]) -> Steps:
    steps: Steps = {
        "torch.optim.Muon": torch.optim.Muon(weights, **OPTIONS).step,
        "torch.optim.AdamW, fused": torch.optim.AdamW(weights, fused=True, **OPTIONS).step,
    }
    loss = torch.tensor(3.0, device=weights[0].device)
    for kind in (optim.Muon, optim.NorMuon, optim.Adam):
        build = partial(kind, weights, **OPTIONS)
        guard = optim.Guard([build(nonfinite_guard=False)], spike=optim.SpikeRule())
        steps[f"{kind.__name__}, no guard"] = build(nonfinite_guard=False).step
        steps[f"{kind.__name__}, nonfinite guard"] = build().step
        steps[f"{kind.__name__}, both guards"] = partial(guard.step, loss)
    return steps


def fill_gradients(weights: list[Tensor], gradients: list[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()  # some optimizers overwrite it or drop it


def bench_optim(given: argparse.Namespace) -> dict[str, Rows]:
    machine, tables = machines.start(), {}
    for name in given.sets:
        gradients = [0.02 * torch.randn(shape, device=machine.device) for shape in SETS[name]]
        weights = [gradient.clone().requires_grad_() for gradient in gradients]
        steps = optimizer_steps(weights)
        if given.against:
            steps |= runpy.run_path(given.against)["build"](weights)
        prepare = partial(fill_gradients, weights, gradients)
        ms = timed(steps, prepare, given.rounds, machine)
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
        step = given.what == "step"
        tables = bench_step(given, words[cut + 1 :]) if step else bench_optim(given)
    texts = [as_text(title, rows) for title, rows in tables.items()]
    print(json.dumps(tables, indent=2) if given.json else "\n\n".join(texts))
    return 0


if __name__ == "__main__":
    sys.exit(machines.leave(machines.supervise(main, refused=(ShardError,))))
