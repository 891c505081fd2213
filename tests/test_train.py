"""A run on one process: what its log says, that it learns, repeats and ends cleanly."""

import dataclasses
import hashlib
import math
import re

import pytest
import torch
from small_run import ROOT, ROUNDING, ROWS, SEQUENCE, STEPS, arguments, read_events, run, run_words
from torch._dynamo.utils import counters

import optim
import train_gpt
from data.loader import TrainLoader
from kernels.attention import PortableAttention
from optim import AdamW, NorMuon
from runtime.settings import parse

pytestmark = pytest.mark.usefixtures("two_layers")


@pytest.fixture(scope="module")
def two_trials(data, tmp_path_factory):
    """Seeds 3 and 4 in one process. Many tests look at it; none changes it."""
    outcome = run(data, tmp_path_factory.mktemp("logs"), seed=3, trials=2)
    assert outcome.code == 0, outcome.err
    return outcome


# ---- The log


def test_a_quick_validation_scores_a_batch_off_the_clock_and_changes_no_other_loss(data, tmp_path):
    """Where one batch holds all validation tokens, it has the loss of a full validation."""
    one_batch = {"val_tokens": 512, "steps": 12}
    quick = run(data, tmp_path / "quick", val_every=0, quick_vals=4, **one_batch)
    full = run(data, tmp_path / "full", val_every=3, **one_batch)
    losses = {event["step"]: event["val_loss"] for event in full.events("val")}
    assert [*losses] == [0, 3, 6, 9, 12]
    found = {event["step"]: event["val_loss"] for event in quick.events("quick_val")}
    assert found | {12: quick.losses()[-1]} == losses
    assert [event["val_tokens"] for event in quick.events("quick_val")] == [512] * 4
    assert quick.losses()[:12] == full.losses()[:12]
    phases = {event["name"]: event["timed"] for event in quick.events("phase")}
    assert phases["quick_val"] is False
    said = re.findall(r"^step \d+/12 \| validation loss on 512 tokens (\S+)", quick.out, re.M)
    assert said == [f"{loss:.4f}" for loss in found.values()]


