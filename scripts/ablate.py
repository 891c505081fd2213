"""Which pieces of the recipe help? Each is switched off or exchanged, on the same seeds as the baseline.

    python scripts/ablate.py --list                                   the arms
    python scripts/ablate.py --seeds 0,1,2,3 --jobs 2                 run them all; the same command resumes
    python scripts/ablate.py --arms no_smear,muon -- --steps 200      two arms, with flags of train_gpt.py for each run
    python scripts/ablate.py --report                                 the table of the finished runs, nothing is run

The folder --out gets results.json, from which the experiment resumes, README.md with the table, and runs/ with the
logs. Exit code: 0 done, 1 a run failed, 2 bad input, 130 or 143 interrupted.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import ttest_1samp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from runtime.flags import parse
from runtime.log import config_hash, source_hash
from runtime.signals import Interrupted, listen
from scripts.runlog import Run, read_run

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "baseline"
ARMS = {  # name: (what it is, flags); a value like 2x is that multiple of the track's own
    BASELINE: ("the recipe as it is", ""),
    "no_value_embeds": ("no value embeddings, nor factors on values", "--value-embeds off"),
    "no_smear": ("no smearing of token embeddings", "--smear off"),
    "no_skips": ("no skip connections", "--skips off"),
    "no_backout": ("no backout", "--backout off"),
    "no_attention_gates": ("no attention gates", "--attention-gates off"),
    "no_x0_mixing": ("no mixing in of the token embedding", "--x0-mixing off"),
    "no_window_warmup": ("the last scheduled window from the start", "--windows 11"),
    "six_windows": ("six windows, not three and an extension", "--windows 3,5,7,9,11,13 --extension 0"),
    "no_qk_norm": ("no norm on queries and keys", "--qk-norm off"),
    "adam_every_step": ("Adam on every step, not on odd ones", "--adam-every 1"),
    "muon": ("Muon, not NorMuon", "--optimizer muon"),
    "matrix_lr_double": ("matrix learning rate x 2", "--matrix-lr 2x"),
    "mlp_up_x1": ("MLP-up learning rate x 1, not x 2", "--mlp-up-lr-mul 1"),
    "packed_variance": ("attention reshaped after the variance", "--split-variance off"),
    "smear_newton_schulz": ("smear gate by Newton-Schulz", "--smear-method newton_schulz"),
    "smear_normalize": ("smear gate only normalized", "--smear-method normalize"),
    "smear_lr_0.1": ("smear gate learning rate x 0.1", "--smear-lr-mul 0.1"),
    "smear_lr_0.05": ("smear gate learning rate x 0.05", "--smear-lr-mul 0.05"),
}
OURS = ("--seed", "--trials", "--log-dir")  # flags of the trainer that are set here
CONFIDENCE, LEVEL = 0.95, 0.05

Results = dict[str, Any]  # "setting": what all runs share; "runs": a record for each, in order of start
Losses = dict[int, float | None]  # by seed; None: the run diverged


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


class Effect(NamedTuple):
    """Losses of an arm minus the baseline's on the same seeds. NaN: the pairs do not determine it."""

    arm: str
    n: int
    diverged: int
    mean: float = math.nan
    sd: float = math.nan
    low: float = math.nan  # ends of the two-sided interval of the mean
    high: float = math.nan
    p: float = math.nan

    @property
    def verdict(self) -> str:
        """What the pairs say of the recipe's choice, by this arm's own interval."""
        if self.diverged:
            return f"helps: the arm diverged {self.diverged} x"
        if math.isnan(self.low):
            return "too few pairs"
        return "helps" if self.low > 0 else "hurts" if self.high < 0 else "not distinguishable"


