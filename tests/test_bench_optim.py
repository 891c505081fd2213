"""The optimizer benchmarks: figures that follow from each other, FLOPs as counted by torch, peers loaded or refused."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from optim.orthogonalize import orthogonalize
from runtime import environment
from scripts import bench_optim, optim_quality

ROUNDS = 3
PEERS = """
import torch
from beside import RATE

class Wrecker(torch.optim.SGD):
    def __init__(self, params, lr, weight_decay, scale=1.0):
        super().__init__(params, lr=lr * scale * RATE)

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.fill_(torch.nan)
                param.grad = None

class Lazy(torch.optim.SGD):
    def step(self, closure=None):
        raise NotImplementedError("some day")
"""


@pytest.fixture(scope="module")
def peers(tmp_path_factory) -> Path:
    """A file with optimizers of others, which imports what lies beside it."""
    folder = tmp_path_factory.mktemp("peers")
    (folder / "beside.py").write_text("RATE = 0.5\n")
    (folder / "peers.py").write_text(PEERS)
    (folder / "broken.py").write_text("import nothing_of_that_name\n")
    return folder / "peers.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory, peers) -> tuple[dict, str]:
    """What the script writes and prints for the set toy, with a peer that destroys its gradients."""
    path, out = tmp_path_factory.mktemp("bench") / "steps.json", io.StringIO()
    words = ["--sets", "toy", "--rounds", str(ROUNDS), "--json", str(path), "--device", "cpu"]
    with contextlib.redirect_stdout(out):
        assert bench_optim.main([*words, "--peer", f'wrecker={peers}:Wrecker:{{"scale": 2.0}}']) == 0
    return json.loads(path.read_text()), out.getvalue()


@pytest.fixture
def toy() -> bench_optim.Problem:
    return bench_optim.Problem(bench_optim.SETS["toy"], torch.device("cpu"))


def same_spread(figure: dict, values) -> bool:
    expected = {"median": np.median(values), "low": np.min(values), "high": np.max(values)}
    return figure == pytest.approx(expected)


# ---- Steps


def test_every_figure_follows_from_the_times_of_the_rounds(run):
    found = run[0]["sets"]["toy"]
    limit = found["limit"]["rounds_ms"]
    reference = found["rows"]["torch.optim.Muon"]["rounds_ms"]
    assert same_spread(found["limit"]["ms"], limit)
    for row in found["rows"].values():
        times = np.array(row["rounds_ms"])
        assert len(times) == ROUNDS
        assert times.min() > 0
        assert same_spread(row["ms"], times)
        assert same_spread(row["ratio"], times / reference)
        assert same_spread(row["over_limit"], times / limit)
    assert found["rows"]["torch.optim.Muon"]["ratio"] == {"median": 1, "low": 1, "high": 1}


def test_the_rows_are_ours_with_and_without_guards_torchs_and_peers(run):
    ours = [
        f"{name}{guards}"
        for name in ("Muon", "NorMuon", "Adam")
        for guards in ("", ", non-finite guard", ", both guards")
        if name != "Adam" or guards != ", both guards"
    ]
    others = ["torch.optim.Muon", "torch.optim.AdamW, fused", "wrecker"]
    others += [f"NorMuon, {backend} backend" for backend in bench_optim.backends_on(torch.device("cpu"))]
    assert set(run[0]["sets"]["toy"]["rows"]) == {*ours, *others}


def test_a_person_gets_every_row_and_every_rate(run):
    result, text = run
    found = result["sets"]["toy"]
    for name, row in found["rows"].items():
        line = next(line for line in text.splitlines() if line.startswith(f"{name} "))
        assert f"{row['ms']['median']:,.2f}" in line
        assert f"{row['ratio']['high']:,.3f}" in line
        assert f"{row['over_limit']['low']:,.2f}" in line
    assert [f"{product['gflops']:,.1f} GFLOP/s" in text for product in found["products"]] == [True] * 6
    assert ("emulated" in text) == (not result["native_bf16"])


@pytest.mark.parametrize(("name", "squares", "wide", "dim"), [("gpt2s", 48, 24, 768), ("tiny", 24, 12, 256),
                                                             ("short", 10 * 4, 22, 768)])  # fmt: skip
def test_the_limit_of_the_real_sets_has_the_flops_of_a_count_by_hand(name, squares, wide, dim):
    shapes = bench_optim.SETS[name]
    assert sum(rows * cols for rows, cols in shapes) == (squares + 4 * wide) * dim**2
    # Square matrices and such of 1:4, each 2 (2 n^2 m + n^3) an iteration.
    by_hand = 5 * (squares * 2 * 3 + wide * 2 * 9) * dim**3 / 1e9
    assert sum(p.gflop() for p in bench_optim.products(shapes)) == pytest.approx(by_hand)


def test_each_backend_that_runs_here_makes_all_matrices_orthogonal_and_its_gain_is_over_plain(run, toy):
    found = {(o["n"], o["m"], o["backend"]): o for o in run[0]["sets"]["toy"]["orthogonalization"]}
    assert set(found) == {(32, m, backend) for m in (32, 128) for backend in ("plain", "gram")}
    tasks = bench_optim.orthogonalizations(toy.shapes, torch.device("cpu"))
    for (n, m, backend), row in found.items():
        plain = found[n, m, "plain"]["ms"]
        assert plain["low"] / row["ms"]["high"] <= row["gain"]["median"] <= plain["high"] / row["ms"]["low"]
        assert row["gain"]["median"] == 1 or backend != "plain"
        result = tasks[n, m, row["matrices"], backend]()
        assert result.shape == (row["matrices"], n, m)
        values = torch.linalg.svdvals(result.float())
        assert 0.7 < values.median() < values.max() < 1.25
    elements = sum(n * m * row["matrices"] for (n, m, backend), row in found.items() if backend == "gram")
    assert elements == sum(param.numel() for param in toy.params)


@pytest.mark.gpu
def test_symmetric_kernels_are_among_the_backends_of_a_gpu():
    device = torch.device("cuda")
    assert set(bench_optim.backends_on(device)) == set(bench_optim.BACKENDS)
    result = bench_optim.orthogonalizations([(768, 3072)] * 2, device)[768, 3072, 2, "triton"]()
    values = torch.linalg.svdvals(result.float())
    assert 0.5 < values.min() < values.max() < 1.25


def test_the_limit_counts_and_times_the_products_that_plain_orthogonalization_makes(toy):
    maps = bench_optim.products(toy.shapes)
    with FlopCounterMode(display=False) as plain:
        for param in toy.params:
            orthogonalize(param.detach(), "newton_schulz", torch.bfloat16, "plain")
    assert sum(p.gflop() for p in maps) == pytest.approx(plain.get_total_flops() / 1e9)
    for product in [*maps, bench_optim.Product("P X", 300, 700, 7)]:  # the last in batches with a rest
        run = product.runner(torch.device("cpu"))
        with FlopCounterMode(display=False) as counter:
            run()
        assert product.gflop() == pytest.approx(counter.get_total_flops() / 1e9)


@pytest.mark.parametrize(("script", "words"), [
    (bench_optim, ["--sets", "toy", "--rounds", "1", "--device", "cpu"]),
    (optim_quality, ["--sizes", "8x8", "--backends", "plain"]),
])
def test_figures_that_cannot_be_written_are_printed_nevertheless_and_the_path_is_named(script, words, tmp_path, capsys):
    path = tmp_path / "absent" / "figures.json"
    assert script.main([*words, "--json", str(path)]) == 2
    out, err = capsys.readouterr()
    assert "newton_schulz" in out or "torch.optim.Muon" in out
    assert err.startswith("error: ")
    assert str(path) in err


def test_every_row_steps_all_weights_and_no_guard_skips_what_is_timed(toy):
    steps = bench_optim.steps_of(toy, None, "auto", [])
    for name, step in steps.items():
        before = [param.detach().clone() for param in toy.params]
        toy.restore()
        step()
        moved = [not torch.equal(param, old) for param, old in zip(toy.params, before, strict=True)]
        assert all(moved), name
    guards = [steps[f"{name}, both guards"].func.__self__ for name in ("Muon", "NorMuon")]
    guards += [steps[f"{name}, non-finite guard"].__self__.guard for name in ("Muon", "NorMuon", "Adam")]
    assert [(g.report()["steps"], g.report()["nonfinite"], g.report()["spike"]) for g in guards] == [(1, 0, 0)] * 5
    bare = [steps[name].__self__.guard for name in ("Muon", "NorMuon", "Adam", "NorMuon, plain backend")]
    assert not any(guard.nonfinite or guard.spike for guard in bare)


def test_each_round_prepares_and_times_every_task_once_and_begins_with_the_next(monkeypatch):
    monkeypatch.setattr(bench_optim, "WARM_UP", 2)
    seen: list[str] = []
    tasks = {name: lambda name=name: seen.append(name) for name in "abc"}
    ms = bench_optim.timed(tasks, lambda: seen.append("-"), 2, environment.start("cpu"))
    assert "".join(seen).replace("-", "") == "abc" + "bca" + "cab" + "abc"
    assert seen[::2] == ["-"] * 12
    assert {name: len(times) for name, times in ms.items()} == {"a": 2, "b": 2, "c": 2}


def test_gradients_that_an_optimizer_destroyed_are_whole_for_the_next(toy):
    toy.restore()
    toy.params[0].grad.fill_(torch.nan)
    toy.params[1].grad = None
    toy.restore()
    assert all(torch.equal(param.grad, clean) for param, clean in zip(toy.params, toy.clean, strict=True))


# ---- Peers


def test_a_peer_is_built_from_its_arguments_and_the_benchs(peers, toy):
    name, build = bench_optim.load_peer(f'theirs={peers}:Wrecker:{{"scale": 4.0}}')
    toy.restore()
    assert name == "theirs"
    assert build(toy.params).param_groups[0]["lr"] == pytest.approx(bench_optim.OPTIONS["lr"] * 4.0 * 0.5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{file}:Wrecker", "not of the form"),
        ("theirs={file}", "not of the form"),
        ("theirs={folder}/gone.py:Wrecker", "FileNotFoundError"),
        ("theirs={folder}/broken.py:Wrecker", "No module named 'nothing_of_that_name'"),
        ("theirs={file}:Wreckage", "has no attribute 'Wreckage'"),
        ('theirs={file}:Wrecker:{{"scale": }}', "JSONDecodeError"),
        ('theirs={file}:Wrecker:{{"scail": 2}}', "unexpected keyword argument 'scail'"),
        ("theirs={file}:Lazy", "some day"),
        ("NorMuon={file}:Wrecker", "choose another"),
    ],
)
def test_a_peer_that_cannot_be_used_is_refused_with_value_reason_and_fix(text, problem, peers, capsys):
    text = text.format(file=peers, folder=peers.parent)
    assert bench_optim.main(["--sets", "toy", "--rounds", "1", "--device", "cpu", "--peer", text]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --peer ")
    assert problem in message
    assert "choose another" in message or (text in message and "give NAME=FILE.py:Class" in message)


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--threads", "0"], ["--sets", "toys"], ["--backend", "fast"]])
def test_bad_words_are_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_optim.main(words)
    assert words[0] in capsys.readouterr().err


# ---- Quality


def test_an_exact_result_scores_ones_and_a_spoiled_one_shows_how():
    exact = optim_quality.case("lowrank", 24, 32)
    U, V = exact.U, exact.V
    assert (U.shape, V.shape) == ((24, 6), (32, 6))
    ones = {"min": 1, "median": 1, "max": 1, "cosine": 1, "in_band": 1, "spill": 0}
    assert optim_quality.quality(U @ V.T, exact) == pytest.approx(ones, abs=1e-9)
    u, v = (torch.linalg.svd(space)[0][:, -1] for space in (U, V))  # outside of either space
    values = torch.tensor([1.4, 1.2, 1.0, 1.0, 0.9, 0.3], dtype=torch.float64)
    spoiled = optim_quality.quality((U * values) @ V.T + 0.25 * torch.outer(u, v), exact)
    length = float((values.square().sum() + 0.25**2).sqrt())
    assert spoiled == pytest.approx(
        {"min": 0.3, "median": 1.0, "max": 1.4, "in_band": 4 / 6, "spill": 0.25,
         "cosine": float(values.sum()) / length / 6**0.5}
    )  # fmt: skip


@pytest.mark.parametrize("size", [(24, 24), (24, 40), (40, 24)])
@pytest.mark.parametrize("spectrum", optim_quality.SPECTRA)
def test_the_inputs_have_the_spectra_that_they_are_named_for(spectrum, size):
    matrix = optim_quality.case(spectrum, *size)
    values = torch.linalg.svdvals(matrix.G.double())
    expected = {
        "cond1e4": torch.logspace(0, -4, 24, dtype=torch.float64),
        "one_big": torch.tensor([1.0] + [1e-3] * 23).double(),
        "lowrank": torch.tensor([1.0] * 6 + [0.0] * 18).double(),
    }.get(spectrum.split(",")[0], values)
    torch.testing.assert_close(values, expected, rtol=0, atol=5e-3 if "bf16" in spectrum else 1e-6)
    exact = optim_quality.quality(orthogonalize(matrix.U @ matrix.V.T, "exact", torch.float64), matrix)
    assert (exact["min"], exact["max"], exact["cosine"], exact["spill"]) == pytest.approx((1, 1, 1, 0), abs=1e-9)


def test_the_quality_table_has_a_line_for_each_combination(tmp_path, capsys):
    words = ["--sizes", "16x16", "16x32", "--methods", "newton_schulz", "exact", "--json", str(tmp_path / "q.json")]
    assert optim_quality.main(words) == 0
    rows = json.loads((tmp_path / "q.json").read_text())
    assert len(rows) == 2 * 5 * 2 * 2 * 2 == len(capsys.readouterr().out.splitlines()) - 1
    for row in rows:
        if (row["method"], row["dtype"]) == ("exact", "float32") and "lowrank" not in row["spectrum"]:
            assert (row["min"], row["max"], row["cosine"]) == pytest.approx((1, 1, 1), abs=1e-3)
        if row["spectrum"] == "lowrank" and row["method"] == "newton_schulz":
            assert (row["spill"] < 1e-3) == (row["dtype"] == "float32")


def test_rounding_noise_of_a_rank_deficient_bf16_input_is_orthogonalized_too():
    exact, rounded = (optim_quality.case(f"lowrank{end}", 32, 32) for end in ("", ", rounded to bf16"))
    spills = [
        optim_quality.quality(orthogonalize(matrix.G, "polar_express", torch.float32), matrix)["spill"]
        for matrix in (exact, rounded)
    ]
    assert spills[0] < 0.01 < 0.1 < spills[1]


# ---- Owners


def test_owner_tables_agree_with_a_count_by_hand(tmp_path, capsys):
    path = tmp_path / "owners.json"
    assert optim_quality.main(["--ranks", "--json", str(path)]) == 0
    tables = {(row["model"], row["ranks"]): row for row in json.loads(path.read_text())}
    assert {ranks for _, ranks in tables} == {1, 2, 4, 8}
    matrices = {"record42": (32, 768 * 3072), "medium": (48, 1024 * 4096), "steps": (36, 768 * 3072)}
    for (model, ranks), row in tables.items():
        count, size = matrices[model]
        # A reduce-scatter and an all-gather of float32: (W - 1) / W of all bytes each.
        assert row["sent"] - row["padding"] == 2 * (ranks - 1) * count * size * 4 // ranks
        assert row["padding"] <= 0.01 * row["sent"]
        assert row["sent_by_groups"] * 1.01 >= row["sent"]
    # Ten attention matrices padded to 16 and 22 MLP matrices padded to 24, on eight ranks.
    assert tables["record42", 8]["sent_by_groups"] == 2 * 7 * (2 + 3) * 768 * 3072 * 4
    text = capsys.readouterr().out
    assert all(line in text for row in tables.values() for line in row["table"])
    assert text.count(" padding") >= len(tables)


# ---- Skips


def write_log(path: Path, losses: list) -> Path:
    lines = [{"event": "header"}, *({"event": "step", "train_loss": loss} for loss in losses), {"event": "end"}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def skipped(path: Path, tmp_path: Path) -> dict[tuple[str, float], dict]:
    table = tmp_path / "skips.json"
    assert optim_quality.main(["--skips", str(path), "--json", str(table)]) == 0
    return {(row["rule"], row["sigma"]): row for row in json.loads(table.read_text())}


def test_skips_of_the_mean_rule_are_those_of_a_loop_over_windows(tmp_path):
    losses = (4 + 0.05 * np.random.default_rng(0).standard_t(5, size=500)).astype(np.float32)
    for step, sigmas in ((150, 6.5), (350, 9)):
        window = losses[step - 128 : step]
        losses[step] = window.mean() + sigmas * window.std(ddof=1)
    found = skipped(write_log(tmp_path / "run.jsonl", losses.tolist()), tmp_path)
    counts = []
    for sigma in (6.0, 7.0):
        expected: list[int] = []
        for step in range(32, len(losses)):
            window = losses[max(0, step - 128) : step].astype(np.float64)
            if losses[step] > window.mean() + sigma * window.std(ddof=1):
                expected.append(step)
        row = found["mean", sigma]
        assert (row["skipped"], row["judged"], row["rate"]) == (expected, 468, len(expected) / 468)
        counts.append({150, 350} & set(expected))
    assert counts == [{150, 350}, {350}]


def test_a_smooth_run_has_no_false_skip_and_a_spike_or_nan_in_it_is_the_only_one(tmp_path, capsys):
    noise = np.random.default_rng(0).normal(0, 0.02, 300)
    losses = (3 + 6 * np.exp(-np.arange(300) / 80) + noise).tolist()
    for row in skipped(write_log(tmp_path / "smooth.jsonl", losses), tmp_path).values():
        assert (row["steps"], row["skipped"], row["rate"]) == (300, [], 0)
    losses[200], losses[250] = 30.0, "nan"
    for (rule, _), row in skipped(write_log(tmp_path / "spiky.jsonl", losses), tmp_path).items():
        assert row["skipped"] == [200, 250], rule
    assert "steps 200, 250" in capsys.readouterr().out


def test_a_run_too_short_to_be_judged_has_no_rate(tmp_path, capsys):
    rows = skipped(write_log(tmp_path / "short.jsonl", [3.0] * 10), tmp_path)
    assert {row["rate"] for row in rows.values()} == {None}
    assert "nothing judged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{}\nno JSON\n", "line 2"), ("[1]\n", "line 1"), ('{"train_loss": "low"}\n', "convert"), (None, "not exist")],
)
def test_a_file_that_is_no_log_is_refused_by_name(text, problem, tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    if text is not None:
        path.write_text(text)
    assert optim_quality.main(["--skips", str(path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert str(path) in message
    assert problem in message


@pytest.mark.parametrize("word", ["768", "2x8", "0x8", "axb"])
def test_a_size_that_is_none_is_refused(word, capsys):
    with pytest.raises(SystemExit, match="2"):
        optim_quality.main(["--sizes", word])
    assert f"'{word}' is no size; write ROWSxCOLS" in capsys.readouterr().err
