"""The run log, its registry and the clock: what is written survives, and what cannot be written is said."""

import errno
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime import clock
from runtime.clock import Ledger
from runtime.log import RunLog, RunLogError, config_hash, new_run_id, source_files, source_hash

ROOT = Path(__file__).resolve().parent.parent

HEADER = {"track": "tiny", "source_sha256": "a", "config_sha256": "b", "seed": 0, "trial": 0}
END = {"status": "done", "val_loss": 1.0}


def lines_of(path: Path) -> list[dict]:
    content = path.read_bytes()
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


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


def test_a_file_that_cannot_grow_keeps_its_whole_lines_and_says_so(tmp_path):
    """The kernel itself refuses here: it takes the part of a line that fits and then fails."""
    code = """
import resource, sys
from runtime.log import RunLog, RunLogError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
log = RunLog(sys.argv[1], "run")
try:
    for step in range(100):
        log.write("step", step=step, payload="x" * 50)
except RunLogError as error:
    print(log.lines, error)
    log.write("step", step=-1)
    log.close()
"""
    with python(code, tmp_path, stdout=subprocess.PIPE) as child:
        count, message = child.stdout.read().split(" ", 1)
    written = [line["step"] for line in lines_of(tmp_path / "run.jsonl")]
    assert written == list(range(int(count)))
    assert 3 < len(written) < 20
    assert str(tmp_path / "run.jsonl") in message
    assert os.strerror(errno.EFBIG) in message
    assert f"the {count} lines" in message


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
def test_a_full_disk_leaves_log_and_registry_at_their_last_whole_line(tmp_path, monkeypatch, capacity):
    first, second = RunLog(tmp_path, "first"), RunLog(tmp_path, "second")
    first.write("kept")
    first.begin(HEADER)
    before = {path: path.read_bytes() for path in (first.path, tmp_path / "registry.jsonl")}

    monkeypatch.setattr(os, "write", FullDisk(capacity))
    with pytest.raises(RunLogError, match=r"first\.jsonl: No space left on device; the 2 lines"):
        first.write("lost", payload="x" * 80)
    monkeypatch.setattr(os, "write", FullDisk(capacity))
    with pytest.raises(RunLogError, match=r"registry\.jsonl: No space left on device; the 0 lines .*second\.jsonl"):
        second.begin(HEADER)
    assert {path: path.read_bytes() for path in before} == before


def test_a_disk_that_fails_to_sync_is_an_error_not_a_silence(tmp_path, monkeypatch):
    log = RunLog(tmp_path, "run")

    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    log.write("step")
    with pytest.raises(RunLogError, match="Input/output error"):
        log.write("val")


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES])
def test_a_folder_that_refuses_files_is_named_with_the_reason(tmp_path, monkeypatch, reason):
    def refuse(*_):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "open", refuse)
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
