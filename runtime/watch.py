"""Whether all ranks are there: a roll call and a first sum when they join, then a watch for one that dies or hangs.

Nothing here waits without a limit, and whoever keeps the others waiting is named on every rank. The ranks speak through
a TCPStore, which also answers when a collective does not; it lives with torchrun or in rank 0.
"""

from __future__ import annotations  # some builds of torch have none of the names of torch.distributed

import contextlib
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from runtime.environment import Machine

HANG = 10  # a rank may keep the others waiting so many times longer than it may be silent
LOST = "it died or its machine is lost"
GRACE = 5.0  # seconds that rank 0 stays for the others to read the store, and that a last word may take


class RankLost(ValueError):
    """A rank did not appear or does not answer. Every rank says so, since the first may be the one."""


# ---- Small parts

def in_time(function: Callable[[], Any], seconds: float) -> Any:
    """What the function returns or raises, or TimeoutError; a call that blocks is left behind in its thread."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    for _ in range(10):  # in parts: where this process is stopped for a while, only one of them passes
        if wait([future], seconds / 10).done:
            break
    return future.result(0)


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def serves(rank: int) -> bool:
    """Whether the store lives in this rank, so that the rank must not go before the others have read."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def linger(store: dist.TCPStore, key: str, rank: int, count: int) -> None:
    """Tell that this rank needs the store no longer; where the store lives, wait until `count` ranks have told."""
    store.add(key, 1)
    if serves(rank):
        until(lambda: store.add(key, 0) >= count, GRACE)


# ---- Joining

def join(place: torch.device, world_size: int, rank_timeout: float) -> tuple[int, tuple[str, ...], dist.TCPStore]:
    """Meet the other ranks, form the process group and try it. Returns the rank, the names of all, and their store.

    Raises ValueError naming the ranks that do not appear within rank_timeout seconds or fail a sum in that time.
    """
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE={world_size} without {', '.join(missing)}: use torchrun, or unset WORLD_SIZE.")
    rank, address = int(os.environ["RANK"]), ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        store = in_time(lambda: connect(rank_timeout, serve=serves(rank)), rank_timeout)
        store.set(f"watch/{rank}", json.dumps(Beat()))  # so that all are there once all have met
        names = roll_call(store, rank, world_size, rank_timeout)
        self_test(store, place, rank, names, rank_timeout)
    except (dist.DistError, TimeoutError) as error:
        raise RankLost(
            f"rank {rank} of {world_size} has no connection to rank 0 at {address}: {first_line(error)}. Start rank 0 "
            f"there within {rank_timeout:g} s, with a MASTER_PORT that is free and that no firewall closes."
        ) from error
    return rank, tuple(names), store


def connect(rank_timeout: float, serve: bool = False) -> dist.TCPStore:
    # It says in a page what its callers, who wait less long, say in a line.
    patience = timedelta(seconds=2 * rank_timeout)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    libuv = os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"  # Windows' torch is without it
    return dist.TCPStore(*address, is_master=serve, timeout=patience, wait_for_workers=False, use_libuv=libuv)


def backend(place: torch.device) -> str:
    """What moves tensors between the ranks: between GPUs gloo takes NCCL's part where torch has none, as on Windows."""
    return "nccl" if place.type == "cuda" and dist.is_nccl_available() else "gloo"


def roll_call(store: dist.TCPStore, rank: int, world_size: int, rank_timeout: float) -> list[str]:
    """The names of all ranks."""
    names = collect(store, "roll call", f"{platform.node()} pid {os.getpid()}", rank, world_size, rank_timeout)
    absent = [f"rank {rank}" for rank, name in enumerate(names) if name is None]
    if absent:
        here = [f"rank {rank} ({name})" for rank, name in enumerate(names) if name is not None]
        raise RankLost(
            f"{', '.join(absent)} of {world_size} {'has' if len(absent) == 1 else 'have'} not appeared within "
            f"{rank_timeout:g} s; started: {', '.join(here)}. See what the machine in question says, or give it more "
            f"time with --rank-timeout."
        )
    return [name or "" for name in names]


def self_test(store: dist.TCPStore, place: torch.device, rank: int, names: list[str], rank_timeout: float) -> None:
    """Form the process group and check a sum over ranks."""
    try:
        in_time(lambda: first_sum(place, rank, len(names), rank_timeout), rank_timeout)
        failure = ""
    except (RuntimeError, TimeoutError) as error:
        failure = first_line(error)
    failures = collect(store, "self-test", failure, rank, len(names), rank_timeout)
    # One that says nothing keeps the others from the sum: only where all have spoken is a failure one's own.
    silent = [rank for rank, failure in enumerate(failures) if failure is None]
    guilty = silent or [rank for rank, failure in enumerate(failures) if failure]
    if guilty:
        reason = "nothing is heard of it any more" if silent else failures[guilty[0]]
        raise RankLost(
            f"{', '.join(f'rank {rank} ({names[rank]})' for rank in guilty)} did not come through a first all-reduce "
            f"within {rank_timeout:g} s: {reason}. Check that its process lives and that the machines reach each other "
            f"(GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network)."
        )


