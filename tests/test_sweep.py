"""Sweeps: the plan says what runs and in which order, no run is made twice, arms are compared."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scipy.stats import ttest_rel
from stub_command import FACTS, loss_of, make_project, write_source

from scripts import sweep

PATCH = """
--- a/train_gpt.py
+++ b/train_gpt.py
@@ -1,3 +1,3 @@
 {
- "loss": 3.4,
+ "loss": 3.15,
  "only_copies": false,
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It lies in a repository."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    root = make_project(tmp_path / "project", monkeypatch)
    (root / "idea.diff").write_text(PATCH)
    return root


def run(plan: dict | str, *words: str) -> int:
    Path("plan.json").write_text(plan if isinstance(plan, str) else json.dumps(plan))
    return sweep.main(["plan.json", "--source", ".", *words])


def logs() -> list[tuple[str, int]]:
    """Arm and seed of each run, in the order in which they ended."""
    found = []
    for path in sorted(Path("logs").rglob("2026_1*.jsonl"), key=lambda path: path.name):
        seed = json.loads(path.read_text().splitlines()[0])["seed"]
        found.append((path.parent.name.rpartition("_")[0], seed))
    return found


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each arm, in the order of the table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {arm: rest for arm, *rest in cells if len(rest) == 7 and arm not in ("-", "arm")}


def test_arms_are_compared_with_the_first_on_equal_seeds(project, capsys):
    arms = {"base": {"seeds": [0, 1, 2, 3, 9]}, "worse": "--gain -0.3", "better": "--gain 0.1",
            "patched": {"patch": "idea.diff"}, "bad": {"flags": "--gain 0.5 --diverge 2"},
            "alone": {"seeds": [5], "flags": "--gain -2"}}  # fmt: skip
    assert run({"seeds": [0, 1, 2, 3], "arms": arms}) == 0
    found = rows(capsys.readouterr().out)
    order = ["bad", "patched", "better", "base", "worse", "alone"]
    assert list(found) == order, "the lowest loss first"
    assert found["alone"][3:5] == ["", ""], "no seed in common"
    base, worse = ([loss_of(seed, gain) for seed in range(4)] for gain in (0.0, -0.3))
    test = ttest_rel(worse, base)
    low, high = test.confidence_interval(0.95)
    mean = (low + high) / 2
    assert found["worse"][:2] == ["4", "0"]
    assert found["worse"][3] == f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"
    assert float(found["worse"][4]) == pytest.approx(5 * test.pvalue, rel=0.05), "Holm over five"
    assert found["patched"][3] == "-0.2500 (no interval)", "all differences are equal"
    assert found["bad"][:2] == ["4", "1"]
    sound = [loss_of(seed, 0.5) for seed in (0, 1, 3)]
    assert found["bad"][2] == f"{sum(sound) / 3:.4f}"
    on_new = [4 + (loss - FACTS["loss"]) / 2 for loss in worse]
    assert float(found["worse"][5]) == pytest.approx(sum(on_new) / 4, abs=6e-4)
    assert found["worse"][6] == f"{mean / 2:+.4f} ({low / 2:+.4f} to {high / 2:+.4f})"


def test_runs_come_in_the_order_of_the_file_and_are_made_once(project, capsys):
    arms = {"z": "", "a": "--gain 1"}
    plan = {"flags": "--steps 9", "seeds": {"1": "", "0": "--idle 1"}, "arms": arms}
    assert run(plan, "--jobs", "1") == 0
    first = [("z", 1), ("z", 0), ("a", 1), ("a", 0)]
    assert logs() == first
    assert run(plan | {"seeds": {"1": "", "0": "--idle 1", "5": ""}}, "--jobs", "1") == 0
    assert logs() == [*first, ("z", 5), ("a", 5)]
    assert run(plan | {"seeds": {"1": "", "0": "--idle 2"}}) == 0
    assert len(logs()) == 8, "other flags are other runs"
    write_source(project, loss=3.3)
    assert run(plan) == 0
    assert len(logs()) == 12, "so are those of another source"
    (copy,) = [path for path in Path("logs").rglob("source")
               if json.loads((path / "train_gpt.py").read_text()) == FACTS]  # fmt: skip
    assert run(plan, "--source", str(copy)) == 0
    assert len(logs()) == 12, "a copy of the source goes on where it was"


def test_a_grid_makes_an_arm_of_each_combination(project, capsys):
    plan = {"seeds": [0], "grid": {"gain": [1, 2], "recipe": [["x", "y"]]}}
    assert run(plan, "--json") == 0
    arms = json.loads(capsys.readouterr().out)
    assert list(arms) == ["gain=1 recipe=x,y", "gain=2 recipe=x,y"]
    grids = {"a": {"grid": {"matrix_lr": [1, 2]}}, "b": {"flags": "--x", "grid": {"adam_lr": [3]}}}
    plan = {"seeds": [0], "arms": grids | {"c": {"patch": ""}}, "patch": "idea.diff"}
    Path("plan.json").write_text(json.dumps(plan))
    planned = sweep.read_plan(Path("plan.json"), Path("logs"), ["--quick"])
    assert [(run.arm, run.flags) for run in planned] == [
        ("a matrix_lr=1", ["--quick", "--matrix-lr", "1"]),
        ("a matrix_lr=2", ["--quick", "--matrix-lr", "2"]),
        ("b adam_lr=3", ["--x", "--quick", "--adam-lr", "3"]), ("c", ["--quick"]),
    ]  # fmt: skip
    assert [run.patch for run in planned] == [PATCH] * 3 + [""], "an arm has it from the plan"


def test_a_failed_run_is_named_and_made_again_and_a_report_makes_none(project, capsys):
    plan = {"seeds": [0, 1], "arms": {"base": "", "mine": "--die"}}
    assert run(plan) == 1
    output = capsys.readouterr().err
    assert output.count("failed, see ") == 2
    folder = Path(output.split("failed, see ")[1].splitlines()[0])
    assert (folder / "seed_0.console").read_text() == "out of coffee\n"
    (folder / "2026_0.jsonl").touch()  # as a run leaves it that is killed at its start
    before = logs()
    assert run(plan, "--report") == 0
    assert rows(capsys.readouterr().out)["mine"] == ["0", "0", "inf", "", "", "inf", ""]
    assert logs() == before
    assert run(plan) == 1
    assert "mine, seed 1: failed" in capsys.readouterr().err
    assert run(plan, "--jobs", "0") == 2
    assert "--jobs 0: it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("plan", "sentence"), [
    ({"arms": {"a": ""}}, "it has no seeds, or no arms"),
    ({"seeds": [0], "arms": {"a": ""}, "grid": {"wd": [1]}}, "a grid beside arms would multiply"),
    ({"seeds": [0], "arms": {"a": {"flag": "--x"}}}, "unknown: flag"),
    ({"seeds": [0], "arms": {"a": "", "b": "--stepz 5"}}, "--stepz: no such flag"),
    ({"seeds": [0], "arms": {"a": {"patch": "none.diff"}}}, "none.diff"),
    ({"seeds": [0], "arms": {"a": {"patch": "wrong.diff"}}}, "the patch of a_"),
])  # fmt: skip
def test_a_plan_that_cannot_work_is_refused_before_anything_runs(project, capsys, plan, sentence):
    Path("wrong.diff").write_text(PATCH.replace("false", "true"))
    assert run(plan) == 2
    assert sentence in capsys.readouterr().err
    assert logs() == []


SLEEPER = """
import sys, time
from pathlib import Path
if sys.argv[-1] == "--print-config":
    sys.exit(print("{}"))
Path(sys.argv[sys.argv.index("--log-dir") + 1], "asleep").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])  # HUP: its terminal closed
def test_two_runs_go_side_by_side_and_a_signal_ends_both(number, project):
    (project / "train_gpt.py").write_text(SLEEPER)
    plan = {"seeds": [0], "arms": {"a": "", "b": "--x", "c": "--y"}}
    Path("plan.json").write_text(json.dumps(plan))
    words = [sys.executable, sweep.__file__, "plan.json", "--source", ".", "--jobs", "2"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(600):
            if len(list(Path("logs").rglob("asleep"))) == 2:
                break
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(30) == 143
        assert "the same command resumes" in process.stderr.read()
    assert len(list(Path("logs").rglob("seed_*"))) == 2, "and the next two do not start"
    left = subprocess.run(["pgrep", "-f", str(project)], capture_output=True, text=True).stdout
    assert left == ""
