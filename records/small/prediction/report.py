"""The figures of the prediction page, from pieces.json and losses.json beside this file.

    python records/small/prediction/report.py [--picture FILE.svg] [--losses FILE.json] ...
    python records/small/prediction/report.py --rates        the rates a second time
    python records/small/prediction/report.py --screen       the cheap screen

losses.json: {arm: {seed: [loss, loss on new tokens]}}, what `sweep.py PLAN --report --json` prints
of first.json and second_gpu.json, together.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata, spearmanr
from scipy.stats import t as student

HERE = Path(__file__).parent
BASE, LENGTHS = "baseline", {"steps x0.8": 0.8, "steps x1.25": 1.25}
PUBLIC_SD = 0.75 * math.sqrt(2 / 10)  # % of steps: two means of ten runs, 0.75 % a run
DRAWS = 10_000

Losses = dict[str, dict[str, list[float]]]


class Piece(NamedTuple):
    name: str
    stratum: str
    record: str
    public: float  # gain in % of steps; NaN: a negative
    effects: list[float]  # one for each seed: nats gained, over nats for each unit of log(steps)
    new: list[float]  # the same from the loss on new tokens

    @property
    def gain(self) -> float:
        """The share of its steps that the baseline would save if it reached the mean loss, in %."""
        return to_gain(fmean(self.effects))


def to_gain(effect: float) -> float:
    return 100 * (1 - math.exp(-effect))


def slope(losses: Losses) -> float:
    """Nats for each unit of log(steps), on the seeds that all lengths of the baseline have."""
    lengths = {BASE: 1.0} | {arm: share for arm, share in LENGTHS.items() if losses.get(arm)}
    seeds = set.intersection(*(set(losses[arm]) for arm in lengths))
    means = [fmean(losses[arm][seed][0] for seed in seeds) for arm in lengths]
    return float(np.polyfit(np.log(list(lengths.values())), means, 1)[0])


def effects(losses: Losses, arm: str, sense: int, nats: float, column: int) -> list[float]:
    """Of each seed that the arm shares with the baseline. A run that diverged has null as loss."""
    base = losses[BASE]
    found = []
    for seed, values in losses.get(arm, {}).items():
        if seed in base and values[column] is not None:
            found.append(sense * (values[column] - base[seed][column]) / nats)
    return found


def read_pieces(losses: Losses, pieces: dict, nats: float) -> list[Piece]:
    found = []
    for arm, piece in pieces.items():
        saved, of = piece.get("steps", (math.nan, 1))
        both = [effects(losses, arm, piece.get("sense", 1), nats, column) for column in (0, 1)]
        if both[0]:
            found.append(Piece(arm, piece["stratum"], piece["record"], 100 * saved / of, *both))
    return found


def half_width(samples: list[list[float]], count: int) -> float:
    """Half of a 95 % interval of a mean of `count`; the spread is pooled over all pieces."""
    samples = [each for each in samples if len(each) > 1]
    freedom = sum(len(each) - 1 for each in samples)
    if not freedom:
        return math.inf
    pooled = sum((len(each) - 1) * variance(each) for each in samples) / freedom
    return float(student.ppf(0.975, freedom)) * math.sqrt(pooled / count)


def bootstrap(pieces: list[Piece]) -> tuple[float, float]:
    """5 % and 95 % quantiles of Spearman's correlation over pieces and seeds."""
    random, found = np.random.default_rng(0), []
    for _ in range(DRAWS):
        drawn = [pieces[i] for i in random.integers(len(pieces), size=len(pieces))]
        here = [random.choice(each.effects, len(each.effects)).mean() for each in drawn]
        public = [each.public for each in drawn]
        if len(set(public)) > 1:
            found.append(spearmanr(public, here).statistic)
    low, high = np.nanquantile(found, [0.05, 0.95])
    return float(low), float(high)


def ceiling(pieces: list[Piece]) -> float:
    """The largest correlation that the noise of both sides allows."""
    theirs = 1 - PUBLIC_SD**2 / variance(each.public for each in pieces)
    noise = fmean(variance(each.effects) / len(each.effects) for each in pieces)
    ours = 1 - noise / variance(fmean(each.effects) for each in pieces)
    return math.sqrt(max(theirs, 0.0) * max(ours, 0.0))


def area(positives: list[float], negatives: list[float]) -> float:
    """Share of pairs of a positive and a negative in which the positive is larger."""
    ranks = rankdata(positives + negatives)[: len(positives)].sum()
    wins = ranks - len(positives) * (len(positives) + 1) / 2
    return float(wins / (len(positives) * len(negatives)))


