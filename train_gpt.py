"""Train a GPT to a target validation loss on as few tokens, or in as little time, as possible.

    torchrun --nproc_per_node=8 train_gpt.py              # `short` on GPUs, `tiny` without one
    python train_gpt.py --track small                     # the race, on any machine
    python train_gpt.py --track tiny --recipe adamw --trials 3

From top to bottom: tables of layers, stages and parameter groups; settings, whose defaults are the
race `small`; the schedule, a pure function of the step; the model; the optimizers; the loop.

A run is set-up, compilation and warm-up, then steps with a validation now and then. The clock
counts training steps, data loading and checkpoints. It does not count set-up, compilation, warm-up
or validation. Warm-up restores all state and compares it bit for bit. Most components are those of
the records of modded-nanogpt; comments give the record that brought them and its author. On any
number of ranks a run takes the same trajectory up to rounding.
"""

import hashlib
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # Before torch, which takes seconds to import: Ctrl-C ends it quietly.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from runtime.openmp import spin_briefly
    from runtime.packages import find_packages

    sys.excepthook = find_packages  # a shell without .venv has no torch
    spin_briefly()  # torch reads these variables when it is imported

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import optim
from data.copied import means, sum_and_count, sums_by_kind
from data.loader import Data, Order, Reading
from data.prose import require_text
from data.sampling import generate
from data.shards import ShardError, audit
from data.stand_in import data_or_stand_in
from data.tokenizers import read_prefixes, read_tokenizer, require_tokenizer, tokenizer_of
from kernels.attention import ATTENTIONS, Attention, choose_attention
from kernels.counts import NgramCounts
from kernels.eager import rms_norm, squared_relu
from kernels.head import (
    HEADS,
    Softcap,
    capped,
    choose_head,
    linear_cross_entropy,
    plain_cross_entropy,
)
from kernels.lookups import lookup, ngrams, random_signs, several_targets, sign_rows
from runtime import machine as machines
from runtime.checks import check_trained_model
from runtime.claim import check_claim, provenance
from runtime.clock import Clock
from runtime.ending import Stop, leave, listen, supervise
from runtime.errors import Refused
from runtime.log import require_folders
from runtime.machine import Machine
from runtime.plan import plan_runs
from runtime.run import Run
from runtime.settings import RunSettings, as_text, flag, parse, refusal, require_packages, setting
from runtime.source import source_hash
from runtime.terminal import closing, summary
from runtime.trainer import Batch
from runtime.warmup import dry_run, fit_micro_batch, warm_up

SOURCE = Path(__file__).resolve().parent

# ---- Layers: a table of them is the model's shape


@dataclass(frozen=True)
class Layer:
    attention: bool = True
    window: str = "short"  # or "long"; a stage gives their tokens
    value_embed: int | None = None  # table of value embeddings, added to this layer's values
    skip_from: int | None = None  # earlier layer; a learned fraction of its output joins the input
    backout: bool = False  # a fraction of this layer's output is subtracted at the end; one layer
    reads: int | None = None  # earlier layer whose output this layer's attention reads
    paired: bool = False  # two heads share a sequence of twice the length; windows reach half
    mudd: int | None = None  # makes it a MuddBlock, which also reads the output of this layer


LAYERS = {
    # No attention in layer 6 and long windows in 3 and 10: @YouJiacheng (17, 20), @classiclarryd.
    "record42": [
        Layer(value_embed=1),  # 0
        Layer(value_embed=2),  # 1
        Layer(),  # 2
        Layer(window="long"),  # 3
        Layer(),  # 4
        Layer(skip_from=4),  # 5
        Layer(attention=False, skip_from=3),  # 6
        Layer(skip_from=2, backout=True),  # 7
        Layer(value_embed=0, skip_from=1),  # 8
        Layer(value_embed=1, skip_from=0),  # 9
        Layer(window="long", value_embed=2),  # 10
    ],
    "record89": [
        Layer(paired=True),  # 0
        Layer(value_embed=0),  # 1
        Layer(value_embed=1, paired=True),  # 2
        Layer(window="long"),  # 3
        Layer(),  # 4
        Layer(paired=True),  # 5
        Layer(attention=False, skip_from=3),  # 6
        Layer(backout=True),  # 7
        Layer(value_embed=2, reads=7),  # 8
        Layer(value_embed=3, reads=7, paired=True),  # 9
        Layer(window="long", value_embed=4, reads=7, mudd=3),  # 10
    ],
    "small89": [
        Layer(paired=True),  # 0
        Layer(value_embed=0),  # 1
        Layer(window="long"),  # 2
        Layer(paired=True),  # 3
        Layer(attention=False, skip_from=2),  # 4
        Layer(backout=True),  # 5
        Layer(value_embed=1, reads=5, paired=True),  # 6
        Layer(window="long", value_embed=2, reads=5, mudd=2),  # 7
    ],
    "plain8": [Layer(), Layer(), Layer(window="long"), *[Layer()] * 4, Layer(window="long")],
    "steps": [Layer(window="long")] * 12,
}

# ---- Stages: what changes in the course of a run


@dataclass(frozen=True)
class Stage:
    """One part of a run. The fractions of a table add up to 1."""

    fraction: float  # of the steps
    short: int  # window of short layers, in blocks
    long: int  # window of long layers, in blocks
    batch: float = 1.0  # tokens of a step, as a fraction of batch_tokens
    document: int | None = None  # documents are cut to this length; None: to max_document
    lr_factor: float = 1.0  # on the peak of every learning rate; final_lr is not changed by it
    tied: bool = False  # the token embedding is the output head too
    # Weights of the losses on the second next token, the third and so on, at start and end.
    mtp_weights: tuple[tuple[float, float], ...] = ()
    prefix_weight: tuple[float, float] = (0.0, 0.0)  # of predicting the next token's prefix
    extension: bool = False  # after the schedule: the learning rate stays at its floor


STAGES = {
    "constant": [Stage(1.0, short=10, long=20)],
    # Windows grow (@fernbear.bsky.social, record 13), then 40 of 2285 steps of extension.
    "record42": [
        Stage(2245 / 2285 / 3, short=1, long=3),
        Stage(2245 / 2285 / 3, short=3, long=7),
        Stage(2245 / 2285 / 3, short=5, long=11),
        Stage(40 / 2285, short=6, long=13, extension=True),
    ],
    # The batch grows (@varunneal, record 46), and the learning rate with it. Losses on later
    # tokens and the tied head make the first stages learn faster (@varunneal, records 51, 53).
    "record89": [
        Stage(424 / 1285, short=1, long=3, batch=1 / 3, document=896, tied=True,
              mtp_weights=((0.5, 0.5), (0.25, 0.0)), prefix_weight=(0.25, 0.25)),
        Stage(422 / 1285, short=3, long=7, batch=2 / 3, lr_factor=1.52, tied=True,
              mtp_weights=((0.5, 0.0),), prefix_weight=(0.25, 0.0)),
        Stage(424 / 1285, short=5, long=11, lr_factor=1.73),
        Stage(15 / 1285, short=6, long=13, extension=True),
    ],
    # On `small`, losses on later tokens cost more than they give: records/LOG.md.
    "small89": [
        Stage(424 / 1285, short=1, long=3, batch=1 / 3, document=896, tied=True),
        Stage(422 / 1285, short=3, long=7, batch=2 / 3, lr_factor=1.52, tied=True),
        Stage(424 / 1285, short=5, long=11, lr_factor=1.73),
        Stage(15 / 1285, short=6, long=13, extension=True),
    ],
    "tiny": [Stage(0.4, short=1, long=3), Stage(0.6, short=3, long=8)],
}  # fmt: skip

# ---- Parameter groups: which optimizer steps what, and by which numbers


class Group(NamedTuple):
    """Parameters that are stepped alike. Each parameter must match exactly one pattern of a table.

    At every step a parameter moves by about rate * lr_mul and loses the fraction
    rate * wd * wd_mul of itself. rate is matrix_lr or adam_lr times the schedule, wd is matrix_wd
    or adam_wd; with cautious_wd the fraction has rate^2.
    """

    names: str  # patterns, "*" is any text; one may match nothing
    optimizer: str  # "matrix": the one of --optimizer; "adam": AdamW; "rows": RowAdam
    lr_mul: float = 1.0
    wd_mul: float = 1.0
    betas: tuple[float, float] | None = None  # of AdamW; None: (0.9, 0.95). RowAdam has (0, 0.95)
    # Of qkvo, which is orthogonalized part by part: "q k v o", or "head pairs v o", where each
    # pair of heads of Q and of K is a part (@samacqua, record 80).
    split: str = ""


