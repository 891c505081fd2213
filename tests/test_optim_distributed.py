"""The same training on 1, 2, 3 and 4 processes: one spawn of four gloo processes records it, the tests compare.

Gradients come as four micro-batches, and each rank sums its own. Parameters are chosen so that there are uneven and
empty shards and packed parameters with parts on several ranks; some micro-batches lack gradients for some parameters.
"""

import os
import re
import sys
from itertools import chain, pairwise
from multiprocessing import set_forkserver_preload
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from optim import Adam, Guard, Muon, NorMuon, sharding
from optim.sharding import Unit, deal

SIZES = [1, 2, 3, 4]
SEVERAL = pytest.mark.parametrize("size", SIZES[1:])
MICRO_BATCHES, STEPS = 4, 3
NORMUON_SHAPES = [(6, 12)] * 5 + [(1, 12)] + [(16, 8)] * 4 + [(2, 4, 8)]
MUON_SHAPES = [(8, 8)] * 9
LONE_SHAPES = [(8, 32)]  # one packed parameter alone: its quarters go to four ranks
FEW_SHAPES = [(4, 6), (6, 4)]  # from three ranks on, some own nothing
ADAM_SHAPES = [(256, 128), (257, 128), (3, 11000), (33001,), (1, 33000), (7,), ()]  # sharded, with and without a rest
COUNTS = [len(shapes) for shapes in (NORMUON_SHAPES, MUON_SHAPES, LONE_SHAPES, FEW_SHAPES, ADAM_SHAPES)]
FIRST_MUON = COUNTS[0]
FIRST_ADAM = sum(COUNTS[:-1])

# (step, parameter): the micro-batches that have no gradient for it. At four ranks the
# owner is among those without one in most cases.
PARTLY_MISSING = {
    (1, 1): {0},
    (1, 5): {0, 1, 2},
    (1, FIRST_MUON): {0},
    (1, FIRST_MUON + 9): {1, 2},
    (1, FIRST_ADAM): {0, 1},
    (1, FIRST_ADAM + 5): {0},
}
UNUSED_AT_THE_LAST_STEP = [0, 6, FIRST_MUON + 2, FIRST_MUON + 10, FIRST_ADAM + 2, FIRST_ADAM + 6]
MISSING = PARTLY_MISSING | {(STEPS - 1, index): {0, 1, 2, 3} for index in UNUSED_AT_THE_LAST_STEP}


def build(process_group, dtype=torch.float32, **common):
    generator = torch.Generator().manual_seed(0)
    shapes = NORMUON_SHAPES + MUON_SHAPES + LONE_SHAPES + FEW_SHAPES + ADAM_SHAPES
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    normuon, muon, lone, few, adam = split_list(params, COUNTS)
    common |= {"process_group": process_group, "grad_divisor": MICRO_BATCHES}
    matrices = {"dtype": torch.float32, "backend": "plain", **common}
    groups = [
        {"params": normuon[:-1:2], "lr_mul": 2.0, "split": 2},
        {"params": normuon[1:-1:2], "method": "newton_schulz"},
        {"params": normuon[-1:], "split": 4},
    ]
    optimizers = [
        NorMuon(groups, 0.03, weight_decay=0.1, waking_limit=2.0, **matrices),
        Muon(muon, 0.02, weight_decay=0.1, cautious=True, **matrices),
        NorMuon(lone, 0.02, split=4, axis="cols", **matrices),
        Muon(few, 0.02, scale="rms", **matrices),
        Adam(adam, 0.01, betas=(0.65, 0.95), weight_decay=0.1, **common),
    ]
    return params, optimizers


def split_list(items, counts):
    iterator = iter(items)
    return [[next(iterator) for _ in range(count)] for count in counts]


