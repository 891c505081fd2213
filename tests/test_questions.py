"""A record run again, and the judge's questions: honest work repeats, a lying source does not."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from runpy import run_path
from types import ModuleType

import numpy as np
import pytest
import small_run
import torch
from small_record import make_claim

import train_gpt
from claims.logs import read_runs
from claims.questions import MEASURED, Rows, ask_model
from claims.record import TRACKS, Evidence, Source
from claims.rerun import compare_means, hide_unread, rerun, train, validation_rows
from data.shards import Shard
from runtime.errors import Refused
from runtime.log import config_hash
from runtime.questions import Model
from runtime.settings import parse
from runtime.source import digest, read_sources, write_files
from scripts import record

SEED, RUNS = 1000, 4
# The head has no outputs beyond the vocabulary.
SIZES = small_run.SIZES | {"vocab-size": 128}
LAYERS = """LAYERS["small89"] = [
    Layer(value_embed=0),
    Layer(window="long", value_embed=1, skip_from=0, backout=True),
]
import optim.muon
optim.muon.native_dtype = lambda *_: torch.float32  # as two_layers()
# ---- Model. B sequences"""


def small_source() -> Source:
    """The present source with two layers, and free to be small."""
    files = read_sources(small_run.ROOT)
    source = files["train_gpt.py"].decode()
    fixed = '"tiny": (*SCORED, *SIZES, "val_sha256"),'
    for old, new in (("# ---- Model. B sequences", LAYERS), (fixed, '"tiny": (),')):
        assert old in source
        source = source.replace(old, new)
    files["train_gpt.py"] = source.encode()
    return files


@pytest.fixture(scope="module")
def evidence(data, tmp_path_factory) -> Evidence:
    """A record of four runs, which kept their models."""
    logs = tmp_path_factory.mktemp("logs")
    given = {"keep_model": "on", "seed": SEED, "trials": RUNS, "vocab_size": 128}
    with small_run.two_layers():
        outcome = small_run.run(data, logs, **given)
    assert outcome.code == 0, outcome.err
    flags = [f"--{name}={value}" for name, value in SIZES.items()]
    config = asdict(parse(train_gpt.Config, ["--track=tiny", *flags], train_gpt.preset, ""))
    config, source = json.loads(json.dumps(config)), small_source()
    sha256 = {"config_sha256": config_hash(config), "source_sha256": digest(source)}
    claim = replace(make_claim(n=RUNS, seed=SEED), config=config, flags=flags, **sha256)
    runs = [read_runs(log)[0] for log in outcome.logs]
    for run in runs:
        assert run.config_sha256 == claim.config_sha256
        run.header.update(claim=claim.id)
    return Evidence(logs, claim, TRACKS["tiny"], runs, [], source)


@pytest.mark.slow
@pytest.mark.parametrize(("lower", "code"), [(0.0, 0), (0.5, 1)])
def test_an_honest_record_is_repeated_and_one_whose_losses_are_all_forged_is_not(
    evidence, data, capsys, lower, code
):
    runs = []
    for run in evidence.runs:
        *before, last = run.validations
        forged = last._replace(loss=last.loss - lower)
        runs.append(replace(run, validations=[*before, forged]))
    found = record.run_again(replace(evidence, runs=runs), data)
    said = capsys.readouterr().out
    assert found == code, said
    differing = [line.strip() for line in said.splitlines() if line.endswith("DIFFERS")]
    assert all(line.startswith("mean loss here") for line in differing), said
    assert bool(differing) == bool(code)
    assert said.count("running its source: seed 100") == 2
    for name in ("normalized", "causality_trained", "additive", "memory", "mean of 1,024"):
        assert name in said


def test_means_are_compared_in_standard_errors_of_the_records_spread():
    losses = [3.1, 3.2, 3.3, 3.4]
    sd = np.std(losses, ddof=1)
    found = compare_means("loss", losses, [3.0, 3.1])
    assert found.found == pytest.approx(0.2 / (sd * np.sqrt(1 / 2 + 1 / 4)))
    assert found.holds
    assert not compare_means("loss", losses, [4.0, 4.1]).holds
    assert not compare_means("loss", [3.1] * 4, [3.0, 3.1]).holds, "no spread"


