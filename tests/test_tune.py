"""Tuning: the best settings climb, nothing is run twice, and the logs alone make the table."""

import json

import pytest

from claims.runs import Run, Validation
from scripts import tune

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
        validations=[Validation(config["steps"], value, 1.0)], status=status,
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
    best = next(iter(tune.climb(PLAN, results)[0][-1]))
    assert tune.draw_candidates(PLAN)[best] == {"matrix_lr": 0.02, "adam_betas": [0.8, 0.95]}


def test_the_table_has_every_candidate_with_who_came_furthest_first():
    results = climb_to_the_top()[1]
    rows = [line for line in tune.report(PLAN, results).splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + PLAN["count"]
    assert "| 0.03 | [0.8, 0.95] | 3.0500 | 3.5500 |" in rows[1]
    assert [row.endswith("|  |") for row in rows[1:]] == [False] * 3 + [True] * 3
    fewer = tune.report(PLAN, results[:3])
    assert len({line.count("|") for line in fewer.splitlines() if line.startswith("|")}) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rungs": None}, "rungs"),
        ({"start": {"matrix_lr": 1}}, "start and space"),
        ({"count": 7}, "count is 7"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_by_name(tmp_path, change, named, capsys):
    path = tmp_path / "plan.json"
    changed = {name: value for name, value in (PLAN | change).items() if value is not None}
    path.write_text(json.dumps(changed))
    assert tune.main([str(path), "--out", str(tmp_path)]) == 2
    assert named in capsys.readouterr().err


def test_flags_are_those_of_the_trainer():
    assert tune.flags_of({"adam_betas": [0.9, 0.99], "steps": 7}) == [
        "--adam-betas", "0.9,0.99", "--steps", "7",
    ]  # fmt: skip
