"""The file registry over a file system that fails at every operation in turn."""

from __future__ import annotations

import errno
import itertools
import random

import pytest

from zbus.errors import RegistryError
from zbus.registry import FileRegistry, Records
from zbus.registry.fs import LocalFS
from zbus.registry.records import EpochRecord
from zbus.registry.tempfiles import is_temp
from zbus.testing.registry_fs import Crashed, FaultyFS, Quirks, SimulatedDisk, SimulatedFS

OLD, NEW, OTHER = b"old" * 30, b"new value", b"bystander"


def put_new(registry):
    """A first put."""
    registry.put("area/fresh", NEW)


def put_replace(registry):
    """A put over a record."""
    registry.put("area/x", NEW)


def put_lease(registry):
    """A put that need not be durable."""
    registry.put("area/x", NEW, durable=False)


def claim(registry):
    """A claim of a free key."""
    assert registry.claim("area/fresh", NEW) == NEW


def claim_taken(registry):
    """A claim of a taken key."""
    assert registry.claim("area/x", NEW) == OLD


def delete_own(registry):
    """A conditional delete."""
    assert registry.delete("area/x", OLD)


def get(registry):
    """A read."""
    assert registry.get("area/x") == OLD


def listing(registry):
    """A listing."""
    assert registry.list("area").entries.get("area/x") == OLD


ALLOWED = {
    put_new: {None: {("area/fresh", None), ("area/fresh", NEW)}, True: {("area/fresh", NEW)}},
    put_replace: {None: {("area/x", OLD), ("area/x", NEW)}, True: {("area/x", NEW)}},
    put_lease: {None: {("area/x", OLD), ("area/x", NEW)}, True: {("area/x", NEW)}},
    claim: {None: {("area/fresh", None), ("area/fresh", NEW)}, True: {("area/fresh", NEW)}},
    claim_taken: {None: {("area/x", OLD)}, True: {("area/x", OLD)}},
    delete_own: {None: {("area/x", OLD), ("area/x", None)}, True: {("area/x", None)}},
    get: {None: {("area/x", OLD)}, True: {("area/x", OLD)}},
    listing: {None: {("area/x", OLD)}, True: {("area/x", OLD)}},
}
"""What may stand after a failure (None) and must stand after success (True)."""


def no_sleep(_):
    """Retries need no time here."""


def fill(root):
    """Make the starting state, with operations that do not fail."""
    clean = FileRegistry(root)
    clean.put("area/x", OLD, durable=False)
    clean.put("area/other", OTHER, durable=False)
    clean.delete("area/fresh")
    return clean


def check_state(root, scenario, succeeded):
    """Look with fresh eyes: whole records, allowed ones, nobody else harmed."""
    clean = FileRegistry(root)
    stands = clean.list("area")
    assert not stands.junk
    assert stands.entries["area/other"] == OTHER
    allowed = ALLOWED[scenario][succeeded or None]
    assert all((key, stands.entries.get(key)) in allowed for key, _ in allowed)


@pytest.mark.parametrize("code", ["EIO", "ENOSPC", "ESTALE", "EACCES", "EMFILE", "EROFS"])
@pytest.mark.parametrize("scenario", ALLOWED, ids=lambda s: s.__name__)
def test_a_failing_disk_never_leaves_a_corrupt_record(tmp_path, scenario, code):
    """Rows 40 to 44: any operation may fail, once or for good, before or after its effect: whole records or none."""
    root = tmp_path / "registry"
    fill(root)
    for once, after in itertools.product((True, False), (True, False)):
        for n in itertools.count(1):
            fill(root)
            faulty = FaultyFS(LocalFS(root))
            registry = FileRegistry(root, fs=faulty, sleep=no_sleep)
            registry.get("area/x")
            registry.claim("area/z", b"z")
            faulty.fail_at = faulty.count + n
            faulty._error, faulty._once, faulty._after = getattr(errno, code), once, after
            try:
                scenario(registry)
                succeeded = True
            except RegistryError:
                succeeded = False
            except AssertionError:
                # a listing names what it could not read, a delete that could not look removes nothing
                assert scenario in (listing, delete_own, claim_taken)
                assert faulty.hits
                succeeded = False
            faulty.fail_at = 0
            check_state(root, scenario, succeeded)
            registry.put("area/next", b"next")
            assert registry.get("area/next") == b"next"
            if not faulty.hits:
                break
        assert n > 2, "the sweep must have hit something"


