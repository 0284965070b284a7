from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import Counter

import pytest

import zbus
from controller.group import Group
from fake_placer import FakePeer, FakeState, lost, make_group, ok, raised
from waiting import wait_until
from zbus.engine import AnyOne, Concat, PerRank, RankZero, Split
from zbus.errors import BatchError, ConfigError, NotExecuted, RemoteError, Unavailable, WorkerLost
from zbus.protocol.messages import Outcome, OutcomeKind
from zbus.retry import RetryPolicy, TokenBucket

NOT_SENT = Outcome(OutcomeKind.NOT_EXECUTED, None, "worker_exit", "it died before the call was sent", 0)


class Actor(zbus.Engine):
    @zbus.endpoint(Split("dp"), collect=PerRank())
    def train(self, batch, step=0):
        """Train one step."""

    @zbus.endpoint(Split("dp"), collect=Concat(), effect="pure", strict=True)
    def logprobs(self, batch): ...

    @zbus.endpoint()
    def zero_grad(self): ...

    @zbus.endpoint(effect="idempotent")
    def load(self, path): ...

    @zbus.endpoint(RankZero())
    def save(self, path): ...

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen", concurrency=2)
    async def generate(self, prompt): ...

    @zbus.endpoint(AnyOne(), lane="gen")
    async def once(self, prompt, sampling=None): ...

    @zbus.endpoint(AnyOne(), lane="gen")
    async def tokens(self, prompt):
        yield prompt


class Ring(zbus.Engine):
    @zbus.endpoint(effect="idempotent", start="together")
    def all_reduce(self): ...

    @zbus.endpoint()
    def step(self): ...


def echo(request):
    """Answer each call with its rank, name and arguments."""
    request.answer(*(ok((request.peer.name.rank, name, args)) for name, args, _ in request.calls))


# -- proxies and slices ----------------------------------------------------------------------------------------------


def test_an_unknown_method_is_refused_at_once_with_the_nearest_name():
    """A typo is an AttributeError before anything is sent, with a suggestion."""
    group, placer, _ = make_group(Actor)
    with pytest.raises(AttributeError, match=r"role 'actor' has no endpoint 'trian'; did you mean 'train'\?"):
        _ = group.trian
    with pytest.raises(AttributeError, match="it has generate, load, logprobs"):
        _ = group.xyzzy
    assert not hasattr(group, "_ipython_display_")
    assert placer.placed == []


def test_endpoints_are_listed_for_completion():
    """dir() names the endpoints; help shows the docstring; repr shows the signature's names."""
    group, _, _ = make_group(Actor)
    assert {"train", "save"} <= set(dir(group))
    assert group.train.__doc__ == "Train one step."
    assert repr(group.train).startswith("<Method actor.train(batch, step")


def test_a_group_shows_who_is_ready():
    """The repr counts ready ranks and names the others; no bare object address."""
    group, _, roster = make_group(Actor, 4, {"dp": 2, "tp": 2})
    assert repr(group) == "<Group actor: 4/4 ready, dp=2 tp=2>"
    assert group.ready
    roster.members[2].state = FakeState.DEAD
    assert repr(group) == "<Group actor: 3/4 ready, rank 2 dead, dp=2 tp=2>"
    assert not group.ready
    assert repr(group[0:2]) == "<Group actor[0, 1]: 2/2 ready, dp=2 tp=2>"


def test_slices_pick_ranks():
    """A number is one rank, a range or list several, coordinates a part of the mesh."""
    group, _, _ = make_group(Actor, 4, {"dp": 2, "tp": 2})
    assert group[-1].ranks == (3,)
    assert group[1:3].ranks == (1, 2)
    assert group[[3, 0]].ranks == (0, 3)
    assert group[{"dp": 1}].ranks == (2, 3)
    assert group[{"dp": [0, 1], "tp": 1}].ranks == (1, 3)
    assert group[2:4][0].ranks == (2,)
    assert group[2:4][{"tp": 0}].ranks == (2,)
    assert [one.ranks for one in group] == [(0,), (1,), (2,), (3,)]
    assert (len(group), bool(group[0])) == (4, True)


