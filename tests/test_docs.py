"""What the text promises: its example runs, its links lead somewhere, its flags exist."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from train_gpt import Config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("records/*/README.md")),
    ROOT / "records" / "README.md",
]
FLAGS = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(Config)}

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M):
        words = re.sub(r"[^\w\s-]", "", heading.lower())
        found.add(words.strip().replace(" ", "-"))
    return found


def trainer_flags(line: str) -> list[str]:
    """The flags that a line gives to the trainer, none for a line that starts something else."""
    command = line.split("#")[0].removeprefix("$ ")
    if "record.py claim" in command or "ablate.py" in command:
        command = command.partition(" -- ")[2]
    elif not re.search(r"run\.sh(?! test)|train_gpt\.py", command):
        return []
    else:
        command = re.split(r"run\.sh|train_gpt\.py", command)[1]
    return re.findall(r"(?<!\S)--[a-z0-9-]+", command)


@by_page
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


@by_page
def test_every_flag_that_a_page_gives_to_the_trainer_exists(page: Path) -> None:
    for block in code_blocks(page):
        for line in block.splitlines():
            unknown = set(trainer_flags(line)) - FLAGS - {"--help", "--print-config"}
            assert not unknown, f"{page.name}: {line}"


def test_the_readmes_example_of_the_optimizers_takes_every_step() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = readme.split("## Use the optimizers elsewhere")[1].split("```python")[1]
    names: dict[str, Any] = {}
    exec(example.split("```")[0], names)
    steps = {
        state["step"].item()
        for optimizer in names["optimizers"].values()
        for state in optimizer.state_dict()["state"].values()
        if "step" in state
    }
    assert steps == {20}  # no step was skipped
    assert names["loss"].item() < 6  # random tokens: near log(100) from above
