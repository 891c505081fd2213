"""`bench.py gpu`: what only the machine itself can settle, as one page to paste into an issue.

Kernels beside their plain twins, warm-up, milliseconds a stage, then sixty steps of a real run:
waits for the device, graphs compiled on the clock, losses, memory. Without data it trains on random
tokens, and says so. Under torchrun every rank takes part, and rank 0 prints.
"""

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import train_gpt
from data.audit import missing_data
from data.shards import write_shard
from kernels.attention import choose_attention
from kernels.head import linear_cross_entropy, plain_cross_entropy
from kernels.portable_attention import PortableAttention
from optim.orthogonalize import choose, orthogonalized
from runtime import machine as machines
from runtime.clock import Clock
from runtime.settings import parse
from train_gpt import Config, Trainer

STEPS = 60
SHORT = ["--val-every", "0", "--keep-model", "off", "--sample-tokens", "0"]
FACTS = ("gpu", "gpu_count", "gpu_memory_gib", "driver", "cpu", "torch", "cuda", "dtype",
         "attention", "head", "params", "compiled", "noise")  # fmt: skip
LONGEST_DOCUMENT = 1500  # of random data; the mean is half of it


def check(flags: Sequence[str], time_stages: Callable[[Trainer], dict]) -> dict[str, Any]:
    """All findings, as JSON data."""
    words = [*flags, "--steps", str(STEPS), *SHORT]
    config = parse(Config, words, train_gpt.preset, "")
    machine = machines.start(config.device, config.rank_timeout)
    found: dict[str, Any] = {"data": "those of the track"}
    if machine.on_main(lambda: missing_data(asdict(config))):
        folder = machine.on_main(partial(write_random, config))
        words += ["--data-dir", folder, "--val-sha256", ""]
        words += ["--val-tokens", str(2 * config.val_seq_len)]
        config = parse(Config, words, train_gpt.preset, "")
        found["data"] = "random tokens: losses mean nothing"
    found["kernels"] = compare_kernels(config, machine.device)
    trainer, clock = train_gpt.set_up(config, machine), Clock(machine.synchronize)
    train_gpt.warm_up(trainer, clock)
    found["machine"] = {name: trainer.env[name] for name in FACTS} | trainer.chosen
    found["machine"] |= {"ranks": machine.world_size, "batches": batches(trainer)}
    found["start_s"] = {phase.name: phase.ms / 1000 for phase in clock.phases}
    found["checks"] = trainer.checks
    found["steps"] = sixty_steps(trainer)
    found["peak_mib"] = machines.peak_mib(machine)
    found["stages"] = time_stages(trainer)
    return found


def batches(trainer: Trainer) -> list[str]:
    """Of each stage: micro-batches of a rank and their tokens."""
    shares = [trainer.data.train.shares(first) for first, *_ in trainer.changes]
    return [f"{count} x {rows * trainer.config.seq_len:,} tokens" for count, rows in shares]


def write_random(config: Config) -> str:
    """A folder with random documents, enough for the run."""
    folder, random = Path(tempfile.mkdtemp(prefix="speedrun_")), np.random.default_rng(0)
    needed = 4 * train_gpt.tokens_before(config, config.steps)
    for split, count in (("train", needed), ("val", 3 * config.val_seq_len)):
        tokens = random.integers(0, config.bos, count, dtype=np.uint16)
        longest = min(LONGEST_DOCUMENT, config.seq_len)
        starts = random.integers(2, longest, count).cumsum()
        tokens[np.append(0, starts[starts < count])] = config.bos
        write_shard(folder / f"random_{split}_000000.bin", tokens)
    return str(folder)


# ---- Kernels


def compare_kernels(config: Config, device: torch.device) -> dict[str, float]:
    """Relative error of outputs and gradients of the chosen kernels against their plain twins."""
    dtype = machines.compute_dtype(config.dtype, device)
    attention, _ = choose_attention(config.attention, device, dtype, config.head_dim)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    tokens, heads = 1024, config.dim // config.head_dim
    qkv = [normal(2, tokens, heads, config.head_dim) for _ in range(3)]
    starts = torch.tensor([0, 300, 1024, 1100, 2048], dtype=torch.int32, device=device)

    def attend(backend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = backend.documents(starts, 2, tokens)
        return backend(q / config.head_dim**0.5, k, v, documents, backend.window(192), 924)

    x, weight = normal(2048, config.dim), normal(config.padded_vocab, config.dim) / 10
    x = torch.nn.functional.rms_norm(x, (config.dim,))
    targets = torch.randint(config.vocab_size, (2048,), generator=generator).to(device)
    softcap = train_gpt.SOFTCAPS[config.softcap]
    head, _ = train_gpt.choose_head(
        config.loss_kernel, device, dtype, config.dim, config.padded_vocab, config.biases
    )
    precision = "fp8" if head == "fp8" else "plain"
    matrices = normal(4, config.dim, 4 * config.dim)
    method = config.ortho_method
    sides = config.dim, 4 * config.dim
    fast = choose(*sides, method, dtype, device, config.ortho_backend)
    plain = choose(*sides, method, torch.float32, device, "plain")
    return {
        f"attention {attention.name}": error(
            partial(attend, attention), partial(attend, PortableAttention()), *qkv),
        f"head {head}": error(
            lambda x, w: linear_cross_entropy(x, w, targets, softcap=softcap, precision=precision),
            lambda x, w: plain_cross_entropy(x, w, None, targets, softcap), x, weight),
        f"{method} {fast.backend}": distance(
            orthogonalized(matrices, fast), orthogonalized(matrices.float(), plain)),
    }  # fmt: skip


def error(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> float:
    """The largest distance of output and gradients; the twin computes in float32."""
    found = [with_gradients(ours, *inputs), with_gradients(plain, *(x.float() for x in inputs))]
    return max(map(distance, *found))


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), leaves)]


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# ---- Steps


def sixty_steps(trainer: Trainer) -> dict[str, Any]:
    """Train as a run does, but without its log; count what a run must not do."""
    config, device = trainer.config, trainer.machine.device
    trainer.reset(config.seed)
    flags, losses, skips = torch.zeros(0, device=device), [], []
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        for step in range(config.steps):
            if train_gpt.at(config, step).unties:
                trainer.untie()
            loss, _ = trainer.gradients(step, flags)
            skips.append(trainer.update(step, loss))
            losses.append(loss)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    told = sorted({str(each.message).splitlines()[0] for each in waits})
    return {
        "losses": torch.stack(losses)[[0, 9, -1]].tolist(),
        "skipped": sum(trainer.guard.explain(verdict) is not None for verdict in skips),
        "waits": len(waits), "what waited": told[:5],
        "graphs compiled": torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs,
        "validation loss": trainer.validate(config.steps),
    }  # fmt: skip


def as_text(found: dict[str, Any]) -> str:
    """A page of text, but for the table of stages."""
    lines = []
    for name, part in found.items():
        if name == "stages":
            continue
        if not isinstance(part, dict):
            lines.append(f"{name}: {part}")
            continue
        lines += [name, *(f"  {key}: {value}" for key, value in part.items())]
    return "\n".join(lines)
