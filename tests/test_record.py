"""Records from claim to leaderboard on real small runs, and every way to cheat: what catches it, and what cannot."""

import contextlib
import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable
from functools import reduce
from itertools import accumulate
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from small_run import ROOT, SIZES, STEPS, documents, find_logs, read_events, run, write_data

import train_gpt
from data.shards import write_shard
from runtime.claim import read_claim
from runtime.flags import parse
from runtime.jsonl import json_line
from runtime.log import REGISTERED, RunLog, source_hash
from runtime.registry import register
from scripts import record
from claims.evidence import TRACKS, Track, find_failures, read_evidence
from claims.pages import differences
from claims.runlog import Run

TARGET = 3.25  # twelve steps end near 3.205, with a spread of 0.012
FLAGS = [word for name, value in (SIZES | {"target": TARGET}).items() for word in (f"--{name}", str(value))]
NS_PER_TOKEN = 100_000  # of the forward pass; three times that with gradients
Change = Callable[[list[dict]], Any]  # of the events of a log
ask_trainer = record.configuration


@pytest.fixture(scope="module", autouse=True)
def contest():
    """The small run as the track tiny, and a clock that counts work: it neither waits nor stutters."""
    val_sha256 = sha256(documents(3, 30).astype(np.uint16).tobytes())
    clock = SimpleNamespace(ns=0)
    clock.perf_counter_ns = clock.monotonic_ns = lambda: clock.ns
    batch_loss = train_gpt.batch_loss

    def worked(session, batch, *rest):
        clock.ns += NS_PER_TOKEN * batch.inputs.numel() * (3 if torch.is_grad_enabled() else 1)
        return batch_loss(session, batch, *rest)

    with pytest.MonkeyPatch.context() as patch:
        rules = Track(TARGET, SIZES["val-tokens"], val_sha256[:16], 0.02, "", {}, in_time=False)
        patch.setitem(TRACKS, "tiny", rules)
        patch.setattr("runtime.clock.time", clock)
        patch.setattr("runtime.log.time", clock)
        patch.setattr("runtime.environment.measured_gemm_flops", lambda *_: 1e9)
        patch.setattr("os.fsync", lambda descriptor: None)  # what a busy disk takes minutes for
        patch.setattr(train_gpt, "batch_loss", worked)
        patch.setattr(record, "configuration", lambda flags: vars(parse(train_gpt.Config, flags, train_gpt.preset, "")))
        yield


