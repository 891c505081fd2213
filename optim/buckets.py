"""Which rank owns which part of a parameter, and how gradients and weights travel.

A parameter is cut into parts: matrices for Muon, stretches of elements for AdamW. Each part has one
owner, the only rank that holds its state and computes its new weights. A `Bucket` stacks owned
parts of one kind. A `Message` carries the parts of several buckets: one reduce-scatter takes
gradients to their owners, one all-gather takes new weights to everyone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .state import State

# torch 2.12 renamed these two. A build of torch without distributed has neither name.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None)
reduce_scatter = reduce_scatter or getattr(dist, "reduce_scatter_tensor", None)
all_gather: Any = getattr(dist, "all_gather_single", None)
all_gather = all_gather or getattr(dist, "all_gather_into_tensor", None)

READ_AT_ONCE = ("cpu",)  # devices whose flags the host can read without a wait
ALIGNMENT = 8  # elements: 16 bytes in bf16
MESSAGES = 3  # updating one message's parts overlaps the all-gather of the one before
OWN_MESSAGE = 2**22  # elements of a parameter that is one by itself; each takes time to launch


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class RankGroup(NamedTuple):
    """The ranks that step together."""

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, process_group: Any) -> "RankGroup":
        """The ranks of a process group; None: this process alone."""
        if process_group is None:
            return cls(None, 0, 1)
        return cls(process_group, dist.get_rank(process_group), dist.get_world_size(process_group))


@dataclass(eq=False)
class Part:
    """A stretch of a parameter's memory, from element `start` on; shape[0] counts matrices."""

    param: Tensor
    group: dict[str, Any]
    number: int  # of the parameter in its optimizer
    start: int
    index: int  # matrices of the parameter before this part
    shape: tuple[int, ...]
    first: int = 0  # element of a sharded parameter that this rank's shard begins with
    owner: int = 0  # the only rank with its state
    bucket: "Bucket | None" = None  # on its owner

    def __post_init__(self) -> None:
        self.numel = math.prod(self.shape)
        self.whole = self.numel == self.param.numel() and not is_sharded(self.param)  # as most are
        self.place = slice(0)  # of its matrices in the stacks of its bucket
        # Parts with one key share a bucket. The rate depends on the shape that is stored.
        self.key: Any = self.shape, tuple(self.param.shape), id(self.group)

    def position(self, element: int) -> int:
        """Where an element of the parameter is in this part, or the nearer end."""
        return min(max(element - self.start, 0), self.numel)

    def weight(self) -> Tensor:
        """This part of the parameter, as a view; see `here`."""
        return self.here(self.param)

    def gradient(self) -> Tensor:
        """This part of the gradient; zeros if there is none; of a sparse one the rows it has."""
        grad = self.param.grad
        if grad is not None and grad.is_sparse:
            return grad.values()
        return torch.zeros_like(self.weight()) if grad is None else self.here(grad)

    def here(self, tensor: Tensor) -> Tensor:
        """This part of the parameter or its gradient.

        Of a sharded one, this rank's shard; it is flat if it is not the whole part.
        """
        if self.whole:
            return tensor.detach().reshape(self.shape)
        flat = local(tensor).detach().reshape(-1)
        begin, end = self.position(self.first), self.position(self.first + len(flat))
        offset = self.start - self.first
        stretch = flat[offset + begin : offset + end]
        return stretch.view(self.shape) if len(stretch) == self.numel else stretch

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


class Bucket:
    """Owned parts of one key, stepped in one call. `state` is stacked in the same order, from 0."""

    # With several ranks, stretches of a message: received gradient sums, new weights to send, and
    # received weights, if they are sharded.
    sums: Tensor | None = None
    fresh: Tensor | None = None
    old: Tensor | None = None

    def __init__(self, parts: list[Part], states: Mapping[str, State]):
        self.parts = parts
        self.param, self.group = parts[0].param, parts[0].group  # one parameter, for its dtype
        self.wide = torch.promote_types(self.param.dtype, torch.float32)
        self.each, *sides = parts[0].shape
        self.shape = (len(parts) * self.each, *sides)
        self.state = {}
        for name, state in states.items():
            pairs = zip(state.each, sides, strict=True)
            shape = self.shape[0], *[side if own == -1 else own for own, side in pairs]
            self.state[name] = torch.zeros(shape, dtype=state.dtype, device=self.param.device)
        for index, part in enumerate(parts):
            part.bucket = self
            part.place = slice(index * self.each, (index + 1) * self.each)
        numbers = [part.number for part in parts for _ in range(self.each)]
        self.numbers = torch.tensor(numbers, device=self.param.device)  # parameter of each matrix

    def gradients(self) -> list[Tensor]:
        """Summed gradients (n, ...), which `stack` joins."""
        return [part.gradient() for part in self.parts] if self.sums is None else [self.sums]

    def each_gradient(self) -> Iterable[Tensor]:
        """Summed gradient of each part."""
        return self.gradients() if self.sums is None else self.sums.split(self.each)

    def weights(self) -> list[Tensor]:
        """Weights (n, ...), which `stack` joins."""
        return [part.weight() for part in self.parts] if self.old is None else [self.old]


