"""Do these runs reach the target? A one-sided t-test at p < 0.01, from the run logs alone.

    python scripts/significance.py logs                                  every arm in a folder
    python scripts/significance.py machine_1/logs machine_2/logs --json  several folders, for programs
    python scripts/significance.py logs --at-step 3225,3250              the loss at steps of longer runs
    python scripts/significance.py logs --looked 5,10                    what it costs to look at 5 and at 10 runs
    python scripts/significance.py new --against old --margin 0.001      no worse than another arm by more than this
    python scripts/significance.py --losses 3.277,3.279 --target 3.28    losses typed by hand: unverified

An arm is one source, one configuration, one declared number of steps and one GPU count; a folder is read without its
subfolders. Exit code: 0 every arm passes (with --looked at the level of the looks; with --margin also one that is
shown to be no worse), 1 an arm fails, 2 bad input.
"""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from claims import arms as grouping
from claims import stats
from scripts.command import insist, null_for_nan, numbers, set_up_output
from claims.runlog import LogError, Run, Validation, find_runs, read_all

ALPHA = 0.01
MARGINAL = 0.007  # from here to ALPHA, the skew that real losses have can undo a pass
FEW_RUNS = 4  # below this, two losses that happen to lie close together can pass
ROUNDING_UNITS = 3  # an sd of fewer units of the last printed digit is mostly rounding
OUTLIER_P, OUTLIER_MAD = 0.01, 8.0  # Grubbs; the distance from the median shows two outliers that hide each other
LEVEL = 0.05  # of warnings, and at which an arm is shown to be no worse than another

RULE = ("statistic", "passes")  # of the steps track
Arm = dict[str, Any]  # runs that are judged together and what follows: the object that --json prints


# ---- From files to arms


def read(paths: Sequence[str]) -> tuple[list[Run], list[str]]:
    """All runs, and what else lies in the folders; LogError for a file that is named by itself and is no log."""
    found, named = find_runs(paths), {Path(path).resolve() for path in paths}
    runs, wrong = read_all([log for log in found if log.resolve() in named])
    if wrong:
        raise LogError("\n".join(map(str, wrong)))
    others, skipped = read_all([log for log in found if log.resolve() not in named])
    if not runs + others:
        raise LogError("\n".join(["no run log can be read", *map(str, skipped)]))
    return runs + others, [f"not read: {error}" for error in skipped]


def counts(run: Run, at_step: int | None) -> bool:
    """Whether its loss may be used: the last one of a run that went to its end, or one at a step that all share."""
    return run.complete or (at_step is not None and run.stopped_early)


def judge_runs(
    key: grouping.ArmKey, runs: Sequence[Run], target: float | None, at_step: int | None, looked: Sequence[int],
    sources: dict[Path, int],
) -> Arm:
    """The verdict on one arm: of each run that counts its last validation, or the one at `at_step`."""
    counted, warnings = grouping.leave_out_repeats([run for run in runs if counts(run, at_step)])
    left_out = [(run, run.unfinished) for run in runs if not counts(run, at_step)]
    if early := sum(not run.complete for run in counted):
        warnings.append(f"{early} runs end before the steps that they declare: step {at_step} must be fixed beforehand")
    chosen: dict[str, Validation] = {}
    for run in counted:
        if point := next((point for point in reversed(run.validations) if at_step in (None, point.step)), None):
            chosen[grouping.name_of(run)] = point
        else:
            left_out.append((run, f"no validation at step {at_step}"))
    if target is None:
        target = grouping.common_target(runs) if chosen else math.nan
    claims = {str(run.header.get("claim")) for run in runs if run.header}
    return judge(
        list(chosen.values()), target, looked, [*origin_warnings(runs, sources, claims), *warnings],
        path=grouping.common_folder(runs), **key._asdict(), track=grouping.track_of(runs[0]),
        resumed=[f"{grouping.name_of(run)}: {run.resumed}" for run in counted if run.resumed],
        at_step=at_step, claim=min(claims - {"None"}, default=None), runs=list(chosen), incomplete=[
            {"path": grouping.name_of(run), "reason": why, "last_loss": run.final_loss} for run, why in left_out],
    )  # fmt: skip


