"""Charts of what a run measured of itself: the numbers of ``metrics.jsonl`` over the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from traceview.page import text
from traceview.problems import Problems

__all__ = ["FILE", "Curve", "chart", "charts", "read_metrics"]

FILE: Final = "metrics.jsonl"
"""Name of the file in a trial directory: one object per line, with ``step`` and numbers by name."""

_MAX_LINE: Final = 1 << 20
_MAX_NAMES: Final = 48
_MAX_POINTS: Final = 400
_decoder: Final = msgspec.json.Decoder()

Curve = list[tuple[float, float]]


def read_metrics(path: Path, problems: Problems) -> dict[str, Curve]:
    """Return (step, value) points by name, ascending in step.

    A step that was written again (a resumed run) counts with its last value. Damaged lines are skipped and counted;
    a file that is not there holds nothing.
    """
    found: dict[str, dict[float, float]] = {}
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return {}
    with file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), start=1):
            values = _values(line)
            if values is None:
                problems.add("ZT0107", "bad_metrics_line", f"{path.name}:{number} is not an object with a step")
                continue
            step = values.pop("step")
            for name, value in values.items():
                found.setdefault(name, {})[step] = value
    return {name: sorted(points.items()) for name, points in found.items()}


def _values(line: bytes) -> dict[str, float] | None:
    """Return the finite numbers of a line by name, ``step`` among them, or None."""
    try:
        data: Any = _decoder.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(data, Mapping):
        return None
    numbers = {
        name: float(value)
        for name, value in data.items()
        if name != "wall_time"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e300
        and math.isfinite(value)
    }
    return numbers if "step" in numbers else None


def charts(curves: Mapping[str, Curve]) -> str:
    """Return all curves that have more than one point as small charts side by side, in the order of their names."""
    many = [(name, points) for name, points in sorted(curves.items()) if len(points) > 1]
    if not many:
        return ""
    shown = "".join(f"<figure>{chart(name, points)}</figure>" for name, points in many[:_MAX_NAMES])
    rest = f'<p class="more">… {len(many) - _MAX_NAMES} more in {FILE}</p>' if len(many) > _MAX_NAMES else ""
    return f'<div class="charts">{shown}</div>{rest}'


def chart(name: str, points: Sequence[tuple[float, float]]) -> str:
    """Return one curve as SVG; a point of the line is the mean of as many neighbours as there is no room for."""
    drawn = _thinned(points)
    xs, ys = [x for x, _ in drawn], [y for _, y in drawn]
    low, high = min(ys), max(ys)
    if low == high:
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    first, last = xs[0], max(xs[-1], xs[0] + 1e-9)

    def place(x: float, y: float) -> str:
        return f"{40 + (x - first) / (last - first) * 352:.1f},{112 - (y - low) / (high - low) * 92:.1f}"

    line = " ".join(place(x, y) for x, y in drawn)
    latest = points[-1][1]
    return (
        f'<svg viewBox="0 0 400 132" role="img"><title>{text(name)}: {latest:.4g} at step {points[-1][0]:g}</title>'
        f'<text x="40" y="12" font-weight="600">{text(name, 40)}</text>'
        f'<text x="392" y="12" text-anchor="end">{latest:.4g}</text>'
        '<line x1="40" y1="112.5" x2="392" y2="112.5" stroke="#e3e7ee"/>'
        f'<polyline points="{line}" fill="none" stroke="#4c78a8" stroke-width="1.5" stroke-linejoin="round"/>'
        f'<text x="36" y="24" text-anchor="end">{high:.3g}</text>'
        f'<text x="36" y="112" text-anchor="end">{low:.3g}</text>'
        f'<text x="40" y="127">{first:g}</text><text x="392" y="127" text-anchor="end">step {last:g}</text></svg>'
    )


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    size = -(-len(points) // _MAX_POINTS)
    groups = (points[at : at + size] for at in range(0, len(points), size))
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
