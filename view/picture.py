"""The loss curves as a picture."""

from collections.abc import Sequence
from pathlib import Path

from claims.arms import common_target
from claims.plots import plot_losses
from claims.runlog import read_runs
from claims.runs import Run
from runtime.errors import Refused
from view.runs import Folder, group_of, logs_of


def write_png(folders: Sequence[Folder], path: Path) -> None:
    """Write the median training loss of each group by tokens. Refused if there is none."""
    groups: dict[str, list[Run]] = {}
    names: dict[str, str] = {}
    for folder in folders:
        for run in [run for log in logs_of(folder) for run in read_runs(log)]:
            if run.complete and any(step.train_loss and step.tokens for step in run.steps):
                group = group_of(run, folder)
                name = folder.name if folder.name not in names.values() else group[:6]
                groups.setdefault(names.setdefault(group, name), []).append(run)
    if not groups:
        raise Refused("no finished run here logged training losses by tokens: use --out FILE.html")
    plot_losses(groups, common_target([run for runs in groups.values() for run in runs]), path)
