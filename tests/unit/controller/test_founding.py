from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

import zbus
from controller import founding
from controller.founding import (
    DistributedTrainController,
    RolloutController,
    Scheduling,
    TrainController,
    create_engine_with_retry,
    get_scheduling_config,
    rpc_call,
    wait_future_ordered,
)
from controller.group import Group
from controller.role import Role
from controller.scheduling.inline import InlineRuntime
from fake_placer import lost, make_group, ok, raised
from waiting import wait_until
from zbus.engine import AnyOne
from zbus.errors import BatchError, CallTimeout, ConfigError, RolloutError, Unavailable
from zbus.protocol.messages import Outcome, OutcomeKind

NOT_SENT = Outcome(OutcomeKind.NOT_EXECUTED, None, "worker_exit", "it died before the call was sent", 0)


class Engine(zbus.Engine):
    def setup(self, ctx):
        self.rank = ctx.rank

    @zbus.endpoint()
    def train_batch(self, batch, group_size=1, timeout=None, rank=None):
        return (self.rank, batch, group_size, timeout, rank)

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen", concurrency=4)
    async def generate(self, item):
        await asyncio.sleep(0.001 * (item % 3))
        if item == 13:
            raise ValueError("unlucky")
        return item * 10

    @zbus.endpoint(AnyOne(), lane="gen")
    async def never(self, item):
        await asyncio.Event().wait()


@pytest.fixture
def bus():
    """What the founding controllers need of a controller, over an inline runtime."""
    runtime = InlineRuntime()
    groups = {"actor": Group(runtime.add("actor", Role(Engine, replicas=2)), runtime)}
    calls = []
    yield SimpleNamespace(
        group=groups.__getitem__,
        config_perf_tracer=lambda config, role=None: calls.append(("config", config, role)),
        save_perf_tracer=lambda step=None, force=False: calls.append(("save", step, force)),
        calls=calls,
    )
    runtime.close()


def test_every_founding_name_is_there():
    """The names that this project began with are public (B60)."""
    assert set(founding.__all__) >= {
        "Job",
        "Scheduling",
        "ScheduleStrategy",
        "Worker",
        "TrainController",
        "RolloutController",
        "DistributedTrainController",
        "create_engine_with_retry",
        "rpc_call",
        "wait_future_ordered",
        "get_scheduling_config",
    }
    assert DistributedTrainController is TrainController
    assert all(hasattr(founding, name) for name in founding.__all__)


def test_rpc_call_is_one_call_by_name(bus):
    """Every argument after the name is the endpoint's own: no keyword is eaten (B57, B60)."""
    group = bus.group("actor")
    assert rpc_call(group[1], "train_batch", [1], group_size=4, timeout=9, rank=7) == (1, [1], 4, 9, 7)
    assert len(rpc_call(group, "train_batch", [1])) == 2
    with pytest.raises(AttributeError, match="did you mean 'train_batch'"):
        rpc_call(group, "train_bach")


def test_results_are_awaited_in_rank_order(bus):
    """wait_future_ordered gives answers in the order of the futures (B60)."""
    group = bus.group("actor")
    futures = [one.train_batch.submit(rank) for rank, one in enumerate(group)]
    assert [answer[:2] for answer in wait_future_ordered(futures, timeout=10)] == [(0, 0), (1, 1)]


def test_engine_creation_is_safe_to_repeat(bus):
    """A rank that has an engine keeps it and says what it is."""
    group = bus.group("actor")
    told = create_engine_with_retry(group)
    assert [set(one["endpoints"]) for one in told] == [{"train_batch", "generate", "never"}] * 2
    assert create_engine_with_retry(group[1])[0]["digest"] == told[1]["digest"]


def test_engine_creation_is_tried_again_where_that_is_safe():
    """Not started or lost with its worker: asked again; the deadline covers all tries (B60)."""
    group, placer, _ = make_group(Engine, 2)

    def auto(request):
        attempt = len(placer.placed)
        request.answer({1: NOT_SENT, 2: lost()}.get(attempt) or ok({"digest": "d"}))

    placer.auto = auto
    told = create_engine_with_retry(group, (1,), {"a": 2}, timeout="1m", backoff=0.001)
    assert told == [{"digest": "d"}] * 2
    assert [placed.lane for placed in placer.placed] == ["main"] * 3
    assert placer.requests[0].calls == [("zbus.create_engine", (), {"args": (1,), "kwargs": {"a": 2}})]
    assert 0 < placer.placed[-1].deadline_s < 60


