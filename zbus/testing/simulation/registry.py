"""The registry in the simulation: controllers that claim epochs and ranks at once, over a file server that lags.

Clients of one simulated disk run one at a time; a seeded choice says who goes next at every file operation. Lookups
that missed stay missing for a while, replies of links are lost and their repeats told EEXIST, handles go stale, disks
are full with half a record written, clients die between two operations and leave what they had written.

I8: every claim has one winner whom all clients agree on, epochs are unique, and each client's rise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final, TypeVar

from zbus.errors import RegistryError
from zbus.registry import FileRegistry, Records
from zbus.registry.records import EpochRecord
from zbus.testing.registry_fs import Quirks, SimulatedDisk, SimulatedFS
from zbus.testing.simulation.ledger import broken

__all__ = ["Turns", "claims"]

_T = TypeVar("_T")

_SALT: Final = 0x1EA5E


class Turns:
    """Runs bodies on threads of which one goes on at a time; ``switch`` may hand on to another."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._waiting: dict[int, threading.Semaphore] = {}
        self._local = threading.local()
        self._errors: list[BaseException] = []

    def switch(self) -> None:
        """Let a drawn one go on: at every file operation."""
        me = getattr(self._local, "me", None)
        if me is None:
            return
        chosen = self._rng.choice(sorted(self._waiting))
        if chosen != me:
            self._waiting[chosen].release()
            self._waiting[me].acquire()

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run all to their ends; raises what one of them raised."""
        self._waiting = {number: threading.Semaphore(0) for number in range(len(bodies))}
        threads = [threading.Thread(target=self._run, args=item, daemon=True) for item in enumerate(bodies)]
        for thread in threads:
            thread.start()
        self._waiting[0].release()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, me: int, body: Callable[[], None]) -> None:
        self._local.me = me
        self._waiting[me].acquire()
        try:
            body()
        except BaseException as error:  # noqa: BLE001  # carried to the thread that runs the simulation
            self._errors.append(error)
        finally:
            del self._waiting[me]
            if self._waiting:
                self._waiting[self._rng.choice(sorted(self._waiting))].release()


def claims(seed: int, covered: dict[object, int]) -> None:
    """Play one race of claims; raises ``Violation`` (I8) when a promise of the registry breaks."""
    rng = Random(seed ^ _SALT)  # noqa: S311  # a schedule, not a secret
    quirks = Quirks(
        resend=rng.choice((0.0, 0.0, 0.3)), stale=rng.choice((0.0, 0.1)), absent_for=rng.choice((0, 0, 10, 20)),
        full=rng.choice((0.0, 0.0, 0.2)),
    )  # fmt: skip
    mortal = rng.choice((0.0, 0.0, 0.02))
    turns = Turns(rng)
    disk = SimulatedDisk()
    clients = 2 + int(rng.random() * 2)
    told: list[list[int]] = [[] for _ in range(clients)]
    ranks: list[bytes] = [b""] * clients

    dead: set[int] = set()
    begun: set[int] = set()

    def client(me: int) -> Callable[[], None]:
        def switch() -> None:
            if me in dead or (mortal and me in begun and rng.random() < mortal):
                dead.add(me)
                raise _Killed
            turns.switch()

        fs = SimulatedFS(disk, rng, quirks=quirks, switch=switch)
        registry = FileRegistry(fs.root, fs=fs, sleep=lambda _s: switch())

        def body() -> None:
            begun.add(me)
            try:
                for number in range(2):
                    claim = partial(Records(registry).claim_epoch, _record(me, number))
                    told[me].append(_until_done(claim).epoch)
                ranks[me] = _until_done(lambda: registry.claim("claims/rank", b"client %d" % me))
            except _Killed:
                covered["registry", "a client dies"] += 1

        return body

    turns.run([client(me) for me in range(clients)])
    everyone = sorted(epoch for epochs in told for epoch in epochs)
    if len(set(everyone)) < len(everyone):
        broken("I8", f"an epoch has two controllers: {told} under {quirks}")
    for me, epochs in enumerate(told):
        if epochs != sorted(epochs):
            broken("I8", f"epochs of client {me} do not rise: {epochs} under {quirks}")
    if len({rank for me, rank in enumerate(ranks) if me not in dead}) > 1:
        broken("I8", f"clients disagree on who holds a claim: {ranks} under {quirks}")
    covered["registry", "epochs claimed"] += len(everyone)
    covered["registry", "names that lag"] += bool(quirks.absent_for)
    covered["registry", "lost replies"] += bool(quirks.resend)
    covered["registry", "stale handles"] += bool(quirks.stale)
    covered["registry", "full disks"] += bool(quirks.full)


def _record(me: int, number: int) -> EpochRecord:
    return EpochRecord(session=f"{me:016x}{number:016x}")


class _Killed(BaseException):
    """A client's process is gone: nothing of it goes on."""


def _until_done(claim: Callable[[], _T]) -> _T:
    """Try again while the disk is full, as a person would who has made room."""
    while True:
        try:
            return claim()
        except RegistryError:
            continue
