"""The judge: pairs in turn, an early stop, no run twice, and every judgement is counted."""

import json
import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from filelock import FileLock
from stub_command import make_project, write_source

from claims.judge import JUDGEMENTS, find_judgement, fresh_seeds, read_judgements
from runtime.registry import read_registry, register
from scripts import judge, record, side_by_side


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    root = make_project(tmp_path / "project", monkeypatch)
    for module in (judge, record):
        monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(record, "RECORDS", root / "records")
    return root


def run(*words: str) -> int:
    return judge.main([*words])


def judge_as_json(capsys, *words: str) -> tuple[int, dict]:
    code = run("--json", *words)
    return code, json.loads(capsys.readouterr().out)


def calls(project: Path, number: int = 1) -> list[list[str]]:
    """Arm, seed and trial of each run of a judgement, in the order in which they were made."""
    texts = [path.read_text() for path in project.glob(f"logs/judge/{number:03}/*/calls")]
    return [line.split()[1:] for line in sorted("".join(texts).splitlines())]


@pytest.mark.parametrize(("gain", "code", "outcome"), [
    (0.2, 0, "better"), (-0.2, 1, "worse"), (0.001, 3, "no difference"),
])  # fmt: skip
def test_a_clear_answer_ends_the_race_early(project, capsys, gain, code, outcome):
    found, facts = judge_as_json(capsys, "--b", f"--gain {gain}", "--margin", "0.05")
    assert (found, facts["outcome"]) == (code, outcome)
    assert facts["low"] <= -gain <= facts["high"]
    assert len(calls(project)) == 2 * facts["pairs"] < 20


def test_it_says_first_what_is_judged_and_how_long_it_takes_by_a_run_on_this_machine(
    project, capsys, monkeypatch
):
    words = ["--b", "--gain 0.2", "--margin", "0.05"]
    assert run(*words) == 0
    said = capsys.readouterr()
    before, _, after = said.err.partition("A, seeds 0 to 3")
    assert "is B better than A? loss, margin 0.05, 4 to 20 pairs from seed 0" in before
    assert "gain: 0.0 in A, 0.2 in B" in before
    assert "2 runs at once, minutes not known here: the first run will tell" in before
    assert re.search(r"  B, seed 3: \d\.\d{4} nats per token\n", after)
    assert re.search(r"as measured now: 1\.5 minutes a run, 6\.0 to 30\.\d in all", after)
    on_new = float(re.search(r"new tokens.* (\S+) \(", said.out)[1])
    whole = float(re.search(r"B - A (\S+) \(", said.out)[1])
    assert on_new == pytest.approx(whole / 2, rel=1e-3), "as the stub has it"
    for cpu, minutes in (("Abacus", "1.5 minutes a run, 6.1 to 30.3 in all (by logs/judge/001/"),
                         ("Z80", "minutes not known here")):  # fmt: skip
        monkeypatch.setattr(side_by_side, "cpu_name", lambda cpu=cpu: cpu)
        run(*words, "--", "--steps", "20")
        assert minutes in capsys.readouterr().err


def test_a_flag_that_does_not_act_is_named(project, capsys):
    assert run("--b", "--idle 1") == 3
    assert "every pair is equal to the last bit: idle does not act here" in capsys.readouterr().out


@pytest.mark.parametrize(("source", "words", "why"), [
    ({"only_copies": True}, [], "the gain may be copying only: on new tokens B is not shown to be"),
    ({}, ["--quick"], "no claim can follow: --val-tokens 1024: that of the track is 16384"),
], ids=["on copied tokens only", "off the track"])  # fmt: skip
def test_no_claim_is_offered_for_a_gain(source, words, why, project, capsys):
    write_source(project, **source)
    assert run("--b", "--gain 0.2", "--margin", "0.05", *words) == 0
    said = capsys.readouterr()
    assert why in said.out
    assert "prove it" not in said.out
    before_the_first_run = said.err.partition("A, seeds 0 to 3")[0]
    assert (why in before_the_first_run) == bool(words)


def test_losses_come_side_by_side_and_times_one_by_one(project, capsys):
    words = ["--b", "--gain 0.012", "--margin", "0.0001", "--pairs", "7", "--analyse-every", "2"]
    code, facts = judge_as_json(capsys, *words, "--seed", "40")
    assert (code, facts["outcome"]) == (4, "undecided")
    first = [[arm, str(40 + n), str(n)] for arm in "AB" for n in range(4)]
    second = [[arm, str(44 + n), str(n)] for arm in "BA" for n in range(2)]
    third = [[arm, "46", "0"] for arm in "AB"]
    assert calls(project) == [*first, *second, *third], "a process trains what one analysis lacks"
    code, facts = judge_as_json(capsys, "--metric", "time", "--b", "--gain 0.4", "--margin", "0.1")
    assert (code, facts["pairs"]) == (0, 4)
    assert [arm for arm, _, _ in calls(project, 2)] == list("ABBAABBA")


