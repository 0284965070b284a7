"""Engines that import nothing: what starting, an idle worker and a death cost without them."""

from __future__ import annotations

import time

import zbus
from zbus import Everywhere, PerRank


class Plain(zbus.Engine):
    """Returns what it is given, or nothing for a long time."""

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def echo(self, value: object) -> object:
        """Return ``value``."""
        return value

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="once")
    def hang(self, seconds: float) -> None:
        """Answer too late."""
        time.sleep(seconds)


class Torch(Plain):
    """The same, of a model that needs torch."""

    def setup(self, ctx: zbus.Context) -> None:
        """Import what a model needs; the template has done it where the role asked for that."""
        import torch

        assert torch.__version__
