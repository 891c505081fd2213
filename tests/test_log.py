"""The run log, its registry and the clock: what is written survives, what cannot be is said."""

import errno
import hashlib
import json
import math
import os
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from runtime.clock import Clock
from runtime.errors import LogError
from runtime.log import RunLog, read_history
from runtime.registry import read_registry
from runtime.source import source_hash, store_sources

HEADER = {"track": "tiny", "source_sha256": "a", "config_sha256": "b", "seed": 0, "trial": 0}
END = {"status": "done", "val_loss": 1.0}
RESUMED = {"from_step": 1, "checkpoint": "step_000001", "differences": ["dim 1 -> 2"]}


def lines_of(path: Path) -> list[dict]:
    content = path.read_bytes()
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def begun(folder: Path, run_id: str = "run") -> RunLog:
    log = RunLog(folder, run_id)
    log.begin(HEADER)
    return log


def resumed(folder: Path) -> RunLog:
    log = RunLog(folder, "run", read_history(folder, "run"))
    log.begin(HEADER, RESUMED)
    return log


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


# ---- Lines


def test_floats_come_back_unrounded_and_what_json_lacks_as_text(tmp_path):
    log = begun(tmp_path)
    numbers = {"third": 1 / 3, "tiny": 5e-324, "count": 7}
    log.write("x", **numbers, pair=(1, 2.5), odd=[math.nan, math.inf, -math.inf])

    def forbid(constant):
        pytest.fail(f"{constant} is not JSON")

    line = json.loads(log.path.read_text().splitlines()[1], parse_constant=forbid)
    assert {name: line[name] for name in numbers} == numbers
    assert (line["pair"], line["odd"]) == ([1, 2.5], ["nan", "inf", "-inf"])


def test_a_value_that_would_need_the_device_is_refused_and_leaves_no_line(tmp_path):
    log = begun(tmp_path)
    with pytest.raises(TypeError, match="cannot log a ndarray"):
        log.write("x", value=np.zeros(3))
    assert len(lines_of(log.path)) == 1


