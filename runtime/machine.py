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
from dataclasses import dataclass, field
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
VARIANTS = r"(?! (?:Ti|SUPER|D|Laptop)\b)"  # cards with a rate of their own
GEMM_SIZE = 1024  # side of the square product that is the peak of a device without a datasheet rate
ROLL_CALL_SECONDS = 10.0  # in which ranks answer after a collective has failed


@dataclass(frozen=True)
class Machine:
    """The device of this process and its place among the ranks."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    names: tuple[str, ...] = field(default=(), compare=False)  # host and process id, by rank

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def first_of_its_host(self) -> bool:
        return is_first_of_its_host()

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.names[rank]})" if self.names else f"rank {rank}"

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
        """Return on every rank what `function` returns on rank 0, the only one that calls it.

        A ValueError of rank 0 is raised on every rank; on the others as Refused.
        """
        result, refusal = None, None
        if self.is_main:
            try:
                result = function()
            except ValueError as error:
                refusal = error
        message = None if refusal is None else str(refusal)
        holder = [result, message]
        if self.world_size > 1:
            dist.broadcast_object_list(holder, device=self.device)
        result, message = holder
        if message is not None:
            raise refusal or Refused(message)
        return result

    def gather_equal(self, facts: dict[str, Any] | None) -> dict[str, Any]:
        """Return the facts of all ranks that have any; None on a rank that has none.

        Raises Refused on every rank, naming two ranks and the first fact in which they differ.
        """
        known = {rank: found for rank, found in enumerate(self.gather(facts)) if found is not None}
        first = min(known)
        for rank, found in known.items():
            for key, value in found.items():
                if value != known[first][key]:
                    raise Refused(
                        f"{key} is {value!s:.16} on {self.name(rank)} but {known[first][key]!s:.16}"
                        f" on {self.name(first)}. All machines need the same: copy it over."
                    )
        return known[first]

    def broadcast(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Return rank 0's host tensors on every rank, bit for bit; other ranks may give None."""
        if self.world_size == 1:
            return tensors or {}
        mine = (tensors or {}) if self.is_main else {}
        plan = self.on_main(lambda: [(name, t.shape, t.dtype) for name, t in mine.items()])
        received = {}
        for name, shape, dtype in plan:
            tensor = mine.get(name, torch.empty(shape, dtype=dtype))
            # As bytes: a backend need not know every dtype.
            wire = tensor.reshape(-1).view(torch.uint8).to(self.device)
            if wire.numel():
                dist.broadcast(wire, 0)
            received[name] = wire.cpu().view(dtype).reshape(shape)
        return received


# ---- Start and end of a process


def is_first_of_its_host() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def start(device: str = "auto", rank_timeout: float = 600.0) -> Machine:
    """Choose the device and join the other ranks if a launcher such as torchrun started several.

    `rank_timeout` (seconds) is how long ranks wait for one another, now and in every collective.
    Raises Refused for a device that is not there and naming the ranks that do not appear.
    """
    world_size = _number("WORLD_SIZE", 1, least=1)
    rank = _number("RANK", 0, most=world_size - 1)
    place = _place(device)
    if world_size == 1:
        return Machine(place)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise Refused(f"WORLD_SIZE={world_size} without {', '.join(missing)}. Start with torchrun.")
    names = _join(place, rank, world_size, rank_timeout)
    return Machine(place, rank, world_size, names)


def _number(name: str, default: int, least: int = 0, most: int | None = None) -> int:
    """Read a whole number from the environment. Raises Refused."""
    text = os.environ.get(name, str(default))
    number = int(text) if re.fullmatch(r"\d{1,9}", text) else -1
    if number < least or (most is not None and number > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most} (WORLD_SIZE - 1)"
        raise Refused(f"{name}={text}: it must be a whole number {limit}. torchrun sets it.")
    return number


def launch_time() -> float:
    """Return the time at which run.sh or this process was started, seconds since 1970."""
    text = os.environ.get("RUN_STARTED") or str(time.time())
    if not re.fullmatch(r"\d{1,12}(\.\d+)?", text):
        raise Refused(f"RUN_STARTED={text}: it must be seconds since 1970. Unset it.")
    return float(text)


