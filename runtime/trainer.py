"""What the runtime needs of a trainer. train_gpt.py has one, and mypy compares the two.

The runtime knows no more of the model, the data and the optimizers. All properties are read only.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.machine import Machine


class Batch(Protocol):
    """Sequences on the host; data/loader.py makes them."""

    @property
    def inputs(self) -> Tensor: ...  # int32 (B, T)
    @property
    def targets(self) -> Tensor: ...  # int64 (B, T), or those of each sequence's end
    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]: ...
    def __iter__(self) -> Iterator[Tensor]: ...


class TrainData(Protocol):
    """Yields the micro-batches of each step."""

    @property
    def places(self) -> Mapping[int, Mapping[str, object]]: ...  # by step: where it was read
    def __next__(self) -> Sequence[Batch]: ...
    def reset(self, step: int = 0) -> None: ...
    def shares(self, step: int) -> tuple[int, int]: ...  # micro-batches, sequences of each


class Data(Protocol):
    @property
    def train(self) -> TrainData: ...
    @property
    def validation(self) -> Sequence[Batch]: ...
    def longest(self, step: int) -> int: ...  # tokens of a document


class Model(Protocol):
    dtype: torch.dtype
    __call__: Callable[..., Tensor]

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
    def initialize(self, seed: int) -> None: ...
    def set_step(self, step: int) -> None: ...
    def token_losses(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor: ...
    def logits(self, inputs_BT: Tensor, count: int) -> Tensor: ...
    def compiled(self) -> Callable[..., Tensor]: ...
    def flops_per_token(self) -> int: ...


class Guard(Protocol):
    def step(
        self, loss: Tensor | None = None, only: Iterable[torch.optim.Optimizer] | None = None
    ) -> Tensor: ...
    def explain(self, verdict: Tensor) -> Any: ...  # optim.guards.Skip, or None for a taken step
    def held(self, verdict: Tensor) -> Any: ...  # optim.guards.Held, or None without one
    def gradient_norms(self, verdict: Tensor) -> list[float]: ...
    def describe(self) -> str: ...


class Facts(Protocol):
    """What is known before the first step, for the log and the reader."""

    claim: str | None  # id
    source_sha256: str
    hashes: dict[str, object]  # of the data
    checks: dict[str, object]  # of the warm-up
    env: dict[str, object]  # versions and hardware
    chosen: dict[str, str]  # why each backend was chosen
    off_track: list[str]  # settings that no claim may have
    train_tokens: int
    validations: list[int]  # the steps before which the run validates, and the last one

    @property
    def changes(self) -> Sequence[tuple[int, int, int]]:
        """First step, tokens of a batch, longest document: of each part of the run."""


State = dict[str, dict[str, Any]]  # tensors, and JSON data


class Trainer(Facts, Protocol):
    """A model, its data and its optimizers."""

    @property
    def config(self) -> Any: ...  # settings: RunSettings, and those of the experiment
    @property
    def machine(self) -> Machine: ...
    @property
    def model(self) -> Model: ...
    @property
    def data(self) -> Data: ...
    @property
    def optimizers(self) -> Mapping[str, object]: ...
    @property
    def guard(self) -> Guard: ...

    loss: Callable[..., Tensor]  # the model, compiled or not
    val_losses: list[Tensor]  # of each target of the last validation, by batch; none if compiled
    targets_scored: int  # by the last validation, on all ranks

    def reset(self, seed: int) -> None: ...
    def set_step(self, step: int) -> None: ...
    def losses(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]: ...
    def stepping(self, step: int) -> list[torch.optim.Optimizer]: ...
    def validate(self, step: int, batches: Sequence[Batch] | None = None) -> float: ...
    def token_losses(self, batch: Batch) -> Tensor: ...
    def trained_rows(self) -> str: ...
    def model_state(self) -> dict[str, Tensor]: ...
    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...
