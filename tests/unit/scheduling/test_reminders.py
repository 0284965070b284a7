from __future__ import annotations

import logging
import time

import pytest

from controller.patience import wait_reminding
from controller.scheduling.api import Job
from controller.scheduling.external import ExternalScheduler
from zbus.config import TrialDir


class Roster:
    """Stands in for the members: says how often it was asked before all are there."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def wait(self, done, timeout_s):
        self.turns -= 1
        return self.turns < 0


@pytest.fixture
def external(tmp_path):
    """An external scheduler that waits for three ranks of two roles."""
    scheduler = ExternalScheduler(TrialDir.create(tmp_path, "demo", "one"))
    scheduler.start(Job(role="actor", replicas=2, engine="m:A"))
    scheduler.start(Job(role="critic", replicas=1, engine="m:C"))
    yield scheduler
    scheduler.close()


def test_who_waits_for_hands_is_reminded_of_who_is_missing_and_what_to_type(external, caplog):
    """Each period without progress is one warning that names the missing ranks and the lines that start them."""
    with caplog.at_level(logging.INFO, "zbus.controller"):
        assert wait_reminding(Roster(2), external, bool, time.monotonic() + 60)
    assert len(caplog.records) == 2
    text = caplog.records[0].getMessage()
    assert text.startswith("still waiting, 50 s left; actor/0: nobody has started it; actor/1: nobody")
    assert f"start with: zbus-worker start --role actor --nproc 2 --trial-dir {external.trial}" in text
    assert f"start with: zbus-worker start --role critic --nproc 1 --trial-dir {external.trial}" in text


def test_the_deadline_ends_the_wait_without_a_last_reminder(external, caplog):
    """At the deadline the wait ends as false: the error that follows says it all."""
    with caplog.at_level(logging.INFO, "zbus.controller"):
        assert not wait_reminding(Roster(1), external, bool, time.monotonic() + 5)
    assert caplog.records == []


def test_nobody_is_reminded_of_what_the_scheduler_itself_starts(caplog):
    """Ranks that this run starts itself are not asked of the user."""
    with caplog.at_level(logging.INFO, "zbus.controller"):
        assert wait_reminding(Roster(3), object(), bool, time.monotonic() + 60)
    assert caplog.records == []
