"""What a caller's lane sends: places, credit, transmissions, probes, and the books of what is out.

The lowest part of ``caller.CallerLane``, where the theory of operation stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from zbus.protocol.caller_state import MS, NEVER, RELEASED, Request, RequestState, Timing
from zbus.protocol.frames import join_requests
from zbus.protocol.messages import Buffers, Effect, Finish, Header, Kind, Outcome, SendTo, Status

__all__ = ["LaneSending"]

# The words of a small call as plain names: a look into an enum's class costs as much as ten bytecodes.
_REQ: Final = int(Kind.REQ)
_STRICT: Final = int(Status.STRICT)
_JOINED: Final = int(Status.JOINED)
_WAITING: Final = RequestState.WAITING
_SENT: Final = RequestState.SENT
_new: Final = tuple.__new__


class LaneSending:
    """State of a caller's lane, and what leaves it."""

    __slots__ = (
        "_bytes_out",
        "_epoch",
        "_floor",
        "_incarnation",
        "_next_seq",
        "_noise",
        "_order",
        "_requests",
        "_rtt",
        "_rtt_spread",
        "_session",
        "_waiting",
        "connected",
        "dead",
        "due_ns",
        "lane",
        "patience",
        "probes",
        "retransmissions",
        "strays",
        "timing",
        "window_bytes",
        "window_calls",
    )

    #: when ``on_timer`` is needed next (monotonic); a far future when it is not
    due_ns: int
    #: seq of the next call to be placed; all smaller seqs were placed exactly once
    _next_seq: int
    #: lowest seq whose request is not DONE; rises only
    _floor: int
    #: every request not DONE, by first seq, also in ``_order`` (by seq) and, until sent, in ``_waiting``
    _requests: dict[int, Request]

    def __init__(
        self,
        session: bytes,
        epoch: int,
        incarnation: int,
        lane: str,
        *,
        window_calls: int = 1024,
        window_bytes: int = 1 << 30,
        timing: Timing | None = None,
    ) -> None:
        self._session = session
        self._epoch = epoch
        self._incarnation = incarnation
        self.lane = lane
        self.window_calls = window_calls
        self.window_bytes = window_bytes
        self.timing = timing or Timing()
        self.connected = False
        self.dead: tuple[str, str] | None = None
        self._next_seq = 0
        self._floor = 0
        self._requests = {}
        self._order: deque[Request] = deque()
        self._waiting: deque[Request] = deque()
        self._bytes_out = 0
        self._noise = int.from_bytes(session[:8], "big") ^ incarnation
        self._rtt = self._rtt_spread = 0  # smoothed round trip and its deviation; 0: none was measured
        self.patience = self.timing.probe_first  # silence after a transmission before the first PROBE
        self.due_ns = NEVER
        self.retransmissions = 0
        self.probes = 0
        self.strays = 0

    @property
    def next_seq(self) -> int:
        """Seq that the next placed call will take."""
        return self._next_seq

    @property
    def outstanding(self) -> int:
        """Number of requests not yet done."""
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """Number of requests that wait here for room in the window, for the connection or for each other."""
        return len(self._waiting)

    @property
    def bytes_out(self) -> int:
        """Bytes that were sent and are not answered."""
        return self._bytes_out

    @property
    def credit(self) -> int:
        """Number of calls that may still be placed before the window is full."""
        return max(0, self._floor + self.window_calls - self._next_seq)

    @property
    def crowded(self) -> bool:
        """Whether the window is full: what is placed now would only wait here. Its reader need not hold the lock."""
        if self._next_seq - self._floor >= self.window_calls:
            return True
        waiting = sum(request.nbytes for request in tuple(self._waiting))
        return self._bytes_out + waiting >= self.window_bytes and self._next_seq > self._floor

    @property
    def roomy(self) -> bool:
        """Whether a quarter of the window is free: time to wake those who found it crowded, some at a time."""
        if self._next_seq - self._floor > self.window_calls * 3 // 4:
            return False
        return not self._waiting and self._bytes_out * 4 <= self.window_bytes * 3

    def next_header(
        self, calls: int, nbytes: int, deadline_ns: int | None, now: int, trace: int = 0, strict: bool = False  # noqa: FBT001, FBT002  # hot path
    ) -> Header | None:  # fmt: skip
        """Return the header under which the next ``calls`` may leave at once, or None: then only ``place`` will do.

        Nothing changes. The shell that has sent them under this header says so with ``sent``, before anything else
        happens in this lane. Between the two it has a message on its way and the books still to keep, which is what
        ``place`` would have kept first.
        """
        seq = self._next_seq
        if not self.connected or self._waiting or seq >= self._floor + self.window_calls:
            return None
        if self._bytes_out and self._bytes_out + nbytes > self.window_bytes:
            return None
        budget = 0 if deadline_ns is None else max(1, (deadline_ns - now) // MS)
        status = _STRICT if strict else 0
        return _new(
            Header,
            (
                _REQ, self._session, self._epoch, self._incarnation, self.lane, seq, calls, 1, self._floor, budget,
                status, trace,
            ),
        )  # fmt: skip

    def sent(self, header: Header, buffers: Buffers, nbytes: int, deadline_ns: int | None, now: int) -> None:
        """Keep the books of a request that was sent under the header that ``next_header`` gave."""
        seq, calls = header.seq, header.calls
        due = NEVER if deadline_ns is None else deadline_ns
        request = Request(seq, calls, buffers, nbytes, due, header.trace, header.status == _STRICT)
        request.state = _SENT
        request.attempts = 1
        request.probe_gap = gap = self.patience
        request.probe_ns = now + gap
        self._next_seq = seq + calls
        self._bytes_out += nbytes
        self._requests[seq] = request
        self._order.append(request)
        self.due_ns = min(due, now + gap, self.due_ns)

    def _join(self, payloads: Sequence[Buffers], deadlines: Sequence[int | None], now: int) -> SendTo | None:
        """Send several requests of one call and one frame each in one message; None, and nothing done, unless all may.

        It says what a message for each would say. Whatever comes after it is about each request by itself.
        """
        first, calls = self._next_seq, len(payloads)
        nbytes = sum([len(payload[0]) for payload in payloads])
        if not self.connected or self._waiting or first + calls > self._floor + self.window_calls:
            return None
        if self._bytes_out + nbytes > self.window_bytes:
            return None
        gap, requests, order = self.patience, self._requests, self._order
        seq, due, probe_ns = first, self.due_ns, now + gap
        joined = []
        for payload, deadline_ns in zip(payloads, deadlines, strict=True):
            request = Request(seq, 1, payload, len(payload[0]), NEVER, 0, False)  # noqa: FBT003  # as in ``sent``
            budget = 0
            if deadline_ns is not None:
                request.deadline_ns = deadline_ns
                budget = max(1, (deadline_ns - now) // MS)
                due = min(due, deadline_ns)
            request.group = first
            request.state = _SENT
            request.attempts = 1
            request.probe_gap = gap
            request.probe_ns = probe_ns
            requests[seq] = request
            order.append(request)
            joined.append((budget, payload[0]))
            seq += 1
        self._next_seq = seq
        self._bytes_out += nbytes
        self.due_ns = min(due, probe_ns)
        header = _new(
            Header,
            (
                _REQ, self._session, self._epoch, self._incarnation, self.lane, first, calls, 1, self._floor, 0,
                _JOINED, 0,
            ),
        )  # fmt: skip
        return SendTo(header, (join_requests(joined),))

    def whereabouts(self, seq: int, now: int) -> str:
        """Say in words how far the call at ``seq`` is, as far as is known here."""
        for request in self._order:
            if request.seq <= seq < request.seq + request.calls:
                words = self._whereabouts(request)
                if not request.remote_since_ns:
                    return words
                return f"{words} since {(now - request.remote_since_ns) / 1e9:.1f} s"
        return "answered" if seq < self._next_seq else "not placed"

    def _header(self, kind: Kind, request: Request, budget_ms: int = 0, status: int = 0) -> Header:
        return Header(
            kind, self._session, self._epoch, self._incarnation, self.lane, request.seq, request.calls,
            request.attempts, self._floor, budget_ms, status, request.trace,
        )  # fmt: skip

    def _has_credit(self, request: Request) -> bool:
        if request.seq >= self._floor + self.window_calls:
            return False
        # a single request larger than the whole byte window may travel alone; else it could never go
        return self._bytes_out == 0 or self._bytes_out + request.nbytes <= self.window_bytes

    def _transmit(self, request: Request, now: int, effects: list[Effect]) -> None:
        if request.attempts:
            self.retransmissions += 1
        request.attempts += 1
        if request.state is RequestState.WAITING:
            self._bytes_out += request.nbytes
        request.state = RequestState.SENT
        request.remote = 0
        request.probe_gap = self.patience
        request.asked_ns = 0
        self._set_probe(request, now + request.probe_gap)
        if request.cancelled or request.give_up_ns != NEVER:
            request.skip = True
            request.buffers = ()
        if request.skip:
            effects.append(SendTo(self._header(Kind.SKIP, request)))
            return
        budget = 0 if request.deadline_ns == NEVER else max(1, (request.deadline_ns - now) // MS)
        status = Status.STRICT if request.strict else 0
        if request.together:
            status = Status.TOGETHER_STRICT if request.strict else Status.TOGETHER
        effects.append(SendTo(self._header(Kind.REQ, request, budget, status), request.buffers))

    def _pump(self, now: int, effects: list[Effect]) -> None:
        waiting = self._waiting
        while waiting and self.connected and self._has_credit(waiting[0]):
            self._transmit(waiting.popleft(), now, effects)

    def _probe(self, request: Request, now: int, effects: list[Effect]) -> None:
        """Ask how far it is; of a request that nobody wants, ask that it should not run (the answers are the same)."""
        self.probes += 1
        unwanted = request.skip or request.cancelled or request.give_up_ns != NEVER
        kind = Kind.CANCEL if unwanted else Kind.PROBE
        if request.together == RELEASED and request.remote != Status.RUNNING:
            kind = Kind.GO  # it may not have come, and the other members run
        effects.append(SendTo(self._header(kind, request)))
        if request.acked:
            effects.append(self._ack(request))
        request.asked_ns = -1 if request.asked_ns else now
        request.probe_gap = min(max(request.probe_gap * 2, self.patience), self.timing.probe_max)
        self._set_probe(request, now + self._spread(request.probe_gap))

    def _spread(self, gap: int) -> int:
        """Stretch or shrink a pause by some of its jitter: the same for a lane and history, other for another lane."""
        self._noise = (self._noise * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        return gap + int(gap * self.timing.jitter * ((self._noise >> 33) / (1 << 30) - 1))

    def round_trip(self, took: int) -> None:
        """Learn how long a question and its answer took; silence is asked about accordingly (as RFC 6298 has it)."""
        if self.timing.probe_least is None or took < 0:
            return
        if self._rtt:
            self._rtt_spread += (abs(took - self._rtt) - self._rtt_spread) // 4
            self._rtt += (took - self._rtt) // 8
        else:
            self._rtt, self._rtt_spread = max(1, took), took // 2
        wanted = max(self._rtt + 4 * self._rtt_spread, self.timing.probe_least)
        self.patience = min(self._spread(wanted), self.timing.probe_max)

    def _acknowledge(self, request: Request, effects: list[Effect]) -> None:
        """Say that a large reply has come, so that the callee need not keep it until the next call.

        A PROBE of a place below the floor has no answer; it carries the floor.
        """
        if self._floor > request.seq:
            effects.append(SendTo(self._header(Kind.PROBE, request)))

    def _ack(self, request: Request) -> SendTo:
        return SendTo(self._header(Kind.ACK, request)._replace(floor=request.acked))

    def _set_probe(self, request: Request, due: int) -> None:
        request.probe_ns = due
        self.due_ns = min(self.due_ns, due)

    def _find(self, seq: int) -> Request | None:
        request = self._requests.get(seq)
        if request is not None:
            return request
        for candidate in self._order:  # inside a batch, or unknown; short: bounded by the window
            if candidate.seq <= seq < candidate.seq + candidate.calls:
                return candidate
            if candidate.seq > seq:
                break
        return None

    def _finish_all(self, request: Request, outcome: Outcome, effects: list[Effect]) -> None:
        if not request.open_calls:
            return
        finished = request.finished or ()
        request.open_calls = 0
        request.skip = True
        request.buffers = ()
        request.deadline_ns = request.give_up_ns = NEVER
        effects.extend(
            Finish(self.lane, seq, outcome)
            for seq in range(request.seq, request.seq + request.calls)
            if seq not in finished
        )

    def _retire(self, request: Request) -> None:
        if request.state is not _WAITING:  # nor DONE: it is retired once
            self._bytes_out -= request.nbytes
        request.state = RequestState.DONE
        request.buffers = ()
        del self._requests[request.seq]
        order = self._order
        if order[0] is request:
            order.popleft()
        else:
            order.remove(request)
        self._floor = order[0].seq if order else self._next_seq

    def _earliest(self) -> int:
        due = NEVER
        for request in self._order:
            due = min(due, request.deadline_ns, request.give_up_ns)
            if self.connected and request.probe_ns < due:
                due = request.probe_ns
        return due

    def _whereabouts(self, request: Request) -> str:
        if request.remote == Status.RUNNING:
            return "running"
        if request.remote in (Status.QUEUED, Status.HELD):
            return "arrived, not started"
        if request.remote == Status.POISED:
            return "arrived, told to start" if request.together == RELEASED else "ready, waiting for the other ranks"
        if request.attempts == 0:
            return "not sent"
        return "sent, not confirmed" if request.state is RequestState.SENT else "arrived"
