"""Pictures of a track: how its records came down, and the losses of their runs. Needs matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from claims.runlog import Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # of Okabe and Ito: for all kinds of eyes
STYLES = ("-", "--", ":", "-.")  # tell curves of one colour apart
SETTINGS: Any = {
    "svg.hashsalt": "records", "svg.fonttype": "none", "text.parse_math": False, "savefig.dpi": 150,
    "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
METADATA: dict[str, Any] = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}
FEWEST_VALIDATIONS = 5  # fewer are no curve
SMOOTHED = 1 / 10  # of a run: the window of the running mean of its training loss
POINTS = 200  # of a curve: more cannot be seen
MARGIN = 0.05  # nats above and below
SETTLED = 1 / 10  # of a run: the fall before it would flatten all the rest


class PictureError(RuntimeError):
    """A picture cannot be drawn here. The message says what to install."""


class Curve(NamedTuple):
    """Losses at the steps that all runs of a group have logged."""

    kind: str  # validation or training
    steps: np.ndarray
    seconds: np.ndarray  # on the clock, median of the runs
    low: np.ndarray  # 5 % of the runs lie below
    median: np.ndarray
    high: np.ndarray  # 5 % of the runs lie above


def write(draw: Callable[[Any], None], size: tuple[float, float], path: Path) -> list[Path]:
    """`path` with .svg and with .png, the same bytes whenever the same is drawn, whatever the user's settings."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise PictureError("pictures need matplotlib: pip install -r requirements-dev.txt") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        for suffix, metadata in METADATA.items():
            figure.savefig(f"{path}{suffix}", metadata=metadata)
    return [Path(f"{path}{suffix}") for suffix in METADATA]


def timeline(entries: Sequence[tuple[str, str, int, float]], path: Path) -> list[Path]:
    """Draw steps and median seconds of records, (date, name, steps, seconds), as two staircases in their order.

    Writes and returns `path` with .svg and with .png. Raises PictureError without matplotlib, OSError.
    """

    def draw(figure: Any) -> None:
        upper, lower = figure.subplots(2, sharex=True)
        staircase(upper, [steps for _, _, steps, _ in entries], ",.0f", "steps")
        staircase(lower, [seconds for *_, seconds in entries], ",.1f", "seconds, median of runs")
        # evenly, whatever lies between the dates: records of one day would hide each other
        labels = [f"{name}\n{date}" for date, name, _, _ in entries]
        lower.set_xticks(range(len(entries)), labels, rotation=30, ha="right")

    return write(draw, (max(5.0, 2 + 0.9 * len(entries)), 6.0), path)


def staircase(axes: Any, values: Sequence[float], form: str, label: str) -> None:
    """Each value holds until the next one, the last to the edge."""
    places = [*range(len(values)), len(values) - 0.5]
    axes.step(places, [*values, *values[-1:]] or [0], where="post", color=COLOURS[0])
    axes.plot(places[:-1], values, "o", color=COLOURS[0])
    for place, value in enumerate(values):
        axes.annotate(f"{value:{form}}", (place, value), (4, 5), textcoords="offset points")
    axes.set_ylabel(label)
    axes.margins(x=0.05, y=0.2)


def loss_curves(groups: dict[str, list[Run]], target: float, path: Path) -> list[Path]:
    """Draw the median loss of each group's runs with the band of 5 to 95 % of them, by step and by the clock.

    The target is for the last validation loss, the dot. Writes and returns `path` with .svg and with .png. Raises
    PictureError without matplotlib, LogError, OSError.
    """
    curves = {name: loss_curve(runs) for name, runs in groups.items() if runs}
    shown = [target]  # that the panels must hold

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, column, label in zip(panels, ("steps", "seconds"), ("step", "seconds on the clock"), strict=True):
            for index, (name, curve) in enumerate(curves.items()):
                colour, style = COLOURS[index % len(COLOURS)], STYLES[index // len(COLOURS) % len(STYLES)]
                x, runs = getattr(curve, column), groups[name]
                axes.fill_between(x, curve.low, curve.high, alpha=0.2, linewidth=0, color=colour)
                axes.plot(x, curve.median, style, color=colour, label=f"{name}: {curve.kind} loss, {len(runs)} runs")
                last, settled = np.median([run.final_loss for run in runs]), curve.steps >= SETTLED * curve.steps[-1]
                axes.plot(x[-1], last, "o", color=colour)
                shown.extend([last, *curve.low[settled], *curve.high[settled]])
            axes.plot([], [], "o", color="gray", label="last validation loss, median")
            axes.axhline(target, color="black", linewidth=1, linestyle="--", label=f"target {target:g}")
            axes.set_xlabel(label)
        panels[0].set_ylabel("nats per token")
        panels[0].set_ylim(min(shown) - MARGIN, max(shown) + MARGIN)
        panels[0].legend(fontsize=8)

    return write(draw, (10.0, 4.5), path)


def loss_curve(runs: list[Run]) -> Curve:
    """Of the validations where each run has enough, else of the training losses, each run's smoothed."""
    kind, series = "validation", [{p.step: (p.train_time_ms or 0.0, p.loss) for p in run.validations} for run in runs]
    if min(map(len, series)) < FEWEST_VALIDATIONS:
        trained = [{s.step: (s.train_time_ms or 0.0, s.train_loss) for s in run.steps if s.train_loss is not None}
                   for run in runs]
        if set.intersection(*map(set, trained)):
            kind, series = "training", trained
    steps = np.array(sorted(set.intersection(*map(set, series))))
    times, losses = np.moveaxis(np.array([[run[step] for step in steps] for run in series]), 2, 0)  # each [runs, steps]
    if kind == "training":
        losses = np.array([running_mean(run) for run in losses])
    keep = np.unique(np.linspace(0, len(steps) - 1, POINTS).round().astype(int))
    low, median, high = np.percentile(losses[:, keep], (5, 50, 95), axis=0)
    return Curve(kind, steps[keep], np.median(times[:, keep], axis=0) / 1000, low, median, high)


def running_mean(losses: np.ndarray) -> np.ndarray:
    """Centred; of what there is at the ends."""
    kernel = np.ones(max(1, round(SMOOTHED * len(losses))))
    return np.convolve(losses, kernel, "same") / np.convolve(np.ones_like(losses), kernel, "same")
