"""Bad input through the commands: each a clear message with the right exit code, nothing lost, nothing left."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from run_kit import DRIVERS, WORKER, Done, RunKit, run_kit
from waiting import scaled, wait_until, within

ENGINES = f"roles.actor.engine={DRIVERS}/fault_engines.py"


@pytest.fixture
def kit(tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunKit]:
    """Give a job of two ranks, and check at the end that no process is left."""
    yield from run_kit(tmp_path, short_dir, monkeypatch)


def expect(done: Done, code: int, *words: str) -> str:
    """Check exit code, that there is exactly one block, no traceback, and the words in it; return the block."""
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert done.err.count("error[") == 1, done.err
    block = done.block
    unwrapped = " ".join(block.split())  # where a line is broken depends on the length of paths
    for word in words:
        assert word in block or word in unwrapped, block
    return block


# -- before anything is started ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scheduler.startup_timout=5m"], ["ZB0101", "unknown config key", "did you mean `scheduler.startup_timeout`"]),
        (["roles.actor.replicaz=3"], ["ZB0101", "roles.actor.replicaz", "roles.actor.replicas"]),
        (["roles.actor.replicas=two"], ["ZB0101", "roles.actor.replicas", "command line, argument 2", "two"]),
        (["roles.actor.replicas=0"], ["ZB0101", "roles.actor.replicas"]),
        (["roles.actor.mesh={dp: 2, tp: 2}"], ["ZB0101", "2 replicas", "needs 4"]),
        (["roles.actor.engine="], ["ZB0101", "roles.actor.engine"]),
        (["roles.actor.replicas=1000000"], ["ZB0101", "file descriptors", "limit"]),
        (["not an override"], ["ZB0101", "is not an override", "key=value"]),
        (["=3"], ["ZB0101", "is not an override"]),
        (["roles.actor.replicas=[1"], ["ZB0101", "roles.actor.replicas", "cannot be read"]),
        (["-t", "../evil"], ["ZB0101", "../evil", "not a valid name"]),
        (["rpc.timeout=-1s"], ["ZB0101", "rpc.timeout", "duration"]),
        (["rpc.timeout=0"], ["ZB0101", "rpc.timeout"]),
        (["scheduler.startup_timeout=0"], ["ZB0101", "scheduler.startup_timeout"]),
        (["scheduler.type=slurmm"], ["ZB0101", "scheduler.type", "slurmm"]),
        (["target=nodriver.py:main"], ["ZB0101", "nodriver.py"]),
        (["target=job.yaml"], ["ZB0101", "must be Python"]),
    ],
    ids=lambda value: value[0] if value and " " not in value[0] else None,
)
def test_a_wrong_setting_is_refused_before_anything_starts(kit: RunKit, arguments: list[str], words: list[str]) -> None:
    """Exit 2, the key or value with its origin and what to write instead; no rank was started."""
    expect(kit.run(*arguments), 2, *words)
    assert not list(kit.directory.glob("zbus-runs/*/*/logs/actor/*"))


def test_a_trial_that_runs_is_not_taken_over(kit: RunKit) -> None:
    """A second run of a live trial: exit 8, the holder's pid; the first goes on undisturbed."""
    idle = [f"target={DRIVERS}/fault_driver.py:idle", f"params.go={kit.directory / 'never'}"]
    first = kit.start("-t", "t1", *idle)
    first.wait_err("driver")
    for more in ([], ["--resume"], ["--overwrite"]):
        expect(kit.run("-t", "t1", *more), 8, "ZB0801", f"pid {first.process.pid}")
    assert first.process.poll() is None
    assert not kit.exits()
    first.signal(signal.SIGINT)
    assert first.end().code == 130


@pytest.mark.parametrize("place", ["file", "sealed"])
def test_a_root_that_cannot_be_written_is_named(kit: RunKit, place: str) -> None:
    """A root below a file or in a directory without write permission: exit 2, the path, another way."""
    if place == "file":
        (kit.directory / "file").write_text("")
        root = kit.directory / "file"
    else:
        root = Path("/proc/zbus-root")  # not even root can make a directory there
    block = expect(kit.run("--root", str(root)), 2, "ZB0101", str(root), "--root")
    assert "cannot be made" in block


