from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def _zb(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(cwd / "zb"), *arguments],
        cwd="/",
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def test_help_lists_every_command():
    """``./zb`` alone and ``./zb --help`` say what there is."""
    plain, asked = _zb(), _zb("--help")

    assert plain.returncode == asked.returncode == 0
    assert plain.stdout == asked.stdout
    for command in ("demo", "test", "test ci", "lint", "bench", "docs"):
        assert f"\n  {command} " in plain.stdout


def test_an_unknown_command_is_refused_by_name():
    """A misspelt command exits 2 and changes nothing."""
    result = _zb("tset")

    assert result.returncode == 2
    assert "no such command: tset" in result.stderr


def test_a_python_too_old_is_named_as_the_reason(tmp_path: Path):
    """Without Python 3.11 the message says what is needed and how to name it."""
    for name in ("zb", "constraints.txt", "pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, tmp_path / name)
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)

    result = _zb("setup", cwd=tmp_path, ZB_PYTHON=str(old))

    assert result.returncode == 2
    assert "needs Python 3.11 or newer" in result.stderr
    assert "ZB_PYTHON" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_an_unknown_benchmark_lists_those_there_are():
    """``./zb bench nonsense`` exits 2 with the names."""
    result = _zb("bench", "nonsense")

    assert result.returncode == 2
    assert "name a benchmark:" in result.stderr


@pytest.mark.parametrize("script", ["zb", ".ci/run"])
def test_scripts_are_plain_sh(script):
    """Both scripts are executable and parse as POSIX sh."""
    shell = shutil.which("dash") or "sh"

    assert os.access(ROOT / script, os.X_OK)
    subprocess.run([shell, "-n", ROOT / script], check=True, timeout=10)
