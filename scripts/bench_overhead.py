"""What do guards, logging and checkpoints cost, beside a training step without them? Interleaved, as medians.

    python scripts/bench_overhead.py                         the tiny track
    python scripts/bench_overhead.py --rounds 60 --json

Guards: optimizer steps with and without them, on the same gradients, in turn. Logging: what writing a step's line
takes. Checkpoints: blocks of steps that begin with one, so that they bear what its writing costs in the background,
against blocks that do not.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

import train_gpt
from optim import Guard
from runtime import environment
from runtime.flags import parse
from runtime.progress import Progress
from runtime.resume import Trial
from runtime.trial import Run
from runtime.watch import Watch

SAVED_EVERY_S = 60.0  # seconds between checkpoints, for the sum
PAIRS = 10  # pairs of optimizer steps in a round, for each block of steps


class Bench:
    """One session, timed with a part and without it."""

    def __init__(self, session: train_gpt.Session, run: Run, steps: int):
        self.session, self.run, self.steps = session, run, steps
        self.guarded, self.bare = session.guard, Guard(session.optimizers.values(), nonfinite=False)
        locate = partial(run.locate, session.data.train)
        config = session.config
        self.progress = Progress(
            run.log, session.machine.say, self.guarded.explain, locate, session.requests, config.steps, 1.0)
        session.reset(config.seed)
        self.message = train_gpt.forward_backward(session, session.windows(config.windows[0]))
        self.gradients = [(p, p.grad) for p in session.model.parameters() if p.grad is not None]
        self.ms: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, function: Callable[[], object]) -> None:
        self.session.machine.synchronize()
        begun = time.perf_counter()
        function()
        self.session.machine.synchronize()
        self.ms[name].append(1000 * (time.perf_counter() - begun))

    def optimize(self, guard: Guard, step: int) -> Any:
        self.session.guard = guard
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return train_gpt.optimizer_steps(self.session, step, self.message)

    def log(self, verdict: Any) -> None:
        line = {"step": 1, "tokens": 1, "train_time_ms": 1.0, "step_ms": 1.0, "lr_mul": 1.0, "window": 1, "stage": 0}
        self.progress.step_done(line, self.message, verdict)

    def block(self, saves: bool) -> None:
        session = self.session
        if saves:
            self.run.save(session.whole())
        for step in range(self.steps):
            train_gpt.optimizer_steps(
                session, step, train_gpt.forward_backward(session, session.windows(session.config.windows[0])))

    def round(self, number: int) -> None:
        """Everything once; who is first changes from round to round."""
        guards = {"guarded": self.guarded, "bare": self.bare}
        for step in range(PAIRS):
            for name in sorted(guards, reverse=(number + step) % 2 == 0):
                self.time(name, partial(self.optimize, guards[name], step))
        self.time("log", partial(self.log, self.optimize(self.guarded, 0)))
        self.session.guard = self.bare
        for saves in (False, True) if number % 2 else (True, False):
            self.session.reset(self.session.config.seed)
            next(self.session.data.train)  # so that the next one is prefetched, as in a run
            self.time("saving" if saves else "steps", partial(self.block, saves))


def figures(ms: dict[str, list[float]], steps: int) -> dict[str, Any]:
    """Costs in milliseconds, with the standard error of a median, and as shares of a bare step's time."""

    def difference(more: str, less: str) -> tuple[float, float]:
        found = np.array(ms[more]) - np.array(ms[less])
        spread = 1.4826 * np.median(np.abs(found - np.median(found)))  # of all but the outliers
        return float(np.median(found)), float(1.2533 * spread / len(found) ** 0.5)

    step_ms = float(np.median(ms["steps"])) / steps
    guards, checkpoint, log = difference("guarded", "bare"), difference("saving", "steps"), float(np.median(ms["log"]))
    shares = {"guards": guards[0] / step_ms, "logging": log / step_ms}
    shares["checkpoints"] = checkpoint[0] / SAVED_EVERY_S / 1000
    return {
        "step_ms": step_ms, "rounds": len(ms["log"]), "guards_ms": guards, "logging_ms": log,
        "checkpoint_ms": checkpoint, "shares": shares, "together": sum(shares.values()),
    }  # fmt: skip


def as_text(found: dict[str, Any]) -> str:
    (guards, guards_error), (checkpoint, checkpoint_error) = found["guards_ms"], found["checkpoint_ms"]
    shares = found["shares"]
    return "\n".join([
        f"a bare step takes {found['step_ms']:.1f} ms (median of {found['rounds']} rounds)",
        f"  guards        {guards:8.2f} ms a step (standard error {guards_error:.2f})   {shares['guards']:6.2%}",
        f"  logging       {found['logging_ms']:8.2f} ms a step                         {shares['logging']:6.2%}",
        f"  a checkpoint  {checkpoint:8.1f} ms (standard error {checkpoint_error:.1f}), one a minute   "
        f"{shares['checkpoints']:6.2%}",
        f"together {found['together']:.2%} of the time",
    ])  # fmt: skip


@contextlib.contextmanager
def opened(flags: list[str], folder: str) -> Iterator[tuple[train_gpt.Session, Run]]:
    """A session with compiled graphs, and a run whose log and checkpoints lie in the folder."""
    flags = [*flags, "--log-dir", folder, "--checkpoint-dir", folder]
    config = parse(train_gpt.Config, flags, train_gpt.preset, "")
    machine = environment.start(config.device)
    session = train_gpt.prepare(config, machine)
    with session.data.train:
        train_gpt.compile_model(session)
        trial = Trial(config.seed, 0, "overhead")
        watch = Watch(machine, config.rank_timeout)
        with Run(trial, config, machine, session.requests, watch, session.header(trial), train_gpt.SOURCE) as run:
            run.begin(session.ledger.phases)
            yield session, run


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=30, help="times that everything is measured (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block with a checkpoint (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="after --: flags of train_gpt.py")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 2 or arguments.steps < 1:
        parser.error("--rounds must be at least 2 and --steps at least 1")
    try:
        with (
            contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder,
            opened(arguments.flags, folder) as (session, run),
        ):  # fmt: skip
            bench = Bench(session, run, arguments.steps)
            for number in range(arguments.rounds + 1):
                if number == 1:
                    bench.ms.clear()  # the first round warmed everything
                bench.round(number)
            found = figures(bench.ms, arguments.steps)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2) if arguments.json else as_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
