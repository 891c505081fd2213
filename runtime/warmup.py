"""Off the clock: warm-up, in which every graph is compiled and run once, and checks of the model.

Also the choice whether to compile, and the dry run. `trainer` is that of train_gpt.py.
"""

import math
import os
import sys
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from runtime.clock import Clock
from runtime.errors import Refused
from runtime.machine import first_line, out_of_memory, peak_mib

TIMED_STEPS = 40  # in all stages, to know how long a run takes

# ---- torch.compile

# One graph a shape: validation rows come in many parts.
MOST_GRAPHS = 1024


def compile_loss(trainer: Any) -> str | None:
    """Set `trainer.loss` to the compiled model and run it. Return what prevents that, or None.

    Out of memory is raised as it is.
    """
    mode = trainer.config.compile
    if mode == "off":
        return "--compile off"
    if mode == "auto" and trainer.machine.device.type != "cuda":
        return "it takes a minute or more here; --compile on forces it"
    trainer.machine.say("compiling: a minute or more the first time, then cached")
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = MOST_GRAPHS
    try:
        trainer.loss = torch.compile(trainer.model, dynamic=False, fullgraph=True)
        try_largest_micro_batch(trainer)
    except Exception as error:  # whatever a compiler raises, the eager model can still run
        if out_of_memory(error):
            raise
        cause = getattr(error, "inner_exception", error)  # what torch's own error is about
        return f"compilation failed: {type(cause).__name__}: {first_line(cause)}"
    return None


def compile_flags() -> list[str]:
    """Return the compiler settings that code or environment changed. Imports nothing.

    The log records them, because the contest's tracks allow none.
    """
    flags = [f"{name}={value}" for name, value in sorted(os.environ.items())
             if name.startswith("TORCHINDUCTOR_") and "CACHE" not in name]  # fmt: skip
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None:
        # `codegen_config()` would list defaults too: compiling writes some of them.
        flags += [f"torch._inductor.config.{name} = {value!r}"
                  for name, value in config.get_config_copy().items()
                  if value != config._config[name].default]  # fmt: skip
    return flags


# ---- Warm-up


def warm_up(trainer: Any, clock: Clock) -> None:
    """Run every kind of step and validation, check causality, then restore and compare state."""
    config, machine = trainer.config, trainer.machine
    before, random = trainer.state_dict(), torch.get_rng_state()
    with clock.phase("compile", timed=False):
        obstacle = compile_loss(trainer)
        if obstacle is not None:
            if config.compile == "on":
                raise Refused(f"--compile on: {obstacle}. Fix that, or use --compile auto.")
            machine.say(f"not compiled: {obstacle}")
            trainer.loss = trainer.model
            try_largest_micro_batch(trainer)
        trainer.env |= {"compiled": obstacle is None, "compile_flags": compile_flags()}
    with clock.phase("warmup", timed=False):
        rehearse(trainer)
        causal = sees_no_future(trainer)
        trainer.reset(config.seed)
        after = trainer.state_dict()
        same = same_bits(before, after) and torch.equal(random, torch.get_rng_state())
        causal, restored = all(machine.gather(causal)), all(machine.gather(same))
    trainer.checks |= {"causality": causal, "warmup_restored": restored}
    if not (causal and restored):
        raise RuntimeError(f"the run would not be what its log says: {trainer.checks}")


def try_largest_micro_batch(trainer: Any) -> None:
    """Run what needs most memory in training: the largest micro-batch, with gradients present."""
    train = trainer.data.train
    firsts = [first for first, *_ in trainer.changes]
    step = max(firsts, key=lambda step: (train.shares(step)[1], trainer.data.longest(step)))
    trainer.set_step(step)
    train.reset(step)
    batch = next(train)[0]
    for _ in range(2):
        train_loss, _ = trainer.losses(batch, step)
        train_loss.backward()


