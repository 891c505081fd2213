"""Systems that lack what Unix has: the trainer starts there, trains to the end and leaves the same files."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_run import ROOT, arguments, find_logs, read_events, run, write_data

from data import shards
from data.shards import open_shard, write_shard
from runtime import environment, registry, watch
from runtime.environment import Machine, peak_mib, why_not_compile
from runtime.log import RunLog, RunLogError
from runtime.preflight import available_memory, environment_findings, memory_finding
from runtime.registry import read_registry, register

CPU = torch.device("cpu")

# A Windows, with a build of torch for which no processes can be joined, as far as Python shows it to a program.
WINDOWS = """
import fcntl, json, os, shutil, subprocess, sys, types
import torch, torch._dynamo, torch.distributed as dist, torch.testing._internal.distributed.fake_pg

def refuse(event, arguments):
    if event == "open" and not isinstance(arguments[0], int):
        path, mode, _ = arguments
        if os.fsdecode(path).startswith(("/proc", "/sys", "/dev/shm")):
            raise FileNotFoundError(2, "No such file", path)
        if mode is None and os.path.isdir(path):  # by os.open
            raise PermissionError(13, "Permission denied", path)

def fsync(descriptor, write=os.fsync, status=fcntl.fcntl):
    if not status(descriptor, 3) & (os.O_WRONLY | os.O_RDWR):
        raise OSError(9, "Bad file descriptor")
    write(descriptor)

def locking(descriptor, mode, count, lock=fcntl.lockf, commands={1: fcntl.LOCK_EX, 2: fcntl.LOCK_EX | fcntl.LOCK_NB}):
    locked.append(os.lseek(descriptor, 0, os.SEEK_CUR))
    lock(descriptor, commands[mode], count, locked[-1])

locked, os.fsync, shutil._use_fd_functions = [], fsync, False
for name in ("fcntl", "resource", "pwd", "grp", "termios", "triton"):
    sys.modules[name] = None
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_LOCK=1, LK_NBLCK=2)
for name in ("pread", "pwrite", "sysconf", "sched_getaffinity", "set_blocking", "fork", "killpg", "getuid",
             "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY"):
    delattr(os, name)
for name in [name for name, value in vars(dist).items() if not name.startswith("_") and type(value) is not type(sys)]:
    if name not in ("is_available", "ProcessGroup"):
        delattr(dist, name)
dist.is_available = lambda: False
sys.addaudithook(refuse)
import train_gpt
here, sys.platform = sys.platform, "win32"
code = train_gpt.main(sys.argv[1:])
sys.platform = here  # what follows looks for programs, for which Python itself would ask Windows
from runtime.preflight import environment_findings
print(json.dumps({"code": code, "locked": locked, "findings": environment_findings()}))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def windows(data, tmp_path_factory):
    """What a run there said and left, in a process of its own."""
    logs = tmp_path_factory.mktemp("logs")
    words = arguments(data, logs, checkpoint_every=4, keep_model="on")
    done = subprocess.run([sys.executable, "-c", WINDOWS, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *out, told = done.stdout.splitlines()
    return SimpleNamespace(logs=logs, out="\n".join(out), err=done.stderr, told=json.loads(told))


def test_a_run_on_windows_ends_with_the_losses_of_any_other_to_the_bit(windows, data, tmp_path):
    assert windows.told["code"] == 0, windows.err
    (log,) = find_logs(windows.logs)
    there = read_events(log)
    assert there[-1]["status"] == "done"
    here = run(data, tmp_path)
    losses = [event["train_loss"] for event in there if event["event"] == "step"]
    assert losses + [event["val_loss"] for event in there if event["event"] == "val"] == here.losses()


def test_its_log_is_registered_and_its_last_checkpoint_is_kept(windows):
    (log,) = find_logs(windows.logs)
    start, end = read_registry(windows.logs / "registry.jsonl")
    assert (start["run_id"], start["event"], end["event"], end["status"]) == (log.stem, "start", "end", "done")
    assert "warning" not in windows.out
    (kept,) = (windows.logs / "checkpoints" / log.stem).iterdir()
    assert sorted(path.name for path in kept.iterdir()) == [
        "checksums.json", "model.safetensors", "optim.safetensors", "state.json"]  # fmt: skip


def test_its_locks_lie_behind_every_line_as_nobody_can_read_what_is_locked(windows):
    assert len(windows.told["locked"]) == 3  # of the log, and of the registry twice
    assert min(windows.told["locked"]) > max(path.stat().st_size for path in windows.logs.glob("*.jsonl"))


def test_a_check_of_that_system_finds_faults_but_none_that_it_could_not_look_for(windows):
    said = [what for _, what, _ in windows.told["findings"]]
    assert not [what for what in said if "could not be checked" in what]
    assert [what for what in said if what.startswith("process groups: none")]


# ---------------------------------------------------------------------------------------------------------------------
# Piece by piece


@pytest.fixture
def without(monkeypatch):
    """without("fcntl", ...) hides modules, without("os.pread", ...) functions."""

    def hide(*names):
        for name in names:
            if name.startswith("os."):
                monkeypatch.delattr(os, name.removeprefix("os."))
            else:
                monkeypatch.setitem(sys.modules, name, None)

    return hide


@pytest.fixture
def byte_locks(monkeypatch, without):
    """A stand-in for Windows' locks, which are refused where another descriptor holds the byte; returns the holders."""
    holders: dict[int, int] = {}

    def locking(descriptor: int, mode: int, count: int) -> None:
        place = os.lseek(descriptor, 0, os.SEEK_CUR)
        if holders.setdefault(place, descriptor) != descriptor:
            raise PermissionError(13, "Permission denied")

    without("fcntl")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_LOCK=1, LK_NBLCK=2))
    return holders


