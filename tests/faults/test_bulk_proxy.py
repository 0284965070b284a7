"""Bulk data over connections that lose, double, delay and cut: whole in the end, or ended with a reason."""

from __future__ import annotations

import random

import pytest

from waiting import scaled, wait_until
from zbus.protocol.puller import Ending, Patience
from zbus.testing.proxy import FaultProxy
from zbus.transport.bulk import Bulk, Range
from zbus.transport.sockets import SocketFactory

pytestmark = pytest.mark.alone

KEY = bytes(range(16))
SIZE = 24 << 20
QUICK = Patience(again=100_000_000, again_most=400_000_000, stall=20_000_000_000, absent=10_000_000_000)


@pytest.fixture
def pair():
    """Return an owner, an asker with little patience, and a proxy before the owner, whose address comes last."""
    factories = [SocketFactory(), SocketFactory()]
    owner, asker = Bulk(factories[0]), Bulk(factories[1], patience=QUICK)
    with FaultProxy(seed=3) as proxy:
        yield owner, asker, proxy, [proxy.front(owner.bind("tcp://127.0.0.1:0"), worker="owner/0", link="data")]
        for bulk, factory in zip((owner, asker), factories, strict=True):
            bulk.close()
            assert factory.close(), factory.open_sockets


def pull(asker, where, data):
    """Begin to pull all of it."""
    into = bytearray(len(data))
    return into, asker.pull(where, KEY, [Range(0, 0, len(data), len(data))], [memoryview(into)], deadline_s=scaled(60))


def test_a_connection_that_is_cut_again_and_again_costs_only_what_was_on_its_way(pair):
    """Five cuts amid a transfer: all bytes come, and no more is sent again than the window holds for each cut."""
    owner, asker, proxy, where = pair
    data = random.Random(1).randbytes(SIZE)
    owner.offer(KEY, data)
    slow = proxy.delay(0.01, "reply")  # so that there is an amid
    into, pulling = pull(asker, where, data)
    for part in range(1, 6):
        wait_until(lambda part=part: asker.statistics()["bulk_pulled_bytes"] > part * (SIZE // 8), 30, "progress")
        wait_until(proxy.cut, 30, "a connection to cut")  # it may be on its way back from the cut before
    assert pulling.wait(scaled(60))
    pulling.check()
    assert into == data
    assert slow.hits > 10, "pieces went one by one"
    assert owner.statistics()["bulk_given_bytes"] <= SIZE + 6 * (10 << 20)


def test_lost_doubled_and_late_messages_leave_the_bytes_as_they_are(pair):
    """Both ways, a tenth of each: every byte comes once, at its place."""
    owner, asker, proxy, where = pair
    data = random.Random(2).randbytes(SIZE)
    owner.offer(KEY, data)
    lost = proxy.drop(probability=0.1)
    doubled = proxy.duplicate(probability=0.1)
    into, pulling = pull(asker, where, data)
    assert pulling.wait(scaled(60))
    pulling.check()
    assert into == data
    assert lost.hits
    assert doubled.hits
    counts = asker.statistics()
    assert counts["bulk_asked_again"] >= 1
    assert counts["bulk_ignored_parts"] >= 1


def test_a_frozen_owner_ends_a_pull_with_what_came(pair):
    """A connection that stands and says nothing: the deadline ends it; thawed, the next pull is served."""
    owner, asker, proxy, where = pair
    data = random.Random(3).randbytes(SIZE)
    owner.offer(KEY, data)
    proxy.delay(0.01, "reply")
    into = bytearray(SIZE)
    pulling = asker.pull(where, KEY, [Range(0, 0, SIZE, SIZE)], [memoryview(into)], deadline_s=scaled(2.0))
    wait_until(lambda: asker.statistics()["bulk_pulled_bytes"], what="the transfer to begin")
    proxy.freeze()
    assert pulling.wait(scaled(20))
    assert pulling.how is Ending.DEADLINE
    assert f"of {SIZE:,} bytes came" in pulling.evidence
    proxy.heal()
    again, pulling = pull(asker, where, data)
    assert pulling.wait(scaled(60))
    pulling.check()
    assert again == data
