"""Train a GPT to a target validation loss on as few tokens, or in as little time, as possible.

    torchrun --nproc_per_node=8 train_gpt.py              # `short` on GPUs, `tiny` without one
    python train_gpt.py --track small                     # the race, on any machine
    python train_gpt.py --track tiny --recipe adamw --trials 3

A run is set-up, compilation and warm-up, then steps with a validation now and then. The clock
counts training steps, data loading and checkpoints. It does not count set-up, compilation, warm-up
or validation. Warm-up restores all state and compares it bit for bit. Most pieces are those of the
records of modded-nanogpt. On any number of ranks a run takes the same trajectory up to rounding.
"""

import hashlib
import math
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch is imported ends quietly
    from runtime.openmp import spin_briefly

    spin_briefly()  # before torch is imported

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import optim
from data import prose
from data.copied import means, sum_and_count, sums_by_kind
from data.loader import Batch, Data, Order
from data.sampling import generate
from data.shards import ShardError, audit
from data.tokenizers import read_prefixes, read_tokenizer, require_tokenizer, tokenizer_of
from kernels.attention import ATTENTIONS, Attention, choose_attention
from kernels.eager import lookup, rms_norm, squared_relu
from kernels.head import HEADS, capped, choose_head, linear_cross_entropy, plain_cross_entropy
from kernels.lookups import ngrams, random_signs, several_targets, sign_rows
from runtime import machine as machines
from runtime.checkpoint import plan_runs
from runtime.claim import check_claim, provenance
from runtime.clock import Clock
from runtime.ending import Stop, leave, listen, supervise
from runtime.errors import Refused
from runtime.log import require_folders, source_hash
from runtime.machine import Machine
from runtime.run import Run
from runtime.settings import RunSettings, as_text, parse, require, require_packages, setting
from runtime.terminal import closing, summary
from runtime.warmup import check_trained_model, dry_run, warm_up

SOURCE = Path(__file__).resolve().parent

# ---- Layers and stages: the shape of the model, and what changes in the course of a run


@dataclass(frozen=True)
class Layer:
    """One layer. A table of them is the model's shape."""

    attention: bool = True
    window: str = "short"  # or "long"
    value_embed: int | None = None  # table whose rows are added to this layer's values
    skip_from: int | None = None  # earlier layer; a learned share of its output joins the input
    backout: bool = False  # a share of this layer's output is subtracted at the end; one layer
    reads: int | None = None  # earlier layer whose output this layer's attention reads
    paired: bool = False  # two heads share a row of twice the length; windows reach half as far
    mixes: int | None = None  # MixingBlock, with this earlier layer; needs value_embed and backout


LAYERS = {
    "record42": [
        Layer(value_embed=1),  # 0
        Layer(value_embed=2),
        Layer(),
        Layer(window="long"),
        Layer(),  # 4
        Layer(skip_from=4),
        Layer(attention=False, skip_from=3),
        Layer(skip_from=2, backout=True),
        Layer(value_embed=0, skip_from=1),  # 8
        Layer(value_embed=1, skip_from=0),
        Layer(window="long", value_embed=2),
    ],
    "record89": [
        Layer(paired=True),  # 0
        Layer(value_embed=0),
        Layer(value_embed=1, paired=True),
        Layer(window="long"),
        Layer(),  # 4
        Layer(paired=True),
        Layer(attention=False, skip_from=3),
        Layer(backout=True),
        Layer(value_embed=2, reads=7),  # 8
        Layer(value_embed=3, reads=7, paired=True),
        Layer(window="long", value_embed=4, reads=7, mixes=3),
    ],
    "steps": [Layer(window="long")] * 12,
    "small": [
        Layer(value_embed=1),  # 0
        Layer(value_embed=2),
        Layer(window="long"),
        Layer(),
        Layer(attention=False, skip_from=2),  # 4
        Layer(value_embed=0, skip_from=1, backout=True),
        Layer(value_embed=1, skip_from=0),
        Layer(window="long", value_embed=2),
    ],
    "small89": [
        Layer(paired=True),  # 0
        Layer(value_embed=0),
        Layer(window="long"),
        Layer(paired=True),
        Layer(attention=False, skip_from=2),  # 4
        Layer(backout=True),
        Layer(value_embed=1, reads=5, paired=True),
        Layer(window="long", value_embed=2, reads=5),
    ],
    "plain8": [Layer(), Layer(), Layer(window="long"), *[Layer()] * 4, Layer(window="long")],
}


@dataclass(frozen=True)
class Stage:
    """One part of a run. A table of them is the schedule; the shares add up to 1."""

    share: float  # of the steps
    short: int  # window of short layers, in blocks
    long: int  # window of long layers, in blocks
    batch: float = 1.0  # tokens of a step, as a share of batch_tokens
    document: int | None = None  # documents are cut to this length; None: to max_document
    lr: float = 1.0  # factor on the peak of every learning rate; final_lr is not changed by it
    tied: bool = False  # the token embedding is the output head too
    # Weights of the losses on the tokens after the next one, each at the stage's start and end.
    ahead: tuple[tuple[float, float], ...] = ()
    prefix: tuple[float, float] = (0.0, 0.0)  # of the loss on the next token's longest prefix
    extension: bool = False  # after the schedule: the learning rate stays at its floor


STAGES = {
    "constant": [Stage(1.0, short=10, long=20)],
    # Three equal stages with growing windows, then 40 of 2285 steps of extension.
    "record42": [
        Stage(2245 / 6855, short=1, long=3),
        Stage(2245 / 6855, short=3, long=7),
        Stage(2245 / 6855, short=5, long=11),
        Stage(40 / 2285, short=6, long=13, extension=True),
    ],
    "record89": [
        Stage(424 / 1285, short=1, long=3, batch=1 / 3, document=896, tied=True,
              ahead=((0.5, 0.5), (0.25, 0.0)), prefix=(0.25, 0.25)),
        Stage(422 / 1285, short=3, long=7, batch=2 / 3, lr=1.52, tied=True,
              ahead=((0.5, 0.0),), prefix=(0.25, 0.0)),
        Stage(424 / 1285, short=5, long=11, lr=1.73),
        Stage(15 / 1285, short=6, long=13, extension=True),
    ],
    "tiny": [Stage(0.4, short=1, long=3), Stage(0.6, short=3, long=8)],
    # On `small`, losses on later tokens cost more than they give: records/LOG.md.
    "small89": [
        Stage(424 / 1285, short=1, long=3, batch=1 / 3, document=896, tied=True),
        Stage(422 / 1285, short=3, long=7, batch=2 / 3, lr=1.52, tied=True),
        Stage(424 / 1285, short=5, long=11, lr=1.73),
        Stage(15 / 1285, short=6, long=13, extension=True),
    ],
}  # fmt: skip

# ---- Configuration. The defaults are those of `short`. A run's own flags: runtime/settings.py

METHODS = ("polar_express", "newton_schulz", "newton_schulz_12")
OPTIMIZERS = ("normuon", "muon", "adamw", "torch_muon", "torch_adamw")
SOFTCAPS = {  # kind, height, width, shift
    "sigmoid": ("sigmoid", 30.0, 7.5, 0.0),
    "rsqrt": ("rsqrt", 15.0, 15.0, 0.0),
    "shifted": ("sigmoid", 23.0, 7.5, 5.0),
}


