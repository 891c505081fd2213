"""Pictures, as SVG: the loss curves of a track's claims, the effects of a recipe's pieces."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from claims.runs import Run
from claims.stats import Difference
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
LINEAR = 0.01  # nats: up to here an axis of effects is linear, beyond it logarithmic


def write_picture(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Write what `draw` draws on its axes; size: width and height in inches.

    The same data gives the same bytes, whatever the user's settings. Refused without matplotlib.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise Refused("pictures need matplotlib: pip install -r requirements-dev.txt") from None
    with style.context(STYLE, after_reset=True):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        figure.savefig(path, metadata={"Date": None, "Creator": None})


# ---- Loss curves


def plot_losses(claims: dict[str, list[Run]], target: float, path: Path) -> None:
    """Write the median training loss of each claim's runs, with a band from 5 to 95 % of them."""
    write_picture(path, (8, 4.5), lambda axes: draw_losses(axes, claims, target))


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


# ---- Effects


def plot_effects(effects: dict[str, Difference], clear: Collection[str], path: Path) -> None:
    """Write a forest plot: each piece's effect on the loss with its interval, the best at the top.

    clear: the names whose effects are told from 0; the others get a hollow dot.
    """
    size = 8, 1.4 + 0.25 * len(effects)
    write_picture(path, size, lambda axes: draw_effects(axes, effects, clear))


def draw_effects(axes: Any, effects: dict[str, Difference], clear: Collection[str]) -> None:
    names = sorted(effects, key=lambda name: effects[name].mean, reverse=True)
    axes.set_xscale("symlog", linthresh=LINEAR)  # before anything sets the margins
    beside = axes.get_yaxis_transform()  # x in widths of the axes
    for row, name in enumerate(names):
        effect = effects[name]
        mean, low, high = np.round([effect.mean, effect.low, effect.high], 4)
        color, face = ("C0", "C0") if name in clear else ("gray", "white")
        axes.plot([low, high], [row, row], color=color)
        axes.plot(mean, row, "o", color=color, markerfacecolor=face)
        axes.text(1.01, row, f"{mean:+.4f}", transform=beside, va="center", fontsize=8)
    axes.plot([], [], "o-", color="C0", label="differs from 0")
    axes.plot([], [], "o-", color="gray", markerfacecolor="white", label="not told from 0")
    axes.axvline(0, color="black", linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.xaxis.set_major_formatter("{x:g}")  # else formulas, which STYLE does not parse
    axes.set_xlabel(f"effect on the loss, nats per token (axis linear within {LINEAR:g} of 0)")
    axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
