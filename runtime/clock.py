"""The clock of a process: a list of phases, each timed or untimed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Phase(NamedTuple):
    name: str
    timed: bool
    ms: float


class Clock:
    """Measures phases, one at a time.

    `synchronize()` waits for the device at both ends of a phase. `phases` holds the phases before
    the first run, then those of the current run. RuntimeError if phases nest.
    """

    def __init__(self, synchronize: Callable[[], object] = lambda: None) -> None:
        self.phases: list[Phase] = []
        self._ready: list[Phase] | None = None
        self._synchronize = synchronize
        self._open: tuple[str, bool, int] | None = None  # name, timed, start in nanoseconds
        self._timed_ns = 0

    def begin_run(self) -> None:
        """Set the clock to zero for the next run. Keep the phases before the first run."""
        if self._ready is None:
            self._ready = self.phases
        self.phases = [*self._ready]
        self._timed_ns = 0

    def resume_run(self, train_time_ms: float, lost_ms: float) -> None:
        """Set the clock to a checkpoint's training time, and charge the steps lost after it."""
        lost_ms = max(lost_ms, 0.0)  # a checkpoint may be later than the last line of the log
        self.phases.append(Phase("lost", True, lost_ms))
        self._timed_ns = round(1e6 * (train_time_ms + lost_ms))

    def start(self, name: str, *, timed: bool) -> None:
        assert self._open is None, "phases cannot nest"
        self._synchronize()
        self._open = (name, timed, time.perf_counter_ns())

    def stop(self, *, wait: bool = True) -> None:
        """Close the open phase. wait: first for the device, which after a failure may hang."""
        assert self._open is not None, "no phase is open"
        if wait:
            self._synchronize()
        name, timed, start_ns = self._open
        elapsed_ns = time.perf_counter_ns() - start_ns
        self._open = None
        if timed:
            self._timed_ns += elapsed_ns
        self.phases.append(Phase(name, timed, elapsed_ns / 1e6))

    @contextmanager
    def phase(self, name: str, *, timed: bool) -> Iterator[None]:
        self.start(name, timed=timed)
        try:
            yield
        finally:
            self.stop()

    @property
    def running(self) -> bool:
        return self._open is not None

    @property
    def train_time_ms(self) -> float:
        """Milliseconds in timed phases of this run, with the open one. Does not wait."""
        time_ns = self._timed_ns
        if self._open is not None and self._open[1]:
            time_ns += time.perf_counter_ns() - self._open[2]
        return time_ns / 1e6
