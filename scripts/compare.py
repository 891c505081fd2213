"""Which of two arms is faster, by how much, and why: from run logs, typed lists, or runs made here in turn.

    python scripts/compare.py OLD NEW                        run logs: files or folders, A and B
    python scripts/compare.py logs@3f2a logs@9c01            arms of one folder, by their source or configuration hash
    python scripts/compare.py --pair OLD1 NEW1 --pair OLD2 NEW2          a pair for each machine, and what they share
    python scripts/compare.py OLD NEW --slope-from SHORT LONG            what the times would be at equal loss
    python scripts/compare.py --times 142.9,143.0 --times 139.6,139.7    typed by hand, in seconds: unverified
    python scripts/compare.py --run "CMD_A" "CMD_B" --rounds 6 --noise   A B, B A, ... on this machine, and A against A

--run puts the log folder in the place of {log_dir} in a command, or else appends --log-dir and it; {round} counts from
0. Differences are B - A. Exit code: 0 B is faster, its whole interval below 0 (with several pairs the pooled one);
1 that is not shown; 2 bad input, or A and B differ in machine or software; 130 or 143 interrupted.
"""

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from runtime.signals import Interrupted, listen
from claims.arms import common_target, group_runs, name_of
from scripts.command import insist, null_for_nan, numbers, set_up_output
from claims.runlog import SUFFIXES, LogError, Run, read_all, read_run
from claims.stats import Difference, difference, outlier, paired, welch
from claims.steptimes import Explanation, account_arms, explain

FINGERPRINT = ("gpu", "gpu_count", "driver", "bus_ids", "cuda", "torch", "triton", "python", "cpu", "host_hash",
               "threads", "dtype", "compiled")  # fmt: skip
OUTLIER = 0.01  # Grubbs p-value below which a time is noted
UNSPOKEN = 0.0005  # seconds: smaller parts are left out
TAIL_LINES = 15  # of the output of a failing command

Report = dict[str, Any]  # as --json prints it


# ---- Arms


class Timed(NamedTuple):
    """One run. Typed times have no log, and runs without a log nothing but a time and a start."""

    seconds: float
    loss: float = math.nan
    steps: float = math.nan  # total
    started: str | None = None  # ISO 8601
    log: Run | None = None


@dataclass
class Arm:
    name: str
    path: str
    runs: list[Timed]
    left_out: list[str] = field(default_factory=list)
    origin: set[Any] = field(default_factory=set)  # what was run: sources and configurations, or a command
    measure: str = "training time"

    def column(self, name: str) -> np.ndarray:
        return np.array([getattr(run, name) for run in self.runs], float)

    @property
    def logs(self) -> list[Run]:
        return [run.log for run in self.runs if run.log]


def read_arm(name: str, spec: str) -> Arm:
    """The complete runs of the one arm that PATH or PATH@HASH names; LogError for none, or for several."""
    path, mark, prefix = spec.rpartition("@")
    if not mark or Path(spec).exists():
        path, prefix = spec, ""
    runs, errors = read_all([path])
    arms = {key: members for key, members in group_runs(runs).items() if any(run.complete for run in members)}
    chosen = [key for key in arms if f"{key.source}".startswith(prefix) or f"{key.config_sha256}".startswith(prefix)]
    left_out = [f"{name_of(run)}: {run.unfinished}" for run in runs if run.unfinished] + list(map(str, errors))
    if len(chosen) != 1:
        found = [f"source {str(key.source)[:12]}, config {str(key.config_sha256)[:12]}, {key.total_steps} steps, "
                 f"{key.gpu_count} GPUs: n = {len(members)}" for key, members in arms.items()]  # fmt: skip
        rule = f"{spec} means {len(chosen)} arms with complete runs, where one is needed"
        raise LogError("\n  ".join([f"{rule}; choose by {path}@HASH" if arms else rule, *(found or left_out)]))
    key, kept = chosen[0], dict[tuple, Run]()
    for run in arms[key]:
        if run.complete and (first := kept.setdefault(tuple(run.validations), run)) is not run:
            left_out.append(f"{name_of(run)}: a copy of {name_of(first)}")
    return Arm(name, spec, [time_run(run) for run in kept.values()], left_out, {(key.source, key.config_sha256)})


