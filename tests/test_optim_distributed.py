"""The same training on 1, 2, 3, 4 and 8 processes: one spawn of gloo processes records it.

Gradients come as micro-batches, and each rank sums its own. The shapes make uneven and empty
shares and packed parameters with parts on several ranks. Some micro-batches lack gradients.
"""

import os
import sys
from itertools import pairwise
from multiprocessing import set_forkserver_preload

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from optim import (
    AdamW,
    Guard,
    Muon,
    NorMuon,
    SpikeRule,
    load_named_state,
    named_state,
)

SIZES = [2, 3, 4, 8]
SEVERAL = pytest.mark.parametrize("size", SIZES)
MICRO_BATCHES, STEPS = 24, 4  # 24 is divided by all sizes
SHAPES = {
    "normuon": [(6, 12)] * 5 + [(1, 12)] + [(16, 8)] * 4 + [(2, 4, 8)],
    "muon": [(8, 8)] * 9,
    "few": [(4, 6), (6, 4)],  # from three ranks on, some own nothing
    "adam": [(256, 128), (257, 128), (3, 11000), (33001,), (7,), (), (0, 3)],
    "torch": [(5, 4), (3,)],
    "theirs": [(6, 4)],
    "unequal": [(8, 32), (32, 8), (2, 32, 4), (0, 32, 4), (32, 0)],
}
UNUSED = [  # in the last step
    "normuon.0", "normuon.6", "muon.2", "few.1", "adam.2", "adam.5",
]  # fmt: skip
EMPTY = {"adam.6", "unequal.3", "unequal.4"}
PARTLY = {(1, "normuon.1"): {0}, (1, "muon.0"): {1, 2}, (1, "adam.0"): {0, 1}, (1, "torch.1"): {0}}
FAULT = 2  # the step in which one rank alone has a NaN


def build(group):
    generator = torch.Generator().manual_seed(0)
    params, named = {}, {}
    for kind, shapes in SHAPES.items():
        weights = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        named[kind] = [(f"{kind}.{index}", weight) for index, weight in enumerate(weights)]
        params.update(named[kind])
    common = {"process_group": group, "grad_divisor": MICRO_BATCHES}
    matrices = common | {"dtype": torch.float32, "backend": "plain", "weight_decay": 0.1}
    normuon = named["normuon"]
    groups = [
        {"params": normuon[:-1:2], "lr_mul": 2.0, "split": 2},
        {"params": normuon[1:-1:2], "method": "newton_schulz"},
        {"params": normuon[-1:], "split": 4},
        {"params": named["unequal"], "split": (4, 4, 8, 16)},
    ]
    optimizers = [
        NorMuon(groups, 0.03, **matrices),
        Muon(named["muon"], 0.02, cautious=True, **matrices),
        Muon(named["few"], 0.02, scale="rms", **matrices),
        AdamW(named["adam"], 0.01, betas=(0.65, 0.95), weight_decay=0.1, **common),
        torch.optim.AdamW(named["torch"], 0.01),
        torch.optim.Muon(named["theirs"], 0.01),
    ]
    guard = Guard(optimizers, spike=SpikeRule(start=3, window=8), **common)
    return params, optimizers, guard


def give_gradients(params, step, rank, size):
    """Gradients of this rank's micro-batches, summed; whole numbers, so that sums are exact."""
    for number, (name, param) in enumerate(params.items()):
        param.grad = None
        for micro in range(rank, MICRO_BATCHES, size):
            if micro in PARTLY.get((step, name), ()) or (step == STEPS - 1 and name in UNUSED):
                continue
            generator = torch.Generator().manual_seed(10_000 * step + 100 * number + micro)
            grad = torch.randint(-8, 9, param.shape, generator=generator).float()
            param.grad = grad if param.grad is None else param.grad + grad
    if step == FAULT and rank == size - 1:
        params["muon.3"].grad[0, 0] = float("nan")


def snapshot(params, optimizers):
    state = {key: tensor for each in optimizers for key, tensor in named_state(each)}
    return {**{name: param.detach().clone() for name, param in params.items()}, **state}


def walk(rank, size, group):
    """Snapshots and verdicts of a run."""
    params, optimizers, guard = build(group)
    seen, verdicts = [], []
    for step in range(STEPS):
        give_gradients(params, step, rank, size)
        verdict = guard.explain(guard.step(torch.tensor(3.0)))
        verdicts.append(verdict and verdict.tensor)
        seen.append(snapshot(params, optimizers))
    return {"seen": seen, "verdicts": verdicts}


def reloaded(state, group):
    """A state, by way of fresh optimizers at this world size."""
    _, optimizers, _ = build(group)
    for optimizer in optimizers:
        names = {n for each in optimizer.param_groups for n in each["param_names"]}
        own = {key: tensor for key, tensor in state.items() if key.rpartition(".")[0] in names}
        load_named_state(optimizer, own)
    return {key: tensor for each in optimizers for key, tensor in named_state(each)}


def spiked(rank, group, size):
    """Which of three steps are taken: in the second, one rank alone has large gradients."""
    param = torch.nn.Parameter(torch.ones(4, 4))
    guard = Guard([Muon([param], 0.1, process_group=group)], spike=SpikeRule(start=3, window=4))
    verdicts = []
    for step in range(5):
        huge = step == 3 and rank == size - 1
        param.grad = torch.full((4, 4), 100.0 if huge else 1.0)
        verdicts.append(guard.explain(guard.step()) is None)
    return verdicts


