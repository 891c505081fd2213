"""Device and ranks: what ranks tell each other, who is named when one is lost, and exit codes."""

import json
import os
import signal
import time

import pytest
import torch
from small_ranks import Scenario, play, record
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import optim
from runtime import machine as machines
from runtime.ending import leave, supervise
from runtime.errors import Interrupted, Refused
from runtime.machine import Machine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PATIENT = 120.0  # seconds in which ranks meet, on a busy machine too
TENSOR = torch.tensor([[1.5, float("nan")], [-0.0, 3e38]], dtype=torch.bfloat16)

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
    result = {
        "gathered": machine.gather({"rank": rank}),
        "sum": machine.all_reduce(torch.tensor(float(rank))).item(),
        "from 0": machine.on_main(lambda: [1, rank]),
        "not from 0": refusal(lambda: machine.on_main(lambda: int("shard 3"))),
        "tensor": repr(machine.on_main(lambda: TENSOR)),
        "past the GPUs": Machine(CUDA, rank, machine.world_size).on_main(lambda: 7),
    }
    print(json.dumps(result))
    return leave(0)


def stop():
    """Many collectives, in which one rank is stopped and hangs."""

    def run():
        machine = machines.start("cpu", 10.0)
        for step in range(1000):
            machine.all_reduce(torch.ones(100))
            if machine.rank == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    return leave(supervise(run))


def die_at_the_end():
    def run():
        if machines.start("cpu", PATIENT).rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    return leave(supervise(run))


SCENARIOS = {
    "meet": Scenario(meet, (0, 1, 2), 3),
    "stops": Scenario(stop, (0, 1, 2), 3, (1,)),
    "dies at the end": Scenario(die_at_the_end, (0, 1), 2),
}

if __name__ == "__main__":
    play(SCENARIOS)


@pytest.fixture(scope="module")
def left():
    return record(__file__)


# ---- Ranks


@pytest.mark.slow
def test_ranks_share_what_they_find(left):
    assert [rank.code for rank in left["meet"]] == [0, 0, 0], left["meet"]
    results = [json.loads(rank.out.splitlines()[-1]) for rank in left["meet"]]
    for result in results:
        assert result["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert (result["sum"], result["from 0"], result["tensor"]) == (3, [1, 0], repr(TENSOR))
        assert result["not from 0"].endswith("'shard 3'")
        assert result["past the GPUs"] == 7
        assert result == results[0]


# ---- Ranks that are lost


@pytest.mark.slow
def test_a_rank_that_stops_or_dies_at_the_end_ends_all_others_and_only_these_say_so(left):
    for rank in (left["stops"][0], left["stops"][2], left["dies at the end"][0]):
        assert rank.code == 1
        errors = [line for line in rank.err.splitlines() if line.startswith("error: ")]
        assert [error[:33] for error in errors] == ["error: another rank ended or hang"]
    assert "error: " not in left["stops"][1].err


@pytest.mark.parametrize(("variables", "sentence"), [
    ({"WORLD_SIZE": "2"}, "RANK= WORLD_SIZE=2: .* RANK expected, but not set"),
    ({"RANK": "1"}, "RANK=1 WORLD_SIZE=: RANK must be at least 0 and below WORLD_SIZE"),
    ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 WORLD_SIZE=2: RANK must be"),
    ({"RANK": "0", "WORLD_SIZE": "two"}, "RANK=0 WORLD_SIZE=two: invalid literal"),
])  # fmt: skip
def test_what_torchrun_would_not_set_is_refused_at_once(monkeypatch, variables, sentence):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match=f"^{sentence}.*Start all ranks with torchrun"):
        machines.start("cpu")


# ---- Exit codes


def fail(error):
    raise error


@pytest.mark.parametrize(("error", "code", "said"), [
    (Refused("--steps 0: it must be at least 1."), 2, "error: --steps 0: it must be at least"),
    (KeyError("of the data"), 2, "error: 'of the data'"),  # in `refused`
    (Interrupted(signal.SIGTERM), 143, "error: nothing is lost\n"),
    (torch.OutOfMemoryError("no room\na page"), 1, "error: out of memory: no room. Use --act"),
    (RuntimeError("[enforce fail] can't allocate memory: 8 GB"), 1, "error: out of memory: [e"),
    (ZeroDivisionError("a bug"), 1, "Traceback"),
])  # fmt: skip
def test_what_ends_a_run_has_its_exit_code_and_only_a_bug_a_traceback(capsys, error, code, said):
    ending = {"refused": (KeyError,), "interrupted": "nothing is lost"}
    assert supervise(lambda: fail(error), **ending) == code
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert ("Traceback" in err) == (said == "Traceback")


def test_a_hosts_first_rank_says_an_error_another_one_if_nobody_ends_it(monkeypatch, capsys):
    said_before = []
    monkeypatch.setattr(time, "sleep", lambda seconds: said_before.append(capsys.readouterr().err))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    for local_rank, ranks in (("0", "3"), ("2", "3"), ("2", "1")):  # the last of another launcher
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        monkeypatch.setenv("WORLD_SIZE", ranks)
        assert supervise(lambda: fail(Refused("bad"))) == 2
        assert capsys.readouterr().err == "error: bad\n"
    assert said_before == [""], "the second rank waits for torchrun before it speaks"


def test_the_report_of_torchrun_ends_with_our_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert supervise(lambda: fail(Refused("--steps 0: it must be at least 1."))) == 2
    failure = ProcessFailure(0, 1234, 2, str(tmp_path / "error.json"))
    *_, last, border = str(ChildFailedError("train_gpt.py", {0: failure})).splitlines()
    assert last.endswith("error: --steps 0: it must be at least 1.")
    assert set(border) == {"="}


def test_on_apples_gpu_runs_are_eager_float32_and_of_one_process(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    device = machines.start("mps").device
    assert device.type == "mps"
    assert machines.compute_dtype("auto", device) == optim.widest(device) == torch.float32
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refused, match="--device mps: it needs one process"):
        machines.start("mps")


# ---- Device


@pytest.fixture
def gpus(monkeypatch):
    """Set how many GPUs torch finds, and what torchrun sets."""

    def has(count, **variables):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda place: None)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return has


def test_a_gpu_where_there_is_none_is_refused_and_auto_is_the_cpu(gpus):
    gpus(0)
    for name, gpu in (("cuda", "GPU"), ("mps", "Apple GPU")):
        with pytest.raises(Refused, match=f"--device {name}: torch finds no {gpu}. Use --device a"):
            machines.start(name)
    machine = machines.start("auto")
    assert (machine.device, machine.rank, machine.world_size, machine.is_main) == (CPU, 0, 1, True)


def test_each_rank_of_a_host_has_its_own_gpu_and_more_ranks_than_gpus_are_refused(gpus):
    gpus(4, WORLD_SIZE="4", LOCAL_RANK="3")
    assert machines.find_device("auto") == torch.device("cuda", 3)
    gpus(1, LOCAL_RANK="1")  # of another launcher: this process has no ranks
    assert machines.find_device("auto") == torch.device("cuda", 0)
    gpus(4, LOCAL_WORLD_SIZE="8")
    with pytest.raises(Refused, match=r"^8 processes on a machine with 4 GPUs. Set NPROC=4"):
        machines.start("auto")


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bf16_exactly_where_the_machine_has_it_natively(monkeypatch, native, dtype):
    monkeypatch.setattr(machines, "native_bf16", lambda device: native)
    assert machines.compute_dtype("auto", CPU) == dtype
    assert machines.compute_dtype("float32", CPU) == torch.float32
