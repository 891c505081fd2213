"""What there is to know of the optimizers besides their speed, which bench_optim.py tells.

    python scripts/optim_quality.py                                how orthogonal their orthogonalization is
    python scripts/optim_quality.py --sizes 256x256 --backends plain gram
    python scripts/optim_quality.py --ranks                        who owns and sends what for the real models
    python scripts/optim_quality.py --skips logs                   how often the spike guard skips steps of such runs

Orthogonalization: the singular values of the result, its cosine with the exact polar factor, the share of values in
0.7 to 1.3 and the spill, the largest singular value outside of the space that the input spans (exactly: 0). Of a
rank-deficient input the values are those inside that space. Skips: the runs' training losses, judged again.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from optim import Guard, NorMuon, SpikeRule
from optim.orthogonalize import BACKENDS, METHODS, orthogonalize
from optim.sharding import Team
from claims.runlog import LogError, find_runs

RANK = 48  # of the inputs that are rank-deficient; a smaller matrix has a quarter of its rows
SPECTRA = ("gauss", "cond1e4", "one_big", "lowrank", "lowrank, rounded to bf16")
# Packed attention matrices (split in 4), MLP matrices, and the shape of both.
MODELS = {"record42": (10, 22, (768, 3072)), "medium": (16, 32, (1024, 4096)), "steps": (12, 24, (768, 3072))}


# ---- Orthogonalization


class Case(NamedTuple):
    """A matrix and, of those of its singular vectors whose values are not 0, U (n, rank) and V (m, rank)."""

    G: Tensor
    U: Tensor
    V: Tensor


def case(spectrum: str, rows: int, cols: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    short = min(rows, cols)
    gauss = torch.randn(rows, cols, dtype=torch.float64, generator=generator)
    U, S, Vh = torch.linalg.svd(gauss, full_matrices=False)
    if spectrum == "cond1e4":
        S = torch.logspace(0, -4, short, dtype=torch.float64)
    elif spectrum == "one_big":
        S = torch.full_like(S, 1e-3).index_fill(0, torch.tensor(0), 1.0)
    elif spectrum != "gauss":
        S = (torch.arange(short) < min(RANK, short // 4)).double()
    G = ((U * S) @ Vh).float()
    return Case(G.bfloat16() if spectrum.endswith("bf16") else G, U[:, S > 0], Vh[S > 0].T)


def quality(result: Tensor, case: Case) -> dict[str, float]:
    X, (_, U, V) = result.double(), case
    deficient = U.shape[1] < min(X.shape)
    inside = U.T @ X @ V
    values = torch.linalg.svdvals(inside if deficient else X)
    outside = X - U @ (U.T @ X)
    outside -= (outside @ V) @ V.T
    return {
        "min": float(values.min()), "median": float(values.median()), "max": float(values.max()),
        "cosine": float(inside.trace() / (X.norm() * U.shape[1] ** 0.5)),
        "in_band": float(((values > 0.7) & (values < 1.3)).double().mean()),
        "spill": float(torch.linalg.matrix_norm(outside, 2)) if deficient else 0.0,
    }  # fmt: skip


def quality_table(sizes: list[tuple[int, int]], methods: list[str], backends: list[str]) -> Iterator[dict[str, Any]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for size, spectrum in product(sizes, SPECTRA):
        matrix = case(spectrum, *size)
        for method, dtype, backend in product(methods, (torch.float32, torch.bfloat16), backends):
            name = {"size": "{}x{}".format(*size), "spectrum": spectrum, "method": method}
            result = orthogonalize(matrix.G.to(device), method, dtype, backend).cpu()
            yield name | {"dtype": str(dtype)[6:], "backend": backend} | quality(result, matrix)


def quality_line(row: dict[str, Any]) -> str:
    names = f"{row['size']:9} {row['spectrum']:25}{row['method']:15}{row['dtype']:9}{row['backend']:7}"
    return names + "".join(f"{row[key]:9.3f}" for key in ("min", "median", "max", "cosine", "in_band", "spill"))


# ---- Owners


def owner_tables() -> Iterator[dict[str, Any]]:
    """Who owns what, and the bytes that a rank sends: with the one deal, and with a group for each kind of matrix.

    Such a group is padded until all ranks have as many whole matrices, as where it travels in one message.
    """
    for model, (attention, mlp, shape) in MODELS.items():
        params = [torch.empty(shape, device="meta", requires_grad=True) for _ in range(attention + mlp)]
        groups = [{"params": params[:attention], "split": 4}, {"params": params[attention:]}]
        optimizer, matrix_bytes = NorMuon(groups, lr=0.02, dtype=torch.bfloat16), 4 * params[0].numel()
        for ranks in (1, 2, 4, 8):
            sizes = [layout.sent() for layout in optimizer._layouts(Team(None, 0, ranks))]
            sent, padding = map(sum, zip(*sizes, strict=True))
            apart = sum(2 * (ranks - 1) * -(-count // ranks) * matrix_bytes for count in (attention, mlp))
            yield {"model": model, "ranks": ranks, "sent": sent, "padding": padding, "sent_by_groups": apart,
                   "table": optimizer.describe(ranks).splitlines()}  # fmt: skip


def owner_lines(row: dict[str, Any]) -> str:
    more = row["sent_by_groups"] / row["sent"] if row["sent"] else 1
    head = f"{row['model']}, {row['ranks']} ranks: each sends {row['sent']:,} bytes, {row['padding']:,} of them padding"
    return "\n  ".join([f"{head}; {row['sent_by_groups']:,} in separate groups ({more:.3f}x)", *row["table"]])


# ---- Skips


def train_losses(path: Path) -> list[float]:
    """The training losses in a run log, or in any file with a JSON object a line."""
    losses = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            loss = json.loads(line).get("train_loss")
            losses += [] if loss is None else [float(loss)]
        except (ValueError, TypeError, AttributeError) as error:
            rule = "every line must be a JSON object, with a number if it has a train_loss"
            raise LogError(f"{path}, line {number}: {rule}: {error}") from None
    return losses


def skip_table(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Steps of each run that the spike guard would have skipped, and the share of those that it judges."""
    logs = [path for path in find_runs(paths) if path.suffix == ".jsonl"]
    for path, robust, sigma in product(logs, (True, False), (6.0, 7.0)):
        losses, rule = train_losses(path), SpikeRule(sigma=sigma, robust=robust)
        bystander = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)  # a guard guards something
        guard = Guard([bystander], spike=rule)
        verdicts = [guard.explain(guard.step(torch.tensor(loss))) for loss in losses]
        skipped = [step for step, verdict in enumerate(verdicts) if verdict is not None]
        judged = max(0, len(losses) - rule.start)
        yield {"run": path.name, "rule": "robust" if robust else "mean", "sigma": sigma, "steps": len(losses),
               "judged": judged, "skipped": skipped, "rate": len(skipped) / judged if judged else None}  # fmt: skip


