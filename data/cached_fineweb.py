"""Download the public FineWeb shards, tokenized with GPT-2's vocabulary, from the Hugging Face hub.

    python -m data.cached_fineweb        # the validation shard and 9 training shards: 2.0 GB
    python -m data.cached_fineweb 103    # the whole 10B sample: 20.8 GB

Run the same command again after an interruption. HF_ENDPOINT names another hub. No access token is
ever sent. Exit codes: 0 done, 1 the download failed, 2 bad input.
"""

import argparse
import signal
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from data.shards import verify_shard

DATASET, TRAINING_SHARDS = "kjj0/fineweb10B-gpt2", 103
REVISION = "889765ea1f903759787add96995d81171b632d0c"  # a commit, which no hub can change
VOCAB_SIZE, SHARD_GB = 50257, 0.2


def fetch(count: int, folder: Path) -> None:
    """Download the validation shard and the first `count` training shards into `folder`.

    ValueError for a bad count, ShardError for a damaged shard, and whatever the library raises.
    """
    if not 1 <= count <= TRAINING_SHARDS:
        raise ValueError(f"N is {count}; {DATASET} has 1 to {TRAINING_SHARDS} training shards.")
    names = [f"fineweb_train_{index:06d}.bin" for index in range(1, count + 1)]
    names.append("fineweb_val_000000.bin")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        size = len(missing) * SHARD_GB
        print(f"fetching {len(missing)} shards, {size:.1f} GB, into {folder}", flush=True)
        snapshot_download(DATASET, repo_type="dataset", revision=REVISION, token=False,
                          allow_patterns=missing, local_dir=folder)  # fmt: skip
    for name in names:
        verify_shard(folder / name, VOCAB_SIZE)
    print(f"{folder}: {len(names)} shards are whole")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shards", metavar="N", type=int, nargs="?", default=9, help="default: 9")
    parser.add_argument("--out", type=Path, default=Path("data/fineweb10B"), help="target folder")
    arguments = parser.parse_args(argv)
    try:
        fetch(arguments.shards, arguments.out)
    except Exception as error:  # a hub's message must not steer the terminal
        print("error:", *filter(str.isprintable, str(error).splitlines()), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1  # ShardError is a ValueError
    return 0


if __name__ == "__main__":
    # Else Python raises KeyboardInterrupt only after the library's threads finish their files.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
