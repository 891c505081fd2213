"""Find and read run logs: those of this trainer and those of the public NanoGPT speedruns.

Nothing that is read is executed.
"""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from claims.runs import (
    Phase,
    Resume,
    Run,
    Segment,
    Step,
    Validation,
    early_stop,
    why_unfinished,
)
from runtime.errors import LogError
from runtime.jsonl import parse, read_regular

# ---- Files

SUFFIXES = (".jsonl", ".txt", ".log", ".stdout", ".out")
SEGMENT = re.compile(r"(.+)\.([2-9]|[1-9][0-9]{1,5})\.jsonl")  # <run_id>.2.jsonl
# Of a run, all segments together: a hundred thousand steps, read in a few seconds.
MAX_BYTES, MAX_LINES, MAX_SEGMENTS = 32 * 2**20, 250_000, 200


def first_segment(path: Path) -> Path:
    """The first segment of the run that this file belongs to; the file itself if there is none."""
    match = SEGMENT.fullmatch(path.name)
    first = path.with_name(f"{match[1]}.jsonl") if match else path
    return first if first.exists() else path


def read_runs(path: str | Path, links: bool = True) -> list[Run]:
    """The runs in one file; for a segment, the run that it belongs to.

    An unfinished run says why in `unfinished`. LogError for a file that is no run log names file,
    line and rule. links: whether to follow links.
    """
    first = first_segment(Path(path))
    segments = read_segments(first, links)
    data = segments[0][1]
    if not data:
        raise LogError(f"{first} is empty: its run ended before its first line. Take it out.")
    if first.suffix != ".jsonl" and not data.startswith(b'{"'):
        return read_text(first, data)
    return [read_jsonl(segments)]


def read_segments(first: Path, links: bool) -> list[tuple[Path, bytes]]:
    """The files of a run with their contents. LogError if they are too large together."""
    segments: list[tuple[Path, bytes]] = []
    path, size, lines = first, 0, 0
    while path == first or path.exists():
        try:
            data = read_regular(path, MAX_BYTES - size, links)
        except OSError as error:
            raise LogError(f"cannot read {path}: {error.strerror}") from error
        segments.append((path, data))
        size += len(data)
        lines += data.count(b"\n")
        if lines > MAX_LINES:
            raise LogError(f"{path}: its run has {lines:,} lines, and {MAX_LINES:,} are the most")
        if len(segments) > MAX_SEGMENTS:
            raise LogError(f"{path}: {MAX_SEGMENTS} segments of a run are the most")
        path = first.with_name(f"{first.stem}.{len(segments) + 1}.jsonl")
    return segments


def finished_runs(folder: Path) -> list[Run]:
    """The runs in a folder that finished or diverged, the oldest first."""
    names = set(folder.glob("*_*.jsonl")) - set(folder.glob("registry*"))
    logs = sorted({first_segment(log) for log in names})  # ids sort by time
    runs = [run for log in logs if log.stat().st_size for run in read_runs(log)]  # 0: no header
    return [run for run in runs if run.complete or run.end.get("status") == "nonfinite"]


def logs_in(folder: Path) -> list[Path]:
    """The files in a folder with a log's suffix that are no registry; of a record, in its runs/."""
    if (folder / "claim.json").exists() and (folder / "runs").is_dir():
        folder /= "runs"
    logs = sorted(log for log in folder.iterdir() if log.suffix in SUFFIXES)
    return [log for log in logs if not log.name.startswith(("registry", "judgements"))]


def find_folders(folder: Path) -> tuple[list[Path], list[Path]]:
    """The folders of run logs at or below this one, and the innermost folders without any.

    Below a folder that has run logs, nothing is searched. Links are not followed.
    """
    found, without = [], []
    for root, below, _ in os.walk(folder):
        if logs_in(Path(root)):
            found.append(Path(root))
            below.clear()
        below[:] = sorted(name for name in below if not name.startswith("."))
        if not below and found[-1:] != [Path(root)]:
            without.append(Path(root))
    return found, without


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """The first files of the runs that the paths name, each once.

    A folder is read without its subfolders. Raises LogError where there is nothing.
    """
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        logs = logs_in(path) if path.is_dir() else [path]
        if not logs:
            kinds = ", *".join(SUFFIXES)
            raise LogError(f"no run logs (*{kinds}) in {path}; name subfolders, if it has some")
        for log in map(first_segment, logs):
            found.setdefault(os.path.realpath(log), log)
    return list(found.values())


