"""How much memory does training take? Counted while it goes on; on the meta device it need not be there for that."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """Counts the bytes of the storages that operations inside make, as long as each lives, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        self._hold(given, counted=False)
        result = operation(*given[0], **given[1])
        self._hold(result, counted=True)
        return result

    def _hold(self, tree: Any, counted: bool) -> None:
        for tensor in tree_leaves(tree):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is None or storage._cdata in self._alive:  # of a view, or of an operation in place
                continue
            size = storage.nbytes() if counted else 0
            self._alive.add(storage._cdata)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, storage._cdata, size)

    def _drop(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self.now -= size


def peak_bytes(function: Callable[[], object]) -> int:
    """Most bytes of tensors that were held at once of those that `function` made, backward passes included.

    What a custom operator makes and drops inside is not seen. Arguments may lie on the meta device.
    """
    with Held() as held:
        function()
    return held.most


class Built(NamedTuple):
    """What a run consists of, on the meta device."""

    loss: Callable[..., Tensor]  # of inputs, targets and boundaries of documents
    step: Callable[[], object]  # of all optimizers as if there were one rank, which bounds what one of several keeps
    weights: Sequence[Tensor]
    optimizers: Sequence[torch.optim.Optimizer]  # with the state of this rank
    reach: int  # tokens before a part of a row that go with it


def memory_parts(settings: Any, world_size: int, build: Callable[[Any], Built]) -> dict[str, float]:
    """Bytes of one process's tensors, nothing being compiled: weights, gradients, optimizer state, the largest pass.

    That is a micro-batch beside the gradients of another and what optimizers keep between steps, or a validation batch;
    of --micro-batch auto a single row. `build` makes the run that settings describe.
    """
    run = build(settings)

    def batch(tokens: int, row: int, most: int) -> list[Tensor]:
        count = max(tokens // row // world_size, 1)
        rows = max(rows for rows in range(1, count + 1) if count % rows == 0 and rows * row <= max(most, row))
        inputs = torch.empty(rows, row, dtype=torch.int64, device="meta")
        return [inputs, inputs, torch.empty(1, dtype=torch.int32, device="meta")]

    def forward_backward() -> None:
        micro_batch = settings.micro_batch or settings.sequence
        run.loss(*batch(settings.batch_tokens, settings.sequence, micro_batch)).backward()

    def train() -> None:
        for function in (forward_backward, run.step, forward_backward, forward_backward):
            function()

    @torch.no_grad()
    def validate() -> None:
        inputs, targets, boundaries = batch(settings.val_tokens, settings.val_sequence, settings.val_batch)
        run.loss(inputs[:, : settings.val_batch + run.reach], targets[:, : settings.val_batch], boundaries)

    held = sum(weight.nbytes for weight in run.weights)
    state = [part for each in run.optimizers for kept in each.state.values() for part in kept.values()]
    parts = {"weights": held, "gradients": held, "optimizer state": sum(part.nbytes for part in state)}
    training, validation = peak_bytes(train) - held, peak_bytes(validate)
    return parts | ({"training pass": training} if training >= validation else {"validation pass": validation})


def smaller(settings: Any) -> Iterator[dict[str, Any]]:
    """Changes of settings that need less and less memory and leave the trajectory, the fastest first."""
    row = min(settings.sequence, settings.val_sequence)
    for recompute in sorted({settings.recompute, True}):
        micro, val = settings.micro_batch, settings.val_batch
        while True:
            proposed = {"recompute": recompute, "micro_batch": micro, "val_batch": val}
            if changes := {name: value for name, value in proposed.items() if value != getattr(settings, name)}:
                yield changes
            if (micro or settings.sequence) <= settings.sequence and val <= row:
                break
            micro, val = micro and max(micro // 2, settings.sequence), max(val // 2, row)
