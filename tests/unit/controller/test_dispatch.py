from __future__ import annotations

import ast
import inspect
from typing import NamedTuple

import numpy as np
import pytest
import torch

import controller.dispatch
from controller.collect import equal
from controller.dispatch import Arguments, DispatchError, Plan, balanced, consecutive, plan
from zbus.engine import AnyOne, EndpointSpec, Everywhere, Mesh, Parameter, RankZero, Scatter, Split, Whole
from zbus.ragged import Ragged

TRAIN = (Parameter("batch"), Parameter("step", required=False))


def spread(dispatch, *args, mesh=None, ranks=None, parameters=TRAIN, choose=lambda: 0, **kwargs) -> Plan:
    """Apply a dispatch over a mesh (default dp=2)."""
    shape = Mesh(mesh or {"dp": 2})
    spec = EndpointSpec("train", dispatch, parameters=parameters)
    return plan(spec, shape, ranks if ranks is not None else range(shape.size), Arguments(args, kwargs), choose=choose)


def shares(found: Plan):
    """The first argument each member gets."""
    return [arguments.args[0] for arguments in found.arguments]


# -- everywhere, one rank, scatter -----------------------------------------------------------------------------------


def test_everywhere_gives_all_ranks_the_same_object():
    """One argument list serves every rank, so it is encoded once."""
    found = spread(Everywhere(), [1], mesh={"dp": 3})
    assert found.members == (0, 1, 2)
    assert len({id(arguments) for arguments in found.arguments}) == 1


def test_rank_zero_is_the_lowest_of_the_slice():
    """RankZero on a slice calls its lowest rank."""
    assert spread(RankZero(), [1], mesh={"dp": 4}, ranks=[2, 3]).members == (0,)


def test_any_one_asks_for_a_rank_only_then():
    """The choice of a rank is made for AnyOne alone."""
    assert spread(AnyOne(), 1, choose=lambda: 1).members == (1,)
    spread(Everywhere(), 1, choose=lambda: pytest.fail("nobody asked"))


def test_scatter_gives_each_rank_its_item():
    """Rank i gets item i of every list; the rest goes to all."""
    found = spread(Scatter(), ["a", "b"], 7)
    assert [a.args for a in found.arguments] == [("a", 7), ("b", 7)]


def test_scatter_needs_one_item_per_rank():
    """Too many or too few items are an error that names the argument, never a truncation."""
    with pytest.raises(DispatchError, match="one item to each of 2 ranks, but `batch` has 3"):
        spread(Scatter(), [1, 2, 3])
    with pytest.raises(DispatchError, match="no argument is a list"):
        spread(Scatter(), 1)


# -- what is split ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        list(range(10)),
        tuple(range(10)),
        np.arange(10),
        torch.arange(10),
        [[i] * i for i in range(10)],
        [{"x": i} for i in range(10)],
        np.arange(20).reshape(10, 2),
    ],
)
def test_every_kind_of_sequence_is_split(batch):
    """Lists, tuples, arrays, tensors and ragged lists: 10 over 3 is 4, 3, 3, in order and of the same type."""
    found = spread(Split("dp"), batch, mesh={"dp": 3})
    parts = shares(found)
    assert [len(part) for part in parts] == [4, 3, 3]
    assert {type(part) for part in parts} == {type(batch)}
    assert equal(parts[2], batch[7:10])


def test_columns_of_a_dict_are_split_and_its_scalars_are_not():
    """A dict of columns is a batch; scalars, text and None in it go to every rank."""
    batch = {"ids": np.arange(4), "mask": torch.ones(4, 2), "tags": list("abcd"), "lr": 0.1, "name": "x", "none": None}
    first, second = shares(spread(Split("dp"), batch))
    assert first["ids"].tolist() == [0, 1]
    assert second["tags"] == ["c", "d"]
    assert first["mask"].shape == (2, 2)
    assert (second["lr"], second["name"], second["none"]) == (0.1, "x", None)


def test_scalars_text_and_none_go_to_every_rank():
    """What holds no items is never split, whatever its name."""
    found = spread(Split("dp"), [1, 2], 5)
    assert [a.args[1] for a in found.arguments] == [5, 5]
    named = spread(Split("dp"), [1, 2], step="text")
    assert [a.kwargs for a in named.arguments] == [{"step": "text"}] * 2


