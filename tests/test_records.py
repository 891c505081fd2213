"""The records that are committed here hold: every number follows from their logs."""

import functools
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import train_gpt
from claims import pages
from claims.checks import check_claim, find_failures
from claims.record import TRACKS, Evidence, read_evidence
from runtime.errors import Refused
from train_gpt import RECIPES, Config, preset

RECORDS = Path(__file__).resolve().parents[1] / "records"
CLAIMS = sorted(RECORDS.glob("*/*/claim.json"))
by_claim = pytest.mark.parametrize("claim", CLAIMS, ids=lambda path: path.parent.name)


@functools.cache
def read_all() -> list[Evidence]:
    evidences = [read_evidence(claim.parent) for claim in CLAIMS]
    return sorted(evidences, key=lambda evidence: evidence.claim.created)


def read_track(track: str) -> tuple[list[Evidence], str]:
    """The records of a track, and its part of the leaderboard."""
    page = (RECORDS / "README.md").read_text().partition(f"## {track}: ")[2].partition("\n## ")[0]
    return [evidence for evidence in read_all() if evidence.claim.track == track], page


by_track = pytest.mark.parametrize("track", sorted({path.parts[-3] for path in CLAIMS}))


@by_claim
def test_nothing_speaks_against_a_record_and_its_pages_say_what_its_logs_say(claim):
    evidence = read_evidence(claim.parent)
    assert [*find_failures(evidence), *pages.differences(evidence)] == []
    assert len(evidence.complete) in evidence.claim.looks


@by_track
def test_the_leaderboard_is_the_one_that_the_records_give(track, tmp_path):
    assert (RECORDS / "README.md").read_text() == pages.leaderboard(read_all())
    evidences, _ = read_track(track)
    pages.plot_steps(pages.best_of_each_recipe(evidences), tmp_path / "steps.svg")
    assert (tmp_path / "steps.svg").read_bytes() == (RECORDS / track / "steps.svg").read_bytes()


@by_track
def test_the_picture_of_steps_has_the_numbers_of_the_page(track):
    figure, (evidences, page) = Figure(), read_track(track)
    pages.draw_steps(figure, pages.best_of_each_recipe(evidences))
    bars, dots = figure.axes
    rows = {}
    for line in re.findall(r"^\| .*\|$", page, re.M):
        cells = line[2:-2].split(" | ")
        rows[cells[2].strip("[").partition("]")[0]] = [cells[4], *cells[9:11]]
    names = [label.get_text() for label in bars.get_yticklabels()]
    assert [f"{bar.get_width():.0f}" for bar in bars.patches] == [rows[name][0] for name in names]
    for column, line in enumerate(dots.lines, 1):
        shown = [f"{loss:.2f}" for loss in line.get_xdata()]
        assert shown == [rows[name][column] for name in names if rows[name][column]]


def test_the_recipes_of_tiny_run_the_steps_of_a_claim_that_was_shown():
    claimed: dict[str, set[int]] = {}
    for evidence in read_all():
        config = evidence.settings
        if config["track"] == "tiny" and evidence.shown:
            claimed.setdefault(config["recipe"], set()).add(config["steps"])
    for recipe in RECIPES["tiny"]:
        assert Config(**preset({"track": "tiny", "recipe": recipe})).steps in claimed[recipe]


@pytest.mark.parametrize("track", TRACKS)
def test_the_judge_and_the_trainer_have_the_same_rules(track):
    config = Config(**preset({"track": track}))
    rules = TRACKS[track]
    assert (rules.target, rules.val_tokens) == (config.target, config.val_tokens)
    assert rules.val_sha256 == config.val_sha256
    for name, fixed in rules.fixed.items():
        assert getattr(config, name) in (fixed if isinstance(fixed, tuple) else (fixed,)), name
    known = set(train_gpt.FIXED.get(track, ())) | {"layers", "target", "val_tokens"}
    assert set(rules.fixed) <= known <= {*rules.fixed, "layers", "target", "val_tokens"}


