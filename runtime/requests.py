"""What single ranks ask of all: to end, because of a signal, or to save. It travels with the loss, so nobody waits."""

import contextlib
import os
import signal
import socket
import threading
import time

import torch
from torch import Tensor

from runtime.signals import NUMBERS

SAVE = len(NUMBERS)  # index of the request to save, behind those of the signals
ECHO_SECONDS = 2.0  # in which a signal is taken for the one before: a launcher passes on what the terminal has sent


class Requests(contextlib.AbstractContextManager):
    """What this rank asks (`ask`), the flags (3,) float32 that travel, and what all ranks have heard (`stop`, `save`).

    While it is entered a signal asks for the end, at the next step that allows it; a second one, unless it comes at
    once, ends the process even if the main thread waits for a rank that never comes.
    """

    def __init__(self, device: torch.device) -> None:
        self.flags = torch.zeros(SAVE + 1, device=device)
        self.stop: int | None = None  # number of the signal
        self.save = False
        self._asked = [False] * (SAVE + 1)
        self._sent = list(self._asked)
        self._saved_at = 0

    def ask(self, index: int) -> None:
        self._asked[index] = True

    def send(self, total: Tensor) -> Tensor:
        """(1 + 3,) float32: a scalar and the flags, to be summed over ranks; the host waits for nothing."""
        for index, asked in enumerate(self._asked):
            if asked != self._sent[index]:
                self.flags[index].fill_(float(asked))
                self._sent[index] = asked
        return torch.cat([total.view(1), self.flags])

    def hear(self, step: int, flags: list[float]) -> None:
        """The summed flags of a step; all ranks hear them at the same step."""
        for number, flag in zip(NUMBERS, flags, strict=False):
            self.stop = number if flag and self.stop is None else self.stop
        self.save = bool(flags[SAVE]) and step > self._saved_at

    def saved(self, step: int) -> None:
        """A run begins, goes on or was saved after this step; older messages may still carry a request to save."""
        self._asked[SAVE] = self.save = False
        self._saved_at = step

    def __enter__(self) -> "Requests":
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {number: signal.signal(number, lambda number, frame: None) for number in NUMBERS}
        threading.Thread(target=self._wait_for_signals, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, signal.SIG_IGN if any(self._asked[:SAVE]) else handler)
        self._mouth.close()  # which ends the thread

    def _wait_for_signals(self) -> None:
        first = None
        while number := self._ear.recv(1):
            if number[0] not in NUMBERS:
                continue
            if first is not None and time.monotonic() - first > ECHO_SECONDS:
                os._exit(128 + number[0])
            first = first or time.monotonic()
            self.ask(NUMBERS.index(signal.Signals(number[0])))
        self._ear.close()
