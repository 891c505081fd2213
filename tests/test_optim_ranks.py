"""Each method on groups of ranks and on shards takes the steps that it takes on one process.

One spawn of four gloo processes records every cell of (method, layout). Gradients are sums of
micro-batches of whole numbers, so that they are exact in any order; some are missing.
"""

import math
import os
import random
import sys
from contextlib import nullcontext
from itertools import pairwise
from multiprocessing import set_forkserver_preload
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from optim import AdamW, Guard, Muon, NorMuon, SpikeRule, load_named_state, named_state

ROOT = Path(__file__).resolve().parents[1]
GROUPS = {"ranks 2": 2, "ranks 3": 3, "ranks 4": 4}  # each sums the gradients of its own batches
MESHES = {"shards 1": [0], "shards 2": [0, 1], "shards 3": [0, 1, 2], "shards 4": [0, 1, 2, 3]}
MESHES["replicas of shards"] = [[0, 1], [2, 3]]
LAYOUTS = [*GROUPS, *MESHES]
SELECTING = {"ranks 3", "shards 1", "shards 4"}  # by the flag, as on a GPU, instead of reading it
MICRO_BATCHES = 24  # divided by all numbers of ranks
STEPS, FAULT, SPIKE, LAST = 6, 3, 4, 5  # NaN on one rank; large gradients; some unused

# ---- the methods, with shapes that make uneven, empty and packed shares

SHAPES = {
    "muon": [(8, 8)] * 5 + [(4, 6), (1, 12), (3, 4, 6)],
    "normuon": [(8, 32), (32, 8), (2, 32, 4), (0, 32, 4), (32, 0), (9, 6)],
    "two": [(4, 6), (6, 4)],  # from three ranks on, some own nothing
    "adamw": [(256, 128), (257, 128), (3, 11000), (33001,), (7,), (0, 3), (1, 5)],
    "torch": [(5, 4), (3,)],
}
UNUSED = {"muon": {"p1"}, "normuon": {"p2"}, "adamw": {"p1", "p4"}}  # by any rank, in the last step
PARTLY = {(1, "p0"): {0, 5}, (1, "p1"): {1, 2}}  # micro-batches of a step that lack a gradient
RANDOM = [f"random {seed}" for seed in range(8)]
METHODS = [*SHAPES, *RANDOM]


def randomly(seed):
    """Kind, dtype of the parameters, options, shapes and group keys."""
    draw = random.Random(seed)
    kind, dtype = [Muon, NorMuon, AdamW][seed % 3], draw.choice([torch.float64, torch.float32])
    shapes, keys = [], []
    for _ in range(draw.randint(3, 6)):
        inner = [draw.randint(1, 9) for _ in range(draw.choice([1, 1, 2]))]
        shapes.append((draw.randint(0, 9), *inner))
        long = max(shapes[-1][-2:])
        splits = [number for number in range(1, long + 1) if long % number == 0]
        split = {"split": draw.choice([*splits, (long,), (1,) * long])}
        keys.append({} if kind is AdamW else draw.choice([split, {"transposed": True}]))
    options = {"weight_decay": draw.choice([0.0, 0.1]), "cautious": draw.random() < 0.5}
    return kind, dtype, options, shapes, keys


def build(method, group=None, mesh=None):
    """Parameters by name and an optimizer of this method, on one process without group and mesh."""
    kind, dtype, options = Muon, torch.float64, {"weight_decay": 0.1}
    shapes = SHAPES.get(method, [])
    keys = [{} for _ in shapes]
    if method in RANDOM:
        kind, dtype, options, shapes, keys = randomly(RANDOM.index(method))
    elif method == "muon":
        options |= {"cautious": True, "scale": "rms"}
    elif method == "normuon":
        kind, keys[0]["lr_mul"] = NorMuon, 2.0
        for key in keys[:-1]:
            key["split"] = (4, 4, 8, 16)
    elif method == "adamw":
        kind, options = AdamW, options | {"betas": (0.65, 0.95)}
    elif method == "torch":
        kind, options = torch.optim.AdamW, {}
    generator, params, groups = torch.Generator().manual_seed(0), {}, []
    for number, (shape, key) in enumerate(zip(shapes, keys, strict=True)):
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        param = params[f"p{number}"] = nn.Parameter(split_over(mesh, values))
        groups.append({"params": [(f"p{number}", param)], **key})
    if kind is not torch.optim.AdamW:
        options |= {"process_group": group, "grad_divisor": MICRO_BATCHES}
    if kind in (Muon, NorMuon):
        options |= {"dtype": torch.float64}
    return params, kind(groups, 0.05, **options)


