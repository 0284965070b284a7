from __future__ import annotations

import contextlib
import math
import time

import pytest

import zbus
from controller import Controller
from controller.role import Role
from zbus.engine import AnyOne, Concat, Split
from zbus.errors import ConfigError


class Doubler(zbus.Engine):
    @zbus.endpoint(Split("dp"), collect=Concat())
    def double(self, items):
        return [2 * item for item in items]

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen", concurrency=4)
    async def one(self, item):
        return item


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Give two ranks in this process."""
    roles = {"actor": Role(Doubler, replicas=2)}
    with Controller.launch("t", roles, scheduler="inline", root=tmp_path_factory.mktemp("runs")) as bus:
        yield bus.group("actor")


@pytest.mark.parametrize(
    "deadline", [0, 0.0, -1, -0.5, math.inf, -math.inf, math.nan, 1e30, "0s", "-1s", "soon", "", True]
)
def test_a_deadline_that_no_call_could_meet_is_refused_where_it_is_given(group, deadline):
    """Row 76: zero, negative, endless and unreadable ones are errors that show the value; nothing is called."""
    shown = repr(deadline) if isinstance(deadline, str) else ""
    with pytest.raises(ConfigError, match="deadline") as caught:
        group.double.options(deadline=deadline)([1])
    assert shown in str(caught.value)
    assert caught.value.hint
    with pytest.raises(ConfigError, match="deadline"):
        group.options(deadline=deadline)
    with pytest.raises(ConfigError, match="deadline"):
        group.one.map([1], deadline=deadline)
    with pytest.raises(ConfigError, match="deadline"):
        zbus.endpoint(deadline=deadline)(Doubler.double)


@pytest.mark.parametrize("deadline", [1e-3, 30, "2m", "24h"])
def test_any_other_deadline_is_taken(group, deadline):
    """Row 76: from a millisecond to a day; a very short one ends the call in time instead of being no deadline."""
    slow = group.double.options(deadline=deadline)
    if deadline == 1e-3:
        began = time.monotonic()
        with contextlib.suppress(zbus.CallTimeout):
            assert slow([1]) == [2]
        assert time.monotonic() - began < 5
    else:
        assert slow([1]) == [2]


def test_a_batch_of_no_items_calls_every_rank_with_none(group):
    """Row 76: an empty list is a list: the answer is empty, and nobody divides by zero."""
    assert group.double([]) == []
    assert list(group.one.map([])) == []
    with group.batch() as batch:
        pass
    assert batch is not None


@pytest.mark.parametrize("replicas", [0, -1, 2.5, "2", True, 10**6])
def test_a_number_of_ranks_that_cannot_be_is_refused_before_anything_starts(tmp_path, replicas):
    """Row 76: a million of them too, with what the host allows; no directory and no process is made."""
    with pytest.raises(ConfigError, match=r"replicas|descriptors") as caught:
        Controller.launch("t", {"actor": Role(Doubler, replicas=replicas)}, root=tmp_path / "runs")
    assert caught.value.hint
    assert not list(tmp_path.glob("runs/*/*/registry/epochs/*"))
