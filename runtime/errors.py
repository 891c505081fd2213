"""Exceptions that end a run or a command, each with its exit code.

Code 1 is for all others: errors in the code, which keep their traceback.
"""

from pathlib import Path


class Refused(ValueError):
    """An input that cannot work. The message names the value, the rule and the fix. Code 2."""


class LogError(Refused):
    """A run log or registry that cannot be read or written, or breaks its rules."""


def cannot_write(path: Path, error: OSError) -> LogError:
    return LogError(f"cannot write {path}: {error.strerror}. Free some space or give another "
                    f"folder, and start again or resume.")  # fmt: skip


class NonFinite(RuntimeError):
    """A loss is not finite, or the guard skipped twenty steps in a row."""

    code = 3


class Interrupted(BaseException):
    """A signal asked the process to end. No `except Exception` may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by signal {number}")
        self.code = 128 + number  # what a shell reports for a process that a signal ended