def split_over(mesh, values):
    if mesh is None:
        return values
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return distribute_tensor(values, mesh, [Replicate(), Shard(0)][-mesh.ndim :])


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


def walk(method, rank=0, size=1, group=None, mesh=None, selecting=False):
    """What each step leaves, its verdict and its norms; whether state returns; what is owned."""
    params, optimizer = build(method, group, mesh)
    common = {} if mesh is not None else {"process_group": group}
    rule = SpikeRule(start=3, window=8)
    guard = Guard([optimizer], spike=rule, grad_divisor=MICRO_BATCHES, **common)
    seen, verdicts, norms = [], [], []
    with mock.patch("optim.base.READ_AT_ONCE", ()) if selecting else nullcontext():
        for step in range(STEPS):
            give_gradients(method, params, step, rank, size, mesh)
            verdict = guard.step()
            verdicts.append(guard.explain(verdict))
            norms.append(verdict[1])
            weights = {name: whole(param) for name, param in params.items()}
            seen.append(weights | state_of([optimizer]))
    found = {"seen": seen, "verdicts": [skip and skip[::2] for skip in verdicts], "norms": norms}
    if method != "torch":
        buckets = optimizer.buckets
        moments = [bucket.state.get("momentum", bucket.state.get("exp_avg")) for bucket in buckets]
        found["owned"] = sum(moment.numel() for moment in moments)
        found["streamed"] = len(list(named_state(optimizer, rank=1)))
    state, in_torchs_form, kept = dict(named_state(optimizer)), optimizer.state_dict(), []
    for load in (
        lambda: load_named_state(optimizer, state),
        lambda: optimizer.load_state_dict(in_torchs_form),
    ):
        if method != "torch":
            optimizer.reset()
        load()
        kept.append(state_of([optimizer]))
    return found | {"returned": kept}


# ---- with torch's own fully_shard and checkpoints


def sharded_model(mesh):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 10), nn.Linear(10, 3, bias=False))
    for part in (model[1], model):
        fully_shard(part, mesh=mesh)
    matrices, others = [], []
    for name, param in model.named_parameters():
        (matrices if name in ("1.weight", "2.weight") else others).append((name, param))
    return model, [NorMuon(matrices, 0.05), AdamW(others, 0.02)]


def save(folder, mesh):
    """Train, save with torch's calls; returns state before and after, and its placements."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizers = sharded_model(mesh)
    model(torch.arange(8) % 11).square().mean().backward()
    Guard(optimizers).step()
    before = state_of(optimizers)
    state = get_optimizer_state_dict(model=model, optimizers=optimizers)
    dcp.save({"optim": state}, checkpoint_id=f"{folder}/saved", process_group=mesh.get_group())
    sharded = set()
    for name, kinds in state["state"].items():
        sharded |= {f"{name}.{kind}" for kind, value in kinds.items() if hasattr(value, "to_local")}
    return before, state_of(optimizers), sharded


def load(folder, mesh):
    """What fresh optimizers hold after torch's own calls: whole state, and a learning rate."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as of_torch

    model, optimizers = sharded_model(mesh)
    optimizers[0].param_groups[0]["lr"] = 0.123
    state = of_torch.get_optimizer_state_dict(model=model, optimizers=optimizers)
    dcp.load({"optim": state}, checkpoint_id=f"{folder}/saved")
    of_torch.set_optimizer_state_dict(model=model, optimizers=optimizers, optim_state_dict=state)
    return state_of(optimizers), optimizers[0].param_groups[0]["lr"]


