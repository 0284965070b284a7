"""Which requests wait, run or are frozen: pure, told what happened, answers with what the next step is.

Requests are admitted in the order of their arrival, none is overtaken. A request that runs keeps its place until it
ends: room for its longest answer is taken when it is admitted, so nothing is ever put out again for lack of room.
Prefill and decode take turns, so that neither those who wait nor those who run stand still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

__all__ = ["Mode", "Scheduler", "Step"]

Mode = Literal["run", "drain", "freeze"]
"""``drain``: those that have begun go on to their end, no other begins. ``freeze``: no step at all."""

_STEPS: Final = ("run", "drain")


class Step(NamedTuple):
    """What is to be computed next, in this order.

    Attributes:
        rows: For each row that is left, the row it was; None: all are as they were.
        prefill: Requests whose tokens are computed as new rows behind those.
        decode: Compute one token more for every row.
        keys: The requests of all rows afterwards, in order.
        longest: Tokens that the longest row may get.
    """

    rows: tuple[int, ...] | None
    prefill: tuple[int, ...]
    decode: bool
    keys: tuple[int, ...]
    longest: int


@dataclass(slots=True, eq=False)
class _Request:
    key: int
    tokens: int  # prompt and answer so far
    most: int  # prompt and longest answer
    begun: bool = False
    alone: bool = False


class Scheduler:
    """The requests of one model.

    Rows times the most tokens of the longest of them never exceed ``max_tokens_total``: that is the memory a cache of
    equally long rows takes.

    Args:
        max_batch: Most rows.
        max_tokens_total: Most places for tokens in all rows.
        max_prefill: Most places of one prefill; a longer prompt is computed alone.
    """

    def __init__(self, max_batch: int, max_tokens_total: int, max_prefill: int) -> None:
        self.max_batch = max_batch
        self.max_tokens_total = max_tokens_total
        self.max_prefill = max_prefill
        self.mode: Mode = "run"
        self._waiting: deque[_Request] = deque()  # those that were put back stand in front
        self._rows: list[_Request | None] = []  # None: ended, the row is not taken away yet
        self._of: dict[int, _Request] = {}
        self._decode_next = False
        self._cleared = False

    # -- what happened -----------------------------------------------------------------------------------------------

    def submit(self, key: int, prompt: int, most: int) -> None:
        """Take a request with a prompt of so many tokens and at most ``most`` tokens in all.

        Raises:
            ValueError: It could never be admitted.
        """
        if most > self.max_tokens_total:
            msg = f"{most} tokens do not fit into {self.max_tokens_total}"
            raise ValueError(msg)
        self._of[key] = request = _Request(key, prompt, most)
        self._waiting.append(request)

    def token(self, key: int) -> None:
        """Note that a request has one token more."""
        request = self._of[key]
        request.tokens += 1
        request.begun = True

    def end(self, key: int) -> bool:
        """Forget a request, whatever it does; tell whether it was known."""
        request = self._of.pop(key, None)
        if request is None:
            return False
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._rows[self._rows.index(request)] = None
        return True

    def clear(self) -> None:
        """Take away all rows: their requests wait in front of all others, to be computed from their tokens."""
        back = [request for request in self._rows if request is not None]
        self._waiting.extendleft(reversed(back))
        self._cleared = self._cleared or bool(self._rows)
        self._rows = []

    def suspect(self, keys: Iterable[int]) -> None:
        """Take away all rows, and compute these requests one by one: a step with them failed."""
        self.clear()
        for key in keys:
            if key in self._of:
                self._of[key].alone = True

    # -- what is known -----------------------------------------------------------------------------------------------

    @property
    def begun(self) -> tuple[int, ...]:
        """Requests that have a token or a row, oldest rows first."""
        rows = [request.key for request in self._rows if request is not None]
        return (*rows, *(request.key for request in self._waiting if request.begun))

    @property
    def waiting(self) -> int:
        """How many requests have neither."""
        return sum(not request.begun for request in self._waiting)

    @property
    def keys(self) -> tuple[int, ...]:
        """All requests."""
        return tuple(self._of)

    # -- what is next ------------------------------------------------------------------------------------------------

    def next(self) -> Step | None:
        """Return the next step, which is then taken as done; None: nothing can be done now."""
        if self.mode not in _STEPS:
            return None
        rows = self._compact()
        prefill = () if self._decode_next and self._rows else self._admit()
        decode = not prefill and bool(self._rows)
        self._decode_next = bool(prefill)
        if rows is None and not prefill and not decode:
            return None
        left = [request for request in self._rows if request is not None]
        longest = max((request.most for request in left), default=0)
        return Step(rows, prefill, decode, tuple(request.key for request in left), longest)

    def _compact(self) -> tuple[int, ...] | None:
        """Fill the places of ended rows with the last rows."""
        if self._cleared:
            self._cleared = False
            return ()
        if None not in self._rows:
            return None
        left = [number for number, request in enumerate(self._rows) if request is not None]
        size = len(left)
        tail = [number for number in left if number >= size]
        order = [number if self._rows[number] is not None else tail.pop() for number in range(size)]
        self._rows = [self._rows[number] for number in order]
        return tuple(order)

    def _admit(self) -> tuple[int, ...]:
        admitted: list[int] = []
        longest_row = max((request.most for request in self._rows if request is not None), default=0)
        longest_new = 0
        while self._waiting and len(self._rows) < self.max_batch:
            request = self._waiting[0]
            if self.mode == "drain" and not request.begun:
                break
            longest_row = max(longest_row, request.most)
            longest_new = max(longest_new, request.tokens)
            if longest_row * (len(self._rows) + 1) > self.max_tokens_total:
                break
            if admitted and (request.alone or longest_new * (len(admitted) + 1) > self.max_prefill):
                break
            self._rows.append(self._waiting.popleft())
            admitted.append(request.key)
            if request.alone:
                request.alone = False
                break
        return tuple(admitted)