def test_windows_keeps_a_second_process_out_of_a_log(byte_locks, tmp_path):
    log = RunLog(tmp_path, "run")
    log.write("header", run_id="run")
    with pytest.raises(RunLogError, match="another process is writing it"):
        RunLog.reopen(tmp_path, "run")
    byte_locks.clear()  # as when the first is closed
    RunLog.reopen(tmp_path, "run").write("val", step=1)
    assert [event["event"] for event in read_events(log.path)] == ["header", "val"]


@pytest.mark.parametrize("locks", [True, False])
def test_the_registry_keeps_its_chain_without_unix(without, request, tmp_path, locks):
    if locks:
        request.getfixturevalue("byte_locks")
    without("fcntl", "os.pread")
    path = tmp_path / "registry.jsonl"
    for number in range(3):
        register(path, "start", run_id=f"run{number}", note="x" * 50_000)  # the last line is found in a long file
    assert [entry["run_id"] for entry in read_registry(path)] == ["run0", "run1", "run2"]


def test_lines_end_as_written_where_files_are_text_unless_told_otherwise(monkeypatch, tmp_path):
    """Windows' flag must be given wherever a descriptor is opened; here it is told apart by a stand-in bit."""
    flags, real, bit = [], os.open, 1 << 29
    monkeypatch.setattr(os, "open", lambda path, given, *mode: flags.append(given) or real(path, given & ~bit, *mode))
    for module in (registry, sys.modules["runtime.log"], shards):
        monkeypatch.setattr(module, "BINARY", bit)
    write_shard(tmp_path / "shard.bin", np.arange(3))
    RunLog(tmp_path, "run")
    register(tmp_path / "registry.jsonl", "start", run_id="run")
    open_shard(tmp_path / "shard.bin")
    assert len(flags) == 3
    assert all(given & bit for given in flags)


def test_threads_that_share_a_shard_read_their_own_tokens_without_pread(without, tmp_path):
    without("os.pread")
    path, tokens = tmp_path / "shard.bin", np.arange(60_000) % 50_000
    write_shard(path, tokens)
    shard, wrong = open_shard(path), []

    def read(first: int) -> None:
        for start in range(first, 59_000, 97):
            if not np.array_equal(shard[start : start + 50], tokens[start : start + 50]):
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_memory_that_is_not_counted_is_not_a_number_and_what_there_is_has_no_limit(without, tmp_path):
    without("resource", "os.sysconf")
    assert np.isnan(peak_mib(Machine(CPU, 0, 1)))
    assert available_memory(CPU) == np.inf
    assert memory_finding({"weights": 1e15}, available_memory(CPU), []).level == "ok"
    assert not [finding for finding in environment_findings() if finding.what.startswith("open files")]


