"""Pictures, as SVG: steps and records of a track; light and dark."""

from collections.abc import Callable, Sequence
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

from claims.pages import mean_probe, records_among
from claims.record import Evidence
from runtime.errors import Refused

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
# Black and white are swapped; colours keep their hue.
DARK = "@media (prefers-color-scheme: dark) {svg {filter: invert(0.93) hue-rotate(180deg)}}"
HOLLOW = {"color": "gray", "markerfacecolor": "white"}
PROBES = {"copy_loss": "copied tokens", "new_loss": "new tokens"}


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
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue().replace("</style>", f"{DARK}</style>", 1)
    path.write_text(svg, encoding="utf-8", newline="\n")


# ---- Steps to the target


def plot_steps(claims: Sequence[Evidence], path: Path) -> None:
    """Write the steps of each claim, the most at the top, beside its loss by kind of token."""
    size = 8, 1.2 + 0.4 * len(claims)
    write_picture(path, size, lambda figure: draw_steps(figure, claims))


def draw_steps(figure: Any, claims: Sequence[Evidence]) -> None:
    bars, dots = figure.subplots(1, 2, sharey=True)
    claims = sorted(claims, key=lambda one: one.claim.config["steps"])
    names = [one.claim.name for one in claims]
    drawn = bars.barh(names, [one.claim.config["steps"] for one in claims], height=0.6)
    bars.bar_label(drawn, padding=3)
    bars.margins(x=0.12)  # room for the longest label
    bars.set_xlabel(f"steps to a loss of {claims[0].claim.target:g}")
    for probe, label in PROBES.items():
        losses = {one.claim.name: mean_probe(one, probe) for one in claims}
        known = {name: loss for name, loss in losses.items() if loss is not None}
        dots.plot(list(known.values()), list(known), "o", label=label)
    dots.set_xlabel("loss at the end, nats per token")
    dots.legend()


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
        dates.append(when(claims[-1]))  # until then the last record holds
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
