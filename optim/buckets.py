"""Which rank owns which part of a parameter, and how gradients and weights travel.

A parameter is cut into parts: matrices for Muon, stretches of elements for Adam. Each part has one
owner, the only rank that holds its state and computes its new weights. A `Bucket` stacks owned
parts of one kind. A `Message` carries the parts of several buckets: one reduce-scatter takes
gradients to their owners, one all-gather takes new weights to everyone.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.12 renamed these two. A build of torch without distributed has neither name.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None)
reduce_scatter = reduce_scatter or getattr(dist, "reduce_scatter_tensor", None)
all_gather: Any = getattr(dist, "all_gather_single", None)
all_gather = all_gather or getattr(dist, "all_gather_into_tensor", None)

READ_AT_ONCE = ("cpu",)  # devices whose flags the host can read without a wait
ALIGNMENT = 8  # elements: 16 bytes in bf16
MESSAGES = 3  # updating one message's parts overlaps the all-gather of the one before


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class Team(NamedTuple):
    """The ranks that step together."""

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, process_group: Any) -> "Team":
        """The team of a process group; None: this process alone. ValueError if not a member."""
        if process_group is None:
            return cls(None, 0, 1)
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ValueError("this process is not a member of process_group; build on members only")
        return cls(process_group, rank, dist.get_world_size(process_group))


@dataclass(frozen=True, eq=False)
class Part:
    """A stretch of a parameter's memory, from element `start` on; shape[0] counts matrices."""

    param: Tensor
    number: int  # of the parameter in its optimizer
    start: int
    index: int  # matrices of the parameter before this part
    shape: tuple[int, ...]
    key: Hashable  # parts with one key share a bucket
    first: int = 0  # element of a sharded parameter that this rank's shard begins with

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def place_of(self, element: int) -> int:
        """Place in this part of an element of the parameter, or the nearer end."""
        return min(max(element - self.start, 0), self.numel)

    def weight(self) -> Tensor:
        """This part of the parameter, as a view; see `here`."""
        return self.here(self.param)

    def gradient(self) -> Tensor:
        """This part of the gradient; zeros if there is none."""
        grad = self.param.grad
        return torch.zeros_like(self.weight()) if grad is None else self.here(grad)

    def here(self, tensor: Tensor) -> Tensor:
        """This part of the parameter or its gradient.

        Of a sharded one, what lies on this rank; that is flat if it is not the whole part.
        """
        flat = local(tensor).detach().reshape(-1)
        begin, end = self.place_of(self.first), self.place_of(self.first + len(flat))
        offset = self.start - self.first
        found = flat[offset + begin : offset + end]
        return found.view(self.shape) if len(found) == self.numel else found

    def cut(self, whole: Tensor) -> Tensor:
        """This part of a state tensor of the whole parameter, as a view.

        A smaller state tensor holds its share of each matrix in turn, (matrices, ., .), or is cut
        in proportion.
        """
        if whole.ndim == 0 and self.param.ndim:
            return whole.view(1)
        total = self.param.numel()
        if whole.ndim == 3 and whole.numel() < total:
            return whole[self.index : self.index + self.shape[0]]
        begin, length = (n * whole.numel() // total for n in (self.start, self.numel))
        part = whole.reshape(-1)[begin : begin + length]
        return part.view(self.shape) if length == self.numel else part


@dataclass(eq=False)
class Bucket:
    """Owned parts of one shape, dtype and group. `state` is stacked in the same order."""

    parts: list[Part]
    group: dict[str, Any]
    state: dict[str, Tensor]
    # With several ranks, stretches of a message: received gradient sums, new weights to send.
    sums: Tensor | None = None
    fresh: Tensor | None = None
    old: Tensor | None = None  # received weights, if they lie in shards

    def __post_init__(self) -> None:
        self.param = self.parts[0].param  # one of them, for dtype, device and stored shape
        self.each = self.parts[0].shape[0]
        self.shape = (len(self.parts) * self.each, *self.parts[0].shape[1:])
        numbers = [part.number for part in self.parts for _ in range(self.each)]
        self.numbers = torch.tensor(numbers, device=self.param.device)  # parameter of each matrix

    def gradients(self, parts: slice = slice(None)) -> list[Tensor]:
        """The gradient of each part; zeros where a parameter has none."""
        return [part.gradient() for part in self.parts[parts]]

    def weights(self, parts: slice) -> list[Tensor]:
        """The weights of each part, as views."""
        return [part.weight() for part in self.parts[parts]]

    def norms(self) -> Iterable[Tensor]:
        """Norm of each part's summed gradient, computed in float32 at least."""
        found = self.gradients() if self.sums is None else self.sums.split(self.each)
        wide = torch.promote_types(self.param.dtype, torch.float32)
        return torch._foreach_norm(list(found), dtype=wide)

    def slices(self, at_once: int) -> Iterator[tuple[slice, slice, slice]]:
        """Yield (parts, matrices, columns) for each call of the method.

        On a CPU a call takes `at_once` elements or one part; of a flat part (1, n), some columns.
        """
        limit, width = len(self.parts), self.shape[-1]
        stretch = width
        if self.param.device.type == "cpu":
            limit = max(1, at_once // self.parts[0].numel)
            if limit == 1 and len(self.shape) == 2:
                stretch = at_once
        for first in range(0, len(self.parts), limit):
            last = min(first + limit, len(self.parts))
            matrices = slice(first * self.each, last * self.each)
            for begin in range(0, width, stretch):
                columns = slice(begin, begin + stretch) if stretch < width else slice(None)
                yield slice(first, last), matrices, columns


class Message:
    """Parts of one dtype, laid out as one segment a rank: the parts that this rank owns."""

    def __init__(self, shares: list[list[Part]], team: Team):
        self.shares, self.team = shares, team
        loads = [sum(part.numel for part in share) for share in shares]
        self.length = -(-max(loads) // ALIGNMENT) * ALIGNMENT
        self.like = next(part.param for share in shares for part in share)
        self.buckets: list[Bucket] = []  # of this rank, in the order of its segment

    def zeros(self, *shape: int) -> Tensor:
        """Zeros of the parts' dtype and device; a plain tensor even if the parts lie in shards."""
        return torch.zeros(shape, dtype=self.like.dtype, device=self.like.device)

    def places(self, message: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Yield every part and its place in a message (ranks, length)."""
        for rank, share in enumerate(self.shares):
            begin = 0
            for part in share:
                yield part, message[rank, begin : begin + part.numel].view(part.shape)
                begin += part.numel

    def stacks(self, segment: Tensor) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield this rank's buckets and their stretches of its segment."""
        begin = 0
        for bucket in self.buckets:
            end = begin + math.prod(bucket.shape)
            yield bucket, segment[begin:end].view(bucket.shape)
            begin = end

    def reduce(self) -> Callable[[], None]:
        """Send the gradients to their owners; the returned function waits for the sums."""
        message = self.zeros(self.team.size, self.length)
        targets, sources = [], []
        for part, place in self.places(message):
            if part.param.grad is not None:
                targets.append(place)
                sources.append(part.here(part.param.grad))
        copy_all(targets, sources)
        sums = self.zeros(self.length)
        for bucket, stretch in self.stacks(sums):
            bucket.sums = stretch
        return launched(reduce_scatter, sums, message.view(-1), group=self.team.group)

    def open(self) -> Tensor:
        """A segment for the new weights of the owned buckets."""
        segment = self.zeros(self.length)
        for bucket, stretch in self.stacks(segment):
            bucket.fresh = stretch
        return segment

    def gather(self, segment: Tensor) -> Callable[[], None]:
        """Send new weights to all ranks; the returned function waits and writes them."""
        everything = segment.new_empty(self.team.size, self.length)
        wait = launched(all_gather, everything.view(-1), segment, group=self.team.group)

        def write() -> None:
            wait()
            pairs = list(self.places(everything))
            targets = [part.weight() for part, _ in pairs]
            copy_all(targets, [new for _, new in pairs])

        return write


def launched(
    collective: Callable[..., Any], received: Tensor, *sent: Tensor, group: Any
) -> Callable[[], None]:
    """Start collective(received, *sent). The returned function waits for `received`."""
    tensors = [received, *sent]
    if dist.get_backend(group) == "gloo":
        # gloo copies CUDA tensors to the host anyway; on Windows its own copy fails (torch 2.12).
        tensors = [tensor.cpu() for tensor in tensors]
    work = collective(*tensors, group=group, async_op=True)

    def wait() -> None:
        work.wait()
        if tensors[0] is not received:
            received.copy_(tensors[0])

    return wait


def gathered(mine: Tensor, team: Team) -> Tensor:
    """All-gather a tensor, (ranks, ...)."""
    everyone = mine.new_empty(team.size, *mine.shape)
    launched(all_gather, everyone.view(-1), mine.view(-1), group=team.group)()
    return everyone


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def copy_all(targets: list[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy each source into its target in one call; torch's call refuses empty lists."""
    if targets:
        torch._foreach_copy_(targets, list(sources))


def deal(parts: list[Part], size: int) -> list[list[list[Part]]]:
    """Deal parts to ranks: the largest first, each to the least loaded rank.

    Returns shares[message][rank]. A message ends when it holds 1 / MESSAGES of the whole and all
    ranks have equal shares, so only the last message is padded.
    """
    enough = sum(part.numel for part in parts) / MESSAGES
    dealt: list[list[list[Part]]] = []
    shares: list[list[Part]] = [[] for _ in range(size)]
    loads = [0] * size
    for part in sorted(parts, key=lambda part: -part.numel):
        rank = loads.index(min(loads))
        shares[rank].append(part)
        loads[rank] += part.numel
        if min(loads) == max(loads) and sum(loads) >= enough:
            dealt.append(shares)
            shares, loads = [[] for _ in range(size)], [0] * size
    return [*dealt, shares] if any(shares) else dealt
