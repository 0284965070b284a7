"""Arrays in shared memory, between real processes: seen whole, used again in time, lost with nobody."""

import fcntl
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from data_peer import digest, reading
from waiting import scaled, wait_until
from zbus.codec import decode, encode
from zbus.data.arena import leaves_room
from zbus.data.courier import Courier
from zbus.data.lease import DESCRIPTOR, MAGIC, Lease
from zbus.data.presence import Presence, lives, sweep
from zbus.errors import CodecError

SIZE = 1 << 20


@pytest.fixture
def root(tmp_path):
    """Return a root of its own: a directory with no other processes of this user."""
    return tmp_path / "shared"


@pytest.fixture
def courier(root):
    """Return this process's courier."""
    made = Courier.enter(64 << 20, root)
    yield made
    made.leave()


def lend(courier, reader, data):
    """Lend an array to a reader."""
    keep = courier.keeper([reader.token], snapshot=True)
    (_, frame) = courier.addressed([b"", keep(memoryview(data))], reader.token)
    assert type(frame) is Lease
    return frame


def files(courier, root):
    """Return the names of the slots."""
    return sorted(entry.name for entry in (root / courier.token).iterdir() if entry.name[0].isdigit())


def test_a_reader_sees_what_was_lent_and_the_memory_is_used_again(courier, root):
    """One slot serves a thousand arrays, one after the other, each seen as it was sent."""
    with reading(root) as reader:
        for number in range(200):
            data = np.full(SIZE, number % 251, np.uint8)
            frame = lend(courier, reader, data)
            assert reader.open(frame, courier.token) == digest(data)
            assert reader.ask("drop") == "dropped"
            del frame
        assert len(files(courier, root)) == 1
        assert courier.statistics()["shared_lent_bytes"] == 0


def test_a_view_that_is_kept_never_sees_other_bytes(courier, root):
    """As long as a reader has an array, its memory is not used for another."""
    with reading(root) as reader:
        first = np.arange(SIZE, dtype=np.uint8)
        kept = reader.open(lend(courier, reader, first), courier.token)
        for number in range(20):
            lend(courier, reader, np.full(SIZE, number, np.uint8))
        assert reader.ask("hash") == kept == digest(first)
        assert len(files(courier, root)) == 2


def test_an_array_of_the_codec_keeps_its_memory(courier, root):
    """What a user holds is a view of a view of a view; each of them keeps the memory lent."""
    other = Courier.enter(64 << 20, root)
    try:
        data = np.arange(SIZE // 4, dtype=np.float32).reshape(-1, 64)
        keep = courier.keeper([other.token], snapshot=True)
        frames = courier.addressed(encode({"x": data}, keep=keep), other.token)
        array = decode(other.opened([bytes(frame) for frame in frames], courier.token))["x"][3:9].T
        del frames
        for number in range(4):
            keep(memoryview(np.full(SIZE, number, np.uint8)))
        assert np.array_equal(array, data[3:9].T)
        assert not array.flags.writeable
        del array
        assert courier.statistics()["shared_lent_bytes"] == 0
    finally:
        other.leave()


def test_a_lease_keeps_what_may_be_sent_again(courier, root):
    """Until the call is over its array stays, read or not, so a retransmission shows the same bytes."""
    with reading(root) as reader:
        first = np.arange(SIZE, dtype=np.uint8)
        frame = lend(courier, reader, first)
        reader.open(frame, courier.token)
        reader.ask("drop")
        for number in range(5):
            lend(courier, reader, np.full(SIZE, number, np.uint8))
        assert reader.open(frame, courier.token) == digest(first)


def test_what_comes_late_is_refused_and_never_misread(courier, root):
    """A copy of a message whose call is over cannot open the slot of another."""
    with reading(root) as reader:
        late = bytes(lend(courier, reader, np.zeros(SIZE, np.uint8)))
        frame = lend(courier, reader, np.ones(SIZE, np.uint8))
        assert reader.open(frame, courier.token) == digest(np.ones(SIZE, np.uint8))
        assert "came too late" in reader.open(late, courier.token)
        del frame
        lend(courier, reader, np.full(SIZE, 9, np.uint8))
        assert reader.ask("hash") == digest(np.ones(SIZE, np.uint8)), "the late copy gave nothing of ours away"


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 0, 0, 0, 0),
        (5, 1, 1, 0, SIZE),
        (1 << 31, 1, 1, 0, SIZE),
        (0, 2, 1, 0, SIZE),
        (0, 1, 9, 0, SIZE),
        (0, 1, 1, 0, 1 << 40),
        (0, 1, 1, SIZE, SIZE),
        (0, 1, 1, 1 << 63, 1 << 63),
        (0, 1, 1, (1 << 64) - 1, 1),
    ],
)
def test_a_name_of_nothing_is_an_error(courier, root, numbers):
    """What names no slot, no generation of it, or more bytes than it has, is refused."""
    with reading(root) as reader:
        frame = lend(courier, reader, np.zeros(SIZE, np.uint8))
        assert reader.open(DESCRIPTOR.pack(MAGIC, *numbers), courier.token).startswith("error")
        assert reader.open(frame, courier.token) == digest(np.zeros(SIZE, np.uint8))


