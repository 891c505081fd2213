"""Do these runs reach the target? A one-sided t-test at p < 0.01, from the run logs alone.

    python scripts/significance.py logs                                    every arm in a folder
    python scripts/significance.py machine_1/logs machine_2/logs --json    several folders, for programs
    python scripts/significance.py logs --at-step 3250 --target 3.28       the loss at one step of longer runs
    python scripts/significance.py --losses 3.277,3.279 --target 3.28      losses typed by hand: unverified

An arm is one source, one configuration, one declared number of steps and one GPU count; a folder is read without
its subfolders. Exit code: 0 every arm passes, 1 an arm fails, 2 bad input.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.runlog import LogError, Run, Validation, find_runs, read_run
from scripts.stats import Result, one_sample

ALPHA = 0.01
FEW_RUNS = 4  # below this, two losses that happen to lie close together can pass

ArmKey = tuple[str | None, str | None, int | None, int | None]  # source, configuration, total steps, GPU count


@dataclass
class Arm:
    """Runs that are judged together, and what was found."""

    target: float
    losses: list[float]
    result: Result
    path: str | None = None
    source: str | None = None
    config_sha256: str | None = None
    total_steps: int | None = None
    gpu_count: int | None = None
    run_ids: list[str] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    incomplete: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def passes(self) -> bool:
        return self.result.p < ALPHA  # false for NaN


# ---------------------------------------------------------------------------------------------------------------------
# From runs to arms


def arm_key(run: Run) -> ArmKey:
    return run.source, run.config_sha256, run.total_steps, run.gpu_count


def group_runs(runs: Sequence[Run]) -> dict[ArmKey, list[Run]]:
    """Runs by arm. An unfinished run is put with every arm that it may have belonged to, so that none is hidden."""
    arms: dict[ArmKey, list[Run]] = {}
    for run in runs:
        if run.complete:
            arms.setdefault(arm_key(run), []).append(run)
    for run in runs:
        if not run.complete:
            key = arm_key(run)
            homes = [arm for arm in arms if all(mine in (None, theirs) for mine, theirs in zip(key, arm, strict=True))]
            for home in homes or [key]:
                arms.setdefault(home, []).append(run)
    return arms


def leave_out_repeats(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs that count as independent, and a warning for each of the others.

    Of several with one seed or one id the first by run id counts: run ids sort by start time, so the choice
    cannot depend on the losses.
    """
    kept: list[Run] = []
    warnings = []
    for run in sorted(runs, key=lambda run: run.run_id):
        first = next((other for other in kept if run.run_id == other.run_id or run.seed == other.seed), None)
        if first is None:
            kept.append(run)
        elif run.run_id == first.run_id or run.losses == first.losses:
            warnings.append(f"left out: {run.path} is a duplicate of {first.path}")
        else:
            warnings.append(f"left out: {run.path} (loss {run.final_loss}) repeats seed {run.seed} of {first.path}; "
                            f"runs of one seed are not independent")
    return kept, warnings


def loss_at(run: Run, step: int | None) -> Validation | None:
    """The last validation, or the one at `step` where a step is given."""
    if step is None:
        return run.validations[-1]
    return next((validation for validation in run.validations if validation.step == step), None)


def common_folder(runs: Sequence[Run]) -> str:
    folders = {str(run.path.parent) for run in runs}
    return folders.pop() if len(folders) == 1 else os.path.commonpath([run.path.parent.resolve() for run in runs])


def common_target(runs: Sequence[Run]) -> float:
    """The target that the headers name."""
    targets = {run.target for run in runs if run.header}
    target = targets.pop() if len(targets) == 1 else None
    if target is None:
        problem = "name different targets" if targets - {None} else "name no target"
        raise LogError(f"the runs in {common_folder(runs)} {problem}: give one with --target")
    return target


def sample_warnings(result: Result) -> list[str]:
    warnings = []
    if result.n < FEW_RUNS:
        warnings.append(f"n = {result.n}: too few runs to trust their spread, make at least {FEW_RUNS}")
    if result.sd == 0:
        warnings.append("all losses are equal: without a spread there is no test")
    if result.n and not math.isfinite(result.mean):
        warnings.append("a loss is not finite: there is no test")
    return warnings


