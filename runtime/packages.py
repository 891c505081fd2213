"""Start again with the Python of .venv where a package is missing. Needs no package itself."""

from __future__ import annotations  # an old Python must get as far as `find_packages`

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"


def find_packages(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """A sys.excepthook: a program that lacks a package starts again with the .venv of run.sh.

    So a command works in a shell without an activated environment. Without a .venv, say what to do.
    Every program sets it before it imports a package.
    """
    old = sys.version_info < (3, 11)
    if not old and not isinstance(error, ModuleNotFoundError):
        sys.__excepthook__(kind, error, trace)
        sys.exit(2)  # 1 would be a verdict
    if PYTHON.exists() and Path(sys.prefix).resolve() != PYTHON.parents[1].resolve():
        module = sys.modules["__main__"].__spec__  # of python -m; a file has none
        program = ["-m", module.name] if module else [sys.argv[0]]
        os.execv(PYTHON, [str(PYTHON), *program, *sys.argv[1:]])
    lacking = "is older than 3.11" if old else f"has no {getattr(error, 'name', None)}"
    fix = "run ./run.sh once, which makes .venv, or install requirements.txt"
    print(f"error: {sys.executable} {lacking}: {fix}", file=sys.stderr)
    sys.exit(2)
