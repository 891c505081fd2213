"""A record as the public contest takes it: a text log for each run, with the source at its head.

Losses have four decimals and times whole milliseconds, as in the contest's own logs.
"""

from pathlib import Path

from claims.evidence import Evidence
from claims.runs import Run
from claims.sources import pack

SEPARATOR = "=" * 100  # between the source, the versions and the steps


def export(evidence: Evidence, folder: Path) -> list[Path]:
    """Write README.md and the logs to a new folder; returns their paths. OSError if it exists."""
    folder.mkdir(parents=True)
    page = folder / "README.md"
    page.write_bytes((evidence.folder / page.name).read_bytes())
    paths, source = [page], pack(evidence.source)
    for run in evidence.complete:
        path = folder / f"{run.path.stem}.txt"
        path.write_bytes(source + log_text(run).encode())
        paths.append(path)
    return paths


def log_text(run: Run) -> str:
    """What follows the source: versions, machine, a line for each step and each validation."""
    torch = f"Running PyTorch {run.env.get('torch')}"
    if run.env.get("gpu"):
        torch += f" compiled for CUDA {run.env.get('cuda')} on {run.env['gpu']}"
        torch += f" with world_size {run.gpu_count}"
    lines = [SEPARATOR, f"Running Python {run.env.get('python')}", torch, SEPARATOR]
    rows = [(step.step, "", step.train_time_ms or 0.0) for step in run.steps]
    for val in run.validations:
        rows.append((val.step, f"val_loss:{val.loss:.4f} ", val.train_time_ms or 0.0))
    for step, loss, ms in sorted(rows):  # a validation follows its step: "" sorts first
        time = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        lines.append(f"step:{step}/{run.total_steps} {loss}{time}")
    return "\n".join(lines) + "\n"
