"""Announcers, a hub and directories over real sockets. Run as a script, this file is a directory in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from waiting import scaled, wait_until, within
from zbus.discovery.announcer import Announcer
from zbus.discovery.directory import Directory
from zbus.discovery.hints import Hint, HintKind, topic_of
from zbus.discovery.state import (
    HintPath,
    LeaseExpired,
    RegistryTrouble,
    Settings,
    WorkerExited,
    WorkerHint,
    WorkerSeen,
)
from zbus.errors import RegistryError, TransportError
from zbus.ids import new_incarnation
from zbus.registry.file import FileRegistry
from zbus.registry.memory import MemoryRegistry
from zbus.registry.records import AgentRecord, EpochRecord, ExitRecord, Lease, Records, WorkerRecord
from zbus.transport.endpoints import RuntimeDir
from zbus.transport.multipart import send
from zbus.transport.pubsub import Hub, Publisher, topic_bytes
from zbus.transport.sockets import SocketFactory

SLOW = Settings(reconcile_s=60.0, blind_s=60.0)
"""The registry is read by hints alone: what they do not cause takes a minute."""


class World:
    """A trial: a registry, a hub named by its epoch, and whatever a test starts; all of it ends with the test."""

    def __init__(self, base: Path) -> None:
        self.records = Records(MemoryRegistry())
        self.factory = SocketFactory(max_sockets=500)
        self.runtime = RuntimeDir.create(base, base=base)
        self.ending = contextlib.ExitStack()
        self.events: list = []
        self.hub = self.new_hub()

    def new_hub(self) -> Hub:
        """Start a hub and claim the next epoch for it."""
        hub = Hub(
            self.factory,
            pub=[self.runtime.endpoint("hub-pub"), "tcp://127.0.0.1:0"],
            sub=[self.runtime.endpoint("hub-sub"), "tcp://127.0.0.1:0"],
        )
        hub.start()
        self.ending.callback(hub.stop)
        epoch = EpochRecord(session=os.urandom(4).hex(), hub_pub=hub.pub_endpoints, hub_sub=hub.sub_endpoints)
        self.epoch = self.records.claim_epoch(epoch)
        return hub

    def directory(self, settings: Settings = SLOW, *, proved: bool = True, **options) -> Directory:
        """Start a directory and wait until it hears itself."""
        made = Directory(
            self.records, factory=self.factory, settings=settings, on_event=self.events.append, **options
        ).start()
        self.ending.callback(made.close)
        if proved:
            assert made.wait_for(lambda view: view.hints_up and view.complete, scaled(10))
        return made

    def announcer(self, **options) -> Announcer:
        """Start an announcer and wait until somebody listens."""
        made = Announcer(
            self.factory, int.from_bytes(os.urandom(8), "big"), records=self.records, **{"look_s": 0.2, **options}
        )
        self.ending.callback(made.close)
        wait_until(lambda: made.listened, what="a listener")
        return made

    def join(self, rank: int, start: int = 0) -> WorkerRecord:
        """Publish a worker's record."""
        record = WorkerRecord(role="actor", rank=rank, start=start, incarnation=new_incarnation(start))
        self.records.publish_worker(record)
        return record

    def close(self) -> None:
        """End everything and check that nothing is left."""
        self.ending.close()
        assert self.factory.close(), f"sockets left open: {self.factory.open_sockets}"
        assert self.runtime.remove()


@pytest.fixture
def world(short_dir):
    """Give a trial of its own."""
    made = World(short_dir)
    yield made
    made.close()


def ended(record: WorkerRecord) -> ExitRecord:
    """Return the exit of a worker."""
    return ExitRecord(role=record.role, rank=record.rank, start=record.start, incarnation=record.incarnation)


def test_a_worker_is_known_at_once_when_its_hint_arrives(world):
    """Hints are the fast path: milliseconds, with a reconcile of a minute."""
    directory, announcer = world.directory(), world.announcer()
    record = world.join(0)
    began = time.monotonic()
    announcer.joined(record)
    assert directory.wait_for(lambda view: view.ranks("actor"), scaled(5)) == {0: record}
    assert time.monotonic() - began < within(0.5)
    assert WorkerSeen(record) in world.events


def test_an_end_and_a_state_are_told_too(world):
    """Exit records by pointer, states as they are."""
    directory, announcer = world.directory(), world.announcer()
    record = world.join(0)
    announcer.joined(record)
    assert directory.wait_for(lambda view: view.ranks("actor"), scaled(5))
    announcer.state("actor", 0, record.incarnation, "loading weights")
    announcer.leaving("actor", 0, record.incarnation)
    world.records.publish_exit(ended(record))
    announcer.exited(ended(record))
    assert directory.wait_for(lambda view: view.exits, scaled(5))
    assert WorkerExited(ended(record)) in world.events
    texts = [event.hint.text for event in world.events if isinstance(event, WorkerHint)]
    assert texts == ["loading weights", ""]


