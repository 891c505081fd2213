"""From run logs to a verdict: nothing that a crash, a copy or a hand can do to a log may pass for evidence."""

import json
import math
import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from scipy.stats import shapiro, ttest_1samp, ttest_ind

from runtime.jsonl import json_line
from runtime.log import SCHEMA, RunLog
from scripts.significance import main

ROOT = Path(__file__).resolve().parent.parent

PUBLIC = Path("track_1_short", "2025-07-12_Name")  # where public records of the first track lie


def numbers(start: str, digits: str) -> list[float]:
    """Numbers that begin alike."""
    return [float(start + end) for end in digits.split()]


# Final validation losses of published records of the NanoGPT speedrun.
BOS_ALIGN = numbers("3.2", "784 782 794 788 784 803 792 819 792 801 778 773 791 817 779 804 805 789 770 783")
FIX_MUON_LR = numbers("3.2", "804 754 753 800 780 813 778 771 780 783")
MIMETIC_VALUE_OUTPUT = numbers("3.2", "777 775 778 772 780 805 791")
CAUTIOUS_ADAM = numbers("3.2", "746 769 760 776 771 722 740 779 765 870 773 754")
FP8_MLP_UP = numbers("3.2", "802 800 789 763 792 793 781 785")
FP8_MLP_UP_BASELINE = numbers("3.2", "800 787 783 760 787 795 792 799")
FP8_DOWN = numbers("3.2", "791 773 783 775 781 775 793 772 769 775 806 779 816")
FP8_DOWN_BASELINE = numbers("3.2", "817 796 778 802 775 767 758 821 780 768 769 775 766")
VE_TUNED = [numbers("3.", digits) for digits in (
    "2796 2800 2786 2782 2801", "2774 2790 2777 2764 2813", "2771 2764 2797 2787 2769", "2781 2778 2807 2818 2798",
    "2764 2777 2771 2772 2796", "2790 2779 2782 2775 2764", "2979 2976 3029 2954 2992")]  # fmt: skip
NORMUON_3250 = [*numbers("3.2", "7854 7942 8064 8056 7858 7976 7827 7754 7825 7800"),
                *numbers("3.2", "7909 7893 7924 7835 7882 7758 7866 8032 7840 7855")]  # fmt: skip


def write_run(
    folder: Path, run_id: str, losses: dict[int, float], *, seed: int, total: int = 100, target: float | None = 3.28,
    source: str = "source", config: str = "config", gpus: int = 8, status: str | None = "done", track: str = "short",
    claim: str | None = None,
) -> Path:
    """A log as the trainer writes it, with validation losses by step; `status=None` leaves the end line out."""
    log = RunLog(folder, run_id)
    log.write("phase", name="setup", timed=False, ms=1.0)
    log.write("header", schema=SCHEMA, run_id=run_id, track=track, target=target, seed=seed, trial=0, claim=claim,
              source_sha256=source, config_sha256=config, config={}, env={"gpu_count": gpus})
    for step, loss in losses.items():
        log.write("step", step=step, train_loss=None)
        log.write("val", step=step, total_steps=total, val_loss=loss, train_time_ms=step * 2.0)
    if status:
        log.write("end", status=status, steps=max(losses, default=0), val_loss=None)
    log.close()
    return log.path


def write_arm(folder: Path, losses: list[float], *, first_seed: int = 0, **facts) -> None:
    for seed, loss in enumerate(losses, first_seed):
        write_run(folder, f"run_{seed:03}", {50: 4.0 + seed, 100: loss}, seed=seed, **facts)


