"""Train a GPT to a target validation loss in as few steps, or as little time, as possible.

    python train_gpt.py                                            # `tiny`: two CPU cores, about a minute
    python train_gpt.py --recipe adamw --trials 3                  # its baseline, three seeds, one compilation
    torchrun --standalone --nproc_per_node=8 train_gpt.py --track short     # the public contest's track 1

The clock runs over data loading and training steps. Set-up, compilation and warm-up (after which the whole state is
restored and compared bit for bit) and validation are outside it; every phase is in the run's log, timed or untimed.
The base recipe is modded-nanogpt's record 42. A run takes the same trajectory on any number of ranks, up to rounding.
"""

import dataclasses
import hashlib
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data.audit import open_audited
from data.loader import Batch, Data
from data.shards import ShardError
from kernels.attention import ATTENTIONS, Attention, choose_attention
from kernels.head import HEADS, choose_head, linear_cross_entropy, plain_cross_entropy
from kernels.rotary import Rotary
from optim import Adam, Guard, Muon, NorMuon, Row, SpikeRule, build_optimizers
from runtime import environment
from runtime.claim import admit
from runtime.clock import Ledger
from runtime.flags import parse, require, setting
from runtime.log import config_hash, require_writable, source_hash
from runtime.memory import Built
from runtime.progress import Progress, signs_of_life
from runtime.rehearsal import MemoryPlan, Stage, plan_memory, rehearse
from runtime.requests import Requests
from runtime.resume import Trial, plan_trials
from runtime.settings import RunSettings
from runtime.signals import Interrupted, listen
from runtime.state import Whole, is_causal, same_bits
from runtime.trial import Fault, Run, explained
from runtime.watch import Watch

# ---- Configuration: every number of an experiment; the flags come from here. The defaults are the `short` track.

SOURCE = Path(__file__).resolve().parent
GATE_CHANNELS = 12  # of a layer's input, read by the smear gate and the attention gates