def test_a_socket_path_that_would_be_too_long_is_refused(kit: RunKit, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime directory with a path too long for a socket: exit 2, the limit, the variable to set."""
    deep = kit.directory / ("d" * 100)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(deep))
    expect(kit.run(), 2, "ZBUS_RUNTIME_DIR", "107")


def test_too_few_descriptors_are_refused_with_the_number_needed(kit: RunKit) -> None:
    """A hard limit that is too small for the ranks: exit 2, what is needed and what is there."""
    block = expect(kit.run(prefix=("prlimit", "--nofile=64:64")), 2, "ZB0101", "file descriptors", "limit    64")
    assert "ulimit -Hn" in block
    assert not list(kit.directory.glob("zbus-runs/*/*/logs/actor/*"))


# -- engines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("no_such_module_x:Actor", ["no_such_module_x"]),
        (f"{DRIVERS}/fault_engines.py:Victmi", ["Victmi", "did you mean", "Victim`"]),
        (f"{DRIVERS}/fault_engines.py:NotAnEngine", ["NotAnEngine", "zbus.Engine"]),
        (f"{DRIVERS}/fault_engines.py:time", ["time", "fault_engines.py"]),
        ("broken_engines.py:Actor", ["broken_engines.py", "ZeroDivisionError"]),
        ("unimportable_engines.py:Actor", ["unimportable_engines.py", "no_such_library_y"]),
    ],
    ids=["module", "near name", "no engine", "no class", "import raises", "import of an import"],
)
def test_an_engine_that_cannot_be_loaded_is_named(kit: RunKit, engine: str, words: list[str]) -> None:
    """Exit 2 and what is wrong with which name; the ranks end in order."""
    (kit.directory / "broken_engines.py").write_text("1 / 0\n")
    (kit.directory / "unimportable_engines.py").write_text("import no_such_library_y\n")
    expect(kit.run(f"roles.actor.engine={engine}"), 2, "ZB0202", *words)


@pytest.mark.parametrize("arguments", ["roles.actor.args=[a, b, c]", "roles.actor.kwargs={nope: 1}"])
def test_arguments_that_do_not_fit_the_constructor_are_told(kit: RunKit, arguments: str) -> None:
    """A TypeError of the constructor names class and rank, and where the arguments stand."""
    expect(kit.run(arguments), 1, "ZB0401", "TypeError", "Victim.__init__", "actor/", "roles.actor.args")


def test_a_setup_that_fails_on_one_rank_names_it(kit: RunKit) -> None:
    """The rank, its exception and the user's line; exit 1."""
    block = expect(kit.run("roles.actor.args=[raise:no disk]"), 1, "ZB0401", "ValueError: no disk", "actor/1")
    assert "fault_engines.py" in block
    assert "in do_raise" in block


@pytest.mark.parametrize(("how", "words"), [("exit:9", "exited with code 9"), ("kill:9", "killed by SIGKILL")])
def test_a_rank_that_dies_in_setup_is_named(kit: RunKit, how: str, words: str) -> None:
    """The rank, its phase, its exit, its log and crash file; exit 4."""
    block = expect(kit.run(f"roles.actor.args=[{how}]"), 4, "ZB0301", "actor/1 died while creating its engine", words)
    assert "crash/actor.1.0.json" in block


def test_a_setup_that_hangs_is_told_at_the_deadline(kit: RunKit) -> None:
    """Exit 3 at the start deadline: the rank, its phase and age, its place in the user's code, its last words."""
    for limit in (2, 8, 32):  # on a slow machine the ranks are not started by a short deadline, and that is told
        done = kit.run("roles.actor.args=[hang]", "--startup-timeout", f"{limit}s")
        if "actor/0" not in done.block and "log: hanging here" in done.block:
            break
    block = expect(done, 3, "ZB0201", f"actor/1 not ready within {limit} s", "in do_hang", "log: hanging here")
    assert "actor/0" not in block, "the rank that is ready is no culprit"
    age = re.search(r"creating its engine for (\d+\.\d) s", " ".join(block.split()))
    assert age is not None, block
    assert float(age[1]) < limit + within(3)


def test_ranks_that_run_different_code_are_refused(kit: RunKit) -> None:
    """Two versions of an engine in one role: exit 3 at the start, with both ranks and both digests."""
    (kit.directory / "two_versions.py").write_text(
        "import os\n"
        "import zbus\n"
        "class Actor(zbus.Engine):\n"
        "    @zbus.endpoint()\n"
        "    def work(self): ...\n"
        "    if os.environ.get('RANK') == '1':\n"
        "        @zbus.endpoint()\n"
        "        def newer(self): ...\n"
    )
    done = kit.run("roles.actor.engine=two_versions.py:Actor")
    expect(done, 3, "ZB0201", "actor/0", "actor/1", "different code", "same version")


def test_a_missing_role_or_endpoint_is_answered_with_the_near_name(kit: RunKit) -> None:
    """bus.group("actr") and actor.stepp are errors at once that name what there is."""
    (kit.directory / "drv.py").write_text(
        "def role(run):\n    run.bus.group('actr')\n\ndef endpoint(run):\n    run.bus.group('actor').stepp()\n"
    )
    expect(kit.run("target=drv.py:role"), 2, "ZB0101", "no role 'actr'", "actor")
    done = kit.run("target=drv.py:endpoint")
    assert done.code == 1
    assert "AttributeError" in done.err
    assert "step" in done.block


# -- workers started by hand -------------------------------------------------------------------------------------------


@pytest.fixture
def external(kit: RunKit) -> RunKit:
    """Give a run that waits for workers started by hand."""
    running = kit.start("-t", "ext", "scheduler.type=external", "--startup-timeout", "40s")
    running.wait_err("waiting")
    wait_until(lambda: kit.trial.registry.is_dir() and kit.records().jobs(), what="the job record")
    return kit


def worker(kit: RunKit, *arguments: str, trial: str = "zbus-runs/demo/ext"):
    """Start a worker by hand."""
    return kit.launch([*WORKER, "start", "--role", "actor", "--trial-dir", trial, *arguments])


def test_another_world_size_is_refused(external: RunKit) -> None:
    """A worker told another world size than the role has: exit 2 with both numbers."""
    expect(worker(external, "--world-size", "3").end(), 2, "ZB0101", "actor has 2 ranks", "told 3", "--world-size 2")


def test_a_rank_outside_the_world_is_refused(external: RunKit) -> None:
    """Rank 7 of 2: exit 2, with the ranks there are."""
    expect(worker(external, "--rank", "7").end(), 2, "ZB0101", "0 to 1", "7")


def test_two_workers_that_claim_one_rank_are_both_named(external: RunKit) -> None:
    """The second claim of rank 0: exit 2 with both agents; the first keeps it."""
    first = worker(external, "--rank", "0")
    first.wait_err("actor/0 runs")
    block = expect(worker(external, "--rank", "0").end(), 2, "ZB0203", "actor/0 is already run by another agent")
    assert f"pid {first.process.pid}" in block
    assert first.process.poll() is None


def test_a_worker_for_an_unknown_role_says_which_there_are(external: RunKit) -> None:
    """The role of another name: exit 3 when its patience ends, with the roles of the controller."""
    command = [*WORKER, "start", "--role", "actro", "--trial-dir", "zbus-runs/demo/ext", "--wait-controller", "1"]
    expect(external.launch(command).end(), 3, "ZB0201", "no job for actro", "it has actor")


@pytest.mark.parametrize("place", ["nowhere/demo/ext", "elsewhere"])
def test_a_registry_that_is_not_shared_is_diagnosed_on_both_sides(external: RunKit, place: str) -> None:
    """A worker with another directory says what it looked for and where; the controller names its registry's id."""
    (external.directory / "elsewhere").mkdir()
    done = worker(external, "--wait-controller", "1", trial=place).end()
    expect(done, 3, "ZB0201", "no controller for actor", "looked in", f"{place}/registry", "same trial directory")


def test_ranks_that_nobody_starts_are_named_with_the_registry(kit: RunKit) -> None:
    """At the start deadline: which ranks, that nobody started them, and which registry (by id) was watched."""
    done = kit.run("-t", "ext", "scheduler.type=external", "--startup-timeout", "1s")
    block = expect(done, 3, "ZB0201", "actor/0-1 not ready", "nobody has started it", "registry")
    assert kit.records().root_id() in block


def test_a_worker_that_comes_first_waits_for_its_controller(kit: RunKit) -> None:
    """A worker before its controller says what it waits for, then serves; the order of starting does not matter."""
    waiting = worker(kit, "--nproc", "2", "--wait-controller", "40")
    waiting.wait_err("waiting for a controller")
    done = kit.run("-t", "ext", "scheduler.type=external", "--startup-timeout", "40s")
    assert done.code == 0, done.err
    assert waiting.end().code == 0


# -- strangers on the wire ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", [pytest.param("ipc", marks=pytest.mark.ci), "tcp"])
def test_garbage_on_a_port_is_refused_while_calls_go_on(kit: RunKit, transport: str) -> None:
    """Random bytes, a half greeting and well-framed nonsense to every socket of a rank: calls are right, ranks live."""
    (kit.directory / "drv.py").write_text(
        "from pathlib import Path\n"
        "def main(run):\n"
        "    actor, calls = run.bus.group('actor'), 0\n"
        "    while not Path(run.config['go']).exists():\n"
        "        calls += 1\n"
        "        assert actor.count() == [calls, calls]\n"
        "    refused = [status['refused'] for status in run.bus.statuses().values()]\n"
        "    return {'calls': calls, 'counts': actor.count(), 'refused': refused}\n"
    )
    go = kit.directory / "go"
    running = kit.start(
        "target=drv.py:main", f"params.go={go}", f"scheduler.transport={transport}", "--json", "--quiet"
    )
    wait_until(
        lambda: any(kit.directory.glob("zbus-runs/*/*/registry/jobs/*")) and len(kit.records().workers("actor")) == 2,
        what="the workers' records",
    )
    for record in kit.records().workers("actor"):
        for endpoint in [*record.main, *record.ctl]:
            for junk in (os.urandom(1000), b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0\0\0\0\0\x01\x7f", b""):
                _poke(endpoint, junk)
            _send_nonsense(endpoint)
    go.touch()
    done = running.end(30)
    assert done.code == 0, done.err
    import json

    metrics = json.loads(done.out)["metrics"]
    assert metrics["counts"] == [metrics["calls"] + 1] * 2
    assert metrics["calls"] > 10
    assert all(sum(refused.values()) > 0 for refused in metrics["refused"]), "junk is counted"


def _poke(endpoint: str, junk: bytes) -> None:
    """Send bytes that are no ZMTP."""
    kind, _, address = endpoint.partition("://")
    if kind == "ipc":
        family, target = socket.AF_UNIX, address
    else:
        host, _, port = address.rpartition(":")
        family, target = socket.AF_INET, (host, int(port))
    with socket.socket(family, socket.SOCK_STREAM) as raw:
        raw.connect(target)
        raw.sendall(junk)
        raw.settimeout(0.05)
        try:
            raw.recv(64)
        except OSError:
            return


_NONSENSE = """
import sys, time, zmq
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.setsockopt(zmq.LINGER, 0)
socket.connect(sys.argv[1])
socket.send_multipart([b"", b"\\xc1", b"x" * 1000])
socket.send_multipart([b"\\x93\\x01\\x02"])
socket.send(b"")
time.sleep(0.2)
context.destroy(0)
"""


def _send_nonsense(endpoint: str) -> None:
    """Send well-framed messages that mean nothing, from another process: this one must not make sockets."""
    import subprocess

    subprocess.run([sys.executable, "-c", _NONSENSE, endpoint], check=True, timeout=scaled(20))
