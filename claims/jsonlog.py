"""Read the run logs of this trainer: one JSON object a line.

A process that resumes a run writes a file of its own, a segment: `<run_id>.2.jsonl`, ... It
replaces what earlier segments say of the steps after its start. In schema 1 it appended to the same
file; such a run can be read, but does not count.
"""

import hashlib
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from claims.runs import Checkpoint, Phase, Resume, Run, Segment, Step, Validation, why_unfinished
from runtime.errors import LogError
from runtime.jsonl import parse

SCHEMAS = (1, 2, 3)
NOT_FINITE = ("nan", "inf", "-inf")  # logs hold these as strings: JSON has no such numbers
KINDS = {str: "a string", int: "an integer of at least 0", float: "a number", bool: "true or false",
         dict: "an object", list: "a list"}  # fmt: skip
OPTIONAL = {"target", "train_loss", "tokens", "registry_sha256", "checkpoint_sha256", "lr_mul",
            "window", "skipped"}  # fmt: skip
# The fields that are read of each event, and their kinds.
HEADER = {"run_id": str, "track": str, "target": float, "seed": int, "config_sha256": str,
          "env": dict}  # fmt: skip
STEP = {"step": int, "train_time_ms": float, "train_loss": float, "tokens": int, "lr_mul": float,
        "window": int, "skipped": bool}  # fmt: skip
QUICK_VAL = {"step": int, "val_loss": float, "train_time_ms": float}
PHASE = {"name": str, "timed": bool, "ms": float, "t_ms": float}
RESUME = {"from_step": int, "differences": list, "registry_sha256": str, "checkpoint_sha256": str}
CHECKPOINT = {"step": int, "sha256": str}


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

    path: Path
    number: int
    event: str | None
    fields: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.number}"

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
        headers = events(lines, "header")
        header = headers[0].fields if headers else {}
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
    run.checkpoints.extend(Checkpoint(**line.get_all(CHECKPOINT)) for line in saved)
    return run


def split_lines(path: Path, data: bytes) -> list[Line]:
    """The lines of a log. LogError if any but the last, which a crash may tear, is no event."""
    lines: list[Line] = []
    for number, raw in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        if lines and not lines[-1].event:
            rule = 'every line must be one JSON object with an "event"'
            raise LogError(f"{lines[-1].where}: {rule}")
        try:
            fields = parse(raw)
        except ValueError:
            fields = {}
        event = fields.get("event") if isinstance(fields, dict) else None
        if not isinstance(event, str):
            event, fields = None, {}
        lines.append(Line(path, number, event, fields))
    return lines if data else []


def read_column(lines: Sequence[Line], name: str, kind: type) -> list[Any]:
    """This field of each line, as `Line.get` reads it, and at once if all values are plain ones."""
    values: list[Any] = [line.fields.get(name) for line in lines]
    plain = set(map(type, values)) == {kind}
    if plain and kind is int:
        plain = min(values) >= 0 and max(values) < 2**53
    if plain and kind is float:
        plain = math.isfinite(sum(values))
    return values if plain else [line.get(name, kind) for line in lines]


def events(lines: Sequence[Line], event: str) -> list[Line]:
    return [line for line in lines if line.event == event]


def keep_until(lines: list[Line], after_step: int) -> list[Line]:
    """The lines that stand when the run was resumed after this step.

    A checkpoint is saved before the validation at its step: the resumed process validates again.
    """
    for index, line in enumerate(lines):
        if line.event == "step" and line.get("step", int) > after_step:
            return lines[:index]
        if line.event in ("val", "quick_val") and line.get("step", int) >= after_step:
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
    validations = []
    numbers = []
    for line in events(lines, "val"):
        step, loss = line.get("step", int), line.get("val_loss", float)
        if loss <= 0:
            raise LogError(f"{line.where}: val_loss {loss}: a loss is above 0")
        validations.append(Validation(step, loss, line.get("train_time_ms", float)))
        numbers.append((step, line.get("total_steps", int)))
    quick = [Validation(*line.get_all(QUICK_VAL).values()) for line in events(lines, "quick_val")]
    steps = events(lines, "step")
    columns = [read_column(steps, name, STEP[name]) for name in Step._fields]
    headers = [read_header(line) for line in events(lines, "header")]
    ends = events(lines, "end")
    problem = end_problem(ends, validations) or why_unfinished(numbers, validations)
    if not headers:
        problem = "no header"
    elif len(headers) != len(segments):
        problem = f"{len(headers)} headers in {len(segments)} segment(s)"
    if any("log_offset" in line.fields for line in lines):
        problem = "resumed within its file, as runs of schema 1 were"
    if lines and not lines[-1].event:
        problem = "torn last line"
    return Run(
        path=segments[0].path, segments=segments, resumes=resumes,
        total_steps=numbers[-1][1] if numbers else None, validations=validations,
        quick_validations=quick, steps=list(map(Step, *columns)),
        phases=[Phase(**line.get_all(PHASE)) for line in events(lines, "phase")],
        end=ends[-1].fields if ends else {}, unfinished=problem,
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
