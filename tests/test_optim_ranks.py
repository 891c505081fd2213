"""Each method on groups of ranks and on shards takes the steps that it takes on one process.

One spawn of four gloo processes records every cell of (method, layout). Gradients are sums of
micro-batches of whole numbers, so that they are exact in any order; some are missing.
"""

import math
import os
import warnings
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing import set_forkserver_preload
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_optim import bits
from torch import nn

import optim.muon
from optim import (
    AdamW,
    Guard,
    Muon,
    MuonWithAdamW,
    NorMuon,
    Row,
    RowAdam,
    SpikeRule,
    load_named_state,
    named_state,
    reset,
)  # fmt: skip

# On "ranks" each sums the gradients of its own batches; "shards" are those of fully_shard. From
# large to small, so that no rank waits for a layout in which it has no part.
LAYOUTS = {"ranks 4": 4, "shards 4": 4, "ranks 3": 3, "shards 3": 3,
           "ranks 2": 2, "shards 2": 2, "shards 1": 1}  # fmt: skip
SELECTING = {"ranks 3", "shards 1", "shards 4"}  # by the flag, as on a GPU, instead of reading it
PATIENCE = timedelta(seconds=90)  # with a rank that is silent, as one that judges alone
MICRO_BATCHES = 24  # divided by all numbers of ranks
# In order: a matrix fails, one rank has a NaN, one has large gradients, some are unused.
STEPS, FAILS, FAULT, SPIKE, LAST = 6, 2, 3, 4, 5
RULE = SpikeRule(start=3, window=8)

# ---- the methods, with shapes that make uneven, empty and packed shares

HEADS = {"split": (4, 4, 8, 16)}
METHODS = {  # kind, options, and of each parameter the shape and group keys
    "muon": (Muon, {"weight_decay": 0.1, "cautious": True, "scale": "rms"}, [
        *[((8, 8), {})] * 5, ((4, 6), {}), ((1, 12), {}), ((3, 4, 6), {"split": 2}),
    ]),
    "normuon": (NorMuon, {"weight_decay": 0.1}, [
        ((8, 32), HEADS | {"lr_mul": 2.0}), ((32, 8), HEADS), ((2, 32, 4), HEADS),
        ((0, 32, 4), HEADS), ((32, 0), HEADS), ((9, 6), {}), ((5, 12), {"split": 3}),
        ((6, 9), {}), ((2, 7, 3), {}), ((9, 5), {"split": (1,) * 9}), ((0, 5), {}),
    ]),
    "two": (Muon, {}, [((4, 6), {}), ((6, 4), {})]),  # from three ranks on, some own nothing
    "adamw": (AdamW, {"weight_decay": 0.1, "betas": (0.65, 0.95)}, [
        (shape, {}) for shape in
        [(256, 128), (257, 128), (3, 11000), (33001,), (7,), (0, 3), (1, 5), (2, 3, 5)]
    ]),
    "cautious": (AdamW, {"weight_decay": 0.1, "cautious": True}, [((5, 4), {}), ((3,), {})]),
    "rows": (RowAdam, {"weight_decay": 0.1}, [
        (shape, {}) for shape in [(300, 128), (7, 3), (1, 5), (0, 3), (6, 1)]
    ]),
    "torch": (torch.optim.AdamW, {}, [((5, 4), {}), ((3,), {})]),
}  # fmt: skip
MOMENTS = ("momentum", "exp_avg", "row_avg_sq")  # one for each element or row
CAN_FAIL = {"muon": 64, "normuon": 32}  # elements of the first matrix of p0
UNUSED = {"muon": {"p1"}, "normuon": {"p2"}, "adamw": {"p1", "p4"}}  # by any rank, in the last step
PARTLY = {(1, "p0"): {0, 5}, (1, "p1"): {1, 2}}  # micro-batches of a step that lack a gradient


def dtype_of(method):
    return torch.float32 if method == "two" else torch.float64


