"""Device and ranks: what ranks tell each other, who is named when one is lost, and exit codes."""

import gc
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from small_ranks import Scenario, play, record

from runtime import machine as machines
from runtime.errors import Interrupted, NonFinite, Refused
from runtime.machine import Machine, supervise

ROOT = Path(__file__).resolve().parents[1]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALONE = Machine(CPU)
PATIENT = 120.0  # seconds in which ranks meet, on a busy machine too
TENSORS = {
    "weights": torch.tensor([[1.5, float("nan")], [-0.0, 3e38]], dtype=torch.bfloat16),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "flags": torch.tensor([True, False]),
    "empty": torch.empty(0, 3, dtype=torch.float64),
}

# ---- What ranks do when this file is run as a script


def refusal(function):
    try:
        return function()
    except Refused as error:
        return str(error)


def meet():
    """All that ranks do together; prints what each gets as JSON."""
    machine = machines.start("cpu", PATIENT)
    rank = machine.rank
    received = machine.on_main(lambda: TENSORS)
    facts = {"size": 7, "hash": "abc" if rank else "abd"}
    result = {
        "names": [machine.name(each) for each in range(3)],
        "gathered": machine.gather({"rank": rank}),
        "sum": machine.all_reduce(torch.tensor(float(rank))).item(),
        "from 0": machine.on_main(lambda: [1, rank]),
        "not from 0": refusal(lambda: machine.on_main(lambda: int("shard 3"))),
        "same bits": all(same_bits(received[name], tensor) for name, tensor in TENSORS.items()),
        "agreed": machine.gather_equal({"size": 7} if rank else None),
        "differ": refusal(lambda: machine.gather_equal(facts)),
    }
    print(json.dumps(result))
    return machines.leave(0)


def same_bits(one, other):
    return one.dtype == other.dtype and repr(one.tolist()) == repr(other.tolist())


def lose(number, victim):
    """Many collectives, in which the victim gets a signal."""
    def run():
        machine = machines.start("cpu", 10.0)
        for step in range(1000):
            machine.all_reduce(torch.ones(100))
            if machine.rank == victim and step == 5:
                os.kill(os.getpid(), number)
        return 0

    return machines.leave(supervise(run))


def die_at_the_end():
    if machines.start("cpu", PATIENT).rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return machines.leave(0)


SCENARIOS = {
    "meet": Scenario(meet, (0, 1, 2), 3),
    "dies": Scenario(partial(lose, signal.SIGKILL, 1), (0, 1, 2), 3),
    "stops": Scenario(partial(lose, signal.SIGSTOP, 1), (0, 1, 2), 3, (1,)),
    "the first stops": Scenario(partial(lose, signal.SIGSTOP, 0), (0, 1), 2, (0,)),
    "dies at the end": Scenario(die_at_the_end, (0, 1), 2),
}

if __name__ == "__main__":
    play(SCENARIOS)


@pytest.fixture(scope="module")
def left():
    return record(__file__)


# ---- Ranks


@pytest.fixture(scope="module")
def results(left):
    assert [rank.code for rank in left["meet"]] == [0, 0, 0], left["meet"]
    return [json.loads(rank.out.splitlines()[-1]) for rank in left["meet"]]


@pytest.mark.slow
def test_ranks_know_each_other_by_host_and_process_and_share_what_they_find(results):
    first, *others = results
    assert re.fullmatch(rf"rank 2 \({re.escape(platform.node())} pid \d+\)", first["names"][2])
    for result in results:
        assert result["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert (result["sum"], result["from 0"], result["same bits"]) == (3, [1, 0], True)
        assert result["not from 0"].endswith("'shard 3'")
    assert all(result == first for result in others)


@pytest.mark.slow
def test_what_ranks_find_must_be_equal_or_two_of_them_are_named(results):
    assert results[0]["agreed"] == {"size": 7}
    names = results[0]["names"]
    assert results[0]["differ"].startswith(f"hash is abc on {names[1]} but abd on {names[0]}.")


def test_one_process_is_a_group_of_itself():
    assert (ALONE.gather(5), ALONE.on_main(lambda: 7)) == ([5], 7)
    assert ALONE.gather_equal({"size": 7}) == {"size": 7}
    assert ALONE.on_main(lambda: TENSORS) is TENSORS
    with pytest.raises(Refused, match="'shard 3'"):
        ALONE.on_main(lambda: int("shard 3"))


# ---- Ranks that are lost


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "victim"), [("stops", 1), ("the first stops", 0)])
def test_a_rank_that_stops_is_named_by_all_others_which_end(left, scenario, victim):
    for rank in left[scenario]:
        if rank.rank != victim:
            assert (rank.code, errors(rank)) == (1, errors(rank)[:1]), rank
            assert re.match(rf"rank {victim} \(\S+ pid \d+\) does not answer", errors(rank)[0])


@pytest.mark.slow
def test_all_ranks_end_when_one_dies_and_say_so_once(left):
    for rank in left["dies"]:
        if rank.rank == 1:
            assert rank.code == -signal.SIGKILL
        else:
            assert (rank.code, len(errors(rank))) == (1, 1), rank
            assert errors(rank)[0].startswith("another rank ended; torchrun or its own output")


def errors(rank):
    lines = rank.err.splitlines()
    return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


@pytest.mark.slow
def test_a_success_is_none_where_another_rank_does_not_come_to_the_end(left):
    survivor, _ = left["dies at the end"]
    assert survivor.code == 1
    assert "another rank did not reach the end" in survivor.err


