"""What a trace shows of requests and replies that get lost: every attempt, and whom each arrow joins."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from controller import Role
from launching import launch
from waiting import scaled, wait_until
from zbus.config import load_config
from zbus.protocol.messages import Kind
from zbus.testing.proxy import FaultProxy, between, quick

pytestmark = pytest.mark.alone

HERE = Path(__file__).parent


def events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def ends(found: list[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    """Return the arrows' ends of one kind by arrow; no arrow has two ends of a kind."""
    chosen = [e for e in found if e.get(key)]
    by_arrow = {e["bind_id"]: e["args"] for e in chosen}
    assert len(by_arrow) == len(chosen)
    return by_arrow


def test_every_attempt_is_shown_and_every_arrow_joins_its_own(tmp_path):
    """Lost requests leave arrows that nobody meets; what arrived is joined by call and attempt, there and back."""
    role = Role(f"{HERE}/drivers/network_engines.py:Counting", args=[str(tmp_path / "effects")])
    config = load_config(data={"trace": {"level": "rpc", "merge": False}}).config
    with (
        FaultProxy(seed=7) as proxy,
        between(proxy, timing=quick(20)),
        launch(tmp_path, {"actor": role}, config=config) as bus,
    ):
        bus.config_perf_tracer({"level": "rpc", "gauge_period_s": 0.05})
        actor = bus.group("actor")
        requests = proxy.drop("request", kinds={Kind.REQ}, lane="main", probability=0.3, count=20)
        replies = proxy.drop("reply", kinds={Kind.RESULT}, lane="main", probability=0.3, count=20)
        futures = [actor[0].add.submit(f"c{number}") for number in range(100)]
        assert [future.result(scaled(30)) for future in futures] == list(range(1, 101))
        assert requests.hits > 3
        assert replies.hits > 3
        again = bus.report()["retransmissions"]
        traces = bus.trial.traces
        for role_name, gauge in (("controller", b'"calls"'), ("actor", b'"bus"')):
            path = traces / role_name / "traces_0.jsonl"
            wait_until(lambda path=path, gauge=gauge: gauge in path.read_bytes(), what=f"a sample in {path}")
    caller, worker = (events(traces / role / "traces_0.jsonl") for role in ("controller", "actor"))
    runs = [e["args"] for e in worker if e.get("args", {}).get("kind") == "run" and e["args"]["method"] == "add"]
    assert len(runs) == 100
    assert sum(args["attempt"] > 1 for args in runs) > 0

    # Requests: all that ran were joined to the attempt that brought them; the others' arrows arrive nowhere.
    out = ends([e for e in caller if e["name"] in ("send", "sent again")], "flow_out")
    into = ends([e for e in worker if e["name"] == "queue add"], "flow_in")
    assert set(into) <= set(out)
    assert all((out[arrow]["call"], out[arrow]["attempt"]) == (a["call"], a["attempt"]) for arrow, a in into.items())
    assert sum(e["name"] == "sent again" for e in caller) == again

    # Replies: the caller's side of each call names the attempt that was answered.
    back = ends([e for e in worker if e["name"] == "reply"], "flow_out")
    home = ends([e for e in caller if e["args"].get("kind") == "return"], "flow_in")
    calls = {a["call"] for a in runs}
    assert {a for a, args in home.items() if args["call"] in calls} == {
        a for a, args in back.items() if args["call"] in calls
    }

    # Every phase of every call, once.
    for found, kinds in (
        (caller, ("client", "encode", "send", "wire", "return")),
        (worker, ("queue", "decode", "run", "encode_result", "reply")),
    ):
        for kind in kinds:
            seen = Counter(e["args"]["call"] for e in found if e.get("args", {}).get("kind") == kind)
            assert all(seen[call] == 1 for call in calls), kind

    gauges = {e["name"]: set(e["args"]) for e in caller + worker if e["ph"] == "C"}
    assert gauges["calls"] == {"open", "waiting", "out_mib", "credit"}
    assert gauges["bus"] == {"queued", "running"}
    assert "rss_mib" in gauges["memory"]
