"""Chromium without a window, driven by its DevTools protocol over two pipes."""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 60  # seconds until what a test waits for has failed


class Browser:
    """One page. `evaluate` runs JavaScript in it, `wait` until an expression is true."""

    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
                 "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
                 f"--user-data-dir={self.profile.name}"]  # fmt: skip
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        # Chromium reads descriptor 3 and writes to 4.
        words = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash", str(CHROMIUM)]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([*words, *flags], stdout=quiet, stderr=quiet,
                                        pass_fds=(commands, answers))  # fmt: skip
        os.close(commands)
        os.close(answers)
        self.calls, self.received = 0, b""
        self.errors: list[str] = []  # what the page's scripts threw
        self.session: dict[str, str] = {}
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.calls += 1
        asked = {"id": self.calls, "method": method, "params": params} | self.session
        os.write(self.commands, json.dumps(asked).encode() + b"\0")
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
        while b"\0" not in self.received:
            assert select.select([self.answers], [], [], PATIENCE)[0], "chromium says nothing"
            part = os.read(self.answers, 2**20)
            assert part, "chromium has ended"
            self.received += part
        message, _, self.received = self.received.partition(b"\0")
        return message

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

    def show(self, width: int, height: int) -> None:
        """The size of the window in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip

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

    def close(self) -> None:
        os.close(self.commands)
        os.close(self.answers)
        self.process.terminate()
        self.process.wait(timeout=PATIENCE)
        self.profile.cleanup()
