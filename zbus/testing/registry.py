"""Conformance checks for registry back ends: what ``zbus.registry.base`` promises, as functions to run on any of them.

::

    import pytest
    from zbus.testing.registry import CHECKS

    @pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
    def test_my_backend_keeps_the_registry_promises(check, tmp_path):
        check(lambda: MyRegistry(tmp_path))

Each check gets a function that opens a new handle on one store, which is empty at first, and raises ``AssertionError``
with the promise that was broken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from zbus.errors import ConfigError, RegistryError
from zbus.registry.base import MAX_VALUE_BYTES, Registry
from zbus.registry.records import EpochRecord, Lease, Records, WorkerRecord

__all__ = ["BAD_KEYS", "CHECKS", "OpenRegistry", "run_threads"]

OpenRegistry = Callable[[], Registry]
"""Opens a new handle on the store under check."""

BAD_KEYS: Final = (
    "",
    "/",
    "workers",
    "/workers/x",
    "workers/",
    "workers//x",
    "../x",
    "workers/..",
    "workers/.",
    "./x",
    "../../etc/passwd",
    "workers/../../x",
    "workers/a/b",
    "/etc/passwd",
    "workers/a b",
    "workers/a\n",
    "workers/a\0b",
    "workers/\u00e9",
    "workers/\uff0e\uff0e",
    "workers/a\\b",
    "workers/~a",
    "workers/.tmp~a",
    "workers/" + 65 * "a",
)
"""Keys that every back end must refuse with ``ConfigError``."""

_THREADS: Final = 4


def _require(promise: str, holds: object) -> None:
    if not holds:
        raise AssertionError(promise)


def run_threads(*bodies: Callable[[], None]) -> None:
    """Run functions at once, each in a thread of its own; raise the first error after all have ended."""
    start = threading.Barrier(len(bodies))
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            start.wait()
            body()
        except BaseException as error:  # noqa: BLE001  # carried to the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), name=f"check-{i}") for i, body in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def values_round_trip(open_registry: OpenRegistry) -> None:
    """What is read is what was written, byte for byte, through any handle."""
    writer, reader = open_registry(), open_registry()
    for number, value in enumerate((b"", b" a\n", b"\0\xff\n\n", b"x" * MAX_VALUE_BYTES, b'{"a": 1}')):
        key = f"area/value.{number}"
        writer.put(key, value)
        _require("get returns the bytes that were put", reader.get(key) == value)
        _require("list returns the bytes that were put", reader.list("area").entries[key] == value)
        writer.delete(key)


def absent_is_none(open_registry: OpenRegistry) -> None:
    """Nothing is None, an empty listing, and nothing to delete: never an error."""
    registry = open_registry()
    _require("get of an absent key is None", registry.get("area/x") is None)
    _require("an area nobody wrote to is empty", not registry.list("area").entries)
    _require("deleting an absent key returns False", registry.delete("area/x") is False)
    _require("deleting an absent value returns False", registry.delete("area/x", b"v") is False)


def put_replaces(open_registry: OpenRegistry) -> None:
    """A second put replaces the whole record, also a shorter one."""
    registry = open_registry()
    registry.put("area/x", b"long value")
    registry.put("area/x", b"short", durable=False)
    _require("the last put stands", registry.get("area/x") == b"short")


def first_claim_stands(open_registry: OpenRegistry) -> None:
    """A claim is won once; the loser is told the winner; a repeated claim is harmless; put counts as taken."""
    first, second = open_registry(), open_registry()
    _require("the first claim wins", first.claim("area/x", b"first") == b"first")
    _require("the second is told who won", second.claim("area/x", b"second") == b"first")
    _require("a repeated claim stays won", first.claim("area/x", b"first") == b"first")
    first.put("area/y", b"put")
    _require("a key that was put is taken", second.claim("area/y", b"claim") == b"put")
    _require("a deleted claim is free again", first.delete("area/x") and second.claim("area/x", b"new") == b"new")


def delete_is_conditional(open_registry: OpenRegistry) -> None:
    """With an expected value a delete removes that value and no other."""
    old, new = open_registry(), open_registry()
    old.put("area/x", b"old owner")
    new.put("area/x", b"new owner")
    _require("a delete of another value returns False", old.delete("area/x", b"old owner") is False)
    _require("and leaves the record", new.get("area/x") == b"new owner")
    _require("a delete of the standing value returns True", new.delete("area/x", b"new owner") is True)
    _require("and removes it", old.get("area/x") is None)


def listing_is_one_area(open_registry: OpenRegistry) -> None:
    """A listing holds all records of the area it names, in key order, and none of a namesake's."""
    registry = open_registry()
    for key in ("work/x", "workers/b", "workers/a.1", "workers2/x", "workers/A"):
        registry.put(key, key.encode())
    entries = registry.list("workers").entries
    _require("exactly the area's records", set(entries) == {"workers/A", "workers/a.1", "workers/b"})
    _require("in key order", list(entries) == sorted(entries))
    _require("each with its value", all(value.decode() == key for key, value in entries.items()))
    _require("a trailing slash is allowed", registry.list("workers/").entries == entries)