def time_run(run: Run, started: str | None = None) -> Timed:
    """LogError for a run that did not finish, or has no times."""
    if run.unfinished or run.train_time_ms is None or not run.total_steps:
        problem = run.unfinished or "it has no training times"
        raise LogError(f"{name_of(run)}: {problem}; a comparison needs the training time of complete runs")
    return Timed(run.train_time_ms / 1000, run.validations[-1].loss, run.total_steps, started or run.started, run)


# ---- Machine and order


def compare_machines(a: Arm, b: Arm) -> Report:
    """What the logs say of hardware and software. Equal entries do not prove that the machine is the same."""
    consistent, differs, unknown = {}, [], []
    for key in FINGERPRINT:
        sides = [Counter(str(run.env.get(key)) for run in arm.logs) for arm in (a, b)]
        values = {*sides[0], *sides[1]}
        if len(values - {"None"}) > 1:
            told = [" and ".join(f"{value} ({n} x)" for value, n in side.items()) for side in sides]
            differs.append(f"{key}: {told[0]} in {a.name}, {told[1]} in {b.name}")
        elif values and "None" not in values:
            consistent[key] = values.pop()
        else:
            unknown.append(key)
    return {"consistent": consistent, "differs": differs, "unknown": unknown}


def in_order(a: Arm, b: Arm) -> list[tuple[str, int, Timed]]:
    """(start, 0 for A or 1 for B, run) in the order in which the runs were made; empty where it is not known."""
    known = [(run.started, side, run) for side, arm in enumerate((a, b)) for run in arm.runs if run.started]
    distinct = len({started for started, _, _ in known}) == len(a.runs) + len(b.runs)
    return sorted(known, key=lambda item: item[:2]) if distinct else []


def find_pairs(a: Arm, b: Arm) -> list[tuple[Timed, Timed]]:
    """The runs of A and of B made in turn, A B or B A; none where two runs of one arm stand together."""
    order = in_order(a, b)
    turns = [sorted(turn, key=lambda item: item[1]) for turn in zip(order[::2], order[1::2], strict=False)]
    alternate = len(order) == 2 * len(turns) > 2 and all(first[1] < second[1] for first, second in turns)
    return [(first[2], second[2]) for first, second in turns] if alternate else []


def order_words(a: Arm, b: Arm) -> str:
    sides = [side for _, side, _ in in_order(a, b)]
    if pairs := find_pairs(a, b):
        return f"the runs alternate: compared as {len(pairs)} pairs"
    if sides and sides in (sorted(sides), sorted(sides, reverse=True)):
        return "one arm after the other, so that a drift of the machine looks like a difference: make runs in turn"
    return "mixed, not in turn: no pairs" if sides else "not known, so there are no pairs and drift is not judged"


def interval_of(mean: float, variances: Sequence[tuple[float, float]], level: float) -> Difference:
    """From independent (variance, degrees of freedom) that add up (Satterthwaite, 1946)."""
    total = sum(variance for variance, _ in variances)
    df = total**2 / sum(variance**2 / df for variance, df in variances if variance) if total > 0 else math.nan
    return difference(0, 0, mean, math.sqrt(total), df, level)


def find_drift(a: Arm, b: Arm, level: float) -> Report | None:
    """How times change from run to run within the arms, and what this change alone would make of B - A; seconds."""
    order = in_order(a, b)
    places, of_b = np.arange(len(order)), np.array([side == 1 for _, side, _ in order])
    if len(order) < 4:
        return None
    x = np.column_stack([~of_b, of_b, places]).astype(float)  # a mean for each arm, one slope for both
    y, inverse = np.array([run.seconds for _, _, run in order]), np.linalg.inv(x.T @ x)
    fit = inverse @ x.T @ y
    variance = float(np.sum((y - x @ fit) ** 2)) / (len(order) - 3) * float(inverse[2, 2])
    found = interval_of(float(fit[2]), [(variance, len(order) - 3)], level)
    return {"seconds_a_run": found, "share": found.mean * float(places[of_b].mean() - places[~of_b].mean())}


# ---- Time at equal loss, and several machines


class Slope(NamedTuple):
    """The loss that one step more is worth, nats: from whole runs, for inside a run the schedule makes the slope."""

    nats: float
    se: float
    df: float
    origin: str