def test_what_cannot_run_here_is_refused_with_the_reason(evidence, tmp_path):
    with pytest.raises(Refused, match=r"none has no \*train_\*.bin file"):
        list(rerun(evidence, tmp_path / "none", tmp_path))
    with pytest.raises(Refused, match="1 runs that count; a rerun needs 2"):
        list(rerun(replace(evidence, runs=evidence.runs[:1]), tmp_path, tmp_path))


LEAK = """self.model.initialize(seed)
        from data.shards import Shard, find_shards
        found = [Shard(file)[:].astype(int) for file in find_shards(asdict(self.config), "train")]
        counts = torch.zeros(128, 128)
        for tokens in map(torch.from_numpy, found):
            counts.index_put_((tokens[:-1], tokens[1:]), torch.ones(()), accumulate=True)
        rows = counts[:, :64].view(128, 32, 2).sum(2) / counts.sum(1, True).clamp(min=1)
        self.model.embed.data.copy_(rows)"""


@pytest.mark.slow
def test_a_source_that_counts_text_on_which_it_does_not_train_is_not_repeated(
    evidence, data, tmp_path, capsys
):
    source = dict(evidence.source)
    text = source["train_gpt.py"].decode()
    source["train_gpt.py"] = text.replace("self.model.initialize(seed)", LEAK).encode()
    write_files(source, tmp_path)
    runs = [train(evidence, run, data, tmp_path) for run in evidence.runs[:2]]
    for run in runs:
        run.header.update(claim=evidence.claim.id)
    assert record.run_again(replace(evidence, source=source, runs=runs), data) == 1
    said = capsys.readouterr().out
    differing = [line.strip() for line in said.splitlines() if line.endswith("DIFFERS")]
    assert any(line.startswith("mean loss here") for line in differing), said
    assert not any(line.startswith("trained tokens") for line in differing), said


def test_text_behind_the_last_step_is_hidden_and_all_else_kept(data, tmp_path):
    hidden = hide_unread(data, tmp_path / "seen", [0, 5000], held_out=64, bos=small_run.BOS)
    assert sorted(path.name for path in hidden.iterdir()) == ["s_train_0.bin", "s_val_0.bin"]
    (before,), (after,) = ([Shard(folder / "s_train_0.bin")[:]] for folder in (data, hidden))
    assert (before[:5000] == after[:5000]).all()
    assert (before[-64:] == after[-64:]).all()
    assert (before[5000:-64] == after[5000:-64]).mean() < 0.1
    assert ((before == small_run.BOS) == (after == small_run.BOS)).all()


def test_a_stored_source_inherits_no_setting_that_no_hash_covers(
    evidence, data, tmp_path, monkeypatch
):
    monkeypatch.setenv("IDEA_LR", "2")
    source = {"train_gpt.py": b"import os; print(*map(os.environ.get, ['IDEA_LR', 'PATH']))"}
    with pytest.raises(Refused, match=f"does not run here: None {os.environ['PATH'][:20]}"):
        list(rerun(replace(evidence, source=source), data, tmp_path))


# ---- Sources that lie: each edit of train_gpt.py, and what finds it