GROUPS = {  # each row: names, optimizer, lr_mul, wd_mul, betas
    # adam_wd is 0 here; a decay that you set acts in proportion to the rate. The baseline muon has
    # these numbers too.
    "record42": [
        Group("blocks.*.attention.qkvo", "matrix", split="q k v o"),
        Group("blocks.*.attention.*gate", "matrix"),
        Group("blocks.*.mlp.up", "matrix", lr_mul=2.0),
        Group("blocks.*.mlp.down", "matrix"),
        Group("smear_gate count_gate", "matrix"),
        # At adam_lr 0.008: 0.6 for lookup tables, 0.04 for scalars.
        Group("embed value_embeds.* bigram", "adam", 75.0, 75.0, (0.65, 0.95)),
        Group("lm_head *own_value", "adam", 1.0, 1.0, (0.65, 0.95)),
        Group("scalars *bias *gain", "adam", 5.0, 5.0, (0.65, 0.95)),
    ],
    # Scalars move slowly and do not decay (@ChrisJMcCormick, record 52). Gates left Muon for Adam
    # (@ChrisJMcCormick, record 56). wd_mul of the lookup tables: the record decays them by
    # 5 adam_wd times the square of their rate of 75 adam_lr, hence 5 * 75^2.
    "record89": [
        Group("blocks.*.attention.qkvo", "matrix", split="head pairs v o"),
        Group("blocks.*.mlp.up", "matrix", 2.0, 2.0),
        Group("blocks.*.mlp.down", "matrix", 4.0, 4.0),
        Group("blocks.*.attention.*gate smear_gate count_gate", "adam", 1.0, 1.0, (0.9, 0.99)),
        Group("embed", "adam", 1.0, 150.0, (0.5, 0.95)),
        Group("value_embeds.* bigram", "adam", 75.0, 28_125.0, (0.75, 0.95)),
        Group("blocks.*.attention.own_value", "adam", 1.0, 1.0, (0.5, 0.95)),
        Group("blocks.*.mudd_in blocks.*.mudd_out", "adam", 0.25, 0.0625, (0.9, 0.99)),
        Group("blocks.*.mudd_start", "adam", 0.25, 0.0, (0.9, 0.99)),
        Group("lm_head", "adam", 1.0, 150.0, (0.5, 0.95)),
        Group("scalars *bias *gain", "adam", 5.0, 0.0, (0.9, 0.99)),
    ],
    # Half the rate for `up`, twice for lookup tables at the same decay: tuned, records/LOG.md.
    "small89": [
        Group("blocks.*.attention.qkvo", "matrix", split="head pairs v o"),
        Group("blocks.*.mlp.up", "matrix"),
        Group("blocks.*.mlp.down", "matrix", 4.0, 4.0),
        Group("blocks.*.attention.*gate smear_gate count_gate", "adam", 1.0, 1.0, (0.9, 0.99)),
        Group("embed", "adam", 1.0, 150.0, (0.5, 0.95)),
        Group("value_embeds.*", "adam", 150.0, 28_125.0, (0.75, 0.95)),
        Group("bigram", "rows", 150.0, 28_125.0),
        Group("blocks.*.mudd_in blocks.*.mudd_out", "adam", 0.25, 0.0625, (0.9, 0.99)),
        Group("blocks.*.mudd_start", "adam", 0.25, 0.0, (0.9, 0.99)),
        Group("blocks.*.attention.own_value", "adam", 1.0, 1.0, (0.5, 0.95)),
        Group("lm_head", "adam", 1.0, 150.0, (0.5, 0.95)),
        Group("scalars *bias *gain", "adam", 5.0, 0.0, (0.9, 0.99)),
    ],
    "adamw": [
        Group("blocks.*.attention.qkvo", "matrix"),
        Group("blocks.*.attention.*gate smear_gate count_gate", "matrix"),
        Group("blocks.*.mlp.up blocks.*.mlp.down", "matrix"),
        Group("embed", "adam", 40.0, 40.0, (0.65, 0.95)),
        Group("value_embeds.* bigram", "adam", 75.0, 75.0, (0.65, 0.95)),
        Group("lm_head *own_value", "adam", 1.0, 1.0, (0.65, 0.95)),
        Group("scalars *bias *gain", "adam", 5.0, 5.0, (0.65, 0.95)),
    ],
    # Track 3's rates are 0.7 for the embedding, 0.004 for the head and 0.015 for vectors.
    "steps": [
        Group("blocks.*.attention.qkvo", "matrix", split="q k v o"),
        Group("blocks.*.mlp.up", "matrix", lr_mul=2.0),
        Group("blocks.*.mlp.down", "matrix"),
        Group("embed", "adam", 1.0, 1.0, (0.8, 0.95)),
        Group("lm_head", "adam", 0.004 / 0.7, 0.004 / 0.7, (0.8, 0.95)),
        Group("*bias *gain", "adam", 0.015 / 0.7, 0.015 / 0.7, (0.8, 0.95)),
    ],
}

# ---- Settings. The defaults are the race: `small` with the recipe record89. Other tracks and
# recipes are below. A run's own settings, such as --seed: runtime/settings.py

METHODS = ("polar_express", "newton_schulz", "newton_schulz_12")
OPTIMIZERS = ("normuon", "muon", "adamw", "torch_muon", "torch_adamw")
SOFTCAPS = {  # kind, height, width, shift
    "sigmoid": Softcap("sigmoid", 30.0, 7.5, 0.0),
    "rsqrt": Softcap("rsqrt", 15.0, 15.0, 0.0),
    "shifted": Softcap("sigmoid", 23.0, 7.5, 5.0),  # @classiclarryd, record 54
}


