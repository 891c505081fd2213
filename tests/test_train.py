"""A run on one process: what its log says, that it learns, repeats and ends cleanly."""

import dataclasses
import hashlib
import re

import numpy as np
import pytest
import small_run
import torch
from small_run import ROUNDING, ROWS, SEQUENCE, STEPS, arguments, read_events, run, run_words
from torch._dynamo.utils import counters

import train_gpt
from data import loader
from data.copied import pair_distances
from data.loader import TrainLoader
from kernels.attention import PortableAttention
from kernels.counts import NgramCounts
from optim import AdamW, NorMuon

pytestmark = pytest.mark.usefixtures("two_layers")


@pytest.fixture(scope="module")
def two_trials(data, tmp_path_factory):
    """Seeds 3 and 4 in one process. Many tests look at it; none changes it."""
    outcome = run(data, tmp_path_factory.mktemp("logs"), seed=3, trials=2)
    assert outcome.code == 0, outcome.err
    return outcome


# ---- The log


def test_the_header_says_what_ran(two_trials, data):
    (header,) = two_trials.events("header", 1)
    wanted = {
        "track": "tiny", "seed": 4, "trial": 1, "run_id": two_trials.logs[1].stem, "target": 1.0,
        "world_size": 1, "micro_batch": ROWS * SEQUENCE, "grad_accum": 1,
        "checks": {"causality": True, "overlap": 0.0, "warmup_restored": True},
    }  # fmt: skip
    assert {name: header[name] for name in wanted} == wanted
    assert set(header["config"]) == {field.name for field in dataclasses.fields(train_gpt.Config)}
    assert header["config"]["dim"] == 32
    wanted = {"torch": torch.__version__, "dtype": "float32", "gpu": None, "gpu_count": 0,
              "compiled": False}  # fmt: skip
    assert {name: header["env"][name] for name in wanted} == wanted
    train, val = ((data / f"s_{kind}_0.bin").read_bytes()[1024:] for kind in ("train", "val"))
    assert header["data"] == {
        "train_sha256": hashlib.sha256(train).hexdigest(),  # the run ends within the first shard
        "val_sha256": hashlib.sha256(val).hexdigest(),
        "val_tokens": 1024,
    }


def test_each_step_is_logged_with_its_window_and_its_stage(two_trials):
    steps = two_trials.events("step")
    # Three equal parts with windows of 3, 7 and 11 blocks of 16; 12 steps have no extension.
    assert [step["window"] for step in steps] == [48] * 4 + [112] * 4 + [176] * 4
    assert [step["stage"] for step in steps] == [0] * 4 + [1] * 4 + [2] * 4


# ---- The clock


def test_only_training_is_timed_and_validations_have_the_time_of_the_phases_before_them(two_trials):
    for log in (0, 1):
        phases = two_trials.events("phase", log)
        names = [phase["name"] for phase in phases]
        training = ["train", "validate"] * 4
        assert names == ["setup", "compile", "warmup", *training, "keep", "probe", "check"]
        assert [phase["timed"] for phase in phases] == [name == "train" for name in names]
        clock = 0.0
        for event in read_events(two_trials.logs[log]):
            if event["event"] == "phase" and event["timed"]:
                clock += event["ms"]
            if event["event"] in ("val", "end"):
                assert event["train_time_ms"] == pytest.approx(clock, rel=1e-9)


# ---- Scoring


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_pass_gives_the_loss_of_validation_and_of_each_kind_of_token(
    data, tmp_path, monkeypatch, dtype
):
    """It is the loss of whole batches, which a compiled run computes."""
    token_losses, whole = train_gpt.Trainer.token_losses, []

    def noting(trainer, batch):
        whole.append(trainer.batch_loss(batch, trainer.data.val_longest).double())
        return token_losses(trainer, batch)

    monkeypatch.setattr(train_gpt.Trainer, "token_losses", noting)
    (end,) = run(data, tmp_path, dtype=dtype, steps=4).events("end")
    last = sum(whole[-2:]).item()  # two batches of 512 targets
    assert end["val_loss"] == pytest.approx(last / 1024, rel=1e-6)
    probes, tokens = end["probes"], small_run.documents(3, 30)[:1025]
    rows = np.lib.stride_tricks.sliding_window_view(tokens, 257)[::256]
    copied = np.count_nonzero(pair_distances(rows, small_run.BOS)) / 1024
    mean = copied * probes["loss_on_copied"] + (1 - copied) * probes["loss_on_new"]
    assert mean == pytest.approx(end["val_loss"], rel=1e-6)
    assert "loss_held_out" not in probes, "data of one's own have no held-out slice"


def test_the_held_out_slice_is_scored_and_shown_and_its_tokens_are_not_trained_on(
    tmp_path, monkeypatch
):
    data = small_run.write_data(tmp_path / "data")
    (data / "s_train_1.bin").unlink()  # the race's text has one shard
    monkeypatch.setattr(loader, "HELD_OUT", 2048)
    val_sha256 = hashlib.sha256((data / "s_val_0.bin").read_bytes()[1024:]).hexdigest()
    monkeypatch.setattr(loader, "PROSE", val_sha256)
    outcome = run(data, tmp_path, steps=4, val_sha256=val_sha256)
    assert outcome.code == 0, outcome.err
    (end,) = outcome.events("end")
    assert re.search(rf"held-out slice {end['probes']['loss_held_out']:.4f}$", outcome.out, re.M)
    free = run(data, tmp_path / "free", steps=4)
    assert free.losses() == outcome.losses(), "it changes no loss"


# ---- Learning, and the same again


