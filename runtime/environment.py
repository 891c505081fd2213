"""The machine under a run: device, compute dtype, process group, compiler, peak rate, and what the log says of them."""

import contextlib
import gc
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.watch import RankLost, backend, first_line, join

# Dense bf16 datasheet rates in TFLOP/s, without sparsity, by words of the device name; the first that matches counts.
DATASHEET_TFLOPS = {
    "H100 PCIe": 756.0, "H100": 989.4, "GH200": 989.4, "H200": 989.4, "H800": 989.4, "H20": 148.0, "B200": 2250.0,
    "GB200": 2500.0, "A100": 312.0, "A800": 312.0, "A40": 149.7, "L40S": 362.0, "L40": 181.0, "L4": 121.0,
    "RTX A6000": 154.8, "RTX 5090": 209.5, "RTX 5080": 112.6, "RTX 5070 Ti": 87.9, "RTX 5070": 61.7, "RTX 4090": 165.2,
    "RTX 4080": 97.5, "RTX 4070 Ti": 80.2, "RTX 4070": 58.3, "RTX 4060 Ti": 44.1, "RTX 4060": 30.2, "RTX 3090": 71.0,
    "RTX 3080": 59.5, "RTX 3070": 40.6, "RTX 3060 Ti": 32.4, "RTX 3060": 25.5,
}  # fmt: skip
VARIANTS = r"(?! (?:Ti|SUPER|D|Laptop)\b)"  # cards of a rate of their own
GEMM_SIZE = 1024  # side of the square product that stands for the peak of a device with no datasheet rate


@dataclass(frozen=True)
class Machine:
    """Where a process of the run computes: its device and its place among the ranks."""

    device: torch.device
    rank: int
    world_size: int
    names: tuple[str, ...] = field(default=(), compare=False)  # host and process of each rank
    store: Any = field(default=None, repr=False, compare=False)  # TCPStore that all ranks reach

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def first_of_its_host(self) -> bool:
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def say(self, text: str) -> None:
        """One line to people, from the first rank alone; what they cannot be told does not end a run."""
        if self.is_main:
            with contextlib.suppress(OSError):
                print(text, flush=True)

    def alone(self) -> "Machine":
        """The same device with one rank."""
        return Machine(self.device, 0, 1)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            wire = tensor.cpu() if dist.get_backend() == "gloo" else tensor  # its sum on GPUs ends a process on Windows
            dist.all_reduce(wire)
            tensor.copy_(wire)
        return tensor

    def on_main(self, function: Callable[[], Any]) -> Any:
        """What rank 0 gets from a function that only it calls, on every rank; its ValueError likewise."""
        outcome: tuple[Any, str | None] = (None, None)
        if self.is_main:
            try:
                outcome = (function(), None)
            except ValueError as error:
                outcome = (None, str(error))
        holder = [outcome]
        if self.world_size > 1:
            dist.broadcast_object_list(holder, device=self.device)
        value, message = holder[0]
        if message is not None:
            raise ValueError(message)
        return value

    def on_every(self, function: Callable[[], Any]) -> list[Any]:
        """What the function returns on every rank, by rank, on all ranks; one's ValueError on all, naming the rank."""
        outcome: tuple[Any, str | None] = (None, None)
        try:
            outcome = (function(), None)
        except ValueError as error:
            outcome = (None, str(error))
        outcomes = [outcome] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(outcomes, outcome)
        for rank, (_, message) in enumerate(outcomes):
            if message is not None:
                raise ValueError(f"{self.name(rank)}: {message}" if self.world_size > 1 else message)
        return [value for value, _ in outcomes]

    def agree(self, function: Callable[[], tuple[Any, dict[str, Any] | None]]) -> tuple[Any, dict[str, Any]]:
        """Of the pair that the function returns on each rank, this rank's first and the second of all ranks.

        Raises ValueError where two of the seconds, those left out that are None, differ.
        """
        mine = []

        def second() -> dict[str, Any] | None:
            first, facts = function()
            mine.append(first)
            return facts

        found = {rank: facts for rank, facts in enumerate(self.on_every(second)) if facts is not None}
        (first, facts), *others = found.items()
        for rank, other in others:
            for name in (name for name in facts if facts[name] != other[name]):
                raise ValueError(
                    f"{name} is {other[name]!s:.16} at {self.name(rank)} and {facts[name]!s:.16} at {self.name(first)}"
                    f": all machines need the same. Copy it from one to the others."
                )
        return mine[0], facts

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks, by rank, on rank 0; None elsewhere."""
        values = [value] * self.world_size if self.is_main else None
        if self.world_size > 1:
            dist.gather_object(value, values)
        return values

    def broadcast(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Rank 0's CPU tensors on all ranks, bit for bit; what other ranks give is not read."""
        mine = (tensors or {}) if self.is_main else {}
        plan = self.on_main(lambda: [(name, part.shape, part.dtype) for name, part in mine.items()])
        return {name: self._broadcast(mine.get(name, torch.empty(shape, dtype=dtype))) for name, shape, dtype in plan}

    def _broadcast(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1 or not tensor.numel():
            return tensor
        wire = tensor.reshape(-1).view(torch.uint8).to(self.device)  # as bytes: not every backend knows every dtype
        dist.broadcast(wire, 0)
        return wire.cpu().view(tensor.dtype).reshape(tensor.shape)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        return bool(self.all_reduce(torch.tensor(float(flag), device=self.device)).item())

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.names[rank]})" if self.names else f"rank {rank}"


