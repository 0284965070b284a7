from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest

from controller.rollout import RolloutController, RolloutTimeout
from controller.rollouts.results import Outcome
from rollout_engine import until
from waiting import scaled, wait_until, within
from zbus.errors import ConfigError, NotExecuted, RolloutError
from zbus.rl import Sampling
from zbus.rl.workflow import Workflow


class Twice:
    """Generates twice, at the controller."""

    async def run_episode(self, engine, data):
        first = await engine.generate([1], Sampling(max_tokens=data))
        second = await engine.generate([1, 2], Sampling(max_tokens=1))
        return np.concatenate([first.ids, second.ids])


class Gated:
    """Waits until the test lets it go on."""

    def __init__(self) -> None:
        self.open = False
        self.begun: list[object] = []

    async def run_episode(self, engine, data):
        self.begun.append(data)
        await until(lambda: self.open)
        return await engine.generate([1], Sampling(max_tokens=1))


# -- workflows ---------------------------------------------------------------------------------------------------------


def test_a_workflow_here_is_given_the_endpoints_of_the_role(made):
    """Each of its calls goes to a rank of its own; the result says which weights made it."""
    rollout = made(max_staleness=1, batch_size=4)
    for size in (3, 4):
        rollout.submit(size, Twice())
    results = rollout.wait(2, timeout=scaled(20))
    assert [len(one.value) for one in results] == [4, 5]
    assert [(one.oldest, one.newest, one.attempts, one.accepted) for one in results] == [(0, 0, 2, True)] * 2
    assert all(one.ran_s > 0 and one.queued_s >= 0 and one.rank in {0, 1} for one in results)


def test_a_workflow_by_name_runs_at_a_worker(made):
    """The role's own; its result comes with the versions that it began and ended with."""
    rollout = made()
    rollout.set_version(7)
    numbers = [rollout.submit(item, "spell") for item in "abc"]
    results = rollout.wait(3, timeout=scaled(20))
    assert [(one.task, one.value["data"], one.oldest, one.newest) for one in results] == [
        (number, item, 7, 7) for number, item in zip(numbers, "abc", strict=True)
    ]
    assert {one.value["rank"] for one in results} == {0, 1}


@pytest.mark.parametrize(
    ("workflow", "words"),
    [(Twice, "class Twice is no workflow"), (object(), "is no workflow"), (3, "3 is no workflow")],
)
def test_what_is_no_workflow_is_refused_at_once(made, workflow, words):
    """Nothing is submitted, and the error says what one is."""
    rollout = made()
    with pytest.raises(ConfigError, match=words) as caught:
        rollout.submit(1, workflow)
    assert "async def run_episode" in str(caught.value.hint)
    assert "0 open" in repr(rollout)


def test_a_workflow_may_not_call_what_all_ranks_answer(made):
    """A control endpoint inside a workflow is its failure, told by name."""

    class Wrong:
        async def run_episode(self, engine, data):
            return await engine.set_version(3)

    rollout = made()
    rollout.submit(1, Wrong())
    (one,) = rollout.wait(1, timeout=scaled(20))
    assert one.outcome is Outcome.FAILED
    assert "`set_version` of role 'rollout' is not AnyOne" in str(one.error)


class Scored:
    async def run_episode(self, engine, data):
        answers = await engine.samples(data, 3, Sampling(max_tokens=2, seed=7))
        rewards = [await engine.reward("length", [0] * len(one.ids)) for one in answers]
        return {"rewards": rewards, "version": engine.version}


def test_a_workflow_has_samples_and_rewards_here_as_at_a_worker(made):
    """One object runs at either place: several answers to a prompt, rewards in processes of their own."""
    rollout = made(rewards={"length": "builtins:len"})
    (one,) = rollout.rollout_batch([[1, 2]], Scored(), timeout=scaled(60))
    assert isinstance(Scored(), Workflow)
    assert one.value == {"rewards": [2, 2, 2], "version": 0}
    assert one.attempts == 3
    (bad,) = made().rollout_batch([[1]], Scored(), errors="return")
    assert "there is no reward 'length'" in str(bad.error)


# -- B46: one loop of its own ------------------------------------------------------------------------------------------


