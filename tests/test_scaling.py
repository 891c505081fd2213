"""What scripts/scaling.py predicts: against arithmetic by hand, the sharding's own count, and bytes on a network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from optim.sharding import Parcel
from small_run import ROOT

from data.loader import Order
from runtime.environment import Machine
from scripts.scaling import (
    ASSUMED,
    LAPS,
    build,
    cost,
    layouts_of,
    link,
    main,
    measured_text,
    messages,
    parse_arguments,
    study,
    study_text,
)

TRACKS = ("short", "medium", "steps")
HEADERS = 0.03  # of TCP, IP and Ethernet, of acknowledgements, and of gloo's small messages, as a share of the payload


@pytest.fixture(scope="module")
def given():
    return vars(parse_arguments([]))


@pytest.fixture(scope="module")
def built():
    return {track: build(track, Machine(torch.device("meta"), 0, 1), torch.bfloat16) for track in TRACKS}


@pytest.fixture(scope="module")
def studies(given):
    return {track: study(track, given) for track in TRACKS}


# ---- Bytes


def test_eight_gpus_send_what_the_shapes_of_short_say(studies):
    """Counted by hand: float32 matrices every step, bf16 tables every other; 7/8 of them in each phase."""
    matrices = 10 * 4 * 768 * 768 + 22 * 768 * 3072
    tables = 5 * 50_304 * 768
    sent = studies["short"]["costs"][0]["sent"]
    for phase in ("reduce-scatter", "all-gather"):
        assert sent[phase] == pytest.approx(7 / 8 * (4 * matrices + 2 * tables / 2), rel=1e-4)
    assert sent["all-reduce"] < 1e-4 * sent["all-gather"]  # scalars, the loss, the guard's numbers


@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
def test_the_messages_of_parcels_are_the_bytes_that_the_sharding_counts(built, track, ranks):
    config, _, optimizers = built[track]
    parcels = [(layout, 1.0) for layout, _ in layouts_of(config, optimizers, ranks) if isinstance(layout, Parcel)]
    found = [message for message in messages(parcels) if message.kind != "all-reduce"]
    assert sum(message.sent(ranks) for message in found) == sum(layout.sent()[0] for layout, _ in parcels)


@pytest.mark.parametrize("track", TRACKS)
def test_bytes_hardly_grow_with_gpus_until_matrices_run_out_and_then_in_proportion(built, track, given):
    config, _, optimizers = built[track]
    eight, sixteen, many, twice = (sum(cost(config, optimizers, 1.0, n, given)["sent"].values())
                                   for n in (8, 16, 1024, 2048))  # fmt: skip
    assert sixteen == pytest.approx(eight * (15 / 16) / (7 / 8), rel=0.01)
    assert twice == pytest.approx(2 * many, rel=0.1)


# ---- Time and limits


def test_the_slowest_link_of_a_ring_counts(given):
    assert link("infiniband", 8, given) == link("ethernet", 8, given) == (450e9, 2e-6)
    assert link("infiniband", 16, given) == pytest.approx((8 * 50e9, 5e-6))
    assert link("ethernet", 16, given) == pytest.approx((12.5e9, 20e-6))
    assert link("infiniband", 16, given | {"infiniband": 800}) == pytest.approx((450e9, 5e-6))


def test_time_on_the_wire_is_bytes_by_rate_and_hops_by_latency(built, given):
    config, _, optimizers = built["steps"]
    found = cost(config, optimizers, 1e6, 8, given)
    rings = sum(LAPS[message.kind] for message in messages(layouts_of(config, optimizers, 8)))  # all of them, each step
    assert found["wire_ms"]["ethernet"] == pytest.approx(1e3 * (sum(found["sent"].values()) / 450e9 + rings * 7 * 2e-6))
    assert found["compute_ms"] == 1e3 * 524_288 / 8 / 1e6


def test_a_step_of_short_on_eight_gpus_computes_as_long_as_the_public_record(studies):
    assert studies["short"]["costs"][0]["compute_ms"] == pytest.approx(61, abs=1)


@pytest.mark.parametrize("track", TRACKS)
def test_communication_takes_longer_than_computation_from_the_point_that_is_named(built, studies, given, track):
    config, _, optimizers = built[track]
    found = studies[track]
    for network, gpus in found["wire_exceeds_compute"].items():
        at, before = (cost(config, optimizers, found["tokens_per_second"], n, given) for n in (gpus, gpus // 2))
        assert at["wire_ms"][network] > at["compute_ms"]
        assert before["wire_ms"][network] < before["compute_ms"]


@pytest.mark.parametrize("track", TRACKS)
def test_gpus_without_rows_are_those_that_the_loader_refuses(built, given, track):
    config, _, optimizers = built[track]
    order = Order(config.batch_tokens, config.sequence, config.max_document, config.bos, config.align)
    for gpus in (2, 3, 8, 16, 512, 1024):
        rows = cost(config, optimizers, 1.0, gpus, given)["rows"]
        if rows is None:
            with pytest.raises(ValueError, match="does not divide"):
                order.rows_of_rank(gpus)
        else:
            assert rows == order.rows_of_rank(gpus)


# ---- What really travels


@pytest.fixture(scope="module")
def counted():
    if not Path("/proc/self/net/dev").exists():
        pytest.skip("only Linux counts the bytes of its loopback")
    command = [sys.executable, str(ROOT / "scripts" / "scaling.py"), "--measure", "2", "4", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    if not all(each["alone"] for each in found):
        pytest.skip("no network namespace is allowed here: the loopback carries the traffic of others too")
    return found


def test_processes_send_the_bytes_that_were_predicted_and_their_headers(counted):
    assert [each["processes"] for each in counted] == [2, 4]
    for each in counted:
        assert each["gloo"] < each["counted"] < (1 + HEADERS) * each["gloo"], measured_text(each)


def test_gloo_sends_half_as_much_again_as_rings_would(counted):
    for each in counted:
        assert each["gloo"] / each["ring"] == pytest.approx(1.5, rel=1e-3)


# ---- What is shown


def test_the_tables_of_the_documentation_are_those_of_the_script(studies):
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    for found in studies.values():
        assert study_text(found) in page


def test_json_holds_the_figures_of_the_tables(studies, capsys):
    assert main(["--tracks", "short", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [studies["short"]]


@pytest.mark.parametrize("words", [["--gpus", "1"], ["--gpus", "100000"], ["--measure", "17"], ["--pace", "nan"],
                                   *([f"--{name}", "0"] for name in ASSUMED)])  # fmt: skip
def test_impossible_settings_are_refused(words, capsys):
    with pytest.raises(SystemExit) as refusal:
        main(words)
    assert refusal.value.code == 2
    assert f"{' '.join(words)}: must be" in capsys.readouterr().err
