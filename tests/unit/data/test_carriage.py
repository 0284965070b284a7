"""Kept values to readers that share no memory with their owner: several at once, and with no memory left."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from waiting import scaled, wait_until
from zbus.clock import SystemClock
from zbus.codec import Ref
from zbus.data.carriage import BulkCarriage, Offers
from zbus.data.courier import Courier
from zbus.data.desk import Desk, Owner, _Value
from zbus.data.lease import SHARED_FROM
from zbus.data.porter import Porter
from zbus.errors import RefLostError, RegistryError
from zbus.transport.bulk import Bulk
from zbus.transport.sockets import SocketFactory


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


def test_a_value_without_shared_memory_is_not_copied_for_a_near_reader():
    """What had to be kept privately is pulled where it stands: joining it would take its memory twice."""
    porter = Slow()
    lent = _Value([b"body", memoryview(bytearray(SHARED_FROM)), b"small"])
    assert lent.rest(porter) is None
    assert porter.made == 0


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


ROW = 1 << 18


class Shifted(SystemClock):
    """The clock of this machine, set forward by the test."""

    shift_ns = 0

    def monotonic_ns(self):
        """Return the time as it would be."""
        return super().monotonic_ns() + self.shift_ns

    def forward(self, seconds):
        """Set it forward."""
        self.shift_ns += int(seconds * 1e9)


@pytest.fixture
def clock():
    """Return the clock of all processes of a test."""
    return Shifted()


@pytest.fixture
def desks(clock):
    """Return a maker of desks, each as in a process of its own that shares no memory with the others."""
    made = []

    def make(**options):
        factory = SocketFactory()
        bulk = Bulk(factory, clock=clock)
        porter = Porter(Courier(None, 1 << 30), bulk, **options)
        made.append((bulk, factory))
        where = {"data": [bulk.bind("tcp://127.0.0.1:0")]}
        carriage = BulkCarriage(porter, lambda _: "", now=clock.monotonic_ns)
        return Desk(Owner("w", len(made), 1, where), porter, limit=1 << 30, carriage=carriage, clock=clock)

    yield make
    for bulk, factory in made:
        bulk.close()
        assert factory.close(), factory.open_sockets


def offered(desk):
    """Return the bytes on offer of a desk."""
    return desk._porter.statistics()["bulk_offered_bytes"]


def copied(desk):
    """Return the bytes of copies that a desk may still give."""
    wait_until(lambda: not desk._porter.bulk._withdrawn, what="what is withdrawn to go")
    return offered(desk)


def test_a_copy_is_kept_for_as_long_as_it_is_asked_for(desks, clock):
    """A slow reader has what it began to pull until a minute after it last asked; then it goes, with no one's help."""
    owner, reader = desks(), desks()
    ref = owner.keep(np.arange(4 * ROW, dtype=np.uint8).reshape(4, ROW)).take([3, 1])
    answer = owner.answer(*reader.question(ref))
    assert copied(owner) == 2 * ROW
    for _ in range(3):
        clock.forward(50)
        owner.tick()
        assert reader.opened(ref, answer, clock.monotonic_ns() + int(scaled(30) * 1e9)).shape == (2, ROW)
    clock.forward(61)
    owner.tick()
    assert copied(owner) == 0
    with pytest.raises(RefLostError, match="offers nothing of that name"):
        reader.opened(ref, answer, clock.monotonic_ns() + int(scaled(30) * 1e9))


def test_copies_for_readers_are_bounded_and_who_finds_no_room_asks_again(desks, clock):
    """The bound of all copies of a process holds for them; room that others leave is used; what never fits is said."""
    owner, reader = desks(most_copied=3 * ROW), desks()
    whole = owner.keep(np.zeros((8, ROW), np.uint8))
    far = int(scaled(60) * 1e9)
    first = owner.answer(*reader.question(whole.take([2, 1])))
    assert "offered" in first
    assert copied(owner) == 2 * ROW
    asked = []

    def ask(_ref, questions, _deadline_ns):
        answers = owner.answers(questions)
        asked.append([next(iter(answer)) for answer in answers])
        assert copied(owner) <= 3 * ROW
        if set(asked[-1]) == {"busy"}:
            clock.forward(61)  # whoever had the room has taken what it wanted
            owner.tick()
        return answers

    refs = [whole.take([3, 2]), whole.take([0, 5])]
    values = reader.open_all(refs, ask, clock.monotonic_ns() + 10 * far)
    assert [values[ref].shape for ref in refs] == [(2, ROW)] * 2
    assert asked == [["busy", "busy"], ["body", "busy"], ["busy"], ["body"]]
    with pytest.raises(
        RefLostError, match="no room for a copy of 1,048,576 bytes: copies for readers may take 786,432"
    ):
        reader.open_all([whole.take([3, 2, 1, 0])], ask, clock.monotonic_ns() + far)
    again = owner.answer(*reader.question(whole.take([3, 2])))
    assert "busy" in again
    with pytest.raises(RefLostError, match="no room"):
        reader.open_all([whole.take([2, 3, 1])], lambda *_: [again], clock.monotonic_ns())


def test_small_buffers_of_a_whole_value_are_copied_once_for_all_readers(desks):
    """They are joined for the first reader, and the next one gets the same."""
    owner, reader = desks(), desks()
    ref = owner.keep([np.full(1 << 12, number, np.uint8) for number in range(64)])
    first, second = (owner.answer(*reader.question(ref)) for _ in range(2))
    assert first["offered"] == second["offered"]
    assert copied(owner) == 64 << 12
    assert [int(array[0]) for array in reader.opened(ref, second, time.monotonic_ns() + int(scaled(30) * 1e9))] == [
        *range(64)
    ]


@pytest.mark.parametrize("error", [RegistryError("the records cannot be read"), OSError(errno.EIO, "disk")])
def test_a_holder_of_which_nothing_can_be_told_fails_no_call(error):
    """The result was made: whether another's may go is looked at again later, by the thread that is there for it."""
    broken = [error]

    def is_over(_holder):
        if broken:
            raise error
        return True

    desk = Desk(Owner("w", 0, 1), Porter(Courier(None, 0), None), limit=1 << 20, is_over=is_over)
    ref = desk.keep([1, 2], b"holder", 1, "f")
    desk.check()
    assert desk.keep([3], b"holder", 2, "f").number == ref.number + 1
    with pytest.raises(type(error)):
        desk.tick()
    broken.clear()
    desk.tick()
    assert desk.statistics()["refs"] == 0
