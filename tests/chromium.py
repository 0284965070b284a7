"""A browser for tests: headless Chromium driven over a pipe, cut off from every network but the loopback."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


def need_chromium() -> str:
    """Return the browser's path, or skip the test."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no chromium: apt-get install chromium")
    return found


class Chromium:
    """One browser with one page; a context manager.

    Attributes:
        requests: Address of every request the page wanted to make.
        loaded: Address of every answer it got.
        dialogs: Text of every dialog; each is accepted.
    """

    def __init__(self, width: int = 1400, height: int = 1000) -> None:
        self._path = need_chromium()
        self._size = (width, height)
        self._next = 0
        self._rest = b""
        self.requests: list[str] = []
        self.loaded: list[str] = []
        self.dialogs: list[str] = []

    def __enter__(self) -> Self:
        self._home = tempfile.mkdtemp(prefix="chromium-")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def arrange() -> None:  # the browser reads descriptor 3 and writes 4
            a, b = os.dup(to_browser), os.dup(from_browser)
            os.dup2(a, 3)
            os.dup2(b, 4)

        size = f"--window-size={self._size[0]},{self._size[1]}"
        command = [self._path, *FLAGS, size, f"--user-data-dir={self._home}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=arrange,  # noqa: PLW1509  # one thread only
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    def call(self, method: str, timeout_s: float = 120, **params: Any) -> dict[str, Any]:
        """Send a command and return its result, noting what happens meanwhile."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._out, data) :]
        wanted = self._next
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._read(deadline)
            if answer.get("id") == wanted:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def open(self, url: str, settle_s: float = 0.3) -> None:
        """Load a page and let it run a moment."""
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + 60
        while self.evaluate("document.readyState") != "complete" and time.monotonic() < deadline:
            self.pump(0.05)
        self.pump(settle_s)

    def evaluate(self, code: str, timeout_s: float = 120) -> Any:
        """Return the value of an expression in the page; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", timeout_s, expression=code, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in result:
            raise AssertionError(json.dumps(result["exceptionDetails"])[:2000])
        return result["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def pump(self, seconds: float) -> None:
        """Note what happens for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self._note(self._read(deadline))
            except TimeoutError:
                return

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Network.responseReceived":
            self.loaded.append(params["response"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
            self.call("Page.handleJavaScriptDialog", accept=True)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser did not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise AssertionError("the browser ended")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