def paired_effect(arm: str, losses: Losses, baseline: Losses) -> Effect:
    """The paired t statistics over the seeds on which both runs ended with a loss."""
    pairs = [(loss, baseline[seed]) for seed, loss in losses.items() if baseline.get(seed) is not None]
    differences = [loss - base for loss, base in pairs if loss is not None and base is not None]
    n, diverged = len(differences), len(pairs) - len(differences)
    mean = float(np.mean(differences)) if n else math.nan
    if n < 2:
        return Effect(arm, n, diverged, mean)
    if not any(differences):  # the arm computes the same: no test, but no doubt either
        return Effect(arm, n, diverged, 0.0, 0.0, 0.0, 0.0)
    test = ttest_1samp(differences, 0.0)
    low, high = map(float, test.confidence_interval(CONFIDENCE))
    return Effect(arm, n, diverged, mean, float(np.std(differences, ddof=1)), low, high, float(test.pvalue))


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """p-values adjusted so that the chance of any false finding in the family keeps its level (Holm, 1979)."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        adjusted[name] = largest = max(largest, min(1.0, (len(p_values) - rank) * p))
    return adjusted


# ---------------------------------------------------------------------------------------------------------------------
# Results


def record(arm: str, run: Run) -> dict[str, Any] | None:
    """What is kept of a run that is over, complete or diverged."""
    if not run.complete and run.status != "nonfinite":
        return None
    env = run.header["env"]
    return {
        "arm": arm, "seed": run.seed, "val_loss": run.final_loss if run.complete else None, "steps": run.total_steps,
        "config_sha256": run.config_sha256, "source_sha256": run.source, "run_id": run.run_id,
        "machine": f"{env['cpu']}, {env['threads']} thread(s) a run, {env['dtype']}, torch {env['torch']}, "
                   f"{'compiled' if env['compiled'] else 'eager'}",
    }  # fmt: skip


def load(out: Path) -> Results:
    """The recorded results, and the finished runs that only their logs tell of."""
    path = out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {"setting": {}, "runs": []}
    known = {run["run_id"] for run in results["runs"]} | {"registry"}
    logs = [log for log in out.glob("runs/*/*.jsonl") if log.stem not in known]
    found = [record(log.parent.name, read_run(log)) for log in logs]
    results["runs"] = sorted(filter(None, [*results["runs"], *found]), key=lambda run: run["run_id"])
    return results


def save(out: Path, results: Results) -> None:
    """Write results.json, one run a line, and README.md; a reader never sees half of either."""
    runs = ",\n".join(json.dumps(run) for run in results["runs"])
    text = f'{{"setting": {json.dumps(results["setting"])},\n"runs": [\n{runs}\n]}}\n'
    for name, content in (("results.json", text), ("README.md", report(results))):
        temporary = out / f".{name}"
        temporary.write_text(content)
        temporary.replace(out / name)


def latest(results: Results) -> dict[str, dict[int, dict[str, Any]]]:
    """arm -> seed -> record; where a run was repeated, the one that started last."""
    chosen: dict[str, dict[int, dict[str, Any]]] = {}
    for run in results["runs"]:
        chosen.setdefault(run["arm"], {})[run["seed"]] = run
    return chosen


# ---------------------------------------------------------------------------------------------------------------------
# The table

COLUMNS = ("arm", "what is changed", "pairs", "difference", "95 % interval", "sd", "the recipe's choice", "Holm p")
READING = """\
Difference: loss of the arm minus that of the baseline on the same seed, nats per token, mean over the pairs; positive
where the recipe's choice helps. Interval: two-sided 95 % of that mean (paired t), for each arm by itself. Its
half-width (±) is about the smallest difference that these pairs can tell from zero: "not distinguishable" means no
larger than that, not zero. Holm p: adjusted for the family of the {family} arms that have one; up to 0.05 the finding
survives. With few seeds this is a screening: what does not survive needs fresh seeds before it is believed.
"""


def report(results: Results) -> str:
    """The Markdown page: what was run, how, and the effect of each arm, the most helpful piece first."""
    chosen = latest(results)
    if BASELINE not in chosen:
        return "No finished run of the baseline yet.\n"
    losses = {arm: {seed: run["val_loss"] for seed, run in runs.items()} for arm, runs in chosen.items()}
    effects = [paired_effect(arm, losses[arm], losses[BASELINE]) for arm in losses if arm != BASELINE]
    effects.sort(key=lambda effect: (not effect.diverged, -effect.mean if effect.n else math.inf))
    adjusted = holm({effect.arm: effect.p for effect in effects if not math.isnan(effect.p)})
    table = [COLUMNS, ("-", "-", "-:", "-:", "-", "-:", "-", "-"), *(cells(effect, adjusted) for effect in effects)]
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([*heading(results["setting"], chosen), "", *lines, "", READING.format(family=len(adjusted))])


def cells(effect: Effect, adjusted: dict[str, float]) -> tuple[str, ...]:
    p = adjusted.get(effect.arm)
    return (
        effect.arm,
        ARMS.get(effect.arm, ("no longer an arm",))[0],
        str(effect.n),
        f"{effect.mean:+.4f}" if effect.n else "",
        f"{effect.low:+.4f} to {effect.high:+.4f} (± {(effect.high - effect.low) / 2:.4f})" if effect.n > 1 else "",
        f"{effect.sd:.4f}" if effect.n > 1 else "",
        effect.verdict,
        "" if p is None else f"{p:.2g}, {'survives' if p <= LEVEL else 'does not survive'}",
    )


def heading(setting: dict[str, Any], chosen: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    runs = [run for seeds in chosen.values() for run in seeds.values()]
    base = [run["val_loss"] for run in chosen[BASELINE].values() if run["val_loss"] is not None]
    seeds = ",".join(map(str, sorted({run["seed"] for run in runs})))
    dates = sorted({run["run_id"][:8] for run in runs})
    tokens = setting["batch_tokens"]
    lines = [
        f"# Ablation: recipe {setting['recipe']}, track {setting['track']}, {setting['steps']:,} steps",
        "",
        f"- {len(runs)} runs of {setting['steps'] * tokens:,} tokens ({tokens:,} a step), seeds {seeds}, started "
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))} (UTC)",
        f"- baseline: mean validation loss {np.mean(base):.4f}, n = {len(base)}" if base else "- the baseline diverged",
    ]
    if len(base) > 1:
        lines[-1] += f", sd over seeds {np.std(base, ddof=1):.4f}"
    lines += sorted({f"- machine: {run['machine']}" for run in runs})
    lines += sorted({f"- source: {run['source_sha256']}" for run in runs})
    return [*lines, f"- again: `{setting['command']}`"]


# ---------------------------------------------------------------------------------------------------------------------
# Runs


class Job(NamedTuple):
    arm: str
    seed: int
    flags: list[str]
    config_sha256: str

    def done(self, results: Results) -> bool:
        run = latest(results).get(self.arm, {}).get(self.seed)
        return run is not None and run["config_sha256"] == self.config_sha256


def experiment(flags: list[str]) -> tuple[dict[str, Any], str]:
    """The trainer's configuration for these flags and its hash, as the run log has it; ValueError for a bad flag."""
    from train_gpt import Config, preset

    config = parse(Config, flags, preset, "")
    return dataclasses.asdict(config), config_hash(config.experiment())