def test_a_keyword_called_group_size_reaches_the_engine():
    """The bus eats no keyword of the user's (B57)."""
    parameters = (Parameter("batch"), Parameter("group_size", "key"))
    found = spread(Split("dp"), [1, 2], parameters=parameters, group_size=4)
    assert [a.kwargs for a in found.arguments] == [{"group_size": 4}] * 2


def test_a_single_tensor_is_split():
    """A lone tensor is a batch like any other (B57: it was an AttributeError)."""
    assert [part.tolist() for part in shares(spread(Split("dp"), torch.arange(3)))] == [[0, 1], [2]]


def test_a_named_tuple_is_a_record():
    """A named tuple is not a list of items."""

    class Pair(NamedTuple):
        a: int
        b: int

    found = spread(Split("dp"), [1, 2], Pair(1, 2))
    assert [a.args[1] for a in found.arguments] == [Pair(1, 2)] * 2


def test_a_scalar_array_is_not_split():
    """A zero-dimensional array has no items."""
    found = spread(Split("dp"), [1, 2], np.float32(3))
    assert [a.args[1] for a in found.arguments] == [3.0, 3.0]


def test_whole_opts_an_argument_out():
    """What is wrapped in Whole goes to every rank, unwrapped."""
    found = spread(Split("dp"), [1, 2], Whole([7, 8, 9]))
    assert [a.args[1] for a in found.arguments] == [[7, 8, 9]] * 2


def test_args_name_what_is_split():
    """With args, only the named arguments are split."""
    found = spread(Split("dp", args=("batch",)), [1, 2], [7, 8, 9])
    assert [a.args for a in found.arguments] == [([1], [7, 8, 9]), ([2], [7, 8, 9])]
    by_keyword = spread(Split("dp", args=("batch",)), batch=[1, 2], step=[7, 8, 9])
    assert [a.kwargs["batch"] for a in by_keyword.arguments] == [[1], [2]]


def test_arguments_of_different_length_are_named():
    """A longer or shorter second argument is an error that names both lengths (B57: truncated or IndexError)."""
    with pytest.raises(DispatchError, match=r"`batch` has 3, `step` has 4") as caught:
        spread(Split("dp"), [1, 2, 3], [1, 2, 3, 4])
    assert "zbus.Whole" in caught.value.hint
    with pytest.raises(DispatchError, match=r"`batch\['x'\]` has 2, `batch\['y'\]` has 1"):
        spread(Split("dp"), {"x": [1, 2], "y": [1]})


def test_nothing_to_split_is_an_error():
    """A Split call without any items is not silently sent everywhere."""
    with pytest.raises(DispatchError, match="none of them holds items"):
        spread(Split("dp"), 5)
    with pytest.raises(DispatchError, match="splits `batch`, but int holds no items"):
        spread(Split("dp", args=("batch",)), 5)
    with pytest.raises(DispatchError, match="the call gives none of them"):
        spread(Split("dp", args=("batch",)), Whole([1]))


def test_the_signature_is_checked_before_anything_is_sent():
    """A wrong argument list is a TypeError at the caller, named after the endpoint."""
    with pytest.raises(TypeError, match=r"train\(\) missing a required argument: 'batch'"):
        spread(Everywhere())
    with pytest.raises(TypeError, match=r"train\(\) got an unexpected keyword argument 'bach'"):
        spread(Everywhere(), [1], bach=[1])
    with pytest.raises(TypeError, match=r"train\(\) too many positional arguments"):
        spread(Everywhere(), 1, 2, 3)


# -- axes ------------------------------------------------------------------------------------------------------------


def test_ranks_of_other_axes_get_the_same_share():
    """Splitting over dp gives all tp ranks of one dp position the same object."""
    found = spread(Split("dp"), list(range(4)), mesh={"dp": 2, "tp": 2})
    assert shares(found) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert found.arguments[0] is found.arguments[1]
    assert found.heads == (0, 2)
    inner = spread(Split("tp"), list(range(4)), mesh={"dp": 2, "tp": 2})
    assert shares(inner) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert inner.heads == (0, 1)


