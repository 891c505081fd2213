"""An exported model is the trained one, loaded without this repository, or is refused by name."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import EVERY_RECIPE, keep, make_model, randomize, small
from torch import nn

import train_gpt
from data.tokenizers import PROSE, read_tokenizer
from inference.export import export, load_class, write_model
from inference.model import load_model
from runtime.errors import Refused
from scripts.export_model import main

ROOT = Path(__file__).resolve().parents[1]
NAMES = [f"{track}-{recipe}" for track, recipe in EVERY_RECIPE]
every_recipe = pytest.mark.parametrize(("track", "recipe"), EVERY_RECIPE, ids=NAMES)
# Windows shorter than a row, and tables with rows that only pad the vocabulary: 100 of 128.
SIZES: dict[str, Any] = {"window_block": 2, "val_window": 20, "ngrams": 4}
LENGTHS = (1, 2, 33, 70)
SMALL = small("short", "record89", **SIZES)
EXACT = {"rtol": 0, "atol": 5e-6}  # logits are between 0 and 30

MISSING = importlib.util.find_spec("transformers") is None


def needs_transformers(test):
    """Mark a test: its import of transformers alone takes seconds."""
    skip = pytest.mark.skipif(MISSING, reason="needs transformers: pip install transformers")
    return pytest.mark.slow(skip(test))


def trained(config, dtype=torch.float32):
    """A model with random weights as at the last validation."""
    model = randomize(make_model(config, dtype))
    model.set_step(config.steps)
    return model.requires_grad_(False)


def tokens_of(config, length):
    """Two rows (2, length), with documents that begin inside them."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(config.bos, (2, length), generator=generator)
    for row, starts in enumerate([(0, 7, 8, 40), (33,)]):
        tokens[row, [start for start in starts if start < length]] = config.bos
    return tokens


