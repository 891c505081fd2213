"""Settings are dataclass fields: each becomes a flag, a line of --help and a check.

`RunSettings` holds the settings that do not belong to the experiment.
"""

import argparse
import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar

from runtime.errors import Refused

Settings = TypeVar("Settings")


Bound = float | str | None  # a number, or the name of the setting that has it


def setting(
    default: Any,
    about: str,
    *,
    section: str = "",
    one_of: Sequence[str] = (),
    at_least: Bound = None,
    at_most: Bound = None,
    below: Bound = None,
    multiple_of: Bound = None,
) -> Any:
    """Return a dataclass field with its --help text and the rules that `check_fields` applies.

    `section` begins a group of flags in --help, to which the fields behind this one belong too.
    """
    bounds = {"at_least": at_least, "at_most": at_most, "below": below, "multiple_of": multiple_of}
    metadata = {"about": about, "section": section, "one_of": one_of, "bounds": bounds}
    return dataclasses.field(default=default, metadata=metadata)


HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": lambda value, bound: value >= bound,
    "at_most": lambda value, bound: value <= bound,
    "below": lambda value, bound: value < bound,
    "multiple_of": lambda value, bound: value >= bound and value % bound == 0,
}


def require(settings: Any, rules: Mapping[str, tuple[bool, str]]) -> None:
    """Raise Refused for the first broken rule; a rule is (whether it holds, what must be true)."""
    for name, (holds, rule) in rules.items():
        if not holds:
            value = as_text(getattr(settings, name))
            raise Refused(f"{flag(name)} {value}: it must be {rule}.")


def check_fields(settings: Any) -> None:
    """Raise Refused for the first value that is none of its choices or outside its bounds."""
    for field in dataclasses.fields(settings):
        value, choices = getattr(settings, field.name), field.metadata["one_of"]
        if choices:
            require(settings, {field.name: (value in choices, f"one of {', '.join(choices)}")})
        for kind, bound in field.metadata["bounds"].items():
            if bound is None or value is None:
                continue
            limit, words = bound, str(bound)
            if isinstance(bound, str):
                limit = getattr(settings, bound)
                words = f"{flag(bound)} {limit}"
            rule = kind.replace("_", " ").replace("multiple", "a multiple")
            require(settings, {field.name: (HOLDS[kind](value, limit), f"{rule} {words}")})


@dataclass(frozen=True)
class RunSettings:
    """The settings that do not belong to the experiment."""

    seed: int = setting(0, "of the first trial; trial i takes seed + i", at_least=0, section="Runs")
    trials: int = setting(1, "runs in this process, after one compilation", at_least=1)
    data_dir: str = setting("data/fineweb10B", "folder of the *train_*.bin and *val_*.bin shards")
    log_dir: str = setting("logs", "folder of the run logs")
    claim: str = setting("", "claim.json that the runs must fit: source, configuration and seeds")
    checkpoint_every: str = setting("10m", "steps (500) or minutes (10m); 0: only when interrupted")
    checkpoint_dir: str = setting("checkpoints", "folder of the checkpoints")
    keep_model: bool = setting(False, "keep the last checkpoint of a finished run")
    resume: str = setting("", "auto: the unfinished runs of these settings; or a checkpoint folder")
    resume_anyway: bool = setting(False, "resume even with another source or configuration")
    rank_timeout: float = setting(600.0, "seconds ranks wait for each other", at_least=1, at_most=86_400)
    dry_run: bool = setting(False, "check everything, measure time and memory, and stop")

    def __post_init__(self) -> None:
        check_fields(self)
        Interval.parse(self.checkpoint_every)


# Two runs that differ only in these are runs of one experiment.
SETTINGS_OF_A_RUN = tuple(field.name for field in dataclasses.fields(RunSettings))


@dataclass(frozen=True)
class Interval:
    """How often a run is saved: every so many steps or minutes; both 0 means never."""

    steps: int = 0
    minutes: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """Read "500" (steps), "10m" (minutes) or "0" (never). Raises Refused."""
        if re.fullmatch(r"\d+", text):
            return cls(steps=int(text))
        if re.fullmatch(r"(\d+(\.\d*)?|\.\d+)m", text):
            return cls(minutes=float(text.removesuffix("m")))
        raise Refused(f"--checkpoint-every {text}: it must be steps (500), minutes (10m) or 0.")