def test_wrong_slices_say_what_there_is():
    """A rank or axis that does not exist is named with those that do."""
    group, _, _ = make_group(Actor, 2)
    with pytest.raises(IndexError, match=r"actor has ranks 0\.\.1, no position 2"):
        _ = group[2]
    with pytest.raises(ConfigError, match="no axis 'tp'"):
        _ = group[{"tp": 0}]
    with pytest.raises(ConfigError, match="holds no rank"):
        _ = group[2:]


def test_one_rank_answers_bare():
    """actor[0].f() is the value itself, also where the group would give a list."""
    group, placer, _ = make_group(Actor)
    placer.auto = echo
    assert group[1].zero_grad() == (1, "zero_grad", ())
    assert group[1:2].zero_grad() == [(1, "zero_grad", ())]
    assert group[1].train([1, 2]) == (1, "train", ([1, 2],))
    assert group.save("p") == (0, "save", ("p",))
    assert group[1].save("p") == (1, "save", ("p",))


def test_replicas_share_one_payload():
    """Each distinct share is encoded once."""
    group, placer, _ = make_group(Actor, 4, {"dp": 2, "tp": 2})
    placer.auto = echo
    group.train([1, 2, 3, 4])
    payloads = [request.payload for request in placer.requests]
    assert payloads[0] is payloads[1]
    assert payloads[2] is payloads[3]
    assert payloads[0] is not payloads[2]


def test_submit_takes_a_copy_of_arrays():
    """After submit an array may be changed; a blocking call needs no copy."""
    import numpy as np

    group, placer, _ = make_group(Actor, 1)
    array = np.zeros(1024)
    future = group.load.submit(array)
    array[:] = 1
    from zbus.codec import decode

    assert decode(placer.requests[0].payload)[0][1][0].sum() == 0
    placer.requests[0].answer(ok(1))
    future.result()


def test_typed_methods_are_named_by_their_declaration():
    """group.method(Actor.train) is the same endpoint, for checkers and editors."""
    group, placer, _ = make_group(Actor)
    placer.auto = echo
    assert group.method(Actor.train)([1, 2]) == group.train([1, 2])


def test_a_wrong_argument_is_refused_before_sending():
    """Signature and split are checked at the caller; a value that cannot be carried names its path."""
    group, placer, _ = make_group(Actor)
    with pytest.raises(TypeError, match=r"train\(\) missing a required argument"):
        group.train()
    with pytest.raises(zbus.CodecError):
        group.load(object())
    assert placer.placed == []


# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_is_placed_once_in_order():
    """All calls of the block travel as one, in order, on every member; each has its own answer."""
    group, placer, _ = make_group(Actor)
    placer.auto = echo
    with group.batch(strict=True, deadline="1m") as b:
        zero = b.zero_grad()
        stats = b.train([1, 2], step=3)
        assert placer.placed == []
    assert len(placer.placed) == 1
    assert (placer.placed[0].strict, placer.placed[0].deadline_s) == (True, 60.0)
    assert [name for name, *_ in placer.requests[1].calls] == ["zero_grad", "train"]
    assert zero.result() == [(0, "zero_grad", ()), (1, "zero_grad", ())]
    assert stats.result() == [(0, "train", ([1],)), (1, "train", ([2],))]


def test_a_batch_raises_its_first_failure_at_the_end():
    """A failure in the middle is raised by the block; earlier answers stay, later ones are NOT_EXECUTED."""
    group, placer, _ = make_group(Actor, 1)
    poisoned = Outcome(OutcomeKind.NOT_EXECUTED, None, "predecessor", "call 1 failed")
    placer.auto = lambda request: request.answer(ok("zeroed"), raised(ValueError("bad")), poisoned)
    with pytest.raises(ValueError, match="bad") as caught, group[0].batch(strict=True) as b:
        first, second, third = b.zero_grad(), b.train([1]), b.zero_grad()
    assert caught.value.batch == 1
    assert first.result() == "zeroed"
    assert isinstance(second.exception(), RemoteError)
    assert isinstance(third.exception(), NotExecuted)


def test_leaving_a_batch_by_an_exception_places_nothing():
    """Nothing of a block that failed is sent."""
    group, placer, _ = make_group(Actor)
    with contextlib.suppress(RuntimeError), group.batch() as b:
        b.zero_grad()
        raise RuntimeError
    assert placer.placed == []


