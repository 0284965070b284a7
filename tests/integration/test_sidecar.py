from __future__ import annotations

import json
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

from sidecar_kit import TrialFiles, sidecar, traced
from waiting import scaled

TICKS = """
    on_sidecar()
    for n in range(int(sys.argv[2])):
        trace.instant("tick", n=n)
        if n % 100 == 0:
            time.sleep(0.002)
"""


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a traced process to end in order; return what it printed."""
    out, err = process.communicate(timeout=scaled(60))
    assert (process.returncode, err) == (0, "")
    return out


def test_records_go_through_the_sidecar_into_the_rank_s_own_file(short_dir: Path):
    """Every record of several processes is in its file once, with who, names and an end that adds up."""
    with sidecar(short_dir) as server, ExitStack() as stack:
        ranks = [traced(short_dir, TICKS, 2000, rank=rank, flush_period_s=0.05) for rank in range(3)]
        for process in [stack.enter_context(rank) for rank in ranks]:
            finish(process)
        server.send_signal(signal.SIGTERM)
        ledger = json.loads(server.communicate(timeout=scaled(20))[0])
    for rank in range(3):
        files = TrialFiles(short_dir, rank=rank)
        assert files.numbers == list(range(2000))
        assert files.torn == files.doubled == 0
        assert len(files.named("zbus_meta")) == 1
        assert [e["args"] for e in files.named("zbus_end")] == [
            {"recorded": 2000, "written": 2000, "pending": 0, "lost": {}, "by": "process"}
        ]
        assert not files.spill.exists()
        assert max(files.blocks.values()) == 1
    assert ledger["complete"]
    assert [(row["rank"], row["records"], row["ended"]) for row in ledger["sources"]] == [
        (0, 2000, True),
        (1, 2000, True),
        (2, 2000, True),
    ]
    assert not (short_dir / "traces" / "spool").exists()
    assert not (short_dir / "registry" / "trace" / "sidecar").exists()
