"""What the file registry does with real directories, files and processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from waiting import scaled, wait_until
from zbus import names
from zbus.errors import ConfigError, RegistryError
from zbus.registry import FileRegistry, JunkRecord, MemoryRegistry, Records
from zbus.registry.format import NotARecord, pack, unpack
from zbus.registry.fs import FileInfo
from zbus.registry.identity import pid_space, pid_start
from zbus.registry.records import EpochRecord, WorkerRecord
from zbus.registry.tempfiles import TempNames, is_temp
from zbus.testing.registry import BAD_KEYS

is_root = os.geteuid() == 0


@pytest.fixture
def root(tmp_path):
    """The registry root of a test; not made yet."""
    return tmp_path / "registry"


def temp_files(root):
    """Return the temporary files below a root."""
    return [path for path in root.rglob("*") if is_temp(path.name)]


# -- several processes ---------------------------------------------------------------------------------------------

CLAIMER = """
import json, sys
from zbus.registry import FileRegistry
root, me, count = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])
registry = FileRegistry(root)
print("ready", flush=True)
sys.stdin.readline()
won = [i for i in range(count) if registry.claim(f"claims/c.{i}", me) == me]
print(json.dumps(won))
"""

RENEWER = """
import sys
from zbus.registry import FileRegistry
registry = FileRegistry(sys.argv[1])
number = 0
print("ready", flush=True)
while True:
    number += 1
    registry.put("leases/live", b"%d" % number * 20, durable=False)
    registry.put(f"workers/w.{number % 50}", b"%d" % number, durable=False)
"""


def start(script, *args):
    """Start a script and wait until it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.alone
