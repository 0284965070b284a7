"""The way into a merge: events of one file are repaired, put on the run's clock and encoded, a batch at a time."""

from __future__ import annotations

import re
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from traceview.align import MAX_US
from traceview.arrows import arrow_id
from traceview.batch import Batch
from traceview.encoder import Encoder
from traceview.event import NO_ARGS, Event, args_of, encode_args, encode_event
from traceview.part_report import PartJob
from traceview.problems import Problems
from traceview.processes import COUNTER_TID, Processes
from traceview.segment import SPAN, Segment

__all__ = ["Intake"]

_APART: Final = re.compile("[MBE]")
_IS_END: Final = np.isin(np.arange(256), [ord(phase) for phase in "stf"])
_COUNTER: Final = ord("C")
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
        self._keeps_all = job.keep.all()
        self._pids = np.zeros(0, dtype=np.int64)  # of the output, by thread
        self._threads: dict[int, dict[int, int]] = {}  # pid in the file -> tid in the file -> index
        self._clean: dict[bytes, msgspec.Raw] = {}  # args of counters, as they were and without what is no number

    def take(self, batch: Batch) -> None:
        """Take some events."""
        phases = batch.phases
        if "M" in phases or "B" in phases or "E" in phases:
            self._sift(batch.events, phases)
        elif phases:
            self._add(batch)

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
            self._add(Batch.of(closed))

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
            self._add(Batch.of(events))

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

    def _add(self, batch: Batch) -> None:
        """Bring events into the segment, as processes are numbered now."""
        if "C" in batch.phases:
            batch = batch.only(self._clean_counters(batch))
        batch = self._timed(batch)
        if not len(batch):
            return
        count = len(batch)
        span = batch.phase == SPAN
        times = np.empty((2, count))
        times[0] = batch.ts
        np.add(batch.ts, self._durations(batch.events, span), out=times[1])
        start, end = self._moved(times)
        if self._processes.headed:
            self._check_writers([event.pid for event in batch.events])
        first = int(start.min())
        if first < 0:
            text = f"{self._label} has events before the run began: put to its begin"
            self._problem("ZT0108", "negative_ts", text, int((start < 0).sum()))
            first, start, end = 0, np.maximum(start, 0), np.maximum(end, 0)
        if not self._keeps_all:
            kept = self._job.keep.mask(batch.events, start, end, span)
            batch = batch.only(kept)
            if not len(batch):
                return
            start, end, span = start[kept], end[kept], span[kept]
        events = batch.events
        thread = self._index(batch)
        rare = any([event.track or event.bind_id != "" for event in events])  # noqa: C419  # a list is faster
        track = _tracks(events) if rare else None
        self._note_times(thread, start, end, track)
        self._note_arrows(batch)
        if rare:
            self._note_own_arrows(events)
        if len(self._pids) < len(self._processes.threads):
            self._pids = np.array([one.process.pid for one in self._processes.threads], dtype=np.int64)
        encoded, sizes = self._encoder.bodies(events, self._pids[thread], start, end, span)
        self.segment.add(encoded, sizes, start, end, thread, batch.phase, track)

    def _timed(self, batch: Batch) -> Batch:
        """Return the events with a usable time."""
        if batch.ts.min(initial=0.0) > -MAX_US and batch.ts.max(initial=0.0) < MAX_US:  # false for NaN too
            return batch
        good = np.abs(batch.ts) < MAX_US
        text = f"{self._label} has an event without a usable ts: dropped"
        self._problem("ZT0109", "no_ts", text, int(len(good) - good.sum()))
        return batch.only(good)

    def _moved(self, us: Floats) -> Ints:
        """Return times of the file, in µs, on the run's clock in ns."""
        moved: Ints = np.rint(us * 1000).astype(np.int64)
        if self._line is not None:
            moved += self._line.offset(moved + self._job.base_us * 1000)
        moved += self._add_ns
        return moved

    def _durations(self, events: list[Event], span: NDArray[np.bool_]) -> Floats:
        """Return durations in µs; ends are rounded from them, so that a child never leaves its parent."""
        dur = np.array([event.dur for event in events], dtype=np.float64)
        dur[~span] = 0.0
        if dur.min() >= 0 and dur.max() < MAX_US:  # false for NaN too
            return dur
        good = (dur >= 0) & (dur < MAX_US)
        missing = np.isnan(dur)
        for kind, what, count in (
            ("no_dur", "no", int(missing.sum())),
            ("negative_dur", "a negative or absurd", int((~good & ~missing).sum())),
        ):
            if count:
                text = f"{self._label} has a span with {what} duration: 0 instead"
                self._problem("ZT0108", kind, text, count)
        return np.where(good, dur, 0.0)

    def _clean_counters(self, batch: Batch) -> NDArray[np.bool_]:
        """Leave the numeric series of counters only, and return which events stay: viewers refuse others."""
        kept = np.ones(len(batch), dtype=bool)
        events, known = batch.events, self._clean
        for place in np.flatnonzero(batch.phase == _COUNTER).tolist():
            event = events[place]
            clean = known.get(bytes(event.args))
            if clean is not None:
                event.args = clean
            else:
                kept[place] = self._clean_counter(event)
        return kept

    def _clean_counter(self, event: Event) -> bool:
        raw = bytes(event.args)
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

    def _index(self, batch: Batch) -> NDArray[np.int32]:
        """Return the index of each event's thread."""
        events, phases = batch.events, batch.phases
        first = events[0].pid
        known = self._threads.get(first, {})
        try:
            found = [known[event.tid] for event in events if event.pid == first]
            if len(found) == len(events):
                index = np.array(found, dtype=np.int32)
                if "C" in phases:
                    index[batch.phase == _COUNTER] = known[COUNTER_TID]
                return index
        except KeyError:  # a new thread
            pass
        pids, tids = [event.pid for event in events], [event.tid for event in events]
        alone = pids.count(first) == len(pids)
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
        if len(self._processes.all) == 1:
            present, alone = [0], True
        else:
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

    def _note_arrows(self, batch: Batch) -> None:
        """Take arrow ends out of the events."""
        events, phases = batch.events, batch.phases
        before = len(self.segment)
        segment = self.segment
        if "s" in phases or "f" in phases or "t" in phases:
            places = np.flatnonzero(_IS_END[batch.phase])
            ends = [events[n] for n in places.tolist()]
            segment.arrows.note(places + before, ends)
            for event in ends:
                event.id = event.bp = ""
        if "b" in phases or "e" in phases or "n" in phases:
            for event in events:
                if event.ph in "ben" and event.id != "":  # of this process, whoever else uses the same number
                    event.id2, event.id = encode_args({"local": str(event.id)}), ""

    def _note_own_arrows(self, events: list[Event]) -> None:
        """Count the arrow ends that spans have by themselves."""
        before, segment = len(self.segment), self.segment
        owners = [(n, event) for n, event in enumerate(events) if event.bind_id != ""]
        if not owners:
            return
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
