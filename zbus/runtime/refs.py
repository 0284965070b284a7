"""A worker's handles: arguments that name values of other processes are opened, results are kept for their caller.

The owner of a value is asked on its ``ctl``, as a guest; see ``zbus.data.desk``. One thread (``zbus-refs``), begun with
the first handle, drops what belongs to holders that are gone, and the mappings of owners that are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from zbus.codec import Ref, decode, encode
from zbus.codec.refs import lost
from zbus.data.desk import Desk, fill, refs_in
from zbus.data.refstore import OWN
from zbus.errors import Unavailable
from zbus.ids import WorkerName
from zbus.protocol.messages import Outcome, OutcomeKind
from zbus.runtime.stopping import running, stop_if_cancelled, task_call
from zbus.transport.client import Client, Peer, PeerState

__all__ = ["Ask", "Asker", "WorkerRefs"]

log = logging.getLogger("zbus.refs")

_LOOK_S: Final = 0.1
"""How often whoever waits for an owner looks whether it is gone."""

_TICK_S: Final = 1.0
_ASK_S: Final = 1800.0
"""How long an owner is waited for where no deadline says it."""


class Ask(Protocol):
    """How the owner of a value is asked where it is."""

    def ask(self, ref: Ref, questions: Sequence[Sequence[Any]], deadline_ns: int) -> Sequence[Mapping[str, Any]]:
        """Return what ``Desk.answers`` says there.

        Raises:
            RefLostError: The owner is gone, or does not answer in time.
            CallStopped: The call that this thread runs was cancelled.
        """
        ...


class Asker:
    """Asks workers on ``ctl``, over connections of its own. Any thread may call.

    Args:
        connect: Makes the client, with the first question.
        gone: Says in words why the owner of a handle is gone; empty while it may be there.
        forget: Drops what is kept of the memory of a handle's owner that is gone.
    """

    def __init__(
        self, connect: Callable[[], Client], gone: Callable[[Ref], str], forget: Callable[[Ref], None]
    ) -> None:
        self._connect = connect
        self._gone = gone
        self._forget_memory = forget
        self._client: Client | None = None
        self._peers: dict[tuple[str, int, int], tuple[Peer, Ref]] = {}
        self._lock = threading.Lock()

    def ask(self, ref: Ref, questions: Sequence[Sequence[Any]], deadline_ns: int) -> Sequence[Mapping[str, Any]]:
        """Ask the owner of a handle; see ``Ask``."""
        client, peer = self._peer(ref)
        while True:
            self._await(client, ref, deadline_ns, lambda: peer.state is PeerState.READY)
            outcomes: list[Outcome] = []
            try:
                client.place(
                    [peer],
                    "ctl",
                    [encode([["zbus.ref_open", (list(questions),), {}]])],
                    1,
                    deadline_s=max(0.001, (deadline_ns - time.monotonic_ns()) / 1e9),
                    sink=_into(outcomes),
                )
            except Unavailable:  # lost since it was looked at
                continue
            self._await(client, ref, deadline_ns, partial(bool, outcomes))
            outcome = outcomes[0]
            if outcome.kind is OutcomeKind.OK:
                answers: Sequence[Mapping[str, Any]] = decode(outcome.payload or ())
                return answers
            if outcome.is_error and outcome.payload is not None:
                told = decode(outcome.payload)
                raise lost(ref, f"its owner failed to tell where it is: {told.get('message', '')}")
            if time.monotonic_ns() >= deadline_ns:
                raise lost(ref, "its owner did not answer in time")

    def sweep(self) -> None:
        """Forget owners that are gone, and what is mapped of their memory."""
        with self._lock:
            known = list(self._peers.items())
        for key, (peer, ref) in known:
            if peer.state is not PeerState.READY and self._gone(ref):
                self._forget(key, peer, ref)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            client, self._client = self._client, None
            self._peers.clear()
        if client is not None:
            client.close()

    def _peer(self, ref: Ref) -> tuple[Client, Peer]:
        key = (ref.role, ref.rank, ref.incarnation)
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            known = self._peers.get(key)
            if known is None:
                name = WorkerName(ref.role, ref.rank)
                peer = self._client.connect(name, ref.incarnation, {"ctl": ref.endpoints.get("ctl", ())})
                known = self._peers[key] = (peer, ref)
            return self._client, known[0]

    def _await(self, client: Client, ref: Ref, deadline_ns: int, done: Callable[[], bool]) -> None:
        while not client.wait(done, _LOOK_S):
            stop_if_cancelled()
            if why := self._gone(ref):
                self._forget_owner(ref)
                raise lost(ref, why)
            if time.monotonic_ns() >= deadline_ns:
                raise lost(ref, f"{ref.owner} does not answer", hint="zbus-controller status shows what it does")

    def _forget_owner(self, ref: Ref) -> None:
        key = (ref.role, ref.rank, ref.incarnation)
        with self._lock:
            known = self._peers.get(key)
        if known is not None:
            self._forget(key, *known)

    def _forget(self, key: tuple[str, int, int], peer: Peer, ref: Ref) -> None:
        with self._lock:
            client = self._client
            if self._peers.get(key, (None,))[0] is not peer:
                return
            del self._peers[key]
        if client is not None:
            client.disconnect(peer)
        self._forget_memory(ref)


def _into(outcomes: list[Outcome]) -> Callable[[int, int, Outcome], None]:
    return lambda _member, _call, outcome: outcomes.append(outcome)


class WorkerRefs:
    """What the executor and the engine's context use. Any thread may call.

    Args:
        desk: What this worker keeps and opens.
        asker: How other workers are asked.
    """

    def __init__(self, desk: Desk, asker: Ask) -> None:
        self.desk = desk
        self._asker = asker
        self._thread: threading.Thread | None = None
        self._begun = False
        self._closing = threading.Event()
        self._starting = threading.Lock()

    # -- for the executor ----------------------------------------------------------------------------------------------

    def fill(self, value: Any, deadline_ns: int | None) -> Any:
        """Return arguments with values in place of handles; the same handle twice gives the same value.

        Raises:
            RefLostError: A value is gone.
            CallStopped: The call that this thread runs was cancelled meanwhile.
        """
        until = time.monotonic_ns() + int(_ASK_S * 1e9) if deadline_ns is None else deadline_ns
        if not all(map(self.desk.is_mine, refs_in(value))):
            self._begin()
        opened = self.desk.open_all(refs_in(value), self._asker.ask, until)
        return fill(value, opened.__getitem__)

    def check(self) -> None:
        """Refuse a call whose result cannot be kept.

        Raises:
            RefLimitError: This worker keeps as much as it may.
        """
        self.desk.check()

    def keep(self, value: Any, session: bytes, claim: int, method: str) -> Ref:
        """Keep a result for whoever asked for it.

        Raises:
            RefLimitError: This worker keeps as much as it may.
        """
        self._begin()
        return self.desk.keep(value, session, claim, method)

    def asked_to_release(self, claims: list[int], numbers: list[int]) -> None:
        """Let go of what the caller of the running call holds; it is heard by this."""
        call = running.get(threading.get_ident())
        if call is not None:
            self.desk.release(call.request.session, claims, numbers)

    # -- for the engine ------------------------------------------------------------------------------------------------

    def put(self, value: Any) -> Ref:
        """Keep a value: inside a call for its caller, else until this process ends or releases it."""
        call = task_call.get() or running.get(threading.get_ident())
        self._begin()
        ref = self.desk.keep(value, OWN if call is None else call.request.session, method="ctx.put")
        ref.bind(self)
        return ref

    def get(self, ref: Ref) -> Any:
        """Return the value of a handle. Within a call it is a checkpoint, for as long as it waits.

        Raises:
            RefLostError: It is gone.
            CallStopped: The call was cancelled meanwhile.
        """
        return self.fill(ref, None)

    def release(self, ref: Ref) -> None:
        """Let go of a value that this process keeps."""
        self.desk.drop(ref)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._begun:
            with self._starting:
                self._start()

    def _start(self) -> None:
        if not self._begun and not self._closing.is_set():
            self._thread = threading.Thread(target=self._look_after, name="zbus-refs", daemon=True)
            self._thread.start()
            self._begun = True

    def _look_after(self) -> None:
        steps = [self.desk.tick]
        if isinstance(self._asker, Asker):
            steps.append(self._asker.sweep)
        failed = ""
        while not self._closing.wait(_TICK_S):
            for step in steps:
                try:
                    step()
                except Exception as error:  # the records of processes may be unreadable for a while
                    if repr(error) != failed:  # not once a second
                        failed = repr(error)
                        log.exception("what holders and owners that are gone have left could not be dropped")

    def close(self) -> None:
        """Stop the thread and close connections."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(2.0)
        if isinstance(self._asker, Asker):
            self._asker.close()
