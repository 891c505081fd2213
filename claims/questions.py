"""The judge's questions to a trained model: are its losses those of a probability model?

They go to the record's source in a process of its own, through inference/model.py. What is asked is
drawn anew each time, so that no source knows it. B rows, T tokens.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import Refused

LONGEST_END_S = 60  # a run that is stopped writes a checkpoint
TOKENS_AT_ONCE = 16_384  # the source gets several rows in one batch
PROBABILITY = 1e-3  # by which a sum of probabilities may exceed 1; honest models: 6e-7
SAME = 1e-3  # relative difference of two sums of the same losses
PLACED = 0.01  # the same, where the smear gate and bf16 rotary tables see another position
SHORT, SHORT_PLACES, LONG_PLACES = 160, 6, 1  # a long one may take as long as 16 validations
DOCUMENT, DOCUMENTS = 64, 64  # tokens and number of documents that are scored alone
# Of each measure of new tokens: the first tokens that it is of, and how far back a pair counts.
MEASURED: dict[str, tuple[int | None, float]] = {
    "loss_on_new": (None, math.inf), "new_loss": (16_384, 176),
}  # fmt: skip
ANSWER = """
import os, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what the source prints must not mix with its answers
import numpy, torch
from inference.model import load_model, token_losses
model = load_model(Path(sys.argv[1]))
for line in sys.stdin.buffer:
    B, T = map(int, line.split())
    tokens = numpy.frombuffer(sys.stdin.buffer.read(8 * B * (T + 1)), "int64").copy()
    parts = torch.from_numpy(tokens).view(B, T + 1).split(max(1, int(sys.argv[2]) // T))
    losses = torch.cat([token_losses(model, part).float().cpu() for part in parts])
    answers.write(losses.numpy().tobytes())
    answers.flush()
"""

Rows = NDArray[np.int64]  # (B, T + 1)
Losses = Callable[[Rows], NDArray[np.float64]]  # (B, T), nats


class Finding(NamedTuple):
    """A number and how large it may be."""

    what: str
    found: float
    allowed: float
    where: str = ""

    @property
    def holds(self) -> bool:
        return bool(self.found <= self.allowed)  # nan fails


@contextlib.contextmanager
def child_process(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A process that ends with the block. options: those of Popen."""
    # A process group of its own: Ctrl-C reaches it once, from here.
    with subprocess.Popen(words, process_group=0, **options) as child:
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(LONGEST_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)


@contextlib.contextmanager
def answering(scratch: Path, model: Path) -> Iterator[Losses]:
    """A function that asks the source in `scratch` for losses. Refused if no answer comes."""
    words = [sys.executable, "-c", ANSWER, str(model), str(TOKENS_AT_ONCE)]
    pipe, said = subprocess.PIPE, scratch / "answering.txt"
    try:
        with (
            open(said, "wb") as errors,
            child_process(words, cwd=scratch, stdin=pipe, stdout=pipe, stderr=errors) as child,
        ):
            yield partial(answer, child)
    except OSError as error:
        why = said.read_text(errors="replace").strip()[-300:] or error
        raise Refused(f"the source does not score its own model: {why}") from None


def answer(child: Any, rows: Rows) -> NDArray[np.float64]:
    """The losses of the rows. BrokenPipeError where the process gives none."""
    B, T = rows.shape[0], rows.shape[1] - 1
    child.stdin.write(f"{B} {T}\n".encode() + rows.tobytes())
    child.stdin.flush()
    found = child.stdout.read(4 * B * T)
    if len(found) < 4 * B * T:
        raise BrokenPipeError("it ended without an answer")
    return np.frombuffer(found, np.float32).reshape(B, T).astype(np.float64)


def ask_model(
    losses: Losses, rows: Rows, config: dict[str, Any], val_loss: float, on_new: dict[str, float]
) -> Iterator[Finding]:
    """All questions. val_loss, and on_new by measure: the logged means over the validation rows."""
    random = np.random.default_rng()
    scored = losses(rows)
    off = abs(scored.mean() - val_loss)
    yield Finding(f"mean of {scored.size:,} targets, less the logged one", off, SAME)
    for measure, logged in on_new.items():
        count, reach = MEASURED[measure]
        new = new_targets(rows, config["bos"], reach).ravel()[:count]
        off = abs(scored.ravel()[:count][new].mean() - logged)
        yield Finding(f"{measure}: mean of {new.sum():,} targets, less the logged one", off, SAME)
    # A model with a memory gives other losses to what it has seen.
    again = losses(rows[::-1])[::-1]
    off = abs(again.sum(1) / scored.sum(1) - 1).max()
    yield Finding("memory: rows again, in reverse order", off, SAME)
    T = rows.shape[1] - 1
    places = [int(random.integers(1, min(SHORT, T - 1))) for _ in range(SHORT_PLACES)]
    for place in places + [int(random.integers(1, T - 1)) for _ in range(LONG_PLACES)]:
        row = int(random.integers(len(rows)))
        yield from ask_probabilities(losses, rows[row], scored[row], place, config["vocab_size"])
    for _ in range(2):  # a leak may happen to change little at one cut
        yield from ask_causality(losses, rows, config, random)
    if config["document_mask"]:
        yield from ask_documents(losses, rows, scored, config["bos"], random)


def new_targets(rows: Rows, bos: int, reach: float = math.inf) -> NDArray[np.bool_]:
    """Whether each target ends a pair that its document did not have in `reach` tokens, (B, T)."""
    new = []
    for row in rows.tolist():
        seen: dict[tuple[int, int], int] = {}  # where each pair stood last
        for place, pair in enumerate(pairwise(row)):
            if pair[0] == bos:
                seen.clear()
            new.append(pair not in seen or place - seen[pair] > reach)
            seen[pair] = place
    return np.array(new).reshape(len(rows), -1)


def ask_probabilities(
    losses: Losses, row: NDArray, scored: NDArray, place: int, vocab_size: int
) -> Iterator[Finding]:
    """All tokens that may follow the first `place` of a row; and its own token scores as in it.

    Too little probability harms only the model itself: outputs that pad the vocabulary take some.
    """
    asked = np.repeat(row[None, : place + 2], vocab_size, axis=0)  # the next one is an input too
    asked[:, place] = np.arange(vocab_size)
    found, where = losses(asked)[:, :place], f"after {place} tokens"
    more = np.exp(-found[:, -1]).sum() - 1
    yield Finding("probabilities of all next tokens, less 1", more, PROBABILITY, where)
    off = abs(found[row[place]].sum() / scored[:place].sum() - 1)
    yield Finding("losses of the start of a row, alone and in the row", off, PLACED, where)


def ask_causality(
    losses: Losses, rows: Rows, config: dict[str, Any], random: np.random.Generator
) -> Iterator[Finding]:
    """Rows of validation's shape, several at once; in every second a document begins at `cut`."""
    sequence = config["val_seq_len"]
    count = max(2, min(config["val_batch"], TOKENS_AT_ONCE) // sequence)
    plain = rows[random.integers(len(rows), size=count)].copy()
    cut = int(random.integers(sequence // 4, 3 * sequence // 4))
    plain[1::2, cut] = config["bos"]
    changed = plain.copy()
    changed[:, cut + 1 :] = random.integers(config["vocab_size"], size=(count, sequence - cut))
    changed[:, cut + 1] = config["bos"]  # documents end elsewhere too
    before = losses(plain)
    difference = abs(before - losses(changed))[:, :cut].max()
    yield Finding("causality: losses when later tokens change", difference, SAME, f"cut at {cut}")
    alone = abs(losses(plain[:1]).sum() / before[:1].sum() - 1)
    yield Finding("additivity: a row alone and in a batch", alone, SAME)


def ask_documents(
    losses: Losses, rows: Rows, scored: NDArray, bos: int, random: np.random.Generator
) -> Iterator[Finding]:
    """Documents score alone as in their rows, wherever in them. Not for rows of several texts."""
    found: list[tuple[Rows, NDArray]] = []
    for row, at in random.permutation(np.argwhere(rows == bos)):
        document = rows[row, at : at + DOCUMENT + 1]
        if len(document) > DOCUMENT and (document == bos).sum() == 1 and len(found) < DOCUMENTS:
            found.append((document, scored[row, at : at + DOCUMENT]))
    if found:
        documents, inside = map(np.stack, zip(*found, strict=True))
        off = abs(losses(documents).sum() / inside.sum() - 1)
        yield Finding(f"additivity: {len(found)} documents alone and in their rows", off, PLACED)
