"""Two arms: the difference of their losses and times, B - A."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from claims.arms import group_runs, leave_out_repeats, list_arms, name_of, read_selected
from claims.runs import Run
from claims.stats import Difference, equivalence, paired, welch
from runtime.errors import LogError

FINGERPRINT = ("gpu", "gpu_count", "driver", "cuda", "torch", "python", "cpu", "host_hash",
               "threads", "dtype", "compiled")  # fmt: skip


@dataclass
class ArmTimes:
    """The runs of one arm that count, with their losses and times."""

    path: str
    runs: list[Run]
    left_out: list[str]  # sentences

    @property
    def seeds(self) -> list[int | None]:
        return [run.seed for run in self.runs]

    @property
    def losses(self) -> list[float]:
        return [run.validations[-1].loss for run in self.runs]

    @property
    def seconds(self) -> list[float]:
        """NaN for a run whose log has no times."""
        return [(run.train_time_ms or math.nan) / 1000 for run in self.runs]


def read_arm(path: str) -> ArmTimes:
    """Read the runs that count, by seed. LogError unless they are exactly one arm."""
    runs, errors = read_selected([path])
    left_out = [str(error) for error in errors]
    left_out += [f"{name_of(run)}: {run.left_out}" for run in runs if run.left_out]
    arms = group_runs([run for run in runs if run.counts])
    if len(arms) != 1:
        rule = f"{path} holds {len(arms)} arms where one is needed"
        raise LogError("\n  ".join([f"{rule}: select one", *list_arms(arms), *left_out]))
    (members,) = arms.values()
    kept, repeats = leave_out_repeats(members)
    kept.sort(key=lambda run: -1 if run.seed is None else run.seed)
    return ArmTimes(path, kept, left_out + repeats)


class Comparison(NamedTuple):
    loss: Difference
    seconds: Difference  # NaN on unlike machines
    pairs: int  # of runs with one seed; 0: the arms are compared as independent samples
    equal_loss: float | None  # p-value of "the losses differ by less than the margin"
    differs: list[str]  # in machine or software


def compare_arms(a: ArmTimes, b: ArmTimes, margin: float | None = None) -> Comparison:
    """B - A. LogError for a shared log.

    Arms on the same seeds are compared as pairs: two runs from one initialization share much of
    their noise, and if they were made in turn, a drift of the machine is in both.
    """
    shared = {run.path.resolve() for run in a.runs} & {run.path.resolve() for run in b.runs}
    if shared:
        raise LogError(f"{min(shared)} is in both arms: a run is not compared with itself")
    same_seeds = a.seeds == b.seeds and None not in a.seeds and len(a.seeds) > 1
    test = paired if same_seeds else welch
    equal = None if margin is None else equivalence(test, b.losses, a.losses, margin)
    differs = compare_machines(a, b)
    seconds = Difference(math.nan) if differs else test(b.seconds, a.seconds)
    pairs = len(a.seeds) if same_seeds else 0
    return Comparison(test(b.losses, a.losses), seconds, pairs, equal, differs)


def compare_machines(a: ArmTimes, b: ArmTimes) -> list[str]:
    """Where the logs differ in hardware or software.

    A field that a log lacks counts as equal. Equal fields do not prove that it was one machine.
    """
    differs = []
    for key in FINGERPRINT:
        in_a = Counter(str(run.env.get(key)) for run in a.runs)
        in_b = Counter(str(run.env.get(key)) for run in b.runs)
        if len({*in_a, *in_b} - {"None"}) > 1:
            differs.append(f"{key}: {dict(in_a)} in A, {dict(in_b)} in B")
    return differs