def test_a_batch_may_be_awaited_or_submitted():
    """Async with waits on the loop; submit() does not wait."""
    group, placer, _ = make_group(Actor)
    placer.auto = echo

    async def main():
        async with group.batch() as b:
            zero = b.zero_grad()
        return zero.result()

    assert asyncio.run(main()) == [(0, "zero_grad", ()), (1, "zero_grad", ())]
    b = group.batch()
    b.zero_grad()
    assert [future.result() for future in b.submit()] == [[(0, "zero_grad", ()), (1, "zero_grad", ())]]


def test_an_empty_batch_sends_nothing():
    """A block without calls is nothing."""
    group, placer, _ = make_group(Actor)
    with group.batch():
        pass
    assert placer.placed == []


def test_what_cannot_be_in_a_batch_is_refused_when_it_is_added():
    """Calls to one rank, streams and other lanes do not belong in a group's batch."""
    group, _, _ = make_group(Actor)
    b = group.batch()
    with pytest.raises(ConfigError, match="`save` goes to one rank"):
        b.save("p")
    b.zero_grad()
    one = group[0].batch()
    one.save("p")
    with pytest.raises(ConfigError, match="`save` is on lane `main` and `generate` on `gen`"):
        one.generate("x")
    with pytest.raises(ConfigError, match="`tokens` streams"):
        group[0].batch().tokens("x")


def test_an_answer_asked_for_too_early_is_explained():
    """Inside the block nothing was sent yet, so there is no answer to wait for."""
    group, _, _ = make_group(Actor)
    b = group.batch()
    future = b.zero_grad()
    with pytest.raises(ConfigError, match="was not placed yet"):
        future.result()


def test_an_endpoint_may_make_its_batch_strict():
    """Strict at the endpoint holds for any batch with it."""
    group, placer, _ = make_group(Actor)
    placer.auto = lambda request: request.answer(*[ok([1])] * len(request.calls))
    with group.batch() as b:
        b.logprobs([1, 2])
    assert placer.placed[0].strict


# -- any one, map ----------------------------------------------------------------------------------------------------


def test_any_one_takes_the_least_loaded_ready_rank():
    """Calls that are out count; ranks that are not ready get none."""
    group, placer, roster = make_group(Actor, 3)
    roster.members[1].state = FakeState.SUSPECT
    futures = [group.generate.submit(i) for i in range(4)]
    ranks = [request.peer.name.rank for request in placer.requests]
    assert sorted(ranks) == [0, 0, 2, 2]
    busy = ranks[0]
    for request in placer.requests:
        if request.peer.name.rank != busy:
            request.answer(ok(1))
    futures.append(group.generate.submit(4))
    assert placer.requests[-1].peer.name.rank != busy


def test_map_bounds_what_is_out_and_keeps_input_order():
    """At most max_in_flight calls are out; answers come in the order of the items."""
    group, placer, _ = make_group(Actor, 2)
    answers = group.generate.map(range(6), max_in_flight=3)
    wait_until(lambda: len(placer.requests) == 3, what="three calls")
    for number in (2, 1, 0):
        placer.requests[number].answer(ok(number))
    wait_until(lambda: len(placer.requests) == 6, what="the refill")
    for number in (5, 4, 3):
        placer.requests[number].answer(ok(number))
    assert answers.result(timeout=10) == [0, 1, 2, 3, 4, 5]


def test_map_takes_several_arguments_per_call_as_pythons_map_does():
    """One of each per call; what never ends is read with the rest, and lists that do not fit are refused at once."""
    group, placer, _ = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(ok(list(request.calls[0][1])))
    assert group.once.map(["a", "b"], [1, 2]).result(timeout=10) == [["a", 1], ["b", 2]]
    assert group.once.map(["a", "b"], itertools.repeat(3)).result(timeout=10) == [["a", 3], ["b", 3]]
    with pytest.raises(ConfigError, match=r"`once\.map` got 2 and 1 items"):
        group.once.map(["a", "b"], [1])


def test_map_refills_while_nobody_looks():
    """The whole map runs although its answers are not read."""
    group, placer, _ = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(ok(request.calls[0][1][0]))
    answers = group.generate.map(range(50), max_in_flight=2)
    wait_until(answers.done, what="the end of the map")
    assert list(answers) == list(range(50))


def test_map_in_order_of_completion():
    """order="done" yields what is ready first."""
    group, placer, _ = make_group(Actor, 2)
    answers = group.generate.map("abc", order="done", max_in_flight=3)
    placer.requests[2].answer(ok("c"))
    assert next(answers) == "c"
    placer.requests[0].answer(ok("a"))
    placer.requests[1].answer(ok("b"))
    assert sorted(answers) == ["a", "b"]


