"""The asker's side of one ``data`` connection: which range is asked for next, what an answer is, when to give up.

Theory of operation
-------------------
A *pull* wants ranges of buffers that stand under one key at one owner. It is cut into *pieces* of at most ``piece``
bytes, and each piece is asked for by an ASK of its own. At most ``window`` bytes are asked for and not there, over all
pulls of the connection; pulls take turns piece by piece, so that a small one does not wait for a large one.

Answers come in the order of the ASKs, because one connection carries both. So an answer shows that whatever was asked
before it and is not there was lost: it is asked for again at once. Silence is answered by asking for the oldest piece
once more, at gaps that double: on a slow link that costs one piece, not a window of them. After a reconnect everything
that is not there is asked for again.

A piece counts once: what comes again, late, or was never asked for is named to the shell as such, *before* its bytes
are read, so that they are never written anywhere.

A pull ends: with its last piece; refused by the owner; at its deadline; when no piece of any pull came for
``Patience.stall`` (which a new connection extends once, and not again until a piece came); when there was no connection
for ``Patience.absent``; cancelled. Pure: the shell hands in the time and executes the effects.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from zbus.protocol.parts import KEY_BYTES, MAX_RANGE, Kind, PartHeader, Status

__all__ = ["Ask", "Ended", "Ending", "Patience", "Place", "Puller", "Range", "check_pull"]

_NEVER: Final = 1 << 62
_S: Final = 1_000_000_000


class Range(NamedTuple):
    """A range that is wanted.

    Attributes:
        buffer: Which of the buffers under the key.
        offset, nbytes: What of it; at least one byte.
        total: Bytes of the whole buffer, as the asker was told; the owner refuses what disagrees.
    """

    buffer: int
    offset: int
    nbytes: int
    total: int


class Ending(enum.Enum):
    """How a pull ended."""

    DONE = "done"
    REFUSED = "refused"
    DEADLINE = "deadline"
    STALLED = "stalled"
    ABSENT = "absent"
    LIED = "lied"
    CANCELLED = "cancelled"


class Patience(NamedTuple):
    """Times in nanoseconds.

    Attributes:
        again: Silence after which the oldest piece is asked for once more; doubles up to ``again_most``.
        again_most: See ``again``.
        stall: Silence after which a pull is given up.
        absent: Time without a connection after which a pull is given up.
    """

    again: int = 5 * _S
    again_most: int = 20 * _S
    stall: int = 60 * _S
    absent: int = 10 * _S


class Ask(NamedTuple):
    """Effect: send this header."""

    header: PartHeader


class Ended(NamedTuple):
    """Effect: a pull is over; nothing of it is expected any more.

    Attributes:
        pull: Its number.
        how: See ``Ending``.
        evidence: What was seen, in words; empty for DONE.
    """

    pull: int
    how: Ending
    evidence: str


class Place(NamedTuple):
    """Where the bytes of a part belong.

    Attributes:
        pull: Number of the pull.
        range: Index of the range in it.
        offset, nbytes: Bytes of the range, from its start.
    """

    pull: int
    range: int
    offset: int
    nbytes: int


def check_pull(key: bytes, ranges: Sequence[Range]) -> None:
    """Check what is to be pulled.

    Raises:
        ValueError: The key is none, or a range is empty or reaches beyond its buffer.
    """
    if len(key) != KEY_BYTES or not ranges:
        msg = f"a key has {KEY_BYTES} bytes, and something of it is asked for"
        raise ValueError(msg)
    for one in ranges:
        if min(one.buffer, one.offset) < 0 or one.nbytes < 1 or one.offset + one.nbytes > one.total:
            msg = f"bytes {one.offset} to {one.offset + one.nbytes} of a buffer of {one.total}"
            raise ValueError(msg)


class _Piece:
    """Bytes that one ASK asks for."""

    __slots__ = ("done", "nbytes", "offset", "out", "pull", "range")

    def __init__(self, pull: _Pull, number: int, offset: int, nbytes: int) -> None:
        self.pull = pull
        self.range = number
        self.offset = offset  # from the start of the range
        self.nbytes = nbytes
        self.done = False
        self.out = False  # counted in the window


class _Pull:
    """One pull that is not over."""

    __slots__ = ("asked", "began_ns", "deadline_ns", "key", "left", "number", "ranges", "total", "within")

    def __init__(self, number: int, key: bytes, ranges: Sequence[Range], deadline_ns: int, now: int) -> None:
        self.number = number
        self.key = key
        self.ranges = tuple(ranges)
        self.total = self.left = sum(one.nbytes for one in ranges)
        self.deadline_ns = deadline_ns
        self.began_ns = now
        self.asked = 0  # index of the range whose pieces are being cut, and how much of it is cut
        self.within = 0

    @property
    def came(self) -> str:
        return f"{self.total - self.left:,} of {self.total:,} bytes came"


class Puller:
    """The machine of one connection. See the module docstring. One mutator at a time.

    Args:
        piece: Most bytes of a piece, at most ``MAX_RANGE``.
        window: Most bytes asked for and not there.
        patience: Times.

    Attributes:
        ignored: Parts that came again, late, or unasked.
        repeated: Pieces that were asked for again.
        due_ns: When ``on_timer`` is needed next; a far future when it is not.
    """

    def __init__(self, *, piece: int = 1 << 20, window: int = 4 << 20, patience: Patience | None = None) -> None:
        if not 0 < piece <= MAX_RANGE or window < piece:
            msg = f"pieces of {piece} bytes in a window of {window} bytes"
            raise ValueError(msg)
        self._piece = piece
        self._window = window
        self._patience = patience or Patience()
        self._pulls: dict[int, _Pull] = {}
        self._turns: deque[_Pull] = deque()  # those with pieces left to cut
        self._lost: deque[_Piece] = deque()  # to be asked for before anything else
        self._asks: dict[int, _Piece] = {}  # by serial, oldest first; a piece may stand several times
        self._out = 0
        self._numbers = 0
        self._serials = 0
        self._up = False
        self._down_since = -1  # since when there is no connection although one is wanted; -1: there is, or none is
        self._why = "not connected yet"
        self._heard_ns = 0  # when a piece came last, of any pull: they share the connection
        self._extended = False  # a new connection has stood for a piece since
        self._gap = self._patience.again
        self._again_ns = _NEVER
        self.ignored = 0
        self.repeated = 0
        self.due_ns = _NEVER

    @property
    def idle(self) -> bool:
        """Whether there is nothing to pull."""
        return not self._pulls

    @property
    def out_bytes(self) -> int:
        """Bytes asked for and not there."""
        return self._out

    # -- what the user asks --------------------------------------------------------------------------------------

    def pull(self, key: bytes, ranges: Sequence[Range], deadline_ns: int | None, now: int) -> tuple[int, list[Ask]]:
        """Begin a pull; return its number and effects.

        Raises:
            ValueError: The key is none, or a range is empty or reaches beyond its buffer.
        """
        check_pull(key, ranges)
        self._numbers += 1
        pull = _Pull(self._numbers, bytes(key), ranges, _NEVER if deadline_ns is None else deadline_ns, now)
        if not self._pulls and not self._up:
            self._down_since = now
        self._pulls[pull.number] = pull
        self._turns.append(pull)
        return pull.number, self._pump(now)

    def cancel(self, number: int, now: int) -> list[Ask]:
        """Want a pull no more; it ends without an effect of its own."""
        pull = self._pulls.get(number)
        if pull is None:
            return []
        self._drop(pull)
        return self._pump(now)

    def progress(self, number: int) -> str:
        """Say how much of a pull came; it is not over."""
        return self._pulls[number].came

    def owner_gone(self, evidence: str) -> list[Ended]:
        """End all pulls: their owner is known to be no more, or this process closes."""
        ended = [Ended(pull.number, Ending.ABSENT, f"{evidence}; {pull.came}") for pull in self._pulls.values()]
        for pull in list(self._pulls.values()):
            self._drop(pull)
        self.due_ns = _NEVER
        return ended

    # -- what the network says -----------------------------------------------------------------------------------

    def link_up(self, now: int) -> list[Ask]:
        """There is a connection; what was asked on another is lost."""
        self._up = True
        self._down_since = -1
        for piece in dict.fromkeys(self._asks.values()):
            self._lose(piece)
        self._asks.clear()
        if not self._extended:  # else a connection that comes and goes would never count as silent
            self._heard_ns, self._extended = now, True
        self._gap = self._patience.again
        self._again_ns = _NEVER
        return self._pump(now)

    def link_down(self, why: str, now: int) -> None:
        """There is no connection. Parts that came before may still be handed in."""
        self._why = why
        if self._up or self._down_since < 0:
            self._up = False
            self._down_since = now
        self._set_due()

    def place_of(self, answer: PartHeader) -> Place | None:
        """Return where a PART's bytes belong; None: nowhere, and they are not to be read."""
        piece = self._asks.get(answer.serial)
        if piece is None or piece.done or not self._agrees(piece, answer):
            return None
        return Place(piece.pull.number, piece.range, piece.offset, piece.nbytes)

    def came(self, answer: PartHeader, now: int, *, whole: bool = True) -> list[Ask | Ended]:
        """Take an answer; of a PART the bytes are in their place by now.

        Args:
            answer: Its header.
            now: Monotonic time, ns.
            whole: Whether its bytes are as many as it says; otherwise its sender lies, and the pull ends.
        """
        piece = self._asks.pop(answer.serial, None)
        if piece is None or piece.done:
            self.ignored += 1
            return []
        pull = piece.pull
        if answer.kind is Kind.ASK or not self._agrees(piece, answer) or not whole:
            return self._end(pull, Ending.LIED, "it answered with other bytes than were asked for", now)
        if answer.kind is Kind.REFUSED:
            return self._end(pull, Ending.REFUSED, _REFUSALS[answer.status], now)
        piece.done = True
        if piece.out:
            piece.out = False
            self._out -= piece.nbytes
        pull.left -= piece.nbytes
        self._heard_ns, self._extended = now, False
        self._gap = self._patience.again
        self._again_ns = now + self._gap
        self._lose_before(answer.serial)
        if not pull.left:
            self._drop(pull)
            return [Ended(pull.number, Ending.DONE, ""), *self._pump(now)]
        return list(self._pump(now))

    def on_timer(self, now: int) -> list[Ask | Ended]:
        """Look at deadlines and silences that are due."""
        effects: list[Ask | Ended] = []
        patience = self._patience
        for pull in list(self._pulls.values()):
            if pull.deadline_ns <= now:
                effects += self._end(pull, Ending.DEADLINE, "its time is over", now)
            elif not self._up and now - self._down_since >= patience.absent:
                effects += self._end(pull, Ending.ABSENT, self._why, now)
            elif self._up and now - max(self._heard_ns, pull.began_ns) >= patience.stall:
                effects += self._end(pull, Ending.STALLED, f"nothing came for {patience.stall // _S} s", now)
        if self._up and self._asks and now >= self._again_ns:
            self._gap = min(2 * self._gap, patience.again_most)
            self._again_ns = now + self._gap
            oldest = next((piece for piece in self._asks.values() if not piece.done), None)
            if oldest is not None:
                self.repeated += 1
                effects.append(self._ask(oldest))
        effects += self._pump(now)
        return effects

    def validate(self) -> None:
        """Raise AssertionError when an invariant is broken; for tests."""
        pieces = dict.fromkeys(self._asks.values())
        assert self._out == sum(piece.nbytes for piece in pieces if piece.out)
        assert self._out <= self._window
        for pull in self._pulls.values():
            uncut = sum(one.nbytes for one in pull.ranges[pull.asked :]) - pull.within
            waiting = {piece for piece in (*pieces, *self._lost) if piece.pull is pull and not piece.done}
            assert pull.left == uncut + sum(piece.nbytes for piece in waiting), "every byte is there or accounted for"
            assert bool(uncut) == (pull in self._turns)
        if not self._pulls:
            assert not self._out
            assert not self._lost

    # -- inside --------------------------------------------------------------------------------------------------

    @staticmethod
    def _agrees(piece: _Piece, answer: PartHeader) -> bool:
        one = piece.pull.ranges[piece.range]
        return (answer.key, answer.buffer, answer.offset, answer.nbytes, answer.total) == (
            piece.pull.key, one.buffer, one.offset + piece.offset, piece.nbytes, one.total,
        )  # fmt: skip

    def _ask(self, piece: _Piece) -> Ask:
        self._serials += 1
        self._asks[self._serials] = piece
        if not piece.out:
            piece.out = True
            self._out += piece.nbytes
        one = piece.pull.ranges[piece.range]
        return Ask(
            PartHeader(
                Kind.ASK, one.buffer, self._serials, one.offset + piece.offset, piece.nbytes, one.total, piece.pull.key
            )
        )

    def _pump(self, now: int) -> list[Ask]:
        """Ask for as much as the window allows."""
        asks: list[Ask] = []
        while self._up and (self._lost or self._turns):
            piece = self._lost[0] if self._lost else self._next(self._turns[0])
            if self._out + piece.nbytes > self._window:
                break
            if self._lost:
                self._lost.popleft()
                self.repeated += 1
            else:
                self._cut(piece)
            asks.append(self._ask(piece))
        if asks and self._again_ns == _NEVER:
            self._again_ns = now + self._gap
        self._set_due()
        return asks

    def _next(self, pull: _Pull) -> _Piece:
        """Return the piece that is cut next of a pull."""
        nbytes = min(self._piece, pull.ranges[pull.asked].nbytes - pull.within)
        return _Piece(pull, pull.asked, pull.within, nbytes)

    def _cut(self, piece: _Piece) -> None:
        pull = piece.pull
        pull.within += piece.nbytes
        if pull.within == pull.ranges[pull.asked].nbytes:
            pull.asked, pull.within = pull.asked + 1, 0
        self._turns.popleft()
        if pull.asked < len(pull.ranges):
            self._turns.append(pull)

    def _lose(self, piece: _Piece) -> None:
        if piece.out:
            piece.out = False
            self._out -= piece.nbytes
        if not piece.done:
            self._lost.append(piece)

    def _lose_before(self, serial: int) -> None:
        """Whatever was asked before this and is not there will not come."""
        early: list[int] = []
        for number in self._asks:  # in order of serials
            if number > serial:
                break
            early.append(number)
        for number in early:
            piece = self._asks.pop(number)
            if not piece.done and piece not in self._asks.values():  # else it was asked for again meanwhile
                self._lose(piece)

    def _drop(self, pull: _Pull) -> None:
        """Forget a pull and all its pieces."""
        del self._pulls[pull.number]
        if pull in self._turns:
            self._turns.remove(pull)
        self._lost = deque(piece for piece in self._lost if piece.pull is not pull)
        for piece in self._asks.values():
            if piece.pull is pull:
                piece.done = True  # what comes of it is ignored
                if piece.out:
                    piece.out = False
                    self._out -= piece.nbytes
        if not self._pulls:
            self._asks.clear()
            self._again_ns = _NEVER
            self._gap = self._patience.again

    def _end(self, pull: _Pull, how: Ending, evidence: str, now: int) -> list[Ask | Ended]:
        self._drop(pull)
        return [Ended(pull.number, how, f"{evidence}; {pull.came}"), *self._pump(now)]

    def _set_due(self) -> None:
        due = _NEVER
        for pull in self._pulls.values():
            due = min(due, pull.deadline_ns)
            if self._up:
                due = min(due, max(self._heard_ns, pull.began_ns) + self._patience.stall)
        if self._pulls and not self._up:
            due = min(due, self._down_since + self._patience.absent)
        if self._up and self._asks:
            due = min(due, self._again_ns)
        self.due_ns = due


_REFUSALS: Final = {
    Status.NONE: "it gave no reason",
    Status.UNKNOWN_KEY: "it offers nothing of that name (any more)",
    Status.UNKNOWN_BUFFER: "it offers fewer buffers under that name",
    Status.OUT_OF_RANGE: "the range is outside of its buffer",
    Status.OTHER_SIZE: "its buffer has another size",
    Status.TOO_MUCH: "too much was asked for at once",
}
