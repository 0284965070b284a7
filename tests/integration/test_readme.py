from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from waiting import scaled

ROOT = Path(__file__).resolve().parents[2]


def test_the_script_of_the_readme_prints_what_it_should(tmp_path: Path):
    """The first screen's script runs as it stands and doubles ten numbers in their order on four workers."""
    text = (ROOT / "README.md").read_text()
    script, *_ = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "hello.py").write_text(script)

    result = subprocess.run(
        [sys.executable, "hello.py"],
        cwd=tmp_path,
        env={**os.environ, "ZBUS_ROOT": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=scaled(60),
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[0, 2, 4, 6, 8, 10, 12, 14, 16, 18]"
