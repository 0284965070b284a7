"""Reading a trace root whose sidecar was killed and never came back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from traceview.merge import merge
from waiting import scaled
from zbus.trace import wire
from zbus.trace.blocks import Block, ThreadPart, encode_block
from zbus.trace.spool import SourceLines, Spool

SOURCE = "ab" * 8
RECORDS = 5


class Root:
    """A trace root in which one rank's blocks lie wherever a test puts them. A block has five ticks."""

    def __init__(self, path: Path, source: str = SOURCE, rank: int = 0) -> None:
        self.root = path / "traces"
        self.root.mkdir(exist_ok=True)
        (self.root / ".sidecar.lock").touch()
        facts = {
            "format": 1, "run": "exp/t", "role": "actor", "rank": rank, "start": 0, "incarnation": "1", "host": "here",
            "source": source, "pid": 7 + rank, "boot_id": "b", "time_ns": 1, "run_epoch_wall_ns": 10**18,
            "epoch_mono_ns": 1, "epoch_clock": "shared", "mono_ns": 1, "wall_ns": 10**18, "level": "full",
        }  # fmt: skip
        self.open = wire.Open(source, facts, (0, 0))
        self.lines = SourceLines(self.open, self.root)
        self.main = self.lines.path
        self.spill = self.main.with_name(f"traces_{rank}.spill.jsonl")

    def message(self, seq: int) -> tuple[wire.Data, bytes]:
        """Return a block."""
        records = [
            (1, "tick", "misc", 1000 * (seq * RECORDS + n) + 1, "t", {"n": seq * RECORDS + n}, None)
            for n in range(RECORDS)
        ]
        return wire.Data(self.open.source, seq, RECORDS), encode_block(Block([ThreadPart(9, "main", records)]))

    def end(self, seq: int) -> wire.End:
        """Return the end of the stream."""
        args = {"recorded": seq * RECORDS, "written": seq * RECORDS, "pending": 0, "lost": {}, "by": "process"}
        event = {"name": "zbus_end", "ph": "M", "ts": 9e6, "pid": self.open.facts["pid"], "tid": 0, "args": args}
        return wire.End(self.open.source, seq, json.dumps(event).encode() + b"\n")

    def write(self, path: Path, *seqs: int, end: int | None = None) -> None:
        """Put blocks into a file of lines, and the end of the stream."""
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            if not file.tell():
                file.write(self.lines.opening())
            for seq in seqs:
                file.write(self.lines.lines(*self.message(seq))[0])
            if end is not None:
                file.write(self.lines.end(self.end(end)))

    def spool(self, *seqs: int, end: int | None = None) -> None:
        """Leave blocks in a segment of the spool."""
        spool = Spool(self.root)
        assert spool.append(wire.encode(self.open))
        for seq in seqs:
            message, payload = self.message(seq)
            assert spool.append(wire.encode(message), payload)
        if end is not None:
            assert spool.append(wire.encode(self.end(end)))


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Give an empty trace root."""
    return Root(tmp_path)


def merged(root: Root, *inputs: Path) -> tuple[dict, list[int]]:
    """Merge; return the report and the numbers of all ticks."""
    output = root.root.parent / "out.json"
    report = merge([str(path) for path in inputs or (root.root.parent,)], output).to_dict()
    ticks = [e["args"]["n"] for e in json.loads(output.read_text())["traceEvents"] if e["name"] == "tick"]
    return report, sorted(ticks)


def numbers(blocks: int) -> list[int]:
    """Return the numbers of that many blocks."""
    return list(range(blocks * RECORDS))


def state_of(root: Root) -> dict[str, bytes]:
    """Return every file below the root."""
    return {str(path): path.read_bytes() for path in root.root.rglob("*") if path.is_file()}


def test_blocks_in_file_spill_and_spool_are_read_once(root):
    """Each place has some that others have too; every block counts once, nothing is incomplete, no input changes."""
    root.write(root.main, 0, 1)
    root.write(root.spill, 1, 3)
    root.spool(1, 2, 3, 4, end=5)
    before = state_of(root)
    report, ticks = merged(root)
    assert ticks == numbers(5)
    assert report["problems"] == {"spool_read": 3}
    assert not report["incomplete"]
    assert [p["complete"] for p in report["processes"]] == [True]
    assert state_of(root) == before


def test_a_process_that_stands_in_the_spool_alone_is_read(root):
    """No line of it was written yet: its role, rank and name come from the spool."""
    root.spool(0, 1, end=2)
    report, ticks = merged(root)
    assert ticks == numbers(2)
    assert [(p["role"], p["rank"], p["complete"]) for p in report["processes"]] == [("actor", 0, True)]


@pytest.mark.parametrize("cut", [1, 50, 300])
def test_a_block_torn_in_the_file_is_taken_from_the_spool(root, cut):
    """The sidecar was killed while it wrote the block's lines: no line is torn, missing or doubled."""
    root.write(root.main, 0, 1)
    os.truncate(root.main, root.main.stat().st_size - cut)
    root.spool(1, end=2)
    report, ticks = merged(root)
    assert ticks == numbers(2)
    assert report["problems"] == {"spool_read": 2}


