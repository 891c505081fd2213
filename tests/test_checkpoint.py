"""Checkpoints: bit for bit what was taken, whole or not there; damaged or hostile ones named."""

import json
import os
import pickle
import random
import resource
import select
import signal
import time
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from stat import S_ISDIR

import pytest
import torch
from safetensors import SafetensorError
from small_record import contents

from runtime import checkpoint
from runtime.checkpoint import MODEL, OPTIM, STATE, SUMS, Snapshot, checkpoints, load, save
from runtime.errors import Refused
from runtime.warmup import same_bits

FILES = (MODEL, OPTIM, STATE, SUMS)
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8,
)  # fmt: skip
NAN_PAYLOADS = torch.tensor([0x7FC00001, 0x7F800001, -0x400000, -0x80000000], dtype=torch.int32)
PLACE = {"step": 1, "clock_ms": 0.1 + 0.2, "data": {}}


def snapshot(step=1, size=16, **state):
    model = {"weight": torch.arange(size, dtype=torch.float32) + step}
    return Snapshot(model, {"weight.momentum": -model["weight"]}, PLACE | {"step": step, **state})


def steps(folder):
    return [int(path.name[5:]) for path in checkpoints(folder)]


@contextmanager
def largest_file(size):
    """The system refuses to write more bytes than this to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- Writing


def test_tensors_of_every_dtype_and_all_of_the_state_come_back_bit_for_bit(tmp_path):
    noise = torch.randint(0, 256, (64,)).to(torch.uint8)
    given = {str(dtype): noise.view(dtype).clone() for dtype in DTYPES}
    given |= {"bool": torch.rand(7) > 0.5, "NaN payloads": NAN_PAYLOADS.view(torch.float32)}
    given |= {"scalar": torch.tensor(-0.0), "empty": torch.empty(0, 4)}
    state = PLACE | {"text": 'ü "\n\x00', "list": [1, None, True, {"deep": []}]}
    (tmp_path / ".step_000004").mkdir()  # half of one, by a killed process
    path = save(tmp_path, Snapshot(given, {}, state))
    assert set(contents(tmp_path)) == {f"step_000001/{name}" for name in FILES}
    assert [each.name for each in tmp_path.iterdir()] == ["step_000001"], "nothing else stays"
    found = load(path)
    assert same_bits(found.model, given)
    assert found.optim == {}
    assert found.state == state


@pytest.mark.parametrize("folders", ["synced", "not synced"])
def test_all_of_a_checkpoint_is_forced_to_the_disk_before_it_gets_its_name(
    folders, tmp_path, monkeypatch
):
    path, synced, fsync = tmp_path / "step_000001", set(), os.fsync

    def note(descriptor):
        if folders == "not synced" and S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")  # as on some network disks
        if not path.exists():
            synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    save(tmp_path, snapshot())
    wanted = [*path.iterdir(), *([path] if folders == "synced" else [])]
    assert synced >= {each.stat().st_ino for each in wanted}
    assert load(path).state["step"] == 1


@pytest.mark.parametrize(("saved", "kept"), [
    ((2, 4, 6, 999_999, 1_000_000), [999_999, 1_000_000]),
    ((10, 20, 14), [10, 14]),  # resumed from step 10: what came later was given up
    ((4, 8, 8), [4, 8]),
])  # fmt: skip
def test_the_two_newest_are_kept_and_none_of_later_steps(saved, kept, tmp_path):
    for step in saved:
        last = snapshot(step, size=step % 7 + 1)
        save(tmp_path, last)
    assert steps(tmp_path) == kept
    assert same_bits(load(checkpoints(tmp_path)[-1]).model, last.model)


# Bytes that a file may have, and sizes of the tensors, so that the disk is full at that file.
@pytest.mark.parametrize(
    ("name", "limit", "size", "text"),
    [(MODEL, 4096, 2048, ""), (OPTIM, 4096, 2048, ""), (STATE, 4096, 0, "x" * 5000),
     (SUMS, 200, 0, "")],
)  # fmt: skip
def test_a_disk_that_is_full_at_any_file_leaves_the_old_ones_and_no_half_one(
    name, limit, size, text, tmp_path
):
    for step in (1, 2):
        save(tmp_path, snapshot(step))
    before = contents(tmp_path)
    model, optim = ({"x": torch.zeros(size)} if kind == name else {} for kind in (MODEL, OPTIM))
    too_much = Snapshot(model, optim, {"step": 3, "text": text})
    with largest_file(limit), pytest.raises((OSError, SafetensorError), match="too large"):
        save(tmp_path, too_much)
    assert contents(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"step_000001", "step_000002"}


def kill_a_writer(folder, seconds):
    """Kill a process that saves again and again; returns the last step that it called saved."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        for step in count(max(steps(folder), default=0)):  # the newest again, as after a resume
            save(folder, snapshot(step, size=2**14))
            os.write(tell, b"%d\n" % step)
    os.close(tell)
    with open(told, "rb") as lines:
        select.select([lines], [], [], 60)  # the first is there
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return int(lines.read().split()[-1])


