"""Which pieces of the recipe help? Each arm switches off or replaces one, on the same seeds.

    python scripts/ablate.py --seeds 0,1,2,3                 all arms; the same command resumes
    python scripts/ablate.py --arms no_bigram -- --steps 20  one arm, with flags of train_gpt.py
    python scripts/ablate.py --report                        only print the table of the logs

The logs go to OUT/runs/ARM; the tables are made from them alone, in Markdown. --pieces
records/ablations/pieces.json adds what others claim of each piece, --figure effects.svg a picture.
Exit code: 0 done, 1 a run failed, 2 bad input, 130 or 143 interrupted.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import ask_trainer, command, make_parser, start, svg, train, whole_numbers

from claims.logs import finished_runs
from claims.pages import table
from claims.plots import plot_effects
from claims.runs import Run
from claims.stats import NAN, Difference, holm, paired
from runtime.log import config_hash, source_hash

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "baseline"
ARMS = {
    BASELINE: "",
    "no_value_embeds": "--value-embeds off --copy-init 0",
    "smear": "--smear on",
    "no_key_offset": "--key-offset off",
    "no_tied_keys": "--init-keys-as-queries off",
    "no_bigram": "--bigram-rows 0",
    "no_copying": "--copy-init 0",
    "no_short_documents": "--stages constant",
    "no_mlp_up_x2": "--mlp-up-lr-mul 1",
    "own_value": "--xsa on",
    "nonzero_output": "--zero-output off",
    "skips": "--skips on",
    "backout": "--backout on",
    "no_attention_gates": "--attention-gates off",
    "x0_mixing": "--x0-mixing on",
    "growing_windows": "--stages windows",
    "adam_every_other_step": "--adam-accum-steps 2",
    "half_cooldown": "--cooldown 0.5",
    "rising_momentum": "--momentum 0.85,0.95",
    "muon": "--optimizer muon",
    "cautious_decay": "--cautious-wd on --matrix-wd 1.2 --adam-wd 0.005",
    "residual_multiplier": "--x0-mixing on --stream-init 1.1",
    "growing_batch": "--stages growing",
    "tied_head": "--stages tied --embed-std 0.005 --embed-lr-mul 1",
    "vector_betas": "--vector-betas 0.9,0.99",
    "multi_token": "--stages ahead",
    "shifted_softcap": "--softcap shifted",
    "no_value_gates": "--value-gates off",
    "gates_under_adam": "--gates adam",
    "paired_heads": "--paired-heads on",
    "no_learning_rate_floor": "--final-lr 0.1",
    "cached_attention_input": "--cached-input on",
    "muon_head_pairs": "--muon-head-pairs on",
    "signs": "--bigram-signs on",
    "prefixes": "--stages prefix --prefixes on",
}
# These arms leave a piece out (muon: what NorMuon adds); the others put one in.
LEAVE_OUT = {"muon"} | {arm for arm in ARMS if arm.startswith("no_")}
OFFSET = "--key-offset on --init-keys-as-queries on"
# The best settings of records/tuning, for the plain GPT.
ADAMW = "--recipe adamw --matrix-lr 0.0014 --matrix-wd 0 --matrix-beta2 0.9 --momentum 0.8,0.8"
ADAMW += " --adam-lr 0.016 --cooldown 1 --final-lr 0"
MUON = "--recipe muon --momentum 0.9,0.9 --embed-lr-mul 25 --cooldown 1 --final-lr 0"
# How much of the gain belongs to the optimizer, and how much to the model? Only run by name.
CONTROLS = {
    "plain": "--key-offset off --init-keys-as-queries off --bigram-rows 0",
    "muon_plain": MUON,
    "muon_offset": f"{MUON} {OFFSET}",
    "adamw_plain": ADAMW,
    "adamw_offset": f"{ADAMW} {OFFSET}",
    "torch_muon_plain": f"{MUON} --optimizer torch_muon",
    "torch_muon_offset": f"{MUON} --optimizer torch_muon {OFFSET}",
    "torch_adamw_plain": f"{ADAMW} --optimizer torch_adamw",
    "torch_adamw_offset": f"{ADAMW} --optimizer torch_adamw {OFFSET}",
}
FLAGS = ARMS | CONTROLS
HEAD = "| arm | flags | pairs | difference | 95 % interval | diverged | Holm p |"
READING = """\
Difference: loss of the arm minus that of the baseline on the same seed, nats per token; positive
where the recipe's choice helps. Interval: two-sided 95 % of its mean (paired t). Holm p: adjusted
for all arms of the table. With few seeds this is a screening: confirm with fresh seeds."""
LEVEL = 0.05
PIECES = "| piece | lines | claim | pairs | effect | 95 % interval | diverged | Holm p |"
PIECES += " elsewhere | here |"
PIECES_READING = """\
Effect: loss with the piece minus loss without it on the same seed, nats per token; negative where
the piece helps. The other columns are those of the first table; "here" goes by Holm p < 0.05."""


def read_arm(out: Path, arm: str) -> dict[int, Run]:
    """The runs that finished or diverged, by seed; of one seed the last that started."""
    runs = finished_runs(out / "runs" / arm)
    return {run.seed: run for run in runs if run.seed is not None}


class Effect(NamedTuple):
    """What an arm changes against the baseline."""

    difference: Difference  # of the last validation losses on the same seeds, nats per token
    pairs: int
    diverged: int
    p: float = NAN  # adjusted for all arms; NaN if the pairs are too few

    def cells(self) -> list[str]:
        mean, _, low, high = self.difference
        interval = "" if math.isnan(low) else f"{low:+.4f} to {high:+.4f}"
        p = "" if math.isnan(self.p) else f"{self.p:.2g}"
        difference = f"{mean:+.4f}" if self.pairs else ""
        return [str(self.pairs), difference, interval, str(self.diverged), p]


def measure(arms: dict[str, dict[int, Run]], having: bool = False) -> dict[str, Effect]:
    """The effect of each arm that ran. having: of the piece, also where the arm leaves it out."""
    base, effects = arms[BASELINE], {}
    for arm, runs in arms.items():
        if arm == BASELINE or not runs:
            continue
        complete = [seed for seed, run in runs.items() if run.complete]
        pairs = [seed for seed in complete if seed in base and base[seed].complete]
        new, old = ([of[seed].validations[-1].loss for seed in pairs] for of in (runs, base))
        if having and arm in LEAVE_OUT:
            new, old = old, new
        effects[arm] = Effect(paired(new, old), len(pairs), len(runs) - len(complete))
    adjusted = holm({arm: effect.difference.p_two_sided for arm, effect in effects.items()})
    return {arm: effect._replace(p=adjusted.get(arm, NAN)) for arm, effect in effects.items()}


def report(arms: dict[str, dict[int, Run]]) -> str:
    """The table of all arms that have runs, in Markdown."""
    seeds = sorted(arms[BASELINE])
    sources = {str(run.source) for runs in arms.values() for run in runs.values()}
    lines = [f"{len(seeds)} seeds of the baseline: {', '.join(map(str, seeds))}", ""]
    lines += [*[f"- source {source}" for source in sorted(sources)], ""]
    rows = [[arm, f"`{FLAGS[arm]}`", *effect.cells()] for arm, effect in measure(arms).items()]
    return "\n".join([*lines, table(HEAD, rows), "", READING])


# ---- Pieces


class Piece(NamedTuple):
    """A piece of the recipe, as the public knows it."""

    piece: str  # what it is
    claim: str  # where it comes from, and what it is said to save
    elsewhere: str  # what others found for or against it
    size: str  # why a small model cannot show it
    lines: int  # of code, about


def read_pieces(path: Path) -> dict[str, Piece]:
    """The pieces by the names of their arms. ValueError for other fields than those of Piece."""
    pieces = {}
    for arm, fields in json.loads(path.read_text(encoding="utf-8")).items():
        if set(fields) != set(Piece._fields):
            raise ValueError(f"{path}: give {arm} the fields {', '.join(Piece._fields)}")
        pieces[arm] = Piece(**fields)
    return pieces


def report_pieces(pieces: dict[str, Piece], effects: dict[str, Effect]) -> str:
    """The table of all pieces, in Markdown. effects: of having them."""
    rows = []
    for arm, piece in pieces.items():
        effect = effects.get(arm)
        cells = effect.cells() if effect else [""] * 5
        first = [piece.piece, str(piece.lines), piece.claim]
        rows.append([*first, *cells, piece.elsewhere, verdict(piece, effect)])
    return "\n".join([table(PIECES, rows), "", PIECES_READING])


def verdict(piece: Piece, effect: Effect | None) -> str:
    if effect and effect.p < LEVEL:
        return "helps here" if effect.difference.mean < 0 else "hurts here"
    if piece.size:
        return f"cannot show at this size: {piece.size}"
    return "not distinguishable here" if effect else "not tried"


def draw_pieces(pieces: dict[str, Piece], effects: dict[str, Effect], path: Path) -> None:
    """Write the forest plot of the pieces that have two pairs of runs."""
    named = {piece.piece: effects[arm] for arm, piece in pieces.items() if arm in effects}
    shown = {name: effect.difference for name, effect in named.items() if effect.pairs > 1}
    clear = {name for name, effect in named.items() if effect.p < LEVEL}
    plot_effects(shown, clear, "effect on the loss", path)


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
            code = train(ROOT, [*flags[arm], "--seed", str(seed)], given.out / "runs" / arm)
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
    add("--arms", nargs="+", choices=FLAGS, default=list(ARMS), metavar="ARM",
        help=f"the baseline always runs; of {', '.join(FLAGS)}")
    add("--report", action="store_true", help="print the table of the logs and stop")
    add("--pieces", type=Path, metavar="JSON", help="then print the table of these pieces")
    add("--figure", type=svg, metavar="SVG", help="then draw the effects of --pieces")
    add("extra", nargs="*", metavar="FLAG", help="after --: flags of train_gpt.py for each run")
    if not argv:
        fix = "name some, as --arms no_bigram --seeds 0,1, or type --seeds 0,1,2,3 for all"
        raise ValueError(f"without flags this would train {len(ARMS)} arms on 4 seeds: {fix}")
    given = parser.parse_args(argv)
    if given.figure and not given.pieces:
        raise ValueError(f"--figure is {given.figure}: it needs --pieces, whose effects it shows")
    pieces = read_pieces(given.pieces) if given.pieces else {}
    failed = 0 if given.report else run_missing(given)
    arms = {arm: read_arm(given.out, arm) for arm in FLAGS}
    if not arms[BASELINE]:
        raise ValueError(f"{given.out} has no finished run of the baseline: make one, or set --out")
    print(report(arms))
    if given.pieces:
        effects = measure(arms, having=True)
        print("\n" + report_pieces(pieces, effects))
        if given.figure:
            draw_pieces(pieces, effects, given.figure)
    return 1 if failed else 0


if __name__ == "__main__":
    start(main)
