"""Answers calls: what each is told, what the log and the trace say of it, and which are not to go on any more."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from zbus.codec import Keep, encode, encode_plain
from zbus.codec.exceptions import describe_exception
from zbus.errors import CallStopped
from zbus.protocol.messages import Buffer, Buffers, Execute, Kind, Status
from zbus.runtime.served import Served
from zbus.runtime.stopping import NotBegun
from zbus.trace.tracer import get_tracer

__all__ = ["Answering", "Answers"]

_TEXT: Final = {str}
_UNKNOWN: Final = ("?",)


class Answers(Protocol):
    """Where answers go: ``transport.server.Server``, or a stand-in."""

    def finish(
        self, request: Execute, index: int, kind: Kind, status: Status, buffers: Buffers, *, chunks: int = 0
    ) -> None:
        """Answer call number ``index`` of a request."""

    def chunk(self, request: Execute, number: int, buffers: Buffers) -> None:
        """Send one item of a stream."""


class Keepers(Protocol):
    """What makes the frames of large arrays, by the session they go to."""

    def keeper(self, session: bytes) -> Keep | None:
        """Return what makes the frames of an answer's arrays; None for copies of them."""


class Answering:
    """Answers the calls of one process. Any thread.

    Args:
        served: What is served, and its name.
        incarnation: Of this worker.
        answers: Where answers go.
        arrays: Makes frames of large arrays; None where they travel in the messages.
        heard: Told of each error that a call is answered with, before it is.

    Attributes:
        done, failed: How many calls returned and raised.
        unwanted: Requests that are not to go on (session, lane, seq); each is gone with its end.
        closed: Nobody takes answers any more.
    """

    def __init__(
        self,
        served: Served,
        incarnation: int,
        answers: Answers,
        arrays: Keepers | None,
        heard: Callable[[BaseException], None] | None,
    ) -> None:
        self.name = served.name
        self.resolve = served.resolve
        self.answers = answers
        self.done = 0
        self.failed = 0
        self.unwanted: set[tuple[bytes, str, int]] = set()
        self.closed = False
        self._incarnation = incarnation
        self._arrays = arrays
        self._heard = heard
        # First seq, lane, session and methods of the last requests.
        self._recent: deque[tuple[int, str, bytes, Sequence[str]]] = deque(maxlen=512)

    # -- what is not to go on ------------------------------------------------------------------------------------

    def is_stopped(self, request: Execute) -> bool:
        """Tell whether the caller of a request no longer wants it."""
        return bool(self.unwanted) and (request.session, request.lane, request.seq) in self.unwanted

    def is_stop(self, request: Execute, error: BaseException) -> bool:
        """Tell whether an error is how a method followed its caller's wish to end."""
        if isinstance(error, CallStopped | NotBegun):
            return True
        return type(error).__name__ == "CancelledError" and self.is_stopped(request)

    def over(self, request: Execute) -> None:
        """Forget that a request was unwanted: it has ended."""
        self.unwanted.discard((request.session, request.lane, request.seq))

    def refused(self, request: Execute, index: int, now: int) -> bool:
        """Answer a call that is not to begin any more, and say so."""
        if self.unwanted and self.is_stopped(request):
            self.answers.finish(request, index, Kind.FAILURE, Status.CANCELLED, ())
            return True
        if request.deadline_ns is not None and now >= request.deadline_ns:
            self.answers.finish(request, index, Kind.FAILURE, Status.EXPIRED, ())
            return True
        return False

    def skip(self, request: Execute, start: int) -> None:
        """Answer the calls behind the first failure of a strict batch."""
        for index in range(start, request.calls):
            self.answers.finish(request, index, Kind.FAILURE, Status.PREDECESSOR, ())

    # -- answers -------------------------------------------------------------------------------------------------

    def encode_answer(self, request: Execute, value: Any) -> list[Buffer]:
        """Return the frames of an answer; arrays in it may change afterwards."""
        plain = encode_plain(value)
        if plain is not None:
            return [plain]
        keep = None if self._arrays is None or request.lane == "ctl" else self._arrays.keeper(request.session)
        return encode(value, snapshot=True, keep=keep)

    def give(  # hot path
        self, request: Execute, index: int, method: str, frames: Buffers, started: int, decoded: int, ended: int
    ) -> None:
        """Answer a call that returned."""
        encoded = time.monotonic_ns()
        self.answers.finish(request, index, Kind.RESULT, Status.OK, frames)
        self.record(request, request.seq + index, method, started, decoded, ended, "OK", encoded)
        self.done += 1

    def end_stream(self, request: Execute, method: str, chunks: int, started: int, decoded: int, ended: int) -> None:
        """Answer a stream whose last item, the last of ``chunks``, has left."""
        self.answers.finish(request, 0, Kind.END, Status.OK, encode(None), chunks=chunks)
        self.record(request, request.seq, method, started, decoded, ended, "OK")
        self.done += 1

    def fail(
        self,
        request: Execute,
        index: int,
        method: Any,
        error: BaseException,
        started: int,
        decoded: int,
        *,
        begun: bool = True,
        chunks: int = 0,
        kind: Kind = Kind.FAILURE,
    ) -> None:
        """Answer a call that raised, and say so in the log, as far as the log takes it: its disk may be full.

        ``begun``: its method was started; else that is what failed.
        """
        if self._heard is not None:
            self._heard(error)
        if self.closed:
            return  # nobody takes answers any more
        ended = time.monotonic_ns()
        self.failed += 1
        stopped = self.is_stop(request, error)
        frames = encode(describe_exception(error))
        encoded = time.monotonic_ns()
        status = Status.STOPPED if stopped else Status.APP_ERROR if begun else Status.NOT_STARTED
        outcome = "APP_ERROR" if begun else "NOT_EXECUTED"
        self.answers.finish(request, index, kind, status, frames, chunks=chunks)
        self.record(request, request.seq + index, str(method), started, decoded, ended, outcome, encoded)
        if stopped:
            with contextlib.suppress(Exception):
                print(f"zbus: {self.name} {method!r} was stopped before its end", file=sys.stderr)  # the log  # noqa: T201
            return
        try:
            what = "raised" if begun else "was not started"
            print(f"zbus: {self.name} {method!r} {what}:", file=sys.stderr)  # stderr is the worker's log  # noqa: T201
            traceback.print_exception(error)
        except BaseException:  # a repr or str that raises: the log has what was written so far  # noqa: BLE001
            with contextlib.suppress(Exception):
                print("  (its text cannot be shown)", file=sys.stderr)  # as above  # noqa: T201

    # -- what is remembered --------------------------------------------------------------------------------------

    def note(self, request: Execute, methods: Sequence[Any]) -> None:
        """Remember which methods the calls of a request name, for ``method_of``."""
        if len(methods) == 1:
            methods = methods if type(methods[0]) is str else _UNKNOWN
        elif set(map(type, methods)) != _TEXT:
            methods = [method if type(method) is str else "?" for method in methods]
        self._recent.append((request.seq, request.lane, request.session, methods))

    def method_of(self, session: bytes, lane: str, seq: int) -> str:
        """Return the method of a call that ran here lately, or an empty text."""
        return next(
            (
                methods[seq - first]
                for first, of, whose, methods in reversed(self._recent)
                if of == lane and whose == session and first <= seq < first + len(methods)
            ),
            "",
        )

    def record(  # hot path
        self, request: Execute, seq: int, method: str, started: int, decoded: int, ended: int, outcome: str,
        encoded: int = 0,
    ) -> None:  # fmt: skip
        """Record a call in the trace, if that is on."""
        tracer = get_tracer()
        if tracer.rpc:
            tracer.bus_server(
                request.session, self.name, self._incarnation, request.lane, seq, request.attempt, method,
                request.arrived_ns, started, decoded, ended, encoded or ended, outcome, time.monotonic_ns(),
            )  # fmt: skip
