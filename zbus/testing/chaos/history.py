"""What the callers saw: one record per call, with the outcome of each rank; kept in a file, one JSON line each."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

import msgspec

__all__ = ["Answer", "History", "Op", "read_history"]


class Answer(msgspec.Struct, frozen=True):
    """The outcome of a call on one rank.

    Attributes:
        rank: Which; -1 if the call could go to any.
        outcome: ``OK``, ``APP_ERROR``, ``CANCELLED``, ``NOT_EXECUTED``, ``UNKNOWN``; empty: none came.
        cause: Why, in words, for all but OK.
        right: For OK: whether the value was the right one.
    """

    rank: int
    outcome: str
    cause: str = ""
    right: bool = True


class Op(msgspec.Struct):
    """One call as its caller saw it.

    Attributes:
        call: Its id, the same as in the ground truth; ids of one thread rise.
        shape: How it was called: single, group, batch, any, stream, …
        effect: ``once``, ``idempotent`` or ``pure``.
        thread: Which caller.
        number: Its number among the calls of that caller, in order of submission.
        began, ended: Monotonic seconds.
        limit_s: Seconds by which it had to have all its outcomes.
        answers: One per rank.
        wanted: How many answers there should be.
        ordered: Whether it ran on the main lane, where its start has a place in the caller's order.
        note: Anything odd.
    """

    call: str
    shape: str
    effect: str
    thread: str
    number: int
    began: float
    ended: float
    limit_s: float
    answers: list[Answer]
    wanted: int = 1
    ordered: bool = False
    note: str = ""


class History:
    """The writing side; any thread may add."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ops = 0
        self.calls = 0
        self._lock = threading.Lock()
        self._file = path.open("wb", buffering=1 << 16)
        self._encoder = msgspec.json.Encoder()

    def add(self, op: Op) -> None:
        """Write one record."""
        line = self._encoder.encode(op) + b"\n"
        with self._lock:
            self.ops += 1
            self.calls += max(1, len(op.answers))
            self._file.write(line)

    def close(self) -> None:
        """Write out what is buffered."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_history(path: Path) -> list[Op]:
    """Read all records."""
    decoder = msgspec.json.Decoder(Op)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]
