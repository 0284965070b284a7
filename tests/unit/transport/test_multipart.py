import threading

import numpy as np
import pytest
import zmq

from waiting import wait_until
from zbus.errors import TransportError
from zbus.transport.multipart import COPY_LIMIT, PeerGone, Receiver, TornMessage, require_contiguous, send


@pytest.fixture
def link(factory):
    """A connected (dealer, router) pair; the router's first frames are the routing id."""
    router, dealer = factory.router("main"), factory.dealer("main")
    factory.connect(dealer, factory.bind(router, "tcp://127.0.0.1:0"))
    wait_until(lambda: send(dealer, [b"hello"]), what="the connection")
    take(Receiver(router))
    yield dealer, router
    dealer.close()
    router.close()


def take(receiver: Receiver) -> list:
    """Wait for the next message."""
    return wait_until(receiver.recv, what="a message")


def test_a_message_arrives_whole_with_frames_of_every_size(link):
    """Empty, small and large frames arrive as they were sent, in order."""
    dealer, router = link
    frames = [b"", b"h", b"x" * 33, b"y" * 8191, b"z" * 8192, bytes(COPY_LIMIT - 1), bytes(COPY_LIMIT) + b"end"]
    assert send(dealer, frames)
    received = take(Receiver(router))[1:]
    assert [bytes(frame) for frame in received] == frames


def test_small_frames_come_as_bytes_and_large_ones_as_views(link):
    """A routing id or header can be a dict key; a tensor is not copied."""
    dealer, router = link
    assert send(dealer, [b"small", bytes(100_000)])
    routing, small, large = take(Receiver(router))
    assert type(routing) is bytes
    assert type(small) is bytes
    assert isinstance(large, memoryview)
    assert np.frombuffer(large, np.uint8).sum() == 0


def test_more_frames_than_any_cache_holds(link):
    """The number of frames is not limited."""
    dealer, router = link
    frames = [str(number).encode() for number in range(300)]
    assert send(dealer, frames)
    assert take(Receiver(router))[1:] == frames


def released() -> memoryview:
    """Return a view whose memory was given back."""
    view = memoryview(b"abc")
    view.release()
    return view


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (memoryview(np.arange(12)[::2]), BufferError),
        (memoryview(np.arange(12).reshape(3, 4)[:, :2]), BufferError),
        (memoryview(np.asfortranarray(np.ones((3, 4)))), BufferError),
        (released(), BufferError),
        ("text", TypeError),
        (None, TypeError),
    ],
    ids=["strided", "sliced", "fortran", "released", "str", "none"],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_frame_that_cannot_be_sent_never_poisons_the_next_message(link, bad, error, position):
    """Refused before the first frame leaves (Z3): the next message is itself."""
    dealer, router = link
    frames = [b"head", b"body", b"tail"]
    frames[position] = bad
    with pytest.raises(error):
        send(dealer, frames)
    assert send(dealer, [b"good", b"message"])
    receiver = Receiver(router)
    assert take(receiver)[1:] == [b"good", b"message"]
    assert receiver.recv() is None


@pytest.mark.parametrize(
    "array",
    [np.ones((3, 4)), np.float64(3.5).reshape(()), np.empty((0, 5)), np.ones(COPY_LIMIT, np.uint8)],
    ids=["2d", "0d", "empty", "large"],
)
def test_any_contiguous_array_can_be_a_frame(link, array):
    """Shape does not matter, memory order does; read-only memory is fine."""
    dealer, router = link
    array = np.asarray(array)
    array.setflags(write=False)
    view = memoryview(array)
    require_contiguous([view])
    assert send(dealer, [b"h", view])
    assert bytes(take(Receiver(router))[2]) == array.tobytes()


def test_no_frames_is_a_mistake(link):
    """A message has at least one frame."""
    with pytest.raises(ValueError, match="at least one frame"):
        send(link[0], [])


def test_nobody_connected_means_false_and_nothing_is_kept(factory):
    """A DEALER without a peer accepts nothing: what it refused never arrives later."""
    dealer, router = factory.dealer("main"), factory.router("main")
    assert not send(dealer, [b"early", b"bird"])
    factory.connect(dealer, factory.bind(router, "tcp://127.0.0.1:0"))
    wait_until(lambda: send(dealer, [b"later"]), what="the connection")
    assert take(Receiver(router))[1:] == [b"later"]
    dealer.close()
    router.close()


def test_an_unknown_routing_id_is_said_at_once(link):
    """A ROUTER never swallows a reply: EHOSTUNREACH becomes PeerGone, and the socket stays good."""
    dealer, router = link
    with pytest.raises(PeerGone):
        send(router, [b"nobody", b"x", b"y"])
    assert send(dealer, [b"ping"])
    routing, _ = take(Receiver(router))
    assert send(router, [routing, b"pong"])
    assert take(Receiver(dealer)) == [b"pong"]


