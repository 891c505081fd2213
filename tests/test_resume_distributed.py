"""Runs of several ranks that are broken off and go on: at the same number of ranks bit for bit, at another to rounding.

The ranks are forked from this process, which has torch already, and each has folders of its own.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest
import small_run
import torch
from small_run import STEPS, arguments, find_logs, read_events, write_data

import runtime.environment
import train_gpt
from runtime import requests
from runtime.checkpoint import checkpoints, newest
from runtime.progress import Progress
from runtime.state import same_bits
from claims.runlog import read_run

PATIENCE = 120  # seconds that processes on a busy machine may take
TOLERANCES = {"record42": 2e-4, "adamw": 2e-6}  # of every loss in fp32, as in test_train_distributed.py
MANY = 400  # steps of a run that a signal breaks off
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module", autouse=True)
def _fast():
    """Two layers with all that layers can have, and no measurement of this machine's peak rate."""
    layer = train_gpt.Layer
    with pytest.MonkeyPatch.context() as patch:
        layers = [layer(value_embed=0), layer(window="long", value_embed=1, skip_from=0, backout=True)]
        patch.setitem(train_gpt.LAYERS, "tiny", layers)
        patch.setattr(runtime.environment, "measured_gemm_flops", lambda device, dtype: 1e9)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = write_data(tmp_path_factory.mktemp("data"), train_documents=6000)
    small_run.run(folder, tmp_path_factory.mktemp("here"), steps=3)  # what torch loads late is then there for all
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Ranks in forked processes


class Ended(NamedTuple):
    codes: list[int]
    out: list[str]
    err: list[str]


def rank_folder(folder: Path, rank: int) -> Path:
    return folder if rank == 0 else folder / f"rank_{rank}"


def be_a_rank(rank: int, words: list[str], variables: dict[str, str], folder: Path) -> None:
    os.environ |= variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    for number, kind in enumerate(("out", "err"), 1):
        os.dup2(os.open(folder / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.exit(train_gpt.main(words))


def when_done(rank: int, step: int, action: Callable[[Progress], object], patch: pytest.MonkeyPatch) -> None:
    """On this rank do it once it has done this step."""
    stepped = Progress.step_done

    def acting(self, line, *rest):
        if line["step"] == step and os.environ["RANK"] == str(rank):
            action(self)
        return stepped(self, line, *rest)

    patch.setattr(Progress, "step_done", acting)


def be_signalled(progress: Progress) -> None:
    """SIGTERM to this process alone; return when it has heard."""
    os.kill(os.getpid(), signal.SIGTERM)
    while not progress._requests.send(torch.zeros(()))[1:].any():
        time.sleep(0.001)


def start(count: int, data: Path, folder: Path, seeds: int = 0, **changed: object) -> list[BaseProcess]:
    """So many ranks: copies of this process but for their folders and a random generator of the seed seeds + rank."""
    (folder / "said").mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = []
    for rank in range(count):
        words = arguments(data, rank_folder(folder, rank), **{"keep_model": "on", "resume": "auto"} | changed)
        variables = shared if count > 1 else {}
        torch.manual_seed(seeds + rank)
        ranks.append(FORK.Process(target=be_a_rank, args=(rank, words, variables, folder / "said")))
        ranks[-1].start()
    return ranks


def finish(ranks: list[BaseProcess], folder: Path) -> Ended:
    deadline = time.monotonic() + PATIENCE
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0))
        process.kill()  # one that hangs: its code then tells
        process.join()
    said = [[(folder / "said" / f"{rank}.{kind}").read_text() for rank in range(len(ranks))] for kind in ("out", "err")]
    return Ended([process.exitcode for process in ranks], *said)


def run(count: int, data: Path, folder: Path, stop: tuple[int, int] | None = None, **how: object) -> Ended:
    """Ranks to their end; `stop` is a rank that gets SIGTERM when it has done a step."""
    with pytest.MonkeyPatch.context() as patch:
        if stop is not None:
            when_done(*stop, be_signalled, patch)
        return finish(start(count, data, folder, **how), folder)


def has_done(folder: Path, step: int) -> bool:
    return any(f'"step": {step}, "tokens"' in log.read_text() for log in find_logs(folder))


def losses(folder: Path) -> tuple[list[float], list[float]]:
    found = read_run(*find_logs(folder))
    assert found.complete, found.unfinished
    return [step.train_loss for step in found.steps], [loss for _, loss in found.losses]


# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Folders of runs that nothing interrupts, by recipe, on two ranks."""
    folders = {recipe: tmp_path_factory.mktemp(recipe) for recipe in TOLERANCES}
    for recipe, folder in folders.items():
        ended = run(2, data, folder, recipe=recipe)
        assert ended.codes == [0, 0], ended
    return folders


