from __future__ import annotations

import errno
import json
import os
import random
import threading
from pathlib import Path

import msgspec
import pytest

from link_kit import free_port, meet_a_stranger
from sidecar_kit import TrialFiles
from waiting import wait_until
from zbus.clock import boot_id, time_namespace
from zbus.errors import TrialError
from zbus.registry.file import FileRegistry
from zbus.trace import control, wire
from zbus.trace.collector import Collector
from zbus.trace.config import TraceConfig
from zbus.trace.export import SIDECAR_KEY, Exporter, sidecar_record
from zbus.trace.intake import SeqSet
from zbus.trace.spool import Spool, read_spool, scan_blocks
from zbus.trace.tracer import Tracer
from zbus.trace.writer import TraceWriter
from zbus.transport.sockets import SocketFactory


class Bench:
    """A sidecar and one process's writer in one thread, driven by hand."""

    def __init__(self, trial: Path, endpoint: str | None = None) -> None:
        self.trial = trial
        self.endpoint = endpoint  # where each sidecar listens
        self.root = trial / "traces"
        (trial / "registry").mkdir(mode=0o700)
        self.factory = SocketFactory(max_sockets=16)
        self.tracer = Tracer("actor", 0)
        self.writer = TraceWriter(self.tracer, TraceConfig(root=str(self.root), flush_period_s=0.05))
        self.writer._open_file()  # without the thread
        self.writer.opened = True
        self.tracer.set_level("full")
        self.collector: Collector | None = None
        self.start()
        record = sidecar_record(trial / "registry")
        assert record is not None
        self.exporter = Exporter(self.writer, trial / "registry", record, redial_s=0.1)
        self.n = 0
        self.meet()

    def start(self) -> Collector:
        """Start a sidecar and publish it."""
        self.collector = Collector(self.root, self.factory)
        endpoints = self.collector.bind([self.endpoint or f"ipc://{self.trial}/s.{os.urandom(3).hex()}"])
        record = wire.SidecarRecord(endpoints=endpoints, boot_id=boot_id(), time_ns=time_namespace())
        registry = FileRegistry(self.trial / "registry")
        registry.put(SIDECAR_KEY, msgspec.json.encode(record))
        registry.close()
        return self.collector

    def crash(self) -> None:
        """End the sidecar as SIGKILL does: what it has in memory is gone, its files stay as they are."""
        assert self.collector is not None
        self.collector._socket.close(0)
        os.close(self.collector._lock_fd)
        self.collector = None

    def meet(self) -> None:
        """Let the exporter and the sidecar find each other."""
        self.exporter._next_look = 0.0

        def met() -> bool:
            self.exporter._look_again()
            self.exporter._say(self.exporter._open)
            self.turn(convert=False)
            self.exporter._take_answers(0.0, lambda: True)
            return self.exporter._outbox.alive

        wait_until(met, what="an answer of the sidecar")
        self.writer._outlet = self.exporter

    def tick(self, count: int = 1) -> None:
        """Record some ticks and flush them as one block."""
        for _ in range(count):
            self.tracer.append((1, "tick", "misc", self.tracer.now(), "t", {"n": self.n}, None))
            self.n += 1
        self.writer.flush()

    def turn(self, *, convert: bool = True) -> None:
        """Let the sidecar do what there is to do."""
        if self.collector is not None:
            while self.collector.receive():
                pass
            while convert and self.collector.convert():
                pass

    def settle(self) -> None:
        """Let blocks and acknowledgements pass until nothing is in flight."""

        def done() -> bool:
            self.exporter.settle()
            self.turn()
            self.exporter._take_answers(0.0, lambda: True)
            return not self.exporter._outbox.held and not (self.exporter._outbox.alive and self.exporter._spill.waiting)

        wait_until(done, what="everything to be safe")
        self.turn()

    def end(self) -> None:
        """End the process's stream in order, as far as that goes without a thread."""
        self.settle()
        counts = self.writer.counts()
        event = self.writer.end_event()
        event.args = {**counts, "by": "process"}
        if self.collector is not None:
            self.exporter._say(
                wire.End(self.writer.source, self.exporter._outbox._next, msgspec.json.encode(event) + b"\n")
            )
            wait_until(
                lambda: (self.turn(), self.exporter._take_answers(0.0, lambda: True), self.exporter._outbox.ended)[2]
            )

    def close(self) -> None:
        """Close everything."""
        self.writer._file.close()
        self.exporter._spill.close()
        self.exporter.discard()
        if self.collector is not None:
            self.collector.close()
        self.factory.close()


