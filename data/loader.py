"""Batches of tokens: document-aligned training steps, contiguous validation, and the plan that says if data suffice.

The unit is the row: `sequence` tokens and their targets. A step is `batch_tokens / sequence` rows, the same for any
world size; rank r of W owns rows [r*rows/W, (r+1)*rows/W). While training, a row is a list of pieces, [start, end)
ranges of one shard that add up to `sequence + 1` tokens. One generator, `_walk`, finds the rows for loader and plan.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from data.shards import Shard, ShardError, Tokens, open_shard

SCAN_BLOCK = 1 << 20  # tokens searched for document starts at once: 2 MiB, which a processor's cache holds
CAPACITY_MULTIPLE = 32  # few lengths, few graphs; fused attention starts work for each document that might be there
STEPS_KEPT = 8  # latest steps whose place and batches are remembered: a fault is noticed some steps late
DATA_SETTINGS = (  # keywords of `open_data` that a run's configuration gives; the last five are the fields of Order
    "steps", "micro_batch", "val_tokens", "val_sequence", "val_batch",
    "batch_tokens", "sequence", "max_document", "bos", "align",
)  # fmt: skip

Files = Sequence[str | Path]
Piece = tuple[int, int]
Row = list[Piece]


class NotEnoughTokens(ShardError):
    """The shards end before the run does: names the steps and tokens there are, and the fix."""


@dataclass(frozen=True)
class Order:
    """What defines, with the shards, which tokens stand in which row of which step; align=False: contiguous rows."""

    batch_tokens: int
    sequence: int
    max_document: int
    bos: int
    align: bool = True

    def __post_init__(self) -> None:
        _count_rows("batch_tokens", self.batch_tokens, self.sequence)
        if self.max_document < 1:
            raise ValueError(f"max_document is {self.max_document}; a document keeps at least 1 token. Raise it.")

    @property
    def rows(self) -> int:
        return self.batch_tokens // self.sequence

    def rows_of_rank(self, world_size: int) -> int:
        """Rows of a step that each rank owns; ValueError where they cannot all own as many."""
        if world_size < 1 or self.rows % world_size:
            fitting = [n for n in range(1, self.rows + 1) if self.rows % n == 0]
            raise ValueError(
                f"world size {world_size} does not divide the {self.rows} rows of a batch. Start one of {fitting} "
                f"processes, or change batch_tokens or sequence."
            )
        return self.rows // world_size


def _count_rows(name: str, tokens: int, sequence: int) -> int:
    if sequence < 1 or tokens < 1 or tokens % sequence:
        raise ValueError(f"{name} {tokens:,} is not a multiple of sequence {sequence:,}; it must be. Change one.")
    return tokens // sequence


def _deal(rows: int, at_once: int, rank: int, world_size: int) -> list[slice]:
    """The micro-batches of one rank: its contiguous share of all rows, `at_once` at a time."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; it must be in 0..{world_size - 1}. Check how the processes were started.")
    first, end = rank * rows // world_size, (rank + 1) * rows // world_size
    return [slice(start, min(start + at_once, end)) for start in range(first, end, at_once)]