def arm_flags(arm: str, config: dict[str, Any]) -> list[str]:
    """The flags of an arm, a value like 2x replaced by that multiple of the one in `config`."""
    words = ARMS[arm][1].split()
    for i, word in enumerate(words):
        if re.fullmatch(r"[\d.]+x", word):
            words[i] = f"{float(word[:-1]) * config[words[i - 1][2:].replace('-', '_')]:.12g}"
    return words


def plan(arms: Sequence[str], seeds: Sequence[int], extra: list[str]) -> list[Job]:
    """All jobs, seed by seed, so that what is done so far is balanced; without arms that change nothing here."""
    config, baseline = experiment(extra)
    flags = {arm: extra + arm_flags(arm, config) for arm in arms}
    hashes = {arm: experiment(words)[1] for arm, words in flags.items()}
    useful = [arm for arm in arms if arm == BASELINE or hashes[arm] != baseline]
    return [Job(arm, seed, flags[arm], hashes[arm]) for seed in seeds for arm in useful]


def check_source(results: Results) -> None:
    """ValueError unless all recorded runs have the source that a run would have now."""
    now = source_hash(ROOT)
    if others := {run["source_sha256"] for run in results["runs"]} - {now}:
        raise ValueError(f"the source changed: it is {now}, and there are runs of {', '.join(sorted(others))}. Go back "
                         f"to that, choose another --out, or mix them with --allow-source-change.")


def start(job: Job, out: Path, threads: int) -> subprocess.Popen:
    folder = out.resolve() / "runs" / job.arm
    folder.mkdir(parents=True, exist_ok=True)
    own = ["--seed", str(job.seed), "--log-dir", str(folder)]
    command = [sys.executable, str(ROOT / "train_gpt.py"), *job.flags, *own]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with (folder / f"seed_{job.seed}.txt").open("w") as output:
        # In a session of its own the child gets the terminal's Ctrl-C from this process only, not twice.
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True)


