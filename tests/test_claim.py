"""Claims and the registry of runs: what was written first cannot be changed."""

import dataclasses
import json
import re
import tempfile
from pathlib import Path
from typing import get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_record import make_claim
from small_run import BRIEF, ROOT, arguments, brief

import train_gpt
from runtime.claim import Claim, read_claim
from runtime.errors import LogError, Refused
from runtime.log import config_hash
from runtime.registry import read_registry, register
from runtime.settings import parse
from runtime.source import source_hash


@pytest.fixture(scope="module", autouse=True)
def _idle_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def write_claim(path: Path, **changed: object) -> Path:
    path.write_text(json.dumps(vars(make_claim(n=4, seed=7)) | changed))
    return path


# ---- The registry


def write_registry(path: Path, count: int) -> list[bytes]:
    for number in range(count):
        register(path, "start", run_id=f"run{number}", seed=number)
    return path.read_bytes().splitlines(keepends=True)


@given(count=st.integers(3, 6), data=st.data())
def test_a_line_but_the_last_that_was_removed_added_edited_or_moved_is_found_and_named(count, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "registry.jsonl"
        lines = write_registry(path, count)
        at = data.draw(st.integers(0, count - 2), label="line")
        kind = data.draw(st.sampled_from(["removed", "added", "edited", "moved"]))
        if kind == "removed":
            del lines[at]
        elif kind == "added":
            others = [*lines[:at], *lines[at + 1 :], b"noise\n", b"{}\n", b"\xff\n"]
            lines.insert(at, data.draw(st.sampled_from(others)))
        elif kind == "moved":
            lines[at], lines[at + 1] = lines[at + 1], lines[at]
        else:
            line = bytearray(lines[at])
            line[data.draw(st.integers(0, len(line) - 2), label="byte")] ^= 1
            lines[at] = bytes(line)
        path.write_bytes(b"".join(lines))
        with pytest.raises(LogError, match=rf"line ({at + 1}|{at + 2}): .*restore"):
            read_registry(path)


@given(st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=6))
def test_crashes_at_any_byte_lose_no_whole_line_and_do_not_break_the_chain(crashes):
    """Each append is followed by a crash that keeps a share of its bytes, or by none."""
    with tempfile.TemporaryDirectory() as folder:
        path, whole = Path(folder) / "registry.jsonl", []
        path.touch()
        for number, share in enumerate([*crashes, None]):
            before = path.stat().st_size
            register(path, "start", run_id=str(number))
            written = path.stat().st_size - before
            kept = written if share is None else round(share * written)
            with path.open("r+b") as file:
                file.truncate(before + kept)
            whole += [str(number)] * (kept >= written - 1)  # without its end a line is still whole
        assert [entry["run_id"] for entry in read_registry(path)] == whole


@pytest.mark.parametrize("changed", [{"run_id": None}, {"event": ["start"]}, {"previous": 0}])
def test_a_line_without_the_fields_of_all_lines_is_named(changed, tmp_path):
    path = tmp_path / "registry.jsonl"
    line = json.loads(write_registry(path, 1)[0]) | changed
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(LogError, match="line 1: not a line of a registry"):
        read_registry(path)


# ---- The claim

KINDS = {field.name: get_origin(field.type) or field.type for field in dataclasses.fields(Claim)}
NUMBERS = st.integers() | st.floats()
VALUES = st.none() | st.booleans() | NUMBERS | st.text() | st.lists(st.none()) | st.just({})


