"""Schedules at their corners, rotary tables, and the step that each parameter takes."""

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from small_model import EVERY_RECIPE, MACHINE, SEQUENCE, configure, make_model, small

import optim
import train_gpt
from data.loader import Order, plan_run
from data.shards import Shard, ShardError, write_shard
from runtime.errors import Refused
from train_gpt import Trainer, make_optimizers, schedule, set_rates, stretches

pytestmark = pytest.mark.core

# ---- Pure functions of the step


def falling(step, scheduled, share, peak, last):
    """A rate that falls in the last share of the scheduled steps."""
    return last + (peak - last) * (1 - step / scheduled) / share


# Step, tokens, short and long window in blocks, learning rate, momentum, weights of next tokens and
# of the prefix. Record 42 has 2245 scheduled steps and 40 of extension.
SCHEDULES = {
    "record42": [
        (0, 262_144, 1, 3, 1, 0.85, [1]),
        (299, 262_144, 1, 3, 1, 0.85 + 0.1 * 299 / 300, [1]),
        (748, 262_144, 1, 3, 1, 0.95, [1]),
        (749, 262_144, 3, 7, 1, 0.95, [1]),
        (1122, 262_144, 3, 7, 1, 0.95, [1]),  # 1122 / 2245 < 0.5
        (1496, 262_144, 3, 7, falling(1496, 2245, 0.5, 1, 0.1), 0.95, [1]),
        (1497, 262_144, 5, 11, falling(1497, 2245, 0.5, 1, 0.1), 0.95, [1]),
        (2244, 262_144, 5, 11, falling(2244, 2245, 0.5, 1, 0.1), 0.932, [1]),
        (2245, 262_144, 6, 13, 0.0002 + 0.1 * 0.9998, 0.93, [1]),
        (2284, 262_144, 6, 13, 0.0002 + 0.1 * 0.9998, 0.852, [1]),
        (2285, 262_144, 6, 20, 0.0002 + 0.1 * 0.9998, 0.85, [1]),
    ],
    "record89": [
        (0, 131_072, 1, 3, 1, 0.85, [1, 0.5, 0.25, 0.25]),
        (422, 131_072, 1, 3, 1, 0.95, [1, 0.5, 0.25 * 2 / 424, 0.25]),
        (424, 262_144, 3, 7, 1.52, 0.95, [1, 0.5, 0.25]),
        (845, 262_144, 3, 7, falling(845, 1270, 0.6, 1.52, 0.15), 0.95, [1, 0.5 / 422, 0.25 / 422]),
        (846, 393_216, 5, 11, falling(846, 1270, 0.6, 1.73, 0.15), 0.95, [1]),
        (1284, 393_216, 6, 13, falling(0.9999, 1, 0.6, 1, 0.15), 0.852, [1]),
    ],
}


@pytest.mark.parametrize(
    ("recipe", "row"), [(recipe, row) for recipe, rows in SCHEDULES.items() for row in rows]
)
def test_batch_windows_rates_and_loss_change_as_in_the_records(recipe, row):
    step, tokens, short, long, rate, momentum, weights = row
    now = schedule(configure("short", recipe), step)
    assert now.batch_tokens == tokens
    assert now.windows == {"short": 128 * short, "long": 128 * long}
    assert (now.lr_factor, now.momentum) == pytest.approx((rate, momentum), rel=1e-9)
    assert now.loss_weights == pytest.approx(weights)


def test_the_last_validation_narrows_short_windows_too():
    config = configure("short", val_window=512)  # a short window has 768 tokens then
    assert schedule(config, config.steps).windows == {"short": 512, "long": 512}


@pytest.mark.parametrize("steps", [*range(1, 12), 57, 100])
@pytest.mark.parametrize(("track", "recipe"), EVERY_RECIPE)
def test_stages_have_their_fraction_of_the_steps_and_change_batch_and_tie_only_where_adam_steps(
    track, recipe, steps
):
    config = configure(track, recipe, steps=steps)
    found = stretches(config)
    assert [each.first for each in found] == [0, *(each.end for each in found[:-1])]
    assert found[-1].end == steps
    assert schedule(config, steps).stage == found[-1].stage, "so has the last validation"
    for before, after in pairwise(found):
        if (before.stage.batch, before.stage.tied) != (after.stage.batch, after.stage.tied):
            assert after.first % config.adam_accum_steps == 0
    lengths = {each.stage: each.end - each.first for each in found}
    for stage in train_gpt.STAGES[config.stages]:
        apart = abs(lengths.get(stage, 0) - stage.fraction * steps)
        assert apart <= config.adam_accum_steps, "a stage may wait for a step of Adam"


