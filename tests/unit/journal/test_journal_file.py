from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from waiting import scaled, wait_until
from zbus.protocol.journal import BLOCK_BYTES, BLOCKS, FILE_BYTES, HEADER_BYTES, RING, Fate, JournalReport
from zbus.registry.base import MAX_VALUE_BYTES
from zbus.registry.memory import MemoryRegistry
from zbus.registry.records import ExitRecord, Records
from zbus.runtime.journal import CrashJournal, journal_file, read_journal

ME = 0x0003_0000_0000_0007
SESSION = bytes(range(16))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give where the journal lies."""
    return journal_file(tmp_path, "actor", 0, 3)


def session(number: int) -> bytes:
    """Return a session id."""
    return number.to_bytes(16, "big")


def read(path: Path) -> JournalReport:
    """Read a journal that must be readable."""
    report = read_journal(path, ME, reaped=True)
    assert report is not None
    return report


def fate(report: JournalReport, seq: int, lane: str = "main", of: bytes = SESSION) -> Fate | None:
    """Return what a report tells of a call; None where it tells nothing of the lane."""
    entry = report.lane(of, lane)
    return None if entry is None else entry.fate(seq)


def test_what_was_stored_is_read_by_another(path: Path) -> None:
    """The reader sees each session and lane apart, without anything being closed or flushed."""
    writer = CrashJournal(path, ME)
    for lane, seq in (("main", 0), ("main", 1), ("gen", 5)):
        writer.ring(SESSION, lane).begin(seq)
    writer.ring(SESSION, "main").end(0)
    writer.ring(session(9), "main").begin(0)
    writer.ring(session(9), "main").raised(0)
    report = read(path)
    assert report.complete
    assert [fate(report, seq) for seq in range(3)] == [Fate.ENDED, Fate.BEGAN, Fate.NEVER_STARTED]
    assert [fate(report, seq, "gen") for seq in (4, 5, 6)] == [Fate.NEVER_STARTED, Fate.BEGAN, Fate.NEVER_STARTED]
    assert fate(report, 0, of=session(9)) is Fate.RAISED
    assert path.stat().st_mode & 0o777 == 0o600


def test_one_lane_has_one_ring(path: Path) -> None:
    """Asking again gives the same ring."""
    writer = CrashJournal(path, ME)
    assert writer.ring(SESSION, "main") is writer.ring(bytes(SESSION), "main")


def test_a_killed_process_leaves_all_it_stored(path: Path) -> None:
    """After SIGKILL in the middle of a storm of calls at most the last one is without its end."""
    code = f"""
import sys
from pathlib import Path
from zbus.runtime.journal import CrashJournal
ring = CrashJournal(Path({str(path)!r}), {ME}).ring({SESSION!r}, "main")
counter = open({str(path.parent.parent / "counter")!r}, "wb", buffering=0)
seq = 0
while True:
    ring.begin(seq)
    counter.write(b".")
    ring.end(seq)
    ring.answered(seq, (b"reply",))
    seq += 1
