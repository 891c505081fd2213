"""Read the run logs of this trainer: one JSON object a line, in one file or in segments.

schema 1    one file; a `resume` event says from which byte on it supersedes the lines before it
schema 2    `<run_id>.jsonl`, then `<run_id>.2.jsonl` for the process that resumed the run, and so
            on; a segment supersedes what the segments before it say of steps after its start
"""

import hashlib
import io
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from claims.runs import LogError, Phase, Resume, Run, Segment, Step, Validation, why_unfinished

SCHEMAS = (1, 2)
DECODER = json.JSONDecoder(parse_constant=int)  # int() refuses NaN and Infinity: they are not JSON
NOT_FINITE = ("nan", "inf", "-inf")  # logs hold these as strings
KINDS = {str: "a string", int: "an integer of at least 0", float: "a number", bool: "true or false",
         dict: "an object", list: "a list"}  # fmt: skip
OPTIONAL = {"target", "peak_mib", "window", "stage", "train_loss", "checkpoint", "registry_sha256"}
HEADER = {"run_id": str, "track": str, "target": float, "seed": int, "trial": int,
          "config_sha256": str, "env": dict}  # fmt: skip
STEP = {"step": int, "train_time_ms": float, "window": int, "stage": int, "skipped": bool,
        "train_loss": float}  # fmt: skip
PHASE = {"name": str, "timed": bool, "ms": float, "t_ms": float}
RESUME = {"from_step": int, "checkpoint": str, "differences": list, "registry_sha256": str}


def fits(value: Any, kind: type) -> bool:
    if kind is int:  # isinstance would take True for an int
        return type(value) is int and 0 <= value < 2**53
    if kind is float and isinstance(value, str):
        return value in NOT_FINITE
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    if kind is str:  # unprintable text could steer a terminal
        return isinstance(value, str) and value.isprintable()
    return isinstance(value, kind)


class Line(NamedTuple):
    """One line of a log. `event` is None for a line that is no event, such as a torn one."""

    where: str  # file and line, for messages
    start: int  # its first byte in the file
    raw: bytes
    fields: dict[str, Any]

    @property
    def event(self) -> str | None:
        return self.fields["event"]

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

    def digits(self, name: str) -> str:
        """A number as it stands in the line."""
        return str(json.loads(self.raw, parse_float=str, parse_int=str).get(name))


def split_lines(path: Path, data: bytes) -> list[Line]:
    lines = []
    start = 0
    for number, raw in enumerate(io.BytesIO(data), 1):
        try:
            fields = DECODER.decode(raw.decode())
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
            fields = {"event": None}
        lines.append(Line(f"{path}, line {number}", start, raw, fields))
        start += len(raw)
    return lines


def drop_superseded(lines: list[Line]) -> list[Line]:
    """The lines of a file that no resume of schema 1 supersedes.

    A resume may itself be superseded. So the walk goes backwards and skips what a resume that
    stands jumps over.
    """
    starts = {line.start for line in lines}
    end = sys.maxsize
    kept = []
    for line in reversed(lines):
        if line.start >= end:
            continue
        kept.append(line)
        if line.event == "resume" and "log_offset" in line.fields:
            end = line.get("log_offset", int)
            if end not in starts or end > line.start:
                raise LogError(f"{line.where}: log_offset {end} begins no earlier line")
    return kept[::-1]


def is_torn(lines: list[Line]) -> bool:
    """Whether a crash tore the last line. LogError for any other line that is no event."""
    for line in lines:
        if line.event is None and line.raw.endswith(b"\n"):
            rule = 'every line must be one JSON object with an "event"'
            raise LogError(f"{line.where}: {rule}, not {line.raw!r:.80}")
    return bool(lines) and lines[-1].event is None


def keep_until(lines: list[Line], after_step: int) -> list[Line]:
    """The lines that stand when the run was resumed after this step.

    A checkpoint is saved before the validation at its step: the resumed process validates again.
    """
    for index, line in enumerate(lines):
        if line.event == "step" and line.get("step", int) > after_step:
            return lines[:index]
        if line.event == "val" and line.get("step", int) >= after_step:
            return lines[:index]
    return lines


