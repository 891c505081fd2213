"""Sweeps: the plan says what runs and in which order, no run is made twice, arms are compared."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

from scripts import sweep

# Stands in for the trainer: the same flags and logs, at once. A flag sets what its runs come to.
TRAINER = """\
import json, sys, time
from pathlib import Path

words = sys.argv[1:]
if "--stepz" in words:
    sys.exit("error: --stepz: no such flag")
if words[-1] == "--print-config":
    print("{}")
    sys.exit()
cut = words.index("--seed")
flags, seed, folder = " ".join(words[:cut]), int(words[cut + 1]), Path(words[cut + 3])
if "--die" in words:
    sys.exit("out of coffee")
if "--sleep" in words:
    folder.joinpath("asleep").touch()
    time.sleep(60)
run_id = f"2026_{time.time_ns()}"
header = {"event": "header", "schema": 3, "run_id": run_id, "track": "tiny", "target": 2.5,
          "seed": seed, "source_sha256": "ab", "config_sha256": flags, "env": {"gpu_count": 0}}
loss = {"": 2.5, "--wd 1": 2.6, "--lr 2": 2.4}.get(flags, 2.0) + 0.01 * seed**2 + PATCH
loss += {"--wd 1": 0.001, "--lr 2": 0.002}.get(flags, 0) * seed
val = {"event": "val", "step": 10, "total_steps": 10, "val_loss": loss, "train_time_ms": 1.0}
end = {"event": "end", "status": "done", "probes": {"copy_loss": 1.0, "new_loss": loss + 1}}
lines = [header, val, end]
if flags == f"--diverge {seed}":
    lines = [header, {"event": "end", "status": "nonfinite"}]
text = "".join(json.dumps(line | {"t_ms": 1.0}) + "\\n" for line in lines)
Path(folder, f"{run_id}.jsonl").write_text(text)
sys.exit(3 if len(lines) == 2 else 0)
"""
PATCH = """
--- a/train_gpt.py
+++ b/train_gpt.py
@@ -1,2 +1,3 @@
+PATCH = -0.25
 import json, sys, time
 from pathlib import Path
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the stub as its train_gpt.py, where commands run. It lies in a repository."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    root = tmp_path / "project"
    root.mkdir()
    trainer = TRAINER.replace("+ PATCH", "+ globals().get('PATCH', 0.0)")
    (root / "train_gpt.py").write_text(trainer)
    (root / "idea.diff").write_text(PATCH)
    (root / "idle.diff").write_text(PATCH.replace("-0.25", "0.0"))
    monkeypatch.chdir(root)
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
    arms = {"base": {"seeds": [0, 1, 2, 3, 9]}, "wd": "--wd 1", "lr": "--lr 2",
            "patched": {"patch": "idea.diff"}, "bad": {"flags": "--diverge 2"},
            "alone": {"seeds": [5]}}  # fmt: skip
    assert run({"seeds": [0, 1, 2, 3], "arms": arms}) == 0
    found = rows(capsys.readouterr().out)
    assert list(found) == ["bad", "patched", "lr", "wd", "base", "alone"], "the lowest loss first"
    assert found["alone"][3:5] == ["", ""], "no seed in common"
    base = [2.5 + 0.01 * seed**2 for seed in range(4)]
    test = ttest_rel([loss + 0.1 + 0.001 * seed for seed, loss in enumerate(base)], base)
    low, high = test.confidence_interval(0.95)
    mean = (low + high) / 2
    assert found["wd"][:2] == ["4", "0"]
    assert found["wd"][3] == f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"
    assert float(found["wd"][4]) == pytest.approx(5 * test.pvalue, rel=0.05), "Holm over five arms"
    assert found["patched"][3].startswith("-0.2500")
    assert found["bad"][:2] == ["4", "1"]
    assert found["bad"][2:4] == [f"{2 + 0.1 / 3:.4f}", "-0.5000 (no interval)"]
    assert float(found["wd"][5]) == pytest.approx(1 + sum(base) / 4 + mean, abs=6e-4)
    assert found["wd"][6] == found["wd"][3], "the stub's loss on new tokens is its loss and 1"


def test_runs_come_in_the_order_of_the_file_and_are_made_once(project, capsys):
    arms = {"z": "", "a": "--x"}
    plan = {"flags": "--steps 9", "seeds": {"1": "", "0": "--late 1"}, "arms": arms}
    assert run(plan, "--jobs", "1") == 0
    first = [("z", 1), ("z", 0), ("a", 1), ("a", 0)]
    assert logs() == first
    assert run(plan | {"seeds": {"1": "", "0": "--late 1", "5": ""}}, "--jobs", "1") == 0
    assert logs() == [*first, ("z", 5), ("a", 5)]
    assert run(plan | {"seeds": {"1": "", "0": "--late 2"}}) == 0
    assert len(logs()) == 8, "other flags are other runs"
    Path("train_gpt.py").write_text(Path("train_gpt.py").read_text() + "# changed")
    assert run(plan) == 0
    assert len(logs()) == 12, "so are those of another source"
    (copy,) = [path for path in Path("logs").rglob("source") if "# changed" not in
               (path / "train_gpt.py").read_text()]  # fmt: skip
    assert run(plan, "--source", str(copy)) == 0
    assert len(logs()) == 12, "a copy of the source goes on where it was"


def test_a_grid_makes_an_arm_of_each_combination(project, capsys):
    plan = {"seeds": [0], "grid": {"matrix_lr": [1, 2], "momentum": [[0.8, 0.9]]}}
    assert run(plan, "--json") == 0
    arms = json.loads(capsys.readouterr().out)
    assert list(arms) == ["matrix_lr=1 momentum=0.8,0.9", "matrix_lr=2 momentum=0.8,0.9"]
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
    Path("wrong.diff").write_text(PATCH.replace("json, sys", "json, os"))
    assert run(plan) == 2
    assert sentence in capsys.readouterr().err
    assert logs() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])  # HUP: its terminal closed
def test_two_runs_go_side_by_side_and_a_signal_ends_both(number, project):
    plan = {"flags": "--sleep", "seeds": [0], "arms": {"a": "", "b": "--x", "c": "--y"}}
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
