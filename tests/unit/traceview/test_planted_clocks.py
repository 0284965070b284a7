from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from planted_run import Clock, Plan, Way, plant, planted_clocks
from traceview.merge import MergeReport, merge
from traceview.problems import Problems
from traceview.sessions import read_sessions
from traceview.survey import survey

IDLE = Way()
ASYMMETRIC = Way(there_us=40, back_us=5000)
LOADED = Way(load_us=20_000)


def merged(root: Path, **more) -> tuple[MergeReport, list[dict]]:
    """Merge a run; return the report and the spans that know their true start."""
    report = merge([str(root)], root / "o.json", jobs=1, **more)
    events = json.loads((root / "o.json").read_text())["traceEvents"]
    return report, [e for e in events if e["ph"] == "X" and "true_us" in e.get("args", {})]


def errors_us(report: MergeReport, spans: list[dict]) -> dict[str, tuple[float, float]]:
    """Return the largest error of each process and its stated bound, in µs; the controller's clock is the truth."""
    names = {p.pid: p for p in report.processes}
    reference = next(e for e in spans if names[e["pid"]].role == "controller")
    zero = reference["ts"] - reference["args"]["true_us"]
    found: dict[str, tuple[float, float]] = {}
    for event in spans:
        process = names[event["pid"]]
        error = abs(event["ts"] - event["args"]["true_us"] - zero)
        name = f"{process.role}/{process.rank}"
        bound = process.clock_bound_us if process.clock_bound_us is not None else -1.0
        found[name] = max(error, found.get(name, (0.0, 0.0))[0]), bound
    return found


@pytest.mark.parametrize("headers", [True, False], ids=["ours", "other tools"])
@pytest.mark.parametrize("seed", range(3))
def test_clocks_5_s_apart_are_matched_to_25_us_by_calls_alone(tmp_path, seed, headers):
    """±5 s and ±50 ppm over idle links, no measured offset anywhere: each rank is right to 25 µs, within its bound."""
    plan = Plan(clocks=planted_clocks(seed), headers=headers, steps=200, seed=seed, lost=0.01)
    report, spans = merged(plant(tmp_path, plan))
    found = errors_us(report, spans)
    assert sorted(found) == ["actor/0", "actor/1", "actor/2", "actor/3", "controller/0"]
    for name, (error, bound) in found.items():
        assert error <= min(25.0, bound + 0.002), name
    assert [p.clock for p in report.processes] == ["reference"] + ["rpc"] * 4
    assert not {"causality_violations", "clock_contradiction", "clock_step"} & set(report.problems)


@pytest.mark.parametrize("way", [ASYMMETRIC, Way(there_us=9000, back_us=30), LOADED, Way(10, 3000, 5000)])
@pytest.mark.parametrize("seed", range(2))
def test_asymmetric_and_loaded_links_widen_the_bound_and_the_error_stays_in_it(tmp_path, way, seed):
    """Whatever the ways take, the true error of every event is within the bound of its rank."""
    plan = Plan(clocks=planted_clocks(seed), ways={0: IDLE, 1: way, 2: way}, steps=150, seed=seed)
    report, spans = merged(plant(tmp_path, plan))
    found = errors_us(report, spans)
    for name, (error, bound) in found.items():
        assert error <= bound + 0.002, name
    assert found["actor/0"][0] <= 25.0
    assert "causality_violations" not in report.problems


@pytest.mark.parametrize("seed", range(2))
def test_stragglers_do_not_mislead_the_clocks(tmp_path, seed):
    """A late starter, a slow rank and a slow phase cost no accuracy: only the ways count, not the work."""
    plan = Plan(clocks=planted_clocks(seed), late_us={1: 9000.0}, slow={2: 3.0}, reward={3: 9.0}, steps=150, seed=seed)
    report, spans = merged(plant(tmp_path, plan))
    for name, (error, bound) in errors_us(report, spans).items():
        assert error <= min(25.0, bound + 0.002), name


