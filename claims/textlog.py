"""Read the text logs of the public NanoGPT speedruns.

step     step:N/TOTAL val_loss:X train_time:Yms, after the source and the environment, between
         lines of 100 "="; a file may hold several runs, each begins at step 0
llm.c    s:N tel:X (validation) and s:N trl:X (training): no times, no total, no source
"""

import hashlib
import re
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from claims.runs import LogError, Run, Step, Validation, why_unfinished

MAX_HEAD = 2**16  # characters before the first step that are searched for the environment

# Logs are hostile input: each repeat that could run into the next one is bounded, so that no line
# makes a search take quadratic time. SEPARATOR begins with its literal, which is fast.
SEPARATOR = re.compile("=" * 100 + r"(?=\r?\n|\r?\Z)(?<![^\n]={100})\r?\n?")
LEFT_OUT = re.compile(r"# source text left out; its sha256: ([0-9a-f]{64})\s*")
LINE = re.compile(  # step, total, the words after them; or what looks like a validation and is none
    r"^s(?:tep)?:([0-9]{1,9})(?:/([0-9]{1,9}))?(?= )([^\r\n]*)"
    r"|^(step:[^\n]*val_loss:[^\n]*|s:[^\n]* tel:[^\n]*)",
    re.M,
)
ENDS_WITH_TIME = re.compile(r" (?:train_time|step_avg):(?:nan|[0-9.]+)m?s$")
VALIDATION = re.compile(r"(?<!\S)(?:val_loss|tel):(\S*)")
TRAINING = re.compile(r"(?<!\S)(?:train_loss|trl):(\S*)")
TIME = re.compile(r"(?<!\S)train_time:(\S*)")
LOSS = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,2})?|nan|-?inf")
DURATION = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(m?s)")
ENVIRONMENT = {
    "python": r"^Running [Pp]ython (\S+)",
    "torch": r"^Running [Pp]y[Tt]orch (\S+)",
    "cuda": r"^Running [Pp]y[Tt]orch \S+ compiled for CUDA (\S+)",
    "triton": r"^Running Triton version (\S+)",
    "gpu": r"^Running (?:PyTorch \S+ compiled for CUDA \S+ )?on (?:device_name=)?(\S[^\n]{0,80}?)"
    r" +with world_size",
    "gpu_count": r"^Running [^\n]*with world_size[ =]([0-9]{1,6})",
    "driver": r"Driver Version: (\S+)",
}
GPUS = (  # name and bus id: the table of nvidia-smi, its list, and the table printed without it
    r"^\| {1,9}[0-9]{1,3} {1,9}(\S[^|\n]{0,60}?) {1,60}\S{1,9} {1,20}\| {1,20}"
    r"([0-9A-Fa-f]{8}:[0-9A-Fa-f:.]{7,9})",
    r"^GPU [0-9]{1,3}: ([^(\n]{1,80}?)() \(UUID",
    r"^[0-9]{1,3} {1,9}(NVIDIA [^\n]{1,60}?)() {2,60}[0-9]",
)


@dataclass
class Trace:
    """The numbered lines of one run."""

    start: int  # where they begin in the text
    numbers: list[tuple[int, int | None]] = field(default_factory=list)  # step and declared total
    validations: list[Validation] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def read_text(path: Path, data: bytes) -> list[Run]:
    """The runs in a text log. LogError for what is no text, has no line of a step or a bad one."""
    text = decode(path, data)
    source, start = find_source(text)
    traces = read_traces(path, text, start)
    env = read_environment(text[start : min(traces[0].start, start + MAX_HEAD)])
    appended = SEPARATOR.search(text, traces[0].start)  # maybe a log with another source
    runs = []
    for index, trace in enumerate(traces):
        first, total = trace.numbers[0][0], trace.numbers[-1][1]
        unfinished = why_unfinished(trace.numbers, trace.validations)
        if not unfinished and source is None and total and 2 * first > total:
            unfinished = f"begins at step {first} of {total}"  # an excerpt
        source_of_run = None if appended and appended.start() < trace.start else source
        runs.append(Run(
            path=path, index=index,
            dialect="llm.c" if text.startswith("s:", trace.start) else "step",
            run_id=path.stem if len(traces) == 1 else f"{path.stem}#{index}", total_steps=total,
            source=source_of_run, env=env, gpu_count=env.get("gpu_count"),
            validations=trace.validations, steps=trace.steps, unfinished=unfinished,
        ))  # fmt: skip
    return runs


