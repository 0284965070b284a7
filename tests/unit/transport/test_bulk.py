"""Bulk data over real sockets: what is offered arrives, who lies is refused, nothing is left behind."""

import hashlib
import itertools
import os
import random
import resource
import socket
import threading
from pathlib import Path

import pytest
import zmq

from waiting import scaled, wait_until
from zbus.errors import TransportError
from zbus.protocol.parts import MAX_RANGE, Kind, PartHeader, Status, pack, unpack
from zbus.protocol.puller import Ending, Patience
from zbus.transport.bulk import Bulk, PullFailed, Range
from zbus.transport.sockets import SocketFactory

KEY = bytes(range(16))
QUICK = Patience(again=200_000_000, again_most=400_000_000, stall=1_500_000_000, absent=1_500_000_000)


@pytest.fixture
def bulks():
    """Return a maker of ``Bulk`` objects, each with sockets of its own as in a process of its own."""
    made = []

    def make(*, max_sockets=None, **options):
        factory = SocketFactory(max_sockets=max_sockets)
        bulk = Bulk(factory, **options)
        made.append((bulk, factory))
        return bulk

    yield make
    for bulk, factory in made:
        bulk.close()
        assert factory.close(), factory.open_sockets


@pytest.fixture(params=["tcp", "ipc"])
def address(request, tmp_path):
    """Return where to bind, over each transport."""
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/data"


def whole(data):
    """Return the range of all of a buffer."""
    return Range(0, 0, len(data), len(data))


def test_what_is_offered_arrives_whole_and_in_part(bulks, address):
    """Several buffers under one key, read by range, in one pull, into memory of the asker's."""
    owner, asker = bulks(), bulks()
    owner.bind(address)
    large, small = random.Random(1).randbytes(5_000_001), b"small"
    owner.offer(KEY, large, small)
    into = [bytearray(len(large)), bytearray(2), bytearray(1000)]
    asker.fetch(
        owner.endpoints,
        KEY,
        [whole(large), Range(1, 3, 2, 5), Range(0, 77, 1000, len(large))],
        [memoryview(part) for part in into],
        deadline_s=scaled(30),
    )
    assert hashlib.sha256(into[0]).digest() == hashlib.sha256(large).digest()
    assert (into[1], into[2]) == (b"ll", large[77:1077])
    assert asker.statistics()["bulk_pulled_bytes"] == owner.statistics()["bulk_given_bytes"] == len(large) + 1002
    assert owner.statistics()["bulk_offered_bytes"] == len(large) + 5


def test_many_pulls_of_many_threads_at_once(bulks):
    """Eight threads pull from two owners; each gets what it asked for, and nothing waits for a timer to be noticed."""
    owners = [bulks(), bulks()]
    asker = bulks(patience=Patience(again=10**15, again_most=10**15))
    data = {}
    for number, owner in enumerate(owners):
        owner.bind("tcp://127.0.0.1:0")
        for key in range(8):
            data[number, key] = random.Random(f"{number}{key}").randbytes(300_000 + key)
            owner.offer(bytes([key]) * 16, data[number, key])
    failed = []

    def run(seed):
        chance = random.Random(seed)
        for _ in range(30):
            number, key = chance.randrange(2), chance.randrange(8)
            wanted = data[number, key]
            into = bytearray(len(wanted))
            asker.fetch(
                owners[number].endpoints, bytes([key]) * 16, [whole(wanted)], [memoryview(into)], deadline_s=scaled(30)
            )
            if into != wanted:
                failed.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_what_is_withdrawn_or_never_was_is_refused_with_the_owners_word(bulks):
    """The error names the owner's address, how much came, and what it said; it is counted there."""
    owner, asker = bulks(), bulks()
    owner.bind("tcp://127.0.0.1:0")
    owner.offer(KEY, bytes(10))
    owner.withdraw(KEY)
    wait_until(lambda: not owner.statistics()["bulk_offered_bytes"], what="the withdrawal")
    with pytest.raises(PullFailed, match="offers nothing of that name") as caught:
        asker.fetch(owner.endpoints, KEY, [whole(bytes(10))], [memoryview(bytearray(10))])
    assert caught.value.how is Ending.REFUSED
    assert owner.endpoints[0] in str(caught.value)
    assert owner.statistics()["bulk_refused_ask_unknown_key"] == 1


