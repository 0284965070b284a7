from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "forbidden.py"


@pytest.fixture(scope="module")
def forbidden():
    """Give ``tools/forbidden.py`` as a module."""
    spec = importlib.util.spec_from_file_location("forbidden", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import pickle as p",
        "import _pickle",
        "from pickle import loads",
        "import os, dill",
        "import cloudpickle",
        "from marshal import loads",
        "import shelve",
        "from joblib import load",
        "eval(text)",
        "exec(text)",
        "run = eval",
        "import builtins; builtins.exec(text)",
        "yaml.load(stream)",
        "yaml.load(stream, Loader=yaml.SafeLoader)",
        "yaml.unsafe_load(stream)",
        "from yaml import load",
        "socket.recv_pyobj()",
        "self.router.send_pyobj(value)",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "torch.save(state, path)",
        "from torch import load",
        "numpy.load(path, allow_pickle=True)",
        "numpy.load(path, allow_pickle=flag)",
        "ctx.socket(zmq.ROUTER)",
        "zmq.Context.instance().socket(zmq.PUB)",
        "make = self._context.socket(zmq.PUB)",
        "def f():\n    if x:\n        ctx.socket(1)",
        "broken(",
    ],
)
def test_a_planted_violation_is_caught(forbidden, line):
    """Each banned pattern is reported with its file and line, wherever it stands."""
    violations = forbidden.check_source(f"x = 1\n{line}\n", "controller/planted.py")

    assert violations
    assert all(v.path == "controller/planted.py" and v.line >= 2 for v in violations)


@pytest.mark.parametrize(
    "line",
    [
        '"""Never pickle, eval( or torch.load( here; ctx.socket( lives in zbus.transport."""',
        "x = 1  # no pickle, no exec(",
        "yaml.safe_load(stream)",
        "numpy.load(path, allow_pickle=False)",
        "import socket; socket.socket()",
        "model.eval()",
        "wait(self._publisher.socket)",
        "loop.run_in_executor(None, f)",
        "torch.tensor(1)",
        "evaluate(x); executor.submit(y)",
    ],
)
def test_innocent_code_passes(forbidden, line):
    """Text about a pattern, and names that merely look like one, are no violation."""
    assert forbidden.check_source(f"{line}\n", "zbus/innocent.py") == []


def test_sockets_are_allowed_in_their_one_place(forbidden):
    """The socket factory's package may make sockets; a package with a similar name may not."""
    line = "ctx.socket(zmq.ROUTER)\n"

    assert forbidden.check_source(line, "zbus/transport/sockets.py") == []
    assert forbidden.check_source(line, "zbus/transport_extra/sockets.py")
    assert forbidden.check_source(line, "zbus/transport.py")


def test_the_command_names_the_place_and_fails(tmp_path: Path):
    """The command prints path:line: reason and exits 1; a clean directory exits 0."""
    package = tmp_path / "controller"
    package.mkdir()
    (package / "fine.py").write_text("x = 1\n")
    clean = subprocess.run([sys.executable, SCRIPT, "controller"], cwd=tmp_path, capture_output=True, text=True)
    (package / "bad.py").write_text("\nimport pickle\n")
    bad = subprocess.run([sys.executable, SCRIPT, "controller"], cwd=tmp_path, capture_output=True, text=True)

    assert (clean.returncode, clean.stdout) == (0, "")
    assert bad.returncode == 1
    assert bad.stdout == "controller/bad.py:2: import pickle: unpickling runs code\n"


def test_this_repository_is_clean():
    """The project keeps its own bans."""
    result = subprocess.run([sys.executable, SCRIPT], cwd=ROOT, capture_output=True, text=True)

    assert (result.returncode, result.stdout) == (0, "")
