"""Download the public pre-tokenized FineWeb shards, the data of the public speedruns.

    python -m data.cached_fineweb                        # validation shard + 9 training shards of the 10B sample, 2 GB
    python -m data.cached_fineweb 103                    # all of the 10B sample, 21 GB
    python -m data.cached_fineweb 20 --variant edu10B

A folder holds one revision of one dataset. The revision asked for (--revision, else the one in VARIANTS: a commit where
one is known, else "main") is resolved to a commit before the first file is fetched and written to source.json beside
the shards; every later file and every later call uses that commit, and asking for another one is an error.
Shards that are already whole are not fetched again. HF_ENDPOINT names another hub. No hub is ever sent a token.
Exit codes: 0 all shards are there, 1 a download failed, 2 bad input, 130 interrupted.
"""

import argparse
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from huggingface_hub import HfFileMetadata, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import HTTPError, RemoteEntryNotFoundError, RevisionNotFoundError

if not __package__:  # run as a file: the package is found from the repository root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.shards import ShardError, open_shard, verify_shard


class Variant(NamedTuple):
    dataset: str  # id on the hub
    folder: str  # default folder, beside this file
    prefix: str  # of the file names
    shards: int  # training shards that exist
    revision: str  # commit or branch to use where none is asked for

    def names(self, count: int) -> list[str]:
        """File names of the validation shard and the first `count` training shards."""
        training = [f"{self.prefix}_train_{index:06d}.bin" for index in range(1, count + 1)]
        return [f"{self.prefix}_val_000000.bin", *training]


VARIANTS = {
    "10B": Variant("kjj0/fineweb10B-gpt2", "fineweb10B", "fineweb", 103, "889765ea1f903759787add96995d81171b632d0c"),
    "100B": Variant("kjj0/fineweb100B-gpt2", "fineweb100B", "fineweb", 1030, "main"),
    "edu10B": Variant("kjj0/finewebedu10B-gpt2", "finewebedu10B", "finewebedu", 99, "main"),
}
COMMIT = re.compile("[0-9a-f]{40}")
VOCAB_SIZE = 50257  # GPT-2
SHARD_BYTES = 1024 + 2 * 100_000_000  # of every shard but the last, which is shorter
ATTEMPTS = 5
FIRST_DELAY_S = 1.0  # doubles with every attempt
RETRIED = (OSError, RuntimeError, HTTPError, ShardError)  # RuntimeError: what the Xet transfer raises
LOCAL_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)  # no second attempt would mend them
Result = TypeVar("Result")


class BadInput(ValueError):
    """A request that no download could fulfil."""


class DownloadError(Exception):
    """A file that could not be fetched whole."""


