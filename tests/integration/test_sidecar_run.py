from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from launching import launch
from sidecar_kit import TrialFiles
from waiting import scaled, wait_until
from zbus.config import Config
from zbus.config.schema import TraceConfig
from zbus.trace.launch import Sidecar


def handed_over(trial: Path, *processes: str) -> bool:
    """Return whether these processes have handed blocks to the sidecar."""
    return all(
        b'"zbus_block"' in path.read_bytes() if (path := trial / "traces" / name).exists() else False
        for name in processes
    )


def test_a_sidecar_started_by_hand_takes_over_a_running_trial(tmp_path: Path):
    """Controller and workers find it, go on in the same files, and the merged trace has every call with its arrows."""
    with launch(tmp_path, config=Config(trace=TraceConfig(level="full"))) as bus:
        trial = Path(bus.trial.path)
        actor = bus.group("actor")
        for number in range(20):
            actor.echo(number)
        with Sidecar.start(trial) as sidecar:
            files = ("controller/traces_0.jsonl", "actor/traces_0.jsonl", "actor/traces_1.jsonl")

            def all_handed_over() -> bool:
                actor.echo(0)
                return handed_over(trial, *files)

            wait_until(all_handed_over, what="blocks of all three processes", timeout_s=30)
            for step in range(5):
                actor.echo(step)
                bus.save_perf_tracer(step)
            bus.close()
            assert sidecar.stop()
    ledger = json.loads((trial / "traces" / "sidecar.json").read_text())
    assert ledger["complete"]
    assert sorted((row["role"], row["rank"], row["ended"]) for row in ledger["sources"]) == [
        ("actor", 0, True),
        ("actor", 1, True),
        ("controller", 0, True),
    ]
    for role, rank in (("controller", 0), ("actor", 0), ("actor", 1)):
        one = TrialFiles(trial, role, rank)
        assert one.torn == one.doubled == 0
        assert len(one.named("zbus_meta")) == 1
        [end] = [event["args"] for event in one.named("zbus_end")]
        assert end["recorded"] == end["written"] + sum(end["lost"].values())
        assert end["lost"] == {}
    calls = len(TrialFiles(trial, "controller").named("call echo"))
    assert calls >= 50
    assert calls == sum(len(TrialFiles(trial, "actor", rank).named("run echo")) for rank in range(2))
    command = [sys.executable, "-m", "traceview", "merge", str(trial), "--strict", "--json"]
    merged = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60))
    assert merged.returncode == 0, merged.stdout + merged.stderr
    report = json.loads(merged.stdout)
    assert report["arrows"]["joined"] >= 2 * calls
    assert not list(trial.glob("registry/trace/*"))


def test_a_sidecar_ends_with_the_process_that_started_it(short_dir: Path):
    """Its parent is killed: the sidecar ends by itself, in order."""
    code = """
        import sys, time
        from pathlib import Path
        from zbus.trace.launch import Sidecar
        print(Sidecar.start(Path(sys.argv[1])).process.pid, flush=True)
        time.sleep(60)
    """
    (short_dir / "registry").mkdir(mode=0o700)
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(short_dir)], text=True, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until((short_dir / "registry" / "trace" / "sidecar").exists, what="the sidecar's record")
        parent.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), what="the end of the sidecar")
    assert (short_dir / "traces" / "sidecar.json").exists()


def _is_zombie(pid: int) -> bool:
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
