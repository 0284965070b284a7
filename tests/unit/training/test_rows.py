from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="rows become tensors: install zbus-runtime[torch]")

from workers.engines.train.outputs import PerRow, joined  # noqa: E402  # after torch is known to be there
from workers.engines.train.rows import Rows  # noqa: E402
from zbus import Ragged  # noqa: E402
from zbus.errors import ConfigError  # noqa: E402

CPU = torch.device("cpu")
IDS = [[5, 6, 7], [8], [9, 10]]
RAGGED = {"input_ids": Ragged.of([np.array(one, np.uint8) for one in IDS]), "reward": np.float32([1, 2, 3])}
PADDED = {"tokens": np.array([[5, 6, 7, 0], [8, 0, 0, 0], [9, 10, 0, 0]]), "lengths": np.array([3, 1, 2])}
MASKED = {"tokens": PADDED["tokens"], "attention_mask": np.arange(4) < PADDED["lengths"][:, None]}


@pytest.mark.parametrize("batch", [RAGGED, PADDED, MASKED])
def test_rows_are_tensors_as_long_as_the_longest_of_them(batch):
    """Whatever says how long rows are, a portion is cut to its longest, integers are int64, and lengths are told."""
    rows = Rows(batch)
    assert (rows.count, rows.lengths) == (3, [3, 1, 2])
    found = rows.tensors([1, 2], CPU)
    tokens = found.get("input_ids", found.get("tokens"))
    assert tokens.tolist() == [[8, 0], [9, 10]]
    assert tokens.dtype == torch.int64
    assert found["lengths"].tolist() == [1, 2]
    assert found["attention_mask"].tolist() == [[True, False], [True, True]]


def test_what_says_no_lengths_is_taken_whole():
    """Padded tokens alone are full rows: no mask is made up."""
    rows = Rows({"tokens": PADDED["tokens"]})
    assert rows.lengths == [4, 4, 4]
    assert "attention_mask" not in rows.tensors([0], CPU)


def test_columns_of_any_kind_come_along():
    """Floats and booleans keep their dtype, tensors stay tensors, lists lists, read-only arrays are copied."""
    locked = np.arange(3.0)
    locked.flags.writeable = False
    rows = Rows(
        {**RAGGED, "a": locked, "b": torch.ones(3, 2, dtype=torch.bfloat16), "c": list("xyz"), "d": np.eye(3) > 0}
    )
    found = rows.tensors([2, 0], CPU)
    assert (found["a"].tolist(), found["a"].dtype) == ([2, 0], torch.float64)
    assert (tuple(found["b"].shape), found["b"].dtype) == ((2, 2), torch.bfloat16)
    assert found["c"] == ["z", "x"]
    assert found["d"].dtype == torch.bool
    found["a"][0] = 7
    assert locked[2] == 2


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "an empty dict"),
        ([1, 2], "not a list"),
        ({"a": np.zeros(2), "b": np.zeros(3)}, "`a` has 2, `b` has 3"),
        ({"a": np.zeros(2), "beta": 0.5}, "column `beta` of a batch is a float"),
    ],
)
def test_what_is_no_batch_is_refused_by_column(batch, message):
    """The error names the columns that do not fit."""
    with pytest.raises(ConfigError, match=message):
        Rows(batch)


def test_rows_that_only_fill_up_are_left_out():
    """Rows without row_mask are gone for losses, and there for outputs that are cut off elsewhere."""
    batch = {**RAGGED, "row_mask": np.array([True, False, True])}
    assert Rows(batch).lengths == [3, 2]
    assert Rows(batch).tensors([1], CPU)["reward"].tolist() == [3]
    assert Rows(batch, filled=True).count == 3


def test_rows_stay_together_by_number_or_by_a_column():
    """Groups are consecutive rows or rows of equal value; what does not divide is refused."""
    six = Rows({"tokens": np.zeros((6, 5)), "prompt": np.array([1, 2, 1, 3, 2, 3])})
    assert six.portions(None, 10, 2) == [[0, 1], [2, 3], [4, 5]]
    assert six.portions(None, 10, "prompt") == [[0, 2], [1, 4], [3, 5]]
    with pytest.raises(ConfigError, match="each 4 rows stay together, but this rank has 6"):
        six.portions(None, 10, 4)
    with pytest.raises(ConfigError, match="'word', which is no column"):
        six.portions(None, 10, "word")


def test_outputs_of_portions_are_put_in_the_order_of_the_rows():
    """Values per token come as the tokens came; per row as an array; of a dict each of them."""
    portions = [[0, 2], [1]]
    per_token = [(which, Rows(RAGGED).tensors(which, CPU)["input_ids"] * 2.0) for which in portions]
    assert [one.tolist() for one in joined(Rows(RAGGED), per_token, "x")] == [[10, 12, 14], [16], [18, 20]]
    assert joined(Rows(PADDED), per_token, "x").tolist() == [[10, 12, 14, 0], [16, 0, 0, 0], [18, 20, 0, 0]]
    rewards = [(which, torch.tensor([float(row) for row in which])) for which in portions]
    assert joined(Rows(RAGGED), rewards, "x").tolist() == [0, 1, 2]
    vectors = [(which, {"v": PerRow(torch.ones(len(which), 3, dtype=torch.bfloat16))}) for which in portions]
    assert joined(Rows(RAGGED), vectors, "x")["v"].shape == (3, 3)
    with pytest.raises(TypeError, match=r"output 'x' is of shape \(2, 9\) for 2 rows of at most 3 tokens"):
        joined(Rows(RAGGED), [([0, 2], torch.ones(2, 9))], "x")
    with pytest.raises(TypeError, match="output 'x' is a float"):
        joined(Rows(RAGGED), [([0], 0.5)], "x")
