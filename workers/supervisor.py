"""When ranks are started, restarted, stopped and given up: a pure machine, events in, effects out.

The shell (``workers.agent``) owns processes and time. It feeds events with the monotonic time and carries out the
effects in order. One instance of a rank lives at a time, so ranks name instances.
"""

from __future__ import annotations

import enum
import signal
from collections import deque
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

__all__ = [
    "Effect",
    "Escalate",
    "Event",
    "Exited",
    "Finish",
    "Policy",
    "RestartAsked",
    "SignalRank",
    "SpawnFailed",
    "Spawned",
    "StartRank",
    "StopAsked",
    "Superseded",
    "Supervisor",
    "Tick",
]

EXIT_OK: Final = 0
EXIT_WORKER_LOST: Final = 4
EXIT_FENCED: Final = 11
_NS: Final = 1_000_000_000
_KILL_PATIENCE_NS: Final = 10 * _NS
_FENCE_GRACE_S: Final = 1.0
"""A rank that was replaced has no more to do than to leave."""


class Policy(msgspec.Struct, frozen=True):
    """How a role answers the end of a rank.

    Attributes:
        restart: ``never``; ``one`` restarts the rank; ``all`` restarts every rank of the agent, since a rank of a
            collective is useless without its peers.
        max_restarts, window_s: More than ``max_restarts`` restarts within ``window_s`` seconds end the agent with the
            first cause in the window.
        backoff_s, backoff_max_s: Pause before a restart: doubled with each restart in the window, up to the maximum.
        grace_s: Seconds between SIGTERM and SIGKILL for peers that a restart of all stops.
    """

    restart: Literal["never", "one", "all"] = "never"
    max_restarts: int = 3
    window_s: float = 60.0
    backoff_s: float = 0.1
    backoff_max_s: float = 10.0
    grace_s: float = 5.0


# -- events ------------------------------------------------------------------------------------------------------------


class Spawned(msgspec.Struct, frozen=True):
    """The process of ``rank`` exists."""

    rank: int


class SpawnFailed(msgspec.Struct, frozen=True):
    """The process of ``rank`` could not be made."""

    rank: int
    reason: str


class Exited(msgspec.Struct, frozen=True):
    """The process of ``rank`` ended; ``cause`` says how, for people."""

    rank: int
    exit_code: int | None
    cause: str


class RestartAsked(msgspec.Struct, frozen=True):
    """The controller wants a fresh process of ``rank`` (of all ranks under ``all``)."""

    rank: int


class Superseded(msgspec.Struct, frozen=True):
    """Another agent runs ``rank`` now: its process here shall end, and is not started again. May come repeatedly."""

    rank: int
    cause: str


