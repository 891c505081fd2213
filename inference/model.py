"""A kept model, ready to use. T tokens of a document, V vocabulary."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import Tensor

import train_gpt
from data.loader import Batch
from data.sampling import generate
from data.tokenizers import read_tokenizer
from runtime.checkpoint import CONFIG, FINAL, read_facts, verify
from runtime.errors import Refused
from train_gpt import GPT, Config, context


def find_model(path: Path | None) -> Path:
    """The folder of a kept model: `path`, its `final`, or without a path the newest of all."""
    if path is None:
        found = list(Path("checkpoints").glob(f"*/{FINAL}"))
        if not found:
            raise Refused("checkpoints/ holds no model. Train one with --keep-model on (the "
                          "default of --track tiny), or give its folder.")  # fmt: skip
        return max(found, key=lambda each: each.stat().st_mtime)
    for folder in (path / FINAL, path):
        if (folder / CONFIG).is_file():
            return folder
    raise Refused(f"{path} holds no trained model. A run with --keep-model on leaves one in "
                  f"checkpoints/RUN/{FINAL}.")  # fmt: skip


def load_model(folder: Path, device: str = "auto", dtype: torch.dtype | None = None) -> "Model":
    """What train_gpt.load_model reads, with its facts and tokenizer; the same arguments."""
    return Model(folder, read_facts(folder), train_gpt.load_model(folder, device, dtype))


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained model at the windows and rotary tables of its last validation."""

    folder: Path
    facts: dict[str, Any]  # config.json
    gpt: GPT

    @property
    def config(self) -> Config:
        return self.gpt.config

    @property
    def device(self) -> torch.device:
        return self.gpt.embed.device

    @cached_property
    def tokenizer(self) -> tiktoken.Encoding:
        """ValueError if the model has none that is known, or if it cannot be read."""
        name = self.facts.get("tokenizer")
        if name == "gpt2":
            return read_tokenizer(name)
        if name != "vocabulary.tiktoken":
            raise Refused(f"{self.folder} names no known tokenizer: {name!r:.40}. Its vocabulary "
                          f"is neither that of the corpus nor GPT-2's.")  # fmt: skip
        verify(self.folder, (name,))
        return read_tokenizer(self.folder / name)

    def logits(self, tokens_T: Tensor, count: int = 1) -> Tensor:
        """Logits after each of the last `count` tokens of a document, float32 (count, V).

        A document begins with `config.bos`.
        """
        return self.gpt.logits(tokens_T.to(self.device), self.gpt.windows, count)

    def token_losses(self, batch: Batch) -> Tensor:
        """The loss of each target in nats, float32 (B, T) on the CPU."""
        longest = int(batch.cu_seqlens.diff().max())
        return self.gpt.token_losses(*batch.to(self.device), self.gpt.windows, longest).cpu()

    def write(self, tokens: Sequence[int], count: int, **options: Any) -> Iterator[int]:
        """Yield tokens that go on from a document that begins with `tokens`, bos not among them.

        options: temperature, top_k and seed of data.sampling.generate.
        """
        bos = self.config.bos
        return generate(
            lambda last: self.logits(last)[-1], [bos, *tokens], count, bos=bos,
            context=context(self.config), **options,
        )  # fmt: skip
