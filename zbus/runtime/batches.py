"""Runs the calls of a batch on the main thread, one after another, in the fewest steps that keep each call exact.

What is looked up once for all of them: the ring of the crash journal, the functions, the tracer. What each call has of
its own: its two marks in the journal, the looks at its caller's cancel and its deadline, the clock, who runs. Short
results are left at ``Holding.hold``, so that they leave together; what is not plain goes the executor's way.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from time import monotonic_ns
from types import GeneratorType
from typing import Any, Final, NoReturn, Protocol

from zbus.codec import encode_plain
from zbus.protocol.frames import INLINE_BYTES
from zbus.protocol.journal import BEGAN, ENDED, MASK, LaneRing
from zbus.protocol.messages import Buffer, Buffers, Execute, Kind, Status
from zbus.runtime.stopping import CurrentCall, Owner, running

__all__ = ["BatchHost", "Holding", "refuse_stream", "run_batch"]

_HOLD_NS: Final = 1_000_000
_HOLD_CALLS: Final = 256
"""A short result of a batch waits for others at most so long, and for at most so many."""

_NEVER: Final = 1 << 62
_METHOD: Final = operator.itemgetter(0)
_new: Final = tuple.__new__


class Holding(Protocol):
    """Answers of which several can leave in one message: ``transport.server.Server``."""

    def hold(self, request: Execute, answered: Callable[[int, Sequence[bytes]], None]) -> deque[bytes]:
        """Return where short results of a batch may be left in place of ``finish``.

        Args:
            request: The batch.
            answered: Told of (first seq, bodies) before they leave. Under the answers' lock.
        """

    def flush(self, *, over: bool = False) -> None:
        """Send what was left there; ``over``: nothing more is left."""

    def finish(
        self, request: Execute, index: int, kind: Kind, status: Status, buffers: Buffers, *, chunks: int = 0
    ) -> None:
        """Answer call number ``index`` of a request."""

    def unanswered(self, request: Execute) -> list[int]:
        """Send what is held, and return which calls of a request then have no answer."""


class BatchHost(Owner, Protocol):
    """What answers the calls of a batch (``Answering``), as far as their loop needs it."""

    done: int

    @property
    def unwanted(self) -> Collection[object]:
        """Requests that are not to go on, now and later: one collection, empty nearly always."""

    def resolve(self, request: Execute, method: Any) -> Callable[..., Any]:
        """Return what a request calls by a name, or raise."""

    def refused(self, request: Execute, index: int, now: int) -> bool:
        """Answer a call that is not to begin any more, and say so."""

    def skip(self, request: Execute, start: int) -> None:
        """Answer the calls behind the first failure of a strict batch."""

    def fail(
        self, request: Execute, index: int, method: Any, error: BaseException, started: int, decoded: int, *,
        begun: bool = True,
    ) -> None:  # fmt: skip
        """Answer a call that raised, or (not ``begun``) could not be started."""

    def encode_answer(self, request: Execute, value: Any) -> list[Buffer]:
        """Return the frames of an answer."""

    def note(self, request: Execute, methods: Sequence[Any]) -> None:
        """Remember which methods the calls of a request name."""

    def record(
        self, request: Execute, seq: int, method: str, started: int, decoded: int, ended: int, outcome: str,
        encoded: int = 0,
    ) -> None:  # fmt: skip
        """Record a call in the trace, if that is on."""


def run_batch(  # noqa: C901, PLR0915  # hot path: one loop, in which every further function would count
    host: BatchHost, holding: Holding, request: Execute, calls: list[Any], ring: LaneRing, started: int, *,
    traced: bool,
) -> None:  # fmt: skip
    """Run the calls of a request in order and answer each. Main thread.

    An exception of a method, whatever it is, is the outcome of its call. One that a signal handler raises between two
    calls leaves from here; whoever serves the requests then answers the rest (``Executor.give_up``).

    Args:
        host: Whose engine it is.
        holding: Where answers go.
        request: The batch.
        calls: (method, args, kwargs) of each; emptied on the way.
        ring: Where the start and end of each call are marked.
        started: When the reading of the request began (monotonic ns).
        traced: Whether calls are recorded now.
    """
    host.note(request, list(map(_METHOD, calls)))
    held = holding.hold(request, ring.answered_together)
    marks, hold, unwanted = ring.marks, held.append, host.unwanted
    deadline_ns = _NEVER if request.deadline_ns is None else request.deadline_ns
    first, last = request.seq, len(calls) - 1
    known: dict[Any, Callable[..., Any]] = {}
    key = threading.get_ident()
    now = decoded = ended = monotonic_ns()
    flush_at = now + _HOLD_NS
    done = 0
    try:
        for index in range(len(calls)):
            if (unwanted or now >= deadline_ns) and host.refused(request, index, now):
                if request.strict:
                    host.skip(request, index + 1)
                    break
                continue
            seq = first + index
            method, args, kwargs = calls[index]
            calls[index] = None
            running[key] = _new(CurrentCall, (host, request, method, seq, now))
            try:
                function = known.get(method)
                if function is None:
                    function = known[method] = host.resolve(request, method)
                marks[seq & MASK] = seq << 8 | BEGAN
                value = function(*args, **kwargs)
                if value.__class__ is GeneratorType:
                    refuse_stream(method)
                marks[seq & MASK] = seq << 8 | ENDED
                if traced:
                    ended = monotonic_ns()
                body: Any = encode_plain(value)
                frames: Buffers = () if body is not None else host.encode_answer(request, value)
                value = args = kwargs = None  # before the caller hears of it: memory of this host can be used again
            except BaseException as error:  # whatever a method raises is its call's outcome  # noqa: BLE001
                if ring.has_begun(seq):
                    ring.raised(seq)
                begun = type(method) is str and method in known
                host.fail(request, index, method, error, started, decoded, begun=begun)
                if request.strict:
                    host.skip(request, index + 1)
                    break
                started = decoded = now = monotonic_ns()
                continue
            if body is not None:
                hold(body)
            else:
                _answer(holding, request, index, frames, held, ring)
            done += 1
            now = monotonic_ns()
            if traced:
                host.record(request, seq, method, started, decoded, ended, "OK", now)
                started = decoded = now
            if (now > flush_at or len(held) >= _HOLD_CALLS) and index < last:
                holding.flush()
                flush_at = now + _HOLD_NS
    finally:
        running.pop(key, None)
        host.done += done
    holding.flush(over=True)


def _answer(  # private
    holding: Holding, request: Execute, index: int, frames: Buffers, held: deque[bytes], ring: LaneRing
) -> None:
    """Answer a call whose value is not plain; it may be short all the same."""
    body = frames[0]
    if len(frames) == 1 and type(body) is bytes and len(body) <= INLINE_BYTES:
        held.append(body)
    else:
        ring.answered(request.seq + index, frames)
        holding.finish(request, index, Kind.RESULT, Status.OK, frames)


def refuse_stream(method: str) -> NoReturn:
    """Raise of a generator in a batch."""
    msg = f"{method!r} gave a generator: a stream cannot be one call of several in a batch"
    raise TypeError(msg)
