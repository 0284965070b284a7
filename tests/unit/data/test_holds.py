"""Holder and owner of kept values over a bad network: nothing is lost while it is held, nothing is kept for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from zbus.data.holds import Holds, Tell
from zbus.data.refstore import Held, RefStore

MS = 1_000_000
LEASE_NS = 1000 * MS
RENEW_NS = LEASE_NS // 4
HOLDER = b"controller"


def test_an_owner_is_told_until_it_acknowledges():
    """What was let go stays on the list until it was heard, one message at a time."""
    holds = Holds(RENEW_NS)
    holds.take("w", 0)
    holds.let_go("w", claim=1)

    (tell,) = holds.due(1)
    assert (tell.owner, tell.claims) == ("w", (1,))
    assert holds.due(2) == [], "it is being told"
    holds.failed(tell)
    (again,) = holds.due(3)
    assert again.claims == (1,)
    holds.told(again, 4)
    assert holds.idle


def test_an_owner_hears_of_its_holder_while_anything_is_held():
    """With nothing to let go the message is empty, and comes as often as was said."""
    holds = Holds(RENEW_NS)
    holds.take("w", 0)

    assert holds.due(RENEW_NS - 1) == []
    (tell,) = holds.due(RENEW_NS)
    assert tell == Tell("w", (), ())
    holds.told(tell, RENEW_NS)
    assert holds.due(2 * RENEW_NS - 1) == []
    assert len(holds.due(2 * RENEW_NS)) == 1


def test_what_is_let_go_while_a_message_is_out_goes_with_the_next():
    """An acknowledgement is of what it answers, not of what came since; a late one of an earlier message is nothing."""
    holds = Holds(RENEW_NS)
    for _ in range(2):
        holds.take("w", 0)
    holds.let_go("w", claim=1)
    (first,) = holds.due(0)
    holds.let_go("w", claim=2)
    holds.told(first, 1)

    (second,) = holds.due(1)
    assert second.claims == (2,)
    holds.told(first, 2)
    assert not holds.idle
    holds.dead("w")
    assert holds.idle


@dataclass
class World:
    """One holder, two owners, and messages that are lost, doubled, late and out of order."""

    rng: random.Random
    now: int = 0
    claims: int = 0
    messages: list[tuple[int, str, object]] = field(default_factory=list)  # when, which kind, what
    held: dict[int, str] = field(default_factory=dict)  # claim: owner, while the holder holds it
    let_go: set[int] = field(default_factory=set)
    kept: dict[tuple[str, int], int] = field(default_factory=dict)  # owner, number: claim, as the owner said
    trouble: bool = True
    heard: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.holds = Holds(RENEW_NS)
        self.stores = {name: RefStore(number, 1 << 40, LEASE_NS) for number, name in enumerate("vw", 1)}
        self.tells: dict[int, Tell] = {}

    def send(self, kind: str, what: object) -> None:
        """Put a message on its way: perhaps twice, perhaps never."""
        copies = 1 if not self.trouble else self.rng.choice((0, 1, 1, 1, 2, 3))
        for _ in range(copies):
            late = self.rng.randrange(1, 40) if self.trouble else 1
            self.messages.append((self.now + late * MS, kind, what))

    def call(self) -> None:
        """Call an owner; the result is kept there, if the request arrives, and it may be given up meanwhile."""
        self.claims += 1
        owner = self.rng.choice("vw")
        self.held[self.claims] = owner
        self.holds.take(owner, self.now)
        # A request runs at most once: the delivery below sees to that. When it runs is open.
        self.messages.append((self.now + self.rng.randrange(1, 200) * MS, "run", (owner, self.claims)))

    def drop(self) -> None:
        """Let go of something that is held."""
        claim = self.rng.choice(list(self.held))
        self.let_go.add(claim)
        self.holds.let_go(self.held.pop(claim), claim=claim)

    def step(self, advance_ns: int) -> None:
        """Move the time, deliver what is due, let everybody act."""
        self.now += advance_ns
        due = sorted((m for m in self.messages if m[0] <= self.now), key=lambda m: m[0])
        self.messages = [m for m in self.messages if m[0] > self.now]
        for _, kind, what in due:
            getattr(self, f"on_{kind}")(what)
        for tell in self.holds.due(self.now):
            self.tells[id(tell)] = tell
            self.send("tell", tell)
            self.messages.append((self.now + 60 * MS, "timeout", tell))
        for name, store in self.stores.items():
            for held in store.tick(self.now):
                assert self.now - self.heard.get(name, 0) > LEASE_NS, "its holder was heard in time"
                self.kept.pop((name, held.number), None)
            store.validate()

    def on_run(self, what) -> None:
        owner, claim = what
        self.heard.setdefault(owner, self.now)
        number, dropped = self.stores[owner].put(HOLDER, claim, 1, claim, "f", self.now)
        self.heard[owner] = max(self.heard[owner], self.now) if dropped else self.heard[owner]
        if not dropped:
            self.kept[owner, number] = claim

    def on_tell(self, tell) -> None:
        self.heard[tell.owner] = self.now
        for held in self.stores[tell.owner].release(HOLDER, claims=tell.claims, numbers=tell.numbers, now_ns=self.now):
            assert held.claim in self.let_go, "what is held was dropped"
            del self.kept[tell.owner, held.number]
        self.send("ack", tell)

    def on_ack(self, tell) -> None:
        self.holds.told(tell, self.now)

    def on_timeout(self, tell) -> None:
        self.holds.failed(tell)


@pytest.mark.parametrize("seed", range(40))
def test_over_a_bad_network_what_is_held_stays_and_what_is_let_go_goes(seed):
    """Calls, drops and messages in any order: held values are found and are the right ones, in the end none is left."""
    world = World(random.Random(seed))
    for _ in range(400):
        world.rng.choice((world.call, world.call, world.drop if world.held else world.call))()
        world.step(world.rng.randrange(1, 30) * MS)
        for (owner, number), claim in world.kept.items():
            found = world.stores[owner].find(world.stores[owner].generation, number)
            assert isinstance(found, Held)
            assert found.value == claim
    world.trouble = False
    while world.held:
        world.drop()
    for _ in range(200):
        world.step(10 * MS)
    assert world.holds.idle
    assert not [held for store in world.stores.values() for held in store.values]
    assert not world.kept


def test_values_of_a_holder_that_falls_silent_go_after_the_lease():
    """No message at all: the owners drop everything, and no sooner than the lease says."""
    world = World(random.Random(1))
    for _ in range(30):
        world.call()
    for _ in range(40):
        world.step(10 * MS)
    assert len(world.kept) == 30
    last = max(world.heard.values())
    world.messages.clear()
    world.holds.dead("v"), world.holds.dead("w")
    while world.now <= last + LEASE_NS:
        assert world.kept
        world.step(10 * MS)
    world.step(LEASE_NS)
    assert not world.kept
