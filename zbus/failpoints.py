"""Fail-points: named places where a test makes this very process fail, so that rare ends can be had at will.

``ZBUS_FAILPOINTS=after_exec=kill@3,before_reply=sleep:0.5`` kills a worker at the third call that has just been
executed, and delays every answer by half a second. Off unless the variable is set: each place costs one look at
``active``.

====================== ===============================================================================================
point                  where
====================== ===============================================================================================
``before_exec``        a call is about to start, and nothing says so yet
``after_start``        the journal says that it started; its method is not called yet
``before_end``         its method returned; the journal does not say so yet
``after_exec``         the journal says that it ended; its reply is not encoded yet
``before_reply``       its reply is encoded and not sent (any lane but ``ctl``)
``after_reply``        its reply was handed to the transport (any lane but ``ctl``)
``before_link``        a registry record is written and not claimed yet
``before_rename``      a registry record is written and not yet in place
====================== ===============================================================================================

Actions: ``kill`` (SIGKILL to this process), ``exit[:code]`` (at once, no clean-up; 70), ``sleep:seconds``, ``raise``
(``FailPointError``). ``@n`` acts at the n-th pass alone, from 1; without it at every pass.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Final

from zbus.errors import ConfigError

__all__ = ["ACTIONS", "POINTS", "VARIABLE", "FailPointError", "active", "configure"]

VARIABLE: Final = "ZBUS_FAILPOINTS"

POINTS: Final = frozenset(
    {
        "before_exec",
        "after_start",
        "before_end",
        "after_exec",
        "before_reply",
        "after_reply",
        "before_link",
        "before_rename",
    }
)
"""Every place there is."""

ACTIONS: Final = ("exit", "kill", "raise", "sleep")

_EXIT_CODE: Final = 70

active: Callable[[str], None] | None = None
"""Called with the name of each point that is passed; None, as nearly always, when there are none."""


class FailPointError(RuntimeError):
    """Raised by the action ``raise``."""


def configure(text: str | None) -> None:
    """Set the fail-points of this process, in place of all earlier ones. Any thread.

    Args:
        text: As ``ZBUS_FAILPOINTS`` has it; None or empty for none.

    Raises:
        ConfigError: The text is not of that form, or names an unknown point or action.
    """
    global active  # noqa: PLW0603  # one process, one set of fail-points
    points: dict[str, _Point] = {}
    for part in (text or "").split(","):
        if part.strip():
            name, at, action = _parse(part.strip())
            points.setdefault(name, _Point(name)).traps.append((at, action))

    def passed(name: str) -> None:
        point = points.get(name)
        if point is not None:
            point.passed()

    active = passed if points else None


class _Point:
    """One place, its actions and how often it was passed."""

    def __init__(self, name: str) -> None:
        self.traps: list[tuple[int | None, Callable[[str], None]]] = []
        self._name = name
        self._passes = itertools.count(1)  # next() of it is atomic: several threads may pass

    def passed(self) -> None:
        number = next(self._passes)
        for at, action in self.traps:
            if at is None or number == at:
                action(self._name)


def _parse(part: str) -> tuple[str, int | None, Callable[[str], None]]:
    name, _, rest = part.partition("=")
    wanted, _, count = rest.partition("@")
    word, _, value = wanted.partition(":")
    try:
        if name not in POINTS:
            msg = f"there is no fail-point {name!r}"
            raise ValueError(msg)
        at = int(count) if count else None
        if at is not None and at < 1:
            msg = "passes are counted from 1"
            raise ValueError(msg)
        return name, at, _action(word, value)
    except ValueError as error:
        msg = f"{VARIABLE}: {part!r} is not a fail-point: {error}"
        hint = f"write point=action@n; points: {', '.join(sorted(POINTS))}; actions: {', '.join(ACTIONS)}"
        raise ConfigError(msg, hint=hint) from error


def _action(word: str, value: str) -> Callable[[str], None]:
    if word == "kill":
        return lambda _: os.kill(os.getpid(), signal.SIGKILL)
    if word == "exit":
        code = int(value) if value else _EXIT_CODE
        return lambda _: os._exit(code)
    if word == "sleep":
        seconds = float(value)
        return lambda _: time.sleep(seconds)
    if word == "raise":
        return _raise
    msg = f"there is no action {word!r}"
    raise ValueError(msg)


def _raise(name: str) -> None:
    msg = f"fail-point {name}"
    raise FailPointError(msg)