def build(method, group=None, mesh=None):
    """Parameters by name and an optimizer of this method, on one process without group and mesh."""
    kind, options, table = METHODS[method]
    generator, params, groups = torch.Generator().manual_seed(0), {}, []
    for number, (shape, keys) in enumerate(table):
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype_of(method))
        param = params[f"p{number}"] = nn.Parameter(split_over(mesh, values))
        groups.append({"params": [(f"p{number}", param)], **keys})
    if kind is not torch.optim.AdamW:
        options = options | {"process_group": group, "grad_divisor": MICRO_BATCHES}
    if kind in (Muon, NorMuon):
        options = options | {"dtype": torch.float64}
    return params, kind(groups, 0.05, **options)


def split_over(mesh, values):
    if mesh is None:
        return values
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(values, mesh, [Shard(0)])


def give_gradients(method, params, step, rank, size, mesh):
    """The sum over this rank's micro-batches; on shards over all of them, as fully_shard's."""
    mine = range(MICRO_BATCHES) if mesh is not None else range(rank, MICRO_BATCHES, size)
    last = MICRO_BATCHES - 1  # is one of the last rank
    bad = next(name for name, param in params.items() if param.numel())
    for name, param in params.items():
        total = None
        for micro in mine:
            unused = step == LAST and name in UNUSED.get(method, ())
            if unused or micro in PARTLY.get((step, name), ()):
                continue
            generator = torch.Generator().manual_seed(10_000 * step + 100 * int(name[1:]) + micro)
            grad = torch.randint(-8, 9, param.shape, generator=generator).to(param.dtype)
            if step == FAILS and method in CAN_FAIL and name == "p0" and micro == last:
                grad.view(-1)[0] = 1e6
            if step == FAULT and name == bad and micro == last:
                grad.view(-1)[:1] = math.nan
            if step == SPIKE and micro == last:
                grad *= 1e4
            total = grad if total is None else total + grad
        param.grad = None if total is None else split_over(mesh, total)


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def state_of(optimizers):
    return {key: whole(tensor) for each in optimizers for key, tensor in named_state(each)}


ORTHOGONALIZED = optim.muon.orthogonalized


def fail_where_marked(G, choice):
    """NaN in the direction of each matrix with an element that is nearly the whole gradient.

    Clipped to 1, it is 0.0975 of Nesterov's update; the elements of other gradients are far less.
    """
    X = ORTHOGONALIZED(G, choice)
    X[(G.abs() > 0.08).flatten(1).any(1), 0, :1] = math.nan
    return X


def walk(method, rank=0, size=1, group=None, mesh=None, selecting=False):
    """What each step leaves, its verdict and norm; what state returns; how much of it is owned."""
    params, optimizer = build(method, group, mesh)
    common = {} if mesh is not None else {"process_group": group}
    clip = 1.0  # below every norm, which is that over all ranks
    guard = Guard([optimizer], spike=RULE, clip=clip, grad_divisor=MICRO_BATCHES, **common)
    found = {"seen": [], "verdicts": [], "norms": [], "held": [], "returned": []}
    with (
        mock.patch("optim.base.READ_AT_ONCE", ()) if selecting else nullcontext(),
        mock.patch("optim.muon.orthogonalized", fail_where_marked),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        for step in range(STEPS):
            give_gradients(method, params, step, rank, size, mesh)
            verdict = guard.step()
            skip = guard.explain(verdict)
            found["verdicts"].append(skip and skip[::2])
            found["norms"].append(verdict[1])
            found["held"].append(guard.held(verdict))
            weights = {name: whole(param) for name, param in params.items()}
            found["seen"].append(weights | state_of([optimizer]))
    found["said"] = sum("orthogonalized" in str(each.message) for each in warned)
    if method != "torch":
        states = [item for bucket in optimizer.buckets for item in bucket.state.items()]
        found["owned"] = sum(state.numel() for kind, state in states if kind in MOMENTS)
    for load in (
        partial(load_named_state, optimizer, dict(named_state(optimizer))),
        partial(optimizer.load_state_dict, optimizer.state_dict()),
    ):
        reset(optimizer)
        load()
        found["returned"].append(state_of([optimizer]))
    give_gradients(method, params, 0, rank, size, mesh)
    guard.step()  # what was loaded can be stepped
    found["seen"].append({name: whole(param) for name, param in params.items()})
    return found


def hooked(group):
    """The largest weight that a hook leaves which clamps them, by a step and by a guard's."""
    found = []
    for guarded in (False, True):
        params, optimizer = build("two", group)

        def clamp(*_, params=params):
            for param in params.values():
                param.data.clamp_(max=0.5)

        optimizer.register_step_post_hook(clamp)
        give_gradients("two", params, 0, 0, 1, None)
        (Guard([optimizer]) if guarded else optimizer).step()
        found.append(max(param.max().item() for param in params.values()))
    return found


# ---- with torch's own fully_shard and checkpoints


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 10), nn.Linear(10, 3, bias=False))