def rehearse(trainer: Any) -> None:
    """Take steps of every stage and validate batches of every shape.

    All graphs compile here, and what cannot run fails now. Eager code on a CPU has no graphs, so
    one update of each optimizer and the last validation are enough.
    """
    config = trainer.config
    eager = trainer.machine.device.type == "cpu" and trainer.loss is trainer.model
    # Some gradients are 0 until the head has moved.
    updates = 1 if eager else 2
    take_steps(trainer, 0, min(updates * config.adam_accum_steps, config.steps))
    shapes = {tuple(part.shape for part in batch): batch for batch in trainer.data.validation}
    for first, *_ in trainer.changes[1:] if eager else trainer.changes:
        take_steps(trainer, first, 1)
    for step in (config.steps,) if eager else (0, config.steps):  # the head may be tied at first
        trainer.validate(step, list(shapes.values()))
    if not trainer.val_losses:  # the loss is compiled, and `score` will run the model that is not
        with torch.no_grad():
            for batch in shapes.values():
                trainer.token_losses(batch)


def take_steps(trainer: Any, first: int, count: int) -> None:
    """Take `count` steps in the stage of step `first`, on the first tokens of the run.

    They are those of the loop in train_gpt.py without its log.
    """
    trainer.data.train.reset(first)
    for number in range(count):
        trainer.set_step(first)
        loss = torch.zeros((), device=trainer.machine.device)
        for batch in next(trainer.data.train):
            train_loss, next_token_loss = trainer.losses(batch, first)
            train_loss.backward()
            loss += next_token_loss
        optimizers = trainer.stepping(number)
        trainer.guard.step(trainer.machine.all_reduce(loss), only=optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)


def time_stages(trainer: Any, clock: Clock) -> list[tuple[int, float]]:
    """The steps of each stage, and the milliseconds of one, on the first tokens of the run."""
    config, found = trainer.config, []
    firsts = [first for first, *_ in trainer.changes]
    for first, end in pairwise([*firsts, config.steps]):
        count = math.ceil(TIMED_STEPS * (end - first) / config.steps) + 2
        count = min(count + -count % config.adam_accum_steps, end - first)
        with clock.phase("train", timed=True):
            take_steps(trainer, first, count)
        found.append((end - first, clock.phases[-1].ms / count))
    return found


def dry_run(trainer: Any, clock: Clock) -> None:
    """Time steps of each stage and a validation, and print what a run takes."""
    machine = trainer.machine
    rows = [("set-up, compilation and warm-up", sum(phase.ms for phase in clock.phases))]
    for index, (steps, ms) in enumerate(time_stages(trainer, clock)):
        rows.append((f"stage {index}: {steps:,} steps of {ms:,.1f} ms", steps * ms))
    with clock.phase("validate", timed=False):
        trainer.validate(trainer.config.steps)
    ms, times = clock.phases[-1].ms, len(trainer.validations)
    rows.append((f"{times:,} validations of {ms:,.1f} ms", times * ms))
    rows.append(("total", sum(ms for _, ms in rows)))
    for name, ms in rows:
        machine.say(f"{timedelta(seconds=round(ms / 1000))!s:>8} {name}")
    machine.say(f"peak memory of rank 0, measured: {peak_mib(machine):,.0f} MiB")


# ---- Checks of a model
# In warm-up: it sees no future, and all state was restored bit for bit. After the last validation,
# with trained weights: its losses are those of probabilities, and depend on no later token.


