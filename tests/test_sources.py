"""The store of sources: what went in comes out, byte for byte, and the sources still run."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_run import ROOT, logs_of, read_events, write_data

from claims.record import pack, read_source, unpack, write_source
from runtime.errors import Refused
from runtime.source import digest, read_sources, write_files

RECORDS = ROOT / "records"
CLAIMS = {}
for path in sorted(RECORDS.glob("*/*/claim.json")):
    claim = json.loads(path.read_text())
    CLAIMS.setdefault(claim["source_sha256"], claim)
TRAP = b"file optim/muon.py, 3 bytes\nabc\nsource 00\r\n"
CONTENT = st.binary(max_size=60) | st.sampled_from([TRAP, b"", b"\n", b"\r\n", b"\xff", b"no end"])
NAMES = st.sampled_from(["train_gpt.py", "optim/muon.py", "data/x.py", "requirements.txt"])


@given(st.dictionaries(NAMES, CONTENT))
def test_a_source_comes_back_byte_for_byte_whatever_its_files_hold(files):
    assert unpack(pack(files)) == files


@given(st.binary(max_size=200), st.integers(0, 400))
def test_damaged_sources_and_names_that_lead_out_of_the_folder_are_refused(content, at):
    text = pack({"train_gpt.py": TRAP, "optim/muon.py": b"x"})
    start, rest = text[:at], text[at:]
    outside = [pack({name: b"x"}) for name in ("../x", "a/../../x", "/x", "a b", ".x")]
    for damaged in (content, start + content + rest, start, start + rest[1:], *outside):
        if damaged != text:
            with pytest.raises(Refused, match=r"not as record\.py claim wrote it"):
                unpack(damaged)


def test_a_store_that_is_damaged_or_a_link_or_huge_is_refused(tmp_path):
    files = read_sources(ROOT)
    path = write_source(tmp_path, files)
    kept, sha256 = path.read_bytes(), digest(files)
    assert read_source(tmp_path, sha256) == files
    path.write_bytes(pack({"train_gpt.py": b"y"}))
    with pytest.raises(Refused, match="is not the source"):
        read_source(tmp_path, sha256)
    with path.open("wb") as file:
        file.truncate(2**30)  # takes no room on the disk
    with pytest.raises(Refused, match="at most 16,777,216 are allowed"):
        read_source(tmp_path, sha256)
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(kept)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="a link or no regular file"):
        read_source(tmp_path, sha256)


def test_every_stored_source_belongs_to_a_record_and_records_with_one_source_share_it():
    stored = sorted(path.name for path in (RECORDS / "sources").iterdir())
    assert stored == sorted(f"{sha256[:12]}.txt" for sha256 in CLAIMS)


# Settings of a small run; three sequences a step, as a batch that grows begins with a third.
SMALL = {
    "vocab_size": 64, "bos": 63, "dim": 32, "head_dim": 16, "seq_len": 128, "max_document": 64,
    "batch_tokens": 384, "micro_batch": 384, "val_tokens": 1024, "val_seq_len": 256,
    "val_batch": 512, "val_sha256": "", "steps": 1, "window_block": 16, "compile": "off",
    "device": "cpu",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("sha256", CLAIMS, ids=lambda sha256: sha256[:12])
def test_a_stored_source_still_trains_a_step(sha256, tmp_path):
    claim, source = CLAIMS[sha256], read_source(RECORDS, sha256)
    write_files(source, tmp_path / "source")
    folders = {"data_dir": write_data(tmp_path / "data"), "log_dir": tmp_path / "logs"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | folders).items()]
    command = [sys.executable, tmp_path / "source" / "train_gpt.py", *claim["flags"], *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    (log,) = logs_of(tmp_path / "logs")
    events = read_events(log)
    assert events[0]["source_sha256"] == sha256
    assert (events[-1]["status"], events[-1]["steps"]) == ("done", 1)