def test_map_reads_an_endless_source_only_as_far_as_needed():
    """Items without an end are read a bounded way ahead of the reader."""
    group, placer, _ = make_group(Actor, 1)
    placer.auto = lambda request: request.answer(ok(request.calls[0][1][0]))
    read = []

    def source():
        number = 0
        while True:
            read.append(number)
            yield number
            number += 1

    answers = group.generate.map(source(), max_in_flight=2)
    assert [next(answers) for _ in range(10)] == list(range(10))
    assert len(read) <= 10 + 4 * 2 + 2
    answers.cancel()


def test_a_failed_item_of_a_map():
    """It raises at its place, or is the answer, or is kept beside the others by result()."""
    group, placer, _ = make_group(Actor, 1)

    def auto(request):
        item = request.calls[0][1][0]
        request.answer(raised(ValueError(item)) if item == 1 else ok(item))

    placer.auto = auto
    answers = group.generate.map(range(3))
    assert next(answers) == 0
    with pytest.raises(ValueError, match="1"):
        next(answers)
    with pytest.raises(BatchError) as caught:
        group.generate.map(range(3)).result()
    assert caught.value.results == {0: 0, 2: 2}
    returned = list(group.generate.map(range(3), errors="return"))
    assert (returned[0], type(returned[1]).__mro__[-4], returned[2]) == (0, ValueError, 2)


def test_map_on_a_loop():
    """Await gives the list, async for the answers one by one."""
    group, placer, _ = make_group(Actor, 2)
    placer.auto = lambda request: threading.Timer(0.001, lambda: request.answer(ok(request.calls[0][1][0]))).start()

    async def main():
        return await group.generate.map(range(5)), [x async for x in group.generate.map(range(5))]

    assert asyncio.run(main()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])


def test_map_needs_any_one():
    """Mapping over an endpoint that all ranks run is refused with the way out."""
    group, _, _ = make_group(Actor)
    with pytest.raises(ConfigError, match="`zero_grad` is not AnyOne"):
        group.zero_grad.map([1])
    with pytest.raises(ConfigError, match="`generate` is not a generator"):
        group.generate.stream("x")
    with pytest.raises(ValueError, match='map takes order "input" or "done"'):
        group.generate.map([1], order="sorted")


def test_an_empty_map_is_empty():
    """No items, no calls, no waiting."""
    group, placer, _ = make_group(Actor)
    assert group.generate.map([]).result() == []
    assert list(group.generate.map([])) == []
    assert placer.placed == []


# -- second executions -------------------------------------------------------------------------------------------------


FAST = RetryPolicy(attempts=3, backoff_s=0.001)


def test_a_pure_call_moves_to_another_worker():
    """The worker dies in the call; a pure endpoint runs on another one."""
    group, placer, roster = make_group(Actor, 2)

    def auto(request):
        if len(placer.requests) == 1:
            request.peer.state = FakeState.DEAD
            request.answer(lost())
        else:
            request.answer(ok(request.peer.name.rank))

    placer.auto = auto
    alive = group.options(retries=FAST).generate("x")
    assert roster.members[alive].state is FakeState.READY
    assert len(placer.requests) == 2


def test_a_call_with_effects_is_never_run_twice():
    """once: an unknown outcome goes to the user, whatever the retry policy says (B1, B3)."""
    group, placer, _ = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(lost())
    with pytest.raises(WorkerLost):
        group.options(retries=FAST).once("x")
    assert len(placer.requests) == 1


def test_the_budget_limits_second_runs_alone():
    """An empty bucket stops a second execution; being sent again after NOT_EXECUTED is none, and takes nothing."""
    group, placer, _ = make_group(Actor, 2)
    group._view.core.bucket = TokenBucket(capacity=0.0, refill_per_s=0.0)
    placer.auto = lambda request: request.answer(NOT_SENT if len(placer.requests) == 1 else ok("ran"))
    assert group.options(retries=FAST).generate("x") == "ran"
    placer.auto = lambda request: request.answer(lost())
    with pytest.raises(WorkerLost):
        group.options(retries=FAST).generate("x")
    assert len(placer.requests) == 3


