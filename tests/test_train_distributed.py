"""The same run on 1, 2, 4 and 8 ranks, whole or resumed: the same tokens, the same losses."""

import os
import signal
import subprocess
import sys
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest
import small_run
import torch
from small_ranks import Scenario, play, record
from small_run import (
    ROOT,
    ROUNDING,
    ROWS,
    SEQUENCE,
    STEPS,
    arguments,
    logs_of,
    losses_of,
    read_events,
    run,
    write_data,
)

import train_gpt
from claims.logs import read_runs
from runtime.warmup import same_bits

pytestmark = pytest.mark.usefixtures("two_layers")

EIGHT_ROWS = {"batch_tokens": 8 * SEQUENCE, "micro_batch": 4 * SEQUENCE}
ADAMW = {"recipe": "adamw"}
TIED = {"stages": "tied", "counted_ngrams": 0, "embed_std": 0.1, "val_every": 3}
# Untied after step 6, and with counts of n-grams.
RESUMED = {"stages": "one_target", "embed_std": 0.1, "val_every": 3, "keep_model": "on",
           "resume": "auto"}  # fmt: skip
MANY = 400  # steps of a run that a signal breaks off

# Ranks, and settings.
RUNS = {
    "adamw on 4": (4, ADAMW),
    "record89 on 8, half of them without anything to validate": (8, EIGHT_ROWS),
    "bf16 on 2": (2, {"dtype": "bfloat16"}),
    "a growing batch on 2": (2, ADAMW | {"stages": "growing"}),
    "torch.optim.Muon on 2": (2, {"optimizer": "torch_muon", "recipe": "muon"}),
    "a head that is tied at first on 2": (2, TIED),
}


class Start(NamedTuple):
    """One start of all ranks. Several of one folder are one run that was broken off."""

    folder: str
    ranks: int
    changed: dict
    stop: tuple[int, int, int] = (-1, 0, 0)  # a rank gets, when it has done a step, a signal
    seeds: int = 0  # the random generator of each rank has the seed seeds + rank


STARTS = [Start(name, ranks, changed) for name, (ranks, changed) in RUNS.items()]
STARTS.append(Start("whole", 2, RESUMED))
for ranks, rank, step in ((4, 0, 1), (2, 1, 5), (1, 0, 7)):
    STARTS.append(Start("at any number", ranks, RESUMED, (rank, step, signal.SIGTERM)))
STARTS.append(Start("at any number", 4, RESUMED))
STARTS.append(Start("at two", 2, RESUMED, (1, 5, signal.SIGTERM)))
STARTS.append(Start("at two", 2, RESUMED, seeds=7))
LOST = RESUMED | {"steps": 80, "val_every": 0, "rank_timeout": 10, "checkpoint_every": 2}
LOST_STARTS = [Start("lost", 2, LOST, (1, 20, signal.SIGKILL)), Start("lost", 1, LOST)]


def rank_folder(folder, rank):
    return folder if rank == 0 else folder / f"rank_{rank}"


