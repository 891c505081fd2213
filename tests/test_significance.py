"""From run logs to a verdict: nothing that a crash, a copy or a hand can do to a log may pass for evidence."""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.log import SCHEMA, RunLog
from scripts.runlog import LogError, find_runs, read_run
from scripts.significance import main
from scripts.stats import one_sample

ROOT = Path(__file__).resolve().parent.parent

# Final validation losses of two published records of the NanoGPT speedrun, and of one that missed its mark.
BOS_ALIGN = [3.2784, 3.2782, 3.2794, 3.2788, 3.2784, 3.2803, 3.2792, 3.2819, 3.2792, 3.2801,
             3.2778, 3.2773, 3.2791, 3.2817, 3.2779, 3.2804, 3.2805, 3.2789, 3.2770, 3.2783]
MIMETIC_VALUE_OUTPUT = [3.2777, 3.2775, 3.2778, 3.2772, 3.2780, 3.2805, 3.2791]
FP8_MLP_UP = [3.2802, 3.2800, 3.2789, 3.2763, 3.2792, 3.2793, 3.2781, 3.2785]


def write_run(
    folder: Path, run_id: str, losses: dict[int, float], *, seed: int, total: int = 100, target: float | None = 3.28,
    source: str = "source", config: str = "config", gpus: int = 8, status: str | None = "done",
) -> Path:
    """A log as the trainer writes it, with validation losses by step; `status=None` leaves the end line out."""
    log = RunLog(folder, run_id)
    log.write("phase", name="setup", timed=False, ms=1.0)
    log.write("header", schema=SCHEMA, run_id=run_id, track="short", target=target, seed=seed, trial=0, claim=None,
              source_sha256=source, config_sha256=config, config={}, env={"gpu_count": gpus})
    for step, loss in losses.items():
        log.write("step", step=step, train_loss=None)
        log.write("val", step=step, total_steps=total, val_loss=loss, train_time_ms=step * 2.0)
    if status:
        log.write("end", status=status, steps=max(losses, default=0), val_loss=None)
    log.close()
    return log.path


def write_arm(folder: Path, losses: list[float], *, first_seed: int = 0, target: float = 3.28) -> None:
    for seed, loss in enumerate(losses, first_seed):
        write_run(folder, f"run_{seed:03}", {50: 4.0 + seed, 100: loss}, seed=seed, target=target)


def judge(capsys, *arguments: object) -> tuple[int, list[dict]]:
    """Exit code and arms of `significance.py --json`."""
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)["arms"]


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


@pytest.mark.parametrize(("losses", "n", "mean", "sd", "t", "p", "upper99"), [
    (BOS_ALIGN, 20, 3.279140, 0.001340, -2.8705, 0.00489597, 3.27990),
    (MIMETIC_VALUE_OUTPUT, 7, 3.278257, 0.001156, -3.9891, 0.00360393, 3.27963),
    (FP8_MLP_UP, 8, 3.278812, 0.001233, -2.7232, 0.0148143, 3.28012),
])
def test_the_published_records_get_their_published_figures(capsys, losses, n, mean, sd, t, p, upper99):
    code, (arm,) = judge(capsys, "--losses", ",".join(map(str, losses)), "--target", 3.28)
    assert arm["n"] == n
    assert arm["mean"] == pytest.approx(mean, abs=1e-6)
    assert arm["sd"] == pytest.approx(sd, abs=1e-6)
    assert arm["t"] == pytest.approx(t, abs=1e-4)
    assert arm["p"] == pytest.approx(p, rel=4e-6)
    assert arm["upper99"] == pytest.approx(upper99, abs=1e-5)
    assert arm["passes"] is (p < 0.01)
    assert code == (0 if p < 0.01 else 1)


def test_p_is_one_hundredth_where_the_99_percent_bound_meets_the_target():
    bound = one_sample(MIMETIC_VALUE_OUTPUT, 3.28).upper99
    assert one_sample(MIMETIC_VALUE_OUTPUT, bound).p == pytest.approx(0.01, rel=1e-6)