@pytest.fixture
def bench(short_dir: Path):
    """Give a sidecar and a process that have met."""
    bench = Bench(short_dir)
    yield bench
    bench.close()


class Disk:
    """Makes writes to files that match fail as on a full disk."""

    def __init__(self, monkeypatch) -> None:
        self.full: tuple[str, ...] = ()
        real = os.write

        def write(fd, data):
            name = str(Path(f"/proc/self/fd/{fd}").readlink())
            if any(part in name for part in self.full):
                real(fd, bytes(data)[:10])  # what fits
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data)

        monkeypatch.setattr(os, "write", write)


@pytest.fixture
def disk(monkeypatch) -> Disk:
    """Give a disk that can be filled."""
    return Disk(monkeypatch)


def counts_add_up(bench: Bench) -> dict:
    """Check recorded = written + pending + lost = what was recorded; return the counts."""
    counts = bench.writer.counts()
    assert counts["recorded"] == counts["written"] + counts["pending"] + sum(counts["lost"].values()) == bench.n
    return counts


def test_a_block_counts_as_written_when_it_is_acknowledged(bench):
    """Pending until the sidecar has it, then written: at each moment the sum is what was recorded."""
    bench.tick(5)
    assert counts_add_up(bench)["pending"] == 5
    bench.settle()
    assert counts_add_up(bench) == {"recorded": 5, "written": 5, "pending": 0, "lost": {}}
    assert TrialFiles(bench.trial).numbers == [0, 1, 2, 3, 4]


def test_a_block_sent_twice_is_stored_once(bench):
    """A repeated block (its acknowledgement was lost) is acknowledged again and written once."""
    bench.tick(3)
    entry = bench.exporter._outbox.held[0]
    bench.exporter._outbox.send(entry)
    bench.settle()
    assert bench.collector.ledger()[0]["blocks"] == 1
    assert TrialFiles(bench.trial).numbers == [0, 1, 2]


def test_more_than_the_sidecar_takes_goes_to_the_spill(bench, monkeypatch):
    """A process that is faster than its sidecar sends no more than a bound ahead; the rest waits in the spill."""
    bench.exporter._outbox.backlog = 2000
    sent: list[int] = []
    real = bench.exporter._outbox.send
    monkeypatch.setattr(bench.exporter._outbox, "send", lambda entry: sent.append(len(entry.payload)) or real(entry))
    for _ in range(20):
        bench.tick(10)
    assert sum(sent) <= 3000
    assert counts_add_up(bench)["lost"] == {}
    bench.settle()
    bench.meet()
    bench.settle()
    assert TrialFiles(bench.trial).numbers == list(range(200))
    assert not TrialFiles(bench.trial).spill.exists()


def test_a_spool_on_a_full_disk_refuses_and_the_process_spills(bench, disk):
    """While the spool takes nothing blocks are refused; freed, the sidecar gets them and the spill goes."""
    disk.full = ("/spool/",)
    bench.tick(4)
    bench.settle()
    assert counts_add_up(bench)["written"] == 4
    assert TrialFiles(bench.trial).spill.exists()
    disk.full = ()
    bench.meet()
    bench.settle()
    assert not TrialFiles(bench.trial).spill.exists()
    bench.end()
    assert TrialFiles(bench.trial).numbers == [0, 1, 2, 3]
    assert TrialFiles(bench.trial).torn == 0