@pytest.mark.slow
def test_torchrun_names_a_rank_that_was_killed_and_ends_the_others(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, signal, sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import test_machine\n"
        "open(os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "test_machine.lose(signal.SIGKILL, 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENT,
    )  # fmt: skip
    assert done.returncode == 1
    cause = done.stderr.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 .*\n *exitcode +: -9 ", cause), done.stderr
    for rank in ("0", "1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)


def test_ranks_without_torchrun_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(Refused, match=r"^rank 0 of 2 could not join the others: .*torchrun"):
        machines.start("cpu")


# ---- Exit codes


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (Refused("--steps 0: it must be at least 1."), 2, "error: --steps 0: it must be at least"),
        (NonFinite("loss is nan"), 3, "error: loss is nan"),
        (KeyError("of the data"), 2, "error: 'of the data'"),  # in `refused`
        (Interrupted(signal.SIGTERM), 143, ""),
        (KeyboardInterrupt(), 130, ""),
        (torch.OutOfMemoryError("no room\na page"), 1, "error: out of memory: no room. Use --rec"),
        (RuntimeError("[enforce fail] can't allocate memory: 8 GB"), 1, "error: out of memory: [e"),
        (ZeroDivisionError("a bug"), 1, "Traceback"),
    ],
)
def test_what_ends_a_run_has_its_exit_code_and_only_a_bug_a_traceback(capsys, error, code, said):
    assert supervise(lambda: fail(error), refused=(KeyError,)) == code
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert ("Traceback" in err) == (said == "Traceback")


def test_the_processes_of_a_host_say_an_error_once(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert supervise(lambda: fail(Refused("bad"))) == 2
    assert capsys.readouterr().err == ""


def test_a_closed_terminal_does_not_change_the_exit_code():
    code = (
        "import time, runtime.machine as m\n"
        "def run():\n"
        "    for i in range(3): m.Machine('cpu').say('x' * 9999); time.sleep(.1)\n"
        "    return 0\n"
        "raise SystemExit(m.leave(m.supervise(run)))\n"
    )
    pipe = '"$0" -c "$1" 2>&1 | true; exit ${PIPESTATUS[0]}'
    words = ["bash", "-c", pipe, sys.executable, code]
    assert subprocess.run(words, cwd=ROOT).returncode == 0


# ---- Device


def test_cuda_where_there_is_none_is_refused_and_auto_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refused, match=r"--device cuda: torch finds no GPU. Use --device auto"):
        machines.start("cuda")
    machine = machines.start("auto")
    assert (machine.device, machine.rank, machine.world_size, machine.is_main) == (CPU, 0, 1, True)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(Refused, match=r"^8 processes on a machine with 4 GPUs. Set NPROC=4"):
        machines.start("auto")


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bf16_exactly_where_the_machine_has_it_natively(monkeypatch, native, dtype):
    monkeypatch.setattr(machines, "native_bf16", lambda device: native)
    assert machines.compute_dtype("auto", CPU) == dtype
    assert machines.compute_dtype("float32", CPU) == torch.float32


def test_a_gpu_without_bf16_is_a_handicap(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    [line] = machines.handicaps(Machine(CUDA), torch.float32)
    assert line.startswith("no bf16 instructions: float32 is several times slower")
    assert machines.handicaps(ALONE, torch.float32) == []


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H20", 148), ("NVIDIA L40S", 362),
     ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GeForce RTX 4090 D", None), ("L400", None)],
)  # fmt: skip
def test_a_known_gpu_has_its_datasheet_rate_times_the_ranks_and_others_are_measured(
    monkeypatch, gpu, tflops
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    monkeypatch.setattr(machines, "measured_gemm_flops", lambda device, dtype: fail(EOFError()))
    if tflops is None:
        with pytest.raises(EOFError):
            machines.peak_flops(Machine(CUDA, 0, 8), torch.bfloat16)
    else:
        assert machines.peak_flops(Machine(CUDA, 0, 8), torch.bfloat16)[0] == 8 * tflops * 1e12


def test_the_peak_and_the_memory_of_a_cpu_are_measured():
    flops, source = machines.peak_flops(ALONE, torch.float32)
    assert 1e6 < flops < 1e15
    assert source.startswith("measured")
    assert 50 < machines.peak_mib(ALONE) < 100_000


def test_the_log_is_told_versions_and_hardware_but_neither_host_nor_path():
    facts = machines.describe(ALONE, torch.bfloat16)
    assert (facts["torch"], facts["dtype"]) == (torch.__version__, "bfloat16")
    assert (facts["gpu"], facts["gpu_count"], facts["driver"]) == (None, 0, None)
    assert platform.node() not in json.dumps(facts)
    assert "/home" not in json.dumps(facts)


# ---- Garbage


def test_no_garbage_is_collected_inside_and_afterwards_all_is_as_before():
    def block():
        with machines.without_garbage_collection():
            assert not gc.isenabled()
            raise KeyError

    frozen = gc.get_freeze_count()
    with pytest.raises(KeyError):
        block()
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, frozen)


def test_a_rank_beyond_the_world_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refused, match="RANK=5 WORLD_SIZE=2"):
        machines.start("cpu")


def test_a_start_that_is_no_time_is_refused_by_its_name(monkeypatch):
    monkeypatch.setenv("RUN_STARTED", "abc")
    with pytest.raises(Refused, match="RUN_STARTED=abc"):
        machines.launch_time()
