"""From run logs to a verdict: nothing that a crash, a copy or a hand does to a log is evidence."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scipy.stats import ttest_1samp
from test_stats import LOSSES, NORMUON_3250

from scripts.significance import main

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = Path("track_1_short", "2025-07-12_Name")  # where public records of the first track lie
DOCUMENTED = [
    "path", "source", "total_steps", "gpu_count", "n", "losses", "times_ms", "mean", "sd", "t", "p",
    "upper99", "passes", "incomplete", "warnings",
]  # fmt: skip
BOS_ALIGN, FIX_MUON_LR, MIMETIC, FP8_MLP_UP = LOSSES.values()  # of public records
MIMETIC_AGAIN = [round(loss - 0.0001, 4) for loss in MIMETIC]


def write_run(
    folder: Path, run_id: str, losses: dict[int, Any], *, seed: int, total: int = 100,
    target: float | None = 3.28, source: str = "source", config: str = "config", gpus: int = 8,
    status: str | None = "done", track: str = "short", claim: str | None = None,
    settings: dict[str, Any] | None = None, step_ms: float = 2.0,
    probes: dict[str, float] | None = None, **env: object,
) -> Path:  # fmt: skip
    """A log as the trainer writes it; `status=None` leaves the end line out."""
    events: list[dict] = [{
        "event": "header", "schema": 3, "run_id": run_id, "track": track, "target": target,
        "seed": seed, "trial": 0, "claim": claim, "source_sha256": source, "config_sha256": config,
        "config": settings or {}, "env": {"gpu_count": gpus} | env,
    }]  # fmt: skip
    for step, loss in losses.items():
        events.append({"event": "val", "step": step, "total_steps": total, "val_loss": loss,
                       "train_time_ms": step * step_ms})  # fmt: skip
    if status:
        steps = max(losses, default=0)
        events.append({"event": "end", "t_ms": 90_000.0, "status": status, "steps": steps,
                       "val_loss": None, "probes": probes})  # fmt: skip
    path = folder / f"{run_id}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"t_ms": 1.0} | event) + "\n" for event in events))
    return path


def write_arm(folder: Path, losses: list[float], *, first_seed: int = 0, **facts) -> None:
    for seed, loss in enumerate(losses, first_seed):
        write_run(folder, f"run_{seed:03}", {50: 4.0 + seed, 100: loss}, seed=seed, **facts)


def write_public(
    path: Path, *runs: dict[int, float], source: str = "print()\n", total: int = 1750,
    digits: int = 4, also: str = "",
) -> Path:  # fmt: skip
    """A log in the public text format, with the validation losses of its runs by step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = "Running PyTorch 2.10.0 on NVIDIA H100 with world_size 8"
    lines = [source + "=" * 100, environment, "=" * 100]
    for losses in runs:
        for step, loss in ({0: 10.8258} | losses).items():
            time = f"train_time:{step * 99}ms"
            loss_words = f"val_loss:{loss:.{digits}f}{also}"
            lines.append(f"step:{step}/{total} {loss_words} {time} step_avg:99.00ms")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_public_arm(folder: Path, losses: list[float], *, stem: str = "run", **facts) -> None:
    for index, loss in enumerate(losses):
        points = {1000: 3.5 + index / 1000, 1750: loss}
        write_public(folder / f"{stem}_{index:02}.txt", points, **facts)


class Answer(NamedTuple):
    """What significance.py answers."""

    code: int
    arms: list[dict]  # of --json
    text: str


def judge(capsys, *arguments: object) -> Answer:
    words = [*map(str, arguments)]
    code = main([*words, "--json"])
    arms = json.loads(capsys.readouterr().out)["arms"]
    assert main(words) == code
    return Answer(code, arms, capsys.readouterr().out)


def warned(arm: dict, words: str) -> bool:
    return any(words in warning for warning in arm["warnings"])


# ---- One arm


