from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller import Controller, Role
from launching import HERE, launch
from waiting import scaled

pytest.importorskip("torch", reason="generation is on torch: install zbus-runtime[torch]")

from zbus.rl import Completion, Sampling, VersionSpan

pytestmark = [pytest.mark.alone, pytest.mark.timeout(scaled(120))]

GREEDY = Sampling(max_tokens=8, temperature=0)


def rollout(**kwargs: Any) -> Role:
    """Return a role of one rank that generates with a small model."""
    kwargs = {"model": "generate_models.py:Cached", "dtype": "float64", **kwargs}
    return Role("workers.engines.generate:TorchRolloutEngine", replicas=1, kwargs=kwargs, sys_path=[str(HERE)])


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """Give a bus with one rollout worker."""
    root: Path = tmp_path_factory.mktemp("generate")
    with launch(root, {"rollout": rollout()}) as bus:
        yield bus


def test_answers_come_through_the_bus_as_completions(bus: Controller):
    """A call gives tokens, log-probabilities, the reason of the end and the versions; many at once give the same."""
    group = bus.group("rollout")
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]

    alone = [group.generate(prompt, GREEDY) for prompt in prompts]
    calls = [group.generate.submit(prompt, GREEDY) for prompt in prompts * 10]
    together = [call.result() for call in calls]

    assert all(isinstance(answer, Completion) for answer in alone)
    assert alone[0].finish == "length"
    assert alone[0].versions == (VersionSpan(0, 0, 8),)
    assert alone[0].ids.dtype == np.int64
    assert alone[0].logprobs.dtype == np.float32
    for place, answer in enumerate(together):
        assert answer.ids.tolist() == alone[place % 3].ids.tolist()
        np.testing.assert_allclose(answer.logprobs, alone[place % 3].logprobs, atol=1e-6)


def test_a_stream_gives_each_token_as_it_is_made(bus: Controller):
    """The items of a stream are the tokens and log-probabilities of the answer."""
    group = bus.group("rollout")
    whole = group.generate([1, 2, 3], GREEDY)

    streamed = list(group.generate_stream.stream([1, 2, 3], GREEDY))

    assert [token for token, _ in streamed] == whole.ids.tolist()
    assert [logprob for _, logprob in streamed] == pytest.approx(whole.logprobs.tolist(), abs=1e-6)