def next_token_loss(logits, tokens):
    chosen = logits[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    return (logits[:, :-1].exp().sum(-1).log() - chosen).mean()


# ---- The model of the exported file, without transformers


class Base(nn.Module):
    """As PreTrainedModel, which the exported model calls for nothing else."""

    def __init__(self, config):
        super().__init__()

    def post_init(self):
        pass


def without_transformers():
    """Stand-ins for the few names of transformers that the exported file imports."""
    names = {
        "transformers": {
            "PreTrainedModel": Base, "PretrainedConfig": object, "GenerationMixin": object,
        },
        "transformers.modeling_outputs": {"CausalLMOutput": mock.Mock},
        "transformers.utils": {"can_return_tuple": lambda forward: forward},
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in names}
    for name, members in names.items():
        vars(modules[name]).update(members)
    return mock.patch.dict(sys.modules, modules)


def exported_again(model, folder):
    """The model that an export's file defines, filled with its weights."""
    write_model(load_model(keep(model, folder / "kept"), "cpu", torch.float32), folder)
    with without_transformers():
        exported = load_class(folder)(None)
    exported.load_state_dict(load_file(folder / "model.safetensors"))
    return exported.requires_grad_(False)


@every_recipe
def test_the_exported_file_computes_what_the_trainer_computes(track, recipe, tmp_path):
    model = trained(small(track, recipe, **SIZES))
    exported = exported_again(model, tmp_path)
    for length in LENGTHS:
        tokens = tokens_of(model.config, length)
        logits = exported(tokens).logits
        assert logits.shape == (2, length, model.config.vocab_size)
        torch.testing.assert_close(logits, model.logits(tokens, length), **EXACT)


CHANGE = """

from kernels import bend as bending

_norm, TABLE = norm, {}
TABLE["share"] = 0.25


def norm(x, gain=None):
    return bending.bend(_norm(x, gain), TABLE["share"])
"""
BEND = """'An operator; its helpers have names that those of others have too.'
import torch

@torch.library.custom_op("speedrun::bend", mutates_args=())
def bend(x: torch.Tensor, share: float) -> torch.Tensor:
    return x + share * x.square()

def _save(ctx, inputs, output):
    ctx.x, ctx.share = inputs

def _differentiate(ctx, grad):
    return grad * (1 + 2 * ctx.share * ctx.x), None

bend.register_autograd(_differentiate, setup_context=_save)
UNUSED = None
"""
COMPARE = """
from test_export import *

model = trained(SMALL)
exported, tokens = exported_again(model, Path("exported")), tokens_of(SMALL, 33)
for each, compute in ((model, model.logits), (exported, lambda tokens, _: exported(tokens).logits)):
    each.requires_grad_(True)
    next_token_loss(compute(tokens, 33), tokens).backward()
torch.testing.assert_close(exported.gpt.embed.grad, model.embed.grad, **EXACT)
"""


def test_a_changed_trainer_changes_the_export(tmp_path):
    clone = tmp_path / "clone"
    for name in ("data", "inference", "kernels", "optim", "runtime", "scripts"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("*.bin"))
    trainer = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
    (clone / "train_gpt.py").write_text(trainer + CHANGE, encoding="utf-8")
    (clone / "kernels" / "bend.py").write_text(BEND, encoding="utf-8")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    words = [sys.executable, "-c", COMPARE]
    done = subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    source = (clone / "exported" / "modeling_speedrun.py").read_text(encoding="utf-8")
    assert "def bend(" in source
    assert "UNUSED" not in source, "what the model does not use stays out"


def test_an_export_holds_the_facts_of_its_model_and_run(tmp_path):
    exported_again(trained(SMALL), tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    assert (facts["vocab_size"], facts["hidden_size"], facts["num_hidden_layers"]) == (100, 32, 11)
    assert facts["trained"]["tokenizer"] == "gpt2"


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    return exported_again(trained(SMALL), tmp_path_factory.mktemp("wrapped"))


def test_the_loss_is_that_of_the_tokens_with_a_label_and_0_without_any(wrapped):
    tokens = tokens_of(SMALL, 33)
    everything = wrapped(tokens, labels=tokens)
    torch.testing.assert_close(everything.loss, next_token_loss(everything.logits, tokens))
    labels = tokens.clone()
    labels[:, 20:] = -100
    some = next_token_loss(everything.logits[:, :20], tokens[:, :20])
    torch.testing.assert_close(wrapped(tokens, labels=labels).loss, some)
    of_ten = wrapped(tokens, labels=labels, num_items_in_batch=10).loss
    torch.testing.assert_close(of_ten, some * 2 * 19 / 10)
    assert wrapped(tokens, labels=torch.full_like(tokens, -100)).loss == 0


def test_what_the_exported_model_cannot_take_is_refused_in_a_sentence(wrapped):
    tokens = tokens_of(SMALL, 33)
    for mask in ([0] * 4 + [1] * 29, [1] * 20 + [0] * 12 + [1]):
        with pytest.raises(ValueError, match="pad on the right"):
            wrapped(tokens, attention_mask=torch.tensor([mask, mask]))
    with pytest.raises(ValueError, match="Give input_ids"):
        wrapped(inputs_embeds=torch.zeros(2, 33, 32))
    with pytest.raises(ValueError, match="71 tokens: the model reads at most 70"):
        wrapped(tokens_of(SMALL, 71))
    for option in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match="returns logits and a loss"):
            wrapped(tokens, **{option: True})
        assert wrapped(tokens, **{option: False}).logits.shape == (2, 33, 100)
    with pytest.raises(ValueError, match="its size cannot change"):
        wrapped.resize_token_embeddings(101)


@pytest.mark.parametrize(("kept", "to", "sentence"), [
    ("nothing", "exported", "holds no trained model"),
    ("kept", "exported", "python -m pip install transformers"),
    ("kept", "kept", "kept exists: an export begins with a new folder"),
])  # fmt: skip
def test_what_cannot_be_exported_is_refused(kept, to, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    keep(trained(SMALL), tmp_path / "kept")
    assert main([str(tmp_path / kept), "--to", str(tmp_path / to)]) == 2
    assert sentence in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"], "nothing is written"


# ---- Loaded by transformers, in a process that knows nothing of this repository

USER = """
import importlib.util
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

assert importlib.util.find_spec("train_gpt") is None

def load(folder, **options):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model

tokens, exact, rounded = load_file("computed.safetensors").values()
model = load("exported").requires_grad_(False)
logits = model(tokens).logits
torch.testing.assert_close(logits, exact, rtol=0, atol=5e-6)
rounding = (rounded - exact).abs().mean()
assert 0 < rounding < 0.5, "of logits that are some 10 apart"
assert (load("exported", dtype=torch.bfloat16)(tokens).logits - rounded).abs().mean() < rounding

loss, _ = model(tokens, labels=tokens, return_dict=False)
text = model.generate(tokens[:1], max_new_tokens=5, do_sample=False, eos_token_id=None)
assert text.shape == (1, 38)
assert torch.equal(text[0, 33:], model(text).logits[0, 32:37].argmax(-1))

model.requires_grad_(True)
model(tokens, labels=tokens).loss.backward()
with torch.no_grad():
    model.gpt.embed -= 0.1 * model.gpt.embed.grad
assert model(tokens, labels=tokens).loss < loss
model.save_pretrained("tuned")
torch.testing.assert_close(load("tuned")(tokens).logits, model(tokens).logits)
"""


def as_a_user(code, place):
    """Run code in a folder, in a process that cannot import this repository or reach a hub."""
    env = {"HF_HOME": str(place / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env["PATH"] = os.environ["PATH"]
    words = [sys.executable, "-c", code]
    return subprocess.run(words, cwd=place, env=env, capture_output=True, text=True)


@needs_transformers
@pytest.mark.parametrize(("track", "recipe"), [("short", "record89"), ("steps", "muon")])
def test_transformers_loads_the_trained_model_and_generates_and_tunes_it(track, recipe, tmp_path):
    config = small(track, recipe, **SIZES)
    model, rounded = trained(config), trained(config, torch.bfloat16)
    export(keep(model, tmp_path / "kept"), tmp_path / "exported")
    tokens = tokens_of(config, 33)
    computed = [tokens, model.logits(tokens, 33), rounded.logits(tokens, 33)]
    named = {str(number): tensor.contiguous() for number, tensor in enumerate(computed)}
    save_file(named, tmp_path / "computed.safetensors")
    done = as_a_user(USER, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An export of a model that brings its vocabulary along."""
    place, size = tmp_path_factory.mktemp("place"), read_tokenizer(PROSE).n_vocab
    model = trained(small("short", vocab_size=size, bos=size - 1))
    export(keep(model, place / "kept", PROSE), place / "my-model")
    return place / "my-model"


@needs_transformers
def test_the_example_of_the_docs_writes_on_from_its_prompt(exported):
    page = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    (code,) = [block for block in blocks if "transformers" in block]
    done = as_a_user(code, exported.parent)
    prompt = code.split('tokenizer("')[1].split('"')[0]
    assert done.stdout.startswith(prompt), done.stderr[-3000:]
    assert len(done.stdout) > len(prompt) + 10


@needs_transformers
def test_the_exported_tokenizer_splits_text_as_tiktoken_does(exported):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(exported)
    known = read_tokenizer(PROSE)
    texts = ["", " ", "a  b\t\t\r\n c", "ünï\u00a0 \u2028 🙂", "  \n  x"]
    texts += [Path(__file__).read_text(encoding="utf-8"), "0123 4567  89", "x" * 50, "\n" * 9]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids == [known.eot_token, *known.encode_ordinary(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@needs_transformers
def test_an_export_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    kept = keep(trained(SMALL), tmp_path)
    monkeypatch.setattr(train_gpt, "offset_keys", lambda k_BTHD, begins_BT11: k_BTHD)
    with pytest.raises(Refused, match=r"logits of the export differ by .* from those of train_gpt"):
        export(kept, tmp_path / "exported")
    assert sorted(tmp_path.iterdir()) == [kept], "nothing of it is left"
