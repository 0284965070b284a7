from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.collect import collect, equal
from controller.dispatch import Arguments, balanced, plan
from zbus.engine import Concat, EndpointSpec, Mesh, Split
from zbus.ragged import Ragged

AXES = ("pp", "dp", "tp")
meshes = st.dictionaries(st.sampled_from(AXES), st.integers(1, 4), min_size=1).map(Mesh)


@st.composite
def splits(draw):
    """A mesh, a split over one of its axes, and items with groups and token counts."""
    mesh = draw(meshes)
    axis = draw(st.sampled_from(list(mesh.axes)))
    group = draw(st.integers(1, 3))
    total = draw(st.integers(0, 12)) * group
    lengths = draw(st.lists(st.integers(0, 50), min_size=total, max_size=total))
    ids = draw(st.lists(st.integers(0, 4), min_size=total, max_size=total))
    groups = draw(st.sampled_from([None, group, "ids"]))
    split = Split(axis, by=draw(st.sampled_from(["count", "tokens"])), groups=groups)
    ranks = draw(st.sets(st.integers(0, mesh.size - 1), min_size=1).map(sorted))
    return mesh, split, ranks, lengths, ids, draw(st.sampled_from([None, np.empty]))


@settings(deadline=None, max_examples=400)
@given(splits())
def test_split_then_concat_is_the_identity(case):
    """Whatever the sizes, mesh, slice, groups and balancing: answers come back one per item, in input order."""
    mesh, split, ranks, lengths, ids, _ = case
    spec = EndpointSpec("f", split, Concat())
    cuts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = Ragged(np.arange(cuts[-1]), cuts)
    tensors = Ragged(torch.arange(int(cuts[-1])), cuts)
    batch = {"lengths": lengths, "ids": ids, "n": np.arange(len(lengths)), "whole": 7, "t": tokens, "tt": tensors}
    empty = case[-1]
    spread = plan(spec, mesh, ranks, Arguments((batch,), {}), empty=empty)
    parts = [arguments.args[0] for arguments in spread.arguments]
    items = Counter(int(n) for head in spread.heads for n in parts[head]["n"])
    assert items == Counter(range(len(lengths)))
    assert all(part["whole"] == 7 for part in parts)
    columns = {"lengths", "ids", "n", "t", "tt"}
    assert all(len(part["t"]) == len(part["n"]) for part in parts)
    assert all(
        one.tolist() == list(range(cuts[n], cuts[n + 1])) for p in parts for n, one in zip(p["n"], p["t"], strict=True)
    )
    answers = [{key: value for key, value in part.items() if key in columns} for part in parts]
    joined = collect(Concat(), spread, ranks, answers, empty=empty)
    assert joined["lengths"] == lengths
    assert joined["ids"] == ids
    assert joined["n"].tolist() == list(range(len(lengths)))
    if lengths:
        assert equal(joined["t"], tokens)
        assert equal(joined["tt"], tensors)


@settings(deadline=None, max_examples=200)
@given(splits())
def test_groups_are_never_parted_and_replicas_agree(case):
    """Items of one group share a rank; ranks at one position of the axis get the same object."""
    mesh, split, ranks, lengths, ids, _ = case
    spread = plan(EndpointSpec("f", split), mesh, ranks, Arguments(({"lengths": lengths, "ids": ids},), {}))
    home = {item: number for number, share in enumerate(spread.shares) for item in share}
    if split.groups == "ids":
        assert all(home[i] == home[j] for i in home for j in home if ids[i] == ids[j])
    elif isinstance(split.groups, int):
        assert all(home[i] == home[i - i % split.groups] for i in home)
    by_position = {}
    for rank, arguments in zip(ranks, spread.arguments, strict=True):
        position = mesh.coords(rank)[split.axis]
        assert by_position.setdefault(position, arguments) is arguments


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 8))
def test_balance_is_within_a_third_of_the_best(weights, count):
    """The heaviest share is at most 4/3 of what any assignment could reach, and no share is starved."""
    shares = balanced(weights, count)
    assert sorted(item for share in shares for item in share) == list(range(len(weights)))
    assert len(weights) < count or all(shares)
    floor = max(max(weights, default=0), sum(weights) / count)
    assert max(sum(weights[i] for i in share) for share in shares) <= 4 / 3 * floor + max(weights, default=0) / 3 + 1