@dataclass(frozen=True)
class Config(RunSettings):
    track: str = setting("short", "preset of all that follows: tiny, short, medium or steps")
    recipe: str = setting("record42", "changes to the track: record42 (none); on tiny also muon or adamw, a plain GPT")
    target: float = setting(3.28, "validation loss to reach, nats per token")
    device: str = setting("auto", "where to compute", one_of=("auto", "cpu", "cuda"))
    dtype: str = setting("auto", "of the forward pass; auto: bf16 where native", one_of=("auto", "bfloat16", "float32"))
    attention: str = setting("auto", "attention backend", one_of=ATTENTIONS)
    head: str = setting("auto", "output head and loss: fp8 where the GPU has it, else chunked; or plain", one_of=HEADS)
    recompute: bool = setting(False, "make layers again for gradients, keep only their inputs: less memory, slower")
    compile: str = setting("auto", "auto: eager where it cannot work", one_of=("auto", "on", "off"))
    deterministic: bool = setting(True, "deterministic algorithms on the CPU")
    # data
    vocab_size: int = setting(50257, "tokens in the vocabulary; embeddings are padded to a multiple of 128", at_least=1)
    bos: int = setting(50256, "token that precedes each document", at_least=0)
    align: bool = setting(True, "rows begin with a document and attention stays inside documents; off: dense rows")
    batch_tokens: int = setting(262_144, "tokens per optimizer step, on all ranks together", at_least=1)
    sequence: int = setting(32_768, "tokens per row, the unit that is dealt to ranks", at_least=1)
    micro_batch: int | None = setting(32_768, "most tokens a rank takes at once; auto: what fits", at_least=1)
    max_document: int = setting(2048, "training documents are cut to this many tokens", at_least=1)
    val_tokens: int = setting(10_485_760, "first tokens of the validation data that are used", at_least=1)
    val_sequence: int = setting(262_144, "tokens per validation row", at_least=1)
    val_batch: int = setting(262_144, "most validation targets a rank takes at once; long rows go in parts", at_least=1)
    val_sha256: str = setting("", "how the SHA-256 of the validation tokens must begin; empty: any")
    val_every: int = setting(250, "steps between validations, from step 0 on; 0: only at the end", at_least=0)
    val_every_late: int = setting(0, "the same in the last tenth of the steps; 0: no change", at_least=0)
    # model
    layers: str = setting("record42", "layer table: record42, medium, steps or tiny")
    dim: int = setting(768, "model dimension", at_least=GATE_CHANNELS)
    head_dim: int = setting(128, "dimension of an attention head", at_least=1)
    embed_dtype: str = setting("bfloat16", "storage of tables and gates under bf16", one_of=("bfloat16", "float32"))
    head_dtype: str = setting("bfloat16", "storage of the output head under bf16", one_of=("bfloat16", "float32"))
    attention_scale: float = setting(0.1, "factor on query-key products before YaRN changes it")
    qk_norm: bool = setting(True, "RMS norm on queries and keys; off: products scaled by 1/sqrt(head_dim)")
    value_embeds: bool = setting(True, "token embeddings added to the values of some layers")
    smear: bool = setting(True, "each token embedding takes a gated share of the one before it")
    skips: bool = setting(True, "gated skip connections from early layers to late ones")
    backout: bool = setting(True, "take a share of a middle layer's output away at the end")
    x0_mixing: bool = setting(True, "each layer mixes the token embedding back in")
    attention_gates: bool = setting(True, "a sigmoid gate on each head's output, from 12 channels of its input")
    biases: bool = setting(False, "biases on linear maps and gains on norms")
    softcap: str = setting("sigmoid", "of logits: 30 sigmoid(z/7.5), 15 z/sqrt(z^2+15^2)", one_of=("sigmoid", "rsqrt"))
    init: str = setting("uniform", "of hidden matrices; sd 0.5/sqrt(dim), sqrt(0.33/dim)", one_of=("uniform", "normal"))
    # schedules
    steps: int = setting(2285, "optimizer steps in all, the extension included", at_least=1)
    extension: int = setting(40, "last steps: schedules stay flat, the window is extension_window", at_least=0)
    warmup: int = setting(0, "first steps, in which the learning rate rises linearly", at_least=0)
    cooldown: float = setting(0.5, "share of the scheduled steps in which the learning rate falls", at_least=0)
    final_lr: float = setting(0.1, "learning rate at the end of the cooldown, as a share of its peak")
    window_block: int = setting(128, "tokens in a block, the unit of windows; 0: no window", at_least=0)
    windows: tuple[int, ...] = setting((3, 7, 11), "long window in blocks, over equal parts of the scheduled steps")
    extension_window: int = setting(13, "long window in the extension, blocks", at_least=1)
    final_window: int = setting(20, "long window of the last validation, blocks", at_least=1)
    # optimizers
    optimizer: str = setting("normuon", "of the hidden matrices", one_of=("normuon", "muon", "adam"))
    matrix_lr: float = setting(0.03, "peak learning rate of hidden matrices; for muon the spectral norm of a step")
    matrix_wd: float = setting(0.0, "weight decay of hidden matrices, times matrix_lr")
    matrix_beta2: float = setting(0.95, "second-moment decay of normuon and of adam on matrices")
    matrix_method: str = setting("polar_express", "orthogonalization: polar_express, newton_schulz(_12) or normalize")
    orthogonalization: str = setting("plain", "what multiplies in it", one_of=("auto", "plain", "gram", "triton"))
    mlp_up_lr_mul: float = setting(2.0, "learning rate multiplier of the MLPs' first matrices")
    split_variance: bool = setting(True, "normuon's variance of Q, K, V and O apart; off: of the packed matrix")
    smear_lr_mul: float = setting(1.0, "learning rate multiplier of the smear gate")
    smear_method: str = setting("polar_express", "orthogonalization of the smear gate")
    momentum: tuple[float, float] = setting((0.85, 0.95), "momentum of hidden matrices: at the ends and in between")
    momentum_warmup: int = setting(300, "steps in which momentum rises", at_least=0)
    momentum_cooldown: int = setting(50, "last steps, in which momentum falls again", at_least=0)
    adam_lr: float = setting(0.008, "peak learning rate of all other parameters, times the multipliers below")
    adam_betas: tuple[float, float] = setting((0.65, 0.95), "of Adam")
    adam_eps: float = setting(1e-8, "of Adam; gradients are those of the token sum of a row")
    adam_wd: float = setting(0.0, "weight decay of Adam's parameters, times their own learning rates")
    adam_every: int = setting(2, "Adam steps once in so many steps, on the gradients summed since", at_least=1)
    embed_lr_mul: float = setting(75.0, "learning rate multiplier of the token embedding")
    value_embed_lr_mul: float = setting(75.0, "learning rate multiplier of the value embeddings")
    head_lr_mul: float = setting(1.0, "learning rate multiplier of the output head")
    vector_lr_mul: float = setting(5.0, "learning rate multiplier of scalars, biases and gains")
    guard: str = setting("spikes", "skip steps of NaN, of spikes too, or none", one_of=("spikes", "nonfinite", "off"))
    spike_sigma: float = setting(6.0, "spreads of a window by which a loss or gradient norm is an outlier", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        rules = {
            "track": (self.track in TRACKS, f"one of {', '.join(TRACKS)}"),
            "recipe": (self.recipe in RECIPES.get(self.track, ()), f"one of {', '.join(RECIPES.get(self.track, ()))}"),
            "layers": (self.layers in LAYERS, f"one of {', '.join(LAYERS)}"),
            "target": (math.isfinite(self.target), "a finite number"),
            "head_dim": (self.head_dim % 2 == 0, "even"),
            "dim": (self.dim % self.head_dim == 0, f"a multiple of head_dim ({self.head_dim})"),
            "windows": (min(self.windows, default=0) >= 1, "one window or more, of at least 1 block"),
            "steps": (self.steps > self.extension, f"larger than the extension ({self.extension})"),
            "cooldown": (self.cooldown <= 1, "a share between 0 and 1"),
            "bos": (self.bos < self.vocab_size, f"a token of the vocabulary, below {self.vocab_size}"),
            "batch_tokens": (self.batch_tokens % self.sequence == 0, f"a multiple of sequence ({self.sequence})"),
            "micro_batch": ((self.micro_batch or self.sequence) >= self.sequence, f"at least one row, {self.sequence}"),
            "val_tokens": (self.val_tokens % self.val_sequence == 0, f"a multiple of val_sequence {self.val_sequence}"),
            "val_batch": (self.val_batch >= (row := min(self.sequence, self.val_sequence)), f"at least a row, {row}"),
        }
        require(self, rules)

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // 128) * 128


PLAIN: dict[str, Any] = {
    "value_embeds": False, "smear": False, "skips": False, "backout": False, "x0_mixing": False,
    "attention_gates": False, "adam_every": 1,
}  # fmt: skip

TRACKS: dict[str, dict[str, Any]] = {
    "short": {},
    "medium": {
        "target": 2.92, "head": "chunked", "layers": "medium", "dim": 1024, "batch_tokens": 524_288,
        "max_document": 4096, "steps": 4740, "cooldown": 0.7, "final_window": 23, "matrix_lr": 0.015, "adam_lr": 0.004,
        "adam_betas": (0.8, 0.95), "vector_lr_mul": 2.0,
    },
    "steps": PLAIN | {
        "head": "plain", "layers": "steps", "biases": True, "align": False, "batch_tokens": 524_288, "sequence": 1024,
        "micro_batch": 65_536, "val_sequence": 1024, "val_batch": 65_536, "val_every": 125, "val_every_late": 25,
        "head_dtype": "float32", "attention_scale": 0.12, "softcap": "rsqrt", "init": "normal", "steps": 3250,
        "extension": 0, "cooldown": 0.7, "final_lr": 0.0, "window_block": 0, "optimizer": "muon", "matrix_lr": 0.025,
        "matrix_wd": 0.05, "matrix_method": "newton_schulz_12", "momentum": (0.95, 0.95), "adam_lr": 0.7,
        "adam_betas": (0.8, 0.95), "adam_eps": 1e-10, "adam_wd": 0.001, "embed_lr_mul": 1.0,
        "head_lr_mul": 0.004 / 0.7, "vector_lr_mul": 0.015 / 0.7,
    },
    "tiny": {
        "target": 3.39, "val_sha256": "61a7bae6fab302b9", "data_dir": "data/corpus", "vocab_size": 1024, "bos": 1023,
        "head": "plain", "layers": "tiny", "dim": 256, "embed_dtype": "float32", "head_dtype": "float32",
        "batch_tokens": 2048, "sequence": 512, "micro_batch": 2048, "max_document": 512, "val_tokens": 262_144,
        "val_sequence": 4096, "val_batch": 16_384, "val_every": 100, "steps": 350, "extension": 10, "window_block": 16,
        "momentum_warmup": 40, "momentum_cooldown": 10, "adam_lr": 0.02,
    },
}  # fmt: skip

RECIPES: dict[str, dict[str, dict[str, Any]]] = {track: {"record42": {}} for track in TRACKS}
RECIPES["tiny"] |= {
    name: PLAIN | {"windows": (20,), "extension": 0} | changes
    for name, changes in {
        "muon": {"optimizer": "muon", "matrix_lr": 0.02, "adam_lr": 0.01, "steps": 660},
        "adamw": {
            "optimizer": "adam", "matrix_lr": 0.002, "matrix_wd": 0.1, "mlp_up_lr_mul": 1.0, "adam_lr": 0.008,
            "embed_lr_mul": 40.0, "steps": 740,
        },
    }.items()
}  # fmt: skip


def preset(given: dict[str, Any]) -> dict[str, Any]:
    """The values of a track and a recipe, the recipe over the track."""
    track, recipe = given.get("track", "tiny"), given.get("recipe", Config.recipe)
    return {"track": track} | TRACKS.get(track, {}) | RECIPES.get(track, {}).get(recipe, {})


# ---- Model. B rows, T tokens a row, H heads, D head dim, C model dim; suffixes where dimensions are many.

@dataclass(frozen=True)
class Layer:
    """What one layer is. The table of layers is the model's shape."""

    attention: bool = True
    window: str = "short"  # or "long"
    value_embed: int | None = None  # table whose rows are added to this layer's values
    skip_from: int | None = None  # earlier layer whose output is added to this layer's input
    backout: bool | None = None  # a share of this layer's output is taken away after the last layer


LAYERS: dict[str, list[Layer]] = {
    "record42": [
        Layer(value_embed=1), Layer(value_embed=2), Layer(), Layer(window="long"),
        Layer(), Layer(skip_from=4), Layer(attention=False, skip_from=3), Layer(skip_from=2, backout=True),
        Layer(value_embed=0, skip_from=1), Layer(value_embed=1, skip_from=0), Layer(window="long", value_embed=2),
    ],
    "medium": [
        Layer(window="long", value_embed=0), Layer(value_embed=1), Layer(value_embed=2), Layer(),
        Layer(window="long"), Layer(), Layer(), Layer(),
        Layer(), Layer(skip_from=6), Layer(skip_from=4), Layer(window="long", skip_from=2, backout=True),
        Layer(), Layer(value_embed=0), Layer(value_embed=1), Layer(window="long", value_embed=2),
    ],
    "steps": [Layer(window="long") for _ in range(12)],
    "tiny": [
        Layer(value_embed=0), Layer(window="long", value_embed=1),
        Layer(skip_from=0, value_embed=0, backout=True), Layer(window="long", value_embed=1),
    ],
}  # fmt: skip

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, T, H, D) queries, keys and values to outputs
Mix = tuple[Any, Any]  # learned factors on a layer's values and on its value embeddings, None where it has none
Windows = dict[str, Any]  # of "short" and of "long" layers, as the attention backend takes them


