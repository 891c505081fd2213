"""The machine under a run: what is chosen, what is refused with a reason, and what the log may say."""

import gc
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_ranks import Scenario, play, record
from small_run import run, write_data

import train_gpt
from runtime import environment
from runtime.environment import Machine, compute_dtype, describe, peak_flops, start, why_not_compile
from runtime.trial import Fault, explained
from runtime.watch import RankLost

ROOT = Path(__file__).resolve().parents[1]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALONE = Machine(CPU, 0, 1)
TENSORS = {
    "weights": torch.tensor([[1.5, float("nan")], [-0.0, 3e38]], dtype=torch.bfloat16),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "flags": torch.tensor([True, False]),
    "scalar": torch.tensor(2**62 + 1),
    "empty": torch.empty(0, 3, dtype=torch.float64),
}


# ---------------------------------------------------------------------------------------------------------------------
# What ranks do when this file is run as a script


def told(function):
    try:
        return function()
    except ValueError as error:
        return str(error)


def missing_on_the_last(machine):
    if machine.rank == 2:
        raise ValueError("shard 7 is not there")
    return machine.rank


def seen(function):
    try:
        return function()
    except Exception as error:
        return [type(error).__name__, str(error)]


def fails(machine, **errors):
    """What raises that error on that rank and works on the others."""
    def function():
        if error := errors.get(f"on_{machine.rank}"):
            raise error
    return function


def meet():
    """Everything that ranks do together, as JSON of what each gets."""
    machine = start("cpu", 60.0)
    rank = machine.rank
    received = machine.broadcast(TENSORS if rank == 0 else None)
    facts = {"hash": "abc" if rank else "abd", "size": 7}
    result = {
        "name": machine.name(2),
        "names": [machine.name(each) for each in range(3)],
        "every": machine.on_every(lambda: rank * 10),
        "missing": told(lambda: machine.on_every(lambda: missing_on_the_last(machine))),
        "gathered": machine.gather({"rank": rank}),
        "received": list(received),
        "same": all(same_bits(received[name], tensor) for name, tensor in TENSORS.items()),
        "agreed": machine.agree(lambda: (rank, {"size": 7} if rank < 2 else None)),
        "differ": told(lambda: machine.agree(lambda: (rank, facts))),
        "any": [machine.any(rank == 1), machine.any(False)],
        "fits": environment.fits(fails(machine), machine),
        "too large for 1": environment.fits(fails(machine, on_1=MemoryError("no room")), machine),
        "must fit": seen(lambda: environment.fits(fails(machine, on_1=MemoryError("no room")), machine, must=True)),
        "broken on 2": seen(lambda: environment.fits(fails(machine, on_1=MemoryError(), on_2=KeyError("x")), machine)),
        "not compiled on 1": environment.try_compile(
            None, "auto", machine, lambda _: environment.fits(fails(machine, on_1=KeyError("x")), machine)),
        "no compiler on 1": environment.try_compile(None, "auto" if rank != 1 else "off", machine, fail_the_test),
        "together again": machine.any(rank == 0),
    }
    print(json.dumps(result))
    return environment.leave(0)


def fail_the_test(compiled):
    raise AssertionError("nothing is to be compiled")


def leave_without_the_other():
    if start("cpu", 60.0).rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return environment.leave(0)


def same_bits(one, other):
    return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tolist().__repr__() == other.tolist().__repr__()


SCENARIOS = {
    "meet": Scenario(meet, (0, 1, 2), 3),
    "one has died": Scenario(leave_without_the_other, (0, 1), 2),
}

if __name__ == "__main__":
    play(SCENARIOS)


# ---------------------------------------------------------------------------------------------------------------------
# Device and dtype


def test_one_process_on_the_cpu_is_the_main_one():
    machine = start("cpu")
    assert (machine.device, machine.rank, machine.world_size, machine.is_main) == (CPU, 0, 1, True)


def test_an_unknown_device_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"--device tpu: unknown device. Choose auto, cpu or cuda"):
        start("tpu")


def test_cuda_where_there_is_none_is_an_error_and_auto_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"--device cuda: torch finds no CUDA device. Use --device auto"):
        start("cuda")
    assert start("auto").device == CPU


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_a_dtype_that_is_named_is_taken_whatever_the_machine(name):
    assert compute_dtype(name, CPU) == getattr(torch, name)


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bf16_exactly_where_the_machine_has_it_natively(monkeypatch, native, dtype):
    monkeypatch.setattr(environment, "native_bf16", lambda device: native)
    assert compute_dtype("auto", CPU) == dtype


