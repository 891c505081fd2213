"""What is said at the end of a run: which steps took much longer than others of their kind, and what that cost."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.log import RunLog, new_run_id
from runtime.progress import STUTTER_RATIO, Progress, find_stutters
from runtime.requests import Requests
from claims.runlog import read_run
from claims.steptimes import STUTTER_RATIO as RATIO_OF_REPORTS
from claims.steptimes import STUTTER_SPREADS, account, find_stages, read_timeline

HEADER = {"track": "tiny", "target": 1.0, "seed": 0, "trial": 0, "config_sha256": "a", "source_sha256": "b",
          "env": {"gpu_count": 0}}  # fmt: skip
MESSAGE = torch.tensor([2.5, 0.0, 0.0, 0.0])  # a loss, and no requests


def regular(step: int) -> float:
    """Milliseconds of a step: two stages, and an optimizer that moves on even steps."""
    return (100.0 if step <= 20 else 150.0) + 30 * (step % 2 == 0)


def steps_of(changed: dict[int, float]) -> list[tuple[int, int, float]]:
    return [(step, int(step > 20), changed.get(step, regular(step))) for step in range(1, 41)]


@pytest.fixture
def finish(tmp_path):
    """finish(changed) plays a run in which some steps took other times; returns its log's events and what was said."""

    def play(changed: dict[int, float], steps: range = range(1, 41)) -> tuple[list[dict], list[str]]:
        said: list[str] = []
        log = RunLog(tmp_path, new_run_id("tiny", 0, 0))
        log.begin(HEADER)
        progress = Progress(log, said.append, lambda verdict: None, lambda step, skip: {},
                            Requests(torch.device("cpu")), 40, 0.0)  # fmt: skip
        clock = 0.0
        for step, stage, ms in steps_of(changed)[steps[0] - 1 : steps[-1]]:
            clock += ms
            line = {"step": step, "tokens": step, "train_time_ms": clock, "step_ms": ms, "lr_mul": 1.0, "window": 1}
            progress.step_done(line | {"stage": stage}, MESSAGE, torch.zeros(1))
        progress.close()
        log.write("val", step=40, total_steps=40, val_loss=2.0, train_time_ms=clock)
        log.finish({"status": "done", "val_loss": 2.0})
        return [json.loads(text) for text in log.path.read_text().splitlines()], said

    return play


def test_a_slow_step_is_told_with_what_it_cost_against_its_own_kind(finish):
    events, said = finish({7: 912.0, 24: 400.0})
    told = [event for event in events if event["event"] == "stutter"]
    assert [(each["step"], each["step_ms"], each["median_ms"]) for each in told] == [(7, 912, 100), (24, 400, 180)]
    assert said[-1] == "stutters: 2 steps, 1.0 s lost (worst: step 7, 912 ms instead of 100)"


def test_without_a_slow_step_nothing_is_said(finish):
    events, said = finish({})
    assert "stutter" not in {event["event"] for event in events}
    assert not [text for text in said if "stutter" in text]


def test_a_stage_or_a_parity_that_takes_longer_is_no_stutter():
    slow = {step: 10 * regular(step) for step in range(2, 21, 2)}
    assert find_stutters(steps_of(slow)) == []


def test_after_a_resume_the_steps_of_this_process_alone_are_judged(finish):
    _, said = finish({7: 912.0, 33: 400.0}, steps=range(30, 41))
    assert said[-1] == "stutters: 1 step, 0.2 s lost (worst: step 33, 400 ms instead of 150)"


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=60))
def test_no_more_than_half_of_a_kind_stutters_and_each_beyond_the_ratio(ms):
    found = find_stutters((2 * number, 0, each) for number, each in enumerate(ms))
    assert len(found) <= len(ms) / 2
    assert all(each["step_ms"] > STUTTER_RATIO * each["median_ms"] for each in found)
    assert [each["step"] for each in found] == sorted(each["step"] for each in found)


def test_the_report_of_a_log_finds_the_same_stutters_as_the_run_that_wrote_it(finish, tmp_path):
    changed = {3: 151.0, 7: 912.0, 12: 200.0, 24: 400.0, 39: 226.0}
    events, _ = finish(changed)
    timeline = read_timeline(read_run(*tmp_path.glob("2*.jsonl")))
    assert timeline is not None
    reported = account(timeline, find_stages([timeline])).stutters
    assert [stutter.step for stutter in reported] == [event["step"] for event in events if event["event"] == "stutter"]
    assert (RATIO_OF_REPORTS, STUTTER_SPREADS) == (1.5, 6)
