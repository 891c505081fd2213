"""Pictures, as SVG: losses and records of a track, effects, seconds, schedules; light and dark."""

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from claims.evidence import Evidence
from claims.pages import records_among
from claims.runs import Run
from claims.stats import Difference
from runtime.errors import Refused

Effects = dict[str, Difference]
STYLE: Any = {
    "svg.hashsalt": "records",  # else the names of clip paths are random
    "svg.fonttype": "none",
    "text.parse_math": False,  # a claim's name is no formula
    "axes.grid": True,
    "axes.axisbelow": True,
    "date.converter": "concise",
    "legend.fontsize": 8,
    # Okabe and Ito's colours, which the colour-blind can tell apart.
    "axes.prop_cycle": "cycler(color=['0072B2', 'D55E00', '009E73', 'CC79A7', 'E69F00', '56B4E9'])",
}
# Black and white change places, and each colour stays itself.
DARK = "@media (prefers-color-scheme: dark) {svg {filter: invert(0.93) hue-rotate(180deg)}}"
HOLLOW = {"color": "gray", "markerfacecolor": "white"}
SMOOTHED = 1 / 10  # of a run: a point of a curve is the mean over so many steps up to it
POINTS = 200  # of a curve: nobody sees more
LINEAR = 0.01  # nats: up to here an axis of effects is linear, beyond it logarithmic


