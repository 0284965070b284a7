"""Whole messages over a socket: sends and receives that no signal and no bad buffer can tear.

All I/O is non-blocking. Both directions run inside the signal gate, and each frame loop runs in C, so that no bytecode
boundary lies between two frames on any thread. What cannot be deferred (a raising handler of a signal outside the
gate) never tears a message either: a send is completed first, a receive drops the message whole and counts it.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final, NoReturn

import zmq
import zmq.backend

from zbus.errors import TransportError
from zbus.protocol.messages import Buffer
from zbus.transport.interrupts import gate

__all__ = ["COPY_LIMIT", "PeerGone", "Receiver", "Socket", "TornMessage", "require_contiguous", "send", "send_gated"]

Socket = zmq.Socket[bytes]
"""A socket made by ``SocketFactory``."""

COPY_LIMIT: Final = 1 << 18
"""Bytes from which a frame is handed to libzmq without a copy; its buffer must not change until it was delivered."""

_SMALL: Final = 1 << 13
_DONT_WAIT: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE: Final = int(zmq.RCVMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)
_NO_COPY: Final = repeat(False)  # noqa: FBT003  # an argument column for map
_NOW: Final = (_DONT_WAIT,)  # argument columns of one receive
_FRAME: Final = (False,)
_MAX_CACHED: Final = 64
_FLAGS: Final = tuple((_MORE,) * (n - 1) + (_DONT_WAIT,) if n else () for n in range(_MAX_CACHED))

# The methods of the C class: the ones a Socket instance offers are Python functions, which are slower and give signal
# handlers a bytecode boundary to run at.
_send: Final[Any] = zmq.backend.Socket.send
_recv: Final[Any] = zmq.backend.Socket.recv
_get: Final[Any] = zmq.backend.Socket.get


class PeerGone(TransportError):
    """A ROUTER has no connection of that routing id (any more)."""


class TornMessage(TransportError):
    """Only some frames of a message were handed over. Close the socket: nothing may follow on it."""


def require_contiguous(frames: Sequence[Buffer]) -> None:
    """Check that every frame can be sent, before the first one leaves.

    Args:
        frames: What will be sent.

    Raises:
        TypeError: A frame is not bytes-like.
        BufferError: A frame is not contiguous or was released.
    """
    for position, frame in enumerate(frames):
        if type(frame) is bytes:
            continue
        try:
            contiguous = memoryview(frame).c_contiguous
        except ValueError:
            msg = f"frame {position} is a released buffer"
            raise BufferError(msg) from None
        if not contiguous:
            msg = f"frame {position} is not contiguous"
            raise BufferError(msg)


def send(socket: Socket, frames: Sequence[Buffer]) -> bool:
    """Send one message without waiting.

    Thread: the one that holds the socket. Frames of ``COPY_LIMIT`` bytes and more are not copied. A deferred handler's
    exception leaves from here after the message went whole; a caller whose books must agree with what was sent keeps
    them inside the same ``with gate:`` (sections nest).

    Args:
        socket: Where to.
        frames: All frames of the message, at least one; a ROUTER's first is the routing id.

    Returns:
        True when the whole message was accepted, False when nothing was (nobody connected, or the peer is full).

    Raises:
        PeerGone: A ROUTER does not know the routing id; nothing was sent.
        BufferError: A frame is not contiguous; nothing was sent.
        TypeError: A frame is not bytes-like; nothing was sent.
        ValueError: No frames.
        TransportError: The socket is closed or its context ended.
        TornMessage: Memory ran out in the middle; the socket must be closed.
    """
    with gate:
        return send_gated(socket, frames)


def send_gated(socket: Socket, frames: Sequence[Buffer]) -> bool:
    """Do as ``send``, for a caller that is inside the gate already."""
    count = len(frames)
    if count == 1 and type(frames[0]) is bytes:  # most messages; one call in C cannot be torn
        try:
            _send(socket, frames[0], _DONT_WAIT, False)  # noqa: FBT003  # the C method's positional `copy`
            return True
        except zmq.Again:
            return bool(_get(socket, _EVENTS) & _POLLOUT) and _attempt(socket, frames, _FLAGS[1])
        except zmq.ZMQError as error:
            _fail(socket, frames, 1, error)
    if count != 2 or type(frames[0]) is not bytes or type(frames[1]) is not bytes:  # else a small answer of a ROUTER
        require_contiguous(frames)
    flags = _FLAGS[count] if count < _MAX_CACHED else (_MORE,) * (count - 1) + (_DONT_WAIT,)
    if not flags:
        msg = "a message has at least one frame"
        raise ValueError(msg)
    if _attempt(socket, frames, flags):
        return True
    # libzmq looks for news of its own thread (a connection made, room freed) only every so often in a send, but
    # always when asked for its events.
    return bool(_get(socket, _EVENTS) & _POLLOUT) and _attempt(socket, frames, flags)


def _attempt(socket: Socket, frames: Sequence[Buffer], flags: Sequence[int]) -> bool:
    """Hand all frames over, or none and return False. Inside the gate."""
    left = iter(frames)
    try:
        deque(map(_send, repeat(socket), left, flags, _NO_COPY), maxlen=0)
    except BaseException as error:  # noqa: BLE001  # _fail always raises
        tried = len(frames) - left.__length_hint__()  # type: ignore[attr-defined]  # sequence iterators have it
        if isinstance(error, zmq.Again):
            # In the first frame: no peer, or no room. Later: the peer went between two frames, and libzmq took the
            # whole message back; it drops what follows up to the last frame.
            rest = frames[tried:] if tried > 1 else ()
            deque(map(_send, repeat(socket), rest, flags[tried:], _NO_COPY), maxlen=0)
            return False
        _fail(socket, frames, tried, error)
    return True


def _fail(socket: Socket, frames: Sequence[Buffer], tried: int, error: BaseException) -> NoReturn:
    """Leave the socket between two messages if that can be done, and raise; ``tried`` frames were handed over."""
    failed_in_send = isinstance(error, (zmq.ZMQError, MemoryError))
    if failed_in_send and tried == 1:
        if getattr(error, "errno", None) == errno.EHOSTUNREACH:
            msg = "the peer of this routing id is gone"
            raise PeerGone(msg) from error
        msg = f"cannot send: {error}"
        raise TransportError(msg) from error
    if len(frames) > 1 and (failed_in_send or tried == 1):
        # After a handler's exception nobody can tell whether the first frame was taken.
        msg = f"frame {tried} of {len(frames)} may not have been sent: {error!r}"
        raise TornMessage(msg) from error
    rest = frames[tried:]
    deque(map(_send, repeat(socket), rest, _FLAGS[1] if len(rest) == 1 else (_MORE,) * (len(rest) - 1) + _FLAGS[1]), 0)
    raise error


class Receiver:
    """Takes whole messages from one socket and keeps a half-read one safe over an interrupt.

    Thread: the one that holds the socket.

    Attributes:
        dropped: Messages dropped because an exception that the gate does not defer struck inside a receive.
    """

    __slots__ = ("_done", "_parts", "_resync", "_socket", "_sockets", "dropped")

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._parts: list[zmq.Frame] = []
        self._done: list[Buffer] | None = None
        self._resync = False
        self._sockets = (socket,)
        self.dropped = 0

    @property
    def socket(self) -> Socket:
        """The socket read from."""
        return self._socket

    def recv(self) -> list[Buffer] | None:
        """Return the next message, or None when there is none; never waits.

        A deferred handler's exception leaves from here too; the message it interrupts is returned by the next call.
        Frames below 8 KiB come as ``bytes``; larger ones as ``memoryview`` over the received memory, which lives as
        long as the view. Their alignment is arbitrary.

        Raises:
            TransportError: The socket is closed or its context ended.
        """
        message = self._done
        if message is None:
            with gate:
                message = self._done = self.take()
        self._done = None
        return message

    def more(self) -> bool:
        """Tell whether a message can be received now. Cheaper than a ``recv`` that finds none."""
        return bool(_get(self._socket, _EVENTS) & _POLLIN)

    def take(self) -> list[Buffer] | None:
        """Do as ``recv``, for a caller that is inside the gate already."""
        try:
            if self._resync:
                self._skip_rest()
            parts = self._parts
            while not parts or parts[-1].more:
                parts.extend(map(_recv, self._sockets, _NOW, _FRAME))
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            msg = f"cannot receive: {error}"
            raise TransportError(msg) from error
        except BaseException:
            # The frame being received may be lost with the exception: give up the message it belongs to.
            self._resync = True
            raise
        self._parts = []
        if len(parts) <= 2 and len(parts[-1]) < _SMALL and len(parts[0]) < _SMALL:  # most messages
            return [parts[0].bytes] if len(parts) == 1 else [parts[0].bytes, parts[1].bytes]
        return [part.bytes if len(part) < _SMALL else part.buffer for part in parts]

    def _skip_rest(self) -> None:
        """Drop what is left of the message an exception struck in."""
        if self._parts or _get(self._socket, _RCVMORE):
            self.dropped += 1
            self._parts = []
        while _get(self._socket, _RCVMORE):
            _recv(self._socket, _DONT_WAIT)
        self._resync = False