@pytest.mark.parametrize(("capability", "native"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_bf16_is_native_on_gpus_from_ampere_on(monkeypatch, capability, native):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert environment.native_bf16(CUDA) is native


def test_an_unknown_dtype_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"--dtype float16: unknown dtype. Choose auto, bfloat16 or float32"):
        compute_dtype("float16", CPU)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


def test_what_the_main_rank_computes_is_returned_and_its_value_error_raised():
    assert ALONE.on_main(lambda: {"overlap": 0.5}) == {"overlap": 0.5}

    def fail():
        raise ValueError("shard 3 is cut short")

    with pytest.raises(ValueError, match=r"^shard 3 is cut short$"):
        ALONE.on_main(fail)


def test_other_ranks_do_not_call_the_function_but_get_its_result_or_its_error(monkeypatch):
    """The broadcast of rank 0 is played by a stub; real ranks are started by the tests of whole runs."""
    other = Machine(CPU, 1, 2)
    for sent in (("hash", None), (None, "no such file")):

        def receive(holder, device, sent=sent):
            holder[0] = sent

        monkeypatch.setattr(torch.distributed, "broadcast_object_list", receive)
        if sent[1] is None:
            assert other.on_main(lambda: pytest.fail("called on rank 1")) == "hash"
        else:
            with pytest.raises(ValueError, match=r"^no such file$"):
                other.on_main(lambda: pytest.fail("called on rank 1"))


@pytest.fixture(scope="module")
def left():
    return record(__file__)


@pytest.fixture(scope="module")
def results(left):
    assert [rank.code for rank in left["meet"]] == [0, 0, 0], left
    return [json.loads(rank.out.splitlines()[-1]) for rank in left["meet"]]


def test_what_every_rank_finds_all_ranks_get_in_the_order_of_ranks(results):
    assert [result["every"] for result in results] == [[0, 10, 20]] * 3
    assert ALONE.on_every(lambda: 7) == [7]


def test_what_is_missing_on_one_rank_ends_all_and_names_it_and_its_host(results):
    (text,) = {result["missing"] for result in results}
    assert re.fullmatch(rf"rank 2 \({re.escape(platform.node())} pid \d+\): shard 7 is not there", text)
    assert text.startswith(results[0]["name"])
    with pytest.raises(ValueError, match=r"^shard 7 is not there$"):
        ALONE.on_every(lambda: missing_on_the_last(Machine(CPU, 2, 3)))


def test_only_the_first_rank_gathers(results):
    assert [result["gathered"] for result in results] == [[{"rank": rank} for rank in range(3)], None, None]
    assert ALONE.gather(5) == [5]


def test_tensors_of_the_first_rank_arrive_bit_for_bit_whatever_their_dtype_and_shape(results):
    assert [result["received"] for result in results] == [list(TENSORS)] * 3
    assert all(result["same"] for result in results)
    assert ALONE.broadcast(TENSORS)["scalar"] is TENSORS["scalar"]


def test_what_ranks_find_must_agree(results):
    assert [result["agreed"] for result in results] == [[rank, {"size": 7}] for rank in range(3)]
    (text,) = {result["differ"] for result in results}
    assert re.match(r"hash is abc at rank 1 \(.*\) and abd at rank 0 \(.*\): ", text)


def test_a_flag_of_one_rank_is_seen_by_all(results):
    assert [result["any"] for result in results] == [[True, False]] * 3


def test_a_success_is_none_where_another_rank_does_not_come_to_the_end(left):
    alone, _ = left["one has died"]
    assert alone.code == 1
    assert "error: another rank did not come to the end: " in alone.err


@pytest.mark.parametrize(
    ("error", "rank", "speaks"),
    [(ValueError("bad"), "0", True), (ValueError("bad"), "1", False), (RankLost("rank 0 is lost"), "1", True)],
)  # fmt: skip
def test_an_error_is_said_once_unless_the_rank_that_says_it_may_be_lost(monkeypatch, capsys, error, rank, speaks):
    monkeypatch.setenv("RANK", rank)
    assert environment.refuse(error, 2) == 2
    assert capsys.readouterr().err == (f"error: {error}\n" if speaks else "")


def test_memory_that_one_rank_lacks_is_too_little_for_all(results):
    assert [(result["fits"], result["too large for 1"]) for result in results] == [(True, False)] * 3
    here, there = ["MemoryError", "no room"], ["MemoryError", f"{results[0]['names'][1]}: MemoryError: no room"]
    assert [result["must fit"] for result in results] == [there, here, there]


def test_an_error_of_one_rank_comes_before_memory_and_ends_what_all_do_at_the_same_place(results):
    elsewhere = ["FailedElsewhere", f"{results[0]['names'][2]}: KeyError: 'x'"]
    assert [result["broken on 2"] for result in results] == [elsewhere, elsewhere, ["KeyError", "'x'"]]
    assert all(result["together again"] for result in results)


def test_what_cannot_be_compiled_on_one_rank_is_compiled_on_none_and_the_rank_is_named(results):
    elsewhere = f"compilation failed: FailedElsewhere: {results[0]['names'][1]}: KeyError: 'x'"
    assert [result["not compiled on 1"] for result in results] == [
        elsewhere, "compilation failed: KeyError: 'x'", elsewhere]  # fmt: skip
    assert [result["no compiler on 1"] for result in results] == [f"{results[0]['names'][1]}: as asked"] * 3


@dataclass(frozen=True)
class Listening(Machine):
    """One that notes, when the ranks meet, whether a tensor of theirs is still held."""

    tensor: Any = None
    held: list = field(default_factory=list)

    def on_every(self, function):
        self.held.append(self.tensor and self.tensor() is not None)
        return super().on_every(function)


def test_what_failed_holds_no_memory_when_the_ranks_meet_nor_afterwards():
    machine = Listening(CPU, 0, 1)

    def function():
        tensor = torch.ones(1000)
        object.__setattr__(machine, "tensor", weakref.ref(tensor))
        try:
            raise KeyError("within")
        except KeyError as error:
            raise RuntimeError("can't allocate memory" if machine.rank else "broken") from error

    gc.disable()
    try:
        assert environment.try_compile(abs, "auto", machine, lambda _: environment.fits(function, machine))
        assert machine.held == [None, False]
        assert machine.tensor() is None
    finally:
        gc.enable()


def test_one_process_that_lacks_memory_does_not_fit_and_says_so_if_it_must():
    def short():
        raise torch.OutOfMemoryError("no room")

    assert not environment.fits(short, ALONE)
    with pytest.raises(torch.OutOfMemoryError, match=r"^no room$"):
        environment.fits(short, ALONE, must=True)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (environment.FailedElsewhere("rank 1 (b pid 7): KeyError: 0"), "error: rank 1 (b pid 7): KeyError: 0\n"),
        (RuntimeError("of its own"), ""),
    ],
)
def test_what_another_rank_met_is_told_where_it_is_heard_of_and_still_ends_this_one(capsys, error, told):
    watch = SimpleNamespace(blame=lambda: None)
    with pytest.raises(type(error)) as raised, explained(watch, OSError):
        raise error
    assert raised.value is error
    assert capsys.readouterr().err == told


