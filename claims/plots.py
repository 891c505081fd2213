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
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
FEWEST_VALIDATIONS = 5  # fewer make no curve
SMOOTHED = 1 / 10  # of a run: the window of the running mean of its training losses
POINTS = 200  # of a curve: nobody sees more
SETTLED = 1 / 10  # of a run: the fall before it would flatten the rest


def plot_losses(claims: dict[str, list[Run]], target: float, path: Path) -> None:
    """The median loss of each claim's runs at each step, and the band of 5 to 95 % of them.

    Writes the same bytes for the same runs, whatever the user's settings. Raises Refused without
    matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        fix = "pip install -r requirements-dev.txt"
        raise Refused(f"pictures need matplotlib, which is not installed: {fix}") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        draw_losses(figure.subplots(), claims, target)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def draw_losses(axes: Any, claims: dict[str, list[Run]], target: float) -> None:
    shown = [target]  # what the picture must hold
    for (name, runs), colour in zip(claims.items(), cycle(COLOURS), strict=False):
        kind, steps, losses = loss_curves(runs)
        low, median, high = np.percentile(losses, (5, 50, 95), axis=0)
        last = float(np.median([run.final_loss for run in runs]))
        axes.fill_between(steps, low, high, alpha=0.2, linewidth=0, color=colour)
        axes.plot(steps, median, color=colour, label=f"{name}: {kind} loss, {len(runs)} runs")
        axes.plot(steps[-1], last, "o", color=colour)
        settled = steps >= SETTLED * steps[-1]
        shown += [last, low[settled].min(), high[settled].max()]
    axes.plot([], [], "o", color="gray", label="last validation loss, median")
    axes.axhline(target, color="black", linestyle="--", label=f"target {target:g}")
    axes.set_ylim(min(shown) - 0.05, max(shown) + 0.05)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.legend(fontsize=8)


def loss_curves(runs: Sequence[Run]) -> tuple[str, np.ndarray, np.ndarray]:
    """What the losses are, the steps that every run has, and the losses [runs, steps].

    Validation losses if there are enough of them, else training losses, smoothed.
    """
    validations = [dict(run.losses) for run in runs]
    trained = [{s.step: s.train_loss for s in run.steps if s.train_loss is not None}
               for run in runs]
    kind, series = "validation", validations
    if min(map(len, validations)) < FEWEST_VALIDATIONS and all(trained):
        kind, series = "training", trained
    steps = sorted(set.intersection(*map(set, series)))
    losses = np.array([[losses[step] for step in steps] for losses in series])
    if series is trained:
        losses = np.array([running_mean(row) for row in losses])
    keep = np.unique(np.linspace(0, len(steps) - 1, POINTS).round().astype(int))
    return kind, np.array(steps)[keep], losses[:, keep]


def running_mean(losses: np.ndarray) -> np.ndarray:
    """The mean of a window around each loss; of a shorter one at the ends."""
    window = np.ones(max(1, round(SMOOTHED * len(losses))))
    return np.convolve(losses, window, "same") / np.convolve(np.ones_like(losses), window, "same")
