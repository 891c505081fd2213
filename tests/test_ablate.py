"""Ablations: paired statistics by hand and by scipy, and runs that are never lost, repeated or mixed in silence."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_run
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from runtime.log import config_hash
from scripts import ablate

REPOSITORY = Path(__file__).resolve().parent.parent

# Stands in for the trainer: the same flags and logs, at once. STUB is "flags|seed|what goes wrong".
TRAINER = '''
import os, signal, sys, time
from pathlib import Path
from runtime.log import SCHEMA, RunLog, config_hash, new_run_id, source_hash

words = sys.argv[1:]
cut = words.index("--seed")
flags, seed, folder = " ".join(words[:cut]), int(words[cut + 1]), words[words.index("--log-dir") + 1]
run_id = new_run_id("tiny", seed, 0)
log = RunLog(folder, run_id)
env = {"gpu_count": 0, "cpu": "abacus", "threads": int(os.environ["OMP_NUM_THREADS"]), "dtype": "float32", "torch": "0",
       "compiled": False}
log.write("header", schema=SCHEMA, run_id=run_id, track="tiny", target=2.5, seed=seed, trial=0, env=env,
          source_sha256=source_hash(Path(__file__).parent), config_sha256=config_hash({"flags": flags}))
where, at, wrong = os.environ.get("STUB", "||").rsplit("|", 2)
wrong = wrong if (where, at) == (flags, str(seed)) else ""
if wrong == "die":
    sys.exit("out of coffee")
if wrong == "diverge":
    log.write("end", status="nonfinite")
    sys.exit(3)
if wrong == "change the source":
    Path(__file__).write_text(Path(__file__).read_text() + "# changed\\n")
if wrong == "interrupt":
    Path(folder, "pid").write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
effect = {"": 0.0, "--smear off": 0.1 + 0.001 * seed, "--skips off": -0.01 * (-1) ** seed}[flags]
log.write("val", step=10, total_steps=10, val_loss=2.5 + 0.02 * seed + effect, train_time_ms=1.0)
log.write("end", status="done")
'''


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with the stub as its train_gpt.py."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "train_gpt.py").write_text(TRAINER)
    config = {"track": "tiny", "recipe": "record42", "steps": 10, "batch_tokens": 100}
    monkeypatch.setattr(ablate, "ROOT", root)
    monkeypatch.setattr(ablate, "resolve", lambda flags: (config, config_hash({"flags": " ".join(flags)})))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield root
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(out: Path, *more: str, arms: str = "no_smear", seeds: str = "0,1") -> int:
    return ablate.main(["--out", str(out), "--arms", arms, "--seeds", seeds, *more])


def recorded(out: Path) -> dict[tuple[str, int], float | None]:
    """Loss by arm and seed, from results.json alone."""
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert len({(run["arm"], run["seed"]) for run in runs}) == len(runs)
    return {(run["arm"], run["seed"]): run["val_loss"] for run in runs}


def started(out: Path) -> int:
    return len([log for log in out.glob("runs/*/*.jsonl") if log.stem != "registry"])


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


def test_holm_agrees_with_an_example_by_hand():
    # Sorted: 0.005 x 4, 0.01 x 3, then 0.03 x 2, and 0.04 x 1 that may not fall below the one before it.
    adjusted = ablate.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=20))
def test_holm_lies_between_no_correction_and_bonferroni_and_keeps_the_order(p_values):
    adjusted = ablate.holm(dict(enumerate(p_values)))
    for i, p in enumerate(p_values):
        assert p <= adjusted[i] <= min(1, len(p_values) * p) * (1 + 1e-12)
    ordered = [adjusted[i] for i in np.argsort(p_values, kind="stable")]
    assert ordered == sorted(ordered)


LOSS = st.floats(1, 4).map(lambda x: round(x, 6))


@given(st.lists(st.tuples(LOSS, LOSS), min_size=2, max_size=10).filter(lambda x: np.std([a - b for a, b in x]) > 1e-4))
def test_interval_and_p_are_those_of_scipys_paired_test(pairs):
    losses, baseline = dict(enumerate(a for a, _ in pairs)), dict(enumerate(b for _, b in pairs))
    effect = ablate.paired_effect("arm", losses, baseline)
    found = effect.difference
    paired = stats.ttest_rel(list(losses.values()), list(baseline.values()))
    low, high = paired.confidence_interval(0.95)
    ends = (found.mean - found.margin95, found.mean + found.margin95)
    assert (*ends, found.two_sided_p) == pytest.approx((low, high, paired.pvalue), rel=1e-6, abs=1e-9)
    assert found.mean == pytest.approx(np.mean([a - b for a, b in pairs]))
    assert found.sd == pytest.approx(np.std([a - b for a, b in pairs], ddof=1))
    # The interval leaves zero out exactly when p is below 0.05, and then on the side of the mean.
    expected = "not distinguishable" if paired.pvalue > 0.05 else "helps" if found.mean > 0 else "hurts"
    assert effect.verdict == expected


def test_only_seeds_that_both_have_are_paired():
    effect = ablate.paired_effect("arm", {0: 3.0, 1: 4.0, 7: 9.0}, {0: 2.0, 1: 2.5, 2: 2.0})
    assert (effect.difference.n, effect.difference.mean) == (2, 1.25)


def test_one_pair_has_a_difference_and_no_verdict():
    effect = ablate.paired_effect("arm", {0: 3.0}, {0: 2.0})
    assert (effect.difference.n, effect.difference.mean, effect.verdict) == (1, 1.0, "too few pairs")
    assert math.isnan(effect.difference.two_sided_p)


def test_an_arm_that_computes_the_same_is_not_distinguishable():
    effect = ablate.paired_effect("arm", {0: 3.0, 1: 2.0}, {0: 3.0, 1: 2.0})
    assert (effect.difference.mean, effect.verdict) == (0.0, "not distinguishable")


def test_a_diverged_run_is_a_result_and_no_pair():
    effect = ablate.paired_effect("arm", {0: None, 1: 3.0, 2: 3.1}, {0: 2.0, 1: 2.0, 2: 2.0})
    assert (effect.difference.n, effect.diverged) == (2, 1)
    assert effect.verdict == "helps: the arm diverged 1 x"


# ---------------------------------------------------------------------------------------------------------------------
# Arms and plan


def test_every_arm_changes_the_configuration_of_the_tiny_track_in_its_own_way():
    hashes = {ablate.resolve(ablate.arm_flags(arm, ablate.resolve([])[0]))[1] for arm in ablate.ARMS}
    assert len(hashes) == len(ablate.ARMS)


@pytest.mark.parametrize("track", ["tiny", "medium"])
def test_a_multiple_is_taken_of_the_tracks_own_value(track):
    config, _ = ablate.resolve(["--track", track])
    doubled, _ = ablate.resolve(["--track", track, *ablate.arm_flags("matrix_lr_double", config)])
    assert doubled["matrix_lr"] == 2 * config["matrix_lr"]


def test_six_windows_without_extension_take_as_many_steps():
    config, _ = ablate.resolve([])
    six, _ = ablate.resolve(ablate.arm_flags("six_windows", config))
    assert (six["steps"], six["extension"], len(six["windows"])) == (config["steps"], 0, 6)


def test_jobs_go_seed_by_seed_each_once_and_arms_without_effect_are_left_out():
    jobs = ablate.plan(["baseline", "no_smear", "muon"], [3, 5, 3], ["--smear", "off"])
    assert [(job.arm, job.seed) for job in jobs] == [("baseline", 3), ("muon", 3), ("baseline", 5), ("muon", 5)]


# ---------------------------------------------------------------------------------------------------------------------
# Running and resuming


def test_every_arm_runs_on_every_seed_and_the_table_says_what_was_found(project, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(out, "--threads", "3", arms="no_smear,no_skips", seeds="0,1,2,3") == 0
    assert set(recorded(out)) == {(arm, seed) for arm in ("baseline", "no_smear", "no_skips") for seed in range(4)}
    table = (out / "README.md").read_text()
    assert table in capsys.readouterr().out
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
            if line.startswith("| no_")}
    assert list(rows) == ["no_smear", "no_skips"]  # the more helpful piece first
    assert rows["no_smear"][2:4] == ["4", "+0.1015"]
    assert rows["no_smear"][6:] == ["helps", rows["no_smear"][7]]
    assert rows["no_smear"][7].endswith("survives")
    assert rows["no_skips"][3] in ("+0.0000", "-0.0000")
    # t(3) is 3.182 at 97.5 %, the sd of the differences 0.01 sqrt(4/3).
    assert rows["no_skips"][4].endswith(f"(± {3.1824 * 0.01 * math.sqrt(4 / 3) / 2:.4f})")
    assert rows["no_skips"][6:] == ["not distinguishable", "1, does not survive"]
    for fact in ("abacus, 3 thread(s)", "seeds 0,1,2,3", "1,000 tokens", ablate.source_hash(project), "2.5300"):
        assert fact in table


def test_finished_runs_are_not_repeated_even_without_their_logs(project, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(out) == 0
    before = recorded(out)
    assert run(out) == 0
    assert "4 runs, 4 of them done before" in capsys.readouterr().out
    assert started(out) == 4
    for log in out.glob("runs/*/*.jsonl"):
        log.unlink()
    assert run(out, seeds="0,1,2") == 0
    assert started(out) == 2  # the new seed's
    assert before.items() < recorded(out).items()


def test_a_run_that_died_is_named_and_repeated(project, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setenv("STUB", "--smear off|1|die")
    assert run(out) == 1
    said = "no_smear, seed 1: FAILED, exit code 1; what it said is in runs/no_smear/seed_1.txt"
    assert said in capsys.readouterr().out
    assert "out of coffee" in (out / "runs/no_smear/seed_1.txt").read_text()
    assert ("no_smear", 1) not in recorded(out)
    monkeypatch.delenv("STUB")
    assert run(out) == 0
    assert started(out) == 5
    assert len(recorded(out)) == 4


def test_a_run_that_diverged_is_kept_and_not_repeated(project, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("STUB", "--smear off|1|diverge")
    assert run(out) == 0
    assert run(out) == 0
    assert started(out) == 4
    assert recorded(out)["no_smear", 1] is None
    assert "diverged 1 x" in (out / "README.md").read_text()


def test_an_interrupt_ends_the_children_and_the_same_command_goes_on(project, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setenv("STUB", "--smear off|0|interrupt")
    assert run(out, "--jobs", "1") == 143
    assert "the same command resumes" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(int((out / "runs/no_smear/pid").read_text()), 0)
    assert set(recorded(out)) == {("baseline", 0)}
    monkeypatch.delenv("STUB")
    assert run(out, "--jobs", "1") == 0
    assert started(out) == 5  # the interrupted one twice
    assert len(recorded(out)) == 4


def test_a_run_that_finished_after_a_crash_of_this_script_is_found_by_its_log(project, tmp_path):
    out = tmp_path / "out"
    assert run(out) == 0
    everything = recorded(out)
    results = json.loads((out / "results.json").read_text())
    results["runs"] = results["runs"][:2]
    (out / "results.json").write_text(json.dumps(results))
    assert run(out) == 0
    assert started(out) == 4
    assert recorded(out) == everything


def test_a_changed_source_is_refused_with_both_hashes_unless_allowed(project, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(out, seeds="0") == 0
    old = ablate.source_hash(project)
    (project / "train_gpt.py").write_text(TRAINER + "# changed\n")
    capsys.readouterr()
    assert run(out) == 2
    error = capsys.readouterr().err
    assert old in error
    assert ablate.source_hash(project) in error
    assert started(out) == 2
    assert run(out, "--allow-source-change") == 0
    assert started(out) == 4
    assert (out / "README.md").read_text().count("- source: ") == 2


def test_a_source_that_changes_during_the_experiment_stops_it(project, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("STUB", "--smear off|0|change the source")
    assert run(out, "--jobs", "1") == 2
    assert set(recorded(out)) == {("baseline", 0), ("no_smear", 0)}


def test_an_arm_whose_meaning_changed_is_run_again_and_the_new_run_counts(project, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run(out, seeds="0") == 0
    monkeypatch.setitem(ablate.ARMS, "no_smear", ("another", "--skips off"))
    jobs = ablate.plan(["no_smear"], [0], [])
    assert not jobs[0].result(ablate.load(out))
    results = ablate.load(out)
    results["runs"].append({**results["runs"][0], "arm": "no_smear", "seed": 0, "config_sha256": jobs[0].config_sha256})
    assert jobs[0].result(results)


def test_runs_with_other_flags_are_not_mixed_in(project, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(out, seeds="0") == 0
    assert run(out, "--", "--steps", "5") == 2
    assert "choose another --out" in capsys.readouterr().err


def test_a_report_reads_what_exists_and_loads_no_torch(project, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run(out) == 0
    table = (out / "README.md").read_text()
    (out / "README.md").unlink()
    code = "import sys; from scripts import ablate; ablate.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "--report", "--out", str(out)]
    assert table in subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert (out / "README.md").read_text() == table


@pytest.mark.parametrize("words", [["--arms", "no_smeer"], ["--jobs", "0"], ["--seeds", "a"], ["--seeds=-1"],
                                   ["--", "--seed", "3"], ["--", "--trials=2"]])
def test_bad_input_is_refused(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        ablate.main(words)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_flag_that_the_trainer_does_not_know_is_refused_before_anything_runs(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(out, "--", "--stepz", "5") == 2
    assert "--stepz" in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_cannot_be_made_is_refused_by_name(project, tmp_path, capsys):
    out = tmp_path / "project" / "train_gpt.py" / "below a file"
    assert run(out) == 2
    assert str(out) in capsys.readouterr().err


def test_a_report_of_nothing_is_refused(tmp_path, capsys):
    assert ablate.main(["--report", "--out", str(tmp_path)]) == 2
    assert "no experiment" in capsys.readouterr().err


def test_a_run_of_the_real_trainer_is_recognized_as_done(tmp_path):
    extra = small_run.arguments(small_run.write_data(tmp_path / "data"), Path("unused"))
    extra = extra[: extra.index("--log-dir")] + extra[extra.index("--log-dir") + 2 :]
    (job,) = ablate.plan(["baseline"], [4], extra)
    folder = tmp_path / "out" / "runs" / job.arm
    outcome = small_run.run_words([*job.flags, "--seed", "4", "--log-dir", str(folder)], folder)
    results = ablate.load(tmp_path / "out")
    assert outcome.code == 0
    assert job.result(results)
    (run,) = results["runs"]
    assert run["val_loss"] == outcome.events("val")[-1]["val_loss"]
    assert run["source_sha256"] == ablate.source_hash(ablate.ROOT)
