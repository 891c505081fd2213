"""RowAdam on sparse gradients, which take the trajectory of a float64 reference.

With all optimizers: test_optim.py, test_guards.py. On ranks and shards: test_optim_ranks.py.
"""

import pytest
import reference
import torch
import torch.nn.functional as F
from small_optim import bits, parameters

from optim import Guard, RowAdam, named_state

ROWS, WIDTH = 40, 6


def read(table, step, sparse, rows=9):
    """Give a table the gradient of two lookups, in which some rows are read twice."""
    generator = torch.Generator().manual_seed(step)
    table.grad = None
    for _ in range(2):
        index = torch.randint(0, ROWS, (rows,), generator=generator)
        weight = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        (F.embedding(index, table, sparse=sparse) * weight.to(table.dtype)).sum().backward()


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("sparse", [True, False])
def test_rows_that_are_read_now_and_then_follow_the_reference(sparse, cautious):
    """Also between reads: their second moment decays, and their weights keep every bit."""
    [table] = parameters((ROWS, WIDTH))
    options, state = {"lr": 0.1, "weight_decay": 0.5, "cautious": cautious}, {}
    optimizer = RowAdam([{"params": [table], "lr_mul": 3.0}], **options)
    weight = table.detach().clone()
    for step in range(8):
        read(table, step, sparse)
        gradient, before = table.grad.to_dense(), table.detach().clone()
        weight = reference.row_adam_step(weight, gradient, state, lr_mul=3.0, **options)
        optimizer.step()
        untouched = ~gradient.any(1)
        assert torch.equal(table[untouched], before[untouched])
    torch.testing.assert_close(table.detach(), weight, rtol=1e-12, atol=1e-12)
    averages = dict(named_state(optimizer))["0.row_avg_sq"]
    torch.testing.assert_close(averages, state["row_avg_sq"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_in_bf16_keeps_its_moments_in_float32_and_steps_alike(dtype):
    [table], [dense] = (parameters((ROWS, WIDTH), dtype=dtype) for _ in range(2))
    optimizers = [RowAdam([each], 0.1) for each in (table, dense)]
    for step in range(3):
        read(table, step, sparse=True)
        read(dense, step, sparse=False)
        for optimizer in optimizers:
            optimizer.step()
    assert dict(named_state(optimizers[0]))["0.row_avg_sq"].dtype == torch.float32
    torch.testing.assert_close(table, dense)


def test_the_guard_sees_the_norm_of_a_sparse_gradient_and_skips_its_faults():
    [table] = parameters((ROWS, WIDTH))
    optimizer = RowAdam([table], 0.1)
    guard = Guard([optimizer])
    guard.divide_by(4)
    read(table, 0, sparse=True)
    norm = torch.linalg.vector_norm(table.grad.to_dense()) / 4
    assert guard.gradient_norms(guard.step()) == pytest.approx([norm.item()], rel=1e-6)
    before = bits([table, dict(named_state(optimizer))])
    read(table, 1, sparse=True)
    table.grad = table.grad * float("nan")
    assert guard.explain(guard.step()).guard == "nonfinite"
    assert bits([table, dict(named_state(optimizer))]) == before


def test_a_step_on_few_rows_reads_only_these():
    """Weights elsewhere may even be NaN: no pass over the whole table touches them."""
    [table] = parameters((ROWS, WIDTH))
    read(table, 0, sparse=True, rows=2)
    untouched = ~table.grad.to_dense().any(1)
    with torch.no_grad():
        table[untouched] = torch.nan
    RowAdam([table], 0.1, weight_decay=0.5).step()
    assert table[~untouched].isfinite().all()
