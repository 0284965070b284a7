"""Every system call of registry, journal, key files and dumps fails once, twice, for good, at every place in turn.

``LD_PRELOAD=failcalls.so python sweep_driver.py DIRECTORY SCENARIO``: prints how many calls were failed, by call, as
JSON. Ends with 1 and the place at the first promise that breaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import logging
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from controller.recover import Recover, RecoverState
from zbus.config import TrialDir
from zbus.errors import ConfigError, RecoverError, RegistryError
from zbus.registry import FileRegistry, Lease, Records
from zbus.registry.records import EpochRecord, JobRecord, WorkerRecord
from zbus.runtime.journal import CrashJournal, read_journal
from zbus.transport.security import CurveKeys, ProcessKeys, read_secret, write_secret

CALLS = ("open", "write", "fsync", "rename", "link", "unlink", "read", "mmap", "truncate", "allocate")
ERRORS = ("EIO", "ENOSPC", "ESTALE", "EACCES", "EINTR", "EMFILE")
TIMES = (1, 2, 0)
"""Once; twice running; for good."""
AT_MOST_S = 10

_failing = ctypes.CDLL(None)
_failing.fail_disarm.restype = ctypes.c_long
_failing.fail_arm.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_long)

_MADE = ProcessKeys.create()
KEYS = CurveKeys(_MADE.public, _MADE.secret)


class Broken(AssertionError):
    """A promise that did not hold."""


def require(promise: str, holds: object) -> None:
    """Check one promise."""
    if not holds:
        raise Broken(promise)


# -- registry ----------------------------------------------------------------------------------------------------------

WORKER = WorkerRecord(role="actor", rank=0, incarnation=1, log="x" * 500)
OTHER = WorkerRecord(role="actor", rank=1, incarnation=2)
JOB = JobRecord(role="actor", engine="engines:Actor", world_size=2, epoch=1)
NEXT_JOB = JobRecord(role="actor", engine="engines:Actor", world_size=2, epoch=2, cwd="x" * 500)


def open_records(root: Path) -> Records:
    """Return the registry as a process opens it, which does not really wait between attempts."""
    return Records(FileRegistry(root / "registry", sleep=lambda _seconds: None))


def registry_begin(root: Path) -> None:
    """Write what stands before the faults."""
    records = open_records(root)
    records.publish_worker(OTHER)
    records.publish_job(JOB)
    records.renew_lease(Lease(holder="a", counter=1, ttl_s=1.0))
    records.claim_epoch(EpochRecord(session="00"))


def registry_after(root: Path) -> None:
    """Look with fresh eyes: whole records, nobody else harmed, and the next run works."""
    records = open_records(root)
    require("another's record stands", OTHER in records.workers())
    require("a record is as it was written", all(one in (WORKER, OTHER) for one in records.workers()))
    require("a job is as it was written", records.job("actor") in (JOB, NEXT_JOB))
    require("nothing is half written", not records.junk)
    lease = records.lease("a")
    require("a lease is as it was written", lease is None or lease.counter in (1, 2))
    numbers = [one.epoch for one in records.epochs()]
    require("epochs rise", numbers == sorted(set(numbers)) and numbers[0] == 1)
    records.publish_worker(WORKER)
    require("the next write works", records.workers() == [WORKER, OTHER])
    records.publish_job(NEXT_JOB)
    require("the next synced write works", records.job("actor") == NEXT_JOB)
    records.renew_lease(Lease(holder="a", counter=2, ttl_s=1.0))
    require("the next claim works", records.claim_epoch(EpochRecord(session="ff")).epoch == numbers[-1] + 1)


def write_synced(root: Path) -> None:
    """Replace a record that is to survive a power cut, and read it back where that succeeded."""
    records = open_records(root)
    records.publish_job(NEXT_JOB)
    require("what was written is there, or the read says why not", records.job("actor") == NEXT_JOB)


def write(root: Path) -> None:
    """Write a record of a process, which is not synced, and read it back where that succeeded."""
    records = open_records(root)
    records.publish_worker(WORKER)
    found = records.worker("actor", 0, 1)
    require("what was written is there, or the read says why not", found == WORKER)


def renew(root: Path) -> None:
    """Renew a lease."""
    open_records(root).renew_lease(Lease(holder="a", counter=2, ttl_s=1.0))


def claim(root: Path) -> None:
    """Claim a key: whoever is told that it won has won."""
    registry = open_records(root).registry
    told = registry.claim("claims/c", b"mine")
    require("a claim that was won stands", told == b"mine")


def claim_taken(root: Path) -> None:
    """Claim the next epoch, where others have been."""
    record = open_records(root).claim_epoch(EpochRecord(session="aa"))
    require("an epoch is higher than those before", record.epoch > 1)


def listing(root: Path) -> None:
    """List: a record that cannot be read is named, not forgotten."""
    records = open_records(root)
    found = records.workers()
    require("what stands is listed or named", OTHER in found or records.junk)


def withdraw(root: Path) -> None:
    """Take a record back."""
    records = open_records(root)
    records.publish_worker(WORKER)
    records.withdraw_worker(WORKER)


# -- crash journal -----------------------------------------------------------------------------------------------------


def journal_path(root: Path) -> Path:
    """Return where the journal of these scenarios lies."""
    return root / "journal" / "actor.0.0.bin"


def nothing(_root: Path) -> None:
    """Nothing stands before the faults."""


def journal(root: Path) -> None:
    """Begin a journal and keep calls in it; without it a worker goes on."""
    writer = CrashJournal(journal_path(root), 7)
    try:
        for number in range(3):
            ring = writer.ring(bytes([number]) * 16, "main")
            ring.begin(0)
            ring.end(0)
        report = read_journal(journal_path(root), 7, reaped=True)
        if report is not None:
            require("absence proves nothing where something is missing", not report.complete or len(report.lanes) == 3)
            require("what is told is right", all(entry.upto in (0, 1) for entry in report.lanes))
    finally:
        writer.close()


def journal_after(root: Path) -> None:
    """The next start of the rank keeps a journal that can be read."""
    writer = CrashJournal(journal_path(root), 8)
    writer.ring(b"s" * 16, "main").begin(0)
    report = read_journal(journal_path(root), 8, reaped=True)
    writer.close()
    require("the next journal works", report is not None and report.complete and len(report.lanes) == 1)


# -- keys --------------------------------------------------------------------------------------------------------------


def key_write(root: Path) -> None:
    """Write a key file."""
    write_secret(root / "key", KEYS)
    require("a key that was written can be read", read_secret(root / "key") == KEYS)


def key_write_after(root: Path) -> None:
    """There is a whole key or none, and where there is none it can be written."""
    if not (root / "key").exists():
        write_secret(root / "key", KEYS)
    require("the next read works", read_secret(root / "key") == KEYS)


def key_read_begin(root: Path) -> None:
    """Write the key that is read."""
    write_secret(root / "key", KEYS)


def key_read(root: Path) -> None:
    """Load a key."""
    require("a key is read whole", read_secret(root / "key") == KEYS)


# -- dumps -------------------------------------------------------------------------------------------------------------


class Saved:
    """A training role whose state is one number in a file."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def save(self, path: str) -> None:
        """Write it."""
        Path(path).write_text(str(self.value))

    def load(self, path: str) -> None:
        """Take it over."""
        self.value = int(Path(path).read_text())


