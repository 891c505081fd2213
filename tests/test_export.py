"""An exported model is the trained one, loaded without this repository, or is refused by name."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import EVERY_RECIPE, make_model, small

import inference.export
import train_gpt
from data.tokenizers import PROSE, read_tokenizer
from inference.export import MODELING, export, exported_layers, write_model
from inference.model import load_model
from runtime.checkpoint import VOCABULARY, save_final
from runtime.errors import Refused
from scripts.export_model import main
from train_gpt import STAGES

NAMES = [f"{track}-{recipe}" for track, recipe in EVERY_RECIPE]
# Windows shorter than a row, and tables with rows that only pad the vocabulary: 100 of 128.
SIZES: dict[str, Any] = {"window_block": 2, "val_window": 20, "ngrams": 4}
LENGTHS = (1, 2, 33, 70)
SMALL = small("short", "record89", **SIZES)

MISSING = importlib.util.find_spec("transformers") is None


def needs_transformers(test):
    """Mark a test: its import of transformers alone takes seconds."""
    skip = pytest.mark.skipif(MISSING, reason="needs transformers: pip install transformers")
    return pytest.mark.slow(skip(test))


def trained(config, dtype=torch.float32):
    """A model with random weights, none of them zero, as at the last validation."""
    model = make_model(config, dtype)
    model.set_step(config.steps)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 1.0 if parameter.ndim < 2 or "embed" in name else parameter.size(0) ** -0.5
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(spread * noise + (1.0 if name.endswith("gain") else 0.0))
    return model


def keep(model, folder, tokenizer="gpt2"):
    """Write what a run with --keep-model on leaves of its model."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    facts = {
        "run_id": "20261122-181629_tiny_s0_t0_c1b435", "seed": 0, "source_sha256": "ab" * 32,
        "steps": 3, "tokens": 420, "val_loss": 3.5, "config": asdict(model.config),
    }  # fmt: skip
    return save_final(folder, weights, facts, tokenizer)


def tokens_of(config, length):
    """Two rows (2, length), with documents that begin inside them."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(config.bos, (2, length), generator=generator)
    for row, starts in enumerate([(0, 7, 8, 40), (33,)]):
        tokens[row, [start for start in starts if start < length]] = config.bos
    return tokens


def targets_of(tokens):
    """Two targets for each token."""
    return torch.stack([(tokens * 7 + 3) % 100, (tokens * 11 + 5) % 100])


def preference(model, tokens):
    """By how much the trainer's model prefers the first of the two targets: of logits, too.

    In the difference of two losses the sum over the vocabulary cancels, with all that pads it.
    """
    with torch.no_grad():
        first, second = (model.token_losses(tokens, targets) for targets in targets_of(tokens))
    return second - first


def exported_preference(logits, tokens):
    first, second = logits.gather(2, targets_of(tokens).permute(1, 2, 0)).unbind(2)
    return first - second


# ---- Loaded by transformers, in a process that knows nothing of this repository

USER = """
import importlib.util
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

assert importlib.util.find_spec("train_gpt") is None
for folder in sorted(Path("exported").iterdir()):
    given, found = load_file(f"tokens/{folder.name}.safetensors"), {}
    for dtype in ("float32", "bfloat16"):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype=getattr(torch, dtype), output_loading_info=True
        )
        assert not any(info.values()), info
        with torch.no_grad():
            for length, tokens in given.items():
                found[f"{dtype}-{length}"] = model(tokens).logits
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert model.dtype == torch.float32
    tokens = given["33"]
    with torch.no_grad():
        found["loss"] = model(tokens, labels=tokens).loss
        found["generated"] = model.generate(
            tokens[:1], max_new_tokens=5, do_sample=False, eos_token_id=None
        )
        found["next"] = model(found["generated"]).logits.argmax(-1)
        padded = torch.cat([tokens, tokens[:, :4]], dim=1)
        seen = torch.ones_like(padded)
        seen[:, 33:] = 0
        found["padded"] = model(padded, attention_mask=seen).logits[:, :33].contiguous()
        grown = seen.clone()
        grown[:, -1] = 1  # what `generate` appends
        for refused in (seen.flip(1), grown):
            try:
                model(padded, attention_mask=refused)
            except ValueError as error:
                assert "pad on the right" in str(error)
            else:
                raise AssertionError("text after padding passed")
    save_file(found, f"found/{folder.name}.safetensors")