def test_an_owner_that_is_not_there_ends_a_pull(bulks):
    """Nobody at the address, or no address that this host could reach: an error in bounded time."""
    asker = bulks(patience=QUICK)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # holds the port, so that no other test's owner gets it
        endpoint = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(PullFailed) as caught:
            asker.fetch([endpoint], KEY, [whole(b"x")], [memoryview(bytearray(1))])
    assert caught.value.how is Ending.ABSENT
    with pytest.raises(TransportError, match="no way to the owner"):
        asker.fetch(["ipc:///nowhere/data"], KEY, [whole(b"x")], [memoryview(bytearray(1))])


def test_an_owner_that_goes_and_one_that_comes_back(bulks):
    """A pull outlives a lost connection if the owner is back in time; a new connection is made after a failure."""
    owner, asker = bulks(), bulks(patience=QUICK)
    endpoint = owner.bind("tcp://127.0.0.1:0")
    owner.close()
    into = bytearray(3)
    pull = asker.pull([endpoint], KEY, [whole(b"abc")], [memoryview(into)])
    again = bulks()
    again.offer(KEY, b"abc")
    again.bind(endpoint)
    assert pull.wait(scaled(20))
    pull.check()
    assert into == b"abc"


def test_known_deaths_end_pulls_at_once(bulks):
    """Whoever knows that an owner is gone says so, and nobody waits for its silence."""
    listener = bulks()
    endpoint = listener.bind("tcp://127.0.0.1:0")
    asker = bulks()
    listener.offer(KEY, bytes(64 << 20))
    ended = threading.Event()
    pull = asker.pull(
        [endpoint], bytes(16), [whole(bytes(9))], [memoryview(bytearray(9))], then=lambda _pull: ended.set()
    )
    asker.owner_gone([endpoint], "its exit was seen")
    assert pull.wait(scaled(10))
    assert ended.wait(scaled(10))
    assert pull.how in {Ending.ABSENT, Ending.REFUSED}


def test_a_deadline_ends_a_pull_and_its_memory_is_left_alone(bulks):
    """An owner that answers nothing: the deadline ends it, and names how much came."""
    context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    asker = bulks()
    try:
        with pytest.raises(PullFailed, match="0 of 5 bytes came") as caught:
            asker.fetch([f"tcp://127.0.0.1:{port}"], KEY, [whole(b"12345")], [memoryview(bytearray(5))], deadline_s=0.3)
        assert caught.value.how is Ending.DEADLINE
    finally:
        context.destroy(0)


def lie(header, how):
    """Return the frames of an answer that is a lie."""
    part = header._replace(kind=Kind.PART)
    return {
        "short": [pack(part), bytes(header.nbytes - 1)],
        "long": [pack(part), bytes(header.nbytes + 7)],
        "no bytes": [pack(part)],
        "more frames": [pack(part), bytes(header.nbytes), b"more"],
        "elsewhere": [pack(part._replace(offset=header.offset + 1)), bytes(header.nbytes)],
        "other key": [pack(part._replace(key=bytes(16))), bytes(header.nbytes)],
        "an ask": [pack(header)],
    }[how]


@pytest.mark.parametrize("how", ["short", "long", "no bytes", "more frames", "elsewhere", "other key", "an ask"])
def test_an_owner_that_lies_is_caught(bulks, how):
    """Bytes that are not what was asked for are written nowhere beyond their place, and the pull ends with an error."""
    context = zmq.Context()
    liar = context.socket(zmq.ROUTER)
    liar.rcvtimeo = int(scaled(20_000))
    port = liar.bind_to_random_port("tcp://127.0.0.1")
    asker = bulks()
    memory = bytearray(b"\x55" * 300)
    try:
        pull = asker.pull(
            [f"tcp://127.0.0.1:{port}"], KEY, [Range(0, 0, 100, 100)], [memoryview(memory)[100:200]],
            deadline_s=scaled(20),
        )  # fmt: skip
        peer, frame = liar.recv_multipart()
        for junk in ([b"junk"], [b"", b"x" * 100], [pack(unpack(frame)._replace(kind=Kind.PART, serial=999)), b"?"]):
            liar.send_multipart([peer, *junk])
        liar.send_multipart([peer, *lie(unpack(frame), how)])
        assert pull.wait(scaled(20))
        assert pull.how is Ending.LIED
        assert memory[:100] == memory[200:] == b"\x55" * 100
        assert asker.statistics()["bulk_refused_no_part"] == 2
    finally:
        context.destroy(0)


