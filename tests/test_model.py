"""The model against slow twins written from the recipes alone, and the properties that any run relies on."""

import contextlib
import math
from collections.abc import Iterator
from itertools import cycle, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from data.loader import Batch, Data
from kernels.attention import PortableAttention
from runtime.machine import Machine
from train_gpt import (
    GPT,
    RECIPES,
    TRACKS,
    Config,
    Trainer,
    initial_scalars,
    make_optimizers,
    preset,
    rotary_at,
)

CPU = torch.device("cpu")
MACHINE = Machine(CPU, 0, 1)
EVERY_RECIPE = [(track, "record42") for track in TRACKS]
EVERY_RECIPE += [(track, recipe) for track, recipes in RECIPES.items() for recipe in recipes]

SMALL = {
    "dim": 24, "head_dim": 8, "vocab_size": 100, "bos": 99, "window_block": 8, "sequence": 70, "batch_tokens": 280,
    "micro_batch": 280, "val_sequence": 70, "val_tokens": 70, "val_batch": 70,
}  # fmt: skip


def small(track="short", recipe="record42", **changes):
    return Config(**preset({"track": track, "recipe": recipe}) | {"recipe": recipe} | SMALL | changes)


@contextlib.contextmanager
def float64_throughout() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def build(config, dtype=torch.float32):
    """A model with random weights, none of them zero; in float64 altogether if that is its dtype."""
    with float64_throughout() if dtype == torch.float64 else contextlib.nullcontext():
        model = GPT(config, dtype, CPU, PortableAttention())
    with float64_throughout() if dtype == torch.float64 else contextlib.nullcontext():
        model.set_rotary(*rotary_at(config, 0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 1.0 if parameter.ndim < 2 or "embed" in name else parameter.size(0) ** -0.5
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(spread * noise + (1.0 if name.endswith("gain") else 0.0))
    return model


def windows(short, long):
    return {"short": PortableAttention().window(short), "long": PortableAttention().window(long)}


WINDOWS = windows(8, 24)


def batch(rows=2, sequence=70, cuts=((5, 9, 40), (33,)), vocab=100):
    """Random tokens; `cuts` are the document starts inside each row."""
    tokens = torch.randint(vocab, (rows, sequence + 1), generator=torch.Generator().manual_seed(2))
    starts = [row * sequence + start for row in range(rows) for start in (0, *cuts[row % len(cuts)])]
    cu_seqlens = torch.tensor(starts + [rows * sequence] * 2, dtype=torch.int32)
    return Batch(tokens[:, :-1].int().contiguous(), tokens[:, 1:].contiguous(), cu_seqlens)


def loss_of(model, given, windows=WINDOWS):
    return model(given.inputs, given.targets, given.cu_seqlens, windows, given.inputs.size(1))


def gradients(model, given, windows=WINDOWS):
    model.zero_grad()
    loss = loss_of(model, given, windows)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


# ----
# Twins: the published recipes with plain loops, in float64. Slots are numbered 0..11 as in record 42; slot 0 is empty.


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def turned(x_THD, frequencies):
    """Rotary embedding as a product of complex numbers: the halves of a head are real and imaginary parts."""
    a, b = x_THD.tensor_split(2, dim=-1)
    angle = torch.outer(torch.arange(len(x_THD), dtype=x_THD.dtype), torch.tensor(frequencies, dtype=x_THD.dtype))
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), -angle).unsqueeze(1)
    return torch.cat([z.real, z.imag], dim=-1)


def attended(q_THD, k_THD, v_THD, starts, window, scale):
    outputs = []
    for t in range(len(q_THD)):
        first = max(starts[t], t - window)
        weight = torch.exp(torch.einsum("hd,shd->sh", q_THD[t], k_THD[first : t + 1]) * scale)
        outputs.append(torch.einsum("sh,shd->hd", weight / weight.sum(0), v_THD[first : t + 1]))
    return torch.stack(outputs)


def frequencies_of(head_dim):
    turning = head_dim // 4
    return [(1 / 1024) ** (j / (turning - 1)) for j in range(turning)] + [0.0] * turning


