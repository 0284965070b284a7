from __future__ import annotations

import numpy as np
import pytest
import torch

from controller.collect import CollectError, collect, equal
from controller.dispatch import Arguments, Plan
from zbus.engine import Concat, First, PerRank, Same

NO_CALL = Arguments((), {})


def split_plan(*shares, replicas: int = 1) -> Plan:
    """A plan with the given shares, each held by so many members."""
    count = len(shares) * replicas
    share_of = tuple(number for number in range(len(shares)) for _ in range(replicas))
    heads = tuple(range(0, count, replicas))
    return Plan(tuple(range(count)), (NO_CALL,) * count, shares, share_of, heads)


def whole_plan(count: int) -> Plan:
    """A plan without shares."""
    return Plan(tuple(range(count)), (NO_CALL,) * count, heads=tuple(range(count)))


def merged(how, plan: Plan, *values):
    """Collect the values of ranks 0 and up."""
    return collect(how, plan, range(len(values)), values, "train")


def test_per_rank_is_a_list_in_rank_order():
    """Every rank's answer is kept, in rank order."""
    assert merged(PerRank(), whole_plan(3), "a", None, 3) == ["a", None, 3]


def test_first_is_the_lowest_ranks_answer():
    """First takes the lowest rank's."""
    assert merged(First(), whole_plan(2), "a", "b") == "a"


def test_concat_restores_input_order():
    """Answers come back in the order of the input items, whatever rank they were on."""
    plan = split_plan([1, 3], [0, 2])
    assert merged(Concat(), plan, ["b", "d"], ["a", "c"]) == ["a", "b", "c", "d"]
    assert merged(Concat(), plan, ("b", "d"), ("a", "c")) == ("a", "b", "c", "d")
    assert merged(Concat(), plan, np.array([1, 3]), np.array([0, 2])).tolist() == [0, 1, 2, 3]
    tensor = merged(Concat(), plan, torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [2.0]]))
    assert tensor.tolist() == [[0.0], [1.0], [2.0], [3.0]]


def test_concat_joins_columns():
    """A dict of columns is joined column by column."""
    plan = split_plan([1], [0])
    answer = merged(Concat(), plan, {"x": [1], "y": np.array([1.0])}, {"x": [0], "y": np.array([0.0])})
    assert answer["x"] == [0, 1]
    assert answer["y"].tolist() == [0.0, 1.0]


def test_concat_leaves_replicas_out():
    """Ranks that repeat another's share do not double its items."""
    plan = split_plan([0], [1], replicas=2)
    assert merged(Concat(), plan, ["a"], ["replica"], ["b"], ["replica"]) == ["a", "b"]


def test_concat_takes_several_results_per_item():
    """N results for each item stay with their item."""
    plan = split_plan([1], [0, 2])
    assert merged(Concat(), plan, ["b1", "b2"], ["a1", "a2", "c1", "c2"]) == ["a1", "a2", "b1", "b2", "c1", "c2"]


@pytest.mark.parametrize("nothing", [None, [], np.zeros((0,)), {"x": []}])
def test_empty_shares_add_nothing(nothing):
    """A rank without items may answer None or anything empty; shapes of empty arrays do not matter."""
    plan = split_plan([0, 1], [])
    assert merged(Concat(), plan, np.ones((2, 3)), nothing).shape == (2, 3)


def test_all_shares_empty_gives_the_first_answer():
    """No items at all give what the first rank answers to none."""
    assert merged(Concat(), split_plan([], []), [], []) == []


def test_concat_without_shares_keeps_rank_order():
    """Everywhere with Concat joins in rank order."""
    assert merged(Concat(), whole_plan(2), [1], [2]) == [1, 2]


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ((0.5, 0.25), r"cannot join 0.5 \(float\), which holds no items"),
        (({"loss": 0.5}, {"loss": 0.25}), r"cannot join in \['loss'\] 0.5"),
        ((["a"], ("b",)), "different types: rank 0 list, rank 1 tuple"),
        (([1, 2, 3], [4]), "results for items: rank 0 3 for 1, rank 1 1 for 1"),
        (({"x": [1]}, {"y": [1]}), "keys of rank 1 differ from those of rank 0: '[xy]', '[xy]'"),
        ((np.ones((1, 3)), np.ones((1, 2))), r"different shape: rank 0 \(1, 3\), rank 1 \(1, 2\)"),
        ((torch.tensor(1.0), torch.tensor(2.0)), "which holds no items"),
    ],
)
def test_what_cannot_be_joined_is_named_and_kept(values, match):
    """Scalars are never replicated or dropped (B57): the error says why and keeps every answer."""
    with pytest.raises(CollectError, match=match) as caught:
        merged(Concat(), split_plan([0], [1]), *values)
    assert caught.value.results == dict(enumerate(values))
    assert "endpoint `train`" in str(caught.value)


