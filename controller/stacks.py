"""Stacks of ranks that are late: told by themselves, or taken by signal while they cannot; and where they are.

A rank is asked over ``ctl`` first: it then reads the frames of all its threads under the GIL, which harms nothing. One
that does not answer soon, because native code holds its GIL, is signalled (SIGUSR2), and a C handler appends the stack
of its main thread to ``stacks/<role>.<rank>.<start>.txt``. The handler reads frames without the GIL, and has killed
ranks that ran Python code meanwhile; so a rank is signalled only while its GIL is seen to be held
(``zbus.runtime.gil``). A rank of this kernel is signalled from here, held by pid and start time; for one
elsewhere its agent is asked (``zbus.dump_stacks``) and the file is read in the shared trial directory.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controller.places import IDLE, place_of
from zbus.codec import decode, encode
from zbus.config import TrialDir
from zbus.errors import ZbusError
from zbus.ids import WorkerName, new_session
from zbus.protocol.messages import Outcome, OutcomeKind
from zbus.registry.identity import pid_space
from zbus.registry.records import Records, WorkerRecord
from zbus.runtime.gil import DumpSignal
from zbus.runtime.processes import state_of
from zbus.transport.client import Client, Peer, PeerState

__all__ = ["Dump", "Stacks", "Told", "ask_agents", "ask_ranks"]

log = logging.getLogger("zbus.members")

_ASK_S: Final = 0.25
"""How long a rank has to answer before it is looked at from outside. One that can answer does so in milliseconds, also
with some threads at work (5 ms each for the GIL); and what is known after half a second is told in errors that wait."""

_TAKE_S: Final = 1.0
"""How long ranks have to tell or write their stacks."""

_FRESH_S: Final = 1.0
"""A dump this young serves again: calls that end together are late together."""

_STILL_S: Final = 0.02
"""A file that has not grown for so long holds the whole dump: it has no end mark."""

_AGENT_S: Final = 0.5
_GATHER_S: Final = 0.005
_LOOK_S: Final = 0.005
_MOST_BYTES: Final = 8 << 20
_MOST_READ: Final = 1 << 20
_MOST_DUMPS: Final = 4096

_UNREADABLE: Final = "unknown: its stacks cannot be read"
_NATIVE: Final = "unknown: native code of another thread than the main one holds its interpreter (GIL)"


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank said of its stacks.

    Attributes:
        text: The stacks of all its threads.
        saved: Whether the rank's file has them too.
    """

    text: str
    saved: bool


@dataclass(frozen=True, slots=True)
class Dump:
    """Where one start of one rank was.

    Attributes:
        place: The engine's frames, innermost first, and what they call into; or why nothing is known.
        path: The file with the stacks of all threads, relative to the trial directory; empty where none was taken.
        taken: When (monotonic seconds).
    """

    place: str
    path: str
    taken: float


