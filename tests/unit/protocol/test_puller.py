"""Ranges pulled over a connection that loses, doubles, reorders, breaks: every byte once, in its place, or an end."""

import json
import os
import random
from pathlib import Path

import pytest

from zbus.protocol.parts import MAX_RANGE, Kind, PartError, PartHeader, Status, pack, unpack
from zbus.protocol.puller import Ask, Ended, Ending, Patience, Puller, Range
from zbus.protocol.stock import Stock

GOLDEN = Path(__file__).parents[2] / "golden" / "wire" / "v1" / "parts.json"
KEY = bytes(range(16))
S = 1_000_000_000


class Run:
    """One puller and one stock, and a network in between that a seed decides about."""

    def __init__(self, seed, *, loss=0.0, double=0.0, reorder=0.0, cut=0.0, window=6, piece=4):
        self.chance = random.Random(seed)
        self.loss, self.double, self.reorder, self.cut = loss, double, reorder, cut
        self.stock = Stock()
        self.puller = Puller(piece=piece, window=window, patience=Patience(again=S, again_most=4 * S))
        self.into: dict[int, list[bytearray]] = {}
        self.ended: dict[int, Ended] = {}
        self.flight: list[bytes] = []
        self.written: dict[tuple[int, int, int], int] = {}
        self.now = 0
        self.up = False

    def pull(self, key, ranges, deadline_ns=None):
        number, asks = self.puller.pull(key, ranges, deadline_ns, self.now)
        self.into[number] = [bytearray(one.nbytes) for one in ranges]
        self.do(asks)
        return number

    def connect(self):
        self.up = True
        self.do(self.puller.link_up(self.now))

    def do(self, effects):
        for effect in effects:
            if isinstance(effect, Ended):
                assert effect.pull not in self.ended, "a pull ends once"
                self.ended[effect.pull] = effect
            elif self.up:
                assert isinstance(effect, Ask)
                self.flight.append(pack(effect.header))
        self.puller.validate()

    def step(self):
        """Let one message arrive, or not."""
        if self.cut and self.chance.random() < self.cut:
            self.flight.clear()
            self.up = False
            self.puller.link_down("cut", self.now)
            self.now += S // 10
            self.connect()
            return
        if not self.flight:
            self.now = max(self.now + 1, min(self.puller.due_ns, self.now + S))
            self.do(self.puller.on_timer(self.now))
            return
        at = self.chance.randrange(len(self.flight)) if self.chance.random() < self.reorder else 0
        message = self.flight.pop(at)
        if self.chance.random() < self.double:
            self.flight.insert(self.chance.randrange(len(self.flight) + 1), message)
        if self.chance.random() < self.loss:
            return
        header = unpack(message[:64])
        self.now += S // 1000
        if header.kind is Kind.ASK:
            status, view = self.stock.answer(header)
            kind = Kind.REFUSED if view is None else Kind.PART
            self.flight.append(pack(header._replace(kind=kind, status=status)) + bytes(view or b""))
            return
        if header.kind is Kind.PART:
            place = self.puller.place_of(header)
            if place is not None:
                assert place.pull not in self.ended, "nothing is written for a pull that is over"
                for byte in range(place.offset, place.offset + place.nbytes):
                    spot = (place.pull, place.range, byte)
                    assert spot not in self.written, "a byte is written once"
                    self.written[spot] = 1
                self.into[place.pull][place.range][place.offset : place.offset + place.nbytes] = message[64:]
        self.do(self.puller.came(header, self.now))

    def settle(self, *pulls, steps=20_000):
        for _ in range(steps):
            if all(number in self.ended for number in pulls):
                return
            self.step()
        pytest.fail(f"not over after {steps} steps: {self.puller.due_ns} {len(self.flight)}")