@pytest.mark.parametrize("scenario", ALLOWED, ids=lambda s: s.__name__)
def test_a_process_that_dies_at_any_operation_hides_and_breaks_nothing(tmp_path, scenario, monkeypatch):
    """B20, row 49: after a crash between any two operations names stay listed; the leftovers are swept."""
    root = tmp_path / "registry"
    for n in itertools.count(1):
        fill(root)
        registry = FileRegistry(root, fs=(faulty := FaultyFS(LocalFS(root), error=None)), sleep=no_sleep)
        registry.claim("area/z", b"z")
        registry._temps._me = (registry._owner_pid, 1)  # names as another process, dead by now, would make them
        faulty.fail_at = faulty.count + n
        try:
            scenario(registry)
        except Crashed:
            check_state(root, scenario, succeeded=False)
        assert not [name for name in (root / "area").iterdir() if is_temp(name.name)]
        if not faulty.hits:
            break
    assert n > 2


def test_the_error_of_a_full_disk_names_the_record_the_cause_and_a_way_out(tmp_path):
    """Row 40: the message is for the person who must free the space."""
    root = tmp_path / "registry"
    fs = FaultyFS(LocalFS(root), error=errno.ENOSPC, once=False)
    registry = FileRegistry(root, fs=fs)
    registry.put("leases/agent.1", b"1")
    fs.fail_at = fs.count + 1
    with pytest.raises(RegistryError, match=r"cannot write registry record leases/agent\.1: No space left") as caught:
        registry.put("leases/agent.1", b"2")
    assert caught.value.facts["file"].endswith("registry/leases/agent.1")
    assert "ENOSPC" in caught.value.facts["cause"]
    assert "free some space" in (caught.value.hint or "")
    assert isinstance(caught.value.__cause__, OSError)
    fs.fail_at = 0
    assert registry.get("leases/agent.1") == b"1"
    registry.put("leases/agent.1", b"3")
    assert registry.get("leases/agent.1") == b"3"


def test_a_stale_handle_is_no_error_of_the_user(tmp_path):
    """Row 44: ESTALE is answered by opening again, for every method."""
    disk = SimulatedDisk()
    for seed in range(50):
        fs = SimulatedFS(disk, random.Random(seed), quirks=Quirks(stale=0.3))
        registry = FileRegistry(fs.root, fs=fs, sleep=no_sleep)
        registry.put("area/x", b"%d" % seed)
        assert registry.get("area/x") == b"%d" % seed
        assert registry.claim("area/claimed", b"%d" % seed) == b"0"
        assert registry.delete("area/x")


def test_a_name_remembered_as_absent_is_found_once_the_memory_ends():
    """R6, row 45: a cached "not found" delays a reader; it never makes it give up on a listed name."""
    disk = SimulatedDisk()
    reader_fs = SimulatedFS(disk, random.Random(1), quirks=Quirks(absent_for=12))
    reader = FileRegistry(reader_fs.root, fs=reader_fs, sleep=no_sleep)
    writer_fs = SimulatedFS(disk, random.Random(2))
    writer = FileRegistry(writer_fs.root, fs=writer_fs, sleep=no_sleep)
    writer.put("area/other", b"o")
    assert reader.get("area/x") is None
    writer.put("area/x", b"v")
    assert reader.get("area/x") == b"v"


