"""Two users of one host run jobs of one name: neither sees, disturbs or is fooled by the other's files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from disk_kit import needs_root
from waiting import scaled

pytestmark = [pytest.mark.ci, pytest.mark.alone, needs_root]

DRIVER = Path(__file__).parent / "drivers" / "user_driver.py"
FIRST, SECOND = 61_001, 61_002

_OPEN_HOME = """
set -e
kept=$1
shift
mount --bind /root "$kept"
mount -t tmpfs -o mode=755 none /root
for name in "$kept"/* "$kept"/.[!.]*; do
    [ -d "$name" ] || continue
    mkdir "/root/${name##*/}"
    mount --bind "$name" "/root/${name##*/}"
done
exec "$@"
"""
"""Root's home, where this Python may be, as a place that other users may pass: in a mount namespace of the command."""


def as_user(uid: int, root: Path) -> subprocess.Popen[str]:
    """Run the driver as another user, with everything that a login of that user would have."""
    kept = root.parents[1] / "kept"
    kept.mkdir(exist_ok=True)
    in_home = str(Path(sys.executable).resolve()).startswith("/root/")
    inside = ["sh", "-c", _OPEN_HOME, "sh", str(kept)] if in_home else []
    identity = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    return subprocess.Popen(
        ["unshare", "--mount", *inside, *identity, sys.executable, str(DRIVER), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": str(root.parent), "LANG": "C.UTF-8"},
    )


@pytest.fixture
def homes() -> Iterator[dict[int, Path]]:
    """Give each user a home."""
    with tempfile.TemporaryDirectory(prefix="zt-users", dir="/tmp") as base:  # others must get there
        Path(base).chmod(0o755)
        found = {}
        for uid in (FIRST, SECOND):
            found[uid] = Path(base) / str(uid)
            found[uid].mkdir(mode=0o755)
            shutil.chown(found[uid], uid, uid)
        yield found


def ready(process: subprocess.Popen[str]) -> None:
    """Wait until its ranks are up; skip where another user cannot even start this Python."""
    assert process.stdout is not None
    if process.stdout.readline() == "ready\n":
        return
    _, err = process.communicate(timeout=scaled(30))
    if "Permission denied" in err and "Traceback" not in err:
        pytest.skip(f"another user cannot run this Python: {err.strip()[-200:]}")
    raise AssertionError(err)


def test_two_users_run_jobs_of_one_name_side_by_side(homes):
    """Row 75: same experiment, trial and host, two users: each has its own ranks, sockets and files."""
    with as_user(FIRST, homes[FIRST] / "runs") as one:
        ready(one)
        with as_user(SECOND, homes[SECOND] / "runs") as two:
            ready(two)
            for uid, process in ((FIRST, one), (SECOND, two)):
                out, err = process.communicate("go\n", timeout=scaled(60))
                assert process.returncode == 0, err
                assert json.loads(out) == {"uid": uid, "owners": [uid], "ranks": [0, 1]}


def test_another_users_root_is_refused_in_words(homes):
    """Row 75: one root for both: the second user is told that it is not theirs, and the first goes on."""
    with as_user(FIRST, homes[FIRST] / "runs") as one:
        ready(one)
        with as_user(SECOND, homes[FIRST] / "runs") as two:
            _, err = two.communicate(timeout=scaled(60))
            assert two.returncode in {2, 5, 8}
            assert str(homes[FIRST] / "runs") in err
            assert "ermission" in err or "another user" in err
            assert "Traceback" not in err
        out, err = one.communicate("go\n", timeout=scaled(60))
        assert one.returncode == 0, err
        assert json.loads(out)["owners"] == [FIRST]
