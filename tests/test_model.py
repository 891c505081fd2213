"""The model against its reference implementations, and what every run relies on."""

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import reference_model as reference
import torch
from small_model import (
    EVERY_RECIPE,
    MACHINE,
    SEQUENCE,
    VOCABULARY,
    configure,
    make_model,
    named_scalars,
    randomize,
    small,
)
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from data.loader import Batch, validation_batches
from data.shards import write_shard
from kernels.attention import PortableAttention
from train_gpt import make_optimizers, schedule, stretches

pytestmark = pytest.mark.core


def build(config, dtype=torch.float32, step=0):
    """A model with random weights and the rotary tables of a step."""
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)
    try:
        model = make_model(config, dtype)
        model.set_step(step)
    finally:
        torch.set_default_dtype(torch.float32)
    model.tied = False
    return randomize(model)


def windows(short, long):
    return {"short": PortableAttention().window(short), "long": PortableAttention().window(long)}


WINDOWS = windows(reference.SHORT, reference.LONG)


def batch(rows=2, sequence=SEQUENCE, cuts=((5, 9, 40), (33,))):
    """Random tokens; `cuts` are the document starts inside each row."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (rows, sequence + 1), generator=generator)
    starts = []
    for row in range(rows):
        starts += [row * sequence + start for start in (0, *cuts[row % len(cuts)])]
    cu_seqlens = torch.tensor(starts + [rows * sequence] * 2, dtype=torch.int32)
    return Batch(tokens[:, :-1].int().contiguous(), tokens[:, 1:].contiguous(), cu_seqlens)


def loss_of(model, given, windows=WINDOWS, weights=None):
    longest = given.inputs.size(1)
    model.windows = windows
    return model(given.inputs, given.targets, given.cu_seqlens, longest, weights)


def gradients(model, given, windows=WINDOWS, weights=None):
    """The loss to train on, which is the first with weights, and gradients by name."""
    model.zero_grad()
    loss = loss_of(model, given, windows, weights).flatten()[0]
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {name: gradient.clone() for name, gradient in found.items()}


# ---- The records


def rows_of(given):
    """Of each row: tokens, targets, and the start of the document of each token."""
    cuts = set(given.cu_seqlens.tolist())
    for row, (tokens, targets) in enumerate(zip(given.inputs, given.targets, strict=True)):
        starts = [0]
        for t in range(1, len(tokens)):
            starts.append(t if row * len(tokens) + t in cuts else starts[-1])
        yield tokens.long(), targets, starts


def assert_same_loss_and_gradients(
    model, reference_loss, given=None, windows=WINDOWS, tolerance=1e-6, weights=None
):
    """`reference_loss(parameters, scalars, *row)` is the loss of one row."""
    given = given or batch()
    p = {name: w.detach().clone().requires_grad_() for name, w in model.named_parameters()}
    s = named_scalars(model.config, p["scalars"]) if "scalars" in p else {}
    expected = sum(reference_loss(p, s, *row) for row in rows_of(given))
    wanted = dict(zip(p, torch.autograd.grad(expected, list(p.values())), strict=True))

    loss, found = gradients(model, given, windows, weights)
    # Logits are taken in fp32, whatever the precision of the model: hence not 1e-12.
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    for name, gradient in wanted.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < tolerance, f"{name}: relative error of the gradient {error:.2g}"


@pytest.mark.parametrize("windows_so_far", [(3,), (3, 7, 11, 13)], ids=str)
def test_record_42_has_the_loss_and_the_gradients_of_its_reference(windows_so_far):
    step = stretches(small())[len(windows_so_far) - 1].first
    frequencies, scale = reference.FREQUENCIES, reference.SCALE
    for old, new in pairwise(windows_so_far):
        frequencies, scale = reference.extended(frequencies, scale, old, new, block=8)

    def reference_loss(p, s, *row):
        return reference.record42_loss(p, s, frequencies, scale, *row)

    assert_same_loss_and_gradients(build(small(), torch.float64, step), reference_loss)


def test_the_steps_track_has_the_loss_and_the_gradients_of_its_reference():
    model = build(small("steps", window_block=0), torch.float64)
    unwindowed = windows(**schedule(model.config, 0).windows)

    def reference_loss(p, s, *row):
        return reference.steps_loss(p, *row)

    assert_same_loss_and_gradients(model, reference_loss, batch(cuts=((),)), unwindowed)


def record89():
    """The recipe in a small size with an even number of heads."""
    return build(small("short", "record89", bigram_rows=2.0, ngrams=4), torch.float64)


def test_record_89_has_the_loss_and_the_gradients_of_its_reference():
    model, weights = record89(), torch.tensor([1.0, 0.5, 0.25])

    def reference_loss(p, s, *row):
        return reference.record89_loss(p, s, model.signs.double(), weights, *row)

    # Logits are float32. Some gradients of MUDD's weights are small sums of large terms: 2e-6 of
    # the sum was seen, and a wrong term changes it by more than a tenth.
    assert_same_loss_and_gradients(model, reference_loss, tolerance=2e-5, weights=weights)
    next_token = loss_of(model, batch(), weights=weights)[1]
    torch.testing.assert_close(next_token, loss_of(model, batch()), rtol=1e-6, atol=0)


def test_while_the_head_is_tied_the_embedding_takes_its_gradient_too():
    model = record89()
    with torch.no_grad():
        model.lm_head.copy_(model.embed)
    loss, apart = gradients(model, batch())
    model.tied = True
    tied_loss, tied = gradients(model, batch())
    torch.testing.assert_close(tied_loss, loss)
    assert "lm_head" not in tied
    torch.testing.assert_close(tied["embed"], apart["embed"] + apart["lm_head"])


# ---- Size


def meta(track, recipe=None):
    """The model of a recipe in its real size, on the meta device."""
    config = configure(track, recipe, seq_len=1024, val_seq_len=1024)
    return make_model(config, torch.bfloat16, torch.device("meta"))


def test_the_tracks_have_their_published_numbers_of_parameters():
    # skips; x, x0 of 11 layers; values of 10; value embeds of 5; smear and backout
    used = 5 + 2 * 11 + 10 + 5 + 2
    # The original has 64 scalars, of which some pad them to 8 ranks.
    assert sum(p.numel() for p in meta("short").parameters()) == 268_665_628 - 64 + used
    dim, vocab = 768, 50_304
    block = 4 * (dim * dim + dim) + (dim * 4 * dim + 4 * dim) + (4 * dim * dim + dim) + 2 * dim
    steps = vocab * dim + 12 * block + (dim * vocab + vocab) + 2 * dim
    assert sum(p.numel() for p in meta("steps").parameters()) == steps
    # Embedding, head, five value tables, bigrams; ten Q, K, V, O and 11 MLPs. Gates have 0.02 %.
    record89 = vocab * dim * (2 + 5 + 15 / 2) + (10 * 4 + 11 * 8) * dim**2
    found = sum(p.numel() for p in meta("short", "record89").parameters())
    assert record89 < found < 1.0002 * record89


@pytest.mark.parametrize("track", ["short", "steps"])
def test_flops_per_token_are_those_of_the_matrix_products(track):
    config = small(track)
    model, given = build(config), batch()
    with FlopCounterMode(display=False) as counter:
        loss_of(model, given).backward()
    rows, tokens = given.inputs.size(0), given.inputs.numel()
    gated = sum(layer.attention for layer in model.layers) * config.dim // config.head_dim * tokens
    gates = 6 * 12 * (config.attention_gates * gated + config.smear * (tokens - rows))
    assert counter.get_total_flops() == tokens * model.flops_per_token() + gates


# ---- Initialization


@pytest.mark.parametrize(("track", "recipe"), EVERY_RECIPE)
def test_every_parameter_is_initialized_and_has_one_optimizer(track, recipe):
    model = make_model(small(track, recipe))
    for parameter in model.parameters():
        parameter.detach().fill_(math.nan)
    model.initialize(0)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
    optimizers, _ = make_optimizers(model.config, model, MACHINE)
    taken = []
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            taken += map(id, group["params"])
    assert sorted(taken) == sorted(map(id, model.parameters()))


def test_a_parameter_without_a_rule_is_an_error_that_names_it():
    model = make_model(small())
    model.newcomer = torch.nn.Parameter(torch.empty(1))
    with pytest.raises(RuntimeError, match="newcomer has no rule"):
        model.initialize(0)


DIM = 96  # wide enough for a standard deviation


def initialized(track):
    """Parameters by name; the four matrices of a layer's attention and its MLP's first."""
    model = make_model(small(track, dim=DIM, head_dim=16))
    model.initialize(0)
    p = dict(model.named_parameters())
    return p, [*p["blocks.3.attention.qkvo"].reshape(4, DIM, DIM), p["blocks.3.mlp.up"]]


def test_record_42_starts_from_its_published_distributions():
    p, (q, k, v, o, up) = initialized("short")
    for name, parameter in p.items():
        if name.endswith(("down", "gate", "lm_head")):
            assert not parameter.any(), name
        elif "embed" in name:
            assert parameter.std().item() == pytest.approx(1, abs=0.03), name
    assert not o.any()
    for hidden in (q, k, v, up):
        bound = 3**0.5 * 0.5 / DIM**0.5
        assert hidden.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert hidden.std().item() == pytest.approx(0.5 / DIM**0.5, rel=0.03)
    scalars = named_scalars(small(), p["scalars"].tolist())
    starts = {"smear": 0, "backout": 0.5} | {f"skip{i}": -1.5 for i in (5, 6, 7, 8, 9)}
    for i in range(11):
        starts |= {f"x{i}": 1, f"x0_{i}": 0}
        if i != 6:
            starts[f"value{i}"] = 0.5
    starts |= {f"value_embed{i}": 0.5 for i in (0, 1, 8, 9, 10)}
    assert scalars == starts


def test_the_steps_track_starts_from_its_published_distributions():
    p, (q, k, v, o, up) = initialized("steps")
    for name, parameter in p.items():
        if name.endswith("gain"):
            assert (parameter == 1).all(), name
        if name.endswith(("bias", "down", "lm_head")):
            assert not parameter.any(), name
    assert not o.any()
    for hidden in (q, k, v, up):
        assert hidden.std().item() == pytest.approx((0.33 / DIM) ** 0.5, rel=0.03)


def test_a_seed_gives_the_same_weights_again_and_another_seed_others():
    dtypes = (torch.float32, torch.float32, torch.bfloat16)
    first, again, rounded = (make_model(small(), dtype) for dtype in dtypes)
    random_state = torch.get_rng_state()
    for model in (first, again, rounded):
        model.initialize(3)
    assert torch.equal(torch.get_rng_state(), random_state), "the global generator is left alone"
    for name, weight in first.named_parameters():
        assert torch.equal(weight, again.get_parameter(name))
        other_dtype = rounded.get_parameter(name)
        assert torch.equal(weight.to(other_dtype.dtype), other_dtype)
    again.initialize(4)
    for name, weight in first.named_parameters():
        if name.endswith(("embed", "qkvo", "up")) or name.startswith("value_embeds"):
            assert not torch.equal(weight, again.get_parameter(name))


# ---- What may depend on what


@pytest.fixture
def four_layers(monkeypatch):
    """A table of two short and two long layers, and the settings of a model with it."""
    two = [train_gpt.Layer(value_embed=0), train_gpt.Layer(window="long", value_embed=1)]
    monkeypatch.setitem(train_gpt.LAYERS, "four", two * 2)
    return LONG_ROW | {"layers": "four", "key_offset": True, "bigram_rows": 5.0}


LONG_ROW = dict.fromkeys(
    ("seq_len", "val_seq_len", "batch_tokens", "micro_batch", "val_tokens", "val_batch"), 1200
)


@pytest.mark.parametrize("cuts", [(), (3, 190, 199, 200, 201, 700, 1100)], ids=len)
@pytest.mark.parametrize("tokens", [200, 1199, 1200])
def test_a_row_in_parts_has_the_loss_of_the_whole_and_of_no_fewer_tokens_before_them(
    tokens, cuts, four_layers, tmp_path
):
    model = build(small("tiny", "muon", **four_layers), torch.float64)
    stream = np.random.default_rng(0).integers(0, model.config.bos, 1201)
    stream[[0, *cuts]] = model.config.bos
    write_shard(tmp_path / "val.bin", stream)
    in_parts = partial(validation_batches, [tmp_path / "val.bin"], vars(model.config))
    (row,) = in_parts(1200)
    reach = train_gpt.receptive_field(model.config)
    last = windows(10 * 8, 20 * 8)

    def loss(reach):
        parts = in_parts(tokens, reach)
        assert all(part.inputs.size(1) <= tokens + reach for part in parts)
        assert torch.equal(torch.cat([part.targets for part in parts], dim=1), row.targets)
        return sum(loss_of(model, part, last) for part in parts).double()

    whole = loss_of(model, row, last).double()
    # The head sums in float32, also in a float64 model: twice its rounding error.
    torch.testing.assert_close(loss(reach), whole, rtol=2**-22, atol=0)
    if tokens == 200 and not cuts:
        assert abs(loss(32) - loss(reach)) > 1e-5 * loss(reach)


@pytest.mark.parametrize(("changes", "tokens"), [
    ({"smear": False, "key_offset": False, "bigram_rows": 0}, 1024),
    ({"smear": False, "key_offset": False, "bigram_rows": 1}, 1024 + 1),
    ({"val_window": 431, "key_offset": False, "bigram_rows": 1, "ngrams": 4}, 1022 + 3),
    ({"smear": True, "key_offset": False}, 1024 + 1),
    ({"smear": False, "key_offset": True, "bigram_rows": 0}, 1024 + 2),
], ids=str)  # fmt: skip
def test_the_reach_counts_the_windows_the_smear_and_each_key_offset(changes, tokens, four_layers):
    # Two short layers see 80 tokens each and two long ones 432: all together 8 * 128.
    config = small("tiny", "muon", **four_layers | {"val_window": 432} | changes)
    assert train_gpt.receptive_field(config) == math.ceil(tokens / 128) * 128


def with_head(head, dtype=torch.float32, **changes):
    model = build(small(**changes), dtype)
    model.head = head
    return model


@pytest.mark.parametrize(
    ("head", "recompute"), [("chunked", False), ("plain", True), ("chunked", True)]
)
def test_chunks_and_recomputation_change_neither_loss_nor_gradients(head, recompute):
    found = gradients(with_head(head, activation_checkpointing=recompute), batch())
    expected = gradients(with_head("plain"), batch())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_fp8_is_used_in_training_and_not_in_validation():
    models = [with_head(head, torch.bfloat16) for head in ("fp8", "chunked")]
    (trained, grads), (loss, expected) = (gradients(model, batch()) for model in models)
    assert trained == pytest.approx(loss.item(), rel=1e-2)
    difference = (grads["lm_head"] - expected["lm_head"]).norm() / expected["lm_head"].norm()
    assert 1e-3 < difference < 0.2
    with torch.no_grad():
        assert torch.equal(*(loss_of(model, batch()) for model in models))


# ---- Pieces on and off

GONE = {  # what a piece brings: names of parameters or scalars
    "smear": "smear", "x0_mixing": "x0_", "attention_gates": "attention.gate",
}  # fmt: skip


@pytest.mark.parametrize("changes", [
    *({piece: False} for piece in GONE), dict.fromkeys(GONE, False),
    {"biases": True, "softcap": "rsqrt"}, *({"layers": layers} for layers in train_gpt.LAYERS),
], ids=str)  # fmt: skip
def test_a_model_with_pieces_off_or_exchanged_has_a_gradient_for_all_that_it_has(changes):
    config = small(**changes)
    model = build(config)
    brought = " ".join([*model.state_dict(), *named_scalars(config, model.initial_values())])
    for piece, name in GONE.items():
        assert changes.get(piece, True) or name not in brought
    _, found = gradients(model, batch())
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


def test_a_cpu_trains_tiny_by_default_whatever_else_the_machine_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert train_gpt.preset({"device": "cpu"})["track"] == "tiny"
    assert train_gpt.preset({"device": "auto"})["track"] == "short"
