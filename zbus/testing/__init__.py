"""The public test kit: a fake clock, a simulated network with the real protocol machines, registry conformance checks.

Programs never import it. Modules: ``clock``, ``simulation``, ``registry``, ``registry_fs``.
"""

from __future__ import annotations

from zbus.testing.clock import FakeClock

__all__ = ["FakeClock"]
