"""Traces in the simulation: each worker hands blocks to a sidecar, while messages, disks and processes fail.

The machines are the real ones, ``zbus.trace.outbox`` and ``zbus.trace.intake``; spill, spool and files are those of
``trace_disk``. I12: at each moment recorded = written + pending + lost by reason, what counts as written can be read
from the files, no (source, seq) stands in a file twice or means two blocks, and of a killed process nothing is missing
but what it held, which is no older than a flush period unless its disk was full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Any, Final

from zbus.testing.simulation.knobs import MS
from zbus.testing.simulation.ledger import broken
from zbus.testing.simulation.trace_disk import Block, Died, SimFiles, SimSpill, SimSpool, StoredFile, Torn
from zbus.testing.simulation.worker import SimWorker
from zbus.trace import wire
from zbus.trace.intake import Intake
from zbus.trace.outbox import Outbox, Wait

if TYPE_CHECKING:
    from zbus.testing.simulation.world import World

__all__ = ["Tracing"]

_SALT: Final = 0x7ACE
_HIGH_WATER: Final = 12
"""Messages on their way to the sidecar beyond which a socket takes no more."""
_BURST: Final = 4


class _Emitted:
    """One block that a process handed to its outbox."""

    __slots__ = ("at", "records", "token")

    def __init__(self, token: bytes, records: int, at: int) -> None:
        self.token = token
        self.records = records
        self.at = at


class _Process:
    """The tracing side of one worker."""

    def __init__(self, tracing: Tracing, worker: SimWorker, number: int) -> None:
        self.tracing = tracing
        self.worker = worker
        self.source = f"s{number}"
        self.spill = SimSpill(self.strike)
        self.emitted: list[_Emitted] = []
        self.records = 0
        self.under_way = 0
        self.address = 0
        self.up_at = self.down_at = 0  # when the last message each way arrives: a connection keeps the order
        self.seen = 0
        self.crash_in = -1
        self.refused = False
        self.finishing = self.over = self.ended_at_rest = False
        self.alive = True
        world = tracing.world
        self.outbox = Outbox(
            wire.Open(self.source, {}, (0, 0)),
            self.spill,
            self._say,
            lambda: world.now / 1e9,
            lambda: tracing.period / 1e9,
            backlog=tracing.world.knobs.trace_backlog,
        )
        self._steps: Iterator[Wait] = iter(())
        self._wait: Wait | None = None
        self._turn = 0

    def __repr__(self) -> str:
        return f"the trace of {self.worker}"

    # -- effects -----------------------------------------------------------------------------------------------------

    def strike(self, what: str) -> int:
        """See ``Strikes``."""
        self._maybe_die(torn=True)
        if what == "spill" and self.tracing.is_full(what):
            self.refused = True
            return 0
        return 1

    def _maybe_die(self, *, torn: bool) -> None:
        if self.crash_in < 0:
            return
        self.crash_in -= 1
        if self.crash_in < 0:
            self.tracing.cover("a traced process dies at an effect")
            kind = self.tracing.random()
            if torn and kind < 0.4:
                raise Torn
            raise Died(after=kind < 0.7)

    def _say(self, message: wire.ToSidecar, payload: bytes | None) -> bool:
        try:
            self._maybe_die(torn=False)
        except Died as death:
            if death.after:
                self.tracing.send_up(self, message, payload)
            raise
        return self.tracing.send_up(self, message, payload)

    # -- events ------------------------------------------------------------------------------------------------------

    def guard(self, method: Any, *args: Any) -> None:
        """Call a method unless the process is dead or stopped; it may die in it."""
        worker, world = self.worker, self.tracing.world
        if not worker.alive:
            self.alive = False
        if not self.alive:
            return
        if worker.paused_until > world.now:
            world.at(worker.paused_until, self.guard, method, *args)
            return
        self.seen = world.now
        try:
            method(*args)
        except (Died, Torn):
            self.alive = False
            world.crash(worker)
            return
        written, pending, lost = self.outbox.counts()
        if written + pending + sum(lost.values()) != self.records:
            broken("I12", f"{self!r}: {self.records} recorded, {written} written, {pending} pending, lost {lost}")

    def flush(self) -> None:
        """Hand over what was recorded, as the writer's thread does."""
        tracing = self.tracing
        if self.finishing:
            return
        for _ in range(int(tracing.random() * tracing.world.knobs.trace_blocks) if not tracing.resting else 0):
            self.emit(1 + int(tracing.random() * 9))
        if not tracing.resting and tracing.random() < tracing.world.knobs.trace_ends:
            self.finish()
        else:
            self._drive(self.outbox.settle())

    def emit(self, records: int) -> None:
        """Hand over one block."""
        token = b"%s.%d" % (self.source.encode(), len(self.emitted))
        self.emitted.append(_Emitted(token, records, self.tracing.world.now))
        self.records += records
        self.outbox.offer(token, records)

    def finish(self) -> None:
        """End in order."""
        if self.finishing:
            return
        self.finishing, self.ended_at_rest = True, self.tracing.resting
        self.refused = False
        self.tracing.world.tell(f"{self!r} ends")
        self._drive(self.outbox.finish(self._end))

    def _end(self) -> bytes:
        written, pending, lost = self.outbox.counts()
        return b"%d %d %d %d\n" % (self.records, written, pending, sum(lost.values()))

    def _drive(self, steps: Iterator[Wait]) -> None:
        self._steps = steps
        self._advance()

    def _advance(self) -> None:
        self._turn += 1
        while (wait := next(self._steps, None)) is not None:
            if not wait.until():
                self._wait = wait
                world = self.tracing.world
                world.after(int(wait.seconds * 1e9), self.guard, self._late, self._turn)
                return
        self._wait = None
        if self.finishing:
            self.over = True
        else:
            self._settled()

    def _late(self, turn: int) -> None:
        if turn == self._turn and self._wait is not None:
            self._wait = None
            self._advance()

    def _settled(self) -> None:
        """Do what follows upon settling, and check that nothing unsafe is left."""
        outbox, tracing = self.outbox, self.tracing
        if outbox.held and not self.refused:
            broken("I12", f"{self!r} holds {list(outbox.held)} after a flush period, and its spill takes blocks")
        self.refused = False
        if lost := sum(outbox.unsaid().values()):
            tracing.cover("a loss is said")
            outbox.offer(b"lost %d" % lost, 0)
        if not outbox.alive:
            if tracing.address != self.address:
                self.address = tracing.address
                outbox.reconnected()
            outbox.introduce()
        tracing.world.after(tracing.period * 3 // 4, self.guard, self.flush)

    def answer(self, message: wire.FromSidecar) -> None:
        """Take an answer of the sidecar."""
        self.outbox.on_message(message)
        if self._wait is not None and self._wait.until():
            self._wait = None
            self._advance()


class _Sidecar:
    """One sidecar process: its machine and what has come in."""

    def __init__(self, tracing: Tracing) -> None:
        self.tracing = tracing
        self.inbox: deque[tuple[_Process, wire.ToSidecar, bytes]] = deque()
        self.paused_until = 0
        self.crash_in = -1
        self.awake = False
        self.spool = SimSpool(tracing.segments, self.strike)
        self.intake = Intake(self.spool, SimFiles(tracing.files, self.strike), self._refuse)

    def strike(self, what: str) -> int:
        """See ``Strikes``."""
        self.maybe_die(torn=True)
        return 0 if self.tracing.is_full(what) else 1

    def maybe_die(self, *, torn: bool) -> None:
        """Die here if that was planned."""
        if self.crash_in < 0:
            return
        self.crash_in -= 1
        if self.crash_in < 0:
            self.tracing.cover("the sidecar dies at an effect")
            kind = self.tracing.random()
            if torn and kind < 0.4:
                raise Torn
            raise Died(after=kind < 0.7)

    def _refuse(self, why: str, what: object) -> None:
        broken("I12", f"the sidecar refuses {what} as {why}")

    def work(self) -> bool:
        """Take a burst of messages, else make lines of some blocks; return whether there is more to do."""
        for _ in range(_BURST):
            if not self.inbox:
                break
            process, message, payload = self.inbox.popleft()
            answer = self.intake.receive(message, wire.encode(message), payload)
            if answer is not None:
                self.maybe_die(torn=False)
                self.tracing.send_down(process, answer)
        else:
            return True
        done: bool | None = True
        for _ in range(_BURST):
            done = self.intake.convert()
            if not done:
                break
        if done is False:
            self.tracing.cover("lines wait in the spool")
        return bool(self.inbox) or done is True


class Tracing:
    """All traces of one run.

    Args:
        world: The run.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = Random(world.seed ^ _SALT).random  # noqa: S311  # a schedule, not a secret
        self.period = world.knobs.trace_period
        self.processes: list[_Process] = []
        self.segments: list[list[tuple[wire.ToSidecar, bytes] | None]] = []
        self.files: dict[str, StoredFile] = {}
        self.sidecar: _Sidecar | None = None
        self.address = 0
        self.resting = False
        self._faulty = True
        self._full: set[str] = set()
        knobs = world.knobs
        prompt = 3 * knobs.delay + 8 * knobs.trace_pace < self.period // 4  # an answer comes before it is missed
        self.calm = not self._plan() and not knobs.pauses and prompt
        self._start_sidecar()

    def cover(self, what: str) -> None:
        """Count that something happened."""
        self.world.covered["trace", what] += 1

    def adopt(self, worker: SimWorker) -> None:
        """Trace a worker from its start on."""
        process = _Process(self, worker, len(self.processes))
        self.processes.append(process)
        process.address = self.address
        process.guard(process.outbox.introduce)
        if self._faulty and self.random() < self.world.knobs.trace_kill_effects:
            process.crash_in = int(self.random() * 40)
        self.world.after(int((0.5 + self.random()) * self.period), process.guard, process.flush)

    # -- faults ------------------------------------------------------------------------------------------------------

    def _plan(self) -> bool:
        """Plan the faults of the run; return whether there are any."""
        knobs, world = self.world.knobs, self.world
        plan = [
            (knobs.trace_crashes, self._kill_sidecar),
            (knobs.trace_crash_effects, self._kill_sidecar_soon),
            (knobs.trace_pauses, self._stop_sidecar),
            (knobs.trace_fills, self._fill),
        ]
        for times, fault in plan:
            for _ in range(times):
                world.at(int(self.random() * (knobs.span + 20 * MS)), self._strike, fault)
        rates = knobs.trace_loss, knobs.trace_duplicate, knobs.trace_reorder, knobs.trace_kill_effects
        return any(times for times, _ in plan) or any(rates)

    def _strike(self, fault: Any) -> None:
        if self._faulty:
            fault()

    def _kill_sidecar(self) -> None:
        if self.sidecar is not None:
            self.cover("the sidecar is killed")
            self._sidecar_died()

    def _kill_sidecar_soon(self) -> None:
        if self.sidecar is not None:
            self.sidecar.crash_in = int(self.random() * 12)

    def _stop_sidecar(self) -> None:
        if self.sidecar is not None:
            self.cover("the sidecar is stopped")
            self.sidecar.paused_until = self.world.now + int(self.random() * 4 * self.period)
            self.world.tell(f"the sidecar is stopped until {self.sidecar.paused_until / MS:.3f} ms")

    def _fill(self) -> None:
        """Fill the disk for a while: for all, or for one kind of file."""
        which = ("spool", "file", "spill", "all")[int(self.random() * 4)]
        kinds = {"spool", "file", "spill"} if which == "all" else {which}
        self.cover(f"disk full: {which}")
        self.world.tell(f"the disk is full for {', '.join(sorted(kinds))}")
        self._full |= kinds
        self.world.after(int(self.random() * 5 * self.period), self._free)

    def _free(self) -> None:
        self.world.tell("the disk is free again")
        self._full.clear()
        self._wake()

    def is_full(self, what: str) -> bool:
        """Return whether the disk takes nothing of a kind now."""
        return what in self._full

    def heal(self) -> None:
        """End all faults."""
        self._faulty = False
        self._full.clear()
        for process in self.processes:
            process.crash_in = -1
        if self.sidecar is None:
            self._start_sidecar()
        else:
            self.sidecar.crash_in = -1
            self.sidecar.paused_until = 0
            self._wake()

    # -- the sidecar -------------------------------------------------------------------------------------------------

    def _start_sidecar(self) -> None:
        if self.sidecar is None:
            if not self.world.knobs.trace_same_address:
                self.address += 1
            self.world.tell("a sidecar starts")
            self.sidecar = _Sidecar(self)
            self._wake()

    def _sidecar_died(self) -> None:
        self.world.tell("the sidecar dies")
        self.sidecar = None
        for process in self.processes:
            process.under_way = 0
        self.world.after(int(self.random() * 6 * self.period), self._start_sidecar)

    def _wake(self) -> None:
        sidecar = self.sidecar
        if sidecar is not None and not sidecar.awake:
            sidecar.awake = True
            self.world.after(self.world.knobs.trace_pace, self._work, sidecar)

    def _work(self, sidecar: _Sidecar) -> None:
        if sidecar is not self.sidecar:
            return
        if sidecar.paused_until > self.world.now:
            self.world.at(sidecar.paused_until, self._work, sidecar)
            return
        sidecar.awake = False
        try:
            more = sidecar.work()
        except (Died, Torn):
            self._sidecar_died()
            return
        if more:
            self._wake()

    # -- messages ----------------------------------------------------------------------------------------------------

    def send_up(self, process: _Process, message: wire.ToSidecar, payload: bytes | None) -> bool:
        """Hand a message of a process to its socket; False if that takes none now."""
        sidecar = self.sidecar
        if sidecar is None or process.address != self.address:
            self.cover("sent to nobody")
            return self.random() < 0.5  # before the socket notices it takes what it will lose
        if process.under_way >= _HIGH_WATER:
            self.cover("a socket takes no more")
            return False
        if isinstance(message, wire.Data) and message.form == wire.LINES:
            self.cover("sent from the spill")
        for _ in range(self._copies()):
            process.under_way += 1
            process.up_at = self._arrival(process.up_at)
            self.world.at(process.up_at, self._arrive_up, sidecar, process, message, payload or b"")
        return True

    def _arrive_up(self, sidecar: _Sidecar, process: _Process, message: wire.ToSidecar, payload: bytes) -> None:
        if sidecar is self.sidecar:
            process.under_way = max(0, process.under_way - 1)
            sidecar.inbox.append((process, message, payload))
            self._wake()

    def send_down(self, process: _Process, message: wire.FromSidecar) -> None:
        """Send an answer to a process."""
        for _ in range(self._copies()):
            process.down_at = self._arrival(process.down_at)
            self.world.at(process.down_at, process.guard, process.answer, message)

    def _copies(self) -> int:
        """Return how often a message arrives: once, but for loss and duplication."""
        if not self._faulty:
            return 1
        knobs = self.world.knobs
        if knobs.trace_loss and self.random() < knobs.trace_loss:
            self.cover("a message is lost")
            return 0
        if knobs.trace_duplicate and self.random() < knobs.trace_duplicate:
            self.cover("a message comes twice")
            return 2
        return 1

    def _arrival(self, last: int) -> int:
        knobs = self.world.knobs
        at = self.world.now + knobs.delay // 4 + int(self.random() * knobs.delay)
        if self._faulty and knobs.trace_reorder and self.random() < knobs.trace_reorder:
            self.cover("a message overtakes")
            return at + int(self.random() * self.period)
        return max(at, last + 1)

    # -- the end -----------------------------------------------------------------------------------------------------

    def unrest(self) -> str:
        """Return what is not at rest, or empty; once all blocks are safe the living are told to end."""
        self.resting = True
        for process in self.processes:
            if not process.worker.alive or not process.alive or process.over:
                continue
            outbox = process.outbox
            if not process.finishing and (outbox.held or outbox.sent or process.spill.waiting or not outbox.alive):
                return f"{process!r} has blocks that are not with the sidecar"
            process.guard(process.finish)
            return f"{process!r} has not ended"
        sidecar = self.sidecar
        if sidecar is None or sidecar.inbox or sidecar.spool.peek() is not None:
            return "the sidecar has blocks that are no lines"
        return ""

    def check_end(self) -> None:
        """Check that every record is accounted for."""
        for process in self.processes:
            self._check(process)

    def _check(self, process: _Process) -> None:
        file = self.files.get(process.source, StoredFile())
        read = self._read(process, file)
        tokens = {block.payload for block in read.values()}
        written, pending, lost = process.outbox.counts()
        records = sum(block.records for block in read.values())
        if records < written:
            broken("I12", f"{process!r}: {written} records count as written, {records} can be read")
        held = {entry.payload for entry in process.outbox.held.values()}
        missing = [one for one in process.emitted if one.token not in tokens and one.token not in held]
        if sum(one.records for one in missing) > sum(lost.values()):
            broken("I12", f"{process!r}: {[one.token for one in missing]} are nowhere, {lost} count as lost")
        if lost:
            self.cover("a block is dropped and counted")
        if not process.worker.alive or not process.alive:
            self.cover("a killed process")
            return
        ended, at_rest = process.outbox.ended, process.ended_at_rest
        if (ended or at_rest) and (pending or process.spill.waiting):
            broken("I12", f"{process!r} ended with {pending} records pending, {list(process.spill.waiting)} spilled")
        if ended and not file.ends:
            broken("I12", f"{process!r} ended, so says the sidecar, and its file does not")
        if not file.ends:
            self.cover("an end in the spill")
            if not process.spill.file.ends and not process.refused:
                broken("I12", f"{process!r} ended, and no file says so")
        self.cover("a calm trace" if self.calm else "a harmed trace")
        if self.calm and (process.outbox.counts()[0] != records or process.spill.file.blocks):
            broken("I10", f"{process!r} spilled in a calm run")

    def _read(self, process: _Process, file: StoredFile) -> dict[int, Block]:
        """Return the blocks of a process as a reader sees them: file, spill and spool, doubled ones once."""
        read: dict[int, Block] = {}
        for block in file.whole():
            if block.seq in read:
                broken("I12", f"{process!r}: block {block.seq} stands twice in its file")
            read[block.seq] = block
        if file.ends > 1:
            broken("I12", f"{process!r}: {file.ends} ends in its file")
        more = list(process.spill.file.whole())
        for segment in self.segments:
            for frame in segment:
                if frame is None:
                    break
                message, payload = frame
                if isinstance(message, wire.Data) and message.source == process.source:
                    more.append(Block(message.seq, message.records, payload))
        for block in more:
            before = read.setdefault(block.seq, block)
            if before.payload != block.payload:
                broken("I12", f"{process!r}: number {block.seq} is two blocks: {before.payload!r}, {block.payload!r}")
        return read
