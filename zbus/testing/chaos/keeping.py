"""What the soak's callers do with values that stay where they were made: keep, pass on, cut, own and let go of them.

Any rank may die meanwhile. Then the call that was to get the value did not start, and says so; what is answered is the
sum of the very bytes that were kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from controller import Controller
from controller.group import Group
from zbus.codec import Ref
from zbus.errors import RefLostError, ZbusError

__all__ = ["Keeping", "held"]

_SIZES: Final = (1000, 100_000, 3_000_000)

Take = Callable[[int, Any, Any], None]
"""Calls a rank with a value or its handle, compares the answer with what the value is, and records the call."""


class Keeping:
    """The steps of one caller. Every call that is compared goes through ``take``.

    Args:
        bus: Whose values are put.
        group: The role of subjects.
        chance: Of all choices.
        take: Calls and records.
        deadline_s: Of the calls that keep.
    """

    def __init__(self, bus: Controller, group: Group, chance: random.Random, take: Take, deadline_s: float) -> None:
        self._bus = bus
        self._group = group
        self._chance = chance
        self._take = take
        self._deadline_s = deadline_s
        self._data = np.frombuffer(chance.randbytes(max(_SIZES)), np.uint8)

    @property
    def steps(self) -> Sequence[Callable[[], None]]:
        """What there is to do."""
        return self.kept, self.some_rows, self.passed_on, self.put, self.scoped

    def kept(self) -> None:
        """What one rank keeps another takes."""
        value = self._value()
        ref = self._keep(value)
        if ref is not None:
            self._take(self._rank(), ref, value)

    def some_rows(self) -> None:
        """Another takes some of it only."""
        value = self._value()
        ref = self._keep(value)
        start = self._chance.randrange(len(value))
        stop = self._chance.randrange(start, len(value)) + 1
        if ref is not None:
            self._take(self._rank(), ref[start:stop], value[start:stop])

    def passed_on(self) -> None:
        """A second rank keeps what it got from the first, and a third takes it from there."""
        value = self._value()
        ref = self._keep(value)
        again = None if ref is None else self._keep(ref)
        del ref
        if again is not None:
            self._take(self._rank(), again, value)

    def put(self) -> None:
        """Two ranks take what this process keeps."""
        value = self._value()
        ref = self._bus.put(value)
        for _ in range(2):
            self._take(self._rank(), ref, value)

    def scoped(self) -> None:
        """What a scope owned goes with it: nobody takes it afterwards."""
        value = self._value()
        with self._bus.scope():
            ref = self._keep(value)
            if ref is not None:
                self._take(self._rank(), ref, value)
        if ref is None:
            return
        try:
            ref.get()
        except RefLostError:
            return
        msg = f"{ref!r} was there after the end of its scope"
        raise AssertionError(msg)

    def _value(self) -> Any:
        return self._data[: self._chance.choice(_SIZES)]

    def _rank(self) -> int:
        return self._chance.randrange(len(self._group))

    def _keep(self, value: Any) -> Ref | None:
        """Have some rank keep a value; None if that rank, or whoever had the value, is gone: nothing is kept."""
        with suppress(ZbusError):
            ref: Ref = self._group[self._rank()].keep.options(deadline=self._deadline_s)(value)
            return ref
        return None


def held(bus: Controller) -> list[str]:
    """Return who still keeps values for Refs, in words."""
    found = {str(name): status for name, status in bus.statuses().items()} | {"controller": bus.report()}
    return [f"{name} keeps {facts['refs']} Refs of {facts['refs_bytes']:,} bytes" for name, facts in found.items()
            if facts["refs"]]  # fmt: skip
