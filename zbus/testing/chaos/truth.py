"""The ground truth: a file to which workers append a line at each start and end of a method, by one write."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Run", "TruthFile", "running_on", "runs_of"]

_START: Final = "S"
_END: Final = "E"
_RAISED: Final = "X"
_WORDS: Final = 5
_TAIL_BYTES: Final = 4096


class TruthFile:
    """The writing side. One per process; any thread may write, a line is one ``write`` to an O_APPEND descriptor."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def start(self, call: str, rank: int, start: int) -> None:
        """Note that the method of a call begins."""
        self._write(_START, call, rank, start)

    def end(self, call: str, rank: int, start: int, *, raised: bool = False) -> None:
        """Note that it returned, or raised."""
        self._write(_RAISED if raised else _END, call, rank, start)

    def _write(self, mark: str, call: str, rank: int, start: int) -> None:
        os.write(self._fd, f"{mark} {call} {rank} {start} {time.monotonic_ns()}\n".encode())


class Run(NamedTuple):
    """One execution of a call.

    Attributes:
        call: Its id.
        rank, start: Which incarnation ran it.
        place: Its place among all starts of the file.
        ended: Whether it came to its end.
        raised: Whether that end was an exception.
    """

    call: str
    rank: int
    start: int
    place: int
    ended: bool
    raised: bool


def runs_of(path: Path) -> dict[str, list[Run]]:
    """Read the file: all executions by call id, in the order of their starts.

    A call that starts twice in one incarnation gives two runs; their ends are given to them in order.
    """
    opened: dict[tuple[str, int, int], list[Run]] = defaultdict(list)
    ended: dict[tuple[str, int, int], int] = defaultdict(int)
    for mark, key, place in _lines(path):
        runs = opened[key]
        if mark == _START:
            runs.append(Run(*key, place, ended=False, raised=False))
            continue
        number = ended[key]
        ended[key] += 1
        if number >= len(runs):
            msg = f"{path}: an end without a start: {key}"
            raise ValueError(msg)
        runs[number] = runs[number]._replace(ended=True, raised=mark == _RAISED)
    found: dict[str, list[Run]] = defaultdict(list)
    for runs in opened.values():
        found[runs[0].call] += runs
    for runs in found.values():
        runs.sort(key=lambda run: run.place)
    return dict(found)


def running_on(path: Path, rank: int) -> str:
    """Return the id of the call that began last on a rank and runs just now, or empty, by the end of the file."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = [line.split() for line in file.read().decode("ascii").splitlines()[1:]]
    mine = [words for words in lines if len(words) == _WORDS and words[2] == str(rank)]
    return mine[-1][1] if mine and mine[-1][0] == _START else ""


def _lines(path: Path) -> Iterator[tuple[str, tuple[str, int, int], int]]:
    with path.open(encoding="ascii") as file:
        for place, line in enumerate(file):
            mark, call, rank, start, _ = line.split()
            yield mark, (call, int(rank), int(start)), place