def read_all(paths: Sequence[str | Path]) -> tuple[list[Run], list[LogError]]:
    """All runs of these files and folders, and an error for each file that is no log."""
    runs: list[Run] = []
    errors = []
    for log in find_runs(paths):
        try:
            runs += read_runs(log)
        except LogError as error:
            errors.append(error)
    return runs, errors


# ---- Logs of this trainer: one JSON object a line

SCHEMA = 3
NOT_FINITE = ("nan", "inf", "-inf")  # logs hold these as strings: JSON has no such numbers
KINDS = {str: "a string", int: "an integer of at least 0", float: "a number", bool: "true or false",
         dict: "an object", list: "a list"}  # fmt: skip
OPTIONAL = {"target", "train_loss", "tokens", "registry_sha256", "checkpoint_sha256", "lr_mul",
            "grad_norm", "window", "skipped", "grad_norms"}  # fmt: skip
# The fields that are read of each event, and their kinds.
HEADER = {"run_id": str, "track": str, "target": float, "seed": int, "config_sha256": str,
          "env": dict}  # fmt: skip
STEP = {"step": int, "train_time_ms": float, "train_loss": float, "tokens": int, "lr_mul": float,
        "grad_norm": float, "window": int, "skipped": bool,
        "grad_norms": dict}  # fmt: skip
RESUME = {"from_step": int, "differences": list, "registry_sha256": str, "checkpoint_sha256": str}


def fits(value: Any, kind: type) -> bool:
    if kind is int:  # isinstance would take True for an int
        return type(value) is int and 0 <= value < 2**53
    if kind is float and isinstance(value, str):
        return value in NOT_FINITE
    if kind is float:  # a huge integer would not fit a float, 1e999 is read as infinity
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return isinstance(value, kind)


class Line(NamedTuple):
    """One line of a log. If it is no event, for example because it is torn, `fields` is empty."""

    where: str  # file and number
    event: str | None
    fields: dict[str, Any]

    def get(self, name: str, kind: type) -> Any:
        """A field; numbers as float, None for an optional one that is missing. Raises LogError."""
        value: Any = self.fields.get(name)
        if value is None and name in OPTIONAL:
            return None
        if not fits(value, kind):
            raise LogError(f"{self.where}: {name} must be {KINDS[kind]}, not {value!r:.80}")
        return float(value) if kind is float else value

    def get_all(self, kinds: dict[str, type]) -> dict[str, Any]:
        return {name: self.get(name, kind) for name, kind in kinds.items()}


def read_jsonl(files: Sequence[tuple[Path, bytes]]) -> Run:
    """The run in these segments, in order. Raises LogError."""
    segments: list[Segment] = []
    processes: list[list[Line]] = []
    for path, data in files:
        lines = split_lines(path, data)
        header = next((line.fields for line in lines if line.event == "header"), {})
        segments.append(Segment(path, hashlib.sha256(data).hexdigest(), header))
        processes.append(lines)
    kept, resumes = processes[0], []
    saved = [line for lines in processes for line in events(lines, "checkpoint")]
    for before, lines in pairwise(processes):
        found = events(lines, "resume")
        if len(found) > 1:
            raise LogError(f"{found[1].where}: a segment has one resume line, its second line")
        for line in found:
            resumes.append(read_resume(line, before))
            kept = keep_until(kept, resumes[-1].from_step)
        kept = [line for line in kept if line.event != "end"] + lines
    run = to_run(kept, segments, resumes)
    run.checkpoints.extend((line.get("step", int), line.get("sha256", str)) for line in saved)
    return run


