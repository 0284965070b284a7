"""The engine of the soak: every method says in the ground-truth file that it began and that it ended."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import numpy as np

import zbus
from zbus import AnyOne, Everywhere, PerRank
from zbus.testing.chaos.truth import TruthFile

__all__ = ["GEN_CONCURRENCY", "Payload", "Subject", "SubjectError", "sum_of"]

GEN_CONCURRENCY: Final = 8
"""How many calls of the ``gen`` lane run at once in a worker."""

_KEPT: Final = 6
"""How many arrays a worker keeps, to see that nobody writes to them."""


class SubjectError(ValueError):
    """What a method raises when it is told to."""


Payload = bytes | np.ndarray[Any, Any]


def sum_of(payload: Payload) -> int:
    """Return what a method answers for a payload, to prove that both came whole."""
    return zlib.crc32(payload if isinstance(payload, bytes) else payload.data)


class Subject(zbus.Engine):
    """Methods of each effect, lane and shape; every one takes the id of its call first.

    Args:
        truth: Path of the ground-truth file.
    """

    def __init__(self, truth: str) -> None:
        self._truth = TruthFile(truth)
        self._rank = self._start = 0
        self._kept: deque[tuple[Payload, int]] = deque()

    def setup(self, ctx: zbus.Context) -> None:
        """Learn who we are."""
        self._rank, self._start = ctx.rank, ctx.start

    def _run(self, call: str, seconds: float, payload: Payload, *, fail: bool = False) -> int:
        self._truth.start(call, self._rank, self._start)
        if seconds:
            time.sleep(seconds)
        answer = self._sum(payload)
        self._truth.end(call, self._rank, self._start, raised=fail)
        if fail:
            raise SubjectError(call)
        return answer

    def _sum(self, payload: Payload) -> int:
        """Return the sum of a payload; a wrong one if an array that was kept has changed since."""
        answer = sum_of(payload)
        if isinstance(payload, np.ndarray):
            self._kept.append((payload, answer))
            if len(self._kept) > _KEPT:
                kept, was = self._kept.popleft()
                answer += sum_of(kept) != was
        return answer

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def once(self, call: str, seconds: float, payload: Payload, fail: bool = False) -> int:  # noqa: FBT001, FBT002  # as users write
        """Run on the main lane, never twice."""
        return self._run(call, seconds, payload, fail=fail)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def idempotent(self, call: str, seconds: float, payload: Payload) -> int:
        """Run on the main lane, again on the same rank if need be."""
        return self._run(call, seconds, payload)

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen", concurrency=GEN_CONCURRENCY)
    async def pure(self, call: str, seconds: float, payload: Payload) -> int:
        """Run on any rank, and on another if that one is lost."""
        self._truth.start(call, self._rank, self._start)
        await asyncio.sleep(seconds)
        self._truth.end(call, self._rank, self._start)
        return self._sum(payload)

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen", concurrency=GEN_CONCURRENCY)
    async def echo(self, call: str, seconds: float, payload: Payload) -> Payload:
        """As ``pure``, but answer the payload itself."""
        self._truth.start(call, self._rank, self._start)
        await asyncio.sleep(seconds)
        self._truth.end(call, self._rank, self._start)
        return payload

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen", concurrency=GEN_CONCURRENCY)
    async def items(self, call: str, upto: int) -> AsyncIterator[int]:
        """Give 0, 1, 2, … up to ``upto``."""
        self._truth.start(call, self._rank, self._start)
        for number in range(upto):
            if not number % 16:
                await asyncio.sleep(0.001)
            yield number
        self._truth.end(call, self._rank, self._start)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure", keep=True)
    def keep(self, payload: Payload) -> Payload:
        """Keep a payload for others."""
        return payload

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def where(self) -> int:
        """Return which start of the rank this is."""
        return self._start
