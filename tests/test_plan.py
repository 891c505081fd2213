"""Plans made before the runs."""

import json
import re

import numpy as np
import pytest
from scipy.stats import ttest_rel

from scripts import compare, significance
from scripts.plan import main


def planned(capsys, *arguments: object) -> dict:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_runs_needed_are_the_published_ones(capsys):
    assert planned(capsys)["runs_needed"] == {"0.8": 20, "0.9": 25}
    case = planned(capsys, "--sd", 0.0020, "--margin", 0.0025)
    assert case["runs_needed"] == {"0.8": 10, "0.9": 12}
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "20 runs for a power of 0.8" in said
    assert "sd and margin are defaults" in said


def test_looks_are_planned_with_their_level(capsys):
    plan = planned(capsys, "--looks", "10,20")
    assert plan["look_level"] == pytest.approx(0.0054, abs=0.0003)


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--sd", "0"], "sd is 0.0: it must be between 0 and inf"),
    (["--looks", "10,5"], "looks are (10, 5): they must be rising numbers of runs"),
    (["--sd", "1", "--margin", "1e-9"], "more than 10,000 runs are needed"),
])  # fmt: skip
def test_bad_input_exits_with_2_and_a_sentence(capsys, arguments, sentence):
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


def write_arm(folder, losses):
    folder.mkdir()
    for seed, loss in losses.items():
        events = [
            {"event": "header", "schema": 2, "run_id": f"2026_{seed}", "seed": seed, "trial": 0,
             "track": "tiny", "target": 3.3, "source_sha256": "a", "config_sha256": "b",
             "env": {"gpu_count": 0}},
            {"event": "val", "step": 9, "total_steps": 9, "val_loss": loss, "train_time_ms": 1.0},
            {"event": "end", "status": "done", "steps": 9, "val_loss": loss},
        ]
        lines = [json.dumps(event | {"t_ms": 0.0}) + "\n" for event in events]
        (folder / f"2026_{seed}.jsonl").write_text("".join(lines))
    return folder


def test_runs_on_the_same_seeds_need_fewer_pairs_than_runs_apart(tmp_path, capsys):
    a = write_arm(tmp_path / "a", {1: 3.30, 2: 3.35, 3: 3.25, 4: 3.40})
    b = write_arm(tmp_path / "b", {1: 3.29, 2: 3.33, 3: 3.24, 4: 3.38, 5: 1.0})
    plan = planned(capsys, "--pairs", a, b, "--margin", 0.02)
    assert plan["seeds"] == [1, 2, 3, 4]
    assert plan["sd"] == pytest.approx(np.std([-0.01, -0.02, -0.01, -0.02], ddof=1))
    alone = planned(capsys, "--sd", plan["sd"], "--margin", 0.02)
    assert plan["pairs_needed"] == alone["runs_needed"]["0.8"]
    assert plan["unpaired_needed"] > 20 * plan["pairs_needed"]
    assert main(["--pairs", str(a), str(write_arm(tmp_path / "c", {7: 3.3}))]) == 2
    assert "share 0 seeds" in capsys.readouterr().err


def as_record(folder):
    """Move the logs of a folder to where a record has them."""
    (folder / "runs").mkdir()
    for log in folder.glob("*.jsonl"):
        log.rename(folder / "runs" / log.name)
    (folder / "claim.json").write_text("{}")
    return folder


def test_a_plan_takes_sd_margin_and_target_from_logs(tmp_path, capsys):
    losses = {1: 3.20, 2: 3.25, 3: 3.15, 4: 3.30}
    record = as_record(write_arm(tmp_path / "a", losses))
    for words, target in (([], 3.3), (["--target", 3.26], 3.26)):
        sd, mean = np.std(list(losses.values()), ddof=1), np.mean(list(losses.values()))
        expected = planned(capsys, "--sd", sd, "--margin", target - mean)
        plan = planned(capsys, record, *words)
        assert plan["runs_needed"] == expected["runs_needed"]
        assert plan["margin"] == pytest.approx(target - mean)
    assert main([str(record), "--target", "3.2"]) == 2
    assert "is 3.2250, the target 3.2: no number of runs" in capsys.readouterr().err


def test_one_run_prints_no_nan_and_is_too_few_to_plan(tmp_path, capsys):
    a = as_record(write_arm(tmp_path / "a", {1: 3.2}))
    b = write_arm(tmp_path / "b", {2: 3.1})
    assert significance.main([str(a)]) == 1
    assert compare.main([str(a), str(b)]) == 1
    said = capsys.readouterr().out
    assert "n 1   mean 3.200000\n" in said
    assert not re.search(r"\bnan\b", said)
    assert main([str(a)]) == 2
    assert "a has 1 run: a spread needs 2" in capsys.readouterr().err


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_arms_without_a_spread_between_them_leave_nothing_to_plan_and_no_saving(
    tmp_path, capsys, shift
):
    losses = {1: 3.25, 2: 3.5, 3: 3.75, 4: 4.0}  # exact in binary, as is their shift
    a = write_arm(tmp_path / "a", losses)
    b = write_arm(tmp_path / "b", {seed: loss - shift for seed, loss in losses.items()})
    assert main(["--pairs", str(a), str(b), "--margin", "0.02"]) == 2
    said = capsys.readouterr().err
    assert "equal, or equally far apart, on all 4 seeds: there is nothing to plan" in said
    assert compare.main([str(a), str(b)]) in (0, 1)
    said = capsys.readouterr().out
    assert ", on 4 pairs of one seed each\n" in said
    compare.main([str(a), str(b), "--json"])
    assert json.loads(capsys.readouterr().out)["pairs_save"] is None


@pytest.mark.parametrize("words", [["--pairs", "A", "B"], ["--sd", "0.02"]])
def test_looks_are_not_planned_together_with_what_they_would_ignore(capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--looks", "5,10"])
    assert f"--looks: not allowed with argument {words[0]}" in capsys.readouterr().err


def test_compare_takes_runs_of_one_seed_as_pairs_and_says_what_that_saves(tmp_path, capsys):
    old, new = {1: 3.30, 2: 3.35, 3: 3.25, 4: 3.40}, {1: 3.29, 2: 3.33, 3: 3.24, 4: 3.38}
    a, b = write_arm(tmp_path / "a", old), write_arm(tmp_path / "b", new)
    compare.main([str(a), str(b), "--json"])
    found = json.loads(capsys.readouterr().out)
    test = ttest_rel(list(new.values()), list(old.values()))
    assert found["loss"]["p_two_sided"] == pytest.approx(test.pvalue)
    assert found["pairs"] == 4
    spread = np.var(list(new.values()), ddof=1) + np.var(list(old.values()), ddof=1)
    assert found["pairs_save"] == pytest.approx(spread / np.var([0.01, 0.02, 0.01, 0.02], ddof=1))
    write_arm(tmp_path / "a5", old | {5: 3.31})
    compare.main([str(tmp_path / "a5"), str(b), "--json"])
    assert json.loads(capsys.readouterr().out)["pairs"] == 0  # or the loss of seed 5 would be lost