"""


def as_a_user(code, place):
    """Run code in a folder, in a process that cannot import this repository or reach a hub."""
    env = {"HF_HOME": str(place / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env["PATH"] = os.environ["PATH"]
    words = [sys.executable, "-c", code]
    return subprocess.run(words, cwd=place, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By recipe, what transformers computes with its exported model."""
    place = tmp_path_factory.mktemp("user")
    for name in ("tokens", "found"):
        (place / name).mkdir()
    for (track, recipe), name in zip(EVERY_RECIPE, NAMES, strict=True):
        config = small(track, recipe, **SIZES)
        export(keep(trained(config), place / "kept" / name), place / "exported" / name)
        tokens = {str(length): tokens_of(config, length) for length in LENGTHS}
        save_file(tokens, place / "tokens" / f"{name}.safetensors")
    done = as_a_user(USER, place)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: load_file(place / "found" / f"{name}.safetensors") for name in NAMES}


@needs_transformers
@pytest.mark.parametrize(("track", "recipe"), EVERY_RECIPE, ids=NAMES)
def test_the_exported_model_has_the_logits_of_the_trained_one_to_rounding(track, recipe, found):
    config, computed = small(track, recipe, **SIZES), found[f"{track}-{recipe}"]
    model = trained(config)
    for length in LENGTHS:
        tokens = tokens_of(config, length)
        logits = computed[f"float32-{length}"]
        assert logits.shape == (2, length, config.vocab_size)
        exact = preference(model, tokens)
        torch.testing.assert_close(exported_preference(logits, tokens), exact, rtol=1e-4, atol=2e-4)
    rounded = preference(trained(config, torch.bfloat16), tokens)  # of the last length
    exported = exported_preference(computed[f"bfloat16-{length}"], tokens)
    rounding = (rounded - exact).abs().mean()
    assert 0 < rounding < 1, "of logits that lie some 10 apart"
    assert (exported - rounded).abs().mean() < 1.5 * rounding
    assert (exported - exact).abs().mean() < 1.5 * rounding


