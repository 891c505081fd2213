"""The records that are committed here hold: every number follows from their logs."""

import functools
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import train_gpt
from claims import pages
from claims import record as records
from claims.checks import find_failures
from claims.record import TRACKS, Evidence, departures, read_evidence
from kernels.attention import choose_attention
from runtime.errors import Refused
from scripts import significance
from train_gpt import RECIPES, Config, preset

RECORDS = Path(__file__).resolve().parents[1] / "records"
# Those whose runs were made.
CLAIMS = sorted({runs.with_name("claim.json") for runs in RECORDS.glob("*/*/runs")})
by_claim = pytest.mark.parametrize("claim", CLAIMS, ids=lambda path: path.parent.name)


@functools.cache
def read_all() -> list[Evidence]:
    evidences = [read_evidence(claim.parent) for claim in CLAIMS]
    return sorted(evidences, key=lambda evidence: evidence.claim.created)


def of_small(name: str) -> Evidence:
    (found,) = [one for one in read_all() if one.folder.match(f"small/*_{name}")]
    return found


@by_claim
def test_nothing_speaks_against_a_record_and_its_pages_say_what_its_logs_say(claim):
    (evidence,) = [one for one in read_all() if one.folder == claim.parent]
    assert [*find_failures(evidence), *pages.differences(evidence)] == []
    assert len(evidence.complete) in evidence.claim.looks


def test_the_leaderboard_is_the_one_that_the_records_give_and_its_picture_is_drawn(tmp_path):
    assert (RECORDS / "README.md").read_text() == pages.leaderboard(read_all())
    for track in {one.claim.track for one in read_all()}:
        claims = [one for one in read_all() if one.claim.track == track]
        pages.plot_tokens(pages.best_of_each_recipe(claims), tmp_path / "tokens.svg")
        for picture in (tmp_path / "tokens.svg", RECORDS / track / "tokens.svg"):
            assert ElementTree.parse(picture).getroot().tag.endswith("svg")


# ---- `small`


def test_only_the_claim_of_320_steps_misses_a_condition():
    missed = [one.claim.name for one in read_all() if not (one.below and one.shown)]
    assert missed == ["Record89"]
    found = of_small("Record89")
    assert (found.below, found.new_tokens.shown) == (True, False), "it copies"


def test_the_verdict_on_runs_of_small_has_their_loss_on_new_tokens(capsys):
    assert significance.main([str(of_small("LargeTable").folder / "runs")]) == 0
    said = capsys.readouterr().out
    assert "loss on new tokens 3.537821, as measured before 2026-11-29; " in said


def test_a_folder_named_as_the_baseline_is_no_baseline():
    known = of_small("AdamWTuned")
    other = replace(of_small("Record89"), folder=known.folder)
    assert (known.is_baseline, other.is_baseline) == (True, False)


def test_a_baseline_that_does_not_verify_decides_nothing(monkeypatch):
    known = of_small("AdamWTuned")
    worse = replace(known.runs[0], seed=1)
    baseline = replace(known, runs=[worse, *known.runs[1:]])
    monkeypatch.setattr(records, "read_baseline", lambda track, name: baseline)
    (failure,) = find_failures(replace(of_small("LargeTable")))
    assert re.match("its baseline .*AdamWTuned decides nothing, as it fails: ", failure.what)


def test_the_recipes_of_small_run_the_steps_of_a_claim_that_was_shown():
    claimed: dict[str, set[int]] = {}
    for evidence in read_all():
        config = evidence.claim.config
        if config["track"] == "small" and evidence.shown:
            claimed.setdefault(config["recipe"], set()).add(config["steps"])
    for recipe in RECIPES["small"]:
        assert Config(**preset({"track": "small", "recipe": recipe})).steps in claimed[recipe]


# ---- The rules of the judge and those of the trainer


@pytest.mark.parametrize("track", TRACKS)
def test_the_judge_and_the_trainer_have_the_same_rules(track):
    config = Config(**preset({"track": track}))
    rules = TRACKS[track]
    assert (rules.target, rules.val_tokens) == (config.target, config.val_tokens)
    assert rules.val_sha256 == config.val_sha256
    for name, fixed in rules.fixed.items():
        assert getattr(config, name) == fixed, name
    known = set(train_gpt.FIXED[track])
    assert set(rules.fixed) <= known <= {*rules.fixed, "target", "val_tokens"}
    assert rules.ranked == (track != "tiny"), "only the hello has no board"


@pytest.mark.parametrize("track", ["small", "tiny"])
def test_layers_may_have_a_tenth_more_parameters_than_the_default(track):
    config = Config(**preset({"track": track}))
    attention, _ = choose_attention("auto", torch.device("cpu"), torch.float32, config.head_dim)
    wide = replace(config, mlp_ratio=config.mlp_ratio + 1)
    sizes = []
    for each in (config, wide):
        model = train_gpt.GPT(each, torch.float32, torch.device("cpu"), attention)
        sizes.append(sum(parameter.numel() for parameter in model.blocks.parameters()))
    assert TRACKS[track].layer_params == round(1.1 * sizes[0]) < sizes[1]


@pytest.mark.parametrize("layers", ["small89", "plain8"])
def test_a_claim_may_have_any_table_of_as_many_layers_and_none_that_was_deepened(
    layers, monkeypatch
):
    config = Config(**preset({"track": "small"}) | {"layers": layers})
    assert (train_gpt.off_track(config), departures(vars(config), TRACKS["small"].fixed)) == (
        [],
        {},
    )
    deeper = [*train_gpt.LAYERS[layers], train_gpt.Layer()]
    monkeypatch.setitem(train_gpt.LAYERS, layers, deeper)
    assert train_gpt.off_track(config) == [f"layers is {layers}, 9 layers; the track has 8"]


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
