"""Read text logs of the public NanoGPT speedruns, of any year."""

import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from claims.runs import Run, Validation, early_stop, why_unfinished
from runtime.errors import LogError

RULE = "=" * 100
NUMBERED = ("step:", "s:")  # how the lines of steps and validations begin
NUMBER = re.compile(r"s(?:tep)?:([0-9]{1,9})(?:/([0-9]{1,9}))?")
LOSSES_AND_TIMES = {"val_loss", "tel", "train_loss", "trl", "train_time", "step_avg"}
TIMED = re.compile(r"(?:train_time|step_avg):(?:nan|[0-9.]+)m?s")
SEED = re.compile(r"(?<!\w)(?<!\w-)seed[\"']?[=:] ?([0-9]{1,15})(?![\w.])", re.IGNORECASE)
RUNNING = re.compile("Running [Pp]y")  # begins the environment
TORCH = re.compile(r"Running [Pp]y[Tt]orch (\S+)")
GPUS = re.compile(r"Running (?:.* )?on (?:device_name=)?(\S.*?) +with world_size[ =]([0-9]{1,6})")
BUS_ID = re.compile(r" +[0-9A-F]{8}:", re.IGNORECASE)
LONGEST_LINE = 300  # of the environment; a pattern may take quadratic time on a longer one
# What launchers put before a line: [default0]: of torchrun --tee, 0: of srun --label,
# [pod/NAME/CONTAINER] and a time of kubectl logs. No pattern steps back: that could take for ever.
LABEL = r"(?>\[[^\]\s]{1,200}\]:? ?| *[0-9]{1,6}: )"
TIME = r"(?:[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,20}(?:Z|[+-][0-9]{2}:[0-9]{2}) )"
PREFIX = re.compile(f"({TIME})?({LABEL}*+)({TIME})?(?=s(?:tep)?:)")


class StepLine(NamedTuple):
    """A numbered line: a step, or a validation if it has `val_loss`."""

    step: int
    total: int | None  # as it declares
    train_time_ms: float | None
    val_loss: float | None
    others: set[str]  # names of losses next to val_loss


class Trace(NamedTuple):
    """The numbered lines of one run."""

    source: str | None
    seed: int | None
    numbers: list[tuple[int, int | None]]  # step and declared total
    validations: list[Validation]
    others: set[str]  # names of losses next to val_loss


def read_text(path: Path, data: bytes) -> list[Run]:
    """The runs in a text log. LogError if it is not text, has no step line or a bad one."""
    lines = decode(path, data)
    start = end_of_source(lines)
    head = "".join(f"{line}\n" for line in lines[:start])
    source = hashlib.sha256(head.encode()).hexdigest() if head else None
    traces = read_traces(path, lines, source, start)
    env = read_environment(lines[start:])
    return [
        Run(path=path, index=index, source=trace.source, env=env, gpu_count=env.get("gpu_count"),
            run_id=path.stem if len(traces) == 1 else f"{path.stem}#{index}", seed=trace.seed,
            total_steps=trace.numbers[-1][1], validations=trace.validations,
            unfinished=why_unfinished(trace.numbers, trace.validations),
            stop=early_stop(trace.numbers, trace.validations),
            other_losses=tuple(sorted(trace.others)))
        for index, trace in enumerate(traces)
    ]  # fmt: skip


def decode(path: Path, data: bytes) -> list[str]:
    """The lines of the text as rank 0 printed them.

    A last line that may have been cut short is left out.
    """
    try:
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise LogError(f"{path} is not text in UTF-8: {error}. Convert it to UTF-8") from None
    lines = without_prefix(lines)
    if lines[-1].startswith(NUMBERED) and not TIMED.fullmatch(lines[-1].split()[-1]):
        lines.pop()
    return lines


def without_prefix(lines: list[str]) -> list[str]:
    """The lines of rank 0 without their prefix, if all step lines have one.

    The prefix of the first step line is rank 0's. Other ranks and the launcher have others.
    """
    first = next((found for line in lines if (found := PREFIX.match(line))), None)
    if first is None or any(line.startswith(NUMBERED) for line in lines):
        return lines
    early, label, late = first.groups()
    parts = TIME if early else "", re.escape(label), TIME if late else ""
    prefix = re.compile("".join(parts))
    return [prefix.sub("", line, count=1) for line in lines if not line or prefix.match(line)]