@pytest.mark.parametrize(("losses", "p", "passes"), [
    (BOS_ALIGN, 0.00489597, True), (FIX_MUON_LR, 0.00831728, True), (FP8_MLP_UP, 0.0148143, False),
])  # fmt: skip
def test_the_published_records_get_their_published_verdict(tmp_path, capsys, losses, p, passes):
    write_public_arm(tmp_path / PUBLIC, losses)
    code, (arm,), text = judge(capsys, tmp_path / PUBLIC)
    assert (arm["p"], arm["passes"]) == (pytest.approx(p, rel=4e-6), passes)
    assert text.count(" 173.250 s ") == len(losses)
    assert arm["gpu_count"] == 8
    assert code == (0 if passes else 1)
    assert arm["losses"] == losses


def test_the_command_starts_anywhere_without_torch_and_prints_the_documented_fields(tmp_path):
    write_arm(tmp_path / "logs", MIMETIC)
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not installed here')\n")
    command = [sys.executable, ROOT / "scripts" / "significance.py", "logs", "--json"]
    options = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}}
    result = subprocess.run(command, capture_output=True, check=True, **options)
    (arm,) = json.loads(result.stdout)["arms"]
    assert list(arm) == DOCUMENTED
    assert [arm[name] for name in DOCUMENTED[:5]] == ["logs", "source", 100, 8, 7]
    assert (arm["losses"], arm["times_ms"]) == (MIMETIC, [200.0] * 7)
    assert (arm["passes"], arm["incomplete"], arm["warnings"]) == (True, [], [])


@pytest.mark.parametrize(("losses", "sentence"), [
    ([3.2765, 3.2766, 3.2767], "NO VERDICT: 3 runs count, and a test needs 4"),
    ([3.27, 3.28, 3.29, "nan"], "losses without a finite spread: there is no test"),
])  # fmt: skip
def test_too_few_runs_and_losses_without_a_finite_spread_pass_nothing(
    tmp_path, capsys, losses, sentence
):
    write_arm(tmp_path, losses)
    code, (arm,), text = judge(capsys, tmp_path)
    assert (code, arm["passes"], sentence in text) == (1, False, True)


def test_a_run_that_diverged_fails_its_arm_whatever_the_others_have(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC)
    write_run(tmp_path, "diverged", {50: 3.1}, seed=7, status="nonfinite")
    write_arm(tmp_path, MIMETIC_AGAIN, first_seed=20, source="other")
    code, arms, text = judge(capsys, tmp_path)
    assert (code, [(arm["n"], arm["passes"]) for arm in arms]) == (1, [(7, False), (7, True)])
    assert [warned(arm, "a run diverged") for arm in arms] == [True, False]
    assert (text.count(", pass"), text.count(", fail")) == (1, 1), "by Holm too"


def test_unfinished_runs_are_left_out_and_a_log_that_cannot_be_read_hides_no_verdict(
    tmp_path, capsys
):
    write_arm(tmp_path / "logs", MIMETIC)
    cut = write_run(tmp_path / "logs", "cut", {50: 3.1}, seed=7, status=None)
    early = write_run(tmp_path / "logs", "early", {}, seed=8, status="interrupted")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    (tmp_path / "none").mkdir()
    for damaged in ([], [empty], [tmp_path / "none"]):
        code, (arm,), text = judge(capsys, tmp_path / "logs", *damaged)
        assert (code, arm["n"], arm["passes"]) == (2 if damaged else 0, 7, True)
        assert [(run["path"], run["reason"]) for run in arm["incomplete"]] == [
            (str(cut), "no end line"), (str(early), "ended with status interrupted")]  # fmt: skip
        assert f"left out: {cut}: no end line" in text
        assert ("not read: " in text) == bool(damaged)
    code, (arm,), _ = judge(capsys, cut)
    assert (code, arm["n"], arm["p"], arm["passes"]) == (1, 0, None, False)


