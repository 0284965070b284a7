from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time

import pytest

import zbus
from controller.futures import BatchFuture, wait_future_ordered
from controller.outcomes import WaitTimeout
from fake_placer import FakeState, lost, make_group, ok, raised, refused
from waiting import wait_until
from zbus.engine import AnyOne, First, Same
from zbus.errors import (
    BatchError,
    CallCancelled,
    CallTimeout,
    CodecError,
    NotExecuted,
    OutcomeUnknown,
    RefLostError,
    RemoteError,
    Unavailable,
    WorkerLost,
)
from zbus.protocol.messages import Outcome, OutcomeKind


class Actor(zbus.Engine):
    @zbus.endpoint()
    def train(self, x=0): ...

    @zbus.endpoint(collect=Same())
    def version(self): ...

    @zbus.endpoint(collect=First())
    def first(self): ...

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen")
    async def generate(self, prompt): ...

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen")
    async def tokens(self, prompt):
        yield prompt


DEADLINE = Outcome(OutcomeKind.UNKNOWN, None, "deadline", "no word from the worker; running")
CANCELLED = Outcome(OutcomeKind.CANCELLED, None, "cancelled", "cancelled before it was sent", 0)


# -- answers ---------------------------------------------------------------------------------------------------------


def test_results_come_in_rank_order_whatever_order_they_arrive_in():
    """The answer of rank 0 is first, also when it came last."""
    group, placer, _ = make_group(Actor, 3)
    future = group.train.submit()
    for rank in (2, 0, 1):
        assert not future.done()
        placer.requests[rank].answer(ok(f"r{rank}"))
    assert future.done()
    assert future.result() == ["r0", "r1", "r2"]


def test_as_completed_yields_ranks_as_they_answer():
    """Each rank's answer can be taken before the others have come; an error is the value of its rank."""
    group, placer, _ = make_group(Actor, 3)
    future = group.train.submit()
    placer.requests[1].answer(ok("early"))
    arriving = future.as_completed()
    assert next(arriving) == (1, "early")
    placer.requests[2].answer(raised(ValueError("bad")))
    failed = next(arriving)
    assert (failed.rank, failed.failed) == (2, True)
    assert isinstance(failed.value, ValueError)
    placer.requests[0].answer(ok("late"))
    assert [tuple(result) for result in arriving] == [(0, "late")]


def test_as_completed_waits_for_what_has_not_come():
    """The iterator blocks until the next rank answers, on another thread."""
    group, placer, _ = make_group(Actor, 1)
    future = group.train.submit()
    threading.Timer(0.02, lambda: placer.requests[0].answer(ok(1))).start()
    assert [tuple(result) for result in future.as_completed(timeout=10)] == [(0, 1)]


def test_values_are_decoded_once_by_who_asks():
    """Asking twice gives the same objects, and decoding never runs under the bus's lock."""
    group, placer, _ = make_group(Actor, 1)
    future = group.train.submit()
    placer.requests[0].answer(ok([1, 2]))
    assert future.result()[0] is future.result()[0]
    assert future.results()[0] is future.result()[0]


def test_same_and_first_are_merged():
    """The declared collect makes the answer."""
    group, placer, _ = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(ok(7))
    assert group.version() == 7
    placer.auto = lambda request: request.answer(ok(request.member))
    assert group.first() == 0
    with pytest.raises(zbus.ConfigError, match="rank 0 answered 0; rank 1 answered 1"):
        group.version()


# -- errors ----------------------------------------------------------------------------------------------------------


def test_one_called_rank_raises_its_error_itself():
    """A remote ValueError of a call to one rank is caught as ValueError and says where it was."""
    group, placer, _ = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(raised(ValueError("bad batch")))
    with pytest.raises(ValueError, match="bad batch") as caught:
        group[1].train()
    error = caught.value
    assert isinstance(error, RemoteError)
    assert (error.role, error.rank, error.host, error.pid, error.method) == ("actor", 1, "box", 101, "train")
    assert error.outcome == "APP_ERROR"
    assert "bad batch" in error.remote_traceback


