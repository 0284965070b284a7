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


def _clean_clone(tmp_path: Path, *, uid: int, installed: str, apt: str) -> dict[str, str]:
    """Copy what a setup reads, and put stand-ins for the system's package tools first in PATH."""
    for name in ("zb", "constraints.txt", "pyproject.toml", "setup.cfg", "tools/ci-packages.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    tools = {
        "id": f"echo {uid}",
        "dpkg-query": f'case "$4" in {installed}) printf installed ;; *) exit 1 ;; esac',
        "apt-get": f'echo "$DEBIAN_FRONTEND $*" >>"{tmp_path}/apt.log"\n{apt}',
        "old-python": "exit 1",
    }
    for name, body in tools.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    # With no Python it stops after the system packages, and touches nothing.
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "ZB_PYTHON": str(tmp_path / "bin" / "old-python")}


def _apt_calls(tmp_path: Path) -> list[str]:
    log = tmp_path / "apt.log"
    return log.read_text().splitlines() if log.exists() else []


def test_ci_installs_only_the_system_packages_that_are_missing(tmp_path: Path):
    """As root, one call without questions installs what the list names and is not there."""
    env = _clean_clone(tmp_path, uid=0, installed="chromium|strace", apt="exit 0")
    result = _zb("test", "ci", cwd=tmp_path, **env)

    [call] = _apt_calls(tmp_path)
    assert call.startswith("noninteractive ")
    assert " install -y " in call
    assert " fuse3 " in call
    assert not {"chromium", "strace"} & set(call.split())
    assert "installing system packages: fuse3" in result.stderr


def test_ci_asks_for_nothing_when_all_system_packages_are_there(tmp_path: Path):
    """Nothing missing, nothing called."""
    env = _clean_clone(tmp_path, uid=0, installed="*", apt="exit 0")
    result = _zb("test", "ci", cwd=tmp_path, **env)

    assert _apt_calls(tmp_path) == []
    assert "system packages" not in result.stderr


@pytest.mark.parametrize(("uid", "calls"), [(0, ["install", "update"]), (1000, [])])
def test_ci_goes_on_without_the_system_packages(tmp_path: Path, uid: int, calls: list[str]):
    """Without root, or when they cannot be had, it says so and goes on to the tests, which skip."""
    env = _clean_clone(tmp_path, uid=uid, installed="nothing", apt="exit 100")
    result = _zb("test", "ci", cwd=tmp_path, **env)

    done = [word for call in _apt_calls(tmp_path) for word in call.split() if word in ("install", "update")]
    assert done == calls
    assert "tests that need" in result.stderr
    assert "needs Python 3.11 or newer" in result.stderr  # so it went on


@pytest.mark.parametrize("script", ["zb", ".ci/run"])
def test_scripts_are_plain_sh(script):
    """Both scripts are executable and parse as POSIX sh."""
    shell = shutil.which("dash") or "sh"

    assert os.access(ROOT / script, os.X_OK)
    subprocess.run([shell, "-n", ROOT / script], check=True, timeout=10)