def test_answers_of_a_rank_without_items_are_refused():
    """A rank that got nothing cannot have results."""
    with pytest.raises(CollectError, match="rank 1 got no items but answered"):
        merged(Concat(), split_plan([0], []), ["a"], ["b"])


def test_same_takes_the_agreed_value():
    """All ranks agree, NaN included."""
    value = {"x": [float("nan"), 1], "t": torch.tensor([1.0, float("nan")]), "a": np.array([1, 2])}
    other = {"x": [float("nan"), 1], "t": torch.tensor([1.0, float("nan")]), "a": np.array([1, 2])}
    assert merged(Same(), whole_plan(2), value, other) is value


def test_same_names_the_odd_rank():
    """The rank in the minority is named with its answer."""
    with pytest.raises(CollectError, match="rank 2 answered 3; ranks 0, 1, 3 answered 2"):
        merged(Same(), whole_plan(4), 2, 2, 3, 2)


def test_a_repr_that_raises_does_not_hide_the_error():
    """An answer whose repr fails is shown by its type."""

    class Odd:
        def __repr__(self):
            raise RuntimeError

        def __eq__(self, other):
            return self is other

        __hash__ = None

    with pytest.raises(CollectError, match="<Odd>"):
        merged(Same(), whole_plan(2), Odd(), Odd())


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 1.0),
        ([1], (1,)),
        (np.array([1]), np.array([1.0])),
        (torch.tensor([1]), torch.tensor([2])),
        (np.array([1, 2]), np.array([[1, 2]])),
        ({"a": 1}, {"b": 1}),
        ([1], [1, 2]),
        (torch.ones(2), torch.ones(2, dtype=torch.bfloat16)),
        (np.float32(1), np.float32(2)),
    ],
)
def test_different_answers_are_not_the_same(left, right):
    """Type, shape and content all count."""
    assert not equal(left, right)


@pytest.mark.parametrize(
    "value", [None, "x", 1, float("nan"), [1, (2,)], {"a": {1}}, np.array(["x"]), np.float32(1), torch.bfloat16]
)
def test_a_value_is_the_same_as_itself(value):
    """Equality holds for every kind of value."""
    assert equal(value, value)


def test_low_precision_tensors_compare():
    """bf16 and fp8 tensors can be compared, NaN included."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        tensor = torch.tensor([1.0, float("nan")]).to(dtype)
        assert equal(tensor, tensor.clone())


@pytest.mark.parametrize("shares", [([0, 3, 5], [1, 2, 4]), (range(3), range(3, 6)), (range(6), range(6, 6))])
@pytest.mark.parametrize("each", [1, 2])
def test_joined_arrays_take_the_memory_that_is_given(shares, each):
    """Rows are copied once, to their places in memory of the caller's choice, whatever their order and kind."""
    asked = []

    def empty(shape, dtype):
        asked.append(np.full(shape, 77, dtype))
        return asked[-1]

    rows = np.arange(6 * each * 5, dtype=np.float32).reshape(6 * each, 5)
    parts = [np.concatenate([rows[i * each : (i + 1) * each] for i in share] or [rows[:0]]) for share in shares]
    plan = split_plan(*shares)
    joined = collect(Concat(), plan, range(2), parts, empty=empty)
    assert np.array_equal(joined, rows)
    assert joined is asked[0]
    for kind in (torch.float32, torch.bfloat16, torch.bool):
        tensors = [torch.from_numpy(part).to(kind) for part in parts]
        joined = collect(Concat(), plan, range(2), tensors, empty=empty)
        assert joined.dtype == kind
        assert torch.equal(joined, torch.from_numpy(rows).to(kind))
        assert joined.data_ptr() == asked[-1].ctypes.data


def test_joined_arrays_of_several_dtypes_are_promoted_as_ever():
    """Where there is no one dtype the library decides."""
    plan = split_plan([1], [0])
    joined = collect(Concat(), plan, range(2), [np.zeros(1, np.float32), np.ones(1, np.int64)], empty=np.empty)
    assert (joined.dtype, joined.tolist()) == (np.float64, [1.0, 0.0])
    tensor = collect(Concat(), plan, range(2), [torch.zeros(1), torch.ones(1, dtype=torch.int64)], empty=np.empty)
    assert tensor.tolist() == [1.0, 0.0]
    masked = np.ma.masked_array([1.0], [True])
    assert len(collect(Concat(), plan, range(2), [masked, masked], empty=np.empty)) == 2