def test_several_called_ranks_raise_one_error_that_keeps_the_good_results():
    """One of three ranks fails: a BatchError with the others' results (B8), fit for except*."""
    group, placer, _ = make_group(Actor, 3)
    future = group.train.submit()
    placer.requests[0].answer(ok("a"))
    placer.requests[1].answer(raised(KeyError("x")))
    assert not future.done()
    placer.requests[2].answer(ok("c"))
    with pytest.raises(BatchError, match=r"actor\.train failed on 1 of 3 ranks, first on rank 1: KeyError") as caught:
        future.result()
    assert caught.value.results == {0: "a", 2: "c"}
    assert isinstance(caught.value.root, KeyError)
    assert caught.value.collateral == ()
    assert caught.value.__notes__ == ["answered: ranks 0, 2", "failed: rank 1 KeyError"]
    caught_by_star = []
    try:
        future.result()
    except* KeyError as group_error:
        caught_by_star = list(group_error.exceptions)
    assert caught_by_star == [caught.value.root]


def test_a_failure_waits_for_the_whole_batch():
    """The first failure does not abandon the other ranks: the error comes when all are settled (B8)."""
    group, placer, _ = make_group(Actor, 2)
    future = group.train.submit()
    placer.requests[0].answer(raised(ValueError("first")))
    with pytest.raises(WaitTimeout):
        future.result(timeout=0.01)
    placer.requests[1].answer(ok(1))
    with pytest.raises(BatchError):
        future.result(timeout=0)


def test_a_failure_is_told_while_the_other_ranks_go_on():
    """After the first error the others get a moment, then the caller hears of it; they are not cancelled."""
    group, placer, _ = make_group(Actor, 3)
    future = group.train.submit()
    placer.requests[1].answer(raised(ValueError("root")))
    placer.requests[2].answer(ok("c"))
    began = time.monotonic()
    with pytest.raises(BatchError) as caught:
        future.result()
    assert 0.4 < time.monotonic() - began < 5
    assert isinstance(caught.value.root, ValueError)
    assert caught.value.results == {2: "c"}
    assert caught.value.late == {0: "running"}
    told = "actor/2 finished this call; actor/0 still running it; nothing was re-run"
    assert caught.value.root.facts["peers"] == told
    assert placer.cancelled == []
    assert not future.done()
    placer.requests[0].answer(ok("a"))
    with pytest.raises(BatchError) as settled:
        future.result()
    assert (settled.value.results, settled.value.late) == ({0: "a", 2: "c"}, {})


