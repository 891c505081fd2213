"""The picture of a track, as SVG: the loss curves of its claims."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from claims.runs import Run
from runtime.errors import Refused

STYLE: Any = {
    "svg.hashsalt": "records",  # else the names of clip paths are random
    "svg.fonttype": "none",
    "text.parse_math": False,  # a claim's name is no formula
    "axes.grid": True,
    # Okabe and Ito's colours, which the colour-blind can tell apart.
    "axes.prop_cycle": "cycler(color=['0072B2', 'D55E00', '009E73', 'CC79A7', 'E69F00', '56B4E9'])",
}
SMOOTHED = 1 / 10  # of a run: a point of a curve is the mean over so many steps up to it
POINTS = 200  # of a curve: nobody sees more


def plot_losses(claims: dict[str, list[Run]], target: float, path: Path) -> None:
    """Write the median training loss of each claim's runs, with a band from 5 to 95 % of them.

    The same runs give the same bytes, whatever the user's settings. Refused without matplotlib.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise Refused("pictures need matplotlib: pip install -r requirements-dev.txt") from None
    with style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        draw_losses(figure.subplots(), claims, target)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def draw_losses(axes: Any, claims: dict[str, list[Run]], target: float) -> None:
    for name, runs in claims.items():
        steps, losses = loss_curves(runs)
        counts = {step.step: step.tokens for step in runs[0].steps}
        tokens = np.array([counts[step] for step in steps.tolist()]) / 1e6
        # Rounded, as the last bits of a sum depend on what ran in this process before.
        low, median, high = np.percentile(losses, (5, 50, 95), axis=0).round(4)
        (curve,) = axes.plot(tokens, median, label=f"{name}, {len(runs)} runs")
        axes.fill_between(tokens, low, high, alpha=0.2, linewidth=0, color=curve.get_color())
        last = np.median([run.final_loss for run in runs]).round(4)
        axes.plot(tokens[-1], last, "o", color=curve.get_color())
    axes.plot([], [], "o", color="gray", label="last validation loss, median")
    axes.axhline(target, color="black", linestyle="--", label=f"target {target:g}")
    axes.set_xlabel("million training tokens")
    axes.set_ylabel("training loss, nats per token")
    axes.legend(fontsize=8)


def loss_curves(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Steps whose training loss every run knows, and the losses [runs, steps], smoothed."""
    series = []
    for run in runs:
        series.append({s.step: s.train_loss for s in run.steps if s.train_loss is not None})
    steps = sorted(set.intersection(*map(set, series)))
    size = max(1, round(SMOOTHED * len(steps)))
    window = np.ones(size) / size
    smooth = []
    for losses in series:
        smooth.append(np.convolve([losses[step] for step in steps], window, "valid"))
    keep = np.unique(np.linspace(0, len(steps) - size, POINTS).round().astype(int))
    return np.array(steps)[size - 1 + keep], np.array(smooth)[:, keep]