def test_a_late_directory_knows_everything_without_a_hint(world):
    """Row 37: state is read, not replayed."""
    announcer = world.announcer() if world.directory() else None
    records = [world.join(rank) for rank in range(10)]
    for record in records:
        announcer.joined(record)
    late = world.directory()
    assert late.view.ranks("actor") == dict(enumerate(records))


def test_hints_announced_to_nobody_are_found_when_the_listener_comes(world):
    """An announcer that spoke before any hub listened shows the next listener that something was missed."""
    announcer = Announcer(world.factory, 5, records=world.records, look_s=0.2)
    world.ending.callback(announcer.close)
    record = world.join(0)
    announcer.joined(record)
    directory = world.directory()
    assert directory.wait_for(lambda view: view.ranks("actor"), scaled(5)) == {0: record}


@pytest.mark.parametrize("lost", ["one in a hundred", "every first", "every join"])
def test_lost_hints_delay_a_join_by_less_than_a_second(world, lost, monkeypatch):
    """Lesson 10: with a reconcile of a minute, gaps and beats find what the channel dropped."""
    directory = world.directory()
    dice = random.Random(7)
    real = directory._subscriber.recv
    seen = set()

    def lossy():
        while (message := real()) is not None:
            drop = {
                "one in a hundred": dice.random() < 0.01,
                "every first": message.publisher not in seen,
                "every join": message.topic == topic_of("actor") and bool(message.payload),
            }[lost]
            seen.add(message.publisher)
            if not drop or message.publisher == directory._number:
                return message
        return None

    monkeypatch.setattr(directory._subscriber, "recv", lossy)
    announcers = [world.announcer() for _ in range(4)]
    slowest = 0.0
    for rank in range(200 if lost == "one in a hundred" else 12):
        record = world.join(rank)
        began = time.monotonic()
        announcers[rank % 4].joined(record)
        assert directory.wait_for(lambda view, rank=rank: rank in view.ranks("actor"), scaled(5))
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < within(1)
    assert lost == "one in a hundred" or directory.stats()["gaps"] > 0


def test_junk_on_the_channel_is_counted_and_changes_nothing(world):
    """Row 65: whatever strangers publish, the directory goes on and looks up no invented name."""
    directory, announcer = world.directory(), world.announcer()
    stranger = Publisher(world.factory, 99)
    stranger.connect(world.hub.pub_endpoints)
    wait_until(lambda: stranger.heard() or stranger.listened, what="a listener")
    stranger.publish(topic_of("actor"), b"\xc1 not a hint")
    stranger.publish(topic_of("actor"), b"\x95\x01\xa8../../..\x00\x01\xa0")
    send(stranger.socket, [topic_bytes(topic_of("actor")), b"not a body"])
    send(stranger.socket, [b"hint/"])
    record = world.join(0)
    announcer.joined(record)
    assert directory.wait_for(lambda view: view.ranks("actor"), scaled(5)) == {0: record}
    assert directory.wait_for(lambda _: directory.stats()["junk_hints"] == 4, scaled(5))
    stranger.close()


def test_invented_workers_are_looked_up_a_few_times_and_forgotten(world):
    """A hint without a record leaves no trace and no endless polling."""
    directory, announcer = world.directory(), world.announcer()
    for number in range(50):
        announcer.announce(Hint(HintKind.JOIN, "actor", number, number + 1))
    record = world.join(0)
    announcer.joined(record)
    assert directory.wait_for(lambda view: view.ranks("actor"), scaled(5)) == {0: record}


def test_the_path_is_called_down_when_no_echo_comes_and_polling_takes_over(world):
    """Lesson 9: two seconds, then files; never an error."""
    assert world.hub.stop()
    directory = world.directory(Settings(reconcile_s=60.0, blind_s=0.2, probe_limit_s=0.5), proved=False)
    assert directory.wait_for(lambda view: view.hints_up is False, scaled(10))
    assert HintPath(up=False) in world.events
    record = world.join(0)
    assert directory.wait_for(lambda view: view.ranks("actor"), scaled(5)) == {0: record}


def test_everybody_finds_the_hub_of_the_next_epoch(world):
    """A new controller runs a new hub: its endpoints stand in the epoch record, and hints flow again."""
    directory, announcer = world.directory(Settings(reconcile_s=0.5, probe_s=0.5)), world.announcer()
    assert world.hub.stop()
    world.hub = world.new_hub()
    assert directory.wait_for(lambda view: view.epoch and view.epoch.epoch == 2 and view.hints_up, scaled(10))
    wait_until(lambda: announcer.listened, what="the announcer's move")
    record = world.join(0)
    announcer.joined(record)
    assert directory.wait_for(lambda view: view.ranks("actor"), scaled(5)) == {0: record}
    wait_until(lambda: world.hub.statistics().from_publishers > 0, what="traffic through the new hub")


