"""Whatever cannot work is refused before the first step, in one sentence with the value, the rule and the fix."""

import os
import re
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from small_run import BOS, STEPS, arguments, documents, find_logs, read_events, run, run_words, write_data

import train_gpt
from data.shards import write_shard
from claims.runlog import read_run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def assert_refused(outcome, *parts):
    """Exit code 2, and one sentence on stderr that has the parts; no run has begun."""
    assert outcome.code == 2, outcome.err
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1, "one line"
    assert [part for part in parts if part not in outcome.err] == [], outcome.err
    assert outcome.logs == []


# ---------------------------------------------------------------------------------------------------------------------
# Flags


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--matrix-learning-rate", "0.1"], ["--matrix-learning-rate: no such flag", "--matrix-lr"]),
        (["--step", "3"], ["--step: no such flag", "--steps"]),
        (["-steps", "3"], ["-steps: no such flag", "--steps"]),
        (["--seeds=3"], ["--seeds=3: no such flag", "--seed?"]),
        (["--qqq"], ["--qqq: no such flag", "--help"]),
        (["train.bin"], ["train.bin: no such flag", "--help"]),
        (["--steps"], ["--steps", "expected one argument"]),
    ],
    ids=lambda value: value[0],
)
def test_an_unknown_flag_is_refused_with_the_nearest(words, parts, data, tmp_path):
    assert_refused(run_words(arguments(data, tmp_path) + words, tmp_path), *parts)


@pytest.mark.parametrize(
    ("flag", "value", "parts"),
    [
        ("track", "longest", ["one of", "tiny", "short"]),
        ("recipe", "sgd", ["one of record42, muon, adamw"]),
        ("steps", "many", ["int"]),
        ("steps", "1e3", ["int"]),
        ("steps", 0, ["at least 1"]),
        ("steps", 2, ["larger than the extension (2)"]),
        ("matrix_lr", "fast", ["float"]),
        ("matrix_lr", "nan", ["nan"]),
        ("matrix_lr", -1, ["-1.0"]),
        ("target", "low", ["float"]),
        ("deterministic", "yes", ["on"]),
        ("windows", "3,x", ["3,7,11"]),
        ("adam_betas", "0.5", ["0.65,0.95"]),
        ("adam_betas", "0.5, 1.5", ["two numbers in [0, 1)"]),
        ("trials", 0, ["at least 1"]),
        ("adam_every", 0, ["at least 1"]),
        ("cooldown", 2, ["between 0 and 1"]),
        ("batch_tokens", 500, ["multiple of sequence (128)"]),
        ("micro_batch", 100, ["at least one row"]),
        ("val_tokens", 1000, ["multiple of val_sequence 256"]),
        ("val_batch", 100, ["at least"]),
        ("dim", 40, ["multiple of head_dim"]),
        ("max_document", 0, ["at least 1"]),
        ("optimizer", "lion", ["one of normuon, muon, adam"]),
        ("matrix_method", "svd", ["polar_express"]),
        ("compile", "maybe", ["one of auto, on, off"]),
        ("dtype", "float16", ["bfloat16", "float32"]),
        ("attention", "flash", ["auto, flash4, flash3, varlen, flex, portable"]),
        ("device", "tpu", ["one of auto, cpu, cuda"]),
    ],
)
def test_a_bad_value_is_refused_with_its_rule(flag, value, parts, data, tmp_path):
    # Optimizers name their arguments and not the flags; the value is there in any case.
    assert_refused(run(data, tmp_path, **{flag: value}), str(value), *parts)


# Sizes without which nothing divides, and numbers that a schedule or a tool cannot use.
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("sequence", 0), ("val_sequence", 0), ("head_dim", 0), ("dim", 0), ("dim", -32), ("batch_tokens", 0),
        ("batch_tokens", -512), ("val_tokens", 0), ("windows", "0"), ("windows", "3,7,-1"), ("extension_window", 0),
        ("final_window", -1), ("window_block", -1), ("momentum", "0.9"), ("seed", -1), ("target", "nan"),
    ],
)  # fmt: skip
def test_a_number_that_makes_no_sense_is_refused_by_its_flag(flag, value, data, tmp_path):
    assert_refused(run(data, tmp_path, **{flag: value}), "--" + flag.replace("_", "-"), str(value))


@pytest.mark.parametrize("changed", [{"head_dim": 5, "dim": 10}, {"head_dim": 8, "dim": 8}])
def test_a_model_that_cannot_be_built_is_refused(changed, data, tmp_path):
    assert_refused(run(data, tmp_path, **changed), "--")


def test_a_track_is_checked_before_the_sizes_that_it_would_give(data, tmp_path):
    assert_refused(run(data, tmp_path, track="shrot", micro_batch=64), "--track shrot")


# ---------------------------------------------------------------------------------------------------------------------
# The machine


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_that_is_not_there_is_refused(data, tmp_path):
    assert_refused(run(data, tmp_path, device="cuda"), "--device cuda", "no CUDA device", "--device auto")


def test_varlen_attention_on_a_cpu_is_refused(data, tmp_path):
    assert_refused(run(data, tmp_path, attention="varlen"), "--attention varlen", "CUDA", "--attention portable")


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.usefixtures("no_compiler")
def test_compiling_without_a_compiler_is_refused(data, tmp_path):
    assert_refused(run(data, tmp_path, compile="on"), "--compile on", "no C++ compiler", "--compile auto")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_a_run_is_eager_and_says_so_in_one_line(data, tmp_path):
    outcome = run(data, tmp_path, compile="auto", steps=3)
    assert outcome.code == 0, outcome.err
    assert [line for line in outcome.out.splitlines() if "compile" in line and "target" not in line] == [
        "not compiled, slower (no C++ compiler was found); --compile on makes this an error"
    ]
    assert outcome.events("header")[0]["env"]["compiled"] is False
    assert outcome.events("end")[0]["status"] == "done"


