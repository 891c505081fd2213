"""What befalls a run, each fault once, with real small runs: what is left goes on, or says why not.
"""

import os
import random
import re
import resource
import signal
import time
from pathlib import Path

import pytest
from small_run import arguments as flags_of
from small_run import run, start, start_ranks, write_data
from stub_trainer import in_child, logs_of, losses_of, read_events

import train_gpt
from runtime.checkpoint import checkpoints
from runtime.run import Run

pytestmark = pytest.mark.usefixtures("two_layers")

EVERY = {"checkpoint_every": 2, "keep_model": "on"}
PATIENCE = 120  # seconds


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"), train_documents=190)


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    """The losses of a run that nothing befell."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(data, folder).code == 0
    return losses_of(*logs_of(folder))


def killed(data, folder, seconds):
    """A run that is killed so long after it began; returns whether it was still running."""
    child = os.fork()
    if not child:
        os._exit(run(data, folder, **EVERY | {"resume": "auto"}).code)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def resume(data, folder, code=0, **changed):
    outcome = run(data, folder, **EVERY | {"resume": "auto"} | changed)
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    return outcome


@pytest.fixture
def broken(data, tmp_path):
    """The folder of a run that SIGTERM broke off after step 8."""
    folder = tmp_path / "logs"
    stepped = Run.stepped

    def stopped(self, *arguments, **named):
        stepped(self, *arguments, **named)
        if self.steps_done == 7:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "stepped", stopped)
        assert run(data, folder, **EVERY).code == 143
    return folder


def newest(folder: Path) -> Path:
    (run_folder,) = (folder / "checkpoints").iterdir()
    return checkpoints(run_folder)[-1]


# ---- Kills


def test_a_run_that_is_killed_at_random_moments_comes_to_the_same_losses(data, expected, tmp_path):
    moments = random.Random(1)
    for _ in range(5):
        if not killed(data, tmp_path, moments.uniform(0.2, 2.0)):
            break
    resume(data, tmp_path)
    assert losses_of(*logs_of(tmp_path)) == expected


@pytest.mark.parametrize("moment", [
    "runtime.registry.append", "runtime.log.register", "runtime.checkpoint._sync",
    "runtime.checkpoint.remove",
])  # fmt: skip
def test_a_kill_in_the_middle_of_writing_is_survived(moment, data, expected, tmp_path):
    """At the third call, in the second run or the second checkpoint."""
    calls = []

    def die_at_the_third(*arguments, **named):
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    def doomed():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moment, die_at_the_third)
            return run(data, tmp_path, trials=2, **EVERY).code

    module, _, name = moment.rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)
    assert in_child(doomed) == -signal.SIGKILL
    resume(data, tmp_path, trials=2)
    first = [log for log in logs_of(tmp_path) if read_events(log)[0]["seed"] == 0]
    assert losses_of(*first) == expected


# ---- Disks


def test_a_disk_that_fills_up_is_told_and_the_run_can_be_resumed(
    data, expected, tmp_path, monkeypatch
):
    """The system refuses to let any file grow further: checkpoints fail too, and are told."""
    gradients = train_gpt.Trainer.gradients
    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk(self, step, flags):
        logs = logs_of(tmp_path)
        if logs and step == 5:
            size = logs[0].stat().st_size + 100
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, no_limit[1]))
        return gradients(self, step, flags)

    try:
        with monkeypatch.context() as full:
            full.setattr(train_gpt.Trainer, "gradients", fill_the_disk)
            outcome = run(data, tmp_path, **EVERY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    assert outcome.code in (1, 2)
    assert "could not be written" in outcome.out
    (log,) = outcome.logs
    warning, error = outcome.err.splitlines()
    assert warning.startswith(f"warning: cannot write {log}")
    assert "lines are lost. Free some space and resume" in error
    resume(data, tmp_path)
    assert losses_of(*logs_of(tmp_path)) == expected


def test_a_log_that_a_crash_tore_is_resumed_and_one_that_was_cut_is_refused(data, expected, broken):
    (log,) = logs_of(broken)
    content = log.read_bytes()
    end = content.rindex(b'{"event": "end"')
    log.write_bytes(content[:end] + b'{"event": "en')
    resume(data, broken)
    assert losses_of(*logs_of(broken)) == expected
    cut = broken.parent / "cut"
    run(data, cut, **EVERY)
    (whole,) = logs_of(cut)
    lines = whole.read_bytes().splitlines(keepends=True)
    whole.write_bytes(b"".join(lines[:12]))
    outcome = resume(data, cut, code=2)
    assert re.search(r"of the log had \d+ bytes .* has \d+\. Restore the log", outcome.err)


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_resumed(data, expected, broken):
    last = newest(broken)
    assert last.name == "step_000008"
    weights = bytearray((last / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (last / "model.safetensors").write_bytes(weights)
    outcome = resume(data, broken)
    assert f"warning: {last / 'model.safetensors'} has SHA-256" in outcome.out
    assert read_events(*logs_of(broken), kind="resume")[0]["checkpoint"] == "step_000006"
    assert losses_of(*logs_of(broken)) == expected


def test_a_shard_that_was_cut_is_refused_before_the_run_goes_on(data, broken, tmp_path):
    cut = tmp_path / "data"
    cut.mkdir()
    for shard in data.glob("*.bin"):
        content = shard.read_bytes()
        (cut / shard.name).write_bytes(content[: len(content) // 2])
    before = newest(broken)
    outcome = run(cut, broken, resume="auto", **EVERY)
    assert outcome.code == 2
    assert "s_train_0.bin" in outcome.err
    assert "Traceback" not in outcome.err
    assert newest(broken) == before


# ---- Ranks


@pytest.mark.slow
def test_a_rank_that_is_lost_ends_the_others_in_time_and_the_run_goes_on(data, tmp_path):
    how = {"steps": 80, "val_every": 0, "rank_timeout": 10} | EVERY
    training = write_data(tmp_path / "data", train_documents=1500)
    ranks = start_ranks(2, flags_of(training, tmp_path / "logs", **how))
    deadline = time.monotonic() + PATIENCE
    while not list(tmp_path.glob("logs/checkpoints/*/step_*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks[1].kill()
    _, err = ranks[0].communicate(timeout=PATIENCE)
    assert ranks[0].returncode == 1, err
    assert "rank" in err  # torchrun names the one that died
    assert "Traceback" not in err
    assert read_events(*logs_of(tmp_path / "logs"), kind="end")[0]["status"] == "error"
    again = start(flags_of(training, tmp_path / "logs", **how, resume="auto"))
    out, err = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, err
    assert "resumes after step" in out
    assert len(losses_of(*logs_of(tmp_path / "logs"))[0]) == 80
