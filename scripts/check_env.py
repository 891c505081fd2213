"""Is this machine fit to train? Python, packages, GPUs, cores, compiler, process groups and disk.

    python scripts/check_env.py                a line for each; what is wrong comes with its fix
    python scripts/check_env.py --json         for programs

Exit code: 0 go, 2 no-go.
"""

from __future__ import annotations  # an old Python must get as far as saying that it is old

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # starts from any folder

from runtime.preflight import as_lines, environment_findings, exit_code
from scripts.command import set_up_output


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    wants_json = parser.parse_args(argv).json
    findings = environment_findings()
    code = exit_code(findings)
    facts = {"go": code == 0, "findings": [finding._asdict() for finding in findings]}
    print(json.dumps(facts, indent=2) if wants_json else "\n".join(as_lines(findings)))
    return code


if __name__ == "__main__":
    set_up_output()
    sys.exit(main())