def refusals(mesh):
    """The messages for parameters that cannot be stepped."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def message(call):
        try:
            call()
        except ValueError as error:
            return str(error)
        return None

    def param(placement):
        return nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [placement]))

    rows, plain = param(Shard(0)), nn.Parameter(torch.ones(4, 4))
    later, theirs = Muon([("w", rows)], 0.1), torch.optim.SGD([("w", rows)], 0.1)
    first = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    return {
        "columns": message(lambda: Muon([("w", param(Shard(1)))], 0.1)),
        "replicated": message(lambda: AdamW([("w", param(Replicate()))], 0.1)),
        "mixed": message(lambda: Muon([("w", rows), ("v", plain)], 0.1)),
        "summed": message(lambda: Muon([("w", rows)], 0.1, process_group=dist.group.WORLD)),
        "torch's": message(lambda: Guard([theirs], process_group=dist.group.WORLD)),
        "first": message(lambda: AdamW(first.named_parameters(), 0.1)),
        "added": message(lambda: later.add_param_group({"params": [("x", param(Shard(1)))]})),
    }


def run_snippet():
    """Run the page's lines; returns how many parameters were split and how many moved."""
    page = (ROOT / "docs" / "optimizers.md").read_text()
    blocks = [code.partition("```")[0] for code in page.split("```python\n")[1:]]
    [snippet] = [code for code in blocks if "fully_shard" in code]
    torch.manual_seed(0)
    model = nn.Sequential()
    model.blocks = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    before = [param.detach().clone() for param in model.parameters()]
    exec(snippet, {"model": model, "batch": torch.randn(4, 6)})
    after = [whole(param) for param in model.parameters()]
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    return sum(hasattr(param, "to_local") for param in model.parameters()), moved


# ---- the processes


def process(rank, folder):
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    results, meshes = {}, {}
    for name, ranks in MESHES.items():  # all ranks help to make each
        layout = torch.tensor(ranks)
        names = ("replica", "shard")[-layout.ndim :]
        meshes[name] = DeviceMesh("cpu", layout, mesh_dim_names=names)
        if rank in layout:
            for method in METHODS:
                walked = walk(method, mesh=meshes[name], selecting=name in SELECTING)
                results[method, name] = walked
    for name, size in GROUPS.items():
        group = dist.new_group(list(range(size)))
        if rank < size:
            for method in METHODS:
                walked = walk(method, rank, size, group, selecting=name in SELECTING)
                results[method, name] = walked
        else:
            with pytest.raises(ValueError, match="not a member"):
                build("muon", group)
    if rank < 2:
        results["saved"] = save(folder, meshes["shards 2"])
    dist.barrier()  # the checkpoint is there
    for name in ("shards 4", "replicas of shards"):
        results["loaded", name] = load(folder, meshes[name])
    results["refused"], results["page"] = refusals(meshes["shards 4"]), run_snippet()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
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


