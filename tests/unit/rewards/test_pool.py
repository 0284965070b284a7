from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reward_functions
from waiting import scaled, wait_until
from zbus.errors import CodecError, ConfigError, EngineLoadError, RemoteError, RewardError
from zbus.rl.rewards import RewardPool
from zbus.runtime.processes import is_alive, start_time

pytestmark = pytest.mark.timeout(scaled(200))

FILE = Path(reward_functions.__file__)
NAMES = ("same", "distance", "whole", "mark", "wrong", "odd", "hang", "hang_with_child", "crash", "leave")


def pool(**options: Any) -> RewardPool:
    """Return a pool of all test rewards."""
    return RewardPool({name: f"{FILE}:{name}" for name in NAMES}, **{"name": "rollout/3", **options})


@pytest.fixture(scope="module")
def shared() -> Iterator[RewardPool]:
    """Give a pool of two processes for the tests that leave it as it is."""
    with pool(processes=2, timeout_s=scaled(20)) as made:
        made.wait_ready()
        yield made


def test_results_come_in_the_order_of_the_items(shared):
    """A call for each item, whatever process it runs in; the results are exact."""
    items = [(list(range(n % 7)), list(range(n % 5))) for n in range(600)]
    assert shared.map("distance", items) == [reward_functions.distance(*item) for item in items]
    assert shared.map("distance", []) == []


@pytest.mark.parametrize("value", [None, 3, 2.5, "text", b"bytes", (1, 2), {"a": [1, {2: 3}]}, {1, 2}])
def test_values_arrive_as_they_are(shared, value):
    """Arguments and results are carried by the codec, types included."""
    assert shared.call("same", value) == value
    assert type(shared.call("same", value)) is type(value)


def test_large_arrays_come_back_writable(shared):
    """A result of a megabyte is whole, and the caller's own."""
    (found,) = shared.map("whole", [(np.float32(1),)])
    np.testing.assert_array_equal(found, np.arange(300_000, dtype=np.float32) + 1)
    found[0] = 5


def test_what_a_reward_raises_is_raised_with_its_traceback(shared):
    """The class stays, the text names the reward, the traceback shows the user's line; others are not touched."""
    with pytest.raises(ValueError, match="no reward for 4") as caught:
        shared.call("wrong", 4)
    assert isinstance(caught.value, RemoteError)
    assert "reward 'wrong' in rollout/3" in str(caught.value)
    assert "reward_functions.py" in caught.value.remote_traceback
    assert shared.call("same", 1) == 1


def test_a_result_that_cannot_be_carried_is_the_rewards_error(shared):
    """The process lives on."""
    with pytest.raises(RemoteError, match="object"):
        shared.call("odd")
    assert shared.call("same", 2) == 2


def test_an_argument_that_cannot_be_carried_is_refused_at_the_call(shared):
    """Nothing is sent."""
    with pytest.raises(CodecError):
        shared.call("same", object())


def test_an_unknown_reward_is_named_with_those_there_are(shared):
    """The error is raised at the call."""
    with pytest.raises(ConfigError, match="no reward 'distanse'; it has 'same', 'distance'"):
        shared.call("distanse", 1, 2)


def test_a_reward_that_hangs_is_killed_and_named(tmp_path):
    """After its timeout only its process is gone; calls that waited behind it in that process are made by another."""
    with pool(timeout_s=scaled(0.3)) as rewards:
        rewards.wait_ready()
        first = rewards.call("mark", str(tmp_path / "log"), "first", timeout_s=scaled(20))
        slow = {"timeout_s": scaled(20)}

        async def all_at_once() -> list[Any]:
            log = str(tmp_path / "log")
            return await asyncio.gather(
                rewards.acall("same", 1, **slow),
                rewards.acall("hang"),
                *(rewards.acall("mark", log, f"behind {n}", **slow) for n in range(20)),
                return_exceptions=True,
            )

        before, error, *pids = asyncio.run(all_at_once())

    assert before == 1
    assert isinstance(error, RewardError)
    assert (error.reward, error.item, error.hung) == ("hang", "()", True)
    assert "rollout/3: reward 'hang' took longer than" in str(error)
    assert len({first, *pids}) == 2
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["first", *(f"behind {n}" for n in range(20))], "each was called once"


def test_a_result_does_not_wait_for_the_slow_call_behind_it(tmp_path):
    """Of calls that travelled together each result comes when it is there, also where the next one never returns."""
    with pool(timeout_s=scaled(1000)) as rewards:
        rewards.wait_ready()

        async def two_at_once() -> int:
            first = asyncio.create_task(rewards.acall("same", 5))
            hangs = asyncio.create_task(rewards.acall("mark", str(tmp_path / "log"), "x", True))
            await asyncio.to_thread(wait_until, (tmp_path / "log").exists)
            found: int = await asyncio.wait_for(first, scaled(10))
            assert not hangs.done()
            hangs.cancel()
            return found

        assert asyncio.run(two_at_once()) == 5


@pytest.mark.parametrize(("name", "how"), [("crash", "killed by SIGSEGV"), ("leave", "exited with code 7")])
def test_a_reward_that_ends_its_process_is_named_with_how(name, how):
    """The error says how the process ended; the next call has another one."""
    with pool() as rewards:
        with pytest.raises(RewardError, match=f"reward '{name}' did not return: its process {how}"):
            rewards.call(name)
        assert rewards.call("same", 1) == 1


