"""Whatever a peer says, the machines neither raise nor break their own rules, and answer in messages of the wire."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from protocol_kit import BODY, EPOCH, INCARNATION, MS, PEER, SESSION, TIMING
from zbus.protocol.callee import Callee
from zbus.protocol.caller import CallerLane
from zbus.protocol.frames import FrameError, decode, encode
from zbus.protocol.messages import Execute, Finish, Header, Kind, SendTo, Status

OTHER = b"another-session!"
small = st.integers(0, 6)
numbers = st.one_of(small, small, small, st.integers(0, 1 << 62))
headers = st.builds(
    Header,
    kind=st.sampled_from([int(kind) for kind in Kind]),
    session=st.sampled_from([SESSION, SESSION, SESSION, OTHER]),
    epoch=st.sampled_from([EPOCH, EPOCH, EPOCH, EPOCH + 1, EPOCH - 1, 0]),
    incarnation=st.sampled_from([INCARNATION, INCARNATION, INCARNATION, INCARNATION, 1]),
    lane=st.sampled_from(["main", "main", "main", "ctl", "nowhere"]),
    seq=numbers,
    calls=st.sampled_from([1, 1, 1, 2, 3, 1 << 20]),
    attempt=small,
    floor=numbers,
    budget_ms=st.sampled_from([0, 1, 50]),
    status=st.one_of(st.sampled_from([int(status) for status in Status]), st.integers(0, 99)),
    trace=st.integers(0, (1 << 64) - 1),
)


def check_wire(effects):
    """Every message that leaves can be encoded, and is decoded to itself."""
    for effect in effects:
        if isinstance(effect, SendTo):
            header, buffers = decode([bytes(frame) for frame in encode(effect.header, effect.buffers)])
            assert header == effect.header
            assert list(buffers) == list(effect.buffers)


@given(st.lists(st.tuples(headers, st.sampled_from(["message", "hello", "bye", "end", "expire", "drain", "chunk"]))))
def test_a_callee_bears_every_message(steps):
    """No header from outside makes it raise, run a request twice, or break its invariants."""
    machine = Callee(INCARNATION, {"main": 1, "ctl": 2}, window_calls=4)
    machine.hello(Header(Kind.HELLO, SESSION, EPOCH, INCARNATION, "main"), 0)
    runs: list[Execute] = []
    started: Counter[tuple[bytes, str, int]] = Counter()
    for now, (header, action) in enumerate(steps):
        if action == "hello":
            effects = machine.hello(header, now * MS)[1]
        elif action == "bye":
            effects = machine.bye(header.session)
        elif action == "expire":
            effects = machine.expire(now * MS)
        elif action == "drain" and header.floor == 0:
            effects = machine.drain()
        elif action == "chunk" and runs:
            effects = machine.chunk(runs[0].session, runs[0].lane, runs[0].seq, header.seq, BODY)
        elif action == "end" and runs:
            run = runs.pop(0)
            effects = []
            for seq in range(run.seq, run.seq + min(run.calls, 5)):
                effects += machine.finished(run.session, run.lane, seq, Kind.RESULT, Status.OK, BODY, now * MS)
        else:
            effects = machine.receive(header, BODY, PEER, now * MS)
        for effect in effects:
            if isinstance(effect, Execute):
                runs.append(effect)
                started[effect.session, effect.lane, effect.seq] += 1
        check_wire(effects)
        machine.validate()
    assert all(count == 1 for count in started.values())


words = st.one_of(
    headers.map(lambda header: ("word", header)),
    st.sampled_from(["place", "place", "batch", "cancel", "time", "down", "up", "consumed"]).flatmap(
        lambda action: st.tuples(st.just(action), headers)
    ),
)


@given(st.lists(words), st.booleans())
def test_a_caller_bears_every_word(steps, dies):
    """Whatever the callee says, in whatever order, each call gets one outcome and no more; the rest when it is over."""
    lane = CallerLane(SESSION, EPOCH, INCARNATION, "main", window_calls=4, window_bytes=40, timing=TIMING)
    lane.on_connected(0, 0)
    finished: Counter[int] = Counter()
    now = 0
    for action, header in steps:
        now += MS
        if action == "place":
            effects = lane.place(BODY, 1, 20, now + header.budget_ms * MS if header.budget_ms else None, now)[1]
        elif action == "batch":
            effects = lane.place(BODY, 3, 10, None, now, strict=True)[1]
        elif action == "cancel":
            effects = lane.cancel(header.seq, now)
        elif action == "time":
            now += header.floor % 200 * MS
            effects = lane.on_timer(now)
        elif action == "down":
            lane.on_disconnected()
            effects = []
        elif action == "up":
            effects = lane.on_connected(header.seq, now)
        elif action == "consumed":
            effects = lane.consumed(header.seq, header.floor)
        else:
            effects = lane.receive(header, BODY, now)
        finished.update(effect.seq for effect in effects if isinstance(effect, Finish))
        check_wire(effects)
        lane.validate()
    if dies:
        finished.update(effect.seq for effect in lane.on_dead("worker_exit", "gone") if isinstance(effect, Finish))
        assert set(finished) == set(range(lane.next_seq))
    assert all(count == 1 for count in finished.values())
    assert all(seq < lane.next_seq for seq in finished)


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_rubbish_is_refused_by_frame_error_alone(frames):
    """Bytes from anywhere are a message or a FrameError."""
    try:
        decode(frames)
    except FrameError:
        return


@given(headers, st.lists(st.binary(max_size=2000), max_size=4))
def test_every_message_comes_out_as_it_went_in(header, buffers):
    """Headers and buffers survive the wire, whatever they hold."""
    decoded, back = decode([bytes(frame) for frame in encode(header, buffers)])
    assert decoded == header
    assert [bytes(buffer) for buffer in back] == buffers