def test_a_disk_that_takes_neither_keeps_the_oldest_and_counts_the_newest(bench, disk, monkeypatch):
    """With spool and spill full blocks stay in memory up to the bound; beyond it the newest are lost and counted."""
    bench.exporter._outbox.backlog = 2000
    disk.full = ("/spool/", ".spill.")
    for _ in range(10):
        bench.tick(10)
        bench.exporter._take_answers(0.0, lambda: True)
        bench.turn()
        bench.exporter.settle()
    counts = counts_add_up(bench)
    assert counts["pending"] + counts["lost"]["spill_failed"] == 100
    assert 0 < counts["pending"] < 100
    disk.full = ()
    bench.meet()
    bench.settle()
    bench.end()
    files = TrialFiles(bench.trial)
    assert files.numbers == list(range(counts["pending"]))
    [end] = files.named("zbus_end")
    assert (end["args"]["recorded"], end["args"]["lost"]) == (100, counts["lost"])
    assert files.torn == 0


def test_a_loss_is_said_once_lines_find_a_place_again(bench, disk, monkeypatch):
    """What was dropped stands as zbus_loss in the file, and no number of a block is missing."""
    bench.exporter._outbox.backlog = 2000
    bench.crash()
    disk.full = (".spill.",)
    bench.exporter._outbox.alive = False
    for _ in range(10):
        bench.tick(10)
        bench.exporter.settle()
    lost = counts_add_up(bench)["lost"]["spill_failed"]
    assert lost > 0
    disk.full = ()
    bench.exporter._outbox.secure()
    bench.exporter.settle()
    bench.tick(1)
    bench.exporter.settle()
    files = TrialFiles(bench.trial)
    assert [e["args"]["lost"] for e in files.named("zbus_loss")] == [lost]
    seqs = [e["args"]["seq"] for e in files.named("zbus_block")]
    assert seqs == list(range(len(seqs)))
    assert len(files.numbers) == counts_add_up(bench)["written"] == 101 - lost


def test_the_spill_of_another_process_stays(bench):
    """A process that ended without a sidecar left its spill; its successor in the same file takes back only its own."""
    spill = TrialFiles(bench.trial).spill
    spill.write_bytes(b'{"name":"theirs","ph":"M","pid":1,"tid":1}\n')
    bench.exporter._outbox.alive = False
    bench.tick(3)
    assert spill.read_bytes().count(b'"tick"') == 3
    bench.meet()
    bench.settle()
    assert spill.read_bytes() == b'{"name":"theirs","ph":"M","pid":1,"tid":1}\n'
    assert TrialFiles(bench.trial).numbers == [0, 1, 2]


def test_a_segment_that_cannot_be_taken_back_is_ended(bench, disk, monkeypatch):
    """A torn frame that stays (truncate fails too) does not hide the frames that come after it."""
    disk.full = ("/spool/",)
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "input/output error")))
        bench.tick(2)
        bench.settle()
    disk.full = ()
    bench.meet()
    bench.tick(2)
    bench.exporter._take_answers(0.0, lambda: True)
    wait_until(
        lambda: (
            bench.turn(convert=False),
            bench.exporter._take_answers(0.0, lambda: True),
            not bench.exporter._outbox.held,
        )[2],
        what="the acknowledgement",
    )
    bench.crash()
    bench.start()
    bench.turn()
    assert TrialFiles(bench.trial).numbers == [0, 1, 2, 3]


