"""One endpoint of a group, and the ways to call it: wait, submit, await, map, stream."""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, ParamSpec, TypeVar, cast

from controller.collect import collect
from controller.dispatch import Arguments, Plan, plan
from controller.futures import BatchFuture, Stream, first
from controller.line import Line
from controller.order import Order
from controller.placement import Placement
from controller.placer import Placer, Roster, is_crowded, is_ready, room
from controller.quick import QuickCall
from controller.soon import SoonFuture
from zbus.codec import (
    JoinedRef,
    Keep,
    Ref,
    encode,
    encode_call,
    encode_plain_batch,
    encode_plain_call,
    encode_plain_calls,
)
from zbus.engine import AnyOne, EndpointSpec, Everywhere, RankZero, Reduce, Same, Split, Whole
from zbus.errors import ConfigError, Unavailable
from zbus.protocol.messages import Buffers
from zbus.retry import DEFAULT_RETRY, NO_RETRY, RetryPolicy, TokenBucket, deadline_seconds
from zbus.trace.tracer import get_tracer

if TYPE_CHECKING:
    from controller.mapping import MapFuture
    from controller.refs import Claim, RefBook
    from zbus.data.warm import WarmMemory

__all__ = ["Core", "Method", "View", "encode_alike", "encode_calls"]

P = ParamSpec("P")
T = TypeVar("T")


_new = tuple.__new__
_SPECIAL: Final = frozenset((Ref, JoinedRef, Whole))
"""Arguments that ``Placement`` sees to."""


class Core:
    """What a group and its slices share."""

    def __init__(self, roster: Roster, placer: Placer, deadline_s: float, refs: RefBook | None = None) -> None:
        self.roster = roster
        self.refs = refs
        self.placer = placer
        self.deadline_s = deadline_s
        self.bucket = TokenBucket()
        self.line = Line()
        self._lock = threading.Lock()
        self.numbers = itertools.count(1)
        self._loads: dict[int, int] = {}
        self._turn = 0
        self._warm: WarmMemory | None = None

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return an array to join answers in. Any thread."""
        warm = self._warm
        if warm is None:
            from zbus.data.warm import WarmMemory  # numpy is imported by the first array, not before

            warm = self._warm = WarmMemory()  # two threads may make two of them: one is kept, both work
        return warm.empty(shape, dtype)

    def choose(self, ranks: Sequence[int]) -> int:
        """Pick the least loaded ready rank, in turn among equals, and count the call; ``release`` undoes it."""
        peers = self.roster.peers()
        with self._lock:
            ready = [rank for rank in ranks if is_ready(peers[rank])] or list(ranks)
            self._turn += 1
            start = self._turn
            best = min(ready, key=lambda rank: (self._loads.get(rank, 0), (rank - start) % len(peers)))
            self._loads[best] = self._loads.get(best, 0) + 1
            return best

    def release(self, rank: int) -> None:
        """A call chosen for ``rank`` ended. May run under the placer's lock."""
        with self._lock:
            self._loads[rank] -= 1


@dataclass(frozen=True)
class View:
    """Which ranks of a role are called, and with what defaults.

    Attributes:
        core: Shared by all views of the role.
        ranks: Ascending.
        single: One rank picked by its number: answers come bare.
        deadline_s: Overrides the endpoint's deadline, in seconds.
        retry: Overrides the effect's retry policy.
        keep: Overrides whether results stay with the ranks.
    """

    core: Core
    ranks: tuple[int, ...]
    single: bool = False
    deadline_s: float | None = None
    retry: RetryPolicy | None = None
    keep: bool | None = None

    @property
    def role(self) -> str:
        """Name of the role."""
        return self.core.roster.role

    def options(
        self,
        deadline: float | str | None,
        retries: int | RetryPolicy | None,
        keep: bool | None = None,  # noqa: FBT001  # as it is said in public ``options``
    ) -> View:
        """Return the same view with other defaults; None keeps one."""
        if isinstance(retries, int):
            retries = replace(DEFAULT_RETRY, attempts=retries + 1)
        return replace(
            self,
            deadline_s=self.deadline_s if deadline is None else deadline_seconds(deadline),
            retry=self.retry if retries is None else retries,
            keep=self.keep if keep is None else keep,
        )


