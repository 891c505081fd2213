"""Batches of tokens: document-aligned training steps, contiguous validation, and a run's plan.

A row of a batch is a sequence of `seq_len` tokens and their targets. A step is
`batch_tokens / seq_len` rows, the same at every world size; rank r of W owns rows
[r * rows / W, (r + 1) * rows / W). A training row is a list of pieces: ranges [start, end) of a
shard with `seq_len + 1` tokens in all, the last one a target.
The batch and the longest document may change in the course of a run.
The row rule is that of modded-nanogpt, record 42.
"""

import hashlib
import math
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data.copied import pair_distances
from data.shards import Settings, Shard, ShardError, Tokens, find_shards

# The last tokens of the race's text, a quarter of what it validates on, are no training data: each
# run is scored on them at its end, and nothing is ever chosen by that loss. Counted from the end of
# the last training shard, so that no hash of the data changes. Other texts have no such slice.
HELD_OUT = 65_536
PROSE = "be27130d408f4ce8"  # how the hash of the text's validation tokens begins

Files = Sequence[str | Path]
Row = list[tuple[int, int]]  # pieces
Found = Iterator[tuple[Row, int]]  # rows, each with the offset where the next one begins


class Reading(NamedTuple):
    """How the text is read from a step on."""

    first: int  # step
    batch_tokens: int  # of a step, on all ranks
    max_document: int  # longer documents are cut


@dataclass(frozen=True)
class Order:
    """Settings that decide, with the shards, which tokens are in which row of which step."""

    seq_len: int  # tokens of a row
    bos: int | None  # begins each document and each row; None: rows are contiguous
    readings: Sequence[Reading]  # by their first steps; one begins at step 0

    def at(self, step: int) -> tuple[int, int]:
        """Return the rows of this step, counted from 0, and its longest document."""
        reading = [each for each in self.readings if each.first <= step][-1]
        return reading.batch_tokens // self.seq_len, reading.max_document

    def check(self, world_size: int) -> None:
        """ValueError if the ranks cannot own equally many rows of every step."""
        counts = sorted({self.at(each.first)[0] for each in self.readings})
        common = math.gcd(*counts)
        if common % world_size:
            raise ValueError(f"world size {world_size} does not divide {counts} rows a step; start "
                             f"one of {divisors(common, common)} ranks, or change --batch-tokens "
                             f"or --seq-len.")  # fmt: skip


def _share(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first row of a rank and the one after its last; rank 0 has some."""
    return -(-rank * rows // world_size), -(-(rank + 1) * rows // world_size)


def _deal(rows: int, at_once: int, rank: int, world_size: int) -> list[slice]:
    """Return the rows of one rank, `at_once` at a time; the last slice may be shorter."""
    first, end = _share(rows, rank, world_size)
    return [slice(start, min(start + at_once, end)) for start in range(first, end, at_once)]


def divisors(number: int, limit: int) -> list[int]:
    """Return 1 and the other divisors of `number` up to `limit`, in their order."""
    return [1, *(size for size in range(2, min(number, limit) + 1) if number % size == 0)]


class Batch(NamedTuple):
    """One micro-batch on the host. Training batches are in pinned memory if CUDA is available."""

    inputs: torch.Tensor  # int32 (rows, seq_len)
    targets: torch.Tensor  # int64 (rows, seq_len)
    cu_seqlens: torch.Tensor  # int32 (capacity,): starts of rows and documents, then the end

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on `device`; from pinned memory the copy does not block the host.

        From other memory it must: Apple's GPUs may read it when it is gone (torch issue 189690).
        """
        return Batch(*(each.to(device, non_blocking=each.is_pinned()) for each in self))


def _begins(rows: Tokens, bos: int | None) -> NDArray:
    """Return which inputs of rows (n, seq_len + 1) begin a document or a row, (n, seq_len) bool."""
    begins = rows[:, :-1] == (-1 if bos is None else bos)
    begins[:, 0] = True
    return begins


def _make_batch(rows: Tokens, bos: int | None, documents: int) -> Batch:
    """Make a batch from tokens (n, seq_len + 1) of at most `documents` documents."""
    inputs, targets = rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int64)
    starts = np.flatnonzero(_begins(rows, bos))
    entries = documents + 1  # the end of the last document
    capacity = math.ceil(entries / 32) * 32  # few different lengths, so few compiled graphs
    cu_seqlens = np.full(capacity, inputs.size, np.int32)
    cu_seqlens[: len(starts)] = starts
    batch = Batch(*map(torch.from_numpy, (inputs, targets, cu_seqlens)))
    if torch.cuda.is_available():
        batch = Batch(*(tensor.pin_memory() for tensor in batch))
    return batch