def extended(frequencies, scale, old, new, block):
    """YaRN as the recipe states it, for a window that grows from `old` to `new` blocks."""
    result = []
    for f in frequencies:
        w = min(max((block * old * f / (2 * math.pi) - 1) / 31, 0), 1)
        result.append(f * (old / new + w * (1 - old / new)))
    return result, scale * (1 + 0.2 * math.log(new / old))


def cross_entropy(logits, targets):
    return sum(torch.log(torch.exp(row).sum()) - row[target] for row, target in zip(logits, targets, strict=True))


VALUE_TABLE = {1: 1, 2: 2, 9: 0, 10: 1, 11: 2}
LONG_SLOTS = (4, 11)


def scalars_of(model, p):
    return dict(zip(model.scalar_init, p["scalars"], strict=True))


def record42_loss(p, s, tokens, targets, starts, short, long, frequencies, scale, head_dim):
    """One row of record 42. p: parameters by name, block i - 1 for slot i; s: scalars by name."""
    e = p["embed"][tokens]
    gate = sigmoid(e[1:, :12] @ p["smear_gate"][0])
    e = torch.cat([e[:1], e[1:] + s["smear"] * gate.unsqueeze(1) * e[:-1]])
    x = x0 = rms(e)
    tables = [p[f"value_embeds.{k}"][tokens] for k in range(3)]
    stack = []
    for i in range(1, 12):
        block = f"blocks.{i - 1}."
        if 6 <= i <= 10:
            x = x + sigmoid(s[f"skip{i - 1}"]) * stack.pop()
        x = s[f"x{i - 1}"] * x + s[f"x0_{i - 1}"] * x0
        if i != 7:
            u, dim = rms(x), x.size(1)
            w_q, w_k, w_v, w_o = p[block + "attention.qkvo"].reshape(4, dim, dim)
            q, k, v = ((u @ w.T).reshape(len(u), -1, head_dim) for w in (w_q, w_k, w_v))
            q, k = rms(q), rms(k)
            v = s[f"value{i - 1}"] * v
            if i in VALUE_TABLE:
                v = v + s[f"value_embed{i - 1}"] * tables[VALUE_TABLE[i]].reshape(v.shape)
            window = long if i in LONG_SLOTS else short
            y = attended(turned(q, frequencies), turned(k, frequencies), v, starts, window, scale)
            y = y * sigmoid(u[:, :12] @ p[block + "attention.gate"].T).unsqueeze(-1)
            x = x + y.reshape(len(u), dim) @ w_o.T
        x = x + (rms(x) @ p[block + "mlp.up"]).clamp(min=0) ** 2 @ p[block + "mlp.down"].T
        if i <= 5:
            stack.append(x)
        if i == 8:
            x_back = x
    x = rms(x - s["backout"] * x_back)
    return cross_entropy(30 * sigmoid(x @ p["lm_head"].T / 7.5), targets)


def steps_loss(p, tokens, targets, head_dim, layers=12):
    """One dense row of the fixed architecture of the `steps` track."""
    x = rms(p["embed"][tokens]) * p["embed_gain"]
    everything, row_start = len(x), [0] * len(x)
    for i in range(layers):
        block, dim = f"blocks.{i}.", x.size(1)
        u = rms(x) * p[block + "attention_gain"]
        weights = p[block + "attention.qkvo"].reshape(4, dim, dim)
        q, k, v, o = ((w, b) for w, b in zip(weights, p[block + "attention.bias"].reshape(4, dim), strict=True))
        q, k, v = ((u @ w.T + b).reshape(len(u), -1, head_dim) for w, b in (q, k, v))
        q, k = (turned(rms(z), frequencies_of(head_dim)) for z in (q, k))
        y = attended(q, k, v, row_start, everything, 0.12)
        x = x + y.reshape(len(u), dim) @ o[0].T + o[1]
        u = rms(x) * p[block + "mlp_gain"]
        hidden = (u @ p[block + "mlp.up"] + p[block + "mlp.up_bias"]).clamp(min=0) ** 2
        x = x + hidden @ p[block + "mlp.down"].T + p[block + "mlp.down_bias"]
    z = (rms(x) * p["head_gain"]) @ p["lm_head"].T + p["lm_head_bias"]
    return cross_entropy(15 * z / torch.sqrt(z**2 + 225), targets)


