"""The server of the page: only this machine can reach it, and it only reads."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from runtime.errors import Refused
from view.page import build_page
from view.runs import Store

HOST = "127.0.0.1"
HEADERS = {"Cache-Control": "no-store", "Cross-Origin-Resource-Policy": "same-origin",
           "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """GET of `/`, `/runs?since=VERSION` and `/compare?a=ID&b=ID`; no more."""

    server: "Server"
    timeout = 30  # seconds; a silent client must not hold a thread

    def do_GET(self) -> None:
        port = self.server.server_port
        if self.headers["Host"] not in (f"{HOST}:{port}", f"localhost:{port}"):
            self.answer(403, "this server answers to its own name only")
            return  # else a web page whose name leads here could read the logs
        url = urlsplit(self.path)
        if url.path == "/":
            self.answer(200, build_page(), "text/html")
            return
        found = self.find(url.path, dict(parse_qsl(url.query)))
        if found is None:
            self.answer(404, "nothing here")
        else:
            self.answer(200, json.dumps(found, allow_nan=False))

    def find(self, path: str, asked: dict[str, str]) -> Any:
        """What the page asks for; None for anything else."""
        store, since = self.server.store, asked.get("since", "0")
        if path == "/runs" and since.isdecimal() and len(since) < 16:
            return store.reply(int(since))
        if path == "/compare":
            return store.compare(asked.get("a", ""), asked.get("b", ""))
        return None

    def answer(self, code: int, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page asks every two seconds."""


class Server(ThreadingHTTPServer):
    def __init__(self, store: Store, port: int) -> None:
        """Refused if the port is taken; 0 takes any free one."""
        self.store = store
        try:
            super().__init__((HOST, port), Handler)
            self.url = f"http://{HOST}:{self.server_port}/"
        except (OSError, OverflowError) as error:
            raise Refused(f"--port {port}: {error}; give another, or 0 for any free one") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that left."""
