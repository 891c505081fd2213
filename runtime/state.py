"""Everything a run may change: copied, compared bit for bit, taken apart for a checkpoint and put together again."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint import CheckpointError, Snapshot
from runtime.environment import Machine


def copy_to_host(value: Any) -> Any:
    """Tensors, in dicts and lists to any depth, as copies on the CPU; other values as they are."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: copy_to_host(item) for key, item in value.items()}
    return [copy_to_host(item) for item in value] if isinstance(value, list | tuple) else value


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results of `copy_to_host` are equal in structure, dtypes, shapes and every bit."""
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@torch.no_grad()
def is_causal(
    stream: Callable[[Tensor], Tensor], parameters: Iterable[Tensor], inputs: Tensor, vocab_size: int
) -> bool:
    """Whether what `stream` makes (B, T, ...) of the first half of token rows (B, T) is the same, whatever follows.

    Noise is added to the parameters first: those that are zero would hide a leak.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
    half, changed = inputs.size(1) // 2, inputs.clone()
    changed[:, half:] = (changed[:, half:] + 1) % vocab_size
    return torch.equal(*(stream(tokens)[:, :half] for tokens in (inputs, changed)))


GUARD, RANDOM = "guard.", "random."


@dataclass(frozen=True)
class Whole:
    """All that a run changes, on this rank, taken apart and put together again for any number of ranks.

    `optimizers` have `named_state`, `load_named_state` and groups with `param_names`; guard and loader `state_dict`.
    """

    weights: dict[str, Tensor]
    optimizers: Mapping[str, Any]
    guard: Any
    loader: Any
    machine: Machine

    def bits(self) -> list[Any]:
        """A copy for `same_bits`, pending gradients included."""
        optimizers = [part.state_dict() for part in (self.guard, *self.optimizers.values())]
        grads = [weight.grad for weight in self.weights.values()]
        return copy_to_host([self.weights, grads, optimizers, self.loader.state_dict(), torch.get_rng_state()])

    def take(self) -> Snapshot:
        """Copies on the host of rank 0, nothing elsewhere. A collective, between two steps of all optimizers."""
        optim = {name: part.cpu() for each in self.optimizers.values() for name, part in each.named_state(0)}
        random = self.machine.gather(random_state(self.machine.device))
        if random is None:
            return Snapshot({}, {}, {})
        optim |= {f"{RANDOM}{rank}.{kind}": part for rank, parts in enumerate(random) for kind, part in parts.items()}
        optim |= {GUARD + name: part.cpu() for name, part in self.guard.state_dict().items()}
        return Snapshot(copy_to_host(self.weights), optim, {"data": self.loader.state_dict()})

    def load(self, snapshot: Snapshot | None) -> dict[str, Any]:
        """Give what rank 0 took, at any number of ranks, to all of them; returns the rest of its state.

        Raises CheckpointError where it does not fit, the order of the data included.
        """
        machine = self.machine
        model, optim = machine.broadcast(snapshot and snapshot.model), machine.broadcast(snapshot and snapshot.optim)
        state = machine.on_main(lambda: snapshot and snapshot.state)
        self._load_weights(model)
        try:
            for optimizer in self.optimizers.values():
                names = {name for group in optimizer.param_groups for name in group["param_names"]}
                own = {key: part for key, part in optim.items() if key.rpartition(".")[0] in names}
                optimizer.load_named_state(own)
            self.guard.load_state_dict(_below(GUARD, optim))
            self.loader.load_state_dict(state["data"])
            set_random_state(_below(f"{RANDOM}{machine.rank}.", optim), machine.device)
        except Exception as error:  # of any kind, where somebody else than a run has written it
            raise CheckpointError(f"the checkpoint does not fit this run: {error}") from None
        return state

    @torch.no_grad()
    def _load_weights(self, given: dict[str, Tensor]) -> None:
        was, here = ({name: (tuple(t.shape), t.dtype) for name, t in side.items()} for side in (given, self.weights))
        wrong = [name for name in was | here if was.get(name) != here.get(name)]
        if wrong:
            told = [f"{name} {was.get(name, 'absent')} -> {here.get(name, 'absent')}" for name in wrong[:5]]
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(told)}. Take that model's settings.")
        for name, weight in self.weights.items():
            weight.copy_(given[name])


def _below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): part for name, part in state.items() if name.startswith(prefix)}


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The generators of torch in this process."""
    found = {"cpu": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """A rank that was not there when the state was taken keeps its own."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
