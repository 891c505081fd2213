"""A GPT from the speedrun trainer, for inference in transformers. It needs torch and transformers.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The forward pass in plain torch, to be read from top to bottom. Parameters have the names that they
had in training. There is no key-value cache: `generate` reads the whole text again for each token.

Shapes: B rows, T tokens a row, H heads, D head dimension, C model dimension, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

GATE_CHANNELS = 12  # of a layer's input, read by the gates
HASH = (36313, 27191, 51787, 44221)  # factors of a token, of the one before it, and so on


class SpeedrunConfig(PretrainedConfig):
    """The fields of config.json. Beside the usual ones:

    layers                a dict for each layer: see `Block` and `SelfAttention`
    mlp_width             hidden units of an MLP
    own_documents         attention stays inside documents, which bos_token_id begins
    rotary_frequencies    radians a token, for each pair of channels of a head
    query_scale           factor on queries
    softcap               kind, height, width and shift of the cap on the logits
    scalars               names of the learned scalars, in their order
    value_tables          number of tables of value embeddings
    bigram_rows, ngrams   rows of the n-gram table, 0: none; tokens of the longest in it
    sign_rows             rows of the signs that distinguish pairs of one row; 0: none
    smear, attention_gates, value_gates, xsa, biases    which pieces the model has
    trained               which run it comes from
    """

    model_type = "speedrun"


def optional(when: Any, *shape: int) -> nn.Parameter | None:
    """A parameter that exists only if its piece is part of the model."""
    return nn.Parameter(torch.empty(shape)) if when else None


def norm(x: Tensor, gain: Tensor | None = None) -> Tensor:
    """Scale the last dimension to a root mean square of 1, times the gain."""
    return F.rms_norm(x, (x.size(-1),), gain)


# ---- What is looked up for each token besides its embedding


def ngrams(tokens_BT: Tensor, rows: int, length: int) -> Tensor:
    """By a hash, the table's row for each token (B, T); the last one for the first length - 1."""
    tokens_BT, index_BT = tokens_BT.long(), HASH[0] * tokens_BT.long()
    for back in range(1, length):
        index_BT = index_BT ^ (HASH[back] * F.pad(tokens_BT, (back, 0))[:, : tokens_BT.size(1)])
    index_BT = index_BT % (rows - 1)
    index_BT[:, : length - 1] = rows - 1
    return index_BT


def sign_rows(tokens_BT: Tensor, rows: int) -> Tensor:
    """The row of the signs for each token and the one before it, (B, T)."""
    pairs = (tokens_BT[:, 1:] ^ tokens_BT[:, :-1]) % rows
    return torch.cat([torch.zeros_like(tokens_BT[:, :1]), pairs], dim=1)


