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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from runtime.flags import parse
from runtime.log import config_hash, source_hash
from runtime.signals import Interrupted, listen
from scripts.command import numbers
from claims.runlog import Run, read_run
from claims.stats import Result, holm, one_sample

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
LEVEL = 0.05

Record = dict[str, Any]  # of one run
Results = dict[str, Any]  # "setting": what all runs share; "runs": a record for each, in order of start
Losses = dict[int, float | None]  # by seed; None: the run diverged


# ---- Statistics


class Effect(NamedTuple):
    """What the losses of an arm, minus the baseline's on the same seeds, say of the recipe's choice."""

    arm: str
    diverged: int
    difference: Result

    @property
    def verdict(self) -> str:
        """By this arm's own interval, the family of the others left aside."""
        if self.diverged:
            return f"helps: the arm diverged {self.diverged} x"
        n, mean, margin = self.difference.n, self.difference.mean, self.difference.margin95
        if n < 2:
            return "too few pairs"
        return "helps" if mean > margin else "hurts" if mean < -margin else "not distinguishable"


def paired_effect(arm: str, losses: Losses, baseline: Losses) -> Effect:
    """The paired t statistics over the seeds on which both runs ended with a loss."""
    shared = [(loss, base) for seed, loss in losses.items() if (base := baseline.get(seed)) is not None]
    differences = [loss - base for loss, base in shared if loss is not None]
    return Effect(arm, len(shared) - len(differences), one_sample(differences, 0.0))


# ---- Results


def record(arm: str, run: Run) -> Record | None:
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


def latest(results: Results) -> dict[tuple[str, int], Record]:
    """(arm, seed) -> record; where a run was repeated, the one that started last."""
    return {(run["arm"], run["seed"]): run for run in results["runs"]}


# ---- The table

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
    losses: dict[str, Losses] = {}
    for (arm, seed), run in latest(results).items():
        losses.setdefault(arm, {})[seed] = run["val_loss"]
    if BASELINE not in losses:
        return "No finished run of the baseline yet.\n"
    effects = [paired_effect(arm, losses[arm], losses[BASELINE]) for arm in losses if arm != BASELINE]
    effects.sort(key=lambda effect: (not effect.diverged, -effect.difference.mean if effect.difference.n else math.inf))
    adjusted = holm({effect.arm: p for effect in effects if not math.isnan(p := effect.difference.two_sided_p)})
    table = [COLUMNS, ("-", "-", "-:", "-:", "-", "-:", "-", "-"), *(cells(effect, adjusted) for effect in effects)]
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([*heading(results, losses[BASELINE]), "", *lines, "", READING.format(family=len(adjusted))])


def cells(effect: Effect, adjusted: dict[str, float]) -> tuple[str, ...]:
    found, p = effect.difference, adjusted.get(effect.arm)
    low, high = found.mean - found.margin95, found.mean + found.margin95
    return (
        effect.arm,
        ARMS.get(effect.arm, ("no longer an arm",))[0],
        str(found.n),
        f"{found.mean:+.4f}" if found.n else "",
        f"{low:+.4f} to {high:+.4f} (± {found.margin95:.4f})" if found.n > 1 else "",
        f"{found.sd:.4f}" if found.n > 1 else "",
        effect.verdict,
        "" if p is None else f"{p:.2g}, {'survives' if p <= LEVEL else 'does not survive'}",
    )


def heading(results: Results, baseline: Losses) -> list[str]:
    setting, runs = results["setting"], latest(results).values()
    seeds = ",".join(map(str, sorted({run["seed"] for run in runs})))
    dates = sorted({run["run_id"][:8] for run in runs})
    tokens = setting["batch_tokens"]
    base = one_sample([loss for loss in baseline.values() if loss is not None], 0.0)
    summary = f"mean validation loss {base.mean:.4f}, n = {base.n}" if base.n else "diverged"
    return [
        f"# Ablation: recipe {setting['recipe']}, track {setting['track']}, {setting['steps']:,} steps",
        "",
        f"- {len(runs)} runs of {setting['steps'] * tokens:,} tokens ({tokens:,} a step), seeds {seeds}, started "
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))} (UTC)",
        f"- baseline: {summary}" + (f", sd over seeds {base.sd:.4f}" if base.n > 1 else ""),
        *sorted({f"- machine: {run['machine']}" for run in runs}),
        *sorted({f"- source: {run['source_sha256']}" for run in runs}),
        f"- again: `{setting['command']}`",
    ]


# ---- Runs


class Job(NamedTuple):
    arm: str
    seed: int
    flags: list[str]
    config_sha256: str

    def result(self, results: Results) -> Record | None:
        """The record of the run that did this job, if there is one."""
        run = latest(results).get((self.arm, self.seed))
        return run if run and run["config_sha256"] == self.config_sha256 else None


def resolve(flags: list[str]) -> tuple[dict[str, Any], str]:
    """The trainer's configuration for these flags and its hash, as the run log has it; ValueError for a bad flag."""
    from train_gpt import Config, preset

    config = dataclasses.asdict(parse(Config, flags, preset, ""))
    return config, config_hash(config)