def assert_same_loss_and_gradients(model, given, windows, row_loss):
    """`row_loss(parameters, tokens, targets, starts of their documents)` is the twin's loss of one row."""
    p = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    cuts = set(given.cu_seqlens.tolist())
    expected = torch.zeros((), dtype=torch.float64)
    for row, (tokens, targets) in enumerate(zip(given.inputs, given.targets, strict=True)):
        starts = [0]
        for t in range(1, len(tokens)):
            starts.append(t if row * len(tokens) + t in cuts else starts[-1])
        expected = expected + row_loss(p, tokens.long(), targets, starts)
    wanted = dict(zip(p, torch.autograd.grad(expected, list(p.values())), strict=True))

    loss, found = gradients(model, given, windows)
    # Logits are taken in fp32, whatever the precision of the model: hence not 1e-12.
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    for name, gradient in wanted.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < 1e-6, f"{name}: relative error of the gradient {error:.2g}"


@pytest.mark.parametrize("windows_so_far", [(3,), (3, 7), (3, 7, 11, 13)], ids=str)
def test_record_42_has_the_loss_and_the_gradients_of_its_slow_twin(windows_so_far):
    model = build(small(), torch.float64)
    step = train_gpt.first_step(model.config, len(windows_so_far) - 1)
    with float64_throughout():
        model.set_rotary(*rotary_at(model.config, step))
    frequencies, scale = frequencies_of(8), 0.1
    for old, new in pairwise(windows_so_far):
        frequencies, scale = extended(frequencies, scale, old, new, block=8)

    def row_loss(p, *row):
        return record42_loss(p, scalars_of(model, p), *row, 8, 24, frequencies, scale, head_dim=8)

    assert_same_loss_and_gradients(model, batch(), WINDOWS, row_loss)


def test_the_steps_track_has_the_loss_and_the_gradients_of_its_slow_twin():
    model = build(small("steps", window_block=0), torch.float64)
    unwindowed = windows(**train_gpt.windows_at(model.config, 0))

    def row_loss(p, tokens, targets, starts):
        return steps_loss(p, tokens, targets, head_dim=8)

    assert_same_loss_and_gradients(model, batch(rows=3, cuts=((),)), unwindowed, row_loss)


# ----
# Size


def meta(track):
    """The model of a track in its real size without its memory; short rows, since only rotary tables depend on them."""
    config = Config(**preset({"track": track}) | {"sequence": 1024, "val_sequence": 1024})
    return GPT(config, torch.bfloat16, torch.device("meta"), PortableAttention())


def test_record_42_has_its_published_number_of_parameters():
    """Less the scalars that the original has and never uses, and those that pad them to a multiple of 8 ranks."""
    model = meta("short")
    used = 5 + 2 * 11 + 10 + 5 + 2  # skips; x, x0 of 11 layers; values of 10; value embeds of 5; smear and backout
    assert sum(p.numel() for p in model.parameters()) == 268_665_628 - 64 + used
    assert len(initial_scalars(model.config)) == used


def test_record_42_stores_matrices_in_fp32_and_tables_and_gates_in_bf16():
    for name, parameter in meta("short").named_parameters():
        hidden = name.endswith(("qkvo", "up", "down"))
        assert parameter.dtype == (torch.float32 if hidden or name == "scalars" else torch.bfloat16), name
        assert not hidden or parameter.shape == (768, 3072), name


def test_the_steps_track_has_the_number_of_parameters_of_its_fixed_architecture():
    dim, vocab = 768, 50_304
    block = 4 * (dim * dim + dim) + (dim * 4 * dim + 4 * dim) + (4 * dim * dim + dim) + 2 * dim
    expected = vocab * dim + 12 * block + (dim * vocab + vocab) + 2 * dim
    assert sum(p.numel() for p in meta("steps").parameters()) == expected


