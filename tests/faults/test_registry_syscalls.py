"""Every system call of the registry, the crash journal, key files and dumps fails in turn: no hang, nothing corrupt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from preload_kit import compiled, needs_compiler
from waiting import scaled
from zbus.registry import FileRegistry, Records
from zbus.registry.records import EpochRecord
from zbus.runtime.journal import CrashJournal
from zbus.transport.security import ProcessKeys, read_secret, write_secret

pytestmark = pytest.mark.ci

DRIVERS = Path(__file__).parent / "drivers"
FILES = {"open", "read"}
SWEPT = {
    "write_synced": FILES | {"write", "fsync", "rename"},
    "write": FILES | {"write", "rename"},
    "renew": FILES | {"write", "rename"},
    "claim": FILES | {"write", "fsync", "link", "unlink"},
    "claim_taken": FILES | {"write", "fsync", "link", "unlink"},
    "listing": FILES,
    "withdraw": FILES | {"write", "fsync", "rename", "unlink"},
    "journal": FILES | {"unlink", "mmap", "truncate", "allocate"},
    "key_write": FILES | {"write", "fsync"},
    "key_read": FILES,
    "dump": FILES | {"write", "fsync", "rename", "unlink"},
}
"""By scenario, the calls that it makes: each of them is failed."""


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """Give a directory where a sync costs nothing, if there is one: thousands are made."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # the name of the file system
    with tempfile.TemporaryDirectory(prefix="zt-sweep", dir=place) as path:
        yield Path(path)


@needs_compiler
@pytest.mark.parametrize("scenario", SWEPT)
def test_any_system_call_may_fail_at_any_place(memory_dir, scenario):
    """Row 42: call n of each kind fails with each error, for every n: whole records or none, the next run works."""
    done = subprocess.run(
        [sys.executable, str(DRIVERS / "sweep_driver.py"), str(memory_dir), scenario],
        env={**os.environ, "LD_PRELOAD": str(compiled("failcalls"))},
        capture_output=True,
        text=True,
        timeout=scaled(100),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    failed = {call for call, count in json.loads(done.stdout).items() if count}
    assert failed == SWEPT[scenario]


# -- real processes under strace ---------------------------------------------------------------------------------------

STRACE = shutil.which("strace")

PROGRAM = """
import os, sys
from pathlib import Path
from zbus.errors import ConfigError, RegistryError
from zbus.registry import FileRegistry, Lease, Records
from zbus.registry.records import EpochRecord, WorkerRecord
from zbus.runtime.journal import CrashJournal, read_journal
from zbus.transport.security import ProcessKeys, read_secret, write_secret

told = []

def tried(name, step):
    try:
        step()
    except (RegistryError, ConfigError, OSError) as error:
        told.append(f"{name}: {error}")

def registry(root):
    records = Records(FileRegistry(root / "registry", sleep=lambda _: None))
    tried("epoch", lambda: records.claim_epoch(EpochRecord(session="%032x" % 1)))
    tried("worker", lambda: records.publish_worker(WorkerRecord(role="actor", rank=0, incarnation=1)))
    for counter in (1, 2):
        tried("lease", lambda: records.renew_lease(Lease(holder="a", counter=counter, ttl_s=1.0)))
    tried("list", records.workers)
    if records.junk:
        told.append(f"junk: {records.junk}")

def journal(root):
    path = root / "journal" / "a.bin"
    writer = CrashJournal(path, 7)
    ring = writer.ring(b"s" * 16, "main")
    ring.begin(0)
    report = read_journal(path, 7, reaped=True)
    if report is None or not report.complete:
        told.append("journal: tells nothing")
    writer.close()

def key(root):
    write_secret(root / "key", ProcessKeys.create())
    read_secret(root / "key")

def everything(root):
    tried("registry", lambda: registry(root))
    tried("journal", lambda: journal(root))
    tried("key", lambda: key(root))

everything(Path(sys.argv[1]))  # whatever is imported or looked up once
assert not told, told
os.writev(1, [b"ready\\n"])
sys.stdin.readline()
everything(Path(sys.argv[2]))
os.writev(1, ["\\n".join(told).encode()])  # no write(), which may be failing
os._exit(0)
"""


@pytest.mark.skipif(STRACE is None, reason="needs strace (Debian: strace)")
@pytest.mark.parametrize(
    ("call", "error", "when"),
    [
        ("openat", "EIO", "3+4"),
        ("openat", "EMFILE", "2"),
        ("openat", "ESTALE", "4+3"),
        ("openat", "EACCES", "1+"),
        ("write", "ENOSPC", "1+"),
        ("write", "ENOSPC", "2"),
        ("write", "EIO", "3"),
        ("fsync", "EIO", "1+"),
        ("fsync", "EIO", "2"),
        ("fsync", "ENOSPC", "5"),
        ("rename,renameat,renameat2", "ESTALE", "1"),
        ("rename,renameat,renameat2", "EIO", "1+"),
        ("rename,renameat,renameat2", "EINTR", "1+2"),
        ("linkat", "EIO", "1+"),
        ("linkat", "EINTR", "1"),
        ("linkat", "EACCES", "2"),
        ("unlink,unlinkat", "EIO", "1+"),
        ("mkdir,mkdirat", "ENOSPC", "1+"),
        ("fallocate", "ENOSPC", "1+"),
        ("ftruncate", "EIO", "1"),
        ("getdents64", "EIO", "1+"),
        ("fstat,newfstatat,statx", "ESTALE", "2+5"),
        ("mmap", "ENODEV", "1+"),
    ],
)
def test_a_process_whose_system_calls_fail_says_so_and_the_next_one_works(memory_dir, call, error, when):
    """Row 42: the kernel fails calls of a real process: what it tells is true, and what it leaves is whole."""
    warm, root = memory_dir / "warm", memory_dir / "root"
    for place in (warm, root):
        place.mkdir(mode=0o700)
    trace = memory_dir / "trace"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(warm), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        rule = [f"trace={call}", "-e", f"inject={call}:error={error}:when={when}"]
        command = [str(STRACE), "-f", "-o", str(trace), "-p", str(process.pid), "-e", *rule]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            said = tracer.stderr.readline()
            if "attached" not in said:
                process.kill()
                pytest.skip(f"strace may not trace here: {said.strip()}")
            out, err = process.communicate("go\n", timeout=scaled(30))
    assert process.returncode == 0, err
    assert not err
    assert "INJECTED" in trace.read_text(), "no call was failed"
    names = {line.partition(": ")[0] for line in out.splitlines()}
    assert names <= {"registry", "epoch", "worker", "lease", "list", "junk", "journal", "key"}, out

    again = Records(FileRegistry(root / "registry"))
    assert not again.junk
    assert [one.rank for one in again.workers()] == ([] if names & {"registry", "worker"} else [0])
    numbers = [one.epoch for one in again.epochs()]
    assert numbers == ([1] if numbers else [])
    assert numbers or names & {"registry", "epoch"}
    assert again.claim_epoch(EpochRecord(session="02")).epoch == len(numbers) + 1
    writer = CrashJournal(root / "journal" / "a.bin", 8)
    writer.close()
    if (root / "key").exists():
        read_secret(root / "key")
    else:
        assert "key" in names
        write_secret(root / "key", ProcessKeys.create())
