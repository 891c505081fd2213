"""Schedules at their corners, the rotary tables that follow the window, and what each parameter's step becomes."""

import math
from fnmatch import fnmatchcase
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import PortableAttention
from runtime.machine import Machine
from train_gpt import (
    GPT,
    STAGES,
    TRACKS,
    Config,
    Trainer,
    first_step,
    learning_rate,
    make_optimizers,
    momentum,
    preset,
    rotary_at,
    rotate,
    set_schedule,
    stage_at,
    validates,
    windows_at,
)

CPU = torch.device("cpu")
SHORT = Config(**preset({"track": "short"}))  # 2245 scheduled steps and 40 of extension


# ----
# Pure functions of the step


@pytest.mark.parametrize(
    ("step", "long"),
    [(0, 3), (748, 3), (749, 7), (1496, 7), (1497, 11), (2244, 11), (2245, 13), (2284, 13), (2285, 13)],
)
def test_the_long_window_changes_where_record_42_changes_it(step, long):
    assert windows_at(SHORT, step)["long"] == (128 * long if step < SHORT.steps else 2560)


def test_the_short_window_is_half_of_the_long_one_in_whole_blocks():
    steps = [first_step(SHORT, stage) for stage in range(4)]
    assert [windows_at(SHORT, step)["short"] // 128 for step in steps] == [1, 3, 5, 6]
    assert windows_at(SHORT, SHORT.steps) == {"short": 6 * 128, "long": 2560}


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 57, 100])
@pytest.mark.parametrize("track", TRACKS)
def test_shares_become_steps_at_any_length_and_the_last_validation_is_in_the_last_stage(track, steps):
    config = Config(**preset({"track": track}) | {"steps": steps})
    stages = [stage_at(config, step) for step in range(steps)]
    assert stages == sorted(stages)
    assert stage_at(config, steps) == stages[-1]
    for index, stage in enumerate(STAGES[config.stages]):
        assert abs(stages.count(index) - stage.share * steps) <= 1


@pytest.mark.parametrize("name", STAGES)
def test_the_shares_of_a_table_add_up_to_one_and_only_the_last_stages_are_an_extension(name):
    assert sum(stage.share for stage in STAGES[name]) == pytest.approx(1, abs=1e-12)
    extension = [stage.extension for stage in STAGES[name]]
    assert extension == sorted(extension)


@pytest.mark.parametrize(
    ("step", "multiplier"),
    [
        (0, 1),
        (1122, 1),  # 1122 / 2245 < 0.5
        (1123, 2 * 1122 / 2245 + 0.1 * (1 - 2 * 1122 / 2245)),
        (2244, 2 / 2245 + 0.1 * (1 - 2 / 2245)),
        (2245, 0.0002 + 0.1 * 0.9998),
        (2284, 0.0002 + 0.1 * 0.9998),
    ],
)
def test_the_learning_rate_falls_linearly_over_the_second_half_to_a_tenth(step, multiplier):
    assert learning_rate(SHORT, step) == pytest.approx(multiplier, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "value"),
    [(0, 0.85), (150, 0.9), (299, 0.85 + 0.1 * 299 / 300), (300, 0.95), (1000, 0.95), (2235, 0.95), (2236, 0.948),
     (2260, 0.9), (2284, 0.852)],
)  # fmt: skip
def test_momentum_rises_over_300_steps_and_falls_over_the_last_50(step, value):
    assert momentum(SHORT, step) == pytest.approx(value, rel=1e-12)


