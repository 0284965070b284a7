from __future__ import annotations

import numpy as np
import pytest

from controller.trainers import grpo_batch
from zbus import Ragged
from zbus.errors import ConfigError


def episode(rewards: list[float], first: int = 0) -> dict:
    """Answers to one prompt, each a row with a token of its own."""
    rows = [[7, first + number] for number in range(len(rewards))]
    mask = [[False, True]] * len(rewards)
    return {"input_ids": Ragged.of(rows), "loss_mask": Ragged.of(mask), "reward": np.float32(rewards)}


def test_rows_of_all_episodes_come_with_advantages_among_their_own_episode():
    """An episode of better answers than another's teaches no more than one of worse: each is judged by its own mean."""
    rows = grpo_batch([episode([1, 3]), episode([11, 13], first=2), episode([5, 5, 5], first=4)])
    assert [row[1] for row in rows["input_ids"]] == [0, 1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(rows["advantages"], [-1, 1, -1, 1, 0, 0, 0], atol=1e-5)


def test_what_an_answer_is_worth_is_the_users_to_say():
    """``judge`` reads any columns; an answer that is worth no number is refused."""
    rows = grpo_batch([episode([1, 2, 6])], judge=lambda one: one["reward"] ** 2, scale=False)
    np.testing.assert_allclose(rows["advantages"], np.array([1, 4, 36]) - 41 / 3, rtol=1e-5)
    with pytest.raises(ConfigError, match="reward 1 is nan"):
        grpo_batch([episode([1, float("nan")])])
