"""The device of a run and its ranks: how they start, communicate and end."""

import contextlib
import ctypes
import gc
import hashlib
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.errors import Refused
from runtime.openmp import spinning

DEVICES = ("auto", "cpu", "cuda", "mps")
# Dense bf16 TFLOP/s of the datasheets, by torch's whole name of the device: the RTX 4090 D differs.
DATASHEET_TFLOPS = {
    "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.0, "NVIDIA H200": 989.4,
    "NVIDIA B200": 2250.0, "NVIDIA A100-SXM4-40GB": 312.0, "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0, "NVIDIA L40S": 362.0, "NVIDIA GeForce RTX 4090": 165.2,
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """The device of this process and its place among the ranks."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print a line on rank 0. A closed terminal must not end the run."""
        if self.is_main:
            with contextlib.suppress(OSError):
                print(text, flush=True)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_both(self, number: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Sum a tensor () and a tensor (n,) over the ranks, in one message."""
        total = self.all_reduce(torch.cat([number.view(1), numbers]))
        return total[0], total[1:]

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks, by rank. All ranks have tensors of the same shape."""
        if self.world_size == 1:
            return tensor
        rows = tensor.new_empty(self.world_size * len(tensor), *tensor.shape[1:])
        dist.all_gather_into_tensor(rows, tensor)
        return rows

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def on_main(self, function: Callable[[], Any]) -> Any:
        """Call it on rank 0 only. Every rank returns its result, or Refused for its ValueError."""
        result: list[Any] = [None, None]  # or its error's message
        if self.is_main:
            try:
                result[0] = function()
            except ValueError as error:
                result[1] = str(error)
        if self.world_size > 1:
            dist.broadcast_object_list(result)
        if result[1] is not None:
            raise Refused(result[1])
        return result[0]


@contextlib.contextmanager
def saying_every_few_seconds(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Print a line now and then while the block runs: a silent program seems to hang."""
    done, began = threading.Event(), time.monotonic()

    def tick() -> None:
        wait_s = 5
        while not done.wait(wait_s):
            say(f"  {what}, {time.monotonic() - began:.0f} s")
            wait_s *= 2  # minutes of compilation take a few lines

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# ---- Start


def start(device: str = "auto", rank_timeout: float = 600.0) -> Machine:
    """Choose the device, and join the other ranks if torchrun started several.

    `rank_timeout`: seconds that ranks wait for one another, here and in every collective.
    Raises Refused if the device is missing or the ranks cannot meet.
    """
    place = find_device(device)
    if place.type == "cpu":
        keep_freed_memory()
    nccl, timeout = place.type == "cuda", timedelta(seconds=rank_timeout)
    try:
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if not 0 <= rank < world_size:
            raise ValueError("RANK must be at least 0 and below WORLD_SIZE")
        if world_size == 1:
            return Machine(place)
        dist.init_process_group(
            # A checkpoint travels between hosts: a GPU may lack the memory for it.
            "cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=timeout,
            device_id=place if nccl else None,  # connects now: errors come here
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:  # ValueError: a variable of torchrun is missing
        given = f"RANK={os.environ.get('RANK', '')} WORLD_SIZE={os.environ.get('WORLD_SIZE', '')}"
        reason = first_line(error).rstrip(".")
        raise Refused(f"{given}: {reason}. Start all ranks with torchrun.") from error
    return Machine(place, rank, world_size)


def find_device(device: str) -> torch.device:
    """The device called `device`, this rank's own GPU among several. Refused if it is missing."""
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch finds no GPU. Use --device auto or install CUDA torch.")
    if device == "mps":
        if not torch.backends.mps.is_available():
            raise Refused("--device mps: torch finds no Apple GPU. Use --device auto.")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise Refused("--device mps: it needs one process. Start it without torchrun.")
        return torch.device("mps")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes > gpus:
        raise Refused(f"{processes} processes on a machine with {gpus} GPUs. Set NPROC={gpus}.")
    # Before the first allocation. Growing segments leave fewer gaps in memory.
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    several = os.environ.get("WORLD_SIZE", "1") != "1"  # else the rank is of another launcher
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) if several else 0)
    torch.cuda.set_device(place)
    return place


# ---- Errors


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or "can't allocate memory" in str(error)  # a RuntimeError on the CPU


# ---- Around a run


def repeat_bits(device: torch.device) -> None:
    """On a CPU, give the same operations the same bits: a resumed run must end in the same."""
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        # Filling new memory would only cost time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def keep_freed_memory() -> None:
    """Make glibc keep what the main thread frees: fresh pages cost more than most arithmetic."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # other C libraries lack it
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: return nothing from the end of the heap
        mallopt(-4, 0)  # M_MMAP_MAX: no block outside the heap, which would go when it is freed


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch off the collector of reference cycles, whose pauses make single steps slow."""
    gc.collect()
    gc.freeze()
    gc.disable()  # steps leave no cycles that hold tensors
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


# ---- Hardware


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on `device`. From pinned memory the copy does not wait for a GPU."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)  # Apple's would read it later, when it may be gone: see Batch.to


def native_bf16(device: torch.device) -> bool:
    """Return whether the device has instructions for bf16 matrix products."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    if device.type == "mps":
        return False  # newer ones have them, untested
    # Private functions of torch, which a new version may drop.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`; "auto" is bf16 where the device has it, else float32."""
    if name == "auto":
        return torch.bfloat16 if native_bf16(device) else torch.float32
    return getattr(torch, name)


def peak_flops(machine: Machine, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of all ranks together, or None if no datasheet is known here."""
    if machine.device.type != "cuda" or dtype != torch.bfloat16:
        return None
    tflops = DATASHEET_TFLOPS.get(torch.cuda.get_device_name(machine.device))
    return tflops * 1e12 * machine.world_size if tflops else None


def peak_mib(machine: Machine) -> float:
    """Return the peak memory in MiB: allocated on a GPU, resident on a CPU, nan on Windows."""
    if machine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(machine.device) / 2**20
    try:
        import resource
    except ImportError:
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def free_bytes(device: torch.device) -> int | None:
    """Bytes that this process could still allocate on a GPU; None: unknown, on other devices."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device, run: Callable[[], None]) -> int:
    """Bytes of a GPU that `run()` takes at its peak, beyond those allocated before."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)  # `peak_mib` is of the run alone
    return peak - before


def describe(machine: Machine, dtype: torch.dtype) -> dict[str, object]:
    """Return versions and hardware for the log's header. The host's name is hashed."""
    cuda = machine.device.type == "cuda"
    gpu = torch.cuda.get_device_name(machine.device) if cuda else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": gpu,
        "gpu_count": machine.world_size if gpu else 0,
        "driver": _found_in("/proc/driver/nvidia/version", r" (\d+\.[\d.]+) ") if gpu else None,
        "cpu": _found_in("/proc/cpuinfo", r"^model name\s*: (.*)") or platform.machine(),
        "threads": torch.get_num_threads(),
        "openmp": spinning(),
        "dtype": str(dtype).removeprefix("torch."),
        "host_hash": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
    }


def _found_in(path: str, pattern: str) -> str | None:
    """Return the first group of the first match in a file. Only Linux has these files."""
    with contextlib.suppress(OSError):
        if found := re.search(pattern, Path(path).read_text(), re.MULTILINE):
            return found[1]
    return None
