from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbus import names
from zbus.errors import ConfigError

ESCAPES = [
    "",
    ".",
    "..",
    "...",
    "/",
    "/etc/passwd",
    "../x",
    "..\\x",
    "a/b",
    "a/../b",
    "./a",
    "a b",
    "a\n",
    "\na",
    "a\0",
    "a:b",
    "~",
    "~root",
    "$HOME",
    "%2e%2e",
    "a*",
    "\u00e4",
    "\uff0e\uff0e",
    "\u2024\u2024",
    "a" * 65,
]


@pytest.mark.parametrize("text", ESCAPES)
def test_a_name_that_could_leave_the_root_is_refused(text):
    """Components outside [A-Za-z0-9._-]{1,64}, or only dots, are a ConfigError that says what they name."""
    with pytest.raises(ConfigError, match="role") as caught:
        names.check(text, "role")
    assert "only dots" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["a", "A-1", "x_y", "v1.2", ".hidden", "-", "a" * 64, "..a"])
def test_a_plain_name_passes_unchanged(text):
    """Valid components come back as they are."""
    assert names.check(text) == text


BUILDERS = {
    "job": names.job,
    "agent": names.agent,
    "lease": names.lease,
    "rank_claim": lambda text: names.rank_claim(text, 0, 0),
    "worker": lambda text: names.worker(text, 0, 1),
    "exit_record": lambda text: names.exit_record(text, 0, 1),
    "experiment": lambda text: names.trial(text, "t"),
    "trial": lambda text: names.trial("e", text),
    "discovery": lambda text: names.worker_discovery("e", "t", text, 0),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize("text", ["..", "../x", "/abs", "a/b", ""])
def test_no_key_builder_lets_a_name_escape(build, text):
    """B22: every builder validates every text it is given."""
    with pytest.raises(ConfigError):
        build(text)


@pytest.mark.parametrize("build", [names.worker, names.exit_record])
def test_a_negative_rank_is_refused(build):
    """Ranks count from 0."""
    with pytest.raises(ConfigError, match="-1"):
        build("actor", -1, 0)


@given(st.text())
def test_what_passes_is_one_harmless_component(text):
    """Whatever the text, it is refused or is one component with no separator and not only dots."""
    try:
        checked = names.check(text)
    except ConfigError:
        return
    assert checked == text
    assert "/" not in checked
    assert checked.strip(".")
    assert checked.isascii()
    assert 1 <= len(checked) <= 64


def test_keys_of_one_trial_are_where_the_reference_says():
    """The layout of the registry is fixed."""
    assert names.epoch(3) == "epochs/epoch.3"
    assert names.job("actor") == "jobs/actor"
    assert names.agent("actor.host.1") == "agents/actor.host.1"
    assert names.lease("controller.3") == "leases/controller.3"
    assert names.rank_claim("actor", 2, 0) == "ranks/actor.2.0"
    assert names.worker("actor", 2, 77) == "workers/actor.2.77"
    assert names.exit_record("actor", 2, 77) == "exits/actor.2.77"
    assert names.worker_discovery("exp", "t1", "actor", 2) == "exp/t1/workers/actor/2"
