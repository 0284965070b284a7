"""Arrays of a process to those who share its memory and to those who do not, in one message and in many."""

import gc
import threading

import numpy as np
import pytest

from waiting import scaled, wait_until
from zbus.codec import decode, encode
from zbus.data.courier import Courier
from zbus.data.desk import Desk, Owner
from zbus.data.lease import Lease
from zbus.data.offer import Offer
from zbus.data.porter import Porter
from zbus.errors import CodecError
from zbus.protocol.puller import Patience
from zbus.transport.bulk import Bulk
from zbus.transport.carrier import NOWHERE, Reach
from zbus.transport.sockets import SocketFactory

SIZE = 1 << 20
QUICK = Patience(again=200_000_000, again_most=400_000_000, stall=1_500_000_000, absent=1_500_000_000)


@pytest.fixture
def porters(tmp_path):
    """Return a maker of porters, each as in a process of its own, in the named place of shared memory."""
    made = []

    def make(place, **options):
        factory = SocketFactory()
        bulk = Bulk(factory, patience=QUICK)
        bulk.bind("tcp://127.0.0.1:0")
        (tmp_path / place).mkdir(exist_ok=True)
        porter = Porter(Courier.enter(64 << 20, tmp_path / place / "zbus"), bulk, pull_from=SIZE, **options)
        made.append((porter, factory))
        return porter

    yield make
    for porter, factory in made:
        porter.bulk.close()
        porter.leave()
        assert factory.close(), factory.open_sockets


def sent(owner, reader, value, *, snapshot=True):
    """Return the frames of a value for a reader, on its owner's side."""
    return owner.addressed(
        encode(value, snapshot=snapshot, keep=owner.keeper([reader.reach], snapshot=snapshot)), reader.reach
    )


def received(frames):
    """Return frames as they come out of a socket."""
    return [bytes(frame) for frame in frames]


def test_an_array_is_pulled_into_memory_of_the_readers_own(porters):
    """What was offered arrives writable; a tensor needs no copy of it; the memory is used again."""
    owner, reader = porters("here"), porters("there")
    data = np.arange(SIZE, dtype=np.uint8)
    for _ in range(3):
        frames = sent(owner, reader, {"x": data, "small": np.ones(8)})
        assert [type(frame) for frame in frames] == [bytes, Offer]
        got = decode(reader.opened(received(frames), owner.reach))
        assert np.array_equal(got["x"], data)
        got["x"][:] = 0
        del frames, got
    assert reader._warm.made == 1
    assert reader._warm.idle_bytes >= SIZE
    wait_until(lambda: owner.statistics()["bulk_offered_bytes"] == 0, what="the offers to be withdrawn")


def test_an_offer_lasts_as_long_as_anybody_keeps_its_frame(porters):
    """A message that is sent again shows the same bytes; when the last frame is gone, the offer is refused."""
    owner, reader = porters("here"), porters("there")
    data = np.ones(SIZE, np.uint8)
    frames = sent(owner, reader, data)
    data[:] = 2
    late = received(frames)
    for _ in range(2):
        assert (decode(reader.opened(late, owner.reach)) == 1).all()
    del frames
    gc.collect()
    wait_until(lambda: owner.statistics()["bulk_offered_bytes"] == 0, what="the withdrawal")
    with pytest.raises(CodecError, match="offers nothing of that name"):
        reader.opened(late, owner.reach)


def test_one_message_to_a_near_and_a_far_reader_writes_the_array_once(porters):
    """The near one maps the slot, the far one pulls from it; without a copy for the second."""
    owner, near, far = porters("here"), porters("here"), porters("there")
    data = np.arange(SIZE, dtype=np.uint8)
    frames = encode(data, keep=owner.keeper([near.reach, far.reach], snapshot=True))
    assert type(frames[1]) is Lease
    to_near, to_far = owner.addressed(frames, near.reach), owner.addressed(frames, far.reach)
    assert type(to_near[1]) is Lease
    assert type(to_far[1]) is Offer
    assert owner._copied == 0
    del frames
    for reader, copy in ((near, to_near), (far, to_far)):
        assert np.array_equal(decode(reader.opened(received(copy), owner.reach)), data)


