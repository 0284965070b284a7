"""What takes large arrays out of messages, as a client sees it. ``zbus.data`` has the one that does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from zbus.codec import Keep
from zbus.protocol.messages import Buffers

__all__ = ["NOWHERE", "Carrier", "Opening", "Reach"]

_MOST_ENDPOINTS: Final = 8
_LONGEST: Final = 256


class Reach(NamedTuple):
    """Where a process's arrays can be read, as it said in the handshake.

    Attributes:
        memory: Name of its directory of shared memory; empty for none.
        data: Where its bulk data is bound, best first; empty where it neither offers nor pulls.
    """

    memory: str = ""
    data: tuple[str, ...] = ()

    @classmethod
    def told(cls, facts: Mapping[str, Any]) -> Reach:
        """Return what a HELLO or WELCOME says; what is not well-formed counts as not said."""
        memory, data = facts.get("memory"), facts.get("data")
        fits = (
            isinstance(data, (list, tuple))
            and len(data) <= _MOST_ENDPOINTS
            and all(isinstance(endpoint, str) and len(endpoint) <= _LONGEST for endpoint in data)
        )
        return cls(memory if isinstance(memory, str) else "", tuple(data) if fits and data else ())

    def facts(self) -> dict[str, Any]:
        """Return what is said in HELLO and WELCOME."""
        return {"memory": self.memory, "data": list(self.data)}


NOWHERE: Final = Reach()


class Opening(Protocol):
    """The arrays of one message on their way."""

    @property
    def total(self) -> int:
        """Bytes to come."""
        ...

    def result(self) -> Buffers:
        """Return the frames with their arrays, once told that it is over.

        Raises:
            CodecError: One of them did not come.
        """
        ...

    def cancel(self) -> None:
        """Want nothing of it any more; nobody is told."""
        ...


class Carrier(Protocol):
    """Takes large arrays out of messages."""

    @property
    def reach(self) -> Reach:
        """What peers are told of this process in the handshake."""
        ...

    def keeper(self, peers: Sequence[Reach], *, snapshot: bool) -> Keep | None:
        """Return what makes the frames of large arrays for a message to these peers; None for frames as usual."""
        ...

    def addressed(self, frames: Buffers, peer: Reach) -> Buffers:
        """Return frames that a peer can open."""
        ...

    def must_pull(self, frames: Buffers) -> bool:
        """Tell whether ``opened`` would have to wait for data."""
        ...

    def opened(self, frames: Buffers, peer: Reach) -> Buffers:
        """Return frames that came from a peer with the arrays in their places.

        Raises:
            CodecError: What they name is not there.
        """
        ...

    def open_later(self, frames: Buffers, peer: Reach, then: Callable[[Opening], None]) -> Opening:
        """Do as ``opened`` without waiting: ``then`` is called on another thread once all is there, or failed.

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

    def forget(self, peer: Reach) -> None:
        """Drop what is kept of a peer that is gone. May look at files."""
        ...