def test_a_writer_killed_at_random_moments_never_leaves_a_damaged_checkpoint(tmp_path):
    chance = random.Random(5)
    for _ in range(12):  # each goes on in what the one before it has left
        last = kill_a_writer(tmp_path, chance.uniform(0, 0.03))
        found = checkpoints(tmp_path)
        for path in found:
            assert same_bits(load(path).model, snapshot(int(path.name[5:]), size=2**14).model)
        assert int(found[-1].name[5:]) >= last - 1  # killed while it replaced that step
        assert len(list(tmp_path.iterdir())) <= 5  # three, one half written, one half removed


# ---- Reading what is damaged


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink, link, pipe])
def test_a_damaged_file_is_named(damage, name, tmp_path):
    path = save(tmp_path, snapshot())
    damage(path / name)
    with pytest.raises(Refused, match="step_000001") as raised:
        load(path)
    # A flipped bit in the sums may name another file, or the sum of another.
    assert name in str(raised.value) or (name, damage) == (SUMS, flip)


# ---- Reading what is hostile: the sums are right, as whoever made it can make them


def seal(path):
    """The checksums of the files as they are now."""
    sums = {name: checkpoint._sha256(path / name) for name in (MODEL, OPTIM, STATE)}
    (path / SUMS).write_text(json.dumps(sums))


def forge(folder, name, content):
    path = save(folder, snapshot())
    (path / name).write_bytes(content)
    seal(path)
    return path


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", [MODEL, OPTIM, STATE])
def test_a_pickle_in_a_checkpoint_is_refused_and_not_executed(name, tmp_path):
    bomb = Bomb(tmp_path / "exploded")
    torch.save({"weight": bomb}, tmp_path / "pickle.pt")
    for content in (pickle.dumps(bomb), (tmp_path / "pickle.pt").read_bytes()):
        with pytest.raises(Refused, match=r"holds no tensors|a JSON object"):
            load(forge(tmp_path / "run", name, content))
    assert not (tmp_path / "exploded").exists()
    pickle.loads(pickle.dumps(bomb))
    assert (tmp_path / "exploded").exists(), "it does explode"


@pytest.mark.parametrize("name", [STATE, SUMS])
@pytest.mark.parametrize(("text", "said"), [
    *((text, r"{} is not a JSON object") for text in (b"", b"\xff", b"[]", b"[" * 100_000)),
    (b" " * (checkpoint.MOST_JSON_BYTES + 1), r"67,108,865 bytes, .*{}"),
], ids=["empty", "no text", "a list", "deep", "huge"])  # fmt: skip
def test_text_that_is_no_state_is_refused(text, said, name, tmp_path):
    path = forge(tmp_path, STATE, text if name == STATE else b"{}")
    if name == SUMS:
        (path / SUMS).write_bytes(text)
    with pytest.raises(Refused, match=said.format(name)):
        load(path)
