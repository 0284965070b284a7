"""The engine of ``benchmarks/faults.py``."""

from __future__ import annotations

import os

from fault_work import step

import zbus


class Counter(zbus.Engine):
    """Runs the shared work as a method whose effect is ``once``."""

    @zbus.endpoint()
    def step(self, directory: str, number: int, seconds: float) -> int:
        """Leave a mark, take a while, answer the square."""
        return step(directory, number, seconds)

    @zbus.endpoint(effect="pure")
    def pid(self) -> int:
        """Return the worker's process id."""
        return os.getpid()