def hash_rows(step: int, first: int, batch: Batch) -> int:
    """The sum of the SHA-256 of rows, as big-endian numbers: the same however rows are shared out.

    A log holds it, so that a judge can tell which tokens a run has read. The loader's thread
    computes it while the device trains.

    step: counted from 1. first: place of the batch's first row in the whole batch of the step.
    Hashed are step, place, inputs and targets, each an 8-byte little-endian integer.
    """
    steps = np.full(len(batch.inputs), step)
    places = first + np.arange(len(steps))
    numbers = np.column_stack([steps, places, batch.inputs.numpy(), batch.targets.numpy()])
    return sum(int.from_bytes(hashlib.sha256(row).digest()) for row in numbers.astype("<i8"))


# ---- Which tokens are in which row


class Position(NamedTuple):
    step: int = 0  # steps before this position
    shard: int = 0
    offset: int = 0  # token of the shard where the next step begins to read


Walk = Iterator[tuple[list[Row], Position]]


def _walk(shards: Sequence[Shard], order: Order, position: Position) -> Walk:
    """Yield (rows of all ranks, position after them) for each step, then raise ShardError."""
    step, index, offset = position
    find_rows = _dense_rows if order.bos is None else _aligned_rows
    while index < len(shards):
        count, max_document = order.at(step)
        found = list(islice(find_rows(shards[index], order, max_document, offset), count))
        if len(found) < count:  # no step spans two shards: the rest of a shard is dropped
            index, offset = index + 1, 0
            continue
        step, offset = step + 1, found[-1][1]
        yield [row for row, _ in found], Position(step, index, offset)
    rule = "contiguous rows"
    if order.bos is not None:
        longest = order.at(step)[1]
        rule = f"documents that begin with {order.bos}, cut after {longest:,} tokens or a row's end"
    # Fewer steps compress the stages, so batches grow earlier: count the largest.
    rows = sum(order.at(each)[0] for each in range(step))
    most = rows // max(each.batch_tokens // order.seq_len for each in order.readings)
    fix = f"Set --steps to at most {most:,}" if most else "Lower --batch-tokens"
    raise ShardError(f"the data end after {step:,} steps: {sum(map(len, shards)):,} tokens, read "
                     f"as {rule}. {fix}, or add shards.")  # fmt: skip


def _aligned_rows(tokens: Shard, order: Order, max_document: int, offset: int) -> Found:
    """Yield rows of whole or cut documents."""
    row: Row = []
    missing = order.seq_len + 1
    starts = tokens.starts(order.bos)
    for start, stop in pairwise(starts[bisect_left(starts, offset) :]):
        end = min(stop, start + max_document, start + missing)  # the tail is dropped
        row.append((start, end))
        missing -= end - start
        if missing == 0:
            yield row, stop
            row, missing = [], order.seq_len + 1


def _dense_rows(tokens: Shard, order: Order, max_document: int, offset: int) -> Found:
    """Yield contiguous rows; the last target of a row is the first input of the next."""
    for start in range(offset, len(tokens) - order.seq_len, order.seq_len):
        yield [(start, start + order.seq_len + 1)], start + order.seq_len


def plan_run(shards: Sequence[Shard], order: Order, steps: int) -> tuple[Position, int]:
    """Walk the data as TrainLoader will, without batches. ShardError if they do not suffice.

    Returns where the run ends to read, and the most pieces (so documents) in a row.
    """
    end, most = Position(), 0
    walk = _walk(shards, order, end)
    for _ in range(steps):
        rows, end = next(walk)
        most = max(most, *map(len, rows))
    for first, *_ in order.readings:  # warm-up reads the first shard as each stage would
        with suppress(ShardError):
            for rows, _ in _walk(shards[:1], order, Position(first)):
                most = max(most, *map(len, rows))
    return end, most