def run_all(jobs: list[Job], results: Results, arguments: argparse.Namespace) -> int:
    """Run the jobs, `--jobs` side by side, and record each as it ends; returns how many failed."""
    begun, waiting, failed = time.monotonic(), list(jobs), 0
    running: dict[subprocess.Popen, Job] = {}
    try:
        while waiting or running:
            while waiting and len(running) < arguments.jobs:
                if not arguments.allow_source_change:
                    check_source(results)
                job = waiting.pop(0)
                running[start(job, arguments.out, arguments.threads)] = job
            time.sleep(0.05)
            for child in [child for child in running if child.poll() is not None]:
                job = running.pop(child)
                results["runs"] = load(arguments.out)["runs"]
                save(arguments.out, results)
                failed += not job.done(results)
                over = len(jobs) - len(waiting) - len(running)
                minutes = (time.monotonic() - begun) / over * (len(jobs) - over) / 60
                print(f"{over}/{len(jobs)} | {outcome(job, child, results)} | {minutes:.1f} min left", flush=True)
    finally:
        for child in running:
            child.terminate()
        for child in running:
            child.wait()
    return failed


def outcome(job: Job, child: subprocess.Popen, results: Results) -> str:
    name = f"{job.arm}, seed {job.seed}"
    if not job.done(results):
        return f"{name}: FAILED, exit code {child.returncode}; what it said is in runs/{job.arm}/seed_{job.seed}.txt"
    loss = latest(results)[job.arm][job.seed]["val_loss"]
    return f"{name}: diverged" if loss is None else f"{name}: validation loss {loss:.4f}"


def run_experiment(arguments: argparse.Namespace) -> int:
    """Run what is not done yet; returns the exit code."""
    out, extra, results = arguments.out, arguments.extra, load(arguments.out)
    known = results["setting"].get("flags", extra)
    if known != extra:
        raise ValueError(f"{out} holds runs with the flags {known} after --, not {extra}: choose another --out.")
    jobs = plan(arguments.arms, arguments.seeds, extra)
    config, _ = experiment(extra)
    results["setting"] = {name: config[name] for name in ("track", "recipe", "steps", "batch_tokens")}
    results["setting"] |= {"flags": extra, "command": shlex.join(["python", "scripts/ablate.py", *arguments.words])}
    waiting = [job for job in jobs if not job.done(results)]
    print(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them done before", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    failed = run_all(waiting, results, arguments)
    save(out, results)
    print(report(results))
    return 1 if failed else 0


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def numbers(text: str) -> list[int]:
    """Integers with commas between them."""
    return [int(part) for part in text.split(",")]


def parse_arguments(words: list[str]) -> argparse.Namespace:
    cut = words.index("--") if "--" in words else len(words)
    own, extra = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("records/ablations/tiny"), help="folder of the experiment")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2, 3], help="one run of each arm for each of them")
    parser.add_argument("--arms", default="all", help="names with commas between them; the baseline always runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--allow-source-change", action="store_true", help="mix runs of several sources in one table")
    parser.add_argument("--list", action="store_true", help="print the arms and stop")
    parser.add_argument("--report", action="store_true", help="write and print the table of the finished runs and stop")
    arguments = parser.parse_args(own, argparse.Namespace(extra=extra, words=words))
    arguments.arms = list(ARMS) if arguments.arms == "all" else [BASELINE, *arguments.arms.split(",")]
    arguments.arms = list(dict.fromkeys(arguments.arms))
    if unknown := [name for name in arguments.arms if name not in ARMS]:
        parser.error(f"--arms {unknown[0]}: no such arm; --list prints them")
    if taken := [word for word in extra if word.split("=")[0] in OURS]:
        parser.error(f"{taken[0]} after --: this script gives it to each run; use --seeds and --out")
    if min(arguments.jobs, arguments.threads) < 1:
        parser.error("--jobs and --threads must be at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(list(sys.argv[1:] if argv is None else argv))
    if arguments.list:
        print("\n".join(f"{name:20} {about:44} {flags}" for name, (about, flags) in ARMS.items()))
        return 0
    listen()
    try:
        if not arguments.report:
            return run_experiment(arguments)
        results = load(arguments.out)
        if not results["setting"]:
            raise ValueError(f"no experiment in {arguments.out}: run one, or name another --out.")
        save(arguments.out, results)
        print(report(results))
        return 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signalled:
        print("interrupted; the same command resumes", file=sys.stderr)
        return signalled.code


if __name__ == "__main__":
    sys.exit(main())
