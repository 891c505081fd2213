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
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin

from claims.runs import Phase, Resume, Run, Segment, Step, Validation, why_unfinished
from claims.text_logs import read_text
from runtime.errors import LogError
from runtime.jsonl import parse, read_regular
from runtime.registry import REGISTRY

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


def read_runs(path: str | Path) -> list[Run]:
    """The runs in one file; for a segment, the run that it belongs to.

    An unfinished run says why in `unfinished`. LogError for a file that is no run log names file,
    line and rule.
    """
    first = first_segment(Path(path))
    segments = read_segments(first)
    data = segments[0][1]
    if not data:
        raise LogError(f"{first} is empty: its run ended before its first line. Take it out.")
    if first.suffix != ".jsonl" and not data.startswith(b'{"'):
        return read_text(first, data)
    return [read_jsonl(segments)]


def read_segments(first: Path) -> list[tuple[Path, bytes]]:
    """The files of a run with their contents. LogError if they are too large together."""
    segments: list[tuple[Path, bytes]] = []
    path, size, lines = first, 0, 0
    while path == first or path.exists():
        try:
            data = read_regular(path, MAX_BYTES - size)
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


def find_folders(folder: Path) -> tuple[list[Path], list[str]]:
    """The folders to judge at or below this one, and a sentence on each that is not judged.

    Judgements and sweeps below a log folder are not judged with it. Links are not followed.
    """
    found, others = [], []
    for root, below, _ in os.walk(folder):
        path = Path(root)
        below[:] = sorted(name for name in below if not name.startswith("."))
        if not logs_in(path):
            others += [] if below else [f"no run logs in {path}"]
            continue
        found.append(path)
        if (path / "claim.json").exists():
            below.clear()  # its runs/ was found just now
        elif (path / REGISTRY).exists():
            more = [path / name for name in below if name != "sources"]
            others += [f"{one} has run logs too: name it to judge them"
                       for one in more if find_folders(one)[0]]  # fmt: skip
            below.clear()
    return found, others


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
# Fields of the header that every log has.
HEADER = {"run_id": str, "track": str, "target": float | None, "seed": int, "config_sha256": str,
          "env": dict}  # fmt: skip


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

    def get(self, name: str, kind: Any) -> Any:
        """A field of this type; numbers as float, None for an optional one that is missing.

        Raises LogError.
        """
        value: Any = self.fields.get(name)
        if isinstance(kind, UnionType):  # with None
            if value is None:
                return None
            kind = get_args(kind)[0]
        kind = get_origin(kind) or kind
        if not fits(value, kind):
            raise LogError(f"{self.where}: {name} must be {KINDS[kind]}, not {value!r:.80}")
        return float(value) if kind is float else value

    def get_all(self, kinds: dict[str, Any]) -> dict[str, Any]:
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
    for before, lines in pairwise(processes):
        found = events(lines, "resume")
        if len(found) > 1:
            raise LogError(f"{found[1].where}: a segment has one resume line, its second line")
        for line in found:
            resumes.append(read_resume(line, before))
            kept = keep_until(kept, resumes[-1].from_step)
        kept = [line for line in kept if line.event != "end"] + lines
    return to_run(kept, segments, resumes)


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
    kinds = {name: kind for name, kind in Resume.__annotations__.items() if name != "repeats"}
    resume = Resume(**line.get_all(kinds), repeats=True)
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
        steps=[Step(**line.get_all(Step.__annotations__)) for line in events(lines, "step")],
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
