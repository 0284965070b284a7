"""What a pool and its processes say to each other: chunks of calls one way, records of results the other.

Both lay frames of ``zbus.codec`` one after the other. Results do not travel through the socket but are written to an
anonymous file that both have open: when a process is killed, all that it finished stands there, and what it was at is
known.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from zbus.codec import Buffer

__all__ = ["Record", "pack_frames", "read_records", "receive", "send", "unpack_frames", "write_record"]

_COUNT: Final = struct.Struct("<I")
_RECORD: Final = struct.Struct("<IQ?")
"""Bytes of the frames that follow, CLOCK_MONOTONIC in ns when the call ended, whether it returned."""


class Record(NamedTuple):
    """The result of one call of a chunk."""

    ended_ns: int
    returned: bool
    frames: list[memoryview]


def pack_frames(frames: Sequence[Buffer]) -> bytes:
    """Return frames as one piece that ``unpack_frames`` takes apart."""
    views = [memoryview(frame).cast("B") for frame in frames]
    sizes = struct.pack(f"<{len(views) + 1}I", len(views), *(view.nbytes for view in views))
    return b"".join((sizes, *views))


def unpack_frames(piece: memoryview) -> tuple[list[memoryview], memoryview]:
    """Return the frames at the beginning of a piece, and what is behind them."""
    (count,) = _COUNT.unpack_from(piece)
    at = _COUNT.size * (count + 1)
    frames = []
    for size in struct.unpack_from(f"<{count}I", piece, _COUNT.size):
        frames.append(piece[at : at + size])
        at += size
    return frames, piece[at:]


def send(to: socket.socket, pieces: Sequence[bytes]) -> None:
    """Send one message: how many bytes, and the pieces.

    Raises:
        OSError: The other side is gone, or does not read within the socket's timeout.
    """
    to.sendall(b"".join((_COUNT.pack(sum(map(len, pieces))), *pieces)))


def receive(of: socket.socket) -> bytearray | None:
    """Wait for one message; None: the other side has closed."""
    head = _exactly(of, _COUNT.size)
    return None if head is None else _exactly(of, _COUNT.unpack(head)[0])


def _exactly(of: socket.socket, size: int) -> bytearray | None:
    taken = bytearray(size)
    view = memoryview(taken)
    while view:
        count = of.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return taken


def write_record(fd: int, at: int, ended_ns: int, *, returned: bool, frames: Sequence[Buffer]) -> int:
    """Write the next record of a chunk at an offset; return where the one after it goes."""
    body = pack_frames(frames)
    record = memoryview(_RECORD.pack(len(body), ended_ns, returned) + body)
    while record:
        written = os.pwrite(fd, record, at)
        record, at = record[written:], at + written
    return at


def read_records(fd: int, at: int) -> Iterator[tuple[Record, int]]:
    """Yield the whole records from an offset on, each with where it ends; one that is still being written is left."""
    written = os.fstat(fd).st_size
    data = memoryview(os.pread(fd, written - at, at)) if written > at else memoryview(b"")
    while len(data) >= _RECORD.size:
        size, ended_ns, returned = _RECORD.unpack_from(data)
        if len(data) < _RECORD.size + size:
            return
        frames, _ = unpack_frames(data[_RECORD.size : _RECORD.size + size])
        data = data[_RECORD.size + size :]
        at += _RECORD.size + size
        yield Record(ended_ns, returned, frames), at
