"""Parameters split by fully_shard: on 1, 2 and 4 gloo processes the steps of one process.

One spawn of four processes records everything; the truth is the same training of plain parameters.
"""

import math
import os
import random
import sys
from contextlib import nullcontext
from functools import partial
from multiprocessing import set_forkserver_preload
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from optim import AdamW, Guard, Muon, NorMuon, SpikeRule, load_named_state, named_state
from optim.buckets import Bucket, Part, RankGroup, partition
from optim.muon import matrix_shapes
from optim.sharded import Exchange, shard_length

ROOT = Path(__file__).resolve().parents[1]
MESHES = {"one": [0], "two": [0, 1], "three": [0, 1, 2], "four": [0, 1, 2, 3]}
MESHES["hsdp"] = [[0, 1], [2, 3]]
SHARDED = ["one", "two", "four", "hsdp"]
RANDOM = ["two", "three", "four"]
LOADED = ["one", "four", "hsdp"]  # what "two" saved
STEPS, ROWS, MICRO_BATCHES, FAULT = 4, 8, 2, 2  # one row of step 2 is NaN
SEEDS = range(8)


class Net(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, packed and stacked matrices."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6, dtype=torch.float64)
        self.body = nn.Linear(6, 10, dtype=torch.float64)
        self.back = nn.Linear(10, 6, bias=False, dtype=torch.float64)
        self.packed = nn.Parameter(torch.randn(6, 24, dtype=torch.float64))
        self.experts = nn.Parameter(torch.randn(3, 4, 6, dtype=torch.float64))
        self.head = nn.Linear(24, 2, dtype=torch.float64)
        self.single = nn.Linear(24, 3)
        self.unused = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, tokens, factor):
        x = self.embed(tokens) * factor
        x = x + self.back(torch.tanh(self.body(x)))
        x = torch.tanh(x @ self.packed) + torch.einsum("kri,bi->br", self.experts, x).repeat(1, 6)
        single = self.single(x.detach().float())
        return self.head(x).square().mean() + single.square().mean().double()


def build(mesh):
    """The model, split over the mesh if there is one, and its optimizers."""
    torch.manual_seed(0)
    model = Net()
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard

        for part in (model.head, model.single, model.unused, model):
            fully_shard(part, mesh=mesh)
    named = list(model.named_parameters())
    matrices = [pair for pair in named if pair[1].ndim > 1 and "embed" not in pair[0]]
    others = [pair for pair in named if pair[1].ndim == 1 or "embed" in pair[0]]
    groups = [
        {"params": [pair for pair in matrices if pair[0] == "packed"], "split": 4},
        {"params": [pair for pair in matrices if pair[0] != "packed"], "lr_mul": 0.5},
    ]
    common = {"grad_divisor": MICRO_BATCHES, "weight_decay": 0.1}
    normuon = NorMuon(groups, 0.05, dtype=torch.float64, cautious=True, **common)
    return model, [normuon, AdamW(others, 0.02, **common)]


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def state_of(optimizers):
    return {key: tensor for each in optimizers for key, tensor in named_state(each)}


