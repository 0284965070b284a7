"""Engines that the benchmarks call."""

from __future__ import annotations

from typing import Any

import numpy as np

import zbus
from zbus import Concat, Everywhere, PerRank, Split


class Echo(zbus.Engine):
    """Returns what it is given."""

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def echo(self, value: object) -> object:
        """Return ``value``."""
        return value


class Arrays(zbus.Engine):
    """Takes and gives arrays; reads one byte of each page of what it takes."""

    def setup(self, ctx: zbus.Context) -> None:
        """Keep what is given."""
        self.made: dict[int, np.ndarray[Any, Any]] = {}

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def take(self, array: np.ndarray[Any, Any]) -> int:
        """Read an array."""
        return _touch(array)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def give(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return an array of bytes that exists already."""
        if nbytes not in self.made:
            self.made[nbytes] = np.ones(nbytes, np.uint8)
        return self.made[nbytes]

    @zbus.endpoint(Split("dp"), collect=Concat(), effect="pure")
    def step(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Read a share of a batch and return arrays of its shapes."""
        for array in batch.values():
            _touch(array)
        return batch


def _touch(array: np.ndarray[Any, Any]) -> int:
    return int(array.reshape(-1).view(np.uint8)[::4096].sum())