def origin_warnings(runs: Sequence[Run], sources: dict[Path, int], claims: set[str]) -> Iterator[str]:
    for folder in sorted({run.path.parent for run in runs} & sources.keys()):
        yield f"{sources[folder]} SOURCES in {folder}, not pooled: each is an arm of its own"
    if any(run.complete and run.source is None for run in runs):
        yield "the logs do not hold their source: nothing shows that one program made them"
    if len(claims) > 1:
        yield f"the runs stand under different claims: {', '.join(sorted(claims))}"
    if missing := grouping.missing_seeds(runs):
        yield f"no run has seed {', '.join(map(str, missing))}: was it made and left out?"


def judge_all(arguments: argparse.Namespace) -> tuple[list[Arm], list[str]]:
    """Every arm, and a warning for each file that could not be read."""
    if arguments.losses is not None:
        warning = "unverified: these numbers were typed by hand, no log stands behind them"
        times_ms = [1000 * seconds for seconds in arguments.times]
        return [judge(arguments.losses, arguments.target, arguments.looked, [warning], times_ms=times_ms)], []
    runs, skipped = read(arguments.paths)
    sources = grouping.several_sources(runs)
    return [
        judge_runs(key, group, arguments.target, step, arguments.looked, sources)
        for key, group in grouping.group_runs(runs).items() for step in sorted(set(arguments.at_step or ())) or [None]
    ], skipped  # fmt: skip


def judge_baseline(paths: Sequence[str], target: float, at_step: int | None) -> Arm:
    runs, skipped = read(paths)
    found = grouping.group_runs(runs).items()
    groups = [(key, group) for key, group in found if any(counts(run, at_step) for run in group)]
    if len(groups) != 1:
        raise LogError(f"--against {' '.join(paths)} holds {len(groups)} arms with complete runs: name the logs of one")
    baseline = judge_runs(*groups[0], target, at_step, [], {})
    return baseline | {"warnings": baseline["warnings"] + skipped}


# ---- The verdict


def judge(points: Sequence[Validation], target: float, looked: Sequence[int], warnings: list[str], **facts: Any) -> Arm:
    """The verdict on losses, one a run; `facts` are what the logs say of them."""
    losses = [point.loss for point in points]
    result = stats.one_sample(losses, target)
    arm = dict.fromkeys(("path", "source", "total_steps", "gpu_count")) | {
        "n": result.n, "losses": losses, "times_ms": [point.train_time_ms for point in points], **result._asdict(),
        "passes": result.p < ALPHA, "incomplete": [], "warnings": [], "marginal": MARGINAL <= result.p < ALPHA,
        "target": target, "track": None, "at_step": None, "claim": None, "runs": [],
        "e_value": stats.e_value(losses, target), "runs_to_pass": stats.runs_to_pass(result, target),
        "outlier": stats.outlier(losses), "skewness": stats.skewness(losses)[0],
        "steps_rule": None, "looks": None, "against": None, "resumed": [],
    } | facts  # fmt: skip
    if arm["track"] in grouping.STEPS_TRACKS and losses:
        arm["steps_rule"] = dict(zip(RULE, stats.steps_rule(exact(arm), Decimal(repr(target))), strict=True))
    if looked and result.n > 1:
        at = sorted({*looked, result.n})
        true_level, level = stats.true_level(at, ALPHA), stats.look_level(at, ALPHA)
        arm["looks"] = {"at": at, "true_level": true_level, "level": level, "passes": result.p < level}
    arm["warnings"] = [*sample_warnings(arm, points), *warnings]
    return arm


def exact(arm: Arm) -> list[Decimal]:
    """The losses as printed: repr gives the shortest decimal that stands for a float."""
    return [Decimal(repr(loss)) for loss in arm["losses"]]


def sample_warnings(arm: Arm, points: Sequence[Validation]) -> Iterator[str]:
    """What makes the p-value say less than it seems to."""
    n, sd, p, losses, odd = (arm[name] for name in ("n", "sd", "p", "losses", "outlier"))
    if 0 < n < FEW_RUNS:
        yield f"n = {n}: too few runs to trust their spread, make at least {FEW_RUNS}"
    if n and not math.isfinite(arm["mean"]):
        yield "a loss is not finite: there is no test"
    if sd == 0:
        yield "all losses are equal: without a spread there is no test"
    if not sd > 0:
        return
    unit = 10.0 ** min(int(point.exact.as_tuple().exponent) for point in points)
    if sd < ROUNDING_UNITS * unit:
        yield f"sd {sd:.2g} is limited by the rounding to {unit:g}: p says little"
    if odd and (odd.p < OUTLIER_P or odd.mad_z > OUTLIER_MAD):
        without = stats.one_sample(losses[: odd.index] + losses[odd.index + 1 :], arm["target"])
        yield (f"{odd.value} is an outlier (Grubbs p {odd.p:.3g}, {odd.mad_z:.1f} MAD from the median): it counts; "
               f"p {p:.3g} with it, {without.p:.3g} without")
    normal_p = stats.skewness(losses)[1]
    if arm["skewness"] > 0 and normal_p < LEVEL:
        yield f"the losses are skewed to the right ({arm['skewness']:+.2f}, Shapiro p {normal_p:.2g}): p is too small"
    if arm["steps_rule"] and (wide := stats.sigma_p(sd, n)) < LEVEL:
        yield (f"sd {sd:.5f} exceeds the {stats.SIGMA_STEPS} that the steps rule takes for granted "
               f"(chi-squared p {wide:.2g}): trust the t-test")


