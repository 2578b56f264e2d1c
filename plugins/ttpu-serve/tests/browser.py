"""A headless Chromium that tests drive over a pipe, by its DevTools protocol: no other package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PLACE = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Puts the pipes where the protocol wants them, 3 to read and 4 to write, in a process that has no threads to fork."""

NAMES = ("chromium", "chromium-browser", "google-chrome")


def executable() -> str | None:
    """The installed browser, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. Every command waits for its answer."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write, self._read = to_browser, from_browser
        self._count, self._held = 0, b""
        self._session: str | None = None
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.command("Runtime.enable")
        self.problems: list[str] = []

    def command(self, method: str, **params: Any) -> Any:
        """A command's result; uncaught exceptions of the page are noted meanwhile."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(answer["params"]["exceptionDetails"])[:500])
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        told = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def open(self, url: str) -> None:
        """Go there, and wait until its scripts ran."""
        self.evaluate("window.left = true")
        self.command("Page.navigate", url=url)
        self.wait("!window.left && document.readyState === 'complete'")

    def wait(self, expression: str, seconds: float = 15) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + seconds
        while True:
            if value := self.evaluate(expression):
                return value
            assert time.monotonic() < deadline, (
                f"{expression} did not come true: {self.evaluate('document.body.innerText')}"
            )
            time.sleep(0.02)

    def size(self, width: int, height: int) -> None:
        """Of the window, in pixels."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def screenshot(self, path: Path) -> None:
        """What is seen, as PNG."""
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot")["data"]))

    def _next(self) -> Any:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], 60)
            assert ready, "the browser says nothing"
            part = os.read(self._read, 1 << 16)
            assert part, "the browser went away"
            self._held += part
        message, self._held = self._held.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def browser(folder: Path, *options: str) -> Iterator[Page]:
    """A browser with a profile of its own in `folder`."""
    to_browser, from_test = os.pipe()
    to_test, from_browser = os.pipe()
    command = [
        sys.executable, "-c", PLACE, str(to_browser), str(from_browser), executable() or "",
        "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}",
        "--no-first-run", "--disable-background-networking", *options,
    ]  # fmt: skip
    process = subprocess.Popen(command, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL)
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(from_test, to_test)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_test)
        os.close(to_test)
