"""Runs of several ranks that break off: the same run at as many ranks, to rounding at others."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest
import small_run
import torch
from small_run import STEPS, arguments, write_data
from stub_trainer import logs_of, losses_of, read_events

import train_gpt
from runtime.checkpoint import checkpoints, load
from runtime.checks import same_bits
from runtime.run import Run

pytestmark = pytest.mark.usefixtures("two_layers", "last_state")

PATIENCE = 120  # seconds that processes on a busy machine may take
TOLERANCES = {"record42": 2e-4, "adamw": 2e-6}  # of every loss in float32
MANY = 400  # steps of a run that a signal breaks off
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = write_data(tmp_path_factory.mktemp("data"), train_documents=6000)
    small_run.run(folder, tmp_path_factory.mktemp("here"), steps=3)  # loads what torch loads late
    return folder


# ---- Ranks in forked processes


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
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.exit(train_gpt.main(words))


def terminate(rank: int, step: int, patch: pytest.MonkeyPatch) -> None:
    """SIGTERM to this rank alone, once it has done this step."""
    stepped = Run.stepped

    def acting(self, *arguments, **named):
        stepped(self, *arguments, **named)
        if self.steps_done == step and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

    patch.setattr(Run, "stepped", acting)


def start(count: int, data: Path, folder: Path, seeds: int = 0, **changed) -> list[BaseProcess]:
    """So many ranks with folders of their own and a random generator of the seed seeds + rank."""
    (folder / "said").mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(count):
        how = {"keep_model": "on", "resume": "auto", "rank_timeout": PATIENCE} | changed
        words = arguments(data, rank_folder(folder, rank), **how)
        torch.manual_seed(seeds + rank)
        given = (rank, words, variables if count > 1 else {}, folder / "said")
        ranks.append(FORK.Process(target=be_a_rank, args=given))
        ranks[-1].start()
    return ranks


def finish(ranks: list[BaseProcess], folder: Path) -> Ended:
    deadline = time.monotonic() + PATIENCE
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0))
        process.kill()  # one that hangs: its code then tells
        process.join()
    said = {}
    for kind in ("out", "err"):
        paths = [folder / "said" / f"{rank}.{kind}" for rank in range(len(ranks))]
        said[kind] = [path.read_text() for path in paths]
    return Ended([process.exitcode for process in ranks], **said)


def run(count: int, data: Path, folder: Path, stop: tuple[int, int] | None = None, **how) -> Ended:
    """Ranks to their end; `stop` is a rank that gets SIGTERM when it has done a step."""
    with pytest.MonkeyPatch.context() as patch:
        if stop is not None:
            terminate(*stop, patch)
        return finish(start(count, data, folder, **how), folder)


def checkpoints_of(folder: Path) -> list[Path]:
    (log, *_) = logs_of(folder)
    return checkpoints(folder / "checkpoints" / log.stem)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Folders of runs that nothing interrupts, by recipe, on two ranks."""
    folders = {recipe: tmp_path_factory.mktemp(recipe) for recipe in TOLERANCES}
    for recipe, folder in folders.items():
        ended = run(2, data, folder, recipe=recipe)
        assert ended.codes == [0, 0], ended
    return folders


# ---- What is the same, and what ends


@pytest.mark.parametrize("recipe", TOLERANCES)
def test_a_run_goes_on_at_any_number_of_ranks(recipe, data, whole, tmp_path):
    for count, stop in ((4, (0, 1)), (2, (1, 5)), (1, (0, 7)), (4, None)):
        ended = run(count, data, tmp_path, stop=stop, recipe=recipe)
        assert ended.codes == [143 if stop else 0] * count, ended
    ours, theirs = losses_of(*logs_of(tmp_path)), losses_of(*logs_of(whole[recipe]))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=TOLERANCES[recipe])
    said = [each["differences"] for each in read_events(*logs_of(tmp_path), kind="resume")]
    sizes = [[text for text in each if text.startswith("world_size")] for each in said]
    assert sizes == [["world_size 4 -> 2"], ["world_size 2 -> 1"], ["world_size 1 -> 4"]]


@pytest.mark.parametrize("recipe", TOLERANCES)
def test_at_the_same_number_of_ranks_it_is_the_same_run_to_the_bit(recipe, data, whole, tmp_path):
    stopped = run(2, data, tmp_path, stop=(1, 5), recipe=recipe)
    assert stopped.codes == [143, 143], stopped
    assert run(2, data, tmp_path, seeds=7, recipe=recipe).codes == [0, 0]
    assert losses_of(*logs_of(tmp_path)) == losses_of(*logs_of(whole[recipe]))
    ours, theirs = (load(checkpoints_of(each)[-1]) for each in (tmp_path, whole[recipe]))
    assert ours.state["step"] == theirs.state["step"] == STEPS
    assert same_bits(ours.model, theirs.model)
    assert same_bits(ours.optim, theirs.optim), "the generators of both ranks among them"


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_rank_saves_and_ends_all(who, data, tmp_path):
    ended = run(2, data, tmp_path, stop=(who, 6), steps=MANY)
    assert ended.codes == [143, 143], ended
    assert "Traceback" not in "".join(ended.out + ended.err)
    (end,) = read_events(*logs_of(tmp_path), kind="end")
    (saved,) = checkpoints_of(tmp_path)
    assert (end["status"], f"step_{end['steps']:06d}") == ("interrupted", saved.name)
    assert ended.out[0].count(f"interrupted after step {end['steps']}, saved in ") == 1
    assert ended.out[1] == ""


def test_only_the_first_rank_needs_folders_for_logs_and_checkpoints(whole):
    for folder in whole.values():
        assert not rank_folder(folder, 1).exists()
        assert len(logs_of(folder)) == 1


@pytest.mark.slow
def test_a_rank_that_is_lost_ends_the_others_in_time_and_the_run_goes_on(data, tmp_path):
    how = {"steps": 80, "val_every": 0, "rank_timeout": 10, "checkpoint_every": 2}
    ranks = start(2, data, tmp_path, **how)
    deadline = time.monotonic() + PATIENCE
    while not list(tmp_path.glob("checkpoints/*/step_*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks[1].kill()
    ended = finish(ranks, tmp_path)
    assert ended.codes == [1, -signal.SIGKILL], ended
    assert "rank" in ended.err[0]  # torchrun names the one that died
    assert "Traceback" not in ended.err[0]
    assert read_events(*logs_of(tmp_path), kind="end")[0]["status"] == "error"
    again = run(1, data, tmp_path, **how)
    assert again.codes == [0], again
    assert "resumes after step" in again.out[0]
    assert len(losses_of(*logs_of(tmp_path))[0]) == 80
