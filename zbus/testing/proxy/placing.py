"""Putting a fault proxy between controllers and workers, without a word of it in the program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from unittest import mock

from zbus.ids import WorkerName
from zbus.protocol.caller import Timing
from zbus.testing.proxy.server import FaultProxy
from zbus.transport.client import Client, Peer

__all__ = ["between", "quick"]


def quick(milliseconds: float = 20.0) -> Timing:
    """Return probe times for tests: silence is asked about after so many milliseconds, not after a second."""
    ns = round(milliseconds * 1e6)
    return Timing(probe_first=ns, probe_received=2 * ns, probe_max=8 * ns)


@contextlib.contextmanager
def between(
    proxy: FaultProxy, *, roles: Sequence[str] | None = None, timing: Timing | None = None
) -> Iterator[FaultProxy]:
    """Lead every connection that a controller of this process makes in the block through ``proxy``.

    The seam is where a client is told a worker's addresses (``Client.connect``): the addresses are replaced by fronts
    of the proxy. So workers, agents and the registry know nothing of it, and restarted ranks are led through it too.
    Launch the controller inside the block.

    Args:
        proxy: Where to lead them.
        roles: Only workers of these roles; None: all.
        timing: When clients ask about silence; None: the product's own times. See ``quick``.
    """
    plain = Client.connect

    def connect(self: Client, name: WorkerName, incarnation: int, endpoints: Mapping[str, Sequence[str]]) -> Peer:
        if timing is not None:
            self._timing = timing  # the constructor's argument; a controller does not hand it on
        if roles is None or name.role in roles:
            endpoints = {
                link: [proxy.front(endpoint, worker=str(name), link=link) for endpoint in addresses]
                for link, addresses in endpoints.items()
            }
        return plain(self, name, incarnation, endpoints)

    with mock.patch.object(Client, "connect", connect):
        yield proxy