def optional_parameter(*shape: int, dtype: torch.dtype = torch.float32, when: Any = True) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(shape, dtype=dtype)) if when else None


def norm(x: Tensor, gain: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), None if gain is None else gain.to(x.dtype))


class SelfAttention(nn.Module):
    """Q, K, V and O are packed in one (C, 4C) parameter, read as four (C, C) matrices."""

    def __init__(self, config: Config, gate_dtype: torch.dtype):
        super().__init__()
        self.head_dim, self.qk_norm = config.head_dim, config.qk_norm
        self.qkvo = nn.Parameter(torch.empty(config.dim, 4 * config.dim))
        heads = config.dim // config.head_dim
        self.gate = optional_parameter(heads, GATE_CHANNELS, dtype=gate_dtype, when=config.attention_gates)
        self.bias = optional_parameter(4 * config.dim, when=config.biases)

    def forward(self, x_BTC: Tensor, value_BTC: Tensor | None, mix: Mix, rotary: Rotary, attend: Attend) -> Tensor:
        B, T, C = x_BTC.shape
        w_4CC = self.qkvo.view(4, C, C).to(x_BTC.dtype)
        bias = (None, None) if self.bias is None else self.bias.to(x_BTC.dtype).split([3 * C, C])
        qkv = F.linear(x_BTC, w_4CC[:3].flatten(0, 1), bias[0])
        q_BTHD, k_BTHD, v_BTHD = qkv.view(B, T, -1, self.head_dim).chunk(3, dim=2)
        if self.qk_norm:
            q_BTHD, k_BTHD = norm(q_BTHD), norm(k_BTHD)
        q_BTHD, k_BTHD = rotary(q_BTHD) * rotary.scale, rotary(k_BTHD)
        if mix[0] is not None:
            v_BTHD = mix[0] * v_BTHD
        if value_BTC is not None:
            v_BTHD = v_BTHD + mix[1] * value_BTC.view_as(v_BTHD)
        y_BTHD = attend(q_BTHD, k_BTHD, v_BTHD)
        if self.gate is not None:
            gate = torch.sigmoid(F.linear(x_BTC[..., :GATE_CHANNELS], self.gate.to(x_BTC.dtype)))
            y_BTHD = y_BTHD * gate.unsqueeze(-1)
        return F.linear(y_BTHD.reshape(B, T, C), w_4CC[3], bias[1])


