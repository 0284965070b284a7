from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kit import AgentKit, agent_kit


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[AgentKit]:
    """Give a trial with agents that leave nothing behind."""
    yield from agent_kit(tmp_path)


@pytest.mark.parametrize("use_template", [True, False])
def test_an_agent_ends_with_its_ranks(kit: AgentKit, use_template: bool) -> None:
    """Two ranks that end in order end the agent with code 0, one exit record each."""
    kit.lead(kit.job("print:hello {spec.rank}", world_size=2))
    code, text = kit.end(kit.agent(nproc=2, use_template=use_template))
    assert code == 0, text
    assert [(r.rank, r.exit_code, r.signal, r.start) for r in kit.exits()] == [(0, 0, None, 0), (1, 0, None, 0)]
    assert kit.log(1) == "hello 1\n"
