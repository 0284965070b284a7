from __future__ import annotations

from types import SimpleNamespace

import pytest

from controller.group import Group
from controller.role import Role
from controller.rollout import RolloutController
from controller.scheduling.inline import InlineRuntime
from rollout_engine import Speller


@pytest.fixture
def inline():
    """Two ranks in this process, as a controller shows them."""
    runtime = InlineRuntime()
    group = Group(runtime.add("rollout", Role(Speller, replicas=2)), runtime)
    calls = []
    yield SimpleNamespace(
        group={"rollout": group}.__getitem__,
        config_perf_tracer=lambda config, role=None: calls.append(("config", config, role)),
        save_perf_tracer=lambda step=None, force=False: calls.append(("save", step, force)),
        calls=calls,
    )
    runtime.close()


@pytest.fixture
def made(inline):
    """Make rollout controllers that end with the test."""
    all_of_them = []

    def make(**options) -> RolloutController:
        all_of_them.append(RolloutController(inline, **options))
        return all_of_them[-1]

    yield make
    for one in all_of_them:
        one.destroy()
