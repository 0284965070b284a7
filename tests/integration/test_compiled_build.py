"""The compiled build, as a wheel in an environment of its own, passes what the interpreted one passes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import scaled

ROOT = Path(__file__).resolve().parents[2]

# Real trials, and the machines by themselves. Left out are tests that replace or look into what is compiled.
WHOLE = ("integration/test_controller_calls.py", "integration/test_batch_results.py", "faults/test_deaths_in_calls.py")
PARTS = ("unit/runtime/test_starts.py", "unit/controller/test_inline.py", "unit/protocol", "unit/codec")
REACH_IN = "not booked_as_one_that_was_placed"

ENGINE = """
import sys
import zbus

class Told(zbus.Engine):
    @zbus.endpoint()
    def build(self):
        import zbus.build
        return [zbus.build.build(), sys.modules["zbus.transport.server"].__file__]
"""
TRIAL = """
import sys
from controller import Controller, Role
from zbus.build import build
import zbus.transport.reactor

def main():
    with Controller.launch("compiled", {"told": Role("told:Told")}, root=sys.argv[1]) as bus:
        print(build(), zbus.transport.reactor.__file__, *bus.group("told")[0].build())

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the Python of an environment with the compiled build."""
    place = tmp_path_factory.mktemp("compiled") / "env"
    subprocess.run([sys.executable, ROOT / "tools" / "compiled.py", place], check=True, timeout=scaled(600))
    return place / "bin" / "python"


def _environment(**more: str) -> dict[str, str]:
    hidden = ("PYTHONPATH", "ZBUS_COMPILE")
    return {name: value for name, value in os.environ.items() if name not in hidden} | more


@pytest.mark.ci
@pytest.mark.timeout(scaled(900))
def test_the_compiled_build_passes_what_the_interpreted_one_does(compiled: Path, short_dir: Path) -> None:
    """Calls, batches, errors, cancels and killed workers of real trials, and the machines behind them."""
    for name in ("tests", "examples", "docs"):  # to a short path: lines of errors are wrapped with the files' in them
        shutil.copytree(ROOT / name, short_dir / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for name in ("pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, short_dir)
    chosen = [f"tests/{name}" for name in (*WHOLE, *PARTS)]
    done = subprocess.run(
        [compiled, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not ci", "-k", REACH_IN, *chosen],
        cwd=short_dir,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=scaled(800),
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.ci
@pytest.mark.timeout(scaled(900))
def test_controller_and_workers_both_run_compiled(compiled: Path, tmp_path: Path) -> None:
    """Neither side finds the sources first, and each says which build it is."""
    (tmp_path / "told.py").write_text(ENGINE)
    (tmp_path / "trial.py").write_text(TRIAL)
    said = subprocess.run(
        [compiled, tmp_path / "trial.py", tmp_path / "runs"],
        env=_environment(PYTHONPATH=os.fspath(tmp_path)),
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )
    assert said.returncode == 0, said.stderr
    here, reactor, there, server = said.stdout.split()
    assert (here, there) == ("compiled", "compiled")
    assert reactor.endswith(".so")
    assert server.endswith(".so")


@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        ({"ZBUS_COMPILE": "1", "CC": "no-such-cc"}, "bdist_wheel", ("needs a C compiler", "'no-such-cc'", "unset")),
        ({"ZBUS_COMPILE": "1"}, "editable_wheel", ("stays interpreted", "without -e")),
        ({"ZBUS_COMPILE": "yes"}, "bdist_wheel", ("'yes' is neither 0", "nor 1")),
    ],
)
def test_a_compiled_build_that_cannot_be_made_says_why(
    settings: dict[str, str], arguments: str, words: tuple[str, ...]
) -> None:
    """One sentence with the cause and the way out, before anything is built."""
    done = subprocess.run(
        [sys.executable, "setup.py", arguments],
        cwd=ROOT,
        env=_environment(**settings),
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr
