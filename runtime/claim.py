"""A claim: what runs of one source, configuration and seeds will show, written before them."""

import dataclasses
import inspect
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from runtime.errors import Refused
from runtime.jsonl import Json, json_hash, parse, read_regular
from runtime.log import config_hash
from runtime.source import read_sources, source_hash

SCHEMA = 2  # of a claim, whose runs have logs of schema 3
LEAST_RUNS, MOST_RUNS = 4, 10_000  # fewer runs may agree by chance
MOST_BYTES, MOST_ABOUT = 2**20, 1000  # of the file; of `about`, in characters
NAME = r"[A-Z][A-Za-z0-9]{1,60}"
SHA256 = "[0-9a-f]{64}"
HARMLESS = ("cache", "deterministic", "compile_threads")  # in a name: it speeds up no step
DAY = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
TIME = rf"{DAY}T([01][0-9]|2[0-3])(:[0-5][0-9]){{2}}(\.[0-9]+)?\+00:00"


@dataclass(frozen=True)
class Claim:
    """n runs, one for each seed, show at level alpha that the mean loss is below the target."""

    name: str
    track: str
    target: float  # nats per token
    alpha: float
    n: int
    seeds: list[int]
    looks: list[int]  # [n]: it is tested once, after all its runs
    source_sha256: str
    config_sha256: str
    config: Json
    flags: list[str]  # of train_gpt.py
    about: str  # what is changed and why it should help
    created: str  # ISO time, UTC
    schema: int = SCHEMA

    @property
    def id(self) -> str:
        """SHA-256 of all fields. Headers of runs hold it: the claim came before the runs."""
        return json_hash(dataclasses.asdict(self))


def read_claim(path: str | Path) -> Claim:
    """Read a claim. Refused if it breaks a rule."""
    known = dataclasses.fields(Claim)
    try:
        fields = parse(read_regular(Path(path), MOST_BYTES))
        if not isinstance(fields, dict):
            raise ValueError("it must be an object")
        json_hash(fields)  # as the id will be
        for field in known:
            if not _fits(fields.get(field.name), field.type):
                raise ValueError(f"{field.name} must be {inspect.formatannotation(field.type)}, "
                                 f"not {fields.get(field.name)!r:.80}")  # fmt: skip
    except OSError as error:
        raise Refused(f"cannot read the claim {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is no claim: {error}. Write it with record.py claim.") from None
    more = sorted(fields.keys() - {field.name for field in known})
    if fields["schema"] != SCHEMA or more:
        raise Refused(f"{path}: schema {fields['schema']} with fields {more} more; this version "
                      f"reads schema {SCHEMA}, and commit 759f432 schema 1.")  # fmt: skip
    claim = Claim(**fields)
    check_rules(claim, path)
    return claim


def check_rules(claim: Claim, where: object) -> None:
    """Refused for the first rule that the claim breaks."""
    n, seeds = claim.n, claim.seeds
    rules: list[tuple[Any, str]] = [
        (LEAST_RUNS <= n == len(set(seeds)) == len(seeds) <= MOST_RUNS,
         f"n = {n} must be {LEAST_RUNS} to {MOST_RUNS}, with as many different seeds"),
        (min(seeds, default=0) >= 0, f"seeds must be at least 0, not {min(seeds, default=0)}"),
        (claim.looks == [n], f"looks must be [{n}]: a claim is tested once, after all its runs"),
        (0 < claim.target < 100, f"target {claim.target!s:.20} must be between 0 and 100"),
        (0 < claim.alpha < 1, f"alpha {claim.alpha!s:.20} must be between 0 and 1"),
        (re.fullmatch(SHA256, claim.source_sha256),  # it becomes the name of a folder
         f"source_sha256 must be 64 hexadecimal digits, not {claim.source_sha256!r:.80}"),
        (re.fullmatch(SHA256, claim.config_sha256),
         f"config_sha256 must be 64 hexadecimal digits, not {claim.config_sha256!r:.80}"),
        (re.fullmatch(TIME, claim.created),
         f"created must be a time like 2026-01-31T12:00:00+00:00, not {claim.created!r:.80}"),
        (re.fullmatch(NAME, claim.name), f"name {claim.name!r} must be a CamelName"),
        (claim.about.isprintable() and len(claim.about.strip()) == len(claim.about) <= MOST_ABOUT,
         f"about must be one line, without spaces around it, of at most {MOST_ABOUT} characters"),
    ]  # fmt: skip
    for holds, rule in rules:
        if not holds:
            raise Refused(f"{where}: {rule}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        return isinstance(value, list) and all(type(each) is item for each in value)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is (get_origin(kind) or kind)


def check_claim(path: str, source: Path, config: Json, seeds: list[int]) -> str | None:
    """The id of the claim at `path`, None without a path. Refused if these runs do not fit."""
    if not path:
        return None
    claim = read_claim(path)
    flags = " ".join(claim.flags)
    for what, mine, claimed, fix in (
        ("source", source_hash(source), claim.source_sha256, "go back to the claimed source"),
        ("configuration", config_hash(config), claim.config_sha256, f"give the flags {flags!r}"),
    ):
        if mine != claimed:
            raise Refused(f"{path}: the {what} is {mine:.12} but {claimed:.12} was claimed. "
                          f"Either {fix} or write a new claim.")  # fmt: skip
    if strangers := sorted(set(seeds) - set(claim.seeds)):
        raise Refused(f"{path}: seeds {strangers} are not among the claimed {claim.seeds}. "
                      f"Choose --seed and --trials inside them, or write a new claim.")
    settings = [name for name in sorted(os.environ) if name.startswith("TORCHINDUCTOR_")]
    if forbidden := forbidden_flags(settings):
        raise Refused(f"{path}: {forbidden[0]} is set, but a claim has only the compiler's "
                      f"defaults. Unset it.")  # fmt: skip
    return claim.id


def forbidden_flags(flags: Iterable[str]) -> list[str]:
    """Those of the compiler settings, each NAME or NAME=value, that no track allows."""
    return [flag for flag in flags
            if not any(word in flag.partition("=")[0].lower() for word in HARMLESS)]  # fmt: skip


# ---- Whose code a process runs

CUSTOM = ("sitecustomize", "usercustomize")  # Python runs them at its start, unasked


def provenance(source: Path) -> Json:
    """The field `modules_from_elsewhere` of the header's env."""
    own = {str(source / name) for name in read_sources(source)}
    return {"modules_from_elsewhere": modules_from_elsewhere(own)}


def modules_from_elsewhere(own: set[str]) -> list[str]:
    """"name path" of loaded modules that are not ours, Python's or the environment's.

    `own` are the files that the source hash covers. sitecustomize and usercustomize are named even
    in the environment.
    """
    library = os.path.join(sysconfig.get_path("stdlib"), "")
    environment = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    environment += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        environment.append(site.getusersitepackages())
    installed = tuple(os.path.join(folder, "") for folder in environment)
    found = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not os.path.isabs(file):
            continue
        path = os.path.abspath(file)
        expected = name not in CUSTOM if path.startswith(installed) else path.startswith(library)
        if not expected and os.path.realpath(file) not in own:
            found.append(f"{name} {path}")
    return found
