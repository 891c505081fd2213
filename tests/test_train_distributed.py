"""The same run on 1, 2, 4 and 8 processes: the same tokens, losses equal to rounding."""

import os
import signal
from functools import cache, partial
from pathlib import Path

import pytest
from small_ranks import Scenario, play, record
from small_run import (
    ROWS,
    SEQUENCE,
    STEPS,
    arguments,
    find_logs,
    read_events,
    run,
    start,
    two_layers,
    write_data,
)

import train_gpt
from claims.runlog import read_run

pytestmark = pytest.mark.usefixtures("two_layers")

PATIENCE = 300  # seconds that processes on a busy machine may take

# Bounds on the relative difference of every loss of 12 steps. Measured on 2 and 4 processes: fp32
# with adamw 1e-7, with record42 2e-5 (bf16 orthogonalization), bf16 3e-4.
TOLERANCES = {
    ("float32", "adamw"): 2e-6,
    ("float32", "record42"): 2e-4,
    ("bfloat16", "record42"): 2e-3,
}

RANKS = (2, 4)
TORCHS_OWN = {"torch_muon": "muon", "torch_adamw": "adamw"}  # and the recipe with its rates
EIGHT = {"batch_tokens": 8 * SEQUENCE, "micro_batch": 4 * SEQUENCE}
UNEVEN = {"batch_tokens": 3 * SEQUENCE, "micro_batch": SEQUENCE}


def train(name, changed):
    """What each rank does when this file is run as a script, in the folder that the tests name."""
    folder = Path(os.environ["FOLDER_OF_THE_TESTS"])
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    with two_layers():
        return train_gpt.main(arguments(folder / "data", folder / name, **changed))


def scenario(name, ranks, **changed):
    return Scenario(partial(train, name, changed), tuple(range(ranks)), ranks)


SCENARIOS = {"eight": scenario("eight", 8, **EIGHT), "uneven": scenario("uneven", 2, **UNEVEN)}
for dtype, recipe in TOLERANCES:
    for ranks in RANKS:
        name = f"{dtype} {recipe} {ranks}"
        SCENARIOS[name] = scenario(name, ranks, dtype=dtype, recipe=recipe)
for name, recipe in TORCHS_OWN.items():
    SCENARIOS[name] = scenario(name, 2, optimizer=name, recipe=recipe)

if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  # which every rank would import for itself

    play(SCENARIOS, in_turn=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def data(folder):
    return write_data(folder / "data")


@pytest.fixture(scope="module")
def left(folder, data):
    """What the ranks of each scenario left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLDER_OF_THE_TESTS", str(folder))
        return record(__file__)


@pytest.fixture(scope="module")
def events(folder, data, left):
    """Events of the run with a dtype and a recipe on so many processes."""

    @cache
    def events(dtype, recipe, ranks):
        name = f"{dtype} {recipe} {ranks}"
        if ranks == 1:
            assert run(data, folder / name, dtype=dtype, recipe=recipe).code == 0
        else:
            assert [rank.code for rank in left[name]] == [0] * ranks, left[name]
        (log,) = find_logs(folder / name)  # one log, whatever the number of processes
        return read_events(log)

    return events


def losses(events):
    trained = [event["train_loss"] for event in events if event["event"] == "step"]
    return trained, [event["val_loss"] for event in events if event["event"] == "val"]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("dtype", "recipe"), TOLERANCES)
def test_more_processes_give_the_losses_of_one(dtype, recipe, ranks, events):
    one, several = (losses(events(dtype, recipe, count)) for count in (1, ranks))
    assert len(several[0]) == STEPS
    for alone, shared in zip(one, several, strict=True):
        assert shared == pytest.approx(alone, rel=TOLERANCES[dtype, recipe])
    # Before the first step only the tokens and the order of the sum count.
    assert several[0][0] == pytest.approx(one[0][0], rel=1e-6)


@pytest.mark.parametrize("name", TORCHS_OWN)
def test_an_optimizer_of_torch_gives_the_losses_of_one_process_on_two(name, folder, data, left):
    alone = run(data, folder / f"{name} alone", optimizer=name, recipe=TORCHS_OWN[name])
    assert [rank.code for rank in left[name]] == [0] * 2, left[name]
    trained, validated = losses(read_events(find_logs(folder / name)[0]))
    assert len(trained) == STEPS
    assert trained + validated == pytest.approx(alone.losses(), rel=2e-4)


def test_eight_processes_give_the_losses_of_one_though_half_of_them_have_nothing_to_validate(
    folder, data, left
):
    alone = run(data, folder / "alone", **EIGHT)
    assert [rank.code for rank in left["eight"]] == [0] * 8, left["eight"]
    header, *rest = read_events(find_logs(folder / "eight")[0])
    assert (header["world_size"], header["micro_batch"], header["grad_accum"]) == (8, SEQUENCE, 1)
    trained, validated = losses(rest)
    assert len(trained) == STEPS
    tolerance = TOLERANCES["float32", "record42"]
    assert trained + validated == pytest.approx(alone.losses(), rel=tolerance)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_log_counts_processes_and_the_tokens_of_all(ranks, events):
    header, *rest = events("float32", "record42", ranks)
    shape = (header["world_size"], header["micro_batch"], header["grad_accum"])
    assert shape == (ranks, ROWS * SEQUENCE // ranks, 1)
    tokens = [event["tokens"] for event in rest if event["event"] == "step"]
    assert tokens == [ROWS * SEQUENCE * n for n in range(1, STEPS + 1)]
    assert rest[-1]["status"] == "done"


def test_processes_that_cannot_share_a_batch_are_refused(folder, left):
    assert [rank.code for rank in left["uneven"]] == [2, 2]
    said = "".join(rank.err for rank in left["uneven"])
    assert "world size 2 does not divide 3 rows a step; start one of 1, 3 ranks" in said
    assert "--track short" in said
    assert find_logs(folder / "uneven") == []


def test_torchrun_starts_ranks_that_share_a_run_and_end_it_in_order_when_it_is_ended(tmp_path):
    data = write_data(tmp_path / "data", train_documents=6000)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    process = start(arguments(data, tmp_path / "logs", steps=400), launcher)
    said = ""
    while "step 5/400 | validation" not in said:
        said = process.stdout.readline()
        assert said, process.stderr.read()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    (log,) = find_logs(tmp_path / "logs")
    assert read_events(log)[0]["world_size"] == 2
    assert read_run(log).unfinished == "ended with status interrupted"
    registered = [line["event"] for line in read_events(log.with_name("registry.jsonl"))]
    assert registered == ["start", "end"]
