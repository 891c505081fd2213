"""`--log-to`: what the dashboards have got equals what stands in the log."""

import time

import pytest
from stub_trainer import STEPS, logs_of, read_events, run, trainer_in

from runtime.errors import Refused
from runtime.settings import require_packages
from runtime.terminal import PROJECT, SHOWN

PEAK_MIB = 123.0


@pytest.fixture(autouse=True)
def known_memory(monkeypatch):
    monkeypatch.setattr("runtime.run.peak_mib", lambda machine: PEAK_MIB)


def logged(folder):
    """Numbers by name and step, from the log; the stub's share of the peak rate is 0.5."""
    found = {name: {} for names in SHOWN.values() for name in names}
    for event in read_events(*logs_of(folder)):
        event |= {"mfu": 0.5, "peak_mib": PEAK_MIB}
        for name in SHOWN.get(event["event"], ()):
            found[name][event["step"]] = pytest.approx(float(event[name]), rel=1e-6)
    assert len(found["train_loss"]) == STEPS
    assert len(found["val_loss"]) == 3
    return found


@pytest.mark.slow
def test_tensorboard_shows_the_log(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(tmp_path, log_to="tensorboard") == 0
    (log,) = logs_of(tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard" / log.stem))
    events.Reload()
    for name, values in logged(tmp_path).items():
        assert {each.step: each.value for each in events.Scalars(name)} == values


@pytest.mark.slow
def test_trackio_shows_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # before its import
    pytest.importorskip("trackio", reason="needs the package trackio")
    from trackio.sqlite_storage import SQLiteStorage

    assert run(tmp_path, log_to="trackio") == 0
    (log,) = logs_of(tmp_path)
    found = SQLiteStorage.get_logs(PROJECT, log.stem)
    for name, values in logged(tmp_path).items():
        assert {each["step"]: each[name] for each in found if name in each} == values


@pytest.mark.slow
def test_wandb_shows_the_log_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs the package wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert run(tmp_path, log_to="wandb") == 0
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    (log,) = logs_of(tmp_path)
    assert path.name == f"run-{log.stem}.wandb"
    found = histories(path)
    for name, values in logged(tmp_path).items():
        assert {each["step"]: each[name] for each in found if name in each} == values


def histories(path):
    """The numbers in a file of wandb: a header of 7 bytes, then LevelDB's log of protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts, found = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # a block's end is too short for a record
            position += 32768 - position % 32768
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # the whole of a record, or the last of its parts
            items = Record.FromString(parts).history.item
            found.append({(i.key or i.nested_key[0]): float(i.value_json) for i in items})
            parts = b""
    return [each for each in found if each]


def test_a_dashboard_gets_each_number_while_the_run_goes_on(tmp_path, monkeypatch):
    sent = {}

    def log(step, numbers):
        for name, number in numbers.items():
            sent.setdefault(name, {})[step] = number

    def look(trainer, step):
        while 5 not in sent.get("train_loss", {}):  # the sender is another thread
            time.sleep(0.001)

    monkeypatch.setattr("runtime.terminal.open_dashboard", lambda *run: (log, lambda: None))
    assert run(tmp_path, {7: look}, log_to="wandb") == 0
    assert sent == logged(tmp_path)


def test_a_dashboard_that_fails_is_told_once_and_the_run_is_done(tmp_path, monkeypatch, capsys):
    sent = []

    def log(step, numbers):
        sent.append(step)
        if step == 3:
            raise ConnectionError("no route")

    monkeypatch.setattr("runtime.terminal.open_dashboard", lambda *run: (log, None))
    assert run(tmp_path, log_to="wandb") == 0
    assert capsys.readouterr().out.count("warning: --log-to wandb stops here: no route") == 1
    assert sent == [0, 1, 2, 3]
    assert read_events(*logs_of(tmp_path))[-1]["status"] == "done"


def test_a_missing_package_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = trainer_in(tmp_path, log_to="trackio").config
    with pytest.raises(Refused, match=r"--log-to trackio: .* pip install trackio$"):
        require_packages(config)
