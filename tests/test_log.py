"""The run log, its registry and the clock: what is written survives, and what cannot be written is said."""

import errno
import hashlib
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from runtime import clock
from runtime.clock import Ledger
from runtime.log import RunLog, RunLogError, Tail, config_hash, new_run_id, source_files, source_hash, tail_of
from runtime.registry import read_registry

ROOT = Path(__file__).resolve().parent.parent

HEADER = {"track": "tiny", "source_sha256": "a", "config_sha256": "b", "seed": 0, "trial": 0}
END = {"status": "done", "val_loss": 1.0}


def lines_of(path: Path) -> list[dict]:
    content = path.read_bytes()
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def python(code: str, *arguments: object, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, text=True, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def test_a_line_is_on_disk_when_write_returns(tmp_path):
    log = RunLog(tmp_path, "run")
    for step in range(3):
        log.write("step", step=step)
        assert [line["step"] for line in lines_of(log.path)] == list(range(step + 1))


def test_floats_come_back_unrounded_and_numpy_scalars_as_numbers(tmp_path):
    log = RunLog(tmp_path, "run")
    log.write("x", third=1 / 3, tiny=5e-324, f32=np.float32(0.1), count=np.int64(7), flag=np.bool_(True), pair=(1, 2.5))
    (line,) = lines_of(log.path)
    assert line["third"] == 1 / 3
    assert line["tiny"] == 5e-324
    assert line["f32"] == float(np.float32(0.1))
    assert (line["count"], line["flag"], line["pair"]) == (7, True, [1, 2.5])


def test_non_finite_numbers_are_spelled_out_and_the_line_stays_strict_json(tmp_path):
    log = RunLog(tmp_path, "run")
    log.write("x", a=math.nan, b=math.inf, c=[-np.float32("inf")])

    def refuse(constant):
        pytest.fail(f"{constant} is not JSON")

    line = json.loads(log.path.read_text(), parse_constant=refuse)
    assert (line["a"], line["b"], line["c"]) == ("nan", "inf", ["-inf"])


def test_a_value_that_would_need_the_device_is_refused_and_leaves_no_line(tmp_path):
    log = RunLog(tmp_path, "run")
    with pytest.raises(TypeError, match="cannot log a ndarray"):
        log.write("x", value=np.zeros(3))
    assert log.path.read_bytes() == b""


def test_times_never_run_backwards(tmp_path):
    log = RunLog(tmp_path, "run")
    for _ in range(50):
        log.write("x")
    times = [line["t_ms"] for line in lines_of(log.path)]
    assert times == sorted(times)
    assert times[0] >= 0


def test_an_existing_run_is_never_overwritten(tmp_path):
    RunLog(tmp_path, "run").write("precious")
    with pytest.raises(RunLogError, match=r"run\.jsonl: File exists; a run log is never overwritten"):
        RunLog(tmp_path, "run")
    assert lines_of(tmp_path / "run.jsonl")[0]["event"] == "precious"


def test_a_disabled_log_writes_nothing_anywhere(tmp_path):
    log = RunLog(tmp_path / "logs", "run", enabled=False)
    log.write("header")
    log.store_sources(ROOT)
    log.begin(HEADER)
    log.finish(END)
    assert list(tmp_path.iterdir()) == []


def test_run_ids_are_unique_and_name_track_seed_and_trial():
    ids = [new_run_id("tiny", 3, 1) for _ in range(20)]
    assert len(set(ids)) == 20
    assert all(re.fullmatch(r"\d{8}-\d{6}_tiny_s3_t1_[0-9a-f]{6}", run_id) for run_id in ids)


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


def test_a_killed_process_loses_no_line_that_it_had_written(tmp_path):
    code = """
import os, sys
from runtime.log import RunLog
log = RunLog(sys.argv[1], "run")
step = 0
while True:
    log.write("step", step=step, payload="x" * 500)
    os.write(1, b"%d\\n" % step)
    step += 1
"""
    with python(code, tmp_path, stdout=subprocess.PIPE) as child:
        acknowledged = [int(next(child.stdout)) for _ in range(200)]
        child.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in child.stdout if line.endswith("\n")]
    written = [line["step"] for line in lines_of(tmp_path / "run.jsonl")]
    assert written[: len(acknowledged)] == acknowledged
    assert written == list(range(len(written)))


