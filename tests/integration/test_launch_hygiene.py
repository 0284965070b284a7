from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from launching import launch, probes
from waiting import scaled, wait_until
from zbus.data.presence import VARIABLE
from zbus.runtime.processes import children_of

pytestmark = pytest.mark.alone


@dataclass
class Traces:
    """Everything a launch could leave behind in this process or on this host."""

    processes: set[str]
    sockets: set[str]
    shared_memory: set[str]
    ports: set[str]
    descriptors: list[str]
    threads: set[str]

    def more_than(self, before: Traces) -> dict[str, object]:
        """Return what is here now and was not before."""
        found: dict[str, object] = {
            name: new
            for name in ("processes", "sockets", "shared_memory", "ports", "threads")
            if (new := getattr(self, name) - getattr(before, name))
        }
        if len(self.descriptors) > len(before.descriptors):
            extra = list(self.descriptors)
            for one in before.descriptors:
                if one in extra:
                    extra.remove(one)
            found["descriptors"] = extra
        return found


def take(mark: str, runtime: Path) -> Traces:
    """Look at the host: only processes, ports and files that bear ``mark`` or belong to this process count."""
    gc.collect()
    ours = processes(mark)
    return Traces(
        processes=set(ours.values()),
        sockets={str(path) for path in runtime.rglob("*")},
        shared_memory={path.name for path in Path("/dev/shm").glob("*zbus*")} - {f"zbus-{os.getuid()}"},
        ports=listening({os.getpid(), *ours}),
        descriptors=sorted(descriptors()),
        threads={f"{thread.name} {thread.ident}" for thread in threading.enumerate()},
    )


def processes(mark: str) -> dict[int, str]:
    """Return living processes with ``mark`` on their command line or in their environment, and all our children."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            text = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
        except OSError:
            continue
        if state != "Z" and mark.encode() in text:
            found[int(entry.name)] = f"{entry.name} {text.split(bytes(1))[0]!r}"
    for pid in children_of(os.getpid()):
        found.setdefault(pid, f"child {pid}")
    return found


def descriptors() -> list[str]:
    """Return what our descriptors point to, without the numbers that differ each time."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()).split(":")[0])
        except OSError:
            continue
    return found


def listening(pids: set[int]) -> set[str]:
    """Return the tcp ports on which these processes listen."""
    inodes = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                inodes[f"socket:[{words[9]}]"] = words[1]
    found = set()
    for pid in pids:
        try:
            links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        found |= {inodes[link] for link in links if link in inodes}
    return found


def assert_as_before(before, tmp_path, short_dir, *, launches: int) -> None:
    """Wait until nothing is there that was not there before; name what is left else."""
    left: dict[str, object] = {}

    def clean() -> bool:
        left.clear()
        left.update(take(str(tmp_path), short_dir).more_than(before))
        return not left

    try:
        wait_until(clean, 5, "a host as it was before")
    except AssertionError:
        pytest.fail(f"left behind after {launches} launches: {left}")


@pytest.mark.parametrize(
    "times",
    [5, pytest.param(20, marks=[pytest.mark.ci, pytest.mark.timeout(600)])],
)
def test_launches_leave_nothing_behind(tmp_path, short_dir, monkeypatch, times):
    """After each launch, calls and close: no process, socket file, runtime directory, port, shared memory,
    descriptor or thread is left, and the last launch is like the first.
    """
    times = int(os.environ.get("ZBUS_TEST_LAUNCHES", times))
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    monkeypatch.setenv(VARIABLE, str(short_dir))  # what is lent is seen among the sockets
    before = take(str(tmp_path), short_dir)
    for number in range(times):
        with launch(
            tmp_path,
            {"actor": probes(4, ports=1)},
            trial=f"t{number}",
            startup_timeout=scaled(60),
        ) as bus:
            assert bus.group("actor").echo(number) == number
            assert len(processes(str(tmp_path))) >= 5, "the agent and its four ranks are seen by this test"
        if number == 0:
            # What a first launch loads or caches for good belongs to the process, not to the launch.
            wait_until(lambda: not processes(str(tmp_path)), what="the end of the first launch's processes")
            first = take(str(tmp_path), short_dir)
            before.descriptors = first.descriptors
            assert len(first.descriptors) < 100
    assert_as_before(before, tmp_path, short_dir, launches=times)


def test_a_failed_launch_leaves_nothing_behind(tmp_path, short_dir, monkeypatch):
    """A launch whose engine cannot be loaded is undone as a whole."""
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    monkeypatch.setenv(VARIABLE, str(short_dir))  # what is lent is seen among the sockets
    roles = {"actor": probes(2), "critic": probes(1)}
    roles["critic"] = type(roles["critic"])("engines_under_test:Nobody", replicas=1, sys_path=roles["actor"].sys_path)
    before = take(str(tmp_path), short_dir)
    for number in range(2):
        with pytest.raises(Exception, match="Nobody"), launch(tmp_path, roles, trial=f"t{number}"):
            pytest.fail("an engine that does not exist was launched")
        if number == 0:
            before.descriptors = take(str(tmp_path), short_dir).descriptors
    assert_as_before(before, tmp_path, short_dir, launches=2)


def test_four_workers_answer_soon_after_launch(tmp_path):
    """From launch to the first answer of four workers takes less processor time than a second.

    Wall time says more of the machine's other work than of ours; ``benchmarks/startup.py`` measures it.
    """
    import resource

    def burnt() -> float:
        return sum(
            getattr(resource.getrusage(who), field)
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
            for field in ("ru_utime", "ru_stime")
        )

    spent = []
    for number in range(3):
        before = burnt()
        with launch(tmp_path, {"actor": probes(4)}, trial=f"t{number}") as bus:
            assert bus.group("actor").echo(1) == 1
        spent.append(burnt() - before)
    assert min(spent) < 1.0, spent