def skip_line(row: dict[str, Any]) -> str:
    rate = "nothing judged" if row["rate"] is None else f"{row['rate']:.3%}"
    first = ", ".join(map(str, row["skipped"][:8]))
    return (f"{row['run']:44}{row['rule']:7}{row['sigma']:3.0f} sigma {len(row['skipped']):5} of {row['judged']:,} "
            f"skipped, {rate}{': steps ' + first if first else ''}")  # fmt: skip


# ---- Command line


def size(text: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)) or min(map(int, match.groups())) < 4:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write ROWSxCOLS, both at least 4, as in 768x3072")
    return int(match[1]), int(match[2])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=size, default=[(768, 768), (768, 3072)], metavar="ROWSxCOLS")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["newton_schulz", "polar_express"])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["plain", "gram"])
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--ranks", action="store_true", help="print owner tables at 1, 2, 4 and 8 ranks instead")
    other.add_argument("--skips", nargs="+", metavar="LOG", help="judge these logs, or those in these folders, instead")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures to this file")
    arguments = parser.parse_args(argv)
    if arguments.ranks:
        table, line = owner_tables(), owner_lines
    elif arguments.skips:
        table, line = skip_table(arguments.skips), skip_line
    else:
        table, line = quality_table(arguments.sizes, arguments.methods, arguments.backends), quality_line
        print(f"{'':65}" + "".join(f"{name:>9}" for name in ("min", "median", "max", "cosine", "0.7-1.3", "spill")))
    rows = []
    try:
        for row in table:
            rows.append(row)
            print(line(row), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
