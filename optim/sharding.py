"""Who owns which part of a parameter, and how gradients and new weights travel between 1..N ranks.

A step has three phases: gradients are summed onto the rank that owns them, the owner computes new weights, and these
travel to everyone. A layout says what owning means: everything (`Layout`, for one rank), equal shares in one message
(`Parcel`), or the same update on every rank (`Mirror`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Newer torch renames these two and warns about the old names; a build without distributed has neither.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))
all_gather: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))

ALIGNMENT = 8  # elements: what follows the units of a segment begins at a multiple of 16 bytes in bf16
MEASURES = 2  # float32 numbers that travel with the new weights of each unit


@dataclass(frozen=True, eq=False)
class Unit:
    """What is owned as one: `shape` elements of a parameter's memory, from element `start` on."""

    param: Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def cut(self, whole: Tensor) -> Tensor:
        """This unit's part of a contiguous tensor with as many elements for each of the parameter's, as a view."""
        if whole.ndim == 0 and self.param.ndim:
            return whole
        total = self.param.numel() or 1
        begin, length = (count * whole.numel() // total for count in (self.start, self.numel))
        part = whole.reshape(-1)[begin : begin + length]
        return part.view(self.shape) if length == self.numel else part


class Team(NamedTuple):
    """The ranks that step together."""

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, process_group: Any) -> "Team":
        if process_group is None:
            return cls(None, 0, 1)
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ValueError("this process is not a member of process_group; build the optimizer on its members only")
        return cls(process_group, rank, dist.get_world_size(process_group))


Gradients = list[tuple[Unit, Tensor]]  # owned units and the sums of their gradients over the ranks
Pairs = list[tuple[Tensor, Tensor]]  # places and what is to be written there


class Layout:
    """Units that this rank updates, nothing being sent; the layouts below override what they do otherwise.

    `reduce` and `share` launch their communication and return what waits for it, so that many can be in flight.
    `measures` (units, MEASURES) holds what was found out about each unit in the last step, on every rank.
    """

    travels = False  # whether new weights come from other ranks

    def __init__(self, shares: list[list[Unit]], team: Team):
        self.shares, self.team = shares, team
        self.owned = shares[team.rank] if self.travels else shares[0]
        self.units = [unit for share in shares for unit in share]
        self.measures = torch.zeros(len(self.units), MEASURES, device=self.units[0].param.device)

    def reduce(self) -> Callable[[], Gradients]:
        """Gradients onto their owners; a unit whose parameter has none on any rank is left out."""
        return lambda: [(unit, unit.cut(unit.param.grad)) for unit in self.owned if unit.param.grad is not None]

    def measure(self, found: dict[Unit, Tensor]) -> None:
        """Note the measures (MEASURES,) of owned units; those that were left out have zeros."""
        blank = self.measures.new_zeros(MEASURES)
        rows = [found.get(unit, blank) for unit in self.owned]
        self.measures = torch.stack(rows) if rows else self.measures[:0]

    def complete(self, unit: Unit, part: Tensor) -> None:
        """Fill `part`, which belongs to this unit, in from its owner."""

    def sent(self) -> tuple[int, int]:
        """Bytes that each rank sends in one step, and how many of them are padding and measures."""
        return 0, 0


