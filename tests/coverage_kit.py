"""Which faults and states a simulation must have met, so that its promises were really tried."""

from __future__ import annotations

from collections import Counter
from typing import Any

__all__ = ["must_have_happened"]


def must_have_happened(wanted: str, least: int, *reports: Any, prefix: str = "") -> None:
    """Check that each name of ``wanted`` (lines of names between middle dots) is covered by so many runs at least."""
    covered: Counter[str] = Counter()
    for report in reports:
        covered.update(report.coverage())
    names = [name.strip() for line in wanted.strip().splitlines() for name in line.split(" · ")]
    rare = {name: covered[prefix + name] for name in names if covered[prefix + name] < least}
    assert not rare, f"too rare to prove anything: {rare}"
