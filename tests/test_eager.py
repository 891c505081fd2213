"""kernels/eager.py computes what torch's own expressions do, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from kernels.eager import rms_norm, squared_relu

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def gradient(function, x, dy):
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(dy.to(y.dtype))
    return y.detach(), x.grad


@DTYPES
@pytest.mark.parametrize("shape", [(4, 8, 3, 32), (16, 128), (5, 1)])
def test_the_norm_is_torchs_to_the_bit_and_its_gradient_within_rounding(dtype, shape):
    x, dy = torch.randn(2, *shape).to(dtype)
    x[0] = 0  # no division by zero
    y, dx = gradient(rms_norm, x, dy)
    expected_y, expected_dx = gradient(lambda x: F.rms_norm(x, x.shape[-1:]), x, dy)
    assert torch.equal(y, expected_y)
    eps = torch.finfo(dtype).eps
    # In one dimension the true gradient is nearly 0: rounding is relative to what is subtracted.
    scale = expected_dx.abs().max() + (dy.abs() / x.abs().clamp_min(0.1)).max()
    assert (dx - expected_dx).abs().max() <= 4 * eps * scale


@DTYPES
def test_the_squared_relu_and_its_gradient_are_torchs_to_the_bit(dtype):
    x, dy = torch.randn(2, 64, 33).to(dtype)
    x[0] = 0
    expected = gradient(lambda x: x.relu().square(), x, dy)
    assert all(map(torch.equal, gradient(squared_relu, x, dy), expected))


def test_compiled_code_uses_the_plain_expressions():
    """A graph break or an opaque function there would keep the compiler from fusing."""

    def both(x):
        return squared_relu(rms_norm(x))

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(both, backend=keep, fullgraph=True)(torch.randn(10, 4).requires_grad_())
    [graph] = graphs
    assert not any("autograd_function" in str(node.target) for node in graph.graph.nodes)