def test_blocking_calls_inside_running_loops_do_not_deadlock(made):
    """B46: six nested blocking calls, each inside a running loop, all end."""
    rollout = made()

    async def nested(depth: int) -> int:
        (one,) = rollout.rollout_batch([depth], "spell", timeout=scaled(20))
        rest = await asyncio.to_thread(asyncio.run, nested(depth - 1)) if depth else 0
        return one.value["data"] + rest

    assert asyncio.run(nested(5)) == 15


def test_an_awaited_call_leaves_its_loop_running(made):
    """B46: while a coroutine waits for rollouts, others of its loop go on."""
    rollout = made()
    gate = Gated()

    async def story() -> int:
        beats = 0
        await rollout.aio.submit(1, gate)
        waiting = asyncio.create_task(rollout.aio.wait(1))
        for _ in range(20):
            await asyncio.sleep(0.001)
            beats += not waiting.done()
        gate.open = True
        await waiting
        return beats

    assert asyncio.run(story()) == 20


def test_a_blocking_call_inside_a_workflow_is_refused(made):
    """B46: it would wait for the loop that it stands on; the error names the way out."""
    rollout = made()

    class Blocks:
        async def run_episode(self, engine, data):
            rollout.rollout_batch([1])

    class Awaits:
        async def run_episode(self, engine, data):
            return [one.value for one in await rollout.aio.rollout_batch([data], "spell")]

    (one,) = rollout.rollout_batch([1], Blocks(), errors="return")
    assert "would wait for itself" in str(one.error)
    assert ".aio" in one.error.hint
    assert rollout.rollout_batch([1], Awaits())[0].value[0]["data"] == 1


# -- B47, B49: results -------------------------------------------------------------------------------------------------


def test_a_timeout_keeps_what_is_ready(made):
    """B47: wait(3) with two ready raises, and the next wait gets them."""
    rollout, gate = made(), Gated()
    rollout.submit("a", "spell")
    rollout.submit("b", "spell")
    rollout.submit("c", gate)
    wait_until(lambda: "2 ready" in rollout._driver.standing("submit"), what="two results")
    with pytest.raises(RolloutTimeout, match=r"2 of 3 rollouts finished within 0\.05 s.*1 running, 2 ready"):
        rollout.wait(3, timeout=0.05)
    assert [one.task for one in rollout.wait(2, timeout=scaled(20))] == [0, 1]
    gate.open = True
    assert [one.task for one in rollout.wait(1, timeout=scaled(20))] == [2]


@pytest.mark.parametrize("delay", range(12))
def test_a_cancelled_wait_loses_nothing(made, delay):
    """B47: whenever an await is cancelled, its results are handed out to it or to the next one."""
    rollout = made()

    async def story() -> None:
        waiting = asyncio.create_task(rollout.aio.wait(2))
        await rollout.aio.submit("a", "spell")
        await rollout.aio.submit("b", "spell")
        for _ in range(delay):
            await asyncio.sleep(0.0002)
        waiting.cancel()
        got = await asyncio.gather(waiting, return_exceptions=True)
        if isinstance(got[0], BaseException):
            assert [one.task for one in await rollout.aio.wait(2, timeout=scaled(20))] == [0, 1]

    rollout.submit("warm", "spell")
    rollout.submit("up", "spell")
    rollout.wait(2, timeout=scaled(20))
    rollout.destroy()
    rollout = made()
    asyncio.run(story())


@pytest.mark.parametrize("ended", [False, True])
def test_a_submission_whose_await_is_cancelled_leaves_nothing_open(made, ended):
    """Its caller has no number to take it by: it is withdrawn, whether it has run meanwhile or not."""
    rollout = made()
    if not ended:
        rollout.pause()

    async def story() -> None:
        waiting = asyncio.create_task(rollout.aio.submit("a", "spell"))
        await asyncio.sleep(0)
        rollout.stale()  # blocks this loop until it was queued
        if ended:
            wait_until(lambda: rollout._driver.tasks.tally("submit") == (0, 0, 1), what="its end")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()

    asyncio.run(story())
    rollout.resume()
    wait_until(lambda: not rollout._driver.tasks.open(), what="it to be gone")
    with pytest.raises(ValueError, match="0 are open"):
        rollout.wait(1)
    assert rollout.submit("b", "spell") == 1
    assert [one.data for one in rollout.wait(1, timeout=scaled(20))] == ["b"]


