"""Before a run: a fit machine is a go, each fault is named with its fix, and plans are plain arithmetic."""

import ast
import importlib.metadata
import os
import resource
import shutil
import sys
import timeit
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runtime import environment, preflight
from runtime.preflight import (
    GIB,
    MIB,
    Finding,
    available_memory,
    disk_findings,
    environment_findings,
    estimate,
    memory_finding,
    memory_plan,
    report,
    timed_plan,
    verdict,
)

ROOT = Path(__file__).resolve().parents[1]


def about(text: str, findings: list[Finding] | None = None) -> Finding:
    """The one finding that begins with this text."""
    found = [f for f in (environment_findings() if findings is None else findings) if f.what.startswith(text)]
    assert len(found) == 1, found
    return found[0]


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in findings if finding.level != "ok"]


# ---------------------------------------------------------------------------------------------------------------------
# Python and packages


def test_the_environment_of_the_tests_is_a_go_and_every_finding_that_is_not_ok_has_a_fix():
    findings = environment_findings()
    assert verdict(findings) == 0, bad(findings)
    assert {finding.level for finding in findings} <= {"ok", "warn"}
    assert all(bool(finding.fix) == (finding.level != "ok") for finding in findings)
    assert all("could not be checked" not in finding.what for finding in findings), bad(findings)
    version = importlib.metadata.version("torch").partition("+")[0]
    assert about("torch ", findings).what == f"torch {version}"


def test_all_packages_of_the_requirements_are_looked_at():
    pinned = [line.partition("==")[0] for line in (ROOT / "requirements.txt").read_text().splitlines()]
    words = [finding.what.split()[0] for finding in preflight._packages()]
    assert sorted(words) == sorted(["Python", *pinned])


def test_an_old_python_is_a_stop(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 14))
    assert about("Python ") == Finding("stop", about("Python ").what, "install 3.11 or newer")


READ_FIRST = ["runtime/__init__", "runtime/preflight", "scripts/__init__", "scripts/command", "scripts/check_env"]


@pytest.mark.parametrize("path", READ_FIRST)
def test_an_old_python_can_read_what_tells_it_so(path):
    tree = ast.parse((ROOT / f"{path}.py").read_text(), feature_version=(3, 9))
    assert not [node for node in tree.body if isinstance(node, ast.Import) and "torch" in node.names[0].name]


