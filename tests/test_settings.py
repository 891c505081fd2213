"""Settings: what is written is read back; what is wrong is said with flag and rule."""

import dataclasses
import json
from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import Refused
from runtime.settings import FLAGS, RunSettings, as_text, parse, setting

pytestmark = pytest.mark.core


@dataclass(frozen=True)
class Config(RunSettings):
    size: int = setting(8, "so many", at_least=1, section="Model")
    width: int = setting(16, "a multiple of the size", a_multiple_of="size")
    part: int = setting(2, "of the size", below="size")
    share: float = setting(0.5, "a share", at_least=0, at_most=1)
    kind: str = setting("new", "kind of model", one_of=("new", "old"))
    wide: bool = setting(False, "a switch", section="Rest")
    betas: tuple[float, float] = setting((0.9, 0.95), "two of them", below=1)
    scale: float = setting(1.0, "no rule of its own")


def config(*argv, preset=lambda given: {}):
    return parse(Config, argv, preset, "about")


def printed(capsys, *argv, **rest):
    with pytest.raises(SystemExit, match=r"^0$"):
        config(*argv, **rest)
    return capsys.readouterr().out


VALUES = {
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(allow_nan=False),
    str: st.text(),
    tuple[float, float]: st.tuples(*2 * [st.floats(allow_nan=False)]),
}


@given(data=st.data(), kind=st.sampled_from(list(VALUES)))
def test_a_value_written_as_text_is_read_back_unchanged(data, kind):
    value = data.draw(VALUES[kind])
    back = FLAGS[kind]["type"](as_text(value))
    assert (back, type(back)) == (value, type(value))


@pytest.mark.parametrize(("argv", "parts"), [
    ("--size many", ["--size: 'many'", "a whole number", "--help"]),
    ("--wide true", ["--wide: 'true'", "on or off", "--help"]),
    ("--betas 0.9", ["--betas: '0.9'", "such as 0.9,0.95"]),
    ("--kind odd", ["--kind", "'odd'", "new", "old"]),
    ("--siz=3", ["--siz=3", "Did you mean --size?", "--help"]),
    ("--zzz 3", ["--zzz 3. --help"]),
    ("--size 0", ["--size 0:", "at least 1"]),
    ("--share nan", ["--share nan:", "finite"]),
    ("--share -0.1", ["--share -0.1:", "at least 0"]),
    ("--share 1.5", ["--share 1.5:", "at most 1"]),
    ("--betas 0.9,1", ["--betas 0.9,1.0:", "below 1"]),
    ("--width 12", ["--width 12:", "a multiple of --size 8"]),
    ("--part 8", ["--part 8:", "below --size 8"]),
])  # fmt: skip
def test_an_input_that_cannot_work_is_refused_with_flag_value_and_rule(argv, parts):
    with pytest.raises(Refused) as refused:
        config(*argv.split())
    assert [part for part in parts if part not in str(refused.value)] == [], refused.value


def test_a_flag_wins_over_the_preset_and_the_preset_over_the_default():
    def preset(given):
        assert given == {"size": 4, "wide": True}
        return {"size": 2, "width": 8}

    found = config("--size", "4", "--wide", preset=preset)
    assert (found.size, found.width, found.wide, found.kind) == (4, 8, True, "new")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.size = 7


def test_help_shows_each_setting_and_its_value_even_one_that_breaks_its_rule(capsys):
    text = printed(capsys, "--width", "3", "--help", preset=lambda given: {"size": 5})
    assert "so many [5]" in text
    assert "a multiple of the size [3]" in text


def test_a_reader_that_left_is_no_error(monkeypatch, capsys):
    monkeypatch.setattr("builtins.print", mock.Mock(side_effect=BrokenPipeError))
    assert printed(capsys, "--print-config") == ""


def test_print_config_is_json_from_which_the_same_settings_follow(capsys):
    shown = json.loads(printed(capsys, "--seed", "5", "--print-config"))
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in shown.items()}
    assert Config(**values) == config("--seed", "5")