def decode(path: Path, data: bytes) -> str:
    """The text, without a last line that may have been cut short."""
    try:
        if b"\0" in data:
            raise ValueError("it has NUL bytes")
        text = data.decode("utf-8-sig")
    except ValueError as error:
        raise LogError(f"{path} is not text in UTF-8: {error}. Convert it to UTF-8") from None
    whole, newline, last = text.rpartition("\n")
    if last.startswith(("step:", "s:")) and not ENDS_WITH_TIME.search(last):
        return whole + newline
    return text


def find_source(text: str) -> tuple[str | None, int]:
    """SHA-256 of the source at the head of a log, and where what follows it begins."""
    start = 0
    separator = SEPARATOR.search(text)
    if separator and separator.start() == 0:
        start = separator.end()
        separator = SEPARATOR.search(text, start)
    if not separator:
        return None, 0
    stated = LEFT_OUT.fullmatch(text, start, separator.start())
    if stated:
        return stated[1], separator.end()
    return hashlib.sha256(text[: separator.end()].encode()).hexdigest(), separator.end()


def read_traces(path: Path, text: str, start: int) -> list[Trace]:
    """The runs in the text, each from a step 0 to the next."""
    traces: list[Trace] = []
    for match in LINE.finditer(text, start):
        step, words = int(match[1] or 0), match[3] or ""
        found = VALIDATION.search(words) if "val_loss:" in words or "tel:" in words else None
        last = traces[-1] if traces else None
        if not last or (step == 0 and (last.numbers[-1][0] > 0 or (found and last.validations))):
            traces.append(Trace(match.start()))
        trace = traces[-1]
        trace.numbers.append((step, int(match[2]) if match[2] else None))
        try:
            if match[4]:
                raise ValueError(f"{match[4].strip()!r:.80} is no step:N/TOTAL with whole numbers")
            if found:
                loss = read_loss(found[1])
                trace.validations.append(Validation(step, loss, read_time(words), found[1]))
                continue
            done = step + text.startswith("s:", match.start())  # llm.c counts from 0
            found = TRAINING.search(words)
            loss_of_step = read_loss(found[1]) if found else None
            trace.steps.append(Step(done, read_time(words), train_loss=loss_of_step))
        except ValueError as error:
            number = text.count("\n", 0, match.start()) + 1
            raise LogError(f"{path}, line {number}: {error}") from None
    if not traces:
        rule = "it has neither JSON events nor a line like step:0/1750 val_loss:10.8258"
        raise LogError(f"{path} is no run log: {rule}")
    return traces


def read_loss(word: str) -> float:
    if not LOSS.fullmatch(word):
        raise ValueError(f"a loss must be a number, not {word!r:.80}")
    return float(word)


def read_time(words: str) -> float | None:
    """The training time in milliseconds, exact to the last printed digit."""
    word = TIME.search(words)
    if not word:
        return None
    parts = DURATION.fullmatch(word[1])
    if not parts:
        raise ValueError(f"train_time must be a number and ms or s, not {word[1]!r:.80}")
    return float(Decimal(parts[1]).scaleb(0 if parts[2] == "ms" else 3))


def read_environment(head: str) -> dict[str, Any]:
    """What the lines before the first step say of the machine."""
    env: dict[str, Any] = {}
    for pattern in GPUS:
        gpus = re.findall(pattern, head, re.M)
        if gpus:
            env = {"gpu": " + ".join(sorted({name for name, _ in gpus})), "gpu_count": len(gpus)}
            bus_ids = [bus_id for _, bus_id in gpus if bus_id]
            if bus_ids:
                env["bus_ids"] = bus_ids
            break
    for name, pattern in ENVIRONMENT.items():
        found = re.search(pattern, head, re.M)
        if found:
            env[name] = int(found[1]) if name == "gpu_count" else found[1]
    return env