def first_sum(place: torch.device, rank: int, world_size: int, rank_timeout: float) -> None:
    if place.type == "cuda":
        torch.cuda.set_device(place)  # a setting of the thread, and this is not the main one
    name = backend(place)
    dist.init_process_group(
        name, rank=rank, world_size=world_size, device_id=place if name == "nccl" else None,
        # A connection of its own: one that waits lets nobody else through.
        store=dist.PrefixStore("group", connect(rank_timeout)),
        # Longer than the watch waits, which knows whom to name.
        timeout=timedelta(seconds=(HANG + 2) * rank_timeout),
    )  # fmt: skip
    total = torch.tensor(float(rank), device=place if name == "nccl" else "cpu")
    dist.all_reduce(total)
    if total.item() != world_size * (world_size - 1) / 2:
        raise RuntimeError(f"the sum of all ranks is {total.item():g}, not {world_size * (world_size - 1) / 2:g}")


def collect(
    store: dist.TCPStore, stage: str, word: str, rank: int, world_size: int, seconds: float
) -> list[str | None]:
    """What each rank says at this stage, None for one that says nothing in time: the same list on every rank."""
    keys, over = [f"{stage}/{each}" for each in range(world_size)], f"{stage}/over"

    def exchange() -> list[str | None]:
        there = store.compare_set(keys[rank], "", word).decode()
        if there != word:
            raise RankLost(f"rank {rank} was started twice: {there} and {word}. Give each machine its own NODE_RANK.")
        if store.add(stage, 1) < world_size:
            until(lambda: store.check([over]), seconds)
        said = [store.get(key).decode() if store.check([key]) else None for key in keys]
        # What counts is what the first saw that was complete or out of patience.
        words: list[str | None] = json.loads(store.compare_set(over, "", json.dumps(said)))
        linger(store, f"{stage}/read", rank, world_size - words.count(None))
        return words

    result: list[str | None] = in_time(exchange, 2 * seconds)
    return result


# ---- The watch

class Beat(NamedTuple):
    """A sign of life."""

    number: int = 0
    collectives: int = 0  # that the rank has entered
    step: int = 0
    end: str | None = None  # how the rank ended: "" in order, else its error; None while it runs


@dataclass
class Heard:
    """What is known of a rank."""

    beat: Beat = field(default_factory=Beat)
    silence: float = 0.0  # seconds since its last beat
    behind: float = 0.0  # seconds in which others had entered a collective, and it had not


class Judge:
    """Who keeps the others waiting, from the beats of all ranks. `name` gives a rank's name."""

    def __init__(self, world_size: int, name: Callable[[int], str]) -> None:
        self.ranks = [Heard() for _ in range(world_size)]
        self._name = name

    def hear(self, beats: list[Beat], seconds: float) -> None:
        """The newest beats of all ranks, so many seconds after those before."""
        most = max(beat.collectives for beat in beats)
        for heard, beat in zip(self.ranks, beats, strict=True):
            before = heard.beat
            waited_for = beat.collectives == before.collectives and beat.collectives < most
            heard.behind = heard.behind + seconds if waited_for else 0.0
            heard.silence = heard.silence + seconds if beat.number == before.number else 0.0
            heard.beat = beat

    def verdict(self, silence: float, hang: float, exempt: int | None = None) -> str | None:
        """Who has been silent or behind for so many seconds, or has ended while others wait for it."""
        others = [(rank, heard) for rank, heard in enumerate(self.ranks) if rank != exempt]
        for rank, heard in others:  # first: one that died pulls others down with it
            if heard.beat.end is None and heard.silence >= silence:
                return self._say(rank, f"has not been heard of for {heard.silence:.0f} s: {LOST}")
        for rank, heard in others:
            if heard.beat.end is not None and (heard.behind or (heard.beat.end and heard.silence >= silence)):
                return self.ended(rank)
        for rank, heard in others:
            if heard.behind >= hang:
                return self._say(rank, f"lives but has kept the others waiting for {heard.behind:.0f} s: it hangs")
        return None

    def ended(self, rank: int) -> str:
        return self._say(rank, f"ended before the others ({self.ranks[rank].beat.end or 'without an error'})")

    def unreachable(self, rank: int) -> str:
        return self._say(rank, f"and its store do not answer: {LOST}")

    def _say(self, rank: int, what: str) -> str:
        return f"{self._name(rank)} {what}; last heard of at step {self.ranks[rank].beat.step}"


