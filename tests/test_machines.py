"""Two machines that share no files: an agent of torchrun on each, in a network namespace of its own where allowed."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from small_run import BOS, ROOT, STEPS, arguments, find_logs, read_events, run, start, write_data

from data.shards import write_shard
from claims.runlog import read_run

PATIENCE = 300  # seconds that processes on a busy machine may take
RANK_TIMEOUT = 20  # seconds, far more than a closed connection takes to be noticed
TOLERANCE = 2e-4  # relative, as for four processes on one machine
TRIALS = 60  # of half a second: more than will be run, since the second machine is lost in the third

MAKE_FIRST = ("unshare", "--map-root-user", "--net", "--uts", "sh", "-c", "hostname first && exec sleep 3600")
MAKE_SECOND = ("unshare", "--net", "--uts", "sh", "-c", "hostname second && exec sleep 3600")


class Place(NamedTuple):
    """Where commands of one machine run."""

    host: str
    address: str
    enter: tuple[str, ...] = ()  # what a command begins with
    interface: str | None = None  # network interface that ranks talk through; None: as the host's name resolves


def entrance(pid: int) -> tuple[str, ...]:
    return ("nsenter", "--target", str(pid), "--user", "--net", "--uts", "--preserve-credentials")


def hold(stack: list[subprocess.Popen], command: tuple[str, ...], host: str) -> Place:
    """A namespace with that host name, which lives as long as the process that is added to the stack."""
    stack.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
    place = Place(host, f"10.77.0.{len(stack)}", entrance(stack[-1].pid), "wire")
    deadline = time.monotonic() + 10
    while subprocess.run([*place.enter, "hostname"], capture_output=True, text=True).stdout.strip() != host:
        if stack[-1].poll() is not None or time.monotonic() > deadline:
            raise OSError(f"no network namespace for {host}")
        time.sleep(0.05)
    return place


def connect(places: list[Place], second: int) -> None:
    """A cable between the two; `second` is the process that holds the second namespace."""
    cable = "link add wire type veth peer name wire netns"
    subprocess.run([*places[0].enter, "ip", *cable.split(), str(second)], check=True, capture_output=True)
    for place in places:
        for words in ("link set lo up", f"addr add {place.address}/24 dev wire", "link set wire up"):
            subprocess.run([*place.enter, "ip", *words.split()], check=True, capture_output=True)


@pytest.fixture(scope="module")
def places() -> Iterator[list[Place]]:
    """Two namespaces joined by a cable, gone when the test ends or dies; both on loopback where that is not allowed."""
    holders: list[subprocess.Popen] = []
    try:
        try:
            first = hold(holders, MAKE_FIRST, "first")
            found = [first, hold(holders, (*first.enter, *MAKE_SECOND), "second")]
            connect(found, holders[1].pid)
        except (OSError, subprocess.CalledProcessError):
            found = [Place(socket.gethostname(), "127.0.0.1")] * 2
        yield found
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start_agent(place: Place, node: int, words: list[str], meeting: tuple[str, str]) -> subprocess.Popen:
    address, port = meeting
    launcher = ("-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", "2",
                "--master_addr", address, "--master_port", port)  # fmt: skip
    named = {} if place.interface is None else {"GLOO_SOCKET_IFNAME": place.interface}
    return subprocess.Popen(
        [*place.enter, sys.executable, *launcher, str(ROOT / "train_gpt.py"), *words], text=True, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"} | named,
    )  # fmt: skip


def children(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def trains_third(folder: Path) -> bool:
    """Whether one of three logs has steps and no end."""
    texts = [log.read_text() for log in find_logs(folder)] if folder.exists() else []
    return len(texts) >= 3 and any('"step_ms"' in text and '"end"' not in text for text in texts)


class Loss(NamedTuple):
    """What a run leaves whose second machine lost its workers in the third trial."""

    codes: list[int]  # of the agents
    said: str  # by the first machine, to stderr
    seconds: float  # from the loss until the first agent ended
    logs: list[Path]  # on the first machine
    second: Path  # folder of the second machine
    reference: list[Path]  # logs of the first two trials in one process


@pytest.fixture(scope="module")
def loss(places, tmp_path_factory) -> Loss:
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc to find the workers of an agent")
    folder = tmp_path_factory.mktemp("machines")
    reference = run(write_data(folder / "reference"), folder / "reference logs", trials=2)
    assert reference.code == 0, reference.err
    homes = [folder / "first", folder / "second"]
    for home in homes:
        shutil.copytree(folder / "reference", home / "data")
    nowhere = homes[1] / "data" / "s_val_0.bin" / "logs"  # below a file: this folder cannot be made, even by root
    changed = {"trials": TRIALS, "rank_timeout": RANK_TIMEOUT}
    words = [arguments(home / "data", logs, **changed)
             for home, logs in zip(homes, (homes[0] / "logs", nowhere), strict=True)]  # fmt: skip
    port = free_port() if places[0].interface is None else "29500"
    agents: list[subprocess.Popen] = []
    try:
        for node, place in enumerate(places):
            agents.append(start_agent(place, node, words[node], (places[0].address, port)))
        deadline = time.monotonic() + PATIENCE
        while not trains_third(homes[0] / "logs"):
            assert time.monotonic() < deadline, "no third trial"
            assert agents[0].poll() is None, agents[0].communicate()[1]
            time.sleep(0.02)
        for pid in children(agents[1]):
            os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        _, said = agents[0].communicate(timeout=PATIENCE)
        seconds = time.monotonic() - begun
        agents[1].communicate(timeout=PATIENCE)
    finally:
        for agent in agents:
            if agent.poll() is None:
                for pid in (*children(agent), agent.pid):
                    os.kill(pid, signal.SIGKILL)
                agent.wait()
    logs = sorted(find_logs(homes[0] / "logs"), key=lambda log: read_events(log)[0]["trial"])
    return Loss([agent.returncode for agent in agents], said, seconds, logs, homes[1], reference.logs)


def losses(log: Path) -> list[float]:
    """Of all steps, then of the validations."""
    events = read_events(log)
    trained = [event["train_loss"] for event in events if event["event"] == "step"]
    assert len(trained) == STEPS
    return trained + [event["val_loss"] for event in events if event["event"] == "val"]


def test_two_machines_of_two_processes_give_the_losses_of_one_process(loss):
    """As four processes on one machine do, to the same tolerance."""
    assert len(loss.reference) == 2
    for log, alone in zip(loss.logs, loss.reference, strict=False):
        header, *_, end = read_events(log)
        assert (header["world_size"], end["status"]) == (4, "done")
        assert losses(log) == pytest.approx(losses(alone), rel=TOLERANCE)


def test_only_the_first_machine_needs_a_folder_for_logs(loss):
    assert sorted(path.name for path in loss.second.rglob("*")) == ["data", "s_train_0.bin", "s_train_1.bin",
                                                                   "s_val_0.bin"]  # fmt: skip
    assert len(loss.logs) >= 3


def test_a_machine_whose_workers_are_killed_ends_the_other_which_names_a_lost_rank(loss, places):
    assert 0 not in loss.codes, loss.codes
    assert loss.seconds < RANK_TIMEOUT + 60  # the launcher itself may take half a minute to end the last worker
    assert re.search(rf"rank [23] \({re.escape(places[1].host)}\b", loss.said), loss.said


def test_the_log_of_the_run_that_lost_a_machine_is_whole_and_says_that_it_is_unfinished(loss):
    assert read_run(loss.logs[-1]).unfinished


# ---- Data of one machine that are not those of the other


def both_end(folders: list[Path], logs: Path) -> list[str]:
    """What two ranks, each with its own data, print to stderr when both end with exit code 2 and no log."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [start(arguments(folder, logs, rank_timeout=RANK_TIMEOUT), RANK=str(rank), LOCAL_RANK="0", **shared)
             for rank, folder in enumerate(folders)]  # fmt: skip
    said = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert find_logs(logs) == []
    return said


def test_data_missing_on_one_machine_end_all_ranks_with_the_rank_that_lacks_them(tmp_path):
    said = both_end([write_data(tmp_path / "data"), tmp_path / "nothing"], tmp_path)
    assert re.search(rf"error: rank 1 \({re.escape(socket.gethostname())}\b.*\): .*nothing", "".join(said)), said
    assert "Traceback" not in "".join(said)


def test_data_that_differ_on_one_machine_end_all_ranks_with_the_rank_that_has_others(tmp_path):
    """Files of the same names and sizes: one token in one of them is another."""
    folders = [write_data(tmp_path / name) for name in ("first", "second")]
    shard = folders[1] / "s_train_0.bin"
    tokens = np.fromfile(shard, dtype=np.uint16)[512:]  # after a header of 1,024 bytes
    tokens[1] = (tokens[1] + 1) % BOS
    write_shard(shard, tokens)
    assert shard.stat().st_size == (folders[0] / shard.name).stat().st_size
    said = both_end(folders, tmp_path)
    assert re.search(rf"error: .*rank 1 \({re.escape(socket.gethostname())}\b", "".join(said)), said
    assert "Traceback" not in "".join(said)
