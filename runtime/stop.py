"""Signals. Before the runs, one ends the process; during runs, all ranks save and end together."""

import contextlib
import signal
from typing import Any

import torch
from torch import Tensor

from runtime.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANGUP = getattr(signal, "SIGHUP", None)  # a closed terminal or ssh session; not on Windows


def listen() -> None:
    """Raise Interrupted in the main thread on the first signal."""
    _handle(_raise)


def _handle(handler: Any) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)
    if HANGUP is not None and signal.getsignal(HANGUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(HANGUP, handler)


def _raise(number: int, frame: Any) -> None:
    _handle(signal.SIG_IGN)  # a second signal must not break into the orderly end
    raise Interrupted(signal.SIGTERM if number == HANGUP else number)


class Stop(contextlib.AbstractContextManager):
    """Tells all ranks of a signal that one of them got. Around all runs.

    On Ctrl-C the terminal signals all ranks, and the launcher signals them again: the first signal
    that they agree on counts. If a rank hangs, `--rank-timeout` ends the others.
    """

    def __init__(self, device: torch.device) -> None:
        self.number: int | None = None  # of the signal that all ranks have heard
        self._flags = torch.zeros(len(SIGNALS), device=device)
        self._got = [False] * len(SIGNALS)

    def flags(self) -> Tensor:
        """Which signals this rank got, (2,) float32 on the device, to be summed with the loss."""
        for index, got in enumerate(self._got):
            self._flags[index].fill_(float(got))  # no wait for the device
        return self._flags

    def hear(self, flags: list[float]) -> None:
        """Read the summed flags of a step."""
        for number, flag in zip(SIGNALS, flags, strict=True):
            if flag and self.number is None:
                self.number = number

    def __enter__(self) -> "Stop":
        _handle(self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        self._got[SIGNALS.index(signal.SIGTERM if number == HANGUP else number)] = True

    def __exit__(self, *exception: object) -> None:
        if not any(self._got):  # else nothing may break into the orderly end
            listen()
