from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.engines.train.portions import portions

LENGTHS = st.lists(st.integers(0, 30), max_size=40)


@given(LENGTHS, st.none() | st.integers(1, 8), st.none() | st.integers(1, 90))
def test_each_row_goes_once_through_the_model_within_the_limits(lengths, rows, tokens):
    """Portions hold every row once and keep both limits, but for a row that is larger by itself."""
    made = portions(lengths, most_rows=rows, most_tokens=tokens)
    assert sorted(row for portion in made for row in portion) == list(range(len(lengths)))
    for portion in made:
        assert portion == sorted(portion)
        assert portion
        if len(portion) > 1:
            assert rows is None or len(portion) <= rows
            assert tokens is None or len(portion) * max(lengths[row] for row in portion) <= tokens


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 200))
def test_groups_stay_in_one_portion(sizes, each, tokens):
    """Rows of a group are never parted, whatever the limit."""
    units = [list(range(each * k, each * k + each)) for k in range(len(sizes))]
    lengths = [size for size in sizes for _ in range(each)]
    made = portions(lengths, most_tokens=tokens, units=units)
    for unit in units:
        assert sum(set(unit) <= set(portion) for portion in made) == 1


def test_without_limits_rows_stay_in_their_order():
    """One portion in input order, so that nothing is rounded differently from a plain batch."""
    assert portions([3, 9, 1]) == [[0, 1, 2]]
    assert portions([]) == []


def test_rows_of_like_length_come_together():
    """A long row is not padded for by short ones."""
    assert portions([2, 8, 2, 8], most_tokens=16) == [[1, 3], [0, 2]]