def start(device: str = "auto", rank_timeout: float = 60.0) -> Machine:
    """The device of this process; joins the others when a launcher such as torchrun started several.

    Raises ValueError when `device` is not there, or naming the ranks that do not appear within rank_timeout seconds or
    do not come through an all-reduce in that time.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device}: unknown device. Choose auto, cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device. Use --device auto, or install CUDA torch.")
    if device == "cpu" or not torch.cuda.is_available():
        place = torch.device("cpu")
    else:
        index, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if index >= gpus:
            raise ValueError(f"process {index} of this machine has no GPU: there are {gpus}. Set NPROC={gpus}.")
        place = torch.device("cuda", index)
        grow_segments()
        torch.cuda.set_device(place)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        return Machine(place, 0, 1)
    rank, names, store = join(place, world_size, rank_timeout)
    return Machine(place, rank, world_size, names, store)


def grow_segments() -> None:
    """Have CUDA's allocator, not used yet, enlarge what it holds: fewer gaps are left. Another setting of it stands."""
    if sys.platform == "linux" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def refuse(error: Exception, code: int) -> int:
    """Say the error, once however many processes meet it unless a rank is lost, and return the exit code."""
    if os.environ.get("RANK", "0") == "0" or isinstance(error, RankLost):
        print(f"error: {error}", file=sys.stderr)
    return code


def leave(code: int) -> int:
    """Return the exit code, or, where there are other ranks, end the process with it: after a success all together.

    Such a process ends right here: threads of its backend, or left in it, can abort or hang the interpreter's exit.
    """
    flush()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return code
    if code == 0 and dist.is_initialized():
        try:
            dist.barrier()
        except RuntimeError as error:
            print(f"error: another rank did not come to the end: {first_line(error)}", file=sys.stderr)
            code = 1
    flush()
    os._exit(code)


def flush() -> None:
    """Write out what was said; what cannot be written is dropped, as it would spoil the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def native_bf16(device: torch.device) -> bool:
    """Whether matrix products in bf16 run on hardware instructions, so that they are fast."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    supported = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(probe() for probe in supported if probe)


def handicaps(machine: Machine, dtype: torch.dtype) -> list[str]:
    """What GPUs lack here and what that costs, a line each."""
    if machine.device.type != "cuda":
        return []
    said = []
    if not native_bf16(machine.device):
        gpu, name = torch.cuda.get_device_name(machine.device), str(dtype).removeprefix("torch.")
        said.append(f"{gpu} has no bf16 instructions: {name} is several times slower than bf16 on GPUs of compute "
                    f"capability 8.0 and newer")  # fmt: skip
    if machine.world_size > 1 and backend(machine.device) == "gloo":
        said.append("this torch has no NCCL: gloo takes gradients from GPU to GPU through the CPU, slower")
    return said


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" is bf16 where the device has it natively, else fp32. ValueError otherwise."""
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if name == "auto":
        return torch.bfloat16 if native_bf16(device) else torch.float32
    if name not in dtypes:
        raise ValueError(f"--dtype {name}: unknown dtype. Choose auto, bfloat16 or float32.")
    return dtypes[name]


class CompileError(RuntimeError):
    """What was to be compiled cannot be."""


class FailedElsewhere(RuntimeError):
    """Another rank met an error; this one must not go on alone."""


def why_not_compile(device: torch.device) -> str | None:
    """What torch.compile lacks here, or None."""
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            import triton  # noqa: F401

            return None
        return "Triton is not installed"
    compiler = os.environ.get("CXX", "cl" if sys.platform == "win32" else "g++")
    if not shutil.which(compiler) and not shutil.which("clang++"):
        return "no C++ compiler was found"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the Python headers (Python.h) are not installed"
    return None


def check_compile(mode: str, device: torch.device) -> None:
    """Raise ValueError if compilation is demanded ("on") where it cannot work."""
    obstacle = why_not_compile(device) if mode == "on" else None
    if obstacle:
        raise ValueError(f"--compile on cannot work here: {obstacle}. Install it, or use --compile auto.")


