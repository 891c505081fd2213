"""Records from claim to leaderboard, and every way to cheat: what catches it, and what cannot."""

import hashlib
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_run
from scipy import stats
from small_record import (
    RULES,
    SOURCE,
    STEPS,
    TARGET,
    Events,
    forge,
    make_claim,
    read_logs,
    register,
    resume_at,
    write_logs,
    write_record,
)

import runtime.run
from claims.checks import find_failures
from claims.evidence import TRACKS, read_evidence
from claims.pages import differences
from claims.runs import Run
from claims.sources import Source, digest, pack, source_path
from runtime.jsonl import json_line
from scripts import record

LOSSES = 3.2 + 0.012 * np.random.default_rng(0).standard_normal(12)
Change = Callable[[Events], Any]


@pytest.fixture(scope="module", autouse=True)
def contest():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TRACKS, "tiny", RULES)
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def call(capsys, *words: object) -> tuple[int, str]:
    """Exit code and output of record.py."""
    capsys.readouterr()
    code = record.main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out + said.err


def make(folder: Path) -> int:
    return record.main(["make", str(folder)])


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Twelve runs of one claim, and the first four as a claim of four. No test changes them."""
    root = tmp_path_factory.mktemp("records")
    assert make(write_record(root / "twelve", make_claim(), list(LOSSES))) == 0
    assert make(write_record(root / "four", make_claim(n=4), list(LOSSES[:4]))) == 0
    return root


def copy(records: Path, name: str, to: Path) -> Path:
    return next((shutil.copytree(records / name, to / name) / "tiny").iterdir())


@pytest.fixture
def twelve(records, tmp_path):
    return copy(records, "twelve", tmp_path)


@pytest.fixture
def four(records, tmp_path):
    return copy(records, "four", tmp_path)


def caught(folder: Path, *patterns: str, pages: bool = True) -> None:
    """`verify` fails for what each pattern names, and for nothing else."""
    if pages:
        make(folder)
    evidence = read_evidence(folder)
    failures = [*find_failures(evidence), *differences(evidence)]
    for pattern in patterns:
        assert any(re.search(pattern, failure.what) for failure in failures), failures
    for failure in failures:
        assert any(re.search(pattern, failure.what) for pattern in patterns), failure
        assert all(failure), failure
    assert record.main(["verify", str(folder)]) == 1


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}


# ---- The whole path


def stop_at(step: int) -> Callable[..., None]:
    """`stepped` of a run, with a signal to this process after a step."""
    stepped = runtime.run.Run.stepped

    def stop(run: runtime.run.Run, *arguments: Any, **named: Any) -> None:
        stepped(run, *arguments, **named)
        if run.steps_done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


def test_real_runs_one_of_them_resumed_become_a_record_that_only_a_loaded_machines_clock_may_fail(
    tmp_path, capsys, monkeypatch
):
    """Claim, four runs of the trainer, record, verification: what no synthetic log can show."""
    data = small_run.write_data(tmp_path / "data")
    tokens = small_run.documents(3, 30).astype(np.uint16).tobytes()
    rules = RULES._replace(val_sha256=hashlib.sha256(tokens).hexdigest()[:16])
    monkeypatch.setitem(TRACKS, "tiny", rules)
    sizes = small_run.SIZES | {"target": TARGET}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    code, said = call(capsys, "claim", "Real", "--n", 4, "--seed", 7, "--about", "Why.",
                      "--records", tmp_path / "records", "--", *flags)
    assert code == 0, said
    assert "commit it with records/sources, then make its runs:" in said
    folder = next((tmp_path / "records" / "tiny").glob("*_Real"))
    logs, claim = tmp_path / "logs", folder / "claim.json"
    flags = {"claim": claim, "seed": 7, "trials": 4, "target": TARGET, "resume": "auto"}
    with monkeypatch.context() as patch:
        patch.setattr(runtime.run.Run, "stepped", stop_at(8))
        assert small_run.run(data, logs, **flags).code == 128 + signal.SIGTERM
    outcome = small_run.run(data, logs, **flags)
    assert outcome.code == 0, outcome.err
    code, said = call(capsys, "make", folder, logs)
    page = (folder / "README.md").read_text()
    assert re.search(r"\nSeed 7 was resumed at step \d+ \(0 ms .*\); it counts\.\n", page), page
    failures = [failure.what for failure in find_failures(read_evidence(folder))]
    assert [what for what in failures if not what.startswith("untimed work:")] == []
    assert len(read_evidence(folder).complete) == 4
    assert code == bool(failures), said


def test_making_a_record_again_changes_nothing(twelve, capsys):
    before = contents(twelve)
    for logs in ([], [twelve / "runs"]):
        code, said = call(capsys, "make", twelve, *logs)
        assert code == 0, said
        assert contents(twelve) == before
    code, said = call(capsys, "verify", twelve)
    assert (code, said.count("\n")) == (0, 1)
    assert re.search(r"verified: below 3\.25 with a mean loss of 3\.\d{6} in 12 runs", said)


def test_every_number_of_the_record_is_scipys_on_the_logs(twelve):
    logs = [segments[0] for segments in read_logs(twelve)]
    losses = [events[-1]["val_loss"] for events in logs]
    seconds = [events[-1]["train_time_ms"] / 1000 for events in logs]
    test, sd = stats.ttest_1samp(losses, TARGET, alternative="less"), stats.tstd(losses)
    bound = test.confidence_interval(0.99).high
    found = json.loads((twelve / "record.json").read_text())
    page = (twelve / "README.md").read_text()
    truth = {"n": 12, "mean": np.mean(losses), "sd": sd, "t": test.statistic, "p": test.pvalue,
             "upper99": bound, "level": 0.01, "target": TARGET, "steps": STEPS}
    assert {name: found[name] for name in truth} == pytest.approx(truth, rel=1e-9)
    assert found["train_time_ms"]["median"] == pytest.approx(np.median(seconds) * 1000)
    pairs = [(run["seed"], run["val_loss"]) for run in found["runs"]]
    assert pairs == list(enumerate(losses, 1000))
    files = sorted((twelve / "runs").glob("2*"))
    assert [run["sha256"] for run in found["runs"]] == [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    assert "**Shown**: the mean validation loss is below 3.25\n" in page
    assert f"(12 runs, p = {test.pvalue:.3g}, level 0.01)" in page
    row = f"| 12 | {np.mean(losses):.6f} | {sd:.6f} | {test.statistic:.4f} | {test.pvalue:.3g} |"
    assert f"{row} {bound:.5f} |" in page
    for seed, loss, second in zip(range(1000, 1012), losses, seconds, strict=True):
        assert f"| {seed} | {loss:.6f} | {second:.3f} |" in page
    assert "| `train` | yes | 12,000 |" in page


@pytest.mark.parametrize(
    ("words", "config", "sentence"),
    [
        (["Few", "--n", "3"], {}, "n = 3 must be 4 to 10000"),
        (["Few", "--n", "8", "--looks", "4,6"], {}, "looks must rise"),
        (["Few"], {"target": 3.3}, "--target 3.3: that of the track is 3.25"),
        (["few"], {}, "'few' is no CamelName"),
        (["../Few"], {}, "'../Few' is no CamelName"),
        (["Good"], {}, "exists: a claim is not written twice"),
        (["Few", "--about", "two\nlines"], {}, "about must be one line"),
    ],
)
def test_a_claim_that_breaks_a_rule_is_not_written(
    words, config, sentence, four, tmp_path, capsys, monkeypatch
):
    root = four.parents[1]
    today = f"{record.datetime.now(record.UTC):%Y-%m-%d}_Good"
    shutil.copytree(four, four.with_name(today))
    monkeypatch.setattr(record, "ask_trainer", lambda flags: make_claim().config | config)
    before = contents(root)
    about = [] if "--about" in words else ["--about", "x"]
    code, said = call(capsys, "claim", *words, *about, "--records", root)
    assert code == 2
    assert sentence in said, said
    assert contents(root) == before


def test_runs_of_two_machines_are_one_record(tmp_path, capsys):
    folder = write_record(tmp_path / "records", make_claim(n=4), list(LOSSES[:4]))
    runs = read_logs(folder)
    shutil.rmtree(folder / "runs")
    for name, part in (("here", runs[:1]), ("there", runs[2:])):
        write_logs(tmp_path / name, part)
    here, there = (tmp_path / name / "runs" for name in ("here", "there"))
    code, said = call(capsys, "make", folder, here)
    assert code == 1
    assert "seeds [1001, 1002, 1003] have no run, and 1 runs are no planned look" in said
    write_logs(tmp_path / "here", runs[:2])  # its registry has grown
    assert call(capsys, "make", folder, here, there)[0] == 0
    names = sorted(path.name for path in folder.glob("runs/registry*"))
    assert names == ["registry.jsonl", "registry_2.jsonl"]


def test_an_early_look_counts_at_the_level_that_was_planned_for_it(tmp_path):
    """Two looks at 5 and 10 runs keep 0.01 together when each is at 0.00522."""
    claim = make_claim(n=10, looks=[5, 10])
    for n, held in ((10, True), (5, True), (4, False)):
        folder = write_record(tmp_path / str(n), claim, list(LOSSES[:n]))
        assert (make(folder) == 0) == held
        assert read_evidence(folder).level == pytest.approx(0.00522, rel=0.05)
    caught(folder, r"missing: seeds \[1004, .* have no run, and 4 runs are no planned look")


# ---- Cheats with files

ZERO = "0" * 64


def write(folder: Path, name: str, text: str) -> None:
    """A file more, or more in a file."""
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("a") as file:
        file.write(text)


def edit(path: Path, old: str, new: str, count: int = 1) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))


def cut(folder: Path, runs: list[Run], *, lines: bool = True) -> None:
    """Take runs out of a record, with their lines in the registry or without them."""
    registry = folder / "runs" / "registry.jsonl"
    for out in runs:
        out.path.unlink()
        kept = [line for line in registry.read_text().splitlines(True) if out.run_id not in line]
        if lines:
            registry.write_text("".join(kept))


def runs_of(folder: Path) -> list[Run]:
    return read_evidence(folder).complete


def best(folder: Path) -> list[Run]:
    return sorted(runs_of(folder), key=lambda run: run.final_loss)


def rewrite_claim(folder: Path, **changed: object) -> None:
    path = folder / "claim.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def forge_claim(folder: Path, **changed: object) -> None:
    rewrite_claim(folder, **changed)
    forge(folder)


def claim_only(folder: Path, runs: list[Run]) -> None:
    """Forge a record of some of its runs."""
    names = {run.run_id for run in runs}
    cut(folder, [run for run in runs_of(folder) if run.run_id not in names])
    forge_claim(folder, n=len(runs), seeds=sorted(run.seed for run in runs), looks=[len(runs)])


def edit_loss(path: Path, count: int = 2) -> None:
    """The third decimal of the last loss: in the validation, and with 2 in the end too."""
    loss = str(small_run.read_events(path)[-1]["val_loss"])
    edit(path, loss, str(float(loss) - 0.001)[: len(loss)], count)


def end_again(folder: Path) -> None:
    """An edited log, and a second end line that vouches for it: no line before it changes."""
    run = runs_of(folder)[0]
    edit_loss(run.path)
    sha256 = hashlib.sha256(run.path.read_bytes()).hexdigest()
    register(folder / "runs" / "registry.jsonl", "end", run_id=run.run_id, log_sha256=sha256)


def try_before(folder: Path, track: str) -> None:
    """A claimed seed in the registry of another log folder, with other settings and no claim."""
    register(folder / "runs" / "registry_2.jsonl", "start", time="2020-01-01T00:00:00+00:00",
             run_id="early", track=track, seed=1000, config_sha256=ZERO, claim=None)


def start_again(folder: Path) -> None:
    """As a run does that is killed before its first step."""
    runs = read_logs(folder)
    runs.append([[runs[3][0][0] | {"run_id": "20991231_tiny_abcdef"}]])
    write_logs(folder, runs)


def cut_off_end(folder: Path) -> None:
    for path in (runs_of(folder)[-1].path, folder / "runs" / "registry.jsonl"):
        path.write_text("".join(path.read_text().splitlines(True)[:-1]))


def replace_worst(folder: Path) -> None:
    """By the best run under another run id and seed."""
    first, *_, worst = best(folder)
    events = small_run.read_events(first.path)
    events[0] |= {"seed": worst.seed, "trial": worst.trial, "run_id": "x"}
    (folder / "runs" / "x.jsonl").write_bytes(b"".join(map(json_line, events)))
    worst.path.unlink()


def forge_source(folder: Path, line: str) -> None:
    files = SOURCE.files | {"train_gpt.py": f"\n{line}\n".encode()}
    path = source_path(folder.parents[1], digest(files))
    path.write_bytes(pack(Source(files, None)))
    forge_claim(folder, source_sha256=digest(files))


def edit_source(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = source_path(folder.parents[1], digest(SOURCE.files))
    path.write_bytes(change(path.read_bytes()))


def put(value: object, *path: str) -> Change:
    """Set a field of the header."""
    return lambda events: reduce(getitem, path[:-1], events[0]).update({path[-1]: value})


def each(kind: str, at: slice = slice(None), **fields: object) -> Change:
    """Set fields of the events of a kind."""
    return lambda events: [event.update(fields) for event in of_kind(events, kind)[at]]


def of_kind(events: Events, kind: str) -> Events:
    return [event for event in events if event["event"] == kind]


def without(kind: str, at: int) -> Change:
    return lambda events: events.remove(of_kind(events, kind)[at])


def learn_before(events: Events) -> None:
    for event in events:
        event |= {name: event[name] - 1 for name in ("val_loss", "train_loss") if name in event}


def train_longer(events: Events) -> None:
    """Twelve steps more, at the end, that take no time."""
    events[-1:-1] = [event | {"step": event["step"] + STEPS} for event in of_kind(events, "step")]
    each("val", total_steps=2 * STEPS)(events)
    each("val", slice(-1, None), step=2 * STEPS)(events)


def delay(events: Events) -> None:
    """A step's time between two phases, in neither."""
    third = of_kind(events, "phase")[5]
    for event in events[events.index(third) - 1 :]:
        event["t_ms"] += 1000.0


