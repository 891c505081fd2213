"""A run on one process: what its log says, that it learns, repeats and ends cleanly."""

import dataclasses
import hashlib
import json
import math
import re
import signal

import pytest
import torch
from scipy import stats
from small_run import (
    ROOT,
    ROWS,
    SEQUENCE,
    STEPS,
    arguments,
    find_logs,
    read_events,
    run,
    run_words,
    start,
    write_data,
)

import kernels.attention
import train_gpt
from claims.runlog import read_run
from data.loader import TrainLoader
from optim import Adam, NorMuon
from runtime.log import source_hash
from runtime.settings import flag
from scripts import significance

HEADER = {
    "event", "t_ms", "schema", "run_id", "track", "target", "seed", "trial", "claim",
    "source_sha256",
    "config_sha256", "config", "data", "env", "world_size", "micro_batch", "grad_accum", "checks",
    "registry_sha256",
}  # fmt: skip
FIELDS = {
    "step": {
        "event", "t_ms", "step", "tokens", "train_time_ms", "step_ms", "train_loss", "lr_mul",
        "window", "stage",
        "skipped",
    },
    "val": {"event", "t_ms", "step", "total_steps", "val_loss", "train_time_ms"},
    "phase": {"event", "t_ms", "name", "timed", "ms"},
    "end": {"event", "t_ms", "status", "steps", "val_loss", "train_time_ms", "peak_mib", "reached"},
}  # fmt: skip
ENVIRONMENT = {
    "python", "torch", "cuda", "gpu", "gpu_count", "driver", "cpu", "threads", "dtype",
    "host_hash", "attention",
    "head", "compiled", "compile_flags", "params",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def two_trials(data, tmp_path_factory):
    """Seeds 3 and 4 in one process. Many tests look at it; none changes it."""
    outcome = run(data, tmp_path_factory.mktemp("logs"), seed=3, trials=2)
    assert outcome.code == 0, outcome.err
    return outcome


# ----
# The log


def test_every_event_has_its_fields(two_trials):
    for log in (0, 1):
        (header,) = two_trials.events("header", log)
        assert set(header) == HEADER
        assert set(header["env"]) == ENVIRONMENT
        for kind, fields in FIELDS.items():
            events = two_trials.events(kind, log)
            assert events
            assert all(set(event) == fields for event in events), kind


def test_the_header_says_what_ran(two_trials, data):
    (header,) = two_trials.events("header", 1)
    assert (header["track"], header["seed"], header["trial"]) == ("tiny", 4, 1)
    assert header["run_id"] == two_trials.logs[1].stem
    assert set(header["config"]) == {field.name for field in dataclasses.fields(train_gpt.Config)}
    assert header["config"]["dim"] == 32
    assert header["target"] == header["config"]["target"]
    assert (header["world_size"], header["micro_batch"], header["grad_accum"]) == (
        1,
        ROWS * SEQUENCE,
        1,
    )
    assert header["env"]["torch"] == torch.__version__
    assert (header["env"]["dtype"], header["env"]["gpu_count"], header["env"]["compiled"]) == (
        "float32",
        0,
        False,
    )

    read = (data / "s_train_0.bin").read_bytes()[1024:]  # the run ends within the first shard
    assert header["data"]["train_sha256"] == hashlib.sha256(read).hexdigest()
    assert (
        header["data"]["val_sha256"]
        == hashlib.sha256((data / "s_val_0.bin").read_bytes()[1024:]).hexdigest()
    )
    assert header["data"]["val_tokens"] == 1024


def test_the_checks_of_the_header_are_passed(two_trials):
    (header,) = two_trials.events("header")
    assert header["checks"] == {"causality": True, "overlap": 0.0, "warmup_restored": True}


def test_sources_are_stored_once_under_their_hash(two_trials):
    folders = list((two_trials.logs[0].parent / "sources").iterdir())
    assert [folder.name for folder in folders] == [two_trials.events("header")[0]["source_sha256"]]
    assert source_hash(folders[0]) == folders[0].name
    assert (folders[0] / "train_gpt.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()


def test_steps_are_counted_from_one_with_the_tokens_so_far(two_trials):
    steps = two_trials.events("step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["tokens"] for step in steps] == [ROWS * SEQUENCE * n for n in range(1, STEPS + 1)]
    # Three equal parts with windows of 3, 7 and 11 blocks of 16; 12 steps have no extension.
    assert [step["window"] for step in steps] == [48] * 4 + [112] * 4 + [176] * 4
    assert [step["stage"] for step in steps] == [0] * 4 + [1] * 4 + [2] * 4


def test_validations_come_first_last_and_in_between(two_trials):
    validations = two_trials.events("val")
    assert [event["step"] for event in validations] == [0, 5, 10, STEPS]
    assert {event["total_steps"] for event in validations} == {STEPS}


def test_an_untrained_model_has_the_loss_of_guessing(two_trials):
    vocabulary = 128  # 64, padded
    assert two_trials.events("val")[0]["val_loss"] == pytest.approx(math.log(vocabulary), rel=1e-6)


def test_the_registry_has_a_start_and_an_end_for_each_run(two_trials):
    lines = read_events(two_trials.logs[0].with_name("registry.jsonl"))
    assert [line["event"] for line in lines] == ["start", "end", "start", "end"]
    ids = [log.stem for log in two_trials.logs]
    assert [line["run_id"] for line in lines] == [ids[0], ids[0], ids[1], ids[1]]
    for log in (0, 1):
        begin, end = lines[2 * log : 2 * log + 2]
        header = two_trials.events("header", log)[0]
        assert all(
            begin[name] == header[name]
            for name in ("track", "seed", "source_sha256", "config_sha256")
        )
        assert (end["status"], end["val_loss"]) == (
            "done",
            two_trials.events("end", log)[0]["val_loss"],
        )


def test_the_last_line_says_whether_the_target_was_reached(two_trials):
    (end,) = two_trials.events("end", 1)
    form = r"target 1\.0 missed: val_loss (\d+\.\d+) at step 12 in (\d+\.\d+) s \(log (.+)\)"
    said = re.fullmatch(form, two_trials.out.splitlines()[-1])
    assert said, two_trials.out
    assert float(said[1]) == pytest.approx(end["val_loss"], abs=1e-4)
    assert float(said[2]) == pytest.approx(end["train_time_ms"] / 1000, abs=0.1)
    assert said[3] == str(two_trials.logs[1])
    assert (end["status"], end["steps"], end["reached"]) == ("done", STEPS, False)


def test_a_reached_target_is_said_and_logged(data, tmp_path):
    outcome = run(data, tmp_path, target=5.0, steps=3)
    assert outcome.out.splitlines()[-1].startswith("target 5.0 reached: val_loss ")
    assert outcome.events("end")[0]["reached"] is True


# ----
# The clock


def test_only_training_is_timed(two_trials):
    for log in (0, 1):
        phases = two_trials.events("phase", log)
        names = [phase["name"] for phase in phases]
        assert names == ["setup", "compile", "warmup"] + ["train", "validate"] * 4
        assert [phase["timed"] for phase in phases] == [name == "train" for name in names]


def test_the_time_of_a_validation_is_the_sum_of_the_timed_phases_before_it(two_trials):
    for log in two_trials.logs:
        clock = 0.0
        for event in read_events(log):
            if event["event"] == "phase" and event["timed"]:
                clock += event["ms"]
            if event["event"] == "val":
                assert event["train_time_ms"] == pytest.approx(clock, rel=1e-9)
            if event["event"] == "end":
                assert event["train_time_ms"] == pytest.approx(clock, rel=1e-9)


# ----
# Learning, and the same again


@pytest.mark.parametrize(
    "changed",
    [
        {"recipe": "record42"},
        {"recipe": "muon"},
        {"recipe": "adamw"},
        {"recipe": "muon", "optimizer": "torch_muon"},
        {"recipe": "adamw", "optimizer": "torch_adamw"},
    ],
    ids=lambda changed: " ".join(changed.values()),
)
def test_every_recipe_learns_with_our_optimizers_and_with_those_of_torch(changed, data, tmp_path):
    outcome = run(data, tmp_path, steps=32, val_every=100, **changed)
    first, last = (event["val_loss"] for event in outcome.events("val"))
    assert last < 0.7 * first


def test_a_seed_repeats_its_losses_bit_for_bit(two_trials, data, tmp_path):
    assert run(data, tmp_path, seed=3).losses() == two_trials.losses(0)


def test_a_later_trial_is_a_single_run_with_its_seed_bit_for_bit(two_trials, data, tmp_path):
    assert run(data, tmp_path, seed=4).losses() == two_trials.losses(1)


def test_validation_rows_in_parts_give_the_losses_of_whole_ones(data, tmp_path):
    changed = {"window_block": 2}  # what is far from a part is left out of it
    parts = run(data, tmp_path / "parts", seed=3, val_batch=SEQUENCE, **changed)
    whole = run(data, tmp_path / "whole", seed=3, **changed)
    assert (parts.code, whole.code) == (0, 0), parts.err
    assert [e["train_loss"] for e in parts.events("step")] == [
        e["train_loss"] for e in whole.events("step")
    ]
    losses = ([event["val_loss"] for event in outcome.events("val")] for outcome in (parts, whole))
    assert next(losses) == pytest.approx(next(losses), rel=1e-6)


def test_compiled_runs_repeat_bit_for_bit_and_agree_with_eager_ones(data, tmp_path, monkeypatch):
    monkeypatch.setitem(train_gpt.LAYERS, "tiny", [train_gpt.Layer(window="long")])
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    changed = {"recipe": "adamw", "sequence": 256, "steps": 8}
    compiled = run(data, tmp_path, compile="on", seed=3, trials=2, **changed)
    assert compiled.code == 0, compiled.err
    assert compiled.events("header")[0]["env"]["compiled"] is True
    again = run(data, tmp_path, compile="on", seed=4, **changed)
    assert again.losses() == compiled.losses(1)
    assert again.losses() != compiled.losses(0)
    assert run(data, tmp_path, seed=4, **changed).losses() == pytest.approx(
        again.losses(), rel=1e-5
    )


# How far another order of the same sum moves a loss in 12 steps. Measured: fp32 with adamw 2e-7,
# fp32 with record42 3e-5 (its orthogonalization is bf16 where that is native), bf16 3e-4.
@pytest.mark.parametrize(
    ("dtype", "recipe", "tolerance"),
    [("float32", "adamw", 2e-6), ("float32", "record42", 2e-4), ("bfloat16", "record42", 2e-3)],
)
def test_accumulating_micro_batches_gives_the_losses_of_one_batch(
    dtype, recipe, tolerance, data, tmp_path
):
    whole = run(data, tmp_path, dtype=dtype, recipe=recipe)
    parts = run(data, tmp_path, dtype=dtype, recipe=recipe, micro_batch=SEQUENCE)
    assert (parts.events("header")[0]["grad_accum"], parts.events("header")[0]["micro_batch"]) == (
        ROWS,
        SEQUENCE,
    )
    assert parts.losses() == pytest.approx(whole.losses(), rel=tolerance)


# ----
# Warm-up


def test_warm_up_leaves_no_trace(two_trials, data, tmp_path, monkeypatch):
    def no_warm_up(trainer, clock):
        trainer.env["compiled"] = False
        trainer.checks |= {"causality": True, "warmup_restored": True}

    monkeypatch.setattr(train_gpt, "warm_up", no_warm_up)
    cold = run(data, tmp_path, seed=3)
    assert [phase["name"] for phase in cold.events("phase")][:2] == ["setup", "train"]
    assert cold.losses() == two_trials.losses(0)


def forget_optimizer(kind):
    return lambda monkeypatch: monkeypatch.setattr(kind, "reset", lambda self: None)


def forget_a_parameter(monkeypatch):
    initial = train_gpt.GPT._initial

    def all_but_the_head(self, name, shape, generator):
        drawn = initial(self, name, shape, generator)
        return (
            self.lm_head.detach().clone() if name == "lm_head" and hasattr(self, "drawn") else drawn
        )

    initialize = train_gpt.GPT.initialize

    def marked(self, seed):
        initialize(self, seed)
        self.drawn = True

    monkeypatch.setattr(train_gpt.GPT, "_initial", all_but_the_head)
    monkeypatch.setattr(train_gpt.GPT, "initialize", marked)


def forget_the_data(monkeypatch):
    monkeypatch.setattr(TrainLoader, "reset", lambda self: None)


def draw_a_random_number(monkeypatch):
    forward = train_gpt.GPT.forward

    def with_noise(self, *inputs):
        torch.rand(1)
        return forward(self, *inputs)

    monkeypatch.setattr(train_gpt.GPT, "forward", with_noise)


@pytest.mark.parametrize(
    "leak",
    [forget_optimizer(Adam), forget_optimizer(NorMuon), forget_a_parameter, forget_the_data,
     draw_a_random_number],
    ids=["adam", "normuon", "parameter", "data", "random numbers"],
)  # fmt: skip
def test_a_warm_up_that_leaks_ends_the_run_before_its_first_step(leak, data, tmp_path, monkeypatch):
    leak(monkeypatch)
    outcome = run(data, tmp_path)
    assert outcome.code == 1
    assert "warmup_restored" in outcome.err
    assert outcome.logs == []


def leak_the_mean(monkeypatch):
    hidden = train_gpt.GPT.hidden

    def leaking(self, *inputs):
        x = hidden(self, *inputs)
        return x + 1e-3 * x.mean(dim=1, keepdim=True)

    monkeypatch.setattr(train_gpt.GPT, "hidden", leaking)


def leak_the_next_token(monkeypatch):
    hidden = train_gpt.GPT.hidden

    def leaking(self, inputs, *rest):
        return hidden(self, inputs.roll(-1, dims=1), *rest)

    monkeypatch.setattr(train_gpt.GPT, "hidden", leaking)


def leak_in_attention(monkeypatch):
    attend = kernels.attention.PortableAttention.__call__

    def leaking(self, q, k, v, **rest):
        return attend(self, q, k.roll(-1, dims=1), v.roll(-1, dims=1), **rest)

    monkeypatch.setattr(kernels.attention.PortableAttention, "__call__", leaking)


@pytest.mark.parametrize("leak", [leak_the_mean, leak_the_next_token, leak_in_attention])
def test_a_model_that_sees_the_future_is_caught(leak, data, tmp_path, monkeypatch):
    leak(monkeypatch)
    outcome = run(data, tmp_path)
    assert outcome.code == 1
    assert "causality" in outcome.err
    assert outcome.logs == []


# ----
# Runs that end early


def diverge_at(step, monkeypatch):
    schedule = train_gpt.learning_rate
    monkeypatch.setattr(
        train_gpt, "learning_rate", lambda c, s: math.inf if s == step else schedule(c, s)
    )


def test_a_run_that_diverges_stops_at_the_first_loss_that_is_no_number(data, tmp_path, monkeypatch):
    diverge_at(6, monkeypatch)  # the seventh step ruins the weights, so the eighth has no loss
    outcome = run(data, tmp_path, guard="off")
    assert outcome.code == 3
    assert "training loss is nan at step 8" in outcome.out + outcome.err
    assert [step["train_loss"] for step in outcome.events("step")][-1] == "nan"
    (end,) = outcome.events("end")
    assert (end["status"], end["reached"]) == ("nonfinite", None)
    assert read_run(outcome.logs[0]).unfinished == "ended with status nonfinite"
    assert read_events(tmp_path / "registry.jsonl")[-1]["status"] == "nonfinite"


def spoil_gradients(steps, monkeypatch, name="blocks.0.mlp.up"):
    """A NaN in the gradient of one tensor at the steps with these indices."""
    gradients = train_gpt.Trainer.gradients

    def spoiled(self, step, flags):
        message = gradients(self, step, flags)
        if step in steps and len(flags):  # not in the warm-up
            dict(self.model.named_parameters())[name].grad[0, 0] = math.nan
        return message

    monkeypatch.setattr(train_gpt.Trainer, "gradients", spoiled)


def test_a_gradient_that_is_no_number_costs_one_step_and_is_named(data, tmp_path, monkeypatch):
    spoil_gradients([4], monkeypatch)
    outcome = run(data, tmp_path)
    assert outcome.code == 0
    (skip,) = outcome.events("skip")
    wanted = {"step": 5, "guard": "nonfinite", "value": "nan", "tensor": "blocks.0.mlp.up"}
    assert {key: skip[key] for key in wanted} == wanted
    assert [step["step"] for step in outcome.events("step") if step["skipped"]] == [5]
    assert outcome.out.count("warning: step 5 skipped, nonfinite: blocks.0.mlp.up nan") == 1
    assert outcome.events("end")[0]["status"] == "done"


def test_a_run_stops_when_only_skips_follow_one_another(data, tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.run.MOST_SKIPS", 3)
    spoil_gradients(range(5, STEPS), monkeypatch)
    outcome = run(data, tmp_path)
    assert outcome.code == 3
    assert "3 steps were skipped in a row, the last of them 8" in outcome.out + outcome.err
    assert [step["step"] for step in outcome.events("skip")] == [6, 7, 8]


@pytest.mark.parametrize("guard", ["nonfinite", "off"])
def test_guards_change_nothing_in_a_run_without_faults(guard, two_trials, data, tmp_path):
    assert run(data, tmp_path, seed=3, guard=guard).losses() == two_trials.losses(0)


def test_a_validation_that_is_no_number_stops_the_run(data, tmp_path, monkeypatch):
    diverge_at(STEPS - 1, monkeypatch)
    outcome = run(data, tmp_path)
    assert outcome.code == 3
    assert f"validation loss is nan at step {STEPS}" in outcome.out + outcome.err
    assert outcome.events("val")[-1]["val_loss"] == "nan"


def test_trials_stop_at_the_first_that_fails(data, tmp_path, monkeypatch):
    diverge_at(6, monkeypatch)
    assert len(run(data, tmp_path, trials=3).logs) == 1


def test_a_crash_is_an_end_of_status_error(data, tmp_path, monkeypatch):
    def crash(trainer, run):
        raise RuntimeError("the roof fell in")

    monkeypatch.setattr(train_gpt, "train", crash)
    outcome = run(data, tmp_path)
    assert outcome.code == 1
    assert "the roof fell in" in outcome.err
    assert outcome.events("end")[0]["status"] == "error"
    assert read_events(tmp_path / "registry.jsonl")[-1]["status"] == "error"


@pytest.fixture(scope="module")
def killed(data, tmp_path_factory):
    """Exit code, stdout and log of processes that a signal ended after step 5, by signal."""
    many = write_data(tmp_path_factory.mktemp("many"), train_documents=6000)
    folders = {
        s: tmp_path_factory.mktemp(s.name) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    }
    processes = {s: start(arguments(many, folder, steps=400)) for s, folder in folders.items()}
    outcomes = {}
    for number, process in processes.items():
        said = ""
        while "step 5/400 | validation" not in said:
            said = process.stdout.readline()
            assert said, process.stderr.read()
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
        (log,) = find_logs(folders[number])
        outcomes[number] = (process.returncode, out, err, log)
    return outcomes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_in_order(number, killed):
    code, out, err, log = killed[number]
    assert code == 128 + number
    assert "interrupted" in out
    assert "Traceback" not in out + err
    events = read_events(log)
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "interrupted")
    assert read_events(log.with_name("registry.jsonl"))[-1]["status"] == "interrupted"
    assert read_run(log).unfinished == "ended with status interrupted"
    assert [event["step"] for event in events if event["event"] == "step"][:5] == [1, 2, 3, 4, 5]


def test_what_a_killed_run_logged_is_readable(killed):
    code, _, _, log = killed[signal.SIGKILL]
    assert code == -signal.SIGKILL
    run = read_run(log)
    assert run.unfinished in ("no end line", "torn last line")
    assert [validation.step for validation in run.validations][:2] == [0, 5]
    assert [line["event"] for line in read_events(log.with_name("registry.jsonl"))] == ["start"]


# ----
# What the tools make of real logs


def test_significance_tests_the_losses_of_the_trials(two_trials, capsys):
    code = significance.main([str(two_trials.logs[0].parent), "--target", "4.5", "--json"])
    (arm,) = json.loads(capsys.readouterr().out)["arms"]
    losses = [two_trials.events("end", log)[0]["val_loss"] for log in (0, 1)]
    truth = stats.ttest_1samp(losses, 4.5, alternative="less")
    assert arm["losses"] == losses
    assert arm["p"] == pytest.approx(truth.pvalue)
    assert arm["times_ms"] == [two_trials.events("end", log)[0]["train_time_ms"] for log in (0, 1)]
    assert (arm["n"], arm["total_steps"], arm["gpu_count"], arm["incomplete"]) == (2, STEPS, 0, [])
    assert code == (0 if truth.pvalue < 0.01 else 1)


@pytest.mark.parametrize(
    ("track", "command"),
    [("tiny", "python -m data.corpus"), ("short", "python -m data.cached_fineweb 9")],
)
def test_missing_shards_are_refused_with_the_command_that_makes_them(track, command, tmp_path):
    words = ["--track", track, "--data-dir", str(tmp_path), "--log-dir", str(tmp_path / "logs")]
    outcome = run_words([*words, "--device", "cpu"], tmp_path / "logs")
    assert (outcome.code, outcome.logs) == (2, [])
    assert command in outcome.err


def test_help_and_print_config_run_nothing(data, tmp_path, capsys):
    for asked in ("--help", "--print-config"):
        with pytest.raises(SystemExit) as stop:
            train_gpt.main([*arguments(data, tmp_path / "logs"), asked])
        assert stop.value.code == 0
        assert not (tmp_path / "logs").exists()
        shown = capsys.readouterr().out
        if asked == "--print-config":
            assert json.loads(shown)["dim"] == 32
        else:
            assert all(flag(field.name) in shown for field in dataclasses.fields(train_gpt.Config))
