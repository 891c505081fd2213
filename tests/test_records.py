"""The records that are committed here hold: every number follows from their logs, which nothing speaks against."""

from pathlib import Path

import pytest

from runtime.claim import read_claim
from scripts.evidence import TRACKS, find_failures, read_evidence
from scripts.pages import differences, leaderboard
from train_gpt import RECIPES, Config, preset

RECORDS = Path(__file__).resolve().parents[1] / "records"
CLAIMS = sorted(RECORDS.glob("*/*/claim.json"))
by_claim = pytest.mark.parametrize("claim", CLAIMS, ids=lambda path: path.parent.name)


@by_claim
def test_nothing_speaks_against_a_record_and_its_pages_say_what_its_logs_say(claim):
    evidence = read_evidence(claim.parent)
    assert [*find_failures(evidence), *differences(evidence)] == []
    assert len(evidence.complete) in evidence.claim.looks


def test_the_leaderboard_is_the_one_that_the_records_give():
    evidences = sorted(map(read_evidence, (claim.parent for claim in CLAIMS)), key=lambda found: found.claim.created)
    assert (RECORDS / "README.md").read_text() == leaderboard(RECORDS, evidences)


def test_the_recipes_of_tiny_run_the_steps_of_their_records():
    claimed = {read_claim(path).config["recipe"]: read_claim(path).config["steps"] for path in CLAIMS}
    assert claimed == {recipe: preset({"recipe": recipe})["steps"] for recipe in RECIPES["tiny"]}


@pytest.mark.parametrize("track", TRACKS)
def test_the_judge_and_the_trainer_have_the_same_rules(track):
    config = Config(**preset({"track": track}))
    rules = TRACKS[track]
    assert (rules.target, rules.val_tokens, rules.val_sha256) == (config.target, config.val_tokens, config.val_sha256)
