"""Chromium without a window, driven by its DevTools protocol over a WebSocket."""

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 60  # seconds until what a test waits for has failed


class Browser:
    """One page. `evaluate` runs JavaScript in it, `wait` until an expression is true."""

    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
                 "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
                 f"--user-data-dir={self.profile.name}", "about:blank"]  # fmt: skip
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([str(CHROMIUM), *flags], stdout=quiet, stderr=quiet)
        told = Path(self.profile.name, "DevToolsActivePort")
        until = time.monotonic() + PATIENCE
        while not (told.exists() and told.read_text().count("\n")):
            assert time.monotonic() < until, "chromium does not start"
            time.sleep(0.05)
        port = int(told.read_text().split("\n")[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as reply:
            page = next(page for page in json.load(reply) if page["type"] == "page")
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        key = base64.b64encode(os.urandom(16)).decode()
        path = page["webSocketDebuggerUrl"].split(str(port), 1)[1]
        self.socket.sendall((
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        ).encode())  # fmt: skip
        self.stream = self.socket.makefile("rb")
        while self.stream.readline().strip():
            pass
        self.calls = 0
        self.errors: list[str] = []  # what the page's scripts threw
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.calls += 1
        text = json.dumps({"id": self.calls, "method": method, "params": params}).encode()
        size = struct.pack("!BBQ", 0x81, 0xFF, len(text))  # a masked text frame; the mask is 0
        self.socket.sendall(size + bytes(4) + text)
        while True:
            message = json.loads(self.receive())
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded":
                self.errors.append(str(message["params"]["entry"]["text"]))
            if message.get("id") == self.calls:
                assert "error" not in message, message
                return message["result"]

    def receive(self) -> bytes:
        whole, final = b"", False
        while not final:
            first, size = self.stream.read(2)
            final = bool(first & 0x80)
            if size >= 126:
                size = int.from_bytes(self.stream.read(2 if size == 126 else 8))
            whole += self.stream.read(size)
        return whole

    def open(self, url: str) -> None:
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True,
                          returnByValue=True)  # fmt: skip
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + PATIENCE
        script = f"(() => {{ try {{ return Boolean({condition}) }} catch {{ return false }} }})()"
        while not self.evaluate(script):  # an error: the page is not there yet
            assert time.monotonic() < until, f"never: {condition}"
            time.sleep(0.05)

    def show(self, width: int, height: int, scheme: str = "light") -> None:
        """The size of the window in CSS pixels, and light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(timeout=PATIENCE)
        self.profile.cleanup()