@pytest.mark.parametrize("error", [ValueError("bad config"), RuntimeError("timeout")])
def test_an_error_of_setup_is_not_tried_again(error):
    """A constructor or setup that raises is told at once (B3)."""
    group, placer, _ = make_group(Engine, 2)
    placer.auto = lambda request: request.answer(raised(error) if request.member else ok({}))
    with pytest.raises(BatchError):
        create_engine_with_retry(group, backoff=0.001)
    assert len(placer.placed) == 1


def test_engine_creation_gives_up_after_its_attempts():
    """The last failure is raised after so many tries."""
    group, placer, roster = make_group(Engine, 1)
    placer.auto = lambda request: request.answer(NOT_SENT)
    with pytest.raises(zbus.NotExecuted):
        create_engine_with_retry(group, attempts=2, backoff=0.001)
    assert len(placer.placed) == 2
    roster.members[0].state = type(roster.members[0].state).CONNECTING
    with pytest.raises(Unavailable):
        create_engine_with_retry(group, attempts=2, backoff=0.001)


def test_the_train_controller_is_its_group(bus):
    """Endpoints are methods; the tracer is configured for its role; None calls nobody (B59)."""
    train = TrainController(bus)
    assert train.world_size == 2
    assert train.train_batch(5)[1][:2] == (1, 5)
    train.config_perf_tracer(None)
    train.save_perf_tracer(3, force=True)
    assert bus.calls == [("save", 3, True)]
    train.config_perf_tracer({"enabled": True})
    train.config_perf_tracer(None)
    assert bus.calls[1:] == [("config", {"enabled": True}, "actor"), ("config", None, "actor")]
    with pytest.raises(AttributeError, match="did you mean 'train_batch'"):
        _ = train.train_bach


def test_rollouts_come_back_in_order_of_submission(bus):
    """wait(n) takes n finished rollouts, lowest number first, each once."""
    with RolloutController(bus, "actor") as rollout:
        numbers = [rollout.submit(item) for item in range(6)]
        assert numbers == list(range(6))
        first = [one.value for one in rollout.wait(2, timeout=10)]
        rest = [one.value for one in rollout.wait(4, timeout=10)]
        assert sorted(first + rest) == [0, 10, 20, 30, 40, 50]
        assert rest == sorted(rest)
        with pytest.raises(ValueError, match="1 rollouts asked for, 0 are open"):
            rollout.wait(1)


def test_a_rollout_batch_keeps_the_order_of_its_items(bus):
    """One answer per item, in input order; a failed one is told with the others kept."""
    with RolloutController(bus, "actor") as rollout:
        assert [one.value for one in rollout.rollout_batch([3, 1, 2])] == [30, 10, 20]
        good, bad = rollout.rollout_batch([1, 13], errors="return")
        assert (good.result(), bad.outcome) == (10, "failed")
        with pytest.raises(RolloutError, match="unlucky") as caught:
            rollout.rollout_batch([1, 13])
        assert isinstance(caught.value.__cause__, ValueError)


def test_waiting_for_rollouts_ends(bus):
    """Too few in time: a CallTimeout, and nothing was taken."""
    with RolloutController(bus, "actor", "never") as rollout:
        rollout.submit(1)
        with pytest.raises(CallTimeout, match=r"0 of 1 rollouts finished within 0\.02 s"):
            rollout.wait(1, timeout=0.02)
        rollout.cancel()
        wait_until(lambda: "0 open" in repr(rollout), what="the end of what was cancelled")


def test_a_rollout_endpoint_must_be_any_one(bus):
    """An endpoint that all ranks run cannot be spread."""
    with pytest.raises(ConfigError, match="`train_batch` of role 'actor' is not AnyOne"):
        RolloutController(bus, "actor", "train_batch")


def test_a_roles_needs_are_told_per_rank():
    """get_scheduling_config gives one entry per rank."""
    found = get_scheduling_config(Role("engines:Actor", replicas=3, gpus=1, ports=2, env={"A": "b,c=d"}))
    assert len(found) == 3
    assert all(isinstance(one, Scheduling) for one in found)
    assert (found[2].gpu, found[2].port_count, found[2].env_vars) == (1, 2, {"A": "b,c=d"})
