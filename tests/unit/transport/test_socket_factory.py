import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from waiting import scaled, wait_until, within
from zbus.errors import ConfigError, TransportError
from zbus.transport import profile
from zbus.transport.multipart import Receiver, send
from zbus.transport.profile import check_libzmq, check_limits, descriptors_needed, sockets_needed
from zbus.transport.sockets import SocketFactory, read_event


def test_sockets_beyond_the_limit_are_refused_by_name_and_the_others_go_on():
    """MAX_SOCKETS: the message says how to size it; live peers are untouched."""
    factory = SocketFactory(max_sockets=8)
    router, dealer = factory.router("main"), factory.dealer("main")
    factory.connect(dealer, factory.bind(router, "tcp://127.0.0.1:0"))
    more = []
    with pytest.raises(TransportError, match="all 8 sockets") as caught:
        more.extend(factory.dealer("ctl") for _ in range(20))
    assert "check_limits" in caught.value.hint
    wait_until(lambda: send(dealer, [b"alive"]), what="the connection")
    for socket in (router, dealer, *more):
        socket.close()
    assert factory.close()


def test_256_peers_fit_a_factory_of_the_default_size():
    """Every socket of 256 peers, two monitored DEALERs each, within MAX_SOCKETS and the descriptor limit."""
    limits = check_limits(256)
    factory = SocketFactory(max_sockets=limits.max_sockets)
    before = descriptors()
    sockets = []
    router = factory.router("main")
    endpoint = factory.bind(router, "tcp://127.0.0.1:0")
    for _ in range(256):
        for purpose in ("main", "ctl"):
            dealer = factory.dealer(purpose)
            sockets += [dealer, factory.monitor(dealer)]
            factory.connect(dealer, endpoint)
    receiver = Receiver(router)
    for dealer in sockets[::2]:
        wait_until(lambda dealer=dealer: send(dealer, [b"x"]), what="a connection")
    for _ in range(512):
        wait_until(receiver.recv, what="a message")
    used = descriptors() - before
    own_end = 512  # the accepted connections belong to the other side
    assert used - own_end <= limits.descriptors
    for socket in (router, *sockets):
        socket.close()
    assert factory.close()


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


LIMIT_SCRIPT = """
import resource, sys
from zbus.errors import ConfigError
from zbus.transport.profile import check_limits
soft, hard, peers = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    limits = check_limits(peers)
except ConfigError as error:
    print("refused", error.exit_code, error, "|", error.hint)
else:
    print("granted", limits.soft, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def limits_of(soft: int, hard: int, peers: int) -> str:
    """Check limits in a process that has these."""
    command = [sys.executable, "-c", LIMIT_SCRIPT, str(soft), str(hard), str(peers)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=scaled(60)).stdout


def test_the_soft_descriptor_limit_is_raised_to_the_hard_one():
    """A shell's 1024 does not stop a run that the system would allow."""
    assert limits_of(1024, 4096, 256) == "granted 4096 4096\n"


def test_a_descriptor_limit_too_small_is_refused_with_the_number_needed():
    """Refused before the first socket, exit code 2, with both numbers and the command to type."""
    text = limits_of(64, 64, 256)
    needed = str(descriptors_needed(256))
    assert text.startswith("refused 2 ")
    assert needed in text
    assert "64" in text
    assert f"ulimit -Hn {needed}" in text


def test_needs_grow_with_peers():
    """The budget covers a monitored DEALER for each of two lanes: 3 sockets and 4 descriptors each."""
    assert sockets_needed(101) - sockets_needed(100) >= 6
    assert descriptors_needed(101) - descriptors_needed(100) >= 8


