"""Who waits for room in a window, or for an outcome, is woken by whatever makes it; over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from link_kit import NAME
from waiting import scaled, wait_until, within
from zbus.codec import encode
from zbus.errors import TransportError
from zbus.ids import new_session
from zbus.protocol.caller import CallerLane, Timing
from zbus.protocol.messages import Execute, Kind, Outcome, Status
from zbus.transport.client import Client, Peer, PeerState
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory

WINDOW = 8
MS = 1_000_000
MINUTES = 300_000 * MS


class Scene:
    """A client, and a worker that answers a lane when it is told to."""

    def __init__(self, factory: SocketFactory, directory: Path) -> None:
        self.held: list[Execute] = []
        self.told: list[tuple[int, Outcome]] = []
        self.woken = 0
        # No timer wakes anybody: silence is asked about after minutes.
        timing = Timing(
            probe_first=MINUTES, probe_received=MINUTES, probe_max=MINUTES, probe_least=None,
            cancel_grace=20 * MS, stop_grace=5 * MS,
        )  # fmt: skip
        self.client = Client(session=new_session(), epoch=1, factory=factory, timing=timing)
        self.server = Server(
            name=NAME, incarnation=1, factory=factory, lanes={"side": 64, "ctl": 1}, dispatch=self.held.append
        )
        bound = self.server.bind("ctl", f"ipc://{directory}/worker")
        self.server.start()
        self.peer: Peer = self.client.connect(NAME, 1, {"ctl": [bound]})
        assert self.client.wait(lambda: self.peer.state is PeerState.READY, scaled(20))
        self.lane: CallerLane = self.client._lane(self.peer, "side").machine
        self.lane.window_calls = WINDOW
        self.client.watch_room(self.wake)

    def wake(self) -> None:
        self.woken += 1

    def place(self, calls: int, deadline_s: float | None = None) -> None:
        """Place calls one by one."""
        for _ in range(calls):
            number = len(self.held) + len(self.told)
            self.placed = self.client.place(
                [self.peer], "side", [encode(number)], 1, deadline_s=deadline_s,
                sink=lambda *one: self.told.append((one[0], one[2])),
            )  # fmt: skip

    def crowded(self) -> bool:
        return self.client.crowded([self.peer], "side")

    def fill(self, deadline_s: float | None = None) -> None:
        """Fill the window, and have the worker hold all of it."""
        self.place(WINDOW, deadline_s)
        assert self.crowded()
        wait_until(lambda: len(self.held) == WINDOW, what="the worker to hold the calls")

    def answer(self, calls: int) -> None:
        """Answer the oldest calls."""
        for _ in range(calls):
            request = self.held.pop(0)
            self.server.finish(request, 0, Kind.RESULT, Status.OK, encode(1))

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def scene(factory: SocketFactory, short_dir: Path) -> Iterator[Scene]:
    """Give one."""
    made = Scene(factory, short_dir)
    yield made
    made.close()


def test_answers_wake_who_waits_for_room_once_a_quarter_of_the_window_is_free(scene: Scene) -> None:
    """Not at each answer: those who wait would come one at a time. Nobody is told who did not find it crowded since."""
    scene.fill()
    scene.answer(1)
    wait_until(lambda: len(scene.told) == 1)
    assert scene.woken == 0
    scene.answer(1)
    wait_until(lambda: scene.woken == 1, what="who waits to be woken")
    assert not scene.crowded()
    scene.answer(WINDOW - 2)
    wait_until(lambda: len(scene.told) == WINDOW)
    assert scene.woken == 2, "the look just now counts as one who waits; the answers after it wake nobody"


def test_late_answers_to_calls_given_up_wake_who_waits_for_room(scene: Scene) -> None:
    """The outcomes were told before and free no place; the worker's word does."""
    scene.fill(deadline_s=scaled(0.05))
    wait_until(lambda: len(scene.told) == WINDOW, what="the calls to be given up")
    assert {one.kind.value for _, one in scene.told} == {"UNKNOWN"}
    assert (scene.crowded(), scene.woken) == (True, 0)
    scene.answer(WINDOW)
    wait_until(lambda: scene.woken >= 1, what="who waits to be woken by late answers")
    wait_until(lambda: not scene.crowded())
    assert len(scene.told) == WINDOW, "no second outcome"


ENDS: dict[str, Callable[[Client, Peer], object]] = {
    "declared dead": lambda client, peer: client.declare_dead(peer, reason="worker_exit", evidence="killed"),
    "disconnected": lambda client, peer: client.disconnect(peer),
    "closed": lambda client, peer: client.close(),
}


@pytest.mark.parametrize("given_up", [False, True], ids=["calls open", "calls given up before"])
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_worker_wakes_who_waits_for_room_there(scene: Scene, end: str, given_up: bool) -> None:
    """Nobody is left who would make room; whoever looks sees that there is nothing to wait for."""
    scene.fill(deadline_s=scaled(0.05) if given_up else None)
    if given_up:
        wait_until(lambda: len(scene.told) == WINDOW)
    assert scene.crowded()
    ENDS[end](scene.client, scene.peer)
    assert scene.woken >= 1
    assert not scene.crowded()
    assert len(scene.told) == WINDOW


