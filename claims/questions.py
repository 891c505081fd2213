"""The judge's own checks of a trained model, through `token_losses` of the record's source.

The source answers in a process of its own and sees only tokens; sums and comparisons are made here.
So a source that lies in its own checks, or in its validation, is found out.
"""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import Refused

TOKENS_AT_ONCE = 16_384  # as `tiny` validates: the source gets several rows in one batch
STARTS = ((8, 32), (64, 160))  # tokens before the one that is each of the vocabulary in turn
DOCUMENT, DOCUMENTS = 64, 64  # tokens and number of documents that are scored alone
HEADER_BYTES = 1024  # of a shard, before its tokens
ANSWER = """
import os, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what the source prints must not mix with its answers
import numpy, torch
if os.path.exists("inference/model.py"):
    from inference.model import load_model, token_losses
else:  # older sources
    from train_gpt import load_model, token_losses
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
Losses = Callable[[Rows], NDArray[np.float64]]  # (B, T)


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
def answering(scratch: Path, model: Path, timeout_s: float) -> Iterator[Losses]:
    """A function that asks the source in `scratch` for losses. Refused if no answer comes."""
    words = [sys.executable, "-c", ANSWER, str(model), str(TOKENS_AT_ONCE)]
    pipe, said = subprocess.PIPE, scratch / "answering.txt"
    try:
        with (
            open(said, "wb") as errors,
            subprocess.Popen(words, cwd=scratch, stdin=pipe, stdout=pipe, stderr=errors) as child,
        ):
            questions, answers = child.stdin, child.stdout
            assert questions is not None
            assert answers is not None
            timer = threading.Timer(timeout_s, child.kill)
            timer.start()

            def losses(rows: Rows) -> NDArray[np.float64]:
                B, T = rows.shape[0], rows.shape[1] - 1
                questions.write(f"{B} {T}\n".encode() + rows.tobytes())
                questions.flush()
                answer = answers.read(4 * B * T)
                if len(answer) < 4 * B * T:
                    raise BrokenPipeError("it ended without an answer")
                return np.frombuffer(answer, np.float32).reshape(B, T).astype(np.float64)

            try:
                yield losses
            finally:
                timer.cancel()
                child.kill()
    except OSError as error:
        why = said.read_text(errors="replace").strip()[-300:] or error
        raise Refused(f"the source does not score its own model within --timeout {timeout_s:g}: "
                      f"{why}") from None  # fmt: skip


def check_model(
    losses: Losses, rows: Rows, config: dict[str, Any], val_loss: float | None
) -> Iterator[Finding]:
    """The three checks. val_loss: that of the last validation; None: the model is of before."""
    random = np.random.default_rng()  # without a seed: no source knows what will be asked
    scored = losses(rows)
    for low, high in STARTS:
        row, length = int(random.integers(len(rows))), int(random.integers(low, high))
        yield from check_normalisation(losses, rows[row], scored[row], length, config["vocab_size"])
    yield from check_causality(losses, rows, config, random)
    if config["document_mask"]:
        yield from check_documents(losses, rows, scored, config["bos"], random)
    if val_loss is not None:
        what = f"completeness: mean of {scored.size:,} targets, less the logged one"
        yield Finding(what, abs(scored.mean() - val_loss), 1e-3)


def check_normalisation(
    losses: Losses, row: NDArray, scored: NDArray, length: int, vocab_size: int
) -> Iterator[Finding]:
    """All tokens that may follow the start of a row; and its own tokens score as in the row."""
    asked = np.repeat(row[None, : length + 2], vocab_size, axis=0)  # the next one is an input too
    asked[:, length] = np.arange(vocab_size)
    answer, where = losses(asked)[:, :length], f"after {length} tokens"
    missing = abs(1 - np.exp(-answer[:, -1]).sum())
    # Untrained heads give the outputs beyond the vocabulary a share: 0.001 of GPT-2's 50,304.
    yield Finding("normalisation: 1 less the sum of exp(-loss)", missing, 0.002, where)
    alone = relative(answer[row[length]], scored[:length])
    yield Finding("additivity: the start of a row alone", alone, 1e-3, where)


def check_causality(
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
    yield Finding("causality: loss when later tokens change", difference, 1e-3, f"cut at {cut}")
    alone = relative(losses(plain[:1]), before[:1])
    yield Finding("additivity: a row alone and in a batch", alone, 1e-3)


def check_documents(
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
        what = f"additivity: {len(found)} documents alone and in their rows"
        # The smear gate, and rotary tables in bf16, tell a document where it stands: 0.001.
        yield Finding(what, relative(losses(documents), inside), 0.01)


def relative(part: NDArray, inside: NDArray) -> float:
    """The difference of two sums of the same losses, as a share of the second."""
    return abs(part.sum() / inside.sum() - 1)


def validation_rows(folder: Path, tokens: int, sequence: int) -> Rows:
    """The validation rows, read without the source. Refused if there are too few tokens."""
    parts = [np.empty(0, "<u2")]
    for path in sorted(folder.glob("*val_*.bin")):
        parts.append(np.fromfile(path, "<u2", count=tokens + 1, offset=HEADER_BYTES))
    stream = np.concatenate(parts)[: tokens + 1].astype(np.int64)
    if len(stream) <= tokens:
        raise Refused(f"{folder} holds {len(stream)} validation tokens, not {tokens + 1}")
    return np.lib.stride_tricks.sliding_window_view(stream, sequence + 1)[::sequence]
