"""Stacks are asked for under the bus's lock: a process that is out of threads must not fail there."""

from __future__ import annotations

import threading

from controller.stacks import Stacks
from waiting import scaled, wait_until
from zbus.config import TrialDir
from zbus.registry.records import WorkerRecord

RECORD = WorkerRecord(role="actor", rank=0, incarnation=7)


def test_asking_when_no_thread_is_to_be_had_gives_nothing_and_later_asks_again(tmp_path, monkeypatch):
    """It does not raise, nobody waits for what will not come, and the next request starts the thread."""
    asked: list[int] = []

    def ask(records):
        asked.extend(record.incarnation for record in records)
        return {}, set()

    stacks = Stacks(TrialDir(tmp_path, "ex", "tr"), ask)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        stacks.ask(RECORD)
    try:
        assert stacks.get(7, scaled(20)) is None
        assert asked == []
        stacks.ask(RECORD)
        wait_until(lambda: asked == [7], what="the thread to ask the rank")
    finally:
        stacks.close()


def _refuse(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
