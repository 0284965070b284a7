"""Stacks of ranks that are late: taken by signal, so also while a rank holds the GIL; parsed, and folded by place.

Every worker is armed for SIGUSR2 (``zbus.runtime.host``): a C handler appends the stack of its main thread to
``stacks/<role>.<rank>.<start>.txt``. A rank of this kernel is signalled from here, held by pid and start time; for one
elsewhere its agent is asked (``zbus.dump_stacks``) and the file is read in the shared trial directory. Where the main
thread runs no endpoint, the rank is asked over ``ctl`` for its other threads: the call may be in one of them.
"""

from __future__ import annotations

import logging
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controller.console import shown
from zbus.codec import decode, encode
from zbus.config import TrialDir
from zbus.errors import ZbusError
from zbus.ids import WorkerName, new_session
from zbus.protocol.messages import Outcome, OutcomeKind
from zbus.registry.identity import pid_space
from zbus.registry.records import Records, WorkerRecord
from zbus.runtime.processes import ProcessHandle, catches, state_of
from zbus.transport.client import Client, Peer, PeerState

__all__ = ["Dump", "Stacks", "ask_agents", "fold", "place_of"]

log = logging.getLogger("zbus.members")

_TAKE_S: Final = 1.0
"""How long ranks have to write their stacks."""

_FRESH_S: Final = 1.0
"""A dump this young serves again: calls that end together are late together."""

_STILL_S: Final = 0.02
"""A file that has not grown for so long holds the whole dump: it has no end mark."""

_AGENT_S: Final = 0.5
_GATHER_S: Final = 0.005
_MOST_BYTES: Final = 8 << 20
_MOST_READ: Final = 1 << 20
_MOST_DUMPS: Final = 4096
_MOST_FRAMES: Final = 4

_IDLE: Final = "no code of the engine: it waits in the bus, or in a coroutine"

_HEAD: Final = re.compile(r"^(?:Stack |(?:Current thread|Thread) 0x[0-9a-f]+ .*)\(most recent call first\):$")
_FRAME: Final = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_HERE: Final = Path(__file__).resolve().parent.parent
_OWN: Final = re.compile(
    rf"^({re.escape(str(_HERE))}|.*/site-packages)/(zbus|workers|controller)/|^<frozen |/runpy\.py$"
)
_PACKAGED: Final = re.compile(r"/(site|dist)-packages/")
_STDLIB: Final = re.compile(r"/lib(64)?/python3\.\d+/")


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


Place = tuple[str, int, str]
"""File, line and function of a frame."""


def place_of(text: str) -> str:
    """Return in a line where a rank's engine is, from the text of one dump; empty where it shows no thread.

    The thread that runs an endpoint is told, else the main thread. Frames of zbus are left out, those of libraries are
    named only where the engine waits in one: ``engines.py:33 in reduce (in distributed_c10d.py:2501 in all_reduce)``.
    """
    threads = _threads(text)
    if not threads:
        return ""
    # The interpreter lists the main thread last.
    best = max(enumerate(threads), key=lambda item: (_serves(item[1]), bool(_engine(item[1])), item[0]))[1]
    engine = _engine(best) if _serves(best) else _own_code(best)
    if not engine:
        return _IDLE
    innermost, *callers = engine[:_MOST_FRAMES]
    words = " < ".join([_words(innermost), *map(_short, callers)])
    return words if best[0] == innermost else f"{words} (in {_short(best[0])})"


def _threads(text: str) -> list[list[Place]]:
    threads: list[list[Place]] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append((match["file"], int(match["line"]), match["name"]))
    return [frames for frames in threads if frames]


def _serves(frames: Sequence[Place]) -> bool:
    return any(file.endswith("/zbus/runtime/executor.py") for file, _, _ in frames) and bool(_engine(frames))


def _engine(frames: Sequence[Place]) -> list[Place]:
    """Return the frames of the user's code; where all is installed, those of the packages."""
    return _own_code(frames) or [f for f in frames if _PACKAGED.search(f[0]) and not _OWN.search(f[0])]


def _own_code(frames: Sequence[Place]) -> list[Place]:
    foreign = [frame for frame in frames if not _OWN.search(frame[0])]
    return [frame for frame in foreign if not _PACKAGED.search(frame[0]) and not _STDLIB.search(frame[0])]


def _words(frame: Place) -> str:
    file, line, name = frame
    return f"{shown(file) if file.startswith('/') else file}:{line} in {name}"


