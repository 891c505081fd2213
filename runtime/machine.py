"""The device of a run and its ranks: how they start, talk to each other, and end."""

import contextlib
import gc
import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.errors import Interrupted, NonFinite, Refused

# Dense bf16 TFLOP/s of the datasheets, by words of the device name. The first match counts.
DATASHEET_TFLOPS = {
    "H100 PCIe": 756.0, "H100": 989.4, "H200": 989.4, "GH200": 989.4, "H20": 148.0, "B200": 2250.0,
    "A100": 312.0, "L40S": 362.0, "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 3090": 71.0,
}  # fmt: skip
GEMM_SIZE = 1024  # side of the square matrices that measure the peak of any other device


@dataclass(frozen=True)
class Machine:
    """The device of this process and its place among the ranks."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    names: tuple[str, ...] = ("",)  # host and process id of each rank

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def first_of_its_host(self) -> bool:
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.names[rank]})"

    def say(self, text: str) -> None:
        """Print a line on rank 0. A closed terminal must not end the run."""
        if self.is_main:
            with contextlib.suppress(OSError):
                print(text, flush=True)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place, and return it."""
        if self.world_size > 1:
            # gloo crashes on Windows when it sums CUDA tensors, so they pass through the host.
            wire = tensor.cpu() if dist.get_backend() == "gloo" else tensor
            dist.all_reduce(wire)
            tensor.copy_(wire)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def on_main(self, function: Callable[[], Any]) -> Any:
        """Call `function` on rank 0 alone and return its result on every rank.

        If rank 0 gets a ValueError, every rank raises Refused with its message.
        """
        holder: list[Any] = [None, None]
        if self.is_main:
            try:
                holder[0] = function()
            except ValueError as error:
                holder[1] = str(error)
        if self.world_size > 1:
            dist.broadcast_object_list(holder, device=self.device)
        result, message = holder
        if message is not None:
            raise Refused(message)
        return result

    def gather_equal(self, facts: dict[str, Any] | None) -> dict[str, Any]:
        """Return the facts that the ranks agree on. A rank that did not look passes None.

        If two ranks differ, every rank raises Refused with their names and the differing fact.
        """
        known = {rank: found for rank, found in enumerate(self.gather(facts)) if found is not None}
        first = min(known)
        for rank, found in known.items():
            for key, value in known[first].items():
                if found[key] != value:
                    raise Refused(
                        f"{key} is {found[key]!s:.16} on {self.name(rank)} but {value!s:.16} on "
                        f"{self.name(first)}. All machines need the same: copy it over."
                    )
        return known[first]


# ---- Start


_machine: Any = None  # set when there are other ranks
_store: Any = None  # key-value store of all ranks: it still answers when a collective has failed


def start(device: str = "auto", rank_timeout: float = 600.0) -> Machine:
    """Choose the device, and join the other ranks if torchrun started several.

    `rank_timeout`: seconds that ranks wait for one another, here and in every collective.
    Raises Refused if the device is missing or the ranks cannot meet.
    """
    global _machine, _store
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= rank < world_size:
        rule = f"RANK must be from 0 to {world_size - 1}"
        raise Refused(f"RANK={rank} WORLD_SIZE={world_size}: {rule}. Start ranks with torchrun.")
    place = _place(device)
    if world_size == 1:
        return Machine(place)
    if sys.platform == "win32":
        os.environ.setdefault("USE_LIBUV", "0")  # torch for Windows is built without it
    # A torch without NCCL, as on Windows, has gloo for GPUs too.
    nccl = place.type == "cuda" and dist.is_nccl_available()
    timeout, names = timedelta(seconds=rank_timeout), [""] * world_size
    try:
        _store, *_ = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            "nccl" if nccl else "gloo", rank=rank, world_size=world_size, timeout=timeout,
            store=dist.PrefixStore("group", _store),
            device_id=place if nccl else None,  # connects now: errors come here
        )  # fmt: skip
        dist.all_gather_object(names, f"{platform.node()} pid {os.getpid()}")
    except (RuntimeError, ValueError) as error:  # ValueError: a variable of torchrun is missing
        raise Refused(f"rank {rank} of {world_size} could not join the others: {first_line(error)}."
                      f" Start all ranks with torchrun.") from error  # fmt: skip
    _machine = Machine(place, rank, world_size, tuple(names))
    return _machine


def launch_time() -> float:
    """Return when run.sh started, or else this call, in seconds since 1970."""
    text = os.environ.get("RUN_STARTED") or str(time.time())
    try:
        return float(text)
    except ValueError:
        rule = "it must be a time in seconds since 1970"
        raise Refused(f"RUN_STARTED={text}: {rule}. Unset it.") from None


def _place(device: str) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch finds no GPU. Use --device auto or install CUDA torch.")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    processes = max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), index + 1)
    if processes > gpus:
        raise Refused(f"{processes} processes on a machine with {gpus} GPUs. Set NPROC={gpus}.")
    # Before the first allocation. Growing segments leave fewer gaps in memory.
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    place = torch.device("cuda", index)
    torch.cuda.set_device(place)
    return place


# ---- End


