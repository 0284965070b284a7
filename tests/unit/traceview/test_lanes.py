from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from traceview.lanes import Lanes

SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30), st.sampled_from(["", "a", "b", "c"])), max_size=40)


def placed(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str, int]]:
    """Place (start, duration, track) spans in order and return (start, end, track, row)."""
    lanes = Lanes()
    ordered = sorted(spans, key=lambda s: (s[0], -s[1]))
    return [(start, start + dur, track, lanes.place(start, start + dur, track)) for start, dur, track in ordered]


@given(SPANS)
def test_spans_on_one_row_are_apart_or_nested(spans):
    """No two spans of a row overlap without one enclosing the other."""
    done = placed(spans)
    for i, (start, end, _, row) in enumerate(done):
        for later_start, later_end, _, later_row in done[i + 1 :]:
            if row == later_row and later_start < end:
                assert later_end <= end, (start, end, later_start, later_end)


@given(SPANS)
def test_spans_of_different_tracks_never_nest(spans):
    """A span is never put under a span of another call or task."""
    done = placed(spans)
    for i, (_, end, track, row) in enumerate(done):
        for later_start, _, later_track, later_row in done[i + 1 :]:
            if row == later_row and track != later_track:
                assert later_start >= end


def test_a_nested_span_goes_under_its_parent_and_not_to_a_free_row():
    """A child of a call on row 1 stays there although row 0 is free again."""
    lanes = Lanes()
    assert lanes.place(0, 10, "a") == 0
    assert lanes.place(5, 100, "b") == 1
    assert lanes.place(20, 30, "b") == 1


def test_a_sequence_of_spans_needs_one_row():
    """Spans that follow one another, or nest, use one row, whatever their tracks."""
    assert {row for *_, row in placed([(n * 10, 10, str(n)) for n in range(20)])} == {0}
    assert {row for *_, row in placed([(n, 100 - 2 * n, "") for n in range(20)])} == {0}


def test_a_mark_goes_to_the_row_of_its_open_track():
    """An instant in a task is shown on the row where the task's span is open."""
    lanes = Lanes()
    lanes.place(0, 10, "a")
    lanes.place(5, 20, "b")
    assert (lanes.at(6, "b"), lanes.at(30, "b"), lanes.at(6, "unknown")) == (1, 0, 0)


def test_a_thread_returns_to_its_first_row_after_an_overlap():
    """One overlap gives a thread a second row for as long as it lasts, not for good."""
    lanes = Lanes()
    assert [lanes.place(*span, "") for span in ((0, 10), (5, 15), (20, 30), (40, 50))] == [0, 1, 0, 0]
    assert Lanes().place_all([0, 5, 20, 40], [10, 15, 30, 50], [0] * 4, [True] * 4) == [0, 1, 0, 0]


def test_a_task_keeps_its_row_while_it_is_free():
    """Spans of one task stay together although a row before is free."""
    lanes = Lanes()
    spans = ((0, 10, "a"), (5, 15, "b"), (20, 30, "b"))
    assert [lanes.place(*span) for span in spans] == [0, 1, 1]