def test_memory_that_does_not_suffice_is_an_error_that_names_every_flag_that_saves_some():
    flags = r"^out of memory: no room\. Give --recompute on, a smaller --val-batch, or --micro-batch auto"
    with pytest.raises(Fault, match=flags), explained(SimpleNamespace(blame=lambda: None), OSError):
        raise MemoryError("no room")


def test_one_process_reduces_to_itself():
    assert ALONE.all_reduce(torch.tensor([1.0, 2.0])).tolist() == [1, 2]
    assert (ALONE.any(True), ALONE.any(False)) == (True, False)
    ALONE.synchronize()
    assert environment.leave(3) == 3


# ---------------------------------------------------------------------------------------------------------------------
# The compiler


def test_without_a_compiler_the_reason_is_given(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not_compile(CPU) == "no C++ compiler was found"


def test_the_compiler_named_by_cxx_is_the_one_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "my-compiler")
    assert why_not_compile(CPU) == "no C++ compiler was found"
    compiler = tmp_path / "my-compiler"
    compiler.touch(mode=0o755)
    assert why_not_compile(CPU) != "no C++ compiler was found"


def test_without_the_python_headers_the_reason_is_given(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert why_not_compile(CPU) == "the Python headers (Python.h) are not installed"
    (tmp_path / "Python.h").touch()
    assert why_not_compile(CPU) is None


def test_a_gpu_without_triton_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert why_not_compile(CUDA) == "Triton is not installed"


def test_a_compilation_that_fails_is_a_reason_to_go_on_without_or_if_demanded_a_one_line_error():
    def first_step(compiled):
        raise AssertionError("the generated code does not build\nand a page of it")

    what = "compilation failed: AssertionError: the generated code does not build"
    assert environment.try_compile(abs, "auto", ALONE, first_step) == what
    with pytest.raises(environment.CompileError, match=f"^--compile on: {what}. --compile auto goes on without.$"):
        environment.try_compile(abs, "on", ALONE, first_step)


def test_what_was_compiled_is_counted_and_where_nothing_was_nothing_is_imported_for_it(monkeypatch):
    nothing = {"graphs": 0, "cache_hit": 0, "cache_miss": 0, "cache_bypass": 0}
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert {name: fact for name, fact in environment.compile_facts().items() if name in nothing} == nothing
    assert "torch._dynamo.utils" not in sys.modules


def test_graphs_and_what_the_cache_had_of_them_are_counted_under_the_compilers_own_names(monkeypatch):
    before = environment.compile_facts()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    utils = sys.modules["torch._dynamo.utils"]
    assert environment.compile_facts()["graphs"] == before["graphs"] + 1
    for number, kind in enumerate(("hit", "miss", "bypass"), 3):
        monkeypatch.setitem(utils.counters["inductor"], f"fxgraph_cache_{kind}", number)
        source = Path(torch.__file__).parent / "_inductor" / "codecache.py"
        assert f'counters["inductor"]["fxgraph_cache_{kind}"] += 1' in source.read_text(encoding="utf-8")
    assert environment.compile_facts() | {"graphs": 0, "compile_flags": []} == {
        "compile_flags": [], "graphs": 0, "cache_hit": 3, "cache_miss": 4, "cache_bypass": 5}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Garbage


@pytest.mark.parametrize("on", [True, False])
def test_no_garbage_is_collected_in_a_block_and_afterwards_all_is_as_before(on):
    def block():
        with environment.without_garbage_collection():
            assert not gc.isenabled()
            raise KeyError

    before, frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        gc.enable() if on else gc.disable()
        with pytest.raises(KeyError):
            block()
        assert gc.isenabled() is on
        assert gc.get_freeze_count() == frozen
    finally:
        gc.enable() if before else gc.disable()


def test_steps_leave_no_reference_cycles_so_that_memory_does_not_grow_without_a_collector(tmp_path, monkeypatch):
    train, found = train_gpt.train, []

    def watched(session, run):
        with environment.without_garbage_collection():
            loss = train(session, run)
            found.append(gc.collect())  # objects that nothing but a cycle held
        return loss

    monkeypatch.setattr(train_gpt, "train", watched)
    outcome = run(write_data(tmp_path / "data", 2000), tmp_path / "logs", steps=50)
    assert outcome.code == 0, outcome.err
    assert found == [0]


# ---------------------------------------------------------------------------------------------------------------------
# What runs are compared to, and what is told of them


def test_the_peak_of_a_cpu_is_measured_and_positive(monkeypatch):
    monkeypatch.setattr(environment, "GEMM_SIZE", 128)
    rate = environment.measured_gemm_flops(CPU, torch.float32, size=128)
    assert 1e6 < rate < 1e15
    total, name = peak_flops(ALONE, torch.float32)
    assert total > 0
    assert "measured" in name
    assert "float32" in name


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H200", 989.4), ("NVIDIA H20", 148), ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA L40", 181),
        ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA A40", 149.7), ("NVIDIA GeForce RTX 3060 Ti", 32.4),
        ("NVIDIA GeForce RTX 3060", 25.5), ("NVIDIA GeForce RTX 4070 Ti", 80.2), ("NVIDIA GeForce RTX 4070", 58.3),
    ],
)  # fmt: skip
def test_a_known_gpu_has_the_rate_of_its_datasheet_times_the_ranks(monkeypatch, gpu, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    total, name = peak_flops(Machine(CUDA, 0, 8), torch.bfloat16)
    assert total == 8 * tflops * 1e12
    assert "datasheet" in name


@pytest.mark.parametrize("gpu", [
    "NVIDIA L400", "NVIDIA Graphics Card 1", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4070 Ti SUPER", "NVIDIA GeForce RTX 3080 Ti",
])  # fmt: skip
def test_a_gpu_that_is_not_in_the_table_is_measured(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    monkeypatch.setattr(environment, "measured_gemm_flops", lambda device, dtype: 7e12)
    monkeypatch.setattr(torch, "tensor", lambda value, **options: SimpleNamespace(item=lambda: value))
    assert peak_flops(Machine(CUDA, 0, 1), torch.bfloat16) == (7e12, "measured 1024^3 GEMM bfloat16")


def test_the_memory_of_this_process_is_counted_in_mib():
    held = environment.peak_mib(ALONE)
    assert 50 < held < 100_000


def test_the_environment_in_the_log_is_json_and_names_neither_the_host_nor_a_path():
    said = describe(ALONE, torch.bfloat16)
    text = json.dumps(said)
    assert (said["torch"], said["dtype"], said["gpu"]) == (torch.__version__, "bfloat16", None)
    assert said["python"] == platform.python_version()
    assert platform.node() not in text
    assert "/home" not in text


def test_compiler_settings_by_code_and_by_environment_are_told_and_cache_folders_are_not(tmp_path):
    """In an interpreter of its own: what was set once counts as set for ever, but for defaults."""
    code = """
import torch._inductor.config as config
from runtime.environment import compile_flags
before = compile_flags()
config.inplace_buffers, config.triton.store_cubin = True, False  # their defaults, as a compilation may set them
config.coordinate_descent_tuning = True
print([line for line in compile_flags() if line not in before], "TORCHINDUCTOR_MAX_AUTOTUNE=1" in before)
"""
    variables = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "somewhere")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert done.stdout == "['torch._inductor.config.coordinate_descent_tuning = True'] True\n"
    assert "somewhere" not in done.stdout
