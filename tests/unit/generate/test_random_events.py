from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from generate_models import VOCABULARY
from waiting import scaled
from zbus.rl import Completion, Sampling

REQUESTS = 60


class _Reference:
    """What the model answers greedily, computed once per prompt and without a cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._texts: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: list[int], count: int) -> list[int]:
        text = self._texts.setdefault(tuple(prompt), list(prompt))
        with torch.inference_mode():
            while len(text) < len(prompt) + count:
                text.append(int(self._model(torch.tensor([text]))[0, -1].argmax()))
        return text[len(prompt) : len(prompt) + count]


async def _disturb(engine: Any, chance: random.Random, requests: list[asyncio.Task[Completion]]) -> None:
    """Do one thing that may happen to requests."""
    what = chance.choice(["cancel", "cancel", "keep", "reset", "reset", "reset", "wait", "abort", "nothing"])
    if what == "cancel" and requests:
        chance.choice(requests).cancel()
    elif what in ("keep", "reset", "wait", "abort"):
        await asyncio.to_thread(engine.pause, "keep" if what == "reset" else what)
        if what == "reset":
            engine.do_reset_cache()
        await asyncio.sleep(0)
        engine.resume()
    await asyncio.sleep(0)


async def _story(engine: Any, chance: random.Random) -> list[tuple[list[int], int, asyncio.Task[Completion]]]:
    asked = []
    for number in range(REQUESTS):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.choice([1, 2, 3, 5, 8, 20]))]
        limit = chance.choice([1, 2, 5, 17, 40])
        task = asyncio.create_task(engine.generate(prompt, Sampling(max_tokens=limit, temperature=0)))
        asked.append((prompt, limit, task))
        if number == REQUESTS // 3:
            await asyncio.to_thread(engine.abort)
        elif number % 3 == 0:
            await _disturb(engine, chance, [task for *_, task in asked if not task.done()])
    await asyncio.wait([task for *_, task in asked], timeout=scaled(40))
    return asked


@pytest.mark.parametrize("seed", range(4))
def test_no_event_changes_what_a_request_is_answered(engine, seed):
    """Whatever comes, goes, pauses or is computed anew, an answer is the model's, whole or as far as it was let."""
    chance = random.Random(seed)
    one = engine(max_batch=chance.choice([1, 3, 16]), max_tokens_total=chance.choice([60, 200, 5000]), max_prefill=40)
    reference = _Reference(one.model)

    asked = asyncio.run(_story(one, chance))

    ends: dict[str, int] = {}
    for prompt, limit, task in asked:
        assert task.done(), f"{prompt} was never answered"
        if task.cancelled():
            ends["cancelled"] = ends.get("cancelled", 0) + 1
            continue
        answer = task.result()
        ends[answer.finish] = ends.get(answer.finish, 0) + 1
        assert answer.ids.tolist() == reference.answer(prompt, len(answer.ids))
        assert (len(answer.ids) == limit) or answer.finish == "abort"
    assert ends["length"] > REQUESTS // 6, ends
    assert one.do_state() == {"running": 0, "waiting": 0}
