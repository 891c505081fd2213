"""The records that are committed here hold: every number follows from their logs."""

import functools
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import train_gpt
from claims import pages
from claims.checks import check_claim, find_failures
from claims.record import TRACKS, Evidence, departures, read_evidence
from kernels.attention import choose_attention
from runtime.errors import Refused
from train_gpt import RECIPES, Config, preset

RECORDS = Path(__file__).resolve().parents[1] / "records"
# Those whose runs were made.
CLAIMS = sorted({runs.with_name("claim.json") for runs in RECORDS.glob("*/*/runs")})
by_claim = pytest.mark.parametrize("claim", CLAIMS, ids=lambda path: path.parent.name)


@functools.cache
def read_all() -> list[Evidence]:
    evidences = [read_evidence(claim.parent) for claim in CLAIMS]
    return sorted(evidences, key=lambda evidence: evidence.claim.created)


@by_claim
def test_nothing_speaks_against_a_record_and_its_pages_say_what_its_logs_say(claim):
    evidence = read_evidence(claim.parent)
    assert [*find_failures(evidence), *pages.differences(evidence)] == []
    assert len(evidence.complete) in evidence.claim.looks


@pytest.mark.parametrize("track", sorted({path.parts[-3] for path in CLAIMS}))
def test_the_leaderboard_is_the_one_that_the_records_give_and_its_picture_is_drawn(
    track, tmp_path
):
    assert (RECORDS / "README.md").read_text() == pages.leaderboard(read_all())
    evidences = [evidence for evidence in read_all() if evidence.claim.track == track]
    pages.plot_tokens(pages.best_of_each_recipe(evidences), tmp_path / "tokens.svg")
    for picture in (tmp_path / "tokens.svg", RECORDS / track / "tokens.svg"):
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_the_recipes_of_small_run_the_steps_of_a_claim_that_was_shown():
    claimed: dict[str, set[int]] = {}
    for evidence in read_all():
        config = evidence.claim.config
        if config["track"] == "small" and evidence.shown:
            claimed.setdefault(config["recipe"], set()).add(config["steps"])
    for recipe in RECIPES["small"]:
        assert Config(**preset({"track": "small", "recipe": recipe})).steps in claimed[recipe]


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


def test_an_optimist_cannot_deepen_the_table_that_the_track_names(monkeypatch):
    deeper = [*train_gpt.LAYERS["small89"], train_gpt.Layer()]
    monkeypatch.setitem(train_gpt.LAYERS, "small89", deeper)
    (found,) = train_gpt.off_track(Config(**preset({"track": "small"})))
    assert found == "layers is small89, 9 layers; the track has 8"


def test_only_the_hello_has_no_board():
    assert [name for name, rules in TRACKS.items() if not rules.ranked] == ["tiny"]


@pytest.mark.parametrize("layers", ["small89", "plain8"])
def test_a_claim_may_have_any_table_of_as_many_layers(layers):
    config = Config(**preset({"track": "small"}) | {"layers": layers})
    found = departures(vars(config), TRACKS["small"].fixed)
    assert (train_gpt.off_track(config), found) == ([], {})


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


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"mlp_ratio": None}, "mlp_ratio is None, fixed at 4 on this track"),
    ({"val_window": 64}, "val_window is 64, fixed at 640 on this track"),
    ({"batch_tokens": 524_288}, "batch_tokens is 524288, fixed at 6144 on this track"),
])  # fmt: skip
def test_a_claim_is_held_to_what_its_track_fixes(settings, sentence):
    evidence = read_evidence(RECORDS / "small" / "2026-11-24_Record89")
    claim = replace(evidence.claim, config=evidence.claim.config | settings)
    assert sentence in check_claim(replace(evidence, claim=claim))
