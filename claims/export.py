"""A record as the public contest takes it: a text log for each run, with the source, and a README.

Losses have four decimals and times whole milliseconds, as in the contest's own logs. The README
computes its figures from these printed numbers, so a reader of the logs gets the same.
"""

import shlex
import statistics
from datetime import datetime
from pathlib import Path

from claims.checks import find_failures
from claims.evidence import Evidence
from claims.pages import machine_table, phase_table, table
from claims.runlog import Run
from claims.sources import Source
from claims.stats import one_sample
from runtime.errors import Refused

SEPARATOR = "=" * 100  # ends the source in a log
README = """# {name}: {steps} steps

{about}

Credits: add whose work this builds on.

Claimed at {created}, before the first run and with its seeds: a mean loss below {target:g} at
p < {level:.3g}, tested after {looks} runs. The losses as the logs print them:

```python
from statistics import mean, stdev
from scipy.stats import ttest_1samp
losses = {losses}
test = ttest_1samp(losses, {target}, alternative="less")
print("mean %.5f, sd %.5f, p %.3g" % (mean(losses), stdev(losses), test.pvalue))
```
```
mean {mean:.5f}, sd {sd:.5f}, p {p:.3g}
```

Seconds: mean {seconds_mean:.3f}, sd {seconds_sd:.3f}. To compare them with the record before, time
both on one machine with `scripts/compare.py`.

{tables}

    torchrun --nproc_per_node={ranks} train_gpt.py {flags}
"""


def export(evidence: Evidence, folder: Path) -> list[Path]:
    """Write the log of each run and README.md to a new or empty folder; returns their paths."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise Refused(f"{folder} is not empty, and nothing is overwritten: name a new folder")
    failures = find_failures(evidence)
    if failures or evidence.source is None:
        raise Refused(f"{failures[0].where}: {failures[0].what}. Only a record that holds is "
                      f"exported: {failures[0].mend}.")
    source = source_text(evidence.source)
    files = {f"{run.path.stem}.txt": log_text(run, source) for run in evidence.complete}
    files["README.md"] = readme(evidence)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    return [folder / name for name in files]


def source_text(source: Source) -> str:
    """All source files, the trainer first, each behind its name. Raises Refused."""
    text = ""
    for name in sorted(source.files, key=lambda name: (name != "train_gpt.py", name)):
        content = source.files[name].decode(errors="backslashreplace")
        text += f"{'#' * 40}\n# {name}\n\n{content}\n"
    if SEPARATOR in text.splitlines():
        raise Refused("a line of 100 '=' in the source would end it early in the log: "
                      "take the line out and run again")
    return text


def log_text(run: Run, source: str) -> str:
    """A run as the contest's logs have it, with what the header knows of versions and machine."""
    env = run.env
    where = f"on the CPU {env.get('cpu')}"
    if env.get("gpu"):
        where = f"on {env['gpu']} with world_size {run.gpu_count}"
    if env.get("cuda"):
        where = f"compiled for CUDA {env['cuda']} {where}"
    lines = [f"Running Python {env.get('python')}", f"Running PyTorch {env.get('torch')} {where}"]
    if env.get("driver"):
        lines.append(f"Driver Version: {env['driver']}")
    if run.started:
        lines.append(f"{datetime.fromisoformat(run.started):%a %b %d %H:%M:%S UTC %Y}")
    lines.append(SEPARATOR)
    events: list[tuple[int, str, float | None]] = []
    for step in run.steps:
        loss = "" if step.train_loss is None else f"train_loss:{step.train_loss:.4f} "
        events.append((step.step, loss, step.train_time_ms))
    events += [(val.step, f"val_loss:{val.loss:.4f} ", val.train_time_ms) for val in run.validations]
    for number, loss, ms in sorted(events, key=lambda event: event[0]):
        average = (ms or 0.0) / max(number, 1)
        lines.append(f"step:{number}/{run.total_steps} {loss}train_time:{ms or 0:.0f}ms "
                     f"step_avg:{average:.2f}ms")
    if run.peak_mib is not None:
        kind = "allocated" if env.get("gpu") else "resident"
        lines.append(f"peak memory {kind}: {run.peak_mib:.0f} MiB")
    return source + "\n".join([SEPARATOR, *lines, ""])


def readme(evidence: Evidence) -> str:
    """What the contest's reviewers ask for, each number from the printed logs."""
    claim, runs = evidence.claim, evidence.complete
    losses = [float(f"{run.final_loss:.4f}") for run in runs]
    seconds = [round(run.train_time_ms or 0) / 1000 for run in runs]
    found = one_sample(losses, claim.target)
    rows = [(f"{run.path.stem}.txt", run.seed, loss, second)
            for run, loss, second in zip(runs, losses, seconds, strict=True)]
    tables = (table("| log | seed | loss | seconds |", rows), phase_table(runs), machine_table(runs))
    return README.format(
        name=claim.name, steps=claim.config["steps"], about=claim.about, created=claim.created,
        target=claim.target, level=evidence.level, looks=" and ".join(map(str, claim.looks)),
        losses=losses, mean=found.mean, sd=found.sd, p=found.p,
        seconds_mean=statistics.fmean(seconds), seconds_sd=statistics.stdev(seconds),
        tables="\n\n".join(tables), ranks=runs[0].header["world_size"],
        flags=shlex.join(claim.flags))