def _place(device: str) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise Refused(f"--device {device}: unknown device. Choose auto, cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch finds no GPU. Use --device auto or install CUDA torch.")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    processes, gpus = _number("LOCAL_WORLD_SIZE", 1, least=1), torch.cuda.device_count()
    index = _number("LOCAL_RANK", 0)
    if max(processes, index + 1) > gpus:
        raise Refused(f"{processes} processes on this machine, but {gpus} GPUs. Set NPROC={gpus}.")
    # Before the first allocation: segments that grow leave fewer gaps.
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    place = torch.device("cuda", index)
    torch.cuda.set_device(place)
    return place


_store: Any = None  # TCPStore of all ranks: it answers where a collective no longer does


def _hosts_store(rank: int) -> bool:
    """Whether the store lives in this process; torchrun keeps it in its own."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _join(place: torch.device, rank: int, world_size: int, rank_timeout: float) -> tuple[str, ...]:
    """Meet the other ranks and form the process group. Returns the names of all ranks."""
    global _store
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0, least=1)
    # torch for Windows is built without libuv.
    libuv = os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"
    patience, me = timedelta(seconds=rank_timeout), f"{platform.node()} pid {os.getpid()}"
    try:
        _store = dist.TCPStore(
            host, port, is_master=_hosts_store(rank), timeout=patience, wait_for_workers=False,
            use_libuv=libuv,
        )  # fmt: skip
        there = _store.compare_set(f"start/{rank}", "", me).decode()
        if there != me:
            raise Refused(f"rank {rank} was started twice: {there} and {me}. Start with torchrun.")
        absent = _roll_call("start", rank, world_size, rank_timeout, me)
        if absent:
            listed = ", ".join(map(str, absent))
            raise Refused(f"rank {listed} of {world_size} did not appear within {rank_timeout:g} s."
                          f" See what it printed, or give it time with --rank-timeout.")
        names = tuple(_store.get(f"start/{each}").decode() for each in range(world_size))
        dist.init_process_group(
            backend(place), rank=rank, world_size=world_size, timeout=patience,
            store=dist.PrefixStore("group", _store),
            device_id=place if backend(place) == "nccl" else None,
        )  # fmt: skip
        dist.barrier()
    except RuntimeError as error:
        raise Refused(f"rank {rank} of {world_size} could not join rank 0 at {host}:{port}: "
                      f"{first_line(error)}. Is it there, and the port free and reachable?"
                      ) from error
    return names


def backend(place: torch.device) -> str:
    """nccl between GPUs, gloo between CPUs and where torch has no NCCL, as on Windows."""
    return "nccl" if place.type == "cuda" and dist.is_nccl_available() else "gloo"


def _roll_call(stage: str, rank: int, world_size: int, seconds: float, word: str) -> list[int]:
    """Answer, wait until all ranks have answered, and return those that did not in time."""
    keys = [f"{stage}/{each}" for each in range(world_size)]
    _store.set(keys[rank], word)
    try:
        _store.wait(keys, timedelta(seconds=seconds))
        return []
    except dist.DistStoreError:
        return [each for each, key in enumerate(keys) if not _store.check([key])]


def supervise(function: Callable[[], int], refused: tuple[type[Exception], ...] = ()) -> int:
    """Return the exit code of `function()`, or of the error that ended it.

    One sentence on stderr for what is no fault of the code: 2 for Refused, any ValueError that
    carries a `code`, and the classes in `refused`; 3 for NonFinite; 1 for lack of memory and a
    lost rank; 130 or 143 for a signal. Any other exception prints its traceback and gives 1.
    """
    _open_standard_streams()
    try:
        return function()
    except Interrupted as error:
        return error.code
    except KeyboardInterrupt:
        return 128 + 2
    except BrokenPipeError:  # a reader of --help, such as head, has seen enough
        return 0
    except Exception as error:
        return _explain(error, refused)


def _explain(error: Exception, refused: tuple[type[Exception], ...]) -> int:
    """Say on stderr what ended the run; returns the exit code."""
    code = getattr(error, "code", None)
    if isinstance(error, refused) or (isinstance(error, ValueError | NonFinite) and code):
        if is_first_of_its_host():  # its other ranks have met the same
            _say_error(str(error))
        return code or 2
    if out_of_memory(error):
        _say_error(f"out of memory: {first_line(error)}. Use --recompute on, a smaller --val-batch "
                   f"or --micro-batch auto: the trajectory stays the same.")  # fmt: skip
    elif lost := _lost_ranks(error):
        _say_error(lost)
    else:
        traceback.print_exception(error)
    return 1


def _say_error(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"error: {text}", file=sys.stderr, flush=True)


def _lost_ranks(error: Exception) -> str:
    """Name the ranks that no longer answer if `error` is that of a collective; otherwise ""."""
    if _store is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
        return ""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if dist.get_backend() == "gloo":
        dist.destroy_process_group()  # closes connections: ranks that wait for this one hear of it
    try:
        absent = _roll_call("lost", rank, world_size, ROLL_CALL_SECONDS, "here")
        names = [f"rank {each} ({_store.get(f'start/{each}').decode()})" for each in absent]
    except RuntimeError:
        names = ["rank 0, which held the ranks' store,"]
    if _hosts_store(rank):
        time.sleep(1)  # the others still read it
    if not names:
        return f"the ranks lost their connection though all of them answer: {first_line(error)}."
    return f"{', '.join(names)} does not answer: it ended, hangs, or its machine is lost."


def leave(code: int) -> int:
    """Return the exit code; with several ranks end the process with it, after a success together.

    Threads of the process group can abort or hang the interpreter's own exit.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        _flush()
        return code
    if code == 0 and _store is not None:
        try:
            dist.barrier()
        except RuntimeError as error:
            _say_error(f"another rank did not reach the end: {first_line(error)}")
            code = 1
    _flush()
    os._exit(code)


