"""The controller's handles: values that ranks keep for it, values that it keeps itself, and when they may go.

A value is held by a ``Hold``; the handles of it share one, and so do calls under way that have it as an argument. It
goes when the last of them is dropped, with its scope, or by ``Ref.release``; the owner is told by a short message,
again until it has acknowledged, and hears of this controller while anything of it is held (``zbus.data.holds``).
"""

from __future__ import annotations

import contextvars
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

from controller.background import shared
from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.codec import Ref, decode, encode
from zbus.codec.refs import lost
from zbus.data.desk import Desk, fill, refs_in
from zbus.data.holds import Holds, Tell
from zbus.errors import RefLimitError, Unavailable, ZbusError
from zbus.protocol.messages import Buffers, Outcome, OutcomeKind
from zbus.transport.client import Client, PeerState

__all__ = ["Claim", "ClientLink", "Hold", "Link", "RefBook", "Scope"]

log = logging.getLogger("zbus.refs")

_PUT: Final = "ctx.put"
"""What a handle names as its method that an engine made by ``ctx.put``."""

_ASK_S: Final = 300.0
_TELL_S: Final = 10.0
_AGAIN_S: Final = 0.5
"""How soon an owner is told again that did not acknowledge."""

Key = tuple[str, int, int]
"""Role, rank and incarnation of an owner."""


def key_of(peer: Any) -> Key:
    """Return who a peer is."""
    return peer.name.role, peer.name.rank, peer.incarnation


class Link(Protocol):
    """How owners are reached."""

    def ask(self, ref: Ref, questions: Sequence[Sequence[Any]], deadline_ns: int) -> Sequence[Mapping[str, Any]]:
        """Return what ``Desk.answers`` of the owner of a handle says.

        Raises:
            RefLostError: It is gone, or does not answer in time.
        """
        ...

    def tell(self, tell: Tell, done: Callable[[bool | None], None]) -> None:
        """Tell an owner what is let go, then call ``done``: True if it heard, False if not, None if it is gone."""
        ...


class Hold:
    """Keeps what one call made on one rank, or one value. Dropped with its last handle, or by ``release``. Thread-safe.

    Args:
        book: Whose it is.
        claim: Number of the call; 0 for none.
        number: Number of the value; 0 for none.
    """

    __slots__ = (
        "__weakref__",
        "_book",
        "_claim",
        "_lock",
        "_number",
        "_owners",
        "_pins",
        "_released",
        "nbytes",
        "seen",
    )

    def __init__(self, book: RefBook, claim: int = 0, number: int = 0) -> None:
        self._book = book
        self._claim = claim
        self._number = number
        self._owners: list[Hashable] = []
        self._lock = threading.Lock()
        self._pins = 0
        self._released = False
        self.nbytes = 0
        self.seen = False  # the user has a handle, or had one

    def placed_on(self, owner: Hashable) -> None:
        """The call was sent to one more incarnation of its rank."""
        with self._lock:
            self._owners.append(owner)
        self._book.took(owner)
        if self._released:  # its scope has ended: what the call makes there goes at once
            self.release()

    @property
    def released(self) -> bool:
        """Whether it was let go."""
        return self._released

    def pin(self) -> None:
        """A call under way needs the value."""
        with self._lock:
            self._pins += 1

    def unpin(self) -> None:
        """It does not any more."""
        with self._lock:
            self._pins -= 1
            owners = self._take_owners()
        self._book.let_go(owners, self._claim, self._number)

    def release(self) -> None:
        """Let it go, when no call needs it any more."""
        with self._lock:
            self._released = True
            owners = self._take_owners()
        self._book.let_go(owners, self._claim, self._number)

    def _take_owners(self) -> list[Hashable]:
        if self._pins or not self._released:
            return []
        owners, self._owners = self._owners, []
        return owners

    def __del__(self) -> None:
        if self._owners and not self._book.closed:  # in the garbage collector: nothing is waited for
            self._book.later(partial(self._book.let_go, self._owners, self._claim, self._number))


def _unpin(holds: Sequence[Any]) -> None:
    for hold in holds:
        hold.unpin()


class Pins:
    """Keeps the values that a call under way is given, until ``close``. Thread-safe; dropping it closes it."""

    __slots__ = ("_holds",)

    def __init__(self, holds: Sequence[Any]) -> None:
        self._holds: Sequence[Any] = holds
        for hold in holds:
            hold.pin()

    def close(self) -> None:
        """Let go: all calls have ended, or none was placed. May be called under the bus's lock; idempotent."""
        holds, self._holds = self._holds, ()
        if holds:
            shared().call(partial(_unpin, holds))

    def __del__(self) -> None:
        self.close()