@pytest.mark.timeout(scaled(240))
def test_four_processes_claim_a_thousand_keys_and_each_has_one_winner(root):
    """R2, B18, M2: exactly one process wins each key, and all keys are won."""
    count = 1000
    processes = [start(CLAIMER, root, f"process {me}", count) for me in range(4)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    won = [json.loads(process.communicate(timeout=scaled(200))[0]) for process in processes]
    assert sorted(number for mine in won for number in mine) == list(range(count))
    assert [bool(mine) for mine in won].count(True) > 1, "the processes must have raced"
    registry = FileRegistry(root)
    listing = registry.list("claims")
    assert len(listing.entries) == count
    assert not listing.junk
    for me, mine in enumerate(won):
        assert all(listing.entries[f"claims/c.{number}"] == b"process %d" % me for number in mine)
    assert not temp_files(root)


@pytest.mark.alone
def test_a_live_record_is_never_missing_from_a_listing_while_it_is_renewed(root):
    """M1: 2,000 listings beside a process that renews without pause; none lacks the record, none names junk."""
    process = start(RENEWER, root)
    try:
        registry = FileRegistry(root)
        wait_until(lambda: registry.get("leases/live"), what="the first renewal")
        values: set[bytes] = set()

        def look() -> bool:
            """List 100 times; true once the record was renewed often enough meanwhile."""
            for _ in range(100):
                listing = registry.list("leases")
                assert set(listing.entries) == {"leases/live"}
                assert not listing.junk
                values.add(listing.entries["leases/live"])
            return len(values) > 20

        for _ in range(20):
            look()
        wait_until(look, timeout_s=60, what="more than 20 renewals between the listings")
        wait_until(lambda: len(registry.list("workers").entries) == 50, what="fifty workers")
        for _ in range(100):
            assert len(registry.list("workers").entries) == 50
    finally:
        process.kill()
        process.communicate()
    assert FileRegistry(root).list("leases").entries.keys() == {"leases/live"}
    assert len(FileRegistry(root).list("workers").entries) == 50
    assert not temp_files(root), "the leftovers of the killed writer are swept by the listings above"


@pytest.mark.alone
def test_a_forked_child_neither_reuses_names_nor_keeps_its_parents_records(root):
    """A template forks ranks: the child writes under its own names and puts back only its own records."""
    registry = FileRegistry(root)
    registry.put("workers/parent", b"p")
    before = registry._temps.new()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            registry.put("workers/child", b"c")
            os.write(write_end, f"{registry._temps.new()} {sorted(registry._own)}".encode())
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    told = os.read(read_end, 1000).decode()
    os.close(read_end)
    os.close(write_end)
    assert f"~{pid}~" in told
    assert told.endswith("['workers/child']")
    assert before.split("~")[2] == str(os.getpid())


# -- junk ----------------------------------------------------------------------------------------------------------


def plant(area):
    """Put one of every foreign thing into an area; return the names and a word of each reason."""
    whole = pack(b"value")
    files = {
        "empty": b"",
        "half": whole[:-2],
        "header-only": whole[: whole.index(b"\n")],
        "flipped": whole[:-1] + b"X",
        "longer": whole + b"x",
        "foreign": b"{}",
        "binary": bytes(range(256)),
        "nul-holed": bytes(300),
        "future": whole.replace(b"record 1", b"record 2"),
        "huge": whole + bytes(70_000),
        "a name with blanks": whole,
        "note.txt~": whole,
    }
    for name, data in files.items():
        (area / name).write_bytes(data)
        (area / name).chmod(0o600)
    (area / "shared").write_bytes(whole)
    (area / "shared").chmod(0o666)
    (area / "link").symlink_to("/etc/passwd")
    (area / "loop").symlink_to("loop")
    (area / "good-link").symlink_to("good")
    (area / "folder").mkdir()
    os.mkfifo(area / "fifo", 0o600)
    os.mknod(area / "socket", 0o140600)
    expected = {
        "empty": "empty",
        "half": "torn",
        "header-only": "torn",
        "flipped": "torn",
        "longer": "torn",
        "foreign": "not a zbus record",
        "binary": "not a zbus record",
        "nul-holed": "not a zbus record",
        "future": "another format version",
        "huge": "too large",
        "a name with blanks": "not a valid name",
        "note.txt~": "not a valid name",
        "shared": "writable by another user",
        "link": "symbolic link",
        "loop": "symbolic link",
        "good-link": "symbolic link",
        "folder": "not a regular file",
        "fifo": "not a regular file",
        "socket": "not a regular file",
    }
    if is_root:
        (area / "stolen").write_bytes(whole)
        os.chown(area / "stolen", 12345, 12345)
        expected["stolen"] = "another user"
    return expected


def test_junk_never_breaks_a_listing_and_is_named(root):
    """R7, row 47: good records are listed among every kind of junk; each piece is named with its reason."""
    registry = FileRegistry(root)
    registry.put("workers/good", b"good")
    expected = plant(root / "workers")
    listing = registry.list("workers")
    assert listing.entries == {"workers/good": b"good"}
    reasons = dict(line.removeprefix("workers/").split(": ", 1) for line in listing.junk)
    assert reasons.keys() == expected.keys()
    for name, word in expected.items():
        assert word in reasons[name], name
    assert (root / "workers" / "link").is_symlink(), "junk is named, never touched"


def test_a_key_that_holds_junk_is_an_error_that_names_the_file(root):
    """A read and a claim cannot judge junk: they say where it is. A put replaces it, also a planted link."""
    registry = FileRegistry(root)
    registry.put("workers/good", b"good")
    expected = plant(root / "workers")
    outside = root.parent / "outside"
    outside.write_bytes(b"precious")
    (root / "workers" / "planted").symlink_to(outside)
    for name in [*expected, "planted"]:
        if expected.get(name) == "not a valid name":
            continue
        key = f"workers/{name}"
        for call in (registry.get, lambda k: registry.claim(k, b"v")):
            with pytest.raises(JunkRecord, match=name) as caught:
                call(key)
            assert caught.value.facts["file"] == str(root / key)
        assert registry.delete(key, b"value") is False
        if name != "folder":
            registry.put(key, b"new")
            assert registry.get(key) == b"new"
    assert outside.read_bytes() == b"precious"


def test_a_file_in_place_of_an_area_is_junk_for_readers_and_an_error_for_writers(root):
    """Row 47: the area's own place may be taken, by a file or by a link that leads elsewhere."""
    registry = FileRegistry(root)
    registry.put("other/x", b"v")
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (root / "workers").write_text("x")
    (root / "agents").symlink_to(elsewhere)
    for area in ("workers", "agents"):
        assert registry.list(area).junk == (f"{area}: not a directory",)
        with pytest.raises(RegistryError, match=f"{area}/x"):
            registry.put(f"{area}/x", b"v")
    assert not list(elsewhere.iterdir()), "nothing is written through a planted link"


def test_junk_in_place_of_the_root_id_stops_no_write(root):
    """The id of the root is a help for diagnosis; writes go on without it."""
    registry = FileRegistry(root)
    (root / "meta").mkdir(mode=0o700)
    (root / "meta" / "root-id").write_text("junk")
    registry.put("workers/x", b"v")
    assert registry.get("workers/x") == b"v"


@pytest.mark.parametrize("key", BAD_KEYS)
def test_no_key_leads_out_of_the_root(root, key):
    """B22: names that could escape are refused before any file is touched."""
    registry = FileRegistry(root)
    before = sorted(root.parent.rglob("*"))
    for call in (registry.get, registry.delete, lambda k: registry.put(k, b"v"), lambda k: registry.claim(k, b"v")):
        with pytest.raises(ConfigError):
            call(key)
    assert sorted(root.parent.rglob("*")) == before


# -- leftovers -----------------------------------------------------------------------------------------------------


class HandClock:
    """A clock moved by hand."""

    def __init__(self):
        self.now_ns = 0

    def monotonic_ns(self):
        return self.now_ns

    def wall_ns(self):
        return 0


def test_a_leftover_temporary_file_hides_nothing_and_is_swept(root):
    """B20: a dead writer's file never hides a live record; a listing removes it, and spares a live writer's."""
    registry = FileRegistry(root)
    registry.put("workers/x", b"v")
    area = root / "workers"
    dead = area / f".tmp~{pid_space()}~{os.getpid()}~1~0"
    alive = area / f".tmp~{pid_space()}~{os.getpid()}~{pid_start(os.getpid())}~999999"
    for path in (dead, alive):
        path.write_bytes(b"half")
    listing = registry.list("workers")
    assert listing.entries == {"workers/x": b"v"}
    assert not listing.junk
    assert temp_files(root) == [alive]


def test_another_hosts_temporary_file_is_swept_by_this_observers_own_clock(root):
    """R4: no time stamp of a file is compared; the file must have lain for ten minutes before our eyes."""
    clock = HandClock()
    registry = FileRegistry(root, clock=clock)
    registry.put("workers/x", b"v")
    foreign = root / "workers" / ".tmp~0123456789ab~1~1~0"
    foreign.write_bytes(b"half")
    os.utime(foreign, (0, 0))
    registry.list("workers")
    clock.now_ns = 599 * 10**9
    registry.list("workers")
    assert foreign.exists()
    clock.now_ns = 601 * 10**9
    registry.list("workers")
    assert not foreign.exists()


def test_a_new_file_of_the_same_name_starts_a_new_age(root):
    """What was gone in between is not old."""
    clock = HandClock()
    temps = TempNames(clock)
    assert temps.dead("a", ".tmp~x~1~1~0") is False
    temps.keep("a", [])
    clock.now_ns = 601 * 10**9
    assert temps.dead("a", ".tmp~x~1~1~0") is False


def test_a_sweep_on_a_disk_that_refuses_is_no_error(root, monkeypatch):
    """A reader on a read-only mount can list beside leftovers."""
    registry = FileRegistry(root)
    registry.put("workers/x", b"v")
    (root / "workers" / f".tmp~{pid_space()}~1~1~0").mkdir()  # cannot be unlinked
    assert registry.list("workers").entries == {"workers/x": b"v"}


def test_writes_leave_no_temporary_files(root):
    """Claims won and lost, puts and deletes clean up behind them."""
    registry = FileRegistry(root)
    registry.claim("a/x", b"1")
    registry.claim("a/x", b"2")
    registry.put("a/x", b"3")
    registry.delete("a/x", b"other")
    registry.delete("a/x", b"3")
    assert not temp_files(root)


# -- the root ------------------------------------------------------------------------------------------------------


def test_everything_the_registry_makes_is_private(root):
    """Directories are 0700 and records 0600, whatever the umask."""
    old = os.umask(0)
    try:
        FileRegistry(root / "deep" / "registry").put("workers/x", b"v")
    finally:
        os.umask(old)
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_root_open_to_others_is_refused_with_the_command_that_helps(root):
    """Whoever may write there could be anybody."""
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    with pytest.raises(RegistryError, match="open to other users") as caught:
        FileRegistry(root)
    assert caught.value.hint == f"chmod 700 {root}"


def test_a_reader_does_not_make_a_root_that_is_missing(root):
    """A wrong path is said, not made."""
    with pytest.raises(RegistryError, match="no registry") as caught:
        FileRegistry(root, create=False)
    assert "mounts the same root" in (caught.value.hint or "")
    assert not root.exists()


def test_a_root_that_cannot_be_made_is_said(tmp_path):
    """The first start on a wrong place fails with the path and the reason."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(RegistryError) as caught:
        FileRegistry(tmp_path / "file" / "registry")
    assert str(tmp_path) in caught.value.facts["file"]


def test_a_planted_link_in_place_of_the_root_is_not_followed(tmp_path):
    """R9: the last component of the root must be a directory, not a link."""
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "registry").symlink_to(tmp_path / "target")
    with pytest.raises(RegistryError):
        FileRegistry(tmp_path / "registry")


def test_a_deleted_root_is_made_again_by_the_next_renewal_with_all_this_process_wrote(root, caplog):
    """Row 51: rm -r under a running process costs one renewal period and a warning."""
    registry, other = FileRegistry(root), FileRegistry(root)
    registry.put("workers/mine", b"m")
    registry.claim("ranks/mine", b"r")
    registry.put("workers/gone", b"g")
    registry.delete("workers/gone")
    other.put("workers/other", b"o")
    subprocess.run(["rm", "-r", str(root)], check=True)
    assert registry.list("workers").entries == {}
    assert registry.get("workers/mine") is None
    with caplog.at_level(logging.WARNING, "zbus"):
        registry.put("leases/a", b"1", durable=False)
    assert "made it again" in caplog.text
    assert root.stat().st_mode & 0o777 == 0o700
    assert registry.list("workers").entries == {"workers/mine": b"m"}
    assert registry.get("ranks/mine") == b"r"
    other.put("leases/b", b"1", durable=False)
    assert set(registry.list("workers").entries) == {"workers/mine", "workers/other"}


def test_a_vanished_trial_directory_is_not_made_again(root):
    """A lost mount must not be papered over with a new tree on the local disk."""
    root.parent.chmod(0o700)
    nested = root / "trial" / "registry"
    registry = FileRegistry(nested)
    registry.put("workers/x", b"v")
    subprocess.run(["rm", "-r", str(root / "trial")], check=True)
    with pytest.raises(RegistryError, match="No such file"):
        registry.put("workers/x", b"w")
    assert not (root / "trial").exists()


def test_two_roots_have_two_ids_and_one_root_has_one(root, tmp_path):
    """B28: processes that read different ids do not share their root."""
    first, second = Records(FileRegistry(root)), Records(FileRegistry(root))
    assert first.root_id() == second.root_id()
    assert first.root_id() != Records(FileRegistry(tmp_path / "elsewhere")).root_id()
    assert len(first.root_id()) == 32


def test_no_descriptor_stays_open(root):
    """The registry holds nothing between calls: 256 agents cost it no descriptors."""
    registry = FileRegistry(root)
    registry.put("a/x", b"v")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(50):
        registry.put("a/x", b"%d" % number)
        registry.claim("a/x", b"other")
        registry.get("a/absent")
        registry.list("a")
        registry.delete("a/x", b"no")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# -- small parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"", b"x", b"\n\n", bytes(65_000)])
def test_a_file_holds_exactly_its_value(value):
    """Pack and unpack are inverse; any cut or flip is seen."""
    data = pack(value)
    info = FileInfo(regular=True, trusted=True, size=len(data), links=1)
    assert unpack(info, data) == value
    for broken in (data[:-1], data + b"\n", b"x" + data[1:], data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(NotARecord):
            unpack(info, broken)


def test_the_start_of_a_process_tells_it_from_another_with_its_pid():
    """A pid alone names nobody."""
    assert pid_start(os.getpid()) == pid_start(os.getpid()) > 0
    assert pid_start(2**22 + 1) == 0


def test_temporary_names_never_repeat_across_handles_and_threads():
    """Two registries in one process, and threads of one, share no name."""
    made: list[str] = []
    temps = [TempNames(HandClock()) for _ in range(4)]
    threads = [threading.Thread(target=lambda t=t: made.extend(t.new() for _ in range(500))) for t in temps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 2000
    assert all(is_temp(name) for name in made)
    with pytest.raises(ConfigError):
        names.check(made[0])


def test_memory_and_file_take_the_same_typed_records(root):
    """B27: a record reads back equal from either back end."""
    for registry in (MemoryRegistry(), FileRegistry(root)):
        records = Records(registry)
        worker = WorkerRecord(role="a", rank=0, incarnation=5, log=" spaces \n")
        records.publish_worker(worker)
        assert records.worker("a", 0, 5) == worker
        assert records.claim_epoch(EpochRecord(session="s")).epoch == 1