def measure_slope(arms: Sequence[Arm]) -> Slope:
    """Least squares through the mean losses of arms of different lengths, weighted by their own standard errors."""
    steps, losses = np.array([arm.column("steps").mean() for arm in arms]), [arm.column("loss") for arm in arms]
    origin = ", ".join(f"{len(values)} of {total:g} steps" for values, total in zip(losses, steps, strict=True))
    if len(set(steps.tolist())) < 2 or any(np.ptp(values) == 0 for values in losses):
        raise LogError(f"--slope-from needs arms of two lengths or more, each of several runs; these are {origin}")
    squares = np.array([values.var(ddof=1) / len(values) for values in losses])  # of the standard errors
    x = steps - np.average(steps, weights=1 / squares)
    factors = -x / squares / np.sum(x**2 / squares)
    nats = float(np.sum(factors * [values.mean() for values in losses]))
    if nats <= 0:
        raise LogError(f"the loss does not fall with the steps ({origin}), so that it cannot be turned into time")
    shares = factors**2 * squares
    df = np.sum(shares) ** 2 / np.sum(shares**2 / [len(values) - 1 for values in losses])
    return Slope(nats, math.sqrt(np.sum(shares)), float(df), origin)


def adjust(a: Arm, b: Arm, target: float, slope: Slope, level: float) -> Report:
    """Time - (target - loss) / slope x time of a step, of the means of each arm; intervals by the delta method."""
    report: Report = {"target": target, "slope": slope}
    of_runs, by_slope, means = [], [], []
    for arm, name in ((a, "a"), (b, "b")):
        times, spare = arm.column("seconds"), (target - arm.column("loss")) / slope.nats
        steps, step = float(spare.mean()), float(times.mean() / arm.column("steps").mean())
        influence = times - steps * step * times / times.mean() - (spare - steps) * step  # of each run on the mean
        of_runs.append((float(influence.var(ddof=1)) / len(times) if len(times) > 1 else math.nan, len(times) - 1))
        by_slope.append(steps * step / slope.nats)
        means.append(float(influence.mean()))
        found = interval_of(means[-1], [of_runs[-1], ((by_slope[-1] * slope.se) ** 2, slope.df)], level)
        report[name] = {"spare_steps": steps, "spare_seconds": steps * step, "seconds": found}
    shared = (((by_slope[1] - by_slope[0]) * slope.se) ** 2, slope.df)
    return report | {"difference": interval_of(means[1] - means[0], [*of_runs, shared], level)}


def pool(found: Sequence[Difference], level: float) -> Report:
    """Random effects over machines (DerSimonian and Laird, 1986), the interval by Student's t over the machines."""
    x, k = np.array([one.mean for one in found]), len(found)
    variance = np.array([((one.high - one.mean) / student.ppf((1 + level) / 2, one.df)) ** 2 for one in found])
    w = 1 / variance
    excess = float(np.sum(w * (x - np.average(x, weights=w)) ** 2)) - (k - 1)
    between = max(0.0, excess / float(np.sum(w) - np.sum(w**2) / np.sum(w)))
    w = 1 / (variance + between)
    seconds = interval_of(float(np.average(x, weights=w)), [(1 / float(np.sum(w)), k - 1)], level)
    return {"seconds": seconds, "sd_between_machines": math.sqrt(between)}


# ---- The comparison


def compare(a: Arm, b: Arm, level: float, slope: Slope | None = None, target: float | None = None) -> Report:
    """LogError where a log is in both arms."""
    if shared := {tuple(run.validations) for run in a.logs} & {tuple(run.validations) for run in b.logs}:
        raise LogError(f"{a.path} and {b.path} have {len(shared)} runs in common; a run is not compared with itself")
    report: Report = {"level": level, "order": order_words(a, b), "drift": find_drift(a, b, level), "method": "Welch"}
    if pairs := find_pairs(a, b):
        report["method"] = "paired"
        a.runs, b.runs = [first for first, _ in pairs], [second for _, second in pairs]
    test = partial(paired if pairs else welch, level=level)
    report |= {"a": describe(a), "b": describe(b), "same": bool(a.origin) and a.origin == b.origin}
    report |= {"machine": compare_machines(a, b), "explanation": None, "stutters": [], "adjusted": None}
    report |= {key: test(b.column(key).tolist(), a.column(key).tolist()) for key in ("seconds", "loss")}
    if a.logs and b.logs:
        accounts, by_step = account_arms(a.logs, b.logs)
        report["explanation"] = explain(accounts[0], accounts[1], test)
        report["stutters"] = [[one.stutters for one in side] for side in accounts if by_step]
    if slope:
        report["adjusted"] = adjust(a, b, common_target(a.logs + b.logs) if target is None else target, slope, level)
    return report


