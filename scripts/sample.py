"""Write text with a trained model.

    python scripts/sample.py                             the newest model under checkpoints/
    python scripts/sample.py "The river"                 continue a prompt
    python scripts/sample.py "Once" --checkpoint checkpoints/RUN       the model of a run
    python scripts/sample.py --interactive               a prompt a line, until Ctrl-D

A run keeps its model unless it has --keep-model off. The text ends where the model ends its
document, or after --tokens. Exit codes: 0 done, 2 bad input.
"""

import argparse
import codecs
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import command, make_parser, start

from inference.model import Model, find_model, load_model


def stream(model: Model, prompt: str, given: argparse.Namespace) -> None:
    """Print the prompt and its continuations, token by token."""
    tokens = model.tokenizer.encode_ordinary(prompt)
    options = {name: getattr(given, name) for name in ("temperature", "top_k", "top_p", "least")}
    for seed in range(given.seed, given.seed + given.samples):
        if given.samples > 1:
            print(f"--- seed {seed}")
        print(prompt, end="", flush=True)
        # Several tokens may make one character.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in model.write(tokens, given.tokens, seed=seed, **options):
            new = decoder.decode(model.tokenizer.decode_single_token_bytes(token))
            print(new, end="", flush=True)
        print(decoder.decode(b"", final=True))


@command
def main(argv: list[str]) -> int:
    parser, add = make_parser(__doc__)
    add("prompt", nargs="?", default="", help="text to continue, in quotes")
    add("--checkpoint", type=Path, metavar="DIR", help="of a run or of its model (the newest)")
    add("--tokens", type=int, default=300, help="tokens to write, at most (%(default)s)")
    add("--temperature", type=float, default=0.8, help="0: the likeliest token (%(default)s)")
    add("--top-k", type=int, default=0, help="sample from the K likeliest; 0: from all")
    add("--top-p", type=float, default=1.0, help="from the likeliest with this share of 1")
    add("--least", type=int, default=40, help="tokens before the text may end (%(default)s)")
    add("--samples", type=int, default=1, help="texts, each with the next seed (%(default)s)")
    add("--seed", type=int, default=0, help="the same seed writes the same text (%(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--interactive", action="store_true", help="read prompts, one a line")
    given = parser.parse_args(argv)
    if not 0 < given.top_p <= 1:
        raise ValueError(f"--top-p {given.top_p}: it must be above 0 and at most 1")
    for name in ("temperature", "tokens", "top_k", "least", "samples", "seed"):
        if not 0 <= getattr(given, name) < math.inf:  # NaN is not
            raise ValueError(f"--{name.replace('_', '-')} {getattr(given, name)}: at least 0")
    if given.prompt and os.path.isdir(os.path.join(given.prompt, "final")):  # of any text
        raise ValueError(f"{given.prompt} is the folder of a run. Give it to --checkpoint.")
    model = load_model(find_model(given.checkpoint), given.device)
    print(f"model {model}", file=sys.stderr)  # not with the text: a program may read that
    if given.prompt or not given.interactive:
        stream(model, given.prompt, given)
    if given.interactive:
        print("A prompt a line; Ctrl-D ends.", file=sys.stderr)
        for line in sys.stdin:
            stream(model, line.rstrip("\n"), given)
    return 0


if __name__ == "__main__":
    start(main)