class Claim:
    """One call whose results are kept: a hold for each rank it is sent to.

    Args:
        book: Whose it is.
        number: Under which its results are kept.
        scope: Where it was made; None: in none.
    """

    def __init__(self, book: RefBook, number: int, scope: Scope | None = None) -> None:
        self._book = book
        self.number = number
        self._scope = scope
        self._holds: dict[int, Hold] = {}

    def placed_on(self, ranks: Sequence[int], peers: Sequence[Any]) -> None:
        """The call is about to be sent."""
        for rank, peer in zip(ranks, peers, strict=True):
            hold = self._holds.get(rank)
            if hold is None:
                hold = self._holds[rank] = Hold(self._book, self.number)
                if self._scope is not None:
                    self._scope.own(hold)
            hold.placed_on(key_of(peer))

    def hold_of(self, ref: Ref) -> Hold | None:
        """Return what keeps the value of a handle that came as an answer; its size counts from now on.

        Raises:
            RefLimitError: It is more than the scope of the call may hold.
        """
        hold = self._holds.get(ref.rank)
        if hold is not None:
            hold.nbytes = ref.nbytes
            if self._scope is not None:
                self._scope.add(hold)
        return hold


class _Local:
    """Keeps a value that this process keeps itself."""

    __slots__ = ("__weakref__", "_desk", "_pins", "_ref", "nbytes", "released")

    def __init__(self, desk: Desk, ref: Ref) -> None:
        self._desk = desk
        self._ref = ref.with_fields(kept=None)
        self._pins = 0
        self.nbytes = ref.nbytes
        self.released = False

    def pin(self) -> None:
        """A call under way has its frames already: nothing to do."""

    def unpin(self) -> None:
        """As ``pin``."""

    def release(self) -> None:
        """Let it go."""
        self.released = True
        self._desk.drop(self._ref)

    def __del__(self) -> None:
        if not self.released:
            shared().call(partial(self._desk.drop, self._ref))


class Scope:
    """Owns what is kept by what is done in its block; all of it is let go at its end. Made by ``Controller.scope``.

    That is: what is put there, what calls keep that are made there, and handles of values that engines put, if they
    first come in an answer that is read there. Handles of other values may be read there as often as one likes.

    Attributes:
        limit: Most bytes it may hold, or None.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._holds: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of the values it holds."""
        with self._lock:
            return sum(hold.nbytes for hold in self._holds if not hold.released)

    def own(self, hold: Any) -> None:
        """Own what a call will make; it is let go at once if this has ended."""
        with self._lock:
            self._holds.add(hold)
            closed = self.closed
        if closed:
            hold.release()

    def add(self, hold: Any) -> None:
        """Own one more value, of a known size.

        Raises:
            RefLimitError: That is more than it may hold; the value is let go.
        """
        self.own(hold)
        if self.closed:
            return
        if self.limit is not None and (total := self.nbytes) > self.limit:
            hold.release()
            msg = f"this scope may hold {self.limit:,} bytes and would hold {total:,}"
            raise RefLimitError(msg, hint="release Refs in it, end it earlier, or give it more: bus.scope(limit=...)")

    def close(self) -> None:
        """Let all of it go."""
        with self._lock:
            self.closed = True
            holds = list(self._holds)
        for hold in holds:
            hold.release()


_scopes: Final[contextvars.ContextVar[tuple[Scope, ...]]] = contextvars.ContextVar("zbus_scopes", default=())
"""The scopes around the running code, innermost last; set by ``RefBook.scope``."""