def test_lines_that_find_no_room_wait_in_the_spool(bench, disk):
    """When only the rank's file is full nothing is refused: lines are made when there is room, in order."""
    disk.full = ("traces_0.jsonl",)
    bench.tick(3)
    bench.settle()
    assert counts_add_up(bench)["written"] == 3
    assert TrialFiles(bench.trial).numbers == [0, 1, 2]  # from the spool
    disk.full = ()
    bench.collector._retry_at = 0.0
    bench.tick(2)
    bench.settle()
    assert [e["args"]["n"] for e in TrialFiles(bench.trial).named("tick")] == [0, 1, 2, 3, 4]
    assert TrialFiles(bench.trial).torn == 0


@pytest.mark.parametrize("converted", [True, False])
def test_a_successor_finishes_what_a_killed_sidecar_took(bench, converted):
    """Blocks that were acknowledged are in the rank's file after a restart, once each."""
    bench.tick(3)

    def acknowledged() -> bool:
        bench.collector.receive()
        bench.exporter._take_answers(0.01, lambda: not bench.exporter._outbox.held)
        return not bench.exporter._outbox.held

    wait_until(acknowledged, what="the sidecar's word on the block")
    if converted:
        bench.turn()
    assert counts_add_up(bench)["written"] == 3
    bench.crash()
    assert TrialFiles(bench.trial).numbers == [0, 1, 2]
    bench.start()
    bench.turn()
    bench.meet()
    bench.tick(1)
    bench.settle()
    files = TrialFiles(bench.trial)
    assert files.numbers == [0, 1, 2, 3]
    assert max(files.blocks.values()) == 1


@pytest.mark.parametrize("cut", [1, 30, 120, 200])
def test_a_block_torn_by_a_killed_sidecar_is_made_whole(bench, cut):
    """A sidecar killed while it wrote a block's lines: its successor takes the torn part back and writes it whole."""
    bench.tick(2)
    bench.settle()
    path = TrialFiles(bench.trial).main
    bench.crash()
    os.truncate(path, path.stat().st_size - cut)
    bench.start()
    bench.turn()
    files = TrialFiles(bench.trial)
    assert files.numbers == [0, 1]
    assert files.torn == 0


def test_an_unknown_stream_is_asked_to_introduce_itself(bench):
    """A sidecar that never heard of a stream stores nothing of it before it knows whose it is."""
    bench.collector._intake.streams.clear()
    bench.tick(1)
    bench.turn()
    bench.exporter._take_answers(0.5, lambda: not bench.exporter._outbox.alive)
    bench.meet()
    bench.settle()
    assert TrialFiles(bench.trial).numbers == [0]


def test_only_one_sidecar_serves_a_trial(bench):
    """A second one is refused while the first lives."""
    with pytest.raises(TrialError, match="already collects"):
        Collector(bench.root, bench.factory)


@pytest.mark.parametrize(
    "change",
    [
        {"role": "../../etc"},
        {"role": "a/b"},
        {"rank": -1},
        {"rank": "x"},
        {"start": -5},
        {"epoch_mono_ns": None},
        {"pid": []},
    ],
)
def test_facts_that_name_a_file_outside_or_make_no_sense_are_refused(bench, change, caplog):
    """The sidecar chooses paths itself, from checked parts; a hostile introduction is counted and not answered."""
    facts = {**bench.writer.opening_facts(), **change}
    before = sorted(path for path in bench.trial.rglob("*") if path.is_file())
    bench.exporter._say(wire.Open("ff" * 8, facts, (0, 0)))
    wait_until(lambda: (bench.turn(), bench.collector.refused)[1] == {"malformed": 1}, what="the refusal")
    assert sorted(path for path in bench.trial.rglob("*") if path.is_file()) == before


def test_garbage_on_the_socket_is_counted_and_harms_nobody(bench, caplog):
    """Frames that are no message, payloads that are no block, negative numbers: counted, and the rest goes on."""
    socket = bench.exporter._socket
    good = wire.Data(bench.writer.source, 77, 3)
    for frames in ([b""], [b"\xc1"], [b"\x93\x02"], [b"x" * 1000, b"y"], [wire.encode(good)]):
        socket.send_multipart(frames)
    socket.send_multipart([wire.encode(wire.Data(bench.writer.source, -1, 1)), b""])
    socket.send_multipart([wire.encode(wire.End(bench.writer.source, 0, b"two\nlines\n"))])
    socket.send_multipart([wire.encode(good), b"\xc1 no block"])
    bench.tick(1)
    bench.settle()
    assert bench.collector.refused["malformed"] == 7
    assert bench.collector.ledger()[0]["malformed"] == 3
    assert TrialFiles(bench.trial).numbers == [0]


