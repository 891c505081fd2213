"""What the command lines of the tools on logs share: lists of numbers, rules, JSON without NaN, safe output."""

import argparse
import io
import math
import signal
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any


def numbers(kind: Callable[[str], Any], low: float, high: float) -> Callable[[str], list[Any]]:
    """For argparse: a reader of numbers with commas between them, each from `low` to `high`."""

    def read(text: str) -> list[Any]:
        try:
            values = [kind(part) for part in text.split(",")] if text.isascii() and "_" not in text else [math.nan]
        except ValueError:
            values = [math.nan]
        if not all(low <= value <= high for value in values):
            raise argparse.ArgumentTypeError(
                f"{text!r} must be {'whole ' * (kind is int)}numbers from {low:g} to {high:g} with commas between them")
        return values

    return read


def insist(parser: argparse.ArgumentParser, rules: dict[str, Any]) -> None:
    """End the program with the first of the rules that is not kept, as argparse does for a wrong argument."""
    for rule, kept in rules.items():
        if not kept:
            parser.error(rule)


def null_for_nan(value: Any) -> Any:
    """In the types of JSON: objects with fields as dicts, numbers that do not exist as null."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {key: null_for_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [null_for_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class SafeOutput(io.TextIOWrapper):
    """Text in which all but printable characters is escaped: a log or a file name cannot steer a terminal."""

    def write(self, text: str) -> int:
        return super().write("".join(
            char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text))


def set_up_output() -> None:
    """Output is safe and needs no certain encoding; a reader that has seen enough, such as head, ends the program."""
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            encoding, by_line = stream.encoding, stream.line_buffering
            safe = SafeOutput(stream.detach(), encoding, errors="backslashreplace", line_buffering=by_line)
            setattr(sys, name, safe)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