def test_claims_and_gaps_in_the_seeds_are_said(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC, claim="c1a1")
    assert not judge(capsys, tmp_path).arms[0]["warnings"]
    write_run(tmp_path, "late", {100: 3.2781}, seed=9)
    (arm,) = judge(capsys, tmp_path).arms
    assert arm["n"] == 8
    assert warned(arm, "different claims: None, c1a1")
    assert warned(arm, "no run has seed 7, 8: was it made and left out?")


def test_a_target_that_is_given_overrides_that_of_the_logs(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC, target=3.27)
    assert judge(capsys, tmp_path).code == 1
    assert judge(capsys, tmp_path, "--target", 3.28).code == 0


def test_of_two_losses_in_a_line_val_loss_is_judged_and_the_other_named(tmp_path, capsys):
    write_public_arm(tmp_path / PUBLIC, MIMETIC, also=" val_ema_loss:3.10000")
    (arm,) = judge(capsys, tmp_path / PUBLIC).arms
    assert arm["losses"] == MIMETIC
    assert warned(arm, "the losses are val_loss, not val_ema_loss")


# ---- Steps


def test_steps_that_were_tried_are_a_family_and_each_has_its_own_losses(tmp_path, capsys):
    for seed, (early, late) in enumerate(zip(FP8_MLP_UP, FIX_MUON_LR, strict=False)):
        write_run(tmp_path, f"run_{seed}", {80: early, 90: late, 100: 3.1 + seed}, seed=seed)
    sparse = write_run(tmp_path, "sparse", {90: 3.2781, 100: 3.1}, seed=8)
    _, arms, text = judge(capsys, tmp_path, "--at-step", "90,80")
    found = [(arm["n"], arm["losses"][0], arm["times_ms"][0]) for arm in arms]
    assert found == [(8, 3.2802, 160.0), (9, 3.2804, 180.0)]
    reason = "no validation at step 80"
    assert arms[0]["incomplete"] == [{"path": str(sparse), "reason": reason, "last_loss": 3.1}]
    assert "Holm over the 2 arms" in text


def test_two_files_of_ten_runs_each_are_judged_at_the_claimed_step(tmp_path, capsys):
    folder = tmp_path / "track_3_optimization" / "results" / "20260503_name"
    runs = [{1000: 4 + loss, 3250: loss, 3300: loss - 0.0017} for loss in NORMUON_3250]
    for name, part in (("a", runs[:10]), ("b", runs[10:])):
        write_public(folder / f"{name}.txt", *part, total=3300, digits=5)
    code, (arm,), text = judge(capsys, folder, "--at-step", 3250)
    assert (code, arm["n"], arm["losses"], arm["total_steps"]) == (0, 20, NORMUON_3250, 3300)
    assert arm["p"] == pytest.approx(ttest_1samp(NORMUON_3250, 3.28, alternative="less").pvalue)
    assert "steps rule: (target - mean) * sqrt(n) = 0.00503, pass" in text
    assert "b.txt (run 10)" in text


def test_logs_of_the_track_steps_are_also_judged_by_its_rule(tmp_path, capsys):
    write_arm(tmp_path, [3.276, 3.278, 3.280, 3.282], track="steps")
    assert "(target - mean) * sqrt(n) = 0.00200, fail" in judge(capsys, tmp_path).text


@pytest.mark.parametrize(("total", "other", "code", "judged", "left_out", "words"), [
    (2000, None, 0, 7, 0, "all runs stop at step 1750 of 2000: judged there"),
    (2000, {1750: 3.281, 1800: 3.1}, 1, 0, 8, "runs stop at step 1750, 1800: choose the step"),
    (1750, {1000: 3.2}, 0, 7, 1, "last validation at step 1000 of 1750"),
], ids=["all at one step", "each at a step of its own", "one of them"])  # fmt: skip
def test_runs_that_stop_before_their_declared_total_count_only_where_none_could_choose_its_stop(
    tmp_path, capsys, total, other, code, judged, left_out, words
):
    folder = tmp_path / PUBLIC
    write_public_arm(folder, MIMETIC, total=total)
    if other:
        write_public(folder / "z_other.txt", other, total=total)
    found, (arm,), text = judge(capsys, folder)
    assert (found, arm["losses"], len(arm["incomplete"])) == (code, MIMETIC[:judged], left_out)
    assert words in text


