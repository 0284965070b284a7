from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from waiting import scaled, wait_until, within
from zbus.codec import decode, encode
from zbus.ids import WorkerName, new_session
from zbus.protocol.messages import OutcomeKind
from zbus.transport.client import Client, PeerState
from zbus.transport.profile import check_limits, descriptors_needed, sockets_needed
from zbus.transport.sockets import SocketFactory

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

WORKERS = 256
PER_PROCESS = 64

# Many whole callees in one process: real sockets, protocol and threads, only the engine is an echo.
FARM = """
import sys, threading
from zbus.ids import WorkerName
from zbus.protocol.messages import Kind, Status
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory

directory, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
factory = SocketFactory(max_sockets=4 * count + 16)

def serve(rank):
    server = Server(name=WorkerName("sim", rank), incarnation=1, factory=factory, lanes={"main": 1, "ctl": 1},
                    dispatch=lambda request: answer(server, request), guest_lanes=None)
    for link in ("main", "ctl"):
        server.bind(link, f"ipc://{directory}/{link}.{rank}")
    server.start()
    threading.Thread(target=server.run, args=(lambda request: answer(server, request),), daemon=True).start()

def answer(server, request):
    server.finish(request, 0, Kind.RESULT, Status.OK, [bytes(buffer) for buffer in request.buffers])

for rank in range(first, first + count):
    serve(rank)
print("ready", flush=True)
sys.stdin.read()
"""

# A caller that may use no more descriptors than it was granted.
CALLER = """
import json, sys, time
from pathlib import Path
from zbus.codec import decode, encode
from zbus.ids import WorkerName, new_session
from zbus.transport.client import Client, PeerState
from zbus.transport.profile import check_limits
from zbus.transport.sockets import SocketFactory

directory, count, limit_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
limits = check_limits(count)
factory = SocketFactory(max_sockets=limits.max_sockets)
client = Client(session=new_session(), epoch=1, factory=factory)
peers = [
    client.connect(WorkerName("sim", rank), 1, {link: [f"ipc://{directory}/{link}.{rank}"] for link in ("main", "ctl")})
    for rank in range(count)
]
joined = client.wait(lambda: all(peer.state is PeerState.READY for peer in peers), limit_s)
answers = {}
client.place(peers, "main", [encode(7)] * count, 1, deadline_s=limit_s,
             sink=lambda member, _call, outcome: answers.__setitem__(member, decode(outcome.payload)))
client.wait(lambda: len(answers) == count, limit_s)
print(json.dumps({"joined": joined, "answers": sum(answer == 7 for answer in answers.values()),
                  "descriptors": len(list(Path("/proc/self/fd").iterdir())), "soft": limits.soft}))
client.close()
factory.close()
"""


@contextmanager
def farm(directory: Path, count: int):
    """Run ``count`` simulated workers in a few processes."""
    with ExitStack() as stack:
        processes = []
        for first in range(0, count, PER_PROCESS):
            size = min(PER_PROCESS, count - first)
            process = subprocess.Popen(
                [sys.executable, "-c", FARM, str(directory), str(first), str(size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(_end, process)
            processes.append(process)
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        yield processes


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def limited(number: int):
    """Return a function that gives a child process a hard limit of ``number`` descriptors."""
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def largest(limit: int) -> int:
    """Return the largest number of workers that ``check_limits`` admits under a descriptor limit."""
    return next(peers for peers in range(limit, 0, -1) if descriptors_needed(peers) <= limit)


def test_256_workers_join_one_client_and_answer(short_dir):
    """256 workers join over two monitored connections each, within the budget that was checked, and all answer."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < descriptors_needed(WORKERS):
        pytest.skip(f"the hard descriptor limit is {hard}")
    limits = check_limits(WORKERS)
    with farm(short_dir, WORKERS):
        before = descriptors()
        factory = SocketFactory(max_sockets=limits.max_sockets)
        client = Client(session=new_session(), epoch=1, factory=factory)
        try:
            began = time.monotonic()
            peers = [
                client.connect(
                    WorkerName("sim", rank), 1, {link: [f"ipc://{short_dir}/{link}.{rank}"] for link in ("main", "ctl")}
                )
                for rank in range(WORKERS)
            ]
            assert client.wait(lambda: all(peer.state is PeerState.READY for peer in peers), scaled(60))
            joined = time.monotonic() - began
            used = descriptors() - before
            sockets = factory.open_sockets

            answers: dict[int, object] = {}

            def sink(member, _call, outcome):
                assert outcome.kind is OutcomeKind.OK
                answers[member] = decode(outcome.payload)

            rounds = []
            for number in range(5):
                answers.clear()
                began = time.monotonic()
                client.place(peers, "main", [encode(number)] * WORKERS, 1, deadline_s=scaled(60), sink=sink)
                assert client.wait(lambda: len(answers) == WORKERS, scaled(20))
                rounds.append(time.monotonic() - began)
                assert set(answers.values()) == {number}
        finally:
            client.close()
            assert factory.close()
        wait_until(lambda: descriptors() <= before, what="the descriptors of all connections to be freed")
    print(f"256 joined in {joined:.2f} s; broadcast and gather {min(rounds) * 1e3:.1f} ms; {used} descriptors")
    # A monitor is one more socket inside libzmq, which nobody here counts.
    internal = sockets["monitor"]
    assert sum(sockets.values()) + internal <= sockets_needed(WORKERS)
    assert used <= descriptors_needed(WORKERS)
    assert joined < within(30)


def test_a_caller_within_a_small_limit_works_up_to_the_number_it_was_told(short_dir):
    """Under `ulimit -n 1024` the largest number of workers that is admitted joins and answers."""
    count = largest(1024)
    assert count >= 49
    with farm(short_dir, count):
        done = subprocess.run(
            [sys.executable, "-c", CALLER, str(short_dir), str(count), str(scaled(60))],
            capture_output=True,
            text=True,
            preexec_fn=limited(1024),
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["joined"], found["answers"], found["soft"]) == (True, count, 1024)
    assert found["descriptors"] < 1024


@pytest.fixture
def job(tmp_path, monkeypatch, short_dir):
    """A config of many workers; none of them is ever started."""
    (tmp_path / "engines.py").write_text("import zbus\n\n\nclass Actor(zbus.Engine):\n    pass\n")
    (tmp_path / "drv.py").write_text("def main(run):\n    return {}\n")
    roles = {"actor": {"engine": "engines.py:Actor", "replicas": WORKERS}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"target": "drv.py:main", "roles": roles}))
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_256_workers_under_a_limit_of_1024_are_refused_with_the_number_needed(job):
    """`ulimit -n 1024` and 256 workers: exit 2 before any process is started; the error has all numbers and the fix."""
    done = subprocess.run(
        [sys.executable, "-m", "controller.cli", "run", "job.yaml"],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        preexec_fn=limited(1024),
    )
    assert done.returncode == 2, done.stderr
    needed = descriptors_needed(WORKERS)
    assert f"256 workers need {needed} file descriptors in this process, but the limit is 1024" in done.stderr
    assert re.search(rf"hint: .*ulimit -Hn {needed}", done.stderr)
    assert not list(job.rglob("logs/actor/*")), "no rank was started"


def test_a_soft_limit_is_raised_to_what_is_allowed(job):
    """A soft limit of 256 with enough room above it is raised, so that nobody need know of it."""
    code = (
        "import resource; from zbus.transport.profile import check_limits;"
        "print(check_limits(256).soft, resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    hard = descriptors_needed(WORKERS)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)),
    )
    assert done.stdout.split() == [str(hard), str(hard)], done.stderr
