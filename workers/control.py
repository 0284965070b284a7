"""The agent's ``ctl`` socket and its hints: asked by the controller and operators, answered beside the poll loop."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from zbus.discovery.announcer import Announcer
from zbus.discovery.hints import Hint, HintKind
from zbus.ids import Incarnation, WorkerName
from zbus.registry.records import AgentRecord, EpochRecord, ExitRecord, Records
from zbus.runtime.executor import Executor
from zbus.runtime.watchdog import Handler
from zbus.transport.endpoints import RuntimeDir, bind_endpoints
from zbus.transport.security import ProcessKeys
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory

__all__ = ["AGENT_INCARNATION", "AgentControl", "agent_name"]

log = logging.getLogger("zbus.agent")

AGENT_INCARNATION: Final = Incarnation(0)
"""Incarnation of every agent on the wire: an agent id names one process already."""

_DRAIN_S: Final = 0.5


def agent_name(agent_id: str) -> WorkerName:
    """Return the name by which an agent is connected to."""
    return WorkerName(agent_id, 0)


class AgentControl:
    """Binds ``ctl``, runs the agent's methods on a small pool, and announces records.

    Made on the I/O thread; ``exited`` and ``published`` are called there too; ``close`` from the main thread.

    Args:
        agent_id: The agent.
        epoch: The controller's record: it names the runtime directory.
        records: The registry.
        transport: ``ipc`` or ``tcp``.
        bind_host: Address for tcp.
        methods: What can be asked, by name without the ``zbus.`` prefix. Called on a pool thread.
        on_fatal: Told, on the bus thread, of what ended that thread.

    Attributes:
        ctl: The bound endpoints.
        public_key: This process's public key.

    Raises:
        ConfigError, TransportError: The socket cannot be bound.
    """

    def __init__(
        self,
        agent_id: str,
        epoch: EpochRecord,
        records: Records,
        *,
        transport: str,
        bind_host: str,
        methods: Mapping[str, Callable[..., Any]],
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.public_key = ProcessKeys.create().public_text
        self._factory = SocketFactory()
        self._server = Server(
            name=agent_name(agent_id),
            incarnation=AGENT_INCARNATION,
            factory=self._factory,
            lanes={"ctl": 8},
            dispatch=lambda request: self._executor.dispatch(request),  # noqa: PLW0108  # the executor comes after
            describe=lambda: {"pid": os.getpid(), "host": socket.gethostname(), "agent": agent_id},
            on_fatal=on_fatal,
        )
        self._executor = Executor(
            name=agent_id,
            incarnation=AGENT_INCARNATION,
            answers=self._server,
            builtins={f"ctl:zbus.{name}": method for name, method in methods.items()},
        )
        use_ipc = transport == "ipc" and bool(epoch.runtime_dir)
        runtime = RuntimeDir.open(Path(epoch.runtime_dir)) if use_ipc else None  # the controller's: of its host
        wanted = bind_endpoints("ipc" if use_ipc else "tcp", "agent-ctl", runtime_dir=runtime, host=bind_host)
        self.ctl = [self._server.bind("ctl", endpoint) for endpoint in wanted]
        self._server.start()
        self._announcer = Announcer(self._factory, int.from_bytes(os.urandom(8), "big"), records=records)

    def hears(self, epoch: int) -> bool:
        """Return whether the controller of ``epoch`` is connected to this process. Any thread."""
        return self._announcer.hears(epoch)

    def handlers(self) -> list[Handler]:
        """Return what runs now and must be quick; see ``zbus.runtime.watchdog``. Any thread."""
        busy = self._server.round_since()
        bus = [] if busy is None else [Handler("a handler of the agent's bus thread", *busy)]
        return bus + self._executor.ctl_handlers()

    def statistics(self) -> dict[str, int]:
        """Return counters of refused and dropped messages, and of hints dropped because nobody took them."""
        dropped = self._announcer.dropped
        return {**self._server.statistics(), **({"dropped_hints": dropped} if dropped else {})}

    def started(self, role: str, rank: int, incarnation: int) -> None:
        """Hint that a worker's record is there. Any thread."""
        self._announcer.announce(Hint(HintKind.JOIN, role, rank, incarnation))

    def exited(self, record: ExitRecord) -> None:
        """Hint that an exit record is there."""
        self._announcer.exited(record)

    def published(self, record: AgentRecord) -> None:
        """Hint that the agent's record was written or taken back."""
        self._announcer.agent(record)

    def close(self) -> None:
        """Let answers and hints leave, then close the sockets. Bounded to about two seconds."""
        deadline = time.monotonic() + _DRAIN_S
        while self._server.parked() and time.monotonic() < deadline:
            time.sleep(0.005)  # answers leave on the bus thread; nothing signals an empty pipe
        self._announcer.close(_DRAIN_S)
        self._executor.close()
        self._server.close()
        with contextlib.suppress(Exception):
            self._factory.close()
