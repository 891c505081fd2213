"""The machine under a run: device, ranks, what they tell each other, and how a process ends."""

import contextlib
import gc
import hashlib
import os
import platform
import re
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

# Dense bf16 rates in TFLOP/s from the datasheets, by words of the device name; first match counts.
DATASHEET_TFLOPS = {
    "H100 PCIe": 756.0, "H100": 989.4, "GH200": 989.4, "H200": 989.4, "H800": 989.4, "H20": 148.0,
    "B200": 2250.0, "GB200": 2500.0, "A100": 312.0, "A800": 312.0, "A40": 149.7, "L40S": 362.0,
    "L40": 181.0, "L4": 121.0, "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 3090": 71.0,
}  # fmt: skip
GEMM_SIZE = 1024  # side of the square product that is the peak of a device without a datasheet rate


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
            # Through the host with gloo: its own sum of CUDA tensors kills a process on Windows.
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
        """Return on every rank what rank 0, the only one that calls `function`, gets from it.

        Raises Refused on every rank where rank 0 gets a ValueError.
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

    def broadcast(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return rank 0's tensors on every rank, bit for bit; what others give is not read."""
        return self.on_main(lambda: tensors)

    def gather_equal(self, facts: dict[str, Any] | None) -> dict[str, Any]:
        """Return the facts that ranks have found; a rank that did not look gives None.

        Raises Refused on every rank, naming two ranks and the first fact in which they differ.
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


_machine: Any = None  # where there are other ranks
_store: Any = None  # of all ranks: it answers where a collective no longer does


def start(device: str = "auto", rank_timeout: float = 600.0) -> Machine:
    """Choose the device and join the other ranks if a launcher such as torchrun started several.

    `rank_timeout` (seconds) is how long ranks wait for one another, now and in every collective.
    Raises Refused for a device that is not there and for ranks that do not come together.
    """
    global _machine, _store
    world_size = _number("WORLD_SIZE", 1, least=1)
    rank = _number("RANK", 0, most=world_size - 1)
    place = _place(device)
    if world_size == 1:
        return Machine(place)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise Refused(f"WORLD_SIZE={world_size} without {', '.join(missing)}. Start with torchrun.")
    if sys.platform == "win32":
        os.environ.setdefault("USE_LIBUV", "0")  # torch for Windows is built without it
    patience, backend = timedelta(seconds=rank_timeout), _backend(place)
    names = [""] * world_size
    try:
        _store, *_ = next(dist.rendezvous("env://", timeout=patience))
        dist.init_process_group(
            backend, rank=rank, world_size=world_size, timeout=patience,
            store=dist.PrefixStore("group", _store),
            device_id=place if backend == "nccl" else None,  # connects now: errors come here
        )  # fmt: skip
        dist.all_gather_object(names, f"{platform.node()} pid {os.getpid()}")
    except RuntimeError as error:
        raise Refused(f"rank {rank} of {world_size} could not join the others: {first_line(error)}."
                      f" What they printed says more.") from error  # fmt: skip
    _machine = Machine(place, rank, world_size, tuple(names))
    return _machine


def _number(name: str, default: int, least: int = 0, most: int = 10**6) -> int:
    """Read a whole number from the environment. Raises Refused."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"\d{1,6}", text) or not least <= int(text) <= most:
        raise Refused(f"{name}={text}: it must be a whole number from {least} to {most}. "
                      f"torchrun sets it.")  # fmt: skip
    return int(text)


def launch_time() -> float:
    """Return when run.sh or, without it, this call started the run; seconds since 1970."""
    text = os.environ.get("RUN_STARTED") or str(time.time())
    if not re.fullmatch(r"\d{1,12}(\.\d+)?", text):
        raise Refused(f"RUN_STARTED={text}: it must be seconds since 1970. Unset it.")
    return float(text)


def _place(device: str) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch finds no GPU. Use --device auto or install CUDA torch.")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index, gpus = _number("LOCAL_RANK", 0), torch.cuda.device_count()
    processes = max(_number("LOCAL_WORLD_SIZE", 1), index + 1)
    if processes > gpus:
        raise Refused(f"{processes} processes on a machine with {gpus} GPUs. Set NPROC={gpus}.")
    # Before the first allocation: segments that grow leave fewer gaps.
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    place = torch.device("cuda", index)
    torch.cuda.set_device(place)
    return place


def _backend(place: torch.device) -> str:
    """nccl between GPUs; gloo between CPUs, and where torch has no NCCL, as on Windows."""
    return "nccl" if place.type == "cuda" and dist.is_nccl_available() else "gloo"


# ---- End


