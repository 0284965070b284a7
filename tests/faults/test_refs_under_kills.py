"""Values that ranks keep, take and pass on while ranks are killed at random: right or lost, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zbus
from controller import Controller, Role
from launching import HERE, launch
from passing_engine import belongings, hash_of, rows_of, turned, value
from waiting import wait_until
from zbus.codec import Ref
from zbus.config import Config
from zbus.config.schema import DataConfig, SchedulerConfig
from zbus.data.presence import VARIABLE

MIB = 1 << 20
SIZES = ((8, 16), (24, 5000), (64, 20_000))
"""Rows and width: in the message, in one slot, and what is pulled in several parts."""

HOSTS = {"near": ("here", "here", "here"), "far": ("here", "one", "two")}
"""Whose memory the controller and the two roles are in."""


@pytest.fixture
def place(request, short_dir, monkeypatch):
    """Return a config and, by role, environments in which processes share memory, or share none and speak tcp."""
    mine, *others = (short_dir / name for name in HOSTS[request.param])
    for path in (mine, *others):
        path.mkdir(exist_ok=True)
    monkeypatch.setenv(VARIABLE, str(mine))
    transport = "tcp" if request.param == "far" else "ipc"
    config = Config(scheduler=SchedulerConfig(transport=transport), data=DataConfig(refs=256 * MIB))
    environments = [{VARIABLE: str(path)} for path in others]
    return config, dict(zip(("actor", "critic"), environments, strict=True)), {mine, *others}


def left(places: set[Path]) -> list[str]:
    """Return the names of processes that hold memory."""
    roots = [place / f"zbus-{os.getuid()}" for place in places]
    return sorted(entry.name for root in roots if root.exists() for entry in root.iterdir())


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in an error."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaves(one)
    else:
        yield error


class Killer:
    """Kills ranks, and remembers which starts of them."""

    def __init__(self, bus: Controller, chance: random.Random) -> None:
        self.kills = 0
        self.ended: set[tuple[str, int, int]] = set()
        self._bus = bus
        self._chance = chance

    def kill(self, status: dict[str, Any]) -> None:
        """Kill a rank that has told its status."""
        self.ended.add((status["role"], status["rank"], status["incarnation"]))
        os.kill(status["pid"], signal.SIGKILL)
        self.kills += 1

    @contextlib.contextmanager
    def at_some_moment(self) -> Iterator[None]:
        """Kill one rank in the middle of the block, or right behind it."""
        status = self._chance.choice(list(self._bus.statuses().values()))
        timer = threading.Timer(self._chance.uniform(0, 0.02), self.kill, [status])
        timer.start()
        try:
            yield
        finally:
            timer.join()


class Run:
    """Batches of all kinds. Each answer is compared with what it has to be, each loss with who was killed."""

    def __init__(self, bus: Controller, seed: int) -> None:
        self.bus = bus
        self.chance = random.Random(seed)
        self.actor, self.critic = bus.group("actor"), bus.group("critic")
        self.killer = Killer(bus, random.Random(seed + 1))
        self.seen: Counter[str] = Counter()
        self.number = 0
        self.used: list[Ref] = []  # the handles of the running batch
        self.shelf: deque[tuple[Ref, str]] = deque()  # handles that live on, and the hashes of their values
        self.views: deque[tuple[dict[str, Any], str]] = deque()  # values that this process looks at

    def batch(self) -> None:
        """Run one batch of a drawn kind; what fails must fail because of a death."""
        self.number += 1
        kinds = (
            self.passed_on,
            self.by_rows,
            self.joined,
            self.own,
            self.scoped,
            self.unread,
            self.put_there,
            self.old,
        )
        kind = self.chance.choice(kinds)
        self.seen[kind.__name__] += 1
        try:
            kind()
        except (zbus.BatchError, zbus.CallError, zbus.RefLostError) as error:
            self.seen["failed"] += 1
            for one in leaves(error):
                self.judge(one)
        self.used.clear()

    def judge(self, error: BaseException) -> None:
        """Accept an error only if it is of the bus, and a lost value only if its owner was killed."""
        assert isinstance(error, zbus.CallError | zbus.RefLostError), repr(error)
        assert self.killer.ended, f"nobody was killed: {error!r}"
        if isinstance(error, zbus.RefLostError):
            self.seen["lost"] += 1
            owners = {(ref.role, ref.rank, ref.incarnation) for ref in self.used}
            of_error = {one for one in owners if one[:2] == (error.owner_role, error.owner_rank)}
            assert of_error & self.killer.ended, f"{error} lives; {sorted(of_error)} of {sorted(owners)}"

    def size(self) -> tuple[int, int]:
        """Return rows and width of the next value."""
        return self.chance.choice(SIZES)

    def check(self, found: Any, expected: str, what: str) -> None:
        """Compare a hash."""
        assert found == expected, f"batch {self.number}: {what}: {found}, not {expected}"
        self.seen["hashes"] += 1

    def made(self, keeper: Any, size: tuple[int, int]) -> list[Ref]:
        """Have each rank keep a value, and return the handles."""
        refs: list[Ref] = keeper.make(self.number, *size)
        self.used += refs
        return refs

    def mine(self, rank: int, size: tuple[int, int]) -> dict[str, Any]:
        """Return what a rank has made in this batch."""
        return value(self.number, rank, *size)

    # -- kinds of batches ----------------------------------------------------------------------------------------------

    def passed_on(self) -> None:
        """What one rank keeps another takes, makes something of it and keeps that; a third takes it from there."""
        size = self.size()
        refs = self.made(self.actor, size)
        rank = self.chance.randrange(len(refs))
        plain = self.mine(rank, size)
        for one, found in enumerate(self.critic.see(refs[rank])):
            self.check(found, hash_of(plain), f"critic/{one} of actor/{rank}")
        again = self.critic.turn(refs[rank])
        self.used += again
        self.check(self.actor[0].see(again[1]), hash_of(turned(plain)), "actor/0 of critic/1")
        self.check(self.actor[1].see_aside(again[0]), hash_of(turned(plain)), "actor/1 of critic/0, aside")
        self.shelf.append((refs[rank], hash_of(plain)))
        if len(self.shelf) > 8:
            self.shelf.popleft()

    def by_rows(self) -> None:
        """Some rows in a row, picked ones, and shares."""
        size = self.size()
        ref, plain = self.made(self.actor, size)[2], self.mine(2, size)
        start = self.chance.randrange(size[0])
        some = slice(start, self.chance.randrange(start, size[0]) + 1)
        picked = [self.chance.randrange(size[0]) for _ in range(5)]
        self.check(self.critic[0].see(ref[some]), hash_of(rows_of(plain, some)), f"rows {some}")
        self.check(self.critic[1].see(ref.take(picked)), hash_of(rows_of(plain, picked)), f"rows {picked}")
        half = (size[0] + 1) // 2
        shares = self.critic.see_share(ref)
        self.check(shares[0], hash_of(rows_of(plain, slice(0, half))), "first half")
        self.check(shares[1], hash_of(rows_of(plain, slice(half, None))), "second half")

    def joined(self) -> None:
        """Parts that three ranks keep are one value for two others."""
        size = self.size()
        plain = self.mine(0, size)
        joined = self.actor.turn_share(plain)
        self.used += joined.parts
        expected = turned(plain)
        self.check(hash_of(joined.get()), hash_of(expected), "here")
        half = (size[0] + 1) // 2
        for number, found in enumerate(self.critic.see_share(joined)):
            part = slice(0, half) if number == 0 else slice(half, None)
            self.check(found, hash_of(rows_of(expected, part)), f"half {number}")

    def own(self) -> None:
        """A value of this process, for both roles."""
        size = self.size()
        plain = self.mine(9, size)
        ref = self.bus.put(plain)
        for found in (*self.critic.see(ref), *self.actor.see_aside(ref)):
            self.check(found, hash_of(plain), "of bus.put")
        half = (size[0] + 1) // 2
        self.check(self.critic.see_share(ref)[1], hash_of(rows_of(plain, slice(half, None))), "half of bus.put")
        self.check(hash_of(ref.get()), hash_of(plain), "of bus.put, here")

    def scoped(self) -> None:
        """A scope ends while calls are under way: they get their arguments, and whoever comes later does not."""
        size = self.size()
        plain = self.mine(9, size)
        with self.bus.scope():
            refs = self.made(self.actor, size)
            put = self.bus.put(plain)
            futures = [self.critic.see.submit(refs[0]), self.critic.see_aside.submit(put)]
        for ref in (*refs, put):
            with pytest.raises(zbus.RefLostError, match="was released"):
                ref.get()
        for future, expected in zip(futures, (self.mine(0, size), plain), strict=True):
            for found in future.result():
                self.check(found, hash_of(expected), "of a scope")

    def unread(self) -> None:
        """Calls whose answers nobody looks at, and calls that are cancelled."""
        size = self.size()
        self.actor.make.submit(self.number, *size)
        self.critic.turn.submit(self.bus.put(self.mine(0, size)))
        self.actor.anywhere.map([(self.number, *size)] * 4)
        self.actor.make.submit(self.number, *size).cancel()
        self.seen["unread"] += 1

    def put_there(self) -> None:
        """What engines put is held by those who got its handle."""
        size = self.size()
        refs = [answer["ref"] for answer in self.actor.put(self.number, *size)]
        self.used += refs
        rank = self.chance.randrange(len(refs))
        expected = hash_of(self.mine(rank, size))
        self.check(self.critic[rank % 2].see(refs[rank]), expected, f"ctx.put of actor/{rank}")
        view = refs[rank].get()
        self.check(hash_of(view), expected, f"ctx.put of actor/{rank}, here")
        self.views.append((view, expected))
        if len(self.views) > 8:
            self.look(*self.views.popleft())

    def old(self) -> None:
        """A handle from before, whose owner may have died since."""
        if self.shelf:
            ref, expected = self.chance.choice(self.shelf)
            self.used.append(ref)
            self.check(self.critic[self.chance.randrange(2)].see(ref), expected, f"an old value of {ref.owner}")

    def look(self, view: dict[str, Any], expected: str) -> None:
        """See that what was looked at for long has not changed, whoever died meanwhile."""
        self.check(hash_of(view), expected, "a view that was held")

    def end(self) -> None:
        """Let go of all, here and there."""
        while self.views:
            self.look(*self.views.popleft())
        self.shelf.clear()
        for group in (self.actor, self.critic):
            assert group.let_go() == [[]] * len(group), "what an engine held has changed"

    def belongings(self, places: set[Path]) -> list[tuple[int, int, list[str]]]:
        """Return what ``belongings`` says in each rank."""
        names = [str(place) for place in places]
        return [*self.actor.belongings(names), *self.critic.belongings(names)]

    @property
    def ready(self) -> bool:
        """Whether all ranks are there."""
        return self.actor.ready and self.critic.ready


def held(bus: Controller) -> dict[str, dict[str, int]]:
    """Return what processes still keep, lend or offer, by their names."""
    names = ("refs", "refs_bytes", "shared_lent_bytes", "bulk_offered_bytes")
    found = {str(name): status for name, status in bus.statuses().items()} | {"controller": bus.report()}
    found = {name: {key: status.get(key, 0) for key in names} for name, status in found.items()}
    return {name: facts for name, facts in found.items() if any(facts.values())}


def more(now: list[tuple[int, int, list[str]]], before: list[tuple[int, int, list[str]]]) -> list[Any]:
    """Return those that have more than any had, or memory of the dead."""
    most = max(had[0] for had in before) + 16, max(had[1] for had in before) + 2
    return [had for had in now if had[0] > most[0] or had[1] > most[1] or had[2]]


def until(condition: Callable[[], Any], what: str, limit_s: float = 60.0) -> None:
    """Wait for what takes a while where ranks start and values go."""
    wait_until(condition, limit_s, what)


def batches_under_kills(tmp_path: Path, place: Any, count: int, between: int) -> Counter[str]:
    """Run batches while ranks are killed at random, and return what was seen."""
    config, environments, places = place
    fields = {"sys_path": [str(HERE)], "restart": "one", "max_restarts": 100_000, "restart_window_s": 1.0}
    roles = {
        name: Role("passing_engine:Passer", replicas=size, env=environments[name], **fields)
        for name, size in (("actor", 3), ("critic", 2))
    }
    with launch(tmp_path, roles, config=config) as bus:
        run = Run(bus, count)
        for _ in range(24):  # so that all connections are there, and whatever is made once
            run.batch()
        assert not run.seen["failed"]
        mine, theirs = belongings(places), run.belongings(places)
        for number in range(count):
            with run.killer.at_some_moment() if number % between == 0 else contextlib.nullcontext():
                run.batch()
            if not run.ready and (run.seen["failed"] or run.chance.random() < 0.5):
                until(lambda: run.ready, "the killed rank to be back")
        until(lambda: run.ready, "all ranks to be there")
        run.end()
        run.seen["kills"] = run.killer.kills
        until(lambda: not held(bus), "what is held to go")
        until(lambda: bus._session.refs._holds.idle, "all owners to have heard")
        until(lambda: len(left(places)) == 6, "what dead ranks left to be removed")
        until(lambda: belongings(places)[0] <= mine[0] + 8, "descriptors of dead ranks to be closed")
        until(lambda: not belongings(places)[2], "memory of dead ranks to be let go")
        until(lambda: belongings(places)[1] <= mine[1], "threads to end")
        until(lambda: more(run.belongings(places), theirs) == [], "ranks to close what they had of others")
        run.seen["descriptors"] = belongings(places)[0] - mine[0]
        run.seen["restarts"] = len(run.killer.ended)
    assert left(places) == []
    return run.seen


@pytest.mark.alone
@pytest.mark.parametrize("place", ["near"], indirect=True)
def test_values_are_right_or_lost_and_in_the_end_gone(tmp_path, place):
    """Every reader sees the content that was made, also by rows and later; a lost value's owner was killed."""
    seen = batches_under_kills(tmp_path, place, 120, 30)
    assert seen["kills"] >= 3
    assert seen["hashes"] > 120


@pytest.mark.ci
@pytest.mark.alone
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("place", ["near", "far"], indirect=True)
def test_values_are_right_or_lost_in_many_batches(tmp_path, place):
    """The same for as many batches as ZBUS_TEST_BATCHES says, by default 600; also where no memory is shared."""
    seen = batches_under_kills(tmp_path, place, int(os.environ.get("ZBUS_TEST_BATCHES", "600")), 40)
    print(dict(seen))
    assert seen["kills"] >= 8
    assert seen["lost"] >= 1
