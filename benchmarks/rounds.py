"""What all benchmarks of this folder share: options, interleaved rounds, figures, and the lines they print.

A figure is one number of one system in one round. A line is what all rounds of one workload and system say together:

``workload``, ``system``, ``unit``
    What was measured, on what, in what.
``median``, ``best``
    Over the rounds. Best is the largest of a rate (a unit per second), else the smallest.
``ratio``
    Median of the ratios to the reference of the same round, most often raw pyzmq; null where there is none.
``limit``
    The same to what this machine can do at best (a bare interpreter, a copy of memory, a pipe); null as above.
``rounds``
    How many rounds there were.
``build``
    Of zbus, beside which or of which this was measured: ``interpreted`` or ``compiled``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

from zbus.build import build

__all__ = ["Figures", "environment", "parser", "printer", "wanted"]

HERE = Path(__file__).resolve().parent


class Figures:
    """Figures by workload and system, in the order in which they first came.

    Args:
        rounds: How many figures make a line; with ``say``.
        say: Given each line as soon as its last figure has come; the rest is given by ``finish``.

    Attributes:
        bases: By workload, what the reference itself was last, and its limit, for systems that come after it.
    """

    def __init__(self, rounds: int = 0, say: Callable[[dict[str, Any]], object] | None = None) -> None:
        self._count = rounds
        self._say = say
        self._said: set[tuple[str, str, str]] = set()
        self.bases: dict[str, tuple[float | None, float | None]] = {}
        self._rows: dict[tuple[str, str, str], list[tuple[float, float | None, float | None]]] = {}

    def add(
        self,
        workload: str,
        system: str,
        unit: str,
        value: float,
        raw: float | None = None,
        limit: float | None = None,
    ) -> None:
        """Take a figure with the reference and the limit of the same round; infinity is an event that never came."""
        if value == raw or workload not in self.bases:
            self.bases[workload] = (raw, limit)
        ratios = [None if base is None else value / base for base in (raw, limit)]
        key = (workload, system, unit)
        row = self._rows.setdefault(key, [])
        row.append((value, ratios[0], ratios[1]))
        if len(row) == self._count and self._say is not None:
            self._said.add(key)
            self._say(_line(key, row))

    def finish(self) -> None:
        """Say the lines of which fewer figures came: of a rival that did not reach its end."""
        for key, row in self._rows.items():
            if key not in self._said and self._say is not None:
                self._said.add(key)
                self._say(_line(key, row))

    def lines(self) -> Iterator[dict[str, Any]]:
        """Give one line for each workload and system."""
        return starmap(_line, self._rows.items())


def _line(key: tuple[str, str, str], row: Sequence[tuple[float, float | None, float | None]]) -> dict[str, Any]:
    workload, system, unit = key
    values = [value for value, _, _ in row]
    return {
        "workload": workload,
        "system": system,
        "median": _short(statistics.median(values)),
        "best": _short((max if unit.endswith("/s") else min)(values)),
        "unit": unit,
        "ratio": _middle(ratio for _, ratio, _ in row),
        "limit": _middle(limit for _, _, limit in row),
        "rounds": len(row),
        "build": build(),
    }


def _middle(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return _short(statistics.median(found)) if found else None


def _short(value: float) -> float | None:
    """Return ``value`` with four digits, more would be noise; None for infinity, which JSON does not know."""
    if not math.isfinite(value):
        return None
    if not value:
        return value
    return round(value, max(0, 3 - math.floor(math.log10(abs(value)))))


def parser(text: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have.

    Args:
        text: The benchmark's own description.
        rounds: How many rounds there are where none are asked for.
    """
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    made.add_argument("--rounds", type=int, default=rounds, help=f"how many rounds [{rounds}]")
    made.add_argument("--only", default="", metavar="NAMES", help="comma-separated workloads or prefixes of them")
    return made


def wanted(only: str) -> Callable[[str], bool]:
    """Return what tells whether a workload was asked for by ``--only``."""
    chosen = [name for name in only.split(",") if name]
    return lambda workload: not chosen or any(workload.startswith(name) for name in chosen)


def printer(*, as_json: bool) -> Callable[[dict[str, Any]], None]:
    """Return what prints one line: as a JSON object, or as a row of a table whose head comes with the first."""
    heads = iter([f"{'workload':<20}{'system':<14}{'median':>11}{'best':>11} {'unit':<8}{'ratio':>8}{'limit':>8}"])

    def say(line: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps(line), flush=True)
            return
        for head in heads:
            print(head)
        median, best = ("never" if line[key] is None else f"{line[key]:.4g}" for key in ("median", "best"))
        ratio, limit = ("" if line[key] is None else f"{line[key]:.2f}" for key in ("ratio", "limit"))
        print(
            f"{line['workload']:<20}{line['system']:<14}{median:>11}{best:>11} {line['unit']:<8}{ratio:>8}{limit:>8}",
            flush=True,
        )

    return say


def environment(cache: str) -> dict[str, str]:
    """Return the environment of measured processes: they import from here, and compile each module once.

    Args:
        cache: Directory of the compiled modules, so that neither the state of the checkout nor a setting of this shell
            (``PYTHONDONTWRITEBYTECODE``) has every process compile what it imports.
    """
    found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join(part for part in (str(HERE), found.get("PYTHONPATH", "")) if part)
    return {**found, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": cache}


if str(HERE) not in sys.path:  # a benchmark that is imported by a test finds its neighbours, too
    sys.path.insert(0, str(HERE))