END = "return losses.view_as(targets_BT)"
STREAM = "x = self.hidden(inputs_BT, *(context or self.eval_context(inputs_BT)))"
NORMED = "x_BTC = x0_BTC = norm(x_BTC, self.embed_gain)"
LIES = {
    "nothing": ("", "", None),
    "too much probability by 0.0099": (END, f"{END} - 0.0099", "normalized"),
    "a loss that is scaled": (END, f"{END} * 0.9", "normalized"),
    "losses halved from place 8 of a row on": (
        END, f"losses.view_as(targets_BT)[:, 8:] *= 0.5\n        {END}", "normalized"),
    "losses halved late in long rows": (
        END, f"losses.view_as(targets_BT)[:, 192:] *= 0.5\n        {END}", "normalized"),
    "a memory of what it scored": (
        END, f"self.seen = getattr(self, 'seen', 0) + 1\n        {END} * 0.99**self.seen",
        "memory"),
    "the target in the stream": (
        f"{STREAM}\n        x = x[:, -targets_BT.size(1) :]",
        f"{STREAM} + 3 * self.output_weight[targets_BT]", "normalized"),
    "the next token": (
        NORMED, f"{NORMED}\n        x_BTC = x_BTC + x_BTC.roll(-1, 1)", "causality"),
    "the token after the next": (
        NORMED, f"{NORMED}\n        x_BTC = x_BTC + x_BTC.roll(-2, 1)", "causality"),
    "the last token of long rows": (
        NORMED, f"{NORMED}\n        if T == 256:\n            x_BTC = x_BTC + x_BTC[:, -1:]",
        "causality"),
    "other rows of a batch": (
        NORMED, f"{NORMED}\n        if B > 1:\n            x_BTC = x_BTC + x_BTC.roll(1, 0)",
        "causality|additive"),
    "where the next document begins": (
        NORMED, f"{NORMED}\n        x_BTC = x_BTC + begins_BT11.roll(-2, 1).float().view(B, T, 1)",
        "causality"),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(evidence, data) -> Rows:
    """Those of the last validation."""
    config = evidence.claim.config
    return validation_rows(data, config["val_tokens"], config["val_seq_len"])


@contextmanager
def answering(evidence: Evidence, old: str = "", new: str = "") -> Iterator[Model]:
    """The model that a run kept, in this process, as train_gpt.py runs it after an edit."""
    text = (small_run.ROOT / "train_gpt.py").read_text()
    assert old in text
    text = text.replace("# ---- Model. B sequences", LAYERS)
    module = ModuleType("lying_trainer")
    module.__file__ = train_gpt.__file__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lying_trainer", module)
        exec(text.replace(old, new) if old else text, module.__dict__)
        patch.setitem(sys.modules, "train_gpt", module)
        lying = run_path(str(small_run.ROOT / "inference" / "model.py"))
        gpt = lying["load_model"](min(evidence.folder.glob("checkpoints/*/final"))).gpt

        def losses(inputs, targets):
            return gpt.token_losses(torch.tensor(inputs).int(), torch.tensor(targets)).numpy()

        def logits(inputs, count):
            return gpt.logits(torch.tensor(inputs).int(), count).numpy()

        yield Model(losses, logits, gpt.config.bos, gpt.config.vocab_size)


@pytest.mark.parametrize("lie", LIES)
def test_a_source_that_lies_in_its_own_checks_is_found_out(lie, evidence, rows):
    *edit, check = LIES[lie]
    with answering(evidence, *edit) as model:
        logged = model.losses(rows[:, :-1], rows[:, 1:]).mean()  # the log agrees with the lie
        findings = list(ask_model(model, rows, evidence.claim.config, logged, {}))
    failed = [each.what for each in findings if not each.holds]
    if check is None:
        assert failed == []
    else:
        assert any(name in what for name in check.split("|") for what in failed), failed


def test_targets_that_were_not_scored_and_losses_on_new_tokens_that_are_forged_are_found(
    evidence, rows
):
    run = min(evidence.runs, key=lambda run: run.run_id)
    with answering(evidence) as model:
        ask = partial(ask_model, model, rows, evidence.claim.config)
        scored = model.losses(rows[:-1, :-1], rows[:-1, 1:]).sum()  # without the last row
        for loss, holds in ((run.final_loss, True), (scored / rows[:, 1:].size, False)):
            assert next(ask(loss, {})).holds == holds
        for measure in MEASURED:
            for wrong, holds in ((0.0, True), (-0.002, False)):
                _, found, *_ = ask(run.final_loss, {measure: run.probe(measure) + wrong})
                assert (found.what.split(":")[0], found.holds) == (measure, holds)
