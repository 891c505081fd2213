"""Batches of tokens: document-aligned training steps, contiguous validation, and a run's plan.

A row is `seq_len` tokens and their targets. A step is `batch_tokens / seq_len` rows, the same at
every world size; rank r of W owns rows [r * rows / W, (r + 1) * rows / W). A training row is a list
of pieces: ranges [start, end) of a shard with `seq_len + 1` tokens in all, the last one a target.
The batch and the longest document may change in the course of a run.
The row rule is that of modded-nanogpt, record 42.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data.shards import Shard, ShardError, Tokens

SCAN_BLOCK = 1 << 17  # tokens searched for document starts at once: a step of `short` has 2 or 3

Files = Sequence[str | Path]
Row = list[tuple[int, int]]  # pieces
Walk = Iterator[tuple[list[Row], "Position"]]
Changes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Order:
    """Settings that decide, with the shards, which tokens are in which row of which step."""

    batch_tokens: int  # of a step, all ranks together; a multiple of `seq_len`
    seq_len: int  # tokens of a row
    max_document: int  # longer documents are cut to this many tokens
    bos: int  # the token before each document
    document_mask: bool = True  # rows begin with a document; False: contiguous rows
    data_start: float = 0.0  # share of the first shard that is passed over
    # (step, batch_tokens, max_document): what they are from this step on
    changes: Changes = ()

    @property
    def rows(self) -> int:  # of a step, all ranks together
        return self.batch_tokens // self.seq_len

    def at(self, step: int) -> "Order":
        """Return the order of this step, which counts from 0."""
        now = self
        for first, batch_tokens, max_document in self.changes:
            if step >= first:
                now = replace(self, batch_tokens=batch_tokens, max_document=max_document)
        return now

    @property
    def each(self) -> list["Order"]:
        """The orders that the steps of a run have."""
        return [self.at(step) for step in (0, *(first for first, *_ in self.changes))]

    def begin(self, shards: Sequence[Shard]) -> "Position":
        """Return where the first step reads."""
        return Position(offset=int(self.data_start * len(shards[0])))

    def check(self, world_size: int) -> None:
        """ValueError if the ranks cannot own equally many rows of every step."""
        counts = list(dict.fromkeys(order.rows for order in self.each))
        common = math.gcd(*counts)
        if common % world_size:
            sizes = [str(size) for size in range(1, common + 1) if common % size == 0]
            raise ValueError(
                f"world size {world_size} does not divide {', '.join(map(str, counts))} rows a "
                f"step; start one of {', '.join(sizes)} ranks, or change --batch-tokens or "
                "--seq-len."
            )


def _deal(rows: int, at_once: int, rank: int, world_size: int) -> list[slice]:
    """Return the rows of one rank, `at_once` at a time; the last slice may be shorter."""
    first, end = rank * rows // world_size, (rank + 1) * rows // world_size
    return [slice(start, min(start + at_once, end)) for start in range(first, end, at_once)]


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`, or 1."""
    divisor = max(min(number, limit), 1)
    while number % divisor:
        divisor -= 1
    return divisor


class Batch(NamedTuple):
    """One micro-batch on the host, in pinned memory if CUDA is available."""

    inputs: torch.Tensor  # int32 (rows, seq_len)
    targets: torch.Tensor  # int64 (rows, seq_len)
    cu_seqlens: torch.Tensor  # int32 (capacity,): starts of rows and documents, then the end

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on `device`; the copy does not block the host."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))