def write_picture(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Write what `draw` draws on its figure; size: width and height in inches.

    The same data gives the same bytes, whatever the user's settings. Refused without matplotlib.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise Refused("pictures need matplotlib: pip install -r requirements-dev.txt") from None
    with style.context(STYLE, after_reset=True):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        if path.suffix == ".png":
            figure.savefig(path, dpi=150)
            return
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue().replace("</style>", f"{DARK}</style>", 1)
    path.write_text(svg, encoding="utf-8", newline="\n")


# ---- Loss curves


def plot_losses(claims: dict[str, list[Run]], target: float, path: Path) -> None:
    """Write the median training loss of each claim's runs, with a band from 5 to 95 % of them."""
    write_picture(path, (8, 4.5), lambda figure: draw_losses(figure.subplots(), claims, target))


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
    axes.legend()


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


def plot_effects(effects: Effects, clear: Collection[str], what: str, path: Path) -> None:
    """Write a forest plot: each effect with its interval, the lowest at the top.

    clear: the names whose effects are told from 0; the others get a hollow dot. what: on the axis.
    """
    size = 8, 1.5 + 0.25 * sum(name.count("\n") + 1 for name in effects)
    write_picture(path, size, lambda figure: draw_effects(figure.subplots(), effects, clear, what))


def draw_effects(axes: Any, effects: Effects, clear: Collection[str], what: str) -> None:
    names = sorted(effects, key=lambda name: effects[name].mean, reverse=True)
    axes.set_xscale("symlog", linthresh=LINEAR)  # before anything sets the margins
    for row, name in enumerate(names):
        effect = effects[name]
        mean, low, high = np.round([effect.mean, effect.low, effect.high], 4)
        look = {"color": "C0"} if name in clear else HOLLOW
        axes.plot([low, high], [row, row], color=look["color"])
        axes.plot(mean, row, "o", **look)
        write_beside(axes, row, f"{mean:+.4f}")
    axes.plot([], [], "o-", color="C0", label="differs from 0")
    axes.plot([], [], "o-", **HOLLOW, label="not told from 0")
    axes.axvline(0, color="black", linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.xaxis.set_major_formatter("{x:g}")  # else formulas, which STYLE does not parse
    axes.set_xlabel(f"{what}, nats per token\n(axis linear within {LINEAR:g} of 0)")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)


def write_beside(axes: Any, row: int, text: str) -> None:
    axes.text(1.01, row, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)


# ---- Seconds


def plot_seconds(parts: Effects, before: float, path: Path) -> None:
    """Write a waterfall: the seconds by which B differs from A, part by part, and their sum.

    parts: all but the last add up to it. before: mean seconds of A.
    """
    size = 8, 1.2 + 0.4 * len(parts)
    write_picture(path, size, lambda figure: draw_seconds(figure.subplots(), parts, before))


def draw_seconds(axes: Any, parts: Effects, before: float) -> None:
    axes.use_sticky_edges = False  # of bars, which would end where the axes do
    start, last = 0.0, len(parts) - 1
    for row, part in enumerate(parts.values()):
        mean, low, high = np.round([part.mean, part.low, part.high], 6)
        start = 0.0 if row == last else start
        axes.barh(row, mean, left=start, height=0.6, color="C1" if mean > 0 else "C0")
        axes.plot([start + low, start + high], [row, row], color="black")
        write_beside(axes, row, f"{mean:+.3f}")
        start += mean
        axes.plot([start, start], [row, min(row + 1, last)], color="gray", linewidth=1)
    axes.axvline(0, color="black", linestyle="--")
    axes.set_yticks(range(len(parts)), list(parts))
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds that B takes more than A (A takes {before:.3f})")


# ---- Records


def plot_records(claims: Sequence[Evidence], path: Path) -> None:
    """Write what a track's claims need, by date, the oldest first, and how its record fell."""
    write_picture(path, (8, 4), lambda figure: draw_records(figure.subplots(), claims))


def draw_records(axes: Any, claims: Sequence[Evidence]) -> None:
    from matplotlib.ticker import AutoLocator, NullLocator

    in_time, records = claims[0].track.in_time, records_among(claims)
    unit = 1e3 if in_time else 1e6  # milliseconds, or tokens
    for contest in sorted({one.contest for one in records}):
        won = [one for one in records if one.contest == contest]
        dates, scores = [when(one) for one in won], [one.score / unit for one in won]
        for place, at in enumerate(zip(dates, scores, strict=True), 1):
            axes.annotate(f"#{place}", at, (4, 4), textcoords="offset points", fontsize=8)
        dates.append(when(claims[-1]))  # until then the last record stands
        scores.append(scores[-1])
        look = {"where": "post", "marker": "o", "markevery": slice(len(won))}
        axes.step(dates, scores, **look, label=f"record {contest}".strip())
    for one in claims:
        if one not in records:
            axes.plot(when(one), one.score / unit, "o" if one.shown else "x", **HOLLOW)
    axes.plot([], [], "o", **HOLLOW, label="shown, no record")
    axes.plot([], [], "x", color="gray", label="not shown")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(AutoLocator())  # else none where all claims are alike
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("seconds" if in_time else "million training tokens")
    axes.set_xlabel("time of the claim, UTC")
    axes.legend()


def when(evidence: Evidence) -> datetime:
    return datetime.fromisoformat(evidence.claim.created)


# ---- Schedules


class Schedule(NamedTuple):
    """What a recipe does at each of its steps."""

    begins: list[int]  # first steps of the stages
    quantities: dict[str, dict[str, list[float]]]  # quantity: line: value at each step, or nan


def plot_schedules(schedules: dict[str, Schedule], path: Path) -> None:
    """Write the schedules, a column for each recipe and a row for each quantity."""
    rows = len(next(iter(schedules.values())).quantities)
    size = 0.5 + 3.3 * len(schedules), 0.6 + 1.4 * rows
    write_picture(path, size, lambda figure: draw_schedules(figure, schedules, rows))


def draw_schedules(figure: Any, schedules: dict[str, Schedule], rows: int) -> None:
    grid = figure.subplots(rows, len(schedules), sharex="col", squeeze=False)
    for column, (name, schedule) in zip(grid.T, schedules.items(), strict=True):
        column[0].set_title(name, fontsize=9)
        column[-1].set_xlabel("step")
        for axes, (quantity, lines) in zip(column, schedule.quantities.items(), strict=True):
            for line, values in lines.items():
                axes.plot(values, label=line)
            for step in schedule.begins[1:]:
                axes.axvline(step, color="gray", linestyle=":")
            axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
            if axes in grid[:, 0]:
                axes.set_ylabel(quantity)
            if len(lines) > 1:
                axes.legend()
    figure.align_ylabels()
