"""All arrays of one process: through shared memory to those who share it, pulled by those who do not.

An array of ``PULL_FROM`` bytes and more that a reader cannot map leaves as an ``Offer``: 32 bytes in the message, and
the array itself over the ``data`` sockets, when the reader opens the message. So a gigabyte stands in no queue in front
of other calls, is received into memory that is used again, and is never sent to somebody who has it already.

The rule for its memory is that of shared memory: the frame is an object, whoever may send the message again keeps it,
and the array is there for as long as the object is.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from zbus.codec import Keep
from zbus.codec.limits import DEFAULT_LIMITS
from zbus.data.courier import Courier
from zbus.data.lease import SHARED_FROM, Lease
from zbus.data.offer import Offer, is_offer, read_offer
from zbus.errors import CodecError, TransportError
from zbus.protocol.messages import Buffer, Buffers
from zbus.protocol.puller import Ending
from zbus.transport.bulk import Bulk, Pull, PullFailed, Range
from zbus.transport.carrier import Reach

if TYPE_CHECKING:
    import numpy as np

    from zbus.data.warm import WarmMemory

__all__ = ["PULL_FROM", "Opening", "Porter"]

PULL_FROM: Final = 4 << 20
"""Bytes from which an array is pulled where it cannot be mapped; measured in ``docs/decisions/bulk-data.md``."""


_STANDING: Final = frozenset((Lease, Offer))
"""Frames that stand for an array."""

_MOST_KNOWN: Final = 64
_REACH: Final = (
    "that address must be reached from here; it is bound at scheduler.bind (the controller) or --bind (a rank)"
)


class Porter:
    """Carries arrays out of messages and back in. Any thread may call. numpy comes with the first large array.

    Args:
        courier: What lends and opens shared memory.
        bulk: What offers and pulls; None: arrays that cannot be mapped travel in the messages.
        pull_from: Bytes from which an array is pulled.
        most_copied: Most bytes of copies on offer at once; None: a quarter of this host's memory. What is more travels
            in the messages, and waits under the bounds of those.
    """

    def __init__(
        self, courier: Courier, bulk: Bulk | None, *, pull_from: int = PULL_FROM, most_copied: int | None = None
    ) -> None:
        self.courier = courier
        self.bulk = bulk
        self._pull_from = pull_from
        self._most_copied = most_copied
        self._copied = 0
        self._ended: deque[int] = deque()
        self._lock = threading.Lock()
        self._answers: dict[Reach, Keep | None] = {}
        self._warm: WarmMemory | None = None

    @property
    def reach(self) -> Reach:
        """What peers are told of this process in the handshake."""
        return Reach(self.courier.token, () if self.bulk is None else tuple(self.bulk.endpoints))

    # -- leaving -------------------------------------------------------------------------------------------------

    def keeper(self, peers: Sequence[Reach], *, snapshot: bool) -> Keep | None:
        """Return what an encoder does with large arrays; None: what it does anyway.

        Args:
            peers: Of the processes the message may go to. Each is given the right to read by ``addressed``.
            snapshot: Copy arrays, so that they may be changed at once.
        """
        is_near = self.courier.is_near
        near = [is_near(peer.memory) for peer in peers]
        far = self._offers_to(peers)
        if not any(near) and not far:
            return None
        return _Keeper(self, any(near), all(near), far, snapshot=snapshot)

    def frame(self, data: memoryview | bytes, keeper: _Keeper) -> Buffer:
        """Return what stands for the memory of an array in a message."""
        nbytes = len(data)
        if keeper.lends and nbytes >= SHARED_FROM:
            lease = self.courier.lend(data)
            if lease is not None:
                return lease
        if keeper.far and nbytes >= self._pull_from:
            offer = self._copy(data) if keeper.snapshot else self.offer(memoryview(data))
            if offer is not None:
                return offer
        return bytes(data) if keeper.snapshot else memoryview(data)

    def keeper_for(self, peer: Reach) -> Keep | None:
        """Return what an encoder does with large arrays of an answer to one peer; None: it copies them."""
        if peer not in self._answers:
            if len(self._answers) >= _MOST_KNOWN:  # guests come and go
                self._answers.clear()
            self._answers[peer] = self._keeper_for(peer)
        return self._answers[peer]

    def _keeper_for(self, peer: Reach) -> Keep | None:
        keep = self.keeper([peer], snapshot=True)
        if keep is None:
            return None

        def addressed(data: memoryview | bytes) -> Buffer:
            frame = keep(data)
            return self._addressed(frame, peer) if type(frame) is Lease else frame

        return addressed

    def addressed(self, frames: Buffers, peer: Reach) -> Buffers:
        """Return frames that one more peer can open."""
        addressed = self._addressed
        return [addressed(frame, peer) if type(frame) in _STANDING else frame for frame in frames]

    def _addressed(self, frame: Buffer, peer: Reach) -> Buffer:
        if type(frame) is Lease:
            if self.courier.address(frame, peer.memory):
                return frame
            (made,) = self.courier.in_full([frame])
            if frame.nbytes < self._pull_from or not self._offers_to([peer]):
                return made
            return self.offer(memoryview(made))
        if type(frame) is Offer and not peer.data:
            return frame.buffer
        return frame

    @staticmethod
    def in_full(frames: Buffers) -> Buffers:
        """Return frames that anybody can read; the memory behind them stays for as long as they do."""
        return [frame.buffer if type(frame) is Offer else frame for frame in Courier.in_full(frames)]

    def empty(self, shape: Sequence[int] | int, dtype: Any) -> np.ndarray[Any, Any]:
        """Return an array to fill, in shared memory where there is room; see ``Controller.empty``."""
        return self.courier.empty(shape, dtype)

    # -- coming --------------------------------------------------------------------------------------------------

    @staticmethod
    def must_pull(frames: Buffers) -> bool:
        """Tell whether ``opened`` would have to wait for data."""
        return any(map(is_offer, frames[1:]))

    def opened(
        self,
        frames: Buffers,
        peer: Reach,
        deadline_s: float | None = None,
        begun: Callable[[Opening], None] | None = None,
    ) -> Buffers:
        """Return received frames with the arrays in place of what names them; waits for those that are pulled.

        Args:
            frames: As received.
            peer: What their sender said of itself.
            deadline_s: Seconds from now in which all must be there; None: as long as they come.
            begun: Given what is waited for, if anything is; its ``give_up`` ends the wait.

        Raises:
            CodecError: What they name is not there, or did not come.
        """
        made = self.courier.opened(frames, peer.memory)
        if len(frames) == 1 or not self.must_pull(frames):
            return made
        done = threading.Event()
        opening = self._begin(made, peer, deadline_s, lambda _opening: done.set())
        try:
            if begun is not None:
                begun(opening)
            done.wait()
        except BaseException:
            opening.cancel()
            raise
        return opening.result()

    def open_later(
        self, frames: Buffers, peer: Reach, then: Callable[[Opening], None], deadline_s: float | None = None
    ) -> Opening:
        """Do as ``opened`` without waiting: ``then`` is called on another thread once all is there, or failed.

        Raises:
            CodecError: What they name is not there.
        """
        return self._begin(self.courier.opened(frames, peer.memory), peer, deadline_s, then)

    def _begin(
        self, frames: Buffers, peer: Reach, deadline_s: float | None, then: Callable[[Opening], None]
    ) -> Opening:
        wanted = {number: read_offer(frame) for number, frame in enumerate(frames) if number and is_offer(frame)}
        total = sum(nbytes for _, nbytes in wanted.values())
        if self.bulk is None or not peer.data or total > DEFAULT_LIMITS.buffer_bytes:
            msg = f"{total:,} bytes of arrays are to be pulled from a process that named no address for it"
            if peer.data:
                msg = f"{total:,} bytes of arrays are offered, at most {DEFAULT_LIMITS.buffer_bytes:,} are taken"
            raise CodecError(msg)
        opening = Opening(self.bulk, frames, total, len(wanted), then)
        try:
            for number, (key, nbytes) in wanted.items():
                opening.add(number, self.memory(nbytes), (peer.data, key, nbytes, deadline_s))
            self.bulk.call_soon(opening.begun)
        except (TransportError, MemoryError, ValueError, OSError) as error:
            opening.cancel()
            msg = f"{total:,} bytes of arrays cannot be pulled: {error}"
            raise CodecError(msg) from error
        return opening

    def memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return memory to pull into; what is made of it may be written to."""
        from zbus.data.pulled import Pulled

        return self._warm_memory().empty((nbytes,), "u1").view(Pulled)

    # -- the rest ------------------------------------------------------------------------------------------------

    def forget(self, peer: Reach) -> None:
        """A peer is gone: drop what we keep of its memory, and wait for nothing of it. May look at files."""
        self._answers.pop(peer, None)
        self.courier.forget(peer.memory)
        if self.bulk is not None and peer.data:
            self.bulk.owner_gone(peer.data, "its process ended")

    def statistics(self) -> dict[str, int]:
        """Return bytes held, lent, offered and pulled here."""
        counts = dict(self.courier.statistics())
        if self.bulk is not None:
            counts.update(self.bulk.statistics())
        return counts

    def leave(self) -> None:
        """Remove our directory of shared memory. What peers have open stays readable for them. Idempotent."""
        self.courier.leave()

    # -- inside --------------------------------------------------------------------------------------------------

    def _offers_to(self, peers: Sequence[Reach]) -> bool:
        return self.bulk is not None and bool(self.bulk.endpoints) and any(peer.data for peer in peers)

    def kept(self, data: memoryview | bytes) -> Buffer:
        """Return what stands for memory that is kept: a lease with a copy of it in shared memory, or a private copy."""
        if len(data) < SHARED_FROM:
            return bytes(data)
        lease = self.courier.lend(data)
        if lease is not None:
            return lease
        import numpy as np

        copy = self._warm_memory().empty((len(data),), "u1")
        np.copyto(copy, np.frombuffer(data, np.uint8))
        return copy.data.toreadonly()

    def offer(self, view: memoryview) -> Offer:
        """Offer memory as it stands, which must not change, for as long as the frame that is returned is kept."""
        bulk = self.bulk
        assert bulk is not None  # noqa: S101  # asked before
        offer = Offer(view, lambda made: bulk.withdraw(made.key))
        bulk.offer(offer.key, view)
        return offer

    def offer_copy(self, copy: memoryview) -> Offer | None:
        """Offer memory that was copied for one reader, as ``offer`` does; None if copies take too much already."""
        nbytes = copy.nbytes
        if not self._has_room(nbytes, made=True):
            return None
        return self._offer_counted(copy, nbytes)

    @property
    def most_copied(self) -> int:
        """Most bytes of copies on offer at once."""
        from zbus.data.arena import host_memory

        return (host_memory()[1] or 4 << 30) // 4 if self._most_copied is None else self._most_copied

    def _copy(self, data: memoryview | bytes) -> Offer | None:
        """Offer a copy; None if too much is on offer already."""
        import numpy as np

        bulk = self.bulk
        assert bulk is not None  # noqa: S101  # asked before
        bulk.let_go()  # most often the answer before this one, whose memory this one can have
        nbytes = len(data)
        if not self._has_room(nbytes):
            return None
        try:
            copy = self._warm_memory().empty((nbytes,), "u1")
            np.copyto(copy, np.frombuffer(data, np.uint8))  # without the interpreter's lock
        except BaseException:
            self._ended.append(nbytes)
            raise
        return self._offer_counted(copy.data.toreadonly(), nbytes)

    def _has_room(self, nbytes: int, *, made: bool = False) -> bool:
        """Take room for a copy, if there is; ``made``: its memory is taken already."""
        from zbus.data.arena import host_memory

        available, total = host_memory()
        most = self.most_copied
        with self._lock:
            while self._ended:
                self._copied -= self._ended.popleft()
            # Each process has its own bound, and all of a host share the memory: as of shared memory, a tenth stays.
            if self._copied + nbytes > most or available - (0 if made else nbytes) < total // 10:
                return False
            self._copied += nbytes
        return True

    def _offer_counted(self, copy: memoryview, nbytes: int) -> Offer:
        bulk = self.bulk
        assert bulk is not None  # noqa: S101  # asked before

        def ended(made: Offer) -> None:
            self._ended.append(nbytes)
            bulk.withdraw(made.key)

        offer = Offer(copy, ended)
        bulk.offer(offer.key, offer.buffer)
        return offer

    def _warm_memory(self) -> WarmMemory:
        made = self._warm
        if made is None:
            from zbus.data.warm import WarmMemory

            with self._lock:
                made = self._warm = self._warm or WarmMemory()
        return made


