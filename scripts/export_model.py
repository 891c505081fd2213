"""Export a kept model as a folder that transformers loads.

    python scripts/export_model.py checkpoints/RUN --to my-model

The folder holds the weights, config.json, the trainer's model classes in one file, and for `tiny`
and `small` the tokenizer; docs/using.md shows its use. Needs transformers, which computes the
logits that are compared with the trainer's. Exit code: 0 done, 2 bad input.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import command, make_parser, start


@command
def main(argv: list[str]) -> int:
    parser, add = make_parser(__doc__)
    add("checkpoint", type=Path, help="folder of a run, or its final")
    add("--to", type=Path, required=True, help="folder to write; it must be new")
    given = parser.parse_args(argv)
    from inference.export import export  # torch takes seconds, which --help need not
    from inference.model import find_model

    apart = export(find_model(given.checkpoint), given.to)
    print(f"wrote {given.to}; its logits are at most {apart:.1g} from the trainer's")
    return 0


if __name__ == "__main__":
    start(main)
