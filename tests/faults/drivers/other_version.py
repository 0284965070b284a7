"""The real worker command of a zbus that speaks another version of the protocol: its ranks are forked from here."""

from __future__ import annotations

import sys

import zbus
from zbus.protocol import messages

messages.PROTOCOL_VERSION = 2  # type: ignore[misc]  # before anything takes it over
zbus.__version__ = "99.0"

from workers.cli import main  # noqa: E402  # after the change

if __name__ == "__main__":
    main(sys.argv[1:])
