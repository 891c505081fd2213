"""The recipes' models again, one sequence at a time, as the records describe them: an oracle.

p: parameters by name; s: learned scalars by name; tokens and targets (T,); starts: where the
document of each token begins. Losses are summed over targets. Layers are numbered from 0.
"""

import math
from functools import partial, reduce
from itertools import pairwise
from operator import mul, xor

import torch
import torch.nn.functional as F
from torch import sigmoid

HEAD_DIM = 8
SHORT, LONG = 8, 24  # windows in tokens
SCALE = 0.1  # of queries
TURNING = HEAD_DIM // 4  # pairs of channels; as many do not turn
FREQUENCIES = [(1 / 1024) ** (j / (TURNING - 1)) for j in range(TURNING)] + [0.0] * TURNING

cross_entropy = partial(F.cross_entropy, reduction="sum")


def rms(x):
    return F.rms_norm(x, x.shape[-1:])


def heads(x_TC):
    return x_TC.reshape(len(x_TC), -1, HEAD_DIM)


def turned(x_THD, frequencies=FREQUENCIES):
    """Rotary embedding as a product of complex numbers."""
    a, b = x_THD.tensor_split(2, dim=-1)
    position = torch.arange(len(x_THD), dtype=x_THD.dtype)
    angle = torch.outer(position, torch.tensor(frequencies, dtype=x_THD.dtype))
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), -angle).unsqueeze(1)
    return torch.cat([z.real, z.imag], dim=-1)


def extended(frequencies, scale, old, new, block):
    """YaRN as the recipe states it, for a window that grows from `old` to `new` blocks."""
    result = []
    for f in frequencies:
        w = min(max((block * old * f / (2 * math.pi) - 1) / 31, 0), 1)
        result.append(f * (old / new + w * (1 - old / new)))
    return result, scale * (1 + 0.2 * math.log(new / old))


def attended(q_THD, k_THD, v_THD, starts, window, scale):
    outputs = []
    for t in range(len(q_THD)):
        first = max(starts[t], t - window)
        weight = torch.exp(torch.einsum("hd,shd->sh", q_THD[t], k_THD[first : t + 1]) * scale)
        outputs.append(torch.einsum("sh,shd->hd", weight / weight.sum(0), v_THD[first : t + 1]))
    return torch.stack(outputs)


def projected(p, block, u, biases=(0.0, 0.0, 0.0)):
    """Normed queries and keys, values, and the output's weight."""
    *weights, w_o = p[block + "attention.qkvo"].reshape(4, u.size(1), u.size(1))
    q, k, v = (heads(u @ w.T + b) for w, b in zip(weights, biases, strict=True))
    return rms(q), rms(k), v, w_o


def gates(p, block, u):
    return sigmoid(u[:, :12] @ p[block + "attention.gate"].T).unsqueeze(-1)


def mlp(p, block, u):
    return (u @ p[block + "mlp.up"]).clamp(min=0) ** 2 @ p[block + "mlp.down"].T


def smeared(p, s, tokens):
    """Normed embeddings, each with a fraction of the one before it."""
    e = p["embed"][tokens]
    gate = sigmoid(e[1:, :12] @ p["smear_gate"][0]).unsqueeze(1)
    return rms(torch.cat([e[:1], e[1:] + s["smear"] * gate * e[:-1]]))


def steps_loss(p, tokens, targets, starts):
    """The fixed architecture of the `steps` track, which masks no documents."""
    x, length = rms(p["embed"][tokens]) * p["embed_gain"], len(tokens)
    for i in range(12):
        block = f"blocks.{i}."
        *biases, b_o = p[block + "attention.bias"].reshape(4, -1)
        u = rms(x) * p[block + "attention_gain"]
        q, k, v, w_o = projected(p, block, u, biases)
        y = attended(turned(q), turned(k), v, [0] * length, length, 0.12)
        x = x + y.flatten(1) @ w_o.T + b_o
        u = rms(x) * p[block + "mlp_gain"]
        hidden = (u @ p[block + "mlp.up"] + p[block + "mlp.up_bias"]).clamp(min=0) ** 2
        x = x + hidden @ p[block + "mlp.down"].T + p[block + "mlp.down_bias"]
    z = (rms(x) * p["head_gain"]) @ p["lm_head"].T + p["lm_head_bias"]
    return cross_entropy(15 * z / torch.sqrt(z**2 + 225), targets)


def record42_loss(p, s, frequencies, scale, tokens, targets, starts):
    x = x0 = smeared(p, s, tokens)
    value_tables, out = {0: 1, 1: 2, 8: 0, 9: 1, 10: 2}, {}
    for i in range(11):
        block = f"blocks.{i}."
        if 5 <= i <= 9:
            x = x + sigmoid(s[f"skip{i}"]) * out[9 - i]
        x = s[f"x{i}"] * x + s[f"x0_{i}"] * x0
        if i != 6:
            u = rms(x)
            q, k, v, w_o = projected(p, block, u)
            v = s[f"value{i}"] * v
            if i in value_tables:
                value = p[f"value_embeds.{value_tables[i]}"][tokens]
                v = v + s[f"value_embed{i}"] * heads(value)
            q, k = turned(q, frequencies), turned(k, frequencies)
            y = attended(q, k, v, starts, LONG if i in (3, 10) else SHORT, scale)
            x = x + (y * gates(p, block, u)).flatten(1) @ w_o.T
        x = x + mlp(p, block, rms(x))
        out[i] = x
    x = rms(x - s["backout"] * out[7])
    return cross_entropy(30 * sigmoid(x @ p["lm_head"].T / 7.5), targets)


