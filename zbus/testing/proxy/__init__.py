"""A fault proxy: stands between a controller and its workers and harms what passes, message by message.

::

    with FaultProxy(seed=1) as proxy, between(proxy), Controller.launch(...) as bus:
        proxy.drop("reply", count=1)
        bus.group("actor").train(batch, 1)      # runs once, and the answer arrives
"""

from __future__ import annotations

from zbus.testing.proxy.placing import between, quick
from zbus.testing.proxy.rules import REPLIES, REQUESTS, Rule
from zbus.testing.proxy.server import FaultProxy

__all__ = ["REPLIES", "REQUESTS", "FaultProxy", "Rule", "between", "quick"]