@pytest.mark.parametrize("seed", range(120))
def test_every_byte_comes_once_whatever_the_network_does(seed):
    """Loss, doubles, disorder and cuts by chance: each pull ends done, with the owner's bytes, and the books close."""
    chance = random.Random(seed)
    run = Run(
        seed, loss=chance.choice((0, 0.05, 0.3)), double=chance.choice((0, 0.2)), reorder=chance.choice((0, 0.3)),
        cut=chance.choice((0, 0.02)), window=chance.choice((4, 12, 64)), piece=4,
    )  # fmt: skip
    buffers = [chance.randbytes(chance.randrange(1, 60)) for _ in range(3)]
    run.stock.offer(KEY, buffers)
    wanted = {}
    if chance.random() < 0.5:
        run.connect()
    for _ in range(chance.randrange(1, 5)):
        ranges = []
        for _ in range(chance.randrange(1, 4)):
            buffer = chance.randrange(3)
            offset = chance.randrange(len(buffers[buffer]))
            nbytes = chance.randrange(1, len(buffers[buffer]) - offset + 1)
            ranges.append(Range(buffer, offset, nbytes, len(buffers[buffer])))
        wanted[run.pull(KEY, ranges)] = ranges
        for _ in range(chance.randrange(4) if run.up else 0):
            run.step()
    if not run.up:
        run.connect()
    run.settle(*wanted)
    for number, ranges in wanted.items():
        assert run.ended[number].how is Ending.DONE
        for one, into in zip(ranges, run.into[number], strict=True):
            assert bytes(into) == buffers[one.buffer][one.offset : one.offset + one.nbytes]
    assert run.puller.idle
    assert run.puller.out_bytes == 0


def asked(effects):
    """Return the headers that are sent."""
    return [effect.header for effect in effects if isinstance(effect, Ask)]


def answer(header, **changes):
    """Return the header of a part for an ask."""
    return header._replace(kind=Kind.PART, **changes)


def test_the_window_bounds_what_is_out_and_pulls_take_turns():
    """No more is asked for than the window holds; a small pull does not wait for all of a large one."""
    puller = Puller(piece=4, window=8)
    puller.link_up(0)
    _, first = puller.pull(KEY, [Range(0, 0, 100, 100)], None, 0)
    small, none = puller.pull(KEY, [Range(1, 0, 4, 4)], None, 0)
    assert [header.offset for header in asked(first)] == [0, 4]
    assert none == []
    assert puller.out_bytes == 8
    heads = [*asked(first)]
    order = []
    while heads:
        effects = puller.came(answer(heads.pop(0)), 1)
        order += [effect.pull for effect in effects if isinstance(effect, Ended)]
        heads += asked(effects)
    assert order[0] == small


def test_an_answer_shows_what_was_lost_before_it():
    """Answers keep the order of what was asked, so a gap is a loss and is asked for again at once, without a timer."""
    puller = Puller(piece=4, window=12)
    puller.link_up(0)
    _, effects = puller.pull(KEY, [Range(0, 0, 12, 12)], None, 0)
    first, second, third = asked(effects)
    again = asked(puller.came(answer(third), 1))
    assert [header.offset for header in again] == [first.offset, second.offset]
    assert puller.place_of(answer(first)) is None, "the old number is dead"
    assert puller.came(answer(first), 1) == []
    assert puller.ignored == 1


def test_silence_costs_one_piece_and_ends():
    """A slow link is asked for one piece again at growing gaps, and given up after the stall."""
    puller = Puller(piece=4, window=8, patience=Patience(again=S, again_most=2 * S, stall=10 * S))
    puller.link_up(0)
    number, _ = puller.pull(KEY, [Range(0, 0, 100, 100)], None, 0)
    now, repeats, ended = 0, 0, []
    while not ended:
        now = puller.due_ns
        effects = puller.on_timer(now)
        repeats += len(asked(effects))
        ended = [effect for effect in effects if isinstance(effect, Ended)]
    assert (now, repeats) == (10 * S, 5)
    assert (ended[0].pull, ended[0].how) == (number, Ending.STALLED)
    assert "0 of 100 bytes came" in ended[0].evidence
    assert puller.due_ns > 1 << 61


