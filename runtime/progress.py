"""What a run says: signs of life while it gets ready, then step lines that never wait for the device."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from runtime.log import RunLog

SECONDS_BETWEEN_LINES = 1.0
SECONDS_BETWEEN_SIGNS = 5.0
LAG = 2  # steps by which a loss on a GPU is read late: no wait, and all ranks see a bad one at the same step


class NonFinite(RuntimeError):
    """A loss became NaN or infinite."""


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


class Progress:
    """Writes a step's line when its loss has come from the device; raises NonFinite when that loss is not finite.

    flops_per_token and peak_flops (of all ranks together) give the MFU of the line that `say` shows.
    """

    def __init__(
        self, log: RunLog, say: Callable[[str], None], steps: int, flops_per_token: float, peak_flops: float
    ) -> None:
        self._log, self._say, self._steps = log, say, steps
        self._mfu_per_rate = flops_per_token / peak_flops
        self._waiting: list[tuple[dict[str, Any], Tensor, Any]] = []
        self._said_at = -math.inf

    def step_done(self, line: dict[str, Any], loss: Tensor) -> None:
        """The fields of a step event, and its mean loss as a scalar on the device."""
        arrived = None
        if loss.is_cuda:
            loss = torch.empty((), dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._waiting.append((line, loss, arrived))
        self.write()

    def write(self, wait: bool = False) -> None:
        """Write the steps whose loss is here; with `wait`, all of them."""
        while self._waiting and (wait or self._waiting[0][2] is None or len(self._waiting) > LAG):
            line, loss, arrived = self._waiting.pop(0)
            if arrived is not None:
                arrived.synchronize()
            self._write(line, loss.item())

    def _write(self, line: dict[str, Any], loss: float) -> None:
        self._log.write("step", **line, train_loss=loss)
        if time.monotonic() - self._said_at > SECONDS_BETWEEN_LINES or line["step"] == self._steps:
            self._said_at = time.monotonic()
            self._say(self._text(line, loss))
        if not math.isfinite(loss):
            raise NonFinite(f"training loss is {loss} at step {line['step']}")

    def _text(self, line: dict[str, Any], loss: float) -> str:
        step, seconds = line["step"], line["train_time_ms"] / 1000
        rate = line["tokens"] / seconds
        return (
            f"step {step}/{self._steps} {step / self._steps:4.0%} | train loss {loss:.4f} | lr x{line['lr_mul']:.3f} | "
            f"window {line['window']} | {rate:,.0f} tok/s | MFU {rate * self._mfu_per_rate:.2f} | {seconds:.1f} s | "
            f"ETA {seconds / step * (self._steps - step):.0f} s"
        )
