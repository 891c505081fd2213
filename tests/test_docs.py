"""What the text promises: its code runs, its links lead somewhere, its commands are accepted."""

import argparse
import importlib
import importlib.util
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from small_model import keep, make_model, small
from small_run import ROOT, arguments, run, two_layers, write_data

import train_gpt
from data.tokenizers import PROSE
from runtime.settings import as_text, parse
from runtime.source import read_sources, write_files
from train_gpt import Config

WRITTEN = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
WRITTEN.append(ROOT / "data" / "README.md")
RECORDS = sorted(ROOT.glob("records/**/*.md"))
PAGES = [*WRITTEN, *(page for page in RECORDS if len(page.relative_to(ROOT).parts) <= 3)]

# Programs of a page that no test starts.
FOREIGN = {"git", "cd", "source", "cmp", "grep", "tail", "ruff", "mypy", "bash", "pip", "mkdocs"}
FOREIGN |= {"hf", "lm_eval"}

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks_of(page: Path, *kinds: str) -> list[str]:
    """Blocks of code of these kinds, also those inside a list."""
    fence = r"^( *)```(\w*)\n(.*?)^\1```$"
    found = re.findall(fence, page.read_text(encoding="utf-8"), re.M | re.S)
    return [dedent(text) for _, kind, text in found if kind in kinds]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M):
        words = re.sub(r"[^\w\s-]", "", heading.lower())
        found.add(words.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize(
    "page",
    [*WRITTEN, *RECORDS, ROOT / "optim" / "README.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


def test_every_page_that_a_program_names_exists():
    programs = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), ROOT / "run.sh"]
    named = {
        (program.name, page)
        for program in programs
        for page in re.findall(r"\bdocs/\w+\.\w+", program.read_text(encoding="utf-8"))
    }
    assert named
    assert [each for each in sorted(named) if not (ROOT / each[1]).exists()] == []


# ---- Blocks of code


class Accepted(Exception):
    """A program has read its arguments and would now begin."""


def commands(page: Path) -> list[list[str]]:
    """The words of each command of a page, without variables that are set before it."""
    lines = []
    for block in blocks_of(page, "sh", ""):
        lines += re.findall(r'(?:"[^"]*"|[^"\n])+', block)  # a quoted word may have several lines
    for block in blocks_of(page, "console"):
        lines += [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    found = []
    for part in [part for line in lines for part in line.split(" && ")]:
        words = shlex.split(part, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        found += [words] if words else []
    return found


def start(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program that a command starts read its arguments, and no more."""
    program, *rest = words
    if program == "torchrun":  # behind its own flags
        program, rest = "python", list(itertools.dropwhile(lambda word: word[0] == "-", rest))
    if program == "python" and rest[0] == "-c":
        return
    if rest[:2] == ["-m", "pip"]:
        return  # looking for pip makes setuptools, and with it every compilation, fail from here on
    if program == "python" and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]), f"no module {rest[1]}"
    elif program == "python" and rest[0].startswith("scripts/"):
        script = importlib.import_module(rest[0].removesuffix(".py").replace("/", "."))
        monkeypatch.setattr(sys, "argv", rest)
        with pytest.raises(Accepted):
            script.main()
    elif program == "python" and "train_gpt.py" in rest:
        parse(Config, rest[rest.index("train_gpt.py") + 1 :], train_gpt.preset, "")
    elif program == "./run.sh" and rest[:1] != ["test"]:
        track = [] if "--track" in rest else ["--track", "tiny"]
        parse(Config, track + rest, train_gpt.preset, "")
    else:
        assert program in FOREIGN | {"./run.sh"}, f"no test knows {program}"


@by_page
def test_every_command_is_accepted_by_the_program_that_it_starts(page, monkeypatch):
    if page.name == "change.md":
        return  # its flags exist only after its changes: the test of these runs them
    read = argparse.ArgumentParser.parse_args

    def read_only(self: argparse.ArgumentParser, *given: Any) -> Any:
        values = read(self, *given)
        if self.description and "scripts/" in self.description:
            raise Accepted
        return values

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read_only)
    for words in commands(page):
        try:
            start(words, monkeypatch)
        except (ValueError, SystemExit, AssertionError) as error:
            pytest.fail(f"{page.name}: {' '.join(words)}: {error}")


def test_the_example_reads_a_kept_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_model(small("tiny", "muon", vocab_size=2048, bos=2047))
    model.initialize(0)
    keep(model, Path("checkpoints/RUN"), PROSE)
    names: dict[str, Any] = {}
    blocks = blocks_of(ROOT / "docs" / "using.md", "python")
    (block,) = [block for block in blocks if "transformers" not in block]  # test_export.py runs it
    exec(block, names)
    assert names["logits"].shape == (len(names["tokens"]), 2048)


def applied(diffs: list[str], source: str) -> str:
    """The source with these changes. Each must fit at exactly one place."""
    for diff in diffs:
        lines = diff.splitlines()
        before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
        after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
        count = f"\n{source}".count(f"\n{before}\n")
        assert count == 1, f"fits at {count} places of train_gpt.py:\n{diff}"
        source = source.replace(f"{before}\n", f"{after}\n")
    return source


def test_the_first_idea_of_the_tutorial_fits_the_trainer():
    changes = blocks_of(ROOT / "docs" / "tutorial.md", "diff")
    assert changes
    applied(changes, (ROOT / "train_gpt.py").read_text("utf-8"))


def test_the_changes_of_the_page_make_a_trainer_that_trains(tmp_path):
    page, clone, logs = ROOT / "docs" / "change.md", tmp_path / "clone", tmp_path / "logs"
    changed = applied(blocks_of(page, "diff"), (ROOT / "train_gpt.py").read_text("utf-8"))
    write_files(read_sources(ROOT) | {"train_gpt.py": changed.encode()}, clone)
    flags = [word for words in commands(page) if words[0] == "./run.sh" for word in words[1:]]
    words = [*arguments(write_data(tmp_path / "data", 60), logs, steps=4), *flags]
    command = [sys.executable, "train_gpt.py", "--track", "tiny", *words]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    log = next(logs.glob("2*.jsonl")).read_text(encoding="utf-8").splitlines()
    config, end = json.loads(log[0])["config"], json.loads(log[-1])
    assert len(flags) >= 8
    for name, value in zip(flags[::2], flags[1::2], strict=True):
        assert as_text(config[name[2:].replace("-", "_")]) == value
    assert (end["status"], end["steps"]) == ("done", 4)


# ---- The log


SCHEMA = json.loads((ROOT / "docs" / "log_schema.json").read_text(encoding="utf-8"))["$defs"]
KINDS = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array",
    type(None): "null",
}  # fmt: skip


def misfits(event: dict[str, Any]) -> set[str]:
    """The fields of an event that it lacks, that its schema lacks, or of another type."""
    schema = SCHEMA[event["event"]]
    found = set(schema["required"]) - event.keys()
    for name in event.keys() - {"event"}:
        types, kind = schema["properties"].get(name, {}).get("type", ""), KINDS[type(event[name])]
        if kind not in types and not (kind == "integer" and "number" in types):
            found.add(name)
    return found


def test_the_schema_of_the_log_fits_every_line_of_a_run_and_of_the_stored_claims(tmp_path):
    data = write_data(tmp_path / "data", 60)
    with two_layers():
        run(data, tmp_path / "logs", steps=4)
    logs = [*tmp_path.glob("logs/2*.jsonl")]
    logs += [next(folder.glob("*_s*.jsonl")) for folder in ROOT.glob("records/small/*/runs")]
    seen = set()
    for log in logs:
        for line in log.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            assert misfits(event) == set(), f"{log.name}: {event['event']}"
            seen.add(event["event"])
    assert seen >= {"header", "phase", "step", "val", "end"}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_its_links_and_pictures_are_there(tmp_path):
    pytest.importorskip("mkdocs", reason="needs pip install -r requirements-docs.txt")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("index.html"):
        for target in re.findall(r'(?:href|src)="([^"#]+)', page.read_text(encoding="utf-8")):
            if target.startswith("file:"):  # what a page names outside docs/
                assert Path(url2pathname(urlsplit(target).path)).exists(), f"{page}: {target}"
            elif not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page}: {target}"