def describe(arm: Arm) -> Report:
    times, notes = arm.column("seconds"), []
    found = outlier(times.tolist())
    if found and found.p < OUTLIER:
        where = f": {name_of(arm.logs[found.index])}" if arm.logs else ""
        notes = [f"{found.value:.3f} s stands apart (Grubbs p {found.p:.2g}) and is kept{where}"]
    return {
        "name": arm.name, "path": arm.path, "measure": arm.measure, "n": len(times), "mean": float(times.mean()),
        "median": float(np.median(times)), "min": float(times.min()), "times": times.tolist(),
        "sd": float(times.std(ddof=1)) if len(times) > 1 else math.nan, "steps": float(arm.column("steps").mean()),
        "losses": arm.column("loss").tolist(), "started": [run.started for run in arm.runs],
        "logs": [str(run.path) for run in arm.logs], "left_out": arm.left_out, "notes": notes,
    }  # fmt: skip


# ---- Runs made here


def run_in_turn(commands: dict[str, str], rounds: int, out: Path) -> dict[str, Arm]:
    """Each command once a round, in an order that turns from round to round; LogError when one fails."""
    arms = {name: Arm(name, str(out / name), [], [], {command}) for name, command in commands.items()}
    for number in range(rounds):
        for name, arm in list(arms.items())[:: -1 if number % 2 else 1]:
            arm.runs.append(run_once(commands[name], name, number, out))
            print(f"round {number + 1} of {rounds}, {name}: {arm.runs[-1].seconds:.1f} s", file=sys.stderr, flush=True)
    logged = [len(arm.logs) for arm in arms.values()]
    if sum(logged) not in (0, rounds * len(arms)):
        raise LogError(f"in {rounds} rounds {logged} runs left a log in the folder they were given: all must, or none")
    for arm in arms.values():
        arm.measure = "training time" if any(logged) else "wall time of the whole command, for want of a log"
    return arms


