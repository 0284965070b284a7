from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def project():
    """Give pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _name(requirement: str) -> str:
    return re.split(r"[<>=~! \[;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_every_direct_dependency_is_pinned(project):
    """Whatever an extra may install has one exact version in constraints.txt, and no line stands twice."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pinned = [_name(line) for line in lines]
    wanted = list(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra

    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line) for line in lines)
    assert len(pinned) == len(set(pinned))
    assert {_name(requirement) for requirement in wanted} - {"zbus-runtime"} <= set(pinned)


def test_setup_cfg_and_pyproject_share_no_fact(project):
    """setup.cfg holds the package list and package data, pyproject.toml everything else."""
    setup_cfg = configparser.ConfigParser()
    setup_cfg.read(ROOT / "setup.cfg")

    assert {section.partition(".")[0] for section in setup_cfg.sections()} == {"options"}
    assert set(setup_cfg["options"]) == {"packages", "zip_safe"}
    assert "packages" not in project.get("tool", {}).get("setuptools", {})
    assert "package-data" not in project.get("tool", {}).get("setuptools", {})


def test_the_installed_version_is_the_source_version():
    """One place states the version."""
    import zbus

    assert metadata.version("zbus-runtime") == zbus.__version__


@pytest.mark.parametrize("command", ["zbus-controller", "zbus-worker", "traceview"])
def test_each_command_is_installed_and_points_at_a_main(command):
    """The three console scripts exist and their targets import."""
    (script,) = metadata.entry_points(group="console_scripts", name=command)

    assert callable(script.load())


@pytest.mark.ci
def test_the_wheel_holds_the_four_packages_typed_and_nothing_else(tmp_path: Path):
    """A built wheel contains zbus, workers, controller, traceview with py.typed and the licences; no tests."""
    # A copy, because a build inside the tree would leave files that the next build picks up.
    ignored = shutil.ignore_patterns(".*", "build", "zbus-runs", "__pycache__", "*.egg-info")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source],
        check=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("zbus_runtime-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}

    assert {"zbus", "workers", "controller", "traceview"} == {top for top in tops if not top.endswith(".dist-info")}
    assert {f"{package}/py.typed" for package in ("zbus", "workers", "controller", "traceview")} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