def test_every_way_to_end_is_an_outcome_of_its_own(made):
    """B49: rejected by the workflow, by the filter, failed, cancelled, accepted: never one None for all."""
    rollout, gate = made(), Gated()
    rollout.submit("a", "reject")
    rollout.submit("b", "spell", lambda value: value["data"] != "b")
    rollout.submit("c", "fail")
    cancelled = rollout.submit("d", gate)
    rollout.submit("e", "spell", should_accept=_later)
    wait_until(lambda: gate.begun, what="the start of what is to be cancelled")
    rollout.cancel(cancelled)
    results = rollout.wait(5, timeout=scaled(20))
    assert [one.outcome for one in results] == ["rejected", "rejected", "failed", "cancelled", "accepted"]
    assert results[1].value["data"] == "b"
    with pytest.raises(RolloutError, match=r"rollout 2 was failed.*no episode of 'c'") as caught:
        results[2].result()
    assert caught.value.rollout is results[2]
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(RolloutError, match="rollout 3 was cancelled"):
        results[3].result()


async def _later(value):
    await asyncio.sleep(0)
    return True


def test_a_filter_that_raises_fails_its_rollout(made):
    """It rejects nothing in silence."""
    rollout = made()
    rollout.submit("a", "spell", lambda value: value["none"])
    (one,) = rollout.wait(1, timeout=scaled(20))
    assert (one.outcome, type(one.error)) == ("failed", KeyError)


def test_one_rollout_is_waited_for_by_number(made):
    """Whatever its turn; once; not ready is a timeout and no None."""
    rollout, gate = made(), Gated()
    slow, quick = rollout.submit("a", gate), rollout.submit("b", "spell")
    assert rollout.wait_for_task(quick, timeout=scaled(20)).value["data"] == "b"
    with pytest.raises(RolloutTimeout, match=r"rollout 0 did not finish within 0\.01 s"):
        rollout.wait_for_task(slow, timeout=0.01)
    gate.open = True
    assert rollout.wait_for_task(slow, timeout=scaled(20)).accepted
    with pytest.raises(ConfigError, match="rollout 0 is not open"):
        rollout.wait_for_task(slow)


def test_results_come_in_order_where_that_is_asked_for(made):
    """ordered: what ends first waits for what was submitted before it."""
    rollout, gate = made(ordered=True), Gated()
    rollout.submit("slow", gate)
    rollout.submit("quick", "spell")
    wait_until(lambda: "1 ready" in rollout._driver.standing("submit"), what="the quick one")
    with pytest.raises(RolloutTimeout):
        rollout.wait(1, timeout=0.02)
    gate.open = True
    assert [one.data for one in rollout.wait(2, timeout=scaled(20))] == ["slow", "quick"]


# -- B48, B50, B51: pauses and bounds ----------------------------------------------------------------------------------


def test_a_pause_starts_nothing_and_withholds_nothing(made):
    """B48: what runs ends and is handed out; what is queued starts at resume."""
    rollout, gate = made(max_concurrent=1), Gated()
    rollout.submit("a", gate)
    wait_until(lambda: gate.begun, what="the first")
    rollout.pause()
    rollout.submit("b", gate)
    gate.open = True
    assert [one.data for one in rollout.wait(1, timeout=scaled(20))] == ["a"]
    with pytest.raises(RolloutTimeout, match="submission is paused"):
        rollout.wait(1, timeout=0.02)
    rollout.resume()
    assert [one.data for one in rollout.wait(1, timeout=scaled(20))] == ["b"]


def test_who_submits_too_much_waits_for_room(made):
    """B50: a full queue holds the producer back until one starts; a timeout says why."""
    rollout, gate = made(max_concurrent=1, queue=1), Gated()
    rollout.submit("a", gate)
    rollout.submit("b", gate)
    with pytest.raises(RolloutTimeout, match=r"no room for a further rollout within 0\.02 s.*1 run, the most at once"):
        rollout.submit("c", gate, timeout=0.02)
    third = threading.Thread(target=rollout.submit, args=("d", gate))
    third.start()
    gate.open = True
    third.join(scaled(20))
    assert [one.data for one in rollout.wait(3, timeout=scaled(20))] == ["a", "b", "d"]


