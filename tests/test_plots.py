"""Pictures show what the numbers say. test_records.py has the committed ones of a track."""

import statistics
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure

from claims.plots import (
    draw_effects,
    draw_losses,
    loss_curves,
    plot_effects,
    plot_losses,
)
from claims.runs import Run, Step, Validation
from claims.stats import Difference


def make_run(trained: list[float], validated: float = 3.0) -> Run:
    steps = [Step(step, None, loss, step * 10**6) for step, loss in enumerate(trained, 1)]
    last = Validation(len(trained), validated, None)
    return Run(path=Path("a"), run_id="a", header={}, total_steps=len(trained),
               validations=[last], steps=steps, unfinished=None)  # fmt: skip


def test_a_point_of_a_curve_is_the_mean_over_a_tenth_of_the_run_up_to_it():
    losses = [[*np.random.default_rng(seed).normal(3, 1, 100)] for seed in range(5)]
    steps, curves = loss_curves([make_run(row) for row in losses])
    assert (steps[0], steps[-1]) == (10, 100)
    for at in (0, 3, 90):
        means = [statistics.fmean(row[at : at + 10]) for row in losses]
        assert curves[:, at] == pytest.approx(means)


def test_the_picture_holds_target_band_and_last_validations():
    axes = Figure().subplots()
    losses = [3.0, 3.1, 3.2, 3.3, 3.4]
    draw_losses(axes, {"A": [make_run([loss] * 12, loss) for loss in losses]}, 0.1)
    bottom, top = axes.get_ylim()
    assert bottom < 0.1 < 3.4 < top
    (last,), (loss,) = axes.lines[1].get_data()
    assert (last, loss) == (12, pytest.approx(3.2))
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((3.02, 3.38))  # 5 % of four gaps


EFFECTS = {
    "worse": Difference(0.02, 0.01, 0.01, 0.03),
    "best": Difference(-1.0, 0.001, -1.2, -0.8),
    "better": Difference(-0.005, 0.5, -0.02, 0.01),
}


def test_effects_are_sorted_and_a_bar_spans_each_interval():
    axes = Figure().subplots()
    draw_effects(axes, EFFECTS, {"best", "worse"}, "effect")
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["worse", "better", "best"], "from below"
    for row, name in enumerate(labels):
        bar, dot = axes.lines[2 * row : 2 * row + 2]
        assert (*bar.get_xdata(), *bar.get_ydata()) == (*EFFECTS[name][2:], row, row)
        assert (*dot.get_xdata(), *dot.get_ydata()) == (EFFECTS[name].mean, row)
        assert (dot.get_markerfacecolor() == "white") == (name == "better")
    left, right = axes.get_xlim()
    assert left < -1.2 < 0.03 < right


def test_the_users_settings_change_nothing(tmp_path):
    claims, path = {"A$_1$": [make_run([3.0] * 12)]}, tmp_path / "losses.svg"
    plot_losses(claims, 3.28, path)
    before = path.read_text()
    assert "A$_1$, 1 runs" in before
    with rc_context({"font.size": 20, "svg.hashsalt": None, "axes.facecolor": "red"}):
        plot_losses(claims, 3.28, path)
    assert path.read_text() == before


def test_a_picture_has_a_light_ground_a_dark_mode_and_the_same_bytes_again(tmp_path):
    path = tmp_path / "effects.svg"
    plot_effects(EFFECTS, ["best"], "effect", path)
    before = path.read_text()
    style = ElementTree.fromstring(before).find(".//{*}style").text
    assert "@media (prefers-color-scheme: dark) {svg {filter: invert(" in style
    assert 'style="fill: #ffffff"' in before.partition('id="axes_1"')[0]
    with rc_context({"font.size": 20, "svg.hashsalt": None, "savefig.transparent": True}):
        plot_effects(EFFECTS, ["best"], "effect", path)
    assert path.read_text() == before
