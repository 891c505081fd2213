"""Read run logs: one JSON object a line, as `runtime/log.py` writes them. Nothing in a log is ever executed."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from runtime.log import SCHEMA

MAX_LINE_BYTES = 16 * 2**20  # far beyond any header; keeps a wrong file from filling the memory


class LogError(ValueError):
    """A log that cannot be read. The message names the file, the line and the rule it breaks."""


class Validation(NamedTuple):
    step: int
    loss: float
    train_time_ms: float


@dataclass(frozen=True)
class Run:
    """One run as its log tells it. What the header says is None where the run died before writing it."""

    path: Path
    run_id: str
    header: dict[str, Any]
    track: str | None
    target: float | None
    seed: int | None
    trial: int | None
    source: str | None  # SHA-256 of the source files
    config_sha256: str | None
    gpu_count: int | None
    total_steps: int | None  # as declared by the validations
    validations: list[Validation]
    status: str | None
    unfinished: str | None  # why the run cannot stand in a claim; None for a complete run

    @property
    def complete(self) -> bool:
        return self.unfinished is None

    @property
    def losses(self) -> list[tuple[int, float]]:
        return [(validation.step, validation.loss) for validation in self.validations]

    @property
    def final_loss(self) -> float | None:
        return self.validations[-1].loss if self.validations else None

    @property
    def train_time_ms(self) -> float | None:
        return self.validations[-1].train_time_ms if self.validations else None


# ---------------------------------------------------------------------------------------------------------------------
# One line


@dataclass(frozen=True)
class _Event:
    """One line of a log, with the accessors that check its fields."""

    path: Path
    line: int
    fields: dict[str, Any]

    def error(self, rule: str) -> LogError:
        return LogError(f"{self.path}, line {self.line}: {rule}")

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise self.error(f"{name} must be a string, not {value!r:.80}")
        return value

    def integer(self, name: str) -> int:
        value = self.fields.get(name)
        if type(value) is not int or value < 0:
            raise self.error(f"{name} must be an integer of at least 0, not {value!r:.80}")
        return value

    def number(self, name: str) -> float:
        value: Any = self.fields.get(name)
        if value in ("nan", "inf", "-inf"):
            return float(value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or abs(value) > sys.float_info.max:
            raise self.error(f"{name} must be a number, not {value!r:.80}")
        return float(value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse(line: bytes) -> dict[str, Any]:
    """The object in a line; raises ValueError for anything else."""
    try:
        record = json.loads(line.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        raise ValueError('no object with an "event"')
    return record


def _read_events(path: Path) -> tuple[list[_Event], bool]:
    """The events in order, and whether the last line was torn off by a crash."""
    events: list[_Event] = []
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            event = _Event(path, len(events) + 1, {})
            if len(line) > MAX_LINE_BYTES:
                raise event.error(f"longer than {MAX_LINE_BYTES} bytes, so this is no run log")
            try:
                event.fields.update(_parse(line))
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return events, True
                raise event.error(f"every line must be one JSON object with an event: {error}") from None
            events.append(event)
    return events, False


# ---------------------------------------------------------------------------------------------------------------------
# One run


def _read_header(event: _Event) -> dict[str, Any]:
    """The fields of `Run` that the header fixes."""
    if event.fields.get("schema") != SCHEMA:
        raise event.error(f"schema must be {SCHEMA}, not {event.fields.get('schema')!r:.80}: read it with the version "
                          f"of this tool that belongs to the run")
    environment = event.fields.get("env")
    if not isinstance(environment, dict):
        raise event.error(f"env must be an object, not {environment!r:.80}")
    return {
        "run_id": event.text("run_id"),
        "header": event.fields,
        "track": event.text("track"),
        "target": None if event.fields.get("target") is None else event.number("target"),
        "seed": event.integer("seed"),
        "trial": event.integer("trial"),
        "source": event.text("source_sha256"),
        "config_sha256": event.text("config_sha256"),
        "gpu_count": _Event(event.path, event.line, environment).integer("gpu_count"),
    }


def _read_validations(events: list[_Event]) -> tuple[list[Validation], int | None]:
    """The validations in order, and the total number of steps that they declare."""
    validations: list[Validation] = []
    total: int | None = None
    for event in events:
        validation = Validation(event.integer("step"), event.number("val_loss"), event.number("train_time_ms"))
        declared = event.integer("total_steps")
        if total not in (None, declared):
            raise event.error(f"total_steps is {declared} but was {total} before: a run declares one total")
        if validations and validation.step <= validations[-1].step:
            raise event.error(f"validation at step {validation.step} follows one at step {validations[-1].step}")
        validations.append(validation)
        total = declared
    return validations, total


def _unfinished(headers: int, ends: list[_Event], validations: list[Validation], total: int | None) -> str | None:
    if headers != 1:
        return "no header" if headers == 0 else f"{headers} headers in one log"
    if len(ends) != 1:
        return "no end line" if not ends else f"{len(ends)} end lines in one log"
    if (status := ends[0].text("status")) != "done":
        return f"ended with status {status}"
    if not validations:
        return "no validation"
    if validations[-1].step != total:
        return f"last validation at step {validations[-1].step} of {total}"
    return None


def read_run(path: str | Path) -> Run:
    """Read one log. A run that did not finish is returned with the reason in `unfinished`.

    A torn last line, which a crash leaves, makes a run unfinished. Raises LogError for any other line that is not an
    event, for another schema, and for a header, val or end line whose fields have the wrong type; other events are
    skipped.
    """
    path = Path(path)
    try:
        events, torn = _read_events(path)
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror}") from error
    by_name: dict[str, list[_Event]] = {"header": [], "val": [], "end": []}
    for event in events:
        by_name.get(event.fields["event"], []).append(event)

    unknown = dict.fromkeys(("track", "target", "seed", "trial", "source", "config_sha256", "gpu_count"))
    headers = [_read_header(event) for event in by_name["header"]]
    identity = headers[0] if headers else {"run_id": path.stem, "header": {}, **unknown}
    validations, total_steps = _read_validations(by_name["val"])
    ends = by_name["end"]
    reason = "torn last line" if torn else _unfinished(len(headers), ends, validations, total_steps)
    status = ends[-1].text("status") if ends else None
    return Run(path, total_steps=total_steps, validations=validations, status=status, unfinished=reason, **identity)


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The logs that the paths name, each once: files as they are, folders without their subfolders."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        logs = [path]
        if path.is_dir():
            logs = sorted(log for log in path.glob("*.jsonl") if log.name != "registry.jsonl")
            if not logs:
                raise LogError(f"no run logs (*.jsonl) in {path}; subfolders are not read, name them one by one")
        elif not path.exists():
            raise LogError(f"{path} does not exist")
        for log in logs:
            found.setdefault(log.resolve(), log)
    return list(found.values())