class MLP(nn.Module):
    """relu(x up)^2 down^T; both matrices are stored (C, 4C), so that the optimizer can batch them."""

    def __init__(self, config: Config):
        super().__init__()
        self.up = nn.Parameter(torch.empty(config.dim, 4 * config.dim))
        self.down = nn.Parameter(torch.empty(config.dim, 4 * config.dim))
        self.up_bias = optional_parameter(4 * config.dim, when=config.biases)
        self.down_bias = optional_parameter(config.dim, when=config.biases)

    def forward(self, x_BTC: Tensor) -> Tensor:
        up, down = self.up.to(x_BTC.dtype), self.down.to(x_BTC.dtype)
        up_bias, down_bias = (None if b is None else b.to(x_BTC.dtype) for b in (self.up_bias, self.down_bias))
        return F.linear(F.linear(x_BTC, up.T, up_bias).relu().square(), down, down_bias)


class Block(nn.Module):
    def __init__(self, config: Config, layer: Layer, gate_dtype: torch.dtype):
        super().__init__()
        self.attention = SelfAttention(config, gate_dtype) if layer.attention else None
        self.mlp = MLP(config)
        self.attention_gain = optional_parameter(config.dim, when=config.biases and layer.attention)
        self.mlp_gain = optional_parameter(config.dim, when=config.biases)

    def forward(self, x_BTC: Tensor, value_BTC: Tensor | None, mix: Mix, rotary: Rotary, attend: Attend) -> Tensor:
        if self.attention is not None:
            x_BTC = x_BTC + self.attention(norm(x_BTC, self.attention_gain), value_BTC, mix, rotary, attend)
        return x_BTC + self.mlp(norm(x_BTC, self.mlp_gain))


class GPT(nn.Module):
    """Next-token loss on rows of packed documents, summed over targets, which may be only those of a row's end."""

    def __init__(
        self, config: Config, dtype: torch.dtype, device: torch.device, attention: Attention, head: str = "plain"
    ):
        super().__init__()
        self.config, self.dtype, self.attention, self.head = config, dtype, attention, head
        self.table = layer_table(config)
        stored = {name: getattr(torch, name) if dtype == torch.bfloat16 else dtype for name in ("bfloat16", "float32")}
        table_dtype, head_dtype = stored[config.embed_dtype], stored[config.head_dtype]
        tables = {layer.value_embed for layer in self.table} - {None}
        with device:
            self.embed = nn.Parameter(torch.empty(config.padded_vocab, config.dim, dtype=table_dtype))
            self.value_embeds = nn.ParameterList(torch.empty_like(self.embed) for _ in tables)
            self.smear_gate = optional_parameter(1, GATE_CHANNELS, dtype=table_dtype, when=config.smear)
            self.blocks = nn.ModuleList(Block(config, layer, table_dtype) for layer in self.table)
            self.lm_head = nn.Parameter(torch.empty(config.padded_vocab, config.dim, dtype=head_dtype))
            self.lm_head_bias = optional_parameter(config.padded_vocab, when=config.biases)
            self.embed_gain = optional_parameter(config.dim, when=config.biases)
            self.head_gain = optional_parameter(config.dim, when=config.biases)
            self.scalar_init = initial_scalars(config)
            self.scalars = optional_parameter(len(self.scalar_init), when=self.scalar_init)
        positions = max(config.sequence, config.val_sequence)
        scale = config.attention_scale if config.qk_norm else config.head_dim**-0.5
        self.rotary = Rotary(positions, config.head_dim, scale, config.window_block, dtype, device)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Every parameter from `seed`, the same on any device; raises RuntimeError for one that has no rule."""
        for name, parameter in self.named_parameters():
            # A stream of its own for each name: what one piece draws does not move when another is switched off.
            stream = hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]
            generator = torch.Generator().manual_seed(int.from_bytes(stream))
            parameter.copy_(self._initial(name, parameter.shape, generator))
        self.rotary.reset()

    def _initial(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        kind = name.rpartition(".")[2]
        if kind == "qkvo":
            qkvo = self._hidden(torch.empty(4, shape[0], shape[0]), generator)
            qkvo[3] = 0
            return qkvo.view(shape)
        if kind == "up":
            return self._hidden(torch.empty(shape), generator)
        if kind == "embed" or name.startswith("value_embeds"):
            return torch.randn(shape, generator=generator)
        if kind == "scalars":
            return torch.tensor(list(self.scalar_init.values()))
        if kind.endswith("gain"):
            return torch.ones(shape)
        if kind in ("down", "lm_head", "gate", "smear_gate") or kind.endswith("bias"):
            return torch.zeros(shape)
        raise RuntimeError(f"parameter {name} has no rule in GPT._initial; add one")

    def _hidden(self, w: Tensor, generator: torch.Generator) -> Tensor:
        if self.config.init == "normal":
            return w.normal_(0, (0.33 / self.config.dim) ** 0.5, generator=generator)
        bound = 3**0.5 * 0.5 / self.config.dim**0.5
        return w.uniform_(-bound, bound, generator=generator)

    def hidden(self, inputs_BT: Tensor, cu_seqlens: Tensor, windows: Windows, longest: int) -> Tensor:
        """The stream after the last layer and norm, (B, T, C)."""
        B, T = inputs_BT.shape
        learned = () if self.scalars is None else self.scalars.to(self.dtype).unbind()
        scalar = dict(zip(self.scalar_init, learned, strict=True))
        documents = self.attention.documents(cu_seqlens, B, T)

        x_BTC = F.embedding(inputs_BT, self.embed).to(self.dtype)
        if self.smear_gate is not None:
            share = torch.sigmoid(F.linear(x_BTC[:, 1:, :GATE_CHANNELS], self.smear_gate.to(self.dtype)))
            smeared = x_BTC[:, 1:] + scalar["smear"] * share * x_BTC[:, :-1]
            x_BTC = torch.cat([x_BTC[:, :1], smeared], dim=1)
        x_BTC = x0_BTC = norm(x_BTC, self.embed_gain)
        values = [F.embedding(inputs_BT, table).to(self.dtype) for table in self.value_embeds]

        outputs: dict[int, Tensor] = {}
        backed_out = None
        sources = {layer.skip_from for layer in self.table}
        for i, (layer, block) in enumerate(zip(self.table, self.blocks, strict=True)):
            attend = partial(self.attention, documents=documents, window=windows[layer.window], longest=longest)
            if layer.skip_from is not None:
                x_BTC = x_BTC + torch.sigmoid(scalar[f"skip{i}"]) * outputs[layer.skip_from]
            if self.config.x0_mixing:
                x_BTC = scalar[f"x{i}"] * x_BTC + scalar[f"x0_{i}"] * x0_BTC
            mix = (scalar.get(f"value{i}"), scalar.get(f"value_embed{i}"))
            value_BTC = None if layer.value_embed is None else values[layer.value_embed]
            inputs = (x_BTC, value_BTC, mix, self.rotary, attend)
            x_BTC = checkpoint(block, *inputs, use_reentrant=False) if self.config.recompute else block(*inputs)
            if i in sources:
                outputs[i] = x_BTC
            if layer.backout:
                backed_out = x_BTC
        if backed_out is not None:
            x_BTC = x_BTC - scalar["backout"] * backed_out
        return norm(x_BTC, self.head_gain)

    def forward(
        self, inputs_BT: Tensor, targets_BT: Tensor, cu_seqlens: Tensor, windows: Windows, longest: int
    ) -> Tensor:
        x_BTC = self.hidden(inputs_BT, cu_seqlens, windows, longest)[:, -targets_BT.size(1) :]
        x, targets = x_BTC.flatten(0, 1), targets_BT.flatten()
        if self.head == "plain":
            bias = None if self.lm_head_bias is None else self.lm_head_bias.to(x.dtype)
            return plain_cross_entropy(x, self.lm_head.to(x.dtype), bias, targets, self.config.softcap)
        precision = "fp8" if self.head == "fp8" and torch.is_grad_enabled() else "plain"  # validation is exact
        return linear_cross_entropy(x, self.lm_head, targets, softcap=self.config.softcap, precision=precision)

    def flops_per_token(self) -> int:
        """6 for each weight of the matrices and the head: forward and backward, attention scores not counted."""
        return 6 * sum(p.numel() for n, p in self.named_parameters() if n.endswith(("qkvo", "up", "down", "lm_head")))


def layer_table(config: Config) -> list[Layer]:
    """The table that `config.layers` names, without the pieces that are switched off."""
    pieces = {"value_embed": config.value_embeds, "skip_from": config.skips, "backout": config.backout}
    off: dict[str, Any] = {name: None for name, on in pieces.items() if not on}
    return [dataclasses.replace(layer, **off) for layer in LAYERS[config.layers]]


def initial_scalars(config: Config) -> dict[str, float]:
    """Name and initial value of each learned scalar; all of them are one parameter."""
    init: dict[str, float] = {}
    table = layer_table(config)
    for i, layer in enumerate(table):
        if config.x0_mixing:
            init |= {f"x{i}": 1.0, f"x0_{i}": 0.0}
        if config.value_embeds and layer.attention:
            init[f"value{i}"] = 0.5
        if layer.value_embed is not None:
            init[f"value_embed{i}"] = 0.5
        if layer.skip_from is not None:
            init[f"skip{i}"] = -1.5
    init |= {"smear": 0.0} if config.smear else {}
    return init | ({"backout": 0.5} if any(layer.backout for layer in table) else {})


# ---- Schedules: pure functions of the step, flat in the extension. Step s is the one after s steps are done.

def learning_rate(config: Config, step: int) -> float:
    """Multiplier of every learning rate at this step."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    left = 1 - min(step / (config.steps - config.extension), 0.9999)
    if left > config.cooldown:
        return 1.0
    share = left / config.cooldown
    return share + config.final_lr * (1 - share)


