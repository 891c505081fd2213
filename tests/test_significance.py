"""From run logs to a verdict: nothing that a crash, a copy or a hand does to a log is evidence."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_1samp
from test_stats import LOSSES, NORMUON_3250, VE_TUNED

from scripts.significance import main

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = Path("track_1_short", "2025-07-12_Name")  # where public records of the first track lie
DOCUMENTED = [
    "path", "source", "total_steps", "gpu_count", "n", "losses", "times_ms", "mean", "sd", "t", "p",
    "upper99", "passes", "incomplete", "warnings",
]  # fmt: skip
BOS_ALIGN, FIX_MUON_LR = LOSSES["BosAlign"], LOSSES["FixMuonLR"]  # of public records
MIMETIC_AGAIN = [round(loss - 0.0001, 4) for loss in LOSSES["MimeticValueOutput"]]
MIMETIC, FP8_MLP_UP = LOSSES["MimeticValueOutput"], LOSSES["FP8MLPUpProj"]


def write_run(
    folder: Path, run_id: str, losses: dict[int, Any], *, seed: int, total: int = 100,
    target: float | None = 3.28, source: str = "source", config: str = "config", gpus: int = 8,
    status: str | None = "done", track: str = "short", claim: str | None = None,
    settings: dict[str, Any] | None = None, step_ms: float = 2.0, **env: object,
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
        events.append({"event": "end", "status": status, "steps": steps, "val_loss": None})
    path = folder / f"{run_id}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event | {"t_ms": 1.0}) + "\n" for event in events))
    return path


def write_arm(folder: Path, losses: list[float], *, first_seed: int = 0, **facts) -> None:
    for seed, loss in enumerate(losses, first_seed):
        write_run(folder, f"run_{seed:03}", {50: 4.0 + seed, 100: loss}, seed=seed, **facts)


def write_public(
    path: Path, *runs: dict[int, float], source: str = "print()\n", total: int = 1750,
    digits: int = 4, seed: int | None = None, also: str = "",
) -> Path:  # fmt: skip
    """A log in the public text format, with the validation losses of its runs by step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [source + "=" * 100, "Running PyTorch 2.10.0 on NVIDIA H100 with world_size 8"]
    if seed is not None:
        lines.append(f"Using seed={seed}")
    lines.append("=" * 100)
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


def judge(capsys, *arguments: object) -> tuple[int, list[dict]]:
    """Exit code and arms of `significance.py --json`."""
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)["arms"]


def text_of(capsys, *arguments: object) -> str:
    main(list(map(str, arguments)))
    return capsys.readouterr().out


def warned(arm: dict, words: str) -> bool:
    return any(words in warning for warning in arm["warnings"])


@pytest.mark.parametrize(("losses", "p", "passes"), [
    (BOS_ALIGN, 0.00489597, True), (FIX_MUON_LR, 0.00831728, True), (FP8_MLP_UP, 0.0148143, False),
])  # fmt: skip
def test_the_published_records_get_their_published_verdict(tmp_path, capsys, losses, p, passes):
    write_public_arm(tmp_path / PUBLIC, losses)
    code, (arm,) = judge(capsys, tmp_path / PUBLIC)
    assert (arm["p"], arm["passes"]) == (pytest.approx(p, rel=4e-6), passes)
    assert arm["gpu_count"] == 8
    assert code == (0 if passes else 1)
    assert arm["losses"] == losses


def test_an_arm_in_json_has_exactly_the_documented_fields(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC)
    code, (arm,) = judge(capsys, tmp_path)
    assert list(arm) == DOCUMENTED
    assert (code, arm["n"], arm["losses"], arm["times_ms"]) == (0, 7, MIMETIC, [200.0] * 7)
    assert [arm[name] for name in DOCUMENTED[:4]] == [str(tmp_path), "source", 100, 8]
    assert (arm["passes"], arm["incomplete"], arm["warnings"]) == (True, [], [])


