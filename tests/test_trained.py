"""A finished run can be judged: by its kept model, and by what its log says of its weights."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import small_run
import torch
from small_model import MACHINE

import train_gpt
from runtime.settings import parse
from runtime.warmup import check_trained_model, sees_no_future

pytestmark = pytest.mark.usefixtures("two_layers")


# ---- The three checks, on weights that are not those of a start


def honest(checks: dict[str, float]) -> bool:
    """By the bounds of a judge."""
    assert list(checks) == ["normalized", "causality_trained", "additive"]
    near = abs(checks["normalized"] - 1) <= 0.01
    return near and checks["causality_trained"] <= 1e-3 and checks["additive"] <= 1e-3


def make_trainer(data, folder, **changed) -> train_gpt.Trainer:
    words = ["--track", "tiny", *small_run.arguments(data, folder, **changed)]
    trainer = train_gpt.Trainer(parse(train_gpt.Config, words, train_gpt.preset, ""), MACHINE)
    trainer.reset(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.07 * torch.randn_like(parameter)
    trainer.targets_scored = 0
    return trainer


@pytest.mark.parametrize("changed", [
    {}, {"recipe": "muon"}, {"recipe": "adamw"}, {"dtype": "bfloat16"}, {"val_batch": 128},
    {"document_mask": "off"}, {"vocab_size": 100}, {"loss_kernel": "chunked", "softcap": "rsqrt"},
], ids=str)  # fmt: skip
def test_honest_models_pass(changed, data, tmp_path):
    checks = check_trained_model(make_trainer(data, tmp_path, **changed))["checks"]
    assert honest(checks)
    assert checks["causality_trained"] == 0


GPT = train_gpt.GPT
PLAIN_LOSS, HIDDEN = GPT.plain_loss, GPT.hidden


def target_in_the_stream(self, x, targets, **options):
    return PLAIN_LOSS(self, x + 0.3 * self.output_weight[targets].to(x), targets, **options)


def last_row_left_out(self, inputs, targets, *context):
    losses = GPT.token_losses(self, inputs, targets)
    return losses[: max(len(losses) - 1, 1)].sum()


def looks_ahead(when, by=1):
    """The stream takes from a later token where `when(self, inputs)` holds."""

    def hidden(self, inputs, *context):
        x = HIDDEN(self, inputs, *context)
        later = torch.cat([x[:, by:], x[:, :by]], dim=1)
        return x + 0.1 * later if when(self, inputs) else x

    return hidden


def open_for_trained_weights(self, inputs):
    return self.lm_head.std() < 0.09  # of those that warm-up tries it is 0.12


def reads_document_ends(self, inputs, cu_seqlens, *context):
    x = HIDDEN(self, inputs, cu_seqlens, *context)
    places = torch.arange(inputs.numel())
    ends = cu_seqlens[torch.bucketize(places, cu_seqlens, right=True)]
    return x + 0.01 * (ends - places).view(*inputs.shape, 1) * x[..., :1]


CHEATS = {
    "target in the stream": ("plain_loss", target_in_the_stream, "normalized"),
    "last row not scored": ("forward", last_row_left_out, "additive"),
    "future in long rows": (
        "hidden", looks_ahead(lambda _, inputs: inputs.size(1) > 200, by=50), "causality_trained"),
    "future in batched rows": (
        "hidden", looks_ahead(lambda _, inputs: len(inputs) > 1, by=20), "causality_trained"),
    "a gate that random weights close": (
        "hidden", looks_ahead(open_for_trained_weights), "causality_trained"),
    "ends of documents": ("hidden", reads_document_ends, "causality_trained"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_caught(name, data, tmp_path, monkeypatch):
    method, cheat, check = CHEATS[name]
    trainer = make_trainer(data, tmp_path)
    expected = check_trained_model(trainer)["checks"]
    assert honest(expected)
    monkeypatch.setattr(GPT, method, cheat)
    found = check_trained_model(trainer)["checks"]
    assert not honest(found), found
    assert not honest(expected | {check: found[check]}), f"{check} is made for it: {found}"


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


@pytest.mark.parametrize("bad", [float("nan"), 7.0, -7.0])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_worst_value_of_any_rank_counts(bad, rank, data, tmp_path):
    trainer = make_trainer(data, tmp_path)
    sound = check_trained_model(trainer)["checks"]
    others = [[sound], [sound]]
    others[rank] = [sound | {"normalized": bad}]
    trainer.machine = SimpleNamespace(device=MACHINE.device, gather=lambda found: others)
    trainer.trained_rows = lambda: ""
    assert not honest(check_trained_model(trainer)["checks"])


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
