"""Properties of the optimizers over random models, splits and numbers of ranks.

The ranks are threads of this process, with collectives made of barriers.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optim import AdamW, Guard, NorMuon, named_state
from optim.state import names_of


class Ranks:
    """A process group whose ranks are threads."""

    def __init__(self, size: int):
        self.size, self.own = size, threading.local()
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Any] = [None] * size

    def exchange(self, value: Tensor) -> list[Tensor]:
        """What all ranks gave; then nobody reads any longer."""
        self.slots[self.own.rank] = value
        self.barrier.wait()
        found = [slot.clone() for slot in self.slots]
        self.barrier.wait()
        return found

    def run(self, function: Callable[..., Any]) -> list[Any]:
        """function(group, rank) of all ranks at once."""

        def start(rank: int) -> Any:
            self.own.rank = rank
            try:
                return function(self if self.size > 1 else None, rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(start, range(self.size)))


def reduce_scatter(target: Tensor, source: Tensor, group: Ranks, async_op: bool) -> Any:
    total = torch.stack(group.exchange(source)).sum(0)
    target.copy_(total.chunk(group.size)[group.own.rank])
    return SimpleNamespace(wait=lambda: None)


def all_gather(target: Tensor, source: Tensor, group: Ranks, async_op: bool) -> Any:
    target.copy_(torch.cat(group.exchange(source)))
    return SimpleNamespace(wait=lambda: None)


def broadcast(tensor: Tensor, group: Ranks, group_src: int) -> None:
    tensor.copy_(group.exchange(tensor)[group_src])


@pytest.fixture(autouse=True, scope="module")
def _collectives_of_threads():
    with (
        mock.patch("optim.buckets.reduce_scatter", reduce_scatter),
        mock.patch("optim.buckets.all_gather", all_gather),
        mock.patch.multiple(
            dist,
            get_rank=lambda group: group.own.rank,
            get_world_size=lambda group: group.size,
            get_backend=lambda group: "threads",
            broadcast=broadcast,
        ),
    ):
        yield


# ---- random models

SIDES = st.integers(1, 7)
SIZES = st.integers(1, 4)


@st.composite
def partitions(draw, total):
    """Positive heights that add up to `total`."""
    ends = draw(st.sets(st.integers(1, total - 1))) if total > 1 else set()
    bounds = [0, *sorted(ends), total]
    return tuple(end - begin for begin, end in pairwise(bounds))


@st.composite
def matrices(draw):
    """Shape and group keys of a parameter for NorMuon."""
    shape = (*draw(st.sampled_from([(), (1,), (2,), (0,)])), draw(SIDES), draw(SIDES))
    rows, long = shape[-2], max(shape[-2:])
    form = draw(st.sampled_from(["whole", "equal", "rows", "long", "flatten", "transposed"]))
    if form == "equal":
        return shape, {"split": draw(st.sampled_from([n for n in range(1, 8) if long % n == 0]))}
    if form in ("rows", "long"):
        return shape, {"split": draw(partitions(rows if form == "rows" else long))}
    return shape, {} if form == "whole" else {form: True}


FLAT = st.lists(st.integers(0, 9), max_size=3).map(lambda shape: (tuple(shape), {}))
LARGE = st.integers(2**15, 2**15 + 9).map(lambda length: ((length,), {}))  # every rank has a share
MODELS = st.tuples(
    st.lists(matrices(), min_size=1, max_size=6),
    st.lists(st.one_of(FLAT, LARGE), min_size=1, max_size=5),
)


def build(model, group):
    """NorMuon and AdamW of a model, with the same weights on every rank."""
    generator = torch.Generator().manual_seed(0)
    optimizers = []
    for (kind, options), shapes in zip(
        [(NorMuon, {"dtype": torch.float32, "backend": "plain"}), (AdamW, {})], model, strict=True
    ):
        groups = []
        for number, (shape, keys) in enumerate(shapes):
            weight = torch.nn.Parameter(torch.randn(shape, generator=generator))
            groups.append({"params": [(f"{kind.__name__}{number}", weight)], **keys})
        optimizers.append(kind(groups, 0.1, process_group=group, **options))
    return optimizers


def state_of(optimizers):
    return {name: tensor for each in optimizers for name, tensor in named_state(each)}


def params_of(optimizers):
    return [p for each in optimizers for group in each.param_groups for p in group["params"]]


def same(ones, others):
    """The same names and bits."""
    return ones.keys() == others.keys() and all(torch.equal(ones[n], others[n]) for n in ones)


def random_state(model):
    """Numbers that occur once, as a state of the model; a parameter without elements keeps none."""
    optimizers, begin = build(model, None), 1
    state = state_of(optimizers)
    names = [name for optimizer in optimizers for name in names_of(optimizer)]
    counts = {name: p.numel() for name, p in zip(names, params_of(optimizers), strict=True)}
    for name, tensor in state.items():
        if counts[name.partition(".")[0]]:
            numbers = torch.arange(begin, begin + tensor.numel(), dtype=tensor.dtype)
            state[name], begin = numbers.view(tensor.shape), begin + tensor.numel()
    return state


# ---- properties


@settings(max_examples=25)
@given(MODELS, SIZES)
def test_every_element_of_a_model_has_one_owner_and_its_state_goes_through_any_number_of_ranks(
    model, size
):
    state = random_state(model)

    def held(group, rank):
        """What a rank gives back of the state, and how much of it the rank holds."""
        optimizers = build(model, group)
        for optimizer in optimizers:
            own = {key: state[key] for key, _ in named_state(optimizer)}
            optimizer.load_named_state(own)
            optimizer.load_state_dict(optimizer.state_dict())
        buckets = [bucket for optimizer in optimizers for bucket in optimizer.buckets]
        moments = ("momentum", "exp_avg")
        return state_of(optimizers), sum(
            tensor.numel() for b in buckets for key, tensor in b.state.items() if key in moments
        )

    results = Ranks(size).run(held)
    assert all(same(found, state) for found, _ in results)
    elements = sum(param.numel() for param in params_of(build(model, None)))
    assert sum(count for _, count in results) == elements


@settings(max_examples=25)
@given(MODELS, SIZES, st.data())
def test_a_guarded_step_with_one_bad_gradient_is_no_step_and_the_next_is_the_first(
    model, size, data
):
    params = params_of(build(model, None))
    full = [number for number, param in enumerate(params) if param.numel()]
    spot = data.draw(st.sampled_from(full)) if full else None
    bad_rank = data.draw(st.integers(0, size - 1))

    def give(params, rank, bad):
        for number, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * rank + number)
            param.grad = torch.randint(-4, 5, param.shape, generator=generator).float()
            if bad and number == spot and rank == bad_rank:
                param.grad.view(-1)[-1] = torch.nan

    def walk(group, rank, steps):
        """Weights and state after steps that are bad or not, and whether they were taken."""
        optimizers = build(model, group)
        guard, params, taken = Guard(optimizers), params_of(optimizers), []
        for bad in steps:
            give(params, rank, bad)
            taken.append(guard.step()[0].item() == 0)
        weights = {str(number): param.detach() for number, param in enumerate(params)}
        return weights | state_of(optimizers), taken

    def results(*steps):
        return Ranks(size).run(lambda group, rank: walk(group, rank, steps))

    none, bad, good, both = results(), results(True), results(False), results(True, False)
    for rank in range(size):
        assert bad[rank][1] == [spot is None]
        assert both[rank][1] == [spot is None, True]
        assert same(good[rank][0], good[0][0])
        if spot is not None:
            assert same(bad[rank][0], none[rank][0])
            assert same(both[rank][0], good[rank][0])
