"""The shard format against bytes written by hand, and the ways in which a file can be wrong."""

import errno
import os
import shlex
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.shards import Shard, ShardError, write_shard

pytestmark = pytest.mark.core

ROOT = Path(__file__).resolve().parents[1]
MAGIC, VERSION = 20240520, 1


def shard_bytes(tokens, magic=MAGIC, version=VERSION, claimed=None):
    count = len(tokens) if claimed is None else claimed
    header = struct.pack("<256i", magic, version, count, *[0] * 253)
    return header + struct.pack(f"<{len(tokens)}H", *tokens)


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, ">u2"])
@given(st.lists(st.integers(0, 65535), min_size=1, max_size=30), st.data())
@settings(max_examples=30, deadline=None)
def test_tokens_are_written_in_public_format_and_slices_are_those_of_a_list(dtype, tokens, data):
    bound = st.none() | st.integers(-40, 40)
    where = slice(data.draw(bound), data.draw(bound))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.bin")
        write_shard(path, np.array(tokens, dtype=dtype))
        assert path.read_bytes() == shard_bytes(tokens)
        shard = Shard(path)
        assert len(shard) == len(tokens)
        assert shard[:].dtype == np.uint16
        assert shard[where].tolist() == tokens[where]


@pytest.mark.parametrize("tokens", [
    [1, 65536], [1, -1], [], [1.0, 2.0], [[1, 2], [3, 4]], np.broadcast_to(np.uint16(0), 2**31),
], ids=str)  # fmt: skip
def test_tokens_that_do_not_fit_are_refused_and_leave_no_file(tmp_path, tokens):
    with pytest.raises(ShardError, match=r"a\.bin: a shard holds .* integers from 0 to 65535"):
        write_shard(tmp_path / "a.bin", tokens)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_shard_and_no_partial_file(tmp_path, monkeypatch):
    def full_disk(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_shard(tmp_path / "a.bin", [1, 2, 3])
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "a.bin", [4, 5, 6, 7])
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]
    assert Shard(tmp_path / "a.bin")[:].tolist() == [1, 2, 3]


# ---- files that are no shards


@pytest.mark.parametrize(("content", "message"), [
    (b"", "starts with 0, 0; a token shard starts with 20240520, 1"),
    (shard_bytes([1, 2])[:11], "2 tokens take 1,028 bytes; the file has 11"),
    (shard_bytes([1, 2], version=2), "starts with 20240520, 2; a token shard"),
    (shard_bytes([1, 2, 3], claimed=2), "2 tokens take 1,028 bytes; the file has 1,030"),
])  # fmt: skip
def test_a_bad_file_is_refused_with_its_name_the_value_and_the_fix(tmp_path, content, message):
    path = tmp_path / "bad.bin"
    path.write_bytes(content)
    with pytest.raises(ShardError, match=rf"bad\.bin: .*{message}.* Delete the file and fetch"):
        Shard(path)


@pytest.mark.parametrize("kind", ["nanoGPT", "llm.c", "NumPy"])
def test_the_command_that_an_error_gives_makes_a_shard_of_a_foreign_token_file(tmp_path, kind):
    tokens, path = np.arange(100, 1400, dtype="u2"), tmp_path / "foreign train.bin"
    if kind == "nanoGPT":
        tokens.tofile(path)
    elif kind == "llm.c":  # version 7
        header = np.zeros(256, "i4")
        header[:3] = 20240801, 7, len(tokens)
        path.write_bytes(header.tobytes() + tokens.astype("u4").tobytes())
    else:
        with path.open("wb") as file:
            np.save(file, tokens)
    with pytest.raises(ShardError) as caught:
        Shard(path)
    command = str(caught.value).partition("repository: python ")[2]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, *shlex.split(command)]
    subprocess.run(words, cwd=tmp_path, env=env, check=True)
    assert np.array_equal(Shard(tmp_path / "train_000000.bin")[:], tokens)
