from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from link_kit import free_port, meet_a_stranger
from traceview import tail
from waiting import scaled
from zbus.errors import TrialError
from zbus.registry.file import FileRegistry
from zbus.trace import wire
from zbus.trace.collector import Collector
from zbus.trace.export import SIDECAR_KEY
from zbus.transport.sockets import SocketFactory


@pytest.fixture
def address(short_dir: Path) -> tuple[Path, int]:
    """Give a trial whose registry names a sidecar at a port, and the port; nobody is there yet."""
    port = free_port()
    (short_dir / "registry").mkdir(mode=0o700)
    registry = FileRegistry(short_dir / "registry")
    record = wire.SidecarRecord(endpoints=[f"tcp://127.0.0.1:{port}"])
    registry.put(SIDECAR_KEY, msgspec.json.encode(record))
    registry.close()
    return short_dir, port


def test_a_sidecar_is_dialled_anew_after_bytes_that_are_no_protocol(address, monkeypatch):
    """Another service had the sidecar's port for a while: the sidecar is asked over a connection of its own."""
    monkeypatch.setattr(tail, "_ANSWER_S", scaled(1))
    trial, port = address
    feed = tail.Feed(trial)
    factory = SocketFactory(max_sockets=8)
    try:
        meet_a_stranger(port)
        collector = Collector(trial / "traces", factory)
        collector.bind([f"tcp://127.0.0.1:{port}"])
        over = threading.Event()
        serving = threading.Thread(target=collector.serve, args=(over.is_set,))
        serving.start()
        try:
            assert list(feed.lines(follow=False)) == []
        finally:
            over.set()
            serving.join()
            collector.close()
    finally:
        feed.close()
        assert factory.close()


def test_a_sidecar_that_stays_silent_is_told(address, monkeypatch):
    """Nobody answers, on a second connection neither: the error names the trial and the next command."""
    monkeypatch.setattr(tail, "_ANSWER_S", 0.1)
    trial, _ = address
    feed = tail.Feed(trial)
    try:
        with pytest.raises(TrialError, match=f"no sidecar of {trial} answers"):
            list(feed.lines(follow=False))
    finally:
        feed.close()