class _Keeper:
    """What an encoder does with large arrays; see ``Porter.keeper``.

    Attributes:
        lends: A reader maps what is lent.
        all_map: All do, so that what is lent already need not be cut for any of them.
        far: A reader pulls what is offered.
        snapshot: Arrays may change afterwards.
    """

    __slots__ = ("_porter", "all_map", "far", "lends", "snapshot")

    def __init__(self, porter: Porter, lends: bool, all_map: bool, far: bool, *, snapshot: bool) -> None:  # noqa: FBT001  # one caller
        self._porter = porter
        self.lends = lends
        self.all_map = all_map
        self.far = far
        self.snapshot = snapshot

    def __call__(self, data: memoryview | bytes) -> Buffer:
        return self._porter.frame(data, self)


class Opening:
    """The arrays of one message on their way. Any thread may call.

    Attributes:
        total: Bytes to come.
    """

    def __init__(self, bulk: Bulk, frames: Buffers, total: int, count: int, then: Callable[[Opening], None]) -> None:
        self._bulk = bulk
        self.total = total
        self._frames: list[Buffer] = list(frames)
        self._then: Callable[[Opening], None] | None = then
        self._pulls: list[Pull] = []
        self._left = count + 1  # the last one is that all have begun
        self._failed: PullFailed | None = None

    def add(
        self,
        number: int,
        memory: np.ndarray[Any, Any],
        what: tuple[Sequence[str], bytes, int, float | None],
    ) -> None:
        """Pull one array into memory, and put it in its place."""
        endpoints, key, nbytes, deadline_s = what
        view = memory.data
        self._frames[number] = view
        self._pulls.append(
            self._bulk.pull(
                endpoints, key, [Range(0, 0, nbytes, nbytes)], [view.cast("B")], deadline_s=deadline_s, then=self._ended
            )
        )

    def begun(self) -> None:
        """All have been added. As all that ends a pull here, on the bulk thread."""
        self._settle(None)

    def result(self) -> Buffers:
        """Return the frames with their arrays, once told that it is over.

        Raises:
            CodecError: One of them did not come.
        """
        if self._failed is not None:
            absent = getattr(self._failed, "how", None) is Ending.ABSENT
            raise CodecError(str(self._failed), hint=_REACH if absent else None) from self._failed
        return self._frames

    def give_up(self) -> None:
        """Want nothing of it any more; whoever waits is told that it failed, on the bulk thread."""
        with contextlib.suppress(TransportError):  # this process closes, which ends it as well
            self._bulk.call_soon(self._give_up)

    def _give_up(self) -> None:
        then = self._then
        if then is None:
            return
        self.cancel()
        self._failed = next((pull.failure() for pull in self._pulls if pull.how is not Ending.DONE), None)
        self._failed = self._failed or PullFailed("given up when all was there")
        then(self)

    def cancel(self) -> None:
        """Want nothing of it any more; nobody is told."""
        self._then = None
        for pull in self._pulls:
            pull.cancel()
        self._frames = []

    def _ended(self, pull: Pull) -> None:
        try:
            pull.check()
        except PullFailed as error:
            self._settle(error)
        else:
            self._settle(None)

    def _settle(self, error: PullFailed | None) -> None:
        self._left -= 1
        if error is not None and self._failed is None:
            self._failed = error
        if self._left:
            return
        then, self._then = self._then, None
        if then is not None:
            then(self)