# ---- Flags


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_text(value: Any) -> str:
    """Write a value as the command line takes it: on, off, auto for None, commas in a tuple."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(as_text(part) for part in value)
    return str(value)


def from_text(kind: Any, text: str) -> Any:
    """Invert `as_text` for bool, int, float, str, a tuple of one of them, or X | None.

    Raises ValueError for other text.
    """
    if isinstance(kind, UnionType):
        return None if text == "auto" else from_text(kind.__args__[0], text)
    if kind is bool:
        return {"on": True, "off": False}[text]
    if kind is int and re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+", text):
        return int(text.replace(",", ""))
    if kind in (int, float, str):
        return kind(text)
    parts = text.split(",")
    any_length = kind.__args__[-1] is Ellipsis
    if not any_length and len(parts) != len(kind.__args__):
        raise ValueError(text)
    return tuple(from_text(kind.__args__[0], part) for part in parts)


def parse(
    kind: Callable[..., Settings],
    argv: Sequence[str],
    preset: Callable[[dict[str, Any]], dict[str, Any]],
    description: str,
) -> Settings:
    """Return an instance of the dataclass `kind` from flags.

    `preset(given)` returns the values of the settings that no flag gives. Raises Refused, naming
    flag, rule and nearest flag; SystemExit(0) after --help and --print-config.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    known, unknown = _parser(kind, {}, description).parse_known_args(argv)
    if unknown:
        raise Refused(_no_such_flag(unknown[0], list(fields)))
    given = {}
    for name, field in fields.items():
        if (text := getattr(known, name)) is not None:
            given[name] = _read(field, text)
    values = preset(given) | given
    if known.help:  # before the rules are checked: help must not need settings that fit together
        print(_parser(kind, values, description).format_help())
        raise SystemExit(0)
    settings = kind(**values)
    if known.print_config:
        print(json.dumps(dataclasses.asdict(settings), indent=2))  # type: ignore[call-overload]
        raise SystemExit(0)
    return settings


def _read(field: dataclasses.Field, text: str) -> Any:
    try:
        return from_text(field.type, text)
    except (ValueError, KeyError):
        kind = getattr(field.type, "__name__", str(field.type))
        example = as_text(field.default)
        message = f"{flag(field.name)} {text}: it takes a value like {example} ({kind})."
        raise Refused(message) from None


def _no_such_flag(word: str, names: list[str]) -> str:
    flags = [flag(name) for name in names]
    near = difflib.get_close_matches(word.split("=")[0], flags, n=1, cutoff=0.5)
    advice = f"Did you mean {near[0]}?" if near else "--help lists them all."
    return f"{word}: no such flag. {advice}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise Refused(f"{message}. --help lists the flags.")


def _parser(kind: Any, shown: dict[str, Any], description: str) -> argparse.ArgumentParser:
    """One group of flags a section; `shown` has the values that --help prints in brackets."""
    parser = _Parser(
        usage="train_gpt.py [flags]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--help", "-h", action="store_true", help="show this text and stop")
    parser.add_argument("--print-config", action="store_true", help="print all settings as JSON")
    group = parser.add_argument_group()
    for field in dataclasses.fields(kind):
        if field.metadata["section"]:
            group = parser.add_argument_group(field.metadata["section"])
        value = as_text(shown.get(field.name, field.default))
        about = f"{field.metadata['about']} [{value}]".replace("%", "%%")
        alone = {"nargs": "?", "const": "on"} if field.type is bool else {}  # --flag means on
        group.add_argument(flag(field.name), metavar=_values(field), help=about, **alone)
    return parser


def _values(field: dataclasses.Field) -> str:
    if field.type is bool:
        return "on|off"
    if field.metadata["one_of"]:
        return "|".join(field.metadata["one_of"])
    return "auto|X" if isinstance(field.type, UnionType) else "X"