def test_a_version_wakes_whoever_waits_for_capacity(made):
    """B51: a wait that hung for want of a version ends as soon as one counts, without pause and resume."""
    rollout = made(batch_size=2, max_staleness=0)
    for item in range(4):
        rollout.submit(item, "spell")
    assert len(rollout.wait(2, timeout=scaled(20))) == 2
    with pytest.raises(RolloutTimeout, match="a new version must count first"):
        rollout.wait(2, timeout=0.02)
    found = []
    waiter = threading.Thread(target=lambda: found.extend(rollout.wait(2, timeout=scaled(20))))
    waiter.start()
    rollout.set_version(1)
    waiter.join(scaled(20))
    assert [one.oldest for one in found] == [1, 1]


def test_a_long_wait_tells_what_it_waits_for(made, caplog, monkeypatch):
    """B51: without a timeout it stays, and the log says what for."""
    monkeypatch.setattr("controller.rollouts.operations.REPORT_S", 0.01)
    rollout, gate = made(), Gated()
    rollout.submit("a", gate)
    waiter = threading.Thread(target=rollout.wait, args=(1,))
    waiter.start()
    wait_until(lambda: "submit: 0 queued, 1 running, 0 ready" in caplog.text, what="the report")
    gate.open = True
    waiter.join(scaled(20))


def test_results_arrive_while_a_control_call_takes_long(made):
    """B52: a control call that hangs holds up no result."""
    rollout = made()
    release = threading.Event()

    async def slow(*_args):
        await asyncio.to_thread(release.wait, scaled(20))
        return {}

    rollout._operations.control.pause = slow
    control = threading.Thread(target=rollout.pause_generation)
    control.start()
    rollout.submit("a", "spell")
    assert rollout.wait(1, timeout=scaled(20))[0].accepted
    release.set()
    control.join(scaled(20))


def test_limits_that_never_yield_are_refused(inline, made):
    """B53: by the one owner of the limit, at the start."""
    with pytest.raises(ConfigError, match="max_staleness=-1"):
        RolloutController(inline, max_staleness=-1)
    with pytest.raises(ConfigError, match="a batch of 8 could never become full"):
        made(batch_size=4, max_staleness=1).prepare_batch([1], "spell", batch_size=8)
    with pytest.raises(ConfigError, match="5 rollouts asked for, and no more than results=4"):
        made(results=4).wait(5)


# -- B54: versions -----------------------------------------------------------------------------------------------------


def test_a_version_counts_when_it_is_acknowledged(inline, made):
    """B54: a rank that fails is named, STALE and without work; the others go on with the new version."""
    rollout = made()
    assert rollout.set_version(1) == {}
    inline.group("rollout")[1].be_sick()
    behind = rollout.set_version(2)
    assert list(behind) == [1]
    assert "this rank is sick" in behind[1]
    assert rollout.get_version() == 2
    assert "it missed version 2" in rollout.stale()[1]
    assert {one.value["rank"] for one in rollout.rollout_batch(range(6), "spell")} == {0}
    inline.group("rollout")[1].be_sick(sick=False)
    rollout.mark_current(1, 2)
    assert {one.value["rank"] for one in rollout.rollout_batch(range(6), "spell")} == {0, 1}


def test_a_stale_rank_is_not_renamed_current(inline, made):
    """A rank without the weights is not asked to bear their version."""
    rollout = made()
    rollout.mark_stale(1, "it missed an update")
    assert rollout.set_version(3) == {1: "rank 1 is STALE: it missed an update"}
    assert inline.group("rollout").get_version() == [3, 0]


def test_a_version_that_nobody_acknowledged_does_not_count(inline, made):
    """B54: the old one stays, and the error names every rank."""
    rollout = made()
    inline.group("rollout").be_sick()
    with pytest.raises(NotExecuted, match=r"no rank of rollout acknowledged version 1.*rank 0: .*rank 1: "):
        rollout.set_version(1)
    assert rollout.get_version() == 0