def try_compile(
    function: Callable[..., Any], mode: str, machine: Machine, first_step: Callable[[Callable[..., Any]], object]
) -> str | None:
    """Compile `function` and run `first_step` on it; returns what keeps it from working on some rank, or None.

    mode "off" does not try, "auto" reports an obstacle, "on" raises CompileError. `first_step` must raise on all ranks
    or on none, as `fits` does.
    """
    obstacles = machine.on_every(lambda: "as asked" if mode == "off" else why_not_compile(machine.device))
    rank, obstacle = next(((rank, what) for rank, what in enumerate(obstacles) if what), (0, None))
    if rank:
        obstacle = f"{machine.name(rank)}: {obstacle}"
    if obstacle is None:
        machine.say("compiling: tens of seconds the first time, then cached")
        # A graph a shape: --micro-batch auto tries several, and a validation row may be taken in many parts.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
        try:
            first_step(torch.compile(function, dynamic=False, fullgraph=True))
        except Exception as error:  # whatever a compiler raises, the eager model can still run
            if out_of_memory(error):
                raise
            obstacle = f"compilation failed: {type(error).__name__}: {first_line(error)}"
            if mode == "on":
                raise CompileError(f"--compile on: {obstacle}. --compile auto goes on without.") from error
    return obstacle


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def fits(function: Callable[[], object], machine: Machine, must: bool = False) -> bool:
    """Whether the memory suffices for the function on all ranks; it must not wait for others.

    Any other error, with `must` that of memory too, is raised on every rank, where it was not met as FailedElsewhere or
    MemoryError.
    """
    error: Exception | None = None
    try:
        function()
    except Exception as caught:
        error = caught
        traceback.clear_frames(caught.__traceback__)  # which hold tensors, and to meet the others takes memory too
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
    mine = error and (out_of_memory(error), machine.rank, f"{type(error).__name__}: {first_line(error)}")
    short, rank, what = min(filter(None, machine.on_every(lambda: mine)), default=(False, 0, ""))  # memory is the last
    if what and (must or not short):
        if error is None or out_of_memory(error) != short:
            error = (MemoryError if short else FailedElsewhere)(f"{machine.name(rank)}: {what}")
        try:
            raise error
        finally:
            error = None  # it and this frame would hold each other, and what its causes hold
    return not what


def compile_flags() -> list[str]:
    """Settings of the compiler that are not its defaults, by code or by environment; contest tracks allow none."""
    config: Any = sys.modules.get("torch._inductor.config")  # without it nothing was compiled
    by_code = [line for line in config.codegen_config().splitlines() if not is_default(config, line)] if config else []
    names = sorted(name for name in os.environ if name.startswith("TORCHINDUCTOR_") and "CACHE" not in name)
    return by_code + [f"{name}={os.environ[name]}" for name in names]


def is_default(config: Any, line: str) -> bool:
    """Whether a line of its code gives a setting its default: compiling itself sets some to that."""
    name, _, value = line.removeprefix("torch._inductor.config.").partition(" = ")
    entry = config._config.get(name)
    return entry is not None and repr(entry.default) == value


def compile_facts() -> dict[str, object]:
    """The flags, the graphs compiled so far in this process, and of those the ones that the cache held, lacked or
    cannot keep."""
    utils = sys.modules.get("torch._dynamo.utils")  # without it nothing was compiled
    counters: dict[str, Any] = utils.counters if utils else {}
    cache = {kind: counters.get("inductor", {}).get(f"fxgraph_cache_{kind}", 0) for kind in ("hit", "miss", "bypass")}
    graphs = counters.get("stats", {}).get("unique_graphs", 0)
    return {"compile_flags": compile_flags(), "graphs": graphs} | {f"cache_{kind}": n for kind, n in cache.items()}


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """No step of the block waits for a search for reference cycles. Steps leave none but eager recomputation's, which
    hold no tensors; they are collected at validations."""
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


def measured_gemm_flops(device: torch.device, dtype: torch.dtype, size: int = GEMM_SIZE) -> float:
    """FLOP/s of a square matrix product, the best of a fifth of a second."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + 0.2
    while time.perf_counter() < end:
        start_time = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start_time)
    return 2 * size**3 / best


def peak_flops(machine: Machine, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of all ranks together to which a run's rate is compared, and the name of that peak."""
    if machine.device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(machine.device)
        for part, tflops in DATASHEET_TFLOPS.items():
            if re.search(rf"\b{part}\b{VARIANTS}", name):
                return tflops * 1e12 * machine.world_size, f"{part} datasheet bf16"
    rate = measured_gemm_flops(machine.device, dtype)
    # CPU ranks share one machine: what each measures, all at once, is its share.
    total = machine.all_reduce(torch.tensor(rate, dtype=torch.float64, device=machine.device)).item()
    return total, f"measured {GEMM_SIZE}^3 GEMM {str(dtype).removeprefix('torch.')}"


def peak_mib(machine: Machine) -> float:
    """Most memory the run has held, MiB: allocated on a GPU, resident on a CPU; nan if it is not counted (Windows)."""
    if machine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(machine.device) / 2**20
    try:
        import resource
    except ImportError:
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def describe(machine: Machine, dtype: torch.dtype) -> dict[str, object]:
    """The environment for the log's header: versions and hardware, no user data."""
    cuda = machine.device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(machine.device) if cuda else None,
        "gpu_count": machine.world_size if cuda else 0,
        "driver": _driver() if cuda else None,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "host_hash": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
