"""What is exported for the public contest says what our logs say, to the digits that the contest's logs have."""

import contextlib
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.claim import Claim
from runtime.jsonl import json_line
from runtime.log import SCHEMA, source_hash
from claims import export as module
from claims.evidence import Evidence, Failure, read_evidence
from claims.export import SEPARATOR, ExportError, export, log_text
from claims.runlog import Run, read_all, read_run
from claims.stats import welch

RECORDS = Path(__file__).resolve().parents[1] / "records"
H100 = {"python": "3.12.7", "torch": "2.10.0+cu128", "cuda": "12.8", "gpu": "NVIDIA H100 80GB HBM3", "gpu_count": 8,
        "driver": "570.211.01", "cpu": "Xeon"}  # fmt: skip
CPU = {"python": "3.11.7", "torch": "2.13.0+cpu", "cuda": None, "gpu": None, "gpu_count": 0, "cpu": "EPYC"}
SOURCE = {"train_gpt.py": "print('é')\n", "optim/muon.py": "step:1/2 val_loss:1.0\n", "data/x.py": ""}


def write_run(
    folder: Path, run_id: str, losses: dict[int, float], *, ms: float = 2.0, seed: int = 0, claim: str | None = None,
    trained: dict[int, float | None] | None = None, env: dict[str, Any] = H100, peak_mib: float | None = 31286.4,
) -> Path:
    """A log with validation losses and training losses by step, each step of `ms`."""
    events: list[dict[str, Any]] = [
        {"event": "header", "schema": SCHEMA, "run_id": run_id, "track": "short", "target": 3.28, "seed": seed,
         "trial": 0, "claim": claim, "source_sha256": "s", "config_sha256": "c", "config": {}, "env": env,
         "world_size": 8, "data": {"val_tokens": 10485760}, "checks": {"causality": True}},
        {"event": "phase", "name": "compile", "timed": False, "ms": 60000.0},
        {"event": "phase", "name": "train", "timed": True, "ms": ms * max(losses)},
    ]
    events += [{"event": "step", "step": step, "train_time_ms": ms * step - 0.4, "window": None, "stage": None,
                "skipped": False, "train_loss": loss} for step, loss in (trained or {}).items()]
    events += [{"event": "val", "step": step, "total_steps": max(losses), "val_loss": loss, "train_time_ms": ms * step}
               for step, loss in losses.items()]
    events.append({"event": "end", "status": "done", "val_loss": losses[max(losses)], "peak_mib": peak_mib})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run_id}.jsonl"
    path.write_bytes(b"".join(json_line(event | {"t_ms": 1.0}) for event in events))
    return path