@pytest.mark.parametrize("track", ["short", "steps"])
def test_flops_per_token_are_those_of_the_matrix_products(track):
    config = small(track)
    model, given = build(config), batch()
    with FlopCounterMode(display=False) as counter:
        loss_of(model, given).backward()
    rows, tokens = given.inputs.size(0), given.inputs.numel()
    gated = sum(layer.attention for layer in model.table) * config.dim // config.head_dim * tokens
    gates = 6 * 12 * (config.attention_gates * gated + config.smear * (tokens - rows))
    assert counter.get_total_flops() == tokens * model.flops_per_token() + gates


# ----
# Initialization


@pytest.mark.parametrize(("track", "recipe"), EVERY_RECIPE)
def test_every_parameter_is_initialized(track, recipe):
    model = GPT(small(track, recipe), torch.float32, CPU, PortableAttention())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    model.initialize(0)
    assert [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()] == []


def test_a_parameter_without_a_rule_is_an_error_that_names_it():
    model = GPT(small(), torch.float32, CPU, PortableAttention())
    model.newcomer = torch.nn.Parameter(torch.empty(1))
    with pytest.raises(RuntimeError, match="newcomer has no rule"):
        model.initialize(0)


def test_record_42_starts_from_its_published_distributions():
    dim = 96
    model = GPT(small(dim=dim, head_dim=16), torch.float32, CPU, PortableAttention())
    model.initialize(0)
    p = dict(model.named_parameters())
    for name, parameter in p.items():
        if name.endswith(("down", "gate", "lm_head")):
            assert not parameter.any(), name
        elif "embed" in name:
            assert parameter.std().item() == pytest.approx(1, abs=0.03), name
    q, k, v, o = p["blocks.0.attention.qkvo"].reshape(4, dim, dim)
    assert not o.any()
    for hidden in (q, k, v, p["blocks.0.mlp.up"]):
        bound = 3**0.5 * 0.5 / dim**0.5
        assert hidden.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert hidden.std().item() == pytest.approx(0.5 / dim**0.5, rel=0.03)
    scalars = dict(zip(model.scalar_init, p["scalars"].tolist(), strict=True))
    assert {scalars[f"skip{i}"] for i in (5, 6, 7, 8, 9)} == {-1.5}
    for i, layer in enumerate(model.table):
        assert (scalars[f"x{i}"], scalars[f"x0_{i}"]) == (1, 0)
        assert not layer.attention or scalars[f"value{i}"] == 0.5
        assert layer.value_embed is None or scalars[f"value_embed{i}"] == 0.5
    assert (scalars["smear"], scalars["backout"]) == (0, 0.5)


def test_the_steps_track_starts_from_its_published_distributions():
    dim = 96
    model = GPT(small("steps", dim=dim, head_dim=16), torch.float32, CPU, PortableAttention())
    model.initialize(0)
    p = dict(model.named_parameters())
    for name, parameter in p.items():
        if name.endswith("gain"):
            assert (parameter == 1).all(), name
        if name.endswith(("bias", "down", "lm_head")):
            assert not parameter.any(), name
    q, k, v, o = p["blocks.3.attention.qkvo"].reshape(4, dim, dim)
    assert not o.any()
    for hidden in (q, k, v, p["blocks.3.mlp.up"]):
        assert hidden.std().item() == pytest.approx((0.33 / dim) ** 0.5, rel=0.03)


def test_a_seed_gives_the_same_weights_again_and_another_seed_others():
    models = [GPT(small(), dtype, CPU, PortableAttention()) for dtype in (torch.float32, torch.float32, torch.bfloat16)]
    for model in models:
        model.initialize(3)
    first, again, rounded = (dict(model.named_parameters()) for model in models)
    for name in first:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name].to(rounded[name].dtype), rounded[name]), "the same, but for its dtype"
    models[1].initialize(4)
    random = [name for name in first if name.endswith(("embed", "qkvo", "up")) or name.startswith("value_embeds")]
    assert not any(torch.equal(first[name], again[name]) for name in random)
    random_state = torch.get_rng_state()
    models[1].initialize(5)
    assert torch.equal(torch.get_rng_state(), random_state), "the global generator is left alone"


