"""The bus thread of a real worker blocks, or dies: it is told with its stack, and nothing stops without a word."""

from __future__ import annotations

import time

import pytest

import zbus
from controller import Role
from launching import launch
from run_kit import DRIVERS
from waiting import scaled, wait_until
from zbus.ids import WorkerName

pytestmark = pytest.mark.alone

ENGINE = f"{DRIVERS}/meddling_engine.py:Meddler"
NAME = WorkerName("actor", 0)


def test_a_blocked_bus_thread_is_told_with_its_stack_and_ends_nobody(tmp_path):
    """Calls wait for it and are answered; afterwards ``ctl`` and the log tell of it; nobody was called dead."""
    with launch(tmp_path, {"actor": Role(ENGINE)}) as bus:
        actor = bus.group("actor")
        assert actor[0].count() == 1
        blocked = scaled(1.5)
        began = time.monotonic()
        actor[0].block_bus(blocked)
        assert actor[0].count() == 2
        status = wait_until(lambda: bus.statuses(scaled(5)).get(NAME), what="an answer on ctl")
        assert time.monotonic() - began >= blocked
        (slow,) = status["slow_handlers"]["last"]
        assert status["slow_handlers"]["count"] == 1
        assert slow["name"] == "a handler of the bus thread"
        assert slow["seconds"] >= 0.25
        assert any(line.endswith("in handler_that_blocks") for line in slow["stack"]), slow
        assert actor[0].count() == 3
        log = (bus.trial.path / "logs" / "actor" / "0.0.log").read_text()
        assert "a handler of the bus thread has run for" in log


def test_a_worker_whose_bus_thread_died_ends_with_the_cause(tmp_path):
    """It does not live on as if it could be asked: exit 70, and the cause in the error and in the log."""
    with launch(tmp_path, {"actor": Role(ENGINE)}) as bus:
        with pytest.raises(zbus.WorkerLost) as caught:
            bus.group("actor")[0].break_bus()
        error = caught.value
        assert error.exit_code_of_worker == 70
        assert any("its bus thread died of RuntimeError: a fault of the bus" in line for line in error.log_tail)
