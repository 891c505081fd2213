"""SIGINT and SIGTERM as an exception with an exit code."""

import signal
from typing import Any


class Interrupted(BaseException):
    """A signal asks the run to end; `code` is the exit code that says so, 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


def listen() -> None:
    """Raise Interrupted in the main thread on SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _raise)


def _raise(number: int, frame: Any) -> None:
    raise Interrupted(number)