@pytest.mark.parametrize("changed", [
    {"recipe": "record89"}, {"recipe": "muon"}, {"recipe": "adamw"},
    {"recipe": "muon", "optimizer": "torch_muon"},
    {"recipe": "adamw", "optimizer": "torch_adamw"},
], ids=lambda changed: " ".join(changed.values()))  # fmt: skip
def test_every_recipe_learns_with_our_optimizers_and_with_those_of_torch(changed, data, tmp_path):
    outcome = run(data, tmp_path, steps=32, val_every=100, **changed)
    first, last = (event["val_loss"] for event in outcome.events("val"))
    assert last < 0.7 * first


@pytest.mark.parametrize(("seed", "trial"), [(3, 0), (4, 1)])
def test_a_trial_is_a_single_run_with_its_seed_bit_for_bit(seed, trial, two_trials, data, tmp_path):
    assert run(data, tmp_path, seed=seed).losses() == two_trials.losses(trial)


@pytest.mark.slow
def test_compiled_runs_repeat_bit_for_bit_agree_with_eager_ones_and_compile_four_graphs(
    data, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    changed = {"recipe": "adamw", "seq_len": 256, "steps": 8}
    torch.compiler.reset()  # graphs of other tests
    counters.clear()
    compiled = run(data, tmp_path, compile="on", seed=3, trials=2, **changed)
    assert compiled.code == 0, compiled.err
    assert compiled.events("header")[0]["env"]["compiled"] is True
    assert counters["stats"]["unique_graphs"] == 4, "layers, loss; in training, validation"
    again = run(data, tmp_path, compile="on", seed=4, **changed)
    assert again.losses() == compiled.losses(1)
    assert again.losses() != compiled.losses(0)
    eager = run(data, tmp_path, seed=4, **changed)
    assert eager.losses() == pytest.approx(again.losses(), rel=1e-5)


@pytest.mark.parametrize("recipe", ["adamw", "record89"])
def test_micro_batches_and_parts_of_rows_give_the_losses_of_one_batch(recipe, data, tmp_path):
    whole = run(data, tmp_path, recipe=recipe)
    small = {"micro_batch": SEQUENCE, "val_batch": SEQUENCE}
    parts = run(data, tmp_path, recipe=recipe, **small)
    (header,) = parts.events("header")
    assert (header["grad_accum"], header["micro_batch"]) == (ROWS, SEQUENCE)
    assert parts.losses() == pytest.approx(whole.losses(), rel=ROUNDING["float32"])


# ---- Warm-up


def test_warm_up_leaves_no_trace(two_trials, data, tmp_path, monkeypatch):
    def no_warm_up(trainer, clock):
        trainer.env["compiled"] = False
        trainer.checks |= {"causality": True, "warmup_restored": True}

    monkeypatch.setattr(train_gpt, "warm_up", no_warm_up)
    cold = run(data, tmp_path, seed=3)
    assert [phase["name"] for phase in cold.events("phase")][:2] == ["setup", "train"]
    assert cold.losses() == two_trials.losses(0)


def all_but_the_head_again(self, seed, initialize=train_gpt.GPT.initialize):
    head = self.lm_head.detach().clone()
    initialize(self, seed)
    if hasattr(self, "initialized"):
        self.lm_head.detach().copy_(head)
    self.initialized = True


def with_a_share_of_the_mean(self, *inputs, hidden=train_gpt.GPT.hidden):
    x = hidden(self, *inputs)
    return x + 1e-3 * x.mean(dim=1, keepdim=True)


def a_count_late(self, inputs, tokens, frequencies=NgramCounts.frequencies):
    return frequencies(self, inputs.roll(-1, dims=1), tokens)


def one_key_late(self, q, k, v, attend=PortableAttention.__call__, **rest):
    return attend(self, q, k.roll(-1, dims=1), v.roll(-1, dims=1), **rest)


@pytest.mark.parametrize(("place", "method", "leaking", "check"), [
    (AdamW, "reset", lambda *_: None, "warmup_restored"),
    (NorMuon, "reset", lambda *_: None, "warmup_restored"),
    (TrainLoader, "reset", lambda *_: None, "warmup_restored"),
    (train_gpt.GPT, "initialize", all_but_the_head_again, "warmup_restored"),
    (train_gpt.GPT, "hidden", with_a_share_of_the_mean, "causality"),
    (PortableAttention, "__call__", one_key_late, "causality"),
    (NgramCounts, "frequencies", a_count_late, "causality"),
])  # fmt: skip
def test_what_leaks_from_the_warm_up_or_from_the_future_ends_the_run_before_its_first_step(
    place, method, leaking, check, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(place, method, leaking)
    # A head of zeros would give matrices no gradient in the one step of the warm-up.
    tied = {"stages": "tied", "embed_std": 0.1, "counted_ngrams": 0} if place is NorMuon else {}
    outcome = run(data, tmp_path, **tied)
    assert (outcome.code, outcome.logs) == (1, [])
    assert check in outcome.err


def test_a_dry_run_says_what_a_run_takes_and_leaves_nothing_behind(data, tmp_path):
    outcome = run_words([*arguments(data, tmp_path), "--dry-run"], tmp_path)
    assert outcome.code == 0, outcome.err
    steps = re.findall(r"^ +\d+:\d\d:\d\d .*: (\d+) steps of [\d.,]+ ms$", outcome.out, re.M)
    assert sum(map(int, steps)) == STEPS
    assert re.search(r"^ +0:00:\d\d 4 validations of [\d.,]+ ms$", outcome.out, re.M)
    assert re.search(r"^peak memory of rank 0, measured: [\d,]+ MiB$", outcome.out, re.M)
    assert "--dry-run" not in outcome.out, "the reader has it"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
