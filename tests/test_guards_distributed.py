"""Guards on 2, 3 and 4 processes: what one rank sees, all ranks act on. One spawn of four gloo processes records it.

Parameters are chosen so that shards are uneven, some ranks own nothing of a tensor, and others only one of its blocks.
"""

import math
import os
import sys
import warnings
from multiprocessing import set_forkserver_preload

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import optim.muon
from optim import Adam, Guard, Muon, NorMuon, SpikeRule

SIZES = (2, 3, 4)
SHAPES = {
    "muon.0": (6, 12),
    "muon.1": (8, 8),
    "packed.0": (4, 16),  # four blocks of (4, 4)
    "packed.1": (4, 16),
    "adam.rows": (257, 128),
    "adam.wide": (2, 2**14),  # with three and four ranks some own no row
    "adam.small": (7,),
}
# Steps that go wrong: which element of which tensor is not a number, in the gradient of a rank that does not own it.
BAD_GRADIENTS = {1: ("muon.0", 5), 2: ("packed.1", 63), 4: ("adam.wide", 2**15 - 1), 5: ("adam.small", 3)}
# At the last step the orthogonalization of "muon.1" goes wrong, on the rank that owns it. Not earlier: the backend that
# is then fallen back to rounds otherwise.
BAD_UPDATE, STEPS = 8, 9
GOOD = [step for step in range(STEPS) if step not in (*BAD_GRADIENTS, BAD_UPDATE)]
MODELS = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16, "exact_accumulation": True, "cautious": True},
}


def build(process_group, dtype, **options):
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()
    }
    of = {kind: [pair for pair in params.items() if pair[0].startswith(kind)] for kind in ("muon", "packed", "adam")}
    common = {"process_group": process_group, "grad_divisor": 4, "weight_decay": 0.1, **options}
    optimizers = [
        Muon(of["muon"], 0.05, **common),
        NorMuon(of["packed"], 0.05, split=4, **common),
        Adam(of["adam"], 0.01, betas=(0.65, 0.95), **common),
    ]
    return params, optimizers


def give_gradients(params, step, rank):
    for index, param in enumerate(params.values()):
        generator = torch.Generator().manual_seed(step * 1000 + rank * 100 + index)
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def owners(params, optimizers, name, element):
    """The ranks that update this element, in order."""
    found = set()
    for layout in (layout for optimizer in optimizers for layout in optimizer.layouts):
        for rank, share in enumerate(layout.shares):
            units = [unit for unit in share if unit.param is params[name]]
            if any(unit.start <= element < unit.start + unit.numel for unit in units):
                found |= {rank} if layout.travels else set(range(layout.team.size))
    return sorted(found)


def as_bytes(tensor):
    return tensor.detach().clone().reshape(-1).view(torch.uint8)


def recorded(params, optimizers):
    """All that a step may change on this rank, as bytes, so that NaN and -0.0 count."""
    found = {}
    for name, param in params.items():
        states = [optimizer.state.get(param, {}) for optimizer in optimizers]
        found |= {f"{name}.{kind}": as_bytes(tensor) for state in states for kind, tensor in state.items()}
        found[name] = as_bytes(param)
    return found


def wrong_update(G, *args):
    """An orthogonalization that fails for matrices of the shape of "muon.1"."""
    result = right_update(G, *args)
    return result.fill_(math.nan) if tuple(G.shape[-2:]) == SHAPES["muon.1"] else result


right_update = optim.muon.orthogonalize