def test_a_call_with_effects_may_run_where_it_proved_not_to_have_run():
    """Once and NOT_EXECUTED: a retry was asked for and does no harm."""
    group, placer, _ = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(NOT_SENT if len(placer.requests) == 1 else ok("ran"))
    assert group.options(retries=FAST).once("x") == "ran"
    assert len(placer.requests) == 2


@pytest.mark.parametrize(
    "outcome",
    [raised(RuntimeError("timeout in NCCL")), Outcome(OutcomeKind.UNKNOWN, None, "deadline", "running")],
)
def test_errors_of_the_engine_and_deadlines_are_never_retried(outcome):
    """A method that raises runs once, also if its message says timeout (B3, B4)."""
    group, placer, _ = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(outcome)
    with pytest.raises(zbus.errors.CallError):
        group.options(retries=FAST).generate("x")
    assert len(placer.requests) == 1


def test_an_idempotent_call_runs_again_on_the_next_start_of_its_rank():
    """Idempotent stays on its rank and waits for its restart."""
    group, placer, roster = make_group(Actor, 1)
    roster.will_return = lambda peer: True

    def auto(request):
        if len(placer.requests) == 1:
            request.peer.state = FakeState.DEAD
            request.answer(lost())

            def restart():
                roster.members[0] = FakePeer("actor", 0)

            threading.Timer(0.05, restart).start()
        else:
            request.answer(ok("loaded"))

    placer.auto = auto
    assert group[0].options(retries=FAST).load("p") == "loaded"


def test_retries_end_with_the_policy():
    """After so many executions the last outcome is the user's."""
    group, placer, _ = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(lost())
    with pytest.raises(WorkerLost):
        group.options(retries=FAST).generate("x")
    assert len(placer.requests) == 3


def dies_and_returns(placer, roster, *, rank=1, after_s=0.05):
    """Answer ``rank``'s first request by its death, and have it started again; other requests with its number."""
    roster.will_return = lambda peer: True

    def auto(request):
        if request.peer.name.rank == rank and request.peer is first:
            first.state = FakeState.DEAD
            request.answer(lost())
            threading.Timer(after_s, restart).start()
        else:
            request.answer(ok([f"rank {request.peer.name.rank}"]))

    def restart():
        roster.members[rank] = FakePeer("actor", rank)

    first = roster.members[rank]
    placer.auto = auto


def test_one_rank_of_a_pure_call_to_several_runs_again_by_itself():
    """A rank dies in its part and comes back: its part alone runs again, and the answers are merged as declared."""
    group, placer, roster = make_group(Actor, 3)
    dies_and_returns(placer, roster)
    future = group.options(retries=FAST).logprobs.submit([1, 2, 3])
    assert future.result(timeout=10) == ["rank 0", "rank 1", "rank 2"]
    assert Counter(request.peer.name.rank for request in placer.requests) == {0: 1, 1: 2, 2: 1}
    assert placer.requests[-1].payload == placer.requests[1].payload, "its own share of the items"
    assert [one.outcome for one in future.outcomes()] == ["OK"] * 3


def test_later_calls_to_the_rank_stay_behind_a_part_that_runs_again():
    """What one thread submits starts in its order on each rank, also across a restart."""
    group, placer, roster = make_group(Actor, 2)
    dies_and_returns(placer, roster)
    first = group.options(retries=FAST).load.submit("first")
    second = group[1].load.submit("second")
    third = group.load.submit("third")
    for future in (first, second, third):
        future.result(timeout=10)
    asked = [request.calls[0][1][0] for request in placer.requests if request.peer is roster.members[1]]
    assert asked == ["first", "second", "third"]


def test_a_part_that_waits_to_run_again_ends_with_another_ranks_failure():
    """The failure of another rank may be the echo of the first one's end: nothing runs again, the root is the death."""
    group, placer, roster = make_group(Actor, 2)
    roster.will_return = lambda peer: True
    future = group.options(retries=FAST).load.submit("x")
    roster.members[1].state = FakeState.DEAD
    placer.requests[1].answer(lost())
    assert future.outcomes()[1].outcome is None
    assert future.outcomes()[1].state == "waits to be run again"
    placer.requests[0].answer(raised(RuntimeError("gloo: connection closed by peer")))
    error = future.exception(timeout=10)
    assert isinstance(error, BatchError)
    assert isinstance(error.exceptions[0], WorkerLost)
    assert "not run again (the call failed on another rank)" in error.exceptions[0].facts["outcome"]
    roster.members[1] = FakePeer("actor", 1)
    group.load.submit("later")
    wait_until(lambda: len(placer.requests) == 4, what="the call behind it to be sent")
    assert [request.calls[0][1][0] for request in placer.requests] == ["x", "x", "later", "later"]


