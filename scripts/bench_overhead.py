"""What do guards, logging and checkpoints cost? Blocks of training steps with and without them, in turn.

    python scripts/bench_overhead.py                         the tiny track: 30 rounds of 10 steps for each arm
    python scripts/bench_overhead.py --rounds 60 --json

An arm is paired with the bare steps of its round, and its cost is the median of the differences. A block with a
checkpoint begins with it, so that the steps after it bear what its writing costs in the background.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

import train_gpt
from optim import Guard
from runtime import environment
from runtime.flags import parse
from runtime.progress import Progress
from runtime.trial import Run, Trial
from runtime.watch import Watch

SAVED_EVERY = 100  # steps between checkpoints, for the sum


class Arm(NamedTuple):
    guards: bool = False
    logging: bool = False
    checkpoint: bool = False


ARMS = {
    "bare": Arm(), "guards": Arm(guards=True), "logging": Arm(logging=True), "checkpoint": Arm(checkpoint=True),
    "all": Arm(True, True, True),
}  # fmt: skip


class Bench:
    """Blocks of steps of one session, each as its arm says."""

    def __init__(self, session: train_gpt.Session, run: Run, steps: int):
        self.session, self.run, self.steps = session, run, steps
        bare = Guard(session.optimizers.values(), nonfinite=False)
        self.guards = {True: session.guard, False: bare}

    def ms(self, arm: Arm) -> float:
        """Milliseconds of a block."""
        session, run, config = self.session, self.run, self.session.config
        locate = partial(run.locate, session.data.train)
        progress = Progress(
            run.log, session.machine.say, session.guard.explain, locate, session.requests, config.steps, 1.0)
        session.guard = self.guards[arm.guards]
        session.reset(config.seed)
        next(session.data.train)  # so that the next one is prefetched, as in a run
        session.machine.synchronize()
        begun = time.perf_counter()
        if arm.checkpoint:
            run.save(session.whole())
        for step in range(self.steps):
            message = train_gpt.forward_backward(session, session.windows(config.windows[0]))
            verdict = train_gpt.optimizer_steps(session, step, message)
            if arm.logging:
                now = 1000 * (time.perf_counter() - begun)
                line = {"step": step + 1, "tokens": (step + 1) * config.batch_tokens, "train_time_ms": now}
                progress.step_done(line | {"step_ms": now, "lr_mul": 1.0, "window": 0, "stage": 0}, message, verdict)
        session.machine.synchronize()
        return 1000 * (time.perf_counter() - begun)


def measure(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each arm's blocks, by round; each round begins with another arm."""
    ms: dict[str, list[float]] = {name: [] for name in ARMS}
    for number in range(rounds + 1):
        names = list(ARMS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found = bench.ms(ARMS[name])
            if number:  # the first round warmed everything
                ms[name].append(found)
    return ms


def figures(ms: dict[str, list[float]], steps: int) -> dict[str, Any]:
    bare = np.array(ms["bare"])
    cost = {name: np.array(blocks) - bare for name, blocks in ms.items() if name != "bare"}
    median = {name: float(np.median(difference)) for name, difference in cost.items()}
    error = {name: float(1.2533 * difference.std(ddof=1) / len(difference) ** 0.5) for name, difference in cost.items()}
    step_ms = float(np.median(bare)) / steps
    a_step = {"guards": median["guards"] / steps, "logging": median["logging"] / steps}
    a_step["checkpoint"] = median["checkpoint"] / SAVED_EVERY
    return {
        "step_ms": step_ms, "steps": steps, "rounds": len(bare), "block_cost_ms": median, "standard_error_ms": error,
        "share": {name: found / step_ms for name, found in a_step.items()} | {"sum": sum(a_step.values()) / step_ms},
    }  # fmt: skip


def as_text(found: dict[str, Any]) -> str:
    lines = [f"a bare step takes {found['step_ms']:.1f} ms; {found['rounds']} rounds of {found['steps']} steps, paired"]
    for name, cost in found["block_cost_ms"].items():
        share = f"{found['share'][name]:8.2%} of the time" if name in found["share"] else ""
        error = found["standard_error_ms"][name]
        lines.append(f"  {name:12} {cost:+8.1f} ms a block (standard error {error:.1f}){share}")
    return "\n".join([*lines, f"together, with a checkpoint every {SAVED_EVERY} steps: {found['share']['sum']:.2%}"])


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
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each arm (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block (%(default)s)")
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
            found = figures(measure(Bench(session, run, arguments.steps), arguments.rounds), arguments.steps)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2) if arguments.json else as_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
