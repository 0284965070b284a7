"""Small scopes, completely: two requests, one or two workers, and every way in which up to two faults can befall them.

Random schedules find what is likely; this leaves out nothing within its bounds. A fault is one of ``FAULTS`` at one
message (HELLO and WELCOME included), and messages that only a first fault brings about are places for the second.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from zbus.testing.simulation.knobs import MS, Knobs
from zbus.testing.simulation.runner import Failure, Report, tell_failure
from zbus.testing.simulation.world import World

__all__ = ["FAULTS", "SCOPES", "explore"]

FAULTS: Final = ("lose", "copy", "late copy", "break", "crash")

_PLAIN: Final = Knobs(
    workers=1, requests=2, span=30 * MS, delay=MS, jitter=0, loss=0.0, duplicate=0.0, ghost=0.0, coalesce=0.0, breaks=0,
    crashes=0, crash_effects=0, partitions=0, leases=0, pauses=0, takeovers=0, zombie=0.0, farewell=0.0, guests=0,
    drains=0, cancel=0.0, deadline=0.0, batch=0.0, strict=0.0, app_error=0.0, stream=0.0, group=1.0, lanes=("main",),
    window_calls=4, window_bytes=1 << 30, callee_window=4, run=5 * MS, slow=0.0, same_address=False, wire=False,
    journal=True, together=0.0, crash_sends=0, cooperative=False, garbled=0.0, unreplaced=0.0, holds=0,
)  # fmt: skip

SCOPES: Final[dict[str, Knobs]] = {
    "plain": _PLAIN,
    "no journal": replace(_PLAIN, journal=False),
    "narrow window": replace(_PLAIN, window_calls=1, callee_window=1),
    "same address": replace(_PLAIN, same_address=True),
    "batches": replace(_PLAIN, batch=1.0),
    "strict batches": replace(_PLAIN, batch=1.0, strict=1.0, app_error=0.5),
    "streams": replace(_PLAIN, stream=1.0),
    "cancels": replace(_PLAIN, cancel=1.0, run=40 * MS),
    "cancels that stop": replace(_PLAIN, cancel=1.0, run=40 * MS, cooperative=True),
    "deadlines": replace(_PLAIN, deadline=1.0, run=100 * MS),
    "together": replace(_PLAIN, workers=2, requests=1, together=1.0),
    "together with deadlines": replace(_PLAIN, workers=2, requests=1, together=1.0, deadline=1.0, run=100 * MS),
    "together with cancels": replace(_PLAIN, workers=2, requests=1, together=1.0, cancel=1.0, run=40 * MS),
}
"""What the two requests are like; each is a run by itself, with all faults."""


def explore(names: list[str] | None = None, *, faults: int = 2, seed: int = 0) -> Report:
    """Play every script of up to ``faults`` faults in the named scopes (all); stops at the first broken rule."""
    report = Report()
    began, cpu_began = time.perf_counter(), time.process_time()
    for name in SCOPES if names is None else names:
        failure = next(_explore(name, {}, 0, faults, seed, report), None)
        if failure is not None:
            report.failures.append(failure)
            break
    report.seconds = time.perf_counter() - began
    report.cpu_seconds = time.process_time() - cpu_began
    return report


def _explore(name: str, script: dict[int, str], first: int, left: int, seed: int, report: Report) -> Iterator[Failure]:
    world = World(seed, "small", report.covered, knobs=SCOPES[name], script=script)
    report.runs += 1
    try:
        world.run()
    except Exception:  # noqa: BLE001  # whatever a machine raises is a failure of that script
        yield tell_failure(seed, f"exhaustive: {name} {script}", lambda told: World(
            seed, "small", defaultdict(int), told, SCOPES[name], script
        ))  # fmt: skip
        return
    report.events += world.events
    if not left:
        return
    for number in range(first, world.network.sent):
        for fault in FAULTS:
            yield from _explore(name, {**script, number: fault}, number + 1, left - 1, seed, report)
