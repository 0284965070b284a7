from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from waiting import scaled

ROOT = Path(__file__).parents[2]

_STORM = """
import sys
from pathlib import Path
from zbus.runtime.journal import CrashJournal, read_journal

path = Path(sys.argv[1]) / "a.bin"
writer = CrashJournal(path, 1)
for number in range(8):
    ring = writer.ring(bytes([number]) * 16, "main")
    for seq in range(5000):
        ring.begin(seq)
        ring.end(seq)
        ring.answered(seq, (b"x",))
report = read_journal(path, 1, reaped=True)
print(writer.unkept, report.complete, len(report.lanes), {entry.upto for entry in report.lanes})
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("size", "unkept", "said"),
    [("64k", 7, "7 False 1 {5000}\n"), ("128k", 5, "5 False 3 {5000}\n"), ("4m", 0, "0 True 8 {5000}\n")],
)
def test_a_disk_that_fills_up_costs_proofs_and_no_process(tmp_path: Path, size: str, unkept: int, said: str) -> None:
    """On a real small disk no store meets a page that is not there: lanes without space run unkept."""
    script = f"mount -t tmpfs -o size={size} none {tmp_path} && exec {sys.executable} -c '{_STORM}' {tmp_path}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=scaled(60)
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace: {done.stderr.strip()}")
    assert (done.returncode, done.stderr.count("no crash journal")) == (0, unkept), done.stderr
    assert done.stdout == said
