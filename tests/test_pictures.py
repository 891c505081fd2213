"""The pictures of a track: what they show is what the logs say, and they come out the same every time."""

import statistics
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure
from test_export import write_run

from claims import pictures
from claims.pictures import POINTS, PictureError, loss_curve, loss_curves, timeline
from claims.runlog import Run, Step, read_run

HISTORY = [("2026-11-21", "AdamW", 740, 278.24), ("2026-11-21", "Muon", 660, 298.75), ("2026-12-02", "Next", 310, 160)]


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Five runs that validated at steps 10 to 60; run k lies k/10 above the first and takes 1 + k squared ms a step."""
    return [
        read_run(write_run(tmp_path, f"run{k}", {s: 10 / s + k / 10 for s in range(10, 61, 10)}, ms=1.0 + k * k))
        for k in range(5)
    ]


def trained(run: Run, losses: list[float | None]) -> Run:
    """The run as if it had these training losses."""
    run.__dict__["steps"] = [Step(step, 2.0 * step, None, None, False, loss) for step, loss in enumerate(losses, 1)]
    run.validations[:-1] = []
    return run


def drawn(monkeypatch, make, *arguments) -> Figure:
    """The figure that a picture is made of."""
    figure = Figure()
    monkeypatch.setattr(pictures, "write", lambda draw, size, path: draw(figure))
    make(*arguments)
    return figure


def texts(svg: Path) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


# ---- Curves


def test_a_curve_is_the_median_of_the_runs_with_the_band_that_holds_90_percent(runs):
    curve = loss_curve(runs)
    assert curve.kind == "validation"
    assert [*curve.steps] == [10, 20, 30, 40, 50, 60]
    for index, step in enumerate(curve.steps):
        losses = sorted(dict(run.losses)[step] for run in runs)
        assert curve.median[index] == pytest.approx(statistics.median(losses))
        assert curve.low[index] == pytest.approx(losses[0] + 0.2 * (losses[1] - losses[0]))  # 5 % of four gaps
        assert curve.high[index] == pytest.approx(losses[-1] - 0.2 * (losses[-1] - losses[-2]))
        assert curve.seconds[index] == pytest.approx(step * 5 / 1000)  # of the third run


def test_runs_with_few_validations_show_the_running_mean_of_their_training_losses(runs):
    generator = np.random.default_rng(0)
    losses = [[*generator.normal(3, 1, 100)] for _ in runs[:3]]
    curve = loss_curve([trained(run, values) for run, values in zip(runs, losses, strict=False)])
    assert curve.kind == "training"
    for index in (0, 3, 50, 99):
        window = slice(max(0, index - 5), index + 5)
        means = [statistics.fmean(values[window]) for values in losses]
        assert curve.median[index] == pytest.approx(statistics.median(means))


def test_only_steps_whose_loss_every_run_knows_are_shown(runs):
    curve = loss_curve([trained(runs[0], [3.0, None, 3.0, 3.0]), trained(runs[1], [3.0, 3.0, 3.0, None])])
    assert [*curve.steps] == [1, 3]


def test_without_any_training_loss_the_validations_are_shown_however_few(runs):
    curve = loss_curve([trained(run, [None]) for run in runs])
    assert (curve.kind, [*curve.steps]) == ("validation", [60])


def test_a_long_curve_is_thinned_but_keeps_its_ends(runs):
    curve = loss_curve([trained(runs[0], [3.0] * 5000)])
    assert (curve.steps[0], curve.steps[-1], len(curve.steps)) == (1, 5000, POINTS)
    assert curve.median == pytest.approx(3.0)


def test_the_panels_hold_the_target_the_settled_curves_and_the_last_validations(monkeypatch, runs):
    by_step, by_clock = drawn(monkeypatch, loss_curves, {"A": runs}, 0.1, Path()).axes
    bottom, top = by_step.get_ylim()
    assert bottom < 0.1 < top
    assert bottom < min(run.final_loss for run in runs) < max(dict(run.losses)[10] for run in runs) < top
    assert list(by_clock.lines[0].get_xdata()) == pytest.approx([step * 5 / 1000 for step in range(10, 61, 10)])
    (last,), (loss,) = by_step.lines[1].get_data()
    assert (last, loss) == (60, pytest.approx(10 / 60 + 0.2))


# ---- Time line


def test_the_time_line_is_a_staircase_from_record_to_record(monkeypatch):
    steps, seconds = drawn(monkeypatch, timeline, HISTORY, Path()).axes
    assert steps.lines[0].get_drawstyle() == "steps-post"
    assert list(steps.lines[0].get_ydata()) == [740, 660, 310, 310]
    assert list(seconds.lines[0].get_ydata()) == [278.24, 298.75, 160.0, 160.0]
    assert [text.get_text() for text in seconds.texts] == ["278.2", "298.8", "160.0"]


# ---- Files


def test_pictures_are_labelled(tmp_path, runs):
    words = texts(timeline(HISTORY, tmp_path / "time")[0])
    assert {"AdamW", "Muon", "Next", "2026-12-02", "740", "298.8", "steps"} <= set(words)
    words = texts(loss_curves({"A$_1$": runs, "B": runs[:2]}, 3.28, tmp_path / "loss")[0])
    assert {"A$_1$: validation loss, 5 runs", "B: validation loss, 2 runs", "target 3.28", "step"} <= set(words)


def test_drawing_again_changes_nothing_whatever_the_users_settings(tmp_path, runs):
    paths = timeline(HISTORY, tmp_path / "v1.time") + loss_curves({"A": runs}, 3.28, tmp_path / "v1.loss")
    assert [path.name for path in paths] == ["v1.time.svg", "v1.time.png", "v1.loss.svg", "v1.loss.png"]
    before = [path.read_bytes() for path in paths]
    assert all(content.startswith(b"\x89PNG") for content in before[1::2])
    with rc_context({"font.size": 20, "svg.hashsalt": None, "axes.facecolor": "red", "savefig.dpi": 30}):
        timeline(HISTORY, tmp_path / "v1.time")
        loss_curves({"A": runs}, 3.28, tmp_path / "v1.loss")
    assert [path.read_bytes() for path in paths] == before


def test_a_track_without_a_record_has_pictures_too(tmp_path):
    for path in timeline([], tmp_path / "time") + loss_curves({"A": []}, 3.28, tmp_path / "loss"):
        assert path.stat().st_size > 1000


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PictureError, match=r"pip install -r requirements-dev\.txt"):
        timeline(HISTORY, tmp_path / "time")