class Stacks:
    """Takes stacks on a thread of its own, which the first request starts.

    Args:
        trial: Where the files are.
        ask_ranks: Asks ranks for their stacks, without waiting; returns a mapping that fills with their answers, by
            incarnation, and the incarnations that could be asked.
        ask_agents: Has the ranks of other hosts dump their stacks; returns those that were told to.
        fresh_s: A dump this many seconds young serves again.
    """

    def __init__(
        self,
        trial: TrialDir,
        ask_ranks: Callable[[Sequence[WorkerRecord]], tuple[Mapping[int, Told], set[int]]],
        ask_agents: Callable[[Sequence[WorkerRecord]], set[int]] = lambda _: set(),
        *,
        fresh_s: float = _FRESH_S,
    ) -> None:
        self._trial = trial
        self._ask_ranks = ask_ranks
        self._ask_agents = ask_agents
        self._fresh_s = fresh_s
        self._dumps: dict[int, Dump] = {}
        self._pending: set[int] = set()
        self._changed = threading.Condition()
        self._inbox: queue.SimpleQueue[WorkerRecord | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def ask(self, record: WorkerRecord) -> None:
        """Have a rank's stacks taken soon, unless that was done this second. Never waits; any thread, any lock."""
        with self._changed:
            dump = self._dumps.get(record.incarnation)
            fresh = dump is not None and time.monotonic() - dump.taken < self._fresh_s
            if self._closed or fresh or record.incarnation in self._pending:
                return
            self._pending.add(record.incarnation)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="zbus-stacks", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no thread is to be had; who asks may hold the bus's lock, with outcomes to tell
                    self._pending.discard(record.incarnation)
                    return
                self._thread = thread
        self._inbox.put(record)

    def get(self, incarnation: int, timeout_s: float = 2 * _TAKE_S) -> Dump | None:
        """Wait for stacks that were asked for; return the newest, or None. Not under a lock."""
        with self._changed:
            self._changed.wait_for(lambda: incarnation not in self._pending or self._closed, timeout_s)
            return self._dumps.get(incarnation)

    def take(self, records: Iterable[WorkerRecord], timeout_s: float = 2 * _TAKE_S) -> dict[int, Dump]:
        """Take the stacks of several ranks at once and return them by incarnation. Not under a lock."""
        wanted = list(records)
        for record in wanted:
            self.ask(record)
        until = time.monotonic() + timeout_s
        found = {one.incarnation: self.get(one.incarnation, max(0.0, until - time.monotonic())) for one in wanted}
        return {incarnation: dump for incarnation, dump in found.items() if dump is not None}

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(2 * _TAKE_S)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (first := self._inbox.get()) is not None:
            batch = [first]
            time.sleep(_GATHER_S)  # ranks of one call come together: one look at all of them
            while not self._inbox.empty():
                record = self._inbox.get()
                if record is None:
                    return
                batch.append(record)
            try:
                self._take(batch)
            except Exception:
                log.exception("stacks could not be taken")
                with self._changed:
                    self._pending.difference_update(record.incarnation for record in batch)
                    self._changed.notify_all()

    def _take(self, batch: Sequence[WorkerRecord]) -> None:
        here = pid_space()
        ranks = [
            _Taking(one, self._trial.stack_file(one.role, one.rank, one.start), local=one.pid_space == here)
            for one in batch
        ]
        try:
            self._take_all(ranks)
        finally:
            for one in ranks:
                one.close()

    def _take_all(self, ranks: Sequence[_Taking]) -> None:
        answers, asked = self._ask_ranks([one.record for one in ranks])
        began = time.monotonic()
        deadline, open_, agents_asked = began + _TAKE_S, list(ranks), False
        while not self._closed:
            open_ = [one for one in open_ if not self._settle(one, answers)]
            now = time.monotonic()
            if not open_ or now >= deadline:
                break
            if now - began >= _ASK_S:
                silent = [one for one in open_ if one.record.incarnation in asked]
                for one in silent:
                    one.prompt()
                unseen = [one for one in silent if one.signal is None and not one.why]
                if unseen and not agents_asked:
                    self._have_agents_prompt(unseen)
                    agents_asked, deadline = True, time.monotonic() + _TAKE_S
            time.sleep(_LOOK_S)
        for one in open_:
            self._keep(one.record, one.why or _silent(one, asked=one.record.incarnation in asked), "")

    def _settle(self, one: _Taking, answers: Mapping[int, Told]) -> bool:
        """Keep where a rank is, once that is known; tell whether it is."""
        path = self._trial.relative(one.file.path)
        told = answers.get(one.record.incarnation)
        if told is not None:
            self._keep(one.record, place_of(told.text) or _UNREADABLE, path if told.saved else "")
            return True
        if one.prompted and one.file.complete():
            place = place_of(one.file.text()) or _UNREADABLE
            self._keep(one.record, _NATIVE if place == IDLE else place, path)
            return True
        return False

    def _have_agents_prompt(self, ranks: Sequence[_Taking]) -> None:
        """Have agents signal the ranks that are not seen from here. Blocks for up to a second."""
        told = self._ask_agents([one.record for one in ranks])
        for one in ranks:
            one.prompted = one.record.incarnation in told
            if not one.prompted:
                one.why = "unknown: it has not answered, and its agent has not had it write them"

    def _keep(self, record: WorkerRecord, place: str, path: str) -> None:
        with self._changed:
            self._dumps.pop(record.incarnation, None)
            self._dumps[record.incarnation] = Dump(place, path, time.monotonic())
            while len(self._dumps) > _MOST_DUMPS:
                del self._dumps[next(iter(self._dumps))]
            self._pending.discard(record.incarnation)  # whoever waits for this one need not wait for the others
            self._changed.notify_all()


class _Taking:
    """One rank whose stacks are being taken.

    Attributes:
        record: The rank.
        file: Where a signal has them written.
        signal: Sends that signal; None where the rank is not seen from here, and its agent does.
        prompted: Whether the rank was signalled, from here or by its agent.
        why: Why that was not done; empty while it may be.
    """

    def __init__(self, record: WorkerRecord, file: Path, *, local: bool) -> None:
        self.record = record
        self.file = _File(file)
        # Made before the rank is asked: all the time in which it is silent counts.
        self.signal = DumpSignal.open(record.pid, record.pid_start) if local else None
        self.prompted = False
        self.why = ""

    def prompt(self) -> None:
        """Signal the rank, if it is seen from here and its GIL is held; at most once."""
        if self.file.before > _MOST_BYTES:
            self.why = "unknown: its stack file is full"
        elif self.signal is not None and not self.prompted:
            self.prompted = self.signal.send()

    def close(self) -> None:
        """Let go of the process."""
        if self.signal is not None:
            self.signal.close()


class _File:
    """A stack file, and how much of it is older than this request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before = self._size()
        self._last = self.before
        self._grown = 0.0

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def complete(self) -> bool:
        """Tell whether a dump has been appended and no more is coming."""
        size = self._size()
        now = time.monotonic()
        if size != self._last:
            self._last, self._grown = size, now
        return size > self.before and now - self._grown >= _STILL_S

    def text(self) -> str:
        try:
            with self.path.open("rb") as file:
                file.seek(self.before)
                return file.read(_MOST_READ).decode(errors="replace")
        except OSError:
            return ""


def _silent(one: _Taking, *, asked: bool) -> str:
    """Say why nothing is known of a rank."""
    if one.record.pid_space == pid_space():
        state = state_of(one.record.pid)
        if state in ("T", "t"):
            return "nowhere: its process is stopped (state T)"
        if state == "D":
            return "the kernel: its process waits for a device or a file system (state D)"
        if state is None or state in "ZX":
            return "nowhere: its process has ended"
    if not asked:
        return "unknown: there is no connection to it"
    if one.prompted:
        return f"unknown: it wrote no stacks within {_TAKE_S:g} s"
    return (
        f"unknown: it has not answered within {_TAKE_S:g} s, and no native code is seen to hold its interpreter (GIL)"
    )


def ask_ranks(client: Client, peers: Mapping[int, Peer]) -> tuple[dict[int, Told], set[int]]:
    """Ask ranks for the stacks of all their threads. Never waits; any thread, not under a lock.

    Args:
        client: The session that the peers are of.
        peers: The ranks by incarnation.

    Returns:
        A dictionary that the answers are put into as they come, by incarnation; and which ranks could be asked.
    """
    answers: dict[int, Told] = {}
    asked: set[int] = set()
    frames = encode([["zbus.threads", (), {}]])
    for incarnation, peer in peers.items():

        def sink(_member: int, _call: int, outcome: Outcome, incarnation: int = incarnation) -> None:
            if outcome.kind is OutcomeKind.OK and outcome.payload is not None:
                answers[incarnation] = Told(**decode(outcome.payload))

        try:
            client.place([peer], "ctl", [frames], 1, deadline_s=_TAKE_S, sink=sink)
        except ZbusError:  # it went meanwhile
            continue
        asked.add(incarnation)
    return answers, asked


def ask_agents(client: Client, records: Records, workers: Sequence[WorkerRecord]) -> set[int]:
    """Have agents make their ranks dump stacks; return the incarnations that were told to. Blocks for up to a second.

    Args:
        client: Whose epoch and sockets to use; the session is a new one, since an agent remembers places.
        records: Names the agents.
        workers: The ranks.
    """
    try:
        agents = {record.agent: record for worker in workers for record in records.agents(worker.role) if record.ctl}
    except ZbusError:
        return set()
    asker = Client(session=new_session(), epoch=client.epoch, factory=client.factory)
    try:
        peers = {
            agent: asker.connect(WorkerName(agent, 0), 0, {"ctl": agents[agent].ctl})
            for agent in {worker.agent for worker in workers} & set(agents)
        }
        asker.wait(lambda: all(peer.state is PeerState.READY for peer in peers.values()), _AGENT_S)
        told: set[int] = set()
        asked = [w for w in workers if w.agent in peers and peers[w.agent].state is PeerState.READY]
        done: list[int] = []
        for worker in asked:
            _ask_one(asker, peers[worker.agent], worker, told, done)
        asker.wait(lambda: len(done) == len(asked), _AGENT_S)
        return told
    finally:
        asker.close()


def _ask_one(asker: Client, peer: Peer, worker: WorkerRecord, told: set[int], done: list[int]) -> None:
    def sink(_member: int, _call: int, outcome: Outcome) -> None:
        done.append(worker.incarnation)
        if outcome.kind is OutcomeKind.OK and decode(outcome.payload or ()):
            told.add(worker.incarnation)

    frames = encode([["zbus.dump_stacks", (worker.rank,), {}]])
    try:
        asker.place([peer], "ctl", [frames], 1, deadline_s=_AGENT_S, sink=sink)
    except ZbusError:
        done.append(worker.incarnation)
