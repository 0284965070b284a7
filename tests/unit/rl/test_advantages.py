from __future__ import annotations

import numpy as np
import pytest

from zbus.errors import ConfigError
from zbus.rl.advantages import group_advantages


def test_each_answer_is_judged_against_its_own_group():
    """An advantage is the reward less the group's mean over its standard deviation, wherever the group's rows stand."""
    rewards = [1.0, 10.0, 3.0, 10.0, 5.0, 16.0]
    found = group_advantages(rewards, ["a", "b", "a", "b", "a", "b"], epsilon=0.0)
    spread = np.sqrt(8 / 3)
    np.testing.assert_allclose(found[[0, 2, 4]], np.array([-2, 0, 2]) / spread, rtol=1e-6)
    np.testing.assert_allclose(found[[1, 3, 5]], np.array([-2, -2, 4]) / np.sqrt(8), rtol=1e-6)
    np.testing.assert_array_equal(
        group_advantages(rewards, 3),
        group_advantages(rewards, np.repeat([7, 9], 3)),
        "groups of a size are consecutive",
    )
    np.testing.assert_allclose(group_advantages(rewards, 2, scale=False), [-4.5, 4.5, -3.5, 3.5, -5.5, 5.5])


def test_a_group_that_is_all_alike_teaches_nothing():
    """Equal rewards, or a group of one, give advantages of exactly 0 and no NaN."""
    np.testing.assert_array_equal(group_advantages([0.3] * 3 + [2.0], [0, 0, 0, 1]), np.zeros(4, np.float32))
    assert group_advantages([], 4).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        ([1.0, 2.0, 3.0], 2, "3 rewards do not make groups of 2"),
        ([1.0, 2.0], 0, "groups of 0"),
        ([1.0, 2.0], [0], r"2 rewards, but groups have shape \(1,\)"),
        ([[1.0], [2.0]], 1, r"shape \(2, 1\)"),
        ([1.0, float("nan")], 2, "reward 1 is nan"),
        ([float("inf"), 1.0], 2, "reward 0 is inf"),
    ],
)
def test_what_cannot_be_grouped_is_refused_by_name(rewards, groups, message):
    """Wrong group sizes, shapes, and rewards that are no numbers are errors that say which."""
    with pytest.raises(ConfigError, match=message):
        group_advantages(rewards, groups)