def split_lines(path: Path, data: bytes) -> list[Line]:
    """The lines of a log. LogError if any but the last, which a crash may tear, is no event."""
    lines: list[Line] = []
    for number, raw in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        if lines and not lines[-1].event:
            raise LogError(f'{lines[-1].where}: every line must be one JSON object with an "event"')
        try:
            fields = parse(raw)
        except ValueError:
            fields = {}
        event = fields.get("event") if isinstance(fields, dict) else None
        if not isinstance(event, str):
            event, fields = None, {}
        lines.append(Line(f"{path}, line {number}", event, fields))
    return lines if data else []


def events(lines: Sequence[Line], event: str) -> list[Line]:
    return [line for line in lines if line.event == event]


def keep_until(lines: list[Line], after_step: int) -> list[Line]:
    """The lines that count when the run was resumed after this step.

    A checkpoint is saved before the validation at its step: the resumed process validates again.
    """
    for index, line in enumerate(lines):
        if line.event == "step" and line.get("step", int) > after_step:
            return lines[:index]
        if line.event == "val" and line.get("step", int) >= after_step:
            return lines[:index]
    return lines


def read_resume(line: Line, before: list[Line]) -> Resume:
    """A resume. before: lines of the process before. If that saved and stopped, no step repeats."""
    resume = Resume(**line.get_all(RESUME), repeats=True)
    end = before[-1].fields if before else {}
    stopped = end.get("event") == "end" and end.get("status") == "interrupted"
    at_step = end.get("steps") == resume.from_step
    nothing_lost = keep_until(before, resume.from_step) == before
    return resume._replace(repeats=not (stopped and at_step and nothing_lost))


def to_run(lines: list[Line], segments: list[Segment], resumes: list[Resume]) -> Run:
    validations, numbers = [], []
    for line in events(lines, "val"):
        step, loss = line.get("step", int), line.get("val_loss", float)
        if loss <= 0:
            raise LogError(f"{line.where}: val_loss {loss}: a loss is above 0")
        validations.append(Validation(step, loss, line.get("train_time_ms", float)))
        numbers.append((step, line.get("total_steps", int)))
    headers = [read_header(line) for line in events(lines, "header")]
    ends = events(lines, "end")
    problem = end_problem(ends, validations) or why_unfinished(numbers, validations)
    if not headers:
        problem = "no header"
    elif len(headers) != len(segments):
        problem = f"{len(headers)} headers in {len(segments)} segment(s)"
    if lines and not lines[-1].event:
        problem = "torn last line"
    return Run(
        path=segments[0].path, segments=segments, resumes=resumes,
        total_steps=numbers[-1][1] if numbers else None, validations=validations,
        steps=[Step(**line.get_all(STEP)) for line in events(lines, "step")],
        phases=[Phase(**line.get_all(Phase.__annotations__)) for line in events(lines, "phase")],
        end=ends[-1].fields if ends else {}, unfinished=problem,
        **(headers[0] if headers else {"run_id": segments[0].path.stem}),
    )  # fmt: skip


def read_header(line: Line) -> dict[str, Any]:
    """The fields of `Run` that the header fixes. Raises LogError."""
    schema = line.get("schema", int)
    if schema != SCHEMA:
        fix = "Check out commit 759f432, which reads it." if schema < SCHEMA else "Update it."
        raise LogError(f"{line.where}: schema {schema}; this version reads {SCHEMA}. {fix}")
    fields = line.get_all(HEADER)
    fields["header"] = line.fields
    fields["source"] = line.get("source_sha256", str)
    fields["gpu_count"] = line._replace(fields=fields["env"]).get("gpu_count", int)
    return fields


def end_problem(ends: list[Line], validations: list[Validation]) -> str | None:
    """Why the end line keeps the run from counting as finished; None if it does not."""
    if len(ends) != 1:
        return f"{len(ends)} end lines in one log" if ends else "no end line"
    status = ends[0].get("status", str)
    if status != "done":
        return f"ended with status {status}"
    loss = ends[0].fields.get("val_loss")
    if validations and loss not in (None, validations[-1].loss):
        return "the end line has another val_loss than the last validation"
    return None


# ---- Text logs of the public speedruns

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
