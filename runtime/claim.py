"""A claim: what will be shown, with which source, configuration and seeds, written before the runs that show it."""

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from runtime.jsonl import json_hash
from runtime.log import config_hash, source_hash

SCHEMA = 1
LEAST_RUNS, MOST_RUNS, MOST_LOOKS = 4, 10_000, 100  # fewer runs may lie close together by chance
MOST_BYTES = 2**20
NAME = r"[A-Z][A-Za-z0-9]{1,60}"
ITEMS: dict[str, type] = {"seeds": int, "looks": int, "flags": str}  # what the lists hold


class ClaimError(ValueError):
    """A claim that cannot be read, or runs that are not those of the claim."""


@dataclass(frozen=True)
class Claim:
    """n runs, one a seed, are to show at level alpha that the mean loss lies below the target."""

    name: str
    track: str
    target: float  # nats per token
    alpha: float
    n: int
    seeds: list[int]
    looks: list[int]  # numbers of runs after which the test is made; [n] for a single look at the end
    source_sha256: str
    config_sha256: str
    config: dict[str, Any]
    flags: list[str]  # of train_gpt.py
    about: str  # what is changed and why it should help
    created: str  # ISO time, UTC
    schema: int = SCHEMA

    @property
    def id(self) -> str:
        """SHA-256 of all that the claim says; the runs' headers carry it, so it cannot be written after them."""
        return json_hash(dataclasses.asdict(self))


def read_claim(path: str | Path) -> Claim:
    """Raises ClaimError, naming the file and the rule, for anything that is no claim."""
    if Path(path).exists() and not Path(path).is_file():  # a pipe would wait for ever
        raise ClaimError(f"cannot read the claim {path}: it is no regular file")
    if Path(path).exists() and (size := Path(path).stat().st_size) > MOST_BYTES:
        raise ClaimError(f"{path} is no claim: it has {size:,} bytes, and {MOST_BYTES:,} at most")
    try:
        fields = json.loads(Path(path).read_bytes())
        json_hash(fields)
    except OSError as error:
        raise ClaimError(f"cannot read the claim {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ClaimError(f"{path} is no claim: it must be JSON, as scripts/record.py claim writes it") from None
    kinds: dict[str, Any] = {field.name: get_origin(field.type) or field.type for field in dataclasses.fields(Claim)}
    for name, kind in kinds.items():
        value, of = fields.get(name) if isinstance(fields, dict) else None, ITEMS.get(name)
        right = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if not right or (of and any(type(item) is not of for item in value or ())):
            what = f"{kind.__name__} of {of.__name__}" if of else kind.__name__
            raise ClaimError(f"{path} is no claim: {name} must be a {what}, not {value!r:.80}")
    if fields["schema"] != SCHEMA or fields.keys() - kinds.keys():
        raise ClaimError(f"{path}: schema {fields['schema']} with fields {sorted(fields.keys() - kinds.keys())} more; "
                         f"this version reads schema {SCHEMA}")
    claim = Claim(**fields)
    if not LEAST_RUNS <= claim.n == len(set(claim.seeds)) == len(claim.seeds) <= MOST_RUNS:
        raise ClaimError(f"{path}: n = {claim.n} must be {LEAST_RUNS} to {MOST_RUNS}, with as many different seeds")
    looks = claim.looks[:MOST_LOOKS]
    if claim.looks != sorted({*looks, claim.n}) or looks[0] < LEAST_RUNS or looks[-1] != claim.n:
        raise ClaimError(f"{path}: looks must rise from {LEAST_RUNS} or more to n = {claim.n}, at most {MOST_LOOKS}")
    if not (0 < claim.target < 100 and 0 < claim.alpha < 1):
        raise ClaimError(f"{path}: target {claim.target!s:.20} must lie between 0 and 100, alpha {claim.alpha!s:.20} "
                         f"between 0 and 1")
    for name in ("source_sha256", "config_sha256"):  # one of them becomes the name of a folder
        if not re.fullmatch("[0-9a-f]{64}", getattr(claim, name)):
            raise ClaimError(f"{path}: {name} must be 64 hexadecimal digits, not {getattr(claim, name)!r:.80}")
    if not re.fullmatch(NAME, claim.name) or not claim.about.isprintable():
        raise ClaimError(f"{path}: name {claim.name!r} must be letters and digits, about one line of text")
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00", claim.created):
        raise ClaimError(f"{path}: created must be a time such as 2026-01-31T12:00:00+00:00, not {claim.created!r}")
    return claim


def admit(path: str, source: Path, config: dict[str, Any], seeds: list[int]) -> str | None:
    """The id of the claim at `path`, None for no path. ClaimError where runs of these could not show it."""
    if not path:
        return None
    claim = read_claim(path)
    rules = (
        ("source", source_hash(source), claim.source_sha256, "go back to the claimed source"),
        ("configuration", config_hash(config), claim.config_sha256, f"give the flags {' '.join(claim.flags)!r}"),
    )
    for what, mine, claimed, fix in rules:
        if mine != claimed:
            raise ClaimError(f"{path}: the {what} is {mine[:12]} but {claimed[:12]} was claimed. Either {fix} or "
                             f"write a new claim.")
    if strangers := sorted(set(seeds) - set(claim.seeds)):
        raise ClaimError(f"{path}: seeds {strangers} are not among the claimed {claim.seeds}. Choose --seed and "
                         f"--trials inside them, or write a new claim.")
    return claim.id