@pytest.mark.parametrize("name", ["torch", "numpy", "safetensors"])
def test_a_package_that_is_missing_is_a_stop_and_the_others_are_still_looked_at(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    findings = environment_findings()
    assert verdict(findings) == 2
    finding = about(f"{name} cannot be imported: ModuleNotFoundError", findings)
    assert finding.fix == "pip install -r requirements.txt"
    assert about("scipy", findings).level == "ok"
    assert bool([f for f in findings if f.what.startswith("process groups")]) == (name != "torch")


def test_a_package_of_another_version_than_the_pinned_one_is_a_warning(monkeypatch, tmp_path):
    pins = tmp_path / "requirements.txt"
    pins.write_text("torch==1.0.0  # has a rule of its own\nnumpy==1.2.3  # shards\n")
    monkeypatch.setattr(preflight, "REQUIREMENTS", pins)
    import numpy

    findings = environment_findings()
    assert about("numpy", findings).what == f"numpy {numpy.__version__}, requirements.txt has 1.2.3"
    assert about("numpy", findings).level == "warn"
    assert about("torch ", findings).level == "ok"
    assert verdict(findings) == 0


def test_without_requirements_the_packages_of_every_run_are_looked_at(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "REQUIREMENTS", tmp_path / "requirements.txt")
    findings = environment_findings()
    for name in ("torch", "numpy", "scipy", "safetensors", "tiktoken", "huggingface_hub"):
        assert about(f"{name} ", findings).level == "ok"


def versions(monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    """Packages claim other versions than they have."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: changed.get(name) or real(name))


@pytest.mark.parametrize(("version", "known"), [("2.11.0", True), ("2.12.1+cu130", True), ("2.13.0", True),
                                                 ("2.1.3", False), ("2.10.0", False), ("2.14.0", False)])  # fmt: skip
def test_torch_versions_are_known_to_work_or_untried(monkeypatch, version, known):
    versions(monkeypatch, torch=version)
    said = [finding for finding in preflight._torch() if "untried" in finding.what]
    assert [finding.level for finding in said] == ([] if known else ["warn"])


def test_a_package_that_torch_pins_to_another_version_is_a_warning(monkeypatch):
    asked = [
        'triton==3.7.1; platform_system == "Linux"', "numpy==1.2.3", "cuda-toolkit[cublas,nccl]==13.0.2",
        "sympy>=1.13.3", 'optree>=0.13.0; extra == "optree"',
    ]  # fmt: skip
    installed = {"torch": "2.13.0+cu130", "triton": "3.6.0", "numpy": "1.2.3", "cuda-toolkit": "13.0.3"}
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: asked)
    versions(monkeypatch, **installed)
    assert list(preflight._torch()) == [
        Finding("warn", "triton 3.6.0, but torch 2.13.0 is made for 3.7.1", "pip install triton==3.7.1"),
        Finding("warn", "cuda-toolkit 13.0.3, but torch 2.13.0 is made for 13.0.2", "pip install cuda-toolkit==13.0.2"),
    ]


def test_a_check_that_fails_is_a_warning_and_not_a_traceback(monkeypatch):
    def fail(which: int) -> None:
        raise RuntimeError("no such\n  limit here")

    monkeypatch.setattr(resource, "getrlimit", fail)
    findings = environment_findings()
    assert about("system could not be checked: RuntimeError: no such limit here", findings).level == "warn"
    assert about("CPU: ", findings).level in ("ok", "warn")


# ---------------------------------------------------------------------------------------------------------------------
# GPUs, played by stubs


@pytest.fixture
def gpu_machine(monkeypatch, tmp_path):
    """gpu_machine(names, driver, cuda, usable, ...) makes this a machine with such GPUs."""

    def make(names=("NVIDIA H100 80GB HBM3",), driver="580.65.06", cuda="13.0", usable=True, capability=(9, 0),
             built=("sm_80", "sm_90", "sm_120"), nccl=True):  # fmt: skip
        smi = tmp_path / "nvidia-smi"
        smi.write_text("#!/bin/sh\n" + "".join(f"echo '{name}, {driver}'\n" for name in names))
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        major, minor = capability
        properties = [SimpleNamespace(name=n, total_memory=80 * GIB, major=major, minor=minor) for n in names]
        monkeypatch.setattr(torch.version, "cuda", cuda)
        for name, stub in {
            "is_available": lambda: usable, "device_count": lambda: len(names) if usable else 0,
            "get_device_properties": lambda index: properties[index],
            "get_device_capability": lambda device: capability, "get_arch_list": lambda: list(built),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, stub)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)

    return make


def test_gpus_are_listed_with_memory_capability_and_driver(gpu_machine, monkeypatch):
    gpu_machine(names=["NVIDIA H100 80GB HBM3"] * 2)
    findings = list(preflight._gpus())
    assert findings == [
        Finding("ok", "GPU 0: NVIDIA H100 80GB HBM3, 80 GiB, capability 9.0, bf16 native"),
        Finding("ok", "GPU 1: NVIDIA H100 80GB HBM3, 80 GiB, capability 9.0, bf16 native"),
        Finding("ok", "NVIDIA H100 80GB HBM3 x 2, driver 580.65.06, torch built for CUDA 13.0"),
    ]


def test_a_gpu_without_native_bf16_is_a_warning(gpu_machine):
    gpu_machine(names=["Tesla T4"], capability=(7, 5), built=["sm_75", "sm_90"])
    assert bad(list(preflight._gpus())) == [("warn", "GPU 0: Tesla T4, 80 GiB, capability 7.5, bf16 not native")]


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [((9, 0), ["sm_80", "sm_90a"], True), ((12, 1), ["sm_90", "sm_120"], True), ((8, 9), ["sm_80"], True),
     ((12, 0), ["sm_80", "sm_90"], False), ((10, 0), ["sm_90", "sm_120"], False), ((9, 0), ["gfx942"], True)],
)  # fmt: skip
def test_a_gpu_that_torch_was_not_built_for_is_a_stop(gpu_machine, capability, built, runs):
    gpu_machine(capability=capability, built=built)
    assert bad(list(preflight._gpus())) == ([] if runs else [("stop", "GPU 0: this torch has no code for it")])


@pytest.mark.parametrize(
    ("version", "gpu", "known_bad"),
    [("2.10.0+cu128", "NVIDIA A100-SXM4-80GB", True), ("2.10.1", "NVIDIA A800", True), ("2.10.0", "NVIDIA H100", False),
     ("2.13.0", "NVIDIA A100-SXM4-80GB", False), ("2.1.0", "NVIDIA A100-SXM4-80GB", False)],
)  # fmt: skip
def test_a_pair_of_torch_and_gpu_that_is_known_bad_is_a_stop(gpu_machine, monkeypatch, version, gpu, known_bad):
    gpu_machine(names=[gpu])
    versions(monkeypatch, torch=version)
    stops = [finding for finding in preflight._gpus() if finding.level == "stop"]
    assert len(stops) == known_bad
    assert all("NaN" in stop.what and gpu in stop.what and "--compile off" in stop.fix for stop in stops)


@pytest.mark.parametrize(
    ("driver", "cuda", "usable", "level", "fix"),
    [("580.65.06", "13.0", True, "ok", ""), ("535.183.01", "12.8", True, "ok", ""),
     ("570.26", "13.0", True, "ok", ""),  # with NVIDIA's compatibility package
     ("570.26", "13.0", False, "stop", "update the driver to 580 or newer"),
     ("470.82.01", "12.8", False, "stop", "update the driver to 525 or newer"),
     ("580.65.06", "13.0", False, "stop", "torch.cuda.init()"),
     ("580.65.06", None, False, "warn", "install a torch that is built for CUDA")],
)  # fmt: skip
def test_a_gpu_that_torch_cannot_use_is_told_with_the_reason(gpu_machine, driver, cuda, usable, level, fix):
    gpu_machine(driver=driver, cuda=cuda, usable=usable)
    finding = about("NVIDIA H100 80GB HBM3 x 1, driver", list(preflight._gpus()))
    assert finding.level == level
    assert fix in finding.fix
    assert f"driver {driver}, torch built for CUDA {cuda}" in finding.what


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_on_purpose_are_no_fault(gpu_machine, monkeypatch, hidden):
    gpu_machine(usable=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert about("NVIDIA H100", list(preflight._gpus())).level == "ok"


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'; exit 6", "echo nonsense"])
def test_an_nvidia_smi_that_knows_no_gpu_is_a_machine_without_one(gpu_machine, tmp_path, script):
    gpu_machine(usable=False)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    assert list(preflight._gpus()) == [Finding("ok", "GPUs by nvidia-smi: none")]


@pytest.mark.parametrize(
    ("gpus", "gloo", "level", "fix"),
    [(1, True, "warn", "gloo takes the part of nccl"), (8, True, "warn", "gloo takes the part of nccl"),
     (1, False, "warn", "install a torch that has it"), (8, False, "stop", "install a torch that has it")],
)  # fmt: skip
def test_gpus_without_nccl_talk_by_gloo_and_without_both_not_at_all(gpu_machine, monkeypatch, gpus, gloo, level, fix):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: gloo)
    gpu_machine(names=["NVIDIA H100"] * gpus, nccl=False)
    finding = about("process groups", list(preflight._computing()))
    assert finding.level == level
    assert fix in finding.fix
    gpu_machine(names=["NVIDIA H100"] * gpus)
    finding = about("process groups", list(preflight._computing()))
    assert finding.level == "ok"
    assert finding.what.endswith("nccl 2.29.7")


def test_what_compilation_lacks_is_a_warning_for_the_gpu_and_for_the_cpu(gpu_machine, monkeypatch):
    lacks = {"cpu": "no C++ compiler was found", "cuda": "Triton is not installed"}
    monkeypatch.setattr(environment, "why_not_compile", lambda device: lacks[device.type])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = about("compilation: ", list(preflight._computing()))
    assert (finding.level, finding.what) == ("warn", "compilation: no C++ compiler was found")
    gpu_machine()
    finding = about("compilation: ", list(preflight._computing()))
    assert finding.what == "compilation: no C++ compiler was found; Triton is not installed"


# ---------------------------------------------------------------------------------------------------------------------
# Cores, memory, disk, limits and clock


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinities")
@pytest.mark.parametrize(("quota", "share"), [("150000 100000", 1.5), ("50000 100000", 0.5), ("max 100000", 64),
                                              ("9900000 100000", 64), ("", 64)])  # fmt: skip
def test_cores_are_those_that_the_container_gives(monkeypatch, tmp_path, quota, share):
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(preflight, "CONTAINER", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert preflight.usable_cores() == share


def test_more_threads_than_cores_are_a_warning_with_the_number_to_set(monkeypatch):
    monkeypatch.setattr(preflight, "usable_cores", lambda: 2.5)
    for threads, level, fix in ((2, "ok", ""), (64, "warn", "set OMP_NUM_THREADS=2")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        finding = about("CPU: ", list(preflight._computing()))
        assert (finding.level, finding.fix) == (level, fix)


def test_small_shared_memory_few_open_files_and_a_slow_clock_are_warnings(monkeypatch, tmp_path):
    real = shutil.disk_usage
    monkeypatch.setattr(preflight, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * MIB) if path == tmp_path else real(path))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(timeit, "repeat", lambda *args, **options: [5e-3, 2e-3])  # seconds for 1,000 readings
    findings = list(preflight._system())
    assert [level for level, _ in bad(findings)] == ["warn"] * 3
    assert about(f"{tmp_path}: 64 MiB free", findings).fix.endswith("--shm-size=2g")
    assert about("open files: at most 256", findings).fix == "ulimit -n 4096"
    assert "2,000 ns a reading" in about("clock ", findings).what


def test_a_system_without_shared_memory_and_limits_is_no_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(preflight, "CLOCK_SOURCE", tmp_path / "none")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    findings = list(preflight._system())
    assert about("open files", findings).level == "ok"
    assert about("clock of the system: ", findings)
    assert not [finding for finding in findings if str(tmp_path) in finding.what]


def test_a_disk_with_room_is_ok_also_for_a_folder_that_is_yet_to_be_made(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    [finding] = disk_findings(tmp_path / "checkpoints" / "run", free / 2)
    assert finding.level == "ok"
    assert not list(tmp_path.iterdir())
    [finding] = disk_findings(tmp_path, 2 * free + GIB)
    assert finding.level == "stop"
    assert "needed" in finding.what
    assert "make room" in finding.fix


def test_a_folder_that_cannot_be_written_is_a_stop(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        [finding] = disk_findings(folder, 1)
        assert finding.level == "stop"
        assert f"{file} is no folder that can be written to" in finding.what
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert disk_findings(tmp_path, 1)[0].level == "stop"


def test_the_memory_of_a_cpu_is_between_what_is_held_and_what_there_is():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory(torch.device("cpu")) <= total


def test_memory_that_the_process_takes_stays_counted_as_available_to_it(monkeypatch):
    """The kernel's files are stubs: other processes come and go, and a kernel may count a process's pages roughly."""
    page = os.sysconf("SC_PAGE_SIZE")

    def available(free: int, anonymous: int, files: int) -> float:
        pages = f"9999999 {(anonymous + files) // page} {files // page} 1 0 7777777 0"  # proc(5): size, resident, ...
        stubs = {"meminfo": f"MemTotal: 1 kB\nMemAvailable:   {free // 1024} kB\nSwap: 0 kB", "statm": pages}
        monkeypatch.setattr(preflight, "_text", lambda path: stubs.get(path.name, ""))
        return available_memory(torch.device("cpu"))

    before = available(8 * GIB, GIB, 300 * MIB)
    assert before == 9 * GIB
    assert available(8 * GIB - 256 * MIB, GIB + 256 * MIB, 300 * MIB) == before
    assert available(8 * GIB, GIB, 500 * MIB) == before  # pages of files are free for others already


def test_a_container_limits_the_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "CONTAINER", tmp_path)
    (tmp_path / "memory.max").write_text("1048576\n")
    assert available_memory(torch.device("cpu")) == 1048576
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(torch.device("cpu")) > 1048576


def test_the_memory_of_a_gpu_is_what_is_free_and_what_is_reserved_already(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    assert available_memory(torch.device("cuda")) == 75 * GIB


# ---------------------------------------------------------------------------------------------------------------------
# Plans and the verdict


def test_the_memory_plan_lists_the_parts_their_total_and_what_there_is():
    assert memory_plan({"weights": 3 * MIB, "activations": 1536 * MIB}, 2 * GIB) == [
        "weights              3.0 MiB",
        "activations      1,536.0 MiB",
        "total            1,539.0 MiB",
        "available        2,048.0 MiB",
    ]


@pytest.mark.parametrize(("share", "level"), [(0.5, "ok"), (0.9, "ok"), (0.95, "warn"), (1.0, "warn"), (1.01, "stop")])
def test_memory_fits_up_to_nine_tenths_and_not_at_all_beyond_what_there_is(share, level):
    parts = {"weights": 0.25 * share * GIB, "activations": 0.75 * share * GIB}
    finding = memory_finding(parts, GIB, [("--recompute on", {"weights": 0.25 * share * GIB})])
    assert finding.level == level
    assert finding.fix == ("" if level == "ok" else f"--recompute on: {share * 256:,.0f} MiB")
    assert finding.what == f"memory: {share * 1024:,.0f} MiB planned, 1,024 available"
    assert memory_finding({"weights": 1}, 0, []).level == "stop"


WAYS = {
    "--micro-batch 65536": {"weights": 4 * GIB, "activations": 24 * GIB},
    "--micro-batch 32768": {"weights": 4 * GIB, "activations": 12 * GIB},
    "--micro-batch 32768 --recompute on": {"weights": 4 * GIB, "activations": 5 * GIB},
}


@pytest.mark.parametrize(
    ("available", "fix"),
    [(32, "--micro-batch 65536: 28,672 MiB"), (24, "--micro-batch 32768: 16,384 MiB"),
     (16, "--micro-batch 32768 --recompute on: 9,216 MiB"),
     (8, "a smaller track: the least that this one takes is 9,216 MiB, --micro-batch 32768 --recompute on")],
)  # fmt: skip
def test_the_fix_is_the_first_way_that_fits_or_else_says_how_much_the_smallest_takes(available, fix):
    assert memory_finding({"weights": 52 * GIB}, available * GIB, WAYS.items()).fix == fix


def test_without_another_way_the_plan_itself_is_the_smallest():
    finding = memory_finding({"weights": 2 * GIB}, GIB, [])
    assert finding.fix == "a smaller track: the least that this one takes is 2,048 MiB, as asked for"


def test_no_other_way_is_looked_at_after_the_first_that_fits():
    looked = iter(WAYS.items())
    memory_finding({"weights": 52 * GIB}, 24 * GIB, looked)
    assert [flags for flags, _ in looked] == ["--micro-batch 32768 --recompute on"]
    looked = iter(WAYS.items())
    memory_finding({"weights": 2 * GIB}, 24 * GIB, looked)
    assert len(list(looked)) == 3


def test_the_estimate_is_the_steps_of_all_stages_validation_and_getting_ready():
    stages = {"window 384": (9_000, 150.0), "window 896": (9_000, 250.0)}
    assert estimate(stages, 30_000.0, 20, 120_000.0, gpus=8, price=2.5) == [
        " 0:22:30 window 384: 9,000 steps of 150.0 ms",
        " 0:37:30 window 896: 9,000 steps of 250.0 ms",
        " 1:00:00 on the clock, in all",
        " 0:02:00 getting ready",
        " 0:10:00 validation: 20 of 30,000.0 ms",
        " 1:12:00 together",
        "    9.60 GPU-hours on 8, 24.00 dollars at 2.5 an hour",
    ]


def test_without_a_price_there_are_no_dollars_and_without_gpus_no_hours_of_them():
    minute = {"training": (600, 100.0)}
    assert estimate(minute, 0.0, 0, 0.0, gpus=1, price=0.0)[-1] == "    0.02 GPU-hours on 1"
    assert estimate(minute, 0.0, 0, 0.0, gpus=0, price=3.0)[-1] == " 0:01:00 together"
    assert estimate({"training": (100, 36e5)}, 0.0, 0, 0.0, gpus=0, price=0.0)[0].startswith("4 days, 4:00:00 training")


def test_phases_are_told_by_whether_the_clock_runs():
    assert timed_plan({"setup": False, "train": True, "validate": False, "checkpoint": True}) == [
        "on the clock: train, checkpoint", "off the clock: setup, validate",
    ]  # fmt: skip
    assert timed_plan({"setup": False}) == ["on the clock: nothing", "off the clock: setup"]


@pytest.mark.parametrize(("levels", "code", "last"), [
    (["ok"], 0, "go, 0 to keep in mind"), (["ok", "warn", "warn"], 0, "go, 2 to keep in mind"),
    (["ok", "stop", "warn"], 2, "no-go: 1 to mend, 1 to keep in mind"), ([], 0, "go, 0 to keep in mind"),
])  # fmt: skip
def test_one_stop_is_a_no_go_and_warnings_are_not(levels, code, last):
    findings = [Finding(level, f"disk {index}", "" if level == "ok" else "make room") for index, level in
                enumerate(levels)]  # fmt: skip
    assert verdict(findings) == code
    *rows, end = report(findings)
    assert end == last
    assert [row.split()[0] for row in rows] == levels
    assert [row.endswith("\n      fix: make room") for row in rows] == [level != "ok" for level in levels]
