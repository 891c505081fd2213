"""One run, with a trainer of eight numbers: what it logs, says and saves, and how it ends."""

import math
import re
import signal

import pytest
import stub_trainer
from stub_trainer import STEPS, logs_of, read_events, run, signalled, wait_for_writer

from runtime import checkpoint, ending
from runtime import run as runs
from runtime.checkpoint import checkpoints, load_final
from runtime.errors import Interrupted, Refused

pytestmark = pytest.mark.core


def events(folder, kind=None):
    return read_events(*logs_of(folder), kind=kind)


def saved_in(folder):
    found = [path for each in folder.glob("checkpoints/*") for path in checkpoints(each)]
    return [int(path.name[5:]) for path in found]


# ---- Lines


def test_a_run_logs_header_phases_steps_validations_and_its_end(tmp_path, capsys):
    assert run(tmp_path) == 0
    found = events(tmp_path)
    assert (found[0]["event"], found[0]["schema"]) == ("header", 3)
    assert (found[1]["name"], found[1]["timed"]) == ("setup", False)
    assert [each["step"] for each in found if each["event"] == "step"] == [*range(1, STEPS + 1)]
    assert [each["step"] for each in found if each["event"] == "val"] == [0, 5, 10]
    end = found[-1]
    assert (end["event"], end["status"], end["steps"], end["reached"]) == ("end", "done", 10, True)
    assert end["val_loss"] == events(tmp_path, "val")[-1]["val_loss"]
    assert 10 < end["peak_mib"] < 100_000
    (last,) = re.findall(r"^target .*", capsys.readouterr().out, re.MULTILINE)
    (log,) = logs_of(tmp_path)
    seconds = f"{end['train_time_ms'] / 1000:.1f}"
    assert last == (f"target 1.0 reached: val_loss {end['val_loss']:.4f} at step 10 in {seconds} s "
                    f"(log {log})")  # fmt: skip


def test_losses_are_read_late_as_on_a_gpu_and_all_when_the_clock_stops(tmp_path, monkeypatch):
    monkeypatch.setitem(runs.LAG, "cpu", 2)
    written = []

    def look(trainer, step):
        written.append((step, len(events(tmp_path, "step"))))

    assert run(tmp_path, dict.fromkeys((4, 5, 7, 8), look)) == 0
    # Before step 6 (5 are done) the clock stopped for a validation.
    assert written == [(3, 1), (4, 2), (6, 5), (7, 5)]
    assert len(events(tmp_path, "step")) == STEPS


def test_a_logged_norm_is_that_of_the_gradient_of_the_mean_loss_of_a_token(tmp_path):
    norms = []

    def keep(trainer, step):  # of the step before
        norms.append(trainer.gradient.norm().item())

    assert run(tmp_path, {3: keep}) == 0  # the stub's loss is that of rows of two tokens
    event = events(tmp_path, "step")[1]
    assert event["grad_norms"] == {"sgd": pytest.approx(norms[0] / 2)}
    assert event["grad_norm"] == pytest.approx(norms[0] / 2)


# ---- Bad steps


def spoil(*steps, by=math.inf):
    def act(trainer, step):
        trainer.spoil = by

    return dict.fromkeys(steps, act)


def test_skips_in_a_row_end_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "MOST_SKIPS", 3)
    assert run(tmp_path, spoil(2, 3, 5, 6, 7), adam_accum_steps=2, checkpoint_every=4) == 3
    out = capsys.readouterr().out
    assert out.count("warning: step 6 skipped, nonfinite: weights inf (shard shard_0") == 1
    assert "3 steps were skipped in a row, the last of them 7" in out
    first, *others = events(tmp_path, "skip")
    wanted = {"step": 2, "guard": "nonfinite", "value": "inf", "tensor": "weights",
              "shard": "shard_0", "token_offset": 16}  # fmt: skip
    assert first | wanted == first
    skipped = [event["step"] for event in events(tmp_path, "step") if event["skipped"]]
    assert skipped == [2, *(other["step"] for other in others)] == [2, 3, 5, 6, 7]
    (end,) = events(tmp_path, "end")
    assert (end["status"], end["steps"], saved_in(tmp_path)) == ("nonfinite", 7, [4])


def test_matrices_that_kept_their_weights_are_an_event_and_a_warning_and_the_run_continues(
    tmp_path, capsys
):
    def hold(trainer, step):
        trainer.hold = True

    assert run(tmp_path, {4: hold}) == 0
    (event,) = events(tmp_path, "held")
    assert event | {"step": 4, "matrices": 3, "tensor": "weights"} == event
    assert not any(each["skipped"] for each in events(tmp_path, "step"))
    assert capsys.readouterr().out.count("warning: at step 4 3 matrices kept their weights") == 1


def test_a_training_loss_that_is_not_finite_in_a_step_that_was_taken_ends_the_run(tmp_path, capsys):
    assert run(tmp_path, spoil(4, by=math.nan), checkpoint_every=2, trials=3) == 3
    assert len(logs_of(tmp_path)) == 1, "later trials would diverge too"
    assert read_events(tmp_path / "registry.jsonl")[-1]["status"] == "nonfinite"
    out = capsys.readouterr().out
    assert "training loss is nan at step 4 (shard shard_0, tokens from 16)" in out
    assert "step_000002, the same command with --resume auto resumes it" in out
    assert events(tmp_path, "step")[-1]["train_loss"] == "nan"


