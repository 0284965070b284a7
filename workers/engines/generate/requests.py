"""What is asked of the thread that computes, and how its answers get back to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from zbus.rl.generation import Completion, Finish, Sampling, VersionSpan

__all__ = ["Answers", "Request", "Told", "deliver"]


class Answers:
    """The answers of requests that were made together. Made and told on the event loop that waits for them.

    Args:
        count: How many.

    Attributes:
        all: Gets the completions in the order of the requests, once the last is there; or the first error.
        loop: The event loop.
    """

    __slots__ = ("_found", "_left", "all", "loop")

    def __init__(self, count: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.all: asyncio.Future[list[Completion]] = self.loop.create_future()
        self._found: list[Completion | None] = [None] * count
        self._left = count

    def resolve(self, place: int, completion: Completion) -> None:
        """Take one answer."""
        self._found[place] = completion
        self._left -= 1
        if not self._left and not self.all.done():
            self.all.set_result([one for one in self._found if one is not None])

    def reject(self, error: BaseException) -> None:
        """Take the error of one request, which is that of all."""
        if not self.all.done():
            self.all.set_exception(error)


@dataclass(slots=True, eq=False)
class Request:
    """One answer that somebody waits for.

    Attributes:
        prompt: Its tokens.
        sampling: How to answer.
        limit: Most tokens of the answer: ``sampling.max_tokens`` or what the model has room for.
        seed: Of its chance.
        answers: Get the ``Completion`` or the error.
        place: Of this answer among them.
        tokens: Gets every token and its log-probability as they are made, and None at the end; None: nobody reads them.
    """

    prompt: Sequence[int]
    sampling: Sampling
    limit: int
    seed: int
    answers: Answers
    place: int = 0
    tokens: asyncio.Queue[tuple[int, float] | None] | None = None
    key: int = -1
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # version, and the first token that it made
    since_ns: int = field(default_factory=time.monotonic_ns)
    queued: bool = True  # it has not begun; computed anew later, it does not wait anew
    ended: bool = False
    suspected: bool = False

    def completion(self, finish: Finish) -> Completion:
        """Return the answer as it is now."""
        ends = [start for _, start in self.spans[1:]] + [len(self.ids)]
        return Completion(
            np.array(self.ids, np.int64),
            np.array(self.logprobs, np.float32),
            finish,
            tuple(VersionSpan(version, start, end) for (version, start), end in zip(self.spans, ends, strict=False)),
        )  # of an empty answer: no span, one end

    def resolve(self, completion: Completion) -> None:
        """Answer. On the event loop."""
        self.answers.resolve(self.place, completion)
        self._no_more()

    def reject(self, error: BaseException) -> None:
        """Answer with an error. On the event loop."""
        self.answers.reject(error)
        self._no_more()

    def _no_more(self) -> None:
        if self.tokens is not None:
            self.tokens.put_nowait(None)


Told = tuple[Request, Callable[[], None]]
"""What is to be done on the event loop of a request."""


def deliver(told: Iterable[Told]) -> None:
    """Tell each event loop all that concerns it, at once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
    for request, tell in told:
        by_loop.setdefault(request.answers.loop, []).append(tell)
    for loop, tells in by_loop.items():
        with contextlib.suppress(RuntimeError):  # it is closed: nobody waits there any more
            loop.call_soon_threadsafe(_tell, tells)


def _tell(tells: Iterable[Callable[[], None]]) -> None:
    for tell in tells:
        tell()
