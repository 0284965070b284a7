"""The code of the how-to page on testing with faults runs as it stands, with the fixtures of the public kit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import scaled

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "test-with-faults.md"


def blocks() -> list[str]:
    """Return the Python blocks of the page."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_code_of_the_page_runs(tmp_path: Path):
    """Every test that the page shows passes in a project of its own, and the script without pytest runs too."""
    engine = next(block for block in blocks() if "class Counter" in block)
    script = next(block for block in blocks() if "with FaultProxy(" in block)
    tests = [block for block in blocks() if block not in (engine, script)]
    (tmp_path / "counter_engine.py").write_text(engine)
    (tmp_path / "test_page.py").write_text("\n\n".join(tests))
    (tmp_path / "script.py").write_text(f'ENGINE = "counter_engine:Counter"\n{script}')
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(tmp_path)}

    ran = run("-m", "pytest", "-q", "-p", "zbus.testing.plugin", "test_page.py", cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{''.join(tests).count('def test_')} passed" in ran.stdout

    ran = run("script.py", cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_pytest_is_told_of_the_fixtures():
    """The distribution names the plugin, so that pytest loads it wherever zbus is installed."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"zbus": "zbus.testing.plugin"}


def run(*arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=scaled(100)
    )
