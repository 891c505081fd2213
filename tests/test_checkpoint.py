"""Checkpoints: bit for bit what was taken, whole or not there, the newest two; whatever is damaged or hostile named."""

import errno
import json
import os
import pickle
import random
import resource
import select
import signal
import threading
import time
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file

from runtime import checkpoint
from runtime.checkpoint import (
    MODEL,
    OPTIM,
    STATE,
    SUMS,
    CheckpointError,
    Snapshot,
    Writer,
    checkpoints,
    newest,
    read,
    write,
)
from runtime.state import same_bits

FILES = (MODEL, OPTIM, STATE, SUMS)
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)  # fmt: skip
NOT_FINITE = torch.tensor([0x7FC00001, 0x7F800001, -0x400000, 0x7F800000, -0x80000000], dtype=torch.int32)


STANDS = {"run_id": "a", "step": 1, "log_offset": 10, "log_waiting": "", "clock_ms": 0.1 + 0.2, "data": {}}


def snapshot(step=1, size=16, **state):
    model = {"weight": torch.arange(size, dtype=torch.float32) + step}
    return Snapshot(model, {"weight.momentum": -model["weight"]}, STANDS | {"step": step, **state})


def same(a, b):
    return same_bits(a.model, b.model) and same_bits(a.optim, b.optim)


def steps(folder):
    return [int(path.name[5:]) for path in checkpoints(folder)]


