"""The judge asks a trained model the questions of runtime/questions.py, and what its log says.

They go to the record's source in a process of its own. B rows, T tokens.
"""

import contextlib
import math
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import Refused
from runtime.questions import BOUNDS, Model, ask

LONGEST_END_S = 60  # a run that is stopped writes a checkpoint
TOKENS_AT_ONCE = 16_384  # the source gets several rows in one batch
SAME = 1e-3  # nats; difference of two means of the same losses
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
from inference.model import load_model
model = load_model(Path(sys.argv[1])).gpt
for line in sys.stdin.buffer:
    B, T, count = map(int, line.split())  # count: of logits; 0 asks for losses
    read = [numpy.frombuffer(sys.stdin.buffer.read(8 * B * T), "int64").copy() for _ in range(2)]
    inputs, targets = (torch.from_numpy(each).view(B, T) for each in read)
    with torch.no_grad():
        if count:
            found = model.logits(inputs.int(), count)
        else:
            found = model.token_losses(inputs.int(), targets)
    answers.write(found.float().cpu().contiguous().numpy().tobytes())
    answers.flush()
"""

# A source must not read settings that no hash covers: what a stored source inherits is this.
INHERITED = re.compile(
    r"PATH|HOME|USER|TMPDIR|LD_LIBRARY_PATH|LANG|LC_\w+|SYSTEMROOT|TORCHINDUCTOR_CACHE_DIR"
    r"|TRITON_CACHE_DIR|(CUDA|NVIDIA|NCCL|OMP|GOMP|KMP|MKL)_\w+"
)

Rows = NDArray[np.int64]  # (B, T + 1)


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


def inherited() -> dict[str, str]:
    """The environment of a stored source: what Python, torch and the device need."""
    return {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}


@contextlib.contextmanager
def answering(scratch: Path, kept: Path, config: dict[str, Any]) -> Iterator[Model]:
    """The model `kept` as the source in `scratch` runs it. Refused if no answer comes."""
    words = [sys.executable, "-c", ANSWER, str(kept)]
    pipe, said = subprocess.PIPE, scratch / "answering.txt"
    vocab_size = config["vocab_size"]
    try:
        with (
            open(said, "wb") as errors,
            child_process(words, cwd=scratch, env=inherited(), stdin=pipe, stdout=pipe,
                          stderr=errors) as child,
        ):  # fmt: skip
            losses, logits = partial(answer, child, 0, 1), partial(answer_logits, child, vocab_size)
            yield Model(losses, logits, config["bos"], vocab_size)
    except OSError as error:
        why = said.read_text(errors="replace").strip()[-300:] or error
        raise Refused(f"the source does not score its own model: {why}") from None


def answer(child: Any, count: int, size: int, inputs: Rows, targets: Rows) -> NDArray[np.float32]:
    """`size` numbers for each target, or for each of the last `count` inputs. BrokenPipeError."""
    B, T = inputs.shape
    child.stdin.write(f"{B} {T} {count}\n".encode())
    child.stdin.write(inputs.astype(np.int64).tobytes() + targets.astype(np.int64).tobytes())
    child.stdin.flush()
    length = 4 * B * (count or T) * size
    found = child.stdout.read(length)
    if len(found) < length:
        raise BrokenPipeError("it ended without an answer")
    return np.frombuffer(found, np.float32).reshape(B, -1)


def answer_logits(child: Any, vocab_size: int, inputs: Rows, count: int) -> NDArray[np.float32]:
    found = answer(child, count, vocab_size, inputs, inputs)
    return found.reshape(len(inputs), count, vocab_size)


def ask_model(
    model: Model, rows: Rows, config: dict[str, Any], val_loss: float, on_new: dict[str, float]
) -> Iterator[Finding]:
    """All questions. val_loss, and on_new by measure: the logged means over the validation rows."""
    T = rows.shape[1] - 1
    count = max(1, TOKENS_AT_ONCE // T)
    batches = [rows[first : first + count] for first in range(0, len(rows), count)]
    scored = np.concatenate([model.losses(each[:, :-1], each[:, 1:]) for each in batches])
    off = abs(scored.mean(dtype=np.float64) - val_loss)
    yield Finding(f"mean of {scored.size:,} targets, less the logged one", off, SAME)
    for measure, logged in on_new.items():
        count, reach = MEASURED[measure]
        new = new_targets(rows, config["bos"], reach).ravel()[:count]
        off = abs(scored.ravel()[:count][new].mean(dtype=np.float64) - logged)
        yield Finding(f"{measure}: mean of {new.sum():,} targets, less the logged one", off, SAME)
    # Without a seed that is logged: no source knows what will be asked.
    for name, found in ask(model, [*rows], [*scored], secrets.randbits(32)).items():
        yield Finding(f"{name}: see runtime/questions.py", found, BOUNDS[name])


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
