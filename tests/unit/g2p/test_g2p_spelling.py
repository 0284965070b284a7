from __future__ import annotations

import asyncio

import numpy as np
import pytest

from zbus.rl import Completion


class Scripted:
    """An engine that gives scripted answers and calls rewards in place."""

    version = 3

    def __init__(self, answers, rewards) -> None:
        self.answers = answers
        self.rewards = rewards
        self.asked: list[tuple[list[int], int]] = []

    async def samples(self, prompt, count, sampling=None):
        self.asked.append((list(prompt), count))
        return [
            Completion(np.array(ids, np.int64), np.arange(1, len(ids) + 1, dtype=np.float32) / -10, "stop")
            for ids in self.answers
        ]

    async def reward(self, name, *args, timeout_s=None):
        return getattr(self.rewards, name)(*args)


def test_each_answer_becomes_a_row_that_learns_from_its_answer_alone(data, rewards):
    """Rows are question and answer; mask and log-probabilities stand where the model answered; scores are per row."""
    from spelling import Spelling

    right = data.encode("CAT", ["K", "AE", "T"])
    question = data.prompt("CAT")
    engine = Scripted([right[4:], right[4:6], []], rewards)
    rows = asyncio.run(Spelling(samples=3).run_episode(engine, {"word": "CAT", "phonemes": ["K", "AE", "T"]}))
    assert engine.asked == [(question, 3)]
    assert [row.tolist() for row in rows["input_ids"]] == [right, right[:6], question]
    assert [row.sum() for row in rows["loss_mask"]] == [4, 2, 0]
    assert not any(row[: len(question)].any() for row in rows["loss_mask"])
    np.testing.assert_allclose(rows["logprobs"][0], [0, 0, 0, 0, -0.1, -0.2, -0.3, -0.4])
    np.testing.assert_allclose(rows["reward"], [1, 2 / 3, 0], rtol=1e-6)
    assert rows["exact"].tolist() == [1, 0, 0]
    assert rows["ended"].tolist() == [True, False, False]


def test_supervised_batches_learn_the_answer_and_its_end(data, words):
    """The mask is true from the first phoneme to EOS and false on letters, SEP and padding."""
    batch = data.supervised(words[0].take(slice(0, 50)))
    for tokens, mask, length in zip(batch["input_ids"], batch["loss_mask"], batch["lengths"], strict=True):
        asked = tokens.tolist().index(data.SEP) + 1
        assert mask.tolist() == [asked <= place < length for place in range(len(tokens))]
        assert tokens[length - 1] == data.EOS


def test_a_word_is_asked_as_it_is_trained(data, words):
    """What is asked is the row up to the answer, so generation sees what training showed."""
    for row in range(20):
        tokens = words[0].tokens[row].tolist()
        asked = data.prompt(words[0].spellings[row])
        assert tokens[: len(asked)] == asked
        assert data.encode(words[0].spellings[row], words[0].phonemes(row)) == tokens[: words[0].lengths[row]]


@pytest.fixture(autouse=True)
def _numpy_quiet():
    """Nothing here may warn of its numbers."""
    with np.errstate(all="raise"):
        yield
