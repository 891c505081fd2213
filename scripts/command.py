"""What the commands share: lists of numbers, JSON without NaN, safe output, child processes."""

import argparse
import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.errors import Interrupted


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose --help begins with the module's docstring, laid out as it is written."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=layout, allow_abbrev=False)


def numbers(kind: Callable[[str], Any], low: float, high: float) -> Callable[[str], list[Any]]:
    """For argparse: reads "1,2" or a list pasted from Python, "[1, 2]", each from low to high."""

    def read(text: str) -> list[Any]:
        try:
            values = [kind(part) for part in text.strip("[]() ").split(",")]
        except ValueError:
            values = [math.nan]
        if not all(low <= value <= high for value in values):
            what = "whole numbers" if kind is int else "numbers"
            rule = f"must be {what} from {low:g} to {high:g} with commas between them"
            raise argparse.ArgumentTypeError(f"{text!r} {rule}")
        return values

    return read


def print_json(value: Any) -> None:
    """Print JSON; a number that does not exist (NaN) as null."""
    print(json.dumps(null_for_nan(value), indent=2, allow_nan=False))


def null_for_nan(value: Any) -> Any:
    if hasattr(value, "_asdict"):  # a NamedTuple
        value = value._asdict()
    if isinstance(value, dict):
        return {key: null_for_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [null_for_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class SafeOutput(io.TextIOWrapper):
    """Escapes all but printable characters: a log or file name cannot steer the terminal."""

    def write(self, text: str) -> int:
        safe = ""
        for char in text:
            plain = char.isprintable() or char in "\n\t"
            safe += char if plain else ascii(char)[1:-1]
        return super().write(safe)


def set_up_output() -> None:
    """Make stdout and stderr safe, in any encoding. A closed pipe, as of head, ends the program."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            encoding, by_line = stream.encoding, stream.line_buffering
            safe = SafeOutput(stream.detach(), encoding, "backslashreplace", None, by_line)
            setattr(sys, name, safe)
    if hasattr(signal, "SIGPIPE"):  # Windows has none
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def listen() -> None:
    """Raise Interrupted in the main thread on SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, raise_interrupted)


def raise_interrupted(number: int, frame: Any) -> None:
    raise Interrupted(number)


def run_child(command: str | list[str], console: Path) -> int:
    """Run a command, its output in the file `console`; returns its exit code.

    It has a process group of its own, so that Ctrl-C reaches it once: when Interrupted is raised
    here, the whole group gets SIGTERM.
    """
    shell = isinstance(command, str)
    with console.open("wb") as out:
        child = subprocess.Popen(command, shell=shell, stdout=out, stderr=out, process_group=0)
        try:
            return child.wait()
        except Interrupted:
            with contextlib.suppress(ProcessLookupError):  # it may just have ended
                os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise
