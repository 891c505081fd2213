"""A run as its log has it: `Run`, validations, steps, phases, segments and resumes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

# The loss on new tokens, the best measure first: on all validation tokens, however far back a pair
# occurred. Logs before 2026-11-29 have only the second, on the first 16,384 tokens, where a pair
# more than 176 tokens back counts as new.
NEW_TOKENS = ("loss_on_new", "new_loss")
NEW_SINCE = "2026-11-29"


class Validation(NamedTuple):
    step: int
    loss: float  # nats per token
    train_time_ms: float | None


class Step(NamedTuple):
    """A training step, counted from 1."""

    step: int
    train_time_ms: float  # on the clock when the step was done
    train_loss: float | None
    tokens: int | None = None  # of all steps up to this one
    lr_mul: float | None = None  # multiplier of every learning rate
    grad_norm: float | None = None  # of all gradients that are stepped
    window: int | None = None  # earlier tokens that a long layer sees
    skipped: bool | None = None  # by the guard
    grad_norms: dict[str, float] | None = None  # by optimizer; 0: it took no step


class Phase(NamedTuple):
    name: str
    timed: bool
    ms: float
    t_ms: float  # when it ended


class Segment(NamedTuple):
    """One file of a run."""

    path: Path
    sha256: str
    header: dict[str, Any]


class Resume(NamedTuple):
    from_step: int
    differences: list[str]  # of source and settings
    registry_sha256: str | None
    repeats: bool  # the process before did not stop at this step: steps were done twice


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as its log has it. None: the log does not say."""

    path: Path  # of the first segment
    index: int = 0  # which run of the file
    run_id: str  # of a text log the file's stem, with #index where it holds several runs
    header: dict[str, Any] = field(default_factory=dict)  # empty for a text log
    track: str | None = None
    target: float | None = None
    seed: int | None = None
    source: str | None = None  # SHA-256 of the source
    config_sha256: str | None = None
    gpu_count: int | None = None
    env: dict[str, Any] = field(default_factory=dict)
    total_steps: int | None  # as the log declares it
    validations: list[Validation]
    steps: list[Step] = field(default_factory=list)  # of a log of ours
    phases: list[Phase] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)  # of a log of ours
    end: dict[str, Any] = field(default_factory=dict)  # the last end line
    unfinished: str | None  # why the run did not go to its end; None if it did
    stop: int | None = None  # where a text log ends with a validation before its declared total

    @property
    def complete(self) -> bool:
        return self.unfinished is None

    @property
    def left_out(self) -> str | None:
        """Why the run does not count in a claim; None if it does.

        Repeating steps allows keeping the better outcome, so such a run is shown, not counted.
        """
        if self.unfinished:
            return self.unfinished
        for resume in self.resumes:
            if resume.repeats:
                return f"steps after {resume.from_step} were done twice: it did not stop there"
        return None

    @property
    def counts(self) -> bool:
        return self.left_out is None

    def probe(self, *names: str) -> float:
        """The first of these losses that is among the probes of the end line; NaN if none is."""
        probes = self.end.get("probes")
        found = [probes.get(name) for name in names] if isinstance(probes, dict) else []
        return next((loss for loss in found if isinstance(loss, float)), math.nan)

    @property
    def final_loss(self) -> float | None:
        return self.validations[-1].loss if self.validations else None

    @property
    def train_time_ms(self) -> float | None:
        return self.validations[-1].train_time_ms if self.validations else None

    @property
    def resumed(self) -> str | None:
        if not self.resumes:
            return None
        steps = ", ".join(str(resume.from_step) for resume in self.resumes)
        lost = sum(phase.ms for phase in self.phases if phase.name == "lost")
        return f"resumed at step {steps} ({lost:.0f} ms of lost work on the clock)"


def shared_measure(runs: Sequence[Run]) -> str | None:
    """The best measure of the loss on new tokens that all these runs have, if any."""
    for name in NEW_TOKENS:
        if runs and all(math.isfinite(run.probe(name)) for run in runs):
            return name
    return None


def why_unfinished(
    numbers: Sequence[tuple[int, int | None]], validations: Sequence[Validation]
) -> str | None:
    """Why a run did not go to its end; None if it did. `numbers`: step and total of each line."""
    for (before, total), (step, other) in pairwise(numbers):
        if step < before or other != total:
            return f"step {step} of {other} follows step {before} of {total}"
    for last, validation in pairwise(validations):
        if validation.step == last.step:
            return f"two validations at step {last.step}"
        if (validation.train_time_ms or 0) < (last.train_time_ms or 0):
            return f"less train time at step {validation.step} than at step {last.step}"
    if not validations:
        return "no validation"
    step, total = numbers[-1]
    if total is None:
        return "declares no total number of steps"
    if validations[-1].step < total:
        return f"last validation at step {validations[-1].step} of {total}"
    if step > total:
        return f"step {step} of {total}"
    return None


def early_stop(
    numbers: Sequence[tuple[int, int | None]], validations: Sequence[Validation]
) -> int | None:
    """The step of a validation that ends an orderly log before its declared total, if one does."""
    totals = {total for _, total in numbers}
    if len(totals) > 1 or None in totals or not validations:
        return None
    step, total = validations[-1].step, numbers[-1][1]
    shorter = [(number, step) for number, _ in numbers]
    return step if 0 < step < (total or 0) and not why_unfinished(shorter, validations) else None
