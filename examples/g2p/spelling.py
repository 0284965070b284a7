"""The episode: a word is spelled to the model, which answers several times; each answer is scored and becomes a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from data import EOS, MAX_PHONEMES, decode, prompt
from zbus import Ragged
from zbus.rl import EpisodeEngine, Sampling

__all__ = ["Spelling"]


class Spelling:
    """Reads words aloud.

    Args:
        samples: Answers per word; their advantages are taken among each other.
        temperature: Of the answers.
    """

    def __init__(self, samples: int = 8, temperature: float = 1.0) -> None:
        self.samples = samples
        self.sampling = Sampling(max_tokens=MAX_PHONEMES + 1, temperature=temperature)

    async def run_episode(self, engine: EpisodeEngine, data: Mapping[str, Any]) -> dict[str, Any]:
        """Answer ``data["word"]`` and compare with ``data["phonemes"]``.

        Returns:
            A batch with one row per answer: ``input_ids``, ``loss_mask`` (true where the model answered) and
            ``logprobs`` as ``Ragged``; ``reward`` (1: right, less per edit) and ``exact`` float32.
        """
        question = prompt(data["word"])
        answers = await engine.samples(question, data.get("samples", self.samples), self.sampling)
        said = [decode(answer.ids.tolist()) for answer in answers]
        scores = await engine.reward("score", said, data["phonemes"])
        asked = len(question)
        nothing = np.zeros(asked, np.float32)  # is known of what was asked
        return {
            "input_ids": Ragged.of([np.concatenate([question, answer.ids]).astype(np.uint8) for answer in answers]),
            "loss_mask": Ragged.of([np.arange(asked + len(answer.ids)) >= asked for answer in answers]),
            "logprobs": Ragged.of([np.concatenate([nothing, answer.logprobs]) for answer in answers]),
            "reward": np.float32([reward for reward, _ in scores]),
            "exact": np.float32([exact for _, exact in scores]),
            "ended": np.array([bool(len(answer.ids)) and int(answer.ids[-1]) == EOS for answer in answers]),
        }