def capacity_for(rows: int, documents_per_row: int) -> int:
    """Return the length of cu_seqlens for `rows` rows of at most `documents_per_row` each."""
    entries = rows * documents_per_row + 1  # the end of the last document
    return -(-entries // 32) * 32  # few different lengths, so few compiled graphs


def _begins(rows: Tokens, order: Order) -> NDArray:
    """Return which inputs of rows (n, seq_len + 1) begin a document, (n, seq_len) bool."""
    begins = order.document_mask & (rows[:, :-1] == order.bos)
    begins[:, 0] = True
    return begins


def _make_batch(rows: Tokens, order: Order, capacity: int) -> Batch:
    """Make a batch from tokens (n, seq_len + 1)."""
    count, seq_len = rows.shape[0], rows.shape[1] - 1
    starts = np.flatnonzero(_begins(rows, order))
    pin = torch.cuda.is_available()
    inputs = torch.empty((count, seq_len), dtype=torch.int32, pin_memory=pin)
    targets = torch.empty((count, seq_len), dtype=torch.int64, pin_memory=pin)
    cu_seqlens = torch.full((capacity,), count * seq_len, dtype=torch.int32, pin_memory=pin)
    inputs.numpy()[:] = rows[:, :-1]
    targets.numpy()[:] = rows[:, 1:]
    cu_seqlens.numpy()[: len(starts)] = starts
    return Batch(inputs, targets, cu_seqlens)


def hash_rows(step: int, first: int, batch: Batch) -> int:
    """The sum of the SHA-256 of rows, as big-endian numbers: the same however rows are shared out.

    step: counted from 1. first: place of the batch's first row in the whole batch of the step.
    Hashed are step, place, inputs and targets, each an 8-byte little-endian integer.
    """
    total = 0
    rows = zip(batch.inputs.numpy(), batch.targets.numpy(), strict=True)
    for place, (inputs, targets) in enumerate(rows, first):
        numbers = np.concatenate([(step, place), inputs, targets]).astype("<i8")
        total += int.from_bytes(hashlib.sha256(numbers.data).digest())
    return total


class Position(NamedTuple):
    step: int = 0  # steps before this position
    shard: int = 0
    offset: int = 0  # token of the shard where the next step begins to read


def _walk(shards: Sequence[Shard], order: Order, position: Position) -> Walk:
    """Yield (rows of all ranks, position after them) for each step, then raise ShardError."""
    step, index, offset = position
    while index < len(shards):
        rows, end = _next_rows(shards[index], order.at(step), offset)
        if not rows:  # no step spans two shards: the rest of a shard is dropped
            index, offset = index + 1, 0
            continue
        step, offset = step + 1, end
        yield rows, Position(step, index, offset)
    rule = "contiguous rows"
    if order.document_mask:
        rule = f"documents that start with token {order.bos}"
    raise ShardError(
        f"the data end after {step:,} steps: {sum(map(len, shards)):,} tokens, read as {rule}. "
        f"Set --steps to at most {step:,}, or add shards."
    )


def _next_rows(tokens: Shard, order: Order, offset: int) -> tuple[list[Row], int]:
    """Return the rows of a step from `offset` on, and where they end; no rows if too few remain."""
    find_rows = _aligned_rows if order.document_mask else _dense_rows
    found = list(islice(find_rows(tokens, order, offset), order.rows))
    if len(found) < order.rows:
        return [], offset
    return [row for row, _ in found], found[-1][1]


def _aligned_rows(tokens: Shard, order: Order, offset: int) -> Iterator[tuple[Row, int]]:
    """Yield rows of whole or cut documents, each with the offset where the next row begins."""
    row: Row = []
    missing = order.seq_len + 1
    for start, stop in _documents(tokens, order.bos, offset):
        end = min(stop, start + order.max_document, start + missing)  # the tail is dropped
        row.append((start, end))
        missing -= end - start
        if missing == 0:
            yield row, stop
            row, missing = [], order.seq_len + 1


def _documents(tokens: Shard, bos: int, offset: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each document from `offset` on. Reads block by block, as needed."""
    starts: list[int] = []
    for first in range(offset, len(tokens), SCAN_BLOCK):
        block = tokens[first : first + SCAN_BLOCK]
        starts = starts[-1:] + (first + np.flatnonzero(block == bos)).tolist()
        yield from pairwise(starts)
    for start in starts[-1:]:
        yield start, len(tokens)


def _dense_rows(tokens: Shard, order: Order, offset: int) -> Iterator[tuple[Row, int]]:
    """Yield contiguous rows; the last target of a row is the first input of the next."""
    for start in range(offset, len(tokens) - order.seq_len, order.seq_len):
        yield [(start, start + order.seq_len + 1)], start + order.seq_len


def _most_documents(rows: list[Row]) -> int:
    """Return the most documents among the inputs of a row. Its last token is only a target."""
    return max(len(row) - (row[-1][1] - row[-1][0] == 1) for row in rows)


class Plan(NamedTuple):
    """How much the steps of a run read, and where they end."""

    tokens_needed: int  # tokens read or passed over by the steps
    tokens_available: int
    max_documents: int  # most documents in one row
    end: Position


def plan_run(files: Files, order: Order, steps: int) -> Plan:
    """Walk the data as TrainLoader will, without batches. ShardError if they do not suffice."""
    shards = [Shard(file) for file in files]
    begin, most = order.begin(shards), 0
    walk, end = _walk(shards, order, begin), begin
    for _ in range(steps):
        rows, end = next(walk)
        most = max(most, _most_documents(rows))
    for later in order.each[1:]:  # warm-up reads the first shard as each later stage would
        rows, offset = _next_rows(shards[0], later, 0)
        while rows:
            most = max(most, _most_documents(rows))
            rows, offset = _next_rows(shards[0], later, offset)
    passed = sum(map(len, shards[: end.shard])) + end.offset
    return Plan(passed, sum(map(len, shards)), most, end)


class TrainLoader(Iterator[list[Batch]]):
    """Iterator over steps; `next(loader)` is the list of this rank's micro-batches.

    A background thread builds the next step. When the data end, it raises ShardError and not
    StopIteration, which would end a for loop in silence. max_documents: the plan's, for cu_seqlens.
    """

    def __init__(
        self, files: Files, order: Order, max_documents: int, rank: int = 0, world_size: int = 1
    ) -> None:
        order.check(world_size)
        self.order = order
        self._max_documents = max_documents
        self._rank, self._world_size = rank, world_size
        self._shards = [Shard(file) for file in files]
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-loader")
        self._position = order.begin(self._shards)  # of the next step handed out, not built ahead
        self.split(max(each.batch_tokens for each in order.each))

    def split(self, micro_batch: int) -> None:
        """From the next step on, hand out equal micro-batches of at most `micro_batch` tokens."""
        self._most_rows = micro_batch // self.order.seq_len
        self._seek(self._position)

    def shares(self, step: int) -> tuple[int, int]:
        """Return (micro-batches, rows of each) of this rank at a step: as few as fit."""
        rows = self.order.at(step).rows // self._world_size
        micro_rows = largest_divisor(rows, self._most_rows)
        return rows // micro_rows, micro_rows

    def reset(self, step: int = 0) -> None:
        """Go back to the first step, or for warm-up read the first shard in this step's order."""
        self._seek(Position(step) if step else self.order.begin(self._shards))

    def _seek(self, position: Position) -> None:
        self._position = position
        self._steps = self._build(_walk(self._shards, self.order, position))
        self._pending: Future | None = None
        self._places: dict[int, dict[str, Any]] = {}  # by step, see `where`
        self.rows_sum = 0  # of `hash_rows` over this rank's rows so far

    def __next__(self) -> list[Batch]:
        if self._pending is None:
            self._pending = self._worker.submit(next, self._steps)
        batches, rows_sum, place, self._position = self._pending.result()
        self.rows_sum += rows_sum
        self._places[self._position.step] = place
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
        return _make_batch(whole, self.order, capacity_for(len(rows), self._max_documents))

    def where(self, step: int) -> dict[str, Any]:
        """Return {"shard", "token_offset"} of a step, counted from 1, read since the last seek."""
        return self._places[step]

    def state_dict(self) -> dict[str, Any]:
        """Return the next step's position and the order, as JSON data equal on all ranks."""
        order: dict[str, Any] = asdict(self.order)
        order["changes"] = [list(change) for change in self.order.changes]
        for index, shard in enumerate(self._shards):
            order[f"shard {index}"] = f"{shard.path.name} of {len(shard):,} tokens"
        rows_sha256 = f"{self.rows_sum % 2**256:064x}"
        return {"position": self._position._asdict(), "order": order, "rows_sha256": rows_sha256}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, at any world size. ValueError names what differs.

        rows_sha256 is that of all ranks; rank 0 takes it over.
        """
        here = self.state_dict()["order"]
        for name, was in state["order"].items():
            if was != here.get(name):  # shards may have been added
                raise ValueError(
                    f"the saved data position does not fit this run: {name} was {was} and is "
                    f"{here.get(name, 'absent')}. Resume with the saved run's settings and shards."
                )
        self._seek(Position(**state["position"]))
        if self._rank == 0:
            self.rows_sum = int(state["rows_sha256"], 16)


def validation_batches(
    files: Files, order: Order, tokens: int, seq_len: int, most: int, rank: int, world_size: int
) -> list[Batch]:
    """Return this rank's share of the first `tokens` tokens, contiguous across shards.

    A batch has at most `most` tokens, or one row of `seq_len`. Ranks may differ by one row.
    ShardError if the tokens do not suffice.
    """
    stream = np.concatenate([Shard(file)[: tokens + 1] for file in files])[: tokens + 1]
    if len(stream) <= tokens:
        raise ShardError(
            f"validation needs {tokens + 1:,} tokens (the last is only a target); its shards hold "
            f"{len(stream):,}. Lower --val-tokens, or add shards."
        )
    rows = np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len]
    at_once = largest_divisor(len(rows) // world_size, most // seq_len)
    most_documents = int(_begins(rows, order).sum(1).max())
    capacity = capacity_for(at_once, most_documents)  # of all batches on all ranks
    own = _deal(len(rows), at_once, rank, world_size)
    return [_make_batch(rows[part], order, capacity) for part in own]


def in_parts(batches: list[Batch], most: int, reach: int) -> list[Batch]:
    """Cut rows longer than `most` into parts of `most` targets; inputs start `reach` earlier."""
    parts = []
    for batch in batches:
        seq_len = batch.targets.size(1)
        if most >= seq_len:
            parts.append(batch)
            continue
        for start in range(0, seq_len, most):
            first, end = max(start - reach, 0), min(start + most, seq_len)
            # Boundaries outside the part become its start or its end: empty documents.
            ends = (batch.cu_seqlens - first).clamp(0, end - first)
            parts.append(Batch(batch.inputs[:, first:end], batch.targets[:, start:end], ends))
    return parts


@dataclass(frozen=True)
class Data:
    """The data of one rank in a run."""

    train: TrainLoader
    validation: list[Batch]
    plan: Plan
    val_longest: int  # tokens of the longest document in this rank's validation rows

    def longest(self, step: int) -> int:
        """Return how many tokens a document has at most in a training row of this step."""
        order = self.train.order.at(step)
        return min(order.max_document, order.seq_len) if order.document_mask else order.seq_len


def read_order(settings: Mapping[str, Any], changes: Changes = ()) -> Order:
    names = [field.name for field in fields(Order) if field.name in settings]
    return Order(**{name: settings[name] for name in names}, changes=changes)


def open_data(
    train_files: Files, val_files: Files, settings: Mapping[str, Any], changes: Changes,
    reach: int, rank: int, world_size: int,
) -> Data:  # fmt: skip
    """Open one rank's data. With micro_batch None in `settings`, all its rows are one batch.

    changes: see `Order`; reach: see `in_parts`. ShardError if the shards do not suffice, ValueError
    if the world size does not divide the rows.
    """
    order = read_order(settings, changes)
    order.check(world_size)  # first: the walk may run out of data
    plan = plan_run(train_files, order, settings["steps"])
    train = TrainLoader(train_files, order, plan.max_documents, rank, world_size)
    train.split(settings["micro_batch"] or max(each.batch_tokens for each in order.each))
    validation = validation_batches(
        val_files, order, settings["val_tokens"], settings["val_seq_len"], settings["val_batch"],
        rank, world_size,
    )  # fmt: skip
    lengths = [int(batch.cu_seqlens.diff().max()) for batch in validation]
    val_longest = max(lengths, default=settings["val_seq_len"])  # a rank may have no rows
    return Data(train, in_parts(validation, settings["val_batch"], reach), plan, val_longest)