def test_no_lock_is_held_while_ranks_are_asked(inline, made):
    """B54: during a set_version that hangs, rollouts are submitted and handed out."""
    rollout = made()
    release = threading.Event()
    ask = rollout._operations.control._ask

    async def slow(*args):
        await asyncio.to_thread(release.wait, scaled(20))
        return await ask(*args)

    rollout._operations.control._ask = slow
    setting = threading.Thread(target=rollout.set_version, args=(1,))
    setting.start()
    assert rollout.rollout_batch(["a"], "spell", timeout=scaled(20))[0].oldest == 0
    assert rollout.get_version() == 0
    release.set()
    setting.join(scaled(20))
    assert rollout.get_version() == 1


def test_a_rank_restarted_before_its_acknowledgement_is_read_is_stale(inline, made):
    """The start that answered is gone: the next one has other weights."""
    rollout = made()
    peer = inline.group("rollout").roster.peers()[1]
    ask = rollout._operations.control._ask

    async def restarted(*args):
        answers = await ask(*args)
        peer.incarnation += 1
        return answers

    rollout._operations.control._ask = restarted
    rollout.set_version(1)
    assert rollout._driver.routes.stale() == {1: "it was restarted and has no weights since"}


def test_versions_only_rise(made):
    """An older version is refused before any rank is asked."""
    rollout = made()
    rollout.set_version(5)
    with pytest.raises(ConfigError, match="version 4 is older than version 5"):
        rollout.set_version(4)


# -- B58: pairs --------------------------------------------------------------------------------------------------------


def test_generation_goes_on_whatever_happens_in_a_pause(made):
    """B58: pause and resume are one block; an error inside leaves no rank paused."""
    rollout = made()
    seen = []

    def update(running) -> None:
        seen.append(running)
        rollout.submit([1])
        with pytest.raises(RolloutTimeout):
            rollout.wait(1, timeout=0.02)
        raise RuntimeError("the update broke")

    with pytest.raises(RuntimeError, match="the update broke"), rollout.generation_paused() as running:
        update(running)
    assert seen == [{0: 0, 1: 0}]
    assert rollout.wait(1, timeout=scaled(20))[0].accepted


def test_a_rank_that_does_not_pause_is_left_behind(inline, made):
    """It is named and STALE, and the others do pause."""
    rollout = made()
    inline.group("rollout")[0].be_sick()
    assert rollout.pause_generation() == {1: 0}
    assert "it did not pause" in rollout.stale()[0]
    assert rollout.continue_generation() == {1: True}


def test_an_answer_across_an_update_says_both_versions(made):
    """Paused in the middle, given a version, resumed: oldest and newest differ, and staleness goes by the oldest."""
    rollout = made(batch_size=1, max_staleness=0)
    rollout.submit([1], Long())
    wait_until(lambda: Long.begun, what="its start")
    with rollout.generation_paused():
        rollout.set_version(1)
    (one,) = rollout.wait(1, timeout=scaled(20))
    assert (one.oldest, one.newest, one.outcome) == (0, 1, Outcome.STALE)


class Long:
    begun = False

    async def run_episode(self, engine, data):
        first = await engine.generate(data, Sampling(max_tokens=1))
        Long.begun = True
        await until(lambda: engine.version > 0)
        second = await engine.generate(data, Sampling(max_tokens=1))
        return first, second


# -- batches -----------------------------------------------------------------------------------------------------------


def test_an_evaluation_disturbs_no_training(made):
    """rollout_batch is not held against the versions, and its results are nobody else's."""
    rollout = made(batch_size=2, max_staleness=0)
    first = rollout.prepare_batch(list(range(10)), "spell")
    assert len(rollout.rollout_batch(range(20), "spell", timeout=scaled(20))) == 20
    assert len(first) == 2
    rollout.set_version(1)
    assert len(rollout.prepare_batch(list(range(10)), "spell", timeout=scaled(20))) == 2


def test_a_batch_that_is_larger_than_every_bound_comes_through(made):
    """The queue and the results of a rollout_batch have bounds, and it feeds and empties them itself."""
    rollout = made(queue=2, results=3, max_concurrent=2)
    assert [one.data for one in rollout.rollout_batch(range(50), "spell")] == list(range(50))


def test_a_batch_that_is_out_of_time_leaves_nothing(made):
    """What had not finished is cancelled: nobody else could take it."""
    rollout = made()
    with pytest.raises(RolloutTimeout, match="1 of 2 rollouts finished"):
        rollout.rollout_batch([1, 1], OneSticks(), timeout=0.05)
    wait_until(lambda: "0 open" in repr(rollout), what="the end of what was cancelled")


