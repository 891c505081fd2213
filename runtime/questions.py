"""Questions to a model: did it give each token its loss before it saw that token?

The trainer asks them after its last validation, and the judge of a rerun asks them of the model
that was kept. They need two functions, one that scores and one that gives logits, and no torch.
They are about the sequences of the last validation, whole and cut off. Which ones, and where, is
drawn from a seed that nobody knows before the training has ended.

What they cannot find: losses that are wrong in fewer than one of some thousand places; a model that
recognizes the questions, or a source that changes this file; validation text in the weights; and a
model that gives no probability to some tokens before it sees them, which its validation loss pays.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# What an honest model has at most. Answers are compared with answers of the same shape, in which
# rounding is the same, in bf16 too: `small` has 1 + 1e-8, 0 and 0. Only `additive` compares a
# validation, which may be compiled, with other shapes: 2e-5 in bf16 on a GPU, 2e-9 on a CPU.
BOUNDS = {"normalized": 1 + 1e-4, "causality_trained": 1e-3, "additive": 3e-4, "memory": 1e-3}
GROUPS = 6  # of prefixes of one length: the first of whole sequences, the others of any length
SHORTEST = 8  # tokens of a prefix
TOKENS = 4096  # of the prefixes of a group; one prefix may have more
MOST_PREFIXES = 64  # in a group
MOST_LOGITS = 2**24  # at once: 64 MB

Tokens = NDArray[np.int64]
Losses = NDArray[np.float32]


class Model(NamedTuple):
    """What can be asked of a trained model, with the windows of its last validation."""

    losses: Callable[[Tokens, Tokens], Losses]  # of inputs and targets, each (B, T), in nats
    logits: Callable[[Tokens, int], NDArray]  # after the last `count` inputs: (B, count, V)
    bos: int  # begins a document
    vocab_size: int


def ask(
    model: Model, sequences: Sequence[Tokens], validated: Sequence[Losses],
    seed: int | Sequence[int],
) -> dict[str, float]:  # fmt: skip
    """Ask about prefixes of many lengths. Returns for each name in BOUNDS the number found.

    sequences: those of the last validation, each (T + 1,). validated: the losses that it gave their
    targets, or only their last ones.

    normalized: the probability that a loss claims, as a multiple of the one that the logits give
    when those of all tokens add up to 1; the mean over places. causality_trained: the largest
    change of a loss in nats if later inputs are others. additive: the relative difference of the
    losses of validation and those of the same targets in prefixes. memory: the largest change in
    nats of the losses of a new text, from before all questions to after them.
    """
    random = np.random.default_rng(seed)
    new_text = random.permutation(sequences[int(random.integers(len(sequences)))])[None]
    unknown = model.losses(new_text[:, :-1], new_text[:, 1:])
    ratios, changes = [], []
    before = after = 0.0
    for chosen, length in draw_prefixes(sequences, random):
        rows = np.stack([sequences[each][: length + 1] for each in chosen])
        inputs, targets = rows[:, :-1], rows[:, 1:]
        losses = model.losses(inputs, targets)
        ratios.append(claimed_over_given(model, inputs, targets, losses))
        changes.append(change_by_future(model, inputs, targets, losses, random))
        for each, found in zip(chosen, losses, strict=True):
            unscored = len(sequences[each]) - 1 - len(validated[each])
            before += validated[each][: max(length - unscored, 0)].sum(dtype=np.float64)
            after += found[unscored:].sum(dtype=np.float64)
    known = model.losses(new_text[:, :-1], new_text[:, 1:])
    return {
        "normalized": float(np.concatenate(ratios).mean()),
        "causality_trained": float(np.max(changes)),
        "additive": float(abs(after / before - 1)),
        "memory": float(abs(known - unknown).max()),
    }


def draw_prefixes(
    sequences: Sequence[Tokens], random: np.random.Generator
) -> Iterator[tuple[list[int], int]]:
    """Yield indices of sequences, and the length of a prefix of each: most often a short one."""
    lengths = np.array([len(tokens) - 1 for tokens in sequences])
    for group in range(GROUPS):
        longest = int(random.choice(lengths))
        length = longest
        if group > 0:
            lowest, highest = np.log(min(SHORTEST, longest)), np.log(longest)
            length = round(np.exp(random.uniform(lowest, highest)))
        enough = np.flatnonzero(lengths >= length)
        count = min(max(TOKENS // length, 1), MOST_PREFIXES, len(enough))
        yield random.choice(enough, count, replace=False).tolist(), length


def claimed_over_given(
    model: Model, inputs: Tokens, targets: Tokens, losses: Losses
) -> NDArray[np.float64]:
    """exp(-loss) over the softmax of the logits, at as many last places as there is memory for."""
    count = min(max(MOST_LOGITS // (len(inputs) * model.vocab_size), 1), inputs.shape[1])
    logits = model.logits(inputs, count)
    logits = logits - logits.max(-1, keepdims=True)
    total = np.exp(logits).sum(-1, dtype=np.float64)
    of_target = np.take_along_axis(logits, targets[:, -count:, None], -1)[..., 0]
    return np.exp(np.log(total) - of_target - losses[:, -count:]).ravel()


def change_by_future(
    model: Model, inputs: Tokens, targets: Tokens, losses: Losses, random: np.random.Generator
) -> float:
    """The largest change of a loss before a cut when other inputs follow it, in nats.

    The cut is anywhere, or where a document ends, and the same in all prefixes, as an attention
    kernel may round by where documents begin in any of them. In the other future the document goes
    on, or one begins at the cut: where a document ends is a part of the future too.
    """
    places = np.arange(inputs.shape[1])
    ends = np.flatnonzero(inputs[0, 1:] == model.bos) + 1
    at_an_end = len(ends) > 0 and random.random() < 0.5
    cut = random.choice(ends if at_an_end else places[1:])
    future = random.integers(model.vocab_size - 1, size=inputs.shape)
    future += future >= model.bos  # any token but bos
    future[random.random(len(inputs)) < 0.5, cut] = model.bos
    found = model.losses(np.where(places < cut, inputs, future), targets)
    return float(abs(found - losses)[:, :cut].max())
