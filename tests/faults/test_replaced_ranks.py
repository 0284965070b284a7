"""A rank that was given to another agent while its own was cut off: it ends with 11, and nothing starts it again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_kit import AgentKit, agent_kit
from controller import Role
from launching import launch
from run_kit import DRIVERS
from waiting import wait_until, within
from zbus.registry.file import FileRegistry
from zbus.registry.records import RankClaim, Records

pytestmark = pytest.mark.alone


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[AgentKit]:
    """Give a trial with agents that leave nothing behind."""
    yield from agent_kit(tmp_path)


def plant(records: Records, rank: int, start: int = 1) -> None:
    """Claim a start of a rank for an agent elsewhere."""
    records.claim_rank(RankClaim(role="actor", rank=rank, start=start, agent="actor.other", host="elsewhere", pid=7))


def test_a_worker_that_was_replaced_exits_11_and_says_why(tmp_path: Path) -> None:
    """The next start belongs to another agent: the worker leaves with 11 within a lease, and is not restarted."""
    role = Role(f"{DRIVERS}/stuck_engines.py:Stuck", replicas=1, restart="one")
    with launch(tmp_path, {"actor": role}) as bus:
        records = Records(FileRegistry(bus.trial.registry, create=False))
        began = time.monotonic()
        plant(records, 0)
        ended = wait_until(records.exits, what="the end of the replaced rank")[0]
        took = time.monotonic() - began
        log = (bus.trial.path / ended.log).read_text()
        records.close()
        assert (ended.exit_code, ended.signal, ended.start) == (11, None, 0)
        assert "actor/0, start 0, was replaced: start 1 by agent actor.other on elsewhere; it ends" in log
        assert took < within(6.0), f"{took:.1f} s"
        agent_log = next((bus.trial.path / "logs" / "agents").iterdir())
        words = "actor/0 was replaced while this agent was taken for dead: start 1 by agent actor.other"
        text = wait_until(lambda: (t := agent_log.read_text()) and "ends with code" in t and t, what="the agent's end")
        assert words in text
        assert "agent ends with code 11" in text
        assert not [
            claim for claim in Records(FileRegistry(bus.trial.registry)).rank_claims("actor") if claim.start > 1
        ]


def test_only_the_replaced_rank_of_an_agent_ends(kit: AgentKit) -> None:
    """The others of its ranks run on; at the end the agent exits with 11."""
    go = kit.trial.path / "go"
    kit.lead(kit.job(f"print:up;until:{go}", world_size=2, restart="all"))
    agent = kit.agent(nproc=2, lease_ttl_s=1.0)
    kit.wait_log("up", rank=0)
    kit.wait_log("up", rank=1)
    plant(kit.records, 1)
    ended = kit.exit()
    assert (ended.rank, ended.stopped) == (1, True)
    assert agent.poll() is None
    go.touch()
    code, text = kit.end(agent)
    assert code == 11
    assert "actor/1 was replaced while this agent was taken for dead" in text
    assert [(r.rank, r.start, r.exit_code) for r in kit.exits()] == [(0, 0, 0), (1, 0, ended.exit_code)]


def test_a_stubborn_replaced_rank_is_killed(kit: AgentKit) -> None:
    """A rank that does not leave when told to is killed a second later: its place is somebody else's."""
    kit.lead(kit.job("stubborn;print:up;sleep", restart="one"))
    agent = kit.agent(lease_ttl_s=1.0)
    kit.wait_log("up")
    plant(kit.records, 0)
    code, _ = kit.end(agent)
    assert code == 11
    assert kit.exit().signal == 9


def test_an_agent_that_was_cut_off_does_not_act_on_a_claim_of_its_own(kit: AgentKit) -> None:
    """A restart claims the next start for the same agent: that is no replacement."""
    kit.lead(kit.job("sleep:0.5;exit:5", restart="one", max_restarts=1))
    agent = kit.agent(lease_ttl_s=0.3)
    code, text = kit.end(agent)
    assert code == 4
    assert "replaced" not in text
