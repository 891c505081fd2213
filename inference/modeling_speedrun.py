"""A model of the trainer for transformers: tokens in, logits or a loss out.

An export puts the trainer's own classes in front of these two and gives `Config` the settings of
its model as defaults.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import can_return_tuple

from kernels.portable_attention import PortableAttention
from train_gpt import GPT, Config


class SpeedrunConfig(PretrainedConfig):
    """What other tools read in config.json. The model has the settings of `Config`."""

    model_type = "speedrun"


class SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    """The trainer's GPT as it was validated last. B texts, T tokens, V vocabulary.

    There is no key-value cache: `generate` reads the whole text again for each token.
    """

    config_class = SpeedrunConfig
    _no_split_modules = ("GPT",)

    def __init__(self, config: SpeedrunConfig):
        super().__init__(config)
        dtype, device = torch.get_default_dtype(), torch.get_default_device()
        self.gpt = GPT(Config(), dtype, device, PortableAttention())
        self.made_for: Any = None  # dtype and device of the tables
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        labels: Tensor | None = None, logits_to_keep: int | Tensor = 0,
        inputs_embeds: Tensor | None = None, num_items_in_batch: int | Tensor | None = None,
        output_hidden_states: bool | None = None, output_attentions: bool | None = None,
        **unused: Any,
    ) -> CausalLMOutput:  # fmt: skip
        """Logits (B, T, V), float32, after each token of input_ids (B, T), soft cap included. Of a
        model with n-gram counts, they are the logarithms of probabilities.

        logits_to_keep: how many of the last to return, 0 for all, or the indices of those wanted.
        labels: input_ids, or -100 where no loss is wanted. The loss is that of the next token, ():
        the mean over labels, or the sum over num_items_in_batch; 0 if no token has a label.
        Padding must be on the right, where it changes nothing. ValueError if text follows it.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("inputs_embeds cannot replace input_ids: the model looks up more than "
                             "one embedding for a token. Give input_ids.")  # fmt: skip
        if output_hidden_states or output_attentions:
            raise ValueError("no hidden states or attentions: the model returns logits and a loss. "
                             "For more, call the trainer's classes in self.gpt.")  # fmt: skip
        if attention_mask is not None and (attention_mask.int().diff(dim=1) > 0).any():
            raise ValueError("text after padding: pad on the right, generate one text at a time.")
        longest = max(self.gpt.config.seq_len, self.gpt.config.val_seq_len)
        if (length := input_ids.size(1)) > longest:
            raise ValueError(f"{length} tokens: the model reads at most {longest}. Cut the text.")
        self.make_tables()
        last = logits_to_keep if isinstance(logits_to_keep, int) and labels is None else 0
        logits = self.gpt.logits(input_ids, last or length)
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten().to(logits.device)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
            loss = loss / (num_items_in_batch or (targets != -100).sum().clamp(min=1))
        number = isinstance(logits_to_keep, int)
        kept = slice(-logits_to_keep, None) if number else logits_to_keep
        return CausalLMOutput(loss=loss, logits=logits[:, kept].contiguous())

    def make_tables(self) -> None:
        """Make the model again around its parameters, if these have a new dtype or device.

        transformers creates a model without memory and fills only what the file holds: not windows,
        rotary tables and the like.
        """
        place = self.gpt.embed.dtype, self.gpt.embed.device
        if place != self.made_for:
            gpt = GPT(Config(), *place, PortableAttention())
            for name, parameter in self.gpt.named_parameters():
                owner, _, last = name.rpartition(".")
                setattr(gpt.get_submodule(owner), last, parameter)
            if gpt.counts is not None and self.gpt.counts is not None:
                gpt.counts.text = self.gpt.counts.text
            gpt.set_step(gpt.config.steps)
            self.gpt, self.made_for = gpt, place

    def resize_token_embeddings(self, *unused: Any, **unused_too: Any) -> Any:
        raise ValueError("the vocabulary is that of the training run: its size cannot change.")
