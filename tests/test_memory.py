"""Memory that is counted: by hand on small functions, and beside what a GPU's allocator says."""

import dataclasses
import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import train_gpt
from kernels.attention import PortableAttention
from optim import Guard
from runtime.environment import Machine
from runtime.memory import Built, memory_parts, peak_bytes, smaller

META = torch.device("meta")
N = 1000
VECTOR = 4 * N  # bytes


def vector(device=META, **kwargs):
    return torch.empty(N, device=device, **kwargs)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("function", "vectors"),
    [
        (lambda x: None, 0),
        (lambda x: x + 1, 1),
        (lambda x: (x + 1) + 1, 2),  # the first sum lives until the second is made
        (lambda x: ((x + 1) + 1) + 1, 2),
        (lambda x: [x + 1 for _ in range(5)], 5),
        (lambda x: [x[:10], x.view(10, -1), x.view(10, -1).T], 0),  # views
        (lambda x: (x + 1).mul_(2).add_(1), 1),  # in place
        (lambda x: torch.stack([x, x, x]).sum(0), 4),
    ],
)
def test_the_most_that_is_held_is_what_a_hand_counts(device, function, vectors):
    x = vector(device)
    assert peak_bytes(lambda: function(x)) == vectors * VECTOR


def test_what_lives_in_reference_cycles_is_held():
    def function():
        for _ in range(3):
            cycle = [vector()]
            cycle.append(cycle)

    gc.disable()
    try:
        assert peak_bytes(function) == 3 * VECTOR
    finally:
        gc.enable()


def test_a_backward_pass_counts_saved_tensors_and_gradients():
    weight = vector(requires_grad=True)

    def function():
        y = weight.exp().exp()  # both results are saved
        y.backward(y.detach())

    # Both results, the gradient of the first, and that of the weight, which is made from it.
    assert peak_bytes(function) == 4 * VECTOR
    assert weight.grad is not None


def layers(x, weights, recompute):
    for weight in weights:
        def layer(x, weight=weight):
            return F.linear(x, weight).relu().square().sin()
        x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    return x


def passes(device, recompute):
    weights = [torch.empty(256, 256, device=device, requires_grad=True) for _ in range(8)]
    x = torch.empty(4096, 256, device=device)
    return lambda: layers(x, weights, recompute).sum().backward()


def test_recomputation_holds_one_layers_tensors_and_the_inputs_of_the_others():
    plain, recomputed = (peak_bytes(passes(META, recompute)) for recompute in (False, True))
    activation, weight = 4 * 4096 * 256, 4 * 256 * 256
    assert plain > 8 * 3 * activation
    assert recomputed <= (8 + 6) * activation + 9 * weight


# ---------------------------------------------------------------------------------------------------------------------
# What a run needs

MACHINE = Machine(torch.device("cpu"), 0, 1)


def built(config, device=META, head="chunked", dtype=torch.bfloat16):
    """What the trainer tells of a run on a device."""
    attention = PortableAttention()
    model = train_gpt.GPT(config, dtype, device, attention, head)
    optimizers = train_gpt.make_optimizers(config, model, MACHINE).values()
    windows = dict.fromkeys(("short", "long"), attention.window(1))
    loss = partial(model, windows=windows, longest=config.sequence)
    return Built(loss, Guard(optimizers).step, [*model.parameters()], [*optimizers], train_gpt.reach(config))


def preset(track, **changes):
    return train_gpt.Config(**train_gpt.preset({"track": track}) | changes)


SMALL = {"layers": "tiny", "dim": 128, "head_dim": 64, "vocab_size": 1000, "bos": 999, "sequence": 256,
         "batch_tokens": 2048, "micro_batch": 1024, "val_sequence": 512, "val_batch": 1024,
         "val_tokens": 4096}  # fmt: skip


def test_the_parts_are_weights_as_many_gradients_the_state_and_the_largest_pass():
    config = preset("short", **SMALL)
    parts, run = memory_parts(config, 1, built), built(config)
    weights = sum(weight.nbytes for weight in run.weights)
    state = sum(part.nbytes for each in run.optimizers for kept in each.state.values() for part in kept.values())
    assert (parts["weights"], parts["gradients"], parts["optimizer state"]) == (weights, weights, state)
    larger = memory_parts(dataclasses.replace(config, micro_batch=2048), 1, built)
    assert larger["training pass"] > 1.5 * parts["training pass"]
    long = dataclasses.replace(config, micro_batch=256, val_batch=65_536, val_tokens=65_536)
    assert "training pass" not in memory_parts(long, 1, built)
    assert memory_parts(config, 2, built)["training pass"] == pytest.approx(parts["training pass"], rel=1e-3)
    assert memory_parts(config, 8, built)["training pass"] < parts["training pass"]  # and here a single row


def test_a_training_pass_counts_what_the_optimizers_keep_and_the_gradients_beside_it():
    config = preset("short", **SMALL)
    stepping = memory_parts(config, 1, built)["training pass"]
    still = memory_parts(config, 1, lambda config: built(config)._replace(step=lambda: None))["training pass"]
    directions = sum(w.numel() for w in built(config).weights if w.ndim == 2 and w.shape[1] == 4 * config.dim) * 2
    assert stepping - still >= directions


@pytest.mark.parametrize("track", ["short", "steps"])
def test_each_smaller_way_needs_no_more_than_the_one_before_and_less_than_what_was_asked_for(track):
    changes = SMALL if track == "short" else {
        "dim": 128, "head_dim": 64, "vocab_size": 1000, "bos": 999, "layers": "tiny", "batch_tokens": 8192,
        "micro_batch": 4096, "val_batch": 4096, "val_tokens": 8192}  # fmt: skip
    config = preset(track, **changes)
    build = partial(built, head="plain" if config.biases else "chunked")

    def needed(changes):
        return sum(memory_parts(dataclasses.replace(config, **changes), 1, build).values())

    ways = list(smaller(config))
    assert ways[-1] == {"recompute": True, "micro_batch": config.sequence, "val_batch": config.sequence}
    assert {"recompute": True} in ways
    asked, totals = needed({}), [needed(changes) for changes in ways]
    assert all(total < asked for total in totals)
    for recompute in (False, True):
        falling = [total for way, total in zip(ways, totals, strict=True) if way.get("recompute", False) == recompute]
        assert falling == sorted(falling, reverse=True)


def test_the_plans_of_the_large_tracks_fit_the_cards_that_the_page_names():
    most = {gb: 0.9 * (gb - 0.4) for gb in (8, 16, 24)}  # GiB of what such a card has free

    def gib(config, head="chunked", dtype=torch.bfloat16):
        return sum(memory_parts(config, 1, partial(built, head=head, dtype=dtype)).values()) / 2**30

    small = {"recompute": True, "val_batch": 65_536}
    assert gib(preset("short")) < most[24]
    assert gib(preset("short", recompute=True)) < most[16]
    assert gib(preset("short", **small)) < most[8]
    assert gib(preset("short", **small), dtype=torch.float32) < most[16]  # a card without bf16
    assert gib(preset("steps", micro_batch=4096, val_batch=4096), "plain") < most[16]


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_the_meta_device_foretells_what_a_gpu_allocates(recompute):
    planned = peak_bytes(passes(META, recompute))
    passes("cuda", recompute)()  # the matrix library's workspaces, one a thread, stay
    function = passes("cuda", recompute)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    assert planned * 0.99 <= torch.cuda.max_memory_allocated() - before <= planned * 1.01
