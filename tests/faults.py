"""Kill one run of the tiny track at random moments, resume it each time, and compare its losses.

    ./run.sh data tiny && python tests/faults.py --kills 50

Each process is killed in its set-up, in its warm-up or between two of its steps. The run must come
to its end, with every training and validation loss equal to the bit to those of a run that nobody
killed. Exit code: 0 the losses are equal, 1 they are not, 2 bad arguments or no data.
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it: sums depend on the threads
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from stub_trainer import logs_of, losses_of, read_events  # noqa: E402

import train_gpt  # noqa: E402

FORK = multiprocessing.get_context("fork")  # the parent has torch already: seconds less each time
STEPS = 120
FLAGS = {
    "track": "tiny", "data-dir": ROOT / "data/corpus", "steps": STEPS, "val-tokens": 16_384,
    "val-every": 50, "val-sha256": "", "compile": "off", "device": "cpu", "checkpoint-every": 4,
    "resume": "auto",
}  # fmt: skip
IN_SET_UP = 0.2  # share of the kills that come before the first step


def start(folder: Path) -> BaseProcess:
    """The trainer in a process of its own, with all it says in `folder`/output.txt."""
    flags = FLAGS | {"log-dir": folder, "checkpoint-dir": folder / "checkpoints"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    process = FORK.Process(target=train, args=(words, folder / "output.txt"))
    process.start()
    return process


def train(words: list[str], output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    torch.manual_seed(0)
    sys.exit(train_gpt.main(words))


def wait_for_steps(process: BaseProcess, folder: Path) -> None:
    """Return when this process has begun its own segment of the log, or has ended."""
    before = len(logs_of(folder))
    while process.is_alive() and len(logs_of(folder)) == before:
        time.sleep(0.01)


def kill_again_and_again(folder: Path, kills: int, set_up: float, training: float) -> int:
    """Kill and resume the run; returns how many kills it took before it came to its end."""
    moments = random.Random(0)
    for number in range(kills):
        process = start(folder)
        if moments.random() < IN_SET_UP:
            time.sleep(moments.uniform(0, set_up))
        else:
            wait_for_steps(process, folder)
            # On average a bit more than the run needs to end in so many pieces: steps are lost too.
            time.sleep(moments.uniform(0, 5 * training / kills))
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        if process.exitcode != -signal.SIGKILL:
            return number  # it was done, or it failed, which the comparison will tell
        print(f"kill {number + 1}: {steps_done(folder)} steps", flush=True)
    return kills


def steps_done(folder: Path) -> int:
    logs = logs_of(folder)
    return len(losses_of(*logs)[0]) if logs else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="how often [50]")
    kills = parser.parse_args(argv).kills
    if kills < 1 or not any((ROOT / "data/corpus").glob("*.bin")):
        parser.error("give one kill or more, and build the data first: ./run.sh data tiny")
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name, "whole"), Path(name, "killed")
        for folder in (whole, killed):
            folder.mkdir()
        begun = time.monotonic()
        start(whole).join()
        end = read_events(*logs_of(whole), kind="end")[0]
        training = end["t_ms"] / 1000
        taken = kill_again_and_again(killed, kills, time.monotonic() - begun - training, training)
        start(killed).join()
        segments = logs_of(killed)
        same = losses_of(*segments) == losses_of(*logs_of(whole)) and steps_done(killed) == STEPS
        text = "equal to the bit" if same else f"NOT equal: {(killed / 'output.txt').read_text()}"
    print(f"{taken} kills, {len(segments)} segments, {STEPS} steps: all losses are {text}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
