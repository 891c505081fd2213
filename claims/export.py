"""A record of ours as the public contest takes it: a text log per run that begins with the source, and a README.

Losses are printed to four decimals and times in whole milliseconds, as in the contest's own logs. The README's figures
come from these printed numbers, so that whoever reads the logs gets the same.
"""

import shlex
from datetime import datetime
from pathlib import Path

from runtime.log import source_files
from claims.arms import group_runs
from claims.evidence import Evidence, find_failures
from claims.pages import common, ledger, table
from claims.runlog import Run, read_all
from claims.stats import moments, one_sample, welch

SEPARATOR = "=" * 100
MACHINE = ("gpu", "gpu_count", "driver", "cuda", "torch", "cpu")  # times compare only where these are the same
LOSSES = """```python
from statistics import mean, stdev
from scipy.stats import ttest_1samp, ttest_ind
losses = {losses}
test = ttest_1samp(losses, {target}, alternative="less")
print("mean %.5f, sd %.5f, p %.3g" % (mean(losses), stdev(losses), test.pvalue))
```
```
mean {mean:.5f}, sd {sd:.5f}, p {p:.3g}
```"""
TIMES = """Seconds of these runs, and of the record before on the same machine; its logs are in baseline/.

```python
seconds, before = {seconds}, {before}
for times in (seconds, before):
    print("mean %.3f, sd %.3f" % (mean(times), stdev(times)))
print("p %.3g" % ttest_ind(seconds, before, equal_var=False, alternative="less").pvalue)
```
```
mean {a[1]:.3f}, sd {a[2]:.3f}
mean {b[1]:.3f}, sd {b[2]:.3f}
p {p_less:.3g}
```
Difference {mean:+.3f} s, 95 % confidence interval {low:+.3f} to {high:+.3f} s (Welch)."""


class ExportError(ValueError):
    """What was asked for is no submission. The message names the file or folder, the rule and the fix."""


def export(evidence: Evidence, folder: Path, baseline: Path | None = None) -> list[Path]:
    """Write README.md and the log of each run to a folder that is new or empty; returns what was written.

    `baseline` holds logs of the record before from the same machine: they are compared and copied to baseline/.
    Raises ExportError for a record that does not hold, such as one with unfinished runs; LogError, OSError.
    """
    if failures := find_failures(evidence):
        raise ExportError("only a record that holds is exported. " + "; ".join(
            f"{failure.where}: {failure.what} ({failure.mend})" for failure in failures))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ExportError(f"{folder} is not empty, and nothing is written over: name a new folder")
    runs, source = evidence.complete, source_text(evidence.folder / "source")
    prior = read_baseline(baseline, runs) if baseline else []
    files = {f"{run.path.stem}.txt": log_text(run, source).encode() for run in runs}
    files |= {"README.md": readme(evidence, prior).encode()}
    files |= {f"baseline/{run.path.name}": run.path.read_bytes() for run in prior}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def read_baseline(folder: Path, runs: list[Run]) -> list[Run]:
    """The runs of the record before; ExportError where their times cannot be compared with those of `runs`."""
    prior, errors = read_all([folder])
    wrong = list(map(str, errors)) + [f"{run.path.name}: {run.unfinished}" for run in prior if run.unfinished]
    if len(prior) < 2 or len(group_runs(prior)) > 1 or not all(run.train_time_ms for run in prior):
        wrong.append("fewer than 2 runs, runs of several arms, or runs without times")
    for name in MACHINE:
        if len(values := {str(run.env[name]) for run in runs + prior if run.env.get(name)}) > 1:
            wrong.append(f"{name} is not the same there and in the record: {', '.join(sorted(values))}")
    if wrong:
        raise ExportError(f"baseline {folder}: {'; '.join(wrong)}. Name whole logs of one record from this machine.")
    return prior