class Watch:
    """Around a run: when another rank is lost, a line naming it on stderr and the end of this process, exit code 1.

    Lost is a rank that is silent for rank_timeout seconds, that others wait for in a collective for HANG times as long,
    or that left with an error. The time in which this process itself was stopped does not count. Set `step` at each
    step; `on_loss` is called before the end, from another thread and for GRACE seconds at most.
    """

    def __init__(self, machine: Machine, rank_timeout: float) -> None:
        self.step = 0
        self.on_loss: Callable[[], object] = lambda: None
        self._machine, self._limit = machine, rank_timeout
        # Every rank reads all beats: among a thousand, less often.
        self._interval = max(min(1.0, rank_timeout / 10), machine.world_size / 100)
        self._patience = 3 * self._interval  # after which a rank that is silent is under suspicion
        self._judge = Judge(machine.world_size, machine.name)
        self._beats, self._heard_at = 0, time.monotonic()
        self._over, self._concluded = threading.Event(), threading.Event()
        self._reachable, self._blames, self._ending = True, False, False
        self._verdict = ""
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        if self._machine.world_size > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._machine.world_size == 1:
            return
        self._over.set()
        self._thread.join(GRACE)
        end = "" if error is None else f"{type(error).__name__}: {first_line(error)}"
        if self._reachable:
            self._last_words(lambda: self._tell(end))

    def blame(self) -> str:
        """Who is lost, if that is why a collective has just raised an error, else "". Takes a few beats.

        Ranks other than the first, whose errors nobody prints, say it here.
        """
        if self._machine.world_size == 1:
            return ""
        self._blames = True
        if self._concluded.wait(self._patience + self._interval):
            if self._ending:
                self._thread.join()  # which ends the process
        elif found := self._judge.verdict(self._patience, self._patience, exempt=self._machine.rank):
            self._verdict = found
            with contextlib.suppress(dist.DistError, TimeoutError):
                in_time(lambda: self._agree(found), GRACE)
        if self._verdict and not self._machine.is_main:
            self._say()
        return self._verdict

    # ---- In the watch's own thread

    def _watch(self) -> None:
        found = False
        while not found:
            if self._over.wait(self._interval):
                return
            try:
                found = in_time(self._round, self._limit)
            except (dist.DistError, TimeoutError):  # the store is not there any more
                end = self._judge.ranks[0].beat.end
                if end == "":  # all is done, this rank is late
                    return
                self._verdict, found = self._judge.ended(0) if end else self._judge.unreachable(0), True
                self._reachable = False
        self._ending = not self._blames  # else the main thread knows of the loss, and ends in its own way
        self._concluded.set()
        if self._ending:
            self._end()

    def _round(self) -> bool:
        """Tell a beat and hear those of all; whether a rank is lost, and so the run."""
        self._tell()
        texts = self._machine.store.multi_get([f"watch/{rank}" for rank in range(self._machine.world_size)])
        now = time.monotonic()
        self._judge.hear([Beat(*json.loads(text)) for text in texts], min(now - self._heard_at, 2 * self._interval))
        self._heard_at = now
        found = self._judge.verdict(self._limit, HANG * self._limit)
        if found or self._machine.store.check(["watch/verdict"]):
            self._agree(found or "")
        return bool(self._verdict)

    def _tell(self, end: str | None = None) -> None:
        self._beats += 1
        collectives = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]  # by whatever code
        beat = Beat(self._beats, collectives, self.step, end)
        self._machine.store.set(f"watch/{self._machine.rank}", json.dumps(beat))

    def _agree(self, found: str) -> None:
        """The first verdict is that of all ranks."""
        self._verdict = self._machine.store.compare_set("watch/verdict", "", found).decode()

    def _end(self) -> None:
        """The main thread may be in a call that never returns, so that nothing but this ends the process."""
        self._say()
        self._last_words(self.on_loss, sys.stdout.flush)
        os._exit(1)

    def _say(self) -> None:
        print(f"error: {self._verdict}", file=sys.stderr, flush=True)

    def _last_words(self, *functions: Callable[[], object]) -> None:
        """Call them, and take leave of the store."""
        alive = sum(each.beat.end is not None or each.silence < self._patience for each in self._judge.ranks)
        if self._reachable:
            functions += (partial(linger, self._machine.store, "watch/gone", self._machine.rank, alive),)
        for function in functions:
            with contextlib.suppress(Exception):
                in_time(function, GRACE)
