"""Real runs whose output head is the token embedding at first and leaves it in mid-run."""

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from small_ranks import Scenario, play, record
from small_run import (
    STEPS,
    arguments,
    find_logs,
    quick_collection,
    run,
    two_layers,
    write_data,
)
from stub_trainer import logs_of, losses_of

import train_gpt
from data.shards import write_shard
from optim import named_state
from runtime.checkpoint import checkpoints, load
from runtime.checks import same_bits
from runtime.run import Run

pytestmark = pytest.mark.usefixtures("two_layers", "last_state")

TIED = train_gpt.Stage(0.5, short=1, long=2, tied=True, ahead=((0.5, 0.25),))
UNTIED = train_gpt.Stage(0.5, short=1, long=2)
UNTYING = STEPS // 2
CHANGED = {
    "stages": "constant", "embed_std": 0.1, "adam_accum_steps": 2, "val_every": 3,
    "checkpoint_every": 0,
    "keep_model": "on", "copy_init": 0.0,
}  # fmt: skip


def table(*stages):
    return mock.patch.dict(train_gpt.STAGES, constant=[*stages])


@pytest.fixture(autouse=True)
def _tied_at_first():
    with table(TIED, UNTIED):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The folder of a run, and what it had after the gradients of each step, before the update."""
    update, seen = train_gpt.Trainer.update, []

    def noting(self, *given):
        model = self.model
        seen.append({
            "embed": model.embed.detach().clone(), "lm_head": model.lm_head.detach().clone(),
            "gradient": model.lm_head.grad, "adam": dict(named_state(self.optimizers["adam"])),
        })  # fmt: skip
        return update(self, *given)

    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)  # a checkpoint has the state of the generator, too
    with table(TIED, UNTIED), mock.patch.object(train_gpt.Trainer, "update", noting):
        outcome = run(data, folder, **CHANGED)
    assert outcome.code == 0, outcome.err
    return folder, seen[-STEPS:]  # warm-up came first


def losses(folder):
    """Training losses by step, counted from 1, and validation losses by steps done."""
    return losses_of(*logs_of(folder))


def adam_state(seen, name):
    return {key: part for key, part in seen["adam"].items() if key.startswith(f"{name}.")}


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


def test_a_validation_at_the_untying_leaves_no_trace(whole, data, tmp_path):
    assert run(data, tmp_path, **CHANGED | {"val_every": 0}).code == 0
    assert losses(tmp_path)[0] == losses(whole[0])[0]


def test_the_head_takes_no_part_before_and_goes_its_own_way_after(whole):
    _, seen = whole
    for before in seen[:UNTYING]:
        assert before["gradient"] is None
        for part in (before["lm_head"], *adam_state(before, "lm_head").values()):
            assert torch.equal(part, torch.zeros_like(part))
    assert all(after["gradient"] is not None for after in seen[UNTYING:])
    first, last = seen[UNTYING], seen[-1]
    assert torch.equal(first["lm_head"], first["embed"])
    for moved in ("embed", "lm_head"):
        assert not torch.equal(last[moved], first[moved])
    assert not torch.equal(last["lm_head"], last["embed"])


def test_the_head_begins_with_the_adam_state_of_the_embedding(whole):
    first = whole[1][UNTYING]
    ours, theirs = adam_state(first, "lm_head"), adam_state(first, "embed")
    assert [key.partition(".")[2] for key in ours] == [key.partition(".")[2] for key in theirs]
    for own, given in zip(ours.values(), theirs.values(), strict=True):
        assert torch.equal(own, given)
        assert given.count_nonzero()


def test_the_head_leaves_the_embedding_across_a_stage_without_steps(whole, data, tmp_path):
    stages = [replace(TIED, share=0.45), replace(UNTIED, share=0.05), UNTIED]
    with table(*stages):
        assert run(data, tmp_path, **CHANGED).code == 0
    assert losses(tmp_path) == losses(whole[0])


def test_the_second_trial_begins_tied_again(data, tmp_path):
    assert run(data, tmp_path / "both", trials=2, seed=3, **CHANGED).code == 0
    assert run(data, tmp_path / "alone", seed=4, **CHANGED).code == 0
    assert losses_of(find_logs(tmp_path / "both")[1]) == losses(tmp_path / "alone")


# ---- Resumed and skipped steps


def end_of(folder):
    (run_folder,) = (folder / "checkpoints").iterdir()
    return load(*checkpoints(run_folder))


def break_off(moment, data, folder, **changed):
    stepped = Run.stepped

    def acting(self, *given, **named):
        stepped(self, *given, **named)
        if self.steps_done == moment:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)  # until it is heard

    with mock.patch.object(Run, "stepped", acting):
        assert run(data, folder, **changed).code == 143


def assert_resumes(moment, data, folder, reference, **changed):
    break_off(moment, data, folder, **changed)
    assert run(data, folder, resume="auto", **changed).code == 0
    assert losses(folder) == losses(reference)
    ours, theirs = end_of(folder), end_of(reference)
    assert same_bits(ours.model, theirs.model)
    assert same_bits(ours.optim, theirs.optim)


@pytest.mark.parametrize("moment", [UNTYING - 2, UNTYING, UNTYING + 2])
def test_a_run_resumes_bit_for_bit_around_the_untying(moment, whole, data, tmp_path):
    assert_resumes(moment, data, tmp_path, whole[0], **CHANGED)


@pytest.mark.parametrize("bad", [UNTYING - 1, UNTYING])
def test_a_skipped_step_beside_the_untying_resumes_bit_for_bit(bad, data, tmp_path):
    gradients, heads = train_gpt.Trainer.gradients, {}

    def failing(self, step, flags):
        message = gradients(self, step, flags)
        if step == bad:
            self.model.embed.grad[0, 0] = torch.nan
        heads[step] = self.model.lm_head.detach().clone(), self.model.embed.detach().clone()
        return message

    changed = CHANGED | {"adam_accum_steps": 1}
    with mock.patch.object(train_gpt.Trainer, "gradients", failing):
        outcome = run(data, tmp_path / "whole", **changed)
        assert outcome.code == 0, outcome.err
        assert [step["step"] for step in outcome.events("step") if step["skipped"]] == [bad + 1]
        assert torch.equal(*heads[UNTYING])
        assert torch.equal(*heads[UNTYING + 1]) == (bad == UNTYING)
        assert_resumes(bad + 1, data, tmp_path / "broken", tmp_path / "whole", **changed)


# ---- Several ranks

RANKS = {
    "adamw": (2e-6, {"recipe": "adamw"}),
    # The recipe's own rates amplify the rounding of sums.
    "copyinit": (2e-4, {"matrix_lr": 0.03, "embed_lr_mul": 25.0, "head_lr_mul": 1.0}),
}


def train(name, changed):
    """What each rank does when this file is run as a script, in the folder that the tests name."""
    folder = Path(os.environ["FOLDER_OF_THE_TESTS"])
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    with two_layers(), quick_collection(), table(TIED, UNTIED):
        return train_gpt.main(arguments(folder / "data", folder / name, **CHANGED | changed))


SCENARIOS = {}
for name, (_, changed) in RANKS.items():
    SCENARIOS[name] = Scenario(partial(train, name, changed), range(2), 2)

if __name__ == "__main__":
    import torch._dynamo  # which every rank would import for itself

    play(SCENARIOS, in_turn=True)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The folder of the runs on two ranks, and what the ranks left."""
    folder = tmp_path_factory.mktemp("ranks")
    write_data(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLDER_OF_THE_TESTS", str(folder))
        return folder, record(__file__)


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_give_the_losses_of_one_across_the_untying(name, left, tmp_path):
    folder, ranks = left
    assert [rank.code for rank in ranks[name]] == [0, 0], ranks[name]
    tolerance, changed = RANKS[name]
    assert run(folder / "data", tmp_path, **CHANGED | changed).code == 0
    for ours, alone in zip(losses(folder / name), losses(tmp_path), strict=True):
        assert ours == pytest.approx(alone, rel=tolerance)


# ---- Prefixes


@pytest.fixture
def corpus_like(tmp_path):
    """Shards of random tokens of the corpus' vocabulary, most of which have a prefix."""
    folder, generator = tmp_path / "data", np.random.default_rng(0)
    folder.mkdir()
    for name, count in (("s_train_0", 400), ("s_val_0", 40)):
        tokens = generator.integers(0, 1023, (count, 50))
        tokens[:, 0] = 1023
        write_shard(folder / f"{name}.bin", tokens.ravel())
    return folder


def cross_entropy(trainer, weight):
    """Mean over the validation tokens, in float64, of the next token alone."""
    total = 0.0
    for batch in trainer.data.validation:
        given = (batch.cu_seqlens, trainer.model.windows, trainer.data.val_longest)
        x = trainer.model.hidden(batch.inputs, *given)[:, -batch.targets.size(1) :].double()
        logits = 30 * torch.sigmoid(x @ weight.double().T / 7.5)
        chosen = logits.gather(-1, batch.targets.long().unsqueeze(-1)).squeeze(-1)
        total += (logits.logsumexp(-1) - chosen).sum().item()
    return total / trainer.config.val_tokens


def test_prefixes_are_learned_but_not_validated(corpus_like, tmp_path, monkeypatch):
    validate, plain = train_gpt.Trainer.validate, []

    @torch.no_grad()
    def noting(self, step, batches=None):
        found = validate(self, step, batches)
        weight = self.model.embed if step < UNTYING else self.model.lm_head
        plain.append(cross_entropy(self, weight))
        return found

    monkeypatch.setattr(train_gpt.Trainer, "validate", noting)
    changed = CHANGED | {"prefixes": "on", "vocab_size": 1024, "bos": 1023}
    with table(replace(TIED, prefix=(0.5, 0.25)), UNTIED):
        outcome = run(corpus_like, tmp_path / "with", **changed)
    assert outcome.code == 0, outcome.err
    trained, validated = losses(tmp_path / "with")
    assert list(validated.values()) == pytest.approx(plain[-len(validated) :], rel=1e-6)
    assert run(corpus_like, tmp_path / "without", **changed).code == 0
    without, without_validated = losses(tmp_path / "without")
    assert validated[0] == without_validated[0]
    assert trained[1] == without[1], "the log has the loss of the next token alone"
    assert trained[STEPS] != without[STEPS]
    assert validated[STEPS] != without_validated[STEPS]
