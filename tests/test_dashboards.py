"""`--log-to`: what the dashboards have got equals what stands in the log."""

import sys
from types import ModuleType
from typing import ClassVar

import pytest
from small_run import BRIEF_STEPS, brief, logs_of, read_events

import train_gpt
from runtime.terminal import PROJECT, SHOWN

pytestmark = pytest.mark.usefixtures("two_layers")


def logged(folder):
    """Numbers of steps and validations by name and step, from the log."""
    found = {name: {} for name in SHOWN}
    for event in read_events(*logs_of(folder)):
        for name in SHOWN if event["event"] in ("step", "val") else ():
            if name in event:
                found[name][event["step"]] = pytest.approx(float(event[name]), rel=1e-6)
    assert len(found["train_loss"]) == BRIEF_STEPS
    assert len(found["val_loss"]) == 3
    return found


def read_tensorboard(folder, run_id):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / run_id))
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in SHOWN}


def read_trackio(folder, run_id):
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(PROJECT, run_id)
    return {name: {row["step"]: row[name] for row in rows if name in row} for name in SHOWN}


@pytest.mark.slow
@pytest.mark.parametrize("read", [read_tensorboard, read_trackio])
def test_a_dashboard_shows_the_log(read, data, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # before its import
    package = read.__name__.removeprefix("read_")
    pytest.importorskip(package, reason=f"needs the package {package}")
    assert brief(data, tmp_path, log_to=package).code == 0
    (log,) = logs_of(tmp_path)
    assert read(tmp_path, log.stem) == logged(tmp_path)


class Writer:
    """TensorBoard's SummaryWriter. What it writes with purge_step hides all from there on."""

    files: ClassVar[list[tuple[int, dict[str, dict[int, float]]]]] = []

    def __init__(self, folder, purge_step=10**9):
        self.numbers = {}
        self.files.append((purge_step, self.numbers))

    def add_scalar(self, name, number, step):
        shown = self.numbers.setdefault(name, {})
        assert name == "val_loss" or step not in shown
        shown[step] = number

    def close(self):
        pass


def test_tensorboard_shows_a_resumed_run_without_the_steps_that_are_done_again(
    data, tmp_path, monkeypatch
):
    writer = ModuleType("torch.utils.tensorboard")
    writer.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, writer.__name__, writer)
    monkeypatch.setattr(train_gpt, "require_packages", lambda config: None)
    monkeypatch.setattr(Writer, "files", [])
    settings = {"log_to": "tensorboard", "checkpoint_every": 4}
    assert brief(data, tmp_path, {6: lambda run: 1 / 0}, **settings).code == 1
    resumed = brief(data, tmp_path, resume="auto", **settings)
    assert resumed.code == 0
    (_, first), (purged, second) = Writer.files
    assert max(first["train_loss"]) > 4, "it has steps that are done again"
    assert purged == 5
    assert [*second["train_loss"]] == [*range(5, BRIEF_STEPS + 1)]
    folder = tmp_path / "tensorboard"
    assert f" -m tensorboard.main --logdir {folder}\n" in resumed.out


def test_a_dashboard_that_fails_is_one_warning_and_the_run_is_done(data, tmp_path, monkeypatch):
    sent = []

    def log(step, numbers):
        sent.append(step)
        if step == 3:
            raise ConnectionError("no route")

    monkeypatch.setattr(train_gpt, "require_packages", lambda config: None)
    monkeypatch.setattr("runtime.terminal.open_dashboard", lambda *run: (log, None))
    outcome = brief(data, tmp_path, log_to="wandb")
    assert outcome.out.count("warning: --log-to wandb stops here: no route") == 1
    assert sent == [0, 1, 2, 3]
    assert outcome.events("end")[0]["status"] == "done"


def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    data, tmp_path, monkeypatch
):
    monkeypatch.setattr("runtime.settings.importlib.util.find_spec", lambda name: None)
    outcome = brief(data, tmp_path, log_to="trackio")
    assert outcome.code == 2
    assert outcome.err.endswith("--log-to trackio: its package is missing. pip install trackio\n")