def write_record(folder: Path) -> Evidence:
    """Four runs of 20 steps, of 1.1 s and more each."""
    for name, text in SOURCE.items():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_text(text)
    seeds = list(range(100, 104))
    claim = Claim(
        name="NewMuon", track="short", target=3.28, alpha=0.01, n=4, seeds=seeds, looks=[4],
        source_sha256=source_hash(folder / "source"), config_sha256="c", config={"steps": 20},
        flags=["--track", "short"], about="A new Muon.", created="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    for seed, loss in zip(seeds, [3.27863, 3.27632, 3.27951, 3.27683], strict=True):
        trained = {step: None if step == 3 else loss + 1 / step for step in range(1, 21)}
        write_run(folder / "runs", f"20260102-000{seed % 100}00_s{seed}", {0: 10.82512, 20: loss}, ms=1000.0123 + seed,
                  trained=trained, seed=seed, claim=claim.id)
    runs, _ = read_all([folder / "runs"])
    return Evidence(folder, claim, runs, registry=[], unread=[])


@pytest.fixture
def holds(monkeypatch) -> None:
    """Records are taken as verified: that is not the matter here."""
    monkeypatch.setattr(module, "find_failures", lambda evidence: [])


def same(ours: Run, theirs: Run) -> None:
    """Assert that the exported run is the run as far as text logs tell."""
    assert theirs.dialect == "step"
    assert theirs.unfinished is None
    assert theirs.run_id == ours.run_id
    assert theirs.total_steps == ours.total_steps
    assert [(p.step, p.printed) for p in theirs.validations] == [(s, f"{loss:.4f}") for s, loss in ours.losses]
    for a, b in zip([*ours.validations, *ours.steps], [*theirs.validations, *theirs.steps], strict=True):
        assert b.step == a.step
        assert b.train_time_ms == pytest.approx(a.train_time_ms, abs=0.5)
    for step, back in zip(ours.steps, theirs.steps, strict=True):
        assert back.train_loss == (None if step.train_loss is None else pytest.approx(step.train_loss, abs=0.5e-4))


# ---- Logs


@pytest.mark.usefixtures("holds")
def test_the_public_dialect_reads_back_what_was_exported(tmp_path):
    evidence = write_record(tmp_path / "record")
    paths = export(evidence, tmp_path / "out")
    assert sorted(paths) == sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    runs, errors = read_all([tmp_path / "out"])
    assert errors == []
    for ours, theirs in zip(evidence.complete, runs, strict=True):
        same(ours, theirs)
        assert theirs.peak_mib == 31286
        assert theirs.started == "2026-01-02T" + ours.run_id[9:11] + ":" + ours.run_id[11:13] + ":00"
        assert theirs.env == {name: value for name, value in H100.items() if name != "cpu"}
    assert len({run.source for run in runs}) == 1


@pytest.mark.usefixtures("holds")
def test_records_with_different_sources_are_different_arms_of_the_contest(tmp_path):
    for name in ("a", "b"):
        evidence = write_record(tmp_path / name)
        (tmp_path / name / "source" / "train_gpt.py").write_text(f"{name}\n")
        export(evidence, tmp_path / "out" / name)
    runs, _ = read_all([tmp_path / "out" / "a", tmp_path / "out" / "b"])
    assert len({run.source for run in runs}) == 2


@settings(max_examples=30)
@given(
    st.dictionaries(st.integers(0, 999), st.floats(0, 99), max_size=9), st.floats(0.5, 1e5),
    st.dictionaries(st.integers(1, 1000), st.none() | st.floats(0, 99), max_size=9),
    st.none() | st.floats(0, 1e6), st.sampled_from([H100, CPU, {"gpu_count": 0}]),
)  # fmt: skip
def test_any_run_comes_back(losses, ms, trained, peak_mib, env):
    with tempfile.TemporaryDirectory() as folder:
        losses, trained = dict(sorted(losses.items())) | {1000: 3.28}, dict(sorted(trained.items()))
        path = write_run(Path(folder), "run", losses, ms=ms, trained=trained, env=env, peak_mib=peak_mib)
        text = path.with_suffix(".txt")
        text.write_text(log_text(read_run(path), "source\n"))
        same(read_run(path), read_run(text))
        assert read_run(text).peak_mib == (None if peak_mib is None else round(peak_mib))
        assert read_run(text).env.get("gpu") == env.get("gpu")


@pytest.mark.usefixtures("holds")
def test_a_log_begins_with_all_the_source_each_file_behind_its_name(tmp_path):
    evidence = write_record(tmp_path / "record")
    text = export(evidence, tmp_path / "out")[0].read_text()
    source, environment, lines = text.split(SEPARATOR + "\n")
    assert re.findall(r"^# (\S+)$", source, re.M) == ["train_gpt.py", "data/x.py", "optim/muon.py"]
    assert "# optim/muon.py\n\nstep:1/2 val_loss:1.0\n" in source
    assert environment.splitlines()[:2] == [
        "Running Python 3.12.7",
        "Running PyTorch 2.10.0+cu128 compiled for CUDA 12.8 on NVIDIA H100 80GB HBM3 with world_size 8",
    ]
    assert lines.splitlines()[:2] == ["step:0/20 val_loss:10.8251 train_time:0ms step_avg:0.00ms",
                                      "step:1/20 train_loss:4.2786 train_time:1100ms step_avg:1099.61ms"]
    assert lines.splitlines()[-2:] == ["step:20/20 val_loss:3.2786 train_time:22000ms step_avg:1100.01ms",
                                       "peak memory allocated: 31286 MiB"]


@pytest.mark.parametrize("claim", sorted(RECORDS.glob("*/*/claim.json")), ids=lambda path: path.parent.name)
def test_every_record_of_ours_can_be_exported(claim, tmp_path):
    evidence = read_evidence(claim.parent)
    if not evidence.runs:
        pytest.skip("a claim whose runs are not made yet")
    export(evidence, tmp_path / "out")
    both = evidence.complete, read_all([tmp_path / "out"])[0]
    for ours, theirs in zip(*(sorted(runs, key=lambda run: run.run_id) for runs in both), strict=True):
        same(ours, theirs)


# ---- README


@pytest.mark.usefixtures("holds")
def test_the_readme_holds_what_reviewers_ask_for(tmp_path):
    evidence = write_record(tmp_path / "record")
    readme = export(evidence, tmp_path / "out")[-1].read_text()
    assert readme.startswith("# NewMuon: 20 steps\n\nA new Muon.\n")
    assert "Credits: add whose work this builds on." in readme
    assert "losses = [3.2786, 3.2763, 3.2795, 3.2768]" in readme
    assert "[22.0, 22.02, 22.04, 22.06]" in readme
    assert "The record before was not timed on this machine." in readme
    assert "| train | yes | 22,030 |" in readme
    assert "| torch | 2.10.0+cu128 |" in readme
    assert "| gpu | NVIDIA H100 80GB HBM3 |" in readme
    assert f"p {evidence.result.p:.3g}" in readme


@pytest.mark.usefixtures("holds")
@pytest.mark.parametrize("baseline", [False, True])
def test_the_programs_in_the_readme_print_what_stands_behind_them(tmp_path, baseline):
    for seed in range(3):
        write_run(tmp_path / "before", f"b{seed}", {20: 3.279 + seed / 1000}, ms=1200.0 + seed)
    evidence = write_record(tmp_path / "record")
    export(evidence, tmp_path / "out", tmp_path / "before" if baseline else None)
    readme = (tmp_path / "out" / "README.md").read_text()
    programs = re.findall(r"```python\n(.*?)```\n```\n(.*?)```\n", readme, re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec("".join(program for program, _ in programs), {})
    assert printed.getvalue() == "".join(output for _, output in programs)
    assert len(programs) == 1 + baseline


@pytest.mark.usefixtures("holds")
def test_the_record_before_is_compared_and_its_logs_are_added(tmp_path):
    before = [24.0, 24.3, 24.9]
    for seed, seconds in enumerate(before):
        write_run(tmp_path / "before", f"b{seed}", {20: 3.279 + seed / 1000}, ms=seconds * 50)
    evidence = write_record(tmp_path / "record")
    paths = export(evidence, tmp_path / "out", tmp_path / "before")
    assert sorted(path.name for path in paths if path.parent.name == "baseline") == ["b0.jsonl", "b1.jsonl", "b2.jsonl"]
    found = welch([22.0, 22.02, 22.04, 22.06], before)
    readme = (tmp_path / "out" / "README.md").read_text()
    assert f"Difference {found.mean:.3f} s, 95 % confidence interval {found.low:+.3f} to {found.high:+.3f} s" in readme


# ---- Refusals


def test_a_record_that_does_not_hold_is_refused_by_the_name_of_what_is_wrong(tmp_path):
    evidence = write_record(tmp_path / "record")
    torn = evidence.runs[2].path
    torn.write_bytes(torn.read_bytes()[:-200])
    runs, _ = read_all([tmp_path / "record" / "runs"])
    with pytest.raises(ExportError, match=rf"{torn.name}: unfinished"):
        export(Evidence(evidence.folder, evidence.claim, runs, [], []), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failure_of_any_kind_refuses(tmp_path, monkeypatch):
    failure = Failure("edited", Path("runs/x.jsonl"), "restore it")
    monkeypatch.setattr(module, "find_failures", lambda evidence: [failure])
    with pytest.raises(ExportError, match=r"runs/x\.jsonl: edited \(restore it\)"):
        export(write_record(tmp_path / "record"), tmp_path / "out")


@pytest.mark.usefixtures("holds")
@pytest.mark.parametrize("there", ["folder/file", "folder"])
def test_nothing_is_written_over(tmp_path, there):
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_text("mine")
    with pytest.raises(ExportError, match="folder is not empty"):
        export(write_record(tmp_path / "record"), tmp_path / "folder")
    assert (tmp_path / there).read_text() == "mine"


@pytest.mark.usefixtures("holds")
def test_a_source_that_would_end_early_in_the_log_is_refused(tmp_path):
    evidence = write_record(tmp_path / "record")
    (tmp_path / "record" / "source" / "train_gpt.py").write_text(f'"""\n{SEPARATOR}\n"""\n')
    with pytest.raises(ExportError, match="line of 100 '='"):
        export(evidence, tmp_path / "out")


@pytest.mark.usefixtures("holds")
@pytest.mark.parametrize(("spoil", "named"), [
    (lambda folder: write_run(folder, "b2", {20: 3.279}, env=H100 | {"torch": "2.9.0"}), "torch is not .*2.9.0"),
    (lambda folder: write_run(folder, "b2", {30: 3.279}), "several arms"),
    (lambda folder: (folder / "b1.jsonl").unlink(), "fewer than 2 runs"),
    (lambda folder: (folder / "b2.jsonl").write_bytes((folder / "b1.jsonl").read_bytes()[:-100]), r"b2\.jsonl: "),
    (lambda folder: (folder / "notes.txt").write_text("some notes"), r"notes\.txt"),
])  # fmt: skip
def test_a_baseline_that_cannot_be_compared_is_refused(tmp_path, spoil, named):
    for seed in range(2):
        write_run(tmp_path / "before", f"b{seed}", {20: 3.279 + seed / 1000}, ms=1200.0 + seed)
    spoil(tmp_path / "before")
    with pytest.raises(ExportError, match=named):
        export(write_record(tmp_path / "record"), tmp_path / "out", tmp_path / "before")
