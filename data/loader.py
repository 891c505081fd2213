"""Batches of tokens: document-aligned training steps, contiguous validation, and the plan that says if data suffice.

The unit is the row: `sequence` tokens and their targets. A step is `batch_tokens / sequence` rows, the same for any
world size; rank r of W owns rows [r*rows/W, (r+1)*rows/W). Here a row is a list of pieces, [start, end) ranges of one
shard that add up to `sequence + 1` tokens. One generator, `_walk`, makes the rows for both the loader and the plan.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data.shards import ShardError, open_shard

SCAN_BLOCK = 1 << 22  # tokens searched for document starts at once: few milliseconds, several batches
CAPACITY_MULTIPLE = 128  # lengths of cu_seqlens come in few sizes, so that few graphs are compiled

Piece = tuple[int, int]
Row = list[Piece]


class NotEnoughTokens(ShardError):
    """The shards end before the run does: names the steps and tokens there are, and the fix."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: inputs int32 (rows, sequence), targets int64 (rows, sequence), cu_seqlens int32 (capacity,).

    cu_seqlens bounds the documents of the flattened rows * sequence tokens: first 0, then each row start and document
    start, the rest filled with rows * sequence. Host tensors are pinned where CUDA is available.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`; the copy does not block the host."""
        tensors = (self.inputs, self.targets, self.cu_seqlens)
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors))


def capacity_for(rows: int, documents_per_row: int) -> int:
    """Length of cu_seqlens that holds `rows` rows of up to `documents_per_row` documents, a multiple of 128."""
    entries = rows * documents_per_row + 1  # the end of the last document
    return -(-entries // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


def largest_divisor(number: int, limit: int) -> int:
    """The most rows, at most `limit`, in which `number` rows can be taken in equal micro-batches."""
    return max(divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)


def _make_batch(tokens: NDArray[np.uint16], rows: Sequence[Row], sequence: int, capacity: int) -> Batch:
    pin = torch.cuda.is_available()
    inputs = torch.empty((len(rows), sequence), dtype=torch.int32, pin_memory=pin)
    targets = torch.empty((len(rows), sequence), dtype=torch.int64, pin_memory=pin)
    cu_seqlens = torch.full((capacity,), len(rows) * sequence, dtype=torch.int32, pin_memory=pin)

    boundaries: list[int] = []
    for index, row in enumerate(rows):
        buffer = np.concatenate([tokens[start:end] for start, end in row])
        inputs.numpy()[index] = buffer[:-1]
        targets.numpy()[index] = buffer[1:]
        boundaries += [index * sequence + start for start in _document_starts(row, sequence)]

    if len(boundaries) >= capacity:
        raise ValueError(
            f"a micro-batch of {len(rows)} rows holds {len(boundaries)} documents, but capacity is {capacity}; it must "
            f"exceed the documents by one. Take it from capacity_for(micro_rows, plan_run(...).max_documents)."
        )
    cu_seqlens.numpy()[: len(boundaries)] = boundaries
    return Batch(inputs, targets, cu_seqlens)


def _document_starts(row: Row, sequence: int) -> list[int]:
    """Where documents start among the inputs of a row; the last of its sequence + 1 tokens is only a target."""
    starts = accumulate((end - start for start, end in row), initial=0)
    return [start for start in starts if start < sequence]


@dataclass(frozen=True)
class Order:
    """The parameters that, with the shards, define which tokens stand in which row of which step."""

    batch_tokens: int
    sequence: int
    max_document: int
    bos: int
    align: bool

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.batch_tokens < 1 or self.batch_tokens % self.sequence:
            raise ValueError(
                f"batch_tokens {self.batch_tokens:,} is not a multiple of sequence {self.sequence:,}; a batch is a "
                f"whole number of rows. Change one of the two."
            )
        if self.max_document < 1:
            raise ValueError(f"max_document is {self.max_document}; a document keeps at least 1 token. Raise it.")

    @property
    def rows(self) -> int:
        return self.batch_tokens // self.sequence


class Position(NamedTuple):
    """Between two steps: steps before it, shard, and token offset in the shard where the next step begins to read."""

    step: int
    shard: int
    offset: int


START = Position(0, 0, 0)


class _Step(NamedTuple):
    tokens: NDArray[np.uint16]  # of the shard that the rows point into
    rows: list[Row]  # of all ranks
    end: Position


def _walk(shards: Sequence[NDArray[np.uint16]], order: Order, position: Position) -> Iterator[_Step]:
    """Every step from `position` to the end of the data. A step never spans shards: what is left of one is dropped."""
    batches = _aligned_batches if order.align else _dense_batches
    step, offset = position.step, position.offset
    for shard in range(position.shard, len(shards)):
        for rows, end in batches(shards[shard], order, offset):
            step += 1
            yield _Step(shards[shard], rows, Position(step, shard, end))
        offset = 0


def _aligned_batches(tokens: NDArray[np.uint16], order: Order, offset: int) -> Iterator[tuple[list[Row], int]]:
    """Rows that start with a document; a document cut by max_document or by the end of its row loses its tail."""
    documents = _documents(tokens, order.bos, offset)
    while True:
        rows: list[Row] = []
        for _ in range(order.rows):
            row: Row = []
            missing = order.sequence + 1
            while missing:
                document = next(documents, None)
                if document is None:
                    return
                start, stop = document
                end = min(stop, start + order.max_document, start + missing)
                row.append((start, end))
                missing -= end - start
            rows.append(row)
        yield rows, stop


def _documents(tokens: NDArray[np.uint16], bos: int, offset: int) -> Iterator[Piece]:
    """Documents from `offset` on, each from its BOS to the next one; a block is scanned only when it is reached."""
    start = None
    for begin in range(offset, len(tokens), SCAN_BLOCK):
        found = np.flatnonzero(tokens[begin : begin + SCAN_BLOCK] == bos) + begin
        for stop in found.tolist():
            if start is not None:
                yield start, stop
            start = stop
    if start is not None:
        yield start, len(tokens)


def _dense_batches(tokens: NDArray[np.uint16], order: Order, offset: int) -> Iterator[tuple[list[Row], int]]:
    """Contiguous rows of one piece each; neighbours share the token that is target of one and input of the other."""
    while offset + order.batch_tokens < len(tokens):
        end = offset + order.batch_tokens
        yield [[(start, start + order.sequence + 1)] for start in range(offset, end, order.sequence)], end
        offset = end


@dataclass(frozen=True)
class Plan:
    """What a run of `steps` steps reads: tokens_needed counts all that it passes, dropped tails included."""

    steps: int
    tokens_needed: int
    tokens_available: int
    max_documents: int  # most documents in one row
    end: Position


def plan_run(
    files: Sequence[str | Path],
    *,
    steps: int,
    batch_tokens: int,
    sequence: int,
    max_document: int,
    bos: int,
    align: bool = True,
) -> Plan:
    """Walk over the documents of a run without copying tokens; exact, and the same walk as TrainLoader's.

    Raises NotEnoughTokens when the data end before `steps`, ShardError for a bad shard, ValueError for bad sizes.
    """
    order = Order(batch_tokens, sequence, max_document, bos, align)
    shards = [open_shard(file) for file in files]
    end, max_documents = START, 0
    for step in islice(_walk(shards, order, START), steps):
        end = step.end
        max_documents = max(max_documents, *(len(_document_starts(row, sequence)) for row in step.rows))

    needed, available = _tokens_before(shards, end), sum(map(len, shards))
    if end.step < steps:
        estimate = steps * (available // end.step if end.step else batch_tokens + 1)
        raise _not_enough(shards, order, end.step, f"of {steps:,} steps", f"; the run needs about {estimate:,}")
    return Plan(steps, needed, available, max_documents, end)


def _tokens_before(shards: Sequence[NDArray[np.uint16]], position: Position) -> int:
    return sum(map(len, shards[: position.shard])) + position.offset


def _not_enough(shards: Sequence[NDArray[np.uint16]], order: Order, had: int, unit: str, need: str) -> NotEnoughTokens:
    rule = f"of documents that start with token {order.bos}" if order.align else "of contiguous rows"
    return NotEnoughTokens(
        f"the data end after {had:,} {unit}: {sum(map(len, shards)):,} tokens in {len(shards)} shard(s){need}. "
        f"A step reads {order.batch_tokens:,} tokens {rule}, all from one shard. "
        f"Fetch more shards, or run at most {had:,} steps."
    )


class TrainLoader:
    """Iterator over optimizer steps: `next(loader)` is the list of this rank's micro-batches, `micro_rows` rows each.

    The step after is built meanwhile in one background thread; nothing is read before the first call. With align=False
    rows are contiguous tokens and the only boundaries. `capacity` is the length of cu_seqlens: see `capacity_for`.
    Raises ValueError for sizes that do not divide, NotEnoughTokens (never StopIteration) when the data end.
    Source of the row plan: modded-nanogpt, record 42.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        *,
        batch_tokens: int,
        sequence: int,
        max_document: int,
        bos: int,
        micro_rows: int,
        capacity: int,
        rank: int = 0,
        world_size: int = 1,
        align: bool = True,
    ) -> None:
        self._order = Order(batch_tokens, sequence, max_document, bos, align)
        self._own = _rows_of_rank(self._order.rows, micro_rows, rank, world_size)
        self._micro_rows = micro_rows
        self._capacity = capacity
        self._names = [Path(file).name for file in files]
        self._shards = [open_shard(file) for file in files]
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-loader")
        self._seek(START)

    def _seek(self, position: Position) -> None:
        self._position = position  # of the next step to be handed out, whatever has been built ahead of it
        self._steps = _walk(self._shards, self._order, position)
        self._pending: Future[tuple[list[Batch], Position]] | None = None

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> list[Batch]:
        if self._pending is None:
            self._pending = self._build_ahead()
        batches, self._position = self._pending.result()
        self._pending = self._build_ahead()
        return batches

    def _build_ahead(self) -> Future[tuple[list[Batch], Position]]:
        # The walk is an argument: a build that a seek left behind advances its own, abandoned one.
        return self._worker.submit(self._build, self._steps, self._position.step)

    def _build(self, steps: Iterator[_Step], had: int) -> tuple[list[Batch], Position]:
        step = next(steps, None)
        if step is None:
            raise _not_enough(self._shards, self._order, had, "steps", "")
        own = step.rows[self._own.start : self._own.stop]
        micro_batches = [own[first : first + self._micro_rows] for first in range(0, len(own), self._micro_rows)]
        sequence = self._order.sequence
        return [_make_batch(step.tokens, rows, sequence, self._capacity) for rows in micro_batches], step.end

    def state_dict(self) -> dict:
        """Position of the next step to be handed out, and what defines the order; JSON-able, the same on all ranks."""
        shards = [[name, len(tokens)] for name, tokens in zip(self._names, self._shards, strict=True)]
        return {"position": self._position._asdict(), "order": asdict(self._order), "shards": shards}

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly there, at any world size; shards added after the saved ones are welcome.

        Raises ValueError that names each difference in the order or in the shards.
        """
        here = self.state_dict()
        differences = [
            f"{name} was {was} and is {here['order'][name]}"
            for name, was in state["order"].items()
            if was != here["order"][name]
        ]
        for index, saved in enumerate(state["shards"]):
            found = here["shards"][index] if index < len(here["shards"]) else None
            if saved != found:
                now = f"{found[0]} of {found[1]:,} tokens" if found else "absent"
                differences.append(f"shard {index} was {saved[0]} of {saved[1]:,} tokens and is {now}")
                break
        if differences:
            raise ValueError(
                f"the saved data position does not fit this run: {'; '.join(differences)}. The order of the tokens "
                f"must be the same: resume with the settings and shards of the saved run, or start a new one."
            )
        self._seek(Position(**state["position"]))

    def reset(self) -> None:
        """Back to the first step."""
        self._seek(START)

    def close(self) -> None:
        """Stop the background thread; the loader cannot be used after."""
        self._pending = None
        self._worker.shutdown(cancel_futures=True)

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _rows_of_rank(rows: int, micro_rows: int, rank: int, world_size: int) -> range:
    if world_size < 1 or rows % world_size:
        raise ValueError(
            f"world size {world_size} does not divide the {rows} rows of a batch; world_size must divide the rows of a "
            f"batch. Start a number of processes that does, or change batch_tokens or sequence."
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; it must be in 0..{world_size - 1}. Check how the processes were started.")
    per_rank = rows // world_size
    if micro_rows < 1 or per_rank % micro_rows:
        raise ValueError(
            f"micro_rows {micro_rows} does not divide the {per_rank} rows of a rank ({rows} rows over {world_size} "
            f"ranks); micro_rows must divide rows per rank. Choose a divisor of {per_rank}."
        )
    return range(rank * per_rank, (rank + 1) * per_rank)


def validation_batches(
    files: Sequence[str | Path],
    *,
    val_tokens: int,
    sequence: int,
    rows: int,
    bos: int,
    rank: int = 0,
    world_size: int = 1,
    documents: bool = True,
) -> list[Batch]:
    """This rank's share of the first `val_tokens` tokens, contiguous across shards, in batches of at most `rows` rows.

    Rows are dealt in contiguous blocks, as evenly as they go: ranks may differ by one row or have none. Boundaries are
    row starts and, with `documents`, each BOS of the inputs. cu_seqlens has one length, equal on all ranks.
    Raises NotEnoughTokens below val_tokens + 1 tokens, ValueError when val_tokens is not a multiple of sequence.
    """
    if sequence < 1 or val_tokens < 1 or val_tokens % sequence:
        raise ValueError(
            f"val_tokens {val_tokens:,} is not a multiple of sequence {sequence:,}; validation is a whole number of "
            f"rows. Change one of the two."
        )
    if rows < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"rows is {rows}, rank {rank}, world size {world_size}; validation needs rows >= 1 and a rank in "
            f"0..{world_size - 1}. Check the setting and how the processes were started."
        )
    tokens = _first_tokens(files, val_tokens + 1)
    cuts = np.flatnonzero(tokens == bos) if documents else np.empty(0, dtype=np.int64)
    all_rows = [_contiguous_row(cuts, start, sequence) for start in range(0, val_tokens, sequence)]

    dealt = [_deal(all_rows, rows, each, world_size) for each in range(world_size)]
    most = max(sum(len(_document_starts(row, sequence)) for row in group) for groups in dealt for group in groups)
    return [_make_batch(tokens, group, sequence, capacity_for(1, most)) for group in dealt[rank]]


def _first_tokens(files: Sequence[str | Path], count: int) -> NDArray[np.uint16]:
    parts: list[NDArray[np.uint16]] = []
    missing = count
    for file in files:
        parts.append(open_shard(file)[:missing])
        missing -= len(parts[-1])
        if missing == 0:
            return np.concatenate(parts)
    raise NotEnoughTokens(
        f"validation needs {count:,} tokens (the last one is only a target), but the {len(files)} validation shard(s) "
        f"hold {count - missing:,}. Fetch the whole validation data, or lower val_tokens."
    )


def _contiguous_row(cuts: NDArray[np.int64], start: int, sequence: int) -> Row:
    """The row at `start`, cut into pieces at those `cuts` that lie inside its inputs."""
    first, last = np.searchsorted(cuts, [start + 1, start + sequence])
    return list(pairwise([start, *cuts[first:last].tolist(), start + sequence + 1]))


def _deal(all_rows: Sequence[Row], rows: int, rank: int, world_size: int) -> list[Sequence[Row]]:
    """The batches of one rank: its contiguous share of all rows, `rows` at a time."""
    own = all_rows[rank * len(all_rows) // world_size : (rank + 1) * len(all_rows) // world_size]
    return [own[first : first + rows] for first in range(0, len(own), rows)]


DATA_SETTINGS = (  # keywords of `open_data` that a run's configuration gives; the last five define the order
    "steps", "micro_batch", "val_tokens", "val_sequence", "val_batch",
    "batch_tokens", "sequence", "max_document", "bos", "align",
)  # fmt: skip


class Data(NamedTuple):
    """All that a run reads: training steps, validation batches, and what the steps need."""

    train: TrainLoader
    validation: list[Batch]
    plan: Plan
    micro_rows: int


def open_data(
    train_files: Sequence[str | Path],
    val_files: Sequence[str | Path],
    *,
    steps: int,
    micro_batch: int,
    val_tokens: int,
    val_sequence: int,
    val_batch: int,
    rank: int,
    world_size: int,
    **order: Any,
) -> Data:
    """Training and validation for one rank, in equal micro-batches of at most `micro_batch` and `val_batch` tokens.

    `order` are the parameters of Order. Raises what `plan_run`, TrainLoader and `validation_batches` raise.
    """
    rows = Order(**order).rows
    if rows % world_size:
        fitting = [n for n in range(1, rows + 1) if rows % n == 0]
        raise ValueError(
            f"world size {world_size} does not divide the {rows} rows of a batch. Start one of {fitting} processes."
        )
    place: dict[str, Any] = {"rank": rank, "world_size": world_size}
    plan = plan_run(train_files, steps=steps, **order)
    micro_rows = largest_divisor(rows // world_size, micro_batch // order["sequence"])
    capacity = capacity_for(micro_rows, plan.max_documents)
    train = TrainLoader(train_files, **order, micro_rows=micro_rows, capacity=capacity, **place)
    val_rows = largest_divisor(max(val_tokens // val_sequence // world_size, 1), val_batch // val_sequence)
    validation = validation_batches(
        val_files, val_tokens=val_tokens, sequence=val_sequence, rows=val_rows, bos=order["bos"],
        documents=order["align"], **place,
    )  # fmt: skip
    return Data(train, validation, plan, micro_rows)