class Batch(NamedTuple):
    """One micro-batch: inputs int32 (rows, sequence), targets int64 (rows, sequence), cu_seqlens int32 (capacity,).

    cu_seqlens bounds the documents of the flattened rows * sequence tokens: first 0, then each row start and document
    start, the rest filled with rows * sequence. Host tensors are pinned where CUDA is available. In a part of a row
    targets are those of its last inputs, and 0 may stand several times.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`; the copy does not block the host."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))


def capacity_for(rows: int, documents_per_row: int) -> int:
    """Length of cu_seqlens that holds `rows` rows of up to `documents_per_row` documents, a multiple of 32."""
    entries = rows * documents_per_row + 1  # the end of the last document
    return -(-entries // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


def _make_batch(rows: Tokens, starts: Sequence[int] | NDArray[np.int64], capacity: int) -> Batch:
    """From (rows, sequence + 1) tokens and the places in the flattened inputs where rows and documents start."""
    count, sequence = rows.shape[0], rows.shape[1] - 1
    if len(starts) >= capacity:
        raise ValueError(
            f"a micro-batch of {count} rows holds {len(starts)} documents, but capacity is {capacity}; it must exceed "
            f"the documents by one. Take it from capacity_for(micro_rows, plan_run(...).max_documents)."
        )
    pin = torch.cuda.is_available()
    inputs = torch.empty((count, sequence), dtype=torch.int32, pin_memory=pin)
    targets = torch.empty((count, sequence), dtype=torch.int64, pin_memory=pin)
    cu_seqlens = torch.full((capacity,), count * sequence, dtype=torch.int32, pin_memory=pin)
    inputs.numpy()[:] = rows[:, :-1]
    targets.numpy()[:] = rows[:, 1:]
    cu_seqlens.numpy()[: len(starts)] = starts
    return Batch(inputs, targets, cu_seqlens)


# ---- The walk over the training shards


class Position(NamedTuple):
    """Between two steps: steps before it, shard, and token offset in the shard where the next step begins to read."""

    step: int
    shard: int
    offset: int


START = Position(0, 0, 0)
Step = tuple[list[Row], Position]  # the rows of all ranks, and the end, in the shard that the rows point into


def _walk(shards: Sequence[Shard], order: Order, position: Position, wanted: int | None = None) -> Iterator[Step]:
    """Every step from `position` on, then NotEnoughTokens. No step spans shards: what is left of one is dropped."""
    find_rows = _aligned_rows if order.align else _dense_rows
    step, offset = position.step, position.offset
    for shard in range(position.shard, len(shards)):
        found = find_rows(shards[shard], order, offset)
        while len(batch := list(islice(found, order.rows))) == order.rows:
            step += 1
            yield [row for row, _ in batch], Position(step, shard, batch[-1][1])
        offset = 0

    available, of, need = sum(map(len, shards)), "", ""
    if wanted:
        estimate = wanted * (available // step if step else order.batch_tokens + 1)
        of, need = f" of {wanted:,}", f"; the run needs about {estimate:,}"
    rule = f"documents that start with token {order.bos}" if order.align else "contiguous rows"
    raise NotEnoughTokens(
        f"the data end after {step:,}{of} steps: {available:,} tokens in {len(shards)} shard(s){need}. "
        f"A step reads {order.batch_tokens:,} tokens of {rule}, all from one shard. "
        f"Fetch more shards, or run at most {step:,} steps."
    )


def _aligned_rows(tokens: Shard, order: Order, offset: int) -> Iterator[tuple[Row, int]]:
    """Rows that start with a document, and where the next one reads on; a document that is cut loses its tail."""
    row: Row = []
    missing = order.sequence + 1
    for start, stop in _documents(tokens, order.bos, offset):
        end = min(stop, start + order.max_document, start + missing)
        row.append((start, end))
        missing -= end - start
        if not missing:
            yield row, stop
            row, missing = [], order.sequence + 1


def _documents(tokens: Shard, bos: int, offset: int) -> Iterator[Piece]:
    """Documents from `offset` on, each from its BOS to the next one; a block is scanned only when it is reached."""
    blocks = ((begin, tokens[begin : begin + SCAN_BLOCK]) for begin in range(offset, len(tokens), SCAN_BLOCK))
    starts = chain.from_iterable((begin + np.flatnonzero(block == bos)).tolist() for begin, block in blocks)
    return pairwise(chain(starts, [len(tokens)]))


def _dense_rows(tokens: Shard, order: Order, offset: int) -> Iterator[tuple[Row, int]]:
    """Contiguous rows of one piece each; neighbours share the token that is target of one and input of the other."""
    for start in range(offset, len(tokens) - order.sequence, order.sequence):
        yield [(start, start + order.sequence + 1)], start + order.sequence


def _document_starts(row: Row, sequence: int) -> list[int]:
    """Where documents start among the inputs of a row; the last of its sequence + 1 tokens is only a target."""
    starts = accumulate((end - start for start, end in row), initial=0)
    return [start for start in starts if start < sequence]


class Plan(NamedTuple):
    """What the steps of a run read: tokens_needed counts all that they pass, dropped tails included."""

    tokens_needed: int
    tokens_available: int
    max_documents: int  # most documents in one row
    end: Position


def plan_run(files: Files, order: Order, steps: int) -> Plan:
    """Walk over the documents of a run without copying tokens; exact, and the same walk as TrainLoader's.

    Raises NotEnoughTokens when the data end before `steps`, ShardError for a bad shard.
    """
    shards = [open_shard(file) for file in files]
    end, max_documents = START, 0
    for rows, position in islice(_walk(shards, order, START, steps), steps):
        max_documents = max(max_documents, *(len(_document_starts(row, order.sequence)) for row in rows))
        end = position
    needed = sum(map(len, shards[: end.shard])) + end.offset
    return Plan(needed, sum(map(len, shards)), max_documents, end)


# ---- Training and validation


class Place(NamedTuple):
    """Where a step was read: the name of the shard, and the range of its tokens that the rows of all ranks lie in."""

    shard: str
    start: int
    end: int


class Built(NamedTuple):
    """A step that is ready: this rank's micro-batches, where it was read, and where the next one begins."""

    batches: list[Batch]
    place: Place
    end: Position


