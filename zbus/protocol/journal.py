"""The crash journal: what a worker's memory says of each of its calls after the worker has died.

Theory of operation
-------------------
Every (session, lane) has a ring of ``RING`` marks, one 64-bit word for each place in the lane, at ``seq % RING``::

    mark = seq << 8 | state          state: 0 never, BEGAN, ENDED, RAISED; + ANSWERED once its reply was encoded

The executor stores ``BEGAN`` right before it calls the endpoint and ``ENDED`` or ``RAISED`` right after it returned or
raised. The words lie in a file that is mapped into memory (``runtime.journal``), so they outlive the process whatever
ends it. A mark names its own seq, so nothing has to be cleared when a ring comes round, and each store is one aligned
word: there is no state between two stores that could be read wrongly. The worst that a kill between a store and what
it speaks of can do is "began, no end" for a call that had not quite begun, or had just ended.

From the highest seq that a ring holds, ``H``, a reader knows the fate of every seq above ``H - RING``:

- its word is its own: BEGAN (began, no end), ENDED or RAISED (executed);
- its word is older or empty, or seq > H: it never started.

A caller keeps at most ``CallerLane.window_calls`` places open, half a ring, so every call whose outcome is still open
is told exactly, except for those that a request of more than ``RING - window_calls`` calls has left behind.

Seqs are not started in order without holes: places are skipped, and threads of one lane overtake each other between
taking a request and starting it. One word for each place is exact in all such cases; two watermarks are not
(``docs/decisions/0006-crash-journal.md``).

Pure: the shell brings the memory. A ring has one writer for each place at a time, and needs no lock.
"""

from __future__ import annotations

import bisect
import enum
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias
from zlib import crc32

import msgspec

from zbus.protocol.messages import Buffers

__all__ = [
    "BEGAN",
    "BLOCKS",
    "BLOCK_BYTES",
    "ENDED",
    "FILE_BYTES",
    "HEADER_BYTES",
    "LANE_BYTES",
    "MASK",
    "RING",
    "Fate",
    "JournalError",
    "JournalReport",
    "LaneHistory",
    "LaneRing",
    "block_header",
    "file_header",
    "fingerprint",
    "history",
    "is_locked",
    "read",
]

RING: Final = 2048
"""Places of one lane that are told exactly; a power of two, and twice the window of a caller."""

BLOCKS: Final = 64
"""(session, lane) pairs that one worker keeps at a time."""

MASK: Final = RING - 1
"""The place of a seq in its ring is ``seq & MASK``."""

BEGAN: Final = 1
"""State of a mark: the call began."""

ENDED: Final = 2
"""State of a mark: it returned."""

_RAISED: Final = 3
_STATE: Final = 3
_ANSWERED: Final = 4
_SEQ_LIMIT: Final = 1 << 56

MAGIC: Final = int.from_bytes(b"ZBUSJRNL", "little")
VERSION: Final = 1
WORD: Final = 8
HEADER_BYTES: Final = 4096
COMPLETE_WORD: Final = 5
"""Index of the header's word that is 1 while every call of this worker has a ring of its own."""
LOCKED_WORD: Final = 6
"""Index of the header's word that is 1 where the writer holds a lock on the file for as long as it lives."""
_FILE: Final = struct.Struct("=QQQQQQ")  # magic, version, ring, blocks, incarnation, complete

LANE_BYTES: Final = 480
"""Longest lane name in UTF-8."""
_BLOCK: Final = struct.Struct(f"=Q16sH{LANE_BYTES}s")  # committed, session, length of the name, name
_BLOCK_HEADER_BYTES: Final = 512
MARKS_AT: Final = _BLOCK_HEADER_BYTES
PRINTS_AT: Final = MARKS_AT + RING * WORD
BLOCK_BYTES: Final = PRINTS_AT + RING * WORD
FILE_BYTES: Final = HEADER_BYTES + BLOCKS * BLOCK_BYTES

_HEAD_BYTES: Final = 1024
_MAX_RANGES: Final = 1024
"""Numbers and ranges that one report holds; beyond them the oldest places of the longest lanes are left out."""


Words: TypeAlias = "list[int] | memoryview[int]"


class JournalError(ValueError):
    """A file is not the journal that was asked for."""


class Fate(enum.Enum):
    """What became of one call of a worker that is gone."""

    NEVER_STARTED = "never started"
    BEGAN = "began, no end"
    ENDED = "executed"
    RAISED = "executed (it raised)"
    UNTOLD = "not told"


def fingerprint(frames: Buffers) -> int:
    """Return 64 bits that tell one encoded reply from another: its size and the CRC-32 of the head of its body."""
    size = sum(frame.nbytes if type(frame) is memoryview else len(frame) for frame in frames)
    return min(size, 0xFFFF_FFFF) << 32 | crc32(frames[0][:_HEAD_BYTES])


class LaneRing:
    """The marks of one lane of one session. Any thread; one at a time for each seq.

    Args:
        marks, prints: ``RING`` words each: of a mapped file, or a list.
    """

    __slots__ = ("_marks", "_prints")

    def __init__(self, marks: Words, prints: Words) -> None:
        self._marks = marks
        self._prints = prints

    @classmethod
    def unkept(cls) -> LaneRing:
        """Return a ring that nobody will read."""
        return cls([0] * RING, [0] * RING)

    def begin(self, seq: int) -> None:
        """Mark that the call at ``seq`` starts. Right before it does."""
        self._marks[seq & MASK] = seq << 8 | BEGAN

    def end(self, seq: int) -> None:
        """Mark that it returned. Right after."""
        self._marks[seq & MASK] = seq << 8 | ENDED

    def raised(self, seq: int) -> None:
        """Mark that it ended by an exception. Right after."""
        self._marks[seq & MASK] = seq << 8 | _RAISED

    def answered(self, seq: int, frames: Buffers) -> None:
        """Keep the fingerprint of its encoded reply. After ``end``, before the reply leaves."""
        body = frames[0]
        size = len(body)
        index = seq & MASK
        short = size <= _HEAD_BYTES and len(frames) == 1
        self._prints[index] = size << 32 | crc32(body) if short else fingerprint(frames)
        self._marks[index] = seq << 8 | ENDED | _ANSWERED

    def answered_together(self, seq: int, bodies: Sequence[bytes]) -> None:
        """As ``answered`` for the calls from ``seq`` on, each of one short frame."""
        at, done = seq & MASK, 0
        while done < len(bodies):
            taken = bodies[done : done + RING - at]  # up to where the ring comes round
            count = len(taken)
            first = (seq + done) << 8 | ENDED | _ANSWERED
            self._prints[at : at + count] = array("Q", [len(body) << 32 | crc32(body) for body in taken])
            self._marks[at : at + count] = array("Q", range(first, first + (count << 8), 1 << 8))
            done += count
            at = 0

    def has_begun(self, seq: int) -> bool:
        """Whether the call at ``seq`` began and has not ended."""
        return self._marks[seq & MASK] == seq << 8 | BEGAN

    @property
    def marks(self) -> Words:
        """The words, for the loop of a batch: it has no time for a call per mark, and stores what ``begin`` would."""
        return self._marks

    @property
    def running(self) -> bool:
        """Whether a call of this ring began and did not end."""
        return any(mark & _STATE == BEGAN for mark in self._marks)


# -- what is told ------------------------------------------------------------------------------------------------------


class LaneHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the calls of one lane of one session, in few numbers.

    Attributes:
        session: Session id, hex.
        lane: Name of the lane.
        since: Seqs below are not told.
        upto: No call from here on ever started.
        began: Calls that began and did not end, counted from ``since``.
        ended: First and last of each run of calls that ended, counted from ``since``.
        raised: Those of them that ended by an exception, counted from ``since``.
    """

    session: str
    lane: str
    since: int = 0
    upto: int = 0
    began: list[int] = msgspec.field(default_factory=list)
    ended: list[tuple[int, int]] = msgspec.field(default_factory=list)
    raised: list[int] = msgspec.field(default_factory=list)

    def fate(self, seq: int) -> Fate:
        """Return what became of the call at ``seq``."""
        if seq >= self.upto:
            return Fate.NEVER_STARTED
        place = seq - self.since
        if place < 0:
            return Fate.UNTOLD
        if place in self.began:
            return Fate.BEGAN
        if place in self.raised:
            return Fate.RAISED
        at = bisect.bisect(self.ended, (place, RING)) - 1
        return Fate.ENDED if at >= 0 and place <= self.ended[at][1] else Fate.NEVER_STARTED

    @property
    def weight(self) -> int:
        """How many numbers and ranges it holds."""
        return len(self.began) + len(self.ended) + len(self.raised)


class JournalReport(msgspec.Struct, frozen=True, kw_only=True):
    """The journal of one start of one worker, as its agent read it after the end.

    Attributes:
        complete: A lane of a session that is not among ``lanes`` never started a call.
        lanes: One entry for each lane of each session.
    """

    complete: bool = False
    lanes: list[LaneHistory] = msgspec.field(default_factory=list)

    def lane(self, session: bytes, lane: str) -> LaneHistory | None:
        """Return what is told of a lane; None where nothing is."""
        wanted = session.hex()
        for entry in self.lanes:
            if entry.session == wanted and entry.lane == lane:
                return entry
        return LaneHistory(session=wanted, lane=lane) if self.complete else None


def history(session: bytes, lane: str, marks: Iterable[int]) -> LaneHistory:
    """Tell the history of one lane from its marks.

    Raises:
        JournalError: The marks are not those of a ring.
    """
    known: dict[int, int] = {}
    for index, mark in enumerate(marks):
        if mark:
            seq, state = mark >> 8, mark & _STATE
            if seq & MASK != index or not state or mark & 0xFF > _ANSWERED | _STATE:
                msg = f"lane {lane!r}: mark {mark:#x} at place {index}"
                raise JournalError(msg)
            known[seq] = state
    upto = max(known, default=-1) + 1
    since = max(0, upto - RING)
    began: list[int] = []
    ended: list[tuple[int, int]] = []
    raised: list[int] = []
    for seq in sorted(known):
        place = seq - since
        if place < 0:
            continue
        state = known[seq]
        if state == BEGAN:
            began.append(place)
            continue
        if state == _RAISED:
            raised.append(place)
        if ended and ended[-1][1] == place - 1:
            ended[-1] = (ended[-1][0], place)
        else:
            ended.append((place, place))
    return LaneHistory(
        session=session.hex(), lane=lane, since=since, upto=upto, began=began, ended=ended, raised=raised
    )


def shortened(entry: LaneHistory, weight: int) -> LaneHistory:
    """Return ``entry`` without its oldest places, so that it holds at most ``weight`` numbers and ranges."""
    if entry.weight <= weight:
        return entry
    starts = sorted([*entry.began, *entry.raised, *(first for first, _ in entry.ended)])
    cut = starts[1 - weight] if weight > 1 else entry.upto - entry.since  # a run that it cuts in two counts as well
    return LaneHistory(
        session=entry.session,
        lane=entry.lane,
        since=entry.since + cut,
        upto=entry.upto,
        began=[place - cut for place in entry.began if place >= cut],
        ended=[(max(first - cut, 0), last - cut) for first, last in entry.ended if last >= cut],
        raised=[place - cut for place in entry.raised if place >= cut],
    )


# -- the file ----------------------------------------------------------------------------------------------------------


def file_header(incarnation: int) -> bytes:
    """Return the head of a new journal file."""
    return _FILE.pack(MAGIC, VERSION, RING, BLOCKS, incarnation, 1)


def is_locked(data: bytes) -> bool:
    """Tell whether the writer of a journal held a lock on it."""
    return int.from_bytes(data[LOCKED_WORD * WORD : (LOCKED_WORD + 1) * WORD], sys.byteorder) == 1


def block_header(session: bytes, lane: bytes) -> bytes:
    """Return the head of a block without its first word, which commits it once the rest is there."""
    return _BLOCK.pack(0, session, len(lane), lane)[WORD:]


def read(data: bytes, incarnation: int) -> JournalReport:
    """Read a journal file.

    A block that makes no sense is left out, and the report says that it is not complete.

    Args:
        data: The bytes of the file.
        incarnation: Whose journal it must be.

    Raises:
        JournalError: It is not a journal of this version, this machine and this incarnation.
    """
    view = memoryview(data)
    if len(view) < FILE_BYTES:
        msg = f"{len(view)} bytes are no journal"
        raise JournalError(msg)
    magic, version, ring, blocks, owner, complete = _FILE.unpack_from(view)
    if (magic, version, ring, blocks) != (MAGIC, VERSION, RING, BLOCKS):
        msg = f"not a journal of version {VERSION}"
        raise JournalError(msg)
    if owner != incarnation:
        msg = f"the journal of incarnation {owner:016x}, not {incarnation:016x}"
        raise JournalError(msg)
    lanes = []
    for number in range(blocks):
        at = HEADER_BYTES + number * BLOCK_BYTES
        committed, session, length, name = _BLOCK.unpack_from(view, at)
        if not committed:
            continue
        try:
            if committed != MAGIC or length > LANE_BYTES:
                msg = f"block {number} has no valid head"
                raise JournalError(msg)
            lane = name[:length].decode()
            lanes.append(history(session, lane, view[at + MARKS_AT : at + PRINTS_AT].cast("Q")))
        except ValueError:  # also text that is not UTF-8
            complete = 0
    return _bounded(JournalReport(complete=complete == 1, lanes=lanes))


def _bounded(report: JournalReport) -> JournalReport:
    """Keep a report small enough for a record: the heaviest lanes lose their oldest places."""
    weights = sorted(entry.weight for entry in report.lanes)
    if sum(weights) <= _MAX_RANGES:
        return report
    left, share = _MAX_RANGES, 0
    for index, weight in enumerate(weights):
        share = left // (len(weights) - index)
        if weight > share:
            break
        left -= weight
    return JournalReport(complete=report.complete, lanes=[shortened(entry, share) for entry in report.lanes])