def test_warmup_raises_the_learning_rate_linearly_from_above_zero():
    config = Config(**preset({"track": "short"}) | {"warmup": 4})
    assert [learning_rate(config, step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


def test_the_steps_track_decays_to_zero_over_its_last_70_percent_with_a_constant_momentum_and_no_window():
    config = Config(**preset({"track": "steps"}))
    assert learning_rate(config, 974) == 1
    assert learning_rate(config, 3250 - 455) == pytest.approx(0.2)
    assert learning_rate(config, 3249) == pytest.approx(1 / 3250 / 0.7)
    assert {momentum(config, step) for step in range(config.steps)} == {0.95}
    assert windows_at(config, 3) == {"short": 1024, "long": 1024}


@settings(max_examples=40)
@given(
    steps=st.integers(1, 300),
    cooldown=st.floats(0, 1),
    final_lr=st.floats(0, 1),
    warmup=st.integers(0, 10),
)
def test_the_learning_rate_never_rises_after_warmup_and_stays_above_its_end(
    steps, cooldown, final_lr, warmup
):
    values = {"steps": steps, "cooldown": cooldown, "final_lr": final_lr}
    config = Config(**preset({"track": "short"}) | values | {"warmup": warmup})
    rates = [learning_rate(config, step) for step in range(config.steps)]
    after = rates[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
    assert all(final_lr - 1e-12 <= rate <= 1 + 1e-12 for rate in after)
    assert all(0 < rate <= 1 for rate in rates[:warmup])


# ----
# Rotary tables


def test_half_of_the_frequencies_fall_from_1_to_a_1024th_and_the_other_half_is_0():
    frequency, scale = rotary_at(SHORT, 0)
    expected = [1024 ** -(j / 31) for j in range(32)]
    torch.testing.assert_close(frequency[:32], torch.tensor(expected), rtol=1e-5, atol=0)
    assert frequency[32:].tolist() == [0.0] * 32
    assert scale.item() == pytest.approx(0.1)


def test_growing_windows_give_the_frequencies_of_yarn_and_the_published_scales():
    frequencies, factor = [1024 ** -(j / 31) for j in range(32)], 0.1
    published = {1: (3, 7, 0.11695), 2: (7, 11, 0.12752), 3: (11, 13, 0.13178)}
    for stage, (old, new, rounded) in published.items():
        for j, f in enumerate(frequencies):
            rotations = 128 * old * f / (2 * math.pi)
            kept = min(max((rotations - 1) / (32 - 1), 0), 1)
            frequencies[j] = f * (old / new + kept * (1 - old / new))
        factor *= 1 + 0.2 * math.log(new / old)
        frequency, scale = rotary_at(SHORT, first_step(SHORT, stage))
        expected = torch.tensor(frequencies + [0.0] * 32)
        torch.testing.assert_close(frequency, expected, rtol=1e-5, atol=0)
        assert scale.item() == pytest.approx(factor, rel=1e-6)
        assert round(scale.item(), 5) == rounded


def test_without_windows_the_rotary_tables_stay_as_they_are():
    config = Config(**preset({"track": "short"}) | {"window_block": 0})
    for first, last in zip(rotary_at(config, 0), rotary_at(config, config.steps), strict=True):
        assert torch.equal(first, last)


def test_rotated_products_depend_only_on_the_distance_of_their_tokens():
    config = Config(**preset({"track": "short"}) | TINY_SHAPE | {"dim": 16, "head_dim": 16})
    model = GPT(config, torch.float32, CPU, PortableAttention())
    model.set_rotary(*rotary_at(config, 0))
    q, k = torch.randn(2, 16)
    tables = (model.cos, model.sin)
    q_THD, k_THD = (rotate(x.expand(1, 32, 1, 16), *tables)[0, :, 0] for x in (q, k))
    products = q_THD @ k_THD.T
    for distance in (0, 1, 7, 20):
        same = products.diagonal(-distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=0, atol=1e-4)
    torch.testing.assert_close(q_THD[0], q)
    assert products.diagonal(-1)[0] != products.diagonal(-7)[0]


# ----
# What a step does to each kind of parameter

TINY_SHAPE = {
    "dim": 24, "head_dim": 8, "vocab_size": 100, "bos": 99, "sequence": 32, "batch_tokens": 64, "micro_batch": 64,
    "val_sequence": 32, "val_tokens": 32, "val_batch": 32,
}  # fmt: skip


def optimized(track, **changes):
    """A trainer without data: a small fp32 model with unit weights, its optimizers at step 0."""
    trainer = object.__new__(Trainer)
    trainer.config = Config(**preset({"track": track}) | TINY_SHAPE | changes)
    trainer.model = GPT(trainer.config, torch.float32, CPU, PortableAttention())
    found = make_optimizers(trainer.config, trainer.model, Machine(CPU, 0, 1))
    trainer.optimizers, trainer.guard = found
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(1)
    set_schedule(trainer.config, trainer.optimizers, 0)
    return trainer


def value_of(table, name):
    """The value of the only pattern that the name matches."""
    (value,) = (value for pattern, value in table.items() if fnmatchcase(name, pattern))
    return value


PEAK = {
    "short": {
        "embed": 0.6, "value_embeds.*": 0.6, "lm_head": 0.008, "scalars": 0.04, "*qkvo": 0.03, "*up": 0.06,
        "*down": 0.03, "*gate": 0.03,
    },
    # A step of a (4C, C) matrix has spectral norm lr * sqrt(4): here that is the factor of the transposed storage.
    "steps": {
        "embed": 0.7, "lm_head": 0.004, "*bias": 0.015, "*gain": 0.015, "*qkvo": 0.025, "*up": 0.05, "*down": 0.025,
    },
}  # fmt: skip
DECAY = {
    "short": {"*": 0.0},
    "steps": {
        "embed": 0.7 * 0.001, "lm_head": 0.004 * 0.001, "*bias": 0.015 * 0.001, "*gain": 0.015 * 0.001,
        "*qkvo": 0.025 * 0.05, "*up": 0.025 * 0.05, "*down": 0.025 * 0.05,
    },
}  # fmt: skip


@pytest.mark.parametrize("track", PEAK)
def test_the_first_step_has_the_published_size_for_every_parameter(track):
    """Adam's first step is its learning rate; a matrix's is lr times a matrix of singular values near 1."""
    run = optimized(track, adam_wd=0.0, matrix_wd=0.0)
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.ndim < 2 else torch.randn_like(parameter)
    for optimizer in run.optimizers.values():
        optimizer.step()
    for name, parameter in run.model.named_parameters():
        change, peak = parameter.detach() - 1, value_of(PEAK[track], name)
        if name.endswith("qkvo"):
            change = change.reshape(4, 24, 24)
        if name.endswith(("qkvo", "up", "down", "gate")):
            size = torch.linalg.matrix_norm(change).square().mean().div(min(change.shape[-2:])).sqrt().item()
        else:
            size = change.abs().max().item()
        assert size == pytest.approx(peak, rel=0.15), name


@pytest.mark.parametrize("track", DECAY)
def test_weight_decay_shrinks_every_parameter_by_its_own_learning_rate_times_the_decay(track):
    run = optimized(track)
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # no step but the decay
    for optimizer in run.optimizers.values():
        optimizer.step()
    for name, parameter in run.model.named_parameters():
        decay = value_of(DECAY[track], name)
        torch.testing.assert_close(1 - parameter.detach(), torch.full_like(parameter, decay), rtol=0, atol=1.2e-7)


def test_adam_steps_on_odd_steps_only_and_takes_the_gradients_of_two():
    run = optimized("short")
    matrix = run.model.blocks[0].mlp.up
    state = run.optimizers["adam"].state[run.model.embed]
    rows, beta1 = 2, 0.65
    for step in range(4):
        before = run.model.embed.detach().clone(), matrix.detach().clone()
        for parameter in run.model.parameters():
            grad = torch.full_like(parameter, step + 1.0)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        run.update(step, torch.tensor(1.0))
        assert torch.equal(run.model.embed, before[0]) == (step % 2 == 0)
        assert not torch.equal(matrix, before[1])
        assert matrix.grad is None, "a hidden matrix sees the gradients of one step"
        assert (run.model.embed.grad is None) == (step % 2 == 1)
        if step == 1:
            expected = (1 - beta1) * (1 + 2) / rows
            torch.testing.assert_close(state["exp_avg"], torch.full_like(state["exp_avg"], expected))
    assert int(state["step"]) == 2


@pytest.mark.parametrize("step", [0, 150, 2000, 2260])
def test_the_schedule_reaches_every_group(step):
    run = optimized("short")
    set_schedule(run.config, run.optimizers, step)
    for name, peak in (("matrix", 0.03), ("adam", 0.008)):
        rates = {group["lr"] for group in run.optimizers[name].param_groups}
        assert rates == {peak * learning_rate(SHORT, step)}
    assert {group["momentum"] for group in run.optimizers["matrix"].param_groups} == {momentum(SHORT, step)}


def test_gradients_are_divided_once_by_the_rows_of_the_batch_at_any_number_of_micro_batches():
    for micro_batch in (32, 64):
        optimizers = optimized("short", micro_batch=micro_batch).optimizers
        assert {optimizer.grad_divisor for optimizer in optimizers.values()} == {2}


def test_the_steps_track_validates_every_125_steps_and_every_25_in_the_last_tenth():
    config = Config(**preset({"track": "steps"}))
    validated = [step for step in range(config.steps) if validates(config, step)]
    assert validated == [*range(0, 2925, 125), *range(2925, 3250, 25)]


def test_no_validation_before_the_end_where_the_interval_is_zero():
    config = Config(**preset({"track": "tiny"}) | {"val_every": 0})
    assert not any(validates(config, step) for step in range(config.steps))
