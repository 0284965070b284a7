from __future__ import annotations

from protocol_kit import BODY, EPOCH, INCARNATION, MS, SESSION, TIMING, caller, reply, words
from zbus.protocol.messages import Kind, OutcomeKind, SendTo, Status

NEVER = 1 << 62


def place(lane, calls=1, *, deadline=None, now=0, size=4, **options):
    """Place a request; return its seq and the words of the effects."""
    seq, effects = lane.place(BODY, calls, size, deadline, now, **options)
    lane.validate()
    return seq, words(effects)


def hear(lane, kind, seq, status=Status.NONE, *, now=0, body=(), **fields):
    """Let the lane hear a word of the callee; return the words of the effects."""
    effects = lane.receive(reply(kind, seq, status, **fields), body, now)
    lane.validate()
    return words(effects)


def timer(lane, now):
    """Let time pass; return the words of the effects."""
    effects = lane.on_timer(now)
    lane.validate()
    return words(effects)


# -- places and credit ---------------------------------------------------------------------------------------------


def test_seqs_are_contiguous_and_a_batch_takes_as_many_as_it_has_calls():
    """Every place is taken once, in order of placement."""
    lane = caller()
    assert place(lane) == (0, ["REQ 0"])
    assert place(lane, 3) == (1, ["REQ 1+3"])
    assert place(lane) == (4, ["REQ 4"])
    assert lane.next_seq == 5


def test_a_request_says_who_asks_whom_and_how_much_time_is_left():
    """The header carries session, epoch, incarnation, floor, attempt and the remaining budget, no wall clock."""
    lane = caller()
    place(lane)
    hear(lane, Kind.RESULT, 0, body=BODY)
    _, effects = lane.place(BODY, 2, 4, 250 * MS, 100 * MS, trace=77, strict=True)
    assert isinstance(effects[0], SendTo)
    header = effects[0].header
    assert (header.session, header.epoch, header.incarnation) == (SESSION, EPOCH, INCARNATION)
    assert (header.seq, header.calls, header.attempt, header.floor) == (1, 2, 1, 1)
    assert (header.budget_ms, header.trace, header.status) == (150, 77, Status.STRICT)


def test_a_deadline_too_near_to_measure_is_not_sent_as_no_deadline():
    """A remaining budget under a millisecond travels as one, since zero means none."""
    _, effects = caller().place(BODY, 1, 4, 1000, 0)
    assert effects[0].header.budget_ms == 1


def test_nothing_is_sent_beyond_the_window_of_calls():
    """What has no credit waits, and goes in order when the floor rises."""
    lane = caller(window_calls=2)
    assert [place(lane)[1] for _ in range(4)] == [["REQ 0"], ["REQ 1"], [], []]
    assert hear(lane, Kind.RESULT, 1, body=BODY) == ["finish 1 OK"]  # the floor still stands at 0
    assert hear(lane, Kind.RESULT, 0, body=BODY) == ["finish 0 OK", "REQ 2", "REQ 3"]


def test_nothing_is_sent_beyond_the_window_of_bytes():
    """Bytes in flight are bounded, and return when the answer comes."""
    lane = caller(window_bytes=10)
    assert place(lane, size=6)[1] == ["REQ 0"]
    assert place(lane, size=6)[1] == []
    assert place(lane, size=1)[1] == []  # would fit; order forbids
    assert hear(lane, Kind.RESULT, 0, body=BODY) == ["finish 0 OK", "REQ 1", "REQ 2"]


def test_a_request_larger_than_the_window_travels_alone():
    """Else it could never go."""
    lane = caller(window_bytes=10)
    assert place(lane, size=2)[1] == ["REQ 0"]
    assert place(lane, size=50)[1] == []
    assert hear(lane, Kind.RESULT, 0, body=BODY) == ["finish 0 OK", "REQ 1"]
    assert place(lane, size=1)[1] == []
    assert hear(lane, Kind.RESULT, 1, body=BODY) == ["finish 1 OK", "REQ 2"]


def test_nothing_is_sent_without_a_connection():
    """Requests wait, and go in order when the handshake succeeds."""
    lane = caller(connected=False)
    assert [place(lane)[1] for _ in range(2)] == [[], []]
    assert words(lane.on_connected(0, 0)) == ["REQ 0", "REQ 1"]