def names_never_escape(open_registry: OpenRegistry) -> None:
    """Every key that is not two valid components is refused by every method, as a ConfigError."""
    registry = open_registry()
    for key in BAD_KEYS:
        calls: tuple[Callable[[str], object], ...] = (
            registry.get,
            registry.delete,
            lambda k: registry.put(k, b"v"),
            lambda k: registry.claim(k, b"v"),
        )
        for call in calls:
            _refused(call, key)
    for prefix in ("", "..", "/", "a/b", "../x"):
        _refused(registry.list, prefix)


def _refused(call: Callable[[str], object], key: str) -> None:
    try:
        call(key)
    except ConfigError:
        return
    _require(f"the key {key!r} is refused", holds=False)


def too_large_is_refused(open_registry: OpenRegistry) -> None:
    """A value above the limit is refused and the old record stands."""
    registry = open_registry()
    registry.put("area/x", b"old")
    for write in (registry.put, registry.claim):
        try:
            write("area/x", bytes(MAX_VALUE_BYTES + 1))
        except RegistryError:
            continue
        _require("a value that is too large is refused", holds=False)
    _require("the old record stands", registry.get("area/x") == b"old")


def claims_have_one_winner(open_registry: OpenRegistry) -> None:
    """However many claim at once, through however many handles, one wins and all are told the same."""
    rounds = 100
    told: list[list[bytes]] = [[] for _ in range(_THREADS)]

    def body(me: int) -> Callable[[], None]:
        registry = open_registry()

        def run() -> None:
            for number in range(rounds):
                told[me].append(registry.claim(f"claims/c.{number}", b"claimer %d" % me))

        return run

    run_threads(*(body(me) for me in range(_THREADS)))
    for number in range(rounds):
        _require("all claimers are told the same winner", len({answers[number] for answers in told}) == 1)


def renewed_is_never_missing(open_registry: OpenRegistry) -> None:
    """A record that is being replaced is in every listing and every get, whole."""
    writer, reader = open_registry(), open_registry()
    writer.put("area/live", b"0")
    done = threading.Event()

    def renew() -> None:
        number = 0
        while not done.is_set():
            number += 1
            writer.put("area/live", b"%d" % number * 50, durable=False)

    def look() -> None:
        try:
            for _ in range(300):
                listing = reader.list("area")
                _require("a live record is in the listing", "area/live" in listing.entries)
                _require("a live record is never junk", not listing.junk)
                _require("a live record is found", reader.get("area/live") is not None)
        finally:
            done.set()

    run_threads(renew, look)