def in_calls(parts: list[Part], limit: int) -> Iterator[list[Part]]:
    """Parts of one key, cut into equal lists of at most `limit` elements or one part."""
    calls = -(-len(parts) // max(1, limit // parts[0].numel))
    count = -(-len(parts) // calls)  # alike, as each shape is compiled
    for first in range(0, len(parts), count):
        yield parts[first : first + count]


class Message:
    """Parts of one dtype, laid out as one segment a rank: the parts that this rank owns.

    One that is a whole parameter is sent from where the gradient lies, and received in its place.
    """

    def __init__(self, shares: list[list[Part]], ranks: RankGroup, buckets: list[Bucket]):
        self.shares, self.ranks = shares, ranks
        self.buckets = buckets  # of this rank, in the order of its segment
        loads = [sum(part.numel for part in share) for share in shares]
        self.length = -(-max(loads) // ALIGNMENT) * ALIGNMENT
        self.like = next(part.param for share in shares for part in share)
        # Whether the segments are one parameter, in the order of its memory.
        places = [(part.number, part.start) for share in shares for part in share]
        one = len({number for number, _ in places}) == 1 and places == sorted(places)
        self.in_place = one and sum(loads) == self.length * ranks.size == self.like.numel()

    def empty(self, *shape: int) -> Tensor:
        """A tensor of the parts' dtype and device, not filled: no one reads a message's padding.

        A plain tensor even if the parts are sharded.
        """
        return torch.empty(shape, dtype=self.like.dtype, device=self.like.device)

    def places(self, message: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Yield every part and its place in a message (ranks, length)."""
        for rank, share in enumerate(self.shares):
            begin = 0
            for part in share:
                yield part, message[rank, begin : begin + part.numel].view(part.shape)
                begin += part.numel

    def segment(self, name: str) -> Tensor:
        """Room for this rank's segment; its stretches become attributes `name` of the buckets."""
        segment, begin = self.empty(self.length), 0
        for bucket in self.buckets:
            end = begin + math.prod(bucket.shape)
            setattr(bucket, name, segment[begin:end].view(bucket.shape))
            begin = end
        return segment

    def reduce(self) -> Callable[[], Any]:
        """Send the gradients to their owners; the returned function waits for the sums."""
        if self.in_place and self.like.grad is not None:
            message = self.like.grad.to(self.like.dtype)
        else:
            message = self.empty(self.ranks.size, self.length)
            pairs = list(self.places(message))
            copy_all([place for _, place in pairs], [part.gradient() for part, _ in pairs])
        sums = self.segment("sums")
        work = reduce_scatter(sums, message.reshape(-1), group=self.ranks.group, async_op=True)
        return work.wait

    def gather(self, segment: Tensor) -> Callable[[], None]:
        """Send new weights to all ranks; the returned function waits and writes them."""
        everything = self.like.detach()
        if not self.in_place:
            everything = segment.new_empty(self.ranks.size, self.length)
        work = all_gather(everything.view(-1), segment, group=self.ranks.group, async_op=True)

        def write() -> None:
            work.wait()
            if not self.in_place:
                pairs = list(self.places(everything))
                copy_all([part.weight() for part, _ in pairs], [new for _, new in pairs])

        return write


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def copy_all(targets: list[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy each source into its target in one call, unless they are one tensor."""
    pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0] is not pair[1]]
    if pairs:  # torch's call refuses empty lists
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def partition(parts: list[Part], size: int) -> list[list[list[Part]]]:
    """Give each part an owner. Returns shares[message][rank].

    A large parameter is a message of its own if the ranks can own equal stretches of it.
    """
    messages: list[list[list[Part]]] = []
    rest: list[Part] = []
    for _, group in groupby(parts, key=lambda part: part.number):
        own = [*group]
        count, left = divmod(len(own), size)  # parts of a rank
        alike = len({part.shape for part in own}) == 1
        if alike and not left and own[0].param.numel() >= OWN_MESSAGE:
            messages.append([own[rank * count : (rank + 1) * count] for rank in range(size)])
        else:
            rest += own
    messages += pack(rest, size)
    for shares in messages:
        for rank, share in enumerate(shares):
            for part in share:
                part.owner = rank
    return messages


def pack(parts: list[Part], size: int) -> list[list[list[Part]]]:
    """Share parts out: the largest first, each to the least loaded rank.

    A message ends when it holds 1 / MESSAGES of the whole and all ranks have equal shares, so only
    the last message is padded. In a share, parts of one bucket are adjacent: a bucket is one
    stretch of a message.
    """
    enough = sum(part.numel for part in parts) / MESSAGES
    keys = list(dict.fromkeys(part.key for part in parts))
    messages: list[list[list[Part]]] = []
    loads = [0] * size
    for part in sorted(parts, key=lambda part: -part.numel):
        if not any(loads):
            messages.append([[] for _ in range(size)])
        owner = loads.index(min(loads))
        messages[-1][owner].append(part)
        loads[owner] += part.numel
        if min(loads) == max(loads) and sum(loads) >= enough:
            loads = [0] * size
    for share in chain(*messages):
        share.sort(key=lambda part: (keys.index(part.key), part.number, part.start))
    return messages
