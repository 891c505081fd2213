"""Is this machine fit to train? Looks at Python, packages, disk, CPU, GPUs and compiler.

    python scripts/check_env.py

Prints a line for each, with a fix for what is wrong. Exit code: 0 go, 2 no-go.
"""

from __future__ import annotations  # an old Python must get as far as saying that it is old

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # starts from any folder

from runtime.preflight import environment_findings, verdict
from scripts.command import make_parser, start


def main() -> int:
    make_parser(__doc__).parse_args()
    text, code = verdict(environment_findings())
    print(text)
    return code


if __name__ == "__main__":
    start(main)
