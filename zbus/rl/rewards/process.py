"""A process that calls reward functions: ``python -m zbus.rl.rewards.process PARENT SOCKET RESULTS``.

It belongs to the pool that started it, and ends with it, by the kernel's word even in a function that hangs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from zbus.codec import decode, describe_exception, encode
from zbus.rl.rewards.wire import pack_frames, receive, send, unpack_frames, write_record
from zbus.runtime.loader import load_object
from zbus.runtime.processes import die_with_parent, set_name

__all__ = ["main"]

_TELL_NS: Final = 2_000_000
"""Results of a long chunk are told at this pace; those of a short one once."""


def main(arguments: Sequence[str]) -> int:
    """Serve a pool until it closes the socket; return the exit code."""
    parent, number, results = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the pool's owner's
    if not die_with_parent(parent):
        return 0
    set_name("zbus-reward")
    for fd in (number, results):  # what a reward starts does not hold them
        os.set_inheritable(fd, False)  # noqa: FBT003  # its only parameter
    pool = socket.socket(fileno=number)
    functions = _begin(pool)
    if functions is None:
        return 1
    while (chunk := receive(pool)) is not None:
        _run(pool, results, functions, memoryview(chunk))
    return 0


def _begin(pool: socket.socket) -> list[Callable[..., Any]] | None:
    told = receive(pool)
    if told is None:
        return None
    frames, _ = unpack_frames(memoryview(told))
    start: Mapping[str, Any] = decode(frames)
    sys.path[:] = start["sys_path"]
    try:
        functions = [load_object(path, f"reward {name!r}") for name, path in start["rewards"].items()]
    except BaseException as error:  # the user's module may raise anything while it is imported  # noqa: BLE001
        send(pool, [pack_frames(encode(describe_exception(error)))])
        return None
    send(pool, [])
    return functions


def _run(pool: socket.socket, results: int, functions: Sequence[Callable[..., Any]], chunk: memoryview) -> None:
    at, told = 0, time.monotonic_ns()
    while chunk:
        frames, chunk = unpack_frames(chunk)
        try:
            number, args = decode(frames)
            returned, value = True, functions[number](*args)
            answer = encode(value)
        except BaseException as error:  # whatever it raises is its result  # noqa: BLE001
            returned, answer = False, encode(describe_exception(error))
        now = time.monotonic_ns()
        at = write_record(results, at, now, returned=returned, frames=answer)
        if now - told > _TELL_NS or not chunk:
            told = now
            with contextlib.suppress(OSError):  # nobody reads any more: the next chunk is the end
                pool.send(b"\0")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
