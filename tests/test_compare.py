"""Two arms against each other: scipy's tests, and logs whose difference is known beforehand."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_ind, ttest_rel
from test_significance import write_run

from claims.compare import other_tokens
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


def compare(capsys, a: str, b: str) -> tuple[dict, str]:
    """B - A, as --json prints it and as text."""
    assert main([b, "--against", a, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main([b, "--against", a]) == 0
    return facts, capsys.readouterr().out


@pytest.fixture
def two_arms(tmp_path) -> tuple[str, str]:
    return write_arm(tmp_path / "a", OLD_MS, OLD), write_arm(tmp_path / "b", NEW_MS, NEW)


@pytest.mark.parametrize(("first", "pairs", "words"), [
    (0, 4, "B - A on 4 pairs of one seed"), (1, 0, "B - A of independent runs"),
    (10, 0, "B - A of independent runs"),
], ids=["equal seeds", "some equal seeds", "other seeds"])  # fmt: skip
def test_differences_are_those_of_scipy_on_pairs_if_all_seeds_are_equal_in_any_order_of_files(
    tmp_path, capsys, first, pairs, words
):
    a = write_arm(tmp_path / "a", OLD_MS, OLD)
    b = write_arm(tmp_path / "b", NEW_MS, NEW, first=first, source="b")
    found, text = compare(capsys, a, b)
    seconds = [[ms / 100 for ms in arm] for arm in (NEW_MS, OLD_MS)]
    for name, (new, old) in (("loss", (NEW, OLD)), ("seconds", seconds)):
        test = ttest_rel(new, old) if pairs else ttest_ind(new, old, equal_var=False)
        interval = test.confidence_interval(0.95)
        assert (found[name]["low"], found[name]["high"]) == pytest.approx(tuple(interval))
        assert found[name]["mean"] == pytest.approx(np.mean(new) - np.mean(old))
        assert found[name]["p_two_sided"] == pytest.approx(test.pvalue)
    assert found["pairs"] == pairs
    assert words in text


def test_the_text_says_what_is_shown_and_what_is_not(tmp_path, capsys):
    a, b = write_arm(tmp_path / "a", OLD_MS, OLD), write_arm(tmp_path / "b", NEW_MS, NEW, first=4)
    text = compare(capsys, a, b)[1]
    assert "not shown to be lower or higher" in text
    assert "time -0.025 (" in text
    assert "s, faster, on this machine" in text
    assert "slower, on this machine" in compare(capsys, b, a)[1]


def name_tokens(folder: str, sha256: object, pattern: str = "*") -> None:
    """The runs say on which validation tokens they were scored."""
    for path in Path(folder).glob(pattern):
        header, rest = path.read_text().split("\n", 1)
        data = {"val_sha256": sha256}
        path.write_text(json.dumps(json.loads(header) | {"data": data}) + f"\n{rest}")


def test_losses_on_other_validation_tokens_are_told_and_name_the_arms(two_arms, capsys):
    a, b = two_arms
    name_tokens(b, "b" * 64)
    assert "other validation tokens" not in compare(capsys, a, b)[1], "A names none"
    name_tokens(a, ["forged"])
    assert "scored on other validation tokens than A" in compare(capsys, a, b)[1]
    for path in Path(b).iterdir():
        path.rename(Path(a) / f"b_{path.name}")
    main([a])
    assert "(data=bbbbbbbbbbbb)" in capsys.readouterr().out


def test_every_run_is_asked_for_its_validation_tokens(two_arms):
    name_tokens(two_arms[1], "b")
    name_tokens(two_arms[1], "c", "*_3.jsonl")
    first, last = (read_all([arm])[0] for arm in two_arms)
    assert (other_tokens(first, last), other_tokens(first, last[:1])) == (True, False)


def test_unfinished_runs_are_left_out_and_a_shared_log_is_refused(two_arms, capsys):
    a, b = two_arms
    write_run(Path(a), "cut", {10: 3.2}, seed=4, status="interrupted")
    assert "cut.jsonl: ended with status interrupted" in compare(capsys, a, b)[1]
    assert main([a, "--against", a]) == 2
    assert "is in both arms" in capsys.readouterr().err


def test_two_arms_of_one_folder_are_listed_by_what_differs(tmp_path, capsys):
    write_arm(tmp_path, OLD_MS, OLD, source="a" * 64)
    write_arm(tmp_path, NEW_MS, NEW, first=4, steps=8, source="b" * 64)
    assert main([str(tmp_path), "--against", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "2 arms where one is needed: copy the logs of one to a folder" in error
    assert f"\n  {tmp_path} (steps=8)\n  {tmp_path} (steps=10)\n" in error
