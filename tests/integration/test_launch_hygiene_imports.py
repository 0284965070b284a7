from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest

from waiting import scaled

pytestmark = pytest.mark.alone

LIMIT_S = scaled(0.25)
HEAVY = ("torch", "numpy", "rich", "textual", "matplotlib", "prometheus_client")

TRACEVIEW = (
    *("merge", "stats", "stragglers", "sessions", "report", "view", "diff", "validate", "convert", "collect", "tail"),
)

HELPS = [
    ("controller.cli", []),
    *(("controller.cli", [command]) for command in ("run", "status", "stop", "explain")),
    ("workers.cli", []),
    *(("workers.cli", [command]) for command in ("start", "env")),
    ("traceview.cli", []),
    *(("traceview.cli", [command]) for command in TRACEVIEW),
]

# Runs a program in this interpreter as its console script does, then tells what was loaded and what it cost.
PROBE = """
import json, os, resource, sys
module, arguments = sys.argv[1], sys.argv[2:]
code, saved = 0, os.dup(1)
os.dup2(2, 1)
if module:
    imported = __import__(module, fromlist=["main"])
    if arguments:
        sys.argv = [module, *arguments]
        try:
            imported.main()
        except SystemExit as end:
            code = end.code or 0
sys.stdout.flush()
usage = resource.getrusage(resource.RUSAGE_SELF)
found = {"cpu": usage.ru_utime + usage.ru_stime, "code": code, "modules": list(sys.modules)}
os.write(saved, json.dumps(found).encode())
"""

ENGINE = """
import zbus

class Small(zbus.Engine):
    @zbus.endpoint(zbus.Everywhere(), collect=zbus.PerRank(), effect="pure")
    def echo(self, value):
        return value
"""

# Launches, calls, and tells which heavy packages each process has mapped code of; then sends an array.
DRIVER = f"""
import json, os, re, sys
from pathlib import Path
from controller import Controller, Role

def mapped(pid):
    text = Path(f"/proc/{{pid}}/maps").read_text()
    return [name for name in {HEAVY!r} if f"/site-packages/{{name}}/" in text]

def has_openssl(pid):
    return "libcrypto" in Path(f"/proc/{{pid}}/maps").read_text()

roles = {{"w": Role("engines.py:Small", replicas=2)}}
with Controller.launch("small", roles, root=sys.argv[1], startup_timeout=float(sys.argv[2])) as bus:
    answers = bus.group("w").echo([1, 2.5, "x"])
    pids = [status["pid"] for status in bus.statuses().values()]
    agent = int(re.search(r"PPid:\\t(\\d+)", Path(f"/proc/{{pids[0]}}/status").read_text())[1])
    found = {{"answers": answers, "controller": mapped(os.getpid()), "agent": mapped(agent),
             "ranks": [mapped(pid) for pid in pids], "openssl": has_openssl(agent)}}
    import numpy
    ones = numpy.ones(1 << 20, numpy.uint8)
    found["array"] = sum(bool((array == ones).all()) for array in bus.group("w").echo(ones))
print(json.dumps(found))
"""


def probe(module: str, *arguments: str) -> dict:
    """Run a program in a fresh interpreter and return processor seconds, exit code and loaded modules."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module, *arguments],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "screen": done.stderr}


def beyond_bare(module: str, *arguments: str) -> float:
    """Return processor seconds beyond a bare interpreter: the least of several pairs, since noise only adds."""
    return min(probe(module, *arguments)["cpu"] - probe("")["cpu"] for _ in range(4))


def test_import_zbus_is_quick_and_loads_nothing_heavy():
    """`import zbus` costs at most 0.25 s beyond bare Python and loads neither torch nor numpy nor a screen library."""
    loaded = probe("zbus")["modules"]
    assert not set(HEAVY) & set(loaded)
    assert "zmq" not in loaded
    assert beyond_bare("zbus") < LIMIT_S


@pytest.mark.parametrize(
    ("module", "words"), HELPS, ids=lambda value: " ".join(value) if isinstance(value, list) else value
)
def test_every_help_is_quick_and_loads_nothing_heavy(module, words):
    """`--help` of each program and command costs at most 0.25 s beyond bare Python and loads nothing heavy."""
    shown = probe(module, *words, "--help")
    assert shown["code"] == 0, shown["screen"]
    assert "Usage: " in shown["screen"]
    assert not set(HEAVY) & set(shown["modules"])
    assert beyond_bare(module, *words, "--help") < LIMIT_S


def test_every_command_is_in_the_list_above():
    """A command that is added is measured too."""
    import controller.cli
    import traceview.cli
    import workers.cli

    for group in (controller.cli.cli, traceview.cli.main, workers.cli.cli):
        listed = {words[0] for module, words in HELPS if module == group.callback.__module__ and words}
        assert set(group.list_commands(click.Context(group))) == listed


def test_an_agent_loads_neither_torch_nor_numpy():
    """What an agent and its ranks import before any engine holds no torch and no numpy, and no event loop."""
    for module in ("workers.agent", "workers.worker", "zbus.runtime.host"):
        assert not {*HEAVY, "asyncio"} & set(probe(module)["modules"])


def test_no_process_of_a_trial_loads_what_its_engines_do_not_need(tmp_path):
    """Ranks, agent and controller that exchange small values have mapped neither numpy nor torch; the agent, which
    ciphers and hashes nothing, has no OpenSSL either: that alone would be a tenth of its memory.
    """
    (tmp_path / "engines.py").write_text(ENGINE)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path), str(scaled(60))], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["ranks"]) == 2
    assert found == {
        "answers": [[1, 2.5, "x"]] * 2,
        "controller": [],
        "agent": [],
        "ranks": [[], []],
        "openssl": False,
        "array": 2,
    }
