"""A claim and the git history: what verify asks of it, and what record.py writes and prints."""

import os
import subprocess
from pathlib import Path

import pytest
from small_record import LOSSES, RULES, SOURCE, call, forge, make_claim, write_record

from claims import record as provenance
from claims.record import TRACKS, claim_text, write_claim
from scripts import record

CREATED = "2026-01-01T00:00:00+00:00"  # the runs of a small record start a day later
IN_TIME, TOO_LATE = "2026-01-01T00:01:00+00:00", "2026-01-02T00:30:00+00:00"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git repository with a commit, which stands for that of this program."""
    monkeypatch.setitem(TRACKS, "tiny", RULES)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    commit(tmp_path, "2025-01-01T00:00:00+00:00")
    return tmp_path


def git(root: Path, *words: str, **env: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x"]
    command = ["git", *who, "-C", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | env)
    return done.stdout


def commit(root: Path, time: str) -> None:
    (root / "log").write_text(time)
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "x", GIT_COMMITTER_DATE=time)


def made(root: Path, created: str, committed: str) -> Path:
    """A record whose claim was committed at that time."""
    folder = write_record(root / "records", make_claim(n=4, created=created), LOSSES[:4])
    commit(root, committed)
    assert record.main(["make", str(folder)]) in (0, 1)
    return folder


def edit_claim(folder: Path) -> None:
    """After its commit, and with runs that name the new one."""
    (folder / "claim.json").write_text(claim_text(make_claim(n=4, about="Better seeds.")))
    forge(folder)
    commit(folder.parents[2], TOO_LATE)


@pytest.mark.parametrize(("created", "committed", "change", "sentence"), [
    (CREATED, TOO_LATE, None, f"before the claim was committed, {TOO_LATE}"),
    (CREATED, IN_TIME, edit_claim, f"before the claim was committed, {TOO_LATE}"),
    ("2001-01-01T00:00:00+00:00", IN_TIME, None,
     "written at 2001-01-01T00:00:00+00:00, but was commit"),
], ids=["committed after a run", "edited after its commit", "dated back"])  # fmt: skip
def test_a_claim_is_caught_that_was(created, committed, change, sentence, checkout, capsys):
    folder = made(checkout, created, committed)
    if change:
        change(folder)
    code, said = call(capsys, "verify", folder)
    assert (code, sentence in said) == (1, True)


def test_a_claim_that_was_committed_before_its_runs_holds_also_under_another_name(checkout, capsys):
    folder = made(checkout, CREATED, IN_TIME)
    code, said = call(capsys, "verify", folder)
    assert (code, "not checked" in said) == (0, False)
    git(checkout, "mv", "records/tiny", "records/moved")
    commit(checkout, TOO_LATE)
    assert provenance.commit_time(next(checkout.glob("records/moved/*/claim.json"))) == IN_TIME


def test_a_second_claim_of_seeds_that_is_dated_back_is_the_one_that_fails(checkout, capsys):
    first = made(checkout, CREATED, IN_TIME)
    later = make_claim("Second", 4, 1002, created="2025-12-31T23:00:00+00:00")
    folder = write_record(checkout / "records", later, LOSSES[:4])
    commit(checkout, "2026-01-01T12:00:00+00:00")
    code, said = call(capsys, "make", folder)
    assert (code, "seeds [1002, 1003] were claimed before, by Good" in said) == (1, True)
    assert "claimed before" not in call(capsys, "verify", first)[1]


@pytest.mark.parametrize("case", [
    "no checkout", "another checkout", "no commit", "no history before it", "no git",
])  # fmt: skip
def test_where_no_history_can_tell_it_says_so(case, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TRACKS, "tiny", RULES)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    if case in ("no commit", "another checkout"):
        commit(tmp_path, CREATED)
    folder = write_record(tmp_path / "records", make_claim(n=4), LOSSES[:4])
    if case == "another checkout":
        commit(tmp_path, IN_TIME)
        monkeypatch.setattr(provenance, "ROOT", tmp_path / "elsewhere")
    elif case == "no history before it":  # as in a shallow clone
        commit(tmp_path, TOO_LATE)
    elif case == "no git":
        monkeypatch.setenv("PATH", "")
    record.main(["make", str(folder)])
    code, said = call(capsys, "verify", folder)
    assert (code, "not checked: whether its claim was first" in said) == (0, True)


# ---- What record.py writes of a claim, and its source


def test_a_source_that_no_record_may_have_is_refused_before_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    stub = {"optim/base.py": b"torch.compile(update, options={})"}
    monkeypatch.setattr(record, "read_sources", lambda root: stub)
    assert record.main(["claim", "Mine", "--about", "x", "--", "--track=tiny"]) == 2
    assert ("forbidden" in capsys.readouterr().err, [*tmp_path.iterdir()]) == (True, [])
    assert record.main(["claim", "Mine", "--about", "x", "--", "--track=short"]) == 2
    assert "short has no val_sha256" in capsys.readouterr().err


def test_a_claim_commits_itself_and_its_source_and_nothing_else(checkout, monkeypatch):
    monkeypatch.setattr(record, "RECORDS", checkout / "records")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "x")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "x")
    claim = make_claim(n=4)
    folder = write_claim(checkout / "records", claim, SOURCE)
    (checkout / "draft").write_text("staged by its author, for another commit")
    git(checkout, "add", "draft")
    assert record.commit(folder, claim.source_sha256, "Good") is None
    committed = git(checkout, "show", "--name-only", "--format=%s").split()
    names = ["records/sources", "records/tiny"]
    assert committed[:2] == ["Claim", "Good"]
    assert sorted(str(Path(name).parents[-3]) for name in committed[2:]) == names
    assert git(checkout, "diff", "--cached", "--name-only") == "draft\n"
    monkeypatch.setenv("PATH", "")
    said = record.commit(folder, claim.source_sha256, "Good")
    assert "not committed" in said
    assert "Commit it before its runs" in said
