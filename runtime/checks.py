"""The trainer's checks of its own model: with random weights before training, and after it.

runtime/questions.py has the questions; here torch answers them.
"""

import math
import secrets

import numpy as np
import torch
from torch import Tensor

from runtime.questions import BOUNDS, Losses, Model, Tokens, ask, change_by_future
from runtime.trainer import Trainer

CUTS = 3  # that the check before training tries


def answering(trainer: Trainer) -> Model:
    """The trainer's model, not compiled, at its last step. Call it without gradients."""
    model, device, config = trainer.model, trainer.machine.device, trainer.config
    model.set_step(config.steps)

    def on_device(tokens: Tokens) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(tokens)).to(device)

    def losses(inputs: Tokens, targets: Tokens) -> Losses:
        found = model.token_losses(on_device(inputs).int(), on_device(targets))
        return found.float().cpu().numpy()

    def logits(inputs: Tokens, count: int) -> Losses:
        return model.logits(on_device(inputs).int(), count).float().cpu().numpy()

    return Model(losses, logits, config.bos, config.vocab_size)


@torch.no_grad()
def sees_no_future(trainer: Trainer) -> bool:
    """Whether the losses of a training sequence stay when what follows them is another text.

    The weights are random, and none is zero, which would hide a leak. Where a kernel adds in any
    order, two equal calls differ; twice that much may be noise, as the largest difference varies.
    """
    config, machine = trainer.config, trainer.machine
    trainer.data.train.reset()  # the run may have one step only
    batch = next(trainer.data.train)[0]
    length = min(config.seq_len, config.val_seq_len)
    inputs, targets = (each[:1, :length].long().numpy() for each in (batch.inputs, batch.targets))
    model = answering(trainer)
    trainer.model.initialize(config.seed)
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.add_(0.1 * noise)
    first, second = (model.losses(inputs, targets) for _ in range(2))
    differ = float(abs(first - second).max())
    trainer.env["noise"] = differ
    if differ > 0:
        machine.say(f"not deterministic: losses of two equal calls differ by {differ:.1g}")
    random = np.random.default_rng()
    changes = [change_by_future(model, inputs, targets, first, random) for _ in range(CUTS)]
    return max(changes) <= 2 * differ


@torch.no_grad()
def check_trained_model(trainer: Trainer, val_loss: float) -> dict[str, object]:
    """Ask the trained model. Returns fields of the log's last event. Collective.

    val_loss: the last one, which must be the mean of `trainer.val_losses`. Each rank asks about
    sequences that it validated; the worst answer counts.
    """
    machine, sequences, validated = trainer.machine, [], []
    for batch, losses in zip(trainer.data.validation, trainer.val_losses, strict=True):
        for inputs, targets in zip(batch.inputs.numpy(), batch.targets.numpy(), strict=True):
            sequences.append(np.append(inputs, targets[-1]).astype(np.int64))
        validated += [*losses.float().cpu().view(batch.targets.shape).numpy()]
    seed = machine.on_main(lambda: secrets.randbits(32))
    found = {}
    if sequences:  # else the rank has none
        found = ask(answering(trainer), sequences, validated, [seed, machine.rank])
    total = float(sum(each.sum(dtype=np.float64) for each in validated))
    ranks = machine.gather((found, total, sum(map(len, validated))))
    mean = sum(total for _, total, _ in ranks) / sum(count for *_, count in ranks)
    worst = {}
    for name in BOUNDS:
        answers = [answer[name] for answer, *_ in ranks if answer]
        answers += [abs(mean / val_loss - 1)] if name == "additive" else []
        worst[name] = max(answers, key=lambda answer: (math.isnan(answer), answer))
    return {
        "targets_scored": trainer.targets_scored, "train_tokens_sha256": trainer.trained_rows(),
        "checks": worst, "checks_seed": seed,
    }  # fmt: skip