def with_retries(what: str, action: Callable[[], Result]) -> Result:
    """Return action(), tried up to ATTEMPTS times with exponential back-off.

    Raises DownloadError after the last attempt, or at once for a fault that would only come again (4xx, full disk).
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except RETRIED as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            reason = "".join(filter(str.isprintable, reason))  # part of it is the hub's: it must not steer the terminal
            if is_final(error):
                raise DownloadError(f"could not fetch {what} from {constants.ENDPOINT}: {reason}") from error
        if attempt < ATTEMPTS:
            delay = FIRST_DELAY_S * 2 ** (attempt - 1)
            print(f"{what}: attempt {attempt} of {ATTEMPTS} failed, next in {delay:g} s: {reason}", file=sys.stderr)
            time.sleep(delay)
    raise DownloadError(
        f"gave up on {what} from {constants.ENDPOINT} after {ATTEMPTS} attempts and kept nothing of it; "
        f"check the network or name another hub in HF_ENDPOINT. The last fault: {reason}"
    )


def is_final(error: Exception) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    refused = 400 <= status < 500 and status not in (408, 429)  # a timeout and a rate limit pass
    return refused or (isinstance(error, OSError) and error.errno in LOCAL_FAULTS)


def read_metadata(variant: Variant, name: str, revision: str) -> HfFileMetadata:
    try:
        url = hf_hub_url(variant.dataset, name, repo_type="dataset", revision=revision)
        return get_hf_file_metadata(url, token=False)  # the data are public: nobody's token is needed
    except RemoteEntryNotFoundError as error:
        rule = f"its training shards are 1 to {variant.shards}"
        raise DownloadError(f"{name} is not in {variant.dataset} at revision {revision}; {rule}") from error
    except RevisionNotFoundError as error:
        raise BadInput(f"{variant.dataset} has no revision {revision!r}; name a commit or branch") from error


def read_source(record: Path) -> dict[str, str] | None:
    """Dataset and commit in a source.json, None where there is none; BadInput for a file that names neither."""
    try:
        held = json.loads(record.read_bytes())
        if COMMIT.fullmatch(held["revision"]) and held["dataset"].isprintable():
            return held
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise BadInput(f"{record} names no dataset and commit; delete it and the shards beside it, or give another --out")


def pin_revision(variant: Variant, out: Path, asked: str | None) -> str:
    """Commit that all shards in `out` come from: the one in source.json, else one resolved and recorded now."""
    record = out / "source.json"
    held = read_source(record)
    if held and held["dataset"] != variant.dataset:
        raise BadInput(f"{out} holds {held['dataset']}, not {variant.dataset}; name another folder with --out")
    if held and asked in (None, held["revision"]):
        return held["revision"]
    revision = asked or variant.revision
    first = variant.names(0)[0]
    commit = with_retries(f"revision {revision}", partial(read_metadata, variant, first, revision)).commit_hash or ""
    if not COMMIT.fullmatch(commit):
        raise DownloadError(f"{constants.ENDPOINT} does not say which commit {revision} is; check HF_ENDPOINT")
    if held and commit != held["revision"]:
        raise BadInput(f"{out} holds revision {held['revision']}, not {commit}; name another folder with --out")
    draft = record.with_suffix(".tmp")
    draft.write_text(json.dumps({"dataset": variant.dataset, "revision": commit}, indent=1) + "\n")
    os.replace(draft, record)
    return commit


def fetch_shard(variant: Variant, name: str, revision: str, out: Path, staging: Path) -> None:
    """Fetch one shard into `staging`, verify it, rename it to out/name.

    Raises ShardError when the file is no whole shard or differs from the hub's SHA-256; it is then deleted.
    """
    metadata = read_metadata(variant, name, revision)
    if (metadata.size or 0) > SHARD_BYTES:
        limit = f"a shard has at most {SHARD_BYTES:,}; check HF_ENDPOINT"
        raise DownloadError(f"{constants.ENDPOINT} says that {name} has {metadata.size:,} bytes; {limit}")
    path = Path(
        hf_hub_download(variant.dataset, name, repo_type="dataset", revision=revision, local_dir=staging, token=False)
    )
    try:
        verify_shard(path, VOCAB_SIZE)
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if metadata.etag != found:  # the etag of a large file is its SHA-256
            if len(metadata.etag or "") == len(found):
                raise ShardError(f"{path}: SHA-256 is {found}; the hub says {metadata.etag}. Its content was changed.")
            print(f"{name}: the hub tells no SHA-256, so nobody vouches for its {found}", file=sys.stderr)
    except ShardError:
        path.unlink()
        raise
    os.replace(path, out / name)


def is_whole(path: Path) -> bool:
    try:
        open_shard(path)
    except ShardError:
        return False
    return True


def fetch(variant: Variant, count: int, out: Path, asked_revision: str | None = None) -> None:
    """Bring the validation shard and the first `count` training shards into `out`.

    Raises BadInput, DownloadError or OSError; whatever happens, a shard under its final name is whole and verified.
    """
    if not 1 <= count <= variant.shards:
        raise BadInput(f"N is {count}; {variant.dataset} has 1 to {variant.shards} training shards")
    out.mkdir(parents=True, exist_ok=True)
    names = variant.names(count)
    missing = [name for name in names if not is_whole(out / name)]
    needed, free = len(missing) * SHARD_BYTES, shutil.disk_usage(out).free
    if needed > free:
        room = f"{needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free"
        raise DownloadError(f"{out}: {len(missing)} shards need {room}; ask for fewer or name another disk with --out")
    if missing or asked_revision:
        revision = pin_revision(variant, out, asked_revision)
    staging = out / ".partial"
    for name in missing:
        print(f"{names.index(name) + 1}/{len(names)} {name}", flush=True)
        with_retries(name, partial(fetch_shard, variant, name, revision, out, staging))
    shutil.rmtree(staging, ignore_errors=True)
    print(f"{out}: all {len(names)} shards are there, {len(missing)} of them fetched now")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", metavar="N", type=int, nargs="?", default=9, help="training shards; default: 9")
    parser.add_argument("--variant", choices=VARIANTS, default="10B", help="which sample; default: 10B")
    parser.add_argument("--out", type=Path, help="folder for the shards; default: data/ and the sample's name")
    parser.add_argument("--revision", help="commit or branch of the dataset; default: see above")
    args = parser.parse_args(argv)
    variant = VARIANTS[args.variant]
    try:
        fetch(variant, args.shards, args.out or Path(__file__).resolve().parent / variant.folder, args.revision)
    except (BadInput, DownloadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 1
    except KeyboardInterrupt:
        print("interrupted; finished shards are kept and the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