# ---- Record 89


def offset(k_THD, starts):
    """Record 49: keys whose channels that do not turn are those of the token before."""
    keys = []
    for t, key in enumerate(k_THD):
        before = key if starts[t] == t else k_THD[t - 1]
        parts = zip(key.split(TURNING, -1), before.split(TURNING, -1), strict=True)
        keys.append(torch.cat([(own, other)[i % 2] for i, (own, other) in enumerate(parts)], -1))
    return torch.stack(keys)


def in_pairs(q, k, v, starts):
    """Attention of heads j and j + H / 2 as one head whose rows alternate between them."""
    half, outputs = q.size(1) // 2, {}
    doubled = [2 * start for start in starts for _ in range(2)]
    for j in range(half):
        rows = []
        for z in (q, k, v):
            alternating = [z[t, j + half * odd] for t in range(len(z)) for odd in range(2)]
            rows.append(torch.stack(alternating)[:, None])
        y = attended(turned(rows[0]), turned(rows[1]), rows[2], doubled, SHORT, SCALE)[:, 0]
        outputs[j], outputs[j + half] = y[0::2], y[1::2]
    return torch.stack([outputs[head] for head in range(2 * half)], dim=1)


def ngram_embeddings(table, signs, tokens):
    """Of pairs, times the row of signs (8192, C) of each, of three tokens and of four."""
    tokens, last = tokens.tolist(), len(table) - 1
    total = 0.0
    for length in (2, 3, 4):
        rows = [last] * (length - 1)
        for run in zip(*(tokens[start:] for start in range(length)), strict=False):
            rows.append(reduce(xor, map(mul, (36313, 27191, 51787, 44221), reversed(run))) % last)
        found = table[rows]
        if length == 2:
            found = found * signs[[0] + [(a ^ b) % 8192 for a, b in pairwise(tokens)]]
        total = total + found
    return total


def mudd_weights(p, mlp_index, x, count):
    """Record 81: numbers (T, 1) from a small MLP, a tenth of its output."""
    names = ("mudd_in", "mudd_out", "mudd_start")
    weight, out, start = (p[f"blocks.10.{name}"][mlp_index] for name in names)
    hidden = F.gelu(x @ weight.T)
    return [(0.1 * (hidden @ out[j] + start[j])).unsqueeze(1) for j in range(count)]


def record89_loss(p, s, signs, weights, tokens, targets, starts):
    """weights: of the loss on the next token and on later ones."""
    x = x0 = first = smeared(p, s, tokens)
    pairs = ngram_embeddings(p["bigram"], signs, tokens)
    values = [p[f"value_embeds.{table}"][tokens] for table in range(5)]
    value_tables, out = {1: 0, 2: 1, 8: 2, 9: 3}, {}
    for i in range(10):
        block = f"blocks.{i}."
        if i == 6:
            x = x + sigmoid(s["skip6"]) * out[3]
        x = s[f"x{i}"] * x + s[f"x0_{i}"] * x0 + s[f"bigram{i}"] * pairs
        if i == 0:
            first = x
        if i != 6:
            u = rms(out[7] if i in (8, 9) else x)
            q, k, v, w_o = projected(p, block, u)
            v = s[f"value{i}"] * v
            if i in value_tables:
                value = values[value_tables[i]]
                read = torch.cat([u[:, :6], value[:, :6]], dim=1)
                gate = 2 * sigmoid(read @ p[block + "attention.value_gate"].T)
                v = v + s[f"value_embed{i}"] * gate.unsqueeze(-1) * heads(value)
            if i in (0, 2, 5, 9):
                y = in_pairs(q, k, v, starts)
            else:
                y = without_own_value(p, block, q, k, v, starts, i == 3)
            x = x + (y * gates(p, block, u)).flatten(1) @ w_o.T
        x = x + mlp(p, block, rms(x))
        out[i] = x
    x = last_layer(p, s, x, values, pairs, first, out, starts)
    logits = 23 * sigmoid((rms(x) @ p["lm_head"].T + 5) / 7.5)
    total = 0.0
    for k, weight in enumerate(weights):
        total = total + weight * cross_entropy(logits[: len(targets) - k], targets[k:])
    return total


def without_own_value(p, block, q, k, v, starts, long):
    """Attention less a fraction of its part along the token's own value (record 82)."""
    q, k = turned(q), turned(k)
    k = offset(k, starts) if long else k
    y = attended(q, k, v, starts, LONG if long else SHORT, SCALE)
    fraction = torch.tanh(p[block + "attention.own_value"]) * (y * v).sum(-1, keepdim=True)
    return y - fraction * v / (v**2).sum(-1, keepdim=True)


def last_layer(p, s, x, values, pairs, first, out, starts):
    """Record 81: each token weighs what the layer reads and adds."""
    block, streams = "blocks.10.", (first, out[7], x)
    w = mudd_weights(p, 0, x, 14)
    u = rms(out[7])
    q, k, v, w_o = projected(p, block, u)
    halves = torch.cat([w[6].expand(-1, 16), w[7].expand(-1, 16)], dim=1)
    v = s["value10"] * v + heads(halves * values[4] + sum(map(mul, w[:3], streams)))
    y = without_own_value(p, block, q, k, v, starts, long=True) * gates(p, block, u)
    read = x + sum(map(mul, w[3:6], streams))
    y = w[8] * read + w[9] * (y.flatten(1) @ w_o.T) + w[10] * first + w[11] * pairs
    y = w[12] * y + w[13] * mlp(p, block, rms(y))
    return y + sum(map(mul, mudd_weights(p, 1, y, 5), (*streams, values[0], out[3])))
