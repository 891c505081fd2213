"""The rule of `small`: all validation tokens below the target, new tokens as well as AdamW."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_record
from scipy.stats import ttest_ind
from small_record import LOSSES, make_claim, read_logs, write_logs, write_record

from claims import pages
from claims import record as records
from claims.arms import read_arm
from claims.checks import check_new_tokens
from claims.compare import in_sentences
from claims.questions import MEASURED, new_targets
from claims.record import MOST_ABOVE, TRACKS, read_evidence
from claims.rerun import validation_rows
from data.copied import FIRST_TOKENS, REACH, pair_distances

ROOT = Path(__file__).resolve().parents[1]
NOISE = 0.005 * np.random.default_rng(1).standard_normal(12)


def make_record(folder: Path, losses, n: int = 12, **probes) -> Path:
    """A record whose runs end with these losses; probes: those of each run, by name."""
    path = write_record(folder, make_claim(n=n), losses)
    runs = read_logs(path)
    for number, ((*_, end),) in enumerate(runs):
        end["probes"] = {name: float(values[number]) for name, values in probes.items()}
    write_logs(path, runs)
    return path


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """Reads the record of a claim by the rule, beside a baseline with the given probes."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setitem(TRACKS, "tiny", small_record.RULES._replace(baseline="Baseline"))
    baselines = {}
    monkeypatch.setattr(records, "read_baseline", lambda track, name: baselines.get(name))

    def read(losses=LOSSES, baseline=None, **probes):
        known = baseline or {"loss_on_new": 3.5 + NOISE}
        path = make_record(tmp_path / "baseline", LOSSES[:6], 6, **known)
        baselines["Baseline"] = replace(read_evidence(path), folder=path)
        return read_evidence(make_record(tmp_path / "claim", losses, **probes))

    return read


@pytest.mark.parametrize(("above", "shown"), [(-0.5, True), (0.0, True), (0.009, False),
                                              (0.02, False)])  # fmt: skip
def test_new_tokens_must_be_shown_to_be_less_than_a_hundredth_above_the_baseline(
    above, shown, judge
):
    ours = 3.5 + above + NOISE[::-1]
    evidence = judge(loss_on_new=ours)
    found = evidence.new_tokens
    test = ttest_ind(ours - MOST_ABOVE, 3.5 + NOISE[:6], equal_var=False, alternative="less")
    assert found.p == pytest.approx(test.pvalue, rel=1e-9)
    assert (evidence.below, found.shown, evidence.shown) == (True, shown, shown)


@pytest.mark.parametrize(("ours", "others", "measure"), [
    (("loss_on_new", "new_loss"), ("loss_on_new", "new_loss"), "loss_on_new"),
    (("loss_on_new", "new_loss"), ("new_loss",), "new_loss"),
    (("new_loss",), ("loss_on_new", "new_loss"), "new_loss"),
])  # fmt: skip
def test_it_takes_the_best_measure_that_both_claims_have_and_marks_an_older_one(
    ours, others, measure, judge
):
    losses = {"loss_on_new": 3.3 + NOISE, "new_loss": 3.4 + NOISE}
    theirs = {"loss_on_new": 3.5 + NOISE, "new_loss": 3.6 + NOISE}
    evidence = judge(baseline={name: theirs[name] for name in others},
                     **{name: losses[name] for name in ours})  # fmt: skip
    found = evidence.new_tokens
    assert found.measure == measure
    assert found.mean == pytest.approx(losses[measure].mean())
    assert found.baseline == pytest.approx(theirs[measure][:6].mean())
    assert (pages.MARK in pages.readme(evidence)) == (measure == "new_loss")


def test_without_a_loss_on_new_tokens_in_the_logs_nothing_is_shown(judge):
    evidence = judge(copy_loss=1.0 + NOISE)
    assert (evidence.below, evidence.shown) == (True, False)


# ---- The losses on which the second condition rests

COPIED, VAL_TOKENS = 300, small_record.VAL_TOKENS


def scored(on_new: np.ndarray, **changed) -> dict[str, np.ndarray]:
    """Probes whose mean is the last validation's, but for what is changed."""
    on_copied = (VAL_TOKENS * np.array(LOSSES) - (VAL_TOKENS - COPIED) * on_new) / COPIED
    return {"loss_on_copied": on_copied, "loss_on_new": on_new, "loss_held_out": on_new} | changed


