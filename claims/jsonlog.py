"""Read the run logs of this trainer: one JSON object a line, in one file or in segments.

schema 1    one file; a `resume` event says from which byte on it supersedes the lines before it
schema 2    `<run_id>.jsonl`, then `<run_id>.2.jsonl` for the process that resumed the run, and so
            on; a segment supersedes what the segments before it say of steps after its start
"""

import hashlib
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
    if kind is int:  # True is an int to isinstance
        return type(value) is int and 0 <= value < 2**53
    if kind is float and isinstance(value, str):
        return value in NOT_FINITE
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return isinstance(value, kind) and (kind is not str or value.isprintable())


class Line(NamedTuple):
    """One line of a log. `event` is None for a line that is no event, as one torn by a crash."""

    path: Path
    number: int
    start: int  # its first byte in the file
    raw: bytes
    fields: dict[str, Any]

    @property
    def event(self) -> str | None:
        return self.fields["event"]

    def get(self, name: str, kind: type) -> Any:
        """A field; numbers as float, None for an optional one that is missing. Raises LogError."""
        value = self.fields.get(name)
        if value is None and name in OPTIONAL:
            return None
        if not fits(value, kind):
            where = f"{self.path}, line {self.number}"
            raise LogError(f"{where}: {name} must be {KINDS[kind]}, not {value!r:.80}")
        return float(value) if kind is float else value

    def get_all(self, kinds: dict[str, type]) -> dict[str, Any]:
        return {name: self.get(name, kind) for name, kind in kinds.items()}

    def digits(self, name: str) -> str:
        """A number as it stands in the line."""
        return str(json.loads(self.raw, parse_float=str, parse_int=str).get(name))


# ---- From bytes to the lines that stand


def split_lines(path: Path, data: bytes) -> list[Line]:
    lines = []
    start = 0
    for number, raw in enumerate(data.split(b"\n"), 1):
        try:
            fields = DECODER.decode(raw.decode())
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
            fields = {"event": None}
        if start < len(data):  # nothing follows the last newline
            lines.append(Line(path, number, start, raw, fields))
        start += len(raw) + 1
    return lines


def drop_superseded(lines: list[Line]) -> list[Line]:
    """The lines of a file that no resume of schema 1 supersedes.

    A resume may itself be superseded, so the walk goes backwards: what a resume that stands jumps
    over is skipped.
    """
    starts = {line.start for line in lines}
    kept = []
    end = None
    for line in reversed(lines):
        if end is not None and line.start >= end:
            continue
        kept.append(line)
        if line.event == "resume" and "log_offset" in line.fields:
            end = line.get("log_offset", int)
            if end not in starts or end > line.start:
                where = f"{line.path}, line {line.number}"
                raise LogError(f"{where}: log_offset {end} is not where a line before it begins")
    return kept[::-1]


def refuse_garbage(lines: list[Line], size: int) -> bool:
    """Whether the last line is torn, as a crash leaves it. LogError for any other line of none."""
    for line in lines:
        if line.event is None and line.start + len(line.raw) < size:
            rule = 'every line must be one JSON object with an "event"'
            raise LogError(f"{line.path}, line {line.number}: {rule}, not {line.raw!r:.80}")
    return bool(lines) and lines[-1].event is None


def keep_until(lines: list[Line], after_step: int) -> list[Line]:
    """The lines that stand when the run was resumed after this step.

    The checkpoint of a step is saved before the validation at that step, so the resumed process
    does that validation again.
    """
    for index, line in enumerate(lines):
        if line.event == "step" and line.get("step", int) > after_step:
            return lines[:index]
        if line.event == "val" and line.get("step", int) >= after_step:
            return lines[:index]
    return lines


# ---- From lines to a run


def read_resume(line: Line, before: list[Line]) -> Resume:
    """The resume, and whether it repeats steps: `before` is what the process before wrote."""
    resume = Resume(**line.get_all(RESUME), repeats=True)
    if before and before[-1].event == "end":
        end = before[-1].fields
        saved = end.get("status") == "interrupted" and end.get("steps") == resume.from_step
        return resume._replace(repeats=not saved)
    return resume