def test_a_slice_splits_over_the_positions_it_holds():
    """Only positions with a member in the slice get a share."""
    found = spread(Split("dp"), list(range(6)), mesh={"dp": 4, "tp": 2}, ranks=[2, 3, 6])
    assert shares(found) == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]


def test_an_unknown_axis_names_the_real_ones():
    """A mesh without the declared axis is an error that lists its axes."""
    with pytest.raises(DispatchError, match="axis 'dp', which the mesh does not have") as caught:
        spread(Split("dp"), [1], mesh={"tp": 2})
    assert "tp" in caught.value.hint


def test_fewer_items_than_ranks_leave_empty_shares():
    """2 items over 3 positions: one rank gets an empty part of the same type (B57: it was a ValueError)."""
    assert shares(spread(Split("dp"), [1, 2], mesh={"dp": 3})) == [[1], [2], []]
    last = shares(spread(Split("dp"), np.ones((2, 5), np.float16), mesh={"dp": 3}))[2]
    assert (last.shape, last.dtype) == ((0, 5), np.float16)
    tokens = shares(spread(Split("dp", by="tokens"), [torch.ones(2)], mesh={"dp": 2}))
    assert [len(part) for part in tokens] == [1, 0]


def test_consecutive_items_of_arrays_are_not_copied():
    """Splitting by count gives views of the caller's array."""
    batch = np.arange(10)
    assert all(np.shares_memory(part, batch) for part in shares(spread(Split("dp"), batch)))


# -- sequences ------------------------------------------------------------------------------------------------------


def test_sequences_are_split_whole():
    """By number or by tokens, which are their entries; consecutive ones are views."""
    ragged = Ragged(np.arange(10), [0, 6, 7, 8, 10])
    halves = [part.args[0] for part in spread(Split("dp"), ragged, mesh={"dp": 2}).arguments]
    assert [part.lengths.tolist() for part in halves] == [[6, 1], [1, 2]]
    assert np.shares_memory(halves[0].values, ragged.values)
    found = spread(Split("dp", by="tokens"), {"input_ids": ragged}, mesh={"dp": 2})
    assert [list(share) for share in found.shares] == [[0], [1, 2, 3]]
    found = spread(Split("dp", by="tokens", groups=2), ragged, mesh={"dp": 2})
    assert [list(share) for share in found.shares] == [[0, 1], [2, 3]]
    with pytest.raises(DispatchError, match="holds sequences, not one value per item"):
        spread(Split("dp", groups="ids"), {"ids": ragged}, mesh={"dp": 2})


def test_scattered_items_are_gathered_where_they_are_sent_from():
    """What balancing re-orders is copied once, to memory that is given for it."""
    given = []

    def empty(shape, dtype):
        given.append(np.empty(shape, dtype))
        return given[-1]

    batch = {"n": np.arange(4), "t": Ragged(np.arange(10), [0, 6, 7, 8, 10]), "objects": np.array([1, "a", None, 2.0])}
    spec = EndpointSpec("f", Split("dp", by="tokens", tokens="cost"))
    call = Arguments(({**batch, "cost": [9, 8, 1, 1]},), {})
    found = plan(spec, Mesh({"dp": 2}), [0, 1], call, empty=empty)
    assert [list(share) for share in found.shares] == [[0, 3], [1, 2]]
    parts = [arguments.args[0] for arguments in found.arguments]
    for share, part in zip(found.shares, parts, strict=True):
        assert part["n"].tolist() == list(share)
        assert [one.tolist() for one in part["t"]] == [batch["t"][n].tolist() for n in share]
    assert parts[0]["n"] is given[0]
    assert np.shares_memory(parts[1]["n"], batch["n"])


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_are_balanced_by_length():
    """Without a column, the length of each item counts."""
    batch = [[0] * n for n in (8, 1, 1, 1, 1, 4)]
    found = spread(Split("dp", by="tokens"), batch)
    assert sorted(sum(map(len, part)) for part in shares(found)) == [8, 8]
    assert [len(share) for share in found.shares] == [1, 5]


