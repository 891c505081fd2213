"""What do 8, 64 or 1,024 GPUs cost on the wire in each step, and where does the design stop scaling?

    python scripts/scaling.py                                  short, medium and steps on 8, 64 and 1,024 GPUs
    python scripts/scaling.py --tracks short --gpus 2 4 8 16 --infiniband 200
    python scripts/scaling.py --measure 2 4                    predicted beside counted bytes of so many processes

Messages are those of the optimizers' own layouts, on tensors without memory. Rings: of a message of B bytes each of n
ranks sends (n-1)/n B in n-1 hops for a reduce-scatter or an all-gather, twice that for an all-reduce. A step computes,
then communicates. A ring runs at the rate of its slowest link.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from kernels.attention import choose_attention
from optim import Guard, SpikeRule
from optim.sharding import Layout, Parcel, Team, aligned
from runtime.environment import Machine
from train_gpt import GPT, Config, make_optimizers, preset

ASSUMED = {  # flag, value and meaning
    "gpus-per-node": (8, "GPUs in a machine"), "pace": (540_000, "tokens/s of a GPU on short, as on the public 8xH100"),
    "nvlink": (450, "GB/s that a GPU sends inside its machine"), "nvlink-us": (2, "us a hop takes there"),
    "infiniband": (400, "Gb/s that a machine sends for each of its GPUs"), "infiniband-us": (5, "us a hop takes there"),
    "ethernet": (100, "Gb/s that a machine sends in all"), "ethernet-us": (20, "us a hop takes there"),
}  # fmt: skip
NETWORKS = ("infiniband", "ethernet")  # between machines
LAPS = {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 2}  # (n-1)/n of a message that a ring sends
GLOO_LAPS = LAPS | {"reduce-scatter": 2}  # gloo makes it an all-reduce of which all but one part is dropped
STEP_MESSAGE = 16  # bytes: the loss and three flags, summed over ranks before the optimizers step
MOST_GPUS = 4096  # up to which the point is looked for where communication takes longer than computation
ALONE = "SCALING_HAS_A_NETWORK_OF_ITS_OWN"
DEVICES = Path("/proc/self/net/dev")

Facts = dict[str, Any]  # what --json prints


class Message(NamedTuple):
    """One collective of a step."""

    kind: str
    size: int  # bytes on each rank: all segments of a parcel, or the whole that is summed
    often: float = 1.0  # share of steps that send it

    def sent(self, ranks: int, laps: dict[str, int] = LAPS) -> float:
        """Bytes that each rank sends in a step, on average."""
        return self.often * laps[self.kind] * self.size * (ranks - 1) / ranks


# ---- The messages of a step


def build(track: str, machine: Machine, dtype: torch.dtype) -> tuple[Config, GPT, Facts]:
    """Configuration, model and optimizers of a track."""
    config = Config(**preset({"track": track}))
    attention, _ = choose_attention("portable", torch.device("cpu"), dtype)
    model = GPT(config, dtype, machine.device, attention)
    return config, model, make_optimizers(config, model, machine)


def layouts_of(config: Config, optimizers: Facts, ranks: int) -> list[tuple[Layout, float]]:
    """What is sent for the weights and gradients, with the share of steps that send it."""
    often = {"matrix": 1.0, "adam": 1 / config.adam_every}
    return [(layout, often[name]) for name, optimizer in optimizers.items()
            for layout in optimizer._layouts(Team(None, 0, ranks))]  # fmt: skip


def messages(layouts: list[tuple[Layout, float]]) -> list[Message]:
    """All of a step: a loss and flags, gradients and weights, and the guard's two numbers for each unit."""
    judged = 2 * 4 * sum(len(layout.units) for layout, _ in layouts)
    found = [Message("all-reduce", STEP_MESSAGE), Message("all-reduce", judged)]
    for layout, often in layouts:
        ranks, width = layout.team.size, layout.units[0].param.element_size()
        if isinstance(layout, Parcel):
            found += [Message("reduce-scatter", ranks * width * (layout.length + aligned(layout.most)), often),
                      Message("all-gather", ranks * width * (layout.length + layout.tail), often)]  # fmt: skip
        else:  # a sum in float32 or wider, and a count for each parameter
            found.append(Message("all-reduce", max(4, width) * sum(unit.numel + 1 for unit in layout.units), often))
    return found