@pytest.mark.parametrize("track", ["tiny", "small"])
def test_the_tables_that_a_claim_may_name_have_the_number_of_layers_of_the_track(track):
    layers = train_gpt.LAYERS
    depths = {len(layers[name]) for name in TRACKS[track].fixed["layers"]}
    assert depths == {len(layers[train_gpt.TRACKS[track]["layers"]])}
    for recipe in RECIPES[track]:
        config = Config(**preset({"track": track, "recipe": recipe}))
        assert config.layers in TRACKS[track].fixed["layers"]


@pytest.mark.parametrize("name", [*train_gpt.FIXED["tiny"], "layers"])
def test_what_the_track_fixes_can_be_changed_but_not_claimed(name):
    values = preset({"track": "tiny"})
    config = Config(**values)
    now = getattr(config, name)
    others = {"layers": "record42", "document_mask": False}
    values[name] = others[name] if name in others else now * 2
    if name in ("target", "val_window", "bos"):
        values[name] = now - 1
    (changed,) = train_gpt.off_track(Config(**values))
    assert changed.startswith(f"{name} is ")
    with pytest.raises(Refused, match=name):
        Config(**values, claim="claim.json")


def test_only_the_sources_of_the_first_records_may_lack_later_settings(evidence):
    assert {run.header["schema"] for run in evidence.runs} == {1}
    claim = replace(evidence.claim, source_sha256="0" * 64)
    found = said(replace(evidence, claim=claim))
    assert "mlp_ratio is None, fixed at 4 on this track" in found
    assert "val_window is None, fixed at 320 on this track" in found


def test_the_first_sources_are_held_to_the_last_window_in_their_own_settings(evidence):
    claim = replace(evidence.claim, config=evidence.claim.config | {"final_window": 64})
    evidence = replace(evidence, claim=claim)
    assert "final_window is 64, fixed at 20 on this track" in said(evidence)


def test_a_claim_on_steps_with_another_model_other_data_or_another_batch_is_caught(evidence):
    """All that `train_gpt.py --track steps` calls its model, data and batch."""
    config = asdict(Config(**preset({"track": "steps"})))
    claim = replace(evidence.claim, track="steps", source_sha256="0" * 64)
    pieces = ["smear", "x0_mixing", "attention_gates"]
    others = {"vocab_size": 1024, "bos": 0, "document_mask": True, "batch_tokens": 1,
              "seq_len": 2048, "val_seq_len": 4096, "val_window": 64, "window_block": 128,
              "layers": "tiny", "dim": 1, "head_dim": 64, "mlp_ratio": 8, "biases": False,
              "key_offset": True}
    for name, value in {**others, **dict.fromkeys(pieces, True)}.items():
        changed = replace(claim, config=config | {name: value})
        changed = replace(evidence, claim=changed, track=TRACKS["steps"])
        caught = [what for what in check_claim(changed) if "fixed at" in what]
        assert caught == [f"{name} is {value!r}, fixed at {config[name]!r} on this track"]


@pytest.fixture
def evidence():
    return read_evidence(RECORDS / "tiny" / "2026-11-21_Record42At350")


def said(evidence: Evidence) -> str:
    return " ".join(failure.what for failure in find_failures(evidence))


def test_a_track_that_counts_steps_fixes_the_tokens_of_one(evidence):
    claim = replace(evidence.claim, config=evidence.claim.config | {"batch_tokens": 524_288})
    evidence = replace(evidence, claim=claim)
    assert "batch_tokens is 524288, fixed at 2048 on this track" in said(evidence)


def test_other_training_tokens_than_the_tracks_are_caught_though_all_runs_share_them(evidence):
    for run in evidence.runs:
        run.header["data"]["train_sha256"] = "0" * 64
    assert "train_sha256 0000000000000000, not 77e6e4d2acaa19c3" in said(evidence)
