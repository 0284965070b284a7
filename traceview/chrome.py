"""The Chrome trace format: the JSON object form, made of parts that may be encoded apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from traceview.event import Event, encode_args, encode_events

__all__ = ["ChromeEncoder", "chrome_end", "chrome_head"]


class ChromeEncoder:
    """Encodes placed events; every piece but the metadata of the head begins with a comma."""

    several_arrows: Final = False

    def encode(
        self, events: list[Event], starts: list[int], ends: list[int], more: dict[int, list[tuple[int, bool, bool]]]
    ) -> bytes:
        """Return events as JSON, ready to stand behind others; a span has one arrow, so ``more`` is not written."""
        return b",\n" + encode_events(events)[1:-1] if events else b""

    def finish(self) -> bytes:
        """Return what ends the part: nothing."""
        return b""


def chrome_head(names: list[tuple[str, int, int, dict[str, Any]]]) -> bytes:
    """Return the beginning of the file with its metadata events, given as (name, pid, tid, args)."""
    events = [Event(name, "M", pid=pid, tid=tid, args=encode_args(args)) for name, pid, tid, args in names]
    return b'{"displayTimeUnit":"ms","traceEvents":[\n' + encode_events(events)[1:-1]


def chrome_end(facts: Mapping[str, Any]) -> bytes:
    """Return the end of the file, with ``otherData``."""
    return b'\n],"otherData":%b}\n' % encode_events(facts)