# ---- What they cost


def link(network: str, gpus: int, given: Facts) -> tuple[float, float]:
    """Bytes/s that each GPU of a ring sends, and seconds a hop takes, at the slowest link.

    Rings that begin at different GPUs of a machine leave it through different adapters, so that all share the load.
    """
    inside = given["nvlink"] * 1e9
    if gpus <= given["gpus_per_node"]:
        return inside, given["nvlink_us"] * 1e-6
    adapters = given["gpus_per_node"] if network == "infiniband" else 1
    return min(inside, adapters * given[network] * 1e9 / 8), given[f"{network}_us"] * 1e-6


def cost(config: Config, optimizers: Facts, pace: float, gpus: int, given: Facts) -> Facts:
    """Of a step, the mean over steps with and without Adam; bytes are those of each GPU, `pace` is its tokens/s."""
    layouts, rows = layouts_of(config, optimizers, gpus), config.batch_tokens // config.sequence
    found = messages(layouts)
    sent = {kind: sum(m.sent(gpus) for m in found if m.kind == kind) for kind in LAPS}
    links = {network: link(network, gpus, given) for network in NETWORKS}
    return {
        "gpus": gpus, "rows": None if rows % gpus else rows // gpus, "sent": sent,
        "padding": sum(often * layout.sent()[1] for layout, often in layouts) / sum(sent.values()),
        "arriving": sum(m.size for m in found if m.kind == "all-gather"),
        "compute_ms": 1e3 * config.batch_tokens / gpus / pace,
        "wire_ms": {network: 1e3 * sum(m.sent(gpus) / rate + m.often * LAPS[m.kind] * (gpus - 1) * hop for m in found)
                    for network, (rate, hop) in links.items()},
    }  # fmt: skip


def study(track: str, given: Facts) -> Facts:
    paper = Machine(torch.device("meta"), 0, 1)  # tensors have shapes and no memory
    config, model, optimizers = build(track, paper, torch.bfloat16)
    pace = given["pace"] * build("short", paper, torch.bfloat16)[1].flops_per_token() / model.flops_per_token()
    powers = [cost(config, optimizers, pace, 2**n, given) for n in range(1, MOST_GPUS.bit_length())]
    units = [unit for layout, _ in layouts_of(config, {"matrix": optimizers["matrix"]}, 2) for unit in layout.units]
    return {
        "track": track, "parameters": sum(p.numel() for p in model.parameters()), "batch_tokens": config.batch_tokens,
        "rows": config.batch_tokens // config.sequence, "tokens_per_second": pace,
        "large_matrices": sum(unit.numel >= config.dim**2 for unit in units),
        "wire_exceeds_compute": {
            network: next((c["gpus"] for c in powers if c["wire_ms"][network] > c["compute_ms"]), None)
            for network in NETWORKS
        },
        "costs": [cost(config, optimizers, pace, gpus, given) for gpus in given["gpus"]],
    }  # fmt: skip


# ---- What really travels


