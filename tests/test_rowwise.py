"""RowAdam: dense and sparse gradients take one trajectory, that of a float64 reference.

On ranks, shards and checkpoints: tests/test_optim_ranks.py. With all optimizers: test_optim.py.
"""

from functools import partial

import pytest
import reference
import torch
import torch.nn.functional as F
from test_optim import CAUTIOUS, assert_follows, parameters

from optim import Guard, Row, RowAdam, build_optimizers, named_state, reset

ROWS, WIDTH = 40, 6


def read(table, step, sparse, rows=9):
    """Give a table the gradient of two lookups, in which some rows are read twice."""
    generator = torch.Generator().manual_seed(step)
    table.grad = None
    for _ in range(2):
        index = torch.randint(0, ROWS, (rows,), generator=generator)
        weight = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        (F.embedding(index, table, sparse=sparse) * weight.to(table.dtype)).sum().backward()


def state_of(optimizer):
    return dict(named_state(optimizer))


@CAUTIOUS
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_step_is_the_textbook_step(cautious, decay):
    options = {"lr": 0.1, "beta2": 0.9, "eps": 1e-6, "weight_decay": decay, "cautious": cautious}
    optimizer = RowAdam(parameters((5, 3), (1, 4), (5, 3)), **options)
    assert_follows(optimizer, lambda i, w, g, s: reference.row_adam_step(w, g, s, **options))


@CAUTIOUS
@pytest.mark.parametrize("sparse", [True, False])
def test_rows_that_are_read_now_and_then_follow_the_reference(sparse, cautious):
    """Also between reads: their second moment decays, and their weights keep every bit."""
    [table] = parameters((ROWS, WIDTH))
    options = {"lr": 0.1, "weight_decay": 0.5, "cautious": cautious}
    optimizer, state, weight = RowAdam([table], **options), {}, table.detach().clone()
    for step in range(8):
        read(table, step, sparse)
        touched = table.grad.to_dense().any(1)
        before = table.detach().clone()
        weight = reference.row_adam_step(weight, table.grad.to_dense(), state, **options)
        optimizer.step()
        assert torch.equal(table[~touched], before[~touched])
    torch.testing.assert_close(table.detach(), weight, rtol=1e-12, atol=1e-12)
    averages = state_of(optimizer)["0.row_avg_sq"]
    torch.testing.assert_close(averages, state["row_avg_sq"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_in_bf16_keeps_its_moments_in_float32_and_steps_alike(dtype):
    [table], [twin] = parameters((ROWS, WIDTH), dtype=dtype), parameters((ROWS, WIDTH), dtype=dtype)
    optimizers = [RowAdam([each], 0.1) for each in (table, twin)]
    for step in range(3):
        read(table, step, sparse=True)
        read(twin, step, sparse=False)
        for optimizer in optimizers:
            optimizer.step()
    assert state_of(optimizers[0])["0.row_avg_sq"].dtype == torch.float32
    torch.testing.assert_close(table, twin)


def test_a_compiled_step_is_the_eager_one():
    eager, compiled = parameters((ROWS, WIDTH))[0], parameters((ROWS, WIDTH))[0]
    optimizers = [RowAdam([eager], 0.1), RowAdam([compiled], 0.1, compiled=True)]
    with torch._dynamo.config.patch(suppress_errors=False):
        for step in range(3):
            for table, optimizer in zip((eager, compiled), optimizers, strict=True):
                read(table, step, sparse=False)
                optimizer.step()
    torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-12)


def test_the_guard_sees_the_norm_of_a_sparse_gradient_and_skips_its_faults():
    [table] = parameters((ROWS, WIDTH))
    optimizer = RowAdam([table], 0.1)
    guard = Guard([optimizer])
    guard.divide_by(4)
    read(table, 0, sparse=True)
    verdict = guard.step()
    norm = torch.linalg.vector_norm(table.grad.to_dense()) / 4
    torch.testing.assert_close(guard.gradient_norms(verdict), [norm.item()], rtol=1e-6, atol=0)
    before, state = table.detach().clone(), state_of(optimizer)
    read(table, 1, sparse=True)
    table.grad = table.grad * float("nan")
    assert guard.explain(guard.step()).guard == "nonfinite"
    assert torch.equal(table, before)
    assert all(torch.equal(value, state[name]) for name, value in state_of(optimizer).items())


def test_a_step_on_few_rows_reads_only_these():
    """Weights elsewhere may even be NaN: no pass over the whole table touches them."""
    [table] = parameters((ROWS, WIDTH))
    read(table, 0, sparse=True, rows=2)
    untouched = ~table.grad.to_dense().any(1)
    with torch.no_grad():
        table[untouched] = torch.nan
    RowAdam([table], 0.1, weight_decay=0.5).step()
    assert table[~untouched].isfinite().all()


def test_reset_forgets_all_steps_and_a_state_dict_returns_them():
    [table] = parameters((ROWS, WIDTH))
    optimizer = RowAdam([table], 0.1)
    read(table, 0, sparse=True)
    optimizer.step()
    saved = optimizer.state_dict()
    before = state_of(optimizer)
    reset(optimizer)
    assert not any(value.any() for value in state_of(optimizer).values())
    optimizer.load_state_dict(saved)
    assert all(torch.equal(value, before[name]) for name, value in state_of(optimizer).items())


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ((4,), {}, "parameter w has the shape (4,); RowAdam steps tables (rows, width)"),
        ((2, 3, 4), {}, "parameter w has the shape (2, 3, 4)"),
        ((4, 3), {"beta2": 1.0}, "beta2 must be in [0, 1), got 1.0 for parameter w"),
        ((4, 3), {"eps": -1.0}, "eps must be in [0, inf), got -1.0 for parameter w"),
    ],
)
def test_what_cannot_be_stepped_is_refused_with_its_name(shape, options, said):
    with pytest.raises(ValueError, match="parameter w") as error:
        RowAdam([("w", torch.nn.Parameter(torch.zeros(shape)))], 0.1, **options)
    assert said in str(error.value)


def test_a_table_of_an_optimizer_table_is_stepped_at_its_own_rate():
    [table], [twin] = parameters((ROWS, WIDTH)), parameters((ROWS, WIDTH))
    rows = [Row("w", "rows", {"lr_mul": 3.0})]
    built = build_optimizers([("w", table)], rows, {"rows": partial(RowAdam, lr=0.1)})
    read(table, 0, sparse=True)
    read(twin, 0, sparse=True)
    built["rows"].step()
    RowAdam([twin], 0.3).step()
    torch.testing.assert_close(table, twin, rtol=1e-12, atol=0)