@pytest.mark.parametrize("given_up", [False, True], ids=["calls open", "calls given up before"])
def test_a_worker_lost_to_its_silence_wakes_who_waits_for_room_there(scene: Scene, given_up: bool) -> None:
    """The connection is gone, and after a while the worker counts as dead."""
    scene.fill(deadline_s=scaled(0.05) if given_up else None)
    if given_up:
        wait_until(lambda: len(scene.told) == WINDOW)
    assert scene.crowded()
    scene.server.close()
    wait_until(lambda: scene.peer.state is PeerState.SUSPECT, what="the connection to be lost")
    assert scene.client.lose(scene.peer, reason="lease", evidence="silent for 5 s")
    assert scene.woken >= 1
    assert not scene.crowded()
    assert len(scene.told) == WINDOW


def test_room_that_is_made_while_somebody_looks_wakes_it(scene: Scene) -> None:
    """Between its look and its wait no wake-up is lost: it says that it waits before it looks."""
    scene.fill()
    scene.client._lane(scene.peer, "side").wanted = False

    class Slow(CallerLane):
        """All answers come between the two halves of a look."""

        __slots__ = ()

        @property
        def crowded(self) -> bool:
            found = CallerLane.crowded.fget(self)  # type: ignore[attr-defined]  # of a property
            if scene.held:
                scene.answer(WINDOW)
                wait_until(lambda: len(scene.told) == WINDOW)
            return bool(found)

    scene.lane.__class__ = Slow
    assert scene.crowded(), "it saw the lane as it was"
    assert scene.woken >= 1


def test_a_watcher_that_raises_keeps_no_other_from_being_told(scene: Scene) -> None:
    """Its error is logged and counted; outcomes and the next watchers are told."""

    def broken() -> None:
        raise ValueError("a watcher's own fault")

    scene.client.unwatch_room(scene.wake)
    scene.client.watch_room(broken)
    scene.client.watch_room(scene.wake)
    scene.fill()
    scene.answer(WINDOW)
    wait_until(lambda: len(scene.told) == WINDOW)
    wait_until(lambda: scene.woken >= 1)
    assert scene.client.statistics()["failed_listeners"] >= 1


def test_a_sink_that_raises_loses_no_other_outcome(scene: Scene) -> None:
    """Of the same worker's end, of a batch, and behind it; each of the others has exactly one outcome."""
    good: list[int] = []

    def bad(*_: object) -> None:
        raise ValueError("a sink's own fault")

    def place(sink: Callable[[int, int, Outcome], None], count: int = 1) -> None:
        scene.client.place([scene.peer], "side", [encode(0)], count, deadline_s=None, sink=sink)

    def takes_all_but_the_first(_member: int, call: int, _outcome: Outcome) -> None:
        good.append(call)
        if call == 0:
            raise ValueError("a sink's own fault")

    place(bad)
    place(takes_all_but_the_first, 3)
    place(lambda _member, call, _outcome: good.append(call + 10))
    scene.client.declare_dead(scene.peer, reason="worker_exit", evidence="killed")
    assert good == [0, 1, 2, 10]
    assert scene.client.statistics()["failed_listeners"] == 2


def test_a_sink_that_raises_does_not_end_the_thread_that_reads(scene: Scene) -> None:
    """The answers behind it are read and told."""

    def bad(*_: object) -> None:
        raise ValueError("a sink's own fault")

    scene.client.place([scene.peer], "side", [encode(0)], 1, deadline_s=None, sink=bad)
    scene.place(2)
    wait_until(lambda: len(scene.held) == 3)
    scene.answer(3)
    wait_until(lambda: len(scene.told) == 2)


LOSSES: dict[str, Callable[[Scene], object]] = {
    "declared dead": lambda scene: scene.client.declare_dead(scene.peer, reason="worker_exit", evidence="killed"),
    "lost": lambda scene: scene.client.lose(scene.peer, reason="lease", evidence="silent for 5 s"),
    "disconnected": lambda scene: scene.client.disconnect(scene.peer),
    "closed": lambda scene: scene.client.close(),
    "cancelled": lambda scene: scene.client.cancel(scene.placed),
}


WAITS = [(end, waits_for) for end in LOSSES for waits_for in ("room", "an outcome")]
WAITS.remove(("cancelled", "room"))  # only the worker's answer makes that


@pytest.mark.parametrize(("end", "waits_for"), WAITS)
def test_whoever_waits_and_leads_is_woken_by_what_another_thread_settles(
    scene: Scene, end: str, waits_for: str
) -> None:
    """It sleeps in its poll, where no message will come; it does not sleep on until a timer is due."""
    scene.fill()
    if end == "lost":
        scene.server.close()
        wait_until(lambda: scene.peer.state is PeerState.SUSPECT, what="the connection to be lost")
    if end == "cancelled":
        scene.place(1)  # it waits for room here
    done = (lambda: not scene.crowded()) if waits_for == "room" else (lambda: bool(scene.told))
    ended: list[float] = []

    def wait() -> None:
        assert scene.client.wait(done, scaled(60))
        ended.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    reactor = scene.client.reactor
    wait_until(lambda: reactor._owner == thread.ident and reactor._sleep_until, what="it to sleep in its poll")
    began = time.monotonic()
    LOSSES[end](scene)
    thread.join(scaled(60))
    assert ended[0] - began < within(0.25)


def test_a_closed_client_refuses_what_waited_for_room(scene: Scene) -> None:
    """It is woken, looks, places, and is told that the bus is closed."""
    scene.fill()
    scene.client.close()
    assert not scene.crowded()
    with pytest.raises(TransportError, match="closed"):
        scene.place(1)
