"""A dry run: is everything there that a run needs, and what will it take? From the machine and a few real steps."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from runtime.clock import Ledger
from runtime.environment import Machine, peak_mib
from runtime.flags import as_flags
from runtime.memory import Built, memory_parts, smaller
from runtime.preflight import (
    Finding,
    available_memory,
    disk_findings,
    environment_findings,
    estimate,
    memory_finding,
    memory_plan,
    report,
    timed_plan,
    verdict,
)
from runtime.trial import Fault

REPEATS = 3
SAVED_COPIES = 3  # checkpoints that lie on the disk at once: two are kept while the next is written


class MemoryPlan(NamedTuple):
    """Bytes that one process needs if nothing is compiled, by part, and whether they fit."""

    parts: dict[str, float]
    finding: Finding


def plan_memory(settings: Any, machine: Machine, build: Callable[[Any], Built]) -> MemoryPlan:
    """Before memory is taken: what a run needs, said if it may not fit. A collective; rank 0 decides.

    Raises Fault if it does not fit and this is a dry run; on a CPU nothing else is planned.
    """
    if machine.device.type == "cpu" and not settings.dry_run:
        return MemoryPlan({}, Finding("ok", "memory: not planned"))

    def needed(changes: dict[str, Any]) -> dict[str, float]:
        return memory_parts(dataclasses.replace(settings, **changes), machine.world_size, build)

    parts, available = needed({}), available_memory(machine.device)
    ways = ((as_flags(changes), needed(changes)) for changes in smaller(settings))
    finding: Finding = machine.on_main(lambda: memory_finding(parts, available, ways))
    if finding.level != "ok":
        table = memory_plan(parts, available)
        machine.say("\n".join(["memory of one process, if not compiled:", *table, *report([finding])]))
    if finding.level == "stop" and settings.dry_run:
        raise Fault("the memory does not suffice, as the plan shows")
    return MemoryPlan(parts, finding)


class Stage(NamedTuple):
    """Steps that take equally long: how many a run has, and a function that takes `together` of them."""

    steps: int
    together: int
    take: Callable[[], object]


def rehearse(
    machine: Machine, settings: Any, memory: MemoryPlan, stages: Mapping[str, Stage], validate: Callable[[], object],
    validations: int, ledger: Ledger,
) -> int:  # fmt: skip
    """Say all of it on rank 0; returns 0 to go, 2 not to. A collective; the state of the run is used up.

    `ledger` has the phases of getting ready.
    """
    times = {name: (stage.steps, _step_ms(stage, ledger)) for name, stage in stages.items()}
    with ledger.phase("validate", timed=False):
        validate()
    getting_ready = sum(phase.ms for phase in ledger.phases if phase.name in ("setup", "compile", "warmup"))
    phases = {phase.name: phase.timed for phase in ledger.phases} | {"checkpoint": True}

    available = available_memory(machine.device)
    saved = sum(amount for name, amount in memory.parts.items() if name in ("weights", "optimizer state"))
    findings = [
        *(environment_findings() if machine.is_main else ()), memory.finding,
        *disk_findings(settings.log_dir, 2**26), *disk_findings(settings.checkpoint_dir, SAVED_COPIES * saved),
    ]  # fmt: skip
    gpus = machine.world_size if machine.device.type == "cuda" else 0
    validating = ledger.phases[-1].ms
    lines = [
        "memory of one process, if not compiled:", *memory_plan(memory.parts, available),
        f"most that was held: {peak_mib(machine):,.1f} MiB",
        *timed_plan(phases), *estimate(times, validating, validations, getting_ready, gpus, settings.price),
        *report(findings),
    ]  # fmt: skip
    machine.say("\n".join(lines))
    return machine.on_main(lambda: verdict(findings))


def _step_ms(stage: Stage, ledger: Ledger) -> float:
    """Median milliseconds of a step."""
    found = []
    for _ in range(REPEATS):
        with ledger.phase("train", timed=True):
            stage.take()
        found.append(ledger.phases[-1].ms / stage.together)
    return statistics.median(found)
