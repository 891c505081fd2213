"""Evaluate a trained model on the validation tokens of its track.

    python scripts/evaluate.py                       the newest model under checkpoints/
    python scripts/evaluate.py checkpoints/RUN       that of a run

Prints the validation loss, bits per byte of text, and the losses of copied tokens and of new ones.
Exit codes: 0 done, 2 bad input.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import command, make_parser, show, start

from inference.evaluation import evaluate
from inference.model import Model, find_model, load_model


def as_text(model: Model, scores: dict[str, Any]) -> str:
    lines = [f"model {model}",
             f"validation loss {scores['loss']:.4f}   {scores['tokens']:,} tokens"]  # fmt: skip
    if "bits_per_byte" in scores:
        lines.append(f"bits per byte   {scores['bits_per_byte']:.4f}")
    for name in ("copied", "new"):
        lines.append(f"{name:<15} {scores[name]['loss']:.4f}   {scores[name]['tokens']:,} tokens")
    return "\n".join(lines)


@command
def main(argv: list[str]) -> int:
    parser, add = make_parser(__doc__)
    add("checkpoint", nargs="?", type=Path, help="folder of a run or of its model")
    add("--data-dir", help="where the run's validation shards are now (as in training)")
    add("--rows", type=int, help="validation rows to read (all)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    if given.rows is not None and given.rows < 1:
        raise ValueError(f"--rows {given.rows}: it must be at least 1")
    model = load_model(find_model(given.checkpoint), given.device)
    scores = evaluate(model, given.data_dir, given.rows)
    show(as_text(model, scores), {"model": str(model.folder)} | scores, given.json)
    return 0


if __name__ == "__main__":
    start(main)
