"""SIGINT and SIGTERM as an exception with an exit code."""

import signal
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal asks the run to end; `code` is the exit code that says so, 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


def listen() -> None:
    """Raise Interrupted in the main thread on the first SIGINT or SIGTERM."""
    for number in NUMBERS:
        signal.signal(number, _raise)


def _raise(number: int, frame: Any) -> None:
    for each in NUMBERS:  # the second must not break into the orderly end
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)