def test_a_validation_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(stub_trainer.StubTrainer, "validate", lambda *_: math.inf)
    assert run(tmp_path) == 3
    assert events(tmp_path, "end")[0]["status"] == "nonfinite"


def test_an_error_in_the_code_is_logged_and_keeps_its_traceback(tmp_path, capsys):
    def fail(trainer, step):
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, {4: fail})
    assert events(tmp_path, "end")[0]["status"] == "error"
    assert "stopped after step 3, nothing was saved" in capsys.readouterr().out


# ---- When to save


@pytest.mark.parametrize(("every", "adam_accum_steps", "steps"), [
    (0, 2, []), (4, 2, [4, 8]), (5, 2, [6, 10]), (1, 1, [*range(1, 11)]), (7, 3, [9]), (500, 2, []),
])  # fmt: skip
def test_a_run_is_saved_every_so_many_steps_where_no_gradients_are_pending(
    every, adam_accum_steps, steps, tmp_path
):
    assert run(tmp_path, checkpoint_every=every, adam_accum_steps=adam_accum_steps) == 0
    saved, done = [], 0
    for event in events(tmp_path):
        done += event["event"] == "step"
        if event.get("name") == "checkpoint":
            saved.append(done)
    assert saved == steps


def test_a_checkpoint_that_cannot_be_written_is_told_and_runs_go_on(tmp_path, monkeypatch, capsys):
    save = checkpoint.save

    def full_at_4(folder, snapshot, announce):
        if snapshot.state["step"] == 4:
            raise OSError(28, "No space left on device")
        return save(folder, snapshot, announce)

    monkeypatch.setattr(checkpoint, "save", full_at_4)

    assert run(tmp_path, {5: wait_for_writer, 3: wait_for_writer}, checkpoint_every=2) == 0
    assert re.search(r"step 4 could not be written .*No space left", capsys.readouterr().out)


@pytest.mark.parametrize("keep", [True, False])
def test_a_run_that_is_done_keeps_its_model_alone_and_only_if_told(keep, tmp_path):
    def kill(trainer, step):  # another process, while it wrote
        wait_for_writer(trainer, step)
        next(tmp_path.glob("checkpoints/*/step_*")).with_name(".step_000002").mkdir()

    run(tmp_path, {10: kill}, checkpoint_every=3, keep_model=keep)
    left = sorted(path.name for path in tmp_path.glob("checkpoints/*/*"))
    assert left == (["final"] if keep else [])
    assert len(list((tmp_path / "checkpoints").iterdir())) == keep


def test_what_is_kept_of_a_run_are_its_last_weights_and_where_they_come_from(tmp_path):
    last = []
    run(tmp_path, {"validate 10": lambda trainer, step: last.append(trainer.weights.clone())},
        keep_model=True)  # fmt: skip
    (folder,) = tmp_path.glob("checkpoints/*/final")
    model, facts = load_final(folder)
    assert model["weights"].equal(last[0])
    (header,), (validated,) = events(tmp_path, "header"), events(tmp_path, "val")[-1:]
    for name in ("run_id", "seed", "source_sha256", "config"):
        assert facts[name] == header[name]
    assert facts["val_loss"] == validated["val_loss"]
    assert (facts["steps"], facts["tokens"], facts["tokenizer"]) == (10, 40, "gpt2")
    phases = [event["name"] for event in events(tmp_path, "phase") if not event["timed"]]
    assert "keep" in phases, "off the clock"
    (folder / "config.json").write_text("{}")
    with pytest.raises(Refused, match=r"config.json has SHA-256"):
        load_final(folder)


# ---- Before the first step


def test_a_source_that_was_edited_while_the_run_got_ready_is_refused_and_leaves_no_log(tmp_path):
    trainer = stub_trainer.trainer_in(tmp_path)
    trainer.reset = lambda seed: (trainer.source / "train_gpt.py").write_text("# nine numbers\n")
    with pytest.raises(Refused, match="was edited since the run started"):
        stub_trainer.make_runs(trainer)
    assert logs_of(tmp_path) == []


# ---- Signals


@pytest.mark.parametrize(("numbers", "code"), [
    ([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGHUP], 143),
    ([signal.SIGINT, signal.SIGTERM], 130),  # a launcher passes on what the terminal has sent
])  # fmt: skip
def test_a_signal_saves_the_run_and_ends_it(numbers, code, tmp_path, capsys):
    assert run(tmp_path, {4: signalled(*numbers)}, adam_accum_steps=3) == code
    assert saved_in(tmp_path) == [6]
    assert events(tmp_path, "end")[0]["status"] == "interrupted"
    assert "interrupted after step 6, saved in " in capsys.readouterr().out


def test_a_hangup_that_is_ignored_as_under_nohup_ends_nothing(tmp_path):
    with stub_trainer.restored_settings():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert run(tmp_path, {4: signalled(signal.SIGHUP)}) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_before_the_runs_a_signal_ends_the_process_with_its_code(number):
    with stub_trainer.restored_settings():
        ending.listen()
        with pytest.raises(Interrupted) as raised:
            signal.raise_signal(number)
        signal.raise_signal(number)  # which does not break into the orderly end
    assert raised.value.code == (130 if number == signal.SIGINT else 143)


def test_a_signal_in_the_last_validation_lets_the_run_finish_and_saves_the_next(tmp_path):
    assert run(tmp_path, {"validate 10": signalled(signal.SIGTERM)}, trials=2) == 143
    ends = [(end["status"], end["steps"]) for end in events(tmp_path, "end")]
    assert ends == [("done", 10), ("interrupted", 1)]
