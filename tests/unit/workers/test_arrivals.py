"""Records of started ranks are seen when they are there."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from waiting import wait_until
from workers.arrivals import Arrivals
from workers.background import Background
from zbus.errors import RegistryError
from zbus.registry.file import FileRegistry
from zbus.registry.records import Records, WorkerRecord

RECORD = WorkerRecord(role="actor", rank=3, incarnation=77)
SPEC = SimpleNamespace(role="actor", rank=3, incarnation=77)


@pytest.fixture
def desk(tmp_path):
    """Give arrivals, the registry, and the list of those that arrived."""
    crashes: list[BaseException] = []
    background = Background(crashes.append)
    background.start()
    arrivals = Arrivals(background)
    yield arrivals, Records(FileRegistry(tmp_path / "registry")), []
    assert background.stop(5.0)
    assert not crashes
    arrivals.close()


def test_the_bell_has_a_record_seen_once(desk, monkeypatch):
    """A rank that rings is looked for at once, not at the next look; it arrives once."""
    monkeypatch.setattr("workers.arrivals._LOOK_S", 3600.0)
    arrivals, records, arrived = desk
    looks: list[None] = []
    vouch = records.vouch
    monkeypatch.setattr(records, "vouch", lambda *key: looks.append(None) or vouch(*key))
    arrivals.expect(SPEC, records, lambda: True, arrived.append)
    wait_until(lambda: looks, what="the first look, which finds nothing")
    assert arrived == []
    records.publish_worker(RECORD)
    os.eventfd_write(arrivals.fileno(), 1)
    arrivals.on_bell()
    wait_until(lambda: arrived == [SPEC], what="the record to be seen")
    arrivals.on_bell()
    assert arrived == [SPEC]


def test_a_record_is_seen_without_a_bell_too(desk, monkeypatch):
    """The looks go on for a rank that cannot ring."""
    monkeypatch.setattr("workers.arrivals._LOOK_S", 0.01)
    arrivals, records, arrived = desk
    arrivals.expect(SPEC, records, lambda: True, arrived.append)
    records.publish_worker(RECORD)
    wait_until(lambda: arrived == [SPEC], what="the record to be seen")


def test_a_rank_that_has_ended_is_no_longer_looked_for(desk, monkeypatch):
    """Its record will not come: the looks end, and a later bell finds nothing to do."""
    monkeypatch.setattr("workers.arrivals._LOOK_S", 0.01)
    arrivals, records, arrived = desk
    arrivals.expect(SPEC, records, lambda: False, arrived.append)
    wait_until(lambda: not arrivals._looks, what="the last look")
    records.publish_worker(RECORD)
    arrivals.on_bell()
    assert arrived == []


def test_an_error_of_who_is_told_is_not_taken_for_the_registrys(monkeypatch, tmp_path):
    """The look itself passes over what the registry says; what the told one says is heard."""
    monkeypatch.setattr("workers.arrivals._LOOK_S", 0.01)
    heard: list[str] = []
    records = Records(FileRegistry(tmp_path / "registry"))
    records.publish_worker(RECORD)

    class Now:
        """Runs a job at once."""

        def every(self, job):
            try:
                job()
            except RegistryError as error:
                heard.append(str(error))

    def refuse(_spec):
        raise RegistryError("told in vain")

    arrivals = Arrivals(Now())
    try:
        arrivals.expect(SPEC, records, lambda: True, refuse)
    finally:
        arrivals.close()
    assert heard == ["told in vain"]