def test_what_a_hanging_reward_started_is_ended_with_it(tmp_path):
    """A process that a reward started does not outlive the timeout."""
    with pool(timeout_s=scaled(1.5)) as rewards:
        rewards.wait_ready()
        with pytest.raises(RewardError, match="took longer"):
            rewards.call("hang_with_child", str(tmp_path / "pids"))
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2
        for pid in pids:
            wait_until(lambda pid=pid: start_time(pid) is None or not is_alive(pid, start_time(pid) or 0))


def test_a_call_that_is_cancelled_while_it_waits_is_not_made(tmp_path):
    """An episode that is given up leaves no work behind in the queue."""
    log = str(tmp_path / "log")
    with pool() as rewards:
        rewards.wait_ready()

        async def give_up() -> None:
            busy = asyncio.create_task(rewards.acall("mark", log, "busy", True, timeout_s=scaled(1)))
            await asyncio.to_thread(wait_until, (tmp_path / "log").exists)
            waits = asyncio.create_task(rewards.acall("mark", log, "waits"))
            await asyncio.sleep(0)
            waits.cancel()
            with pytest.raises(RewardError):
                await busy
            await rewards.acall("mark", log, "after")

        asyncio.run(give_up())
    assert (tmp_path / "log").read_text().splitlines() == ["busy", "after"]


def test_closing_ends_the_processes_and_tells_who_waits(tmp_path):
    """A call on its way fails with the reason; no process is left; closing again is harmless."""
    rewards = pool()
    rewards.wait_ready()

    async def close_below() -> int:
        calls = [asyncio.create_task(rewards.acall("mark", str(tmp_path / "log"), "x", True)) for _ in range(3)]
        await asyncio.to_thread(wait_until, (tmp_path / "log").exists)
        rewards.close()
        for call in calls:
            with pytest.raises(RewardError, match="the pool was closed"):
                await call
        return len(calls)

    assert asyncio.run(close_below()) == 3
    rewards.close()
    with pytest.raises(RewardError, match="the pool is closed"):
        rewards.call("same", 1)


def test_a_reward_that_cannot_be_imported_fails_the_start():
    """The error names the reward and the near name."""
    with (
        RewardPool({"d": f"{FILE}:distanc"}, name="rollout/0") as rewards,
        pytest.raises(RemoteError, match="no name 'distanc' for reward 'd'") as caught,
    ):
        rewards.wait_ready()
    assert caught.value.remote_type == EngineLoadError.__name__


def test_a_process_killed_before_it_read_anything_ends_no_pool(monkeypatch):
    """Its end is told with how it ended, and the next call has a process of its own."""
    unread = "import select, sys; select.select([int(sys.argv[2])], [], []); sys.exit(3)"
    with monkeypatch.context() as patched:
        patched.setattr("zbus.rl.rewards.pool._COMMAND", (sys.executable, "-c", unread))
        rewards = pool()
        with pytest.raises(RewardError, match="its process exited with code 3"):
            rewards.wait_ready()
    with rewards:
        assert rewards.call("same", 1) == 1


def test_a_process_that_cannot_be_started_fails_the_calls_that_wait_and_no_later_one(monkeypatch):
    """A machine without room for a process is told; once there is room, the next call has one."""

    def no_room(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with pool() as rewards:
        with pytest.raises(RewardError):
            rewards.call("leave")
        before = _descriptors()
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", no_room)
            with pytest.raises(RewardError, match=r"no process could be started: .*temporarily unavailable"):
                rewards.call("same", 1)
        assert _descriptors() == before
        assert rewards.call("same", 2) == 2


def test_functions_of_a_module_can_be_given_themselves():
    """The driver's own pool takes the function; one that is not importable is refused at once."""
    with RewardPool({"d": reward_functions.distance}) as rewards:
        assert rewards.call("d", [1, 2], [2]) == 1
    for bad in (lambda: 1, reward_functions.later, 5):
        with pytest.raises(ConfigError, match="not a plain function of a module"):
            RewardPool({"bad": bad})


def test_processes_end_with_an_owner_that_is_killed(tmp_path):
    """SIGKILL of the owner leaves no process, also while a reward hangs in it."""
    log = tmp_path / "log"
    program = (
        "import sys\n"
        "from zbus.rl.rewards import RewardPool\n"
        f"rewards = RewardPool({{'mark': {str(FILE) + ':mark'!r}}})\n"
        "print(rewards.call('mark', sys.argv[1], 'ready'), flush=True)\n"
        "rewards.call('mark', sys.argv[1], 'hangs', True, timeout_s=1000)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, str(log)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        pid = int(owner.stdout.readline())
        started = start_time(pid)
        assert started is not None
        wait_until(lambda: "hangs" in log.read_text(), what="a reward that hangs")
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    wait_until(lambda: not is_alive(pid, started), what="the end of the reward's process")


def test_a_pool_leaves_no_descriptor_behind():
    """Whatever was opened for processes that came and went is closed."""
    with pool() as rewards:  # what imports open stays open
        rewards.call("same", 1)
    before = _descriptors()
    with pool() as rewards:
        for name in ("leave", "same", "leave", "same"):
            with contextlib.suppress(RewardError):
                rewards.call(name, *([1] if name == "same" else []))
    assert _descriptors() == before


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
