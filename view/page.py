"""The page: one HTML file with its charts inside, empty for the server or with all data."""

import json
import secrets
from pathlib import Path
from typing import Any

from runtime.errors import Refused
from view.runs import Store

HERE = Path(__file__).parent


def build_page(data: dict[str, Any] | None = None) -> str:
    """The page as HTML; without data it asks the server. It runs no script but its own."""
    page = (HERE / "page.html").read_text(encoding="utf-8")
    page = page.replace("NONCE", secrets.token_urlsafe(16))  # which no log can know
    for file in ("vendor/uPlot.min.css", "vendor/uPlot.iife.min.js", "charts.js", "page.js"):
        text = (HERE / file).read_text(encoding="utf-8")
        page = page.replace(f"/* {Path(file).name} */", text)
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # no "</script>" from a log
    return page.replace("PAGE_DATA", text)


def write_page(store: Store, path: Path) -> None:
    """Write a file that works offline. Refused if there are no runs."""
    data = store.reply(seconds=float("inf"))
    if not data["ids"]:
        unread = [f"no run log in {', '.join(data['folders'])}: nothing to show", *data["unread"]]
        raise Refused("\n".join(unread))
    path.write_text(build_page(data), encoding="utf-8")