def test_lines_that_the_system_refuses_wait_and_follow_in_order_once_it_takes_them(tmp_path):
    """The kernel itself refuses here: it takes the part of a line that fits and then fails."""
    code = """
import resource, sys
from runtime.log import RunLog
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
log = RunLog(sys.argv[1], "run")
for step in range(100):
    log.write("step", step=step, payload="x" * 50)
print(len(log.path.read_bytes()), log.offset)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.write("step", step=100)
log.close()
print(len(log.path.read_bytes()), log.offset)
"""
    with python(code, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        full, all_of_them, size, offset = map(int, child.stdout.read().split())
        warning = child.stderr.read()
    assert full <= 1000 < all_of_them < size == offset
    assert [line["step"] for line in lines_of(tmp_path / "run.jsonl")] == list(range(101))
    assert warning.count("\n") == 1
    assert f"warning: cannot write {tmp_path / 'run.jsonl'}: {os.strerror(errno.EFBIG)}" in warning


class FullDisk:
    """`os.write` on a disk that takes `capacity` more bytes: a short write first, then ENOSPC."""

    def __init__(self, capacity: int):
        self.left = capacity
        self.write = os.write

    def __call__(self, descriptor: int, data: bytes) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self.write(descriptor, data[: self.left])
        self.left -= count
        return count


@pytest.mark.parametrize("capacity", [0, 1, 40, 79])
def test_a_full_disk_leaves_log_and_registry_at_their_last_whole_line_and_ends_no_run(
    tmp_path, monkeypatch, capsys, capacity
):
    first, second = RunLog(tmp_path, "first"), RunLog(tmp_path, "second")
    first.begin(HEADER)
    before = {path: path.read_bytes() for path in (first.path, tmp_path / "registry.jsonl")}

    with monkeypatch.context() as full:
        full.setattr(os, "write", FullDisk(capacity))
        for step in range(3):
            first.write("step", step=step, payload="x" * 80)
        full.setattr(os, "write", FullDisk(capacity))
        with pytest.raises(RunLogError, match=r"registry\.jsonl: No space left on device; .* start the run again"):
            second.begin(HEADER)
        assert {path: path.read_bytes() for path in before} == before
    warnings = capsys.readouterr().err.splitlines()
    assert [re.search(r"first\.jsonl: (.*?)\. The run goes on", warning)[1] for warning in warnings] == [
        os.strerror(errno.ENOSPC)]
    first.finish(END)
    assert [line.get("step", line["event"]) for line in lines_of(first.path)] == ["header", 0, 1, 2, "end"]
    assert read_registry(tmp_path / "registry.jsonl")[-1]["log_sha256"] == sha256(first.path.read_bytes())


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_lines_that_were_never_taken_are_kept_elsewhere_and_complete_the_log_that_the_registry_names(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = RunLog(tmp_path / "logs", "run")
    log.begin(HEADER)
    monkeypatch.setattr("runtime.log.append", refuse)
    log.write("step", step=1)
    with pytest.raises(RunLogError, match=r"run\.jsonl: Input/output error; its last 2 lines are in ") as caught:
        log.finish(END)
    elsewhere = Path(re.search(r"are in (\S+): ", str(caught.value))[1])
    assert [line["event"] for line in lines_of(elsewhere)] == ["step", "end"]
    whole = log.path.read_bytes() + elsewhere.read_bytes()
    assert read_registry(tmp_path / "logs" / "registry.jsonl")[-1]["log_sha256"] == sha256(whole)
    log.close()


def test_lines_that_cannot_be_kept_anywhere_are_counted(tmp_path, monkeypatch):
    log = RunLog(tmp_path, "run")
    monkeypatch.setattr("runtime.log.append", refuse)
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    log.write("step")
    with pytest.raises(RunLogError, match=r"its last 1 lines are lost, as .*: Input/output error"):
        log.close()


def test_a_header_that_cannot_be_written_starts_no_run(tmp_path, monkeypatch):
    log = RunLog(tmp_path, "run")
    monkeypatch.setattr("runtime.log.append", refuse)
    with pytest.raises(RunLogError, match=r"cannot write .*run\.jsonl: Input/output error"):
        log.begin(HEADER)


def test_a_registry_that_takes_no_end_is_named_once_the_log_is_whole(tmp_path, monkeypatch):
    log = RunLog(tmp_path, "run")
    log.begin(HEADER)
    monkeypatch.setattr("runtime.registry.append", refuse)
    with pytest.raises(RunLogError, match=r"cannot write .*registry\.jsonl: Input/output error"):
        log.finish(END)
    assert lines_of(log.path)[-1]["event"] == "end"
    log.write("step")
    assert lines_of(log.path)[-1]["event"] == "end"


@pytest.mark.parametrize("hears", [True, False])
def test_a_disk_that_fails_to_sync_is_told_once_and_a_run_whose_output_fails_too_goes_on(tmp_path, monkeypatch, hears):
    class Terminal(io.StringIO):
        def flush(self) -> None:
            if not hears:
                refuse()

    log, terminal = RunLog(tmp_path, "run"), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(os, "fsync", refuse)
    log.write("val")
    log.write("val")
    log.close()
    assert (terminal.getvalue().count("\n"), len(lines_of(log.path))) == (1, 2)
    assert "Input/output error" in terminal.getvalue()


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES])
def test_a_folder_that_refuses_files_is_named_with_the_reason(tmp_path, monkeypatch, reason):
    def forbid(*_):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "open", forbid)
    with pytest.raises(RunLogError, match=rf"run\.jsonl: {os.strerror(reason)}; choose a log folder"):
        RunLog(tmp_path, "run")


