"""What zbus asks of a registry: a small table of whole records under ``area/name`` keys.

A backend stores bytes and promises five things; ``zbus.testing.registry`` checks them on any backend:

- a reader sees a whole record or none;
- a claim has exactly one winner, for ever;
- a record that is being replaced is never missing from a listing;
- a delete removes only what the caller named;
- whatever else lies in the store never breaks a listing: it is counted and named.

Absence is not proof: a record just written on another host may not be visible yet. Expiry is judged from lease
counters by the observer's own clock (``zbus.registry.lease``), never from time stamps of files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Final, Protocol, runtime_checkable

import msgspec

from zbus import names
from zbus.errors import ConfigError, RegistryError

__all__ = [
    "MAX_VALUE_BYTES",
    "ROOT_ID_KEY",
    "JunkRecord",
    "Listing",
    "Registry",
    "area_of",
    "check_value",
    "registry_error",
    "split_key",
]

MAX_VALUE_BYTES: Final = 65_000
"""Largest value of one record, in bytes; with its header a record file stays below 64 KiB."""

ROOT_ID_KEY: Final = "meta/root-id"
"""Key of the random id that names one store: two processes that read different ids do not share their root."""


class JunkRecord(RegistryError):
    """A key holds something that is not a record (half a file, a symlink, a directory, another user's file)."""


class Listing(msgspec.Struct, frozen=True):
    """One look at an area.

    Attributes:
        entries: Value by full key (``area/name``), in key order.
        junk: What else was there, each as ``key: reason``.
    """

    entries: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    junk: tuple[str, ...] = ()


@runtime_checkable
class Registry(Protocol):
    """A store of small records. Every method may be called from any thread and may block on the disk or network.

    Keys are ``area/name``, two valid name components (``zbus.names``); anything else raises ``ConfigError``. Failures
    of the store raise ``RegistryError`` and leave the old record intact.
    """

    def claim(self, key: str, value: bytes) -> bytes:
        """Store ``value`` unless the key is taken; return the value that stands.

        The caller won if the result equals its ``value``, so values of rivals must differ (they hold a session, a
        process or an agent id). Repeating a won claim is harmless.

        Raises:
            JunkRecord: The key holds something that is not a record, so the claim cannot be judged.
            RegistryError: The store cannot be read or written.
        """
        ...

    def put(self, key: str, value: bytes, *, durable: bool = True) -> None:
        """Store or replace the whole record.

        Args:
            key: ``area/name``.
            value: At most ``MAX_VALUE_BYTES`` bytes.
            durable: Survive a power cut. False is for leases: one that is lost is renewed soon anyway.

        Raises:
            RegistryError: It could not be written; the old record stands.
        """
        ...

    def get(self, key: str) -> bytes | None:
        """Return the value, or None where there is none (yet).

        Raises:
            JunkRecord: The key holds something that is not a record.
            RegistryError: The store cannot be read.
        """
        ...

    def list(self, prefix: str) -> Listing:
        """Return all records of one area (``workers``, ``leases``, …); an area nobody wrote to is empty.

        Raises:
            RegistryError: The store cannot be read.
        """
        ...

    def delete(self, key: str, expected: bytes | None = None) -> bool:
        """Remove a record; with ``expected``, only while that value stands. Return whether one was removed.

        Raises:
            RegistryError: The store cannot be written.
        """
        ...

    def close(self) -> None:
        """Let go of the store; records stay. Later calls raise ``RegistryError``. May be repeated."""
        ...


def split_key(key: str) -> tuple[str, str]:
    """Return ``(area, name)`` of a key.

    Raises:
        ConfigError: Not two valid components; so no key leaves the root (R9).
    """
    area, slash, name = key.partition("/")
    if not slash or "/" in name:
        msg = f"registry key {key!r} is not of the form area/name"
        raise ConfigError(msg)
    return names.check(area, "registry area"), names.check(name, "registry key")


def area_of(prefix: str) -> str:
    """Return the area a listing names; one trailing slash is allowed.

    Raises:
        ConfigError: Not one valid component.
    """
    return names.check(prefix.removesuffix("/"), "registry area")


def check_value(key: str, value: bytes) -> None:
    """Refuse a value that is too large.

    Raises:
        RegistryError: More than ``MAX_VALUE_BYTES`` bytes.
    """
    if len(value) > MAX_VALUE_BYTES:
        msg = f"registry record {key} has {len(value):,} bytes; the limit is {MAX_VALUE_BYTES:,}"
        raise RegistryError(msg, hint="keep bulk data out of records: pass a path or a reference")


_HINTS: Final = {
    errno.ENOSPC: "free some space or inodes on that file system; running workers go on meanwhile",
    errno.EDQUOT: "raise the disk quota or free some space; running workers go on meanwhile",
    errno.EROFS: "remount it read-write, or choose another root with ZBUS_ROOT",
    errno.EACCES: "check who owns the directory: it must belong to the user who runs the trial, mode 0700",
    errno.EPERM: "check who owns the directory: it must belong to the user who runs the trial, mode 0700",
    errno.EMFILE: "raise the descriptor limit (ulimit -n)",
    errno.EOPNOTSUPP: "the root needs a file system with hard links; choose another with ZBUS_ROOT",
    errno.EXDEV: "the root needs a file system with hard links; choose another with ZBUS_ROOT",
}


def registry_error(action: str, key: str, where: str, error: OSError) -> RegistryError:
    """Return the ``RegistryError`` that tells a person which record failed, where, and why.

    Args:
        action: A verb such as ``write`` or ``claim``.
        key: The record's key.
        where: Path of the file or directory.
        error: What the system said; becomes the cause when raised ``from`` it.
    """
    reason = os.strerror(error.errno) if error.errno else str(error)
    name = errno.errorcode.get(error.errno or 0, "")
    facts = {"file": where, "cause": f"{reason} ({name})" if name else reason}
    return RegistryError(
        f"cannot {action} registry record {key}: {reason}", hint=_HINTS.get(error.errno or 0), facts=facts
    )
