"""How a process ends: signals, errors with their exit codes, and ranks that are lost.

Before the runs a signal ends the process; during runs all ranks save and end together.
"""

import contextlib
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.errors import Interrupted, Refused
from runtime.machine import first_line, out_of_memory

Handler = Callable[[int, FrameType | None], None] | signal.Handlers
SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANGUP = getattr(signal, "SIGHUP", None)  # a closed terminal or ssh session; not on Windows


def listen() -> None:
    """Raise Interrupted in the main thread on the first signal; let any text be printed."""
    # A closed stream is None. /dev/null also keeps its number from the next file that is opened.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # a character must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    _handle(_raise)


def _handle(handler: Handler) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)
    if HANGUP is not None and signal.getsignal(HANGUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(HANGUP, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    _handle(signal.SIG_IGN)  # a second signal must not break into the orderly end
    raise Interrupted(signal.SIGTERM if number == HANGUP else number)


class Stop(contextlib.AbstractContextManager):
    """Tells all ranks of a signal that one of them got. Around all runs.

    The launcher passes a signal on to the ranks at different moments, and may send another after
    it: the first that they agree on counts. If a rank hangs, `--rank-timeout` ends the others.
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
        heard = (number for number, flag in zip(SIGNALS, flags, strict=True) if flag)
        self.number = self.number or next(heard, None)

    def __enter__(self) -> "Stop":
        _handle(self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._got[SIGNALS.index(signal.SIGTERM if number == HANGUP else number)] = True

    def __exit__(self, *exception: object) -> None:
        if not any(self._got):  # else nothing may break into the orderly end
            listen()


# ---- Exit codes


def supervise(
    function: Callable[[], int], refused: tuple[type[Exception], ...] = (), interrupted: str = ""
) -> int:
    """Return the exit code of `function()`, or of the error that ended it.

    2 for Refused and the classes in `refused`, 1 for lack of memory and for a lost rank, each with
    one sentence on stderr. 128 + number for a signal, with the sentence `interrupted`. Any other
    exception prints its traceback and gives 1.
    """
    explained: tuple[type[Exception], ...] = (Refused, *refused)
    try:
        code = function()
        if code == 0 and dist.is_initialized():
            dist.barrier()  # a success is one of all ranks
        return code
    except Interrupted as error:  # not during a run: that says itself where it stopped
        if interrupted and os.environ.get("RANK", "0") == "0":
            _say_error(interrupted)
        return error.code
    except explained as error:
        several = os.environ.get("WORLD_SIZE", "1") != "1"  # else the rank is of another launcher
        if several and os.environ.get("LOCAL_RANK", "0") != "0":
            # Mostly all ranks of a host have this error. When one exits, torchrun ends the others:
            # so the first says it, and another only if it is still there afterwards.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        _say_error(str(error))
        return 2
    except Exception as error:
        if out_of_memory(error):
            advice = "Use --activation-checkpointing on, or a smaller --val-batch or --micro-batch"
            _say_error(f"out of memory: {first_line(error)}. {advice}: same trajectory.")
        elif lost := _lost_ranks(error):
            _say_error(lost)
        else:
            traceback.print_exception(error)
        return 1


def _say_error(text: str) -> None:
    line = f"error: {text}"
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # its report ends with it
            report = {"py_callstack": line, "timestamp": str(int(time.time()))}
            Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": report}}))


def _lost_ranks(error: Exception) -> str:
    """Return a sentence if a collective raised `error`, because a rank is lost, else ""."""
    if not dist.is_initialized() or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
        return ""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when the first rank exits
    time.sleep(2)  # torchrun blames the rank that exits first: let a dead one be it
    return f"another rank ended or hangs: the one that does not say this ({first_line(error)})"


def leave(code: int) -> int:
    """Return the exit code. One of several ranks does not return: it ends its process.

    Threads of the process group can abort or hang the interpreter's own exit.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a closed output must not change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if dist.is_initialized():
        os._exit(code)
    return code
