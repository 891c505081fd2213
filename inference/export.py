"""Export of a kept model to a folder that transformers loads: see docs/using.md."""

import importlib.util
import json
import shutil
import textwrap
from dataclasses import fields
from inspect import formatannotation, getsource, isfunction
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from data.tokenizers import PATTERN
from inference.model import Model, load_model
from inference.one_file import Name, Rewrite, one_file, only_used
from runtime.checkpoint import CONFIG, MODEL, VOCABULARY, verify
from runtime.errors import Refused
from train_gpt import GPT, LAYERS, STAGES, Config, schedule

MODELING = "modeling_speedrun"  # the wrapper here, and the file of an export

HEADER = '''"""A GPT from the speedrun trainer, for transformers. It needs torch and transformers.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

These are the trainer's own classes, as the export found them, and a wrapper at the end. To change
them, change train_gpt.py and export again.

Shapes: B rows, T tokens a row, H heads, D head dimension, C model dimension, V vocabulary.
"""

'''

TOLERANCE = 1e-4  # on float32 logits, which are between -30 and 30: room for rounding only


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
    """Write weights, config.json and the model's source."""
    weights = {f"gpt.{name}": weight for name, weight in model.gpt.state_dict().items()}
    save_file(weights, folder / MODEL, metadata={"format": "pt"})
    write_json(folder / CONFIG, exported_config(model.gpt, model.facts))
    (folder / f"{MODELING}.py").write_text(HEADER + model_source(model.config), encoding="utf-8")


def model_source(config: Config) -> str:
    """The wrapper and the trainer's classes that it needs, with the settings and tables in use."""
    written: dict[str, Rewrite] = {
        "GPT": only_used,
        "Config": lambda _, attributes: settings_source(config, attributes),
        "LAYERS": lambda *_: table_source("LAYERS", config.layers, LAYERS[config.layers]),
        "STAGES": lambda *_: table_source("STAGES", config.stages, STAGES[config.stages]),
        "Attention": lambda *_: "Attention = PortableAttention",
    }
    return one_file(Name(f"inference.{MODELING}", "SpeedrunForCausalLM"), written)


def settings_source(config: Config, attributes: set[str]) -> str:
    """The class `Config`: settings that the model reads, with their values as defaults."""
    lines = ["@dataclass(frozen=True)", "class Config:"]
    lines += ['    """The settings of this model."""', ""]
    for field in fields(config):
        if field.name in attributes:
            kind, value = formatannotation(field.type), getattr(config, field.name)
            lines.append(f"    {field.name}: {kind} = {value!r}  # {field.metadata['about']}")
    for name, member in vars(Config).items():
        method: Any = member.fget if isinstance(member, property) else member
        if name in attributes and isfunction(method) and not name.startswith("__"):
            lines += ["", getsource(method).rstrip()]
    return "\n".join(lines)


def table_source(name: str, key: str, rows: list[Any]) -> str:
    """A table that holds only these rows: layers or stages. They show what is no default."""
    lines = [f"{name} = {{", f"    {key!r}: ["]
    for number, row in enumerate(rows):
        given = [f"{each.name}={value!r}" for each in fields(row)
                 if (value := getattr(row, each.name)) != each.default]  # fmt: skip
        text = f"{type(row).__name__}({', '.join(given)}),"
        text = textwrap.fill(text, 92, subsequent_indent=" " * 4)
        lines.append(textwrap.indent(text, " " * 8) + f"  # {number}")
    return "\n".join([*lines, "    ],", "}"])


def exported_config(model: GPT, facts: dict[str, Any]) -> dict[str, Any]:
    """config.json: what transformers and other tools read, and the run."""
    config = model.config
    longest = config.max_document if config.document_mask else config.seq_len
    return {
        "architectures": ["SpeedrunForCausalLM"],
        "model_type": "speedrun",
        "auto_map": {
            "AutoConfig": f"{MODELING}.SpeedrunConfig",
            "AutoModelForCausalLM": f"{MODELING}.SpeedrunForCausalLM",
        },
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "bos_token_id": config.bos,
        "eos_token_id": config.bos,  # the next document's first token ends a document
        "hidden_size": config.dim,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": config.dim // config.head_dim,
        "head_dim": config.head_dim,
        "max_position_embeddings": min(config.seq_len, longest),
        "use_cache": False,
        "tie_word_embeddings": False,
        "trained": {name: value for name, value in facts.items() if name != "config"},
    }


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

    Refused if they are not the same.
    """
    config = trained.config
    longest = max(schedule(config, config.steps).windows.values())
    count = min(2 * longest, config.seq_len)  # so that a document reaches beyond its window
    tokens = torch.arange(count).square().mul(7919).remainder(config.vocab_size).view(1, count)
    tokens[0, [0, count // 3]] = config.bos
    exported = load_class(folder).from_pretrained(folder, dtype=torch.float32)
    logits = exported.requires_grad_(False)(tokens).logits
    apart = (logits - trained.gpt.logits(tokens, count)).abs().max().item()
    if not apart <= TOLERANCE:
        raise Refused(f"the logits of the export differ by {apart:.2g} from those of train_gpt.py: "
                      "the model that runs is not the one in its source.")  # fmt: skip
    return apart


def load_class(folder: Path) -> Any:
    """The model class of an export, from its file."""
    spec = importlib.util.spec_from_file_location(MODELING, folder / f"{MODELING}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SpeedrunForCausalLM
