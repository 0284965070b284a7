"""The file registry on real disks that are full or read-only."""

from __future__ import annotations

import os
import subprocess

import pytest

from zbus.errors import RegistryError
from zbus.registry import FileRegistry, Lease, Records
from zbus.registry.records import WorkerRecord

pytestmark = pytest.mark.ci


def mount(*args):
    """Run mount; skip the test where this machine does not allow it."""
    done = subprocess.run(["mount", *map(str, args)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")


@pytest.fixture(params=["size=64k", "nr_inodes=16,size=1m"])
def small_disk(request, tmp_path):
    """A small tmpfs: few bytes or few inodes."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mount("-t", "tmpfs", "-o", request.param, "zbus-test", place)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_said_and_old_records_stay_whole(small_disk):
    """Rows 40, 41: new records fail with the reason; what stands is intact; freed space is used again."""
    records = Records(FileRegistry(small_disk / "registry"))
    written = []
    records.renew_lease(Lease(holder="a", counter=1, ttl_s=1.0))

    def fill():
        for number in range(1000):
            worker = WorkerRecord(role="actor", rank=number, incarnation=number, log="x" * 2000)
            records.publish_worker(worker)
            written.append(worker)

    with pytest.raises(RegistryError, match="No space left") as caught:
        fill()
    assert "free some space or inodes" in (caught.value.hint or "")
    assert written
    assert records.workers() == written
    assert records.leases()["a"].counter == 1
    assert records.junk == ()
    assert records.withdraw_worker(written[0])
    records.renew_lease(Lease(holder="a", counter=2, ttl_s=1.0))
    assert records.leases()["a"].counter == 2
    assert records.workers() == written[1:]


def test_a_disk_that_turns_read_only_is_read_on_and_written_again_later(small_disk):
    """Row 43: readers go on, writers get the reason, and all is well after the remount."""
    records = Records(FileRegistry(small_disk / "registry"))
    worker = WorkerRecord(role="actor", rank=0, incarnation=1)
    records.publish_worker(worker)
    mount("-o", "remount,ro", small_disk)
    assert records.workers() == [worker]
    for write in (
        lambda: records.renew_lease(Lease(holder="a", counter=1, ttl_s=1.0)),
        lambda: records.withdraw_worker(worker),
    ):
        with pytest.raises(RegistryError, match="Read-only") as caught:
            write()
        assert "remount" in (caught.value.hint or "")
    mount("-o", "remount,rw", small_disk)
    records.renew_lease(Lease(holder="a", counter=2, ttl_s=1.0))
    assert records.leases()["a"].counter == 2