def test_an_echo_is_not_told_before_its_cause():
    """A peer's collective broke because rank 1 died: its error waits for the news of the death and is collateral."""
    group, placer, _ = make_group(Actor, 3)
    future = group.train.submit()
    placer.requests[0].answer(raised(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:9")))
    threading.Timer(0.7, lambda: placer.requests[1].answer(lost())).start()
    with pytest.raises(BatchError) as caught:
        future.result()
    assert isinstance(caught.value.root, WorkerLost)
    assert [error.rank for error in caught.value.exceptions] == [1, 0]
    assert caught.value.late == {2: "running"}


def test_the_loss_of_a_worker_is_told_while_its_peers_hang():
    """Peers that wait for the dead rank in a collective are not waited for: the error says how far each is."""
    group, placer, roster = make_group(Actor, 3)
    future = group.train.submit()
    roster.members[2].where = "arrived, not started"
    placer.requests[0].answer(lost())
    with pytest.raises(BatchError) as caught:
        future.result()
    assert isinstance(caught.value.root, WorkerLost)
    assert caught.value.late == {1: "running", 2: "arrived, not started"}
    assert not future.done()
    assert placer.cancelled == placer.placed
    with pytest.raises(BatchError) as awaited:
        asyncio.run(_awaited(future))
    assert awaited.value.late == caught.value.late
    placer.requests[1].answer(ok("b"))
    placer.requests[2].answer(CANCELLED)
    with pytest.raises(BatchError) as settled:
        future.result()
    assert (settled.value.results, settled.value.late) == ({1: "b"}, {})
    assert [error.rank for error in settled.value.exceptions] == [0, 2]


def test_a_lost_worker_that_is_proved_not_to_have_begun_is_lost_too():
    """Peers may wait for it in a collective all the same; what has not begun on them is cancelled."""
    group, placer, _ = make_group(Actor, 2)
    future = group.train.submit()
    words = "killed by SIGKILL; the call was not started: the worker died before"
    placer.requests[0].answer(Outcome(OutcomeKind.NOT_EXECUTED, None, "worker_exit", words))
    with pytest.raises(BatchError) as caught:
        future.result(timeout=20)
    assert isinstance(caught.value.root, NotExecuted)
    assert caught.value.late == {1: "running"}
    assert placer.cancelled == placer.placed


async def _awaited(future):
    return await future


def test_a_call_to_a_dead_rank_says_how_it_died():
    """Nothing is sent to the others; the refusal names the dead rank and what is known of it."""
    group, _, roster = make_group(Actor, 2)
    roster.members[1].state = FakeState.DEAD
    roster.members[1].evidence = "exited with code 7"
    with pytest.raises(Unavailable, match=r"actor/1 died, so `train` was sent to no rank") as caught:
        group.train()
    assert (caught.value.rank, caught.value.method) == (1, "train")
    assert caught.value.facts["evidence"] == "exited with code 7"


def test_every_call_is_recorded_once_per_rank():
    """The caller's side of a call is one trace record with its ids, times in order and sizes."""
    from zbus.trace.tracer import CLIENT, Tracer, use_tracer

    tracer = Tracer("controller", 0)
    tracer.set_level("rpc")
    group, placer, _ = make_group(Actor, 2)
    with use_tracer(tracer):
        placer.auto = lambda request: request.answer(ok(1))
        group.train(5)
        placer.auto = None
        future = group[1].train.submit()
    placer.requests[2].answer(raised(ValueError("x")))
    assert isinstance(future.exception(), ValueError)
    records = [record for ring in tracer.rings() for record in ring.items if record[0] == CLIENT]
    assert [(record[2], record[7], record[15]) for record in records] == [
        ("actor/0", "train", "OK"),
        ("actor/1", "train", "OK"),
        ("actor/1", "train", "APP_ERROR"),
    ]
    for record in records:
        times = record[8:13]
        assert all(times)
        assert list(times) == sorted(times)
        assert min(record[13:15]) > 0


def test_each_ranks_record_says_when_its_own_request_left():
    """Of many ranks the last one's request leaves later than the first one's, and the trace shows that."""
    from zbus.trace.tracer import CLIENT, Tracer, use_tracer

    tracer = Tracer("controller", 0)
    tracer.set_level("rpc")
    group, placer, _ = make_group(Actor, 3)
    moments = []

    def answer(request):
        if not moments:
            moments.extend(time.monotonic_ns() + rank for rank in range(3))
            request.placed.sent_ns = moments
        request.answer(ok(request.member))

    with use_tracer(tracer):
        placer.auto = answer
        group.train()
    records = [record for ring in tracer.rings() for record in ring.items if record[0] == CLIENT]
    assert [record[10] for record in records] == moments


def test_the_first_failing_rank_is_root_and_its_echoes_are_collateral():
    """Peers that fail in a collective since rank 2 died are not the cause, though they were heard first."""
    group, placer, _ = make_group(Actor, 3)
    future = group.train.submit()
    placer.requests[0].answer(raised(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:9")))
    placer.requests[1].answer(raised(ConnectionResetError("reset")))
    placer.requests[2].answer(lost())
    with pytest.raises(BatchError) as caught:
        future.result()
    assert isinstance(caught.value.root, WorkerLost)
    assert caught.value.root.rank == 2
    assert [error.rank for error in caught.value.collateral] == [0, 1]


def test_an_own_error_heard_first_is_root():
    """A rank that raises and a rank that then dies: the earlier one is the cause."""
    group, placer, _ = make_group(Actor, 2)
    future = group.train.submit()
    placer.requests[1].answer(raised(ValueError("loss is NaN")))
    placer.requests[0].answer(lost())
    with pytest.raises(BatchError) as caught:
        future.result()
    assert isinstance(caught.value.root, ValueError)


@pytest.mark.parametrize(
    ("outcome", "cls", "text"),
    [
        (
            lost(),
            WorkerLost,
            r"actor/0 died during `train` \(batch 1\): killed by SIGKILL; the call may have run: it was running",
        ),
        (lost("silent for 5 s", "lease"), WorkerLost, r"actor/0 was lost during `train` \(batch 1\): silent for 5 s"),
        (Outcome(OutcomeKind.NOT_EXECUTED, None, "worker_exit", "", 0), NotExecuted, "died before it was sent `train`"),
        (DEADLINE, CallTimeout, r"passed its deadline of 9 s, it may have run: no word"),
        (Outcome(OutcomeKind.NOT_EXECUTED, None, "deadline", "", 0), CallTimeout, "it did not run"),
        (Outcome(OutcomeKind.NOT_EXECUTED, None, "predecessor", "call 0 failed"), NotExecuted, "predecessor.*call 0"),
        (CANCELLED, CallCancelled, "was cancelled before it started"),
        (Outcome(OutcomeKind.UNKNOWN, None, "evicted", "reply gone"), OutcomeUnknown, r"\(evicted\): reply gone"),
    ],
)
def test_every_outcome_has_its_error(outcome, cls, text):
    """The class says whether it ran; the message names role, method and rank; fields carry the facts."""
    group, placer, _ = make_group(Actor, 1)
    placer.auto = lambda request: request.answer(outcome)
    with pytest.raises(cls, match=text) as caught:
        group[0].options(deadline=9, retries=0).train()
    assert type(caught.value) is cls
    assert str(caught.value).startswith(("actor.train on rank 0 ", "actor/0 "))
    assert (caught.value.outcome, caught.value.reason) == (outcome.kind.value, outcome.reason)


def test_a_call_that_could_not_be_started_raises_why_and_did_not_run():
    """No such endpoint, a value that is gone: that error; arguments that did not come: NotExecuted and the cause."""
    group, placer, _ = make_group(Actor, 1)
    for told, cls in ((AttributeError("no x"), AttributeError), (RefLostError("gone"), RefLostError)):
        placer.auto = lambda request, told=told: request.answer(refused(told))
        future = group.train.submit()
        with pytest.raises(cls) as caught:
            future.result()
        assert (caught.value.outcome, caught.value.reason) == ("NOT_EXECUTED", "refused")
        assert [one.outcome for one in future.outcomes()] == ["NOT_EXECUTED"]
    error = CodecError("8 bytes could not be pulled", hint="open the port")
    placer.auto = lambda request: request.answer(refused(error))
    with pytest.raises(
        NotExecuted, match=r"actor.train on rank 0 did not run: its arguments .* could not be pulled"
    ) as caught:
        group.train()
    assert isinstance(caught.value.__cause__, RemoteError)
    assert (caught.value.outcome, caught.value.reason) == ("NOT_EXECUTED", "refused")


def test_errors_survive_copy_and_pickle():
    """Errors of calls can be sent to another local process and copied."""
    group, placer, _ = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(raised(ValueError("x")) if request.member else lost())
    with pytest.raises(BatchError) as caught:
        group.train()
    for clone in (copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(clone, BatchError)
        assert [type(error).__name__ for error in clone.exceptions] == ["WorkerLost", "RemoteValueError"]


def test_exception_returns_what_result_would_raise():
    """exception() waits and returns the error, or None."""
    group, placer, _ = make_group(Actor, 1)
    placer.auto = lambda request: request.answer(lost())
    assert isinstance(group[0].options(retries=0).train.submit().exception(), WorkerLost)
    placer.auto = lambda request: request.answer(ok(1))
    assert group.train.submit().exception() is None


# -- time ------------------------------------------------------------------------------------------------------------


def test_a_timeout_names_who_is_late_and_keeps_the_answers():
    """7 of 8 answer: the eighth is named with its state, the seven results are kept."""
    group, placer, roster = make_group(Actor, 8)
    future = group.train.submit()
    for rank in range(8):
        if rank != 5:
            placer.requests[rank].answer(ok(rank))
    roster.members[5].where = "arrived, not started"
    with pytest.raises(TimeoutError, match=r"1 of 8 ranks not answered within 0.01 s: rank 5 arrived") as caught:
        future.result(timeout=0.01)
    assert isinstance(caught.value, CallTimeout)
    assert caught.value.late == {5: "arrived, not started"}
    assert caught.value.results == {rank: rank for rank in range(8) if rank != 5}
    placer.requests[5].answer(ok(5))
    assert future.result() == list(range(8))


def test_passed_deadlines_keep_the_answers():
    """7 of 8 answer before the deadline: one CallTimeout for the eighth, seven results kept."""
    group, placer, _ = make_group(Actor, 8)
    placer.auto = lambda request: request.answer(ok(request.member) if request.member != 3 else DEADLINE)
    with pytest.raises(BatchError) as caught:
        group.train()
    assert sorted(caught.value.results) == [0, 1, 2, 4, 5, 6, 7]
    assert [error.rank for error in caught.value.exceptions] == [3]
    assert isinstance(caught.value.root, CallTimeout)


def test_outcomes_tell_each_ranks_state():
    """outcomes() never waits and never raises: answered, running, dead."""
    group, placer, roster = make_group(Actor, 3)
    future = group.train.submit()
    placer.requests[0].answer(ok(1))
    roster.members[2].state = FakeState.DEAD
    roster.members[2].evidence = "exited with code 7"
    states = [(known.rank, known.outcome, known.state) for known in future.outcomes()]
    assert states == [(0, "OK", "answered"), (1, None, "running"), (2, None, "dead: exited with code 7")]


def test_there_is_a_finite_default_deadline():
    """A call without a stated deadline gets the group's; the endpoint's and the caller's win over it."""
    group, placer, _ = make_group(Actor, 1)
    placer.auto = lambda request: request.answer(ok(1))
    group.train()
    group.options(deadline="2m").train()
    group.train.options(deadline=3)()
    assert [placed.deadline_s for placed in placer.placed] == [1800.0, 120.0, 3.0]


# -- callbacks, cancelling ---------------------------------------------------------------------------------------------


def test_done_callbacks_never_run_under_the_bus_lock():
    """A callback may itself call and wait; it runs on a thread of its own."""
    group, placer, _ = make_group(Actor, 1)
    seen: list[object] = []

    def callback(future: BatchFuture) -> None:
        placer.auto = lambda request: request.answer(ok("nested"))
        seen.append((future.result(), group.train(), threading.current_thread().name))

    future = group.train.submit()
    future.add_done_callback(callback)
    placer.requests[0].answer(ok("first"))
    wait_until(lambda: seen, what="the callback")
    assert seen == [(["first"], ["nested"], "zbus-callbacks")]


def test_a_callback_on_a_done_future_runs_at_once():
    """Adding a callback late loses nothing."""
    group, placer, _ = make_group(Actor, 1)
    placer.auto = lambda request: request.answer(ok(1))
    seen: list[object] = []
    group.train.submit().add_done_callback(seen.append)
    assert len(seen) == 1


def test_cancel_asks_the_bus_and_the_outcome_decides():
    """cancel() sends a cancel; result() then raises what the worker said."""
    group, placer, _ = make_group(Actor, 1)
    future = group.train.submit()
    future.cancel()
    assert placer.cancelled == placer.placed
    assert not future.done()
    placer.requests[0].answer(CANCELLED)
    with pytest.raises(BatchError if len(group) > 1 else CallCancelled):
        future.result()


def test_nothing_is_placed_when_a_member_is_not_ready():
    """Unavailable is raised at once for a call that may not wait."""
    group, placer, roster = make_group(Actor, 2)
    roster.members[1].state = FakeState.CONNECTING
    with pytest.raises(Unavailable, match="actor/1 is connecting"):
        group.train()
    assert placer.placed == []


def test_a_call_waits_for_the_verdict_on_a_lost_connection():
    """A member whose connection was lost is dead or comes back: the call is placed then, or the death is told."""
    group, placer, roster = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(ok(request.member))
    roster.members[1].state = FakeState.SUSPECT
    future = group.train.submit()
    assert placer.placed == []
    roster.members[1].state = FakeState.READY
    assert future.result(10) == [0, 1]
    roster.members[1].state = FakeState.SUSPECT
    future = group.train.submit()
    roster.members[1].state = FakeState.DEAD
    roster.members[1].evidence = "killed by SIGKILL"
    with pytest.raises(Unavailable, match="actor/1 died, so `train` was sent to no rank") as caught:
        future.result(10)
    assert caught.value.facts["evidence"] == "killed by SIGKILL"
    assert [known.outcome for known in future.outcomes()] == ["NOT_EXECUTED", "NOT_EXECUTED"]
    assert len(placer.placed) == 1


def test_a_call_to_a_rank_that_comes_back_by_policy_waits_for_it():
    """Nothing was sent, so waiting is no retry: also a `once` call waits for the next start."""
    group, placer, roster = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(ok(request.member))
    roster.will_return = lambda peer: True
    roster.members[1].state = FakeState.DEAD
    future = group.train.submit()
    with pytest.raises(WaitTimeout):
        future.result(timeout=0.1)
    roster.members[1].state = FakeState.READY
    assert future.result(10) == [0, 1]


# -- asyncio ---------------------------------------------------------------------------------------------------------


def after_beats(beats, answer):
    """Answer once the loop has been seen to go on; also where it does not, so that the test ends."""
    try:
        wait_until(lambda: len(beats) > 5, what="the beats of the loop")
    finally:
        answer()


def test_an_await_belongs_to_the_callers_loop():
    """Aio resolves on the running loop while other tasks go on."""
    group, placer, _ = make_group(Actor, 2)
    beats = []

    def answer_all():
        for request in placer.requests:
            request.answer(ok(request.member))

    async def main():
        async def heart():
            while True:
                beats.append(1)
                await asyncio.sleep(0.001)

        task = asyncio.create_task(heart())
        threading.Thread(target=after_beats, args=(beats, answer_all)).start()
        answer = await group.train.aio()
        task.cancel()
        return answer

    assert asyncio.run(main()) == [0, 1]
    assert len(beats) > 5


def test_cancelling_the_await_cancels_the_call():
    """A task that is cancelled sends a cancel for its call."""
    group, placer, _ = make_group(Actor, 1)

    async def main():
        task = asyncio.create_task(group.train.aio())
        await asyncio.sleep(0)  # the task runs up to its first wait
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert placer.cancelled == placer.placed


def test_asyncio_timeout_works_on_a_call():
    """asyncio.timeout around an await gives TimeoutError and cancels the call."""
    group, placer, _ = make_group(Actor, 1)

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await group.train.aio()

    asyncio.run(main())
    assert placer.cancelled


def test_an_await_that_tells_of_a_failure_cancels_nothing():
    """Only the caller's cancel is one: after a failure the others go on, as with a blocking call."""
    group, placer, _ = make_group(Actor, 2)

    async def main():
        future = group.train.submit()
        placer.requests[0].answer(raised(ValueError("root")))
        with pytest.raises(BatchError) as caught:
            await future
        assert caught.value.late == {1: "running"}

    asyncio.run(main())
    assert placer.cancelled == []


def test_a_quick_await_that_tells_of_a_failure_cancels_nothing():
    """As above for one awaited call, whose future is made when it fails."""
    group, placer, _ = make_group(Actor, 2)
    placer.auto = lambda request: request.member or request.answer(raised(ValueError("root")))

    async def main():
        with pytest.raises(BatchError) as caught:
            await group.train.aio()
        assert caught.value.late == {1: "running"}

    asyncio.run(main())
    assert placer.cancelled == []


def test_cancelling_an_await_after_a_failure_cancels_the_call():
    """The caller's own cancel still counts while the others are given their moment."""
    group, placer, _ = make_group(Actor, 2)

    async def main():
        future = group.train.submit()
        placer.requests[0].answer(raised(ValueError("root")))
        task = asyncio.ensure_future(_awaited(future))
        await asyncio.sleep(0)  # the task runs up to its wait for the others
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert placer.cancelled == placer.placed


def test_sync_calls_work_inside_a_running_loop_and_nested():
    """Six nested blocking calls inside a running loop all end: no pool, no asyncio.run (B46)."""
    group, placer, _ = make_group(Actor, 1)

    def answer_later(request):
        threading.Timer(0.005, lambda: request.answer(ok(1))).start()

    placer.auto = answer_later

    def nested(depth: int) -> int:
        return 0 if depth == 0 else group.train()[0] + nested(depth - 1)

    async def main():
        return nested(6), await group.train.aio()

    assert asyncio.run(main()) == (6, [1])


def test_a_blocking_call_in_a_thread_leaves_the_loop_free():
    """Six calls at once through asyncio.to_thread: the loop keeps beating (B46: 0 heartbeats in 1 s)."""
    group, placer, _ = make_group(Actor, 1)
    beats = []
    placer.auto = lambda request: threading.Thread(
        target=after_beats, args=(beats, lambda: request.answer(ok(1)))
    ).start()

    async def heart():
        while True:
            beats.append(1)
            await asyncio.sleep(0.001)

    async def main():
        task = asyncio.create_task(heart())
        await asyncio.gather(*(asyncio.to_thread(group.train) for _ in range(6)))
        task.cancel()

    asyncio.run(main())
    assert len(beats) > 5


def test_async_iteration_yields_ranks_as_they_answer():
    """Async for over a future is as_completed on the loop."""
    group, placer, _ = make_group(Actor, 2)

    async def main():
        future = group.train.submit()
        placer.requests[1].answer(ok("b"))
        seen = []
        async for rank, value in future:
            seen.append((rank, value))
            if rank == 1:
                placer.requests[0].answer(ok("a"))
        return seen

    assert asyncio.run(main()) == [(1, "b"), (0, "a")]


def test_a_loop_that_was_closed_does_not_disturb_the_bus():
    """An answer for a loop that is gone is dropped without an error."""
    group, placer, _ = make_group(Actor, 1)
    future = group.train.submit()
    loop = asyncio.new_event_loop()
    task = loop.create_task(future.wait_async())
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    placer.requests[0].answer(ok(1))
    assert future.result() == [1]


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_yields_items_as_they_come_and_gives_credit():
    """Items are taken one by one, and the worker hears how far the reader is."""
    group, placer, _ = make_group(Actor, 1)
    stream = group.tokens.stream("p")
    for number in range(20):
        placer.requests[0].item(number, number)
    assert [next(stream) for _ in range(20)] == list(range(20))
    assert placer.placed[0].credit == 16
    placer.requests[0].answer(ok(None))
    assert list(stream) == []


def test_a_broken_stream_delivers_first_and_tells_how_many():
    """Items before the failure are delivered; the error counts them."""
    group, placer, _ = make_group(Actor, 1)
    stream = group.tokens.stream("p")
    placer.requests[0].item(0, "a")
    placer.requests[0].answer(lost())
    assert next(stream) == "a"
    with pytest.raises(WorkerLost) as caught:
        next(stream)
    assert caught.value.facts["delivered"] == "1 items"
    assert list(stream) == []


def test_a_stream_that_gave_items_is_not_begun_again():
    """The worker is lost after the caller took an item: it hears of the loss, and gets no item a second time."""
    group, placer, _ = make_group(Actor, 2)
    stream = group.tokens.stream("p")
    placer.requests[0].item(0, "a")
    assert next(stream) == "a"
    placer.requests[0].answer(lost())
    with pytest.raises(WorkerLost):
        next(stream)
    assert len(placer.requests) == 1


def test_leaving_a_stream_by_with_cancels_it():
    """close() asks the worker to stop."""
    group, placer, _ = make_group(Actor, 1)
    with group.tokens.stream("p") as stream:
        placer.requests[0].item(0, "a")
        assert next(stream) == "a"
    assert placer.cancelled
    assert list(stream) == []


def test_a_plain_call_of_a_generator_gives_the_list():
    """Without .stream the items come as one list."""
    group, placer, _ = make_group(Actor, 1)
    future = group.tokens.submit("p")
    placer.requests[0].item(0, "a")
    placer.requests[0].item(1, "b")
    placer.requests[0].answer(ok(None))
    assert future.result() == ["a", "b"]


# -- several futures -------------------------------------------------------------------------------------------------


def test_wait_future_ordered_returns_in_the_order_of_the_futures():
    """Whatever order calls end in, answers come in the order asked for (B60)."""
    group, placer, _ = make_group(Actor, 1)
    futures = [group.first.submit() for _ in range(3)]
    for index in (2, 0, 1):
        placer.requests[index].answer(ok(index))
    assert wait_future_ordered(futures) == [0, 1, 2]


def test_wait_future_ordered_waits_for_all_and_keeps_good_answers():
    """One failure is raised itself; several raise a BatchError with the good answers by position."""
    group, placer, _ = make_group(Actor, 1)
    futures = [group.first.submit() for _ in range(3)]
    placer.requests[0].answer(raised(ValueError("0")))
    placer.requests[1].answer(ok("fine"))
    placer.requests[2].answer(ok("fine"))
    with pytest.raises(ValueError, match="0"):
        wait_future_ordered(futures)
    futures = [group.first.submit() for _ in range(3)]
    for request, outcome in zip(
        placer.requests[3:], (raised(ValueError("0")), ok("fine"), raised(KeyError("2"))), strict=True
    ):
        request.answer(outcome)
    with pytest.raises(BatchError) as caught:
        wait_future_ordered(futures)
    assert caught.value.results == {1: "fine"}


def test_wait_future_ordered_has_one_timeout_for_all():
    """The timeout covers all calls together."""
    group, _, _ = make_group(Actor, 1)
    futures = [group.first.submit() for _ in range(3)]
    began = time.monotonic()
    with pytest.raises(CallTimeout):
        wait_future_ordered(futures, timeout=0.05)
    assert time.monotonic() - began < 5


def test_wait_future_ordered_can_stop_at_the_first_failure():
    """exit_on_exception raises at once and cancels the rest."""
    group, placer, _ = make_group(Actor, 1)
    futures = [group.first.submit() for _ in range(2)]
    placer.requests[0].answer(raised(ValueError("0")))
    with pytest.raises(ValueError, match="0"):
        wait_future_ordered(futures, exit_on_exception=True)
    assert placer.cancelled == [placer.placed[1]]
