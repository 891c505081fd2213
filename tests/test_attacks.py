"""Attacks and accidents: what an optimist's habits and source do to a record, and what is named.

The tables are the data: each row changes one record, and `record.py verify` must say what its
patterns find, and nothing else. tests/test_questions.py has the sources that lie about losses,
tests/test_rule.py the model that never copies, tests/test_claim_history.py the dates.
"""

import math
import re
from collections.abc import Callable
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import small_record
import small_run
from small_record import BATCH, CONFIG, Events, call, forge, read_logs, register, write_logs

from claims.record import TRACKS, pack, read_evidence, source_path
from claims.runs import Run
from runtime.jsonl import json_line
from runtime.source import digest
from scripts import record

ZERO = "0" * 64
Change = Callable[[Events], Any]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A record of six runs."""
    monkeypatch.setitem(TRACKS, "tiny", small_record.RULES)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    claim, losses = small_record.make_claim(n=6), small_record.LOSSES[:6]
    return small_record.write_record(tmp_path, claim, losses)


def caught(folder: Path, capsys, *patterns: str) -> None:
    """`verify` fails for what each pattern names, and for nothing else."""
    call(capsys, "make", folder)
    code, said = call(capsys, "verify", folder)
    assert code == (2 if said.startswith("error: ") else 1), said
    said = said.replace(f"{folder}: ", "error: ")
    failures = re.findall("^error: (?!NOT VERIFIED)(.*)", said, re.M)
    for pattern in patterns:
        assert any(re.search(pattern, what) for what in failures), said
    for what in failures:
        assert any(re.search(pattern, what) for pattern in patterns), what


def runs_of(folder: Path) -> list[Run]:
    return read_evidence(folder).complete


def best(folder: Path) -> list[Run]:
    return sorted(runs_of(folder), key=lambda run: run.final_loss)


# ---- What is done to the files of a record


def keep_best(folder: Path) -> None:
    for run in best(folder)[4:]:
        run.path.unlink()


def keep_best_and_claim_them(folder: Path) -> None:
    keep_best(folder)
    small_record.rewrite_claim(folder, n=4, seeds=[run.seed for run in best(folder)], looks=[4])


def cut_with_registry(folder: Path) -> None:
    """Delete two runs in the middle, and their lines in the registry."""
    registry = folder / "runs" / "registry.jsonl"
    for out in runs_of(folder)[2:4]:
        out.path.unlink()
        kept = [line for line in registry.read_text().splitlines(True) if out.run_id not in line]
        registry.write_text("".join(kept))


def edit_loss(folder: Path) -> None:
    """The third decimal of the last loss, in the validation and at the end."""
    path = runs_of(folder)[0].path
    loss = str(small_run.read_events(path)[-1]["val_loss"])
    path.write_text(path.read_text().replace(loss, str(float(loss) - 0.001)[: len(loss)]))


def try_before(folder: Path) -> None:
    """A claimed seed in the registry of another log folder, on another track and without claim."""
    early = {"run_id": "early", "seed": 1000, "time": "2020-01-01T00:00:00+00:00"}
    facts = {"track": "short", "config_sha256": ZERO, "claim": None}
    register(folder / "runs" / "registry_2.jsonl", "start", **early, **facts)


def start_again(folder: Path) -> None:
    """As a run does that is killed before its first step."""
    runs = read_logs(folder)
    runs.append([[runs[3][0][0] | {"run_id": "20991231_tiny_abcdef"}]])
    write_logs(folder, runs)


def replace_worst(folder: Path) -> None:
    """By the best run under another run id and seed."""
    first, *_, worst = best(folder)
    events = small_run.read_events(first.path)
    events[0] |= {"seed": worst.seed, "trial": worst.header["trial"], "run_id": "x"}
    (folder / "runs" / "x.jsonl").write_bytes(b"".join(map(json_line, events)))
    worst.path.unlink()


def forge_claim(folder: Path, **changed: object) -> None:
    small_record.rewrite_claim(folder, **changed)
    forge(folder)


def forge_source(folder: Path, line: str) -> None:
    files = small_record.SOURCE | {"train_gpt.py": f"\n{line}\n".encode()}
    path = source_path(folder.parents[1], digest(files))
    path.write_bytes(pack(files))
    forge_claim(folder, source_sha256=digest(files))


def edit_source(folder: Path) -> None:
    path = source_path(folder.parents[1], digest(small_record.SOURCE))
    path.write_bytes(path.read_bytes().replace(b"1.0\n", b"2.0\n"))


HABITS: dict[str, tuple] = {
    "the best 4 of 6": (keep_best, "missing: run .* was started", "missing: seeds"),
    "the best 4 of 6 under a claim of 4": (
        keep_best_and_claim_them, "extra: the run was not started", "missing: "),
    "runs deleted with their lines": (cut_with_registry, r"registry.jsonl, line \d+: it names"),
    "a run that was killed": (start_again, "not counted: no end line", "repeats the seed 1003 of"),
    "a run copied under another seed": (
        replace_worst, "repeats the training losses of", "missing: run .* was started",
        "missing: .* 5 of 6 runs", "its start is not in the registry", "its end is not in"),
    "a loss lower by 0.001 in its log": (edit_loss, "edited: the log is not"),
    "a seed that was tried before": (try_before, "seed 1000 was run by early outside the claim"),
    "a claim written after its runs": (
        partial(forge_claim, created="2999-01-01T00:00:00+00:00"),
        "started .*, before the claim, 2999-01-01", "its folder is"),
    "another target": (
        partial(forge_claim, target=3.5),
        "target 3.5 at alpha 0.01, not 3.25 at 0.01", "target 3.25, not the claimed 3.5"),
    "a setting that the track fixes": (
        partial(forge_claim, config=CONFIG | {"vocab_size": 32}),
        "vocab_size is 32, fixed at 64 on this track", "config_sha256 is not the hash"),
    "a source edited after the runs": (edit_source, "source is not as record.py claim wrote it"),
    "tuned compilation": (
        partial(forge_source, line='torch.compile(\n    wrap(model), mode="max-autotune"\n)'),
        "forbidden compiler setting"),
    "a compiler setting by import": (
        partial(forge_source, line="from torch._inductor import config"), "forbidden compiler"),
}  # fmt: skip


@pytest.mark.parametrize("habit", HABITS)
def test_a_record_is_caught_with(habit, folder, capsys):
    change, *patterns = HABITS[habit]
    change(folder)
    caught(folder, capsys, *patterns)


# ---- What a source or a machine does to a run: its log says so, whatever the source meant


def put(value: object, *path: str) -> Change:
    """Set a field of the header."""
    return lambda events: reduce(getitem, path[:-1], events[0]).update({path[-1]: value})


def of_kind(events: Events, kind: str) -> Events:
    return [event for event in events if event["event"] == kind]


def each(kind: str, at: slice = slice(None), **fields: object) -> Change:
    """Set fields of the events of a kind."""
    return lambda events: [event.update(fields) for event in of_kind(events, kind)[at]]


def checked(name: str, value: object) -> Change:
    """A value of a check of the trained model."""
    return lambda events: events[-1]["checks"].update({name: value})


def learn_before(events: Events) -> None:
    for event in events:
        event |= {name: event[name] - 1 for name in ("val_loss", "train_loss") if name in event}


def double(events: Events) -> None:
    events[0]["train_tokens"] *= 2
    for event in of_kind(events, "step"):
        event["tokens"] *= 2


def delay(events: Events) -> None:
    """A step's time between two phases, in neither."""
    third = of_kind(events, "phase")[5]
    for event in events[events.index(third) - 1 :]:
        event["t_ms"] += 1000.0


