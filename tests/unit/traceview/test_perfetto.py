from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceview.encoder import Placed
from traceview.event import Event, encode_args
from traceview.merge import merge
from traceview.perfetto import PerfettoEncoder, varint


@given(st.integers(0, (1 << 64) - 1))
def test_varints_have_seven_bits_a_byte(number):
    """A varint decodes to its number, the last byte alone has no continuation bit."""
    data = varint(number)
    assert sum((byte & 0x7F) << 7 * at for at, byte in enumerate(data)) == number
    assert [byte >> 7 for byte in data] == [1] * (len(data) - 1) + [0]


def fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """Decode one level of protobuf: (field number, value)."""
    found: list[tuple[int, int | bytes]] = []
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    while at < len(data):
        tag = number()
        size = {1: 8, 5: 4}.get(tag & 7)
        if tag & 7 == 0:
            found.append((tag >> 3, number()))
            continue
        size = number() if size is None else size
        found.append((tag >> 3, data[at : at + size]))
        at += size
    return found


def packets_of(events: list[Event], starts: list[int], ends: list[int]) -> bytes:
    """Encode spans of one row."""
    encoder = PerfettoEncoder()
    pids, tids = np.ones(len(events), dtype=np.int64), np.full(len(events), 9)
    times = np.array(starts), np.array(ends)
    encoded, sizes = encoder.bodies(events, pids, *times, np.ones(len(events), dtype=bool))
    cuts = [0, *np.cumsum(sizes).tolist()]
    bodies = [encoded[begin:end] for begin, end in pairwise(cuts)]
    return encoder.place(Placed(bodies, pids, tids, *times)) + encoder.finish()


def test_ends_come_in_order_before_what_follows():
    """On one row a span's end stands before the next begin at the same time, an inner end before an outer one."""
    events = [Event(n, "X", pid=1, tid=9) for n in ("outer", "inner", "next")]
    data = packets_of(events, [0, 5, 10], [10, 10, 20])
    kinds = []
    for _, packet in fields(data):
        assert isinstance(packet, bytes)
        parts = dict(fields(packet))
        if 11 not in parts:  # what is interned
            continue
        event = dict(fields(parts[11]))  # type: ignore[arg-type]
        kinds.append((parts[8], event[9]))
    assert kinds == [(0, 1), (5, 1), (10, 2), (10, 2), (10, 1), (20, 2)]


ARGS = {
    "text": "ü<b>",
    "small": 7,
    "big": (1 << 63) + 5,
    "negative": -12,
    "half": 0.5,
    "yes": True,
    "no": False,
    "none": None,
    "nested": {"a": [1, "b", {"c": 2.5}]},
}


def trace_of(path: Path) -> tuple[list, dict]:
    """Merge a small run and decode it with the published classes: packets, and names by (sequence, kind, id)."""
    pb = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="pip install perfetto")
    lines = [
        {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "worker", "role": "actor", "rank": 3}},
        {"name": "thread_name", "ph": "M", "pid": 7, "tid": 8, "args": {"name": "main"}},
        {"name": "a", "cat": "compute", "ph": "X", "ts": 1.5, "dur": 4.25, "pid": 7, "tid": 8, "args": ARGS},
        {"name": "b", "ph": "X", "ts": 2.0, "dur": 1.0, "pid": 7, "tid": 8, "bind_id": "0xff", "flow_out": True},
        {"name": "c", "ph": "X", "ts": 9.0, "dur": 0.0, "pid": 7, "tid": 8, "bind_id": "0xff", "flow_in": True},
        {"name": "i", "ph": "i", "ts": 3.0, "pid": 7, "tid": 8, "s": "t"},
        {"name": "q", "ph": "C", "ts": 4.0, "pid": 7, "args": {"x": 1, "y": 2.5}},
        {"name": "p", "cat": "s", "ph": "b", "id": 5, "ts": 5.0, "pid": 7, "tid": 8},
        {"name": "p", "cat": "s", "ph": "e", "id": 5, "ts": 6.0, "pid": 7, "tid": 8},
    ]
    path.mkdir()
    (path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    merge([str(path)], path / "o.pftrace")
    trace = pb.Trace.FromString((path / "o.pftrace").read_bytes())
    names: dict[tuple[int, str, int], str] = {}
    for packet in trace.packet:
        for kind in ("event_names", "event_categories", "debug_annotation_names"):
            for entry in getattr(packet.interned_data, kind):
                names[packet.trusted_packet_sequence_id, kind, entry.iid] = entry.name
    return list(trace.packet), names


@pytest.mark.ci
def test_the_published_message_classes_read_what_we_write(tmp_path):
    """Every span, arrow, counter, instant, async phase, name and argument is where Perfetto's schema has it."""
    packets, names = trace_of(tmp_path / "t")
    tracks = [p.track_descriptor for p in packets if p.HasField("track_descriptor")]
    assert [t.process.process_name for t in tracks if t.HasField("process")] == ["worker"]
    [thread] = [t for t in tracks if t.HasField("thread")]
    assert (thread.thread.thread_name, thread.thread.pid) == ("main", 1)
    assert sorted(t.name for t in tracks if t.HasField("counter")) == ["q x", "q y"]
    events = [(p.timestamp, p.track_event, p.trusted_packet_sequence_id) for p in packets if p.HasField("track_event")]
    begun = {
        names[seq, "event_names", e.name_iid]: (at, e)
        for at, e, seq in events
        if e.type == e.TYPE_SLICE_BEGIN and e.track_uuid == thread.uuid
    }
    assert {name: at for name, (at, _) in begun.items()} == {"a": 1500, "b": 2000, "c": 9000}
    ends = [at for at, e, _ in events if e.type == e.TYPE_SLICE_END and e.track_uuid == thread.uuid]
    assert ends == [3000, 5750, 9000]
    assert list(begun["b"][1].flow_ids) == list(begun["c"][1].flow_ids) == [255]
    assert [at for at, e, _ in events if e.type == e.TYPE_INSTANT] == [3000]
    counts = [(at, e.double_counter_value) for at, e, _ in events if e.type == e.TYPE_COUNTER]
    assert sorted(counts) == [(4000, 1.0), (4000, 2.5)]
    first = begun["a"][1]
    sequence = packets[-1].trusted_packet_sequence_id
    assert [names[sequence, "event_categories", n] for n in first.category_iids] == ["compute"]
    found = {names[sequence, "debug_annotation_names", a.name_iid]: a for a in first.debug_annotations}
    assert set(found) == set(ARGS)
    assert found["text"].string_value == "ü<b>"
    assert (found["small"].int_value, found["negative"].int_value) == (7, -12)
    assert found["big"].uint_value == ARGS["big"]
    assert (found["half"].double_value, found["yes"].bool_value) == (0.5, True)
    assert found["nested"].dict_entries[0].array_values[2].dict_entries[0].double_value == 2.5


@pytest.mark.ci
def test_any_args_make_a_valid_packet():
    """Whatever the args, the published classes can read the packet."""
    pb = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="pip install perfetto")
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    values = st.recursive(leaves, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=8)

    @given(st.dictionaries(st.text(), values), st.text(), st.integers(0, 1 << 62))
    def check(args, name, start):
        event = Event(name.encode("utf-8", "replace").decode(), "X", pid=1, tid=2, args=encode_args(args))
        packets = pb.Trace.FromString(packets_of([event], [start], [start + 5])).packet[1:]
        assert [p.timestamp for p in packets] == [start, start + 5]
        assert len(packets[0].track_event.debug_annotations) == len(json.loads(bytes(event.args) or b"{}"))

    check()
