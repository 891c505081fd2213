"""run.sh in a scratch copy: every program that it starts is a stub that writes down how it was called."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
MACHINES = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"}
SHORT = ("--track", "short", "--data-dir", "elsewhere")  # a track for all GPUs, with data that are there
TOOLS = ("awk", "bash", "cat", "dirname", "grep", "mkdir", "rm", "sha256sum", "sleep", "tail", "touch", "wc")
STUB_TOOLS = ("cp", "od", "tr")

# Stands for the system's python3 and, copied by its own `-m venv`, for the one in .venv. Every call becomes a line
# of JSON in $CALLS; a bash without JSON writes its arguments as hexadecimal, so that no quoting can hide a fault.
PYTHON_STUB = r"""#!/bin/bash
[[ ${1-} == -V ]] && { echo "Python ${FAKE_VERSION-3.12.1}"; exit; }
[[ ${1-} == -c ]] && exit "${FAKE_ENSUREPIP_STATUS-0}"
{
    printf '{"pid": %s, "threads": "%s", "argv": [' "$$" "${OMP_NUM_THREADS-}"
    separator=
    for argument in "$@"; do
        printf '%s"' "$separator"; printf '%s' "$argument" | od -An -v -tx1 | tr -d ' \n'; printf '"'; separator=', '
    done
    printf ']}\n'
} >>"$CALLS"
case "${1-} ${2-}" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip")
        printf '%b' "${FAKE_PIP_OUTPUT-}"
        [[ -z ${FAKE_PIP_HANGS-} ]] || exec sleep 30
        exit "${FAKE_PIP_STATUS-0}" ;;
    "-m data.corpus") mkdir -p data/corpus && touch data/corpus/corpus.json ;;
    "-m data.cached_fineweb") exit "${FAKE_DOWNLOAD_STATUS-0}" ;;
    "-m ruff") exit "${FAKE_RUFF_STATUS-0}" ;;
    "-m pytest") echo "3 passed in 0.01s"; exit "${FAKE_PYTEST_STATUS-0}" ;;
    "train_gpt.py "*) exit "${FAKE_TRAINER_STATUS-0}" ;;
esac
"""
NVIDIA_SMI_STUB = r"""#!/bin/bash
for ((gpu = 0; gpu < ${FAKE_GPUS-0}; gpu++)); do
    echo "GPU $gpu: NVIDIA H100 80GB HBM3 (UUID: GPU-$gpu)"
    echo "  MIG 1g.10gb Device 0: (UUID: MIG-$gpu)"
