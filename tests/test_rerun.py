"""A record run again: honest work repeats; an edited log and a source that lies do not."""

import argparse
import json
import re
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from runpy import run_path
from types import ModuleType

import numpy as np
import pytest
import small_run
import torch
from small_record import make_claim

import train_gpt
from claims.logs import read_runs
from claims.record import TRACKS, Evidence, Source
from claims.rerun import (
    MEASURED,
    allowed_here,
    check_model,
    compare_runs,
    rerun,
    validation_rows,
)
from runtime.errors import Refused
from runtime.log import config_hash
from runtime.settings import parse
from runtime.source import digest, read_sources
from scripts import record

SEED = 1000
# The head has no outputs beyond the vocabulary.
SIZES = small_run.SIZES | {"vocab-size": 128}
LAYERS = """LAYERS["small89"] = [
    Layer(value_embed=0),
    Layer(window="long", value_embed=1, skip_from=0, backout=True),
]
import optim.muon
optim.muon.native_dtype = lambda *_: torch.float32  # as two_layers()
# ---- Model. B rows"""


def small_source() -> Source:
    """The present source with two layers, and free to be small."""
    files = read_sources(small_run.ROOT)
    source = files["train_gpt.py"].decode()
    fixed = '"tiny": (*SCORED, *SIZES, "val_sha256"),'
    for old, new in (("# ---- Model. B rows", LAYERS), (fixed, '"tiny": (),')):
        assert old in source
        source = source.replace(old, new)
    files["train_gpt.py"] = source.encode()
    return files


@pytest.fixture(scope="module")
def evidence(data, tmp_path_factory) -> Evidence:
    """A record of one run, which kept its model."""
    logs = tmp_path_factory.mktemp("logs")
    with small_run.two_layers():
        outcome = small_run.run(data, logs, keep_model="on", seed=SEED, vocab_size=128)
    assert outcome.code == 0, outcome.err
    flags = [f"--{name}={value}" for name, value in SIZES.items()]
    config = asdict(parse(train_gpt.Config, ["--track=tiny", *flags], train_gpt.preset, ""))
    config, source = json.loads(json.dumps(config)), small_source()
    sha256 = {"config_sha256": config_hash(config), "source_sha256": digest(source)}
    claim = replace(make_claim(), config=config, flags=flags, **sha256)
    run = read_runs(outcome.logs[0])[0]
    assert run.config_sha256 == claim.config_sha256
    run.header.update(claim=claim.id, schema=3)
    return Evidence(logs, claim, TRACKS["tiny"], [run], [], source)


def run_again(evidence: Evidence, data: Path, capsys, **given) -> tuple[int, str]:
    default = {"rerun": None, "steps": None, "data_dir": data}
    code = record.run_again(evidence, argparse.Namespace(**default | given))
    return code, capsys.readouterr().out


def with_losses(evidence: Evidence, changes: dict[int, float]) -> Evidence:
    """The record with training losses edited after the run: what is added to each step's."""
    (run,) = evidence.runs
    steps = []
    for step in run.steps:
        steps.append(step._replace(train_loss=step.train_loss + changes.get(step.step, 0)))
    return replace(evidence, runs=[replace(run, steps=steps)])


@pytest.mark.slow
def test_an_honest_run_repeats_to_the_bit_and_its_model_holds(evidence, data, capsys):
    code, said = run_again(evidence, data, capsys)
    assert code == 0, said
    assert "losses must agree to the bit" in said
    assert "the judge's checks on the trained model" in said
    for name in ("training losses, 12", "validation losses, 4", "normalisation", "causality",
                 "documents alone", "completeness: mean of 1,024 targets"):  # fmt: skip
        assert name in said


def test_a_loss_edited_by_a_ten_thousandth_is_found_by_the_first_steps(evidence, data, capsys):
    edited = with_losses(evidence, {3: 1e-4})
    code, said = run_again(edited, data, capsys, steps=5, rerun=SEED)
    assert code == 1, said
    (line,) = [line for line in said.splitlines() if line.endswith("DIFFERS")]
    assert re.search(r"training losses, 5 +0\.0001 +at most 0 +step 3", line)
    assert re.search("seed 1000, 5 of 12 steps(.|\n)*checks on an untrained model", said)
    assert "completeness" not in said


