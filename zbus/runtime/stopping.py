"""Cooperative cancel: how a method that runs learns that nobody waits for it any more.

A running method is never killed. Its caller's cancel, or its deadline, is shown to it where it asks: ``checkpoint`` in
a sync method, any ``await`` in an async one, the ``yield`` of a generator. The executor keeps ``running`` up to date.
"""

from __future__ import annotations

import contextvars
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from zbus.errors import CallStopped

if TYPE_CHECKING:
    from zbus.protocol.messages import Execute

__all__ = ["CurrentCall", "NotBegun", "Owner", "Wanted", "checkpoint", "running", "stop_if_cancelled", "task_call"]


class Owner(Protocol):
    """What answers a call."""

    def is_stopped(self, request: Execute) -> bool:
        """Tell whether the caller of a request no longer wants it."""


class NotBegun(Exception):
    """Nobody wants a call any more whose turn has come: its method is not started."""


class Wanted:
    """Stands for the executor where something is done for a call on a thread beside it, which may outlast the call.

    Attributes:
        over: The call does not wait for it any more.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.over = False

    def is_stopped(self, request: Execute) -> bool:
        """See ``Owner``."""
        return self.over or self._owner.is_stopped(request)


class CurrentCall(NamedTuple):
    """A call that runs now, for ``checkpoint`` and for status and death reports."""

    owner: Owner
    request: Execute
    method: str
    seq: int
    since_ns: int


running: Final[dict[int, CurrentCall]] = {}
"""The sync call that each thread (by ident) runs, and the async ones (by their own id)."""

task_call: Final[contextvars.ContextVar[CurrentCall | None]] = contextvars.ContextVar("zbus_call", default=None)
"""The async call that a task works for; inherited by what it starts."""


def checkpoint() -> None:
    """End this call here if its caller has cancelled it or its deadline has passed.

    For the loops of long sync methods: a call costs well below a microsecond. In an async method every ``await`` is
    such a place already. Does nothing outside a call.

    Raises:
        CallStopped: Nobody wants the result any more. Let it pass, after cleaning up: the caller then learns that the
            call had started and was stopped.
    """
    call = task_call.get() or running.get(threading.get_ident())
    if call is None:
        return
    deadline_ns = call.request.deadline_ns
    if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
        reason = "deadline"
        raise CallStopped(reason, call.method)
    _stop_if_cancelled(call)


def stop_if_cancelled() -> None:
    """As ``checkpoint``, for what knows the deadline of the call and has words of its own for it."""
    call = task_call.get() or running.get(threading.get_ident())
    if call is not None:
        _stop_if_cancelled(call)


def _stop_if_cancelled(call: CurrentCall) -> None:
    if call.owner.is_stopped(call.request):
        reason = "cancelled"
        raise CallStopped(reason, call.method)
