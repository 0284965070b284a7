"""Takes requests to where they run, and runs those of threads. Knows no sockets.

Where a request runs is declared by its lane, never guessed from its arguments: ``main`` on the worker's main thread,
lanes with async endpoints on one event loop in a second thread (``async_lanes``), other lanes on a pool of their own,
``ctl`` on a small pool that runs only the bus's own methods. What each call goes through there stands in ``steps``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final, cast

from zbus import failpoints
from zbus.engine import EndpointSpec, Engine
from zbus.protocol.journal import LaneRing
from zbus.protocol.messages import CancelRunning, Execute, StreamCredit
from zbus.runtime.answering import Answering, Answers
from zbus.runtime.batches import Holding, run_batch
from zbus.runtime.intake import Arrays, Intake
from zbus.runtime.marks import Rings
from zbus.runtime.pools import Pools
from zbus.runtime.served import Builtin, Served
from zbus.runtime.specials import Refs, SpecialCalls
from zbus.runtime.steps import Step, Steps
from zbus.runtime.stopping import running
from zbus.runtime.watchdog import Handler
from zbus.trace.tracer import get_tracer

if TYPE_CHECKING:  # an agent starts with this module, runs nothing async, and importing asyncio takes a sixth of that
    from zbus.runtime.async_lanes import AsyncLanes

__all__ = ["Executor"]

_NOTHING: Final = (None, ())
_BARE: Final = contextlib.nullcontext()


class Executor:
    """Runs requests for one engine. ``run_main`` belongs to the main thread; the rest may come from any thread.

    Args:
        name: ``role/rank``, for spans and messages.
        incarnation: Of this worker.
        answers: Where answers go.
        builtins: The bus's own methods by lane and full name (``ctl:zbus.ping`` …).
        rings: Gives the crash journal's ring of a session's lane; None where there is no journal. Any thread.
        arrays: Opens and makes frames of large arrays; None where they travel in the messages.
        refs: Opens handles and keeps results; None: neither can be.
        within: What each request runs within, on whichever thread or task that is.
        heard: Told of each error that a call is answered with, before it is.
    """

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        answers: Answers,
        builtins: Mapping[str, Builtin],
        rings: Callable[[bytes, str], LaneRing] | None = None,
        arrays: Arrays | None = None,
        refs: Refs | None = None,
        within: Callable[[], contextlib.AbstractContextManager[object]] | None = None,
        heard: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.pools = Pools()
        self.pools.of("ctl", 4)
        self.rings = Rings(rings)
        self._holding: Holding | None = cast("Holding", answers) if hasattr(answers, "hold") else None
        self._served = Served(name, builtins)
        self._answering = Answering(self._served, incarnation, answers, arrays, heard)
        self._intake = Intake(self._answering, arrays)
        self._steps = Steps(self._answering, self.rings, refs)
        self._within = within or (lambda: _BARE)
        self._enter = self._run if within is None else self._run_within
        self.async_lanes: AsyncLanes | None = None
        # What the main thread runs, and its calls once they are read: None in place of those that have begun.
        self._at_work: tuple[Execute | None, Sequence[Any]] = _NOTHING

    # -- the engine ----------------------------------------------------------------------------------------------

    def install(self, engine: Engine, table: Mapping[str, EndpointSpec]) -> None:
        """Serve ``engine`` from now on. Main thread."""
        self._served.install(engine, table)
        if self._served.async_lanes and self.async_lanes is None:
            from zbus.runtime.async_lanes import AsyncLanes

            self.async_lanes = AsyncLanes(self._served, self._intake, self._steps, self.pools, self._within)

    def remove(self) -> Engine | None:
        """Serve no engine any more and return the one that was. Main thread."""
        return self._served.remove()

    # -- what is known of it -------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine | None:
        """The engine served now."""
        return self._served.engine

    @property
    def done(self) -> int:
        """How many calls returned."""
        return self._answering.done

    @property
    def failed(self) -> int:
        """How many calls raised."""
        return self._answering.failed

    @property
    def pulling(self) -> int:
        """Bytes of arguments that requests wait for. Any thread."""
        return self._intake.pulling

    def method_of(self, session: bytes, lane: str, seq: int) -> str:
        """Return the method of a call that ran here lately, or an empty text."""
        return self._answering.method_of(session, lane, seq)

    def current_calls(self) -> list[dict[str, Any]]:
        """Return what runs now: method, lane, seq, age in seconds; oldest first."""
        now = time.monotonic_ns()
        mine = {id(call): call for call in running.copy().values() if call.owner is self._answering}
        calls = sorted(mine.values(), key=lambda call: call.since_ns)
        return [
            {"method": c.method, "lane": c.request.lane, "seq": c.seq, "age_s": round((now - c.since_ns) / 1e9, 3)}
            for c in calls
        ]

    def ctl_handlers(self) -> list[Handler]:
        """Return the bus's own methods that run now, which must be quick. Any thread."""
        calls = running.copy().items()
        return [
            Handler(f"ctl method {call.method}", call.since_ns, thread)
            for thread, call in calls
            if call.owner is self._answering and call.request.lane == "ctl"
        ]

    # -- where requests arrive -----------------------------------------------------------------------------------

    def run_main(self, request: Execute) -> None:
        """Run a request of the main lane to its end."""
        self._enter(request)
        self._at_work = _NOTHING

    def give_up(self, request: Execute, error: BaseException) -> None:
        """Answer what of a request has no answer: a signal handler raised, not in a method, and ended its run.

        Main thread. The calls that had not begun are told so.
        """
        if self._holding is None:
            return
        at_work, calls = self._at_work
        self._at_work = _NOTHING
        now = time.monotonic_ns()
        for index in self._holding.unanswered(request):
            call = calls[index] if at_work is request else ("?",)
            method = "?" if call is None else call[0]
            self._answering.fail(request, index, method, error, now, now, begun=call is None)
        self._answering.over(request)

    def dispatch(self, request: Execute) -> None:
        """Hand a request of another lane to where it runs. Quick; called under the server's lock."""
        lane = request.lane
        if lane in self._served.async_lanes and self.async_lanes is not None:
            self.async_lanes.dispatch(request)
            return
        pool = self.pools.made.get(lane) or self.pools.of(lane, self._served.width(lane))
        pool.submit(self._enter, request)

    def cancel(self, effect: CancelRunning) -> None:
        """Stop a request where it allows it: async at its ``await``, sync at ``zbus.checkpoint``.

        What of it has not begun here will not begin. Called while the callee has it as running, so before its end.
        """
        key = (effect.session, effect.lane, effect.seq)
        self._answering.unwanted.add(key)
        if effect.lane in self._served.async_lanes and self.async_lanes is not None:
            self.async_lanes.cancel(key)
        self._intake.cancel(key)
        stream = self._steps.streams.get(key)
        if stream is not None:
            stream.grant(stream.acked)  # it may wait for credit

    def credit(self, effect: StreamCredit) -> None:
        """Let a stream run on."""
        stream = self._steps.streams.get((effect.session, effect.lane, effect.seq))
        if stream is not None:
            stream.grant(effect.acked)

    def close(self) -> None:
        """Stop the pools and the loop without waiting for what still runs."""
        self.pools.close()
        self._answering.closed = True
        if self.async_lanes is not None:
            self.async_lanes.close()

    # -- running on threads --------------------------------------------------------------------------------------

    def _run_within(self, request: Execute) -> None:
        with self._within():
            self._run(request)

    def _run(self, request: Execute) -> None:
        answering = self._answering
        started = time.monotonic_ns()
        calls = self._intake.calls(request)
        if calls is None:
            return
        if request.lane == "main":
            self._at_work = (request, calls)
        if request.calls == 1:  # the way of most
            decoded = time.monotonic_ns()
            answering.note(request, (calls[0][0],))
            late = answering.unwanted or (request.deadline_ns is not None and decoded >= request.deadline_ns)
            if not late or not answering.refused(request, 0, decoded):
                self._run_one(Step(self._steps, request, 0, calls, started, decoded))
        elif request.lane != "main" or not self._run_plainly(request, calls, started):
            for step in self._steps.of(request, calls, started):
                self._run_one(step)
        if answering.unwanted:
            answering.over(request)

    def _run_plainly(self, request: Execute, calls: list[Any], started: int) -> bool:
        """Run a batch in the loop of ``batches`` if that may: nothing is to be done around its calls. Main thread."""
        if self._holding is None or type(calls) is SpecialCalls or failpoints.active is not None:
            return False
        ring = self.rings.ring(request)
        run_batch(self._answering, self._holding, request, calls, ring, started, traced=get_tracer().rpc)
        return True

    def _run_one(self, step: Step) -> None:
        step.key = threading.get_ident()
        with step:
            step.find()
            if step.special is not None:
                step.prepare()
                if step.is_refused():  # meanwhile
                    return
            step.begin()
            step.value = step.function(*step.args, **step.kwargs)
            if type(step.value) is GeneratorType:
                self._stream(step, step.value)
                return
            step.end()
            step.encode()

    def _stream(self, step: Step, items: Generator[Any, Any, Any]) -> None:
        stream = step.stream(None)
        with contextlib.closing(items):
            for item in items:
                stream.wait(lambda: self._answering.is_stopped(step.request), step.method)
                stream.send(item)
        step.end()
