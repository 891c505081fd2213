"""From run logs to a verdict: nothing that a crash, a copy or a hand does to a log is evidence."""

import json
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_1samp
from test_stats import LOSSES, NORMUON_3250, VE_TUNED

from scripts.significance import main

PUBLIC = Path("track_1_short", "2025-07-12_Name")  # where public records of the first track lie
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
])  # fmt: skip
def test_bad_input_exits_with_2_and_a_sentence(tmp_path, capsys, arguments, sentence):
    write_run(tmp_path / "mixed", "a", {100: 3.2}, seed=0)
    write_run(tmp_path / "mixed", "b", {100: 3.2}, seed=1, target=2.92)
    write_run(tmp_path / "none", "a", {100: 3.2}, seed=0, target=None)
    (tmp_path / "bad").mkdir()
    (tmp_path / "empty" / "below").mkdir(parents=True)
    for name in ("none/bad.log", "bad/a.jsonl"):
        (tmp_path / name).write_text("val_loss:3.2\n" * 2)
    try:
        code = main([argument.format(folder=tmp_path) for argument in arguments])
    except SystemExit as error:  # argparse's own way out
        code = error.code
    assert code == 2
    assert sentence.format(folder=tmp_path) in capsys.readouterr().err


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
