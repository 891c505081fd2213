"""Scenarios of several ranks, in processes forked from one that has imported torch.

A test file holds a table of scenarios, plays it when run as a script, and calls
`record(__file__)` in a fixture.
"""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 120  # seconds that processes on a busy machine may take


class Scenario(NamedTuple):
    """What each rank does (it returns the exit code), and which ranks there are."""

    function: Callable[[], int]
    started: tuple[int, ...]
    world_size: int
    stopped: tuple[int, ...] = ()  # ranks that will not end by themselves


class Left(NamedTuple):
    """What a rank left behind."""

    rank: int
    code: int  # minus the number of the signal that killed it
    out: str
    err: str


def record(test_file: str, *words: object) -> dict[str, list[Left]]:
    """What the ranks of each scenario left, in the order in which they were started.

    words: of the command line that runs the file.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch asks name servers
    command = [sys.executable, test_file, *map(str, words)]
    limit = 20 * PATIENCE  # each scenario has its own
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
    assert done.returncode == 0, done.stderr
    return {name: [Left(*each) for each in left] for name, left in json.loads(done.stdout).items()}


def play(scenarios: dict[str, Scenario], in_turn: bool = False) -> None:
    """Run all scenarios, at once unless `in_turn`, and print what they left as JSON."""
    left: dict[str, list[Left]] = {}
    for group in [{key: each} for key, each in scenarios.items()] if in_turn else [scenarios]:
        left |= play_at_once(group)
    print(json.dumps(left))


def play_at_once(scenarios: dict[str, Scenario]) -> dict[str, list[Left]]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as ports:
        folder, deadline = Path(name), time.monotonic() + PATIENCE
        started = {key: start(scenario, folder, ports) for key, scenario in scenarios.items()}
        for key, scenario in scenarios.items():
            for rank, process in started[key]:
                process.join(0 if rank in scenario.stopped else max(deadline - time.monotonic(), 0))
        left = {}
        for key, ranks in started.items():
            left[key] = [collect(rank, process, folder) for rank, process in ranks]
        return left


def start(scenario: Scenario, folder: Path, ports: ExitStack) -> list[tuple[int, BaseProcess]]:
    """Each rank that is started, and its process."""
    # The port is held, so that it is nobody else's, but not listened on.
    port = ports.enter_context(socket.socket())
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
    shared |= {"WORLD_SIZE": str(scenario.world_size)}
    fork, ranks = multiprocessing.get_context("fork"), []
    for rank in scenario.started:
        given = scenario.function, shared | {"RANK": str(rank)}, folder
        process = fork.Process(target=run, args=given)
        process.start()
        ranks.append((rank, process))
    return ranks


def run(function: Callable[[], int], variables: dict[str, str], folder: Path) -> None:
    """In a process of its own."""
    os.environ |= variables
    for number, kind in enumerate(("out", "err"), 1):
        os.dup2(os.open(folder / f"{os.getpid()}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    sys.exit(function())


def collect(rank: int, process: BaseProcess, folder: Path) -> Left:
    process.kill()  # the stopped ones, and any that hangs: its code then tells
    process.join()
    out, err = ((folder / f"{process.pid}.{kind}").read_text() for kind in ("out", "err"))
    return Left(rank, process.exitcode, out, err)
