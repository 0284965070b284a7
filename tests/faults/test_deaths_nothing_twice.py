"""What must run once runs once, and what need not be asked is not asked, seen in real workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import Controller, Role
from launching import launch
from run_kit import DRIVERS
from zbus.config import Config
from zbus.config.schema import TraceConfig

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """One trial of two ranks whose every call is counted."""
    role = Role(f"{DRIVERS}/fault_engines.py:Victim", replicas=2)
    with launch(tmp_path_factory.mktemp("runs"), {"actor": role}) as bus:
        yield bus


def counts(bus: Controller) -> Any:
    """Return how often each rank has run ``count``, this time included."""
    return bus.group("actor").count()


def test_a_caller_that_stops_waiting_runs_nothing_twice(bus: Controller) -> None:
    """Waiting again, however often, finds the one run; the answer comes once it has ended."""
    before = counts(bus)
    actor = bus.group("actor")
    blocker = actor.step.submit("sleep:0.6", peers="sleep:0.6")
    future = actor.count.submit()
    for _ in range(5):
        with pytest.raises(TimeoutError):
            future.result(timeout=0.05)
    assert future.result() == [number + 1 for number in before]
    assert blocker.result() == ["done", "done"]
    assert counts(bus) == [number + 2 for number in before]


@pytest.mark.parametrize("text", ["NCCL timeout", "connection reset by peer", "503 busy", "plain"])
def test_a_method_that_raises_runs_once(bus: Controller, text: str) -> None:
    """Whatever its message says, an application error is the answer; retries asked for do not repeat it."""
    before = counts(bus)
    one = bus.group("actor")[1]
    with pytest.raises(ValueError, match=text) as caught:
        one.options(retries=3).step(f"counted:{text}")
    assert caught.value.outcome == "APP_ERROR"
    assert counts(bus) == [before[0] + 1, before[1] + 2], "the step counted itself once on rank 1"


def test_saving_traces_calls_nobody_where_nothing_is_traced(tmp_path: Path) -> None:
    """With tracing off, config None and save at every step are local: no worker is asked anything."""
    config = Config(trace=TraceConfig(level="off"))
    role = Role(f"{DRIVERS}/fault_engines.py:Victim", replicas=2)
    with launch(tmp_path, {"actor": role}, config=config) as bus:
        asked: list[str] = []
        original = bus._session.ask

        def ask(role: str, method: str, *rest: Any, **more: Any) -> Any:
            asked.append(method)
            return original(role, method, *rest, **more)

        bus._session.ask = ask  # type: ignore[method-assign]
        for step in range(100):
            bus.save_perf_tracer(step)
        assert asked == []
        bus.config_perf_tracer(None)
        assert asked == []
        bus.config_perf_tracer({"level": "rpc"}, "actor")
        bus.config_perf_tracer(None)
        assert asked == ["zbus.config_perf_tracer"] * 2, "ranks that trace are told to end it"