def source_text(folder: Path) -> str:
    """All source files, the trainer first, each behind its name."""
    files = sorted(source_files(folder), key=lambda path: path.name != "train_gpt.py")
    text = "".join(f"{'#' * 40}\n# {path.relative_to(folder).as_posix()}\n\n"
                   f"{path.read_bytes().decode(errors='backslashreplace')}\n" for path in files)
    if SEPARATOR in text.splitlines():
        raise ExportError(f"{folder} has a line of 100 '=', which ends the source in a log: take it out and run again")
    return text


def log_text(run: Run, source: str) -> str:
    """A run in the grammar of the contest's logs, with what the header knows of versions and machine."""
    env, cuda = run.env, f" compiled for CUDA {run.env['cuda']}" if run.env.get("cuda") else ""
    where = f"{env['gpu']} with world_size {run.gpu_count}" if env.get("gpu") else f"the CPU {env.get('cpu')}"
    head = [f"Running Python {env.get('python')}", f"Running PyTorch {env.get('torch')}{cuda} on {where}"]
    head += [f"Driver Version: {env['driver']}"] if env.get("driver") else []
    head += [f"{datetime.fromisoformat(run.started):%a %b %d %H:%M:%S UTC %Y}"] if run.started else []
    rows = [(step.step, f"train_loss:{step.train_loss:.4f} " if step.train_loss is not None else "", step.train_time_ms)
            for step in run.steps]
    rows += [(point.step, f"val_loss:{point.loss:.4f} ", point.train_time_ms) for point in run.validations]
    lines = [f"step:{step}/{run.total_steps} {loss}train_time:{ms or 0:.0f}ms step_avg:{(ms or 0) / max(step, 1):.2f}ms"
             for step, loss, ms in sorted(rows, key=lambda row: row[0])]  # a validation behind the step before it
    if run.peak_mib is not None:
        lines.append(f"peak memory {'allocated' if env.get('gpu') else 'resident'}: {run.peak_mib:.0f} MiB")
    return source + "\n".join([SEPARATOR, *head, SEPARATOR, *lines, ""])


def printed(runs: list[Run]) -> tuple[list[float], list[float]]:
    """Losses and seconds as the logs print them."""
    return [float(f"{run.final_loss:.4f}") for run in runs], [round(run.train_time_ms or 0) / 1000 for run in runs]


def time_test(seconds: list[float], before: list[float]) -> str:
    a, b = moments(seconds), moments(before)
    if not before:
        return f"Seconds: {seconds}, mean {a[1]:.3f}, sd {a[2]:.3f}. The record before was not timed on this machine."
    return TIMES.format(seconds=seconds, before=before, a=a, b=b, **welch(seconds, before)._asdict())


def readme(evidence: Evidence, prior: list[Run]) -> str:
    """What the contest's reviewers ask for, each number from the logs."""
    claim, runs, looks = evidence.claim, evidence.complete, " and ".join(map(str, evidence.claim.looks))
    losses, seconds = printed(runs)
    return "\n\n".join([
        f"# {claim.name}: {claim.config['steps']} steps",
        claim.about,
        "Credits: add whose work this builds on.",
        f"Claimed on {claim.created}, before the first run and with its seeds: a mean loss below {claim.target:g} at "
        f"p < {evidence.level:.3g} after {looks} runs. The losses as printed in the logs (unrounded, they give p "
        f"{evidence.result.p:.3g}):",
        LOSSES.format(losses=losses, target=claim.target, **one_sample(losses, claim.target)._asdict()),
        time_test(seconds, printed(prior)[1]),
        table("| log | seed | loss | seconds |",
              ((f"{run.path.stem}.txt", run.seed, *pair) for run, *pair in zip(runs, losses, seconds, strict=True))),
        table("| phase | on the clock | mean ms |", ledger(runs)),
        table("| machine, data and checks | |", common(runs).items()),
        f"    torchrun --nproc_per_node={runs[0].header['world_size']} train_gpt.py {shlex.join(claim.flags)}",
    ]) + "\n"