def _open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed; a log must not get its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one


def _flush() -> None:
    """Write out what was printed; what nobody reads must not change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed before Python began
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or "can't allocate memory" in str(error)  # a RuntimeError on the CPU


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
    """Switch the cycle collector off: its pauses would be steps that take longer.

    A step leaves no cycles that hold tensors.
    """
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
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):  # private: may go
        probe = getattr(torch.cpu, name, None)
        if probe is not None and probe():
            return True
    return False


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`; "auto" is bf16 where the device has it, else float32."""
    if name == "auto":
        return torch.bfloat16 if native_bf16(device) else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def handicaps(machine: Machine, dtype: torch.dtype) -> list[str]:
    """Return a line for each thing that this GPU or this torch lacks, with its cost."""
    lines = []
    if machine.device.type != "cuda":
        return lines
    if not native_bf16(machine.device):
        gpu = torch.cuda.get_device_name(machine.device)
        lines.append(f"{gpu} has no bf16 instructions: training in {_short(dtype)} is several times"
                     f" slower than bf16 on compute capability 8.0 or newer")  # fmt: skip
    if machine.world_size > 1 and backend(machine.device) == "gloo":
        lines.append("this torch has no NCCL: gloo sends gradients through the CPU, which is slow")
    return lines


def peak_flops(machine: Machine, dtype: torch.dtype) -> tuple[float, str]:
    """Return the FLOP/s of all ranks together that MFU is relative to, and where it is from."""
    if machine.device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(machine.device)
        for part, tflops in DATASHEET_TFLOPS.items():
            if re.search(rf"\b{part}\b{VARIANTS}", name):
                return tflops * 1e12 * machine.world_size, f"{part} datasheet bf16"
    rate = measured_gemm_flops(machine.device, dtype)
    # Ranks on CPUs share them: measured at the same time, each gets its share.
    total = torch.tensor(rate, dtype=torch.float64, device=machine.device)
    return machine.all_reduce(total).item(), f"measured {GEMM_SIZE}^3 GEMM {_short(dtype)}"


def measured_gemm_flops(device: torch.device, dtype: torch.dtype, size: int = GEMM_SIZE) -> float:
    """FLOP/s of a square matrix product, the best of a fifth of a second."""
    a = torch.randn(size, size, device=device).to(dtype)
    best, end = float("inf"), time.perf_counter() + 0.2
    while time.perf_counter() < end:
        begun = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def peak_mib(machine: Machine) -> float:
    """Most MiB held so far: allocated on a GPU, resident on a CPU; nan where nobody counts."""
    if machine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(machine.device) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def describe(machine: Machine, dtype: torch.dtype) -> dict[str, object]:
    """Return the versions and hardware for the log's header. Host names are hashed."""
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
        "dtype": _short(dtype),
        "host_hash": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
        if found:
            return found[1]
    return platform.processor() or platform.machine()