# ---- Positions and documents


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their position; cos and sin: (T or more, 1, D / 2)."""
    T = x_BTHD.size(1)
    a, b = x_BTHD.chunk(2, dim=-1)
    return torch.cat([a * cos[:T] + b * sin[:T], b * cos[:T] - a * sin[:T]], dim=-1)


def offset_keys(k_BTHD: Tensor, begins_BT: Tensor) -> Tensor:
    """Give each key, in the channels that do not turn, what the key before it has there.

    A query that finds its own token among the keys then reads the token that followed it. The
    first key of a document is unchanged.
    """
    D = k_BTHD.size(-1)
    still_D = torch.arange(D, device=k_BTHD.device) % (D // 2) >= D // 4
    before_BTHD = torch.cat([k_BTHD[:, :1], k_BTHD[:, :-1]], dim=1)
    return torch.where(still_D & ~begins_BT[:, :, None, None], before_BTHD, k_BTHD)


class Place:
    """Positions of the tokens: rotary tables, document boundaries, and the keys of each query."""

    def __init__(self, tokens_BT: Tensor, config: SpeedrunConfig, dtype: torch.dtype):
        T, device = tokens_BT.size(1), tokens_BT.device
        self.begins_BT = (tokens_BT == config.bos_token_id) & config.own_documents
        # Where in its row each token's document begins; 0 if that is not there.
        begun_BT = torch.where(self.begins_BT, torch.arange(T, device=device), 0)
        self.starts_BT = begun_BT.cummax(dim=1).values
        self.scale = config.query_scale
        position = torch.arange(2 * T, device=device)  # a pair of heads reads twice as many
        frequency = torch.tensor(config.rotary_frequencies, device=device)
        angle = torch.outer(position, frequency).unsqueeze(1)
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def visible(self, window: int, paired: bool) -> Tensor:
        """Whether a query sees a key: one of its document, not later and at most `window` back.

        (B, 1, T, T): a row for each query, a column for each key. With paired heads T is doubled.
        """
        starts_BT = self.starts_BT
        if paired:
            starts_BT = (2 * starts_BT).repeat_interleave(2, dim=1)
        key_T = torch.arange(starts_BT.size(1), device=starts_BT.device)
        query_T1 = key_T.unsqueeze(1)
        first_BT1 = torch.maximum(starts_BT.unsqueeze(2), query_T1 - window)
        return ((first_BT1 <= key_T) & (key_T <= query_T1)).unsqueeze(1)


# ---- Layers


class SelfAttention(nn.Module):
    """Causal attention. Of its layer it reads

    window         how many earlier tokens a query sees
    paired         two heads share a row of twice the length
    key_offset     half of a key is that of the token before
    value_embed    the table whose rows are added to the values, or None
    """

    def __init__(self, config: SpeedrunConfig, layer: dict[str, Any]):
        super().__init__()
        dim, heads = config.hidden_size, config.num_attention_heads
        self.layer, self.head_dim = layer, config.head_dim
        gates = config.value_gates and layer["mixes"] is None  # mixed values have shares instead
        self.qkvo = nn.Parameter(torch.empty(dim, 4 * dim))  # four (C, C) matrices
        self.gate = optional(config.attention_gates, heads, GATE_CHANNELS)
        self.value_gate = optional(gates and layer["value_embed"] is not None, heads, GATE_CHANNELS)
        self.own_value = optional(config.xsa and not layer["paired"], heads, 1)
        self.bias = optional(config.biases, 4 * dim)

    def forward(
        self, x_BTC: Tensor, value_BTC: Tensor | None, factors: tuple, place: Place
    ) -> Tensor:
        """factors: on values and on value embeddings, learned scalars or 1."""
        B, T, C = x_BTC.shape
        w_4CC = self.qkvo.view(4, C, C)
        qkv_bias, o_bias = (None, None) if self.bias is None else self.bias.split([3 * C, C])

        qkv = F.linear(x_BTC, w_4CC[:3].flatten(0, 1), qkv_bias)
        q_BTHD, k_BTHD, v_BTHD = qkv.view(B, T, -1, self.head_dim).chunk(3, dim=2)
        if self.layer["paired"]:
            # Half of the heads become token 2t of a row, the others token 2t + 1.
            double = (B, 2 * T, -1, self.head_dim)
            q_BTHD, k_BTHD, v_BTHD = (y.reshape(double) for y in (q_BTHD, k_BTHD, v_BTHD))
        q_BTHD = rotate(norm(q_BTHD), place.cos, place.sin) * place.scale
        k_BTHD = rotate(norm(k_BTHD), place.cos, place.sin)
        if self.layer["key_offset"]:
            k_BTHD = offset_keys(k_BTHD, place.begins_BT)
        v_BTHD = factors[0] * v_BTHD
        if value_BTC is not None:
            v_BTHD = v_BTHD + factors[1] * self.gated(value_BTC, x_BTC).view_as(v_BTHD)

        mask = place.visible(self.layer["window"], self.layer["paired"])
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
        y_BHTD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        y_BTHD = y_BHTD.transpose(1, 2)
        if self.own_value is not None:
            # Subtract a share of the part along the token's own value.
            own_BTHD = F.normalize(v_BTHD, dim=-1)
            along_BTH1 = (y_BTHD * own_BTHD).sum(-1, keepdim=True)
            y_BTHD = y_BTHD - torch.tanh(self.own_value) * along_BTH1 * own_BTHD
        y_BTHD = y_BTHD.reshape(B, T, -1, self.head_dim)
        if self.gate is not None:
            gate_BTH = torch.sigmoid(F.linear(x_BTC[..., :GATE_CHANNELS], self.gate))
            y_BTHD = y_BTHD * gate_BTH.unsqueeze(-1)
        return F.linear(y_BTHD.flatten(2), w_4CC[3], o_bias)

    def gated(self, value_BTC: Tensor, x_BTC: Tensor) -> Tensor:
        """Value embeddings by heads, (B, T, H, D), each head's times its gate."""
        value_BTHD = value_BTC.unflatten(2, (-1, self.head_dim))
        if self.value_gate is None:
            return value_BTHD
        half = GATE_CHANNELS // 2
        read = torch.cat([x_BTC[..., :half], value_BTC[..., :half]], dim=-1)
        gate_BTH = torch.sigmoid(F.linear(read, self.value_gate))
        return 2 * gate_BTH.unsqueeze(-1) * value_BTHD