"""
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3])
    counter = path.parent.parent / "counter"
    try:
        wait_until(lambda: counter.exists() and counter.stat().st_size > RING + 100, what="calls")
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait(scaled(10))
    ran = counter.stat().st_size
    (entry,) = read(path).lanes
    assert entry.upto in (ran, ran + 1)  # the kill came before or after the side effect of the last call
    assert entry.since == entry.upto - RING
    fates = [entry.fate(seq) for seq in range(entry.since, entry.upto)]
    assert set(fates[:-1]) == {Fate.ENDED}
    assert fates[-1] in ((Fate.BEGAN, Fate.ENDED) if entry.upto == ran else (Fate.BEGAN,))


def test_a_full_disk_costs_the_journal_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a lane has no space its calls run unkept, and the report no longer proves anything by absence."""
    writer = CrashJournal(path, ME)
    writer.ring(SESSION, "main").begin(0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        ring = writer.ring(SESSION, "gen")
        ring.begin(0)
        ring.end(0)
        ring.answered(0, (b"reply",))
    assert writer.ring(SESSION, "gen") is ring
    assert writer.unkept == 1
    report = read(path)
    assert fate(report, 0) is Fate.BEGAN
    assert fate(report, 0, "gen") is None
    assert fate(report, 0, of=session(1)) is None


def test_no_journal_can_be_made_on_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor raises; the worker goes on without."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        CrashJournal(path, ME)


def test_space_of_sessions_that_are_over_is_used_again(path: Path) -> None:
    """A new session takes the block of one that is over, and from then on absence proves nothing."""
    over: set[bytes] = set()
    writer = CrashJournal(path, ME, is_over=over.__contains__)
    for number in range(BLOCKS):
        writer.ring(session(number), "main").begin(0)
        writer.ring(session(number), "main").end(0)
    writer.ring(session(5), "main").begin(1)  # runs still, on a thread that nobody waits for
    assert read(path).complete
    over.update({session(5), session(8)})
    fresh = writer.ring(session(100), "main")
    report = read(path)
    assert fate(report, 0, of=session(100)) is Fate.NEVER_STARTED
    assert fate(report, 0, of=session(8)) is None
    assert fate(report, 1, of=session(5)) is Fate.BEGAN
    assert fate(report, 0, of=session(0)) is Fate.ENDED
    fresh.begin(7)
    assert fate(read(path), 7, of=session(100)) is Fate.BEGAN
    assert writer.unkept == 0


def test_sessions_beyond_the_space_run_unkept_until_they_are_over(path: Path) -> None:
    """More living sessions than blocks cost nothing but their proof, and no memory for ever."""
    over: set[bytes] = set()
    writer = CrashJournal(path, ME, is_over=over.__contains__)
    for number in range(BLOCKS + 40):
        writer.ring(session(number), "main").begin(0)
    assert writer.unkept == 40
    assert not read(path).complete
    over.update(session(number) for number in range(BLOCKS, BLOCKS + 40))
    writer.ring(session(1000), "main")
    assert len(writer._rings) == BLOCKS + 1


def test_a_lane_whose_name_is_too_long_runs_unkept(path: Path) -> None:
    """Nothing is cut off silently: two long names must not meet."""
    writer = CrashJournal(path, ME)
    writer.ring(SESSION, "ü" * 300).begin(0)
    assert not read(path).complete


def test_closing_waits_for_nobody(path: Path) -> None:
    """A ring in use keeps the map; closing does not touch it, and the file stays."""
    writer = CrashJournal(path, ME)
    ring = writer.ring(SESSION, "main")
    writer.close()
    ring.begin(4)
    assert fate(read(path), 4) is Fate.BEGAN


def test_an_old_file_is_replaced(path: Path) -> None:
    """A start never goes on in the journal of another."""
    CrashJournal(path, 5).ring(SESSION, "main").begin(0)
    CrashJournal(path, ME)
    assert fate(read(path), 0) is Fate.NEVER_STARTED


def _garble(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(os.urandom(FILE_BYTES)),
        lambda path: os.truncate(path, FILE_BYTES - 1),
        lambda path: _garble(path, 8, b"\2"),
        lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["gone", "empty", "random", "cut", "version", "link", "fifo", "directory"],
)
def test_what_is_no_journal_is_as_good_as_none(path: Path, spoil) -> None:
    """Whatever lies there, the reader returns and claims nothing."""
    CrashJournal(path, ME)
    spoil(path)
    assert read_journal(path, ME, reaped=True) is None


def test_the_journal_of_another_incarnation_tells_nothing(path: Path) -> None:
    """A reader says whose journal it wants."""
    CrashJournal(path, ME)
    assert read_journal(path, ME + 1, reaped=True) is None


@pytest.mark.parametrize("at", [0, 24, 26, 512], ids=["commit word", "name length", "name", "first mark"])
def test_a_scribbled_block_is_left_out(path: Path, at: int) -> None:
    """One bad block costs its own lane and the proof by absence; the others are told."""
    writer = CrashJournal(path, ME)
    writer.ring(SESSION, "main").begin(0)
    writer.ring(SESSION, "gen").begin(1)
    _garble(path, HEADER_BYTES + at, b"\xff\xff")
    report = read(path)
    assert fate(report, 0) is None
    assert fate(report, 1, "gen") is Fate.BEGAN


def test_a_half_made_block_is_no_block(path: Path) -> None:
    """Without its commit word nothing of a block is read: no call of it began."""
    writer = CrashJournal(path, ME)
    writer.ring(SESSION, "main").begin(0)
    _garble(path, HEADER_BYTES, bytes(8))
    report = read(path)
    assert report.complete
    assert fate(report, 0) is Fate.NEVER_STARTED


def test_the_worst_journal_fits_into_an_exit_record(path: Path) -> None:
    """Every block full of single places is still one record; what was cut off is not told."""
    writer = CrashJournal(path, ME)
    far = 1 << 50
    for number in range(BLOCKS):
        ring = writer.ring(session(number), "lane-" * 12)
        for seq in range(far, far + RING, 2):
            ring.begin(seq)
            ring.raised(seq)
    report = read(path)
    assert len(report.lanes) == BLOCKS
    record = ExitRecord(role="actor", rank=0, incarnation=ME, journal=report, log_tail=["x" * 400] * 20)
    records = Records(MemoryRegistry())
    assert len(msgspec.json.encode(record)) < MAX_VALUE_BYTES
    assert records.publish_exit(record) == record
    entry = report.lanes[0]
    assert entry.fate(far) is Fate.UNTOLD
    assert entry.fate(far + RING - 2) is Fate.RAISED
    assert entry.fate(far + RING - 1) is Fate.NEVER_STARTED


def test_records_of_agents_that_keep_no_journal_are_read(path: Path) -> None:
    """A record without the field has no journal."""
    value = msgspec.json.encode({"role": "actor", "rank": 0, "incarnation": ME})
    assert msgspec.json.decode(value, type=ExitRecord).journal is None


def test_a_lane_takes_its_space_when_it_is_first_used(path: Path) -> None:
    """The file is sparse: what it takes of the disk follows the lanes in use."""
    writer = CrashJournal(path, ME)
    before = path.stat().st_blocks * 512
    writer.ring(SESSION, "main")
    assert before <= 2 * HEADER_BYTES
    assert BLOCK_BYTES <= path.stat().st_blocks * 512 - before <= 3 * BLOCK_BYTES


def test_a_journal_tells_nothing_while_its_process_lives(path: Path) -> None:
    """Who did not reap the process must find its lock free; a child of the process does not hold it."""
    code = f"""
import os, sys, time
from pathlib import Path
from zbus.runtime.journal import CrashJournal
writer = CrashJournal(Path({str(path)!r}), {ME})
writer.ring({SESSION!r}, "main").begin(0)
if os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""
    worker = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert worker.stdout is not None
        assert int(worker.stdout.readline()) == worker.pid
        assert fate(read(path), 0) is Fate.BEGAN
        assert read_journal(path, ME, reaped=False) is None
        worker.kill()
        worker.wait(scaled(10))
        report = read_journal(path, ME, reaped=False)
        assert report is not None
        assert fate(report, 0) is Fate.BEGAN
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(scaled(10))
        worker.stdout.close()


def test_without_a_lock_only_who_reaped_the_process_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks cannot show that a process is gone."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", refuse)
        CrashJournal(path, ME).ring(SESSION, "main").begin(0)
    assert read_journal(path, ME, reaped=False) is None
    assert fate(read(path), 0) is Fate.BEGAN
