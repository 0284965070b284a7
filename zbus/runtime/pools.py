"""Pools of threads by the name of their lane, or of what is done there (``zbus.…``); each made when first needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from zbus.runtime.gil import name_thread

__all__ = ["Pools"]


class Pools:
    """The pools of one executor. Any thread."""

    def __init__(self) -> None:
        self.made: dict[str, ThreadPoolExecutor] = {}

    def of(self, name: str, threads: int | None = None) -> ThreadPoolExecutor:
        """Return the pool of a name; ``threads`` are as many as it is made with."""
        return self.made.get(name) or self.made.setdefault(name, _pool(name.removeprefix("zbus."), threads))

    def close(self) -> None:
        """Stop them all without waiting for what still runs."""
        for pool in self.made.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _pool(lane: str, threads: int | None) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, f"zbus-{lane}", initializer=name_thread, initargs=(lane,))