@pytest.mark.parametrize("event", ["val", "checkpoint", "end"])
def test_lines_that_claims_and_resumes_rest_on_are_forced_to_the_disk(event, tmp_path, monkeypatch):
    log, synced = begun(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    log.write("step")
    assert synced == []
    log.write(event)
    assert synced == [log.path.stat().st_ino]


# ---- What goes wrong


def test_an_end_that_the_disk_does_not_confirm_leaves_the_run_unfinished(tmp_path, monkeypatch):
    log = begun(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse)  # as a full quota may show on a network disk
    with pytest.raises(LogError, match="its last lines are lost"):
        log.finish(END)
    assert read_history(tmp_path, "run").status is None


class FullDisk:
    """`os.write` on a disk that takes `left` more bytes: a short write first, then ENOSPC."""

    def __init__(self, left: int):
        self.left, self.write = left, os.write

    def __call__(self, descriptor: int, data: bytes) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self.write(descriptor, data[: self.left])
        self.left -= count
        return count


@pytest.mark.parametrize("room", [0, 79])
def test_a_full_disk_ends_no_run_and_its_lines_follow_once_there_is_room(
    tmp_path, monkeypatch, capsys, room
):
    first = begun(tmp_path, "first")
    before = {path: path.read_bytes() for path in (first.path, tmp_path / "registry.jsonl")}
    with monkeypatch.context() as full:
        full.setattr(os, "write", FullDisk(room))
        for step in range(3):
            first.write("step", step=step, payload="x" * 80)
        full.setattr(os, "write", FullDisk(room))
        with pytest.raises(LogError, match=r"registry\.jsonl: No space left on device\. .* start "):
            begun(tmp_path, "second")
        assert {path: path.read_bytes() for path in before} == before, "no half of a line stays"
    (warning,) = capsys.readouterr().err.splitlines()
    assert "first.jsonl: No space left on device. The run continues" in warning
    first.finish(END)
    events = [line.get("step", line["event"]) for line in lines_of(first.path)]
    assert events == ["header", 0, 1, 2, "end"]
    assert read_registry(tmp_path / "registry.jsonl")[-1]["log_sha256"] == sha256(first.path)


def test_a_header_that_cannot_be_written_starts_no_run(tmp_path, monkeypatch):
    writes = iter([os.write, refuse])  # of the registry, then of the log
    monkeypatch.setattr(os, "write", lambda *line: next(writes)(*line))
    with pytest.raises(LogError, match=r"cannot write .*run\.jsonl: Input/output error"):
        begun(tmp_path)
    assert read_history(tmp_path, "run") is None


# ---- Segments


def broken_off(folder: Path, torn: bytes = b'{"event": "ste') -> Path:
    """A log of two steps that ends in the middle of a line, as when its process died."""
    log = begun(folder)
    log.write("step", step=1, train_time_ms=5.5)
    log.write("step", step=2, train_time_ms=9.25)
    log.close()
    with log.path.open("ab") as file:
        file.write(torn)
    return log.path


def test_a_resume_begins_a_segment_that_names_step_and_hash_of_the_one_before(tmp_path):
    path = broken_off(tmp_path)
    before = path.read_bytes()
    log = resumed(tmp_path)
    log.finish(END)
    assert path.read_bytes() == before, "a process appends to its own segment alone"
    header, event, _ = lines_of(tmp_path / "run.2.jsonl")
    assert (header["event"], header["run_id"], header["schema"]) == ("header", "run", 3)
    assert (header["segment"], header["after_step"]) == (2, 1)
    assert header["previous_sha256"] == sha256(path)
    assert event | RESUMED == event
    assert event["event"] == "resume"
    start, resume, ended = read_registry(tmp_path / "registry.jsonl")
    assert resume["log_sha256"] == sha256(path)
    assert ended["log_sha256"] == sha256(log.path)
    assert json.loads(before.partition(b"\n")[0])["registry_sha256"] == start["sha256"]
    assert header["registry_sha256"] == resume["sha256"]


@pytest.mark.parametrize("how", ["start", "segment", "line", "process"])
def test_a_run_that_another_process_has_begun_resumed_or_still_writes_is_refused(how, tmp_path):
    """That it is free when its process is killed, runs that resume after a kill show."""
    path = broken_off(tmp_path, b"")
    history = None if how == "start" else read_history(tmp_path, "run")
    other = resumed(tmp_path) if how in ("segment", "process") else None
    if how == "segment":
        other.close()
    if how == "line":
        path.write_bytes(path.read_bytes() + b'{"event": "resume", "from_step": 1}\n')
    before = path.read_bytes()
    reason = "process is writing it" if how == "process" else "process has resumed the run"
    with pytest.raises(LogError, match=f"another {reason}. Wait for the other process"):
        RunLog(tmp_path, "run", history).begin(HEADER, RESUMED if history else None)
    assert path.read_bytes() == before
    if how == "process":
        other.close()
        RunLog(tmp_path, "run", read_history(tmp_path, "run")).begin(HEADER, RESUMED)


STEP = b'{"event": "step", %s}\n'


@pytest.mark.parametrize(("make", "problem"), [
    (lambda path: path.symlink_to("run.jsonl"), "is a link"),
    (os.mkfifo, "no regular file"),
    (Path.mkdir, "no regular file"),
    (lambda path: path.write_bytes(STEP % b'"t_ms": 1'), "must be the header of run other"),
    (lambda path: path.write_bytes(path.with_name("run.jsonl").read_bytes()),
     "must be the header of run other"),
    (lambda path: path.write_bytes(b"[" * 100_000 + b"\n"), "nested too deeply"),
    (lambda path: path.write_bytes(b'{"event": []}\n'), "no event of a run log"),
    (lambda path: path.write_bytes(STEP % b'"t_ms": null'), "are numbers"),
    (lambda path: path.write_bytes(STEP % b'"train_time_ms": "9"'), "are numbers"),
    (lambda path: path.write_bytes(STEP % b'"t_ms": 1e999'), "are numbers"),
])  # fmt: skip
def test_what_is_no_log_of_the_run_is_refused(make, problem, tmp_path):
    broken_off(tmp_path)
    make(tmp_path / "other.jsonl")
    with pytest.raises(LogError, match=rf"other\.jsonl.*{problem}"):
        read_history(tmp_path, "other")


# ---- What identifies a run


def make_source(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


FILES = {"train_gpt.py": "a", "optim/muon.py": "b", "data/prose.tiktoken": "c"}


def test_the_hash_covers_what_decides_a_run_and_nothing_else_and_names_the_stored_source(tmp_path):
    root = make_source(tmp_path / "a", FILES)
    before = source_hash(root)
    others = [*(f"{folder}/a.py" for folder in ("tests", "scripts", "claims", "logs")), "README.md"]
    others = dict.fromkeys([*others, "optim/notes.txt"], "x")
    assert source_hash(make_source(root, others)) == before
    more = ["data/wheels.txt", "kernels/new.py", "runtime/source.py", "requirements.txt"]
    for number, name in enumerate([*FILES, *more]):
        changed = make_source(tmp_path / str(number), FILES | {name: "changed"})
        assert source_hash(changed) != before, name
    moved = make_source(tmp_path / "moved", {"train_gpt.py": "ab", "optim/muon.py": ""})
    split = make_source(tmp_path / "split", {"train_gpt.py": "a", "optim/muon.py": "b"})
    assert source_hash(moved) != source_hash(split)
    for _ in range(2):
        store_sources(tmp_path / "logs", root)
    (stored,) = (tmp_path / "logs/sources").iterdir()
    assert stored.name == source_hash(stored) == before


# ---- The clock


def test_a_phase_waits_for_the_device_at_both_ends_unless_the_run_broke_off():
    waits = []
    ledger = Clock(lambda: waits.append(ledger.running))
    for wait in (True, False):
        ledger.start("train", timed=True)
        ledger.stop(wait=wait)
    assert waits == [False, True, False]
    assert not ledger.running


@pytest.mark.parametrize(("lost", "charged"), [(250.0, 250.0), (0.0, 0.0), (-250.0, 0.0)])
def test_lost_steps_are_charged_and_a_checkpoint_later_than_the_log_lost_none(lost, charged):
    clock = Clock()
    clock.begin_run()
    clock.resume_run(1000.0, lost_ms=lost)
    assert clock.train_time_ms == 1000.0 + charged
    assert [tuple(phase) for phase in clock.phases] == [("lost", True, charged)]