@pytest.fixture
def pinned(judge, monkeypatch):
    """What `verify` finds wrong with the probes of a claim of this date."""
    rules = TRACKS["tiny"]._replace(copied=COPIED)
    monkeypatch.setitem(TRACKS, "tiny", rules)

    def found(created: str = "2026-01-01T00:00:00+00:00", **probes) -> list[str]:
        evidence = judge(**probes)
        evidence = replace(evidence, claim=replace(evidence.claim, created=created))
        return [what for run in evidence.runs for what in check_new_tokens(run, evidence)]

    return found


def some(values: np.ndarray, value: float) -> np.ndarray:
    """The values, the first of them replaced."""
    return np.array([value, *values[1:]])


NEW = 3.5 + NOISE


OLDER = {"new_loss": NEW}


@pytest.mark.parametrize(("probes", "baseline", "words"), [
    (scored(NEW), None, ""),
    (scored(NEW, loss_on_new=some(NEW, NEW[0] - 0.002)), None, "have the mean"),
    (scored(NEW, loss_on_new=some(NEW, np.nan)), None, "loss_on_new is nan"),
    (scored(NEW, loss_on_copied=some(NEW, 0.0)), None, "loss_on_copied is 0.0"),
    (scored(some(NEW, -1.0)), None, "loss_on_new is -1.0"),
    (scored(NEW, loss_held_out=some(NEW, np.nan)), None, "loss_held_out is nan"),
    (scored(NEW, **OLDER), OLDER, ""),
    (scored(NEW), OLDER, "new_loss is nan, not a finite loss above 0"),  # it decides
])  # fmt: skip
def test_losses_by_kind_of_token_must_be_losses_and_have_the_mean_of_all_tokens(
    probes, baseline, words, pinned
):
    found = pinned(baseline=baseline, **probes)
    assert bool(found) == bool(words), found
    assert words in "\n".join(found)


@pytest.mark.parametrize(("day", "fails"), [("2026-11-28", False), ("2026-11-29", True)])
def test_only_a_claim_from_before_the_measure_may_lack_it(day, fails, pinned):
    found = pinned(f"{day}T00:00:00+00:00", new_loss=NEW)
    assert len(found) == 3 * len(LOSSES) * fails


def test_one_run_with_the_new_measure_binds_all_runs_and_none_falls_back_to_the_older(judge):
    evidence = judge(new_loss=3.0 + NOISE, loss_on_new=some(np.full(12, np.nan), 3.5))
    assert evidence.new_tokens.measure == "loss_on_new"
    assert not evidence.shown


@pytest.mark.slow
@pytest.mark.parametrize("track", ["small", "tiny"])
def test_the_validation_tokens_hold_as_many_copies_as_the_judge_says(track):
    folder = ROOT / "data" / "prose"
    if not any(folder.glob("*val_*.bin")):
        pytest.skip("the text is not built")
    rules = TRACKS[track]
    rows = validation_rows(folder, rules.val_tokens, rules.fixed["val_seq_len"])
    new = new_targets(rows, rules.fixed["bos"])
    assert np.count_nonzero(~new) == rules.copied
    back = pair_distances(rows, rules.fixed["bos"])
    assert np.array_equal(new, back == 0)
    older = new_targets(rows, rules.fixed["bos"], REACH)
    assert np.array_equal(older, (back == 0) | (back > REACH))
    assert MEASURED["new_loss"] == (FIRST_TOKENS, REACH)


def test_a_model_that_never_copies_gains_on_new_tokens_and_fails_the_first_condition(judge):
    """Other tokens get the probability that a trained model gives to candidates of a copy."""
    for_candidates, refused = 0.1, 1e-9
    gain = -np.log(1 - for_candidates)  # without training
    attack = (VAL_TOKENS - COPIED) * (NEW - gain) - COPIED * np.log(refused)
    evidence = judge(attack / VAL_TOKENS, {"loss_on_new": NEW}, loss_on_new=NEW - gain)
    assert evidence.new_tokens.shown
    assert (evidence.below, evidence.shown) == (False, False)


# ---- Two arms


def test_a_comparison_has_both_losses_and_names_an_older_measure(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    found = {}
    for name, measure in (("old", "new_loss"), ("new", "loss_on_new")):
        a, b = (make_record(tmp_path / name / arm, LOSSES, **{measure: level + NOISE * sign})
                for arm, level, sign in (("a", 3.5, 1), ("b", 3.7, -1)))  # fmt: skip
        arms = read_arm(str(a / "runs")), read_arm(str(b / "runs"))
        found[name] = in_sentences(*arms)
    assert re.search(r"^  loss on new tokens \+0\.[12]\d+ \(.*\), higher$", found["new"], re.M)
    assert "loss on new tokens as measured before 2026-11-29 +0." in found["old"]
