"""Whose code a process runs: the interpreter's flags, and modules from unexpected places."""

import os
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

from runtime.log import read_sources

FLAGS = (
    "safe_path", "isolated", "ignore_environment", "no_site", "no_user_site", "optimize",
    "dont_write_bytecode",
)  # fmt: skip
CUSTOM = ("sitecustomize", "usercustomize")  # Python runs them at its start, unasked


def provenance(source: Path) -> dict[str, Any]:
    """Fields of the header's env: `sys_flags` and `modules_from_elsewhere`."""
    own = {str(source / name) for name in read_sources(source)}
    flags: dict[str, Any] = {name: int(getattr(sys.flags, name)) for name in FLAGS}
    flags["pythonpath"] = os.environ.get("PYTHONPATH", "")
    flags["pycache"] = "beside the source" if reads_bytecode(own) else "fresh"
    return {"sys_flags": flags, "modules_from_elsewhere": modules_from_elsewhere(own)}


def reads_bytecode(own: set[str]) -> bool:
    """Whether bytecode lies where Python looked for that of one of our modules."""
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)  # None: the program itself, always compiled
        if spec is not None and spec.origin in own and os.path.exists(spec.cached or ""):
            return True
    return False


def modules_from_elsewhere(own: set[str]) -> list[str]:
    """"name path" of loaded modules that are not ours, Python's or the environment's.

    `own` are the files that the source hash covers. sitecustomize and usercustomize are named even
    in the environment.
    """
    library = Path(sysconfig.get_path("stdlib"))
    environment = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    environment += [Path(folder) for folder in site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        environment.append(Path(site.getusersitepackages()))
    found = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not os.path.isabs(file) or os.path.realpath(file) in own:
            continue
        path = Path(os.path.abspath(file))
        installed = any(path.is_relative_to(folder) for folder in environment)
        expected = name not in CUSTOM if installed else path.is_relative_to(library)
        if not expected:
            found.append(f"{name} {path}")
    return found
