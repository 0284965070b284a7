"""Answers that wait for their arrays: each once, in order for its call, none for a call that is over."""

import random

import pytest

from zbus.protocol.messages import Header, Kind
from zbus.transport.arrivals import Arrivals

SESSION = bytes(16)


class Fetch:
    """Arrays on their way."""

    total = 9

    def __init__(self, seq, buffers):
        self.seq, self.buffers = seq, buffers


class Run:
    """An ``Arrivals`` whose pulls end when the test says so."""

    def __init__(self, refuse=()):
        self.refuse = set(refuse)
        self.fetches = []
        self.delivered = []
        self.arrivals = Arrivals(lambda buffers: b"far" in buffers[1:], self.begin, self.deliver)

    def begin(self, seq, buffers):
        if buffers[0] in self.refuse:
            return None
        self.fetches.append(Fetch(seq, buffers))
        return self.fetches[-1]

    def deliver(self, header, buffers):
        self.delivered.append((header.seq, Kind(header.kind).name, buffers[0] if buffers else b""))

    def comes(self, kind, seq, *buffers, floor=0, calls=1):
        """Let a message come; deliver it if it need not wait."""
        header = Header(kind, SESSION, 1, 2, "main", seq, calls, 1, floor)
        kept = self.arrivals.keeps(header, buffers)
        if not kept:
            self.deliver(header, buffers)
        return kept

    def arrives(self, index=0, *, lost=False):
        """End a pull."""
        fetch = self.fetches.pop(index)
        self.arrivals.arrived(fetch.seq, fetch, None if lost else [fetch.buffers[0], b"array"])


def test_an_answer_waits_for_its_arrays_and_others_do_not_wait_for_it():
    """Another call's answer, and word of how far the same call is, pass."""
    run = Run()
    assert run.comes(Kind.RESULT, 1, b"one", b"far")
    assert not run.comes(Kind.RESULT, 2, b"two", b"near")
    assert not run.comes(Kind.PROGRESS, 1)
    assert not run.comes(Kind.RESULT, 3, b"three", b"far", calls=2), "bodies of several calls name no arrays"
    assert run.arrivals
    run.arrives()
    assert run.delivered[-1] == (1, "RESULT", b"one")
    assert not run.arrivals


def test_items_of_a_stream_keep_their_order_and_come_once():
    """What comes behind an item that waits, waits too; what is sent again is not pulled again."""
    run = Run()
    assert not run.comes(Kind.CHUNK, 1, b"0", floor=0)
    assert run.comes(Kind.CHUNK, 1, b"1", b"far", floor=1)
    assert run.comes(Kind.CHUNK, 1, b"2", floor=2)
    assert run.comes(Kind.CHUNK, 1, b"1", b"far", floor=1)
    assert run.comes(Kind.CHUNK, 1, b"3", b"far", floor=3)
    assert run.comes(Kind.END, 1, b"end", floor=4)
    assert len(run.fetches) == 1
    run.arrives()
    assert [body for _, _, body in run.delivered] == [b"0", b"1", b"2"]
    run.arrives()
    assert [body for _, _, body in run.delivered] == [b"0", b"1", b"2", b"3", b"end"]
    assert not run.arrivals


@pytest.mark.parametrize("refused", [False, True])
def test_a_message_whose_arrays_do_not_come_counts_as_lost(refused):
    """What is behind it goes on; the delivery machines ask for what is missing, and it is pulled anew."""
    run = Run(refuse={b"1"} if refused else ())
    assert run.comes(Kind.CHUNK, 1, b"1", b"far", floor=1)
    if not refused:
        run.arrives(lost=True)
    assert run.delivered == []
    assert not run.arrivals
    run.refuse.clear()
    assert run.comes(Kind.CHUNK, 1, b"1", b"far", floor=1)
    run.arrives()
    assert run.delivered == [(1, "CHUNK", b"1")]


def test_nothing_is_delivered_for_a_call_that_is_over():
    """Its pull is handed back to be given up; a late end of it changes nothing, also for a later call of its number."""
    run = Run()
    run.comes(Kind.RESULT, 1, b"one", b"far")
    run.comes(Kind.RESULT, 2, b"two", b"far")
    first = run.fetches[0]
    assert run.arrivals.over(1) is first
    assert run.arrivals.over(1) is None
    run.comes(Kind.RESULT, 1, b"again", b"far")
    run.arrives(0)
    assert run.delivered == []
    run.arrives(1)
    assert run.delivered == [(1, "RESULT", b"again")]


def test_a_call_may_end_while_what_came_for_it_is_delivered():
    """The end of a stream in the middle of what waits: what is behind it is nobody's."""
    run = Run()
    run.comes(Kind.CHUNK, 1, b"0", b"far", floor=0)
    run.comes(Kind.END, 1, b"end", floor=1)
    run.comes(Kind.CHUNK, 1, b"late", b"far", floor=2)
    deliver = run.deliver

    def ends(header, buffers):
        deliver(header, buffers)
        if header.kind == Kind.END:
            assert run.arrivals.over(header.seq) is None

    run.arrivals._deliver = ends
    run.arrives()
    assert [body for _, _, body in run.delivered] == [b"0", b"end"]
    assert run.fetches == []
    assert not run.arrivals


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_order_of_ends_each_stream_is_in_order(seed):
    """Four streams with items near and far, said again by chance, pulls that end in any order."""
    chance = random.Random(seed)
    run = Run()
    left = {seq: [(number, chance.random() < 0.5) for number in range(6)] for seq in range(4)}
    said = {seq: [] for seq in left}
    while any(left.values()) or run.fetches:
        seq = chance.choice(list(left))
        if left[seq] and chance.random() < 0.7:
            item = left[seq].pop(0)
            said[seq].append(item)
            number, far = item
            run.comes(Kind.CHUNK, seq, b"%d" % number, *([b"far"] if far else []), floor=number)
        elif run.fetches:
            run.arrives(chance.randrange(len(run.fetches)))
    for seq in left:
        assert [body for of, _, body in run.delivered if of == seq] == [b"%d" % number for number in range(6)]
    assert not run.arrivals