def test_a_connection_that_comes_and_goes_is_silence_too():
    """A new connection gives its pulls the whole patience once; a piece that comes, once more."""
    puller = Puller(piece=4, window=4, patience=Patience(again=S, again_most=2 * S, stall=10 * S, absent=5 * S))
    puller.link_up(0)
    number, effects = puller.pull(KEY, [Range(0, 0, 100, 100)], None, 0)
    came = 40 * S // 10
    for now in range(0, 60 * S, 4 * S):
        ended = [effect for effect in puller.on_timer(now) if isinstance(effect, Ended)]
        if ended:
            break
        puller.link_down("it flaps", now + S)
        effects = puller.link_up(now + 2 * S)
        if now == came:
            effects = puller.came(answer(asked(effects)[0]), now + 3 * S)
    assert (ended[0].pull, ended[0].how) == (number, Ending.STALLED)
    assert "4 of 100 bytes came" in ended[0].evidence
    assert now == 20 * S, "the first connection after the piece, at 10 s, gave it ten more"


def test_a_deadline_a_refusal_and_an_absence_end_a_pull_with_their_evidence():
    """Each end says how it was seen and how much had come."""
    puller = Puller(piece=4, window=8, patience=Patience(absent=3 * S))
    one, _ = puller.pull(KEY, [Range(0, 0, 8, 8)], 2 * S, 0)
    two, _ = puller.pull(KEY, [Range(0, 0, 8, 8)], None, 0)
    assert puller.due_ns == 2 * S
    (late,) = puller.on_timer(2 * S)
    puller.link_down("nobody listens", 2 * S)
    (absent,) = puller.on_timer(3 * S)
    assert (late.pull, late.how, absent.pull, absent.how) == (one, Ending.DEADLINE, two, Ending.ABSENT)
    assert "nobody listens" in absent.evidence
    puller.link_up(3 * S)
    _, effects = puller.pull(KEY, [Range(0, 0, 8, 8)], None, 3 * S)
    (head, _) = asked(effects)
    (refused,) = puller.came(head._replace(kind=Kind.REFUSED, status=Status.UNKNOWN_KEY), 3 * S)
    assert refused.how is Ending.REFUSED
    assert "offers nothing of that name" in refused.evidence


@pytest.mark.parametrize(
    "change",
    [{"key": bytes(16)}, {"offset": 1}, {"nbytes": 3}, {"total": 9}, {"buffer": 1}, {"kind": Kind.ASK}],
)
def test_an_answer_that_says_otherwise_than_was_asked_is_a_lie(change):
    """Its bytes are not read into any place, and the pull ends."""
    puller = Puller(piece=4, window=8)
    puller.link_up(0)
    number, effects = puller.pull(KEY, [Range(0, 0, 8, 8)], None, 0)
    head = answer(asked(effects)[0])._replace(**change)
    assert change.get("kind") or puller.place_of(head) is None
    (ended,) = puller.came(head, 0)
    assert (ended.pull, ended.how) == (number, Ending.LIED)
    assert puller.idle


def test_what_is_cancelled_leaves_nothing_and_its_parts_go_nowhere():
    """Its room in the window is free at once for another pull, and late parts are ignored."""
    puller = Puller(piece=4, window=8)
    puller.link_up(0)
    first, effects = puller.pull(KEY, [Range(0, 0, 100, 100)], None, 0)
    heads = asked(effects)
    second, none = puller.pull(KEY, [Range(1, 0, 8, 8)], None, 0)
    assert none == []
    assert len(asked(puller.cancel(first, 0))) == 2
    assert puller.place_of(answer(heads[0])) is None
    assert puller.came(answer(heads[0]), 0) == []
    (ended,) = puller.owner_gone("it was killed")
    assert (ended.pull, ended.how) == (second, Ending.ABSENT)
    puller.validate()


