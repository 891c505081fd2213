"""Read run logs, ours and those of the public NanoGPT speedruns. Nothing that is read is ever executed.

    jsonl    one JSON object a line, as `runtime/log.py` writes them; what a resume supersedes is left out
    step     step:N/TOTAL val_loss:X train_time:Yms, after the source and the environment between lines of 100 "="
    llm.c    s:N tel:X (validation) and s:N trl:X (training): no times, no declared total, no source
"""

import hashlib
import json
import os
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from runtime.log import SCHEMA

SUFFIXES = (".jsonl", ".txt", ".log", ".stdout", ".out")
STOPPED = "last validation at step"  # how the reason begins where nothing is wrong but that a run ends early
MAX_BYTES = 32 * 2**20  # a hundred thousand steps; keeps a wrong file from filling the memory
MAX_HEAD = 2**16  # characters before the first step that may tell of the environment
POOL_FROM = 100  # files; fewer are read before a second process has started


class LogError(ValueError):
    """A file that cannot be read as a log. The message names the file, the line where there is one, and the rule."""


class Validation(NamedTuple):
    step: int
    loss: float
    train_time_ms: float | None
    printed: str  # the loss, its digits exactly as in the log

    @property
    def exact(self) -> Decimal:
        return Decimal(self.printed)


class Step(NamedTuple):
    """A training step that is done, counted from 1. Text logs tell neither window nor stage nor skips."""

    step: int
    train_time_ms: float | None
    window: int | None = None
    stage: int | None = None
    skipped: bool = False
    train_loss: float | None = None


class Phase(NamedTuple):
    name: str
    timed: bool
    ms: float
    t_ms: float  # when it closed


