"""Parameters that torch's fully_shard splits by rows over the ranks (FSDP2).

Each rank holds a shard: the same number of rows, fewer or none at the end. Gradients arrive reduced
and in shards. AdamW steps a shard in place. For Muon one all-to-all takes the pieces of
gradients and weights to the rank that owns a matrix, and one brings new weights back.
"""

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import Message, Part, RankGroup, copy_all, is_sharded

Pieces = list[list[Tensor]]  # flat tensors for each rank, or from each rank


def shard_length(param: Tensor, ranks: int) -> int:
    """Elements of a full shard. Rank r holds those from r times this number on."""
    rows, *rest = param.shape
    return -(-rows // ranks) * math.prod(rest)


def ranks_of(names: Mapping[Any, str], process_group: Any) -> RankGroup:
    """The ranks that share the rows of the parameters; if none is sharded, those of the group.

    ValueError for several devices or meshes, placements other than fully_shard's, a group beside.
    """
    places: dict[Any, str] = {getattr(p, "device_mesh", p.device): n for p, n in names.items()}
    if len(places) > 1:
        where = ", ".join(f"{name} on {place}" for place, name in places.items())
        raise ValueError(f"parameters are in several places: {where}; build an optimizer for each")
    [(place, name)] = places.items()
    if isinstance(place, torch.device):
        return RankGroup.of(process_group)
    from torch.distributed.tensor import Shard

    for param, own in names.items():
        if tuple(param.placements) != (Shard(0),):
            what = f"parameter {own} has placements {tuple(param.placements)}"
            raise ValueError(f"{what}; fully_shard on a mesh of one dimension has (Shard(dim=0),)")
    if process_group is not None:
        what = f"fully_shard has already reduced the gradient of parameter {name}"
        raise ValueError(f"{what}; leave out process_group")
    return RankGroup.of(place.get_group())


def whole(tensor: Any, device: torch.device) -> Tensor:
    """All of a DTensor, on `device`; any other tensor unchanged. Collective for a DTensor."""
    return tensor.to(device).full_tensor() if is_sharded(tensor) else tensor


def shards_of(tensor: Tensor, param: Any) -> Tensor:
    """A whole tensor as a DTensor that is sharded like `param`; the shard is copied."""
    from torch.distributed.tensor import distribute_tensor

    # None: each rank has the whole and cuts its own shard from it.
    return distribute_tensor(tensor, param.device_mesh, param.placements, src_data_rank=None)


class Exchange(Message):
    """A message of sharded parts. Nothing is summed or padded."""

    def near(self, *finds: Callable[[Part], Tensor]) -> Pieces:
        """This rank's shards of each owner's parts, in the order of the owners."""
        return [[find(p).reshape(-1) for find in finds for p in share] for share in self.shares]

    def far(self, *segments: Tensor) -> Pieces:
        """The places in this rank's segments of each rank's shards."""
        pieces: Pieces = [[] for _ in self.shares]
        for segment in segments:
            begin = 0
            for part in self.shares[self.ranks.rank]:
                stretch = segment[begin : begin + part.numel]
                begin += part.numel
                length = shard_length(part.param, self.ranks.size)
                for rank, found in enumerate(pieces):
                    ends = part.position(rank * length), part.position((rank + 1) * length)
                    found.append(stretch[slice(*ends)])
        return pieces

    def reduce(self) -> Callable[[], Any]:
        """Send gradients and weights to their owners; the returned function waits for them."""
        sums, old = self.segment("sums"), self.segment("old")
        return self.send(self.near(Part.gradient, Part.weight), self.far(sums, old))

    def gather(self, segment: Tensor) -> Callable[[], None]:
        """Send new weights to their shards; the returned function waits and writes them."""
        return self.send(self.far(segment), self.near(Part.weight))

    def send(self, sent: Pieces, received: Pieces) -> Callable[[], None]:
        """Send each rank its pieces; the returned function waits and fills those received."""
        message = torch.cat([self.empty(0), *chain(*sent)])
        targets = list(chain(*received))
        lengths = [len(target) for target in targets]
        room = message.new_empty(sum(lengths))
        into, out_of = ([sum(map(len, pieces)) for pieces in side] for side in (received, sent))
        work = dist.all_to_all_single(
            room, message, into, out_of, group=self.ranks.group, async_op=True
        )

        def write() -> None:
            work.wait()
            copy_all(targets, room.split(lengths))

        return write
