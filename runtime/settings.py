"""Settings: dataclass fields that become flags, --help and checks."""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from runtime.errors import Refused

Settings = TypeVar("Settings")

# Rules of a value: the words of the error message, and how the value compares with the limit.
RULES: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": operator.ge,
    "at_most": operator.le,
    "below": operator.lt,
    "a_multiple_of": lambda value, unit: 0 < unit <= value and value % unit == 0,
}


def setting(
    default: Any, about: str, *, section: str = "", one_of: Sequence[str] = (), **rules: Any
) -> Any:
    """Return a dataclass field with its --help text and the rules of its value.

    `section` titles a new group of flags in --help, for this field and those after it. `one_of`
    holds for flags. `rules` are any of RULES with a limit: a number or the name of another setting.
    A number must be at least 0 unless another `at_least` is given.
    """
    facts = {"about": about, "section": section, "one_of": one_of, "rules": rules}
    return dataclasses.field(default=default, metadata=facts)


def refusal(settings: Any, name: str, rule: str) -> Refused:
    """The error for a setting whose value breaks a rule; `rule`: what it must be."""
    return Refused(f"{flag(name)} {as_text(getattr(settings, name))}: it must be {rule}.")


def require(settings: Any, name: str, holds: bool, rule: str) -> None:
    """Raise the `refusal` of this setting if its rule does not hold."""
    if not holds:
        raise refusal(settings, name, rule)


DASHBOARDS = ("none", "tensorboard", "trackio", "wandb")  # packages of these names


@dataclass(frozen=True)
class RunSettings:
    """Settings that do not belong to the experiment."""

    seed: int = setting(0, "seed of the first trial; trial i has seed + i", section="Runs")
    trials: int = setting(1, "runs in this process, after one compilation", at_least=1)
    data_dir: str = setting("data/prose", "folder of the *train_*.bin and *val_*.bin shards")
    log_dir: str = setting("logs", "folder of the run logs")
    claim: str = setting("", "path of the claim.json that the runs belong to")
    checkpoint_every: int = setting(1000, "steps between saves; 0: only on a signal")
    checkpoint_dir: str = setting("checkpoints", "folder of the checkpoints")
    keep_model: bool = setting(True, "keep the trained model, in checkpoints/RUN/final")
    sample_tokens: int = setting(100, "tokens to sample from the model after the last run")
    resume: str = setting("off", "auto: finish runs that were interrupted", one_of=("off", "auto"))
    rank_timeout: float = setting(600.0, "seconds ranks wait for others", at_least=1, at_most=86400)
    quick: bool = setting(False, "validate on one batch, skip sample and checks at the end: a look")
    dry_run: bool = setting(False, "check everything, measure time and memory, and stop")
    log_to: str = setting("none", "also send the log to this dashboard", one_of=DASHBOARDS)
    verbose: bool = setting(False, "print which backends and optimizers are used, and why")

    def __post_init__(self) -> None:
        """Raise Refused for the first field whose value breaks one of its rules or is not finite.

        Each number of a tuple must keep the rules.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple) else (value,)
            finite = all(math.isfinite(value) for value in values if isinstance(value, float))
            require(self, field.name, finite, "a finite number")
            rules = field.metadata["rules"]
            if not isinstance(value, str | bool):
                rules = {"at_least": 0} | rules
            for rule, limit in rules.items():
                words = rule.replace("_", " ")
                if isinstance(limit, str):  # the name of another setting
                    words, limit = f"{words} {flag(limit)}", getattr(self, limit)
                kept = all(RULES[rule](value, limit) for value in values)
                require(self, field.name, kept, f"{words} {limit}")


def require_packages(settings: RunSettings) -> None:
    """Refused if the package of the dashboard is missing."""
    package = settings.log_to
    if package != "none" and importlib.util.find_spec(package) is None:
        raise Refused(f"--log-to {package}: its package is missing. pip install {package}")


# Runs of one experiment may differ in these. The claims of `small` have two that are gone.
GONE = ("progress", "quick_vals")
SETTINGS_OF_A_RUN = (*(field.name for field in dataclasses.fields(RunSettings)), *GONE)


# ---- Flags


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_text(value: Any) -> str:
    """Write a value as the command line reads it: on, off, commas in a tuple."""
    if value is None:
        return "auto"  # some settings of older logs
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def reader(read: Callable[[str], Any], rule: str) -> Callable[[str], Any]:
    """Return `read` for argparse: its error says what a text must be."""

    def read_or_refuse(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{text!r}: it must be {rule}") from None

    return read_or_refuse


def two_numbers(text: str) -> tuple[float, float]:
    first, second = text.split(",")
    return float(first), float(second)


SWITCH = {"metavar": "on|off", "nargs": "?", "const": True}  # the flag alone: on
# What argparse needs to know of a flag, by the type of its field.
FLAGS: dict[Any, dict[str, Any]] = {
    bool: SWITCH | {"type": reader({"on": True, "off": False}.__getitem__, "on or off")},
    str: {"metavar": "TEXT", "type": str},
}
for kind, metavar, read, rule in (
    (int, "N", int, "a whole number"),
    (float, "X", float, "a number"),
    (tuple[float, float], "X,X", two_numbers, "two numbers, such as 0.9,0.95"),
):
    FLAGS[kind] = {"metavar": metavar, "type": reader(read, rule)}


def parse(
    kind: Callable[..., Settings], argv: Sequence[str],
    preset: Callable[[dict[str, Any]], dict[str, Any]], description: str,
) -> Settings:  # fmt: skip
    """Return an instance of the dataclass `kind`, made from flags.

    `preset(given)` returns the defaults that belong to the given flags. Raises Refused, which names
    the flag and the rule, and SystemExit(0) after --help and --print-config.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    parser = _make_parser(fields, description)
    given = vars(parser.parse_args(argv))
    wants_help, wants_config = given.pop("help", False), given.pop("print_config", False)
    values = preset(given) | given
    if wants_help:  # before the rules are checked, so that broken settings can be looked up
        shown = {field.name: field.default for field in fields} | values
        parser.set_defaults(**{name: as_text(value) for name, value in shown.items()})
        parser.print_help()  # argparse ignores a closed pipe
        raise SystemExit(0)
    settings = kind(**values)
    if wants_config:
        text = json.dumps(dataclasses.asdict(settings), indent=2)  # type: ignore[call-overload]
        with contextlib.suppress(BrokenPipeError):  # a closed pipe, as before `| head`, is fine
            print(text)
        raise SystemExit(0)
    return settings


