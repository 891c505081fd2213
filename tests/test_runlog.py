"""The parser takes from a log what is there and no more: a torn, mixed or foreign one is named, never a number."""

import os
import pickle
import tempfile
from decimal import Decimal
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.jsonl import json_line
from runtime.log import SCHEMA, RunLog
from claims import runlog
from claims.runlog import LogError, Phase, Resume, Run, Step, Validation, find_runs, read_all, read_run, read_runs

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
Fri Sep  5 16:26:47 2025       
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:53:00.0 Off |                    0 |
| N/A   38C    P0            115W /  700W |    5954MiB /  81559MiB |      0%      Default |
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:64:00.0 Off |                    0 |
|    0   N/A  N/A           62249      C   /usr/bin/python3                       1510MiB |
"""  # noqa: W291
LINES = """\
step:0/100 val_loss:10.8258 train_time:0ms step_avg:0.03ms
step:1/100 train_time:67ms step_avg:66.96ms
step:50/100 val_loss:4.0000 train_time:3000ms step_avg:60.00ms
step:100/100 train_time:6001ms step_avg:60.01ms
step:100/100 val_loss:3.2784 train_time:6009ms step_avg:60.09ms
"""
SCRATCH = tempfile.TemporaryDirectory()
LOG = f"{SOURCE}\n{RULE}\n{SMI}\n{RULE}\n{LINES}peak memory allocated: 31286 MiB reserved: 46920 MiB\n"


def write_json(folder: Path, run_id: str = "run", losses: dict[int, float] | None = None, *, seed: int = 0) -> Path:
    """A complete log as the trainer writes it, with validation losses by step."""
    losses = losses or {50: 4.0, 100: 3.2}
    log = RunLog(folder, run_id)
    log.write("header", schema=SCHEMA, run_id=run_id, track="short", target=3.28, seed=seed, trial=0, claim=None,
              source_sha256="source", config_sha256="config", config={}, env={"gpu_count": 8, "gpu": "H100"})
    log.write("phase", name="warmup", timed=False, ms=1.5)
    for step, loss in losses.items():
        log.write("step", step=step, train_time_ms=step * 2.0, window=384, stage=1, skipped=True, train_loss=None)
        log.write("val", step=step, total_steps=max(losses), val_loss=loss, train_time_ms=step * 2.0)
    log.write("end", status="done", steps=max(losses), val_loss=loss, peak_mib=12.5)
    log.close()
    return log.path


def write(folder: Path, content: str | bytes, name: str = "run.txt") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(content: str | bytes, name: str = "run.txt") -> list[Run]:
    """The runs in a file of this content, their steps read."""
    runs = read_runs(write(Path(SCRATCH.name), content, name))
    assert all(isinstance(run.steps, list) for run in runs)
    return runs


# ---- JSON lines

@given(st.dictionaries(st.integers(1, 10**6), st.floats(), min_size=1, max_size=5), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_what_the_writer_wrote_the_parser_reads(losses, seed):
    losses = dict(sorted(losses.items()))
    path = write_json(Path(SCRATCH.name), "20261121-083105_tiny_s0_t0_1a2b3c", losses, seed=seed)
    run, total = read_run(path), max(losses)
    assert run.steps == [Step(step, step * 2.0, 384, 1, True, None) for step in losses]
    path.unlink()
    assert [step for step, _ in run.losses] == list(losses)
    assert [str(loss) for _, loss in run.losses] == [str(loss) for loss in losses.values()], "nan is nan"
    assert [validation.printed for validation in run.validations] == [str(loss) for loss in losses.values()]
    assert (run.seed, run.target, run.gpu_count, run.total_steps, run.index) == (seed, 3.28, 8, total, 0)
    assert (run.dialect, run.track, run.trial) == ("jsonl", "short", 0)
    assert (run.source, run.config_sha256, run.header["claim"]) == ("source", "config", None)
    assert (run.complete, run.status, run.peak_mib, run.env["gpu"]) == (True, "done", 12.5, "H100")
    assert (run.train_time_ms, run.started) == (total * 2.0, "2026-11-21T08:31:05+00:00")
    assert [phase[:3] for phase in run.phases] == [Phase("warmup", False, 1.5, 0.0)[:3]]


def test_a_json_log_cut_at_any_byte_is_unfinished(tmp_path):
    content = write_json(tmp_path).read_bytes()
    whole_lines = content.split(b"\n")
    for length in range(len(content) - 1):
        tail = content[:length].rpartition(b"\n")[2]
        reasons = {"torn last line"} if tail not in whole_lines else {"no header", "no end line"}
        assert read(content[:length], "cut.jsonl")[0].unfinished in reasons, tail


@pytest.mark.parametrize("garbage", [
    b"step:5/10 val_loss:3.1", b"", b"[1]", b"{}", b'{"event": 3}', b"\xff\xfe", b"\0\0", b'{"event": "x"} {}',
    b'{"event": "x", "y": NaN}', b'{"event": "x", "y": ' + b"[" * 100_000, b'{"event": "x", "y": ' + b"9" * 5000 + b"}",
], ids=range(11))
def test_garbage_before_the_last_line_is_an_error_that_names_file_line_and_rule(tmp_path, garbage):
    first, rest = write_json(tmp_path).read_bytes().split(b"\n", 1)
    with pytest.raises(LogError, match=r"run\.jsonl, line 2: every line must be one JSON object"):
        read(b"\n".join([first, garbage, rest]), "run.jsonl")


@pytest.mark.parametrize(("old", "new", "rule"), [
    ('"schema": 1', '"schema": 2', "schema 2, but this tool reads 1"),
    ('"seed": 0', '"seed": "0"', "seed must be an integer of at least 0, not '0'"),
    ('"gpu_count": 8', '"gpu_count": null', "gpu_count must be an integer"),
    ('"env": {', '"env": 1, "other": {', "env must be an object, not 1"),
    ('"source_sha256": "source", ', "", "source_sha256 must be a string, not None"),
    ('"run_id": "run"', r'"run_id": "\ud800"', "run_id must be a string"),
    ('"timed": false', '"timed": 0', "timed must be true or false, not 0"),
    ('"val_loss": 3.2, "train', '"val_loss": "low", "train', "line 6: val_loss must be a number, not 'low'"),
    ('"val_loss": 3.2, "train', '"val_loss": true, "train', "val_loss must be a number, not True"),
    ('"val_loss": 3.2, "train', '"val_loss": 1e999, "train', "val_loss must be a number, not inf"),
    ('"total_steps": 100, "val_loss": 3.2', '"total_steps": -1, "val_loss": 3.2', "total_steps must be an integer"),
    ('"window": 384', '"window": 3.5', "window must be an integer"),
])
def test_a_field_that_breaks_its_rule_is_an_error_that_names_it(tmp_path, old, new, rule):
    content = write_json(tmp_path).read_text()
    assert old in content
    with pytest.raises(LogError, match=rule):
        read(content.replace(old, new), "run.jsonl")


def test_unknown_events_and_fields_are_ignored(tmp_path):
    path = write_json(tmp_path)
    expected = read_run(path)
    path.write_text('{"event": "telemetry", "schema": 9, "val_loss": []}\n' + path.read_text())
    assert read_run(path) == expected


def without(word: str):
    return lambda lines: [line for line in lines if word not in line]


def replacing(old: str, new: str):
    return lambda lines: [line.replace(old, new) for line in lines]


@pytest.mark.parametrize(("change", "reason"), [
    (lambda lines: [], "no header"),
    (without('"header"'), "no header"),
    (lambda lines: [*without('"val_loss"')(lines), '{"event": "end", "status": "done"}\n'], "no validation"),
    (lambda lines: without('"step": 100')(replacing('3.2, "p', '4.0, "p')(lines)), "last validation at step 50 of 100"),
    (without('"end"'), "no end line"),
    (replacing('"done"', '"interrupted"'), "ended with status interrupted"),
    (lambda lines: lines + [lines[0]], "2 headers in one log"),
    (lambda lines: lines + [lines[-1]], "2 end lines in one log"),
    (replacing('"val_loss": 3.2, "train', '"val_loss": 3.1, "train'), "another val_loss than the last validation"),
    (replacing('"step": 50, "total', '"step": 100, "total'), "two validations at step 100"),
    (replacing('"step": 50, "total', '"step": 101, "total'), "step 100 of 100 follows step 101 of 100"),
    (replacing('"step": 50, "total_steps": 100', '"step": 50, "total_steps": 99'), "of 100 follows step 50 of 99"),
    (replacing('4.0, "train_time_ms": 100.0', '4.0, "train_time_ms": 900.0'), "less train time at step 100 than at"),
    (replacing('"total_steps": 100', '"total_steps": 99'), "step 100 of 99"),
])
def test_a_run_that_did_not_finish_or_was_edited_says_why(tmp_path, change, reason):
    lines = write_json(tmp_path).read_text().splitlines(keepends=True)
    (run,) = read("".join(change(lines)), "run.jsonl")
    assert reason in run.unfinished


# ---- Runs that were resumed


def line(event: str, **fields: object) -> bytes:
    return json_line({"event": event, "t_ms": 1.5, **fields})


def step_line(step: int, ms: float) -> bytes:
    return line("step", step=step, train_time_ms=ms, window=384, stage=0, skipped=False, train_loss=9.0 - step)


def val_line(step: int, ms: float) -> bytes:
    return line("val", step=step, total_steps=3, val_loss=9.25 - step, train_time_ms=ms)


def resume_line(from_step: int, log_offset: object) -> bytes:
    return line("resume", from_step=from_step, checkpoint=f"step_{from_step:06d}", differences=[],
                log_offset=log_offset, registry_sha256="ab")


HEAD = line("header", schema=SCHEMA, run_id="run", track="short", target=3.28, seed=0, trial=0, claim=None,
            source_sha256="source", config_sha256="config", config={}, env={"gpu_count": 8})
HEAD += val_line(0, 0.0)
ONE = HEAD + step_line(1, 10.0)
TORN = ONE + step_line(2, 20.0) + val_line(2, 20.0) + b'{"event": "step", "st\n'
REST = step_line(2, 30.0) + step_line(3, 40.0) + val_line(3, 40.0)
DONE = line("end", status="done", val_loss=6.25, peak_mib=None)


def test_what_a_resume_supersedes_is_no_part_of_the_run_and_is_told_apart():
    before = TORN + line("end", status="interrupted", val_loss=None, peak_mib=None)
    lost = line("phase", name="lost", timed=True, ms=10.5)
    (run,) = read(before + resume_line(1, len(ONE)) + lost + REST + DONE, "run.jsonl")
    assert (run.unfinished, run.status, run.train_time_ms) == (None, "done", 40.0)
    assert [(step.step, step.train_time_ms) for step in run.steps] == [(1, 10.0), (2, 30.0), (3, 40.0)]
    assert [validation.step for validation in run.validations] == [0, 3]
    again = Step(2, 20.0, 384, 0, False, 7.0), Validation(2, 7.25, 20.0, "7.25")
    assert run.resumes == [Resume(1, "step_000001", [], 1.5, "ab", True, [again[0]], [again[1]])]
    assert run.resumed == "resumed at step 1 (10 ms of lost work on the clock)"


def test_a_log_is_unfinished_until_the_resumed_run_ends():
    (run,) = read(TORN + resume_line(1, len(ONE)) + REST, "run.jsonl")
    assert run.unfinished == "no end line"
    (run,) = read(TORN + DONE + resume_line(1, len(ONE)) + REST, "run.jsonl")
    assert (run.unfinished, run.status) == ("no end line", None)


def test_a_torn_line_is_an_error_unless_it_is_superseded():
    with pytest.raises(LogError, match="line 6: every line must be one JSON object"):
        read(TORN + REST + DONE, "run.jsonl")
    with pytest.raises(LogError, match="line 6: every line must be one JSON object"):
        read(TORN + resume_line(2, len(TORN)) + REST[len(step_line(2, 30.0)) :] + DONE, "run.jsonl")


def test_a_resume_from_further_back_supersedes_one_before_it():
    twice = TORN + resume_line(1, len(ONE)) + step_line(2, 25.0)
    (run,) = read(twice + resume_line(0, len(HEAD)) + step_line(1, 27.0) + REST + DONE, "run.jsonl")
    assert [(step.step, step.train_time_ms) for step in run.steps] == [(1, 27.0), (2, 30.0), (3, 40.0)]
    assert [(resume.from_step, resume.stands) for resume in run.resumes] == [(1, False), (0, True)]
    assert [[step.train_time_ms for step in resume.redone] for resume in run.resumes] == [[20.0], [10.0, 25.0]]


def test_a_resume_from_what_one_before_it_gave_up_takes_that_back():
    saved = TORN[: TORN.index(b'{"event": "step", "st\n')]
    content = TORN + resume_line(1, len(ONE)) + step_line(2, 25.0) + resume_line(2, len(saved)) + step_line(3, 40.0)
    (run,) = read(content + val_line(3, 40.0) + DONE, "run.jsonl")
    assert [(step.step, step.train_time_ms) for step in run.steps] == [(1, 10.0), (2, 20.0), (3, 40.0)]
    assert [validation.step for validation in run.validations] == [0, 2, 3]
    assert [resume.stands for resume in run.resumes] == [False, True]


@pytest.mark.parametrize("offset", [1, len(ONE) - 1, len(ONE) + 1, len(TORN) + 1, 10**9, -1, 1.0, None, "0", True])
def test_an_offset_that_is_no_beginning_of_an_earlier_line_is_refused(offset):
    with pytest.raises(LogError, match="line 7: log_offset "):
        read(TORN + resume_line(1, offset) + REST + DONE, "run.jsonl")


def test_an_offset_where_a_later_line_begins_is_refused():
    later = len(TORN + resume_line(1, 999))
    content = TORN + resume_line(1, later) + REST + DONE
    assert content[later - 1 :].startswith(b'\n{"event": "step"')
    with pytest.raises(LogError, match=f"line 7: log_offset {later} "):
        read(content, "run.jsonl")


@pytest.mark.parametrize(("name", "value"), [
    ("from_step", -1), ("checkpoint", 3), ("differences", "none"), ("differences", [1]), ("registry_sha256", None),
    ("t_ms", "x")])  # fmt: skip
def test_a_resume_with_a_field_of_the_wrong_type_is_refused(name, value):
    with pytest.raises(LogError, match=f"line 7: {name} must be "):
        read(TORN + resume_line(1, len(ONE)).replace(b"}", b', "%s": %s}' % (name.encode(), json_line(value)[:-1]))
             + REST, "run.jsonl")  # fmt: skip


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["step", "save", "kill", "tear", "resume an older one"]), max_size=25))
def test_steps_are_those_of_a_model_that_keeps_a_copy_at_each_checkpoint(acts):
    """The real log, killed and resumed at random; the model never looks at bytes."""
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog(folder, "run")
        log.begin({"track": "short", "target": 3.28, "seed": 0, "trial": 0, "source_sha256": "", "config_sha256": "",
                   "config": {}, "env": {"gpu_count": 1}})  # fmt: skip
        done: list[tuple[int, float]] = []
        saved, clock = [(log.offset, list(done))], 0.0
        for act in acts:
            if act == "step":
                clock += 1.0
                done.append((len(done) + 1, clock))
                log.write("step", step=len(done), train_time_ms=clock, window=1, stage=0, skipped=False, train_loss=0.5)
            elif act == "save":
                saved.append((log.offset, list(done)))
            else:
                log.close()
                if act == "tear":
                    log.path.write_bytes(log.path.read_bytes() + b'{"event": "')
                offset, kept = saved[-1 if act != "resume an older one" else len(saved) // 2]
                done = list(kept)
                log = RunLog.reopen(folder, "run")
                log.resume(from_step=len(done), checkpoint=None, differences=[], log_offset=offset)
        log.close()
        run = read_run(log.path)
        assert [(step.step, step.train_time_ms) for step in run.steps] == done
        assert len(run.resumes) == len([act for act in acts if act not in ("step", "save")])


# ---- Text: the grammars of the public logs


def test_a_public_log_is_read_whole():
    (run,) = read(LOG)
    assert run.validations == [Validation(0, 10.8258, 0.0, "10.8258"), Validation(50, 4.0, 3000.0, "4.0000"),
                               Validation(100, 3.2784, 6009.0, "3.2784")]
    assert (run.final_loss, run.validations[1].exact, run.train_time_ms) == (3.2784, Decimal("4.0000"), 6009.0)
    assert (run.dialect, run.run_id, run.total_steps, run.complete, run.peak_mib) == ("step", "run", 100, True, 31286)
    assert (run.header, run.track, run.target, run.seed, run.status) == ({}, None, None, None, None)
    assert run.started == "2025-09-05T16:26:47"
    assert run.gpu_count == 2
    assert run.env == {
        "gpu": "NVIDIA H100 80GB HBM3", "gpu_count": 2, "bus_ids": ["00000000:53:00.0", "00000000:64:00.0"],
        "driver": "550.54.15", "cuda": "12.6", "torch": "2.9.0.dev2025+cu126", "triton": "3.4.0", "python": "3.12.7"}


@pytest.mark.parametrize(("line", "loss", "time_ms"), [
    ("step:9/9 val_loss:3.2741 train_time:910546ms step_avg:178.89ms", "3.2741", 910546),
    ("step:9/9 val_loss:3.273600 train_time:910546.25ms step_avg:nanms", "3.273600", 910546.25),
    ("step:9/9 val_loss:3.27654 train_time:477.691s step_avg:147.10ms", "3.27654", 477691),
    ("step:9/9 val_loss:3.27654 train_time:1.10512s", "3.27654", 1105.12),
    ("step:9/9 beta:0.3 x_val_loss:9.1 val_loss:3.2 mode:none train_time:2s ema_val_loss:9.2 r:1e-03", "3.2", 2000),
    ("step:9/9 train_time:12ms val_loss:nan", "nan", 12),
    ("step:9/9 train_time:12ms val_loss:inf", "inf", 12),
    ("step:9/9 val_loss:3", "3", None),
])
def test_every_way_to_print_a_validation_is_read_to_the_digit(line, loss, time_ms):
    for end in ("\n", "\r\n"):
        first = ("step:0/9 val_loss:10.8", "step:1/9 train_loss:9.5 train_time:7.5ms step_avg:nanms")
        (run,) = read("".join(text + end for text in (*first, line)))
        assert (run.validations[-1].printed, run.train_time_ms, run.unfinished) == (loss, time_ms, None)
        assert str(run.final_loss) == str(float(loss))
        assert run.steps == [Step(1, 7.5, train_loss=9.5)]


def test_llm_c_logs_declare_no_total_and_no_times():
    (run,) = read("s:0 tel:10.9688\ns:0 trl:10.9656 lr:0.000001\ns:1 trl:10.8140\ns:2 tel:3.275959\n", "main.log")
    assert (run.dialect, run.final_loss, run.train_time_ms, run.total_steps) == ("llm.c", 3.275959, None, None)
    assert run.unfinished == "declares no total number of steps"
    assert run.steps == [Step(1, None, train_loss=10.9656), Step(2, None, train_loss=10.8140)]


@pytest.mark.parametrize(("block", "expected"), [
    ("Running pytorch 2.4.1+cu121 compiled for CUDA 12.1\nnvidia-smi:\nMon Oct 14 05:01:30 2024\n"
     "| NVIDIA-SMI 535.129.03             Driver Version: 535.129.03   CUDA Version: 12.2     |\n"
     "|   0  NVIDIA H100 80GB HBM3          On  | 00000000:61:00.0 Off |                    0 |\n",
     {"torch": "2.4.1+cu121", "cuda": "12.1", "driver": "535.129.03", "gpu": "NVIDIA H100 80GB HBM3", "gpu_count": 1,
      "bus_ids": ["00000000:61:00.0"]}),
    ("Running PyTorch 2.11.0+cu128 compiled for CUDA 12.8 on NVIDIA H800           with world_size 8\n",
     {"torch": "2.11.0+cu128", "cuda": "12.8", "gpu": "NVIDIA H800", "gpu_count": 8}),
    ("Running on device_name=NVIDIA GH200 120GB with world_size=4\n", {"gpu": "NVIDIA GH200 120GB", "gpu_count": 4}),
    ("GPU 0: NVIDIA H200 (UUID: GPU-b801)\nGPU 1: NVIDIA A40 (UUID: GPU-a38a)\n",
     {"gpu": "NVIDIA A40 + NVIDIA H200", "gpu_count": 2}),
    ("GPU Name                      Temp  Power\n0   NVIDIA H100 80GB HBM3     35    117        6340\n",
     {"gpu": "NVIDIA H100 80GB HBM3", "gpu_count": 1}),
    ("nothing known\n", {}),
], ids=range(6))
def test_every_way_to_print_the_environment_is_read(block, expected):
    (run,) = read(f"{SOURCE}{RULE}\n{block}{RULE}\n{LINES}")
    assert (run.env, run.gpu_count) == (expected, expected.get("gpu_count"))


def test_peak_memory_is_read_where_it_is_whole():
    for line, mib in (("consumption: 342 MiB", 342), ("allocated: 336 MiB reserved: 8 MiB", 336), ("x: 3 M", None)):
        assert read(f"{LINES}peak memory {line}")[0].peak_mib == mib


def test_a_step_0_begins_another_run_of_the_file():
    seconds = "".join(f"step:{step}/9 val_loss:{loss} train_time:{step}.5s\n" for step, loss in ((0, 10.8), (9, 3.2)))
    head = f"{SOURCE}{RULE}\nFri Sep  5 16:26:47 2025\n{RULE}\n"
    text = f"{head}{LINES}trial:2\n{seconds}peak memory consumption: 5 MiB\nstep:0/9 val_loss:10.8 train_time:0.5s\n"
    runs = read(text + "step:1/9 train_time:0.6s\nstep:0/9 train_time:0s\nstep:0/9 val_loss:4\nstep:0/9 val_loss:5\n")
    assert [(run.index, run.run_id, run.total_steps, run.final_loss) for run in runs] == [
        (0, "run#0", 100, 3.2784), (1, "run#1", 9, 3.2), (2, "run#2", 9, 10.8), (3, "run#3", 9, 4), (4, "run#4", 9, 5)]
    assert [run.complete for run in runs] == [True, True, False, False, False]
    assert [run.peak_mib for run in runs] == [None, 5, None, None, None]
    assert [run.started for run in runs] == ["2025-09-05T16:26:47", None, None, None, None]
    assert len({run.source for run in runs}) == 1
    assert runs[2].steps == [Step(1, 600.0)]
    with pytest.raises(LogError, match="holds 5 runs where one is needed"):
        read_run(runs[0].path)


# ---- Text: the source


def test_the_source_is_what_precedes_the_environment():
    for head in (f"{SOURCE}{RULE}\n", f"{RULE}\n{SOURCE}{RULE}\n", f"{SOURCE}{RULE}\r\n"):
        (run,) = read(head + SMI + LINES)
        assert run.source == sha256(head.encode()).hexdigest()
        assert run.validations[0].step == 0, "no line of the source counts"
    assert read(LINES)[0].source is None
    assert read(f"{SOURCE}{RULE}\nstep:9/9 val_loss:3.2\n")[0].complete, "it may validate at the end alone"
    assert read(LOG.replace("import torch", "import torch "))[0].source != read(LOG)[0].source


def test_a_log_whose_source_was_left_out_still_belongs_to_its_arm():
    for lead in ("", f"{RULE}\n"):
        (full,) = read(f"{lead}{SOURCE}{RULE}\n{SMI}{LINES}")
        (short,) = read(f"{lead}# source text left out; its sha256: {full.source}\n{RULE}\n{SMI}{LINES}")
        assert short == Run(**{name: getattr(full, name) for name in Run.__dataclass_fields__} | {"path": short.path})


def test_a_log_appended_to_another_has_a_source_of_its_own():
    other = LOG.replace("import torch", "import jax").replace("step:7/7 ", "")
    first, second = read(LOG + other)
    assert (first.source, second.source) == (read(LOG)[0].source, None)


# ---- Text: what must not pass


@pytest.mark.parametrize(("lines", "reason"), [
    ("step:0/9 val_loss:10.8\nstep:5/9 val_loss:4.0\nstep:9/9 train_time:3ms\n", "last validation at step 5 of 9"),
    ("step:0/9 train_time:3ms\n", "no validation"),
    ("step:0 val_loss:10.8\nstep:9 val_loss:3.2\n", "declares no total number of steps"),
    ("step:0/9 val_loss:10.8\nstep:9/9 val_loss:3.3\nstep:9/9 val_loss:3.2\n", "two validations at step 9"),
    ("step:3/9 val_loss:10.8\nstep:9/9 val_loss:3.3\nstep:3/9 val_loss:3\n", "step 3 of 9 follows step 9 of 9"),
    ("step:0/8 val_loss:10.8\nstep:9/9 val_loss:3.3\n", "step 9 of 9 follows step 0 of 8"),
    ("step:0/9 val_loss:10.8\nstep:9/9 val_loss:3.3\nstep:10/9 train_time:3ms\n", "step 10 of 9"),
    ("step:0/9 val_loss:9 train_time:5ms\nstep:9/9 val_loss:3 train_time:4ms\n",
     "less train time at step 9 than at step 0"),
    ("step:0/9 val_loss:9 train_time:5ms\nstep:9/9 val_loss:3.2\n", "less train time at step 9 than at step 0"),
    ("step:8/9 val_loss:3.3\nstep:9/9 val_loss:3.2\n", "begins at step 8 of 9"),
])
def test_a_text_run_that_cannot_stand_in_a_claim_says_why(lines, reason):
    assert read(lines)[0].unfinished == reason


@pytest.mark.parametrize(("line", "rule"), [
    ("step:9/9 val_loss:1e400", "a loss must be a number, not '1e400'"),
    ("step:9/9 val_loss:٣", "a loss must be a number"),
    ("step:9/9 val_loss:", "a loss must be a number, not ''"),
    ("step:9/9 val_loss:3.2.1", "a loss must be a number, not '3.2.1'"),
    ("step:9/9 val_loss:0x3", "a loss must be a number"),
    ("step:9/9 val_loss:3_2", "a loss must be a number"),
    ("step:-9/9 val_loss:3.2", "is no step:N/TOTAL"),
    ("step:٣/9 val_loss:3.2", "is no step:N/TOTAL"),
    ("step:9.5/9 val_loss:3.2", "is no step:N/TOTAL"),
    ("step:" + "9" * 5000 + "/9 val_loss:3.2", "is no step:N/TOTAL"),
    ("s:x tel:3.2", "is no step:N/TOTAL"),
    ("step:9/9 val_loss:3.2 train_time:5", "train_time must be a number and ms or s, not '5'"),
    ("step:9/9 val_loss:3.2 train_time:-5ms", "train_time must be a number"),
])
def test_a_malformed_validation_is_an_error_that_names_file_line_and_value(line, rule):
    with pytest.raises(LogError, match=rf"run\.txt, line 6: .*{rule}"):
        read(f"{LINES}{line}\n")


def test_a_text_log_cut_at_any_byte_is_complete_only_with_its_last_loss_and_time():
    needed = LOG.index("train_time:6009ms") + len("train_time:6009ms")
    whole = read(LOG)[0]
    for length in range(LOG.index(LINES), len(LOG)):
        try:
            (run,) = read(LOG[:length])
        except LogError:
            assert length < LOG.index("step:1/100"), "not even a first line"
            continue
        assert run.validations == whole.validations[: len(run.validations)], "never a number that was cut short"
        assert not run.complete or length >= needed
    assert read(LOG[:-1])[0].complete


WHOLE = {"run.jsonl": write_json(Path(SCRATCH.name), "whole").read_bytes(), "run.txt": LOG.encode()}
PIECES = [b"step:0/9 ", b"val_loss:", b"\n", b"\r", b"=" * 100, b"9" * 30, b"\0", b"nan", b"-", b"{"]


@given(st.sampled_from(list(WHOLE)), st.binary(max_size=60) | st.sampled_from(PIECES), st.integers(0, 1800),
       st.integers(0, 300))
@settings(max_examples=400, deadline=None)
def test_bytes_of_any_kind_give_runs_or_a_log_error(name, inserted, position, removed):
    content = WHOLE[name][:position] + inserted + WHOLE[name][position + removed :]
    try:
        outcome = [run.path.name for run in read(content, name)]
    except LogError as error:
        outcome = [str(error)]
    assert outcome and all(name in part for part in outcome)  # noqa: PT018


# ---- Files


def test_what_cannot_be_read_is_named_and_the_rest_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(runlog, "MAX_BYTES", 100_000)
    write(tmp_path, LOG, "good.txt")
    write_json(tmp_path, "good")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    marker = tmp_path / "executed"
    exploit = pickle.dumps(type("Exploit", (), {"__reduce__": lambda self: (Path.touch, (marker,))})())
    bad = {"empty.txt": b"", "notes.out": b"see README\n", "binary.log": bytes(range(256)), "pickle.txt": exploit,
           "utf16.stdout": LOG.encode("utf-16"), "latin1.txt": LOG.replace("torch", "törch").encode("latin-1"),
           "nul.txt": LOG.encode().replace(b"torch", b"to\0ch"), "huge.txt": LOG.encode() * 90,
           "deep.txt": b"[" * 90_000, "deep.jsonl": b"[" * 90_000 + b"\n{}"}
    for name, content in bad.items():
        write(tmp_path, content, name)
    runs, errors = read_all([tmp_path])
    assert sorted(run.path.name for run in runs) == ["good.jsonl", "good.txt"]
    named = {name for name in os.listdir(tmp_path) if any(str(tmp_path / name) in str(error) for error in errors)}
    assert named == {*bad, "folder.txt", "loop.txt", "pipe.txt"}
    assert len(errors) == len(named)
    assert not marker.exists()
    for name in ("absent.txt", "loop.txt"):
        with pytest.raises(LogError, match=f"cannot read .*{name}"):
            read_run(tmp_path / name)


@pytest.mark.parametrize("line", [
    "=" * 300_000, "step:" * 60_000, "step:1/2 " + "val_los " * 40_000, "s:1 " * 60_000, "\n" * 300_000,
    "| 0 " + " a" * 50_000, "Running on " * 30_000, "GPU 0: " * 40_000,
], ids=range(8))
def test_a_line_made_to_stall_a_pattern_does_not(line):
    """Quadratic time would take minutes here."""
    assert read(f"{line}\n{LINES}")[-1].final_loss == 3.2784


def test_a_folder_is_read_without_subfolders_and_registry_and_each_log_once(tmp_path):
    path = write_json(tmp_path)
    write_json(tmp_path / "sub", "other")
    names = [f"a{suffix}" for suffix in (".log", ".out", ".stdout", ".txt")]
    texts = [write(tmp_path, LOG, name) for name in names]
    for name in ("registry.jsonl", "registry-old.txt", "README.md", "picture.png"):
        write(tmp_path, "{}\n", name)
    (tmp_path / "again.txt").symlink_to(texts[-1])
    assert find_runs([tmp_path, path, tmp_path / "sub" / ".." / "run.jsonl"]) == [*texts, path]
    with pytest.raises(LogError, match=r"absent\.txt does not exist"):
        find_runs([tmp_path, tmp_path / "absent.txt"])
    (tmp_path / "none").mkdir()
    with pytest.raises(LogError, match=r"no run logs \(\*.jsonl, .* in .*none"):
        find_runs([tmp_path / "none"])


def test_many_files_are_read_by_several_processes_in_the_same_order(tmp_path):
    losses = {f"{index:03}.txt": f"3.{index:04}" for index in range(runlog.POOL_FROM)}
    for name, loss in losses.items():
        write(tmp_path, LOG.replace("3.2784", loss), name)
    for name in ("000.txt", "050.txt"):
        write(tmp_path, "no log\n", name)
    runs, errors = read_all([tmp_path], processes=2)
    assert [(run.path.name, run.validations[-1].printed) for run in runs] == [
        (name, loss) for name, loss in losses.items() if name not in ("000.txt", "050.txt")]
    assert [str(error).split(" is ")[0] for error in errors] == [f"{tmp_path}/000.txt", f"{tmp_path}/050.txt"]
