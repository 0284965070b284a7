"""The torch group that weights are broadcast in: made where it is needed, left by all when one member is lost."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from controller.futures import BatchFuture
from controller.group import Group
from controller.weights.fan import NOW, Answers, ask, tell
from zbus.errors import BatchError, CallTimeout, Fenced, ZbusError

__all__ = ["Broadcast"]

_LONGER_S: Final = 2.0
"""How much longer a call may take than the torch group in it, whose own error says more."""

_ECHO_S: Final = 1.0
"""How long one side is waited for when the other has failed, before the connections are closed under it."""

_LEAVE_S: Final = 60.0

Failure = ZbusError | BatchError


class Broadcast:
    """Membership and broadcasts. One caller at a time.

    Args:
        train: The ranks that train; rank 0 sends.
        rollout: The ranks that generate.
        backend: ``gloo`` or ``nccl``.
    """

    def __init__(self, train: Group, rollout: Group, backend: str) -> None:
        self._train = train
        self._rollout = rollout
        self._backend = backend
        self._mark = secrets.token_hex(4)  # the store may outlive this controller
        self._numbers = itertools.count(1)
        self._name = ""
        self._members: dict[int, int] = {}
        self._sender = 0

    def join(self, ranks: Mapping[int, int], limit_s: float) -> dict[int, str]:
        """Make sure that these incarnations, and no others, are members.

        Returns:
            Why some are not; the others are.

        Raises:
            ZbusError: Nobody is, and it is not the fault of single ranks.
        """
        sender = self._train.roster.peers()[0].incarnation
        if self._name and (self._members, self._sender) == (dict(ranks), sender):
            return {}
        left, missing = dict(ranks), dict[int, str]()
        while True:
            self.leave()
            self._members, self._sender = left, sender
            errors, own = self._join(limit_s)
            if not errors and own is None:
                return missing
            blamed = [rank for rank, error in errors.items()
                      if isinstance(error, CallTimeout) or not self._is_there(rank, left[rank])]  # fmt: skip
            missing |= {rank: Answers({}, errors).missing[rank] for rank in blamed}
            left = {rank: incarnation for rank, incarnation in left.items() if rank not in blamed}
            if not blamed or not left:
                self.leave()
                raise own or next(iter(errors.values()))

    def _join(self, limit_s: float) -> tuple[dict[int, Exception], Failure | None]:
        """Have all members join a new group; return who of them failed, and the sender's error."""
        self._name = f"{self._mark}-{next(self._numbers)}"
        ranks = sorted(self._members)
        sender = self._train.options(deadline=limit_s + _LONGER_S, retries=NOW)
        at = sender.weights_address()
        size = 1 + len(ranks)
        joined = sender.join_weights_group.submit(self._name, size, self._backend, limit_s)
        args = {
            rank: (self._name, at["host"], at["port"], place, size, self._backend, limit_s)
            for place, rank in enumerate(ranks, start=1)
        }
        answers = ask(self._rollout, ranks, "join_weights_group", args, limit_s + _LONGER_S)
        return answers.errors, _error_of(joined)

    def _is_there(self, rank: int, incarnation: int) -> bool:
        peer = self._rollout.roster.peers()[rank]
        return bool(peer.incarnation == incarnation and peer.state.name == "READY")

    def send(
        self, manifest: Sequence[Any], version: int, digest: str, *, full: bool, limit_s: float
    ) -> tuple[Answers, Failure | None]:
        """Broadcast what was published to all members. After any failure all have left.

        Args:
            manifest: What was published.
            version: What it is called.
            digest: Of all weights.
            full: Whether the manifest holds all of them.
            limit_s: Deadline in seconds, that of the group itself at most.

        Returns:
            What each member answered, and the sender's error.
        """
        deadline = limit_s + _LONGER_S
        members = self._rollout[sorted(self._members)].options(deadline=deadline, retries=NOW)
        received = members.receive_weights.submit(self._name, manifest, version, digest, full)
        sent = self._train.options(deadline=deadline, retries=NOW).broadcast_weights.submit(self._name)
        wait = self._train.placer.wait
        wait(lambda: _trouble(received) or _trouble(sent) or (received.done() and sent.done()), deadline)
        if not wait(lambda: received.done() and sent.done(), _ECHO_S):
            self._end(received, sent)
        answers = Answers({}, {})
        for one in received.as_completed():
            (answers.errors if one.failed else answers.values)[one.rank] = one.value
        error = _error_of(sent)
        if error is not None or answers.errors:
            self.leave()
        return answers, error

    def _end(self, received: BatchFuture[Any], sent: BatchFuture[Any]) -> None:
        """Have all who have ended hang up: that ends the waiting of their neighbours, who then hang up in turn."""
        gone: set[int] = set()
        while True:
            told = sent.done()
            ended = {one.rank for one in received.outcomes() if one.outcome is not None}
            self._hang_up(self._rollout, sorted(ended - gone))
            if told:
                self._hang_up(self._train, [0])
            if told and received.done():
                return
            gone = ended
            self._train.placer.wait(lambda: _ended(received) > len(gone) or sent.done() is not told, None)  # noqa: B023  # waited for here

    def leave(self) -> None:
        """Have all that are there leave; who is gone has left. Raises for no rank."""
        if self._name:
            self._hang_up(self._rollout, self._members)
            self._hang_up(self._train, [0])
        self._name, self._members = "", {}

    def _hang_up(self, group: Group, ranks: Sequence[int] | Mapping[int, int]) -> None:
        tell(group, ranks, "leave_weights_group", (self._name,), _LEAVE_S)


def _ended(future: BatchFuture[Any]) -> int:
    return sum(one.outcome is not None for one in future.outcomes())


def _trouble(future: BatchFuture[Any]) -> bool:
    """Tell whether a rank has failed already."""
    return any(one.outcome not in {None, "OK"} for one in future.outcomes())


def _error_of(future: BatchFuture[Any]) -> Failure | None:
    try:
        future.result()
    except Fenced:
        raise
    except (ZbusError, BatchError) as error:
        return error
    return None