@given(st.lists(st.floats(1, 10), min_size=2, max_size=12).filter(lambda x: max(x) - min(x) > 1e-3), st.floats(1, 10))
def test_mirrored_losses_have_the_complementary_p(losses, target):
    mirrored = [2 * target - loss for loss in losses]
    assert one_sample(losses, target).p + one_sample(mirrored, target).p == pytest.approx(1)


@pytest.mark.parametrize("losses", [[], [3.0], [0.1] * 3, [3.0, math.nan], [3.0, math.inf]])
def test_losses_without_a_spread_have_no_p(losses):
    result = one_sample(losses, 3.28)
    assert math.isnan(result.p)
    assert result.n == len(losses)


# ---------------------------------------------------------------------------------------------------------------------
# The parser


losses_by_step = st.dictionaries(st.integers(1, 10**6), st.floats(allow_nan=False), min_size=1, max_size=5).map(
    lambda losses: dict(sorted(losses.items())))


@given(losses_by_step, st.integers(0, 2**40), st.floats(0, 100), st.integers(0, 64))
@settings(max_examples=50, deadline=None)
def test_what_the_writer_wrote_the_parser_reads(losses, seed, target, gpus):
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder), "run", losses, seed=seed, total=max(losses), target=target, gpus=gpus)
        run = read_run(path)
    assert run.losses == list(losses.items())
    assert run.final_loss == losses[max(losses)]
    assert run.train_time_ms == max(losses) * 2.0
    assert (run.seed, run.target, run.gpu_count, run.total_steps) == (seed, target, gpus, max(losses))
    assert (run.run_id, run.track, run.trial, run.source, run.config_sha256) == ("run", "short", 0, "source", "config")
    assert run.complete
    assert run.status == "done"


def test_a_log_cut_at_any_byte_is_unfinished(tmp_path):
    content = write_run(tmp_path, "run", {50: 4.0, 100: 3.2}, seed=0).read_bytes()
    whole_lines = content.split(b"\n")
    cut = tmp_path / "cut.jsonl"
    for length in range(len(content) - 1):
        cut.write_bytes(content[:length])
        tail = content[:length].rpartition(b"\n")[2]
        reasons = {"torn last line"} if tail not in whole_lines else {"no header", "no end line"}
        assert read_run(cut).unfinished in reasons, tail


@given(st.binary(max_size=200), st.integers(0, 400))
@settings(max_examples=200, deadline=None)
def test_bytes_of_any_kind_give_a_run_or_a_log_error(garbage, position):
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder), "run", {50: 4.0, 100: 3.2}, seed=0)
        content = path.read_bytes()
        path.write_bytes(content[:position] + garbage + content[position:])
        try:
            outcome = str(read_run(path).path)
        except LogError as error:
            outcome = str(error)
    assert str(path) in outcome


@pytest.mark.parametrize("garbage", [
    b"step:5/10 val_loss:3.1", b"", b"[1]", b"{}", b'{"event": 3}', b"\xff\xfe", b"\0\0", b'{"event": "x"} {}',
    b'{"event": "x", "y": NaN}', b'{"event": "x", "y": ' + b"[" * 100_000, b'{"event": "x", "y": ' + b"9" * 5000 + b"}",
], ids=range(11))
def test_garbage_before_the_last_line_is_an_error_that_names_file_line_and_rule(tmp_path, garbage):
    path = write_run(tmp_path, "run", {100: 3.2}, seed=0)
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(b"\n".join([first, garbage, rest]))
    with pytest.raises(LogError, match=r"run\.jsonl, line 2: every line must be one JSON object"):
        read_run(path)


def test_a_file_without_line_ends_is_refused_before_it_fills_the_memory(tmp_path):
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(LogError, match="line 1: longer than 16777216 bytes"):
        read_run(path)