def test_where_cores_allow_each_run_has_a_process_and_no_core_is_idle(project, capsys, monkeypatch):
    threads, started = [], side_by_side.child_process

    def noting(words, *, env, **options):
        threads.append(env["OMP_NUM_THREADS"])
        return started(words, **options)

    monkeypatch.setattr(side_by_side, "child_process", noting)
    monkeypatch.setattr(side_by_side, "cores", lambda: 17)
    monkeypatch.setattr(side_by_side, "free_memory", lambda: 2**40)
    words = ["--b", "--gain 0.002", "--margin", "0.0001", "--pairs", "9", "--seed", "140"]
    code, facts = judge_as_json(capsys, *words)
    assert (code, facts["pairs"]) == (4, 9)
    assert threads == ["2"] * 18
    assert {trial for _, _, trial in calls(project)} == {"0"}
    seeds = [seed for _, seed, _ in calls(project)]
    made = [{*seeds[:8]}, {*seeds[8:16]}, {*seeds[16:]}]
    expected = [range(140, 144), range(144, 148), range(148, 149)]
    assert made == [{str(seed) for seed in each} for each in expected]


def test_the_same_command_resumes_and_counts_once_and_fresh_seeds_are_fresh(project, capsys):
    words = ["--b", "--gain 0.2", "--pairs", "6"]
    assert judge_as_json(capsys, *words)[1]["seed"] == 0
    made = calls(project)
    (project / "logs/judge/001/B").rename(project / "kept")  # as if killed before B's runs
    assert judge_as_json(capsys, *words)[0] == 0
    assert [call[0] for call in calls(project)].count("A") == 4, "A's runs are not made again"
    assert [call for call in calls(project) if call[0] == "B"] == [c for c in made if c[0] == "B"]
    assert judge_as_json(capsys, *words, "--seed", "9")[1]["run_id"] == "002"
    code, third = judge_as_json(capsys, "--b", "--gain 0.3", "--pairs", "6")
    assert (code, third["run_id"], third["seed"]) == (0, "003", 15)
    assert run(*words) == 0
    output = capsys.readouterr().out
    assert "judgement 2: B is better than A" in output, "the last of these arms"
    assert "3 judgements so far" in output
    assert "at most 3 x 0.01 = 0.03" in output
    events = [line["event"] for line in read_registry(project / "logs/judge/judgements.jsonl")]
    assert events == ["start", "end"] * 3


def test_two_sources_are_compared_and_their_difference_is_kept(project, capsys):
    shutil.copytree(project, project.parent / "before")
    write_source(project, loss=3.2)
    assert run("--a-source", "../before", "--b", "--gain 0.001") == 0
    assert "the sources differ in 2 lines: logs/judge/001/source.diff" in capsys.readouterr().err
    diff = (project / "logs/judge/001/source.diff").read_text()
    assert '\n+ "loss": 3.2,' in diff


def test_a_run_that_diverges_is_a_guess_and_one_that_fails_ends_the_judgement(project, capsys):
    code, facts = judge_as_json(capsys, "--b", "--gain 0.2 --diverge 2", "--seed", "0")
    assert (code, facts["outcome"], facts["pairs"]) == (4, "undecided", 20)
    guess = math.log(2048) - 3.4
    assert facts["mean"] == pytest.approx((guess - 19 * 0.2) / 20, abs=0.02)
    run("--b", "--gain 0.2 --diverge 2", "--seed", "0")
    assert "B diverged on seed 2: it counts as a guess" in capsys.readouterr().out
    assert run("--b", "--gain 0.2 --die") == 2
    said = capsys.readouterr().err
    assert re.search(r"exit code 1 of B: out of coffee .*logs/judge/002/B_\d+.progress", said)
    write_source(project, edited=True)
    assert run("--b", "--gain 0.2") == 2
    assert "was changed while it was judged" in capsys.readouterr().err


def test_a_run_that_diverges_last_does_not_end_the_judgement_before_it(project, capsys):
    words = ["--b", "--gain 0.2 --diverge 1", "--pairs", "4", "--seed", "0"]
    _, facts = judge_as_json(capsys, *words)
    assert (facts["pairs"], facts["final"]) == (4, True)
    assert read_judgements(project / "logs/judge")[-1]["done"] == 4


