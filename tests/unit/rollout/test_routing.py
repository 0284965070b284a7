from __future__ import annotations

import random

import pytest

from controller.rollouts.routing import Call, Fail, Go, Presence, Routes

HERE, AWAY, GONE = Presence.HERE, Presence.AWAY, Presence.GONE


def routes(ranks=2, **options) -> Routes:
    """Make routes over ranks that are all here."""
    made = Routes(ranks, **options)
    for rank in range(ranks):
        made.observe(rank, HERE, 10 + rank)
    return made


def ask(made: Routes) -> Call:
    """Ask for a rank."""
    call = Call()
    made.ask(call)
    return call


def test_calls_go_to_the_least_loaded_rank():
    """B55: load decides, not turn; among equals the one that was served longest ago."""
    made = routes(3)
    first, second, third = ask(made), ask(made), ask(made)
    assert (first.rank, second.rank, third.rank) == (0, 1, 2)
    made.ended(second)
    assert ask(made).rank == 1


def test_a_rank_that_is_away_gets_nothing():
    """B55: a dead rank turns no call into anything; the others take them."""
    made = routes(3)
    made.observe(1, AWAY)
    assert {ask(made).rank for _ in range(6)} == {0, 2}


def test_a_stale_rank_gets_nothing_until_it_is_refreshed():
    """STALE: no work; current: work again, and it has the version."""
    made = routes(2)
    made.mark_stale(0, "it missed version 3")
    assert {ask(made).rank for _ in range(4)} == {1}
    assert "rank 0 is STALE: it missed version 3" in made.unfit()
    made.mark_current(0, 3)
    assert ask(made).rank == 0
    assert made.ranks[0].version == 3


def test_a_restarted_rank_is_stale_once_weights_were_given():
    """A new start has none of the updates; before the first one it has what all began with."""
    made = routes(2)
    made.observe(0, AWAY, 0)
    made.observe(0, HERE, 77)
    assert made.ranks[0].fit
    made.mark_current(0, 1)
    made.mark_current(1, 1)
    made.observe(0, AWAY, 0)
    made.observe(0, HERE, 78)
    assert made.stale() == {0: "it was restarted and has no weights since"}


def test_weights_given_to_a_start_that_is_gone_are_not_those_of_the_next():
    """An acknowledgement that comes after the rank was restarted leaves it STALE."""
    made = routes(1)
    made.observe(0, HERE, 99)
    made.mark_current(0, 5, incarnation=10)
    assert not made.ranks[0].fit
    made.mark_current(0, 5, incarnation=99)
    assert made.ranks[0].fit


def test_a_lost_call_goes_elsewhere():
    """Another rank than the one that was lost, though it is back and idle."""
    made = routes(2)
    call = ask(made)
    made.ended(ask(made))
    effects = made.lost(call)
    assert effects == [Go(call, 1)]
    assert call.lost == [0]


def test_a_call_is_tried_so_often_and_then_fails():
    """Attempts are its own; the ranks that were lost are named."""
    made = routes(2, attempts=3)
    call = ask(made)
    made.lost(call)
    made.lost(call)
    (effect,) = made.lost(call)
    assert isinstance(effect, Fail)
    assert effect.why == "its rank was lost 3 times (ranks 0, 1, 0)"
    assert [one.load for one in made.ranks] == [0, 0]


def test_what_never_reached_a_rank_is_no_attempt():
    """A rank that was not ready costs a call nothing."""
    made = routes(1, attempts=1)
    call = ask(made)
    assert made.lost(call, counts=False) == [Go(call, 0)]


def test_a_call_waits_while_a_rank_may_return():
    """No rank is fit: it waits, and goes to the first that is."""
    made = routes(1)
    made.observe(0, AWAY, why="suspect")
    call, other = Call(), Call()
    assert made.ask(call) == made.ask(other) == []
    assert made.waiting == 2
    assert made.observe(0, HERE, 10) == [Go(call, 0), Go(other, 0)]


def test_a_call_fails_when_no_rank_is_left():
    """All are gone for good: it fails at once and says how each went."""
    made = routes(2)
    call = Call()
    made.observe(0, GONE, why="dead: exit code 3")
    made.observe(1, AWAY)
    assert made.ask(call) == []
    (effect,) = made.observe(1, GONE, why="dead: SIGKILL")
    assert effect.call is call
    assert effect.why == "no rank is left: rank 0 is gone (dead: exit code 3); rank 1 is gone (dead: SIGKILL)"


def test_a_call_waits_though_the_only_living_rank_is_stale():
    """A STALE rank may be refreshed, so nothing fails for want of it."""
    made = routes(2)
    made.mark_stale(0, "x")
    made.observe(1, GONE)
    call = Call()
    assert made.ask(call) == []
    assert made.mark_current(0, 1) == [Go(call, 0)]


def test_a_call_that_is_given_up_leaves_nothing():
    """Cancelled while it waits or while a rank has it."""
    made = routes(1)
    call = ask(made)
    made.observe(0, AWAY)
    waiting = ask(made)
    made.ended(waiting)
    made.ended(call)
    assert (made.waiting, made.ranks[0].load) == (0, 0)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_ranks_do_no_call_is_lost_or_doubled(seed):
    """Random events: loads are exact, unfit ranks get nothing, nobody waits while a rank is fit."""
    rng = random.Random(seed)
    made = Routes(rng.randint(1, 4), attempts=rng.randint(1, 4))
    on_rank: dict[Call, int] = {}
    waiting: set[Call] = set()
    ended: set[Call] = set()

    def take(effects) -> None:
        for effect in effects:
            assert effect.call in waiting
            assert effect.call not in ended
            waiting.remove(effect.call)
            if isinstance(effect, Go):
                assert made.ranks[effect.rank].fit
                on_rank[effect.call] = effect.rank
            else:
                ended.add(effect.call)

    for _ in range(500):
        event = rng.choice(["ask", "ask", "ended", "lost", "drop", "observe", "observe", "stale", "current", "current"])
        rank = rng.randrange(len(made.ranks))
        if event == "ask":
            call = Call()
            waiting.add(call)
            take(made.ask(call))
        elif event in {"ended", "lost"} and on_rank:
            call = rng.choice(list(on_rank))
            del on_rank[call]
            if event == "ended":
                ended.add(call)
                made.ended(call)
            else:
                waiting.add(call)
                take(made.lost(call, counts=rng.random() < 0.8))
        elif event == "drop" and waiting:
            call = rng.choice(list(waiting))
            waiting.remove(call)
            ended.add(call)
            made.ended(call)
        elif event == "observe":
            presence = rng.choice([HERE, HERE, HERE, AWAY, GONE])
            take(made.observe(rank, presence, rng.choice([0, 1, 2]) if presence is not HERE else rng.choice([1, 2])))
        elif event == "stale":
            take(made.mark_stale(rank, "random"))
        elif event == "current":
            take(made.mark_current(rank, 1))
        assert [one.load for one in made.ranks] == [
            sum(where == one.rank for where in on_rank.values()) for one in made.ranks
        ]
        assert made.waiting == len(waiting)
        assert not (waiting and any(one.fit for one in made.ranks))
        assert not (waiting and all(one.presence is GONE for one in made.ranks))