class OneSticks:
    def __init__(self) -> None:
        self.count = 0

    async def run_episode(self, engine, data):
        self.count += 1
        if self.count == 2:
            await asyncio.Event().wait()
        return await engine.generate([1], Sampling(max_tokens=1))


def test_batches_follow_the_data_over_and_over(made):
    """Items in order, from the beginning again at the end; one batch per version, none lost or doubled."""
    rollout = made(batch_size=4, max_staleness=1, ordered=True)
    data = list(range(6))
    seen = []
    for version in range(1, 7):
        batch = rollout.prepare_batch(data, "spell", timeout=scaled(20))
        assert all(one.oldest >= version - 1 - 1 for one in batch)
        seen += [one.data for one in batch]
        rollout.set_version(version)
    assert seen == [item % 6 for item in range(24)]


def test_what_is_rejected_is_replaced_and_counted(made):
    """A batch has as many accepted ones as it should."""
    rollout = made(batch_size=4)
    batch = rollout.prepare_batch(list(range(8)), "spell", lambda value: value["data"] % 2 == 0, timeout=scaled(20))
    assert [one.data % 2 for one in batch] == [0] * 4
    assert rollout.export_stats()["rollout/rejected"] >= 3


def test_a_failure_in_a_batch_is_loud(made):
    """The first failed rollout raises with its cause; with ``tolerate`` so many are passed over."""
    rollout = made(batch_size=2)
    with pytest.raises(RolloutError, match="no episode of 1") as caught:
        rollout.prepare_batch([1], "fail", timeout=scaled(20))
    assert "tolerate" in caught.value.hint
    patient = made(batch_size=2, tolerate=2)
    workflow = FailsTwice()
    assert len(patient.prepare_batch([1, 2, 3], workflow, timeout=scaled(20))) == 2


class FailsTwice:
    def __init__(self) -> None:
        self.left = 2

    async def run_episode(self, engine, data):
        if self.left:
            self.left -= 1
            raise ValueError("unlucky")
        return await engine.generate([1], Sampling(max_tokens=1))


def test_another_dataloader_or_workflow_is_used(made):
    """B56: what is submitted from then on is of the new ones; what was in flight comes first and as it began."""
    rollout = made(batch_size=2, ordered=True)
    old, new = [1, 2, 3], [100, 200]
    seen = [one.value for one in rollout.prepare_batch(old, "spell", timeout=scaled(20))]
    for _ in range(12):
        seen += [one.value for one in rollout.prepare_batch(new, Names(), timeout=scaled(20))]
    switch = next(place for place, value in enumerate(seen) if isinstance(value, str))
    assert {value["data"] for value in seen[:switch]} <= {1, 2, 3}
    assert seen[switch : switch + 4] == ["new 100", "new 200", "new 100", "new 200"]
    assert all(isinstance(value, str) for value in seen[switch:])


class Names:
    async def run_episode(self, engine, data):
        await engine.generate([1], Sampling(max_tokens=1))
        return f"new {data}"


def test_a_version_begins_the_next_batch_before_anybody_asks_for_it(made):
    """Items for it wait already when a batch is handed out, so generation goes on while the caller trains."""
    rollout, data = made(batch_size=4, max_staleness=1), list(range(1000))
    rollout.prepare_batch(data, "spell", timeout=scaled(20))
    started = [rollout.export_stats()["rollout/started"]]

    def begun() -> float:
        started.append(rollout.export_stats()["rollout/started"])
        return sum(started)

    for version in range(1, 6):
        rollout.set_version(version)
        wanted = 4 * (version + 2)  # staleness allows one batch more than are used, and the one that is trained on
        wait_until(lambda wanted=wanted: begun() >= wanted, scaled(10), f"rollouts of version {version}")
        assert sum(started) == wanted
        ages = {version - one.oldest for one in rollout.prepare_batch(data, "spell", timeout=scaled(20))}
        assert ages == {1}, f"version {version}"


