"""Signals. Before the runs, one ends the process; during runs, all ranks save and end together."""

import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any

import torch
from torch import Tensor

from runtime.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANGUP = getattr(signal, "SIGHUP", None)  # a closed terminal or ssh session; not on Windows
SAVE = len(SIGNALS)  # index of the request to save, after the signals
ECHO_SECONDS = 2.0  # a launcher repeats a signal that the terminal sent to all


def listen() -> None:
    """Raise Interrupted in the main thread on the first signal."""
    for number in _heard():
        signal.signal(number, _raise)


def _heard() -> list[int]:
    if HANGUP is None or signal.getsignal(HANGUP) is signal.SIG_IGN:  # as under nohup
        return [*SIGNALS]
    return [*SIGNALS, HANGUP]


def _raise(number: int, frame: Any) -> None:
    for each in _heard():  # a second signal must not break into the orderly end
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(signal.SIGTERM if number == HANGUP else number)


class Stop(contextlib.AbstractContextManager):
    """Carries the requests of one rank to all: end because of a signal, or save. Around all runs.

    A second signal more than 2 s after the first ends the process at once, even if its main thread
    waits for a rank that never comes.
    """

    def __init__(self, device: torch.device) -> None:
        self.number: int | None = None  # of the signal that all ranks have heard
        self._flags = torch.zeros(SAVE + 1, device=device)
        self._asked = [False] * (SAVE + 1)

    def ask_to_save(self, wanted: bool = True) -> None:
        self._asked[SAVE] = wanted

    def flags(self) -> Tensor:
        """The requests (3,) as float32 on the device, to be summed over ranks with the loss."""
        for index, asked in enumerate(self._asked):
            self._flags[index].fill_(float(asked))  # no wait for the device
        return self._flags

    def hear(self, flags: list[float]) -> bool:
        """Read the summed flags of a step. Returns whether a rank asked to save."""
        for number, flag in zip(SIGNALS, flags, strict=False):
            if flag and self.number is None:
                self.number = number
        return bool(flags[SAVE])

    def __enter__(self) -> "Stop":
        # Python calls handlers only in the main thread, which may wait for other ranks. But it
        # writes the signal's number to a socket at once, and a thread reads it there.
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        for number in _heard():
            signal.signal(number, _let_pass)
        threading.Thread(target=self._wait_for_signals, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(-1)
        self._mouth.close()  # ends the thread
        if not any(self._asked[:SAVE]):  # else nothing may break into the orderly end
            listen()

    def _wait_for_signals(self) -> None:
        first = None
        while byte := self._ear.recv(1):
            number = signal.SIGTERM if byte[0] == HANGUP else byte[0]
            if number not in SIGNALS:
                continue
            first = first or time.monotonic()
            if time.monotonic() - first > ECHO_SECONDS:
                os._exit(128 + number)
            self._asked[SIGNALS.index(number)] = True
        self._ear.close()


def _let_pass(number: int, frame: Any) -> None:
    """Do nothing: the thread of `Stop` handles the signal."""