@pytest.mark.parametrize(("platform", "compiler"), [("win32", "cl"), ("linux", "g++")])
def test_the_compiler_that_is_looked_for_is_that_of_the_system(monkeypatch, platform, compiler):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    for found in (compiler, "none"):
        monkeypatch.setattr(environment.shutil, "which", lambda name, found=found: name == found)
        assert (why_not_compile(CPU) == "no C++ compiler was found") == (found == "none")


@pytest.mark.parametrize(
    ("platform", "asked", "libuv"),
    [("linux", None, True), ("win32", None, False), ("win32", "1", True), ("linux", "0", False)],
)
def test_the_store_of_the_ranks_is_the_one_that_the_systems_torch_has(monkeypatch, platform, asked, libuv):
    given = {}
    monkeypatch.setattr(watch.dist, "TCPStore", lambda *address, **options: given.update(options))
    monkeypatch.setattr(sys, "platform", platform)
    for name, value in {"MASTER_ADDR": "here", "MASTER_PORT": "1", "USE_LIBUV": asked}.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    watch.connect(1.0)
    assert given["use_libuv"] is libuv


@pytest.mark.parametrize(
    ("device", "nccl", "name"), [("cuda", True, "nccl"), ("cuda", False, "gloo"), ("cpu", True, "gloo")]
)
def test_gpus_talk_by_gloo_where_torch_has_no_nccl(monkeypatch, device, nccl, name):
    formed = {}
    monkeypatch.setattr(watch.dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(watch.dist, "init_process_group", lambda backend, **rest: formed.update(rest, backend=backend))
    monkeypatch.setattr(watch.dist, "PrefixStore", lambda *arguments: None)
    monkeypatch.setattr(watch.dist, "all_reduce", lambda total: None)
    monkeypatch.setattr(watch, "connect", lambda rank_timeout: None)
    monkeypatch.setattr(watch.torch.cuda, "set_device", lambda place: None)
    monkeypatch.setattr(watch.torch, "tensor", lambda value, device: SimpleNamespace(item=lambda: 1.0))
    place = torch.device(device)
    watch.first_sum(place, rank=1, world_size=2, rank_timeout=1.0)
    assert (formed["backend"], formed["device_id"]) == (name, place if name == "nccl" else None)


# ---------------------------------------------------------------------------------------------------------------------
# What is lacking is said, with its cost


@pytest.mark.parametrize(
    ("capability", "ranks", "nccl", "said"),
    [((9, 0), 8, True, []), ((7, 5), 1, True, ["Tesla T4 has no bf16 instructions"]), ((8, 6), 1, False, []),
     ((8, 6), 2, False, ["this torch has no NCCL"]),
     ((7, 5), 2, False, ["Tesla T4 has no bf16 instructions", "this torch has no NCCL"])],
)  # fmt: skip
def test_what_slows_gpus_is_said_in_a_line_each(monkeypatch, capability, ranks, nccl, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    lines = environment.handicaps(Machine(torch.device("cuda"), 0, ranks), torch.float32)
    assert [line.startswith(words) for line, words in zip(lines, said, strict=True)] == [True] * len(said)
    assert all("slower" in line and "\n" not in line for line in lines)


def test_a_cpu_is_not_told_what_gpus_lack():
    assert environment.handicaps(Machine(CPU, 0, 4), torch.float32) == []


@pytest.mark.parametrize(
    ("platform", "own", "set_to"),
    [("linux", {}, "expandable_segments:True"), ("win32", {}, None),
     ("linux", {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
     ("linux", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None)],
)  # fmt: skip
def test_the_allocator_grows_its_segments_unless_told_otherwise(monkeypatch, platform, own, set_to):
    monkeypatch.setattr(os, "environ", dict(own))
    monkeypatch.setattr(sys, "platform", platform)
    environment.grow_segments()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == set_to


@pytest.mark.gpu
def test_the_allocator_of_a_gpu_has_heard_of_it():
    code = """
import torch
from runtime.environment import start
print(torch.zeros(8, device=start("cuda").device).sum().item())
print(any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()))
"""
    settings = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(ROOT), env=settings, capture_output=True, text=True)
    assert done.stdout == "0.0\nTrue\n", done.stderr
    assert "Warning" not in done.stderr
