"""What optimizers send: ranks take the step of one process, without copies and untouched rows."""

import os
import sys
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_ranks import Scenario, play, record
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from optim import AdamW, Muon, RowAdam, load_named_state, named_state, reset

RANKS = (2, 4, 8)
MICRO_BATCHES, STEPS = 8, 3  # divided by all numbers of ranks
LARGE = 2**15  # elements of a message of its own, as AdamW shares out no smaller parameter
ROWS, WIDTH = 1000, 4  # of a sparse table
SPARSE = "sparse"
KINDS = {  # optimizer, its options, shape and dtype of each parameter
    "adamw": (AdamW, {"weight_decay": 0.1}, {
        "in place": ((4096, 8), torch.float64),
        "in place, of bf16 with float32 gradients": ((4096, 16), torch.bfloat16),
        "with padding": ((4097, 8), torch.float64),
        "of unequal parts": ((3, 10_923), torch.float64),
        "small": ((7,), torch.float64),
    }),
    "muon": (Muon, {"dtype": torch.float64}, {
        "stack": ((8, 64, 64), torch.float64), "matrix": ((6, 4), torch.float64),
    }),
    "rows": (RowAdam, {"weight_decay": 0.1}, {
        SPARSE: ((ROWS, WIDTH), torch.float64), "dense": ((300, 128), torch.float64),
    }),
}  # fmt: skip


def build(kind, group=None):
    make, options, table = KINDS[kind]
    params, generator = {}, torch.Generator().manual_seed(0)
    for name, (shape, dtype) in table.items():
        param = params[name] = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        param.grad_dtype = torch.promote_types(dtype, torch.float32)
    options = options | {"process_group": group, "grad_divisor": MICRO_BATCHES}
    return params, make([*params.items()], 0.05, **options)


def give_gradients(params, step, rank, size):
    """Sums of whole numbers, exact in any order. In step 1 rank 0 has none of the first parameter.

    The sparse table's are sparse, but dense on rank 0 in step 2.
    """
    for number, (name, param) in enumerate(params.items()):
        param.grad = None
        for micro in range(rank, MICRO_BATCHES, size):
            if step == 1 and number == 0 and micro % max(RANKS) == 0:
                continue
            generator = torch.Generator().manual_seed(100 * step + 10 * number + micro)
            shape = (20, WIDTH) if name == SPARSE else param.shape
            grad = torch.randint(-8, 9, shape, generator=generator).to(param.grad_dtype)
            if name == SPARSE:
                rows = torch.randint(0, ROWS, (1, 20), generator=generator)
                grad = torch.sparse_coo_tensor(rows, grad, param.shape, check_invariants=True)
                grad = grad.to_dense() if step == 2 and rank == 0 else grad
            param.grad = grad if param.grad is None else param.grad + grad
    if step == 1 and rank == 0 and size == max(RANKS):
        assert next(iter(params.values())).grad is None


def stepped(kind, rank=0, size=1, group=None):
    """Weights after each step, and state after the last, which is loaded before it."""
    params, optimizer = build(kind, group)
    seen = []
    for step in range(STEPS):
        if step == STEPS - 1:
            state = dict(named_state(optimizer))
            reset(optimizer)
            load_named_state(optimizer, state)
        give_gradients(params, step, rank, size)
        optimizer.step()
        seen.append({name: param.detach().clone() for name, param in params.items()})
    return [*seen, dict(named_state(optimizer))]


class Largest(TorchDispatchMode):
    """Notes the largest new tensor."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {each.data_ptr() for each in args if isinstance(each, torch.Tensor)}
        made = function(*args, **kwargs or {})
        for each in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(each, torch.Tensor) and each.data_ptr() not in given:
                self.elements = max(self.elements, each.numel())
        return made


def sent_in_a_step(rows, rank, group):
    """Elements that this rank gives to torch.distributed in a step of RowAdam."""
    table = nn.Parameter(torch.zeros(rows, WIDTH))
    touched = torch.tensor([[0, rank, rows - 1]])
    table.grad = torch.sparse_coo_tensor(touched, torch.ones(3, WIDTH), check_invariants=True,
                                         size=table.shape)  # fmt: skip
    optimizer, sent = RowAdam([table], 0.1, process_group=group), []

    def note(function, tensor, *args, **options):
        sent.append(tensor._values().numel() if tensor.is_sparse else tensor.numel())
        return function(tensor, *args, **options)

    with ExitStack() as stack:
        names = "dist.all_reduce", "buckets.reduce_scatter", "buckets.all_gather", "base.all_gather"
        for name in names:
            where, _, call = name.rpartition(".")
            owner = dist if where == "dist" else sys.modules[f"optim.{where}"]
            noted = partial(note, getattr(owner, call))
            stack.enter_context(mock.patch.object(owner, call, noted))
        optimizer.step()
    return sum(sent)


def copied_in_a_step(group):
    """Elements of the largest new tensor in a step of a large table; whether its gradient stays."""
    table = nn.Parameter(torch.ones(LARGE // 8, 8))
    table.grad = torch.ones_like(table)
    optimizer = AdamW([table], 0.1, process_group=group)
    with Largest() as largest:
        optimizer.step()
    return largest.elements, bool((table.grad == 1).all())


def be_a_rank(folder, size):
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    found = {kind: stepped(kind, rank, size, group) for kind in KINDS}
    found["copied"] = copied_in_a_step(group)
    found["sent"] = [sent_in_a_step(rows, rank, group) for rows in (100, 100_000)]
    torch.save(found, f"{folder}/{size} {rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an orderly exit


if __name__ == "__main__":
    with mock.patch("optim.buckets.OWN_MESSAGE", LARGE):
        play({
            str(size): Scenario(partial(be_a_rank, sys.argv[1], size), tuple(range(size)), size)
            for size in RANKS
        }, in_turn=True)  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found, by the number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    left = record(__file__, folder)
    for each in left.values():
        assert [rank.code for rank in each] == [0] * len(each), each
    return {size: [torch.load(folder / f"{size} {rank}.pt") for rank in range(size)]
            for size in RANKS}  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    return {kind: stepped(kind) for kind in KINDS}


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_take_the_steps_of_one_process_and_share_its_state(ranks, alone, kind, size):
    for found in ranks[size]:
        for ours, first, theirs in zip(found[kind], ranks[size][0][kind], alone[kind], strict=True):
            assert ours.keys() == theirs.keys()
            for name, tensor in theirs.items():
                assert torch.equal(ours[name], first[name]), name
                tolerance = 0 if kind != "muon" else 1e-12  # products of other stacks
                torch.testing.assert_close(ours[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", RANKS)
def test_a_large_table_is_sent_without_a_copy_and_its_gradient_stays(ranks, size):
    for found in ranks[size]:
        elements, stays = found["copied"]
        assert elements <= LARGE // size
        assert stays


@pytest.mark.parametrize("size", RANKS)
def test_messages_of_sparse_gradients_do_not_grow_with_the_table(ranks, size):
    for found in ranks[size]:
        small, large = found["sent"]
        assert small == large < 3 * WIDTH + 10
