"""Real runs whose stages differ: the head leaves the token embedding, the documents grow."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from small_run import STEPS, TIED, UNTIED, logs_of, losses_of, run

import train_gpt
from data.shards import write_shard
from optim import named_state

pytestmark = pytest.mark.usefixtures("two_layers")

UNTYING = STEPS // 2
CHANGED = {
    "stages": "tied", "embed_std": 0.1, "adam_accum_steps": 2, "val_every": 3,
    "checkpoint_every": 0, "counted_ngrams": 0,
}  # fmt: skip


def table(*stages):
    return mock.patch.dict(train_gpt.STAGES, tied=[*stages])


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The folder of a run, and the state of Adam before the update of each step."""
    stepping, seen = train_gpt.Trainer.stepping, []

    def noting(self, step):
        seen.append(dict(named_state(self.optimizers["adam"])))
        return stepping(self, step)

    folder = tmp_path_factory.mktemp("whole")
    with mock.patch.object(train_gpt.Trainer, "stepping", noting):
        outcome = run(data, folder, **CHANGED)
    assert outcome.code == 0, outcome.err
    return folder, seen[-STEPS:]  # warm-up came first


def losses(folder):
    """Training losses by step, counted from 1, and validation losses by steps done."""
    return losses_of(*logs_of(folder))


# ---- The untying


def test_the_untying_changes_no_loss(whole, data, tmp_path):
    with table(TIED, replace(UNTIED, tied=True)):
        assert run(data, tmp_path, **CHANGED).code == 0
    (trained, validated), (stays, stays_validated) = losses(whole[0]), losses(tmp_path)
    for step in range(1, STEPS + 1):
        # The gradients differ, and Adam sums those of two steps; the other matrices' do not.
        assert (trained[step] == stays[step]) == (step <= UNTYING + 2), step
    for step in (0, 3, UNTYING, 9, STEPS):
        assert (validated[step] == stays_validated[step]) == (step <= UNTYING), step


def test_the_head_begins_with_the_adam_state_of_the_embedding(whole):
    first = whole[1][UNTYING]
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        given = first[f"embed.{kind}"]
        assert torch.equal(first[f"lm_head.{kind}"], given)
        assert given.count_nonzero()


# ---- Skipped steps


@pytest.mark.parametrize("bad", [UNTYING - 1, UNTYING])
def test_a_skipped_step_beside_the_untying_leaves_the_head_at_the_embedding(bad, data, tmp_path):
    stepping, heads = train_gpt.Trainer.stepping, {}

    def failing(self, step):
        if step == bad:
            self.model.embed.grad[0, 0] = torch.nan
        heads[step] = self.model.lm_head.detach().clone(), self.model.embed.detach().clone()
        return stepping(self, step)

    with mock.patch.object(train_gpt.Trainer, "stepping", failing):
        outcome = run(data, tmp_path, **CHANGED | {"adam_accum_steps": 1})
    assert outcome.code == 0, outcome.err
    assert [step["step"] for step in outcome.events("step") if step["skipped"]] == [bad + 1]
    assert torch.equal(*heads[UNTYING])
    assert torch.equal(*heads[UNTYING + 1]) == (bad == UNTYING)


# ---- Prefixes


def test_prefixes_are_learned_but_not_validated(tmp_path):
    data, generator = tmp_path / "data", np.random.default_rng(0)
    data.mkdir()
    for name, count in (("s_train_0", 400), ("s_val_0", 40)):
        tokens = generator.integers(0, 2047, (count, 50))  # of prose: most have a prefix
        tokens[:, 0] = 2047
        write_shard(data / f"{name}.bin", tokens.ravel())
    changed = CHANGED | {"prefixes": "on", "vocab_size": 2048, "bos": 2047}
    with table(replace(TIED, prefix_weight=(0.5, 0.25)), UNTIED):
        outcome = run(data, tmp_path / "with", **changed)
    assert outcome.code == 0, outcome.err
    assert run(data, tmp_path / "without", **changed).code == 0
    trained, validated = losses(tmp_path / "with")
    plain, plain_validated = losses(tmp_path / "without")
    assert validated[0] == plain_validated[0], "validation is of the next token only"
    assert trained[1] == plain[1], "so is the loss in the log"
    assert trained[STEPS] != plain[STEPS]
    assert validated[STEPS] != plain_validated[STEPS]


# ---- Documents


def test_attention_is_told_the_longest_document_of_each_step(data, tmp_path, monkeypatch):
    batch_loss, seen = train_gpt.Trainer.batch_loss, []

    def noting(self, batch, longest, weights=None):
        if torch.is_grad_enabled():
            seen.append((int(batch.cu_seqlens.diff().max()), longest))
        return batch_loss(self, batch, longest, weights)

    monkeypatch.setattr(train_gpt.Trainer, "batch_loss", noting)
    with table(replace(UNTIED, document=16), UNTIED):
        assert run(data, tmp_path, stages="tied", max_document=48, checkpoint_every=0).code == 0
    assert seen[-STEPS:] == [(16, 16)] * UNTYING + [(48, 48)] * (STEPS - UNTYING)
    assert all(found == bound for found, bound in seen)
