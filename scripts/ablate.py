"""Which pieces of the recipe help? Each is switched off or exchanged, on the baseline's seeds.

    python scripts/ablate.py --list                          the arms
    python scripts/ablate.py --seeds 0,1,2,3 --jobs 2        run them; the same command resumes
    python scripts/ablate.py --arms no_smear -- --steps 200  one arm, with flags of train_gpt.py
    python scripts/ablate.py --report                        only print the table of the logs

The logs go to OUT/runs/ARM; the table is made from them alone, in Markdown. Exit code: 0 done, 1 a
run failed, 2 bad input, 130 or 143 interrupted.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from claims.runlog import Run, read_all
from claims.stats import holm, paired
from runtime.errors import Interrupted
from runtime.log import config_hash, source_hash
from scripts.command import listen, make_parser, numbers, set_up_output

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "baseline"
ARMS = {
    BASELINE: "",
    "no_value_embeds": "--value-embeds off",
    "no_smear": "--smear off",
    "no_skips": "--skips off",
    "no_backout": "--backout off",
    "no_attention_gates": "--attention-gates off",
    "no_x0_mixing": "--x0-mixing off",
    "constant_window": "--stages constant",
    "adam_every_step": "--adam-every 1",
    "muon": "--optimizer muon",
    "mlp_up_x1": "--mlp-up-lr-mul 1",
}
READING = """\
Difference: loss of the arm minus that of the baseline on the same seed, nats per token; positive
where the recipe's choice helps. Interval: two-sided 95 % of its mean (paired t). Holm p: adjusted
for all arms of the table. With few seeds this is a screening: confirm with fresh seeds."""

Losses = dict[int, Run]  # the run of each seed that ended, finished or diverged


def configuration(flags: list[str]) -> dict[str, Any]:
    """Every setting of a run with these flags, asked of the trainer: it imports torch, we do not.

    Raises ValueError for flags that the trainer refuses.
    """
    command = [sys.executable, str(ROOT / "train_gpt.py"), *flags, "--print-config"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"train_gpt.py refuses {' '.join(flags)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def read_arms(out: Path) -> dict[str, Losses]:
    """What the logs tell, by arm and seed; of several runs of one seed the last that started."""
    arms: dict[str, Losses] = {}
    for folder in sorted((out / "runs").glob("*")):
        if not any(folder.glob("*_*.jsonl")):  # only the registry yet, or nothing
            continue
        runs, _ = read_all([folder])  # the console of each run lies there, too, as .console
        for run in sorted(runs, key=lambda run: run.run_id):
            if run.seed is not None and (run.complete or run.status == "nonfinite"):
                arms.setdefault(folder.name, {})[run.seed] = run
    return arms


# ---- The table


def report(out: Path) -> str:
    """The Markdown table of all arms that have runs, the most helpful piece first."""
    arms = read_arms(out)
    base = arms.pop(BASELINE, {})
    if not base:
        raise ValueError(f"{out} has no finished run of the baseline: run one, or name an --out")
    found = {}
    for arm, losses in arms.items():
        seeds = [seed for seed in losses if seed in base and losses[seed].complete]
        seeds = [seed for seed in seeds if base[seed].complete]
        values = [losses[seed].final_loss or math.nan for seed in seeds]
        found[arm] = paired(values, [base[seed].final_loss or math.nan for seed in seeds])
    adjusted = holm({a: one.p_two_sided for a, one in found.items() if one.p_two_sided >= 0})
    lines = [f"- {len(base)} seeds of the baseline: {', '.join(map(str, sorted(base)))}"]
    everything = [run for losses in [base, *arms.values()] for run in losses.values()]
    for name in ("cpu", "gpu", "threads", "dtype", "torch", "compiled"):
        values = sorted({str(run.env.get(name)) for run in everything})
        lines.append(f"- {name}: {', '.join(values)}")
    lines += sorted({f"- source: {run.source}" for run in everything})
    lines += ["", "| arm | flags | pairs | difference | 95 % interval | diverged | Holm p |"]
    lines.append("|-|-|-|-|-|-|-|")
    for arm, one in sorted(found.items(), key=lambda item: -item[1].mean):
        diverged = sum(not run.complete for run in arms[arm].values())
        p = f"{adjusted[arm]:.2g}" if arm in adjusted else ""
        cells = [arm, f"`{ARMS.get(arm, 'no longer an arm')}`", f"{one.n_a}", f"{one.mean:+.4f}"]
        cells += [f"{one.low:+.4f} to {one.high:+.4f}", f"{diverged}", p]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", READING])


# ---- Runs


def find_jobs(given: argparse.Namespace) -> list[tuple[str, int, list[str]]]:
    """(arm, seed, flags) of what is not done, seed by seed, so that what is done is balanced."""
    hashes = {}
    for arm in given.arms:
        hashes[arm] = config_hash(configuration(given.extra + ARMS[arm].split()))
    done = read_arms(given.out)
    jobs = []
    for seed in given.seeds:
        for arm in given.arms:
            if arm != BASELINE and hashes[arm] == hashes[BASELINE]:
                continue  # the arm changes nothing here
            run = done.get(arm, {}).get(seed)
            if run is None or run.config_sha256 != hashes[arm]:
                jobs.append((arm, seed, given.extra + ARMS[arm].split()))
    return jobs


def start(out: Path, arm: str, seed: int, flags: list[str], threads: int) -> subprocess.Popen:
    folder = out.resolve() / "runs" / arm
    folder.mkdir(parents=True, exist_ok=True)
    own = ["--seed", str(seed), "--log-dir", str(folder)]
    command = [sys.executable, str(ROOT / "train_gpt.py"), *flags, *own]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with (folder / f"seed_{seed}.console").open("w") as output:
        # A session of its own: Ctrl-C reaches the child through this process only, not twice.
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def run_all(given: argparse.Namespace) -> int:
    """Run what is missing, `--jobs` side by side; returns how many runs failed."""
    waiting, source = find_jobs(given), source_hash(ROOT)
    running: dict[subprocess.Popen, str] = {}
    failed = 0
    print(f"{len(waiting)} runs to do", flush=True)
    try:
        while waiting or running:
            while waiting and len(running) < given.jobs:
                if source_hash(ROOT) != source:
                    raise ValueError("the source changed during the experiment: begin a new --out")
                arm, seed, flags = waiting.pop(0)
                child = start(given.out, arm, seed, flags, given.threads)
                running[child] = f"{arm}, seed {seed}"
            time.sleep(0.05)
            for child in [child for child in running if child.poll() is not None]:
                failed += child.returncode not in (0, 3)  # 3: it diverged, which is a result
                print(f"{running.pop(child)}: exit code {child.returncode}", flush=True)
    finally:
        for child in running:
            child.terminate()
        for child in running:
            child.wait()
    return failed


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("logs/ablation"), help="folder of the runs (%(default)s)")
    add("--seeds", type=numbers(int, 0, 10**9), default=[0, 1, 2, 3], help="(%(default)s)")
    add("--arms", default=",".join(ARMS), help="names with commas; the baseline always runs")
    add("--jobs", type=int, default=2, help="runs side by side (%(default)s)")
    add("--threads", type=int, default=1, help="threads of each run (%(default)s)")
    add("--list", action="store_true", help="print the arms and stop")
    add("--report", action="store_true", help="print the table of the logs and stop")
    add("extra", nargs="*", metavar="FLAG", help="after --: flags of train_gpt.py for each run")
    given = parser.parse_args(argv)
    given.arms = list(dict.fromkeys([BASELINE, *given.arms.split(",")]))
    for arm in given.arms:
        if arm not in ARMS:
            parser.error(f"--arms {arm}: no such arm; --list prints them")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    given = parse_arguments(argv)
    if given.list:
        print("\n".join(f"{arm:20} {flags}" for arm, flags in ARMS.items()))
        return 0
    try:
        failed = 0 if given.report else run_all(given)
        print(report(given.out))
        return 1 if failed else 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signalled:
        print("interrupted; the same command resumes", file=sys.stderr)
        return signalled.code


if __name__ == "__main__":
    listen()
    set_up_output()
    sys.exit(main())
