"""Which pieces of the recipe help? Each arm switches off or replaces one, on the same seeds.

    python scripts/ablate.py --seeds 0,1,2,3                 all arms; the same command resumes
    python scripts/ablate.py --arms no_smear -- --steps 200  one arm, with flags of train_gpt.py
    python scripts/ablate.py --report                        only print the table of the logs

The logs go to OUT/runs/ARM; the table is made from them alone, in Markdown. Exit code: 0 done, 1 a
run failed, 2 bad input, 130 or 143 interrupted.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from claims.runlog import read_run
from claims.runs import Run
from claims.stats import holm, paired
from runtime.log import config_hash, source_hash
from scripts.command import ask_trainer, command, make_parser, run_child, start, whole_numbers

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "baseline"
ARMS = {
    BASELINE: "",
    "no_value_embeds": "--value-embeds off",
    "no_smear": "--smear off",
    "no_key_offset": "--key-offset off",
    "no_tied_keys": "--tie-keys off",
    "no_bigram": "--bigram-rows 0",
    "no_mlp_up_x2": "--mlp-up-lr-mul 1",
    "own_value": "--own-value on",
    "nonzero_output": "--zero-output off",
    "skips": "--skips on",
    "backout": "--backout on",
    "attention_gates": "--attention-gates on",
    "x0_mixing": "--x0-mixing on",
    "growing_windows": "--stages tiny",
    "adam_every_other_step": "--adam-every 2",
    "half_cooldown": "--cooldown 0.5",
    "rising_momentum": "--momentum 0.85,0.95",
    "muon": "--optimizer muon",
}
OFFSET = "--key-offset on --tie-keys on"
# How much of the gain belongs to the optimizer, and how much to the model? Only run by name.
CONTROLS = {
    "plain": "--key-offset off --tie-keys off --bigram-rows 0",
    "muon_plain": "--recipe muon",
    "muon_offset": f"--recipe muon {OFFSET}",
    "adamw_plain": "--recipe adamw",
    "adamw_offset": f"--recipe adamw {OFFSET}",
    "torch_muon_plain": "--recipe muon --optimizer torch_muon",
    "torch_muon_offset": f"--recipe muon --optimizer torch_muon {OFFSET}",
    "torch_adamw_plain": "--recipe adamw --optimizer torch_adamw",
    "torch_adamw_offset": f"--recipe adamw --optimizer torch_adamw {OFFSET}",
}
FLAGS = ARMS | CONTROLS
HEAD = "| arm | flags | pairs | difference | 95 % interval | diverged | Holm p |\n|-|-|-|-|-|-|-|"
READING = """\
Difference: loss of the arm minus that of the baseline on the same seed, nats per token; positive
where the recipe's choice helps. Interval: two-sided 95 % of its mean (paired t). Holm p: adjusted
for all arms of the table. With few seeds this is a screening: confirm with fresh seeds."""


def read_arm(out: Path, arm: str) -> dict[int, Run]:
    """The runs that finished or diverged, by seed; of one seed the last that started."""
    runs = {}
    for log in sorted((out / "runs" / arm).glob("*_*.jsonl")):  # run ids sort by start time
        run = read_run(log)
        if run.seed is not None and (run.complete or run.status == "nonfinite"):
            runs[run.seed] = run
    return runs


def report(out: Path) -> str:
    """The table of all arms that have runs, in Markdown."""
    base = read_arm(out, BASELINE)
    if not base:
        raise ValueError(f"{out} has no finished run of the baseline: run one, or name an --out")
    sources = {str(run.source) for run in base.values()}
    tests, counts = {}, {}
    for arm in FLAGS:
        runs = {} if arm == BASELINE else read_arm(out, arm)
        complete = [seed for seed, run in runs.items() if run.complete]
        pairs = [seed for seed in complete if seed in base and base[seed].complete]
        sources |= {str(run.source) for run in runs.values()}
        if runs:
            tests[arm] = paired(last_losses(runs, pairs), last_losses(base, pairs))
            counts[arm] = len(pairs), len(runs) - len(complete)
    ps = {arm: test.p_two_sided for arm, test in tests.items()}
    adjusted = holm({arm: p for arm, p in ps.items() if not math.isnan(p)})
    lines = [f"{len(base)} seeds of the baseline: {', '.join(map(str, sorted(base)))}", ""]
    lines += [*[f"- source {source}" for source in sorted(sources)], "", HEAD]
    for arm, test in tests.items():
        pair_count, diverged = counts[arm]
        p = f"{adjusted[arm]:.2g}" if arm in adjusted else ""
        lines.append(
            f"| {arm} | `{FLAGS[arm]}` | {pair_count} | {test.mean:+.4f} "
            f"| {test.low:+.4f} to {test.high:+.4f} | {diverged} | {p} |"
        )
    return "\n".join([*lines, "", READING])


def last_losses(runs: dict[int, Run], seeds: list[int]) -> list[float]:
    return [runs[seed].validations[-1].loss for seed in seeds]


# ---- Runs


def run_missing(given: argparse.Namespace) -> int:
    """Make the runs that have no log of this source and configuration; return how many failed.

    Seed by seed, so that after an interruption all arms have about the same seeds.
    """
    arms = [BASELINE, *[arm for arm in given.arms if arm != BASELINE]]
    flags = {arm: [*given.extra, *FLAGS[arm].split()] for arm in arms}
    configs = {arm: config_hash(ask_trainer(ROOT, flags[arm])) for arm in arms}
    source, failed = source_hash(ROOT), 0
    for seed in given.seeds:
        for arm in arms:
            done = read_arm(given.out, arm).get(seed)
            if done and (done.config_sha256, done.source) == (configs[arm], source):
                continue
            words = [sys.executable, str(ROOT / "train_gpt.py"), *flags[arm], "--seed", str(seed)]
            code = run_child([*words, "--log-dir", str(given.out / "runs" / arm)])
            print(f"{arm}, seed {seed}: exit code {code}", flush=True)
            if code not in (0, 3):  # 3: the run diverged, which is a result
                failed += 1
    return failed


@command
def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("logs/ablation"), help="folder of the runs (%(default)s)")
    add("--seeds", type=whole_numbers, default=[0, 1, 2, 3], help="(%(default)s)")
    add("--arms", nargs="+", choices=FLAGS, default=list(ARMS), help="the baseline always runs")
    add("--report", action="store_true", help="print the table of the logs and stop")
    add("extra", nargs="*", metavar="FLAG", help="after --: flags of train_gpt.py for each run")
    given = parser.parse_args(argv)
    failed = 0 if given.report else run_missing(given)
    print(report(given.out))
    return 1 if failed else 0


if __name__ == "__main__":
    start(main)
