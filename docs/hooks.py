"""For mkdocs: README.md is the home page; what a page links outside docs/ is found elsewhere."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"(!?\[[^\]]*\])\(\.\./([^)\s]+)\)")
LINK = re.compile(r"\]\((?!http|#)(docs/)?")  # of README.md


def on_files(files: Any, config: Any) -> None:
    """Add the home page, and the pictures outside docs/, to the site."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    home = LINK.sub(lambda link: "](" if link[1] else "](../", readme)
    files.append(File.generated(config, "index.md", content=home))
    for page in list(files.documentation_pages()):
        for label, path in OUTSIDE.findall(page.content_string):
            if label.startswith("!") and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, config: Any, **others: Any) -> str:
    """Send links to the repository, or without a REPO_URL to the files of this clone."""
    home = f"{config.repo_url}/blob/HEAD" if config.repo_url else ROOT.as_uri()

    def moved(link: re.Match) -> str:
        label, path = link.groups()
        return f"{label}({path})" if label.startswith("!") else f"{label}({home}/{path})"

    return OUTSIDE.sub(moved, markdown)
