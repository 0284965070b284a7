from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from controller.collect import CollectError, collect
from controller.dispatch import Arguments, Plan
from zbus import Everywhere, Split, endpoint
from zbus.engine import EndpointSpec, Reduce
from zbus.errors import ConfigError

NO_CALL = Arguments((), {})


def reduced(how, *values, shares=None, replicas=1):
    """Reduce the answers of ranks 0 and up; ``shares``: how many items each share has."""
    count = len(values)
    ranges = None if shares is None else tuple(range(items) for items in shares)
    heads = tuple(range(0, count, replicas))
    share_of = tuple(number // replicas for number in range(count))
    spread = Plan(tuple(range(count)), (NO_CALL,) * count, ranges, share_of, heads)
    return collect(how, spread, range(count), values, "train")


@pytest.mark.parametrize(("op", "answer"), [("sum", 12), ("mean", 4.0), ("max", 7), ("min", 2)])
def test_numbers_of_all_ranks_become_one(op, answer):
    """Integers stay integers but in a mean."""
    assert reduced(Reduce(op), 3, 7, 2) == answer
    assert type(reduced(Reduce(op), 3, 7, 2)) is type(answer)
    assert reduced(Reduce(op), {"a": {"b": 3}}, {"a": {"b": 7}}, {"a": {"b": 2}}) == {"a": {"b": answer}}
    assert reduced(Reduce(op), np.float32(3), np.float32(7), np.float32(2)) == answer


def test_numbers_are_reduced_exactly_and_rounded_once():
    """What cancels leaves what is left, in whatever order."""
    assert reduced(Reduce("sum"), 1e16, 1.0, -1e16) == 1.0
    assert reduced(Reduce("mean"), 0.1, 0.1, 0.1) == 0.1
    assert reduced(Reduce("sum"), 1 << 80, 1, -(1 << 80)) == 1
    assert reduced(Reduce("sum"), 1e308, 1e308, -1e308) == 1e308
    assert reduced(Reduce("sum"), 1e308, 1e308) == math.inf
    assert reduced(Reduce("sum"), 10**400, -(10**400), 0.5) == 0.5


finite = st.floats(allow_nan=False, allow_infinity=False, width=64)


@given(st.lists(st.tuples(finite, st.integers(0, 1000)), min_size=1, max_size=6))
def test_a_weighted_mean_is_the_rounded_exact_one(answers):
    """Whatever the numbers: the nearest float to the true mean, and the weights summed."""
    values = [{"loss": loss, "tokens": tokens} for loss, tokens in answers]
    total = sum(tokens for _, tokens in answers)
    if not total:
        with pytest.raises(CollectError, match="weights of all ranks are 0"):
            reduced(Reduce("mean", weights="tokens"), *values)
        return
    exact = sum(Fraction(loss) * tokens for loss, tokens in answers) / total
    assert reduced(Reduce("mean", weights="tokens"), *values) == {"loss": float(exact), "tokens": total}


def test_a_rank_without_weight_counts_for_nothing():
    """A loss over no tokens is NaN, and no other rank's loss is."""
    answer = reduced(
        Reduce("mean", weights="n"),
        {"n": 0, "loss": math.nan, "g": np.full(3, np.nan, np.float32)},
        {"n": np.int64(2), "loss": 4.0, "g": np.full(3, 2, np.float32)},
        {"n": torch.tensor(1.0), "loss": 1.0, "g": np.full(3, 5, np.float32)},
    )
    assert (answer["n"], answer["loss"]) == (3, 3.0)
    assert answer["g"].tolist() == [3.0] * 3


def test_items_weigh_uneven_shares():
    """The mean of a batch is that of its items, however they are spread; replicas and idle ranks are left out."""
    how = Reduce("mean", by="items")
    assert reduced(how, 1.0, 5.0, shares=(3, 1)) == 2.0
    assert reduced(how, 1.0, 99.0, 5.0, 99.0, shares=(3, 1), replicas=2) == 2.0
    assert reduced(how, 1.0, None, shares=(3, 0)) == 1.0
    assert reduced(how, 1.0, math.nan, shares=(3, 0)) == 1.0
    assert reduced(Reduce("max"), 1.0, None, shares=(3, 0)) == 1.0
    assert reduced(how, None, None, shares=(0, 0)) is None


def test_nan_is_not_hidden():
    """A maximum over a NaN is NaN, of numbers as of arrays."""
    for op in ("max", "min", "sum", "mean"):
        assert math.isnan(reduced(Reduce(op), 1.0, math.nan, 2.0))
        assert math.isnan(reduced(Reduce(op), np.array([1.0]), np.array([math.nan]))[0])
    assert reduced(Reduce("sum"), 1.0, math.inf) == math.inf
    assert math.isnan(reduced(Reduce("sum"), -math.inf, math.inf))


DTYPES = ["f2", "f4", "f8", "i1", "i4", "i8", "u8", "c8", ">f4"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (200_001,), (0, 4)])
def test_arrays_keep_dtype_and_shape(dtype, shape):
    """Floats are added up in double precision and rounded once; the sum of integers is exact."""
    rng = np.random.default_rng(1)
    parts = [(rng.random(shape) * 9).astype(dtype) for _ in range(3)]
    wide = np.complex128 if "c" in dtype else np.float64
    total = sum(part.astype(wide) for part in parts)
    made = reduced(Reduce("sum"), *parts)
    assert (made.dtype, made.shape) == (np.dtype(dtype), shape)
    assert np.array_equal(made, total.astype(dtype))
    mean = reduced(Reduce("mean"), *parts)
    assert np.array_equal(mean, (total / 3).astype(dtype if np.dtype(dtype).kind in "fc" else np.float64))
    if "c" not in dtype:
        assert np.array_equal(reduced(Reduce("max"), *parts), np.maximum.reduce(parts))
        assert np.array_equal(reduced(Reduce("min"), *parts), np.minimum.reduce(parts))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_are_reduced_like_arrays(kind):
    """Also those of dtypes that numpy lacks."""
    parts = [torch.tensor([[1, 0], [rank % 2, 3]]).to(kind) for rank in range(3)]
    total = sum(part.to(torch.float64) for part in parts)
    made = reduced(Reduce("sum"), *parts)
    assert made.dtype == (torch.int64 if kind is torch.bool else kind)
    assert torch.equal(made, total.to(made.dtype))
    assert torch.equal(reduced(Reduce("max"), *parts), torch.stack(parts).amax(0))
    mean = reduced(Reduce("mean"), *parts)
    assert torch.equal(mean, (total / 3).to(mean.dtype))
    assert reduced(Reduce("sum"), torch.tensor(2.5), torch.tensor(1.0)) == 3.5