def train(mesh, rank=0, size=1):
    """What each step leaves, verdicts, the norms that a guard sees, and model and optimizers."""
    model, optimizers = build(mesh)
    guard = Guard(optimizers, spike=SpikeRule(start=3, window=8))
    seen, verdicts, norms = [], [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for _ in range(MICRO_BATCHES):
            tokens = torch.randint(11, (ROWS,), generator=generator)
            factor = torch.ones(ROWS, 1, dtype=torch.float64)
            factor[-1] = math.nan if step == FAULT else 1
            model(tokens.chunk(size)[rank], factor.chunk(size)[rank]).backward()
        for optimizer in optimizers:
            optimizer.launch()
            norms.append(optimizer.measure())
        verdict = guard.explain(guard.step())
        verdicts.append(verdict and verdict.tensor)
        for optimizer in optimizers:
            optimizer.zero_grad()
        weights = {name: whole(param) for name, param in model.named_parameters()}
        seen.append(weights | state_of(optimizers))
    return {"seen": seen, "verdicts": verdicts, "norms": norms}, model, optimizers


# ---- random models, without a model


def random_walk(seed, mesh=None):
    """Random parameters and gradients: weights, state, norms, and what a bad step changes."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kind, dtype = draw.choice([Muon, NorMuon, AdamW]), draw.choice([torch.float64, torch.bfloat16])

    def tensor(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        if mesh is None:
            return values
        from torch.distributed.tensor import Shard, distribute_tensor

        return distribute_tensor(values, mesh, [Shard(0)])

    groups = []
    for number in range(draw.randint(3, 6)):
        shape = [draw.randint(0, 9), *[draw.randint(1, 9) for _ in range(draw.choice([1, 1, 2]))]]
        group = {"params": [(f"p{number}", nn.Parameter(tensor(*shape)))]}
        if kind is not AdamW:
            long = max(shape[-2:])
            splits = [number for number in range(1, long + 1) if long % number == 0]
            group["split"] = draw.choice([*splits, (long,), (1,) * long])
        groups.append(group)
    options = {"weight_decay": draw.choice([0.0, 0.1]), "cautious": draw.random() < 0.5}
    options |= {} if kind is AdamW else {"dtype": torch.float64}
    optimizer = kind(groups, 0.1, **options)
    guard = Guard([optimizer])
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def snapshot():
        return [whole(param) for param in params] + list(state_of([optimizer]).values())

    def step(factor=1.0):
        for param in params:
            param.grad = tensor(*param.shape) * factor
        optimizer.launch()
        norms = optimizer.measure()
        guard.step()
        return [norms, *snapshot()]

    absent = draw.random() < 0.3
    # Without the CPU's short cut a flag on the device selects old or new values.
    with mock.patch("optim.base.READ_AT_ONCE", ()) if draw.random() < 0.5 else nullcontext():
        results = step() + step()
        before = snapshot()
        step(math.inf)
        same = all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))
        if absent:
            for param in params:
                param.grad = None if param is params[0] else torch.ones_like(param)
            optimizer.step()
            results += snapshot()
    state, in_torchs_form = state_of([optimizer]), optimizer.state_dict()
    returns = []
    for load in (
        lambda: load_named_state(optimizer, state),
        lambda: optimizer.load_state_dict(in_torchs_form),
    ):
        optimizer.reset()
        load()
        kept = state_of([optimizer])
        returns += [torch.equal(kept[name], state[name]) for name in state]
    return {"results": results, "skip_changes_nothing": same, "returns": all(returns)}


# ---- the processes


def save(folder, model, optimizers, group):
    """Save with torch's own calls; returns the placements of the state."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state = get_optimizer_state_dict(model=model, optimizers=optimizers)
    dcp.save({"optim": state}, checkpoint_id=f"{folder}/saved", process_group=group)
    placements = {}
    for name, kinds in state["state"].items():
        for kind, value in kinds.items():
            placements[f"{name}.{kind}"] = str(getattr(value, "placements", None))
    return placements


def load(folder, mesh, group):
    """What fresh optimizers hold after torch's own calls: whole state, and a learning rate."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as of_torch

    model, optimizers = build(mesh)
    optimizers[0].param_groups[0]["lr"] = 0.123
    state = of_torch.get_optimizer_state_dict(model=model, optimizers=optimizers)
    dcp.load({"optim": state}, checkpoint_id=f"{folder}/saved", process_group=group)
    of_torch.set_optimizer_state_dict(model=model, optimizers=optimizers, optim_state_dict=state)
    return {"state": state_of(optimizers), "lr": optimizers[0].param_groups[0]["lr"]}


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


def of_torch(mesh):
    """A guard's norm of torch's AdamW, and whether a skipped step changes nothing."""
    model, _ = build(mesh)
    named = [pair for pair in model.named_parameters() if "unused" not in pair[0]]
    optimizer = torch.optim.AdamW(named, 0.1)
    guard = Guard([optimizer], spike=SpikeRule(start=3, window=8))
    norms = []
    for factor in (1.0, 1.0, math.inf):
        before = [whole(param) for _, param in named]
        for _, param in named:
            param.grad = torch.ones_like(param) * factor
        norms.append(torch.linalg.vector_norm(guard.measure([0])[0]).item())
        guard.step()
    same = [torch.equal(whole(param), old) for (_, param), old in zip(named, before, strict=True)]
    return {"norm": norms[0], "kept": all(same)}


def process(rank, folder):
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    meshes = {}
    for name, ranks in MESHES.items():  # all ranks help to make each
        layout = torch.tensor(ranks)
        names = ("replica", "shard")[-layout.ndim :]
        mesh = DeviceMesh("cpu", layout, mesh_dim_names=names)
        if rank in layout:
            meshes[name] = mesh
    results = {}
    for name in [name for name in SHARDED if name in meshes]:
        results[name], model, optimizers = train(meshes[name], rank, meshes[name].size())
        if name == "two":
            results[name]["of_torch"] = of_torch(meshes[name])
            results[name]["placements"] = save(folder, model, optimizers, meshes[name].get_group())
            results[name]["after_save"] = state_of(optimizers)
    for name in [name for name in RANDOM if name in meshes]:
        results[name, "random"] = [random_walk(seed, meshes[name]) for seed in SEEDS]
    dist.barrier()  # the checkpoint is there
    for name in [name for name in LOADED if name in meshes]:
        group = meshes["one"].get_group() if name == "one" else dist.group.WORLD
        results[name, "loaded"] = load(folder, meshes[name], group)
    results["refused"] = refusals(meshes["four"])
    results["page"] = run_snippet()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an orderly exit


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


@pytest.fixture(scope="module")
def truth():
    return train(None)[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process recorded."""
    folder = tmp_path_factory.mktemp("fsdp")
    modules = ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "optim"]
    set_forkserver_preload(modules)  # imported once
    mp.start_processes(process, (str(folder),), nprocs=4, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]