@pytest.mark.parametrize(("old", "new", "rule"), [
    ('"schema": 1', '"schema": 2', "schema must be 1, not 2"),
    ('"seed": 0', '"seed": "0"', "seed must be an integer of at least 0, not '0'"),
    ('"gpu_count": 8', '"gpu_count": null', "gpu_count must be an integer"),
    ('"source_sha256": "source", ', "", "source_sha256 must be a string, not None"),
    ('"val_loss": 3.2', '"val_loss": "low"', "val_loss must be a number, not 'low'"),
    ('"val_loss": 3.2', '"val_loss": true', "val_loss must be a number, not True"),
    ('"val_loss": 3.2', '"val_loss": 1e999', "val_loss must be a number, not inf"),
    ('"step": 100, "total_steps"', '"step": 50, "total_steps"', "validation at step 50 follows one at step 50"),
    ('"step": 100, "total_steps": 100', '"step": 100, "total_steps": 200', "total_steps is 200 but was 100"),
])
def test_a_field_that_breaks_its_rule_is_an_error_that_names_it(tmp_path, old, new, rule):
    path = write_run(tmp_path, "run", {50: 4.0, 100: 3.2}, seed=0)
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))
    with pytest.raises(LogError, match=rule):
        read_run(path)


def test_unknown_events_and_fields_are_ignored(tmp_path):
    path = write_run(tmp_path, "run", {100: 3.2}, seed=0)
    expected = read_run(path)
    path.write_text('{"event": "telemetry", "schema": 9, "val_loss": []}\n' + path.read_text())
    assert read_run(path) == expected


def without(word: str):
    return lambda lines: [line for line in lines if word not in line]


@pytest.mark.parametrize(("change", "reason"), [
    (lambda lines: [], "no header"),
    (without('"header"'), "no header"),
    (without('"val"'), "no validation"),
    (without('"step": 100'), "last validation at step 50 of 100"),
    (without('"end"'), "no end line"),
    (lambda lines: [line.replace('"done"', '"interrupted"') for line in lines], "ended with status interrupted"),
    (lambda lines: lines + [lines[1]], "2 headers in one log"),
    (lambda lines: lines + [lines[-1]], "2 end lines in one log"),
])
def test_a_run_that_did_not_finish_says_why(tmp_path, change, reason):
    path = write_run(tmp_path, "run", {50: 4.0, 100: 3.2}, seed=0)
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    assert read_run(path).unfinished == reason