def probe_after_validations(events: Events) -> None:
    """Untimed probes of 100 ms, for which the run waits."""
    late, kept = 0.0, []
    for event in events:
        kept.append(event | {"t_ms": event.get("t_ms", 0.0) + late})
        if event.get("name") == "validate":
            late += 100.0
            probe = {"event": "phase", "name": "probe", "timed": False, "ms": 100.0}
            kept.append(probe | {"t_ms": event["t_ms"] + late})
    events[:] = kept


def at_end(name: str, ms: float) -> Change:
    """A phase after the last validation."""
    phase = {"event": "phase", "name": name, "timed": False, "ms": ms}
    return lambda events: events.insert(-1, phase | {"t_ms": events[-1]["t_ms"]})


# Among the phases: validations follow the start-up and each stretch of training.
FIRST_TRAIN, VALIDATIONS = slice(4, 5), slice(3, None, 2)
RUNS: dict[str, tuple] = {
    "another source": (put(ZERO, "source_sha256"), "source_sha256 0{12}, not the claimed"),
    "other settings": (put(ZERO, "config_sha256"), "config_sha256 (0{12}, not|is not)"),
    "another version of torch": (put("2.0", "env", "torch"), "torch differs between runs"),
    "another attention": (put("flash3", "env", "attention"), "attention differs between runs"),
    "a larger model": (put(10**9, "env", "params"), "params differs between runs"),
    "larger layers": (
        put(200_001, "env", "layer_params"), "parameters of the layers: 200001, not 1 to 200000"),
    "code that the hash does not cover": (
        put(["idea /x/idea.py"], "env", "modules_from_elsewhere"), "modules from elsewhere"),
    "compiler settings": (put(["inductor.x = 1"], "env", "compile_flags"), "inductor.x"),
    "other validation data": (put(ZERO, "data", "val_sha256"), "val_sha256 differs",
                              "val_sha256 0{16}, not aa"),
    "fewer validation tokens": (put(512, "data", "val_tokens"), "validation tokens: 512, not 1024"),
    "other tokens to train on": (
        each("end", train_tokens_sha256="f" * 64), "runs trained on different tokens: d+, f+"),
    "validation documents in training": (put(0.03, "checks", "overlap"), "in training: 0.03"),
    "sight of the future": (put(False, "checks", "causality"), "check causality is False"),
    "state left of the warm-up": (put(False, "checks", "warmup_restored"), "restored is False"),
    "a model that knows something": (learn_before, "first loss 3.158"),
    "too much probability by 0.0099": (
        checked("normalized", math.exp(0.0099)), "check normalized .*: 1.0099"),
    "sight of the future once it is trained": (
        checked("causality_trained", 1.3), "check causality_trained .*: 1.3, not 0 to 0.001"),
    "losses that depend on other rows": (checked("additive", 0.5), "check additive .*: 0.5"),
    "a row that was not scored": (each("end", targets_scored=768), "scored targets: 768, not 1024"),
    "no checks of the trained model": (
        each("end", checks=None), "check normalized", "check causality_trained", "check additive"),
    "most steps skipped by the guard": (each("step", skipped=True), "skipped: 12, not 0 to 3.0"),
    "larger batches than the track's": (
        double, "tokens trained on: 12288, not 1 to 6144"),
    "more training than its header says": (
        each("step", tokens=6 * BATCH), "trained on 3072 tokens, not the 6144 of the header"),
    "training off the clock": (each("phase", FIRST_TRAIN, timed=False), "'train' .*: False",
                               "7000 ms in timed phases"),
    "work in a phase of its own": (each("phase", FIRST_TRAIN, name="tune"), "phase 'tune'"),
    "work in no phase": (delay, "untimed work: 1000 ms between the phases"),
    "work in every validation": (
        each("phase", VALIDATIONS, ms=2100.0), "a validate of 2100 ms; 2.0 s are the most"),
    "short probes after validations": (probe_after_validations, "a probe of 100 ms; one may end"),
    "a probe of an hour at the end": (at_end("probe", 3.6e6), "a probe of 3600000 ms; 60.0 s"),
    "ten hours of warm-up": (each("phase", slice(1), ms=3.6e7), "a setup of 36000000 ms; 3600.0 s"),
    "a clock that runs backwards": (each("phase", slice(-1, None), t_ms=0.0), "inf ms between"),
}  # fmt: skip


