"""Records, logs and registries of strangers: no path out, nothing unbounded, no way to steer."""

import functools
import json
import os
import shutil
import subprocess
import sys

import pytest
import small_run
from small_record import register, rewrite_claim
from test_claim_history import git

from claims.logs import MAX_BYTES, read_runs
from claims.pages import readme
from claims.record import read_evidence
from runtime.claim import read_claim
from runtime.errors import LogError, Refused
from runtime.registry import read_registry
from scripts import record

RECORDS = small_run.ROOT / "records"
NAME = "2026-11-24_Record89"
NESTED: dict = functools.reduce(lambda inner, _: {"a": inner}, range(700), {})
STEERING = "\x1b[2J\x1b]0;owned\x07\r\u202e"  # clears a terminal, names it, turns text around


@pytest.fixture
def stranger(tmp_path):
    """A record of two runs among records of its own, as a stranger may send one."""
    shutil.copytree(RECORDS / "sources", tmp_path / "sources")
    folder = shutil.copytree(RECORDS / "small" / NAME, tmp_path / "small" / NAME)
    for log in sorted((folder / "runs").glob("2*.jsonl"))[2:]:
        log.unlink()
    return folder


def tool(name: str, *words: object) -> subprocess.CompletedProcess:
    """Run a script with at most 8 GiB of address space."""
    command = [sys.executable, str(small_run.ROOT / "scripts" / name), *map(str, words)]
    command = ["sh", "-c", 'ulimit -v 8388608; exec "$@"', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["README.md", "runs/registry_2.jsonl"])
