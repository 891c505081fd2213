"""Export of a kept model to a folder that transformers loads: see docs/export.md."""

import importlib.util
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from data.tokenizers import PATTERN
from inference.model import Model, load_model
from runtime.checkpoint import CONFIG, MODEL, VOCABULARY, verify
from runtime.errors import Refused
from train_gpt import GPT, SOFTCAPS, at, rotary_at

MODELING = Path(__file__).with_name("modeling_speedrun.py")

PIECES = ("smear", "attention_gates", "value_gates", "xsa", "biases", "ngrams")
BY_TOKEN = ("embed", "lm_head", "lm_head_bias")  # rows for tokens; value embeddings have them too

TOLERANCE = 2e-3  # on float32 logits, which are between 0 and 30; a wrong piece moves them by more


def export(kept: Path, to: Path) -> float:
    """Write the model of the folder `kept` into the new folder `to`.

    Returns the largest difference of its logits from the trainer's. Refused if that is not near 0,
    if the model is damaged, or if the folder exists.
    """
    if to.exists():
        raise Refused(f"{to} exists: an export begins with a new folder. Remove it, or choose "
                      "another --to.")  # fmt: skip
    trained = load_model(kept, "cpu", torch.float32)
    if importlib.util.find_spec("transformers") is None:
        raise Refused("an export is compared with the trainer's model by transformers, which is "
                      "not installed: python -m pip install transformers")  # fmt: skip
    partial = to.with_name(f".{to.name}.partial")  # so that a folder of this name is whole
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_model(trained, partial)
        if trained.facts.get("tokenizer") == VOCABULARY:
            verify(kept, (VOCABULARY,))
            write_tokenizer(kept / VOCABULARY, partial)
        apart = largest_difference(trained, partial)
        partial.rename(to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return apart


# ---- Writing


def write_model(model: Model, folder: Path) -> None:
    """Write weights, config.json and the forward pass."""
    save_file(exported_weights(model.gpt), folder / MODEL, metadata={"format": "pt"})
    write_json(folder / CONFIG, exported_config(model.gpt, model.facts))
    shutil.copy(MODELING, folder)


def exported_weights(model: GPT) -> dict[str, Tensor]:
    """The parameters under their names, without the rows that only pad the vocabulary.

    The head is the one of the last step, and signs of bigrams become a tensor of int8.
    """
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights["lm_head"] = model.output_weight.detach()
    for name in weights:
        if name in BY_TOKEN or name.startswith("value_embeds."):
            weights[name] = weights[name][: model.config.vocab_size].clone()
    if model.signs is not None:
        weights["signs"] = model.signs.to(torch.int8)
    return weights


def exported_config(model: GPT, facts: dict[str, Any]) -> dict[str, Any]:
    """config.json: what the modeling file needs, spelt out in numbers."""
    config = model.config
    frequency, scale = rotary_at(config, at(config, config.steps).stage_index)
    longest = config.max_document if config.document_mask else config.seq_len
    return {
        "architectures": ["SpeedrunForCausalLM"],
        "model_type": "speedrun",
        "auto_map": {
            "AutoConfig": "modeling_speedrun.SpeedrunConfig",
            "AutoModelForCausalLM": "modeling_speedrun.SpeedrunForCausalLM",
        },
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "bos_token_id": config.bos,
        "eos_token_id": config.bos,  # the next document's first token ends a document
        "hidden_size": config.dim,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": config.dim // config.head_dim,
        "head_dim": config.head_dim,
        "mlp_width": config.mlp_ratio * config.dim,
        "max_position_embeddings": min(config.seq_len, longest),
        "use_cache": False,
        "tie_word_embeddings": False,
        "layers": exported_layers(model),
        "own_documents": config.document_mask,
        "rotary_frequencies": frequency.tolist(),
        "query_scale": scale.item(),
        "softcap": list(SOFTCAPS[config.softcap]),
        "scalars": list(model.scalar_init),
        "value_tables": len(model.value_embeds),
        "bigram_rows": 0 if model.bigram is None else len(model.bigram),
        "sign_rows": 0 if model.signs is None else len(model.signs),
        **{piece: getattr(config, piece) for piece in PIECES},
        "trained": {name: value for name, value in facts.items() if name != "config"},
    }


def exported_layers(model: GPT) -> list[dict[str, Any]]:
    """The layer table, with windows in tokens."""
    windows = at(model.config, model.config.steps).windows
    rows = []
    for layer in model.layers:
        offset = model.config.key_offset and layer.window == "long"
        rows.append(asdict(layer) | {"window": windows[layer.window], "key_offset": offset})
    return rows


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ---- Needs transformers


def write_tokenizer(vocabulary: Path, folder: Path) -> None:
    """Write the tokenizer of a corpus. It begins each text with <|endoftext|>."""
    from tokenizers.processors import TemplateProcessing
    from transformers.convert_slow_tokenizer import TikTokenConverter

    shutil.copy(vocabulary, folder)
    add_prefix_space, special = False, "<|endoftext|>"
    converter = TikTokenConverter(str(vocabulary), PATTERN, add_prefix_space, [special])
    tokenizer = converter.converted()
    tokenizer.post_processor = TemplateProcessing(
        single=f"{special} $A", special_tokens=[(special, tokenizer.token_to_id(special))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = dict.fromkeys(("bos_token", "eos_token", "pad_token"), special)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast",
                "model_input_names": ["input_ids", "attention_mask"]}  # fmt: skip
    write_json(folder / "tokenizer_config.json", settings | roles)


def largest_difference(trained: Model, folder: Path) -> float:
    """The largest difference between an export's logits and the trainer's.

    Refused if they are not the same: then the trainer has changed, and the modeling file has not.
    """
    from inference.modeling_speedrun import SpeedrunForCausalLM

    config = trained.config
    longest = max(at(config, config.steps).windows.values())
    count = min(2 * longest, config.seq_len)  # so that a document reaches beyond its window
    tokens = torch.arange(count).square().mul(7919).remainder(config.vocab_size).view(1, count)
    tokens[0, [0, count // 3]] = config.bos
    exported = SpeedrunForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        apart = (exported(tokens).logits - trained.gpt.logits(tokens, count)).abs().max().item()
    if not apart <= TOLERANCE:
        raise Refused(f"the logits of the export differ by {apart:.2g} from those of train_gpt.py: "
                      f"bring inference/{MODELING.name} up to date with it.")  # fmt: skip
    return apart