@dataclass(frozen=True)
class Config(RunSettings):
    track: str = setting("short", "preset: defaults of all flags", section="What is run, and where")
    recipe: str = setting("record42", "variant of the track: its pieces and rates")
    target: float = setting(3.28, "validation loss to reach, nats per token")
    device: str = setting("auto", "where to compute", one_of=machines.DEVICES)
    dtype: str = setting("auto", "of the computation", one_of=("auto", "bfloat16", "float32"))
    attention: str = setting("auto", "attention backend", one_of=ATTENTIONS)
    loss_kernel: str = setting("auto", "how the loss is computed; auto: fastest", one_of=HEADS)
    activation_checkpointing: bool = setting(False, "recompute activations: less memory, slower")
    compile: str = setting("auto", "auto: on GPUs by CUDA", one_of=("auto", "on", "off"))

    vocab_size: int = setting(50257, "tokens of the vocabulary", at_least=1, section="Data")
    bos: int = setting(50256, "token that precedes each document", below="vocab_size")
    document_mask: bool = setting(True, "rows begin with bos; attention stays in a document")
    batch_tokens: int = setting(262_144, "tokens of a step, on all ranks", a_multiple_of="seq_len")
    seq_len: int = setting(32_768, "tokens of a row; ranks take whole rows", at_least=2)
    micro_batch: int = setting(32_768, "tokens of a micro-step", a_multiple_of="seq_len")
    max_document: int = setting(2048, "longest document; a stage may set its own", at_least=1)
    data_start: float = setting(0.0, "share of the first training shard passed over", below=1)
    val_tokens: int = setting(10_485_760, "validation tokens used", a_multiple_of="val_seq_len")
    val_seq_len: int = setting(262_144, "tokens of a validation row", at_least=2)
    val_batch: int = setting(262_144, "targets validated at once, at most", at_least="seq_len")
    val_sha256: str = setting("", "first digits of the validation tokens' SHA-256")
    val_every: int = setting(250, "steps between validations; 0: only the last")
    val_every_late: int = setting(0, "val_every in the last tenth; 0: no change")

    layers: str = setting("record42", "table of layers", section="Model")
    dim: int = setting(768, "model dimension", at_least=12, a_multiple_of="head_dim")
    head_dim: int = setting(128, "dimension of an attention head", at_least=2, a_multiple_of=2)
    mlp_ratio: int = setting(4, "width of an MLP, as a multiple of dim", at_least=1)
    keep_float32: str = setting("none", "parts kept in float32", one_of=("none", "head", "all"))
    attention_scale: float = setting(0.1, "factor on query-key products at the start")
    smear: bool = setting(True, "each embedding takes a gated share of the one before it")
    x0_mixing: bool = setting(True, "each layer mixes the token embedding back in")
    attention_gates: bool = setting(True, "a sigmoid gate on each head's output")
    value_gates: bool = setting(False, "a gate of each head on its value embedding")
    stream_init: float = setting(1.0, "initial factor on a layer's input (x0_mixing)")
    embed_std: float = setting(1.0, "standard deviation of initial token embeddings")
    value_embed_std: float = setting(1.0, "standard deviation of initial value embeddings")
    key_offset: bool = setting(False, "long layers: half of a key is that of the token before")
    bigram_rows: float = setting(0.0, "rows of an n-gram table for each token; 0: none")
    ngrams: int = setting(2, "longest n-gram in it; 2: bigrams only", at_least=2, at_most=4)
    bigram_signs: bool = setting(False, "bigrams that share a row get random signs")
    xsa: bool = setting(False, "subtract a learned share along the token's own value")
    zero_output: bool = setting(True, "attention's initial output matrix is 0")
    biases: bool = setting(False, "biases on linear maps and gains on norms")
    prefixes: bool = setting(False, "also predict the longest token that begins the next")
    softcap: str = setting("sigmoid", "soft cap of the logits", one_of=tuple(SOFTCAPS))
    init: str = setting("uniform", "of hidden matrices", one_of=("uniform", "normal"))

    steps: int = setting(2285, "optimizer steps", at_least=1, section="Schedules")
    stages: str = setting("record42", "table of stages")
    window_block: int = setting(128, "unit of windows, in tokens; 0: no windows")
    val_window: int = setting(2560, "tokens long layers see in the last validation", at_least=1)
    cooldown: float = setting(0.5, "last share of the steps, where rates fall", at_most=1)
    final_lr: float = setting(0.1, "learning rate at the end, as a share of its peak")
    momentum: tuple[float, float] = setting((0.85, 0.95), "at the ends and in the middle", below=1)
    momentum_warmup: int = setting(300, "steps in which momentum rises")
    momentum_cooldown: int = setting(50, "steps in which momentum falls")

    optimizer: str = setting("normuon", "of matrices", one_of=OPTIMIZERS, section="Optimizers")
    matrix_lr: float = setting(0.03, "learning rate of hidden matrices")
    matrix_wd: float = setting(0.0, "weight decay of hidden matrices, times matrix_lr")
    matrix_beta2: float = setting(0.95, "second-moment decay of normuon and adamw", below=1)
    cautious_wd: bool = setting(False, "decay by lr^2, only where it and the update agree in sign")
    ortho_method: str = setting("polar_express", "orthogonalization", one_of=METHODS)
    ortho_backend: str = setting("plain", "its backend", one_of=("auto", "plain", "triton"))
    muon_head_pairs: bool = setting(False, "orthogonalize Q and K by pairs of heads")
    mlp_up_lr_mul: float = setting(2.0, "multiplier for the MLPs' first matrices")
    mlp_down_lr_mul: float = setting(1.0, "multiplier for the MLPs' second matrices")
    adam_lr: float = setting(0.008, "learning rate of AdamW, for all other parameters")
    adam_betas: tuple[float, float] = setting((0.65, 0.95), "of AdamW", below=1)
    adam_eps: float = setting(1e-8, "of AdamW; gradients are sums over a row")
    adam_wd: float = setting(0.0, "weight decay of AdamW, times the learning rate")
    adam_accum_steps: int = setting(2, "steps that AdamW sums up", at_least=1, at_most=16)
    embed_lr_mul: float = setting(75.0, "multiplier for the token embedding")
    embed_wd_mul: float | None = setting(None, "for embed's and head's decay; auto: lr_mul")
    value_embed_lr_mul: float = setting(75.0, "multiplier for value embeddings and bigrams")
    value_embed_wd_mul: float | None = setting(None, "for decay; auto: its lr_mul")
    value_embed_betas: tuple[float, float] | None = setting(None, "auto: adam_betas", below=1)
    head_lr_mul: float = setting(1.0, "multiplier for the output head")
    vector_lr_mul: float = setting(5.0, "multiplier for scalars, biases and gains")
    vector_wd_mul: float | None = setting(None, "for decay; auto: its lr_mul")
    vector_betas: tuple[float, float] | None = setting(None, "auto: adam_betas", below=1)
    gates: str = setting("matrix", "optimizer of gates", one_of=("matrix", "adam"))
    guard: str = setting("spikes", "steps to skip", one_of=("spikes", "nonfinite", "off"))
    spike_sigma: float = setting(6.0, "spreads above the median that make a spike", at_least=1)

    def __post_init__(self) -> None:
        recipes = RECIPES.get(self.track, {})
        tables: Any = {"track": TRACKS, "recipe": recipes, "layers": LAYERS, "stages": STAGES}
        for name, table in tables.items():
            require(self, name, getattr(self, name) in table, f"one of {', '.join(table)}")
        super().__post_init__()  # the rules written beside the settings
        if changed := off_track(self):
            require(self, "claim", not self.claim, f"empty, as {'; '.join(changed)}")
        by_torch = self.cautious_wd and self.optimizer.startswith("torch")
        require(self, "cautious_wd", not by_torch, f"off for --optimizer {self.optimizer}")
        heads = self.dim // self.head_dim
        even, why = heads % 2 == 0, f"as --dim / --head-dim = {heads} is odd"
        paired = any(layer.paired for layer in LAYERS[self.layers])
        require(self, "layers", even or not paired, f"without paired heads, {why}")
        require(self, "muon_head_pairs", even or not self.muon_head_pairs, f"off, {why}")
        value_tables = {layer.value_embed for layer in LAYERS[self.layers]} - {None}
        rule = "a table whose value_embed are 0, 1, 2 and so on"
        require(self, "layers", value_tables == set(range(len(value_tables))), rule)
        for index, stage in enumerate(STAGES[self.stages]):
            rows = stage.batch * self.batch_tokens / self.seq_len
            rule = f"a table of batches of whole rows; stage {index} has {rows:g} rows"
            require(self, "stages", abs(rows - round(rows)) < 1e-6 and round(rows) > 0, rule)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding tables: a multiple of 128, which matrix units like."""
        return math.ceil(self.vocab_size / 128) * 128


# The plain GPT, beside a plain table of layers: what record 42 adds to it, switched off.
PLAIN: dict[str, Any] = {
    "smear": False, "x0_mixing": False, "attention_gates": False, "stages": "constant",
    "adam_accum_steps": 1,
}  # fmt: skip

# The public contest in miniature, on prose: its layers, windows and stages.
SMALL: dict[str, Any] = {
    "recipe": "record89", "target": 3.36, "val_sha256": "be27130d408f4ce8",
    "data_dir": "data/prose", "vocab_size": 2048, "bos": 2047, "loss_kernel": "plain",
    "layers": "small", "dim": 128, "head_dim": 32, "attention_scale": 0.2, "val_window": 640,
    "keep_float32": "all", "batch_tokens": 6144, "seq_len": 512, "micro_batch": 6144,
    "max_document": 512, "val_tokens": 262_144, "val_seq_len": 4096, "val_batch": 16_384,
    "val_every": 300, "steps": 900, "window_block": 32, "momentum_warmup": 120,
    "momentum_cooldown": 20, "sample_tokens": 100,
}  # fmt: skip

TRACKS: dict[str, dict[str, Any]] = {
    "short": {},
    # Track 3 of the public contest: fewest steps of a plain GPT-2 with Muon.
    "steps": PLAIN | {
        "loss_kernel": "plain", "layers": "steps", "biases": True, "keep_float32": "head",
        "document_mask": False, "batch_tokens": 524_288, "seq_len": 1024, "micro_batch": 65_536,
        "val_seq_len": 1024, "val_batch": 65_536, "val_every": 125, "val_every_late": 25,
        "attention_scale": 0.12, "softcap": "rsqrt", "init": "normal", "steps": 3250,
        "cooldown": 0.7, "final_lr": 0.0, "window_block": 0, "optimizer": "muon",
        "matrix_lr": 0.025, "matrix_wd": 0.05, "ortho_method": "newton_schulz_12",
        "momentum": (0.95, 0.95), "adam_lr": 0.7, "adam_betas": (0.8, 0.95), "adam_eps": 1e-10,
        "adam_wd": 0.001, "embed_lr_mul": 1.0, "head_lr_mul": 0.004 / 0.7,
        "vector_lr_mul": 0.015 / 0.7,
    },
    "small": SMALL,
    "tiny": SMALL | {
        "target": 4.8, "batch_tokens": 2048, "seq_len": 256, "micro_batch": 2048,
        "max_document": 256, "val_tokens": 16_384, "val_seq_len": 1024, "val_every": 16,
        "steps": 64, "momentum_warmup": 10, "momentum_cooldown": 3, "compile": "off",
    },
}  # fmt: skip

# Printed when a track starts.
ABOUT = {
    "tiny": "the hello, in a minute, without records. The race is small: ./run.sh --track small",
    "small": "the race: modded-nanogpt in miniature, on prose; docs/claims.md has its rule",
    "short": "modded-nanogpt's track 1, for GPUs. The race for any machine is small",
    "steps": "modded-nanogpt's track 3, for GPUs. The race for any machine is small",
}

# What records 43 to 89 changed, without their kernels and the gates by token of record 85.
RECORD89: dict[str, Any] = {
    "stages": "record89", "cooldown": 0.6, "final_lr": 0.15, "keep_float32": "all",
    "value_gates": True, "stream_init": 1.1, "key_offset": True, "bigram_rows": 7.5,
    "bigram_signs": True, "xsa": True, "zero_output": False, "embed_std": 0.005,
    "value_embed_std": 0.01, "softcap": "shifted", "prefixes": True, "cautious_wd": True,
    "matrix_wd": 1.2, "matrix_beta2": 0.9, "muon_head_pairs": True, "mlp_down_lr_mul": 4.0,
    "gates": "adam", "adam_betas": (0.5, 0.95), "adam_eps": 1e-10, "adam_wd": 0.005,
    "embed_lr_mul": 1.0, "embed_wd_mul": 150.0, "value_embed_betas": (0.75, 0.95),
    "value_embed_wd_mul": 5 * 75.0**2, "vector_betas": (0.9, 0.99), "vector_wd_mul": 0.0,
}  # fmt: skip

SMALL89: dict[str, Any] = RECORD89 | {
    "layers": "small89", "stages": "small89", "prefixes": False, "steps": 380,
    "momentum": (0.85, 0.9), "momentum_warmup": 51, "momentum_cooldown": 8,
    "matrix_lr": 0.04, "mlp_up_lr_mul": 1.0, "adam_lr": 0.016, "value_embed_lr_mul": 150.0,
    "bigram_rows": 192.0, "ngrams": 3, "val_every": 0,
}  # fmt: skip

# Baselines: the plain GPT with one optimizer for its matrices, and AdamW for the rest.
MUON = PLAIN | {"optimizer": "muon", "matrix_lr": 0.02, "adam_lr": 0.01}
ADAMW = PLAIN | {
    "optimizer": "adamw", "matrix_lr": 0.002, "matrix_wd": 0.1, "mlp_up_lr_mul": 1.0,
    "momentum": (0.9, 0.9), "adam_lr": 0.008, "embed_lr_mul": 40.0,
}  # fmt: skip

RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "short": {
        "record42": {},
        "record89": RECORD89 | {
            "layers": "record89", "steps": 1285, "batch_tokens": 393_216, "seq_len": 16_384,
            "micro_batch": 49_152, "matrix_lr": 0.023,
        },
    },
    "small": {  # tuned: records/LOG.md
        "record42": {"matrix_lr": 0.03, "adam_lr": 0.0112},
        "record89": SMALL89,
        "muon": MUON | {"layers": "plain8", "matrix_lr": 0.014, "adam_lr": 0.014},
        "adamw": ADAMW | {"layers": "plain8", "matrix_lr": 0.004, "adam_lr": 0.016},
    },
    "steps": {"record42": {}},
    "tiny": {
        "record89": SMALL89 | {
            "stages": "tiny", "steps": 64, "momentum_warmup": 10, "momentum_cooldown": 3,
            "matrix_lr": 0.05, "adam_lr": 0.024, "adam_accum_steps": 1, "bigram_rows": 10.0,
            "ngrams": 2, "val_every": 16,
        },
        "muon": MUON | {"layers": "plain8", "matrix_lr": 0.014, "adam_lr": 0.014},
        "adamw": ADAMW | {"layers": "plain8", "matrix_lr": 0.004, "adam_lr": 0.016},
    },
}  # fmt: skip


# What a claim may not change; with SIZES the number of layers too. The judge has a
# list of its own. Stages may use smaller batches; training windows, lookups, gates are free.
TASK = ("target", "vocab_size", "bos", "val_tokens")
SCORED = (*TASK, "document_mask", "val_seq_len", "val_window")
SIZES = ("dim", "head_dim", "mlp_ratio", "batch_tokens")
FIXED = {
    "short": TASK,
    "small": (*SCORED, *SIZES, "val_sha256"),
    "tiny": (*SCORED, *SIZES, "val_sha256"),
    "steps": SCORED + SIZES + (
        "layers", "seq_len", "window_block", "stages", "biases", "softcap", "attention_scale",
        "smear", "x0_mixing", "attention_gates", "key_offset", "bigram_rows", "xsa",
    ),
}  # fmt: skip


def off_track(config: Config) -> list[str]:
    """For each setting that the track fixes and that differs here: what it is and should be."""
    track: dict[str, Any] = {field.name: field.default for field in fields(Config)}
    track |= TRACKS[config.track]
    found = []
    for name in FIXED.get(config.track, ()):
        value = getattr(config, name)
        if value != track[name]:
            now = as_text(value) or "empty"
            found.append(f"{name} is {now}, the track has {as_text(track[name])}")
    depth, wanted = len(LAYERS[config.layers]), len(LAYERS[track["layers"]])
    if set(SIZES) <= set(FIXED.get(config.track, ())) and depth != wanted:
        found.append(f"layers is {config.layers}, {depth} layers; the track has {wanted}")
    return found


def preset(given: dict[str, Any]) -> dict[str, Any]:
    """Defaults for settings that are not given: the track's, overridden by the recipe's."""
    gpu = given.get("device") not in ("cpu", "mps") and torch.cuda.is_available()
    track = given.get("track", "short" if gpu else "tiny")
    settings = {"track": track, "recipe": "record42"} | TRACKS.get(track, {})
    recipe = given.get("recipe", settings["recipe"])
    return settings | RECIPES.get(track, {}).get(recipe, {})


# ---- Schedule: all that holds at a step, as a pure function. At step s, s steps are done.


class Span(NamedTuple):
    """A stage and its steps, from `first` to before `end`."""

    first: int
    end: int
    stage: Stage


class Now(NamedTuple):
    """What holds at a step."""

    stage_index: int  # in `spans`; the last validation belongs to the last span
    stage: Stage
    batch_tokens: int
    lr: float  # factor on the peak of every learning rate, cooldown included
    momentum: float  # of the hidden matrices
    adam_steps: bool  # Adam takes a step, on the gradients of the last `adam_accum_steps` steps
    windows: dict[str, int]  # tokens that "short" and "long" layers see
    loss_weights: list[float]  # of the next token, of those after it, and of its prefix if used
    unties: bool  # the output head leaves the token embedding before this step
    new_scale: bool  # losses and gradients change their size here: the guard forgets the normal
    validates: bool  # before this step, or after the last one


@cache
def spans(config: Config) -> list[Span]:
    """The stages that have steps."""
    found, first, share = [], 0, 0.0
    stages = STAGES[config.stages]
    for stage, after in pairwise([*stages, stages[-1]]):  # nothing changes after the last one
        share += stage.share
        end = math.ceil(share * config.steps - 1e-6)  # 1e-6 undoes the rounding of the sum
        if (stage.batch, stage.tied) != (after.batch, after.tied):
            # Adam must not sum gradients of two batches that count differently.
            every = config.adam_accum_steps
            end = min(math.ceil(end / every) * every, config.steps)
        if end > first:
            found.append(Span(first, end, stage))
            first = end
    return found


@cache
def at(config: Config, step: int) -> Now:
    index = sum(step >= span.first for span in spans(config)) - 1  # the last that has begun
    first, end, stage = spans(config)[index]
    before = spans(config)[max(index - 1, 0)].stage  # of the first span: itself
    # Not share, lr and extension: these move no loss by themselves.
    fields = ["batch", "document", "tied", "ahead", "prefix"]
    fields += ["short", "long"] if config.window_block else []
    changes = any(getattr(stage, name) != getattr(before, name) for name in fields)

    short, long = stage.short * config.window_block, stage.long * config.window_block
    if not config.window_block:  # no windows, but in the last validation
        short = long = max(config.seq_len, config.val_seq_len)
    if step == config.steps:  # the last validation
        short, long = min(short, config.val_window), config.val_window
    weights = [(1.0, 1.0), *stage.ahead]
    if config.prefixes and (stage.ahead or any(stage.prefix)):
        weights.append(stage.prefix)
    progress = (step - first) / (end - first)  # through the stage: weights change linearly
    late = config.val_every_late and step >= 0.9 * config.steps
    every = config.val_every_late if late else config.val_every

    return Now(
        stage_index=index,
        stage=stage,
        batch_tokens=round(stage.batch * config.batch_tokens),
        lr=learning_rate(config, stage.lr, step),
        momentum=momentum(config, step),
        adam_steps=(step + 1) % config.adam_accum_steps == 0,
        windows={"short": short, "long": long},
        loss_weights=[start + (last - start) * progress for start, last in weights],
        unties=step == first and before.tied and not stage.tied,
        new_scale=step == first and changes,
        validates=step == config.steps or (every > 0 and step % every == 0),
    )


def learning_rate(config: Config, peak: float, step: int) -> float:
    """Factor on every peak: it falls from the stage's to final_lr, and stays in the extension."""
    scheduled = max(span.end for span in spans(config) if not span.stage.extension)
    # 0.9999 as in record 42. It also keeps `left` above a cooldown of 0, so nothing divides by 0.
    left = 1 - min(step / scheduled, 0.9999)
    share = left / config.cooldown if left < config.cooldown else 1.0
    return peak * share + config.final_lr * (1 - share)


