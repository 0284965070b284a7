from __future__ import annotations

import pytest

from controller.trainers import grpo
from zbus.errors import ConfigError


def test_prompts_that_end_too_early_are_said_with_the_step(made):
    """An iterator cannot be iterated anew: no step is taken on nothing."""
    steps = grpo(None, made(batch_size=2), None, iter([]), workflow="spell", first=3, steps=5)
    with pytest.raises(ConfigError, match="ended before step 3 of 5"):
        next(steps)
