"""One call's way through a worker, the same on a thread and on a loop: found, prepared, begun, ended, answered.

What differs is only how the method's value is waited for; that stands where calls are run (``executor``,
``async_lanes``), inside the ``with`` block of a ``Step``. An exception of a method, whatever it is (``SystemExit``, one
whose ``repr`` raises), ends that block and becomes the call's outcome; it goes no further.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from zbus.errors import RefLimitError, RefLostError
from zbus.protocol.messages import Buffers, Execute, Kind
from zbus.runtime.answering import Answering
from zbus.runtime.batches import refuse_stream
from zbus.runtime.marks import Rings
from zbus.runtime.specials import Refs, Special, SpecialCalls
from zbus.runtime.stopping import CurrentCall, NotBegun, running
from zbus.runtime.streams import RunningStream

if TYPE_CHECKING:
    import asyncio

__all__ = ["Step", "Steps"]

_METHOD: Final = operator.itemgetter(0)
_new: Final = tuple.__new__


class Steps:
    """Makes the steps of requests. Any thread.

    Args:
        answering: Answers them.
        rings: Where their starts and ends are marked.
        refs: Opens handles and keeps results; None: neither can be.

    Attributes:
        streams: Those that run, by session, lane and seq.
    """

    def __init__(self, answering: Answering, rings: Rings, refs: Refs | None) -> None:
        self.answering = answering
        self.rings = rings
        self.refs = refs
        self.streams: dict[tuple[bytes, str, int], RunningStream] = {}

    def of(self, request: Execute, calls: list[Any], started: int) -> Iterator[Step]:
        """Give the calls of a request that are to run, in order, each when the one before has ended.

        Answers those that are not to: their caller no longer wants them, or the batch is strict and an earlier one
        failed. ``calls`` is emptied on the way.
        """
        decoded = time.monotonic_ns()
        self.answering.note(request, list(map(_METHOD, calls)))
        for index in range(len(calls)):
            if self.answering.refused(request, index, decoded):
                well = False
            else:
                step = Step(self, request, index, calls, started, decoded)
                yield step
                well = step.well
                started = decoded = time.monotonic_ns()
            if request.strict and not well:
                self.answering.skip(request, index + 1)
                return


class Step:
    """One call. Its ``with`` block is its run: the call is answered, or told what the block raised, as it is left.

    The block may be left early once ``is_refused`` has said yes.

    Args:
        steps: What it needs of its process.
        request: Whose call it is.
        index: Its number there.
        calls: (method, args, kwargs) of each; its own is taken out.
        started: When the reading of the request began (monotonic ns).
        decoded: When its own turn came.

    Attributes:
        key: Under which it stands in ``running``: the thread that runs it, or by default itself.
        function: What its method's name stands for, once found.
        special: What is to be done around it, if anything.
        args, kwargs, value: What it is called with and what it returned, as long as they are needed.
        well: It was answered with a result.
    """

    # Most keep these to the end: a call is worth a microsecond.
    special: Special | None = None
    value: Any = None
    well = False
    _begun = False
    _marked = False
    _refused = False
    _stream: RunningStream | None = None

    def __init__(
        self, steps: Steps, request: Execute, index: int, calls: list[Any], started: int, decoded: int
    ) -> None:
        self._steps = steps
        self.request = request
        self.seq = request.seq + index
        self._index = index
        self._started = started
        self._decoded = decoded
        self.method, self.args, self.kwargs = calls[index]
        calls[index] = None
        if type(calls) is SpecialCalls:
            self.special = calls.specials.get(index)
        self.call: CurrentCall = _new(CurrentCall, (steps.answering, request, self.method, self.seq, decoded))
        self.key = id(self.call)
        self._marks = steps.rings.marks(request)

    def __enter__(self) -> Self:
        running[self.key] = self.call
        return self

    def find(self) -> None:
        """Find its method, or raise."""
        self.function: Callable[..., Any] = self._steps.answering.resolve(self.request, self.method)

    def prepare(self) -> None:
        """Put values in place of the handles among its arguments. What fails here fails before the method starts."""
        refs, special = self._steps.refs, self.special
        if special is None:
            return
        if refs is None:
            msg = f"{self._steps.answering.name} takes and keeps no Refs"
            raise TypeError(msg)
        try:
            if special.claim is not None:
                refs.check()
            if special.fills:
                self.args, self.kwargs = refs.fill((self.args, self.kwargs), self.request.deadline_ns)
        except (RefLimitError, RefLostError) as error:
            error.started = False
            raise

    def is_refused(self) -> bool:
        """Answer it if it is not to begin any more, and say so."""
        self._refused = self._steps.answering.refused(self.request, self._index, time.monotonic_ns())
        return self._refused

    def begin(self) -> None:
        """Mark that it begins. Right before its method is called."""
        self._begun = True
        self._marks.begin(self.seq)
        self._marked = True

    def end(self) -> None:
        """Mark that its method is through. Right after."""
        self._marked = False
        self._marks.end(self.seq)

    def run_apart(self) -> None:
        """Call the method between its marks, on a thread that may outlast the ``with`` block."""
        marks, seq = self._marks, self.seq
        marks.begin(seq)
        try:
            self.value = self.function(*self.args, **self.kwargs)
        except BaseException:
            marks.raised(seq)
            raise
        marks.end(seq)

    def begin_apart(self) -> None:
        """Note that what fails from now on fails in ``run_apart``, if it is not ``NotBegun``."""
        self._begun = True

    def stream(self, loop: asyncio.AbstractEventLoop | None) -> RunningStream:
        """Have its items sent, which its thread or ``loop`` produces; they have credit until the block is left.

        Raises:
            TypeError: It is one call of several.
        """
        if self.request.calls > 1:
            refuse_stream(self.method)
        encode = partial(self._steps.answering.encode_answer, self.request)
        stream = self._stream = RunningStream(self._steps.answering.answers, self.request, loop, encode)
        self._steps.streams[stream.key] = stream
        return stream

    def encode(self) -> None:
        """Make the frames of its answer from ``value``; behind ``end``."""
        steps, special = self._steps, self.special
        self._ended = time.monotonic_ns()
        if special is not None and special.claim is not None and steps.refs is not None:
            self.value = steps.refs.keep(self.value, self.request.session, special.claim, self.method)
        frames: Buffers = steps.answering.encode_answer(self.request, self.value)
        # What it was called with goes before the caller hears of it: memory of this host can be used again at once.
        self.value = self.args = self.kwargs = None
        self._marks.answered(self.seq, frames)
        self._frames = frames

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        try:
            if self._stream is not None:
                del self._steps.streams[self._stream.key]
            if error is not None:
                self._fail(error)
        finally:
            running.pop(self.key, None)
        if error is None and not self._refused:
            answering, request = self._steps.answering, self.request
            if self._stream is None:
                frames, self._frames = self._frames, ()
                answering.give(request, self._index, self.method, frames, self._started, self._decoded, self._ended)
            else:
                sent, ended = self._stream.sent, time.monotonic_ns()
                answering.end_stream(request, self.method, sent, self._started, self._decoded, ended)
            self.well = True
        return True

    def _fail(self, error: BaseException) -> None:
        if self._marked:
            self._marks.raised(self.seq)
        answering, stream = self._steps.answering, self._stream
        begun = self._begun and type(error) is not NotBegun
        if not begun and not answering.closed and answering.is_stop(self.request, error) and self.is_refused():
            return
        answering.fail(
            self.request, self._index, self.method, error, self._started, self._decoded, begun=begun,
            chunks=0 if stream is None else stream.sent, kind=Kind.FAILURE if stream is None else Kind.END,
        )  # fmt: skip