def siblings_do_not_disturb(open_registry: OpenRegistry) -> None:
    """Registering and unregistering one name never disturbs another in the same area."""

    def body(me: int) -> Callable[[], None]:
        registry = open_registry()
        key = f"area/sibling.{me}"

        def run() -> None:
            for number in range(100):
                value = b"%d" % number
                registry.put(key, value, durable=False)
                _require("the own record stands", registry.get(key) == value)
                _require("and is deleted once", registry.delete(key, value))

        return run

    run_threads(*(body(me) for me in range(_THREADS)))
    _require("nothing is left", not open_registry().list("area").entries)


def late_owner_deletes_nothing(open_registry: OpenRegistry) -> None:
    """An old owner that leaves while a new one takes over never removes the new owner's record."""
    old, new = open_registry(), open_registry()
    for _ in range(50):
        old.put("area/x", b"old", durable=False)
        run_threads(lambda: _ignore(old.delete("area/x", b"old")), lambda: new.put("area/x", b"new", durable=False))
        _require("the new owner's record stands", new.get("area/x") == b"new")


def _ignore(_: object) -> None:
    """Drop a result, so that a lambda fits ``Callable[[], None]``."""


def closed_is_closed(open_registry: OpenRegistry) -> None:
    """A closed handle refuses calls, may be closed again, and its records stay for others."""
    first, second = open_registry(), open_registry()
    first.put("area/x", b"v")
    first.close()
    first.close()
    calls: tuple[Callable[[], object], ...] = (
        lambda: first.get("area/x"),
        lambda: first.list("area"),
        lambda: first.put("area/x", b"w"),
        lambda: first.claim("area/y", b"w"),
        lambda: first.delete("area/x"),
    )
    for call in calls:
        try:
            call()
        except RegistryError:
            continue
        _require("a closed handle refuses calls", holds=False)
    _require("records outlive the handle", second.get("area/x") == b"v")


def epochs_strictly_rise(open_registry: OpenRegistry) -> None:
    """Controllers that start at once get different epochs, without a gap, and the highest is current."""
    each = 10
    claimed: list[int] = []

    def body(me: int) -> Callable[[], None]:
        records = Records(open_registry())

        def run() -> None:
            last = 0
            for number in range(each):
                epoch = records.claim_epoch(EpochRecord(session=f"{me:04x}{number:04x}")).epoch
                _require("an epoch is higher than the one before", epoch > last)
                last = epoch
                claimed.append(epoch)

        return run

    run_threads(*(body(me) for me in range(_THREADS)))
    _require("each epoch has one claimer", sorted(claimed) == list(range(1, _THREADS * each + 1)))
    current = Records(open_registry()).current_epoch()
    _require("the highest epoch is current", current is not None and current.epoch == _THREADS * each)


def records_keep_their_types(open_registry: OpenRegistry) -> None:
    """Typed records come back equal, type for type."""
    records = Records(open_registry())
    worker = WorkerRecord(role="actor", rank=3, incarnation=2**64 - 1, main=["ipc:///a b", "tcp://[::1]:1"], log=" x\n")
    records.publish_worker(worker)
    _require("a worker record is returned as written", records.workers("actor") == [worker])
    lease = Lease(holder="a.1", counter=2**63, ttl_s=1.5)
    records.renew_lease(lease)
    _require("a lease is returned as written", records.leases() == {"a.1": lease})
    _require("one store has one id", records.root_id() == Records(open_registry()).root_id())


CHECKS: Final[Mapping[str, Callable[[OpenRegistry], None]]] = MappingProxyType(
    {
        check.__name__: check
        for check in (
            values_round_trip,
            absent_is_none,
            put_replaces,
            first_claim_stands,
            delete_is_conditional,
            listing_is_one_area,
            names_never_escape,
            too_large_is_refused,
            claims_have_one_winner,
            renewed_is_never_missing,
            siblings_do_not_disturb,
            late_owner_deletes_nothing,
            closed_is_closed,
            epochs_strictly_rise,
            records_keep_their_types,
        )
    }
)
"""All checks by name, each over a store that is empty at first."""
