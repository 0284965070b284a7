from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.supervisor import (
    Effect,
    Escalate,
    Exited,
    Finish,
    Policy,
    RestartAsked,
    SignalRank,
    Spawned,
    SpawnFailed,
    StartRank,
    StopAsked,
    Superseded,
    Supervisor,
    Tick,
)

S = 1_000_000_000


def _up(ranks: int, policy: Policy | None = None) -> Supervisor:
    machine = Supervisor(range(ranks), policy or Policy())
    assert machine.begin() == [StartRank(rank) for rank in range(ranks)]
    for rank in range(ranks):
        assert machine.on_event(0, Spawned(rank)) == []
    return machine


def test_ranks_that_end_in_order_end_the_agent_with_0() -> None:
    """Exit code 0 is an orderly end under every policy; the last one finishes."""
    for restart in ("never", "one", "all"):
        machine = _up(2, Policy(restart=restart))
        assert machine.on_event(1, Exited(0, 0, "")) == []
        assert machine.on_event(2, Exited(1, 0, "")) == [Finish(0, "all ranks ended in order")]
        assert machine.on_event(3, RestartAsked(0)) == []


def test_without_restarts_the_others_go_on_and_the_agent_ends_with_4() -> None:
    """Under never a death leaves the peers alone; at the end the first cause is named."""
    machine = _up(2)
    assert machine.on_event(1, Exited(0, None, "killed by SIGSEGV")) == []
    assert machine.state(1) == "running"
    assert machine.on_event(2, Exited(1, 3, "exited with code 3")) == [Finish(4, "rank 0 killed by SIGSEGV")]


def test_a_fenced_rank_is_not_started_again() -> None:
    """Code 11 means that somebody else holds the place: no restart, and the agent ends with 11."""
    machine = _up(1, Policy(restart="one"))
    assert machine.on_event(1, Exited(0, 11, "exited with code 11")) == [Finish(11, "rank 0 exited with code 11")]


def test_one_rank_restarts_after_a_growing_pause() -> None:
    """Under one only the failed rank starts again, after a backoff that doubles within the window."""
    machine = _up(2, Policy(restart="one", max_restarts=3, backoff_s=1.0, backoff_max_s=3.0))
    now = 0
    for pause in (1, 2, 3):
        assert machine.on_event(now, Exited(0, 1, "x")) == []
        assert machine.next_deadline_ns() == now + pause * S
        assert machine.on_event(now + pause * S - 1, Tick()) == []
        now += pause * S
        assert machine.on_event(now, Tick()) == [StartRank(0)]
        assert machine.on_event(now, Spawned(0)) == []
    assert machine.state(1) == "running"


def test_too_many_restarts_in_the_window_escalate_with_the_first_cause() -> None:
    """One restart more than allowed stops everything and ends with 4."""
    machine = _up(2, Policy(restart="one", max_restarts=1, window_s=10, backoff_s=0, grace_s=2))
    machine.on_event(1 * S, Exited(0, 1, "exited with code 1"))
    assert machine.on_event(1 * S, Tick()) == [StartRank(0)]
    machine.on_event(1 * S, Spawned(0))
    effects = machine.on_event(2 * S, Exited(0, 2, "exited with code 2"))
    assert isinstance(effects[0], Escalate)
    assert effects[0].cause.startswith("rank 0 exited with code 1; restarted 1 times within 10 s (limit 1)")
    assert "last: rank 0 exited with code 2" in effects[0].cause
    assert effects[1:] == [SignalRank(1, signal.SIGTERM)]
    assert machine.on_event(3 * S, Exited(1, 0, "")) == [Finish(4, effects[0].cause)]


def test_restarts_outside_the_window_do_not_count() -> None:
    """The limit is an intensity: slow failures restart for ever."""
    machine = _up(1, Policy(restart="one", max_restarts=1, window_s=10, backoff_s=0))
    for minute in range(20):
        now = minute * 60 * S
        assert machine.on_event(now, Exited(0, 1, "x")) == []
        assert machine.on_event(now, Tick()) == [StartRank(0)]
        machine.on_event(now, Spawned(0))