def test_a_short_frame_that_is_no_name_is_left_to_the_decoder(courier, root):
    """Frames that do not begin as a name does are none of ours."""
    with reading(root) as reader:
        for junk in (bytes(40), b"z", b"zshm", b"zshm" + bytes(37)):
            assert reader.open(junk, courier.token) == digest(junk)


def test_a_reader_that_is_killed_holds_nothing_back(courier, root):
    """What a dead reader had open is used again as soon as memory is needed."""
    with reading(root) as reader:
        reader.open(lend(courier, reader, np.zeros(40 << 20, np.uint8)), courier.token)
        with reading(root) as other:
            keep = courier.keeper([other.token], snapshot=True)
            assert type(keep(memoryview(np.zeros(40 << 20, np.uint8)))) is bytes, "no room: it goes in the message"
            reader.process.send_signal(signal.SIGKILL)
            reader.process.wait()
            assert type(keep(memoryview(np.zeros(40 << 20, np.uint8)))) is Lease


def test_what_only_the_dead_have_open_does_not_count_as_in_use(courier, root):
    """The figures say so at once, also where nothing is lent any more."""
    with reading(root) as reader:
        reader.open(lend(courier, reader, np.zeros(SIZE, np.uint8)), courier.token)
        assert courier.statistics()["shared_lent_bytes"] == SIZE
        reader.process.kill()
        reader.process.wait()
        assert courier.statistics()["shared_lent_bytes"] == 0


def test_a_killed_reader_does_not_speak_for_its_successor(courier, root):
    """What is lent goes to the next process, which never opens it: memory is free with the lease all the same."""
    with reading(root) as one, reading(root) as two:
        frame = lend(courier, one, np.zeros(SIZE, np.uint8))
        one.open(frame, courier.token)
        one.process.kill()
        one.process.wait()
        courier.forget(one.token)
        assert courier.addressed([b"", frame], two.token)[1] is frame
        assert {path.name for path in (root / courier.token).glob("reader.*")} == {f"reader.{two.token}"}
        del frame
        assert courier.statistics()["shared_lent_bytes"] == 0


def test_one_copy_serves_all_readers(courier, root):
    """A message to three processes takes one slot, which is free when the last has let go."""
    with reading(root) as one, reading(root) as two, reading(root) as three:
        data = np.arange(SIZE, dtype=np.uint8)
        frame = lend(courier, one, data)
        for reader in (two, three):
            assert courier.addressed([b"", frame], reader.token)[1] is frame
        assert {reader.open(frame, courier.token) for reader in (one, two, three)} == {digest(data)}
        del frame
        for reader in (three, one):
            reader.ask("drop")
            assert courier.statistics()["shared_lent_bytes"]
        two.ask("drop")
        assert courier.statistics()["shared_lent_bytes"] == 0