class Method(Generic[P, T]):
    """One endpoint of a group."""

    def __init__(self, view: View, spec: EndpointSpec) -> None:
        self._view = view
        self.spec = spec
        self.keeps = spec.keep if view.keep is None else view.keep
        # Each rank is called with the same, now, and values come of it. (Rank zero of one rank is everyone.)
        alike = isinstance(spec.dispatch, Everywhere) or (view.single and isinstance(spec.dispatch, RankZero))
        self._quick = alike and not spec.streams and not self.keeps and spec.start != "together"
        self._pick: Callable[[Sequence[Any]], Sequence[Any]] = (
            operator.itemgetter(*view.ranks) if len(view.ranks) > 1 else lambda peers: (peers[view.ranks[0]],)
        )
        self._everyone = tuple(range(len(view.ranks))) if isinstance(spec.dispatch, Everywhere) else None
        self._deadline_s = view.deadline_s or spec.deadline_s or view.core.deadline_s
        everyone = tuple(range(len(view.ranks)))
        self.quick_merge = self.merge(Plan(everyone, (), heads=everyone))
        self._soon: Any = None  # what plain calls of one rank leave by, if there is such
        if self._quick and len(view.ranks) == 1:
            self._soon = getattr(view.core.placer, "soon", None)
        self.__name__ = spec.name
        self.__doc__ = spec.doc or None

    def __repr__(self) -> str:
        return f"<Method {self._view.role}.{self.spec.name}{self.spec.signature or '(...)'}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call and wait; see ``BatchFuture.result`` for the errors."""
        if self._quick and not kwargs:
            quick = self._start_quick(args, snapshot=False)
            if quick is not None:
                return cast("T", quick.result(self.quick_merge, self._recover))
        return self.start(args, kwargs).result()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> BatchFuture[T]:
        """Call without waiting. Arrays are copied now, so they may be changed at once.

        Raises:
            Unavailable: A member is not ready; nothing was sent.
            DispatchError: The arguments do not fit the declaration.
            CodecError: A value cannot be carried.
        """
        if self._soon is not None and not kwargs:
            future = self._start_soon(args)
            if future is not None:
                return future
        return self.start(args, kwargs, snapshot=True)

    def aio(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        """Call from a coroutine: ``await actor.train.aio(x)``. Placed when awaited; cancelling it cancels the call."""
        return self._aio(args, kwargs)

    async def _aio(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
        if self._quick and not kwargs:
            placer, peers = self._view.core.placer, self._pick(self._view.core.roster.peers())
            quick = None if is_crowded(placer, peers, self.spec.lane) else self._start_quick(args, snapshot=True)
            if quick is not None:
                return cast("T", await quick.answer(self.quick_merge, self._recover))
        spread = self.plan(args, kwargs)
        try:
            placement = self._placement(spread, snapshot=True)
            await placement.start_async()
        except BaseException:
            self._undo(spread)
            raise
        future: BatchFuture[T] = BatchFuture(placement, 0, self.merge(spread))
        try:
            return await future
        finally:
            del future  # the error that is raised keeps this frame; see ``BatchFuture.result``

    def options(
        self,
        *,
        deadline: float | str | None = None,
        retries: int | RetryPolicy | None = None,
        keep: bool | None = None,
        split: Split | None = None,
    ) -> Method[P, T]:
        """Return the same endpoint with another deadline, retry policy or split, or with its results kept at the ranks.

        Args:
            deadline: Seconds or text such as ``"2m"``.
            retries: Executions after the first, or a whole policy.
            keep: The answer is a ``Ref`` per rank, and the values stay where they were made.
            split: How the items are shared out instead of as declared, such as ``Split(groups=2)``; which arguments are
                split is declared by the endpoint, unless ``args`` says otherwise.

        Raises:
            ConfigError: The endpoint is not declared with ``Split``.
        """
        spec = self.spec if split is None else replace(self.spec, dispatch=_resplit(self.spec, split))
        return Method(self._view.options(deadline, retries, keep), spec)

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Stream[Any]:
        """Call a generator endpoint and take its items as they come.

        Raises:
            ConfigError: The endpoint is not a generator.
        """
        if not self.spec.streams:
            msg = f"endpoint `{self.spec.name}` is not a generator, so it has no items to stream"
            raise ConfigError(msg, hint="`yield` in the method, or call it without .stream")
        return Stream(self._place(self.plan(args, kwargs), snapshot=True, collects=False))

    def map(
        self,
        items: Iterable[Any],
        *more: Iterable[Any],
        order: Literal["input", "done"] = "input",
        deadline: float | str | None = None,
        errors: Literal["raise", "return"] = "raise",
        max_in_flight: int | None = None,
    ) -> MapFuture[T]:
        """Call once per item, spread over the ready ranks, the least loaded first.

        Args:
            items: One argument per call; may be endless, it is read as answers come.
            more: Further arguments of each call, as in Python's ``map``: ``generate.map(prompts, samplings)``. It ends
                with the shortest, such as of ``itertools.repeat(sampling)``.
            order: ``"input"``: answers in the order of the items. ``"done"``: as they come.
            deadline: Of each call, from its start: seconds or text.
            errors: ``"raise"``: a failed call raises at its place, and what has not started is cancelled.
                ``"return"``: its error is the answer.
            max_in_flight: Most calls out at once; default twice what the ranks run at once.

        Raises:
            ConfigError: The endpoint's dispatch is not ``AnyOne``, or lists of arguments differ in length.
        """
        from controller.mapping import MapFuture, columns

        if not isinstance(self.spec.dispatch, AnyOne):
            msg = f"endpoint `{self.spec.name}` is not AnyOne, so its calls cannot be spread by map"
            raise ConfigError(msg, hint=f"declare it with AnyOne(), or call {self._view.role}[rank].{self.spec.name}")
        method = self if deadline is None else self.options(deadline=deadline)
        limit = max_in_flight or 2 * (self.spec.concurrency or 1) * len(self._view.ranks)
        return MapFuture(
            lambda arguments: method.start(arguments, {}, snapshot=True),
            columns(self.spec.name, (items, *more)),
            placer=self._view.core.placer,
            order=order,
            errors=errors,
            limit=limit,
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, snapshot: bool = False) -> BatchFuture[T]:
        """Place one call; ``snapshot`` copies its arrays now."""
        spread = self.plan(args, kwargs)
        return BatchFuture(self._place(spread, snapshot=snapshot), 0, self.merge(spread))

    @property
    def alike(self) -> Plan | None:
        """How a call is spread that gives each rank the same, without its arguments; None: it is declared otherwise."""
        members = self._everyone
        return None if members is None else Plan(members, (), heads=members)

    def plan(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """Spread one call over the ranks."""
        members = self._everyone
        if members is not None and not kwargs:
            least, most = self.spec.arity
            if least <= len(args) <= most and Whole not in map(type, args):  # as ``dispatch.plan`` would, in one step
                return _new(Plan, (members, (_new(Arguments, (args, {})),) * len(members), None, (), members))
        core, ranks = self._view.core, self._view.ranks
        return plan(
            self.spec,
            core.roster.mesh,
            ranks,
            Arguments(args, dict(kwargs)),
            choose=lambda: ranks.index(core.choose(ranks)),
            empty=room(core.placer),
        )

    def _place(self, spread: Plan, *, snapshot: bool, collects: bool = True) -> Placement:
        try:
            placement = self._placement(spread, snapshot=snapshot, collects=collects)
            placement.start()
        except BaseException:
            self._undo(spread)
            raise
        return placement

    def _placement(self, spread: Plan, *, snapshot: bool, collects: bool = True) -> Placement:
        spec = self.spec
        submitted_ns = time.monotonic_ns()
        ranks = [self._view.ranks[member] for member in spread.members]
        peers = self._view.core.roster.peers()
        keep = self._view.core.placer.keeper([peers[rank] for rank in ranks], snapshot=snapshot)
        claims = [self.claim()]
        refs: list[Ref] = []
        payloads = encode_calls(
            [[(spec.name, a)] for a in spread.arguments], snapshot=snapshot, keep=keep, claims=claims, refs=refs
        )
        order = self._order(ranks, payloads, submitted_ns)
        order.collects = collects and spec.streams
        if claims[0] is not None:
            order.claims = claims
        if refs and order.refs is not None:
            order.pins = order.refs.pinned(refs)
        return Placement(order)

    def claim(self) -> Claim | None:
        """Return what holds the results of one call that stay with the ranks; None where they are sent.

        Raises:
            ConfigError: They cannot stay.
        """
        if not self.keeps:
            return None
        book, spec = self._view.core.refs, self.spec
        if spec.streams or isinstance(spec.collect, Same | Reduce):
            why = "streams" if spec.streams else f"needs the answers of its ranks ({type(spec.collect).__name__})"
            msg = f"endpoint `{spec.name}` {why}, so its results cannot stay where they are made"
            raise ConfigError(msg, hint="call it without keep=True")
        if book is None:
            msg = f"results of `{spec.name}` cannot be kept: this group was made without a controller"
            raise ConfigError(msg, hint="use Controller.group")
        return book.claim()

    def _undo(self, spread: Plan) -> None:
        """Take back the choice of a rank for a call that was not placed."""
        if isinstance(self.spec.dispatch, AnyOne):
            self._view.core.release(self._view.ranks[spread.members[0]])

    def _order(self, ranks: list[int], payloads: Sequence[Any], submitted_ns: int) -> Order:
        spec, core, options = self.spec, self._view.core, self._view
        any_one = isinstance(spec.dispatch, AnyOne)
        return Order(
            placer=core.placer,
            roster=core.roster,
            ranks=ranks,
            lane=spec.lane,
            submitted_ns=submitted_ns,
            payloads=payloads,
            encoded_ns=time.monotonic_ns(),
            number=next(core.numbers),
            methods=(spec.name,),
            deadline_s=self._deadline_s,
            strict=spec.strict,
            together=spec.start == "together",
            retry=options.retry or (NO_RETRY if spec.effect == "once" else DEFAULT_RETRY),
            effect=spec.effect,
            streams=spec.streams,
            choose=(lambda: core.choose(options.ranks)) if any_one else None,
            bucket=core.bucket,
            line=core.line,
            refs=core.refs,
            released=core.release if any_one else None,
        )

    def _start_quick(self, args: tuple[Any, ...], *, snapshot: bool) -> QuickCall | None:
        """Place a call the short way; None, and nothing sent, where something about it is not plain."""
        spec, core = self.spec, self._view.core
        least, most = spec.arity
        if core.line or not least <= len(args) <= most or get_tracer().rpc:
            return None
        peers = self._pick(core.roster.peers())
        payload: Buffers | None = encode_plain_call(spec.name, args)
        if payload is None:
            payload = self._encode_any(peers, args, snapshot=snapshot)
            if payload is None:
                return None
        quick = QuickCall(core.placer, peers, payload, core.refs)
        try:
            quick.place(spec.lane, self._deadline_s, strict=spec.strict)
        except Unavailable:
            return None  # it is refused or waits, as any other
        return quick

    def _start_soon(self, args: tuple[Any, ...]) -> SoonFuture[T] | None:
        """Place a plain call of one rank, or let it leave with others; None, and nothing done, where that cannot be."""
        spec, core = self.spec, self._view.core
        least, most = spec.arity
        if core.line or not least <= len(args) <= most or get_tracer().rpc:
            return None
        payload = encode_plain_call(spec.name, args)
        if payload is None:
            return None
        peer = core.roster.peers()[self._view.ranks[0]]
        future = SoonFuture(self, peer, payload)
        return future if self._soon.place(peer, spec.lane, payload, self._deadline_s, future) else None

    def send_soon(self) -> None:
        """Send what waits to leave with others."""
        self._soon.send_all()

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``done()``, driving the placer; False if the time ran out first."""
        return self._view.core.placer.wait(done, timeout_s)

    def placement_of(self, peer: Any, payload: Buffers, seq: int, began_ns: int) -> Placement:
        """Return a placement that goes on with a call placed by ``soon``; not placed yet, if ``seq`` is below 0."""
        placement = Placement(self._order([self._view.ranks[0]], [payload], began_ns))
        placed = self._soon.handle(peer, self.spec.lane, seq) if seq >= 0 else None
        placement.adopt([peer], placed, began_ns / 1e9)
        return placement

    def _encode_any(self, peers: Sequence[Any], args: tuple[Any, ...], *, snapshot: bool) -> Buffers | None:
        """Encode a call of arrays, lists and the like; None where a handle is among them, or it has to wait."""
        placer = self._view.core.placer
        if not _SPECIAL.isdisjoint(map(type, args)) or is_crowded(placer, peers, self.spec.lane):
            return None
        found: list[Ref] = []
        keep = placer.keeper(peers, snapshot=snapshot)
        payload = encode_call(self.spec.name, args, {}, snapshot=snapshot, keep=keep, refs=found)
        return None if found else payload

    def _recover(self, quick: QuickCall) -> BatchFuture[T]:
        ranks = list(self._view.ranks)
        placement = Placement(self._order(ranks, [quick.payload] * len(ranks), quick.began_ns))
        quick.hand_over(placement)
        return BatchFuture(placement, 0, self.quick_merge)

    def merge(self, spread: Plan) -> Callable[[Sequence[Any]], T]:
        """Return what turns the members' values into the answer."""
        if self._view.single:
            return first
        spec = self.spec
        ranks = [self._view.ranks[member] for member in spread.members]
        empty = self._view.core.empty
        return lambda values: cast("T", collect(spec.collect, spread, ranks, values, spec.name, empty=empty))


def _resplit(spec: EndpointSpec, split: Split) -> Split:
    if not isinstance(spec.dispatch, Split):
        msg = f"endpoint `{spec.name}` is declared {type(spec.dispatch).__name__}, so a call of it splits nothing"
        raise ConfigError(msg, hint="declare it with Split(...)")
    return replace(split, args=spec.dispatch.args) if split.args is None else split


def encode_calls(
    calls: Sequence[Sequence[tuple[str, Arguments]]],
    *,
    snapshot: bool,
    keep: Keep | None = None,
    claims: Sequence[Claim | None] = (),
    refs: list[Ref] | None = None,
) -> list[Any]:
    """Encode each member's calls; members whose arguments are the same objects share one payload.

    Args:
        calls: For each member, method and arguments of each call.
        snapshot: As for ``zbus.codec.encode``.
        keep: As there.
        refs: As there.
        claims: For each call, what holds its result, if it stays where it is made.
    """
    numbers = [None if claim is None else claim.number for claim in claims] if any(claims) else []
    if len(calls) == 1:
        if len(calls[0]) == 1 and not numbers:
            name, arguments = calls[0][0]
            return [encode_call(name, *arguments, snapshot=snapshot, keep=keep, refs=refs)]
        return [_encode_member(calls[0], numbers, snapshot=snapshot, keep=keep, refs=refs)]
    made: dict[tuple[int, ...], Any] = {}
    payloads = []
    for member in calls:
        key = tuple(id(arguments) for _, arguments in member)
        if key not in made:
            made[key] = _encode_member(member, numbers, snapshot=snapshot, keep=keep, refs=refs)
        payloads.append(made[key])
    return payloads


def encode_alike(
    names: Sequence[str],
    arguments: Sequence[tuple[Any, ...]],
    *,
    keep: Keep | None = None,
    refs: list[Ref] | None = None,
) -> Any:
    """Encode calls that are the same for every member and have no keywords; arrays may change afterwards."""
    plain = encode_plain_batch(names, arguments)
    if plain is not None:
        return plain
    entries = [[name, args, {}] for name, args in zip(names, arguments, strict=True)]
    return encode(entries, snapshot=True, keep=keep, refs=refs)


def _encode_member(
    calls: Sequence[tuple[str, Arguments]],
    numbers: Sequence[int | None],
    *,
    snapshot: bool,
    keep: Keep | None,
    refs: list[Ref] | None,
) -> Any:
    listed = [(name, *arguments) for name, arguments in calls]
    plain = None if numbers else encode_plain_calls(listed)
    if plain is not None:
        return plain
    entries: list[list[Any]] = list(map(list, listed))
    for entry, number in zip(entries, numbers, strict=False):
        if number is not None:
            entry.append({"keep": number})
    return encode(entries, snapshot=snapshot, keep=keep, refs=refs)