def end_of_source(lines: Sequence[str]) -> int:
    """How many lines are source: all parts before the environment. Each ends with a rule.

    Where nothing begins an environment before the first step, only the first part is source.
    """
    ends = [number for number, line in enumerate(lines, 1) if line == RULE and number > 1]
    for start, end in pairwise([*ends, len(lines)]):
        if start < len(lines) and RUNNING.match(lines[start]):
            return start
        if any(line.startswith(NUMBERED) for line in lines[start:end]):
            break
    return ends[0] if ends else 0


def read_traces(path: Path, lines: list[str], source: str | None, start: int) -> list[Trace]:
    """The runs in the lines from `start` on.

    A step 0 begins another run. A line that lacks the total which its run declares is a note.
    """
    traces: list[Trace] = []
    seed = None  # of the run that begins next
    for number, line in enumerate(lines[start:], start + 1):
        if line == RULE and traces:
            source = None  # another log was appended: its runs may have another source
        if line.startswith(NUMBERED):
            try:
                found = read_line(line.split())
            except ValueError as error:
                raise LogError(f"{path}, line {number}: {error}") from None
            last, total = traces[-1].numbers[-1] if traces else (0, None)
            if found is None or (total and found.total is None and found.val_loss is None):
                continue  # a note
            if not traces or (found.step == 0 and last > 0):
                traces.append(Trace(source, seed, [], [], set()))
                seed = None
            traces[-1].numbers.append((found.step, found.total))
            if found.val_loss is not None:
                point = Validation(found.step, found.val_loss, found.train_time_ms)
                traces[-1].validations.append(point)
                traces[-1].others.update(found.others)
        elif named := SEED.search(line[:LONGEST_LINE]):
            seed = int(named[1])
        elif RUNNING.match(line):
            seed = None  # what was found before stood in the source of an appended log
    if not traces:
        raise LogError(f"{path} is no run log: {why_no_log(lines[start:])}")
    return traces


def why_no_log(lines: Sequence[str]) -> str:
    for line in lines:
        before, found, after = line[:LONGEST_LINE].partition("step:")
        if found and NUMBER.match(found + after) and "val_loss:" in after:
            return f"its step lines begin with {before!r}. Remove this prefix from every line"
        if re.match(r"step [0-9]+: train loss [0-9.]+, val loss [0-9.]", line):
            return ("nanoGPT's lines declare no total of steps, and estimate the loss on random "
                    "batches. Write lines like step:0/1750 val_loss:10.8258, of fixed tokens")
    return "it has neither JSON events nor a line like step:0/1750 val_loss:10.8258"


def read_line(words: Sequence[str]) -> StepLine | None:
    """What a line says that begins like a numbered one. Raises ValueError.

    None for a note, which has neither loss nor time.
    """
    pairs = [word.split(":", 1) for word in words if ":" in word]
    named = dict(pairs)
    loss_text = named.get("val_loss", named.get("tel"))
    number = NUMBER.fullmatch(words[0])
    if not number and loss_text is not None:
        raise ValueError(f"{' '.join(words)!r:.80} is no step:N/TOTAL with whole numbers")
    if not number or not named.keys() & LOSSES_AND_TIMES:
        return None
    if [name for name, _ in pairs].count("val_loss") > 1:
        raise ValueError(f"{' '.join(words)!r:.80} has two val_loss: rename one of the losses")
    loss = None if loss_text is None else float(loss_text)
    if loss is not None and loss <= 0:
        raise ValueError(f"val_loss {loss}: a loss is above 0")
    ms, time = None, named.get("train_time")
    if time is not None:  # 6009ms or 6.009s
        ms = float(time[:-2]) if time.endswith("ms") else 1000 * float(time.removesuffix("s"))
    others = {name for name in named if name.startswith("val_") and name.endswith("loss")}
    step, total = int(number[1]), int(number[2]) if number[2] else None
    return StepLine(step, total, ms, loss, others - {"val_loss"})


def read_environment(lines: Sequence[str]) -> dict[str, Any]:
    """What the lines before the first step say of the machine: torch, gpu, gpu_count."""
    env: dict[str, Any] = {}
    names = []  # of the GPUs in the table of nvidia-smi, a line each
    for line in lines:
        if line.startswith(NUMBERED):
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