def everything(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def largest_file(size):
    """The system refuses to write more bytes than this to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def test_tensors_of_every_dtype_come_back_bit_for_bit(tmp_path):
    noise = torch.randint(0, 256, (64,)).to(torch.uint8)
    given = {str(dtype): noise.view(dtype).clone() for dtype in DTYPES} | {"bool": torch.rand(7) > 0.5}
    given |= {"NaN payloads": NOT_FINITE.view(torch.float32), "scalar": torch.tensor(-0.0), "empty": torch.empty(0, 4)}
    found = read(write(tmp_path, Snapshot(given, {}, STANDS)))
    assert same_bits(found.model, given)
    assert found.optim == {}


def test_the_state_comes_back_as_it_was(tmp_path):
    state = STANDS | {"text": 'ü "\n\x00', "list": [1, None, True, {"deep": []}]}
    assert read(write(tmp_path, Snapshot({}, {}, state))).state == state | {"schema": 1}


def test_a_checkpoint_has_its_files_and_nothing_else_stays(tmp_path):
    path = write(tmp_path / "new" / "folder", snapshot(123))
    assert path == tmp_path / "new" / "folder" / "step_000123"
    assert set(everything(tmp_path)) == {f"new/folder/step_000123/{name}" for name in FILES}


def test_the_newest_two_are_kept(tmp_path):
    for step in (2, 4, 6, 999_999, 1_000_000):
        write(tmp_path, snapshot(step))
    assert steps(tmp_path) == [999_999, 1_000_000]


def test_those_of_later_steps_go_when_a_run_has_gone_back(tmp_path):
    for step in (10, 20, 14):
        write(tmp_path, snapshot(step))
    assert steps(tmp_path) == [10, 14]


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    write(tmp_path, snapshot(4))
    again = snapshot(4, size=8)
    assert same(read(write(tmp_path, again)), again)


# Bytes that a file may have, and sizes of the tensors, so that the disk is full at that file.
@pytest.mark.parametrize(
    ("name", "limit", "size", "text"),
    [(MODEL, 4096, 2048, ""), (OPTIM, 4096, 2048, ""), (STATE, 4096, 0, "x" * 5000), (SUMS, 200, 0, "")],
)
def test_a_disk_that_is_full_at_any_file_leaves_the_old_checkpoints_and_no_half_one(name, limit, size, text, tmp_path):
    for step in (1, 2):
        write(tmp_path, snapshot(step))
    before = everything(tmp_path)
    model, optim = ({"x": torch.zeros(size)} if kind == name else {} for kind in (MODEL, OPTIM))
    full = Snapshot(model, optim, {"step": 3, "text": text})
    with largest_file(limit), pytest.raises((OSError, SafetensorError), match=r"(?i)file too large"):
        write(tmp_path, full)
    assert everything(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"step_000001", "step_000002"}


def write_on_and_on(folder, told):
    for step in count(max(steps(folder), default=0)):  # the newest again, as a run does that was resumed
        write(folder, snapshot(step, size=2**14))
        os.write(told, b"%d\n" % step)


def kill_a_writer(folder, seconds):
    """Kill a process that writes one checkpoint after the other; returns the last step that it called written."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            write_on_and_on(folder, tell)
        finally:
            os._exit(1)
    os.close(tell)
    with open(told, "rb") as lines:
        select.select([lines], [], [], 60)  # the first is there
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return int(lines.read().split()[-1])


def test_a_writer_killed_at_random_moments_never_leaves_a_damaged_checkpoint(tmp_path):
    chance = random.Random(5)
    for _ in range(40):  # each goes on in what the one before it has left
        last = kill_a_writer(tmp_path, chance.uniform(0, 0.03))
        whole = checkpoints(tmp_path)
        for path in whole:
            assert same(read(path), snapshot(int(path.name[5:]), size=2**14))
        assert newest(tmp_path, pytest.fail)[0] == whole[-1]
        assert int(whole[-1].name[5:]) >= last - 1  # killed between taking the old one of that step away and renaming
        assert len(list(tmp_path.iterdir())) <= 5  # three of them, one half done, one half removed


def test_what_killed_writers_left_half_done_is_cleared_away(tmp_path):
    for name in (".step_000004", ".step_000007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MODEL).write_bytes(b"half")
    write(tmp_path, snapshot(7))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000007"]


# ---------------------------------------------------------------------------------------------------------------------
# The writer in the background


@pytest.fixture
def slow_disk(monkeypatch):
    """An event that writing waits for, and a list of the steps that came to be written."""
    go, begun, real = threading.Event(), [], checkpoint.write

    def slow(folder, taken):
        begun.append(taken.state["step"])
        assert go.wait(60)
        return real(folder, taken)

    monkeypatch.setattr(checkpoint, "write", slow)
    return go, begun


def test_a_slow_write_holds_nobody_up_and_what_waits_gives_way_to_the_newer(tmp_path, slow_disk):
    go, begun = slow_disk
    writer = Writer(tmp_path, print)
    writer.submit(snapshot(1))
    while not begun:
        time.sleep(0.001)
    for step in (2, 3, 4):
        writer.submit(snapshot(step))
    assert (begun, writer.last) == ([1], None)  # all were taken while the first was being written
    go.set()
    writer.close()
    assert begun == [1, 4]
    assert writer.last == tmp_path / "step_000004"
    assert steps(tmp_path) == [1, 4]


def test_closing_waits_for_the_last_one(tmp_path, slow_disk):
    go, _ = slow_disk
    writer = Writer(tmp_path, print)
    writer.submit(snapshot(1))
    threading.Timer(0.1, go.set).start()
    writer.close()
    assert same(read(tmp_path / "step_000001"), snapshot(1))


def test_a_write_that_fails_is_told_and_the_next_one_is_made(tmp_path):
    (tmp_path / "taken").write_text("a file where the folder should be")
    said = []
    writer = Writer(tmp_path / "taken", said.append)
    writer.submit(snapshot(1))
    writer.close()
    (warning,) = said
    assert "checkpoint of step 1 could not be written" in warning
    assert "there is none yet" in warning
    assert "--checkpoint-dir" in warning
    assert writer.last is None


def test_a_later_warning_names_the_checkpoint_that_there_is(tmp_path):
    said = []
    writer = Writer(tmp_path, said.append)
    for step, limit in ((1, resource.RLIM_INFINITY), (2, 4096), (3, resource.RLIM_INFINITY)):
        with largest_file(limit):
            writer.submit(snapshot(step, size=2048))
            writer._thread.submit(lambda: None).result()
    writer.close()
    (warning,) = said
    assert "step 2 could not be written" in warning
    assert f"the last one is {tmp_path / 'step_000001'}" in warning
    assert steps(tmp_path) == [1, 3]


def test_an_error_of_any_kind_in_the_background_is_told(tmp_path):
    said = []
    writer = Writer(tmp_path, said.append)
    one = torch.zeros(4)
    writer.submit(Snapshot({"a": one, "b": one}, {}, STANDS))  # safetensors refuses shared memory
    writer.close()
    (warning,) = said
    assert "checkpoint of step 1 could not be written" in warning
    assert checkpoints(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------------
# Reading what is damaged


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


def grow(path):
    path.write_bytes(path.read_bytes() + b"\0")


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = (flip, cut, empty, remove, grow, link, pipe, folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_taken(damage, name, tmp_path):
    for step in (1, 2):
        write(tmp_path, snapshot(step))
    damage(tmp_path / "step_000002" / name)
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path / "step_000002")
    assert "step_000002" in str(raised.value)
    if not (name == SUMS and damage is flip):  # which may name another file, or the sum of another
        assert name in str(raised.value)
    said = []
    path, found = newest(tmp_path, said.append)
    assert path == tmp_path / "step_000001"
    assert same(found, snapshot(1))
    (warning,) = said
    assert warning.startswith("warning: ")
    assert "step_000002" in warning


def test_where_all_are_damaged_there_is_none(tmp_path):
    said = []
    for step in (1, 2):
        remove(write(tmp_path, snapshot(step)) / MODEL)
    assert newest(tmp_path, said.append) is None
    assert len(said) == 2
    assert newest(tmp_path / "absent", said.append) is None


def test_an_error_of_the_disk_counts_as_damage(tmp_path, monkeypatch):
    for step in (1, 2):
        write(tmp_path, snapshot(step))
    digest = checkpoint.hashlib.file_digest

    def fail(file, method):
        if "step_000002" in file.name:
            raise OSError(errno.EIO, "Input/output error")
        return digest(file, method)

    monkeypatch.setattr(checkpoint.hashlib, "file_digest", fail)
    said = []
    assert newest(tmp_path, said.append)[0].name == "step_000001"
    assert "Input/output error" in said[0]


# ---------------------------------------------------------------------------------------------------------------------
# Reading what is hostile: the sums are right, as whoever made it can make them


def seal(path):
    """The checksums of the files as they are now."""
    sums = {name: checkpoint._sha256(path / name) for name in (MODEL, OPTIM, STATE)}
    (path / SUMS).write_text(json.dumps(sums))


def forge(folder, name, content):
    path = write(folder, snapshot())
    (path / name).write_bytes(content)
    seal(path)
    return path


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_a_pickle_is_refused_and_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Bomb()}, tmp_path / "pickle.pt")
    for content in (pickle.dumps(Bomb()), (tmp_path / "pickle.pt").read_bytes()):
        for name in (MODEL, OPTIM):
            with pytest.raises(CheckpointError, match="holds no tensors"):
                read(forge(tmp_path / "run", name, content))
        with pytest.raises(CheckpointError, match="no JSON object"):
            read(forge(tmp_path / "run", STATE, content))
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "header",
    [b"{}", b'{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}', b"\xff" * 64],
)
def test_tensors_that_are_none_are_refused(header, tmp_path):
    for length in (len(header), 2**63 - 1):
        content = length.to_bytes(8, "little") + header + b"\0" * 3
        with pytest.raises(CheckpointError, match="holds no tensors"):
            read(forge(tmp_path, MODEL, content))