class MLP(nn.Module):
    """relu(x up)^2 down^T; both matrices are stored (C, mlp_width)."""

    def __init__(self, config: SpeedrunConfig):
        super().__init__()
        self.up = nn.Parameter(torch.empty(config.hidden_size, config.mlp_width))
        self.down = nn.Parameter(torch.empty(config.hidden_size, config.mlp_width))
        self.up_bias = optional(config.biases, config.mlp_width)
        self.down_bias = optional(config.biases, config.hidden_size)

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden = F.linear(x_BTC, self.up.T, self.up_bias).relu().square()
        return F.linear(hidden, self.down, self.down_bias)


class Block(nn.Module):
    """Attention, unless the layer has none, and an MLP, each added to the stream."""

    def __init__(self, config: SpeedrunConfig, layer: dict[str, Any]):
        super().__init__()
        self.attention: Any = SelfAttention(config, layer) if layer["attention"] else None
        self.mlp = MLP(config)
        self.attention_gain = optional(config.biases and layer["attention"], config.hidden_size)
        self.mlp_gain = optional(config.biases, config.hidden_size)

    def forward(self, x_BTC: Tensor, read_BTC: Tensor, *attention_inputs: Any) -> Tensor:
        """read_BTC: what the attention reads, most often x_BTC itself."""
        if self.attention is not None:
            x_BTC = x_BTC + self.attention(norm(read_BTC, self.attention_gain), *attention_inputs)
        return x_BTC + self.mlp(norm(x_BTC, self.mlp_gain))


class MixingBlock(Block):
    """MUDD: a small MLP on the stream gives each token shares of its own."""

    def __init__(self, config: SpeedrunConfig, layer: dict[str, Any]):
        super().__init__(config, layer)
        self.mix_in = nn.Parameter(torch.empty(2, 64, config.hidden_size))
        self.mix_out = nn.Parameter(torch.empty(2, 14, 64))
        self.mix_start = nn.Parameter(torch.empty(2, 14))

    def shares(self, x_BTC: Tensor, which: int) -> tuple[Tensor, ...]:
        hidden = F.gelu(F.linear(x_BTC, self.mix_in[which]))
        out = F.linear(hidden, self.mix_out[which], self.mix_start[which])
        return (0.1 * out).split(1, dim=-1)

    def forward(self, x_BTC: Tensor, read_BTC: Tensor, *inputs: Any) -> Tensor:
        """The last of inputs: layer 0's input, two layers' outputs, a value embedding, bigrams."""
        value_BTC, *rest, (first, middle, early, table, bigram) = inputs
        a = self.shares(x_BTC, 0)
        left, right = value_BTC.chunk(2, dim=-1)
        value_BTC = torch.cat([a[6] * left, a[7] * right], dim=-1)
        value_BTC = value_BTC + a[0] * first + a[1] * middle + a[2] * x_BTC
        y_BTC = (1 + a[5]) * x_BTC + a[3] * first + a[4] * middle
        attended = self.attention(norm(read_BTC, self.attention_gain), value_BTC, *rest)
        y_BTC = a[8] * y_BTC + a[9] * attended + a[10] * first
        y_BTC = y_BTC if bigram is None else y_BTC + a[11] * bigram
        y_BTC = a[12] * y_BTC + a[13] * self.mlp(norm(y_BTC, self.mlp_gain))
        b = self.shares(y_BTC, 1)
        return y_BTC + b[0] * first + b[1] * middle + b[2] * x_BTC + b[3] * table + b[4] * early


# ---- The model


class SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    """Logits (B, T, V) in float32, soft cap included, for tokens (B, T)."""

    config_class = SpeedrunConfig
    _input_embed_layer = "embed"
    _supports_sdpa = True
    _no_split_modules = ("Block",)

    signs: Tensor | None  # (sign_rows, C) of +1 and -1

    def __init__(self, config: SpeedrunConfig):
        super().__init__(config)
        table, dim = (config.vocab_size, config.hidden_size), config.hidden_size
        self.embed = nn.Parameter(torch.empty(table))
        self.value_embeds = nn.ParameterList(torch.empty(table) for _ in range(config.value_tables))
        self.bigram = optional(config.bigram_rows, config.bigram_rows, dim)
        signs = torch.empty(config.sign_rows, dim, dtype=torch.int8) if config.sign_rows else None
        self.register_buffer("signs", signs)
        self.smear_gate = optional(config.smear, 1, GATE_CHANNELS)
        self.blocks = nn.ModuleList(
            (Block if layer["mixes"] is None else MixingBlock)(config, layer)
            for layer in config.layers
        )
        self.lm_head = nn.Parameter(torch.empty(table))
        self.lm_head_bias = optional(config.biases, config.vocab_size)
        self.embed_gain = optional(config.biases, dim)
        self.head_gain = optional(config.biases, dim)
        self.scalars = optional(config.scalars, len(config.scalars))
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None,
        labels: Tensor | None = None, logits_to_keep: int = 0, **unused: Any,
    ) -> CausalLMOutput:  # fmt: skip
        """labels: input_ids, or -100 where no loss is wanted; logits_to_keep: last ones, 0: all.

        Padding must be on the right, where it changes nothing. ValueError if text follows it.
        """
        if attention_mask is not None and (attention_mask.int().diff(dim=1) > 0).any():
            raise ValueError("text after padding: pad on the right, generate one text at a time")
        x_BTC = self.hidden(input_ids)[:, -logits_to_keep:]
        logits_BTV = self.cap(F.linear(x_BTC, self.lm_head, self.lm_head_bias).float())
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits_BTV)

    def cap(self, logits: Tensor) -> Tensor:
        """A smooth bound on the logits."""
        kind, height, width, shift = self.config.softcap
        logits = logits + shift
        if kind == "sigmoid":
            return height * torch.sigmoid(logits / width)
        return height * logits * (logits.square() + width**2).rsqrt()

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """The stream (B, T, C) after the last layer and its norm."""
        learned = () if self.scalars is None else self.scalars.unbind()
        scalars = dict(zip(self.config.scalars, learned, strict=True))
        place = Place(tokens_BT, self.config, self.embed.dtype)

        x_BTC = x0_BTC = norm(self.embedded(tokens_BT, scalars), self.embed_gain)
        values = [F.embedding(tokens_BT, table) for table in self.value_embeds]
        ngrams_BTC = self.embedded_ngrams(tokens_BT)
        outputs: list[Tensor] = []  # of all layers so far
        first_BTC = backed_out = None
        for i, (layer, block) in enumerate(zip(self.config.layers, self.blocks, strict=True)):
            if layer["skip_from"] is not None:
                x_BTC = x_BTC + torch.sigmoid(scalars[f"skip{i}"]) * outputs[layer["skip_from"]]
            if f"x{i}" in scalars:
                x_BTC = scalars[f"x{i}"] * x_BTC + scalars[f"x0_{i}"] * x0_BTC
            if f"bigram{i}" in scalars:
                x_BTC = x_BTC + scalars[f"bigram{i}"] * ngrams_BTC
            first_BTC = x_BTC if i == 0 else first_BTC
            read_BTC = x_BTC if layer["reads"] is None else outputs[layer["reads"]]
            value_BTC = None if layer["value_embed"] is None else values[layer["value_embed"]]
            factors = (scalars.get(f"value{i}", 1.0), scalars.get(f"value_embed{i}", 1.0))
            inputs: Any = (value_BTC, factors, place)
            if layer["mixes"] is not None:
                streams = (first_BTC, backed_out, outputs[layer["mixes"]], values[0], ngrams_BTC)
                inputs = (*inputs, streams)
            x_BTC = block(x_BTC, read_BTC, *inputs)
            outputs.append(x_BTC)
            if layer["backout"]:
                backed_out = x_BTC
        if "backout" in scalars:
            x_BTC = x_BTC - scalars["backout"] * backed_out
        return norm(x_BTC, self.head_gain)

    def embedded(self, tokens_BT: Tensor, scalars: dict[str, Tensor]) -> Tensor:
        """Token embeddings (B, T, C). With `smear`, each takes a gated share of the one before."""
        x_BTC = F.embedding(tokens_BT, self.embed)
        if self.smear_gate is None:
            return x_BTC
        gate = torch.sigmoid(F.linear(x_BTC[:, 1:, :GATE_CHANNELS], self.smear_gate))
        smeared_BTC = x_BTC[:, 1:] + scalars["smear"] * gate * x_BTC[:, :-1]
        return torch.cat([x_BTC[:, :1], smeared_BTC], dim=1)

    def embedded_ngrams(self, tokens_BT: Tensor) -> Tensor | None:
        """The sum of the embeddings of each token's n-grams, (B, T, C); None without a table."""
        if self.bigram is None:
            return None
        rows = [ngrams(tokens_BT, len(self.bigram), n) for n in range(2, self.config.ngrams + 1)]
        found = [F.embedding(row_BT, self.bigram) for row_BT in rows]
        if self.signs is not None:
            found[0] = found[0] * self.signs[sign_rows(tokens_BT, len(self.signs))]
        return sum(found[1:], found[0])