def judge(runs: Sequence[Run], target: float | None, at_step: int | None) -> Arm:
    """The verdict on the runs of one arm."""
    counted, repeats = leave_out_repeats([run for run in runs if run.complete])
    incomplete = [{"path": str(run.path), "reason": run.unfinished} for run in runs if run.unfinished]
    chosen: list[tuple[Run, Validation]] = []
    for run in counted:
        if validation := loss_at(run, at_step):
            chosen.append((run, validation))
        else:
            incomplete.append({"path": str(run.path), "reason": f"no validation at step {at_step}"})
    target = common_target(runs) if target is None else target
    losses = [validation.loss for _, validation in chosen]
    result = one_sample(losses, target)
    source, config_sha256, total_steps, gpu_count = arm_key(runs[0])
    return Arm(
        target, losses, result, common_folder(runs), source, config_sha256, total_steps, gpu_count,
        run_ids=[run.run_id for run, _ in chosen],
        times_ms=[validation.train_time_ms for _, validation in chosen],
        incomplete=incomplete,
        warnings=sample_warnings(result) + repeats,
    )


def judge_typed(losses: list[float], target: float) -> Arm:
    """The verdict on losses that no log stands behind."""
    result = one_sample(losses, target)
    warnings = ["unverified: the losses were typed by hand, no log stands behind them", *sample_warnings(result)]
    return Arm(target, losses, result, warnings=warnings)


# ---------------------------------------------------------------------------------------------------------------------
# Output


def to_json(arm: Arm) -> dict[str, Any]:
    """What programs read; numbers that do not exist are null."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "path": arm.path, "source": arm.source, "total_steps": arm.total_steps, "gpu_count": arm.gpu_count,
        "n": arm.result.n, "losses": [finite(loss) for loss in arm.losses], "times_ms": arm.times_ms,
        "mean": finite(arm.result.mean), "sd": finite(arm.result.sd), "t": finite(arm.result.t),
        "p": finite(arm.result.p), "upper99": finite(arm.result.upper99), "passes": arm.passes,
        "incomplete": arm.incomplete, "warnings": arm.warnings,
    }


def to_text(arm: Arm) -> str:
    """What people read."""
    result = arm.result
    title = "typed losses, UNVERIFIED"
    if arm.path is not None:
        title = (f"{arm.path}: source {str(arm.source)[:12]}, configuration {str(arm.config_sha256)[:12]}, "
                 f"{arm.total_steps} steps, {arm.gpu_count} GPUs")
    lines = [
        title,
        f"  n {result.n}   mean {result.mean:.6f}   sd {result.sd:.6f}   t {result.t:.4f}   p {result.p:.3g}   "
        f"99 % upper bound {result.upper99:.5f}",
        f"  {'PASS' if arm.passes else 'FAIL'}: mean loss below {arm.target:g} at p < {ALPHA:g} is "
        f"{'shown' if arm.passes else 'not shown'}",
    ]
    for run_id, loss, ms in zip(arm.run_ids, arm.losses, arm.times_ms, strict=False):
        lines.append(f"    {loss:.6f}  {ms / 1000:10.3f} s  {run_id}")
    if arm.path is None:
        lines.append(f"    {', '.join(map(str, arm.losses))}")
    lines += [f"  left out: {run['path']}: {run['reason']}" for run in arm.incomplete]
    lines += [f"  warning: {warning}" for warning in arm.warnings]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def finite_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number; write it like 3.28")
    return value


def number_list(text: str) -> list[float]:
    """Numbers with commas between them."""
    return [finite_number(part) for part in text.split(",")]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="run logs, or folders of run logs")
    parser.add_argument("--target", type=finite_number, help="loss to beat, nats per token (default: the logs' own)")
    parser.add_argument("--losses", type=number_list, help="losses typed by hand, with commas; needs --target")
    parser.add_argument("--at-step", type=int, help="judge the validation at this step (default: the last one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    if bool(arguments.paths) == (arguments.losses is not None):
        parser.error("name run logs, or type losses with --losses: one of the two")
    if arguments.losses is not None and arguments.target is None:
        parser.error("--losses needs --target: typed losses name none")
    if arguments.losses is not None and arguments.at_step is not None:
        parser.error("--at-step needs run logs: typed losses have no steps")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.losses is not None:
        arms = [judge_typed(arguments.losses, arguments.target)]
    else:
        try:
            groups = group_runs([read_run(path) for path in find_runs(arguments.paths)])
            arms = [judge(runs, arguments.target, arguments.at_step) for runs in groups.values()]
        except LogError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if arguments.json:
        print(json.dumps({"arms": [to_json(arm) for arm in arms]}, indent=2, allow_nan=False))
    else:
        print("\n\n".join(map(to_text, arms)))
    return 0 if all(arm.passes for arm in arms) else 1


if __name__ == "__main__":
    sys.exit(main())
