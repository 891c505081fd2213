"""Models small enough for a test, of any track and recipe."""

from dataclasses import asdict
from itertools import compress

import torch

from kernels.attention import PortableAttention
from runtime.checkpoint import save_final
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


@torch.no_grad()
def randomize(model):
    """Random weights, none of them zero, which could hide a mistake."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        fan = parameter.size(-1 if parameter.ndim == 3 else 0)
        spread = 1.0 if parameter.ndim < 2 or "embed" in name else fan**-0.5
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(spread * noise + (1.0 if name.endswith("gain") else 0.0))
    return model


def keep(model, folder, tokenizer="gpt2", **changed):
    """Write what a run leaves of a model; returns its folder. changed: settings; None: left out."""
    weights = model.state_dict()
    settings = asdict(model.config) | changed
    for name in [name for name in changed if changed[name] is None]:
        del settings[name]
    facts = {"run_id": "20261122-181629_tiny_s0_t0_c1b435", "steps": 3, "val_loss": 3.5}
    return save_final(folder, weights, facts | {"config": settings}, tokenizer)
