"""What the ranks report of one batch, and how it becomes one set of numbers: exactly, and with no key of any rank lost.

A report is a dict of numbers. Each says how it meets those of other ranks::

    {"loss": part("mean", loss_sum, tokens), "grad_norm": part("max", 0.7), "tokens": part("sum", tokens)}

A bare number is a mean over the ranks that report it, each the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from zbus.errors import ZbusError

__all__ = ["Report", "merge_reports", "part", "plain"]

_REDUCTIONS: Final = ("mean", "sum", "max", "min")


def part(reduce: str, value: float, weight: float = 1) -> list[Any]:
    """Return a rank's part of a number: of a ``mean`` the sum and its weight, else the value.

    Raises:
        ValueError: The reduction is not known, or the weight is no weight.
    """
    if reduce not in _REDUCTIONS:
        msg = f"reduction {reduce!r} is none of {', '.join(_REDUCTIONS)}"
        raise ValueError(msg)
    if not 0 <= weight < math.inf:
        msg = f"weight {weight!r} is not a number from 0 on"
        raise ValueError(msg)
    return [reduce, value, weight]


class Report(dict[str, float]):
    """One number per key, merged over ranks.

    Attributes:
        heads: What each rank reported, by rank; of ranks with the same rows the lowest.
        partial: Keys that some ranks did not report, with those ranks.
    """

    def __init__(
        self, values: Mapping[str, float], heads: Mapping[int, Mapping[str, Any]], partial: Mapping[str, Sequence[int]]
    ) -> None:
        super().__init__(values)
        self.heads = {rank: dict(report) for rank, report in heads.items()}
        self.partial = {key: tuple(ranks) for key, ranks in partial.items()}


def merge_reports(reports: Mapping[int, Any]) -> Report:
    """Merge the reports of ranks, by rank.

    Every key that any rank reports is in the result, over the ranks that report it; ``partial`` names the others. A
    part of weight 0 counts for nothing, unless all are such: then a mean is NaN.

    Raises:
        ZbusError: A report is none, or ranks declare one key differently; it names key and ranks.
    """
    read = {rank: _read(rank, report) for rank, report in reports.items()}
    keys = dict.fromkeys(key for report in read.values() for key in report)
    values, partial = {}, {}
    for key in keys:
        parts = {rank: report[key] for rank, report in read.items() if key in report}
        declared = {reduce for reduce, _, _ in parts.values()}
        if len(declared) > 1:
            told = ", ".join(f"rank {rank} as {reduce}" for rank, (reduce, _, _) in parts.items())
            msg = f"ranks report {key!r} in different ways: {told}"
            raise ZbusError(msg, hint="report a number the same way on every rank")
        values[key] = _merged(declared.pop(), list(parts.values()))
        absent = [rank for rank in read if rank not in parts]
        if absent:
            partial[key] = absent
    return Report(values, {rank: plain(report) for rank, report in reports.items()}, partial)


def plain(report: Mapping[str, Any]) -> dict[str, float]:
    """Return a rank's own numbers: of a mean the quotient."""
    return {
        key: _merged(reduce, [(reduce, value, weight)]) for key, (reduce, value, weight) in _read(0, report).items()
    }


def _read(rank: int, report: Any) -> dict[str, tuple[str, Any, Any]]:
    if not isinstance(report, Mapping):
        msg = f"rank {rank} reports {report!r}, which is no dict of numbers"
        raise ZbusError(msg, hint="return a dict such as {'loss': zbus.rl.part('mean', loss_sum, tokens)}")
    return {str(key): _part(rank, key, value) for key, value in report.items()}


def _part(rank: int, key: Any, value: Any) -> tuple[str, Any, Any]:
    if _is_number(value):
        return ("mean", value, 1)
    if isinstance(value, list | tuple) and len(value) == 3:
        reduce, number, weight = value
        if reduce in _REDUCTIONS and _is_number(number) and _is_number(weight) and 0 <= weight < math.inf:
            return (reduce, number, weight)
    msg = f"rank {rank} reports {key!r} as {value!r}, which is neither a number nor a part of one"
    raise ZbusError(msg, hint="use zbus.rl.part(reduce, value, weight)")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _merged(reduce: str, parts: Sequence[tuple[str, Any, Any]]) -> float:
    numbers = [value for _, value, _ in parts]
    if reduce in ("max", "min"):
        if any(math.isnan(number) for number in numbers):
            return math.nan
        return float(max(numbers) if reduce == "max" else min(numbers))
    if reduce == "sum":
        return _sum(numbers)
    counted = [(value, weight) for _, value, weight in parts if weight]
    if not counted:
        return math.nan
    if not all(map(math.isfinite, (value for value, _ in counted))):
        return math.fsum(value for value, _ in counted if not math.isfinite(value)) if _one_sign(counted) else math.nan
    total = sum((Fraction(value) for value, _ in counted), Fraction(0))
    return float(total / sum((Fraction(weight) for _, weight in counted), Fraction(0)))


def _sum(numbers: Sequence[Any]) -> float:
    if all(isinstance(number, int) for number in numbers):
        return float(sum(numbers))
    if all(map(math.isfinite, numbers)):
        return math.fsum(numbers)
    return math.nan if not _one_sign((number, 1) for number in numbers) else math.fsum(filter(math.isinf, numbers))


def _one_sign(parts: Iterable[tuple[Any, Any]]) -> bool:
    odd = {value for value, _ in parts if not math.isfinite(value)}
    return len(odd) == 1 and not any(math.isnan(value) for value in odd)
