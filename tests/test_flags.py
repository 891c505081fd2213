"""Flags: what is written is what is read, and what is wrong is said with the flag, the rule and the nearest name."""

import dataclasses
import json
import re
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runtime.flags import as_text, flag, from_text, parse, setting
from train_gpt import RECIPES, TRACKS, Config, preset

EVERY_RECIPE = [(track, recipe) for track in TRACKS for recipe in RECIPES[track]]


def config(*argv):
    return parse(Config, list(argv), preset, "about")


def printed(capsys, *argv):
    with pytest.raises(SystemExit) as stopped:
        config(*argv)
    assert stopped.value.code == 0
    return capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# Values

VALUES = {
    bool: st.booleans(),
    int: st.integers(-(10**12), 10**12),
    float: st.floats(allow_nan=False),
    str: st.text(),
    tuple[int, ...]: st.lists(st.integers(-1000, 1000), min_size=1).map(tuple),
    tuple[float, float]: st.tuples(*2 * [st.floats(allow_nan=False)]),
}


@given(data=st.data(), kind=st.sampled_from(list(VALUES)))
def test_a_value_written_as_text_is_read_back_unchanged(data, kind):
    value = data.draw(VALUES[kind])
    back = from_text(kind, as_text(value))
    assert back == value
    assert type(back) is type(value)


def test_thousands_may_be_separated():
    assert from_text(int, "262,144") == 262_144


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("steps", "many"), ("steps", "1.5"), ("steps", ""), ("steps", "1,2"), ("matrix_lr", "fast"), ("smear", "true"),
        ("smear", "1"), ("windows", ""), ("windows", "3,x"), ("windows", "3,,7"), ("momentum", "0.9"),
        ("momentum", "0.8,0.9,0.95"),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_an_error_that_shows_one_that_fits(name, text):
    example = as_text(Config.__dataclass_fields__[name].default)
    with pytest.raises(ValueError, match=f"{flag(name)} {text}: it takes a value like {example}"):
        config(flag(name), text)


def test_a_flag_without_its_value_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"--steps.*expected one argument.*--help"):
        config("--steps")


# ---------------------------------------------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("--matrx-lr", "--matrix-lr"), ("--val_every", "--val-every"), ("--window=3", "--windows"), ("--step", "--steps")],
)
def test_an_unknown_flag_suggests_the_nearest(word, nearest):
    with pytest.raises(ValueError, match=f"{word}: no such flag. Did you mean {nearest}\\?"):
        config(word, "3")


def test_an_unknown_word_that_resembles_no_flag_points_to_help():
    with pytest.raises(ValueError, match=r"qqqq: no such flag. --help lists them all"):
        config("qqqq")


@settings(max_examples=30)
@given(name=st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1))
def test_no_flag_outside_the_settings_is_taken(name):
    known = {flag(field.name) for field in dataclasses.fields(Config)} | {"--help", "--print-config"}
    assume("--" + name not in known and name != "-")  # "--" and "---" are words of the shell's own
    with pytest.raises(ValueError, match="no such flag"):
        config("--" + name)


# ---------------------------------------------------------------------------------------------------------------------
# Presets


def test_no_flags_give_the_tiny_track():
    assert config() == config("--track", "tiny", "--recipe", "record42")


@pytest.mark.parametrize(("track", "recipe"), EVERY_RECIPE)
def test_a_flag_wins_over_the_recipe_and_the_recipe_over_the_track(track, recipe):
    values = RECIPES[track][recipe]
    plain, chosen = config("--track", track), config("--track", track, "--recipe", recipe)
    for field in dataclasses.fields(Config):
        if field.name != "recipe":
            expected = values.get(field.name, getattr(plain, field.name))
            assert getattr(chosen, field.name) == expected
    assert config("--track", track, "--recipe", recipe, "--seed", "7", "--smear=off") == dataclasses.replace(
        chosen, seed=7, smear=False
    )


