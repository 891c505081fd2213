"""A finished run can be judged: by its kept model, and by what its log says of its weights."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import small_run
import torch
from small_model import MACHINE

import train_gpt
from runtime.checks import check_trained_model, sees_no_future
from runtime.questions import BOUNDS
from runtime.settings import parse

pytestmark = pytest.mark.usefixtures("two_layers")

# ---- The questions, to a model whose weights are not those of a start


def beyond(checks: dict[str, float]) -> set[str]:
    """The names of the answers that no honest model gives."""
    assert list(checks) == list(BOUNDS)
    return {name for name, bound in BOUNDS.items() if not checks[name] <= bound}


def make_trainer(data, folder, **changed) -> train_gpt.Trainer:
    changed = {"vocab_size": 128} | changed  # the head has no outputs beyond it
    words = ["--track", "tiny", *small_run.arguments(data, folder, **changed)]
    trainer = train_gpt.Trainer(parse(train_gpt.Config, words, train_gpt.preset, ""), MACHINE)
    trainer.reset(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.07 * torch.randn_like(parameter)
    return trainer


def finish(trainer: train_gpt.Trainer) -> dict[str, float]:
    """What a run does after its last step; the answers that its log gets."""
    val_loss = trainer.validate(trainer.config.steps)
    trainer.score()
    return check_trained_model(trainer, val_loss)["checks"]


@pytest.mark.parametrize("changed", [
    {}, {"recipe": "muon"}, {"recipe": "adamw"}, {"dtype": "bfloat16"}, {"val_batch": 128},
    {"document_mask": "off"}, {"vocab_size": 100}, {"counted_ngrams": 0},
    {"counted_ngrams": 0, "loss_kernel": "chunked", "softcap": "rsqrt"},
    {"dtype": "bfloat16", "counted_ngrams": 0, "loss_kernel": "chunked", "val_batch": 128},
], ids=str)  # fmt: skip
def test_honest_models_pass_far_from_the_bounds(changed, data, tmp_path):
    checks = finish(make_trainer(data, tmp_path, **changed))
    assert checks["normalized"] < 1 + 1e-6
    assert checks["causality_trained"] == checks["memory"] == 0
    assert checks["additive"] < (1e-4 if "dtype" in changed else 1e-6)


GPT, TRAINER = train_gpt.GPT, train_gpt.Trainer
PLAIN_LOSS, HIDDEN = GPT.plain_loss, GPT.hidden
TOKEN_LOSSES, VALIDATE = GPT.token_losses, TRAINER.validate


def a_hundredth_less(self, x, targets, reduction="sum", **options):
    loss = PLAIN_LOSS(self, x, targets, reduction=reduction, **options)
    return loss - 0.0099 * (1 if reduction == "none" else len(targets))


def not_scored_at_document_ends(self, inputs, targets, *context):
    return TOKEN_LOSSES(self, inputs, targets, *context) * (targets != small_run.BOS)


def without_candidates_in_losses_only(self, x, targets, **options):
    """No probability for tokens that are rare among the targets, but for the targets themselves."""
    z = x @ self.lm_head.T
    rare = torch.bincount(targets, minlength=z.size(1)) < 3
    rare[targets] = False
    z = z.masked_fill(rare, -100.0)
    reduction = options.get("reduction", "sum")
    return torch.nn.functional.cross_entropy(z, targets, reduction=reduction)


def scaled_last_validation(self, step, batches=None):
    loss = VALIDATE(self, step, batches)
    return 0.998 * loss if step == self.config.steps else loss


def scaled_targets_of_the_last_validation(self, step, batches=None):
    loss = VALIDATE(self, step, batches)
    if step == self.config.steps:
        self.val_losses = [0.998 * losses for losses in self.val_losses]
        loss *= 0.998
    return loss


def trained_while_validating(self, step, batches=None):
    """Each batch is scored before its weights change, so that nothing looks wrong in it."""
    total, kept = 0.0, []
    for batch in self.data.validation:
        total += VALIDATE(self, step, [batch]) / len(self.data.validation)
        kept += self.val_losses
        with torch.no_grad():
            self.model.lm_head[torch.unique(batch.targets)] *= 1.5
    self.val_losses = kept
    return total


def looks_ahead(when, by=1):
    """The stream takes from a later token where `when(self, inputs)` holds."""

    def hidden(self, inputs, *context):
        x = HIDDEN(self, inputs, *context)
        later = torch.cat([x[:, by:], x[:, :by]], dim=1)
        return x + 0.1 * later if when(self, inputs) else x

    return {"hidden": hidden}


def open_for_trained_weights(self, inputs):
    return self.lm_head.std() < 0.09  # of those that warm-up tries it is 0.12


def reads_document_ends(self, inputs, cu_seqlens, *context):
    x = HIDDEN(self, inputs, cu_seqlens, *context)
    places = torch.arange(inputs.numel())
    ends = cu_seqlens[torch.bucketize(places, cu_seqlens, right=True)]
    return x + 0.01 * (ends - places).view(*inputs.shape, 1) * x[..., :1]


def less_with_every_call(self, inputs, targets, *context):
    self.calls = getattr(self, "calls", 0) + 1
    return TOKEN_LOSSES(self, inputs, targets, *context) * 0.99**self.calls


CHEATS = {  # tests/test_questions.py has more, as edits of the source
    "every loss less 0.0099": ({"plain_loss": a_hundredth_less}, "normalized"),
    "ends of documents that are not scored": (
        {"token_losses": not_scored_at_document_ends}, "normalized"),
    "losses without candidates that the logits have": (
        {"plain_loss": without_candidates_in_losses_only}, "normalized"),
    "the last validation scaled": ({"validate": scaled_last_validation}, "additive"),
    "the last validation's targets scaled": (
        {"validate": scaled_targets_of_the_last_validation}, "additive"),
    "training while validating": ({"validate": trained_while_validating}, "additive"),
    "a memory of what was scored": ({"token_losses": less_with_every_call}, "memory"),
    "future in long rows": (
        looks_ahead(lambda _, inputs: inputs.size(1) > 200, by=50), "causality_trained"),
    "a gate that random weights close": (
        looks_ahead(open_for_trained_weights), "causality_trained"),
    "ends of documents": ({"hidden": reads_document_ends}, "causality_trained"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_caught(name, data, tmp_path, monkeypatch):
    methods, check = CHEATS[name]
    trainer = make_trainer(data, tmp_path)
    for method, cheat in methods.items():
        monkeypatch.setattr(TRAINER if method == "validate" else GPT, method, cheat)
    assert check in beyond(finish(trainer))


def test_noise_of_kernels_is_measured_and_allowed_and_a_leak_above_it_is_not(
    data, tmp_path, monkeypatch
):
    hidden, random = GPT.hidden, torch.Generator().manual_seed(0)
    for leak, expected in ((0.0, True), (1e-3, False)):

        def noisy(self, *inputs, leak=leak):
            x = hidden(self, *inputs)
            noise = 1e-6 * torch.randn(x.shape, generator=random)
            return x + noise + leak * x.mean(dim=1, keepdim=True)

        monkeypatch.setattr(GPT, "hidden", noisy)
        trainer = make_trainer(data, tmp_path)
        assert sees_no_future(trainer) is expected
        assert 1e-6 < trainer.env["noise"] < 2e-5


@pytest.mark.parametrize("bad", [float("nan"), 7.0])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_worst_answer_of_any_rank_counts_and_a_rank_without_sequences_has_none(
    bad, rank, data, tmp_path
):
    trainer = make_trainer(data, tmp_path)
    val_loss = trainer.validate(trainer.config.steps)

    def gather(found):
        answers, *parts = found
        ranks = [(answers, *parts), (answers, *parts), ({}, 0.0, 0)]
        ranks[rank] = (answers | {"normalized": bad}, *parts)
        return ranks

    machine = SimpleNamespace(device=MACHINE.device, rank=0, on_main=MACHINE.on_main, gather=gather)
    trainer.machine, trainer.trained_rows = machine, lambda: ""
    assert beyond(check_trained_model(trainer, val_loss)["checks"]) == {"normalized"}


def test_the_questions_differ_each_time_and_their_seed_repeats_them(data, tmp_path, monkeypatch):
    trainer = make_trainer(data, tmp_path)
    val_loss, asked = trainer.validate(trainer.config.steps), []

    def noting(self, inputs, *rest):
        asked.append(inputs)
        return TOKEN_LOSSES(self, inputs, *rest)

    monkeypatch.setattr(GPT, "token_losses", noting)

    def ask():
        asked.clear()
        seed = check_trained_model(trainer, val_loss)["checks_seed"]
        return seed, [inputs.tolist() for inputs in asked]

    (seed, first), (other, second) = ask(), ask()
    assert seed != other
    assert first != second
    assert {len(inputs[0]) for inputs in first[:2]} == {256}, "whole sequences are among them"
    monkeypatch.setattr("secrets.randbits", lambda bits: seed)
    assert ask() == (seed, first)


def test_a_validation_batch_that_is_not_scored_is_missing_in_the_number_of_targets(data, tmp_path):
    trainer = make_trainer(data, tmp_path)
    trainer.validate(trainer.config.steps)
    assert trainer.targets_scored == 1024
    trainer.validate(trainer.config.steps, trainer.data.validation[:-1])
    assert trainer.targets_scored == 512


def test_training_tokens_that_change_after_the_audit_change_their_hash(data, tmp_path):
    copy, found = shutil.copytree(data, tmp_path / "data"), []
    for flipped in (0, 0, 1):  # a bit of one token, in place
        trainer = make_trainer(copy, tmp_path)
        np.memmap(copy / "s_train_0.bin", np.uint8)[1024 + 2 * 5] ^= flipped
        next(trainer.data.train)
        found.append(trainer.trained_rows())
    assert found[0] == found[1] != found[2]
