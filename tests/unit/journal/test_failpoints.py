from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from zbus import failpoints
from zbus.errors import ConfigError


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    """Leave no fail-point behind."""
    yield
    failpoints.configure(None)


def passes(name: str, times: int) -> list[int]:
    """Pass a point; return the numbers of the passes at which it raised."""
    hit = []
    for number in range(1, times + 1):
        try:
            assert failpoints.active is not None
            failpoints.active(name)
        except failpoints.FailPointError:
            hit.append(number)
    return hit


@pytest.mark.parametrize("text", [None, "", " ", ","])
def test_without_fail_points_there_is_nothing_to_call(text) -> None:
    """The product looks at one name and goes on."""
    failpoints.configure(text)
    assert failpoints.active is None


def test_a_count_acts_at_that_pass_alone() -> None:
    """``@3`` acts at the third pass; without a count every pass acts; other points are not counted along."""
    failpoints.configure("after_exec=raise@3, before_exec=raise")
    assert passes("before_exec", 2) == [1, 2]
    assert passes("before_reply", 4) == []
    assert passes("after_exec", 5) == [3]


def test_one_point_may_have_several_actions() -> None:
    """They act each at its own pass."""
    failpoints.configure("after_exec=raise@2,after_exec=raise@4")
    assert passes("after_exec", 5) == [2, 4]


def test_sleep_delays() -> None:
    """The pass takes so long."""
    failpoints.configure("after_exec=sleep:0.05")
    began = time.monotonic()
    passes("after_exec", 1)
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize(
    ("action", "code"), [("kill", -signal.SIGKILL), ("exit", 70), ("exit:3", 3)], ids=["kill", "exit", "exit code"]
)
def test_an_end_is_at_once(action: str, code: int) -> None:
    """No handler, no buffer, no ``finally`` comes after it."""
    program = f"""
from zbus import failpoints
failpoints.configure("after_exec={action}@2")
try:
    failpoints.active("after_exec")
    print("one", flush=True)
    failpoints.active("after_exec")
finally:
    print("two", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (code, "one\n")


@pytest.mark.parametrize(
    "text",
    [
        "after_exe=kill", "after_exec", "after_exec=", "after_exec=die", "after_exec=kill@0", "after_exec=kill@x",
        "after_exec=sleep", "after_exec=exit:x", "=kill",
    ],
)  # fmt: skip
def test_what_is_no_fail_point_is_refused_with_the_words_that_are(text: str) -> None:
    """A test with a misspelt fail-point must not pass for lack of a fault."""
    with pytest.raises(ConfigError, match="ZBUS_FAILPOINTS") as caught:
        failpoints.configure(text)
    assert "after_exec" in str(caught.value.hint)
    assert failpoints.active is None