def loopback_bytes() -> int:
    """Bytes that this network namespace has sent to itself."""
    line = next(line for line in DEVICES.read_text().splitlines() if line.lstrip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def take_steps(rank: int, ranks: int, meeting: str, answer: str) -> None:
    """Optimizer steps of the tiny model with random gradients; rank 0 writes the mean bytes that all ranks sent."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    machine = Machine(torch.device("cpu"), rank, ranks)
    config, model, optimizers = build("tiny", machine, torch.float32)
    model.initialize(0)
    guard, before = Guard(optimizers.values(), spike=SpikeRule()), 0
    for step in range(2 * config.adam_every):
        if step == config.adam_every:  # connections are made in the steps before
            dist.barrier()
            before = loopback_bytes()
        for parameter in model.parameters():
            parameter.grad = 1e-3 * torch.randn_like(parameter)
        dist.all_reduce(torch.zeros(STEP_MESSAGE // 4))
        stepping = list(optimizers) if (step + 1) % config.adam_every == 0 else ["matrix"]
        guard.step(torch.tensor(3.0), only=[optimizers[name] for name in stepping])
    dist.barrier()
    if rank == 0:
        Path(answer).write_text(str((loopback_bytes() - before) / config.adam_every))
    dist.barrier()


def measure(ranks: int) -> Facts:
    """Bytes that so many gloo processes send in a step of tiny: as rings, as gloo should, and as the network counts."""
    with tempfile.TemporaryDirectory() as folder:
        places = f"{folder}/meeting", f"{folder}/answer"
        processes.start_processes(take_steps, (ranks, *places), nprocs=ranks, start_method="fork")
        counted = float(Path(places[1]).read_text())
    config, _, optimizers = build("tiny", Machine(torch.device("meta"), 0, 1), torch.float32)
    found = messages(layouts_of(config, optimizers, ranks))
    ring, gloo = (ranks * sum(m.sent(ranks, laps) for m in found) for laps in (LAPS, GLOO_LAPS))
    return {"processes": ranks, "ring": ring, "gloo": gloo, "counted": counted, "alone": ALONE in os.environ}


def move_to_own_network() -> None:
    """Start this program again where nobody else uses the loopback, if that is allowed and has not been done."""
    if not DEVICES.exists():
        raise ValueError(f"--measure reads {DEVICES}, which only Linux has; leave the option out here")
    inside = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if ALONE in os.environ:
        return
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return
    os.environ[ALONE] = "1"
    os.execvp(inside[0], [*inside, sys.executable, *sys.argv])


# ---- Output


def study_text(found: Facts) -> str:
    lines = [f"""\
{found["track"]}: {found["parameters"]:,} parameters, {found["batch_tokens"]:,} tokens a step in {found["rows"]} rows
        rows   MB sent by each GPU              pad-  MB of      ms of       ms on the wire
  GPUs  each   reduce-scatter all-gather all-reduce ding  weights  computing  InfiniBand Ethernet"""]
    for c in found["costs"]:
        sent, wire = ([1e-6 * c["sent"][kind] for kind in LAPS], c["wire_ms"])
        lines.append(
            f"{c['gpus']:6,}  {c['rows'] or 'none':>4}   {sent[0]:14,.1f} {sent[1]:10,.1f} {sent[2]:10.3f} "
            f"{c['padding']:4.0%} {1e-6 * c['arriving']:8,.0f} {c['compute_ms']:10,.2f} {wire['infiniband']:11,.2f} "
            f"{wire['ethernet']:8,.2f}"
        )
    fast, slow = (found["wire_exceeds_compute"][network] or f"over {MOST_GPUS}" for network in NETWORKS)
    return "\n".join(lines) + f"""
  Above {found["rows"]} GPUs some get no row, above {found["large_matrices"]} no large matrix. More time on the wire
  than computing: from {fast} GPUs over InfiniBand, from {slow} over Ethernet."""


def measured_text(found: Facts) -> str:
    others = "" if found["alone"] else "; other traffic on this loopback is counted too"
    ring, gloo, counted = (found[name] for name in ("ring", "gloo", "counted"))
    return (f"tiny, {found['processes']} gloo processes: rings would send {ring:,.0f} bytes a step, gloo {gloo:,.0f}; "
            f"counted {counted:,.0f}, {counted / gloo - 1:+.2%}{others}")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tracks = ("short", "medium", "steps")
    parser.add_argument("--tracks", nargs="+", choices=(*tracks, "tiny"), default=tracks, help="(all but tiny)")
    parser.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 1024], help="world sizes (8 64 1024)")
    for name, (value, meaning) in ASSUMED.items():
        parser.add_argument(f"--{name}", type=float, default=value, help=f"{meaning} ({value:,})")
    parser.add_argument("--measure", nargs="+", type=int, metavar="N", help="processes, to measure instead")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    given = parser.parse_args(argv)
    for name in ASSUMED:
        if not 0 < (value := getattr(given, name.replace("-", "_"))) < float("inf"):
            parser.error(f"--{name} {value:g}: must be a number above 0")
    for name, most in (("gpus", 2**16), ("measure", 16)):
        for count in getattr(given, name) or ():
            if not 2 <= count <= most:
                parser.error(f"--{name} {count}: must be from 2 to {most}")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    given = vars(parse_arguments(argv))
    try:
        if given["measure"]:
            move_to_own_network()
            facts, text = [measure(ranks) for ranks in given["measure"]], measured_text
        else:
            facts, text = [study(track, given) for track in given["tracks"]], study_text
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(facts, indent=2) if given["json"] else "\n\n".join(map(text, facts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