def test_a_batch_timeout_keeps_what_was_accepted(made):
    """B47 for batches: items and results wait for the next call."""
    rollout, data = made(batch_size=3, ordered=True), list(range(9))
    gate = Gated()
    with pytest.raises(RolloutTimeout, match="0 of 3 rollouts were accepted"):
        rollout.prepare_batch(data, gate, timeout=0.05)
    gate.open = True
    assert [one.data for one in rollout.prepare_batch(data, gate, timeout=scaled(20))] == [0, 1, 2]


def test_an_iterator_ends(made):
    """What cannot be begun again ends: the last batch is short, the next is empty."""
    rollout = made(batch_size=2)
    items = iter(range(5))
    sizes = [len(rollout.prepare_batch(items, "spell", timeout=scaled(20))) for _ in range(4)]
    assert sizes == [2, 2, 1, 0]


def test_elements_may_be_lists_of_items(made):
    """batched: what a loader yields is a list, and each of its items is a rollout."""
    rollout = made(batch_size=3, ordered=True)
    batch = rollout.prepare_batch([[1, 2], [3, 4]], "spell", batched=True, timeout=scaled(20))
    assert [one.data for one in batch] == [1, 2, 3]


def test_data_without_items_is_refused(made):
    """Instead of waiting for ever."""
    with pytest.raises(ConfigError, match="has no items"):
        made().prepare_batch([], "spell")


class Broken:
    def __iter__(self):
        yield 1
        raise OSError("disk")


def test_an_item_that_was_taken_from_its_source_is_used(made):
    """Though the source raised after it and another one is given: it comes first."""
    rollout = made(batch_size=2, ordered=True)
    with pytest.raises(OSError, match="disk"):
        rollout.prepare_batch(Broken(), "spell")
    assert [one.data for one in rollout.prepare_batch([5, 6], "spell", timeout=scaled(20))] == [1, 5]


def test_data_that_raises_is_not_begun_anew(made):
    """An iterator that raised looks as if it had ended: it is refused from then on, no item is left out in silence."""
    rollout, data = made(batch_size=2, ordered=True), Broken()
    with pytest.raises(OSError, match="disk"):
        rollout.prepare_batch(data, "spell")
    with pytest.raises(ConfigError, match="raised OSError before"):
        rollout.prepare_batch(data, "spell", timeout=scaled(20))


def test_one_batch_at_a_time(made):
    """Two threads in prepare_batch would share one source: the second is refused."""
    rollout, gate = made(), Gated()
    first = threading.Thread(target=rollout.prepare_batch, args=([1], gate))
    first.start()
    wait_until(lambda: gate.begun, what="the first batch")
    with pytest.raises(ConfigError, match="another call of it is not over"):
        rollout.prepare_batch([1], gate)
    gate.open = True
    first.join(scaled(20))


# -- recovery ----------------------------------------------------------------------------------------------------------


def test_another_run_goes_on_where_one_stood(made):
    """Version, place in the data and what was in flight: nothing is skipped, nothing comes twice."""
    data = list(range(100))
    first = made(batch_size=4, max_staleness=1, ordered=True)
    seen = []
    for version in (1, 2):
        seen += [one.data for one in first.prepare_batch(data, "spell", timeout=scaled(20))]
        first.set_version(version)
    state = first.state()
    second = made(batch_size=4, max_staleness=1, ordered=True)
    second.restore(state)
    assert second.state() == state
    assert second.get_version() == 2
    for version in (3, 4):
        seen += [one.data for one in second.prepare_batch(data, "spell", timeout=scaled(20))]
        second.set_version(version)
    assert sorted(seen) == list(range(16))
    with pytest.raises(ConfigError, match="rollouts were prepared already"):
        second.restore(state)
    with pytest.raises(ConfigError, match="it lacks epoch, pending, position"):
        made().restore({"version": 1})


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_statistics_are_own_and_of_the_ranks(made):
    """Sums over ranks, own counts since the last time, and how stale results were."""
    rollout = made()
    rollout.rollout_batch(range(5), "spell")
    rollout.submit(1, "reject")
    rollout.wait(1, timeout=scaled(20))
    stats = rollout.export_stats()
    assert stats["episodes"] == 5
    assert (stats["rollout/submitted"], stats["rollout/accepted"], stats["rollout/rejected"]) == (6, 5, 1)
    assert stats["rollout/staleness"] == 0
    assert stats["rollout/ran_s"] > 0
    again = rollout.export_stats()
    assert (again["rollout/submitted"], again["episodes"]) == (0, 0)


