"""Calls with something to do around them: arguments that hold handles, results that stay here. Most have nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

__all__ = ["Refs", "Special", "SpecialCalls", "with_specials"]


class Refs(Protocol):
    """Values that stay with the process that made them; see ``zbus.data.desk``."""

    def fill(self, value: Any, deadline_ns: int | None) -> Any:
        """Return arguments with values in place of the handles in them; may wait for other processes."""

    def check(self) -> None:
        """Refuse what cannot be kept before it is made."""

    def keep(self, value: Any, session: bytes, claim: int, method: str) -> Any:
        """Keep a result and return its handle."""


class Special(NamedTuple):
    """What is to be done around a call besides running it.

    Attributes:
        fills: Its arguments hold handles.
        claim: Its result is kept here, under this number of its caller's; None: it is sent.
    """

    fills: bool
    claim: int | None


class SpecialCalls(list[Any]):
    """The calls of a request of which some are special, by their number in it."""

    specials: Mapping[int, Special] = MappingProxyType({})


def with_specials(calls: list[Any], *, fills: bool) -> SpecialCalls:
    """Return calls apart from their options, which stand fourth: ``{"keep": number}``.

    Args:
        calls: ``[[method, args, kwargs], …]``, some with options.
        fills: Handles were found among the arguments.

    Raises:
        ValueError: They are no calls.
    """
    made = SpecialCalls()
    specials = {}
    for index, call in enumerate(calls):
        options = call[3] if len(call) == 4 else {}
        if not 3 <= len(call) <= 4 or type(options) is not dict or not options.keys() <= {"keep"}:
            msg = "a request came with calls that are none"
            raise ValueError(msg)
        claim = options.get("keep")
        if claim is not None and (type(claim) is not int or claim < 0):
            msg = "a request came that keeps its result under no number"
            raise ValueError(msg)
        made.append(call[:3])
        specials[index] = Special(fills, claim)
    made.specials = specials
    return made
