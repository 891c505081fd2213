"""Cheats: what `record.py verify` catches by name, and what it cannot catch."""

import hashlib
import re
import shutil
from collections.abc import Callable
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import small_record
import small_run
from small_record import BATCH, CONFIG, STEPS, Events, call, forge, read_logs, register, write_logs

from claims.record import TRACKS, pack, read_evidence, source_path
from claims.runs import Run
from runtime.jsonl import json_line
from runtime.source import digest
from scripts import record

ZERO = "0" * 64
Change = Callable[[Events], Any]


@pytest.fixture(scope="module", autouse=True)
def contest():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TRACKS, "tiny", small_record.RULES)
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A record of six runs. No test changes it."""
    records = tmp_path_factory.mktemp("made")
    claim, losses = small_record.make_claim(n=6), small_record.LOSSES[:6]
    folder = small_record.write_record(records, claim, losses)
    assert record.main(["make", str(folder)]) == 0
    return records


@pytest.fixture
def folder(made, tmp_path):
    records = shutil.copytree(made, tmp_path / "records")
    return next((records / "tiny").iterdir())


def caught(folder: Path, capsys, *patterns: str, made: bool = True) -> None:
    """`verify` fails for what each pattern names, and for nothing else."""
    if made:
        call(capsys, "make", folder)
    code, said = call(capsys, "verify", folder)
    assert code == (2 if said.startswith("error: ") else 1), said
    said = said.replace(f"{folder}: ", "error: ")
    failures = re.findall("^error: (?!NOT VERIFIED)(.*)", said, re.M)
    for pattern in patterns:
        assert any(re.search(pattern, what) for what in failures), said
    for what in failures:
        assert any(re.search(pattern, what) for pattern in patterns), what


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


def forge_claim(folder: Path, **changed: object) -> None:
    small_record.rewrite_claim(folder, **changed)
    forge(folder)


def edit_loss(path: Path, count: int = 2) -> None:
    """The third decimal of the last loss: in the validation, and with 2 in the end too."""
    loss = str(small_run.read_events(path)[-1]["val_loss"])
    edit(path, loss, str(float(loss) - 0.001)[: len(loss)], count)


# ---- Cheats with the files of a record


def keep_best(folder: Path) -> None:
    cut(folder, best(folder)[4:], lines=False)


def keep_best_and_claim_them(folder: Path) -> None:
    keep_best(folder)
    small_record.rewrite_claim(folder, n=4, seeds=[run.seed for run in best(folder)], looks=[4])


def copy_log(folder: Path) -> None:
    shutil.copy(runs_of(folder)[0].path, folder / "runs" / "20991231.jsonl")


def end_again(folder: Path) -> None:
    """An edited log, and a second end line that vouches for it: no line before it changes."""
    run = runs_of(folder)[0]
    edit_loss(run.path)
    sha256 = hashlib.sha256(run.path.read_bytes()).hexdigest()
    register(folder / "runs" / "registry.jsonl", "end", run_id=run.run_id, log_sha256=sha256)


def edit_with_end_line(folder: Path, number: int, change: Callable[[Path], None]) -> None:
    """Change a log, and in the registry the hash of it. Only the next line there can tell."""
    run = runs_of(folder)[number]
    change(run.path)
    sha256 = hashlib.sha256(run.path.read_bytes()).hexdigest()
    edit(folder / "runs" / "registry.jsonl", run.segments[0].sha256, sha256)


def try_before(folder: Path, track: str, seed: float = 1000) -> None:
    """A claimed seed in the registry of another log folder, with other settings and no claim."""
    register(folder / "runs" / "registry_2.jsonl", "start", time="2020-01-01T00:00:00+00:00",
             run_id="early", track=track, seed=seed, config_sha256=ZERO, claim=None)


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
    events[0] |= {"seed": worst.seed, "trial": worst.header["trial"], "run_id": "x"}
    (folder / "runs" / "x.jsonl").write_bytes(b"".join(map(json_line, events)))
    worst.path.unlink()


def forge_source(folder: Path, line: str) -> None:
    files = small_record.SOURCE | {"train_gpt.py": f"\n{line}\n".encode()}
    path = source_path(folder.parents[1], digest(files))
    path.write_bytes(pack(files))
    forge_claim(folder, source_sha256=digest(files))


def edit_source(folder: Path) -> None:
    path = source_path(folder.parents[1], digest(small_record.SOURCE))
    path.write_bytes(path.read_bytes().replace(b"1.0\n", b"2.0\n"))


def add_file(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")


CHAIN = r"registry.jsonl, line \d+: it names"
CHEATS: dict[str, tuple] = {
    "the best 4 of 6": (keep_best, "missing: run .* was started", "missing: seeds"),
    "the best 4 of 6 under a claim of 4": (
        keep_best_and_claim_them, "extra: the run was not started", "missing: "),
    "4 of 6 and no lines of the last": (
        lambda folder: cut(folder, runs_of(folder)[4:]),
        r"missing: seeds \[1004, 1005\] .* 4 of 6"),
    "4 of 6 and no lines of the others": (
        lambda folder: cut(folder, runs_of(folder)[2:4]), CHAIN),
    "a killed run": (start_again, "not counted: no end line", "repeats the seed 1003 of"),
    "a run without its end": (cut_off_end, "not counted: no end line", "missing: .* 5 of 6 runs"),
    "a copied log": (copy_log, "20991231.jsonl .* repeats the run id of"),
    "a copy with another run id and seed": (
        replace_worst, "repeats the training losses of", "missing: run .* was started",
        "missing: .* 5 of 6 runs",
        "its start is not in the registry", "its end is not in the registry"),
    "a digit of a loss": (
        lambda folder: edit_loss(runs_of(folder)[0].path), "edited: the log is not"),
    "a digit of one loss": (
        lambda folder: edit_loss(runs_of(folder)[0].path, 1), "edited: the log is not",
        "not counted: the end line has another", "missing: "),
    "another trial in the header of the last run": (
        partial(edit_with_end_line, number=5, change=partial(edit, old='l": 5', new='l": 6')),
        "its header differs from its line in the registry"),
    "an edited log with an end line of its own": (
        end_again, "its lines in the registry are start end end, which no ", "its clock ends at"),
    "a seed that was tried as another kind of number": (
        partial(try_before, track="tiny", seed=1000.0), "seed 1000.0 was run by early outside"),
    "a seed that was tried as another track": (
        partial(try_before, track="short"), "seed 1000 was run by early outside the claim"),
    "a claim with its words set out otherwise": (
        lambda folder: edit(folder / "claim.json", '"name"', '\n\n"name"'),
        "claim.json is not as record.py claim wrote it"),
    "a claim of a later date": (
        partial(forge_claim, created="2999-01-01T00:00:00+00:00"),
        "started .*, before the claim, 2999-01-01", "its folder is"),
    "a clock that runs at half the speed": (
        lambda folder: write_logs(folder, read_logs(folder), slow=2.0),
        "its clock ends at 13610.0 ms, but the registry saw 27 s"),
    "another target": (
        partial(forge_claim, target=3.5),
        "target 3.5 at alpha 0.01, not 3.25 at 0.01", "target 3.25, not the claimed 3.5"),
    "another level": (
        partial(forge_claim, alpha=0.05), "target 3.25 at alpha 0.05, not 3.25 at 0.01"),
    "an unknown track": (partial(forge_claim, track="huge"), "track 'huge' has no rules"),
    "settings not of the claim": (
        partial(forge_claim, config={k: v for k, v in CONFIG.items() if k != "track"}),
        "config_sha256 is not the hash", "track is None, fixed at 'tiny'"),
    "a setting that the track fixes": (
        partial(forge_claim, config=CONFIG | {"vocab_size": 32}),
        "vocab_size is 32, fixed at 64 on this track", "config_sha256 is not the hash"),
    "another source under the hash": (
        edit_source, "source is not as record.py claim wrote it"),
    "a name that another claim has": (
        partial(forge_claim, name="Better"), "its folder is tiny/2026-01-01_Good, not tiny/2026"),
    "no source": (
        lambda folder: source_path(folder.parents[1], digest(small_record.SOURCE)).unlink(),
        "cannot read the source .*No such file"),
}  # fmt: skip
for name in ("weights.bin", ".hidden", "runs/notes.txt", "source/data.bin", "runs/more/a.jsonl",
             "NOTES.md/a.bin"):  # fmt: skip
    CHEATS[f"a file {name}"] = (partial(add_file, name=name), "unexpected file")
for setting in (
    "torch._inductor.config.coordinate_descent_tuning = True",
    'torch.compile(model, mode="max-autotune")', "torch.compile(model, options={})",
    "torch._inductor.config.epilogue_fusion = False", "from torch._inductor import config",
    'os.environ["TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"] = "1"',
    'torch.compile(\n    wrap(model), dynamic=False, mode="reduce-overhead"\n)',
):
    CHEATS[setting] = (partial(forge_source, line=setting), "forbidden compiler setting")


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_record_is_caught_with(cheat, folder, capsys):
    change, *patterns = CHEATS[cheat]
    change(folder)
    caught(folder, capsys, *patterns)


@pytest.mark.parametrize("name", ["README.md", "record.json"])
def test_a_page_is_caught_with_another_digit_or_a_line_separator(name, folder, capsys):
    loss = f"{runs_of(folder)[2].final_loss:.6f}"[:-1]
    edit(folder / name, loss, loss[:-1] + str((int(loss[-1]) + 1) % 10))
    caught(folder, capsys, f"{name} is not what the logs say", made=False)
    call(capsys, "make", folder)
    edit(folder / name, "3.25", "3.25\u2028")
    caught(folder, capsys, f"{name} is not what the logs say", made=False)


@pytest.mark.parametrize("name", ["README.md", "runs", "runs/registry.jsonl"])
def test_a_link_in_place_of_a_file_or_folder_is_caught(name, folder, capsys):
    (folder / name).symlink_to((folder / name).rename(folder.parent / "elsewhere"))
    code, said = call(capsys, "verify", folder)
    assert (code, "unexpected file" in said) == (1, True)


# ---- Cheats of a run, forged so well that only the rule itself is left


def put(value: object, *path: str) -> Change:
    """Set a field of the header."""
    return lambda events: reduce(getitem, path[:-1], events[0]).update({path[-1]: value})


def of_kind(events: Events, kind: str) -> Events:
    return [event for event in events if event["event"] == kind]


def each(kind: str, at: slice = slice(None), **fields: object) -> Change:
    """Set fields of the events of a kind."""
    return lambda events: [event.update(fields) for event in of_kind(events, kind)[at]]


def without(kind: str, at: int) -> Change:
    return lambda events: events.remove(of_kind(events, kind)[at])


def checked(name: str, value: object) -> Change:
    """A value of a check of the trained model."""
    return lambda events: events[-1]["checks"].update({name: value})


def learn_before(events: Events) -> None:
    for event in events:
        event |= {name: event[name] - 1 for name in ("val_loss", "train_loss") if name in event}


def train_longer(events: Events) -> None:
    """Twelve steps more, at the end, that take no time."""
    for event in of_kind(events, "step"):
        tokens = event["tokens"] + STEPS * BATCH
        events.insert(-1, event | {"step": event["step"] + STEPS, "tokens": tokens})
    each("val", total_steps=2 * STEPS)(events)
    each("val", slice(-1, None), step=2 * STEPS)(events)


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


def probe_at_end(ms: float, name: str = "probe") -> Change:
    """A probe of the trained model, as the trainer makes it, or another phase of the end."""
    probe = {"event": "phase", "name": name, "timed": False, "ms": ms}
    return lambda events: events.insert(-1, probe | {"t_ms": events[-1]["t_ms"]})


# Among the phases: validations follow the start-up and each stretch of training.
FIRST_TRAIN, FIRST_VALIDATE, VALIDATIONS = slice(4, 5), slice(3, 4), slice(3, None, 2)
FORGED: dict[str, tuple] = {
    "another claim": (put(ZERO, "claim"), "extra: the run was", "missing: "),
    "another torch and dtype": (
        lambda events: events[0]["env"].update(torch="2.0", dtype="float32"),
        "torch differs between runs", "dtype differs between runs"),
    "more ranks than rows": (put(10**9, "world_size"), "ranks differs", "ranks: 1000000000, not"),
    "another CPU": (put("Z80", "env", "cpu"), "cpu differs between runs"),
    "another attention": (put("flash3", "env", "attention"), "attention differs between runs"),
    "steps that the guard skipped": (each("step", skipped=True), "skipped: 12, not 0 to 3.0"),
    "no number of tokens": (put(None, "train_tokens"), "not on the None of the header"),
    "another track": (put("medium", "track"), "track medium, not the claimed tiny"),
    "another source": (put(ZERO, "source_sha256"), "source_sha256 0{12}, not the claimed"),
    "another configuration": (put(ZERO, "config_sha256"), "config_sha256 (0{12}, not|is not)"),
    "settings other than their hash": (put(24, "config", "steps"), "config_sha256 is not the"),
    "a step of two batches": (
        each("step", slice(6, 7), tokens=8 * BATCH), "step 7 trained on 1024 tokens, not on whole"),
    "steps without tokens": (each("step", tokens=None), "step 1 trained on 0 tokens, not on"),
    "more steps than claimed": (train_longer, "24 steps, not the claimed 12",
                                   "trained on 12288 tokens, not on the 6144"),
    "fewer validation tokens": (put(512, "data", "val_tokens"), "validation tokens: 512, not 1024"),
    "other validation data": (put(ZERO, "data", "val_sha256"), "val_sha256 differs",
                              "val_sha256 0{16}, not aa"),
    "other training data": (put(ZERO, "data", "train_sha256"), "train_sha256 differs",
                            "train_sha256 0{16}, not bb"),
    "validation documents": (put(0.03, "checks", "overlap"), "documents in training: 0.03"),
    "an overlap of false": (put(False, "checks", "overlap"), "documents in training: False"),
    "no causality check": (put(None, "checks", "causality"), "check causality is None"),
    "sight of the future": (put(False, "checks", "causality"), "check causality is False"),
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
        each("phase", VALIDATIONS, ms=2100.0), "2100 ms, a token dearer than training"),
    "short probes after validations": (probe_after_validations, "a probe of 100 ms"),
    "a probe that takes an hour at the end": (probe_at_end(3.6e6), "a probe of 3600000 ms"),
    "a model kept in mid-run": (
        each("phase", FIRST_VALIDATE, name="keep"), "a keep of", "3 validations for 4"),
    "ten hours of warm-up": (
        each("phase", slice(1), ms=3.6e7), "untimed work: a setup of 36000000 ms"),
    "no number of parameters": (
        put(None, "env", "params"), "parameters: None, not 1 to inf", "params differs"),
    "a probe of no time": (probe_at_end("nan"), "a probe of nan ms", "nan ms between"),
    "other tokens to train on": (
        each("end", train_tokens_sha256="f" * 64), "runs trained on different tokens: d+, f+"),
    "no hash of the tokens": (each("end", train_tokens_sha256=None), "no hash of the tokens",
                              "runs trained on different tokens"),
    "a row that was not scored": (each("end", targets_scored=small_record.VAL_TOKENS - 256),
                                  "scored targets: 768, not 1024"),
    "no checks of the trained model": (
        each("end", checks=None), "check normalized", "check causality_trained", "check additive"),
    "probabilities that sum to 277": (checked("normalized", 277.0), "check normalized .*: 277.0"),
    "a loss that is scaled": (
        checked("normalized", 1.07), "check normalized .*: 1.07, not 0 to 1.01"),
    "a sum of nan": (checked("normalized", "nan"), "check normalized of the trained model: nan"),
    "sight of the future in long rows": (checked("causality_trained", 1.3),
                                         "check causality_trained .*: 1.3, not 0 to 0.001"),
    "a mean over the targets": (checked("additive", 0.5), "check additive .*: 0.5, not 0 to"),
    "PYTHONPATH": (put("/elsewhere", "env", "sys_flags", "pythonpath"),
                   "started with pythonpath '/elsewhere', not ''"),
    "no flags of the interpreter": (
        put(None, "env", "sys_flags"), "with pythonpath None"),
    "sitecustomize": (put(["sitecustomize /x.py"], "env", "modules_from_elsewhere"),
                      r"modules from elsewhere: \['sitecustomize /x.py'\]"),
    "no list of modules": (put(None, "env", "modules_from_elsewhere"), "from elsewhere: None"),
    "a larger model": (put(10**9, "env", "params"), "params differs between runs: 10, 1000000000"),
    "a negative loss": (each("val", slice(-1, None), val_loss=-1.0), "val_loss -1.0: a loss is"),
    "a step left out": (
        without("step", 5), "11 of 12 steps are in the log", "step 7 trained on 1024 tokens"),
    "a validation left out": (without("val", 1), "4 validations for 3 losses"),
    "an error at the end": (each("end", status="error"), "with status error", "missing: "),
    "two ends": (lambda events: events.append(events[-1]), "2 end lines", "missing: "),
}


@pytest.mark.parametrize("cheat", FORGED)
def test_a_record_is_caught_with_a_run_that_has(cheat, folder, capsys):
    change, *patterns = FORGED[cheat]
    forge(folder, change)
    caught(folder, capsys, *patterns)


def test_a_run_may_end_with_a_check_a_probe_a_kept_model_and_a_sample(folder, capsys):
    for name in ("check", "probe", "keep", "sample"):
        forge(folder, probe_at_end(60_000.0, name))
    assert call(capsys, "make", folder)[0] == 0


@pytest.mark.parametrize(
    "name", ["data", "checks", "config", "env", "world_size", "seed", "claim", "run_id"])
def test_a_header_of_any_shape_ends_in_a_sentence(name, folder, capsys):
    for value in (None, 1.5, "x", []):
        forge(folder, put(value, name))
        assert call(capsys, "make", folder)[0] in (1, 2)


# ---- Runs that were resumed


def resume_first(folder: Path, saved: bool = True) -> None:
    """The first run in two segments, the second from step 8 on."""
    runs = read_logs(folder)
    write_logs(folder, [small_record.resume_at(runs[0][0], 8, saved), *runs[1:]])


def test_a_run_that_repeats_steps_is_shown_and_not_counted(folder, capsys):
    resume_first(folder, saved=False)
    caught(folder, capsys, "not counted: .*steps after 8 were done twice", "missing: .* 5 of 6")
    page = (folder / "README.md").read_text()
    assert "Seed 1000 was resumed at step 8" in page
    assert "| 1000 |" not in page


def set_back(events: Events) -> None:
    """The training time to zero, as if the first segment had not been."""
    for event in events:
        if "train_time_ms" in event:
            event["train_time_ms"] -= 8000.0


def pause(events: Events) -> None:
    for event in events[-3:]:
        event["t_ms"] += 1000.0


def resume_again(folder: Path) -> None:
    """Twice from one checkpoint; the worse outcome was deleted."""
    run = runs_of(folder)[0]
    registry = folder / "runs" / "registry.jsonl"
    register(registry, "resume", run_id=run.run_id, log_sha256=run.segments[0].sha256)
    register(registry, "end", run_id=run.run_id, log_sha256=run.segments[1].sha256)


def drop_resume(folder: Path) -> None:
    registry = folder / "runs" / "registry.jsonl"
    lines = registry.read_text().splitlines(True)
    registry.write_text("".join(line for line in lines if '"event": "resume"' not in line))


def edit_segment(folder: Path, number: int) -> None:
    edit(runs_of(folder)[0].segments[number].path, '"stage": 0,', '"stage": 1,')


def remove_second_segment(folder: Path) -> None:
    runs_of(folder)[0].segments[1].path.unlink()


RESUMED: dict[str, tuple] = {
    "a first segment that was edited": (
        partial(edit_segment, number=0), "edited: .*2.jsonl names another segment before it"),
    "a second segment that was edited": (
        partial(edit_segment, number=1), "edited: the log is not the one"),
    "a second segment that was made again": (
        resume_again, "2 resumes in the registry, 1 others in the log"),
    "a resume that the registry does not know": (drop_resume, CHAIN),
    "no second segment": (remove_second_segment, "not counted: ended with status interrupted",
                          "missing: ", "edited: ", "1 resumes in the registry, 0 others"),
    "another setting after the resume": (
        partial(forge, change=lambda events: events[1].update(differences=["--dim 32"]), segment=1),
        r"resumed at step 8 with \['--dim 32'\] changed"),
    "a second segment that begins elsewhere": (
        partial(forge, change=put(7, "after_step"), segment=1),
        r"edited: its segments begin after steps \[7\]"),
    "weights swapped in the checkpoint": (
        partial(forge, change=lambda events: events[1].update(checkpoint_sha256=ZERO), segment=1),
        "resumed at step 8 from a checkpoint that it did not write"),
    "PYTHONPATH after the resume": (
        partial(forge, change=put("/x", "env", "sys_flags", "pythonpath"), segment=1),
        "started with pythonpath '/x', not ''"),
    "other tokens in the header of the resume": (
        partial(forge, change=put(ZERO, "checks"), segment=1),
        "edited: .*2.jsonl has another checks than the run.s first header"),
    "compiler settings after the resume": (
        partial(forge, change=put(["x=1"], "env", "compile_flags"), segment=1),
        "compiler settings x=1"),
    "a clock that was set back at the resume": (
        partial(forge, change=set_back, segment=1), "not counted: less train time", "missing: "),
    "lost work off the clock": (
        partial(forge, change=each("phase", slice(1), name="lost"), segment=1),
        "phase 'lost' of 3000 ms, timed: False"),
    "time in no phase after the resume": (
        partial(forge, change=pause, segment=1), "1000 ms between the phases"),
}


@pytest.mark.parametrize("cheat", RESUMED)
def test_a_record_with_a_resumed_run_is_caught_with(cheat, folder, capsys):
    resume_first(folder)
    change, *patterns = RESUMED[cheat]
    change(folder)
    caught(folder, capsys, *patterns)


def test_each_segment_may_differ_from_the_registry_by_five_seconds(folder, capsys):
    resume_first(folder)
    write_logs(folder, read_logs(folder), slow=1.5)  # 6.8 s longer than a run's clock says
    said = call(capsys, "make", folder)[1]
    assert [f"_s{seed}_" in said for seed in range(1000, 1006)] == [False, *[True] * 5]


def test_the_page_of_cheats_names_cases_that_exist():
    page = (small_run.ROOT / "docs" / "claims.md").read_text()
    section = page.partition("## Cheats\n")[2].partition("\n## ")[0]
    cases = set(re.findall(r'"(.+?)"', section))
    assert len(cases) > 20
    assert cases <= {*CHEATS, *FORGED, *RESUMED}
