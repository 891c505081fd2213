"""Is this machine fit to train? Versions, GPUs, driver, compiler, process groups, cores, disk, limits and clock.

    python scripts/check_env.py                a table; what is not in order comes with its fix
    python scripts/check_env.py --json         for programs

Exit code: 0 go, 2 no-go.
"""

from __future__ import annotations  # an old Python is told so

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from runtime.preflight import environment_findings, report, verdict
from scripts.command import set_up_output


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    findings = environment_findings()
    facts = {"go": verdict(findings) == 0, "findings": [finding._asdict() for finding in findings]}
    print(json.dumps(facts, indent=2) if given.json else "\n".join(report(findings)))
    return verdict(findings)


if __name__ == "__main__":
    set_up_output()
    sys.exit(main())
