from __future__ import annotations

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("said", "right", "expected"),
    [
        ("K AE T", "K AE T", 0),
        ("", "K AE T", 3),
        ("K AE T", "", 3),
        ("K AE", "K AE T", 1),
        ("S K AE T", "K AE T", 1),
        ("B AE T", "K AE T", 1),
        ("T AE K", "K AE T", 2),
        ("AE T S", "K AE T", 2),
    ],
)
def test_edits_are_the_fewest_that_make_one_the_other(rewards, said, right, expected):
    """Insertions, deletions and replacements count one each."""
    assert rewards.edits(said.split(), right.split()) == expected


def test_edits_are_a_distance(rewards):
    """Symmetric, zero only for equals, and never shorter by way of a third."""
    rng = np.random.default_rng(0)
    words = [[str(s) for s in rng.integers(0, 3, rng.integers(0, 6))] for _ in range(12)]
    edits = rewards.edits
    for a in words:
        for b in words:
            assert edits(a, b) == edits(b, a)
            assert (edits(a, b) == 0) == (a == b)
            assert all(edits(a, c) <= edits(a, b) + edits(b, c) for c in words)


def test_the_reward_falls_with_each_edit_and_never_below_zero(rewards):
    """1 for the right answer, 0 for one that is further away than the answer is long."""
    right = ["K", "AE", "T", "S"]
    assert rewards.score([right, right[:3], ["X"] * 9, []], right) == [(1.0, 1.0), (0.75, 0.0), (0.0, 0.0), (0.0, 0.0)]
