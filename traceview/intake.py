"""The way into a merge: events of one file are repaired, put on the run's clock and encoded, a batch at a time."""

from __future__ import annotations

import re
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from traceview.align import MAX_US
from traceview.arrows import arrow_id
from traceview.encoder import Encoder
from traceview.event import NO_ARGS, Event, args_of, encode_args, encode_event
from traceview.part_report import PartJob
from traceview.problems import Problems
from traceview.processes import COUNTER_TID, Processes
from traceview.segment import SPAN, Segment

__all__ = ["Intake"]

_APART: Final = re.compile("[MBE]")
_IS_END: Final = np.isin(np.arange(256), [ord(phase) for phase in "stf"])
_MAX_CLEANED: Final = 4096
_MANY_KNOWN: Final = 50_000

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Intake:
    """Takes the events of one file in file order.

    Args:
        job: The file.
        processes: Told of metadata, asked for threads.
        encoder: Of the output.
        segment: Where the events go; another one may be put here between two batches.
        problems: Told of repairs and drops.
    """

    def __init__(
        self, job: PartJob, processes: Processes, encoder: Encoder, segment: Segment, problems: Problems
    ) -> None:
        self.segment = segment
        self._job = job
        self._label = job.source.label
        self._processes = processes
        self._encoder = encoder
        self._problems = problems
        self._add_ns = job.shift.add_ns + job.base_us * 1000
        self._line = job.shift.line() if job.shift.at_ns else None
        self._threads: dict[int, dict[int, int]] = {}  # pid in the file -> tid in the file -> index
        self._clean: dict[bytes, msgspec.Raw] = {}  # args of counters, as they were and without what is no number

    def take(self, batch: list[Event]) -> None:
        """Take some events, of phases that the reader lets through: each is one letter."""
        phases = "".join([event.ph for event in batch])
        if "M" in phases or "B" in phases or "E" in phases:
            self._sift(batch, phases)
        elif batch:
            self._add(batch, phases)

    def finish(self) -> None:
        """End what a crash left open at the process's last sign of life."""
        closed: list[Event] = []
        for process in self._processes.all:
            still = [event for stack in process.open.values() for event in stack]
            if not still:
                continue
            starts = self._moved(np.array([event.ts for event in still], dtype=np.float64))
            last = max(process.last_ns, int(starts.max()))
            for event, start in zip(still, starts.tolist(), strict=True):
                event.ph = "X"
                event.dur = (last - start) / 1000
                event.args = encode_args({**args_of(event), "unfinished": True})
                closed.append(event)
                text = f"{self._label} has a span without an end ({event.name}): ended at the last event"
                self._problem("ZT0110", "unfinished_span", text)
        if closed:
            self._add(closed, "X" * len(closed))

    # -- metadata, begins and ends ---------------------------------------------------------------------------------

    def _sift(self, batch: list[Event], phases: str) -> None:
        """Take a batch with metadata, begins or ends; what comes before a header belongs to the process before."""
        first = 0
        spans: list[Event] = []
        for found in _APART.finditer(phases):
            at = found.start()
            event = batch[at]
            if phases[at] != "M":
                spans += self._pair(event)
                continue
            if event.name == "zbus_meta":
                self._add_rest(batch[first:at], phases[first:at], spans)
                first, spans = at, []
                self._threads.clear()
            loss = self._processes.metadata(event)
            if loss is not None:
                spans.append(loss)
        self._add_rest(batch[first:], phases[first:], spans)

    def _add_rest(self, batch: list[Event], phases: str, more: list[Event]) -> None:
        events = [event for event, phase in zip(batch, phases, strict=True) if phase not in "MBE"]
        events += more
        if events:
            self._add(events, _APART.sub("", phases) + "X" * len(more))

    def _pair(self, event: Event) -> list[Event]:
        """Return the span that ends here, made of a begin and its end."""
        ts = event.ts if event.ts is not None and abs(event.ts) < MAX_US else None
        if ts is None:
            self._problem("ZT0109", "no_ts", f"{self._label} has an event without a usable ts: dropped")
            return []
        stack = self._processes.of(event.pid).open.setdefault(event.tid, [])
        if event.ph == "B":
            if event.args is not NO_ARGS:
                event.args = event.args.copy()  # so that it does not hold the piece of the file it was read from
            stack.append(event)
            return []
        if not stack:
            text = f"{self._label} has an end without a begin ({event.name or 'no name'}): dropped"
            self._problem("ZT0109", "end_without_begin", text)
            return []
        begun = stack.pop()
        begun.ph = "X"
        begun.dur = ts - (begun.ts or 0.0)
        if event.args is not NO_ARGS:
            begun.args = encode_args({**args_of(begun), **args_of(event)})
        return [begun]

    # -- all others ------------------------------------------------------------------------------------------------

    def _add(self, events: list[Event], phases: str) -> None:
        """Bring events into the segment, as processes are numbered now."""
        if "C" in phases:
            events, phases = self._only(events, phases, [e.ph != "C" or self._clean_counter(e) for e in events])
        ts = np.array([event.ts for event in events], dtype=np.float64)
        good = np.abs(ts) < MAX_US  # false for NaN too
        if not good.all():
            text = f"{self._label} has an event without a usable ts: dropped"
            self._problem("ZT0109", "no_ts", text, int(len(ts) - good.sum()))
            events, phases = self._only(events, phases, good.tolist())
            ts = ts[good]
        if not events:
            return
        phase = np.frombuffer(phases.encode(), dtype=np.uint8)
        span = phase == SPAN
        pids = [event.pid for event in events]
        if self._processes.headed:
            self._check_writers(pids)
        both = self._moved(np.concatenate((ts, ts + self._durations(events, span))))
        start, end = both[: len(ts)].copy(), both[len(ts) :].copy()
        if int(start.min()) < 0:
            text = f"{self._label} has events before the run began: put to its begin"
            self._problem("ZT0108", "negative_ts", text, int((start < 0).sum()))
            start, end = np.maximum(start, 0), np.maximum(end, 0)
        if not self._job.keep.all():
            kept = self._job.keep.mask(events, start, end, span)
            events, phases = self._only(events, phases, kept.tolist())
            if not events:
                return
            start, end, span, phase = start[kept], end[kept], span[kept], phase[kept]
            pids = [event.pid for event in events]
        thread = self._index(events, phases, pids)
        track = _tracks(events)
        self._note_times(thread, start, end, track)
        self._note_arrows(events, phases, phase)
        pid_of = np.array([one.process.pid for one in self._processes.threads], dtype=np.int64)
        encoded, sizes = self._encoder.bodies(events, pid_of[thread], start, end, span)
        self.segment.add(encoded, sizes, start, end, thread, phase, track)

    def _only(self, events: list[Event], phases: str, kept: list[bool]) -> tuple[list[Event], str]:
        if all(kept):
            return events, phases
        events = [event for event, keep in zip(events, kept, strict=True) if keep]
        return events, "".join([event.ph for event in events])

    def _moved(self, us: Floats) -> Ints:
        """Return times of the file, in µs, on the run's clock in ns."""
        ns = np.rint(us * 1000).astype(np.int64)
        if self._line is not None:
            ns = ns + self._line.offset(ns + self._job.base_us * 1000)
        moved: Ints = ns + self._add_ns
        return moved

    def _durations(self, events: list[Event], span: NDArray[np.bool_]) -> Floats:
        """Return durations in µs; ends are rounded from them, so that a child never leaves its parent."""
        dur = np.array([event.dur for event in events], dtype=np.float64)
        good = (dur >= 0) & (dur < MAX_US)
        if (good & span).all():
            return dur
        if (span & ~good).any():
            missing = np.isnan(dur) & span
            for kind, what, count in (
                ("no_dur", "no", int(missing.sum())),
                ("negative_dur", "a negative or absurd", int((~good & span & ~missing).sum())),
            ):
                if count:
                    text = f"{self._label} has a span with {what} duration: 0 instead"
                    self._problem("ZT0108", kind, text, count)
        return np.where(good & span, dur, 0.0)

    def _clean_counter(self, event: Event) -> bool:
        """Keep the numeric series only: viewers refuse others."""
        raw = bytes(event.args)
        known = self._clean.get(raw)
        if known is not None:
            event.args = known
            return True
        args = args_of(event)
        numbers = {k: v for k, v in args.items() if isinstance(v, int | float) and type(v) is not bool}
        if not self._processes.headed:
            numbers.pop("rank", None)
        if not numbers:
            self._problem("ZT0109", "counter_without_numbers", f"{self._label}: {event.name} dropped")
            return False
        if len(numbers) != len(args):
            event.args = msgspec.Raw(encode_event(numbers))
        if len(self._clean) < _MAX_CLEANED:
            self._clean[raw] = msgspec.Raw(bytes(event.args))
        return True

    def _check_writers(self, pids: list[int]) -> None:
        """Two processes that write one file are told: their lines may have torn each other."""
        known = self._processes.writer_pid
        if known is not None and pids.count(known) == len(pids):
            return
        for pid in dict.fromkeys(pids):
            if pid != known:
                text = f"{self._label} was written by two processes at once (pids {known} and {pid})"
                self._problem("ZT0113", "shared_file", text)
                known = self._processes.writer_pid = pid

    def _index(self, events: list[Event], phases: str, pids: list[int]) -> NDArray[np.int32]:
        """Return the index of each event's thread."""
        alone = pids.count(pids[0]) == len(pids)
        if alone and "C" not in phases:
            known = self._threads.get(pids[0], {})
            try:
                return np.array([known[event.tid] for event in events], dtype=np.int32)
            except KeyError:  # a new thread: below
                pass
        tids = [event.tid for event in events]
        if "C" in phases:
            tids = [COUNTER_TID if phase == "C" else tid for phase, tid in zip(phases, tids, strict=True)]
        if alone:
            known = self._known(pids[0], tids, phases)
            found = list(map(known.__getitem__, tids))
        else:
            places: dict[int, list[int]] = {}
            for place, pid in enumerate(pids):
                places.setdefault(pid, []).append(place)
            found = [0] * len(pids)
            for pid, here in places.items():
                known = self._known(pid, [tids[n] for n in here], "".join([phases[n] for n in here]))
                for place in here:
                    found[place] = known[tids[place]]
        return np.array(found, dtype=np.int32)

    def _known(self, pid: int, tids: list[int], phases: str) -> dict[int, int]:
        """Return the indexes of a process's threads by their tid; new ones are numbered, those of spans first."""
        if len(self._threads) > _MANY_KNOWN:
            self._threads.clear()
        known = self._threads.setdefault(pid, {})
        if len(known) > _MANY_KNOWN:
            known.clear()
        if not known.keys() >= set(tids):
            spans = [tid for tid, phase in zip(tids, phases, strict=True) if phase == "X"]
            known.update(self._processes.indexes(pid, dict.fromkeys(spans + tids)))
        return known

    def _note_times(self, thread: NDArray[np.int32], start: Ints, end: Ints, track: Ints | None) -> None:
        """Remember the first and last sign of life of each process, and which threads have tracks."""
        threads = self._processes.threads
        present = np.flatnonzero(np.bincount(thread)).tolist()
        alone = len({id(threads[index].process) for index in present}) == 1
        for index in present[:1] if alone else present:
            here = slice(None) if alone else thread == index
            process = threads[index].process
            process.first_ns = min(process.first_ns, int(start[here].min()))
            process.last_ns = max(process.last_ns, int(end[here].max()))
        if track is not None:
            for index in np.flatnonzero(np.bincount(thread[track != 0])).tolist():
                threads[index].tracked = True

    def _note_arrows(self, events: list[Event], phases: str, phase: NDArray[np.uint8]) -> None:
        """Take arrow ends out of the events, and count those that spans have by themselves."""
        before = len(self.segment)
        segment = self.segment
        if "s" in phases or "f" in phases or "t" in phases:
            places = np.flatnonzero(_IS_END[phase])
            ends = [events[n] for n in places.tolist()]
            segment.arrows.note(places + before, ends)
            for event in ends:
                event.id = event.bp = ""
        if "b" in phases or "e" in phases or "n" in phases:
            for event in events:
                if event.ph in "ben" and event.id != "":  # of this process, whoever else uses the same number
                    event.id2, event.id = encode_args({"local": str(event.id)}), ""
        if [event.bind_id for event in events].count("") == len(events):
            return
        owners = [(n, event) for n, event in enumerate(events) if event.bind_id != ""]
        segment.arrows.note_owners(np.array([before + n for n, _ in owners], dtype=np.int64))
        segment.leaving.extend([arrow_id(event.bind_id) for _, event in owners if event.flow_out])
        segment.arriving.extend([arrow_id(event.bind_id) for _, event in owners if event.flow_in])

    def _problem(self, code: str, kind: str, text: str, count: int = 1) -> None:
        self._problems.add(code, kind, text, count)


def _tracks(events: list[Event]) -> Ints | None:
    """Return a number for the track of each event, 0 for none, and take it out; None if no event has one."""
    tracks = [event.track for event in events]
    if not any(tracks):
        return None
    for event in events:
        event.track = ""
    return np.array([hash(one) if one else 0 for one in tracks], dtype=np.int64)