# ----
# What may depend on what


def stream(model, given, tokens):
    return model.hidden(tokens, given.cu_seqlens, WINDOWS, tokens.size(1))


def changed_at(tokens, position):
    other = tokens.clone()
    other[0, position] = (other[0, position] + 1) % 100
    return other


@pytest.mark.parametrize("position", [1, 5, 12, 40, 69])
def test_a_changed_token_leaves_all_earlier_outputs_alone(position):
    model, given = build(small()), batch()
    before, after = stream(model, given, given.inputs), stream(model, given, changed_at(given.inputs, position))
    assert torch.equal(before[0, :position], after[0, :position])
    assert torch.equal(before[1], after[1]), "the other row"
    assert not torch.equal(before[0, position], after[0, position])


@pytest.mark.parametrize("smear", [True, False])
def test_an_earlier_document_reaches_a_later_one_only_by_the_smear_of_its_last_token(smear):
    """Record 42 does not mask the smear at a document's start; attention passes on what the first token received."""
    model, given = build(small(smear=smear)), batch()  # the second document is tokens 5 to 8
    before = stream(model, given, given.inputs)
    for position in (0, 3):
        after = stream(model, given, changed_at(given.inputs, position))
        assert torch.equal(before[0, 5:], after[0, 5:])
        assert not torch.equal(before[0, 4], after[0, 4])
    after = stream(model, given, changed_at(given.inputs, 4))
    reached = (before[0] != after[0]).any(-1).nonzero().flatten().tolist()
    assert reached == ([4, 5, 6, 7, 8] if smear else [4])


def test_a_token_behind_all_windows_is_out_of_reach():
    model, given = build(small("tiny", smear=False), torch.float64), batch(cuts=((),))
    near = windows(1, 1)
    before, after = (
        model.hidden(tokens, given.cu_seqlens, near, 70) for tokens in (given.inputs, changed_at(given.inputs, 0))
    )
    attentions = sum(layer.attention for layer in model.table)
    assert torch.equal(before[0, attentions + 1 :], after[0, attentions + 1 :])
    assert not torch.equal(before[0, attentions], after[0, attentions])


PARTS = {"sequence": 1200, "val_sequence": 1200, "batch_tokens": 1200, "micro_batch": 1200, "val_tokens": 1200,
         "val_batch": 1200}  # fmt: skip


@pytest.mark.parametrize("cuts", [(), (3, 190, 199, 200, 201, 700, 1100)], ids=["one document", "documents"])
@pytest.mark.parametrize("tokens", [70, 200, 430, 1199, 1200])
def test_a_row_in_parts_has_the_loss_of_the_whole_row_and_of_no_fewer_tokens_before_them(tokens, cuts):
    model, row = build(small("tiny", **PARTS), torch.float64), batch(1, 1200, (cuts,))
    reach = train_gpt.reach(model.config)
    assert 1 + 2 * (20 + 6) * 8 <= reach < 1 + 2 * (20 + 6) * 8 + 128
    last = windows(6 * 8, 20 * 8)

    def loss(reach):
        parts = Data(SimpleNamespace(), [row], None, 70, 70, 70).in_parts(tokens, reach).validation
        assert all(part.inputs.size(1) <= tokens + reach for part in parts)
        assert torch.equal(torch.cat([part.targets for part in parts], dim=1), row.targets)
        return sum(loss_of(model, part, last) for part in parts).double()

    torch.testing.assert_close(loss(reach), loss_of(model, row, last).double(), rtol=1e-7, atol=0)
    if tokens < 1199 and not cuts:
        assert abs(loss(32) - loss(reach)) > 1e-5 * loss(reach)


