"""Real ranks on hosts and in time namespaces with clocks of their own: their traces against the truth."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from traceview.merge import MergeReport, merge
from waiting import scaled

HERE = Path(__file__).parent
TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname", "tc")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.alone,
    pytest.mark.ci,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(not Path("/proc/self/timens_offsets").exists(), reason="this kernel has no time namespaces"),
]

AHEAD_NS = {0: 0, 1: 86_400 * 10**9, 2: 5_000 * 10**9, 3: 0}
STEPS = 60


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run ``drivers/clocks_driver.py`` once and return the trial's directory."""
    directory = tmp_path_factory.mktemp("clocks")
    places = {"ZBUS_RUNTIME_DIR": str(tmp_path_factory.mktemp("r"))}
    ran = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, str(HERE / "drivers" / "clocks_driver.py"), str(directory)],
        capture_output=True,
        text=True,
        timeout=scaled(110),
        env={**os.environ, **places},
    )
    logs = "".join(f"\n== {log.name}\n{log.read_text()[-2000:]}" for log in sorted(directory.glob("*.log")))
    assert ran.returncode == 0, ran.stderr[-3000:] + logs
    return Path(ran.stdout.strip())


def lines(path: Path, name: str) -> list[dict]:
    """Return the events of one name in a file."""
    return [event for event in map(json.loads, path.read_text().splitlines()) if event["name"] == name]


def errors_us(root: Path, output: Path, **more) -> tuple[MergeReport, dict[int, tuple[float, float]]]:
    """Merge, and return by rank (largest error of its spans, stated bound); the truth is the machine's clock."""
    report = merge([str(root)], output, **more)
    [meta] = lines(root / "traces" / "controller" / "traces_0.jsonl", "zbus_meta")
    zero = report.processes[0].shift_us - meta["args"]["epoch_mono_ns"] / 1000
    ranks = {p.pid: p for p in report.processes if p.role == "actor"}
    found: dict[int, tuple[float, float]] = {}
    for event in json.loads(output.read_text())["traceEvents"]:
        if event["ph"] == "X" and "before_ns" in event.get("args", {}):
            process = ranks[event["pid"]]
            before, after = (zero + event["args"][name] / 1000 for name in ("before_ns", "after_ns"))
            wrong = max(before - event["ts"], event["ts"] - after, 0.0)  # it began between these two
            rank, bound = process.rank, process.clock_bound_us
            assert rank is not None
            assert bound is not None
            found[rank] = max(wrong, found.get(rank, (0.0, 0.0))[0]), bound
    return report, found


def test_the_offsets_of_running_processes_are_within_their_bounds(trial):
    """PING and PONG alone: every zbus_clock line of five processes holds its bound, most of them 25 µs."""
    errors = []
    meta = lines(trial / "traces" / "controller" / "traces_0.jsonl", "zbus_meta")[0]["args"]
    spaces = {}
    for rank, ahead in AHEAD_NS.items():
        path = trial / "traces" / "actor" / f"traces_{rank}.jsonl"
        own = lines(path, "zbus_meta")[0]["args"]
        spaces[own["boot_id"], own["time_ns"]] = ahead
        for event in lines(path, "zbus_clock"):
            args = event["args"]
            assert (args["ref_boot_id"], args["ref_time_ns"]) == (meta["boot_id"], meta["time_ns"])
            errors.append((abs(args["offset_ns"] + ahead), args["bound_ns"], rank))
    for event in lines(trial / "traces" / "controller" / "traces_0.jsonl", "zbus_clock"):
        args = event["args"]
        ahead = spaces[args["ref_boot_id"], args["ref_time_ns"]]
        errors.append((abs(args["offset_ns"] - ahead), args["bound_ns"], -1))
    assert {rank for _, _, rank in errors} == {-1, 0, 1, 2}, "rank 3 shares the controller's clock"
    assert all(error <= bound for error, bound, _ in errors), errors
    assert sorted(error for error, _, _ in errors)[len(errors) // 2] <= 25_000, errors


@pytest.mark.parametrize("clocks", ["clock", "rpc"])
def test_every_span_of_every_host_is_within_the_stated_bound(trial, tmp_path, clocks):
    """Merged, with the measured offsets or by the calls alone, each span is where it was, to the bound of its rank."""
    report, found = errors_us(trial, tmp_path / "o.json", clocks=clocks)
    assert sorted(found) == [0, 1, 2, 3]
    for rank, (error, bound) in found.items():
        assert error <= bound + 0.5, (rank, found)
        assert bound < 5_000.0, (rank, found)
    assert found[3][1] == 0.0
    assert not {"causality_violations", "clock_contradiction", "clock_step", "clock_by_wall"} & set(report.problems)


def test_hosts_without_measured_offsets_are_matched_by_their_calls(trial, tmp_path):
    """The same files without any zbus_clock line: requests and replies say enough, and it is said that they did."""
    for path in (trial / "traces").rglob("*.jsonl"):
        copy = tmp_path / path.relative_to(trial)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("".join(x for x in path.read_text().splitlines(keepends=True) if '"zbus_clock"' not in x))
    report, found = errors_us(tmp_path, tmp_path / "o.json")
    assert [p.clock for p in report.processes] == ["reference", "rpc", "rpc", "rpc", "shared"]
    for rank, (error, bound) in found.items():
        assert error <= bound + 0.5, (rank, found)
