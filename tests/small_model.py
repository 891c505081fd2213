"""Models small enough for a test, of any track and recipe."""

from itertools import compress

import torch

from kernels.attention import PortableAttention
from runtime.machine import Machine
from train_gpt import GPT, RECIPES, TRACKS, Config, initial_scalars, preset

CPU = torch.device("cpu")
MACHINE = Machine(CPU, 0, 1)
SEQUENCE, VOCABULARY = 70, 100
EVERY_RECIPE = [(t, recipe) for t in TRACKS for recipe in RECIPES[t]]
SIZES = {
    "dim": 24, "head_dim": 8, "vocab_size": VOCABULARY, "bos": VOCABULARY - 1, "window_block": 8,
    "val_window": 160,
    "seq_len": SEQUENCE, "batch_tokens": 2 * SEQUENCE, "micro_batch": 2 * SEQUENCE,
    "val_seq_len": SEQUENCE, "val_tokens": SEQUENCE, "val_batch": SEQUENCE,
}  # fmt: skip


def configure(track="short", recipe=None, **changes):
    """The configuration of the track, in its real size. recipe None: the track's own."""
    given = {"track": track} if recipe is None else {"track": track, "recipe": recipe}
    return Config(**preset(given) | given | changes)


def small(track="short", recipe=None, **changes):
    sizes: dict = dict(SIZES)
    paired = recipe == "record89" or (recipe is None and track in ("tiny", "small"))
    if paired or changes.get("layers", "").endswith("89"):
        # Heads in pairs, and stages of 1, 2 and 3 parts of the batch.
        sizes |= {"dim": 32, "batch_tokens": 6 * SEQUENCE}
    return configure(track, recipe, **sizes | changes)


def named_scalars(config, values):
    """Learned scalars by name: x0 and x0_0 of layer 0, and so on."""
    initial, names = initial_scalars(config), []
    kinds = ("x", "x0_", "bigram", "value", "value_embed", "skip")
    for i, layer in enumerate(initial.layers):
        has = [start is not None for start in layer]
        names += [f"{kind}{i}" for kind in compress(kinds, has)]
    names += [kind for kind in ("smear", "backout") if getattr(initial, kind) is not None]
    return dict(zip(names, values, strict=True))


def make_model(config, dtype=torch.float32, device=CPU):
    return GPT(config, dtype, device, PortableAttention())
