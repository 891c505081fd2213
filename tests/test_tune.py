"""Tuning: the best settings climb, nothing is run twice, and the logs alone make the table."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from claims.runs import Run, Validation
from runtime.settings import parse
from scripts import command, tune
from train_gpt import Config, preset

PLAN = {
    "fixed": {"track": "tiny"},
    "start": {"matrix_lr": 0.02, "adam_betas": [0.9, 0.99]},
    "space": {"matrix_lr": [0.01, 0.02, 0.03], "adam_betas": [[0.9, 0.99], [0.8, 0.95]]},
    "count": 6,
    "rungs": [
        {"steps": 10, "seeds": [0], "keep": 3},
        {"steps": 20, "seeds": [0, 1], "keep": 1},
    ],
}


def loss(config):
    """Lowest at 0.03 with betas (0.8, 0.95), whatever the seed."""
    return 3 - config["matrix_lr"] + config["adam_betas"][0] / 10 + config["seed"]


def finished(config, status="done"):
    value = loss(config)
    diverged = status == "nonfinite"
    return Run(
        path=None, run_id="", header={"config": config}, total_steps=config["steps"],
        validations=[Validation(config["steps"], value, 1.0)], end={"status": status},
        unfinished="diverged" if diverged else None, source="ab",
    )  # fmt: skip


def climb_to_the_top(diverging=None):
    """What each rung ran, and the results at the end."""
    results, rungs = [], []
    while lacking := tune.climb(PLAN, results)[1]:
        rungs.append(lacking)
        for run in lacking:
            status = "nonfinite" if run["matrix_lr"] == diverging else "done"
            results.append(finished(run, status))
    return rungs, results


def test_the_first_candidate_is_the_setting_of_today_and_all_are_distinct():
    candidates = tune.draw_candidates(PLAN)
    assert candidates[0] == PLAN["start"]
    assert len({json.dumps(candidate) for candidate in candidates}) == PLAN["count"]
    assert candidates == tune.draw_candidates(PLAN)


def test_the_best_of_a_rung_are_trained_for_longer_on_the_same_seeds():
    first, second = climb_to_the_top()[0]
    assert len(first) == 6
    best = sorted(first, key=loss)[:3]
    expected = [dict(run, steps=20, seed=seed) for run in best for seed in (0, 1)]
    assert second == expected


def test_what_diverged_is_last():
    rungs, results = climb_to_the_top(diverging=0.03)
    assert all(run["matrix_lr"] != 0.03 for run in rungs[1])
    best = next(iter(tune.climb(PLAN, results)[0]))
    assert tune.draw_candidates(PLAN)[best] == {"matrix_lr": 0.02, "adam_betas": [0.8, 0.95]}


def test_the_table_has_every_candidate_with_who_came_furthest_first():
    results = climb_to_the_top()[1]
    rows = [line for line in tune.report(PLAN, results).splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + PLAN["count"]
    assert "| 0.03 | [0.8, 0.95] | 3.0500 | 3.5500 |" in rows[1]
    assert [row.endswith("|  |") for row in rows[1:]] == [False] * 3 + [True] * 3


def rows_of(table):
    """The cells of each candidate, by number."""
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows[1:]}


def test_a_run_that_was_not_made_is_an_empty_cell_and_one_that_diverged_is_inf():
    _, results = climb_to_the_top(diverging=0.01)
    made = [run for run in results if run.total_steps == 10]
    made += [run for run in results if run.total_steps == 20 and run.header["config"]["seed"] == 0]
    last = [row[2:] for row in rows_of(tune.report(PLAN, made)).values()]
    expected = ["3.0500 (1 of 2)", "3.0600 (1 of 2)", "3.0600 (1 of 2)", "", "", ""]
    assert [row[1] for row in last] == expected
    assert [row[0] for row in last].count("inf") == 2
    first = [row[2:] for row in rows_of(tune.report(PLAN, results[:2])).values()]
    assert [row[0] != "" for row in first] == [True] * 2 + [False] * 4
    assert all(row[1] == "" for row in first)


def test_a_value_stands_under_its_name_whatever_the_order_in_the_plan():
    swapped = PLAN | {"start": dict(reversed(PLAN["start"].items()))}
    assert tune.report(swapped, []) == tune.report(PLAN, [])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rungs": None}, "rungs"),
        ({"start": {"matrix_lr": 1}}, "start and space"),
        ({"count": 7}, "count 7 is more"),
        ({"space": PLAN["space"] | {"matrix_lr": [0.02, 0.03, 0.02]}}, "matrix_lr [0.02, 0.03,"),
        ({"rungs": [{"steps": 10, "keep": 3}]}, "{'steps': 10, 'keep': 3} lacks seeds"),
        ({"rungs": [*PLAN["rungs"], {}]}, "{} lacks keep, seeds, steps"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_by_name(tmp_path, change, named, capsys):
    path = tmp_path / "plan.json"
    changed = {name: value for name, value in (PLAN | change).items() if value is not None}
    path.write_text(json.dumps(changed))
    assert tune.main([str(path), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert str(path) in said


def parsed(flags):
    """The configuration that the trainer reads from flags, as its log holds it."""
    return json.loads(json.dumps(asdict(parse(Config, flags, preset, ""))))


@pytest.mark.parametrize("micro_batch", [None, 1024])
def test_the_trainer_reads_from_the_flags_what_the_plan_says(micro_batch):
    settings = {
        "track": "tiny", "recipe": "muon", "key_offset": True, "document_mask": False, "steps": 7,
        "micro_batch": micro_batch, "adam_betas": [0.9, 0.99], "adam_eps": 1e-12,
        "loss_kernel": "chunked",
    }  # fmt: skip
    config = parsed(tune.flags_of(settings))
    assert {name: config[name] for name in settings} == settings


@pytest.fixture
def trainer(monkeypatch):
    """Stands in for the trainer: reads its flags, writes its log at once, and keeps the configs.

    `codes` has the exit code of the run with that number, counted from 0, if it is not 0.
    """

    class Trainer:
        configs, codes = [], {}

        def run(self, words):
            assert words[1].endswith("train_gpt.py")
            config, number = parsed(words[2:]), len(self.configs)
            self.configs.append(config)
            code = self.codes.get(number, 0)
            if code in (0, 3):
                self.log(Path(config["log_dir"]), config, f"2026_{number:03}", diverged=code == 3)
            return code

        def log(self, folder, config, run_id, diverged):
            header = {
                "event": "header", "schema": 2, "run_id": run_id, "track": "tiny", "target": 3.0,
                "seed": config["seed"], "config_sha256": "", "source_sha256": "ab",
                "env": {"gpu_count": 0}, "config": config,
            }  # fmt: skip
            last = {
                "event": "val", "step": config["steps"], "total_steps": config["steps"],
                "val_loss": loss(config), "train_time_ms": 1.0,
            }  # fmt: skip
            end = {"event": "end", "status": "nonfinite" if diverged else "done"}
            lines = [header, end] if diverged else [header, last, end]
            folder.mkdir(parents=True, exist_ok=True)
            text = "\n".join(map(json.dumps, lines))
            (folder / f"{run_id}.jsonl").write_text(text + "\n")

    stub = Trainer()
    monkeypatch.setattr(command, "run_child", stub.run)
    return stub


def tuned(tmp_path, plan=PLAN, *more):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    return tune.main([str(path), "--out", str(tmp_path / "out"), *more])


def test_every_run_is_made_once_and_then_the_table_is_complete(trainer, tmp_path, capsys):
    assert (tuned(tmp_path), len(trainer.configs)) == (0, 12)
    table = capsys.readouterr().out
    assert "- complete" in table
    assert [config["steps"] for config in trainer.configs] == [10] * 6 + [20] * 6
    assert all(config["val_every"] == 0 for config in trainer.configs)
    assert next(iter(rows_of(table).values())) == ["0.03", "[0.8, 0.95]", "3.0500", "3.5500"]
    assert (tuned(tmp_path), len(trainer.configs)) == (0, 12), "the same command makes no run again"


def test_a_run_that_failed_stops_the_tuning_and_is_made_by_the_next_command(
    trainer, tmp_path, capsys
):
    trainer.codes.update({1: 3, 2: 1})
    assert (tuned(tmp_path), len(trainer.configs)) == (1, 3)
    cells = [row[2] for row in rows_of(capsys.readouterr().out).values()]
    assert (cells[1:2], cells[2:]) == (["inf"], [""] * 4)
    assert (tuned(tmp_path), len(trainer.configs)) == (0, 13), "what diverged is a result"
    assert trainer.configs[2] == trainer.configs[3]
    made = len(trainer.configs)
    assert (tuned(tmp_path, PLAN, "--report"), len(trainer.configs)) == (0, made)


@pytest.mark.parametrize("fixed", [{"key_offset": "on"}, {"micro_batch": "1024"}, {"val_every": 5}])
def test_a_value_that_the_log_never_has_is_named_after_one_run(trainer, tmp_path, fixed, capsys):
    assert tuned(tmp_path, PLAN | {"fixed": PLAN["fixed"] | fixed}) == 2
    assert len(trainer.configs) == 1
    ((name, value),) = fixed.items()
    assert f"error: {name} {value!r}: not so in the log" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_committed_picture_and_table_are_those_of_the_committed_logs(name, tmp_path, capsys):
    tuning, picture = Path(tune.__file__).parents[1] / "records" / "tuning", tmp_path / "a.svg"
    words = ["--out", str(tuning / "runs"), "--report", "--figure", str(picture)]
    assert tune.main([str(tuning / f"{name}.json"), *words]) == 0
    assert capsys.readouterr().out in (tuning / f"{name}.md").read_text()
    assert picture.read_bytes() == (tuning / f"{name}.svg").read_bytes()


def test_a_picture_needs_all_runs_of_the_last_rung(trainer, tmp_path, capsys):
    picture = tmp_path / "a.svg"
    assert tuned(tmp_path, PLAN, "--report", "--figure", str(picture)) == 2
    assert "error: the picture of the last rung lacks 6 runs" in capsys.readouterr().err
    assert not picture.exists()
    assert tuned(tmp_path, PLAN, "--figure", str(picture)) == 0
    labels = picture.read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "loss minus that of setting" in labels
    assert labels.count("adam_betas 0.9,0.99<") == 1, "the others differ in the rate alone"