def test_an_asker_that_lies_gets_nothing_and_delays_nobody(bulks):
    """Unknown keys, ranges outside, junk and floods are refused and counted; an honest asker is served meanwhile."""
    owner, asker = bulks(), bulks()
    endpoint = owner.bind("tcp://127.0.0.1:0")
    data = os.urandom(8 << 20)
    owner.offer(KEY, data)
    context = zmq.Context()
    liar = context.socket(zmq.DEALER)
    liar.rcvtimeo = int(scaled(20_000))
    liar.sndhwm = liar.rcvhwm = 1
    try:
        liar.connect(endpoint)
        ask = PartHeader(Kind.ASK, 0, 1, 0, 10, len(data), KEY)
        for wrong, status in (
            (ask._replace(key=bytes(16)), Status.UNKNOWN_KEY),
            (ask._replace(buffer=1), Status.UNKNOWN_BUFFER),
            (ask._replace(offset=len(data)), Status.OUT_OF_RANGE),
            (ask._replace(nbytes=MAX_RANGE + 1), Status.TOO_MUCH),
            (ask._replace(total=5), Status.OTHER_SIZE),
        ):
            liar.send(pack(wrong))
            assert unpack(liar.recv()) == wrong._replace(kind=Kind.REFUSED, status=status)
        for junk in ([b""], [b"junk", b"junk"], [pack(ask._replace(kind=Kind.PART))]):
            liar.send_multipart(junk)
        flood = pack(ask._replace(nbytes=MAX_RANGE))
        for _ in range(400):  # 1.6 GB that it never reads
            liar.send(flood)
        into = bytearray(len(data))
        asker.fetch([endpoint], KEY, [whole(data)], [memoryview(into)], deadline_s=scaled(30))
        assert into == data
        wait_until(lambda: owner.statistics().get("bulk_refused_flood"), what="the flood to be cut off")
        counts = owner.statistics()
        assert (counts["bulk_refused_ask_frames"], counts["bulk_refused_no_part"], counts["bulk_refused_no_ask"]) == (
            1, 1, 1,
        )  # fmt: skip
    finally:
        context.destroy(0)


def test_what_waits_for_a_peer_goes_with_it_though_nobody_else_asks(bulks):
    """A reader that stops and ends leaves no answers behind, and with them no memory."""
    owner = bulks()
    endpoint = owner.bind("tcp://127.0.0.1:0")
    data = bytes(8 << 20)
    owner.offer(KEY, data)
    context = zmq.Context()
    silent = context.socket(zmq.DEALER)
    silent.rcvhwm = 1
    try:
        silent.connect(endpoint)
        for number in range(400):
            silent.send(pack(PartHeader(Kind.ASK, 0, number, 0, MAX_RANGE, len(data), KEY)))
        wait_until(lambda: owner._counter._parked, what="answers to wait")
        wait_until(lambda: not owner._reactor._to_check, what="the last ask to be taken")
        silent.close(0)
        wait_until(lambda: not owner._counter._parked, what="answers to go", timeout_s=10)
    finally:
        context.destroy(0)


def test_a_cancelled_pull_and_a_closed_process_leave_nothing(bulks):
    """After cancel nothing is written; close ends what is open with an error, and no thread or socket stays."""
    owner, asker = bulks(), bulks()
    owner.bind("tcp://127.0.0.1:0")
    data = bytes(32 << 20)
    owner.offer(KEY, data)
    into = bytearray(len(data))
    pull = asker.pull(owner.endpoints, KEY, [whole(data)], [memoryview(into)])
    pull.cancel()
    into.clear()  # a view of it that was kept would refuse this
    with pytest.raises(PullFailed, match="given up here"):
        pull.check()
    late = asker.pull(owner.endpoints, bytes(16), [whole(data)], [memoryview(bytearray(len(data)))])
    asker.close()
    assert late.how in {Ending.ABSENT, Ending.REFUSED}
    with pytest.raises(TransportError, match="closed"):
        asker.pull(owner.endpoints, KEY, [whole(b"x")], [memoryview(bytearray(1))])
    assert not [thread for thread in threading.enumerate() if thread is asker._thread]
    owner.close()


