"""Ranks on several hosts, each with its own network, processes and boot id; one of them is cut off, or moves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waiting import scaled, within

HERE = Path(__file__).parent
TOOLS = ("unshare", "nsenter", "ip", "iptables", "mount", "hostname", "tc")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.alone,
    pytest.mark.ci,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

Play = Callable[[str], dict[str, Any]]

HEARTBEAT_S = 12.0
"""A vanished host is noticed after a ping every 2 s and 10 s without an answer."""


@pytest.fixture
def play(tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return a function that plays a scenario of ``drivers/hosts_driver.py`` and returns what it tells."""
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))

    def run(scenario: str) -> dict[str, Any]:
        driver = str(HERE / "drivers" / "hosts_driver.py")
        ran = subprocess.run(
            ["unshare", "--net", "--mount", "--uts", sys.executable, driver, scenario, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=scaled(280),
        )
        logs = "".join(f"\n== {log.name}\n{log.read_text()[-2000:]}" for log in sorted(tmp_path.glob("*.log")))
        assert ran.returncode == 0, ran.stderr[-3000:] + logs
        told: dict[str, Any] = json.loads(ran.stdout)
        told["stderr"] = ran.stderr
        return told

    return run


def test_a_host_cut_off_beyond_its_lease_and_replaced_ends_with_11(play):
    """Rows 5, 25, 30: the call that ran is UNKNOWN, the others go on at the replacement; healed, the old one leaves.

    Nothing runs twice, and the old one starts nothing once its lease is over: what was queued there never runs.
    """
    told = play("replaced")
    assert told["outcomes"] == ["UNKNOWN lease"] * 6
    assert told["declared"] < HEARTBEAT_S + within(2.0)
    assert told["start"] == 1
    assert (told["after"], told["more"]) == ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    assert told["code"] == 11
    assert "actor/0 was replaced while this agent was taken for dead: start 1 by agent actor.host4" in told["told"]
    assert [end for end in told["exits"] if end[0] == 0] == [[0, 0, 11, None]]
    assert [end[:2] for end in told["exits"] if end[0] == 1] == [[1, 0]], "the group is one whole: restart=all"
    assert set(told["effects"].values()) == {1}
    assert not [name for name in told["effects"] if name.startswith("queued")]
    assert sum(told["effects"].values()) == told["at_heal"] + 5
    assert told["stderr"].count("actor/0 died") == 1
    assert "actor/1 died" not in told["stderr"]


def test_a_host_cut_off_beyond_its_lease_that_nobody_replaced_goes_on(play):
    """P9: what was open is UNKNOWN; healed, the same incarnation serves on, and nothing runs twice."""
    told = play("healed")
    assert told["outcomes"] == ["UNKNOWN lease"] * 6
    assert not told["ready_while_cut"]
    assert told["start"] == 0
    assert told["running"]
    assert told["back"] < within(5.0)
    assert set(told["effects"].values()) == {1}
    assert "actor/0 is back, and nothing has taken its place" in told["stderr"]


def test_a_rank_that_its_controller_alone_cannot_reach_is_not_dead(play):
    """Row 34: others reach it and its lease is renewed, so nobody may take its place; healed, its call is answered."""
    told = play("asymmetric")
    assert told["guest"]["start"] == 0, "another host reaches it"
    assert told["refused"] == 2
    assert "actor/0 is already run by another agent" in told["rival"]
    assert told["during"] == {"before": 1}
    assert (told["outcome"], told["start"]) == ("OK", 0)
    assert told["effects"] == {"before": 1, "during": 1}
    assert "died" not in told["stderr"]


def test_a_rank_whose_host_gets_another_address_is_found_there(play):
    """Row 32: its next start publishes where it is, and the controller follows."""
    told = play("moves")
    assert told["start"] == 1
    assert told["endpoints"]["0"].startswith("tcp://127.231.0.2:")
    assert told["endpoints"]["1"].startswith("tcp://127.231.0.77:")
    assert told["after"] == 1
    assert told["took"] < within(10.0)


def test_a_way_that_swallows_large_packets_is_told_by_the_deadline(play):
    """Row 39: small calls pass, a large one ends with its deadline and what is known, ``ctl`` and the rank live on."""
    told = play("black_hole")
    assert (told["small"], told["after"]) == (2, 3)
    assert told["outcome"] == "UNKNOWN deadline"
    assert "passed its deadline of 3 s" in told["error"]
    assert told["ctl"] == 1
    assert set(told["effects"].values()) == {1}
    assert told["start"] == 0
    assert "died" not in told["stderr"]


def test_a_large_payload_on_a_slow_link_starves_no_heartbeat(play):
    """Row 28: a megabyte at one megabit per second; ``ctl`` is answered all the while, and nobody is called dead."""
    told = play("slow_link")
    assert told["whole"]
    assert told["took"] > 5.0, "the link was not slow"
    assert len(told["answers"]) >= 4
    assert {count for count, _ in told["answers"]} == {1}
    assert max(seconds for _, seconds in told["answers"]) < within(3.0)
    assert told["effects"] == {"before": 1, "big": 1}
    assert told["start"] == 0
    assert "died" not in told["stderr"]


def test_a_gigabyte_over_a_slow_link_raises_no_doubt_and_holds_up_nobody(play):
    """A gigabyte at 50 MB/s and 128 MiB back: whole, once, at the speed of the link; calls beside it stay quick."""
    told = play("bulk_link")
    assert told["right"] == {"there": True, "back": True}
    assert 20 < told["took"]["there"] < scaled(120), "the link was not slow, or was not used"
    assert told["states"] == ["ready"], "somebody was doubted"
    assert "died" not in told["stderr"]
    assert "suspect" not in told["stderr"].lower()
    assert (told["effects"], told["start"]) == (1, 0)
    assert len(told["answers"]) > 20
    slowest = [max(column) for column in zip(*told["answers"], strict=True)]
    print(f"there {told['took']['there']:.1f} s, back {told['took']['back']:.1f} s, slowest beside it {slowest}")
    assert max(slowest) < within(3.0)
    assert told["report"]["bulk_given_bytes"] == 1 << 30, "nothing was sent twice"
    assert told["report"]["bulk_pulled_bytes"] == 1 << 27
    assert told["report"]["bulk_offered_bytes"] == 0
    assert told["rss"] < 2 << 30, "the array is there once"


def test_a_host_without_ipv4_and_without_a_name_works(play):
    """Row 38: sockets bind ``::1``, records say so, and no name is looked up."""
    told = play("ipv6_only")
    assert told["answers"] == [1, 1]
    assert told["endpoints"]
    assert all(endpoint.startswith("tcp://[::1]:") for endpoint in told["endpoints"])
