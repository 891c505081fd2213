"""Settings: dataclass fields that become flags, --help and checks.

`RunSettings` has those that do not belong to the experiment.
"""

import argparse
import dataclasses
import difflib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar

from runtime.errors import Refused

Settings = TypeVar("Settings")


RULES: dict[str, Callable[[Any, Any], bool]] = {
    "one_of": lambda value, choices: value in choices,
    "at_least": operator.ge,
    "at_most": operator.le,
    "below": operator.lt,
    "multiple_of": lambda value, unit: 0 < unit <= value and value % unit == 0,
}


def setting(default: Any, about: str, *, section: str = "", **rules: Any) -> Any:
    """Return a dataclass field with its --help text and the rules that `check_fields` applies.

    `section` titles a new group of flags in --help, for this field and those after it. `rules` are
    any of RULES with a limit: numbers, the name of another setting, or choices for one_of.
    """
    facts = {"about": about, "section": section, "rules": rules}
    return dataclasses.field(default=default, metadata=facts)


def require(settings: Any, rules: Mapping[str, tuple[bool, str]]) -> None:
    """Raise Refused for the first broken rule: {name: (whether it holds, what must be true)}."""
    for name, (holds, rule) in rules.items():
        if not holds:
            value = as_text(getattr(settings, name))
            raise Refused(f"{flag(name)} {value}: it must be {rule}.")


def check_fields(settings: Any) -> None:
    """Raise Refused for the first field whose value breaks one of its rules."""
    for by_setting in (False, True):  # a setting must be checked before it limits others
        for field in dataclasses.fields(settings):
            for rule, limit in field.metadata["rules"].items():
                if isinstance(limit, str) == by_setting:
                    _check(settings, field.name, rule, limit)


def _check(settings: Any, name: str, rule: str, limit: Any) -> None:
    words = ", ".join(limit) if rule == "one_of" else str(limit)
    if isinstance(limit, str):
        words = f"{flag(limit)} {getattr(settings, limit)}"
        limit = getattr(settings, limit)
    value = getattr(settings, name)
    holds = value is None or RULES[rule](value, limit)
    start = rule.replace("_", " ").replace("multiple", "a multiple")
    require(settings, {name: (holds, f"{start} {words}")})


@dataclass(frozen=True)
class RunSettings:
    """Settings that do not belong to the experiment."""

    seed: int = setting(0, "of the first trial; trial i takes seed + i", at_least=0, section="Runs")
    trials: int = setting(1, "runs in this process, after one compilation", at_least=1)
    data_dir: str = setting("data/fineweb10B", "folder of the *train_*.bin and *val_*.bin shards")
    log_dir: str = setting("logs", "folder of the run logs")
    claim: str = setting("", "claim.json that the runs must fit: source, configuration and seeds")
    checkpoint_every: int = setting(1000, "steps between saves; 0: only on a signal", at_least=0)
    checkpoint_dir: str = setting("checkpoints", "folder of the checkpoints")
    keep_model: bool = setting(False, "keep the last checkpoint of a finished run")
    resume: str = setting("", "auto: the unfinished runs of these settings; or checkpoints/RUN")
    rank_timeout: float = setting(600.0, "seconds ranks wait for others", at_least=1, at_most=86400)
    dry_run: bool = setting(False, "check everything, measure time and memory, and stop")

    def __post_init__(self) -> None:
        check_fields(self)


# Runs of one experiment may differ in these.
SETTINGS_OF_A_RUN = tuple(field.name for field in dataclasses.fields(RunSettings))


# ---- Flags


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_text(value: Any) -> str:
    """Write a value as the command line takes it: on, off, auto for None, commas in a tuple."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def from_text(kind: Any, text: str) -> Any:
    """Invert `as_text` for bool, int, float, str, int | None and tuple[float, float].

    Raises ValueError for any other text.
    """
    if isinstance(kind, UnionType):
        return None if text == "auto" else int(text)
    if kind is bool:
        if text not in ("on", "off"):
            raise ValueError(text)
        return text == "on"
    if kind in (int, float, str):
        return kind(text)
    first, second = text.split(",")
    return float(first), float(second)


def parse(
    kind: Callable[..., Settings], argv: Sequence[str],
    preset: Callable[[dict[str, Any]], dict[str, Any]], description: str,
) -> Settings:  # fmt: skip
    """Return an instance of the dataclass `kind`, made from flags.

    `preset(given)` returns the defaults that belong to the given flags. Raises Refused, which names
    the rule or the nearest flag, and SystemExit(0) after --help and --print-config.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    known, unknown = _parser(kind, {}, description).parse_known_args(argv)
    for word in unknown:
        near = difflib.get_close_matches(word.split("=")[0], map(flag, fields), n=1, cutoff=0.5)
        advice = f"Did you mean {near[0]}?" if near else "--help lists them all."
        raise Refused(f"{word}: no such flag. {advice}")
    given = {}
    for name, field in fields.items():
        if (text := getattr(known, name)) is not None:
            given[name] = _read(field, text)
    values = preset(given) | given
    if known.help:  # before the rules are checked, so that broken settings can be looked up
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
    except ValueError:
        kind = getattr(field.type, "__name__", field.type)
        rule = f"it takes a value like {as_text(field.default)} ({kind})"
        raise Refused(f"{flag(field.name)} {text}: {rule}.") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise Refused(f"{message}. --help lists the flags.")


def _parser(kind: Any, shown: dict[str, Any], description: str) -> argparse.ArgumentParser:
    """Return a parser with a group for each section, whose --help shows the values in `shown`."""
    parser = _Parser(
        usage="train_gpt.py [flags]", description=description, allow_abbrev=False, add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--help", "-h", action="store_true", help="show this text and stop")
    parser.add_argument("--print-config", action="store_true", help="print all settings as JSON")
    group = parser.add_argument_group()
    for field in dataclasses.fields(kind):
        if field.metadata["section"]:
            group = parser.add_argument_group(field.metadata["section"])
        value = as_text(shown.get(field.name, field.default))
        about = f"{field.metadata['about']} [{value}]".replace("%", "%%")
        alone: Any = {"nargs": "?", "const": "on"} if field.type is bool else {}  # --flag means on
        group.add_argument(flag(field.name), metavar=_values(field), help=about, **alone)
    return parser


def _values(field: dataclasses.Field) -> str:
    choices = ("on", "off") if field.type is bool else field.metadata["rules"].get("one_of", ())
    return "|".join(choices) or ("auto|X" if isinstance(field.type, UnionType) else "X")
