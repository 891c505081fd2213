"""The drawing of schedules."""

import pytest

import train_gpt
from scripts import plot_schedules


def test_a_curve_has_the_trainers_value_at_each_step():
    config = train_gpt.Config(**train_gpt.preset({}))
    curves = plot_schedules.curves(config)
    assert {len(values) for values in curves.values()} == {config.steps}
    assert curves["learning rate, share of its peak"][-1] == pytest.approx(config.final_lr, rel=0.01)
    assert curves["long window, tokens"][0] == config.windows[0] * config.window_block
    assert curves["long window, tokens"][-1] == config.extension_window * config.window_block


def test_a_picture_is_written_for_every_track(tmp_path):
    for track in train_gpt.TRACKS:
        picture = tmp_path / f"{track}.svg"
        assert plot_schedules.main(["--out", str(picture), "--", "--track", track]) == 0
        assert "</svg>" in picture.read_text()


def test_a_wrong_flag_is_bad_input(tmp_path, capsys):
    assert plot_schedules.main(["--out", str(tmp_path / "x.svg"), "--", "--stepz", "3"]) == 2
    assert "Did you mean --steps?" in capsys.readouterr().err
