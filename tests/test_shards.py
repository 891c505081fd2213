"""The shard format against bytes written by hand, and every way in which a file can be wrong."""

import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import shards
from data.shards import ShardError, find_shards, open_shard, verify_shard, write_shard

MAGIC, VERSION = 20240520, 1


def shard_bytes(tokens, magic=MAGIC, version=VERSION, claimed=None):
    count = len(tokens) if claimed is None else claimed
    return struct.pack("<256i", magic, version, count, *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens)


def test_a_shard_written_byte_by_byte_loads(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(shard_bytes([50256, 0, 1, 258, 65535]))
    shard = open_shard(path)
    assert len(shard) == 5
    assert shard[:].dtype == np.uint16
    assert shard[:].tolist() == [50256, 0, 1, 258, 65535]


@given(st.lists(st.integers(0, 65535), min_size=1, max_size=30), st.data())
@settings(max_examples=60, deadline=None)
def test_slices_and_blocks_are_those_of_a_list(tokens, data):
    bound = st.none() | st.integers(-40, 40)
    where = slice(data.draw(bound), data.draw(bound))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        write_shard(Path(folder, "a.bin"), tokens)
        shard = open_shard(Path(folder, "a.bin"))
        assert shard[where].tolist() == tokens[where]
        patch.setattr(shards, "READ_BLOCK", 7)
        blocks = [(start, block.tolist()) for start, block in shard.blocks()]
    assert blocks == [(start, tokens[start : start + 7]) for start in range(0, len(tokens), 7)]


@given(st.lists(st.integers(0, 65535), min_size=1, max_size=50))
@settings(max_examples=50, deadline=None)
def test_any_tokens_are_written_in_the_public_format_and_read_back(tokens):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.bin"
        write_shard(path, tokens)
        assert path.read_bytes() == shard_bytes(tokens)
        assert open_shard(path)[:].tolist() == tokens
        assert verify_shard(path, 65536) == len(tokens)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, ">u2"])
def test_the_bytes_do_not_depend_on_the_dtype_given(tmp_path, dtype):
    write_shard(tmp_path / "a.bin", np.array([1, 300, 30000], dtype=dtype))
    assert (tmp_path / "a.bin").read_bytes() == shard_bytes([1, 300, 30000])


# ----- faults after a shard was opened


def opened(path, tokens=range(1000)):
    write_shard(path, tokens)
    return open_shard(path)


