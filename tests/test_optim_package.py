"""The folder optim as the package speedrun_optim: its wheel, and the guide in its README."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from test_architecture import ROOT, imports, roots

GUIDE = (ROOT / "optim" / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.M | re.S)[:2]  # not the class
PYTHON.append(PYTHON[1].replace("shard = True", "shard = False"))  # the same loop with DDP
OUTPUT = re.findall(r"^```text\n(.*?)^```$", GUIDE, re.M | re.S)
QUIET = os.environ | {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
QUIET.pop("PYTHONPATH", None)


def run(*command, cwd, **variables):
    env = QUIET | variables
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with `tree`, a copy of the source, and the wheel that setuptools builds from it."""
    folder = tmp_path_factory.mktemp("package")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "optim", folder / "tree" / "optim", symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "LICENSE", folder / "tree")  # which the folder's own links to
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    run(sys.executable, "-c", code, cwd=folder / "tree" / "optim")
    return folder


def test_the_wheel_holds_the_files_that_the_trainer_imports_a_licence_and_the_mark_of_types(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    modules = {name: text for name, text in files.items() if name.startswith("speedrun_optim/")}
    expected = {path.name: path.read_bytes() for path in (ROOT / "optim").glob("*.py")}
    expected["py.typed"] = b""
    assert modules == {f"speedrun_optim/{name}": text for name, text in expected.items()}
    licences = [text for name, text in files.items() if name.endswith("/licenses/LICENSE")]
    assert licences == [(ROOT / "LICENSE").read_bytes()]


def test_building_leaves_no_module_beside_the_source_which_would_change_the_hash_of_runs(built):
    source = built / "tree" / "optim"
    left = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    assert left == {path.name for path in (ROOT / "optim").glob("*.py")}


# ---- the guide


@pytest.fixture(scope="module")
def installed(built):
    """A folder that holds the wheel's packages alone."""
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    run(*pip, "--target", "site", next(built.glob("*.whl")), cwd=built)
    return built / "site"


def test_the_wheel_imports_torch_and_what_comes_with_python_alone(installed):
    """Triton, which torch brings on some systems, is imported where it is found."""
    package = installed / "speedrun_optim"
    imported = set().union(*(roots(imports(path)) for path in package.glob("*.py")))
    assert imported - sys.stdlib_module_names == {"torch", "triton", package.name}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_each_example_of_the_guide_trains(number, installed, tmp_path):
    (tmp_path / "example.py").write_text(PYTHON[number])
    ranks = 2 if "init_process_group" in PYTHON[number] else 1
    command = [sys.executable, "example.py"]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    output = run(*command, cwd=tmp_path, PYTHONPATH=str(installed))
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d\d)", output)]
    assert len(losses) == ranks
    assert max(losses) < 0.5  # guessing has 4.6
    if number == 0:
        assert output.startswith(OUTPUT[0])
