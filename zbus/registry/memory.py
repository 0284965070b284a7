"""A registry inside one process: for the inline scheduler, simulation and tests."""

from __future__ import annotations

import threading

from zbus.errors import RegistryError
from zbus.registry.base import Listing, area_of, check_value, split_key

__all__ = ["MemoryRegistry"]


class _Table:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.areas: dict[str, dict[str, bytes]] = {}


class MemoryRegistry:
    """Records in a dict. Several handles may share one table; every method may be called from any thread.

    Args:
        shared: Another handle whose table to share; None makes a new table.
    """

    def __init__(self, shared: MemoryRegistry | None = None) -> None:
        self.table: _Table = shared.table if shared else _Table()
        self._closed = False

    def claim(self, key: str, value: bytes) -> bytes:
        """Store ``value`` unless the key is taken; return the value that stands."""
        area = self._area(key, value)
        with self.table.lock:
            return self.table.areas.setdefault(area, {}).setdefault(key, bytes(value))

    def put(self, key: str, value: bytes, *, durable: bool = True) -> None:
        """Store or replace the record; ``durable`` makes no difference here."""
        del durable
        area = self._area(key, value)
        with self.table.lock:
            self.table.areas.setdefault(area, {})[key] = bytes(value)

    def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        area = self._area(key)
        with self.table.lock:
            return self.table.areas.get(area, {}).get(key)

    def list(self, prefix: str) -> Listing:
        """Return all records of one area; there is never junk here."""
        area = area_of(prefix)
        self._check_open()
        with self.table.lock:
            return Listing(dict(sorted(self.table.areas.get(area, {}).items())))

    def delete(self, key: str, expected: bytes | None = None) -> bool:
        """Remove a record; with ``expected``, only while that value stands."""
        area = self._area(key)
        with self.table.lock:
            table = self.table.areas.get(area, {})
            if key not in table or (expected is not None and table[key] != expected):
                return False
            del table[key]
            return True

    def close(self) -> None:
        """Close this handle; the table stays for the others."""
        self._closed = True

    def _area(self, key: str, value: bytes = b"") -> str:
        area, _ = split_key(key)
        self._check_open()
        check_value(key, value)
        return area

    def _check_open(self) -> None:
        if self._closed:
            msg = "the registry handle is closed"
            raise RegistryError(msg)
