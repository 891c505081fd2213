"""What a trained model scores on validation tokens. Losses are means in nats."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.copied import pair_distances
from data.loader import validation_batches
from data.shards import audit_validation, find_shards
from data.tokenizers import token_bytes
from inference.model import Model
from train_gpt import SOURCE, receptive_field

TOKENS_AT_ONCE = 16_384  # their logits take 3.3 GB at GPT-2's vocabulary


def evaluate(model: Model, data_dir: str | None = None, rows: int | None = None) -> dict[str, Any]:
    """Scores on the first `rows` validation rows of the run, or on all, as JSON data.

    ShardError if the shards are missing or differ from the run's.
    """
    config = model.config
    root = Path() if data_dir or Path(config.data_dir).exists() else SOURCE  # started elsewhere
    settings = asdict(config) | {"data_dir": str(root / (data_dir or config.data_dir))}
    if rows is not None:
        settings["val_tokens"] = rows * config.val_seq_len
    audit_validation(settings)
    files, reach = find_shards(settings, "val"), receptive_field(config)
    batches = validation_batches(files, settings, config.val_seq_len)  # whole rows
    parts = validation_batches(files, settings, TOKENS_AT_ONCE, reach)
    losses = [model.gpt.token_losses(part.inputs, part.targets).cpu().flatten() for part in parts]
    loss = torch.cat(losses).double()
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    rows = len(loss) // config.val_seq_len
    scores: Any = {"tokens": len(loss), "rows": rows, "loss": loss.mean().item()}
    if model.facts.get("tokenizer"):
        scores["bits_per_byte"] = bits_per_byte(loss, targets, model)
    tokens = [torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1) for batch in batches]
    copied = torch.from_numpy(pair_distances(torch.cat(tokens), config.bos).ravel() > 0)
    for name, mask in (("copied", copied), ("new", ~copied)):
        scores[name] = {"tokens": int(mask.sum()), "loss": loss[mask].mean().item()}
    return scores


def bits_per_byte(loss: Tensor, targets: Tensor, model: Model) -> float:
    """Bits for each byte of text. Ends of documents, which have no bytes, are left out."""
    lengths = torch.tensor([len(each) for each in token_bytes(model.tokenizer)])
    text = targets != model.config.bos
    return loss[text].sum().item() / math.log(2) / int(lengths[targets[text]].sum())