def verdict(rho: float, low: float, right: float) -> str:
    if rho >= 0.6 and low > 0.2 and right >= 0.85:
        return "predicts"
    return "screens, does not rank" if rho >= 0.35 else "does not predict"


def table(pieces: list[Piece]) -> list[str]:
    lines = ["| stratum | piece | record | public gain, % of steps | here | 95 % interval | seeds "
             "| |", "|-|-|-|-:|-:|-|-:|-|"]  # fmt: skip
    for each in pieces:
        mean, half = fmean(each.effects), half_width([p.effects for p in pieces], len(each.effects))
        new, new_half = fmean(each.new), half_width([p.new for p in pieces], len(each.new))
        low, high = to_gain(mean - half), to_gain(mean + half)
        copying = abs(mean) > half and abs(new) > new_half and mean * new < 0
        public = "none" if math.isnan(each.public) else f"{each.public:.2f}"
        cells = (each.stratum, each.name, each.record, public, f"{each.gain:+.2f}",
                 f"{low:+.2f} to {high:+.2f}", len(each.effects),
                 "copying" if copying else "")  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def summary(name: str, chosen: list[Piece], pieces: list[Piece]) -> list[str]:
    """Agreement of some positives; the spread of a mean is that of all pieces."""
    rho = spearmanr([p.public for p in chosen], [p.gain for p in chosen]).statistic
    low, high = bootstrap(chosen)
    spread = [p.effects for p in pieces]
    resolved = [p for p in chosen if abs(fmean(p.effects)) > half_width(spread, len(p.effects))]
    right = sum(p.gain > 0 for p in resolved)
    lines = [f"- {name}: {len(chosen)} positives, Spearman {rho:.2f} (90 % interval {low:.2f} to "
             f"{high:.2f}; noise allows {ceiling(chosen):.2f}); signs right: {right} of "
             f"{len(resolved)} resolved"]  # fmt: skip
    if name == "all":
        lines.append(f"- **{verdict(rho, low, right / max(len(resolved), 1))}**")
    return lines


def report(losses: Losses, known: dict) -> str:
    nats = slope(losses)
    pieces = read_pieces(losses, known, nats)
    positives = [each for each in pieces if not math.isnan(each.public)]
    negatives = [each.gain for each in pieces if math.isnan(each.public)]
    count = sum("steps" in piece for piece in known.values())
    lines = [*table(pieces), "", f"- baseline: {abs(nats):.3f} nats for each unit of log(steps)",
             f"- {len(positives)} of {count} positives have a run that did not diverge"]
    for name in ("all", *dict.fromkeys(each.stratum for each in positives)):
        chosen = [each for each in positives if name in ("all", each.stratum)]
        if len(chosen) > 3 and min(len(each.effects) for each in chosen) > 1:
            lines += summary(name, chosen, pieces)
    if positives and negatives:
        share = area([each.gain for each in positives], negatives)
        lines.append(f"- a positive above a negative: {share:.2f} of their pairs")
    return "\n".join(lines)


def at_better_rates(losses: Losses, arm: str, column: int) -> list[float]:
    """Its loss on each of two seeds, at the rate that is better on the other one."""
    rates = [losses[f"{arm} x0.7"], losses[f"{arm} x1.4"]]
    a, b = rates[0]
    best = {seed: min(rates, key=lambda runs: runs[seed][column]) for seed in (a, b)}
    return [best[b][a][column], best[a][b][column]]


def gains_at_better_rates(losses: Losses, column: int) -> dict[str, list[float]]:
    """Of each arm over the baseline, in nats, both at their better rates; one for each seed."""
    base, found = at_better_rates(losses, BASE, column), {}
    for arm in dict.fromkeys(name.rpartition(" x")[0] for name in losses):
        if arm != BASE:
            own = at_better_rates(losses, arm, column)
            found[arm] = [b - a for a, b in zip(own, base, strict=True)]
    return found


def screened(losses: Losses, known: dict, column: int) -> dict[str, float]:
    """The gain in nats of each piece of `known` in a screen, over its baseline, on shared seeds."""
    senses = {arm: piece.get("sense", 1) for arm, piece in known.items() if arm in losses}
    gains = {arm: effects(losses, arm, sense, -1.0, column) for arm, sense in senses.items()}
    return {arm: fmean(each) for arm, each in gains.items()}


