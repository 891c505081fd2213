"""HellaSwag (arXiv:1905.07830): which of four endings does a model find the likeliest?

Scored as Karpathy's build-nanogpt does, without the multiple choice in the prompt: the ending with
the least mean loss a token wins (`acc_norm`), or with the least sum (`acc`). Unlike there, a
document begins with bos, as in training. GPT-2 of 124M parameters has 0.2955 and 0.2859 there.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tiktoken
import torch
from huggingface_hub import hf_hub_download
from torch import Tensor

from data.loader import Batch
from inference.model import Model
from runtime.errors import Refused

DATASET, FILE = "Rowan/hellaswag", "data/validation-00000-of-00001.parquet"
REVISION = "218ec52e09a7e7462a5400043bb9a69a41d06b76"  # a commit, which no hub can change


def fetch_items(revision: str = REVISION) -> list[dict[str, Any]]:
    """Download the validation items: ctx, endings and label of each; 10,042 at REVISION.

    Refused without pyarrow; whatever the hub's library raises. No access token is sent.
    """
    try:
        from pyarrow.parquet import read_table
    except ImportError:
        raise Refused("HellaSwag is a parquet file: pip install pyarrow") from None
    path = hf_hub_download(DATASET, FILE, repo_type="dataset", revision=revision, token=False)
    return read_table(Path(path), columns=["ctx", "endings", "label"]).to_pylist()


def encode_item(item: dict[str, Any], tokenizer: tiktoken.Encoding) -> tuple[Batch, Tensor]:
    """Four rows, each the context and an ending, and a mask (4, T) of the endings' targets."""
    context = [tokenizer.eot_token, *tokenizer.encode_ordinary(item["ctx"])]
    endings = [tokenizer.encode_ordinary(" " + ending) for ending in item["endings"]]
    longest = len(context) + max(map(len, endings))
    rows_BT = torch.full((len(endings), longest), tokenizer.eot_token)
    mask_BT = torch.zeros(len(endings), longest - 1, dtype=torch.bool)
    for row, ending in enumerate(endings):
        end = len(context) + len(ending)
        rows_BT[row, :end] = torch.tensor(context + ending)
        mask_BT[row, len(context) - 1 : end - 1] = True
    starts = torch.arange(len(endings) + 1, dtype=torch.int32) * (longest - 1)
    return Batch(rows_BT[:, :-1].int(), rows_BT[:, 1:], starts), mask_BT


def score(model: Model, items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Shares of items whose right ending has the least loss: a token, and in all."""
    right = {"acc_norm": 0, "acc": 0}
    count = 0
    for item in items:
        batch, mask_BT = encode_item(item, model.tokenizer)
        summed_B = (model.token_losses(batch) * mask_BT).sum(1)
        label = int(item["label"])
        right["acc"] += int(summed_B.argmin()) == label
        right["acc_norm"] += int((summed_B / mask_BT.sum(1)).argmin()) == label
        count += 1
    return {"items": count} | {name: number / max(count, 1) for name, number in right.items()}