def supervise(function: Callable[[], int], refused: tuple[type[Exception], ...] = ()) -> int:
    """Return the exit code of `function()`, or of the error that ended it.

    One sentence on stderr for what is no fault of the code: 2 for Refused and the classes in
    `refused`, 3 for NonFinite, 1 for lack of memory and for a lost rank; 128 + its number for a
    signal. Any other exception prints its traceback and gives 1.
    """
    explained: tuple[type[Exception], ...] = (Refused, NonFinite, *refused)
    try:
        return function()
    except Interrupted as error:
        return error.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # a reader of --help, such as head, has seen enough
        return 0
    except explained as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the others of this host meet the same
            _say_error(str(error))
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
    """Name the ranks that no longer answer if `error` is that of a collective, else ""."""
    if _machine is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
        return ""
    if dist.get_backend() == "gloo":
        dist.destroy_process_group()  # closes connections, so that ranks in waiting come here too
    there = _roll_call(_machine.rank, _machine.world_size)
    lost = [rank for rank in range(_machine.world_size) if rank not in there]
    if not there:  # without torchrun the store lives in rank 0
        lost = [0]
    if not lost:
        return f"the ranks lost their connection, but all of them live: {first_line(error)}"
    names = ", ".join(_machine.name(rank) for rank in lost)
    return f"{names} does not answer: it ended, hangs, or its machine is lost"


def _roll_call(rank: int, world_size: int, seconds: float = 10.0) -> set[int]:
    """Answer, and return the ranks that answer in time.

    `monitored_barrier` accuses rank 0, or nobody, where a rank died instead of hanging.
    """
    there: set[int] = set()

    def ask() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            _store.set(f"here/{rank}", "")
            while len(there) < world_size:
                there.update(each for each in range(world_size) if _store.check([f"here/{each}"]))
                time.sleep(0.1)

    # In a thread, as a store whose process was stopped never answers.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return set(there)


def leave(code: int) -> int:
    """Return the exit code; with several ranks end the process with it, after a success together.

    Threads of the process group can abort or hang the interpreter's own exit.
    """
    if code == 0 and _machine is not None:
        try:
            dist.barrier()
        except RuntimeError as error:
            _say_error(f"another rank did not reach the end: {first_line(error)}")
            code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # as it is where it was closed before Python began
                stream.flush()
        except OSError:  # nobody reads it any more, which must not change the exit code
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
    """Say every few seconds that `what` still goes on."""
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
    """Switch the cycle collector off: its pauses make single steps slow, and steps leave no cycles
    that hold tensors."""
    before = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if before:
            gc.enable()


# ---- What the hardware can do, and what the log says of it


def native_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bf16 matrix products."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    # Private in torch, so they may go.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`; "auto" is bf16 where the device has it, else float32."""
    if name == "auto":
        return torch.bfloat16 if native_bf16(device) else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def handicaps(machine: Machine, dtype: torch.dtype) -> list[str]:
    """Return a line for each thing that this GPU or this torch lacks, with its cost."""
    if machine.device.type != "cuda":
        return []
    lines = []
    if not native_bf16(machine.device):
        lines.append(f"no bf16 instructions: {_short(dtype)} is several times slower than bf16 on "
                     f"GPUs of compute capability 8.0 and newer")  # fmt: skip
    if machine.world_size > 1 and _backend(machine.device) == "gloo":
        lines.append("no NCCL in this torch: gradients go through the CPU, which is slower")
    return lines


def peak_flops(machine: Machine, dtype: torch.dtype) -> tuple[float, str]:
    """Return the FLOP/s of all ranks together that MFU refers to, and where they are from."""
    if machine.device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(machine.device)
        for part, tflops in DATASHEET_TFLOPS.items():
            # Cards such as a "4090 D" have a rate of their own.
            if re.search(rf"\b{part}\b(?! (?:Ti|SUPER|D|Laptop)\b)", name):
                return tflops * 1e12 * machine.world_size, f"{part} datasheet bf16"
    rate = torch.tensor(measured_gemm_flops(machine.device, dtype), device=machine.device)
    # The sum counts shared cores once: ranks of one CPU measure at the same time.
    return machine.all_reduce(rate).item(), f"measured {GEMM_SIZE}^3 GEMM {_short(dtype)}"


def measured_gemm_flops(device: torch.device, dtype: torch.dtype, size: int = GEMM_SIZE) -> float:
    """FLOP/s of a square matrix product, the best of a fifth of a second."""
    a = torch.randn(size, size, device=device).to(dtype)
    best, end = float("inf"), time.perf_counter() + 0.2
    while time.perf_counter() < end:
        begun = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def peak_mib(machine: Machine) -> float:
    """Most MiB held so far: allocated on a GPU, resident on a CPU; nan on Windows."""
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
        driver = _first_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
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


def _first_output(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.partition("\n")[0].strip()
    return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M):
            return found[1]
    return platform.processor() or platform.machine()