def test_a_peer_elsewhere_gets_the_bytes_themselves(courier, root):
    """A process that does not see our memory is sent frames, also of what is already lent to others."""
    with reading(root) as reader:
        data = np.arange(SIZE, dtype=np.uint8)
        frame = lend(courier, reader, data)
        (_, plain) = courier.addressed([b"", frame], "0123456789abcdef")
        assert bytes(plain) == data.tobytes()
        del frame
        gc.collect()
        lend(courier, reader, np.zeros(SIZE, np.uint8))
        assert bytes(plain) == data.tobytes(), "the view keeps the lease"


def test_a_name_from_outside_opens_no_path(courier):
    """What a peer calls its memory is a name of our own making or nothing."""
    for name in ("../../etc", "/etc/passwd", "", ".", "0123456789ABCDEF", "0123456789abcdef/..", 7, None):
        assert not courier.is_near(name)


def test_leftovers_of_the_killed_are_swept_and_of_the_living_not(root, courier):
    """A killed process's directory goes with the next look; a living one's never does."""
    with reading(root) as reader:
        assert sweep(root) == 0
        reader.process.kill()
        reader.process.wait()
        assert not lives(root, reader.token)
        assert sweep(root) == 1
        assert [entry.name for entry in root.iterdir()] == [courier.token]


def test_a_process_that_enters_is_never_swept_by_another_that_does(root, monkeypatch):
    """Whatever moment a sweep comes at, a directory without a held lock is one that is being made."""
    swept = []
    code = f"from pathlib import Path; from zbus.data.presence import sweep; print(sweep(Path({str(root)!r})))"

    def lockf(descriptor, operation):
        swept.append(subprocess.check_output([sys.executable, "-c", code], text=True).strip())
        return fcntl.lockf(descriptor, operation)

    monkeypatch.setattr("zbus.data.presence.fcntl", types.SimpleNamespace(**{**vars(fcntl), "lockf": lockf}))
    presence = Presence.enter(root)
    assert swept == ["0"]
    assert (presence.path / "lock").exists()
    presence.leave()


def test_processes_that_come_and_go_at_once_do_not_sweep_each_other(root):
    """No directory is taken for that of a dead process while its owner is about to lock it, and the root comes back."""
    script = textwrap.dedent(f"""
        from pathlib import Path
        from zbus.data.presence import Presence
        missing = 0
        for _ in range(150):
            presence = Presence.enter(Path({str(root)!r}))
            missing += not presence.path.is_dir()
            presence.leave()
        print(missing)
    """)
    many = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [one.communicate(timeout=scaled(60))[0] for one in many] == ["0\n"] * 4
    assert not root.exists()


def test_what_a_dead_maker_left_half_made_is_swept_in_time(root, courier):
    """A directory without a lock is left alone while it may be in the making, and goes after that."""
    half = root / "0123456789abcdef"
    half.mkdir()
    (half / "lock.new").touch()
    assert sweep(root) == 0
    os.utime(half, (1, 1))
    assert sweep(root) == 1
    assert [entry.name for entry in root.iterdir()] == [courier.token]