def test_a_log_folder_below_a_file_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunLogError, match=r"file/logs/run\.jsonl: Not a directory"):
        RunLog(tmp_path / "file" / "logs", "run")


def test_registry_lines_of_two_processes_stay_whole(tmp_path):
    code = """
import sys
from runtime.log import RunLog
log = RunLog(sys.argv[1], sys.argv[2])
for i in range(200):
    log.begin({"track": "tiny", "source_sha256": "a" * 5000, "config_sha256": "b", "seed": i, "trial": 0})
log.finish({"status": "done", "val_loss": 1.5})
"""
    children = [python(code, tmp_path, name) for name in ("one", "two")]
    assert [child.wait(60) for child in children] == [0, 0]
    lines = lines_of(tmp_path / "registry.jsonl")
    for name in ("one", "two"):
        mine = [line for line in lines if line["run_id"] == name]
        assert [line["seed"] for line in mine[:-1]] == list(range(200))
        assert (mine[-1]["event"], mine[-1]["status"], mine[-1]["val_loss"]) == ("end", "done", 1.5)


# ---------------------------------------------------------------------------------------------------------------------
# Runs that go on


def broken_off(folder: Path, run_id: str = "run", torn: bytes = b'{"event": "ste') -> tuple[Path, int]:
    """A log of two steps that ends in the middle of a line, as when its process died, and its size after step 1."""
    log = RunLog(folder, run_id)
    log.begin(HEADER)
    log.write("step", step=1, train_time_ms=5.5)
    offset = log.offset
    log.write("step", step=2, train_time_ms=9.25)
    log.close()
    with log.path.open("ab") as file:
        file.write(torn)
    return log.path, offset


