"""Is this machine fit to train? Looks at packages, GPUs and compiler.

    python scripts/check_env.py

Prints a line for each, with a fix for what is wrong. Exit code: 0 go, 2 no-go.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # starts from any folder

from scripts.command import make_parser, start

from runtime.preflight import findings


def main() -> int:
    make_parser(__doc__).parse_args()
    fit = True
    for level, text in findings():
        print(f"{level:5} {text}")
        fit = fit and level != "stop"
    print("go" if fit else "no-go")
    return 0 if fit else 2


if __name__ == "__main__":
    start(main)