def be_a_rank(folder, begin):
    """What each rank does when this file is run as a script."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank)
    words = arguments(folder / "data", rank_folder(folder / begin.folder, rank), **begin.changed)
    stopped, step, number = begin.stop
    breaking_off = small_run.acting({step: small_run.signalled(number)} if rank == stopped else {})
    torch.manual_seed(begin.seeds + rank)
    with small_run.two_layers(), small_run.quick_collection(), small_run.kept_state(), breaking_off:
        return train_gpt.main(words)


def scenarios(folder, starts):
    """Each start by its folder and its number among those of the folder."""
    found = {}
    for begin in starts:
        number = sum(key.startswith(f"{begin.folder}, ") for key in found)
        ranks = range(begin.ranks)
        key = f"{begin.folder}, {number}"
        found[key] = Scenario(partial(be_a_rank, folder, begin), ranks, begin.ranks)
    return found


if __name__ == "__main__":
    import torch._dynamo  # which every rank would import for itself

    folder, *lose = sys.argv[1:]
    play(scenarios(Path(folder), LOST_STARTS if lose else STARTS), in_turn=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def data(folder):
    return write_data(folder / "data", train_documents=6000)


@pytest.fixture(scope="module")
def left(folder, data):
    """What the ranks of each start left."""
    return record(__file__, folder)


def codes(left, name, number=0):
    return [rank.code for rank in left[f"{name}, {number}"]]


@pytest.mark.parametrize("name", RUNS)
def test_more_processes_give_the_losses_of_one(name, folder, data, left):
    ranks, changed = RUNS[name]
    assert codes(left, name) == [0] * ranks, left[f"{name}, 0"]
    assert not rank_folder(folder / name, 1).exists(), "only the first rank needs folders"
    (log,) = logs_of(folder / name)  # one log, whatever the number of processes
    header, *events = read_events(log)
    tokens = changed.get("batch_tokens", ROWS * SEQUENCE)
    shape = (header["world_size"], header["micro_batch"] * header["grad_accum"])
    assert shape == (ranks, tokens // ranks)
    steps = [event for event in events if event["event"] == "step"]
    batches = [tokens] * STEPS
    if changed.get("stages") == "growing":
        batches = [tokens // 2] * 9 + [tokens] * 3  # 0.7 of 12 steps, rounded up
    assert [step["tokens"] for step in steps] == list(accumulate(batches))
    assert header["train_tokens"] == sum(batches)
    losses = [step["train_loss"] for step in steps]
    losses += [event["val_loss"] for event in events if event["event"] == "val"]
    outcome = run(data, folder / f"{name}, alone", **changed)
    alone = outcome.losses()
    bf16 = name in ("bf16 on 2", "torch.optim.Muon on 2")  # which multiplies in bf16
    assert losses == pytest.approx(alone, rel=ROUNDING["bfloat16" if bf16 else "float32"])
    # Before the first step only the tokens and the order of the sum count.
    assert losses[0] == pytest.approx(alone[0], rel=ROUNDING["float32"])
    (expected,) = outcome.events("end")
    for fact in ("train_tokens_sha256", "targets_scored"):
        assert events[-1][fact] == expected[fact]
    assert events[-1]["checks"]["causality_trained"] == 0


def test_torchrun_starts_ranks_that_share_a_run_and_end_in_order_when_it_is_ended(data, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_gpt.py"]
    words = arguments(data, tmp_path / "logs", steps=MANY)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, *launcher, *words], cwd=ROOT, **pipes)
    said = ""
    while "step 5/400 | validation" not in said:
        said = process.stdout.readline()
        assert said, process.stderr.read()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode != 0
    (log,) = logs_of(tmp_path / "logs")
    assert read_events(log)[0]["world_size"] == 2
    assert read_runs(log)[0].unfinished == "ended with status interrupted"
    registered = [line["event"] for line in read_events(log.with_name("registry.jsonl"))]
    assert registered == ["start", "end"]


# ---- Runs that break off


def test_a_signal_to_one_rank_ends_all_and_the_run_resumes_at_any_number(folder, left):
    name = "at any number"
    ended = [codes(left, name, number) for number in range(4)]
    assert ended == [[143] * 4, [143] * 2, [143], [0] * 4]
    for number, log in enumerate(logs_of(folder / name)[:3]):
        first, *others = left[f"{name}, {number}"]
        (end,) = read_events(log, kind="end")
        assert end["status"] == "interrupted"
        assert first.out.count(f"interrupted after step {end['steps']}, saved in ") == 1
        assert not any(rank.out for rank in others)
        assert not any("Traceback" in rank.out + rank.err for rank in (first, *others))
    resumed, whole = (losses_of(*logs_of(folder / each)) for each in (name, "whole"))
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=ROUNDING["float32"])
    changes = []
    for event in read_events(*logs_of(folder / name)):
        changes += [text for text in event.get("differences", []) if text.startswith("world_size")]
    assert changes == ["world_size 4 -> 2", "world_size 2 -> 1", "world_size 1 -> 4"]


def test_at_the_same_number_of_ranks_it_is_the_same_run_to_the_bit(folder, left):
    folders = folder / "at two", folder / "whole"
    assert codes(left, "at two") == [143, 143]
    assert codes(left, "at two", 1) == [0, 0]
    ours, theirs = (losses_of(*logs_of(each)) for each in folders)
    assert ours == theirs
    ours, theirs = (torch.load(each / "checkpoints" / "last_state.pt") for each in folders)
    assert same_bits(ours, theirs), "the generators of both ranks among them"


@pytest.mark.slow
def test_a_rank_that_is_lost_ends_the_others_in_time_and_the_run_resumes(folder, data):
    left = record(__file__, folder, "lose")
    assert codes(left, "lost") == [1, -signal.SIGKILL], left
    survivor = left["lost, 0"][0].err
    assert "rank" in survivor  # torchrun names the one that died
    assert "Traceback" not in survivor
    first, *_ = logs_of(folder / "lost")
    assert read_events(first, kind="end")[0]["status"] == "error"
    assert codes(left, "lost", 1) == [0], left
    assert "resumes after step" in left["lost, 1"][0].out
    assert len(losses_of(*logs_of(folder / "lost"))[0]) == 80