def test_a_hub_restarted_at_its_old_address_is_used_again(world):
    """The same endpoints: sockets reconnect, the beat shows what was missed meanwhile."""
    hub = (world.hub.pub_endpoints[1:], world.hub.sub_endpoints[1:])
    directory = world.directory(hub=hub)
    announcer = Announcer(world.factory, 5, hub_pub=hub[0], beat_s=0.3)
    world.ending.callback(announcer.close)
    wait_until(lambda: announcer.listened, what="a listener")
    assert world.hub.stop()
    record = world.join(0)
    announcer.joined(record)
    wait_until(lambda: not announcer.listened, what="the loss of the hub")
    again = Hub(world.factory, pub=hub[0], sub=hub[1])
    again.start()
    world.ending.callback(again.stop)
    assert directory.wait_for(lambda view: view.ranks("actor"), scaled(10)) == {0: record}


@contextlib.contextmanager
def other_service(port: int):
    """Answer on a port as a web server does; gives a list that grows with each connection."""
    asked: list[socket.socket] = []

    def bind() -> socket.socket | None:
        with contextlib.suppress(OSError):  # what the hub had is closed in the background
            return socket.create_server(("127.0.0.1", port))
        return None

    server = wait_until(bind, what="the port to be free")
    server.settimeout(0.02)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                asked.append(connection)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(100))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        over.set()
        thread.join()
        for one in (server, *asked):
            one.close()


def test_a_hub_whose_port_another_service_had_meanwhile_is_used_again(world):
    """Libzmq gives up a connection on which no ZMTP comes; both sides of the channel are then made anew."""
    hub = (world.hub.pub_endpoints[1:], world.hub.sub_endpoints[1:])
    ports = [int(endpoint.rpartition(":")[2]) for side in hub for endpoint in side]
    settings = Settings(reconcile_s=60.0, blind_s=60.0, probe_s=0.2, probe_limit_s=0.3, redial_s=0.3)
    directory = world.directory(settings, hub=hub)
    announcer = Announcer(world.factory, 5, hub_pub=hub[0], beat_s=0.3, redial_s=0.3)
    world.ending.callback(announcer.close)
    wait_until(lambda: announcer.listened, what="a listener")
    assert world.hub.stop()
    with contextlib.ExitStack() as services:
        asked = [services.enter_context(other_service(port)) for port in ports]
        # Two publishers and one subscriber were cut off by it; each must have dialled anew.
        wait_until(lambda: len(asked[0]) >= 4 and len(asked[1]) >= 2, 20, "the hub to be dialled anew")
    again = Hub(world.factory, pub=hub[0], sub=hub[1])
    again.start()
    world.ending.callback(again.stop)
    record = world.join(0)
    wait_until(lambda: announcer.listened, 30, "a listener again")
    announcer.joined(record)
    assert directory.wait_for(lambda view: view.ranks("actor"), scaled(20)) == {0: record}
    assert directory.stats()["redials"] >= 1


class Moody(MemoryRegistry):
    """A registry whose disk can be taken away."""

    broken = False

    def list(self, prefix: str):
        if self.broken:
            raise RegistryError("no space left on device")
        return super().list(prefix)


def test_a_registry_that_fails_is_trouble_with_a_reason_and_ends_by_itself(world):
    """R8: what is known stays known; recovery is seen without help."""
    world.records = Records(Moody())
    world.records.claim_epoch(
        EpochRecord(session="x", hub_pub=world.hub.pub_endpoints, hub_sub=world.hub.sub_endpoints)
    )
    record = world.join(0)
    directory = world.directory(Settings(reconcile_s=0.1))
    world.records.registry.broken = True
    assert directory.wait_for(lambda view: "no space" in view.trouble, scaled(5))
    assert directory.view.ranks("actor") == {0: record}
    world.records.registry.broken = False
    assert directory.wait_for(lambda view: not view.trouble, scaled(5))
    assert [event.error for event in world.events if isinstance(event, RegistryTrouble)][-1] == ""


def test_a_lease_that_stops_moving_expires_within_its_time_and_a_look(world):
    """Liveness of remote agents, end to end on the real clock."""
    agent = AgentRecord(agent="a1", role="actor")
    world.records.publish_agent(agent)
    directory = world.directory()
    for counter in range(5):
        world.records.renew_lease(Lease(holder="a1", counter=counter, ttl_s=0.6))
        directory.refresh()
        assert directory.wait_for(lambda view: "a1" in view.leases, scaled(5))
    began = time.monotonic()
    wait_until(lambda: any(isinstance(event, LeaseExpired) for event in world.events), what="the expiry")
    assert 0.3 < time.monotonic() - began < within(2)


