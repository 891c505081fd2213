"""Read the text logs of the public NanoGPT speedruns.

    step:N/TOTAL val_loss:X train_time:Yms      after the source and the environment, between lines
                                                of 100 "="; each step 0 begins another run
    s:N tel:X                                   llm.c: no times, no total, no source
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from claims.runs import Run, Step, Validation, why_unfinished
from runtime.errors import LogError

RULE = "=" * 100
NUMBER = re.compile(r"s(?:tep)?:([0-9]{1,9})(?:/([0-9]{1,9}))?")
TIMED = re.compile(r"(?:train_time|step_avg):(?:nan|[0-9.]+)m?s")
TORCH = re.compile(r"Running [Pp]y[Tt]orch (\S+)")
GPUS = re.compile(r"Running (?:.* )?on (?:device_name=)?(\S.*?) +with world_size[ =]([0-9]{1,6})")
BUS_ID = re.compile(r" +[0-9A-F]{8}:", re.IGNORECASE)
LONGEST_LINE = 300  # of the environment; a pattern may take quadratic time on a longer one


@dataclass
class Trace:
    """What the numbered lines of one run tell."""

    source: str | None
    numbers: list[tuple[int, int | None]] = field(default_factory=list)  # step and declared total
    validations: list[Validation] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def read_text(path: Path, data: bytes) -> list[Run]:
    """The runs in a text log. LogError if it is not text, has no step line or a bad one."""
    lines = decode(path, data)
    source, start = find_source(lines)
    traces = read_traces(path, lines, source, start)
    env = read_environment(lines[start:])
    runs = []
    for index, trace in enumerate(traces):
        runs.append(Run(
            path=path, index=index, source=trace.source, env=env, gpu_count=env.get("gpu_count"),
            run_id=path.stem if len(traces) == 1 else f"{path.stem}#{index}",
            total_steps=trace.numbers[-1][1], validations=trace.validations, steps=trace.steps,
            unfinished=why_unfinished(trace.numbers, trace.validations),
        ))  # fmt: skip
    return runs


def decode(path: Path, data: bytes) -> list[str]:
    """The lines of the text. A last line that may have been cut short is left out."""
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise LogError(f"{path} is not text in UTF-8: {error}. Convert it to UTF-8") from None
    if is_numbered(lines[-1]) and not TIMED.fullmatch(lines[-1].split()[-1]):
        lines.pop()
    return lines


def is_numbered(line: str) -> bool:
    return line.startswith(("step:", "s:"))


def is_rule(line: str) -> bool:
    return line.rstrip("\r") == RULE


def find_source(lines: Sequence[str]) -> tuple[str | None, int]:
    """SHA-256 of the source at the head of a log, rules included, and the index of what follows.

    The source ends at the first rule, or at the second where the log begins with one.
    """
    for index, line in enumerate(lines):
        if is_rule(line) and index > 0:
            text = "\n".join(lines[: index + 1]) + "\n"
            return hashlib.sha256(text.encode()).hexdigest(), index + 1
    return None, 0


def read_traces(path: Path, lines: list[str], source: str | None, start: int) -> list[Trace]:
    """The runs in the lines from `start` on."""
    traces: list[Trace] = []
    for index in range(start, len(lines)):
        if is_rule(lines[index]) and traces:
            source = None  # another log was appended: its runs may have another source
        if is_numbered(lines[index]):
            try:
                read_line(lines[index].split(), traces, source)
            except ValueError as error:
                raise LogError(f"{path}, line {index + 1}: {error}") from None
    if not traces:
        rule = "it has neither JSON events nor a line like step:0/1750 val_loss:10.8258"
        raise LogError(f"{path} is no run log: {rule}")
    return traces


def read_line(words: Sequence[str], traces: list[Trace], source: str | None) -> None:
    """Add a numbered line to the last run; a step 0 begins another one. Raises ValueError."""
    named = dict(word.split(":", 1) for word in words if ":" in word)
    val_loss = named.get("val_loss", named.get("tel"))
    number = NUMBER.fullmatch(words[0])
    if not number:
        if val_loss is not None:
            raise ValueError(f"{' '.join(words)!r:.80} is no step:N/TOTAL with whole numbers")
        return
    step = int(number[1])
    if not traces or (step == 0 and traces[-1].numbers[-1][0] > 0):
        traces.append(Trace(source))
    traces[-1].numbers.append((step, int(number[2]) if number[2] else None))
    ms = to_ms(named["train_time"]) if "train_time" in named else None
    if val_loss is None:
        traces[-1].steps.append(Step(step, ms, None))
    else:
        loss = float(val_loss)
        if loss <= 0:
            raise ValueError(f"val_loss {loss}: a loss is above 0")
        traces[-1].validations.append(Validation(step, loss, ms))


def to_ms(word: str) -> float:
    """Milliseconds of `6009ms` or `6.009s`. Raises ValueError."""
    if word.endswith("ms"):
        return float(word.removesuffix("ms"))
    return 1000 * float(word.removesuffix("s"))


def read_environment(lines: Sequence[str]) -> dict[str, Any]:
    """What the lines before the first step say of the machine: torch, gpu, gpu_count."""
    env: dict[str, Any] = {}
    names = []  # of the GPUs in the table of nvidia-smi, a line each
    for line in lines:
        if is_numbered(line):
            break
        head = line[:LONGEST_LINE]
        torch, gpus, cells = TORCH.match(head), GPUS.match(head), head.split("|")
        if torch:
            env["torch"] = torch[1]
        if gpus:
            env |= {"gpu": gpus[1], "gpu_count": int(gpus[2])}
        if len(cells) > 3 and BUS_ID.match(cells[2]):
            names.append(" ".join(cells[1].split()[1:-1]))  # | 0  NVIDIA H100  On | 0000004E:...
    if names:
        env = {"gpu": " + ".join(sorted(set(names))), "gpu_count": len(names)} | env
    return env