def test_rows_of_a_kept_value_are_cut_where_a_reader_does_not_map_the_whole(porters):
    """All map it: its slot is named, for any rows. One does not, or it is not lent: rows alone are in the message."""
    owner, near, far = porters("here"), porters("here"), porters("there")
    rows = np.arange(8 * SIZE, dtype=np.uint8).reshape(8, SIZE)
    many = [rows[index, : 1 << 15].copy() for index in range(8)] * 4
    desk = Desk(Owner("controller", 0, 1), owner, inlines=True, limit=1 << 30)

    def sizes(value, chosen, *readers):
        ref = desk.keep(value).take(chosen)
        keep = owner.keeper([reader.reach for reader in readers], snapshot=True)
        frames = encode(ref, keep=keep)
        for reader in readers:
            sent_to_it = owner.addressed(frames, reader.reach)  # its offers last as long as this
            came = decode(reader.opened(received(sent_to_it), owner.reach))
            assert [came[place].tolist() for place in range(len(chosen))] == [value[row].tolist() for row in chosen]
        return sum(frame.nbytes if type(frame) in {Lease, Offer} else len(memoryview(frame)) for frame in frames[1:])

    for chosen in (range(2, 4), [5, 1]):
        assert sizes(rows, chosen, near) == 8 * SIZE
        assert sizes(rows, chosen, near, far) == 2 * SIZE
        assert sizes(many, chosen, near) == 2 << 15
        full = owner.courier.lend
        owner.courier.lend = lambda _data: None
        try:
            assert sizes(rows[:, : SIZE // 2].copy(), chosen, near) == SIZE
        finally:
            owner.courier.lend = full


def test_where_shared_memory_is_full_a_near_reader_pulls(porters):
    """No room for a lease is no reason to put a gigabyte into a message."""
    owner, near = porters("here"), porters("here")
    large = np.ones(80 << 20, np.uint8)
    frames = sent(owner, near, large, snapshot=False)
    assert type(frames[1]) is Offer
    assert owner._copied == 0, "a caller that waits for the end needs no copy"


def test_copies_on_offer_are_bounded(porters):
    """Beyond the bound arrays travel in messages, which have bounds of their own; freed room is used again."""
    owner, reader = porters("here", most_copied=3 * SIZE), porters("there")
    keep = owner.keeper_for(reader.reach)
    kept = [keep(memoryview(np.ones(SIZE, np.uint8))) for _ in range(5)]
    assert [type(frame) for frame in kept] == [Offer] * 3 + [bytes] * 2
    kept.clear()
    assert type(keep(memoryview(np.ones(SIZE, np.uint8)))) is Offer


def test_copies_leave_the_host_a_tenth_of_its_memory(porters, monkeypatch):
    """Many processes offer at once, so each looks at what is left for all."""
    owner, reader = porters("here"), porters("there")
    keep = owner.keeper_for(reader.reach)
    for available, kind in ((12 * SIZE, Offer), (10 * SIZE, bytes)):
        monkeypatch.setattr("zbus.data.arena.host_memory", lambda available=available: (available, 100 * SIZE))
        assert type(keep(memoryview(np.ones(SIZE, np.uint8)))) is kind


def test_a_reader_that_named_no_address_gets_the_bytes(porters):
    """Nothing is offered to whom could not pull it, also what was offered to others already."""
    owner, reader = porters("here"), porters("there")
    assert owner.keeper([NOWHERE], snapshot=True) is None
    frames = encode(np.arange(SIZE, dtype=np.uint8), keep=owner.keeper([reader.reach], snapshot=True))
    (_, plain) = owner.addressed(frames, NOWHERE)
    assert type(plain) is memoryview
    assert Porter.in_full(frames)[1] == plain


def test_what_names_no_array_that_could_come_is_an_error(porters):
    """No address, an absurd size, another size, an owner that is gone: each is told, nothing of that size is made."""
    owner, reader = porters("here"), porters("there")
    frames = received(sent(owner, reader, np.ones(SIZE, np.uint8)))
    for frame, reach, word in (
        (frames[1], NOWHERE, "named no address"),
        (frames[1][:24] + (1 << 60).to_bytes(8, "little"), owner.reach, "are taken"),
        (frames[1][:24] + bytes(8), owner.reach, "cannot be pulled"),
        (frames[1][:24] + (SIZE - 1).to_bytes(8, "little"), owner.reach, "offers nothing|another size"),
        (frames[1], Reach("", ("tcp://127.0.0.1:1",)), "nobody answers"),
        (frames[1], Reach("", ("ipc:///nowhere/data",)), "no way to the owner"),
        (frames[1], Reach("", ("nonsense",)), "cannot connect"),
    ):
        with pytest.raises(CodecError, match=word) as caught:
            reader.opened([frames[0], frame], reach)
        assert bool(caught.value.hint) == (word in {"nobody answers", "cannot connect"})


def test_a_size_that_is_not_the_owners_is_refused_by_the_owner(porters):
    """The reader's word on the size is checked against the buffer, so a message cannot make it read beyond."""
    owner, reader = porters("here"), porters("there")
    frames = sent(owner, reader, np.ones(SIZE, np.uint8))
    name = bytes(frames[1])
    with pytest.raises(CodecError, match="its buffer has another size"):
        reader.opened([b"", name[:24] + (SIZE + 1).to_bytes(8, "little")], owner.reach)
    assert owner.statistics()["bulk_refused_ask_other_size"] >= 1


@pytest.mark.parametrize(
    ("facts", "reach"),
    [
        ({}, NOWHERE),
        ({"memory": 7, "data": "tcp://a"}, NOWHERE),
        ({"memory": "x", "data": [1]}, Reach("x")),
        ({"data": ["tcp://a"] * 9}, NOWHERE),
        ({"data": ["x" * 300]}, NOWHERE),
        ({"memory": "x", "data": ["tcp://a"]}, Reach("x", ("tcp://a",))),
    ],
)
def test_what_a_peer_says_of_itself_is_taken_if_it_is_well_formed(facts, reach):
    """Junk in a handshake counts as not said."""
    assert Reach.told(facts) == reach
    assert Reach.told(reach.facts()) == reach


def test_a_message_is_opened_later_without_anybody_waiting(porters):
    """The callback comes on another thread, after the call that began it, also when the data is there at once."""
    owner, reader = porters("here"), porters("there")
    frames = received(sent(owner, reader, [np.full(SIZE, number, np.uint8) for number in range(4)]))
    assert len(frames) == 5
    done, threads = threading.Event(), []
    held = sent(owner, reader, [np.full(SIZE, number, np.uint8) for number in range(4)])

    def then(opening):
        threads.append(threading.current_thread())
        done.set()

    opening = reader.open_later(received(held), owner.reach, then)
    assert opening.total == 4 * SIZE
    assert done.wait(scaled(20))
    assert [int(array[5]) for array in decode(opening.result())] == [0, 1, 2, 3]
    assert threads[0] is not threading.main_thread()
    done.clear()
    lost = reader.open_later([*received(held)[:4], frames[4]], owner.reach, then)
    assert done.wait(scaled(20))
    with pytest.raises(CodecError, match="offers nothing of that name"):  # one cannot come: all count as lost
        lost.result()
    reader.open_later(received(held), owner.reach, then).cancel()


def test_a_copy_that_could_not_be_made_costs_no_room(porters, monkeypatch):
    """No memory now: what it would have taken of the bound is there for the next."""
    owner, reader = porters("here", most_copied=SIZE), porters("there")
    data = np.ones(SIZE, np.uint8)
    with monkeypatch.context() as patch:

        def empty(*_):
            raise MemoryError

        patch.setattr(owner._warm_memory(), "empty", empty)
        with pytest.raises(CodecError):
            sent(owner, reader, data)
    assert type(sent(owner, reader, data)[1]) is Offer
