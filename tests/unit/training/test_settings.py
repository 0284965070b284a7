from __future__ import annotations

import math

import pytest

from workers.engines.train import TorchTrainEngine
from workers.engines.train.settings import Schedule, Settings
from zbus.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "x"}, "names no factory"),
        ({}, "no model is given"),
        ({"model": "a:b", "learning_rate": 1}, "there is no argument 'learning_rate'"),
        ({"model": "a:b", "parallel": "fsdp"}, "parallel='fsdp'"),
        ({"model": "a:b", "optimizer": {"lr": -1}}, r"optimizer\.lr=-1"),
        ({"model": "a:b", "optimizer": {"rate": 1}}, "optimizer={'rate': 1} is not understood"),
        ({"model": "a:b", "optimizer": {"betas": [0.9]}}, r"optimizer\.betas"),
        ({"model": "a:b", "schedule": {"kind": "step"}}, r"schedule\.kind='step'"),
        ({"model": "a:b", "schedule": {"kind": "linear", "warmup": 5, "steps": 5}}, r"schedule\.steps=5"),
        ({"model": "a:b", "clip": 0}, "clip=0"),
        ({"model": "a:b", "micro_rows": 0}, "micro_rows=0"),
        ({"model": "a:b", "nonfinite": "ignore"}, "nonfinite='ignore'"),
        ({"model": "a:b", "losses": {"mine": 3}}, "losses="),
    ],
)
def test_what_cannot_be_is_refused_before_torch_is_imported(arguments, message):
    """Bad arguments of a training engine are errors that name the argument, when the engine is made."""
    with pytest.raises(ConfigError, match=message) as caught:
        TorchTrainEngine(**arguments)
    assert caught.value.hint


def test_the_rate_rises_stays_and_falls_as_declared():
    """Warm-up, then constant, a line or a half cosine down to the floor, and the floor from there on."""
    assert [Schedule(warmup=3).factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    line = Schedule("linear", warmup=1, steps=5, floor=0.2)
    assert [round(line.factor(step), 12) for step in range(7)] == [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    half = Schedule("cosine", steps=4)
    assert [half.factor(step) for step in (0, 2, 4, 9)] == pytest.approx([1, 0.5, 0, 0])
    assert half.factor(1) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_sections_may_be_plain_dicts():
    """What a YAML file says becomes the same settings."""
    told = Settings.of({"model": "a:b", "optimizer": {"lr": 0.5, "betas": [0.8, 0.9]}, "schedule": {"warmup": 2}})
    assert (told.optimizer.lr, told.optimizer.betas, told.schedule.warmup) == (0.5, (0.8, 0.9), 2)
