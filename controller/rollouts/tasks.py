"""The life of every rollout task, from submission to the caller that takes it. Pure: time is handed in.

A task is QUEUED, then RUNNING, then READY with exactly one outcome, then taken. Each kind of caller (``owner``) has a
queue and a store of results with bounds of its own, so that results nobody takes hold up their own kind only. After any
event the driver asks ``startable`` and runs what it gets, so no change of capacity is ever missed.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from controller.rollouts.results import Outcome
from controller.rollouts.staleness import Limits, Staleness

__all__ = ["State", "Task", "Tasks"]


class State(enum.Enum):
    """How far a task is."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    TAKEN = "taken"


@dataclass(eq=False)
class Task:
    """One rollout. Changed by ``Tasks`` alone.

    Attributes:
        number: In order of submission, from 0.
        owner: Who takes it.
        payload: The driver's own.
        counts: Whether it is held against the versions.
        submitted_s, started_s, ended_s: Times of the injected clock.
        oldest: Oldest version that may have made a part of it.
        abandoned: Nobody takes it.
    """

    number: int
    owner: Hashable
    payload: Any
    counts: bool
    submitted_s: float
    state: State = State.QUEUED
    started_s: float = 0.0
    ended_s: float = 0.0
    outcome: Outcome | None = None
    oldest: int | None = None
    abandoned: bool = False

    def __lt__(self, other: Task) -> bool:
        return self.number < other.number


@dataclass
class _Store:
    """What is open for one owner; ``ready`` by number."""

    queued: deque[Task] = field(default_factory=deque)
    running: set[Task] = field(default_factory=set)
    ready: list[Task] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.queued) + len(self.running) + len(self.ready)