def test_a_forked_child_neither_keeps_nor_removes(root):
    """A child that outlives its parent does not make the parent look alive, and its end removes nothing."""
    script = textwrap.dedent(f"""
        import os, sys, time
        from pathlib import Path
        from zbus.data.courier import Courier
        courier = Courier.enter(root=Path({str(root)!r}))
        if os.fork() == 0:
            courier.leave()
            print(courier.token, os.getpid(), os.path.exists({str(root)!r} + "/" + courier.token), flush=True)
            os.setsid()
            time.sleep(600)
        os.waitid(os.P_ALL, 0, os.WEXITED)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    token, child, there = parent.stdout.readline().split()
    try:
        assert there == "True"
        assert lives(root, token)
        parent.kill()
        parent.wait()
        wait_until(lambda: not lives(root, token), what="the parent's lock to go")
        assert sweep(root) == 1
    finally:
        os.kill(int(child), signal.SIGKILL)
        parent.stdout.close()


def test_no_room_is_told_once_and_costs_only_speed(root, caplog):
    """What does not fit goes in the message; one warning says so and names the key."""
    courier = Courier.enter(1 << 20, root)
    try:
        with reading(root) as reader:
            keep = courier.keeper([reader.token], snapshot=True)
            data = np.arange(4 << 20, dtype=np.uint8)
            assert keep(memoryview(data)) == data.tobytes()
            assert keep(memoryview(data)) == data.tobytes()
            warnings = [record.getMessage() for record in caplog.records]
            assert len(warnings) == 1
            assert "data.shared_memory" in warnings[0]
            assert courier.statistics()["shared_refused"] == 2
    finally:
        courier.leave()


def test_a_new_slot_leaves_a_tenth_of_the_memory_and_of_the_file_system():
    """Several processes lend at once, so each looks at what is left for all, not only at its own limit."""
    gib = 1 << 30
    assert leaves_room(gib, 20 * gib, 24 * gib, 12 * gib, 12 * gib)
    assert not leaves_room(gib, 3 * gib, 24 * gib, 12 * gib, 12 * gib)
    assert not leaves_room(gib, 20 * gib, 24 * gib, 2 * gib, 12 * gib)


def test_without_shared_memory_everything_travels_in_messages(tmp_path, caplog):
    """A limit of 0, or a place that cannot be used, switches it off: with one warning, where some was wanted."""
    for courier in (Courier.enter(0, tmp_path / "a"), Courier.enter(1 << 20, tmp_path / "missing" / "b")):
        assert (courier.token, courier.keeper(["0123456789abcdef"], snapshot=True)) == ("", None)
        assert courier.opened([b"x", b"y" * 32], "0123456789abcdef") == [b"x", b"y" * 32]
        courier.leave()
    (record,) = caplog.records
    assert "missing/b" in record.getMessage()
    assert "data.shared_memory=0" in record.getMessage()


def test_a_directory_that_others_may_read_is_not_used(tmp_path):
    """Memory is lent in a private directory or not at all."""
    root = tmp_path / "open"
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    assert Courier.enter(1 << 20, root).token == ""


def test_many_threads_lend_and_drop_at_once(courier, root):
    """Eight threads, one reader: every array arrives as it was sent."""
    with reading(root) as reader:
        lock, failed = threading.Lock(), []

        def run(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(40):
                data = rng.integers(0, 256, int(rng.integers(1 << 16, 1 << 19)), np.uint8)
                frame = lend(courier, reader, data)
                with lock:
                    if reader.open(frame, courier.token) != digest(data):
                        failed.append(seed)
                    if rng.random() < 0.5:
                        reader.ask("drop")

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def test_a_private_copy_is_writable_and_nobody_elses(root, courier):
    """What must be writable gets memory of its own, large or small, and the owner's stays as it is."""
    other = Courier.enter(64 << 20, root)
    try:
        for size in (1 << 17, 1 << 23):
            data = np.arange(size, dtype=np.uint8)
            keep = courier.keeper([other.token], snapshot=True)
            frames = courier.addressed([b"", keep(memoryview(data))], other.token)
            (_, lent) = other.opened([b"", bytes(frames[1])], courier.token)
            with pytest.raises(TypeError):
                lent[0] = 1
            private = lent.obj.private()
            private[0] = 99
            assert bytes(private[1:]) == data[1:].tobytes()
            assert lent[0] == 0
            del lent, private
    finally:
        other.leave()


def test_an_owner_that_is_gone_leaves_readers_what_they_have(root):
    """Its directory is removed; what was opened before stays readable, what was not cannot be opened."""
    owner = Courier.enter(64 << 20, root)
    reader = Courier.enter(64 << 20, root)
    try:
        data = np.arange(SIZE, dtype=np.uint8)
        keep = owner.keeper([reader.token], snapshot=True)
        first, second = (owner.addressed([b"", keep(memoryview(data))], reader.token)[1] for _ in range(2))
        (_, lent) = reader.opened([b"", bytes(first)], owner.token)
        owner.leave()
        assert bytes(lent) == data.tobytes()
        with pytest.raises(CodecError, match="cannot be opened"):
            reader.opened([b"", bytes(second)], owner.token)
        assert bytes(lent.obj.private()) == data.tobytes()
    finally:
        owner.leave()
        reader.leave()


def test_memory_that_an_owner_gives_back_is_free_though_readers_have_mapped_it(root):
    """A slot that makes room for another holds no memory any more, and the next reader sees the next array."""
    owner, reader = Courier.enter(2 * SIZE, root), Courier.enter(64 << 20, root)
    try:
        keep = owner.keeper([reader.token], snapshot=True)
        for sizes in ([SIZE, SIZE], [2 * SIZE]):
            arrays = [np.full(size, number, np.uint8) for number, size in enumerate(sizes, 7)]
            frames = owner.addressed([b"", *(keep(memoryview(data)) for data in arrays)], reader.token)
            lent = reader.opened([b"", *map(bytes, frames[1:])], owner.token)[1:]
            assert [bytes(one) for one in lent] == [data.tobytes() for data in arrays]
            del lent, frames
        mine = [entry for entry in Path("/proc/self/fd").iterdir() if os.path.lexists(entry)]
        slots = [entry for entry in mine if str(entry.readlink()).startswith(str(root / owner.token))]
        gone = [entry.stat().st_blocks for entry in slots if str(entry.readlink()).endswith(" (deleted)")]
        assert gone, "the reader has some of it mapped still"
        assert set(gone) == {0}
    finally:
        owner.leave()
        reader.leave()


def test_any_part_of_reserved_memory_is_lent_where_it_stands(courier, root):
    """Rows of an array that was made to be sent take no slot of their own; each reader gets its rows and no others."""
    with reading(root) as one, reading(root) as two:
        array = courier.empty((64, 8192), np.int64)
        array[:] = np.arange(array.size).reshape(array.shape)
        parts = [array[:16], array[16:40], array[40:], array[3:4]]
        frames = [
            lend(courier, one if number % 2 else two, part.reshape(-1).view(np.uint8))
            for number, part in enumerate(parts)
        ]
        assert len(files(courier, root)) == 1
        for number, (part, frame) in enumerate(zip(parts, frames, strict=True)):
            assert (one if number % 2 else two).open(frame, courier.token) == digest(part)
        del array, parts, part, frame, frames
        assert courier.statistics()["shared_lent_bytes"], "the readers have it open"
        one.ask("drop")
        two.ask("drop")
        assert courier.statistics()["shared_lent_bytes"] == 0


def test_what_stands_beyond_reserved_memory_is_copied(courier, root):
    """Memory of an array that is gone, or of another behind it, is not taken for a part of it."""
    with reading(root) as reader:
        gone = courier.empty(SIZE, np.uint8)
        gone[:] = 1
        del gone
        data = np.full(SIZE, 7, np.uint8)
        frame = lend(courier, reader, data)
        again = courier.empty(SIZE, np.uint8)
        again[:] = 9
        assert reader.open(frame, courier.token) == digest(data)
        assert reader.open(lend(courier, reader, again[1 << 19 :]), courier.token) == digest(again[1 << 19 :])
        assert len(files(courier, root)) == 2


def test_a_private_part_begins_where_it_should(root, courier):
    """Writable memory of a part that begins amid a page holds that part."""
    other = Courier.enter(64 << 20, root)
    try:
        array = courier.empty(8 << 20, np.uint8)
        array[:] = np.random.default_rng(5).integers(0, 256, array.size, np.uint8)
        part = array[12345 : 12345 + (4 << 20)]
        keep = courier.keeper([other.token], snapshot=True)
        frames = courier.addressed([b"", keep(memoryview(part))], other.token)
        (_, lent) = other.opened([b"", bytes(frames[1])], courier.token)
        private = lent.obj.private()
        assert bytes(private) == part.tobytes()
        private[0] ^= 1
        assert bytes(lent) == part.tobytes()
        assert bytes(courier.in_full(frames)[1]) == part.tobytes()
        del lent, private
    finally:
        other.leave()


def spoil_column(text):
    """Return what writes another column into the file that tells a reader its own."""
    return lambda path, _: next(path.glob("reader.*")).write_text(text)


def spoil(name, change):
    """Return what replaces a file of an owner."""

    def replace(path, slot):
        target = path / (slot if name == "slot" else name)
        target.unlink()
        change(target)

    return replace


@pytest.mark.parametrize(
    "lie",
    [
        spoil("slot", lambda path: path.write_bytes(b"")),
        spoil("slot", lambda path: path.write_bytes(bytes(SIZE - 1))),
        spoil("slot", os.mkfifo),
        spoil("slot", os.mkdir),
        spoil("slot", lambda path: path.symlink_to("/etc/passwd")),
        spoil("ledger", lambda path: path.write_bytes(bytes(64))),
        spoil("ledger", os.mkfifo),
        spoil("ledger", lambda path: path.symlink_to("/etc/passwd")),
        spoil_column(""),
        spoil_column("one"),
        spoil_column("0"),
        spoil_column("-3"),
        spoil_column("2048"),
        spoil_column("9" * 400),
    ],
    ids=[
        *("empty slot", "short slot", "pipe for a slot", "directory for a slot", "link for a slot"),
        *("short table", "pipe for a table", "link for a table"),
        *("no column", "column of words", "the owner's column", "column below", "column beyond", "column without end"),
    ],
)
def test_an_owner_that_lies_about_its_files_is_an_error(courier, root, lie):
    """Row 68: whatever stands in place of slot, table or column costs that array alone: no wait, no signal."""
    with reading(root) as reader:
        frame = lend(courier, reader, np.ones(SIZE, np.uint8))
        (slot,) = files(courier, root)
        lie(root / courier.token, slot)
        told = reader.open(frame, courier.token)
        assert told.startswith("error: "), told
        honest = Courier.enter(64 << 20, root)
        try:
            data = np.full(SIZE, 3, np.uint8)
            assert reader.open(lend(honest, reader, data), honest.token) == digest(data)
        finally:
            honest.leave()


def test_a_stopped_reader_holds_nobody_up(courier, root):
    """It keeps what it has open, whole; the owner goes on with other memory, or without."""
    with reading(root) as reader, reading(root) as other:
        data = np.arange(40 << 20, dtype=np.uint8)
        found = reader.open(lend(courier, reader, data), courier.token)
        reader.process.send_signal(signal.SIGSTOP)
        keep = courier.keeper([other.token], snapshot=True)
        assert type(keep(memoryview(data))) is bytes, "no room beside what is held: it goes in the message"
        for number in range(50):
            small = np.full(SIZE, number, np.uint8)
            assert other.open(lend(courier, other, small), courier.token) == digest(small)
            other.ask("drop")
        reader.process.send_signal(signal.SIGCONT)
        assert reader.ask("hash") == found == digest(data)


def lent_bytes(courier):
    """Return how much of what a process lends is in use."""
    return courier.statistics()["shared_lent_bytes"]


def test_a_forked_child_gives_nothing_back(courier, root):
    """What a child drops of its copies of our arrays stays open: the parent still reads it."""
    other = Courier.enter(64 << 20, root)
    try:
        opened = other.opened([b"", bytes(frame := lend(courier, other, np.ones(SIZE, np.uint8)))], courier.token)
        del frame
        child = os.fork()
        if not child:
            opened = None
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert lent_bytes(courier)
        assert bytes(opened[1][:2]) == b"\1\1"
        opened = None
        assert not lent_bytes(courier)
    finally:
        other.leave()


@pytest.mark.parametrize("wrong", ["file", "size"])
def test_an_error_that_is_kept_holds_no_memory(courier, root, wrong):
    """A slot whose file is gone, or smaller than said, is free once nothing names it, though the error lives on."""
    other = Courier.enter(64 << 20, root)
    try:
        frame = lend(courier, other, np.ones(SIZE, np.uint8))
        named = bytes(frame)
        if wrong == "size":
            named = DESCRIPTOR.pack(*DESCRIPTOR.unpack(named)[:-1], 1 << 30)
        else:
            (root / courier.token / files(courier, root)[0]).unlink()
        with pytest.raises(CodecError, match=r"cannot be opened|smaller place") as kept:
            other.opened([b"", named], courier.token)
        del frame
        assert not lent_bytes(courier), kept.value
    finally:
        other.leave()