class Forgetful(SimulatedFS):
    """A client that remembers a name as absent for ``lag_s`` seconds of the test's time."""

    now = 0.0

    def __init__(self, disk, lag_s):
        super().__init__(disk, random.Random(1))
        self.lag_s = lag_s
        self.until = {}

    def missed(self, area, name):
        self.until[area, name] = self.now + self.lag_s

    def hides(self, area, name):
        return self.now < self.until.get((area, name), 0.0)

    def made(self, area, name):
        self.until.pop((area, name), None)

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize("lag_s", [2.0, 10.0, 60.0])
def test_no_lag_is_an_error_however_long(lag_s):
    """Row 45: up to a minute a reader waits, then finds; a claim of a name it cannot see yet ends with its winner."""
    disk = SimulatedDisk()
    writer = FileRegistry("/simulated/registry", fs=SimulatedFS(disk, random.Random(2)), sleep=no_sleep)
    writer.put("area/other", b"o")
    for look in ("get", "claim"):
        fs = Forgetful(disk, lag_s)
        reader = FileRegistry(fs.root, fs=fs, sleep=fs.sleep)
        reader.put("area/mine", b"m")
        assert reader.get(f"area/{look}") is None
        writer.put(f"area/{look}", b"v")
        if look == "get":
            while reader.get("area/get") is None:
                assert fs.now < lag_s
            assert reader.list("area").entries["area/get"] == b"v"
        else:
            assert reader.claim("area/claim", b"mine") == b"v"
        assert lag_s * 0.5 < fs.now < lag_s + 5.0


def test_what_was_reported_done_survives_a_power_cut():
    """R1, R3: a durable record, a claim and an epoch stand after a power cut; nothing is half written."""
    for seed in range(300):
        rng = random.Random(seed)
        disk = SimulatedDisk()
        fs = SimulatedFS(disk, rng, quirks=Quirks(resend=rng.choice([0.0, 0.2])))
        registry = FileRegistry(fs.root, fs=fs, sleep=no_sleep)
        records = Records(registry)
        registry.put("area/x", b"one")
        registry.put("area/x", b"two" * rng.randint(1, 100))
        expected = registry.get("area/x")
        assert registry.claim("area/c", b"mine") == b"mine"
        epoch = records.claim_epoch(EpochRecord(session="aa")).epoch
        for number in range(rng.randint(0, 3)):
            registry.put("leases/a", b"%d" % number, durable=False)
        disk.power_cut(rng)
        after = FileRegistry(fs.root, fs=SimulatedFS(disk, rng), sleep=no_sleep)
        assert after.get("area/x") == expected
        assert after.get("area/c") == b"mine"
        assert not after.list("area").junk
        assert Records(after).claim_epoch(EpochRecord(session="bb")).epoch == epoch + 1


class Swept(FaultyFS):
    """Removes a writer's temporary file just before it is used, as a mistaken sweep of another process would."""

    def run(self, name, work, undo=lambda _: None):
        if name in ("rename", "link") and self.fail_at:
            self.fail_at = 0
            self.hits += 1
            for path in self.root.rglob(".tmp~*"):
                path.unlink()
        return super().run(name, work, undo)


def test_a_writer_whose_temporary_file_is_swept_writes_another(tmp_path):
    """Sweeping can be wrong about who is alive; that costs one attempt, never a record."""
    fs = Swept(LocalFS(tmp_path / "registry"))
    registry = FileRegistry(tmp_path / "registry", fs=fs, sleep=no_sleep)
    registry.put("area/x", b"0")
    fs.fail_at = -1
    registry.put("area/x", b"1")
    assert registry.get("area/x") == b"1"
    fs.fail_at = -1
    assert registry.claim("area/y", b"2") == b"2"
    assert registry.get("area/y") == b"2"
    assert fs.hits == 2


def test_a_file_system_without_hard_links_is_refused_by_name(tmp_path):
    """A claim that cannot be exclusive is not made by other means."""

    class NoLinks(FaultyFS):
        def run(self, name, work, undo=lambda _: None):
            if name == "link":
                raise OSError(errno.EOPNOTSUPP, "no links")
            return super().run(name, work, undo)

    registry = FileRegistry(tmp_path / "registry", fs=NoLinks(LocalFS(tmp_path / "registry")), sleep=no_sleep)
    with pytest.raises(RegistryError, match="cannot claim") as caught:
        registry.claim("area/x", b"v")
    assert "hard links" in (caught.value.hint or "")
    assert not list((tmp_path / "registry").rglob(".tmp~*"))