def test_a_loss_on_new_tokens_that_the_log_forges_is_found(evidence, data):
    (run,) = evidence.runs
    for name in ("nothing", "loss_on_new", "new_loss"):
        before = replace(run, end=run.end | {"probes": run.end["probes"] | {name: 1.0}})
        found = {each.what: each.holds for each in compare_runs(before, run, 12, lambda _: 0.0)}
        assert found["loss_on_new, 1"] == (name != "loss_on_new")
        assert found["new_loss, 1"] == (name != "new_loss")


def test_a_loss_on_new_tokens_that_the_source_computes_wrongly_is_found(evidence, data):
    (run,), config = evidence.runs, evidence.claim.config
    (model,) = evidence.folder.glob("checkpoints/*/final")
    rows, found = validation_rows(data, config["val_tokens"], config["val_seq_len"]), run.final_loss
    with answers_of(("", ""), model) as losses:
        for measure in MEASURED:
            for wrong, holds in ((0.0, True), (-0.002, False)):
                on_new = {measure: run.probe(measure) + wrong}
                *_, last = check_model(losses, rows, config, found, on_new)
                assert (last.what.split(":")[0], last.holds) == (measure, holds)


def test_another_machine_may_differ_as_this_one_from_itself_and_a_gpu_unchecked(evidence, capsys):
    (run,) = evidence.runs
    elsewhere, asked = replace(run, env=run.env | {"threads": 99}), []

    def again(flag):
        asked.append(flag)
        apart = len(asked) * 1e-3  # from the third step on
        return with_losses(evidence, dict.fromkeys(range(3, 13), apart)).runs[0]

    allowed = allowed_here(run, elsewhere, again)
    assert f"threads {run.env['threads']}, here 99" in capsys.readouterr().out
    row = run.header["config"]["seq_len"]
    assert asked == [f"--micro-batch={row}", f"--micro-batch={2 * row}"]
    for changes, holds in (({3: 7e-3}, True), ({2: 1e-4}, False), ({12: 9e-3}, False)):
        edited = with_losses(evidence, changes).runs[0]
        training = next(compare_runs(edited, elsewhere, 12, allowed))
        assert (training.holds, training.where) == (holds, f"step {min(changes)}")
    for other in ({"gpu": "H100"}, {"dtype": "float16"}):
        allowed = allowed_here(replace(run, env=run.env | other), run, None)
        assert allowed(0) == pytest.approx(1e-4)
        assert allowed(30) == pytest.approx(0.0501)


@pytest.mark.slow
def test_a_forged_loss_is_found_on_another_machine_and_an_honest_one_is_not(evidence, data, capsys):
    (run,) = evidence.runs
    for part in ("cpu", "gpu"):
        elsewhere = replace(evidence, runs=[replace(run, env=run.env | {part: "another"})])
        for changes, code in (({}, 0), ({12: 0.05}, 1)):
            found, said = run_again(with_losses(elsewhere, changes), data, capsys)
            assert found == code, said
            assert f"{part} another, here" in said


@pytest.mark.slow
def test_losses_that_are_all_forged_alike_are_found_by_their_spread(evidence, data, capsys):
    (run,) = evidence.runs
    *before, last = run.validations
    for forged, code in ((0.0, 0), (0.02, 1)):  # 0.03 would be no difference to another machine
        runs = []
        for n in range(3):
            end = last._replace(loss=last.loss + forged + n * 1e-3)
            runs.append(replace(run, run_id=f"{n}", seed=SEED + n, validations=[*before, end],
                                steps=[] if n else run.steps, env=run.env | {"gpu": "another"}))
        found, said = run_again(replace(evidence, runs=runs), data, capsys)
        assert found == code, said
        differing = [line for line in said.splitlines() if line.endswith("DIFFERS")]
        assert all("last loss, in standard deviations" in line for line in differing), said


def test_flags_that_mean_other_settings_than_the_claimed_are_found(evidence):
    (run,) = evidence.runs
    for after, holds in ((run, True), (replace(run, config_sha256="0" * 64), False)):
        *_, settings = compare_runs(run, after, 12, lambda updates: 0.0)
        assert settings.holds is holds


