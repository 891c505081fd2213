"""What is exported for the public contest says what our logs say, to the contest's digits."""

from pathlib import Path

import pytest
from small_record import RULES, call, make_claim, write_record

from claims.evidence import TRACKS, read_evidence
from claims.export import SEPARATOR, export
from claims.runlog import read_all
from claims.sources import pack
from scripts import record

LOSSES = [3.2, 3.21, 3.205, 3.195]
RECORD = Path(__file__).resolve().parents[1] / "records" / "tiny" / "2026-11-21_ScalarRate"


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKS, "tiny", RULES)
    folder = write_record(tmp_path / "records", make_claim(n=4), LOSSES)
    assert record.main(["make", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("folder", [RECORD, None], ids=["real", "synthetic"])
def test_the_public_dialect_reads_back_what_was_exported(folder, made, tmp_path, monkeypatch):
    if folder:
        monkeypatch.undo()  # the real rules of the track
    evidence = read_evidence(folder or made)
    paths = export(evidence, tmp_path / "out")
    assert sorted(paths) == sorted((tmp_path / "out").iterdir())
    runs, errors = read_all(paths[1:])
    assert errors == []
    assert len({run.source for run in runs}) == 1
    for ours, theirs in zip(evidence.complete, runs, strict=True):
        assert (theirs.run_id, theirs.total_steps) == (ours.run_id, ours.total_steps)
        assert [(step, f"{loss:.4f}") for step, loss in ours.losses] == [
            (val.step, f"{val.loss:.4f}") for val in theirs.validations]
        assert [step.step for step in theirs.steps] == [step.step for step in ours.steps]
        assert theirs.train_time_ms == pytest.approx(ours.train_time_ms, abs=0.5)
        assert theirs.complete
        assert theirs.env.get("gpu") == ours.env.get("gpu")
        assert theirs.env["torch"] == ours.env["torch"]


def test_a_log_has_the_source_then_the_versions_then_the_steps(made, tmp_path):
    evidence = read_evidence(made)
    text = export(evidence, tmp_path / "out")[1].read_bytes()
    source, environment, lines = text.split(SEPARATOR.encode() + b"\n")
    assert source == pack(evidence.source)
    assert environment.decode().splitlines() == [
        "Running Python 3.12.7",
        "Running PyTorch 2.13.0+cu128 compiled for CUDA 12.8 on NVIDIA H100 80GB HBM3 "
        "with world_size 8",
    ]
    first, *_, last = lines.decode().splitlines()
    assert first == "step:0/12 val_loss:4.1589 train_time:0ms step_avg:0.00ms"
    assert last == "step:12/12 val_loss:3.2000 train_time:12000ms step_avg:1000.00ms"


def test_a_record_that_does_not_hold_is_not_exported_and_nothing_is_written_over(
    made, tmp_path, capsys
):
    (tmp_path / "there").mkdir()
    code, said = call(capsys, "export", made, "--to", tmp_path / "there")
    assert (code, "File exists" in said) == (2, True)
    log = next((made / "runs").glob("2*"))
    log.write_bytes(log.read_bytes()[:-200])
    code, said = call(capsys, "export", made, "--to", tmp_path / "out")
    assert (code, "NOT VERIFIED" in said) == (1, True)
    assert not (tmp_path / "out").exists()