def run_once(command: str, name: str, number: int, out: Path) -> Timed:
    """The time in the log that the command leaves in its folder, or else its wall time."""
    folder, console = out / name, out / f"{name}_{number}.console"
    folder.mkdir(parents=True, exist_ok=True)
    text = command if "{log_dir}" in command else f"{command} --log-dir {{log_dir}}"
    text = text.replace("{log_dir}", shlex.quote(str(folder.resolve()))).replace("{round}", str(number))
    before, started, begun = set(folder.iterdir()), datetime.now(UTC).isoformat(), monotonic()
    with console.open("wb") as file:
        child = subprocess.Popen(text, shell=True, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise
    wall, logs = monotonic() - begun, [path for path in set(folder.iterdir()) - before if path.suffix in SUFFIXES]
    new = [path for path in logs if not path.name.startswith("registry")]
    if code or len(new) > 1:
        what = f"ended with exit code {code}" if code else f"left {len(new)} logs, where a command is to make one run"
        tail = console.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        raise LogError("\n  ".join([f"round {number + 1}: {name} {what}: {text}", *tail, f"its output: {console}"]))
    return time_run(read_run(new[0]), started) if new else Timed(wall, started=started)


# ---- Output


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def show(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else ""


def interval(found: Difference, form: str = "+.3f") -> str:
    return f"{found.low:{form}} to {found.high:{form}}" if math.isfinite(found.low) else "no interval"


def headline(found: Difference, level: float, a: str = "A", b: str = "B") -> str:
    """Such as: B is 1.044 s faster than A (95 % interval 0.910 to 1.170 s)."""
    size = f"{abs(found.mean):.3f} s"
    if math.isnan(found.low):
        return f"{b} took {size} {'less' if found.mean < 0 else 'more'} than {a}; these runs give no interval"
    if found.low <= 0 <= found.high:
        return (f"{b} is not shown to be faster or slower than {a}: {found.mean:+.3f} s "
                f"({100 * level:g} % interval {interval(found)} s)")  # fmt: skip
    near, far = sorted(map(abs, (found.low, found.high)))
    return (f"{b} is {size} {'faster' if found.mean < 0 else 'slower'} than {a} "
            f"({100 * level:g} % interval {near:.3f} to {far:.3f} s)")  # fmt: skip


def parts(why: Explanation) -> list[tuple[str, float, str]]:
    """What the difference is made of: the words, the seconds, their interval."""
    count = sum(row.b.steps - row.a.steps for row in why.rows)
    rows = [
        (f"{abs(count):g} {'fewer' if count < 0 else 'more'} steps", why.steps, ""),
        (f"a {'faster' if why.step_time.mean < 0 else 'slower'} step", why.step_time.mean, interval(why.step_time)),
        ("phases that end elsewhere", why.schedule, ""),
        (f"{'fewer' if why.stutters.mean < 0 else 'more'} stutters", why.stutters.mean, interval(why.stutters)),
    ]
    return [row for row in rows if abs(row[1]) >= UNSPOKEN]


def because(why: Explanation) -> str:
    """The parts in words, the largest first; those against the whole last."""
    words: dict[bool, list[str]] = {True: [], False: []}
    for what, seconds, _ in sorted(parts(why), key=lambda part: -abs(part[1])):
        words[seconds * why.total > 0].append(f"{abs(seconds):.3f} s from {what}")
    return ", of which " + "; against it ".join(", ".join(side) for side in words.values() if side)


def explanation_lines(report: Report, why: Explanation) -> Iterator[str]:
    rows = [(what, f"{seconds:+.3f}", ends) for what, seconds, ends in parts(why)]
    heading, whole = ("B - A, s", "", "interval"), ("together", f"{why.total:+.3f}", interval(report["seconds"]))
    yield from table([heading, *rows, whole])
    phases = [("phase", "steps of A", "of B", "ms in A", "in B", "B - A, s")]
    for (stage, parity), a, b, seconds in why.rows:
        windows = "" if a.window is None else f", window {' and '.join(dict.fromkeys([str(a.window), str(b.window)]))}"
        phases.append((f"stage {stage + 1}{windows}, {'odd' if parity else 'even'} steps",
                       f"{a.steps:g}", f"{b.steps:g}", f"{a.ms:.2f}", f"{b.ms:.2f}", f"{seconds:+.3f}"))  # fmt: skip
    yield from ["", *table(phases), ""] if report["stutters"] else ["not every step is timed: no phases, no stutters"]
    for name, runs in zip("AB", report["stutters"], strict=False):
        steps = Counter(stutter.step for stutters in runs for stutter in stutters)
        lost = sum(stutter.seconds for stutters in runs for stutter in stutters) / len(runs)
        where = [f"{step} ({n} x)" if n > 1 else f"{step}" for step, n in steps.most_common()]
        yield (f"stutters of {name}: {lost:.3f} s a run, in {sum(map(bool, runs))} of {len(runs)} runs"
               f"{', at step ' * bool(where)}{', '.join(where[:8])}{', ...' * (len(where) > 8)}")  # fmt: skip


def notes(report: Report) -> Iterator[str]:
    machine, drift, adjusted, level = report["machine"], report["drift"], report["adjusted"], report["level"]
    if report["same"]:
        yield "A and B are the same: this difference is the noise floor"
    known = [f"{key} {value if len(value) < 40 else 'alike'}" for key, value in machine["consistent"].items()]
    said = [f"DIFFERS in {what}" for what in machine["differs"]]
    said += [f"consistent in {', '.join(known)}"] if known else []
    yield f"machine: {'; '.join(said) or 'not recorded'}"
    if said and machine["unknown"]:
        yield f"  not recorded: {', '.join(machine['unknown'])}"
    yield f"order: {report['order']}"
    if drift:
        a_run = drift["seconds_a_run"]
        yield (f"drift within the arms: {a_run.mean:+.4f} s a run ({interval(a_run, '+.4f')}), which makes "
               f"{drift['share']:+.3f} s of the difference")  # fmt: skip
    if math.isfinite(report["loss"].mean):
        yield f"loss: {report['loss'].mean:+.5f} ({interval(report['loss'], '+.5f')})"
    if adjusted:
        slope = adjusted["slope"]
        yield f"at equal loss {adjusted['target']:g} ({slope.nats:.3g} nats a step, se {slope.se:.2g}: {slope.origin}):"
        for name, side in (("A", adjusted["a"]), ("B", adjusted["b"])):
            yield (f"  {name} has {side['spare_steps']:+.1f} steps or {side['spare_seconds']:+.2f} s to spare: "
                   f"{side['seconds'].mean:.3f} s ({interval(side['seconds'], '.3f')})")  # fmt: skip
        yield f"  {headline(adjusted['difference'], level)}"
    for side in (report["a"], report["b"]):
        yield from [f"left out of {side['name']}: {what}" for what in side["left_out"]]
        yield from [f"{side['name']}: {what}" for what in side["notes"]]
    yield "this interval holds for one machine, not over machines: time both arms on a second one too (--pair, twice)"


def to_text(report: Report) -> str:
    sides, why = (report["a"], report["b"]), report["explanation"]
    rows = [["", "n", "mean, s", "median", "min", "sd", "steps", "ms a step", "mean loss"]]
    for side in sides:
        times = [f"{side[key]:.3f}" for key in ("mean", "median", "min")]
        rest = [show(side["sd"], ".3f"), show(side["steps"], "g"), show(1000 * side["mean"] / side["steps"], ".3f")]
        rows.append([side["name"], f"{side['n']}", *times, *rest, show(float(np.mean(side["losses"])), ".5f")])
    return "\n".join([
        *[f"{side['name']} = {side['path']} ({side['measure']})" for side in sides], *table(rows), "",
        f"{headline(report['seconds'], report['level'])}{because(why) if why and parts(why) else ''}.", "",
        *(explanation_lines(report, why) if why else []), *notes(report),
    ])  # fmt: skip


def machines_text(reports: Sequence[Report], pooled: Report) -> str:
    rows = [["A", "B", "GPU", "torch", "runs", "B - A, s", "interval"]]
    for report in reports:
        a, b, known, found = report["a"], report["b"], report["machine"]["consistent"], report["seconds"]
        rows.append([a["path"], b["path"], known.get("gpu", "?"), known.get("torch", "?"), f"{a['n']} + {b['n']}",
                     f"{found.mean:+.3f}", interval(found)])  # fmt: skip
    return "\n".join([*table(rows), f"over these machines {headline(pooled['seconds'], reports[0]['level'])}; "
                      f"the difference has an sd of {pooled['sd_between_machines']:.3f} s between them"])  # fmt: skip


# ---- Command line


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add, positive_list = parser.add_argument, numbers(float, 1e-12, 1e12)
    add("paths", nargs="*", metavar="A B", help="logs or folders of the old arm and of the new one")
    add("--pair", nargs=2, action="append", default=[], metavar=("A", "B"), help="the arms of one machine; repeat it")
    add("--times", type=positive_list, action="append", default=[], help="typed, seconds: once for A, once for B")
    add("--losses", type=positive_list, action="append", default=[], help="typed, of the same runs")
    add("--run", nargs=2, metavar=("CMD_A", "CMD_B"), help="commands to run in turn")
    add("--rounds", type=int, default=5, help="runs of each command (default: 5)")
    add("--noise", action="store_true", help="with --run: A once more in each round, against A")
    add("--out", type=Path, help="folder for what --run makes (default: logs/compare_TIME)")
    add("--slope", type=positive_list, help="nats that one step is worth and their standard error, like 1.27e-4,1.4e-5")
    add("--slope-from", nargs="+", default=[], metavar="PATH", help="arms of several lengths to measure the slope on")
    add("--target", type=float, help="loss at which to compare (default: the logs' own)")
    add("--level", type=float, default=0.95, help="of the intervals (default: 0.95)")
    add("--allow-mismatch", action="store_true", help="compare across machines or software, and say what differs")
    add("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    ways = [bool(arguments.paths or arguments.pair), bool(arguments.times), bool(arguments.run)]
    typed = [[len(values) for values in lists] for lists in (arguments.times, arguments.losses)]
    insist(parser, {
        "name arms A B or --pair, or type --times, or --run commands": sum(ways) == 1,
        "name two arms, A and B": len(arguments.paths) in (0, 2),
        "--times comes twice: for A, then for B": len(arguments.times) in (0, 2),
        "--losses comes twice, with one loss for each of the --times": not typed[1] or typed[0] == typed[1],
        "--slope takes the slope and its standard error": not arguments.slope or len(arguments.slope) <= 2,
        "time at equal loss needs logs": not (arguments.times and (arguments.slope or arguments.slope_from)),
        f"--target is {arguments.target}: it must be finite": math.isfinite(arguments.target or 0),
        f"--rounds is {arguments.rounds}: it must be at least 1": arguments.rounds >= 1,
        f"--level is {arguments.level}: it must lie between 0 and 1": 0 < arguments.level < 1,
    })  # fmt: skip
    return arguments


def find_arms(arguments: argparse.Namespace) -> list[list[Arm]]:
    """A and B of each comparison; behind them the second A that --noise asks for."""
    if arguments.times:
        losses = arguments.losses or [[math.nan] * len(times) for times in arguments.times]
        runs = [list(map(Timed, *lists)) for lists in zip(arguments.times, losses, strict=True)]
        return [[Arm(name, "typed", made, measure="UNVERIFIED: no log stands behind these numbers")
                 for name, made in zip("AB", runs, strict=True)]]  # fmt: skip
    if arguments.run:
        out = arguments.out or Path(f"logs/compare_{datetime.now(UTC):%Y%m%d-%H%M%S}")
        again = {"A again": arguments.run[0]} if arguments.noise else {}
        commands = dict(zip("AB", arguments.run, strict=True)) | again
        return [list(run_in_turn(commands, arguments.rounds, out).values())]
    pairs = [arguments.paths] * bool(arguments.paths) + arguments.pair
    return [[read_arm("A", a), read_arm("B", b)] for a, b in pairs]


def run(arguments: argparse.Namespace) -> int:
    slope, level = None, arguments.level
    if arguments.slope_from:
        slope = measure_slope([read_arm("slope", path) for path in arguments.slope_from])
    elif arguments.slope:
        slope = Slope(arguments.slope[0], sum(arguments.slope[1:]), math.inf, "given")
    arms = find_arms(arguments)
    logs = [path for pair in arms for arm in pair[:2] for path in {run.path.resolve() for run in arm.logs}]
    if len(arms) > 1 and len(logs) > len(set(logs)):
        raise LogError("two pairs share a log: each --pair is to be another machine's")
    reports = [compare(a, b, level, slope, arguments.target) for a, b, *_ in arms]
    differs = [what for report in reports for what in report["machine"]["differs"]]
    if differs and not (arguments.allow_mismatch or arguments.run):
        rule = "A and B were not made alike, so that a difference of times says nothing of what they try"
        raise LogError("\n  ".join([rule, *differs, "time both on one machine, or say --allow-mismatch"]))
    differences = [report["seconds"] for report in reports]
    if len(reports) > 1 and any(math.isnan(found.low) for found in differences):
        raise LogError("a pair without an interval cannot be pooled: each of its arms needs two runs or more")
    pooled = pool(differences, level) if len(reports) > 1 else None
    noise = compare(arms[0][0], arms[0][2], level) if len(arms[0]) > 2 else None
    if arguments.json:
        found = {"comparisons": reports, "pooled": pooled, "noise": noise}
        print(json.dumps(null_for_nan(found), indent=2), flush=True)
    else:
        texts = [*map(to_text, reports)] + ([machines_text(reports, pooled)] if pooled else [])
        texts += [f"noise floor: {headline(noise['seconds'], level, b='A again')}"] if noise else []
        print("\n\n".join(texts), flush=True)
    return 0 if (pooled or reports[0])["seconds"].high < 0 else 1


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        return run(arguments)
    except (LogError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signalled:
        return signalled.code


if __name__ == "__main__":
    listen()
    set_up_output()
    sys.exit(main())
