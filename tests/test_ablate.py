"""Ablations: paired statistics, and runs that are never repeated or mixed in silence."""

import json
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

from scripts import ablate
from scripts.command import ask_trainer

REPOSITORY = Path(__file__).resolve().parent.parent

# Stands in for the trainer: the same flags and logs, at once. STUB is "flags|seed|what goes wrong".
TRAINER = '''
import json, os, sys, time
from pathlib import Path

words = sys.argv[1:]
if words[-1] == "--print-config":
    if "--stepz" in words:
        sys.exit("--stepz: no such flag")
    print(json.dumps({"flags": " ".join(words[:-1])}))
    sys.exit()
from runtime.log import config_hash, source_hash
cut = words.index("--seed")
flags, seed, folder = " ".join(words[:cut]), int(words[cut + 1]), Path(words[cut + 3])
run_id = f"2026_{time.time_ns()}"
env = {"gpu_count": 0, "cpu": "abacus"}
folder.mkdir(parents=True, exist_ok=True)
log = (folder / f"{run_id}.jsonl").open("w")


def write(event, **fields):
    log.write(json.dumps({"event": event, "t_ms": 1.0, **fields}) + "\\n")
    log.flush()


write("header", schema=2, run_id=run_id, track="tiny", target=2.5, seed=seed, trial=0, env=env,
      source_sha256=source_hash(Path(__file__).parent), config_sha256=config_hash({"flags": flags}))
where, at, wrong = os.environ.get("STUB", "||").rsplit("|", 2)
wrong = wrong if (where, at) == (flags, str(seed)) else ""
if wrong == "die":
    sys.exit("out of coffee")
if wrong == "diverge":
    write("end", status="nonfinite")
    sys.exit(3)
losses = {"": [2.5, 2.52, 2.54, 2.56], "--smear off": [2.6, 2.621, 2.642, 2.663],
          "--skips on": [2.49, 2.53, 2.53, 2.57]}
loss = losses.get(flags, [2.4] * 4)[seed]
write("val", step=10, total_steps=10, val_loss=loss, train_time_ms=1.0)
write("end", status="done", val_loss=loss)
'''


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with the stub as its train_gpt.py."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "train_gpt.py").write_text(TRAINER)
    monkeypatch.setattr(ablate, "ROOT", root)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return root


def run(out: Path, *more: str, arms: str = "no_smear", seeds: str = "0,1") -> int:
    return ablate.main(["--out", str(out), "--arms", arms, "--seeds", seeds, *more])


def started(out: Path) -> int:
    return len(list(out.glob("runs/*/*.jsonl")))


def rows(table: str) -> dict[str, list[str]]:
    """The cells of each arm."""
    found = {}
    for line in table.splitlines():
        if line.startswith(("| no_", "| skips")):
            arm, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
            found[arm] = cells
    return found


def test_the_table_is_that_of_the_paired_test(project, tmp_path, capsys):
    out = tmp_path / "out"
    assert ablate.main(["--out", str(out), "--arms", "no_smear", "skips"]) == 0
    table = capsys.readouterr().out
    assert started(out) == 12
    base = [2.5, 2.52, 2.54, 2.56]
    smear = ttest_rel([2.6, 2.621, 2.642, 2.663], base)
    skips = ttest_rel([2.49, 2.53, 2.53, 2.57], base)
    for arm, test, holm in (("no_smear", smear, 2), ("skips", skips, 1)):
        _, pairs, difference, interval, diverged, p = rows(table)[arm]
        low, high = test.confidence_interval(0.95)
        assert (pairs, diverged) == ("4", "0")
        assert float(difference) == pytest.approx((low + high) / 2, abs=6e-5)
        assert interval == f"{low:+.4f} to {high:+.4f}"
        assert float(p) == pytest.approx(holm * test.pvalue, rel=0.05)
    assert ablate.source_hash(project) in table


def test_the_same_command_runs_only_what_is_missing(project, tmp_path):
    out = tmp_path / "out"
    assert (run(out), run(out), started(out)) == (0, 0, 4)
    assert (run(out, seeds="0,1,2"), started(out)) == (0, 6)
    assert (run(out, "--", "--dim", "8"), started(out)) == (0, 10), "other flags are other runs"
    trainer = project / "train_gpt.py"
    trainer.write_text(trainer.read_text() + "# changed")
    assert (run(out), started(out)) == (0, 14), "so are runs of another source"


def test_a_run_that_died_is_named_and_repeated(project, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setenv("STUB", "--smear off|1|die")
    assert run(out) == 1
    assert "no_smear, seed 1: exit code 1" in capsys.readouterr().out
    monkeypatch.delenv("STUB")
    assert (run(out), started(out)) == (0, 5)


def test_a_run_that_diverged_is_a_result_and_no_pair(project, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STUB", "--smear off|1|diverge")
    out = tmp_path / "out"
    assert (run(out, seeds="0,1,2"), run(out, seeds="0,1,2"), started(out)) == (0, 0, 6)
    _, pairs, *_, diverged, _ = rows(capsys.readouterr().out)["no_smear"]
    assert (pairs, diverged) == ("2", "1")


def test_a_flag_that_the_trainer_does_not_know_is_refused_before_anything_runs(
    project, tmp_path, capsys
):
    out = tmp_path / "out"
    assert run(out, "--", "--stepz", "5") == 2
    assert "--stepz" in capsys.readouterr().err
    assert not out.exists()
    assert ablate.main(["--report", "--out", str(out)]) == 2
    assert "no finished run of the baseline" in capsys.readouterr().err


@pytest.mark.slow
def test_every_arm_changes_the_configuration_of_the_real_trainer_in_its_own_way():
    every = ablate.FLAGS.values()
    configs = [json.dumps(ask_trainer(REPOSITORY, flags.split())) for flags in every]
    assert len(set(configs)) == len(ablate.FLAGS)