def test_memory_that_does_not_fit_is_refused_before_anything_is_asked(bulks):
    """Too little, too much or read-only memory is the caller's mistake."""
    asker = bulks()
    for memory in (memoryview(bytearray(3)), memoryview(bytearray(5)), memoryview(bytes(4))):
        with pytest.raises(ValueError, match="writable memory"):
            asker.pull(["tcp://127.0.0.1:1"], KEY, [Range(0, 0, 4, 4)], [memory])


@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_without_a_socket_for_its_connection_a_pull_ends_with_the_reason(bulks, spare):
    """Whichever of a connection's sockets cannot be made: its pull alone ends, by name, and nothing stays open."""
    owners = [bulks() for _ in range(2)]
    for owner in owners:
        owner.bind("tcp://127.0.0.1:0")
        owner.offer(KEY, b"abc")
    asker = bulks(max_sockets=3 + spare)  # a connection takes three: its own, and two for its monitor
    into = bytearray(3)
    asker.fetch(owners[0].endpoints, KEY, [whole(b"abc")], [memoryview(into)], deadline_s=scaled(30))
    before = asker._factory.open_sockets
    if spare < 3:
        with pytest.raises(PullFailed, match="sockets of this process are in use") as caught:
            asker.fetch(owners[1].endpoints, KEY, [whole(b"abc")], [memoryview(bytearray(3))])
        assert caught.value.how is Ending.ABSENT
        assert asker._factory.open_sockets == before
    else:
        asker.fetch(owners[1].endpoints, KEY, [whole(b"abc")], [memoryview(bytearray(3))], deadline_s=scaled(30))
    asker.fetch(owners[0].endpoints, KEY, [whole(b"abc")], [memoryview(into)], deadline_s=scaled(30))


def is_open(descriptor):
    """Tell whether it is; one that listed the others is not any more."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_without_a_descriptor_a_pull_ends_and_comes_again_when_there_is_one(bulks):
    """A process at its limit of descriptors is told so by each new connection; those that stand go on."""
    owners = [bulks() for _ in range(2)]
    for owner in owners:
        owner.bind("tcp://127.0.0.1:0")
        owner.offer(KEY, b"abc")
    asker = bulks()

    def fetch(owner):
        into = bytearray(3)
        asker.fetch(owner.endpoints, KEY, [whole(b"abc")], [memoryview(into)], deadline_s=scaled(30))
        return into

    assert fetch(owners[0]) == b"abc"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    listed = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    used = {number for number in listed if is_open(number)}
    free = itertools.filterfalse(used.__contains__, itertools.count())
    try:
        for limit in itertools.islice(free, 2):  # none is left for the socket, then none for its monitor
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            with pytest.raises(PullFailed, match="no file descriptor left"):
                fetch(owners[1])
            assert fetch(owners[0]) == b"abc"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert fetch(owners[1]) == b"abc"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it shall be seen: it is raised
def test_pulls_behind_one_that_fails_unforeseen_are_not_lost(bulks, monkeypatch):
    """Whoever waits for a connection is told if the thread that would make it dies, and later ones are refused."""
    asker, owner = bulks(patience=Patience(absent=10**15, stall=10**15)), bulks()
    owner.bind("tcp://127.0.0.1:0")
    monkeypatch.setattr("zbus.transport.bulk.MOST_DATA_PEERS", 1)
    asked = asker.pull(["tcp://127.0.0.1:1"], KEY, [whole(b"x")], [memoryview(bytearray(1))])
    waits = asker.pull(owner.endpoints, KEY, [whole(b"x")], [memoryview(bytearray(1))])
    assert waits.how is None

    def broken(_now):
        msg = "planted"
        raise RuntimeError(msg)

    asker._reactor.add_ticker(broken)
    for pull in (asked, waits):
        assert pull.wait(scaled(20))
        assert pull.how is Ending.ABSENT
        assert "planted" in pull.evidence
    with pytest.raises(TransportError, match="planted"):
        asker.pull(owner.endpoints, KEY, [whole(b"x")], [memoryview(bytearray(1))])