# ---------------------------------------------------------------------------------------------------------------------
# The data


@pytest.fixture
def copy(data, tmp_path):
    """A copy of the data to spoil."""
    return shutil.copytree(data, tmp_path / "data")


def test_a_missing_data_folder_is_refused(tmp_path):
    assert_refused(run(tmp_path / "nowhere", tmp_path), str(tmp_path / "nowhere"), "train", "./run.sh")


def test_missing_validation_data_are_refused(copy, tmp_path):
    (copy / "s_val_0.bin").unlink()
    assert_refused(run(copy, tmp_path / "logs"), f"{copy}/*val_*.bin", "no file", "./run.sh")


def test_a_truncated_shard_is_refused(copy, tmp_path):
    shard = copy / "s_train_1.bin"
    os.truncate(shard, shard.stat().st_size - 20)
    claimed = (shard.stat().st_size + 20 - 1024) // 2
    parts = (str(shard), f"{claimed:,}", f"{claimed - 10:,}", "fetch or build")
    assert_refused(run(copy, tmp_path / "logs"), *parts)


def test_a_file_that_is_no_shard_is_refused(copy, tmp_path):
    (copy / "s_val_0.bin").write_bytes(b"<!DOCTYPE html>" + bytes(3000))
    assert_refused(run(copy, tmp_path / "logs"), "s_val_0.bin", "20240520", "another kind of file")


def test_an_empty_shard_is_refused(copy, tmp_path):
    (copy / "s_train_0.bin").write_bytes(b"")
    assert_refused(run(copy, tmp_path / "logs"), "s_train_0.bin", "empty", "fetch or build")


@pytest.mark.parametrize("shard", ["s_train_0.bin", "s_val_0.bin"])  # a shard that the run does not reach is not read
def test_a_token_beyond_the_vocabulary_is_refused(shard, copy, tmp_path):
    tokens = documents(4, 300)
    tokens[777] = 64
    write_shard(copy / shard, tokens)
    assert_refused(run(copy, tmp_path / "logs"), shard, "token 777 is 64", "0 to 63", "tokenizer")


def test_data_that_end_before_the_run_are_refused(data, tmp_path):
    assert_refused(run(data, tmp_path, steps=1000), "of 1,000 steps", "tokens in 2 shard(s)", "at most")


def test_data_without_documents_are_refused(copy, tmp_path):
    for shard in copy.glob("s_train*"):
        write_shard(shard, np.full(10_000, 5))
    assert_refused(run(copy, tmp_path / "logs"), "after 0 of 12 steps", f"token {BOS}")


def test_more_validation_tokens_than_there_are_are_refused(data, tmp_path):
    assert_refused(run(data, tmp_path, val_tokens=2**20), "1,048,577", "lower val_tokens")


def test_a_shard_shorter_than_the_prefixes_of_the_audit_can_be_used(copy, tmp_path):
    write_shard(copy / "s_train_2.bin", [BOS, 1, 2, 3])
    outcome = run(copy, tmp_path / "logs", steps=3)
    assert outcome.code == 0, outcome.err


def test_a_folder_name_is_no_pattern(copy, tmp_path):
    brackets = copy.rename(tmp_path / "data[1]")
    outcome = run(brackets, tmp_path / "logs", steps=3)
    assert outcome.code == 0, outcome.err


def test_a_run_of_as_many_steps_as_a_refusal_allows_is_possible(copy, tmp_path):
    """It is shorter than its warm-up, which takes steps with every window."""
    write_shard(copy / "s_train_0.bin", documents(1, 40))
    write_shard(copy / "s_train_1.bin", documents(2, 40))
    refused = run(copy, tmp_path / "logs", steps=100)
    most = int(refused.err.split("at most ")[1].split()[0])
    assert most < 9
    outcome = run(copy, tmp_path / "logs", steps=most)
    assert outcome.code == 0, outcome.err


# ---------------------------------------------------------------------------------------------------------------------
# The log


@pytest.mark.parametrize("beneath", ["/proc/logs", "a file"])
def test_a_log_folder_that_cannot_be_written_is_refused(beneath, data, tmp_path):
    (tmp_path / "a file").touch()
    folder = tmp_path / beneath / "logs"
    outcome = run_words(arguments(data, folder), tmp_path)
    assert_refused(outcome, str(folder), "cannot be written", "--log-dir")


def test_a_full_disk_does_not_end_a_run_and_loses_no_line(data, tmp_path, monkeypatch):
    """The system refuses to let any file grow further, which is what a full disk does."""
    forward_backward = train_gpt.forward_backward
    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk(session, windows):
        logs = find_logs(tmp_path)
        if logs and len(read_events(logs[0])) > 9:
            resource.setrlimit(resource.RLIMIT_FSIZE, (logs[0].stat().st_size + 100, no_limit[1]))
        return forward_backward(session, windows)

    monkeypatch.setattr(train_gpt, "forward_backward", fill_the_disk)
    try:
        outcome = run(data, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    assert outcome.code == 1
    (log,) = outcome.logs
    warning, error = outcome.err.splitlines()
    assert warning.startswith(f"warning: cannot write {log}")
    rescued = Path(re.search(r"lines are in (\S+):", error)[1])
    assert read_run(log).unfinished == "no end line"
    log.write_bytes(log.read_bytes() + rescued.read_bytes())
    rescued.unlink()
    assert read_run(log).unfinished is None
    assert len([event for event in read_events(log) if event["event"] == "step"]) == STEPS
