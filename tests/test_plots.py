"""Pictures show what the numbers say. test_records.py has the committed ones of a track."""

from xml.etree import ElementTree

from matplotlib import rc_context
from matplotlib.figure import Figure

from claims.plots import draw_effects, plot_effects
from claims.stats import Difference

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
