"""The data of ``prepare_batch``: one item after the other, over and over, and how far it has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

from zbus.errors import ConfigError

__all__ = ["Feed"]

_END: Final[Any] = object()


class Feed:
    """Items of a source, in its order. ``fetch`` and ``skip`` on the thread that pulls.

    Args:
        source: Iterated anew at its end; an iterator, which cannot be, ends the feed.
        batched: Each of its elements is a list of items.
        fetched: Items that come first.

    Attributes:
        epoch: How many times the source was gone through.
        position: Items taken from it in this epoch.
        ended: There will be no more.
        fetched: Items taken from it and not used yet; whoever uses one pops it from the left, on any thread.
    """

    def __init__(self, source: Iterable[Any], *, batched: bool = False, fetched: Iterable[Any] = ()) -> None:
        self.source = source
        self.batched = batched
        self.epoch = 0
        self.position = 0
        self.ended = False
        self.fetched: deque[Any] = deque(fetched)
        self._iterator: Iterator[Any] | None = None
        self._broken: Exception | None = None
        self._rest: deque[Any] = deque()

    def fetch(self, count: int) -> None:
        """Have ``count`` items in ``fetched``, or what there is where an iterator has ended.

        Raises:
            ConfigError: The source has no items.
        """
        while len(self.fetched) < count and not self.ended:
            item = self._next()
            if item is not _END:
                self.fetched.append(item)

    def skip(self, epoch: int, position: int) -> None:
        """Begin where another run stood: ``position`` items into ``epoch``. Before the first ``fetch``.

        Raises:
            ConfigError: The source has fewer items.
        """
        self.epoch = epoch
        for _ in range(position):
            if self._next() is _END or self.epoch != epoch:
                msg = f"the data has fewer than {position} items, where the earlier run stood in epoch {epoch}"
                raise ConfigError(msg, hint="resume with the data that the run began with")

    def _next(self) -> Any:
        if not self._refill() and not self.ended:
            if self.position == 0:
                msg = "the data of prepare_batch has no items"
                raise ConfigError(msg, hint="give an iterable with at least one item")
            self._iterator, self.epoch, self.position = None, self.epoch + 1, 0
            self._refill()
        if not self._rest:
            self.ended = True
            return _END
        self.position += 1
        return self._rest.popleft()

    def _refill(self) -> bool:
        """Have an item in ``_rest``; False at the end of the source."""
        if self._iterator is None:
            self._iterator = iter(self.source)
        while not self._rest:
            element = self._element(self._iterator)
            if element is _END:
                self.ended = self._iterator is self.source
                return False
            self._rest.extend(element if self.batched else (element,))
        return True

    def _element(self, iterator: Iterator[Any]) -> Any:
        if self._broken is not None:  # an iterator that raised looks as if it had ended: items would be left out
            msg = f"the data of prepare_batch raised {type(self._broken).__name__} before, so what follows is not known"
            raise ConfigError(msg, hint="repair it and give a new object") from self._broken
        try:
            return next(iterator, _END)
        except Exception as error:
            self._broken = error
            raise