class TrainLoader(Iterator[list[Batch]], AbstractContextManager["TrainLoader"]):
    """Iterator over optimizer steps: `next(loader)` is the list of this rank's micro-batches, `micro_rows` rows each.

    The step after is built meanwhile in one background thread; nothing is read before the first call. `capacity` is
    the length of cu_seqlens: see `capacity_for`. Raises ValueError for sizes that do not divide, NotEnoughTokens
    (never StopIteration) when the data end. Source of the row plan: modded-nanogpt, record 42.
    """

    def __init__(
        self, files: Files, order: Order, *, micro_rows: int, capacity: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.rows = order.rows_of_rank(world_size)
        self._order, self._place = order, (rank, world_size)
        self._shards = [open_shard(file) for file in files]
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-loader")
        self._position = START  # of the next step to be handed out, whatever has been built ahead of it
        self.split(micro_rows, capacity)

    def split(self, micro_rows: int, capacity: int) -> None:
        """From the next step on, hand out micro-batches of `micro_rows` rows."""
        if micro_rows < 1 or self.rows % micro_rows:
            raise ValueError(f"micro_rows {micro_rows} does not divide the {self.rows} rows of a rank. Take a divisor.")
        self.micro_rows, self._capacity = micro_rows, capacity
        self._own = _deal(self._order.rows, micro_rows, *self._place)
        self._seek(self._position)

    def _seek(self, position: Position) -> None:
        self._position = position
        self._steps = _walk(self._shards, self._order, position)
        self._pending: Future[Built] | None = None
        self._handed_out: dict[int, Built] = {}

    def reset(self) -> None:
        """Back to the first step."""
        self._seek(START)

    def __next__(self) -> list[Batch]:
        # The walk is an argument: a build that a seek left behind advances its own, abandoned one.
        self._pending = self._pending or self._worker.submit(self._build, self._steps)
        built = self._pending.result()
        self._position = built.end
        self._handed_out[built.end.step] = built
        self._handed_out.pop(built.end.step - STEPS_KEPT, None)
        self._pending = self._worker.submit(self._build, self._steps)
        return built.batches

    def where(self, step: int) -> Place:
        """Where step `step` of the run, the first being 1, was read; ValueError unless it is one of the last 8."""
        return self._remembered(step).place

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of that step, as they were handed out; raises as `where` does."""
        return self._remembered(step).batches

    def _remembered(self, step: int) -> Built:
        if step not in self._handed_out:
            raise ValueError(f"step {step} is not remembered. Ask for one of the latest: {[*self._handed_out]}.")
        return self._handed_out[step]

    def _build(self, steps: Iterator[Step]) -> Built:
        rows, end = next(steps)
        shard = self._shards[end.shard]
        place = Place(shard.path.name, rows[0][0][0], rows[-1][-1][1])
        return Built([self._micro_batch(shard, rows[own]) for own in self._own], place, end)

    def _micro_batch(self, shard: Shard, rows: list[Row]) -> Batch:
        sequence, first = self._order.sequence, rows[0][0][0]
        tokens = shard[first : rows[-1][-1][1]]  # at once: a read for each piece would cost a system call each
        copied = np.stack([np.concatenate([tokens[start - first : end - first] for start, end in row]) for row in rows])
        starts = [k * sequence + start for k, row in enumerate(rows) for start in _document_starts(row, sequence)]
        return _make_batch(copied, starts, self._capacity)

    def state_dict(self) -> dict[str, Any]:
        """Position of the next step to be handed out, and what defines the order; JSON-able, the same on all ranks."""
        sizes = {f"shard {k}": f"{s.path.name} of {len(s):,} tokens" for k, s in enumerate(self._shards)}
        return {"position": self._position._asdict(), "order": asdict(self._order) | sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly there, at any world size; shards added after the saved ones are welcome.

        Raises ValueError that names each difference in the order or in the shards.
        """
        here = self.state_dict()["order"]
        pairs = {name: (was, here.get(name, "absent")) for name, was in state["order"].items()}
        if differences := [f"{name} was {was} and is {now}" for name, (was, now) in pairs.items() if was != now]:
            raise ValueError(
                f"the saved data position does not fit this run: {'; '.join(differences)}. The order of the tokens "
                f"must be the same: resume with the settings and shards of the saved run, or start a new one."
            )
        self._seek(Position(**state["position"]))

    def __exit__(self, *exception: object) -> None:
        """Stop the background thread; the loader cannot be used after."""
        self._pending = None
        self._worker.shutdown(cancel_futures=True)


def validation_batches(
    files: Files, *, val_tokens: int, sequence: int, rows: int, bos: int, documents: bool, rank: int, world_size: int
) -> list[Batch]:
    """This rank's share of the first `val_tokens` tokens, contiguous across shards, in batches of at most `rows` rows.

    Ranks may differ by one row or have none. Boundaries are row starts and, with `documents`, each BOS of the inputs.
    cu_seqlens has one length on all ranks. Raises NotEnoughTokens, and ValueError for sizes that do not divide.
    """
    count = _count_rows("val_tokens", val_tokens, sequence)
    if rows < 1:
        raise ValueError(f"rows is {rows}; a validation batch has at least one row. Raise it.")
    own = _deal(count, rows, rank, world_size)
    tokens = np.concatenate([open_shard(file)[: val_tokens + 1] for file in files])[: val_tokens + 1]
    if len(tokens) <= val_tokens:
        raise NotEnoughTokens(
            f"validation needs {val_tokens + 1:,} tokens (the last one is only a target), but the {len(files)} "
            f"validation shard(s) hold {len(tokens):,}. Fetch the whole validation data, or lower val_tokens."
        )
    starts = np.arange(0, val_tokens, sequence)
    if documents:
        starts = np.union1d(starts, np.flatnonzero(tokens[:-1] == bos))

    def starts_in(batch: slice) -> NDArray[np.int64]:
        first, end = batch.start * sequence, batch.stop * sequence
        return starts[slice(*np.searchsorted(starts, [first, end]))] - first

    everyones = [batch for each in range(world_size) for batch in _deal(count, rows, each, world_size)]
    capacity = capacity_for(1, max(len(starts_in(batch)) for batch in everyones))
    all_rows = sliding_window_view(tokens, sequence + 1)[::sequence]
    return [_make_batch(all_rows[batch], starts_in(batch), capacity) for batch in own]


class Data(NamedTuple):
    """All that a run reads: training steps, validation batches, and what the steps need."""

    train: TrainLoader
    validation: list[Batch]
    plan: Plan
    sequence: int
    longest: int  # tokens of a document in a training row at the most
    val_longest: int  # the same of this rank's validation rows

    @property
    def micro_rows(self) -> int:
        return self.train.micro_rows

    def split(self, micro_batch: int) -> None:
        """From the next step on, train in equal micro-batches of at most `micro_batch` tokens; data stay open."""
        micro_rows = largest_divisor(self.train.rows, micro_batch // self.sequence)
        self.train.split(micro_rows, capacity_for(micro_rows, self.plan.max_documents))

    def in_parts(self, val_batch: int, reach: int) -> "Data":
        """The same where a validation row that exceeds `val_batch` tokens is taken in parts of so many."""
        return self._replace(validation=[part for batch in self.validation for part in _parts(batch, val_batch, reach)])


def _parts(batch: Batch, tokens: int, reach: int) -> Iterator[Batch]:
    """Parts of the targets' row, each with its inputs and the `reach` before them, which it may depend on."""
    sequence = batch.targets.size(1)
    if tokens >= sequence:
        yield batch
        return
    for start in range(0, sequence, tokens):
        first, end = max(start - reach, 0), min(start + tokens, sequence)
        boundaries = torch.empty_like(batch.cu_seqlens, pin_memory=batch.cu_seqlens.is_pinned())
        torch.clamp(batch.cu_seqlens - first, 0, end - first, out=boundaries)
        yield Batch(batch.inputs[:, first:end], batch.targets[:, start:end], boundaries)


def open_data(
    train_files: Files, val_files: Files, *, rank: int, world_size: int, steps: int, micro_batch: int | None,
    val_tokens: int, val_sequence: int, val_batch: int, **fields: Any,
) -> Data:  # fmt: skip
    """Training and validation for one rank, in equal micro-batches of at most `micro_batch` and `val_batch` tokens.

    micro_batch None: all rows of a rank at once; validation takes one row at the least. `fields` are those of Order.
    Raises what `plan_run`, TrainLoader and `validation_batches` raise.
    """
    order, place = Order(**fields), {"rank": rank, "world_size": world_size}
    rows = order.rows_of_rank(world_size)
    plan = plan_run(train_files, order, steps)
    train = TrainLoader(train_files, order, micro_rows=rows, capacity=capacity_for(rows, plan.max_documents), **place)
    val_rows = largest_divisor(max(val_tokens // val_sequence // world_size, 1), max(val_batch // val_sequence, 1))
    validation = validation_batches(
        val_files, val_tokens=val_tokens, sequence=val_sequence, rows=val_rows, bos=order.bos, documents=order.align,
        **place,
    )  # fmt: skip
    longest = min(order.max_document, order.sequence) if order.align else order.sequence
    val_longest = max((int(batch.cu_seqlens.diff().max()) for batch in validation), default=val_sequence)
    data = Data(train, validation, plan, order.sequence, longest, val_longest)
    if micro_batch is not None:
        data.split(micro_batch)
    return data


def largest_divisor(number: int, limit: int) -> int:
    """The most rows, at most `limit`, in which `number` rows can be taken in equal micro-batches."""
    return max(divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)
