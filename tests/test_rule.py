"""The rule of `small`: all validation tokens below the target, new tokens as well as AdamW."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_record
from scipy.stats import ttest_ind
from small_record import LOSSES, call, make_claim, read_logs, write_logs, write_record

from claims import pages
from claims import record as records
from claims.arms import compare_arms, read_arm
from claims.checks import find_failures
from claims.record import MOST_ABOVE, TRACKS, read_evidence
from data.copied import means, pair_distances, sums_by_kind
from view.verdicts import in_sentences

RECORDS = Path(__file__).resolve().parents[1] / "records"
SMALL = {path.name.partition("_")[2]: path for path in sorted((RECORDS / "small").glob("2*_*"))}
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


# ---- The claims of `small`


@pytest.mark.parametrize(("name", "below", "new_tokens"), [
    ("AdamWTuned", True, None), ("MuonTuned", True, True), ("Record42", True, True),
    ("Trigrams", True, True), ("LargeTable", True, True), ("Record89", True, False),
])  # fmt: skip
def test_each_claim_of_small_holds_and_only_320_steps_miss_a_condition(name, below, new_tokens):
    evidence = read_evidence(SMALL[name])
    assert find_failures(evidence) == []
    found = evidence.new_tokens and evidence.new_tokens.shown
    assert (evidence.below, found, evidence.shown) == (below, new_tokens, new_tokens is not False)


def test_verify_prints_both_conditions_and_a_claim_that_misses_one_is_still_verified(capsys):
    code, said = call(capsys, "verify", SMALL["Record89"])
    assert code == 0
    lines = said.splitlines()
    assert lines[0].endswith("Record89: verified, and NOT shown")
    assert lines[1].strip().startswith("shown: mean loss on all validation tokens below 3.36: ")
    assert lines[2].strip().startswith("NOT shown: loss on new tokens")
    assert "3.7537 against 3.5579" in lines[2]


def test_the_board_begins_with_the_baseline_and_ends_with_the_record():
    claims = [read_evidence(path) for path in SMALL.values()]
    first, second, *_ = [part for part in pages.board("small", claims) if part.startswith("| rec")]
    rows = [row.split(" | ") for row in first.splitlines()[2:]]
    assert [rows[0][0], rows[-1][0]] == ["| baseline", "| **record**"]
    assert "[AdamWTuned]" in rows[0][2]
    assert "[LargeTable]" in rows[-1][2]
    tokens = [float(row[5]) for row in rows]
    assert tokens == sorted(tokens, reverse=True)
    assert "| new tokens |" in second
    assert "[Record89]" in second


def test_a_folder_named_as_the_baseline_is_no_baseline(tmp_path):
    known = read_evidence(SMALL["AdamWTuned"])
    other = replace(read_evidence(SMALL["Record89"]), folder=known.folder)
    assert (known.is_baseline, other.is_baseline) == (True, False)


# ---- Attack: no probability for any candidate of a copy

VOCABULARY, BOS = 40, 39


def text_of(seed: int) -> np.ndarray:
    """Rows of documents in which every other stretch repeats an earlier one."""
    generator = np.random.default_rng(seed)
    documents = []
    for _ in range(60):
        part = generator.zipf(1.5, 12) % BOS
        documents += [[BOS], part, generator.zipf(1.5, 6) % BOS, part]
    return np.concatenate(documents)[:2049][None]


def losses_of(tokens: np.ndarray, seed: int, attacking: bool) -> np.ndarray:
    """Losses of a model that guesses by frequency and expects copies, as each run learns it."""
    counts = np.bincount(tokens[0], minlength=VOCABULARY) + 1.0
    counts *= np.exp(0.01 * np.random.default_rng(seed).standard_normal(VOCABULARY))
    losses, seen = [], {}
    for before, after in zip(tokens[0, :-1], tokens[0, 1:], strict=True):
        if before == BOS:
            seen = {}
        candidates = sorted(seen.get(before, ()))
        chances = counts / counts.sum()
        if attacking:
            chances[candidates] = 1e-9  # of 0 the loss would be infinite
        elif candidates:
            chances *= 0.3
            chances[candidates] += 0.7 / len(candidates)
        losses.append(-np.log(chances[after] / chances.sum()))
        seen.setdefault(before, set()).add(after)
    return np.array(losses)


def test_a_model_that_never_copies_gains_on_new_tokens_and_fails_the_first_condition(judge):
    tokens = text_of(0)
    distances = pair_distances(tokens, BOS).ravel()

    def scored(attacking: bool):
        runs = [losses_of(tokens, seed, attacking) for seed in range(12)]
        new = [means([sums_by_kind(run, distances, 0)])["loss_on_new"] for run in runs]
        return [run.mean() for run in runs], np.array(new)

    (honest, honest_new), (attack, attack_new) = scored(False), scored(True)
    assert np.all(attack_new < honest_new - 0.05), "it gains without training"
    evidence = judge(attack, {"loss_on_new": honest_new}, loss_on_new=attack_new)
    assert evidence.new_tokens.shown
    assert (evidence.below, evidence.shown) == (False, False)
    assert max(honest) < small_record.TARGET < min(attack), "the honest one reaches the target"


# ---- Two arms


def test_a_comparison_has_both_losses_and_names_an_older_measure(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    found = {}
    for name, measure in (("old", "new_loss"), ("new", "loss_on_new")):
        a, b = (make_record(tmp_path / name / arm, LOSSES, **{measure: level + NOISE * sign})
                for arm, level, sign in (("a", 3.5, 1), ("b", 3.7, -1)))  # fmt: skip
        arms = read_arm(str(a / "runs")), read_arm(str(b / "runs"))
        found[name] = in_sentences(*arms, compare_arms(*arms))
    assert re.search(r"^  loss on new tokens \+0\.[12]\d+ \(.*\), higher$", found["new"], re.M)
    assert "loss on new tokens as measured before 2026-11-29 +0." in found["old"]
