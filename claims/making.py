"""Making a record: the claim before the runs, copies of their logs after them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

from claims.sources import COMMIT, Source, read_files, write_source
from runtime.claim import NAME, Claim, read_claim
from runtime.errors import ClaimError, Refused
from runtime.jsonl import plain
from runtime.registry import REGISTRY, read_registry


def working_source(root: Path) -> Source:
    """The source under `root`, with its commit where git knows it and nothing is changed."""
    git = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git on this machine
        commit = ""
    return Source(read_files(root), commit if COMMIT.fullmatch(commit) else None)


def write_claim(records: Path, claim: Claim, source: Source) -> Path:
    """Write the claim, and its source if no record has it yet. Returns the record's folder."""
    if not re.fullmatch(NAME, claim.name):
        raise Refused(f"{claim.name!r} is no CamelName: letters and digits, the first a capital.")
    folder = records / claim.track / f"{claim.created[:10]}_{claim.name}"
    if folder.exists():
        raise Refused(f"{folder} exists: a claim is not written twice. Choose another name.")
    folder.mkdir(parents=True)
    (folder / "claim.json").write_text(json.dumps(plain(vars(claim)), indent=2) + "\n")
    try:
        read_claim(folder / "claim.json")
    except ClaimError:
        shutil.rmtree(folder)
        raise
    write_source(records, source)
    return folder


def copy_runs(claim: Claim, logs: Path, folder: Path) -> None:
    """Copy the registry and the logs of all runs of the claim, whatever became of them."""
    if not (logs / REGISTRY).is_file():
        raise Refused(f"{logs} has no {REGISTRY}: give the --log-dir of the claim's runs.")
    lines = [line for line in read_registry(logs / REGISTRY) if line["event"] == "start"]
    started = [line["run_id"] for line in lines if line.get("claim") == claim.id]
    if not started:
        raise Refused(f"{logs}: no run was started under the claim of {folder}. "
                      "Start the runs with --claim.")
    for run_id in started:
        for log in [*logs.glob(f"{run_id}.jsonl"), *logs.glob(f"{run_id}.*.jsonl")]:
            copy(log, folder / "runs" / log.name)
    number, registry = 1, folder / "runs" / REGISTRY
    while registry.exists() and not has_grown(logs / REGISTRY, registry):
        number += 1  # a second log folder, maybe of another machine
        registry = folder / "runs" / f"registry_{number}.jsonl"
    copy(logs / REGISTRY, registry)


def has_grown(original: Path, copied: Path) -> bool:
    """Whether the original begins with all that was copied of it."""
    return original.read_bytes().startswith(copied.read_bytes())


def copy(original: Path, path: Path) -> None:
    """Copy a log. An older copy is replaced only by one that begins with it."""
    if original.is_symlink():
        raise Refused(f"{original} is a link: put the file itself there.")
    if path.exists() and not has_grown(original, path):
        raise Refused(f"{original} does not begin with {path}, and nothing else is overwritten. "
                      "Remove one of them.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(original.read_bytes())


def require_plain(folder: Path) -> None:
    """Refuse what a file would be written or read through: links, pipes, devices."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise Refused(f"{path} is a link or no regular file: a record has none. Take it out.")
