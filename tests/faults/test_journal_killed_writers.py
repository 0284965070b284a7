from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import scaled
from zbus.registry.file import FileRegistry
from zbus.registry.tempfiles import is_temp

ROOT = Path(__file__).parents[2]


def _die_writing(root: Path, points: str, step: str) -> None:
    code = f"""
from zbus import failpoints
from zbus.registry.file import FileRegistry
registry = FileRegistry({str(root)!r})
failpoints.configure({points!r})
{step}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=scaled(30), capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def _temps(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if is_temp(path.name)]


@pytest.mark.parametrize(
    ("points", "step", "left"),
    [
        ("before_rename=kill", 'registry.put("jobs/actor", b"new")', b"old"),
        ("before_link=kill", 'registry.claim("jobs/critic", b"new")', b"old"),
    ],
    ids=["replace", "claim"],
)
def test_a_writer_killed_before_its_record_is_in_place_changes_nothing(
    tmp_path: Path, points: str, step: str, left: bytes
) -> None:
    """The old record stays listed and whole, and the temporary file goes with the next listing (row 49)."""
    root = tmp_path / "registry"
    mine = FileRegistry(root)
    mine.put("jobs/actor", b"old")
    _die_writing(root, points, step)
    assert _temps(root)
    listing = mine.list("jobs")
    assert dict(listing.entries) == {"jobs/actor": left}
    assert listing.junk == ()
    assert mine.claim("jobs/critic", b"mine") == b"mine"
    assert not _temps(root)
    mine.close()
