"""Large replies until their callers have them: in memory up to a bound, then on the shelf, else told as not kept."""

from __future__ import annotations

import errno

import pytest

from protocol_kit import EPOCH, INCARNATION, SESSION, ask, callee, caller, reply, words
from zbus.protocol.messages import Header, Kind, OutcomeKind, SendTo, Status
from zbus.transport.shelf import ReplyShelf

LARGE = (b"head", b"x" * 1_000)


@pytest.fixture
def shelf():
    """Return an empty shelf."""
    shelf = ReplyShelf()
    yield shelf
    shelf.close()


def machine(**options):
    """Return a callee that keeps two large replies in memory."""
    return callee(large_bytes=100, keep_bytes=2_500, **options)


def run(callee, seq, *, kind=Kind.RESULT, status=Status.OK, buffers=LARGE):
    """Run one call; return what is said at its end."""
    ask(callee, Kind.REQ, seq)
    effects = callee.finished(SESSION, "main", seq, kind, status, buffers, 0)
    callee.validate()
    return effects


def probe(callee, seq, **fields):
    """Ask about a call; return the words and bodies of the answers."""
    header = Header(Kind.PROBE, SESSION, EPOCH, INCARNATION, "main", seq)._replace(**fields)
    return [(words([e])[0], [bytes(b) for b in e.buffers]) for e in callee.receive(header, (), b"peer!", 0)]


def test_beyond_the_bound_the_oldest_go_to_the_shelf_and_are_said_again_from_there(shelf):
    """Ten replies of which two fit into memory: each is said again whole, memory stays within its bound."""
    bus = machine(shelf=shelf)
    for seq in range(10):
        body = (b"head", bytes([seq]) * 1_000)
        assert words(run(bus, seq, buffers=body)) == [f"RESULT OK {seq}"]
    assert bus._kept_bytes <= 2_500
    assert shelf.nbytes == 8 * 1_004
    for seq in range(10):
        assert probe(bus, seq) == [(f"RESULT OK {seq}", [b"head", bytes([seq]) * 1_000])]


def test_what_the_caller_has_leaves_memory_and_shelf(shelf):
    """The floor frees both."""
    bus = machine(shelf=shelf)
    for seq in range(10):
        run(bus, seq)
    assert probe(bus, 9, floor=9)[0][0] == "RESULT OK 9"
    assert shelf.nbytes == 0
    assert bus._kept_bytes == 1_004
    assert probe(bus, 9, floor=10) == []
    bus.validate()
    assert (bus._kept_bytes, bus._kept) == (0, {})


@pytest.mark.parametrize("room", [None, ReplyShelf(limit=500)])
def test_without_room_it_is_told_that_the_call_ran_and_its_reply_was_not_kept(room):
    """Never a second run, never a false word: UNKNOWN, executed."""
    bus = machine(shelf=room)
    for seq in range(4):
        run(bus, seq)
    assert ask(bus, Kind.REQ, 0, attempt=2) == ["FAILURE NOT_KEPT 0"]
    assert ask(bus, Kind.PROBE, 3) == ["RESULT OK 3"]
    assert bus.dropped == {"reply_not_kept": 2}
    lane = caller()
    lane.place((b"call",), 1, 4, None, 0)
    (finish,) = lane.receive(reply(Kind.FAILURE, 0, Status.NOT_KEPT), (), 0)
    assert finish.outcome.kind is OutcomeKind.UNKNOWN
    assert finish.outcome.reason == "evicted"
    assert finish.outcome.evidence.startswith("executed, reply evicted")


def test_a_batch_keeps_small_replies_and_tells_of_large_ones_one_by_one():
    """Of three calls of one request the large reply alone is not kept."""
    bus = callee(large_bytes=100, keep_bytes=500)
    ask(bus, Kind.REQ, 0, calls=3)
    for seq, buffers in enumerate([(b"a",), LARGE, (b"c",)]):
        bus.finished(SESSION, "main", seq, Kind.RESULT, Status.OK, buffers, 0)
    assert [word for word, _ in probe(bus, 0)] == ["RESULT OK 0", "FAILURE NOT_KEPT 1", "RESULT OK 2"]


def test_what_a_superseded_controller_left_is_kept_the_same_way(shelf):
    """A successor adopts a reply from the shelf; adopted, it takes no more room."""
    bus = machine(shelf=shelf)
    for seq in range(4):
        run(bus, seq, buffers=(b"head", bytes([seq]) * 1_000))
    bus.hello(Header(Kind.HELLO, b"another-session!", EPOCH + 1, INCARNATION, "main"), 0)
    assert [orphan.seq for orphan in bus.orphans()] == [0, 1, 2, 3]
    for seq in range(4):
        orphan = bus.adopt(SESSION, "main", seq)
        assert [bytes(frame) for frame in orphan.replies[0][1]] == [b"head", bytes([seq]) * 1_000]
        bus.validate()
    assert (shelf.nbytes, bus._kept_bytes) == (0, 0)


def test_a_session_that_says_bye_frees_all(shelf):
    """Nobody will ask."""
    bus = machine(shelf=shelf)
    for seq in range(4):
        run(bus, seq)
    bus.bye(SESSION)
    bus.validate()
    assert (shelf.nbytes, bus._kept_bytes) == (0, 0)


def test_a_caller_says_at_once_that_a_large_reply_has_come():
    """Else it would stand in the worker's memory until the next call; a small one may."""
    lane = caller()
    for _ in range(2):
        lane.place((b"call",), 1, 4, None, 0)
    assert words(lane.receive(reply(Kind.RESULT, 0, Status.OK), (b"small",), 0)) == ["finish 0 OK"]
    effects = lane.receive(reply(Kind.RESULT, 1, Status.OK), LARGE, 0)
    assert words(effects) == ["finish 1 OK", "PROBE 1"]
    told = next(e for e in effects if isinstance(e, SendTo))
    assert told.header.floor == 2
    bus = machine()
    for seq in range(2):
        run(bus, seq)
    assert bus.receive(told.header, (), b"peer!", 0) == []
    assert bus._kept_bytes == 0


def test_a_full_disk_leaves_no_file_and_no_bytes(shelf, monkeypatch):
    """The shelf says that it has no room; what stood there is whole."""
    token = shelf.put((b"one", memoryview(b"two")))

    class Full:
        def __init__(self, **_):
            pass

        def write(self, _data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", Full)
    assert shelf.put((b"three",)) is None
    assert shelf.nbytes == 6
    assert shelf.get(token) == [b"one", b"two"]
    shelf.drop(token)
    assert shelf.nbytes == 0


class Named(bytes):
    """A frame that only names an array, as the owner of the array keeps it."""

    nbytes = 1 << 30


def test_a_frame_that_names_an_array_is_kept_itself(shelf):
    """The array lives as long as the frame does, so the shelf keeps the frame, not its bytes."""
    name = Named(b"named")
    token = shelf.put((b"x" * 500, name, b"tail"))
    assert shelf.nbytes == 504
    head, again, tail = shelf.get(token)
    assert (head, tail) == (b"x" * 500, b"tail")
    assert again is name
    shelf.drop(token)
    assert shelf.nbytes == 0
