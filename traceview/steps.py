"""Steps of a run, from recorded markers: ``zbus_step`` instants and spans that carry their step; never guessed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from traceview.align import MAX_US
from traceview.choose import Choice
from traceview.event import BAD_JSON, NO_ARGS, Event
from traceview.problems import InputError, Problems
from traceview.reader import read_batches

__all__ = ["Steps", "find_steps", "step_of", "step_windows"]

_MARKS = (b'"step"', b'"global_step"')


class _Args(msgspec.Struct):
    step: int | None = None
    global_step: int | None = None


_decode = msgspec.json.Decoder(_Args).decode


def step_of(event: Event) -> int | None:
    """Return the step an event says it belongs to."""
    raw = event.args
    if raw is NO_ARGS:
        return None
    text = bytes(raw)
    if _MARKS[0] not in text and _MARKS[1] not in text:
        return None
    try:
        args = _decode(text)
    except BAD_JSON:
        return None
    return args.global_step if args.global_step is not None else args.step


@dataclass(slots=True)
class Steps:
    """Start and end in ns of each step, on the run's clock."""

    windows: dict[int, tuple[int, int]]

    def at(self, ns: int) -> int | None:
        """Return the step that was going on at a time."""
        for step, (first, last) in self.windows.items():
            if first <= ns <= last:
                return step
        return None


class StepFinder:
    """Collects steps of one process."""

    def __init__(self) -> None:
        self.spans: dict[int, tuple[int, int]] = {}
        self.marks: dict[int, int] = {}

    def see(self, event: Event, start: int, end: int) -> int | None:
        """Take an event in any order; return its step."""
        step = step_of(event)
        if step is None:
            return None
        if event.ph == "X":
            first, last = self.spans.get(step, (start, end))
            self.spans[step] = (min(first, start), max(last, end))
        elif event.name == "zbus_step":
            self.marks[step] = max(self.marks.get(step, 0), end)
        return step

    def steps(self) -> Steps:
        """Return the steps: marks end them, each begins where the one before ended; else spans bound them."""
        if not self.marks:
            return Steps(dict(sorted(self.spans.items())))
        windows = {}
        before: int | None = None
        for step, end in sorted(self.marks.items(), key=lambda pair: pair[1]):
            start = before if before is not None else min(self.spans.get(step, (0, 0))[0], end)
            windows[step] = (start, end)
            before = end
        return Steps(windows)


def find_steps(choices: Sequence[Choice]) -> Steps:
    """Return the steps of the process that marks them: the controller if it does, else of all together."""
    ordered = sorted(choices, key=lambda c: c.role != "controller")
    controllers = [c for c in ordered if c.role == "controller"]
    for group in (controllers, ordered):
        finder = StepFinder()
        for choice in group:
            for start, end, event in _timed(choice):
                finder.see(event, start, end)
        steps = finder.steps()
        if steps.windows:
            return steps
    return Steps({})


def step_windows(choices: Sequence[Choice], asked: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Return the time windows of the steps from … to.

    Raises:
        InputError: None of them is in the trace.
    """
    steps = find_steps(choices).windows
    found = tuple(window for step, window in steps.items() if asked[0] <= step <= asked[1])
    if not found:
        msg = f"steps {asked[0]}-{asked[1]} are not in the trace"
        known = f"it has steps {min(steps)} to {max(steps)}" if steps else "it has no step markers"
        raise InputError(msg, hint=f"{known}; mark steps with save_perf_tracer(step) or args step=… of a span")
    return found


def _timed(choice: Choice) -> Iterable[tuple[int, int, Event]]:
    for batch in read_batches(choice.source, Problems(), choice.base_us):
        for event in batch:
            ts = event.ts
            if ts is None or not -MAX_US < ts < MAX_US or event.args is NO_ARGS:
                continue
            start = choice.shift.moved(round(ts * 1000) + choice.base_us * 1000)
            dur = event.dur
            yield start, start + round(dur * 1000) if dur is not None and 0 < dur < MAX_US else start, event
