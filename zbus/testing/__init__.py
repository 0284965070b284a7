"""The public test kit: fake clock, simulated network, registry conformance checks, fault proxy, chaos soak, fixtures.

Programs never import it. Modules: ``clock``, ``simulation``, ``registry``, ``registry_fs``, ``proxy``, ``chaos``,
``memory``, ``plugin``.
"""

from __future__ import annotations

from zbus.testing.clock import FakeClock

__all__ = ["FakeClock"]
