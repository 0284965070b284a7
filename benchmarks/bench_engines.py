"""Engines that the benchmarks call."""

from __future__ import annotations

import zbus
from zbus import Everywhere, PerRank


class Echo(zbus.Engine):
    """Returns what it is given."""

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def echo(self, value: object) -> object:
        """Return ``value``."""
        return value
