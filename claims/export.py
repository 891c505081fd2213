"""A record as the public contest takes it: a text log for each run, which begins with the source.

Losses have four decimals and times whole milliseconds, as in the contest's own logs.
"""

from pathlib import Path

from claims.checks import find_failures
from claims.evidence import Evidence
from claims.runs import Run
from claims.sources import Source
from runtime.errors import Refused

SEPARATOR = "=" * 100  # ends the source in a log


def export(evidence: Evidence, folder: Path) -> list[Path]:
    """Write the logs and README.md to a new or empty folder; returns their paths."""
    failures = find_failures(evidence)
    if failures or evidence.source is None:
        raise Refused(f"{failures[0].where}: {failures[0].what}. Only a record that holds is "
                      f"exported: {failures[0].mend}.")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise Refused(f"{folder} is not empty, and nothing is overwritten: name a new folder")
    source = source_text(evidence.source)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "README.md"]
    paths[0].write_bytes((evidence.folder / "README.md").read_bytes())
    for run in evidence.complete:
        paths.append(folder / f"{run.path.stem}.txt")
        paths[-1].write_bytes((source + log_text(run)).encode())
    return paths


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


def log_text(run: Run) -> str:
    """What follows the source: versions, machine, and a line for each loss."""
    env = run.env
    where = f"on the CPU {env.get('cpu')}"
    if env.get("gpu"):
        where = f"on {env['gpu']} with world_size {run.gpu_count}"
    if env.get("cuda"):
        where = f"compiled for CUDA {env['cuda']} {where}"
    lines = [SEPARATOR, f"Running Python {env.get('python')}",
             f"Running PyTorch {env.get('torch')} {where}"]
    lines.append(SEPARATOR)
    events: list[tuple[int, str, float | None]] = []
    for step in run.steps:
        loss = "" if step.train_loss is None else f"train_loss:{step.train_loss:.4f} "
        events.append((step.step, loss, step.train_time_ms))
    for val in run.validations:
        events.append((val.step, f"val_loss:{val.loss:.4f} ", val.train_time_ms))
    events.sort(key=lambda event: event[0])  # stable: a validation follows the step before it
    for number, loss, ms in events:
        time = f"train_time:{ms or 0:.0f}ms step_avg:{(ms or 0) / max(number, 1):.2f}ms"
        lines.append(f"step:{number}/{run.total_steps} {loss}{time}")
    if run.peak_mib is not None:
        kind = "allocated" if env.get("gpu") else "resident"
        lines.append(f"peak memory {kind}: {run.peak_mib:.0f} MiB")
    return "\n".join([*lines, ""])