@torch.no_grad()
def sees_no_future(trainer: Any) -> bool:
    """Whether other tokens in the second half of a row leave the stream of the first unchanged.

    Where a kernel adds in any order, two equal calls differ; twice that much may be noise, as the
    largest difference varies a little. Leaves noise on the weights: zeros would hide a leak.
    """
    config, model, device = trainer.config, trainer.model, trainer.machine.device
    length = min(config.seq_len, config.val_seq_len)
    trainer.data.train.reset()  # there may be one step alone
    inputs = next(trainer.data.train)[0].inputs[:1, :length].to(device)
    rows = torch.tensor([0, length], dtype=torch.int32, device=device)
    model.initialize(config.seed)
    model.set_step(config.steps)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.add_(0.1 * noise)
    half = length // 2
    changed, _ = other_futures(inputs, half, config.vocab_size, config.bos)
    streams = [model.hidden(tokens, rows, length)[:, :half]
               for tokens in (inputs, inputs, changed)]  # fmt: skip
    noise, change = ((streams[0] - other).abs().max().item() for other in streams[1:])
    trainer.env["noise"] = noise
    if noise > 0:
        trainer.machine.say(f"not deterministic: two equal calls differ by {noise:.1g}")
    return change <= 2 * noise


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values or nested dicts of values are equal, tensors in every bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return bool(a == b)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    # Compare bytes: NaN then equals itself, and -0 differs from 0.
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def check_rows(model: Any, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Three checks of a model on validation rows; an honest model has 1, 0 and 0.

    normalized: the sum over the vocabulary of exp(-loss) of one next token. causality_trained: the
    largest change of losses in the first half of the rows by other inputs in the second. additive:
    how much the sum over the rows differs from that of their first halves and of each other target.
    """

    def summed(inputs: Tensor, targets: Tensor) -> Tensor:  # not compiled: that would cost more
        return model(inputs, targets, *model.eval_context(inputs))

    each, half = model.token_losses(inputs, targets), targets.size(1) // 2
    cut = inputs.size(1) - targets.size(1) + half  # targets may be those of each row's end alone
    others = other_futures(inputs, cut, model.config.padded_vocab, model.config.bos)
    changes = [(model.token_losses(o, targets) - each)[:, :half].abs().max() for o in others]
    parts = summed(inputs[:, :cut], targets[:, :half]) + each[:, half:].sum()
    return {
        "normalized": probability(model, inputs[:1, :8]),
        "causality_trained": torch.stack(changes).max().item(),
        "additive": (parts / summed(inputs, targets) - 1).abs().item(),
    }


def other_futures(inputs: Tensor, cut: int, vocab_size: int, bos: int) -> tuple[Tensor, Tensor]:
    """The rows with other tokens from `cut` on: one document to the end, and one from `cut` on.

    Where a document ends gives away the future, too.
    """
    other = (inputs[:, cut:] + 1) % vocab_size
    other[other == bos] = (bos + 1) % vocab_size
    same = torch.cat([inputs[:, :cut], other], dim=1)
    new = same.clone()
    new[:, cut] = bos
    return same, new


def probability(model: Any, row: Tensor) -> float:
    """The sum over the vocabulary of exp(-loss) of the token in the middle of a row (1, T).

    It is an input too, which exposes a model that reads one token ahead.
    """
    total, middle = 0.0, row.size(1) // 2
    for tokens in torch.arange(model.config.padded_vocab).split(1024):  # padding has scores too
        rows = row.repeat(len(tokens), 1)
        rows[:, middle] = tokens.to(rows)
        loss = model.token_losses(rows[:, :-1], rows[:, 1:].long())[:, middle - 1]
        total += (-loss.cpu().double()).exp().sum().item()
    return total


@torch.no_grad()
def check_trained_model(trainer: Any) -> dict[str, Any]:
    """Check the trained model, for the log. Collective.

    Each rank checks two rows that it validates, or none if it has none. The worst values count.
    """
    trainer.model.set_step(trainer.config.steps)
    first = [batch.to(trainer.machine.device) for batch in trainer.data.validation[:1]]
    found = [check_rows(trainer.model, each.inputs[:2], each.targets[:2]) for each in first]
    everywhere = [checks for each in trainer.machine.gather(found) for checks in each]
    worst = {}
    for name, honest in {"normalized": 1.0, "causality_trained": 0.0, "additive": 0.0}.items():
        values = [checks[name] for checks in everywhere]
        worst[name] = max(values, key=lambda value: (math.isnan(value), abs(value - honest)))
    return {
        "targets_scored": trainer.targets_scored, "train_tokens_sha256": trainer.trained_rows(),
        "checks": worst,
    }  # fmt: skip