def assert_refused(sentence: str, **changed: object) -> None:
    """read_claim says so of a claim with changed fields."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_claim(Path(folder) / "claim.json", **changed)
        with pytest.raises(Refused, match=rf"claim\.json.*{sentence}"):
            read_claim(path)


@given(st.sampled_from(sorted(KINDS)), VALUES)
def test_a_field_of_the_wrong_type_is_refused_by_its_name(name, value):
    allowed = (int, float) if KINDS[name] is float else KINDS[name]
    if not isinstance(value, allowed) or isinstance(value, bool):
        assert_refused(f"is no claim: {name} must be", **{name: value})


@pytest.mark.parametrize(("changed", "sentence"), [
    ({"extra": 1}, r"fields \['extra'\]"),
    ({"seeds": [7, 8, 9, True]}, "seeds must be"),
    ({"looks": [4.0]}, "looks must be"),
    ({"flags": ["--steps", 12]}, "flags must be"),
    ({"schema": 3}, "schema 3.* reads schema 2"),
    ({"seeds": [-1, 7, 8, 9]}, "seeds must be at least 0, not -1"),
    ({"n": 3}, "n = 3 .*different seeds"),
    ({"seeds": [7, 7, 8, 9]}, "as many different seeds"),
    *(({"looks": looks}, "look") for looks in ([], [2, 3], [3, 2, 4], [1, 4])),
])  # fmt: skip
def test_a_claim_that_breaks_a_rule_is_refused_with_it(changed, sentence):
    assert_refused(sentence, **changed)


HOSTILE = st.sampled_from([b"[" * 10**5, b"[]", b"null", b"1" * 10**4])


@given(st.binary() | st.text().map(str.encode) | HOSTILE)
def test_bytes_that_are_no_claim_are_refused_in_a_sentence(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "claim.json"
        path.write_bytes(content)
        with pytest.raises(Refused, match="is no claim"):
            read_claim(path)
        with pytest.raises(Refused, match="cannot read the claim"):
            read_claim(path.parent)


def test_the_id_ignores_layout_and_order_and_sees_every_value(tmp_path):
    path = write_claim(tmp_path / "claim.json")
    claim, fields = read_claim(path), json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(fields.items())), indent=3))
    assert read_claim(path).id == claim.id
    for name, value in fields.items():
        other = {"steps": 13} if name == "config" else value + value
        assert read_claim(path).id != dataclasses.replace(claim, **{name: other}).id
    assert dataclasses.replace(claim).id == claim.id


# ---- Runs under a claim


@pytest.mark.usefixtures("two_layers")
@pytest.mark.parametrize(("flags", "claimed", "variable", "refusal"), [
    ({}, {}, "CACHE_DIR", ""),
    ({"seed": 8, "trials": 2}, {}, "COMPILE_THREADS", ""),  # on the clock it changes nothing
    ({"matrix_lr": 0.5}, {}, "", r"configuration is \w{12} but \w{12} was claimed.*'--steps 12'"),
    ({"trials": 6}, {}, "", r"seeds \[11, 12\] are not among the claimed \[7, 8, 9, 10\]"),
    ({}, {"source_sha256": "0" * 64}, "", r"source is \w{12} but 0{12} was claimed"),
    ({}, {}, "MAX_AUTOTUNE", "TORCHINDUCTOR_MAX_AUTOTUNE is set, but a claim has only"),
])  # fmt: skip
def test_only_runs_of_the_claimed_source_settings_and_seeds_begin(
    flags, claimed, variable, refusal, data, tmp_path, monkeypatch
):
    words = arguments(data, tmp_path / "elsewhere", **BRIEF)
    config = dataclasses.asdict(parse(train_gpt.Config, words, train_gpt.preset, ""))
    hashes = {"source_sha256": source_hash(ROOT), "config_sha256": config_hash(config)}
    path = write_claim(tmp_path / "claim.json", **hashes | claimed)
    if variable:
        monkeypatch.setenv(f"TORCHINDUCTOR_{variable}", "6")
    outcome = brief(data, tmp_path / "logs", **{"claim": path, "seed": 7, "trials": 1} | flags)
    if refusal:
        assert outcome.code == 2
        assert re.search(refusal, outcome.err), outcome.err
        assert not (tmp_path / "logs").exists()
    else:
        assert outcome.code == 0, outcome.err
        headers = [outcome.events("header", number)[0] for number in range(len(outcome.logs))]
        assert {header["claim"] for header in headers} == {read_claim(path).id}
