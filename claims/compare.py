"""Compare A and B: the losses on all and on new tokens, and the times, with their intervals.

`significance.py --against`, the judge, sweeps and the page compare with `compare`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from claims import stats
from claims.arms import ArmVerdict, arm_key
from claims.runs import NEW_SINCE, NEW_TOKENS, Run, shared_measure
from claims.stats import Difference, in_words, moments
from runtime.errors import LogError

# Times are compared between runs that agree in these.
FINGERPRINT = ("gpu", "gpu_count", "driver", "cuda", "torch", "python", "cpu", "host_hash",
               "threads", "dtype", "compiled")  # fmt: skip


class Comparison(NamedTuple):
    """B - A, each with its 95 % interval; NaN for what the logs do not determine."""

    pairs: int  # of runs with one seed; 0: independent samples
    loss: Difference  # nats per token
    new_tokens: Difference  # nats per token
    measure: str | None  # of the loss on new tokens
    seconds: Difference  # NaN on unlike machines
    machines: list[str]  # how those of A and B differ
    outlier: str | None  # a pair that lies far from the others


def compare(a: Sequence[Run], b: Sequence[Run]) -> Comparison:
    """B - A of runs that finished. LogError for a run that is in both.

    Runs on the same seeds are compared as pairs: two runs from one initialization share much of
    their noise, and if they were made in turn, a drift of the machine is in both.
    """
    mine, other = ({(run.path.resolve(), run.index) for run in runs} for runs in (a, b))
    if shared := mine & other:
        raise LogError(f"{min(shared)[0]} is in both arms: a run is not compared with itself")
    a, b = (sorted(runs, key=lambda run: run.seed or 0) for runs in (a, b))
    seeds = [run.seed for run in a]
    pairs = len(seeds) if len(seeds) > 1 and seeds == [run.seed for run in b] else 0
    pairs = 0 if None in seeds else pairs
    test = stats.paired if pairs else stats.welch

    losses = [[run.final_loss or math.nan for run in runs] for runs in (b, a)]
    measure, on_new = shared_measure([*a, *b]), Difference(math.nan)
    if measure is not None:
        on_new = test(*([run.probe(measure) for run in runs] for runs in (b, a)))
    machines = compare_machines(a, b)
    times = [[(run.train_time_ms or math.nan) / 1000 for run in runs] for runs in (b, a)]
    seconds = Difference(math.nan) if machines else test(*times)

    outlier = None
    differences = [new - old for new, old in zip(*losses, strict=True)] if pairs else []
    if (at := stats.outlier(differences)) is not None:
        outlier = (f"the pair of seed {seeds[at]} differs by {differences[at]:+.5f}, far from the "
                   "other pairs; it counts")  # fmt: skip
    return Comparison(pairs, test(*losses), on_new, measure, seconds, machines, outlier)


def other_tokens(a: Sequence[Run], b: Sequence[Run]) -> bool:
    """Whether the runs were scored on different validation tokens."""
    return len({arm_key(run)[-1] for run in [*a, *b]} - {None}) > 1


def compare_machines(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """Where the logs differ in hardware or software.

    A field that a log lacks counts as equal. Equal fields do not prove that it was one machine.
    """
    differs = []
    for key in FINGERPRINT:
        in_a, in_b = (Counter(str(run.env.get(key)) for run in runs) for runs in (a, b))
        if len({*in_a, *in_b} - {"None"}) > 1:
            differs.append(f"{key}: {dict(in_a)} in A, {dict(in_b)} in B")
    return differs


def as_facts(found: Comparison) -> dict[str, Any]:
    """What --json prints."""
    return {name: value._asdict() if isinstance(value, Difference) else value
            for name, value in found._asdict().items()}  # fmt: skip


# ---- In words


def in_sentences(a: ArmVerdict, b: ArmVerdict) -> str:
    """What the page says of two groups, and `significance.py --against` of two arms."""
    found = compare(a.runs, b.runs)
    lines = []
    for name, arm in (("A", a), ("B", b)):
        loss, seconds = moments(arm.losses)[0], moments(arm.seconds)[0]
        time = f", {seconds:.3f} s" if seconds >= 0 else ""  # NaN: the logs have no times
        lines += [f"{name} = {arm.name}: n {len(arm.runs)}, loss {loss:.5f}{time}"]
        lines += [f"  {warning}" for warning in arm.warnings]
        lines += [f"  left out: {lost['path']}: {lost['reason']}" for lost in arm.incomplete]
    if other_tokens(a.runs, b.runs):
        lines.append("  scored on other validation tokens than A: the losses do not compare")
    how = f"on {found.pairs} pairs of one seed" if found.pairs else "of independent runs"
    lines.append(f"B - A {how}, losses in nats, with 95 % intervals:")
    lines.append(f"  loss {in_words(found.loss, '+.5f')}, {direction(found.loss)}")
    lines += [f"  {line}" for line in describe(found)]
    if found.machines:
        lines.append("  times are not compared, as the machines differ:")
        lines += [f"    {what}" for what in found.machines]
    elif not math.isnan(found.seconds.mean):
        word = direction(found.seconds, "faster", "slower")
        lines.append(f"  time {in_words(found.seconds, '+.3f')} s, {word}, on this machine")
    return "\n".join(lines)


def describe(found: Comparison) -> Iterator[str]:
    """What else there is to say of the losses: new tokens and an outlier."""
    if found.measure is not None:
        older = "" if found.measure == NEW_TOKENS[0] else f" as measured before {NEW_SINCE}"
        yield (f"loss on new tokens{older} {in_words(found.new_tokens, '+.5f')}, "
               f"{direction(found.new_tokens)}")  # fmt: skip
    if found.outlier:
        yield found.outlier


def direction(found: Difference, below: str = "lower", above: str = "higher") -> str:
    if found.high < 0:
        return below
    return above if found.low > 0 else f"not shown to be {below} or {above}"
