"""Kept values to readers that share no memory with their owner: several at once, and with no memory left."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from types import SimpleNamespace

import pytest

from waiting import scaled
from zbus.codec import Ref
from zbus.data.carriage import BulkCarriage, Offers
from zbus.data.desk import _Value
from zbus.data.lease import SHARED_FROM
from zbus.errors import RefLostError


class Slow:
    """A porter whose offers of two threads meet, if nothing keeps them apart."""

    def __init__(self) -> None:
        self.meeting = threading.Barrier(2)
        self.made = 0

    def _meet(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.meeting.wait(0.3)
        self.made += 1

    def offer(self, view):
        """Offer memory."""
        self._meet()
        return SimpleNamespace(key=bytes([self.made]) * 16, nbytes=view.nbytes)

    def kept(self, data):
        """Keep memory."""
        self._meet()
        return data


def at_once(job):
    """Run a job on two threads and return what both returned."""
    got = []
    threads = [threading.Thread(target=lambda: got.append(job())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(10))
    assert len(got) == 2
    return got


def test_two_readers_at_once_get_one_offer():
    """A second offer in the place of the first would withdraw what the first reader was just told."""
    porter, offers = Slow(), Offers()
    data = memoryview(bytearray(SHARED_FROM))
    first, second = at_once(lambda: BulkCarriage(porter, lambda _: "").offer(offers, [data], [data]))
    assert first == second
    assert porter.made == 1


def test_two_readers_at_once_get_one_copy_of_the_small_buffers():
    """The first copy would end while its reader is told of it."""
    porter = Slow()
    value = _Value([b"body", b"a" * 100, b"b" * 100])
    first, second = at_once(lambda: value.rest(porter))
    assert first is second
    assert porter.made == 1


def test_a_reader_without_memory_is_told_that_the_value_could_not_be_pulled():
    """The kernel says so with an error of its own."""

    def memory(_nbytes):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    porter = SimpleNamespace(bulk=object(), memory=memory)
    ref = Ref(
        role="w",
        rank=0,
        incarnation=1,
        generation=2,
        number=3,
        memory="",
        endpoints={},
        nbytes=5,
        method="f",
        about="bytes",
    )
    with pytest.raises(RefLostError, match="Cannot allocate memory"):
        BulkCarriage(porter, lambda _: "").fetch(ref, [5], [[[b"k" * 16, 5, 0, 5]], b""], time.monotonic_ns())