def test_a_peer_that_left_is_gone_for_its_router(link):
    """After the peer closed, sends to it fail instead of vanishing."""
    dealer, router = link
    assert send(dealer, [b"ping"])
    routing, _ = take(Receiver(router))
    dealer.close()

    def gone() -> bool:
        try:
            send(router, [routing, b"x"])
        except PeerGone:
            return True
        return False

    wait_until(gone, what="the end of the peer")


def test_a_closed_socket_says_so(factory):
    """Both directions raise TransportError on a closed socket."""
    dealer = factory.dealer("main")
    receiver = Receiver(dealer)
    dealer.close()
    with pytest.raises(TransportError):
        send(dealer, [b"x"])
    with pytest.raises(TransportError):
        receiver.recv()


def test_an_idle_socket_has_no_message(link):
    """EAGAIN is None, again and again."""
    receiver = Receiver(link[1])
    assert [receiver.recv() for _ in range(3)] == [None, None, None]


def test_an_exception_the_gate_does_not_defer_completes_the_message(link, monkeypatch):
    """A raising handler of another signal cannot tear a message that has begun."""
    import zbus.transport.multipart as module

    dealer, router = link
    real, count = module._send, 0

    def striking(*args):
        nonlocal count
        real(*args)
        count += 1
        if count == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_send", striking)
    frames = [str(number).encode() for number in range(8)]
    with pytest.raises(KeyboardInterrupt):
        send(dealer, frames)
    monkeypatch.undo()
    assert send(dealer, [b"next"])
    receiver = Receiver(router)
    assert take(receiver)[1:] == frames
    assert take(receiver)[1:] == [b"next"]


@pytest.mark.parametrize("frames", [2, 3, 6])
@pytest.mark.parametrize("at", [2, 3])
def test_a_peer_that_goes_between_two_frames_tears_nothing(factory, monkeypatch, frames, at):
    """The message is refused or lost with its connection; nothing of it comes later, the next one goes whole."""
    import zbus.transport.multipart as module

    if at > frames:
        pytest.skip("no such frame")
    router, dealer = factory.router("main"), factory.dealer("main")
    address = factory.bind(router, "tcp://127.0.0.1:0")
    factory.connect(dealer, address)
    wait_until(lambda: send(dealer, [b"hello"]), what="the connection")
    monitor = dealer.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
    real, tried = module._send, 0

    def losing(*args):
        nonlocal tried
        tried += 1
        if tried == at:
            router.close()
            assert monitor.poll(5000), "the connection did not end"
            dealer.getsockopt(zmq.EVENTS)  # lets the socket hear of it
        return real(*args)

    monkeypatch.setattr(module, "_send", losing)
    try:
        send(dealer, [str(number).encode() for number in range(frames)])
    finally:
        dealer.disable_monitor()
        monitor.close()
        monkeypatch.undo()
    successor = factory.router("main")
    factory.bind(successor, address)
    wait_until(lambda: send(dealer, [b"next", b"whole"]), what="the next connection")
    assert take(Receiver(successor))[1:] == [b"next", b"whole"]
    dealer.close()
    successor.close()


def test_lack_of_memory_in_the_middle_tells_the_owner_to_close_the_socket(link, monkeypatch):
    """What cannot be completed is not hidden."""
    import zbus.transport.multipart as module

    real = module._send
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError
        return real(*args)

    monkeypatch.setattr(module, "_send", failing)
    with pytest.raises(TornMessage, match="frame 3 of 4"):
        send(link[0], [b"1", b"2", b"3", b"4"])


@pytest.mark.parametrize("struck", [1, 2, 5])
def test_a_receive_struck_from_outside_the_gate_drops_the_message_whole(link, monkeypatch, struck):
    """Half a message is never returned: the rest is skipped and counted, the next one is whole."""
    import zbus.transport.multipart as module

    dealer, router = link
    frames = [str(number).encode() for number in range(8)]
    assert send(dealer, frames)
    assert send(dealer, [b"next"])
    real, count = module._recv, 0

    def striking(*args):
        nonlocal count
        part = real(*args)
        count += 1
        if count == struck:
            raise KeyboardInterrupt
        return part

    receiver = Receiver(router)
    monkeypatch.setattr(module, "_recv", striking)

    def interrupted() -> bool:
        try:
            receiver.recv()
        except KeyboardInterrupt:
            return True
        return False

    wait_until(interrupted, what="the interrupt")
    monkeypatch.undo()
    assert take(receiver)[1:] == [b"next"]
    assert receiver.dropped == 1


def test_two_threads_under_one_lock_share_a_socket(link):
    """A socket belongs to a lock; who holds it may send."""
    dealer, router = link
    lock = threading.Lock()

    def work(name: bytes) -> None:
        for number in range(200):
            with lock:
                assert send(dealer, [name, str(number).encode(), b"x" * 100])

    threads = [threading.Thread(target=work, args=(name,)) for name in (b"a", b"b")]
    for thread in threads:
        thread.start()
    receiver = Receiver(router)
    got = [take(receiver)[1:] for _ in range(400)]
    for thread in threads:
        thread.join()
    for name in (b"a", b"b"):
        assert [int(m[1]) for m in got if m[0] == name] == list(range(200))
