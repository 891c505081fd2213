"""What a record's folder cannot tell: when its claim was committed, and what its flags mean."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from claims.sources import Source, write_files
from runtime.claim import Claim
from runtime.errors import Refused
from runtime.settings import SETTINGS_OF_A_RUN, as_text, flag

ROOT = Path(__file__).resolve().parents[1]
LONGEST_S = 100  # for a parser that imports torch on a loaded machine
# git may run commands and fetch objects that a repository's own files name.
NO_FETCH = {"GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1"}


def commit_time(path: Path) -> str | None:
    """ISO time, UTC, of the first commit of this checkout that holds a file with this content.

    None where git cannot tell: for a file outside this checkout, before a commit, or where the
    history begins with the file, as in a shallow clone.
    """
    if not path.resolve().is_relative_to(ROOT):
        return None  # a repository that came with the record could make git run its commands
    blob = git(ROOT, "hash-object", "--no-filters", str(path.resolve()))
    # Another content at the same path, committed earlier, says nothing of this one.
    log = ["log", "--no-show-signature", "--format=%ct %P", f"--find-object={blob}"]
    commits = git(ROOT, *log, "--", ":(top,glob)**/claim.json").splitlines()
    first, _, parents = commits[-1].partition(" ") if commits else ("", "", "")
    return datetime.fromtimestamp(int(first), UTC).isoformat() if parents else None


def git(root: Path, *words: str) -> str:
    """The output of a git command in a checkout of ours; nothing if it fails."""
    command, env = ["git", "-C", str(root), *words], os.environ | NO_FETCH
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    except OSError:  # no git
        return ""
    return done.stdout.strip()


def check_flags(claim: Claim, source: Source) -> Iterator[str]:
    """The flags of the claim, read by the claimed source, are its settings.

    This runs the imports and the parser of the source: in a process of its own, which gets an
    empty environment and a scratch folder. Refused if it does not answer.
    """
    # Sources of schema 1 had their own default; `tiny` it was for all claims.
    flags = ["--track", claim.track, *claim.flags]
    with tempfile.TemporaryDirectory() as scratch:
        write_files(source, Path(scratch))
        command = [sys.executable, "-E", "-s", "-B", "train_gpt.py", *flags, "--print-config"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S,
                                  cwd=scratch, env={"PATH": os.defpath, "HOME": scratch})
        except subprocess.TimeoutExpired:
            raise cannot_tell(claim, f"no answer in {LONGEST_S} s") from None
    if done.returncode == Refused.code:
        yield f"its source refuses its flags: {done.stderr.strip():.300}"
        return
    try:
        meant = dict(json.loads(done.stdout))
    except ValueError:
        raise cannot_tell(claim, done.stderr.strip()[-300:] or "no JSON") from None
    for name in sorted((meant.keys() | claim.config.keys()) - set(SETTINGS_OF_A_RUN)):
        found, claimed = meant.get(name), claim.config.get(name)
        if found != claimed:
            yield f"its flags mean {flag(name)} {as_text(found)}, its config has {as_text(claimed)}"


def cannot_tell(claim: Claim, said: str) -> Refused:
    return Refused(f"the source of {claim.name} does not say what its flags mean: {said}. Install "
                   "what it needs, or leave the flags unchecked with --read-only.")
