"""How ranks that compute one batch learn that one of them has failed, before they wait for it in a collective.

Ranks meet, each saying how it is, before each layer whose parts are gathered and at the end of each pass. A rank that
fails says so in place of its next meeting and waits for nobody; the others leave at theirs. So all have left after the
same collectives, nothing is under way, and their group is as good as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from workers.engines.train.place import Peers

__all__ = ["Meeting", "left"]


def left(who: str, name: str) -> str:
    """Say why a rank leaves a batch that it could have computed."""
    return f"{who} failed in {name!r}, so this rank left the batch too, without a step; see the error of that rank"


class Meeting:
    """One rank's part in it. Main thread.

    Args:
        peers: The ranks that meet.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._name = ""
        self._open = False
        self._over = False

    def before(self, module: nn.Module) -> None:
        """Have ranks meet before each forward of a module; to be called after whatever gathers its parts."""
        module.register_forward_pre_hook(self._meet_before, prepend=True)

    @contextmanager
    def passing(self, name: str) -> Iterator[Meeting]:
        """Compute passes of ``name`` inside. Whatever is raised there is told to the other ranks.

        Each pass ends with ``end``, on every rank.
        """
        self._name, self._open, self._over = name, True, False
        try:
            yield self
        except BaseException:
            if not self._over:
                self._over = True
                self._peers.fail()
            raise
        finally:
            self._open = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run layers inside without meeting: where they are computed again on the way back."""
        self._open = False
        yield
        self._open = True

    def end(self, weight: float = 0.0) -> float:
        """Meet at the end of a pass; return the sum of the ranks' numbers.

        Raises:
            ConnectionAbortedError: Another rank failed.
            RuntimeError: The group broke.
        """
        failed = 1.0
        if not self._over:
            self._over = True  # also if this breaks: nobody can be told then
            weight, failed = self._peers.sum(weight, 0.0)
            self._over = failed > 0
        if failed:
            raise ConnectionAbortedError(left("another rank", self._name))
        return weight

    def _meet_before(self, _module: Any, _arguments: Any) -> None:
        if self._open:
            self.end()
