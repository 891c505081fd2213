"""What the commands share: packages, errors, arguments, output, child processes.

Every script imports this first (pyproject.toml keeps it so): it needs the standard library alone.
"""

from __future__ import annotations  # an old Python must get as far as `find_packages`

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from runtime.openmp import spin_briefly
from runtime.packages import find_packages

ROOT = Path(__file__).resolve().parent.parent


if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent:  # not in a test
    sys.excepthook = find_packages
    spin_briefly()  # the script may import torch next


def command(main: Callable[[list[str]], int]) -> Callable[..., int]:
    """A main whose arguments default to sys.argv. An error is one line on stderr and code 2.

    A reader that closes the pipe, such as head, ends it quietly.
    """

    def run(argv: list[str] | None = None) -> int:
        try:
            code = main(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the flush at exit fails again
            return 128 + 13  # what a shell reports for SIGPIPE
        except (ValueError, OSError, RecursionError) as error:  # of JSON nested too deeply
            message = str(error)
            if isinstance(error, OSError) and error.filename:
                message = f"{error.filename}: {error.strerror}. Name another, or make it usable."
            print(f"error: {message}", file=sys.stderr)
            return 2

    return run


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; --help has the usage."""

    on_unknown = ""  # a hint for flags that are not its own

    def error(self, message: str) -> Any:
        if self.on_unknown and message.startswith("unrecognized arguments"):
            message += f". {self.on_unknown}"
        self.exit(2, f"error: {message}. {self.prog} --help lists the flags.\n")


def make_parser(doc: str | None) -> tuple[Parser, Callable[..., Any]]:
    """A parser whose --help begins with the module's docstring, and its `add_argument`."""
    layout = argparse.RawDescriptionHelpFormatter  # keeps line breaks
    parser = Parser(description=doc, formatter_class=layout, allow_abbrev=False)
    return parser, parser.add_argument


def ask_trainer(root: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Every setting of a run with these flags. ValueError for flags that the trainer refuses.

    A process of its own answers: the trainer imports torch, and the commands do not.
    """
    words = [sys.executable, str(root / "train_gpt.py"), *flags, "--print-config"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode or not done.stdout.startswith("{"):  # such as --help
        reason = done.stderr.strip().removeprefix("error: ") or "it prints no settings"
        raise ValueError(f"train_gpt.py refuses {' '.join(flags)}: {reason}")
    return json.loads(done.stdout)


def say(text: str) -> None:
    """Print a line about the progress of a command, not with its result."""
    print(text, file=sys.stderr, flush=True)


def show(text: str, value: dict[str, Any], as_json: bool) -> None:
    """Print the text, or the value as JSON, where NaN and infinities become null."""
    if as_json:
        text = json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None), indent=2)
    print(text)


class SafeOutput(io.TextIOWrapper):
    """Escapes all but printable characters: a log or file name cannot steer the terminal."""

    def write(self, text: str) -> int:
        kept = "\n\t\xa0\u200c\u200d\u3000"  # the last ones: blanks and joiners of other scripts
        safe = (c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)
        return super().write("".join(safe))


def start(main: Callable[[], int]) -> None:
    """Run `main` as a program: its output is safe in any encoding, and a signal ends it quietly."""
    for name in ("stdout", "stderr"):  # one that is closed is None
        old = getattr(sys, name)  # not detached: handlers of logging may hold it
        buffer = old.buffer if old else open(os.devnull, "wb")  # noqa: SIM115
        encoding = getattr(old, "encoding", "utf-8")
        setattr(sys, name, SafeOutput(buffer, encoding, "backslashreplace", line_buffering=True))
    hangup = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
    for number in (signal.SIGINT, signal.SIGTERM, hangup):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup has set it so
            code = 130 if number == signal.SIGINT else 143
            signal.signal(number, lambda *_, code=code: sys.exit(code))
    sys.exit(main())


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Say how to resume when a signal ends the runs."""
    try:
        yield
    except SystemExit:
        print("stopped: the same command resumes, and makes no run twice", file=sys.stderr)
        raise


def training_command(root: Path, flags: Sequence[str], folder: Path) -> list[str]:
    """A run of the source under `root` that keeps only its log."""
    words = [sys.executable, str(root / "train_gpt.py"), *flags, "--log-dir", str(folder.resolve())]
    words += ["--checkpoint-dir", str(folder.resolve() / "checkpoints")]  # of an interrupted run
    return [*words, "--keep-model=off", "--sample-tokens=0"]