# -- answers -------------------------------------------------------------------------------------------------------


def test_each_call_gets_one_outcome_whatever_is_said_again():
    """A second answer, of whatever kind, changes nothing."""
    lane = caller()
    place(lane)
    assert hear(lane, Kind.RESULT, 0, body=BODY) == ["finish 0 OK"]
    assert hear(lane, Kind.RESULT, 0, body=BODY) == []
    assert hear(lane, Kind.FAILURE, 0, Status.APP_ERROR) == []
    assert hear(lane, Kind.PROGRESS, 0, Status.RUNNING) == []
    assert lane.outstanding == 0


def test_replies_of_a_batch_come_one_by_one_in_any_order():
    """Each call of a batch has its own outcome; the place is free when all are there."""
    lane = caller()
    place(lane, 3)
    assert hear(lane, Kind.RESULT, 1, body=BODY) == ["finish 1 OK"]
    assert hear(lane, Kind.RESULT, 1, body=BODY) == []
    assert hear(lane, Kind.FAILURE, 0, Status.APP_ERROR, body=BODY) == ["finish 0 APP_ERROR"]
    assert lane.outstanding == 1
    assert hear(lane, Kind.FAILURE, 2, Status.PREDECESSOR) == ["finish 2 NOT_EXECUTED predecessor"]
    assert lane.outstanding == 0


def test_one_word_about_a_whole_batch_ends_all_its_calls():
    """A batch that never started is answered once."""
    lane = caller()
    place(lane, 3)
    assert hear(lane, Kind.FAILURE, 0, Status.SHUTDOWN, calls=3) == [
        "finish 0 NOT_EXECUTED shutdown", "finish 1 NOT_EXECUTED shutdown", "finish 2 NOT_EXECUTED shutdown",
    ]  # fmt: skip


def test_every_failure_word_has_its_outcome():
    """What the worker says decides what is known."""
    expected = {
        Status.APP_ERROR: "finish 0 APP_ERROR",
        Status.NOT_STARTED: "finish 0 NOT_EXECUTED refused",
        Status.EXPIRED: "finish 0 NOT_EXECUTED deadline",
        Status.CANCELLED: "finish 0 NOT_EXECUTED deadline",  # nobody cancelled: it was the deadline's CANCEL
        Status.PREDECESSOR: "finish 0 NOT_EXECUTED predecessor",
        Status.SHUTDOWN: "finish 0 NOT_EXECUTED shutdown",
        Status.UNKNOWN_LANE: "finish 0 NOT_EXECUTED protocol",
        Status.EVICTED: "finish 0 UNKNOWN evicted",
        Status.HELD: "finish 0 UNKNOWN protocol",
    }
    for status, outcome in expected.items():
        lane = caller()
        place(lane)
        assert hear(lane, Kind.FAILURE, 0, status) == [outcome]


def test_an_answer_to_what_was_never_sent_is_ignored():
    """A waiting request cannot be answered: such a word is foreign."""
    lane = caller(connected=False)
    place(lane)
    for kind in (Kind.RESULT, Kind.FAILURE, Kind.PROGRESS, Kind.CHUNK, Kind.END):
        assert hear(lane, kind, 0) == []
    assert words(lane.on_connected(0, 0)) == ["REQ 0"]


# -- silence, loss, reconnects -------------------------------------------------------------------------------------


