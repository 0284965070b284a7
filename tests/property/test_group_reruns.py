"""Second executions of one rank's part of a call, under any mixture of deaths: how often it runs, what is told."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

import zbus
from fake_placer import FakePeer, FakeState, lost, make_group, ok, raised
from zbus.errors import BatchError, RemoteError, WorkerLost
from zbus.protocol.messages import Outcome, OutcomeKind
from zbus.retry import RetryPolicy, TokenBucket


class Loader(zbus.Engine):
    @zbus.endpoint(effect="idempotent")
    def idempotent(self): ...

    @zbus.endpoint(effect="pure")
    def pure(self): ...

    @zbus.endpoint()
    def once(self): ...

    @zbus.endpoint(effect="idempotent", start="together")
    def together(self): ...


ENDS = st.sampled_from(("ok", "ok", "lost", "lost", "unsent", "raised"))
"""How an execution ends; those of one rank come one after the other, and the last one is repeated."""


@settings(max_examples=120)
@given(
    ends=st.lists(st.lists(ENDS, min_size=1, max_size=4), min_size=1, max_size=4),
    method=st.sampled_from(("idempotent", "pure", "once", "together")),
    attempts=st.integers(1, 4),
    tokens=st.integers(0, 3),
)
def test_each_rank_runs_as_often_as_it_may_and_its_end_is_told(ends, method, attempts, tokens):
    """Every rank has one outcome, that of its last execution; a call with effects runs twice nowhere.

    Executions of a rank are at most ``attempts``; the group's second runs are at most its tokens; a rank whose end was
    OK or an error of its engine is not run again; the answers stand in rank order.
    """
    group, placer, roster = make_group(Loader, len(ends))
    group._view.core.bucket = TokenBucket(capacity=tokens, refill_per_s=0.0)
    roster.will_return = lambda peer: True
    ran = Counter()
    last = {}

    def auto(request):
        rank = request.peer.name.rank
        end = ends[rank][min(ran[rank], len(ends[rank]) - 1)]
        ran[rank] += 1
        last[rank] = end
        if end == "ok":
            request.answer(ok(f"rank {rank}"))
        elif end == "raised":
            request.answer(raised(ValueError(f"rank {rank}")))
        else:
            request.peer.state = FakeState.DEAD
            roster.members[rank] = FakePeer("actor", rank)
            dead = "it died before the call was sent"
            request.answer(lost() if end == "lost" else Outcome(OutcomeKind.NOT_EXECUTED, None, "worker_exit", dead, 0))

    placer.auto = auto
    policy = RetryPolicy(attempts=attempts, backoff_s=0.0)
    future = getattr(group.options(retries=policy), method).submit()
    error = future.exception(timeout=10)
    if error is None:
        assert future.result() == [f"rank {rank}" for rank in range(len(ends))]
        assert set(last.values()) == {"ok"}
    elif len(ends) > 1:
        assert isinstance(error, BatchError)
        assert set(error.results) == {rank for rank, end in last.items() if end == "ok"}
    else:
        assert isinstance(error, RemoteError if last[0] == "raised" else WorkerLost | zbus.NotExecuted)

    for rank, script in enumerate(ends):
        count = ran[rank]
        assert 1 <= count <= attempts
        before = [script[min(n, len(script) - 1)] for n in range(count - 1)]
        assert not {"ok", "raised"} & set(before), f"rank {rank} ran again after {before}"
        if method == "once":
            assert "lost" not in before, f"rank {rank} has effects, and ran again after {before}"
        if method == "together" and len(ends) > 1:
            assert count == 1
        kind = future.outcomes()[rank].outcome
        told = {"ok": "OK", "raised": "APP_ERROR", "lost": "UNKNOWN", "unsent": "NOT_EXECUTED"}[last[rank]]
        assert kind == ("UNKNOWN" if told == "NOT_EXECUTED" and "lost" in before else told)
    if method != "once":
        second = sum(
            sum(script[min(n, len(script) - 1)] == "lost" for n in range(ran[rank] - 1))
            for rank, script in enumerate(ends)
        )
        assert second <= tokens