CUT_WHILE_READ = """
import os, sys
import numpy as np
from data.shards import ShardError, open_shard
tokens = open_shard(sys.argv[1]) if sys.argv[2] == "shard" else np.memmap(sys.argv[1], dtype="<u2", offset=1024)
os.truncate(sys.argv[1], 2000)
try:
    print(tokens[9_000:9_500].sum())
except ShardError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.parametrize(("reader", "status"), [("shard", 2), ("memory map", -signal.SIGBUS)])
def test_a_shard_cut_while_it_is_read_is_an_error_where_a_memory_map_kills_the_process(tmp_path, reader, status):
    path = tmp_path / "a.bin"
    write_shard(path, range(10_000))
    command = [sys.executable, "-c", CUT_WHILE_READ, str(path), reader]
    child = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120)
    assert child.returncode == status
    if reader == "shard":
        assert child.stdout == (
            f"{path}: tokens 9,000 to 9,500 cannot be read: the file has 2,000 bytes and had 21,024 when it was "
            f"opened; a shard must not change while it is used. Fix: delete the file and fetch or build the data "
            f"again.\n"
        )


@pytest.mark.parametrize("change", [-2, 2])
def test_a_change_of_size_is_noticed_whichever_tokens_are_read(tmp_path, change):
    shard = opened(tmp_path / "a.bin")
    os.truncate(tmp_path / "a.bin", 3024 + change)
    for where in (slice(0, 10), slice(990, 1000), slice(0, 0)):
        with pytest.raises(ShardError, match=rf"a\.bin: .* has {3024 + change:,} bytes and had 3,024 when"):
            shard[where]


@pytest.mark.parametrize("leave", [os.unlink, lambda path: write_shard(path, [7])], ids=["deleted", "replaced"])
def test_an_open_shard_outlives_its_name(tmp_path, leave):
    shard = opened(tmp_path / "a.bin")
    leave(tmp_path / "a.bin")
    assert shard[:].tolist() == list(range(1000))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_is_named_with_the_shard_and_the_tokens(tmp_path, monkeypatch, code):
    shard = opened(tmp_path / "a.bin")

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(ShardError, match=rf"a\.bin: tokens 5 to 9 cannot be read \({os.strerror(code)}\).*Check perm"):
        shard[5:9]
    with pytest.raises(ShardError, match=rf"a\.bin: the header cannot be read \({os.strerror(code)}\)"):
        open_shard(tmp_path / "a.bin")


def test_reads_that_come_in_parts_are_put_together(tmp_path, monkeypatch):
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, count, offset: pread(descriptor, min(count, 3), offset))
    shard = opened(tmp_path / "a.bin")  # reads the header so, too
    assert shard[100:200].tolist() == list(range(100, 200))


def test_tokens_that_the_disk_does_not_deliver_are_missed_even_when_the_size_is_right(tmp_path, monkeypatch):
    pread, shard = os.pread, opened(tmp_path / "a.bin")
    monkeypatch.setattr(os, "pread", lambda descriptor, count, offset: pread(descriptor, count, offset + 2000))
    with pytest.raises(ShardError, match=r"a\.bin: tokens 0 to 1,000 cannot be read"):
        shard[:]


def test_too_many_open_shards_is_told_and_closed_ones_do_not_count(tmp_path):
    write_shard(tmp_path / "a.bin", [1])
    free = os.dup(0)
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 20, before[1]))
    try:
        with pytest.raises(ShardError, match=r"a\.bin: the header cannot be read \(Too many open files\).*ulimit -n"):
            [open_shard(tmp_path / "a.bin") for _ in range(30)]
        for _ in range(30):
            assert open_shard(tmp_path / "a.bin")[:].tolist() == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# ----- files that are no shards


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 65536], r"token 1 is 65536; a shard holds uint16, so 0 to 65535\. Use a vocabulary"),
        ([1, 2, -1], r"token 2 is -1; a shard holds uint16"),
        ([], r"shape \(0,\).*a non-empty vector of integers\. Pass one flat integer array"),
        ([1.0, 2.0], r"dtype float64.*integers"),
        ([[1, 2], [3, 4]], r"shape \(2, 2\)"),
    ],
)
def test_tokens_that_do_not_fit_are_refused_and_leave_no_file(tmp_path, tokens, message):
    with pytest.raises(ShardError, match=f"a.bin: .*{message}"):
        write_shard(tmp_path / "a.bin", tokens)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_is_cut_short_leaves_the_old_shard_and_no_partial_file(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    write_shard(path, [1, 2, 3])

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_shard(path, [4, 5, 6, 7])
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]
    assert open_shard(path)[:].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"the file is empty \(0 bytes\).*fetch or build the data again"),
        (shard_bytes([])[:1000], r"the file has 1000 bytes; the header alone has 1024.*fetch or build"),
        (b"\x89PNG" * 300, r"first header word is 1196314761; a token shard starts with 20240520.*another kind"),
        (shard_bytes([1, 2], version=2), r"the header says version 2; only version 1.*Tokenize the data again"),
        (shard_bytes([1, 2, 3], claimed=4), r"header says 4 tokens but the file holds 3;.*cut short: delete the file"),
        (shard_bytes([1, 2, 3], claimed=2), r"header says 2 tokens but the file holds 3;.*appended.*delete the file"),
        (shard_bytes([1, 2, 3])[:-1], r"5 bytes follow the header;.*must be even.*delete the file"),
        (shard_bytes([1], claimed=2**31 - 1), r"header says 2,147,483,647 tokens but the file holds 1"),
        (shard_bytes([1], claimed=-5), r"header says -5 tokens; a shard holds at least one.*delete the file"),
        (shard_bytes([]), r"header says 0 tokens; a shard holds at least one.*delete the file"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_the_value_the_rule_and_the_fix(tmp_path, content, message):
    path = tmp_path / "bad.bin"
    path.write_bytes(content)
    for read in (open_shard, lambda file: verify_shard(file, 50257)):
        with pytest.raises(ShardError, match=rf"bad\.bin: .*{message}"):
            read(path)


@given(st.binary(max_size=1100), st.booleans())
@settings(max_examples=100, deadline=None)
def test_bytes_that_are_not_a_shard_raise_nothing_but_shard_error(content, with_magic):
    if with_magic:
        content = struct.pack("<2i", MAGIC, VERSION) + content
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bad.bin"
        path.write_bytes(content)
        with pytest.raises(ShardError, match=r"bad\.bin"):
            open_shard(path)


def test_a_missing_file_or_a_folder_is_named(tmp_path):
    with pytest.raises(ShardError, match=r"none\.bin: no such file.*Fetch or build the data"):
        open_shard(tmp_path / "none.bin")
    with pytest.raises(ShardError, match="no such file"):
        open_shard(tmp_path)


def test_a_token_beyond_the_vocabulary_is_named_with_its_offset(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "READ_BLOCK", 4)
    path = tmp_path / "a.bin"
    write_shard(path, [0, 99, 5, 5, 5, 5, 5, 5, 5, 100, 101])
    with pytest.raises(ShardError, match=r"a\.bin: token 9 is 100; the vocabulary has 100 tokens, so 0 to 99\..*build"):
        verify_shard(path, 100)
    assert verify_shard(path, 102) == 11


def test_shards_are_found_by_folder_pattern_or_name_in_sorted_order(tmp_path):
    folder = tmp_path / "data [v1]"  # characters that a glob would interpret
    folder.mkdir()
    for name in ("train_000010.bin", "train_000002.bin", "val_000000.bin", "train_000003.bin.99.tmp", "notes.txt"):
        (folder / name).touch()

    def names(files):
        return [file.name for file in files]

    assert names(find_shards(folder)) == ["train_000002.bin", "train_000010.bin", "val_000000.bin"]
    assert names(find_shards(folder / "val_000000.bin")) == ["val_000000.bin"]
    assert names(find_shards(f"{tmp_path}/data*/train_*.bin")) == ["train_000002.bin", "train_000010.bin"]


def test_no_shards_at_all_is_an_error_with_the_command_that_makes_them(tmp_path):
    with pytest.raises(ShardError, match=r"train_\*\.bin: no file matches.*Fix: python data/cached_fineweb\.py 9$"):
        find_shards(tmp_path / "train_*.bin", fix="python data/cached_fineweb.py 9")
    with pytest.raises(ShardError, match="fetch or build the data first"):
        find_shards(tmp_path)