def micro_gradient(step, micro_batch, index, shape, whole_numbers):
    generator = torch.Generator().manual_seed((step * MICRO_BATCHES + micro_batch) * 100 + index)
    if whole_numbers:  # sums of these are exact, in bf16 too
        return torch.randint(-30, 31, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


def give_gradients(params, step, rank, size, whole_numbers=False):
    for index, param in enumerate(params):
        mine = set(range(rank, MICRO_BATCHES, size)) - MISSING.get((step, index), set())
        grads = [micro_gradient(step, batch, index, param.shape, whole_numbers) for batch in sorted(mine)]
        param.grad = sum(grads).to(param.dtype) if grads else None


def walk(rank, size, process_group, whole_numbers=False, looks=2, **options):
    """What the tests look at: parameters and optimizer states before and after the last step, or after it alone."""
    params, optimizers = build(process_group, **options)
    seen = []
    for step in range(STEPS):
        give_gradients(params, step, rank, size, whole_numbers)
        for optimizer in optimizers:
            optimizer.step()
        if step < STEPS - looks:
            continue
        seen.append(([p.detach().clone() for p in params], [optimizer.state_dict() for optimizer in optimizers]))
    return seen


WHOLE = {"whole_numbers": True, "looks": 1}
WALKS = {"real": {}, "whole": WHOLE, "exact": {**WHOLE, "dtype": torch.bfloat16, "exact_accumulation": True}}


def reloaded(states, process_group):
    """The states that fresh optimizers report after loading these."""
    _, optimizers = build(process_group)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    return [optimizer.state_dict() for optimizer in optimizers]


def traffic(process_group, rank, size):
    """For each optimizer the bytes that it says one step sends, and those that it hands over, less what stays here."""
    params, optimizers = build(process_group)
    give_gradients(params, 0, rank, size)
    handed = []

    def counted(function, index):
        def count(*tensors, **options):
            message = tensors[index]
            handed.append(message.numel() * message.element_size() * (size - 1) // size)
            return function(*tensors, **options)

        return count

    originals = sharding.reduce_scatter, sharding.all_gather
    sharding.reduce_scatter, sharding.all_gather = counted(originals[0], 1), counted(originals[1], 0)
    found = []
    for optimizer in optimizers:
        handed.clear()
        optimizer.step()
        found.append((sum(layout.sent()[0] for layout in optimizer.layouts if layout.travels), sum(handed)))
    sharding.reduce_scatter, sharding.all_gather = originals
    return found


class Noted:
    """A collective under way that notes when it is waited for."""

    def __init__(self, work, note):
        self.work, self.note = work, note

    def wait(self):
        self.note()
        return self.work.wait()


def order(process_group, rank, size, nonfinite):
    """What one guarded step of all optimizers does, in this order: ("sum" or "gather", bytes), waits and updates.

    And weights after it, and where each optimizer steps alone. Each rank lacks gradients that others have.
    """
    events = []

    def noted(kind, function):
        def call(*tensors, **options):
            events.append((kind, tensors[0].nbytes))
            return Noted(function(*tensors, **options), lambda: events.append(("wait for " + kind, tensors[0].nbytes)))

        return call

    def watched(updates):
        def iterate(gradients):
            events.append(("update", 0))
            return updates(gradients)

        return iterate

    params, optimizers = build(process_group)
    give_gradients(params, 1, rank, size)
    for optimizer in optimizers:
        optimizer._updates = watched(optimizer._updates)
    sums, gathers = noted("sum", sharding.reduce_scatter), noted("gather", sharding.all_gather)
    with (
        mock.patch.object(sharding, "reduce_scatter", sums),
        mock.patch.object(sharding, "all_gather", gathers),
        mock.patch.object(dist, "all_reduce", noted("sum", dist.all_reduce)),
    ):
        Guard(optimizers, nonfinite=nonfinite).step()
    apart, alone = build(process_group, nonfinite_guard=nonfinite)
    give_gradients(apart, 1, rank, size)
    for optimizer in alone:
        optimizer.step()
    return events, [[param.detach() for param in both] for both in (params, apart)]


def by_way_of_the_host(rank, size, process_group):
    """As the walk in whole numbers, with all messages copied to and from a host that is not the device."""
    with mock.patch.object(torch.Tensor, "cpu", lambda tensor: tensor.clone()):
        return walk(rank, size, process_group, **WHOLE)


def streamed(process_group, rank):
    """Names of the state that arrives here when rank 1 alone wants it."""
    _, optimizers = build(process_group)
    return [name for optimizer in optimizers for name, _ in optimizer.named_state(rank=1)]


def record(rank, size, process_group, states):
    results = {name: walk(rank, size, process_group, **options) for name, options in WALKS.items()}
    results["reloaded"] = [reloaded(state, process_group) for state in states]
    results["traffic"] = traffic(process_group, rank, size)
    results["order"] = [order(process_group, rank, size, nonfinite) for nonfinite in (True, False)]
    results["host"] = by_way_of_the_host(rank, size, process_group)
    results["streamed"] = streamed(process_group, rank)
    _, optimizers = build(process_group)
    results["owned"] = [sum(len(layout.owned) for layout in optimizer.layouts) for optimizer in optimizers]
    results["elements"] = [
        sum(t.numel() for state in optimizer.state.values() for t in state.values()) for optimizer in optimizers
    ]
    return results


def process(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    groups = {size: dist.new_group(list(range(size))) for size in SIZES[1:]}
    states = [torch.load(f"{folder}/one.pt", weights_only=True)]
    results = {}
    for size in reversed(SIZES[1:]):
        if rank < size:
            results[size] = record(rank, size, groups[size], states)
            states.append(results[size]["real"][-1][1])
        else:
            with pytest.raises(ValueError, match="not a member"):
                build(groups[size])
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo threads may abort an orderly exit


@pytest.fixture(scope="module")
def one():
    return {name: walk(0, 1, None, **options) for name, options in WALKS.items()}


@pytest.fixture(scope="module")
def ranks(one, tmp_path_factory):
    """The results of each of the four processes."""
    folder = tmp_path_factory.mktemp("gloo")
    torch.save(one["real"][-1][1], folder / "one.pt")
    set_forkserver_preload(["torch.distributed", "hypothesis"])  # imported once, not by each of the four
    mp.start_processes(process, args=(str(folder),), nprocs=4, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


def flat(states):
    return [tensor for state in states for entry in state["state"].values() for tensor in entry.values()]


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@SEVERAL
def test_several_ranks_take_the_same_steps_as_one(one, ranks, size):
    for (params, states), (single_params, single_states) in zip(ranks[0][size]["real"], one["real"], strict=True):
        for ours, theirs in zip(params + flat(states), single_params + flat(single_states), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["whole", "exact"])
@SEVERAL
def test_several_ranks_take_the_very_steps_of_one_where_sums_are_exact(one, ranks, size, kind):
    for (params, states), (single_params, single_states) in zip(ranks[0][size][kind], one[kind], strict=True):
        assert_equal(params + flat(states), single_params + flat(single_states))


@pytest.mark.parametrize("kind", WALKS)
@SEVERAL
def test_all_ranks_hold_the_same_bits(one, ranks, size, kind):
    for first, other in pairwise(results[size][kind] for results in ranks[:size]):
        assert len(first) == len(one[kind])
        for (params, states), (other_params, other_states) in zip(first, other, strict=True):
            assert_equal(params + flat(states), other_params + flat(other_states))


@pytest.mark.parametrize("size", SIZES)
def test_only_parameters_that_no_rank_uses_stay_as_they_were(one, ranks, size):
    seen = one if size == 1 else ranks[size - 1][size]
    (before, states_before), (after, states_after) = seen["real"][-2:]
    untouched = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if torch.equal(a, b)]
    assert untouched == UNUSED_AT_THE_LAST_STEP
    state_is_same = [
        all(torch.equal(tensor, new["state"][index][name]) for name, tensor in entry.items())
        for old, new in zip(states_before, states_after, strict=True)
        for index, entry in old["state"].items()
    ]
    assert sum(state_is_same) == len(UNUSED_AT_THE_LAST_STEP)


def test_parts_of_a_packed_parameter_lie_on_different_ranks_and_some_ranks_own_nothing(ranks):
    lone, few = ([[results[size]["owned"][i] for results in ranks[:size]] for size in (2, 3, 4)] for i in (2, 3))
    assert lone == [[2, 2], [2, 1, 1], [1, 1, 1, 1]]
    assert few == [[1, 1], [1, 1, 0], [1, 1, 0, 0]]


@SEVERAL
def test_state_is_held_by_its_owner_alone(ranks, size, one):
    """Adam's small parameters and step counts apart, the elements held add up to those of one rank."""
    whole = [len(flat([state])) and sum(t.numel() for t in flat([state])) for state in one["real"][-1][1]]
    held = [sum(results[size]["elements"][i] for results in ranks[:size]) for i in range(len(whole))]
    assert held[:-1] == whole[:-1]
    assert whole[-1] <= held[-1] < 1.001 * whole[-1]


def test_a_state_loads_at_every_number_of_ranks_bit_for_bit(one, ranks):
    saved = {1: one["real"][-1][1]} | {size: ranks[0][size]["real"][-1][1] for size in SIZES[1:]}
    for size in SIZES[1:]:
        assert_equal(flat(reloaded(saved[size], None)), flat(saved[size]))  # onto one rank
        sources = [1, *range(4, size, -1)]
        for results in ranks[:size]:
            assert len(results[size]["reloaded"]) == len(sources)
            for source, state in zip(sources, results[size]["reloaded"], strict=True):
                assert_equal(flat(state), flat(saved[source]))


@SEVERAL
def test_state_streams_to_the_one_rank_that_asks(ranks, size):
    _, optimizers = build(None)
    everything = [name for optimizer in optimizers for name, _ in optimizer.named_state()]
    assert [results[size]["streamed"] for results in ranks[:size]] == [
        everything if rank == 1 else [] for rank in range(size)
    ]


@SEVERAL
def test_the_bytes_that_a_layout_says_it_sends_are_those_it_hands_over(ranks, size):
    for results in ranks[:size]:
        assert all(said == handed > 0 for said, handed in results[size]["traffic"])


@SEVERAL
@pytest.mark.parametrize("guarded", [True, False])
def test_all_sums_are_launched_before_the_first_update_and_no_weights_are_waited_for_before_the_last_are_sent(
    ranks, size, guarded
):
    for results in ranks[:size]:
        events, _ = results[size]["order"][not guarded]
        at = {kind: [index for index, (name, _) in enumerate(events) if name == kind] for kind, _ in events}
        assert max(at["sum"]) < min(at["wait for sum"]) < min(at["update"])
        assert min(at["gather"]) < max(at["update"])
        assert max(at["gather"]) < min(at["wait for gather"])
        assert len(at["sum"]) == len(at["wait for sum"]) == len(at["update"]) > len(COUNTS)
        assert len(at["gather"]) == len(at["wait for gather"]) >= len(COUNTS)


@SEVERAL
def test_messages_follow_one_order_on_all_ranks_whichever_gradients_they_lack(ranks, size):
    for first, other in pairwise(results[size]["order"] for results in ranks[:size]):
        for (events, _), (other_events, _) in zip(first, other, strict=True):
            assert events == other_events


@SEVERAL
def test_optimizers_that_step_together_take_the_very_steps_that_they_take_alone(ranks, size):
    for results in ranks[:size]:
        for _, (together, alone) in results[size]["order"]:
            assert_equal(together, alone)


@SEVERAL
def test_messages_by_way_of_the_host_give_the_same_bits(ranks, size):
    for results in ranks[:size]:
        for (params, states), (direct, direct_states) in zip(
            results[size]["host"], results[size]["whole"], strict=True
        ):
            assert_equal(params + flat(states), direct + flat(direct_states))


@pytest.mark.parametrize(("backend", "direct"), [("gloo", False), ("nccl", True)])
def test_gloo_alone_gets_copies_on_the_host_of_what_lies_on_a_device(monkeypatch, backend, direct):
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor.clone())  # as on a device
    received, sent, seen = torch.zeros(3), torch.arange(3.0), []

    def collective(target, source, group, async_op):
        seen.extend((target, source))
        target.copy_(source)
        return mock.Mock()

    wait = sharding.launched(collective, received, sent, group="ranks")
    assert [seen[0] is received, seen[1] is sent] == [direct, direct]
    wait()
    assert received.tolist() == [0.0, 1.0, 2.0]


@pytest.fixture
def mesh():
    """Of one device; imported here because the four processes import this file and this takes long."""
    from torch.distributed.tensor import DeviceMesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [lambda p: Muon(p, 0.1), lambda p: Adam(p, 0.1, betas=(0.9, 0.95))])
def test_tensors_that_are_sharded_already_are_refused_by_name(mesh, kind):
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    with pytest.raises(TypeError, match="parameter mlp is a DTensor; pass plain tensors, replicated"):
        kind([("mlp", sharded)])


# ---- who owns what, without processes

MODELS = {  # (matrices of Q, K, V and O packed, matrices of MLPs, shape)
    "record 42": (10, 22, (768, 3072)),
    "medium": (16, 32, (1024, 4096)),
    "steps": (12, 24, (768, 3072)),
}


def on_meta(count, shape):
    return [torch.nn.Parameter(torch.empty(shape, device="meta", dtype=torch.bfloat16)) for _ in range(count)]


def sent_bytes(description):
    """(bytes, of which padding) of an owner table."""
    found = re.findall(r"([\d,]+) bytes sent by each, ([\d,]+) of them padding", description)
    assert found
    return [sum(int(row[i].replace(",", "")) for row in found) for i in (0, 1)]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_in_one_table_sends_its_gradients_and_weights_once_with_padding_below_one_per_cent(model, size):
    packed, mlp, shape = MODELS[model]
    groups = [{"params": on_meta(packed, shape), "split": 4}, {"params": on_meta(mlp, shape), "lr_mul": 2.0}]
    sent, padding = sent_bytes(NorMuon(groups, 0.02).describe(size))
    gradients = (packed + mlp) * shape[0] * shape[1] * 2
    assert sent - padding == 2 * (size - 1) * gradients // size
    assert 0 <= padding < 0.01 * max(gradients, 1)
    assert (padding == 0) == (size == 1)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_rows_of_an_embedding_are_sent_with_padding_below_one_per_cent(size):
    embedding = on_meta(1, (50304, 768))
    sent, padding = sent_bytes(Adam(embedding, 0.01, betas=(0.9, 0.95)).describe(size))
    needed = 2 * (size - 1) * embedding[0].numel() * 2 // size
    assert sent - padding == needed
    assert 0 < padding < 0.01 * needed


shapes = st.lists(st.sampled_from([(8, 8), (4, 8), (2, 2), (16, 8), (1, 3)]), min_size=1, max_size=40)


@settings(max_examples=150)
@given(shapes, st.integers(2, 9), st.integers(1, 4))
def test_units_are_dealt_once_each_evenly_and_only_the_last_parcel_is_padded(shapes, size, parcels):
    units = [Unit(torch.empty(shape, device="meta"), 0, shape) for shape in shapes]
    dealt = deal(units, size, parcels)
    found = list(chain.from_iterable(chain.from_iterable(dealt)))
    assert len(found) == len(units)
    assert set(found) == set(units)
    assert 1 <= len(dealt) <= parcels + 1
    for shares in dealt:
        assert len(shares) == size
        loads = [sum(unit.numel for unit in share) for share in shares]
        if shares is not dealt[-1]:
            assert min(loads) == max(loads)
        # Nobody has more than another by a whole unit of those dealt last.
        heaviest = shares[loads.index(max(loads))]
        assert max(loads) - min(loads) <= heaviest[-1].numel
    assert deal(units, size, parcels) == dealt  # as every rank deals for itself


@given(st.integers(1, 8), st.integers(1, 60))
def test_equal_units_differ_by_one_at_most(size, count):
    units = [Unit(torch.empty(2, 2, device="meta"), 0, (2, 2)) for _ in range(count)]
    for shares in deal(units, size):
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