@dataclass(frozen=True)
class Config(RunSettings):
    track: str = setting("small", "tiny, small, short or steps", section="Experiment")
    recipe: str = setting(
        "record89", "small and tiny: record89, muon or adamw; short: record42 or record89; "
        "steps: muon",
    )  # fmt: skip
    target: float = setting(3.36, "validation loss to reach, in nats per token")
    device: str = setting("auto", "device to compute on", one_of=machines.DEVICES)
    dtype: str = setting("auto", "dtype of activations", one_of=("auto", "bfloat16", "float32"))
    attention: str = setting("auto", "attention backend; auto: the fastest", one_of=ATTENTIONS)
    loss_kernel: str = setting("plain", "backend of the loss; auto: the fastest", one_of=HEADS)
    activation_checkpointing: bool = setting(False, "recompute activations: less memory, slower")
    compile: str = setting("auto", "compile the model; auto: on CUDA", one_of=("auto", "on", "off"))

    vocab_size: int = setting(2048, "size of the vocabulary", at_least=1, section="Data")
    bos: int = setting(2047, "token that begins each document", below="vocab_size")
    document_mask: bool = setting(True, "begin sequences with bos and attend within documents")
    batch_tokens: int = setting(6144, "tokens of a step, on all ranks", a_multiple_of="seq_len")
    seq_len: int = setting(512, "tokens of a training sequence", at_least=2)
    micro_batch: int = setting(
        6144, "tokens of a micro-batch, at most; 0: as many as fit the GPU, elsewhere a sequence"
    )
    max_document: int = setting(512, "length to which documents are cut", at_least=1)
    val_tokens: int = setting(262_144, "number of validation tokens", a_multiple_of="val_seq_len")
    val_seq_len: int = setting(4096, "tokens of a validation sequence", at_least=2)
    val_batch: int = setting(16_384, "targets that are validated at once", at_least="seq_len")
    val_sha256: str = setting("be27130d408f4ce8", "first digits of the validation tokens' SHA-256")
    val_every: int = setting(0, "steps between validations; 0: only the last")

    layers: str = setting("small89", f"table of layers: {', '.join(LAYERS)}", section="Model")
    dim: int = setting(128, "width of the model", at_least=12, a_multiple_of="head_dim")
    head_dim: int = setting(32, "width of an attention head", at_least=2, a_multiple_of=2)
    mlp_ratio: int = setting(4, "width of an MLP, as a multiple of dim", at_least=1)
    keep_float32: str = setting(
        "all", "tables and gates that stay in float32", one_of=("none", "head", "all")
    )
    attention_scale: float = setting(0.2, "initial factor on the product of query and key")
    smear: bool = setting(True, "add to each embedding a gated fraction of the one before it")
    x0_mixing: bool = setting(True, "mix the token embedding back into each layer's input")
    attention_gates: bool = setting(True, "put a sigmoid gate on each head's output")
    value_gates: bool = setting(True, "gate the value embedding of each head")
    residual_init: float = setting(1.1, "initial factor on each layer's input, with x0_mixing")
    embed_std: float = setting(0.005, "standard deviation of initial token embeddings")
    value_embed_std: float = setting(0.01, "standard deviation of initial value embeddings")
    key_offset: bool = setting(True, "long layers: take half of each key from the token before")
    bigram_rows: float = setting(192.0, "rows of the n-gram table for each token; 0: no table")
    ngrams: int = setting(3, "longest n-gram in that table; 2: only bigrams", at_least=2, at_most=4)
    counted_ngrams: int = setting(
        6, "longest n-gram whose counts are mixed with the softmax; 0: none", at_most=16
    )
    bigram_signs: bool = setting(True, "multiply bigram embeddings by random signs")
    xsa: bool = setting(True, "subtract from attention a fraction along the token's own value")
    zero_output: bool = setting(False, "begin with attention outputs of 0")
    biases: bool = setting(False, "give linear maps biases and norms gains")
    prefixes: bool = setting(False, "predict the longest prefix of the next token too")
    softcap: str = setting("shifted", "soft cap on the logits", one_of=tuple(SOFTCAPS))
    init: str = setting(
        "uniform", "distribution of initial hidden matrices", one_of=("uniform", "normal")
    )

    steps: int = setting(250, "number of optimizer steps", at_least=1, section="Schedule")
    stages: str = setting("small89", f"table of stages: {', '.join(STAGES)}")
    window_block: int = setting(32, "tokens of a block, the unit of windows; 0: no windows")
    val_window: int = setting(640, "tokens long layers see in the last validation", at_least=1)
    cooldown: float = setting(0.6, "fraction of the steps in which learning rates fall", at_most=1)
    final_lr: float = setting(0.15, "learning rate at the end, as a fraction of its peak")
    momentum: tuple[float, float] = setting(
        (0.85, 0.9), "momentum of matrices: first and last, and in between", below=1
    )
    momentum_warmup: int = setting(34, "first steps, in which momentum rises")
    momentum_cooldown: int = setting(5, "last steps, in which momentum falls")

    optimizer: str = setting(
        "normuon", "optimizer of hidden matrices", one_of=OPTIMIZERS, section="Optimizers"
    )
    groups: str = setting("small89", f"table of parameter groups: {', '.join(GROUPS)}")
    matrix_lr: float = setting(0.04, "peak learning rate of hidden matrices")
    matrix_wd: float = setting(1.2, "weight decay of hidden matrices, times their learning rate")
    matrix_beta2: float = setting(0.9, "decay of NorMuon's second moment", below=1)
    cautious_wd: bool = setting(True, "decay by the squared rate, only where the update agrees")
    ortho_method: str = setting("polar_express", "method of orthogonalization", one_of=METHODS)
    ortho_backend: str = setting(
        "plain", "matrix products of the orthogonalization", one_of=("auto", "plain", "triton")
    )
    adam_lr: float = setting(0.016, "peak learning rate of AdamW, for all other parameters")
    adam_eps: float = setting(1e-10, "epsilon of AdamW; its gradients are sums over a sequence")
    adam_wd: float = setting(0.005, "weight decay of AdamW, times its learning rate")
    adam_accum_steps: int = setting(
        1, "steps whose gradients AdamW sums up for one of its own", at_least=1, at_most=16
    )
    guard: str = setting(
        "spikes", "what makes the guard skip a step", one_of=("spikes", "nonfinite", "off")
    )
    spike_sigma: float = setting(
        6.0, "a loss or norm so many spreads above the median is a spike", at_least=1
    )

    def __post_init__(self) -> None:
        tables: dict[str, Any] = {
            "track": TRACKS, "recipe": RECIPES.get(self.track, {}), "layers": LAYERS,
            "stages": STAGES, "groups": GROUPS,
        }  # fmt: skip
        for name, table in tables.items():
            if getattr(self, name) not in table:
                raise refusal(self, name, f"one of {', '.join(table)}")
        super().__post_init__()  # the rules written next to the settings
        if self.claim and (changed := off_track(self)):
            raise refusal(self, "claim", f"empty, as {'; '.join(changed)}")
        if self.micro_batch % self.seq_len:
            raise refusal(self, "micro_batch", f"0 or a multiple of --seq-len {self.seq_len}")
        if self.cautious_wd and self.optimizer.startswith("torch"):
            raise refusal(self, "cautious_wd", f"off for --optimizer {self.optimizer}")
        layers, heads = LAYERS[self.layers], self.dim // self.head_dim
        if heads % 2 == 1:
            why = f"as --dim / --head-dim = {heads} is odd"
            if any(layer.paired for layer in layers):
                raise refusal(self, "layers", f"a table without paired heads, {why}")
            if any("pairs" in group.split for group in GROUPS[self.groups]):
                raise refusal(self, "groups", f"a table without pairs of heads, {why}")
        value_tables = {layer.value_embed for layer in layers} - {None}
        if value_tables != set(range(len(value_tables))):
            raise refusal(self, "layers", "a table whose value_embed are 0, 1, 2 and so on")
        if self.counted_ngrams:
            if self.counted_ngrams < 2:
                raise refusal(self, "counted_ngrams", "0, or 2 and more")
            if self.loss_kernel != "plain":
                why = "counts are mixed with probabilities (or set --counted-ngrams 0)"
                raise refusal(self, "loss_kernel", f"plain: {why}")
            if self.prefixes or any(stage.mtp_weights for stage in STAGES[self.stages]):
                why = "a loss on later tokens or prefixes has no counts"
                raise refusal(self, "counted_ngrams", f"0: {why}")
        for index, stage in enumerate(STAGES[self.stages]):
            sequences = stage.batch * self.batch_tokens / self.seq_len
            if round(sequences) == 0 or abs(sequences - round(sequences)) > 1e-6:
                rule = "a table of batches of whole sequences"
                raise refusal(self, "stages", f"{rule}; stage {index} has {sequences:g} sequences")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding tables: a multiple of 128, which matrix units like."""
        return math.ceil(self.vocab_size / 128) * 128


# ---- Tracks and recipes: what they change of the defaults above. The recipe wins over the track.

RECORD42: dict[str, Any] = {  # without the components of records 43 to 89
    "stages": "record42", "groups": "record42", "cooldown": 0.5, "final_lr": 0.1,
    "momentum": (0.85, 0.95), "matrix_wd": 0.0, "matrix_beta2": 0.95, "cautious_wd": False,
    "adam_eps": 1e-8, "adam_wd": 0.0, "softcap": "sigmoid", "embed_std": 1.0,
    "value_embed_std": 1.0, "residual_init": 1.0, "zero_output": True, "value_gates": False,
    "key_offset": False, "bigram_rows": 0.0, "ngrams": 2, "bigram_signs": False, "xsa": False,
    "counted_ngrams": 0, "adam_accum_steps": 2,
}  # fmt: skip
PLAIN = RECORD42 | {  # a GPT without components of the speedrun
    "layers": "plain8", "stages": "constant", "smear": False, "x0_mixing": False,
    "attention_gates": False, "adam_accum_steps": 1,
}  # fmt: skip
MUON = PLAIN | {"optimizer": "muon", "matrix_lr": 0.014, "adam_lr": 0.014}
ADAMW = PLAIN | {"optimizer": "adamw", "groups": "adamw", "matrix_lr": 0.004, "matrix_wd": 0.1}
LONGER = {"steps": 900, "val_every": 300, "momentum_warmup": 120, "momentum_cooldown": 20}

ABOUT = {  # printed at the start of a run
    "tiny": "the hello, in a minute, without records. The race is small: ./run.sh --track small",
    "small": "the race: modded-nanogpt in miniature, on prose; docs/rules.md has its rule",
    "short": "modded-nanogpt's track 1, for GPUs. The race for any machine is small",
    "steps": "modded-nanogpt's track 3, for GPUs. The race for any machine is small",
}
TRACKS: dict[str, dict[str, Any]] = {
    "small": {},
    "tiny": {
        "target": 4.8, "batch_tokens": 2048, "seq_len": 256, "micro_batch": 2048,
        "max_document": 256, "val_tokens": 16_384, "val_seq_len": 1024, "val_every": 16,
        "steps": 64, "momentum_warmup": 10, "momentum_cooldown": 3, "compile": "off",
    },
    "short": {
        "recipe": "record42", "target": 3.28, "data_dir": "data/fineweb10B", "val_sha256": "",
        "vocab_size": 50257, "bos": 50256, "loss_kernel": "auto", "dim": 768, "head_dim": 128,
        "attention_scale": 0.1, "batch_tokens": 262_144, "seq_len": 32_768, "micro_batch": 0,
        "max_document": 2048, "val_tokens": 10_485_760, "val_seq_len": 262_144,
        "val_batch": 262_144, "val_every": 250, "window_block": 128, "val_window": 2560,
        "momentum": (0.85, 0.95), "momentum_warmup": 300, "momentum_cooldown": 50,
        "adam_lr": 0.008, "sample_tokens": 0,
    },
    "steps": PLAIN | {
        "recipe": "muon", "target": 3.28, "data_dir": "data/fineweb10B", "val_sha256": "",
        "vocab_size": 50257, "bos": 50256, "layers": "steps", "dim": 768, "head_dim": 128,
        "biases": True, "keep_float32": "head", "document_mask": False, "batch_tokens": 524_288,
        "seq_len": 1024, "micro_batch": 0, "max_document": 2048, "val_tokens": 10_485_760,
        "val_seq_len": 1024, "val_batch": 65_536, "val_every": 125,
        "attention_scale": 0.12, "softcap": "rsqrt", "init": "normal", "steps": 3250,
        "cooldown": 0.7, "final_lr": 0.0, "window_block": 0, "val_window": 2560,
        "momentum": (0.95, 0.95), "optimizer": "muon", "groups": "steps", "matrix_lr": 0.025,
        "matrix_wd": 0.05, "ortho_method": "newton_schulz_12", "adam_lr": 0.7, "adam_eps": 1e-10,
        "adam_wd": 0.001, "sample_tokens": 0,
    },
}  # fmt: skip

RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "small": {  # tuned: records/LOG.md
        "record89": {},
        "muon": MUON | LONGER,
        "adamw": ADAMW | LONGER,
    },
    "tiny": {
        "record89": {
            "stages": "tiny", "matrix_lr": 0.05, "adam_lr": 0.024, "bigram_rows": 10.0,
            "ngrams": 2,
        },
        "muon": MUON,
        "adamw": ADAMW,
    },
    "short": {
        "record42": RECORD42 | {
            "layers": "record42", "steps": 2285, "keep_float32": "none", "matrix_lr": 0.03,
        },
        # What records 43 to 89 changed, without their kernels and the gates by token of record 85.
        "record89": {
            "layers": "record89", "stages": "record89", "groups": "record89", "steps": 1285,
            "batch_tokens": 393_216, "seq_len": 16_384, "matrix_lr": 0.023,
            "adam_accum_steps": 2, "bigram_rows": 7.5, "ngrams": 2, "counted_ngrams": 0,
            "prefixes": True,
        },
    },
    "steps": {"muon": {}},
}  # fmt: skip


def idle(optimizer: str) -> list[str]:
    """Settings that do nothing under this optimizer."""
    found = []
    if optimizer != "normuon":
        found += ["matrix_beta2"]
    if optimizer not in ("normuon", "muon"):
        found += ["ortho_method", "ortho_backend"]
    if optimizer in ("adamw", "torch_adamw"):
        found += ["momentum", "momentum_warmup", "momentum_cooldown"]
    return found


def preset(given: dict[str, Any]) -> dict[str, Any]:
    """Defaults for settings that are not given: the track's, overridden by the recipe's.

    Refused if a given flag would do nothing.
    """
    gpu = given.get("device") not in ("cpu", "mps") and torch.cuda.is_available()
    track = given.get("track", "short" if gpu else "tiny")
    settings = {"track": track, "recipe": "record89"} | TRACKS.get(track, {})
    recipe = given.get("recipe", settings["recipe"])
    settings |= RECIPES.get(track, {}).get(recipe, {})
    if given.get("quick"):
        settings |= {"val_tokens": settings.get("val_batch", Config.val_batch), "sample_tokens": 0}
    optimizer = given.get("optimizer", settings.get("optimizer", "normuon"))
    for name in idle(optimizer):
        if name in given:
            raise Refused(f"{flag(name)} does nothing under --optimizer {optimizer}: leave it out, "
                          f"or choose another optimizer.")  # fmt: skip
    return settings


# ---- Rules: what a claim may not change. The judge has a list of its own, on purpose. Stages may
# use smaller batches; training windows, lookups and gates are free.

TASK = ("target", "vocab_size", "bos", "val_tokens")
SCORED = (*TASK, "document_mask", "val_seq_len", "val_window")
SIZES = ("dim", "head_dim", "mlp_ratio", "batch_tokens")
FIXED = {
    "short": TASK,
    "small": (*SCORED, *SIZES, "val_sha256"),
    "tiny": (*SCORED, *SIZES, "val_sha256"),
    "steps": SCORED + SIZES + (
        "layers", "seq_len", "window_block", "stages", "biases", "softcap", "attention_scale",
        "smear", "x0_mixing", "attention_gates", "key_offset", "bigram_rows", "counted_ngrams",
        "xsa",
    ),
}  # fmt: skip
FIXED_DEPTH = {"small": 8, "tiny": 8}  # layers; their table is free


def off_track(config: Config) -> list[str]:
    """For each setting that the track fixes and that differs here: what it is and should be."""
    track: dict[str, Any] = {field.name: field.default for field in fields(Config)}
    track |= TRACKS[config.track]
    found = ["quick is on"] if config.quick else []
    for name in FIXED.get(config.track, ()):
        value = getattr(config, name)
        if value != track[name]:
            now = as_text(value) or "empty"
            found.append(f"{name} is {now}, the track has {as_text(track[name])}")
    depth = len(LAYERS[config.layers])
    wanted = FIXED_DEPTH.get(config.track, depth)
    if depth != wanted:
        found.append(f"layers is {config.layers}, {depth} layers; the track has {wanted}")
    return found


# ---- Schedule: all that holds at a step, as a pure function. At step s, s steps are done.


class Stretch(NamedTuple):
    """A stage and its steps, from `first` to before `end`."""

    first: int
    end: int
    stage: Stage


class StepPlan(NamedTuple):
    """All that holds at a step."""

    stage_index: int  # in `stretches`; the last validation belongs to the last stretch
    stage: Stage
    batch_tokens: int
    lr_factor: float  # on the peak of every learning rate, cooldown included
    momentum: float  # of the hidden matrices
    adam_steps: bool  # Adam takes a step, on the gradients of the last `adam_accum_steps` steps
    windows: dict[str, int]  # tokens that "short" and "long" layers see
    loss_weights: list[float]  # of the next token, of those after it, and of its prefix if used
    counted_rows: int  # of the text trained on: those whose n-grams are counted
    begins: bool  # the first step of its stretch
    unties: bool  # the output head leaves the token embedding before this step
    validates: bool  # before this step, or after the last one


@cache
def stretches(config: Config) -> list[Stretch]:
    """The stages that have steps."""
    found, first, fraction = [], 0, 0.0
    stages = STAGES[config.stages]
    for index, stage in enumerate(stages):
        fraction += stage.fraction
        # A sum such as 0.3 + 0.3 + 0.4 may be a hair above a whole step, which ceil would add.
        end = math.ceil(fraction * config.steps - 1e-6)
        # Adam sums gradients over adam_accum_steps. It must not add those of two batch sizes, or of
        # a tied head and another: before a stage that changes these, wait for a step of Adam.
        after = stages[min(index + 1, len(stages) - 1)]
        if (stage.batch, stage.tied) != (after.batch, after.tied):
            every = config.adam_accum_steps
            end = min(math.ceil(end / every) * every, config.steps)
        if end > first:
            found.append(Stretch(first, end, stage))
            first = end
    return found


@cache
def schedule(config: Config, step: int) -> StepPlan:
    """The plan of a step. It keeps no state, so a resumed run needs none."""
    found = stretches(config)
    index = sum(step >= each.first for each in found) - 1  # the last that has begun
    first, end, stage = found[index]
    was_tied = index > 0 and found[index - 1].stage.tied

    short, long = stage.short * config.window_block, stage.long * config.window_block
    if not config.window_block:  # no windows, but in the last validation
        short = long = max(config.seq_len, config.val_seq_len)
    if step == config.steps:  # the last validation: long layers see more (@classiclarryd, 33, 35)
        short, long = min(short, config.val_window), config.val_window
    weights = [(1.0, 1.0), *stage.mtp_weights]
    # With prefixes, the last of several weights is the prefix's, even if it is 0.
    if config.prefixes and (stage.mtp_weights or any(stage.prefix_weight)):
        weights.append(stage.prefix_weight)
    progress = (step - first) / (end - first)  # through the stage: weights change linearly

    return StepPlan(
        stage_index=index,
        stage=stage,
        batch_tokens=round(stage.batch * config.batch_tokens),
        lr_factor=learning_rate(config, stage.lr_factor, step),
        momentum=momentum(config, step),
        adam_steps=(step + 1) % config.adam_accum_steps == 0,
        windows={"short": short, "long": long},
        loss_weights=[start + (last - start) * progress for start, last in weights],
        counted_rows=rows_to_count(config)[step],
        begins=step == first,
        unties=step == first and was_tied and not stage.tied,
        validates=step == config.steps or (config.val_every > 0 and step % config.val_every == 0),
    )


def learning_rate(config: Config, peak: float, step: int) -> float:
    """Factor on every peak: it falls from the stage's to final_lr, and stays in the extension."""
    scheduled = max(each.end for each in stretches(config) if not each.stage.extension)
    # 0.9999 as in record 42. It also keeps `left` above a cooldown of 0, so nothing divides by 0.
    left = 1 - min(step / scheduled, 0.9999)
    fraction = left / config.cooldown if left < config.cooldown else 1.0
    return peak * fraction + config.final_lr * (1 - fraction)


