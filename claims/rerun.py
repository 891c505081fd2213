"""Run a record's source again and compare what comes out with the record's log.

This executes code that others wrote, with the rights of whoever calls it.
"""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from claims.evidence import Evidence
from claims.questions import Finding, answering, check_model, validation_rows
from claims.runlog import find_runs, read_run
from claims.runs import Run
from claims.sources import write_files
from runtime.errors import LogError, Refused

# Where these agree, a CPU repeats every bit.
MACHINE = ("cpu", "gpu", "gpu_count", "torch", "cuda", "threads", "dtype", "attention", "compiled")
# Measured between an Intel and an AMD machine: before the first update, and over 30 of them.
FIRST, AFTER_30 = 1e-5, 0.05
LONGEST_END_S = 60  # a run that is stopped writes a checkpoint

Allowed = Callable[[int], float]  # difference of losses after so many updates


def rerun(
    evidence: Evidence, seed: int | None, steps: int | None, data: Path, scratch: Path,
    timeout_s: float, say: Callable[[str], object],
) -> Iterator[Finding]:  # fmt: skip
    """What the record's run of this seed and the same run made here have in common, or not.

    seed: None for the first run. steps: stop after so many; None: run to the end. scratch: an empty
    folder. Refused if the source cannot run here.
    """
    runs = [run for run in evidence.complete if seed in (None, run.seed)]
    if not runs:
        raise Refused(f"no run of seed {seed} counts in {evidence.folder}. Take another seed.")
    before, config = runs[0], evidence.settings
    total = len(before.steps)
    steps = min(steps or total, total)
    whole = steps == total
    say(f"running its source: seed {before.seed}, {steps} of {total} steps")
    write_files(evidence.source, scratch)
    train(evidence, before, data, scratch, None if whole else steps, timeout_s)
    after = read_again(before, scratch, steps)
    yield from compare_losses(before, after, steps, allowed_here(before, after, say))
    trained = [run.end.get("train_tokens_sha256") for run in (before, after)]
    if whole and trained[0]:
        yield Finding("trained tokens: 1 if their hash is another", int(len(set(trained)) > 1), 0)
    if before.header["schema"] < 3:
        say("losses only: a source of before schema 3 cannot answer the judge's own checks")
        return
    say(f"the judge's checks on {'the trained' if whole else 'an untrained'} model")
    rows = validation_rows(data, config["val_tokens"], config["val_seq_len"])
    with answering(scratch, kept_model(scratch, after), timeout_s) as losses:
        yield from check_model(losses, rows, config, after.final_loss if whole else None)


def train(
    evidence: Evidence, before: Run, data: Path, scratch: Path, steps: int | None, timeout_s: float
) -> None:
    """Run the source; with `steps`, until its log has so many. Refused if it takes too long."""
    claim, ranks = evidence.claim, before.header["world_size"]
    flags: dict[str, Any] = {
        "seed": before.seed, "trials": 1, "data-dir": data, "log-dir": scratch / "logs",
        "checkpoint-dir": scratch / "checkpoints",
    }  # fmt: skip
    if "keep_model" in claim.config:
        flags["keep-model"] = "on"
    words = ["train_gpt.py", "--track", claim.track, *claim.flags]
    words += [f"--{name}={value}" for name, value in flags.items()]
    if ranks > 1:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *words]
    environment = dict(os.environ)
    if before.env.get("gpu") is None:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif not has_gpu():
        raise Refused(f"the run used {before.env['gpu']}, and torch finds no GPU here")
    # The schedule depends on the number of steps, so the run is stopped, not made shorter.
    last, deadline = f'"step": {steps},'.encode(), time.monotonic() + timeout_s
    with (
        open(scratch / "output.txt", "wb") as output,
        subprocess.Popen([sys.executable, *words], cwd=scratch, env=environment, stdout=output,
                         stderr=output, process_group=0) as child,
    ):  # fmt: skip
        try:
            while child.poll() is None:
                if any(last in log.read_bytes() for log in scratch.glob("logs/2*.jsonl")):
                    break
                if time.monotonic() > deadline:
                    raise Refused(f"the run took over {timeout_s:g} s. Give more with --timeout.")
                time.sleep(0.1)
        finally:
            child.terminate()  # it saves a checkpoint first
            try:
                child.wait(LONGEST_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)


def has_gpu() -> bool:
    words = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(words).returncode == 0


def read_again(before: Run, scratch: Path, steps: int) -> Run:
    """The run that was made here. Refused if it broke off or has nothing to compare."""
    output = (scratch / "output.txt").read_text(errors="replace").strip()[-300:]
    try:
        after = read_run(find_runs([scratch / "logs"])[0])
    except (LogError, OSError):
        raise Refused(f"the source does not run here: {output}") from None
    if len(after.steps) < steps or (steps == len(before.steps) and not after.complete):
        raise Refused(f"the source does not run to the end here, but {len(after.steps)} steps: "
                      f"{output}")  # fmt: skip
    for was, now in ((before.header["data"], after.header.get("data")),
                     (before.env.get("dtype"), after.env.get("dtype"))):  # fmt: skip
        if was != now:
            raise Refused(f"nothing to compare: the record used {was}, and the run here {now}")
    return after


def allowed_here(before: Run, after: Run, say: Callable[[str], object]) -> Allowed:
    """How far losses may lie apart: not at all on a CPU of the same kind."""
    differ = []
    for name in MACHINE:
        if before.env.get(name) != after.env.get(name):
            differ.append(f"{name} {before.env.get(name)}, here {after.env.get(name)}")
    if before.env.get("gpu") is None and not differ:
        say("the same kind of machine: losses must agree to the bit")
        return lambda updates: 0.0
    say(f"not the same machine ({'; '.join(differ) or 'GPUs do not repeat bits'}): losses may lie "
        f"{FIRST:g} apart in step 1 and {AFTER_30:g} after 30, growing as a random walk")
    return lambda updates: FIRST + AFTER_30 * math.sqrt(updates / 30)


def compare_losses(before: Run, after: Run, steps: int, allowed: Allowed) -> Iterator[Finding]:
    """Losses of training and validation: of each, the step that goes farthest beyond its bound."""
    trained = {step.step: step.train_loss for step in after.steps}
    pairs = {step.step: (step.train_loss, trained.get(step.step)) for step in before.steps[:steps]}
    yield farthest(f"training losses, {len(pairs)}", pairs, lambda step: allowed(step - 1))
    validated = {each.step: each.loss for each in after.validations}
    done = steps if after.complete else steps - 1  # a run that is stopped validates no more
    pairs = {each.step: (each.loss, validated.get(each.step))
             for each in before.validations if each.step <= done}  # fmt: skip
    if pairs:
        yield farthest(f"validation losses, {len(pairs)}", pairs, allowed)


def farthest(
    what: str, pairs: dict[int, tuple[float | None, float | None]], allowed: Allowed
) -> Finding:
    found = []
    for step, (was, now) in pairs.items():
        difference = math.inf if was is None or now is None else abs(was - now)
        found.append(Finding(what, difference, allowed(step), f"step {step}"))
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
