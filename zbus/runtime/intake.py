"""Reads requests: their frames, the arrays that have to come first, and the calls in them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from zbus.codec import Keep, decode_calls
from zbus.errors import CodecError
from zbus.protocol.messages import Buffers, Execute, Kind, Status
from zbus.runtime.answering import Answering
from zbus.runtime.specials import with_specials

__all__ = ["Arrays", "Intake", "Opening"]

_PARTS: Final = {3}


class Opening(Protocol):
    """Arrays of a request on their way."""

    @property
    def total(self) -> int:
        """Bytes to come."""
        ...

    def give_up(self) -> None:
        """Want them no more: ``opened`` raises."""


class Arrays(Protocol):
    """Large arrays apart from the messages, by the session they come from or go to."""

    def must_pull(self, frames: Buffers) -> bool:
        """Tell whether ``opened`` would have to wait for data."""

    def opened(
        self, frames: Buffers, session: bytes, deadline_s: float | None, begun: Callable[[Opening], None]
    ) -> Buffers:
        """Return a request's frames with the arrays in their places; waits for those that are pulled."""

    def keeper(self, session: bytes) -> Keep | None:
        """Return what makes the frames of an answer's arrays; None for copies of them."""


class Intake:
    """Reads the requests of one process. Any thread.

    Args:
        answering: Tells the callers of what cannot be read.
        arrays: Opens large arrays; None where they travel in the messages.
    """

    def __init__(self, answering: Answering, arrays: Arrays | None) -> None:
        self._answering = answering
        self._arrays = arrays
        self._pulls: dict[tuple[bytes, str, int], Opening] = {}

    @property
    def pulling(self) -> int:
        """Bytes of arguments that requests wait for."""
        return sum(opening.total for opening in tuple(self._pulls.values()))

    def must_pull(self, request: Execute) -> bool:
        """Tell whether reading a request would have to wait for data."""
        return self._arrays is not None and len(request.buffers) > 1 and self._arrays.must_pull(request.buffers)

    def cancel(self, key: tuple[bytes, str, int]) -> None:
        """Wait no longer for the data of a request, which is unwanted by now."""
        opening = self._pulls.get(key)
        if opening is not None:
            opening.give_up()

    def calls(self, request: Execute) -> list[Any] | None:
        """Return the calls of a request, or answer all of them with the reason why it cannot be read."""
        try:
            frames = request.buffers
            if len(frames) > 1 and self._arrays is not None:
                left_ns = None if request.deadline_ns is None else request.deadline_ns - time.monotonic_ns()
                left_s = None if left_ns is None else left_ns / 1e9
                frames = self._arrays.opened(frames, request.session, left_s, partial(self._pull_begun, request))
            refs: list[Any] = []
            calls = decode_calls(frames, refs)
            if type(calls) is not list or len(calls) != request.calls:
                msg = f"a request of {request.calls} calls holds {len(calls)}"  # or none: [[method, args, kwargs], …]
                raise ValueError(msg)
            if refs or set(map(len, calls)) != _PARTS:
                return with_specials(calls, fills=bool(refs))
        except Exception as error:  # a body that is not one: the caller's fault, told to the caller  # noqa: BLE001
            self._refuse(request, error)
            return None
        finally:
            self._pulls.pop((request.session, request.lane, request.seq), None)
        return calls

    def _pull_begun(self, request: Execute, opening: Opening) -> None:
        key = (request.session, request.lane, request.seq)
        self._pulls[key] = opening
        if key in self._answering.unwanted:  # else whoever adds it there looks here after it
            opening.give_up()

    def _refuse(self, request: Execute, error: Exception) -> None:
        answering = self._answering
        now = time.monotonic_ns()
        stopped = answering.is_stopped(request)
        answering.over(request)
        if stopped or (request.deadline_ns is not None and now >= request.deadline_ns):
            words = str(error.message if isinstance(error, CodecError) else error).encode()
            status = Status.CANCELLED if stopped else Status.EXPIRED
            for index in range(request.calls):
                answering.answers.finish(request, index, Kind.FAILURE, status, (words,))
            return
        for index in range(request.calls):
            answering.fail(request, index, "?", error, now, 0, begun=False)
