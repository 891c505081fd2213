"""The clock as a ledger: every phase of a run is declared timed or untimed, and kept with its milliseconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Phase(NamedTuple):
    name: str
    timed: bool
    ms: float


class Ledger:
    """Measures phases, one at a time, from device idle to device idle.

    `synchronize()` waits for the device and is called at both ends of a phase;
    `on_phase(name, timed, ms)` is told of each phase when it closes.
    Raises RuntimeError when phases nest or when none is open to stop.
    """

    def __init__(
        self,
        synchronize: Callable[[], object] = lambda: None,
        on_phase: Callable[[str, bool, float], object] = lambda name, timed, ms: None,
    ):
        self.phases: list[Phase] = []
        self._synchronize = synchronize
        self._on_phase = on_phase
        self._open: tuple[str, bool, int] | None = None  # name, timed, start in nanoseconds
        self._timed_ns = 0

    def start(self, name: str, *, timed: bool) -> None:
        if self._open is not None:
            raise RuntimeError(f"phase {name!r} cannot start inside {self._open[0]!r}: phases do not nest")
        self._synchronize()
        self._open = (name, timed, time.perf_counter_ns())

    def stop(self) -> float:
        """Close the open phase; returns its milliseconds."""
        if self._open is None:
            raise RuntimeError("no phase is open: call start() before stop()")
        self._synchronize()
        name, timed, start_ns = self._open
        elapsed_ns = time.perf_counter_ns() - start_ns
        self._open = None
        self._timed_ns += elapsed_ns if timed else 0
        self.phases.append(Phase(name, timed, elapsed_ns / 1e6))
        self._on_phase(*self.phases[-1])
        return self.phases[-1].ms

    def resume(self, train_time_ms: float, lost_ms: float) -> None:
        """Go on where a clock stood. What was spent on work that is lost stays charged, as a phase of its own."""
        self._timed_ns = round(1e6 * (train_time_ms + lost_ms))
        self.phases.append(Phase("lost", True, lost_ms))
        self._on_phase(*self.phases[-1])

    @contextmanager
    def phase(self, name: str, *, timed: bool) -> Iterator[None]:
        self.start(name, timed=timed)
        try:
            yield
        finally:
            self.stop()

    @property
    def train_time_ms(self) -> float:
        """Milliseconds in timed phases so far, the open one included; does not wait for the device."""
        running_ns = time.perf_counter_ns() - self._open[2] if self._open and self._open[1] else 0
        return (self._timed_ns + running_ns) / 1e6

    def abandon(self) -> None:
        """Close the open phase, if there is one, as it is: the run has been broken off."""
        if self._open is not None:
            self._synchronize = lambda: None  # the device may never come to rest
            self.stop()