def test_a_process_alone_reads_its_data_whatever_rank_its_shell_names(data, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")  # left by another launcher
    outcome = run(data, tmp_path, dry_run="on")
    assert outcome.code == 0, outcome.err


def test_a_model_that_draws_at_random_depends_on_its_seed_alone(data, tmp_path, monkeypatch):
    forward = train_gpt.MLP.forward

    def dropped(mlp, x):
        return torch.dropout(forward(mlp, x), 0.1, torch.is_grad_enabled())

    monkeypatch.setattr(train_gpt.MLP, "forward", dropped)
    two = run(data, tmp_path / "two", seed=3, trials=2)
    alone = run(data, tmp_path / "alone", seed=4)
    assert two.code == alone.code == 0, two.err
    assert two.losses(1) == alone.losses() != two.losses(0)


def test_a_run_under_a_claim_has_no_quick_validation():
    def steps(*words: str) -> list[int]:
        config = parse(train_gpt.Config, ["--track", "tiny", *words], train_gpt.preset, "")
        return [step for step in range(config.steps) if train_gpt.at(config, step).quick_validates]

    assert steps() == [0, 11, 22]
    assert steps("--claim", "claim.json") == []


def test_every_event_has_the_fields_that_the_documentation_names(two_trials):
    page = (ROOT / "docs" / "log_format.md").read_text()
    table = page.partition("## Events")[2].partition("| field | meaning |")[0]
    always = {"event", "t_ms"}
    for kind, fields in re.findall(r"^\| `(phase|step|val|end)` \| (.*) \|", table, re.M):
        for log in (0, 1):
            events = two_trials.events(kind, log)
            assert events
            for event in events:
                assert set(event) == always | set(re.findall("`(.+?)`", fields)), kind
    (header,) = two_trials.events("header")
    table, _, rest = page.partition("## The header")[2].partition("`env` has ")
    fields = "".join(re.findall(r"^\| (`.*?) \|", table, re.M))
    of_segments = {"segment", "after_step", "previous_sha256"}
    assert set(header) == always | set(re.findall("`(.+?)`", fields)) - of_segments
    assert set(header["env"]) == set(re.findall("`(.+?)`", rest.partition("The host's name")[0]))


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


def test_a_model_without_a_start_at_copying_guesses_before_its_first_step(data, tmp_path):
    validations = run(data, tmp_path, steps=1, copy_init=0.0).events("val")
    assert [event["step"] for event in validations] == [0, 1]
    padded_vocabulary = 128
    assert validations[0]["val_loss"] == pytest.approx(math.log(padded_vocabulary), rel=1e-6)


# ---- The clock


def test_only_training_is_timed_and_validations_have_the_time_of_the_phases_before_them(two_trials):
    for log in (0, 1):
        phases = two_trials.events("phase", log)
        names = [phase["name"] for phase in phases]
        training = ["train", "validate"] * 4
        assert names == ["setup", "compile", "warmup", *training, "keep", "check", "probe"]
        assert [phase["timed"] for phase in phases] == [name == "train" for name in names]
        clock = 0.0
        for event in read_events(two_trials.logs[log]):
            if event["event"] == "phase" and event["timed"]:
                clock += event["ms"]
            if event["event"] in ("val", "end"):
                assert event["train_time_ms"] == pytest.approx(clock, rel=1e-9)


# ---- Learning, and the same again


@pytest.mark.parametrize("changed", [
    {"recipe": "record42"}, {"recipe": "muon"}, {"recipe": "adamw"},
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
def test_compiled_runs_repeat_bit_for_bit_agree_with_eager_ones_and_compile_two_graphs(
    data, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    changed = {"recipe": "adamw", "seq_len": 256, "steps": 8}
    torch.compiler.reset()  # graphs of other tests
    counters.clear()
    compiled = run(data, tmp_path, compile="on", seed=3, trials=2, **changed)
    assert compiled.code == 0, compiled.err
    assert compiled.events("header")[0]["env"]["compiled"] is True
    assert counters["stats"]["unique_graphs"] == 2, "training, validation; of all stages"
    again = run(data, tmp_path, compile="on", seed=4, **changed)
    assert again.losses() == compiled.losses(1)
    assert again.losses() != compiled.losses(0)
    eager = run(data, tmp_path, seed=4, **changed)
    assert eager.losses() == pytest.approx(again.losses(), rel=1e-5)


@pytest.mark.parametrize("recipe", ["adamw", "record42"])
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


def one_key_late(self, q, k, v, attend=PortableAttention.__call__, **rest):
    return attend(self, q, k.roll(-1, dims=1), v.roll(-1, dims=1), **rest)


@pytest.mark.parametrize(("place", "method", "leaking", "check"), [
    (AdamW, "reset", lambda *_: None, "warmup_restored"),
    (NorMuon, "reset", lambda *_: None, "warmup_restored"),
    (TrainLoader, "reset", lambda *_: None, "warmup_restored"),
    (train_gpt.GPT, "initialize", all_but_the_head_again, "warmup_restored"),
    (train_gpt.GPT, "hidden", with_a_share_of_the_mean, "causality"),
    (PortableAttention, "__call__", one_key_late, "causality"),
])  # fmt: skip
def test_what_leaks_from_the_warm_up_or_from_the_future_ends_the_run_before_its_first_step(
    place, method, leaking, check, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(place, method, leaking)
    outcome = run(data, tmp_path)
    assert (outcome.code, outcome.logs) == (1, [])
    assert check in outcome.err


@pytest.mark.parametrize("guard", ["nonfinite", "off"])
def test_guards_change_nothing_in_a_run_without_faults(guard, two_trials, data, tmp_path):
    assert run(data, tmp_path, seed=3, guard=guard).losses() == two_trials.losses(0)


@pytest.mark.filterwarnings("ignore:.* orthogonalized parameter")
def test_a_run_outlives_matrices_that_fail_at_every_step_and_logs_them(data, tmp_path, monkeypatch):
    orthogonalized = optim.muon.orthogonalized

    def fail_first(G, choice):
        return orthogonalized(G, choice).index_fill_(0, torch.tensor(0), math.nan)

    monkeypatch.setattr("optim.muon.orthogonalized", fail_first)
    outcome = run(data, tmp_path, steps=24)
    assert outcome.code == 0, outcome.err
    held = outcome.events("held")
    assert [event["step"] for event in held] == [*range(1, 25)]  # 20 skips would end the run
    [(matrices, tensor)] = {(event["matrices"], event["tensor"]) for event in held}
    assert matrices >= 1
    assert f"{matrices} matrices kept their weights, {tensor} first" in outcome.out
    assert outcome.events("skip") == []
    losses = outcome.losses()
    assert losses[-1] < losses[0]  # all other matrices and tables learn


def test_a_dry_run_says_what_a_run_takes_and_leaves_nothing_behind(data, tmp_path):
    outcome = run_words([*arguments(data, tmp_path), "--dry-run"], tmp_path)
    assert outcome.code == 0, outcome.err
    steps = re.findall(r"^ +\d+:\d\d:\d\d .*: (\d+) steps of [\d.,]+ ms$", outcome.out, re.M)
    assert sum(map(int, steps)) == STEPS
    assert re.search(r"^ +0:00:\d\d 4 validations of [\d.,]+ ms$", outcome.out, re.M)
    assert re.search(r"^peak memory of rank 0, measured: [\d,]+ MiB$", outcome.out, re.M)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