done
"""
DF_STUB = r"""#!/bin/bash
echo "Filesystem 1024-blocks Used Available Capacity Mounted on"
echo "/dev/disk 90000000 1 ${FAKE_FREE_KB-50000000} 1% /"
"""


class Call(NamedTuple):
    argv: list[str]
    threads: str  # OMP_NUM_THREADS
    pid: int


class Clone:
    """A scratch copy of the repository and a PATH of stubs and TOOLS: run.sh may rely on nothing else."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.record = folder / "clone of it", folder / "bin", folder / "calls"
        self.env = {"PATH": str(self.bin), "CALLS": str(self.record)}

    def furnish(self) -> None:
        self.root.mkdir()
        self.bin.mkdir()
        shutil.copy(ROOT / "run.sh", self.root)
        (self.root / "requirements.txt").write_text("torch==2.13.0\n")
        (self.root / "requirements-dev.txt").write_text("pytest==9.2.0\n")
        for tool in (*TOOLS, *STUB_TOOLS):  # scripts and not links: a test that replaces one must not write through it
            self.stub(tool, f'#!/bin/bash\nexec {shutil.which(tool)} "$@"\n')
        self.stub("python3", PYTHON_STUB)
        self.stub("nvidia-smi", NVIDIA_SMI_STUB)
        self.stub("df", DF_STUB)
        self.stub("nproc", "#!/bin/bash\necho 8\n")

    def stub(self, name: str, text: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start run.sh in its own process group, as a terminal would."""
        return subprocess.Popen(
            [str(self.root / "run.sh"), *arguments], env=self.env | variables, cwd=self.bin, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **variables)
        stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def calls(self) -> list[Call]:
        """Calls of Python since the last call of this method."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        return [
            Call([bytes.fromhex(word).decode() for word in call["argv"]], call["threads"], call["pid"])
            for call in map(json.loads, lines)
        ]

    def jobs(self) -> list[str]:
        """The same calls as the job that each did: venv, pip, data.corpus, ..., or train_gpt.py."""
        return [argv[1] if argv[0] == "-m" else argv[0] for argv, _, _ in self.calls()]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a fresh clone, and one with a clone whose environment and corpus have been made."""
    before, after = tmp_path_factory.mktemp("fresh"), tmp_path_factory.mktemp("made")
    Clone(before).furnish()
    shutil.copytree(before, after, dirs_exist_ok=True)
    made = Clone(after)
    assert made.run().returncode == 0
    made.record.unlink()
    return before, after


@pytest.fixture
def fresh(templates: tuple[Path, Path], tmp_path: Path) -> Clone:
    shutil.copytree(templates[0], tmp_path, dirs_exist_ok=True)
    return Clone(tmp_path)


@pytest.fixture
def clone(templates: tuple[Path, Path], tmp_path: Path) -> Clone:
    shutil.copytree(templates[1], tmp_path, dirs_exist_ok=True)
    return Clone(tmp_path)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited 30 s for {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a start that was refused."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr.startswith("run.sh: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


# What is started ------------------------------------------------------------------------------------------------------


def test_without_gpus_the_trainer_is_one_plain_process(clone: Clone) -> None:
    assert clone.run("--steps", "5").returncode == 0
    assert [call.argv for call in clone.calls()] == [["train_gpt.py", "--steps", "5"]]


def test_a_machine_without_nvidia_smi_is_a_machine_without_gpus(clone: Clone) -> None:
    (clone.bin / "nvidia-smi").unlink()
    assert clone.run().returncode == 0
    assert [call.argv for call in clone.calls()] == [["train_gpt.py"]]


def test_one_gpu_is_one_plain_process(clone: Clone) -> None:
    clone.run(FAKE_GPUS="1")
    assert [call.argv for call in clone.calls()] == [["train_gpt.py"]]


def test_four_gpus_start_torchrun_with_four_processes(clone: Clone) -> None:
    clone.run(*SHORT, FAKE_GPUS="4")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    assert [call.argv for call in clone.calls()] == [[*torchrun, "train_gpt.py", *SHORT]]


def test_the_tiny_track_takes_one_process_whatever_the_gpus(clone: Clone) -> None:
    clone.run(FAKE_GPUS="8")
    clone.run("--track=tiny", FAKE_GPUS="8")
    assert [call.argv for call in clone.calls()] == [["train_gpt.py"], ["train_gpt.py", "--track=tiny"]]


@pytest.mark.parametrize(("visible", "processes"), [("2,5", 2), ("3", 1), ("", 1), ("0,1,2,3,4,5", 4)])
def test_hidden_gpus_get_no_process(clone: Clone, visible: str, processes: int) -> None:
    clone.run(*SHORT, FAKE_GPUS="4", CUDA_VISIBLE_DEVICES=visible)
    [call] = clone.calls()
    assert call.argv[0] == "train_gpt.py" if processes == 1 else call.argv[4] == str(processes)


def test_nproc_overrides_the_number_of_gpus(clone: Clone) -> None:
    clone.run(FAKE_GPUS="8", NPROC="1")
    clone.run(FAKE_GPUS="0", NPROC="2")
    one, two = clone.calls()
    assert one.argv == ["train_gpt.py"]
    assert two.argv == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train_gpt.py"]


def test_several_machines_meet_at_the_master(clone: Clone) -> None:
    clone.run(*SHORT, FAKE_GPUS="8", NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    clone.run(NNODES="2", NODE_RANK="0", MASTER_ADDR="10.0.0.1", MASTER_PORT="1234")
    eight, one = (call.argv for call in clone.calls())
    meeting = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1", "--master_port", "29500"]
    assert eight == ["-m", "torch.distributed.run", *meeting, "--nproc_per_node", "8", "train_gpt.py", *SHORT]
    assert one[2:12] == [*meeting[:3], "0", *meeting[4:7], "1234", "--nproc_per_node", "1"]


def test_the_network_to_use_reaches_the_trainer(clone: Clone) -> None:
    names = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "ib0"}
    shown = 'echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"\n'
    (clone.root / ".venv/bin/python").write_text(PYTHON_STUB + shown)
    assert clone.run(NPROC="2", **MACHINES, **names).stdout == "eth1 ib0\n"


def test_processes_share_the_cores_unless_told_otherwise(clone: Clone) -> None:
    clone.run()
    clone.run(NPROC="3")
    clone.run(NPROC="16")
    clone.run(NPROC="2", OMP_NUM_THREADS="5")
    assert [call.threads for call in clone.calls()] == ["", "2", "1", "5"]  # of 8 cores


@pytest.mark.parametrize("flag", ["--help", "-h", "--print-config"])
def test_flags_that_only_print_start_one_process_and_make_no_data(fresh: Clone, flag: str) -> None:
    fresh.run("--track", "short", flag, FAKE_GPUS="8", NNODES="2", NODE_RANK="0", MASTER_ADDR="10.0.0.1")
    assert fresh.jobs() == ["venv", "pip", "train_gpt.py"]


def test_arguments_arrive_as_they_were_given(clone: Clone) -> None:
    odd = ["--name", "two words", "it's", '"quoted"', "$HOME", "*", "", "back\\slash", "new\nline", "--", "-x=ä"]
    clone.run(*odd)
    clone.run(*odd, NPROC="2")
    plain, torchrun = clone.calls()
    assert plain.argv[1:] == odd
    assert torchrun.argv[-len(odd):] == odd


@pytest.mark.parametrize("status", ["1", "2", "3", "130"])
def test_the_exit_code_of_the_trainer_is_passed_on(clone: Clone, status: str) -> None:
    assert clone.run("--steps", "1", FAKE_TRAINER_STATUS=status).returncode == int(status)


def test_the_trainer_takes_the_place_of_the_script_so_that_signals_reach_it(clone: Clone) -> None:
    process = clone.start()
    process.communicate(timeout=60)
    assert [call.pid for call in clone.calls()] == [process.pid]


# The environment ------------------------------------------------------------------------------------------------------


def test_a_fresh_clone_makes_the_environment_then_the_corpus_then_trains(fresh: Clone) -> None:
    assert fresh.run().returncode == 0
    assert fresh.jobs() == ["venv", "pip", "data.corpus", "train_gpt.py"]


def test_a_second_start_only_trains(clone: Clone) -> None:
    clone.run()
    assert clone.jobs() == ["train_gpt.py"]


def test_changed_requirements_are_installed_into_the_same_environment(clone: Clone) -> None:
    (clone.root / "requirements.txt").write_text("torch==2.13.0\nnumpy==2.4.6\n")
    clone.run()
    assert clone.jobs() == ["pip", "train_gpt.py"]
    clone.run()
    assert clone.jobs() == ["train_gpt.py"]


def test_another_interpreter_gets_another_environment(clone: Clone) -> None:
    clone.stub("python3.13", PYTHON_STUB.replace("${FAKE_VERSION-3.12.1}", "3.13.0"))
    clone.run(PYTHON="python3.13")
    assert clone.jobs() == ["venv", "pip", "train_gpt.py"]
    clone.run(PYTHON="python3.13")
    clone.run()
    assert clone.jobs() == ["train_gpt.py", "train_gpt.py"]


def test_an_environment_that_lost_its_interpreter_is_made_again(clone: Clone) -> None:
    (clone.root / ".venv/bin/python").unlink()
    clone.run()
    assert clone.jobs() == ["venv", "pip", "train_gpt.py"]


def test_a_machine_without_sha256sum_has_shasum(fresh: Clone) -> None:
    (fresh.bin / "sha256sum").rename(fresh.bin / "hash")
    fresh.stub("shasum", '#!/bin/bash\n[[ "$*" == "-a 256" ]] && exec hash\n')
    fresh.run()
    fresh.run()
    assert fresh.jobs() == ["venv", "pip", "data.corpus", "train_gpt.py", "train_gpt.py"]


def test_without_python_it_says_what_to_install(fresh: Clone) -> None:
    (fresh.bin / "python3").unlink()
    assert "cannot run python3; install Python 3.11 or newer" in refusal(fresh.run())


@pytest.mark.parametrize("version", ["3.10.14", "3.9.2", "2.7.18"])
def test_a_python_that_is_too_old_is_named_with_its_version(fresh: Clone, version: str) -> None:
    assert f"python3 is Python {version} and 3.11 or newer is needed" in refusal(fresh.run(FAKE_VERSION=version))
    assert fresh.calls() == []


def test_python_without_venv_is_told_the_package_to_install(fresh: Clone) -> None:
    assert "apt install python3-venv" in refusal(fresh.run(FAKE_ENSUREPIP_STATUS="1"))


def test_a_full_disk_is_found_before_the_install(fresh: Clone) -> None:
    assert "only 1500 MB are free" in refusal(fresh.run(FAKE_FREE_KB=str(1500 * 1024)))
    assert fresh.calls() == []


def test_a_start_with_nothing_to_install_needs_no_room(clone: Clone) -> None:
    assert clone.run(FAKE_FREE_KB="0").returncode == 0


def test_a_folder_that_cannot_be_written_is_named(fresh: Clone) -> None:
    fresh.stub("mkdir", "#!/bin/bash\necho mkdir: Permission denied >&2\nexit 1\n")
    sentence = refusal(fresh.run())
    assert f"cannot write {fresh.root}/.venv" in sentence


@pytest.mark.parametrize(("last_line", "sentence"), [
    ("WARNING: Retrying after connection broken by 'NewConnectionError'", "check the network and start again"),
    ("ERROR: Could not install packages: [Errno 28] No space left on device", "the disk is full"),
    ("ERROR: No matching distribution found for torch==9", "No matching distribution found for torch==9"),
])  # fmt: skip
def test_a_failed_install_is_explained_and_tried_again(fresh: Clone, last_line: str, sentence: str) -> None:
    output = f"Collecting torch\n{last_line}\n"
    said = refusal(fresh.run(FAKE_PIP_STATUS="1", FAKE_PIP_OUTPUT=output))
    assert sentence in said
    assert ".venv/install.log" in said
    assert fresh.jobs() == ["venv", "pip"]
    assert (fresh.root / ".venv/install.log").read_text() == output
    assert fresh.run().returncode == 0
    assert fresh.jobs() == ["pip", "data.corpus", "train_gpt.py"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_install_ends_pip_and_the_next_start_repairs_it(fresh: Clone, number: signal.Signals) -> None:
    process = fresh.start(FAKE_PIP_HANGS="1")
    wait_until(lambda: fresh.record.exists() and fresh.record.read_text().count("\n") == 2, "pip to start")
    pip = fresh.calls()[1]
    assert pip.argv[:3] == ["-m", "pip", "install"]
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number
    wait_until(lambda: not is_alive(pip.pid), "pip to end")
    assert fresh.run().returncode == 0
    assert fresh.jobs() == ["venv", "pip", "data.corpus", "train_gpt.py"]


def test_a_long_install_keeps_showing_where_it_is(fresh: Clone) -> None:
    script = (fresh.root / "run.sh").read_text()
    assert script.count("sleep 0.1") == 1
    fast_clock = "sleep 0.1; SECONDS=$((SECONDS + 6))"
    (fresh.root / "run.sh").write_text(script.replace("sleep 0.1", fast_clock))
    result = fresh.run(FAKE_PIP_OUTPUT="Collecting torch\\nDownloading torch (527 MB)\\n")
    assert result.stdout.count(" s  Downloading torch (527 MB)\n") >= 1, result.stdout


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["NPROC", "NNODES", "SHARDS"])
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "08", "9999999"])
def test_a_setting_that_is_no_count_is_refused_before_anything_is_made(fresh: Clone, name: str, value: str) -> None:
    assert f"{name}='{value}' is not a number" in refusal(fresh.run(**{name: value}))
    assert fresh.calls() == []


@pytest.mark.parametrize("rank", ["", "2", "-1", "one"])
def test_a_machine_needs_a_rank_below_their_number(fresh: Clone, rank: str) -> None:
    sentence = refusal(fresh.run(NNODES="2", NODE_RANK=rank, MASTER_ADDR="10.0.0.1"))
    assert f"NODE_RANK='{rank}' is not a rank" in sentence
    assert "one of 0 to 1" in sentence


def test_several_machines_need_the_address_of_the_first(fresh: Clone) -> None:
    assert "NNODES=2 needs MASTER_ADDR" in refusal(fresh.run(NNODES="2", NODE_RANK="0"))


@pytest.mark.parametrize("port", ["0", "65536", "ssh"])
def test_a_port_that_does_not_exist_is_refused(fresh: Clone, port: str) -> None:
    assert f"MASTER_PORT='{port}' is not a" in refusal(fresh.run(**MACHINES, MASTER_PORT=port))
    assert fresh.calls() == []


# Data -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [["--data-dir", "elsewhere"], ["--data-dir=elsewhere"], ["--track", "no such track"]])
def test_data_of_ones_own_and_unknown_tracks_fetch_nothing(fresh: Clone, flags: list[str]) -> None:
    fresh.run(*flags)
    assert fresh.jobs() == ["venv", "pip", "train_gpt.py"]


@pytest.mark.parametrize(
    ("flags", "shards", "size"),
    [("--track short", 9, 2), ("--track=medium", 36, 8), ("--seed 1 --track tiny --track steps", 18, 4)],
)
def test_the_large_tracks_fetch_as_much_of_fineweb_as_they_read(
    clone: Clone, flags: str, shards: int, size: int
) -> None:
    result = clone.run(*flags.split())
    fetch, _ = clone.calls()
    assert fetch.argv == ["-m", "data.cached_fineweb", str(shards)]
    assert f"{shards} training shards and the validation shard, about {size} GB" in result.stdout


def test_fineweb_is_fetched_only_while_shards_are_missing(clone: Clone) -> None:
    folder = clone.root / "data/fineweb10B"
    folder.mkdir(parents=True)
    (folder / "fineweb_val_000000.bin").touch()
    (folder / "fineweb_train_000001.bin").touch()
    clone.run("--track", "short", SHARDS="2")
    assert clone.jobs() == ["data.cached_fineweb", "train_gpt.py"]
    (folder / "fineweb_train_000002.bin").touch()
    clone.run("--track", "short", SHARDS="2")
    assert clone.jobs() == ["train_gpt.py"]
    (folder / "fineweb_val_000000.bin").unlink()
    clone.run("--track", "short", SHARDS="2")
    assert clone.jobs() == ["data.cached_fineweb", "train_gpt.py"]


def test_a_failed_download_starts_no_training(clone: Clone) -> None:
    assert clone.run("--track", "short", FAKE_DOWNLOAD_STATUS="1").returncode == 1
    assert clone.jobs() == ["data.cached_fineweb"]


# ./run.sh test --------------------------------------------------------------------------------------------------------


def test_the_test_command_ends_with_the_closing_line_of_pytest(fresh: Clone) -> None:
    result = fresh.run("test", "-k", "two words", "tests/test_x.py")
    assert result.returncode == 0
    assert result.stdout.endswith("3 passed in 0.01s\n")
    calls = [call.argv for call in fresh.calls()]
    assert [argv[1] for argv in calls] == ["venv", "pip", "pip", "ruff", "mypy", "pytest"]
    assert [argv[-1] for argv in calls[1:3]] == ["requirements.txt", "requirements-dev.txt"]
    assert calls[-1][:2] == ["-m", "pytest"]
    assert calls[-1][-3:] == ["-k", "two words", "tests/test_x.py"]


def test_the_tools_for_tests_are_installed_once(fresh: Clone) -> None:
    fresh.run("test")
    fresh.calls()
    fresh.run("test")
    assert fresh.jobs() == ["ruff", "mypy", "pytest"]


def test_a_lint_fault_fails_the_whole_and_the_tests_still_run(fresh: Clone) -> None:
    result = fresh.run("test", FAKE_RUFF_STATUS="1")
    assert result.returncode == 1
    assert result.stdout.endswith("3 passed in 0.01s\n")


def test_the_exit_code_of_pytest_is_passed_on(fresh: Clone) -> None:
    assert fresh.run("test", FAKE_PYTEST_STATUS="5").returncode == 5


# Under Slurm ----------------------------------------------------------------------------------------------------------

JOB = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
SCONTROL_STUB = r"""#!/bin/bash
echo "$*" >>scontrol_calls
[[ $1 != show ]] || printf '127.0.0.1\nnode8\n'
"""
# The words after its options, on each node; the exit code is that of the last that failed.
SRUN_STUB = r"""#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" & tasks[node]=$!; done
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit ${status-0}
"""


@pytest.fixture
def job(clone: Clone) -> Clone:
    """A clone in which slurm.sh stands for run.sh and finds the commands of Slurm."""
    shutil.copy(ROOT / "scripts" / "slurm.sh", clone.root)
    clone.env |= JOB | {"SLURM_SUBMIT_DIR": str(clone.root)}
    clone.stub("mktemp", f'#!/bin/bash\nexec {shutil.which("mktemp")} "$@"\n')
    clone.stub("scontrol", SCONTROL_STUB)
    clone.stub("srun", SRUN_STUB)
    return clone


def submit(job: Clone, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(job.root / "slurm.sh"), *flags]
    return subprocess.run(command, env=job.env, cwd=job.bin, capture_output=True, text=True, timeout=120)


def use_real_python(clone: Clone, trainer: str) -> None:
    (clone.root / ".venv/bin/python").write_text(
        f'#!/bin/bash\n[[ $1 == -V ]] && echo Python 3.12.1 || exec {sys.executable} "$@"\n'
    )
    (clone.root / "train_gpt.py").write_text(trainer)


@pytest.mark.parametrize("script", ["run.sh", "scripts/slurm.sh", ".ci/run"])
def test_the_shell_scripts_are_sound_and_can_be_started(script: str) -> None:
    assert subprocess.run(["bash", "-n", str(ROOT / script)]).returncode == 0
    assert os.access(ROOT / script, os.X_OK)


def test_a_slurm_job_starts_one_run_on_all_its_nodes(job: Clone) -> None:
    """With the real torchrun: two nodes of two processes meet as four ranks, all with the flags of the job."""
    use_real_python(job, (
        "import json, os, pathlib, sys\n"
        "rank, size = os.environ['RANK'], os.environ['WORLD_SIZE']\n"
        "pathlib.Path('rank' + rank).write_text(json.dumps([size, os.environ['MASTER_PORT'], sys.argv[1:]]))\n"
    ))  # fmt: skip
    job.env["NPROC"] = "2"
    result = submit(job, "--steps", "two words")
    assert result.returncode == 0, result.stderr
    said = {path.name: json.loads(path.read_text()) for path in job.root.glob("rank*")}
    assert said == {f"rank{rank}": ["4", "23456", ["--resume", "auto", "--steps", "two words"]] for rank in range(4)}
    assert (job.root / "scontrol_calls").read_text() == "show hostnames node[7-8]\n"


@pytest.mark.parametrize(("status", "queued"), [("interrupted", True), ("error", False), ("nonfinite", False)])
def test_a_slurm_job_whose_run_was_interrupted_is_queued_again(job: Clone, status: str, queued: bool) -> None:
    line = json.dumps({"event": "end", "status": status, "previous": "0"})
    job.stub("srun", f"#!/bin/bash\nmkdir logs\necho '{line}' >logs/registry.jsonl\nexit 1\n")
    assert submit(job).returncode == 1
    assert ("requeue 123456" in (job.root / "scontrol_calls").read_text()) == queued


def test_a_slurm_job_that_fails_before_its_run_begins_is_not_queued_for_the_interruption_of_another(job: Clone) -> None:
    registry = job.root / "logs" / "registry.jsonl"
    registry.parent.mkdir()
    registry.write_text('{"event": "end", "status": "interrupted"}\n')
    os.utime(registry, (1e9, 1e9))
    job.stub("srun", "#!/bin/bash\nexit 2\n")
    assert submit(job).returncode == 2
    assert "requeue" not in (job.root / "scontrol_calls").read_text()


# The real torchrun ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_torchrun_and_all_its_workers(clone: Clone, number: signal.Signals) -> None:
    """SIGINT reaches the whole group, as Ctrl-C does; SIGTERM reaches the started process only."""
    use_real_python(clone, (
        "import os, pathlib, time\n"
        "pathlib.Path('rank' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(120)\n"
    ))  # fmt: skip
    pids = [clone.root / f"rank{rank}" for rank in (0, 1)]
    process = clone.start(NPROC="2")
    wait_until(lambda: all(path.exists() and path.read_text() for path in pids), "both workers to start")
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not any(is_alive(int(path.read_text())) for path in pids)
