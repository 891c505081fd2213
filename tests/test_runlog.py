"""The reader takes from a log what is there and no more: a torn, mixed or foreign one is named."""

import contextlib
import os
import pickle
import tempfile
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claims.logs import find_runs, finished_runs, read_all, read_runs
from claims.runs import Phase, Run, Step, Validation
from runtime.errors import LogError
from runtime.jsonl import json_line

RULE = "=" * 100
SOURCE = f"""import torch
EXAMPLE = '''
step:7/7 val_loss:1.0000 train_time:7ms step_avg:1.00ms
{RULE[1:]}
{RULE} longer
# {RULE}
'''
print0("=" * 100)
print0(f"step:{{step}}/{{total}} val_loss:{{val_loss:.4f}} train_time:{{time_ms:.0f}}ms")
"""
SMI = """\
Running Python 3.12.7 (main, Jan 19 2025) [GCC 13.2.0]
Running PyTorch 2.9.0.dev2025+cu126 compiled for CUDA 12.6
Running Triton version 3.4.0
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:53:00.0 Off |                    0 |
| N/A   38C    P0            115W /  700W |    5954MiB /  81559MiB |      0%      Default |
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:64:00.0 Off |                    0 |
|    0   N/A  N/A           62249      C   /usr/bin/python3                       1510MiB |
"""
LINES = """\
step:0/100 val_loss:10.8258 train_time:0ms step_avg:0.03ms
step:1/100 train_time:67ms step_avg:66.96ms
step:50/100 val_loss:4.0000 train_time:3000ms step_avg:60.00ms
step:100/100 train_time:6001ms step_avg:60.01ms
step:100/100 val_loss:3.2784 train_time:6009ms step_avg:60.09ms
"""
SCRATCH = tempfile.TemporaryDirectory()
LOG = f"{SOURCE}\n{RULE}\n{SMI}\n{RULE}\n{LINES}peak memory allocated: 31286 MiB\n"


# ---- Logs of this trainer


def line(event: str, **fields: object) -> bytes:
    return json_line({"event": event, "t_ms": 1.5, **fields})


def header(schema: int = 3, **more: object) -> bytes:
    return line(
        "header", schema=schema, run_id="20261121-083105_short", track="short", target=3.28,
        seed=0, trial=0, claim=None, source_sha256="source", config_sha256="config", config={},
        env={"gpu_count": 8, "gpu": "H100"}, **more,
    )  # fmt: skip


def step(number: int, ms: float) -> bytes:
    return line("step", step=number, train_time_ms=ms, train_loss=9.0 - number)


def val(number: int, ms: float, total: int = 3) -> bytes:
    return line("val", step=number, total_steps=total, val_loss=9.25 - number, train_time_ms=ms)


def end(status: str = "done", steps: int = 3, loss: float | None = 6.25) -> bytes:
    return line("end", status=status, steps=steps, val_loss=loss)


def resume(from_step: int, **more: object) -> bytes:
    return line("resume", from_step=from_step, differences=[], **more)


SETUP = line("phase", name="setup", timed=False, ms=1.5)
BEGIN = header() + SETUP + val(0, 0.0)
ONE, TWO, THREE = step(1, 10.0), step(2, 20.0), step(3, 30.0)
WHOLE = BEGIN + ONE + TWO + THREE + val(3, 30.0) + end()