def close(ours, theirs):
    wide = ours.dtype == torch.float64
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if wide else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("mesh", SHARDED)
def test_shards_take_the_steps_of_whole_parameters(truth, ranks, mesh):
    for results in ranks:
        if mesh not in results:
            continue
        for ours, theirs in zip(results[mesh]["seen"], truth["seen"], strict=True):
            assert ours.keys() == theirs.keys()
            for name in theirs:
                close(ours[name], theirs[name])


@pytest.mark.parametrize("mesh", SHARDED)
def test_a_guard_sees_global_norms_and_all_ranks_skip_alike(truth, ranks, mesh):
    for results in ranks:
        if mesh not in results:
            continue
        found = results[mesh]
        for ours, theirs in zip(found["norms"], truth["norms"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, equal_nan=True)
        assert found["verdicts"] == truth["verdicts"]
        assert truth["verdicts"][FAULT] is not None
        before, after = found["seen"][FAULT - 1 : FAULT + 1]
        assert all(torch.equal(before[name], after[name]) for name in before)
        same = [name for name in after if torch.equal(found["seen"][0][name], after[name])]
        assert {"unused.weight", "unused.bias"} <= set(same)


@pytest.mark.parametrize("mesh", RANDOM)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_shards_step_skip_and_return_as_whole_ones(ranks, mesh, seed):
    expected = random_walk(seed)
    for results in ranks:
        if (mesh, "random") not in results:
            continue
        found = results[mesh, "random"][seed]
        assert found["skip_changes_nothing"]
        assert found["returns"]
        for ours, theirs in zip(found["results"], expected["results"], strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("mesh", LOADED)
def test_what_two_ranks_save_with_torch_loads_on_another_number(ranks, mesh):
    saved = ranks[0]["two"]["seen"][-1]
    for results in ranks:
        if (mesh, "loaded") not in results:
            continue
        loaded = results[mesh, "loaded"]
        assert all(torch.equal(loaded["state"][name], saved[name]) for name in loaded["state"])
        assert loaded["lr"] == 0.05


def test_state_on_disk_is_sharded_as_its_parameter_and_saving_steps_nothing(ranks):
    found = ranks[0]["two"]
    kept = found["after_save"]
    assert all(torch.equal(kept[name], found["seen"][-1][name]) for name in kept)
    sharded = {name for name, placement in found["placements"].items() if "Shard" in placement}
    assert sharded == {name for name in kept if not name.endswith((".step", ".variance"))}


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


def test_a_guard_steps_torchs_own_optimizers_on_shards(ranks):
    model, _ = build(None)
    count = sum(p.numel() for name, p in model.named_parameters() if "unused" not in name)
    for results in ranks[:2]:
        assert results["two"]["of_torch"]["norm"] == pytest.approx(math.sqrt(count))
        assert results["two"]["of_torch"]["kept"]


def test_the_lines_of_the_page_split_a_model_and_step_its_matrices(ranks):
    assert [results["page"] for results in ranks] == [(4, [True, False, True, False])] * 4


# ---- who sends what, without processes


class Shards:
    """What Exchange reads of a sharded parameter or gradient."""

    def __init__(self, tensor, rank, size):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.grad, length = None, shard_length(tensor, size)
        self.mine = tensor.view(-1)[rank * length : (rank + 1) * length].clone()

    def numel(self):
        return math.prod(self.shape)

    def to_local(self):
        return self.mine


def exchanges_of(wholes, splits, size):
    """The exchanges of each rank for parameters with these values."""
    found = []
    for rank in range(size):
        parts = []
        for number, (tensor, split) in enumerate(zip(wholes, splits, strict=True)):
            param, group, start = Shards(tensor, rank, size), {}, 0
            param.grad = Shards(-tensor, rank, size)
            first = rank * shard_length(tensor, size)
            [(count, rows, cols)] = matrix_shapes(tensor.shape, split)
            for index in range(count):
                parts.append(Part(param, group, number, start, index, (1, rows, cols), first))
                start += rows * cols
        exchanges = []
        for shares in partition(parts, size):
            buckets = [Bucket([part], {}, at_once=1) for part in shares[rank]]
            exchanges.append(Exchange(shares, RankGroup(rank, rank, size), buckets))
        found.append(exchanges)
    return found


def deliver(calls):
    """Start the call of each rank, move all blocks, and end the calls; bytes that leave a rank."""
    sent = {}

    def all_to_all(received, message, into, out_of, group, async_op):
        sent[group] = message.split(out_of)

        def wait():
            arrived = [sent[source][group] for source in range(len(sent))]
            assert [len(block) for block in arrived] == into
            received.copy_(torch.cat(arrived))

        return mock.Mock(wait=wait)

    with mock.patch.object(dist, "all_to_all_single", all_to_all):
        waits = [call() for call in calls]
    for wait in waits:
        wait()
    return [sum(b.nbytes for b in blocks) - blocks[rank].nbytes for rank, blocks in sent.items()]


SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5)


@given(SHAPES, st.integers(2, 8), st.data())
def test_each_element_has_one_owner_and_travels_there_and_back(shapes, size, data):
    wholes = [torch.randn(shape) for shape in shapes]
    divisors = [[n for n in range(1, 10) if max(shape) % n == 0] for shape in shapes]
    splits = [data.draw(st.sampled_from(choices)) for choices in divisors]
    found = exchanges_of(wholes, splits, size)
    owned = [part for each in found[0] for share in each.shares for part in share]
    assert sum(part.numel for part in owned) == sum(tensor.numel() for tensor in wholes)
    for exchanges in zip(*found, strict=True):  # one message, as all ranks hold it
        out = deliver([exchange.reduce for exchange in exchanges])
        calls = []
        for exchange in exchanges:
            segment = exchange.open()
            for bucket in exchange.buckets:
                [part] = bucket.parts
                expected = part.cut(wholes[part.number])
                assert torch.equal(bucket.old, expected)
                assert torch.equal(bucket.sums, -expected)
                bucket.fresh.copy_(3 * expected)
            calls.append(partial(exchange.gather, segment))
        total = [sum(pair) for pair in zip(out, deliver(calls), strict=True)]
        assert total == [exchange.bytes_sent() for exchange in exchanges]
    for rank, exchanges in enumerate(found):
        for part in (part for each in exchanges for share in each.shares for part in share):
            expected = Shards(3 * wholes[part.number], rank, size)
            assert torch.equal(part.param.mine, expected.mine)


def test_the_page_tells_the_bytes_that_the_matrices_of_gpt2s_cost_on_eight_ranks():
    page = " ".join((ROOT / "docs" / "optimizers.md").read_text().split())
    layer = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
    matrices = [torch.empty(shape, device="meta") for shape in layer * 12]
    sent = [
        sum(each.bytes_sent() for each in exchanges) / 2**20
        for exchanges in exchanges_of(matrices, [3, 1, 1, 1] * 12, 8)
    ]
    one_way = sum(tensor.nbytes for tensor in matrices) / 8 * 7 / 8 / 2**20
    own = f"a rank sends {sum(sent) / 8:.1f} MiB a step, at most {max(sent):.1f}"
    least = f"would be {2 * one_way:.1f} MiB"
    fsdp = f"FSDP itself sends {3 * one_way * 8 / 2:.1f} MiB"  # each way, all shards, in bf16
    assert [text for text in (own, least, fsdp) if text not in page] == []