def test_runs_that_stop_early_are_judged_at_a_step_that_is_named_and_can_be_compared(
    tmp_path, capsys
):
    folder, old = tmp_path / PUBLIC, tmp_path / "old"
    for each, losses in ((folder, MIMETIC), (old, FIX_MUON_LR)):
        write_public_arm(each, losses, total=2000)
    assert main([str(folder), "--against", str(old)]) == 0
    assert "B - A of independent runs" in capsys.readouterr().out
    write_public(folder / "lucky.txt", {1750: 3.281, 1800: 3.1}, total=2000)
    (arm,) = judge(capsys, folder, "--at-step", 1750).arms
    assert sorted(arm["losses"]) == sorted([*MIMETIC, 3.281])


# ---- Several arms and folders


def test_sources_in_one_folder_are_arms_of_a_family_in_which_one_without_a_test_counts(
    tmp_path, capsys
):
    folder = tmp_path / PUBLIC
    write_public_arm(folder, BOS_ALIGN)
    write_public_arm(folder, FIX_MUON_LR, stem="tuned", source="print(1)\n")
    code, arms, text = judge(capsys, folder)
    assert (code, [arm["n"] for arm in arms]) == (0, [20, 10])
    assert all(warned(arm, "2 sources in these logs") for arm in arms)
    assert text.count("Holm over the 2 arms and steps tried: p 0.00979, pass") == 2
    write_public(folder / "z_retimed.txt", {1750: 3.2771}, source="print(2)\n")
    code, arms, text = judge(capsys, folder)
    assert (code, [arm["passes"] for arm in arms]) == (0, [True, True, False])
    assert "NO VERDICT: 1 run counts, and a test needs 4" in text
    assert "Holm over the 3 arms and steps tried: p 0.0147, fail" in text


def test_runs_that_differ_in_steps_settings_or_gpus_are_arms_named_by_it(tmp_path, capsys):
    shared, several = {"recipe": "muon", "cautious_wd": True}, [0.85, 0.9]
    arms = [(1, 30, 0.95, 8), (1, 32, 0.95, 8), (2, 32, several, 8), (1, 32, 0.95, 1)]
    for number, (config, steps, momentum, gpus) in enumerate(arms):
        for seed in range(4):
            own = {"seed": 100 * number + seed, "log_dir": f"logs/{number}"}
            settings = own | shared | {"steps": steps, "momentum": momentum}
            facts = {"config": f"config {config}", "settings": settings, "gpus": gpus}
            losses = {steps: 3.2 + number + seed / 100}
            write_run(tmp_path, f"{number}_{seed}", losses, seed=seed, total=steps, **facts)
    text = judge(capsys, tmp_path).text
    titles = [part.splitlines()[0] for part in text.split("\n\n")]
    assert [title.partition(": source")[0] for title in titles] == [
        f"{tmp_path} (steps=30, momentum=0.95, gpus=8)",
        f"{tmp_path} (steps=32, momentum=0.95, gpus=8)",
        f"{tmp_path} (steps=32, momentum=0.85,0.9, gpus=8)",
        f"{tmp_path} (steps=32, momentum=0.95, gpus=1)"]  # fmt: skip
    assert text.count("n 4 ") == 4


