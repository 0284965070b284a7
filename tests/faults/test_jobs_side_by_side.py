"""Two jobs of one name on one host, and many processes that come at once: nobody takes another's place."""

from __future__ import annotations

import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launching import launch, probes
from waiting import scaled, wait_until, within
from zbus.codec import decode, encode
from zbus.discovery.announcer import Announcer
from zbus.discovery.directory import Directory
from zbus.ids import WorkerName, new_incarnation, new_session
from zbus.protocol.messages import Execute, Kind, Status
from zbus.registry.file import FileRegistry
from zbus.registry.records import Records, WorkerRecord
from zbus.transport.client import Client, Peer, PeerState
from zbus.transport.profile import check_limits
from zbus.transport.pubsub import Hub
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory

pytestmark = pytest.mark.alone

CROWD = 500


def test_two_jobs_of_one_name_on_one_host_do_not_meet(tmp_path, short_dir, monkeypatch):
    """Report 11: the same experiment and trial under two roots share no socket path, and each has its own ranks."""
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    with (
        launch(tmp_path / "a", {"actor": probes(2)}, trial="t") as one,
        launch(tmp_path / "b", {"actor": probes(2)}, trial="t") as two,
    ):
        pids = [[answer["pid"] for answer in bus.group("actor").whoami()] for bus in (one, two)]
        assert len({*pids[0], *pids[1]}) == 4
        assert len(list(short_dir.iterdir())) == 2
        for word, bus in (("one", one), ("two", two)):
            bus.group("actor").note(word)
        assert one.group("actor").notes() == [["one"], ["one"]]
        assert two.group("actor").notes() == [["two"], ["two"]]


def call(caller: Client, peer: Peer) -> None:
    """Make a call and wait for its answer."""
    told: list[object] = []
    caller.place(
        [peer], "main", [encode(7)], 1, deadline_s=scaled(10), sink=lambda *one: told.append(decode(one[2].payload))
    )
    assert caller.wait(lambda: bool(told), scaled(10))
    assert told == [7]


@pytest.mark.ci
def test_five_hundred_callers_say_hello_to_one_worker_at_once(short_dir):
    """Row 35: each is welcomed, and calls that are under way go on in time."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 8 * CROWD:
        pytest.skip(f"the hard descriptor limit is {hard}")
    check_limits(CROWD)
    factory = SocketFactory(max_sockets=8 * CROWD)

    def run(request: Execute) -> None:
        server.finish(request, 0, Kind.RESULT, Status.OK, [bytes(buffer) for buffer in request.buffers])

    server = Server(name=WorkerName("actor", 0), incarnation=1, factory=factory, lanes={"main": 1, "ctl": 4},
                    dispatch=run, guest_lanes=None)  # fmt: skip
    endpoints = {link: [server.bind(link, f"ipc://{short_dir}/{link}")] for link in ("main", "ctl")}
    server.start()
    serving = threading.Thread(target=server.run, args=(run,))
    serving.start()
    caller = Client(session=new_session(), epoch=1, factory=factory)
    crowd: list[Client] = []
    try:
        peer = caller.connect(WorkerName("actor", 0), 1, endpoints)
        assert caller.wait(lambda: peer.state is PeerState.READY, scaled(10))
        crowd = [Client(session=new_session(), epoch=0, factory=factory) for _ in range(CROWD)]
        began = time.monotonic()
        peers = [one.connect(WorkerName("actor", 0), 1, {"main": endpoints["main"]}) for one in crowd]
        slowest = 0.0
        while any(one.state is not PeerState.READY for one in peers):
            asked = time.monotonic()
            assert asked - began < within(30), sum(one.state is PeerState.READY for one in peers)
            call(caller, peer)
            slowest = max(slowest, time.monotonic() - asked)
        print(f"{CROWD} callers welcomed in {time.monotonic() - began:.2f} s; slowest call meanwhile {slowest:.2f} s")
        assert slowest < within(5)
    finally:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(Client.close, [*crowd, caller]))
        server.stop()
        serving.join(scaled(10))
        server.close()
        assert factory.close()


@pytest.mark.ci
def test_a_thousand_ranks_that_register_at_once_are_all_seen(tmp_path, short_dir):
    """Report 17: half of a thousand engines were lost when they came together. Here all are found."""
    records = Records(FileRegistry(tmp_path / "registry"))
    factory = SocketFactory(max_sockets=256)
    hub = Hub(factory, pub=[f"ipc://{short_dir}/pub"], sub=[f"ipc://{short_dir}/sub"])
    hub.start()
    endpoints = (hub.pub_endpoints, hub.sub_endpoints)
    directory = Directory(records, factory=factory, hub=endpoints).start()
    announcers = [Announcer(factory, number, hub_pub=hub.pub_endpoints) for number in range(20)]
    try:
        wait_until(lambda: all(one.listened for one in announcers), what="the announcers to be heard")

        def register(number: int) -> None:
            for rank in range(number * 50, number * 50 + 50):
                record = WorkerRecord(
                    role="actor", rank=rank, world_size=1000, local_rank=0, start=0, incarnation=new_incarnation(0),
                    agent=f"actor.{number}", host="h", pid=os.getpid(), pid_start=1, main=["ipc://x"], ctl=["ipc://x"],
                )  # fmt: skip
                records.publish_worker(record)
                announcers[number].joined(record)

        began = time.monotonic()
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(register, range(20)))
        written = time.monotonic() - began
        seen = directory.wait_for(lambda view: len(view.workers) == 1000, scaled(20))
        print(f"1000 records written in {written:.2f} s, all seen {time.monotonic() - began:.2f} s after the first")
        assert seen, f"{len(directory.view.workers)} of 1000 are seen"
        assert {name.rank for name in directory.view.workers} == set(range(1000))
    finally:
        for one in announcers:
            one.close()
        directory.close()
        hub.stop()
        records.close()
        assert factory.close()


def test_the_names_of_socket_directories_follow_the_trial(tmp_path, short_dir, monkeypatch):
    """One trial finds its own directory again; another one, however alike, has another."""
    from zbus.transport.endpoints import RuntimeDir

    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    paths = [RuntimeDir.create(Path(tmp_path / root / "demo" / "t")).path for root in ("a", "b", "a")]
    assert paths[0] == paths[2] != paths[1]