def compare(new: Arm, old: Arm, margin: float | None) -> dict[str, Any]:
    """The losses of an arm minus those of another."""
    if shared := {*new["runs"]} & {*old["runs"]}:
        raise LogError(f"{min(shared)} is in the baseline too: compare with other runs")
    losses = new["losses"], old["losses"]
    against = {"baseline": old, "steps_rule": None, "margin": margin, **stats.welch(*losses)._asdict()}
    if new["steps_rule"]:
        at = [arm["total_steps"] if arm["at_step"] is None else arm["at_step"] for arm in (new, old)]
        pairwise = stats.steps_pairwise(exact(new), at[0], exact(old), at[1])
        against["steps_rule"] = dict(zip(RULE, pairwise, strict=True))
    if margin is not None:
        p = stats.non_inferiority(*losses, margin)
        against |= {"tost_p": stats.equivalence(*losses, margin), "no_worse_p": p, "no_worse": p < LEVEL}
    return against


def adjust(arms: Sequence[Arm]) -> None:
    """Holm's p over all that was tried, where an arm without a test counts as one that failed."""
    tested = {index: 1.0 if math.isnan(arm["p"]) else arm["p"] for index, arm in enumerate(arms)}
    for index, p in stats.holm(tested).items():
        arms[index] |= {"holm_p": p, "tried": len(arms)}


def accepted(arm: Arm) -> bool:
    """Passed, at the level of the looks where there were several; or shown to be no worse, where that was asked."""
    passes = arm["looks"]["passes"] if arm["looks"] else arm["passes"]
    return passes or bool(arm["against"] and arm["against"].get("no_worse"))


# ---- Output

SAID = {True: "pass", False: "fail"}
FIGURES = "n {n}   mean {mean:.6f}   sd {sd:.6f}   t {t:.4f}   p {p:.3g}   99 % upper bound {upper99:.5f}"
LOOKS = "looks at n in {at}: p < {alpha} at each is truly {true_level:.3g}; p < {level:.3g} keeps {alpha}: {verdict}"
DIFFERENCE = "loss minus the baseline's {mean:+.6f}, 95 % interval {low:+.6f} to {high:+.6f}, one-sided p {p_less:.3g}"
EQUAL = "no worse by {margin:g}: p {no_worse_p:.3g}, {verdict} at {alpha}; equal within it: p {tost_p:.3g} (TOST)"


def title(arm: Arm) -> str:
    if arm["path"] is None:
        return "typed losses, UNVERIFIED"
    facts = {"source": arm["source"] or "unknown", "configuration": arm["config_sha256"], "steps": arm["total_steps"],
             "GPUs": arm["gpu_count"], "claim": arm["claim"], "at step": arm["at_step"]}  # fmt: skip
    return f"{arm['path']}: " + ", ".join(f"{name} {fact!s:.12}" for name, fact in facts.items() if fact is not None)


def verdict(arm: Arm) -> str:
    if arm["n"] < 2:
        alone = arm["n"] or len(arm["incomplete"]) == 1
        return f"FAIL: {'one run' if alone else 'no complete run'}, no verdict possible"
    word = "PASS, but MARGINAL" if arm["marginal"] else SAID[arm["passes"]].upper()
    if arm["passes"] and arm["looks"] and not arm["looks"]["passes"]:
        word = "FAIL after these looks; at a single one"
    return f"{word}: a mean loss below {arm['target']:g} at p < {ALPHA:g} is {'' if arm['passes'] else 'not '}shown"


def caveats(arm: Arm) -> Iterator[str]:
    yield from (f"warning: {warning}" for warning in arm["warnings"])
    yield from (f"left out: {run['path']}: {run['reason']} (loss {run['last_loss']})" for run in arm["incomplete"])