@pytest.mark.parametrize("dtype", ["i1", "i4", "i8", "u1", "u8"])
def test_a_sum_that_its_dtype_does_not_hold_is_refused(dtype):
    """Integers never wrap around in silence, and never are refused for what only might have been too much."""
    bounds = np.iinfo(dtype)
    most, least = np.array([bounds.max, 1], dtype), np.array([1, bounds.max], dtype)
    with pytest.raises(CollectError, match="does not fit"):
        reduced(Reduce("sum"), most, least)
    fits = np.array([0, bounds.max - 1], dtype)
    assert reduced(Reduce("sum"), most, fits).tolist() == [bounds.max, bounds.max]
    if bounds.min:
        low = np.array([bounds.min, bounds.min], dtype)
        assert reduced(Reduce("sum"), most, low, least).tolist() == [0, 0]
        with pytest.raises(CollectError, match="does not fit"):
            reduced(Reduce("sum"), low, np.array([0, -1], dtype))
    assert reduced(Reduce("mean"), most, most).tolist() == [float(bounds.max), 1.0]


@pytest.mark.parametrize(
    ("how", "values", "told"),
    [
        (Reduce("sum"), (1, "a"), "different kinds together: rank 0 1, rank 1 'a'"),
        (Reduce("sum"), (1, None), "different kinds"),
        (Reduce("sum"), ([1], [2]), r"no sum of \[1\] \(list\)"),
        (Reduce("max"), ("a", "b"), "no max of"),
        (Reduce("sum"), ({"a": 1}, {"b": 1}), "keys of rank 1 differ"),
        (Reduce("sum"), ({"a": {"b": 1}}, {"a": {"b": "x"}}), r"together in \['a'\]\['b'\]: rank 0 1, rank 1 'x'"),
        (Reduce("sum"), (np.zeros(2), np.zeros(3)), r"rank 0 float64 \(2,\), rank 1 float64 \(3,\)"),
        (Reduce("sum"), (np.zeros(2), np.zeros(2, "f4")), "different dtype or shape"),
        (Reduce("max"), (np.zeros(2, "c8"), np.zeros(2, "c8")), "no max of arrays of complex64"),
        (Reduce("sum"), (np.array(["a"]), np.array(["b"])), "no sum of arrays of <U1"),
        (Reduce("sum"), (torch.zeros(2, dtype=torch.float8_e8m0fnu),) * 2, "no sum of tensors of float8_e8m0fnu"),
        (Reduce("mean", weights="n"), ({"x": 1.0}, {"x": 2.0}), "'n', which rank 0 has not"),
        (Reduce("mean", weights="n"), ({"n": -1}, {"n": 2}), "which rank 0 has not"),
        (Reduce("mean", weights="n"), ({"n": 1}, {"n": math.nan}), "which rank 1 has not"),
        (Reduce("mean", weights="n"), (1.0, 2.0), "which rank 0 has not"),
    ],
)
def test_what_cannot_be_reduced_is_named_and_kept(how, values, told):
    """The message names the endpoint, the rank and the place; every answer is in the error."""
    with pytest.raises(CollectError, match=told) as raised:
        reduced(how, *values)
    assert "endpoint `train`" in str(raised.value)
    assert list(raised.value.results) == [0, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Reduce("median"),
        lambda: Reduce("mean", by="tokens"),
        lambda: Reduce("sum", by="items"),
        lambda: Reduce("max", weights="n"),
        lambda: Reduce("mean", by="items", weights="n"),
        lambda: endpoint(Everywhere(), collect=Reduce("mean", by="items"))(len_of),
    ],
    ids=["op", "by", "items", "weights", "both", "nothing split"],
)
def test_a_declaration_that_makes_no_sense_is_refused_where_it_stands(wrong):
    """Before any call."""
    with pytest.raises(ConfigError):
        wrong()


def len_of(self, batch):
    """Stand in for a method."""


def test_the_declaration_travels():
    """A controller that never imported the engine knows it."""
    spec = EndpointSpec("f", Split(), Reduce("mean", by="items"))
    assert EndpointSpec.from_wire(spec.to_wire()) == spec