def test_the_steps_track_decays_to_zero_with_constant_momentum_no_window_and_26_validations():
    config = configure("steps")
    plans = [schedule(config, step) for step in range(config.steps)]
    assert plans[974].lr_factor == 1
    assert plans[3250 - 455].lr_factor == pytest.approx(0.2)
    assert plans[3249].lr_factor == pytest.approx(1 / 3250 / 0.7)
    assert {plan.momentum for plan in plans} == {0.95}
    assert plans[3].windows == {"short": 1024, "long": 1024}
    validated = [step for step, plan in enumerate(plans) if plan.validates]
    assert validated == [*range(0, 3250, 125)]


# ---- What a step does to each kind of parameter


def optimized(track, **changes):
    """A small fp32 model with unit weights, and its optimizers at step 0."""
    model = make_model(small(track, **changes))
    optimizers, guard = make_optimizers(model.config, model, MACHINE)
    for parameter in model.parameters():
        parameter.detach().fill_(1)
    set_rates(model.config, optimizers, schedule(model.config, 0))
    guard.divide_by(schedule(model.config, 0).batch_tokens // SEQUENCE)
    return model, optimizers, guard


def value_of(table, name):
    """The value of the only pattern that the name matches."""
    (value,) = (value for pattern, value in table.items() if fnmatchcase(name, pattern))
    return value


SIZES = {  # of the first step, and the share that decays
    "short": {
        "embed": (0.6, 0), "value_embeds.*": (0.6, 0), "lm_head": (0.008, 0), "scalars": (0.04, 0),
        "*qkvo": (0.03, 0), "*up": (0.06, 0), "*down": (0.03, 0), "*gate": (0.03, 0),
    },
    # A step of a (4C, C) matrix has spectral norm lr * sqrt(4), whatever its storage.
    "steps": {
        "embed": (0.7, 0.7 * 0.001), "lm_head": (0.004, 0.004 * 0.001),
        "*bias": (0.015, 0.015 * 0.001), "*gain": (0.015, 0.015 * 0.001),
        "*qkvo": (0.025, 0.025 * 0.05), "*up": (0.05, 0.025 * 0.05), "*down": (0.025, 0.025 * 0.05),
    },
}  # fmt: skip


@pytest.mark.parametrize("track", SIZES)
def test_the_first_step_and_its_decay_have_the_published_sizes_for_every_parameter(track):
    """Adam's step is its learning rate; a matrix's has singular values near its learning rate."""
    model, optimizers, _ = optimized(track, adam_wd=0.0, matrix_wd=0.0)
    for parameter in model.parameters():
        like = torch.ones_like if parameter.ndim < 2 else torch.randn_like
        parameter.grad = like(parameter)
    for optimizer in optimizers.values():
        optimizer.step()
    for name, parameter in model.named_parameters():
        change = parameter.detach() - 1
        size = change.abs().max()
        if name.endswith(("qkvo", "up", "down", "gate")):
            matrices = change.reshape(4, 24, 24) if name.endswith("qkvo") else change
            size = torch.linalg.svdvals(matrices).square().mean().sqrt()
        assert size.item() == pytest.approx(value_of(SIZES[track], name)[0], rel=0.15), name

    model, optimizers, _ = optimized(track)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # no step but the decay
    for optimizer in optimizers.values():
        optimizer.step()
    for name, parameter in model.named_parameters():
        wanted = torch.full_like(parameter, value_of(SIZES[track], name)[1])
        torch.testing.assert_close(1 - parameter.detach(), wanted, rtol=0, atol=1.2e-7)


# Parameter: its learning rate, the share of it that decays a step, betas; at a multiplier of 1.
RATES = {
    "blocks.1.attention.qkvo": (0.023, 0.023**2 * 1.2, None),
    "blocks.1.mlp.up": (0.046, 0.023 * 0.046 * 1.2, None),
    "blocks.1.mlp.down": (0.092, 0.023 * 0.092 * 1.2, None),
    "embed": (0.008, 0.008**2 * 0.005 * 150, (0.5, 0.95)),
    "lm_head": (0.008, 0.008**2 * 0.005 * 150, (0.5, 0.95)),
    "bigram": (0.6, 0.6**2 * 0.005 * 5, (0.75, 0.95)),
    "value_embeds.4": (0.6, 0.6**2 * 0.005 * 5, (0.75, 0.95)),
    "scalars": (0.04, 0.0, (0.9, 0.99)),
    "blocks.10.mudd_in": (0.002, 0.002**2 * 0.005, (0.9, 0.99)),
    "blocks.10.mudd_out": (0.002, 0.002**2 * 0.005, (0.9, 0.99)),
    "blocks.10.mudd_start": (0.002, 0.0, (0.9, 0.99)),
    "blocks.1.attention.value_gate": (0.008, 0.008**2 * 0.005, (0.9, 0.99)),
}


def test_learning_rates_decays_and_betas_are_those_of_record_89():
    config = small("short", "record89", momentum=(0.8, 0.9))
    optimizers, _ = make_optimizers(config, make_model(config), MACHINE)
    step = stretches(config)[1].first  # where the multiplier is 1.52
    set_rates(config, optimizers, schedule(config, step))
    found = {}
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            rate = group["lr"] * group["lr_mul"]
            decay = group["lr"] * group["weight_decay"] * group["wd_mul"]
            for name in group["param_names"]:
                found[name] = (rate, decay, group.get("betas"), group.get("momentum"))
    for name, (rate, decay, betas) in RATES.items():
        assert found[name][:2] == pytest.approx((1.52 * rate, 1.52**2 * decay)), name
        assert found[name][2:] == (betas, 0.9 if betas is None else None), name


def test_adam_steps_on_odd_steps_only_and_takes_the_gradients_of_two():
    trainer = object.__new__(Trainer)  # one without data
    trainer.model, trainer.optimizers, trainer.guard = optimized("short")
    trainer.config = trainer.model.config
    embed, matrix = trainer.model.embed, trainer.model.blocks[0].mlp.up
    for step in range(2):
        before = embed.detach().clone(), matrix.detach().clone()
        for parameter in trainer.model.parameters():
            grad = torch.full_like(parameter, step + 1.0)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        stepping = trainer.stepping(step)
        trainer.guard.step(torch.tensor(1.0), only=stepping)
        for optimizer in stepping:
            optimizer.zero_grad(set_to_none=True)
        assert torch.equal(embed, before[0]) == (step == 0)
        assert (embed.grad is None) == (step == 1)
        assert not torch.equal(matrix, before[1])
        assert matrix.grad is None, "a hidden matrix sees the gradients of one step"
    rows, beta1 = 2, 0.65
    mean = dict(optim.named_state(trainer.optimizers["adam"]))["embed.exp_avg"]
    torch.testing.assert_close(mean, torch.full_like(mean, (1 - beta1) * (1 + 2) / rows))


@pytest.mark.parametrize(("recipe", "stages"), [
    ("record89", {0: 8, 424: 16, 846: 24, 1270: 24}),
    ("record42", dict.fromkeys([0, 749, 1497, 2245], 8)),
])  # fmt: skip
def test_gradients_are_divided_by_a_steps_sequences_and_the_guard_starts_anew_with_each_stage(
    recipe, stages
):
    """Wider windows only double the gradients of `small`: the guard skipped half the steps there.

    stages: first step and sequences of each.
    """
    trainer = object.__new__(Trainer)
    trainer.config, trainer.machine, trainer.optimizers = configure("short", recipe), MACHINE, {}
    trainer.model, trainer.guard, trainer.data = mock.Mock(), mock.Mock(), mock.Mock()
    sequences = 0
    for step in range(trainer.config.steps):
        trainer.guard.reset_mock()
        trainer.set_step(step)
        assert trainer.guard.forget.called == (step in stages)
        sequences = stages.get(step, sequences)
        trainer.guard.divide_by.assert_called_once_with(sequences)


@pytest.mark.parametrize("track", ["short", "small"])
def test_record_89_ties_its_head_for_two_stages_and_unties_it_once(track):
    config = configure(track, "record89")
    first, second, third, _ = stretches(config)
    tied = [step for step in range(config.steps) if schedule(config, step).stage.tied]
    assert tied == [*range(third.first)]
    assert first.first < second.first < third.first
    assert [step for step in range(config.steps) if schedule(config, step).unties] == [third.first]


@pytest.mark.parametrize(("batch", "rule"), [
    (0.75, "stage 1 has 1.5 sequences"), (0.0, "stage 1 has 0 sequences"),
])  # fmt: skip
def test_a_stage_whose_batch_cannot_be_trained_is_refused(monkeypatch, batch, rule):
    stage = train_gpt.Stage(0.5, short=1, long=2)
    monkeypatch.setitem(train_gpt.STAGES, "bad", [stage, replace(stage, batch=batch)])
    with pytest.raises(Refused, match=rule):
        small("tiny", "muon", stages="bad")


@pytest.mark.parametrize("stages", train_gpt.STAGES.values(), ids=train_gpt.STAGES)
def test_fractions_of_a_table_add_up_to_1_and_nothing_comes_after_an_extension(stages):
    assert sum(stage.fraction for stage in stages) == pytest.approx(1)
    assert all(stage.batch <= 1 for stage in stages)
    assert not any(stage.extension for stage in stages[:-1])


@pytest.mark.parametrize("recipe", ["record89", "muon"])  # with a batch that grows, and without
def test_the_number_of_steps_that_an_error_names_fits_the_data(recipe, tmp_path):
    config = configure("small", recipe)
    write_shard(tmp_path / "train.bin", np.tile([config.bos, *range(299)], 500).astype(np.uint16))
    shards = [Shard(tmp_path / "train.bin")]

    def plan(steps):
        readings = train_gpt.readings(replace(config, steps=steps))
        return plan_run(shards, Order(config.seq_len, config.bos, readings), steps)

    with pytest.raises(ShardError) as refused:
        plan(config.steps)
    named = re.search(r"Set --steps to at most (\d+),", str(refused.value))
    assert named
    plan(int(named[1]))
