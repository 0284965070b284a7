from __future__ import annotations

import numpy as np
import pytest

from controller.trajectories import FILL, as_batch, fill_up, per_item
from zbus import Ragged
from zbus.codec import Ref
from zbus.errors import ConfigError


def test_trajectories_become_columns():
    """Sequences become Ragged, numbers arrays, the rest lists; dtypes of arrays stay."""
    items = [
        {"input_ids": np.array([1, 2, 3], np.int32), "mask": [0, 1, 1], "reward": 0.5, "word": "cat", "n": 3},
        {"input_ids": np.array([4], np.int32), "mask": [1], "reward": np.float32(2), "word": "a", "n": 1},
    ]
    columns, listed = as_batch(items)
    assert listed
    assert columns["input_ids"].values.dtype == np.int32
    assert [row.tolist() for row in columns["input_ids"]] == [[1, 2, 3], [4]]
    assert [row.tolist() for row in columns["mask"]] == [[0, 1, 1], [1]]
    assert (columns["reward"].dtype, columns["reward"].tolist()) == (np.float32, [0.5, 2.0])
    assert columns["n"].tolist() == [3, 1]
    assert columns["word"] == ["cat", "a"]


def test_tokens_alone_are_a_batch():
    """A single array, tensor or Ragged is the column of tokens, not an AttributeError (B57)."""
    rows = np.zeros((2, 3), np.int64)
    assert as_batch(rows).columns["input_ids"] is rows
    ragged = Ragged.of([[1], [2, 3]])
    assert as_batch(ragged).columns["input_ids"] is ragged


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "without columns"),
        ([], "without trajectories"),
        ([{}], "without keys"),
        ([{"a": 1}, {"b": 1}], "trajectory 1 of the batch and the first .* keys: a, b"),
        ([{"a": 1}, [2]], "trajectory 1 of the batch is a list"),
        ([{"a": 1}, {"a": [1]}], "`a` is a number in the first trajectory, but a sequence in trajectory 1"),
        ("text", "not str"),
        (np.float32(3), "not float32"),
    ],
)
def test_what_holds_no_rows_is_refused_by_name(given, message):
    """The error names the trajectory and the key."""
    with pytest.raises(ConfigError, match=message):
        as_batch(given)


def test_a_handle_stays_where_its_rows_are():
    """A Ref goes through: its owner's rows are split by its owner's counts."""
    ref = Ref.__new__(Ref)
    assert as_batch(ref) == (ref, False)


def test_rows_that_fill_up_stand_last_and_count_nothing():
    """Filled rows repeat the first ones with empty masks, row_mask tells them apart; the batch stays as it was."""
    mask = np.ones((5, 2), bool)
    columns = {
        "ids": Ragged.of([[k] for k in range(5)]),
        "loss_mask": mask,
        "m_mask": Ragged.of([[1]] * 5),
        "w": list("abcde"),
    }
    filled, real = fill_up(columns, 3, None)
    assert real == 5
    assert [row.tolist() for row in filled["ids"]] == [[0], [1], [2], [3], [4], [0]]
    assert filled["loss_mask"].sum() == 10
    assert filled["m_mask"].values.tolist() == [1, 1, 1, 1, 1, 0]
    assert filled["w"][5] == "a"
    assert filled[FILL].tolist() == [True] * 5 + [False]
    assert mask.all()


def test_pairs_are_filled_up_by_pairs():
    """With groups of two, whole pairs are added."""
    filled, real = fill_up({"ids": np.arange(6)}, 2, 2)
    assert (len(filled["ids"]), real) == (8, 6)
    assert filled["ids"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert fill_up({"ids": np.arange(8)}, 2, 2)[0]["ids"].tolist() == list(range(8))


def test_answers_come_back_one_per_item():
    """Columns of answers become an answer per trajectory."""
    answer = {"logprobs": Ragged.of([[1.0], [2.0, 3.0]]), "value": np.array([5, 6])}
    first, second = per_item(answer, 2)
    assert (first["logprobs"].tolist(), first["value"]) == ([1.0], 5)
    assert second["logprobs"].tolist() == [2.0, 3.0]