def same(ours, theirs):
    """Bit for bit, by name."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def close(ours, theirs):
    for name, tensor in theirs.items():
        wide = tensor.dtype != torch.float32
        tolerance = {"rtol": 1e-9, "atol": 1e-10} if wide else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(ours[name], tensor, **tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_a_layout_of_ranks_takes_the_steps_skips_and_norms_of_one_process(
    truth, ranks, method, layout
):
    expected, cells = truth[method], [each for each in ranks if (method, layout) in each]
    cells = [each[method, layout] for each in cells]
    for cell in cells:
        for ours, theirs in zip(cell["seen"], expected["seen"], strict=True):
            assert ours.keys() == theirs.keys()
            close(ours, theirs)
        assert cell["verdicts"] == expected["verdicts"]
        torch.testing.assert_close(cell["norms"], expected["norms"], equal_nan=True)
        for state in cell["returned"]:  # through load_named_state and load_state_dict
            last = cell["seen"][-1]
            assert same(state, {name: last[name] for name in state})
    for one, other in pairwise(cells):
        assert all(same(a, b) for a, b in zip(one["seen"], other["seen"], strict=True))
    if method != "torch":
        states = len(cells[0]["returned"][0])
        replicas = 2 if layout == "replicas of shards" else 1
        assert sum(cell["owned"] for cell in cells) == replicas * expected["owned"]
        streams = [cell["streamed"] for cell in cells]
        assert streams.count(states) == (replicas if len(cells) > 1 else 0)


@pytest.mark.parametrize("method", METHODS)
def test_a_nan_and_a_spike_of_one_rank_leave_every_bit_and_an_unused_parameter_stays(truth, method):
    seen, verdicts = truth[method]["seen"], truth[method]["verdicts"]
    assert same(seen[FAULT], seen[FAULT - 1])
    assert same(seen[SPIKE], seen[FAULT])
    bad = next(name for name, tensor in seen[0].items() if tensor.numel())  # that has the NaN
    assert verdicts[FAULT] == ("nonfinite", bad)
    assert verdicts[SPIKE][0] == "spike"
    assert [verdicts[step] for step in (0, 1, 2, LAST)] == [None] * 4
    unused = UNUSED.get(method, set())
    for name, tensor in seen[LAST].items():
        if tensor.numel() and seen[0][name.partition(".")[0]].numel():
            still = name.partition(".")[0] in unused
            assert torch.equal(tensor, seen[SPIKE][name]) == still, name


def test_what_two_ranks_save_with_torch_loads_on_another_number_and_saving_steps_nothing(ranks):
    for results in ranks[:2]:
        before, after, sharded = results["saved"]
        assert same(before, after)
        assert sharded == {name for name in after if not name.endswith((".step", ".variance"))}
    for results in ranks:
        for layout in ("shards 4", "replicas of shards"):
            state, rate = results["loaded", layout]
            assert same(state, ranks[0]["saved"][0])
            assert rate == 0.05


def test_other_placements_and_meshes_are_refused_by_name(ranks):
    for results in ranks:
        refused = results["refused"]
        assert refused["columns"].startswith("parameter w has placements (Shard(dim=1),)")
        assert "supported is (Shard(dim=0),) or (Replicate(), Shard(dim=0))" in refused["columns"]
        assert refused["replicated"].startswith("parameter w has placements (Replicate(),)")
        assert refused["added"].startswith("parameter x has placements (Shard(dim=1),)")
        assert "v on none; build an optimizer for each" in refused["mixed"]
        assert refused["summed"].endswith("gradient of parameter w; leave out process_group")
        assert refused["torch's"].endswith("gradients of SGD; leave out the guard's process_group")
        assert "was flattened by FullyShardedDataParallel; use torch.dist" in refused["first"]


def test_the_lines_of_the_page_split_a_model_and_step_its_matrices(ranks):
    assert [results["page"] for results in ranks] == [(4, [True, False, True, False])] * 4


# ---- who owns what, without processes


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    ("packed", "mlp", "dim", "tables"), [(10, 22, 768, 5), (16, 32, 1024, 5), (12, 24, 768, 2)]
)
def test_padding_is_at_most_one_per_cent_of_the_bytes(packed, mlp, dim, tables, size, monkeypatch):
    """Of models with so many packed Q, K, V, O; MLPs; tables of AdamW."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: size)

    def on_meta(count, *shape):
        meta = {"device": "meta", "dtype": torch.bfloat16}
        return [nn.Parameter(torch.empty(shape, **meta)) for _ in range(count)]

    groups = [
        {"params": on_meta(packed, dim, 4 * dim), "split": 4},
        {"params": on_meta(mlp, dim, 4 * dim), "lr_mul": 2.0},
        {"params": on_meta(12, 6, 12)},
    ]
    adam = on_meta(tables, 50304, dim) + on_meta(1, 60)
    for kind, params in ((NorMuon, groups), (AdamW, adam)):
        optimizer = kind(params, 0.02, process_group="g")
        total = sum(message.length * size for message in optimizer.messages)
        elements = sum(p.numel() for each in optimizer.param_groups for p in each["params"])
        assert 0 <= total - elements <= 0.01 * total