def random_plan(seed: int) -> tuple[Plan, set[int]]:
    """Return a run of random clocks, links and lengths, and the ranks behind idle symmetric links."""
    rng = random.Random(seed)
    ranks = rng.randint(2, 6)
    clocks = planted_clocks(seed, ranks)
    for clock in clocks.values():
        clock.swing = rng.choice([0.0, 0.0, 0.3e-6])
    ways, idle = {}, set()
    for rank in range(ranks):
        kind = rng.choice(["idle", "idle", "asymmetric", "loaded", "both"])
        there, back = (rng.uniform(20, 90), rng.uniform(20, 9000)) if kind in ("asymmetric", "both") else (40, 40)
        if rng.random() < 0.5:
            there, back = back, there
        ways[rank] = Way(there, back, 10.0 if kind in ("idle", "asymmetric") else rng.uniform(100, 30_000))
        if kind == "idle":
            idle.add(rank)
    every, steps = rng.choice([(2000.0, 400), (100_000.0, 200), (1e6, 150), (20e6, 120)])
    late = {0: rng.uniform(0, 5000)}
    more = {"late_us": late, "slow": {1: rng.uniform(1, 3)}, "headers": rng.random() < 0.7, "lost": 0.01}
    return Plan(ranks=ranks, steps=steps, every_us=every, clocks=clocks, ways=ways, seed=seed, **more), idle


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 25), marks=pytest.mark.ci)])
def test_no_seed_finds_an_error_beyond_its_bound(tmp_path, seeds):
    """Random clocks, links, loads and lengths: no event of any rank is further off than stated; idle: 25 µs."""
    for seed in seeds:
        plan, idle = random_plan(seed)
        report, spans = merged(plant(tmp_path / str(seed), plan))
        for name, (error, bound) in errors_us(report, spans).items():
            assert error <= bound + 0.002, (seed, name)
            if name.partition("/")[0] == "actor" and int(name.partition("/")[2]) in idle and plan.every_us <= 1e6:
                assert error <= 25.0, (seed, name)
        assert "causality_violations" not in report.problems, seed
        assert "clock_step" not in report.problems, seed


def test_rare_and_long_calls_still_match_clocks(tmp_path):
    """A method that runs for ten minutes says as much as a short one: request and reply count each for itself."""
    plan = Plan(clocks=planted_clocks(5), slow=dict.fromkeys(range(4), 4e5), steps=12, seed=5)
    report, spans = merged(plant(tmp_path, plan))
    for name, (error, bound) in errors_us(report, spans).items():
        assert error <= bound + 0.002, name
        assert bound < 4000.0, name


def test_one_boot_id_and_time_namespace_are_one_clock_exactly(tmp_path):
    """Ranks of the controller's clock need no match: nothing is estimated, the error is 0, calls are not even read."""
    others = {2: Clock(3e6, 1e-5, "host", wall_wrong_us=5e5), 3: Clock(3e6, 1e-5, "host", wall_wrong_us=-9e5)}
    report, spans = merged(plant(tmp_path, Plan(clocks=others, steps=50)))
    assert [p.clock for p in report.processes] == ["reference", "shared", "shared", "rpc", "rpc"]
    found = errors_us(report, spans)
    assert found["actor/0"] == (pytest.approx(0.0, abs=0.0011), 0.0)
    both = [{e["args"]["true_us"]: e["ts"] for e in spans if e["pid"] == pid} for pid in (4, 5)]
    shifts = [next(ts - true for true, ts in one.items()) for one in both]
    assert shifts[0] == pytest.approx(shifts[1], abs=0.6)  # within what 50 ppm make of the time between their first


def test_another_time_namespace_on_one_host_is_matched_by_its_calls(tmp_path):
    """The same boot id with another time namespace is another clock, and is matched like one."""
    clocks = {1: Clock(86_400e6, 0.0, Clock.boot_id, time_ns=2)}
    report, spans = merged(plant(tmp_path, Plan(clocks=clocks, steps=100)))
    error, bound = errors_us(report, spans)["actor/1"]
    assert error <= min(25.0, bound)


@pytest.mark.parametrize("sleeper", [1, 2])
def test_a_host_that_slept_shows_as_a_step_and_bends_nothing(tmp_path, sleeper):
    """A clock that stood still for two seconds gets a new line after it; the step is told, with when and how much."""
    clocks = planted_clocks(7, 3)
    clocks[sleeper].sleeps_at_us, clocks[sleeper].sleeps_us = 10_000_000.0, 2_000_000.0
    report, spans = merged(plant(tmp_path, Plan(ranks=3, clocks=clocks, steps=150, seed=7)))
    assert report.problems["clock_step"] == 1
    [text] = [text for _, text in report.warnings if "at once" in text]
    assert f"actor/traces_{sleeper}.jsonl" in text
    assert float(re.search(r"parted by (\S+) s", text)[1]) == pytest.approx(2.0, abs=1e-3)
    far = [e for e in spans if not 9.8e6 < e["args"]["true_us"] < 12.3e6]
    for name, (error, bound) in errors_us(report, far).items():
        assert error <= min(25.0, bound + 0.002), name


