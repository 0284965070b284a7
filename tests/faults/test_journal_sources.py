from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import Controller, Role
from journal_engine import Truth
from launching import HERE, launch
from waiting import wait_until
from zbus.protocol.journal import Fate, JournalReport
from zbus.registry.file import FileRegistry
from zbus.registry.records import ExitRecord, Records

pytestmark = pytest.mark.alone


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Controller]:
    """Give one rank that does not come back."""
    role = Role("journal_engine:Diary", args=(str(tmp_path),), replicas=1, sys_path=[str(HERE)])
    with launch(tmp_path / "root", {"diary": role}) as launched:
        yield launched


def _records(bus: Controller) -> Records:
    return Records(FileRegistry(bus.trial.registry))


def _exit(bus: Controller) -> ExitRecord:
    with_records = _records(bus)
    try:
        (record,) = wait_until(with_records.exits, what="the exit record")
    finally:
        with_records.close()
    return record


def _submit(bus: Controller, folder: Path, count: int = 3) -> list[Any]:
    """Send calls of which the first is running when this returns."""
    one = bus.group("diary")[0]
    futures = [one.write.submit(str(n), 60.0 if n == 0 else 0.0) for n in range(count)]
    wait_until(lambda: Truth(folder, "diary", 0).times("begin", "0"), what="the first call")
    return futures


def _told(futures: list[Any]) -> list[tuple[str, str]]:
    for future in futures:
        future.exception(30)
    return [(entry.outcome, entry.state) for future in futures for entry in future.outcomes()]


def test_the_agent_reads_the_journal_into_the_exit_record(bus: Controller, tmp_path: Path) -> None:
    """Who reads the record of the end reads what had begun and what had ended."""
    pid, _ = bus.group("diary")[0].who()
    futures = _submit(bus, tmp_path)
    os.kill(pid, signal.SIGKILL)
    told = _told(futures)
    report = _exit(bus).journal
    assert isinstance(report, JournalReport)
    assert report.complete
    (lane,) = report.lanes
    assert lane.lane == "main"
    assert lane.fate(lane.upto - 1) is Fate.BEGAN
    assert [outcome for outcome, _ in told] == ["UNKNOWN", "NOT_EXECUTED", "NOT_EXECUTED"]
    crash = json.loads((bus.trial.path / _exit(bus).crash_file).read_text())
    assert crash["journal"]["lanes"][0]["began"] == [lane.upto - 1 - lane.since]
    assert list(bus.trial.journal.iterdir())


def test_fail_points_come_from_the_environment_of_a_role(tmp_path: Path) -> None:
    """``ZBUS_FAILPOINTS`` acts in the ranks; the creation of the engine is the first pass."""
    role = Role(
        "journal_engine:Diary",
        args=(str(tmp_path),),
        replicas=1,
        sys_path=[str(HERE)],
        env={"ZBUS_FAILPOINTS": "before_exec=exit:5@3"},
    )
    with launch(tmp_path / "root", {"diary": role}) as bus:
        one = bus.group("diary")[0]
        assert one.write("first") == "first"
        ((outcome, evidence),) = _told([one.write.submit("second")])
        assert outcome == "NOT_EXECUTED"
        assert "not started" in evidence
        assert Truth(tmp_path, "diary", 0).ran("second") == "no"
        assert _exit(bus).exit_code == 5


def test_an_orderly_end_leaves_no_journal(tmp_path: Path) -> None:
    """What it told stands in the exit record."""
    role = Role("journal_engine:Diary", args=(str(tmp_path),), replicas=1, sys_path=[str(HERE)])
    with launch(tmp_path / "root", {"diary": role}) as bus:
        bus.group("diary")[0].write("x")
        assert list(bus.trial.journal.iterdir())
    assert not list(bus.trial.journal.iterdir())
    journal = _exit(bus).journal
    assert journal is not None
    assert journal.lanes[0].fate(journal.lanes[0].upto - 1) is Fate.ENDED


def test_without_its_agent_a_worker_of_this_host_is_still_told(bus: Controller, tmp_path: Path) -> None:
    """The agent is killed and takes its rank along: the controller reads the journal itself."""
    (agent,) = (record.pid for record in _records(bus).agents())
    futures = _submit(bus, tmp_path)
    os.kill(agent, signal.SIGKILL)
    told = _told(futures)
    assert [outcome for outcome, _ in told] == ["UNKNOWN", "NOT_EXECUTED", "NOT_EXECUTED"]
    assert "began, no end" in told[0][1]
    assert "not started" in told[1][1]


def test_without_a_journal_nothing_is_claimed(bus: Controller, tmp_path: Path) -> None:
    """A file that is gone leaves every call that was sent UNKNOWN, and the worker had not noticed."""
    pid, _ = bus.group("diary")[0].who()
    (journal,) = bus.trial.journal.iterdir()
    journal.unlink()
    futures = _submit(bus, tmp_path)
    os.kill(pid, signal.SIGKILL)
    told = _told(futures)
    assert [outcome for outcome, _ in told] == ["UNKNOWN"] * 3
    assert _exit(bus).journal is None


def test_a_worker_that_can_keep_no_journal_serves(tmp_path: Path) -> None:
    """Where there is no place for the file the worker says so in its log and goes on."""
    role = Role(
        "journal_engine:Diary", args=(str(tmp_path),), replicas=1, sys_path=[str(HERE)], restart="one", max_restarts=5
    )
    with launch(tmp_path / "root", {"diary": role}) as bus:
        one = bus.group("diary")[0]
        pid, _ = one.who()
        (first,) = bus.trial.journal.iterdir()
        first.unlink()
        bus.trial.journal.rmdir()
        bus.trial.journal.write_text("no directory")
        os.kill(pid, signal.SIGKILL)

        def again() -> bool:
            try:
                return bool(one.who()[1] == 1)
            except Exception:  # noqa: BLE001  # it is on its way
                return False

        wait_until(again, 30, "the next start")
        assert one.write("served") == "served"
        assert "no crash journal" in bus.trial.log("diary", 0, 1).read_text()


def test_calls_in_flight_at_an_orderly_end_are_told_too(bus: Controller, tmp_path: Path) -> None:
    """SIGTERM lets the running call end; what waited behind it never starts."""
    pid, _ = bus.group("diary")[0].who()
    one = bus.group("diary")[0]
    released = tmp_path / "released"
    futures = [one.hold.submit(str(released)), one.write.submit("after")]
    wait_until((tmp_path / "released.held").exists, what="the running call")
    os.kill(pid, signal.SIGTERM)
    released.touch()
    told = _told(futures)
    assert told[1][0] == "NOT_EXECUTED"
    assert Truth(tmp_path, "diary", 0).ran("after") == "no"
