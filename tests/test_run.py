"""One run: what it logs, prints and saves, and how it ends."""

import math
import re
import signal

import pytest
import small_run
from small_run import brief, logs_of, read_events, signalled, spoil, wait_for_writer

import train_gpt
from optim import Guard, Held
from runtime import checkpoint, ending
from runtime import run as runs
from runtime.checkpoint import checkpoints, load_final
from runtime.errors import Interrupted, Refused

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("two_layers")]


def events(folder, kind=None):
    return read_events(*logs_of(folder), kind=kind)


def saved_in(folder):
    found = [path for each in folder.glob("checkpoints/*") for path in checkpoints(each)]
    return [int(path.name[5:]) for path in found]


# ---- Lines


def test_a_run_logs_header_phases_steps_validations_and_its_end(data, tmp_path):
    outcome = brief(data, tmp_path, target=10)
    assert outcome.code == 0, outcome.err
    found = events(tmp_path)
    assert (found[0]["event"], found[0]["schema"]) == ("header", 3)
    assert (found[1]["name"], found[1]["timed"]) == ("setup", False)
    assert [each["step"] for each in found if each["event"] == "step"] == [*range(1, 11)]
    assert [each["step"] for each in found if each["event"] == "val"] == [0, 5, 10]
    end = found[-1]
    assert (end["event"], end["status"], end["steps"], end["reached"]) == ("end", "done", 10, True)
    assert end["val_loss"] == events(tmp_path, "val")[-1]["val_loss"]
    assert 10 < end["peak_mib"] < 100_000
    (last,) = re.findall(r"^target .*", outcome.out, re.MULTILINE)
    seconds = f"{end['train_time_ms'] / 1000:.1f}"
    assert last == (f"target 10.0 reached: val_loss {end['val_loss']:.4f} at step 10 in {seconds} "
                    f"s (log {outcome.logs[0]})")  # fmt: skip


def test_losses_are_read_late_as_on_a_gpu_and_all_when_the_clock_stops(data, tmp_path, monkeypatch):
    monkeypatch.setitem(runs.LAG, "cpu", 2)
    written = []

    def look(run):
        written.append((run.steps_done, len(events(tmp_path, "step"))))

    assert brief(data, tmp_path, dict.fromkeys((3, 4, 6, 7), look)).code == 0
    # Before step 6 (5 are done) the clock stopped for a validation.
    assert written == [(3, 1), (4, 2), (6, 5), (7, 5)]
    assert len(events(tmp_path, "step")) == small_run.BRIEF_STEPS


def test_a_logged_norm_is_that_of_the_gradient_of_the_mean_loss_of_a_token(
    data, tmp_path, monkeypatch
):
    norms, step = [], Guard.step

    def note(guard, *given, **named):  # before the guard: of the sum over the tokens of the batch
        for optimizer in guard.optimizers:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            norms.append(math.hypot(*(float(each.norm()) for each in gradients)))
        return step(guard, *given, **named)

    monkeypatch.setattr(Guard, "step", note)
    assert brief(data, tmp_path).code == 0
    last = events(tmp_path, "step")[-1]
    mean = [norm / small_run.BRIEF["batch_tokens"] for norm in norms[-len(last["grad_norms"]) :]]
    assert [*last["grad_norms"].values()] == pytest.approx(mean)
    assert last["grad_norm"] == pytest.approx(math.hypot(*mean))


# ---- Bad steps