def momentum(config: Config, step: int) -> float:
    """It rises at the start and falls at the end."""
    low, high = config.momentum
    rising = step / config.momentum_warmup if config.momentum_warmup else 1.0
    left = config.steps - step
    falling = left / config.momentum_cooldown if config.momentum_cooldown else 1.0
    return low + (high - low) * min(rising, falling, 1.0)


def tokens_before(config: Config, step: int) -> int:
    return sum(schedule(config, earlier).batch_tokens for earlier in range(step))


@cache
def rows_to_count(config: Config) -> list[int]:
    """The rows of the text trained on whose n-grams are counted, at each step.

    Counting sorts the whole text, so it is done when that has grown by a tenth, and at the end.
    """
    found: list[int] = []
    rows = counted = 0
    for first, end, stage in stretches(config):
        for _ in range(first, end):
            counted = rows if rows > 1.1 * counted else counted
            found.append(counted)
            rows += round(stage.batch * config.batch_tokens) // config.seq_len
    return [*found, rows]


def readings(config: Config) -> list[Reading]:
    """How the loader reads the text, stretch by stretch."""
    found = []
    for first, _, stage in stretches(config):
        batch_tokens = schedule(config, first).batch_tokens
        found.append(Reading(first, batch_tokens, stage.document or config.max_document))
    return found


