"""Run two seeds of a record again from its stored source, and ask the trained model.

This executes code that others wrote, with the caller's rights.
"""

import math
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from claims.logs import find_runs, read_runs
from claims.questions import Finding, Rows, answering, ask_model, child_process, inherited
from claims.record import Evidence
from claims.runs import NEW_TOKENS, Run
from claims.stats import moments
from runtime.errors import LogError, Refused
from runtime.source import write_files

SEEDS = 2
DEVIATIONS = 5.0  # standard errors. With ten runs, two honest ones are farther off once in 1,000
HEADER_BYTES = 1024  # of a shard, before its tokens
HELD_OUT = 65_536  # last tokens of a text with a held-out slice


def rerun(evidence: Evidence, data: Path, scratch: Path) -> Iterator[Finding]:
    """How far two runs made here are from the record's, and what the trained model answers.

    The seeds are drawn. scratch: an empty folder. Refused if the source cannot run here.
    """
    runs = evidence.complete
    if len(runs) < SEEDS:
        raise Refused(f"{evidence.folder} has {len(runs)} runs that count; a rerun needs {SEEDS}.")
    config = evidence.claim.config
    write_files(evidence.source, scratch)
    if "train_end" in runs[0].header:  # logs before 2026-11-29 lack it
        held_out = HELD_OUT if math.isfinite(runs[0].probe("loss_held_out")) else 0
        data = hide_unread(data, scratch / "data_seen", runs[0].header["train_end"], held_out,
                           config["bos"])
    drawn = random.SystemRandom().sample(runs, SEEDS)
    made = []
    for run in drawn:
        print(f"running its source: seed {run.seed}, {len(run.steps)} steps", flush=True)
        made.append(train(evidence, run, data, scratch))
    measures = ["loss", *(name for name in NEW_TOKENS if math.isfinite(runs[0].probe(name)))]
    for name in measures:
        yield compare_means(name, [figure(run, name) for run in runs],
                            [figure(run, name) for run in made])  # fmt: skip
    other = any(run.config_sha256 != evidence.claim.config_sha256 for run in made)
    yield Finding("configuration: 1 if the claim's flags mean another", int(other), 0)
    trained = {run.end.get("train_tokens_sha256") for run in [*drawn, *made]}
    yield Finding("trained tokens: 1 if their hash is another", int(len(trained) > 1), 0)

    print("the judge's questions to the trained model", flush=True)
    rows = validation_rows(data, config["val_tokens"], config["val_seq_len"])
    model = scratch / "checkpoints" / made[-1].run_id / "final"
    with answering(scratch, model, config) as answers:
        on_new = {name: made[-1].probe(name) for name in measures[1:]}
        yield from ask_model(answers, rows, config, figure(made[-1], "loss"), on_new)


def figure(run: Run, name: str) -> float:
    return run.validations[-1].loss if name == "loss" else run.probe(name)


def compare_means(name: str, record: list[float], here: list[float]) -> Finding:
    """The difference of the means in standard errors, by the record's spread."""
    mean, sd = moments(record)
    error = sd * math.sqrt(1 / len(record) + 1 / len(here))
    off = abs(moments(here)[0] - mean)
    apart = off / error if error > 0 else math.inf * off
    what = f"mean {name} here, in standard errors from the record's"
    return Finding(what, apart, DEVIATIONS, f"{moments(here)[0]:.4f} to {mean:.4f}")


def train(evidence: Evidence, before: Run, data: Path, scratch: Path) -> Run:
    """Run the source in `scratch` as the record's run was started. Refused if it does not end."""
    claim, ranks, logs = evidence.claim, before.header["world_size"], scratch / f"s{before.seed}"
    words = ["train_gpt.py", "--track", claim.track, *claim.flags, f"--seed={before.seed}",
             "--trials=1", f"--data-dir={data}", f"--log-dir={logs}",
             f"--checkpoint-dir={scratch / 'checkpoints'}"]  # fmt: skip
    if "keep_model" in claim.config:
        words.append("--keep-model=on")
    if ranks > 1:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *words]
    environment = inherited()
    if before.env.get("gpu") is None:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with (
        open(scratch / "output.txt", "wb") as output,
        child_process([sys.executable, *words], cwd=scratch, env=environment, stdout=output,
                      stderr=output) as child,
    ):
        child.wait()
    said = (scratch / "output.txt").read_text(errors="replace").strip()[-300:]
    try:
        (run,) = read_runs(find_runs([logs])[0])
    except (LogError, OSError):
        raise Refused(f"the source does not run here: {said}") from None
    if not run.complete:
        raise Refused(f"the source does not run to its end here: {said}")
    was, now = dict(before.header["data"]), dict(run.header.get("data") or {})
    if "train_end" in before.header:  # the hash of what was trained on is compared instead
        now["train_sha256"] = was.get("train_sha256")
    if was != now:
        raise Refused(f"nothing to compare: the record used {was}, and the run here {now}")
    return run


def hide_unread(data: Path, folder: Path, end: list[int], held_out: int, bos: int) -> Path:
    """Make a folder with the same data, but noise for the training text behind the run's last step.

    A run that counts or reads more text than it trains on then gets another loss. Documents keep
    their places, and the last `held_out` tokens their values. bos is the largest token.
    """
    shard, offset = end
    hidden = find_shards(data, "train")[shard:]
    if not hidden:
        return data  # the trainer says what is missing
    folder.mkdir()
    for path in data.iterdir():
        if path not in hidden:
            (folder / path.name).symlink_to(path.resolve())
    last = hidden[0]  # the run reads no later one
    words = np.fromfile(last, "<u2")
    unread = words[HEADER_BYTES // 2 + offset : len(words) - held_out]
    noise = np.random.default_rng().integers(bos, size=len(unread), dtype="<u2")
    unread[:] = np.where(unread == bos, bos, noise)
    words.tofile(folder / last.name)
    return folder


def find_shards(folder: Path, split: str) -> list[Path]:
    """The shards of a split, "train" or "val", as the trainer finds them."""
    word = re.compile(rf"(?<![a-z]){split}_")
    return sorted(each for each in folder.glob("*.bin") if word.search(each.name))


def validation_rows(folder: Path, tokens: int, sequence: int) -> Rows:
    """The validation rows, read without the source. Refused if there are too few tokens."""
    parts = [np.empty(0, "<u2")]
    for path in find_shards(folder, "val"):
        parts.append(np.fromfile(path, "<u2", count=tokens + 1, offset=HEADER_BYTES))
    stream = np.concatenate(parts)[: tokens + 1].astype(np.int64)
    if len(stream) <= tokens:
        raise Refused(f"{folder} holds {len(stream)} validation tokens, not {tokens + 1}")
    return np.lib.stride_tricks.sliding_window_view(stream, sequence + 1)[::sequence]
