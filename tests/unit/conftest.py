"""What unit tests share: sockets that must all be closed in the end, and a client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from zbus.transport.client import Client
    from zbus.transport.sockets import SocketFactory


@pytest.fixture
def factory() -> Iterator[SocketFactory]:
    """Give a factory, and check that the test closed every socket."""
    from zbus.transport.sockets import SocketFactory

    made = SocketFactory(max_sockets=64)
    yield made
    assert made.close(), f"sockets left open: {made.open_sockets}"


@pytest.fixture
def client(factory: SocketFactory) -> Iterator[Client]:
    """Give a client of a session of its own."""
    from zbus.ids import new_session
    from zbus.transport.client import Client

    made = Client(session=new_session(), epoch=1, factory=factory)
    yield made
    made.close()
