"""What later records added to record 42: a slow twin in float64, and the constants of record 89."""

from functools import reduce
from itertools import pairwise
from operator import mul, xor

import pytest
import test_model
import torch
import torch.nn.functional as F
from small_model import CPU, MACHINE, make_model, named_scalars, small
from test_model import (
    WINDOWS,
    attended,
    build,
    cross_entropy,
    frequencies_of,
    loss_of,
    rms,
    turned,
)
from torch import sigmoid

from train_gpt import make_optimizers, schedule, set_rates, stretches

HEAD_DIM = 8
VALUE_TABLES = {1: 0, 2: 1, 8: 2, 9: 3, 10: 4}
LONG, PAIRED, LATE = (3, 10), (0, 2, 5, 9), (8, 9, 10)


def modern(**changes):
    """The recipe in a small size with an even number of heads."""
    return small("short", "record89", bigram_rows=2.0, ngrams=4, **changes)


def heads(x_TC):
    return x_TC.reshape(len(x_TC), -1, HEAD_DIM)


def offset(k_THD, starts):
    """Record 49: keys whose channels that do not turn are those of the token before."""
    quarter = k_THD.size(-1) // 4
    keys = []
    for t, key in enumerate(k_THD):
        before = key if starts[t] == t else k_THD[t - 1]
        parts = zip(key.split(quarter, -1), before.split(quarter, -1), strict=True)
        keys.append(torch.cat([(own, other)[i % 2] for i, (own, other) in enumerate(parts)], -1))
    return torch.stack(keys)


def in_pairs(q, k, v, starts, window, scale):
    """Attention of heads j and j + H / 2 as one head whose rows alternate between them."""
    half, outputs = q.size(1) // 2, {}
    doubled = [2 * start for start in starts for _ in range(2)]
    for j in range(half):
        rows = []
        for z in (q, k, v):
            alternating = [z[t, j + half * odd] for t in range(len(z)) for odd in range(2)]
            rows.append(torch.stack(alternating)[:, None])
        q_j, k_j = (turned(z, frequencies_of(HEAD_DIM)) for z in rows[:2])
        y = attended(q_j, k_j, rows[2], doubled, window, scale)[:, 0]
        outputs[j], outputs[j + half] = y[0::2], y[1::2]
    return torch.stack([outputs[head] for head in range(2 * half)], dim=1)


def hashed(tokens):
    """Rows of the n-gram table, by its size and the length of n-grams, and of the signs."""
    tokens = tokens.tolist()

    def ngrams(rows, length):
        return [rows - 1] * (length - 1) + [
            reduce(xor, map(mul, (36313, 27191, 51787, 44221), reversed(run))) % (rows - 1)
            for run in zip(*(tokens[start:] for start in range(length)), strict=False)
        ]

    return ngrams, [0] + [(a ^ b) % 8192 for a, b in pairwise(tokens)]


def shares_of(p, which, x, count):
    """Record 81: numbers (T, 1) from a small MLP, a tenth of its output."""
    weight, out, start = (p[f"blocks.10.mudd_{name}"][which] for name in ("in", "out", "start"))
    h = F.gelu(x @ weight.T)
    return [(0.1 * (h @ out[j] + start[j])).unsqueeze(1) for j in range(count)]


def record89_loss(p, s, signs, weights, tokens, targets, starts):
    """One row. p: parameters by name; s: scalars by name; weights: of this token and later ones."""
    short, long, scale = 8, 24, 0.1
    e = p["embed"][tokens]
    gate = sigmoid(e[1:, :12] @ p["smear_gate"][0])
    x = x0 = first = rms(torch.cat([e[:1], e[1:] + s["smear"] * gate.unsqueeze(1) * e[:-1]]))
    ngrams, sign_rows = hashed(tokens)
    pairs = p["bigram"][ngrams(len(p["bigram"]), 2)] * signs[sign_rows]
    for length in (3, 4):
        pairs = pairs + p["bigram"][ngrams(len(p["bigram"]), length)]
    out = {}
    values = [p[f"value_embeds.{table}"][tokens] for table in range(5)]
    for i in range(11):
        block = f"blocks.{i}."
        if i == 6:
            x = x + sigmoid(s["skip6"]) * out[3]
        if i < 10:
            x = s[f"x{i}"] * x + s[f"x0_{i}"] * x0 + s[f"bigram{i}"] * pairs
        else:  # record 81: each token weighs what the last layer reads and adds
            mixed = shares_of(p, 0, x, 14)
            earlier = first, out[7], x
            added = sum(map(mul, mixed[:3], earlier))
            stream = x + sum(map(mul, mixed[3:6], earlier))
        if i == 0:
            first = x
        if i != 6:
            u = rms(out[7] if i in LATE else x)
            w_q, w_k, w_v, w_o = p[block + "attention.qkvo"].reshape(4, 32, 32)
            q, k, v = rms(heads(u @ w_q.T)), rms(heads(u @ w_k.T)), heads(u @ w_v.T)
            v = s[f"value{i}"] * v
            if i == 10:
                lanes = torch.cat([mixed[6].expand(-1, 16), mixed[7].expand(-1, 16)], dim=1)
                v = v + heads(lanes * values[4] + added)
            elif i in VALUE_TABLES:
                value = p[f"value_embeds.{VALUE_TABLES[i]}"][tokens]
                read = torch.cat([u[:, :6], value[:, :6]], dim=1)
                share = 2 * sigmoid(read @ p[block + "attention.value_gate"].T)
                v = v + s[f"value_embed{i}"] * share.unsqueeze(-1) * heads(value)
            if i in PAIRED:
                y = in_pairs(q, k, v, starts, short, scale)
            else:
                q, k = (turned(z, frequencies_of(HEAD_DIM)) for z in (q, k))
                k = offset(k, starts) if i in LONG else k
                y = attended(q, k, v, starts, long if i in LONG else short, scale)
                share = torch.tanh(p[block + "attention.own_value"]) * (y * v).sum(-1, keepdim=True)
                y = y - share * v / (v**2).sum(-1, keepdim=True)
            y = y * sigmoid(u[:, :12] @ p[block + "attention.gate"].T).unsqueeze(-1)
            if i == 10:
                y = mixed[8] * stream + mixed[9] * (y.reshape(len(x), -1) @ w_o.T)
                y = y + mixed[10] * first + mixed[11] * pairs
                hidden = (rms(y) @ p[block + "mlp.up"]).clamp(min=0) ** 2
                y = mixed[12] * y + mixed[13] * (hidden @ p[block + "mlp.down"].T)
                ends = first, out[7], x, values[0], out[3]
                x = y + sum(map(mul, shares_of(p, 1, y, 5), ends))
                break
            x = x + y.reshape(len(x), -1) @ w_o.T
        x = x + (rms(x) @ p[block + "mlp.up"]).clamp(min=0) ** 2 @ p[block + "mlp.down"].T
        out[i] = x
    logits = 23 * sigmoid((rms(x) @ p["lm_head"].T + 5) / 7.5)
    total = 0.0
    for k, weight in enumerate(weights):
        total = total + weight * cross_entropy(logits[: len(targets) - k], targets[k:])
    return total