def record(rank, size, group, folder):
    one = torch.load(f"{folder}/one.pt", weights_only=False)
    _, optimizers, _ = build(group)
    return walk(rank, size, group) | {
        "reloaded": reloaded(one["seen"][-1], group),
        "spiked": spiked(rank, group, size),
        "streamed": [len(list(named_state(each, rank=1))) for each in optimizers[:4]],
        "owned": [
            sum(b.state["momentum"].numel() for b in each.buckets) for each in optimizers[:3]
        ],
    }


def process(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=max(SIZES))
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    results = {}
    for size in SIZES:
        if rank < size:
            results[size] = record(rank, size, groups[size], folder)
        else:
            with pytest.raises(ValueError, match="not a member"):
                build(groups[size])
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an orderly exit


@pytest.fixture(scope="module")
def one():
    return walk(0, 1, None)


@pytest.fixture(scope="module")
def ranks(one, tmp_path_factory):
    """The results of each process, by world size."""
    folder = tmp_path_factory.mktemp("gloo")
    torch.save(one, folder / "one.pt")
    set_forkserver_preload(["torch.distributed", "optim"])  # imported once
    mp.start_processes(process, (str(folder),), nprocs=max(SIZES), start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(max(SIZES))]


def assert_same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


@SEVERAL
def test_several_ranks_take_the_very_steps_of_one_where_sums_are_exact(one, ranks, size):
    for ours, single in zip(ranks[0][size]["seen"], one["seen"], strict=True):
        for key in single:
            torch.testing.assert_close(ours[key], single[key], rtol=1e-6, atol=1e-7)


@SEVERAL
def test_all_ranks_hold_the_same_bits(ranks, size):
    for first, other in pairwise(results[size] for results in ranks[:size]):
        for ours, theirs in zip(first["seen"], other["seen"], strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("size", [1, *SIZES])
def test_only_parameters_that_no_rank_uses_stay_as_they_were(one, ranks, size):
    before, after = (one if size == 1 else ranks[size - 1][size])["seen"][-2:]
    names = {name for name in before if name.count(".") == 1 and before[name].numel()}
    assert sorted(n for n in names if torch.equal(before[n], after[n])) == sorted(UNUSED)
    kept = {key for key in before if key.count(".") == 2 and torch.equal(before[key], after[key])}
    assert {key.rpartition(".")[0] for key in kept} - EMPTY == set(UNUSED)


@SEVERAL
def test_a_nan_on_one_rank_skips_the_step_of_all_bit_for_bit_and_all_name_it(one, ranks, size):
    for results in [one, *[each[size] for each in ranks[:size]]]:
        assert_same_bits(results["seen"][FAULT], results["seen"][FAULT - 1])
        assert results["verdicts"] == [None, None, "muon.3", None]


@SEVERAL
def test_a_spike_of_one_ranks_gradients_is_seen_by_all(ranks, size):
    for results in ranks[:size]:
        assert results[size]["spiked"] == [True, True, True, False, True]


@SEVERAL
def test_a_state_loads_at_every_number_of_ranks_bit_for_bit(one, ranks, size):
    for results in ranks[:size]:
        state = {key: one["seen"][-1][key] for key in results[size]["reloaded"]}
        assert_same_bits(results[size]["reloaded"], state)
    several = ranks[0][size]["seen"][-1]
    assert_same_bits(reloaded(several, None), {key: several[key] for key in state})


@SEVERAL
def test_state_streams_to_the_one_rank_that_asks(ranks, size):
    streamed = [results[size]["streamed"] for results in ranks[:size]]
    assert streamed[1] == [32, 9, 2, 21]
    assert streamed == [streamed[1] if rank == 1 else [0] * 4 for rank in range(size)]


@SEVERAL
def test_state_is_held_by_its_owner_alone(ranks, size):
    _, optimizers, _ = build(None)
    whole = [sum(b.state["momentum"].numel() for b in each.buckets) for each in optimizers[:3]]
    held = torch.tensor([results[size]["owned"] for results in ranks[:size]])
    assert held.sum(0).tolist() == whole
    assert held[:, 1].max() - held[:, 1].min() <= 64  # one matrix


# ---- who owns what, without processes

ROWS = {  # packed Q, K, V, O; MLPs; shape; rows and width of Adam's tables
    "short": (10, 22, (768, 3072), [50304] * 5),
    "medium": (16, 32, (1024, 4096), [50304] * 5),
    "steps": (12, 24, (768, 3072), [50304] * 2),
}


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("model", ROWS)
def test_padding_is_at_most_one_per_cent_of_the_bytes(model, size, monkeypatch):
    packed, mlp, shape, tables = ROWS[model]
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: size)

    def on_meta(count, *shape):
        meta = {"device": "meta", "dtype": torch.bfloat16}
        return [torch.nn.Parameter(torch.empty(shape, **meta)) for _ in range(count)]

    groups = [
        {"params": on_meta(packed, *shape), "split": 4},
        {"params": on_meta(mlp, *shape), "lr_mul": 2.0},
        {"params": on_meta(12, 6, 12)},
    ]
    adam = [each for rows in tables for each in on_meta(1, rows, shape[0])] + on_meta(1, 60)
    for kind, params in ((NorMuon, groups), (AdamW, adam)):
        optimizer = kind(params, 0.02, process_group="g")
        total = sum(message.length * size for message in optimizer.messages)
        elements = sum(p.numel() for each in optimizer.param_groups for p in each["params"])
        assert 0 <= total - elements <= 0.01 * total
