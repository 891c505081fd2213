"""The memory that a step needs besides weights, gradients and state, counted on the meta device."""

import weakref

import pytest
import torch
from small_optim import bits, parameters, train
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optim import AdamW, Guard, Muon, NorMuon
from optim.base import ShardedOptimizer

LIMIT = 2**14  # elements of a call
NORMS = 10_000  # bytes for numbers of each parameter
TENSORS = 12  # of float32 and that many elements, that a step may hold


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside hold at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.alive = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage._cdata for storage in storages((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for storage in storages(made):
            key, size = storage._cdata, storage.nbytes()
            if key in given or key in self.alive:
                continue
            self.alive.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.free, key, size)
        return made

    def free(self, key, size):
        self.alive.discard(key)
        self.now -= size


def storages(tree):
    return [each.untyped_storage() for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def peak(kind, *shapes):
    """Bytes that a guarded step of parameters of these shapes holds at once."""
    options = {} if kind is AdamW else {"dtype": torch.float32}
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    optimizer = kind(params, 0.1, weight_decay=0.1, cautious=True, compiled=False, **options)
    for param in params:
        param.grad = torch.empty_like(param)
    guard = Guard([optimizer], clip=1.0)
    with Peak() as memory:
        guard.step()
        before = memory.most = memory.now  # new state takes the place of the old
        guard.step()
    return memory.most - before


@pytest.mark.parametrize(("kind", "one", "many"), [
    (Muon, [(64, 64)] * 4, [(64, 64)] * 40),
    (NorMuon, [(64, 64)] * 4, [(64, 64)] * 40),
    (NorMuon, [(4, 64, 64)], [(41, 64, 64)]),  # experts
    (AdamW, [(LIMIT,)], [(40 * LIMIT,)]),
    (AdamW, [(512,)] * 32, [(512,)] * 320),
])  # fmt: skip
def test_a_step_off_the_cpu_holds_a_few_tensors_of_one_call_however_large_the_model(
    kind, one, many, monkeypatch
):
    monkeypatch.setattr(ShardedOptimizer, "elsewhere", LIMIT)
    small, large = peak(kind, *one), peak(kind, *many)
    for held in (small, large):
        assert 4 * LIMIT < held <= 4 * LIMIT * TENSORS + NORMS
    monkeypatch.setattr(ShardedOptimizer, "elsewhere", 2**30)
    assert peak(kind, *many) > 5 * large  # it is the limit that bounds it


@pytest.mark.parametrize("limit", [1, 100, 160, 2**30])
@pytest.mark.parametrize("kind", [Muon, NorMuon, AdamW])
def test_a_step_in_calls_of_any_size_is_the_same_step(kind, limit, monkeypatch):
    shapes = [(4, 8)] * 7 + [(3, 8, 4), (96,) if kind is AdamW else (8, 4)]
    left = []
    for each in (limit, 2**20):
        monkeypatch.setattr(ShardedOptimizer, "_limit", lambda self, param, each=each: each)
        left.append(parameters(*shapes))
        options = {} if kind is AdamW else {"dtype": torch.float64}
        train(kind(left[-1], 0.1, weight_decay=0.1, **options), range(3))
    torch.testing.assert_close(left[0], left[1], rtol=1e-12, atol=1e-12)
    assert limit < 2**20 or bits(left[0]) == bits(left[1])
