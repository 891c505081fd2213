"""Ablations: paired statistics, and runs that are never repeated or mixed in silence."""

import json
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

import train_gpt
from runtime.settings import parse
from scripts import ablate

REPOSITORY = Path(__file__).resolve().parent.parent

# Stands in for the trainer: the same flags and logs, at once. STUB is "flags|seed|what goes wrong".
TRAINER = '''
import json, os, sys, time
from pathlib import Path

words = sys.argv[1:]
if words[-1] == "--print-config":
    if "--stepz" in words:
        sys.exit("--stepz: no such flag")
    print(json.dumps({"flags": " ".join(words[:-1])}))
    sys.exit()
from runtime.log import config_hash, source_hash
cut = words.index("--seed")
flags, seed, folder = " ".join(words[:cut]), int(words[cut + 1]), Path(words[cut + 3])
run_id = f"2026_{time.time_ns()}"
env = {"gpu_count": 0, "cpu": "abacus"}
folder.mkdir(parents=True, exist_ok=True)
log = (folder / f"{run_id}.jsonl").open("w")


def write(event, **fields):
    log.write(json.dumps({"event": event, "t_ms": 1.0, **fields}) + "\\n")
    log.flush()


write("header", schema=2, run_id=run_id, track="tiny", target=2.5, seed=seed, trial=0, env=env,
      source_sha256=source_hash(Path(__file__).parent), config_sha256=config_hash({"flags": flags}))
where, at, wrong = os.environ.get("STUB", "||").rsplit("|", 2)
wrong = wrong if (where, at) == (flags, str(seed)) else ""
if wrong == "die":
    sys.exit("out of coffee")
if wrong == "diverge":
    write("end", status="nonfinite")
    sys.exit(3)
losses = {"": [2.5, 2.52, 2.54, 2.56], "--key-offset off": [2.6, 2.621, 2.642, 2.663],
          "--skips on": [2.49, 2.53, 2.53, 2.57]}
loss = losses.get(flags, [2.4] * 4)[seed]
write("val", step=10, total_steps=10, val_loss=loss, train_time_ms=1.0)
write("end", status="done", val_loss=loss)
'''


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with the stub as its train_gpt.py."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "train_gpt.py").write_text(TRAINER)
    monkeypatch.setattr(ablate, "ROOT", root)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return root


def run(out: Path, *more: str, arms: str = "no_key_offset", seeds: str = "0,1") -> int:
    return ablate.main(["--out", str(out), "--arms", arms, "--seeds", seeds, *more])


def started(out: Path) -> int:
    return len(list(out.glob("runs/*/*.jsonl")))


def rows(table: str) -> dict[str, list[str]]:
    """The cells of each arm."""
    found = {}
    for line in table.splitlines():
        if line.startswith(("| no_", "| skips")):
            arm, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
            found[arm] = cells
    return found


def test_the_table_is_that_of_the_paired_test(project, tmp_path, capsys):
    out = tmp_path / "out"
    assert ablate.main(["--out", str(out), "--arms", "no_key_offset", "skips"]) == 0
    table = capsys.readouterr().out
    assert started(out) == 12
    base = [2.5, 2.52, 2.54, 2.56]
    smear = ttest_rel([2.6, 2.621, 2.642, 2.663], base)
    skips = ttest_rel([2.49, 2.53, 2.53, 2.57], base)
    for arm, test, holm in (("no_key_offset", smear, 2), ("skips", skips, 1)):
        _, pairs, difference, interval, diverged, p = rows(table)[arm]
        low, high = test.confidence_interval(0.95)
        assert (pairs, diverged) == ("4", "0")
        assert float(difference) == pytest.approx((low + high) / 2, abs=6e-5)
        assert interval == f"{low:+.4f} to {high:+.4f}"
        assert float(p) == pytest.approx(holm * test.pvalue, rel=0.05)
    assert ablate.source_hash(project) in table


def test_the_same_command_runs_only_what_is_missing(project, tmp_path):
    out = tmp_path / "out"
    assert (run(out), run(out), started(out)) == (0, 0, 4)
    assert (run(out, seeds="0,1,2"), started(out)) == (0, 6)
    assert (run(out, "--", "--dim", "8"), started(out)) == (0, 10), "other flags are other runs"
    trainer = project / "train_gpt.py"
    trainer.write_text(trainer.read_text() + "# changed")
    assert (run(out), started(out)) == (0, 14), "so are runs of another source"


