"""Check trace files one by one: damage, missing ends, lost records, spans that overlap without nesting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec

from traceview.event import NO_ARGS, Event
from traceview.problems import Problems
from traceview.reader import Source, find_sources, read_events

__all__ = ["validate_files"]


def validate_files(inputs: Collection[str], problems: Problems) -> list[dict[str, Any]]:
    """Return one row per file (``file``, ``events``, ``processes``, ``complete``, ``lost``); damage: in ``problems``.

    Raises:
        InputError: No trace file is found.
    """
    return [_validate(source, problems) for source in find_sources(inputs, problems)]


def _validate(source: Source, problems: Problems) -> dict[str, Any]:
    phases: Counter[str] = Counter()
    begun = ended = lost = 0
    for event in read_events(source, problems):
        phases[event.ph] += 1
        if event.ph == "M":
            begun += event.name == "zbus_meta"
            ended += event.name == "zbus_end"
            lost += _lost(event) if event.name == "zbus_loss" else 0
        elif event.ph == "X" and (event.dur is None or event.dur < 0):
            problems.add("ZT0108", "bad_duration", f"{source.label} has a span without a valid duration")
    if ended < begun:
        problems.add("ZT0110", "no_end", f"{source.label} has no end event: its process did not end in order")
    if lost:
        problems.add("ZT0111", "lost", f"{source.label} lost {lost} records", lost)
    return {
        "file": source.label,
        "events": sum(phases.values()) - phases["M"],
        "processes": begun,
        "complete": ended >= begun if begun else None,
        "lost": lost,
    }


def _lost(event: Event) -> int:
    try:
        args = msgspec.json.decode(event.args) if event.args is not NO_ARGS else {}
    except msgspec.DecodeError:
        return 0
    lost = args.get("lost") if isinstance(args, dict) else None
    return lost if type(lost) is int else 0