def test_an_attention_mask_counts_before_lengths():
    """The mask's ones are the tokens, padding is not."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]])
    found = spread(Split("dp", by="tokens"), {"input_ids": torch.zeros(4, 4), "attention_mask": mask})
    assert [sorted(share) for share in found.shares] == [[0], [1, 2, 3]]


@pytest.mark.parametrize(
    "batch",
    [
        {"x": [0, 0, 0], "lengths": [5, 1, 4]},
        {"x": [0, 0, 0], "lengths": np.array([5, 1, 4])},
        [{"input_ids": [0] * 5}, {"input_ids": [0]}, {"input_ids": [0] * 4}],
        [{"attention_mask": np.ones(5)}, {"attention_mask": np.ones(1)}, {"attention_mask": np.ones(4)}],
    ],
)
def test_token_counts_are_found_in_columns_and_items(batch):
    """lengths, masks and ids are found as columns of a dict and as entries of items."""
    assert [list(share) for share in spread(Split("dp", by="tokens"), batch).shares] == [[0], [1, 2]]


def test_the_token_column_can_be_named():
    """A named column overrides what would be found."""
    batch = {"cost": [1, 9, 1], "lengths": [9, 1, 1]}
    assert [list(s) for s in spread(Split("dp", by="tokens", tokens="cost"), batch).shares] == [[1], [0, 2]]
    with pytest.raises(DispatchError, match="balances by `weight`, which the call does not have"):
        spread(Split("dp", by="tokens", tokens="weight"), batch)


def test_items_without_length_are_explained():
    """Items whose tokens cannot be counted are an error with the way out."""
    with pytest.raises(DispatchError, match="has no length") as caught:
        spread(Split("dp", by="tokens"), [object(), object()])
    assert "lengths" in caught.value.hint


def test_no_share_is_empty_while_there_are_items_enough():
    """Balancing never starves a rank, even when all items are without tokens."""
    assert all(balanced([0.0] * 4, 4))
    assert all(balanced([100.0, 1.0, 1.0, 1.0], 4))


# -- groups ----------------------------------------------------------------------------------------------------------


def test_pairs_stay_together():
    """groups=2 never parts items 2k and 2k+1."""
    found = spread(Split("dp", groups=2), list(range(6)))
    assert shares(found) == [[0, 1, 2, 3], [4, 5]]
    by_tokens = spread(Split("dp", by="tokens", groups=2), [[0] * n for n in (9, 9, 1, 1, 1, 1)])
    assert [list(share) for share in by_tokens.shares] == [[0, 1], [2, 3, 4, 5]]


def test_named_groups_stay_together_wherever_they_are():
    """Items with one group value share a rank, also when they are not neighbours."""
    batch = {"prompt": np.array([7, 8, 7, 9]), "x": list("abcd")}
    found = spread(Split("dp", groups="prompt"), batch)
    where = {int(p): number for number, share in enumerate(found.shares) for p in batch["prompt"][list(share)]}
    assert set(where) == {7, 8, 9}
    assert sorted(item for share in found.shares for item in share) == [0, 1, 2, 3]
    assert any({0, 2} <= set(share) for share in found.shares)


def test_items_that_do_not_divide_into_groups_are_refused():
    """5 items cannot be pairs."""
    with pytest.raises(DispatchError, match="keeps each 2 items together, but 5 items"):
        spread(Split("dp", groups=2), list(range(5)))
    with pytest.raises(DispatchError, match="together by `prompt`, which the call does not have"):
        spread(Split("dp", groups="prompt"), [1, 2])


def test_consecutive_runs_differ_by_at_most_one():
    """10 over 3 is 4, 3, 3; 0 over 2 is 0, 0."""
    assert [len(r) for r in consecutive(10, 3)] == [4, 3, 3]
    assert [len(r) for r in consecutive(0, 2)] == [0, 0]


def test_dispatch_is_pure():
    """Dispatch reads no clock, thread, socket or randomness and imports no array library."""
    tree = ast.parse(inspect.getsource(controller.dispatch))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {"zmq", "time", "random", "threading", "os", "asyncio", "numpy", "torch"}