def test_the_causality_check_passes_this_model_and_catches_one_that_looks_ahead():
    model, given = build(small()), batch()
    data = SimpleNamespace(train=cycle([[given]]))
    trainer = SimpleNamespace(
        config=model.config, machine=MACHINE, model=model, data=data, windows=WINDOWS,
        enter=lambda step: None,
    )  # fmt: skip
    assert train_gpt.sees_no_future(trainer)
    trainer.model = SimpleNamespace(
        hidden=lambda tokens, *_: tokens.float().flip(1),
        initialize=lambda seed: None,
        parameters=list,
    )
    assert not train_gpt.sees_no_future(trainer)


def test_rows_taken_together_give_the_sum_of_rows_taken_alone():
    model, given = build(small(), torch.float64), batch()
    together, summed = gradients(model, given)
    summed = {name: gradient.clone() for name, gradient in summed.items()}
    alone = [gradients(model, row) for row in rows_of(given)]
    torch.testing.assert_close(together, sum(loss for loss, _ in alone), rtol=1e-6, atol=0)
    for name, gradient in summed.items():
        torch.testing.assert_close(gradient, sum(grads[name] for _, grads in alone), rtol=1e-5, atol=1e-6)


def with_head(head, dtype=torch.float32, **changes):
    model = build(small(**changes), dtype)
    model.head = head
    return model


@pytest.mark.parametrize(
    ("head", "recompute", "tolerance"), [("chunked", False, 1e-5), ("plain", True, 0.0), ("chunked", True, 1e-5)]
)
def test_chunks_and_recomputation_change_neither_loss_nor_gradients(head, recompute, tolerance):
    found, expected = gradients(with_head(head, recompute=recompute), batch()), gradients(with_head("plain"), batch())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_fp8_is_used_in_training_and_not_in_validation():
    models = [with_head(head, torch.bfloat16) for head in ("fp8", "chunked")]
    (trained, grads), (loss, expected) = (gradients(model, batch()) for model in models)
    assert trained == pytest.approx(loss.item(), rel=1e-2)
    difference = (grads["lm_head"] - expected["lm_head"]).norm() / expected["lm_head"].norm()
    assert 1e-3 < difference < 0.2
    with torch.no_grad():
        assert torch.equal(*(loss_of(model, batch()) for model in models))


# ----
# Pieces on and off

GONE = {  # what a piece brings: names of parameters or scalars
    "value_embeds": "value_embed", "smear": "smear", "skips": "skip", "backout": "backout", "x0_mixing": "x0_",
    "attention_gates": "attention.gate",
}  # fmt: skip


@pytest.mark.parametrize("changes", [
    *({piece: False} for piece in GONE), dict.fromkeys(GONE, False), {"biases": True, "softcap": "rsqrt"},
    {"layers": "medium"}, {"layers": "tiny"}, {"optimizer": "muon"}, {"optimizer": "adam"},
], ids=str)  # fmt: skip
def test_a_model_with_pieces_off_or_exchanged_trains(changes):
    config = small(**changes)
    model, given = build(config), batch()
    brought = [*(name for name, _ in model.named_parameters()), *initial_scalars(config)]
    for piece, name in GONE.items():
        if changes.get(piece) is False and name:
            assert not [each for each in brought if name in each]
    first, grads = gradients(model, given)
    assert [name for name, gradient in grads.items() if gradient is None or not gradient.isfinite().all()] == []
    optimizers, _ = make_optimizers(config, model, MACHINE)
    for _ in range(3):
        for optimizer in optimizers.values():
            optimizer.step()
        last, _ = gradients(model, given)
    assert last < first


@pytest.mark.parametrize(("track", "recipe"), EVERY_RECIPE)
def test_every_parameter_has_one_optimizer(track, recipe):
    config = small(track, recipe)
    model = GPT(config, torch.float32, CPU, PortableAttention())
    optimizers, _ = make_optimizers(config, model, MACHINE)
    taken = [p for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, taken)) == sorted(map(id, model.parameters()))