def call(*words: object) -> tuple[int, str]:
    """Exit code and output of record.py."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = record.main([str(word) for word in words])
        except SystemExit as stopped:
            code = stopped.code
    return code, out.getvalue()


def write_claim(records: Path, name: str, n: int, seed: int, *flags: str) -> Path:
    """The folder of a new claim."""
    words = ["--n", n, "--seed", seed, "--about", "Why.", "--records", records, "--", *FLAGS, *flags]
    code, said = call("claim", name, *words)
    assert code == 0, said
    return next((records / "tiny").glob(f"*_{name}"))


def make_runs(folder: Path, data: Path, logs: Path, seed: int, trials: int, **flags: object) -> Path:
    outcome = run(data, logs, claim=folder / "claim.json", seed=seed, trials=trials, target=TARGET, **flags)
    assert outcome.code == 0, outcome.err
    return logs


def make_record(records: Path, data: Path, name: str, n: int = 4, seed: int = 2000, **flags: object) -> Path:
    folder = write_claim(records, name, n, seed, *(f"--{flag}={value}" for flag, value in flags.items()))
    call("make", folder, make_runs(folder, data, records / "logs", seed, n, **flags))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def good(data, tmp_path_factory):
    """A record of twelve runs. Tests look at it or at copies of it; none changes it."""
    folder = make_record(tmp_path_factory.mktemp("good"), data, "Good", n=12, seed=1000)
    assert held(folder)
    return folder


@pytest.fixture
def twelve(good, tmp_path):
    return shutil.copytree(good, tmp_path / good.name)


@pytest.fixture(scope="module")
def good_four(good, tmp_path_factory):
    """Its first four runs as a record that claims no more, for tests to which their number is the same."""
    folder = shutil.copytree(good, tmp_path_factory.mktemp("four") / good.name)
    claim_only(folder, read_evidence(folder).complete[:4])
    assert held(folder)
    return folder


@pytest.fixture
def four(good_four, tmp_path):
    return shutil.copytree(good_four, tmp_path / good_four.name)


def caught(folder: Path, *patterns: str, pages: bool = True) -> None:
    """Verification fails for what each pattern names, and for nothing else. `pages`: the cheat made them anew."""
    if pages:
        call("make", folder)
    evidence = read_evidence(folder)
    failures = [*find_failures(evidence), *differences(evidence)]
    for pattern in patterns:
        assert any(re.search(pattern, failure.what) for failure in failures), failures
    for failure in failures:
        assert any(re.search(pattern, failure.what) for pattern in patterns), failure
        assert all(failure), failure
    code, said = call("verify", folder)
    assert (code, said.count("\n    in "), said.count("\n    mend: ")) == (1, len(failures), len(failures))
    assert f"NOT VERIFIED, {len(failures)} failures" in said
    assert all(str(part) in said for failure in failures for part in failure)


def held(folder: Path) -> bool:
    code, said = call("make", folder)
    return code == 0 and "verified; below 3.25 is shown" in said and call("verify", folder)[0] == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# The whole path


def test_a_good_record_is_verified_and_making_it_again_changes_nothing(good, twelve):
    code, said = call("verify", good)
    assert (code, said.count("\n")) == (0, 1)
    assert re.search(r"verified; below 3\.25 is shown \(mean loss 3\.\d{6} of 12 runs, p = \S+, level 0\.01\)", said)
    for logs in ([], [good.parents[1] / "logs"], [twelve / "runs"]):
        assert call("make", twelve, *logs)[0] == 0
        assert contents(twelve) == contents(good)


def test_every_number_of_the_record_is_scipys_on_the_logs(good):
    logs = sorted(find_logs(good / "runs"), key=lambda log: read_events(log)[0]["seed"])
    losses = [read_events(log)[-1]["val_loss"] for log in logs]
    seconds = [read_events(log)[-1]["train_time_ms"] / 1000 for log in logs]
    test, sd = stats.ttest_1samp(losses, TARGET, alternative="less"), stats.tstd(losses)
    bound = test.confidence_interval(0.99).high
    found, page = json.loads((good / "record.json").read_text()), (good / "README.md").read_text()
    truth = {"n": 12, "mean": np.mean(losses), "sd": sd, "t": test.statistic, "p": test.pvalue, "upper99": bound,
             "level": 0.01, "target": TARGET, "steps": STEPS}  # fmt: skip
    assert {name: found[name] for name in truth} == pytest.approx(truth, rel=1e-9)
    assert found["train_time_ms"]["median"] == pytest.approx(np.median(seconds) * 1000)
    assert [(entry["seed"], entry["val_loss"]) for entry in found["runs"]] == list(enumerate(losses, 1000))
    assert [entry["sha256"] for entry in found["runs"]] == [sha256(log.read_bytes()) for log in logs]
    assert f"is shown by 12 runs (p = {test.pvalue:.3g}, level 0.01)" in page
    assert f"| 12 | {np.mean(losses):.6f} | {sd:.6f} | {test.statistic:.4f} | {test.pvalue:.3g} | {bound:.5f} |" in page
    for seed, loss, second in zip(range(1000, 1012), losses, seconds, strict=True):
        assert f"| {seed} | {loss:.6f} | {second:.3f} |" in page
    trained = sum(event["ms"] for log in logs for event in read_events(log) if event.get("name") == "train") / 12
    assert f"| train | yes | {trained:,.0f} |" in page


def test_a_claim_holds_what_the_trainer_itself_makes_of_the_flags(good):
    assert json.loads(json.dumps(ask_trainer(FLAGS))) == read_claim(good / "claim.json").config
    with pytest.raises(record.RecordError, match=r"--step: no such flag\. Did you mean --steps\?"):
        ask_trainer(["--step", "5"])


@pytest.mark.parametrize(
    ("words", "flags", "sentence"),
    [
        (["Few", "--n", "3"], [], "--n 3, .*: 4 to 10000 runs"),
        (["Few", "--n", "8", "--looks", "4,6"], [], "the last look at --n"),
        (["Few"], ["--target", "3.3"], "--target 3.3: that of track tiny is 3.25"),
        (["few"], [], "'few' is no CamelName"),
        (["Good"], [], "exists: a claim is not written twice"),
    ],
)
def test_a_claim_that_breaks_a_rule_is_not_written(words, flags, sentence, good):
    before = contents(good.parents[1])
    code, said = call("claim", *words, "--about", "x", "--records", good.parents[1], "--", *FLAGS, *flags)
    assert code == 2
    assert re.search(sentence, said), said
    assert contents(good.parents[1]) == before


def test_runs_made_in_two_goes_on_two_machines_are_one_record(tmp_path, data):
    folder = write_claim(tmp_path / "records", "Few", 4, 2000)
    here = make_runs(folder, data, tmp_path / "here", seed=2000, trials=1)
    code, said = call("make", folder, here)
    assert (code, "seeds [2001, 2002, 2003] have no run, and 1 runs are no planned look" in said) == (1, True)
    there = make_runs(folder, data, tmp_path / "there", seed=2002, trials=2)
    make_runs(folder, data, here, seed=2001, trials=1)
    assert call("make", folder, here, there)[0] == 0
    assert sorted(path.name for path in folder.glob("runs/registry*")) == ["registry.jsonl", "registry_2.jsonl"]
    assert held(folder)


def test_an_early_look_counts_at_the_level_that_was_planned_for_it(twelve):
    """Two looks at 5 and 10 runs keep 0.01 together when each is at 0.00522."""
    claim_only(twelve, read_evidence(twelve).complete[:10])
    rewrite_claim(twelve, looks=[5, 10])
    forge(twelve)
    assert held(twelve)
    assert read_evidence(twelve).level == pytest.approx(0.00522, rel=0.05)
    cut(twelve, read_evidence(twelve).complete[5:])
    assert held(twelve)
    cut(twelve, read_evidence(twelve).complete[4:])
    caught(twelve, r"missing: seeds \[1004, .* have no run, and 4 runs are no planned look")


# ---------------------------------------------------------------------------------------------------------------------
# Cheats with files


def cut(folder: Path, runs: list[Run], *, lines: bool = True) -> None:
    """Take runs out of a record, with their lines in the registry or without them."""
    registry = folder / "runs" / "registry.jsonl"
    for out in runs:
        out.path.unlink()
        kept = [line for line in registry.read_text().splitlines(keepends=True) if out.run_id not in line]
        if lines:
            registry.write_text("".join(kept))


def rewrite_claim(folder: Path, **changed: object) -> None:
    path = folder / "claim.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def forge(folder: Path, change: Change = len, *, stale: bool = False) -> None:
    """Change the events of the first run and write logs and registry anew, as if the runs had written them.

    What is caught then is caught by the rule for the thing itself. `stale`: but for hashes of logs at a resume.
    """
    claim, logs = read_claim(folder / "claim.json"), {log.stem: read_events(log) for log in find_logs(folder / "runs")}
    for events in logs.values():
        events[0] |= {"claim": claim.id, "source_sha256": claim.source_sha256}
    first = logs[min(logs)]
    resume = next((event for event in first if event["event"] == "resume"), {})
    kept = lines_before(first, resume["log_offset"]) if resume else 0
    change(first)
    registry = folder / "runs" / "registry.jsonl"
    entries = [entry for entry in read_events(registry) if entry["run_id"] in logs]
    registry.unlink()
    for nth, entry in enumerate(entries):
        events, line = logs[entry["run_id"]], {name: entry[name] for name in ("event", "run_id", "time")}
        rest = [other["event"] for other in entries[nth:] if other["run_id"] == entry["run_id"]]
        until = [at for at, event in enumerate(events) if event is resume and "resume" in rest]
        content = b"".join(map(json_line, events[: min(until, default=None)]))
        if rest[0] == "start":
            fields = {name: events[0].get(name) for name in REGISTERED}
            events[0]["registry_sha256"] = register(registry, **line, **fields)
        elif rest[0] == "end":
            (folder / "runs" / f"{entry['run_id']}.jsonl").write_bytes(content)
            register(registry, **line, log_sha256=sha256(content))
        else:
            digest = entry["log_sha256"] if stale else sha256(content)
            found = register(registry, **line, log_bytes=len(content), log_sha256=digest)
            resume |= {"log_offset": len(b"".join(map(json_line, events[:kept]))), "registry_sha256": found}


def lines_before(events: list[dict], offset: int) -> int:
    return list(accumulate((len(json_line(event)) for event in events), initial=0)).index(offset)


def claim_only(folder: Path, runs: list[Run]) -> None:
    """Forge a record of some of its runs."""
    names = {kept.run_id for kept in runs}
    cut(folder, [other for other in read_evidence(folder).runs if other.run_id not in names])
    rewrite_claim(folder, n=len(runs), seeds=sorted(kept.seed for kept in runs), looks=[len(runs)])
    forge(folder)


def runs_of(folder: Path) -> list[Run]:
    return read_evidence(folder).complete


def best(folder: Path) -> list[Run]:
    return sorted(runs_of(folder), key=lambda found: found.final_loss)


def edit(path: Path, old: str, new: str, count: int = 1) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))


def edit_loss(path: Path, count: int = 2) -> None:
    """One digit, the third decimal, of the last loss, where it first stands: the validation and the end of a log."""
    loss = str(read_events(path)[-1]["val_loss"])
    edit(path, loss, str(float(loss) - 0.001)[: len(loss)], count)


def end_again(folder: Path) -> None:
    """An edited log, and a second end line that vouches for it: no line before it changes."""
    run = runs_of(folder)[0]
    edit_loss(run.path)
    sha256 = hashlib.sha256(run.path.read_bytes()).hexdigest()
    register(folder / "runs" / "registry.jsonl", "end", run_id=run.run_id, status="done", log_sha256=sha256)


def try_before(folder: Path) -> None:
    """A claimed seed in the registry of another log folder, with other settings and no claim."""
    line = {"event": "start", "time": "2020-01-01T00:00:00+00:00", "run_id": "early", "track": "tiny", "seed": 1000,
            "config_sha256": ZERO, "claim": None, "previous": hashlib.sha256(b"").hexdigest()}  # fmt: skip
    write(folder, "runs/registry_2.jsonl", json_line(line).decode())


def start_again(folder: Path) -> None:
    """As a run does that is killed before its first step."""
    header, own = read_events(runs_of(folder)[3].path)[0], {"event", "t_ms", "schema", "run_id", "registry_sha256"}
    RunLog(folder / "runs", "20991231").begin({name: header[name] for name in header.keys() - own})


def cut_off_end(folder: Path) -> None:
    for path in (runs_of(folder)[-1].path, folder / "runs" / "registry.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def replace_worst(folder: Path) -> None:
    """By the best run under another run id and seed."""
    first, *_, worst = best(folder)
    events = read_events(first.path)
    events[0] |= {"seed": worst.seed, "trial": worst.trial, "run_id": "x"}
    (folder / "runs" / "x.jsonl").write_bytes(b"".join(map(json_line, events)))
    worst.path.unlink()


def write(folder: Path, name: str, text: str) -> None:
    """A file more, or more in a file."""
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("a") as file:
        file.write(text)


def forge_claim(folder: Path, **changed: object) -> None:
    rewrite_claim(folder, **changed)
    forge(folder)


def forge_source(folder: Path, line: str) -> None:
    write(folder, "source/train_gpt.py", f"\n{line}\n")
    forge_claim(folder, source_sha256=source_hash(folder / "source"))


def put(value: object, *path: str) -> Change:
    """Set a field of the header; None stands for none."""
    return lambda events: reduce(getitem, path[:-1], events[0]).update({path[-1]: value})


def each(kind: str, at: slice = slice(None), **fields: object) -> Change:
    """Set fields of the events of a kind."""
    return lambda events: [event.update(fields) for event in [e for e in events if e["event"] == kind][at]]


def without(kind: str, at: int) -> Change:
    return lambda events: events.remove([event for event in events if event["event"] == kind][at])


def learn_before(events: list[dict]) -> None:
    for event in events:
        event |= {name: event[name] - 1 for name in ("val_loss", "train_loss") if name in event}


def train_longer(events: list[dict]) -> None:
    """Twelve steps more, at the end, that take no time."""
    events += [event | {"step": event["step"] + STEPS} for event in events if event["event"] == "step"]
    each("val", total_steps=2 * STEPS)(events)
    each("val", slice(-1, None), step=2 * STEPS)(events)


CHAIN = ("unreadable: .*a line was removed, added or edited", "its start is not in", "its end is not in")
ZERO, FIRST_TRAIN, FIRST_VALIDATE = "0" * 64, slice(3, 4), slice(4, 5)
CHEATS: dict[str, tuple] = {  # of the twelve runs of a claim
    "the best 8 of 12": (lambda f: cut(f, best(f)[8:], lines=False), "missing: run .* was started", "missing: seeds"),
    "the best 8 of 12 under a claim of 8": (
        lambda f: (cut(f, best(f)[8:], lines=False), rewrite_claim(f, n=8, seeds=[r.seed for r in best(f)], looks=[8])),
        "extra: the run was not started under this claim", "missing: ", r"seed \d+ was run by .* outside the claim"),
    "8 of 12 and no lines of the last": (lambda f: cut(f, runs_of(f)[8:]), r"missing: seeds \[1008, 1009, .* 8 runs"),
    "8 of 12 and no lines of the others": (lambda f: cut(f, runs_of(f)[3:7]), *CHAIN, "missing: seeds"),
} | {  # of any run
    "a killed run": (start_again, "unfinished: no end line", "duplicate: the same seed"),
    "a run without its end": (cut_off_end, "unfinished: no end line", "missing: .* 3 runs are no planned look"),
    "a copied log": (lambda f: shutil.copy(runs_of(f)[0].path, f / "runs" / "20991231-235959_tiny_s1_t0_ffffff.jsonl"),
                     *(f"duplicate: the same {kind}" for kind in ("run id", "seed", "losses"))),
    "a copy with another run id and seed": (replace_worst, "duplicate: the same losses", "missing: run .* was started",
                                            "its start is not in the registry", "its end is not in the registry"),
    "a digit of a loss": (lambda f: edit_loss(runs_of(f)[0].path), "edited: the log is not the one whose hash"),
    "a digit of one loss": (lambda f: edit_loss(runs_of(f)[0].path, 1), "edited: ", "unfinished: ", "missing: "),
    "an edited log with an end line of its own": (end_again, "its lines in the registry are start end end, which no "),
    "a seed that was tried with other settings": (try_before, "seed 1000 was run by early outside the claim"),
    "a later claim": (lambda f: forge_claim(f, created="2999-01-01T00:00:00+00:00"),
                      "started .*, before the claim of 2999-01-01"),
    "another target": (lambda f: forge_claim(f, target=3.5), "target 3.5 at alpha 0.01, not 3.25 at 0.01",
                       "target 3.25, not the claimed 3.5"),
    "another level": (lambda f: forge_claim(f, alpha=0.05), "target 3.25 at alpha 0.05, not 3.25 at 0.01"),
    "an unknown track": (lambda f: forge_claim(f, track="huge"), "track 'huge' has no rules",
                         "track tiny, not the claimed huge"),
    "settings not of the claim": (lambda f: forge_claim(f, config={"steps": STEPS}), "config_sha256 is not the hash",
                                  "track is None, fixed at 'tiny'"),
    "a longer source": (lambda f: write(f, "source/optim/muon.py", "#"), "source/ is not the claimed"),
    "a source more": (lambda f: write(f, "source/optim/more.py", ""), "source/ is not the claimed"),
    "a source less": (lambda f: (f / "source/optim/muon.py").unlink(), "source/ is not the claimed"),
} | {
    f"a file {name}": (lambda f, name=name: write(f, name, "x"), "unexpected file")
    for name in ("weights.bin", ".hidden", "runs/notes.txt", "source/data.bin", "runs/more/a.jsonl")
} | {
    line: (lambda f, line=line: forge_source(f, line), "forbidden compiler setting")
    for line in (
        "torch._inductor.config.coordinate_descent_tuning = True", 'torch.compile(model, mode="max-autotune")',
        "torch.compile(model, options={})", "torch._inductor.config.epilogue_fusion = False",
        'os.environ["TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"] = "1"', "from torch._inductor import config",
        'torch.compile(\n    wrap(model), dynamic=False, mode="reduce-overhead"\n)',
    )
} | {  # of a log, forged so well that only the rule itself is left
    name: (lambda f, change=change: forge(f, change), *patterns) for name, (change, *patterns) in {
        "another claim": (put(ZERO, "claim"), "extra: the run was not", "missing: ", "seed 1000 was run by"),
        "another torch": (put("2.0", "env", "torch"), "torch differs between runs"),
        "another dtype": (put("bfloat16", "env", "dtype"), "dtype differs between runs"),
        "another track": (put("medium", "track"), "track medium, not the claimed tiny"),
        "another source": (put(ZERO, "source_sha256"), "source_sha256 000000000000, not the claimed"),
        "another configuration": (put(ZERO, "config_sha256"), "config_sha256 (000000000000, not the claimed|is not)"),
        "settings other than their hash": (put(24, "config", "steps"), "config_sha256 is not the hash of config"),
        "more steps than claimed": (train_longer, "24 steps, not the claimed 12"),
        "fewer validation tokens": (put(512, "data", "val_tokens"), "validated on 512 tokens, not 1024"),
        "other validation data": (put(ZERO, "data", "val_sha256"), "2 different val_sha256", "tokens 0{16}, not"),
        "other training data": (put(ZERO, "data", "train_sha256"), "2 different train_sha256 in one record"),
        "validation documents": (put(0.03, "checks", "overlap"), "validation documents in training: 0.03"),
        "no overlap check": (put(None, "checks", "overlap"), "validation documents in training: None"),
        "an overlap of nan": (put("nan", "checks", "overlap"), "validation documents in training: nan"),
        "an overlap of false": (put(False, "checks", "overlap"), "validation documents in training: False"),
        "no causality check": (put(None, "checks", "causality"), "check causality is None"),
        "sight of the future": (put(False, "checks", "causality"), "check causality is False"),
        "no check of the warm-up": (put(None, "checks", "warmup_restored"), "check warmup_restored is None"),
        "state left of the warm-up": (put(False, "checks", "warmup_restored"), "check warmup_restored is False"),
        "a model that knows something": (learn_before, "first loss 3.85"),
        "a model of which nobody knows": (each("val", slice(1), val_loss="nan"), "first loss nan"),
        "compiler settings": (put(["inductor.x = 1"], "env", "compile_flags"), "compiler settings inductor.x"),
        "no compiler settings": (put(None, "env", "compile_flags"), "compiler settings unknown"),
        "an unknown phase": (each("phase", FIRST_TRAIN, name="tune"), "phase 'tune'"),
        "training off the clock": (each("phase", FIRST_TRAIN, timed=False), "phase 'train' .* timed: False"),
        "a checkpoint": (each("phase", FIRST_VALIDATE, name="checkpoint"), "phase 'checkpoint'", "3 phases .* 4"),
        "less time than its phases": (each("val", train_time_ms=1000), "ms in timed phases, 1000 ms in the last"),
        "no times": (each("phase", FIRST_TRAIN, ms="nan"), "nan ms in timed phases"),
        "a step left out": (without("step", 5), "11 of 12 steps are in the log"),
        "a validation left out": (without("val", 1), "4 phases of validation for 3 losses"),
        "an error at the end": (each("end", status="error"), "unfinished: ended with status error", "missing: "),
        "two ends": (lambda events: events.append(events[-1]), "unfinished: 2 end lines", "missing: "),
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_record_is_caught_with(cheat, request):
    folder = request.getfixturevalue("twelve" if "of 12" in cheat else "four")
    change, *patterns = CHEATS[cheat]
    change(folder)
    caught(folder, *patterns)


def test_logs_registry_and_claim_forged_throughout_are_not_caught_so_claims_are_published_before_their_runs(twelve):
    claim_only(twelve, best(twelve)[:8])
    assert held(twelve)


def test_a_loss_edited_in_log_and_registry_is_caught_by_the_next_line_which_the_last_end_lacks(four):
    def edit_throughout(path: Path) -> None:
        before = sha256(path.read_bytes())
        edit_loss(path)
        edit(four / "runs" / "registry.jsonl", before, sha256(path.read_bytes()))

    edit_throughout(runs_of(four)[3].path)
    assert held(four)
    edit_throughout(runs_of(four)[2].path)
    caught(four, *CHAIN)


@pytest.mark.parametrize("name", ["README.md", "record.json"])
def test_one_digit_of_a_loss_in_a_page_is_caught_in_its_line(name, four):
    loss = f"{runs_of(four)[2].final_loss:.6f}"[:-1]
    line = 1 + next(i for i, line in enumerate((four / name).read_text().splitlines()) if loss in line)
    edit(four / name, loss, loss[:-1] + str((int(loss[-1]) + 1) % 10))
    caught(four, f"line {line} is not what the logs say", pages=False)
    (four / name).unlink()
    caught(four, "missing", pages=False)


@pytest.mark.parametrize("name", ["README.md", "source/train_gpt.py", "runs", "runs/registry.jsonl"])
def test_a_link_in_place_of_a_file_or_folder_is_caught(name, four):
    (four / name).symlink_to((four / name).rename(four.parent / "elsewhere"))
    code, said = call("verify", four)
    assert (code, "unexpected file" in said) == (1, True)


@pytest.mark.parametrize("name", ["data", "checks", "config", "env", "world_size", "seed", "claim", "run_id"])
def test_a_header_of_any_shape_is_a_failure_and_no_traceback(name, four):
    for value in (None, 1.5, "x", []):
        forge(four, put(value, name))
        code, said = call("make", four)
        assert (code, "NOT VERIFIED" in said) == (1, True)


# ---------------------------------------------------------------------------------------------------------------------
# Runs that were broken off and resumed


@pytest.fixture(scope="module")
def resumed_once(data, tmp_path_factory):
    """A record of four runs; the first broke off in step 12, behind a checkpoint at step 8, and was resumed."""
    records = tmp_path_factory.mktemp("resumed")
    folder, logs = write_claim(records, "Resumed", 4, 3000), records / "logs"
    flags = {"claim": folder / "claim.json", "seed": 3000, "trials": 4, "target": TARGET, "resume": "auto",
             "checkpoint_dir": records / "checkpoints"}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        step, count = train_gpt.optimizer_steps, iter(range(1000))

        def break_off(session, number, *rest):
            if number == STEPS - 1 and session.steps_done == number and next(count) == 0:
                raise OSError("the disk of the data is gone")
            return step(session, number, *rest)

        patch.setattr(train_gpt, "optimizer_steps", break_off)
        assert run(data, logs, checkpoint_every=8, **flags).code == 1
    (log,) = find_logs(logs)
    content = log.read_bytes()  # a first attempt to resume is killed before it writes to the log
    register(logs / "registry.jsonl", "resume", run_id=log.stem, from_step=8, log_bytes=len(content),
             log_sha256=sha256(content))  # fmt: skip
    outcome = run(data, logs, **flags)
    assert outcome.code == 0, outcome.err
    assert held_in(folder, logs)
    return folder


def held_in(folder: Path, logs: Path) -> bool:
    code, said = call("make", folder, logs)
    return code == 0 and "verified; below 3.25 is shown" in said


@pytest.fixture
def resumed(resumed_once, tmp_path):
    return shutil.copytree(resumed_once, tmp_path / resumed_once.name)


def part(events: list[dict], kind: str, resumed: bool) -> list[dict]:
    """The events of a kind, before the resume or after it."""
    at = next(at for at, event in enumerate(events) if event["event"] == "resume")
    return [event for event in (events[at:] if resumed else events[:at]) if event["event"] == kind]


def set_back(events: list[dict], drop: bool = False) -> None:
    """The clock to where it was at the checkpoint, as if no work had been lost."""
    (lost,) = (event for event in events if event.get("name") == "lost")
    for event in [event for kind in ("step", "val", "end") for event in part(events, kind, resumed=True)]:
        event["train_time_ms"] -= lost["ms"]
    lost["ms"] = 0.0
    if drop:
        events.remove(lost)


def forget(events: list[dict]) -> None:
    """That there was a resume, and what it superseded."""
    set_back(events)
    at = next(at for at, event in enumerate(events) if event["event"] == "resume")
    del events[lines_before(events, events[at]["log_offset"]) : at + 2]


def delay(name: str, ms: float) -> Change:
    """Time that passes before the first phase of that name ends after the resume, in no phase."""
    def change(events: list[dict]) -> None:
        (first, *_) = (phase for phase in part(events, "phase", resumed=True) if phase["name"] == name)
        for event in events[next(at for at, event in enumerate(events) if event is first) :]:
            event["t_ms"] += ms
    return change


def drop_lines(folder: Path, *at: int) -> None:
    """Lines of the first run out of the registry, by their place among its own."""
    registry, first = folder / "runs" / "registry.jsonl", runs_of(folder)[0].run_id
    own = [line for line in registry.read_text().splitlines(keepends=True) if first in line]
    registry.write_text("".join(line for line in registry.read_text().splitlines(keepends=True)
                                if line not in [own[place] for place in at]))


def test_a_record_holds_with_a_run_that_was_resumed_and_says_so(resumed):
    assert held(resumed)
    found, (first, *others) = read_evidence(resumed), runs_of(resumed)
    assert [entry["event"] for entry in found.registry if entry["run_id"] == first.run_id] == [
        "start", "end", "resume", "resume", "end"]
    assert [step.step for step in first.steps] == list(range(1, STEPS + 1))
    assert [step.step for step in first.resumes[0].redone] == [9, 10, 11]
    assert [validation.step for validation in first.resumes[0].revalidated] == [10]
    assert all(len(run.resumes) == 0 for run in others)
    page = (resumed / "README.md").read_text()
    assert re.search(r"\nSeed 3000 was resumed at step 8 \(\d\d+ ms of lost work on the clock\)\.\n\n", page)
    assert page.count("resumed at step") == 1


def test_a_record_holds_with_a_run_that_was_killed_and_took_its_time_to_start_again(resumed):
    def change(events: list[dict]) -> None:
        events.remove(part(events, "end", resumed=False)[0])
        delay("setup", 60_000.0)(events)

    drop_lines(resumed, 1)
    forge(resumed, change)
    assert [entry["event"] for entry in read_evidence(resumed).registry][:4] == ["start", "resume", "resume", "end"]
    assert held(resumed)


RESUMED_CHEATS: dict[str, tuple] = {
    "another setting after the resume": (
        lambda events: part(events, "resume", True)[0].update(differences=["--dim 32 -> 64"]),
        r"resumed at step 8 with differences: \['--dim 32 -> 64'\]"),
    "a step that came out better the second time": (
        lambda events: part(events, "step", False)[-1].update(train_loss=9.0),
        r"step 11 had loss 9\.0 before the resume at 8 and 3\.\d+ after it"),
    "a validation that came out better the second time": (
        lambda events: part(events, "val", False)[-1].update(val_loss=9.0),
        r"validation 10 had loss 9\.0 before the resume at 8 and 3\.\d+ after it"),
    "a lost validation behind more training than is charged": (
        lambda events: part(events, "val", False)[-1].update(train_time_ms=5000.0),
        r"untimed work: the clock went from 5000 to \d+ ms at the resume"),
    "lost work off the clock": (set_back, r"untimed work: the clock went from \d+ to \d+ ms at the resume"),
    "no lost work": (lambda events: set_back(events, drop=True), "0 phases of lost work for 1 resumes",
                     "untimed work: 717 ms between"),
    "lost work that is untimed": (
        lambda events: [set_back(events), each("phase", name="lost", timed=False)(
            [event for event in events if event.get("name") == "lost"])],
        "phase 'lost' of 0 ms, timed: False", "the clock went from"),
    "time in no phase after the resume": (delay("validate", 1000.0), "untimed work: 1000 ms between the phases"),
    "a resume that is not told": (forget, "2 resumes in the registry, 0 others in the log", "untimed work: 717 ms"),
}  # fmt: skip


@pytest.mark.parametrize("cheat", RESUMED_CHEATS)
def test_a_record_with_a_resumed_run_is_caught_with(cheat, resumed):
    change, *patterns = RESUMED_CHEATS[cheat]
    forge(resumed, change)
    caught(resumed, *patterns)


def test_a_resume_that_is_in_the_log_alone_is_caught(resumed):
    drop_lines(resumed, 2, 3)
    forge(resumed)
    caught(resumed, "its lines in the registry are start end end", "0 resumes in the registry, 1 others in the log")


@pytest.mark.parametrize("value", [None, "9", [], -1, 1.5, 10**30])
def test_a_resume_of_any_shape_in_the_registry_is_a_failure_and_no_traceback(value, resumed):
    fields = {"run_id": runs_of(resumed)[0].run_id, "log_bytes": value, "log_sha256": sha256(b"")}
    register(resumed / "runs" / "registry.jsonl", "resume", **fields)
    caught(resumed, "edited: the log is not the one whose hash", "its end is not in the registry")


def test_a_log_that_was_edited_before_its_resume_is_caught_though_its_end_vouches_for_it(resumed):
    forge(resumed, lambda events: part(events, "step", False)[-1].update(tokens=1), stale=True)
    caught(resumed, "edited: the log is not the one whose hash")


def test_a_digit_of_a_loss_that_was_superseded_is_caught(resumed):
    first = runs_of(resumed)[0]
    loss = str(first.resumes[0].redone[-1].train_loss)
    edit(first.path, loss, loss[:-1] + str((int(loss[-1]) + 1) % 10))
    caught(resumed, "edited: the log is not the one whose hash", "step 11 had loss")


# ---------------------------------------------------------------------------------------------------------------------
# Cheats that really run


def test_a_run_before_the_claim_cannot_be_claimed_nor_its_seed_used_nor_its_lines_taken_out(tmp_path, data):
    run(data, tmp_path / "logs", seed=2001, target=TARGET)
    early = write_claim(tmp_path, "Early", 4, 2000)
    code, said = call("make", early, tmp_path / "logs")
    assert (code, "no run was started under the claim" in said) == (2, True)
    folder = make_record(tmp_path, data, "Few")
    caught(folder, "seed 2001 was run by .* outside the claim")
    registry = folder / "runs" / "registry.jsonl"
    registry.write_text("".join(registry.read_text().splitlines(keepends=True)[2:]))
    caught(folder, "line 1: .*a line was removed", "its start is not", "its end is not")


def step_untimed(session: Any, count: int = 1) -> None:
    for _ in range(count):
        loss = train_gpt.forward_backward(session, session.windows(3))
        train_gpt.optimizer_steps(session, session.steps_done | 1, loss)  # odd, so that Adam takes it too


def test_each_untimed_step_is_caught_but_for_one_in_each_validation_and_so_is_another_source(
    tmp_path, data, monkeypatch
):
    """Eight runs, each with a cheat of its own."""
    real, real_header = vars(train_gpt).copy(), train_gpt.Session.header
    other = shutil.copytree(ROOT / "optim", tmp_path / "other" / "optim").parent
    now = SimpleNamespace(seed=None, step=None)

    def train(session, run):
        now.seed = int(re.search(r"_s(\d+)_", run.log.run_id)[1])
        step_untimed(session, 4 * (now.seed == 2000))
        session.data.train.reset()
        return real["train"](session, run)

    def evaluate(session, run, step, windows):
        now.step = step
        step_untimed(session, now.seed == 2001)
        if phase := {2002: "tune", 2003: "checkpoint", 2004: "validate"}.get(now.seed):
            with run.ledger.phase(phase, timed=False):
                step_untimed(session)
        return real["evaluate"](session, run, step, windows)

    def validate(session, *rest):
        step_untimed(session, {(2005, 5): 7}.get((now.seed, now.step), now.seed == 2006))
        return real["validate"](session, *rest)

    def header(session, trial=None):
        of_another = {"source_sha256": source_hash(other)} if trial and trial.seed == 2007 else {}
        return real_header(session, trial) | of_another

    for name, cheat in (("train", train), ("evaluate", evaluate), ("validate", validate)):
        monkeypatch.setattr(train_gpt, name, cheat)
    monkeypatch.setattr(train_gpt.Session, "header", header)
    kept = RunLog.store_sources
    fooled = lambda log, root: kept(log, other if "_s2007_" in log.run_id else root)  # noqa: E731
    monkeypatch.setattr(RunLog, "store_sources", fooled)
    folder = make_record(tmp_path, data, "Cheats", n=8)
    patterns = {
        2000: "first loss 3.*, of a model that knows nothing 4.16",
        2001: "untimed work: 614 ms between the phases of training and validation",
        2002: "untimed work: phase 'tune' of 154 ms, timed: False",
        2003: "untimed work: phase 'checkpoint' of 154 ms, timed: False",
        2004: "untimed work: 8 phases of validation for 4 losses",
        2005: "untimed work: a validation of 1178 ms, (their median is 102|which takes more a token)",
        2007: f"source_sha256 {source_hash(other)[:12]}, not the claimed {source_hash(ROOT)[:12]}",
    }
    caught(folder, *patterns.values())
    for failure in find_failures(read_evidence(folder)):
        assert re.search(patterns[int(re.search(r"_s(\d+)_", failure.where.name)[1])], failure.what)


def test_a_run_id_that_leads_out_of_the_folder_is_refused(tmp_path, data, capsys):
    folder = make_record(tmp_path, data, "Few")
    write(tmp_path, "elsewhere.jsonl", "x")
    claim = read_evidence(folder).claim_id
    register(folder / "runs" / "registry.jsonl", "start", run_id="../../elsewhere", claim=claim)
    assert record.main(["make", str(folder), str(folder / "runs")]) == 2
    assert "run id '../../elsewhere' is no file name" in capsys.readouterr().err


def test_validation_documents_in_the_training_shards_are_caught(tmp_path, data):
    shards = shutil.copytree(data, tmp_path / "data")
    write_shard(shards / "s_train_0.bin", np.concatenate([documents(1, 300), documents(3, 30)]))  # 3 makes validation
    caught(make_record(tmp_path, shards, "Few"), r"validation documents in training: 1\.0, at most 0\.02")


# ---------------------------------------------------------------------------------------------------------------------
# All records together


def test_the_leaderboard_lists_records_in_order_and_failed_claims_and_changes_only_with_them(tmp_path, data, good):
    """Fourteen steps, then twelve, then twelve again; and three steps, which fail."""
    failed = make_record(tmp_path, data, "Short", steps=3)
    folders = {"Long": make_record(tmp_path, data, "Long", steps=14), "Good": None, "Again": None}
    for year, name in enumerate(folders, 2001):
        folder = folders[name] or shutil.copytree(good, tmp_path / "tiny" / f"2000-01-01_{name}")
        rewrite_claim(folder, name=name, created=f"{year}-01-01T00:00:00+00:00")
        forge(folder)
        assert held(folder)
    write_claim(tmp_path, "Planned", 4, 3000)
    code, said = call("verify", failed)
    assert (code, "verified; below 3.25 is NOT shown" in said) == (1, True)
    assert "is **not shown** by 4 runs" in (failed / "README.md").read_text()
    assert json.loads((failed / "record.json").read_text())["shown"] is False

    assert call("leaderboard", "--records", tmp_path)[0] == 0
    page, before = (tmp_path / "README.md").read_text(), contents(tmp_path)
    rows = re.findall(r"^\| (#\d|no record|not shown) \| \S+ \| \[(\w+)\].* \| (\d+) \| \d+ \|", page, re.M)
    places = {"Long": ("#1", "14"), "Good": ("#2", "12"), "Again": ("no record", "12"), "Short": ("not shown", "3")}
    assert rows == [(place, name, steps) for name, (place, steps) in places.items()]
    assert {f"tiny/{picture}.{kind}" for picture in ("timeline", "losses") for kind in ("svg", "png")} <= before.keys()
    assert call("leaderboard", "--records", tmp_path)[0] == 0
    assert contents(tmp_path) == before

    edit(failed / "README.md", "**not shown**", "shown")
    before = contents(tmp_path)
    code, said = call("leaderboard", "--records", tmp_path)
    assert (code, "NOT VERIFIED" in said, contents(tmp_path) == before) == (1, True, True)
