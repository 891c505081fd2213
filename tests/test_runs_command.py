"""`runs.py`: what runs take, and that nothing a judge or a resume needs is lost."""

import signal

import pytest
from stub_trainer import run, signalled

from claims.logs import find_runs, read_run
from scripts.runs import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two runs that are done and one that was interrupted, each with 2 MB of checkpoints."""
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "logs"
    shared = {"checkpoint_dir": "checkpoints", "keep_model": False, "checkpoint_every": 0}
    for seed in (2, 3):
        assert run(logs, seed=seed, **shared) == 0
    assert run(logs, {6: signalled(signal.SIGTERM)}, seed=4, **shared) == 143
    for log in find_runs([logs]):
        kept = tmp_path / "checkpoints" / read_run(log).run_id / "final"
        kept.mkdir(parents=True)
        (kept / "model.safetensors").write_bytes(bytes(2_000_000))
    return tmp_path


def call(*words):
    return main([str(word) for word in words])


def test_the_list_has_each_run_with_its_space(folder, capsys):
    assert call() == 0
    head, *rows, total = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "status", "steps"]
    assert [row.split()[1] for row in rows] == ["done", "done", "interrupted"]
    assert [row.split()[-1] for row in rows] == ["2.0"] * 3
    assert total == "3 runs, 6 MB"


def test_only_runs_that_are_done_lose_what_they_keep_and_no_log_changes(folder, capsys):
    first, _, third = [read_run(log).run_id for log in find_runs(["logs"])]
    before = {path: path.read_bytes() for path in (folder / "logs").glob("*.jsonl")}
    assert call("--remove", first, third) == 2
    assert "--resume auto" in capsys.readouterr().err
    assert (folder / "checkpoints" / first).exists(), "nothing is removed if one is refused"
    assert call("--remove", first, "../logs") == 2
    assert call("--remove", first) == 0
    assert not (folder / "checkpoints" / first).exists()
    assert (folder / "checkpoints" / third).exists()
    assert {path: path.read_bytes() for path in (folder / "logs").glob("*.jsonl")} == before
