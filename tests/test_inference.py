"""A kept model: read, sampled, evaluated and scored as the trainer and a pencil would."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_model import configure, keep, make_model
from small_run import run, write_data

from data.sampling import generate, pick
from data.shards import read_shard, write_shard
from data.tokenizers import PROSE, read_tokenizer
from inference import evaluation
from inference.model import Model, find_model, load_model
from runtime.checkpoint import VOCABULARY
from runtime.errors import Refused
from scripts import evaluate as evaluate_script
from scripts import sample as sample_script
from train_gpt import context

pytestmark = pytest.mark.usefixtures("two_layers")
# So small that a document of 700 tokens is computed at once, and longer than the context.
SIZES = {
    "vocab_size": 2048, "bos": 2047, "dim": 48, "head_dim": 12, "window_block": 4,
    "val_window": 24, "val_tokens": 2048, "val_seq_len": 1024, "val_batch": 1024,
    "dtype": "float32", "val_sha256": "",
}  # fmt: skip
BOS = 2047


def random_model(recipe="record89", dtype=torch.float32, **changed):
    """Random in all its weights: at the start of a run, attention would have no effect."""
    config = configure("tiny", recipe, **SIZES | changed)
    gpt = make_model(config, dtype)
    gpt.initialize(0)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    gpt = gpt.to(dtype).requires_grad_(False)
    gpt.set_step(config.steps)
    return Model(Path(), {"tokenizer": VOCABULARY}, gpt)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    return keep(random_model().gpt, tmp_path_factory.mktemp("kept"), PROSE)


# ---- Sampling


@pytest.mark.parametrize("recipe", ["muon", "record89"])
def test_logits_of_the_context_are_those_of_the_whole_document(recipe):
    """Token by token: across windows, smear, n-grams, skips and the offset of keys."""
    model = random_model(recipe, torch.float64, ngrams=4)
    most = context(model.config)
    assert most < 400, "else the document is never cut"
    tokens = torch.randint(BOS, (700,), generator=torch.Generator().manual_seed(1))
    tokens[0] = BOS
    whole = model.logits(tokens, count=len(tokens))
    for end in (1, 2, 3, most - 1, most, *range(most + 1, 701, 29), 700):
        (last,) = model.logits(tokens[max(end - most, 0) : end])
        # Rotary angles are float32, so a document that begins elsewhere turns a little otherwise.
        assert torch.allclose(last, whole[end - 1], rtol=0, atol=1e-4), end
    (blind,) = model.logits(tokens[-20:])
    assert not torch.allclose(blind, whole[-1], rtol=0, atol=0.01), "the context takes part"


def test_the_likeliest_tokens_are_those_of_full_passes():
    model = random_model()
    written = list(model.write([5, 6], 12, temperature=0))
    tokens = [BOS, 5, 6]
    for token in written:
        assert token == int(model.logits(torch.tensor(tokens))[-1].argmax())
        tokens.append(token)
    assert written == list(model.write([5, 6], 12, top_k=1, seed=3))
    sampled = list(model.write([5, 6], 12, seed=1))
    assert sampled == list(model.write([5, 6], 12, seed=1))
    assert sampled != list(model.write([5, 6], 12, seed=2))


def test_a_text_ends_with_bos_and_reads_no_more_than_its_context():
    seen = []

    def logits(tokens):
        seen.append(tokens.tolist())
        return torch.eye(10)[(tokens[-1] + 1) % 10]

    state = torch.get_rng_state()
    made = generate(logits, [9, 3], 50, bos=9, context=3, temperature=0.001)
    assert list(made) == [4, 5, 6, 7, 8]
    assert seen[:3] == [[9, 3], [9, 3, 4], [3, 4, 5]]
    assert torch.get_rng_state().equal(state)
    at_least = generate(logits, [9, 3], 8, bos=9, context=3, temperature=0.001, least=6)
    assert list(at_least)[:5] == [4, 5, 6, 7, 8]
    assert len(list(generate(logits, [9, 3], 8, bos=9, context=3, least=8))) == 8


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "powers"), [
    (1.0, 0, 1.0, [1, 1, 1]), (0.5, 0, 1.0, [2, 2, 2]), (1.0, 2, 1.0, [None, 1, 1]),
    (1.0, 0, 0.7, [None, 1, 1]), (1.0, 0, 0.4, [None, None, 1]), (1.0, 0, 0.9, [1, 1, 1]),
    (1.0, 2, 0.6, [None, None, 1]),  # 0.6 of what the two likeliest have
])  # fmt: skip
def test_tokens_are_drawn_by_their_probabilities(temperature, top_k, top_p, powers):
    given = [0.2, 0.3, 0.5]
    weights = [0 if power is None else p**power for p, power in zip(given, powers, strict=True)]
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor(given).log()
    drawn = [pick(logits, temperature, top_k, top_p, generator) for _ in range(4000)]
    for token, weight in enumerate(weights):
        assert drawn.count(token) / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_the_script_writes_what_the_model_does_in_several_texts(folder, capsys):
    words = ["def f(x):", "--checkpoint", str(folder.parent)]
    words += ["--tokens", "12", "--device", "cpu", "--seed", "5"]
    model, tokens = load_model(folder, "cpu"), read_tokenizer(PROSE).encode_ordinary("def f(x):")
    texts = []
    for seed in (5, 6):
        written = list(model.write(tokens, 12, temperature=0.8, least=40, seed=seed))
        texts.append(f"def f(x):{model.tokenizer.decode(written)}\n")
    assert sample_script.main(words) == 0
    written = capsys.readouterr()
    assert written.out == texts[0]
    assert f"model {folder}: tiny, record89, " in written.err
    assert sample_script.main([*words, "--samples", "2"]) == 0
    assert capsys.readouterr().out == f"--- seed 5\n{texts[0]}--- seed 6\n{texts[1]}"


def test_without_a_folder_the_newest_model_writes(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("inference.model.SOURCE", tmp_path / "repository")
    assert sample_script.main(["hello"]) == 2
    assert "checkpoints/ holds no model. Train one" in capsys.readouterr().err
    for name, changed in (("old", 1000), ("new", 2000), ("older", 500)):
        final = tmp_path / "checkpoints" / name / "final"
        final.mkdir(parents=True)
        os.utime(final, (1000, changed))
    assert find_model(None) == Path("checkpoints/new/final")


@pytest.mark.parametrize(("words", "sentence"), [
    ("--temperature -1", "--temperature -1.0: at least 0"),
    ("--tokens -1", "--tokens -1: at least 0"),
    ("b --checkpoint missing", "missing holds no trained model. A run leaves one in checkpoints"),
])  # fmt: skip
def test_bad_words_are_refused_with_the_fix(words, sentence, capsys):
    assert sample_script.main(words.split()) == 2
    assert sentence in capsys.readouterr().err


# ---- What a folder must hold


@pytest.mark.parametrize(("name", "value", "sentence"), [
    ("smear", None, "settings smear are only in the model or"),
    ("steps", "thirty", "steps: 'thirty': it must be "), ("smear", 1, "smear: '1': it must be "),
    ("layers", "huge", "--layers huge: it must be one of record42"),
    ("dim", 96, "size mismatch for"),
])  # fmt: skip
def test_a_setting_that_does_not_fit_is_refused_by_name(name, value, sentence, tmp_path):
    with pytest.raises(Refused, match=sentence):
        load_model(keep(random_model().gpt, tmp_path, PROSE, **{name: value}))


# ---- The trainer's part


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two trials that keep their models and sample; 64 tokens of the prose's vocabulary occur."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_data(folder / "data")
    for path in data.iterdir():
        tokens = read_shard(path, 64)
        write_shard(path, np.where(tokens == 63, BOS, tokens).astype(np.uint16))
    sizes = {"vocab_size": 2048, "bos": BOS, "keep_model": "on", "trials": 2}
    return data, folder, sizes, run(data, folder, **sizes, sample_tokens=9)


def test_the_model_writes_once_before_the_last_line_and_changes_no_run(trained, tmp_path):
    data, _, sizes, outcome = trained
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("the model writes:\n") == 1
    target = outcome.out.rindex("target 1.0 ")
    assert outcome.out.rindex("step 12/12") < outcome.out.index("the model writes:") < target
    quiet = run(data, tmp_path, **sizes | {"keep_model": "off"}, sample_tokens=0)
    for trial in range(2):
        assert outcome.losses(trial) == quiet.losses(trial)
        untimed = [each["name"] for each in outcome.events("phase", trial) if not each["timed"]]
        assert untimed[-3:] == [["keep", "probe", "check"], ["probe", "check", "sample"]][trial]


def test_an_evaluation_and_its_script_find_the_losses_of_the_run(trained, monkeypatch, capsys):
    data, folder, _, outcome = trained
    for trial in range(2):
        end = outcome.events("end", trial)[0]
        (final,) = folder.glob(f"checkpoints/*_t{trial}_*/final")
        model = load_model(final, "cpu")
        scores = evaluation.evaluate(model)
        assert scores["loss"] == pytest.approx(end["val_loss"], rel=1e-5)
        for name in ("copied", "new"):
            probed = end["probes"][f"loss_on_{name}"]
            assert scores[name]["loss"] == pytest.approx(probed, rel=1e-5)
    monkeypatch.setattr(evaluation, "TOKENS_AT_ONCE", 100)  # rows are cut
    assert evaluation.evaluate(model, str(data))["loss"] == pytest.approx(scores["loss"], rel=1e-5)
    monkeypatch.setattr(evaluation, "SOURCE", folder.parent)
    elsewhere = replace(model.gpt.config, data_dir=f"{folder.name}/data")  # not in this folder
    monkeypatch.setattr(model.gpt, "config", elsewhere)
    assert evaluation.evaluate(model, rows=1)["tokens"] == 256
    assert evaluate_script.main([str(final), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert f"model {final}: " in text
    assert "   1,024 tokens" in text
    assert evaluate_script.main([str(final), "--data-dir", str(folder)]) == 2
    assert "has no *val_*.bin file" in capsys.readouterr().err
    assert evaluate_script.main([str(final), "--data-dir", str(data), "--rows", "99999"]) == 2
    assert "--val-tokens" not in capsys.readouterr().err


def test_bits_are_of_the_bytes_of_text(folder):
    model = load_model(folder, "cpu")
    tokens = model.tokenizer.encode_ordinary("def gcd(a, b):\n    return 1\n")
    targets = torch.tensor([*tokens, BOS])
    loss = torch.ones(len(targets), dtype=torch.float64)
    expected = len(tokens) / math.log(2) / len("def gcd(a, b):\n    return 1\n")
    assert evaluation.bits_per_byte(loss, targets, model) == pytest.approx(expected)
