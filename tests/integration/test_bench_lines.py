"""What the benchmarks share: lines, rivals, and that a whole benchmark runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from waiting import scaled

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FIELDS = {"workload", "system", "median", "best", "unit", "ratio", "limit", "rounds", "build"}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("rounds", "peers", "peer_systems"):
        sys.modules.pop(name, None)


def test_a_ratio_is_the_median_of_the_ratios_of_each_round():
    """Drift between rounds cancels out; the best of a rate is its largest; what never came is null."""
    from rounds import Figures

    figures = Figures()
    for value, raw in ((20.0, 10.0), (200.0, 100.0), (90.0, 30.0)):
        figures.add("call", "zbus", "us", value, raw)
    for rate in (5.0, 7.0):
        figures.add("send", "zbus", "GB/s", rate, 10.0, 20.0)
    figures.add("kill", "rival", "ms", float("inf"), 1.0)
    call, send, kill = figures.lines()
    assert (call["median"], call["best"], call["ratio"], call["limit"], call["rounds"]) == (90.0, 20.0, 2.0, None, 3)
    assert (send["median"], send["best"], send["ratio"], send["limit"]) == (6.0, 7.0, 0.6, 0.3)
    assert (kill["median"], kill["ratio"]) == (None, None)
    figures.add("send", "raw", "GB/s", 11.0, 11.0, 22.0)
    figures.add("send", "zbus-other", "GB/s", 1.0, 3.0, 4.0)
    assert figures.bases["send"] == (11.0, 22.0), "what rivals are measured by is the reference itself"
    assert json.loads(json.dumps(kill)) == kill


def test_a_line_is_said_as_soon_as_its_last_round_is_there():
    """Not at the end of the benchmark; a row with fewer rounds is said in the end, and none twice."""
    from rounds import Figures

    said = []
    figures = Figures(2, lambda line: said.append((line["workload"], line["median"], line["rounds"])))
    figures.add("call", "zbus", "us", 10.0)
    figures.add("call", "rival", "us", 90.0)
    assert said == []
    figures.add("call", "zbus", "us", 20.0)
    assert said == [("call", 15.0, 2)]
    figures.finish()
    figures.finish()
    assert said == [("call", 15.0, 2), ("call", 90.0, 1)]


def test_only_what_measures_something_is_offered_as_a_benchmark():
    """``./zb bench`` names those that have the options of all, and refuses the parts that they start."""
    told = subprocess.run(
        ["./zb", "bench", "crowd"], cwd=BENCHMARKS.parent, capture_output=True, text=True, check=False
    )
    assert told.returncode == 2
    names = told.stderr.partition("name a benchmark: ")[2].split("\n")[0].split()
    assert {"rpc", "data", "startup", "scale", "faults"} <= set(names)
    assert not {"crowd", "peers", "peer_systems", "fault_peers", "rounds"} & set(names)


def test_rivals_that_cannot_be_installed_are_said_and_left_out(tmp_path, capfd, monkeypatch):
    """Neither a name that nobody knows nor an environment that cannot be made passes in silence."""
    import peers
    from rounds import Figures

    with pytest.raises(SystemExit, match="no such peer: rays; known: ray, "):
        peers.Rivals("ray,rays", tmp_path)
    monkeypatch.setitem(peers.PACKAGES, "ghost", ("a_module_of_nobody", ("a-package-of-nobody",)))
    (tmp_path / "file").write_text("in the way of the environment")
    rivals = peers.Rivals("ghost", tmp_path / "file")
    assert rivals.pythons == {}
    assert "ghost: skipped: cannot be installed: " in capfd.readouterr().err
    rivals.measure(Figures(), ["call_sync"], lambda _workload: True)


def test_a_rival_that_stops_half_way_keeps_what_it_measured(capfd):
    """Its results so far count, and why it stopped is said; one that has none is left out from then on."""
    import peers

    code = "print('RESULT', '[\"call_sync\", \"us\", 7.0]'); raise SystemExit('no more of this')"
    assert peers.run([sys.executable, "-c", code]) == ([("call_sync", "us", 7.0)], "it ended with 1: no more of this")
    assert peers.run([sys.executable, "-c", "pass"]) == ([], "")


def test_what_rivals_send_as_one_block_comes_back_as_it_was():
    """Numbers, texts, arrays and dicts of arrays; arrays are views of the block."""
    from peer_systems import pack, unpack

    arrays = {"ids": np.arange(6).reshape(2, 3), "mask": np.array([[True, False]])}
    method, number, one, batch = unpack(pack("step", 3, np.float32([1.5]), arrays))
    assert (method, number, one.dtype, one.tolist()) == ("step", 3, np.float32, [1.5])
    assert {name: (array.dtype, array.tolist()) for name, array in batch.items()} == {
        name: (array.dtype, array.tolist()) for name, array in arrays.items()
    }
    assert not batch["ids"].flags.owndata


RUNS = [
    ("startup.py", ["--only", "startup_4"], {("startup_4", "raw"), ("startup_4", "zbus")}),
    ("startup.py", ["--only", "kill_to_error,rss_"], {("kill_to_error", "zbus"), ("rss_agent", "zbus")}),
    ("scale.py", ["--sizes", "16,48"], {("join_48", "zbus"), ("fanout_48", "raw")}),
    ("rpc.py", ["--scale", "0.05", "--only", "call_sync"], {("call_sync", "zbus"), ("call_sync", "raw")}),
    ("rl.py", ["--steps", "4", "--only", "grpo_steps"], {("grpo_steps", "sync"), ("grpo_steps", "async")}),
]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("script", "options", "wanted"), [RUNS[0], *(pytest.param(*run, marks=pytest.mark.ci) for run in RUNS[1:])]
)
def test_a_benchmark_prints_a_line_for_each_workload_and_system(script, options, wanted):
    """One JSON object per line, all with the same fields, and a figure in each."""
    command = [sys.executable, str(BENCHMARKS / script), "--json", "--rounds", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(200))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(set(line) == FIELDS and line["median"] for line in lines), lines
    assert wanted <= {(line["workload"], line["system"]) for line in lines}
