"""Run a record's source again and compare what comes out with the record's log.

This executes code that others wrote, with the caller's rights.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from claims.logs import find_runs, read_runs
from claims.record import Evidence
from claims.runs import NEW_TOKENS, Run
from claims.stats import moments
from runtime.errors import LogError, Refused
from runtime.source import write_files

LONGEST_END_S = 60  # a run that is stopped writes a checkpoint


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


# ---- Questions to a trained model

TOKENS_AT_ONCE = 16_384  # as `tiny` validates: the source gets several rows in one batch
STARTS = ((8, 32), (64, 160))  # tokens before the one that is each of the vocabulary in turn
DOCUMENT, DOCUMENTS = 64, 64  # tokens and number of documents that are scored alone
HEADER_BYTES = 1024  # of a shard, before its tokens
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
def answering(scratch: Path, model: Path) -> Iterator[Losses]:
    """A function that asks the source in `scratch` for losses. Refused if no answer comes."""
    words = [sys.executable, "-c", ANSWER, str(model), str(TOKENS_AT_ONCE)]
    pipe, said = subprocess.PIPE, scratch / "answering.txt"
    try:
        with (
            open(said, "wb") as errors,
            child_process(words, cwd=scratch, stdin=pipe, stdout=pipe, stderr=errors) as child,
        ):
            yield partial(ask, child)
    except OSError as error:
        why = said.read_text(errors="replace").strip()[-300:] or error
        raise Refused(f"the source does not score its own model: {why}") from None


def ask(child: Any, rows: Rows) -> NDArray[np.float64]:
    """The losses of the rows. BrokenPipeError where the process gives none."""
    B, T = rows.shape[0], rows.shape[1] - 1
    child.stdin.write(f"{B} {T}\n".encode() + rows.tobytes())
    child.stdin.flush()
    answer = child.stdout.read(4 * B * T)
    if len(answer) < 4 * B * T:
        raise BrokenPipeError("it ended without an answer")
    return np.frombuffer(answer, np.float32).reshape(B, T).astype(np.float64)


def check_model(
    losses: Losses, rows: Rows, config: dict[str, Any], val_loss: float | None,
    on_new: dict[str, float] | None = None,
) -> Iterator[Finding]:
    """The judge's checks. val_loss: that of the last validation; None: training stopped early.

    on_new: the logged losses on new tokens by their measure.
    """
    random = np.random.default_rng()  # without a seed: no source knows what will be asked
    scored = losses(rows)
    for low, high in STARTS:
        row, length = int(random.integers(len(rows))), int(random.integers(low, high))
        yield from check_normalisation(losses, rows[row], scored[row], length, config["vocab_size"])
    for _ in range(2):  # a leak may happen to change little at one cut
        yield from check_causality(losses, rows, config, random)
    if config["document_mask"]:
        yield from check_documents(losses, rows, scored, config["bos"], random)
    if val_loss is not None:
        what = f"completeness: mean of {scored.size:,} targets, less the logged one"
        yield Finding(what, abs(scored.mean() - val_loss), 1e-3)
    for measure, logged in (on_new or {}).items():
        count, reach = MEASURED[measure]
        new = new_targets(rows, config["bos"], reach).ravel()[:count]
        mean = scored.ravel()[:count][new].mean()
        what = f"{measure}: mean of {new.sum():,} targets, less the logged one"
        yield Finding(what, abs(mean - logged), 1e-3)


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
        # The smear gate, and rotary tables in bf16, depend on a document's position: 0.001.
        yield Finding(what, relative(losses(documents), inside), 0.01)


def relative(part: NDArray, inside: NDArray) -> float:
    """The difference of two sums of the same losses, as a share of the second."""
    return abs(part.sum() / inside.sum() - 1)


def validation_rows(folder: Path, tokens: int, sequence: int) -> Rows:
    """The validation rows, read without the source. Refused if there are too few tokens."""
    parts = [np.empty(0, "<u2")]
    word = re.compile(r"(?<![a-z])val_")  # as the trainer finds them
    for path in sorted(each for each in folder.glob("*.bin") if word.search(each.name)):
        parts.append(np.fromfile(path, "<u2", count=tokens + 1, offset=HEADER_BYTES))
    stream = np.concatenate(parts)[: tokens + 1].astype(np.int64)
    if len(stream) <= tokens:
        raise Refused(f"{folder} holds {len(stream)} validation tokens, not {tokens + 1}")
    return np.lib.stride_tricks.sliding_window_view(stream, sequence + 1)[::sequence]


# ---- The run again

# Where these agree, a CPU repeats every bit.
MACHINE = ("cpu", "gpu", "gpu_count", "torch", "cuda", "threads", "dtype", "attention", "compiled")
# Losses may differ so much in step 1; on a GPU or in another dtype so much there, and after 30.
FIRST, GPU_FIRST, AFTER_30 = 1e-5, 1e-4, 0.05
SPREADS = 4  # another CPU may differ so many times as much as this one does from itself
DEVIATIONS = 8  # of the last loss. The difference of two runs of ten is larger once in 3,000 times

Allowed = Callable[[int], float]  # difference of losses after this many updates
StepLosses = dict[int, float | None]  # by step


def rerun(
    evidence: Evidence, seed: int | None, steps: int | None, data: Path, scratch: Path
) -> Iterator[Finding]:
    """What the record's run of this seed and the same run made here have in common, or not.

    seed: None for the first run. steps: stop after these; None: run to the end. scratch: an empty
    folder. Refused if the source cannot run here.
    """
    runs = [run for run in evidence.complete if seed in (None, run.seed)]
    if not runs:
        raise Refused(f"no run of seed {seed} counts in {evidence.folder}. Take another seed.")
    before, config = runs[0], evidence.claim.config
    total = len(before.steps)
    steps = min(steps or total, total)
    whole = steps == total
    print(f"running its source: seed {before.seed}, {steps} of {total} steps")
    write_files(evidence.source, scratch)

    def again(*flags: str) -> Run:
        logs = scratch / f"logs{''.join(flags)}"
        train(evidence, before, data, logs, None if whole else steps, flags)
        return read_again(before, logs, steps)

    after = again()
    yield from compare_runs(before, after, steps, allowed_here(before, after, again))
    if whole and evidence.result.sd > 0:
        apart = abs(after.validations[-1].loss - before.validations[-1].loss) / evidence.result.sd
        yield Finding("last loss, in standard deviations of the record's", apart, DEVIATIONS)
    for measure in measures_of(before) if whole else ():
        sd = moments([run.probe(measure) for run in evidence.complete])[1]
        if sd > 0:
            apart = abs(after.probe(measure) - before.probe(measure)) / sd
            yield Finding(f"{measure}, in standard deviations", apart, DEVIATIONS)
    trained = [run.end.get("train_tokens_sha256") for run in (before, after)]
    if whole and trained[0]:
        yield Finding("trained tokens: 1 if their hash is another", int(len(set(trained)) > 1), 0)
    print(f"the judge's checks on {'the trained' if whole else 'an untrained'} model")
    rows = validation_rows(data, config["val_tokens"], config["val_seq_len"])
    with answering(scratch, kept_model(scratch, after)) as losses:
        on_new = {measure: after.probe(measure) for measure in measures_of(before) if whole}
        val_loss = after.final_loss if whole else None
        yield from check_model(losses, rows, config, val_loss, on_new)


def train(
    evidence: Evidence, before: Run, data: Path, logs: Path, steps: int | None, flags: Sequence[str]
) -> None:
    """Run the source, in the folder of `logs`, with these flags more; with `steps`, until its log
    has these.
    """
    claim, ranks, scratch = evidence.claim, before.header["world_size"], logs.parent
    words = ["train_gpt.py", "--track", claim.track, *claim.flags, f"--seed={before.seed}",
             "--trials=1", f"--data-dir={data}", f"--log-dir={logs}",
             f"--checkpoint-dir={scratch / 'checkpoints'}", *flags]  # fmt: skip
    if "keep_model" in claim.config:
        words.append("--keep-model=on")
    if ranks > 1:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *words]
    environment = dict(os.environ)
    if before.env.get("gpu") is None:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # The schedule depends on the number of steps, so the run is stopped, not made shorter.
    last = f'"step": {steps},'.encode()
    with (
        open(scratch / "output.txt", "wb") as output,
        child_process([sys.executable, *words], cwd=scratch, env=environment, stdout=output,
                      stderr=output) as child,
    ):
        while child.poll() is None:
            if any(last in log.read_bytes() for log in logs.glob("2*.jsonl")):
                break
            time.sleep(0.1)


def read_again(before: Run, logs: Path, steps: int) -> Run:
    """The run that was made here. Refused if it broke off or has nothing to compare."""
    output = (logs.parent / "output.txt").read_text(errors="replace").strip()[-300:]
    try:
        after = read_runs(find_runs([logs])[0])[0]
    except (LogError, OSError):
        raise Refused(f"the source does not run here: {output}") from None
    if len(after.steps) < steps or (steps == len(before.steps) and not after.complete):
        raise Refused(f"the source does not run to the end here, but {len(after.steps)} steps: "
                      f"{output}")  # fmt: skip
    was, now = before.header["data"], after.header.get("data")
    if was != now:
        raise Refused(f"nothing to compare: the record used {was}, and the run here {now}")
    return after


def allowed_here(before: Run, after: Run, again: Callable[..., Run]) -> Allowed:
    """How far losses may differ: not at all on a CPU of the same kind.

    again: trains once more, with the flags that it is given.
    """
    found = {name: (before.env.get(name), after.env.get(name)) for name in MACHINE}
    differ = [f"{name} {was}, here {now}" for name, (was, now) in found.items() if was != now]
    told = f"not the same machine ({'; '.join(differ)})" if differ else "the same kind of machine"
    if before.env.get("gpu") is not None or before.env.get("dtype") != after.env.get("dtype"):
        print(f"{told}: losses may be {GPU_FIRST:g} apart in step 1 and {AFTER_30:g} after 30, "
              "growing as a random walk")  # fmt: skip
        return lambda updates: GPU_FIRST + AFTER_30 * math.sqrt(updates / 30)
    if not differ:
        print(f"{told}: losses must agree to the bit")
        return lambda updates: 0.0
    print(f"{told}: training twice more, with one and two rows a micro-step. Losses may be "
          f"{SPREADS} times as far apart as these runs are")
    row = after.header["config"]["seq_len"]
    runs = [after, *(again(f"--micro-batch={rows * row}") for rows in (1, 2))]
    steps = min(len(run.steps) for run in runs)
    losses = np.array([[step.train_loss for step in run.steps[:steps]] for run in runs])
    spread = np.maximum.accumulate(np.ptp(losses, axis=0))  # the largest difference so far
    return lambda updates: max(FIRST, SPREADS * float(spread[min(updates, steps - 1)]))


def compare_runs(before: Run, after: Run, steps: int, allowed: Allowed) -> Iterator[Finding]:
    """Losses of training and validation, each where it is farthest off; and the settings."""
    was = {step.step: step.train_loss for step in before.steps[:steps]}
    now = {step.step: step.train_loss for step in after.steps}
    yield farthest("training losses", was, now, lambda step: allowed(step - 1))
    done = steps if after.complete else steps - 1  # a run that is stopped validates no more
    was = {each.step: each.loss for each in before.validations if each.step <= done}
    now = {each.step: each.loss for each in after.validations}
    if was:
        yield farthest("validation losses", was, now, allowed)
    for measure in measures_of(before) if after.complete else ():
        was, now = {steps: before.probe(measure)}, {steps: after.probe(measure)}
        yield farthest(measure, was, now, allowed)
    other = before.config_sha256 != after.config_sha256
    yield Finding("configuration: 1 if the claim's flags mean another", int(other), 0)


def measures_of(run: Run) -> list[str]:
    """The losses on new tokens to compare, by their names in the log; an older log has none."""
    known = [measure for measure in NEW_TOKENS if math.isfinite(run.probe(measure))]
    return known if NEW_TOKENS[0] in known else []


def farthest(what: str, was: StepLosses, now: StepLosses, allowed: Allowed) -> Finding:
    """The step whose losses are farthest apart, of those beyond their bound if there are any."""
    found = []
    for step, loss in was.items():
        again = now.get(step)
        difference = math.inf if loss is None or again is None else abs(loss - again)
        found.append(Finding(f"{what}, {len(was)}", difference, allowed(step), f"step {step}"))
    return max(found, key=lambda each: (not each.holds, each.found))


def kept_model(scratch: Path, after: Run) -> Path:
    """What the run kept; of a run that was stopped its last checkpoint, made to look like that."""
    folder = scratch / "checkpoints" / after.run_id
    if (folder / "final").is_dir():
        return folder / "final"
    saved = sorted(folder.glob("step_*"))
    if not saved:
        raise Refused("the run left no model to check")
    config = json.dumps({"config": after.header["config"]}).encode()
    sums = json.loads((saved[-1] / "checksums.json").read_bytes())
    sums["config.json"] = hashlib.sha256(config).hexdigest()
    (saved[-1] / "config.json").write_bytes(config)
    (saved[-1] / "checksums.json").write_text(json.dumps(sums))
    return saved[-1]