def test_no_descriptor_left_is_said_and_leaves_live_peers_alone():
    """Row 59: a process at its descriptor limit refuses the new socket and keeps the old ones."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    factory = SocketFactory(max_sockets=64)
    router, dealer = factory.router("main"), factory.dealer("main")
    factory.connect(dealer, factory.bind(router, "tcp://127.0.0.1:0"))
    wait_until(lambda: send(dealer, [b"1"]), what="the connection")
    hogs = []
    more = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 20, hard))
        with pytest.raises(OSError, match="Too many open files"):
            hogs.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(10_000))
        with pytest.raises(TransportError, match="no file descriptor left"):
            more.extend(factory.dealer("ctl") for _ in range(60))
        assert send(dealer, [b"2"])
        receiver = Receiver(router)
        assert [wait_until(receiver.recv, what="a message")[1] for _ in range(2)] == [b"1", b"2"]
    finally:
        for hog in hogs:
            os.close(hog)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for socket in (router, dealer, *more):
            socket.close()
    assert factory.close()


def test_an_old_libzmq_is_refused_by_version(monkeypatch):
    """The floor is checked when the first factory is made."""
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 2, 5))
    with pytest.raises(ConfigError, match=r"libzmq 4\.2\.5.*4\.3\.5"):
        SocketFactory()
    monkeypatch.undo()
    check_libzmq()


def test_a_libzmq_without_ipc_is_refused(monkeypatch):
    """Capabilities are checked too."""
    monkeypatch.setattr(profile.zmq, "has", lambda capability: capability != "ipc")
    with pytest.raises(ConfigError, match="without ipc"):
        check_libzmq()


def test_closing_with_a_socket_open_elsewhere_does_not_wait():
    """A thread stuck in a poll does not hold the end of the process; its next call fails."""
    factory = SocketFactory(max_sockets=8)
    dealer = factory.dealer("main")
    outcome = []

    def stuck() -> None:
        try:
            dealer.poll(60_000)
            Receiver(dealer).recv()
        except (TransportError, zmq.ZMQError) as error:
            outcome.append(error)
        dealer.close()

    thread = threading.Thread(target=stuck)
    thread.start()
    began = time.monotonic()
    assert not factory.close()
    assert time.monotonic() - began < within(1)
    thread.join(scaled(10))
    assert not thread.is_alive()
    assert outcome


def test_a_closed_factory_makes_no_socket():
    """Use after the end is an error, not a crash; closing twice is harmless."""
    factory = SocketFactory(max_sockets=8)
    assert factory.close()
    assert factory.close()
    with pytest.raises(TransportError, match="closed"):
        factory.dealer("main")


def test_a_forked_child_is_told_to_make_its_own_factory():
    """Row 19: the child gets a clear error, the parent is unharmed."""
    factory = SocketFactory(max_sockets=8)
    pid = os.fork()
    if pid == 0:
        try:
            factory.dealer("main")
        except TransportError:
            os._exit(5)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    factory.dealer("main").close()
    assert factory.close()


def test_bind_says_what_was_bound_and_what_went_wrong(short_dir):
    """Port 0 becomes a number; a taken port, a foreign address and a missing directory are named."""
    factory = SocketFactory(max_sockets=16)
    first, second = factory.router("main"), factory.router("main")
    endpoint = factory.bind(first, "tcp://127.0.0.1:0")
    assert endpoint.startswith("tcp://127.0.0.1:")
    assert not endpoint.endswith(":0")
    with pytest.raises(TransportError, match="in use"):
        factory.bind(second, endpoint)
    with pytest.raises(TransportError, match="directory of the socket does not exist"):
        factory.bind(second, f"ipc://{short_dir}/none/s")
    with pytest.raises(TransportError, match="cannot connect"):
        factory.connect(second, "nonsense")
    first.close()
    second.close()
    assert factory.close()


def test_socket_files_go_when_the_factory_closes(short_dir):
    """The files of ipc endpoints, which libzmq leaves behind, are removed."""
    factory = SocketFactory(max_sockets=8)
    router = factory.router("main")
    factory.bind(router, f"ipc://{short_dir}/s")
    assert (short_dir / "s").is_socket()
    router.close()
    assert factory.close()
    assert list(short_dir.iterdir()) == []


def test_a_monitor_tells_when_a_peer_comes_and_goes():
    """Handshake done and disconnected are events with an endpoint."""
    factory = SocketFactory(max_sockets=16)
    router, dealer = factory.router("main"), factory.dealer("main")
    monitor = factory.monitor(dealer)
    endpoint = factory.bind(router, "tcp://127.0.0.1:0")
    factory.connect(dealer, endpoint)
    up = wait_until(lambda: read_event(monitor), what="an event")
    assert up.connected
    assert up.endpoint == endpoint
    assert "handshake_succeeded" in str(up)
    router.close()
    wait_until(lambda: (event := read_event(monitor)) and event.lost, what="the loss")
    monitor.close()
    dealer.close()
    assert factory.close()


def test_a_pair_wakes_another_thread():
    """Both ends of a pair are connected from the start."""
    factory = SocketFactory(max_sockets=8)
    near, far = factory.pair()
    assert send(near, [b"wake"])
    assert wait_until(Receiver(far).recv, what="the wake-up") == [b"wake"]
    near.close()
    far.close()
    assert factory.close()