def test_nothing_is_written_through_a_link_in_a_record(name, stranger, tmp_path, capsys):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (stranger / name).unlink(missing_ok=True)
    (stranger / name).symlink_to(victim)
    assert record.main(["make", str(stranger), str(RECORDS / "small" / NAME / "runs")]) == 2
    assert f"{stranger / name} is a link or no regular file" in capsys.readouterr().err
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("place", [".", ".."])
def test_a_git_repository_that_comes_with_a_record_runs_none_of_its_commands(
    place, stranger, tmp_path, capsys
):
    """Its remote promises an object that is missing, by way of a command."""
    top, owned = stranger / place, tmp_path / "owned"
    git(top, "init", "-q")
    for content in "ab":
        (top / "x.txt").write_text(content)
        git(top, "add", ".")
        git(top, "commit", "-qm", "x")
    tree = git(top, "rev-parse", "HEAD^{tree}").strip()
    for key, value in {
        "core.repositoryformatversion": "1", "extensions.partialClone": "origin",
        "remote.origin.url": "ssh://nobody@localhost/x", "remote.origin.promisor": "true",
        "core.sshCommand": f"touch {owned}; false",
    }.items():  # fmt: skip
        git(top, "config", key, value)
    (top / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    record.main(["verify", str(stranger)])
    assert not owned.exists()
    assert "there is no git history here" in capsys.readouterr().out


def test_a_pipe_in_a_record_is_refused_and_nobody_waits_for_it(stranger, capsys):
    (stranger / "README.md").unlink()
    os.mkfifo(stranger / "README.md")
    for verb in ("make", "verify"):
        assert record.main([verb, str(stranger)]) == 2
        assert "README.md is a link or no regular file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["LOG", "registry.jsonl"])
def test_no_file_from_outside_a_log_folder_gets_into_a_record(name, stranger, tmp_path, capsys):
    logs = tmp_path / "logs"
    (stranger / "runs").rename(logs)
    path = logs / name.replace("LOG", min(found.name for found in logs.glob("2*.jsonl")))
    path.symlink_to(path.rename(tmp_path / "private"))
    assert record.main(["make", str(stranger), str(logs)]) == 2
    assert "it is a link or no regular file" in capsys.readouterr().err
    private = (tmp_path / "private").read_bytes()
    assert private not in [file.read_bytes() for file in stranger.rglob("*") if file.is_file()]


@pytest.mark.parametrize(("field", "value", "rule"), [
    ("source_sha256", "../../elsewhere", "64 hexadecimal digits"),
    ("target", float("nan"), "must be between"), ("about", "x" * 2**20, "bytes"),
    ("about", "Why.\u2028**Shown**", "one line"), ("config", NESTED, "nested|recursion"),
], ids=range(5))  # fmt: skip
def test_a_claim_that_names_a_path_or_a_number_out_of_this_world_is_refused(
    field, value, rule, stranger
):
    rewrite_claim(stranger, **{field: value})
    with pytest.raises(Refused, match=rule):
        read_claim(stranger / "claim.json")


@pytest.mark.parametrize(("files", "read", "rule"), [
    ({"a.jsonl": b"{}\n" * 250_001}, read_runs, "250,001 lines, and 250,000 are the most"),
    ({"a.txt": b"s:0 tel:1\ns:1 tel:1\n" * 125_001}, read_runs, "250,002 lines"),
    ({"a.jsonl": b" " * 2**24, "a.2.jsonl": b" " * 2**24, "a.3.jsonl": b" "}, read_runs,
     "a.3.jsonl has 1 bytes, and at most 0 are allowed"),
    ({f"a.{number}.jsonl" if number > 1 else "a.jsonl": b"x" for number in range(1, 202)},
     read_runs, "200 segments of a run are the most"),
    ({"a.jsonl": b'{"event": "x"}\n', "a.2.jsonl": 3 * b'{"event": "resume"}\n'}, read_runs,
     "line 2: a segment has one resume line"),
    ({"registry.jsonl": b"x\n" * 200_001}, read_registry, "over 200,000 lines"),
    ({"a.jsonl": MAX_BYTES + 1}, read_runs, "a.jsonl has .*bytes"),
    ({"registry.jsonl": 2**40}, read_registry, "registry.jsonl has .*bytes"),
], ids=range(8))  # fmt: skip
def test_what_is_huge_or_would_take_minutes_to_read_is_refused(files, read, rule, tmp_path):
    """Most of these limits bound work that grows with the product of two counts."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else b"")
        if isinstance(content, int):
            os.truncate(tmp_path / name, content)  # takes no room on the disk
    with pytest.raises(LogError, match=rule):
        read(tmp_path / min(files, key=len))


@pytest.mark.parametrize("run_id", ["../../elsewhere", "/absolute", "sub/name", "..", ""])
def test_a_run_id_that_is_no_file_name_is_refused_wherever_a_registry_is_read(run_id, tmp_path):
    register(tmp_path / "registry.jsonl", "start", run_id=run_id)
    with pytest.raises(ValueError, match="is no file name"):
        read_registry(tmp_path / "registry.jsonl")


def test_no_log_steers_the_terminal_or_fills_the_memory(stranger, tmp_path):
    """Its words are escape sequences, also in names of files; it declares a billion steps."""
    first, second = sorted((stranger / "runs").glob("2*.jsonl"))
    for log in (first, second):
        events = small_run.read_events(log)
        events[0]["env"] |= {"torch": STEERING, "compile_flags": [STEERING]}
        events[0] |= {"claim": STEERING, "checks": {"causality": STEERING}}
        last_step = max(event.get("step", 0) for event in events)
        for event in events:
            if event["event"] == "val":
                event["total_steps"] = 10**9
            if event.get("step") == last_step:
                event["step"] = 10**9
        log.write_text("".join(json.dumps(event) + "\n" for event in events))
    second = second.rename(second.with_name(f"{STEERING}.jsonl"))
    for words, code in (
        (["record.py", "verify", stranger], 1),
        (["significance.py", stranger / "runs"], 1),
        (["significance.py", f"{STEERING}.txt"], 2),
        (["significance.py", first, "--against", second], 0),
        (["view.py", stranger, "--out", tmp_path / "page.html"], 0),
    ):
        done = tool(*words)
        said = done.stdout + done.stderr
        assert (done.returncode, "Error" in said) == (code, False), said
        assert all(char.isprintable() or char == "\n" for char in said), said
        assert (r"\x1b[2J" in said) == ("--out" not in words)


def test_a_page_made_of_hostile_words_has_no_html_and_no_link_of_theirs(stranger):
    hostile = "x <!-- **Shown**: p | [a](b) ` &lt; # Shown ~~~"
    evidence = read_evidence(stranger)
    evidence.complete[0].env["cpu"] = hostile
    object.__setattr__(evidence.claim, "about", hostile)
    escaped = r"x \<!-- \*\*Shown\*\*: p \| \[a\](b) \` \&lt; \# Shown \~\~\~"
    page = readme(evidence)
    assert f"> {escaped}" in page
    assert f"1 x {escaped} and" in page
    assert hostile not in page