def test_skips_in_a_row_end_the_run(data, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "MOST_SKIPS", 3)
    bad = dict.fromkeys((1, 2, 4, 5, 6), spoil(gradient=math.inf))
    outcome = brief(data, tmp_path, bad, adam_accum_steps=2, checkpoint_every=4)
    assert outcome.code == 3
    assert outcome.out.count("warning: step 6 skipped, nonfinite: ") == 1
    assert "3 steps were skipped in a row, the last of them 7" in outcome.out
    first, *others = events(tmp_path, "skip")
    assert first | {"step": 2, "guard": "nonfinite", "shard": "s_train_0.bin"} == first
    assert first["token_offset"] > 0
    assert first["value"] in ("inf", "nan")
    assert first["tensor"]
    skipped = [event["step"] for event in events(tmp_path, "step") if event["skipped"]]
    assert skipped == [2, *(other["step"] for other in others)] == [2, 3, 5, 6, 7]
    (end,) = events(tmp_path, "end")
    assert (end["status"], end["steps"], saved_in(tmp_path)) == ("nonfinite", 7, [4])


def test_matrices_that_kept_their_weights_are_an_event_and_a_warning_and_the_run_continues(
    data, tmp_path, monkeypatch
):
    def hold(run):
        found = Held(3, "weights") if run.steps_done == 3 else None
        monkeypatch.setattr(Guard, "held", lambda *_: found)

    outcome = brief(data, tmp_path, {3: hold, 4: hold})
    assert outcome.code == 0
    (event,) = events(tmp_path, "held")
    assert event | {"step": 4, "matrices": 3, "tensor": "weights"} == event
    assert not any(each["skipped"] for each in events(tmp_path, "step"))
    assert outcome.out.count("warning: at step 4 3 matrices kept their weights, weights") == 1


def test_a_training_loss_that_is_not_finite_in_a_step_that_was_taken_ends_the_run(data, tmp_path):
    at = {3: spoil(loss=math.nan)}
    outcome = brief(data, tmp_path, at, guard="nonfinite", checkpoint_every=2, trials=3)
    assert outcome.code == 3
    assert len(outcome.logs) == 1, "later trials would diverge too"
    assert read_events(tmp_path / "registry.jsonl")[-1]["status"] == "nonfinite"
    assert re.search(r"training loss is nan at step 4 \(shard s_train_0.bin, tokens from \d+\)",
                     outcome.out)  # fmt: skip
    assert "step_000002, the same command with --resume auto resumes it" in outcome.out
    assert events(tmp_path, "step")[-1]["train_loss"] == "nan"


def test_a_validation_loss_that_is_not_finite_ends_the_run(data, tmp_path):
    def spoil_validation(run):
        run.trainer.validate = lambda step: math.inf

    assert brief(data, tmp_path, {6: spoil_validation}).code == 3
    assert events(tmp_path, "end")[0]["status"] == "nonfinite"


def test_an_error_in_the_code_is_logged_and_keeps_its_traceback(data, tmp_path):
    outcome = brief(data, tmp_path, {3: lambda run: 1 / 0})
    assert outcome.code == 1
    assert "Traceback" in outcome.err
    assert "ZeroDivisionError" in outcome.err
    assert events(tmp_path, "end")[0]["status"] == "error"
    assert "stopped after step 3, nothing was saved" in outcome.out


# ---- When to save


@pytest.mark.parametrize(("every", "adam_accum_steps", "steps"), [
    (0, 2, []), (4, 2, [4, 8]), (5, 2, [6, 10]), (7, 3, [9]),
])  # fmt: skip
def test_a_run_is_saved_every_so_many_steps_where_no_gradients_are_pending(
    every, adam_accum_steps, steps, data, tmp_path
):
    outcome = brief(data, tmp_path, checkpoint_every=every, adam_accum_steps=adam_accum_steps)
    assert outcome.code == 0
    saved, done = [], 0
    for event in events(tmp_path):
        done += event["event"] == "step"
        if event.get("name") == "checkpoint":
            saved.append(done)
    assert saved == steps


