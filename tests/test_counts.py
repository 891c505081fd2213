"""The counts of n-grams against a count by hand, and their mixture with the softmax."""

from collections import Counter

import pytest
import torch
from small_model import SEQUENCE, VOCABULARY, keep, make_model, randomize, small

from inference.model import load_model
from kernels.counts import NgramCounts
from train_gpt import rows_to_count, schedule

pytestmark = pytest.mark.core

LONGEST = 4


def drawn(rows, length, vocabulary, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (rows, length), generator=generator)


def by_hand(text, longest):
    """How often each n-gram occurs within a row, by its tokens."""
    found = Counter()
    for row in text.tolist():
        for n in range(2, longest + 1):
            found.update(tuple(row[first : first + n]) for first in range(len(row) - n + 1))
    return found


@pytest.mark.parametrize("vocabulary", [5, 50_257])
def test_frequencies_are_those_of_a_count_by_hand(vocabulary):
    # Of a large vocabulary only these occur, so n-grams repeat.
    few = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(2))[:5]
    text, rows = few[drawn(6, 31, 5)], few[drawn(2, 9, 5, seed=1)]
    counts = NgramCounts(LONGEST, vocabulary, 7, 30)
    counts.text[:6] = text  # the seventh row was not read yet
    counts.count(7)
    frequencies, totals = counts.frequencies(rows, few.expand(2, 9, 5))
    known = by_hand(text, LONGEST)
    for b, row in enumerate(rows.tolist()):
        for t in range(9):
            for n in range(2, LONGEST + 1):
                first = t - (n - 2)  # of the context
                context = tuple(row[first : t + 1]) if first >= 0 else ()
                found = [known[(*context, token)] if context else 0 for token in few.tolist()]
                assert totals[b, t, n - 2] == sum(found)
                wanted = torch.tensor(found) / max(sum(found), 1)
                torch.testing.assert_close(frequencies[b, t, :, n - 2], wanted)


def test_the_last_inputs_have_the_frequencies_that_they_have_among_all():
    counts = NgramCounts(LONGEST, 5, 6, 30)
    counts.text.copy_(drawn(6, 31, 5))
    counts.count(6)
    inputs, tokens = drawn(2, 9, 5, seed=1), drawn(2, 9, 5, seed=2).unsqueeze(-1)
    whole = counts.frequencies(inputs, tokens)
    for part, all_of_it in zip(counts.frequencies(inputs, tokens[:, -3:]), whole, strict=True):
        assert torch.equal(part, all_of_it[:, -3:])


# ---- In the model


def counting(rows=6, **changes):
    """A model with random weights that has read some rows."""
    model = randomize(make_model(small("small", **changes)))
    model.counts.text[:rows] = drawn(rows, SEQUENCE + 1, VOCABULARY, seed=3)
    model.set_step(model.config.steps)
    return model


@torch.no_grad()
def test_the_loss_is_that_of_the_logits_whose_probabilities_add_up_to_one():
    # No token pads this vocabulary: else those have a share too, and no logits.
    model = counting(vocab_size=128, bos=127)
    rows = drawn(2, SEQUENCE + 1, VOCABULARY, seed=4)
    inputs, targets = rows[:, :-1].int(), rows[:, 1:]
    probabilities = model.logits(inputs, SEQUENCE).exp()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, SEQUENCE))
    chosen = probabilities.gather(-1, targets.unsqueeze(-1))[..., 0]
    torch.testing.assert_close(model.token_losses(inputs, targets), -chosen.log())


def test_the_network_learns_as_it_would_without_counts_and_only_the_gate_from_the_mixture():
    model, rows = counting(), drawn(2, SEQUENCE + 1, VOCABULARY, seed=4)
    without = make_model(small("small", counted_ngrams=0))
    without.load_state_dict(model.state_dict(), strict=False)
    without.set_step(without.config.steps)
    starts = torch.tensor([0, SEQUENCE, 2 * SEQUENCE], dtype=torch.int32)
    given = rows[:, :-1].int(), rows[:, 1:], starts, SEQUENCE
    (train_loss, loss), own = model(*given), without(*given)
    torch.testing.assert_close(train_loss, loss + own)
    train_loss.backward()
    own.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert gradients.pop("count_gate").abs().max() > 0
    for name, weight in without.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad)


def test_a_kept_model_gives_the_losses_of_the_trained_one(tmp_path):
    model, rows = counting(), drawn(2, SEQUENCE + 1, VOCABULARY, seed=4)
    loaded = load_model(keep(model, tmp_path), "cpu", torch.float32).gpt
    given = rows[:, :-1].int(), rows[:, 1:]
    torch.testing.assert_close(loaded.token_losses(*given), model.token_losses(*given))


def test_a_step_counts_nine_tenths_of_the_text_before_it_and_the_end_all_of_it():
    config = small("small", steps=40)
    counted, read = rows_to_count(config), 0
    for step, rows in enumerate(counted[:-1]):
        assert read / 1.1 - 1e-9 <= rows <= read, f"step {step}"
        read += schedule(config, step).batch_tokens // config.seq_len
    assert counted[-1] == read