def read_resume(line: Line, before: list[Line]) -> Resume:
    """`before` is what the process before wrote; after a saved stop nothing is repeated."""
    resume = Resume(**line.get_all(RESUME), repeats=True)
    end = before[-1].fields if before else {}
    stopped = end.get("event") == "end" and end.get("status") == "interrupted"
    at_step = end.get("steps") == resume.from_step
    nothing_lost = keep_until(before, resume.from_step) == before
    return resume._replace(repeats=not (stopped and at_step and nothing_lost))


def read_jsonl(files: Sequence[tuple[Path, bytes]], problem: str | None = None) -> Run:
    """The run in these files, in order; `problem` is what already makes it unfinished.

    Raises LogError for a line that is no event, unless torn off at the end, and for a field of the
    wrong type.
    """
    kept: list[Line] = []
    resumes: list[Resume] = []
    segments: list[Segment] = []
    before: list[Line] = []  # what the process before wrote
    for path, data in files:
        everything = split_lines(path, data)
        lines = drop_superseded(everything)
        torn = is_torn(lines)
        headers = [line for line in lines if line.event == "header"]
        if segments and headers:
            kept = keep_until(kept, headers[0].get("after_step", int))
        for index, line in enumerate(everything):
            if line.event == "resume":
                resumes.append(read_resume(line, before or everything[:index]))
        kept = [line for line in kept if line.event != "end"] + lines
        header = headers[0].fields if headers else {}
        segments.append(Segment(path, hashlib.sha256(data).hexdigest(), header))
        before = everything or before
    if torn and not problem:
        problem = "torn last line"
    return to_run(kept, segments, resumes, problem)


def to_run(
    lines: list[Line], segments: list[Segment], resumes: list[Resume], problem: str | None
) -> Run:
    events: dict[str | None, list[Line]] = {}
    for line in lines:
        events.setdefault(line.event, []).append(line)
    validations = []
    numbers = []
    for line in events.get("val", []):
        step, loss = line.get("step", int), line.get("val_loss", float)
        ms = line.get("train_time_ms", float)
        validations.append(Validation(step, loss, ms, line.digits("val_loss")))
        numbers.append((step, line.get("total_steps", int)))
    headers = [read_header(line) for line in events.get("header", [])]
    ends = events.get("end", [])
    expected = sum(bool(segment.header) for segment in segments)
    if not problem and not (len(headers) == expected > 0):
        problem = f"{len(headers)} headers in {len(segments)} file(s)" if headers else "no header"
    problem = problem or end_problem(ends, validations) or why_unfinished(numbers, validations)
    return Run(
        path=segments[0].path, dialect="jsonl", segments=segments, resumes=resumes,
        total_steps=numbers[-1][1] if numbers else None, validations=validations,
        steps=[Step(**line.get_all(STEP)) for line in events.get("step", [])],
        phases=[Phase(**line.get_all(PHASE)) for line in events.get("phase", [])],
        peak_mib=ends[-1].get("peak_mib", float) if ends else None,
        status=ends[-1].get("status", str) if ends else None, unfinished=problem,
        **(headers[0] if headers else {"run_id": segments[0].path.stem}),
    )  # fmt: skip


def read_header(line: Line) -> dict[str, Any]:
    """The fields of `Run` that the header fixes. Raises LogError."""
    schema = line.get("schema", int)
    if schema not in SCHEMAS:
        raise LogError(f"{line.where}: schema {schema}; this version reads {SCHEMAS}: update it")
    fields = line.get_all(HEADER)
    fields["header"] = line.fields
    fields["source"] = line.get("source_sha256", str)
    fields["gpu_count"] = line._replace(fields=fields["env"]).get("gpu_count", int)
    try:  # the trainer's run ids begin with the time in UTC
        start = datetime.strptime(fields["run_id"][:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return fields
    return fields | {"started": start.isoformat()}


def end_problem(ends: list[Line], validations: list[Validation]) -> str | None:
    """What the end line says against the run; None where all is well."""
    if len(ends) != 1:
        return f"{len(ends)} end lines in one log" if ends else "no end line"
    status = ends[0].get("status", str)
    if status != "done":
        return f"ended with status {status}"
    last = validations[-1].printed if validations else "None"
    if ends[0].digits("val_loss") not in ("None", last):
        return "the end line has another val_loss than the last validation"
    return None