def momentum(config: Config, step: int) -> float:
    """It rises at the start and falls at the end."""
    low, high = config.momentum
    rising = step / config.momentum_warmup if config.momentum_warmup else 1.0
    left = config.steps - step
    falling = left / config.momentum_cooldown if config.momentum_cooldown else 1.0
    return low + (high - low) * min(rising, falling, 1.0)


def tokens_before(config: Config, step: int) -> int:
    return sum(at(config, earlier).batch_tokens for earlier in range(step))


def rotary_at(config: Config, index: int) -> tuple[Tensor, Tensor]:
    """Radians a token for each pair (D / 2,), half of them 0, and the factor () on queries.

    Both are float32 and hold in the span of this index. When the long window grows, YaRN
    (arXiv:2309.00071) slows the frequencies that turn less than once in the old window, keeps those
    over 32 turns, and raises the factor.
    """
    pairs = config.head_dim // 2
    turning = (1 / 1024) ** torch.linspace(0, 1, pairs // 2)
    frequency = torch.cat([turning, torch.zeros(pairs - pairs // 2)])  # 0: see `offset_keys`
    scale = torch.tensor(config.attention_scale)
    stages = [span.stage for span in spans(config)[: index + 1]]
    for before, now in pairwise(stages if config.window_block else ()):  # no window, no growth
        rotations = config.window_block * before.long * frequency / (2 * math.pi)
        kept = ((rotations - 1) / (32 - 1)).clamp(0, 1)
        ratio = before.long / now.long
        frequency = frequency * (ratio + kept * (1 - ratio))
        scale = scale * (1 + 0.2 * math.log(now.long / before.long))
    return frequency, scale


def receptive_field(config: Config) -> int:
    """At least as many earlier tokens as an output depends on: all layers' windows, added up."""
    steps = [*(span.first for span in spans(config)), config.steps]
    tokens = max(int(config.smear), config.ngrams - 1 if config.bigram_rows else 0)
    for layer in LAYERS[config.layers]:
        if layer.attention:
            tokens += max(at(config, step).windows[layer.window] for step in steps)
            tokens += int(config.key_offset and layer.window == "long")
    return math.ceil(tokens / 128) * 128  # kernels are fastest at multiples of 128


def context(config: Config) -> int:
    """The most tokens of a row that a prediction can depend on."""
    return min(receptive_field(config) + 1, max(config.seq_len, config.val_seq_len))


# ---- Model. B rows, T tokens a row, H heads, D head dimension, C model dimension.

GATE_CHANNELS = 12  # of a layer's input, read by the smear gate and the attention gates
MIX_SCALE = 0.1  # of what the mixing MLPs put out
Windows = dict[str, Any]  # of "short" and of "long" layers, as the attention backend takes them


def optional(when: Any, *shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter | None:
    """A parameter that exists only `when` its piece is switched on; `GPT.initialize` fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype)) if when else None


def norm(x: Tensor, gain: Tensor | None = None) -> Tensor:
    return rms_norm(x) if gain is None else F.rms_norm(x, (x.size(-1),), gain.to(x.dtype))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias in the dtype of x."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their position; cos and sin: (positions, 1, D), see `set_step`."""
    T, D = x_BTHD.size(1), x_BTHD.size(-1)
    return x_BTHD * cos[:T] + x_BTHD.roll(D // 2, dims=-1) * sin[:T]


def offset_keys(k_BTHD: Tensor, begins_BT11: Tensor) -> Tensor:
    """Replace the channels of keys whose rotary frequency is 0 by those of the token before.

    A query that finds its own token among the keys then reads the token that followed it, so one
    layer can copy; without the offset that takes two (record 49). A document's first key stays.
    """
    D = k_BTHD.size(-1)
    still_D = torch.arange(D, device=k_BTHD.device) % (D // 2) >= D // 4
    before_BTHD = torch.cat([k_BTHD[:, :1], k_BTHD[:, :-1]], dim=1)
    return torch.where(still_D & ~begins_BT11, before_BTHD, k_BTHD)


class LayerExtras(NamedTuple):
    """What a layer takes beside the stream."""

    value_embed_BTC: Tensor | None
    value_factor: Tensor | None  # on values, learned; None: 1
    value_embed_factor: Tensor | float
    rotary: tuple[Tensor, Tensor, Tensor]  # cos, sin, and the factor on queries
    begins_BT11: Tensor  # whether a token is the first of its document
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]  # of queries, keys and values, (B, T, H, D)
    # Of a MixingBlock: layer 0's input, outputs of `backout` and `mixes`, table 0, bigrams.
    streams: tuple[Any, ...] = ()


class SelfAttention(nn.Module):
    """Causal attention over the window of its layer."""

    def __init__(self, config: Config, layer: Layer, gate_dtype: torch.dtype):
        super().__init__()
        self.head_dim = config.head_dim
        self.key_offset = config.key_offset and layer.window == "long"
        self.paired = layer.paired
        # In memory Q, K, V, O follow one another, each (C, C): one tensor to communicate, not four.
        self.qkvo = nn.Parameter(torch.empty(config.dim, 4 * config.dim))
        heads = config.dim // config.head_dim
        self.gate = optional(config.attention_gates, heads, GATE_CHANNELS, dtype=gate_dtype)
        # A MixingBlock weighs its value embedding by token instead.
        gated_value = config.value_gates and layer.value_embed is not None and layer.mixes is None
        self.value_gate = optional(gated_value, heads, GATE_CHANNELS, dtype=gate_dtype)
        self.own_value = optional(config.xsa and not layer.paired, heads, 1)
        self.bias = optional(config.biases, 4 * config.dim)

    def forward(self, x_BTC: Tensor, extras: LayerExtras) -> Tensor:
        cos, sin, scale = extras.rotary
        B, T, C = x_BTC.shape
        w_4CC = self.qkvo.view(4, C, C)
        qkv_bias, o_bias = (None, None) if self.bias is None else self.bias.split([3 * C, C])

        qkv = linear(x_BTC, w_4CC[:3].flatten(0, 1), qkv_bias)
        q_BTHD, k_BTHD, v_BTHD = qkv.view(B, T, -1, self.head_dim).chunk(3, dim=2)
        if self.paired:
            # Record 58: token t becomes two, 2t with half of its heads and 2t + 1 with the others.
            double = (B, 2 * T, -1, self.head_dim)
            q_BTHD, k_BTHD, v_BTHD = (y.reshape(double) for y in (q_BTHD, k_BTHD, v_BTHD))
        # Normed queries and keys bound the scores, whatever the weights (arXiv:2010.04245).
        q_BTHD = rotate(norm(q_BTHD), cos, sin) * scale
        k_BTHD = rotate(norm(k_BTHD), cos, sin)
        if self.key_offset:
            k_BTHD = offset_keys(k_BTHD, extras.begins_BT11)
        if extras.value_factor is not None:
            v_BTHD = extras.value_factor * v_BTHD
        if extras.value_embed_BTC is not None:
            embed_BTHD = extras.value_embed_BTC.view(B, T, -1, self.head_dim)
            if self.value_gate is not None:
                # 2 sigmoid(0) = 1 at first. The gate reads channels of stream and embedding.
                half = GATE_CHANNELS // 2
                read = torch.cat([x_BTC[..., :half], extras.value_embed_BTC[..., :half]], dim=-1)
                gate_BTH = torch.sigmoid(linear(read, self.value_gate))
                embed_BTHD = 2 * gate_BTH.unsqueeze(-1) * embed_BTHD
            v_BTHD = v_BTHD + extras.value_embed_factor * embed_BTHD.view_as(v_BTHD)

        y_BTHD = extras.attend(q_BTHD, k_BTHD, v_BTHD)
        if self.own_value is not None:
            # Record 82: subtract the part along the token's own value; the stream carries it.
            own_BTHD = F.normalize(v_BTHD, dim=-1)
            along_BTH1 = (y_BTHD * own_BTHD).sum(-1, keepdim=True)
            y_BTHD = y_BTHD - torch.tanh(self.own_value).to(x_BTC.dtype) * along_BTH1 * own_BTHD
        if self.gate is not None:
            gate_BTH = torch.sigmoid(linear(x_BTC[..., :GATE_CHANNELS], self.gate))
            y_BTHD = y_BTHD.view(B, T, -1, self.head_dim) * gate_BTH.unsqueeze(-1)
        return linear(y_BTHD.reshape(B, T, C), w_4CC[3], o_bias)


class MLP(nn.Module):
    """relu(x up)^2 down^T. Both are stored (C, mlp_ratio C), so that the optimizer batches them."""

    def __init__(self, config: Config):
        super().__init__()
        width = config.mlp_ratio * config.dim
        self.up = nn.Parameter(torch.empty(config.dim, width))
        self.down = nn.Parameter(torch.empty(config.dim, width))
        self.up_bias = optional(config.biases, width)
        self.down_bias = optional(config.biases, config.dim)

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden = squared_relu(linear(x_BTC, self.up.T, self.up_bias))
        return linear(hidden, self.down, self.down_bias)


class Block(nn.Module):
    def __init__(self, config: Config, layer: Layer, gate_dtype: torch.dtype):
        super().__init__()
        self.attention: Any = SelfAttention(config, layer, gate_dtype) if layer.attention else None
        self.mlp = MLP(config)
        self.attention_gain = optional(config.biases and layer.attention, config.dim)
        self.mlp_gain = optional(config.biases, config.dim)

    def forward(self, x_BTC: Tensor, read_BTC: Tensor, extras: LayerExtras) -> Tensor:
        """read_BTC: what the attention reads, most often x_BTC itself."""
        if self.attention is not None:
            x_BTC = x_BTC + self.attention(norm(read_BTC, self.attention_gain), extras)
        return x_BTC + self.mlp(norm(x_BTC, self.mlp_gain))


def mixed(shares: tuple[Tensor, ...], *streams: Tensor) -> Any:
    """The sum of the streams (B, T, C), each times its share (B, T, 1)."""
    return sum(share * stream for share, stream in zip(shares, streams, strict=True))


class MixingBlock(Block):
    """The last layer with MUDD (arXiv:2502.12170, record 81): tokens have shares of their own."""

    def __init__(self, config: Config, layer: Layer, gate_dtype: torch.dtype):
        super().__init__(config, layer, gate_dtype)
        # Two small MLPs, before and after the layer, give 14 shares each; 5 of the second are used.
        self.mix_in = nn.Parameter(torch.empty(2, 64, config.dim, dtype=gate_dtype))
        self.mix_out = nn.Parameter(torch.empty(2, 14, 64, dtype=gate_dtype))
        self.mix_start = nn.Parameter(torch.empty(2, 14, dtype=gate_dtype))  # shares without input

    def shares(self, x_BTC: Tensor, which: int) -> tuple[Tensor, ...]:
        """14 shares of each token, each (B, T, 1): `which` is 0 before the layer, 1 after it."""
        hidden = F.gelu(linear(x_BTC, self.mix_in[which]))
        out = linear(hidden, self.mix_out[which], self.mix_start[which])
        return (MIX_SCALE * out).split(1, dim=-1)

    def forward(self, x_BTC: Tensor, read_BTC: Tensor, extras: LayerExtras) -> Tensor:
        first, middle, early, table, bigram = extras.streams
        assert extras.value_embed_BTC is not None
        shares = self.shares(x_BTC, 0)
        to_values, to_stream, of_halves = shares[:3], shares[3:6], shares[6:8]
        before, of_attention, of_first, of_bigram, after, of_mlp = shares[8:]

        left, right = extras.value_embed_BTC.chunk(2, dim=-1)  # half of the heads each
        value_BTC = torch.cat([of_halves[0] * left, of_halves[1] * right], dim=-1)
        value_BTC = value_BTC + mixed(to_values, first, middle, x_BTC)
        y_BTC = x_BTC + mixed(to_stream, first, middle, x_BTC)
        extras = LayerExtras(value_BTC, *extras[1:])  # other values, all else as it was
        attended = self.attention(norm(read_BTC, self.attention_gain), extras)
        y_BTC = before * y_BTC + of_attention * attended + of_first * first + of_bigram * bigram
        y_BTC = after * y_BTC + of_mlp * self.mlp(norm(y_BTC, self.mlp_gain))
        return y_BTC + mixed(self.shares(y_BTC, 1)[:5], first, middle, x_BTC, table, early)


def initial_scalars(config: Config) -> dict[str, float]:
    """Name and initial value of each learned scalar. All of them are one parameter."""
    scalars: dict[str, float] = {}
    table = LAYERS[config.layers]
    for i, layer in enumerate(table):
        mixes = layer.mixes is not None  # it has shares by token instead
        if config.x0_mixing and not mixes:
            scalars[f"x{i}"], scalars[f"x0_{i}"] = config.stream_init, 0.0
        if config.bigram_rows and not mixes:
            scalars[f"bigram{i}"] = 0.1
        if layer.attention and any(each.value_embed is not None for each in table):
            scalars[f"value{i}"] = 0.5
        if layer.value_embed is not None and not mixes:
            scalars[f"value_embed{i}"] = 0.5
        if layer.skip_from is not None:
            scalars[f"skip{i}"] = -1.5  # sigmoid: a skip begins at a share of 0.18
    if config.smear:
        scalars["smear"] = 0.0
    if any(layer.backout for layer in table) and table[-1].mixes is None:
        scalars["backout"] = 0.5
    return scalars


class GPT(nn.Module):
    """Next-token loss on rows of packed documents, summed over targets."""

    rotary: Tensor  # (cos, cos) and (sin, -sin) of each pair of channels, (2, positions, 1, D)
    scale: Tensor  # (), the factor on queries
    signs: Tensor | None  # (8192, C), of bigrams
    windows: Windows  # of the step that `set_step` was given, like `loss_weights`
    loss_weights: Tensor | None  # of the next token and others; None: of the next alone

    def __init__(
        self, config: Config, dtype: torch.dtype, device: torch.device, attention: Attention,
        head: str = "plain",  # one of HEADS: how the loss is computed
    ):  # fmt: skip
        super().__init__()
        self.config, self.dtype, self.attention, self.head = config, dtype, attention, head
        self.layers, self.softcap = LAYERS[config.layers], SOFTCAPS[config.softcap]
        self.tied = False  # whether the token embedding is the output head too
        self.stage_index = -1  # in `spans`, of the step that `set_step` was given; -1: none yet
        self.prefixes: Tensor | None = None  # (vocab_size,) int64: see data/tokenizers.py
        # Embeddings and gates are stored in `dtype`, as they are used, unless keep_float32 is set.
        wide = torch.promote_types(dtype, torch.float32)  # float64 stays float64
        table_dtype = wide if config.keep_float32 == "all" else dtype
        head_dtype = dtype if config.keep_float32 == "none" else wide
        value_tables = {layer.value_embed for layer in self.layers} - {None}
        table_shape = (config.padded_vocab, config.dim)
        with device:
            self.embed = nn.Parameter(torch.empty(table_shape, dtype=table_dtype))
            self.value_embeds = nn.ParameterList(torch.empty_like(self.embed) for _ in value_tables)
            bigram_shape = (round(config.bigram_rows * config.padded_vocab), config.dim)
            self.bigram = optional(config.bigram_rows, *bigram_shape, dtype=table_dtype)
            signs = random_signs(config.dim).to(device, dtype) if config.bigram_signs else None
            self.register_buffer("signs", signs, persistent=False)
            self.smear_gate = optional(config.smear, 1, GATE_CHANNELS, dtype=table_dtype)
            self.blocks = nn.ModuleList(
                (Block if layer.mixes is None else MixingBlock)(config, layer, table_dtype)
                for layer in self.layers
            )
            self.lm_head = nn.Parameter(torch.empty(table_shape, dtype=head_dtype))
            self.lm_head_bias = optional(config.biases, config.padded_vocab)
            self.embed_gain = optional(config.biases, config.dim)
            self.head_gain = optional(config.biases, config.dim)
            self.scalar_init = initial_scalars(config)
            self.scalars = optional(self.scalar_init, len(self.scalar_init))
            positions = max(config.seq_len, config.val_seq_len)
            positions *= 2 if any(layer.paired for layer in self.layers) else 1
            rotary = torch.empty(2, positions, 1, config.head_dim, dtype=dtype)
            self.register_buffer("rotary", rotary, persistent=False)
            self.register_buffer("scale", torch.empty(()), persistent=False)

    def set_step(self, step: int) -> None:
        """Set windows, loss weights, rotary tables and the output head of this step."""
        now, device = at(self.config, step), self.rotary.device
        self.tied = now.stage.tied
        self.windows = {kind: self.attention.window(count) for kind, count in now.windows.items()}
        weights = torch.tensor(now.loss_weights)
        self.loss_weights = machines.sent(weights, device) if len(weights) > 1 else None
        if now.stage_index != self.stage_index:
            self.stage_index = now.stage_index
            frequency, scale = rotary_at(self.config, now.stage_index)
            positions = torch.arange(self.rotary.size(1), device=device)
            angle = torch.outer(positions, machines.sent(frequency, device)).unsqueeze(1)
            cos, sin = angle.cos(), angle.sin()
            # In place: compiled graphs hold these tensors.
            self.rotary.copy_(torch.stack([torch.cat([cos, cos], -1), torch.cat([sin, -sin], -1)]))
            self.scale.copy_(machines.sent(scale, device))

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set every parameter from `seed`, the same on any device, by the rules of `_initial`."""
        for name, parameter in self.named_parameters():
            # Each name has a random stream of its own, so switching one piece off moves no other.
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]
            generator = torch.Generator().manual_seed(int.from_bytes(digest))
            parameter.copy_(self._initial(name, parameter.shape, generator))

    def _initial(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        kind = name.rpartition(".")[2]  # `up` of `blocks.3.mlp.up`
        if kind == "qkvo":
            qkvo = self._drawn((4, shape[0], shape[0]), generator)  # Q, K, V and O
            if self.config.zero_output:
                qkvo[3] = 0  # attention adds nothing at first
            return qkvo.view(shape)
        if kind == "up":
            return self._drawn(shape, generator)
        if kind == "mix_in":
            return torch.empty(shape).uniform_(-1, 1, generator=generator) / shape[2] ** 0.5
        if kind == "mix_start":
            start, factor = torch.zeros(shape), self.config.stream_init**0.5
            # of_halves (two), before, of_attention, of_first, of_bigram, after, of_mlp
            start[0, 6:] = torch.tensor([2.0, 2.0, factor, 1.0, 0.0, 0.05, factor, 1.0])
            start[1, 1] = -0.5  # middle: what `backout` subtracts in other tables
            return start / MIX_SCALE
        if kind == "embed":
            return self.config.embed_std * torch.randn(shape, generator=generator)
        if name.startswith("value_embeds"):
            return self.config.value_embed_std * torch.randn(shape, generator=generator)
        if kind == "scalars":
            return torch.tensor(list(self.scalar_init.values()))
        if kind.endswith("gain"):
            return torch.ones(shape)
        if kind.endswith(("down", "lm_head", "own_value", "bigram", "mix_out", "gate", "bias")):
            return torch.zeros(shape)
        raise RuntimeError(f"parameter {name} has no rule in GPT._initial; add one")

    def _drawn(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw a hidden matrix, or a stack of them, by the rule that `init` names."""
        w = torch.empty(shape)
        if self.config.init == "normal":
            return w.normal_(0, (0.33 / self.config.dim) ** 0.5, generator=generator)
        bound = 3**0.5 * 0.5 / self.config.dim**0.5  # standard deviation 0.5 / sqrt(dim)
        return w.uniform_(-bound, bound, generator=generator)

    def hidden(
        self, inputs_BT: Tensor, cu_seqlens: Tensor, windows: Windows, longest: int
    ) -> Tensor:
        """The stream (B, T, C) after the last norm. longest: no document has more tokens."""
        B, T = inputs_BT.shape
        learned = () if self.scalars is None else self.scalars.to(self.dtype).unbind()
        scalar = dict(zip(self.scalar_init, learned, strict=True))
        documents = paired_documents = self.attention.documents(cu_seqlens, B, T)
        if any(layer.paired for layer in self.layers):  # their rows have twice the length
            paired_documents = self.attention.documents(2 * cu_seqlens, B, 2 * T)
        # True at a document's first token. cu_seqlens ends with B * T, hence one place more.
        begins = torch.zeros(B * T + 1, dtype=torch.bool, device=inputs_BT.device)
        begins_BT11 = begins.index_fill(0, cu_seqlens.long(), True)[:-1].view(B, T, 1, 1)

        x_BTC = F.embedding(inputs_BT, self.embed).to(self.dtype)
        if self.smear_gate is not None:
            # Not masked: a document's first token takes from the document before (record 42).
            gate = linear(x_BTC[:, 1:, :GATE_CHANNELS], self.smear_gate)
            smeared = x_BTC[:, 1:] + scalar["smear"] * torch.sigmoid(gate) * x_BTC[:, :-1]
            x_BTC = torch.cat([x_BTC[:, :1], smeared], dim=1)
        x_BTC = x0_BTC = norm(x_BTC, self.embed_gain)
        values = [F.embedding(inputs_BT, table).to(self.dtype) for table in self.value_embeds]
        bigram_BTC: Any = 0.0
        if self.bigram is not None:
            lengths = range(2, self.config.ngrams + 1)
            rows = [ngrams(inputs_BT, len(self.bigram), length) for length in lengths]
            # All in one lookup: on a GPU each would fill a gradient of the whole table.
            found = lookup(torch.stack(rows), self.bigram).to(self.dtype)
            bigram_BTC, *longer = found.unbind()
            if self.signs is not None:
                bigram_BTC = bigram_BTC * self.signs[sign_rows(inputs_BT, len(self.signs))]
            bigram_BTC = sum(longer, bigram_BTC)

        read_later = {i for each in self.layers for i in (each.skip_from, each.reads, each.mixes)}
        outputs: dict[int, Tensor] = {}  # of layers that a later one reads
        backed_out = None
        for i, (layer, block) in enumerate(zip(self.layers, self.blocks, strict=True)):
            if layer.skip_from is not None:
                x_BTC = x_BTC + torch.sigmoid(scalar[f"skip{i}"]) * outputs[layer.skip_from]
            if f"x{i}" in scalar:
                x_BTC = scalar[f"x{i}"] * x_BTC + scalar[f"x0_{i}"] * x0_BTC
            if f"bigram{i}" in scalar:
                x_BTC = x_BTC + scalar[f"bigram{i}"] * bigram_BTC
            if i == 0:
                first_BTC = x_BTC
            attend = partial(
                self.attention, documents=paired_documents if layer.paired else documents,
                window=windows[layer.window], longest=2 * longest if layer.paired else longest,
            )  # fmt: skip
            streams: tuple[Any, ...] = ()
            if layer.mixes is not None:
                streams = (first_BTC, backed_out, outputs[layer.mixes], values[0], bigram_BTC)
            extras = LayerExtras(
                None if layer.value_embed is None else values[layer.value_embed],
                scalar.get(f"value{i}"), scalar.get(f"value_embed{i}", 1.0),
                (*self.rotary, self.scale), begins_BT11, attend, streams,
            )  # fmt: skip
            read_BTC = x_BTC if layer.reads is None else outputs[layer.reads]
            if self.config.activation_checkpointing:
                x_BTC = checkpoint(block, x_BTC, read_BTC, extras, use_reentrant=False)
            else:
                x_BTC = block(x_BTC, read_BTC, extras)
            if i in read_later:
                outputs[i] = x_BTC
            if layer.backout:
                backed_out = x_BTC
        if backed_out is not None and "backout" in scalar:
            x_BTC = x_BTC - scalar["backout"] * backed_out
        return norm(x_BTC, self.head_gain)

    def forward(
        self, inputs_BT: Tensor, targets_BT: Tensor, cu_seqlens: Tensor, windows: Windows,
        longest: int, weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The next token's loss summed over targets, (). They may be those of each row's end alone.

        With weights, one for each kind of target: (2,), the weighted sum and the next token's loss.
        """
        x_BTC = self.hidden(inputs_BT, cu_seqlens, windows, longest)[:, -targets_BT.size(1) :]
        if weights is not None:
            targets_BT = several_targets(targets_BT, len(weights), self.prefixes)
        x, targets = x_BTC.flatten(0, 1), targets_BT.flatten(0, 1)
        if self.head == "plain":
            return self.plain_loss(x, targets, weights=weights)
        fp8 = self.head == "fp8" and torch.is_grad_enabled()  # validation uses no FP8
        options: dict[str, Any] = {"softcap": self.softcap, "precision": "fp8" if fp8 else "plain"}
        return linear_cross_entropy(x, self.output_weight, targets, weights, **options)

    @property
    def output_weight(self) -> Tensor:
        return self.embed if self.tied else self.lm_head

    def eval_context(self, inputs_BT: Tensor) -> tuple[Tensor, Windows, int]:
        """The last arguments of `hidden` and `forward`, for rows whose documents begin with bos."""
        begins = (inputs_BT == self.config.bos) & self.config.document_mask
        begins[:, 0] = True
        starts = begins.flatten().nonzero().flatten().int()
        cu_seqlens = F.pad(starts, (0, 1), value=inputs_BT.numel())
        return cu_seqlens, self.windows, inputs_BT.size(1)

    def token_losses(self, inputs_BT: Tensor, targets_BT: Tensor, *context: Any) -> Tensor:
        """The loss of each target, float32 (B, T): see `forward`. Tokens may be on any device.

        context: the last arguments of `hidden`, by default those of `eval_context`.
        """
        inputs_BT, targets_BT = inputs_BT.to(self.embed.device), targets_BT.to(self.embed.device)
        x = self.hidden(inputs_BT, *(context or self.eval_context(inputs_BT)))
        x = x[:, -targets_BT.size(1) :]
        losses = self.plain_loss(x.flatten(0, 1), targets_BT.flatten(), reduction="none")
        return losses.view_as(targets_BT)

    def logits(self, inputs_BT: Tensor, count: int) -> Tensor:
        """Logits after each of the last `count` inputs, float32 (B, count, V)."""
        inputs_BT = inputs_BT.to(self.embed.device)
        x = self.hidden(inputs_BT, *self.eval_context(inputs_BT))[:, -count:]
        z = linear(x, self.output_weight, self.lm_head_bias).float()
        return capped(z, self.softcap)[..., : self.config.vocab_size]

    def plain_loss(self, x: Tensor, targets: Tensor, **options: Any) -> Tensor:
        bias = None if self.lm_head_bias is None else self.lm_head_bias.to(x.dtype)
        weight = self.output_weight.to(x.dtype)
        return plain_cross_entropy(x, weight, bias, targets, self.softcap, **options)

    def flops_per_token(self) -> int:
        """6 for each weight of matrices and head, backward included; attention scores left out."""
        matrices = ("qkvo", "up", "down", "lm_head")
        return 6 * sum(p.numel() for name, p in self.named_parameters() if name.endswith(matrices))


# ---- Optimizers


def optimizer_table(config: Config) -> list[optim.Row]:
    """Names of parameters and their optimizer. Each parameter must match exactly one row."""
    # If a piece is switched off, its row matches nothing.
    split: Any = 4  # of qkvo into the matrices to orthogonalize; only Muon and NorMuon read it
    if config.muon_head_pairs:  # Q and K by pairs of heads, V and O whole (record 80)
        pair = 2 * config.head_dim
        split = (pair,) * (2 * config.dim // pair) + (config.dim,) * 2
    decay = None if config.cautious_wd else 1.0  # 1.0: decay does not follow lr_mul (record 42)
    lookups = multiplied(config.value_embed_lr_mul, config.value_embed_wd_mul)
    betas = config.value_embed_betas or config.adam_betas
    vectors = multiplied(config.vector_lr_mul, config.vector_wd_mul)
    vectors["betas"] = config.vector_betas or config.adam_betas
    mixing = {"betas": (0.9, 0.99)}
    gate = {"betas": vectors["betas"]} if config.gates == "adam" else {}
    return [
        optim.Row("blocks.*.attention.qkvo", "matrix", {"split": split}),
        optim.Row("blocks.*.attention.*gate", config.gates, gate),
        optim.Row("blocks.*.mlp.up", "matrix", multiplied(config.mlp_up_lr_mul, decay)),
        optim.Row("blocks.*.mlp.down", "matrix", multiplied(config.mlp_down_lr_mul, decay)),
        optim.Row("smear_gate", config.gates, gate),
        optim.Row("embed", "adam", multiplied(config.embed_lr_mul, config.embed_wd_mul)),
        optim.Row("value_embeds.*", "adam", lookups | {"betas": betas}),
        optim.Row("bigram", "rows", lookups | {"beta2": betas[1]}),
        optim.Row("blocks.*.attention.own_value", "adam"),
        optim.Row("blocks.*.mix_[io]*", "adam", mixing | multiplied(0.25, 0.25**2)),
        optim.Row("blocks.*.mix_start", "adam", mixing | multiplied(0.25, 0.0)),
        optim.Row("lm_head", "adam", multiplied(config.head_lr_mul, config.embed_wd_mul)),
        optim.Row("scalars", "adam", vectors),
        optim.Row("*bias", "adam", vectors),
        optim.Row("*gain", "adam", vectors),
    ]


def multiplied(lr_mul: float, wd_mul: float | None = None) -> dict[str, Any]:
    """Options of a row. Its decay is lr * weight_decay * wd_mul, with lr before lr_mul."""
    return {"lr_mul": lr_mul, "wd_mul": lr_mul if wd_mul is None else wd_mul}


def make_optimizers(config: Config, model: GPT, machine: Machine) -> tuple[dict, optim.Guard]:
    """{"matrix": ..., "adam": ...} for all parameters, and the guard that steps both."""
    ranks = torch.distributed.group.WORLD if machine.world_size > 1 else None
    ours: dict[str, Any] = {"process_group": ranks, "cautious": config.cautious_wd}
    ours["compiled"] = False if config.compile == "off" else None  # None: on GPUs
    matrix: dict[str, Any] = {"lr": config.matrix_lr, "weight_decay": config.matrix_wd}
    muon = ours | matrix | {"method": config.ortho_method, "backend": config.ortho_backend}
    betas = (config.momentum[1], config.matrix_beta2)
    matrix_adam = matrix | {"betas": betas, "eps": config.adam_eps}
    adam = ours | {"lr": config.adam_lr, "weight_decay": config.adam_wd}
    adam |= {"betas": config.adam_betas, "eps": config.adam_eps}
    # Another optimizer is one more line here. Any torch.optim.Optimizer will do.
    factories: dict[str, Any] = {
        "normuon": partial(optim.NorMuon, beta2=config.matrix_beta2, **muon),
        "muon": partial(optim.Muon, **muon),
        "adamw": partial(optim.AdamW, **matrix_adam, **ours),
        "torch_muon": partial(torch.optim.Muon, **matrix),
        "torch_adamw": partial(torch.optim.AdamW, **matrix_adam),
    }
    named = {"matrix": factories[config.optimizer], "adam": partial(optim.AdamW, **adam)}
    rows = {name: value for name, value in adam.items() if name != "betas"}
    named["rows"] = partial(optim.RowAdam, **rows)
    optimizers = optim.build_optimizers(model.named_parameters(), optimizer_table(config), named)
    spike = optim.SpikeRule(sigma=config.spike_sigma) if config.guard == "spikes" else None
    return optimizers, optim.Guard(
        optimizers.values(), spike=spike, nonfinite=config.guard != "off", process_group=ranks
    )


def set_schedule(config: Config, optimizers: dict[str, Any], guard: optim.Guard, step: int) -> None:
    """Set learning rates, momentum, decay and the divisor of the gradients for this step."""
    now = at(config, step)
    # Gradients are sums over the tokens of all micro-batches and ranks. They are divided once, by
    # rows and not by tokens: adam_eps is meant for that. A row is record 42's micro-batch.
    guard.divide_by(now.batch_tokens // config.seq_len)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * now.lr
            if config.cautious_wd:  # optim multiplies by lr again: decay goes with lr^2 (record 43)
                group["weight_decay"] = optimizer.defaults["weight_decay"] * group["lr"]
            if "momentum" in group:  # those of Adam have betas instead
                group["momentum"] = now.momentum


# ---- Trainer: the state of a run, and the steps that change it


class Trainer:
    """Model, optimizers, guard and data. ValueError if they cannot work together."""

    def __init__(self, config: Config, machine: Machine):
        self.config, self.machine = config, machine
        seeds = [config.seed + trial for trial in range(config.trials)]
        settings, device = asdict(config), machine.device
        self.claim = machine.on_main(lambda: check_claim(config.claim, SOURCE, settings, seeds))
        dtype = machines.compute_dtype(config.dtype, device)
        attention, why = choose_attention(config.attention, device, dtype, config.head_dim)
        head, why_head = choose_head(
            config.loss_kernel, device, dtype, config.dim, config.padded_vocab, config.biases
        )
        self.changes = [  # for the loader: first step, tokens of a batch, longest document
            (first, at(config, first).batch_tokens, stage.document or config.max_document)
            for first, _, stage in spans(config)
        ]
        reach = receptive_field(config)
        self.data = Data(settings, self.changes, reach, machine.rank, machine.world_size)
        self.hashes = machine.on_main(lambda: audit(settings, self.data.train.end.shard + 1))
        self.checks = {"overlap": self.hashes.pop("overlap")}
        self.source_sha256 = machine.on_main(lambda: source_hash(SOURCE))
        self.model = GPT(config, dtype, device, attention, head)
        if config.prefixes:
            self.model.prefixes = torch.tensor(read_prefixes(config), device=device)
        self.loss: Any = self.model  # warm_up replaces it with the compiled model
        self.optimizers, self.guard = make_optimizers(config, self.model, machine)
        self.env = machines.describe(machine, dtype) | {"attention": attention.name, "head": head}
        self.env["params"] = sum(p.numel() for p in self.model.parameters())
        self.env |= provenance(SOURCE)
        self.chosen = {"attention": why, "head": why_head}
        self.train_tokens = tokens_before(config, config.steps)
        self.validations = [step for step in range(config.steps + 1) if at(config, step).validates]
        self.off_track = off_track(config)

    def reset(self, seed: int) -> None:
        """Set everything that a run changes to its value before the first step of this seed."""
        torch.manual_seed(seed)  # of what a model may draw at random in training, such as dropout
        self.model.initialize(seed)
        for parameter in self.model.parameters():
            parameter.grad = None
            if self.machine.world_size > 1:  # hosts may draw other bits from one seed
                torch.distributed.broadcast(parameter.data, 0)
        for optimizer in self.optimizers.values():
            optim.reset(optimizer)
        self.guard.reset()
        self.data.train.reset()

    @torch.no_grad()
    def untie(self) -> None:
        """Start the head as a copy of the token embedding, with its Adam state (record 53)."""
        self.model.lm_head.copy_(self.model.embed)
        optim.copy_state(self.optimizers["adam"], "embed", "lm_head")

    def batch_loss(self, batch: Batch, longest: int, weights: Tensor | None = None) -> Tensor:
        """As `GPT.forward` returns it. longest: tokens of the longest document, at most."""
        return self.loss(*batch.to(self.machine.device), self.model.windows, longest, weights)

    def train_loss(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """The summed loss to train on at this step, and that of the next token alone, detached."""
        losses = self.batch_loss(batch, self.data.longest(step), self.model.loss_weights).view(-1)
        return losses[0], losses[-1].detach()  # with weights two numbers, else one that is both

    def gradients(self, step: int, flags: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the gradients of this rank's micro-batches into .grad; `update` sums over ranks.

        Returns, over all ranks, the mean loss of the next token and the sum of the flags of `Stop`.
        """
        self.model.set_step(step)
        total = torch.zeros((), device=self.machine.device)
        for batch in next(self.data.train):
            loss, next_token = self.train_loss(batch, step)
            loss.backward()
            total += next_token
        summed = self.machine.all_reduce(torch.cat([total.view(1), flags]))
        return summed[0] / at(self.config, step).batch_tokens, summed[1:]

    def update(self, step: int, loss: Tensor) -> Tensor:
        """Step the optimizer "matrix", and on every `adam_accum_steps`-th step "adam" too.

        loss: the mean over all ranks. Returns the guard's verdict, unread, so nothing waits.
        """
        now = at(self.config, step)
        set_schedule(self.config, self.optimizers, self.guard, step)
        if now.new_scale:
            self.guard.forget()
        stepping = [o for name, o in self.optimizers.items() if now.adam_steps or name == "matrix"]
        verdict = self.guard.step(loss, only=stepping)
        for optimizer in stepping:
            optimizer.zero_grad(set_to_none=True)  # skipped gradients go too
        return verdict

    @torch.no_grad()
    def validate(self, step: int, batches: list[Batch] | None = None) -> float:
        """Mean loss over the validation tokens, in nats, with the windows of this step.

        batches: those of this rank to score; None: all. Sets `targets_scored`, over all ranks, and
        `val_losses`, of each target of this rank, by batch: none if the loss is compiled.
        """
        self.model.set_step(step)
        self.val_losses: list[Tensor] = []
        # float64: adding ten million token losses in float32 would cost digits.
        device = self.machine.device
        total, scored = torch.zeros((), dtype=optim.widest(device), device=device), 0
        eager = self.loss is self.model and self.model.head == "plain"
        for batch in self.data.validation if batches is None else batches:
            if eager:
                self.val_losses.append(self.token_losses(batch))
                total += self.val_losses[-1].sum(dtype=total.dtype)
            else:
                total += self.batch_loss(batch, self.data.val_longest)
            scored += batch.targets.numel()
        self.targets_scored = sum(self.machine.gather(scored))
        return self.machine.all_reduce(total).item() / self.targets_scored

    def token_losses(self, batch: Batch) -> Tensor:
        """The loss of each target of a batch to score, not compiled, (N,) float32."""
        inputs, targets, documents = batch.to(self.machine.device)
        context = documents, self.model.windows, self.data.val_longest
        return self.model.token_losses(inputs, targets, *context).flatten()

    @torch.no_grad()
    def score(self) -> dict[str, float]:
        """Mean losses of the trained model by kind of token, in nats, after the last validation.

        Of all ranks' validation tokens, copied and new (data/copied.py), and of the held-out slice
        where the text has one (data/loader.py). Collective.
        """
        self.model.set_step(self.config.steps)
        data = self.data
        losses = self.val_losses or [self.token_losses(batch) for batch in data.validation]
        sums = sums_by_kind(on_host(losses), data.val_distances, data.val_before)
        if data.train.held_out:
            losses = [self.token_losses(batch) for batch in data.held_out]
            sums["loss_held_out"] = sum_and_count(on_host(losses))
        return means(self.machine.gather(sums))

    def trained_rows(self) -> str:
        """Sum of the SHA-256 of all rows trained on, as hex: see data/loader.py. Collective."""
        return f"{sum(self.machine.gather(self.data.train.rows_sum)) % 2**256:064x}"

    @torch.no_grad()
    def sample(self) -> str:
        """The first `sample_tokens` tokens of a document that the model writes, on one rank."""
        config, tokenizer = self.config, read_tokenizer(tokenizer_of(self.config))
        self.model.set_step(config.steps)
        tokens = generate(
            lambda last: self.model.logits(last.view(1, -1), count=1)[0, 0],
            [config.bos], config.sample_tokens, bos=config.bos, context=context(config),
            temperature=0.9, least=config.sample_tokens,  # an early end would leave little to see
        )  # fmt: skip
        text = tokenizer.decode(list(tokens))
        # A model may write any byte, and none may steer the terminal.
        return "".join(char if char.isprintable() or char == "\n" else " " for char in text)

    def model_state(self) -> dict[str, Tensor]:
        """Copies of all parameters and buffers on the host."""
        return {name: each.cpu().clone() for name, each in self.model.state_dict().items()}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """All that a run changes, as copies on rank 0's host; empty on other ranks. Collective."""
        optimizers = optim.gather_state(self.optimizers, self.guard)
        data = self.data.train.state_dict() | {"rows_sha256": self.trained_rows()}
        if not self.machine.is_main:
            return {"model": {}, "optim": {}, "data": {}}
        return {"model": self.model_state(), "optim": optimizers, "data": data}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Load a `state_dict` of any number of ranks. An error says what does not fit."""
        self.model.load_state_dict(state["model"])
        optim.spread_state(self.optimizers, self.guard, state["optim"])
        self.data.train.load_state_dict(state["data"])


def on_host(losses: list[Tensor]) -> NDArray:
    return torch.cat([torch.zeros(0), *(each.cpu() for each in losses)]).numpy()


# ---- A run


def train(trainer: Trainer, run: Run) -> float:
    """Train from the run's current step to its last. Returns the last validation loss."""
    config = trainer.config
    tokens = tokens_before(config, run.steps_done)
    run.start_training()
    for step in range(run.steps_done, config.steps):
        now = at(config, step)

        # once: from here on, head and embedding are two
        if now.unties:
            trainer.untie()

        # once in a while: validate, with the clock stopped
        if now.validates:
            evaluate(trainer, run, step)

        # step: gradients of this rank's rows, summed; one update sums those of all ranks
        loss, flags = trainer.gradients(step, run.stop.flags())
        verdict = trainer.update(step, loss)

        # log: without waiting for the device; losses are read when they have arrived
        tokens += now.batch_tokens
        run.stepped(
            loss, flags, verdict, tokens=tokens, lr_mul=now.lr, window=now.windows["long"],
            stage=now.stage_index,
        )  # fmt: skip

        # save: when it is time, or the run must end; never while Adam still sums gradients
        if now.adam_steps and run.must_save():
            run.save()
    run.settle()
    return evaluate(trainer, run, config.steps)


def evaluate(trainer: Trainer, run: Run, step: int) -> float:
    """Validate before this step, off the clock. Returns the loss; NonFinite if it is not finite."""
    with run.pause("validate"):
        val_loss = trainer.validate(step)
        run.validated(step, val_loss)
    return val_loss


def require_ranks(config: Config, machine: Machine) -> None:
    """Refused if the ranks cannot share out the sequences of every step equally."""
    batches = [(first, at(config, first).batch_tokens, 0) for first, *_ in spans(config)]
    try:
        Order(config.seq_len, None, config.data_start, batches).check(machine.world_size)
    except ValueError as error:
        hint = " torch finds no GPU here, so the default is --track tiny; on GPUs it is short."
        default = config.track == "tiny" and machine.device.type == "cpu"
        raise Refused(f"{error}{hint if default else ''}") from None


def require_text(config: Config) -> None:
    """Build the text of `tiny` and `small` where it is missing. ValueError if that fails."""
    if Path(config.data_dir) == Path(SMALL["data_dir"]):
        try:
            prose.ensure(Path(config.data_dir))
        except (ImportError, OSError) as error:
            raise ValueError(f"{config.data_dir} cannot be built: {error}") from None


def set_up(config: Config, machine: Machine) -> Trainer:
    """Build a trainer. Refused if it cannot work, before anything costs time."""
    machines.repeat_bits(machine.device)
    require_ranks(config, machine)
    for requirement in (require_packages, require_folders, require_text, require_tokenizer):
        machine.on_main(partial(requirement, config))  # other ranks wait
    try:
        trainer = Trainer(config, machine)
    except ValueError as error:  # kernels, optimizers and data do not know Refused
        raise Refused(str(error)) from error
    trainer.reset(config.seed)
    return trainer


def make_runs(config: Config) -> int:
    """Make all planned runs, one after the other. Returns the exit code."""
    machine = machines.start(config.device, config.rank_timeout)
    machine.say(f"{config.track}: {ABOUT[config.track]}")
    clock = Clock(machine.synchronize)
    with clock.phase("setup", timed=False):
        trainer = set_up(config, machine)
        machine.say(summary(trainer))
        plans = machine.on_main(partial(plan_runs, trainer))
    if not plans:
        return 0
    with machines.saying_every_few_seconds("compiling and warming up", machine.say):
        warm_up(trainer, clock)
    if config.dry_run:
        dry_run(trainer, clock)
        return 0
    losses = {}
    with Stop(machine.device) as stop, machines.without_garbage_collection():
        for plan in plans:
            trainer.reset(plan.seed)
            with Run(trainer, plan, clock, stop, source=SOURCE) as run:
                losses[plan.seed] = val_loss = train(trainer, run)
                if config.keep_model:  # first: what follows may not fit the memory
                    run.keep(val_loss, tokenizer_of(config))
                with run.pause("check"):
                    proof = check_trained_model(trainer)
                with run.pause("probe"):
                    probes = trainer.score()
                if config.sample_tokens and tokenizer_of(config) and plan is plans[-1]:
                    with run.pause("sample"):
                        machine.say(f"the model writes:\n{machine.on_main(trainer.sample)}\n")
                run.finish(val_loss, {"probes": probes} | proof)
            if run.code != 0:
                return run.code
    machine.say(closing(trainer, clock, losses))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 error, 2 bad input, 3 non-finite, 130 or 143 on a signal."""
    listen()
    read = partial(parse, Config, sys.argv[1:] if argv is None else argv, preset, __doc__ or "")
    return leave(supervise(lambda: make_runs(read()), refused=(ShardError,)))


if __name__ == "__main__":
    sys.exit(main())
