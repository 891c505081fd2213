"""Plans made before the runs."""

import json

import pytest

from scripts.plan import main


def planned(capsys, *arguments: object) -> dict:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_runs_needed_are_the_published_ones(capsys):
    assert planned(capsys)["runs_needed"] == {"0.8": 20, "0.9": 25}
    case = planned(capsys, "--sd", 0.0020, "--margin", 0.0025)
    assert case["runs_needed"] == {"0.8": 10, "0.9": 12}
    assert main([]) == 0
    assert "20 runs for a power of 0.8" in capsys.readouterr().out


def test_looks_are_planned_with_their_level(capsys):
    plan = planned(capsys, "--looks", "10,20")
    assert plan["look_level"] == pytest.approx(0.0054, abs=0.0003)


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--sd", "0"], "sd is 0.0: it must lie between 0 and inf"),
    (["--looks", "10,5"], "looks are (10, 5): they must be rising numbers of runs"),
    (["--sd", "1", "--margin", "1e-9"], "more than 10,000 runs are needed"),
])  # fmt: skip
def test_bad_input_exits_with_2_and_a_sentence(capsys, arguments, sentence):
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err