def optimizer_of(model):
    return MuonWithAdamW(model, 0.05, adam_lr=0.02, rows=[Row("2.weight", "muon")], spike=RULE)


def shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for part in (model[1], model):
        fully_shard(part, mesh=mesh)
    return model


def sharded_model(mesh):
    model = shard(small_model(), mesh)
    return model, optimizer_of(model)


def shard_with_optimizer(model, optimizer, mesh):
    """What accelerate does for FSDP2, which it gives a model and its optimizer together."""
    optimizer.load_state_dict(optimizer.state_dict())  # it moves state to a device
    names = {param: name for name, param in model.named_parameters()}
    groups = optimizer.param_groups
    places = [[names[param] for param in group["params"]] for group in groups]
    for group in groups:
        group["params"] = [torch.empty(1) for _ in group["params"]]
    shard(model, mesh)
    new = dict(model.named_parameters())
    for group, own in zip(groups, places, strict=True):
        group["params"] = [new[name] for name in own]


def stepped(model, optimizer, rank, steps):
    """Whole weights and state after these steps, each on a batch of the rank's own."""
    for step in steps:
        model.zero_grad()
        model((torch.arange(8) + 3 * step + rank) % 11).square().mean().backward()
        optimizer.step()
    weights = {name: whole(param) for name, param in model.named_parameters()}
    return weights | state_of([optimizer])


def refusal(call):
    """What the ValueError of a call says."""
    try:
        return f"no error, but {call()}"
    except ValueError as error:
        return str(error)


def exchanged(mesh, rank):
    """Pairs that should be equal, of optimizers built before fully_shard and others; a refusal."""
    model = small_model()
    optimizer = optimizer_of(model)
    shard_with_optimizer(model, optimizer, mesh)
    late = stepped(*sharded_model(mesh), rank, range(3))
    before_a_step = stepped(model, optimizer, rank, range(3)), late
    model = small_model()
    optimizer = optimizer_of(model)
    stepped(model, optimizer, 0, range(2))  # on one process
    shard_with_optimizer(model, optimizer, mesh)
    said = refusal(optimizer.step)
    optimizer.load_state_dict(optimizer.state_dict())
    plain = small_model()
    one_process = stepped(plain, optimizer_of(plain), 0, range(3))
    return [before_a_step, (stepped(model, optimizer, 0, [2]), one_process)], said


def losses_apart(rank, mesh):
    """Verdicts on losses of each rank's own, of which the last has a NaN in one step.

    With the gradients of one model, as DDP leaves them, and with fully_shard.
    """
    found = []
    for split in (False, True):
        model = small_model()
        if split:
            shard(model, mesh)
        optimizer, verdicts = optimizer_of(model), []
        for step in range(6):
            model.zero_grad()
            model(torch.arange(8)).square().mean().backward()
            loss = 1.0 + rank  # their mean is the same in all steps but two
            if rank == 3:
                loss = {3: 100.0, 4: math.nan}.get(step, loss)
            optimizer.step(loss=torch.tensor(loss))
            skip = optimizer.guard.explain(optimizer.verdict)
            verdicts.append(skip and skip.guard)
        weights = {name: whole(param) for name, param in model.named_parameters()}
        found.append((verdicts, weights | state_of([optimizer])))
    return found