def test_cancel_ends_a_part_that_waits_to_run_again():
    """The cancelled call has all its outcomes; the part that may have run says so."""
    group, placer, roster = make_group(Actor, 2)
    roster.will_return = lambda peer: True
    placer.auto = lambda request: request.answer(lost() if request.member else ok("loaded"))
    future = group.options(retries=RetryPolicy(attempts=2, backoff_s=60)).load.submit("x")
    future.cancel()
    assert isinstance(future.exception(timeout=10), BatchError)
    assert [one.outcome for one in future.outcomes()] == ["OK", "UNKNOWN"]


def test_calls_that_start_together_or_have_effects_are_not_run_again_in_part():
    """One rank of a collective alone would hang: the whole outcome is the user's."""
    group, placer, roster = make_group(Ring, 2)
    roster.will_return = lambda peer: True
    placer.auto = lambda request: request.answer(ok(1) if request.member else lost())
    for method in (group.options(retries=FAST).all_reduce, group.options(retries=FAST).step):
        placer.placed.clear()
        with pytest.raises(BatchError):
            method()
        assert len(placer.placed) == 1


def test_a_pure_call_waits_for_members_that_are_coming():
    """A member that is connecting is waited for when the endpoint may run at any time; nothing is sent before."""
    group, placer, roster = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(ok([request.member]))
    roster.members[1].state = FakeState.CONNECTING
    future = group.logprobs.submit([1, 2])
    assert placer.placed == []
    roster.members[1].state = FakeState.READY
    assert future.result(timeout=10) == [0, 1]
    roster.members[1].state = FakeState.DEAD
    with pytest.raises(Unavailable):
        group.logprobs([1, 2])


def test_cancel_ends_a_pending_retry():
    """A call that waits for its next execution is cancelled at once; it is not said that the first one did not run."""
    group, placer, _ = make_group(Actor, 2)
    placer.auto = lambda request: request.answer(lost())
    future = group.options(retries=RetryPolicy(attempts=2, backoff_s=60)).generate.submit("x")
    future.cancel()
    error = future.exception(timeout=10)
    assert isinstance(error, WorkerLost)
    assert error.outcome == "UNKNOWN"
    assert "cancelled before a retry" in str(error)


def test_a_call_behind_waiting_ones_does_not_overtake_them():
    """Calls to a rank that is coming back are sent in the order they were submitted in, also those that came later."""
    group, placer, roster = make_group(Actor, 2)
    placer.auto = echo
    roster.will_return = lambda peer: True
    roster.members[1].state = FakeState.DEAD
    first, second = group[1].load.submit(1), group[1].load.submit(2)
    roster.members[1].state = FakeState.READY
    third, other = group[1].load.submit(3), group[0].load.submit(4)
    assert [future.result(timeout=10)[2] for future in (other, first, second, third)] == [(4,), (1,), (2,), (3,)]
    assert [request.calls[0][1] for request in placer.requests] == [(4,), (1,), (2,), (3,)]


def test_loads_come_back_to_zero():
    """However calls end, the load of a rank is given back."""
    group, placer, _ = make_group(Actor, 2)
    outcomes = [ok(1), raised(ValueError()), lost(), NOT_SENT]
    placer.auto = lambda request: request.answer(outcomes[len(placer.requests) % 4])
    for _ in range(8):
        group.options(retries=FAST).generate.submit("x").exception(timeout=10)
    with pytest.raises(zbus.CodecError):
        group.generate(object())
    assert set(group._view.core._loads.values()) == {0}


def test_groups_of_one_role_are_independent_objects():
    """options() makes a copy; the group itself keeps its defaults."""
    group, placer, _ = make_group(Actor, 1)
    placer.auto = echo
    quick = group.options(deadline=1)
    assert isinstance(quick, Group)
    group.zero_grad()
    quick.zero_grad()
    assert [placed.deadline_s for placed in placer.placed] == [1800.0, 1.0]
