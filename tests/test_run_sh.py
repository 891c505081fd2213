"""run.sh in a scratch copy: every program that it starts is a stub that notes how it was called."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from small_run import ROOT

SHORT = ("--track", "short", "--data-dir", "elsewhere")  # a track for all GPUs; its data are there
TOOLS = ("bash", "cmp", "cp", "dirname", "flock", "mkdir", "rm", "sleep")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]

# Stands for python3 and, copied by its own `-m venv`, for .venv/bin/python. It notes the words of
# each call in $CALLS, in one write, because two starts may note at the same time.
PYTHON_STUB = r"""#!/bin/bash
[[ ${1-} == -c && $2 == *device_count* ]] && { echo "${FAKE_GPUS-1}"; exit; }
[[ ${1-} == -c ]] && exit
[[ ${1-} == -m && $2 == pip && $3 == --version ]] && exit
printf '%s\x1f' "$@" $'\x1e' >>"$CALLS"
case "${1-} ${2-}" in
    "-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-m pip") [[ $* == *--no-index* ]] && exit "${FAKE_MISSING-0}"
        echo "pip lives"; sleep "${FAKE_PIP_SECONDS-0}"; exit "${FAKE_PIP_STATUS-0}" ;;
    "-m huggingface_hub.cli.hf") exit "${FAKE_DOWNLOAD_STATUS-0}" ;;
    "-m ruff") exit "${FAKE_RUFF_STATUS-0}" ;;
    "-m pytest") echo "3 passed in 0.01s"; exit "${FAKE_PYTEST_STATUS-0}" ;;
    "train_gpt.py "*) exit "${FAKE_TRAINER_STATUS-0}" ;;
esac
"""


class Clone:
    """A scratch copy of the repository and a PATH of stubs: run.sh may rely on nothing else."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.record = folder / "clone of it", folder / "bin", folder / "calls"
        self.env = {"PATH": str(self.bin), "CALLS": str(self.record)}
        self.root.mkdir()
        self.bin.mkdir()
        shutil.copy(ROOT / "run.sh", self.root)
        (self.root / "requirements.txt").write_text("torch==2.13.0\n")
        (self.root / "requirements-dev.txt").write_text("pytest==9.2.0\n")
        for tool in TOOLS:
            if path := shutil.which(tool):
                (self.bin / tool).symlink_to(path)
        (self.bin / "python3").write_text(PYTHON_STUB)
        (self.bin / "python3").chmod(0o755)

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """run.sh in its own process group, as a terminal starts it."""
        return subprocess.Popen(
            [str(self.root / "run.sh"), *words], env=self.env | variables, cwd=self.bin, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **variables)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def argv(self) -> list[list[str]]:
        """Calls of Python since the last call of this method."""
        text = self.record.read_text() if self.record.exists() else ""
        self.record.unlink(missing_ok=True)
        return [call.split("\x1f")[:-1] for call in text.split("\x1e\x1f")[:-1]]

    def jobs(self) -> list[str]:
        """The same calls as the module or file that each ran."""
        return [argv[1] if argv[0] == "-m" else argv[0] for argv in self.argv()]