def test_records_of_any_kind_arrive_or_are_counted(bench):
    """Lone surrogates, odd names, pairs for worker names and unknown kinds survive the way to the sidecar."""
    now = bench.tracer.now()
    bench.tracer.append((0, "a\ud800", "misc", now, now, {"s": "\udcff"}, None))
    bench.tracer.append((0, 17, "misc", now, now, None, None))
    bench.tracer.append((99, "what"))
    ids = (bytes(16), ("actor", 3), 7, "main", 0, 1, "train")
    bench.tracer.append((5, *ids, now, now, now, now, now, "OK", now, None))
    bench.writer.flush()
    bench.settle()
    files = TrialFiles(bench.trial)
    assert next(e["name"] for e in files.events if e["ph"] == "X").startswith("a")
    assert files.named("queue train")[0]["args"]["worker"] == "actor/3"
    assert bench.collector.ledger()[0]["malformed"] == 1
    assert [(e["args"]["reason"], e["args"]["lost"]) for e in files.named("zbus_loss")] == [("malformed", 1)]
    assert files.torn == 0


@pytest.mark.parametrize(
    "record",
    [
        (0, ["a", "list"], "misc", 1, 2, None, None),
        (0, {"a": "dict"}, "rpc", 1, 2, None, None),
        (0, "args", "rpc", 1, 2, ["kind", "run"], None),
        (0, "args", "rpc", 1, 2, "text", None),
        (0, "run", "rpc", 1, 2, {"kind": ["run"]}, {}),
        (0, ["run"], "rpc", 1, 2, {"kind": "run"}, None),
        (1, "zbus_step", "instr", 1, "g", [7], None),
        (1, "zbus_step", "instr", 1, "g", {"step": 1 << 70}, None),
    ],
)
def test_what_a_lying_process_says_ends_no_sidecar(bench, record):
    """Names and args of wrong kinds are written or counted, and the sidecar goes on for everybody."""
    bench.tracer.append(record)
    bench.writer.flush()
    bench.tick(3)
    bench.settle()
    assert TrialFiles(bench.trial).numbers == [0, 1, 2]
    assert bench.collector.live.busiest() is not None
    assert bench.collector.live.lines(0, 10**12) is not None


def test_large_records_go_in_smaller_blocks_and_one_that_is_too_large_is_counted(bench, monkeypatch):
    """Blocks are halved until a peer takes them; a record that is too large alone is lost and counted."""
    monkeypatch.setattr("zbus.trace.writer._MAX_PAYLOAD", 20_000)
    now = bench.tracer.now()
    for n in range(50):
        bench.tracer.append((1, "tick", "misc", now, "t", {"n": n, "text": "x" * 4000}, None))
    rows = [("op", "profiler", now, now, None)] * 5000
    bench.tracer.append((7, "profiler: thread 1", rows))
    bench.n += 51
    bench.writer.flush()
    bench.settle()
    assert counts_add_up(bench)["lost"] == {"too_large": 1}
    files = TrialFiles(bench.trial)
    assert files.numbers == list(range(50))
    assert files.named("zbus_loss")[0]["args"]["reason"] == "too_large"
    assert len(files.blocks) > 10


