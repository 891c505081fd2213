"""The source of a run: which files decide what it computes, their hash, and a copy of them."""

import ast
import hashlib
from pathlib import Path

from runtime.errors import cannot_write

SOURCE_FILES = (
    "train_gpt.py", "inference/__init__.py", "inference/model.py", "requirements.txt",
    "data/prose.tiktoken", "data/wheels.txt",
)  # fmt: skip
SOURCE_PACKAGES = ("optim", "data", "kernels", "runtime")


def read_sources(root: str | Path) -> dict[str, bytes]:
    """The files that decide what a run computes: contents by name relative to `root`, sorted."""
    root = Path(root)
    files, packages = source_lists(root)
    paths = [root / name for name in files]
    for package in packages:
        paths += (root / package).rglob("*.py")
    names = sorted(path.relative_to(root).as_posix() for path in paths if path.is_file())
    return {name: (root / name).read_bytes() for name in names}


def source_lists(root: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files and packages that the source under `root` hashes; ours if it has no list.

    Another edition has other files, and its logs hold the hash of these.
    """
    found = {"SOURCE_FILES": SOURCE_FILES, "SOURCE_PACKAGES": SOURCE_PACKAGES}
    for path in (root / "runtime" / "log.py", root / "runtime" / "source.py"):  # older, and today's
        for node in ast.parse(path.read_bytes()).body if path.is_file() else ():
            name = getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) else ""
            if isinstance(node, ast.Assign) and name in found:
                found[name] = ast.literal_eval(node.value)
    return found["SOURCE_FILES"], found["SOURCE_PACKAGES"]


def digest(sources: dict[str, bytes]) -> str:
    """SHA-256 of names and contents, in the order of the names."""
    sha256 = hashlib.sha256()
    for name in sorted(sources):
        for part in (name.encode(), sources[name]):
            sha256.update(f"{len(part)}:".encode())  # else "ab" + "c" would equal "a" + "bc"
            sha256.update(part)
    return sha256.hexdigest()


def write_files(files: dict[str, bytes], folder: Path) -> None:
    """Write the files under a folder, as they were in their repository."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def source_hash(root: str | Path) -> str:
    return digest(read_sources(root))


def store_sources(directory: str | Path, root: str | Path) -> str:
    """Copy the sources to `sources/<sha256>/`, once. Returns the hash. LogError if it cannot."""
    sources = read_sources(root)  # once, so that the hash is that of what is stored
    sha256 = digest(sources)
    folder = Path(directory, "sources", sha256)
    try:
        if source_hash(folder) != sha256:
            write_files(sources, folder)
    except OSError as error:  # the next run writes the rest
        raise cannot_write(folder, error) from error
    return sha256
