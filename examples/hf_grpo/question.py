"""The episode of ``grpo.yaml``: a question, several answers, each compared with the right one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zbus import Ragged
from zbus.rl import EpisodeEngine, Sampling

__all__ = ["Question", "score"]


class Question:
    """Asks questions in plain text.

    Args:
        model: Directory of the tokenizer.
        samples: Answers per question.
        max_tokens: Of an answer.
    """

    def __init__(self, model: str, samples: int = 8, max_tokens: int = 256) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self.samples = samples
        self.sampling = Sampling(max_tokens=max_tokens)

    async def run_episode(self, engine: EpisodeEngine, data: Mapping[str, str]) -> dict[str, Any] | None:
        """Answer ``data["question"]``; None, a rejection, where all answers are as good: they teach nothing.

        Returns:
            One row per answer: ``input_ids``, ``loss_mask``, ``logprobs`` as ``Ragged``, ``reward`` float32.
        """
        asked = self.tokenizer.encode(data["question"])
        answers = await engine.samples(asked, self.samples, self.sampling)
        texts = [self.tokenizer.decode(answer.ids, skip_special_tokens=True) for answer in answers]
        rewards = np.float32(await engine.reward("score", texts, data["answer"]))
        if rewards.min() == rewards.max():
            return None
        rows = [np.concatenate([asked, answer.ids]) for answer in answers]
        return {
            "input_ids": Ragged.of(rows),
            "loss_mask": Ragged.of([np.arange(len(row)) >= len(asked) for row in rows]),
            "logprobs": Ragged.of([np.pad(answer.logprobs, (len(asked), 0)) for answer in answers]),
            "reward": rewards,
        }


def score(texts: Sequence[str], right: str) -> list[float]:
    """Return 1 for each text that begins with the right answer, else the share of its letters that come in order."""
    return [1.0 if text.strip().startswith(right) else 0.5 * _in_order(text, right) for text in texts]


def _in_order(text: str, right: str) -> float:
    found = 0
    for letter in text:
        if found < len(right) and letter == right[found]:
            found += 1
    return found / max(1, len(right))
