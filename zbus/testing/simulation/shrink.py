"""Make a failing run small: fewer faults, fewer requests, fewer workers, as long as the same rule breaks.

A schedule is one long draw, so leaving a fault out makes all that follows another run. Therefore each smaller set of
knobs is tried under a handful of seeds, and the first that breaks the rule is taken on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from zbus.testing.simulation.knobs import MS, Knobs
from zbus.testing.simulation.ledger import Violation
from zbus.testing.simulation.runner import STORY_LINES, Failure, tell_failure
from zbus.testing.simulation.world import World

__all__ = ["Shrunk", "shrink"]

_SEEDS: Final = 24
_LEAST: Final[dict[str, Any]] = {
    "workers": 1, "requests": 1, "span": 30 * MS, "delay": MS, "run": 5 * MS, "lanes": ("main",), "window_calls": 64,
    "window_bytes": 1 << 30, "callee_window": 64, "group": 1.0,
    "trace_period": 40 * MS, "trace_blocks": 2, "trace_backlog": 1 << 20, "trace_pace": MS // 2,
}  # fmt: skip
"""Plainest value of the knobs whose plainest value is not nothing."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A small run that breaks the rule.

    Attributes:
        failure: It, with its story.
        knobs: What it is made of.
        runs: How many runs it took to find.
    """

    failure: Failure
    knobs: Knobs
    runs: int

    def __str__(self) -> str:
        on = {f.name: getattr(self.knobs, f.name) for f in fields(self.knobs)}
        told = ", ".join(f"{name}={value}" for name, value in on.items() if value != _plain(name, value))
        return f"{self.failure}\nleft after {self.runs} runs: {told}"


def shrink(seed: int, size: str = "small", *, limit: int = 5_000, lines: int = STORY_LINES) -> Shrunk | None:
    """Return a small run that breaks the same rule as a seed, or None if that seed holds.

    Args:
        seed: The failing one.
        size: Its size.
        limit: Most runs to spend.
        lines: Length of the story.
    """
    world = World(seed, size, defaultdict(int))
    rule = _rule(world)
    if not rule:
        return None
    knobs, found, runs = world.knobs, seed, 1
    simpler = True
    while simpler:
        simpler = False
        for smaller in _smaller(knobs):
            for candidate in range(seed, seed + _SEEDS):
                runs += 1
                if _rule(World(candidate, size, defaultdict(int), knobs=smaller)) == rule:
                    knobs, found, simpler = smaller, candidate, True
                    break
            if simpler or runs >= limit:
                break
        simpler = simpler and runs < limit
    smallest = None if knobs is world.knobs else knobs
    failure = tell_failure(
        found, f"shrunk from {seed} {size}", lambda story: World(found, size, defaultdict(int), story, smallest),
        lines=lines,
    )  # fmt: skip
    return Shrunk(failure, knobs, runs)


def _rule(world: World) -> str:
    try:
        world.run()
    except Violation as error:
        return error.rule
    except Exception as error:  # noqa: BLE001  # whatever a machine raises is a failure
        return type(error).__name__
    return ""


def _plain(name: str, value: Any) -> Any:
    return _LEAST[name] if name in _LEAST else type(value)(0)


def _smaller(knobs: Knobs) -> Iterator[Knobs]:
    """Yield simpler knobs: one at its plainest, or half of what is counted."""
    for field in fields(knobs):
        value = getattr(knobs, field.name)
        plain = _plain(field.name, value)
        if value == plain:
            continue
        yield replace(knobs, **{field.name: plain})
        if isinstance(value, int) and not isinstance(value, bool) and abs(value - plain) > 1:
            yield replace(knobs, **{field.name: (value + plain) // 2})
