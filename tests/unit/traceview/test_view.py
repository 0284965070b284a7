from __future__ import annotations

import http.client
import json
import subprocess
import sys

import pytest

from traceview.view import Page, Viewer, perfetto_pages
from waiting import scaled

SPAN = '{"name":"work","ph":"X","ts":1,"dur":2000,"pid":1,"tid":1}\n'


def get(port: int, path: str, host: str | None = None) -> tuple[int, bytes, dict[str, str]]:
    """Fetch a path: status, body, headers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def test_pages_and_files_are_served_on_the_loopback_alone(tmp_path):
    """The page, what the UI asks for and the files of its folder are there; nothing outside of the folder is."""
    folder = tmp_path / "ui"
    folder.mkdir()
    (folder / "index.html").write_text("ui")
    (folder / "a.wasm").write_bytes(b"w")
    (tmp_path / "secret").write_text("s")
    (folder / "link").symlink_to(tmp_path / "secret")
    with Viewer({"/": Page(b"hello"), **perfetto_pages(b"trace")}, folder) as viewer:
        assert viewer.url.startswith("http://127.0.0.1:")
        assert get(viewer.port, "/")[:2] == (200, b"hello")
        assert viewer.served.wait(scaled(10))
        assert get(viewer.port, "/localtrace")[1] == b"trace"
        status, body, headers = get(viewer.port, "/a.wasm?x=1")
        assert (status, body, headers["Content-Type"]) == (200, b"w", "application/wasm")
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        for path in ("/../secret", "/%2e%2e/secret", "/link", "/nothing", "//etc/passwd", "/ui/../../secret"):
            assert get(viewer.port, path)[0] == 404, path


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:1"])
def test_a_page_elsewhere_cannot_read_it(host):
    """A name of another host that was bent to 127.0.0.1 is refused."""
    with Viewer({"/": Page(b"hello")}) as viewer:
        assert get(viewer.port, "/", host)[0] == 403


def test_the_command_prints_where_it_is_and_how_to_get_there(tmp_path):
    """View prints its address and the ssh line, serves the report, and with --once ends after it was fetched."""
    (tmp_path / "traces_0.jsonl").write_text(SPAN)
    command = [sys.executable, "-m", "traceview", "view", str(tmp_path), "--no-browser", "--once", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        port = int(said["url"].rsplit(":", 1)[1].strip("/"))
        assert said["ssh"].startswith(f"ssh -N -L {port}:127.0.0.1:{port} ")
        status, body, _ = get(port, "/")
        assert process.wait(scaled(20)) == 0
    assert status == 200
    assert b"Trace report" in body
