from __future__ import annotations

import numpy as np
import pytest

from zbus import Ragged
from zbus.errors import ConfigError
from zbus.rl.batches import concat


def test_rows_stand_behind_one_another_whatever_the_column_is():
    """Arrays, Ragged and lists are joined by rows in the order of the batches, empty batches included."""
    one = {"ids": Ragged.of([[1, 2], [3]]), "reward": np.float32([0.5, 1.0]), "word": ["a", "b"]}
    none = {"ids": Ragged(np.empty(0, np.int64), [0]), "reward": np.empty(0, np.float32), "word": []}
    two = {"word": ["c"], "reward": np.float32([0.25]), "ids": Ragged.of([[4, 5, 6]])}
    found = concat([one, none, two])
    assert [row.tolist() for row in found["ids"]] == [[1, 2], [3], [4, 5, 6]]
    assert found["reward"].dtype == np.float32
    assert found["reward"].tolist() == [0.5, 1.0, 0.25]
    assert found["word"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no batch"),
        ([{"a": np.zeros(1)}, {"b": np.zeros(1)}], "batch 1 .* columns: a, b"),
        ([{"a": np.zeros(1)}, {"a": [0]}], "column 'a' of batch 1 is a list, of the first one a ndarray"),
        ([{"a": Ragged.of([[1]])}, {"a": np.zeros(1)}], "column 'a' of batch 1 is a ndarray"),
        ([{"a": np.zeros((1, 2))}, {"a": np.zeros((1, 3))}], r"column 'a' cannot be joined: \(1, 2\), \(1, 3\)"),
    ],
)
def test_batches_that_do_not_fit_are_refused_by_column(batches, message):
    """Different columns, kinds or widths are errors that name them; nothing is padded or dropped in silence."""
    with pytest.raises(ConfigError, match=message):
        concat(batches)