def test_a_folder_is_read_without_subfolders_and_registry_and_each_log_once(tmp_path):
    path = write_run(tmp_path, "run", {100: 3.2}, seed=0)
    write_run(tmp_path / "sub", "other", {100: 3.2}, seed=1)
    (tmp_path / "registry.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("x")
    assert find_runs([tmp_path, path, tmp_path / "sub" / ".." / "run.jsonl"]) == [path]


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts


def test_logs_give_the_verdict_of_their_losses(tmp_path, capsys):
    write_arm(tmp_path, BOS_ALIGN)
    code, (arm,) = judge(capsys, tmp_path)
    assert code == 0
    assert (arm["n"], arm["losses"], arm["times_ms"]) == (20, BOS_ALIGN, [200.0] * 20)
    assert arm["p"] == pytest.approx(0.00489597, rel=2e-6)
    assert (arm["path"], arm["source"], arm["total_steps"], arm["gpu_count"]) == (str(tmp_path), "source", 100, 8)
    assert (arm["passes"], arm["incomplete"], arm["warnings"]) == (True, [], [])


def test_the_json_has_the_documented_fields(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC_VALUE_OUTPUT)
    _, (arm,) = judge(capsys, tmp_path)
    assert list(arm) == ["path", "source", "total_steps", "gpu_count", "n", "losses", "times_ms", "mean", "sd", "t",
                         "p", "upper99", "passes", "incomplete", "warnings"]


@pytest.mark.parametrize("difference", [{"source": "new"}, {"config": "new"}, {"total": 101}, {"gpus": 1}])
def test_runs_that_differ_in_what_defines_an_arm_are_not_pooled(tmp_path, capsys, difference):
    write_arm(tmp_path, MIMETIC_VALUE_OUTPUT)
    last = difference.get("total", 100)
    for seed in range(7, 11):
        write_run(tmp_path, f"run_{seed:03}", {last: 3.30 + seed / 1000}, seed=seed, **difference)
    code, arms = judge(capsys, tmp_path)
    assert code == 1
    assert [(arm["n"], arm["passes"]) for arm in arms] == [(7, True), (4, False)]


def test_one_arm_in_two_folders_is_pooled(tmp_path, capsys):
    write_arm(tmp_path / "a", MIMETIC_VALUE_OUTPUT[:3])
    write_arm(tmp_path / "b", MIMETIC_VALUE_OUTPUT[3:], first_seed=3)
    code, (arm,) = judge(capsys, tmp_path / "a", tmp_path / "b")
    assert (code, arm["n"], arm["path"]) == (0, 7, str(tmp_path))


def test_unfinished_runs_are_left_out_and_named(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC_VALUE_OUTPUT)
    cut = write_run(tmp_path, "cut", {50: 3.1}, seed=7, status=None)
    early = write_run(tmp_path, "early", {}, seed=8, status="interrupted")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    code, (arm,) = judge(capsys, tmp_path)
    assert (code, arm["n"]) == (0, 7)
    assert arm["incomplete"] == [
        {"path": str(cut), "reason": "no end line"},
        {"path": str(early), "reason": "ended with status interrupted"},
        {"path": str(empty), "reason": "no header"},
    ]
    assert main([str(tmp_path)]) == 0
    assert f"left out: {cut}: no end line" in capsys.readouterr().out


def test_an_unfinished_run_alone_fails(tmp_path, capsys):
    write_run(tmp_path, "cut", {50: 3.1}, seed=7, status=None)
    code, (arm,) = judge(capsys, tmp_path)
    assert (code, arm["n"], arm["mean"], arm["p"], arm["passes"]) == (1, 0, None, None, False)
    assert len(arm["incomplete"]) == 1


def test_copies_and_repeated_seeds_add_nothing(tmp_path, capsys):
    write_arm(tmp_path, FP8_MLP_UP)
    _, (alone,) = judge(capsys, tmp_path)
    original = tmp_path / "run_003.jsonl"
    (tmp_path / "z_copy.jsonl").write_bytes(original.read_bytes())
    (tmp_path / "z_renamed.jsonl").write_text(original.read_text().replace('"run_003"', '"z_renamed"'))
    edited = original.read_text().replace('"seed": 3', '"seed": 30').replace("3.2763", "3.2")
    (tmp_path / "z_edited.jsonl").write_text(edited)
    write_run(tmp_path, "z_rerun", {50: 4.1, 100: 3.2}, seed=3)
    code, (arm,) = judge(capsys, tmp_path)
    assert code == 1
    assert [arm[name] for name in ("n", "losses", "p")] == [alone[name] for name in ("n", "losses", "p")]
    copy, edited, renamed, rerun = arm["warnings"]
    assert f"{tmp_path / 'z_edited.jsonl'} is a duplicate of {original}" in edited
    assert f"{tmp_path / 'z_copy.jsonl'} is a duplicate of {original}" in copy
    assert f"{tmp_path / 'z_renamed.jsonl'} is a duplicate of {original}" in renamed
    assert f"{tmp_path / 'z_rerun.jsonl'} (loss 3.2) repeats seed 3 of {original}" in rerun


def test_few_runs_are_warned_about_and_equal_losses_fail(tmp_path, capsys):
    code, (arm,) = judge(capsys, "--losses", "3.2765,3.2766,3.2764", "--target", 3.28)
    assert code == 0
    assert any("n = 3: too few runs" in warning for warning in arm["warnings"])
    write_arm(tmp_path, [3.2] * 5)
    code, (arm,) = judge(capsys, tmp_path)
    assert (code, arm["sd"], arm["p"]) == (1, 0.0, None)
    assert any("all losses are equal" in warning for warning in arm["warnings"])


def test_a_diverged_run_that_finished_counts_against_its_arm(tmp_path, capsys):
    write_arm(tmp_path, [*MIMETIC_VALUE_OUTPUT, math.nan])
    code, (arm,) = judge(capsys, tmp_path)
    assert (code, arm["n"], arm["losses"][-1], arm["mean"], arm["passes"]) == (1, 8, None, None, False)
    assert "a loss is not finite: there is no test" in arm["warnings"]


def test_at_step_reads_that_validation_and_names_runs_without_it(tmp_path, capsys):
    for seed, loss in enumerate(MIMETIC_VALUE_OUTPUT):
        write_run(tmp_path, f"run_{seed}", {80: loss, 100: 3.1}, seed=seed)
    sparse = write_run(tmp_path, "sparse", {100: 3.1}, seed=7)
    _, (arm,) = judge(capsys, tmp_path, "--at-step", 80)
    assert (arm["losses"], arm["times_ms"]) == (MIMETIC_VALUE_OUTPUT, [160.0] * 7)
    assert arm["incomplete"] == [{"path": str(sparse), "reason": "no validation at step 80"}]


def test_the_target_comes_from_the_logs_unless_it_is_given(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC_VALUE_OUTPUT, target=3.27)
    assert judge(capsys, tmp_path)[0] == 1
    assert judge(capsys, tmp_path, "--target", 3.28)[0] == 0


def test_typed_losses_are_marked_unverified(capsys):
    _, (arm,) = judge(capsys, "--losses", "3.1,3.2", "--target", 3.28)
    assert (arm["path"], arm["source"], arm["times_ms"]) == (None, None, [])
    assert any(warning.startswith("unverified") for warning in arm["warnings"])
    main(["--losses", "3.1,3.2", "--target", "3.28"])
    assert "UNVERIFIED" in capsys.readouterr().out


def test_the_text_shows_every_figure_and_every_run(tmp_path, capsys):
    write_arm(tmp_path, MIMETIC_VALUE_OUTPUT)
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for figure in ("n 7", "mean 3.278257", "sd 0.001156", "t -3.9891", "p 0.0036 ", "bound 3.27963", "PASS", "8 GPUs"):
        assert figure in text
    for seed, loss in enumerate(MIMETIC_VALUE_OUTPUT):
        assert f"{loss:.6f}       0.200 s  run_{seed:03}" in text


@pytest.mark.parametrize(("arguments", "sentence"), [
    ([], "name run logs, or type losses"),
    (["--losses", "3.1,3.2"], "--losses needs --target"),
    (["logs", "--losses", "3.1", "--target", "3.28"], "one of the two"),
    (["--losses", "3.1,nan", "--target", "3.28"], "--losses: 'nan' is not a finite number; write it like 3.28"),
    (["--losses", "3.1,", "--target", "3.28"], "--losses: '' is not a finite number"),
    (["--losses", "3.1", "--target", "low"], "--target: 'low' is not a finite number"),
    (["--losses", "3.1", "--target", "3.28", "--at-step", "5"], "--at-step needs run logs"),
    (["{folder}/absent"], "{folder}/absent does not exist"),
    (["{folder}"], "no run logs (*.jsonl) in {folder}"),
    (["{folder}/mixed"], "name different targets: give one with --target"),
    (["{folder}/none"], "name no target: give one with --target"),
    (["{folder}/bad"], "bad.jsonl, line 1: every line must be one JSON object"),
])
def test_bad_input_exits_with_2_and_a_sentence(tmp_path, capsys, arguments, sentence):
    write_run(tmp_path / "mixed", "a", {100: 3.2}, seed=0, target=3.28)
    write_run(tmp_path / "mixed", "b", {100: 3.2}, seed=1, target=2.92)
    write_run(tmp_path / "none", "a", {100: 3.2}, seed=0, target=None)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "bad.jsonl").write_text("step:1 val_loss:3.2\n")
    try:
        code = main([argument.format(folder=tmp_path) for argument in arguments])
    except SystemExit as error:  # argparse's own way out
        code = error.code
    assert code == 2
    assert sentence.format(folder=tmp_path) in capsys.readouterr().err


def test_the_command_starts_from_any_folder_and_without_torch(tmp_path):
    write_arm(tmp_path / "logs", MIMETIC_VALUE_OUTPUT)
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not installed here')\n")
    command = [sys.executable, ROOT / "scripts" / "significance.py", "logs", "--json"]
    result = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, check=True)
    assert json.loads(result.stdout)["arms"][0]["n"] == 7
