"""How the rows of a rank are cut into portions that go through the model one after the other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["portions"]


def portions(
    lengths: Sequence[int],
    *,
    most_rows: int | None = None,
    most_tokens: int | None = None,
    units: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Cut rows into portions that keep two limits; each row is in one of them.

    A portion is a rectangle: what counts against ``most_tokens`` is its rows times its longest row. To waste little of
    it, rows of like length come together, the longest first; without limits there is one portion in input order. What
    is larger than a limit by itself is a portion of its own.

    Args:
        lengths: Tokens of each row.
        most_rows: Most rows of a portion.
        most_tokens: Most tokens of a portion, padding included.
        units: Rows that stay together, in all each row once; None: every row by itself.

    Returns:
        Row numbers, rising within a portion.
    """
    if not lengths:
        return []
    if most_rows is None and most_tokens is None:
        return [list(range(len(lengths)))]
    free = units if units is not None else [[row] for row in range(len(lengths))]
    longest = [max(lengths[row] for row in unit) for unit in free]
    made: list[list[int]] = []
    width = 0
    for number in sorted(range(len(free)), key=lambda k: (-longest[k], k)):
        unit = free[number]
        rows = len(made[-1]) + len(unit) if made else 0
        over = (most_rows is not None and rows > most_rows) or (most_tokens is not None and rows * width > most_tokens)
        if not made or over:
            made.append([])
            width = longest[number]
        made[-1] += unit
    return [sorted(portion) for portion in made]
