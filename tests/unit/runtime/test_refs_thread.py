"""The thread that drops what the gone have left."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from waiting import scaled
from zbus.errors import RegistryError
from zbus.runtime import refs
from zbus.runtime.refs import WorkerRefs


def test_an_error_does_not_end_the_thread_that_drops_what_is_left(monkeypatch, caplog):
    """Records that cannot be read now can be read later; it is said once, not with every look."""
    monkeypatch.setattr(refs, "_TICK_S", 0.001)
    ticks, later = [], threading.Event()

    def tick():
        ticks.append(1)
        if len(ticks) > 3:
            later.set()
            return
        raise RegistryError("the records cannot be read")

    kept = WorkerRefs(SimpleNamespace(tick=tick, keep=lambda *_: None), None)
    kept.keep(1, b"s", 1, "f")
    try:
        assert later.wait(scaled(10))
    finally:
        kept.close()
    assert len([one for one in caplog.records if one.name == "zbus.refs"]) == 1
