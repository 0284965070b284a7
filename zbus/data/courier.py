"""Both sides of one process: large arrays of a message leave as leases where all their readers are on this host.

Frames in, frames out: ``keeper`` makes what the encoder puts in place of an array, ``addressed`` lets a peer read it,
``opened`` turns received frames into ones the decoder can read. Which peers are on this host is not guessed from names:
a peer is, if the directory it named in the handshake stands in our own shared memory and its process lives.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbus.codec import Keep
from zbus.data.lease import SHARED_FROM, Lease, is_descriptor
from zbus.data.presence import VARIABLE, Presence, is_token, lives, shared_root, sweep
from zbus.errors import TransportError
from zbus.protocol.messages import Buffer, Buffers

if TYPE_CHECKING:
    import numpy as np

    from zbus.data.arena import Arena
    from zbus.data.loans import Loans

__all__ = ["Courier"]

log = logging.getLogger("zbus.data")


class Courier:
    """Lends and opens. Any thread may call. numpy is imported with the first large array, not before.

    Args:
        presence: This process's directory; None where there is no shared memory: everything travels in frames.
        limit: Most bytes lent at once.
    """

    def __init__(self, presence: Presence | None, limit: int) -> None:
        self._presence = presence
        self._limit = limit
        self._near: dict[str, bool] = {}
        self._left: set[str] = set()
        self._answers: dict[str, Keep] = {}
        self._making = threading.Lock()
        self._arena_made: Arena | None = None
        self._loans_made: Loans | None = None

    @classmethod
    def enter(cls, limit: int | None = None, root: Path | None = None) -> Courier:
        """Take a place in this host's shared memory.

        Args:
            limit: Most bytes lent at once; None for half of the file system. 0 for none: no shared memory is used.
            root: Directory of all processes of this user.
        """
        place = root or shared_root()
        try:
            facts = os.statvfs(place.parent)
            most = facts.f_blocks * facts.f_frsize // 2 if limit is None else limit
            presence = Presence.enter(place) if most else None
        except (OSError, TransportError) as error:
            if limit != 0:  # who wants none need not hear of it
                log.warning(
                    "no shared memory in %s (%s): arrays between processes of this host go through sockets, which is "
                    "slower. Another place: %s; data.shared_memory=0 says that none is wanted",
                    place, error, VARIABLE,
                )  # fmt: skip
            return cls(None, 0)
        return cls(presence, most)

    @property
    def token(self) -> str:
        """What peers are told; empty without shared memory."""
        return "" if self._presence is None else self._presence.token

    def is_near(self, token: object) -> bool:
        """Tell whether a peer reads our memory and we read its."""
        if self._presence is None or not isinstance(token, str):
            return False
        near = self._near.get(token)
        if near is None:
            root = self._presence.path.parent
            near = self._near[token] = is_token(token) and lives(root, token)
        return near

    def has_left(self, token: str) -> bool:
        """Tell whether a process of this host that was near has ended since, also if nobody was told of it."""
        if self._presence is None or not token:
            return False
        if token not in self._left and self._near.get(token, False) and not lives(self._presence.path.parent, token):
            self._left.add(token)
        return token in self._left

    # -- leaving ---------------------------------------------------------------------------------------------------

    def keeper(self, peers: Sequence[str], *, snapshot: bool) -> Keep | None:
        """Return what an encoder does with large arrays; None: what it does anyway, because no peer is on this host.

        Args:
            peers: Tokens of the processes the message may go to. Each is given the right to read by ``addressed``.
            snapshot: Copy the arrays that are not lent, so that they may be changed at once.
        """
        if not any(map(self.is_near, peers)):
            return None

        def keep(data: memoryview | bytes) -> Buffer:
            if len(data) >= SHARED_FROM:
                lease = self.lend(data)
                if lease is not None:
                    return lease
            return bytes(data) if snapshot else memoryview(data)

        return keep

    def lend(self, data: memoryview | bytes) -> Lease | None:
        """Copy contiguous bytes into shared memory; None if there is none, or no room."""
        return None if self._presence is None else self._arena().lend(data)

    def keeper_for(self, peer: str) -> Keep | None:
        """Return what an encoder does with large arrays of an answer to one peer; None: it copies them."""
        known = self._answers.get(peer)
        lend = self.keeper([peer], snapshot=True) if known is None else None
        if lend is None:
            return known

        def keep(data: memoryview | bytes) -> Buffer:
            frame = lend(data)
            return frame.arena.view(frame) if type(frame) is Lease and not frame.arena.address(frame, peer) else frame

        self._answers[peer] = keep
        return keep

    def addressed(self, frames: Buffers, peer: str) -> Buffers:
        """Return frames that one more peer can open: the same on this host, else with the bytes themselves."""
        if self._arena_made is None:
            return frames
        leases = [frame for frame in frames if type(frame) is Lease]
        if not leases or (self.is_near(peer) and all(self._arena_made.address(lease, peer) for lease in leases)):
            return frames
        return self.in_full(frames)

    def address(self, lease: Lease, peer: str) -> bool:
        """Let one more peer open what is lent here; False: it cannot, and needs the bytes themselves."""
        return self._arena_made is not None and self.is_near(peer) and self._arena_made.address(lease, peer)

    @staticmethod
    def in_full(frames: Buffers) -> Buffers:
        """Return frames that anybody can read; the memory behind them stays for as long as they do."""
        return [frame.arena.view(frame) if type(frame) is Lease else frame for frame in frames]

    def room(self) -> int:
        """Return how many bytes this process may lend; without shared memory, half of the memory of the host."""
        if self._presence is not None:
            return self._limit
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

    def empty(self, shape: Sequence[int] | int, dtype: Any) -> np.ndarray[Any, Any]:
        """Return an array to fill, in shared memory where there is room; see ``Controller.empty``."""
        import numpy as np

        kind = np.dtype(dtype)
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(sizes) * kind.itemsize
        if self._presence is not None and nbytes >= SHARED_FROM and not kind.hasobject:
            memory = self._arena().reserve(nbytes)
            if memory is not None:
                return np.ndarray(sizes, kind, memory.data)
        return np.empty(sizes, kind)

    # -- coming ----------------------------------------------------------------------------------------------------

    def opened(self, frames: Buffers, owner: str) -> Buffers:
        """Return received frames with the arrays in place of what names them.

        Raises:
            CodecError: Something is named that is not lent to us now.
        """
        if len(frames) == 1 or not self.is_near(owner):
            return frames
        made = list(frames)
        for number in range(1, len(made)):
            frame = made[number]
            if is_descriptor(frame):
                made[number] = self._loans().open(bytes(frame), owner).data
        return made

    # -- the rest --------------------------------------------------------------------------------------------------

    def forget(self, token: str) -> None:
        """A peer is gone: drop what we keep of its memory, and what it left behind."""
        if self._presence is None or not self._near.pop(token, False):
            return
        if not lives(self._presence.path.parent, token):
            self._left.add(token)
        self._answers.pop(token, None)
        if self._loans_made is not None:
            self._loans_made.forget(token)
        if self._arena_made is not None:
            self._arena_made.died(token)
        sweep(self._presence.path.parent)

    def statistics(self) -> dict[str, int]:
        """Return bytes held and lent here; empty if nothing ever was."""
        return {} if self._arena_made is None else self._arena_made.statistics()

    def leave(self) -> None:
        """Remove our directory. What peers have open stays readable for them. Idempotent."""
        if self._loans_made is not None:
            self._loans_made.close()
        if self._arena_made is not None:
            self._arena_made.close()
        if self._presence is not None:
            self._presence.leave()

    def _arena(self) -> Arena:
        made = self._arena_made
        if made is None:
            from zbus.data.arena import Arena

            with self._making:
                assert self._presence is not None  # noqa: S101  # nobody is near without one
                made = self._arena_made = self._arena_made or Arena(self._presence, self._limit)
        return made

    def _loans(self) -> Loans:
        made = self._loans_made
        if made is None:
            from zbus.data.loans import Loans

            with self._making:
                assert self._presence is not None  # noqa: S101  # as above
                made = self._loans_made = self._loans_made or Loans(self._presence.path.parent, self._presence.token)
        return made
