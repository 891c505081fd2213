"""The exceptions that end a run or a command, each with its exit code.

1 is left to errors in the code, which keep their traceback.
"""


class Refused(ValueError):
    """An input that cannot work. The message names the value, the rule and the fix."""

    code = 2


class LogError(Refused):
    """A run log or registry that cannot be read, or does not say what it must."""


class ClaimError(Refused):
    """A claim that does not fit its runs."""


class NonFinite(RuntimeError):
    """A loss, or twenty gradients in a row, that are no finite numbers."""

    code = 3


class Interrupted(BaseException):
    """A signal asked the process to end.

    Not an `Exception`, as `KeyboardInterrupt` is none: no `except Exception` may swallow it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by signal {number}")
        self.number = number
        self.code = 128 + number  # what a shell reports for a process that a signal ended
