"""scripts/gpu_check.sh tries every stage whatever fails, and its report keeps what each command did and measured."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import small_run
from small_run import ROOT

from scripts import gpu_report

SCRIPT = ROOT / "scripts" / "gpu_check.sh"
STAGES = ["tests", "kernels", "bench", "train"]
# In place of Python: notes its words; makes the folders of the shards, with shards in them if told of a true Python;
# keeps what is reported; fails or hangs where told.
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$NOTES/calls"
if [[ -n ${FAILS:-} && "$*" == *"$FAILS"* ]]; then exit 1; fi
if [[ -n ${HANGS:-} && "$*" == *"$HANGS"* ]]; then echo $$ >"$NOTES/hanging" && exec sleep 60; fi
case "$1" in
    -c) exit "${NO_GPU:-0}" ;;
    -) if [[ -n ${TRUE:-} ]]; then "$TRUE" "$@"; else mkdir "$2" "$6"; fi && cp -r "$2" "$6" "$NOTES" ;;
    scripts/gpu_report.py) cp -r "$4" "$NOTES" && ! grep -q "\\t[1-9][0-9]*\\t[0-9]*\\t" -P "$4/ran" ;;
    *) echo "printed by $*" ;;
esac
"""


@pytest.fixture
def start(tmp_path) -> Callable[..., subprocess.Popen]:
    """Starts the script with the stand-in for Python, in a process group of its own."""
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (tmp_path / "temporary").mkdir()

    def start(*stages: str, **environment: str) -> subprocess.Popen:
        mine = {"PYTHON": str(python), "NOTES": str(tmp_path), "TMPDIR": str(tmp_path / "temporary")}
        return subprocess.Popen(
            [SCRIPT, *stages], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | mine | environment, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    return start


@pytest.fixture
def check(start, tmp_path):
    """Runs the script so; gives its exit code, what it said on standard error, and the lines of what was called."""

    def check(*stages: str, **environment: str) -> tuple[int, str, list[str]]:
        process = start(*stages, **environment)
        _, said = process.communicate(timeout=120)
        calls = tmp_path / "calls"
        return process.returncode, said, calls.read_text().splitlines() if calls.exists() else []

    return check


def commands(tmp_path: Path, stage: str) -> list[list[str]]:
    """Name, exit code, seconds and words of each command of a stage."""
    return [line.split("\t") for line in (tmp_path / f"{stage}-figures" / "ran").read_text().splitlines()]


# ---- Stages


def test_all_stages_run_in_order_and_each_is_reported_when_it_is_over(check, tmp_path):
    code, said, calls = check()
    assert (code, said) == (0, "")
    called = "scripts/gpu_report.py records/benchmarks "
    reports = [Path(call.split()[-1]).name for call in calls if call.startswith(called)]
    assert reports == [f"{stage}-figures" for stage in STAGES]
    words = {name: text for stage in STAGES for name, code, _, text in commands(tmp_path, stage)}
    assert set(words) == {"gpu", "accuracy", "quality", "rates", "shards", "short", "tiny", "optimizers"}
    assert "--track short" in words["short"]
    assert (tmp_path / "kernels-figures" / "rates.out").read_text().startswith("printed by scripts/bench_optim.py")


def test_shards_are_made_once_for_both_stages_that_read_them(check):
    *_, calls = check("bench", "train")
    assert sum(call.startswith("- ") for call in calls) == 1


@pytest.mark.parametrize("fails", ["optim_quality", "bench_step", "train_gpt.py --track tiny"])
def test_what_fails_keeps_nothing_from_being_tried_and_is_named(fails, check, tmp_path):
    exit_code, said, calls = check(FAILS=fails)
    assert exit_code == 1
    assert [call.split()[0] for call in calls].count("scripts/gpu_report.py") == 4
    failed = [stage for stage in STAGES if any(code != "0" for _, code, _, _ in commands(tmp_path, stage))]
    assert len(failed) == 1
    assert said.splitlines()[-1] == f"gpu_check.sh: failed: {failed[0]}"


def test_shards_that_cannot_be_made_are_a_command_that_failed(check, tmp_path):
    code, said, _ = check("bench", FAILS="/short 50256")
    assert (code, said.splitlines()[-1]) == (1, "gpu_check.sh: failed: bench")
    ended = {name: int(code) for name, code, _, _ in commands(tmp_path, "bench")}
    assert ended == {"shards": 1, "short": 0, "tiny": 0, "optimizers": 0}


def test_an_interrupt_ends_what_runs_and_the_script_and_leaves_nothing(start, tmp_path):
    process = start("tests", "kernels", HANGS="pytest")
    noted, deadline = tmp_path / "hanging", time.monotonic() + 60
    while not (noted.exists() and noted.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)
    assert len((tmp_path / "calls").read_text().splitlines()) == 2  # the question for a GPU, and what hung
    assert not [*(tmp_path / "temporary").iterdir()]


def test_without_a_gpu_nothing_is_started_and_the_way_out_is_named(check):
    code, said, calls = check(NO_GPU="1")
    assert code == 2
    assert "GPU_CHECK_DEVICE=cpu" in said
    assert len(calls) == 1


def test_an_unknown_stage_is_refused_before_anything_runs(check):
    code, said, calls = check("tests", "benchmarks")
    assert code == 2
    assert "no stage 'benchmarks'; there are tests, kernels, bench and train" in said
    assert len(calls) == 1


def test_figures_that_could_not_be_kept_stop_it_before_anything_runs(check, tmp_path):
    code, said, calls = check("tests", GPU_CHECK_RESULTS=str(tmp_path / "python" / "below a file"))
    assert code == 2
    assert "name another folder in GPU_CHECK_RESULTS" in said
    assert len(calls) == 1


def test_the_training_of_both_tracks_runs_on_the_cpu_on_shards_that_the_script_makes(check, tmp_path):
    """The script makes the shards; the commands that it then gives run in this process, and are reported."""
    code, said, _ = check("train", GPU_CHECK_DEVICE="cpu", TRUE=sys.executable)
    assert (code, said) == (0, "")
    figures = tmp_path / "train-figures"
    words = {name: text.replace("TMP", str(tmp_path)).split() for name, _, _, text in commands(tmp_path, "train")}
    assert set(words) == {"shards", "tiny", "short"}
    for track in ("tiny", "short"):
        assert words[track][:4] == ["python", "train_gpt.py", "--track", track]
        outcome = small_run.run_words(words[track][2:], tmp_path / "logs")
        assert (outcome.code, outcome.err) == (0, "")
        (figures / f"{track}.out").write_text(outcome.out)
    code, found, page = report(tmp_path, str(figures))
    assert code == 0
    for track in ("tiny", "short"):
        assert "validation loss" in "\n".join(found["stages"]["train"]["commands"][track]["text"])
        assert f"### train, {track}: passed" in page


# ---- The report


def stage_folder(tmp_path: Path, stage: str, *, code: int = 0, gain: float = 2.0) -> str:
    """A stage of three commands: figures on standard output, in a file, and none."""
    folder = tmp_path / f"{stage}-figures"
    folder.mkdir(exist_ok=True)
    alone = [{"n": 768, "m": m, "backend": b, "gain": {"median": gain if m == 3072 else 0.5}}
             for m in (768, 3072) for b in ("plain", "triton")]  # fmt: skip
    figures = {"sets": {"short": {"orthogonalization": alone}}}
    files = {
        "step.out": '{"step_ms": 7.5}\n', "step.err": "talk\nthe table\n",
        "rates.out": "rates\n", "rates.err": "", "rates.json": json.dumps(figures),
        "tests.out": "".join(f"{n}\n" for n in range(100)), "tests.err": "why\n",
        "ran": "step\t0\t12\tpython step.py\nrates\t0\t3\tpython rates.py\n" f"tests\t{code}\t4\tpython tests.py\n",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    return str(folder)


def report(tmp_path: Path, folder: str) -> tuple[int, dict, str]:
    (tmp_path / "results").mkdir(exist_ok=True)
    code = gpu_report.main(str(tmp_path / "results"), "2026-01-31", folder)
    (written,) = (tmp_path / "results").glob("*.json")
    assert written.name.startswith("2026-01-31_")
    return code, json.loads(written.read_text()), written.with_suffix(".md").read_text()


def test_a_report_holds_figures_text_machine_and_source(tmp_path):
    code, found, page = report(tmp_path, stage_folder(tmp_path, "bench"))
    commands = found["stages"]["bench"]["commands"]
    assert code == 0
    assert commands["step"]["figures"] == {"step_ms": 7.5}
    assert commands["step"]["text"] == ["talk", "the table"]
    assert commands["rates"]["figures"]["sets"]["short"]["orthogonalization"][3]["gain"] == {"median": 2.0}
    assert commands["tests"]["text"] == [str(n) for n in range(100 - gpu_report.LAST_LINES, 100)]
    assert {"torch", "gpu", "driver", "cpu"} <= set(found["env"])
    source = found["stages"]["bench"]["source"]
    assert len(source) == 64
    for words in ("### bench, step: passed, 12 s", "`python step.py`", "the table", f"Source: {source}",
                  f"- torch: {found['env']['torch']}"):  # fmt: skip
        assert words in page


def test_a_later_stage_is_added_and_a_repeated_one_replaced_each_with_its_source(tmp_path, monkeypatch):
    for source, stage, code in (("first", "bench", 1), ("second", "train", 0), ("third", "bench", 0)):
        monkeypatch.setattr(gpu_report, "source_hash", lambda root, source=source: source)
        _, found, page = report(tmp_path, stage_folder(tmp_path, stage, code=code))
    assert {stage: done["source"] for stage, done in found["stages"].items()} == {"bench": "third", "train": "second"}
    assert page.index("Source: third") < page.index("### bench, step") < page.index("Source: second")
    assert "FAILED" not in page


@pytest.mark.parametrize("torn", ['{"date": "2026-', "", "[]", "{}"])
def test_a_torn_file_is_kept_aside_and_told_in_a_line_and_the_stage_is_not_lost(torn, tmp_path, capsys):
    report(tmp_path, stage_folder(tmp_path, "bench"))
    (written,) = (tmp_path / "results").glob("*.json")
    written.write_text(torn)
    capsys.readouterr()
    code, found, _ = report(tmp_path, stage_folder(tmp_path, "train"))
    assert (code, list(found["stages"])) == (1, ["train"])
    (aside,) = (tmp_path / "results").glob("*.torn-*")
    assert aside.read_text() == torn
    error, *_ = capsys.readouterr().out.splitlines()
    assert error.startswith("error: ")
    assert str(aside) in error


def test_a_command_that_failed_or_missed_its_bound_fails_the_stage_and_is_named(tmp_path, capsys):
    code, found, page = report(tmp_path, stage_folder(tmp_path, "kernels", code=124, gain=1.1))
    said = capsys.readouterr().out
    assert code == 1
    assert found["stages"]["kernels"]["commands"]["tests"]["faults"] == ["exit code 124"]
    assert found["stages"]["kernels"]["commands"]["tests"]["text"][-1] == "why"
    assert "kernels, tests: exit code 124" in said
    assert "kernels, rates: a gain of 1.100 for (768, 3072, 'triton'), under 1.15" in said
    assert page.count("FAILED") == 2