class Resume(NamedTuple):
    """Where a run went on. What it had done after that step was lost, and is none of the run's steps."""

    from_step: int
    checkpoint: str | None  # name of its folder; None for the start of the run
    differences: list[str]  # of source and settings
    t_ms: float
    registry_sha256: str
    stands: bool  # not superseded by a later one that went back further
    redone: list[Step]  # the lost ones, in their order
    revalidated: list[Validation]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as its log tells it. None is what the log does not tell."""

    path: Path
    index: int = 0  # which run of the file
    dialect: str  # jsonl, step or llm.c
    run_id: str  # of a text log the file's stem, with #index where it holds several runs
    header: dict[str, Any] = field(default_factory=dict)  # of a text log empty
    track: str | None = None
    target: float | None = None
    seed: int | None = None
    trial: int | None = None
    source: str | None = None  # SHA-256 of the source files, or of the source text at the head of the log
    config_sha256: str | None = None
    gpu_count: int | None = None
    total_steps: int | None  # as the lines of the log declare it
    validations: list[Validation]
    phases: list[Phase] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=dict)  # of a text log: gpu, gpu_count, bus_ids, driver, cuda, torch...
    peak_mib: float | None = None
    status: str | None = None
    unfinished: str | None  # why the run cannot stand in a claim; None for a complete run
    started: str | None = None  # ISO 8601; of a text log in the machine's own time

    @property
    def complete(self) -> bool:
        return self.unfinished is None

    @property
    def stopped_early(self) -> bool:
        """In order, but over before its declared total: never final, but as good as others at a step it reached."""
        return str(self.unfinished).startswith(STOPPED)

    @property
    def losses(self) -> list[tuple[int, float]]:
        return [(validation.step, validation.loss) for validation in self.validations]

    @property
    def final_loss(self) -> float | None:
        return self.validations[-1].loss if self.validations else None

    @property
    def train_time_ms(self) -> float | None:
        return self.validations[-1].train_time_ms if self.validations else None

    @property
    def resumed(self) -> str | None:
        steps = ", ".join(str(resume.from_step) for resume in self.resumes)
        lost = sum(phase.ms for phase in self.phases if phase.name == "lost")
        return f"resumed at step {steps} ({lost:.0f} ms of lost work on the clock)" if steps else None

    @cached_property
    def steps(self) -> list[Step]:
        """The training steps in order, read from the file when first asked for. Raises LogError."""
        data = _read(self.path)
        if self.dialect == "jsonl":
            return [_step(event) for event in _standing(_read_events(self.path, data, "step")) if event.name == "step"]
        text = _decode(self.path, data)
        traces = _traces(self.path, text, _source(text)[1], training=True)
        return [step for trace in traces[self.index : self.index + 1] for step in trace.steps]


@dataclass
class _Trace:
    """What the numbered lines of one run say, in their order."""

    start: int = 0  # where they are in the text
    end: int = 0
    numbers: list[tuple[int, int | None]] = field(default_factory=list)  # each line's step and declared total
    validations: list[Validation] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def total(self) -> int | None:
        return self.numbers[-1][1] if self.numbers else None

    def unfinished(self) -> str | None:
        """Why they do not show a run that went to its end, or None."""
        for (before, total), (step, other) in pairwise(self.numbers):
            if step < before or other != total:
                return f"step {step} of {other} follows step {before} of {total}"
        for last, validation in pairwise(self.validations):
            if validation.step == last.step:
                return f"two validations at step {last.step}"
            if (validation.train_time_ms or 0) < (last.train_time_ms or 0):
                return f"less train time at step {validation.step} than at step {last.step}"
        if not self.validations or self.total is None:
            return "declares no total number of steps" if self.validations else "no validation"
        if self.validations[-1].step < self.total:
            return f"{STOPPED} {self.validations[-1].step} of {self.total}"
        return None if self.numbers[-1][0] == self.total else f"step {self.numbers[-1][0]} of {self.total}"


# ---- JSON lines

EVENTS = ("header", "val", "phase", "end")
DECODER = json.JSONDecoder(parse_constant=int)  # int refuses NaN and Infinity, which are not JSON
NOT_FINITE = ("nan", "inf", "-inf")  # which JSON lacks: a log has them as strings
TEXT, INTEGER, NUMBER, FLAG, OBJECT = "a string", "an integer of at least 0", "a number", "true or false", "an object"
TEXTS = "a list of strings"
OPTIONAL = {"target", "peak_mib", "window", "stage", "train_loss", "checkpoint"}
HEADER_FIELDS = {"run_id": TEXT, "track": TEXT, "target": NUMBER, "seed": INTEGER, "trial": INTEGER,
                 "config_sha256": TEXT}  # fmt: skip
VALIDATION_FIELDS = {"step": INTEGER, "total_steps": INTEGER, "val_loss": NUMBER, "train_time_ms": NUMBER}
PHASE_FIELDS = {"name": TEXT, "timed": FLAG, "ms": NUMBER, "t_ms": NUMBER}
STEP_FIELDS = {"step": INTEGER, "train_time_ms": NUMBER, "window": INTEGER, "stage": INTEGER, "skipped": FLAG,
               "train_loss": NUMBER}  # fmt: skip
RESUME_FIELDS = {"from_step": INTEGER, "checkpoint": TEXT, "differences": TEXTS, "t_ms": NUMBER,
                 "registry_sha256": TEXT}  # fmt: skip
RULES: dict[str, Callable[[Any], bool]] = {
    TEXT: lambda value: isinstance(value, str) and value.isprintable(),
    INTEGER: lambda value: type(value) is int and 0 <= value < 2**53,
    NUMBER: lambda value: value in NOT_FINITE or (type(value) in (int, float) and abs(value) <= sys.float_info.max),
    FLAG: lambda value: isinstance(value, bool),
    OBJECT: lambda value: isinstance(value, dict),
    TEXTS: lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
}


class _Event(NamedTuple):
    """One line of a log; one that is no event, maybe torn by a crash, has no name."""

    path: Path
    line: int
    start: int  # its first byte
    raw: bytes
    fields: dict[str, Any]

    @property
    def name(self) -> str | None:
        return self.fields.get("event")

    def get(self, name: str, rule: str) -> Any:
        """The field, numbers as float; None where it may be missing or null. Raises LogError."""
        value: Any = self.fields.get(name)
        if value is None and name in OPTIONAL:
            return None
        if not RULES[rule](value):
            raise LogError(f"{self.path}, line {self.line}: {name} must be {rule}, not {value!r:.80}")
        return float(value) if rule == NUMBER else value

    def all(self, rules: dict[str, str]) -> dict[str, Any]:
        return {name: self.get(name, rule) for name, rule in rules.items()}

    def digits(self, name: str) -> str:
        """A number as it stands in the line."""
        return str(json.loads(self.raw, parse_float=str, parse_int=str).get(name))


def _read_events(path: Path, data: bytes, *names: str) -> list[_Event]:
    """The lines with these events, and all that resume or are none. Raises LogError."""
    events, start = [], 0
    for number, raw in enumerate(data.split(b"\n"), 1):
        if start == len(data):
            break
        try:
            fields = DECODER.decode(raw.decode())
            if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
                raise ValueError('no object with an "event"')
        except (ValueError, RecursionError) as error:
            fields = {"error": error}
        event = _Event(path, number, start, raw, fields)
        if event.name in (*names, "resume", None):
            events.append(event)
        offset = event.get("log_offset", INTEGER) if event.name == "resume" else 0
        if offset > start or (offset and data[offset - 1 : offset] != b"\n"):
            raise LogError(f"{path}, line {number}: log_offset {offset} is not where a line before it begins")
        start += len(raw) + 1
    return events


def _standing(events: list[_Event]) -> list[_Event]:
    """The lines that no resume supersedes. A resume that is superseded supersedes nothing."""
    kept, end = [], events[-1].start + 1 if events else 0
    for event in reversed(events):
        if event.start < end:
            kept.append(event)
            end = event.fields["log_offset"] if event.name == "resume" else end
    return kept[::-1]


def _is_torn(standing: list[_Event], size: int) -> bool:
    """Whether a crash tore the last line of a log of this many bytes. LogError for any other that is no event."""
    for event in standing:
        if event.name is None and event.start + len(event.raw) < size:
            rule = "every line must be one JSON object with an event"
            raise LogError(f"{event.path}, line {event.line}: {rule}: {event.fields['error']}")
    return bool(standing) and standing[-1].name is None


def _step(event: _Event) -> Step:
    return Step(**event.all(STEP_FIELDS))


def _validation(event: _Event) -> Validation:
    step, _, loss, time_ms = event.all(VALIDATION_FIELDS).values()
    return Validation(step, loss, time_ms, event.digits("val_loss"))


def _read_resumes(path: Path, data: bytes, standing: list[_Event]) -> Iterator[Resume]:
    """All that the log has, if those that stand are any."""
    stand, done = {event.start for event in standing}, list[_Event]()
    for event in _read_events(path, data, "step", "val") if standing else ():
        if event.name == "resume":
            kept = bisect_left(done, event.fields["log_offset"], key=lambda line: line.start)
            yield Resume(
                **event.all(RESUME_FIELDS), stands=event.start in stand,
                redone=[_step(line) for line in done[kept:] if line.name == "step"],
                revalidated=[_validation(line) for line in done[kept:] if line.name == "val"],
            )  # fmt: skip
            del done[kept:]
        done.append(event)


def _read_header(event: _Event) -> dict[str, Any]:
    """The fields of `Run` that the header fixes."""
    if (schema := event.get("schema", INTEGER)) != SCHEMA:
        raise LogError(f"{event.path}: schema {schema}, but this tool reads {SCHEMA}; use the one that fits the run")
    env = event.get("env", OBJECT)
    return event.all(HEADER_FIELDS) | {
        "header": event.fields,
        "source": event.get("source_sha256", TEXT),
        "gpu_count": event._replace(fields=env).get("gpu_count", INTEGER),
        "env": env,
        "started": _time(event.get("run_id", TEXT)[:15] + " +0000", "%Y%m%d-%H%M%S %z"),
    }


def _read_jsonl(path: Path, data: bytes) -> Run:
    standing = _standing(_read_events(path, data, *EVENTS))
    torn = _is_torn(standing, len(data))
    events = {name: [event for event in standing if event.name == name] for name in (*EVENTS, "resume")}
    headers, trace = [_read_header(event) for event in events["header"]], _Trace()
    for event in events["val"]:
        trace.validations.append(_validation(event))
        trace.numbers.append((trace.validations[-1].step, event.get("total_steps", INTEGER)))
    end = events["end"][-1] if events["end"] else None
    return Run(
        path=path, dialect="jsonl", total_steps=trace.total, validations=trace.validations,
        phases=[Phase(**event.all(PHASE_FIELDS)) for event in events["phase"]],
        resumes=list(_read_resumes(path, data, events["resume"])),
        peak_mib=end.get("peak_mib", NUMBER) if end else None,
        status=end.get("status", TEXT) if end else None,
        unfinished="torn last line" if torn else _unfinished(len(headers), events["end"], trace),
        **(headers[0] if headers else {"run_id": path.stem}),
    )  # fmt: skip


def _unfinished(headers: int, ends: list[_Event], trace: _Trace) -> str | None:
    if headers != 1:
        return "no header" if headers == 0 else f"{headers} headers in one log"
    if len(ends) != 1:
        return "no end line" if not ends else f"{len(ends)} end lines in one log"
    if (status := ends[0].get("status", TEXT)) != "done":
        return f"ended with status {status}"
    if ends[0].digits("val_loss") not in ("None", *(validation.printed for validation in trace.validations[-1:])):
        return "the end line has another val_loss than the last validation"
    return trace.unfinished()


# ---- Text. Repeats in patterns are bounded where a line made for it could let them run into each other.

SEPARATOR = re.compile("=" * 100 + r"(?=\r?\n|\r?\Z)(?<![^\n]={100})\r?\n?")  # the literal first: that is fast
LEFT_OUT = re.compile(r"# source text left out; its sha256: ([0-9a-f]{64})\s*")
LINE = re.compile(  # groups: step, total, the words after them; or a line that looks like a validation and is none
    r"^s(?:tep)?:([0-9]{1,9})(?:/([0-9]{1,9}))?(?= )([^\r\n]*)|^(step:[^\n]*val_loss:[^\n]*|s:[^\n]* tel:[^\n]*)", re.M
)
WHOLE_ANYWAY = re.compile(r" (?:train_time|step_avg):(?:nan|[0-9.]+)m?s$")
VALIDATION = re.compile(r"(?<!\S)(?:val_loss|tel):(\S*)")
TRAINING = re.compile(r"(?<!\S)(?:train_loss|trl):(\S*)")
TIME = re.compile(r"(?<!\S)train_time:(\S*)")
LOSS = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,2})?|nan|-?inf")
DURATION = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(m?s)")
PEAK = re.compile(r"^peak memory [a-z]{1,20}: ([0-9]{1,9}) MiB", re.M)
DATE = re.compile(r"^[A-Z][a-z]{2} ([A-Z][a-z]{2}) +([0-9]{1,2}) ([0-9:]{8}) (?:UTC )?([0-9]{4})\b", re.M)
ENVIRONMENT = {
    "python": r"^Running [Pp]ython (\S+)",
    "torch": r"^Running [Pp]y[Tt]orch (\S+)",
    "cuda": r"^Running [Pp]y[Tt]orch \S+ compiled for CUDA (\S+)",
    "triton": r"^Running Triton version (\S+)",
    "gpu": r"^Running (?:PyTorch \S+ compiled for CUDA \S+ )?on (?:device_name=)?(\S[^\n]{0,80}?) +with world_size",
    "gpu_count": r"^Running [^\n]*with world_size[ =]([0-9]{1,6})",
    "driver": r"Driver Version: (\S+)",
}
GPUS = (  # groups: name, bus id; in the table of nvidia-smi, its list, and the table printed where it is missing
    r"^\| {1,9}[0-9]{1,3} {1,9}(\S[^|\n]{0,60}?) {1,60}\S{1,9} {1,20}\| {1,20}([0-9A-Fa-f]{8}:[0-9A-Fa-f:.]{7,9})",
    r"^GPU [0-9]{1,3}: ([^(\n]{1,80}?)() \(UUID",
    r"^[0-9]{1,3} {1,9}(NVIDIA [^\n]{1,60}?)() {2,60}[0-9]",
)


def _decode(path: Path, data: bytes) -> str:
    """The text, without a last line that may have been cut short. Raises LogError if it is none."""
    try:
        if b"\0" in data:
            raise ValueError("it has NUL bytes")
        text = data.decode("utf-8-sig")
    except ValueError as error:
        raise LogError(f"{path} is not text in UTF-8: {error}. If it is in UTF-16 or Latin-1, convert it") from None
    whole, end, last = text.rpartition("\n")
    return whole + end if last.startswith(("step:", "s:")) and not WHOLE_ANYWAY.search(last) else text


def _source(text: str) -> tuple[str | None, int]:
    """SHA-256 of the source at the head, and where what follows it begins."""
    start, separator = 0, SEPARATOR.search(text)
    if separator and separator.start() == 0:
        start, separator = separator.end(), SEPARATOR.search(text, separator.end())
    if not separator:
        return None, 0
    stated = LEFT_OUT.fullmatch(text, start, separator.start())
    return stated[1] if stated else hashlib.sha256(text[: separator.end()].encode()).hexdigest(), separator.end()


def _traces(path: Path, text: str, start: int, training: bool = False) -> list[_Trace]:
    """The runs in the text, each from a step 0 to the next, if asked with the training steps. Raises LogError."""
    traces: list[_Trace] = []
    for match in LINE.finditer(text, start):
        number, declared, words, odd = match.groups()
        step = int(number or 0)
        found = VALIDATION.search(words) if words and ("val_loss:" in words or "tel:" in words) else None
        trace = traces[-1] if traces else None
        if not trace or (step == 0 and (trace.numbers[-1][0] > 0 or (found and trace.validations))):
            traces.append(trace := _Trace(match.start()))
        trace.numbers.append((step, int(declared) if declared else None))
        trace.end = match.end()
        try:
            if odd:
                raise ValueError(f"{odd.strip()!r:.80} is no step:N/TOTAL with whole numbers")
            if found:
                trace.validations.append(Validation(step, _loss(found[1]), _duration(words), found[1]))
            elif training:
                done = step + text.startswith("s:", match.start())  # llm.c names a step before it is done
                loss = _loss(found[1]) if (found := TRAINING.search(words)) else None
                trace.steps.append(Step(done, _duration(words), train_loss=loss))
        except ValueError as error:
            raise LogError(f"{path}, line {text.count(chr(10), 0, match.start()) + 1}: {error}") from None
    if not traces:
        raise LogError(f"{path} is no run log: it has neither JSON events nor a line like step:0/1750 val_loss:10.8258")
    return traces


def _loss(word: str) -> float:
    if not LOSS.fullmatch(word):
        raise ValueError(f"a loss must be a number, not {word!r:.80}")
    return float(word)


def _duration(words: str) -> float | None:
    """The train time in milliseconds, exact to the last printed digit."""
    word = TIME.search(words)
    if word and not (parts := DURATION.fullmatch(word[1])):
        raise ValueError(f"train_time must be a number and ms or s, not {word[1]!r:.80}")
    return float(Decimal(parts[1]).scaleb(0 if parts[2] == "ms" else 3)) if word and parts else None


def _environment(head: str) -> dict[str, Any]:
    """What the lines before the first step say of the machine."""
    searched = {name: re.search(pattern, head, re.M) for name, pattern in ENVIRONMENT.items()}
    env: dict[str, Any] = {name: found[1] for name, found in searched.items() if found}
    if gpus := next(filter(None, (re.findall(pattern, head, re.M) for pattern in GPUS)), []):
        env = {"gpu": " + ".join(sorted({name for name, _ in gpus})), "gpu_count": len(gpus)} | env
    if bus_ids := [bus_id for _, bus_id in gpus if bus_id]:
        env["bus_ids"] = bus_ids
    return env | ({"gpu_count": int(env["gpu_count"])} if "gpu_count" in env else {})


def _time(text: str, form: str) -> str | None:
    try:
        return datetime.strptime(text, form).isoformat()
    except ValueError:
        return None


def _read_text(path: Path, text: str) -> Iterator[Run]:
    source, start = _source(text)
    traces = _traces(path, text, start)
    head = text[start : min(traces[0].start, start + MAX_HEAD)]
    env, date = _environment(head), DATE.search(head)
    again = SEPARATOR.search(text, traces[0].start)  # maybe of another log, appended with a source of its own
    for index, (trace, end) in enumerate(zip(traces, [*(trace.start for trace in traces[1:]), len(text)], strict=True)):
        peak = PEAK.search(text, trace.end, end)
        first = trace.numbers[0][0]
        excerpt = source is None and trace.total and 2 * first > trace.total
        yield Run(
            path=path, index=index, dialect="llm.c" if text.startswith("s:", trace.start) else "step",
            run_id=path.stem if len(traces) == 1 else f"{path.stem}#{index}", total_steps=trace.total,
            source=None if again and again.start() < trace.start else source,
            env=env, gpu_count=env.get("gpu_count"), validations=trace.validations,
            started=_time(" ".join(date.groups()), "%b %d %H:%M:%S %Y") if date and index == 0 else None,
            peak_mib=float(peak[1]) if peak else None,
            unfinished=trace.unfinished() or (f"begins at step {first} of {trace.total}" if excerpt else None),
        )  # fmt: skip


# ---- Files


def _read(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise LogError(f"{path} has {size} bytes, more than {MAX_BYTES}, so it is no run log")
        if not path.is_file():  # a pipe or a device may make the reader wait forever
            raise LogError(f"{path} is not a regular file")
        return path.read_bytes()
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror}") from error


def read_runs(path: str | Path) -> list[Run]:
    """The runs in one file, in order; one that did not finish has the reason in `unfinished`.

    Raises LogError for a file that is no run log: a line of JSON, unless torn off at the end, that is no event or has a
    field of the wrong type; text that is not UTF-8, has no line of a step, or one with a malformed number.
    """
    path = Path(path)
    data = _read(path)
    if path.suffix == ".jsonl" or data.startswith(b'{"'):
        return [_read_jsonl(path, data)]
    return list(_read_text(path, _decode(path, data)))


def read_run(path: str | Path) -> Run:
    """The run in a file that holds exactly one, else LogError; see `read_runs`."""
    runs = read_runs(path)
    if len(runs) != 1:
        raise LogError(f"{path} holds {len(runs)} runs where one is needed")
    return runs[0]


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The files that the paths name, each once: files as they are, folders without their subfolders.

    Of a folder only names with the suffix of a log count, and no registry. Raises LogError where there is nothing.
    """
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        logs = [path]
        if os.path.isdir(path):
            names = (log for log in path.glob("*") if log.suffix in SUFFIXES)
            logs = sorted(log for log in names if not log.name.startswith("registry"))
            if not logs:
                raise LogError(f"no run logs (*{', *'.join(SUFFIXES)}) in {path}; subfolders are not read, name them")
        elif not os.path.lexists(path):
            raise LogError(f"{path} does not exist")
        for log in logs:
            found.setdefault(os.path.realpath(log), log)
    return list(found.values())


def _outcome(path: Path) -> list[Run] | LogError:
    try:
        return read_runs(path)
    except LogError as error:
        return error


def read_all(paths: Iterable[str | Path], processes: int | None = None) -> tuple[list[Run], list[LogError]]:
    """All runs of files and folders, and an error for each file that is no run log; raises what `find_runs` raises.

    Many files are read by as many processes as there are cores, unless told otherwise.
    """
    files = find_runs(paths)
    if len(files) < POOL_FROM:
        outcomes = list(map(_outcome, files))
    else:
        with ProcessPoolExecutor(processes) as pool:
            outcomes = list(pool.map(_outcome, files, chunksize=16))
    runs = [run for outcome in outcomes if isinstance(outcome, list) for run in outcome]
    return runs, [outcome for outcome in outcomes if isinstance(outcome, LogError)]