@pytest.mark.parametrize("recipe", TOLERANCES)
def test_a_run_goes_on_at_any_number_of_ranks(recipe, data, whole, tmp_path):
    for count, stop in ((4, (0, 1)), (2, (1, 5)), (1, (0, 7)), (4, None)):
        ended = run(count, data, tmp_path, stop=stop, recipe=recipe)
        assert ended.codes == [143 if stop else 0] * count, ended
    for ours, theirs in zip(losses(tmp_path), losses(whole[recipe]), strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCES[recipe])
    told = [event["differences"] for event in read_events(*find_logs(tmp_path)) if event["event"] == "resume"]
    sizes = [[text for text in each if text.startswith("world_size")] for each in told]
    assert sizes == [["world_size 4 -> 2"], ["world_size 4 -> 1"], []]


@pytest.mark.parametrize("recipe", TOLERANCES)
def test_at_the_same_number_of_ranks_it_is_the_same_run_bit_for_bit(recipe, data, whole, tmp_path):
    stopped = run(2, data, tmp_path, stop=(1, 5), recipe=recipe)
    assert stopped.codes == [143, 143], stopped
    assert run(2, data, tmp_path, seeds=7, recipe=recipe).codes == [0, 0]
    assert losses(tmp_path) == losses(whole[recipe])
    (ours, theirs) = (newest(checkpoints_of(folder), pytest.fail)[1] for folder in (tmp_path, whole[recipe]))
    assert ours.state["step"] == theirs.state["step"] == STEPS
    assert same_bits(ours.model, theirs.model)
    assert same_bits(ours.optim, theirs.optim)


def checkpoints_of(folder: Path) -> Path:
    (log,) = find_logs(folder)
    return folder / "checkpoints" / log.stem


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_rank_saves_and_ends_all(who, data, tmp_path):
    ended = run(2, data, tmp_path, stop=(who, 6), steps=MANY)
    assert ended.codes == [143, 143], ended
    assert "Traceback" not in "".join(ended.out + ended.err)
    (log,) = find_logs(tmp_path)
    assert [event["status"] for event in read_events(log) if event["event"] == "end"] == ["interrupted"]
    (saved,) = checkpoints(checkpoints_of(tmp_path))
    assert saved.name == "step_000008"
    assert ended.out[0].count("interrupted after step 8, saved in ") == 1
    assert ended.out[1] == ""


def test_only_the_first_rank_has_or_needs_folders_for_logs_and_checkpoints(whole):
    for folder in whole.values():
        assert not rank_folder(folder, 1).exists()
        assert len(find_logs(folder)) == 1


def test_a_run_killed_on_all_ranks_goes_on_from_its_last_checkpoint(data, whole, tmp_path):
    ranks = start(2, data, tmp_path, checkpoint_every=2, recipe="adamw", steps=MANY)
    deadline = time.monotonic() + PATIENCE
    while not list(tmp_path.glob("checkpoints/*/step_*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in ranks:
        process.kill()
    finish(ranks, tmp_path)
    log = checkpoints_of(tmp_path)
    saved = checkpoints(log)[-1]
    ended = run(2, data, tmp_path, stop=(0, int(saved.name[5:]) + 1), recipe="adamw", steps=MANY)
    assert ended.codes == [143, 143], ended
    (event,) = [event for event in read_events(*find_logs(tmp_path)) if event["event"] == "resume"]
    assert event["checkpoint"] == saved.name
    found = read_run(*find_logs(tmp_path))
    standing = {step.step: step.train_loss for step in found.steps}
    assert all(standing[step.step] == step.train_loss for step in found.resumes[0].redone if step.step in standing)


def test_a_checkpoint_of_another_model_ends_all_ranks_with_one_message(data, tmp_path):
    run(2, data, tmp_path, stop=(0, 1))
    folder = checkpoints_of(tmp_path)
    ended = run(2, data, tmp_path, resume=folder, resume_anyway="on", dim=48)
    assert set(ended.codes) <= {1, 2}, ended
    assert "the checkpoint is of another model" in ended.err[0]
    assert "Traceback" not in "".join(ended.err)


def test_a_second_signal_ends_a_rank_that_waits_for_one_that_hangs(data, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "ECHO_SECONDS", 0.2)
        when_done(1, 3, lambda progress: time.sleep(PATIENCE), patch)
        waiting, hanging = start(2, data, tmp_path)
    deadline = time.monotonic() + PATIENCE
    while not has_done(tmp_path, 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(2):
        time.sleep(0.5)
        os.kill(waiting.pid, signal.SIGTERM)
    waiting.join(PATIENCE / 4)
    hanging.kill()
    assert finish([waiting, hanging], tmp_path).codes == [143, -signal.SIGKILL]