def test_one_compiled_graph_serves_all_windows_and_the_rotary_tables_that_go_with_them():
    model, given = build(small("tiny")), batch()
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    for stage, new in enumerate((3, 7)):
        model.set_rotary(*rotary_at(model.config, train_gpt.first_step(model.config, stage)))
        wide = windows(8 * (new // 2), 8 * new)
        eager, grads = gradients(model, given, wide)
        grads = {name: gradient.clone() for name, gradient in grads.items()}
        model.zero_grad()
        loss = loss_of(compiled, given, wide)
        loss.backward()
        torch.testing.assert_close(loss.detach(), eager, rtol=1e-6, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


# ----
# Micro-batches: gradients are summed over them, and divided once


def rows_of(given):
    """The rows of a batch as batches of one."""
    sequence, result = given.inputs.size(1), []
    for row, (tokens, targets) in enumerate(zip(given.inputs, given.targets, strict=True)):
        ends = (given.cu_seqlens - row * sequence).clamp(0, sequence)
        cuts = torch.unique(ends)
        result.append(Batch(tokens[None], targets[None], cuts))
    return result


def step_gradients(model, micro_batches, divide_loss_by=1):
    """Of `Trainer.gradients`, the trainer's own, in float64."""
    model.zero_grad()
    trainer = object.__new__(Trainer)
    trainer.config, trainer.machine, trainer.model, trainer.stage = model.config, MACHINE, model, 0
    trainer.data = SimpleNamespace(
        train=iter([micro_batches]), longest=model.config.max_document
    )
    trainer.loss = lambda *arguments: model(*arguments) / divide_loss_by
    loss = trainer.gradients(0, torch.zeros(0))[0]
    return loss, {name: p.grad.double() for name, p in model.named_parameters()}


def relative_error(found, truth):
    """Mean over parameters."""
    return sum(((found[n] - truth[n]).norm() / truth[n].norm()).item() for n in truth) / len(truth)


def test_four_rows_at_once_and_one_by_one_give_the_same_step():
    model, given = build(small()), batch(rows=4)
    at_once, one_by_one = (step_gradients(model, batches) for batches in ([given], rows_of(given)))
    torch.testing.assert_close(at_once[0], one_by_one[0], rtol=1e-6, atol=0)
    assert relative_error(one_by_one[1], at_once[1]) < 2e-6


def test_dividing_the_loss_by_a_power_of_two_changes_no_bit_of_bf16_gradients():
    """bf16 has the exponents of fp32, so that nothing underflows: 8 micro-batches lose nothing either way."""
    model, given = build(small(), torch.bfloat16), batch(rows=8)
    _, summed = step_gradients(model, rows_of(given))
    _, divided = step_gradients(model, rows_of(given), divide_loss_by=8)
    assert all(torch.equal(summed[name] / 8, divided[name]) for name in summed)


@pytest.mark.parametrize("count", [3, 7])
def test_dividing_the_loss_by_another_number_loses_what_dividing_the_sum_keeps(count):
    """Summed first, bf16 gradients are the micro-batches' own but for the rounding of their sum. A divided loss rounds
    the whole backward pass anew, several times as far from them; from an fp32 model both are equally far, so that what
    is lost is not accuracy as such but agreement between different numbers of micro-batches.
    """
    model, rows = build(small(), torch.bfloat16), rows_of(batch(rows=count))
    own = [step_gradients(model, [row])[1] for row in rows]
    mean = {name: sum(gradient[name] for gradient in own) / count for name in own[0]}
    _, summed = step_gradients(model, rows)
    once = {name: gradient / count for name, gradient in summed.items()}
    _, each = step_gradients(model, rows, divide_loss_by=count)
    assert relative_error(each, mean) > 2 * relative_error(once, mean)

    exact = build(small(), torch.float32)
    exact.load_state_dict(model.state_dict())
    _, total = step_gradients(exact, rows)
    truth = {name: gradient / count for name, gradient in total.items()}
    assert relative_error(each, truth) == pytest.approx(relative_error(once, truth), rel=0.2)