def write_public(
    path: Path, *runs: dict[int, float], source: str = "print()\n", total: int = 1750, digits: int = 4
) -> Path:
    """A log in the public text format, with the validation losses of its runs by step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rule = "=" * 100
    lines = [source + rule, "Running PyTorch 2.10.0 compiled for CUDA 12.8 on NVIDIA H100 with world_size 8", rule]
    for losses in runs:
        lines += [f"step:{step}/{total} val_loss:{loss:.{digits}f} train_time:{step * 99}ms step_avg:99.00ms"
                  for step, loss in ({0: 10.8258} | losses).items()]
    path.write_text("\n".join([*lines, "peak memory allocated: 33277 MiB reserved: 48132 MiB\n"]))
    return path


def write_public_arm(folder: Path, losses: list[float], *, stem: str = "run", **facts) -> None:
    for index, loss in enumerate(losses):
        write_public(folder / f"{stem}_{index:02}.txt", {1000: 3.5 + index / 1000, 1750: loss}, **facts)


def judge(capsys, *arguments: object) -> tuple[int, list[dict]]:
    """Exit code and arms of `significance.py --json`."""
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)["arms"]


def typed(losses: list[float]) -> list[str]:
    return ["--losses", ",".join(map(str, losses)), "--target", "3.28"]


def warned(arm: dict, words: str) -> bool:
    return any(words in warning for warning in arm["warnings"])


# ---- Published figures


@pytest.mark.parametrize(("losses", "n", "mean", "sd", "t", "p", "upper99", "e_value"), [
    (BOS_ALIGN, 20, 3.279140, 0.001340, -2.8705, 0.00489597, 3.27990, None),
    (FIX_MUON_LR, 10, 3.278160, 0.001983, -2.9345, 0.00831728, 3.27993, 23.5),
    (MIMETIC_VALUE_OUTPUT, 7, 3.278257, 0.001156, -3.9891, 0.00360393, 3.27963, None),
    (FP8_DOWN, 13, 3.278369, 0.001416, -4.1535, 0.00066906, 3.27942, 225.6),
    (FP8_MLP_UP, 8, 3.278812, 0.001233, -2.7232, 0.0148143, 3.28012, 14.6),
])
def test_the_published_records_get_their_published_figures(capsys, losses, n, mean, sd, t, p, upper99, e_value):
    code, (arm,) = judge(capsys, *typed(losses))
    assert arm["n"] == n
    assert [arm["mean"], arm["sd"]] == pytest.approx([mean, sd], abs=1e-6)
    assert arm["t"] == pytest.approx(t, abs=1e-4)
    assert arm["p"] == pytest.approx(p, rel=4e-6)
    assert arm["upper99"] == pytest.approx(upper99, abs=1e-5)
    assert (arm["passes"], arm["marginal"], code) == (p < 0.01, 0.007 <= p < 0.01, 0 if p < 0.01 else 1)
    if e_value:
        assert arm["e_value"] == pytest.approx(e_value, abs=0.05)
        main(typed(losses))
        assert f"E-value {e_value:.3g}: from 100 on it would pass" in capsys.readouterr().out


def test_a_folder_of_two_sources_is_two_arms_and_says_so(tmp_path, capsys):
    write_public_arm(tmp_path / PUBLIC, BOS_ALIGN)
    write_public(tmp_path / PUBLIC / "z_retimed.txt", {1000: 3.6, 1750: 3.2771}, source="print(1)\n")
    code, (arm, retimed) = judge(capsys, tmp_path / PUBLIC)
    assert (code, arm["n"], arm["passes"], retimed["n"], retimed["passes"]) == (1, 20, True, 1, False)
    assert arm["p"] == pytest.approx(0.00489597, rel=2e-6)
    assert (arm["losses"], arm["target"], arm["track"]) == (BOS_ALIGN, 3.28, "track_1_short")
    assert all(warned(found, f"2 SOURCES in {tmp_path / PUBLIC}, not pooled") for found in (arm, retimed))
    assert main([str(tmp_path / PUBLIC)]) == 1
    assert "FAIL: one run, no verdict possible" in capsys.readouterr().out


def test_a_truncated_log_is_named_and_not_used(tmp_path, capsys):
    folder = tmp_path / "track_1_short" / "2026-01-30_Name" / "runs"
    write_public_arm(folder, MIMETIC_VALUE_OUTPUT)
    cut = write_public(folder / "cut.txt", {1000: 3.6, 1500: 3.2500})
    code, (arm,) = judge(capsys, folder)
    assert (code, arm["n"]) == (0, 7)
    assert arm["p"] == pytest.approx(0.00360393, rel=2e-6)
    reason = "last validation at step 1500 of 1750"
    assert arm["incomplete"] == [{"path": str(cut), "reason": reason, "last_loss": 3.25}]


def test_a_failed_claim_is_told_how_many_runs_would_pass_and_that_adding_them_is_peeking(tmp_path, capsys):
    write_arm(tmp_path, FP8_MLP_UP)
    code, (arm,) = judge(capsys, tmp_path)
    assert (code, arm["runs_to_pass"]) == (1, 10)
    assert arm["p"] == pytest.approx(0.0148143, rel=3e-6)
    assert main([str(tmp_path)]) == 1
    assert "n = 10 would pass at this mean and sd; but adding runs until it passes" in capsys.readouterr().out


def test_arms_that_pass_alone_fail_as_a_family(tmp_path, capsys):
    for number, losses in enumerate(VE_TUNED):
        write_public_arm(tmp_path / PUBLIC, losses, stem=f"arm_{number}", source=f"print({number})\n")
    code, arms = judge(capsys, tmp_path / PUBLIC)
    alone = [0.07045, 0.06199, 0.01121, 0.33034, 0.00569, 0.00339, 0.99994]
    family = [0.24796, 0.24796, 0.05606, 0.66069, 0.03416, 0.02372, 0.99994]
    assert [arm["p"] for arm in arms] == pytest.approx(alone, abs=6e-6)
    assert [arm["holm_p"] for arm in arms] == pytest.approx(family, abs=6e-6)
    assert ([arm["tried"] for arm in arms], [arm["passes"] for arm in arms].count(True), code) == ([7] * 7, 2, 1)
    main([str(tmp_path / PUBLIC)])
    assert "Holm over the 7 arms and steps tried: p 0.0237, fail" in capsys.readouterr().out


def test_a_run_that_ended_early_counts_only_at_a_step_that_is_named_and_with_a_warning(tmp_path, capsys):
    for seed, loss in enumerate((3.276, 3.277, 3.278, 3.2765)):
        write_public(tmp_path / f"run_{seed}.txt", {50: 4.0 + seed, 90: loss}, total=100)
    assert judge(capsys, tmp_path, "--target", 3.28)[1][0]["n"] == 0
    (arm,) = judge(capsys, tmp_path, "--target", 3.28, "--at-step", 90)[1]
    assert (arm["n"], arm["incomplete"]) == (4, [])
    assert any(warning.startswith("4 runs end before the steps that they declare") for warning in arm["warnings"])


def test_typed_times_stand_beside_their_losses_and_are_as_unverified(capsys):
    code, (arm,) = judge(capsys, *typed(FP8_MLP_UP[:2]), "--times", "83.855,83.75")
    assert (code, arm["times_ms"]) == (1, [83855.0, 83750.0])
    assert any(warning.startswith("unverified: these numbers") for warning in arm["warnings"])
    with pytest.raises(SystemExit):
        main([*typed(FP8_MLP_UP[:2]), "--times", "83.855"])
    assert "--times takes a time for each of the --losses" in capsys.readouterr().err


def test_steps_that_were_tried_are_a_family_and_each_has_its_own_losses(tmp_path, capsys):
    for seed, (early, late) in enumerate(zip(FP8_MLP_UP, FIX_MUON_LR, strict=False)):
        write_run(tmp_path, f"run_{seed}", {80: early, 90: late, 100: 3.1 + seed}, seed=seed)
    sparse = write_run(tmp_path, "sparse", {90: 3.2781, 100: 3.1}, seed=8)
    _, arms = judge(capsys, tmp_path, "--at-step", "90,80")
    assert [(arm["at_step"], arm["n"], arm["losses"][0], arm["times_ms"][0]) for arm in arms] == [
        (80, 8, 3.2802, 160.0), (90, 9, 3.2804, 180.0)]
    assert arms[0]["incomplete"] == [{"path": str(sparse), "reason": "no validation at step 80", "last_loss": 3.1}]
    low, high = sorted(arm["p"] for arm in arms)
    assert sorted(arm["holm_p"] for arm in arms) == pytest.approx([2 * low, max(2 * low, high)])


# ---- The steps track


def test_two_files_of_ten_runs_each_are_judged_at_the_claimed_step(tmp_path, capsys):
    folder = tmp_path / "track_3_optimization" / "results" / "20260503_name"
    runs = [{1000: 4 + loss, 3250: loss, 3300: loss - 0.0017} for loss in NORMUON_3250]
    for name, part in (("a", runs[:10]), ("b", runs[10:])):
        write_public(folder / f"{name}.txt", *part, total=3300, digits=5)
    code, (arm,) = judge(capsys, folder, "--at-step", 3250)
    assert (code, arm["n"], arm["losses"], arm["total_steps"]) == (0, 20, NORMUON_3250, 3300)
    assert arm["p"] == pytest.approx(ttest_1samp(NORMUON_3250, 3.28, alternative="less").pvalue)
    assert arm["steps_rule"] == {"statistic": pytest.approx((3.28 - 3.278875) * 20**0.5), "passes": True}
    assert main([str(folder), "--at-step", "3250"]) == 0
    text = capsys.readouterr().out
    assert "p 9.81e-06 " in text
    assert "steps rule: (target - mean) * sqrt(n) = 0.00503 of 0.004, pass" in text
    assert "b.txt (run 10)" in text


@pytest.mark.parametrize(("losses", "passes"), [
    ([3.277, 3.279, 3.278, 3.278], True),  # exactly on the bound, where doubles fall short of it
    ([3.277, 3.279, 3.278, 3.27800000001], False),
    ([3.276], True),
])
def test_the_steps_rule_is_exact(tmp_path, capsys, losses, passes):
    write_arm(tmp_path, losses, track="steps")
    _, (arm,) = judge(capsys, tmp_path)
    assert arm["steps_rule"]["passes"] is passes
    assert arm["steps_rule"]["statistic"] == pytest.approx(0.004, rel=1e-5)


def test_the_steps_rule_can_hold_where_the_t_test_fails_and_a_wide_arm_is_warned_of(tmp_path, capsys):
    write_arm(tmp_path, [3.2748, 3.2804, 3.2766, 3.2802], track="steps")
    code, (arm,) = judge(capsys, tmp_path)
    assert (code, arm["passes"], arm["steps_rule"]["passes"]) == (1, False, True)
    assert warned(arm, "exceeds the 0.0013 that the steps rule takes for granted")
    write_arm(tmp_path / "other", [3.2748, 3.2804, 3.2766, 3.2802], track="short")
    _, (arm,) = judge(capsys, tmp_path / "other")
    assert (arm["steps_rule"], warned(arm, "takes for granted")) == (None, False)


def test_the_pairwise_rule_weighs_steps_against_loss(tmp_path, capsys):
    new, old = [3.2786, 3.2784, 3.2788], [3.2789, 3.2785]
    write_arm(tmp_path / "new", new, track="steps")
    for seed, loss in enumerate(old):
        write_run(tmp_path / "old", f"old_{seed}", {190: loss, 200: 3.2 + seed}, seed=seed, total=200, track="steps")
    _, (arm,) = judge(capsys, tmp_path / "new", "--against", tmp_path / "old", "--against-step", 190)
    gap = (Decimal("3.2787") - Decimal("3.2786") + 90 * Decimal("0.000045")) / Decimal(1 / 3 + 1 / 2).sqrt()
    assert arm["against"]["steps_rule"] == {"statistic": pytest.approx(float(gap)), "passes": gap >= Decimal("0.004")}
    main([str(tmp_path / "new"), "--against", str(tmp_path / "old"), "--against-step", "190"])
    assert f"pairwise steps rule: {gap:.5f} of 0.004, pass" in capsys.readouterr().out


# ---- Against a baseline


@pytest.mark.parametrize(("new", "old", "margin", "mean", "tost", "no_worse"), [
    (FP8_DOWN, FP8_DOWN_BASELINE, 0.001, 0.00012, 0.107, False),
    (FP8_DOWN, FP8_DOWN_BASELINE, 0.002, 0.00012, 0.0060, True),
    (FP8_MLP_UP, FP8_MLP_UP_BASELINE, 0.001, 0.000025, None, False),
    (FP8_MLP_UP, FP8_MLP_UP_BASELINE, 0.002, 0.000025, None, True),
])
def test_a_systems_only_change_must_show_that_it_is_no_worse(tmp_path, capsys, new, old, margin, mean, tost, no_worse):
    write_arm(tmp_path / "new", new)
    write_arm(tmp_path / "old", old, source="old")
    code, (arm,) = judge(capsys, tmp_path / "new", "--against", tmp_path / "old", "--margin", margin)
    against = arm["against"]
    shifted = ttest_ind([loss - margin for loss in new], old, equal_var=False, alternative="less").pvalue
    assert against["no_worse_p"] == pytest.approx(shifted)
    assert against["mean"] == pytest.approx(mean, abs=4e-6)
    assert against["tost_p"] == pytest.approx(tost or shifted, rel=0.01)
    assert against["no_worse"] is no_worse
    assert code == (0 if no_worse or arm["passes"] else 1)
    assert (against["baseline"]["losses"], against["baseline"]["source"]) == (old, "old")


def test_a_baseline_is_one_arm_and_what_is_wrong_with_it_is_said(tmp_path, capsys):
    write_arm(tmp_path / "new", FP8_DOWN)
    write_arm(tmp_path / "old", FP8_DOWN_BASELINE[:3], source="old")
    (tmp_path / "old" / "notes.txt").write_text("three more to come\n")
    _, (arm,) = judge(capsys, tmp_path / "new", "--against", tmp_path / "old")
    assert warned(arm["against"]["baseline"], "n = 3: too few runs")
    assert warned(arm["against"]["baseline"], "notes.txt")
    write_run(tmp_path / "old", "other", {100: 3.2}, seed=0, source="older")
    assert main([str(tmp_path / "new"), "--against", str(tmp_path / "old")]) == 2
    assert "holds 2 arms with complete runs: name the logs of one" in capsys.readouterr().err


# ---- Looking early


def test_what_looking_early_costs_is_printed(capsys):
    _, (arm,) = judge(capsys, *typed(FIX_MUON_LR), "--looked", 5)
    looks = arm["looks"]
    assert (looks["at"], looks["passes"], arm["passes"]) == ([5, 10], False, True)
    assert looks["level"] == pytest.approx(0.00522, rel=0.05)
    assert 0.01 < looks["true_level"] < 0.02  # less than two independent tests
    _, (arm,) = judge(capsys, *typed(FP8_DOWN), "--looked", "5,13")
    assert arm["looks"]["passes"]
    main([*typed(FP8_DOWN), "--looked", "13"])
    assert "looks at n in [13]: p < 0.01 at each is truly 0.01; p < 0.01 keeps 0.01: pass" in capsys.readouterr().out


# ---- What makes p say less


def test_an_outlier_is_flagged_and_kept(capsys):
    _, (arm,) = judge(capsys, *typed(CAUTIOUS_ADAM))
    assert (arm["n"], arm["outlier"]["value"]) == (12, 3.2870)
    assert arm["outlier"]["g"] == pytest.approx(2.811, abs=5e-4)
    assert warned(arm, "3.287 is an outlier (Grubbs p 0.00155, 6.6 MAD from the median): it counts; "
                       "p 0.00598 with it, 8.82e-06 without")
    _, (arm,) = judge(capsys, *typed(numbers("3.2", "771 773 774 775 776 778 870 871")))  # two that hide each other
    assert arm["outlier"]["p"] > 0.01
    assert warned(arm, "3.2871 is an outlier")
    _, (arm,) = judge(capsys, *typed(BOS_ALIGN))
    assert not warned(arm, "outlier")


@pytest.mark.parametrize(("losses", "limited"), [
    (["2.9165", "2.9166"], True), (["3.2780", "3.2790"], False), (["3.2780", "3.2781", "3.2780", "3.2783"], True),
    (["3.27801", "3.27812", "3.27803", "3.27834"], False), (["3.278010", "3.278012"], True),
])
def test_a_spread_of_a_few_printed_units_is_said_to_be_rounding(capsys, losses, limited):
    main(["--losses", ",".join(losses), "--target", "3.28"])
    assert ("is limited by the rounding to" in capsys.readouterr().out) is limited


def test_a_skew_to_the_right_is_warned_of_and_one_to_the_left_is_not(capsys):
    skewed = [3.2770 + 0.0001 * 1.5**k for k in range(10)]
    assert shapiro(skewed).pvalue < 0.05
    _, (arm,) = judge(capsys, *typed(skewed))
    assert arm["skewness"] > 0
    assert warned(arm, "skewed to the right")
    _, (arm,) = judge(capsys, *typed([6.556 - loss for loss in skewed]))
    assert not warned(arm, "skewed")


def test_few_runs_are_warned_about_and_equal_losses_fail(tmp_path, capsys):
    code, (arm,) = judge(capsys, *typed([3.2765, 3.2766, 3.2764]))
    assert code == 0
    assert warned(arm, "n = 3: too few runs")
    write_arm(tmp_path, [3.2] * 5)
    code, (arm,) = judge(capsys, tmp_path)
    assert (code, arm["sd"], arm["p"], arm["e_value"]) == (1, 0.0, None, None)
    assert warned(arm, "all losses are equal")


def test_a_diverged_run_that_finished_counts_against_its_arm(tmp_path, capsys):
    write_arm(tmp_path, [*MIMETIC_VALUE_OUTPUT, math.nan], track="steps")
    code, (arm,) = judge(capsys, tmp_path, "--looked", 4)
    assert (code, arm["n"], arm["losses"][-1], arm["mean"], arm["passes"]) == (1, 8, None, None, False)
    assert (arm["steps_rule"]["passes"], arm["looks"]["passes"], arm["holm_p"]) == (False, False, 1)
    assert warned(arm, "a loss is not finite: there is no test")


# ---- Which runs count


def test_the_json_begins_with_the_documented_fields_and_the_text_shows_every_figure_and_run(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC_VALUE_OUTPUT)
    code, (arm,) = judge(capsys, tmp_path)
    assert list(arm)[:15] == ["path", "source", "total_steps", "gpu_count", "n", "losses", "times_ms", "mean", "sd",
                              "t", "p", "upper99", "passes", "incomplete", "warnings"]
    assert (code, arm["n"], arm["losses"], arm["times_ms"]) == (0, 7, MIMETIC_VALUE_OUTPUT, [200.0] * 7)
    assert (arm["path"], arm["source"], arm["total_steps"], arm["gpu_count"]) == (str(tmp_path), "source", 100, 8)
    assert (arm["passes"], arm["incomplete"], arm["warnings"]) == (True, [], [])
    main([str(tmp_path)])
    text = capsys.readouterr().out
    for figure in ("n 7", "mean 3.278257", "sd 0.001156", "t -3.9891", "p 0.0036 ", "bound 3.27963", "PASS", "GPUs 8"):
        assert figure in text
    assert all(f"{loss:.6f}       0.200 s  run_{seed:03}" in text for seed, loss in enumerate(MIMETIC_VALUE_OUTPUT))


@pytest.mark.parametrize("difference", [{"source": "new"}, {"config": "new"}, {"total": 101}, {"gpus": 1}])
def test_runs_that_differ_in_what_defines_an_arm_are_not_pooled(tmp_path, capsys, difference):
    write_arm(tmp_path, MIMETIC_VALUE_OUTPUT)
    last = difference.get("total", 100)
    for seed in range(7, 11):
        write_run(tmp_path, f"run_{seed:03}", {last: 3.30 + seed / 1000}, seed=seed, **difference)
    code, arms = judge(capsys, tmp_path)
    assert code == 1
    assert [(arm["n"], arm["passes"]) for arm in arms] == [(7, True), (4, False)]


def test_one_arm_in_two_folders_is_pooled(tmp_path, capsys):
    write_arm(tmp_path / "a", MIMETIC_VALUE_OUTPUT[:3])
    write_arm(tmp_path / "b", MIMETIC_VALUE_OUTPUT[3:], first_seed=3)
    code, (arm,) = judge(capsys, tmp_path / "a", tmp_path / "b", tmp_path / "b" / "run_004.jsonl")
    assert (code, arm["n"], arm["path"]) == (0, 7, str(tmp_path))


def test_unfinished_runs_are_left_out_and_named(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC_VALUE_OUTPUT)
    cut = write_run(tmp_path, "cut", {50: 3.1}, seed=7, status=None)
    early = write_run(tmp_path, "early", {}, seed=8, status="interrupted")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    code, (arm,) = judge(capsys, tmp_path)
    assert (code, arm["n"]) == (0, 7)
    assert [(run["path"], run["reason"]) for run in arm["incomplete"]] == [
        (str(cut), "no end line"), (str(early), "ended with status interrupted"), (str(empty), "no header")]
    assert main([str(tmp_path)]) == 0
    assert f"left out: {cut}: no end line" in capsys.readouterr().out
    code, (arm,) = judge(capsys, cut)
    assert (code, arm["n"], arm["p"], arm["passes"], len(arm["incomplete"])) == (1, 0, None, False, 1)


def test_a_run_that_was_resumed_counts_and_what_it_lost_is_said(tmp_path, capsys):
    write_arm(tmp_path, NORMUON_3250[:6])
    path = tmp_path / "run_003.jsonl"
    head, lost, rest = re.split(rb'(?<=\n)({"event": "val".*\n)', path.read_bytes(), maxsplit=1)
    events = [{"event": "resume", "from_step": 0, "checkpoint": None, "differences": [], "log_offset": len(head),
               "registry_sha256": "", "t_ms": 5.0},
              {"event": "phase", "name": "lost", "timed": True, "ms": 512.25, "t_ms": 5.0}]
    path.write_bytes(b"".join([head, lost, *map(json_line, events), lost, rest]))
    main([str(tmp_path)])
    text = capsys.readouterr().out
    assert text.count("resumed at") == 1
    assert f"\n  {path}: resumed at step 0 (512 ms of lost work on the clock)\n" in text
    _, (arm,) = judge(capsys, tmp_path)
    assert (arm["n"], arm["incomplete"]) == (6, [])


def test_copies_and_repeated_seeds_add_nothing(tmp_path, capsys):
    write_arm(tmp_path, FP8_MLP_UP)
    _, (alone,) = judge(capsys, tmp_path)
    original = tmp_path / "run_003.jsonl"
    copy = original.read_text().replace("run_003", "z").replace('"seed": 3', '"seed": 8')
    (tmp_path / "z_copy.jsonl").write_text(copy)
    write_run(tmp_path, "z_rerun", {50: 4.1, 100: 3.2}, seed=3)
    code, (arm,) = judge(capsys, tmp_path)
    assert (code, arm["losses"], arm["p"]) == (1, alone["losses"], alone["p"])
    assert warned(arm, f"left out: {tmp_path / 'z_copy.jsonl'} is a duplicate of {original}")
    assert warned(arm, f"left out: {tmp_path / 'z_rerun.jsonl'} (loss 3.2) repeats seed 3 of {original}")


def test_claims_and_gaps_in_the_seeds_are_said(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC_VALUE_OUTPUT, claim="c1a1")
    _, (arm,) = judge(capsys, tmp_path)
    assert (arm["claim"], arm["warnings"]) == ("c1a1", [])
    write_run(tmp_path, "late", {100: 3.2781}, seed=9)
    _, (arm,) = judge(capsys, tmp_path)
    assert arm["n"] == 8
    assert warned(arm, "different claims: None, c1a1")
    assert warned(arm, "no run has seed 7, 8: was it made and left out?")


def test_a_single_old_log_gives_no_verdict(tmp_path, capsys):
    log = tmp_path / PUBLIC / "old.log"
    log.parent.mkdir(parents=True)
    log.write_text("s:0 tel:10.968871\ns:0 trl:10.965596\ns:9536 tel:3.275959\n")
    assert main([str(log)]) == 1
    text = capsys.readouterr().out
    assert "FAIL: one run, no verdict possible" in text
    assert "loss 3.275959" in text


def test_a_target_that_is_given_overrides_that_of_the_logs(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC_VALUE_OUTPUT, target=3.27)
    assert (judge(capsys, tmp_path)[0], judge(capsys, tmp_path, "--target", 3.28)[0]) == (1, 0)


def test_typed_losses_are_marked_unverified(capsys):
    _, (arm,) = judge(capsys, *typed([3.1, 3.2]))
    assert (arm["path"], arm["source"], arm["times_ms"], warned(arm, "unverified")) == (None, None, [], True)
    main(typed([3.1, 3.2]))
    assert "UNVERIFIED" in capsys.readouterr().out


# ---- Bad input


def test_what_is_no_log_in_a_folder_is_named_and_the_rest_goes_on(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC_VALUE_OUTPUT)
    (tmp_path / "bad.jsonl").write_text("step:1 val_loss:3.2\n")
    (tmp_path / "console.out").write_bytes(b"\xff\xfe")
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"not read: {tmp_path / 'bad.jsonl'}, line 1" in text
    assert f"not read: {tmp_path / 'console.out'}" in text
    assert main([str(tmp_path), str(tmp_path / "bad.jsonl")]) == 2  # but a file that is asked for must be one


@pytest.mark.parametrize(("arguments", "sentence"), [
    ([], "name run logs, or type losses"),
    (["--losses", "3.1,3.2"], "--losses needs --target"),
    (["logs", "--losses", "3.1", "--target", "3.28"], "one of the two"),
    (["--losses", "3.1,nan", "--target", "3.28"], "--losses: 'nan' is not a finite number; write it like 3.28"),
    (["--losses", "3.1", "--target", "low"], "--target: 'low' is not a finite number"),
    (["--losses", "3.1", "--target", "3.28", "--at-step", "5"], "--at-step needs run logs"),
    (["logs", "--at-step", "5,x"], "--at-step: '5,x' must be whole numbers from 1"),
    (["--losses", "3.1,3.2", "--target", "3.28", "--looked", "1"], "the first at least 2"),
    (["logs", "--margin", "0.001"], "--margin and --against-step need --against"),
    (["logs", "--margin", "0"], "--margin and --against-step need --against"),
    (["logs", "--against-step", "0"], "--margin and --against-step need --against"),
    (["{folder}/good", "--against", "{folder}/mixed/a.jsonl", "--margin", "-1"], "margin is -1.0: it must"),
    (["{folder}/good", "--against", "{folder}/good"], "good/a.jsonl is in the baseline too: compare with other runs"),
    (["{folder}/absent"], "{folder}/absent does not exist"),
    (["{folder}"], "no run logs"),
    (["{folder}/mixed"], "name different targets: give one with --target"),
    (["{folder}/none"], "name no target: give one with --target"),
    (["{folder}/bad/bad.jsonl"], "bad.jsonl, line 1: every line must be one JSON object"),
])
def test_bad_input_exits_with_2_and_a_sentence(tmp_path, capsys, arguments, sentence):
    write_run(tmp_path / "good", "a", {100: 3.2}, seed=0)
    write_run(tmp_path / "mixed", "a", {100: 3.2}, seed=0)
    write_run(tmp_path / "mixed", "b", {100: 3.2}, seed=1, target=2.92)
    write_run(tmp_path / "none", "a", {100: 3.2}, seed=0, target=None)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "bad.jsonl").write_text("step:1 val_loss:3.2\n")
    try:
        code = main([argument.format(folder=tmp_path) for argument in arguments])
    except SystemExit as error:  # argparse's own way out
        code = error.code
    assert code == 2
    assert sentence.format(folder=tmp_path) in capsys.readouterr().err


def test_the_command_starts_from_any_folder_without_torch_and_ends_quietly_when_nobody_reads(tmp_path):
    write_arm(tmp_path / "logs", MIMETIC_VALUE_OUTPUT)
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not installed here')\n")
    command = [sys.executable, ROOT / "scripts" / "significance.py", "logs", "--json"]
    environment = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert json.loads(result.stdout)["arms"][0]["n"] == 7
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(command, cwd=tmp_path, env=environment, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert result.stderr == b""
