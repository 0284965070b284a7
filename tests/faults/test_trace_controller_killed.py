from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from sidecar_kit import TrialFiles
from waiting import scaled, wait_until, within

HERE = Path(__file__).parents[1]

DRIVER = """
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from launching import probes
    from controller import Controller
    from zbus.trace.launch import Sidecar

    with Controller.launch("exp", {"actor": probes(2)}, trial="t", root=sys.argv[1]) as bus:
        sidecar = Sidecar.start(Path(bus.trial.path))
        number = 0
        while True:
            bus.group("actor").echo(number)
            bus.save_perf_tracer(number)
            number += 1
            print(number, flush=True)
"""


def test_a_killed_controller_leaves_traces_that_merge(short_dir: Path):
    """Kill -9 of the controller: workers and sidecar end by themselves, and what was recorded merges."""
    trial = short_dir / "exp" / "t"
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), str(short_dir), str(HERE)]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as driver:
        assert driver.stdout is not None
        files = [trial / "traces" / name for name in ("controller/traces_0.jsonl", "actor/traces_1.jsonl")]

        def handed_over() -> bool:
            driver.stdout.readline()
            return all(path.exists() and b'"zbus_block"' in path.read_bytes() for path in files)

        wait_until(handed_over, what="blocks of controller and workers", timeout_s=30)
        for _ in range(50):
            calls = int(driver.stdout.readline())
        driver.kill()
        killed = time.monotonic()
        driver.stdout.read()
    wait_until((trial / "traces" / "sidecar.json").exists, what="the end of the sidecar", timeout_s=20)
    assert time.monotonic() - killed < within(20)
    summary = json.loads((trial / "traces" / "sidecar.json").read_text())
    assert summary["complete"]
    for role, rank in (("controller", 0), ("actor", 0), ("actor", 1)):
        one = TrialFiles(trial, role, rank)
        assert one.torn == 0
        assert max(one.blocks.values()) == 1
        seqs = [event["args"]["seq"] for event in one.named("run echo" if role == "actor" else "call echo")]
        if role == "actor":
            assert seqs == sorted(seqs)
            assert len(seqs) >= calls // 2
    merge = [sys.executable, "-m", "traceview", "merge", str(trial), "--json"]
    merged = subprocess.run(merge, capture_output=True, text=True, timeout=scaled(60))
    assert merged.returncode == 0, merged.stderr
    assert json.loads(merged.stdout)["arrows"]["joined"] >= 50