def notes(arm: Arm) -> Iterator[str]:
    """What else the losses and the logs say."""
    evidence, steps, looks, against = (arm[name] for name in ("e_value", "steps_rule", "looks", "against"))
    if arm["tried"] > 1:
        yield f"Holm over the {arm['tried']} arms and steps tried: p {arm['holm_p']:.3g}, {SAID[arm['holm_p'] < ALPHA]}"
    if math.isfinite(arm["p"]):
        yield f"E-value {evidence:.3g}: from 100 on it would pass however often one looks"
    if not arm["passes"] and arm["runs_to_pass"]:
        yield f"n = {arm['runs_to_pass']} would pass at this mean and sd; but adding runs until it passes is peeking"
    if steps:
        yield f"steps rule: (target - mean) * sqrt(n) = {steps['statistic']:.5f} of 0.004, {SAID[steps['passes']]}"
    yield from arm["resumed"]
    if looks:
        yield LOOKS.format_map(looks | {"alpha": ALPHA, "verdict": SAID[looks["passes"]]})
    if against:
        old, pair = against["baseline"], against["steps_rule"]
        yield DIFFERENCE.format_map(against)
        if against["margin"]:
            yield EQUAL.format_map(against | {"alpha": LEVEL, "verdict": SAID[against["no_worse"]]})
        if pair:
            yield f"pairwise steps rule: {pair['statistic']:.5f} of 0.004, {SAID[pair['passes']]}"
        yield from (f"  baseline {line}" for line in (title(old), FIGURES.format_map(old), *caveats(old)))


def to_text(arm: Arm) -> str:
    """What people read."""
    times = ["time unknown" if ms is None else f"{ms / 1000:10.3f} s" for ms in arm["times_ms"]]
    rows = zip(arm["losses"], times or ["typed"] * arm["n"], arm["runs"] or [""] * arm["n"], strict=True)
    runs = [f"  {loss:.6f}  {time}  {Path(name).name}".rstrip() for loss, time, name in rows]
    return "\n  ".join([title(arm), FIGURES.format_map(arm), verdict(arm), *caveats(arm), *notes(arm), *runs])


# ---- Command line


def finite_number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number; write it like 3.28")


def typed_losses(text: str) -> list[Validation]:
    return [Validation(0, finite_number(part), None, part.strip()) for part in text.split(",")]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    counts = numbers(int, 1, stats.MOST_RUNS)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="run logs, or folders of run logs")
    parser.add_argument("--target", type=finite_number, help="loss to beat, nats per token (default: the track's)")
    parser.add_argument("--losses", type=typed_losses, help="losses typed by hand, with commas; needs --target")
    parser.add_argument("--times", type=numbers(float, 0, 1e9), default=[], help="seconds of the runs of --losses")
    parser.add_argument("--at-step", type=counts, help="judge the validations at these steps, not the last")
    parser.add_argument("--looked", type=counts, default=[], help="all numbers of runs at which one looks")
    parser.add_argument("--against", action="append", metavar="PATH", help="a baseline: logs of one arm")
    parser.add_argument("--against-step", type=int, help="the baseline's validation to take (default: the last)")
    parser.add_argument("--margin", type=finite_number, help="how much worse than the baseline does not matter")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    insist(parser, {
        "name run logs, or type losses with --losses: one of the two": bool(given.paths) != bool(given.losses),
        "--losses needs --target: typed losses name none": not given.losses or given.target is not None,
        "--times takes a time for each of the --losses": len(given.times) in (0, len(given.losses or [])),
        "--at-step needs run logs: typed losses have no steps": not (given.losses and given.at_step),
        "--margin and --against-step need --against": given.against or {given.margin, given.against_step} == {None},
    })  # fmt: skip
    return given


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        arms, unreadable = judge_all(arguments)
        if arguments.against:
            baseline = judge_baseline(arguments.against, arms[0]["target"], arguments.against_step)
            arms = [arm | {"against": compare(arm, baseline, arguments.margin)} for arm in arms]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    adjust(arms)
    if arguments.json:
        print(json.dumps(null_for_nan({"arms": arms, "warnings": unreadable}), indent=2, allow_nan=False))
    else:
        print("\n\n".join([*map(to_text, arms), *unreadable]))
    return 0 if all(map(accepted, arms)) else 1


if __name__ == "__main__":
    set_up_output()
    sys.exit(main())