def _run_if_there(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Run a method unless its object is gone: a job of later must not keep a closed controller's memory."""
    run = method()
    if run is not None:
        run()


class RefBook:
    """What a controller holds. Any thread may call.

    Args:
        desk: What it keeps itself, and how it opens what others keep.
        link: How owners are reached.
        renew_s: How often an owner must hear of this controller while anything of it is held.
        clock: Tells the time.
        jobs: Runs a job after so many seconds; may be called under any lock. The process's background thread, if None.
    """

    def __init__(
        self,
        desk: Desk,
        link: Link,
        *,
        renew_s: float,
        clock: Clock = SYSTEM_CLOCK,
        jobs: Callable[[Callable[[], None], float], None] | None = None,
    ) -> None:
        self.desk = desk
        self._now = clock.monotonic_ns
        self._jobs = jobs
        self._link = link
        self._holds = Holds(int(renew_s * 1e9))
        self._renew_s = renew_s
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._put: weakref.WeakValueDictionary[tuple[int, int], Hold] = weakref.WeakValueDictionary()
        self._pumping = False
        self._retrying = False
        self._closed = False

    # -- what users call -----------------------------------------------------------------------------------------------

    def put(self, value: Any) -> Ref:
        """Keep a value in this process; see ``Controller.put``."""
        ref = self.desk.keep(value, method="bus.put")
        hold = _Local(self.desk, ref)
        ref.bind(self, hold)
        self._into_scope(hold)
        return ref

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        """Return the value of a handle, or values in place of the handles in lists, tuples and dicts."""
        deadline_ns = time.monotonic_ns() + int((_ASK_S if timeout is None else timeout) * 1e9)
        for one in refs_in(ref):
            if one.hold is not None and one.hold.released:
                raise lost(one, "it was released")
        opened = self.desk.open_all(refs_in(ref), self._link.ask, deadline_ns)
        return fill(ref, opened.__getitem__)

    def release(self, ref: Ref) -> None:
        """Let go of the value of a handle."""
        if ref.hold is not None:
            ref.hold.release()
        elif self.desk.is_mine(ref):
            self.desk.drop(ref)
        else:
            self._hold_of(ref).release()

    @contextmanager
    def scope(self, limit: int | None = None) -> Iterator[Scope]:
        """Own what is kept from here to the end of the block; see ``Controller.scope``."""
        made = Scope(limit)
        token = _scopes.set((*_scopes.get(), made))
        try:
            yield made
        finally:
            _scopes.reset(token)
            made.close()

    # -- what calls need -----------------------------------------------------------------------------------------------

    def claim(self) -> Claim:
        """Return the number under which a call's results are kept; they belong to the scope that this is called in."""
        return Claim(self, next(self._numbers), next(reversed(_scopes.get()), None))

    def bind(self, refs: Iterable[Ref], claim: Claim | None) -> None:
        """Tie handles that came in an answer to this controller, and to what keeps their values.

        Raises:
            RefLimitError: They are more than the scope may hold.
        """
        for ref in refs:
            hold = claim.hold_of(ref) if claim is not None and ref.method != _PUT else None
            new = False
            if hold is None and not self.desk.is_mine(ref):
                hold = self._hold_of(ref)
                hold.nbytes = ref.nbytes
                hold.seen, new = True, not hold.seen
            ref.bind(self, hold)
            if new:
                self._into_scope(hold)

    def unread(self, payload: Buffers) -> list[Hold]:
        """Return what keeps the values that engines put of which an answer tells that nobody may ever read."""
        found: list[Ref] = []
        decode(payload, refs=found)
        return [self._hold_of(ref) for ref in found if ref.method == _PUT and not self.desk.is_mine(ref)]

    def _hold_of(self, ref: Ref) -> Hold:
        """Return what keeps a value that an engine put, one for all handles of it."""
        with self._lock:
            hold = self._put.get(ref.key)
            new = hold is None
            if hold is None:
                hold = self._put[ref.key] = Hold(self, number=ref.number)
        if new:
            hold.placed_on((ref.role, ref.rank, ref.incarnation))
        return hold

    @staticmethod
    def pinned(refs: Iterable[Ref]) -> Pins:
        """Return what keeps the values of handles that a call is given, until it is closed.

        Raises:
            RefLostError: One was released.
        """
        holds = []
        for ref in refs:
            if ref.hold is not None:
                if ref.hold.released:
                    raise lost(ref, "it was released")
                holds.append(ref.hold)
        return Pins(holds)

    # -- holding -------------------------------------------------------------------------------------------------------

    def took(self, owner: Hashable) -> None:
        """Something of an owner may be held from now on."""
        with self._lock:
            self._holds.take(owner, self._now())
        self._pump_soon(self._renew_s)

    def let_go(self, owners: Sequence[Hashable], claim: int, number: int = 0) -> None:
        """What a call made there is not held any more, or one value is not."""
        if not owners or self._closed:
            return
        with self._lock:
            for owner in owners:
                self._holds.let_go(owner, claim=claim, number=number)
        self.later(self._pump)

    def later(self, job: Callable[[], None], delay_s: float = 0.0) -> None:
        """Run a job aside. May be called under any lock, and by the garbage collector."""
        if self._jobs is None:
            shared().call(job, delay_s)
        else:
            self._jobs(job, delay_s)

    @property
    def idle(self) -> bool:
        """Whether nothing of other processes is held, and none has to be told of anything."""
        with self._lock:
            return self._holds.idle

    @property
    def closed(self) -> bool:
        """Whether nobody is told anything any more."""
        return self._closed

    def close(self) -> None:
        """Tell nobody anything any more: all owners hear this session's farewell."""
        self._closed = True

    def _into_scope(self, hold: Any) -> None:
        scopes = _scopes.get()
        if scopes:
            scopes[-1].add(hold)

    def _pump_soon(self, delay_s: float) -> None:
        with self._lock:
            if self._pumping or self._closed:
                return
            self._pumping = True
        self.later(partial(_run_if_there, weakref.WeakMethod(self._pump_again)), delay_s)

    def _pump_again(self) -> None:
        with self._lock:
            self._pumping = False
            idle = self._holds.idle
        if not idle and not self._closed:
            self._pump()
            self._pump_soon(self._renew_s)

    def _pump(self) -> None:
        if self._closed:
            return
        with self._lock:
            tells = self._holds.due(self._now())
        for tell in tells:
            try:
                self._link.tell(tell, partial(self._told, tell))
            except ZbusError:  # this controller is closing
                self._told(tell, heard=False)
            except Exception:  # a fault of ours: told again like any that was not heard, and the other owners now
                log.exception("an owner of kept values could not be told what is let go")
                self._told(tell, heard=False)

    def _retry(self) -> None:
        with self._lock:
            self._retrying = False
        self._pump()

    def _told(self, tell: Tell, heard: bool | None) -> None:  # noqa: FBT001  # a callback
        left = retry = False
        with self._lock:
            if heard:
                self._holds.told(tell, self._now())
                left = self._holds.owes(tell.owner)
            elif heard is None:
                self._holds.dead(tell.owner)
            else:
                self._holds.failed(tell)
                retry = not self._retrying  # one serves all owners: each of its own would tell them all again
                self._retrying = True
        if left:  # let go while this was on its way, or too much for one message
            self.later(self._pump)
        if retry:
            self.later(self._retry, _AGAIN_S)


class ClientLink:
    """Reaches ranks over the controller's own connections.

    Args:
        client: The controller's.
        peer_of: Returns the connection to a start of a rank while it is the current one, else None.
    """

    def __init__(self, client: Client, peer_of: Callable[[Key], Any]) -> None:
        self._client = client
        self._peer_of = peer_of

    def ask(self, ref: Ref, questions: Sequence[Sequence[Any]], deadline_ns: int) -> Sequence[Mapping[str, Any]]:
        """See ``Link``."""
        client = self._client
        while True:
            peer = self._peer_of((ref.role, ref.rank, ref.incarnation))
            if peer is None:
                raise lost(ref, "it has ended since")
            outcomes: list[Outcome] = []
            left_s = (deadline_ns - time.monotonic_ns()) / 1e9
            try:
                client.place(
                    [peer],
                    "ctl",
                    [encode([["zbus.ref_open", (list(questions),), {}]])],
                    1,
                    deadline_s=max(0.001, left_s),
                    sink=_into(outcomes),
                )
            except Unavailable as error:
                if peer.state is PeerState.DEAD:
                    raise lost(ref, f"it has ended: {peer.evidence}") from error
                if left_s <= 0:
                    raise lost(ref, f"{ref.owner} does not answer: {peer.evidence}") from error
                client.wait(partial(_is_settled, peer), min(left_s, 1.0))
                continue
            client.wait(partial(bool, outcomes), None)
            outcome = outcomes[0]
            if outcome.kind is OutcomeKind.OK:
                answers: Sequence[Mapping[str, Any]] = decode(outcome.payload or ())
                return answers
            if outcome.is_error and outcome.payload is not None:
                raise lost(ref, f"its owner failed to tell where it is: {decode(outcome.payload).get('message', '')}")
            raise lost(ref, outcome.evidence or "its owner did not answer in time")

    def tell(self, tell: Tell, done: Callable[[bool | None], None]) -> None:
        """See ``Link``."""
        owner: Any = tell.owner
        peer = self._peer_of(owner)
        if peer is None or peer.state is PeerState.DEAD:
            done(None)
            return

        def sink(_member: int, _call: int, outcome: Outcome) -> None:
            shared().call(partial(done, outcome.kind is OutcomeKind.OK))

        frames = encode([["zbus.ref_release", (list(tell.claims), list(tell.numbers)), {}]])
        try:
            self._client.place([peer], "ctl", [frames], 1, deadline_s=_TELL_S, sink=sink)
        except Unavailable:
            done(False)  # noqa: FBT003  # a callback of one argument


def _is_settled(peer: Any) -> bool:
    return peer.state in {PeerState.READY, PeerState.DEAD}


def _into(outcomes: list[Outcome]) -> Callable[[int, int, Outcome], None]:
    return lambda _member, _call, outcome: outcomes.append(outcome)