def arm_flags(arm: str, config: dict[str, Any]) -> list[str]:
    """The flags of an arm, a value like 2x replaced by that multiple of the one in `config`."""
    words = ARMS[arm][1].split()
    for i, word in enumerate(words):
        if re.fullmatch(r"[\d.]+x", word):
            words[i] = f"{float(word[:-1]) * config[words[i - 1][2:].replace('-', '_')]:.12g}"
    return words


def plan(arms: Sequence[str], seeds: Sequence[int], extra: list[str]) -> list[Job]:
    """All jobs, seed by seed, so that what is done so far is balanced; without arms that change nothing here."""
    config, baseline = resolve(extra)
    flags = {arm: extra + arm_flags(arm, config) for arm in arms}
    hashes = {arm: resolve(words)[1] for arm, words in flags.items()}
    useful = [arm for arm in arms if arm == BASELINE or hashes[arm] != baseline]
    return [Job(arm, seed, flags[arm], hashes[arm]) for seed in dict.fromkeys(seeds) for arm in useful]


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


def run_missing(results: Results, arguments: argparse.Namespace) -> int:
    """Run what is not done yet; returns how many runs failed."""
    out, extra = arguments.out, arguments.extra
    known = results["setting"].get("flags", extra)
    if known != extra:
        raise ValueError(f"{out} holds runs with the flags {known} after --, not {extra}: choose another --out.")
    jobs = plan(arguments.arms, arguments.seeds, extra)
    config, _ = resolve(extra)
    results["setting"] = {name: config[name] for name in ("track", "recipe", "steps", "batch_tokens")}
    results["setting"] |= {"flags": extra, "command": shlex.join(["python", "scripts/ablate.py", *arguments.words])}
    waiting = [job for job in jobs if not job.result(results)]
    print(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them done before", flush=True)
    return run_all(waiting, results, arguments)


def run_all(waiting: list[Job], results: Results, arguments: argparse.Namespace) -> int:
    """Run the jobs, `--jobs` side by side, and record each as it ends; returns how many failed."""
    out, begun, over, failed = arguments.out, time.monotonic(), 0, 0
    running: dict[subprocess.Popen, Job] = {}
    try:
        while waiting or running:
            while waiting and len(running) < arguments.jobs:
                if not arguments.allow_source_change:
                    check_source(results)
                job = waiting.pop(0)
                running[start(job, out, arguments.threads)] = job
            time.sleep(0.05)
            for child in [child for child in running if child.poll() is not None]:
                job = running.pop(child)
                results["runs"] = load(out)["runs"]
                save(out, results)
                failed += not job.result(results)
                over, left = over + 1, len(waiting) + len(running)
                minutes = (time.monotonic() - begun) / over * left / 60
                print(f"{over}/{over + left} | {outcome(job, child, results)} | {minutes:.1f} min left", flush=True)
    finally:
        for child in running:
            child.terminate()
        for child in running:
            child.wait()
    return failed


def outcome(job: Job, child: subprocess.Popen, results: Results) -> str:
    name, run = f"{job.arm}, seed {job.seed}", job.result(results)
    if run is None:
        return f"{name}: FAILED, exit code {child.returncode}; what it said is in runs/{job.arm}/seed_{job.seed}.txt"
    return f"{name}: diverged" if run["val_loss"] is None else f"{name}: validation loss {run['val_loss']:.4f}"


# ---- Command line


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("records/ablations/tiny"), help="folder of the experiment")
    parser.add_argument(
        "--seeds", type=numbers(int, 0, 10**9), default=[0, 1, 2, 3], help="one run of each arm for each of them")
    parser.add_argument("--arms", default="all", help="names with commas between them; the baseline always runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--allow-source-change", action="store_true", help="mix runs of several sources in one table")
    parser.add_argument("--list", action="store_true", help="print the arms and stop")
    parser.add_argument("--report", action="store_true", help="write and print the table of the finished runs and stop")
    parser.add_argument("extra", nargs="*", metavar="FLAG", help="after --: flags of train_gpt.py for each run")
    arguments = parser.parse_args(words, argparse.Namespace(words=words))
    names = ARMS if arguments.arms == "all" else [BASELINE, *arguments.arms.split(",")]
    arguments.arms = list(dict.fromkeys(names))
    if unknown := [name for name in names if name not in ARMS]:
        parser.error(f"--arms {unknown[0]}: no such arm; --list prints them")
    if taken := [word for word in arguments.extra if word.split("=")[0] in OURS]:
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
        results, failed = load(arguments.out), 0
        if not arguments.report:
            failed = run_missing(results, arguments)
        elif not results["setting"]:
            raise ValueError(f"no experiment in {arguments.out}: run one, or name another --out.")
        save(arguments.out, results)
        print(report(results))
        return 1 if failed else 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signalled:
        print("interrupted; the same command resumes", file=sys.stderr)
        return signalled.code


if __name__ == "__main__":
    sys.exit(main())