@pytest.fixture
def fresh(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.fixture
def clone(fresh: Clone) -> Clone:
    """A clone whose environment has been made."""
    assert fresh.run().returncode == 0
    fresh.record.unlink()
    return fresh


# ---- What is started


def test_a_fresh_clone_makes_its_environment_once_and_trains_tiny_unless_told_another_track(fresh):
    assert fresh.run("--steps", "5").returncode == 0
    *before, train = fresh.argv()
    assert [argv[1] for argv in before] == ["venv", "pip"]
    assert train == ["train_gpt.py", "--track", "tiny", "--steps", "5"]
    for words in (["--track=small"], ["--track", "small"]):
        assert fresh.run(*words, FAKE_TRAINER_STATUS="3").returncode == 3
        assert fresh.argv() == [["train_gpt.py", *words]]


@pytest.mark.parametrize(("words", "variables", "processes"), [
    ((), {"FAKE_GPUS": "8"}, 1),  # tiny is too small for more
    (("--track", "small", "--data-dir", "elsewhere"), {"FAKE_GPUS": "8"}, 1),
    (SHORT, {"FAKE_GPUS": "4"}, 4),
    (SHORT, {"FAKE_GPUS": "4", "NPROC": "1"}, 1),
    ((), {"NPROC": "2"}, 2),
    (("--track", "short", "--help"), {"FAKE_GPUS": "8"}, 1),
])  # fmt: skip
def test_there_is_a_process_for_each_gpu_unless_nproc_says_otherwise(
    clone, words, variables, processes
):
    assert clone.run(*words, **variables).returncode == 0
    [argv] = clone.argv()
    launch = [*TORCHRUN, "--nproc_per_node", str(processes)] if processes > 1 else []
    assert argv[: len(launch) + 1] == [*launch, "train_gpt.py"]


def test_arguments_arrive_as_they_were_given(clone):
    odd = ["--name", "two words", "it's", '"quoted"', "$HOME", "*", "", "back\\slash", "new\nline"]
    clone.run(*odd)
    clone.run(*odd, NPROC="2")
    plain, torchrun = clone.argv()
    assert plain[-len(odd) :] == torchrun[-len(odd) :] == odd


# ---- The environment


def test_changed_requirements_and_a_lost_interpreter_are_mended_at_the_next_start(clone):
    (clone.root / "requirements.txt").write_text("torch==2.13.0\nnumpy==2.4.6\n")
    assert "pip lives" in clone.run(FAKE_MISSING="1").stdout
    assert clone.run().stdout == ""
    assert clone.jobs() == ["pip", "pip", "train_gpt.py", "train_gpt.py"]
    (clone.root / "requirements.txt").write_text("numpy==2.4.6\ntorch==2.13.0\n")
    assert clone.run().stdout == "", "nothing is missing, so pip need not be seen"
    assert clone.jobs() == ["pip", "train_gpt.py"]
    (clone.root / ".venv/bin/python").unlink()
    clone.run()
    assert clone.jobs() == ["venv", "pip", "train_gpt.py"]


@pytest.mark.parametrize(("words", "variables", "code", "sentence", "jobs"), [
    ([], {"PYTHON": "python3.99"}, 2, "python3.99 is not Python 3.11 or newer with venv", []),
    ([], {"FAKE_PIP_STATUS": "1"}, 2, "pip could not install requirements.txt", ["venv", "pip"]),
    (["steps=5"], {}, 2, "steps=5 is not a command: ./run.sh test runs the tests", []),
])  # fmt: skip
def test_what_cannot_start_is_explained_and_leaves_nothing_that_keeps_the_next_start_from_working(
    fresh, words, variables, code, sentence, jobs
):
    result = fresh.run(*words, **variables)
    assert result.returncode == code
    assert sentence in result.stderr
    assert fresh.jobs() == jobs
    assert fresh.run().returncode == 0
    assert fresh.jobs()[-2:] == ["pip", "train_gpt.py"]


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_of_two_starts_at_once_one_installs_and_both_train(fresh):
    both = [fresh.start(FAKE_PIP_SECONDS="1") for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    jobs = fresh.jobs()
    assert sorted(jobs) == ["pip", "train_gpt.py", "train_gpt.py", "venv"]
    assert jobs.index("train_gpt.py") == 2


# ---- Settings and data


@pytest.mark.parametrize(
    ("words", "gpus"),
    [("--data-dir mine", "0"), ("--data-dir=mine", "0"), ("--help", "0"), ("--dry-run", "1")],
)
def test_data_of_ones_own_help_and_dry_runs_fetch_nothing(fresh, words, gpus):
    fresh.run("--track", "short", *words.split(), FAKE_GPUS=gpus)
    assert fresh.jobs() == ["venv", "pip", "train_gpt.py"]


def fetched(clone: Clone) -> list[str]:
    """The shards that the download was asked for."""
    words = clone.argv()[0]
    assert re.fullmatch("[0-9a-f]{40}", words[words.index("--revision") + 1])
    return [word for word in words if word.endswith(".bin")]


@pytest.mark.parametrize(("words", "gpus", "shards"), [
    ("--track short", "1", 9), ("--track tiny --track=steps", "1", 18),
    ("--track short --device cpu", "0", 9),
])  # fmt: skip
def test_large_tracks_fetch_from_one_commit_the_shards_that_they_read_and_lack(
    clone, words, gpus, shards
):
    done = clone.run(*words.split(), FAKE_DOWNLOAD_STATUS="1", FAKE_GPUS=gpus)
    assert (done.returncode, "HF_ENDPOINT a mirror" in done.stderr) == (2, True)
    training = [f"fineweb_train_{shard:06d}.bin" for shard in range(1, shards + 1)]
    names = ["fineweb_val_000000.bin", *training]
    assert fetched(clone) == names
    folder = clone.root / "data/fineweb10B"
    folder.mkdir(parents=True)
    for name in [*names, "fineweb_train_000099.bin"]:
        (folder / name).write_text("tokens")
    (folder / names[4]).write_text("")  # cut when the disk was full
    (folder / names[6]).unlink()  # though others make up the number
    clone.run(*words.split(), FAKE_GPUS=gpus)
    assert fetched(clone) == [names[4], names[6]]
    for number in (4, 6):
        (folder / names[number]).write_text("tokens")
    clone.run(*words.split(), FAKE_GPUS=gpus)
    assert clone.jobs() == ["train_gpt.py"]


@pytest.mark.parametrize("words", [
    "--track steps", "--track short --device cuda", "--track short --device=auto",
    "--track steps --dry-run",
])  # fmt: skip
def test_a_track_for_gpus_is_refused_without_one_before_anything_is_fetched(clone, words):
    done = clone.run(*words.split(), FAKE_GPUS="0")
    assert (done.returncode, clone.argv()) == (2, [])
    assert "torch finds none here: nothing was fetched" in done.stderr
    assert ("--dry-run --device cpu" in done.stderr) == ("--dry-run" in words)


# ---- ./run.sh test


def test_the_test_command_leaves_slow_tests_out_and_ends_with_pytests_closing_line(fresh):
    result = fresh.run("test", "-k", "two words", FAKE_RUFF_STATUS="1")
    assert result.returncode == 1  # and the tests still ran
    assert "tests marked slow are left out" in result.stdout
    assert result.stdout.endswith("3 passed in 0.01s\n")
    argv = fresh.argv()
    assert [words[1] for words in argv] == ["venv", "pip", "pip", "ruff", "mypy", "pytest"]
    assert argv[-1][2:4] == ["-m", "not slow"]
    assert argv[-1][-2:] == ["-k", "two words"]
    assert fresh.run("test", FAKE_PYTEST_STATUS="5").returncode == 5
    assert fresh.jobs() == ["ruff", "mypy", "pytest"]