def test_a_folder_of_two_sources_is_two_arms_and_says_so(tmp_path, capsys):
    folder = tmp_path / PUBLIC
    write_public_arm(folder, BOS_ALIGN)
    write_public(folder / "z_retimed.txt", {1000: 3.6, 1750: 3.2771}, source="print(1)\n")
    code, arms = judge(capsys, folder)
    assert (code, [arm["n"] for arm in arms]) == (0, [20, 1])
    assert [arm["passes"] for arm in arms] == [True, False]
    assert all(warned(arm, "2 sources in these logs") for arm in arms)
    text = text_of(capsys, folder)
    assert "NO VERDICT: 1 run counts, and a test needs 4" in text
    assert "p 0.00979, pass" in text, "Holm counts the arm that has no test"


def test_arms_that_pass_alone_fail_as_a_family(tmp_path, capsys):
    for number, losses in enumerate(VE_TUNED.values()):
        source = f"print({number})\n"
        write_public_arm(tmp_path / PUBLIC, losses, stem=f"arm_{number}", source=source)
    code, arms = judge(capsys, tmp_path / PUBLIC)
    assert (code, [arm["passes"] for arm in arms].count(True)) == (1, 2)
    text = text_of(capsys, tmp_path / PUBLIC)
    assert text.count("Holm over the 7 arms and steps tried") == 7
    assert "p 0.0237, fail" in text


def test_steps_that_were_tried_are_a_family_and_each_has_its_own_losses(tmp_path, capsys):
    for seed, (early, late) in enumerate(zip(FP8_MLP_UP, FIX_MUON_LR, strict=False)):
        write_run(tmp_path, f"run_{seed}", {80: early, 90: late, 100: 3.1 + seed}, seed=seed)
    sparse = write_run(tmp_path, "sparse", {90: 3.2781, 100: 3.1}, seed=8)
    _, arms = judge(capsys, tmp_path, "--at-step", "90,80")
    found = [(arm["n"], arm["losses"][0], arm["times_ms"][0]) for arm in arms]
    assert found == [(8, 3.2802, 160.0), (9, 3.2804, 180.0)]
    reason = "no validation at step 80"
    assert arms[0]["incomplete"] == [{"path": str(sparse), "reason": reason, "last_loss": 3.1}]
    assert "Holm over the 2 arms" in text_of(capsys, tmp_path, "--at-step", "90,80")


def test_two_files_of_ten_runs_each_are_judged_at_the_claimed_step(tmp_path, capsys):
    folder = tmp_path / "track_3_optimization" / "results" / "20260503_name"
    runs = [{1000: 4 + loss, 3250: loss, 3300: loss - 0.0017} for loss in NORMUON_3250]
    for name, part in (("a", runs[:10]), ("b", runs[10:])):
        write_public(folder / f"{name}.txt", *part, total=3300, digits=5)
    code, (arm,) = judge(capsys, folder, "--at-step", 3250)
    assert (code, arm["n"], arm["losses"], arm["total_steps"]) == (0, 20, NORMUON_3250, 3300)
    assert arm["p"] == pytest.approx(ttest_1samp(NORMUON_3250, 3.28, alternative="less").pvalue)
    text = text_of(capsys, folder, "--at-step", 3250)
    assert "steps rule: (target - mean) * sqrt(n) = 0.00503, pass" in text
    assert "b.txt (run 10)" in text


@pytest.mark.parametrize(("loss", "verdict"), [(3.277, "0.00600, pass"), (3.279, "0.00200, fail")])
def test_logs_of_the_track_steps_are_also_judged_by_its_rule(tmp_path, capsys, loss, verdict):
    for seed, spread in enumerate((-0.003, -0.001, 0.001, 0.003)):
        last = {3250: loss + spread}
        write_run(tmp_path, f"run_{seed}", last, seed=seed, track="steps", total=3250)
    assert f"(target - mean) * sqrt(n) = {verdict}" in text_of(capsys, tmp_path)