@pytest.mark.parametrize("schema", [0, 2, "1", None, [1], "x" * 10_000])
def test_another_schema_is_refused_in_a_short_message(schema, tmp_path):
    with pytest.raises(CheckpointError, match=r"state\.json: schema .*, this version reads 1") as raised:
        read(forge(tmp_path, STATE, json.dumps({"schema": schema, "step": 1}).encode()))
    assert len(str(raised.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("name", [STATE, SUMS])
def test_a_huge_json_file_is_refused_unread(name, tmp_path):
    path = write(tmp_path, snapshot())
    os.truncate(path / name, 2**40)  # sparse: reading it would take the memory of this machine
    if name == STATE:
        (path / SUMS).write_text(json.dumps(dict.fromkeys((MODEL, OPTIM, STATE), "0" * 64)))
        os.truncate(path / name, checkpoint.MOST_JSON_BYTES + 1)
        seal(path)
    with pytest.raises(CheckpointError, match=rf"{name} is no JSON object .*[\d,]+ bytes"):
        read(path)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"schema": ' + b"9" * 5000 + b"}", b"\xff", b"[]", b"1", b""])
def test_json_that_is_no_object_is_refused(text, tmp_path):
    for name in (STATE, SUMS):
        path = forge(tmp_path, STATE, text)
        if name == SUMS:
            (path / SUMS).write_bytes(text)
        with pytest.raises(CheckpointError, match="is no JSON object"):
            read(path)


@pytest.mark.parametrize("sums", [{}, {MODEL: ""}, {"../../etc/passwd": "0"}, dict.fromkeys(FILES, "0")])
def test_sums_of_other_files_are_refused(sums, tmp_path):
    path = write(tmp_path, snapshot())
    (path / SUMS).write_text(json.dumps(sums))
    with pytest.raises(CheckpointError, match=f"{SUMS} names"):
        read(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=8,
)
# In part whole, in part with one field that is anything.
STATES = st.builds(lambda name, value: {"schema": 1, **STANDS, name: value}, st.sampled_from(["schema", *STANDS]), JSON)


@pytest.mark.parametrize("value", [None, [], True])
@pytest.mark.parametrize("name", STANDS)
def test_a_state_that_lacks_its_place_is_refused(name, value, tmp_path):
    with pytest.raises(CheckpointError, match=f"{name} must be"):
        read(forge(tmp_path, STATE, json.dumps(STANDS | {"schema": 1, name: value}).encode()))


@given(text=st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | STATES.map(json.dumps).map(str.encode))
def test_any_text_is_a_state_of_this_schema_or_an_error(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "step_000001"
    path.mkdir()
    for name in (MODEL, OPTIM):
        save_file({}, path / name)
    (path / STATE).write_bytes(text)
    seal(path)
    try:
        state = read(path).state
    except CheckpointError:
        return
    assert state == json.loads(text) or "NaN" in text.decode()
    assert state["schema"] == 1