def read_settings(kind: Callable[..., Settings], settings: Any, folder: Path) -> Settings:
    """Return the settings of a kept model as an instance of the dataclass `kind`.

    Those of a run have their defaults, but for data_dir. Refused, which names a setting that does
    not fit.
    """
    if not isinstance(settings, dict):
        raise Refused(f"{folder}: config.json has no settings under `config`.")
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in settings.items() if name not in SETTINGS_OF_A_RUN}
    fix = "Use the source that trained it; for older models, commit 759f432."
    if differing := sorted(given.keys() ^ known.difference(SETTINGS_OF_A_RUN)):
        raise Refused(f"{folder}: settings {', '.join(differing)} are only in the model or only "
                      f"in this version. {fix}")  # fmt: skip
    given["data_dir"] = settings.get("data_dir", "")
    argv = [f"{flag(name)}={as_text(value)}" for name, value in given.items()]
    try:
        return parse(kind, argv, dict, description="")
    except Refused as error:
        raise Refused(f"{folder}: {error} {fix}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Refused, with the flags that an unknown one resembles, or whose end it is, as --lr."""
        _, _, unknown = message.partition("unrecognized arguments: ")
        word, flags = re.split("[ =]", unknown)[0], [*self._option_string_actions]
        like = [flag for flag in flags if word[:2] == "--" and flag.endswith(word[1:])]
        like = like or get_close_matches(word, flags, n=2)
        hint = f" Did you mean {' or '.join(like)}?" if like else ""
        raise Refused(f"{message}.{hint} --help lists the flags. Rates of parameter groups are in "
                      "GROUPS in train_gpt.py; removed flags are in commit 759f432.")


def _make_parser(fields: Sequence[dataclasses.Field], description: str) -> argparse.ArgumentParser:
    """Return a parser with a group for each section. It returns the given flags alone."""
    parser = _Parser(
        usage="train_gpt.py [--track NAME] [--steps N] [--seed N] [--trials N] [any flag below]",
        description=description, allow_abbrev=False, add_help=False,
        argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    # Not argparse's own --help: it would end the program before the preset is known.
    parser.add_argument("--help", "-h", action="store_true", help="show this text")
    parser.add_argument("--print-config", action="store_true", help="print all settings as JSON")
    for field in fields:
        facts = field.metadata
        if facts["section"]:
            group = parser.add_argument_group(facts["section"])
        options = dict(FLAGS[field.type])
        if facts["one_of"]:
            options |= {"choices": facts["one_of"], "metavar": None}  # argparse shows the choices
        group.add_argument(flag(field.name), help=f"{facts['about']} [%(default)s]", **options)
    return parser