def test_the_pieces_of_later_records_have_the_loss_and_gradients_of_their_slow_twin():
    model, given = build(modern(), torch.float64), test_model.batch()
    signs, weights = model.signs.double(), torch.tensor([1.0, 0.5, 0.25])

    def row_loss(p, *row):
        scalars = named_scalars(model.config, p["scalars"])
        return record89_loss(p, scalars, signs, weights, *row)

    # Logits are float32. Some gradients of MUDD's shares are small sums of large terms: 2e-6 of the
    # sum was seen, and a wrong term changes it by more than a tenth.
    test_model.assert_same_loss_and_gradients(model, given, WINDOWS, row_loss, 2e-5, weights)
    next_token = loss_of(model, given, weights=weights)[1]
    torch.testing.assert_close(next_token, loss_of(model, given), rtol=1e-6, atol=0)


def test_while_the_head_is_tied_the_embedding_takes_its_gradient_too():
    model, given = build(modern(), torch.float64), test_model.batch()
    with torch.no_grad():
        model.lm_head.copy_(model.embed)
    loss, apart = test_model.gradients(model, given)
    model.tied = True
    model.zero_grad()
    tied = loss_of(model, given)
    tied.backward()
    torch.testing.assert_close(tied.detach(), loss)
    assert model.lm_head.grad is None
    torch.testing.assert_close(model.embed.grad, apart["embed"] + apart["lm_head"])


# ---- The constants of record 89


# Parameter: its learning rate, the share of it that decays a step, betas; at a multiplier of 1.
RATES = {
    "blocks.1.attention.qkvo": (0.023, 0.023**2 * 1.2, None),
    "blocks.1.mlp.up": (0.046, 0.023 * 0.046 * 1.2, None),
    "blocks.1.mlp.down": (0.092, 0.023 * 0.092 * 1.2, None),
    "embed": (0.008, 0.008**2 * 0.005 * 150, (0.5, 0.95)),
    "lm_head": (0.008, 0.008**2 * 0.005 * 150, (0.5, 0.95)),
    "bigram": (0.6, 0.6**2 * 0.005 * 5, (0.75, 0.95)),
    "value_embeds.4": (0.6, 0.6**2 * 0.005 * 5, (0.75, 0.95)),
    "scalars": (0.04, 0.0, (0.9, 0.99)),
    "blocks.10.mudd_in": (0.002, 0.002**2 * 0.005, (0.9, 0.99)),
    "blocks.10.mudd_out": (0.002, 0.002**2 * 0.005, (0.9, 0.99)),
    "blocks.10.mudd_start": (0.002, 0.0, (0.9, 0.99)),
    "blocks.1.attention.value_gate": (0.008, 0.008**2 * 0.005, (0.9, 0.99)),
}


def test_learning_rates_decays_and_betas_are_those_of_record_89():
    config = modern(momentum=(0.8, 0.9))
    optimizers, _ = make_optimizers(config, make_model(config, device=CPU), MACHINE)
    step = stretches(config)[1].first  # where the multiplier is 1.52
    set_rates(config, optimizers, schedule(config, step))
    found = {}
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            rate = group["lr"] * group["lr_mul"]
            decay = group["lr"] * group["weight_decay"] * group["wd_mul"]
            for name in group["param_names"]:
                found[name] = (rate, decay, group.get("betas"), group.get("momentum"))
    for name, (rate, decay, betas) in RATES.items():
        assert found[name][:2] == pytest.approx((1.52 * rate, 1.52**2 * decay)), name
        assert found[name][2:] == (betas, 0.9 if betas is None else None), name
