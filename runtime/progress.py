"""What a run says: signs of life while it gets ready, then step lines that never wait for the device."""

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from runtime.log import RunLog
from runtime.requests import Requests

SECONDS_BETWEEN_LINES = 1.0
SECONDS_BETWEEN_SIGNS = 5.0
LAG = 2  # steps by which a loss on a GPU is read late: no wait, and all ranks see a bad one at the same step
STUTTER_RATIO = 1.5  # a stutter takes so many times the median of its kind of step,
STUTTER_SPREADS = 6  # and lies so many scaled median absolute deviations above it
MOST_SKIPS = 20  # in a row; then nothing is learned any more


class NonFinite(RuntimeError):
    """A loss became NaN or infinite, or nothing but bad steps came."""


@contextlib.contextmanager
def signs_of_life(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say every few seconds that `what` still goes on, however long the block takes."""
    over, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(SECONDS_BETWEEN_SIGNS):
            say(f"  {what}, {time.monotonic() - begun:.0f} s")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def find_stutters(steps: Iterable[tuple[int, int, float]]) -> list[dict[str, Any]]:
    """Of steps, each its number, stage and milliseconds, those slow for their kind (stage, odd or even), as events."""
    kinds: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for step, stage, ms in steps:
        kinds.setdefault((stage, step % 2), []).append((step, ms))
    found = []
    for members in kinds.values():
        median = statistics.median(ms for _, ms in members)
        spread = 1.4826 * statistics.median(abs(ms - median) for _, ms in members)
        least = max(STUTTER_RATIO * median, median + STUTTER_SPREADS * spread)
        found += [{"step": step, "step_ms": ms, "median_ms": median} for step, ms in members if ms > least]
    return sorted(found, key=lambda stutter: stutter["step"])


class Progress:
    """Writes a step's lines when its loss and the guard's verdict have come from the device, and passes requests on.

    `explain` says why a step was skipped, if it was, by an object with guard, value and tensor; `locate(step, skip)`
    which tokens it had, as fields for the log. mfu_per_rate is the MFU of one token a second. Raises NonFinite for a
    loss that is not finite, unless its step was skipped; after MOST_SKIPS skips in a row `failure` is set.
    """

    def __init__(
        self, log: RunLog, say: Callable[[str], None], explain: Callable[[Tensor], Any],
        locate: Callable[[int, Any], dict[str, Any]], requests: Requests, steps: int, mfu_per_rate: float,
    ) -> None:  # fmt: skip
        self._log, self._say, self._explain, self._locate = log, say, explain, locate
        self._requests, self._steps, self._mfu_per_rate = requests, steps, mfu_per_rate
        self._waiting: list[tuple[dict[str, Any], Tensor, Any]] = []
        self._times: list[tuple[int, int, float]] = []  # of each step, for `find_stutters`
        self._said_at = -math.inf
        self._skips = 0  # in a row
        self.failure: NonFinite | None = None

    def step_done(self, line: dict[str, Any], message: Tensor, verdict: Tensor) -> None:
        """The fields of a step event; its mean loss and the flags of requests on the device; the guard's verdict."""
        found = torch.cat([message.double(), verdict])
        arrived = None
        if found.is_cuda:
            found = torch.empty_like(found, device="cpu", pin_memory=True).copy_(found, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._waiting.append((line, found, arrived))
        self._times.append((line["step"], line["stage"], line["step_ms"]))
        self.write()

    def go_on(self, skips: int) -> None:
        """So many were skipped in a row before; a run that they ended is given as many again."""
        self._skips = skips % MOST_SKIPS

    def close(self) -> None:
        """Write what is left, and which steps were slow; raises the failure, if there was one."""
        self.write(wait=True)
        if self.failure is not None:
            raise self.failure
        stutters = find_stutters(self._times)
        for stutter in stutters:
            self._log.write("stutter", **stutter)
        if stutters:
            lost = [stutter["step_ms"] - stutter["median_ms"] for stutter in stutters]
            worst = "step {step}, {step_ms:.0f} ms instead of {median_ms:.0f}".format(**stutters[lost.index(max(lost))])
            count = f"{len(lost)} step{'s' * (len(lost) > 1)}"
            self._say(f"stutters: {count}, {sum(lost) / 1000:.1f} s lost (worst: {worst})")

    def write(self, wait: bool = False) -> None:
        """Write the steps whose loss is here; with `wait`, all of them."""
        while self._waiting and (wait or self._waiting[0][2] is None or len(self._waiting) > LAG):
            line, found, arrived = self._waiting.pop(0)
            if arrived is not None:
                arrived.synchronize()
            flags = found[1 : 1 + len(self._requests.flags)].tolist()
            self._requests.hear(line["step"], flags)
            self._write(line, found[0].item(), self._explain(found[1 + len(flags) :]))

    def _write(self, line: dict[str, Any], loss: float, skip: Any) -> None:
        step = line["step"]
        bad = skip is not None or not math.isfinite(loss)
        place = self._locate(step, skip) if bad else {}
        where = f" (shard {place.get('shard')}, tokens from {place.get('token_offset')})"
        self._log.write("step", **line, skipped=skip is not None, train_loss=loss)
        if skip is not None:
            self._log.write("skip", step=step, guard=skip.guard, value=skip.value, tensor=skip.tensor, **place)
            what = f"{skip.guard}: {skip.tensor or 'loss or norm'} {skip.value:.4g}{where}"
            self._say(f"warning: step {step} skipped, {what}")
        if time.monotonic() - self._said_at > SECONDS_BETWEEN_LINES or step == self._steps:
            self._said_at = time.monotonic()
            self._say(self._text(line, loss))
        self._skips = 0 if skip is None else self._skips + 1
        if self._skips >= MOST_SKIPS:
            self.failure = NonFinite(f"{self._skips} steps were skipped in a row, the last of them {step}, {what}")
        if skip is None and bad:
            raise NonFinite(f"training loss is {loss} at step {step}{where}")

    def _text(self, line: dict[str, Any], loss: float) -> str:
        step, seconds = line["step"], line["train_time_ms"] / 1000
        rate = line["tokens"] / seconds
        return (
            f"step {step}/{self._steps} {step / self._steps:4.0%} | train loss {loss:.4f} | lr x{line['lr_mul']:.3f} | "
            f"window {line['window']} | {rate:,.0f} tok/s | MFU {rate * self._mfu_per_rate:.2f} | {seconds:.1f} s | "
            f"ETA {seconds / step * (self._steps - step):.0f} s"
        )
