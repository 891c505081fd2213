"""Small parameters, their gradients, and an optimizer of every kind, for the tests of optim."""

from collections.abc import Mapping

import pytest
import torch

from optim import AdamW, Muon, MuonWithAdamW, NorMuon, RowAdam


class Whole(MuonWithAdamW):
    """Built as the others: matrices at even places are Muon's, all else is AdamW's."""

    def __init__(self, params, lr, **options):
        given = list(params)
        if not isinstance(given[0], dict):
            halves = (True, given[::2]), (False, given[1::2])
            given = [{"params": own, "use_muon": use_muon} for use_muon, own in halves]
        super().__init__(given, lr, **options)


KINDS = pytest.mark.parametrize("kind", [Muon, NorMuon, AdamW, RowAdam])
KINDS_AND_WHOLE = pytest.mark.parametrize("kind", [Muon, NorMuon, AdamW, RowAdam, Whole])
SHAPES = ((4, 8), (8, 4), (4, 8))


def parameters(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


def give_gradients(params, step, add=False):
    """Some zeros among them. In place, so that state which aliases gradients changes with them."""
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        grad.view(-1)[1:2] = 0
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        elif add:
            grad += param.grad.to(grad)
        param.grad.copy_(grad)


def members(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def train(optimizer, steps):
    for step in steps:
        give_gradients(members(optimizer), step)
        optimizer.step()


def copies(params):
    return [torch.nn.Parameter(param.detach().clone()) for param in params]


def bits(thing):
    """Containers with every tensor as its bytes, so that -0.0 and NaN count."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(thing, Mapping):
        return {key: bits(value) for key, value in thing.items()}
    return [bits(value) for value in thing] if isinstance(thing, (list, tuple)) else thing
