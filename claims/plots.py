"""The picture of a track, as SVG: the loss curves of its claims."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from claims.runs import Run
from runtime.errors import Refused

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
STYLE: Any = {
    "svg.hashsalt": "records",  # else the names of clip paths are random
    "svg.fonttype": "none",
    "text.parse_math": False,  # a claim's name is no formula
    "axes.grid": True,
}
SMOOTHED = 1 / 10  # of a run: the window of the running mean of its training losses
POINTS = 200  # of a curve: nobody sees more
SETTLED = 1 / 10  # of a run: the fall before it would flatten the rest


def plot_losses(claims: dict[str, list[Run]], target: float, path: Path) -> None:
    """The median training loss of each claim's runs, and the band of 5 to 95 % of them.

    Writes the same bytes for the same runs, whatever the user's settings. Raises Refused without
    matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise Refused("pictures need matplotlib: pip install -r requirements-dev.txt") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        draw_losses(figure.subplots(), claims, target)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def draw_losses(axes: Any, claims: dict[str, list[Run]], target: float) -> None:
    shown = [target]  # what the picture must hold
    for (name, runs), colour in zip(claims.items(), cycle(COLOURS), strict=False):
        steps, losses = loss_curves(runs)
        low, median, high = np.percentile(losses, (5, 50, 95), axis=0)
        last = float(np.median([run.final_loss for run in runs]))
        axes.fill_between(steps, low, high, alpha=0.2, linewidth=0, color=colour)
        axes.plot(steps, median, color=colour, label=f"{name}, {len(runs)} runs")
        axes.plot(steps[-1], last, "o", color=colour)
        settled = steps >= SETTLED * steps[-1]
        shown += [last, low[settled].min(), high[settled].max()]
    axes.plot([], [], "o", color="gray", label="last validation loss, median")
    axes.axhline(target, color="black", linestyle="--", label=f"target {target:g}")
    axes.set_ylim(min(shown) - 0.05, max(shown) + 0.05)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per token")
    axes.legend(fontsize=8)


def loss_curves(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Steps whose training loss every run knows, and the losses [runs, steps], smoothed."""
    series = []
    for run in runs:
        series.append({s.step: s.train_loss for s in run.steps if s.train_loss is not None})
    steps = sorted(set.intersection(*map(set, series)))
    window = np.ones(max(1, round(SMOOTHED * len(steps))))
    weight = np.convolve(np.ones(len(steps)), window, "same")  # less at the ends
    smooth = []
    for losses in series:
        row = np.array([losses[step] for step in steps])
        smooth.append(np.convolve(row, window, "same") / weight)
    keep = np.unique(np.linspace(0, len(steps) - 1, POINTS).round().astype(int))
    return np.array(steps)[keep], np.array(smooth)[:, keep]