def test_a_sidecar_is_dialled_anew_after_bytes_that_are_no_protocol(short_dir):
    """Another service answers at the sidecar's address for a while, so libzmq gives up: the spill still gets there."""
    port = free_port()
    bench = Bench(short_dir, f"tcp://127.0.0.1:{port}")
    try:
        bench.tick(2)
        bench.settle()
        bench.crash()
        meet_a_stranger(port)
        bench.tick(3)
        wait_until(lambda: (bench.exporter.settle(), not bench.exporter._outbox.alive)[1], what="silence")
        bench.start()
        bench.tick(4)
        outbox = bench.exporter._outbox
        wait_until(
            lambda: (bench.settle(), outbox.alive and not bench.exporter._spill.waiting)[1], what="the sidecar again"
        )
        files = TrialFiles(bench.trial)
        assert files.numbers == list(range(9))
        assert max(files.blocks.values()) == 1
        assert counts_add_up(bench)["lost"] == {}
    finally:
        bench.close()


def test_a_loss_is_said_through_the_sidecar(bench):
    """A full ring's loss is a zbus_loss line in the rank's file."""
    ring_size = bench.tracer.ring_size = 16
    bench.tracer.local.__dict__.clear()
    bench.tick(0)
    for _ in range(ring_size + 4):
        bench.tracer.append((1, "tick", "misc", bench.tracer.now(), "t", {"n": bench.n}, None))
        bench.n += 1
    bench.writer.flush()
    bench.settle()
    [loss] = TrialFiles(bench.trial).named("zbus_loss")
    assert (loss["args"]["reason"], loss["args"]["lost"]) == ("ring_full", 4)
    assert counts_add_up(bench)["lost"] == {"ring_full": 4}


def test_the_spool_is_read_segment_by_segment(tmp_path: Path):
    """Segments are ended when large, removed when done with, and found again by a successor."""
    spool = Spool(tmp_path)
    for number in range(5):
        assert spool.append(wire.encode(wire.Ping(number)), b"x" * 1000)
        spool.rotate()
    assert len(list((tmp_path / "spool").iterdir())) == 5
    for number in range(2):
        message, payload = spool.peek()
        assert (message.t1, len(payload)) == (number, 1000)
        spool.take()
    assert len(list((tmp_path / "spool").iterdir())) == 3
    other = Spool(tmp_path)
    assert [message.t1 for message in other.found()] == [2, 3, 4]
    assert other.append(wire.encode(wire.Ping(9)))
    seen = []
    while (found := other.peek()) is not None:
        seen.append(found[0].t1)
        other.take()
    assert seen == [2, 3, 4, 9]
    other.close()
    assert not (tmp_path / "spool").exists()


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_spool_ends_where_it_is_damaged(tmp_path: Path, damage):
    """A cut or changed frame and what follows are not read; what stands before is."""
    spool = Spool(tmp_path)
    for number in range(3):
        spool.append(wire.encode(wire.Ping(number)), b"payload")
    [path] = (tmp_path / "spool").iterdir()
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[:-3])
    else:
        data[-3] ^= 1
        path.write_bytes(data)
    assert [message.t1 for message in Spool(tmp_path).found()] == [0, 1]
    assert list(read_spool(path)) == []


def test_numbers_of_blocks_take_no_room():
    """A set of numbers that is mostly a beginning stays small, whatever the order."""
    numbers = SeqSet()
    for seq in (0, 1, 3, 2, 7, 7, 1):
        numbers.add(seq)
    assert [seq for seq in range(10) if seq in numbers] == [0, 1, 2, 3, 7]
    assert len(numbers) == 5
    assert numbers._more == {7}


def test_a_scan_is_not_fooled_by_lines_that_look_like_markers(tmp_path: Path):
    """Only a marker at the beginning of a line, outside of a block, counts; nonsense in one is skipped."""
    body = b'{"name":"zbus_block","ph":"M","args":{"source":"s","seq":9,"records":0,"bytes":0}}\n'
    head = {"name": "zbus_block", "ph": "M", "args": {"source": "s", "seq": 1, "records": 1, "bytes": len(body)}}
    path = tmp_path / "traces_0.jsonl"
    path.write_bytes(
        b'{"name":"x","ph":"i"}\n{"name":"zbus_block","ph":"M"}\n' + json.dumps(head, separators=(",", ":")).encode()
        + b"\n" + body
    )  # fmt: skip
    found, size = scan_blocks(path)
    assert [seq for seq in range(10) if seq in found["s"]] == [1]
    assert size == path.stat().st_size