def test_a_checkpoint_that_cannot_be_written_is_a_warning_and_the_run_continues(
    data, tmp_path, monkeypatch
):
    save = checkpoint.save

    def full_at_4(folder, snapshot, announce):
        if snapshot.state["step"] == 4:
            raise OSError(28, "No space left on device")
        return save(folder, snapshot, announce)

    monkeypatch.setattr(checkpoint, "save", full_at_4)
    outcome = brief(data, tmp_path, {3: wait_for_writer, 5: wait_for_writer}, checkpoint_every=2)
    assert outcome.code == 0
    assert re.search(r"step 4 could not be written .*No space left.* is .*step_000002", outcome.out)


@pytest.mark.parametrize("keep", ["on", "off"])
def test_a_run_that_is_done_keeps_only_its_model_and_only_on_request(keep, data, tmp_path):
    last = []

    def leave_half(run):  # as another process that was killed while it wrote
        wait_for_writer(run)
        next(tmp_path.glob("checkpoints/*/step_*")).with_name(".step_000002").mkdir()
        last.append(run.trainer.model_state())

    outcome = brief(data, tmp_path, {10: leave_half}, checkpoint_every=3, keep_model=keep)
    left = list(tmp_path.glob("checkpoints/*/*"))
    assert [path.name for path in left] == (["final"] if keep == "on" else [])
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(left)
    for folder in left:
        model, facts = load_final(folder)
        assert all(model[name].equal(last[0][name]) for name in model)
        (header,) = outcome.events("header")
        for name in ("run_id", "seed", "source_sha256", "config"):
            assert facts[name] == header[name]
        assert facts["val_loss"] == outcome.events("val")[-1]["val_loss"]
        assert (facts["steps"], facts["tokens"], facts["tokenizer"]) == (10, 160, None)
        phases = [event["name"] for event in outcome.events("phase") if not event["timed"]]
        assert "keep" in phases, "off the clock"
        (folder / "config.json").write_text("{}")
        with pytest.raises(Refused, match=r"config.json has SHA-256"):
            load_final(folder)


# ---- Before the first step


def test_a_source_that_was_edited_while_the_run_got_ready_is_refused_and_leaves_no_log(
    data, tmp_path, monkeypatch
):
    source = tmp_path / "train_gpt.py"
    source.write_text("# as it was\n")
    monkeypatch.setattr(train_gpt, "SOURCE", tmp_path)
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: source.write_text("# edited\n"))
    outcome = brief(data, tmp_path / "logs")
    assert (outcome.code, outcome.logs) == (2, [])
    assert "was edited since the run started. Start it again" in outcome.err


# ---- Signals


@pytest.mark.parametrize(("numbers", "code"), [
    ([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGHUP], 143),
    ([signal.SIGINT, signal.SIGTERM], 130),  # a launcher passes on what the terminal has sent
])  # fmt: skip
def test_a_signal_saves_the_run_and_ends_it(numbers, code, data, tmp_path):
    outcome = brief(data, tmp_path, {3: signalled(*numbers)}, adam_accum_steps=3)
    assert outcome.code == code
    assert saved_in(tmp_path) == [6]
    assert events(tmp_path, "end")[0]["status"] == "interrupted"
    assert "interrupted after step 6, saved in " in outcome.out


def test_a_hangup_that_is_ignored_as_under_nohup_ends_nothing(data, tmp_path):
    with small_run.restored_settings():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert brief(data, tmp_path, {3: signalled(signal.SIGHUP)}).code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_before_the_runs_a_signal_ends_the_process_with_its_code(number):
    with small_run.restored_settings():
        ending.listen()
        with pytest.raises(Interrupted) as raised:
            signal.raise_signal(number)
        signal.raise_signal(number)  # which does not break into the orderly end
    assert raised.value.code == (130 if number == signal.SIGINT else 143)


def test_a_signal_in_the_last_validation_lets_the_run_finish_and_saves_the_next(data, tmp_path):
    at = {"validate 10": signalled(signal.SIGTERM)}
    assert brief(data, tmp_path, at, trials=2).code == 143
    ends = [(end["status"], end["steps"]) for end in events(tmp_path, "end")]
    assert ends == [("done", 10), ("interrupted", 1)]