def rotary_at(config: Config, index: int) -> tuple[Tensor, Tensor]:
    """Radians a token for each pair (D / 2,), half of them 0, and the factor () on queries.

    Both are float32 and hold in the stretch of this index. When the long window grows, YaRN
    (arXiv:2309.00071; @classiclarryd, record 31) slows the frequencies that turn less than once in
    the old window, keeps those over 32 turns, and raises the factor.
    """
    pairs = config.head_dim // 2
    turning = (1 / 1024) ** torch.linspace(0, 1, pairs // 2)
    frequency = torch.cat([turning, torch.zeros(pairs - pairs // 2)])  # 0: see `offset_keys`
    scale = torch.tensor(config.attention_scale)
    stages = [each.stage for each in stretches(config)[: index + 1]]
    for before, now in pairwise(stages if config.window_block else ()):  # no window, no growth
        rotations = config.window_block * before.long * frequency / (2 * math.pi)
        kept = ((rotations - 1) / (32 - 1)).clamp(0, 1)
        ratio = before.long / now.long
        frequency = frequency * (ratio + kept * (1 - ratio))
        scale = scale * (1 + 0.2 * math.log(now.long / before.long))
    return frequency, scale


def receptive_field(config: Config) -> int:
    """At least as many earlier tokens as an output depends on: all layers' windows, added up."""
    steps = [*(each.first for each in stretches(config)), config.steps]
    tokens = max(int(config.smear), config.ngrams - 1 if config.bigram_rows else 0)
    tokens = max(tokens, config.counted_ngrams - 1)
    for layer in LAYERS[config.layers]:
        if layer.attention:
            tokens += max(schedule(config, step).windows[layer.window] for step in steps)
            tokens += int(config.key_offset and layer.window == "long")
    return math.ceil(tokens / 128) * 128  # kernels are fastest at multiples of 128


def context(config: Config) -> int:
    """The most tokens of a sequence that a prediction can depend on."""
    return min(receptive_field(config) + 1, max(config.seq_len, config.val_seq_len))

# ---- Model. B sequences, T tokens of each, H heads, D head dimension, C model dimension.

GATE_CHANNELS = 12  # of a layer's input, read by the smear gate and the attention gates
MUDD_SCALE = 0.1  # on what the MUDD MLPs put out


def optional(when: Any, *shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter | None:
    """A parameter that exists only `when` its component is on; `GPT.initialize` fills it."""
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
    layer can copy; without the offset that takes two (@classiclarryd, record 49). A document's
    first key stays.
    """
    D = k_BTHD.size(-1)
    still_D = torch.arange(D, device=k_BTHD.device) % (D // 2) >= D // 4
    before_BTHD = torch.cat([k_BTHD[:, :1], k_BTHD[:, :-1]], dim=1)
    return torch.where(still_D & ~begins_BT11, before_BTHD, k_BTHD)


class LayerScalars(NamedTuple):
    """The learned scalars of a layer, and in `initial_scalars` what they start from.

    None: the layer does without, since the component is off.
    """

    residual: Any  # factor on the layer's input
    x0: Any  # factor on the token embedding, which joins the input
    bigram: Any  # factor on the n-gram embeddings, which join the input
    value: Any  # factor on the weight of attention's values
    value_embed: Any  # factor on the value embedding
    skip: Any  # its sigmoid is the factor on the earlier output of `skip_from`


class Scalars(NamedTuple):
    """All learned scalars, or their initial values."""

    layers: list[LayerScalars]
    smear: Any  # factor on the gated embedding of the token before
    backout: Any  # factor on what is subtracted at the end


class MuddStreams(NamedTuple):
    """What a MuddBlock mixes besides its input, each (B, T, C)."""

    first: Tensor  # input of layer 0
    backout: Tensor  # output of the layer with `backout`
    earlier: Tensor  # output of layer `mudd`
    value_embed: Tensor  # of table 0
    bigram: Any  # n-gram embeddings; 0 without a table


class LayerExtras(NamedTuple):
    """What a layer reads besides the residual stream."""

    value_embed_BTC: Tensor | None
    value_factor: Any  # learned scalar, or None for 1; so is value_embed_factor
    value_embed_factor: Any
    rotary: tuple[Tensor, Tensor, Tensor]  # cos, sin, and the factor on queries
    begins_BT11: Tensor  # whether a token is the first of its document
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]  # of queries, keys and values, (B, T, H, D)
    mudd: MuddStreams | None = None


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
        # A MuddBlock weighs its value embedding by token instead.
        gated_value = config.value_gates and layer.value_embed is not None and layer.mudd is None
        self.value_gate = optional(gated_value, heads, GATE_CHANNELS, dtype=gate_dtype)
        self.own_value = optional(config.xsa and not layer.paired, heads, 1)
        self.bias = optional(config.biases, 4 * config.dim)

    def forward(self, x_BTC: Tensor, extras: LayerExtras) -> Tensor:
        cos, sin, scale = extras.rotary
        B, T, C = x_BTC.shape
        w_q, w_k, w_v, w_o = self.qkvo.view(4, C, C)
        qkv_bias, o_bias = (None, None) if self.bias is None else self.bias.split([3 * C, C])

        if extras.value_factor is not None:
            w_v = extras.value_factor * w_v  # a pass over the weight, not over all values
        qkv = linear(x_BTC, torch.cat([w_q, w_k, w_v]), qkv_bias)
        q_BTHD, k_BTHD, v_BTHD = qkv.view(B, T, -1, self.head_dim).chunk(3, dim=2)
        if self.paired:
            # Token t becomes two, 2t with half of its heads and 2t + 1 with the others, so a head
            # sees the keys of its pair too (@classiclarryd, record 58). As (B, T, 2, H / 2, D)
            # both are a view until attention: a copy here would cost one in float32 later.
            q_BTHD, k_BTHD, v_BTHD = (y.unflatten(2, (2, -1)) for y in (q_BTHD, k_BTHD, v_BTHD))
            cos, sin = (y.unflatten(0, (-1, 2)) for y in (cos, sin))
        # Normed queries and keys bound the scores, whatever the weights (arXiv:2010.04245;
        # @Grad62304977, record 5).
        q_BTHD = rotate(norm(q_BTHD), cos, sin) * scale
        k_BTHD = rotate(norm(k_BTHD), cos, sin)
        if self.key_offset:
            k_BTHD = offset_keys(k_BTHD, extras.begins_BT11)
        if extras.value_embed_BTC is not None:  # @KoszarskyB, record 14
            embed_BTHD = extras.value_embed_BTC.view(B, T, -1, self.head_dim)
            if self.value_gate is not None:
                # 2 sigmoid(0) = 1 at first. The gate reads channels of the input and of the
                # embedding (@classiclarryd, record 55).
                half = GATE_CHANNELS // 2
                read = torch.cat([x_BTC[..., :half], extras.value_embed_BTC[..., :half]], dim=-1)
                gate_BTH = torch.sigmoid(linear(read, self.value_gate))
                embed_BTHD = 2 * gate_BTH.unsqueeze(-1) * embed_BTHD
            if extras.value_embed_factor is not None:
                embed_BTHD = extras.value_embed_factor * embed_BTHD
            v_BTHD = v_BTHD + embed_BTHD.view_as(v_BTHD)

        if self.paired:
            q_BTHD, k_BTHD, v_BTHD = (y.flatten(1, 2) for y in (q_BTHD, k_BTHD, v_BTHD))
        y_BTHD = extras.attend(q_BTHD, k_BTHD, v_BTHD)
        if self.own_value is not None:
            # XSA: subtract the part along the token's own value, which the residual stream
            # carries anyway (@_djdumpling, record 82).
            own_BTHD = F.normalize(v_BTHD, dim=-1)
            along_BTH1 = (y_BTHD * own_BTHD).sum(-1, keepdim=True)
            y_BTHD = y_BTHD - torch.tanh(self.own_value).to(x_BTC.dtype) * along_BTH1 * own_BTHD
        if self.gate is not None:
            # A head can turn itself off; few channels are enough (@classiclarryd, record 28).
            gate_BTH = torch.sigmoid(linear(x_BTC[..., :GATE_CHANNELS], self.gate))
            y_BTHD = y_BTHD.view(B, T, -1, self.head_dim) * gate_BTH.unsqueeze(-1)
        return linear(y_BTHD.reshape(B, T, C), w_o, o_bias)


class MLP(nn.Module):
    """relu(x up)^2 down^T (arXiv:2109.08668).

    Both are stored (C, mlp_ratio C), so that the optimizer batches them (@byronxu99, record 27).
    """

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


def weighted(weights: tuple[Tensor, ...], *streams: Tensor) -> Any:
    """The sum of the streams (B, T, C), each times its weight (B, T, 1)."""
    return sum(weight * stream for weight, stream in zip(weights, streams, strict=True))


class MuddBlock(Block):
    """The last layer with MUDD (arXiv:2502.12170; @Lisennlp, record 81).

    Each token has weights of its own for what it adds up.
    """

    def __init__(self, config: Config, layer: Layer, gate_dtype: torch.dtype):
        super().__init__(config, layer, gate_dtype)
        # Small MLPs before and after the layer give 14 weights each; 5 of the second are used.
        self.mudd_in = nn.Parameter(torch.empty(2, 64, config.dim, dtype=gate_dtype))
        self.mudd_out = nn.Parameter(torch.empty(2, 14, 64, dtype=gate_dtype))
        self.mudd_start = nn.Parameter(torch.empty(2, 14, dtype=gate_dtype))  # weights at the start

    def weights(self, x_BTC: Tensor, mlp: int) -> tuple[Tensor, ...]:
        """14 weights of each token, each (B, T, 1). mlp: 0 before the layer, 1 after it."""
        hidden = F.gelu(linear(x_BTC, self.mudd_in[mlp]))
        out = linear(hidden, self.mudd_out[mlp], self.mudd_start[mlp])
        return (MUDD_SCALE * out).split(1, dim=-1)

    def forward(self, x_BTC: Tensor, read_BTC: Tensor, extras: LayerExtras) -> Tensor:
        assert extras.mudd is not None
        assert extras.value_embed_BTC is not None
        first, backout, earlier, value_embed, bigram = extras.mudd
        weights = self.weights(x_BTC, mlp=0)
        for_values, for_input, (left, right) = weights[:3], weights[3:6], weights[6:8]
        for_attention, for_mlp = weights[8:12], weights[12:]  # what each of the two adds to

        # Values: the value embedding, weighed for each half of the heads, and three streams.
        left_half, right_half = extras.value_embed_BTC.chunk(2, dim=-1)
        value_BTC = torch.cat([left * left_half, right * right_half], dim=-1)
        value_BTC = value_BTC + weighted(for_values, first, backout, x_BTC)
        extras = extras._replace(value_embed_BTC=value_BTC)

        y_BTC = x_BTC + weighted(for_input, first, backout, x_BTC)
        attended = self.attention(norm(read_BTC, self.attention_gain), extras)
        y_BTC = weighted(for_attention, y_BTC, attended, first, bigram)
        y_BTC = weighted(for_mlp, y_BTC, self.mlp(norm(y_BTC, self.mlp_gain)))
        for_output = self.weights(y_BTC, mlp=1)[:5]
        return y_BTC + weighted(for_output, first, backout, x_BTC, value_embed, earlier)


def initial_scalars(config: Config) -> Scalars:
    """Which scalars the model has, and their initial values."""
    table = LAYERS[config.layers]
    values_scaled = any(each.value_embed is not None for each in table)
    layers = []
    for layer in table:
        mudd = layer.mudd is not None  # it has weights by token instead
        x0 = config.x0_mixing and not mudd
        embedded = layer.value_embed is not None and not mudd
        layers.append(LayerScalars(
            residual=config.residual_init if x0 else None,
            x0=0.0 if x0 else None,
            bigram=0.1 if config.bigram_rows and not mudd else None,
            value=0.5 if layer.attention and values_scaled else None,
            value_embed=0.5 if embedded else None,
            skip=-1.5 if layer.skip_from is not None else None,  # sigmoid: 0.18 at first
        ))  # fmt: skip
    backout = any(layer.backout for layer in table) and table[-1].mudd is None
    return Scalars(layers, 0.0 if config.smear else None, 0.5 if backout else None)


class ModelInputs(NamedTuple):
    """What the forward pass reads, besides weights: see `GPT.look_up`."""

    tokens_BT: Tensor
    cu_seqlens: Tensor  # where documents begin, and the end: see kernels/attention.py
    documents: Any  # the same as the attention backend wants it
    paired_documents: Any  # the same for paired heads, whose sequences have twice the length
    embed_BTC: Tensor  # token embeddings, like the next two in the dtype of their table
    value_embeds_BTC: list[Tensor]  # value embeddings, by table
    ngrams_nBTC: Tensor | None  # embeddings of bigrams, trigrams and so on


class GPT(nn.Module):
    """Next-token loss on sequences of packed documents, summed over targets.

    `set_step` sets what changes in the course of a run: windows, rotary tables and whether the head
    is tied.
    """

    rotary: Tensor  # (cos, cos) and (sin, -sin) of each pair of channels, (2, positions, 1, D)
    scale: Tensor  # (), the factor on queries
    signs: Tensor | None  # (8192, C), of bigrams
    windows: dict[str, Any]  # of "short" and "long" layers, as the attention backend wants them

    def __init__(
        self, config: Config, dtype: torch.dtype, device: torch.device, attention: Attention,
        head: str = "plain",  # one of HEADS: how the loss is computed
    ):  # fmt: skip
        super().__init__()
        self.config, self.dtype, self.attention, self.head = config, dtype, attention, head
        self.layers, self.softcap = LAYERS[config.layers], SOFTCAPS[config.softcap]
        self.tied = False  # whether the token embedding is the output head too
        self.sparse_bigram = False  # whether the n-gram table gets a sparse gradient
        self.stage_index = -1  # in `stretches`, of the rotary tables; -1: there are none yet
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
            self.blocks = nn.ModuleList()
            for layer in self.layers:
                kind = Block if layer.mudd is None else MuddBlock
                self.blocks.append(kind(config, layer, table_dtype))
            self.lm_head = nn.Parameter(torch.empty(table_shape, dtype=head_dtype))
            self.lm_head_bias = optional(config.biases, config.padded_vocab)
            longest, rows = config.counted_ngrams, rows_to_count(config)[-1]
            self.counts = (
                NgramCounts(longest, config.vocab_size, rows, config.seq_len) if longest else None
            )
            # Rows: the softmax and each length of n-grams. Columns: see `mix`.
            self.count_gate = optional(longest, longest, config.dim + longest)
            self.embed_gain = optional(config.biases, config.dim)
            self.head_gain = optional(config.biases, config.dim)
            # All scalars are one parameter: fifty of one number would cost fifty small updates.
            self.initial = initial_scalars(config)
            self.scalars = optional(self.initial_values(), len(self.initial_values()))
            for table in (self.embed, *self.value_embeds, self.bigram):
                if table is not None:
                    table.grad_dtype = wide  # a frequent token's row is a sum of thousands
            positions = max(config.seq_len, config.val_seq_len)
            positions *= 2 if any(layer.paired for layer in self.layers) else 1
            rotary = torch.empty(2, positions, 1, config.head_dim, dtype=dtype)
            self.register_buffer("rotary", rotary, persistent=False)
            self.register_buffer("scale", torch.empty(()), persistent=False)

    def set_step(self, step: int) -> None:
        """Set windows, rotary tables, the output head and the counts of this step."""
        plan, device = schedule(self.config, step), self.rotary.device
        if self.counts is not None:
            self.counts.count(plan.counted_rows)
        self.tied = plan.stage.tied
        self.windows = {kind: self.attention.window(count) for kind, count in plan.windows.items()}
        if plan.stage_index != self.stage_index:
            self.stage_index = plan.stage_index
            frequency, scale = rotary_at(self.config, plan.stage_index)
            positions = torch.arange(self.rotary.size(1), device=device)
            angle = torch.outer(positions, machines.sent(frequency, device)).unsqueeze(1)
            cos, sin = angle.cos(), angle.sin()
            # In place: compiled graphs hold these tensors.
            self.rotary.copy_(torch.stack([torch.cat([cos, cos], -1), torch.cat([sin, -sin], -1)]))
            self.scale.copy_(machines.sent(scale, device))

    # ---- Parameters

    def initial_values(self) -> list[float]:
        """The initial scalars in the order in which they are stored."""
        starts = [start for layer in self.initial.layers for start in layer]
        starts += [self.initial.smear, self.initial.backout]
        return [start for start in starts if start is not None]

    def learned_scalars(self) -> Scalars:
        """The learned scalars, each (), in the dtype of activations."""
        rest = iter(() if self.scalars is None else self.scalars.to(self.dtype).unbind())

        def learned(start: float | None) -> Tensor | None:
            return None if start is None else next(rest)  # as `initial_values` stores them

        layers = [LayerScalars(*map(learned, layer)) for layer in self.initial.layers]
        return Scalars(layers, learned(self.initial.smear), learned(self.initial.backout))

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set every parameter from `seed`, the same on any device, by the rules of `_initial`."""
        for name, parameter in self.named_parameters():
            # Each name has a random stream of its own, so switching a component off moves no other.
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]
            generator = torch.Generator().manual_seed(int.from_bytes(digest))
            parameter.copy_(self._initial(name, parameter.shape, generator))

    def _initial(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        config = self.config
        kind = name.rpartition(".")[2]  # `up` of `blocks.3.mlp.up`
        if kind == "qkvo":
            qkvo = self._drawn((4, shape[0], shape[0]), generator)  # Q, K, V and O
            if config.zero_output:
                qkvo[3] = 0  # attention adds nothing at first
            return qkvo.view(shape)
        if kind == "up":
            return self._drawn(shape, generator)
        if kind == "embed":
            return config.embed_std * torch.randn(shape, generator=generator)
        if name.startswith("value_embeds"):
            return config.value_embed_std * torch.randn(shape, generator=generator)
        if kind == "scalars":
            return torch.tensor(self.initial_values())
        if kind == "mudd_in":
            return torch.empty(shape).uniform_(-1, 1, generator=generator) / shape[2] ** 0.5
        if kind == "mudd_start":
            # At first this is what other layers do: both halves of the value embedding as they
            # are, the residual stream, attention, a little of the bigrams, the MLP; and backout.
            # The residual stream has a weight before attention and one before the MLP, hence roots.
            start, residual = torch.zeros(shape), config.residual_init**0.5
            start[0, 6:] = torch.tensor([2.0, 2.0, residual, 1.0, 0.0, 0.05, residual, 1.0])
            start[1, 1] = -0.5
            return start / MUDD_SCALE
        if kind == "count_gate":
            start = torch.zeros(shape)
            start[1:, -1] = -2.0  # at first a seventh of the softmax's weight for each length
            return start
        if kind.endswith("gain"):
            return torch.ones(shape)
        zero = ("down", "lm_head", "bigram", "own_value", "gate", "value_gate", "smear_gate")
        if kind in (*zero, "mudd_out") or kind.endswith("bias"):
            return torch.zeros(shape)
        raise RuntimeError(f"parameter {name} has no rule in GPT._initial; add one")

    def _drawn(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw a hidden matrix, or a stack of them, by the rule that `init` names."""
        w = torch.empty(shape)
        if self.config.init == "normal":
            return w.normal_(0, (0.33 / self.config.dim) ** 0.5, generator=generator)
        bound = 3**0.5 * 0.5 / self.config.dim**0.5  # standard deviation 0.5 / sqrt(dim)
        return w.uniform_(-bound, bound, generator=generator)

    # ---- Forward pass

    def look_up(self, inputs_BT: Tensor, cu_seqlens: Tensor, longest: int) -> ModelInputs:
        """What the forward pass reads. longest: at least the tokens of any document.

        Not compiled: so one graph takes any documents, and lookups keep the quick gradients of
        kernels/lookups.py.
        """
        B, T = inputs_BT.shape
        documents = paired_documents = self.attention.documents(cu_seqlens, B, T, longest)
        if any(layer.paired for layer in self.layers):
            paired_documents = self.attention.documents(2 * cu_seqlens, B, 2 * T, 2 * longest)
        found = None
        if self.bigram is not None:
            lengths = range(2, self.config.ngrams + 1)
            found = lookup(
                torch.stack([ngrams(inputs_BT, len(self.bigram), length) for length in lengths]),
                self.bigram, sparse=self.sparse_bigram,
            )  # fmt: skip
        return ModelInputs(
            inputs_BT, cu_seqlens, documents, paired_documents, lookup(inputs_BT, self.embed),
            [lookup(inputs_BT, table) for table in self.value_embeds], found,
        )  # fmt: skip

    def hidden(self, inputs_BT: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        """The residual stream (B, T, C) after the last norm. Arguments: see `look_up`."""
        return self.residual_stream(self.look_up(inputs_BT, cu_seqlens, longest))

    def residual_stream(self, inputs: ModelInputs) -> Tensor:
        B, T = inputs.tokens_BT.shape
        scalars = self.learned_scalars()
        # True at a document's first token. cu_seqlens ends with B * T, hence one place more.
        begins = torch.zeros(B * T + 1, dtype=torch.bool, device=inputs.tokens_BT.device)
        begins_BT11 = begins.index_fill(0, inputs.cu_seqlens.long(), True)[:-1].view(B, T, 1, 1)

        x_BTC = inputs.embed_BTC.to(self.dtype)
        if self.smear_gate is not None:
            # Each token learns what came before it already in layer 0 (@classiclarryd, record 34).
            # Not masked: a document's first token reads the document before, as in the record.
            gate = linear(x_BTC[:, 1:, :GATE_CHANNELS], self.smear_gate)
            smeared = x_BTC[:, 1:] + scalars.smear * torch.sigmoid(gate) * x_BTC[:, :-1]
            x_BTC = torch.cat([x_BTC[:, :1], smeared], dim=1)
        x_BTC = x0_BTC = norm(x_BTC, self.embed_gain)
        values = [each.to(self.dtype) for each in inputs.value_embeds_BTC]
        bigram_BTC: Any = 0.0
        if inputs.ngrams_nBTC is not None:
            bigram_BTC, *longer = inputs.ngrams_nBTC.to(self.dtype).unbind()
            if self.signs is not None:
                rows_BT = sign_rows(inputs.tokens_BT, len(self.signs))
                bigram_BTC = bigram_BTC * self.signs[rows_BT]
            bigram_BTC = sum(longer, bigram_BTC)

        read_later = {i for each in self.layers for i in (each.skip_from, each.reads, each.mudd)}
        outputs: dict[int, Tensor] = {}  # of layers that a later one reads
        first_BTC: Any = None  # input of layer 0
        backed_out_BTC: Any = None  # output of the layer with `backout`
        parts = zip(self.layers, self.blocks, scalars.layers, strict=True)
        for i, (layer, block, scalar) in enumerate(parts):
            if layer.skip_from is not None:
                x_BTC = x_BTC + torch.sigmoid(scalar.skip) * outputs[layer.skip_from]
            if scalar.residual is not None:
                x_BTC = scalar.residual * x_BTC + scalar.x0 * x0_BTC
            if scalar.bigram is not None:
                x_BTC = x_BTC + scalar.bigram * bigram_BTC
            if i == 0:
                first_BTC = x_BTC
            documents = inputs.paired_documents if layer.paired else inputs.documents
            window = self.windows[layer.window]
            mudd = None
            if layer.mudd is not None:
                earlier_BTC = outputs[layer.mudd]
                mudd = MuddStreams(first_BTC, backed_out_BTC, earlier_BTC, values[0], bigram_BTC)
            extras = LayerExtras(
                value_embed_BTC=None if layer.value_embed is None else values[layer.value_embed],
                value_factor=scalar.value,
                value_embed_factor=scalar.value_embed,
                rotary=(*self.rotary, self.scale),
                begins_BT11=begins_BT11,
                attend=partial(self.attention, documents=documents, window=window),
                mudd=mudd,
            )
            read_BTC = x_BTC if layer.reads is None else outputs[layer.reads]
            if self.config.activation_checkpointing:
                x_BTC = checkpoint(block, x_BTC, read_BTC, extras, use_reentrant=False)
            else:
                x_BTC = block(x_BTC, read_BTC, extras)
            if i in read_later:
                outputs[i] = x_BTC
            if layer.backout:
                backed_out_BTC = x_BTC
        if scalars.backout is not None:
            # What served the middle layers need not reach the head (@classiclarryd, record 40).
            x_BTC = x_BTC - scalars.backout * backed_out_BTC
        return norm(x_BTC, self.head_gain)

    def forward(
        self, inputs_BT: Tensor, targets_BT: Tensor, cu_seqlens: Tensor, longest: int,
        weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The next token's loss, summed over targets: ().

        Targets may cover only the last positions of each sequence. (2,) with weights, one for each
        kind of target, see `several_targets`, and in training with counts: the sum to train on, and
        the next token's loss.
        """
        counts = self.target_counts(inputs_BT, targets_BT)
        return self.loss(self.hidden(inputs_BT, cu_seqlens, longest), targets_BT, weights, counts)

    def compiled(self) -> Callable[..., Tensor]:
        """`forward`, compiled as two graphs: stages with other targets share the large one."""
        compiler = partial(torch.compile, dynamic=False, fullgraph=True)
        residual_stream, loss = compiler(self.residual_stream), compiler(self.loss)

        def forward(
            inputs_BT: Tensor, targets_BT: Tensor, cu_seqlens: Tensor, longest: int,
            weights: Tensor | None = None,
        ) -> Tensor:  # fmt: skip
            x_BTC = residual_stream(self.look_up(inputs_BT, cu_seqlens, longest))
            return loss(x_BTC, targets_BT, weights, self.target_counts(inputs_BT, targets_BT))

        return forward

    def loss(
        self, x_BTC: Tensor, targets_BT: Tensor, weights: Tensor | None,
        counts: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """The loss as `forward` returns it, from the residual stream and `target_counts`."""
        x_BTC = x_BTC[:, -targets_BT.size(1) :]
        if counts is not None:
            own, mixed = self.mixed_losses(x_BTC, targets_BT, counts)
            if not torch.is_grad_enabled():
                return mixed.sum()
            # The network learns from its own loss: else it would learn less of what counts know
            # already. The loss of the mixture trains the gate alone.
            return torch.stack([(own + mixed).sum(), mixed.sum()])
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

    def eval_context(self, inputs_BT: Tensor) -> tuple[Tensor, int]:
        """cu_seqlens and longest of sequences whose documents begin with bos."""
        begins = (inputs_BT == self.config.bos) & self.config.document_mask
        begins[:, 0] = True
        starts = begins.flatten().nonzero().flatten().int()
        cu_seqlens = F.pad(starts, (0, 1), value=inputs_BT.numel())
        return cu_seqlens, inputs_BT.size(1)

    def token_losses(self, inputs_BT: Tensor, targets_BT: Tensor, *context: Any) -> Tensor:
        """The loss of each target, float32 (B, T): see `forward`. Tokens may be on any device.

        context: cu_seqlens and longest, by default those of `eval_context`.
        """
        inputs_BT, targets_BT = inputs_BT.to(self.embed.device), targets_BT.to(self.embed.device)
        x = self.hidden(inputs_BT, *(context or self.eval_context(inputs_BT)))
        x = x[:, -targets_BT.size(1) :]
        counts = self.target_counts(inputs_BT, targets_BT)
        if counts is None:
            losses = self.plain_loss(x.flatten(0, 1), targets_BT.flatten(), reduction="none")
        else:
            _, losses = self.mixed_losses(x, targets_BT, counts)
        return losses.view_as(targets_BT)

    def logits(self, inputs_BT: Tensor, count: int) -> Tensor:
        """Logits after each of the last `count` inputs, float32 (B, count, V).

        With counts, the logarithms of probabilities.
        """
        inputs_BT = inputs_BT.to(self.embed.device)
        x = self.hidden(inputs_BT, *self.eval_context(inputs_BT))[:, -count:]
        z = linear(x, self.output_weight, self.lm_head_bias).float()
        z_BTV, vocab_size = capped(z, self.softcap), self.config.vocab_size
        if self.counts is None:
            return z_BTV[..., :vocab_size]
        tokens = torch.arange(vocab_size, device=x.device).expand(*x.shape[:2], -1)
        counts = self.counts.frequencies(inputs_BT, tokens)
        return self.mix(z_BTV.log_softmax(-1)[..., :vocab_size], x, *counts)

    # ---- Counts. The softmax is mixed with the frequencies of n-grams in the text trained on.

    def target_counts(self, inputs_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        """What `mix` reads of the counts, for the targets alone; not compiled."""
        if self.counts is None:
            return None
        return self.counts.frequencies(inputs_BT, targets_BT.unsqueeze(-1))

    def mix(
        self, log_softmax_BTK: Tensor, x_BTC: Tensor, frequencies_BTKL: Tensor, totals_BTL: Tensor
    ) -> Tensor:  # fmt: skip
        """The log probability of K tokens: softmax and frequencies, weighed by a gate.

        The gate reads the residual stream, the logarithms of how often each of the L contexts
        occurred, and 1. A context that never occurred has no weight.
        """
        read = torch.cat([x_BTC.float(), totals_BTL.float().log1p()], dim=-1)
        assert self.count_gate is not None
        gate = linear(F.pad(read, (0, 1), value=1.0), self.count_gate)
        seen = F.pad(totals_BTL > 0, (1, 0), value=True)
        log_weight = gate.masked_fill(~seen, -math.inf).log_softmax(-1)
        # In logarithms no gate can make the probability 0.
        parts = torch.cat([log_softmax_BTK.unsqueeze(-1), frequencies_BTKL.log()], dim=-1)
        return (parts + log_weight.unsqueeze(-2)).logsumexp(-1)

    def mixed_losses(
        self, x_BTC: Tensor, targets_BT: Tensor, counts: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The loss of each target in the softmax and in the mixture, each (B, T) float32."""
        own = self.plain_loss(x_BTC.flatten(0, 1), targets_BT.flatten(), reduction="none")
        own_BT1 = own.view(*targets_BT.shape, 1)
        mixed_BT1 = self.mix(-own_BT1.detach(), x_BTC.detach(), *counts)
        return own_BT1[..., 0], -mixed_BT1[..., 0]

    def plain_loss(self, x: Tensor, targets: Tensor, **options: Any) -> Tensor:
        bias = None if self.lm_head_bias is None else self.lm_head_bias.to(x.dtype)
        weight = self.output_weight.to(x.dtype)
        return plain_cross_entropy(x, weight, bias, targets, self.softcap, **options)

    def flops_per_token(self) -> int:
        """6 for each weight of matrices and head, backward included; attention scores left out."""
        matrices = ("qkvo", "up", "down", "lm_head")
        return 6 * sum(p.numel() for name, p in self.named_parameters() if name.endswith(matrices))


# ---- Optimizers


def make_optimizers(config: Config, model: GPT, machine: Machine) -> tuple[dict, optim.Guard]:
    """{"matrix": ..., "adam": ..., "rows": ...} and the guard that steps all of them."""
    ranks = torch.distributed.group.WORLD if machine.world_size > 1 else None
    ours: dict[str, Any] = {"process_group": ranks, "cautious": config.cautious_wd}
    ours["compiled"] = False if config.compile == "off" else None  # None: on GPUs
    matrix: dict[str, Any] = {"lr": config.matrix_lr, "weight_decay": config.matrix_wd}
    muon = ours | matrix | {"method": config.ortho_method, "backend": config.ortho_backend}
    matrix_adam = matrix | {"betas": (0.9, 0.95), "eps": config.adam_eps}
    adam = ours | {"lr": config.adam_lr, "weight_decay": config.adam_wd, "eps": config.adam_eps}
    # Another optimizer is one more line here. Any torch.optim.Optimizer will do.
    factories: dict[str, Any] = {
        "normuon": partial(optim.NorMuon, beta2=config.matrix_beta2, **muon),
        "muon": partial(optim.Muon, **muon),
        "adamw": partial(optim.AdamW, **matrix_adam, **ours),
        "torch_muon": partial(torch.optim.Muon, **matrix),
        "torch_adamw": partial(torch.optim.AdamW, **matrix_adam),
    }
    named = {
        "matrix": factories[config.optimizer],
        "adam": partial(optim.AdamW, **adam),
        "rows": partial(optim.RowAdam, **adam),  # a table of n-grams, of which a step reads few
    }
    optimizers = optim.build_optimizers(model.named_parameters(), group_rows(config), named)
    spike = optim.SpikeRule(sigma=config.spike_sigma) if config.guard == "spikes" else None
    return optimizers, optim.Guard(
        optimizers.values(), spike=spike, nonfinite=config.guard != "off", process_group=ranks
    )


def group_rows(config: Config) -> list[optim.Row]:
    """The recipe's table of GROUPS as `optim` reads it: a row for each pattern."""
    pair, dim = 2 * config.head_dim, config.dim
    pairs = (pair,) * (2 * dim // pair)  # of Q and K
    splits: dict[str, Any] = {"q k v o": 4, "head pairs v o": (*pairs, dim, dim)}
    found = []
    for group in GROUPS[config.groups]:
        options: dict[str, Any] = {"lr_mul": group.lr_mul, "wd_mul": group.wd_mul}
        if group.betas is not None:
            options["betas"] = group.betas
        if group.split:
            options["split"] = splits[group.split]  # only Muon and NorMuon read it
        found += [optim.Row(name, group.optimizer, options) for name in group.names.split()]
    return found


def set_rates(config: Config, optimizers: dict[str, Any], plan: StepPlan) -> None:
    """Set the learning rate, decay and momentum of every parameter group for a step."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * plan.lr_factor
            if config.cautious_wd:
                # optim multiplies by lr again: decay goes with lr^2 (@varunneal, record 43).
                group["weight_decay"] = optimizer.defaults["weight_decay"] * group["lr"]
            if "momentum" in group:  # those of Adam have betas instead
                group["momentum"] = plan.momentum


# ---- Trainer: the state of a run, and the steps that change it


class Trainer:
    """Model, optimizers, guard and data. ValueError if they cannot work together."""

    def __init__(self, config: Config, machine: Machine):
        self.config, self.machine = config, machine
        settings, device = asdict(config), machine.device
        seeds = [config.seed + trial for trial in range(config.trials)]
        self.claim = machine.on_main(lambda: check_claim(config.claim, SOURCE, settings, seeds))

        # Backends, each with the reason for the choice.
        dtype = machines.compute_dtype(config.dtype, device)
        attention, why = choose_attention(config.attention, device, dtype, config.head_dim)
        head, why_head = choose_head(
            config.loss_kernel, device, dtype, config.dim, config.padded_vocab, config.biases
        )
        self.chosen = {"attention": why, "head": why_head}

        self.changes = readings(config)
        reach = receptive_field(config)
        self.data = Data(settings, self.changes, reach, machine.rank, machine.world_size)

        self.model = GPT(config, dtype, device, attention, head)
        if config.prefixes:
            self.model.prefixes = torch.tensor(read_prefixes(config), device=device)
        self.loss: Any = self.model  # warm_up replaces it with the compiled model
        self.optimizers, self.guard = make_optimizers(config, self.model, machine)
        # On a GPU, RowAdam would wait for the device to learn how many rows were read; there a
        # pass over the table costs less.
        self.model.sparse_bigram = "rows" in self.optimizers and device.type == "cpu"

        # Facts for the log: see runtime/trainer.py.
        self.hashes = machine.on_main(lambda: audit(settings, self.data.train.end.shard + 1))
        self.checks = {"overlap": self.hashes.pop("overlap")}
        self.source_sha256 = machine.on_main(lambda: source_hash(SOURCE))
        self.env = machines.describe(machine, dtype) | {"attention": attention.name, "head": head}
        self.env["params"] = sum(p.numel() for p in self.model.parameters())
        self.env["layer_params"] = sum(p.numel() for p in self.model.blocks.parameters())
        self.env |= provenance(SOURCE)
        plans = [schedule(config, step) for step in range(config.steps + 1)]
        self.train_tokens = tokens_before(config, config.steps)
        self.validations = [step for step, plan in enumerate(plans) if plan.validates]
        self.off_track = off_track(config)

    def reset(self, seed: int) -> None:
        """Set everything that a run changes to its value before the first step of this seed."""
        torch.manual_seed(seed)  # of what a model may draw at random in training, such as dropout
        self.model.initialize(seed)
        if self.model.counts is not None:
            self.model.counts.forget()
        for parameter in self.model.parameters():
            parameter.grad = None
            if self.machine.world_size > 1:  # hosts may draw other bits from one seed
                torch.distributed.broadcast(parameter.data, 0)
        for optimizer in self.optimizers.values():
            optim.reset(optimizer)
        self.guard.reset()
        self.data.train.reset()

    def set_step(self, step: int) -> None:
        """Prepare for this step: what `losses` and the optimizers read."""
        plan = schedule(self.config, step)
        self.model.set_step(step)
        weights, device = torch.tensor(plan.loss_weights), self.machine.device
        # Of the next token alone, the loss is the plain one.
        self.loss_weights = machines.sent(weights, device) if len(weights) > 1 else None
        self.longest = self.data.longest(step)
        set_rates(self.config, self.optimizers, plan)
        # Gradients are sums over the tokens of all micro-batches and ranks. They are divided once,
        # by sequences and not by tokens: record 42 sums over a sequence, and adam_eps is meant for
        # gradients of that size.
        self.guard.divide_by(plan.batch_tokens // self.config.seq_len)
        if plan.begins:  # other windows or batches, so other losses and norms are normal
            self.guard.forget()

    @torch.no_grad()
    def untie(self) -> None:
        """Start the head as a copy of the token embedding, with its Adam state (record 53)."""
        self.model.lm_head.copy_(self.model.embed)
        optim.copy_state(self.optimizers["adam"], "embed", "lm_head")

    def batch_loss(self, batch: Batch, longest: int, weights: Tensor | None = None) -> Tensor:
        """As `GPT.forward` returns it. longest: tokens of the longest document, at most."""
        return self.loss(*batch.to(self.machine.device), longest, weights)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sums over a micro-batch: the loss to train on, and that of the next token, for the log.

        They differ where a stage predicts later tokens too, and with counts. The step is that of
        `set_step`.
        """
        found = self.batch_loss(batch, self.longest, self.loss_weights)
        train_loss, next_token_loss = found if found.ndim else (found, found)
        return train_loss, next_token_loss.detach()

    def remember(self, tokens: int, batches: Sequence[Batch]) -> None:
        """Add the batches of a step to the text whose n-grams are counted. Collective.

        tokens: those of the steps before.
        """
        if self.model.counts is None:
            return
        texts = [torch.cat([each.inputs, each.targets[:, -1:]], dim=1) for each in batches]
        rows = self.machine.gather_rows(machines.sent(torch.cat(texts).int(), self.machine.device))
        first = tokens // self.config.seq_len
        self.model.counts.text[first : first + len(rows)] = rows

    def stepping(self, step: int) -> list[torch.optim.Optimizer]:
        """The optimizers that step at the end of this step.

        AdamW and RowAdam may step less often; in between, gradients add up in .grad
        (@classiclarryd, record 39).
        """
        adam_steps = schedule(self.config, step).adam_steps
        return [each for name, each in self.optimizers.items() if adam_steps or name == "matrix"]

    @torch.no_grad()
    def validate(self, step: int, batches: Sequence[Batch] | None = None) -> float:
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
        inputs, targets, cu_seqlens = batch.to(self.machine.device)
        longest = self.data.val_longest
        return self.model.token_losses(inputs, targets, cu_seqlens, longest).flatten()

    @torch.no_grad()
    def score(self) -> dict[str, float]:
        """Mean losses of the trained model by kind of token, in nats, after the last validation.

        Of all ranks' validation tokens, copied and new (data/copied.py), and of the held-out slice
        where the text has one (data/loader.py). Collective.
        """
        self.model.set_step(self.config.steps)
        data = self.data
        if not self.val_losses:  # validation was compiled
            self.val_losses = [self.token_losses(batch) for batch in data.validation]
        sums = sums_by_kind(on_host(self.val_losses), data.val_distances, data.val_before)
        if data.train.held_out and not self.config.quick:
            losses = [self.token_losses(batch) for batch in data.held_out]
            sums["loss_held_out"] = sum_and_count(on_host(losses))
        return means(self.machine.gather(sums))

    def trained_rows(self) -> str:
        """Sum of the SHA-256 of all sequences trained on, as hex: see data/loader.py. Collective.

        It shows that a run read the tokens that it claims, on any number of ranks.
        """
        return f"{sum(self.machine.gather(self.data.train.rows_sum)) % 2**256:064x}"

    @torch.no_grad()
    def sample(self) -> str:
        """The first `sample_tokens` tokens of a document, sampled from the model, on one rank."""
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
    config, machine = trainer.config, trainer.machine
    tokens = tokens_before(config, run.steps_done)
    run.start_training()  # starts the clock
    for step in range(run.steps_done, config.steps):
        plan = schedule(config, step)

        # Once in a run, the output head leaves the token embedding (@varunneal, record 53).
        if plan.unties:
            trainer.untie()

        # Now and then, validate with the clock stopped.
        if plan.validates:
            evaluate(trainer, run, step)

        # Forward and backward. Losses are sums over tokens, so gradients add up in .grad over
        # micro-batches, and later over ranks: a smaller micro-batch or more ranks give the same
        # step, up to rounding. Nothing here waits for the device.
        trainer.set_step(step)
        loss = torch.zeros((), device=machine.device)
        batches = next(trainer.data.train)
        for batch in batches:
            train_loss, next_token_loss = trainer.losses(batch)
            train_loss.backward()
            loss += next_token_loss
        trainer.remember(tokens, batches)

        # The ranks share one small message: the loss, and who got a signal to stop. It decides
        # for all alike.
        loss, signals = machine.sum_both(loss, run.stop.flags())
        loss = loss / plan.batch_tokens

        # Update. The guard sums gradients over the ranks, divides them, and compares loss and
        # norms with those of earlier steps. All optimizers step or none does, and the verdict
        # stays on the device. Gradients of a skipped step go too.
        optimizers = trainer.stepping(step)
        verdict = trainer.guard.step(loss, only=optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

        # Log. On a GPU the numbers arrive two steps later; only then the run learns whether the
        # loss is finite, and whether a rank got a signal.
        tokens += plan.batch_tokens
        run.stepped(
            loss, signals, verdict, tokens=tokens, lr_mul=plan.lr_factor,
            window=plan.windows["long"], stage=plan.stage_index,
        )  # fmt: skip

        # Save when it is time, or the run must end; but never while Adam sums gradients, which
        # no checkpoint holds.
        if plan.adam_steps and run.must_save():
            run.save()
    run.settle()  # stops the clock and writes the steps that are not written yet
    return evaluate(trainer, run, config.steps)


def evaluate(trainer: Trainer, run: Run, step: int) -> float:
    """Validate before this step, off the clock. Returns the loss; NonFinite if it is not finite."""
    with run.pause("validate"):
        val_loss = trainer.validate(step)
        run.validated(step, val_loss)
    return val_loss


def require_ranks(config: Config, machine: Machine) -> None:
    """Refused if the ranks cannot share out the sequences of every step equally."""
    try:
        order = Order(config.seq_len, None, readings(config))
        order.check(machine.world_size)
    except ValueError as error:
        hint = " torch finds no GPU here, so the default is --track tiny; on GPUs it is short."
        default = config.track == "tiny" and machine.device.type == "cpu"
        raise Refused(f"{error}{hint if default else ''}") from None


def set_up(config: Config, machine: Machine) -> Trainer:
    """Build a trainer. Refused if it cannot work, before anything costs time."""
    machines.repeat_bits(machine.device)
    require_ranks(config, machine)
    for requirement in (require_packages, require_folders, require_text, require_tokenizer):
        machine.on_main(partial(requirement, config))  # other ranks wait
    try:
        with data_or_stand_in(config, machine.say) as with_data:
            trainer = Trainer(with_data, machine)
    except ValueError as error:  # kernels, optimizers and data do not know Refused
        raise Refused(str(error)) from error
    fit_micro_batch(trainer)
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
            # However the run ends, leaving this block logs it.
            with Run(trainer, plan, clock, stop, source=SOURCE) as run:
                losses[plan.seed] = val_loss = train(trainer, run)
                if config.keep_model:  # first: what follows may not fit the memory
                    run.keep(val_loss, tokenizer_of(config))
                with run.pause("probe"):
                    probes = trainer.score()
                with run.pause("check"):  # of the losses that the probe left in val_losses
                    proof = {} if config.quick else check_trained_model(trainer, val_loss)
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

    def runs() -> int:
        words = sys.argv[1:] if argv is None else argv
        return make_runs(parse(Config, words, preset, __doc__ or ""))

    listen()
    # An error becomes one sentence and a code. A signal during a run does not arrive here.
    stopped = "stopped by a signal before the first step: nothing is lost"
    code = supervise(runs, refused=(ShardError,), interrupted=stopped)
    return leave(code)  # of several ranks each ends its process here


if __name__ == "__main__":
    sys.exit(main())