@pytest.mark.parametrize("kept", [1, 10, 20, 60, 100, 200])
def test_a_marker_torn_in_the_file_costs_nothing(root, kept):
    """The sidecar was killed after the first bytes of a block: neither a merge nor its successor sees a torn line."""
    root.write(root.main, 0)
    whole = root.main.stat().st_size
    root.write(root.main, 1)
    os.truncate(root.main, whole + kept)
    root.spool(1, end=2)
    report, ticks = merged(root)
    assert ticks == numbers(2)
    assert report["problems"] == {"spool_read": 2}
    assert not report["incomplete"]
    command = [sys.executable, "-m", "traceview", "collect", "--finish", str(root.root.parent)]
    subprocess.run(command, check=True, timeout=scaled(30), capture_output=True)
    report, ticks = merged(root)
    assert ticks == numbers(2)
    assert report["problems"] == {}


@pytest.mark.parametrize("kept", [10, 60])
def test_a_torn_marker_whose_block_is_nowhere_is_told(root, kept):
    """Without a spool nobody can say what the torn line began: it is told as a line that was cut off."""
    root.write(root.main, 0)
    whole = root.main.stat().st_size
    root.write(root.main, 1)
    os.truncate(root.main, whole + kept)
    report, ticks = merged(root)
    assert ticks == numbers(1)
    assert report["problems"]["truncated_tail"] == 1
    assert report["incomplete"]


def test_a_torn_block_that_is_nowhere_else_keeps_its_whole_lines(root):
    """What can be read of it is read, and the torn line is told."""
    root.write(root.main, 0, 1)
    os.truncate(root.main, root.main.stat().st_size - 3)
    report, ticks = merged(root)
    assert ticks == numbers(2)[:-1]
    assert report["problems"]["truncated_tail"] == 1
    assert report["incomplete"]


def test_missing_blocks_are_named_and_refused_by_strict(root, tmp_path):
    """Numbers that stand nowhere are losses that nobody counted: the file and the numbers are told, and exit is 7."""
    root.write(root.main, 0, 1, 4)
    root.spool(6, end=8)
    command = [sys.executable, "-m", "traceview", "merge", str(tmp_path), "--strict"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=scaled(30))
    assert ran.returncode == 7
    assert "actor/traces_0.jsonl lacks blocks 2, 3, 5, 7" in ran.stderr
    assert "missing_blocks 4" in ran.stderr


def test_several_processes_and_segments(tmp_path):
    """Segments are read in their order, and each process gets its own blocks."""
    first, second = Root(tmp_path), Root(tmp_path, "cd" * 8, rank=1)
    first.write(first.main, 0)
    for seq in range(1, 12):
        first.spool(seq)
        second.spool(seq - 1)
    report, ticks = merged(first)
    assert Counter(ticks) == Counter([*numbers(12), *numbers(11)])
    assert report["problems"] == {"no_end": 2, "spool_read": 22}


def test_two_processes_of_one_file_are_told_apart(tmp_path):
    """A program that was run twice by hand wrote one file: what the spool has of each stays with its process."""
    first, second = Root(tmp_path), Root(tmp_path, "cd" * 8)
    first.write(first.main, 0)
    first.spool(1, end=2)
    second.spool(0, end=1)
    report, ticks = merged(first)
    assert Counter(ticks) == Counter([*numbers(2), *numbers(1)])
    assert [(p["events"], p["complete"]) for p in report["processes"]] == [(2 * RECORDS, True), (RECORDS, True)]


def test_one_file_alone_brings_what_the_spool_has_of_it(tmp_path):
    """Named by itself, a file is completed too; other processes of the spool stay out."""
    first, second = Root(tmp_path), Root(tmp_path, "cd" * 8, rank=1)
    first.write(first.main, 0)
    first.spool(1)
    second.spool(0, 1)
    assert merged(first, first.main)[1] == numbers(2)


def test_stats_and_validate_see_it_too(root, tmp_path):
    """All commands that read a trial read the spool."""
    root.write(root.main, 0)
    root.spool(1, end=2)
    stats = [sys.executable, "-m", "traceview", "stats", str(tmp_path), "--json"]
    told = json.loads(subprocess.run(stats, capture_output=True, text=True, timeout=scaled(30)).stdout)
    assert told["problems"] == {"spool_read": 2}
    validate = [sys.executable, "-m", "traceview", "validate", str(tmp_path), "--json"]
    told = json.loads(subprocess.run(validate, capture_output=True, text=True, timeout=scaled(30)).stdout)
    assert [row["complete"] for row in told["files"]] == [True]


def test_a_loss_that_only_the_end_tells_is_named(root, tmp_path):
    """A process that found room only at its very end says there what it lost: strict refuses that too."""
    root.write(root.main, 0, 1)
    end = json.loads(root.end(2).event)
    end["args"].update(recorded=13, lost={"spill_failed": 3})
    with root.main.open("a") as file:
        file.write(json.dumps(end) + "\n")
    report, _ = merged(root)
    assert report["problems"] == {"lost": 3}
    assert report["incomplete"]
    assert report["processes"][0]["lost"] == {"spill_failed": 3}