class TrainLoader(Iterator[list[Batch]]):
    """Iterator over steps; `next(loader)` is the list of this rank's micro-batches.

    A background thread builds the next step. When the data end, it raises ShardError and not
    StopIteration, which would end a for loop in silence. micro_batch: tokens of one, at most.
    held_out: how many of the last tokens are not trained on.
    """

    def __init__(
        self, files: Files, order: Order, steps: int, rank: int, world_size: int,
        micro_batch: int = sys.maxsize, held_out: int = 0,
    ) -> None:  # fmt: skip
        order.check(world_size)  # first: the walk may run out of data
        self.order, self._rank, self._world_size = order, rank, world_size
        self.held_out = held_out
        self._shards = [*map(Shard, files[:-1]), Shard(files[-1], held_out)]
        self.end, self.max_documents = plan_run(self._shards, order, steps)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-loader")
        self._lengths = [len(shard) for shard in self._shards[: self.end.shard + 1]]
        self.most_rows = max(micro_batch // order.seq_len, 1)  # of a micro-batch; see `reset`
        self._seek(Position())

    def shares(self, step: int) -> tuple[int, int]:
        """Return (micro-batches, rows of each) of this rank at a step: as few as fit."""
        rows = self.order.at(step)[0] // self._world_size
        micro_rows = divisors(rows, self.most_rows)[-1]
        return rows // micro_rows, micro_rows

    def reset(self, step: int = 0) -> None:
        """Go back to the first step, or for warm-up read the first shard in this step's order.

        From then on, micro-batches have the rows that `most_rows` allows.
        """
        self._seek(Position(step))

    def _seek(self, position: Position) -> None:
        self._position = position  # of the next step handed out, not built ahead
        self._steps = self._build(_walk(self._shards, self.order, position))
        self._pending: Future | None = None
        # By step, counted from 1: the shard and the token from which it was read.
        self.places: dict[int, dict[str, Any]] = {}
        self.rows_sum = 0  # of `hash_rows` over this rank's rows so far

    def __next__(self) -> list[Batch]:
        if self._pending is None:
            self._pending = self._worker.submit(next, self._steps)
        batches, rows_sum, place, self._position = self._pending.result()
        self.rows_sum += rows_sum
        self.places[self._position.step] = place
        self._pending = self._worker.submit(next, self._steps)
        return batches

    def _build(self, walk: Walk) -> Iterator[tuple[list[Batch], int, dict[str, Any], Position]]:
        """Yield the micro-batches of each step, their rows' hash, place, and the position after."""
        for rows, end in walk:
            shard, batches, rows_sum = self._shards[end.shard], [], 0
            _, micro_rows = self.shares(end.step - 1)
            for part in _deal(len(rows), micro_rows, self._rank, self._world_size):
                batches.append(self._micro_batch(shard, rows[part]))
                rows_sum += hash_rows(end.step, part.start, batches[-1])
            place = {"shard": shard.path.name, "token_offset": rows[0][0][0]}
            yield batches, rows_sum, place, end

    def _micro_batch(self, shard: Shard, rows: list[Row]) -> Batch:
        first = rows[0][0][0]
        tokens = shard[first : rows[-1][-1][1]]  # one read; one for each piece would be slow
        pieces = [tokens[start - first : end - first] for row in rows for start, end in row]
        whole = np.concatenate(pieces).reshape(len(rows), -1)
        return _make_batch(whole, self.order.bos, len(rows) * self.max_documents)

    def state_dict(self) -> dict[str, Any]:
        """Return the next step's position and the hash of the rows so far, as JSON data."""
        rows_sha256, position = f"{self.rows_sum % 2**256:064x}", self._position._asdict()
        return {"position": position, "rows_sha256": rows_sha256, "shards": self._lengths}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, at any world size, in the same order and data.

        ShardError if the shards are cut elsewhere, which a hash of their tokens cannot tell. Rank 0
        takes rows_sha256 over.
        """
        if state["shards"] != self._lengths:
            raise ShardError("the training shards are cut elsewhere than when the run was saved. "
                             "Restore them, or start a new run.")  # fmt: skip
        self._seek(Position(**state["position"]))
        if self._rank == 0:
            self.rows_sum = int(state["rows_sha256"], 16)


def validation_tokens(files: Files, tokens: int) -> Tokens:
    """Return the first `tokens` tokens and one more, across shards. ShardError if they lack."""
    stream = np.concatenate([Shard(file)[: tokens + 1] for file in files])[: tokens + 1]
    if len(stream) <= tokens:
        raise ShardError(
            f"validation needs {tokens + 1:,} tokens (the last is only a target); its shards hold "
            f"{len(stream):,}. Score fewer tokens, or add shards."
        )
    return stream


def held_out_tokens(files: Files, settings: Settings) -> tuple[Tokens, int]:
    """Return the held-out tokens to score, and how many the training data must leave out.

    The tokens are at most as many as in validation, with the one before them; none for other texts.
    """
    shard = Shard(files[-1])
    known = settings["val_sha256"] and PROSE.startswith(settings["val_sha256"]) and len(files) == 1
    if not known or len(shard) <= HELD_OUT or settings["val_seq_len"] > HELD_OUT:
        return shard[:0], 0
    first, count = len(shard) - HELD_OUT - 1, min(HELD_OUT, settings["val_tokens"])
    return shard[first : first + count + 1], HELD_OUT


def validation_batches(
    files: Files, settings: Settings, most: int, reach: int = 0, rank: int = 0, world_size: int = 1
) -> list[Batch]:
    """Return this rank's part of the first `val_tokens` tokens: see `scored_batches`."""
    stream = validation_tokens(files, settings["val_tokens"])
    return scored_batches(stream, settings, most, reach, rank, world_size)


def scored_batches(
    stream: Tokens, settings: Settings, most: int, reach: int, rank: int, world_size: int
) -> list[Batch]:
    """Return this rank's part of the targets in a stream of tokens, in their order.

    A batch has at most `most` targets: rows of `val_seq_len`, or a part of one, whose inputs start
    `reach` tokens earlier. Ranks may differ by one row.
    """
    bos = settings["bos"] if settings["document_mask"] else None
    seq_len, rows = settings["val_seq_len"], _rows(stream, settings["val_seq_len"])
    at_once = divisors(len(rows) // world_size, most // seq_len)[-1]
    most_documents = at_once * int(_begins(rows, bos).sum(1).max())  # in a batch of any rank
    batches = []
    for own in _deal(len(rows), at_once, rank, world_size):
        for start in range(0, seq_len, most):
            first = max(start - reach, 0)
            batch = _make_batch(rows[own, first : start + most + 1], bos, most_documents)
            batches.append(batch._replace(targets=batch.targets[:, start - first :]))
    return batches


def _rows(stream: Tokens, seq_len: int) -> Tokens:
    """Return the rows of a stream, (n, seq_len + 1): the last token of each begins the next."""
    return np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len]


class Data:
    """The data of one rank.

    readings: see `Order`; reach: see `scored_batches`. ShardError if the shards are missing,
    damaged or too few, ValueError if the world size does not divide the rows.
    """

    def __init__(
        self, settings: Settings, readings: Sequence[Reading], reach: int, rank: int = 0,
        world_size: int = 1,
    ) -> None:  # fmt: skip
        bos = settings["bos"] if settings["document_mask"] else None
        order = Order(settings["seq_len"], bos, readings)
        files = find_shards(settings, "train")
        steps, most = settings["steps"], settings["micro_batch"]
        tokens, left_out = held_out_tokens(files, settings)
        self.train = TrainLoader(files, order, steps, rank, world_size, most, left_out)
        own = settings, settings["val_batch"], reach, rank, world_size
        self.held_out = scored_batches(tokens, *own) if len(tokens) else []
        stream = validation_tokens(find_shards(settings, "val"), settings["val_tokens"])
        self.validation = scored_batches(stream, *own)
        # Of this rank's validation targets: how many are of ranks before it, and how far back the
        # pair that each one ends stood last in its document.
        rows = _rows(stream, settings["val_seq_len"])
        first, end = _share(len(rows), rank, world_size)
        self.val_before = first * settings["val_seq_len"]
        self.val_distances = pair_distances(rows[first:end], settings["bos"]).ravel()
        scored = [*self.validation, *self.held_out]
        lengths = [int(batch.cu_seqlens.diff().max()) for batch in scored]
        self.val_longest = max(lengths, default=0)  # of a document; a rank may have no rows

    def longest(self, step: int) -> int:
        """Return how many tokens a document has at most in a training row of this step."""
        order = self.train.order
        return order.seq_len if order.bos is None else min(order.at(step)[1], order.seq_len)
