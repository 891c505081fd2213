"""Plans made before the runs, and what is said of runs that failed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.log import SCHEMA, RunLog
from scripts.plan import main

ROOT = Path(__file__).resolve().parents[1]
FP8_MLP_UP = [3.2802, 3.2800, 3.2789, 3.2763, 3.2792, 3.2793, 3.2781, 3.2785]  # a public record that misses its mark


def planned(capsys, *arguments: object) -> dict:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def write_arm(folder: Path, losses: list[float], status: str = "done") -> None:
    for seed, loss in enumerate(losses):
        log = RunLog(folder, f"run_{seed}_{status}")
        log.write("header", schema=SCHEMA, run_id=log.path.stem, track="tiny", target=3.28, seed=seed, trial=0,
                  claim=None, source_sha256="source", config_sha256="config", config={}, env={"gpu_count": 1})
        log.write("val", step=50, total_steps=50, val_loss=loss, train_time_ms=1.0)
        log.write("end", status=status, steps=50, val_loss=loss)
        log.close()


def test_without_arguments_the_published_tables_are_printed(capsys):
    assert main([]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["sd", "0.0013", "71/91", "20/25", "11/13", "8/9", "6/7"] in rows
    assert ["sd", "0.002", "164/211", "43/55", "21/26", "13/16", "10/12"] in rows
    assert "0.00283 3.27782" in " ".join(next(row for row in rows if row[:2] == ["runs", "5"]))


def test_one_case_is_planned_with_its_own_chances(capsys):
    plan = planned(capsys, "--sd", 0.0013, "--margin", "0.001,0.002", "--power", 0.9, "--alpha", 0.01, "--runs", 10)
    assert plan["runs_needed"] == [{"sd": 0.0013, "margin": 0.001, "runs": [25]},
                                   {"sd": 0.0013, "margin": 0.002, "runs": [9]}]
    plan = planned(capsys, "--sd", 0.0013, "--margin", "0.001,0.0015,0.002", "--power", 0.8, "--target", 2.92)
    assert [entry["runs"] for entry in plan["equivalence"]] == [[30], [14], [9]]
    assert plan["shown"][2]["passing_mean"] == pytest.approx(2.92 - 0.00116, abs=1e-5)
    assert planned(capsys, "--target", 0)["shown"][0]["passing_mean"] < 0


def test_looks_are_planned_with_their_level_and_their_cost(capsys):
    plan = planned(capsys, "--looks", "10,20")
    assert plan["look_level"] == pytest.approx(0.0054, abs=0.0003)
    assert plan["unplanned_level"] == pytest.approx(0.0178, rel=0.05)
    main(["--looks", "10,20"])
    assert "Looks at 10, 20 runs: test at p < 0.005" in capsys.readouterr().out


def test_losses_that_failed_are_told_what_would_have_passed_and_are_warned(capsys):
    arguments = ["--losses", ",".join(map(str, FP8_MLP_UP)), "--target", 3.28]
    (arm,) = planned(capsys, *arguments)["arms"]
    assert (arm["passes"], arm["runs_to_pass"], arm["fresh_runs"]) == (False, 10, 14)
    assert 0.01 < arm["level_of_adding"] < 0.02
    main(list(map(str, arguments)))
    text = capsys.readouterr().out
    for words in ("UNVERIFIED", "10 runs would pass", "do not add runs until they pass", "Make 14 fresh runs"):
        assert words in text


@pytest.mark.parametrize(("losses", "verdict"), [
    ("3.27,3.271,3.272", "PASS: no more runs are needed"),
    ("3.29,3.291", "no number of runs would pass"),
    ("3.27,3.27", "there is no test without a spread"),
    ("3.27", "there is no test without a spread"),
])  # fmt: skip
def test_every_outcome_has_its_sentence(capsys, losses, verdict):
    assert main(["--losses", losses, "--target", "3.28"]) == 0
    assert verdict in capsys.readouterr().out
    assert planned(capsys, "--losses", losses, "--target", "3.28")["arms"][0]["n"] == losses.count(",") + 1


def test_logs_are_reviewed_by_arm_with_what_was_left_out(tmp_path, capsys):
    write_arm(tmp_path, FP8_MLP_UP)
    write_arm(tmp_path, [3.2], status="interrupted")
    found = planned(capsys, tmp_path)
    assert [(arm["n"], arm["target"], arm["runs_to_pass"]) for arm in found["arms"]] == [(8, 3.28, 10)]
    assert found["notes"] == [f"left out: {tmp_path / 'run_0_interrupted.jsonl'}: ended with status interrupted"]
    assert planned(capsys, tmp_path, "--target", 3.2793)["arms"][0]["runs_to_pass"] == 38


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--sd", "0"], "'0' must be numbers from 1e-09 to 1e+09 with commas between them"),
    (["--runs", "1.5"], "'1.5' must be whole numbers from 2 to 1e+09"),
    (["--looks", "10,5"], "looks are (10, 5): they must be rising numbers of runs"),
    (["--alpha", "0"], "alpha is 0.0: it must lie between 0.0001 and 0.5"),
    (["--power", "1"], "power is 1.0: it must lie between 0.01 and 1"),
    (["--sd", "1e9", "--margin", "1e-9"], "more than 1,000,000,000 runs are needed"),
    (["--target", "nan"], "--target must be a finite number, like 3.28"),
    (["--losses", "3.2,nan", "--target", "3"], "'3.2,nan' must be numbers"),
    (["--losses", "3.2"], "--losses needs --target"),
    (["logs", "--losses", "3.2", "--target", "3"], "one of the two"),
    (["logs", "--sd", "1"], "plan runs to come"),
    (["absent"], "absent does not exist"),
    (["--los", "3.2"], "unrecognized arguments: --los"),
])  # fmt: skip
def test_bad_input_exits_with_2_and_a_sentence(capsys, arguments, sentence):
    try:
        code = main(arguments)
    except SystemExit as error:  # argparse's own way out
        code = error.code
    assert code == 2
    assert sentence in capsys.readouterr().err


def test_the_command_starts_from_any_folder_without_torch_and_ends_quietly_when_nobody_reads(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not installed here')\n")
    plan = f"{sys.executable} {ROOT / 'scripts' / 'plan.py'} --json"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}
    result = subprocess.run(
        f"{plan} | true; {plan}", shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert (json.loads(result.stdout)["looks"], result.stderr) == ([5, 10], "")
