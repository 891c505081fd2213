"""Which runs are judged together and which count: decided by what they are, never by their loss."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_model import configure

from claims.arms import PUBLIC_TARGETS, group_runs, leave_out_repeats, missing_seeds
from claims.runs import Run, Step, Validation

pytestmark = pytest.mark.core


def make_run(
    name: str, losses: dict[int, str], *, times: bool = True, folder: str = "logs", **facts
) -> Run:
    """A complete run of a text log unless `facts` say otherwise; losses as printed, by step."""
    points = []
    for step, loss in losses.items():
        points.append(Validation(step, float(loss), step * 50.0 if times else None))
    known = {
        "path": Path(folder) / f"{name}.txt", "run_id": name, "source": "source", "gpu_count": 8,
        "total_steps": 100, "unfinished": None,
    }  # fmt: skip
    return Run(**known | facts, validations=points)


def logged(name: str, losses: dict[int, str], *, seed: int, **facts) -> Run:
    """A run of a log of ours."""
    return make_run(name, losses, header={"event": "header"}, seed=seed, **facts)


def kept_names(runs: list[Run]) -> list[str]:
    return [run.run_id for run in leave_out_repeats(runs)[0]]


LONG = {0: "10.8258", 25: "4.01", 50: "3.61", 75: "3.41", 100: "3.2790"}
OTHER = LONG | {50: "3.62"}
TRAINED = [Step(1, 1.0, 10.828125), Step(2, 2.0, 10.5)]
FIRST = TRAINED[:1]  # which all untrained models may share


@pytest.mark.parametrize(("first", "second", "kept"), [
    (make_run("a", LONG), make_run("b", LONG), 1),
    (make_run("a", LONG), make_run("b", OTHER), 2),
    (make_run("a", {100: "3.2790"}), make_run("b", {100: "3.2790"}), 1),
    (make_run("a", {100: "3.2790"}), make_run("b", {100: "3.2790"}, times=False), 2),  # by chance
    (make_run("a", LONG), make_run("a", OTHER, folder="other"), 2),  # names of text logs are no ids
    (logged("a", LONG, seed=0), logged("a", OTHER, seed=1, folder="other"), 1),
    (logged("a", LONG, seed=0), logged("b", OTHER, seed=0), 1),
    (logged("a", LONG, seed=0), logged("b", LONG, seed=1), 1),
    (logged("a", LONG, seed=0, steps=TRAINED), logged("b", OTHER, seed=1, steps=TRAINED), 1),
    (logged("a", LONG, seed=0), logged("b", OTHER, seed=1), 2),
    (logged("a", LONG, seed=0, steps=FIRST), logged("b", OTHER, seed=1, steps=FIRST), 2),
    (make_run("a", LONG, seed=0), make_run("b", OTHER, seed=0), 1),
])  # fmt: skip
def test_copies_and_runs_of_one_seed_count_once(first, second, kept):
    for runs in ([first, second], [second, first]):
        counted, repeats = leave_out_repeats(runs)
        assert (len(counted), len(repeats)) == (kept, 2 - kept)
        for repeat in repeats:
            assert str(first.path) in repeat
            assert str(second.path) in repeat


drawn_runs = st.tuples(st.integers(0, 3), st.sampled_from(["3.1", "3.2", "3.3", "nan"]))


@given(st.lists(drawn_runs, max_size=8), st.randoms())
def test_which_run_of_a_seed_counts_depends_neither_on_its_loss_nor_on_the_order(drawn, random):
    runs, others = [], []
    for i, (seed, loss) in enumerate(drawn):
        runs.append(logged(f"{i}", {50: f"4.{i}", 100: loss}, seed=seed))
        others.append(logged(f"{i}", {50: f"4.{i}", 100: "3.0"}, seed=seed))
    random.shuffle(others)
    assert kept_names(runs) == kept_names(others)
    assert len(kept_names(runs)) == len({seed for seed, _ in drawn})


def test_an_unfinished_run_is_put_with_every_arm_that_it_may_belong_to():
    arms = [make_run("a", LONG, source="a"), make_run("b", LONG, source="b")]
    from_a = make_run("cut", {0: "10.8"}, source="a", unfinished="cut")
    from_any = make_run(
        "torn", {}, source=None, gpu_count=None, total_steps=None, unfinished="no header"
    )
    from_none = make_run("lost", {0: "10.8"}, source="c", unfinished="cut")
    groups = group_runs([from_a, from_any, *arms, from_none])
    names = [[run.run_id for run in runs] for runs in groups]
    assert names == [["a", "cut", "torn"], ["b", "torn"], ["lost"]]


@pytest.mark.parametrize(("seeds", "missing"), [
    ([0, 1, 2, 3], []), ([5, 4, 7], [6]), ([0, 2, 5], [1, 3, 4]), ([42, 1337, 7], []), ([None], []),
])  # fmt: skip
def test_gaps_in_a_numbering_are_found_where_there_is_one(seeds, missing):
    assert missing_seeds([make_run("a", LONG, seed=seed) for seed in seeds]) == missing


def test_a_public_track_has_the_target_of_ours():
    for name, track in {"track_1_short": "short", "track_3_optimization": "steps"}.items():
        assert PUBLIC_TARGETS[name] == configure(track).target
