"""The pages and the merged trace of a made-up run, as a reader sees them; their pictures stand in the documentation.

With ``ZBUS_TEST_GOLDEN=write`` the pictures under ``docs/images`` are made anew.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chromium import Chromium, need_chromium
from perfetto_page import PerfettoPage
from traceview.cli import main
from waiting import scaled

pytestmark = [pytest.mark.ci, pytest.mark.alone, pytest.mark.timeout(scaled(200))]

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
MAX_BYTES = 150_000
STEPS, RANKS = 6, 4


class File:
    """The trace file of one rank being written; times in µs."""

    def __init__(self, root: Path, role: str, rank: int) -> None:
        self.path = root / "traces" / role / f"traces_{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.pid = 100 + rank + 50 * len(role)
        meta = {"format": 1, "run": "demo/20261130-0912-k3f", "role": role, "rank": rank, "boot_id": "b", "time_ns": 1}
        meta |= {"pid": self.pid, "mono_ns": 1000, "wall_ns": 1_796_000_000_000_000_000, "epoch_mono_ns": 0}
        name = {"name": f"{role}/{rank} (a, pid {self.pid})", "role": role, "rank": rank}
        self.lines: list[dict[str, Any]] = [self.event("zbus_meta", "M", 0.0, args=meta)]
        self.lines.append(self.event("process_name", "M", None, args=name))
        self.lines.append(self.event("thread_name", "M", None, args={"name": "MainThread"}))

    def event(self, name: str, phase: str, ts: float | None, **more: Any) -> dict[str, Any]:
        """Return an event of this process."""
        times = {} if ts is None else {"ts": round(ts, 3)}
        return {"name": name, "ph": phase, **times, "pid": self.pid, "tid": self.pid, **more}

    def span(self, name: str, start: float, end: float, cat: str, args: dict[str, Any], **more: Any) -> None:
        """Write a span."""
        dur = round(round(end, 3) - round(start, 3), 3)
        self.lines.append(self.event(name, "X", start, dur=dur, cat=cat, args=args, **more))

    def close(self) -> None:
        """Write the file."""
        self.lines.append(self.event("zbus_end", "M", 10.0, args={"lost": {}}))
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))


def made_up_run(root: Path) -> None:
    """Write a run of some steps: four actors, the third slower in `reward`, and two ranks of rollouts with sessions."""
    rng = random.Random(7)
    controller = File(root, "controller", 0)
    actors = [File(root, "actor", rank) for rank in range(RANKS)]
    at = 1000.0
    for step in range(STEPS):
        begin, done = at, at
        for rank, actor in enumerate(actors):
            call, arrow = f"{step:08x}{rank:08x}", 4 * (step * RANKS + rank) + 1
            sent, arrived = at + 60 + rank * 25, at + 420 + rank * 30
            forward = rng.uniform(34_000, 38_000)
            reward = rng.uniform(14_000, 16_000) * (1.9 if rank == 2 else 1.0)
            ended = arrived + 200 + forward + reward
            bus = {"call": call, "method": "train", "attempt": 1, "batch": step, "outcome": "OK"}
            where, queue = {"tid": 7000 + rank, "track": call}, {"tid": 7900, "track": call}
            request, reply = {"bind_id": hex(arrow), "flow_out": True}, {"bind_id": hex(arrow + 1), "flow_in": True}
            whole = {"kind": "client", "worker": f"actor/{rank}", **bus}
            controller.span("call train", at, ended + 600, "rpc", whole, **where)
            controller.span("encode", at, sent - 20, "rpc", {"kind": "encode", **bus}, **where)
            controller.span("send", sent - 20, sent, "rpc", {"kind": "send", **bus}, **where, **request)
            controller.span("wire", sent, ended + 500, "rpc", {"kind": "wire", **bus}, **where)
            controller.span("decode", ended + 500, ended + 600, "rpc", {"kind": "return", **bus}, **where, **reply)
            arrives = {"bind_id": hex(arrow), "flow_in": True}
            actor.span("queue train", arrived, arrived + 100, "rpc", {"kind": "queue", **bus}, **queue, **arrives)
            actor.span("run train", arrived + 100, ended, "rpc", {"kind": "run", "step": step, **bus})
            actor.span("forward", arrived + 150, arrived + 150 + forward, "compute", {"step": step})
            actor.span("reward", arrived + 170 + forward, arrived + 170 + forward + reward, "scheduler", {"step": step})
            leaves = {"bind_id": hex(arrow + 1), "flow_out": True}
            actor.span("reply", ended, ended + 120, "rpc", {"kind": "reply", **bus}, **leaves)
            done = max(done, ended + 600)
        controller.lines.append(controller.event("zbus_step", "i", done, args={"step": step}))
        at = done + rng.uniform(2000, 5000)
        sessions(root, rng, step, begin, done)
    for rank in range(RANKS):
        name = {"name": "thread_name", "ph": "M", "pid": controller.pid, "tid": 7000 + rank}
        controller.lines.append({**name, "args": {"name": f"→ actor/{rank} main"}})
        actors[rank].lines.append({**name, "pid": actors[rank].pid, "tid": 7900, "args": {"name": "queue main"}})
    for file in (controller, *actors):
        file.close()


def sessions(root: Path, rng: random.Random, step: int, begin: float, done: float) -> None:
    """Add the sessions of one step: generate, call a tool now and then, reward."""
    for rank in range(2):
        lines = []
        path = root / "traces" / "rollout" / f"sessions_{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            meta = {"format": 1, "run": "demo/20261130-0912-k3f", "role": "rollout", "rank": rank, "boot_id": "b"}
            meta |= {"time_ns": 1, "mono_ns": 1000, "wall_ns": 1_796_000_000_000_000_000, "epoch_mono_ns": 0}
            lines.append({"zbus_sessions": meta})
        for n in range(4):
            start = (begin + rng.uniform(0, 6000)) / 1e6
            room = (done / 1e6 - start) * rng.uniform(0.55, 0.97)
            told = {"generate": [(0.03, 0.45)], "reward": [(0.86, 0.99)]}
            told |= {"toolcall": [(0.47, 0.6)]} if rng.random() < 0.6 else {}
            told["generate"].append((0.62, 0.85))
            phases = {
                name: [{"start_ts": start + a * room, "end_ts": start + b * room} for a, b in pairs]
                for name, pairs in told.items()
            }
            kept = rng.random() < 0.85
            status = {"status": "accepted"} if kept else {"status": "rejected", "reason": "too long"}
            ids = {"task_id": step, "session_id": f"{step}-{rank}-{n}", "rank": rank, "role": "rollout"}
            times = {"submit_ts": start, "finalized_ts": start + room}
            lines.append({**ids, **status, **times, "phases": phases})
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


def command(*args: object) -> None:
    """Run a command that must end well."""
    done = CliRunner().invoke(main, [str(arg) for arg in args])
    assert done.exit_code == 0, done.output


def keep(picture: Path, name: str) -> None:
    """Check a picture's size; make it the documentation's on request."""
    assert 5_000 < picture.stat().st_size < MAX_BYTES, picture.stat().st_size
    if os.environ.get("ZBUS_TEST_GOLDEN") == "write":
        shutil.copy(picture, IMAGES / name)
    assert (IMAGES / name).stat().st_size < MAX_BYTES


@pytest.mark.parametrize(
    ("name", "height", "words"),
    [
        ("report", 1090, ("1", "actor/2", "slow phase", "reward", "Critical path", "Timeline", "Sessions")),
        ("sessions", 1560, ("p95", "Distribution of session length", "Life cycle of rollout/0", "too long", "step")),
    ],
)
def test_a_page_is_readable(tmp_path, name, height, words):
    """A page fits its window, nothing is cut off or laid over other text, and it says what it is for."""
    need_chromium()
    made_up_run(tmp_path / "run")
    command(name, tmp_path / "run", "-o", tmp_path / "page.html")
    with Chromium(1100, height) as browser:
        browser.open(f"file://{tmp_path}/page.html")
        text = browser.evaluate("document.body.innerText")
        assert [word for word in words if word not in text] == []
        assert browser.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        cut = "[...document.querySelectorAll('td,th,.card')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert browser.evaluate(cut) == 0
        hovered = browser.evaluate("[...document.querySelectorAll('svg title')].map(e => e.textContent).join('|')")
        assert "rollout/0 · session 0-0-0 · task 0 · " in hovered
        browser.evaluate("document.documentElement.style.overflow = 'hidden'")
        browser.screenshot(tmp_path / "page.png")
    keep(tmp_path / "page.png", f"{name}.png")


def test_the_merged_trace_can_be_read_in_the_viewer(tmp_path):
    """Rows have the names that the how-to speaks of, in its order; the picture shows calls, queues, runs and arrows."""
    made_up_run(tmp_path / "run")
    command("merge", tmp_path / "run", "-o", tmp_path / "merged.pftrace")
    with PerfettoPage() as perfetto:
        perfetto.open(tmp_path / "merged.pftrace")
        assert perfetto.errors() == []
        rows = perfetto.ask("select name from process where name like '%/%' order by pid")
        named = [row["name"].partition(" ")[0] for row in rows]
        assert named == ["controller/0", *(f"actor/{n}" for n in range(RANKS))]
        threads = {row["name"] for row in perfetto.ask("select name from thread")}
        assert {"→ actor/0 main", "queue main"} <= threads
        assert perfetto.arrows("call", "attempt") == (2 * STEPS * RANKS, 2 * STEPS * RANKS)
        perfetto.picture(tmp_path / "perfetto.png")
    keep(tmp_path / "perfetto.png", "perfetto.png")