class Tasks:
    """All open tasks. Not thread-safe.

    Args:
        limits: What bounds them.
        ordered: Results are taken strictly in order of submission, whatever ends first.

    Attributes:
        staleness: The counters.
        paused: Nothing is started; what runs goes on, and its results are handed out.
        counts: Tasks by outcome since the beginning, and ``submitted`` and ``started``.
        taken: Tasks that are taken, or forgotten.
    """

    def __init__(self, limits: Limits, *, ordered: bool = False) -> None:
        self.limits = limits
        self.ordered = ordered
        self.staleness = Staleness(limits)
        self.paused = False
        self.counts: dict[str, int] = dict.fromkeys(["submitted", "started", *Outcome], 0)
        self._stores: dict[Hashable, _Store] = {}
        self.taken = 0
        self._next = 0

    # -- events --------------------------------------------------------------------------------------------------------

    def submit(self, owner: Hashable, payload: Any, now_s: float, *, counts: bool = True) -> Task:
        """Queue a task; ask ``room`` first."""
        store = self._store(owner)
        if len(store.queued) >= self.limits.queue:
            msg = f"the queue of {owner!r} is full"
            raise IndexError(msg)
        task = Task(self._next, owner, payload, counts, now_s)
        self._next += 1
        self.counts["submitted"] += 1
        store.queued.append(task)
        return task

    def startable(self, now_s: float) -> list[Task]:
        """Return the tasks that start now, which run from here on: the oldest first that may."""
        started: list[Task] = []
        while not self.paused:
            fitting = [store for store in self._stores.values() if store.queued and self._may_start(store)]
            if not fitting:
                break
            store = min(fitting, key=lambda one: one.queued[0].number)
            task = store.queued.popleft()
            task.state, task.started_s = State.RUNNING, now_s
            store.running.add(task)
            self.staleness.started(counts=task.counts)
            self.counts["started"] += 1
            started.append(task)
        return started

    def finish(self, task: Task, outcome: Outcome, now_s: float, oldest: int | None = None) -> None:
        """A running task has ended."""
        if task.state is not State.RUNNING:
            msg = f"task {task.number} is {task.state.value}, so it cannot end"
            raise RuntimeError(msg)
        task.oldest = oldest
        if outcome is Outcome.ACCEPTED and task.counts and self.staleness.is_stale(oldest):
            outcome = Outcome.STALE
        self._store(task.owner).running.remove(task)
        self.staleness.ended(counts=task.counts, accepted=outcome is Outcome.ACCEPTED)
        self._to_ready(task, outcome, now_s)

    def cancel(self, tasks: Iterable[Task], now_s: float) -> tuple[list[Task], list[Task]]:
        """Cancel tasks; returns those that ended now, and those that are to be stopped, which end by ``finish``."""
        ended, running = [], []
        for task in tasks:
            if task.state is State.QUEUED:
                self._store(task.owner).queued.remove(task)
                task.started_s = now_s
                self._to_ready(task, Outcome.CANCELLED, now_s)
                ended.append(task)
            elif task.state is State.RUNNING:
                running.append(task)
        return ended, running

    def abandon(self, owner: Hashable) -> None:
        """Nobody takes results of an owner's present tasks: they go as they end, and those that ended go now."""
        store = self._stores.get(owner)
        if store is None:
            return
        for task in (*store.queued, *store.running):
            task.abandoned = True
        for task in store.ready:
            self._forgotten(task)
        self._taken(store.ready, store, owner)
        store.ready = []
        self._clear(owner, store)

    def disown(self, task: Task) -> None:
        """Nobody takes this task: it goes as it ends, or now if it has ended."""
        task.abandoned = True
        if task.state is State.READY:
            self._forgotten(task)
            self.take_these([task])

    def advance(self, version: int) -> None:
        """A new version counts: what is too old by now is STALE, and what it held is free for others.

        Raises:
            ConfigError: An older version.
        """
        self.staleness.advance(version, self._waiting())
        self._age()

    def recovered(self, version: int) -> None:
        """A run goes on at ``version``."""
        self.staleness.recovered(version, self._waiting())
        self._age()

    # -- results -------------------------------------------------------------------------------------------------------

    def takeable(self, owner: Hashable) -> int:
        """Return how many results may be taken now."""
        store = self._stores.get(owner)
        if store is None:
            return 0
        return self._prefix(store) if self.ordered else len(store.ready)

    def take(self, owner: Hashable, count: int) -> list[Task]:
        """Take up to ``count`` results, the lowest number first."""
        store = self._stores.get(owner)
        if store is None:
            return []
        count = min(count, self.takeable(owner))
        taken, store.ready = store.ready[:count], store.ready[count:]
        return self._taken(taken, store, owner)

    def peek(self, owner: Hashable) -> list[Task]:
        """Return what may be taken now, the lowest number first."""
        store = self._stores.get(owner)
        return [] if store is None else store.ready[: self.takeable(owner)]

    def take_these(self, tasks: Iterable[Task]) -> None:
        """Take results out of their turn; all must be ready."""
        for task in tasks:
            store = self._store(task.owner)
            store.ready.remove(task)
            self._taken([task], store, task.owner)

    def put_back(self, tasks: Iterable[Task]) -> None:
        """Undo a ``take`` that nobody received."""
        for task in tasks:
            if task.outcome is Outcome.ACCEPTED and task.counts and self.staleness.is_stale(task.oldest):
                self._drop(task)
            task.state = State.READY
            self.taken -= 1
            insort(self._store(task.owner).ready, task)

    # -- looking -------------------------------------------------------------------------------------------------------

    def room(self, owner: Hashable) -> int:
        """Return how many more may be queued."""
        store = self._stores.get(owner)
        return self.limits.queue - (0 if store is None else len(store.queued))

    def open(self, owner: Hashable | None = None) -> list[Task]:
        """Return the tasks that are not taken, by number; of one owner, or of all."""
        stores = list(self._stores.values()) if owner is None else [self._stores.get(owner) or _Store()]
        return sorted(task for store in stores for task in (*store.queued, *store.running, *store.ready))

    def tally(self, owner: Hashable | None = None) -> tuple[int, int, int]:
        """Return how many are queued, running and ready; of one owner, or of all."""
        stores = list(self._stores.values()) if owner is None else [self._stores.get(owner) or _Store()]
        return (
            sum(len(store.queued) for store in stores),
            sum(len(store.running) for store in stores),
            sum(len(store.ready) for store in stores),
        )

    def holds_up(self, owner: Hashable) -> str:
        """Say what keeps queued tasks of an owner from starting; empty if nothing does, or none is queued."""
        store = self._stores.get(owner)
        if store is None or not store.queued:
            return ""
        limits, stale = self.limits, self.staleness
        if self.paused:
            return "submission is paused"
        if self._is_full(store):
            return f"{len(store.ready)} results are not taken, and {limits.results} are the most"
        if limits.max_concurrent <= stale.running + stale.free:
            return f"{limits.max_concurrent} run, the most at once"
        if stale.capacity(counts=store.queued[0].counts) <= 0:
            return (
                f"version {stale.version} has {stale.accepted} accepted and {stale.running} running rollouts, "
                f"all that max_staleness={limits.max_staleness} with batches of {limits.batch_size} allows: "
                "a new version must count first"
            )
        return ""

    # -- inside --------------------------------------------------------------------------------------------------------

    def _store(self, owner: Hashable) -> _Store:
        return self._stores.setdefault(owner, _Store())

    def _may_start(self, store: _Store) -> bool:
        if self._is_full(store):
            return False
        return self.staleness.capacity(counts=store.queued[0].counts) > 0

    def _is_full(self, store: _Store) -> bool:
        """Tell whether results must be taken first.

        In order, there may be none to take: all that are ready were cancelled behind one that has not begun.
        """
        if len(store.running) + len(store.ready) < self.limits.results:
            return False
        return not self.ordered or bool(store.running) or self._prefix(store) > 0

    def _to_ready(self, task: Task, outcome: Outcome, now_s: float) -> None:
        task.state, task.outcome, task.ended_s = State.READY, outcome, now_s
        self.counts[outcome] += 1
        store = self._store(task.owner)
        if task.abandoned:
            self._forgotten(task)
            self._taken([task], store, task.owner)
        else:
            insort(store.ready, task)

    def _taken(self, tasks: list[Task], store: _Store, owner: Hashable) -> list[Task]:
        for task in tasks:
            task.state = State.TAKEN
        self.taken += len(tasks)
        self._clear(owner, store)
        return tasks

    def _forgotten(self, task: Task) -> None:
        """What was accepted and is used for no version leaves its place to another."""
        if task.outcome is Outcome.ACCEPTED and task.counts:
            self.staleness.dropped()

    def _clear(self, owner: Hashable, store: _Store) -> None:
        if not len(store):
            self._stores.pop(owner, None)

    def _prefix(self, store: _Store) -> int:
        """Return how many of the ready are not behind one that is not."""
        before = [*([store.queued[0]] if store.queued else []), *store.running]
        return bisect_left(store.ready, min(before)) if before else len(store.ready)

    def _waiting(self) -> int:
        return sum(
            task.counts and task.outcome is Outcome.ACCEPTED for store in self._stores.values() for task in store.ready
        )

    def _age(self) -> None:
        for store in self._stores.values():
            for task in store.ready:
                if task.outcome is Outcome.ACCEPTED and task.counts and self.staleness.is_stale(task.oldest):
                    self._drop(task)

    def _drop(self, task: Task) -> None:
        task.outcome = Outcome.STALE
        self.counts[Outcome.ACCEPTED] -= 1
        self.counts[Outcome.STALE] += 1
        self.staleness.dropped()