def test_a_rank_without_any_call_is_kept_and_marked(tmp_path):
    """A rank that no call reached is matched by its wall clock, says so, and is in the output whole."""
    root = plant(tmp_path, Plan(clocks=planted_clocks(3), steps=40))
    path = root / "traces" / "actor" / "traces_3.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"call"' not in line))
    report, _ = merged(root)
    last = report.processes[4]
    assert (last.clock, last.clock_bound_us, last.events) == ("wall", None, 80)
    assert last.name == "actor/3 (clock not measured)"
    assert report.problems["clock_by_wall"] == 1
    assert [p.clock for p in report.processes[1:4]] == ["rpc"] * 3


def test_wrong_wall_clocks_show_as_calls_that_go_backwards(tmp_path):
    """Matched by wall clocks a second off, requests arrive before they are sent: that is told (row 22)."""
    root = plant(tmp_path, Plan(clocks=planted_clocks(2), steps=40))
    report, _ = merged(root, clocks="wall")
    assert report.problems["causality_violations"] > 40
    assert any("go backwards in time, by up to" in text for _, text in report.warnings)
    assert "causality_violations" not in merged(root, clocks="clock")[0].problems
    assert "causality_violations" not in merged(root, clocks="rpc")[0].problems


def test_one_clock_that_cannot_be_one_is_told_too(tmp_path):
    """Two machines that claim one boot id: their calls go backwards, and statistics say so (row 22)."""
    liar = Clock(-3e6, 0.0, Clock.boot_id)  # the boot id and the time namespace of the controller
    root = plant(tmp_path, Plan(ranks=2, clocks={1: liar}, steps=20))
    problems = Problems()
    survey([str(root)], problems)
    assert problems.by_kind()["causality_violations"] == 20
    good = Problems()
    survey([str(plant(tmp_path / "good", Plan(ranks=2, steps=20)))], good)
    assert "causality_violations" not in good.by_kind()


def test_a_measured_offset_that_calls_contradict_is_told_and_its_bound_is_wider(tmp_path):
    """A recorded offset 50 ms off, with a bound of 1 µs, cannot be true: calls say so, and nobody is told 1 µs."""
    clocks = planted_clocks(4, 2)
    root = plant(tmp_path, Plan(ranks=2, clocks=clocks, steps=60, seed=4))
    path = root / "traces" / "actor" / "traces_1.jsonl"
    clock = clocks[1]
    lie = 50_000_000
    args = {"ref_boot_id": Clock.boot_id, "ref_time_ns": 1, "bound_ns": 1000, "rtt_ns": 2000, "n": 128, "drift_ppb": 0}
    lines = []
    for at_us in (0.0, 3e6, 7e6):
        at = round(clock.of(at_us) * 1000)
        args |= {"at_ns": at, "offset_ns": round(at_us * 1000) - at + lie}
        lines.append(json.dumps({"name": "zbus_clock", "ph": "M", "pid": 7, "args": args}) + "\n")
    with path.open("a") as file:
        file.writelines(lines)
    report, spans = merged(root)
    assert report.problems["clock_contradiction"] == 1
    error, bound = errors_us(report, spans)["actor/1"]
    assert error <= bound
    assert bound > 49_000
    assert errors_us(report, spans)["actor/0"][0] <= 25.0


