"""When a connection that carries nothing is made anew: to the hub, to the sidecar.

libzmq connects again after a loss, but not after bytes that are no protocol of its own (another service on the peer's
port, a mangled frame): it then gives up without a word, and where nobody watches the connection silence is all that
shows it. The links to workers are watched, see ``zbus.protocol.liveness``.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Redial"]

_NS: Final = 1_000_000_000


class Redial:
    """Counts silence: after ``first_s`` it is time to dial anew, then after twice as long each time, up to ``most_s``.

    Args:
        jitter: Between 0 and 1, another one for each process, so that many do not dial in step.

    Attributes:
        count: How often it was time.
    """

    def __init__(self, *, first_s: float = 2.0, most_s: float = 30.0, jitter: float = 1.0) -> None:
        self._share = _NS * (0.5 + 0.5 * jitter)
        self._first_s = first_s
        self._most_s = most_s
        self._pause_s = first_s
        self.due_ns: int | None = None
        self.count = 0

    def heard(self) -> None:
        """Something came: nothing is due."""
        self.due_ns, self._pause_s = None, self._first_s

    def silent(self, now_ns: int) -> bool:
        """Nothing comes. True if it is time to dial anew now."""
        if self.due_ns is None:
            self.due_ns = now_ns + int(self._pause_s * self._share)
        if now_ns < self.due_ns:
            return False
        self.count += 1
        self._pause_s = min(2 * self._pause_s, self._most_s)
        self.due_ns = now_ns + int(self._pause_s * self._share)
        return True