def test_silence_is_answered_by_a_probe_and_never_by_the_payload():
    """Asking costs a header; pauses between questions grow to a limit."""
    lane = caller()
    place(lane)
    assert timer(lane, 99 * MS) == []
    now, gaps = 0, []
    for _ in range(8):
        due = lane.due_ns
        gaps.append((due - now) // MS)
        now = due
        assert timer(lane, now) == ["PROBE 0"]
    assert gaps == [100, 200, 400, 800, 1600, 2000, 2000, 2000]
    assert lane.retransmissions == 0


def test_a_request_known_to_have_arrived_is_asked_about_seldom():
    """A call may run for hours."""
    lane = caller()
    place(lane)
    hear(lane, Kind.PROGRESS, 0, Status.RUNNING, now=10 * MS)
    assert timer(lane, 500 * MS) == []
    assert timer(lane, 510 * MS) == ["PROBE 0"]


def test_a_gap_has_everything_behind_it_sent_again_once():
    """What the worker has not seen goes again with the next attempt number, however often the gap is told."""
    lane = caller()
    for _ in range(3):
        place(lane)
    assert hear(lane, Kind.NACK, 1, Status.GAP) == ["REQ 1", "REQ 2"]
    assert hear(lane, Kind.NACK, 1, Status.GAP) == []
    assert lane.retransmissions == 2
    assert hear(lane, Kind.NACK, 1, Status.GAP, now=100 * MS) == ["REQ 1", "REQ 2"]  # those were lost, too


def test_a_stale_gap_does_not_send_what_has_arrived():
    """A request the worker spoke of is not behind a gap."""
    lane = caller()
    place(lane)
    hear(lane, Kind.PROGRESS, 0, Status.QUEUED)
    assert hear(lane, Kind.NACK, 0, Status.GAP) == []


def test_a_reconnect_sends_what_was_not_seen_and_asks_about_the_rest():
    """The worker's cursor decides; order is kept."""
    lane = caller(window_calls=3)
    for _ in range(4):
        place(lane)
    lane.on_disconnected()
    assert timer(lane, 10_000 * MS) == []  # nobody there to ask
    assert words(lane.on_connected(1, 10_000 * MS)) == ["PROBE 0", "REQ 1", "REQ 2"]


def test_a_full_window_of_the_callee_is_tried_again_later():
    """NACK WINDOW is no outcome; after a pause a PROBE leads to a new transmission."""
    lane = caller()
    place(lane)
    assert hear(lane, Kind.NACK, 0, Status.WINDOW, now=MS) == []
    assert timer(lane, 101 * MS) == ["PROBE 0"]
    assert hear(lane, Kind.NACK, 0, Status.GAP, now=101 * MS) == ["REQ 0"]


def test_a_place_the_callee_knows_otherwise_is_unknown():
    """Two requests of one number: nothing is proved, and the place is given up."""
    lane = caller()
    place(lane, 2)
    assert hear(lane, Kind.NACK, 0, Status.MISMATCH, calls=2) == [
        "finish 0 UNKNOWN protocol",
        "finish 1 UNKNOWN protocol",
    ]
    assert lane.outstanding == 0


# -- deadlines -----------------------------------------------------------------------------------------------------


def test_a_deadline_before_the_request_is_sent_leaves_a_skip():
    """NOT_EXECUTED at once, and the place still goes out, so that the sequence has no hole."""
    lane = caller(connected=False)
    place(lane, 2, deadline=50 * MS)
    place(lane)
    assert lane.due_ns == 50 * MS
    assert timer(lane, 50 * MS) == ["finish 0 NOT_EXECUTED deadline", "finish 1 NOT_EXECUTED deadline"]
    assert words(lane.on_connected(0, 60 * MS)) == ["SKIP 0+2", "REQ 2"]
    assert hear(lane, Kind.FAILURE, 0, Status.EXPIRED, calls=2) == []
    assert lane.outstanding == 1


def test_a_deadline_after_it_was_sent_asks_and_takes_the_answer():
    """CANCEL goes out; proved not started is NOT_EXECUTED, a result that was already there is OK."""
    for kind, status, outcome in (
        (Kind.FAILURE, Status.CANCELLED, "finish 0 NOT_EXECUTED deadline"),
        (Kind.FAILURE, Status.EXPIRED, "finish 0 NOT_EXECUTED deadline"),
        (Kind.RESULT, Status.OK, "finish 0 OK"),
        (Kind.FAILURE, Status.STOPPED, "finish 0 APP_ERROR deadline"),
    ):
        lane = caller()
        place(lane, deadline=50 * MS)
        assert timer(lane, 50 * MS) == ["CANCEL 0"]
        assert hear(lane, kind, 0, status, now=60 * MS) == [outcome]


def test_a_method_that_runs_at_its_deadline_has_a_moment_to_stop():
    """A worker that says it runs is waited for shortly: its word that it stopped is exact, ours is UNKNOWN."""
    lane = caller()
    place(lane, deadline=50 * MS)
    timer(lane, 50 * MS)
    assert hear(lane, Kind.PROGRESS, 0, Status.RUNNING, now=60 * MS) == []
    assert hear(lane, Kind.FAILURE, 0, Status.STOPPED, now=61 * MS) == ["finish 0 APP_ERROR deadline"]
    lane = caller()
    place(lane, deadline=50 * MS)
    timer(lane, 50 * MS)
    hear(lane, Kind.PROGRESS, 0, Status.RUNNING, now=60 * MS)
    assert "finish 0 UNKNOWN deadline" in timer(lane, 60 * MS + TIMING.stop_grace)


def test_a_stop_says_who_asked_for_it():
    """After the user's cancel a stopped method reads cancelled, with its outcome APP_ERROR: it had started."""
    lane = caller()
    place(lane)
    lane.cancel(0, 5)
    assert hear(lane, Kind.FAILURE, 0, Status.STOPPED) == ["finish 0 APP_ERROR cancelled"]


def test_no_answer_after_a_deadline_is_unknown_at_the_end_of_the_grace():
    """One outcome by deadline plus grace, whatever is silent; the place stays taken until the worker speaks."""
    lane = caller()
    place(lane, deadline=50 * MS)
    assert timer(lane, 50 * MS) == ["CANCEL 0"]
    assert timer(lane, 150 * MS)[0] == "finish 0 UNKNOWN deadline"
    assert lane.outstanding == 1
    assert hear(lane, Kind.RESULT, 0, body=BODY) == []
    assert lane.outstanding == 0


def test_a_deadline_without_a_connection_still_ends_in_time():
    """The outcome does not wait for the network."""
    lane = caller()
    place(lane, deadline=50 * MS)
    lane.on_disconnected()
    assert timer(lane, 50 * MS) == []
    assert timer(lane, 150 * MS) == ["finish 0 UNKNOWN deadline"]


def test_a_request_past_its_deadline_is_never_sent_again_to_run():
    """When the connection comes back its place goes out as SKIP."""
    lane = caller()
    place(lane, deadline=50 * MS)
    lane.on_disconnected()
    timer(lane, 50 * MS)
    timer(lane, 150 * MS)
    assert words(lane.on_connected(0, 200 * MS)) == ["SKIP 0"]


# -- cancel --------------------------------------------------------------------------------------------------------


def test_cancel_before_it_was_sent_is_cancelled_at_once():
    """CANCELLED is proved; the place goes out as SKIP."""
    lane = caller(window_calls=1)
    place(lane)
    place(lane)
    assert words(lane.cancel(1, 0)) == ["finish 1 CANCELLED cancelled"]
    assert words(lane.cancel(1, 0)) == []
    assert hear(lane, Kind.RESULT, 0, body=BODY) == ["finish 0 OK", "SKIP 1"]


def test_cancel_after_it_was_sent_asks_the_callee():
    """Its word is the outcome: CANCELLED if it had not started, else what it ends with."""
    for kind, status, outcome in (
        (Kind.FAILURE, Status.CANCELLED, ["finish 0 CANCELLED cancelled"]),
        (Kind.FAILURE, Status.EXPIRED, ["finish 0 CANCELLED cancelled"]),
        (Kind.RESULT, Status.OK, ["finish 0 OK"]),
        (Kind.PROGRESS, Status.RUNNING, []),
    ):
        lane = caller()
        place(lane)
        assert words(lane.cancel(0, 0)) == ["CANCEL 0"]
        assert hear(lane, kind, 0, status) == outcome


def test_a_lost_cancel_is_said_again():
    """Of a request that nobody wants, silence asks by CANCEL instead of PROBE."""
    lane = caller()
    place(lane)
    lane.cancel(0, 0)
    assert timer(lane, 100 * MS) == ["CANCEL 0"]
    hear(lane, Kind.PROGRESS, 0, Status.RUNNING, now=100 * MS)
    assert timer(lane, 600 * MS) == ["CANCEL 0"]


def test_a_reported_gap_is_no_proof_for_a_cancelled_request():
    """A later place may be held by the worker: it goes out as SKIP, and the answer to that decides."""
    lane = caller()
    place(lane)
    place(lane)
    lane.cancel(1, 0)
    assert hear(lane, Kind.NACK, 0, Status.GAP) == ["REQ 0", "SKIP 1"]
    assert hear(lane, Kind.FAILURE, 1, Status.EXPIRED) == ["finish 1 CANCELLED cancelled"]


def test_a_reported_gap_is_no_proof_for_an_expired_request():
    """As for a cancelled one."""
    lane = caller()
    place(lane, deadline=10 * MS)
    timer(lane, 10 * MS)
    assert hear(lane, Kind.NACK, 0, Status.GAP, now=11 * MS) == ["SKIP 0"]
    assert hear(lane, Kind.RESULT, 0, body=BODY, now=12 * MS) == ["finish 0 OK"]


def test_cancel_of_an_answered_call_does_nothing():
    """Its outcome stands."""
    lane = caller()
    place(lane)
    hear(lane, Kind.RESULT, 0, body=BODY)
    assert words(lane.cancel(0, 0)) == []


# -- the end of an incarnation -------------------------------------------------------------------------------------


def test_the_end_of_the_callee_settles_every_call_by_what_is_known():
    """Never sent is proved; sent is UNKNOWN with the evidence and how far it was; answered stands."""
    lane = caller(window_calls=3)
    for _ in range(4):
        place(lane)
    hear(lane, Kind.RESULT, 0, body=BODY)
    lane.on_disconnected()
    place(lane)
    hear(lane, Kind.PROGRESS, 1, Status.RUNNING)
    effects = lane.on_dead("worker_exit", "killed by signal 9")
    assert words(effects) == [
        "finish 1 UNKNOWN worker_exit", "finish 2 UNKNOWN worker_exit", "finish 3 UNKNOWN worker_exit",
        "finish 4 NOT_EXECUTED worker_exit",
    ]  # fmt: skip
    assert [effect.outcome.evidence for effect in effects] == [
        "killed by signal 9; the call was running", "killed by signal 9; the call was sent, not confirmed",
        "killed by signal 9; the call was sent, not confirmed", "killed by signal 9",
    ]  # fmt: skip
    assert words(lane.on_dead("lease", "again")) == []
    assert lane.next_seq == 5


def test_a_callee_given_up_for_its_silence_has_every_call_settled_and_may_come_back():
    """UNKNOWN if it was sent, NOT_EXECUTED if not; back, what it has is asked not to begin, the rest skipped."""
    lane = caller(window_calls=2)
    place(lane)
    place(lane)
    place(lane)
    hear(lane, Kind.PROGRESS, 0, Status.RUNNING)
    lane.on_disconnected()
    told = lane.give_up("lease", "its agent was silent for 5.0 s", 10 * MS)
    assert words(told) == ["finish 0 UNKNOWN lease", "finish 1 UNKNOWN lease", "finish 2 NOT_EXECUTED lease"]
    assert told[0].outcome.evidence == "its agent was silent for 5.0 s; the call was running"
    assert lane.give_up("lease", "still", 11 * MS) == []
    lane.validate()
    assert words(lane.on_connected(1, 20 * MS)) == ["CANCEL 0", "SKIP 1"]
    assert place(lane, now=21 * MS) == (3, [])
    assert hear(lane, Kind.RESULT, 0, body=BODY, now=22 * MS) == ["SKIP 2"]
    assert hear(lane, Kind.FAILURE, 1, Status.CANCELLED, now=23 * MS) == ["REQ 3"]
    assert hear(lane, Kind.FAILURE, 2, Status.CANCELLED, now=24 * MS) == []
    assert hear(lane, Kind.RESULT, 3, body=BODY, now=25 * MS) == ["finish 3 OK"]
    assert lane.outstanding == 0


def test_a_dead_lane_refuses_and_hears_nothing():
    """A new call is NOT_EXECUTED at once; what the dead still says is ignored."""
    lane = caller()
    place(lane)
    lane.on_dead("fenced", "replaced")
    assert hear(lane, Kind.RESULT, 0, body=BODY) == []
    assert place(lane, 2) == (1, ["finish 1 NOT_EXECUTED fenced", "finish 2 NOT_EXECUTED fenced"])
    assert words(lane.on_connected(0, 0)) == []


def test_partly_answered_batches_keep_their_answers_when_the_callee_dies():
    """Only the open calls are settled."""
    lane = caller()
    place(lane, 3)
    hear(lane, Kind.RESULT, 1, body=BODY)
    assert words(lane.on_dead("worker_exit", "gone")) == [
        "finish 0 UNKNOWN worker_exit",
        "finish 2 UNKNOWN worker_exit",
    ]


# -- streams -------------------------------------------------------------------------------------------------------


def test_items_come_in_order_and_each_once():
    """A doubled item is dropped; a missing one is asked for, once, before the end counts."""
    lane = caller()
    place(lane)
    assert hear(lane, Kind.CHUNK, 0, floor=0, body=BODY) == ["item 0 #0"]
    assert hear(lane, Kind.CHUNK, 0, floor=0, body=BODY) == []
    assert hear(lane, Kind.CHUNK, 0, floor=2, body=BODY) == ["PROBE 0"]
    assert hear(lane, Kind.CHUNK, 0, floor=3, body=BODY) == []
    assert hear(lane, Kind.END, 0, Status.OK, floor=4) == []
    assert [hear(lane, Kind.CHUNK, 0, floor=n, body=BODY) for n in (1, 2, 3)] == [
        ["item 0 #1"],
        ["item 0 #2"],
        ["item 0 #3"],
    ]
    assert hear(lane, Kind.END, 0, Status.OK, floor=4) == ["finish 0 OK"]


def test_the_end_of_a_stream_carries_its_outcome():
    """END says APP_ERROR as FAILURE does."""
    lane = caller()
    place(lane)
    assert hear(lane, Kind.END, 0, Status.APP_ERROR, body=BODY) == ["finish 0 APP_ERROR"]


def test_credit_that_was_lost_is_said_again():
    """A lost ACK, or one given while disconnected, must not stop the stream."""
    lane = caller()
    place(lane)
    hear(lane, Kind.CHUNK, 0, floor=0, body=BODY)
    assert words(lane.consumed(0, 1)) == ["ACK 0 #1"]
    assert timer(lane, 500 * MS) == ["PROBE 0", "ACK 0 #1"]
    lane.on_disconnected()
    assert words(lane.consumed(0, 2)) == []
    assert words(lane.on_connected(1, 600 * MS)) == ["PROBE 0", "ACK 0 #2"]


def test_no_item_is_delivered_after_the_outcome():
    """A stream that was given up delivers nothing more."""
    lane = caller()
    place(lane, deadline=10 * MS)
    timer(lane, 10 * MS)
    timer(lane, 10 * MS + TIMING.cancel_grace)
    assert hear(lane, Kind.CHUNK, 0, floor=0, body=BODY) == []


# -- words and timers ----------------------------------------------------------------------------------------------


def test_whereabouts_says_how_far_a_call_is():
    """Every state has its words."""
    lane = caller(window_calls=1)
    place(lane)
    place(lane)
    assert lane.whereabouts(0, 0) == "sent, not confirmed"
    assert lane.whereabouts(1, 0) == "not sent"
    assert lane.whereabouts(9, 0) == "not placed"
    hear(lane, Kind.PROGRESS, 0, Status.QUEUED, now=0)
    assert lane.whereabouts(0, 0).startswith("arrived, not started")
    hear(lane, Kind.PROGRESS, 0, Status.RUNNING, now=1_000 * MS)
    assert lane.whereabouts(0, 3_500 * MS) == "running since 2.5 s"
    hear(lane, Kind.RESULT, 0, body=BODY)
    assert lane.whereabouts(0, 0) == "answered"


def test_an_idle_lane_needs_no_timer():
    """When all is answered nothing is due, but for one cheap look."""
    lane = caller()
    place(lane, deadline=50 * MS)
    hear(lane, Kind.RESULT, 0, body=BODY)
    assert timer(lane, 50 * MS) == []
    assert lane.due_ns == NEVER


def test_outcomes_carry_the_number_of_transmissions():
    """Retries show in the outcome."""
    lane = caller()
    place(lane)
    hear(lane, Kind.NACK, 0, Status.GAP)
    effects = lane.receive(reply(Kind.RESULT, 0), BODY, 0)
    assert effects[0].outcome.attempts == 2
    assert effects[0].outcome.kind is OutcomeKind.OK
    assert effects[0].outcome.payload is BODY