def _short(frame: Place) -> str:
    file, line, name = frame
    return f"{file.rpartition('/')[2]}:{line} in {name}"


def fold(places: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Return ranks by place, the place with most ranks first."""
    found: dict[str, list[int]] = {}
    for rank in sorted(places):
        found.setdefault(places[rank], []).append(rank)
    return sorted(((ranks, place) for place, ranks in found.items()), key=lambda item: (-len(item[0]), item[0]))


class Stacks:
    """Takes stacks on a thread of its own, which the first request starts.

    Args:
        trial: Where the files are.
        ask_agents: Has the ranks of other hosts dump their stacks; returns those that were told to.
        ask_rank: Returns the stacks of all threads of a rank, by its own word; empty where it does not answer soon.
    """

    def __init__(
        self,
        trial: TrialDir,
        ask_agents: Callable[[Sequence[WorkerRecord]], set[int]] = lambda _: set(),
        ask_rank: Callable[[WorkerRecord], str] = lambda _: "",
    ) -> None:
        self._trial = trial
        self._ask_agents = ask_agents
        self._ask_rank = ask_rank
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
            fresh = dump is not None and time.monotonic() - dump.taken < _FRESH_S
            if self._closed or fresh or record.incarnation in self._pending:
                return
            self._pending.add(record.incarnation)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="zbus-stacks", daemon=True)
                self._thread.start()
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
        files = {
            record.incarnation: _File(self._trial.stack_file(record.role, record.rank, record.start))
            for record in batch
        }
        reasons = self._prompt(batch, files)
        waiting = {record.incarnation: record for record in batch if record.incarnation not in reasons}
        deadline = time.monotonic() + _TAKE_S
        while waiting and time.monotonic() < deadline and not self._closed:
            time.sleep(_STILL_S / 4)
            for incarnation, record in list(waiting.items()):
                file = files[incarnation]
                if file.complete():
                    del waiting[incarnation]
                    place = place_of(file.text()) or "unknown: its stacks cannot be read"
                    if place == _IDLE and not self._closed:
                        place = place_of(self._ask_rank(record)) or place
                    self._keep(record, place, self._trial.relative(file.path))
        for record in batch:
            if why := reasons.get(record.incarnation):
                self._keep(record, why, "")
            elif record.incarnation in waiting:
                self._keep(record, _silent(record), "")

    def _prompt(self, batch: Sequence[WorkerRecord], files: Mapping[int, _File]) -> dict[int, str]:
        """Have each rank dump its stacks; return why some will not, by incarnation."""
        here = pid_space()
        reasons: dict[int, str] = {}
        elsewhere = []
        for record in batch:
            if files[record.incarnation].before > _MOST_BYTES:
                reasons[record.incarnation] = "unknown: its stack file is full"
            elif record.pid_space != here or (why := _signal(record)) is None:
                elsewhere.append(record)
            elif why:
                reasons[record.incarnation] = why
        told = self._ask_agents(elsewhere) if elsewhere else set()
        for record in elsewhere:
            if record.incarnation not in told:
                reasons[record.incarnation] = "unknown: its agent does not answer"
        return reasons

    def _keep(self, record: WorkerRecord, place: str, path: str) -> None:
        with self._changed:
            self._dumps.pop(record.incarnation, None)
            self._dumps[record.incarnation] = Dump(place, path, time.monotonic())
            while len(self._dumps) > _MOST_DUMPS:
                del self._dumps[next(iter(self._dumps))]


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


def _signal(record: WorkerRecord) -> str | None:
    """Signal a rank of this kernel; return "", why that cannot be, or None if it is not seen from here."""
    handle = ProcessHandle.open(record.pid, record.pid_start)
    if handle is None:
        return None  # gone, or in a pid namespace of its own: its agent knows
    try:
        if not catches(record.pid, signal.SIGUSR2):
            return "unknown: it does not dump stacks yet"
        handle.signal(signal.SIGUSR2)
    except OSError as error:
        return f"unknown: {error.strerror}"
    finally:
        handle.close()
    return ""


def _silent(record: WorkerRecord) -> str:
    """Say why a rank that was signalled has written nothing."""
    if record.pid_space == pid_space():
        state = state_of(record.pid)
        if state in ("T", "t"):
            return "nowhere: its process is stopped (state T)"
        if state == "D":
            return "the kernel: its process waits for a device or a file system (state D)"
        if state is None or state in "ZX":
            return "nowhere: its process has ended"
    return f"unknown: it wrote no stacks within {_TAKE_S:g} s"


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
