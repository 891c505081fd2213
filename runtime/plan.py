"""Which runs a process makes: new ones, or under --resume auto those that were interrupted."""

from dataclasses import dataclass, replace
from pathlib import Path

from runtime.checkpoint import check, checkpoints
from runtime.errors import LogError, Refused
from runtime.jsonl import Json
from runtime.log import History, config_hash, new_run_id, read_history, segment_path
from runtime.registry import REGISTRY, read_registry
from runtime.settings import SETTINGS_OF_A_RUN, as_text, flag
from runtime.trainer import Trainer

# Settings that change only rounding. A resume after an out-of-memory error may change them.
ROUNDING = ("micro_batch", "val_batch", "activation_checkpointing")
RECORDED = (
    "torch", "cuda", "gpu", "driver", "cpu", "threads", "dtype", "attention", "head", "compiled",
    "compile_flags", "world_size", *ROUNDING,
)  # fmt: skip


@dataclass(frozen=True)
class RunPlan:
    """One run to make. With a history it resumes, from its checkpoint or from the start."""

    seed: int
    trial: int
    run_id: str
    history: History | None = None
    checkpoint: Path | None = None
    checkpoint_sha256: str | None = None
    step: int = 0


def plan_runs(trainer: Trainer) -> list[RunPlan]:
    """New runs, or under --resume auto what is left of them. Refused if it cannot. On rank 0."""
    config, plans = trainer.config, []
    for trial in range(config.trials):
        seed = config.seed + trial
        plan = RunPlan(seed, trial, new_run_id(config.track, seed, trial))
        if config.resume == "auto":
            earlier = find_earlier(trainer, seed, trial)
            if earlier is None:
                logs = f"nothing to resume in {config.log_dir}"
                trainer.machine.say(f"seed {seed}: {logs}, a new run starts")
            elif earlier.status == "done":
                trainer.machine.say(f"seed {seed} is done: run {earlier.header['run_id']}")
                continue
            else:
                plan = resume(trainer, earlier)
        plans.append(plan)
    return plans


def find_earlier(trainer: Trainer, seed: int, trial: int) -> History | None:
    """The newest run of the same experiment with this seed, whole or interrupted."""
    config = trainer.config
    now = header(trainer, seed, trial)
    wanted = {"event": "start", "seed": seed, "track": now["track"], "claim": now["claim"]}
    path = Path(config.log_dir, REGISTRY)
    entries = read_registry(path) if path.exists() else []
    last_lines = {entry["run_id"]: entry for entry in entries}
    for start in reversed(entries):
        if not wanted.items() <= start.items():
            continue
        run_id = start["run_id"]
        history = read_history(config.log_dir, run_id)
        if history is None:  # killed before its first line
            continue
        other, _ = differences(history.header, now)
        if other:
            if history.status != "done":
                differs = f"is unfinished, but it differs: {'; '.join(other)}"
                trainer.machine.say(f"run {run_id} {differs}")
            continue
        last = last_lines[run_id]
        edited = last["event"] == "end" and last.get("log_sha256") != history.sha256
        if history.status != "done" and edited:
            log = segment_path(config.log_dir, run_id, history.segments)
            raise LogError(f"{log} was changed after its process ended: the registry has "
                           f"another hash of it. Restore the file.")  # fmt: skip
        return history
    return None


def resume(trainer: Trainer, history: History) -> RunPlan:
    """Resume from the newest whole checkpoint, or from the start if none was saved."""
    run_id, seed, trial = (history.header[name] for name in ("run_id", "seed", "trial"))
    plan = RunPlan(seed, trial, run_id, history)
    root, problem = trainer.config.checkpoint_dir, ""
    folder, saved_in = Path(root, run_id), history.header["config"]["checkpoint_dir"]
    if history.saved and not folder.exists():
        problem = f"the run was saved in {saved_in}."
    for path in reversed(checkpoints(folder)):
        try:
            state, sha256 = check(path)
            if sha256 not in history.saved:
                raise Refused(f"{path}: the log of {run_id} has no such checkpoint, with "
                              f"SHA-256 {sha256:.12} of its checksums. Put the saved one back.")
            return replace(plan, checkpoint=path, checkpoint_sha256=sha256, step=state["step"])
        except Refused as error:  # damaged; the one before may be whole
            problem = str(error)
            trainer.machine.say(f"warning: {problem}")
    if problem:
        raise Refused(f"no usable checkpoint in {folder}: {problem} Give the right "
                      f"--checkpoint-dir, or start a new run without --resume.")  # fmt: skip
    return plan


def differences(then: Json, now: Json) -> tuple[list[str], list[str]]:
    """What differs in two headers: (what makes it another experiment, the rest)."""
    was, here = _facts(then), _facts(now)
    changed = {name: f"{name} {was.get(name)} -> {here.get(name)}"
               for name in was | here if was.get(name) != here.get(name)}  # fmt: skip
    rest = [changed.pop(name) for name in RECORDED if name in changed]
    return list(changed.values()), rest


def _facts(header: Json) -> dict[str, str]:
    """What decides whether a run is the same: settings by their flags, hashes, the machine."""
    settings = header["config"]
    everything = settings | header["env"] | header["data"] | header
    named = [name for name in settings if name not in SETTINGS_OF_A_RUN + ROUNDING]
    facts = {flag(name): as_text(settings[name]) for name in named}
    for name in ("source_sha256", "train_sha256", "val_sha256"):
        facts[name] = f"{everything.get(name)!s:.12}"
    return facts | {name: str(everything.get(name)) for name in RECORDED}


def header(trainer: Trainer, seed: int, trial: int) -> Json:
    """The fields of the log's header for one run."""
    config, train = trainer.config, trainer.data.train
    settings = dict(vars(config))
    micro_steps, micro_rows = train.shares(config.steps)
    return {
        "track": config.track, "target": config.target, "seed": seed, "trial": trial,
        "claim": trainer.claim, "source_sha256": trainer.source_sha256,
        "config_sha256": config_hash(settings),
        "config": settings, "train_tokens": trainer.train_tokens,
        # Shard and token behind the last one that the run trains on: a rerun may change the rest.
        "train_end": [train.end.shard, train.end.offset],
        "data": trainer.hashes | {"val_tokens": config.val_tokens},
        "env": trainer.env, "checks": trainer.checks, "world_size": trainer.machine.world_size,
        "micro_batch": micro_rows * config.seq_len, "grad_accum": micro_steps,
    }  # fmt: skip