def stage(config: Config, step: int) -> int:
    """Index of the step's part of the window schedule; the extension, if there is one, is the last."""
    last = len(config.windows) if config.extension else len(config.windows) - 1
    return min(len(config.windows) * step // (config.steps - config.extension), last)


def window(config: Config, step: int) -> int:
    """Long window in blocks."""
    return (*config.windows, config.extension_window)[stage(config, step)]


def validates(config: Config, step: int) -> bool:
    """Whether the loss is validated before this step; after the last one it always is."""
    every = (step >= 0.9 * config.steps and config.val_every_late) or config.val_every
    return every > 0 and step % every == 0


def reach(config: Config) -> int:
    """Bound on the tokens before its own that an output depends on: what layers see, one behind the other."""
    long = max(*config.windows, config.extension_window)
    seen = {"short": max(long // 2, 1), "long": max(long, config.final_window)}
    blocks = sum(seen[layer.window] for layer in LAYERS[config.layers] if layer.attention)
    tokens = config.smear + (blocks * config.window_block or max(config.sequence, config.val_sequence))
    return -(-tokens // 128) * 128  # parts of rows keep lengths that kernels like


def momentum(config: Config, step: int) -> float:
    """Momentum of the hidden matrices."""
    low, high = config.momentum
    rising = step / config.momentum_warmup if config.momentum_warmup else 1.0
    falling = (config.steps - step) / config.momentum_cooldown if config.momentum_cooldown else 1.0
    return low + (high - low) * min(rising, falling, 1.0)


# ---- Optimizers

def optimizer_table(config: Config) -> list[Row]:
    """Which optimizer takes a parameter, by its name, and with what multipliers. Each parameter matches one row."""
    orthogonal = config.optimizer != "adam"
    value_embeds = any(layer.value_embed is not None for layer in layer_table(config))
    packed = {"split": 4} if orthogonal else {}

    def adam(lr_mul: float) -> dict[str, float]:
        return {"lr_mul": lr_mul, "wd_mul": lr_mul}  # each decays with its own learning rate

    smear = {"method": config.smear_method} if orthogonal else {}
    rows = [
        (True, Row("blocks.*.attention.qkvo", "matrix", packed)),
        (True, Row("blocks.*.mlp.up", "matrix", {"lr_mul": config.mlp_up_lr_mul})),
        (True, Row("blocks.*.mlp.down", "matrix")),
        (config.attention_gates, Row("blocks.*.attention.gate", "matrix")),
        (config.smear, Row("smear_gate", "matrix", {"lr_mul": config.smear_lr_mul} | smear)),
        (True, Row("embed", "adam", adam(config.embed_lr_mul))),
        (value_embeds, Row("value_embeds.*", "adam", adam(config.value_embed_lr_mul))),
        (True, Row("lm_head", "adam", adam(config.head_lr_mul))),
        (bool(initial_scalars(config)), Row("scalars", "adam", adam(config.vector_lr_mul))),
        (config.biases, Row("*bias", "adam", adam(config.vector_lr_mul))),
        (config.biases, Row("*gain", "adam", adam(config.vector_lr_mul))),
    ]
    return [row for present, row in rows if present]


def make_optimizers(config: Config, model: GPT, machine: environment.Machine) -> dict[str, Any]:
    """{"matrix": ..., "adam": ...} over all parameters of the model."""
    # The loss is a token sum, so a row's gradient has the scale of record 42's micro-batch. Gradients are summed over
    # micro-batches and ranks, and divided once, here, by the number of rows: the mean over rows on any world size.
    shared: dict[str, Any] = {
        "grad_divisor": config.batch_tokens // config.sequence,
        "process_group": torch.distributed.group.WORLD if machine.world_size > 1 else None,
        "nonfinite_guard": False,  # a guard of both is made below
    }

    hidden = shared | {"lr": config.matrix_lr, "weight_decay": config.matrix_wd}
    muon = hidden | {"method": config.matrix_method, "backend": config.orthogonalization}
    normuon = muon | {"beta2": config.matrix_beta2, "split_variance": config.split_variance}
    plain = hidden | {"betas": (0.9, config.matrix_beta2), "eps": config.adam_eps}
    rest = shared | {"lr": config.adam_lr, "weight_decay": config.adam_wd, "betas": config.adam_betas}
    matrix = {"normuon": partial(NorMuon, **normuon), "muon": partial(Muon, **muon), "adam": partial(Adam, **plain)}
    factories: dict[str, Any] = {"matrix": matrix[config.optimizer], "adam": partial(Adam, **rest, eps=config.adam_eps)}
    return build_optimizers(model.named_parameters(), optimizer_table(config), factories)


def set_schedule(config: Config, optimizers: dict[str, Any], step: int) -> None:
    """Give the optimizers the learning rates and the momentum of this step."""
    multiplier = learning_rate(config, step)
    for name, peak in (("matrix", config.matrix_lr), ("adam", config.adam_lr)):
        for group in optimizers[name].param_groups:
            group["lr"] = peak * multiplier
            if "momentum" in group:
                group["momentum"] = momentum(config, step)


# ---- A session: what all trials share

@dataclass
class Session:
    config: Config
    machine: environment.Machine
    model: GPT
    optimizers: dict[str, Any]
    guard: Guard  # takes the optimizers' steps
    data: Data
    ledger: Ledger
    facts: dict[str, Any]  # fields of the log's header
    loss: Callable[..., Tensor]  # the model, compiled or not
    peak: tuple[float, str]  # FLOP/s of all ranks, and what they are
    requests: Requests  # of single ranks to all
    memory: MemoryPlan
    steps_done: int = 0  # of the trial that runs

    def windows(self, long: int, short: int | None = None) -> Windows:
        """The windows of both kinds of layer, from blocks; the short one is half of the long one unless given."""
        block = self.config.window_block
        tokens = {"short": (short or max(long // 2, 1)) * block, "long": long * block}
        unlimited = max(self.config.sequence, self.config.val_sequence)
        return {kind: self.model.attention.window(count or unlimited) for kind, count in tokens.items()}

    def final_windows(self) -> Windows:
        """Those of the last validation: a longer long window, the short one as in the last step."""
        return self.windows(self.config.final_window, max(window(self.config, self.config.steps) // 2, 1))

    def reset(self, seed: int) -> None:
        """Everything that a run changes, as it is before the first step."""
        self.model.initialize(seed)
        for parameter in self.model.parameters():
            parameter.grad = None
            if self.machine.world_size > 1:
                torch.distributed.broadcast(parameter.data, 0)
        self.steps_done = 0
        for part in (self.guard, *self.optimizers.values()):
            part.reset()
        set_schedule(self.config, self.optimizers, 0)
        self.data.train.reset()

    def whole(self) -> Whole:
        """All that a run changes. With the parameters go the rotary embedding's numbers, which move with the window."""
        rotary = {f"rotary.{name}": getattr(self.model.rotary, name) for name in ("frequency", "scale")}
        weights = dict(self.model.named_parameters()) | rotary
        return Whole(weights, self.optimizers, self.guard, self.data.train, self.machine)

    def header(self, trial: Trial | None = None) -> dict[str, Any]:
        """What the log says of a run before its first step."""
        micro_rows = self.data.micro_rows
        batch = {"micro_batch": micro_rows * self.config.sequence, "grad_accum": self.data.train.rows // micro_rows}
        return self.facts | batch | ({"seed": trial.seed, "trial": trial.number} if trial else {})


def prepare(config: Config, machine: environment.Machine) -> Session:
    """Data, model, optimizers and the numbers derived from them. Raises ValueError for whatever cannot work."""
    ledger = Ledger(machine.synchronize)
    ledger.start("setup", timed=False)
    seeds = list(range(config.seed, config.seed + config.trials))
    if machine.device.type == "cpu" and config.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow, never read
    machine.on_main(lambda: require_writable(config.log_dir))
    settings = dataclasses.asdict(config)
    claim = machine.on_main(lambda: admit(config.claim, SOURCE, settings, seeds))
    environment.check_compile(config.compile, machine.device)
    dtype = environment.compute_dtype(config.dtype, machine.device)
    attention, reason = choose_attention(config.attention, machine.device, dtype, config.head_dim)
    head, why = choose_head(config.head, machine.device, dtype, config.dim, config.padded_vocab, config.biases)

    def build(config: Config) -> Built:
        model = GPT(config, dtype, torch.device("meta"), attention, head)
        owned, every = (make_optimizers(config, model, m).values() for m in (machine, machine.alone()))
        loss = partial(model, windows=dict.fromkeys(("short", "long"), attention.window(1)), longest=config.sequence)
        return Built(loss, Guard(every).step, [*model.parameters()], [*owned], reach(config))

    memory = plan_memory(config, machine, build)

    def look() -> tuple[Data, dict[str, Any] | None]:  # the first process of a machine reads for all of it
        data, found = open_audited(settings, machine.rank, machine.world_size, audited=machine.first_of_its_host)
        return data.in_parts(config.val_batch, reach(config)), found and found | {"source_sha256": source_hash(SOURCE)}

    data, found = machine.agree(look)
    model = GPT(config, dtype, machine.device, attention, head)
    optimizers = make_optimizers(config, model, machine)
    peak = environment.peak_flops(machine, dtype)
    facts = {
        "track": config.track, "target": config.target, "claim": claim, "seeds": seeds, "config": settings,
        "config_sha256": config_hash(settings), "source_sha256": found.pop("source_sha256"),
        "checks": {"overlap": found.pop("overlap")}, "data": found | {"val_tokens": config.val_tokens},
        "world_size": machine.world_size,
        "env": environment.describe(machine, dtype) | {"attention": attention.name, "head": head},
    }  # fmt: skip
    spike = SpikeRule(sigma=config.spike_sigma) if config.guard == "spikes" else None
    guard = Guard(optimizers.values(), spike=spike, nonfinite=config.guard != "off")
    session = Session(
        config, machine, model, optimizers, guard, data, ledger, facts, loss=model, peak=peak,
        requests=Requests(machine.device), memory=memory,
    )  # fmt: skip
    session.reset(config.seed)
    ledger.stop()
    batch, handicaps = session.header(), environment.handicaps(machine, dtype)
    machine.say(
        f"track {config.track}, recipe {config.recipe}: {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{config.steps:,} steps of {config.batch_tokens:,} tokens = {machine.world_size} rank(s) x "
        f"{batch['grad_accum']} micro-step(s) x {batch['micro_batch']:,}\n{config.data_dir}: training on "
        f"{data.plan.tokens_needed:,} of {data.plan.tokens_available:,} tokens, validating on {config.val_tokens:,}\n"
        f"{machine.device.type}, {facts['env']['dtype']}, attention {attention.name} ({reason}), head {head} ({why}), "
        + "\n".join([f"peak {peak[0] / 1e9:,.0f} GFLOP/s ({peak[1]})", optimizers["matrix"].describe(), *handicaps])
    )
    return session


def batch_loss(session: Session, batch: Batch, windows: Windows, longest: int) -> Tensor:
    return session.loss(*batch.to(session.machine.device), windows, longest)


def forward_backward(session: Session, windows: Windows) -> Tensor:
    """Sums the gradients of a step's batch into .grad; returns all ranks' message: mean loss, flags of requests."""
    total = torch.zeros((), device=session.machine.device)
    for batch in next(session.data.train):
        loss = batch_loss(session, batch, windows, session.data.longest)
        loss.backward()
        total += loss.detach()
    message = session.machine.all_reduce(session.requests.send(total))
    message[0] /= session.config.batch_tokens
    return message


def optimizer_steps(session: Session, step: int, message: Tensor) -> Tensor:
    """Hidden matrices move on every step, other parameters on every `adam_every`-th with the gradients summed.

    The guard needs the loss of all ranks, which begins the message. Returns its verdict, unread.
    """
    set_schedule(session.config, session.optimizers, step)
    matrix, adam = session.optimizers["matrix"], session.optimizers["adam"]
    stepping = [matrix, adam] if (step + 1) % session.config.adam_every == 0 else [matrix]
    verdict = session.guard.step(message[0], only=stepping)
    for optimizer in stepping:
        optimizer.zero_grad(set_to_none=True)
    return verdict


@torch.no_grad()
def validate(session: Session, windows: Windows, batches: list[Batch] | None = None) -> float:
    """Mean loss over the validation tokens, nats."""
    total = torch.zeros((), dtype=torch.float64, device=session.machine.device)
    for batch in session.data.validation if batches is None else batches:
        total += batch_loss(session, batch, windows, session.data.val_longest)
    return session.machine.all_reduce(total).item() / session.config.val_tokens


# ---- Warm-up, outside the clock: every graph is compiled and run once, then all state is as if nothing had been

def compile_model(session: Session) -> None:
    """Compile, or say in one line why not and run eagerly; with --micro-batch auto find what fits the memory."""

    def first_step(loss: Callable[..., Tensor]) -> None:
        session.loss = loss
        while not environment.fits(partial(probe, session), session.machine, must=bool(session.config.micro_batch)):
            if session.data.micro_rows == 1:
                raise MemoryError("the memory does not suffice for a single row")
            session.data.split(session.data.micro_rows // 2 * session.config.sequence)
            session.machine.say(f"out of memory: micro-batch {session.header()['micro_batch']:,}; the batch stays")

    obstacle = environment.try_compile(session.model, session.config.compile, session.machine, first_step)
    if obstacle is not None:
        session.machine.say(f"not compiled, slower ({obstacle}); --compile on makes this an error")
        first_step(session.model)
    session.facts["env"] |= {"compiled": obstacle is None} | environment.compile_facts()


def probe(session: Session) -> None:
    """What takes most memory, on this rank alone: a micro-batch beside the gradients of another, then validation."""
    windows = session.windows(session.config.windows[0])
    session.data.train.reset()
    for batch in 2 * next(session.data.train)[:1]:
        batch_loss(session, batch, windows, session.data.longest).backward()
    with torch.no_grad():
        for batch in sorted(session.data.validation, key=lambda batch: batch.inputs.numel())[-1:]:
            batch_loss(session, batch, windows, session.data.val_longest)


def warm_up(session: Session) -> None:
    """Take every kind of step and validation once, check causality, restore everything and check that."""
    config = session.config
    with session.ledger.phase("compile", timed=False):
        before = session.whole().bits()
        compile_model(session)
    with session.ledger.phase("warmup", timed=False):
        previous = config.windows[0]
        take_steps(session, previous, 2 * config.adam_every)  # some get gradients only once the head has moved
        for long in dict.fromkeys(window(config, step) for step in range(config.steps)):
            session.model.rotary.extend(previous, long)
            take_steps(session, long, 1)
            previous = long
        shapes = {tuple(part.shape for part in batch): batch for batch in session.data.validation}
        validate(session, session.final_windows(), [*shapes.values()])
        causal = sees_no_future(session)
        session.reset(config.seed)
        restored = same_bits(before, session.whole().bits())
    session.facts["checks"] |= {"causality": causal, "warmup_restored": restored}
    if not (causal and restored):
        raise RuntimeError(f"checks failed, the run would not be what its log says: {session.facts['checks']}")


def take_steps(session: Session, long: int, count: int) -> None:
    """Steps that are no part of a run, on its first tokens."""
    session.data.train.reset()
    for step in range(count):
        optimizer_steps(session, step, forward_backward(session, session.windows(long)))


def dry_run(session: Session) -> int:
    """What a run would need and take, from real steps at each window; 0 to go, 2 not to."""
    config, steps, every = session.config, range(session.config.steps), session.config.adam_every
    stages = {
        f"window {long * config.window_block}": Stage(count, every, partial(take_steps, session, long, every))
        for long, count in Counter(window(config, step) for step in steps).items()
    }
    check, validations = partial(validate, session, session.final_windows()), map(partial(validates, config), steps)
    return rehearse(session.machine, config, session.memory, stages, check, 1 + sum(validations), session.ledger)


def sees_no_future(session: Session) -> bool:
    """Whether the stream of a row's first half is the same whatever the second half is, with random weights."""
    length = min(session.config.sequence, session.config.val_sequence)
    inputs = next(session.data.train)[0].inputs[:1, :length].to(session.machine.device)
    rows = torch.tensor([0, length], dtype=torch.int32, device=session.machine.device)
    model, windows, vocab_size = session.model, session.final_windows(), session.config.vocab_size
    model.initialize(session.config.seed)
    return is_causal(lambda tokens: model.hidden(tokens, rows, windows, length), model.parameters(), inputs, vocab_size)


# ---- A trial: one run from initialization to the last validation

def evaluate(session: Session, run: Run, step: int, windows: Windows) -> float:
    """The validation loss before this step, outside the clock and on all ranks; raises NonFinite."""
    with run.ledger.phase("validate", timed=False):
        val_loss = validate(session, windows)
    return run.validated(step, val_loss)


def train(session: Session, run: Run) -> float:
    """One run, from where it is to its end; returns the last validation loss."""
    config, machine, ledger = session.config, session.machine, run.ledger
    mfu_rate = session.model.flops_per_token() / session.peak[0]
    locate = partial(run.locate, session.data.train)
    progress = Progress(run.log, machine.say, session.guard.explain, locate, session.requests, config.steps, mfu_rate)
    progress.go_on(session.guard.report()["in_a_row"])
    previous, stepped_at = window(config, max(session.steps_done - 1, 0)), run.resume_clock()
    for step in range(session.steps_done, config.steps):
        long = window(config, step)
        session.model.rotary.extend(previous, long)
        # once in a while: evaluate, with the clock stopped
        if validates(config, step):
            ledger.stop()
            progress.write(wait=True)
            evaluate(session, run, step, session.windows(long))
            stepped_at = run.resume_clock()
        # step: gradients of the whole batch, then one update
        message = forward_backward(session, session.windows(long))
        verdict = optimizer_steps(session, step, message)
        previous, session.steps_done = long, step + 1
        run.stepped(step + 1)
        # log: no wait for the device, the loss is read when it is there
        now = ledger.train_time_ms
        event = {
            "step": step + 1, "tokens": (step + 1) * config.batch_tokens, "train_time_ms": now,
            "step_ms": now - stepped_at, "lr_mul": learning_rate(config, step),
            "window": long * config.window_block, "stage": stage(config, step),
        }  # fmt: skip
        progress.step_done(event, message, verdict)
        stepped_at = now
        # save, or end: only where no gradients are left for a later step
        if (step + 1) % config.adam_every == 0 and (run.due() or progress.failure):
            ledger.stop()
            progress.write(wait=True)
            run.save(session.whole(), progress.failure)
            stepped_at = run.resume_clock()
    ledger.stop()
    progress.close()
    return evaluate(session, run, config.steps, session.final_windows())


def run_trial(session: Session, trial: Trial, watch: Watch) -> int:
    """One run with its log and checkpoints, new or from where it was broken off; returns the exit code."""
    session.reset(trial.seed)
    if trial.resume and trial.resume.checkpoint:
        session.steps_done = session.whole().load(trial.snapshot(session.machine.is_main))["step"]
        session.model.rotary.fill()
    header = session.header(trial)
    with Run(trial, session.config, session.machine, session.requests, watch, header, SOURCE) as run:
        run.begin(session.ledger.phases)
        run.finish(train(session, run), session.whole())
    return run.code


def make_runs(config: Config, machine: environment.Machine, watch: Watch, started: float) -> int:
    """All runs that are left to make, one after the other; the exit code of the first that fails."""
    try:
        with signs_of_life("getting ready", machine.say):
            session = prepare(config, machine)
            trials = machine.on_main(lambda: plan_trials(config, session.header(), machine.say))
    except ValueError as error:
        return environment.refuse(error, 2)
    if not trials:
        return 0
    with session.data.train:
        with signs_of_life("warming up", machine.say):
            warm_up(session)
        if config.dry_run:
            return dry_run(session)
        session.facts["env"]["ready_s"] = time.time() - started
        machine.say(f"ready for the first step after {session.facts['env']['ready_s']:.0f} s")
        with session.requests, environment.without_garbage_collection():
            return next(filter(None, (run_trial(session, trial, watch) for trial in trials)), 0)


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 error, 2 bad input or no go, 3 non-finite, 130 or 143 interrupted and saved."""
    listen()
    try:
        try:
            started = float(os.environ.get("RUN_STARTED") or time.time())  # run.sh counts from its own start
            config = parse(Config, sys.argv[1:] if argv is None else argv, preset, __doc__ or "")
            machine = environment.start(config.device, config.rank_timeout)
        except ValueError as error:
            return environment.leave(environment.refuse(error, 2))
        with Watch(machine, config.rank_timeout) as watch, explained(watch, ShardError):
            code = make_runs(config, machine, watch, started)
    except Interrupted as signalled:
        code = signalled.code
    except Fault as error:
        code = environment.refuse(error, 2 if config.dry_run else 1)
    return environment.leave(code)


if __name__ == "__main__":
    sys.exit(main())