def write(content: str | bytes, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(content: str | bytes, name: str = "") -> list[Run]:
    """The runs in a text log, or in a JSON log, which is given as bytes."""
    name = name or ("run.txt" if isinstance(content, str) else "run.jsonl")
    return read_runs(write(content, Path(SCRATCH.name, name)))


def read_segments(folder: Path, *contents: bytes) -> Run:
    write(contents[0], folder / "run.jsonl")
    for number, content in enumerate(contents[1:], 2):
        write(content, folder / f"run.{number}.jsonl")
    return read_runs(folder / "run.jsonl")[0]


def steps_of(run: Run) -> list[tuple[int, float | None]]:
    return [(step.step, step.train_time_ms) for step in run.steps]


def test_every_field_of_a_complete_log_is_read():
    (run,) = read(WHOLE)
    assert run.steps[1] == Step(2, 20.0, 7.0)
    assert run.validations == [Validation(0, 9.25, 0.0), Validation(3, 6.25, 30.0)]
    assert (run.final_loss, run.train_time_ms, run.total_steps) == (6.25, 30.0, 3)
    assert run.phases == [Phase("setup", False, 1.5, 1.5)]
    assert (run.track, run.target, run.seed) == ("short", 3.28, 0)
    assert (run.source, run.config_sha256, run.gpu_count) == ("source", "config", 8)
    assert (run.complete, run.counts, run.end["status"]) == (True, True, "done")
    assert run.segments[0].sha256 == sha256(WHOLE).hexdigest()


def test_a_json_log_cut_at_any_byte_is_unfinished():
    lines = WHOLE.split(b"\n")
    for length in range(1, len(WHOLE) - 1):
        tail = WHOLE[:length].rpartition(b"\n")[2]
        reasons = ["no header", "no end line"] if tail in lines else ["torn last line"]
        (run,) = read(WHOLE[:length])
        assert run.unfinished in reasons


@pytest.mark.parametrize("garbage", [
    b"step:5/10 val_loss:3.1", b"", b"[1]",
    b'{"event": "x"} {}', b'{"event": "x", "y": ' + b"[" * 100_000,
    b'{"event": "x", "y": ' + b"9" * 5000 + b"}",
], ids=str)  # fmt: skip
def test_garbage_before_the_last_line_is_an_error_that_names_file_line_and_rule(garbage):
    with pytest.raises(LogError, match=r"run\.jsonl, line 2: every line must be one JSON object"):
        read(header() + garbage + b"\n" + WHOLE[len(header()) :])


@pytest.mark.parametrize(("old", "new", "rule"), [
    ('"schema": 3', '"schema": 9', r"schema 9; this version reads 3\. Update it"),
    ('"schema": 3', '"schema": 2', r"schema 2; .* reads 3\. Check out commit 759f432, which reads"),
    ('"seed": 0', '"seed": "0"', "seed must be an integer of at least 0, not '0'"),
    ('"source_sha256": "source", ', "", "source_sha256 must be a string, not None"),
    ('"val_loss": 9.25', '"val_loss": "low"', "line 3: val_loss must be a number, not 'low'"),
    ('"val_loss": 9.25', '"val_loss": 1e999', "val_loss must be a number, not inf"),
])  # fmt: skip
def test_a_field_that_breaks_its_rule_is_an_error_that_names_it(old, new, rule):
    assert old in WHOLE.decode()
    with pytest.raises(LogError, match=rule):
        read(WHOLE.decode().replace(old, new).encode())


@pytest.mark.parametrize(("content", "reason"), [
    (header() + WHOLE, "2 headers in 1 segment(s)"),
    (header() + end(loss=None), "no validation"),
    (BEGIN + val(2, 20.0) + end(steps=2, loss=7.25), "last validation at step 2 of 3"),
    (BEGIN + val(3, 30.0), "no end line"),
    (WHOLE + end(), "2 end lines in one log"),
    (BEGIN + val(3, 30.0) + end("interrupted"), "ended with status interrupted"),
    (BEGIN + val(3, 30.0) + end(loss=6.5), "another val_loss than the last validation"),
    (BEGIN + val(2, 20.0, 2) + val(3, 30.0) + end(), "step 2 of 2 follows step 0 of 3"),
])  # fmt: skip
def test_a_run_that_did_not_finish_or_was_edited_says_why(content, reason):
    (run,) = read(content)
    assert reason in str(run.unfinished)
    assert not run.counts


# ---- Runs in segments


def begin_again(after_step: int, number: int = 2) -> bytes:
    """The head of a later segment."""
    more = {"segment": number, "after_step": after_step, "previous_sha256": "ab"}
    return header(**more) + resume(after_step) + SETUP


SAVED = header() + SETUP + val(0, 0.0) + ONE + end("interrupted", 1, None)
REST = step(2, 30.0) + step(3, 40.0) + val(3, 40.0) + end()


def test_a_run_stopped_at_a_checkpoint_and_resumed_in_another_file_is_one_run_that_counts(tmp_path):
    run = read_segments(tmp_path, SAVED, begin_again(1) + REST)
    assert steps_of(run) == [(1, 10.0), (2, 30.0), (3, 40.0)]
    assert (run.unfinished, run.counts, run.end["status"]) == (None, True, "done")
    assert run.resumed == "resumed at step 1 (0 ms of lost work on the clock)"
    assert [segment.path.name for segment in run.segments] == ["run.jsonl", "run.2.jsonl"]
    assert run.segments[0].sha256 == sha256(SAVED).hexdigest()
    assert find_runs([tmp_path]) == find_runs([tmp_path / "run.2.jsonl"]) == [run.path]
    assert read_runs(tmp_path / "run.2.jsonl")[0] == run
    for path in (tmp_path / "run.jsonl", tmp_path / "run.2.jsonl"):
        path.rename(tmp_path / path.name.replace("run", "small_s0"))
    (tmp_path / "registry_2.jsonl").write_text("a second folder's, torn\n")
    (once,) = finished_runs(tmp_path)  # not by segment, and no registry
    assert once.end["status"] == "done"


def test_steps_that_were_done_twice_are_those_of_the_later_segment_and_do_not_count(tmp_path):
    killed = header() + SETUP + val(0, 0.0) + ONE + TWO + val(2, 20.0) + b'{"event": "step", "st'
    lost = line("phase", name="lost", timed=True, ms=10.5)
    run = read_segments(tmp_path, killed, begin_again(1) + lost + REST)
    assert steps_of(run) == [(1, 10.0), (2, 30.0), (3, 40.0)]
    assert [validation.step for validation in run.validations] == [0, 3]
    assert (run.complete, run.counts) == (True, False)
    assert "steps after 1 were done twice" in str(run.left_out)
    assert run.resumed == "resumed at step 1 (10 ms of lost work on the clock)"


@pytest.mark.parametrize(("before", "counts"), [
    (SAVED, True),
    (SAVED.replace(b"interrupted", b"error"), False),
    (SAVED.replace(b'"steps": 1', b'"steps": 2'), False),
    (SAVED[: -len(end("interrupted", 1, None))], False),  # killed: it may have done more
    (header() + SETUP + val(0, 0.0) + ONE + val(1, 10.0) + end("interrupted", 2, None), False),
])  # fmt: skip
def test_a_resumed_run_counts_only_after_a_saved_stop_at_the_very_step(tmp_path, before, counts):
    assert read_segments(tmp_path, before, begin_again(1) + REST).counts is counts


# ---- The public text logs


def test_a_public_log_is_read_whole():
    (run,) = read(LOG)
    assert run.validations == [
        Validation(0, 10.8258, 0.0), Validation(50, 4.0, 3000.0), Validation(100, 3.2784, 6009.0),
    ]  # fmt: skip
    assert (run.run_id, run.total_steps, run.counts) == ("run", 100, True)
    assert (run.header, run.track, run.target, run.seed) == ({}, None, None, None)
    assert run.env == {
        "gpu": "NVIDIA H100 80GB HBM3", "gpu_count": 2, "torch": "2.9.0.dev2025+cu126",
    }  # fmt: skip


def test_llm_c_logs_declare_no_total_and_no_times():
    text = "s:0 tel:10.9688\ns:0 trl:10.9656 lr:0.000001\ns:1 trl:10.8140\ns:2 tel:3.275959\n"
    (run,) = read(text, "main.log")
    assert (run.final_loss, run.train_time_ms) == (3.275959, None)
    assert run.unfinished == "declares no total number of steps"


def test_a_step_0_begins_another_run_of_the_file():
    other = "step:0/9 val_loss:10.8 train_time:0.5s\nstep:9/9 val_loss:3.2 train_time:9.5s\n"
    head = f"{SOURCE}{RULE}\n"
    runs = read(f"{head}{LINES}trial:2\n{other}step:0/9 val_loss:4\n")
    assert [(run.index, run.run_id, run.total_steps, run.final_loss) for run in runs] == [
        (0, "run#0", 100, 3.2784), (1, "run#1", 9, 3.2), (2, "run#2", 9, 4)]  # fmt: skip
    assert [run.complete for run in runs] == [True, True, False]
    assert len({run.source for run in runs}) == 1


def test_the_source_is_what_precedes_the_environment():
    for head in (f"{SOURCE}{RULE}\n", f"{RULE}\n{SOURCE}{RULE}\n"):
        for text in (head + SMI + LINES, (head + SMI + LINES).replace("\n", "\r\n")):
            (run,) = read(text)
            assert run.source == sha256(head.encode()).hexdigest()
            assert (run.final_loss, run.complete) == (3.2784, True)
            assert run.validations[0].step == 0, "no line of the source counts"
    assert read(LINES)[0].source is None


@pytest.mark.parametrize("prefix", [
    "[default0]:", " 0: ", "[pod/speedrun-0/trainer] 2026-05-01T12:00:00.123456789Z ",
])  # fmt: skip
def test_prefixes_of_torchrun_srun_and_kubectl_are_read_over(prefix):
    lines = [f"{prefix}{line}\n" for line in LOG.splitlines()]
    other = prefix.replace("0: ", "1: ").replace("t0]", "t1]").replace("run-0", "run-1")
    if other != prefix:  # ranks that repeat the lines
        lines += [f"{other}{line}\n" for line in LINES.splitlines()]
    (run,), (plain,) = read("".join(["launched\n", *lines])), read(LOG)
    assert (run.source, run.env, run.validations) == (plain.source, plain.env, plain.validations)
    assert run.complete


@pytest.mark.parametrize(("text", "seed"), [
    ("Using seed=3", 3), ("trial:1/10 seed:1337", 1337), ("Namespace(steps=9, seed=5)", 5),
    ('{"seed": 7}', 7), ("torchrun train.py --seed=4", 4),
    ("data_seed=3", None), ("data-seed=3", None), ("seed=0.5", None), ("seed=none", None),
])  # fmt: skip
def test_the_seed_of_a_text_log_is_read_from_the_lines_before_its_first_step(text, seed):
    (run,) = read(f"seed=9\n{RULE}\n{SMI}{text}\n{LINES}")
    assert run.seed == seed, "the 9 is part of the source"


def test_a_second_loss_in_a_line_is_named_and_never_taken_for_val_loss():
    for also in ("val_ema_loss:3.1 val_avg_loss:3.2", "val_avg_loss:3.2 x:1 val_ema_loss:3.1"):
        first, second = also.split()[0], also.split()[-1]
        text = f"step:0/9 val_loss:10.8\nstep:9/9 {first} val_loss:3.3 {second} train_time:1s\n"
        (run,) = read(text)
        assert (run.final_loss, run.other_losses) == (3.3, ("val_avg_loss", "val_ema_loss"))


UNKNOWN = "".join(f"node7 | out | {line}\n" for line in LINES.splitlines())


@pytest.mark.parametrize(("text", "rule"), [
    (f"{LINES}step:9/9 val_loss:3.2.1\n", "line 6: could not convert string to float: '3.2.1'"),
    (f"{LINES}step:9/9 val_loss:3.2 val_loss:3.1\n", "line 6: .* has two val_loss"),
    (f"{LINES}step:9/9 val_loss:3.2 train_time:5h\n", "line 6: could not convert .*: '5h'"),
    (UNKNOWN, r"is no run log: its step lines begin with 'node7 \| out \| '"),
])  # fmt: skip
def test_a_malformed_text_log_is_an_error_that_names_file_line_and_value(text, rule):
    with pytest.raises(LogError, match=rf"run\.txt.* {rule}"):
        read(text)


def test_a_text_log_cut_at_any_byte_is_complete_only_with_its_last_loss_and_time():
    needed = LOG.index("train_time:6009ms") + len("train_time:6009ms")
    whole = read(LOG)[0]
    for length in range(LOG.index("step:1/100"), len(LOG)):
        (run,) = read(LOG[:length])
        assert run.validations == whole.validations[: len(run.validations)], "a number cut short"
        assert not run.complete or length >= needed


# ---- Files


FILES = {"run.jsonl": WHOLE, "run.txt": LOG.encode()}
PIECES = [b"step:0/9 ", b"val_loss:", b"\n", b"\r", b"=" * 100, b"9" * 30, b"\0", b"nan", b"-"]


@given(st.sampled_from(list(FILES)), st.binary(max_size=60) | st.sampled_from(PIECES),
       st.integers(0, 1800), st.integers(0, 300))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_bytes_of_any_kind_give_runs_or_a_log_error(name, inserted, position, removed):
    content = FILES[name][:position] + inserted + FILES[name][position + removed :]
    try:
        names: Iterable[str] = [run.path.name for run in read(content, name)]
    except LogError as error:
        names = [str(error)]
    assert all(name in said for said in names)


def test_what_cannot_be_read_is_named_and_the_rest_goes_on(tmp_path):
    write(LOG, tmp_path / "good.txt")
    write(WHOLE, tmp_path / "good.jsonl")
    marker = tmp_path / "executed"
    exploit = type("Exploit", (), {"__reduce__": lambda self: (Path.touch, (marker,))})()
    bad = {
        "empty.txt": b"", "notes.out": b"see README\n", "binary.log": bytes(range(256)),
        "pickle.txt": pickle.dumps(exploit), "utf16.stdout": LOG.encode("utf-16"),
        "deep.txt": b"[" * 90_000, "deep.jsonl": b"[" * 90_000 + b"\n{}",
    }  # fmt: skip
    for name, content in bad.items():
        write(content, tmp_path / name)
    os.mkfifo(tmp_path / "pipe.txt")
    runs, errors = read_all([tmp_path])
    assert sorted(run.path.name for run in runs) == ["good.jsonl", "good.txt"]
    named = [name for name in (*bad, "pipe.txt")
             if any(f"{tmp_path / name}" in str(error) for error in errors)]  # fmt: skip
    assert named == [*bad, "pipe.txt"]
    assert len(errors) == len(named)
    assert not marker.exists()


def test_a_folder_is_read_without_subfolders_and_registry_and_each_log_once(tmp_path):
    path = write(WHOLE, tmp_path / "run.jsonl")
    write(WHOLE, tmp_path / "sub" / "other.jsonl")
    names: Sequence[str] = [f"a{suffix}" for suffix in (".log", ".out", ".stdout", ".txt")]
    texts = [write(LOG, tmp_path / name) for name in names]
    for name in ("registry.jsonl", "registry-old.txt", "README.md", "picture.png"):
        write("{}\n", tmp_path / name)
    (tmp_path / "again.txt").symlink_to(texts[-1])
    assert find_runs([tmp_path, path, tmp_path / "sub" / ".." / "run.jsonl"]) == [*texts, path]
    (tmp_path / "none").mkdir()
    with pytest.raises(LogError, match=r"no run logs \(\*.jsonl, .* in .*none"):
        find_runs([tmp_path / "none"])


@pytest.mark.parametrize("hostile", [
    "=" * 300_000, "step:1/2 " + "val_los " * 40_000, "\n" * 240_000, "Running on " * 30_000,
    "[a] 0: " * 30_000, "seed=" * 50_000,
], ids=range(6))  # fmt: skip
def test_a_line_made_to_stall_a_pattern_does_not(hostile):
    """Quadratic time would take minutes here."""
    assert read(f"{hostile}\n{LINES}")[-1].final_loss == 3.2784
    with contextlib.suppress(LogError):  # where no line is a step line, prefixes are looked for
        read(hostile)
