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
KINDS = ("out", "err")


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


def record(test_file: str) -> dict[str, list[Left]]:
    """What the ranks of each scenario left, in the order in which they were started."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["RES_OPTIONS"] = (
        "timeout:1 attempts:1"  # torch asks name servers, which may be slow
    )
    done = subprocess.run(
        [sys.executable, test_file],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return {name: [Left(*each) for each in left] for name, left in json.loads(done.stdout).items()}


def play(scenarios: dict[str, Scenario], in_turn: bool = False) -> None:
    """Run all scenarios, at once unless `in_turn`, and print what they left as JSON."""
    groups = [{key: scenario} for key, scenario in scenarios.items()] if in_turn else [scenarios]
    print(json.dumps({key: left for group in groups for key, left in play_at_once(group).items()}))


def play_at_once(scenarios: dict[str, Scenario]) -> dict[str, list[Left]]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as ports:
        folder, deadline = Path(name), time.monotonic() + PATIENCE
        started = {key: start(scenario, folder, ports) for key, scenario in scenarios.items()}
        for key, scenario in scenarios.items():
            for rank, process in started[key]:
                process.join(0 if rank in scenario.stopped else max(deadline - time.monotonic(), 0))
        return {
            key: [collect(rank, process, folder) for rank, process in ranks]
            for key, ranks in started.items()
        }


def start(scenario: Scenario, folder: Path, ports: ExitStack) -> list[tuple[int, BaseProcess]]:
    """Each rank that is started, and its process."""
    port = ports.enter_context(
        socket.socket()
    )  # held, so that it is nobody else's, and not listened on
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
    shared |= {"WORLD_SIZE": str(scenario.world_size)}
    ranks = []
    for rank in scenario.started:
        variables = shared | {"RANK": str(rank)}
        process = multiprocessing.get_context("fork").Process(
            target=run, args=(scenario.function, variables, folder)
        )
        process.start()
        ranks.append((rank, process))
    return ranks


def run(function: Callable[[], int], variables: dict[str, str], folder: Path) -> None:
    """In a process of its own."""
    os.environ |= variables
    for number, kind in enumerate(KINDS, 1):
        os.dup2(os.open(folder / f"{os.getpid()}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    sys.exit(function())


def collect(rank: int, process: BaseProcess, folder: Path) -> Left:
    process.kill()  # the stopped ones, and any that hangs: its code then tells
    process.join()
    return Left(
        rank, process.exitcode, *((folder / f"{process.pid}.{kind}").read_text() for kind in KINDS)
    )
