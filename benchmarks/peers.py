"""``--peers``: rivals beside zbus and the references, each installed into an environment of its own when asked for.

What cannot be installed or does not run is said on stderr and left out, as is each workload that a rival has no way
for. Rivals take their turn in every round, each in fresh processes. What they do is ``peer_systems.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rounds import HERE, Figures

__all__ = ["PACKAGES", "Rivals", "add_options"]

PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ray": ("ray", ("ray",)),
    "monarch": ("monarch", ("torchmonarch",)),
    "torch-rpc": ("torch", ("torch",)),
    "grpc": ("grpc", ("grpcio",)),
    "pyro5": ("Pyro5", ("Pyro5", "msgpack")),
    "rpyc": ("rpyc", ("rpyc",)),
}
"""By name: the module that shows that it is there, and what is installed for it."""

LIMIT_S = 300.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--peers`` and ``--venvs``."""
    known = ", ".join(PACKAGES)
    parser.add_argument(
        "--peers", nargs="?", const="all", default="", metavar="NAMES", help=f"rivals beside: all, or some of {known}"
    )
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zbus-benchmarks"
    parser.add_argument(
        "--venvs", type=Path, default=place, metavar="DIR", help=f"where rivals are installed and kept [{place}]"
    )


class Rivals:
    """The rivals of one run.

    Args:
        names: Comma-separated names; ``all``, or empty for none.
        venvs: Directory of their environments.
        scale: Multiplies the number of small calls.
    """

    def __init__(self, names: str, venvs: Path, scale: float = 1.0) -> None:
        self.scale = scale
        chosen = list(PACKAGES) if names == "all" else [name for name in names.split(",") if name]
        if unknown := [name for name in chosen if name not in PACKAGES]:
            sys.exit(f"no such peer: {', '.join(unknown)}; known: {', '.join(PACKAGES)}")
        self.pythons: dict[str, str] = {}
        for name in chosen:
            try:
                self.pythons[name] = interpreter(name, venvs)
            except (OSError, subprocess.CalledProcessError) as error:
                self._skip(name, f"cannot be installed: {_last(getattr(error, 'stderr', '') or str(error))}")

    def measure(self, figures: Figures, workloads: Iterable[str], wanted: Callable[[str], bool]) -> None:
        """Let each rival take its turn: those of ``workloads`` that are wanted, beside the references of the round."""
        asked = [workload for workload in workloads if wanted(workload)]
        if not asked:
            return
        for name, python in list(self.pythons.items()):
            lines, why = run([python, str(HERE / "peer_systems.py"), "measure", name, "--workloads", ",".join(asked),
                              "--scale", f"{self.scale:g}"])  # fmt: skip
            for workload, unit, value in lines:
                if wanted(workload):
                    raw, limit = figures.bases.get(workload, (None, None))
                    figures.add(workload, name, unit, float("inf") if value is None else value, raw, limit)
            if not lines and why:
                self._skip(name, why)
                del self.pythons[name]
            elif why:
                print(f"{name}: stopped after {lines[-1][0]}: {why}", file=sys.stderr)

    @staticmethod
    def _skip(name: str, why: str) -> None:
        print(f"{name}: skipped: {why}", file=sys.stderr)


def interpreter(name: str, venvs: Path) -> str:
    """Return an interpreter that has a rival: this one, or that of an environment which is made where there is none.

    Raises:
        OSError, subprocess.CalledProcessError: It cannot be made.
    """
    module, packages = PACKAGES[name]
    if _has(sys.executable, module):
        return sys.executable
    home = venvs / name
    python = str(home / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, capture_output=True, text=True)
    if not _has(python, module):
        print(f"{name}: installing {', '.join(packages)} into {home}", file=sys.stderr)
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "numpy", *packages]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return python


def _has(python: str, module: str) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(not (u.find_spec('numpy') and u.find_spec({module!r})))"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


def run(command: Sequence[str]) -> tuple[list[tuple[str, str, float | None]], str]:
    """Run one rival once; return its results and, if it did not come to its end, why."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(HERE)},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=LIMIT_S)
        why = "" if process.returncode == 0 else f"it ended with {process.returncode}: {_last(err)}"
    except subprocess.TimeoutExpired:
        why = f"it took more than {LIMIT_S:g} s"
        out = ""
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it left in its group
            os.killpg(process.pid, signal.SIGKILL)
    if why and not out:
        out, _ = process.communicate()
    return [tuple(json.loads(line[7:])) for line in out.splitlines() if line.startswith("RESULT ")], why


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2][-300:]
