"""Which pieces of the recipe help? Each is switched off or exchanged, on the baseline's seeds.

    python scripts/ablate.py --seeds 0,1,2,3                 all arms; the same command resumes
    python scripts/ablate.py --arms no_smear -- --steps 200  one arm, with flags of train_gpt.py
    python scripts/ablate.py --report                        only print the table of the logs

The logs go to OUT/runs/ARM; the table is made from them alone, in Markdown. Exit code: 0 done, 1 a
run failed, 2 bad input, 130 or 143 interrupted.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from claims.runlog import read_runs
from claims.runs import Run
from claims.stats import holm, paired
from runtime.errors import Interrupted
from runtime.log import config_hash, source_hash
from scripts.command import listen, make_parser, numbers, run_child, set_up_output

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


def configuration(flags: list[str]) -> dict[str, Any]:
    """Every setting of a run with these flags. Raises ValueError for flags that are refused.

    Asked of the trainer in a process of its own: it imports torch, tools do not.
    """
    command = [sys.executable, str(ROOT / "train_gpt.py"), *flags, "--print-config"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"train_gpt.py refuses {' '.join(flags)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def read_arms(out: Path) -> dict[str, dict[int, Run]]:
    """The runs that finished or diverged, by arm and seed; of one seed the last that started."""
    arms: dict[str, dict[int, Run]] = {}
    for log in sorted((out / "runs").glob("*/*_*.jsonl")):  # run ids sort by start time
        for run in read_runs(log):
            if run.seed is not None and (run.complete or run.status == "nonfinite"):
                arms.setdefault(log.parent.name, {})[run.seed] = run
    return arms


def report(out: Path) -> str:
    """The table of all arms that have runs, in Markdown, the most helpful piece first."""
    arms = read_arms(out)
    base = arms.pop(BASELINE, {})
    if not base:
        raise ValueError(f"{out} has no finished run of the baseline: run one, or name an --out")
    pairs, found = {}, {}
    for arm, runs in arms.items():
        pairs[arm] = [seed for seed in runs if seed in base and runs[seed].complete]
        pairs[arm] = [seed for seed in pairs[arm] if base[seed].complete]
        found[arm] = paired(last_losses(runs, pairs[arm]), last_losses(base, pairs[arm]))
    adjusted = holm({arm: one.p_two_sided for arm, one in found.items() if one.p_two_sided >= 0})
    sources = {str(run.source) for runs in (base, *arms.values()) for run in runs.values()}
    lines = [f"{len(base)} seeds of the baseline: {', '.join(map(str, sorted(base)))}", ""]
    lines += [f"- source {source}" for source in sorted(sources)]
    lines += ["", "| arm | flags | pairs | difference | 95 % interval | diverged | Holm p |"]
    lines.append("|-|-|-|-|-|-|-|")
    for arm in sorted(found, key=lambda arm: (not pairs[arm], -found[arm].mean)):
        one = found[arm]
        diverged = sum(not run.complete for run in arms[arm].values())
        p = f"{adjusted[arm]:.2g}" if arm in adjusted else ""
        lines.append(
            f"| {arm} | `{ARMS.get(arm, 'no longer an arm')}` | {len(pairs[arm])} "
            f"| {one.mean:+.4f} | {one.low:+.4f} to {one.high:+.4f} | {diverged} | {p} |"
        )
    return "\n".join([*lines, "", READING])


def last_losses(runs: dict[int, Run], seeds: list[int]) -> list[float]:
    return [runs[seed].validations[-1].loss for seed in seeds]


# ---- Runs


def find_jobs(given: argparse.Namespace) -> list[tuple[str, int]]:
    """(arm, seed) of what is not done, seed by seed, so that what is done is balanced."""
    done, source = read_arms(given.out), source_hash(ROOT)
    hashes = {}
    for arm in given.arms:
        hashes[arm] = config_hash(configuration(given.extra + ARMS[arm].split()))
    jobs = []
    for seed in given.seeds:
        for arm in given.arms:
            run = done.get(arm, {}).get(seed)
            if run is None or (run.config_sha256, run.source) != (hashes[arm], source):
                jobs.append((arm, seed))
    return jobs


def run_all(given: argparse.Namespace) -> int:
    """Run what is missing; returns how many runs failed."""
    jobs, failed = find_jobs(given), 0
    print(f"{len(jobs)} runs to do", flush=True)
    for arm, seed in jobs:
        folder = given.out.resolve() / "runs" / arm
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "train_gpt.py"), *given.extra, *ARMS[arm].split()]
        command += ["--seed", str(seed), "--log-dir", str(folder)]
        code = run_child(command, folder / f"seed_{seed}.console")
        if code not in (0, 3):  # 3: the run diverged, which is a result
            failed += 1
        print(f"{arm}, seed {seed}: exit code {code}", flush=True)
    return failed


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("logs/ablation"), help="folder of the runs (%(default)s)")
    add("--seeds", type=numbers(int, 0, 10**9), default=[0, 1, 2, 3], help="(%(default)s)")
    add("--arms", default=",".join(ARMS), help="names with commas; the baseline always runs")
    add("--report", action="store_true", help="print the table of the logs and stop")
    add("extra", nargs="*", metavar="FLAG", help="after --: flags of train_gpt.py for each run")
    given = parser.parse_args(argv)
    given.arms = list(dict.fromkeys([BASELINE, *given.arms.split(",")]))
    for arm in given.arms:
        if arm not in ARMS:
            parser.error(f"--arms {arm}: no such arm; there are {', '.join(ARMS)}")
    if {"--seed", "--trials", "--log-dir"} & {word.partition("=")[0] for word in given.extra}:
        parser.error("--seed, --trials and --log-dir are given to each run by this script")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    given = parse_arguments(argv)
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
