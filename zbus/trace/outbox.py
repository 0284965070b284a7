"""What a process does to bring its blocks to safety, as a machine without sockets, files, threads or a clock.

A block is safe when the sidecar acknowledged it or when it stands in the spill. Until then it is held in memory,
within a bound; beyond that the newest are dropped and counted. At each moment
recorded = written + pending + lost by reason. ``zbus.trace.export`` is the edge: it owns socket, lock and waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Final, NamedTuple, Protocol

from zbus.trace import wire

__all__ = ["BACKLOG", "Entry", "Outbox", "SpillPort", "Wait"]

BACKLOG: Final = 8 << 20
"""Default of ``Outbox.backlog``."""
_IN_FLIGHT: Final = 1 << 20
_SILENT_PERIODS: Final = 4
"""Flush periods without any word after which the sidecar counts as silent, while only spilled blocks are under way."""
_STALE_PERIODS: Final = 20
"""Flush periods after which a block counts as lost on its way, although others are acknowledged."""
_END_S: Final = 2.0


class Wait(NamedTuple):
    """Take answers until a condition holds, at most for so many seconds."""

    seconds: float
    until: Callable[[], bool]


class SpillPort(Protocol):
    """Where blocks go that the sidecar does not take."""

    @property
    def waiting(self) -> Collection[int]:
        """Numbers of the blocks that the sidecar shall still have, oldest first."""
        ...

    def put(self, seq: int, records: int, payload: bytes) -> bool:
        """Append one block; False if the disk does not take it."""
        ...

    def end(self, message: wire.End) -> bool:
        """Append the end of the stream; False if the disk does not take it."""
        ...

    def read(self, seq: int) -> tuple[bytes, int]:
        """Return (lines, records) of a block.

        Raises:
            OSError: The spill cannot be read.
        """
        ...

    def done(self, seq: int) -> None:
        """Forget a block that the sidecar has; with the last one the spill goes."""
        ...


class Entry:
    """One block that is held in memory."""

    __slots__ = ("payload", "records", "seq", "told")

    def __init__(self, seq: int, records: int, payload: bytes) -> None:
        self.seq = seq
        self.records = records
        self.payload = payload
        self.told = False  # sent at least once


class Outbox:
    """The blocks of one stream on their way. Calls one at a time.

    Args:
        opening: Introduces the stream.
        spill: Takes what the sidecar does not.
        say: Hands one message to the socket; False if it takes none now. Never waits.
        now: Monotonic seconds.
        period_s: Asked for the flush period.
        backlog: Bytes under way, and bytes held in memory, at most.

    Attributes:
        alive: Whether the sidecar answers.
        ended: Whether it has the end of the stream.
        held: Blocks in memory, by number.
        sent: Blocks that are under way, by number: their bytes, and when they were sent.
    """

    def __init__(
        self,
        opening: wire.Open,
        spill: SpillPort,
        say: Callable[[wire.ToSidecar, bytes | None], bool],
        now: Callable[[], float],
        period_s: Callable[[], float],
        backlog: int = BACKLOG,
    ) -> None:
        self.alive = False
        self.ended = False
        self.held: dict[int, Entry] = {}
        self.sent: dict[int, tuple[int, float]] = {}
        self.backlog = backlog
        self.opening = opening
        self._spill = spill
        self._say = say
        self._now = now
        self._period_s = period_s
        self._held_bytes = 0
        self._next = 0
        self._written = 0
        self._lost: dict[str, int] = {}
        self._unsaid: dict[str, int] = {}
        self._heard = 0.0

    # -- from the process --------------------------------------------------------------------------------------------

    def introduce(self) -> bool:
        """Say who we are; its answer makes the sidecar count as alive."""
        return self._say(self.opening, None)

    def offer(self, payload: bytes, records: int) -> None:
        """Take one block: send it, or spill it where the sidecar is silent."""
        seq = self._next
        self._next += 1
        entry = self.held[seq] = Entry(seq, records, payload)
        self._held_bytes += len(payload)
        if not self.alive or self._under_way() > self.backlog or not self.send(entry):
            self.secure()

    def send(self, entry: Entry) -> bool:
        """Send a block that is held; False if the socket takes none, and then the sidecar counts as silent."""
        sent = self._say(wire.Data(self.opening.source, entry.seq, entry.records), entry.payload)
        if sent:
            self.sent[entry.seq] = len(entry.payload), self._now()
            entry.told = True
        else:
            self.alive = False
        return sent

    def secure(self) -> None:
        """Bring what is held to the spill; beyond the bound drop the newest."""
        for entry in list(self.held.values()):
            if not self._spill.put(entry.seq, entry.records, entry.payload):
                break
            self._forget(entry)
            self._written += entry.records
        while self._held_bytes > self.backlog:
            self._drop(self.held[next(reversed(self.held))])

    def settle(self) -> Iterator[Wait]:
        """Do what is due once a flush period; between the steps answers of the sidecar are to be taken.

        What has no acknowledgement after a quarter of the period is spilled, and the sidecar counts as silent.
        """
        yield Wait(self._period_s() / 4, self._all_safe)
        if self.held:
            self.alive = False
            self.secure()
        elif self._silent():  # it was restarted elsewhere, say, while only the spill had something for it
            self.alive = False
        if self.alive:
            self._resend()

    def finish(self, end: Callable[[], bytes]) -> Iterator[Wait]:
        """Bring all to the sidecar or the spill and say the end, within two seconds; steps as in ``settle``.

        Args:
            end: Makes the closing line, with the last counts.
        """
        deadline = self._now() + _END_S
        period = min(self._period_s(), _END_S) / 4
        if self.alive:
            yield Wait(period, self._all_safe)
        while self.alive and (self.held or self._spill.waiting) and self._now() < deadline:
            self._resend()
            yield Wait(period, lambda: not self.held and not self.sent)
            if self.held:
                self.alive = False
        self.secure()
        message = wire.End(self.opening.source, self._next, end())
        if self.alive and not self._spill.waiting and not self.held:
            while not self.ended and self._now() < deadline:
                if self.alive:  # again too: a restarted sidecar wants to be told first who ends
                    self._say(message, None)
                yield Wait(period, lambda: self.ended)
        if not self.ended:
            self._spill.end(message)

    @property
    def losing(self) -> bool:
        """Whether something was lost that ``unsaid`` did not tell yet."""
        return bool(self._unsaid)

    def unsaid(self) -> dict[str, int]:
        """Return what was lost by reason and is in no line yet, once blocks find a place again; to be said now."""
        if self.held or not self._unsaid:
            return {}
        unsaid, self._unsaid = self._unsaid, {}
        return unsaid

    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Return records written, pending, and lost by reason."""
        return self._written, sum(entry.records for entry in self.held.values()), dict(self._lost)

    # -- from the sidecar --------------------------------------------------------------------------------------------

    def reconnected(self) -> None:
        """Note that the connection is a new one, to somebody who does not know us yet."""
        self.alive = False
        self.sent.clear()

    def on_message(self, message: wire.FromSidecar) -> None:
        """Take an answer of the sidecar; those to other streams are not for us."""
        if getattr(message, "source", None) != self.opening.source:
            return
        self._heard = self._now()
        if isinstance(message, wire.Unknown):
            self.alive = False
            self.introduce()
        elif isinstance(message, wire.Opened):
            self._on_opened()
        elif isinstance(message, wire.Ack):
            self._on_ack(message)
        elif isinstance(message, wire.Ended):
            self.ended = True

    def _on_opened(self) -> None:
        if self.alive:
            return
        self.sent.clear()  # what was under way may have been lost with the connection; a double is harmless
        self.alive = True
        for entry in list(self.held.values()):
            self.send(entry)

    def _on_ack(self, ack: wire.Ack) -> None:
        if not ack.ok:
            self.alive = False
            return
        self.alive = True
        self.sent.pop(ack.seq, None)
        entry = self.held.get(ack.seq)
        if entry is not None:
            self._forget(entry)
            self._written += entry.records
        if ack.seq in self._spill.waiting:
            self._spill.done(ack.seq)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _all_safe(self) -> bool:
        return not self.held

    def _silent(self) -> bool:
        if not self.sent:
            return False
        since = max(self._heard, next(iter(self.sent.values()))[1])
        return self._now() - since > _SILENT_PERIODS * self._period_s()

    def _under_way(self) -> int:
        return sum(size for size, _ in self.sent.values())

    def _drop(self, entry: Entry) -> None:
        """Lose a block, the newest, and count it; its number is free again unless the sidecar may know it."""
        self._forget(entry)
        if not entry.told and entry.seq == self._next - 1:
            self._next -= 1
        if entry.records:
            for counter in (self._lost, self._unsaid):
                counter["spill_failed"] = counter.get("spill_failed", 0) + entry.records

    def _forget(self, entry: Entry) -> None:
        del self.held[entry.seq]
        self._held_bytes -= len(entry.payload)

    def _resend(self) -> None:
        """Send what was spilled, oldest first, a bounded part at a time; again what found no answer for long."""
        late = self._now() - _STALE_PERIODS * self._period_s()
        for seq in [seq for seq, (_, at) in self.sent.items() if at < late]:
            del self.sent[seq]
        room = min(_IN_FLIGHT, self.backlog) - self._under_way()
        for seq in list(self._spill.waiting):
            if room <= 0:
                return
            if seq in self.sent:
                continue
            try:
                lines, records = self._spill.read(seq)
            except OSError:
                return
            if not self._say(wire.Data(self.opening.source, seq, records, wire.LINES), lines):
                return
            self.sent[seq] = len(lines), self._now()
            room -= len(lines)