def test_what_cannot_run_here_is_refused_with_the_reason(evidence, data, tmp_path):
    cases = [
        (evidence, 7, data, "no run of seed 7 counts"),
        (evidence, None, tmp_path / "none", r"none has no \*train_\*.bin file"),
    ]
    for number, (record_, seed, folder, why) in enumerate(cases):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        with pytest.raises(Refused, match=why):
            list(rerun(record_, seed, 5, folder, scratch))


# ---- Sources that lie: each edit of train_gpt.py, and what finds it

END = "return losses.view_as(targets_BT)"
STREAM = "x = self.hidden(inputs_BT, *(context or self.eval_context(inputs_BT)))"
NORMED = "x_BTC = x0_BTC = norm(x_BTC, self.embed_gain)"
LIES = {
    "nothing": ("", "", None),
    "scores that are not normalised": (END, f"{END} - 0.5", "normalisation"),
    "a loss that is scaled": (END, f"{END} * 0.9", "normalisation"),
    "losses scaled at the end of long rows": (
        END, f"losses.view_as(targets_BT)[:, 192:] *= 0.5\n        {END}", "documents"),
    "the target in the stream": (
        f"{STREAM}\n        x = x[:, -targets_BT.size(1) :]",
        f"{STREAM} + 3 * self.output_weight[targets_BT]", "normalisation"),
    "the next token": (
        NORMED, f"{NORMED}\n        x_BTC = x_BTC + x_BTC.roll(-1, 1)", "normalisation"),
    "the token after the next": (
        NORMED, f"{NORMED}\n        x_BTC = x_BTC + x_BTC.roll(-2, 1)", "causality"),
    "the last token of long rows": (
        NORMED, f"{NORMED}\n        if T == 256:\n            x_BTC = x_BTC + x_BTC[:, -1:]",
        "causality"),
    "other rows of a batch": (
        NORMED, f"{NORMED}\n        if B > 1:\n            x_BTC = x_BTC + x_BTC.roll(1, 0)",
        "causality|a row alone"),
    "where the next document begins": (
        NORMED, f"{NORMED}\n        x_BTC = x_BTC + begins_BT11.roll(-2, 1).float().view(B, T, 1)",
        "causality"),
}  # fmt: skip


@contextmanager
def answers_of(edit: tuple[str, str], model: Path):
    """`answering` in this process: the functions of train_gpt.py after an edit."""
    text = (small_run.ROOT / "train_gpt.py").read_text().replace("# ---- Model. B rows", LAYERS)
    assert edit[0] in text
    module = ModuleType("lying_trainer")
    module.__file__ = train_gpt.__file__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lying_trainer", module)
        exec(text.replace(*edit) if edit[0] else text, module.__dict__)
        patch.setitem(sys.modules, "train_gpt", module)
        lying = run_path(str(small_run.ROOT / "inference" / "model.py"))
        found = lying["load_model"](model)
        yield lambda rows: lying["token_losses"](found, torch.tensor(rows)).double().numpy()


@pytest.mark.parametrize("lie", LIES)
def test_a_source_that_lies_in_its_own_checks_is_found_out(lie, evidence, data):
    *edit, check = LIES[lie]
    config = evidence.claim.config
    (model,) = evidence.folder.glob("checkpoints/*/final")
    rows = validation_rows(data, config["val_tokens"], config["val_seq_len"])
    with answers_of(tuple(edit), model) as losses:
        logged = losses(rows).mean()  # the log agrees with the lie
        failed = [each.what for each in check_model(losses, rows, config, logged) if not each.holds]
        part = losses(rows)[:-1].sum() / rows[:, 1:].size  # the last row is not scored
        unscored = [each.what for each in check_model(losses, rows, config, part) if not each.holds]
    if check is None:
        assert failed == []
        assert [what.split(":")[0] for what in unscored] == ["completeness"]
    else:
        names = check.split("|")
        assert any(name in what for name in names for what in failed), failed


def test_the_questions_differ_each_time(evidence, data):
    config, asked = evidence.claim.config, []

    def losses(rows):
        asked.append(rows)
        return np.ones((rows.shape[0], rows.shape[1] - 1))

    rows = validation_rows(data, config["val_tokens"], config["val_seq_len"])
    for _ in range(2):
        list(check_model(losses, rows, config, None))
    half = len(asked) // 2
    same = [np.array_equal(a, b) for a, b in zip(asked[:half], asked[half:], strict=True)]
    assert same[0]  # all validation rows
    assert not all(same)