@needs_transformers
@pytest.mark.parametrize("name", NAMES)
def test_it_generates_the_likeliest_its_loss_is_that_of_next_tokens_and_padding_changes_nothing(
    name, found
):
    generated = found[name]["generated"]
    assert generated.shape == (1, 38)
    assert torch.equal(generated[0, 33:], found[name]["next"][0, 32:37])
    logits = found[name]["float32-33"]
    track, recipe = name.split("-")
    tokens = tokens_of(small(track, recipe, **SIZES), 33)
    chosen = logits[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    expected = (logits[:, :-1].exp().sum(-1).log() - chosen).mean()
    torch.testing.assert_close(found[name]["loss"], expected)
    torch.testing.assert_close(found[name]["padded"], logits, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def vocabulary():
    return PROSE


@pytest.fixture(scope="module")
def exported(vocabulary, tmp_path_factory):
    """An export of a model that brings its vocabulary along."""
    place, size = tmp_path_factory.mktemp("place"), read_tokenizer(vocabulary).n_vocab
    model = trained(small("tiny", "copyinit", vocab_size=size, bos=size - 1))
    export(keep(model, place / "kept", vocabulary), place / "my-model")
    return place / "my-model"


@needs_transformers
def test_the_example_of_the_docs_writes_on_from_its_prompt(exported):
    page = Path(__file__).parents[1] / "docs" / "export.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    done = as_a_user(code, exported.parent)
    prompt = "def multiply(a, b):\n"
    assert done.stdout.startswith(prompt), done.stderr[-3000:]
    assert len(done.stdout) > len(prompt) + 10


@needs_transformers
def test_the_exported_tokenizer_splits_text_as_tiktoken_does(exported, vocabulary):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(exported)
    known = read_tokenizer(vocabulary)
    texts = ["", " ", "a  b\t\t\r\n c", "ünï\u00a0 \u2028 🙂", "  \n  x"]
    texts += [Path(__file__).read_text(encoding="utf-8"), "0123 4567  89", "x" * 50, "\n" * 9]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids == [known.eot_token, *known.encode_ordinary(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@needs_transformers
def test_a_vocabulary_that_has_changed_is_not_exported(exported, tmp_path):
    kept = shutil.copytree(exported.parent / "kept", tmp_path / "kept") / "final"
    with (kept / VOCABULARY).open("ab") as file:
        file.write(b"\n")
    with pytest.raises(Refused, match=VOCABULARY):
        export(kept, tmp_path / "exported")


def another_trainer(patch):
    patch.setattr(train_gpt, "offset_keys", lambda k_BTHD, begins_BT11: k_BTHD)


def another_window(patch):
    longer = [layer | {"window": layer["window"] + 1} for layer in exported_layers(trained(SMALL))]
    patch.setattr(inference.export, "exported_layers", lambda model: longer)


@needs_transformers
@pytest.mark.parametrize("change", [another_trainer, another_window])
def test_an_export_that_computes_something_else_is_refused(change, tmp_path, monkeypatch):
    kept = keep(trained(SMALL), tmp_path)
    change(monkeypatch)
    with pytest.raises(Refused, match=r"logits of the export differ by .* from those of train_gpt"):
        export(kept, tmp_path / "exported")
    assert sorted(tmp_path.iterdir()) == [kept], "nothing of it is left"


# ---- Without transformers


def written(config, folder):
    """The weights and the facts of an export that is not compared."""
    model = load_model(keep(trained(config), folder / "kept"), "cpu", torch.float32)
    write_model(model, folder)
    facts = json.loads((folder / "config.json").read_text())
    return load_file(folder / "model.safetensors"), facts


def test_an_export_is_the_weights_the_facts_and_the_forward_pass(tmp_path):
    weights, facts = written(SMALL, tmp_path)
    assert (tmp_path / MODELING.name).read_bytes() == MODELING.read_bytes()
    for name in ("embed", "value_embeds.0", "lm_head"):
        assert weights[name].shape == (100, 32), "100 tokens, without the 28 rows of padding"
    windows = [row["window"] for row in facts["layers"]]
    assert windows == [12, 12, 12, 20, *[12] * 6, 20]
    assert [row["key_offset"] for row in facts["layers"]] == [count == 20 for count in windows]
    assert facts["trained"]["tokenizer"] == "gpt2"


def test_the_exported_head_is_that_of_the_last_step(tmp_path, monkeypatch):
    early, late = replace(STAGES["copyinit"][0], tied=True), STAGES["copyinit"][1]
    monkeypatch.setitem(STAGES, "tied at last", [early, replace(late, tied=True)])
    weights, _ = written(small("tiny", "muon", stages="tied at last"), tmp_path / "tied")
    assert torch.equal(weights["lm_head"], weights["embed"])
    monkeypatch.setitem(STAGES, "tied at first", [early, late])
    weights, _ = written(small("tiny", "muon", stages="tied at first"), tmp_path / "untied")
    assert not torch.equal(weights["lm_head"], weights["embed"])


def refusal(kept, tmp_path, capsys):
    """What the command says; it writes nothing."""
    before = sorted(tmp_path.iterdir())
    assert main([str(kept), "--to", str(tmp_path / "exported")]) == 2
    assert sorted(tmp_path.iterdir()) == before
    return capsys.readouterr().err


def test_what_cannot_be_exported_is_refused(tmp_path, capsys, monkeypatch):
    kept = keep(trained(SMALL), tmp_path / "kept")
    assert "holds no trained model" in refusal(tmp_path / "nothing", tmp_path, capsys)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "python -m pip install transformers" in refusal(kept, tmp_path, capsys)
    (tmp_path / "exported").mkdir()
    assert "exported exists: an export begins with a new folder" in refusal(kept, tmp_path, capsys)