def walk(rank, size, process_group, steps, options):
    """A run over these steps, of which some go wrong, and what the guard says of each."""
    params, optimizers = build(process_group, **options)
    guard = Guard(optimizers)
    skips, owned = {}, {}
    for step in steps:
        give_gradients(params, step, rank)
        if step in BAD_GRADIENTS:
            name, element = BAD_GRADIENTS[step]
            owned[step] = owners(params, optimizers, name, element)
            if rank == (owned[step][0] + 1) % size:
                params[name].grad.view(-1)[element] = math.nan
        optim.muon.orthogonalize = wrong_update if step == BAD_UPDATE else right_update
        verdict = guard.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            skip = guard.explain(verdict)
        skips[step] = skip and (skip.guard, skip.tensor, math.isnan(skip.value), len(caught))
    return {
        "end": recorded(params, optimizers),
        "skips": skips,
        "owners": owned,
        "blocks": [owners(params, optimizers, "packed.0", element)[0] for element in (0, 16, 32, 48)],
        "report": guard.report(),
        "state": {name: as_bytes(tensor) for name, tensor in guard.state_dict().items()},
        "backends": [group.get("backend") for optimizer in optimizers for group in optimizer.param_groups],
    }


LOSS_SPIKE, NORM_SPIKE = 20, 25


def watch_losses(rank, size, process_group):
    """Skipped steps where each rank has a loss of its own and the caller averages them; a spike on one rank alone."""
    params, optimizers = build(process_group, torch.float32)
    rule = SpikeRule(window=16, start=8, least_spread=0.05)
    guard, skips = Guard(optimizers, spike=rule), []
    for step in range(30):
        give_gradients(params, step, rank)
        if step == NORM_SPIKE and rank == 0:
            params["muon.0"].grad *= 50
        loss = torch.tensor(3.0 + 0.5 * rank + (4.0 * size if step == LOSS_SPIKE and rank == size - 1 else 0.0))
        dist.all_reduce(loss, group=process_group)
        verdict = guard.step(loss / size)
        if guard.explain(verdict) is not None:
            skips.append((step, *guard.explain(verdict)))
    return skips, {name: as_bytes(tensor) for name, tensor in guard.state_dict().items()}


def gathered(process_group, options):
    """The optimizer state that all ranks report after a step."""
    params, optimizers = build(process_group, **options)
    give_gradients(params, 0, 0)
    optimizers[0].step()
    try:
        states = optimizers[0].state_dict()["state"]
    except RuntimeError as error:
        return str(error)
    return {f"{index}.{name}": as_bytes(tensor) for index, state in states.items() for name, tensor in state.items()}


def watch_torch(rank, process_group):
    """torch's AdamW on gradients that differ between ranks; rank 1 alone sees a NaN, at the first and third step."""
    params = {name: torch.nn.Parameter(torch.ones(4, 3)) for name in ("one", "two")}
    optimizer = torch.optim.AdamW(params.items(), 0.1)
    guard = Guard([optimizer], process_group=process_group, spike=SpikeRule(window=8, start=4))
    seen, skips = [recorded(params, [optimizer])], []
    for step in range(4):
        give_gradients(params, step, rank)
        if step in (0, 2) and rank == 1:
            params["two"].grad[0, 0] = math.nan
        skips.append(guard.explain(guard.step(torch.tensor(3.0))))
        seen.append(recorded(params, [optimizer]))
    skips = [skip and (skip.guard, skip.tensor) for skip in skips]
    return {"seen": seen, "skips": skips, "report": guard.report()}