@pytest.mark.parametrize("torn", [b"", b"{", b'{"event": "ste'])
def test_a_log_that_is_resumed_keeps_each_byte_and_goes_on_with_a_whole_line(tmp_path, torn):
    path, offset = broken_off(tmp_path, torn=torn)
    before = path.read_bytes()
    log = RunLog.reopen(tmp_path, "run")
    log.resume(from_step=1, checkpoint="step_000001", differences=["dim 1 -> 2"], log_offset=offset)
    assert (log.offset, path.read_bytes()[: len(before)]) == (path.stat().st_size, before)
    line = json.loads(path.read_bytes()[len(before) :].splitlines()[-1])
    assert line["t_ms"] >= json.loads(before.splitlines()[2])["t_ms"]
    assert datetime.fromisoformat(line["time"]).tzinfo == UTC
    expected = {"event": "resume", "from_step": 1, "checkpoint": "step_000001", "differences": ["dim 1 -> 2"],
                "log_offset": offset}  # fmt: skip
    assert line | expected == line


def test_the_registry_names_the_log_as_a_resume_found_it_and_as_the_end_left_it(tmp_path):
    path, offset = broken_off(tmp_path)
    log = RunLog.reopen(tmp_path, "run")
    log.resume(from_step=1, checkpoint=None, differences=[], log_offset=offset)
    log.finish(END)
    start, resume, end = read_registry(tmp_path / "registry.jsonl")
    found = path.read_bytes()[: resume["log_bytes"]]
    assert found.endswith(b'{"event": "ste\n')
    assert (resume["event"], resume["run_id"], resume["from_step"]) == ("resume", "run", 1)
    assert (resume["log_sha256"], end["log_sha256"]) == (sha256(found), sha256(path.read_bytes()))
    assert [json.loads(line).get("registry_sha256") for line in path.read_bytes().splitlines() if b"registry" in line] \
        == [start["sha256"], resume["sha256"]]  # fmt: skip


def test_the_time_of_a_log_runs_on_from_its_largest_through_any_number_of_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.log.time.monotonic_ns", itertools.count(10**9, 10**8 + 1).__next__)
    path, offset = broken_off(tmp_path)
    for _ in range(3):
        log = RunLog.reopen(tmp_path, "run")
        log.resume(from_step=1, checkpoint=None, differences=[], log_offset=offset)
        log.close()
    times = [json.loads(line)["t_ms"] for line in path.read_bytes().splitlines() if line.endswith(b"}")]
    assert times == sorted(times)
    assert times[-1] < 2000


def test_an_offset_among_lines_that_were_lost_falls_back_to_the_last_whole_line(tmp_path):
    """As when a checkpoint was written while lines waited for a full disk, and the process died before it had room."""
    path, offset = broken_off(tmp_path)
    for beyond, expected in ((offset + 3, offset), (10**6, path.stat().st_size + 1)):
        log = RunLog.reopen(tmp_path, "run")
        log.resume(from_step=1, checkpoint=None, differences=[], log_offset=beyond)
        log.close()
        assert lines_of_whole(path)[-1]["log_offset"] == expected
        path.write_bytes(path.read_bytes()[: path.read_bytes().index(b'{"event": "resume"')])


def lines_of_whole(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]


def test_a_log_is_written_by_one_process_at_a_time_and_is_free_when_it_is_killed(tmp_path):
    code = """
import sys
from runtime.log import RunLog
log = RunLog(sys.argv[1], "run")
log.begin({"track": "tiny"})
print("ready", flush=True)
sys.stdin.read()
"""
    with python(code, tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        with pytest.raises(RunLogError, match=r"run\.jsonl: another process is writing it"):
            RunLog.reopen(tmp_path, "run")
        child.kill()
    log = RunLog.reopen(tmp_path, "run")
    log.resume(from_step=0, checkpoint=None, differences=[], log_offset=tail_of(log.path).header_bytes)
    assert lines_of(log.path)[-1]["event"] == "resume"


@pytest.mark.parametrize(("name", "problem"), [
    ("missing", "No such file or directory"),
    ("link", "Too many levels of symbolic links"),
    ("pipe", "no regular file"),
    ("folder", "Is a directory"),
    ("empty", "its first line is no header"),
    ("headless", "its first line is no header"),
    ("renamed", "is the log of run 'run'"),
    ("../run", "is the log of run 'run'"),
])
def test_what_is_no_log_of_the_run_is_not_reopened(tmp_path, name, problem):
    folder = tmp_path / "logs"
    path, _ = broken_off(tmp_path)
    folder.mkdir()
    (folder / "link.jsonl").symlink_to(path)
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "folder.jsonl").mkdir()
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "headless.jsonl").write_bytes(path.read_bytes().partition(b"\n")[2])
    (folder / "renamed.jsonl").write_bytes(path.read_bytes())
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.jsonl") if file.is_file()}
    for _ in range(2):
        with pytest.raises(RunLogError, match=problem):
            RunLog.reopen(folder, name)
    assert {file: file.read_bytes() for file in before} == before


