"""A record without training: a claim, its source, and logs as a trainer would write them."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from small_run import read_events

from claims.record import Track, write_claim
from runtime import registry
from runtime.claim import Claim, read_claim
from runtime.jsonl import json_line
from runtime.log import REGISTERED, config_hash
from runtime.source import digest
from scripts import record

Events = list[dict[str, Any]]  # of one segment
TARGET, STEPS, VOCABULARY, BATCH, VAL_TOKENS = 3.25, 12, 64, 512, 1024
STEP_MS, VALIDATION_MS = 1000.0, 400.0
RULES = Track(TARGET, VAL_TOKENS, "aa", 0.02, "bb", {"vocab_size": VOCABULARY}, in_time=False,
              layer_params=200_000)
CONFIG = {"track": "tiny", "target": TARGET, "steps": STEPS, "batch_tokens": BATCH, "seq_len": 64,
          "vocab_size": VOCABULARY}
SOURCE = {"optim/muon.py": b"step:1/2 val_loss:1.0\n", "train_gpt.py": "é\r\n".encode()}
ENV = {"python": "3.12.7", "torch": "2.13.0+cu128", "cuda": "12.8", "gpu": "NVIDIA H100 80GB HBM3",
       "gpu_count": 8, "driver": "570.211.01", "cpu": "Xeon", "threads": 2, "dtype": "bfloat16",
       "compiled": True, "compile_flags": [], "params": 10, "modules_from_elsewhere": []}
END = {"targets_scored": VAL_TOKENS, "train_tokens_sha256": "d" * 64,
       "checks": {"normalized": 1.00003, "causality_trained": 0.0, "additive": 9.5e-7}}
SAVED = "e" * 64  # hash of a checkpoint
LOSSES = list(3.2 + 0.012 * np.random.default_rng(0).standard_normal(12))


def make_claim(name: str = "Good", n: int = 12, seed: int = 1000, **changed: Any) -> Claim:
    config = CONFIG | changed.pop("config", {})
    fields: dict[str, Any] = {
        "name": name, "track": "tiny", "target": TARGET, "alpha": 0.01, "n": n,
        "seeds": list(range(seed, seed + n)), "looks": [n], "source_sha256": digest(SOURCE),
        "config_sha256": config_hash(config), "config": config, "flags": ["--steps", str(STEPS)],
        "about": "Why.", "created": "2026-01-01T00:00:00+00:00",
    }
    return Claim(**fields | changed)


def run_events(claim: Claim, seed: int, loss: float) -> Events:
    """One run: validations at steps 0, 5, 10 and the last, training losses that fall."""
    steps = claim.config["steps"]
    run_id = f"20260102-00{seed % 10000:04}_tiny_s{seed}_t0_abcdef"
    events: Events = [{
        "event": "header", "schema": 3, "run_id": run_id,
        "track": claim.track, "target": claim.target, "seed": seed, "trial": seed - claim.seeds[0],
        "claim": claim.id, "source_sha256": claim.source_sha256,
        "config_sha256": claim.config_sha256, "config": claim.config, "world_size": 8, "env": ENV,
        "train_tokens": steps * BATCH,
        "data": {"train_sha256": "bb", "val_sha256": "aa", "val_tokens": VAL_TOKENS},
        "checks": {"causality": True, "overlap": 0.01, "warmup_restored": True},
    }]
    ignorant, t_ms, trained = math.log(VOCABULARY), 10.0, 0.0

    def add(event: str, **fields: Any) -> None:
        events.append({"event": event, "t_ms": t_ms, **fields})

    for name in ("setup", "compile", "warmup"):
        add("phase", name=name, timed=False, ms=3000.0)
    generator = np.random.default_rng(seed)
    stops = [0, *range(5, steps, 5), steps]
    for before, stop in zip([0, *stops], stops, strict=False):
        for step in range(before + 1, stop + 1):
            t_ms += STEP_MS
            noisy = ignorant + (loss - ignorant) * step / steps + 0.01 * generator.standard_normal()
            add("step", step=step, tokens=BATCH * step, train_time_ms=STEP_MS * step, window=48,
                stage=0, skipped=False, train_loss=noisy)
        if stop > before:
            add("phase", name="train", timed=True, ms=STEP_MS * (stop - before))
            trained = STEP_MS * stop
        t_ms += VALIDATION_MS
        add("phase", name="validate", timed=False, ms=VALIDATION_MS)
        value = loss if stop == steps else ignorant + (loss - ignorant) * stop / steps
        add("val", step=stop, total_steps=steps, val_loss=value, train_time_ms=trained)
    add("end", status="done", steps=steps, val_loss=loss, train_time_ms=trained, **END)
    return events


def resume_at(events: Events, step: int, saved: bool = True) -> list[Events]:
    """The run in two segments, stopped after a step. Unless `saved`, it did two steps more."""
    at = next(i for i, event in enumerate(events) if event.get("step") == step) + 1
    header, first, rest = events[0], events[:at], events[at:]
    clock = {"t_ms": first[-1]["t_ms"], "train_time_ms": step * STEP_MS}
    done = (step - 1) % 5 + 1  # since the last validation
    first.append({"event": "phase", "name": "train", "timed": True, "ms": done * STEP_MS, **clock})
    first.append({"event": "checkpoint", "step": step, "sha256": SAVED, **clock})
    if saved:
        end = {"event": "end", "status": "interrupted", "steps": step, "val_loss": None}
        first.append(end | clock)
    else:
        first += [event | {"train_loss": 9.0} for event in rest if event["event"] == "step"][:2]
    train = next(event for event in rest if event.get("name") == "train")
    train["ms"] -= done * STEP_MS
    startup = [event | clock for event in events if event.get("ms") == 3000.0]
    again = [header | {"segment": 2, "after_step": step},
             {"event": "resume", "from_step": step, "checkpoint": "x", "differences": [],
              "checkpoint_sha256": SAVED}]
    return [first, again + startup + rest]


def register(path: Path, event: str, **fields: Any) -> str:
    """As the trainer does, without the lock that stays in a log folder; records have none."""
    sha256 = registry.register(path, event, **fields)
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    return sha256


def write_logs(folder: Path, runs: Sequence[list[Events]]) -> None:
    """Logs and registry as the runs would have written them; each run is a list of segments."""
    registry = folder / "runs" / "registry.jsonl"
    registry.parent.mkdir(parents=True, exist_ok=True)
    registry.unlink(missing_ok=True)
    for number, segments in enumerate(runs):
        run_id = segments[0][0]["run_id"]
        sha256 = None
        for place, events in enumerate(segments, 1):
            line = {"run_id": run_id, "time": f"2026-01-02T{number:02}:{place:02}:00+00:00"}
            header = events[0]
            path = registry.with_name(f"{run_id}.{place}.jsonl")
            if place == 1:
                path = registry.with_name(f"{run_id}.jsonl")
                fields = {name: header.get(name) for name in REGISTERED}
                header["registry_sha256"] = register(registry, "start", **line, **fields)
            else:
                header["previous_sha256"] = sha256
                line_sha256 = register(registry, "resume", **line, log_sha256=sha256)
                events[1]["registry_sha256"] = line_sha256
            path.write_bytes(b"".join(json_line({"t_ms": 0.0} | event) for event in events))
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            if events[-1]["event"] == "end":
                register(registry, "end", **line, log_sha256=sha256)


def write_record(records: Path, claim: Claim, losses: Sequence[float]) -> Path:
    """The folder of a claim with a run for each of the losses, its pages not made yet."""
    folder = write_claim(records, claim, SOURCE)
    pairs = zip(claim.seeds, losses, strict=False)
    runs = [[run_events(claim, seed, loss)] for seed, loss in pairs]
    write_logs(folder, runs)
    return folder


def read_logs(folder: Path) -> list[list[Events]]:
    """What `write_logs` wrote."""
    runs = []
    for path in sorted((folder / "runs").glob("2*_abcdef.jsonl")):
        segments = [path, *sorted(path.parent.glob(f"{path.stem}.*.jsonl"))]
        runs.append(list(map(read_events, segments)))
    return runs


def forge(folder: Path, change: Callable[[Events], Any] = len, segment: int = 0) -> None:
    """Change the events of the first run and write everything anew, as if the runs had.

    What is caught then is caught by the rule for the thing itself.
    """
    claim, runs = read_claim(folder / "claim.json"), read_logs(folder)
    for run in runs:
        for events in run:
            events[0] |= {"claim": claim.id, "source_sha256": claim.source_sha256}
    change(runs[0][segment])
    write_logs(folder, runs)


def call(capsys: Any, *words: object) -> tuple[int, str]:
    """Exit code and output of record.py."""
    capsys.readouterr()
    code = record.main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out + said.err


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def rewrite_claim(folder: Path, **changed: object) -> None:
    path = folder / "claim.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed, indent=2) + "\n")