@pytest.mark.parametrize("seed", range(int(os.environ.get("ZBUS_TEST_TRACE_SEEDS", "12"))))
def test_whatever_happens_every_record_is_accounted_for(  # noqa: C901  # one story
    short_dir: Path, disk: Disk, monkeypatch, seed: int
):
    """Random crashes, restarts, full disks, delays: recorded = written + pending + lost at every step, none twice."""
    rng = random.Random(seed)
    bench = Bench(short_dir)
    places = ("/spool/", ".spill.", "traces_0.jsonl")
    story = []
    try:
        for _ in range(60):
            act = rng.choice(("tick", "tick", "tick", "turn", "turn", "settle", "crash", "fill", "free", "double"))
            story.append(act)
            if act == "tick":
                bench.tick(rng.randint(1, 30))
            elif act == "turn":
                bench.turn(convert=rng.random() < 0.5)
                bench.exporter._take_answers(0.0, lambda: True)
            elif act == "settle":
                monkeypatch.setattr(bench.exporter, "_next_look", 0.0)
                bench.exporter.settle()
            elif act == "crash":
                if bench.collector is not None:
                    bench.crash()
                if rng.random() < 0.8:
                    bench.start()
            elif act == "fill":
                disk.full = tuple(rng.sample(places, rng.randint(1, 3)))
            elif act == "free":
                disk.full = ()
            elif bench.exporter._outbox.held:
                bench.exporter._outbox.send(rng.choice(list(bench.exporter._outbox.held.values())))
            counts = counts_add_up(bench)
            have = TrialFiles(short_dir).numbers
            assert len(have) == len(set(have))
            assert len(have) >= counts["written"], "a record that counts as written is in no file"
        disk.full = ()
        if bench.collector is None:
            bench.start()
        bench.collector._retry_at = 0.0
        bench.meet()
        wait_until(lambda: (bench.settle(), not TrialFiles(short_dir).spill.exists())[1], what="the end of the spill")
        bench.end()
        counts = counts_add_up(bench)
        files = TrialFiles(short_dir)
        assert counts["pending"] == 0
        assert len(files.numbers) == counts["written"]
        assert max(files.blocks.values(), default=0) <= 1
        assert files.torn == 0
        assert not files.spill.exists()
        [end] = files.named("zbus_end")
        assert end["args"]["recorded"] == bench.n == end["args"]["written"] + sum(end["args"]["lost"].values())
    except BaseException:
        print(f"seed {seed}: {' '.join(story)}")
        raise
    finally:
        disk.full = ()
        bench.close()


def test_the_record_of_a_dead_sidecar_is_asked_ever_more_rarely(bench, monkeypatch):
    """A record that nobody stands behind does not cost a process every second: it asks after 1, 2, 4 … 30 s."""
    monkeypatch.setattr("zbus.trace.export._HELLO_S", 0.01)
    bench.crash()
    waits = []
    for _ in range(7):
        assert control._find_outlet(bench.writer) is None
        waits.append(bench.writer.look_every_s)
    assert waits == [2, 4, 8, 16, 30, 30, 30]
    bench.start()
    monkeypatch.setattr("zbus.trace.export._HELLO_S", 5.0)
    stop = threading.Event()
    server = threading.Thread(target=lambda: bench.collector.serve(stop.is_set))
    server.start()
    found = control._find_outlet(bench.writer)
    stop.set()
    server.join()
    assert found is not None
    assert bench.writer.look_every_s == 1.0
    found.discard()
