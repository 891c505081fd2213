"""The comparison of two arms: against scipy, published lists of times, and logs whose difference is known beforehand.

The lists of times and losses are those of public records; only numbers are taken.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from claims import steptimes
from scripts import compare
from claims.runlog import LogError, read_run
from claims.steptimes import Account, Stutter, Typical

Captured = pytest.CaptureFixture[str]
Reader = Callable[..., dict]  # the JSON that a command line prints
SCRIPT = Path(compare.__file__)
XSA = ([85.993, 85.850, 85.967, 85.919, 85.890, 85.905, 85.788],
       [85.188, 85.258, 85.313, 85.251, 85.299, 85.198, 85.206, 85.260, 85.213, 85.123, 85.081])  # fmt: skip
FP8_DOWN = (
    [80.694, 80.720, 80.659, 80.818, 80.747, 80.795, 80.763, 80.678, 80.610, 80.693, 80.710, 80.840, 80.745],
    [79.532, 79.682, 80.231, 79.536, 79.641, 79.593, 79.653, 79.658, 79.814, 79.629, 79.539, 79.656, 79.740],
)
FP8_DOWN_LOSSES = (
    [3.2821, 3.2802, 3.2758, 3.2769, 3.2775, 3.2768, 3.2780, 3.2778, 3.2817, 3.2767, 3.2796, 3.2775, 3.2766],
    [3.2775, 3.2779, 3.2793, 3.2791, 3.2769, 3.2781, 3.2772, 3.2775, 3.2783, 3.2775, 3.2806, 3.2816, 3.2773],
)
FP8_UP = ([84.604, 84.677, 84.776, 84.513, 84.576, 84.684, 84.631, 84.618],
          [83.855, 83.750, 83.871, 83.900, 83.852, 83.901, 83.937, 83.763])  # fmt: skip
FIX_LR = ([143.018, 142.641, 142.789, 143.072, 143.241],
          [139.441, 139.780, 139.889, 139.464, 139.761, 139.411, 139.555, 139.570, 139.804, 139.847])  # fmt: skip
BETA2 = ([86.694, 86.743, 86.702, 86.821, 86.697, 86.796, 86.701, 86.766], [86.774, 86.759, 86.815, 86.755])
PAIRED_HEAD = [92.710, 92.235, 92.554, 92.872, 92.475, 92.557, 92.834, 92.770]
BEFORE_1480 = [92.611, 92.412, 92.575, 92.550, 92.568, 92.555, 92.550, 92.572]
BEFORE_1490 = [92.928, 92.871, 93.043, 93.240]
LENGTHS = {  # steps -> final losses of one recipe
    "mudd": {1430: [3.2848, 3.2861, 3.2882, 3.2889, 3.2887, 3.2858, 3.2856, 3.2859, 3.2861, 3.2873],
             1480: [3.2795, 3.2782, 3.2793, 3.2792, 3.2810, 3.2780, 3.2792, 3.2771, 3.2774, 3.2786]},
    "xsa": {1450: [3.2833, 3.2822, 3.2845, 3.2845, 3.2837, 3.2829, 3.2835, 3.2828, 3.2817, 3.2825],
            1480: [3.2793, 3.2773, 3.2788, 3.2769, 3.2795, 3.2815, 3.2805, 3.2796, 3.2808, 3.2799]},
    "gated": {1335: [3.2843, 3.2855, 3.2834, 3.2883, 3.2835, 3.2858, 3.2827, 3.2852, 3.2842],
              1385: [3.2804, 3.2796, 3.2773, 3.2781, 3.2778, 3.2786, 3.2762, 3.2800, 3.2788, 3.2773]},
    "paired": {1480: [3.2788, 3.2788, 3.2804, 3.2795, 3.2804, 3.2820, 3.2775, 3.2826],
               1490: [3.2777, 3.2772, 3.2796, 3.2781]},
}  # fmt: skip


# ---- Logs


def write_log(
    path: Path, ms: Sequence[float], loss: float = 3.28, wait: float = 0.0, minute: int | None = None,
    torch: str = "2.10.0", source: str = "a", validate: Sequence[int] = (),
) -> Path:  # fmt: skip
    """A public text log of steps that take so many milliseconds; `wait` comes on top before each validation."""
    total, now = len(ms), 0.0
    lines = [source, "=" * 100, "Running Python 3.11.10", f"Running PyTorch {torch} compiled for CUDA 12.8"]
    lines += [f"Tue May 19 19:{minute:02}:00 2026"] if minute is not None else []
    lines += ["=" * 100, f"step:0/{total} val_loss:10.8260 train_time:0.0000ms step_avg:nan"]
    for step, own in enumerate(ms, 1):
        now += own
        lines.append(f"step:{step}/{total} train_time:{now:.4f}ms step_avg:{now / step:.4f}ms")
        if step in (*validate, total):
            now += wait
            value = loss if step == total else 5.0
            lines.append(f"step:{step}/{total} val_loss:{value:.4f} train_time:{now:.4f}ms step_avg:{now / step:.4f}ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def write_json_log(path: Path, steps: Sequence[tuple[float, int, int]]) -> Path:
    """One of our logs; steps are (milliseconds, stage, window)."""
    events = [{"event": "header", "schema": 1, "run_id": path.stem, "track": "tiny", "target": 3.3, "seed": 0,
               "trial": 0, "source_sha256": "ab", "config_sha256": "cd", "env": {"gpu_count": 0}}]  # fmt: skip
    now = 0.0
    for step, (ms, stage, window) in enumerate(steps, 1):
        now += ms
        events.append({"event": "step", "step": step, "train_time_ms": now, "stage": stage, "window": window,
                       "skipped": False, "train_loss": None})  # fmt: skip
    last = {"train_time_ms": now, "val_loss": 3.2}
    events.append({"event": "val", "step": len(steps), "total_steps": len(steps), **last})
    events.append({"event": "end", "status": "done", "steps": len(steps), "reached": True, "peak_mib": None, **last})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event | {"t_ms": 0.0}) + "\n" for event in events))
    return path


def arm(folder: Path, runs: Sequence[Sequence[float]], **settings: object) -> str:
    for i, ms in enumerate(runs):
        write_log(folder / f"{i}.txt", ms, **settings)
    return str(folder)


@pytest.fixture
def report(capsys: Captured) -> Reader:
    """What --json prints."""

    def call(*words: object) -> dict:
        compare.main([*map(str, words), "--json"])
        return json.loads(capsys.readouterr().out)

    return call


def noisy(seed: int, runs: int, steps: int, ms: float, spread: float = 0.3) -> list[list[float]]:
    return (ms + spread * np.random.default_rng(seed).standard_normal((runs, steps))).tolist()


# ---- The difference of times


def typed(times: Sequence[float]) -> list[str]:
    return ["--times", ",".join(map(str, times))]


@pytest.mark.parametrize(
    ("old", "new", "level", "published"),
    [
        (*XSA, 0.95, {"mean": -0.6844, "low": -0.757, "high": -0.612, "t": -20.359, "df": 13.09, "p_less": 1.36e-11}),
        (*FP8_DOWN, 0.99, {"mean": -1.0437, "low": -1.202, "high": -0.885, "df": 15.0, "p_less": 2.46e-12}),
        (*FIX_LR, 0.95, {"mean": -3.300, "low": -3.591, "high": -3.009}),
        (*BETA2, 0.95, {"mean": 0.03575, "p_less": 0.930}),
        (BEFORE_1490, PAIRED_HEAD, 0.95, {"mean": -0.3946, "p_less": 0.00382}),
        (BEFORE_1480, PAIRED_HEAD, 0.95, {"mean": 0.07675, "p_less": 0.823}),
        (*FP8_UP, 0.95, {"mean": -0.78125, "low": -0.8596, "high": -0.7029}),
    ],
)
def test_published_lists_give_the_published_difference_and_scipys(
    report: Reader, old: list[float], new: list[float], level: float, published: dict[str, float]
) -> None:
    found = report(*typed(old), *typed(new), "--level", level)["comparisons"][0]["seconds"]
    test = reference.ttest_ind(new, old, equal_var=False, alternative="two-sided")
    assert (found["low"], found["high"]) == pytest.approx(tuple(test.confidence_interval(level)), rel=1e-9)
    assert {name: found[name] for name in published} == pytest.approx(published, rel=2e-3, abs=1e-12)
    assert compare.main([*typed(old), *typed(new)]) == (0 if found["p_less"] < 0.025 else 1)


def test_the_slow_run_of_fp8_down_is_noted_and_kept(report: Reader) -> None:
    b = report(*typed(FP8_DOWN[0]), *typed(FP8_DOWN[1]))["comparisons"][0]["b"]
    assert b["n"] == 13
    assert ["80.231" in note and "0.00041" in note for note in b["notes"]] == [True]


def test_typed_lists_are_marked_unverified(capsys: Captured) -> None:
    compare.main([*typed([142.9, 143.0]), *typed([139.6, 139.7]), "--losses", "3.279,3.280", "--losses", "3.278,3.279"])
    out = capsys.readouterr().out
    assert out.count("UNVERIFIED") == 2
    assert "B is 3.300 s faster than A (95 % interval 2.996 to 3.604 s)." in out
    assert "loss: -0.00100" in out


# ---- What the difference is made of


def test_fewer_steps_a_faster_step_and_fewer_stutters_are_told_apart(tmp_path: Path, capsys: Captured) -> None:
    """A: 100 steps of 30 ms with a hiccup of 500 ms more; B: 90 steps of 28 ms without."""
    slow = noisy(0, 4, 100, 30)
    for ms in slow:
        ms[40] += 500
    a, b = arm(tmp_path / "a", slow), arm(tmp_path / "b", noisy(1, 4, 90, 28), source="b")
    assert compare.main([a, b, "--level", "0.9"]) == 0
    said = re.sub(r"(\d\.\d\d)\d s", r"\1 s", capsys.readouterr().out)
    assert "B is 0.98 s faster than A (90 % interval " in said
    assert "), of which 0.50 s from fewer stutters, 0.29 s from 10 fewer steps, 0.19 s from a faster step." in said
    assert compare.main([b, a]) == 1
    assert re.search(r"B is 0\.98\d s slower .* from more stutters, .* from 10 more steps", capsys.readouterr().out)


def accounts(phases: range) -> st.SearchStrategy[list[Account]]:
    """An arm: runs with the same steps in each phase, any times and any stutters."""
    one = st.tuples(st.lists(st.floats(0.1, 1e4), min_size=len(phases), max_size=len(phases)),
                    st.lists(st.floats(0, 100), max_size=3))  # fmt: skip
    steps = st.lists(st.integers(1, 500), min_size=len(phases), max_size=len(phases))
    return st.builds(
        lambda steps, runs: [Account({(i // 2, i % 2): Typical(steps[i], ms[i]) for i in phases},
                                     [Stutter(1, seconds) for seconds in lost]) for ms, lost in runs],
        steps, st.lists(one, min_size=1, max_size=4),
    )  # fmt: skip


@given(accounts(range(4)), st.one_of(accounts(range(4)), accounts(range(3))))
def test_the_parts_sum_to_the_difference_of_the_means(a: list[Account], b: list[Account]) -> None:
    """Whatever the steps, times and stutters are, with the same phases in both arms or not."""
    total_a, total_b = (
        np.mean([sum(t.steps * t.ms for t in one.phases.values()) / 1000 + one.lost for one in side]) for side in (a, b)
    )
    found = steptimes.explain(a, b, compare.welch)
    assert found.total == pytest.approx(total_b - total_a, rel=1e-9, abs=1e-6)
    assert sum(row.seconds for row in found.rows) + found.stutters.mean == pytest.approx(found.total, abs=1e-6)


def test_the_parts_sum_to_the_difference_of_the_times_in_the_logs(tmp_path: Path, report: Reader) -> None:
    a = arm(tmp_path / "a", noisy(0, 3, 120, 30, 8.0), wait=70.0, validate=(50, 100))
    b = arm(tmp_path / "b", noisy(1, 5, 111, 29, 8.0), wait=60.0, validate=(50, 100), source="b")
    found = report(a, b)["comparisons"][0]
    why = found["explanation"]
    parts = why["steps"] + why["schedule"] + why["step_time"]["mean"] + why["stutters"]["mean"]
    assert parts == pytest.approx(found["b"]["mean"] - found["a"]["mean"], abs=1e-9)


def test_a_phase_that_grows_at_the_cost_of_another_is_the_part_of_the_schedule(tmp_path: Path, report: Reader) -> None:
    """As many steps, none faster: 20 of 100 steps move from the stage of 10 ms to that of 30 ms."""
    a = write_json_log(tmp_path / "a" / "20261101-000000_a.jsonl", [(10, 0, 384)] * 50 + [(30, 1, 896)] * 50)
    b = write_json_log(tmp_path / "b" / "20261101-000100_b.jsonl", [(10, 0, 384)] * 30 + [(30, 1, 1152)] * 70)
    why = report(a, b)["comparisons"][0]["explanation"]
    assert (why["steps"], why["step_time"]["mean"], why["schedule"]) == pytest.approx((0, 0, 0.4))
    rows = [(*row["phase"], *(row[arm][key] for key in ("steps", "window") for arm in "ab")) for row in why["rows"]]
    assert rows == [(0, 1, 25, 15, 384, 384), (0, 0, 25, 15, 384, 384),
                    (1, 1, 25, 35, 896, 1152), (1, 0, 25, 35, 896, 1152)]  # fmt: skip


def test_slower_even_steps_and_waits_for_the_device_before_validations_are_no_stutters(tmp_path: Path) -> None:
    run = read_run(write_log(tmp_path / "a.txt", [20, 60] * 50, wait=100.0, validate=(50,)))
    ((one,),), by_step = steptimes.account_arms([run])
    assert by_step
    assert not one.stutters
    assert {phase: typical.ms for phase, typical in one.phases.items()} == pytest.approx({(0, 1): 20, (0, 0): 60 + 4})


def test_stages_that_the_log_does_not_name_are_found_to_the_step_in_spite_of_stutters(tmp_path: Path) -> None:
    ms = np.concatenate([np.tile([28, 34], 120), np.tile([53, 59], 121), np.tile([78, 86], 130)])
    runs = []
    for i in range(5):
        values = ms + np.random.default_rng(i).normal(0, 0.8, len(ms))
        values[[60 + i, 300]] += 900
        runs.append(read_run(write_log(tmp_path / f"{i}.txt", values.tolist())))
    (accounts,), _ = steptimes.account_arms(runs)
    for i, one in enumerate(accounts):
        assert [one.phases[stage, 0].steps + one.phases[stage, 1].steps for stage in range(3)] == [240, 242, 260]
        assert dict(one.stutters) == pytest.approx({61 + i: 0.9, 301: 0.9}, abs=0.01)


def test_a_clock_that_starts_again_after_untimed_steps_counts_from_there(tmp_path: Path) -> None:
    path = write_log(tmp_path / "a.txt", [30.0] * 40)
    head, line = path.read_text().split("step:0/", 1)[0], "step:{}/40 {}train_time:{}ms step_avg:nan\n"
    path.write_text(head + "".join(line.format(step, "", 50_000 + step if step <= 10 else 30 * (step - 10))
                                   for step in range(41)) + line.format(40, "val_loss:3.28 ", 900))  # fmt: skip
    timeline = steptimes.read_timeline(read_run(path))
    assert timeline is not None
    assert (timeline.steps[0].step, len(timeline.steps), float(timeline.ms.sum())) == (11, 30, 900)


def test_logs_that_do_not_time_every_step_still_tell_steps_from_speed(tmp_path: Path, capsys: Captured) -> None:
    for name, total, ms in (("a", 100, 30), ("b", 90, 28)):
        for i in range(2):
            path = write_log(tmp_path / name / f"{i}.txt", [ms + i] * total, source=name)
            lines = path.read_text().splitlines()
            path.write_text("\n".join(line for line in lines if "val_loss" in line or "step:" not in line) + "\n")
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "0.295 s from 10 fewer steps, 0.190 s from a faster step." in out
    assert "not every step is timed" in out


# ---- Machine, order, arms


def test_other_software_is_refused_unless_allowed_and_named(tmp_path: Path, capsys: Captured) -> None:
    a, b = arm(tmp_path / "a", noisy(0, 3, 50, 30)), arm(tmp_path / "b", noisy(1, 3, 50, 29), torch="2.9.1")
    assert compare.main([a, b]) == 2
    assert "torch: 2.10.0 (3 x) in A, 2.9.1 (3 x) in B" in capsys.readouterr().err
    assert compare.main([a, b, "--allow-mismatch"]) == 0
    assert "DIFFERS in torch: 2.10.0 (3 x) in A, 2.9.1 (3 x) in B" in capsys.readouterr().out


def test_equal_entries_are_called_consistent_and_missing_ones_unknown(tmp_path: Path, report: Reader) -> None:
    arms = arm(tmp_path / "a", noisy(0, 3, 50, 30)), arm(tmp_path / "b", noisy(1, 3, 50, 29))
    machine = report(*arms)["comparisons"][0]["machine"]
    assert machine["consistent"] == {"cuda": "12.8", "torch": "2.10.0", "python": "3.11.10"}
    assert set(machine["unknown"]) == set(compare.FINGERPRINT) - set(machine["consistent"])


def timed(order: str, seconds: Sequence[float] | None = None) -> tuple[compare.Arm, compare.Arm]:
    """Arms from an order such as ABBA, and the time of each run."""
    values = seconds or [100.0 + i for i in range(len(order))]
    made = [compare.Timed(value, started=f"{i:03}") for i, value in enumerate(values)]
    a, b = ([run for name, run in zip(order, made, strict=True) if name == side][::-1] for side in "AB")
    return compare.Arm("A", "a", a), compare.Arm("B", "b", b)


def test_runs_are_paired_only_where_they_are_known_to_alternate() -> None:
    orders = {"ABAB": 2, "ABBA": 2, "BAABBA": 3, "AABB": 0, "ABA": 0, "AB": 0, "ABAABB": 0}
    assert {order: len(compare.find_pairs(*timed(order))) for order in orders} == orders
    a, b = timed("ABAB")
    for unknown in (None, a.runs[0].started):  # or the start of another run
        b.runs[0] = b.runs[0]._replace(started=unknown)
        assert compare.find_pairs(a, b) == []


def test_a_pair_is_two_runs_made_one_after_the_other_and_is_tested_as_such() -> None:
    seconds = [10.0, 9.1, 12.9, 14.0, 20.0, 18.8]
    report = compare.compare(*timed("ABBAAB", seconds), level=0.95)
    expected = reference.ttest_rel([9.1, 12.9, 18.8], [10.0, 14.0, 20.0]).confidence_interval(0.95)
    assert report["method"] == "paired"
    assert (report["seconds"].low, report["seconds"].high) == pytest.approx(tuple(expected))


def test_drift_has_the_interval_of_a_regression_with_an_intercept_for_each_arm() -> None:
    seconds = [5.0, 5.3, 4.9, 5.8, 5.6, 6.1, 5.5]
    drift = compare.find_drift(*timed("AABABBB", seconds), level=0.95)
    found = drift["seconds_a_run"]
    place, of_b = np.arange(7.0), np.array([0, 0, 1, 0, 1, 1, 1])
    residuals = [np.concatenate([values[of_b == side] - values[of_b == side].mean() for side in (0, 1)])
                 for values in (place, np.array(seconds))]  # fmt: skip
    line = reference.linregress(*residuals)
    error = line.stderr * math.sqrt((7 - 2) / (7 - 3))  # one mean more
    assert found.mean == pytest.approx(line.slope)
    assert found.high - found.mean == pytest.approx(reference.t.ppf(0.975, 4) * error)
    assert drift["share"] == pytest.approx(line.slope * (np.mean([2, 4, 5, 6]) - np.mean([0, 1, 3])))


def test_an_arm_of_a_folder_is_chosen_by_the_hash_that_the_error_lists(tmp_path: Path, capsys: Captured) -> None:
    for i in range(6):
        write_log(tmp_path / f"{i}.txt", [30.0 + i] * 40, source="ab"[i % 2], minute=i)
    assert compare.main([str(tmp_path), str(tmp_path)]) == 2
    error = capsys.readouterr().err
    first, second = (line.split("source ")[1][:12] for line in error.splitlines() if "source " in line)
    assert compare.main([f"{tmp_path}@{first}", f"{tmp_path}@{second}"]) == 1
    assert "compared as 3 pairs" in capsys.readouterr().out


def test_copies_and_unfinished_runs_are_left_out_by_name(tmp_path: Path, report: Reader) -> None:
    a, b = arm(tmp_path / "a", noisy(0, 3, 50, 30)), arm(tmp_path / "b", noisy(1, 3, 50, 29), source="b")
    (tmp_path / "b" / "copy.txt").write_bytes((tmp_path / "b" / "1.txt").read_bytes())
    torn = (tmp_path / "b" / "2.txt").read_text().splitlines()[:-1]
    (tmp_path / "b" / "torn.txt").write_text("\n".join(torn) + "\n")
    found = report(a, b)["comparisons"][0]["b"]
    assert found["n"] == 3
    assert [Path(line.split(":")[0]).name for line in found["left_out"]] == ["torn.txt", "copy.txt"]


# ---- Time at equal loss


def arms_of(lengths: dict[int, list[float]], times: Sequence[Sequence[float]] | None = None) -> list[compare.Arm]:
    times = times or [[60.0] * len(losses) for losses in lengths.values()]
    return [compare.Arm(name, name, [compare.Timed(t, loss, steps) for t, loss in zip(side, losses, strict=True)])
            for name, side, (steps, losses) in zip("AB", times, lengths.items(), strict=True)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "nats", "se"), [("mudd", 1.60, 0.12), ("xsa", 1.25, 0.18), ("gated", 1.27, 0.14), ("paired", 1.85, 0.80)]
)
def test_the_slope_of_whole_runs_of_two_lengths_is_the_published_one(name: str, nats: float, se: float) -> None:
    slope = compare.measure_slope(arms_of(LENGTHS[name]))
    assert (slope.nats * 1e4, slope.se * 1e4) == pytest.approx((nats, se), abs=0.0051)
    (short, less), (long, more) = LENGTHS[name].items()
    test = reference.ttest_ind(less, more, equal_var=False)
    assert (slope.nats / slope.se, slope.df, slope.nats * (long - short)) == pytest.approx(
        (test.statistic, test.df, np.mean(less) - np.mean(more)))


def test_the_buffer_of_fp8_down_is_worth_12_8_steps_and_three_quarters_of_a_second() -> None:
    a, b = arms_of({1390: FP8_DOWN_LOSSES[0], 1390.0000001: FP8_DOWN_LOSSES[1]}, FP8_DOWN)
    found = compare.adjust(a, b, 3.28, compare.Slope(1.27e-4, 0.14e-4, math.inf, "given"), 0.95)["b"]
    assert found["spare_steps"] == pytest.approx(12.8, abs=0.05)
    assert found["spare_steps"] * 57.2e-3 == pytest.approx(0.73, abs=0.006)
    assert found["spare_seconds"] == pytest.approx(0.736, abs=0.001)


def test_the_interval_at_equal_loss_is_that_of_the_delta_method() -> None:
    """Against numeric derivatives of the adjusted difference by all five means."""
    a, b = arms_of({1390: FP8_DOWN_LOSSES[0], 1350: FP8_DOWN_LOSSES[1]}, FP8_DOWN)
    slope = compare.Slope(1.27e-4, 0.14e-4, math.inf, "given")

    def adjusted(means: np.ndarray) -> float:
        old, old_loss, new, new_loss, nats = means
        return new * (1 - (3.28 - new_loss) / nats / 1350) - old * (1 - (3.28 - old_loss) / nats / 1390)

    columns = [FP8_DOWN[0], FP8_DOWN_LOSSES[0], FP8_DOWN[1], FP8_DOWN_LOSSES[1]]
    means = np.array([*map(np.mean, columns), slope.nats])
    moves = 1e-6 * np.diag(means)
    gradient = [(adjusted(means + move) - adjusted(means - move)) / (2 * move.sum()) for move in moves]
    covariance = np.zeros((5, 5))
    covariance[:2, :2], covariance[2:4, 2:4] = np.cov(columns[0], columns[1]) / 13, np.cov(columns[2], columns[3]) / 13
    covariance[4, 4] = slope.se**2
    found = compare.adjust(a, b, 3.28, slope, 0.95)["difference"]
    error = (found.high - found.mean) / reference.t.ppf(0.975, found.df)
    assert found.mean == pytest.approx(adjusted(means))
    assert error == pytest.approx(math.sqrt(np.array(gradient) @ covariance @ gradient), rel=1e-6)


def test_a_slope_of_the_wrong_sign_is_refused() -> None:
    one, other = arms_of(LENGTHS["mudd"])
    one.runs = [run._replace(steps=1600) for run in one.runs]
    with pytest.raises(LogError, match="does not fall"):
        compare.measure_slope([one, other])


# ---- Several machines


def test_pooled_difference_is_that_of_dersimonian_and_laird() -> None:
    """With equal errors e the spread between machines is sqrt(variance of the differences - e^2), the weights equal."""
    values, error = np.array([-3.3, -1.7, -2.2, -2.9]), 0.2
    found = compare.pool([compare.difference(9, 9, value, error, 16, 0.95) for value in values], 0.95)
    assert found["sd_between_machines"] == pytest.approx(math.sqrt(values.var(ddof=1) - error**2))
    expected = reference.t.interval(0.95, 3, values.mean(), reference.sem(values))
    assert (found["seconds"].low, found["seconds"].high) == pytest.approx(expected)


def test_differences_closer_than_their_errors_have_no_spread_and_are_weighted_by_precision() -> None:
    near = [compare.difference(9, 9, mean, error, 16, 0.95) for mean, error in ((-1.0, 0.1), (-1.05, 0.2))]
    found = compare.pool(near, 0.95)
    assert (found["sd_between_machines"], found["seconds"].mean) == pytest.approx((0, -1.01))


def test_pairs_give_a_line_each_and_what_they_share(tmp_path: Path, capsys: Captured) -> None:
    words = []
    for i, torch in enumerate(["2.9.1", "2.10.0"]):
        words += ["--pair", arm(tmp_path / f"a{i}", noisy(i, 4, 50, 30), torch=torch),
                  arm(tmp_path / f"b{i}", noisy(i + 9, 4, 50, 20), torch=torch, source="b")]  # fmt: skip
    assert compare.main(words) in (0, 1)
    *_, first, second, last = capsys.readouterr().out.splitlines()
    assert ("2.9.1" in first, "2.10.0" in second, "4 + 4" in first) == (True, True, True)
    assert last.startswith("over these machines B is")


# ---- Runs made here


def test_commands_run_in_turn_each_into_the_folder_of_its_arm(tmp_path: Path, report: Reader) -> None:
    for name, ms in (("A", 30), ("B", 20)):
        for number in range(3):
            write_log(tmp_path / f"{name}{number}.txt", [ms + number] * 30, source=name)
    command = f"echo -n {{0}} >> {tmp_path}/order; cp {tmp_path}/{{0}}{{{{round}}}}.txt {{{{log_dir}}}}"
    out = tmp_path / "out"
    found = report("--run", command.format("A"), command.format("B"), "--rounds", 3, "--out", out)["comparisons"][0]
    assert (tmp_path / "order").read_text() == "ABBAAB"
    assert found["method"] == "paired"
    assert found["a"]["times"] + found["b"]["times"] == pytest.approx([0.9, 0.93, 0.96, 0.6, 0.63, 0.66])
    assert report(out / "A", out / "B")["comparisons"][0]["seconds"]["mean"] == pytest.approx(-0.3)


def test_without_a_log_the_wall_time_counts_and_the_same_command_gives_the_noise_floor(
    tmp_path: Path, capsys: Captured
) -> None:
    assert compare.main(["--run", "true", "true", "--rounds", "2", "--noise", "--out", str(tmp_path)]) in (0, 1)
    out, err = capsys.readouterr()
    order = [line.split(", ")[1].split(":")[0] for line in err.splitlines()]
    assert order == ["A", "B", "A again", "A again", "B", "A"]
    for said in ("wall time", "A and B are the same: this difference is the noise floor", "noise floor: A again "):
        assert said in out


def test_a_signal_reaches_the_command_that_runs(tmp_path: Path) -> None:
    script = "trap 'echo > {0}/ended; exit' TERM; echo > {0}/begun; while :; do sleep 0.05; done"
    (tmp_path / "cmd").write_text(script.format(tmp_path))
    words = [sys.executable, str(SCRIPT), "--run", f"exec sh {tmp_path}/cmd", "true", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE)
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    process.terminate()
    assert (process.wait(), process.stderr.read(), (tmp_path / "ended").exists()) == (143, b"", True)


def test_a_failing_command_stops_with_the_end_of_its_output(tmp_path: Path, capsys: Captured) -> None:
    assert compare.main(["--run", "true", "sh -c 'seq 100; exit 7'", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "round 1: B ended with exit code 7" in error
    assert [line.strip() for line in error.splitlines() if line.strip().isdigit()] == [str(n) for n in range(86, 101)]


# ---- The command line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name arms A B"), (["one"], "two arms"), (["a", "b", "--times", "1,2"], "name arms A B"),
        (["--times", "1,2"], "twice"), (["--times", "1,x"], "'1,x' must be numbers from 1e-12"),
        (["--times", "1,-2"], "must be numbers from"),
        (["--times", "1,2", "--times", "1,2", "--losses", "3"], "one loss"),
        (["--times", "1,2", "--times", "1,2", "--slope", "1e-4"], "needs logs"),
        (["a", "b", "--slope", "1,2,3"], "--slope"), (["a", "b", "--level", "95"], "--level is 95.0"),
        (["--run", "x", "y", "--rounds", "0"], "--rounds is 0"),
    ],
)  # fmt: skip
def test_a_command_line_without_sense_names_the_rule(words: list[str], said: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stop:
        compare.main(words)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_bad_logs_end_in_one_error_line_and_code_2(tmp_path: Path, capsys: Captured) -> None:
    a, b = arm(tmp_path / "a", noisy(0, 3, 50, 30)), arm(tmp_path / "b", noisy(1, 3, 50, 29), source="b")
    untimed = tmp_path / "untimed.txt"
    untimed.write_text("step:0/5 val_loss:10.8\nstep:5/5 val_loss:3.2\n")
    (tmp_path / "llm.log").write_text("s:0 tel:10.9\ns:5 tel:3.2\n")
    for words, said in (
        ([a, a], "3 runs in common"), ([a, "missing"], "does not exist"), ([a, str(untimed)], "no training times"),
        ([str(tmp_path / "llm.log"), b], "no total"), ([a, b, "--slope", "1e-4"], "--target"),
        (["--pair", f"{a}/0.txt", f"{b}/0.txt", "--pair", a, b], "two pairs share a log"),
        ([a, b, "--slope-from", a, a, "--target", "3.28"], "two lengths"),
    ):  # fmt: skip
        assert compare.main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert said in error


def test_one_run_an_arm_gives_a_difference_without_an_interval(report: Reader) -> None:
    found = report(*typed([2.0]), *typed([1.5]))["comparisons"][0]["seconds"]
    assert (found["mean"], found["low"], found["high"]) == (-0.5, None, None)
    assert compare.main([*typed([2.0]), *typed([1.5])]) == 1


def test_a_reader_that_stops_reading_gets_no_traceback() -> None:
    words = [sys.executable, str(SCRIPT), *typed([1, 2]), *typed([1, 2])]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
    process.stdout.close()
    assert process.stderr.read() == b""