def test_a_run_that_died_is_named_and_repeated(project, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setenv("STUB", "--key-offset off|1|die")
    assert run(out) == 1
    assert "no_key_offset, seed 1: exit code 1" in capsys.readouterr().out
    monkeypatch.delenv("STUB")
    assert (run(out), started(out)) == (0, 5)


def test_a_run_that_diverged_is_a_result_and_no_pair(project, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STUB", "--key-offset off|1|diverge")
    out = tmp_path / "out"
    assert (run(out, seeds="0,1,2"), run(out, seeds="0,1,2"), started(out)) == (0, 0, 6)
    _, pairs, *_, diverged, _ = rows(capsys.readouterr().out)["no_key_offset"]
    assert (pairs, diverged) == ("2", "1")


def test_a_flag_that_the_trainer_does_not_know_is_refused_before_anything_runs(
    project, tmp_path, capsys
):
    out = tmp_path / "out"
    assert run(out, "--", "--stepz", "5") == 2
    assert "--stepz" in capsys.readouterr().err
    assert not out.exists()
    assert ablate.main(["--report", "--out", str(out)]) == 2
    assert "no finished run of the baseline" in capsys.readouterr().err


def test_without_flags_it_says_what_to_type_and_a_report_writes_nothing(project, tmp_path, capsys):
    assert ablate.main([]) == 2
    assert f"without flags this would train {len(ablate.ARMS)} arms" in capsys.readouterr().err
    assert run(tmp_path / "out") == 0
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert ablate.main(["--report", "--out", str(tmp_path / "out")]) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_one_seed_has_no_interval_and_prints_no_nan(project, tmp_path, capsys):
    assert run(tmp_path / "out", seeds="0") == 0
    _, pairs, difference, interval, *_ = rows(capsys.readouterr().out)["no_key_offset"]
    assert (pairs, interval) == ("1", "")
    assert "nan" not in difference


PIECE = {"piece": "smear", "claim": "record 0: 5 steps", "elsewhere": "", "size": "", "lines": 7}


def write_pieces(path: Path, pieces: object) -> list[str]:
    path.write_text(json.dumps(pieces))
    return ["--pieces", str(path)]


def test_a_piece_is_judged_by_what_having_it_does(project, tmp_path, capsys):
    out, figure = tmp_path / "out", tmp_path / "f.svg"
    # The stub has 2.4 at each seed.
    arms = ["no_key_offset", "no_bigram", "own_value", "skips", "backout"]
    small = PIECE | {"size": "too few layers"}
    given = dict.fromkeys(["no_key_offset", "no_bigram", "own_value", "skips", "mudd"], PIECE)
    given["signs"] = small
    pieces = write_pieces(tmp_path / "pieces.json", {
        arm: piece | {"piece": f"piece {arm}"} for arm, piece in given.items()
    })  # fmt: skip
    more = [*pieces, "--figure", str(figure)]
    assert ablate.main(["--out", str(out), "--arms", *arms, *more]) == 0
    table = capsys.readouterr().out
    found = {}
    for line in table.splitlines():
        if line.startswith("| piece "):
            name, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
            found[name.removeprefix("piece ")] = cells
    base = [2.5, 2.52, 2.54, 2.56]
    test = ttest_rel(base, [2.6, 2.621, 2.642, 2.663])  # with the piece, and without
    low, high = test.confidence_interval(0.95)
    _, _, pairs, effect, interval, _, p, _, label = found["no_key_offset"]
    assert (pairs, label) == ("4", "helps here")
    assert float(effect) == pytest.approx((low + high) / 2, abs=6e-5)
    assert interval == f"{low:+.4f} to {high:+.4f}"
    assert p == rows(table)["no_key_offset"][-1]
    assert found["no_key_offset"][:2] == ["7", "record 0: 5 steps"]
    assert found["no_bigram"][-1] == "hurts here"
    assert found["own_value"][-1] == "helps here"
    assert found["skips"][-1] == "not distinguishable here"
    assert found["mudd"][2:] == [*[""] * 6, "not tried"]
    assert found["signs"][-1] == "cannot show at this size: too few layers"
    picture = figure.read_text()
    assert "piece skips" in picture
    assert "piece mudd" not in picture


def test_the_arm_muon_leaves_a_piece_out_too(project, tmp_path):
    out = tmp_path / "out"
    assert ablate.main(["--out", str(out), "--arms", "muon", "muon_plain"]) == 0
    arms = {arm: ablate.read_arm(out, arm) for arm in ("baseline", "muon", "muon_plain")}
    changed, had = ablate.measure(arms), ablate.measure(arms, having=True)
    assert had["muon"].difference.mean == -changed["muon"].difference.mean != 0
    assert had["muon_plain"] == changed["muon_plain"]


def test_a_piece_with_other_fields_is_refused_before_anything_runs(project, tmp_path, capsys):
    pieces = write_pieces(tmp_path / "pieces.json", {"skips": PIECE | {"n": 7}})
    assert run(tmp_path / "out", *pieces) == 2
    said = capsys.readouterr().err
    assert "pieces.json: give skips the fields piece, claim, elsewhere, size" in said
    assert not (tmp_path / "out").exists()


def test_a_figure_without_pieces_is_refused(project, tmp_path, capsys):
    assert run(tmp_path / "out", "--figure", "f.svg") == 2
    assert "--figure is f.svg: it needs --pieces" in capsys.readouterr().err


def test_the_committed_pieces_have_arms_and_fit_a_table():
    pieces = ablate.read_pieces(REPOSITORY / "records/ablations/pieces.json")
    assert pieces.keys() - ablate.ARMS.keys() == {"mudd"}
    assert len({piece.piece for piece in pieces.values()}) == len(pieces), "names label a figure"
    for piece in pieces.values():
        for text in (piece.claim, piece.elsewhere, piece.size):
            assert len(text.split()) <= 15, f"{piece.piece}: {text}"


def test_every_arm_changes_the_configuration_of_the_real_trainer_in_its_own_way():
    configs = set()
    for flags in ablate.FLAGS.values():
        words = ["--track", "tiny", *flags.split()]
        configs.add(parse(train_gpt.Config, words, train_gpt.preset, ""))
    assert len(configs) == len(ablate.FLAGS)
