"""What takes large arrays out of messages, as a client sees it. ``zbus.data`` has the one that uses shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from zbus.codec import Keep
from zbus.protocol.messages import Buffers

__all__ = ["Carrier"]


class Carrier(Protocol):
    """Takes large arrays out of messages to and from processes of this host."""

    @property
    def token(self) -> str:
        """What peers are told of this process in the handshake."""
        ...

    def keeper(self, peers: Sequence[str], *, snapshot: bool) -> Keep | None:
        """Return what makes the frames of large arrays for a message to these peers; None for frames as usual."""
        ...

    def addressed(self, frames: Buffers, peer: str) -> Buffers:
        """Return frames that a peer can open."""
        ...

    def opened(self, frames: Buffers, peer: str) -> Buffers:
        """Return frames that came from a peer with the arrays in their places.

        Raises:
            CodecError: What they name is not there.
        """
        ...

    def empty(self, shape: Sequence[int] | int, dtype: Any) -> Any:
        """Return an array to fill that needs no copy when it is sent."""
        ...

    def statistics(self) -> dict[str, int]:
        """Return bytes held and lent; empty if nothing ever was."""
        ...

    def forget(self, peer: str) -> None:
        """Drop what is kept of a peer that is gone. May look at files."""
        ...