def test_losses_without_a_finite_spread_fail(tmp_path, capsys):
    for seed, loss in enumerate([3.27, 3.28, 3.29, "nan"]):
        write_run(tmp_path, f"run_{seed}", {50: 4.0 + seed, 100: loss}, seed=seed)
    code, (arm,) = judge(capsys, tmp_path)
    assert warned(arm, "losses without a finite spread: there is no test")
    assert (code, arm["passes"]) == (1, False)


def test_fewer_than_four_runs_have_no_verdict_and_fail_no_other_arm(tmp_path, capsys):
    folder = tmp_path / PUBLIC
    write_public_arm(folder, [3.2765, 3.2766, 3.2767])
    code, (arm,) = judge(capsys, folder)
    assert (code, arm["passes"]) == (1, False)
    assert "NO VERDICT: 3 runs count, and a test needs 4" in text_of(capsys, folder)
    write_public_arm(folder, BOS_ALIGN, stem="other", source="print(1)\n")
    code, arms = judge(capsys, folder)
    assert (code, [arm["passes"] for arm in arms]) == (0, [True, False])
    write_public_arm(folder, FP8_MLP_UP, stem="third", source="print(2)\n")
    assert judge(capsys, folder)[0] == 1, "eight runs that do not pass fail"


def test_a_run_that_diverged_fails_its_arm_whatever_the_others_have(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC)
    write_run(tmp_path, "diverged", {50: 3.1}, seed=7, status="nonfinite")
    write_arm(tmp_path, MIMETIC_AGAIN, first_seed=20, source="other")
    code, arms = judge(capsys, tmp_path)
    assert (code, [(arm["n"], arm["passes"]) for arm in arms]) == (1, [(7, False), (7, True)])
    assert [warned(arm, "a run diverged") for arm in arms] == [True, False]
    text = text_of(capsys, tmp_path)
    assert (text.count(", pass"), text.count(", fail")) == (1, 1), "by Holm too"


def test_unfinished_runs_are_left_out_and_named(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC)
    cut = write_run(tmp_path, "cut", {50: 3.1}, seed=7, status=None)
    early = write_run(tmp_path, "early", {}, seed=8, status="interrupted")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    code, (arm,) = judge(capsys, tmp_path)
    assert (code, arm["n"]) == (2, 7), "what the empty log held is unknown"
    assert [(run["path"], run["reason"]) for run in arm["incomplete"]] == [
        (str(cut), "no end line"), (str(early), "ended with status interrupted")]
    assert f"not read: {empty} is empty" in text_of(capsys, tmp_path)
    (tmp_path / "named").mkdir()
    elsewhere = empty.rename(tmp_path / "named" / "empty.jsonl")
    code, (arm,) = judge(capsys, tmp_path, elsewhere)
    assert (code, arm["n"]) == (2, 7), "it hides no other verdict"
    assert f"left out: {cut}: no end line" in text_of(capsys, tmp_path)
    code, (arm,) = judge(capsys, cut)
    assert (code, arm["n"], arm["p"], arm["passes"]) == (1, 0, None, False)


def test_claims_and_gaps_in_the_seeds_are_said(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC, claim="c1a1")
    assert not judge(capsys, tmp_path)[1][0]["warnings"]
    write_run(tmp_path, "late", {100: 3.2781}, seed=9)
    _, (arm,) = judge(capsys, tmp_path)
    assert arm["n"] == 8
    assert warned(arm, "different claims: None, c1a1")
    assert warned(arm, "no run has seed 7, 8: was it made and left out?")


def test_a_target_that_is_given_overrides_that_of_the_logs(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC, target=3.27)
    assert judge(capsys, tmp_path)[0] == 1
    assert judge(capsys, tmp_path, "--target", 3.28)[0] == 0


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
])  # fmt: skip
def test_bad_input_exits_with_2_and_a_sentence(tmp_path, capsys, arguments, sentence):
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