def read_header(line: Line) -> dict[str, Any]:
    """The fields of `Run` that the header fixes. Raises LogError."""
    schema = line.get("schema", int)
    if schema not in SCHEMAS:
        raise LogError(f"{line.path}: schema {schema}, but this version reads {SCHEMAS}; update it")
    fields = line.get_all(HEADER)
    try:  # the trainer's run ids begin with the time in UTC
        start = datetime.strptime(fields["run_id"][:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
        fields["started"] = start.isoformat()
    except ValueError:
        fields["started"] = None
    fields["header"] = line.fields
    fields["source"] = line.get("source_sha256", str)
    fields["gpu_count"] = line._replace(fields=fields["env"]).get("gpu_count", int)
    return fields


def read_jsonl(segments: Sequence[tuple[Path, bytes]], missing: str | None = None) -> Run:
    """The run in these files, in order; `missing` says which one is not there.

    Raises LogError for a line that is no event, unless torn off at the end, and for a field of the
    wrong type.
    """
    kept: list[Line] = []
    resumes: list[Resume] = []
    files: list[Segment] = []
    last: list[Line] = []  # what the process before wrote
    torn = False
    for path, data in segments:
        everything = split_lines(path, data)
        lines = drop_superseded(everything)
        torn = refuse_garbage(lines, len(data))
        headers = [line for line in lines if line.event == "header"]
        if files and headers:
            kept = keep_until(kept, headers[0].get("after_step", int))
        for index, line in enumerate(everything):
            if line.event == "resume":
                resumes.append(read_resume(line, last if files else everything[:index]))
        kept = [line for line in kept if line.event != "end"] + lines
        header = headers[0].fields if headers else {}
        files.append(Segment(path, hashlib.sha256(data).hexdigest(), header))
        last = everything
    return to_run(kept, files, resumes, missing or ("torn last line" if torn else None))


def to_run(
    kept: list[Line], segments: list[Segment], resumes: list[Resume], problem: str | None
) -> Run:
    events: dict[str | None, list[Line]] = {}
    for line in kept:
        events.setdefault(line.event, []).append(line)
    validations = []
    numbers = []
    for line in events.get("val", []):
        step = line.get("step", int)
        loss, ms = line.get("val_loss", float), line.get("train_time_ms", float)
        validations.append(Validation(step, loss, ms, line.digits("val_loss")))
        numbers.append((step, line.get("total_steps", int)))
    headers = [read_header(line) for line in events.get("header", [])]
    ends = events.get("end", [])
    path = segments[0].path
    return Run(
        path=path,
        dialect="jsonl",
        total_steps=numbers[-1][1] if numbers else None,
        validations=validations,
        steps=[Step(**line.get_all(STEP)) for line in events.get("step", [])],
        phases=[Phase(**line.get_all(PHASE)) for line in events.get("phase", [])],
        resumes=resumes,
        segments=segments,
        peak_mib=ends[-1].get("peak_mib", float) if ends else None,
        status=ends[-1].get("status", str) if ends else None,
        unfinished=problem
        or why_not_whole(segments, len(headers), ends, validations)
        or why_unfinished(numbers, validations),
        **(headers[0] if headers else {"run_id": path.stem}),
    )


def why_not_whole(
    segments: list[Segment], headers: int, ends: list[Line], validations: list[Validation]
) -> str | None:
    """What is wrong with headers and end of a run; None where all is well."""
    if headers == 0 or not segments[0].header:
        return "no header"
    if headers != len(segments):
        return f"{headers} headers in {len(segments)} file(s)"
    for number, segment in enumerate(segments, 1):
        if segment.header.get("run_id") != segments[0].header["run_id"]:
            return f"{segment.path.name} belongs to run {segment.header.get('run_id')!r:.80}"
        if segment.header.get("segment", 1) != number:
            said = segment.header.get("segment")
            return f"{segment.path.name} says that it is segment {said!r:.80}"
    if len(ends) != 1:
        return f"{len(ends)} end lines in one log" if ends else "no end line"
    status = ends[0].get("status", str)
    if status != "done":
        return f"ended with status {status}"
    allowed = ["None", *(validation.printed for validation in validations[-1:])]
    if ends[0].digits("val_loss") not in allowed:
        return "the end line has another val_loss than the last validation"
    return None
