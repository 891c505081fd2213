"""What is exported for the public contest says what our logs say, to the contest's digits."""

import re
from pathlib import Path

import numpy as np
import pytest
from small_record import RULES, SOURCE, make_claim, write_record

from claims.evidence import TRACKS, read_evidence
from claims.export import SEPARATOR, export
from claims.pages import derived
from claims.runlog import read_all
from claims.runs import Run
from claims.sources import Source, digest, pack, source_path
from runtime.errors import Refused

RECORDS = Path(__file__).resolve().parents[1] / "records"
LOSSES = list(3.2 + 0.01 * np.random.default_rng(0).standard_normal(4))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKS, "tiny", RULES)
    return write_record(tmp_path / "records", make_claim(n=4), LOSSES)


def exported(folder: Path, to: Path) -> list[Path]:
    evidence = read_evidence(folder)
    for name, content in derived(evidence).items():
        (folder / name).write_bytes(content)
    return export(evidence, to)


def same(ours: Run, theirs: Run) -> None:
    """Losses to four decimals, times to whole milliseconds."""
    assert (ours.run_id, ours.total_steps, ours.complete) == (
        theirs.run_id, theirs.total_steps, theirs.complete)
    for mine, other in zip(ours.validations, theirs.validations, strict=True):
        assert (mine.step, f"{mine.loss:.4f}") == (other.step, other.printed)
        assert other.train_time_ms == pytest.approx(mine.train_time_ms, abs=0.5)
    for mine, other in zip(ours.steps, theirs.steps, strict=True):
        assert mine.step == other.step
        assert mine.train_loss == pytest.approx(other.train_loss, abs=1e-4)


@pytest.mark.parametrize("name", ["2026-11-21_AdamW", "2026-11-21_ScalarRate", None])
def test_the_public_dialect_reads_back_what_was_exported(name, folder, tmp_path, monkeypatch):
    if name:
        monkeypatch.undo()  # the real rules of the track
        folder = RECORDS / "tiny" / name
        paths = export(read_evidence(folder), tmp_path / "out")
    else:
        paths = exported(folder, tmp_path / "out")
    assert sorted(paths) == sorted((tmp_path / "out").iterdir())
    (tmp_path / "out" / "README.md").rename(tmp_path / "README.md")
    runs, errors = read_all([tmp_path / "out"])
    assert errors == []
    by_id = {run.run_id: run for run in runs}
    for ours in read_evidence(folder).complete:
        theirs = by_id.pop(ours.run_id)
        same(ours, theirs)
        assert theirs.env.get("gpu") == ours.env.get("gpu")
        assert theirs.env["torch"] == ours.env["torch"]
    assert by_id == {}
    assert len({run.source for run in runs}) == 1


def test_a_log_begins_with_all_the_source_each_file_behind_its_name(folder, tmp_path):
    text = exported(folder, tmp_path / "out")[1].read_bytes().decode()
    source, environment, lines = text.split(SEPARATOR + "\n")
    assert re.findall(r"^# (\S+)$", source, re.M) == ["train_gpt.py", "optim/muon.py"]
    assert "# optim/muon.py\n\nstep:1/2 val_loss:1.0\n" in source
    assert environment.splitlines()[:2] == [
        "Running Python 3.12.7",
        "Running PyTorch 2.13.0+cu128 compiled for CUDA 12.8 on NVIDIA H100 80GB HBM3 "
        "with world_size 8",
    ]
    first, *_, last, peak = lines.splitlines()
    assert first == "step:0/12 val_loss:4.1589 train_time:0ms step_avg:0.00ms"
    assert last == f"step:12/12 val_loss:{LOSSES[0]:.4f} train_time:12000ms step_avg:1000.00ms"
    assert peak == "peak memory allocated: 31286 MiB"


def test_records_with_different_sources_are_different_arms_of_the_contest(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKS, "tiny", RULES)
    for text in ("a", "b"):
        files = {"train_gpt.py": text.encode()}
        claim = make_claim(n=4, source_sha256=digest(files))
        folder = write_record(tmp_path / text, claim, LOSSES)
        source_path(tmp_path / text, digest(files)).write_bytes(pack(Source(files, None)))
        exported(folder, tmp_path / "out" / text)
        (tmp_path / "out" / text / "README.md").unlink()
    runs, _ = read_all([tmp_path / "out" / "a", tmp_path / "out" / "b"])
    assert len({run.source for run in runs}) == 2


def test_a_record_that_does_not_hold_is_refused_by_what_is_wrong(folder, tmp_path):
    torn = next((folder / "runs").glob("2*"))
    torn.write_bytes(torn.read_bytes()[:-200])
    with pytest.raises(Refused, match=r"not counted|no planned look"):
        export(read_evidence(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("there", ["folder/file", "folder"])
def test_nothing_is_written_over(there, folder, tmp_path):
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_text("mine")
    with pytest.raises(Refused, match=r"folder is not empty"):
        exported(folder, tmp_path / "folder")
    assert (tmp_path / there).read_text() == "mine"


def test_a_source_that_would_end_early_in_the_log_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKS, "tiny", RULES)
    files = SOURCE.files | {"x.py": f'"""\n{SEPARATOR}\n"""\n'.encode()}
    folder = write_record(tmp_path, make_claim(n=4, source_sha256=digest(files)), LOSSES)
    source_path(tmp_path, digest(files)).write_bytes(pack(Source(files, None)))
    with pytest.raises(Refused, match="a line of 100"):
        exported(folder, tmp_path / "out")
