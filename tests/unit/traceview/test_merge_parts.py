from __future__ import annotations

import tempfile
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceview import ends as ends_module
from traceview import store as store_module
from traceview.ends import EndsFile, count_joined
from traceview.layout import nested
from traceview.store import Store

NUMBERS = st.lists(st.integers(0, (1 << 64) - 1) | st.integers(0, 20), max_size=30)
SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=14)


def nested_one_by_one(spans: list[tuple[int, int]]) -> bool:
    """Return whether sorted (start, end) pairs are apart or nested, by comparing all of them."""
    return not any(
        a_start <= b_start < a_end < b_end
        for at, (a_start, a_end) in enumerate(spans)
        for b_start, b_end in spans[at + 1 :]
    )


@given(SPANS, st.lists(st.integers(0, 10), min_size=1, max_size=4))
def test_spans_are_nested_if_no_two_of_them_cross(spans, cuts):
    """The look at all spans at once finds the same as comparing each two, for nested and crossing spans."""
    pairs = [(start, start + dur) for start, dur in spans]
    pairs += [(start, start + dur) for start in cuts for dur in range(0, 12, 3)]  # many that nest
    pairs.sort(key=lambda pair: (pair[0], -pair[1]))
    columns = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    assert nested(columns[:, 0], columns[:, 1]) == nested_one_by_one(pairs)


def test_spans_nested_a_thousand_deep_are_nested():
    """Depth costs no rounds without end: what is deeper than some rounds is looked at one by one."""
    starts = np.arange(1000)
    assert nested(starts, 3000 - starts)
    ends = 3000 - starts
    ends[999] = 2500
    assert not nested(starts, ends)


@pytest.mark.parametrize("at_once", [4, 1 << 18])
@settings(max_examples=60)
@given(blocks=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5))
def test_arrows_are_joined_by_their_numbers_whatever_share_fits_memory(at_once, blocks):
    """The numbers that leave and arrive are counted once each, over several files, in one share or in many."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as two:
        patch.setattr(ends_module, "_AT_ONCE", at_once)
        fds = [one.fileno(), two.fileno()]
        files = [EndsFile(fd, "out.json") for fd in fds]
        for at, (leaving, arriving) in enumerate(blocks):
            files[at % 2].add(array("Q", leaving), np.array(arriving, dtype=np.uint64))
        leave = {number for some, _ in blocks for number in some}
        arrive = {number for _, some in blocks for number in some}
        total = sum(len(a) + len(b) for a, b in blocks)
        assert count_joined(fds, total) == len(leave & arrive)


@pytest.mark.parametrize("limit", [0, 50, 10_000])
@pytest.mark.parametrize("window", [16, 4 << 20])
def test_a_store_gives_events_back_in_any_order(tmp_path, monkeypatch, limit, window):
    """In memory or in a file, neighbours or far apart, each event comes back as it was, without its frame."""
    monkeypatch.setattr(store_module, "_WINDOW", window)
    monkeypatch.setattr(store_module, "_GAP", 64)
    events = [b"<%d:%b>" % (n, b"x" * (n % 37)) for n in range(500)]
    store = Store(tmp_path, limit)
    for at in range(0, len(events), 7):
        some = events[at : at + 7]
        store.add(b"".join(some), np.array([len(one) for one in some], dtype=np.int32))
    store.freeze()
    numbers = np.array([(n * 311) % 500 for n in range(0, 500, 3)], dtype=np.int64)
    assert store.get(numbers) == [events[n] for n in numbers.tolist()]
    assert store.get(numbers, 1, 1) == [events[n][1:-1] for n in numbers.tolist()]
    assert store.get(numbers[:0]) == []
    store.close()
    assert list(tmp_path.iterdir()) == []