def test_a_judgement_that_could_not_begin_is_in_nobodys_way_but_unknown_runs_are(project, capsys):
    diff = project / "logs/judge/001/source.diff"
    diff.mkdir(parents=True)
    assert run("--b", "--gain 0.2") == 2
    diff.rmdir()
    assert run("--b", "--gain 0.2") == 0
    (project / "logs/judge" / JUDGEMENTS).unlink()
    assert run("--b", "--gain 0.2") == 2
    assert "001 has runs that judgements.jsonl does not know" in capsys.readouterr().err


def test_judgements_that_begin_at_once_have_numbers_and_seeds_of_their_own(project):
    arms, folder = [judge.make_arm("A", project, [])] * 2, project / "logs/judge"
    begin = partial(find_judgement, folder, arms=arms, seed=None, records=project / "records")
    with ThreadPoolExecutor(8) as threads:
        entries = list(threads.map(begin, [{"pairs": 4 + number} for number in range(8)]))
    assert sorted(entry["run_id"] for entry in entries) == [f"{n:03}" for n in range(1, 9)]
    taken = [range(entry["seed"], entry["seed"] + entry["pairs"]) for entry in entries]
    assert len({*chain(*taken)}) == sum(map(len, taken))


@pytest.mark.parametrize(("words", "sentence"), [
    (["--seed", "-5"], "--seed -5: it must be at least 0"),
    (["--b", "--stepz 5"], "train_gpt.py refuses --stepz 5"),
    (["--b", "--steps 20"], "steps is 10 in A and 20 in B"),
    (["--b=--help"], "train_gpt.py refuses --help"),
    ([], "A and B have the same source and settings"),
    (["--a", "--gain 0.1", "--b", "--gain 0.1"], "Give --b FLAGS, or --a-source"),
    (["--a-source", "../nope"], "--a-source ../nope: it holds no train_gpt.py. Give the folder"),
    (["--b", "--steps '3"], "argument --b: invalid split value: \"--steps '3\""),
    *(([f"--pairs={pairs}"], f"--pairs {pairs}: there must be 4 to 100") for pairs in (3, 101)),
    (["--analyse-every", "0"], "--analyse-every 0: it must be 1 or more"),
    (["--track", "small", "--b", "--gain 1"], "Flags of the trainer stand after --"),
    *(([f"--margin={margin}"], f"margin is {margin}") for margin in (0.0, math.nan)),
])  # fmt: skip
def test_bad_input_exits_with_2_before_anything_runs(project, capsys, words, sentence):
    try:
        code = run(*words)
    except SystemExit as left:  # argparse's own way out
        code = left.code
    assert code == 2
    assert sentence in capsys.readouterr().err
    assert not (project / "logs").exists()


def test_a_claim_of_a_judgement_takes_its_flags_its_source_and_fresh_seeds(project, capsys):
    assert run("--b", "--gain 0.2", "--pairs", "8", "--seed", "70") == 0
    assert fresh_seeds(None, 1, project / "logs") == [78]
    odd = project / "logs/odd"
    odd.mkdir()
    register(odd / "judgements.jsonl", "start", run_id="001", seed=None)
    register(odd / "judgements.jsonl", "start", run_id="002", seed=70, pairs="x")
    assert fresh_seeds(None, 1, odd) == [71]
    words = ["claim", "Gain", "--about", "more", "--from-judgement"]
    assert record.main([*words, "2"]) == 2
    assert "has 1 judgements" in capsys.readouterr().err
    write_source(project, loss=3.3)
    assert record.main(words) == 2
    assert "Go back to it, or judge again" in capsys.readouterr().err
    write_source(project)
    assert record.main([*words, "--", "--steps", "9"]) == 1  # fewer steps; nowhere to commit
    assert "not a git repository" in capsys.readouterr().out
    claim = json.loads(next(project.glob("records/tiny/*_Gain/claim.json")).read_text())
    flags = ["--track", "tiny", "--recipe", "record89", "--gain", "0.2", "--steps", "9"]
    assert (claim["flags"], claim["config"]["steps"]) == (flags, 9)
    assert claim["seeds"] == list(range(78, 88))
    assert fresh_seeds(None, 1, project / "records") == [88], "claimed is tried"
    words = ["claim", "Again", "--about", "more", "--seed", "85", "--", "--gain", "0.2"]
    assert record.main(words) == 2
    assert "seed 85 was tried. Omit it, or take 88." in capsys.readouterr().err


def test_a_judgement_is_made_by_one_process_at_a_time(project, capsys):
    folder = project / "logs/judge/001"
    folder.mkdir(parents=True)
    with FileLock(folder / "race.lock"):
        assert run("--b", "--gain 0.2") == 2
    assert "logs/judge/001/race.lock" in capsys.readouterr().err
    assert calls(project) == []
    assert run("--b", "--gain 0.2") == 0