def test_peers_that_call_one_another_are_matched_over_several_clocks(tmp_path):
    """A rank that only its peer calls is matched through that peer; the errors of both ways add up."""
    root = plant(tmp_path, Plan(ranks=2, clocks=planted_clocks(6, 2), steps=150, seed=6))
    peer = Clock(-3e6, 3e-5, "a third host", wall_wrong_us=7e5)
    middle = planted_clocks(6, 2)[1]
    rng = random.Random(6)
    caller = (root / "traces" / "actor" / "traces_1.jsonl").open("a")
    lines = []
    epoch_of_middle = round(middle.of(0) * 1000) - round(middle.wall_wrong_us * 1000)
    for n in range(300):
        sent = 20_000.0 + n * 60_000
        arrived = sent + 40 + rng.expovariate(0.1)
        left = arrived + 700
        back = left + 40 + rng.expovariate(0.1)
        ids = {"call": f"aa{n:014x}", "attempt": 1}
        start = middle.of(sent) - epoch_of_middle / 1000
        dur = middle.of(back) - middle.of(sent)
        event = {"name": "rpc.client", "ph": "X", "ts": round(start, 3), "dur": round(dur, 3), "pid": 7, "tid": 3}
        caller.write(json.dumps({**event, "args": {**ids, "status": "ok"}}) + "\n")
        event = {"name": "rpc.server", "ph": "X", "ts": peer.of(arrived), "dur": 700.0, "pid": 9, "tid": 9}
        lines.append(json.dumps({**event, "args": {**ids, "true_us": arrived}}) + "\n")
    caller.close()
    (root / "traces" / "helper").mkdir()
    (root / "traces" / "helper" / "traces_0.jsonl").write_text("".join(lines))
    report, spans = merged(root)
    found = errors_us(report, spans)
    assert found["helper/0"][0] <= min(50.0, found["helper/0"][1])
    assert found["helper/0"][1] > found["actor/1"][1]
    assert [p.clock for p in report.processes] == ["reference", "rpc", "rpc", "rpc"]


@pytest.mark.parametrize("clocks", ["clock", "none"])
def test_no_time_is_negative_whatever_the_clocks_show(tmp_path, clocks):
    """Clocks 5 s behind would put spans before 0: the whole run moves so that the first is at 0 (row 12)."""
    behind = {rank: Clock(-5e6 - rank, 0.0, f"host {rank}") for rank in range(4)}
    root = plant(tmp_path, Plan(clocks=behind, headers=False, steps=30))
    report, spans = merged(root, clocks=clocks)
    assert "negative_ts" not in report.problems
    assert 0 <= min(e["ts"] for e in spans) < 1e6
    assert len({e["pid"] for e in spans}) == 5


def test_arrows_of_skewed_clocks_point_forward(tmp_path):
    """Requests and replies of ranks 5 s off leave before they arrive, each joined with its own end (row 24)."""
    root = plant(tmp_path, Plan(clocks=planted_clocks(8), headers=False, steps=40))
    for path in (root / "traces").rglob("*.jsonl"):
        lines = []
        for text in path.read_text().splitlines():
            event = json.loads(text)
            lines.append(text)
            if event["name"] in ("rpc.client", "rpc.server"):
                phase = "s" if event["name"] == "rpc.client" else "f"
                flow = {"name": "rpc", "cat": "flow", "ph": phase, "id": event["args"]["call"], "ts": event["ts"] + 1}
                lines.append(json.dumps({**flow, "pid": 7, "tid": event["tid"], "bp": "e"}))
        path.write_text("\n".join(lines) + "\n")
    for clocks, forward in (("clock", True), ("none", False)):
        report, spans = merged(root, clocks=clocks)
        ends = {e["bind_id"]: e["ts"] for e in spans if e.get("flow_in")}
        starts = {e["bind_id"]: e["ts"] for e in spans if e.get("flow_out")}
        assert len(ends) == len(starts) == report.arrows["joined"] == 160
        assert all(starts[bound] < ends[bound] for bound in ends) is forward


def test_sessions_of_other_hosts_are_put_on_the_same_clock(tmp_path):
    """The sessions of a rank 5 s off move as its spans do, by what its calls say; their lengths stay."""
    clocks = planted_clocks(9, 2)
    root = plant(tmp_path, Plan(ranks=2, clocks=clocks, steps=60, seed=9))
    traces = root / "traces" / "actor"
    meta = json.loads((traces / "traces_1.jsonl").read_text().splitlines()[0])["args"]
    epoch_us = meta["epoch_mono_ns"] / 1000
    records: list[dict] = [{"zbus_sessions": meta}]
    for n in range(10):
        true = 100_000.0 + n * 500_000
        begin, end = ((clocks[1].of(at) - epoch_us) / 1e6 for at in (true, true + 30_000))
        ids = {"task_id": n, "session_id": n, "rank": 1, "role": "actor", "status": "accepted"}
        records.append({**ids, "submit_ts": begin, "finalized_ts": end, "phases": {}})
    (traces / "sessions_1.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = read_sessions([str(root)], Problems())
    report, spans = merged(root)
    zero = next(e["ts"] - e["args"]["true_us"] for e in spans if e["pid"] == report.processes[0].pid)
    for n, session in enumerate(found):
        assert session.submit_s * 1e6 - zero == pytest.approx(100_000 + n * 500_000, abs=25)
        assert session.total_s == pytest.approx(0.03, abs=1e-5)
