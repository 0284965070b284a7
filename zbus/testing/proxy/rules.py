"""Which messages a proxy harms, and how: by direction, kind, worker, chance and count."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from typing import Final, Literal

from zbus.protocol.messages import Kind
from zbus.testing.proxy.wire import Message

__all__ = ["REPLIES", "REQUESTS", "Action", "Direction", "Rule"]

Action = Literal["drop", "duplicate", "delay", "cut", "mangle"]
Direction = Literal["request", "reply", "both"]

REQUESTS: Final = frozenset({Kind.REQ, Kind.SKIP})
"""Messages that carry calls to a worker."""

REPLIES: Final = frozenset({Kind.RESULT, Kind.FAILURE, Kind.CHUNK, Kind.END})
"""Messages that carry answers from a worker."""


class Rule:
    """One way of harming messages. Made by ``FaultProxy``; ``stop`` ends it. Read ``hits`` from any thread.

    Args:
        action: What is done to a message.
        direction: ``request`` (caller to worker), ``reply`` (worker to caller) or both.
        kinds: Kinds of message; None: those that carry calls (requests) or answers (replies).
        worker: Only to or from this worker (``actor/3``); None: all.
        link: Only on this connection (``main`` or ``ctl``); None: both.
        lane: Only in this lane; None: all.
        probability: Chance for each message, 0 to 1.
        count: Most messages to harm; None: no limit.
        skip: Leave the first so many matching messages alone.
        seconds: For ``delay``: how long.
        overtake: For ``delay``: whether later messages may pass the delayed one.
        copies: For ``duplicate``: how many more copies are sent.
        at_byte: For ``cut``: so many bytes of the message are let through first.

    Attributes:
        hits: How many messages it has harmed.
    """

    def __init__(
        self,
        action: Action,
        direction: Direction,
        *,
        kinds: Iterable[Kind] | None = None,
        worker: str | None = None,
        link: str | None = None,
        lane: str | None = None,
        probability: float = 1.0,
        count: int | None = None,
        skip: int = 0,
        seconds: float = 0.0,
        overtake: bool = False,
        copies: int = 1,
        at_byte: int = 0,
    ) -> None:
        self.action = action
        self.direction = direction
        self.kinds = None if kinds is None else frozenset(kinds)
        self.worker = worker
        self.link = link
        self.lane = lane
        self.probability = probability
        self.count = count
        self.skip = skip
        self.seconds = seconds
        self.overtake = overtake
        self.copies = copies
        self.at_byte = at_byte
        self.hits = 0
        self._stopped = False
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Harm no further message. Any thread."""
        self._stopped = True

    @property
    def spent(self) -> bool:
        """Whether it will harm nothing more."""
        return self._stopped or (self.count is not None and self.hits >= self.count)

    def applies(self, message: Message, direction: str, worker: str, link: str, chance: random.Random) -> bool:
        """Tell whether ``message`` is to be harmed now, and count it if so."""
        if message.command or not self._matches(message, direction, worker, link):
            return False
        with self._lock:
            if self.spent:
                return False
            if self.skip:
                self.skip -= 1
                return False
            if self.probability < 1.0 and chance.random() >= self.probability:
                return False
            self.hits += 1
            return True

    def _matches(self, message: Message, direction: str, worker: str, link: str) -> bool:
        if self.direction not in ("both", direction):
            return False
        if self.worker not in (None, worker) or self.link not in (None, link):
            return False
        if message.header is None:  # unreadable: only a rule that asks for nothing in it may take it
            return self.kinds is None and self.lane is None
        if self.lane not in (None, message.lane):
            return False
        return message.kind in (self.kinds or (REQUESTS if direction == "request" else REPLIES))

    def __repr__(self) -> str:
        return f"<Rule {self.action} {self.direction}: {self.hits} hits{', ended' if self.spent else ''}>"