def save(folder, mesh):
    """Train, save with torch's calls; returns state before and after, and its placements."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = sharded_model(mesh)
    stepped(model, optimizer, 0, [0])
    before = state_of([optimizer])
    state = get_optimizer_state_dict(model=model, optimizers=optimizer)
    dcp.save({"optim": state}, checkpoint_id=f"{folder}/saved", process_group=mesh.get_group())
    sharded = set()
    for name, kinds in state["state"].items():
        sharded |= {f"{name}.{kind}" for kind, value in kinds.items() if hasattr(value, "to_local")}
    return before, state_of([optimizer]), sharded


def load(folder, mesh):
    """What a fresh optimizer holds after torch's own calls: whole state, and a learning rate."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as of_torch

    model, optimizer = sharded_model(mesh)
    optimizer.param_groups[0]["lr"] = 0.123
    state = of_torch.get_optimizer_state_dict(model=model, optimizers=optimizer)
    dcp.load({"optim": state}, checkpoint_id=f"{folder}/saved")
    of_torch.set_optimizer_state_dict(model=model, optimizers=optimizer, optim_state_dict=state)
    return state_of([optimizer]), optimizer.param_groups[0]["lr"]


def refusals(mesh):
    """Pairs of what is said of a parameter that cannot be stepped, and what should be."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def param(placement):
        return nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [placement]))

    rows, columns, same = param(Shard(0)), param(Shard(1)), param(Replicate())
    plain = torch.ones(4, 4)
    theirs = torch.optim.SGD([("w", rows)], 0.1)
    flat = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    world = dist.group.WORLD
    rule = "(Shard(dim=1),); fully_shard on a mesh of one dimension has (Shard(dim=0),)"
    cases = [
        (lambda: Muon([("w", columns)], 0.1), f"parameter w has placements {rule}"),
        (lambda: AdamW([("w", same)], 0.1), "parameter w has placements (Replicate(),)"),
        (lambda: Muon([("w", rows), ("v", plain)], 0.1), "v on cpu; build an optimizer for each"),
        (lambda: Muon([("w", rows)], 0.1, process_group=world), "w; leave out process_group"),
        (lambda: Guard([theirs], process_group=world), "SGD; leave out the guard's process_group"),
        (lambda: AdamW(flat.named_parameters(), 0.1), "FullyShardedDataParallel; use torch.dist"),
    ]
    return [(refusal(call), expected) for call, expected in cases]


# ---- the processes


def process(rank, folder):
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    store = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": 4}
    dist.init_process_group("gloo", **store)
    groups = {layout: dist.new_group([*range(size)], PATIENCE) for layout, size in LAYOUTS.items()}
    results, meshes = {}, {}
    for layout, size in LAYOUTS.items():
        if rank >= size:
            break
        group = groups[layout]
        where = {"rank": rank, "size": size, "group": group}
        if layout.startswith("shards"):
            meshes[layout] = DeviceMesh.from_group(group, "cpu")
            where = {"mesh": meshes[layout]}
        else:
            results["hooked", layout] = hooked(group)
        for method in METHODS:
            results[method, layout] = walk(method, selecting=layout in SELECTING, **where)
    if rank < 2:
        results["exchanged"] = exchanged(meshes["shards 2"], rank)
        results["saved"] = save(folder, meshes["shards 2"])
    dist.barrier()  # the checkpoint is there
    results["apart"] = losses_apart(rank, meshes["shards 4"])
    results["loaded"] = load(folder, meshes["shards 4"])
    results["refused"] = refusals(meshes["shards 4"])
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an orderly exit


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process recorded."""
    folder = tmp_path_factory.mktemp("ranks")
    modules = ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "optim"]
    set_forkserver_preload(modules)  # imported once
    mp.start_processes(process, (str(folder),), nprocs=4, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.fixture(scope="module")
def truth():
    return {method: walk(method) for method in METHODS}


def assert_near(found, expected, dtype=torch.float32):
    rtol, atol = (1e-9, 1e-10) if dtype == torch.float64 else (1e-4, 1e-5)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def cells_of(ranks, method, layout):
    return [each[method, layout] for each in ranks if (method, layout) in each]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_ranks_take_the_steps_skips_and_norms_of_one_process(truth, ranks, method, layout):
    expected, cells = truth[method], cells_of(ranks, method, layout)
    for cell in cells:
        assert_near(cell["seen"], expected["seen"], dtype_of(method))
        for kind in ("verdicts", "held"):
            assert cell[kind] == expected[kind]
        torch.testing.assert_close(cell["norms"], expected["norms"], equal_nan=True)
        for state in cell["returned"]:  # through load_named_state and load_state_dict
            last = cell["seen"][LAST]
            assert bits(state) == bits({name: last[name] for name in state})
        assert bits(cell["seen"]) == bits(cells[0]["seen"])
    if method != "torch":
        whole = method == "rows" and layout.startswith("ranks")  # on each rank
        owned = [cell["owned"] for cell in cells]
        assert (max(owned) if whole else sum(owned)) == expected["owned"]


@pytest.mark.parametrize("method", METHODS)
def test_a_nan_and_a_spike_of_one_rank_leave_every_bit_and_an_unused_parameter_stays(truth, method):
    seen, verdicts = truth[method]["seen"], truth[method]["verdicts"]
    assert bits(seen[FAULT]) == bits(seen[FAULT - 1])
    assert bits(seen[SPIKE]) == bits(seen[FAULT])
    bad = next(name for name, tensor in seen[0].items() if tensor.numel())  # that has the NaN
    assert verdicts[FAULT] == ("nonfinite", bad)
    assert verdicts[SPIKE][0] == "spike"
    assert [verdicts[step] for step in (0, 1, FAILS, LAST)] == [None] * 4
    unused = UNUSED.get(method, set())
    for name, tensor in seen[LAST].items():
        if tensor.numel() and seen[0][name.partition(".")[0]].numel():
            still = name.partition(".")[0] in unused
            assert torch.equal(tensor, seen[SPIKE][name]) == still, name


@pytest.mark.parametrize("method", CAN_FAIL)
def test_a_matrix_that_fails_stays_and_all_else_steps_and_the_first_rank_alone_warns(
    truth, ranks, method
):
    seen, held, elements = truth[method]["seen"], truth[method]["held"], CAN_FAIL[method]
    assert held == [(1, "p0") if step == FAILS else None for step in range(STEPS)]
    before, after = (seen[step]["p0"].view(-1) for step in (FAILS - 1, FAILS))
    assert torch.equal(before[:elements], after[:elements])
    assert (before[elements:] != after[elements:]).all()
    for layout in LAYOUTS:
        said = [cell["said"] for cell in cells_of(ranks, method, layout)]
        assert said == [1] + [0] * (len(said) - 1)


def test_a_hook_after_a_step_has_the_last_word_in_the_new_weights(ranks):
    for layout in ("ranks 2", "ranks 3", "ranks 4"):
        assert cells_of(ranks, "hooked", layout) == [[0.5, 0.5]] * LAYOUTS[layout]


def test_what_two_ranks_save_with_torch_loads_on_another_number_and_saving_steps_nothing(ranks):
    for results in ranks[:2]:
        before, after, sharded = results["saved"]
        assert bits(before) == bits(after)
        assert sharded == {name for name in after if not name.endswith((".step", ".variance"))}
    for results in ranks:
        state, rate = results["loaded"]
        assert bits(state) == bits(ranks[0]["saved"][0])
        assert rate == 0.05


def test_parameters_that_fully_shard_replaced_are_followed_before_a_step_and_later_as_said(ranks):
    for results in ranks[:2]:
        pairs, said = results["exchanged"]
        for found, expected in pairs:
            assert_near(found, expected)
        assert bits(pairs[0][0]) == bits(pairs[0][1])
        assert "takes its state along" in said


def test_ranks_with_losses_of_their_own_judge_the_mean_and_stay_together(ranks):
    for results in ranks:
        for (verdicts, left), (_, first) in zip(results["apart"], ranks[0]["apart"], strict=True):
            assert verdicts == [None, None, None, "spike", "spike", None]
            assert bits(left) == bits(first)


def test_other_placements_and_meshes_are_refused_by_name(ranks):
    for results in ranks:
        for said, expected in results["refused"]:
            assert expected in said
