"""Everything zbus decides about sockets: options per purpose, and how many sockets and descriptors a run needs."""

from __future__ import annotations

import resource
from typing import Final, Literal

import msgspec
import zmq

from zbus.errors import ConfigError

__all__ = [
    "MIN_LIBZMQ",
    "MOST_DATA_PEERS",
    "PROFILES",
    "Limits",
    "Profile",
    "Purpose",
    "check_libzmq",
    "check_limits",
    "descriptors_needed",
    "sockets_needed",
]

Purpose = Literal["main", "ctl", "data", "discovery"]
"""What a socket carries: call lanes, control, bulk tensors, or hints."""

MIN_LIBZMQ: Final = (4, 3, 5)
"""Oldest libzmq that the tests have run on; older ones drop messages when heartbeats are on."""

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


class Profile(msgspec.Struct, frozen=True):
    """Options of one purpose. Times are milliseconds, sizes bytes.

    Attributes:
        max_frame: Largest frame taken from a peer; a larger one cuts the connection before any allocation.
        high_water: Messages queued per peer and direction; above any credit window, so it never limits.
        heartbeat_every: ZMTP ping interval.
        heartbeat_timeout: Silence after a ping that cuts the connection. A frame still on its way counts as silence,
            so where frames are big this must outlast the slowest frame.
    """

    max_frame: int
    high_water: int
    heartbeat_every: int
    heartbeat_timeout: int

    def common(self) -> tuple[tuple[int, int], ...]:
        """Return the (option, value) pairs every network socket of this purpose gets before bind or connect."""
        return (
            *WAITS_NEVER,
            (zmq.SNDHWM, self.high_water),
            (zmq.RCVHWM, self.high_water),
            (zmq.MAXMSGSIZE, self.max_frame),
            (zmq.HEARTBEAT_IVL, self.heartbeat_every),
            (zmq.HEARTBEAT_TIMEOUT, self.heartbeat_timeout),
            (zmq.HEARTBEAT_TTL, self.heartbeat_timeout),
            *_NETWORK,
        )


WAITS_NEVER: Final = ((zmq.LINGER, 0), (zmq.SNDTIMEO, 0), (zmq.RCVTIMEO, 0))
"""No send, receive or close of any socket ever waits; callers poll."""

_NETWORK: Final = (
    (zmq.HANDSHAKE_IVL, 5_000),
    (zmq.RECONNECT_IVL, 20),
    (zmq.RECONNECT_IVL_MAX, 2_000),
    (zmq.CONNECT_TIMEOUT, 5_000),
    (zmq.BACKLOG, 1_024),
    (zmq.IPV6, 1),
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 5),
    (zmq.TCP_KEEPALIVE_INTVL, 5),
    (zmq.TCP_KEEPALIVE_CNT, 3),
    # Bytes unacknowledged by a vanished host cut the connection too, which keepalive (idle connections only) does not.
    (zmq.TCP_MAXRT, 30_000),
)

PROFILES: Final[dict[Purpose, Profile]] = {
    "main": Profile(max_frame=4 * _GIB, high_water=100_000, heartbeat_every=10_000, heartbeat_timeout=120_000),
    "ctl": Profile(max_frame=64 * _MIB, high_water=100_000, heartbeat_every=2_000, heartbeat_timeout=10_000),
    # Parts of at most 4 MiB. Those that libzmq queues for a peer pin the memory they are read from: few, therefore.
    "data": Profile(max_frame=16 * _MIB, high_water=64, heartbeat_every=10_000, heartbeat_timeout=120_000),
    "discovery": Profile(max_frame=_MIB, high_water=10_000, heartbeat_every=2_000, heartbeat_timeout=10_000),
}
"""One profile per purpose."""

# Per peer: `main` and `ctl`, each a DEALER with a monitor. A monitored DEALER is 3 sockets and 4 descriptors; a fifth
# stands for the moment a lost connection is made anew.
_SOCKETS_PER_PEER: Final = 2 * 3
_DESCRIPTORS_PER_PEER: Final = 2 * 5
# A controller asks its agents to stop, and may have a few connections to replaced incarnations that are not closed yet.
_OTHER_PEERS: Final = 16
# `data` is connected on first use, and only to so many peers at once (`bulk`): 3 sockets and 5 descriptors as above.
MOST_DATA_PEERS: Final = 64
"""Owners of bulk data that a process is connected to at once."""

_OWN_SOCKETS: Final = 64 + _OTHER_PEERS * _SOCKETS_PER_PEER + MOST_DATA_PEERS * 3
_OWN_DESCRIPTORS: Final = 128 + _OTHER_PEERS * _DESCRIPTORS_PER_PEER
_DESCRIPTORS_PER_DATA_PEER: Final = 5


class Limits(msgspec.Struct, frozen=True):
    """What a process that connects to ``peers`` workers was granted.

    Attributes:
        peers: Workers it was sized for.
        max_sockets: Value for ``SocketFactory(max_sockets=…)``.
        descriptors: Descriptors needed at most.
        soft, hard: The process's RLIMIT_NOFILE after raising.
    """

    peers: int
    max_sockets: int
    descriptors: int
    soft: int
    hard: int


def sockets_needed(peers: int) -> int:
    """Return how many ZeroMQ sockets a process connected to ``peers`` workers may have open."""
    return _OWN_SOCKETS + _SOCKETS_PER_PEER * peers


def descriptors_needed(peers: int) -> int:
    """Return how many file descriptors a process connected to ``peers`` workers may have open.

    The owners of bulk data are among those workers.
    """
    data = _DESCRIPTORS_PER_DATA_PEER * min(peers, MOST_DATA_PEERS)
    return _OWN_DESCRIPTORS + _DESCRIPTORS_PER_PEER * peers + data


def check_limits(peers: int) -> Limits:
    """Raise the soft descriptor limit to the hard one and refuse a number of workers that cannot be served.

    Args:
        peers: Workers this process will be connected to at once.

    Raises:
        ConfigError: The hard descriptor limit is too small; the message has both numbers.
    """
    needed = descriptors_needed(peers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    if soft != hard and not unlimited:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    elif unlimited and soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        soft = needed
    if soft != resource.RLIM_INFINITY and soft < needed:
        msg = f"{peers} workers need {needed} file descriptors in this process, but the limit is {soft}"
        raise ConfigError(
            msg,
            hint=f"raise the hard limit: `ulimit -Hn {needed}` (or LimitNOFILE={needed}), or start fewer workers",
            facts={"needed": str(needed), "limit": f"{soft} (RLIMIT_NOFILE)"},
        )
    return Limits(peers=peers, max_sockets=sockets_needed(peers), descriptors=needed, soft=soft, hard=hard)


def check_libzmq() -> None:
    """Refuse a libzmq older than ``MIN_LIBZMQ`` or one built without ipc or CURVE.

    Raises:
        ConfigError: With the version found and what to install.
    """
    found = zmq.zmq_version_info()
    if found < MIN_LIBZMQ:
        wanted, have = (".".join(map(str, version)) for version in (MIN_LIBZMQ, found))
        msg = f"pyzmq {zmq.__version__} is built on libzmq {have}, but zbus needs {wanted} or newer"
        raise ConfigError(msg, hint="install a pyzmq wheel (`pip install --force-reinstall pyzmq`)")
    for capability in ("ipc", "curve"):
        if not zmq.has(capability):
            msg = f"this libzmq is built without {capability}"
            raise ConfigError(msg, hint="install a pyzmq wheel (`pip install --force-reinstall pyzmq`)")
