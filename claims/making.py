"""Making a record: the claim before the runs, copies of their logs after them."""

import re
import tempfile
from pathlib import Path

from claims.evidence import claim_text
from claims.provenance import git
from claims.sources import Source, write_source
from runtime.claim import Claim, read_claim
from runtime.errors import Refused
from runtime.log import read_sources
from runtime.registry import REGISTRY, read_registry

COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


def working_source(root: Path) -> Source:
    """The source under `root`; its commit where git knows one and no file has changed."""
    said = git(root, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    return Source(read_sources(root), said if COMMIT.fullmatch(said) else None)


def write_claim(records: Path, claim: Claim, source: Source) -> Path:
    """Write the claim, and its source unless it is stored already. Returns the record's folder."""
    with tempfile.TemporaryDirectory() as scratch:
        draft = Path(scratch, "claim.json")
        draft.write_text(claim_text(claim))
        read_claim(draft)  # ClaimError for a claim that breaks a rule; nothing is written then
    folder = records / claim.track / f"{claim.created[:10]}_{claim.name}"
    folder.mkdir(parents=True)  # FileExistsError: a claim is written once
    (folder / "claim.json").write_text(claim_text(claim))
    write_source(records, source)
    return folder


def copy_runs(folder: Path, folders: list[Path]) -> None:
    """Copy the logs of all runs of the claim in `folder`, and each log folder's registry.

    Every run that was started is copied, however it ended.
    """
    claim = read_claim(folder / "claim.json")
    for number, logs in enumerate(folders, 1):
        if not (logs / REGISTRY).is_file():
            raise Refused(f"{logs} has no {REGISTRY}: give the --log-dir of the claim's runs.")
        for line in read_registry(logs / REGISTRY):
            if line["event"] == "start" and line.get("claim") == claim.id:
                for segment in logs.glob(f"{line['run_id']}.*jsonl"):  # ID.jsonl, ID.2.jsonl
                    copy(segment, folder / "runs" / segment.name)
        name = REGISTRY if number == 1 else f"registry_{number}.jsonl"
        copy(logs / REGISTRY, folder / "runs" / name)


def copy(original: Path, path: Path) -> None:
    """Copy a file. An older copy is replaced only by a file that begins with it."""
    if original.is_symlink():
        raise Refused(f"{original} is a link: put the file itself there.")
    content = original.read_bytes()
    if path.exists() and not content.startswith(path.read_bytes()):
        raise Refused(f"{original} does not begin with {path}, and only a file that has grown is "
                      "copied again. Name the log folders in the same order, or remove the copy.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def require_plain(folder: Path) -> None:
    """Refuse links, which a write would follow, and pipes and devices, where a read would wait."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise Refused(f"{path} is a link or no regular file: a record has none. Take it out.")
