"""The rules that keep the repository readable: who imports whom, what an import does, how large things may grow."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("optim", "data", "kernels", "runtime")
LIBRARY = [ROOT / "train_gpt.py", *sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SHELL = [ROOT / "run.sh", ROOT / "scripts" / "slurm.sh", ROOT / "scripts" / "gpu_check.sh", ROOT / ".ci" / "run"]
PRODUCT = [*LIBRARY, *SCRIPTS, *SHELL]
COMMANDS = {path.stem for path in SCRIPTS if "__main__" in path.read_text(encoding="utf-8")}
NEEDING_TORCH = {  # the others read logs
    "ablate", "against", "bench_optim", "bench_step", "check_env", "gpu_report", "optim_quality", "plot_schedules",
    "scaling",
}  # fmt: skip
LOG_TOOLS = [path for path in SCRIPTS if path.stem not in NEEDING_TORCH]
TRAINER_LINES, PRODUCT_LINES = 900, 14_050

by_path = pytest.mark.parametrize("path", [*LIBRARY, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))


def imports(path: Path) -> set[str]:
    """Absolute dotted names of all that a module imports anywhere, names taken from a package included."""
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def first_party(path: Path) -> set[Path]:
    """Files of this repository that importing `path` runs, directly or through others, itself included."""
    reached: set[Path] = set()
    waiting = [path]
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting += [file for name in imports(path) for file in files_of(name)]
    return reached


def files_of(name: str) -> Iterator[Path]:
    """The files that `import name` runs: the module and the __init__.py of every package above it."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        module = ROOT.joinpath(*parts[:length])
        yield from (file for file in (module.with_suffix(".py"), module / "__init__.py") if file.exists())


def siblings(path: Path) -> set[str]:
    """Other scripts that a script imports, as scripts.NAME or as NAME found beside it."""
    names = {name.removeprefix("scripts.").split(".")[0] for name in imports(path)}
    return names & {script.stem for script in SCRIPTS} - {"__init__", path.stem}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_neither_each_other_nor_anything_above_them(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        roots = {name.split(".")[0] for name in imports(path)}
        foreign = roots & {*PACKAGES, "train_gpt", "scripts", "tests", "records"} - {package}
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_the_trainer_imports_only_what_lies_below_it() -> None:
    roots = {name.split(".")[0] for name in imports(ROOT / "train_gpt.py")}
    assert not roots & {"scripts", "tests", "records"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_imports_no_command(path: Path) -> None:
    assert not siblings(path) & COMMANDS


@by_path
def test_records_and_tests_are_imported_by_nobody(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & {"records", "tests"}


@pytest.mark.parametrize("path", LOG_TOOLS, ids=lambda path: path.name)
def test_tools_that_read_logs_reach_no_torch_by_any_path(path: Path) -> None:
    for file in first_party(path):
        assert "torch" not in {name.split(".")[0] for name in imports(file)}, f"through {file.relative_to(ROOT)}"


@by_path
def test_what_a_module_imports_at_its_top_is_required(path: Path) -> None:
    """Optional packages are imported by the function that needs them."""
    pinned = {line.partition("==")[0] for line in requirement_lines(ROOT / "requirements.txt")}
    installed = {module for module, packages in packages_distributions().items() if pinned & set(packages)}
    own = {*PACKAGES, "claims", "train_gpt", "scripts", *(script.stem for script in SCRIPTS)}
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    modules = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in statements if isinstance(node, ast.ImportFrom) and not node.level}
    foreign = {name.split(".")[0] for name in modules} - installed - own - sys.stdlib_module_names
    assert not foreign


def requirement_lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("-r ")]


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_every_requirement_is_an_exact_stable_pin_with_a_reason(name: str) -> None:
    for line in requirement_lines(ROOT / name):
        assert re.fullmatch(r"[a-z_-]+==\d+(\.\d+)+( ; [a-z_]+ == \"\w+\")? +# \S.*", line), line


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_importing_the_trainer_has_no_effect(tmp_path: Path) -> None:
    """In a fresh interpreter: no output, no file, no process group, no setting of torch or the process changed."""
    clone, elsewhere = tmp_path / "clone", tmp_path / "elsewhere"
    for path in LIBRARY:
        copy = clone / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    elsewhere.mkdir()
    before = snapshot(tmp_path)
    code = """
import os, signal, threading
import torch

def state():
    return (dict(os.environ), os.getcwd(), threading.active_count(),
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
            torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision())

before = state()
import train_gpt
after = state()
assert after == before, (before, after)
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
"""
    command = [sys.executable, "-B", "-c", code]
    result = subprocess.run(command, cwd=elsewhere, env={"PYTHONPATH": str(clone)}, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("path", [*LIBRARY, *SCRIPTS, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_no_file_names_a_place_on_someones_machine() -> None:
    texts = [*PRODUCT, *TESTS, *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.txt")]
    place = re.compile(r"(?<![\w.~-])/(?:work|home|root|Users|mnt|opt|srv|scratch)/|[A-Z]:\\\\?Users")
    for path in texts:
        found = place.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(ROOT)}: {found}"


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_the_trainer_can_be_read_in_one_sitting() -> None:
    assert line_count(ROOT / "train_gpt.py") <= TRAINER_LINES


def test_the_product_stays_small() -> None:
    assert sum(map(line_count, PRODUCT)) < PRODUCT_LINES