def open_recover(root: Path, engine: Saved) -> Recover:
    """Return the dumps of a trial, of which one stays."""
    return Recover(TrialDir.at(root, "e", "t"), engines={"actor": engine}, keep=1)


def dump_begin(root: Path) -> None:
    """Write the dump that stands before the faults."""
    (root / "e" / "t" / "checkpoints").mkdir(parents=True)
    open_recover(root, Saved(10)).dump(RecoverState(step=1))


def dump(root: Path) -> None:
    """Write the next dump, and look at it where that succeeded."""
    recover = open_recover(root, Saved(20))
    recover.dump(RecoverState(step=2))
    found = recover.latest()
    require("a dump that was written is the newest", found is not None and found.state.step == 2)


def dump_after(root: Path) -> None:
    """The old dump or the new one is whole, and the next run goes on from it."""
    engine = Saved()
    recover = open_recover(root, engine)
    state = recover.start(resume=True)
    require("the newest dump is whole", (state.step, engine.value) in ((1, 10), (2, 20)))
    recover.dump(RecoverState(step=3))
    found = [entry.name for entry in (root / "e" / "t" / "checkpoints" / "recover").iterdir()]
    require(f"nothing else is left, not {found}", found == ["00000003"])


Step = Callable[[Path], None]
SCENARIOS: dict[str, tuple[Step, Step, Step]] = {
    **{
        step.__name__: (registry_begin, step, registry_after)
        for step in (write_synced, write, renew, claim, claim_taken, listing, withdraw)
    },
    "journal": (nothing, journal, journal_after),
    "key_write": (nothing, key_write, key_write_after),
    "key_read": (key_read_begin, key_read, key_write_after),
    "dump": (dump_begin, dump, dump_after),
}
TOLD = (RegistryError, ConfigError, RecoverError, OSError)
"""What a caller is told of a failure; anything else is a bug."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Fail where something waits without end."""

    def hang(_number: int, _frame: object) -> None:
        _failing.fail_disarm()
        msg = f"it hangs: more than {AT_MOST_S} s"
        raise Broken(msg)

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(AT_MOST_S)
    try:
        yield
    finally:
        signal.alarm(0)


def descriptors() -> int:
    """Return how many descriptors are open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def run(base: Path, name: str, call: str, n: int, code: int, times: int) -> int:
    """Play a scenario with one fault; return how many calls failed."""
    begin, step, after = SCENARIOS[name]
    root = base / "run"
    root.mkdir(mode=0o700)
    try:
        begin(root)
        before = descriptors()
        with limited():
            _failing.fail_arm(call.encode(), n, code, times)
            try:
                with contextlib.suppress(*TOLD):
                    step(root)
            finally:
                hits = int(_failing.fail_disarm())
        require("no descriptor is left open", descriptors() == before)
        after(root)
        return hits
    finally:
        shutil.rmtree(root)


def main(base: Path, name: str) -> None:
    """Sweep one scenario."""
    logging.disable(logging.CRITICAL)
    failed: Counter[str] = Counter()
    run(base, name, "none", 1, errno.EIO, 1)  # whatever is imported or looked up once
    for call, error, times in itertools.product(CALLS, ERRORS, TIMES):
        if error == "EINTR" and times == 0:
            continue  # the kernel never interrupts for good, and Python tries again each time
        for n in itertools.count(1):
            try:
                hits = run(base, name, call, n, getattr(errno, error), times)
            except BaseException:  # noqa: BLE001  # told with its place, whatever it is
                often = f"{times} times" if times else "for good"
                print(f"{name}: call {n} of {call} fails with {error}, {often}", file=sys.stderr)
                traceback.print_exc()
                sys.exit(1)
            failed[call] += hits
            if not hits:
                break
    print(json.dumps(failed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
