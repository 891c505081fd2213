"""Plans made before the runs."""

import json

import pytest

from scripts.plan import main


def planned(capsys, *arguments: object) -> dict:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_without_arguments_the_published_tables_are_printed(capsys):
    assert main([]) == 0
    rows = [line.split()[:5] for line in capsys.readouterr().out.splitlines()]
    for margin, runs in (("0.0005", "71/91"), ("0.001", "20/25"), ("0.0025", "6/7")):
        assert ["sd", "0.0013", "margin", margin, runs] in rows


def test_one_case_is_planned_with_its_own_chances(capsys):
    case = ["--sd", 0.0013, "--margin", 0.00154, "--power", 0.9, "--runs", "10"]
    (row,) = planned(capsys, *case)["runs_needed"]
    assert row["power_of_runs"] == [pytest.approx(0.8, abs=0.005)]
    (row,) = planned(capsys, "--sd", 0.0013, "--margin", 0.001, "--power", 0.9)["runs_needed"]
    assert row["runs"] == [25]


def test_looks_are_planned_with_their_level_and_their_cost(capsys):
    plan = planned(capsys, "--looks", "10,20")
    assert plan["look_level"] == pytest.approx(0.0054, abs=0.0003)
    assert plan["unplanned_level"] == pytest.approx(0.0178, rel=0.05)


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--sd", "0"], "'0' must be numbers from 1e-09 to 1e+09 with commas between them"),
    (["--runs", "1.5"], "'1.5' must be whole numbers from 2 to 1e+09"),
    (["--looks", "10,5"], "looks are (10, 5): they must be rising numbers of runs"),
    (["--alpha", "0"], "alpha is 0.0: it must lie between 0.0001 and 0.5"),
    (["--power", "1"], "power is 1.0: it must lie between 0.01 and 1"),
    (["--sd", "1e9", "--margin", "1e-9"], "more than 1,000,000,000 runs are needed"),
    (["--los", "3.2"], "unrecognized arguments: --los"),
])  # fmt: skip
def test_bad_input_exits_with_2_and_a_sentence(capsys, arguments, sentence):
    try:
        code = main(arguments)
    except SystemExit as error:  # argparse's own way out
        code = error.code
    assert code == 2
    assert sentence in capsys.readouterr().err
