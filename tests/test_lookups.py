"""Lookups whose gradients are added to the table's own in place."""

import pytest
import torch
import torch.nn.functional as F

from kernels.lookups import lookup

CALLS = [torch.tensor([[1, 1, 9], [0, 1, 3]]), torch.tensor([9])]


def table_of(dtype=torch.float64):
    return torch.randn(10, 4, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("sparse", [False, True])
def test_lookups_are_torchs_and_add_into_one_gradient_of_the_table(sparse):
    table = table_of()
    reference = table.detach().clone().requires_grad_()
    for index in CALLS:
        before = table.grad
        found, expected = lookup(index, table, sparse), F.embedding(index, reference)
        assert torch.equal(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        assert sparse or before is None or table.grad is before
    assert table.grad.is_sparse == sparse
    torch.testing.assert_close(table.grad.to_dense(), reference.grad, rtol=1e-12, atol=0)


def test_a_wide_gradient_of_a_bf16_table_keeps_what_bf16_sums_lose():
    table = table_of(torch.bfloat16)
    table.grad_dtype = torch.float32
    for _ in range(2):
        lookup(torch.full((1000,), 3), table).sum().backward()
    assert table.grad.dtype == torch.float32
    assert torch.equal(table.grad[3], torch.full((4,), 2000.0))  # bf16 stops at 256


@pytest.mark.parametrize("clear", ["before", "after"])
def test_gradients_cleared_before_or_after_the_forward_pass_stay_dense(clear):
    table = table_of()
    optimizer = torch.optim.Adam([table])
    for _ in range(2):
        if clear == "before":
            optimizer.zero_grad()
        loss = lookup(CALLS[0], table).sum()
        if clear == "after":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # it refuses sparse gradients


def test_compiled_code_has_the_plain_lookup():
    """A hook or a sparse gradient there would break the graph."""
    torch.compiler.reset()
    table = table_of()
    compiled = torch.compile(lookup, backend="aot_eager", fullgraph=True)
    compiled(CALLS[0], table).sum().backward()
    assert table.grad.layout == torch.strided


@pytest.mark.gpu
def test_on_a_gpu_the_gradient_is_that_of_a_cpu_and_nothing_waits():
    grads = []
    for device in ("cpu", "cuda"):
        table = torch.ones(10, 4, dtype=torch.bfloat16, device=device).requires_grad_()
        table.grad_dtype = torch.float32
        index = CALLS[0].to(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                lookup(index, table).square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        grads.append(table.grad.cpu())
    assert torch.equal(*grads)