class StopAsked(msgspec.Struct, frozen=True):
    """Everything shall end: SIGTERM now, SIGKILL after ``grace_s``; then the agent ends with ``exit_code``."""

    grace_s: float
    exit_code: int
    reason: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; feed it at ``Supervisor.next_deadline_ns``."""


Event = Spawned | SpawnFailed | Exited | RestartAsked | Superseded | StopAsked | Tick


# -- effects -----------------------------------------------------------------------------------------------------------


class StartRank(msgspec.Struct, frozen=True):
    """Start a process for ``rank``; answer ``Spawned`` or ``SpawnFailed``."""

    rank: int


class SignalRank(msgspec.Struct, frozen=True):
    """Send ``signum`` to the process of ``rank``."""

    rank: int
    signum: int


class Escalate(msgspec.Struct, frozen=True):
    """The policy is at its end; ``cause`` names the rank that failed first and how."""

    cause: str


class Finish(msgspec.Struct, frozen=True):
    """No rank is left and none will be started: the agent ends with ``exit_code``."""

    exit_code: int
    reason: str


Effect = StartRank | SignalRank | Escalate | Finish


class _State(enum.Enum):
    IDLE = "idle"
    WAITING = "waiting"  # for the backoff to pass
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"  # SIGTERM sent
    KILLED = "killed"  # SIGKILL sent


_ALIVE: Final = frozenset({_State.STARTING, _State.RUNNING, _State.STOPPING, _State.KILLED})


class _Rank(msgspec.Struct):
    state: _State = _State.IDLE
    deadline_ns: int | None = None
    again: bool = False  # start it once more when it is gone
    asked: bool = False  # its end was asked for
    fenced: bool = False  # another agent runs it


class Supervisor:
    """The machine for the ranks of one agent. Pure; the caller serialises.

    Args:
        ranks: The ranks of this agent.
        policy: What to do when one ends.
    """

    def __init__(self, ranks: Iterable[int], policy: Policy) -> None:
        self._ranks = {rank: _Rank() for rank in sorted(ranks)}
        self._policy = policy
        self._restarts: deque[tuple[int, str]] = deque()
        self._stopping: StopAsked | None = None
        self._finished = False
        self._failure = EXIT_OK
        self._first_cause = ""

    # -- questions -----------------------------------------------------------------------------------------------------

    def asked(self, rank: int) -> bool:
        """Tell whether the end of ``rank`` was asked for (stop, restart, peers of a failed rank)."""
        return self._ranks[rank].asked

    def state(self, rank: int) -> str:
        """Return the state of ``rank`` in a word: idle, waiting, starting, running, stopping, killed."""
        return self._ranks[rank].state.value

    def next_deadline_ns(self) -> int | None:
        """Return when a ``Tick`` is due (monotonic nanoseconds), or None."""
        return min((r.deadline_ns for r in self._ranks.values() if r.deadline_ns is not None), default=None)

    # -- events --------------------------------------------------------------------------------------------------------

    def begin(self) -> list[Effect]:
        """Start all ranks."""
        return [self._start(rank) for rank in self._ranks]

    def on_event(self, now_ns: int, event: Event) -> list[Effect]:
        """Take one event; return the effects to carry out, in order."""
        if self._finished:
            return []
        match event:
            case Spawned(rank):
                effects = self._on_spawned(now_ns, rank)
            case SpawnFailed(rank, reason):
                effects = self._on_exit(now_ns, rank, None, f"could not be started: {reason}")
            case Exited(rank, exit_code, cause):
                effects = self._on_exit(now_ns, rank, exit_code, cause)
            case RestartAsked(rank):
                effects = self._on_restart_asked(now_ns, rank)
            case Superseded(rank, cause):
                effects = self._on_superseded(now_ns, rank, cause)
            case StopAsked():
                effects = self._on_stop(now_ns, event)
            case Tick():
                effects = self._on_tick(now_ns)
        return effects + self._finish_if_over()

    def _start(self, rank: int) -> StartRank:
        entry = self._ranks[rank]
        entry.state, entry.deadline_ns, entry.again, entry.asked = _State.STARTING, None, False, False
        return StartRank(rank)

    def _on_spawned(self, now_ns: int, rank: int) -> list[Effect]:
        entry = self._ranks[rank]
        if entry.state is not _State.STARTING:
            return []
        entry.state = _State.RUNNING
        # A stop or a peer's failure came while it was being started.
        return self._stop_rank(now_ns, rank, self._grace_s()) if entry.asked else []

    def _grace_s(self) -> float:
        return self._policy.grace_s if self._stopping is None else self._stopping.grace_s

    def _stop_rank(self, now_ns: int, rank: int, grace_s: float) -> list[Effect]:
        entry = self._ranks[rank]
        if entry.state not in _ALIVE:
            entry.state, entry.deadline_ns = _State.IDLE, None
            return []
        entry.asked = True
        deadline = now_ns + round(grace_s * _NS)
        match entry.state:
            case _State.RUNNING if grace_s > 0:
                entry.state, entry.deadline_ns = _State.STOPPING, deadline
                return [SignalRank(rank, signal.SIGTERM)]
            case _State.RUNNING:
                return self._kill(now_ns, rank)
            case _State.STOPPING:
                entry.deadline_ns = min(deadline, entry.deadline_ns or deadline)
                return self._kill(now_ns, rank) if entry.deadline_ns <= now_ns else []
            case _:  # starting: as soon as it exists; killed: nothing more can be done
                return []

    def _kill(self, now_ns: int, rank: int) -> list[Effect]:
        entry = self._ranks[rank]
        entry.state, entry.deadline_ns = _State.KILLED, now_ns + _KILL_PATIENCE_NS
        return [SignalRank(rank, signal.SIGKILL)]

    def _on_exit(self, now_ns: int, rank: int, exit_code: int | None, cause: str) -> list[Effect]:
        entry = self._ranks[rank]
        asked, again = entry.asked, entry.again
        entry.state, entry.deadline_ns, entry.again, entry.asked = _State.IDLE, None, False, False
        if self._stopping is not None:
            return []
        if asked:
            entry.again = again
            return self._restart_when_gone(now_ns)
        if exit_code == EXIT_OK:
            return []
        return self._on_failure(now_ns, rank, exit_code, cause)

    def _on_failure(self, now_ns: int, rank: int, exit_code: int | None, cause: str) -> list[Effect]:
        words = f"rank {rank} {cause}"
        self._first_cause = self._first_cause or words
        # A fenced rank was replaced elsewhere: starting it again would only be fenced again.
        if self._policy.restart == "never" or exit_code == EXIT_FENCED:
            self._failure = EXIT_FENCED if exit_code == EXIT_FENCED else self._failure or EXIT_WORKER_LOST
            self._ranks[rank].fenced = exit_code == EXIT_FENCED
            return []
        horizon = now_ns - round(self._policy.window_s * _NS)
        while self._restarts and self._restarts[0][0] < horizon:
            self._restarts.popleft()
        self._restarts.append((now_ns, words))
        if len(self._restarts) > self._policy.max_restarts:
            return self._escalate(now_ns)
        if self._policy.restart == "one":
            self._wait(now_ns, rank)
            return []
        effects: list[Effect] = []
        for peer, entry in self._ranks.items():
            entry.again = not entry.fenced
            if peer != rank and not entry.fenced:
                effects += self._stop_rank(now_ns, peer, self._policy.grace_s)
        return effects + self._restart_when_gone(now_ns)

    def _escalate(self, now_ns: int) -> list[Effect]:
        count, window = len(self._restarts) - 1, self._policy.window_s
        cause = (
            f"{self._restarts[0][1]}; restarted {count} times within {window:g} s (limit {self._policy.max_restarts}),"
            f" last: {self._restarts[-1][1]}"
        )
        stop = StopAsked(self._policy.grace_s, EXIT_WORKER_LOST, cause)
        return [Escalate(cause), *self._on_stop(now_ns, stop)]

    def _wait(self, now_ns: int, rank: int) -> None:
        """Start ``rank`` again after the backoff."""
        entry = self._ranks[rank]
        doublings = max(0, len(self._restarts) - 1)
        pause = min(self._policy.backoff_s * 2.0 ** min(doublings, 30), self._policy.backoff_max_s)
        entry.state, entry.deadline_ns = _State.WAITING, now_ns + round(pause * _NS)

    def _restart_when_gone(self, now_ns: int) -> list[Effect]:
        """Under ``all`` the new generation begins only when the old one is gone; else those asked for together do.

        Rank 0 has a new store for torch then: a peer that began before it would be told of the old one.
        """
        alive = [entry for entry in self._ranks.values() if entry.state in _ALIVE]
        if alive and (self._policy.restart == "all" or any(entry.again for entry in alive)):
            return []
        for rank, entry in self._ranks.items():
            if entry.again and entry.state is _State.IDLE:
                entry.again = False
                self._wait(now_ns, rank)
        return []

    def _on_restart_asked(self, now_ns: int, rank: int) -> list[Effect]:
        if self._stopping is not None or rank not in self._ranks or self._ranks[rank].fenced:
            return []
        chosen = list(self._ranks) if self._policy.restart == "all" else [rank]
        effects: list[Effect] = []
        for one in chosen:
            if self._ranks[one].fenced:
                continue
            self._ranks[one].again = True
            effects += self._stop_rank(now_ns, one, self._policy.grace_s)
        return effects + self._restart_when_gone(now_ns)

    def _on_superseded(self, now_ns: int, rank: int, cause: str) -> list[Effect]:
        entry = self._ranks.get(rank)
        if self._stopping is not None or entry is None or entry.fenced:
            return []
        entry.fenced, entry.again = True, False
        self._failure, self._first_cause = EXIT_FENCED, self._first_cause or cause
        return self._stop_rank(now_ns, rank, _FENCE_GRACE_S)

    def _on_stop(self, now_ns: int, event: StopAsked) -> list[Effect]:
        # The first reason stands; a second request can only shorten the grace.
        first = self._stopping
        self._stopping = event if first is None else StopAsked(event.grace_s, first.exit_code, first.reason)
        effects: list[Effect] = []
        for rank, entry in self._ranks.items():
            entry.again = False
            effects += self._stop_rank(now_ns, rank, event.grace_s)
        return effects

    def _on_tick(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for rank, entry in self._ranks.items():
            if entry.deadline_ns is None or entry.deadline_ns > now_ns:
                continue
            match entry.state:
                case _State.WAITING:
                    effects.append(self._start(rank))
                case _State.STOPPING:
                    effects += self._kill(now_ns, rank)
                case _:  # SIGKILL did not end it: stuck in the kernel; waiting longer helps nobody
                    self._failure = self._failure or EXIT_WORKER_LOST
                    effects += self._on_exit(now_ns, rank, None, "did not die of SIGKILL")
        return effects

    def _finish_if_over(self) -> list[Effect]:
        if any(entry.state is not _State.IDLE or entry.again for entry in self._ranks.values()):
            return []
        self._finished = True
        if self._stopping is not None:
            return [Finish(self._stopping.exit_code, self._stopping.reason)]
        return [Finish(self._failure, self._first_cause or "all ranks ended in order")]