def test_the_tail_of_a_log_tells_how_it_ended_and_the_largest_times_of_any_line(tmp_path):
    path, offset = broken_off(tmp_path)
    header, *_ = path.read_bytes().splitlines(keepends=True)
    tail = tail_of(path)
    assert (tail.header, tail.header_bytes, tail.status) == (json.loads(header), len(header), None)
    assert tail.log_bytes == path.stat().st_size
    assert (tail.train_time_ms, tail.t_ms) == (9.25, json.loads(path.read_bytes().splitlines()[2])["t_ms"])

    def go_on(status: str, train_time_ms: float) -> Tail:
        log = RunLog.reopen(tmp_path, "run")
        log.resume(from_step=1, checkpoint=None, differences=[], log_offset=offset)
        assert tail_of(path).status is None
        log.finish({"status": status, "val_loss": None, "train_time_ms": train_time_ms})
        return tail_of(path)

    assert go_on("interrupted", 12.0)[3:5] == ("interrupted", 12.0)
    assert go_on("done", 11.0)[3:5] == ("done", 12.0)


@pytest.mark.parametrize("name", ["missing", "link", "pipe"])
def test_a_tail_is_read_from_regular_files_alone(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(broken_off(tmp_path)[0])
    with pytest.raises(RunLogError, match=rf"cannot read the run log .*{name}"):
        tail_of(tmp_path / name)


def test_a_disabled_log_is_neither_reopened_nor_resumed(tmp_path):
    broken_off(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    log = RunLog.reopen(tmp_path, "run", enabled=False)
    log.resume(from_step=1, checkpoint=None, differences=[], log_offset=3)
    log.finish(END)
    assert (log.offset, {file: file.read_bytes() for file in tmp_path.iterdir()}) == (0, before)


# ---------------------------------------------------------------------------------------------------------------------
# Hashes and sources


@pytest.fixture
def tree(tmp_path) -> Path:
    root = tmp_path / "tree"
    files = "train_gpt.py requirements.txt optim/muon.py data/loader.py kernels/a/b.py runtime/log.py"
    for name in files.split():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    return root


def test_the_source_hash_covers_each_source_file_and_nothing_else(tree):
    original = source_hash(tree)
    for path in source_files(tree):
        content = path.read_text()
        path.write_text(content + "\n")
        assert source_hash(tree) != original, path
        path.write_text(content)
    for other in ("README.md", "data/tokens.bin", "scripts/stats.py", "optim/__pycache__/muon.pyc"):
        (tree / other).parent.mkdir(exist_ok=True)
        (tree / other).write_text("x")
    assert source_hash(tree) == original
    assert len(source_files(tree)) == 6


def test_the_source_hash_sees_renames_and_moved_boundaries(tree):
    hashes = {source_hash(tree)}
    (tree / "optim/muon.py").rename(tree / "optim/adam.py")
    hashes.add(source_hash(tree))
    first, second = tree / "data/loader.py", tree / "kernels/a/b.py"
    first.write_text("ab"), second.write_text("c")
    hashes.add(source_hash(tree))
    first.write_text("a"), second.write_text("bc")
    hashes.add(source_hash(tree))
    assert len(hashes) == 4


def test_sources_are_stored_once_under_the_hash_of_what_is_stored(tree, tmp_path):
    log = RunLog(tmp_path / "logs", "run")
    sha256 = log.store_sources(tree)
    stored = tmp_path / "logs" / "sources" / sha256
    assert sha256 == source_hash(tree) == source_hash(stored)
    identity = stored.stat().st_ino
    assert log.store_sources(tree) == sha256
    assert stored.stat().st_ino == identity
    assert [path.name for path in stored.parent.iterdir()] == [sha256]


def test_losing_the_race_to_store_the_sources_is_no_error(tree, tmp_path, monkeypatch):
    log = RunLog(tmp_path / "logs", "run")
    sha256 = log.store_sources(tree)
    exists = Path.exists
    answers = itertools.chain([False], itertools.repeat(True))  # not there at first sight, there when it is renamed

    def arrives_late(path):
        return exists(path) and (path.name != sha256 or next(answers))

    monkeypatch.setattr(Path, "exists", arrives_late)
    assert log.store_sources(tree) == sha256
    assert [path.name for path in (tmp_path / "logs" / "sources").iterdir()] == [sha256]


def test_the_config_hash_ignores_order_and_sees_values_and_types():
    assert config_hash({"a": 1, "b": (2, 3)}) == config_hash({"b": [2, 3], "a": 1})
    variants = [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": None}, {"a": [1]}, {"b": 1}, {"a": math.nan}]
    assert len({config_hash(variant) for variant in variants}) == len(variants)


# ---------------------------------------------------------------------------------------------------------------------
# The clock


@pytest.fixture
def now(monkeypatch) -> list[int]:
    """The time in nanoseconds, as a list of one number that the test moves."""
    now = [10**9]
    monkeypatch.setattr(clock.time, "perf_counter_ns", lambda: now[0])
    return now


def test_the_ledger_charges_timed_phases_only(now):
    heard = []
    ledger = Ledger(on_phase=lambda name, timed, ms: heard.append((name, timed, ms)))
    expected = [("warmup", False, 5.0), ("train", True, 2.0), ("validate", False, 7.0), ("train", True, 3.0)]
    for name, timed, ms in expected:
        now[0] += 10**6  # between phases: charged to nobody
        with ledger.phase(name, timed=timed):
            now[0] += int(ms * 1e6)
    assert heard == ledger.phases == expected
    assert ledger.train_time_ms == 5.0


def test_train_time_includes_the_running_timed_phase_without_waiting_for_the_device(now):
    waits = []
    ledger = Ledger(synchronize=lambda: waits.append(1))
    ledger.start("train", timed=True)
    now[0] += 4 * 10**6
    assert ledger.train_time_ms == 4.0
    assert len(waits) == 1
    assert ledger.stop() == 4.0
    ledger.start("validate", timed=False)
    now[0] += 10**6
    assert ledger.train_time_ms == 4.0


def test_work_still_on_the_device_belongs_to_the_phase_that_started_it(now):
    pending = [0]

    def synchronize():
        now[0] += pending[0]
        pending[0] = 0

    ledger = Ledger(synchronize)
    pending[0] = 9 * 10**6  # from before the phase
    with ledger.phase("train", timed=True):
        pending[0] = 2 * 10**6
    assert ledger.train_time_ms == 2.0


def test_phases_do_not_nest_and_stop_needs_a_start(now):
    ledger = Ledger()
    with pytest.raises(RuntimeError, match="no phase is open"):
        ledger.stop()
    with ledger.phase("train", timed=True), pytest.raises(RuntimeError, match="'validate' cannot start inside 'train'"):
        ledger.start("validate", timed=False)


def test_a_phase_that_raises_is_closed_and_kept(now):
    ledger = Ledger()

    def interrupted():
        now[0] += 10**6
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ledger.phase("train", timed=True):
        interrupted()
    assert ledger.phases == [("train", True, 1.0)]
    ledger.start("checkpoint", timed=False)
