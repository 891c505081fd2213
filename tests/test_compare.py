"""Two arms against each other: scipy's tests, and logs whose difference is known beforehand."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_ind, ttest_rel
from test_significance import text_of, write_run

from claims.arms import judge_arm
from claims.compare import in_sentences
from claims.logs import read_all
from scripts.significance import main

OLD, NEW = [3.30, 3.35, 3.25, 3.40], [3.29, 3.33, 3.24, 3.37]
OLD_MS, NEW_MS = [30.0, 31.0, 30.5, 32.0], [29.0, 28.0, 28.5, 28.0]


def write_arm(
    folder: Path, ms: Sequence[float], losses: Sequence[float], first: int = 0, steps: int = 10,
    **facts,
) -> str:  # fmt: skip
    """Runs of steps that each take so many milliseconds, on rising seeds. Names sort by time."""
    facts = {"torch": "2.13"} | facts
    for seed, (each, loss) in enumerate(zip(ms, losses, strict=True), first):
        write_run(folder, f"{each}_{seed}", {steps: loss}, seed=seed, total=steps, step_ms=each,
                  **facts)  # fmt: skip
    return str(folder)


def compare(capsys, a: str, b: str) -> dict:
    """What --json prints of B - A."""
    assert main([b, "--against", a, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("first", "pairs"), [(0, 4), (1, 0), (10, 0)])
def test_differences_are_those_of_scipy_on_pairs_if_all_seeds_are_equal_in_any_order_of_files(
    tmp_path, capsys, first, pairs
):
    a = write_arm(tmp_path / "a", OLD_MS, OLD)
    b = write_arm(tmp_path / "b", NEW_MS, NEW, first=first, source="b")
    found = compare(capsys, a, b)
    seconds = [[ms / 100 for ms in arm] for arm in (NEW_MS, OLD_MS)]
    for name, (new, old) in (("loss", (NEW, OLD)), ("seconds", seconds)):
        test = ttest_rel(new, old) if pairs else ttest_ind(new, old, equal_var=False)
        interval = test.confidence_interval(0.95)
        assert (found[name]["low"], found[name]["high"]) == pytest.approx(tuple(interval))
        assert found[name]["mean"] == pytest.approx(np.mean(new) - np.mean(old))
        assert found[name]["p_two_sided"] == pytest.approx(test.pvalue)
    assert found["pairs"] == pairs


def test_the_text_says_what_is_shown_and_what_is_not(tmp_path, capsys):
    a, b = write_arm(tmp_path / "a", OLD_MS, OLD), write_arm(tmp_path / "b", NEW_MS, NEW, first=4)
    text = text_of(capsys, b, "--against", a)
    assert "B - A of independent runs" in text
    assert "not shown to be lower or higher" in text
    assert "time -0.025 (" in text
    assert "s, faster, on this machine" in text
    assert "slower, on this machine" in text_of(capsys, a, "--against", b)
    pairs = write_arm(tmp_path / "c", NEW_MS, NEW)
    assert "B - A on 4 pairs of one seed" in text_of(capsys, pairs, "--against", a)


def name_tokens(folder: str, sha256: object, pattern: str = "*") -> None:
    for path in Path(folder).glob(pattern):
        header, rest = path.read_text().split("\n", 1)
        data = {"val_sha256": sha256}
        path.write_text(json.dumps(json.loads(header) | {"data": data}) + f"\n{rest}")


def test_every_run_is_asked_for_its_validation_tokens(tmp_path):
    folders = write_arm(tmp_path / "a", OLD_MS, OLD), write_arm(tmp_path / "b", NEW_MS, NEW)
    for folder in folders:
        name_tokens(folder, "a")
    name_tokens(folders[1], "b", "*_3.jsonl")
    arms = [judge_arm(folder, read_all([folder])[0]) for folder in folders]
    assert "scored on other validation tokens than A" in in_sentences(*arms)


def test_losses_on_other_validation_tokens_are_told_and_name_the_arms(tmp_path, capsys):
    a, b = write_arm(tmp_path / "a", OLD_MS, OLD), write_arm(tmp_path / "b", NEW_MS, NEW)
    name_tokens(b, "b" * 64)
    assert "other validation tokens" not in text_of(capsys, b, "--against", a), "A names none"
    name_tokens(a, ["forged"])
    assert "scored on other validation tokens than A" in text_of(capsys, b, "--against", a)
    for path in (tmp_path / "b").iterdir():
        path.rename(tmp_path / "a" / f"b_{path.name}")
    assert "(data=bbbbbbbbbbbb)" in text_of(capsys, a)


def test_unfinished_runs_are_left_out_and_a_shared_log_is_refused(tmp_path, capsys):
    a, b = write_arm(tmp_path / "a", OLD_MS, OLD), write_arm(tmp_path / "b", NEW_MS, NEW)
    write_run(tmp_path / "a", "cut", {10: 3.2}, seed=4, status="interrupted")
    assert "cut.jsonl: ended with status interrupted" in text_of(capsys, b, "--against", a)
    assert main([a, "--against", a]) == 2
    assert "is in both arms" in capsys.readouterr().err


def test_two_arms_of_one_folder_are_listed_by_what_differs(tmp_path, capsys):
    write_arm(tmp_path, OLD_MS, OLD, source="a" * 64)
    write_arm(tmp_path, NEW_MS, NEW, first=4, steps=8, source="b" * 64)
    assert main([str(tmp_path), "--against", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "2 arms where one is needed: copy the logs of one to a folder" in error
    assert f"\n  {tmp_path} (steps=8)\n  {tmp_path} (steps=10)\n" in error