@pytest.mark.parametrize("what", RUNS)
def test_a_record_is_caught_with_a_run_that_has(what, folder, capsys):
    change, *patterns = RUNS[what]
    forge(folder, change)
    caught(folder, capsys, *patterns)


def test_a_busy_machine_may_hold_up_a_validation_where_there_are_no_records(
    folder, capsys, monkeypatch
):
    monkeypatch.setitem(TRACKS, "tiny", small_record.RULES._replace(ranked=False))
    last = slice(-1, None)
    forge(folder, each("phase", last, ms=22_500.0))
    assert call(capsys, "make", folder)[0] == 0
    forge(folder, each("phase", last, ms=61_000.0))
    caught(folder, capsys, "a validate of 61000 ms; 60.0 s are the most")


def test_a_spread_far_below_the_recipes_is_named_and_fails_nothing(folder, capsys):
    assert call(capsys, "make", folder)[0] == 0
    claim = small_record.make_claim("Still", 6, 2000, created="2026-01-01T01:00:00+00:00")
    losses = [3.2 + 1e-5 * number for number in range(6)]
    still = small_record.write_record(folder.parents[1], claim, losses)
    for path, named in ((still, True), (folder, False)):
        code, said = call(capsys, "make", path)
        assert (code, "warning: the standard deviation is 0.00" in said) == (0, named), said
        assert ("the seed still changes" in (path / "README.md").read_text()) == named