def test_a_handler_that_raises_costs_one_event_and_not_the_directory(world, caplog):
    """Faults of callers are logged and counted."""
    calls = []

    def faulty(event) -> None:
        calls.append(event)
        raise ValueError("mine")

    directory = Directory(world.records, factory=world.factory, on_event=faulty, settings=SLOW).start()
    world.ending.callback(directory.close)
    assert directory.wait_for(lambda view: view.hints_up, scaled(10))
    record = world.join(0)
    directory.refresh()
    assert directory.wait_for(lambda view: view.ranks("actor"), scaled(5))
    wait_until(lambda: WorkerSeen(record) in calls, what="the event")
    assert directory.stats()["handler_errors"] == len(calls)
    assert "ValueError: mine" in caplog.text


def test_without_sockets_a_directory_polls(world):
    """Inline runs and quick commands need no hub."""
    directory = Directory(world.records, settings=Settings(reconcile_s=0.05)).start()
    world.ending.callback(directory.close)
    record = world.join(0)
    assert directory.wait_for(lambda view: view.ranks("actor"), scaled(5)) == {0: record}
    assert directory.view.hints_up is None


def test_waiters_wake_when_a_directory_closes(world):
    """Nobody waits for ever for what cannot come; a timeout is None, a closed directory an error."""
    directory = world.directory()
    assert directory.wait_for(lambda view: view.ranks("nobody"), 0.01) is None
    began = time.monotonic()
    assert directory.close()
    assert directory.close()
    assert time.monotonic() - began < within(2)
    with pytest.raises(TransportError, match="stopped"):
        directory.wait_for(lambda view: view.ranks("nobody"), 60)
    directory.refresh()
    directory.launching(active=True)


def test_a_directory_never_started_closes(world):
    """No thread, no descriptor left."""
    assert Directory(world.records).close()


def test_an_announcer_does_nothing_once_closed_and_bounds_its_queue(world):
    """Announcing never waits and never fails."""
    announcer = Announcer(world.factory, 5, hub_pub=["tcp://127.0.0.1:1"])
    for number in range(20_000):
        announcer.announce(Hint(HintKind.STATE, "actor", 0, 1, str(number)))
    announcer.close()
    announcer.close()
    announcer.announce(Hint(HintKind.STATE, "actor", 0, 1, "late"))
    assert not announcer.listened


# -- a directory in another process that is stopped and goes on


def test_a_stopped_directory_hurts_no_announcer_and_knows_all_when_it_goes_on(short_dir):
    """Row 36: SIGSTOP the subscriber, announce thousands of hints, SIGCONT: the same view as a fresh one."""
    root = short_dir / "registry"
    records = Records(FileRegistry(root))
    factory = SocketFactory(max_sockets=64)
    runtime = RuntimeDir.create(short_dir, base=short_dir)
    hub = Hub(factory, pub=[runtime.endpoint("hub-pub")], sub=[runtime.endpoint("hub-sub")])
    hub.start()
    records.claim_epoch(EpochRecord(session="s", hub_pub=hub.pub_endpoints, hub_sub=hub.sub_endpoints))
    child = subprocess.Popen(
        [sys.executable, __file__, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    announcer = Announcer(factory, 5, records=records)
    try:
        assert child.stdout.readline() == "up\n"
        wait_until(lambda: announcer.listened, what="the listener")
        os.kill(child.pid, signal.SIGSTOP)
        began = time.monotonic()
        published = []
        for rank in range(30):
            record = WorkerRecord(role="actor", rank=rank, incarnation=new_incarnation(0))
            records.publish_worker(record)
            announcer.joined(record)
            published.append(record.incarnation)
            for number in range(300):
                announcer.state("actor", rank, record.incarnation, f"step {number} " + "x" * 500)
        assert announcer.dropped == 0
        assert time.monotonic() - began < within(20)
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write(f"{len(published)}\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline()) == published
        child.stdin.close()
        assert child.wait(scaled(10)) == 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        announcer.close()
        assert hub.stop()
        assert factory.close()
        records.close()


def main() -> None:
    """Follow a registry; say ``up``, then the incarnations of so many workers as the number read."""
    factory = SocketFactory(max_sockets=64)
    directory = Directory(Records(FileRegistry(Path(sys.argv[1]))), factory=factory, settings=SLOW).start()
    assert directory.wait_for(lambda view: view.hints_up, scaled(20))
    print("up", flush=True)
    for line in sys.stdin:
        wanted = int(line)
        found = directory.wait_for(lambda view, wanted=wanted: len(view.workers) == wanted and view, scaled(20))
        ranks = (found or directory.view).ranks("actor")
        print(json.dumps([record.incarnation for record in ranks.values()]), flush=True)
    directory.close()
    factory.close()


if __name__ == "__main__":
    main()