def test_each_folder_of_logs_below_a_named_one_is_a_family_of_its_own(tmp_path, capsys):
    records = tmp_path / PUBLIC.parts[0]
    write_public_arm(records / "a", MIMETIC)
    write_public_arm(records / "b" / "runs", MIMETIC_AGAIN)
    (records / "c" / "pictures").mkdir(parents=True)
    code, arms, text = judge(capsys, records)
    assert [(arm["path"], arm["losses"]) for arm in arms] == [
        (str(records / "a"), MIMETIC), (str(records / "b" / "runs"), MIMETIC_AGAIN)]  # fmt: skip
    assert (code, [arm["passes"] for arm in arms], "Holm" in text) == (0, [True, True], False)
    assert f"not judged: no run logs in {records / 'c' / 'pictures'}" in text
    write_public_arm(records / "a" / "below", FP8_MLP_UP)
    code, arms, text = judge(capsys, records)
    assert (code, len(arms), "Holm" in text) == (1, 3, False), "a folder with logs hides none"
    (records / "e").mkdir()
    torn = records / "e" / "torn.txt"
    torn.write_text("killed\n")
    code, arms, text = judge(capsys, records)
    assert (code, len(arms)) == (2, 3), "one cannot be read, and hides no other verdict"
    assert f"not read: {torn} is no run log" in text


def test_judgements_below_a_log_folder_are_named_and_not_judged_with_it(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC)
    write_arm(tmp_path / "judge" / "001" / "A", FP8_MLP_UP)
    (tmp_path / "registry.jsonl").touch()
    code, _, text = judge(capsys, tmp_path)
    assert (code, f"{tmp_path / 'judge'} has run logs too: name it" in text) == (0, True)


@pytest.mark.parametrize(("arguments", "sentence"), [
    ([], "required: PATH"),
    (["logs", "--target", "nan"], "--target nan: it must be a finite number"),
    (["logs", "--against", "old", "--at-step", "5"], "--against takes one NEW, without"),
    (["logs", "more", "--against", "old"], "--against takes one NEW, without"),
    (["logs", "--at-step", "5,x"], "--at-step: '5,x': it must be whole numbers: 5,10"),
    (["{folder}/absent"], "cannot read {folder}/absent: No such file"),
    (["{folder}/none/bad.log", "{folder}/absent"], "{folder}/none/bad.log is no run log"),
    (["{folder}/bad"], "no verdict is possible\n{folder}/bad/a.jsonl, line 1: every line"),
    (["{folder}/empty"], "no run logs"),
    (["{folder}/mixed"], "name different targets: give one with --target"),
    (["{folder}/none"], "name no target: give one with --target"),
    (["{folder}/nano"], "is no run log: nanoGPT's lines declare no total of steps"),
    (["{folder}/public.txt"], "public.txt, line 6: val_loss 0.0: a loss is above 0"),
    (["{folder}/own.jsonl"], "own.jsonl, line 2: val_loss -3.2: a loss is above 0"),
])  # fmt: skip
def test_bad_input_exits_with_2_and_a_sentence(tmp_path, capsys, arguments, sentence):
    write_run(tmp_path, "own", {100: -3.2}, seed=0)
    write_public(tmp_path / "public.txt", {1750: 0.0})
    write_run(tmp_path / "mixed", "a", {100: 3.2}, seed=0)
    write_run(tmp_path / "mixed", "b", {100: 3.2}, seed=1, target=2.92)
    write_run(tmp_path / "none", "a", {100: 3.2}, seed=0, target=None)
    (tmp_path / "bad").mkdir()
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "a.log").write_text("step 250: train loss 3.3111, val loss 3.4022\n")
    (tmp_path / "empty" / "below").mkdir(parents=True)
    for name in ("none/bad.log", "bad/a.jsonl"):
        (tmp_path / name).write_text("val_loss:3.2\n" * 2)
    try:
        code = main([argument.format(folder=tmp_path) for argument in arguments])
    except SystemExit as error:  # argparse's own way out
        code = error.code
    assert code == 2
    assert sentence.format(folder=tmp_path) in capsys.readouterr().err
