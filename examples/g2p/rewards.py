"""How good an answer is: edits between what was said and what the dictionary says. Plain functions, no torch."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["edits", "exact", "reward", "score"]


def edits(said: Sequence[str], right: Sequence[str]) -> int:
    """Return the least number of insertions, deletions and replacements that make ``said`` into ``right``."""
    row = list(range(len(right) + 1))
    for i, sound in enumerate(said, start=1):
        diagonal, row[0] = row[0], i
        for j, wanted in enumerate(right, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (sound != wanted))
    return row[-1]


def reward(said: Sequence[str], right: Sequence[str]) -> float:
    """Return 1 for the right phonemes, less for each edit, 0 where as many edits are needed as there are phonemes."""
    return max(0.0, 1 - edits(said, right) / len(right))


def exact(said: Sequence[str], right: Sequence[str]) -> float:
    """Return 1 for exactly the right phonemes, else 0."""
    return float(list(said) == list(right))


def score(answers: Sequence[Sequence[str]], right: Sequence[str]) -> list[tuple[float, float]]:
    """Return ``(reward, exact)`` of each answer to one word."""
    return [(reward(said, right), exact(said, right)) for said in answers]