def test_the_command_starts_anywhere_without_torch(tmp_path):
    write_arm(tmp_path / "logs", MIMETIC)
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not installed here')\n")
    command = [sys.executable, ROOT / "scripts" / "significance.py", "logs", "--json"]
    options = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}}
    result = subprocess.run(command, capture_output=True, check=True, **options)
    assert json.loads(result.stdout)["arms"][0]["n"] == 7


def test_runs_that_differ_in_steps_settings_or_gpus_are_arms_named_by_it(tmp_path, capsys):
    shared, several = {"recipe": "muon", "cautious_wd": True}, [0.85, 0.9]
    arms = [(1, 30, 0.95, 8), (1, 32, 0.95, 8), (2, 32, several, 8), (1, 32, 0.95, 1)]
    for number, (config, steps, momentum, gpus) in enumerate(arms):
        for seed in range(4):
            own = {"seed": 100 * number + seed, "log_dir": f"logs/{number}"}
            settings = own | shared | {"steps": steps, "momentum": momentum}
            write_run(tmp_path, f"{number}_{seed}", {steps: 3.2 + number + seed / 100}, seed=seed,
                      total=steps, config=f"config {config}", settings=settings, gpus=gpus)
    text = text_of(capsys, tmp_path)
    titles = [part.splitlines()[0] for part in text.split("\n\n")]
    assert [title.partition(": source")[0] for title in titles] == [
        f"{tmp_path} (steps=30, momentum=0.95, gpus=8)",
        f"{tmp_path} (steps=32, momentum=0.95, gpus=8)",
        f"{tmp_path} (steps=32, momentum=0.85,0.9, gpus=8)",
        f"{tmp_path} (steps=32, momentum=0.95, gpus=1)"]  # fmt: skip
    assert text.count("n 4 ") == 4


@pytest.mark.parametrize("loss", [-3.2, 0.0])
def test_a_loss_that_is_not_above_zero_is_refused_in_logs_of_any_kind(tmp_path, capsys, loss):
    public = write_public(tmp_path / "public.txt", {1750: loss})
    own = write_run(tmp_path, "own", {100: loss}, seed=0)
    for path in (public, own):
        assert main([str(path)]) == 2
        assert "a loss is above 0" in capsys.readouterr().err


def test_runs_that_all_stop_at_one_step_before_the_declared_total_are_judged_there(
    tmp_path, capsys
):
    folder = tmp_path / PUBLIC
    write_public_arm(folder, BOS_ALIGN, total=2000)
    code, (arm,) = judge(capsys, folder)
    assert (code, arm["losses"], arm["total_steps"]) == (0, BOS_ALIGN, 2000)
    assert warned(arm, "all runs stop at step 1750 of 2000: judged there")
    write_public_arm(folder.with_name("old"), FIX_MUON_LR, total=2000)
    assert "B - A of independent runs" in text_of(
        capsys, folder, "--against", folder.with_name("old")
    )


def test_runs_that_stop_at_different_steps_are_judged_only_at_a_step_that_is_named(
    tmp_path, capsys
):
    folder = tmp_path / PUBLIC
    write_public_arm(folder, MIMETIC, total=2000)
    write_public(folder / "lucky.txt", {1000: 3.4, 1750: 3.281, 1800: 3.1}, total=2000)
    code, (arm,) = judge(capsys, folder)
    assert (code, arm["n"], len(arm["incomplete"])) == (1, 0, 8)
    assert warned(arm, "runs stop at step 1750, 1800")
    assert "NO VERDICT: no run counts" in text_of(capsys, folder)
    _, (arm,) = judge(capsys, folder, "--at-step", 1750)
    assert sorted(arm["losses"]) == sorted([*MIMETIC, 3.281])