def report_rates(losses: Losses, screen: Losses, known: dict) -> str:
    """Gains at the better rates and their mean, last at shared rates, one seed; then Spearman.

    The first three columns are of all tokens, the next three of new ones. Spearman is over all
    positives: these at their own rates, the others as in the screen.
    """
    own = [gains_at_better_rates(losses, column) for column in (0, 1)]
    shared = [screened(screen, known, column) for column in (0, 1)]
    lines = []
    for arm in own[0]:
        cells = [arm]
        for gains, others in zip(own, shared, strict=True):
            a, b = gains[arm]
            cells += [f"{a:+.3f}, {b:+.3f}", f"{(a + b) / 2:+.3f}", f"{others[arm]:+.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    public = {arm: piece["steps"][0] / piece["steps"][1] for arm, piece in known.items()
              if "steps" in piece}  # fmt: skip
    for name, gains, others in zip(("all", "new"), own, shared, strict=True):
        here = others | {arm: fmean(each) for arm, each in gains.items()}
        rhos = [spearmanr([*public.values()], [each[arm] for arm in public]).statistic
                for each in (here, others)]  # fmt: skip
        lines.append(f"- {name} tokens, {len(public)} positives: Spearman {rhos[0]:.2f}; all at "
                     f"shared rates {rhos[1]:.2f}")  # fmt: skip
    return "\n".join(lines)


def report_screen(full: Losses, screens: list[Losses], known: dict) -> str:
    """How the cheap screens rank the pieces, beside the full race; each has its own baseline."""
    lines = []
    for name, column in (("all", 0), ("new", 1)):
        cheap: dict[str, float] = {}
        for screen in screens:
            cheap |= screened(screen, known, column)
        long = screened(full, known, column)
        both = [arm for arm in cheap if arm in long]
        rho = spearmanr([long[arm] for arm in both], [cheap[arm] for arm in both]).statistic
        spread = [effects(full, arm, 1, 1.0, column) for arm in long]
        resolved = [arm for arm, each in zip(long, spread, strict=True)
                    if arm in cheap and abs(long[arm]) > half_width(spread, len(each))]  # fmt: skip
        alike = sum(long[arm] * cheap[arm] > 0 for arm in resolved)
        lines.append(f"- {name} tokens, {len(both)} pieces: Spearman {rho:.2f}; {alike} of "
                     f"{len(resolved)} resolved signs")  # fmt: skip
    return "\n".join(lines)


def draw(losses: Losses, known: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "prediction"
    pieces = read_pieces(losses, known, slope(losses))
    figure, axes = plt.subplots(figsize=(10, 8), layout="constrained")
    for each in pieces:
        if math.isnan(each.public):
            continue
        mean, half = fmean(each.effects), half_width([p.effects for p in pieces], len(each.effects))
        ends = [[each.gain - to_gain(mean - half)], [to_gain(mean + half) - each.gain]]
        axes.errorbar(each.public, each.gain, ends, 1.96 * PUBLIC_SD, fmt="o", lw=0.8)
        place, style = (each.public, each.gain), {"textcoords": "offset points", "fontsize": 7}
        axes.annotate(each.name, place, xytext=(4, 4), **style)
    axes.axhline(0, color="grey", lw=0.5)
    axes.set(xlabel="public gain, % of steps", ylabel="gain on `small`, % of steps")
    axes.set_xscale("symlog", linthresh=1)  # one gain is far above the others
    axes.set_yscale("symlog", linthresh=4)
    for axis, ticks in ((axes.xaxis, (0, 1, 2, 4, 8)), (axes.yaxis, (-8, -4, 0, 4, 8, 16, 32))):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=Path, default=HERE / "losses.json")
    parser.add_argument("--pieces", type=Path, default=HERE / "pieces.json")
    parser.add_argument("--new-tokens", action="store_true", help="compare losses on new tokens")
    parser.add_argument("--rates", action="store_true", help="the rates a second time")
    parser.add_argument("--screen", action="store_true", help="the cheap screen")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    known = json.loads(given.pieces.read_text())
    if given.rates:
        files = "rates_losses.json", "screen_losses.json"
        print(report_rates(*(json.loads((HERE / name).read_text()) for name in files), known))
        return
    losses = json.loads(given.losses.read_text())
    if given.screen:
        files = "screen_losses.json", "screen_cpu_losses.json"
        screens = [json.loads((HERE / name).read_text()) for name in files]
        print(report_screen(losses, screens, known))
        return
    if given.new_tokens:
        losses = {arm: {seed: pair[::-1] for seed, pair in losses[arm].items()} for arm in losses}
    print(report(losses, known))
    if given.picture:
        draw(losses, known, given.picture)


if __name__ == "__main__":
    main()
