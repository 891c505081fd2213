"""The picture of a track: it shows what the logs say, and comes out the same every time."""

import statistics
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure
from small_record import make_claim, write_record

from claims.plots import draw_losses, loss_curves, plot_losses
from claims.runlog import read_all
from claims.runs import Run, Step


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Run]:
    losses = [3.0, 3.1, 3.2, 3.3, 3.4]
    folder = write_record(tmp_path_factory.mktemp("records"), make_claim(n=5), losses)
    return read_all([folder / "runs"])[0]


def trained(run: Run, losses: list[float | None]) -> Run:
    """The run as if it had these training losses."""
    steps = [Step(step, 2.0 * step, loss) for step, loss in enumerate(losses, 1)]
    return replace(run, steps=steps, validations=run.validations[-1:])


def test_a_point_of_a_curve_is_the_mean_over_a_tenth_of_the_run_up_to_it(runs):
    losses = [[*np.random.default_rng(seed).normal(3, 1, 100)] for seed in range(5)]
    steps, curves = loss_curves([trained(runs[0], row) for row in losses])
    assert (steps[0], steps[-1]) == (10, 100)
    for at in (0, 3, 90):
        means = [statistics.fmean(row[at : at + 10]) for row in losses]
        assert curves[:, at] == pytest.approx(means)


def test_the_picture_holds_target_band_and_last_validations(runs):
    axes = Figure().subplots()
    draw_losses(axes, {"A": [trained(run, [run.final_loss] * 12) for run in runs]}, 0.1)
    bottom, top = axes.get_ylim()
    assert bottom < 0.1 < 3.4 < top
    (last,), (loss,) = axes.lines[1].get_data()
    assert (last, loss) == (12, pytest.approx(3.2))
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((3.02, 3.38))  # 5 % of four gaps


def test_drawing_again_changes_nothing_whatever_the_users_settings(tmp_path, runs):
    path = tmp_path / "losses.svg"
    plot_losses({"A$_1$": runs, "B": runs[:2]}, 3.28, path)
    before = path.read_bytes()
    nodes = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    words = {"".join(node.itertext()) for node in nodes}
    assert {"A$_1$, 5 runs", "B, 2 runs", "target 3.28", "step"} <= words
    with rc_context({"font.size": 20, "svg.hashsalt": None, "axes.facecolor": "red"}):
        plot_losses({"A$_1$": runs, "B": runs[:2]}, 3.28, path)
    assert path.read_bytes() == before