class Parcel(Layout):
    """Units of one dtype in one message: a segment for each rank, with its share of the units and their numbers."""

    travels = True

    def __init__(self, shares: list[list[Unit]], team: Team):
        super().__init__(shares, team)
        self.like = self.units[0].param
        self.length = aligned(max(sum(unit.numel for unit in share) for share in shares))
        self.most = max(len(share) for share in shares)
        # In bf16 two elements hold one float32.
        self.tail = aligned(math.ceil(self.most * MEASURES * 4 / self.like.element_size()))

    def places(self, message: Tensor) -> Iterator[tuple[int, int, Unit, Tensor]]:
        """(rank, index in its share, unit, its place) for a message (ranks, elements)."""
        for rank, share in enumerate(self.shares):
            begin = 0
            for index, unit in enumerate(share):
                yield rank, index, unit, message[rank, begin : begin + unit.numel].view(unit.shape)
                begin += unit.numel

    def reduce(self) -> Callable[[], Gradients]:
        # Behind its units a segment has for each the number of ranks that have a gradient.
        message = self.like.new_empty(self.team.size, self.length + aligned(self.most))
        counts = message[:, self.length :].fill_(1)
        filled = []
        for rank, index, unit, place in self.places(message):
            if unit.param.grad is None:
                place.zero_()
                counts[rank, index] = 0
            else:
                filled.append((place, unit.cut(unit.param.grad)))
        copy_all(filled)
        received = message.new_empty(message.shape[1])
        arrive = launched(reduce_scatter, received, message.view(-1), group=self.team.group)

        def wait() -> Gradients:
            arrive()
            # Reading a count waits for the device, so it is read only where this rank has no gradient itself.
            return [
                (unit, place)
                for index, (unit, place) in enumerate(self._own(received))
                if unit.param.grad is not None or bool(received[self.length + index] > 0)
            ]

        return wait

    def _own(self, segment: Tensor) -> list[tuple[Unit, Tensor]]:
        everyone = segment.expand(self.team.size, -1)
        return [(unit, place) for rank, _, unit, place in self.places(everyone) if rank == self.team.rank]

    def open(self) -> dict[Unit, Tensor]:
        """Where the new weights of the owned units go before `share`; they start as the present weights."""
        self.segment = self.like.new_empty(self.length + self.tail)
        places = dict(self._own(self.segment))
        copy_all((place, unit.cut(unit.param.detach())) for unit, place in places.items())
        return places

    def share(self) -> Callable[[], Pairs]:
        """Send new weights and measures; the wait returns pairs (part of a parameter, its new value)."""
        width = self.most * MEASURES
        tail = self.segment[self.length :].view(torch.float32)
        tail[: self.measures.numel()] = self.measures.view(-1)
        everything = self.segment.new_empty(self.team.size, self.segment.numel())
        arrive = launched(all_gather, everything.view(-1), self.segment, group=self.team.group)

        def wait() -> Pairs:
            arrive()
            tails = everything[:, self.length :].contiguous().view(torch.float32)[:, :width]
            found = zip(tails.view(self.team.size, self.most, MEASURES), self.shares, strict=True)
            self.measures = torch.cat([measures[: len(share)] for measures, share in found])
            return [(unit.cut(unit.param.detach()), place) for _, _, unit, place in self.places(everything)]

        return wait

    def complete(self, unit: Unit, part: Tensor) -> None:
        owner = next(rank for rank, share in enumerate(self.shares) if unit in share)
        dist.broadcast(part.view(-1).view(torch.uint8), group=self.team.group, group_src=owner)

    def sent(self) -> tuple[int, int]:
        others, size = self.team.size - 1, self.like.element_size()
        reduced, gathered = self.length + aligned(self.most), self.length + self.tail
        needed = 2 * others * sum(unit.numel for unit in self.units) * size // self.team.size
        total = others * (reduced + gathered) * size
        return total, total - needed


class Mirror(Layout):
    """Parameters that every rank updates alike, from one summed message."""

    def reduce(self) -> Callable[[], Gradients]:
        dtype = torch.float64 if any(unit.param.dtype == torch.float64 for unit in self.owned) else torch.float32
        sizes = [unit.numel for unit in self.owned]
        message = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=self.owned[0].param.device)
        *flat, counts = message.split([*sizes, len(sizes)])
        sums = [(unit, total.view(unit.shape)) for unit, total in zip(self.owned, flat, strict=True)]
        counts.fill_(1)
        for (unit, _), count in zip(sums, counts, strict=True):
            if unit.param.grad is None:
                count.zero_()
        copy_all((total, unit.cut(unit.param.grad)) for unit, total in sums if unit.param.grad is not None)
        arrive = launched(dist.all_reduce, message, group=self.team.group)

        def wait() -> Gradients:
            arrive()
            found = zip(sums, counts, strict=True)
            return [pair for pair, count in found if pair[0].param.grad is not None or bool(count > 0)]

        return wait

    def sent(self) -> tuple[int, int]:
        others, width = self.team.size - 1, 8 if any(unit.param.dtype == torch.float64 for unit in self.owned) else 4
        elements, extra = sum(unit.numel for unit in self.owned) + len(self.owned), len(self.owned)
        return 2 * others * width * elements // self.team.size, 2 * others * width * extra // self.team.size


def launched(
    collective: Callable[..., Any], received: Tensor, *sent: Tensor, group: Any, **options: Any
) -> Callable[[], None]:
    """Begin collective(received, *sent); what is returned waits until `received` is filled."""
    tensors = [received, *sent]
    if dist.get_backend(group) == "gloo":
        # It sends CUDA tensors by way of the host in any case, and on Windows their sum ends the process (torch 2.12).
        tensors = [tensor.cpu() for tensor in tensors]
    work, arrived = collective(*tensors, group=group, async_op=True, **options), tensors[0]

    def wait() -> None:
        work.wait()
        if arrived is not received:
            received.copy_(arrived)

    return wait


def aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first."""
    targets, sources = [], []
    for target, source in pairs:
        targets.append(target)
        sources.append(source)
    if targets:  # the multi-tensor operations refuse empty lists
        torch._foreach_copy_(targets, sources)


def deal(units: list[Unit], size: int, parcels: int = 3) -> list[list[list[Unit]]]:
    """Units to ranks, the largest first, each to the rank that has least; shares[parcel][rank].

    A parcel ends where all ranks have the same, once it has its part of the whole: so no parcel but the last is padded,
    and the update of one overlaps the reduction of the next.
    """
    least = sum(unit.numel for unit in units) / parcels
    dealt: list[list[list[Unit]]] = []
    shares: list[list[Unit]] = [[] for _ in range(size)]
    loads = [0] * size
    for unit in sorted(units, key=lambda unit: -unit.numel):
        rank = loads.index(min(loads))
        shares[rank].append(unit)
        loads[rank] += unit.numel
        if min(loads) == max(loads) and sum(loads) >= least:
            dealt.append(shares)
            shares, loads = [[] for _ in range(size)], [0] * size
    return [*dealt, shares] if any(shares) else dealt