def supervise(function: Callable[[], int], refused: tuple[type[Exception], ...] = ()) -> int:
    """Return the exit code of `function()`, or of the error that ended it.

    2 for Refused and the classes in `refused`, 3 for NonFinite, 1 for lack of memory and for a
    lost rank, each with one sentence on stderr. 128 + number for a signal. Any other exception
    prints its traceback and gives 1.
    """
    explained: tuple[type[Exception], ...] = (Refused, NonFinite, *refused)
    try:
        return function()
    except Interrupted as error:
        return error.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `--help | head`
        return 0
    except explained as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # this host says it once
            _say_error(str(error))
        else:  # torchrun ends all ranks when the first one exits: let rank 0 speak
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        return getattr(error, "code", 2)
    except Exception as error:
        if out_of_memory(error):
            _say_error(f"out of memory: {first_line(error)}. Use --recompute on, a smaller "
                       f"--val-batch or --micro-batch auto: the trajectory stays the same.")
        elif lost := _lost_ranks(error):
            _say_error(lost)
        else:
            traceback.print_exception(error)
        return 1


def _say_error(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"error: {text}", file=sys.stderr, flush=True)


def _lost_ranks(error: Exception) -> str:
    """Return a sentence that names the lost ranks if a collective raised `error`, else ""."""
    if _machine is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
        return ""
    reason = first_line(error)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when the first rank exits
    if not re.search("timed out|timeout", reason, re.IGNORECASE):  # a connection was closed
        time.sleep(2)  # torchrun blames the rank that exits first: let the dead one be it
        return f"another rank ended; torchrun or its own output says which, and why ({reason})"
    present = _roll_call(_machine.rank, _machine.world_size)
    lost = [rank for rank in range(_machine.world_size) if rank not in present]
    if not lost:
        return f"the ranks lost their connection, but all of them answer ({reason})"
    if not present:  # the store is gone: without torchrun it lives in rank 0
        lost = [0]
    names = ", ".join(_machine.name(rank) for rank in lost)
    return f"{names} does not answer: it hangs, was stopped, or its machine is lost"


def _roll_call(rank: int, world_size: int, seconds: float = 10.0) -> set[int]:
    """Answer through the store, and return the ranks that answer within `seconds`.

    Ranks in one collective time out together. `monitored_barrier` would blame rank 0 as well.
    """
    present: set[int] = set()

    def ask() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            _store.set(f"here/{rank}", "")
            while len(present) < world_size:
                for other in range(world_size):
                    if _store.check([f"here/{other}"]):
                        present.add(other)
                time.sleep(0.1)

    # In a thread, because the store of a stopped process never answers.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return set(present)


def leave(code: int) -> int:
    """Return the exit code. One of several ranks does not return: it ends its process.

    After a success it first waits for the others. Threads of the process group can abort or hang
    the interpreter's own exit.
    """
    if code == 0 and _machine is not None:
        try:
            dist.barrier()
        except RuntimeError as error:
            _say_error(f"another rank did not reach the end: {first_line(error)}")
            code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # None if it was closed before Python began
                stream.flush()
        except OSError:  # nobody reads it any more: that must not change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if _machine is not None:
        os._exit(code)
    return code


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or "can't allocate memory" in str(error)  # a RuntimeError on the CPU


# ---- Around a run


@contextlib.contextmanager
def signs_of_life(what: str, say: Callable[[str], None], seconds: float = 5.0) -> Iterator[None]:
    """Say every few seconds that `what` is still going on."""
    over, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(seconds):
            say(f"  {what}, {time.monotonic() - begun:.0f} s")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch off the collector of reference cycles, whose pauses make single steps slow.

    Steps leave no cycles that hold tensors.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


# ---- Hardware


def native_bf16(device: torch.device) -> bool:
    """Return whether the device has instructions for bf16 matrix products."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    # Private functions of torch, which a new version may drop.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`; "auto" is bf16 where the device has it, else float32."""
    if name == "auto":
        return torch.bfloat16 if native_bf16(device) else torch.float32
    return getattr(torch, name)


def handicaps(machine: Machine, dtype: torch.dtype) -> list[str]:
    """Return a line if this GPU has no bf16 instructions."""
    if machine.device.type != "cuda" or native_bf16(machine.device):
        return []
    return [f"no bf16 instructions: {_short(dtype)} is several times slower than bf16 on GPUs of "
            f"compute capability 8.0 and newer"]  # fmt: skip


def peak_flops(machine: Machine, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak FLOP/s of all ranks together, to which MFU refers, and its source."""
    if machine.device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(machine.device)
        for part, tflops in DATASHEET_TFLOPS.items():
            # Cards such as the "4090 D" have another rate.
            if re.search(rf"\b{part}\b(?! (?:Ti|SUPER|D|Laptop)\b)", name):
                return tflops * 1e12 * machine.world_size, f"{part} datasheet bf16"
    rate = torch.tensor(measured_gemm_flops(machine.device, dtype), device=machine.device)
    # Ranks on one CPU measure at the same time, so the sum counts shared cores once.
    return machine.all_reduce(rate).item(), f"measured {GEMM_SIZE}^3 GEMM {_short(dtype)}"


def measured_gemm_flops(device: torch.device, dtype: torch.dtype, size: int = GEMM_SIZE) -> float:
    """Return the FLOP/s of a square matrix product: the best of those made in 0.2 s."""
    a = torch.randn(size, size, device=device).to(dtype)
    best, end = float("inf"), time.perf_counter() + 0.2
    while time.perf_counter() < end:
        begun = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


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


def describe(machine: Machine, dtype: torch.dtype) -> dict[str, object]:
    """Return versions and hardware for the log's header. The host's name is hashed."""
    gpu = driver = None
    if machine.device.type == "cuda":
        gpu = torch.cuda.get_device_name(machine.device)
        driver = _driver()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": gpu,
        "gpu_count": machine.world_size if gpu else 0,
        "driver": driver,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": _short(dtype),
        "host_hash": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.partition("\n")[0].strip()
    return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M):
            return found[1]
    return platform.processor() or platform.machine()