CHAIN = ("unreadable: .*registry.jsonl, line", "its start is not in", "its end is not in")
FIRST_TRAIN, FIRST_VALIDATE = slice(4, 5), slice(3, 4)  # among the phases
CHEATS: dict[str, tuple] = {  # of the twelve runs of a claim
    "the best 8 of 12": (lambda f: cut(f, best(f)[8:], lines=False),
                         "missing: run .* was started", "missing: seeds"),
    "the best 8 of 12 under a claim of 8": (
        lambda f: (cut(f, best(f)[8:], lines=False),
                   rewrite_claim(f, n=8, seeds=[run.seed for run in best(f)], looks=[8])),
        "extra: the run was not started", "missing: ", r"seed \d+ was run by .* outside the claim"),
    "8 of 12 and no lines of the last": (lambda f: cut(f, runs_of(f)[8:]),
                                         r"missing: seeds \[1008, 1009, .* 8 runs"),
    "8 of 12 and no lines of the others": (lambda f: cut(f, runs_of(f)[3:7]), *CHAIN,
                                           "missing: seeds"),
} | {  # of any run
    "a killed run": (start_again, "not counted: no end line", "duplicate: .* has the seed"),
    "a run without its end": (cut_off_end, "not counted: no end line", "missing: .* 3 runs are no"),
    "a copied log": (lambda f: shutil.copy(runs_of(f)[0].path, f / "runs" / "20991231.jsonl"),
                     *(f"duplicate: .* has the {kind}" for kind in ("run id", "seed", "losses"))),
    "a copy with another run id and seed": (
        replace_worst, "duplicate: .* has the losses", "missing: run .* was started",
        "its start is not in the registry", "its end is not in the registry"),
    "a digit of a loss": (lambda f: edit_loss(runs_of(f)[0].path), "edited: the log is not"),
    "a digit of one loss": (lambda f: edit_loss(runs_of(f)[0].path, 1), "edited: ",
                            "not counted: the end line has another", "missing: "),
    "an edited log with an end line of its own": (
        end_again, "its lines in the registry are start end end, which no "),
    "a seed that was tried with other settings": (
        lambda f: try_before(f, "tiny"), "seed 1000 was run by early outside the claim"),
    "a seed that was tried as another track": (
        lambda f: try_before(f, "short"), "seed 1000 was run by early outside the claim"),
    "a later claim": (lambda f: forge_claim(f, created="2999-01-01T00:00:00+00:00"),
                      "started .*, before the claim, 2999-01-01"),
    "another target": (lambda f: forge_claim(f, target=3.5),
                       "target 3.5 at alpha 0.01, not 3.25 at 0.01", "target 3.25, not the"),
    "another level": (lambda f: forge_claim(f, alpha=0.05), "target 3.25 at alpha 0.05, not 3.25"),
    "an unknown track": (lambda f: forge_claim(f, track="huge"), "track 'huge' has no rules",
                         "track tiny, not the claimed huge"),
    "settings not of the claim": (
        lambda f: forge_claim(f, config={"steps": STEPS, "batch_tokens": 512}),
        "config_sha256 is not the hash", "track is None, fixed at 'tiny'"),
    "a longer source": (lambda f: edit_source(f, lambda text: text.replace(b"1.0\n", b"1.0#\n")),
                        "is not the source .*not as record.py"),
    "a source more": (lambda f: edit_source(f, lambda text: text + b"file x.py, 0 bytes\n\n"),
                      "is not the source .*not as record.py"),
    "a source less": (lambda f: edit_source(f, lambda text: text[: text.index(b"file train_gpt")]),
                      "is not the source .*not as record.py"),
    "no source": (lambda f: source_path(f.parents[1], digest(SOURCE.files)).unlink(),
                  "is not the source .*there is no regular file"),
} | {
    f"a file {name}": (lambda f, name=name: write(f, name, "x"), "unexpected file")
    for name in ("weights.bin", ".hidden", "runs/notes.txt", "source/data.bin", "runs/more/a.jsonl")
} | {
    line: (lambda f, line=line: forge_source(f, line), "forbidden compiler setting")
    for line in (
        "torch._inductor.config.coordinate_descent_tuning = True",
        'torch.compile(model, mode="max-autotune")', "torch.compile(model, options={})",
        "torch._inductor.config.epilogue_fusion = False", "from torch._inductor import config",
        'os.environ["TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"] = "1"',
        'torch.compile(\n    wrap(model), dynamic=False, mode="reduce-overhead"\n)',
    )
} | {  # of a log, forged so well that only the rule itself is left
    name: (lambda f, change=change: forge(f, change), *patterns) for name, (change, *patterns) in {
        "another claim": (put(ZERO, "claim"), "extra: the run was", "missing: ", "seed 1000 was"),
        "another torch": (put("2.0", "env", "torch"), "torch differs between runs"),
        "another dtype": (put("float32", "env", "dtype"), "dtype differs between runs"),
        "another number of ranks": (put(4, "world_size"), "ranks differs between runs"),
        "another track": (put("medium", "track"), "track medium, not the claimed tiny"),
        "another source": (put(ZERO, "source_sha256"), "source_sha256 0{12}, not the claimed"),
        "another configuration": (put(ZERO, "config_sha256"), "config_sha256 (0{12}, not|is not)"),
        "settings other than their hash": (put(24, "config", "steps"), "config_sha256 is not the"),
        "more steps than claimed": (train_longer, "24 steps, not the claimed 12"),
        "fewer validation tokens": (put(512, "data", "val_tokens"), "validated on 512 tokens, not"),
        "other validation data": (put(ZERO, "data", "val_sha256"), "val_sha256 differs",
                                  "val_sha256 0{16}, not aa"),
        "other training data": (put(ZERO, "data", "train_sha256"), "train_sha256 differs"),
        "validation documents": (put(0.03, "checks", "overlap"), "documents in training: 0.03"),
        "no overlap check": (put(None, "checks", "overlap"), "documents in training: None"),
        "an overlap of nan": (put("nan", "checks", "overlap"), "documents in training: nan"),
        "an overlap of false": (put(False, "checks", "overlap"), "documents in training: False"),
        "no causality check": (put(None, "checks", "causality"), "check causality is None"),
        "sight of the future": (put(False, "checks", "causality"), "check causality is False"),
        "no check of the warm-up": (put(None, "checks", "warmup_restored"), "restored is None"),
        "state left of the warm-up": (put(False, "checks", "warmup_restored"), "restored is False"),
        "a model that knows something": (learn_before, "first loss 3.158"),
        "a model of which nobody knows": (each("val", slice(1), val_loss="nan"), "first loss nan"),
        "compiler settings": (put(["inductor.x = 1"], "env", "compile_flags"), "inductor.x"),
        "no compiler settings": (put(None, "env", "compile_flags"), "compiler settings unknown"),
        "an unknown phase": (each("phase", FIRST_TRAIN, name="tune"), "phase 'tune'"),
        "training off the clock": (each("phase", FIRST_TRAIN, timed=False), "'train' .*: False",
                                   "7000 ms in timed phases"),
        "a checkpoint": (each("phase", FIRST_VALIDATE, name="checkpoint"), "phase 'checkpoint'",
                         "3 validations for 4"),
        "less time than its phases": (each("val", train_time_ms=1000), "timed phases, 1000 ms in",
                                      "dearer"),
        "no times": (each("phase", FIRST_TRAIN, ms="nan"), "nan ms in timed", "nan ms between"),
        "time in no phase": (delay, "untimed work: 1000 ms between the phases"),
        "a clock that runs backwards": (each("phase", slice(-1, None), t_ms=0.0), "inf ms between"),
        "training in a validation": (each("phase", FIRST_VALIDATE, ms=1900.0), "several times"),
        "training in every validation": (
            lambda events: [event.update(ms=2100.0) for event in events
                            if event.get("name") == "validate"],
            "2100 ms, a token dearer than training"),
        "a step left out": (without("step", 5), "11 of 12 steps are in the log"),
        "a validation left out": (without("val", 1), "4 validations for 3 losses"),
        "an error at the end": (each("end", status="error"), "with status error", "missing: "),
        "two ends": (lambda events: events.append(events[-1]), "2 end lines", "missing: "),
    }.items()
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_record_is_caught_with(cheat, records, tmp_path):
    folder = copy(records, "twelve" if "of 12" in cheat else "four", tmp_path)
    change, *patterns = CHEATS[cheat]
    change(folder)
    caught(folder, *patterns)


def test_what_is_forged_throughout_is_not_caught_so_claims_are_published_before_their_runs(twelve):
    claim_only(twelve, best(twelve)[:8])
    assert make(twelve) == 0


def test_a_loss_edited_in_log_and_registry_is_caught_by_the_next_line_which_the_last_lacks(four):
    def edit_throughout(path: Path) -> None:
        before = hashlib.sha256(path.read_bytes()).hexdigest()
        edit_loss(path)
        after = hashlib.sha256(path.read_bytes()).hexdigest()
        edit(four / "runs" / "registry.jsonl", before, after)

    edit_throughout(runs_of(four)[3].path)
    assert make(four) == 0
    edit_throughout(runs_of(four)[2].path)
    caught(four, *CHAIN)


@pytest.mark.parametrize("name", ["README.md", "record.json"])
def test_one_digit_of_a_loss_in_a_page_is_caught_in_its_line(name, four):
    loss = f"{runs_of(four)[2].final_loss:.6f}"[:-1]
    lines = (four / name).read_text().splitlines()
    line = 1 + next(i for i, line in enumerate(lines) if loss in line)
    edit(four / name, loss, loss[:-1] + str((int(loss[-1]) + 1) % 10))
    caught(four, f"line {line} is not what the logs say", pages=False)
    (four / name).unlink()
    caught(four, "missing", pages=False)


def test_a_page_with_a_line_separator_more_is_caught(four):
    edit(four / "README.md", "**Shown**", "**Shown**\u2028")
    caught(four, "line 5 is not what the logs say", pages=False)


@pytest.mark.parametrize("name", ["README.md", "runs", "runs/registry.jsonl"])
def test_a_link_in_place_of_a_file_or_folder_is_caught(name, four, capsys):
    (four / name).symlink_to((four / name).rename(four.parent / "elsewhere"))
    code, said = call(capsys, "verify", four)
    assert (code, "unexpected file" in said) == (1, True)


SHAPED = ("data", "checks", "config", "env", "world_size", "seed", "claim", "run_id")


@pytest.mark.parametrize("name", SHAPED)
def test_a_header_of_any_shape_is_a_failure_and_no_traceback(name, four, capsys):
    for value in (None, 1.5, "x", []):
        forge(four, put(value, name))
        assert call(capsys, "make", four)[0] == 1


# ---- Runs that were resumed


def resume_first(folder: Path, step: int, saved: bool = True) -> None:
    runs = read_logs(folder)
    write_logs(folder, [resume_at(runs[0][0], step, saved), *runs[1:]])


def test_a_run_that_was_stopped_saved_and_resumed_counts_and_the_page_says_so(four):
    resume_first(four, 8)
    assert make(four) == 0
    page = (four / "README.md").read_text()
    assert "Seed 1000 was resumed at step 8 (0 ms of lost work on the clock); it counts.\n" in page


def test_a_run_that_repeats_steps_is_shown_and_not_counted(four):
    resume_first(four, 8, saved=False)
    caught(four, "not counted: .*steps after 8 were done twice", "missing: .* 3 runs")
    page = (four / "README.md").read_text()
    assert "Seed 1000 was resumed at step 8" in page
    assert "| 1000 |" not in page


def set_back(events: Events) -> None:
    """The training time to zero, as if the first segment had not been."""
    for event in events:
        if "train_time_ms" in event:
            event["train_time_ms"] -= 8000.0


def resume_again(folder: Path) -> None:
    """Twice from one checkpoint; the worse outcome was deleted."""
    run = runs_of(folder)[0]
    registry = folder / "runs" / "registry.jsonl"
    register(registry, "resume", run_id=run.run_id, log_sha256=run.segments[0].sha256)
    register(registry, "end", run_id=run.run_id, log_sha256=run.segments[1].sha256)


def drop_lines(folder: Path, event: str) -> None:
    registry = folder / "runs" / "registry.jsonl"
    lines = registry.read_text().splitlines(True)
    registry.write_text("".join(line for line in lines if f'"event": "{event}"' not in line))


RESUMED_CHEATS: dict[str, tuple] = {
    "another setting after the resume": (
        lambda f: forge(f, lambda events: events[1].update(differences=["--dim 32 -> 64"]), 1),
        r"resumed at step 8 with \['--dim 32 -> 64'\] changed"),
    "a first segment that was edited": (
        lambda f: edit(runs_of(f)[0].path, '"tokens": 512,', '"tokens": 513,'),
        "edited: .*2.jsonl names another segment before it"),
    "a second segment that begins elsewhere": (
        lambda f: forge(f, lambda events: events[0].update(after_step=7), 1),
        r"edited: its segments begin after steps \[7\]", "11 of 12 steps", "9000 ms in"),
    "a clock that was set back at the resume": (
        lambda f: forge(f, set_back, 1), "not counted: less train time", "missing: "),
    "lost work off the clock": (
        lambda f: forge(f, lambda events: events[2].update(name="lost"), 1),
        "phase 'lost' of 3000 ms, timed: False"),
    "a second segment that was edited": (
        lambda f: edit(runs_of(f)[0].segments[1].path, '"stage": 0,', '"stage": 1,'),
        "edited: the log is not the one"),
    "a second segment that was made again": (
        resume_again, "2 resumes in the registry, 1 others in the log"),
    "a resume that the registry does not know": (
        lambda f: drop_lines(f, "resume"), *CHAIN, "resumes in the registry"),
    "no second segment": (lambda f: runs_of(f)[0].segments[1].path.unlink(),
                          "not counted: ended with status interrupted", "missing: ",
                          "edited: ", "1 resumes in the registry, 0 others"),
    "time in no phase after the resume": (
        lambda f: forge(f, lambda events: [event.update(t_ms=event["t_ms"] + 1000)
                                           for event in events[-3:]], 1),
        "1000 ms between the phases"),
}


@pytest.mark.parametrize("cheat", RESUMED_CHEATS)
def test_a_record_with_a_resumed_run_is_caught_with(cheat, four):
    resume_first(four, 8)
    change, *patterns = RESUMED_CHEATS[cheat]
    change(four)
    caught(four, *patterns)


# ---- All records together


def test_the_leaderboard_lists_records_in_order_and_failed_claims_and_changes_only_with_them(
    tmp_path, capsys
):
    """Fourteen steps, then twelve, then twelve again; and three steps, which fail."""
    losses = list(LOSSES[:4])
    for year, (name, steps) in enumerate((("Long", 14), ("Good", 12), ("Again", 12)), 2001):
        claim = make_claim(name, 4, config={"steps": steps}, created=f"{year}-01-01T00:00:00+00:00")
        assert make(write_record(tmp_path, claim, losses)) == 0
    claim = make_claim("Short", 4, config={"steps": 3})
    failed = write_record(tmp_path, claim, [loss + 1 for loss in losses])
    assert make(failed) == 1
    write_record(tmp_path, make_claim("Planned", 4, 3000), [])
    shutil.rmtree(next(tmp_path.glob("tiny/*_Planned")) / "runs", ignore_errors=True)
    code, said = call(capsys, "verify", failed)
    assert (code, "verified, and NOT shown" in said) == (1, True)
    assert "**Not shown**: the mean" in (failed / "README.md").read_text()
    assert json.loads((failed / "record.json").read_text())["shown"] is False
    assert "The source is that of the claim before it, Again." in (failed / "README.md").read_text()

    assert call(capsys, "leaderboard", "--records", tmp_path)[0] == 0
    page, before = (tmp_path / "README.md").read_text(), contents(tmp_path)
    pattern = r"^\| (#\d|no record|not shown) \| \S+ \| \[(\w+)\].* \| (\d+) \| \d+ \|"
    rows = re.findall(pattern, page, re.M)
    assert rows == [("#1", "Long", "14"), ("#2", "Good", "12"), ("no record", "Again", "12"),
                    ("not shown", "Short", "3")]
    assert "tiny/losses.svg" in before
    assert call(capsys, "leaderboard", "--records", tmp_path)[0] == 0
    assert contents(tmp_path) == before

    edit(failed / "README.md", "**Not shown**", "**Shown**")
    before = contents(tmp_path)
    code, said = call(capsys, "leaderboard", "--records", tmp_path)
    assert (code, "NOT VERIFIED" in said, contents(tmp_path) == before) == (1, True, True)


def test_a_page_shows_the_diff_from_the_claim_before_and_no_line_of_it_leaves_its_block(tmp_path):
    first = make_claim("First", 4, created="2025-01-01T00:00:00+00:00")
    make(write_record(tmp_path, first, list(LOSSES[:4])))
    files = SOURCE.files | {"optim/muon.py": b"````\n</details><b>\x1b[2J\n"}
    claim = make_claim("Second", 4, source_sha256=digest(files))
    folder = write_record(tmp_path, claim, list(LOSSES[:4]))
    source_path(tmp_path, digest(files)).write_bytes(pack(Source(files, None)))
    assert make(folder) == 0
    page = (folder / "README.md").read_text()
    assert "The diff from the claim before it, First, has 7 lines." in page
    block = page.partition("`````diff\n")[2].partition("\n`````\n")[0]
    changed = ["-step:1/2 val_loss:1.0", "+````", "+</details><b>\\x1b[2J", " "]
    assert block.splitlines()[3:] == changed


def test_the_words_of_a_claim_cannot_pass_for_a_part_of_the_page(tmp_path):
    about = "x <!-- **Shown**: p | [a](b) ` &lt;"
    folder = write_record(tmp_path, make_claim(n=4, about=about), list(LOSSES[:4]))
    make(folder)
    page = (folder / "README.md").read_text()
    assert r"> x \<!-- \*\*Shown\*\*: p \| \[a\](b) \` \&lt;" in page
    assert math.isclose(read_evidence(folder).result.mean, LOSSES[:4].mean())
