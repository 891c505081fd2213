"""The rules that keep the repository readable: who imports whom, how long a file may be."""

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import train_gpt
from runtime.source import SOURCE_FILES

ROOT = Path(__file__).resolve().parents[1]

LONGEST_FILE = 500  # lines
MOST_SETTINGS = 83

# Packages that a module of each folder may import. `scripts` and `records` are imported by nobody;
# runtime.packages, which needs only the standard library, by every program.
MAY_IMPORT = {
    "optim": {"optim"},
    "kernels": {"kernels"},
    "data": {"data"},
    "runtime": {"runtime"},
    "claims": {"claims", "runtime"},
    "inference": {"inference", "train_gpt", "kernels", "data", "runtime"},
    "train_gpt.py": {"optim", "kernels", "data", "runtime"},
    "view": {"view", "claims", "runtime"},
    "scripts": {"scripts", "inference", "view", "claims", "runtime", "train_gpt", "optim",
                "kernels", "data"},
}  # fmt: skip
FIRST_PARTY = {name.removesuffix(".py") for name in MAY_IMPORT} | {"records", "tests"}


def files_of(name):
    path = ROOT / name
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


MODULES = [path for name in MAY_IMPORT for path in files_of(name)]
by_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))


def imports(path, top_level=False):
    """Absolute dotted names that a module imports, anywhere in it or only at its top."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add(path.parent.name)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def roots(names):
    return {name.split(".")[0] for name in names}


@by_module
def test_imports_go_in_one_direction(path):
    folder = path.relative_to(ROOT).parts[0]
    names = {name for name in imports(path) if not name.startswith("runtime.packages")}
    foreign = roots(names) & FIRST_PARTY - MAY_IMPORT[folder]
    assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


@pytest.mark.parametrize("path", files_of("claims") + files_of("view"), ids=lambda path: path.name)
def test_claims_and_view_reach_no_torch(path):
    waiting, reached = [path], set()
    while waiting:
        module = waiting.pop()
        reached.add(module)
        names = imports(module)
        assert not roots(names) & {"torch", "safetensors"}, f"through {module.relative_to(ROOT)}"
        for name in names:
            file = ROOT / (name.replace(".", "/") + ".py")
            if file.is_file() and file not in reached:
                waiting.append(file)


@cache
def required_modules():
    """What requirements.txt brings, without what it calls optional."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "# optional: " not in line}
    found = packages_distributions().items()  # reads every installed package
    return {module for module, packages in found if pinned & set(packages)}


@by_module
def test_what_a_module_imports_at_its_top_is_required(path):
    """Optional packages are imported by the function that needs them."""
    foreign = roots(imports(path, top_level=True)) - required_modules() - FIRST_PARTY
    if path.name == "modeling_speedrun.py":  # is shipped to those who have it
        foreign.remove("transformers")
    assert not foreign - sys.stdlib_module_names


@pytest.mark.parametrize("path", sorted(ROOT.glob("requirements*.txt")), ids=lambda path: path.name)
def test_every_requirement_is_an_exact_pin(path):
    for line in path.read_text().splitlines():
        assert re.match(r"-r |$|[A-Za-z_-]+==\d+(\.\d+)+ ", line), line


def test_pip_installs_every_package_and_the_files_that_they_read():
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    assert sorted(tables["packages"]) == packages
    files = {f"data/{name}" for name in tables["package-data"]["data"]}
    assert files == {name for name in SOURCE_FILES if name.startswith("data/")}


STATE = """
import os, signal, threading
import torch

def state():
    return (dict(os.environ), os.getcwd(), os.listdir(), threading.active_count(),
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
            torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_default_dtype(),
            torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
            torch.distributed.is_initialized(), torch.cuda.is_initialized())

before = state()
import train_gpt
assert state() == before
"""


def test_importing_the_trainer_prints_nothing_and_changes_no_state(tmp_path):
    command = [sys.executable, "-c", STATE]
    env = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_file_names_a_place_on_someones_machine():
    unix = r"(?<![\w.~-])/(?:work|home|root|Users|mnt|opt|srv|scratch)/"
    place = re.compile(unix + r"|[A-Z]:\\\\?Users")
    texts = [*MODULES, ROOT / "run.sh"]
    for pattern in ("*.md", "*.txt", "docs/*.md", "tests/*.py"):
        texts += ROOT.glob(pattern)
    for path in texts:
        found = place.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_no_file_but_the_trainer_is_too_long_to_read_at_once():
    for path in MODULES:
        if path.name != "train_gpt.py":
            assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE, path


def test_a_reader_meets_few_concepts():
    """Who adds a setting or a track removes one. Settings that belong together are a table."""
    settings = dataclasses.fields(train_gpt.Config)
    assert len(settings) <= MOST_SETTINGS
    simple = {bool, int, float, str, tuple[float, float]}
    for setting in settings:
        assert setting.type in simple, f"{setting.name} holds a {setting.type}"
        assert "=" not in str(setting.default), f"{setting.name} is a language of its own"
    assert set(train_gpt.TRACKS) == {"tiny", "small", "short", "steps"}
