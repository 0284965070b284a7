"""Where the engine of a rank is, read from the text of a dump of its stacks; and many such places, folded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from controller.console import shown

__all__ = ["IDLE", "fold", "place_of"]

_MOST_FRAMES: Final = 4

IDLE: Final = "no code of the engine: it waits in the bus, or in a coroutine"

_HEAD: Final = re.compile(r"^(?:Stack |(?:Current thread|Thread) 0x[0-9a-f]+ .*)\(most recent call first\):$")
_FRAME: Final = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_HERE: Final = Path(__file__).resolve().parent.parent
_OWN: Final = re.compile(
    rf"^(({re.escape(str(_HERE))}|.*/site-packages)/)?(zbus|workers|controller)/|^<frozen |/runpy\.py$"
)
_RUNNERS: Final = ("/zbus/runtime/executor.py", "/zbus/runtime/async_lanes.py")
"""What calls an endpoint."""

_PACKAGED: Final = re.compile(r"/(site|dist)-packages/")
_STDLIB: Final = re.compile(r"/lib(64)?/python3\.\d+/")

Place = tuple[str, int, str]
"""File, line and function of a frame."""


def place_of(text: str) -> str:
    """Return in a line where a rank's engine is, from the text of one dump; empty where it shows no thread.

    The thread that runs an endpoint is told, else the main thread. Frames of zbus are left out, those of libraries are
    named only where the engine waits in one: ``engines.py:33 in reduce (in distributed_c10d.py:2501 in all_reduce)``.
    """
    threads = _threads(text)
    if not threads:
        return ""
    # The interpreter lists the main thread last.
    best = max(enumerate(threads), key=lambda item: (_serves(item[1]), bool(_engine(item[1])), item[0]))[1]
    engine = _engine(_served(best)) if _serves(best) else _own_code(best)
    if not engine:
        return IDLE
    innermost, *callers = engine[:_MOST_FRAMES]
    words = " < ".join([_words(innermost), *map(_short, callers)])
    return words if best[0] == innermost else f"{words} (in {_short(best[0])})"


def _threads(text: str) -> list[list[Place]]:
    threads: list[list[Place]] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append((match["file"], int(match["line"]), match["name"]))
    return [frames for frames in threads if frames]


def _serves(frames: Sequence[Place]) -> bool:
    return bool(_engine(_served(frames)))


def _served(frames: Sequence[Place]) -> list[Place]:
    """Return the frames that an endpoint has begun: those within the executor's; none where the thread runs none."""
    within = list(itertools.takewhile(lambda frame: not frame[0].endswith(_RUNNERS), frames))
    return within if len(within) < len(frames) else []


def _engine(frames: Sequence[Place]) -> list[Place]:
    """Return the frames of the user's code; where all is installed, those of the packages."""
    return _own_code(frames) or [f for f in frames if _PACKAGED.search(f[0]) and not _OWN.search(f[0])]


def _own_code(frames: Sequence[Place]) -> list[Place]:
    foreign = [frame for frame in frames if not _OWN.search(frame[0])]
    return [frame for frame in foreign if not _PACKAGED.search(frame[0]) and not _STDLIB.search(frame[0])]


def _words(frame: Place) -> str:
    file, line, name = frame
    return f"{shown(file) if file.startswith('/') else file}:{line} in {name}"


def _short(frame: Place) -> str:
    file, line, name = frame
    return f"{file.rpartition('/')[2]}:{line} in {name}"


def fold(places: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Return ranks by place, the place with most ranks first."""
    found: dict[str, list[int]] = {}
    for rank in sorted(places):
        found.setdefault(places[rank], []).append(rank)
    return sorted(((ranks, place) for place, ranks in found.items()), key=lambda item: (-len(item[0]), item[0]))
