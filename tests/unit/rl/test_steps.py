from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbus.errors import ZbusError
from zbus.rl import part
from zbus.rl.steps import merge_reports

FINITE = st.floats(-1e12, 1e12)


@given(st.lists(st.tuples(FINITE, st.integers(1, 1000)), min_size=1, max_size=6), st.randoms())
def test_a_mean_weighs_each_unit_the_same_whoever_counted_it(parts, random):
    """The sum of all sums over the sum of all weights, the same in any order of ranks."""
    reports = {rank: {"loss": part("mean", *one)} for rank, one in enumerate(parts)}
    shuffled = list(reports.items())
    random.shuffle(shuffled)
    found = merge_reports(reports)["loss"]
    assert found == merge_reports(dict(shuffled))["loss"]
    assert found == pytest.approx(math.fsum(v for v, _ in parts) / sum(w for _, w in parts), rel=1e-12)


def test_no_scalar_of_any_head_is_lost():
    """Keys that only some heads report are merged over these and named; every head's own numbers are kept (B57)."""
    found = merge_reports({0: {"a": 1.0, "b": part("max", 3)}, 2: {"b": part("max", 5), "c": part("sum", 7)}})
    assert found == {"a": 1.0, "b": 5.0, "c": 7.0}
    assert found.partial == {"a": (2,), "c": (0,)}
    assert found.heads == {0: {"a": 1.0, "b": 3.0}, 2: {"b": 5.0, "c": 7.0}}


def test_a_part_without_weight_counts_for_nothing():
    """A head without rows reports sums of weight 0; a mean of nothing is not a number."""
    assert merge_reports({0: {"x": part("mean", 6, 3)}, 1: {"x": part("mean", 0, 0)}})["x"] == 2
    assert math.isnan(merge_reports({0: {"x": part("mean", 0, 0)}})["x"])


@pytest.mark.parametrize(
    ("values", "expected"),
    [((math.inf, 1.0), math.inf), ((math.inf, -math.inf), math.nan), ((math.nan, 1.0), math.nan)],
)
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_what_is_not_finite_stays_seen(reduce, values, expected):
    """Infinity and NaN of one head are in the merged number."""
    found = merge_reports({rank: {"x": part(reduce, value)} for rank, value in enumerate(values)})["x"]
    assert found == expected or (math.isnan(found) and math.isnan(expected))


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ({0: {"x": part("sum", 1)}, 1: {"x": part("max", 1)}}, "'x' in different ways: rank 0 as sum, rank 1 as max"),
        ({3: {"x": "high"}}, "rank 3 reports 'x' as 'high'"),
        ({1: [0.5]}, r"rank 1 reports \[0.5\]"),
        ({0: {"x": ["mean", 1.0, -1]}}, "rank 0 reports 'x'"),
    ],
)
def test_reports_that_do_not_fit_are_refused_by_rank_and_key(reports, message):
    """Nothing is guessed: what cannot be merged is an error that names it."""
    with pytest.raises(ZbusError, match=message):
        merge_reports(reports)


def test_a_part_is_declared_right_or_refused():
    """Unknown reductions and negative weights are refused where they are written."""
    with pytest.raises(ValueError, match="median"):
        part("median", 1)
    with pytest.raises(ValueError, match="weight -1"):
        part("mean", 1, -1)
