"""Command-line flags, --help and --print-config from the fields of one dataclass, so that a setting is written once."""

import argparse
import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar

Settings = TypeVar("Settings")


def setting(default: Any, about: str, *, one_of: Sequence[str] = (), at_least: float | None = None) -> Any:
    """A dataclass field with the text that --help shows for it, and what `check_fields` asks of its value."""
    return dataclasses.field(default=default, metadata={"about": about, "one_of": one_of, "at_least": at_least})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_text(value: Any) -> str:
    """A value as on the command line: on and off, auto for None, and commas between the members of a tuple."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def as_flags(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{flag(name)} {as_text(value)}" for name, value in settings.items())


def from_text(kind: Any, text: str) -> Any:
    """The inverse of `as_text` for bool, int, float, str, a tuple of them or one | None; ValueError for other text."""
    if isinstance(kind, UnionType):
        return None if text == "auto" else from_text(kind.__args__[0], text)
    if kind is bool:
        if text not in ("on", "off"):
            raise ValueError(text)
        return text == "on"
    if kind is str:
        return text
    if kind is int and re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+", text):
        return int(text.replace(",", ""))
    if kind in (int, float):
        return kind(text)
    parts = text.split(",")
    if kind.__args__[-1] is not Ellipsis and len(parts) != len(kind.__args__):
        raise ValueError(text)
    return tuple(from_text(kind.__args__[0], part) for part in parts)


def require(settings: Any, rules: Mapping[str, tuple[bool, str]]) -> None:
    """Raise ValueError for the first setting whose rule, kept or not and in words, is broken."""
    for name, (kept, rule) in rules.items():
        if not kept:
            raise ValueError(f"{flag(name)} {as_text(getattr(settings, name))}: it must be {rule}.")


def check_fields(settings: Any) -> None:
    """Raise ValueError for a value that is none of its field's choices or below its least."""
    for f in dataclasses.fields(settings):
        value, known, least = getattr(settings, f.name), f.metadata["one_of"], f.metadata["at_least"]
        require(settings, {f.name: (not known or value in known, f"one of {', '.join(known)}")})
        require(settings, {f.name: (least is None or value is None or value >= least, f"at least {least}")})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(f"{message}. --help lists the flags.")


def _values(field: dataclasses.Field) -> str:
    choices = ("on", "off") if field.type is bool else field.metadata["one_of"]
    return "|".join(choices) or ("auto|X" if isinstance(field.type, UnionType) else "X")


def _parser(kind: type, defaults: dict[str, Any], description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        usage="train_gpt.py [flags]", description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False, add_help=False,
    )  # fmt: skip
    parser.add_argument("--help", "-h", action="store_true", help="show this text with the values of the preset")
    parser.add_argument("--print-config", action="store_true", help="print every setting as JSON and stop")
    for f in dataclasses.fields(kind):
        value = as_text(defaults.get(f.name, f.default))
        text = f"{f.metadata['about']} [{value}]".replace("%", "%%")
        switch: dict[str, Any] = {"nargs": "?", "const": "on"} if f.type is bool else {}  # alone it means on
        parser.add_argument(flag(f.name), metavar=_values(f), help=text, **switch)
    return parser


def parse(
    kind: Callable[..., Settings], argv: list[str], preset: Callable[[dict[str, Any]], dict[str, Any]], description: str
) -> Settings:
    """An instance of the dataclass `kind` from flags; `preset` gives the values under those that were given.

    Raises ValueError naming the flag, the rule and the nearest flag; SystemExit(0) after --help and --print-config.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    known, unknown = _parser(kind, {}, description).parse_known_args(argv)  # type: ignore[arg-type]
    for word in unknown:
        near = difflib.get_close_matches(word.split("=")[0], [flag(name) for name in fields], n=1, cutoff=0.5)
        raise ValueError(f"{word}: no such flag. " + (f"Did you mean {near[0]}?" if near else "--help lists them all."))
    texts = {name: text for name, text in vars(known).items() if name in fields and text is not None}
    given = {name: _read(fields[name], text) for name, text in texts.items()}
    values = preset(given) | given
    if known.help:
        print(_parser(kind, values, description).format_help())  # type: ignore[arg-type]
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
        kind = getattr(field.type, "__name__", str(field.type))
        example = as_text(field.default)
        raise ValueError(f"{flag(field.name)} {text}: it takes a value like {example} ({kind}).") from None