def test_a_source_that_asks_for_a_memory_must_have_found_none(folder, capsys):
    files = small_record.SOURCE | {"runtime/questions.py": b""}
    source_path(folder.parents[1], digest(files)).write_bytes(pack(files))
    forge_claim(folder, source_sha256=digest(files))
    caught(folder, capsys, "check memory of the trained model: None, not 0 to 0.001")
    runs = read_logs(folder)
    for run in runs:
        run[0][-1]["checks"]["memory"] = 0.0
    write_logs(folder, runs)
    assert call(capsys, "make", folder)[0] == 0


def test_a_run_may_end_with_a_check_a_probe_a_kept_model_and_a_sample(folder, capsys):
    for name in ("check", "probe", "keep", "sample"):
        forge(folder, at_end(name, 60_000.0))
    assert call(capsys, "make", folder)[0] == 0


# ---- Runs that were resumed


def resume_first(folder: Path, saved: bool = True) -> None:
    """The first run in two segments, the second from step 8 on."""
    runs = read_logs(folder)
    write_logs(folder, [small_record.resume_at(runs[0][0], 8, saved), *runs[1:]])


def resume_again(folder: Path) -> None:
    """Twice from one checkpoint; the worse outcome was deleted."""
    run = runs_of(folder)[0]
    registry = folder / "runs" / "registry.jsonl"
    register(registry, "resume", run_id=run.run_id, log_sha256=run.segments[0].sha256)
    register(registry, "end", run_id=run.run_id, log_sha256=run.segments[1].sha256)


def second(change: Change) -> Callable[[Path], None]:
    """Change the second segment."""
    return partial(forge, change=change, segment=1)


RESUMED: dict[str, tuple] = {
    "the better of two resumes": (resume_again, "2 resumes in the registry, 1 others in the log"),
    "another setting after the resume": (
        second(lambda events: events[1].update(differences=["--dim 32"])),
        r"resumed at step 8 with \['--dim 32'\] changed"),
    "code that the hash does not cover": (
        second(put(["x /x.py"], "env", "modules_from_elsewhere")), "modules from elsewhere"),
    "lost work off the clock": (
        second(each("phase", slice(1), name="lost")), "phase 'lost' of 3000 ms, timed: False"),
}  # fmt: skip


@pytest.mark.parametrize("what", RESUMED)
def test_a_record_with_a_resumed_run_is_caught_with(what, folder, capsys):
    resume_first(folder)
    change, *patterns = RESUMED[what]
    change(folder)
    caught(folder, capsys, *patterns)


def test_a_run_that_repeats_steps_is_shown_and_not_counted(folder, capsys):
    resume_first(folder, saved=False)
    caught(folder, capsys, "not counted: .*steps after 8 were done twice", "missing: .* 5 of 6")
    page = (folder / "README.md").read_text()
    assert "Seed 1000 was resumed at step 8" in page
    assert "| 1000 |" not in page