def process(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    results = {}
    for size in SIZES:
        group = dist.new_group(range(size))
        if rank < size:
            for name, options in MODELS.items():
                results[size, name, "faulty"] = walk(rank, size, group, range(STEPS), options)
                results[size, name, "without"] = walk(rank, size, group, GOOD, options)
            results[size, "losses"] = watch_losses(rank, size, group)
            results[size, "torch"] = watch_torch(rank, group)
    results["gathered"] = gathered(dist.new_group(range(4)), MODELS["bfloat16"])
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo threads may abort an orderly exit


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of each of the four processes."""
    folder = tmp_path_factory.mktemp("gloo")
    set_forkserver_preload(["torch.distributed", "hypothesis"])  # imported once, not by each of the four
    mp.start_processes(process, args=(str(folder),), nprocs=4, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


EACH_SIZE = pytest.mark.parametrize("size", SIZES)
EACH_MODEL = pytest.mark.parametrize("model", MODELS)


@EACH_SIZE
@EACH_MODEL
def test_a_fault_on_one_rank_gives_the_run_without_that_step_on_all(ranks, size, model):
    for results in ranks[:size]:
        assert_same(results[size, model, "faulty"]["end"], results[size, model, "without"]["end"])
        ends = [found[size, model, "faulty"]["end"] for found in (results, ranks[0])]
        assert_same(*({name: end[name] for name in SHAPES} for end in ends))
    assert all(skip is None for skip in ranks[0][size, model, "without"]["skips"].values())


@EACH_SIZE
@EACH_MODEL
def test_all_ranks_name_the_tensor_that_only_one_of_them_has_seen(ranks, size, model):
    for results in ranks[:size]:
        found = results[size, model, "faulty"]
        expected = {step: ("nonfinite", name, True, 0) for step, (name, _) in BAD_GRADIENTS.items()}
        expected[BAD_UPDATE] = ("nonfinite", "muon.1", True, 1)
        assert {step: skip for step, skip in found["skips"].items() if skip is not None} == expected
        assert found["report"] == {
            "steps": STEPS, "nonfinite": 5, "spike": 0, "in_a_row": 1, "last_skip": 9,
            "last_tensor": "muon.1",
        }  # fmt: skip
        assert_same(found["state"], ranks[0][size, model, "faulty"]["state"])


@EACH_SIZE
@EACH_MODEL
def test_all_ranks_fall_back_where_one_has_computed_a_wrong_update(ranks, size, model):
    for results in ranks[:size]:
        assert results[size, model, "faulty"]["backends"] == ["plain", "auto", None]


def test_a_state_with_remainders_is_gathered_on_all_ranks(ranks):
    for results in ranks:
        assert_same(results["gathered"], ranks[0]["gathered"])
    assert any(tensor.any() for name, tensor in ranks[0]["gathered"].items() if name.endswith("remainder"))


@EACH_SIZE
def test_the_faults_were_on_ranks_that_do_not_own_the_tensor(ranks, size):
    found = ranks[0][size, "float32", "faulty"]
    assert [len(found["owners"][step]) for step in BAD_GRADIENTS] == [1, 1, 1, size]
    assert len(set(found["blocks"])) == size  # the blocks of one tensor belong to different ranks


@EACH_SIZE
def test_a_loss_averaged_by_the_caller_and_a_norm_over_all_ranks_give_one_decision(ranks, size):
    skips, state = ranks[0][size, "losses"]
    assert [(step, guard, tensor) for step, guard, _, tensor in skips] == [
        (LOSS_SPIKE, "spike", None),
        (NORM_SPIKE, "spike", None),
    ]
    assert skips[0][2] == pytest.approx(3.0 + 0.25 * (size - 1) + 4.0)
    for results in ranks[:size]:
        assert results[size, "losses"][0] == skips
        assert_same(results[size, "losses"][1], state)


@EACH_SIZE
def test_an_optimizer_of_torch_steps_on_all_ranks_or_on_none(ranks, size):
    for results in ranks[:size]:
        seen = results[size, "torch"]["seen"]
        assert_same(seen[0], seen[1])
        assert_same(seen[2], seen[3])
        assert not torch.equal(seen[1]["one"], seen[2]["one"])
        assert not torch.equal(seen[3]["two"], seen[4]["two"])
        assert [skip is None for skip in results[size, "torch"]["skips"]] == [False, True, False, True]


@EACH_SIZE
def test_all_ranks_report_why_an_optimizer_of_torch_was_put_back(ranks, size):
    for results in ranks[:size]:
        assert results[size, "torch"]["skips"] == [("nonfinite", "two"), None] * 2
        assert results[size, "torch"]["report"] == ranks[1][size, "torch"]["report"]