def test_statistics_that_nobody_asks_for_stay_small(made, monkeypatch):
    """What was noted is added up now and then; when asked for, it is all there."""
    monkeypatch.setattr("controller.rollouts.statistics._MOST", 4)
    rollout = made()
    ran = [one.ran_s for _ in range(3) for one in rollout.rollout_batch(range(3), "spell", timeout=scaled(20))]
    assert all(len(numbers) < 4 for numbers in rollout._parts.counters._times.values())
    stats = rollout.export_stats()
    assert stats["rollout/ran_s"] == pytest.approx(np.mean(ran))
    assert (stats["rollout/submitted"], stats["rollout/staleness"]) == (9, 0)
    assert np.isnan(rollout.export_stats().get("rollout/ran_s", np.nan))


def test_tracing_goes_by_the_role(inline, made):
    """B59: None calls nobody where nothing was configured, another kind of config is refused."""
    rollout = made()
    rollout.config_perf_tracer(None)
    assert inline.calls == []
    rollout.config_perf_tracer({"level": "full"})
    rollout.save_perf_tracer(3, force=True)
    rollout.config_perf_tracer(None)
    assert inline.calls == [("config", {"level": "full"}, "rollout"), ("save", 3, True), ("config", None, "rollout")]
    with pytest.raises(ConfigError, match="'full' configures no tracing"):
        rollout.config_perf_tracer("full")


def test_destroy_tells_who_waits_and_leaves_no_thread(made):
    """Waiting callers get an error or their cancelled results, nothing hangs, and a second destroy does nothing."""
    rollout, gate = made(), Gated()
    rollout.submit("a", gate)
    wait_until(lambda: gate.begun, what="the start")
    told = []

    def waits() -> None:
        try:
            told.append(rollout.prepare_batch([1], gate))
        except ConfigError as error:
            told.append(error)

    waiter = threading.Thread(target=waits)
    waiter.start()
    wait_until(lambda: len(gate.begun) > 1, what="the batch")
    rollout.destroy()
    waiter.join(scaled(20))
    assert isinstance(told[0], ConfigError)
    rollout.destroy()
    assert not [one for one in threading.enumerate() if one.name == "zbus-rollout-rollout"]
    with pytest.raises(ConfigError, match="was destroyed"):
        rollout.submit("b")


class Deaf:
    """Goes on though it is cancelled, until the test lets it end."""

    def __init__(self) -> None:
        self.begun = self.open = False

    async def run_episode(self, engine, data):
        self.begun = True
        while not self.open:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(scaled(60))


def test_destroy_leaves_a_workflow_behind_that_goes_on_though_cancelled(made, monkeypatch, caplog):
    """It is told in the log, and destroy returns."""
    monkeypatch.setattr("controller.rollouts.driver._GRACE_S", 0.05)
    monkeypatch.setattr("controller.rollouts.loop._GRACE_S", 0.05)
    rollout, deaf = made(), Deaf()
    rollout.submit("a", deaf)
    wait_until(lambda: deaf.begun, what="the start")
    end = threading.Thread(target=rollout.destroy, daemon=True)
    end.start()
    end.join(scaled(10))
    deaf.open = True
    assert not end.is_alive()
    assert "1 workflows go on though they were cancelled" in caplog.text


def test_what_is_forgotten_leaves_its_place_to_others(made):
    """Accepted rollouts that a cancel forgets are used for no version: others start at once."""
    rollout = made(batch_size=2, max_staleness=0)
    for item in "ab":
        rollout.submit(item, "spell")
    wait_until(lambda: len(rollout._driver.tasks.peek("submit")) == 2, what="two results")
    rollout.cancel()
    for item in "cd":
        rollout.submit(item, "spell")
    assert [one.data for one in rollout.wait(2, timeout=scaled(20))] == ["c", "d"]


def test_an_interrupted_wait_loses_nothing(made):
    """Ctrl-C in a blocking wait: the results are there for the next one."""
    import signal

    rollout, gate = made(), Gated()
    rollout.submit("a", gate)
    main = threading.get_ident()
    timer = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        rollout.wait(1)
    assert time.monotonic() - began < within(20)
    gate.open = True
    assert rollout.wait(1, timeout=scaled(20))[0].data == "a"