def test_a_collective_restarts_as_a_whole() -> None:
    """Under all, the peers of a failed rank are stopped, then killed, and all start only when all are gone."""
    machine = _up(3, Policy(restart="all", max_restarts=3, backoff_s=0, grace_s=1))
    term = [SignalRank(0, signal.SIGTERM), SignalRank(2, signal.SIGTERM)]
    assert machine.on_event(0, Exited(1, None, "killed by SIGKILL")) == term
    assert machine.asked(0)
    assert machine.on_event(S // 2, Exited(0, 143, "")) == []
    assert machine.on_event(1 * S, Tick()) == [SignalRank(2, signal.SIGKILL)]
    assert machine.on_event(1 * S, Tick()) == []
    assert machine.on_event(2 * S, Exited(2, None, "killed by SIGKILL")) == []
    assert machine.on_event(2 * S, Tick()) == [StartRank(0), StartRank(1), StartRank(2)]


def test_the_peers_of_a_failed_rank_are_not_counted_as_failures() -> None:
    """Collateral exits of one failure use one restart of the budget, not one each."""
    machine = _up(4, Policy(restart="all", max_restarts=1, backoff_s=0, grace_s=1))
    machine.on_event(0, Exited(1, 1, "x"))
    for rank in (0, 2, 3):
        assert not [e for e in machine.on_event(0, Exited(rank, 1, "peer")) if isinstance(e, Escalate)]
    assert len(machine.on_event(0, Tick())) == 4


def test_stop_asks_then_kills_then_finishes() -> None:
    """SIGTERM to all, SIGKILL after the grace, the code of the stop at the end."""
    machine = _up(2)
    assert machine.on_event(0, StopAsked(2.0, 143, "SIGTERM")) == [
        SignalRank(0, signal.SIGTERM),
        SignalRank(1, signal.SIGTERM),
    ]
    assert machine.on_event(S, Exited(0, 143, "")) == []
    assert machine.on_event(2 * S, Tick()) == [SignalRank(1, signal.SIGKILL)]
    assert machine.on_event(2 * S + 1, Exited(1, None, "")) == [Finish(143, "SIGTERM")]


def test_a_second_stop_shortens_the_grace_and_keeps_the_first_reason() -> None:
    """Grace 0 kills at once; who asked first names the exit code."""
    machine = _up(1)
    machine.on_event(0, StopAsked(60, 130, "SIGINT"))
    assert machine.on_event(1, StopAsked(0, 143, "SIGTERM")) == [SignalRank(0, signal.SIGKILL)]
    assert machine.on_event(2, Exited(0, None, "")) == [Finish(130, "SIGINT")]


def test_a_stop_during_a_start_is_carried_out_when_the_process_exists() -> None:
    """A rank that is being started cannot be signalled yet; it is as soon as it can."""
    machine = Supervisor([0], Policy())
    machine.begin()
    assert machine.on_event(0, StopAsked(1, 0, "done")) == []
    assert machine.on_event(1, Spawned(0)) == [SignalRank(0, signal.SIGTERM)]
    assert machine.on_event(2, Exited(0, 0, "")) == [Finish(0, "done")]


def test_a_stop_forgets_ranks_that_wait_for_their_backoff() -> None:
    """Nothing starts after a stop."""
    machine = _up(1, Policy(restart="one", backoff_s=5))
    machine.on_event(0, Exited(0, 1, "x"))
    assert machine.on_event(1, StopAsked(1, 143, "SIGTERM")) == [Finish(143, "SIGTERM")]
    assert machine.on_event(99 * S, Tick()) == []


def test_an_asked_restart_is_not_a_failure() -> None:
    """A restart that the controller wants costs nothing of the budget, under one and under all."""
    machine = _up(2, Policy(restart="one", max_restarts=0, backoff_s=0))
    assert machine.on_event(0, RestartAsked(1)) == [SignalRank(1, signal.SIGTERM)]
    assert machine.on_event(1, Exited(1, 143, "")) == []
    assert machine.on_event(1, Tick()) == [StartRank(1)]
    group = _up(2, Policy(restart="all", max_restarts=0, backoff_s=0))
    assert len(group.on_event(0, RestartAsked(1))) == 2
    group.on_event(1, Exited(1, 143, ""))
    group.on_event(1, Exited(0, 143, ""))
    assert group.on_event(1, Tick()) == [StartRank(0), StartRank(1)]


def test_ranks_that_are_asked_for_together_begin_together() -> None:
    """Whatever the policy, who ends first waits for who is stuck: rank 0 has a new store, that its peers are told."""
    for restart in ("never", "one"):
        machine = _up(3, Policy(restart=restart, backoff_s=0))
        assert machine.on_event(0, RestartAsked(0)) == [SignalRank(0, signal.SIGTERM)]
        assert machine.on_event(0, RestartAsked(1)) == [SignalRank(1, signal.SIGTERM)]
        assert machine.on_event(1, Exited(1, 143, "")) == []
        assert machine.on_event(2, Tick()) == []
        assert machine.on_event(3, Exited(0, -9, "")) == []
        assert machine.on_event(3, Tick()) == [StartRank(0), StartRank(1)]


def test_a_restart_of_an_unknown_rank_does_nothing() -> None:
    """A number from the wire that is not ours is ignored."""
    assert _up(1).on_event(0, RestartAsked(7)) == []


def test_a_rank_that_cannot_be_started_counts_as_a_failure() -> None:
    """A failed start is bounded by the same intensity as a crash loop."""
    machine = Supervisor([0], Policy(restart="one", max_restarts=1, backoff_s=0))
    machine.begin()
    assert machine.on_event(0, SpawnFailed(0, "no space")) == []
    assert machine.on_event(0, Tick()) == [StartRank(0)]
    effects = machine.on_event(0, SpawnFailed(0, "no space"))
    assert isinstance(effects[0], Escalate)
    assert isinstance(effects[-1], Finish)
    assert effects[-1].exit_code == 4


def test_a_process_that_sigkill_does_not_end_is_given_up() -> None:
    """Ten seconds after SIGKILL the agent ends without it: nothing waits for ever."""
    machine = _up(1)
    machine.on_event(0, StopAsked(0, 143, "SIGTERM"))
    due = machine.next_deadline_ns()
    assert due == 10 * S
    assert machine.on_event(due, Tick()) == [Finish(143, "SIGTERM")]


@pytest.mark.parametrize("restart", ["never", "one", "all"])
@given(data=st.data())
def test_any_history_keeps_the_rules(restart: str, data: st.DataObject) -> None:  # noqa: C901  # one case per event
    """Never two processes of a rank, no signal to a rank without one, no start after a stop, and a stop always ends."""
    policy = Policy(restart=restart, max_restarts=3, window_s=5, backoff_s=0.5, grace_s=1)
    machine = Supervisor(range(3), policy)
    starting: set[int] = set()
    running: set[int] = set()
    killed: list[int] = []
    finished = stopped = False

    def carry_out(effects: list[Effect]) -> None:
        nonlocal finished, killed
        assert not (finished and effects)
        for effect in effects:
            match effect:
                case StartRank(rank):
                    assert rank not in starting | running
                    assert not stopped
                    starting.add(rank)
                case SignalRank(rank, signum):
                    assert rank in running
                    killed += [rank] if signum == signal.SIGKILL else []
                case Finish():
                    assert not starting | running
                    finished = True

    now = 0
    carry_out(machine.begin())
    for _ in range(data.draw(st.integers(0, 40))):
        while killed:  # SIGKILL works at once
            running.remove(killed[0])
            carry_out(machine.on_event(now, Exited(killed.pop(0), None, "killed")))
        now += data.draw(st.sampled_from([0, S // 10, S]))
        choices = [("tick", 0), *[("ask", r) for r in range(3)]]
        choices += [(how, r) for r in starting for how in ("up", "fail")] + [("exit", r) for r in running]
        how, rank = data.draw(st.sampled_from(choices))
        match how:
            case "tick":
                carry_out(machine.on_event(now, Tick()))
            case "ask":
                carry_out(machine.on_event(now, RestartAsked(rank)))
            case "up":
                starting.remove(rank)
                running.add(rank)
                carry_out(machine.on_event(now, Spawned(rank)))
            case "fail":
                starting.remove(rank)
                carry_out(machine.on_event(now, SpawnFailed(rank, "x")))
            case "exit":
                running.remove(rank)
                code = data.draw(st.sampled_from([0, 1, None, 11]))
                carry_out(machine.on_event(now, Exited(rank, code, "x")))
    stopped = True
    carry_out(machine.on_event(now, StopAsked(1, 143, "end")))
    for rank in list(starting):
        starting.remove(rank)
        running.add(rank)
        carry_out(machine.on_event(now, Spawned(rank)))
    for rank in list(running):
        running.remove(rank)
        carry_out(machine.on_event(now, Exited(rank, 143, "x")))
    assert finished


@pytest.mark.parametrize("restart", ["never", "one", "all"])
def test_a_superseded_rank_ends_and_is_never_started_again(restart: str) -> None:
    """Its place belongs to another agent: told to leave, killed if it does not, 11 at the end; peers go on."""
    machine = _up(2, Policy(restart=restart))  # type: ignore[arg-type]
    assert machine.on_event(0, Superseded(1, "replaced")) == [SignalRank(1, signal.SIGTERM)]
    assert machine.on_event(0, Superseded(1, "replaced")) == []
    assert machine.on_event(S, Tick()) == [SignalRank(1, signal.SIGKILL)]
    assert machine.on_event(S, Exited(1, None, "killed by SIGKILL")) == []
    assert machine.on_event(S, RestartAsked(1)) == []
    assert machine.state(0) == "running"
    assert machine.on_event(2 * S, Exited(0, 0, "")) == [Finish(11, "replaced")]


def test_peers_of_a_superseded_rank_restart_without_it() -> None:
    """Under all, a later death restarts those that are still ours."""
    machine = _up(2, Policy(restart="all"))
    machine.on_event(0, Superseded(1, "replaced"))
    assert machine.on_event(0, Exited(1, 11, "exited with code 11")) == []
    assert machine.on_event(S, Exited(0, 3, "exited with code 3")) == []
    assert machine.on_event(9 * S, Tick()) == [StartRank(0)]


def test_a_superseded_rank_that_waits_for_its_restart_is_dropped() -> None:
    """A rank between two starts is not started any more."""
    machine = _up(1, Policy(restart="one"))
    assert machine.on_event(0, Exited(0, 3, "exited with code 3")) == []
    assert machine.on_event(0, Superseded(0, "replaced")) == [Finish(11, "rank 0 exited with code 3")]
