"""A kept model, ready to use. T tokens of a document, V vocabulary."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import Tensor

from data.sampling import generate
from data.tokenizers import read_tokenizer
from kernels.attention import choose_attention
from runtime import machine
from runtime.checkpoint import CONFIG, FINAL, VOCABULARY, load_final, verify
from runtime.errors import Refused
from runtime.settings import read_settings
from train_gpt import GPT, SOURCE, Config, context


def find_model(path: Path | None) -> Path:
    """The folder of a kept model: `path`, its `final`, or the newest here or in the repository."""
    if path is None:
        folders = [Path("checkpoints"), SOURCE / "checkpoints"]
        found = [each for folder in folders for each in folder.glob(f"*/{FINAL}")]
        if not found:
            raise Refused("checkpoints/ holds no model. Train one, without --keep-model off, or "
                          "give its folder.")  # fmt: skip
        return max(found, key=lambda each: each.stat().st_mtime)
    for folder in (path / FINAL, path):
        if (folder / CONFIG).is_file():
            return folder
    raise Refused(f"{path} holds no trained model. A run leaves one in checkpoints/RUN/{FINAL}, "
                  f"unless it has --keep-model off.")  # fmt: skip


def load_model(folder: Path, device: str = "auto", dtype: torch.dtype | None = None) -> "Model":
    """Read checkpoints/RUN/final, ready at the windows and rotary tables of the last validation.

    device: auto, cpu or cuda; dtype: None for the run's. Refused if a file has changed, if a
    setting is not known here, or if the device is missing.
    """
    weights, facts = load_final(folder)
    config = read_settings(Config, facts.get("config"), folder)
    place = machine.find_device(device)
    dtype = dtype or machine.compute_dtype(config.dtype, place)
    attention, _ = choose_attention("auto", place, dtype, config.head_dim)
    try:
        gpt = GPT(config, dtype, place, attention)
        gpt.load_state_dict(weights)
    except RuntimeError as error:  # no memory, or parameters, named over several lines
        raise Refused(f"{folder}: {' '.join(str(error).split())}") from None
    gpt.set_step(config.steps)
    return Model(folder, facts, gpt.requires_grad_(False))


def token_losses(model: "Model", tokens: Tensor) -> Tensor:
    """The loss of each next token in nats, float32 (B, T), as the last validation scores it.

    tokens: int64 (B, T + 1); every document begins with bos. T: at most that of the run's rows.
    A judge calls this function of a record's source.
    """
    return model.gpt.token_losses(tokens[:, :-1].int(), tokens[:, 1:]).cpu()


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained model at the windows and rotary tables of its last validation."""

    folder: Path
    facts: dict[str, Any]  # config.json
    gpt: GPT

    @property
    def config(self) -> Config:
        return self.gpt.config

    def __str__(self) -> str:
        """Which model it is, for people: folder, track, recipe, steps and validation loss."""
        config, val_loss = self.config, float(self.facts.get("val_loss", "nan"))
        run = f"{config.track}, {config.recipe}, {self.facts.get('steps')} steps"
        return f"{self.folder}: {run}, validation loss {val_loss:.4f}"

    @cached_property
    def tokenizer(self) -> tiktoken.Encoding:
        """ValueError if the model has none that is known, or if it cannot be read."""
        name: Any = self.facts.get("tokenizer")
        if name == VOCABULARY:
            verify(self.folder, (name,))
            name = self.folder / name
        tokenizer = read_tokenizer(name) if name in ("gpt2", self.folder / VOCABULARY) else None
        if tokenizer is None or tokenizer.eot_token != self.config.bos:  # of others' tokens
            raise Refused(f"{self.folder} names no known tokenizer of its vocabulary: {name!r:.40}")
        return tokenizer

    def logits(self, tokens_T: Tensor, count: int = 1) -> Tensor:
        """Logits after each of the last `count` tokens of a document with its bos: (count, V)."""
        return self.gpt.logits(tokens_T.to(self.gpt.embed.device).view(1, -1), count)[0]

    def write(self, tokens: Sequence[int], count: int, **options: Any) -> Iterator[int]:
        """Yield the tokens that continue a document of bos and `tokens`.

        options: temperature, top_k, top_p, least and seed of data.sampling.generate.
        """
        bos = self.config.bos
        return generate(
            lambda last: self.logits(last)[-1], [bos, *tokens], count, bos=bos,
            context=context(self.config), **options,
        )  # fmt: skip
