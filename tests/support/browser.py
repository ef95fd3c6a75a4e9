"""A headless Chromium, controlled over its DevTools pipe."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["Browser", "chromium"]

SECONDS = 60.0  # timeout for an answer of the browser

# The browser reads commands from file 3 and writes answers to file 4.
_START = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"


def chromium() -> str | None:
    """The path of an installed Chromium or Chrome, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page in one browser. ``messages`` lists its console output and errors."""

    def __init__(self, program: str, home: Path) -> None:
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        ours = (os.dup(read), os.dup(write))
        high = [os.dup(end) for end in ours]  # not 3 or 4, which are about to be overwritten
        for end in (read, write, *ours):
            os.close(end)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command = [program, *options, "--remote-debugging-pipe", f"--user-data-dir={home}", "about:blank"]
        with (home / "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, *map(str, high), *command], pass_fds=high, stdout=log, stderr=log
            )
        for end in high:
            os.close(end)
        self._number, self._rest = 0, b""
        self.messages: list[str] = []
        self.requested_urls: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a DevTools command to the page and return its result."""
        return self._call(method, session=self._session, **params)

    def open(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False, touch: bool = False) -> None:
        """Open a file and wait until it is loaded."""
        self.messages.clear()
        self.requested_urls.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.call("Page.navigate", url=path.as_uri())
        self.wait_until("document.readyState === 'complete' && location.protocol === 'file:'")

    def run(self, code: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, code: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.run(code):
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.02)

    def wait_for_frame(self) -> None:
        """Wait until two animation frames have been drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.wait_for_frame()

    def press_key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.wait_for_frame()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        command = {"id": number, "method": method, "params": params}
        if session is not None:
            command["sessionId"] = session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while True:
            message = self._next(end)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self._handle_event(message)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._from, 1 << 16) if ready else b""
            assert data, f"no answer from the browser; its exit code is {self._process.poll()}"
            self._rest += data
        line, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(line))

    def _handle_event(self, message: dict[str, Any]) -> None:
        event, params = message.get("method"), message.get("params", {})
        if event == "Runtime.consoleAPICalled":
            self.messages.append(f"{params['type']}: {params['args']}")
        elif event == "Runtime.exceptionThrown":
            self.messages.append(f"exception: {params['exceptionDetails']}")
        elif event == "Log.entryAdded":
            self.messages.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif event == "Network.requestWillBeSent":
            self.requested_urls.append(params["request"]["url"])