def test_a_run_that_stops_early_is_left_out_where_others_reach_the_declared_total(tmp_path, capsys):
    folder = tmp_path / PUBLIC
    write_public_arm(folder, MIMETIC)
    write_public(folder / "early.txt", {1000: 3.2})
    code, (arm,) = judge(capsys, folder)
    assert (code, arm["losses"]) == (0, MIMETIC)
    assert arm["incomplete"][0]["reason"] == "last validation at step 1000 of 1750"


def test_of_two_losses_in_a_line_val_loss_is_judged_and_the_other_named(tmp_path, capsys):
    folder = tmp_path / PUBLIC
    write_public_arm(folder, MIMETIC, also=" val_ema_loss:3.10000")
    _, (arm,) = judge(capsys, folder)
    assert arm["losses"] == MIMETIC
    assert warned(arm, "the losses are val_loss, not val_ema_loss")


def test_public_logs_of_one_seed_count_once(tmp_path, capsys):
    folder = tmp_path / PUBLIC
    for index, loss in enumerate(MIMETIC):
        points = {1000: 3.5 + index / 1000, 1750: loss}
        write_public(folder / f"run_{index}.txt", points, seed=1337)
    code, (arm,) = judge(capsys, folder)
    assert (code, arm["losses"], arm["passes"]) == (1, MIMETIC[:1], False)
    assert sum("repeats the seed 1337" in warning for warning in arm["warnings"]) == 6


def test_each_folder_of_logs_below_a_folder_without_any_is_judged_by_itself(tmp_path, capsys):
    records = tmp_path / PUBLIC.parts[0]
    write_public_arm(records / "a", MIMETIC)
    write_public_arm(records / "b" / "runs", MIMETIC_AGAIN)
    (records / "c" / "pictures").mkdir(parents=True)
    code, arms = judge(capsys, records)
    assert [(arm["path"], arm["losses"]) for arm in arms] == [
        (str(records / "a"), MIMETIC), (str(records / "b" / "runs"), MIMETIC_AGAIN)]  # fmt: skip
    assert (code, [arm["passes"] for arm in arms]) == (0, [True, True])
    text = text_of(capsys, records)
    assert "Holm" not in text, "a family is one folder"
    assert f"not judged: no run logs in {records / 'c' / 'pictures'}" in text
    write_public_arm(records / "d", FP8_MLP_UP)
    assert judge(capsys, records)[0] == 1, "one does not pass"
    (records / "e").mkdir()
    torn = records / "e" / "torn.txt"
    torn.write_text("killed\n")
    code, arms = judge(capsys, records)
    assert (code, len(arms)) == (2, 3), "one cannot be read, and hides no other verdict"
    assert f"not read: {torn} is no run log" in text_of(capsys, records)


def test_a_named_folder_without_logs_hides_no_verdict_and_exits_with_2(tmp_path, capsys):
    write_public_arm(tmp_path / PUBLIC, MIMETIC)
    (tmp_path / "none").mkdir()
    code, (arm,) = judge(capsys, tmp_path / PUBLIC, tmp_path / "none")
    assert (code, arm["passes"]) == (2, True)


def test_a_folder_with_logs_of_its_own_hides_no_folder_below_it(tmp_path, capsys):
    records = tmp_path / PUBLIC
    write_public_arm(records, MIMETIC)
    write_public_arm(records / "baseline", FP8_MLP_UP)
    code, arms = judge(capsys, records)
    assert (code, [arm["passes"] for arm in arms]) == (1, [True, False])
    assert "Holm" not in text_of(capsys, records)


def test_judgements_below_a_log_folder_are_named_and_not_judged_with_it(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC)
    write_arm(tmp_path / "judge" / "001" / "A", FP8_MLP_UP)
    (tmp_path / "registry.jsonl").touch()
    assert judge(capsys, tmp_path)[0] == 0
    assert f"{tmp_path / 'judge'} has run logs too: name it" in text_of(capsys, tmp_path)
