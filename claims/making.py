"""Making a record: the claim before the runs, the copies of their logs after them."""

import json
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from claims.evidence import ALPHA, TRACKS
from claims.sources import Source, digest, read_files, write_source
from runtime.claim import LEAST_RUNS, MOST_RUNS, Claim
from runtime.errors import Refused
from runtime.jsonl import plain
from runtime.log import config_hash
from runtime.registry import REGISTRY, read_registry


def new_claim(
    name: str, about: str, seeds: Sequence[int], looks: Sequence[int],
    config: dict[str, Any], flags: list[str], source_sha256: str,
) -> Claim:
    """The claim, written now. Raises Refused where it breaks a rule."""
    track = TRACKS[config["track"]]
    if not LEAST_RUNS <= len(seeds) <= MOST_RUNS:
        raise Refused(f"{len(seeds)} runs: a claim has {LEAST_RUNS} to {MOST_RUNS}. Change --n.")
    if looks[0] < LEAST_RUNS or looks[-1] != len(seeds) or sorted(set(looks)) != list(looks):
        raise Refused(f"looks {looks}: they must rise from {LEAST_RUNS} or more to {len(seeds)}, "
                      "the number of runs. Change --looks.")
    if seeds[0] < 0:
        raise Refused(f"--seed {seeds[0]}: it must be at least 0.")
    if config["target"] != track.target:
        raise Refused(f"--target {config['target']}: that of the track is {track.target}. "
                      "Leave it out.")
    return Claim(
        name=name, track=config["track"], target=track.target, alpha=ALPHA, n=len(seeds),
        seeds=list(seeds), looks=list(looks), source_sha256=source_sha256,
        config_sha256=config_hash(config), config=config, flags=flags, about=about,
        created=datetime.now(UTC).isoformat(timespec="seconds"))


def read_working_source(root: Path) -> Source:
    """The source under `root`, with the commit that holds it where git knows of one."""
    files = read_files(root)

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    try:
        changed = git("status", "--porcelain", "--", *files)
        commit = git("rev-parse", "HEAD")
    except OSError:  # no git on this machine
        return Source(files, None)
    return Source(files, None if changed or commit == "unknown" else commit)


def write_claim(records: Path, claim: Claim, source: Source) -> Path:
    """Write claim.json, and the source where no record has it yet; returns the new folder."""
    folder = records / claim.track / f"{claim.created[:10]}_{claim.name}"
    if folder.exists():
        raise Refused(f"{folder} exists: a claim is not written twice. Choose another name.")
    assert digest(source.files) == claim.source_sha256
    write_source(records, source)
    folder.mkdir(parents=True)
    (folder / "claim.json").write_text(json.dumps(plain(vars(claim)), indent=2) + "\n")
    return folder


def copy_runs(claim: Claim, logs: Path, folder: Path) -> None:
    """Copy the registry and the logs of all runs of the claim, whatever became of them."""
    if not (logs / REGISTRY).is_file():
        raise Refused(f"{logs} has no {REGISTRY}: give the --log-dir of the claim's runs.")
    starts = [line for line in read_registry(logs / REGISTRY) if line["event"] == "start"]
    started = [line["run_id"] for line in starts if line.get("claim") == claim.id]
    if not started:
        raise Refused(f"{logs}: no run was started under the claim of {folder}. "
                      "Start them with --claim.")
    for run_id in started:
        for log in [logs / f"{run_id}.jsonl", *logs.glob(f"{run_id}.*.jsonl")]:
            if log.is_file():
                copy(log, folder / "runs" / log.name)
    copy(logs / REGISTRY, registry_copy(folder / "runs", logs / REGISTRY))


def registry_copy(folder: Path, registry: Path) -> Path:
    """registry.jsonl, or registry_2.jsonl and so on for a second log folder."""
    path, number = folder / REGISTRY, 1
    while path.exists() and not registry.read_bytes().startswith(path.read_bytes()):
        number += 1
        path = folder / f"registry_{number}.jsonl"
    return path


def copy(original: Path, path: Path) -> None:
    """Copy a file; over an older copy only if that is how the file began."""
    if original.is_symlink():
        raise Refused(f"{original} is a link: put the file itself there.")
    content = original.read_bytes()
    if path.exists() and not content.startswith(path.read_bytes()):
        raise Refused(f"{path} is not how {original} began, and nothing is overwritten. "
                      "Remove one of them.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def require_plain(folder: Path) -> None:
    """Refused for what a file would be written or read through: links, pipes, devices."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise Refused(f"{path} is a link or no regular file: a record has none. Take it out.")
