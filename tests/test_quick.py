"""A quick look: one batch of validation, no checks at the end, and no claim."""

import pytest
from small_run import brief

import train_gpt
from claims.record import why_no_claim
from runtime.errors import Refused
from runtime.settings import parse


def config_of(*words: str) -> train_gpt.Config:
    return parse(train_gpt.Config, words, train_gpt.preset, "")


def test_a_quick_look_validates_on_one_batch_and_belongs_to_no_claim():
    config = config_of("--track", "small", "--quick")
    assert (config.val_tokens, config.sample_tokens) == (config.val_batch, 0)
    off = train_gpt.off_track(config)
    assert off == ["quick is on", "val_tokens is 16384, the track has 262144"]
    assert "--quick: a claim validates on all tokens" in why_no_claim(vars(config))
    assert why_no_claim(vars(config_of("--track", "small"))) is None
    assert config_of("--track", "small", "--quick", "--val-tokens", "32768").val_tokens == 32768
    with pytest.raises(Refused, match="quick is on"):
        config_of("--track", "tiny", "--quick", "--claim", "claim.json")


@pytest.mark.usefixtures("two_layers")
def test_a_quick_run_says_so_and_leaves_out_the_checks_of_the_trained_model(data, tmp_path):
    outcome = brief(data, tmp_path, quick="on")
    assert outcome.code == 0, outcome.err
    assert "off the track, no claim can be made: quick is on" in outcome.out
    (end,) = outcome.events("end")
    assert end["probes"].keys() >= {"loss_on_new", "loss_on_copied"}
    assert "checks" not in end