@pytest.mark.parametrize(("track", "recipe"), EVERY_RECIPE)
def test_print_config_is_json_from_which_the_same_run_follows(capsys, track, recipe):
    argv = ("--track", track, "--recipe", recipe, "--seed", "5")
    shown = json.loads(printed(capsys, *argv, "--print-config"))
    assert list(shown) == [field.name for field in dataclasses.fields(Config)]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in shown.items()}
    assert Config(**values) == config(*argv)
    flags = [word for name, value in values.items() for word in (flag(name), as_text(value))]
    assert config(*flags) == config(*argv)


@pytest.mark.parametrize(("track", "recipe"), EVERY_RECIPE)
def test_help_shows_every_setting_with_the_value_it_has_in_the_track(capsys, track, recipe):
    text = " ".join(printed(capsys, "--track", track, "--recipe", recipe, "--help").split())
    chosen = config("--track", track, "--recipe", recipe)
    for field in dataclasses.fields(Config):
        about, value = field.metadata["about"], as_text(getattr(chosen, field.name))
        assert re.search(rf"{flag(field.name)} \S+ {re.escape(about)} \[{re.escape(value)}\]", text)


def test_help_is_shown_even_where_the_settings_contradict_each_other(capsys):
    assert "--dim X" in printed(capsys, "--dim", "100", "--help")


def test_a_percent_sign_in_the_text_of_a_setting_is_shown_as_it_is(capsys):
    @dataclass
    class Settings:
        share: str = setting("50%", "so many % of it")

    with pytest.raises(SystemExit):
        parse(Settings, ["--help"], lambda given: {}, "100 % tested")
    assert "so many % of it [50%]" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# Rules of the configuration


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("track", "long", "one of short, medium, steps, tiny"),
        ("recipe", "record43", "one of record42, muon, adamw"),
        ("layers", "huge", "one of record42, medium, steps, tiny"),
        ("compile", "maybe", "one of auto, on, off"),
        ("softcap", "tanh", "one of sigmoid, rsqrt"),
        ("init", "xavier", "one of uniform, normal"),
        ("optimizer", "sgd", "one of normuon, muon, adam"),
        ("embed_dtype", "float16", "one of bfloat16, float32"),
        ("head_dtype", "float16", "one of bfloat16, float32"),
        ("dim", "200", "a multiple of head_dim"),
        ("steps", "10", "larger than the extension"),
        ("steps", "0", "at least 1"),
        ("trials", "0", "at least 1"),
        ("val_every", "-1", "at least 0"),
        ("cooldown", "1.5", "a share between 0 and 1"),
        ("cooldown", "nan", "at least 0"),
        ("adam_every", "0", "at least 1"),
        ("batch_tokens", "1000", "a multiple of sequence"),
        ("micro_batch", "511", "at least one row, 512"),
        ("val_tokens", "5000", "a multiple of val_sequence 4096"),
        ("val_batch", "10", "at least a row, 512"),
        ("bos", "1024", "a token of the vocabulary, below 1024"),
    ],
)
def test_a_broken_rule_is_an_error_that_names_the_flag_its_value_and_the_rule(name, value, rule):
    with pytest.raises(ValueError, match=rf"^{flag(name)} {value}: it must be {rule}"):
        config(flag(name), value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("head_dim", "0"), ("head_dim", "15"), ("sequence", "0"), ("val_sequence", "0"), ("windows", "0,7")],
)
def test_a_size_that_cannot_be_is_an_error_that_names_its_flag(name, value):
    with pytest.raises(ValueError, match=f"^{flag(name)} {value}: it must be"):
        config(flag(name), value)


def test_no_windows_at_all_are_an_error():
    with pytest.raises(ValueError, match="--windows : it must be one window or more"):
        Config(**preset({}) | {"windows": ()})


def test_a_configuration_cannot_be_changed_after_its_check():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().dim = 7