@pytest.mark.parametrize(
    ("ranges", "key"),
    [
        ([], KEY), ([Range(0, 0, 0, 8)], KEY), ([Range(0, 4, 5, 8)], KEY), ([Range(-1, 0, 1, 8)], KEY),
        ([Range(0, 0, 8, 8)], b"short"),
    ],
)  # fmt: skip
def test_a_pull_that_makes_no_sense_is_refused(ranges, key):
    """What reaches beyond its buffer, or names none, is the caller's mistake."""
    with pytest.raises(ValueError, match="bytes"):
        Puller().pull(key, ranges, None, 0)


def test_the_owner_gives_only_what_it_offers():
    """Unknown keys and buffers, other sizes, ranges outside and too long ones are refused and counted."""
    stock = Stock()
    stock.offer(KEY, [bytes(10), bytearray(2 * MAX_RANGE)])
    ask = PartHeader(Kind.ASK, 0, 1, 2, 3, 10, KEY)
    status, view = stock.answer(ask)
    assert (status, bytes(view or b"")) == (Status.NONE, bytes(3))
    assert view is not None
    assert view.readonly
    wrong = {
        Status.UNKNOWN_KEY: ask._replace(key=bytes(16)),
        Status.UNKNOWN_BUFFER: ask._replace(buffer=2),
        Status.OTHER_SIZE: ask._replace(total=11),
        Status.OUT_OF_RANGE: ask._replace(offset=8),
        Status.TOO_MUCH: ask._replace(buffer=1, total=2 * MAX_RANGE, nbytes=MAX_RANGE + 1),
    }
    for status, header in wrong.items():
        assert stock.answer(header) == (status, None)
    assert stock.answer(ask._replace(nbytes=0)) == (Status.OUT_OF_RANGE, None)
    assert sum(stock.refused.values()) == 6
    with pytest.raises(ValueError, match="in use"):
        stock.offer(KEY, [b""])
    assert stock.nbytes == 10 + 2 * MAX_RANGE
    assert stock.withdraw(KEY)
    assert not stock.withdraw(KEY)
    assert (stock.nbytes, len(stock)) == (0, 0)


def test_headers_survive_the_wire_and_junk_does_not():
    """What was packed is unpacked; anything else is refused with its reason."""
    header = PartHeader(Kind.REFUSED, 3, 1 << 40, 5, 6, 1 << 41, KEY, Status.OTHER_SIZE)
    frame = pack(header)
    assert unpack(frame) == header
    for junk, reason in (
        (b"", "no_part"), (frame[:-1], "no_part"), (b"xx" + frame[2:], "no_part"),
        (frame[:2] + b"\x02" + frame[3:], "part_version"), (frame[:3] + b"\x09" + frame[4:], "part_kind"),
        (frame[:16] + b"\xff" * 8 + frame[24:], "part_range"),
    ):  # fmt: skip
        with pytest.raises(PartError, match=reason):
            unpack(junk)


HEADERS = {
    "ask": PartHeader(Kind.ASK, 1, 7, 1 << 20, 1 << 20, 3 << 20, KEY),
    "part": PartHeader(Kind.PART, 1, 7, 1 << 20, 1 << 20, 3 << 20, KEY),
    "refused": PartHeader(Kind.REFUSED, 0, 8, 0, 5, 6, KEY, Status.OTHER_SIZE),
}


def test_bytes_of_every_kind_are_those_of_the_golden_file():
    """The layout of a version never changes; what was written by this version once is read by it now."""
    now = {name: pack(header).hex() for name, header in HEADERS.items()}
    if os.environ.get("ZBUS_TEST_GOLDEN") == "write":
        GOLDEN.write_text(json.dumps(now, indent=1) + "\n")
    assert now == json.loads(GOLDEN.read_text())
    assert {name: unpack(bytes.fromhex(frame)) for name, frame in now.items()} == HEADERS
