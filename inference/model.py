"""A kept model, ready to use. T tokens of a document, V vocabulary."""

import dataclasses
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import Tensor

from data.loader import Batch
from data.sampling import generate
from data.tokenizers import read_tokenizer
from kernels.attention import choose_attention
from runtime.checkpoint import CONFIG, FINAL, load_final, verify
from runtime.errors import Refused
from runtime.machine import compute_dtype
from runtime.settings import FLAGS, SETTINGS_OF_A_RUN, as_text
from train_gpt import GPT, Config, context, rotary_at, stage_at, windows_at


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


def load_model(
    folder: Path, device: str = "auto", dtype: torch.dtype | None = None
) -> "Model":
    """Read what a run with --keep-model left. device: auto, cpu or cuda; dtype: None for the run's.

    Refused if a file has changed, if a setting is not known here, or if the device is missing.
    """
    weights, facts = load_final(folder)
    config = read_config(facts.get("config"), folder)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch sees no GPU here. Use --device cpu.")
    dtype = dtype or compute_dtype(config.dtype, place)
    attention, _ = choose_attention("auto", place, dtype, config.head_dim)
    gpt = GPT(config, dtype, place, attention)
    try:
        gpt.load_state_dict(weights)
    except RuntimeError as error:  # names the parameters, over several lines
        raise Refused(f"{folder}: {' '.join(str(error).split())}") from None
    return Model(folder, facts, config, gpt)


def read_config(settings: Any, folder: Path) -> Config:
    """The settings of the experiment; those of the run have their defaults. Refused by name."""
    if not isinstance(settings, dict):
        raise Refused(f"{folder}: config.json has no settings under `config`.")
    fields = {field.name: field for field in dataclasses.fields(Config)}
    known = fields.keys() - SETTINGS_OF_A_RUN
    given = {name: value for name, value in settings.items() if name not in SETTINGS_OF_A_RUN}
    fix = "Use the version of the source that trained it."
    if differing := sorted(given.keys() ^ known):
        raise Refused(f"{folder}: settings {', '.join(differing)} are only in the model or only "
                      f"in this version. {fix}")  # fmt: skip
    for name, value in given.items():
        one_of = fields[name].metadata["one_of"]
        if one_of and value not in one_of:
            raise Refused(f"{folder}: {name} is {value!r:.40}, which is none of "
                          f"{', '.join(one_of)}. {fix}")  # fmt: skip
        try:  # as the command line reads it
            given[name] = FLAGS[fields[name].type]["type"](as_text(value))
        except ArgumentTypeError as error:
            raise Refused(f"{folder}: {name} {error}. {fix}") from None
    return Config(**given, data_dir=settings.get("data_dir", ""))


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained model at the windows and rotary tables of its last validation."""

    folder: Path
    facts: dict[str, Any]  # config.json
    config: Config
    gpt: GPT

    def __post_init__(self) -> None:
        step = self.config.steps
        self.gpt.set_rotary(*rotary_at(self.config, step))
        self.gpt.tied = stage_at(self.config, step).tied
        self.gpt.requires_grad_(False)

    @cached_property
    def windows(self) -> dict[str, Any]:
        tokens = windows_at(self.config, self.config.steps)
        return {kind: self.gpt.attention.window(count) for kind, count in tokens.items()}

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
        return self.gpt.logits(tokens_T.to(self.device), self.windows, count)

    def token_losses(self, batch: Batch) -> Tensor:
        """The loss of each target in nats, float32 (B, T) on the CPU."""
        longest = int(batch.cu_seqlens.diff().max())
        return self.gpt.token_losses(*batch.to(self.device), self.windows, longest).cpu()

    def write(self, tokens: Sequence[int], count: int, **options: Any) -> Iterator[int]:
        """Yield tokens that go on from a document that begins with `tokens`, bos not among them.

        options: temperature, top_k and seed of data.sampling.generate.
        """
        bos = self.config.bos
        return generate(
            lambda last: self.logits(last)[-1], [bos, *tokens], count, bos=bos,
            context=context(self.config), **options,
        )  # fmt: skip
