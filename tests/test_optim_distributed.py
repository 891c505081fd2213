"""The same training on 1, 2 and 4 processes: one spawn of four gloo processes records it, the tests compare.

Gradients come as four micro-batches, and each rank sums its own. Parameters are chosen so that at four ranks there are
uneven and empty shards, and some micro-batches have no gradient for some parameters.
"""

import os
import sys
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from optim import Adam, Muon, NorMuon

MICRO_BATCHES, STEPS = 4, 3
NORMUON_SHAPES = [(6, 12)] * 5 + [(1, 12)] + [(16, 8)] * 4 + [(2, 4, 8)]
MUON_SHAPES = [(8, 8)] * 9
ADAM_SHAPES = [(256, 128), (257, 128), (512, 64), (7,), ()]  # sharded, not divisible, sharded, and two small
FIRST_MUON, FIRST_ADAM = len(NORMUON_SHAPES), len(NORMUON_SHAPES) + len(MUON_SHAPES)

# (step, parameter): the micro-batches that have no gradient for it. At four ranks the
# owner is among those without one in most cases.
PARTLY_MISSING = {
    (1, 1): {0},
    (1, 5): {0, 1, 2},
    (1, FIRST_MUON): {0},
    (1, FIRST_ADAM): {0, 1},
    (1, FIRST_ADAM + 3): {0},
}
UNUSED_AT_THE_LAST_STEP = [0, 6, FIRST_MUON + 2, FIRST_ADAM + 2, FIRST_ADAM + 4]
MISSING = PARTLY_MISSING | {(STEPS - 1, index): {0, 1, 2, 3} for index in UNUSED_AT_THE_LAST_STEP}


def build(process_group):
    generator = torch.Generator().manual_seed(0)
    shapes = NORMUON_SHAPES + MUON_SHAPES + ADAM_SHAPES
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    normuon, muon, adam = params[:FIRST_MUON], params[FIRST_MUON:FIRST_ADAM], params[FIRST_ADAM:]
    common = {"process_group": process_group, "grad_divisor": MICRO_BATCHES}
    groups = [
        {"params": normuon[:-1:2], "lr_mul": 2.0, "split": 2},
        {"params": normuon[1:-1:2], "method": "newton_schulz"},
        {"params": normuon[-1:], "split": 4},
    ]
    optimizers = [
        NorMuon(groups, 0.03, weight_decay=0.1, dtype=torch.float32, **common),
        Muon(muon, 0.02, dtype=torch.float32, **common),
        Adam(adam, 0.01, betas=(0.65, 0.95), weight_decay=0.1, **common),
    ]
    return params, optimizers


def micro_gradient(step, micro_batch, index, shape):
    seed = (step * MICRO_BATCHES + micro_batch) * 100 + index
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def give_gradients(params, step, rank, size):
    share = MICRO_BATCHES // size
    for index, param in enumerate(params):
        mine = set(range(rank * share, (rank + 1) * share)) - MISSING.get((step, index), set())
        grads = [micro_gradient(step, micro_batch, index, param.shape) for micro_batch in sorted(mine)]
        param.grad = sum(grads) if grads else None


def walk(rank, size, process_group):
    """What the tests look at: parameters and optimizer states before and after the last step."""
    params, optimizers = build(process_group)
    seen = []
    for step in range(STEPS):
        give_gradients(params, step, rank, size)
        for optimizer in optimizers:
            optimizer.step()
        seen.append(([p.detach().clone() for p in params], [optimizer.state_dict() for optimizer in optimizers]))
    return seen


def reloaded(states, process_group):
    """The states that fresh optimizers report after loading these."""
    _, optimizers = build(process_group)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    return [optimizer.state_dict() for optimizer in optimizers]


def process(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    four, two = dist.group.WORLD, dist.new_group([0, 1])
    results = {4: walk(rank, 4, four)}
    from_one = torch.load(f"{folder}/one.pt", weights_only=True)
    results["four loads one"] = reloaded(from_one, four)
    if rank < 2:
        results[2] = walk(rank, 2, two)
        results["two loads four"] = reloaded(results[4][-1][1], two)
    else:
        with pytest.raises(ValueError, match="not a member"):
            build(two)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo threads may abort an orderly exit


@pytest.fixture(scope="module")
def one():
    return walk(0, 1, None)


@pytest.fixture(scope="module")
def ranks(one, tmp_path_factory):
    """The results of each of the four processes."""
    folder = tmp_path_factory.mktemp("gloo")
    torch.save(one[-1][1], folder / "one.pt")
    mp.spawn(process, args=(str(folder),), nprocs=4)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


def flat(states):
    return [tensor for state in states for entry in state["state"].values() for tensor in entry.values()]


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_take_the_same_steps_as_one(one, ranks, size):
    for (params, states), (single_params, single_states) in zip(ranks[0][size], one, strict=True):
        for ours, theirs in zip(params + flat(states), single_params + flat(single_states), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_hold_the_same_bits(ranks, size):
    for first, other in pairwise(results[size] for results in ranks[:size]):
        for (params, states), (other_params, other_states) in zip(first, other, strict=True):
            assert_equal(params + flat(states), other_params + flat(other_states))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_only_parameters_that_no_rank_uses_stay_as_they_were(one, ranks, size):
    seen = one if size == 1 else ranks[-1 if size == 4 else 1][size]
    (before, states_before), (after, states_after) = seen[-2:]
    untouched = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if torch.equal(a, b)]
    assert untouched == UNUSED_AT_THE_LAST_STEP
    state_is_same = [
        all(torch.equal(tensor, new["state"][index][name]) for name, tensor in entry.items())
        for old, new in zip(states_before, states_after, strict=True)
        for index, entry in old["state"].items()
    ]
    assert sum(state_is_same) == len(UNUSED_AT_THE_LAST_STEP)


def test_a_state_saved_on_four_ranks_loads_on_one_and_two_bit_for_bit(ranks):
    saved = ranks[0][4][-1][1]
    assert_equal(flat(reloaded(saved, None)), flat(saved))
    for results in ranks[:2]:
        assert_equal(flat(results["two loads four"]), flat(saved))


def test_a_state_saved_on_one_rank_loads_on_four_bit_for_bit(one, ranks):
    for results in ranks:
        assert_equal(flat(results["four loads one"]), flat(one[-1][1]))
